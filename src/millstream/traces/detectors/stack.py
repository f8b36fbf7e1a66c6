"""`stack`: linear probes of several layers at every stored position, averaged over layers, and token statistics.

The mean of the logits of probes over layers: HalluTracer. A second regression on out-of-fold outputs of the first:
stacking (Wolpert 1992). Reads about eight layers of `states` (or of `hidden`), and token statistics if the store has
log-probs; `stack_samples` also reads the statistics of the samples of a question.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millstream.core.batches import Batch, ColumnBatch, as_floats
from millstream.core.collection import Collection
from millstream.core.features import Feature
from millstream.core.record import Array
from millstream.errors import NoDetector
from millstream.report.measures import auroc
from millstream.traces.detectors.baselines import of_groups, tokens_of_samples
from millstream.traces.detectors.logistic import (
    Inputs,
    Scores,
    as_tensor,
    binary_labels,
    check_finite,
    fit_rows,
    reader,
)
from millstream.traces.detectors.regressions import Regressions, balanced, duration, penalties_of
from millstream.traces.detectors.states import some_layers, states_field, stored_layers
from millstream.traces.features import LayerFeature, Token, token_stats
from millstream.traces.groups import STATISTICS
from millstream.traces.kind import POSITIONS, THINKING
from millstream.traces.store.format import QUESTION_ID
from millstream.training.task import Arrays, FitResources, Moments

# B batch, N records, L layers, P positions, D hidden, Q statistics of samples, F features, S token statistics
# G = L * P probes, W weights = D + 1, C strengths, K = C * (folds + 1)

FOLDS = 5
STRENGTHS = (0.001, 0.01)  # C of the probes
STATS = ("mean_logprob", "min_logprob", "sum_logprob", "mean_entropy", "mean_margin", "num_tokens")


@dataclass(frozen=True)
class Positions:
    """`x` [B, L, P, D]: hidden states of some layers at the positions of `states`; `fold` [B], by question."""

    field: str
    layers: tuple[int, ...]
    by_question: bool

    @property
    def fields(self) -> list[str]:
        of_hidden = [name for feature in self._of_hidden for name in feature.fields]
        picked = [f"states[{','.join(map(str, self.layers))}]" if self.layers else "states"]
        read = picked if self.field == "states" else of_hidden
        return list(dict.fromkeys([*read, *([QUESTION_ID] if self.by_question else [])]))

    @property
    def _of_hidden(self) -> list[LayerFeature]:
        if self.field == "states":
            return []
        return [
            LayerFeature(position, self.field, self.layers or None, None)
            for position in cast("Sequence[Token]", POSITIONS)
        ]

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        assert isinstance(batch, ColumnBatch)
        if self.field == "states":
            states = cast("Array | Sequence[Array]", batch.columns["states"])
            x = states if isinstance(states, np.ndarray) else np.stack([as_floats(one) for one in states])
        else:
            x = np.stack([cast("Array", feature(batch)["layers"]) for feature in self._of_hidden], axis=2)
        keys = batch.columns[QUESTION_ID] if self.by_question else batch.numbers
        return {"x": x, "fold": np.array([_fold(key) for key in keys], np.int64)}


def _fold(key: object) -> int:
    """The same fold for all records of a question."""
    return int.from_bytes(blake2b(str(key).encode(), digest_size=8).digest(), "little") % FOLDS


class Stack:
    """Probes fitted in one set of passes for all layers, positions, folds and penalties; then one small regression."""

    probabilities = True

    def __init__(self, resources: FitResources, field_names: Sequence[str], *, samples: Sequence[str] = ()) -> None:
        self._source = states_field(field_names)
        self._by_question = QUESTION_ID in field_names
        self._stats = token_stats(*STATS) if {*token_stats(*STATS).fields} <= {*field_names} else None
        self._samples = samples
        self.fields: Sequence[str] = _fields_of(self._features(()))
        self.arrays: Arrays = {}
        self.chosen: dict[str, object] = {}
        self.extra_tokens: float | None = 0.0
        self._resources = resources

    def fit(self, train: Collection, val: Collection) -> None:
        self.fit_together([self], train, [(train, val)])

    @staticmethod
    def fit_together(
        models: Sequence["Stack"], whole: Collection, folds: Sequence[tuple[Collection, Collection]]
    ) -> None:
        """Fit a model per fold (train, val) of the same records, with the same passes over them."""
        first, trains = models[0], [train for train, _ in folds]
        val_labels = [binary_labels(val, "validation") for _, val in folds]
        layers = some_layers(stored_layers(whole, first._source))
        probes = fit_probes(whole, trains, features=first._features(layers), resources=first._resources)
        for model, one, (train, val), labels in zip(models, probes, folds, val_labels, strict=True):
            model._complete(layers, one, train, val, labels)

    def _complete(
        self, layers: Sequence[int], probes: "Probes", train: Collection, val: Collection, val_labels: NDArray[np.int64]
    ) -> None:
        """Keep the best strength, and fit the last regression."""
        features = self._features(layers)
        self.fields = _fields_of(features)
        averages_NPC, labels = probes.averages_NPC, probes.labels
        auroc_C = [auroc(labels, one_NP.mean(1).numpy()) for one_NP in averages_NPC.unbind(2)]
        best = int(np.argmax(auroc_C))
        samples_NQ = samples_of(train, self._samples)
        fill_Q = np.nansum(samples_NQ, 0) / np.maximum((~np.isnan(samples_NQ)).sum(0), 1)  # 0 if none is known
        self.arrays = {
            "layers": np.array(layers, np.int64),
            **({"fill": fill_Q.astype(np.float32)} if self._samples else {}),
            **_averaging(probes.regressions, probes.scale, best),
        }
        rows_NF = torch.cat([averages_NPC[:, :, best], probes.stats_NS, self._filled(samples_NQ)], dim=1)
        last, chosen = fit_rows(  # a few numbers per record
            (rows_NF[:, None], as_tensor(labels)),
            (self._rows(val)[:, None], as_tensor(val_labels)),
            inputs=Inputs(features[0], _rows_of),
            seed=self._resources.seed,
        )
        self.arrays |= {f"last_{name}": array for name, array in last.items()}
        if self._samples:
            self.extra_tokens = tokens_of_samples(train)
        self.parameters = self.arrays["weights"].size + len(last["weights"]) + 1
        names = [*_names(averages_NPC.shape[1]), *(STATS if self._stats else ()), *self._samples]
        weights = dict(zip(names, last["weights"].tolist(), strict=True))
        chosen_probes = {"C": STRENGTHS[best], "out_of_fold_auroc": auroc_C[best], "layers": list(layers)}
        self.chosen = {**chosen_probes, "val_auroc": chosen["val_auroc"], "weights": weights}

    def score(self, collection: Collection) -> Scores:
        last = {name.removeprefix("last_"): array for name, array in self.arrays.items() if name.startswith("last_")}
        mean_F, factor_F, weights_F = (as_tensor(last[name]) for name in ("mean", "factor", "weights"))
        logits = ((self._rows(collection) - mean_F) * factor_F) @ weights_F
        return torch.sigmoid(logits.double() + float(last["bias"])).numpy()

    def _features(self, layers: Sequence[int]) -> list[Feature]:
        positions = Positions(self._source, tuple(layers), self._by_question)
        return [positions, *([] if self._stats is None else [self._stats])]

    def _rows(self, collection: Collection) -> Tensor:
        """[N, F]: the inputs of the last regression."""
        mean_LPD, weights_LPD, bias_P = (as_tensor(self.arrays[name]) for name in ("mean", "weights", "bias"))
        found: list[Tensor] = []
        for batch in reader(collection, self._features(self.arrays["layers"].tolist()), self._resources):
            x_BLPD = cast(Tensor, batch["x"])
            averages_BP = torch.einsum("blpd,lpd->bp", x_BLPD - mean_LPD, weights_LPD) + bias_P
            found.append(torch.cat([averages_BP, _stats_of(batch)], dim=1))
        width = len(self.arrays["last_weights"]) if "last_weights" in self.arrays else 0
        read_NF = torch.cat(found) if found else torch.zeros(0, width - len(self._samples))
        return torch.cat([read_NF, self._filled(samples_of(collection, self._samples))], dim=1)

    def _filled(self, samples_NQ: NDArray[np.float64]) -> Tensor:
        """A statistic that a question lacks is the mean over the training split."""
        fill_Q = self.arrays["fill"] if self._samples else np.zeros(0)
        return as_tensor(np.where(np.isnan(samples_NQ), fill_Q, samples_NQ)).float()


def fit_probes(
    whole: Collection, trains: Sequence[Collection], *, features: Sequence[Feature], resources: FitResources
) -> list["Probes"]:
    """The probes of each training split, fitted with the same passes over the records of all."""
    probes, positions = [Probes(train, resources.seed) for train in trains], features[0]
    for batch in reader(whole, positions, resources):
        check_finite(_rows_of(batch), batch, positions)
        for one in probes:
            one.observe(batch)
    shuffled = reader(whole, positions, resources, shuffle=True)
    for epoch in range(max(one.num_epochs for one in probes)):
        for batch in shuffled:
            for one in probes:
                if epoch < one.num_epochs:
                    one.learn(batch)
    for batch in reader(whole, positions, resources):
        for one in probes:
            one.observe_logits(batch)
    for batch in reader(whole, features, resources):
        for one in probes:
            one.average(batch)
    return probes


class Probes:
    """All probes of a training split, and their averages for its records, by probes that did not see the question.

    Column c * (FOLDS + 1) + f of the regressions has strength c and leaves out fold f, the last leaves out none.
    """

    def __init__(self, train: Collection, seed: int) -> None:
        self.labels = binary_labels(train, "training")
        self.num_epochs, self._sweeps = duration(len(train))
        self.averages_NPC = self.stats_NS = torch.empty(0)
        self._seed, self._label_N = seed, as_tensor(self.labels)
        self._class_weights = balanced(np.bincount(self.labels, minlength=2))
        numbers = train.record_numbers(np.arange(len(train)))
        self._places = torch.full((int(numbers.max()) + 1,), -1)  # of records by number
        self._places[as_tensor(numbers)] = torch.arange(len(train))
        self._moments, self._logits, self._by_label = Moments(), Moments(), Moments()

    def observe(self, batch: Mapping[str, object]) -> None:
        some, _ = self._among(batch)
        self._shape = cast(Tensor, batch["x"]).shape[1:3]
        if len(some):
            self._moments.add(_rows_of(batch)[some].flatten(1))

    @cached_property
    def regressions(self) -> Regressions:
        penalty_K = penalties_of(STRENGTHS, len(self.labels)).repeat_interleave(FOLDS + 1)
        return Regressions(self._moments, num_groups=prod(self._shape), penalties=penalty_K, seed=self._seed)

    def learn(self, batch: Mapping[str, object]) -> None:
        some, place_B = self._among(batch)
        if not len(some):
            return
        label_B = self._label_N[place_B]
        is_in_BF = cast(Tensor, batch["fold"])[:, None] != torch.arange(FOLDS + 1)
        share_BF = is_in_BF / torch.tensor([*[1 - 1 / FOLDS] * FOLDS, 1.0])  # a fold has fewer rows
        weight_BK = self._class_weights[label_B][:, None] * share_BF.repeat(1, len(STRENGTHS))
        self.regressions.learn(_rows_of(batch), label_B[:, None], weight_BK, among=some, sweeps=self._sweeps)

    def observe_logits(self, batch: Mapping[str, object]) -> None:
        some, place_B = self._among(batch)
        if len(some):
            rows_MF = self._held_out(batch, some).flatten(1)
            self._logits.add(rows_MF)
            self._by_label.add(rows_MF, self._label_N[place_B[some]], num_groups=2)

    @cached_property
    def scale(self) -> "Scale":
        """What standardises the out-of-fold logits of each probe, and its weight in the mean over layers."""
        mean_1F, factor_1F = self._logits.scaling()
        assert self._by_label.mean is not None
        gap_1F = (self._by_label.mean[1:] - self._by_label.mean[:1]).float() * factor_1F
        shape = *self._shape, len(STRENGTHS)
        gap_LPC = gap_1F.reshape(shape).clamp(min=1e-6)
        return Scale(mean_1F.reshape(shape), factor_1F.reshape(shape) * gap_LPC / gap_LPC.sum(0))

    def average(self, batch: Mapping[str, object]) -> None:
        """Over layers: of the out-of-fold logits; and keep the token statistics."""
        some, place_B = self._among(batch)
        scale, stats_BS = self.scale, _stats_of(batch)
        if not len(self.averages_NPC):
            self.averages_NPC = torch.zeros(len(self.labels), *scale.mean_LPC.shape[1:])
            self.stats_NS = torch.zeros(len(self.labels), stats_BS.shape[1])
        logits_MLPC = self._held_out(batch, some).reshape(-1, *scale.mean_LPC.shape)
        self.averages_NPC[place_B[some]] = ((logits_MLPC - scale.mean_LPC) * scale.factor_LPC).sum(1)
        self.stats_NS[place_B[some]] = stats_BS[some]

    def _among(self, batch: Mapping[str, object]) -> tuple[Tensor, Tensor]:
        """The rows of a batch that are of the split; and the place in it of every row, -1 for the others."""
        number_B = torch.as_tensor(batch["numbers"])
        place_B = torch.where(number_B < len(self._places), self._places[number_B.clamp(max=len(self._places) - 1)], -1)
        return (place_B >= 0).nonzero()[:, 0], place_B

    def _held_out(self, batch: Mapping[str, object], some: Tensor) -> Tensor:
        """[M, G, C]: the logits of the probes that left out the fold of each record."""
        logits_MGK, fold_M = self.regressions.logits(_rows_of(batch)[some]), cast(Tensor, batch["fold"])[some]
        logits_MGCF = logits_MGK.reshape(*logits_MGK.shape[:2], len(STRENGTHS), FOLDS + 1)
        return logits_MGCF[torch.arange(len(fold_M)), :, :, fold_M]


def samples_of(collection: Collection, names: Sequence[str]) -> NDArray[np.float64]:
    """[N, Q]: statistics of the samples of the question of each record, NaN if unknown."""
    columns = [of_groups(name, collection) for name in names]
    return np.stack(columns, axis=1) if columns else np.zeros((len(collection), 0))


@dataclass(frozen=True)
class Scale:
    """The weighted mean of standardised logits over layers: sum over L of (logit - mean) * factor.

    A layer weighs as much as its probe separates the classes out of fold: the early ones often tell nothing.
    """

    mean_LPC: Tensor
    factor_LPC: Tensor


def _averaging(regressions: Regressions, scale: Scale, strength: int) -> dict[str, NDArray[np.generic]]:
    """The weighted mean over layers of the logits of the probes of all folds, as one linear map."""
    mean_LP, factor_LP = scale.mean_LPC[:, :, strength], scale.factor_LPC[:, :, strength]
    weights_LPW = regressions.weights_GKW[:, strength * (FOLDS + 1) + FOLDS].reshape(*mean_LP.shape, -1)
    shape = *mean_LP.shape, -1
    weights_LPF = weights_LPW[..., :-1] * regressions.factor_GF.reshape(shape) * factor_LP[..., None]
    bias_P = ((weights_LPW[..., -1] - mean_LP) * factor_LP).sum(0)
    mean_LPF = regressions.mean_GF.reshape(shape)
    return {name: one.numpy().copy() for name, one in (("mean", mean_LPF), ("weights", weights_LPF), ("bias", bias_P))}


def _rows_of(batch: Mapping[str, object]) -> Tensor:
    return cast(Tensor, batch["x"]).flatten(1, 2)


def _stats_of(batch: Mapping[str, object]) -> Tensor:
    x, stats = cast(Tensor, batch["x"]), cast("Tensor | None", batch.get("stats"))
    return torch.zeros(len(x), 0) if stats is None else stats


def _fields_of(features: Sequence[Feature]) -> list[str]:
    return list(dict.fromkeys(name for feature in features for name in feature.fields or ()))


def _names(num_positions: int) -> list[str]:
    """Of the stored positions."""
    return list((*POSITIONS, *THINKING)[:num_positions])


def with_samples(resources: FitResources, field_names: Sequence[str]) -> Stack:
    """`stack_samples`: with all statistics of samples that the store has."""
    names = [name for name in STATISTICS if name in field_names]
    if not names:
        raise NoDetector("stack_samples needs a store with samples, labelled by millstream label")
    return Stack(resources, field_names, samples=names)
