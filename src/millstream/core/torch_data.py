"""Collections for torch's DataLoader: a map-style Dataset and an IterableDataset.

They return `Sample`s, which know only their record number; the default collation is extended to fetch a batch of them
in one call.
"""

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, cast
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

# Private, but torch documents extending this map as the way to extend `default_collate`, and has no public name for it.
# tests/test_private_modules.py fails if torch changes it.
from torch.utils.data._utils.collate import default_collate_fn_map  # pyright: ignore

from millstream.core.collection import Collection, Numbers, checked_numbers
from millstream.core.config import parse_bytes
from millstream.core.console import format_bytes
from millstream.core.features import Feature, FeaturePipeline
from millstream.core.loader import OrderName, State, file_share, plan_order
from millstream.core.memory import Pool
from millstream.core.order import Layout, Positions, find_ranks
from millstream.core.record import Bytes
from millstream.errors import OverBudget

# Batches between processes: tensors stay where a worker put them, and another process maps that memory. Measured: two
# to three times as fast as torch's own hand-over.
#
# A worker allocates its batches in anonymous memory files (memfd) and sends only the location of each tensor. The
# receiver opens the file through /proc; when its last tensor is gone, it clears the file's first byte and the worker
# reuses the memory. A crash leaves nothing behind.


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
    """The memory of a worker's batches: `pool` leases it."""

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


class SharedBatch(Mapping[str, object]):
    """A batch on its way to another process, where it arrives as a dict. A collate function may read it here."""

    def __init__(self, batch: Mapping[str, object], memory: SharedMemory) -> None:
        self._memory = memory
        self._batch = batch  # keeps its memory alive until it is sent
        self._blocks: dict[int, SharedBlock] = {}
        # Here, not in pickling: that runs in a thread whose errors are lost.
        self._room = _Room(memory, sum(map(self._loose_bytes, batch.values())))
        self._places = {name: self._place(value) for name, value in batch.items()}

    def __getitem__(self, name: str) -> object:
        return self._batch[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch)

    def __len__(self) -> int:
        return len(self._batch)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        for block in self._blocks.values():
            block.send_away()
        return _arrive, (os.getpid(), {fd: block.data.nbytes for fd, block in self._blocks.items()}, self._places)

    def _place(self, value: object) -> object:
        """The reference that is sent for a value; remembers the blocks it uses."""
        if isinstance(value, list):
            return [self._place(item) for item in cast("list[object]", value)]
        if not isinstance(value, torch.Tensor) or not value.nbytes:
            return value
        block = self._home(value)
        tensor = value if block else self._room.put(value)
        block = block or self._room.block
        assert block is not None
        self._blocks[block.fd] = block
        dtype = str(tensor.dtype).removeprefix("torch.")
        return _TensorRef(block.fd, tensor.data_ptr() - block.start, tuple(tensor.shape), dtype)

    def _home(self, tensor: torch.Tensor) -> SharedBlock | None:
        """The block that holds a tensor, if it is contiguous there."""
        return self._memory.block_of(tensor.data_ptr()) if tensor.is_contiguous() else None

    def _loose_bytes(self, value: object) -> int:
        """Bytes of tensors that are not in shared memory yet."""
        if isinstance(value, list):
            return sum(map(self._loose_bytes, cast("list[object]", value)))
        if isinstance(value, torch.Tensor) and self._home(value) is None:
            return _aligned(value.nbytes)
        return 0


class _Room:
    """One block of shared memory for all tensors of a batch that have none: one file instead of many."""

    def __init__(self, memory: SharedMemory, size: int) -> None:
        self._whole: Bytes = memory.pool.take(size) if size else np.empty(0, np.uint8)  # keeps the lease
        self._left = self._whole
        self.block = memory.block_of(self._left.ctypes.data) if size else None

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor in this block."""
        place, self._left = self._left[: tensor.nbytes], self._left[_aligned(tensor.nbytes) :]
        copy = torch.from_numpy(place).view(tensor.dtype).reshape(tensor.shape)  # pyright: ignore
        return copy.copy_(tensor)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


class _TensorRef(NamedTuple):
    """The location of a tensor that is being sent."""

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
    if not isinstance(value, _TensorRef):
        return value
    dtype: torch.dtype = getattr(torch, value.dtype)
    size = int(np.prod(value.shape, dtype=np.int64)) * dtype.itemsize
    data = memory[value.file][value.offset : value.offset + size]
    return torch.from_numpy(data).view(dtype).reshape(value.shape)  # pyright: ignore


def _borrow(process: int, fd: int, size: int) -> Bytes:
    """The memory of another process's block; that process is notified when the last array over it is gone."""
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


