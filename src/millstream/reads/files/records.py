"""Records of an indexed file by row, without an array per record: where they are, and neighbours as lines of text.

Columns are read from the mapped index as one array of words: a call then takes three arrays and not fifteen, and numba
spends 50 ns on each. What is not verified yet is reported by the kernels, verified, and the call is repeated.
"""

from collections.abc import Generator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millstream.core.collection import Numbers
from millstream.core.kernels import inlined, kernel
from millstream.core.record import Bytes
from millstream.reads.files.encodings import Words, sums_before
from millstream.reads.files.ranges import copy
from millstream.reads.files.sections import Column, Sections

PIECE = 256  # records: made into Python objects at once, more of them are slower
_BLOCK = 17  # log2 of the words of a megabyte, for which there is one CRC
_DIRECTORY, _WORDS = range(2)  # of a row of a table of columns: where the parts of a column are, in words
_ANCHOR, _SPAN, _BASES, _TAIL, _LINE, _EOL, _GAP = range(7)
_COLUMNS = ("anchor", "span", "bases", "tail", "line", "eol", "gap")

Checked = NDArray[np.bool_]
Place = tuple[int, int, int, int, int, int, int]  # the fields of `Locations`, of one record


class Locations(NamedTuple):
    """Where records are in the text."""

    start: Numbers
    head: Numbers  # bytes of the header line
    bases: Numbers
    span: Numbers  # bytes up to the next record
    line: Numbers
    eol: Numbers
    gap: Numbers  # bytes between the last base and the first quality, if all are on one line


class Geometry:
    """Where the records of a read file are."""

    def __init__(self, sections: Sections, *, has_quality: bool) -> None:
        self._columns = columns = [sections.column(name) for name in _COLUMNS]
        self.bases = columns[_BASES]
        self._sections = sections
        self._index = sections.words, sections.checked, table_of(columns)
        self._runs = 2 if has_quality else 1  # of as many characters as there are bases

    def locate(self, rows: Numbers) -> Locations:
        """Where these records are."""
        anchors, spans = self._columns[_ANCHOR], self._columns[_SPAN]
        start, span = sums_before(anchors.verified(rows >> 5), spans.verified(rows), rows)
        return self._locations(start, span, *(column.take(rows) for column in self._columns[_BASES:]))

    def neighbours(self, row: int, count: int) -> Locations:
        """The same for `count` records from a row on."""
        out = np.empty((7, count), np.int64)
        while (block := _take_neighbours(*self._index, row, out)) >= 0:
            self._sections.check_block(block)
        return self._locations(*out)

    def _locations(
        self, start: Numbers, span: Numbers, bases: Numbers, tail: Numbers, line: Numbers, eol: Numbers, gap: Numbers
    ) -> Locations:
        return Locations(start, span - tail - gap - self._runs * bases, bases, span, line, eol, gap)

    def locate_one(self, row: int) -> Place:
        """The same for one record, as plain numbers."""
        while (found := _locate_one(*self._index, row, self._runs))[0] < 0:
            self._sections.check_block(-1 - found[0])
        return found


class Sums:
    """A column of lengths, with the sum of those before a row: where records are in a stream."""

    def __init__(self, sections: Sections, anchors: Column, lengths: Column) -> None:
        self._sections = sections
        self._index = sections.words, sections.checked, table_of([anchors, lengths])

    def one(self, row: int) -> tuple[int, int]:
        """The sum of the lengths before a row, and its own."""
        while (found := _sum_one(*self._index, row))[0] < 0:
            self._sections.check_block(-1 - found[0])
        return found


class Values:
    """Columns of which all values of one row are needed."""

    def __init__(self, sections: Sections, columns: list[Column]) -> None:
        self._sections = sections
        self._index = sections.words, sections.checked, table_of(columns)
        self._count = len(columns)

    def one(self, row: int) -> list[int]:
        """The value of each column."""
        out = np.empty(self._count, np.int64)
        while (block := _take_one(*self._index, row, out)) >= 0:
            self._sections.check_block(block)
        return out.tolist()


def table_of(columns: list[Column]) -> Numbers:
    """Where columns are in the words of a file, as the kernels take it."""
    return np.array([column.places for column in columns], np.int64).reshape(-1, 2)


