"""How columns are stored small: integers in as few bits as they need, repeated values as codes of a dictionary.

Every 4096 integers are stored as their minimum and `width`-bit differences to it, so a constant column takes no space
and lengths of short reads take six bits. A bit column is two arrays: `directory` int64 [chunks, 2] of minimum and
`first word << 8 | width`, and `words` uint64.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from millstream.core.collection import Numbers
from millstream.core.instructions import prefetch
from millstream.core.kernels import inlined, kernel
from millstream.core.record import Bytes

Words = NDArray[np.uint64]
CHUNK = 4096
ANCHOR = 32  # rows per stored prefix sum
LIMIT = 65536  # distinct values of a column with codes
_AHEAD = 32  # rows that are prefetched
_NEAR = 8  # rows: ascending values are closer, and a search costs more
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_at = np.uint64  # an unsigned index needs no check for being negative


class BitColumnWriter:
    """Appends values to two files. While all values are the same, it only counts them."""

    def __init__(self, directory: BinaryIO, words: BinaryIO) -> None:
        self._files = directory, words
        self._pending = np.empty(4 * CHUNK, np.int64)
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
        while len(values):
            some = values[: len(self._pending) - self._num_pending]
            self._pending[self._num_pending : self._num_pending + len(some)] = some
            self._num_pending += len(some)
            values = values[len(some) :]
            if self._num_pending == len(self._pending):
                self._flush()

    def append_many(self, value: int, count: int) -> None:
        """`count` times the same value, at the start of the column."""
        assert self.rows == 0
        self._constant, self._num_constant, self.rows = value, count, count

    def finish(self) -> None:
        """Write the rest, once. An extra word lets readers look one word ahead."""
        if not self._finished:
            self._finished = True
            self._write_constant()
            self._flush()
            self._files[1].write(bytes(8))

    def _write_constant(self) -> None:
        if self._constant is None:
            return
        chunks, rest = divmod(self._num_constant, CHUNK)
        entry = np.array([[self._constant, self.num_words << 8]], np.int64)
        for start in range(0, chunks, CHUNK):
            self._files[0].write(np.repeat(entry, min(CHUNK, chunks - start), axis=0).tobytes())
        self._pending[:rest] = self._constant
        self._num_pending = rest
        self._constant = None

    def state(self) -> dict[str, object]:
        """What is not in the files yet."""
        pending = self._pending[: self._num_pending].copy()
        constant = None if self._constant is None else [self._constant, self._num_constant]
        return {"rows": self.rows, "num_words": self.num_words, "pending": pending, "constant": constant}

    def restore(self, state: Mapping[str, object]) -> None:
        """Return to a state; the caller has truncated the files."""
        pending = cast(Numbers, state["pending"])
        self.rows, self.num_words = cast(int, state["rows"]), cast(int, state["num_words"])
        self._num_pending = len(pending)
        self._pending[: len(pending)] = pending
        constant = cast("list[int] | None", state["constant"])
        self._constant, self._num_constant = constant or (None, 0)

    def _flush(self) -> None:
        if not self._num_pending:
            return
        directory, words = encode(self._pending[: self._num_pending], first_word=self.num_words)
        self._num_pending = 0
        self.num_words += len(words)
        self._files[0].write(directory.tobytes())
        self._files[1].write(words.tobytes())


@dataclass(frozen=True)
class BitColumn:
    """A column, for reading."""

    rows: int
    directory: Numbers
    words: Words

    def take(self, rows: Numbers) -> Numbers:
        """The values of these rows."""
        out = np.empty(len(rows), np.int64)
        _take(self.directory, self.words, rows, out)
        return out


def encode(values: Numbers, *, first_word: int = 0) -> tuple[Numbers, Words]:
    """Values as directory and words; `first_word` is the position of the words in the column."""
    num_chunks = -(-len(values) // CHUNK)
    directory = np.empty((num_chunks, 2), np.int64)
    words = np.zeros(len(values) + num_chunks, np.uint64)
    used = _encode(values, directory, words, first_word)
    return directory, words[:used]


def sums_before(anchors: BitColumn, column: BitColumn, rows: Numbers) -> tuple[Numbers, Numbers]:
    """The sum of all values before each row, from the anchor of every 32 rows and the values since; and its value."""
    sums, values = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    _sums_before(anchors.directory, anchors.words, column.directory, column.words, rows, sums, values)
    return sums, values


class IntegerDictionary:
    """Distinct integers in order of first appearance.

    dictionary = IntegerDictionary()
    dictionary.encode(np.array([562, 9606, 562]), np.array([True, True, True]))  # array([0, 1, 0])
    dictionary.values  # array([562, 9606])
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.overflowed = False
        self._allocate(limit)

    @property
    def values(self) -> Numbers:
        """The value of each code; none after an overflow."""
        return self._values[: self._num_values].copy()

    def encode(self, values: Numbers, valid: NDArray[np.bool_]) -> Numbers | None:
        """The code of each value, 0 where it is not valid; None once there are too many distinct values."""
        if self.overflowed:
            return None
        codes = np.empty(len(values), np.int64)
        count = int(_encode_integers(values, valid, self._values, self._slots, self._num_values, codes))
        if count < 0:
            self.overflowed = True
            self._allocate(0)
            return None
        self._num_values = count
        return codes

    def _allocate(self, limit: int) -> None:
        self._num_values = 0
        self._values = np.empty(limit, np.int64)
        self._slots = _empty_slots(limit)


