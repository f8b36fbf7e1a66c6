"""What is learned: classes of records, and the number by which epochs are compared on validation."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millstream.collection import Collection
from millstream.dataset.labels import LABEL
from millstream.model.auroc import auroc
from millstream.store.read_batch import ReadBatch

SLICE = 1 << 16  # records at once
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
        if not self.is_balanced:
            return torch.ones(self.num_classes)
        counts = count_labels(train, self.num_classes)[:-1]
        even = counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1))
        return torch.tensor(np.where(counts > 0, even, 1.0), dtype=torch.float32)


def labels_of(collection: Collection, mates: int = 1) -> Labels:
    """The label of every record, or of the first of each `mates`; -1 where there is none."""
    return np.concatenate([np.empty(0, np.int64), *label_slices(collection)])[::mates]


def count_labels(collection: Collection, num_classes: int) -> Labels:
    """Records of each class, and last those of none."""
    counts = np.zeros(num_classes + 1, np.int64)
    for labels in label_slices(collection):
        counts += np.bincount(np.where(labels < 0, num_classes, labels), minlength=num_classes + 1)
    return counts


def label_slices(collection: Collection) -> Iterator[Labels]:
    """The labels of all records, some at a time; -1 where there is none."""
    for first in range(0, len(collection), SLICE):
        found: Any = collection.fetch(np.arange(first, min(first + SLICE, len(collection))), [LABEL])
        columns: Any = found.columns if isinstance(found, ReadBatch) else found
        labels: Any = columns[LABEL]
        if isinstance(labels, list):
            labels = [-1 if label is None else label for label in cast("list[int | None]", labels)]
        yield np.asarray(labels, np.int64)


def _auroc(labels: Labels, outcome: Outcome) -> float:
    return auroc(labels, outcome["score"].astype(np.float64))


DETECTION = Task(2, "AUROC", _auroc)
