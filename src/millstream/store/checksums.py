"""CRC-32C of bytes that lie one after another, from the CRC-32Cs of the pieces: nothing has to be read."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

Crcs = NDArray[np.uint32]
_POLYNOMIAL = 0x82F63B78


def joined_crc32c(crcs: Crcs, sizes: NDArray[np.int64]) -> Crcs:
    """The CRC-32C of each row's pieces put together: `crcs` [rows, pieces], every piece of a row of `sizes[row]` bytes.

    A CRC is linear: that of all pieces is the sum of theirs, each moved by as many bytes as follow it.
    """
    pieces = crcs.shape[1]
    follow: NDArray[np.int64] = sizes.reshape(-1, 1) * np.arange(pieces - 1, -1, -1, dtype=np.int64)
    moved = crcs.copy()
    for bit in range(int(follow.max(initial=0)).bit_length()):
        tables = _moved_by(bit)
        shifted = tables[0][moved & 255]
        for byte in (1, 2, 3):
            shifted ^= tables[byte][moved >> np.uint32(8 * byte) & 255]
        moved = np.where(follow >> bit & 1, shifted, moved)
    return np.bitwise_xor.reduce(moved, axis=1)


@cache
def _moved_by(bit: int) -> Crcs:
    """What 2^bit zero bytes make of a CRC, [4, 256]: by the value of each of its bytes."""
    columns = _columns(bit + 3)
    values = np.arange(256, dtype=np.uint32)
    tables = np.zeros((4, 256), np.uint32)
    for place in range(32):
        tables[place // 8] ^= np.where(values >> np.uint32(place % 8) & 1, columns[place], np.uint32(0))
    return tables


@cache
def _columns(power: int) -> Crcs:
    """What 2^power zero bits make of each single bit of a CRC."""
    if power == 0:
        return np.array([_POLYNOMIAL, *(1 << place for place in range(31))], np.uint32)
    half = _columns(power - 1)
    out = np.zeros(32, np.uint32)
    for place in range(32):
        out ^= np.where(half >> np.uint32(place) & 1, half[place], np.uint32(0))
    return out
