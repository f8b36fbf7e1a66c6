"""Numbers and curves of one classifier's answers. A read of no known class (label -1) can only be called wrongly.

Accuracy and F1 are of the reads of known classes; what is called above a threshold is counted over all reads.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# N reads, C classes, G groups of reads, R draws of groups

Floats = NDArray[np.float64]
Codes = NDArray[np.integer]
UNKNOWN = -1
MAX_POINTS = 400  # of a curve: more would not be seen
_MAX_DENSE = 4_000_000  # cells of a confusion matrix that may be counted one by one


@dataclass(frozen=True)
class Tally:
    """Reads of known classes, in sets: of each class there are, are called so, and are called so rightly. [..., C]"""

    there: Floats
    said: Floats
    right: Floats

    def over(self, classes: NDArray[np.bool_]) -> "Tally":
        """The same of these classes only."""
        return Tally(self.there[..., classes], self.said[..., classes], self.right[..., classes])

    def drawn(self, counts_RG: Floats) -> "Tally":
        """The same for draws of the groups that are its sets."""
        return Tally(counts_RG @ self.there, counts_RG @ self.said, counts_RG @ self.right)

    @property
    def accuracy(self) -> Floats:
        return _ratio(self.right.sum(axis=-1), self.there.sum(axis=-1))

    @property
    def precision(self) -> Floats:
        return _ratio(self.right, self.said)

    @property
    def recall(self) -> Floats:
        return _ratio(self.right, self.there)

    @property
    def f1(self) -> Floats:
        """NaN for a class that is neither there nor said."""
        return _ratio(2 * self.right, self.there + self.said)

    @property
    def macro_f1(self) -> Floats:
        """The mean F1 over the classes that are there."""
        is_there = self.there > 0
        return _ratio(np.where(is_there, np.nan_to_num(self.f1), 0).sum(axis=-1), is_there.sum(axis=-1))


def tally(labels: Codes, found: Codes, num_classes: int, *, groups: Codes | None = None, num_groups: int = 1) -> Tally:
    """Counts of each class in each group [G, C]; without groups, in all [1, C]."""
    known = labels >= 0
    labels, found = labels[known].astype(np.int64), found[known].astype(np.int64)
    start = 0 if groups is None else groups[known].astype(np.int64) * num_classes

    def counted(classes: NDArray[np.int64], only: NDArray[np.bool_] | slice = slice(None)) -> Floats:
        places = (start + classes)[only]
        counts = np.bincount(places, minlength=num_groups * num_classes)
        return counts.reshape(num_groups, num_classes).astype(np.float64)

    return Tally(counted(labels), counted(found), counted(labels, labels == found))


@dataclass(frozen=True)
class Confusion:
    """How many reads of a class (-1: of none) are called which: every pair that there is, by class."""

    labels: NDArray[np.int64]
    found: NDArray[np.int64]
    counts: NDArray[np.int64]

    def dense(self, num_classes: int) -> NDArray[np.int64]:
        """[C + 1, C]: the last row is of reads of no known class."""
        whole = np.zeros((num_classes + 1, num_classes), np.int64)
        whole[self.labels, self.found] = self.counts
        return whole

    def unknown(self, num_classes: int) -> NDArray[np.int64]:
        """Reads of no known class that are called each class."""
        mine = self.labels == UNKNOWN
        return np.bincount(self.found[mine], self.counts[mine], minlength=num_classes).astype(np.int64)

    def tally(self, num_classes: int) -> Tally:
        known, right = self.labels >= 0, self.labels == self.found

        def counted(classes: NDArray[np.int64], only: NDArray[np.bool_]) -> Floats:
            return np.bincount(classes[only], self.counts[only], minlength=num_classes).astype(np.float64)

        return Tally(counted(self.labels, known), counted(self.found, known), counted(self.labels, right))


def confusion(labels: Codes, found: Codes, num_classes: int) -> Confusion:
    codes = (labels.astype(np.int64) + 1) * num_classes + found
    if (num_classes + 1) * num_classes <= _MAX_DENSE:
        counts = np.bincount(codes)
        cells = np.flatnonzero(counts)
        counts = counts[cells]
    else:
        cells, counts = np.unique(codes, return_counts=True)
    return Confusion(cells // num_classes - 1, cells % num_classes, counts)


@dataclass(frozen=True)
class Called:
    """What becomes of reads when only answers of at least some probability are kept. A number for each threshold."""

    threshold: Floats  # falling
    coverage: Floats  # share of all reads that are called
    precision: Floats  # share of the called that are right
    recall: Floats  # share of the reads of known classes that are called, and rightly

    def loosest(self, precision: float, *, coverage: float = 0.0) -> float | None:
        """The lowest threshold with this precision and at least this coverage: 0 for all calls, None for none."""
        enough = np.flatnonzero((self.precision >= precision) & (self.coverage >= coverage))
        if not len(enough):
            return None
        return 0.0 if enough[-1] == len(self.threshold) - 1 else float(self.threshold[enough[-1]])

    def thinned(self) -> "Called":
        """Points at about even steps of coverage."""
        size = len(self.threshold)
        kept = np.unique(np.linspace(0, size - 1, min(size, MAX_POINTS)).round().astype(np.int64))
        return Called(self.threshold[kept], self.coverage[kept], self.precision[kept], self.recall[kept])


def called(labels: Codes, right: NDArray[np.bool_], probabilities: NDArray[np.floating]) -> Called:
    """A point for each probability that there is, the highest first."""
    order = np.argsort(probabilities)[::-1]
    ranked = probabilities[order]
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))  # reads of one probability are called together
    hits, num_called = np.cumsum(right[order])[last], last + 1.0
    num_known = max(int(np.sum(labels >= 0)), 1)
    return Called(ranked[last].astype(np.float64), num_called / len(labels), hits / num_called, hits / num_known)


@dataclass(frozen=True)
class AtThreshold:
    coverage: float
    precision: float  # NaN where nothing is called
    recall: float
    unknown: float  # share of the reads of no known class that are called; NaN without such reads


def at_threshold(
    labels: Codes, right: NDArray[np.bool_], probabilities: NDArray[np.floating], threshold: float
) -> AtThreshold:
    is_called, unknown = probabilities >= threshold, labels == UNKNOWN
    num_called, hits = int(is_called.sum()), int((is_called & right).sum())
    num_unknown = int(unknown.sum())
    return AtThreshold(
        coverage=num_called / max(len(labels), 1),
        precision=hits / num_called if num_called else np.nan,
        recall=hits / max(len(labels) - num_unknown, 1),
        unknown=int((is_called & unknown).sum()) / num_unknown if num_unknown else np.nan,
    )


def abundance_error(found: Confusion, num_classes: int) -> float:
    """The L1 distance of the profile of calls from the true one, from 0 to 2; half of it is Bray-Curtis.

    Every read is called. Reads of no known class are a class of their own, which is never called.
    """
    true = np.bincount(found.labels + 1, found.counts, minlength=num_classes + 1)
    said = np.bincount(found.found + 1, found.counts, minlength=num_classes + 1)
    return float(np.abs(true - said).sum() / max(int(found.counts.sum()), 1))


def _ratio(part: NDArray[np.generic], whole: NDArray[np.generic]) -> Floats:
    """NaN where there is nothing to divide by."""
    part, whole = np.asarray(part, np.float64), np.asarray(whole, np.float64)
    return np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole > 0)
