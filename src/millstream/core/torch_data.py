"""Collections for torch's DataLoader: a map-style Dataset and an IterableDataset.

They return `Sample`s, which know only their record number; the default collation is extended to fetch a batch of them
in one call.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

# The documented way to extend `default_collate`; torch has no public name for it.
from torch.utils.data._utils.collate import default_collate_fn_map  # pyright: ignore

from millstream.core.collection import Collection, Numbers
from millstream.core.config import parse_bytes
from millstream.core.console import format_bytes
from millstream.core.features import Feature, FeaturePipeline
from millstream.core.handover import SharedBatch, SharedMemory
from millstream.core.loader import OrderName, State, file_share, plan_order
from millstream.core.memory import Pool
from millstream.core.ranks import Layout, Positions, find_ranks
from millstream.errors import OverBudget

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
        numbers = np.array([int(index) for index in indices], np.int64)
        if len(numbers) and not (-len(self) <= numbers.min() and numbers.max() < len(self)):
            raise IndexError(f"record {numbers.min()} to {numbers.max()} of a dataset of {len(self)}")
        return Samples(self._builder, numbers % max(len(self), 1), int(self._cell[0]))


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
