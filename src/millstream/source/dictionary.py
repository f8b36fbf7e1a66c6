"""Header columns -> small codes while they are read, in bounded memory: too many distinct values, and it gives up."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from millstream.kernels import kernel
from millstream.source.headers import Texts

_at = np.uint64  # an unsigned index needs no check for being negative


class IntegerDictionary:
    """Distinct integers in order of first appearance.

    dictionary = IntegerDictionary()
    dictionary.encode(np.array([562, 9606, 562]), np.array([True, True, True]))  # array([0, 1, 0])
    dictionary.values  # array([562, 9606])
    """

    def __init__(self, limit: int = 65536) -> None:
        self.limit = limit
        self.overflowed = False
        self._allocate(limit)

    @property
    def values(self) -> NDArray[np.int64]:
        """The value of each code; none after an overflow."""
        return self._values[: self._num_values].copy()

    def encode(self, values: NDArray[np.int64], valid: NDArray[np.bool_]) -> NDArray[np.int64] | None:
        """The code of each value, 0 where it is not valid; None from the first time there are too many values."""
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
    """Distinct texts in order of first appearance, at most `limit` of them and `limit_bytes` altogether."""

    def __init__(self, limit: int = 65536, *, limit_bytes: int = 4 << 20) -> None:
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

    def encode(self, texts: Texts) -> NDArray[np.int64] | None:
        """The code of each text, 0 where it is not valid; None from the first time there are too many texts."""
        if self.overflowed:
            return None
        codes = np.empty(len(texts.starts), np.int64)
        known = self._ends, self._hashes, self._pool, self._slots
        count = int(_encode_texts(texts.flat, texts.starts, texts.ends, texts.valid, *known, self._num_values, codes))
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
        self._pool = np.empty(limit_bytes, np.uint8)  # memory is only taken as it fills
        self._slots = _empty_slots(limit)


def _empty_slots(limit: int) -> NDArray[np.int64]:
    """A hash table of codes, at most half full; its size is a power of two."""
    return np.full(2 << max(limit, 1).bit_length(), -1, np.int64)


@kernel
def _encode_integers(
    values: NDArray[np.int64],
    valid: NDArray[np.bool_],
    known: NDArray[np.int64],
    slots: NDArray[np.int64],
    num_known: int,
    codes: NDArray[np.int64],
) -> int:
    """Fill `codes`, add new values to `known`; their number, or -1 when there is no room."""
    mask = len(slots) - 1
    for i in range(len(values)):
        if not valid[i]:
            codes[i] = 0
            continue
        value = int(values[i])
        # Products stay below 2**63: the same hash as plain Python, and no overflow to warn of.
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
def _hash(flat: NDArray[np.uint8], start: int, size: int) -> int:
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
    flat: NDArray[np.uint8],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    valid: NDArray[np.bool_],
    known_ends: NDArray[np.int64],
    known_hashes: NDArray[np.int64],
    pool: NDArray[np.uint8],
    slots: NDArray[np.int64],
    num_known: int,
    codes: NDArray[np.int64],
) -> int:
    """Fill `codes`, add new texts to `pool`; their number, or -1 when there is no room."""
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
