"""Confidence intervals, and whether two models differ: a bootstrap in which all models see the same draws."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from millstream.report.measures import Counts, Floats, Labels

Measure = Callable[[Counts], Floats]
"""Given R sets of counts, how often each record was drawn: K numbers each, K x R."""
Key = TypeVar("Key", bound=Hashable)

ALPHA = 0.05
MANY_SEEDS = 5
SEED = 20_240_607
CHUNK_BYTES = 10_000_000  # five times as much takes twice as long: fresh pages instead of cached ones
_ARRAYS = 10  # of eight bytes per count, held by a measure at once


@dataclass(frozen=True)
class Interval:
    """A number and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """`0.931 [0.902, 0.953]`, each number written by the spec; only the value gets a plus sign."""
        spec = spec or ".3f"
        bounds = spec.lstrip("+")
        return f"{self.value:{spec}} [{self.low:{bounds}}, {self.high:{bounds}}]"

    def __neg__(self) -> "Interval":
        return Interval(-self.value, -self.high, -self.low)


@dataclass(frozen=True)
class Resampled:
    """A number on all records, and on each of R draws."""

    value: float
    drawn: Floats

    @property
    def interval(self) -> Interval:
        low, high = np.quantile(self.drawn, [0.025, 0.975]).tolist()
        return Interval(self.value, low, high)

    def __sub__(self, other: "Resampled") -> "Resampled":
        """The paired difference on the same draws: what is hard for both models cancels out."""
        return Resampled(self.value - other.value, self.drawn - other.drawn)


def mean(some: Sequence[Resampled]) -> Resampled:
    """The mean over the seeds of a model, on all records and on each draw."""
    return Resampled(float(np.mean([one.value for one in some])), np.mean([one.drawn for one in some], axis=0))


@dataclass(frozen=True)
class Difference:
    """A measure of model `a` minus that of model `b`, on the same records of a split."""

    a: str
    b: str
    split: str
    value: Interval
    p: float  # two-sided, paired bootstrap
    p_holm: float  # corrected for all comparisons made
    differs: bool  # p_holm < ALPHA

    @property
    def is_better(self) -> bool:
        return self.differs and self.value.value > 0


def compare(pairs: Sequence[tuple[str, str, str]], drawn: Mapping[tuple[str, str], Resampled]) -> list[Difference]:
    """Models a and b on a split, for every (a, b, split); `drawn` has the measure of each model on each split.

    All p values are corrected for the number of comparisons (Holm).
    """
    found = [drawn[a, split] - drawn[b, split] for a, b, split in pairs]
    p_values = [p_value(one) for one in found]
    rows = zip(pairs, found, p_values, holm(p_values), strict=True)
    return [Difference(*pair, one.interval, p, p_holm, p_holm < ALPHA) for pair, one, p, p_holm in rows]


def verdict(found: Difference, other: str, *, least_p: float = 0.0) -> str:
    """A difference in words: `beats length (0.612) by 0.120 [0.080, 0.160], p = 0.004 after Holm`.

    `least_p` is the smallest corrected p that the number of draws allows.
    """
    p = f"p {'<=' if found.p_holm <= least_p else '='} {found.p_holm:.3f} after Holm"
    if found.is_better:
        return f"beats {other} by {found.value}, {p}"
    if found.differs:
        return f"is WORSE than {other} by {-found.value}, {p}"
    return f"does NOT beat {other}: {found.value:+.3f}, {p}"


def about_seeds(name: str, measure: str, num_seeds: int, deviations: str) -> str:
    """How many seeds the numbers of a model are averaged over, and how much they vary."""
    if num_seeds == 1:
        return f"{name} was trained once, so how much its {measure} depends on the seed is unknown."
    few = "" if num_seeds >= MANY_SEEDS else f"; {MANY_SEEDS} or more seeds would give a better estimate"
    return (
        f"Numbers of {name} are means over {num_seeds} seeds; the standard deviation of its {measure} between seeds is "
        f"{deviations}{few}."
    )


def p_value(difference: Resampled) -> float:
    """Two-sided: twice the share of draws on the rarer side of zero. Never 0: that takes infinitely many draws."""
    below, above = int(np.sum(difference.drawn <= 0)), int(np.sum(difference.drawn >= 0))
    return min(1.0, 2 * (min(below, above) + 1) / (len(difference.drawn) + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values corrected for the number of comparisons."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)
    corrected = np.empty(len(p_values))
    corrected[order] = np.minimum(np.maximum.accumulate(np.asarray(p_values, np.float64)[order] * factors), 1)
    return corrected.tolist()


def bootstrap(
    measures: Mapping[Key, Measure], labels: Labels, *, groups: NDArray[np.int64], resamples: int, seed: int = SEED
) -> dict[Key, list[Resampled]]:
    """The numbers of every measure on all records and on `resamples` draws, the same for all.

    `groups` are numbers from 0: the records of a group are drawn together.
    """
    if resamples < 1:
        raise ValueError(f"resamples={resamples}: must be at least 1")
    drawn: dict[Key, list[Floats]] = {key: [] for key in measures}
    for counts in draw(labels, groups, resamples=resamples, seed=seed):
        for key, measure in measures.items():
            drawn[key].append(measure(counts))
    once = np.ones((1, len(labels)), np.int32)
    found: dict[Key, list[Resampled]] = {}
    for key, measure in measures.items():
        values_K, drawn_KR = measure(once)[:, 0], np.concatenate(drawn[key], axis=1)
        found[key] = [Resampled(float(value), drawn_KR[number]) for number, value in enumerate(values_K)]
    return found


def draw(
    labels: Labels,
    groups: NDArray[np.int64],
    *,
    resamples: int,
    seed: int = SEED,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[NDArray[np.int32]]:
    """How often each record was drawn, in chunks of resamples; the draws do not depend on the chunk size.

    Draws as many groups as there are, with replacement. A draw with only one label is repeated.
    """
    num_groups, num_positive = int(groups.max()) + 1, int(labels.sum())
    assert 0 < num_positive < len(labels), "records of a single label cannot be resampled"
    rng = np.random.default_rng(seed)
    rows = min(max(chunk_bytes // (8 * _ARRAYS * len(labels)), 1), resamples)
    left = resamples
    while left:
        numbers = rng.integers(num_groups, size=(rows, num_groups))
        numbers += num_groups * np.arange(rows)[:, None]
        counts = np.bincount(numbers.ravel(), minlength=rows * num_groups).reshape(rows, num_groups)
        counts = counts.astype(np.int32)[:, groups]
        positive = counts @ labels.astype(np.int32)
        counts = counts[(positive > 0) & (positive < counts.sum(axis=1))][:left]
        left -= len(counts)
        yield counts