class TextDictionary:
    """Distinct texts in order of first appearance, at most `limit` of them and `limit_bytes` in total."""

    def __init__(self, limit: int = LIMIT, *, limit_bytes: int = 4 << 20) -> None:
        self.limit = limit
        self.limit_bytes = limit_bytes
        self.overflowed = False
        self._allocate(limit, limit_bytes)

    @property
    def values(self) -> list[bytes]:
        """The text of each code; none after an overflow."""
        ends = self._ends[: self._num_values + 1].tolist()
        pool = self._pool[: ends[-1]].tobytes()
        return [pool[start:end] for start, end in pairwise(ends)]

    def encode(self, flat: Bytes, starts: Numbers, ends: Numbers, valid: NDArray[np.bool_]) -> Numbers | None:
        """The code of each text flat[starts[i]:ends[i]], 0 if it is not valid; None once there are too many texts."""
        if self.overflowed:
            return None
        codes = np.empty(len(starts), np.int64)
        known = self._ends, self._hashes, self._pool, self._slots
        count = int(_encode_texts(flat, starts, ends, valid, *known, self._num_values, codes))
        if count < 0:
            self.overflowed = True
            self._allocate(0, 0)
            return None
        self._num_values = count
        return codes

    def _allocate(self, limit: int, limit_bytes: int) -> None:
        self._num_values = 0
        self._ends = np.zeros(limit + 1, np.int64)  # text i is pool[ends[i]:ends[i + 1]]
        self._hashes = np.empty(limit, np.int64)
        self._pool = np.empty(limit_bytes, np.uint8)  # pages are only allocated as it fills
        self._slots = _empty_slots(limit)


@inlined
def bits_at(words: Words, bit: int, width: int) -> np.uint64:
    """`width` bits, 1 to 64, from a bit on. No branch depends on whether they lie in two words: it is unpredictable."""
    word, shift = _at(bit >> 6), _at(bit & 63)
    # The second word is another one only where it is needed: the last of a column has none after it.
    other = words[_at((bit + width - 1) >> 6)] << _at(1) << (_at(63) - shift)
    return ((words[word] >> shift) | other) & (_ALL >> _at(64 - width))


@kernel
def value_of(directory: Numbers, words: Words, row: int) -> int:
    """One value of a bit column."""
    chunk = _at(row >> 12)
    place = directory[chunk, 1]
    width = place & 255
    if width == 0:
        return directory[chunk, 0]
    return directory[chunk, 0] + np.int64(bits_at(words, ((place >> 8) << 6) + (row & 4095) * width, width))


@kernel
def _take(directory: Numbers, words: Words, rows: Numbers, out: Numbers) -> None:
    for index in range(len(rows)):
        if index + _AHEAD < len(rows):
            ahead = rows[index + _AHEAD]
            place = directory[_at(ahead >> 12), 1]
            prefetch(words, (place >> 8) + ((ahead & 4095) * (place & 255) >> 6))
        out[index] = value_of(directory, words, rows[index])


@kernel
def last_not_above(directory: Numbers, words: Words, rows: int, value: int, near: int) -> int:
    """The last row of an ascending column that is not above a value, or -1; `near` is a row that may be close."""
    low = near
    if low < 0 or value_of(directory, words, low) <= value:
        for _ in range(_NEAR):
            if low + 1 == rows or value_of(directory, words, low + 1) > value:
                return low
            low += 1
    low, high = -1, len(directory)  # chunks: of an ascending column, the directory has their first values
    while high - low > 1:
        middle = (low + high) >> 1
        if directory[middle, 0] <= value:
            low = middle
        else:
            high = middle
    if low < 0:
        return -1
    low, high = low << 12, min(low + 1 << 12, rows)
    while high - low > 1:
        middle = (low + high) >> 1
        if value_of(directory, words, middle) <= value:
            low = middle
        else:
            high = middle
    return low


