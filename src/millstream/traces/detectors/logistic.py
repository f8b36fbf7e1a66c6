"""Logistic regressions on inputs that stream by, many at once: groups of inputs (as layers) x strengths of a penalty.

They solve what scikit-learn's LogisticRegression(C=C, class_weight="balanced") solves on standardised inputs, to about
0.01 of AUROC, but hold no more than a few batches of the data.
"""

# B batch, G groups, F features of a group, K strengths of the penalty, N records

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millstream.collection import Collection
from millstream.dataset.batch import Feature
from millstream.dataset.labels import LABEL
from millstream.loader.loader import Loader
from millstream.model.auroc import auroc
from millstream.model.detector import Arrays, Means, Scores
from millstream.model.moments import Moments
from millstream.model.reading import labels_of, reader
from millstream.model.regressions import STEP_ROWS, Regressions

STRENGTHS = (0.001, 0.01, 0.1, 1.0, 10.0)  # C: the smaller, the more large weights cost
_NUM_STEPS, _FEW_EPOCHS, _MIN_EPOCHS = 1500, 10, 5
_PATIENCE = 0.3  # of the epochs


@dataclass(frozen=True)
class Inputs:
    """What is read of records, and how inputs [B, G, F] are made of it."""

    feature: Feature
    groups: Callable[[Mapping[str, object]], Tensor]
    axis: str = ""  # what a group is called in `chosen`; empty where there is but one
    names: Sequence[object] | None = None  # of the groups, if they are not their places


class Logistic:
    """The regression whose group, strength and epoch are best on validation."""

    probabilities = True

    def __init__(self, means: Means, *, inputs: Inputs) -> None:
        self.fields: Sequence[str] = list(inputs.feature.fields or ())
        self.arrays: Arrays = {}
        self.chosen: dict[str, object] = {}
        self._means = means
        self._inputs = inputs

    def fit(self, train: Collection, val: Collection) -> None:
        self.arrays, self.chosen = fit_logistic(train, val, inputs=self._inputs, means=self._means)

    def score(self, collection: Collection) -> Scores:
        return score_logistic(collection, self.arrays, inputs=self._inputs, means=self._means)


def fit_logistic(
    train: Collection, val: Collection, *, inputs: Inputs, means: Means
) -> tuple[Arrays, dict[str, object]]:
    """The best regression, as `score_logistic` takes it, and what was chosen."""
    labels, val_labels = labels_of(train, "training"), labels_of(val, "validation")
    regressions = _prepared(train, labels, inputs, means)
    shuffled, in_order = reader(train, inputs.feature, means, shuffle=True), reader(val, inputs.feature, means)
    arrays: Arrays = {}
    chosen: dict[str, object] = {}
    num_epochs, sweeps = _duration(len(labels))
    # Later epochs are nearer to the solution: an earlier one has to be better by more than this, which is little
    # beside the chance in the validation part (about 0.5 / sqrt).
    as_good = 0.1 / len(val_labels) ** 0.5
    best, last_good = 0.0, 0
    for epoch in range(num_epochs):
        for batch in shuffled:
            regressions.learn(inputs.groups(batch), cast(Tensor, batch[LABEL]), sweeps=sweeps)
        logits_NGK = torch.cat([regressions.logits(rows_BGF) for rows_BGF in _rows(in_order, inputs)]).numpy()
        auroc_GK = _aurocs(val_labels, logits_NGK)
        best = max(best, float(auroc_GK.max()))
        if auroc_GK.max() >= best - as_good:
            last_good = epoch
            group, strength = divmod(int(auroc_GK.argmax()), len(STRENGTHS))
            arrays = _kept(regressions, group, strength)
            chosen = _described(inputs, auroc_GK, group, strength) | {"epoch": epoch + 1}
        if epoch - last_good > _PATIENCE * num_epochs:
            break
    return arrays, chosen


def score_logistic(collection: Collection, arrays: Arrays, *, inputs: Inputs, means: Means) -> Scores:
    """The probability that each record is wrong, in the order of the collection."""
    group = int(arrays["group"])
    mean_F, factor_F, weights_F = (as_tensor(arrays[name]) for name in ("mean", "factor", "weights"))
    logits = [
        ((rows_BGF[:, group] - mean_F) * factor_F) @ weights_F
        for rows_BGF in _rows(reader(collection, inputs.feature, means), inputs)
    ]
    return torch.sigmoid(torch.cat([torch.zeros(0), *logits]).double() + float(arrays["bias"])).numpy()


def as_tensor(array: NDArray[np.generic]) -> Tensor:
    """Over the same memory, unless that is read-only, as of a mapped file."""
    writeable = array if array.flags.writeable else array.copy()
    return torch.from_numpy(writeable)  # pyright: ignore[reportUnknownMemberType, reportArgumentType]


def _prepared(train: Collection, labels: NDArray[np.int64], inputs: Inputs, means: Means) -> Regressions:
    """Regressions that know the scale of the training part, and how its classes are to be balanced."""
    moments, num_groups = Moments(), 1
    for rows_BGF in _rows(reader(train, inputs.feature, means), inputs):
        num_groups = rows_BGF.shape[1]
        moments.add(rows_BGF.flatten(1))
    shares = np.bincount(labels, minlength=2) / len(labels)
    return Regressions(
        moments,
        num_groups=num_groups,
        penalties=1 / (torch.tensor(STRENGTHS) * len(labels)),  # of the mean loss, where sklearn's C is of the sum
        class_weights=torch.tensor(0.5 / shares, dtype=torch.float32),
        seed=means.seed,
    )


def _rows(batches: Loader, inputs: Inputs) -> Iterator[Tensor]:
    for batch in batches:
        yield inputs.groups(batch)


def _duration(num_records: int) -> tuple[int, int]:
    """How many epochs, and sweeps over each batch, make enough steps, whatever the size of the training part.

    Of a small one there are several sweeps: reading a batch takes longer than learning from it.
    """
    per_epoch = ceil(num_records / STEP_ROWS)
    sweeps = ceil(_NUM_STEPS / _FEW_EPOCHS / per_epoch)
    return max(ceil(_NUM_STEPS / per_epoch / sweeps), _MIN_EPOCHS), sweeps


def _aurocs(labels: NDArray[np.int64], logits_NGK: NDArray[np.float32]) -> NDArray[np.float64]:
    flat = logits_NGK.reshape(len(labels), -1)
    return np.array([auroc(labels, flat[:, place]) for place in range(flat.shape[1])]).reshape(logits_NGK.shape[1:])


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
