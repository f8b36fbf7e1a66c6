"""Two bits a letter, one stream over all records; letters other than ACGT, and lower case, are runs beside it."""

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from millstream.kernels import HAVE_NUMBA, kernel
from millstream.records import Bytes
from millstream.store.joined import join
from millstream.store.packed import Numbers, Packed
from millstream.store.sections import Sections, SectionsWriter

LETTERS = b"ACTG"  # a letter's code is (letter >> 1) & 3, so eight of them are coded in a few operations
SECTION = "2bit"
_RUNS = {"other": ("start", "length", "letter"), "lower": ("start", "length")}
_WORD = 8  # letters
_TABLE = np.array([[LETTERS[byte >> 2 * i & 3] for i in range(4)] for byte in range(256)], np.uint8)

# The state between two buffers; a start below 0: no run is open.
_AT, _OTHER, _LETTER, _LOWER = range(4)


class TwoBitWriter:
    """Appends runs of letters to the stream."""

    def __init__(self, sections: SectionsWriter) -> None:
        self._stream = sections.part(SECTION)
        self._columns = {kind: [sections.column(f"{kind}.{name}") for name in names] for kind, names in _RUNS.items()}
        self._left = np.empty(0, np.uint8)  # letters that do not fill a word yet
        self._state = np.array([0, -1, 0, -1], np.int64)

    def add(self, buffer: Bytes, segments: Numbers) -> None:
        """Append the letters buffer[start:end] of every segment."""
        letters = join(buffer, segments, before=self._left)
        count = len(letters) - len(letters) % _WORD
        self._left = letters[count:].copy()
        self._encode(letters[:count])

    def finish(self) -> None:
        """Fill up the last word, end the open runs. One more word lets readers look one word ahead."""
        if len(self._left):
            self._encode(np.append(self._left, np.full(_WORD - len(self._left), LETTERS[0], np.uint8)))
        self._encode(np.full(_WORD, LETTERS[0], np.uint8))  # closes what is open
        self._stream.write(bytes(-self._stream.tell() % 8))

    def state(self) -> dict[str, object]:
        return {"left": self._left, "state": self._state.copy()}

    def restore(self, state: dict[str, Any]) -> None:
        self._left, self._state = state["left"], state["state"].copy()

    def _encode(self, letters: Bytes) -> None:
        if not len(letters):
            return
        out = np.empty(len(letters) // _WORD, np.uint16)
        if HAVE_NUMBA:
            # As many runs as letters can end here, and one that was open before.
            others, lowers = np.empty((len(letters) + 1, 3), np.int64), np.empty((len(letters) + 1, 2), np.int64)
            counts = np.zeros(2, np.int64)
            _encode(letters.view(np.uint64), out, self._state, others, lowers, counts)
            others, lowers = others[: counts[0]], lowers[: counts[1]]
        else:
            others, lowers = _encode_slowly(letters, out, self._state)
        self._stream.write(out.tobytes())
        for kind, runs in (("other", others), ("lower", lowers)):
            if len(runs):
                for column, values in zip(self._columns[kind], runs.T, strict=True):
                    column.append(np.ascontiguousarray(values))


class TwoBit:
    """The letters of a published file by their place in the stream."""

    def __init__(self, sections: Sections) -> None:
        self._stream = sections.view(SECTION)
        self._runs: dict[str, list[Packed]] = {
            kind: [sections.column(f"{kind}.{name}").whole() for name in names] for kind, names in _RUNS.items()
        }

    def letters(self, starts: Numbers, offsets: Numbers) -> Bytes:
        """`offsets[i+1] - offsets[i]` letters from place `starts[i]` on, for every i, one after the other."""
        out = np.empty(int(offsets[-1]), np.uint8)
        if HAVE_NUMBA:
            _decode(self._stream, _TABLE, starts, offsets, out)
        else:
            places = np.repeat(starts - offsets[:-1], np.diff(offsets)) + np.arange(len(out))
            out[:] = _TABLE[self._stream[places >> 2], places & 3]
        for kind in _RUNS:
            self._apply(kind, starts, offsets, out)
        return out

    def _apply(self, kind: str, starts: Numbers, offsets: Numbers, out: Bytes) -> None:
        run_starts, run_lengths, *run_letters = self._runs[kind]
        if not run_starts.rows:
            return
        ends = starts + np.diff(offsets)
        # Runs are apart and ascending: if the last one before a read's end stops short of the read, all do.
        last = run_starts.find(ends - 1)
        before = np.maximum(last, 0)
        (hit,) = np.nonzero(
            (last >= 0) & (run_starts.take(before) + run_lengths.take(before) > starts) & (ends > starts)
        )
        if not len(hit):
            return
        first = np.maximum(run_starts.find(starts[hit]), 0)
        counts = last[hit] - first + 1
        read = np.repeat(hit, counts)
        run = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(len(read))
        begins = np.maximum(run_starts.take(run), starts[read])
        stops = np.minimum(run_starts.take(run) + run_lengths.take(run), ends[read])
        targets = begins - starts[read] + offsets[read]
        if run_letters:
            _fill(out, targets, stops - begins, run_letters[0].take(run))
        else:
            _lower(out, targets, stops - begins)


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
    """Eight letters a word. A word of ACGT is noticed by making its letters again from their codes."""
    num_others = num_lowers = 0
    at = state[_AT]
    other, other_letter, lower = state[_OTHER], state[_LETTER], state[_LOWER]
    for index in range(len(words)):
        word = words[index]
        codes = (word >> np.uint64(1)) & _CODES
        is_t = (codes >> np.uint64(1)) & ~codes & _ONES  # 2: its letter is 15 above the row A, C, E, G
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
            letter = np.int64((word >> np.uint64(8 * shift)) & np.uint64(255))
            if 97 <= letter <= 122:
                letter -= 32
                if lower < 0:
                    lower = at
            elif lower >= 0:
                lowers[num_lowers, 0] = lower
                lowers[num_lowers, 1] = at - lower
                num_lowers += 1
                lower = -1
            if letter == 65 or letter == 67 or letter == 71 or letter == 84:
                letter = 0
            if other >= 0 and letter != other_letter:
                others[num_others, 0] = other
                others[num_others, 1] = at - other
                others[num_others, 2] = other_letter
                num_others += 1
                other = -1
            if letter > 0 and other < 0:
                other = at
                other_letter = letter
            at += 1
    state[_AT], state[_OTHER], state[_LETTER], state[_LOWER] = at, other, other_letter, lower
    counts[0], counts[1] = num_others, num_lowers


def _encode_slowly(letters: Bytes, out: NDArray[np.uint16], state: Numbers) -> tuple[Numbers, Numbers]:
    codes = (letters >> 1 & 3).astype(np.uint16).reshape(-1, _WORD)
    out[:] = (codes << (2 * np.arange(_WORD)).astype(np.uint16)).sum(axis=1, dtype=np.uint16)
    lower = (letters >= 97) & (letters <= 122)
    upper = np.where(lower, letters & 0xDF, letters).astype(np.int64)
    others = np.where(np.isin(upper, np.frombuffer(LETTERS, np.uint8)), 0, upper)
    at = int(state[_AT])
    state[_AT] += len(letters)
    other_runs, state[_OTHER], state[_LETTER] = _runs_of(others, at, int(state[_OTHER]), int(state[_LETTER]))
    lower_runs, state[_LOWER], _ = _runs_of(lower.astype(np.int64), at, int(state[_LOWER]), 1)
    return other_runs, lower_runs[:, :2]


def _runs_of(values: Numbers, at: int, start: int, value: int) -> tuple[Numbers, int, int]:
    """Runs of the same value that is not 0 and have ended, as (start, length, value); and the one that has not."""
    edges = np.flatnonzero(np.diff(values, prepend=-1))
    runs = np.stack([edges + at, np.append(edges[1:], len(values)) + at, values[edges]], axis=1)
    if start >= 0 and runs[0, 2] == value:
        runs[0, 0] = start
    elif start >= 0:
        runs = np.concatenate([[[start, at, value]], runs])
    runs = runs[runs[:, 2] > 0]
    last = -1
    if len(runs) and runs[-1, 1] == at + len(values) and values[-1]:
        last, value = int(runs[-1, 0]), int(runs[-1, 2])
        runs = runs[:-1]
    runs[:, 1] -= runs[:, 0]
    return cast(Numbers, runs), last, value


@kernel
def _decode(stream: Bytes, table: NDArray[np.uint8], starts: Numbers, offsets: Numbers, out: Bytes) -> None:
    for index in range(len(starts)):
        place = starts[index]
        target = offsets[index]
        end = offsets[index + 1]
        while target < end and place & 3:
            out[target] = table[stream[place >> 2], place & 3]
            place += 1
            target += 1
        byte = place >> 2
        while target + 4 <= end:
            four = stream[byte]
            out[target] = table[four, 0]
            out[target + 1] = table[four, 1]
            out[target + 2] = table[four, 2]
            out[target + 3] = table[four, 3]
            byte += 1
            target += 4
        for rest in range(end - target):
            out[target + rest] = table[stream[byte], rest]


@kernel
def _fill(out: Bytes, starts: Numbers, counts: Numbers, letters: Numbers) -> None:
    for index in range(len(starts)):
        for place in range(starts[index], starts[index] + counts[index]):
            out[place] = letters[index]


@kernel
def _lower(out: Bytes, starts: Numbers, counts: Numbers) -> None:
    for index in range(len(starts)):
        for place in range(starts[index], starts[index] + counts[index]):
            out[place] |= 32
