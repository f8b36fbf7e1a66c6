"""The results of a run of classifiers as plain data, also per class and per confused pair. Draws nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from millstream.reads.report.predictions import VAL, Confusion, Target, ThresholdCurve
from millstream.reads.report.predictions_file import UNCLASSIFIED, UNKNOWN
from millstream.report import RunResults
from millstream.report.measures import Curve, Interval

TRAIN = "train"
GENUS = "genus"
NO_CLASS = "no known class"


@dataclass(frozen=True)
class ReadClass:
    """One class of the mapping."""

    class_id: int
    name: str
    tax_id: int  # 0: unknown
    taxa: Mapping[str, int]  # rank -> number of its taxon; -1: none
    reads: Mapping[str, int]  # by split


@dataclass(frozen=True)
class RankResult:
    """A model at one rank: it assigns the taxon whose classes have the highest total probability."""

    rank: str
    num_taxa: int  # with reads in the split
    accuracy: Interval
    macro_f1: Interval


@dataclass(frozen=True)
class SplitResult:
    """One model on one split. Numbers are means over its seeds; curves and counts are of the first."""

    num_reads: int  # or read pairs
    num_unknown: int  # of no known class; they count only at a threshold
    unclassified: float  # share of reads without evidence for a class, whose probability is 0; they count as missed
    num_classes: int  # with reads in the split; macro F1 is the mean over them
    accuracy: Interval
    macro_f1: Interval
    macro_f1_sd: float | None  # between seeds; None with one
    ranks: Sequence[RankResult]
    coverage: float | None  # this and the next three: at the threshold chosen on validation; None: there is none
    precision: float | None
    recall: float | None
    unknown_called: float | None  # share of the reads of no known class that are classified
    ece: float
    confidence: float  # mean probability of the assigned class, over reads of known classes; 0 if unclassified
    abundance_l1: float
    targets: Sequence[Target]
    thresholds: ThresholdCurve
    calibration: Curve  # per bin: mean probability, share of correct classifications
    confusion: Confusion


@dataclass(frozen=True)
class ModelResult:
    """One classifier."""

    name: str
    title: str
    seeds: int
    parameters: int | None
    threshold: float | None  # of the first seed
    fit_s: float
    train_reads_per_s: float | None  # the median over epochs
    waiting: float | None  # share of training time spent waiting for data
    score_reads_per_s: float
    memory: int | None  # bytes: the maximum at the end of an epoch
    chosen: Mapping[str, object]
    splits: Mapping[str, SplitResult]


@dataclass(frozen=True)
class Gap:
    """Macro F1 of the best model on two splits, over the classes that occur in both."""

    first: str
    second: str
    num_classes: int
    macro_f1: tuple[float, float]
    difference: Interval  # the first minus the second


@dataclass(frozen=True, kw_only=True)
class ReadResults(RunResults):
    """Everything that a report shows."""

    classes: Sequence[ReadClass]
    ranks: Mapping[str, Sequence[str]]  # names of the taxa
    splits: Sequence[str]  # the test splits, then validation
    models: Sequence[ModelResult]  # best macro F1 on validation first
    gaps: Sequence[Gap]

    @property
    def tests(self) -> Sequence[str]:
        return [split for split in self.splits if split != VAL]

    @property
    def what(self) -> str:
        """What is classified."""
        return "read pairs" if self.data.get("mates") == 2 else "reads"


@dataclass(frozen=True)
class ClassRow:
    """One class of a split. NaN where there is nothing to divide by."""

    of: ReadClass
    training: int  # reads
    support: int  # reads of the split
    assigned: int  # reads assigned to it, including reads of no known class
    unknown: int  # reads of no known class assigned to it
    precision: float  # among reads of known classes, as F1
    recall: float
    f1: float  # NaN for a class without reads in the split, which macro F1 leaves out
    confused_with: str  # the class most often assigned instead, and its share


@dataclass(frozen=True)
class Pair:
    """Reads of a class that are assigned to another."""

    name: str
    assigned: str
    reads: int
    share: float  # of the reads of the class
    same_genus: str  # yes, no, or empty if unknown


def class_rows(results: ReadResults, found: SplitResult) -> list[ClassRow]:
    size = len(results.classes)
    counts, unknown = found.confusion.tally(size), found.confusion.unknown(size)
    confused_with = _confused_with(results, found)
    numbers = zip(counts.precision.tolist(), counts.recall.tolist(), counts.f1.tolist(), strict=True)
    return [
        ClassRow(
            of=own,
            training=own.reads.get(TRAIN, 0),
            support=int(counts.true[label]),
            assigned=int(counts.assigned[label] + unknown[label]),
            unknown=int(unknown[label]),
            precision=precision,
            recall=recall,
            f1=f1 if counts.true[label] else np.nan,
            confused_with=confused_with[label],
        )
        for label, (own, (precision, recall, f1)) in enumerate(zip(results.classes, numbers, strict=True))
    ]


def confused_pairs(results: ReadResults, found: SplitResult, *, most: int) -> list[Pair]:
    """The pairs with the most reads, the largest first; reads of no known class are one of the classes."""
    cells, num_true = found.confusion, _num_true(results, found)
    wrong = np.flatnonzero((cells.labels != cells.found) & (cells.found != UNCLASSIFIED))
    order = wrong[np.argsort(-cells.counts[wrong], kind="stable")][:most]
    triples = np.stack([cells.labels[order], cells.found[order], cells.counts[order]], axis=1)
    return [
        Pair(
            name=NO_CLASS if label == UNKNOWN else results.classes[label].name,
            assigned=results.classes[other].name,
            reads=count,
            share=count / int(num_true[label]),
            same_genus=_same_genus(results, label, other),
        )
        for label, other, count in cast("list[list[int]]", triples.tolist())
    ]


def _num_true(results: ReadResults, found: SplitResult) -> NDArray[np.intp]:
    """Reads of each class, and last of no known class."""
    whole = np.bincount(found.confusion.labels + 1, found.confusion.counts, minlength=len(results.classes) + 1)
    return np.append(whole[1:], whole[0])


def _confused_with(results: ReadResults, found: SplitResult) -> list[str]:
    cells, num_true = found.confusion, _num_true(results, found)
    texts = [""] * len(results.classes)
    for place in np.argsort(cells.counts, kind="stable").tolist():  # the last of each class is the largest
        label, other = int(cells.labels[place]), int(cells.found[place])
        if label not in (UNKNOWN, other) and other != UNCLASSIFIED:
            texts[label] = f"{results.classes[other].name} ({cells.counts[place] / num_true[label]:.1%})"
    return texts


def _same_genus(results: ReadResults, label: int, other: int) -> str:
    if label == UNKNOWN or GENUS not in results.ranks:
        return ""
    a, b = (results.classes[one].taxa.get(GENUS, -1) for one in (label, other))
    return "" if -1 in (a, b) else "yes" if a == b else "no"