def write_lines(text: Bytes, found: Locations, *, has_quality: bool) -> Generator[bytes]:
    """Name, sequence and quality of neighbouring records as lines, `PIECE` records at a time.

    `text` starts where the first record does; all have regular lines.
    """
    columns = 2 if has_quality else 1
    out = np.empty(int(found.head.sum() + columns * found.bases.sum()) + (columns + 1) * len(found.head), np.uint8)
    edges = _edges(len(found.head))
    _write_lines(text, *found, has_quality, out, edges)
    return _pieces(out, edges)


def join_lines_of(
    headers: tuple[Bytes, Numbers, Numbers], flat: Bytes, offsets: Numbers, quality: Bytes | None
) -> Generator[bytes]:
    """The same from header lines, sequences and qualities."""
    texts = [flat] if quality is None else [flat, quality]
    num_lines = (len(texts) + 1) * (len(offsets) - 1)
    out = np.empty(len(headers[0]) + len(texts) * len(flat) + num_lines, np.uint8)
    edges = _edges(len(offsets) - 1)
    _join_lines(*headers, flat, texts[-1], offsets, quality is not None, out, edges)
    return _pieces(out, edges)


def _edges(count: int) -> Numbers:
    return np.empty(-(-count // PIECE) + 1, np.int64)


def _pieces(out: Bytes, edges: Numbers) -> Generator[bytes]:
    return (out[start:end].tobytes() for start, end in pairwise(edges.tolist()))


@inlined
def value_at(words: Words, table: Numbers, column: int, row: int) -> int:
    """A value of a bit column."""
    chunk = table[column, _DIRECTORY] + 2 * (row >> 12)
    low, place = np.int64(words[chunk]), np.int64(words[chunk + 1])
    width = place & 255
    if width == 0:
        return int(low)
    bit = (row & 4095) * width
    word = table[column, _WORDS] + (place >> 8) + (bit >> 6)
    shift = bit & 63
    value = words[word] >> np.uint64(shift)
    if shift + width > 64:
        value |= words[word + 1] << np.uint64(64 - shift)
    if width < 64:
        value &= (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    return int(low + np.int64(value))


@inlined
def unverified(words: Words, checked: Checked, table: Numbers, column: int, first: int, last: int) -> int:
    """A megabyte with values of these rows, both of one chunk, that is not verified yet; or -1."""
    chunk = table[column, _DIRECTORY] + 2 * (first >> 12)
    if not checked[chunk >> _BLOCK]:
        return chunk >> _BLOCK
    place = np.int64(words[chunk + 1])
    width = place & 255
    if width > 0:
        start = table[column, _WORDS] + (place >> 8)
        low = (start + ((first & 4095) * width >> 6)) >> _BLOCK
        high = (start + (((last & 4095) + 1) * width - 1 >> 6)) >> _BLOCK
        if not checked[low]:
            return low
        if not checked[high]:
            return high
    return -1


@inlined
def _sum(words: Words, checked: Checked, table: Numbers, row: int) -> int:
    """The sum of the second column before a row, from the anchors in the first; or -1 - a megabyte to verify."""
    first = row & ~31
    block = max(
        unverified(words, checked, table, 0, row >> 5, row >> 5), unverified(words, checked, table, 1, first, row)
    )
    if block >= 0:
        return -1 - block
    total = value_at(words, table, 0, row >> 5)
    for before in range(first, row):
        total += value_at(words, table, 1, before)
    return total


@kernel
def _sum_one(words: Words, checked: Checked, table: Numbers, row: int) -> tuple[int, int]:
    total = _sum(words, checked, table, row)
    return total, value_at(words, table, 1, row) if total >= 0 else 0


@kernel
def _locate_one(words: Words, checked: Checked, table: Numbers, row: int, runs: int) -> Place:
    start = _sum(words, checked, table, row)
    for column in range(_BASES, _GAP + 1):
        block = unverified(words, checked, table, column, row, row)
        if block >= 0:
            start = -1 - block
    if start < 0:
        return start, 0, 0, 0, 0, 0, 0
    span, bases = value_at(words, table, _SPAN, row), value_at(words, table, _BASES, row)
    gap = value_at(words, table, _GAP, row)
    head = span - value_at(words, table, _TAIL, row) - gap - runs * bases
    line, eol = value_at(words, table, _LINE, row), value_at(words, table, _EOL, row)
    return start, head, bases, span, line, eol, gap


@kernel
def _take_one(words: Words, checked: Checked, table: Numbers, row: int, out: Numbers) -> int:
    """The values of all columns; or a megabyte to verify first."""
    for column in range(len(out)):
        block = unverified(words, checked, table, column, row, row)
        if block >= 0:
            return block
        out[column] = value_at(words, table, column, row)
    return -1


@kernel
def _take_neighbours(words: Words, checked: Checked, table: Numbers, first: int, out: Numbers) -> int:
    """Starts, and the values of the other columns; or a megabyte to verify first."""
    count = out.shape[1]
    start = _sum(words, checked, table, first)
    if start < 0:
        return -1 - start
    for column in range(_SPAN, _GAP + 1):
        at = 0
        while at < count:  # one chunk of the column after the other
            row = first + at
            stop = min(count, at + 4096 - (row & 4095))
            block = unverified(words, checked, table, column, row, first + stop - 1)
            if block >= 0:
                return block
            chunk = table[column, _DIRECTORY] + 2 * (row >> 12)
            low, width = np.int64(words[chunk]), np.int64(words[chunk + 1]) & 255
            bit = (row & 4095) * width
            word = table[column, _WORDS] + (np.int64(words[chunk + 1]) >> 8) + (bit >> 6)
            shift = bit & 63
            mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1) if width < 64 else ~np.uint64(0)
            values = out[column, at:stop]
            if width == 0:
                values[:] = low
            else:
                for index in range(len(values)):
                    value = words[word] >> np.uint64(shift)
                    if shift + width > 64:
                        value |= words[word + 1] << np.uint64(64 - shift)
                    values[index] = low + np.int64(value & mask)
                    shift += width
                    if shift >= 64:
                        shift -= 64
                        word += 1
            at = stop
    for index in range(count):
        out[0, index] = start
        start += out[_SPAN, index]
    return -1


@inlined
def _ends_name(byte: int) -> bool:
    return byte == 32 or 9 <= byte <= 13 or byte == 1  # as `name_of`


@inlined
def _copy_name(text: Bytes, start: int, end: int, out: Bytes, at: int) -> int:
    while start < end and _ends_name(text[start]):
        start += 1
    while start < end and not _ends_name(text[start]):
        out[at] = text[start]
        start += 1
        at += 1
    out[at] = 10
    return at + 1


@kernel
def _write_lines(
    text: Bytes,
    starts: Numbers,
    heads: Numbers,
    bases: Numbers,
    spans: Numbers,
    lines: Numbers,
    eols: Numbers,
    gaps: Numbers,
    has_quality: bool,
    out: Bytes,
    edges: Numbers,
) -> None:
    """`edges`: where the first of every `PIECE` records starts, and the last ends."""
    at = 0
    for index in range(len(starts)):
        if index % PIECE == 0:
            edges[index // PIECE] = at
        count, line = bases[index], lines[index]
        start = starts[index] - starts[0]
        place = start + heads[index]
        at = _copy_name(text, start + 1, place, out, at)
        if line == 0 or count <= line:
            at = copy(text, place, count, out, at)
        else:
            for _ in range(count // line):
                at = copy(text, place, line, out, at)
                place += line + eols[index]
            at = copy(text, place, count % line, out, at)
        out[at] = 10
        at += 1
        if has_quality:
            at = copy(text, place + count + gaps[index], count, out, at)
            out[at] = 10
            at += 1
    edges[-1] = at


@kernel
def _join_lines(
    headers: Bytes,
    starts: Numbers,
    ends: Numbers,
    flat: Bytes,
    quality: Bytes,
    offsets: Numbers,
    has_quality: bool,
    out: Bytes,
    edges: Numbers,
) -> None:
    at = 0
    for index in range(len(starts)):
        if index % PIECE == 0:
            edges[index // PIECE] = at
        at = _copy_name(headers, starts[index], ends[index], out, at)
        start, count = offsets[index], offsets[index + 1] - offsets[index]
        at = copy(flat, start, count, out, at)
        out[at] = 10
        at += 1
        if has_quality:
            at = copy(quality, start, count, out, at)
            out[at] = 10
            at += 1
    edges[-1] = at
