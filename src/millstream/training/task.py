"""The task that models learn, what training needs from a model or net, and the resources a model may use."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from millstream.core.batches import fetch_batch
from millstream.core.collection import Collection
from millstream.core.split import LABEL
from millstream.training.log import key_of

# B batch, N rows, D features

Batch = Mapping[str, Tensor]
_COLUMNS = 1024  # of `Moments` at once: all at once leave the cache, and take ten times as long
PASS_BYTES = 4 << 20  # per activation: larger ones leave the cache, and malloc returns their pages every time
SMALLEST = 1e-5  # a smaller standard deviation is a constant, which must not be scaled up


class Net(nn.Module):
    """Trained by gradients. Subclasses give `logits`, `loss`, `loss_name` and `num_rows`; the rest has defaults."""

    lr = 2e-3  # learning rate, unless the settings have one
    at_most = 64  # records per pass; fewer if they would not fit in the cache
    passes = 1  # of a batch while scoring; `answer` of the task splits it
    most_records = 1 << 62  # the maximum over all epochs
    clips = True  # whether to clip its gradient norm
    loss_name: str  # of `loss` in the log

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits, and further loss terms by name (in training; already weighted)."""
        raise NotImplementedError

    def loss(self, logits: Tensor, target_B: Tensor, weight_B: Tensor) -> Tensor:
        raise NotImplementedError

    def num_rows(self, batch: Batch) -> int:
        """Rows of its largest activation, each `width` wide."""
        raise NotImplementedError

    @property
    def needs_preparation(self) -> bool:
        """Whether `prepare` has to be called before the first step."""
        return False

    def prepare(self, batches: Iterable[Batch]) -> None:
        """One pass over the training split, with labels, before the first step: fit a scaler, count features."""

    def warm(self, share: float) -> None:
        """Called before each step with the completed share of the warm-up (the first fifth of training), 0 to 1."""

    def measures(self, batch: Batch) -> dict[str, Tensor]:
        """Values to log for a batch of the validation split, besides the scores."""
        return {}

    def forward(self, batch: Batch, target_B: Tensor, weight_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and its terms by name."""
        logits, terms = self.logits(batch)
        loss = self.loss(logits, target_B, weight_B)
        parts = {self.loss_name: loss.detach(), **{name: term.detach() for name, term in terms.items()}}
        return loss + sum(terms.values()), parts

    def optimizer(self, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=lr, weight_decay=weight_decay)


def count_parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


@dataclass
class Moments:
    """Mean and variance of rows that come in batches; each row belongs to one of several groups, or all to one."""

    count: Tensor | None = None  # [groups]
    mean: Tensor | None = None  # [groups, dim]
    spread: Tensor | None = None  # sum of squared distances from the mean

    def add(self, rows_ND: Tensor, group_N: Tensor | None = None, *, num_groups: int = 1) -> None:
        """Merge a batch (Chan et al.) in float64: plain sums of squares lose all precision for a large mean."""
        if group_N is None:
            count = torch.full((1, 1), len(rows_ND), dtype=torch.float64)
            columns = torch.split(rows_ND, _COLUMNS, dim=1)  # pyright: ignore[reportUnknownMemberType]
            parts = [_moments(rows_NC) for rows_NC in columns]
            mean, spread = (torch.cat(some)[None] for some in zip(*parts, strict=True))
        else:
            rows = rows_ND.double()
            empty = torch.zeros(num_groups, rows.shape[1], dtype=torch.float64)
            count = torch.bincount(group_N, minlength=num_groups).double()[:, None]
            mean = empty.index_add(0, group_N, rows) / count.clamp(min=1)
            spread = empty.index_add(0, group_N, (rows - mean[group_N]).square())
        if self.count is None or self.mean is None or self.spread is None:
            self.count, self.mean, self.spread = count, mean, spread
            return
        both = (self.count + count).clamp(min=1)
        step = mean - self.mean
        self.spread = self.spread + spread + step.square() * self.count * count / both
        self.mean = self.mean + step * count / both
        self.count = self.count + count

    def scaling(self) -> tuple[Tensor, Tensor]:
        """The mean to subtract and the factor to multiply by, float32 [groups, dim]."""
        assert self.count is not None and self.mean is not None and self.spread is not None, "no rows were added"
        deviation = (self.spread / self.count.clamp(min=1)).sqrt()
        return self.mean.float(), (1 / torch.where(deviation < SMALLEST, 1.0, deviation)).float()


def _moments(rows_NC: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows_NC.double()
    mean = rows.sum(0) / max(len(rows), 1)
    return mean, (rows - mean).square_().sum(0)


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
    is_ragged: bool = False  # whether `answer` gives values per part of a record, so that each rank scores all records
    group_size: int = 1  # neighbouring records that belong together and get one prediction

    @property
    def key(self) -> str:
        """The measure in the log."""
        return key_of(self.measure)

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
    # Optional: `probabilities = True` if its scores are probabilities, and `parameters`, their number. And a static
    # method `fit_together(models, whole, folds)`: it fits a model per fold (train, val) of `whole` in the same passes.

    def fit(self, train: Collection, val: Collection) -> None: ...


@dataclass(frozen=True)
class FitResources:
    """What a model may use: a random seed, and a memory budget in bytes for the data it holds."""

    seed: int = 0
    memory: int = 500_000_000
    batch_size: int = 256  # for models whose result does not depend on it
    threads: int | None = None  # of its loaders


def records_at_once(net: Net, batch: Batch, count: int) -> int:
    """How many records go through the net in one pass, if `count` like them are in this batch."""
    row_bytes = 4 * net.width * net.num_rows(batch) / count
    return max(1, min(net.at_most, int(PASS_BYTES / max(row_bytes, 1))))


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
