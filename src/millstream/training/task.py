"""The task that models learn, what training needs from a model, and the resources a model may use."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millstream.core.batches import fetch_batch
from millstream.core.collection import Collection
from millstream.core.features import Feature
from millstream.core.labelled import LABEL
from millstream.training.net import Batch, Net

SLICE = 1 << 16  # records per step
Arrays = dict[str, NDArray[np.generic]]
Labels = NDArray[np.int64]
Outcome = Mapping[str, NDArray[np.generic]]  # the predictions for every record, by name


@dataclass(frozen=True)
class Task:
    """Records have a `label` from 0 to `num_classes` - 1. `judge` scores an outcome: higher is better."""

    num_classes: int
    measure: str  # what `judge` computes, for people
    judge: Callable[[Labels, Outcome], float]
    answer: Callable[[Net, Batch], Mapping[str, Tensor]]  # one value per record, or per group of them, by name
    is_balanced: bool = True  # whether classes count the same, however many records they have
    group_size: int = 1  # so many neighbouring records belong together and get one prediction

    @property
    def key(self) -> str:
        """The measure in the log."""
        return f"val_{self.measure.lower().replace(' ', '_')}"

    def weights(self, train: Collection) -> Tensor:
        """The weight of a record of each class; 1 on average."""
        if not self.is_balanced:
            return torch.ones(self.num_classes)
        counts = count_labels(train, self.num_classes)[:-1]
        even = counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1))
        return torch.tensor(np.where(counts > 0, even, 1.0), dtype=torch.float32)


class Model(Protocol):
    """Learns from `train` and chooses hyperparameters on `val`. It reads both through `ms.Loader`."""

    fields: Sequence[str]
    """The fields of a record that it reads; it cannot train on records that lack one."""
    arrays: Arrays
    """Everything `fit` learned: saved with the run, and restored before it scores other records."""
    chosen: dict[str, object]
    """What was chosen on the validation split, as JSON, for the report."""
    # Optional: `probabilities = True` if its scores are probabilities, and `parameters`, their number.

    def fit(self, train: Collection, val: Collection) -> None: ...


@dataclass(frozen=True)
class FitResources:
    """What a model may use: a random seed, and a memory budget in bytes for the data it holds."""

    seed: int = 0
    memory: int = 500_000_000
    batch_size: int = 256  # for models whose result does not depend on it


def fitting_batch(collection: Collection, features: Sequence[Feature], *, memory: int, at_most: int) -> int:
    """`at_most`, or fewer if records are so large that a few batches would fill the memory."""
    some = np.unique(np.linspace(0, len(collection) - 1, 32).astype(np.int64)) if len(collection) else np.zeros(0, int)
    named = [collection.field_names if feature.fields is None else feature.fields for feature in features]
    names = list(dict.fromkeys(name for names in named for name in names))
    largest = int(collection.sizes(some, names).max(initial=1))
    return max(1, min(at_most, memory // 8 // largest))


def labels_of(collection: Collection, group_size: int = 1) -> Labels:
    """The label of every record, or of the first in each group; -1 if there is none."""
    return np.concatenate([np.empty(0, np.int64), *label_slices(collection)])[::group_size]


def count_labels(collection: Collection, num_classes: int) -> Labels:
    """Records per class, and last those without a class."""
    counts = np.zeros(num_classes + 1, np.int64)
    for labels in label_slices(collection):
        counts += np.bincount(np.where(labels < 0, num_classes, labels), minlength=num_classes + 1)
    return counts


def label_slices(collection: Collection) -> Iterator[Labels]:
    """The labels of all records, in slices; -1 if there is none."""
    for first in range(0, len(collection), SLICE):
        numbers = np.arange(first, min(first + SLICE, len(collection)))
        labels = fetch_batch(collection, numbers, [LABEL]).columns[LABEL]
        if isinstance(labels, list):
            labels = [-1 if label is None else label for label in cast("list[int | None]", labels)]
        yield np.asarray(labels, np.int64)
