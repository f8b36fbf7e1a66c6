"""A pack -> FASTA or FASTQ: always the same records, and the same bytes if the line layout of the text was regular.

The text between headers, sequences and qualities is called a *gap*. In a regular layout every gap follows from the four
values of `LineLayout`, so a pack need not store any. `LayoutCheck` finds out which it is while a text is packed.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from millstream.core.collection import Numbers
from millstream.core.console import Progress, silent
from millstream.core.fingerprint import samples_crc32c
from millstream.core.kernels import kernel
from millstream.core.outputs import find_finished, publishing_text, remember_finished
from millstream.core.record import Bytes, crc32c
from millstream.errors import BadIndex
from millstream.reads.files.ranges import copy
from millstream.reads.pack import PackFile

MEMORY = 256 << 20
WINDOW_BASES = 4 << 20
_ROWS = 1 << 16
_NO_LIMIT = 1 << 62


def unpack(path: Path, out: BinaryIO | Path, *, progress: Progress = silent, window_bases: int = WINDOW_BASES) -> int:
    """Write the text; returns its number of bytes. A path ending in .gz is compressed; it appears when it is complete.

    `progress` gets the number of records done. At most `window_bases` are decoded at once, however long a record is.
    """
    restorer = TextRestorer(PackFile(path, memory=MEMORY), window_bases=window_bases)
    if isinstance(out, Path):
        terms = {"pack": [path.stat().st_size, samples_crc32c(path)]}
        if (done := find_finished(out, terms)) is not None:
            return done
        with publishing_text(out) as write:
            done = _unpack(restorer, write, progress)
        remember_finished(out, terms, done)
        return done
    return _unpack(restorer, out.write, progress)


def _unpack(restorer: "TextRestorer", write: Callable[[memoryview], object], progress: Progress) -> int:
    done = crc = 0
    for text, row in restorer.texts():
        write(text.data)
        crc = crc32c(text, crc)
        done += len(text)
        progress(row)
    source = restorer.source
    if source.is_exact and (done, crc) != (source.meta["text_bytes"], source.meta["text_crc32c"]):
        raise BadIndex(
            f"{source.path}: unpacked {done} bytes with checksum {crc:08x}, but {source.meta['text_bytes']} bytes "
            f"with {source.meta['text_crc32c']:08x} were packed. Pack the source again"
        )
    return done


@dataclass(frozen=True)
class LineLayout:
    """A regular layout; by default the one that text gets whose own layout is irregular."""

    line: int = 0  # bases per line; 0: every sequence is one line
    crlf: bool = False  # lines end in \r\n
    repeats_header: bool = False  # after the '+' of FASTQ
    final_newline: bool = True


@dataclass(frozen=True)
class FoundLayout:
    """The layout of a text, or the first record that departs from it."""

    layout: LineLayout = LineLayout()
    irregular_record: int | None = None


class LayoutCheck:
    """Follows a text as it is read; finds its layout, or the first record that departs from it."""

    def __init__(self, *, fastq: bool) -> None:
        self._fastq = fastq
        self._state = np.zeros(_STATE, np.int64)
        self._state[[_PHASE, _PLUS, _IRREGULAR]] = _START, _UNKNOWN, _REGULAR
        self._held = self._header = np.empty(0, np.uint8)  # text since the last piece; the last header

    @property
    def irregular_record(self) -> int | None:
        """The first record with another line layout than those before it."""
        return None if self._state[_IRREGULAR] == _REGULAR else int(self._state[_IRREGULAR])

    def add(
        self, buffer: Bytes, text: tuple[int, int], headers: Numbers, segments: Numbers, qualities: Numbers
    ) -> None:
        """Follow buffer[begin:end], which comes right after what was followed before, and the pieces in it."""
        if self.irregular_record is not None:
            return
        begin, end = text
        first = min([end, *(headers[:1, 0] - 1).tolist(), *segments[:1, 0].tolist(), *qualities[:1, 0].tolist()])
        gap = np.concatenate([self._held, buffer[begin:first]])
        if first == end:
            self._held = gap
        else:
            last = self._check(buffer, first, end, gap, headers, segments, qualities, final=False)
            self._held = buffer[last:end].copy()
        if len(headers):
            self._header = buffer[headers[-1, 0] : headers[-1, 1]].copy()
        if len(self._held) > len(self._header) + _LONGEST_GAP and self.irregular_record is None:
            self._state[_IRREGULAR] = max(int(self._state[_RECORDS]) - 1, 0)

    def finish(self) -> FoundLayout:
        """The text has ended."""
        if self.irregular_record is None:
            none = np.empty((0, 2), np.int64)
            self._check(self._held, 0, 0, self._held, none, none, none, final=True)
        if (irregular := self.irregular_record) is not None:
            return FoundLayout(irregular_record=irregular)
        line, eol, plus, is_cut = self._state[[_LINE, _EOL, _PLUS, _NO_NEWLINE]].tolist()
        return FoundLayout(LineLayout(line, eol == 2, plus == 1, not is_cut))

    def state(self) -> dict[str, object]:
        return {"state": self._state.copy(), "held": self._held, "header": self._header}

    def restore(self, state: dict[str, Any]) -> None:
        self._state, self._held, self._header = state["state"].copy(), state["held"], state["header"]

    def _check(
        self,
        buffer: Bytes,
        first: int,
        end: int,
        gap: Bytes,
        headers: Numbers,
        segments: Numbers,
        qualities: Numbers,
        *,
        final: bool,
    ) -> int:
        return _check(
            buffer, first, end, gap, self._header, headers, segments, qualities, self._fastq, final, self._state
        )


class TextRestorer:
    """Writes the records of a pack as text again, in its line layout."""

    def __init__(self, source: PackFile, *, window_bases: int) -> None:
        self.source = source
        self._window_bases = window_bases
        self._fastq = source.has_quality
        self._layout = layout = LineLayout(**source.meta.get("layout", {}))
        self._line = layout.line or _NO_LIMIT
        self._eol = np.frombuffer(bytearray(b"\r\n" if layout.crlf else b"\n"), np.uint8)

    def texts(self) -> Generator[tuple[Bytes, int]]:
        """The text in pieces of a few megabytes, however long the records are; the records begun so far."""
        row, records = 0, self.source.records
        while row < records:
            rows = np.arange(row, min(row + _ROWS, records), dtype=np.int64)
            count = int(np.searchsorted(np.cumsum(self.source.lengths(rows)), self._window_bases, side="right"))
            row += max(count, 1)
            text = np.empty(0, np.uint8)
            for following in self._records(rows[:count]) if count else self._long_record(rows[:1]):
                yield text, row
                text = following
            is_cut = row == records and not self._layout.final_newline
            yield text[: len(text) - len(self._eol) * is_cut], row

    def _records(self, rows: Numbers) -> Generator[Bytes]:
        """The text of whole records."""
        lengths = self.source.lengths(rows)
        offsets = np.append(np.zeros(1, np.int64), np.cumsum(lengths))
        starts = self.source.starts(rows)
        headers, header_starts, header_ends = self.source.headers(rows)
        sequences = self.source.sequences(starts, offsets)
        qualities = self.source.qualities(starts, offsets) if self._fastq else sequences
        num_lines = int((lengths // self._line + 2).sum())  # and the header's; no fewer than there are
        num_bytes = len(headers) + len(sequences) + len(self._eol) * num_lines + len(rows)
        out = np.empty(2 * num_bytes if self._fastq else num_bytes, np.uint8)
        end = _restore(
            headers, header_starts, header_ends, sequences, qualities, offsets,
            self._line, self._eol, self._fastq, self._layout.repeats_header, out,
        )  # fmt: skip
        yield out[:end]

    def _long_record(self, row: Numbers) -> Generator[Bytes]:
        """The text of one record, a window at a time, ending in a line end."""
        header, eol = self.source.headers(row)[0].tobytes(), self._eol.tobytes()
        yield _bytes(b"@" if self._fastq else b">", header, eol)
        yield from self._wrapped(row, self.source.sequences)
        if self._fastq:
            yield _bytes(eol, b"+", header if self._layout.repeats_header else b"", eol)
            yield from self._wrapped(row, self.source.qualities)
        yield self._eol

    def _wrapped(self, row: Numbers, decode: Callable[[Numbers, Numbers], Bytes]) -> Generator[Bytes]:
        length, start = int(self.source.lengths(row)[0]), int(self.source.starts(row)[0])
        for place in range(0, length, self._window_bases):
            count = min(self._window_bases, length - place)
            flat = decode(np.array([start + place], np.int64), np.array([0, count], np.int64))
            column = (place - 1) % self._line + 1 if place else 0
            out = np.empty(count + (count // self._line + 1) * len(self._eol), np.uint8)
            yield out[: _wrap(flat, 0, count, column, self._line, self._eol, out, 0)]


def _bytes(*parts: bytes) -> Bytes:
    return np.frombuffer(b"".join(parts), np.uint8)


@kernel
def _wrap(flat: Bytes, start: int, end: int, column: int, line: int, eol: Bytes, out: Bytes, at: int) -> int:
    """flat[start:end] over lines, the first of which has `column` bases already; without the last line end."""
    while start < end:
        if column == line:
            at = copy(eol, 0, len(eol), out, at)
            column = 0
        count = min(end - start, line - column)
        at = copy(flat, start, count, out, at)
        start += count
        column += count
    return at


@kernel
def _restore(
    headers: Bytes,
    header_starts: Numbers,
    header_ends: Numbers,
    sequences: Bytes,
    qualities: Bytes,
    offsets: Numbers,
    line: int,
    eol: Bytes,
    fastq: bool,
    repeats_header: bool,
    out: Bytes,
) -> int:
    """Write whole records; the number of bytes."""
    at = 0
    for row in range(len(header_starts)):
        start, end = offsets[row], offsets[row + 1]
        out[at] = 64 if fastq else 62
        at = copy(headers, header_starts[row], header_ends[row] - header_starts[row], out, at + 1)
        at = copy(eol, 0, len(eol), out, at)
        at = _wrap(sequences, start, end, 0, line, eol, out, at)
        if fastq:
            at = copy(eol, 0, len(eol), out, at)
            out[at] = 43
            at += 1
            if repeats_header:
                at = copy(headers, header_starts[row], header_ends[row] - header_starts[row], out, at)
            at = copy(eol, 0, len(eol), out, at)
            at = _wrap(qualities, start, end, 0, line, eol, out, at)
        if fastq or end > start:  # FASTA has no line for an empty sequence
            at = copy(eol, 0, len(eol), out, at)
    return at


_LONGEST_GAP = 9  # without the header: \r\n\r\n+\r\n\r\n

# The state between two buffers.
_PHASE, _RECORDS, _COLUMN, _LONGEST, _LINE, _EOL, _PLUS, _NO_NEWLINE, _IRREGULAR = range(9)
_STATE = 9
_HEADER, _SEQUENCE, _QUALITY, _END, _START = range(5)  # kinds of piece; the phase is the kind of the last one
_UNKNOWN = -1  # as `_PLUS`: no record has shown it yet
_REGULAR = -1


@kernel
def _is_line_end(text: Bytes, at: int, eol: int) -> bool:
    return text[at + eol - 1] == 10 and (eol == 1 or text[at] == 13)


@kernel
def _is_plus_line(gap: Bytes, eol: int, header: Bytes, ends_before: int, ends_after: int) -> bool:
    """Whether a gap is '+' and a header, with this many line ends before and after it."""
    if len(gap) != (ends_before + ends_after) * eol + 1 + len(header):
        return False
    at = ends_before * eol
    for index in range(len(header)):
        if gap[at + 1 + index] != header[index]:
            return False
    after = at + 1 + len(header)
    for index in range(ends_before):
        if not _is_line_end(gap, index * eol, eol):
            return False
    for index in range(ends_after):
        if not _is_line_end(gap, after + index * eol, eol):
            return False
    return gap[at] == 43


@kernel
def _check_plus(gap: Bytes, header: Bytes, ends_before: int, ends_after: int, state: Numbers) -> bool:
    """Whether a gap has the '+' line that is expected; the first one that shows it decides for all."""
    eol = state[_EOL]
    if state[_PLUS] != 0 and _is_plus_line(gap, eol, header, ends_before, ends_after):
        if len(header) > 0:
            state[_PLUS] = 1
        return True
    if state[_PLUS] != 1 and _is_plus_line(gap, eol, header[:0], ends_before, ends_after):
        state[_PLUS] = 0
        return True
    return False


@kernel
def _check_gap(gap: Bytes, kind: int, header: Bytes, fastq: bool, state: Numbers) -> bool:
    """Whether the gap before a piece of this kind is the expected one."""
    phase = state[_PHASE]
    if phase == _START:
        return len(gap) == 0
    if state[_EOL] == 0:  # the first line end decides
        state[_EOL] = 2 if len(gap) > 0 and gap[0] == 13 else 1
    eol = state[_EOL]
    is_line_end = len(gap) == eol and _is_line_end(gap, 0, eol)
    if kind == phase and kind != _HEADER:
        if kind == _SEQUENCE and is_line_end and state[_LINE] == 0 and state[_COLUMN] >= state[_LONGEST]:
            state[_LINE] = state[_COLUMN]  # the first line that another one follows
        if state[_COLUMN] == state[_LINE]:
            state[_COLUMN] = 0
            return is_line_end
        return len(gap) == 0
    if fastq and kind == _QUALITY:
        return _check_plus(gap, header, 1, 1, state)
    if fastq and phase == _HEADER and kind != _SEQUENCE:  # a record without bases has two empty lines
        if _check_plus(gap, header, 2, 2, state):
            return True
        state[_NO_NEWLINE] = 1
        return kind == _END and _check_plus(gap, header, 2, 1, state)
    if kind == _END and len(gap) == 0:
        state[_NO_NEWLINE] = 1
        return True
    return is_line_end


@kernel
def _check(
    buffer: Bytes,
    first: int,
    end: int,
    gap: Bytes,
    header: Bytes,
    headers: Numbers,
    segments: Numbers,
    qualities: Numbers,
    fastq: bool,
    final: bool,
    state: Numbers,
) -> int:
    """Walk through the pieces in order, the first of them after `gap`; where the last one ends."""
    next_header = next_segment = next_quality = 0
    header_start = header_end = -1  # `header`, until there is one in the buffer
    position = first
    while True:
        kind, start, stop = _END, end, end
        if next_header < len(headers):
            kind, start, stop = _HEADER, headers[next_header, 0] - 1, headers[next_header, 1]
        if next_segment < len(segments) and segments[next_segment, 0] < start:
            kind, start, stop = _SEQUENCE, segments[next_segment, 0], segments[next_segment, 1]
        if next_quality < len(qualities) and qualities[next_quality, 0] < start:
            kind, start, stop = _QUALITY, qualities[next_quality, 0], qualities[next_quality, 1]
        if kind == _END and not final:
            return position
        phase, eol = state[_PHASE], state[_EOL]
        is_line_end = position > first and start - position == eol and _is_line_end(buffer, position, eol)
        if is_line_end and kind == phase and state[_COLUMN] == state[_LINE]:
            state[_COLUMN] = 0
        elif not is_line_end or kind == phase or kind == _QUALITY or kind == _END:  # not simply the end of a line
            if position > first:
                gap = buffer[position:start]
            if header_start >= 0:
                header = buffer[header_start:header_end]
            if not _check_gap(gap, kind, header, fastq, state):
                state[_IRREGULAR] = max(state[_RECORDS] - 1, 0)
                return end
        if kind == _END:
            return end
        position = stop
        if kind == _HEADER:
            next_header += 1
            header_start, header_end = start + 1, stop
            state[_LONGEST] = max(state[_LONGEST], state[_COLUMN])
            state[_RECORDS] += 1
            state[_COLUMN] = 0
        else:
            if kind == _SEQUENCE:
                next_segment += 1
            else:
                next_quality += 1
            if state[_PHASE] != kind:
                state[_COLUMN] = 0
            state[_COLUMN] += stop - start
            if state[_COLUMN] > state[_LINE] > 0:
                state[_IRREGULAR] = state[_RECORDS] - 1
                return end
        state[_PHASE] = kind
