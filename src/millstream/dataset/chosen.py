"""Some of the numbers below n: as a list in any order, or as one bit each. Knows integers only."""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from millstream.collection import Numbers
from millstream.kernels import HAVE_NUMBA, kernel

_BLOCK = 256  # numbers with one count of the marks before them
_WORDS = _BLOCK // 64


class Chosen(Protocol):
    """Some numbers, by position."""

    @property
    def keeps_neighbours(self) -> bool:
        """Whether what is near here is near among all numbers."""
        ...

    def __len__(self) -> int: ...
    def take(self, positions: Numbers) -> Numbers: ...
    def digest(self) -> str: ...


class Listed:
    """Numbers in the order given."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self.keeps_neighbours = bool((np.diff(numbers) > 0).all())

    def __len__(self) -> int:
        return len(self._numbers)

    def take(self, positions: Numbers) -> Numbers:
        return self._numbers[positions]

    def digest(self) -> str:
        return blake2b(self._numbers.tobytes(), digest_size=8).hexdigest()


class Marked:
    """Numbers in ascending order, an eighth of a byte for each of all n, and a bit more to find them."""

    keeps_neighbours = True

    def __init__(self, masks: Iterable[NDArray[np.bool_]]) -> None:
        """`masks`, one after the other, say of each number below n whether it is in; all but the last of 256 k."""
        packed = [np.packbits(np.pad(mask, (0, -len(mask) % _BLOCK)), bitorder="little") for mask in masks]
        self._words = np.concatenate([np.empty(0, np.uint8), *packed]).view(np.uint64).reshape(-1, _WORDS)
        self._before = np.zeros(len(self._words) + 1, np.int64)
        np.cumsum(np.bitwise_count(self._words).sum(axis=1), out=self._before[1:])

    def __len__(self) -> int:
        return int(self._before[-1])

    def take(self, positions: Numbers) -> Numbers:
        blocks = np.searchsorted(self._before, positions, side="right") - 1
        ranks = positions - self._before[blocks]
        if HAVE_NUMBA:
            out = np.empty(len(positions), np.int64)
            _select(self._words, blocks, ranks, out)
            return out
        bits = np.unpackbits(self._words[blocks].view(np.uint8), axis=1, bitorder="little")
        return blocks * _BLOCK + (np.cumsum(bits, axis=1, dtype=np.int16) > ranks[:, None]).argmax(axis=1)

    def digest(self) -> str:
        return blake2b(self._words.data, digest_size=8).hexdigest()


@kernel
def _select(words: NDArray[np.uint64], blocks: Numbers, ranks: Numbers, out: Numbers) -> None:
    """The `ranks[i]`-th mark of each block."""
    one, zero = np.uint64(1), np.uint64(0)
    for i in range(blocks.size):
        left, number = ranks[i], blocks[i] * _BLOCK
        for word in words[blocks[i]]:
            count = _ones(word)
            if left >= count:
                left -= count
                number += 64
                continue
            while left > 0:
                word = word & (word - one)  # without its lowest mark
                left -= 1
            number += _ones((word & (~word + one)) - one) if word != zero else 0
            break
        out[i] = number


@kernel
def _ones(word: np.uint64) -> np.int64:
    """How many bits of a word are set."""
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))
