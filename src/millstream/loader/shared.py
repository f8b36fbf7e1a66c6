"""Batches between processes: tensors stay where a worker put them, and another process maps that memory.

A worker takes the memory of its batches from memory files that have no name (memfd). What is sent is the place of each
tensor; the receiver opens the file through /proc, and when its last tensor is gone says so in the file's first byte,
whereupon the worker uses the memory again. A crash leaves nothing behind.
"""

import mmap
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast
from weakref import WeakSet

import numpy as np
import torch

from millstream.buffers import Pool
from millstream.records import Bytes

_HEAD_BYTES = mmap.PAGESIZE
_POPULATE = 0x8000  # MAP_POPULATE: one call instead of a page fault every 64 kB


class SharedBlock:
    """Memory that other processes can map. The first byte is 1 while one of them uses it."""

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("millstream", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, _HEAD_BYTES + size)
        self._map = mmap.mmap(self.fd, _HEAD_BYTES + size)
        self.data: Bytes = np.frombuffer(self._map, np.uint8, offset=_HEAD_BYTES)
        self.start = self.data.ctypes.data

    @property
    def is_away(self) -> bool:
        return self._map[0] == 1

    def send_away(self) -> None:
        self._map[0] = 1

    def __del__(self) -> None:
        os.close(self.fd)


class SharedMemory:
    """The memory that a worker's batches lie in: `pool` leases it."""

    def __init__(self, limit: int) -> None:
        self._blocks = WeakSet[SharedBlock]()
        self.pool = Pool(limit, self._make)

    def _make(self, size: int) -> SharedBlock:
        block = SharedBlock(size)
        self._blocks.add(block)
        return block

    def block_of(self, address: int) -> SharedBlock | None:
        """The block that holds this address."""
        inside = (b for b in list(self._blocks) if b.start <= address < b.start + b.data.nbytes)
        return next(inside, None)


class SharedBatch:
    """A batch on its way to another process, where it arrives as a dict."""

    def __init__(self, batch: Mapping[str, object], memory: SharedMemory) -> None:
        self.batch = batch
        self._memory = memory

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        files: dict[int, int] = {}
        places = {name: self._send(value, files) for name, value in self.batch.items()}
        return _arrive, (os.getpid(), files, places)

    def _send(self, value: object, files: dict[int, int]) -> object:
        """What stands for a value; the files it lies in are noted, with their sizes."""
        if isinstance(value, list):
            return [self._send(item, files) for item in cast("list[object]", value)]
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)  # pyright: ignore
        if not isinstance(value, torch.Tensor) or not value.nbytes:
            return value
        tensor = value.contiguous()
        block = self._memory.block_of(tensor.data_ptr())
        if block is None:  # made elsewhere
            memory = torch.from_numpy(self._memory.pool.take(tensor.nbytes))  # pyright: ignore
            tensor = memory.view(tensor.dtype).reshape(tensor.shape).copy_(tensor)
            block = self._memory.block_of(tensor.data_ptr())
            assert block is not None
        block.send_away()
        files[block.fd] = block.data.nbytes
        dtype = str(tensor.dtype).removeprefix("torch.")
        return _Place(block.fd, tensor.data_ptr() - block.start, tuple(tensor.shape), dtype)


class _Place(NamedTuple):
    """Where a tensor lies."""

    file: int
    offset: int
    shape: tuple[int, ...]
    dtype: str


def _arrive(process: int, files: Mapping[int, int], places: Mapping[str, object]) -> dict[str, object]:
    memory = {fd: _borrow(process, fd, size) for fd, size in files.items()}
    return {name: _tensor(value, memory) for name, value in places.items()}


def _tensor(value: object, memory: Mapping[int, Bytes]) -> object:
    if isinstance(value, list):
        return [_tensor(item, memory) for item in cast("list[object]", value)]
    if not isinstance(value, _Place):
        return value
    dtype: torch.dtype = getattr(torch, value.dtype)
    size = int(np.prod(value.shape, dtype=np.int64)) * dtype.itemsize
    data = memory[value.file][value.offset : value.offset + size]
    return torch.from_numpy(data).view(dtype).reshape(value.shape)  # pyright: ignore


def _borrow(process: int, fd: int, size: int) -> Bytes:
    """The memory of another process's block; it is told when the last array over it is gone."""
    file = os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        flags = mmap.MAP_SHARED | _POPULATE
        return np.asarray(_Borrowed(mmap.mmap(file, _HEAD_BYTES + size, flags=flags)))
    finally:
        os.close(file)


class _Borrowed:
    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.__array_interface__ = np.frombuffer(memory, np.uint8, offset=_HEAD_BYTES).__array_interface__

    def __del__(self) -> None:
        self._memory[0] = 0
