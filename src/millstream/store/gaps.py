"""What lies between headers, letters and qualities in a text: line ends as arithmetic has them, the rest kept as it is.

A *place* is the number of letters and headers before it, so between any two of them there is one place, and a *gap* is
the text there. Lines of `line` letters and line ends of `eol` bytes foretell nearly every gap; those that are otherwise
(blank lines, comments, ragged lines, a missing last newline) are *inserts*: a place and its bytes.
"""

from typing import Any, Final, NamedTuple

import numpy as np

from millstream.kernels import kernel
from millstream.records import Bytes
from millstream.store.packed import Numbers
from millstream.store.sections import SectionsWriter

RECORD = ("line", "eol", "plus")  # letters a line (0: no limit), bytes of a line end, whether '+' repeats the header
INSERT = ("insert.place", "insert.length")
INSERT_BYTES = "insert.bytes"

# The state between two buffers.
_PLACE, _PHASE, _LETTERS, _COLUMN, _LINE, _EOL, _PLUS, _FIRST, _GAP, _SPILLED, _NEWLINES, _NAME = range(12)
_STATE = 12
_OUTSIDE, _SEQUENCE, _QUALITY, _SKIPPED = range(4)  # phases
HEADER: Final = 0  # kinds of piece
LETTERS: Final = 1
QUALITIES: Final = 2
_END = 3
_EMPTY, _LINE_END, _MIDDLE, _NO_LETTERS = range(4)  # what a gap can be foretold as


class Pieces(NamedTuple):
    """What was found in a part of a buffer; each [n, 2] start and end, headers without '>' or '@'."""

    headers: Numbers
    kept: Numbers  # [n] 0 for a record that is left out
    segments: Numbers
    qualities: Numbers


class GapsWriter:
    """Follows a text and writes how its records are laid out."""

    def __init__(self, sections: SectionsWriter, *, fastq: bool) -> None:
        self._fastq = fastq
        self._records = [sections.column(name) for name in RECORD]
        self._inserts = [sections.column(name) for name in INSERT]
        self._bytes = sections.part(INSERT_BYTES)
        self._state = np.zeros(_STATE, np.int64)
        self._state[_EOL] = 1
        self._gap = self._name = np.empty(0, np.uint8)

    def add(self, buffer: Bytes, begin: int, end: int, pieces: Pieces) -> None:
        """Follow buffer[begin:end], which comes right after what was followed before."""
        if len(self._gap) < len(buffer) + 16:  # no gap is foretold that is longer than the longest header
            self._gap = _grown(self._gap, len(buffer) + 16)
            self._name = _grown(self._name, len(buffer))
        self._follow(buffer, begin, end, pieces, final=False)

    def finish(self) -> None:
        """The text has ended."""
        none = np.empty((0, 2), np.int64)
        pieces = Pieces(none, np.empty(0, np.int64), none, none)
        self._follow(np.empty(0, np.uint8), 0, 0, pieces, final=True)

    def state(self) -> dict[str, object]:
        held = 0 if self._state[_SPILLED] else int(self._state[_GAP])
        name = self._name[: self._state[_NAME]].copy()
        return {"state": self._state.copy(), "gap": self._gap[:held].copy(), "name": name}

    def restore(self, state: dict[str, Any]) -> None:
        self._state = state["state"].copy()
        self._gap = _grown(state["gap"], max(len(self._gap), len(state["gap"])))
        self._name = _grown(state["name"], max(len(self._name), len(state["name"])))

    def _follow(self, buffer: Bytes, begin: int, end: int, pieces: Pieces, *, final: bool) -> None:
        rows = np.empty((len(pieces.headers) + 1, 3), np.int64)
        num_pieces = len(pieces.headers) + len(pieces.segments) + len(pieces.qualities)
        inserts = np.empty((2 * num_pieces + 2, 2), np.int64)
        odd = np.empty(end - begin + len(self._gap), np.uint8)
        want = np.empty(len(self._name) + 16, np.uint8)
        counts = np.zeros(3, np.int64)
        _follow(
            buffer, begin, end, *pieces, self._fastq, final, self._state,
            self._gap, self._name, want, rows, inserts, odd, counts,
        )  # fmt: skip
        _append(self._records, rows[: counts[0]])
        _append(self._inserts, inserts[: counts[1]])
        self._bytes.write(odd[: counts[2]].tobytes())


