"""Reads as Python objects. Neighbours are made many at a time, and their columns when they are asked for."""

from collections.abc import Iterator
from functools import cached_property
from itertools import chain, repeat
from typing import TYPE_CHECKING

import numpy as np

from millstream.core.collection import Numbers
from millstream.reads.batch import Read, as_list, split_text
from millstream.reads.files import QUALITY, SEQUENCE
from millstream.reads.files.records import PIECE

if TYPE_CHECKING:
    from millstream.reads.reads import Part, Reads

CHUNK_READS = 4096
CHUNK_BASES = 4 << 20  # fetched at once


def iterate(reads: "Reads", numbers: range) -> Iterator[Read]:
    """The reads with these numbers."""
    return chain.from_iterable(_pieces(reads, numbers))


def fetch_reads(reads: "Reads", numbers: Numbers) -> list[Read]:
    """The reads with these numbers, in any order."""
    found: dict[int, Read] = {}
    for part, rows, places in reads.split(numbers):
        some = numbers[places]
        batch = reads.fetch(some, [SEQUENCE, QUALITY, *reads.column_names])
        names, sequences = part.names_of(rows), split_text(batch.flat, batch.offsets)
        qualities = repeat(None) if batch.quality is None else split_text(batch.quality, batch.offsets)
        columns = [as_list(batch.columns[name]) for name in reads.column_names]
        values = zip(*columns, strict=True) if columns else repeat(())
        for number, name, sequence, quality, row in zip(  # pyright: ignore[reportUnknownVariableType]
            some.tolist(), names, sequences, qualities, values, strict=False
        ):
            found[number] = Read(name, sequence, quality, dict(zip(reads.column_names, row, strict=True)))
    return [found[number] for number in numbers.tolist()]


def _pieces(reads: "Reads", numbers: range) -> Iterator[list[Read]]:
    for start in range(0, len(numbers), CHUNK_READS):
        chunk = numbers[start : start + CHUNK_READS]
        some = np.arange(chunk.start, chunk.stop, chunk.step, dtype=np.int64)
        for piece in _bounded(reads, some):
            if numbers.step != 1 or reads.has_large:
                yield fetch_reads(reads, piece)
                continue
            for part, rows, places in reads.split(piece):
                yield from _neighbours(reads, part, int(rows[0]), piece[places])


def _bounded(reads: "Reads", numbers: Numbers) -> list[Numbers]:
    if reads.longest * len(numbers) <= CHUNK_BASES:
        return [numbers]
    edges = np.cumsum(reads.lengths(numbers)) // CHUNK_BASES
    return np.split(numbers, np.flatnonzero(np.diff(edges)) + 1)


def _neighbours(reads: "Reads", part: "Part", row: int, numbers: Numbers) -> Iterator[list[Read]]:
    lines = part.lines_of(row, len(numbers))
    if lines is None:
        yield fetch_reads(reads, numbers)
        return
    columns = _ColumnsOfChunk(reads, numbers) if reads.column_names else None
    for piece, start in zip(lines, range(0, len(numbers), PIECE), strict=True):
        some = range(start, min(start + PIECE, len(numbers)))
        made = _reads_from(piece, columns, some, has_quality=part.has_quality)
        yield fetch_reads(reads, numbers[some.start : some.stop]) if made is None else made


def _reads_from(
    lines: bytes, source: "_ColumnsOfChunk | None", numbers: range, *, has_quality: bool
) -> list[Read] | None:
    """Reads from the lines of their names, sequences and qualities, with their numbers in `source`."""
    per_read = 3 if has_quality else 2
    if lines.isascii():
        texts = lines.decode("ascii").split("\n")
    else:
        parts = enumerate(lines.split(b"\n"))
        texts = [part.decode("latin-1") if at % per_read else part.decode(errors="replace") for at, part in parts]
    texts.pop()  # after the last newline
    if len(texts) != per_read * len(numbers):
        return None  # a damaged file: a newline inside a line would give one read the text of another
    names, sequences = texts[0::per_read], texts[1::per_read]
    if source is None and not has_quality:
        return list(map(Read, names, sequences))
    qualities = texts[2::per_read] if has_quality else repeat(None)
    columns = repeat(None) if source is None else zip(repeat(source), numbers, strict=False)
    return list(map(Read, names, sequences, qualities, columns))


class _ColumnsOfChunk:
    """The columns of neighbouring reads, all fetched when the first of them are asked for."""

    def __init__(self, reads: "Reads", numbers: Numbers) -> None:
        self._reads, self._numbers = reads, numbers

    @cached_property
    def _values(self) -> dict[str, list[object]]:
        batch = self._reads.fetch(self._numbers, self._reads.column_names)
        return {name: as_list(column) for name, column in batch.columns.items()}

    def columns_of(self, number: int) -> dict[str, object]:
        return {name: column[number] for name, column in self._values.items()}
