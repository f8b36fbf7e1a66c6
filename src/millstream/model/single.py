"""Detectors that are one number a record: its length, its log-prob. All they learn is which way it points."""

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from millstream.collection import Collection
from millstream.dataset.batch import Feature
from millstream.model.auroc import auroc
from millstream.model.detector import Arrays, Means, Scores
from millstream.model.reading import labels_of, reader


class Single:
    """The mean of all numbers that a feature gives of a record, turned so that higher means wrong on `train`.

    A record that has none gets the mean of the training part.
    """

    probabilities = False

    def __init__(self, means: Means, *, feature: Feature, key: str) -> None:
        self.fields: Sequence[str] = list(feature.fields or ())
        self.arrays: Arrays = {}
        self.chosen: dict[str, object] = {}
        self._means = means
        self._feature = feature
        self._key = key

    def fit(self, train: Collection, val: Collection) -> None:
        labels = labels_of(train, "training")
        values = self._values(train)
        known = ~np.isnan(values)
        if not known.any():
            raise ValueError(f"none of the {len(values)} records of the training part has a {self._key!r}")
        found = auroc(labels[known], values[known])
        direction = -1 if found < 0.5 else 1
        self.arrays = {"direction": np.array(direction), "mean": np.array(values[known].mean())}
        self.chosen = {"direction": direction, "train_auroc": max(found, 1 - found)}

    def score(self, collection: Collection) -> Scores:
        values = self._values(collection)
        filled = np.where(np.isnan(values), self.arrays["mean"], values)
        return filled * int(self.arrays["direction"])

    def _values(self, collection: Collection) -> Scores:
        batches = reader(collection, self._feature, self._means)
        return np.concatenate([np.zeros(0), *(_means(batch[self._key]) for batch in batches)])


def _means(column: object) -> NDArray[np.float64]:
    """A column of a batch, a tensor or a list in which there may be None, as one number a record."""
    if isinstance(column, Tensor):
        return column.double().flatten(1).mean(1).numpy() if column.ndim > 1 else column.double().numpy()
    return np.array(cast("list[float | None]", column), np.float64)  # NaN for None
