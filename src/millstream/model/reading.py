"""How baselines read: batches of a collection within `means.memory`, all of it by one process."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millstream.collection import Collection
from millstream.dataset.batch import Feature
from millstream.dataset.features import fields
from millstream.dataset.labels import LABEL
from millstream.loader.loader import Loader
from millstream.model.detector import Means

_THREADS = 2


def reader(collection: Collection, feature: Feature, means: Means, *, shuffle: bool = False) -> Loader:
    """Batches of the feature in the order of the records; or shuffled, anew in every epoch, and with `label`."""
    return Loader(
        collection,
        batch_size=fitting_batch(collection, [feature], memory=means.memory, at_most=means.batch_size),
        features=[feature, fields(LABEL)] if shuffle else feature,
        seed=means.seed,
        memory=means.memory,
        order="exact" if shuffle else "none",
        threads=_THREADS,
        rank=0,
        world=1,  # in a job of several processes one of them runs the baselines
    )


def labels_of(collection: Collection, part: str) -> NDArray[np.int64]:
    """The labels of a part, in its order; there have to be both."""
    labels = collection.column(LABEL).to_numpy().astype(np.int64)
    found: list[int] = np.unique(labels).tolist()
    if found != [0, 1]:
        raise ValueError(
            f"the {part} part has {len(labels)} records with the labels {found}, expected both 0 (right) and 1 "
            "(wrong). Label more records, or split them otherwise"
        )
    return labels


def fitting_batch(collection: Collection, features: Sequence[Feature], *, memory: int, at_most: int) -> int:
    """`at_most`, or fewer where records are so large that the few batches held at once would fill the memory."""
    some = np.unique(np.linspace(0, len(collection) - 1, 32).astype(np.int64)) if len(collection) else np.zeros(0, int)
    named = [collection.field_names if feature.fields is None else feature.fields for feature in features]
    names = list(dict.fromkeys(name for names in named for name in names))
    largest = int(collection.sizes(some, names).max(initial=1))
    return max(1, min(at_most, memory // 8 // largest))
