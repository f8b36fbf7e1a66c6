"""Collections for torch's DataLoader: a map-style Dataset and an IterableDataset.

They return `Sample`s, which know only their record number; the default collation is extended to fetch a batch of them
in one call.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

# Private, but torch documents extending this map as the way to extend `default_collate`, and has no public name for it.
# tests/test_private_modules.py fails if torch changes it.
from torch.utils.data._utils.collate import default_collate_fn_map  # pyright: ignore

from millstream.core.arguments import checked
from millstream.core.collection import Collection, Numbers, checked_numbers
from millstream.core.config import Count, Natural, SizeInBytes, config_diff, parse_bytes
from millstream.core.console import format_bytes
from millstream.core.features import Feature, FeaturePipeline
from millstream.core.loader import TRIM_BYTES, OrderName, State, file_share, plan_order, split_files
from millstream.core.memory import Heap, PageLimit, Pool
from millstream.core.order import Layout, Positions, find_ranks
from millstream.core.shared_batch import SharedBatch, SharedMemory
from millstream.errors import OverBudget, StateMismatch

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
        self._check(self._pipeline.cost(collection, numbers))
        try:
            with here.pool.use():
                batch, _ = self._pipeline.make(collection, numbers, epoch)
            here.pages.enforce()
            here.heap.trim_malloc()
        except Exception as error:
            self._pipeline.blame(collection, numbers, epoch, error)
            raise
        return batch

    def check_all(self, batches: Iterable[Numbers], *, batch_size: int) -> None:
        """Raise OverBudget if one of these batches does not fit. The first batch must have been made."""
        here = self.here()
        collection, budget = here.collection, here.pool.limit // PREFETCHED
        self._check(self._pipeline.excess(collection, batches, batch_size=batch_size, budget=budget) or 0)

    def _check(self, need: int) -> None:
        budget = self.here().pool.limit // PREFETCHED
        if need > budget:
            raise OverBudget(
                f"one batch needs {format_bytes(need)}, but this process has {format_bytes(budget)} for each of "
                f"{PREFETCHED} batches: increase memory, or reduce batch_size or num_workers"
            )

    def here(self) -> "_ProcessState":
        """The collection and memory of this process; a forked worker does not touch its parent's."""
        if self._process_state is None or self._process_state.process != os.getpid():
            worker = get_worker_info()
            memory = self._memory // (worker.num_workers if worker else 1)
            files = file_share(self.collection, memory)
            blocks, pages = split_files(self.collection, files)
            collection = self.collection.within(blocks)
            shared = SharedMemory(memory - files) if worker and hasattr(os, "memfd_create") else None
            self._process_state = _ProcessState(
                os.getpid(),
                collection,
                shared.pool if shared else Pool(memory - files),
                shared,
                PageLimit(pages),
                Heap(max(memory // 16, TRIM_BYTES)),
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
    pages: PageLimit
    heap: Heap


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


@checked
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
        memory: SizeInBytes = "2GB",
    ) -> None:
        self._builder = BatchBuilder(collection, FeaturePipeline(collection, features, seed=seed), parse_bytes(memory))
        self._cell: torch.Tensor = torch.zeros(1, dtype=torch.int64).share_memory_()  # persistent workers see it change

    def __len__(self) -> int:
        return len(self._builder.collection)

    @checked
    def set_epoch(self, epoch: Natural) -> None:
        """Set the epoch that random features draw for."""
        self._cell[0] = epoch

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Samples:
        return Samples(self._builder, checked_indices(indices, len(self)), int(self._cell[0]))


def checked_indices(indices: Sequence[int], length: int) -> Numbers:
    """The indices of a map-style dataset as numbers from 0; negative ones count from the end."""
    return checked_numbers([int(index) for index in indices], length)


@checked
class RecordStream(IterableDataset[object]):
    """A collection as an IterableDataset that shuffles. Made by `collection.stream(features)`.

    With `batch_size`, `DataLoader(stream, batch_size=None, num_workers=N)` gives the same batches in the same order for
    every N. A DataLoader does not report its position: after `k` batches, the state is `stream.state_dict(batches=k)`.
    torchdata's `StatefulDataLoader` saves and resumes the position itself, with any number of workers.

    >>> stream = reads.stream(ms.features.tokens("kmer(6)"), batch_size=64, seed=7)
    >>> first = next(iter(DataLoader(stream, batch_size=None)))
    """

    def __init__(
        self,
        collection: Collection,
        features: Feature | Sequence[Feature] | None = None,
        *,
        batch_size: Count | None = None,
        seed: int = 0,
        order: OrderName = "auto",
        memory: SizeInBytes = "2GB",
        rank: Natural | None = None,
        world: Count | None = None,
        drop_last: bool = False,
    ) -> None:
        self._builder = BatchBuilder(collection, FeaturePipeline(collection, features, seed=seed), parse_bytes(memory))
        room = file_share(collection, parse_bytes(memory)) // 2  # assuming two workers
        rank, world = find_ranks(rank, world)
        self._plan = plan_order(collection, order, room=room, world=world)
        self._wanted = order
        self._seed = seed
        self._gives_batches = batch_size is not None
        self._layout = Layout(len(collection), batch_size or 1, rank, world, drop_last)
        # Shared with workers: the epoch, its first position, and whether workers have begun to read it.
        self._cell: torch.Tensor = torch.zeros(3, dtype=torch.int64).share_memory_()
        self._loop: _Loop | None = None  # the latest in this process
        self._resumed: _Loop | None = None  # the loop that the next one of this worker continues

    def __len__(self) -> int:
        """Batches (or records, without `batch_size`) of this rank in the next loop."""
        return self._layout.steps(int(self._cell[1]))

    @checked
    def set_epoch(self, epoch: Natural) -> None:
        """Make the next loop this epoch, from its start (or from the saved position, if it is the resumed epoch)."""
        if epoch != int(self._cell[0]):
            self._begin_at(epoch, 0)

    def state_dict(self, batches: int | None = None) -> dict[str, object]:
        """The position after `batches` batches; by default after those that a loop in this process received.

        In a DataLoader worker, the position of this worker.
        """
        loop = self._loop or _Loop(int(self._cell[1]))
        if batches is None and get_worker_info():
            return {**self._state(loop.start).to_json(), "given": loop.given, "worker": self._worker()}
        if batches is None and int(self._cell[2]):
            raise ValueError(
                "DataLoader workers read this stream, so it does not know how many batches have arrived: pass "
                "state_dict(batches=...), or use torchdata's StatefulDataLoader"
            )
        return self._state(self._layout.samples(loop.start, loop.given if batches is None else batches)).to_json()

    @checked
    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Make the next loop resume where `state_dict` was taken."""
        resumed = self._state(0).resumed(state, any_order=self._wanted == "auto")
        theirs, mine = cast("dict[str, int]", state.get("worker", {})), self._worker()
        if differs := config_diff(theirs, mine):
            raise StateMismatch(f"the state does not fit this DataLoader (saved -> here): {differs}")
        self._plan = resumed.plan
        if mine:  # the start of the epoch is still that of all workers
            self._cell[0] = resumed.epoch
            self._resumed = _Loop(resumed.samples, cast(int, state["given"]))
        else:
            self._begin_at(resumed.epoch, resumed.samples)

    def __iter__(self) -> Iterator[object]:
        # Not a generator itself: torchdata takes the state between `iter` and the first `next`.
        epoch, start = int(self._cell[0]), int(self._cell[1])
        self._loop, self._resumed = self._resumed or _Loop(start), None
        # Where to resume counts for one loop. Workers cannot know whether the others have begun theirs.
        if get_worker_info():
            self._cell[2] = 1
        else:
            self._cell[1] = 0
        return self._items(self._loop, epoch)

    def _items(self, loop: "_Loop", epoch: int) -> Iterator[object]:
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        order = self._plan.order(self._layout.n, seed=self._seed, epoch=epoch)
        positions = Positions(order, self._layout, loop.start)
        try:
            steps = range(first + loop.given * every, self._layout.steps(loop.start), every)
            for step in steps:
                loop.given += 1
                numbers = positions.of(step)
                if self._gives_batches:
                    positions.read_ahead(step, self._builder.here().collection)
                    batch = self._builder.send(numbers, epoch)
                    if step == steps.start:  # the estimate is good now: refuse a budget that a later batch would exceed
                        self._builder.check_all(map(positions.of, steps), batch_size=self._layout.batch_size)
                    yield batch
                    del batch
                else:
                    yield Sample(self._builder, int(numbers[0]), epoch)
        finally:
            positions.close()

    def _begin_at(self, epoch: int, start: int) -> None:
        self._cell[0], self._cell[1], self._cell[2] = epoch, start, 0
        self._loop = self._resumed = None

    def _worker(self) -> dict[str, int]:
        """What the position of a worker depends on; nothing in a process that is none."""
        worker = get_worker_info()
        if worker is None:
            return {}
        batch_size, world = self._layout.batch_size, self._layout.world
        return {"worker": worker.id, "num_workers": worker.num_workers, "batch_size": batch_size, "world": world}

    def _state(self, samples: int) -> State:
        return State(self._seed, int(self._cell[0]), samples, self._layout.n, self._fingerprint, self._plan)

    @cached_property
    def _fingerprint(self) -> str:
        return self._builder.collection.fingerprint


@dataclass
class _Loop:
    """A loop over a stream in one process: the first position of all workers, and batches (or samples) given here."""

    start: int
    given: int = 0


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
