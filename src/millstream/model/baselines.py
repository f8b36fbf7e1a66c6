"""The baselines by name: what every trained detector has to beat, most of them for the price of reading a store."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from millstream.dataset.features import fields, token_stats
from millstream.model.attention import LapEigvals, logdet, lookback
from millstream.model.detector import Detector, Means
from millstream.model.probe import Position, probe, token_probe
from millstream.model.single import Single

Make = Callable[[Means, Sequence[str]], Detector]


class Baseline(NamedTuple):
    """One of them; `make(means, field_names)` gives a detector for a store with these fields."""

    title: str
    make: Make
    needed: tuple[str, ...]
    """Fields that a store must have; `states|hidden` stands for either."""
    extra_forwards: int = 0
    """Passes of the language model beside those that make a trace."""


def usable(field_names: Sequence[str]) -> list[str]:
    """The names of the baselines that a store with these fields can use."""
    have = set(field_names)
    return [
        name for name, baseline in BASELINES.items() if all(have & set(needed.split("|")) for needed in baseline.needed)
    ]


def _stat(title: str, stat: str) -> Baseline:
    feature = token_stats(stat)
    return Baseline(title, lambda means, _: Single(means, feature=feature, key="stats"), tuple(feature.fields))


def _field(title: str, name: str, *, extra_forwards: int = 0) -> Baseline:
    return Baseline(title, lambda means, _: Single(means, feature=fields(name), key=name), (name,), extra_forwards)


def _probe(title: str, position: Position) -> Baseline:
    return Baseline(title, lambda means, field_names: probe(means, field_names, position=position), ("states|hidden",))


BASELINES: Mapping[str, Baseline] = {
    "length": _stat("number of answer tokens", "num_tokens"),
    "words": _stat("number of answer words", "num_words"),
    "sequence_logprob": _stat("log-prob of the answer", "sum_logprob"),
    "mean_logprob": _stat("mean log-prob (perplexity)", "mean_logprob"),
    "min_logprob": _stat("lowest log-prob", "min_logprob"),
    "entropy": _stat("mean token entropy", "mean_entropy"),
    "margin": _stat("mean top-1 less top-2 probability", "mean_margin"),
    "p_true": _field("the model's own P(True)", "p_true", extra_forwards=2),
    "logdet_mean": _field("mean attention log-determinant", "attention_logdet"),
    "token_stats": Baseline(
        "regression on token statistics", lambda means, _: token_probe(means), tuple(token_stats().fields)
    ),
    "logdet": Baseline(
        "regression on attention log-determinants", lambda means, _: logdet(means), ("attention_logdet",)
    ),
    "lookback": Baseline(
        "regression on looks back at the prompt", lambda means, _: lookback(means), ("prompt_attention", "answer_len")
    ),
    "lapeigvals": Baseline("regression on Laplacian eigenvalues", lambda means, _: LapEigvals(means), ("laplacian",)),
    "probe_last_prompt": _probe("probe at the last prompt token", "last_prompt"),
    "probe_first_answer": _probe("probe at the first answer token", "first_answer"),
    "probe_last_answer": _probe("probe at the last answer token", "last_answer"),
    "probe_mean_answer": _probe("probe of the mean answer token", "mean_answer"),
}
