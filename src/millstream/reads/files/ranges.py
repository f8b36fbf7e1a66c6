"""Byte ranges of a file -> memory: many at once, neighbours in one system call."""

import os

import numpy as np

from millstream.core.collection import Numbers
from millstream.core.kernels import c_function, kernel
from millstream.core.memory import empty_bytes
from millstream.core.record import Bytes
from millstream.errors import StaleIndex

_NEAR_BYTES = 4096  # reading this many unneeded bytes costs less than a second system call


def read_near(fd: int, starts: Numbers, ends: Numbers) -> tuple[Bytes, Numbers]:
    """The bytes of all ranges of a file, neighbours read together, and where each range starts in them."""
    if not len(starts):
        return np.empty(0, np.uint8), starts
    order = np.argsort(starts)
    ordered, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.flatnonzero(np.append(True, ordered[1:] - reach[:-1] > _NEAR_BYTES))
    low, high = ordered[first], reach[np.append(first[1:], len(order)) - 1]
    offsets = np.append(0, np.cumsum(high - low))
    text = empty_bytes(int(offsets[-1]))
    read_ranges(fd, low, high - low, text, offsets[:-1])
    run = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(order))))
    places = np.empty(len(order), np.int64)
    places[order] = ordered - low[run] + offsets[run]
    return text, places


def read_bytes(fd: int, start: int, count: int) -> bytes:
    """The bytes of one range of a file, without arrays: a tenth of the time."""
    text = os.pread(fd, count, start)
    # A short read: of more than 2 GB, or of a file that has become shorter.
    return text if len(text) == count else read_near(fd, np.array([start]), np.array([start + count]))[0].tobytes()


def read_ranges(fd: int, starts: Numbers, sizes: Numbers, out: Bytes, offsets: Numbers) -> None:
    """Read `sizes[i]` bytes of a file from `starts[i]` on into `out[offsets[i]:]`, for every i."""
    done = _read_ranges(fd, starts, sizes, out.ctypes.data, offsets)
    # The rest, after a short read.
    parts = zip(starts[done:].tolist(), sizes[done:].tolist(), offsets[done:].tolist(), strict=True)
    for start, size, offset in parts:
        part = out[offset : offset + size].data
        while part.nbytes:
            count = os.preadv(fd, [part], start)
            if count == 0:
                raise StaleIndex(
                    "the file is shorter than when it was indexed. Rebuild: millstream index FILE --rebuild"
                )
            part, start = part[count:], start + count


_pread = c_function("pread", num_arguments=4)


@kernel
def _read_ranges(fd: int, starts: Numbers, sizes: Numbers, address: int, offsets: Numbers) -> int:
    """How many ranges were read completely, up to the first that was not."""
    for index in range(starts.size):
        if _pread(fd, np.int64(address + offsets[index]), sizes[index], starts[index]) != sizes[index]:
            return index
    return starts.size
