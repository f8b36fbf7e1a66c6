"""The growing parts of a packed file: sequences, qualities, headers and lengths go in, and the state to resume from
comes out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.core.collection import Numbers
from millstream.core.kernels import kernel
from millstream.core.record import Bytes
from millstream.reads.files.bit_columns import ANCHOR
from millstream.reads.files.scanner import Format
from millstream.reads.files.sections import SectionsWriter
from millstream.reads.pack.bases import QualitiesWriter, TwoBitWriter
from millstream.reads.pack.header_blocks import HeaderBlocksWriter, best_codec

# How a text is broken into lines, in four values, and whether the whole of it follows them.
#
# The text between headers, sequences and qualities is called a *gap*. In a regular layout every gap follows from the
# values of `LineLayout`, so a packed file need not store any of them.


@dataclass(frozen=True)
class LineLayout:
    """A regular layout; by default the one that text gets whose own layout is irregular."""

    line: int = 0  # bases per line; 0: every sequence is one line
    crlf: bool = False  # lines end in \r\n
    repeats_header: bool = False  # after the '+' of FASTQ
    final_newline: bool = True


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

    @property
    def layout(self) -> LineLayout:
        """The layout so far."""
        line, eol, plus, is_cut = self._state[[_LINE, _EOL, _PLUS, _NO_NEWLINE]].tolist()
        return LineLayout(line, eol == 2, plus == 1, not is_cut)

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

    def finish(self) -> None:
        """The text has ended."""
        if self.irregular_record is None:
            none = np.empty((0, 2), np.int64)
            self._check(self._held, 0, 0, self._held, none, none, none, final=True)

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
    """Whether a gap is '+' and a header, with so many line ends before and after it."""
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


@dataclass(frozen=True)
class ScannedText:
    """buffer[begin:end] and what it holds: headers that begin in it and whether they are kept, bases, records that
    end in it."""

    buffer: Bytes
    text: tuple[int, int]
    headers: Numbers
    kept: NDArray[np.bool_]
    segments: Numbers
    qualities: Numbers
    bases: Numbers  # of each record that ends here
    kept_rows: NDArray[np.bool_]

    def part(self, headers: tuple[int, int], text: tuple[int, int], rows: tuple[int, int]) -> "ScannedText":
        """Only these headers, this range of the text, and these records."""
        return ScannedText(
            self.buffer,
            text,
            self.headers[slice(*headers)],
            self.kept[slice(*headers)],
            _between(self.segments, *text),
            _between(self.qualities, *text),
            self.bases[slice(*rows)],
            self.kept_rows[slice(*rows)],
        )


class PackWriter:
    """Appends scanned text to the parts. Text must come in order, in pieces of any size."""

    def __init__(self, sections: SectionsWriter, format: Format, *, names: bool, quality: bool) -> None:
        fastq = format == "fastq"
        self._sections = sections
        self._lengths, self._anchors = sections.column("bases"), sections.column("anchor")
        self._twobit = TwoBitWriter(sections)
        self._qualities = QualitiesWriter(sections) if fastq and quality else None
        self._check = LayoutCheck(fastq=fastq) if quality or not fastq else None  # else it becomes plain FASTA
        self.headers = HeaderBlocksWriter(sections, best_codec()) if names else None
        self._own = sections.part_names
        self._skipping = False  # the last text ended in a record that is skipped
        self.records = self.bases = self.longest = 0

    def add(self, found: ScannedText) -> None:
        buffer, headers = found.buffer, found.headers
        segments, qualities = found.segments, found.qualities
        if self._check:
            self._check.add(buffer, found.text, headers, segments, qualities)
        if self._skipping or not found.kept.all():
            of_record = np.append(not self._skipping, found.kept)
            segments = segments[of_record[np.searchsorted(headers[:, 0], segments[:, 0])]]
            qualities = qualities[of_record[np.searchsorted(headers[:, 0], qualities[:, 0])]]
            self._skipping = not of_record[-1]
            headers = headers[found.kept]
        if self.headers and len(headers):
            self.headers.add(buffer, headers)
        self._twobit.add(buffer, segments)
        if self._qualities:
            self._qualities.add(buffer, qualities)
        self._add_lengths(found.bases if found.kept_rows.all() else found.bases[found.kept_rows])

    def finish(self) -> None:
        self._twobit.finish()
        if self._check:
            self._check.finish()
        if self.headers:
            self.headers.finish()

    def close(self) -> None:
        if self.headers:
            self.headers.close()

    @property
    def keeps_layout(self) -> bool:
        """Whether the records in their layout are the exact text, if none was skipped."""
        return self._check is not None and self._check.irregular_record is None

    def meta(self) -> dict[str, object]:
        """The description of the parts, after `finish`."""
        layout = self._check.layout if self._check and self.keeps_layout else LineLayout()
        return {
            "records": self.records,
            "bases": self.bases,
            "longest": self.longest,
            "layout": vars(layout),
            "irregular_record": self._check.irregular_record if self._check else None,
            "grades": self._qualities.values if self._qualities else [],
        }

    def state(self, *, sync: bool) -> dict[str, object]:
        """From where another writer can resume; `sync`: the parts are on disk."""
        counts = [self.records, self.bases, self.longest, int(self._skipping)]
        states = {name: writer.state() for name, writer in self._writers()}  # before the sections': blocks get written
        return {"counts": counts, "sections": self._sections.state(self._own, sync=sync), **states}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a state: drop what was written after it."""
        self.records, self.bases, self.longest, skipping = state["counts"]
        self._skipping = bool(skipping)
        self._sections.restore(state["sections"])
        for name, writer in self._writers():
            writer.restore(state[name])

    def _writers(self) -> list[tuple[str, Any]]:
        writers = {"twobit": self._twobit, "qualities": self._qualities, "layout": self._check, "headers": self.headers}
        return [(name, writer) for name, writer in writers.items() if writer is not None]

    def _add_lengths(self, bases: Numbers) -> None:
        if not len(bases):
            return
        starts = self.bases + np.cumsum(bases) - bases
        self._anchors.append(starts[-self.records % ANCHOR :: ANCHOR])
        self._lengths.append(bases)
        self.records += len(bases)
        self.bases += int(bases.sum())
        self.longest = max(self.longest, int(bases.max()))


def _between(pieces: Numbers, start: int, end: int) -> Numbers:
    low, high = np.searchsorted(pieces[:, 0], [start, end])
    return pieces[low:high]
