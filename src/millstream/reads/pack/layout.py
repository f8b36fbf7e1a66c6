"""How a text is broken into lines, in four values, and whether all of it follows them.

The text between headers, sequences and qualities is called a *gap*. In a regular layout every gap follows from the
values of `LineLayout`, so a pack need not store any of them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from millstream.core.collection import Numbers
from millstream.core.kernels import kernel
from millstream.core.record import Bytes


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
