"""Predictions of one model and seed -> its measures on every split, with thresholds chosen on validation.

Reads of no known class have label -1: accuracy and F1 leave them out, and above a threshold they count as errors.
Reads that a model leaves unclassified are assigned to class -1: they count as missed, and as correct for no class.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millstream.reads.report.predictions_file import UNKNOWN, Key, Predictions, PredictionsFile
from millstream.report.measures import SEED, Curve, Resampled, calibration, macro_f1s, ratio, spaced

# N reads, C classes, G groups of reads, R draws of groups

Floats = NDArray[np.float64]
Codes = NDArray[np.integer]
VAL = "val"
PRECISION = 0.95  # on validation, at the threshold chosen for a model
TARGETS = (0.9, PRECISION, 0.99, 0.999)
MIN_CLASSIFIED = 50  # validation reads: the precision of fewer is unreliable
MAX_POINTS = 400  # per curve: more would not be visible
MAX_GROUPS = 1000
"""Up to this number, single reads are resampled. More reads are assigned to this many random groups, and groups are
resampled: the same spread within 2 % (1 / sqrt(2 x 1000)), at a cost that no longer grows with the reads."""
MAX_DENSE = 4_000_000  # cells of a confusion matrix counted in one array


@dataclass(frozen=True)
class Tally:
    """Per class [..., C], of reads of known classes: its reads, reads assigned to it, and correctly assigned ones."""

    true: Floats
    assigned: Floats
    hits: Floats

    def over(self, classes: NDArray[np.bool_]) -> "Tally":
        """Only these classes."""
        return Tally(self.true[..., classes], self.assigned[..., classes], self.hits[..., classes])

    def drawn(self, counts_RG: Floats) -> "Tally":
        """For draws of the groups [G, C] that were counted."""
        return Tally(counts_RG @ self.true, counts_RG @ self.assigned, counts_RG @ self.hits)

    @property
    def accuracy(self) -> Floats:
        return ratio(self.hits.sum(axis=-1), self.true.sum(axis=-1))

    @property
    def precision(self) -> Floats:
        return ratio(self.hits, self.assigned)

    @property
    def recall(self) -> Floats:
        return ratio(self.hits, self.true)

    @property
    def f1(self) -> Floats:
        """NaN for a class without reads that is never assigned."""
        return ratio(2 * self.hits, self.true + self.assigned)

    @property
    def macro_f1(self) -> Floats:
        return macro_f1s(self.true, self.assigned, self.hits)


def tally(labels: Codes, found: Codes, num_classes: int, *, groups: Codes | None = None, num_groups: int = 1) -> Tally:
    """Counts of each class in each group [G, C]; without groups, of all reads [1, C]."""
    known = labels >= 0
    labels, found = labels[known].astype(np.int64), found[known].astype(np.int64)
    start = 0 if groups is None else groups[known].astype(np.int64) * num_classes

    def counted(classes: NDArray[np.int64], only: NDArray[np.bool_] | slice = slice(None)) -> Floats:
        places = (start + classes)[only]
        counts = np.bincount(places, minlength=num_groups * num_classes)
        return counts.reshape(num_groups, num_classes).astype(np.float64)

    return Tally(counted(labels), counted(found, found >= 0), counted(labels, labels == found))


@dataclass(frozen=True)
class Confusion:
    """Counts of reads by true class (-1: no known class) and assigned one (-1: unclassified), for pairs that occur."""

    labels: NDArray[np.int64]
    found: NDArray[np.int64]
    counts: NDArray[np.int64]

    def dense(self, num_classes: int) -> NDArray[np.int64]:
        """[C + 1, C + 1]; the last row is of reads of no known class, the last column of unclassified reads."""
        whole = np.zeros((num_classes + 1, num_classes + 1), np.int64)
        whole[self.labels, self.found] = self.counts
        return whole

    def unknown(self, num_classes: int) -> NDArray[np.int64]:
        """Reads of no known class that are assigned to each class."""
        mine = (self.labels == UNKNOWN) & (self.found >= 0)
        return np.bincount(self.found[mine], self.counts[mine], minlength=num_classes).astype(np.int64)

    def tally(self, num_classes: int) -> Tally:
        known = self.labels >= 0
        hit = known & (self.labels == self.found)

        def counted(classes: NDArray[np.int64], only: NDArray[np.bool_]) -> Floats:
            return np.bincount(classes[only], self.counts[only], minlength=num_classes).astype(np.float64)

        assigned = counted(self.found, known & (self.found >= 0))
        return Tally(counted(self.labels, known), assigned, counted(self.labels, hit))

    def abundance_error(self, num_classes: int) -> float:
        """The L1 distance of the predicted from the true profile, 0 to 2; half of it is Bray-Curtis.

        As profilers report them: shares of the classified reads, and of the reads of known classes. An empty profile
        is at a distance of 1.
        """
        true, assigned = (
            np.bincount(classes[classes >= 0], self.counts[classes >= 0], minlength=num_classes)
            for classes in (self.labels, self.found)
        )
        return float(np.abs(true / max(true.sum(), 1) - assigned / max(assigned.sum(), 1)).sum())


def confusion(labels: Codes, found: Codes, num_classes: int, *, max_dense: int = MAX_DENSE) -> Confusion:
    size = num_classes + 1
    codes = (labels.astype(np.int64) + 1) * size + found + 1
    if size * size <= max_dense:
        counts = np.bincount(codes)
        cells = np.flatnonzero(counts)
        counts = counts[cells]
    else:
        cells, counts = np.unique(codes, return_counts=True)
    return Confusion(cells // size - 1, cells % size - 1, counts)


@dataclass(frozen=True)
class ThresholdCurve:
    """Measures when only reads above a probability threshold are classified, per threshold."""

    threshold: Floats  # falling
    coverage: Floats  # share of all reads that are classified
    precision: Floats  # share of the classified that are correct
    recall: Floats  # share of the reads of known classes that are classified correctly

    def loosest(self, precision: float, *, coverage: float = 0.0) -> float | None:
        """The lowest threshold with this precision and at least this coverage; 0: none needed; None: there is none."""
        enough = np.flatnonzero((self.precision >= precision) & (self.coverage >= coverage))
        if not len(enough):
            return None
        return 0.0 if enough[-1] == len(self.threshold) - 1 else float(self.threshold[enough[-1]])

    def thinned(self) -> "ThresholdCurve":
        """Points at about even steps of coverage."""
        kept = spaced(len(self.threshold), MAX_POINTS)
        return ThresholdCurve(self.threshold[kept], self.coverage[kept], self.precision[kept], self.recall[kept])


def threshold_curve(labels: Codes, right: NDArray[np.bool_], probabilities: NDArray[np.floating]) -> ThresholdCurve:
    """One point per distinct probability above 0, the highest first: a probability of 0 is no assignment."""
    order = np.argsort(probabilities)[::-1]
    order = order[probabilities[order] > 0]
    if not len(order):
        return ThresholdCurve(np.ones(1), np.zeros(1), np.full(1, np.nan), np.zeros(1))
    ranked = probabilities[order]
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))  # reads of equal probability go together
    hits, num_kept = np.cumsum(right[order])[last], last + 1.0
    num_known = max(int(np.sum(labels >= 0)), 1)
    return ThresholdCurve(ranked[last].astype(np.float64), num_kept / len(labels), hits / num_kept, hits / num_known)


@dataclass(frozen=True)
class AtThreshold:
    coverage: float
    precision: float  # NaN if nothing is classified
    recall: float
    unknown: float  # share of the reads of no known class that are classified; NaN without such reads


def at_threshold(
    labels: Codes, right: NDArray[np.bool_], probabilities: NDArray[np.floating], threshold: float
) -> AtThreshold:
    kept, unknown = (probabilities >= threshold) & (probabilities > 0), labels == UNKNOWN
    num_kept, hits = int(kept.sum()), int((kept & right).sum())
    num_unknown = int(unknown.sum())
    return AtThreshold(
        coverage=num_kept / max(len(labels), 1),
        precision=hits / num_kept if num_kept else np.nan,
        recall=hits / max(len(labels) - num_unknown, 1),
        unknown=int((kept & unknown).sum()) / num_unknown if num_unknown else np.nan,
    )


@dataclass(frozen=True)
class Target:
    """A target precision on validation, its threshold, and the measures of a split there; None: not reachable."""

    precision: float
    threshold: float | None
    at: AtThreshold | None


@dataclass(frozen=True)
class Draws:
    """The group of each read of a split, and how often each group is drawn: in the first row once, then at random."""

    groups: NDArray[np.int64]
    counts_RG: Floats

    def accuracy_and_f1(self, labels: Codes, found: Codes, num_classes: int) -> tuple[Resampled, Resampled]:
        """Accuracy and macro F1 on all reads and on every draw."""
        drawn = self.tally(labels, found, num_classes).drawn(self.counts_RG)
        return _resampled(drawn.accuracy), _resampled(drawn.macro_f1)

    def macro_f1_over(self, classes: NDArray[np.bool_], labels: Codes, found: Codes) -> Resampled:
        """Macro F1 over these classes."""
        return _resampled(self.tally(labels, found, len(classes)).over(classes).drawn(self.counts_RG).macro_f1)

    def tally(self, labels: Codes, found: Codes, num_classes: int) -> Tally:
        return tally(labels, found, num_classes, groups=self.groups, num_groups=self.counts_RG.shape[1])


def draws_of(num_reads: int, *, resamples: int, number: int = 0, max_groups: int = MAX_GROUPS) -> Draws:
    """Draws of the reads of a split; splits with different numbers have independent draws."""
    rng = np.random.default_rng([SEED, number])
    num_groups = max(min(num_reads, max_groups), 1)
    groups = np.arange(num_reads) % num_groups
    if num_reads > num_groups:
        groups = rng.permutation(groups)
    drawn_RG = rng.multinomial(num_groups, np.full(num_groups, 1 / num_groups), size=resamples)
    return Draws(groups, np.concatenate([np.ones((1, num_groups)), drawn_RG.astype(np.float64)]))


@dataclass(frozen=True)
class MeasuredRank:
    """A model at one rank."""

    num_taxa: int
    accuracy: Resampled
    macro_f1: Resampled


@dataclass(frozen=True)
class Measured:
    """One model of one seed on one split."""

    num_reads: int
    num_unknown: int
    num_unclassified: int
    num_classes: int
    accuracy: Resampled
    macro_f1: Resampled
    ranks: Mapping[str, MeasuredRank]
    targets: Mapping[float, Target]
    ece: float
    confidence: float
    abundance_l1: float
    thresholds: ThresholdCurve
    calibration: Curve
    confusion: Confusion


class Evaluator:
    """Evaluates models on splits; all models share the draws of a split.

    `taxa` has the taxon of each class at every rank (-1: none), `num_taxa` how many taxa a rank has.
    """

    def __init__(
        self,
        file: PredictionsFile,
        *,
        num_classes: int,
        taxa: Mapping[str, Sequence[int]],
        num_taxa: Mapping[str, int],
        resamples: int,
    ) -> None:
        self._file, self._num_classes, self._num_taxa, self._resamples = file, num_classes, num_taxa, resamples
        # The last entry, -1, is for reads of no known class, whose label -1 indexes it.
        self._taxa = {rank: np.array([*taxa[rank], -1]) for rank in file.ranks}
        self._draws: dict[str, Draws] = {}

    def num_bad(self, key: Key, splits: Sequence[str]) -> int:
        """The number of probabilities that are not finite."""
        return sum(int(np.sum(~np.isfinite(self._file.read(key, split).probabilities))) for split in splits)

    def evaluate(self, key: Key, splits: Sequence[str]) -> dict[str, Measured]:
        """Validation first: the thresholds chosen there are used on all splits."""
        thresholds: dict[float, float | None] = {}
        measured: dict[str, Measured] = {}
        for split in sorted(splits, key=lambda split: split != VAL):
            predictions = self._file.read(key, split)
            right = _are_right(predictions)
            curve = threshold_curve(predictions.labels, right, predictions.probabilities)
            if split == VAL:
                least = min(MIN_CLASSIFIED / len(right), 1)
                thresholds = {precision: curve.loosest(precision, coverage=least) for precision in TARGETS}
            measured[split] = self._split(
                predictions, curve.thinned(), thresholds, draws=self._draws_of(split, len(right))
            )
        return measured

    def has(self, split: str) -> NDArray[np.bool_]:
        """Which classes have reads in an evaluated split."""
        labels = self._file.labels(split)
        return np.bincount(labels[labels >= 0], minlength=self._num_classes) > 0

    def macro_f1_over(self, classes: NDArray[np.bool_], key: Key, split: str) -> Resampled:
        """Macro F1 over these classes on an evaluated split."""
        predictions = self._file.read(key, split)
        return self._draws[split].macro_f1_over(classes, predictions.labels, predictions.found)

    def _split(
        self, predictions: Predictions, curve: ThresholdCurve, thresholds: Mapping[float, float | None], *, draws: Draws
    ) -> Measured:
        labels, found, probabilities = predictions.labels, predictions.found, predictions.probabilities
        right, known = _are_right(predictions), labels >= 0
        classified = known & (found >= 0)
        cells = confusion(labels, found, self._num_classes)
        accuracy, macro_f1 = draws.accuracy_and_f1(labels, found, self._num_classes)
        ece, points = calibration(right[classified].astype(np.int8), probabilities[classified].astype(np.float64))
        at = {
            target: None if one is None else at_threshold(labels, right, probabilities, one)
            for target, one in thresholds.items()
        }
        return Measured(
            num_reads=len(labels),
            num_unknown=int(np.sum(~known)),
            num_unclassified=int(np.sum(found < 0)),
            num_classes=int(np.sum(cells.tally(self._num_classes).true > 0)),
            accuracy=accuracy,
            macro_f1=macro_f1,
            ranks={rank: self._rank(predictions, rank, draws) for rank in self._taxa},
            targets={target: Target(target, one, at[target]) for target, one in thresholds.items()},
            ece=ece,
            confidence=float(np.mean(probabilities[known], dtype=np.float64)) if known.any() else np.nan,
            abundance_l1=cells.abundance_error(self._num_classes),
            thresholds=curve,
            calibration=points,
            confusion=cells,
        )

    def _rank(self, predictions: Predictions, rank: str, draws: Draws) -> MeasuredRank:
        """Reads of classes without a taxon at this rank are left out, like reads of no known class."""
        true, num_taxa = self._taxa[rank][predictions.labels], self._num_taxa[rank]
        accuracy, macro_f1 = draws.accuracy_and_f1(true, predictions.ranks[rank], num_taxa)
        occurs = np.bincount(true[true >= 0], minlength=num_taxa) > 0
        return MeasuredRank(int(np.sum(occurs)), accuracy, macro_f1)

    def _draws_of(self, split: str, num_reads: int) -> Draws:
        if split not in self._draws:
            self._draws[split] = draws_of(num_reads, resamples=self._resamples, number=len(self._draws))
        return self._draws[split]


def _are_right(predictions: Predictions) -> NDArray[np.bool_]:
    """A read of no known class is never right, not even if it is unclassified."""
    return (predictions.labels >= 0) & (predictions.found == predictions.labels)


def _resampled(numbers_R: Floats) -> Resampled:
    return Resampled(float(numbers_R[0]), numbers_R[1:])
