"""The baselines by name: what every trained detector has to beat, most of them for the price of reading a store."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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


def _alone(title: str, make: Callable[[Means], Detector], *needed: str, extra_forwards: int = 0) -> Baseline:
    """One that is made the same way for every store."""

    def make_for(means: Means, field_names: Sequence[str]) -> Detector:
        return make(means)

    return Baseline(title, make_for, needed, extra_forwards)


def _stat(title: str, stat: str) -> Baseline:
    feature = token_stats(stat)
    return _alone(title, partial(Single, feature=feature, key="stats"), *feature.fields)


def _field(title: str, name: str, *, extra_forwards: int = 0) -> Baseline:
    return _alone(title, partial(Single, feature=fields(name), key=name), name, extra_forwards=extra_forwards)


def _probe(title: str, position: Position) -> Baseline:
    return Baseline(title, partial(probe, position=position), ("states|hidden",))


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
    "token_stats": _alone("regression on token statistics", token_probe, *token_stats().fields),
    "logdet": _alone("regression on attention log-determinants", logdet, "attention_logdet"),
    "lookback": _alone("regression on attention to the prompt", lookback, "prompt_attention", "answer_len"),
    "lapeigvals": _alone("regression on Laplacian eigenvalues", LapEigvals, "laplacian"),
    "probe_last_prompt": _probe("probe at the last prompt token", "last_prompt"),
    "probe_first_answer": _probe("probe at the first answer token", "first_answer"),
    "probe_last_answer": _probe("probe at the last answer token", "last_answer"),
    "probe_mean_answer": _probe("probe of the mean answer token", "mean_answer"),
}
