"""Statistics of reads: lengths and classes of all of them from their index, composition from a sample.

Both are computed in a thread while pages request them. The sample has runs of consecutive reads from all over the file,
because compressed files are decoded block by block: a few positions cost a few blocks, however large the file.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millstream.reads.batch import ReadBatch
from millstream.reads.reads import Part, Reads
from millstream.view import PATIENCE_S, Background

CHUNK_READS = 1 << 20
_SHORT = 1 << 16  # bases; the lengths of longer reads are kept one by one: there are few
_BARS = 60
_READS, _BASES = 4096, 2 << 20  # of a sample, at most
_PLACES, _DECODED = 64, 24 << 20
_POSITIONS = 500  # for which base qualities are shown
_GC_BARS = 40
_PHRED = 33
Numbers = NDArray[np.int64]
Bases = NDArray[np.uint8]
Ranked = tuple[int | str, int]  # a value and its count


class Lengths:
    """The number of reads of each length; exact."""

    def __init__(self, reads: Reads, *, chunk_reads: int = CHUNK_READS) -> None:
        self._short = np.zeros(_SHORT, np.int64)
        self._long: list[Numbers] = []
        self._total = len(reads)
        self._work = Background(self._count(reads, chunk_reads))
        self._work.start()

    def _count(self, reads: Reads, chunk_reads: int) -> Iterator[None]:
        for part, rows in _chunks(reads, chunk_reads):
            lengths = part.lengths(rows)
            is_short = lengths < _SHORT
            counted = np.bincount(lengths[is_short], minlength=_SHORT)
            with self._work.lock:
                self._short += counted
                self._long.append(lengths[~is_short])
            yield

    def summary(self, seconds: float | None = PATIENCE_S) -> dict[str, object]:
        """A histogram and the usual statistics of the lengths counted so far."""
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
            # half of all bases are in reads of at least this length
            "n50": int(values[np.searchsorted(bases, bases[-1] - bases[-1] // 2)]),
            "is_log": is_log,
            "bars": {"from": edges[:-1], "to": edges[1:], "count": bars.astype(np.int64)},
        }


class ValueCounts:
    """The number of reads with each value of an indexed column."""

    def __init__(
        self, reads: Reads, column: str, *, names: Mapping[int | str, str] | None = None, chunk_reads: int = CHUNK_READS
    ) -> None:
        self._names: Mapping[int | str, str] = names or {}  # of values
        self._numbers = np.empty((2, 0), np.int64)  # values and their counts
        self._texts: dict[Part, tuple[pa.Array, Numbers]] = {}  # of each file: values and their counts
        self._nulls = self._counted = 0
        self._total = len(reads)
        self._ranked: tuple[int, list[Ranked]] = -1, []
        self._work = Background(self._count(reads, column, chunk_reads))
        self._work.start()

    def _count(self, reads: Reads, column: str, chunk_reads: int) -> Iterator[None]:
        for part, rows in _chunks(reads, chunk_reads):
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

    def summary(
        self, *, search: str = "", first: int = 0, most: int = 50, seconds: float | None = PATIENCE_S
    ) -> dict[str, object]:
        """The most common values that contain `search`, or whose names do: `most`, starting at rank `first`."""
        self._work.wait(seconds)
        ranked = self._rank()
        wanted = search.casefold()
        names = self._names
        found = ranked
        if search:
            found = [row for row in ranked if wanted in f"{row[0]} {names.get(row[0], '')}".casefold()]
        rows = found[first : first + most]
        return {
            "counted": self._counted,
            "total": self._total,
            "distinct": len(ranked),
            "found": len(found),
            "found_reads": sum(count for _, count in found),
            "most_reads": ranked[0][1] if ranked else 0,
            "without": self._nulls,
            "first": first,
            "rows": rows,
            "names": [names.get(value, "") for value, _ in rows],
        }

    def _rank(self) -> list[Ranked]:
        """Values with their counts, the most common first."""
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


class Sample:
    """Composition, GC content and base qualities by position, from a sample of reads."""

    def __init__(self, reads: Reads) -> None:
        self._total = len(reads)
        self._window = max(200, _BASES // max(min(self._total, _READS), 1))
        self._tally = _Tally()
        self._work = Background(self._sample(reads))
        self._work.start()

    def summary(self, seconds: float | None = PATIENCE_S) -> dict[str, object]:
        """The results so far; `is_done` says whether the sample is complete."""
        self._work.wait(seconds)
        with self._work.lock:
            found = self._tally.summary()
        return {**found, "of": self._total, "window": self._window, "is_done": self._work.is_done}

    def _sample(self, reads: Reads) -> Iterator[None]:
        has_quality = all(part.has_quality for part in reads.parts)
        for numbers in _places(reads):
            lengths = reads.lengths(numbers)
            seen = np.minimum(lengths, self._window)
            if has_quality and not (lengths > seen).any():
                batch = reads.fetch(numbers, ["sequence", "quality"])
            else:
                drawn = np.random.default_rng(int(numbers[0])).random(len(numbers))
                starts = (drawn * (lengths - seen + 1)).astype(np.int64)
                batch = reads.regions(numbers, starts, starts + seen)
            with self._work.lock:
                self._tally.add(batch, lengths)
            yield


def _chunks(reads: Reads, size: int) -> Iterator[tuple[Part, Numbers]]:
    for part in reads.parts:
        for first in range(0, part.records, size):
            yield part, np.arange(first, min(first + size, part.records), dtype=np.int64)


def _edges(values: Numbers, counts: Numbers) -> tuple[Numbers, bool]:
    """Integer edges of histogram bars over all lengths; and whether they are logarithmic, for a wide range."""
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


def _places(reads: Reads) -> Iterator[Numbers]:
    """Runs of consecutive reads, in an order that covers the file evenly from the start."""
    medium, total = reads.medium, len(reads)
    if total <= _READS and medium.num_bytes <= _DECODED:
        yield from [np.arange(total, dtype=np.int64)] if total else []
        return
    most = _PLACES if medium.is_random else min(max(_DECODED // max(medium.run_bytes, 1), 4), _PLACES)
    num_places = min(most, total)
    each = max(1, min(_READS // num_places, total // num_places))
    for place in np.random.default_rng(0).permutation(num_places).tolist():
        first = place * (total - each) // max(num_places - 1, 1)
        numbers = np.arange(first, first + each, dtype=np.int64)
        before = np.cumsum(reads.lengths(numbers))
        yield numbers[: max(1, int(np.searchsorted(before, max(medium.run_bytes, 1 << 20))))]


class _Tally:
    def __init__(self) -> None:
        self.weights = np.zeros(
            256
        )  # estimated counts of bases in all sampled reads: a window stands for its whole read
        self.gc: list[NDArray[np.float64]] = []
        self.qualities = np.zeros((_POSITIONS, 94), np.int64)
        self.num_reads = self.num_bases = self.num_places = 0
        self.is_cut = False  # whether some reads were sampled by a window only

    def add(self, batch: ReadBatch, lengths: Numbers) -> None:
        """Reads, or windows of reads of these lengths."""
        seen = batch.lengths
        if batch.quality is not None:
            self._add_quality(batch.quality, batch.offsets)
        rows = np.repeat(np.arange(len(batch)), seen)
        counts = np.bincount(rows * 256 + batch.flat, minlength=256 * len(batch)).reshape(-1, 256)
        counts[:, ord("A") : ord("Z") + 1] += counts[:, ord("a") : ord("z") + 1]
        counts[:, ord("a") : ord("z") + 1] = 0
        self.weights += (counts * (lengths / np.maximum(seen, 1))[:, None]).sum(axis=0)
        strong, weak = counts[:, list(b"GC")].sum(axis=1), counts[:, list(b"ATU")].sum(axis=1)
        known = strong + weak > 0
        self.gc.append(strong[known] / (strong + weak)[known])
        self.num_reads += len(batch)
        self.num_bases += int(seen.sum())
        self.num_places += 1
        self.is_cut = self.is_cut or bool((lengths > seen).any())

    def _add_quality(self, quality: Bases, offsets: Numbers) -> None:
        positions = np.arange(len(quality)) - np.repeat(offsets[:-1], np.diff(offsets))
        near = positions < _POSITIONS
        values = np.clip(quality[near].astype(np.int64) - _PHRED, 0, 93)
        self.qualities += np.bincount(positions[near] * 94 + values, minlength=self.qualities.size).reshape(-1, 94)

    def summary(self) -> dict[str, object]:
        total = max(self.weights.sum(), 1e-300)
        shares = [(chr(code), self.weights[code] / total) for code in np.flatnonzero(self.weights).tolist()]
        nucleotides = sum(share for base, share in shares if base in "ACGTUN")
        gc, edges = np.histogram(np.concatenate([np.empty(0), *self.gc]), _GC_BARS, (0, 1))
        return {
            "reads": self.num_reads,
            "bases": self.num_bases,
            "places": self.num_places,
            "is_cut": self.is_cut,
            "shares": sorted(shares, key=lambda pair: -pair[1]),
            # proteins have none
            "gc": {"from": edges[:-1], "to": edges[1:], "count": gc} if nucleotides > 0.9 else None,
            "gc_mean": _share(dict(shares), "GC", "GCATU"),
            "quality": self._qualities(),
        }

    def _qualities(self) -> dict[str, object] | None:
        reads = self.qualities.sum(axis=1)
        (positions,) = np.nonzero(reads)
        if not len(positions):
            return None
        before = np.cumsum(self.qualities[positions], axis=1) / reads[positions, None]
        low, middle = ((before >= share).argmax(axis=1) for share in (0.1, 0.5))
        return {"position": positions, "median": middle, "low": low}


def _share(shares: dict[str, float], some: str, of: str) -> float | None:
    whole = sum(shares.get(base, 0.0) for base in of)
    return sum(shares.get(base, 0.0) for base in some) / whole if whole else None
