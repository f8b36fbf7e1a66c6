"""`haloscope`: how far a state reaches along the main directions of unlabelled answers (Du et al., arXiv 2409.17504).

HaloScope (NeurIPS 2024): principal components of the states of all training answers; the membership score is the mean
over the first k of singular value times squared projection; a probe then learns which are above a threshold.
Labels are used on validation only, to choose layer, k, sign and threshold. Reads about eight layers of `states` (or of
`hidden`, with `prompt_len` and `answer_len`) at the last answer token; to score, one.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millstream.core.collection import Collection
from millstream.core.features import Feature
from millstream.report.measures import auroc
from millstream.traces.detectors.logistic import (
    Inputs,
    Scores,
    as_tensor,
    binary_labels,
    check_finite,
    reader,
    score_logistic,
)
from millstream.traces.detectors.principal import Components, Principal
from millstream.traces.detectors.regressions import Regressions, balanced, duration, penalties_of
from millstream.traces.detectors.states import last_answer, some_layers, states_field
from millstream.training.task import Arrays, FitResources, Labels, Moments, labels_of

# B batch, N records, L layers, D hidden, C components, Q thresholds

MOST_COMPONENTS = 10
THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # shares of the training split with a lower membership
STRENGTH = 0.01  # C of the probe


class HaloScope:
    """A probe that learned memberships instead of labels."""

    probabilities = False  # of a membership, not of a wrong answer

    def __init__(self, resources: FitResources, field_names: Sequence[str]) -> None:
        self._field = states_field(field_names)
        self.fields: Sequence[str] = list(self._feature(()).fields or ())
        self.arrays: Arrays = {}
        self.chosen: dict[str, object] = {}
        self._resources = resources

    def fit(self, train: Collection, val: Collection) -> None:
        binary_labels(val, "validation")
        layers = some_layers(train, self._field)
        found = self._components(train, layers)
        some = val.subset(range(0, len(val), self._step(val, 4 * len(layers) * MOST_COMPONENTS)))
        place, count, sign, val_auroc = _best(labels_of(some), self._memberships(some, layers, found))
        layer, best = layers[place], found[place]
        member_N = sign * self._memberships(train, [layer], [best])[:, 0, count - 1]
        edges_Q = np.quantile(member_N, THRESHOLDS)
        regressions = self._learned(train, layer, best, count, sign, edges_Q)
        logits_NQ = self._logits(val, layer, regressions)
        auroc_by_threshold = [auroc(labels_of(val), column) for column in logits_NQ.T]
        threshold = int(np.argmax(auroc_by_threshold))
        weights_W = regressions.weights_GKW[0, threshold]
        kept = {"mean": regressions.mean_GF[0], "factor": regressions.factor_GF[0]}
        kept |= {"weights": weights_W[:-1], "bias": weights_W[-1]}
        self.arrays = {name: value.numpy().copy() for name, value in kept.items()}
        self.arrays |= {"layer": np.array(layer), "group": np.array(0)}
        self.fields = list(self._feature([layer]).fields or ())
        self.chosen = {
            "layer": layer,
            "components": count,
            "sign": sign,
            "threshold": THRESHOLDS[threshold],
            "membership_val_auroc": val_auroc,
            "val_auroc": auroc_by_threshold[threshold],
        }

    def score(self, collection: Collection) -> Scores:
        inputs = Inputs(self._feature([int(self.arrays["layer"])]), _states)
        return score_logistic(collection, self.arrays, inputs=inputs, resources=self._resources)

    def _feature(self, layers: Sequence[int]) -> Feature:
        return last_answer(layers, field=self._field)

    def _step(self, collection: Collection, record_bytes: int) -> int:
        """Every how manyth record to take, so that a share of the memory is enough."""
        return max(1, ceil(len(collection) * record_bytes / (self._resources.memory // 8)))

    def _components(self, train: Collection, layers: Sequence[int]) -> list[Components]:
        """Of each layer, in one pass."""
        feature = self._feature(layers)
        found: list[Principal] = []
        for batch in reader(train, feature, self._resources):
            rows_BLD = check_finite(_states(batch), batch, feature)
            num_components = max(1, min(MOST_COMPONENTS, rows_BLD.shape[2], len(train) // 2))
            found = found or [Principal(num_components, needed_by="haloscope") for _ in layers]
            for place, principal in enumerate(found):
                principal.add(rows_BLD[:, place])
        return [principal.found() for principal in found]

    def _memberships(
        self, collection: Collection, layers: Sequence[int], found: Sequence[Components]
    ) -> NDArray[np.float64]:
        """[N, L, C]: by the first component, by the first two, and so on."""
        batches = reader(collection, self._feature(layers), self._resources)
        scores = [
            torch.stack([memberships(_states(batch)[:, n], one) for n, one in enumerate(found)], dim=1)
            for batch in batches
        ]
        return torch.cat(scores).numpy()

    def _learned(
        self, train: Collection, layer: int, best: Components, count: int, sign: int, edges_Q: NDArray[np.float64]
    ) -> Regressions:
        """A probe for each threshold."""
        feature, moments = self._feature([layer]), Moments()
        for batch in reader(train, feature, self._resources):
            moments.add(_states(batch).flatten(1))
        penalties = penalties_of([STRENGTH] * len(edges_Q), len(train))
        regressions = Regressions(moments, num_groups=1, penalties=penalties, seed=self._resources.seed)
        shares = np.array(THRESHOLDS) * len(train)
        weights_2Q = torch.stack([balanced(np.array([below, len(train) - below])) for below in shares], dim=1)
        num_epochs, sweeps = duration(len(train))
        shuffled = reader(train, feature, self._resources, shuffle=True)
        for _ in range(num_epochs):
            for batch in shuffled:
                rows_B1D = _states(batch)
                member_B = sign * memberships(rows_B1D[:, 0], best)[:, count - 1]
                is_above_BQ = (member_B[:, None] > as_tensor(edges_Q)).long()
                regressions.learn(rows_B1D, is_above_BQ, weights_2Q.gather(0, is_above_BQ), sweeps=sweeps)
        return regressions

    def _logits(self, collection: Collection, layer: int, regressions: Regressions) -> NDArray[np.float32]:
        """[N, Q]"""
        batches = reader(collection, self._feature([layer]), self._resources)
        return torch.cat([regressions.logits(_states(batch))[:, 0] for batch in batches]).numpy()


def memberships(rows_BD: Tensor, found: Components) -> Tensor:
    """[B, C]: by the first component, by the first two, and so on, in float64."""
    projected_BC = (rows_BD - as_tensor(found.mean)) @ as_tensor(found.components).T
    terms_BC = as_tensor(found.strengths / found.strengths.max()) * projected_BC.double().square()
    return terms_BC.cumsum(1) / torch.arange(1, terms_BC.shape[1] + 1)


def _best(labels: Labels, member_NLC: NDArray[np.float64]) -> tuple[int, int, int, float]:
    """The layer, number of components and sign with the best AUROC, and the AUROC."""
    flat = member_NLC.reshape(len(labels), -1)
    found = np.array([auroc(labels, column) for column in flat.T])
    best = int(np.argmax(np.maximum(found, 1 - found)))
    place, count = divmod(best, member_NLC.shape[2])
    return place, count + 1, 1 if found[best] >= 0.5 else -1, float(max(found[best], 1 - found[best]))


def _states(batch: Mapping[str, object]) -> Tensor:
    return cast(Tensor, batch["layers"])
