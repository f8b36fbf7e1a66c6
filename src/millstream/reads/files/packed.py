"""Columns of integers in as few bits as they need, any row readable alone.

Every 4096 values are stored as their minimum and `width`-bit differences to it, so a constant column takes no space and
lengths of short reads take six bits. A column is two arrays: `directory` int64 [chunks, 2] holding the minimum and
`first word << 8 | width`, and `words` uint64.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from millstream.kernels import HAVE_NUMBA, kernel

Numbers = NDArray[np.int64]
Words = NDArray[np.uint64]
CHUNK = 4096
ANCHOR = 32  # one absolute value for so many rows of a column that is summed


class PackedWriter:
    """Appends values to two growing files. As long as all values are the same it only counts them."""

    def __init__(self, directory: BinaryIO, words: BinaryIO) -> None:
        self._files = directory, words
        self._pending: list[Numbers] = []
        self._num_pending = 0
        self._constant: int | None = None
        self._num_constant = 0
        self._finished = False
        self.num_words = 0
        self.rows = 0

    def append(self, values: Numbers) -> None:
        if not len(values):
            return
        if self.rows == 0:
            self._constant = int(values[0])
        self.rows += len(values)
        if self._constant is not None:
            if values.min() == self._constant == values.max():
                self._num_constant += len(values)
                return
            self._write_constant()
        self._pending.append(values.copy())  # callers reuse their buffers
        self._num_pending += len(values)
        if self._num_pending >= 4 * CHUNK:
            self._flush(self._num_pending - self._num_pending % CHUNK)

    def append_many(self, value: int, count: int) -> None:
        """`count` times the same value, at the start of the column."""
        assert self.rows == 0
        self._constant, self._num_constant, self.rows = value, count, count

    def finish(self) -> None:
        """Write what is left, once. One more word lets readers look one word ahead."""
        if not self._finished:
            self._finished = True
            self._write_constant()
            self._flush(self._num_pending)
            self._files[1].write(bytes(8))

    def _write_constant(self) -> None:
        if self._constant is None:
            return
        chunks, rest = divmod(self._num_constant, CHUNK)
        entry = np.array([[self._constant, self.num_words << 8]], np.int64)
        for start in range(0, chunks, CHUNK):
            self._files[0].write(np.repeat(entry, min(CHUNK, chunks - start), axis=0).tobytes())
        self._pending.append(np.full(rest, self._constant, np.int64))
        self._num_pending += rest
        self._constant = None

    def state(self) -> dict[str, object]:
        """What is not in the files."""
        pending = np.concatenate(self._pending) if self._num_pending else np.empty(0, np.int64)
        constant = None if self._constant is None else [self._constant, self._num_constant]
        return {"rows": self.rows, "num_words": self.num_words, "pending": pending, "constant": constant}

    def restore(self, state: Mapping[str, object]) -> None:
        """Go on as if nothing had been appended since; the files have been cut to what they were."""
        pending = cast(Numbers, state["pending"])
        self.rows, self.num_words = cast(int, state["rows"]), cast(int, state["num_words"])
        self._pending, self._num_pending = [pending], len(pending)
        constant = cast("list[int] | None", state["constant"])
        self._constant, self._num_constant = constant or (None, 0)

    def _flush(self, count: int) -> None:
        if not count:
            return
        values = np.concatenate(self._pending) if len(self._pending) > 1 else self._pending[0]
        self._pending = [values[count:]]
        self._num_pending -= count
        directory, words = pack(values[:count], first_word=self.num_words)
        self.num_words += len(words)
        self._files[0].write(directory.tobytes())
        self._files[1].write(words.tobytes())


@dataclass(frozen=True)
class Packed:
    """A column that can be read."""

    rows: int
    directory: Numbers
    words: Words

    def take(self, rows: Numbers) -> Numbers:
        """The values of these rows."""
        out = np.empty(len(rows), np.int64)
        if HAVE_NUMBA:
            _take(self.directory, self.words, rows, out)
            return out
        return _take_slowly(self.directory, self.words, rows)

    def find(self, values: Numbers) -> Numbers:
        """The last row, of a column in ascending order, that is not above each value."""
        if not HAVE_NUMBA:
            return np.searchsorted(self.take(np.arange(self.rows)), values, side="right") - 1
        out = np.empty(len(values), np.int64)
        _find(self.directory, self.words, self.rows, values, out)
        return out


def pack(values: Numbers, *, first_word: int = 0) -> tuple[Numbers, Words]:
    """Values as directory and words; `first_word` is where the words will lie."""
    num_chunks = -(-len(values) // CHUNK)
    directory = np.empty((num_chunks, 2), np.int64)
    words = np.zeros(len(values) + num_chunks, np.uint64)
    if HAVE_NUMBA:
        used = _pack(values, directory, words, first_word)
    else:
        used = _pack_slowly(values, directory, words, first_word)
    return directory, words[:used]


def sums_before(anchors: Packed, column: Packed, rows: Numbers) -> Numbers:
    """The sum of all values before each row: an anchor every 32 rows, and the values since it."""
    out = np.empty(len(rows), np.int64)
    if HAVE_NUMBA:
        _sums_before(anchors.directory, anchors.words, column.directory, column.words, rows, out)
        return out
    out[:] = anchors.take(rows // ANCHOR)
    first = rows - rows % ANCHOR
    for step in range(ANCHOR - 1):
        (later,) = np.nonzero(first + step < rows)
        out[later] += column.take(first[later] + step)
    return out


@kernel
def _get(directory: Numbers, words: Words, row: int) -> int:
    chunk = row >> 12
    place = directory[chunk, 1]
    width = place & 255
    if width == 0:
        return directory[chunk, 0]
    bit = (row & 4095) * width
    word = (place >> 8) + (bit >> 6)
    shift = bit & 63
    value = words[word] >> np.uint64(shift)
    if shift + width > 64:
        value |= words[word + 1] << np.uint64(64 - shift)
    if width < 64:
        value &= (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    return directory[chunk, 0] + np.int64(value)


@kernel
def _take(directory: Numbers, words: Words, rows: Numbers, out: Numbers) -> None:
    for index in range(len(rows)):
        out[index] = _get(directory, words, rows[index])


@kernel
def _find(directory: Numbers, words: Words, rows: int, values: Numbers, out: Numbers) -> None:
    for index in range(len(values)):
        low = -1
        high = rows
        while high - low > 1:
            middle = (low + high) >> 1
            if _get(directory, words, middle) <= values[index]:
                low = middle
            else:
                high = middle
        out[index] = low


@kernel
def _sums_before(
    anchor_directory: Numbers, anchor_words: Words, directory: Numbers, words: Words, rows: Numbers, out: Numbers
) -> None:
    for index in range(len(rows)):
        row = rows[index]
        place = directory[row >> 12, 1]
        width = place & 255
        count = row & 31
        total = _get(anchor_directory, anchor_words, row >> 5) + directory[row >> 12, 0] * count
        if width > 0:
            mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1) if width < 64 else ~np.uint64(0)
            bit = ((row - count) & 4095) * width
            word = (place >> 8) + (bit >> 6)
            shift = bit & 63
            value = words[word]
            for _ in range(count):
                field = value >> np.uint64(shift)
                shift += width
                if shift >= 64:
                    word += 1
                    value = words[word]
                    shift -= 64
                    if shift > 0:
                        field |= value << np.uint64(width - shift)
                total += np.int64(field & mask)
        out[index] = total


@kernel
def _pack(values: Numbers, directory: Numbers, words: Words, first_word: int) -> int:
    used = 0
    for chunk in range(len(directory)):
        start = chunk * 4096
        end = min(start + 4096, len(values))
        low = high = values[start]
        for row in range(start, end):
            low = min(low, values[row])
            high = max(high, values[row])
        spread = np.uint64(high - low)
        width = 0
        while width < 64 and spread >> np.uint64(width) != np.uint64(0):
            width += 1
        directory[chunk, 0] = low
        directory[chunk, 1] = (first_word + used) << 8 | width
        bit = 0
        for row in range(start, end):
            value = np.uint64(values[row] - low)
            word = used + (bit >> 6)
            shift = bit & 63
            words[word] |= value << np.uint64(shift)
            if shift + width > 64:
                words[word + 1] |= value >> np.uint64(64 - shift)
            bit += width
        used += (bit + 63) >> 6
    return used


def _pack_slowly(values: Numbers, directory: Numbers, words: Words, first_word: int) -> int:
    used = 0
    for chunk in range(len(directory)):
        part = values[chunk * CHUNK : (chunk + 1) * CHUNK]
        low = part.min()
        differences = part.view(np.uint64) - low.view(np.uint64)
        width = int(differences.max()).bit_length()
        directory[chunk] = low, (first_word + used) << 8 | width
        bits = np.unpackbits(differences.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
        packed = np.packbits(bits[:, :width].reshape(-1), bitorder="little")
        count = -(-len(packed) // 8)
        words[used : used + count].view(np.uint8)[: len(packed)] = packed
        used += count
    return used


def _take_slowly(directory: Numbers, words: Words, rows: Numbers) -> Numbers:
    low, place = directory[rows >> 12].T
    width = place & 255
    bit = (rows & 4095) * width
    word = np.minimum((place >> 8) + (bit >> 6), len(words) - 2)  # without a width, a word past the end may be named
    shift = (bit & 63).astype(np.uint64)
    value = words[word] >> shift
    # shifting by 64 is undefined: shift by 63 and once more
    value |= np.where(shift > 0, words[word + 1] << (np.uint64(63) - shift) << np.uint64(1), np.uint64(0))
    mask = np.where(width == 64, ~np.uint64(0), (np.uint64(1) << width.astype(np.uint64)) - np.uint64(1))
    return low + (value & mask).view(np.int64)
