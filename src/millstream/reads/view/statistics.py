"""Counts over all reads from their index, a million at a time in a thread: how long they are, and of which class."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millstream.store.reads import Part, Reads
from millstream.view.background import PATIENCE_S, Background

_AT_ONCE = 1 << 20
_SHORT = 1 << 16  # letters; reads from here on are so few that each one's length is kept
_BARS = 60
Numbers = NDArray[np.int64]
Ranked = tuple[int | str, int]  # a value and its count


class Lengths:
    """How many reads there are of each length; exact."""

    def __init__(self, reads: Reads) -> None:
        self._short = np.zeros(_SHORT, np.int64)
        self._long: list[Numbers] = []
        self._total = len(reads)
        self._work = Background(self._count(reads))
        self._work.start()

    def _count(self, reads: Reads) -> Iterator[None]:
        for part, rows in _chunks(reads):
            lengths = part.lengths(rows)
            is_short = lengths < _SHORT
            counted = np.bincount(lengths[is_short], minlength=_SHORT)
            with self._work.lock:
                self._short += counted
                self._long.append(lengths[~is_short])
            yield

    def tell(self, seconds: float | None = PATIENCE_S) -> dict[str, object]:
        """Of the reads counted so far: bars of a histogram, which sum to them, and what people ask of lengths."""
        self._work.wait(seconds)
        with self._work.lock:
            (values,) = np.nonzero(self._short)
            counts = self._short[values]
            long, of_long = np.unique(np.concatenate([values[:0], *self._long]), return_counts=True)
        values, counts = np.append(values, long), np.append(counts, of_long)
        counted = int(counts.sum())
        found: dict[str, object] = {"counted": counted, "total": self._total}
        if not counted:
            return {**found, "bars": None}
        before, bases = np.cumsum(counts), np.cumsum(counts * values)
        edges, is_log = _edges(values, counts)
        bars = np.bincount(np.searchsorted(edges, values, side="right") - 1, counts, len(edges) - 1)
        return {
            **found,
            "shortest": int(values[0]),
            "median": int(values[np.searchsorted(before, (counted + 1) // 2)]),
            "mean": bases[-1] / counted,
            "longest": int(values[-1]),
            # half of all letters are in reads at least so long
            "n50": int(values[np.searchsorted(bases, bases[-1] - bases[-1] // 2)]),
            "is_log": is_log,
            "bars": {"from": edges[:-1], "to": edges[1:], "count": bars.astype(np.int64)},
        }


class ValueCounts:
    """How many reads have each value of a column of the index."""

    def __init__(self, reads: Reads, column: str) -> None:
        self._numbers = np.empty((2, 0), np.int64)  # values and their counts
        self._texts: dict[Part, tuple[pa.Array, Numbers]] = {}  # of each file: values and their counts
        self._nulls = self._counted = 0
        self._total = len(reads)
        self._ranked: tuple[int, list[Ranked]] = -1, []
        self._work = Background(self._count(reads, column))
        self._work.start()

    def _count(self, reads: Reads, column: str) -> Iterator[None]:
        for part, rows in _chunks(reads):
            array = part.column(column, rows)
            self._add_texts(part, array) if isinstance(array, pa.DictionaryArray) else self._add_numbers(array)
            with self._work.lock:
                self._nulls += array.null_count
                self._counted += len(rows)
            yield

    def _add_texts(self, part: Part, array: pa.DictionaryArray) -> None:
        codes = array.indices.drop_null().to_numpy(zero_copy_only=False)
        counts = np.bincount(codes, minlength=len(array.dictionary))
        with self._work.lock:
            before = self._texts[part][1] if part in self._texts else np.zeros_like(counts)
            self._texts[part] = array.dictionary, before + counts

    def _add_numbers(self, array: pa.Array) -> None:
        counted: Any = pc.value_counts(array.drop_null())
        new = np.stack([np.asarray(counted.field(place).to_numpy(), np.int64) for place in (0, 1)])
        both = np.concatenate([self._numbers, new], axis=1)
        values, places = np.unique(both[0], return_inverse=True)
        counts = np.bincount(places, both[1], len(values)).astype(np.int64)
        with self._work.lock:
            self._numbers = np.stack([values, counts])

    def tell(
        self, *, search: str = "", first: int = 0, most: int = 50, seconds: float | None = PATIENCE_S
    ) -> dict[str, object]:
        """The commonest values that contain the text searched for, `most` of them from the one at `first` on."""
        self._work.wait(seconds)
        ranked = self._rank()
        wanted = search.casefold()
        found = [row for row in ranked if wanted in str(row[0]).casefold()] if search else ranked
        return {
            "counted": self._counted,
            "total": self._total,
            "distinct": len(ranked),
            "found": len(found),
            "found_reads": sum(count for _, count in found),
            "most_reads": ranked[0][1] if ranked else 0,
            "without": self._nulls,
            "first": first,
            "rows": found[first : first + most],
        }

    def _rank(self) -> list[Ranked]:
        """Values with their counts, the commonest first."""
        with self._work.lock:
            done, (values, numbers), texts = self._counted, self._numbers, list(self._texts.values())
        if self._ranked[0] != done:
            counts: dict[int | str, int] = dict(zip(values.tolist(), numbers.tolist(), strict=True))
            for names, of_names in texts:
                for name, count in zip(names.to_pylist(), of_names.tolist(), strict=True):
                    if count:
                        counts[name] = counts.get(name, 0) + count
            self._ranked = done, sorted(counts.items(), key=lambda row: (-row[1], isinstance(row[0], str), row[0]))
        return self._ranked[1]


def _chunks(reads: Reads) -> Iterator[tuple[Part, Numbers]]:
    for part in reads.parts:
        for first in range(0, part.records, _AT_ONCE):
            yield part, np.arange(first, min(first + _AT_ONCE, part.records), dtype=np.int64)


def _edges(values: Numbers, counts: Numbers) -> tuple[Numbers, bool]:
    """Of bars that hold all the lengths, whole numbers; and whether they grow, as lengths of many sizes need."""
    low, high = int(values[0]), int(values[-1])
    median = int(values[np.searchsorted(np.cumsum(counts), (counts.sum() + 1) // 2)])
    if high > 20 * max(median, 1) or (median > 0 and high > 100 * max(low, 1)):
        grown = np.geomspace(max(low, 1), high + 1, _BARS + 1)
        edges = np.unique(np.ceil(grown - 1e-9).astype(np.int64))
        edges[-1] = high + 1
        return (np.append(0, edges) if low == 0 else edges), True
    step = -(-(high + 1 - low) // _BARS)
    num = -(-(high + 1 - low) // step)
    return low + step * np.arange(num + 1, dtype=np.int64), False
