"""Detectors that are not nets: the protocol, and many logistic regressions in one streaming pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millstream.core.collection import Collection
from millstream.core.features import Feature, fields, fitting_batch
from millstream.core.loader import Loader
from millstream.core.split import LABEL
from millstream.errors import NotFinite
from millstream.report.measures import auroc
from millstream.traces.detectors.regressions import STEP_ROWS, Regressions, balanced, duration, penalties_of
from millstream.training.task import Arrays, FitResources, Labels, Model, Moments, labels_of

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
    collection: Collection,
    feature: Feature | Sequence[Feature],
    resources: FitResources,
    *,
    shuffle: bool = False,
    labels: bool = False,
) -> Loader:
    """Batches of features in record order, or with `shuffle` in a new random order every epoch; with `label`."""
    features = list(feature) if isinstance(feature, Sequence) else [feature]
    return Loader(
        collection,
        batch_size=fitting_batch(collection, features, memory=resources.memory, at_most=resources.batch_size),
        features=[*features, fields(LABEL)] if labels else features,
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

_CHUNK = 128  # of the memory: the inputs of parts of records that are standardised at once, which takes several copies
_HELD = 16  # of the memory: inputs that are held instead of read in every epoch, with several copies too
STRENGTHS = (0.001, 0.01, 0.1, 1.0, 10.0)  # C: smaller values penalise large weights more
_PATIENCE = 0.3  # fraction of the epochs


Rows = tuple[Tensor, Tensor]  # inputs [B, G, F], labels [B]
Observed = tuple[Moments, int, NDArray[np.int64]]  # of the rows to train on; the number of groups; rows of each label


@dataclass(frozen=True)
class Inputs:
    """The feature to load, and how to turn it into inputs [B, G, F]; rows may be records, or parts of them."""

    feature: Feature
    groups: Callable[[Mapping[str, object]], Tensor]
    axis: str = ""  # name of the groups in `chosen`; empty if there is only one
    names: Sequence[object] | None = None  # of the groups; default: their indices
    labels: Callable[[Mapping[str, object]], Tensor] | None = None  # of rows, -1 for those to leave out; of the records
    step_rows: int = STEP_ROWS

    def labelled(self, batch: Mapping[str, object], memory: int) -> Iterator[Rows]:
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

    @staticmethod
    def fit_together(
        models: Sequence["Logistic"], whole: Collection, folds: Sequence[tuple[Collection, Collection]]
    ) -> None:
        """Fit a model per fold (train, val) of the same records, with the same passes over them."""
        first = models[0]
        found = fit_folds(whole, folds, inputs=first._inputs, resources=first._resources)
        for model, (arrays, chosen) in zip(models, found, strict=True):
            model.arrays, model.chosen = arrays, chosen

    def score(self, collection: Collection) -> Scores:
        return score_logistic(collection, self.arrays, inputs=self._inputs, resources=self._resources)


def fit_logistic(
    train: Collection, val: Collection, *, inputs: Inputs, resources: FitResources
) -> tuple[Arrays, dict[str, object]]:
    """The best regression, as input of `score_logistic`, and the hyperparameters chosen."""
    if inputs.labels is None:
        binary_labels(train, "training")
        binary_labels(val, "validation")
        held = [_held(part, inputs, resources) for part in (train, val)]
        if held[0] is not None and held[1] is not None:
            return fit_rows(held[0], held[1], inputs=inputs, seed=resources.seed)
    observed = _observed(train, inputs, resources)
    shuffled = reader(train, inputs.feature, resources, shuffle=True, labels=True)
    in_order = reader(val, inputs.feature, resources, labels=True)
    num_val = int(observed[2].sum()) * len(val) // len(train)  # rows, about

    def rows() -> Iterator[Rows]:
        for batch in shuffled:
            yield from inputs.labelled(batch, resources.memory)

    def validated(regressions: Regressions) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        num_bytes = 4 * regressions.num_outputs * num_val
        every = 1 if inputs.labels is None else ceil(num_bytes / (resources.memory // 8))
        return _validated(in_order, inputs, regressions, every=every, memory=resources.memory)

    return _best(rows, validated, observed=observed, inputs=inputs, seed=resources.seed)


def _held(collection: Collection, inputs: Inputs, resources: FitResources) -> Rows | None:
    """The inputs of all records, if there are so few that they need not be computed in every epoch."""
    (first,) = reader(collection.subset([0]), inputs.feature, resources)
    if 4 * inputs.groups(first).numel() * len(collection) > resources.memory // _HELD:
        return None
    rows: list[Tensor] = []
    labels: list[Tensor] = []
    for batch in reader(collection, inputs.feature, resources, labels=True):
        rows.append(check_finite(inputs.groups(batch), batch, inputs.feature).clone())
        labels.append(cast(Tensor, batch[LABEL]).clone())
    return torch.cat(rows), torch.cat(labels)


def fit_rows(train: Rows, val: Rows, *, inputs: Inputs, seed: int) -> tuple[Arrays, dict[str, object]]:
    """The best regression on inputs in memory, as `fit_logistic`."""
    rows_NGF, label_N = train
    moments = Moments()
    moments.add(rows_NGF.flatten(1))

    def validated(regressions: Regressions) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        return val[1].numpy(), regressions.logits(val[0]).numpy()

    observed = moments, rows_NGF.shape[1], np.bincount(label_N.numpy(), minlength=2)
    return _best(lambda: iter([train]), validated, observed=observed, inputs=inputs, seed=seed)


def _best(
    rows: Callable[[], Iterator[Rows]],
    validated: Callable[[Regressions], tuple[NDArray[np.int64], NDArray[np.float32]]],
    *,
    observed: Observed,
    inputs: Inputs,
    seed: int,
) -> tuple[Arrays, dict[str, object]]:
    search = Search(observed, inputs, seed)
    while not search.is_done:
        for rows_BGF, label_B in rows():
            search.learn(rows_BGF, label_B)
        search.judge(*validated(search.regressions))
    return search.arrays, search.chosen


class Search:
    """Regressions of one fold, and the best of them so far by group, strength and epoch on validation."""

    def __init__(self, observed: Observed, inputs: Inputs, seed: int) -> None:
        moments, num_groups, counts = observed
        num_rows = int(counts.sum())
        penalties = penalties_of(STRENGTHS, num_rows)
        self.regressions = Regressions(moments, num_groups=num_groups, penalties=penalties, seed=seed)
        self.arrays: Arrays = {}
        self.chosen: dict[str, object] = {}
        self.is_done = False
        self._class_weights = balanced(counts)
        self._num_epochs, self._sweeps = duration(num_rows, inputs.step_rows)
        self._inputs = inputs
        self._epoch, self._best, self._last_good = 0, 0.0, 0

    def learn(self, rows_BGF: Tensor, label_B: Tensor, among: Tensor | None = None) -> None:
        """Learn from a batch, or from rows among it."""
        weight_B1, step_rows = self._class_weights[label_B][:, None], self._inputs.step_rows
        self.regressions.learn(
            rows_BGF, label_B[:, None], weight_B1, among=among, sweeps=self._sweeps, step_rows=step_rows
        )

    def judge(self, val_labels: NDArray[np.int64], logits_NGK: NDArray[np.float32]) -> None:
        """End an epoch with what the regressions say of the validation split."""
        # Later epochs are closer to the solution: an earlier one must be better by more than this, which is small
        # compared with the noise of the validation split (about 0.5 / sqrt).
        tolerance = 0.1 / len(val_labels) ** 0.5
        auroc_GK = _aurocs(val_labels, logits_NGK)
        self._best = max(self._best, float(auroc_GK.max()))
        if auroc_GK.max() >= self._best - tolerance:
            self._last_good = self._epoch
            group, strength = divmod(int(auroc_GK.argmax()), len(STRENGTHS))
            self.arrays = _kept(self.regressions, group, strength)
            self.chosen = _described(self._inputs, auroc_GK, group, strength) | {"epoch": self._epoch + 1}
        has_patience = self._epoch - self._last_good <= _PATIENCE * self._num_epochs
        self._epoch += 1
        self.is_done = not has_patience or self._epoch == self._num_epochs


def fit_folds(
    whole: Collection, folds: Sequence[tuple[Collection, Collection]], *, inputs: Inputs, resources: FitResources
) -> list[tuple[Arrays, dict[str, object]]]:
    """As `fit_logistic` on every fold, but each pass over the data serves all of them."""
    parts = [[_members(part, whole) for part in fold] for fold in folds]
    for train, val in folds:
        binary_labels(train, "training")
        binary_labels(val, "validation")
    if (held := _held(whole, inputs, resources)) is not None:
        numbers = torch.as_tensor(whole.record_numbers(np.arange(len(whole))))
        of_folds = [[(held[0][is_in[numbers]], held[1][is_in[numbers]]) for is_in in fold] for fold in parts]
        return [fit_rows(train, val, inputs=inputs, seed=resources.seed) for train, val in of_folds]
    moments, counts, num_groups = [Moments() for _ in folds], [np.zeros(2, np.int64) for _ in folds], 1
    in_order = reader(whole, inputs.feature, resources, labels=True)
    for rows_BGF, label_B, number_B in _numbered(in_order, inputs, checks=True):
        num_groups = rows_BGF.shape[1]
        for place, (in_train, _) in enumerate(parts):
            some = in_train[number_B]
            if some.any():
                moments[place].add(rows_BGF[some].flatten(1))
                counts[place] += np.bincount(label_B[some].numpy(), minlength=2)
    observed = [(one, num_groups, count) for one, count in zip(moments, counts, strict=True)]
    searches = [Search(one, inputs, resources.seed) for one in observed]
    numbers = torch.as_tensor(whole.record_numbers(np.arange(len(whole))))
    shuffled = reader(whole, inputs.feature, resources, shuffle=True, labels=True)
    while going := [pair for pair in zip(searches, parts, strict=True) if not pair[0].is_done]:
        for rows_BGF, label_B, number_B in _numbered(shuffled, inputs):
            for search, (in_train, _) in going:
                some = in_train[number_B].nonzero()[:, 0]
                if len(some):
                    search.learn(rows_BGF, label_B, some)
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in going]
        judged_by = torch.stack([in_val for _, (_, in_val) in going]).any(0)[numbers]  # about half of the records
        to_judge = reader(whole.subset(judged_by.nonzero()[:, 0].numpy()), inputs.feature, resources, labels=True)
        for rows_BGF, label_B, number_B in _numbered(to_judge, inputs):
            for (search, (_, in_val)), judged in zip(going, found, strict=True):
                some = in_val[number_B]
                judged.append((label_B[some], search.regressions.logits(rows_BGF[some])))
        for (search, _), judged in zip(going, found, strict=True):
            labels, logits = zip(*judged, strict=True)
            search.judge(torch.cat(labels).numpy(), torch.cat(logits).numpy())
    return [(search.arrays, search.chosen) for search in searches]


def _members(part: Collection, whole: Collection) -> Tensor:
    """By record number, whether a record of the whole is in a part."""
    is_in = np.zeros(int(whole.record_numbers(np.arange(len(whole))).max()) + 1, np.bool_)
    is_in[part.record_numbers(np.arange(len(part)))] = True
    return as_tensor(is_in)


def _numbered(batches: Loader, inputs: Inputs, *, checks: bool = False) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Inputs, labels and record numbers; the first pass checks that the inputs are finite."""
    for batch in batches:
        rows_BGF = inputs.groups(batch)
        if checks:
            check_finite(rows_BGF, batch, inputs.feature)
        yield rows_BGF, cast(Tensor, batch[LABEL]), torch.as_tensor(batch["numbers"])