@kernel
def _sums_before(
    anchor_directory: Numbers,
    anchor_words: Words,
    directory: Numbers,
    words: Words,
    rows: Numbers,
    sums: Numbers,
    values: Numbers,
) -> None:
    for index in range(len(rows)):
        if index + _AHEAD < len(rows):
            ahead = rows[index + _AHEAD]
            place = directory[_at(ahead >> 12), 1]
            prefetch(words, (place >> 8) + ((ahead & 4064) * (place & 255) >> 6))
        row = rows[index]
        low, place = directory[_at(row >> 12), 0], directory[_at(row >> 12), 1]
        width = place & 255
        left = (row & 31) + 1
        total = value_of(anchor_directory, anchor_words, row >> 5) + low * (left - 1)
        value = 0
        if width > 0:
            mask = _ALL >> _at(64 - width)
            at_once = 64 // width
            bit = ((place >> 8) << 6) + ((row - left + 1) & 4095) * width
            while left > 0:
                word, shift = _at(bit >> 6), _at(bit & 63)
                fields = (words[word] >> shift) | (words[word + _at(1)] << _at(1) << (_at(63) - shift))
                for _ in range(min(at_once, left)):
                    value = np.int64(fields & mask)
                    total += value
                    fields >>= _at(width)
                bit += at_once * width
                left -= at_once
        sums[index] = total - value
        values[index] = low + value


@kernel
def _encode(values: Numbers, directory: Numbers, words: Words, first_word: int) -> int:
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


def _empty_slots(limit: int) -> Numbers:
    """An open-addressing table of codes, at most half full; its size is a power of two."""
    return np.full(2 << max(limit, 1).bit_length(), -1, np.int64)


@kernel
def _encode_integers(
    values: Numbers,
    valid: NDArray[np.bool_],
    known: Numbers,
    slots: Numbers,
    num_known: int,
    codes: Numbers,
) -> int:
    """Fill `codes` and add new values to `known`; returns how many are known, or -1 if there is no room."""
    mask = len(slots) - 1
    for i in range(len(values)):
        if not valid[i]:
            codes[i] = 0
            continue
        value = int(values[i])
        # Products stay below 2**63: nothing overflows.
        mixed = (value ^ (value >> 31) ^ (value >> 62)) & 0x7FFFFFFF
        slot = (((mixed ^ (mixed >> 15)) * 0x9E3779B1) >> 16) & mask
        code = slots[_at(slot)]
        while code >= 0 and known[_at(code)] != value:
            slot = (slot + 1) & mask
            code = slots[_at(slot)]
        if code < 0:
            if num_known == len(known):
                return -1
            code = num_known
            slots[slot] = code
            known[code] = value
            num_known += 1
        codes[i] = code
    return num_known


@kernel
def _hash(flat: Bytes, start: int, size: int) -> int:
    """31 bits of hash, four bytes at a time; products stay below 2**63 here too."""
    hashed, p = size & 0x7FFFFFFF, start
    for _ in range(size >> 2):
        low = int(flat[_at(p)]) | int(flat[_at(p + 1)]) << 8
        high = int(flat[_at(p + 2)]) | int(flat[_at(p + 3)]) << 8
        product = (hashed ^ low ^ high << 16) * 0x5BD1E995
        hashed = (product ^ (product >> 24)) & 0x7FFFFFFF
        p += 4
    for _ in range(size & 3):
        product = (hashed ^ int(flat[_at(p)])) * 0x5BD1E995
        hashed = (product ^ (product >> 24)) & 0x7FFFFFFF
        p += 1
    return hashed


@kernel
def _encode_texts(
    flat: Bytes,
    starts: Numbers,
    ends: Numbers,
    valid: NDArray[np.bool_],
    known_ends: Numbers,
    known_hashes: Numbers,
    pool: Bytes,
    slots: Numbers,
    num_known: int,
    codes: Numbers,
) -> int:
    """Fill `codes` and add new texts to `pool`; returns how many are known, or -1 if there is no room."""
    mask = len(slots) - 1
    for i in range(len(starts)):
        if not valid[i]:
            codes[i] = 0
            continue
        start, size = int(starts[i]), int(ends[i] - starts[i])
        hashed = _hash(flat, start, size)
        slot = (hashed ^ (hashed >> 15)) & mask
        code = slots[_at(slot)]
        while code >= 0:
            first = known_ends[_at(code)]
            if known_hashes[_at(code)] == hashed and known_ends[_at(code + 1)] - first == size:
                same = 0
                while same < size and pool[_at(first + same)] == flat[_at(start + same)]:
                    same += 1
                if same == size:
                    break
            slot = (slot + 1) & mask
            code = slots[_at(slot)]
        if code < 0:
            end = int(known_ends[num_known])
            if num_known == len(known_hashes) or end + size > len(pool):
                return -1
            code = num_known
            slots[slot] = code
            known_hashes[code] = hashed
            for k in range(size):
                pool[end + k] = flat[start + k]
            num_known += 1
            known_ends[num_known] = end + size
        codes[i] = code
    return num_known
