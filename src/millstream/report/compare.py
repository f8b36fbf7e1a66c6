"""Which detectors are compared, and what comes of it. What is best is decided on validation, never on test."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from millstream.report.bootstrap import Resampled, holm, p_value
from millstream.report.results import Difference

TRAINED, BASELINE, NULL = "trained", "baseline", "null"
LENGTH, LOGPROB, TOKEN_STATS, PROBE = "length", "mean_logprob", "token_stats", "probe_"
NULLS = ("shuffled", "unwired")
ALPHA = 0.05


@dataclass(frozen=True)
class Contender:
    """A detector, as far as a comparison knows it."""

    name: str
    family: str
    auroc_val: float
    auroc: Resampled


@dataclass(frozen=True)
class Best:
    """The best of their kind on validation; None where there is none."""

    trained: str | None
    baseline: str | None
    probe: str | None
    detector: str | None
    """Of trained ones and baselines."""


def best_of(contenders: Iterable[Contender]) -> Best:
    ranked = sorted(contenders, key=lambda one: -one.auroc_val)

    def first(*families: str, prefix: str = "") -> str | None:
        fitting = (one.name for one in ranked if one.family in families and one.name.startswith(prefix))
        return next(fitting, None)

    return Best(first(TRAINED), first(BASELINE), first(BASELINE, prefix=PROBE), first(TRAINED, BASELINE))


def compare(contenders: Mapping[str, Contender]) -> list[Difference]:
    """Every comparison there is to make, once, on the same draws, corrected for their number (Holm)."""
    pairs = list(dict.fromkeys(pair for pair in _pairs(contenders) if pair[0] != pair[1]))
    differences = [contenders[a].auroc - contenders[b].auroc for a, b in pairs]
    p_values = [p_value(difference) for difference in differences]
    rows = zip(pairs, differences, p_values, holm(p_values), strict=True)
    return [Difference(a, b, found.interval, p, p_holm, p_holm < ALPHA) for (a, b), found, p, p_holm in rows]


def _pairs(contenders: Mapping[str, Contender]) -> Iterator[tuple[str, str]]:
    best = best_of(contenders.values())
    ranked = sorted(contenders.values(), key=lambda one: -one.auroc_val)
    trained = [one.name for one in ranked if one.family == TRAINED]

    def against(name: str, *others: str | None) -> Iterator[tuple[str, str]]:
        yield from ((name, other) for other in others if other is not None and other in contenders)

    for name in trained:
        yield from against(name, best.baseline, best.probe, LENGTH, LOGPROB, TOKEN_STATS)
    yield from combinations(trained, 2)
    for name in trained:
        yield from against(name, *(f"{name}_{null}" for null in NULLS))
    if best.probe is not None:
        yield from against(best.probe, LENGTH, LOGPROB)
