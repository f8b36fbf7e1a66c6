"""Buffers of text -> where records are: FASTA and FASTQ, one-line or wrapped, in one pass over every byte.

Bytes up to 32 and from 127 on are *events*, found 64 bytes at a time; all others are bases or qualities and are not
inspected one by one. Each record becomes a row. Records with an irregular line layout (ragged lines, blanks, comments,
wrapped FASTQ) are marked, and fetched character by character later (`gather` in texts.py).
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millstream.core.collection import Numbers
from millstream.core.instructions import count_zeros, find_controls
from millstream.core.kernels import inlined, kernel
from millstream.core.record import Bytes

Format = Literal["fasta", "fastq"]
IRREGULAR = -1  # as `line`: the record has lines of different lengths

# The columns of a row.
START, HEAD, BASES, LINE, EOL, GAP = range(6)
ROW = 6

# The state between two buffers.
_PHASE, _KIND, _LINE_START, _LENGTH, _RAGGED, _LAST_CR, _NUM_LINES, _PREVIOUS, _PREVIOUS_EOL = range(9)
_R_START, _R_HEAD, _R_BASES, _R_LINE, _R_EOL, _R_GAP, _R_QUALITY, _R_BLANK, _R_NUMBER, _ERROR, _ERROR_AT = range(9, 20)
_STATE = 20
# phases
_OUTSIDE, _SEQUENCE, _PLUS, _QUALITY = range(4)
# kinds of line
_UNKNOWN, _HEADER, _TEXT, _COMMENT, _PLUS_LINE, _QUALITY_LINE = range(6)

_CONTROL_A, _NEWLINE, _RETURN, _GREATER, _SEMICOLON, _AT, _PLUS_SIGN = 1, 10, 13, 62, 59, 64, 43
_WHY = {
    1: "not a text character (byte {byte})",
    2: "expected a FASTQ record, which starts with '@'",
    3: "a record without a '+' line",
    4: "a quality string and a sequence of different lengths",
    5: "sequence before the first '>' line",
}


class Scanned(NamedTuple):
    """What was found in a buffer. Positions of headers and segments are in the buffer, those of `rows` in the text."""

    buffer: Bytes
    rows: Numbers  # [n, 6] records that end here
    header_starts: Numbers  # headers that start here, without '>' or '@'
    header_ends: Numbers
    segments: Numbers  # [s, 2] runs of bases: start, end
    qualities: Numbers  # [q, 2] the same for qualities
    consumed: int  # the rest goes in front of the next buffer


class ScanError(Exception):
    """The text is not valid FASTA or FASTQ: why, at which byte of the text, in which record, which starts where."""

    def __init__(self, why: str, at: int, record: int, start: int) -> None:
        super().__init__(why)
        self.why, self.at, self.record, self.start = why, at, record, start


class Scanner:
    """Scans buffers in order, and keeps the state between them."""

    def __init__(self, format: Format, buffer_bytes: int) -> None:
        self._fastq = format == "fastq"
        self._state = np.zeros(_STATE, np.int64)
        self._state[_LAST_CR] = -1
        # Worst case: a header as long as the buffer, then every byte an event.
        size = buffer_bytes + 8
        self._events = np.empty(size, np.int32)
        self._rows = np.empty((size // 2 + 2, ROW), np.int64)
        self._headers = np.empty((size // 2 + 2, 2), np.int64)
        self._segments = np.empty((size + 2, 2), np.int64)
        self._qualities = np.empty((size + 2, 2), np.int64)
        self._counts = np.zeros(5, np.int64)

    def scan(self, buffer: Bytes, count: int, *, at: int, final: bool = False) -> Scanned:
        """Scan buffer[:count], which starts at byte `at` of the text."""
        num_events = _find_events(buffer, count, self._events)
        _follow(
            buffer, count, at, self._events, num_events, self._fastq, final, self._state,
            self._rows, self._headers, self._segments, self._qualities, self._counts,
        )  # fmt: skip
        if self._state[_ERROR]:
            self._fail(buffer, at)
        rows, headers, segments, qualities, consumed = self._counts.tolist()
        return Scanned(
            buffer,
            self._rows[:rows],
            self._headers[:headers, 0],
            self._headers[:headers, 1],
            self._segments[:segments],
            self._qualities[:qualities],
            consumed,
        )

    @property
    def records(self) -> int:
        """Records started so far."""
        return int(self._state[_R_NUMBER])

    def unfinished(self) -> int | None:
        """The start of the record that the text ends in the middle of (FASTQ only), or None."""
        return int(self._state[_R_START]) if self._fastq and self._state[_PHASE] != _OUTSIDE else None

    def _fail(self, buffer: Bytes, at: int) -> None:
        place = int(self._state[_ERROR_AT])
        byte = int(buffer[place - at]) if 0 <= place - at < len(buffer) else "?"
        why = _WHY[int(self._state[_ERROR])].format(byte=byte)
        raise ScanError(why, place, max(int(self._state[_R_NUMBER]) - 1, 0), int(self._state[_R_START]))


_ONE = np.uint64(1)


@kernel
def _find_events(buffer: Bytes, count: int, out: NDArray[np.int32]) -> int:
    """Positions of bytes <= 32 or >= 127, 64 bytes at a time."""
    found = 0
    whole = count & ~63
    for block in range(0, whole, 64):
        marks = find_controls(buffer, block)
        while marks != np.uint64(0):
            out[found] = block + np.int64(count_zeros(buffer, block, marks))
            found += 1
            marks &= marks - _ONE
    for position in range(whole, count):
        if buffer[position] <= 32 or buffer[position] >= 127:
            out[found] = position
            found += 1
    return found


@kernel
def _emit(rows: Numbers, index: int, state: Numbers) -> int:
    """Write the record that has just ended as a row."""
    rows[index, START] = state[_R_START]
    rows[index, HEAD] = state[_R_HEAD]
    rows[index, BASES] = state[_R_BASES]
    rows[index, LINE] = state[_R_LINE] if state[_NUM_LINES] > 1 or state[_R_LINE] < 0 else 0
    rows[index, EOL] = state[_R_EOL]
    rows[index, GAP] = state[_R_GAP]
    state[_PHASE] = _OUTSIDE
    return index + 1


@inlined
def _end_of_line(buffer: Bytes, events: NDArray[np.int32], index: int, num_events: int) -> int:
    """The number of the event that ends a header line with blanks; `num_events` if none does."""
    while index < num_events and (buffer[events[index]] == 32 or buffer[events[index]] == 9):
        index += 1
    return index if index < num_events and buffer[events[index]] == _NEWLINE else num_events


@kernel
def _follow_regular(
    buffer: Bytes,
    count: int,
    at: int,
    events: NDArray[np.int32],
    index: int,
    num_events: int,
    fastq: bool,
    rows: Numbers,
    headers: Numbers,
    segments: Numbers,
    qualities: Numbers,
    counts: Numbers,
) -> int:
    """Records of two lines (FASTQ: four) that end in one newline each, as long as they are complete and followed by
    another one (FASTA): nearly all short reads, in a tenth of the time. The rest is for `_follow`.

    Starts at event `index`, in the first line of a record. `counts` are those of rows, headers, segments and
    qualities; returns the index of the event after the last record.
    """
    n_rows, n_headers, n_segments, n_qualities = counts[0], counts[1], counts[2], counts[3]
    position = events[index - 1] + 1 if index > 0 else 0
    while True:
        first = _end_of_line(buffer, events, index, num_events)
        if first + 1 >= num_events:
            break
        start, end = np.int64(events[first]) + 1, np.int64(events[first + 1])
        bases, initial = end - start, buffer[start]
        if bases == 0 or buffer[end] != _NEWLINE or initial == _GREATER or initial == _SEMICOLON:
            break
        if end + 1 >= count:
            break
        gap = 0
        if not fastq:
            if buffer[end + 1] != _GREATER:
                break
            index = first + 2
        else:
            if initial == _AT or initial == _PLUS_SIGN or buffer[end + 1] != _PLUS_SIGN:
                break
            plus = _end_of_line(buffer, events, first + 2, num_events)
            if plus + 1 >= num_events:
                break
            quality, after = np.int64(events[plus]) + 1, np.int64(events[plus + 1])
            if after - quality != bases or buffer[after] != _NEWLINE:
                break
            if after + 1 < count and buffer[after + 1] != _AT:
                break
            gap = quality - end
            qualities[n_qualities, 0] = quality
            qualities[n_qualities, 1] = after
            n_qualities += 1
            index = plus + 2
        rows[n_rows, START] = at + position
        rows[n_rows, HEAD] = start - position
        rows[n_rows, BASES] = bases
        rows[n_rows, LINE] = 0
        rows[n_rows, EOL] = 1
        rows[n_rows, GAP] = gap
        n_rows += 1
        headers[n_headers, 0] = position + 1
        headers[n_headers, 1] = start - 1
        n_headers += 1
        segments[n_segments, 0] = start
        segments[n_segments, 1] = end
        n_segments += 1
        position = np.int64(events[index - 1]) + 1
        if position >= count:
            break
    counts[0], counts[1], counts[2], counts[3] = n_rows, n_headers, n_segments, n_qualities
    return index


@kernel
def _follow(
    buffer: Bytes,
    count: int,
    at: int,
    events: NDArray[np.int32],
    num_events: int,
    fastq: bool,
    final: bool,
    state: Numbers,
    rows: Numbers,
    headers: Numbers,
    segments: Numbers,
    qualities: Numbers,
    counts: Numbers,
) -> None:
    """Walk the events of one buffer through the grammar of FASTA or FASTQ."""
    n_rows = n_headers = n_segments = n_qualities = 0
    segment = 0  # start of the current run of bases or qualities, in this buffer
    position = 0
    index = 0
    marker = _AT if fastq else _GREATER
    consumed = count
    while state[_ERROR] == 0:
        # --- what kind of line is this?
        if state[_KIND] == _UNKNOWN:
            if position >= count:
                break
            first = buffer[position]
            phase = state[_PHASE]
            if first == marker and (phase == _OUTSIDE or (not fastq and phase == _SEQUENCE)):
                if phase == _SEQUENCE:  # the previous record ends here
                    n_rows = _emit(rows, n_rows, state)
                counts[0], counts[1], counts[2], counts[3] = n_rows, n_headers, n_segments, n_qualities
                index = _follow_regular(
                    buffer, count, at, events, index, num_events, fastq, rows, headers, segments, qualities, counts
                )
                if counts[0] > n_rows:
                    state[_R_NUMBER] += counts[0] - n_rows
                    n_rows, n_headers, n_segments, n_qualities = counts[0], counts[1], counts[2], counts[3]
                    position = np.int64(events[index - 1]) + 1
                    continue
            line_start = at + position
            state[_LINE_START] = line_start
            state[_LENGTH] = 0
            state[_RAGGED] = 0
            if phase == _QUALITY:
                state[_KIND] = _QUALITY_LINE
            elif first == marker and (not fastq or phase == _OUTSIDE):
                state[_KIND] = _HEADER
            elif fastq and phase == _SEQUENCE and first == _PLUS_SIGN:
                state[_KIND] = _PLUS_LINE
            elif not fastq and first == _SEMICOLON:
                state[_KIND] = _COMMENT
            else:
                if first > 32:
                    if phase == _OUTSIDE:
                        state[_ERROR] = 2 if fastq else 5
                        state[_ERROR_AT] = line_start
                        break
                    if fastq and (first == _AT or first == _GREATER):
                        state[_ERROR] = 3
                        state[_ERROR_AT] = line_start
                        break
                state[_KIND] = _TEXT
            segment = position
        # --- the next event
        if index < num_events:
            position = events[index]
            index += 1
            byte = buffer[position]
            ends = byte == _NEWLINE
        else:
            position = count
            byte = _NEWLINE
            ends = False
        kind = state[_KIND]
        if kind == _TEXT and position > segment:
            segments[n_segments, 0] = segment
            segments[n_segments, 1] = position
            n_segments += 1
            state[_LENGTH] += position - segment
            if state[_RAGGED]:
                state[_RAGGED] = 2
        elif kind == _QUALITY_LINE and position > segment:
            qualities[n_qualities, 0] = segment
            qualities[n_qualities, 1] = position
            n_qualities += 1
            state[_LENGTH] += position - segment
            if state[_RAGGED]:  # a carriage return in the middle of a line
                state[_ERROR] = 1
                state[_ERROR_AT] = state[_LAST_CR]
                break
        if position == count and not ends:
            if kind == _HEADER and not final:  # wait for the rest of it
                consumed = state[_LINE_START] - at
                state[_KIND] = _UNKNOWN
                break
            if not final:
                break
            ends = True  # no final newline: as if there were one
            eol = 0
        elif ends:
            eol = 2 if state[_LAST_CR] == at + position - 1 and state[_LAST_CR] >= state[_LINE_START] else 1
        else:
            segment = position + 1
            if byte == _RETURN:
                state[_LAST_CR] = at + position
                state[_RAGGED] += 1  # fine before a newline, ragged before anything else
            elif kind != _QUALITY_LINE and (byte == 32 or byte == 9 or byte == 11 or byte == 12):
                state[_RAGGED] = 2
            elif byte == _CONTROL_A and (kind == _HEADER or kind == _PLUS_LINE):
                pass  # between the merged headers of NCBI's nr
            elif byte < 32 or byte == 127 or kind == _TEXT or kind == _QUALITY_LINE:
                state[_ERROR] = 1
                state[_ERROR_AT] = at + position
                break
            continue
        # --- a line has ended
        position_after = position + 1 if eol else position
        line_end = at + position_after
        length = state[_LENGTH]
        if kind == _HEADER:
            if eol == 0:
                eol_bytes = 1 if state[_LAST_CR] == line_end - 1 and state[_LAST_CR] >= state[_LINE_START] else 0
                text_end = position - eol_bytes
            else:
                text_end = position - (eol - 1)
            headers[n_headers, 0] = state[_LINE_START] - at + 1
            headers[n_headers, 1] = text_end
            n_headers += 1
            state[_R_START] = state[_LINE_START]
            state[_R_HEAD] = line_end - state[_LINE_START]
            state[_R_BASES] = 0
            state[_R_LINE] = 0
            state[_R_EOL] = 1
            state[_R_GAP] = 0
            state[_R_QUALITY] = 0
            state[_R_BLANK] = 0
            state[_NUM_LINES] = 0
            state[_PREVIOUS] = 0
            state[_PREVIOUS_EOL] = 0
            state[_R_NUMBER] += 1
            state[_PHASE] = _SEQUENCE
        elif kind == _COMMENT:
            state[_R_BLANK] = 1
        elif kind == _TEXT and state[_PHASE] == _SEQUENCE:
            if length == 0:
                state[_R_BLANK] = 1
            else:
                if state[_R_BLANK] or state[_RAGGED] >= 2:
                    state[_R_LINE] = IRREGULAR
                if state[_NUM_LINES] == 0:
                    if state[_R_LINE] >= 0:
                        state[_R_LINE] = length
                    state[_R_EOL] = eol if eol else 1
                elif (
                    state[_PREVIOUS] != state[_R_LINE]
                    or length > state[_R_LINE]
                    or state[_PREVIOUS_EOL] != state[_R_EOL]
                    or fastq
                ):
                    state[_R_LINE] = IRREGULAR
                state[_NUM_LINES] += 1
                state[_PREVIOUS] = length
                state[_PREVIOUS_EOL] = eol
                state[_R_BASES] += length
        elif kind == _PLUS_LINE:
            state[_R_GAP] = line_end - (state[_R_START] + state[_R_HEAD] + state[_R_BASES])
            state[_PHASE] = _QUALITY
        elif kind == _QUALITY_LINE:
            state[_R_QUALITY] += length
            if final and eol == 0 and state[_R_QUALITY] < state[_R_BASES]:
                break  # cut short by the end of the text
            is_wrong = state[_R_QUALITY] > state[_R_BASES]
            if state[_NUM_LINES] <= 1 and length != state[_R_BASES]:  # the quality alone is wrapped, or is too short
                if state[_R_QUALITY] == length:
                    state[_PREVIOUS] = length
                    is_wrong |= length == 0
                else:  # only the last line may be shorter: no header and sequence pass for qualities
                    ends_here = state[_R_QUALITY] == state[_R_BASES]
                    is_wrong |= length > state[_PREVIOUS] or (length < state[_PREVIOUS] and not ends_here)
                state[_R_LINE] = IRREGULAR
            if is_wrong:
                state[_ERROR] = 4
                state[_ERROR_AT] = state[_LINE_START]
                break
        if state[_PHASE] == _QUALITY and state[_R_QUALITY] == state[_R_BASES]:
            n_rows = _emit(rows, n_rows, state)
        state[_KIND] = _UNKNOWN
        position = position_after
        segment = position
    if final and state[_ERROR] == 0 and not fastq and state[_PHASE] == _SEQUENCE:
        n_rows = _emit(rows, n_rows, state)
    counts[0] = n_rows
    counts[1] = n_headers
    counts[2] = n_segments
    counts[3] = n_qualities
    counts[4] = consumed