PREFETCHED = 3  # batches per DataLoader worker: two prefetched and one in progress


class BatchBuilder:
    """Makes batches in any process, each process with its share of the memory."""

    def __init__(self, collection: Collection, pipeline: FeaturePipeline, memory: int) -> None:
        self.collection = collection
        self._pipeline = pipeline
        self._memory = memory
        self._process_state: _ProcessState | None = None

    def send(self, numbers: Numbers, epoch: int) -> dict[str, object] | SharedBatch:
        """A batch; in a worker process, one to be sent."""
        batch, shared = self.make(numbers, epoch), self.here().shared
        return batch if shared is None else SharedBatch(batch, shared)

    def make(self, numbers: Numbers, epoch: int) -> dict[str, object]:
        """A batch."""
        here = self.here()
        collection, numbers = here.collection.in_epoch(epoch).resolved(numbers)
        need, budget = self._pipeline.cost(collection, numbers), here.pool.limit // PREFETCHED
        if need > budget:
            raise OverBudget(
                f"one batch needs {format_bytes(need)}, but this process has {format_bytes(budget)} for each of "
                f"{PREFETCHED} batches: increase memory, or reduce batch_size or num_workers"
            )
        try:
            with here.pool.use():
                batch, _ = self._pipeline.make(collection, numbers, epoch)
        except Exception as error:
            self._pipeline.blame(collection, numbers, epoch, error)
            raise
        return batch

    def here(self) -> "_ProcessState":
        """The collection and memory of this process; a forked worker does not touch its parent's."""
        if self._process_state is None or self._process_state.process != os.getpid():
            worker = get_worker_info()
            memory = self._memory // (worker.num_workers if worker else 1)
            files = file_share(self.collection, memory)
            collection = self.collection.within(files)
            shared = SharedMemory(memory - files) if worker and hasattr(os, "memfd_create") else None
            self._process_state = _ProcessState(
                os.getpid(), collection, shared.pool if shared else Pool(memory - files), shared
            )
        return self._process_state

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_process_state": None}


class _ProcessState(NamedTuple):
    """The collection and memory of one process."""

    process: int
    collection: Collection
    pool: Pool
    shared: SharedMemory | None


class Sample(Mapping[str, object]):
    """One record of a dataset, computed on access; a batch of samples is computed in one call."""

    __slots__ = ("_made", "builder", "epoch", "number")

    def __init__(self, builder: BatchBuilder, number: int, epoch: int) -> None:
        self.builder, self.number, self.epoch = builder, number, epoch
        self._made: dict[str, object] | None = None

    def __getitem__(self, name: str) -> object:
        return self._values()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())

    def _values(self) -> dict[str, object]:
        if self._made is None:
            numbers = np.array([self.number], np.int64)
            made = self.builder.make(numbers, self.epoch)
            self._made = {name: _only(value) for name, value in made.items()}
        return self._made


class Samples(Sequence[Sample]):
    """The samples of one batch, returned by `__getitems__`."""

    def __init__(self, builder: BatchBuilder, numbers: Numbers, epoch: int) -> None:
        self.builder, self.numbers, self.epoch = builder, numbers, epoch

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Sample:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Sample(self.builder, int(self.numbers[index]), self.epoch)


