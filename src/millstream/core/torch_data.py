"""Collections for the stock tools: a map-style Dataset and an IterableDataset for torch's DataLoader.

What they hand out are `Sample`s, which know their record number and nothing else; DataLoader's default collation is
taught to make a batch of them all at once.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map  # pyright: ignore

from millstream.buffers import Pool
from millstream.collection import Collection, Numbers
from millstream.config import parse_bytes
from millstream.console import format_bytes
from millstream.dataset.batch import Feature
from millstream.errors import OverBudget
from millstream.loader.plan import OrderName, file_share, plan_order
from millstream.loader.positions import Positions
from millstream.loader.ranks import Layout, find_ranks
from millstream.loader.recipe import Recipe
from millstream.loader.shared import SharedBatch, SharedMemory
from millstream.loader.state import State

PREFETCHED = 3  # batches a DataLoader worker has under way: two prefetched and one being made


class Kitchen:
    """Makes batches in whatever process it finds itself, each with its share of the memory."""

    def __init__(self, collection: Collection, recipe: Recipe, memory: int) -> None:
        self.collection = collection
        self._recipe = recipe
        self._memory = memory
        self._place: _Place | None = None

    def send(self, numbers: Numbers, epoch: int) -> dict[str, object] | SharedBatch:
        """A batch; in a worker process, one that is on its way."""
        batch, shared = self.make(numbers, epoch), self.here().shared
        return batch if shared is None else SharedBatch(batch, shared)

    def make(self, numbers: Numbers, epoch: int) -> dict[str, object]:
        """A batch."""
        here = self.here()
        collection = here.collection.in_epoch(epoch)
        need, budget = self._recipe.cost(collection, numbers), here.pool.limit // PREFETCHED
        if need > budget:
            raise OverBudget(
                f"one batch needs {format_bytes(need)}, and this process may take {format_bytes(budget)} for each of "
                f"{PREFETCHED}: make memory larger, or batch_size or num_workers smaller"
            )
        try:
            with here.pool.use():
                batch, _ = self._recipe.make(collection, numbers, epoch)
        except Exception as error:
            self._recipe.blame(collection, numbers, epoch, error)
            raise
        return batch

    def here(self) -> "_Place":
        """This process's own view of the collection and its memory; a forked worker does not touch its parent's."""
        if self._place is None or self._place.process != os.getpid():
            worker = get_worker_info()
            memory = self._memory // (worker.num_workers if worker else 1)
            files = file_share(self.collection, memory)
            collection = self.collection.within(files)
            shared = SharedMemory(memory - files) if worker and hasattr(os, "memfd_create") else None
            self._place = _Place(os.getpid(), collection, shared.pool if shared else Pool(memory - files), shared)
        return self._place

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_place": None}


class _Place(NamedTuple):
    process: int
    collection: Collection
    pool: Pool
    shared: SharedMemory | None


class Sample(Mapping[str, object]):
    """One record of a dataset. Made when it is looked into; many of them in a batch are made at once."""

    __slots__ = ("_made", "epoch", "kitchen", "number")

    def __init__(self, kitchen: Kitchen, number: int, epoch: int) -> None:
        self.kitchen, self.number, self.epoch = kitchen, number, epoch
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
            made = self.kitchen.make(numbers, self.epoch)
            self._made = {name: _only(value) for name, value in made.items()}
        return self._made


class Samples(Sequence[Sample]):
    """The samples of one batch, as `__getitems__` gives them."""

    def __init__(self, kitchen: Kitchen, numbers: Numbers, epoch: int) -> None:
        self.kitchen, self.numbers, self.epoch = kitchen, numbers, epoch

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Sample:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Sample(self.kitchen, int(self.numbers[index]), self.epoch)


class RecordDataset(Dataset[Sample]):
    """A collection as a map-style Dataset. Made by `collection.dataset(features)`.

    A sample is a mapping of what the features make of its record. A batch of samples is fetched at once by the default
    collation; a `collate_fn` of one's own calls `torch.utils.data.default_collate` first.

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
        self._kitchen = Kitchen(collection, Recipe(collection, features, seed=seed), parse_bytes(memory))
        self._cell: torch.Tensor = torch.zeros(1, dtype=torch.int64).share_memory_()  # persistent workers see it change

    def __len__(self) -> int:
        return len(self._kitchen.collection)

    def set_epoch(self, epoch: int) -> None:
        """Let features that draw at random draw for this epoch."""
        self._cell[0] = epoch

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Samples:
        numbers = np.array([int(index) for index in indices], np.int64)
        if len(numbers) and not (-len(self) <= numbers.min() and numbers.max() < len(self)):
            raise IndexError(f"record {numbers.min()} to {numbers.max()} of a dataset of {len(self)}")
        return Samples(self._kitchen, numbers % max(len(self), 1), int(self._cell[0]))


