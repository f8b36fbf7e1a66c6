"""Bases and base qualities of a pack: two bits per base in one stream, exceptions as runs; qualities as codes."""

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.core.collection import Numbers
from millstream.core.instructions import find_others, load_word, pack_bases, prefetch, store_bases, store_word
from millstream.core.kernels import kernel
from millstream.core.memory import empty_bytes
from millstream.core.record import Bytes
from millstream.reads.files.encodings import CHUNK, Words, last_not_above, value_of
from millstream.reads.files.ranges import copy
from millstream.reads.files.records import Checked, table_of, unverified, value_at
from millstream.reads.files.sections import Sections
from millstream.reads.files.sections_writer import SectionsWriter

BASES = b"ACTG"  # a base's code is (ASCII byte >> 1) & 3, so eight of them are coded in a few operations
STREAM = "2bit"
_RUNS = {"other": ("start", "length", "letter"), "lower": ("start", "length")}  # names of columns in the file
_WORD = 8  # bases
_READ_BITS = 18  # log2 of the bytes that are mapped to find the runs of a read: 64 kB around each of four pages
_FIRST = np.zeros(1, np.int64)
_AHEAD = 16  # reads that are prefetched before they are decoded
_STRETCH_BITS = 8  # log2 of the bases of a stretch, at least
_NUM_STRETCHES = 1 << 21  # at most, one bit each

# The state between two buffers; a start below 0: no run is open.
_AT, _OTHER, _BASE, _LOWER = range(4)


