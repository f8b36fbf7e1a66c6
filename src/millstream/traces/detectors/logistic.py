"""Detectors that are not nets: the protocol, and many logistic regressions in one streaming pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from millstream.core.collection import Collection
from millstream.core.features import Feature, fields
from millstream.core.loader import Loader
from millstream.core.split import LABEL
from millstream.errors import NotFinite
from millstream.report.measures import auroc
from millstream.training.task import Arrays, FitResources, Labels, Model, Moments, fitting_batch, labels_of

# The detector protocol, and how detectors that are not nets read a collection. Use your own detector with
# `model=package.module:Class`.


Scores = NDArray[np.float64]
_THREADS = 2


class Detector(Model, Protocol):
    """Distinguishes wrong answers (label 1) from right ones (label 0). Constructed as `Class(resources)`.

    Records have the fields of their store and `label`. A detector must stay within the budget `resources.memory`.
    """

    def score(self, collection: Collection) -> Scores:
        """One number per record, in the order of the collection; higher: more likely wrong."""
        ...


def reader(
    collection: Collection, feature: Feature, resources: FitResources, *, shuffle: bool = False, labels: bool = False
) -> Loader:
    """Batches of the feature in record order, or with `shuffle` in a new random order every epoch; with `label`."""
    return Loader(
        collection,
        batch_size=fitting_batch(collection, [feature], memory=resources.memory, at_most=resources.batch_size),
        features=[feature, fields(LABEL)] if labels else feature,
        seed=resources.seed,
        memory=resources.memory,
        order="exact" if shuffle else "none",
        threads=resources.threads or _THREADS,
        rank=0,
        world=1,  # in a distributed job one process runs the baselines
    )


def binary_labels(collection: Collection, split: str) -> Labels:
    """The labels of a split, in record order; ValueError unless both occur."""
    return _with_both(labels_of(collection), split, "records")


def _with_both(labels: Labels, split: str, what: str) -> Labels:
    found: list[int] = np.unique(labels).tolist()
    if found != [0, 1]:
        raise ValueError(
            f"the {split} split has {len(labels)} {what} with the labels {found}; it needs both 0 (right) and 1 "
            "(wrong). Label more records, or split them differently"
        )
    return labels


# B batch, G groups, F features of a group, W weights = F + 1 (the last is the bias), K strengths of the penalty
# M rows of a step, N records

STEP_ROWS = 32
_CHUNK = 128  # of the memory: the inputs of parts of records that are standardised at once, which takes several copies
_RATE = 0.02
_RECENT = 8  # weight of recent steps in the mean over all steps
STRENGTHS = (0.001, 0.01, 0.1, 1.0, 10.0)  # C: smaller values penalise large weights more
_NUM_STEPS, _FEW_EPOCHS, _MIN_EPOCHS = 1500, 10, 5
_PATIENCE = 0.3  # fraction of the epochs


@dataclass(frozen=True)
class Inputs:
    """The feature to load, and how to turn it into inputs [B, G, F]; rows may be records, or parts of them."""

    feature: Feature
    groups: Callable[[Mapping[str, object]], Tensor]
    axis: str = ""  # name of the groups in `chosen`; empty if there is only one
    names: Sequence[object] | None = None  # of the groups; default: their indices
    labels: Callable[[Mapping[str, object]], Tensor] | None = None  # of rows, -1 for those to leave out; of the records
    step_rows: int = STEP_ROWS

    def labelled(self, batch: Mapping[str, object], memory: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The labelled rows of a batch and their labels; of parts of records in random order, in chunks."""
        if self.labels is None:
            yield self.groups(batch), cast(Tensor, batch[LABEL])
            return
        label_B, rows_BGF = self.labels(batch), self.groups(batch)
        known = (label_B >= 0).nonzero()[:, 0]
        random = torch.Generator().manual_seed(int(torch.as_tensor(batch["numbers"]).sum()))
        size = max(1, memory // (_CHUNK * 4 * max(1, rows_BGF[0].numel()))) if len(known) else 1
        for some in split_rows(known[torch.randperm(len(known), generator=random)], size):
            yield rows_BGF[some].float(), label_B[some]


class Logistic:
    """The regression whose group, strength and epoch are best on validation."""

    probabilities = True

    def __init__(self, resources: FitResources, *, inputs: Inputs) -> None:
        self.fields: Sequence[str] = list(inputs.feature.fields or ())
        self.arrays: Arrays = {}
        self.chosen: dict[str, object] = {}
        self._resources = resources
        self._inputs = inputs

    def fit(self, train: Collection, val: Collection) -> None:
        self.arrays, self.chosen = fit_logistic(train, val, inputs=self._inputs, resources=self._resources)

    def score(self, collection: Collection) -> Scores:
        return score_logistic(collection, self.arrays, inputs=self._inputs, resources=self._resources)


def fit_logistic(
    train: Collection, val: Collection, *, inputs: Inputs, resources: FitResources
) -> tuple[Arrays, dict[str, object]]:
    """The best regression, as input of `score_logistic`, and the hyperparameters chosen."""
    if inputs.labels is None:
        binary_labels(train, "training")
        binary_labels(val, "validation")
    regressions, num_rows = _prepared(train, inputs, resources)
    shuffled = reader(train, inputs.feature, resources, shuffle=True, labels=True)
    in_order = reader(val, inputs.feature, resources, labels=True)
    arrays: Arrays = {}
    chosen: dict[str, object] = {}
    num_epochs, sweeps = _duration(num_rows, inputs.step_rows)
    num_val_bytes = 4 * regressions.num_outputs * num_rows * len(val) // len(train)  # about
    every = 1 if inputs.labels is None else ceil(num_val_bytes / (resources.memory // 8))
    best, last_good = 0.0, 0
    for epoch in range(num_epochs):
        for batch in shuffled:
            for rows_BGF, label_B in inputs.labelled(batch, resources.memory):
                regressions.learn(rows_BGF, label_B, sweeps=sweeps, step_rows=inputs.step_rows)
        val_labels, logits_NGK = _validated(in_order, inputs, regressions, every=every, memory=resources.memory)
        # Later epochs are closer to the solution: an earlier one must be better by more than this, which is small
        # compared with the noise of the validation split (about 0.5 / sqrt).
        tolerance = 0.1 / len(val_labels) ** 0.5
        auroc_GK = _aurocs(val_labels, logits_NGK)
        best = max(best, float(auroc_GK.max()))
        if auroc_GK.max() >= best - tolerance:
            last_good = epoch
            group, strength = divmod(int(auroc_GK.argmax()), len(STRENGTHS))
            arrays = _kept(regressions, group, strength)
            chosen = _described(inputs, auroc_GK, group, strength) | {"epoch": epoch + 1}
        if epoch - last_good > _PATIENCE * num_epochs:
            break
    return arrays, chosen


def _validated(
    batches: Loader, inputs: Inputs, regressions: "Regressions", *, every: int, memory: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The labels of rows, or of every so many that fit in memory, and their logits."""
    labels: list[Tensor] = []
    logits: list[Tensor] = []
    for batch in batches:
        for rows_BGF, label_B in inputs.labelled(batch, memory):
            labels.append(label_B[::every])
            logits.append(regressions.logits(rows_BGF[::every]))
    found = torch.cat([torch.empty(0, dtype=torch.long), *labels]).numpy()
    return _with_both(found, "validation", "rows"), torch.cat(logits).numpy()


def score_logistic(collection: Collection, arrays: Arrays, *, inputs: Inputs, resources: FitResources) -> Scores:
    """The probability that each record is wrong, in the order of the collection."""
    group = int(arrays["group"])
    mean_F, factor_F, weights_F = (as_tensor(arrays[name]) for name in ("mean", "factor", "weights"))
    logits = [
        ((rows_BGF[:, group] - mean_F) * factor_F) @ weights_F
        for rows_BGF in _rows(reader(collection, inputs.feature, resources), inputs)
    ]
    return torch.sigmoid(torch.cat([torch.zeros(0), *logits]).double() + float(arrays["bias"])).numpy()


class Regressions:
    """G x K regressions, each on the standardised features of its group and under its own penalty.

    Adam at a constant rate, without a schedule, so that training may stop after any epoch. `weights_GWK` is the mean
    over the steps, which converges even if the steps do not.
    """

    def __init__(
        self, moments: Moments, *, num_groups: int, penalties: Tensor, class_weights: Tensor, seed: int
    ) -> None:
        self.mean_GF, self.factor_GF = _scaling(moments, num_groups)
        width = self.mean_GF.shape[1] + 1
        self._penalty_WK = penalties.repeat(width, 1)
        self._penalty_WK[-1] = 0  # the bias is not penalised
        self._class_weights = class_weights  # of label 0 and label 1
        self._random = torch.Generator().manual_seed(seed)
        self.weights_GWK = torch.zeros(num_groups, width, len(penalties))
        self._last_GWK = self.weights_GWK.clone()
        self._adam = torch.optim.Adam([self._last_GWK], lr=_RATE, fused=True)  # a small step takes half the time
        self._num_steps = 0

    @property
    def num_outputs(self) -> int:
        """Logits per row."""
        return self.weights_GWK.shape[0] * self.weights_GWK.shape[2]

    def learn(self, rows_BGF: Tensor, label_B: Tensor, *, sweeps: int = 1, step_rows: int = STEP_ROWS) -> None:
        """Take steps on chunks of one batch; every sweep covers all its rows."""
        x_GBW = self._standardised(rows_BGF)
        target_B, weight_B = label_B.float(), self._class_weights[label_B]
        count = ceil(len(label_B) / step_rows)  # in equal chunks: a step on two rows would be mostly noise
        for _ in range(sweeps):
            for row_M in torch.randperm(len(label_B), generator=self._random).tensor_split(count):
                self._step(x_GBW[:, row_M], target_B[row_M, None], weight_B[row_M, None] / len(row_M))

    def logits(self, rows_BGF: Tensor) -> Tensor:
        """[B, G, K]"""
        return (self._standardised(rows_BGF) @ self.weights_GWK).transpose(0, 1)

    def _step(self, x_GMW: Tensor, target_M1: Tensor, weight_M1: Tensor) -> None:
        error_GMK = (torch.sigmoid(x_GMW @ self._last_GWK) - target_M1) * weight_M1
        self._last_GWK.grad = x_GMW.transpose(1, 2) @ error_GMK + self._last_GWK * self._penalty_WK
        self._adam.step()  # pyright: ignore[reportUnknownMemberType]
        self._num_steps += 1
        self.weights_GWK.lerp_(self._last_GWK, (1 + _RECENT) / (self._num_steps + _RECENT))

    def _standardised(self, rows_BGF: Tensor) -> Tensor:
        x_GBF = ((rows_BGF - self.mean_GF) * self.factor_GF).transpose(0, 1)
        return functional.pad(x_GBF, (0, 1), value=1.0)


def split_rows(rows: Tensor, sizes: int | list[int]) -> Sequence[Tensor]:
    """Consecutive rows of this many, or of these sizes."""
    return cast("Sequence[Tensor]", torch.split(rows, sizes))  # pyright: ignore[reportUnknownMemberType]


def as_tensor(array: NDArray[np.generic]) -> Tensor:
    """A tensor that shares the memory, unless it is read-only, as in a mapped file."""
    writeable = array if array.flags.writeable else array.copy()
    return torch.from_numpy(writeable)  # pyright: ignore[reportUnknownMemberType, reportArgumentType]


def _scaling(moments: Moments, num_groups: int) -> tuple[Tensor, Tensor]:
    """The mean to subtract and the factor to multiply by, [G, F].

    Inputs have any scale, so a feature is constant if its deviation is tiny relative to its mean.
    """
    assert moments.count is not None and moments.mean is not None and moments.spread is not None, "no rows were added"
    deviation = (moments.spread / moments.count).sqrt()
    constant = deviation <= 1e-6 * moments.mean.abs()
    factor = 1 / deviation.masked_fill(constant, 1.0)
    return moments.mean.float().view(num_groups, -1), factor.float().view(num_groups, -1)


def _prepared(train: Collection, inputs: Inputs, resources: FitResources) -> tuple[Regressions, int]:
    """Regressions with the scaling and the class weights of the training split, and the number of its rows."""
    moments, num_groups, counts = Moments(), 1, np.zeros(2, np.int64)
    for batch in reader(train, inputs.feature, resources, labels=True):
        if inputs.labels is None:
            check_finite(inputs.groups(batch), batch, inputs.feature)
        for rows_BGF, label_B in inputs.labelled(batch, resources.memory):
            num_groups = rows_BGF.shape[1]
            moments.add(rows_BGF.flatten(1))
            counts += np.bincount(label_B.numpy(), minlength=2)
    _with_both(np.repeat([0, 1], counts), "training", "rows")
    num_rows = int(counts.sum())
    regressions = Regressions(
        moments,
        num_groups=num_groups,
        penalties=1 / (torch.tensor(STRENGTHS) * num_rows),  # of the mean loss; sklearn's C is of the sum
        class_weights=torch.tensor(0.5 / (counts / num_rows), dtype=torch.float32),
        seed=resources.seed,
    )
    return regressions, num_rows


def check_finite(rows: Tensor, batch: Mapping[str, object], feature: Feature) -> Tensor:
    """The rows of a batch; NotFinite if one has NaN or infinity, which would spoil the statistics of all."""
    is_finite_B = rows.flatten(1).isfinite().all(1)
    if not bool(is_finite_B.all()):
        numbers = torch.as_tensor(batch["numbers"])[~is_finite_B].numpy()
        raise NotFinite(
            f"NaN or infinity in the inputs of the records {', '.join(map(str, numbers))}, fields "
            f"{', '.join(feature.fields or ())}. Leave them out: millstream subset"
        )
    return rows


def _rows(batches: Loader, inputs: Inputs) -> Iterator[Tensor]:
    for batch in batches:
        yield inputs.groups(batch)


def _duration(num_rows: int, step_rows: int) -> tuple[int, int]:
    """The number of epochs, and of sweeps over each batch, for enough steps at any size of the training split.

    A small split gets several sweeps: reading a batch takes longer than learning from it.
    """
    per_epoch = ceil(num_rows / step_rows)
    sweeps = ceil(_NUM_STEPS / _FEW_EPOCHS / per_epoch)
    return max(ceil(_NUM_STEPS / per_epoch / sweeps), _MIN_EPOCHS), sweeps


def _aurocs(labels: NDArray[np.int64], logits_NGK: NDArray[np.float32]) -> NDArray[np.float64]:
    flat = logits_NGK.reshape(len(labels), -1)
    return np.array([auroc(labels, flat[:, column]) for column in range(flat.shape[1])]).reshape(logits_NGK.shape[1:])


def _kept(regressions: Regressions, group: int, strength: int) -> Arrays:
    weights_W = regressions.weights_GWK[group, :, strength]
    kept = {
        "mean": regressions.mean_GF[group],
        "factor": regressions.factor_GF[group],
        "weights": weights_W[:-1],
        "bias": weights_W[-1],
    }
    return {"group": np.array(group), **{name: value.numpy().copy() for name, value in kept.items()}}


def _described(inputs: Inputs, auroc_GK: NDArray[np.float64], group: int, strength: int) -> dict[str, object]:
    found: dict[str, object] = {"C": STRENGTHS[strength], "val_auroc": float(auroc_GK[group, strength])}
    if inputs.axis:
        found[inputs.axis] = group if inputs.names is None else inputs.names[group]
        found[f"auroc_by_{inputs.axis}"] = auroc_GK.max(axis=1).tolist()
    return found