class RecordStream(IterableDataset[object]):
    """A collection as an IterableDataset that shuffles. Made by `collection.stream(features)`.

    With `batch_size`, `DataLoader(stream, batch_size=None, num_workers=N)` gives the same batches in the same order for
    every N. A DataLoader does not say how far it is: after `k` batches, `stream.state_dict(batches=k)` is the state.

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
        self._kitchen = Kitchen(collection, Recipe(collection, features, seed=seed), parse_bytes(memory))
        room = file_share(collection, parse_bytes(memory)) // 2  # as if there were two workers
        self._plan = plan_order(collection, order, room=room)
        self._asked = order
        self._seed = seed
        self._gives_batches = batch_size is not None
        rank, world = find_ranks(rank, world)
        self._layout = Layout(len(collection), batch_size or 1, rank, world, drop_last)
        self._cell: torch.Tensor = torch.zeros(2, dtype=torch.int64).share_memory_()  # epoch and first position
        self._given = 0  # batches or samples, by this process's own loop

    def __len__(self) -> int:
        """Batches (or records, without `batch_size`) of this rank that the next loop gives."""
        return self._layout.steps(int(self._cell[1]))

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be this epoch, from its start (or, if it is the one resumed, from where it was)."""
        if epoch != int(self._cell[0]):
            self._cell[0], self._cell[1] = epoch, 0
            self._given = 0

    def state_dict(self, batches: int | None = None) -> dict[str, object]:
        """Where the epoch is after so many batches; by default after those that a loop in this process was given."""
        steps = self._given if batches is None else batches
        return self._state(self._layout.samples(int(self._cell[1]), steps)).to_json()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Let the next loop go on where `state_dict` was taken."""
        resumed = self._state(0).resumed(state, any_order=self._asked == "auto")
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
                    positions.read_ahead(step, self._kitchen.here().collection)
                    yield self._kitchen.send(numbers, epoch)
                else:
                    yield Sample(self._kitchen, int(numbers[0]), epoch)
        finally:
            positions.close()

    def _state(self, samples: int) -> State:
        return State(self._seed, int(self._cell[0]), samples, self._layout.n, self._fingerprint, self._plan)

    @cached_property
    def _fingerprint(self) -> str:
        return self._kitchen.collection.fingerprint


def _collate(samples: Sequence[Sample], *, collate_fn_map: object = None) -> object:
    """A batch of samples, fetched and made at once."""
    if isinstance(samples, Samples):
        return samples.kitchen.send(samples.numbers, samples.epoch)
    first = samples[0]
    if any(sample.kitchen is not first.kitchen for sample in samples):
        raise ValueError("samples of two datasets in one batch; put the collections together first, with ms.concat")
    return first.kitchen.send(np.array([sample.number for sample in samples], np.int64), first.epoch)


def _only(value: object) -> object:
    """The one row of a batch of one."""
    rows = cast("Sequence[object]", value)
    return rows[0] if len(rows) == 1 else rows


cast("dict[type, Callable[..., object]]", default_collate_fn_map)[Sample] = _collate
