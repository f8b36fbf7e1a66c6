"""What is learned: classes of records, and the number by which epochs are compared on validation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millstream.collection import Collection
from millstream.dataset.labels import LABEL
from millstream.model.auroc import auroc

Labels = NDArray[np.int64]
Outcome = Mapping[str, NDArray[np.generic]]  # what a net says of every record, by name


@dataclass(frozen=True)
class Task:
    """Records have a `label` from 0 to `num_classes` - 1. `judge` says how good an outcome is: higher is better."""

    num_classes: int
    measure: str  # what `judge` gives, as people write it
    judge: Callable[[Labels, Outcome], float]
    is_balanced: bool = True  # whether classes count the same, however many records they have
    mates: int = 1  # so many neighbouring records are one thing, and get one outcome

    @property
    def key(self) -> str:
        """The measure in the log."""
        return f"val_{self.measure.lower().replace(' ', '_')}"

    def weights(self, train: Collection) -> Tensor:
        """How much a record of each class counts; 1 in the mean."""
        counts = np.zeros(self.num_classes, np.int64)
        for chunk in train.column(LABEL).chunks:
            counts += np.bincount(chunk.drop_null().to_numpy().astype(np.int64), minlength=self.num_classes)
        if not self.is_balanced:
            return torch.ones(self.num_classes)
        even = counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1))
        return torch.tensor(np.where(counts > 0, even, 1.0), dtype=torch.float32)


def labels_of(collection: Collection, mates: int = 1) -> Labels:
    """The label of every record, or of the first of each `mates`; -1 where there is none."""
    column = collection.column(LABEL)
    return column.fill_null(-1).to_numpy().astype(np.int64)[::mates]


def _auroc(labels: Labels, outcome: Outcome) -> float:
    return auroc(labels, outcome["score"].astype(np.float64))


DETECTION = Task(2, "AUROC", _auroc)
