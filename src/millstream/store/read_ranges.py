"""Many short ranges of a file, read in one call that does not hold the GIL."""

import os

import numpy as np

from millstream.errors import StaleIndex
from millstream.kernels import HAVE_NUMBA, kernel
from millstream.records import Bytes
from millstream.store.packed import Numbers


def read_ranges(fd: int, starts: Numbers, sizes: Numbers, out: Bytes, offsets: Numbers) -> None:
    """`sizes[i]` bytes of the file from `starts[i]` on, to `out[offsets[i]:]`."""
    done = _read_ranges(fd, starts, sizes, out.ctypes.data, offsets) if HAVE_NUMBA else 0
    # What is left: everything without numba, and after a read that gave less than was asked for.
    parts = zip(starts[done:].tolist(), sizes[done:].tolist(), offsets[done:].tolist(), strict=True)
    for start, size, offset in parts:
        part = out[offset : offset + size].data
        while part.nbytes:
            count = os.preadv(fd, [part], start)
            if count == 0:
                raise StaleIndex("the file is shorter than it was when it was indexed; millstream index FILE --rebuild")
            part, start = part[count:], start + count


if HAVE_NUMBA:
    from numba import types

    # Found by its name when the kernel is loaded, so that the compiled kernel can be kept on disk.
    _pread = types.ExternalFunction("pread", types.int64(types.int64, types.int64, types.int64, types.int64))  # pyright: ignore


@kernel
def _read_ranges(fd: int, starts: Numbers, sizes: Numbers, address: int, offsets: Numbers) -> int:
    """How many ranges were read whole."""
    for index in range(starts.size):
        if _pread(fd, np.int64(address + offsets[index]), sizes[index], starts[index]) != sizes[index]:
            return index
    return starts.size