class RecordDataset(Dataset[Sample]):
    """A collection as a map-style Dataset. Made by `collection.dataset(features)`.

    A sample is a mapping of feature outputs for its record. The default collation fetches a batch of samples in one
    call; a custom `collate_fn` should call `torch.utils.data.default_collate` first.

    >>> sample = traces.dataset(ms.features.fields("question"))[0]
    """

    def __init__(
        self,
        collection: Collection,
        features: Feature | Sequence[Feature] | None = None,
        *,
        seed: int = 0,
        memory: int | str = "2GB",
    ) -> None:
        self._builder = BatchBuilder(collection, FeaturePipeline(collection, features, seed=seed), parse_bytes(memory))
        self._cell: torch.Tensor = torch.zeros(1, dtype=torch.int64).share_memory_()  # persistent workers see it change

    def __len__(self) -> int:
        return len(self._builder.collection)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that random features draw for."""
        self._cell[0] = epoch

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Samples:
        return Samples(self._builder, checked_indices(indices, len(self)), int(self._cell[0]))


def checked_indices(indices: Sequence[int], length: int) -> Numbers:
    """The indices of a map-style dataset as numbers from 0; negative ones count from the end."""
    return checked_numbers([int(index) for index in indices], length)


class RecordStream(IterableDataset[object]):
    """A collection as an IterableDataset that shuffles. Made by `collection.stream(features)`.

    With `batch_size`, `DataLoader(stream, batch_size=None, num_workers=N)` gives the same batches in the same order for
    every N. A DataLoader does not report its position: after `k` batches, the state is `stream.state_dict(batches=k)`.

    >>> stream = reads.stream(ms.features.tokens("kmer(6)"), batch_size=64, seed=7)
    >>> first = next(iter(DataLoader(stream, batch_size=None)))
    """

    def __init__(
        self,
        collection: Collection,
        features: Feature | Sequence[Feature] | None = None,
        *,
        batch_size: int | None = None,
        seed: int = 0,
        order: OrderName = "auto",
        memory: int | str = "2GB",
        rank: int | None = None,
        world: int | None = None,
        drop_last: bool = False,
    ) -> None:
        self._builder = BatchBuilder(collection, FeaturePipeline(collection, features, seed=seed), parse_bytes(memory))
        room = file_share(collection, parse_bytes(memory)) // 2  # assuming two workers
        self._plan = plan_order(collection, order, room=room)
        self._wanted = order
        self._seed = seed
        self._gives_batches = batch_size is not None
        rank, world = find_ranks(rank, world)
        self._layout = Layout(len(collection), batch_size or 1, rank, world, drop_last)
        self._cell: torch.Tensor = torch.zeros(2, dtype=torch.int64).share_memory_()  # epoch and first position
        self._given = 0  # batches or samples, by a loop in this process

    def __len__(self) -> int:
        """Batches (or records, without `batch_size`) of this rank in the next loop."""
        return self._layout.steps(int(self._cell[1]))

    def set_epoch(self, epoch: int) -> None:
        """Make the next loop this epoch, from its start (or from the saved position, if it is the resumed epoch)."""
        if epoch != int(self._cell[0]):
            self._cell[0], self._cell[1] = epoch, 0
            self._given = 0

    def state_dict(self, batches: int | None = None) -> dict[str, object]:
        """The position after `batches` batches; by default after those that a loop in this process received."""
        steps = self._given if batches is None else batches
        return self._state(self._layout.samples(int(self._cell[1]), steps)).to_json()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Make the next loop resume where `state_dict` was taken."""
        resumed = self._state(0).resumed(state, any_order=self._wanted == "auto")
        self._plan = resumed.plan
        self._cell[0], self._cell[1] = resumed.epoch, resumed.samples
        self._given = 0

    def __iter__(self) -> Iterator[object]:
        epoch, start = (int(value) for value in self._cell)
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        order = self._plan.order(self._layout.n, seed=self._seed, epoch=epoch)
        positions = Positions(order, self._layout, start)
        self._given = 0
        try:
            for step in range(first, self._layout.steps(start), every):
                self._given += 1
                numbers = positions.of(step)
                if self._gives_batches:
                    positions.read_ahead(step, self._builder.here().collection)
                    yield self._builder.send(numbers, epoch)
                else:
                    yield Sample(self._builder, int(numbers[0]), epoch)
        finally:
            positions.close()

    def _state(self, samples: int) -> State:
        return State(self._seed, int(self._cell[0]), samples, self._layout.n, self._fingerprint, self._plan)

    @cached_property
    def _fingerprint(self) -> str:
        return self._builder.collection.fingerprint


def _collate(samples: Sequence[Sample], *, collate_fn_map: object = None) -> object:
    """A batch of samples, computed in one call."""
    if isinstance(samples, Samples):
        return samples.builder.send(samples.numbers, samples.epoch)
    first = samples[0]
    if any(sample.builder is not first.builder for sample in samples):
        raise ValueError("a batch has samples of two datasets; concatenate the collections first, with ms.concat")
    return first.builder.send(np.array([sample.number for sample in samples], np.int64), first.epoch)


def _only(value: object) -> object:
    """The only row of a batch of one record."""
    rows = cast("Sequence[object]", value)
    return rows[0] if len(rows) == 1 else rows


cast("dict[type, Callable[..., object]]", default_collate_fn_map)[Sample] = _collate
