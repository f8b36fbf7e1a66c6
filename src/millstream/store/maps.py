"""A file mapped into memory, copy-on-write, without holding a file descriptor.

Python's own mmap keeps a descriptor as long as any view lives, so a list of records from many shards would exhaust
them. MAP_PRIVATE with write permission lets torch take views without its read-only warning; what is written to a
view stays in this process and never reaches the file.
"""

import ctypes
import mmap
import os
import sys
from pathlib import Path

import numpy as np

from millstream.records import Bytes

_NORESERVE = 0x4000 if sys.platform == "linux" else 0x40  # a private mapping larger than RAM must not be refused
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


_SMALL_BYTES = 256 << 10  # asking for less than this costs less than looking whether it is there


class Map:
    """The bytes of a file as `map.view`; unmapped when the last view of them is gone."""

    def __init__(self, path: Path, *, sequential: bool = False, descriptor: int | None = None) -> None:
        """Of a file that is open already if given: by its name it could be another one by now."""
        self._path = path
        fd = os.open(path, os.O_RDONLY) if descriptor is None else os.dup(descriptor)
        try:
            self.num_bytes = os.fstat(fd).st_size
            self._memory = _Memory(fd, self.num_bytes)
            # Without RANDOM, a cold read of one layer drags in the whole file: 2 GB for 64 MB wanted.
            self._memory.advise(0, self.num_bytes, mmap.MADV_SEQUENTIAL if sequential else mmap.MADV_RANDOM)
        finally:
            os.close(fd)
        self.view: Bytes = np.asarray(self._memory)

    def will_need(self, offset: int, num_bytes: int) -> None:
        """Start reading exactly this range (or what the file has of it) from disk."""
        # With MADV_RANDOM and no WILLNEED a cold read goes page by page: 50 MB/s against 430-640.
        end = min(offset + num_bytes, self.num_bytes)
        if end - offset > _SMALL_BYTES and self._is_cached(offset, end):
            return  # WILLNEED would still walk all its pages: 70 us for 4 MB
        start = offset - offset % mmap.PAGESIZE
        self._memory.advise(start, end - start, mmap.MADV_WILLNEED)

    def drop(self, start: int = 0, end: int | None = None) -> None:
        """Take the pages out of this process; the kernel keeps them cached as long as it likes."""
        start -= start % mmap.PAGESIZE
        self._memory.advise(start, (self.num_bytes if end is None else end) - start, mmap.MADV_DONTNEED)

    def _is_cached(self, start: int, end: int) -> bool:
        """Whether first, middle and last byte are in the page cache (mincore is silent about others' files)."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return all(os.preadv(fd, [_BYTE], at, os.RWF_NOWAIT) for at in (start, (start + end) // 2, end - 1))
        except OSError:  # would have to wait for the disk, or cannot tell
            return False
        finally:
            os.close(fd)


class _Memory:
    """The mapping itself; numpy keeps it alive through the array interface."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.address = 0
        self._num_bytes = num_bytes
        if num_bytes:
            flags = mmap.MAP_PRIVATE | _NORESERVE
            address = _libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
            if address in (None, ctypes.c_void_p(-1).value):
                error = ctypes.get_errno()
                raise OSError(error, f"mmap of {num_bytes} bytes: {os.strerror(error)}")
            self.address = address

    def advise(self, offset: int, num_bytes: int, advice: int) -> None:
        if num_bytes > 0 and self.address:
            _libc.madvise(self.address + offset, num_bytes, advice)

    @property
    def __array_interface__(self) -> dict[str, object]:
        # numpy refuses a null address even for no bytes
        address = self.address or ctypes.addressof(_EMPTY)
        return {"data": (address, False), "shape": (self._num_bytes,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        if self.address:
            _libc.munmap(self.address, self._num_bytes)


_EMPTY = ctypes.c_uint64()
_BYTE = bytearray(1)