class Weaver:
    """Puts headers, letters and qualities back into the text they came from."""

    def __init__(self, *, fastq: bool) -> None:
        self._fastq = fastq
        self._state = np.zeros(_STATE, np.int64)
        self._name = np.empty(0, np.uint8)

    @property
    def place(self) -> int:
        return int(self._state[_PLACE])

    def weave(
        self, pieces: Numbers, records: Numbers, flats: tuple[Bytes, Bytes, Bytes], inserts: Numbers, odd: Bytes
    ) -> Bytes:
        """The text of these pieces.

        `pieces` [n, 3]: kind, start and end in flats[kind]; the last letters of a record end its gap too. `records`
        [h, 4], one for every header among them: letters, line, eol, plus. `inserts` [m, 2]: place, length in `odd`.
        """
        longest = int((pieces[:, 2] - pieces[:, 1])[pieces[:, 0] == HEADER].max(initial=0))
        if len(self._name) < longest:
            self._name = _grown(self._name, longest)
        # A line is at least as long as `line`, unless an insert ends it.
        lines = np.append(records[:, 1], self._state[_LINE])
        num_letters = len(flats[LETTERS]) + len(flats[QUALITIES])
        breaks = 2 * (num_letters // int(lines[lines > 0].min()) + len(pieces)) if lines.any() else 0
        headers = 2 * len(flats[HEADER]) + len(self._name) + 16 * (len(pieces) + 1)
        out = np.empty(headers + num_letters + breaks + len(odd), np.uint8)
        want = np.empty(len(self._name) + 16, np.uint8)
        count = _weave(pieces, records, *flats, inserts, odd, self._fastq, self._state, self._name, want, out)
        return out[:count]


def _append(columns: list[Any], rows: Numbers) -> None:
    if len(rows):
        for column, values in zip(columns, rows.T, strict=True):
            column.append(np.ascontiguousarray(values))


def _grown(array: Bytes, size: int) -> Bytes:
    grown = np.empty(size, np.uint8)
    grown[: len(array)] = array
    return grown


@kernel
def _foretell(kind: int, state: Numbers, plus: int, name: Bytes, want: Bytes) -> int:
    """Write the gap that is expected; its length."""
    ends_before = 2 if kind == _NO_LETTERS else 1 if kind != _EMPTY else 0
    ends_after = 2 if kind == _NO_LETTERS else 1 if kind == _MIDDLE else 0
    count = 0
    for _ in range(ends_before):
        if state[_EOL] == 2:
            want[count] = 13
            count += 1
        want[count] = 10
        count += 1
    if ends_after:
        want[count] = 43
        count += 1
        if plus:
            for index in range(state[_NAME]):
                want[count] = name[index]
                count += 1
    for _ in range(ends_after):
        if state[_EOL] == 2:
            want[count] = 13
            count += 1
        want[count] = 10
        count += 1
    return count


@kernel
def _is_foretold(kind: int, state: Numbers, plus: int, name: Bytes, gap: Bytes, want: Bytes) -> bool:
    if state[_SPILLED] or _foretell(kind, state, plus, name, want) != state[_GAP]:
        return False
    for index in range(state[_GAP]):  # noqa: SIM110 (numba knows no all())
        if gap[index] != want[index]:
            return False
    return True


@kernel
def _hold(buffer: Bytes, position: int, count: int, state: Numbers, gap: Bytes, odd: Bytes, num_odd: int) -> int:
    """Keep a piece of a gap until the gap ends; one that is too long to be foretold goes to `odd` at once."""
    if not state[_SPILLED] and state[_GAP] + count > len(gap):
        for index in range(state[_GAP]):
            odd[num_odd + index] = gap[index]
        num_odd += state[_GAP]
        state[_SPILLED] = 1
    for index in range(count):
        byte = buffer[position + index]
        if byte == 10:
            state[_NEWLINES] = 1
        if state[_SPILLED]:
            odd[num_odd + index] = byte
        else:
            gap[state[_GAP] + index] = byte
    state[_GAP] += count
    return num_odd + count if state[_SPILLED] else num_odd


@kernel
def _settle(state: Numbers) -> None:
    """The sequence has ended; if it was one line, lines stay as they were unless it is too long for one."""
    if state[_FIRST] and state[_LETTERS] > state[_LINE]:
        state[_LINE] = 0
    state[_FIRST] = 0


@kernel
def _follow(
    buffer: Bytes,
    begin: int,
    end: int,
    headers: Numbers,
    kept: Numbers,
    segments: Numbers,
    qualities: Numbers,
    fastq: bool,
    final: bool,
    state: Numbers,
    gap: Bytes,
    name: Bytes,
    want: Bytes,
    rows: Numbers,
    inserts: Numbers,
    odd: Bytes,
    counts: Numbers,
) -> None:
    """Walk through the pieces in order; compare every gap between them with what is foretold."""
    num_rows = num_inserts = num_odd = 0
    header = segment = quality = 0
    position = begin
    while True:
        # --- the next piece
        kind = _END
        start = end
        stop = end
        if header < len(headers):
            kind = HEADER
            start = headers[header, 0] - 1
            stop = headers[header, 1]
        if segment < len(segments) and segments[segment, 0] < start:
            kind = LETTERS
            start = segments[segment, 0]
            stop = segments[segment, 1]
        if quality < len(qualities) and qualities[quality, 0] < start:
            kind = QUALITIES
            start = qualities[quality, 0]
            stop = qualities[quality, 1]
        # --- the gap before it
        phase = state[_PHASE]
        count = start - position
        # Nearly always it is one line end, and that is what is foretold.
        is_line_end = count == state[_EOL] and state[_GAP] == 0 and buffer[start - 1] == 10 and count > 0
        if is_line_end and count == 2:
            is_line_end = buffer[position] == 13
        if is_line_end and phase != _SKIPPED:
            state[_NEWLINES] = 1
        elif phase != _SKIPPED:
            num_odd = _hold(buffer, position, count, state, gap, odd, num_odd)
        if kind == _END and not final:
            if is_line_end and phase != _SKIPPED:
                num_odd = _hold(buffer, position, count, state, gap, odd, num_odd)
            break
        if phase != _SKIPPED:
            foretold = _EMPTY
            ends = kind == HEADER or kind == _END
            if phase == _OUTSIDE:
                foretold = _EMPTY
            elif ends:
                _settle(state)
                foretold = _NO_LETTERS if fastq and state[_LETTERS] == 0 else _LINE_END
            elif kind == QUALITIES and phase == _SEQUENCE:
                _settle(state)
                foretold = _MIDDLE
            elif state[_LETTERS] == 0:
                foretold = _LINE_END
            else:
                if state[_NEWLINES] and state[_FIRST]:
                    state[_LINE] = state[_COLUMN]
                    state[_FIRST] = 0
                if not state[_FIRST] and state[_LINE] > 0 and state[_COLUMN] == state[_LINE]:
                    foretold = _LINE_END
            as_foretold = is_line_end and foretold == _LINE_END
            if not as_foretold:
                if is_line_end:
                    num_odd = _hold(buffer, position, count, state, gap, odd, num_odd)
                as_foretold = _is_foretold(foretold, state, 0, name, gap, want)
                if not as_foretold and foretold >= _MIDDLE:
                    as_foretold = _is_foretold(foretold, state, 1, name, gap, want)
                    state[_PLUS] = 1 if as_foretold else 0
            if not as_foretold:
                inserts[num_inserts, 0] = state[_PLACE]
                inserts[num_inserts, 1] = state[_GAP]
                num_inserts += 1
                if not state[_SPILLED]:
                    for index in range(state[_GAP]):
                        odd[num_odd + index] = gap[index]
                    num_odd += state[_GAP]
            if state[_NEWLINES]:
                state[_COLUMN] = 0
            if ends and phase != _OUTSIDE:
                rows[num_rows, 0] = state[_LINE]
                rows[num_rows, 1] = state[_EOL]
                rows[num_rows, 2] = state[_PLUS]
                num_rows += 1
            state[_GAP] = 0
            state[_SPILLED] = 0
            state[_NEWLINES] = 0
        if kind == _END:
            break
        # --- the piece itself
        position = stop
        count = stop - start
        if kind == HEADER:
            state[_PHASE] = _SEQUENCE if kept[header] else _SKIPPED
            header += 1
            if state[_PHASE] == _SKIPPED:
                continue
            state[_PLACE] += 1
            state[_LETTERS] = 0
            state[_COLUMN] = 0
            state[_FIRST] = 1
            state[_PLUS] = 0
            if stop + 1 < end and buffer[stop] == 13 and buffer[stop + 1] == 10:
                state[_EOL] = 2
            elif stop < end and buffer[stop] == 10:
                state[_EOL] = 1
            if fastq:
                state[_NAME] = count - 1
                for index in range(count - 1):
                    name[index] = buffer[start + 1 + index]
            continue
        if kind == LETTERS:
            segment += 1
        else:
            quality += 1
        if phase == _SKIPPED:
            continue
        if kind == QUALITIES and phase == _SEQUENCE:
            state[_PHASE] = _QUALITY
            state[_COLUMN] = 0
        if not state[_FIRST] and state[_COLUMN] < state[_LINE] < state[_COLUMN] + count:  # a line that is too long
            inserts[num_inserts, 0] = state[_PLACE] + state[_LINE] - state[_COLUMN]
            inserts[num_inserts, 1] = 0
            num_inserts += 1
        if kind == LETTERS:
            state[_LETTERS] += count
        state[_COLUMN] += count
        state[_PLACE] += count
    counts[0], counts[1], counts[2] = num_rows, num_inserts, num_odd


@kernel
def _weave(
    pieces: Numbers,
    records: Numbers,
    header_text: Bytes,
    letters: Bytes,
    qualities: Bytes,
    inserts: Numbers,
    odd: Bytes,
    fastq: bool,
    state: Numbers,
    name: Bytes,
    want: Bytes,
    out: Bytes,
) -> int:
    """The way back: put the gaps between the pieces. `_GAP` counts letters since the sequence or quality began."""
    at = num_odd = insert = record = 0
    if state[_PLACE] == 0 and len(inserts) > 0 and inserts[0, 0] == 0:
        out[: inserts[0, 1]] = odd[: inserts[0, 1]]
        at = num_odd = inserts[0, 1]
        insert = 1
    for index in range(len(pieces)):
        kind = pieces[index, 0]
        start = pieces[index, 1]
        end = pieces[index, 2]
        if kind == HEADER:
            count = end - start
            out[at] = 64 if fastq else 62
            source, target = header_text[start:end], out[at + 1 : at + 1 + count]
            for place in range(count):  # faster than assigning one slice to the other
                target[place] = source[place]
                name[place] = source[place]
            at += 1 + count
            state[_NAME] = count
            state[_LETTERS] = records[record, 0]
            state[_LINE] = records[record, 1]
            state[_EOL] = records[record, 2]
            state[_PLUS] = records[record, 3]
            record += 1
            state[_PLACE] += 1
            state[_COLUMN] = 0
            state[_GAP] = 0
            start = end  # only the gap is left
        source = qualities if kind == QUALITIES else letters
        while True:
            run = end - start
            if run > 0:
                if state[_COLUMN] < state[_LINE]:
                    run = min(run, state[_LINE] - state[_COLUMN])
                if insert < len(inserts):
                    run = min(run, inserts[insert, 0] - state[_PLACE])
                origin, target = source[start : start + run], out[at : at + run]
                for place in range(run):
                    target[place] = origin[place]
                at += run
                start += run
                state[_PLACE] += run
                state[_COLUMN] += run
                state[_GAP] += run
            foretold = _EMPTY
            if kind == HEADER:
                foretold = _NO_LETTERS if fastq and state[_LETTERS] == 0 else _LINE_END
            elif state[_GAP] == state[_LETTERS]:
                foretold = _MIDDLE if fastq and kind == LETTERS else _LINE_END
                state[_GAP] = 0
                state[_COLUMN] = 0
            elif state[_LINE] > 0 and state[_COLUMN] == state[_LINE]:
                foretold = _LINE_END
            if insert < len(inserts) and inserts[insert, 0] == state[_PLACE]:
                for _ in range(inserts[insert, 1]):
                    if odd[num_odd] == 10:
                        state[_COLUMN] = 0
                    out[at] = odd[num_odd]
                    at += 1
                    num_odd += 1
                insert += 1
            elif foretold != _EMPTY:
                count = _foretell(foretold, state, state[_PLUS], name, want)
                for place in range(count):
                    out[at + place] = want[place]
                at += count
                state[_COLUMN] = 0
            if start == end:
                break
    return at
