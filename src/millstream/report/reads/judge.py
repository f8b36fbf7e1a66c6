"""Answers of one model and seed -> its numbers on every part, with the threshold that validation chose for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millstream.report.bootstrap import Resampled
from millstream.report.calibration import binned
from millstream.report.reads import measures
from millstream.report.reads.answers import Answers, AnswersFile, Key
from millstream.report.reads.draws import Draws, draws_of
from millstream.report.reads.measures import Called, Confusion
from millstream.report.reads.results import TARGETS, VAL, ReadClass, Target
from millstream.report.results import Curve

MIN_CALLED = 50  # reads of validation: the precision of fewer says nothing


@dataclass(frozen=True)
class JudgedRank:
    """Its answers at one rank."""

    num_taxa: int
    accuracy: Resampled
    macro_f1: Resampled


@dataclass(frozen=True)
class Judged:
    """One model of one seed on one part."""

    num_reads: int
    num_unknown: int
    num_classes: int
    accuracy: Resampled
    macro_f1: Resampled
    ranks: Mapping[str, JudgedRank]
    targets: Mapping[float, Target]
    ece: float
    confidence: float
    abundance_l1: float
    called: Called
    calibration: Curve
    confusion: Confusion


class Judge:
    """Keeps the draws of each part, which are the same for all models."""

    def __init__(
        self, file: AnswersFile, classes: Sequence[ReadClass], *, num_taxa: Mapping[str, int], resamples: int
    ) -> None:
        self._file, self._num_classes, self._resamples = file, len(classes), resamples
        self._num_taxa = num_taxa
        # One more, the last: of reads of no known class, which have label -1.
        self._taxa = {rank: np.array([*(one.taxa.get(rank, -1) for one in classes), -1]) for rank in file.ranks}
        self._draws: dict[str, Draws] = {}

    def num_bad(self, key: Key, parts: Sequence[str]) -> int:
        """How many probabilities are no numbers."""
        return sum(int(np.sum(~np.isfinite(self._file.read(key, part).probabilities))) for part in parts)

    def judge(self, key: Key, parts: Sequence[str]) -> dict[str, Judged]:
        """Validation first: what is called elsewhere is called above the threshold chosen there."""
        thresholds: dict[float, float | None] = {}
        judged: dict[str, Judged] = {}
        for part in sorted(parts, key=lambda part: part != VAL):
            answers = self._file.read(key, part)
            right = answers.found == answers.labels
            curve = measures.called(answers.labels, right, answers.probabilities)
            if part == VAL:
                least = min(MIN_CALLED / len(right), 1)
                thresholds = {precision: curve.loosest(precision, coverage=least) for precision in TARGETS}
            judged[part] = self._part(answers, curve.thinned(), thresholds, draws=self._draws_of(part, len(right)))
        return judged

    def has(self, part: str) -> NDArray[np.bool_]:
        """Which classes a part that was judged has reads of."""
        labels = self._file.labels(part)
        return np.bincount(labels[labels >= 0], minlength=self._num_classes) > 0

    def macro_f1_over(self, classes: NDArray[np.bool_], key: Key, part: str) -> Resampled:
        """Of a part that was judged: macro F1 over these of the classes."""
        answers = self._file.read(key, part)
        return self._draws[part].macro_f1_over(classes, answers.labels, answers.found)

    def _part(
        self, answers: Answers, curve: Called, thresholds: Mapping[float, float | None], *, draws: Draws
    ) -> Judged:
        labels, found, probabilities = answers.labels, answers.found, answers.probabilities
        right, known = found == labels, labels >= 0
        cells = measures.confusion(labels, found, self._num_classes)
        accuracy, macro_f1 = draws.accuracy_and_f1(labels, found, self._num_classes)
        ece, points = _calibration(right[known], probabilities[known])
        return Judged(
            num_reads=len(labels),
            num_unknown=int(np.sum(~known)),
            num_classes=int(np.sum(cells.tally(self._num_classes).there > 0)),
            accuracy=accuracy,
            macro_f1=macro_f1,
            ranks={rank: self._rank(answers, rank, draws) for rank in self._taxa},
            targets={
                target: Target(
                    target, one, None if one is None else measures.at_threshold(labels, right, probabilities, one)
                )
                for target, one in thresholds.items()
            },
            ece=ece,
            confidence=float(np.mean(probabilities[known], dtype=np.float64)) if known.any() else np.nan,
            abundance_l1=measures.abundance_error(cells, self._num_classes),
            called=curve,
            calibration=points,
            confusion=cells,
        )

    def _rank(self, answers: Answers, rank: str, draws: Draws) -> JudgedRank:
        """Reads of classes that have no taxon at this rank are left out, as those of no known class are."""
        true, num_taxa = self._taxa[rank][answers.labels], self._num_taxa[rank]
        accuracy, macro_f1 = draws.accuracy_and_f1(true, answers.ranks[rank], num_taxa)
        there = np.bincount(true[true >= 0], minlength=num_taxa)
        return JudgedRank(int(np.sum(there > 0)), accuracy, macro_f1)

    def _draws_of(self, part: str, num_reads: int) -> Draws:
        if part not in self._draws:
            self._draws[part] = draws_of(num_reads, resamples=self._resamples, part=len(self._draws))
        return self._draws[part]


def _calibration(right: np.ndarray, probabilities: np.ndarray) -> tuple[float, Curve]:
    """ECE over bins of equal counts, and the bins."""
    if not len(right):
        return np.nan, Curve([], [])
    said, happened, sizes = binned(right.astype(np.int8), probabilities.astype(np.float64))
    return float(np.abs(said - happened) @ sizes / sizes.sum()), Curve(said.tolist(), happened.tolist())
