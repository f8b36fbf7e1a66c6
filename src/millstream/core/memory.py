"""Memory: a pool of buffers, mapped files and their pages, memory in use, and returning what was freed.

    with pool.use():
        batch = empty((16, 4096), "float32")  # from the pool; returns to it when the last view of it is gone

Getting fresh pages costs as much as filling them with data, so the pool reuses them. Outside of `use`, and for small
arrays, `empty` is numpy's.
"""

import ctypes
import mmap
import os
import sys
import tempfile
import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import lru_cache
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast
from weakref import WeakSet

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike

from millstream.core.config import parse_bytes
from millstream.core.record import Array, Bytes

if TYPE_CHECKING:
    from typing import Protocol

    class Block(Protocol):
        """A piece of memory that can be leased."""

        @property
        def data(self) -> Bytes: ...
        @property
        def is_away(self) -> bool:
            """Whether another process still uses it."""
            ...


SMALL_BYTES = 64 << 10  # smaller arrays are left to numpy
_HUGE_BYTES = 4 << 20  # from here on huge pages save page faults, as in numpy
_SMALL_MAP_BYTES = 4 << 20  # not worth an open file
_SETTLING = 2
_CACHED_BYTES = 256 << 10  # requesting less than this is cheaper than checking the cache
_NORESERVE = 0x4000 if sys.platform == "linux" else 0x40  # a private mapping larger than RAM must not be refused
_ARENAS = 4
_M_ARENA_MAX = -8  # of malloc.h
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_local = threading.local()


def empty(shape: int | tuple[int, ...], dtype: DTypeLike) -> Array:
    """An uninitialised array from the pool this thread uses."""
    kind = np.dtype(dtype)
    size = (shape if isinstance(shape, int) else prod(shape)) * kind.itemsize
    pool: Pool | None = getattr(_local, "pool", None)
    if pool is None or size < SMALL_BYTES:
        return np.empty(shape, kind)
    return pool.take(size).view(kind).reshape(shape)


def empty_bytes(count: int) -> Bytes:
    """Uninitialised bytes from the pool this thread uses."""
    return cast(Bytes, empty(count, np.uint8))


class OwnBlock:
    """Memory of this process, mapped for itself: malloc would keep holes between freed blocks of different sizes.

    Decoded blocks of gzip under memory=300MB: +378 MB with malloc, +230 MB like this.
    """

    is_away = False

    def __init__(self, size: int) -> None:
        mapped = mmap.mmap(-1, size)
        if size >= _HUGE_BYTES:
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self.data: Bytes = np.frombuffer(mapped, np.uint8)


class Pool:
    """Leases memory and takes it back. Unused memory is freed when the total exceeds `limit` bytes."""

    def __init__(self, limit: int, make: "Callable[[int], Block]" = OwnBlock) -> None:
        self.limit = limit
        self._make = make
        self._lock = threading.Lock()
        self._free: list[Block] = []  # by size
        self._back: deque[Block] = deque()  # returned without a lock by the thread that dropped the last view
        self._leased = 0

    @contextmanager
    def use(self) -> Generator[None]:
        """Make `empty` in this thread allocate from this pool."""
        before = getattr(_local, "pool", None)
        _local.pool = self
        try:
            yield
        finally:
            _local.pool = before

    def take(self, size: int) -> Bytes:
        """`size` bytes, which return to the pool when their last view is gone."""
        with self._lock:
            self._collect()
            at = bisect_left(self._free, size, key=_size_of)
            if at < len(self._free) and _size_of(self._free[at]) <= 4 * size:  # the last batch may be short
                block = self._free.pop(at)
            else:
                if at:  # drop a smaller one for a larger one: never more blocks than were in use at once
                    self._free.pop(at - 1)
                rounded = _rounded(size)
                self._shrink(self.limit - rounded)
                block = self._make(rounded)
            self._leased += _size_of(block)
        return np.asarray(_Lease(block, self._back))[:size]

    @property
    def held_bytes(self) -> int:
        """Leased and unused memory together."""
        with self._lock:
            self._collect()
            return self._leased + self._unused()

    def _collect(self) -> None:
        for _ in range(len(self._back)):
            block = self._back.popleft()
            if block.is_away:
                self._back.append(block)
                continue
            self._leased -= _size_of(block)
            insort(self._free, block, key=_size_of)
        self._shrink(self.limit)

    def _shrink(self, limit: int) -> None:
        while self._free and self._leased + self._unused() > limit:
            self._free.pop(0)

    def _unused(self) -> int:
        return sum(map(_size_of, self._free))


