"""Measures of scores against labels, in plain numpy, and their confidence intervals by a paired bootstrap.

Of two classes, label 1 is the one to find. `f1_scores` and what is measured of a `Ranking` are one number for each of R
sets of counts (how often each of N records was drawn).
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from millstream.report.ranking import Counts, Floats, Ranking

# R sets of counts, N records, G groups of records with equal scores, C classes

Labels = NDArray[np.int8]

MAX_POINTS = 500  # per curve: more would not be visible
NUM_BINS = 15
_MAX_STEPS = 100


@dataclass(frozen=True)
class Curve:
    """Points of a line."""

    x: Sequence[float]
    y: Sequence[float]


# -- ranking


def auroc(labels: Counts, scores: Counts) -> float:
    """The probability that a record of label 1 scores above one of label 0; ties count half. NaN with one class."""
    return float(Ranking(labels, scores).tally().aurocs()[0])


def fpr_at_tpr(labels: Labels, scores: Floats, tpr: float = 0.95) -> float:
    """The false positive rate at this true positive rate."""
    found_G, total_G, _ = _sweep(labels, scores)
    enough = int(np.argmax(found_G >= tpr * found_G[-1] - 1e-9))
    false_G = total_G - found_G
    return float(false_G[enough] / false_G[-1])


def roc_curve(labels: Labels, scores: Floats) -> Curve:
    """False positive rate, true positive rate."""
    found_G, total_G, _ = _sweep(labels, scores)
    false_G = total_G - found_G
    return _curve(np.append(0.0, false_G / false_G[-1]), np.append(0.0, found_G / found_G[-1]))


def precision_curve(labels: Labels, scores: Floats) -> Curve:
    """Recall, precision."""
    found_G, total_G, _ = _sweep(labels, scores)
    precision_G = found_G / total_G
    return _curve(np.append(0.0, found_G / found_G[-1]), np.append(precision_G[0], precision_G))


# -- at a threshold


def best_threshold(labels: Labels, scores: Floats) -> float:
    """The threshold with the highest F1; of equal ones, the highest."""
    found_G, total_G, last = _sweep(labels, scores)
    f1_G = 2 * found_G / (total_G + found_G[-1])
    return float(-np.sort(-scores)[last[np.argmax(f1_G)]])


def precision_recall(labels: Labels, scores: Floats, threshold: float) -> tuple[float, float]:
    """Precision and recall of the records at or above the threshold; 0 if there are none."""
    flagged = scores >= threshold
    hits = int(labels[flagged].sum())
    return hits / max(int(flagged.sum()), 1), hits / max(int(labels.sum()), 1)


def f1_score(labels: Labels, scores: Floats, threshold: float) -> float:
    return float(f1_scores(labels, scores, threshold, np.ones((1, len(labels))))[0])


def f1_scores(labels: Labels, scores: Floats, threshold: float, counts_RN: Counts) -> Floats:
    flagged = (scores >= threshold).astype(np.float64)
    positive = labels.astype(np.float64)
    counts = np.asarray(counts_RN, np.float64)
    return 2 * (counts @ (flagged * positive)) / np.maximum(counts @ (flagged + positive), 1)


# -- rejection: keep the records with the lowest scores


def aurc(labels: Labels, scores: Floats) -> float:
    """The mean share of label 1 among the k lowest scores, over all k. Ties: the mean over all their orders."""
    return float(Ranking(labels, scores).tally().aurcs()[0])


def prr(labels: Labels, scores: Floats) -> float:
    """The prediction rejection ratio: 1 if all of label 1 are rejected first, 0 for a random order."""
    base = float(labels.mean())
    return (base - aurc(labels, scores)) / (base - aurc(labels, labels.astype(np.float64)))


def risk_coverage(labels: Labels, scores: Floats) -> Curve:
    """The share of records kept, lowest scores first, and the share of label 1 among them."""
    tally = Ranking(labels, scores).tally()
    return _curve(tally.total_RG[0] / len(labels), tally.found_RG[0] / tally.total_RG[0])


# -- calibration


@dataclass(frozen=True)
class Platt:
    """A logistic curve through scores: `platt(scores)` are probabilities of label 1."""

    mean: float
    scale: float
    slope: float
    offset: float

    def __call__(self, scores: Floats) -> Floats:
        return _logistic(self.slope * (scores - self.mean) / self.scale + self.offset)


def fit_platt(labels: Labels, scores: Floats) -> Platt:
    """Logistic regression of labels on standardised scores.

    Uses Platt's targets, slightly inside 0 and 1, so that the slope is finite even if the classes do not overlap.
    """
    mean, scale = float(scores.mean()), float(scores.std()) or 1.0
    design = np.stack([(scores - mean) / scale, np.ones(len(scores))], axis=1)
    num_positive = int(labels.sum())
    targets = np.where(labels == 1, (num_positive + 1) / (num_positive + 2), 1 / (len(labels) - num_positive + 2))
    weights = np.zeros(2)
    loss = _loss(design @ weights, targets)
    for _ in range(_MAX_STEPS):
        probabilities = _logistic(design @ weights)
        gradient = design.T @ (probabilities - targets)
        curvature = probabilities * (1 - probabilities)
        step = np.linalg.solve(design.T @ (design * curvature[:, None]) + 1e-9 * np.eye(2), gradient)
        # Newton overshoots where the curve is flat: halve the step until it helps.
        while (tried := _loss(design @ (weights - step), targets)) > loss and np.abs(step).max() > 1e-12:
            step = step / 2
        weights, loss = weights - step, tried
        if np.abs(step).max() < 1e-9:
            break
    return Platt(mean, scale, float(weights[0]), float(weights[1]))


def brier(labels: Labels, probabilities: Floats) -> float:
    """The mean squared difference between probability and label."""
    return float(np.mean((probabilities - labels) ** 2))


def ece(labels: Labels, probabilities: Floats, num_bins: int = NUM_BINS) -> float:
    """The expected calibration error over bins of equal counts; equal values share a bin. NaN without records."""
    return calibration(labels, probabilities, num_bins)[0]


def calibration_curve(labels: Labels, probabilities: Floats, num_bins: int = NUM_BINS) -> Curve:
    """The mean probability of each bin, and the share of label 1 in it."""
    return calibration(labels, probabilities, num_bins)[1]


def calibration(labels: Labels, probabilities: Floats, num_bins: int = NUM_BINS) -> tuple[float, Curve]:
    """The ECE and the calibration curve, from the same bins."""
    if not len(labels):
        return float("nan"), Curve([], [])
    bins = equal_bins(probabilities, num_bins)
    sizes = np.bincount(bins).astype(np.float64)
    predicted, observed = np.bincount(bins, probabilities) / sizes, np.bincount(bins, labels) / sizes
    return float(np.abs(predicted - observed) @ sizes / len(labels)), Curve(predicted.tolist(), observed.tolist())


def equal_bins(values: Counts, num_bins: int) -> NDArray[np.int64]:
    """The bin of every value, from 0: about equal counts, equal values in the same bin, no empty bin."""
    ranked = np.sort(values)
    starts = np.unique(ranked[[len(ranked) * number // num_bins for number in range(num_bins)]])
    return np.searchsorted(starts, values, side="right") - 1


# -- many classes


def macro_f1(labels: Counts, predicted: Counts) -> float:
    """The mean F1 over the classes that occur in the labels; records of label -1 are left out. NaN without any.

    A record predicted as -1 is assigned to no class.
    """
    true, found = np.asarray(labels, np.int64), np.asarray(predicted, np.int64)
    true, found = true[true >= 0], found[true >= 0]
    size = int(max(true.max(initial=0), found.max(initial=0))) + 1
    counts = (np.bincount(some, minlength=size) for some in (true, found[found >= 0], true[true == found]))
    return float(macro_f1s(*counts))


def macro_f1s(true: Counts, predicted: Counts, hits: Counts) -> Floats:
    """The same from counts per class [..., C]: its records, records assigned to it, and correctly assigned ones."""
    true, predicted, hits = (np.asarray(some, np.float64) for some in (true, predicted, hits))
    occurs = true > 0
    f1 = np.nan_to_num(ratio(2 * hits, true + predicted))
    return ratio(np.where(occurs, f1, 0).sum(axis=-1), occurs.sum(axis=-1))


def ratio(part: Counts, whole: Counts) -> Floats:
    """part / whole; NaN where the whole is 0."""
    part, whole = np.asarray(part, np.float64), np.asarray(whole, np.float64)
    return np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole > 0)


def spaced(size: int, most: int) -> NDArray[np.int64]:
    """At most `most` of `size` positions at even steps, with the first and the last."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(np.int64))


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation between seeds; None with one."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def _sweep(labels: Labels, scores: Floats) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Of records at or above each score, from the highest down: those of label 1, all, and the place of the last."""
    ranking = Ranking(labels, -scores)
    tally = ranking.tally()
    return tally.found_RG[0], tally.total_RG[0], ranking.last


def _curve(x: Floats, y: Floats) -> Curve:
    kept = spaced(len(x), MAX_POINTS)
    return Curve(x[kept].tolist(), y[kept].tolist())


def _logistic(values: Floats) -> Floats:
    return np.exp(-np.logaddexp(0, -values))


def _loss(values: Floats, targets: Floats) -> float:
    return float(np.sum(np.logaddexp(0, values) - targets * values))


Measure = Callable[[Counts], Floats]
"""Given R sets of counts, how often each record was drawn: K numbers each, K x R."""
Key = TypeVar("Key", bound=Hashable)

ALPHA = 0.05
MANY_SEEDS = 5
SEED = 20_240_607
CHUNK_BYTES = 10_000_000  # five times as much takes twice as long: fresh pages instead of cached ones
_ARRAYS = 10  # of eight bytes per count: what a measure holds in memory


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
    """A difference in words: `beats other (0.612) by 0.120 [0.080, 0.160], p = 0.004 after Holm`.

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
        return f"{name} was trained with one seed, so how much its {measure} depends on the seed is unknown."
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