class TwoBitWriter:
    """Appends runs of bases to the stream."""

    def __init__(self, sections: SectionsWriter) -> None:
        self._stream = sections.part(STREAM)
        self._columns = {kind: [sections.column(f"{kind}.{name}") for name in names] for kind, names in _RUNS.items()}
        self._left = np.empty(0, np.uint8)  # bases that do not fill a word yet
        self._state = np.array([0, -1, 0, -1], np.int64)

    def add(self, buffer: Bytes, segments: Numbers) -> None:
        """Append the bases buffer[start:end] of every segment."""
        bases = join(buffer, segments, before=self._left)
        count = len(bases) - len(bases) % _WORD
        self._left = bases[count:].copy()
        self._encode(bases[:count])

    def finish(self) -> None:
        """Fill up the last word and close open runs. An extra word lets readers look one word ahead."""
        if len(self._left):
            self._encode(np.append(self._left, np.full(_WORD - len(self._left), BASES[0], np.uint8)))
        self._encode(np.full(_WORD, BASES[0], np.uint8))  # closes what is open
        self._stream.write(bytes(-self._stream.tell() % 8))

    def state(self) -> dict[str, object]:
        return {"left": self._left, "state": self._state.copy()}

    def restore(self, state: dict[str, Any]) -> None:
        self._left, self._state = state["left"], state["state"].copy()

    def _encode(self, bases: Bytes) -> None:
        if not len(bases):
            return
        out = np.empty(len(bases) // _WORD, np.uint16)
        # As many runs as bases can end here, and one that was open before.
        others, lowers = np.empty((len(bases) + 1, 3), np.int64), np.empty((len(bases) + 1, 2), np.int64)
        counts = np.zeros(2, np.int64)
        _encode(bases.view(np.uint64), out, self._state, others, lowers, counts)
        self._stream.write(out.tobytes())
        for kind, runs in (("other", others[: counts[0]]), ("lower", lowers[: counts[1]])):
            if len(runs):
                for column, values in zip(self._columns[kind], runs.T, strict=True):
                    column.append(np.ascontiguousarray(values))


class TwoBit:
    """The bases of a published file by their position in the stream.

    With `memory`, the file is too large to be held: of its runs, few pages are mapped at a time.
    """

    def __init__(self, sections: Sections, *, memory: int | None = None) -> None:
        self._sections = sections
        self._stream = sections.view(STREAM)
        columns = [[sections.column(f"{kind}.{name}") for name in names] for kind, names in _RUNS.items()]
        self._num_at_once: int | None = None  # reads
        if memory is not None and sum(column.num_bytes for some in columns for column in some) > memory // 8:
            self._num_at_once = max(memory >> _READ_BITS, 1)
        self._runs = [[column.whole() for column in some] for some in columns if some[0].rows]
        self._stretch_bits = _STRETCH_BITS
        while sections.span(STREAM)[1] << 2 >> self._stretch_bits > _NUM_STRETCHES:
            self._stretch_bits += 1
        if memory is not None:
            sections.drop_pages()

    def sequences(self, starts: Numbers, offsets: Numbers, copied: tuple[Bytes, Numbers] | None = None) -> Bytes:
        """`offsets[i+1] - offsets[i]` bases from position `starts[i]` on, for every i, one after the other.

        `copied`: bytes of the stream, and the byte with the first base of each i in them; else the mapped file is used.
        """
        out = empty_bytes(int(offsets[-1]))
        if copied is None:
            _decode(self._stream, starts, offsets, out)
        else:
            _decode(copied[0], (copied[1] << 2) + (starts & 3), offsets, out)
        if self._num_at_once is None:
            if self._runs:
                found = np.empty(len(starts) + 1, np.int64)
                count = _find_marked(self._marks, self._stretch_bits, starts, offsets, found)
                self._apply_runs(found[:count], starts, offsets, out)
            return out
        order = np.argsort(starts)  # neighbours are in the same pages
        for at in range(0, len(order), self._num_at_once):
            self._apply_runs(order[at : at + self._num_at_once], starts, offsets, out)
            self._sections.drop_pages()
        return out

    def one(self, start: int, count: int, copied: bytes | None = None) -> Bytes:
        """`count` bases from a position on, of the mapped file or of these bytes from there on."""
        starts, offsets = np.array([start], np.int64), np.array([0, count], np.int64)
        out = np.empty(count, np.uint8)
        if copied is None:
            _decode(self._stream, starts, offsets, out)
        else:
            _decode(np.array(memoryview(copied)), starts & 3, offsets, out)
        self._apply_runs(_FIRST, starts, offsets, out)
        return out

    @cached_property
    def _marks(self) -> Bytes:
        """A bit per stretch of bases that has a run: few reads do, and searching for the runs of one takes 140 ns."""
        marks = np.zeros((self._sections.span(STREAM)[1] << 2 >> self._stretch_bits + 3) + 1, np.uint8)
        for begins, lengths, *_ in self._runs:
            places = begins.directory, begins.words, lengths.directory, lengths.words
            _mark(*places, begins.rows, self._stretch_bits, marks)
        return marks

    def _apply_runs(self, reads: Numbers, starts: Numbers, offsets: Numbers, out: Bytes) -> None:
        for begins, lengths, *letters in self._runs:
            letter = letters[0] if letters else lengths
            _apply_runs(
                begins.directory, begins.words, lengths.directory, lengths.words, letter.directory, letter.words,
                begins.rows, not letters, reads, starts, offsets, out,
            )  # fmt: skip


_CODES = np.uint64(0x0303030303030303)
_ONES = np.uint64(0x0101010101010101)
_A = np.uint64(0x4141414141414141)
_UPPER = np.uint64(0xDFDFDFDFDFDFDFDF)
_CASE = np.uint64(0x2020202020202020)
_NIBBLES, _BYTES = np.uint64(0x000F000F000F000F), np.uint64(0x000000FF000000FF)


@kernel
def _encode(
    words: NDArray[np.uint64],
    out: NDArray[np.uint16],
    state: Numbers,
    others: Numbers,
    lowers: Numbers,
    counts: Numbers,
) -> None:
    """Eight bases per word, or four words. Words of ACGT are noticed by rebuilding their bases from their codes."""
    num_others = num_lowers = 0
    at = state[_AT]
    other, other_base, lower = state[_OTHER], state[_BASE], state[_LOWER]
    index = -1
    while index + 1 < len(words):
        index += 1
        if other < 0 and lower < 0 and index + 4 <= len(words) and find_others(words, index) == np.uint64(0):
            store_word(out, index, pack_bases(words, index))
            at += 32
            index += 3
            continue
        word = words[index]
        codes = (word >> np.uint64(1)) & _CODES
        is_t = (codes >> np.uint64(1)) & ~codes & _ONES  # 2: its base is 15 above the row A, C, E, G
        again = _A + (codes << np.uint64(1)) + is_t * np.uint64(15)
        pairs = (codes | codes >> np.uint64(6)) & _NIBBLES
        fours = (pairs | pairs >> np.uint64(12)) & _BYTES
        out[index] = np.uint16((fours | fours >> np.uint64(24)) & np.uint64(0xFFFF))
        if again == word and other < 0 and lower < 0:
            at += 8
            continue
        if again == word & _UPPER and other < 0 and lower >= 0 and word & _CASE == _CASE:
            at += 8
            continue
        for shift in range(8):
            base = np.int64((word >> np.uint64(8 * shift)) & np.uint64(255))
            if 97 <= base <= 122:
                base -= 32
                if lower < 0:
                    lower = at
            elif lower >= 0:
                lowers[num_lowers, 0] = lower
                lowers[num_lowers, 1] = at - lower
                num_lowers += 1
                lower = -1
            if base == 65 or base == 67 or base == 71 or base == 84:
                base = 0
            if other >= 0 and base != other_base:
                others[num_others, 0] = other
                others[num_others, 1] = at - other
                others[num_others, 2] = other_base
                num_others += 1
                other = -1
            if base > 0 and other < 0:
                other = at
                other_base = base
            at += 1
    state[_AT], state[_OTHER], state[_BASE], state[_LOWER] = at, other, other_base, lower
    counts[0], counts[1] = num_others, num_lowers


@kernel
def _decode(stream: Bytes, starts: Numbers, offsets: Numbers, out: Bytes) -> None:
    """32 bases at a time. What is written past the end of a read is written again by the next one."""
    for index in range(-_AHEAD, len(starts)):
        ahead = index + _AHEAD
        if ahead < len(starts):
            prefetch(stream, starts[ahead] >> 2)
            prefetch(stream, starts[ahead] + offsets[ahead + 1] - offsets[ahead] - 1 >> 2)
        if index < 0:
            continue
        place, target, end = starts[index], offsets[index], offsets[index + 1]
        while target < end:
            byte, skipped = place >> 2, place & 3
            if byte + 8 <= len(stream) and target + 32 <= len(out):
                store_bases(out, target, load_word(stream, byte) >> np.uint64(2 * skipped))
                place += 32 - skipped
                target += 32 - skipped
            else:
                code = stream[byte] >> 2 * skipped & 3
                out[target] = 65 + 2 * code + 15 * (code == 2)
                place += 1
                target += 1


@kernel
def _mark(
    begin_directory: Numbers, begin_words: Words, directory: Numbers, words: Words, rows: int, bits: int, marks: Bytes
) -> None:
    for run in range(rows):
        begin = value_of(begin_directory, begin_words, run)
        last = begin + value_of(directory, words, run) - 1
        for stretch in range(begin >> bits, (last >> bits) + 1):
            marks[stretch >> 3] |= np.uint8(1 << (stretch & 7))


@kernel
def _find_marked(marks: Bytes, bits: int, starts: Numbers, offsets: Numbers, found: Numbers) -> int:
    """Fills `found` with the reads in marked stretches; how many they are."""
    count = 0
    for read in range(len(starts)):
        first, last = starts[read] >> bits, starts[read] + offsets[read + 1] - offsets[read] - 1 >> bits
        is_marked = (marks[first >> 3] >> (first & 7) | marks[last >> 3] >> (last & 7)) & 1
        for stretch in range(first + 1, last):
            is_marked |= marks[stretch >> 3] >> (stretch & 7) & 1
        found[count] = read
        count += is_marked
    return count


@kernel
def _apply_runs(
    begin_directory: Numbers,
    begin_words: Words,
    directory: Numbers,
    words: Words,
    letter_directory: Numbers,
    letter_words: Words,
    rows: int,
    is_lower: bool,
    reads: Numbers,
    starts: Numbers,
    offsets: Numbers,
    out: Bytes,
) -> None:
    """Apply runs of lower case, or of another base, to some reads. Runs are apart and ascending."""
    last = -1
    for index in range(len(reads)):
        read = reads[index]
        start, target = starts[read], offsets[read]
        end = start + offsets[read + 1] - target
        if end == start:
            continue
        last = last_not_above(begin_directory, begin_words, rows, int(end - 1), last)
        for run in range(last, -1, -1):
            begin = value_of(begin_directory, begin_words, run)
            stop = begin + value_of(directory, words, run)
            if stop <= start:
                break
            letter = 0 if is_lower else value_of(letter_directory, letter_words, run)
            for place in range(max(begin, start) - start + target, min(stop, end) - start + target):
                out[place] = out[place] | 32 if is_lower else letter


QUALITIES = "grades"  # name of the column in the file
_NOTHING = np.empty(0, np.uint8)


class QualitiesWriter:
    """Codes quality values in order of their first appearance."""

    def __init__(self, sections: SectionsWriter) -> None:
        self._column = sections.column(QUALITIES)
        self._codes = np.full(256, -1, np.int64)
        self.values: list[int] = []

    def add(self, buffer: Bytes, segments: Numbers) -> None:
        qualities = join(buffer, segments, before=_NOTHING)
        codes = self._codes[qualities]
        if len(codes) and codes.min() < 0:
            new, first = np.unique(qualities[codes < 0], return_index=True)
            for value in new[np.argsort(first)].tolist():
                self._codes[value] = len(self.values)
                self.values.append(value)
            codes = self._codes[qualities]
        self._column.append(codes)

    def state(self) -> dict[str, object]:
        return {"values": list(self.values)}

    def restore(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])
        self._codes[:] = -1
        self._codes[self.values] = np.arange(len(self.values))


