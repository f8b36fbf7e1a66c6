"""The counts of one model on one part, class by class and pair by pair."""

from dataclasses import dataclass
from typing import cast

import numpy as np

from millstream.report.reads.measures import UNKNOWN
from millstream.report.reads.results import GENUS, TRAIN, PartResult, ReadClass, ReadResults

NO_CLASS = "no known class"


@dataclass(frozen=True)
class ClassRow:
    """One class. NaN where there is nothing to divide by."""

    of: ReadClass
    training: int  # reads
    support: int  # of the part
    called: int  # called so, unknown ones included
    unknown: int  # of them, of no known class
    precision: float  # among reads of known classes, as F1
    recall: float
    f1: float  # NaN also for a class that the part has no reads of: macro F1 is not over it
    worst: str  # what its reads are most often called instead, and how often


@dataclass(frozen=True)
class Pair:
    """Reads of a class that are called another."""

    name: str
    called: str
    reads: int
    share: float  # of the reads of the class
    same_genus: str  # yes, no, or nothing where nobody says


def class_rows(results: ReadResults, found: PartResult) -> list[ClassRow]:
    size = len(results.classes)
    cells, counts = found.confusion, found.confusion.tally(size)
    unknown = cells.unknown(size)
    worst = _worst(results, found)
    numbers = zip(counts.precision.tolist(), counts.recall.tolist(), counts.f1.tolist(), strict=True)
    return [
        ClassRow(
            of=own,
            training=own.reads.get(TRAIN, 0),
            support=int(counts.there[label]),
            called=int(counts.said[label] + unknown[label]),
            unknown=int(unknown[label]),
            precision=precision,
            recall=recall,
            f1=f1 if counts.there[label] else np.nan,
            worst=worst[label],
        )
        for label, (own, (precision, recall, f1)) in enumerate(zip(results.classes, numbers, strict=True))
    ]


def confused_pairs(results: ReadResults, found: PartResult, *, most: int) -> list[Pair]:
    """The pairs with the most reads, the largest first; reads of no known class are one of the classes."""
    cells, num_true = found.confusion, _num_true(results, found)
    wrong = np.flatnonzero(cells.labels != cells.found)
    order = wrong[np.argsort(-cells.counts[wrong], kind="stable")][:most]
    triples = np.stack([cells.labels[order], cells.found[order], cells.counts[order]], axis=1)
    return [
        Pair(
            name=NO_CLASS if label == UNKNOWN else results.classes[label].name,
            called=results.classes[said].name,
            reads=count,
            share=count / int(num_true[label]),
            same_genus=_same_genus(results, label, said),
        )
        for label, said, count in cast("list[list[int]]", triples.tolist())
    ]


def _num_true(results: ReadResults, found: PartResult) -> np.ndarray:
    """Reads of each class, and last those of none."""
    whole = np.bincount(found.confusion.labels + 1, found.confusion.counts, minlength=len(results.classes) + 1)
    return np.append(whole[1:], whole[0])


def _worst(results: ReadResults, found: PartResult) -> list[str]:
    cells, num_true = found.confusion, _num_true(results, found)
    texts = [""] * len(results.classes)
    for place in np.argsort(cells.counts, kind="stable").tolist():  # of each class the last, which is the largest
        label, said = int(cells.labels[place]), int(cells.found[place])
        if label not in (UNKNOWN, said):
            texts[label] = f"{results.classes[said].name} ({cells.counts[place] / num_true[label]:.1%})"
    return texts


def _same_genus(results: ReadResults, label: int, said: int) -> str:
    if label == UNKNOWN or GENUS not in results.ranks:
        return ""
    a, b = (results.classes[one].taxa.get(GENUS, -1) for one in (label, said))
    return "" if -1 in (a, b) else "yes" if a == b else "no"
