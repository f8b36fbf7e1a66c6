"""What the reads of a sample say of its classes: how many are surely of one, and of the others the plausible classes.

Reads with the same plausible classes, about equally plausible, are counted together (a range-factorised equivalence
class). All numbers are integers, so that their sums do not depend on the order of the reads.
"""

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST = 8  # plausible classes of a read, whose probability is at least LEAST of the highest
LEAST = 0.01
LEAST_VOTE = 1e-4  # of a window for a class: one that is very sure of another does not outvote all others
BINS = np.array([0.05, 0.25, 0.7], np.float32)  # of the probability, as a share of the highest
LEVELS = len(BINS) + 1
UNIT = 1024  # parts of the probability of one read
MOST_SETS = 1 << 16  # 104 bytes each
MOST_PIECES = 256  # that are not summed yet
SETS = ("codes", "units", "reads")

Counts = NDArray[np.int64]
Codes = NDArray[np.int32]  # of a class and the bin of its probability


@dataclass(frozen=True)
class Evidence:
    """`alone[c]` reads are of class c, and `reads[s]` of one of the classes in `codes[s]`; all others are unclassified.

    `units[s]` are the summed probabilities of these classes. `num_merged` reads are in `alone`, with the most probable
    class, only because there were more than MOST_SETS sets.
    """

    alone: Counts
    codes: Codes  # [S, MOST], -1 after the last
    units: Counts  # [S, MOST]
    reads: Counts  # [S]
    num_merged: int = 0

    @classmethod
    def none(cls, num_classes: int) -> "Evidence":
        """Of no reads."""
        return Evidence(np.zeros(num_classes, np.int64), *_no_sets(), np.zeros(0, np.int64))

    @classmethod
    def of(cls, classes_BK: NDArray[np.integer], probability_BK: NDArray[np.floating], num_classes: int) -> "Evidence":
        """Of reads with these most probable classes, from the highest; at least one, of a probability above 0."""
        classes, likely = classes_BK[:, :MOST].astype(np.int32), probability_BK[:, :MOST].astype(np.float32)
        is_alone = ~(likely[:, 1:2] >= LEAST * likely[:, :1]).any(axis=1)
        alone = np.bincount(classes[is_alone, 0], minlength=num_classes)
        classes, likely = classes[~is_alone], likely[~is_alone]
        is_plausible = likely >= LEAST * likely[:, :1]
        codes = classes * LEVELS + np.searchsorted(BINS, likely / likely[:, :1], side="right")
        sets = np.where(is_plausible, codes, -1).astype(np.int32)
        likely = np.where(is_plausible, likely, 0)
        weights = np.rint(likely / likely.sum(axis=1, keepdims=True) * UNIT).astype(np.int64)
        if missing := MOST - classes.shape[1]:
            sets = np.pad(sets, ((0, 0), (0, missing)), constant_values=-1)
            weights = np.pad(weights, ((0, 0), (0, missing)))
        order = np.argsort(np.where(sets < 0, np.iinfo(np.int32).max, sets), axis=1, kind="stable")
        sets, weights = np.take_along_axis(sets, order, axis=1), np.take_along_axis(weights, order, axis=1)
        return Evidence(alone, *_grouped(sets, weights, np.ones(len(sets), np.int64)))

    @classmethod
    def sum(cls, some: "Sequence[Evidence]") -> "Evidence":
        """Of the reads of all, in order. Where they are split makes no difference."""
        alone = np.sum([one.alone for one in some], axis=0)
        num_merged = sum(one.num_merged for one in some)
        codes, units, reads = _grouped(*(np.concatenate([getattr(one, name) for one in some]) for name in SETS))
        if len(reads) > MOST_SETS:  # they are in order of their first reads
            rest = codes[MOST_SETS:]
            best = np.where(rest < 0, -1, rest % LEVELS).argmax(axis=1)
            np.add.at(alone, rest[np.arange(len(rest)), best] // LEVELS, reads[MOST_SETS:])
            num_merged += int(reads[MOST_SETS:].sum())
            codes, units, reads = codes[:MOST_SETS], units[:MOST_SETS], reads[:MOST_SETS]
        return Evidence(alone, codes, units, reads, num_merged)

    def to_text(self) -> str:
        """All of it; `from_text` restores it."""
        head = np.array([len(self.alone), len(self.reads), self.num_merged], np.int64)
        arrays = (head, self.alone, self.units, self.reads, self.codes)
        return base64.b64encode(zlib.compress(b"".join(array.tobytes() for array in arrays), 1)).decode()

    @classmethod
    def from_text(cls, text: str) -> "Evidence":
        """The evidence that `to_text` wrote."""
        data = zlib.decompress(base64.b64decode(text))
        num_classes, num_sets, num_merged = np.frombuffer(data, np.int64, 3).tolist()
        sizes = [num_classes, num_sets * MOST, num_sets]
        ends = 8 * np.cumsum([3, *sizes])
        alone, units, reads = (np.frombuffer(data, np.int64, n, int(at)) for n, at in zip(sizes, ends, strict=False))
        codes = np.frombuffer(data, np.int32, num_sets * MOST, int(ends[-1]))
        return Evidence(alone, codes.reshape(-1, MOST), units.reshape(-1, MOST), reads, num_merged)


class EvidenceSum:
    """The evidence of reads that arrive in pieces."""

    def __init__(self, first: Evidence) -> None:
        self._pieces, self._num_sets = [first], 0

    def add(self, piece: Evidence) -> None:
        self._pieces.append(piece)
        self._num_sets += len(piece.reads)
        if self._num_sets > MOST_SETS or len(self._pieces) > MOST_PIECES:
            self.total()

    def total(self) -> Evidence:
        if len(self._pieces) > 1:
            self._pieces, self._num_sets = [Evidence.sum(self._pieces)], 0
        return self._pieces[0]


def _no_sets() -> tuple[Codes, Counts]:
    return np.zeros((0, MOST), np.int32), np.zeros((0, MOST), np.int64)


def _grouped(codes: Codes, units: Counts, reads: Counts) -> tuple[Codes, Counts, Counts]:
    """Equal rows as one, in order of the first of each."""
    if not len(codes):
        return *_no_sets(), reads
    keys = np.ascontiguousarray(codes).view(np.dtype((np.void, codes.itemsize * MOST)))[:, 0]
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    group = place[group]
    sums = np.zeros((len(order), MOST), np.int64)
    np.add.at(sums, group, units)
    totals = np.zeros(len(order), np.int64)
    np.add.at(totals, group, reads)
    return codes[first[order]], sums, totals
