"""Memory for batches, used again: fresh pages cost as much to get as filling them with data does.

    with pool.use():
        batch = empty((16, 4096), "float32")  # from the pool; returns to it when the last view of it is gone

Outside of `use`, and for small arrays, `empty` is numpy's.
"""

import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike

from millstream.records import Array, Bytes

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


SMALL_BYTES = 64 << 10
_local = threading.local()


def empty(shape: int | tuple[int, ...], dtype: DTypeLike) -> Array:
    """An array that is not filled in, from the pool this thread uses."""
    kind = np.dtype(dtype)
    size = (shape if isinstance(shape, int) else prod(shape)) * kind.itemsize
    pool: Pool | None = getattr(_local, "pool", None)
    if pool is None or size < SMALL_BYTES:
        return np.empty(shape, kind)
    return pool.take(size).view(kind).reshape(shape)


class HeapBlock:
    """Memory of this process."""

    is_away = False

    def __init__(self, size: int) -> None:
        self.data: Bytes = np.empty(size, np.uint8)


class Pool:
    """Leases memory and takes it back. What lies unused is let go of when all of it exceeds `limit` bytes."""

    def __init__(self, limit: int, make: "Callable[[int], Block]" = HeapBlock) -> None:
        self.limit = limit
        self._make = make
        self._lock = threading.Lock()
        self._free: list[Block] = []  # by size
        self._back: deque[Block] = deque()  # returned, from whatever thread dropped the last view, without a lock
        self._leased = 0

    @contextmanager
    def use(self) -> Generator[None]:
        """Let this thread's `empty` take from here."""
        before = getattr(_local, "pool", None)
        _local.pool = self
        try:
            yield
        finally:
            _local.pool = before

    def take(self, size: int) -> Bytes:
        """So many bytes; they come back by themselves."""
        with self._lock:
            self._collect()
            at = bisect_left(self._free, size, key=_size_of)
            if at < len(self._free) and _size_of(self._free[at]) <= 4 * size:  # the last batch may be short
                block = self._free.pop(at)
            else:
                if at:  # a larger one in, a smaller one out: there are never more than were in use at once
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


def _rounded(size: int) -> int:
    """The next power of two, or what lies half way: batches that differ a little can use each other's memory.

    What is never written to takes no memory.
    """
    step = 1 << max(size.bit_length() - 2, 0)
    return -(-size // step) * step


class _Lease:
    """Keeps a block out of the pool as long as numpy arrays over it live."""

    def __init__(self, block: "Block", back: "deque[Block]") -> None:
        self._block = block
        self._back = back
        self.__array_interface__ = block.data.__array_interface__

    def __del__(self) -> None:
        self._back.append(self._block)


_size_of = attrgetter("data.nbytes")
