"""The bytes of a tensor as slices along its axes, each compressed on its own, with a CRC-32C."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import prod
from operator import mul

import numpy as np
import pyarrow as pa

from millstream.core.record import Bytes, Tensor, crc32c

MIN_SLICE_BYTES = 4096  # a tensor of smaller slices is cut along fewer axes, or stored whole


@dataclass(frozen=True)
class Slices:
    """The slices of one tensor as stored. `sizes` are the bytes of each slice; None if not compressed."""

    data: Bytes
    crc32c: tuple[int, ...]
    sizes: tuple[int, ...] | None


def num_slices(kind: Tensor, shape: Sequence[int]) -> int:
    """The number of slices a tensor of this shape is stored in: along as many axes as leave slices large enough."""
    stored = [shape[axis] for axis in kind.order]
    depth = max(len(kind.sliced), 1) if len(shape) > 1 else 0
    while depth and prod(stored[depth:]) * kind.itemsize < MIN_SLICE_BYTES:
        depth -= 1
    return max(prod(stored[:depth]), 1)


def slice_counts(kind: Tensor, shape: Sequence[int]) -> list[int]:
    """The numbers of slices that a tensor of this shape may be stored in, by the number of axes that are cut."""
    depth = max(len(kind.sliced), 1)
    return list(accumulate((shape[axis] for axis in kind.order[:depth]), mul, initial=1))


def to_slices(data: Bytes, num: int, itemsize: int, compression: str) -> Slices:
    """Cut the bytes of a tensor into slices, compress and checksum them."""
    parts = data.reshape(num, -1) if data.size else data.reshape(1, 0)
    if compression == "none":
        return Slices(data, tuple(crc32c(part) for part in parts), None)
    compressed = [_compress(part, itemsize, compression) for part in parts]
    joined = np.frombuffer(b"".join(compressed), np.uint8)
    return Slices(joined, tuple(map(crc32c, compressed)), tuple(map(len, compressed)))


def decompress(stored: Bytes, out: Bytes, itemsize: int, compression: str) -> None:
    """Decompress the stored bytes of one slice into `out`."""
    if compression == "lz4":
        out[:] = _expand(stored, out.size, compression)
        return
    size = out.size // itemsize
    ends = np.cumsum([4 * itemsize, *stored[: 4 * itemsize].view("<u4")])
    planes = [_expand(stored[a:b], size, compression) for a, b in pairwise(ends.tolist())]
    if itemsize == 2:  # 2-12 times faster than writing every second byte
        wide = out.view(np.uint16)
        np.copyto(wide, planes[1])
        wide <<= 8
        wide |= planes[0]
        return
    for byte, plane in enumerate(planes):
        out[byte::itemsize] = plane


def _compress(part: Bytes, itemsize: int, compression: str) -> bytes:
    if compression == "lz4":
        return _shrink(part, compression)
    planes = [_shrink(np.ascontiguousarray(part[byte::itemsize]), compression) for byte in range(itemsize)]
    return b"".join([np.array(list(map(len, planes)), "<u4").tobytes(), *planes])


def _shrink(data: Bytes, compression: str) -> bytes:
    smaller = _codec(compression).compress(pa.py_buffer(data))
    return smaller.to_pybytes() if smaller.size < data.size else data.tobytes()


def _expand(stored: Bytes, size: int, compression: str) -> Bytes:
    if stored.size == size:
        return stored
    raw = _codec(compression).decompress(pa.py_buffer(stored), decompressed_size=size)
    return np.frombuffer(memoryview(raw), np.uint8)


@cache
def _codec(compression: str) -> pa.Codec:
    return pa.Codec("lz4_raw") if compression == "lz4" else pa.Codec("zstd", compression_level=1)
