"""Detectors of wrong tokens: a probe of hidden states, an LSTM over the tokens of an answer, and single statistics.

The score of an answer is the highest of its tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from millstream.core.batches import Batch, ColumnBatch, as_floats
from millstream.core.collection import Collection
from millstream.core.features import Feature
from millstream.core.record import Array
from millstream.errors import BadSetting, NoDetector, NotFinite
from millstream.report.measures import auroc, spaced
from millstream.traces.detectors.logistic import (
    Inputs,
    Scores,
    as_tensor,
    fit_logistic,
    reader,
    split_rows,
)
from millstream.traces.detectors.net import DetectorNet, Scale
from millstream.traces.detectors.states import MAX_LAYERS, stored_layers, token_field
from millstream.traces.features import ANSWER, PROMPT
from millstream.traces.spans import NO_TEXT, TOKEN_LABELS
from millstream.training.task import Arrays, FitResources, Labels, Moments, Net, Outcome, Task
from millstream.training.task import Batch as NetBatch

# B records, A tokens of all answers, concatenated, L layers, D hidden, S statistics, T tokens of the longest, W width

STEP_ROWS = 256  # of the probe: neighbouring tokens are alike, so smaller steps are noise
STATISTICS = ("logprobs", "entropy")
_MOMENT_NUMBERS = 1 << 18  # standardised at once
_MIN_LOGPROB = -100.0  # a token that was ruled out has -inf

TokenScores = list[NDArray[np.float32]]  # one array per record


@dataclass(frozen=True)
class Scored:
    """A score per record, and of a detector of tokens one per token."""

    scores: Scores
    tokens: TokenScores | None = None


@dataclass(frozen=True)
class TokenFeature:
    """Of every generated token: hidden states `x` [A, L, D], statistics `stats` [A, S] and its `token_label` [A].

    A label of -1 is unknown, or of a token without text. `num_tokens` [B] tells where records begin.
    Without `layers`, up to eight at even steps. `is_cut`: only tokens of the answer, without one that ended it (all
    tokens of an empty answer).
    """

    states: str | None
    layers: tuple[int, ...] | None
    stats: tuple[str, ...]
    is_labelled: bool = True  # else all labels are unknown
    is_cut: bool = False

    @property
    def fields(self) -> list[str]:
        picked = "" if self.layers is None else f"[{','.join(map(str, self.layers))}]"
        states = [] if self.states is None else [f"{self.states}{picked}"]
        return [
            *states,
            *([PROMPT] if self.states == "hidden" else []),
            *self.stats,
            *([TOKEN_LABELS] if self.is_labelled else []),
            *([ANSWER] if self.is_cut else []),
        ]

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        assert isinstance(batch, ColumnBatch)
        made = [self._record(batch, row) for row in range(len(batch))]
        out: dict[str, object] = {
            "token_label": np.concatenate([np.zeros(0, np.int64), *(one["label"] for one in made)]),
            "num_tokens": np.array([len(one["label"]) for one in made], np.int64),
        }
        for name in ("x", "stats"):
            if made and name in made[0]:
                out[name] = np.concatenate([one[name] for one in made])
        return out

    def _record(self, batch: ColumnBatch, row: int) -> dict[str, NDArray[np.generic]]:
        number = batch.numbers[row]
        found: dict[str, NDArray[np.generic]] = {}
        if self.states is not None:
            states = cast("Array | None", batch.columns[self.states][row])
            if states is None or states.ndim != 3:
                raise ValueError(f"record {number} has no {self.states!r} [layer, token, dim]")
            start = int(cast(int, batch.columns[PROMPT][row])) if self.states == "hidden" else 0
            states_LAD = as_floats(states)[:, start:]
            if self.layers is None:
                states_LAD = states_LAD[spaced(len(states_LAD), MAX_LAYERS)]
            found["x"] = states_LAD.transpose(1, 0, 2)
        if self.stats:
            values = [as_floats(cast(Array, batch.columns[name][row])) for name in self.stats]
            found["stats"] = np.maximum(np.stack(values, axis=1), _MIN_LOGPROB).astype(np.float32)
        size = min(map(len, found.values()))
        labels = cast("NDArray[np.int8] | None", batch.columns[TOKEN_LABELS][row]) if self.is_labelled else None
        if labels is not None and len(labels) != size:
            raise ValueError(
                f"record {number} has {size} tokens, but {len(labels)} token labels; label the store again"
            )
        if not all(np.isfinite(values).all() for values in found.values()):
            raise NotFinite(
                f"record {number}: NaN or infinity in {', '.join(self.fields)}. Leave it out: millstream subset"
            )
        if self.is_cut:
            size = min(size, int(cast("int | None", batch.columns[ANSWER][row]) or size))
        cut = {name: values[:size] for name, values in found.items()}
        return {**cut, "label": np.full(size, NO_TEXT) if labels is None else labels.astype(np.int64)}


def states_feature(field_names: Sequence[str], layers: str | None, *, stats: bool) -> TokenFeature:
    """Hidden states of the layers named in the settings, or of up to eight."""
    states = token_field(field_names)
    try:
        chosen = None if layers is None else tuple(int(layer) for layer in layers.split(","))
    except ValueError:
        raise BadSetting(f"layers={layers}: must be numbers of stored layers, as in layers=8,16,-1") from None
    names = tuple(name for name in STATISTICS if stats and name in field_names)
    return TokenFeature(states, chosen, names, TOKEN_LABELS in field_names)


def need_token_labels(field_names: Sequence[str]) -> None:
    """NoDetector unless tokens are labelled."""
    if TOKEN_LABELS not in field_names:
        raise NoDetector(
            f"the store has no token labels, from millstream label STORE rule=spans, only {', '.join(field_names)}"
        )


# -- the probe


class TokenProbe:
    """A regression per layer on the states of tokens; the best layer and penalty are chosen on validation."""

    probabilities = True

    def __init__(self, resources: FitResources, *, feature: TokenFeature) -> None:
        self.fields: Sequence[str] = feature.fields
        self.arrays: Arrays = {}
        self.chosen: dict[str, object] = {}
        self._resources = resources
        self._feature = feature

    def fit(self, train: Collection, val: Collection) -> None:
        feature, names = self._feature, self._feature.layers
        if names is None:
            names = tuple(spaced(stored_layers(train, feature.states or ""), MAX_LAYERS).tolist())
        inputs = Inputs(feature, _states, axis="layer", names=names, labels=_token_labels, step_rows=STEP_ROWS)
        arrays, self.chosen = fit_logistic(train, val, inputs=inputs, resources=self._resources)
        self.arrays = {**arrays, "layer": np.array(self.chosen["layer"])}
        self.parameters = len(arrays["weights"]) + 1

    def score_tokens(self, collection: Collection) -> TokenScores:
        feature = replace(self._feature, layers=(int(self.arrays["layer"]),))
        mean_D, factor_D, weights_D = (as_tensor(self.arrays[name]) for name in ("mean", "factor", "weights"))
        weights_D = weights_D * factor_D
        bias = float(self.arrays["bias"]) - float(mean_D @ weights_D)

        def scores(batch: Mapping[str, object]) -> Tensor:
            return torch.sigmoid(_states(batch)[:, 0].float() @ weights_D + bias)

        return _by_record(collection, feature, self._resources, scores)

    def score(self, collection: Collection) -> Scores:
        return highest(self.score_tokens(collection), collection)


# -- single statistics


class TokenStatistic:
    """A statistic of each token, with the sign for which higher means wrong on the training split."""

    probabilities = False

    def __init__(self, resources: FitResources, feature: TokenFeature) -> None:
        self._feature = feature
        self.fields: Sequence[str] = feature.fields
        self.arrays: Arrays = {}
        self.chosen: dict[str, object] = {}
        self._resources = resources

    def fit(self, train: Collection, val: Collection) -> None:
        labels: list[Tensor] = []
        values: list[Tensor] = []
        for batch in reader(train, self._feature, self._resources):
            labels.append(_token_labels(batch))
            values.append(_first_stat(batch))
        label_A, value_A = torch.cat(labels).numpy(), torch.cat(values).numpy()
        known = label_A >= 0
        if len(np.unique(label_A[known])) < 2:
            raise ValueError("the training split needs tokens with both labels, 0 (right) and 1 (wrong)")
        found = auroc(label_A[known], value_A[known])
        direction = -1 if found < 0.5 else 1
        self.arrays = {"direction": np.array(direction)}
        self.chosen = {"direction": direction, "train_auroc": max(found, 1 - found)}

    def score_tokens(self, collection: Collection) -> TokenScores:
        direction = int(self.arrays["direction"])
        return _by_record(collection, self._feature, self._resources, lambda batch: direction * _first_stat(batch))

    def score(self, collection: Collection) -> Scores:
        return highest(self.score_tokens(collection), collection)


def highest(tokens: TokenScores, collection: Collection) -> Scores:
    """The score of each answer: of its highest token, without one that ended it. The lowest of all if it is empty."""
    known = ANSWER in collection.field_names
    lengths = collection.column(ANSWER).to_pylist() if known else [None] * len(tokens)
    answers = [one if length is None else one[:length] for one, length in zip(tokens, lengths, strict=True)]
    scores = np.array([float(one.max()) if len(one) else np.nan for one in answers], np.float64)
    return np.where(np.isnan(scores), np.nanmin(scores) if not np.isnan(scores).all() else 0.0, scores)


def _by_record(
    collection: Collection,
    feature: Feature,
    resources: FitResources,
    scores: Callable[[Mapping[str, object]], Tensor],
) -> TokenScores:
    found: TokenScores = []
    for batch in reader(collection, feature, resources):
        found += [part.float().numpy() for part in split_rows(scores(batch), sizes_of(batch))]
    return found


def sizes_of(batch: Mapping[str, object]) -> list[int]:
    """The number of tokens of each record."""
    return np.asarray(cast(Tensor, batch["num_tokens"]).cpu()).tolist()


def _states(batch: Mapping[str, object]) -> Tensor:
    return cast(Tensor, batch["x"])


def _first_stat(batch: Mapping[str, object]) -> Tensor:
    return cast(Tensor, batch["stats"])[:, 0]


def _token_labels(batch: Mapping[str, object]) -> Tensor:
    return cast(Tensor, batch["token_label"])


def token_statistic(resources: FitResources, field_names: Sequence[str], *, name: str) -> TokenStatistic:
    return TokenStatistic(resources, TokenFeature(None, None, (name,), TOKEN_LABELS in field_names))


# -- the LSTM


def observe_tokens(states_ALD: Tensor, moments: Moments) -> None:
    """Add the states of tokens to the moments of each layer."""
    _, num_layers, dim = states_ALD.shape
    for rows_ALD in split_rows(states_ALD, max(1, _MOMENT_NUMBERS // (num_layers * dim))):
        group = torch.arange(num_layers).repeat(len(rows_ALD))
        moments.add(rows_ALD.reshape(-1, dim), group, num_groups=num_layers)


class TokenLSTM(DetectorNet):
    """A bidirectional LSTM over the tokens of an answer, on weighted means of its layers and token statistics."""

    loss_name = "token_bce"

    def __init__(self, width: int, *, num_layers: int, dim: int, num_stats: int, dropout: float) -> None:
        super().__init__(width, num_stats)
        self.layers = Scale(num_layers, dim)
        self.weights = nn.Parameter(torch.randn(num_layers, width))  # each unit chooses layers
        self.project = nn.Linear(dim, width)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(width + num_stats, width // 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * (width // 2), 1)

    def observe(self, batch: NetBatch, moments: dict[str, Moments]) -> None:
        super().observe(batch, moments)
        observe_tokens(batch["x"], moments["layers"])

    def logits(self, batch: NetBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """[A]: of every token."""
        states_ALD = cast(Tensor, self.layers(batch["x"].float()))
        mixed_AW = torch.einsum("alw,lw->aw", self.project(states_ALD), self.weights.softmax(0))
        input_AW = functional.gelu(mixed_AW)
        stats_AS = self.scaled_stats(batch)
        seen = input_AW if stats_AS is None else torch.cat([input_AW, stats_AS], dim=1)
        sizes = batch["num_tokens"].clamp(min=1).cpu()  # a sequence needs a token
        rows = split_rows(seen, sizes_of(batch))
        padded_BTW = nn.utils.rnn.pad_sequence(
            [row if len(row) else seen.new_zeros(1, seen.shape[1]) for row in rows], batch_first=True
        )
        packed = nn.utils.rnn.pack_padded_sequence(
            self.dropout(padded_BTW), sizes, batch_first=True, enforce_sorted=False
        )
        read_BTW, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        is_token_BT = torch.arange(read_BTW.shape[1], device=seen.device) < batch["num_tokens"][:, None]
        return self.head(self.dropout(read_BTW[is_token_BT]))[:, 0], {}

    def forward(self, batch: NetBatch, target_B: Tensor, weight_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of the labelled tokens; the labels of records do not count."""
        logits_A, _ = self.logits(batch)
        label_A = batch["token_label"]
        loss = functional.binary_cross_entropy_with_logits(
            logits_A, label_A.clamp(min=0).float(), (label_A >= 0).float(), reduction="sum"
        )
        loss = loss / (label_A >= 0).sum().clamp(min=1)
        return loss, {self.loss_name: loss.detach()}

    def num_rows(self, batch: NetBatch) -> int:
        return -(-batch["x"].numel() // self.width)


def token_scores_of(net: Net, batch: NetBatch) -> dict[str, Tensor]:
    """The probability that each token is wrong."""
    return {
        "token_score": net.logits(batch)[0].float().sigmoid(),
        "token_label": batch["token_label"],
        "num_tokens": batch["num_tokens"],
    }


def split_tokens(outcome: Outcome) -> TokenScores:
    """The scores of the tokens of each record."""
    ends = np.cumsum(outcome["num_tokens"].astype(np.int64))[:-1]
    return np.split(outcome["token_score"].astype(np.float32), ends.tolist())


def _token_auroc(labels: Labels, outcome: Outcome) -> float:
    label_A, score_A = outcome["token_label"].astype(np.int64), outcome["token_score"].astype(np.float64)
    return auroc(label_A[label_A >= 0], score_A[label_A >= 0])


TOKEN_DETECTION = Task(2, "token AUROC", _token_auroc, token_scores_of, is_ragged=True)
TOKEN_STATISTICS = {
    "token-logprob": ("log-prob of each token", partial(token_statistic, name="logprobs")),
    "token-entropy": ("entropy of each token", partial(token_statistic, name="entropy")),
}
