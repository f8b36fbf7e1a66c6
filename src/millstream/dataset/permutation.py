"""A keyed bijection of range(n) as a pure function, and the hash behind it. Knows integers only."""

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
_Words = NDArray[np.uint64]
_MASK = 2**64 - 1
_ROUNDS, _SMALL_ROUNDS = 8, 24  # few bits mix slowly: with 8, some orders of 5 numbers come up twice as often
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
_CHUNK = 1 << 14  # numbers at once: their working arrays stay in the cache


def mix(*parts: int) -> int:
    """64 random bits for a tuple of integers: splitmix64 over them, one after the other."""
    key = 0
    for part in parts:
        key = ((key ^ (part & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key


def mix_words(numbers: Numbers, *before: int) -> _Words:
    """`mix(*before, number)` of many numbers."""
    key = np.full(len(numbers), mix(*before), np.uint64) ^ numbers.astype(np.uint64)
    key = key + np.uint64(0x9E3779B97F4A7C15)  # arrays wrap around, as they should; scalars would warn
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))


class Permutation:
    """The numbers below n, each exactly once, in an order that `key` decides. Takes no memory, whatever n is.

    A Feistel network over the smallest power of two that holds n; what falls outside is sent through again until it
    falls inside (cycle walking), which keeps it a bijection.

    >>> shuffle = Permutation(10**12, key=7)
    >>> shuffle.inverse(shuffle(np.arange(5)))
    array([0, 1, 2, 3, 4])
    """

    def __init__(self, n: int, key: int) -> None:
        if not 0 <= n < 2**63:
            raise ValueError(f"a permutation of {n} numbers: from 0 to 2^63 - 1")
        self.n = n
        bits = max((n - 1).bit_length(), 2)
        self._low_bits = bits // 2
        self._high_bits = bits - self._low_bits
        self._turns = range(_ROUNDS if bits >= 16 else _SMALL_ROUNDS)
        self._keys = [np.uint64(mix(key, turn)) for turn in self._turns]

    def __call__(self, places: Numbers) -> Numbers:
        """The numbers at these places."""
        return self._walk(places, self._turns)

    def inverse(self, numbers: Numbers) -> Numbers:
        """The places of these numbers."""
        return self._walk(numbers, self._turns[::-1])

    def _walk(self, values: Numbers, turns: range) -> Numbers:
        if len(values) and not (int(values.min()) >= 0 and int(values.max()) < self.n):
            raise IndexError(f"{values.min()} to {values.max()} in a permutation of {self.n} numbers")
        out = np.empty(len(values), np.uint64)
        for start in range(0, len(values), _CHUNK):
            out[start : start + _CHUNK] = self._network(values[start : start + _CHUNK].astype(np.uint64), turns)
        (outside,) = np.nonzero(out >= self.n)
        while len(outside):
            again = self._network(out[outside], turns)
            out[outside] = again
            outside = outside[again >= self.n]
        return out.astype(np.int64)

    def _network(self, values: _Words, turns: range) -> _Words:
        low_bits = np.uint64(self._low_bits)
        high, low = values >> low_bits, values & np.uint64((1 << self._low_bits) - 1)
        noise, shifted = np.empty_like(values), np.empty_like(values)
        for turn in turns:
            source, target, bits = (low, high, self._high_bits) if turn % 2 == 0 else (high, low, self._low_bits)
            np.add(source, self._keys[turn], out=noise)
            np.multiply(noise, _FIRST, out=noise)
            np.right_shift(noise, _HALF, out=shifted)
            np.bitwise_xor(noise, shifted, out=noise)
            np.multiply(noise, _SECOND, out=noise)
            np.right_shift(noise, np.uint64(64 - bits), out=noise)
            np.bitwise_xor(target, noise, out=target)
        return (high << low_bits) | low
