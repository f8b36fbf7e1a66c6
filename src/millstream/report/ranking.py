"""Measures of a ranking: scores are sorted once, then each draw of their records costs two running sums.

Of two classes, label 1 is the one to find. Every measure is one number for each of R sets of counts (how often each of
N records was drawn).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# R sets of counts, N records, G groups of records with equal scores

Floats = NDArray[np.float64]
Counts = NDArray[np.generic]


class Ranking:
    """Records from the lowest score to the highest."""

    def __init__(self, labels: Counts, scores: Counts) -> None:
        self.order = np.argsort(scores, kind="stable")
        ranked = scores[self.order]
        self.last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], len(ranked) > 0))  # record of each group
        self._labels = np.asarray(labels, np.float64)[self.order]

    def tally(self, counts_RN: Counts | None = None) -> "Tally":
        """Of the records of each draw; by default of each record once."""
        num_records = len(self.order)
        counts_RN = np.ones((1, num_records)) if counts_RN is None else np.asarray(counts_RN, np.float64)
        all_RN = counts_RN[:, self.order]
        ones_RG = all_RN * self._labels
        zeros_RG = np.subtract(all_RN, ones_RG, out=all_RN)
        found_RG, below_RG = np.cumsum(ones_RG, axis=1), np.cumsum(zeros_RG, axis=1)
        if len(self.last) < num_records:
            found_RG, below_RG = found_RG[:, self.last], below_RG[:, self.last]
            ones_RG, zeros_RG = np.diff(found_RG, axis=1, prepend=0), np.diff(below_RG, axis=1, prepend=0)
        return Tally(ones_RG, zeros_RG, found_RG, below_RG)


@dataclass(frozen=True)
class Tally:
    """Records of each label by groups of equal scores, lowest first: in the group, and up to and including it."""

    ones_RG: Floats
    zeros_RG: Floats
    found_RG: Floats  # of label 1
    below_RG: Floats  # of label 0

    @property
    def total_RG(self) -> Floats:
        return self.found_RG + self.below_RG

    def aurocs(self) -> Floats:
        """The probability that a record of label 1 scores above one of label 0; ties count half. NaN with one class."""
        pairs_R = _dot(self.ones_RG, self.below_RG) - _dot(self.ones_RG, self.zeros_RG) / 2
        with np.errstate(invalid="ignore", divide="ignore"):
            return pairs_R / (self.found_RG[:, -1] * self.below_RG[:, -1])

    def average_precisions(self) -> Floats:
        """The area under the precision-recall curve (AUPR), as a step function: label 1 by the highest scores."""
        found_RG = self.found_RG[:, -1:] - self.found_RG
        found_RG += self.ones_RG
        total_RG = self.below_RG[:, -1:] - self.below_RG
        total_RG += self.zeros_RG
        total_RG += found_RG
        return _dot(self.ones_RG, _share(found_RG, total_RG)) / self.found_RG[:, -1]

    def average_precisions_of_zeros(self) -> Floats:
        """The same for label 0 by the lowest scores."""
        return _dot(self.zeros_RG, _share(self.below_RG, self.total_RG)) / self.below_RG[:, -1]

    def aurcs(self) -> Floats:
        """The mean share of label 1 among the k lowest scores, over all k. Ties: the mean over all their orders."""
        total_RG = self.total_RG
        # In a group, k runs from s + 1 to e, and the share is (w + (k - s) rate) / k = rate + (w - s rate) / k:
        # its sum needs harmonic numbers instead of a loop over k. With w and s at the end of the group it is the same.
        harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, int(total_RG.max()) + 1))])
        of_k_RG = np.diff(harmonic[total_RG.astype(np.int64)], axis=1, prepend=0)
        rate_RG = _share(self.ones_RG, self.ones_RG + self.zeros_RG)
        total_RG *= rate_RG
        sums_R = self.found_RG[:, -1] + _dot(np.subtract(self.found_RG, total_RG, out=total_RG), of_k_RG)
        return sums_R / (self.found_RG[:, -1] + self.below_RG[:, -1])

    def risks(self, coverage: float) -> Floats:
        """The share of label 1 among this share of records with the lowest scores. Ties: the mean over their orders."""
        total_RG = self.total_RG
        wanted_R = coverage * total_RG[:, -1]
        end_R = (total_RG < wanted_R[:, None]).sum(axis=1)
        at = np.arange(len(total_RG)), end_R
        size_R = self.ones_RG[at] + self.zeros_RG[at]
        share_R = (wanted_R - (total_RG[at] - size_R)) / np.maximum(size_R, 1)
        return (self.found_RG[at] - self.ones_RG[at] * (1 - share_R)) / wanted_R


def _dot(a_RG: Floats, b_RG: Floats) -> Floats:
    return np.einsum("rg,rg->r", a_RG, b_RG)


def _share(part_RG: Floats, whole_RG: Floats) -> Floats:
    """0 where the whole, a count, is 0."""
    return part_RG / np.maximum(whole_RG, 1)