class Map:
    """The bytes of a file as `map.view`, copy-on-write; unmapped when the last view of them is gone.

    Python's own mmap keeps a file descriptor as long as any view lives, so records from many shards would exhaust them.
    MAP_PRIVATE with write permission lets torch take views without its read-only warning; writes to a view stay in this
    process and never reach the file.
    """

    def __init__(
        self, path: Path, *, sequential: bool = False, descriptor: int | None = None, is_cache: bool = False
    ) -> None:
        """With `descriptor`, map that open file: the path may belong to another file by now.

        With `is_cache`, nobody writes to its views, and a `PageLimit` may drop its pages at any time.
        """
        self._path = path
        fd = os.open(path, os.O_RDONLY) if descriptor is None else os.dup(descriptor)
        try:
            self.num_bytes = os.fstat(fd).st_size
            self._mapping = _Mapping(fd, self.num_bytes)
            # Without RANDOM, a cold read of one slice pulls in the whole file: 2 GB for 64 MB needed.
            self._mapping.advise(0, self.num_bytes, mmap.MADV_SEQUENTIAL if sequential else mmap.MADV_RANDOM)
        finally:
            os.close(fd)
        self.view: Bytes = np.asarray(self._mapping)
        if is_cache:
            _caches.add(self)

    def will_need(self, offset: int, num_bytes: int) -> None:
        """Start reading exactly this range from disk, up to the end of the file."""
        # With MADV_RANDOM and no WILLNEED a cold read goes page by page: 50 MB/s against 430-640.
        end = min(offset + num_bytes, self.num_bytes)
        if end - offset > _CACHED_BYTES and self._is_cached(offset, end):
            return  # WILLNEED would still walk all its pages: 70 us for 4 MB
        start = offset - offset % mmap.PAGESIZE
        self._mapping.advise(start, end - start, mmap.MADV_WILLNEED)

    def drop(self, start: int = 0, end: int | None = None) -> None:
        """Unmap the pages from this process, up to the end of the file; the kernel may keep them cached."""
        start -= start % mmap.PAGESIZE
        end = self.num_bytes if end is None else min(end, self.num_bytes)  # beyond it lies memory of others
        self._mapping.advise(start, end - start, mmap.MADV_DONTNEED)

    def _is_cached(self, start: int, end: int) -> bool:
        """Whether first, middle and last byte are in the page cache (mincore does not report files of other users)."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return all(os.preadv(fd, [_BYTE], at, os.RWF_NOWAIT) for at in (start, (start + end) // 2, end - 1))
        except OSError:  # would wait for the disk, or is not supported
            return False
        finally:
            os.close(fd)


class FilledMap(Map):
    """`num_bytes` bytes that are filled piece by piece, such as those of an object; zeros where they are not.

    A large one is an unnamed file in `folder`, as far as its disk has room, so that its pages can be dropped.
    """

    def __init__(self, num_bytes: int, folder: Path | None) -> None:
        self._file: BinaryIO | None = None
        if folder is not None and num_bytes > _SMALL_MAP_BYTES:
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                file = cast("BinaryIO", tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115
                file.truncate(num_bytes)
                self._file = file
        if self._file is not None:
            super().__init__(Path(), descriptor=self._file.fileno(), is_cache=True)
            return
        self.num_bytes = num_bytes
        self._mapping = _Mapping(-1, num_bytes)
        self.view = np.asarray(self._mapping)

    def fill(self, start: int, data: Bytes) -> None:
        """Put bytes into their place."""
        if self._file is not None:
            try:
                done = 0
                while done < len(data):
                    done += os.pwrite(self._file.fileno(), data[done:].data, start + done)
                return
            except OSError:  # no room: from now on its pages are memory of this process
                self._file = None
                _caches.discard(self)
        self.view[start : start + len(data)] = data

    def will_need(self, offset: int, num_bytes: int) -> None:
        """Nothing to read: what is not filled is not here."""

    def drop(self, start: int = 0, end: int | None = None) -> None:
        if self._file is not None:
            super().drop(start, end)


_caches = WeakSet[Map]()


class PageLimit:
    """Keeps the pages of files that are mapped as caches (read files, indexes, packs) below `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._floor = file_bytes()

    def enforce(self) -> None:
        """Drop the pages of all caches if this process has mapped more than `limit` since; they can be mapped again."""
        if file_bytes() <= self._floor + self._limit:
            return
        for cache in list(_caches):
            cache.drop()
        left = file_bytes()
        if left > self._floor + self._limit:  # libraries and shared memory have grown
            self._floor = left


def available_bytes() -> int:
    """Available memory if the system reports it, else 2 GB."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) << 10
    except (OSError, StopIteration):
        return 2 << 30


def resident_bytes() -> int:
    """Resident memory of this process; its peak if the system does not report the present value."""
    import resource

    try:
        return _statm()[1] * mmap.PAGESIZE
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def file_bytes() -> int:
    """Resident pages of mapped files and shared memory; 0 if the system does not report it."""
    try:
        return _statm()[2] * mmap.PAGESIZE
    except OSError:
        return 0


def _statm() -> list[int]:
    """Read for every batch, and ten times as fast as by Path.read_text."""
    fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return list(map(int, os.read(fd, 256).split()))
    finally:
        os.close(fd)


def tree_bytes(pid: int | None = None) -> int:
    """Memory of a process (default: this one) and its children; 0 if the system does not report it.

    This is what `memory` limits, wherever it is measured: private and shared memory counted once, and the resident
    pages of mapped files in full, those of the process with the most. (PSS of file pages would change with other
    programs that share the same libraries.)
    """
    total, files, left = 0, 0, [pid or os.getpid()]
    while left:
        process = Path("/proc") / str(left.pop())
        try:
            rows = (line.split() for line in (process / "smaps_rollup").read_text().splitlines()[1:])
            kb = {row[0]: int(row[1]) for row in rows}
            total += (kb["Pss_Anon:"] + kb["Pss_Shmem:"]) << 10
            files = max(files, (kb["Rss:"] - kb["Anonymous:"] - kb["Pss_Shmem:"]) << 10)
            for task in (process / "task").iterdir():
                left += map(int, (task / "children").read_text().split())
        except (OSError, KeyError):  # it has just ended
            continue
    return total + files


class Allowance:
    """What this process and its children may use: `memory` more than now, and what compiled kernels take.

    Python, its libraries and compiled code are the base; a kernel that is compiled later, on the first run, adds to it:
    what its compiler takes while it runs, then what it keeps.
    """

    _compiled_bytes = 0  # by all kernels compiled in this process
    _compiling_from: int | None = None  # memory of this process when the compiler started, if it runs

    def __init__(self, memory: int | str) -> None:
        self._bytes = tree_bytes() + parse_bytes(memory) - Allowance.base_bytes()

    @property
    def num_bytes(self) -> int:
        """The limit now."""
        return self._bytes + Allowance.base_bytes()

    def usage(self) -> tuple[int, int]:
        """Bytes in use, and the limit."""
        return tree_bytes(), self.num_bytes

    @staticmethod
    def begin_compiling() -> None:
        """From now on, what this process takes more is taken by the compiler of a kernel."""
        Allowance._compiling_from = resident_bytes()

    @staticmethod
    def end_compiling() -> None:
        """The compiler has ended; what this process has taken more is kept by it."""
        Allowance._compiled_bytes, Allowance._compiling_from = Allowance.base_bytes(), None

    @staticmethod
    def base_bytes() -> int:
        before = Allowance._compiling_from
        return Allowance._compiled_bytes + (0 if before is None else max(resident_bytes() - before, 0))


@lru_cache(maxsize=1)
def return_freed_tables() -> None:
    """Let Arrow allocate by malloc, unless the user has chosen: its own heap kept 100 MB of freed row groups."""
    if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
        pa.set_memory_pool(pa.system_memory_pool())  # pyright: ignore


@lru_cache(maxsize=1)
def limit_arenas() -> None:
    """Let all threads of this process share few arenas of malloc, unless the user has set their number.

    What a thread has freed stays in its arena: with one per thread, 32 connections held 100 MB that nobody used, which
    `malloc_trim` does not return either. On two cores there are at most 16 arenas, on 64 there are 512.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        with suppress(AttributeError):  # another malloc
            _libc.mallopt(_M_ARENA_MAX, _ARENAS)


class Heap:
    """The malloc heap: tensors of varying sizes leave holes in it, which glibc would keep."""

    def __init__(self, slack: int) -> None:
        """Trim when the process has grown by `slack` bytes: more often costs more in page faults than it saves."""
        self._slack = slack
        self._floor = resident_bytes()
        self._settling = 0  # calls left in which growth is taken for what is always needed

    def trim_malloc(self) -> None:
        """Return freed memory to the system, if the process has grown enough.

        What is back at the next two calls counts as the floor: what a graph net takes and frees in each step, trimmed
        each time, cost it a quarter of its time, in page faults.
        """
        resident = resident_bytes()
        if self._settling:
            self._settling -= 1
            self._floor = max(self._floor, resident)
        elif resident > self._floor + self._slack:
            trim_malloc()
            self._floor, self._settling = resident_bytes(), _SETTLING


def trim_malloc() -> None:
    """Return freed memory to the system."""
    with suppress(OSError, AttributeError):
        _libc.malloc_trim(0)


def _rounded(size: int) -> int:
    """The next power of two or the midpoint before it, so that batches of similar sizes can reuse each other's memory.

    Pages that are never written take no memory.
    """
    step = 1 << max(size.bit_length() - 2, 0)
    return max(-(-size // step) * step, 1)


class _Lease:
    """Keeps a block out of the pool while numpy arrays over it live."""

    def __init__(self, block: "Block", back: "deque[Block]") -> None:
        self._block = block
        self._back = back
        self.__array_interface__ = block.data.__array_interface__

    def __del__(self) -> None:
        self._back.append(self._block)


_size_of = attrgetter("data.nbytes")


class _Mapping:
    """The mapping itself; numpy keeps it alive through the array interface."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.address = 0
        self._num_bytes = num_bytes
        if num_bytes:
            flags = mmap.MAP_PRIVATE | _NORESERVE | (mmap.MAP_ANONYMOUS if fd < 0 else 0)
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
