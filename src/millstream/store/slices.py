"""Tensor bytes <-> stored slices: CRC-32C and compression, one slice of the first axis at a time.

So one layer can be read, checked and decompressed alone. A slice below one disk page cannot be read apart from its
neighbours anyway: such tensors, and vectors, are one slice.
"""

from dataclasses import dataclass
from functools import cache

import google_crc32c
import numpy as np
import pyarrow as pa

from millstream.records import Bytes

MIN_SLICE_BYTES = 4096


@dataclass(frozen=True)
class Stored:
    """One tensor as it goes to disk. `sizes` are the stored bytes of each slice, None when not compressed."""

    data: Bytes
    crc32c: list[int]
    sizes: list[int] | None


def num_slices(shape: tuple[int, ...], itemsize: int) -> int:
    """Into how many slices a tensor of this shape is cut."""
    if len(shape) < 2 or shape[0] == 0:
        return 1
    return shape[0] if int(np.prod(shape[1:])) * itemsize >= MIN_SLICE_BYTES else 1


def crc32c(data: Bytes | bytes | pa.Buffer, crc: int = 0) -> int:
    """CRC-32C of the bytes, continuing from `crc`. Releases the GIL; 20 GB/s."""
    # The C function takes objects that export a plain read-only buffer; numpy arrays and bytes do, memoryview does not.
    return google_crc32c.extend(crc, data if isinstance(data, bytes) else np.frombuffer(data, np.uint8))  # pyright: ignore[reportArgumentType]


def store(data: Bytes, shape: tuple[int, ...], itemsize: int, compression: str) -> Stored:
    """Cut, compress and checksum a tensor's bytes."""
    parts = data.reshape(num_slices(shape, itemsize), -1) if data.size else data.reshape(1, 0)
    if compression == "none":
        return Stored(data, [crc32c(part) for part in parts], None)
    packed = [np.frombuffer(_codec(compression).compress(_shuffle(part, itemsize)), np.uint8) for part in parts]
    return Stored(np.concatenate(packed), [crc32c(part) for part in packed], [part.size for part in packed])


def unpack(stored: Bytes, out: Bytes, itemsize: int, compression: str) -> None:
    """One slice's stored bytes into `out`, its raw bytes."""
    if compression == "none" or not out.size:
        out[:] = stored[: out.size]
        return
    raw = _codec(compression).decompress(pa.py_buffer(stored), decompressed_size=out.size)
    planes = np.frombuffer(raw, np.uint8).reshape(itemsize, -1)
    for byte, plane in enumerate(planes):
        out[byte::itemsize] = plane


def _shuffle(part: Bytes, itemsize: int) -> pa.Buffer:
    """All first bytes, then all second bytes, ...: exponents end up side by side and compress."""
    return pa.py_buffer(np.ascontiguousarray(part.reshape(-1, itemsize).T))


@cache
def _codec(compression: str) -> pa.Codec:
    return pa.Codec(compression, compression_level=1 if compression == "zstd" else None)