class Qualities:
    """Base qualities by their position in the stream of bases."""

    def __init__(self, sections: Sections, values: list[int]) -> None:
        self._sections = sections
        self._column = column = sections.column(QUALITIES)
        self._index = sections.words, sections.checked, table_of([column])
        self._values = np.array([*values, 0], np.uint8)

    def take(self, starts: Numbers, offsets: Numbers) -> Bytes:
        """`offsets[i+1] - offsets[i]` qualities from position `starts[i]` on, for every i, one after the other."""
        out = empty_bytes(int(offsets[-1]))
        counts = np.diff(offsets)
        some = counts > 0
        starts, counts, targets = starts[some], counts[some], offsets[:-1][some]
        if not len(starts):
            return out
        if self._column.is_copied:
            codes, rows = self._column.copied(starts, starts + counts - 1)
            _take_runs(codes.directory, codes.words, rows, counts, targets, self._values, out)
            return out
        edges = [starts, starts + counts - 1]
        for read in np.flatnonzero(counts > CHUNK).tolist():
            edges.append(np.arange(int(starts[read]), int(starts[read] + counts[read]), CHUNK, dtype=np.int64))
        codes = self._column.verified(np.concatenate(edges))
        _take_runs(codes.directory, codes.words, starts, counts, targets, self._values, out)
        return out

    def one(self, start: int, count: int) -> Bytes:
        """`count` qualities from a position on, of the mapped file; without an array per column."""
        out = np.empty(count, np.uint8)
        while (block := _take_run(*self._index, self._values, start, out)) >= 0:
            self._sections.check_block(block)
        return out