def _validated(
    batches: Loader, inputs: Inputs, regressions: Regressions, *, every: int, memory: int
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


def split_rows(rows: Tensor, sizes: int | list[int]) -> Sequence[Tensor]:
    """Consecutive rows of this many, or of these sizes."""
    return cast("Sequence[Tensor]", torch.split(rows, sizes))  # pyright: ignore[reportUnknownMemberType]


def as_tensor(array: NDArray[np.generic]) -> Tensor:
    """A tensor that shares the memory, unless it is read-only, as in a mapped file."""
    writeable = array if array.flags.writeable else array.copy()
    return torch.from_numpy(writeable)  # pyright: ignore[reportUnknownMemberType, reportArgumentType]


def _observed(train: Collection, inputs: Inputs, resources: FitResources) -> tuple[Moments, int, NDArray[np.int64]]:
    """Moments of the rows of the training split, the number of groups, and rows with each label."""
    moments, num_groups, counts = Moments(), 1, np.zeros(2, np.int64)
    for batch in reader(train, inputs.feature, resources, labels=True):
        if inputs.labels is None:
            check_finite(inputs.groups(batch), batch, inputs.feature)
        for rows_BGF, label_B in inputs.labelled(batch, resources.memory):
            num_groups = rows_BGF.shape[1]
            moments.add(rows_BGF.flatten(1))
            counts += np.bincount(label_B.numpy(), minlength=2)
    _with_both(np.repeat([0, 1], counts), "training", "rows")
    return moments, num_groups, counts


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


def _aurocs(labels: NDArray[np.int64], logits_NGK: NDArray[np.float32]) -> NDArray[np.float64]:
    flat = logits_NGK.reshape(len(labels), -1)
    return np.array([auroc(labels, flat[:, column]) for column in range(flat.shape[1])]).reshape(logits_NGK.shape[1:])


def _kept(regressions: Regressions, group: int, strength: int) -> Arrays:
    weights_W = regressions.weights_GKW[group, strength]
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
