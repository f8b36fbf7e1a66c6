"""A few numbers that say how sure a model was of its answer: of log-probs, entropies, ranks and margins of its tokens.

A statistic is named after how it is taken over the tokens of the answer and what of: `min_logprob`.
"""

# B batch, S statistics, A answer tokens of all records one after the other, K most likely tokens

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from millstream.dataset.batch import Batch, TraceBatch
from millstream.dataset.layer_feature import as_floats
from millstream.records import Array

STATS = (
    "num_tokens",
    "num_words",
    "sum_logprob",
    "mean_logprob",
    "min_logprob",
    "first_logprob",
    "last_logprob",
    "mean_entropy",
    "max_entropy",
    "first_entropy",
    "mean_margin",
    "min_margin",
    "first_margin",
    "mean_logrank",
    "max_logrank",
    "mean_topmass",
    "mean_part1",
    "mean_part2",
    "mean_part3",
    "mean_partrest",
)
"""The margin is the probability of the likeliest token less that of the next; `logrank` is log(1 + rank); `topmass` is
the probability of all that are kept; `part1` is the share of the likeliest token in the entropy, -p log p."""

Floats = NDArray[np.float32]
_LEAST = np.float32(-100)  # of a log-prob: a token that was ruled out has -inf


@dataclass(frozen=True)
class TokenStats:
    """`stats` [B, S]. Made by `ms.features.token_stats`."""

    names: tuple[str, ...] = STATS

    @property
    def fields(self) -> list[str]:
        return list(dict.fromkeys(name for stat in self.names for name in _fields_of(stat)))

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        if not isinstance(batch, TraceBatch):
            raise ValueError("features.token_stats takes log-probs of traces; these records are reads")
        out_BS = np.zeros((len(batch), len(self.names)), np.float32)
        answers: dict[str, tuple[Floats, NDArray[np.int64]]] = {}
        for place, stat in enumerate(self.names):
            if stat == "num_words":
                texts = cast("Sequence[str | None]", batch.columns["generated_answer"])
                out_BS[:, place] = [len((text or "").split()) for text in texts]
                continue
            field = _fields_of(stat)[0]
            if field not in answers:
                answers[field] = _answers(batch, field)
            values, lengths = answers[field]
            out_BS[:, place] = lengths if stat == "num_tokens" else _reduce(stat, values, lengths)
        (bad,) = np.nonzero(~np.isfinite(out_BS).all(axis=1))
        if len(bad):
            stats = [name for name, value in zip(self.names, out_BS[bad[0]], strict=True) if not np.isfinite(value)]
            raise ValueError(f"record {batch.numbers[bad[0]]}: {', '.join(stats)} is NaN or infinite; trace it again")
        return {"stats": out_BS}


def _fields_of(stat: str) -> list[str]:
    if stat == "num_words":
        return ["generated_answer"]
    plain = {"tokens": "logprobs", "logprob": "logprobs", "entropy": "entropy", "logrank": "rank"}
    return [plain.get(stat.split("_")[1], "topk_logprobs"), "answer_len"]


def _answers(batch: TraceBatch, field: str) -> tuple[Floats, NDArray[np.int64]]:
    """The rows of a field that belong to answers, one record after the other, and how many each has.

    The rows of a record are of the tokens generated: the answer, then perhaps a stop token. An answer of no tokens is
    looked at in all of them.
    """
    rows = cast("Sequence[Array | None]", batch.columns[field])
    asked = cast("Sequence[int | None]", batch.columns["answer_len"])
    kept: list[Array] = []
    for number, values, length in zip(batch.numbers.tolist(), rows, asked, strict=True):
        if values is None:
            raise ValueError(f"record {number} has no {field!r}; take a subset of the records that have one")
        kept.append(values[: int(length or 0) or None])
    lengths = np.array([len(values) for values in kept], np.int64)
    flat = np.concatenate([as_floats(values) for values in kept]) if kept else np.zeros(0)
    return flat.astype(np.float32), lengths


def _reduce(stat: str, values: Floats, lengths: NDArray[np.int64]) -> Floats:
    """One number a record, 0 where it has no tokens."""
    how, what = stat.split("_")
    values_A = _QUANTITIES[what](values)
    out = np.zeros(len(lengths), np.float32)
    some = lengths > 0  # those without tokens have no start of their own, which `reduceat` needs
    if some.any():
        ends = np.cumsum(lengths[some])
        starts = ends - lengths[some]
        match how:
            case "first":
                out[some] = values_A[starts]
            case "last":
                out[some] = values_A[ends - 1]
            case "min":
                out[some] = np.minimum.reduceat(values_A, starts)
            case "max":
                out[some] = np.maximum.reduceat(values_A, starts)
            case _:
                total = np.add.reduceat(values_A.astype(np.float64), starts)
                out[some] = total / lengths[some] if how == "mean" else total
    return out


def _log(logprobs: Floats) -> Floats:
    return np.maximum(logprobs, _LEAST)


def _margin(top_AK: Floats) -> Floats:
    """The most likely tokens come first."""
    probs = np.exp(top_AK[:, :2])
    return probs[:, 0] - (probs[:, 1] if probs.shape[1] > 1 else 0)


def _part(start: int, end: int | None) -> Callable[[Floats], Floats]:
    def part(top_AK: Floats) -> Floats:
        logs = _log(top_AK[:, start:end])
        return -(np.exp(logs) * logs).sum(axis=1)

    return part


_QUANTITIES: dict[str, Callable[[Floats], Floats]] = {
    "logprob": _log,
    "entropy": lambda entropy: entropy,
    "logrank": np.log1p,
    "margin": _margin,
    "topmass": lambda top_AK: np.exp(top_AK).sum(axis=1),
    "part1": _part(0, 1),
    "part2": _part(1, 2),
    "part3": _part(2, 3),
    "partrest": _part(3, None),
}