@kernel
def _take_run(words: Words, checked: Checked, table: Numbers, values: Bytes, start: int, out: Bytes) -> int:
    """One run; or a megabyte to verify first."""
    for row in range(start, start + len(out)):
        if row == start or row & 4095 == 0:
            block = unverified(words, checked, table, 0, row, min(row | 4095, start + len(out) - 1))
            if block >= 0:
                return block
        out[row - start] = values[value_at(words, table, 0, row)]
    return -1


@kernel
def _take_runs(
    directory: Numbers, words: Words, starts: Numbers, counts: Numbers, targets: Numbers, values: Bytes, out: Bytes
) -> None:
    """Codes of neighbouring rows; a chunk's position and width are looked up once."""
    for index in range(len(starts)):
        row = starts[index]
        end = row + counts[index]
        target = targets[index]
        while row < end:
            chunk = row >> 12
            stop = min(end, (chunk + 1) << 12)
            low = directory[chunk, 0]
            width = directory[chunk, 1] & 255
            bit = (row & 4095) * width
            word = (directory[chunk, 1] >> 8) + (bit >> 6)
            shift = bit & 63
            mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)  # at most 8 bits wide
            for _ in range(stop - row):
                value = words[word] >> np.uint64(shift)
                if shift + width > 64:
                    value |= words[word + 1] << np.uint64(64 - shift)
                out[target] = values[low + np.int64(value & mask)]
                target += 1
                shift += width
                if shift >= 64:
                    shift -= 64
                    word += 1
            row = stop


def join(buffer: Bytes, pieces: Numbers, *, before: Bytes) -> Bytes:
    """`before`, followed by buffer[start:end] of every piece."""
    out = np.empty(len(before) + int((pieces[:, 1] - pieces[:, 0]).sum()), np.uint8)
    out[: len(before)] = before
    _join(buffer, pieces, out, len(before), 0)
    return out


def join_lines(buffer: Bytes, pieces: Numbers) -> Bytes:
    """buffer[start:end] of every piece, each followed by a newline."""
    out = np.empty(int((pieces[:, 1] - pieces[:, 0] + 1).sum()), np.uint8)
    _join(buffer, pieces, out, 0, 1)
    return out


@kernel
def _join(buffer: Bytes, pieces: Numbers, out: Bytes, at: int, newline: int) -> None:
    for index in range(len(pieces)):
        start = pieces[index, 0]
        count = pieces[index, 1] - start
        at = copy(buffer, start, count, out, at)
        if newline:
            out[at] = 10
            at += 1
