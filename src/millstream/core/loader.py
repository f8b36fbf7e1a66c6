"""`ms.Loader`: batches of a collection in a global order, prefetched by threads within a memory budget.

A `Plan` is what the loader chooses (the order, its window, the number of threads) and why. A `State` is the position in
an epoch, as plain JSON.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, cast

from millstream.core.arguments import checked
from millstream.core.bucket import CONNECTIONS, PART_BYTES
from millstream.core.collection import Collection, Numbers
from millstream.core.config import Count, Natural, SizeInBytes, config_diff, parse_bytes
from millstream.core.console import format_bytes, ignore_message, say
from millstream.core.engine import available_cores
from millstream.core.features import Feature, FeaturePipeline
from millstream.core.memory import Heap, PageLimit, Pool, available_bytes
from millstream.core.order import Layout, LengthBuckets, Mode, Order, Positions, Tail, find_ranks
from millstream.core.prefetch import Prefetch, check_budget, shared_by
from millstream.core.remote import requests_at_once
from millstream.errors import OverBudget, StateMismatch

OrderName = Literal["auto", "exact", "window", "none"]
BLOCK_BYTES = 256 << 10  # neighbouring records read together in `window` order
LARGE_RECORD_BYTES = 256 << 10  # a disk reads such records at full speed in any order
MAX_THREADS = 8
SHARERS, LARGE_BATCH_BYTES = 2, 8 << 20  # threads that read a large batch together, instead of one batch each
ARRIVING = 8  # of the memory, the part for bodies on their way: with all connections, 100 MB became 160 MB
TRIM_BYTES = 4 << 20  # of growth, at least, before freed memory is returned to the system
BLOCKS = 8  # compressed blocks in memory at a time: with fewer, a loader took more than its memory
REMOTE_THREADS = 4  # at most, if the requests of fewer batches do not keep all connections busy
VERSION = 1  # of the state


@checked
class Loader:
    """Iterates over the batches of one epoch; the next loop is the next epoch.

    A batch is a dict of tensors (and lists of texts) that `features` compute from the records, plus `numbers`, their
    record numbers. `memory` limits what the loader holds: batches in progress and waiting, decoded blocks, buffers.
    With `length_buckets`, the records of that many batches are dealt out again, so that those of a batch have similar
    lengths and need little padding. With `tensors=False` batches are of numpy arrays, and torch is not imported. Ranks
    of a torchrun or torch.distributed job read disjoint positions of one global order. `state_dict()` after any batch
    resumes there, also in another process and with other threads, ranks or batch size: every remaining record comes
    exactly once.

    >>> loader = ms.Loader(traces, batch_size=32, features=ms.features.layers(token="last"), seed=7, memory="2GB")
    >>> for batch in loader:
    ...     state = loader.state_dict()
    """

    def __init__(
        self,
        collection: Collection,
        *,
        batch_size: Count,
        features: Feature | Sequence[Feature] | None = None,
        seed: int = 0,
        memory: SizeInBytes = "2GB",
        order: OrderName = "auto",
        length_buckets: Count = 1,
        threads: Natural | None = None,
        rank: Natural | None = None,
        world: Count | None = None,
        drop_last: bool = False,
        tail: Tail = "drop",
        pin_memory: bool = False,
        tensors: bool = True,
        notify: Callable[[str], None] = say,
    ) -> None:
        self._memory = parse_bytes(memory)
        _check_memory(collection, self._memory)
        self._budget = batch_budget(collection, self._memory, batch_size=batch_size)
        rank, world = find_ranks(rank, world)
        blocks, pages = split_files(collection, self._memory - self._budget)
        plan = plan_order(collection, order, room=blocks, world=world)
        self._plan = replace(plan, buckets=plan_buckets(plan, length_buckets, batch=batch_size * world))
        self._collection = collection.within(blocks)
        self._pipeline = FeaturePipeline(collection, features, seed=seed, tensors=tensors)
        self._layout = Layout(len(collection), batch_size, rank, world, drop_last, tail)
        self._wanted, self._seed, self._threads = order, seed, threads
        self._pins = pin_memory and _can_pin()
        self._pool = Pool(self._budget)
        self._pages = PageLimit(pages)
        self._epoch: int = 0
        self._start = 0  # the position at which the epoch starts
        self._samples = 0  # positions that all ranks have received
        self._notify = notify  # called once, if the loader chose something

    def __len__(self) -> int:
        """Batches in a full epoch."""
        return self._layout.steps()

    @property
    def remaining(self) -> int:
        """Batches in the next loop: fewer than `len` after resuming within an epoch."""
        return self._layout.steps(self._start)

    @property
    def epoch(self) -> int:
        """The epoch of the next loop, from 0."""
        return self._epoch

    @property
    def held_bytes(self) -> int:
        """Bytes of batches and buffers held now."""
        return self._pool.held_bytes

    @property
    def plan(self) -> str:
        """What was chosen and why, in one line."""
        layout, plan = self._layout, self._plan
        batch_bytes = self._batch_bytes()
        threads, why, _ = self._plan_threads(batch_bytes)
        window = f" of {plan.block * plan.window} records" if plan.mode == "window" else ""
        if plan.buckets.is_used:
            window += f", dealt out by length within {plan.buckets.span} records"
        ranks = f", rank {layout.rank} of {layout.world}" if layout.world > 1 else ""
        ranks += f", {layout.left_out} records left out" if layout.left_out else ""
        return (
            f"{layout.n} records, {len(self)} batches of {layout.batch_size} ({format_bytes(batch_bytes)}){ranks}; "
            f"order {plan.mode}{window}: {plan.why}; {threads} threads: {why}; memory {format_bytes(self._memory)}"
        )

    @checked
    def set_epoch(self, epoch: Natural) -> None:
        """Make the next loop this epoch, from its start (or from the saved position, if it is the resumed epoch)."""
        if epoch != self._epoch:
            self._epoch, self._start, self._samples = epoch, 0, 0

    def state_dict(self) -> dict[str, object]:
        """The position of the loop as plain JSON: every batch it received counts as used."""
        return self._state().to_json()

    @checked
    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Make the next loop resume where `state_dict` was taken."""
        resumed = self._state().resumed(state, any_order=self._wanted == "auto")
        self._plan, self._epoch = resumed.plan, resumed.epoch
        self._start = self._samples = resumed.samples

    def _state(self) -> "State":
        return State(self._seed, self._epoch, self._samples, self._layout.n, self._fingerprint, self._plan)

    @cached_property
    def _fingerprint(self) -> str:
        """Computed once, not per state: it is slow for a store of 10,000 shards or a large subset."""
        return self._collection.fingerprint

    def __iter__(self) -> "Generator[dict[str, object]]":
        layout, start, epoch = self._layout, self._start, self._epoch
        collection = self._collection.in_epoch(epoch)
        numbers = Positions(
            self._plan.order(layout.n, seed=self._seed, epoch=epoch),
            layout,
            start,
            buckets=self._plan.buckets,
            lengths=lambda numbers: self._pipeline.sizes(*collection.resolved(numbers)),
        )
        threads, _, sharers = self._plan_threads(self._batch_bytes())
        heap = Heap(max(self._memory // 8, TRIM_BYTES))
        arriving = max(1, self._memory // (ARRIVING * PART_BYTES * max(threads, 1)))
        if layout.rank == 0 and (self._threads is None or self._wanted == "auto"):
            self._notify(f"loader: {self.plan}")
            self._notify = ignore_message

        steps = layout.steps(start)
        records_of: dict[int, tuple[Collection, Numbers]] = {}

        def cost(step: int) -> int:
            records_of[step] = collection.resolved(numbers.of(step))
            return self._pipeline.cost(*records_of[step])

        def make(step: int) -> tuple[dict[str, object], int]:
            records = records_of.pop(step)
            numbers.read_ahead(step, collection)
            try:
                with self._pool.use(), requests_at_once(arriving), shared_by(sharers):
                    batch, num_bytes = self._pipeline.make(*records, epoch)
                self._pages.enforce()
                heap.trim_malloc()
            except Exception as error:
                error.add_note(f"in batch {step} of epoch {epoch}")
                self._pipeline.blame(*records, epoch, error)
                raise
            if not step:  # the estimate is good now: refuse a budget that a later batch would exceed
                batches = map(numbers.of, range(steps))
                need = self._pipeline.excess(collection, batches, batch_size=layout.batch_size, budget=self._budget)
                check_budget(need or 0, self._budget)
            return (_pin(batch) if self._pins else batch), num_bytes

        self._samples = start
        prefetch = Prefetch(make, cost, steps=steps, threads=threads, ahead=max(threads, 1), budget=self._budget)
        items = prefetch.items()
        try:
            for step in range(1, steps + 1):
                batch = next(items)
                self._samples = layout.samples(start, step)
                yield batch
                del batch  # so that the next one can reuse its memory
        finally:
            items.close()
            numbers.close()
        self._epoch, self._start, self._samples = epoch + 1, 0, 0

    def _plan_threads(self, batch_bytes: int) -> tuple[int, str, int]:
        """The number of threads, why, and how many of them read each batch: half as many batches take memory."""
        size, is_remote = self._layout.batch_size, self._collection.medium.is_remote
        requests = size * -(-batch_bytes // (size * PART_BYTES)) if is_remote else None
        threads, why = plan_threads(self._threads, batch_bytes=batch_bytes, budget=self._budget, requests=requests)
        is_shared = self._threads is None and not is_remote and batch_bytes >= LARGE_BATCH_BYTES
        if not is_shared or available_cores() < SHARERS:
            return threads, why, 1
        return max(threads // SHARERS, 1), f"{why}, {SHARERS} for each batch", SHARERS

    def _batch_bytes(self) -> int:
        """Approximate bytes of a batch, from the mean record."""
        return self._layout.batch_size * (self._collection.medium.num_bytes // max(self._layout.n, 1))


@dataclass(frozen=True)
class Plan:
    """The mode and geometry of an order, and the reason for it."""

    mode: Mode
    block: int
    window: int
    why: str
    buckets: LengthBuckets = LengthBuckets()  # noqa: RUF009 - frozen

    def order(self, n: int, *, seed: int, epoch: int) -> Order:
        return Order(n, seed, epoch, self.mode, self.block, self.window)


def plan_order(collection: Collection, wanted: OrderName, *, room: int, world: int) -> Plan:
    """The order to use when decoded blocks and mapped files may take `room` bytes, the same on all ranks.

    A window gets a third of them: at its end the next one is already in use, and blocks of records do not end where
    compressed blocks do.
    """
    if wanted not in ("auto", "exact", "window", "none"):
        raise ValueError(f"order={wanted!r}: must be one of auto, exact, window, none")
    medium = collection.medium
    record_bytes = max(medium.num_bytes // max(len(collection), 1), 1)
    # Four compressed blocks, so that few are split, but at least 32 blocks per window, so that it mixes well.
    block_bytes = max(min(4 * medium.run_bytes, room // 3 // 32), medium.run_bytes, BLOCK_BYTES)
    block = max(block_bytes // record_bytes, 1)
    window = max(room // 3 // (block * record_bytes), 1)
    if wanted != "auto":
        return Plan(wanted, block, window, "as requested")
    if medium.is_random and record_bytes >= LARGE_RECORD_BYTES:
        return Plan("exact", block, window, f"records of {format_bytes(record_bytes)} are fast to read in any order")
    is_cached = medium.is_random and world == 1  # ranks have different free memory, but must choose the same order
    free = available_bytes() if is_cached else room
    fits = medium.num_bytes <= free
    kind = "free memory" if is_cached else "mapped files" if medium.is_random else "decoded blocks"
    size = f"{format_bytes(medium.num_bytes)} {'fit' if fits else 'do not fit'} in {format_bytes(free)} of {kind}"
    return Plan("exact" if fits else "window", block, window, size)


def plan_buckets(plan: Plan, count: int, *, batch: int) -> LengthBuckets:
    """Buckets of a batch of all ranks, over `count` batches; in order `window`, over at most half of a window."""
    most = plan.block * plan.window // (2 * batch) if plan.mode == "window" else count
    return LengthBuckets(max(min(count, most), 1) * batch, batch)


def _check_memory(collection: Collection, memory: int) -> None:
    """A compressed block is held two or three times while it is decoded, by several threads. Small ones do no harm."""
    medium, least = collection.medium, BLOCKS * collection.medium.run_bytes
    if not medium.is_random and least > max(memory, 32_000_000):
        raise OverBudget(
            f"memory={format_bytes(memory)}: blocks of these files take {format_bytes(medium.run_bytes)}. Give at "
            f"least {format_bytes(least)}, or pack the files"
        )


def batch_budget(collection: Collection, memory: int, *, batch_size: int) -> int:
    """The share of the memory for batches: a quarter if they are small, up to three quarters if they are large.

    The rest is for decoded blocks and mapped files; for compressed files, and for what arrives from a network (70 MB
    over 32 connections), at least half.
    """
    medium = collection.medium
    record_bytes = medium.num_bytes // max(len(collection), 1)
    # Features may take 16 times what is fetched, such as int64 ids with a mask.
    ample = batch_size * record_bytes * 16 * (MAX_THREADS + 2)
    has_little_else = medium.is_random and not medium.is_remote
    return min(max(ample, memory // 4), memory * 3 // 4 if has_little_else else memory // 2)


def split_files(collection: Collection, memory: int) -> tuple[int, int]:
    """The shares for decoded blocks and for mapped pages: of compressed files both are needed, blocks and the index."""
    return (memory, memory) if collection.medium.is_random else (memory * 3 // 4, memory // 4)


def file_share(collection: Collection, memory: int) -> int:
    """The share of the memory for decoded blocks and mapped files when the batch size is unknown."""
    medium = collection.medium
    reads_alone = medium.run_bytes * len(collection) <= 2 * medium.num_bytes  # a record without its neighbours
    return memory // 4 if reads_alone else memory // 2


def plan_threads(wanted: int | None, *, batch_bytes: int, budget: int, requests: int | None = None) -> tuple[int, str]:
    """The number of threads, and why: more than cores if the `requests` of a remote batch leave connections idle."""
    if wanted is not None:
        if wanted < 0:
            raise ValueError(f"threads={wanted}: must be at least 0 (0: use the thread of the loop)")
        return wanted, "as requested"
    # Two batches' requests: while one batch is made of what has arrived, the other's are on their way.
    busy = 0 if requests is None else min(REMOTE_THREADS, -(-2 * CONNECTIONS // max(requests, 1)))
    cores = available_cores()
    room = max(budget // max(batch_bytes, 1) - 1, 1)  # one batch belongs to the consumer
    if room < min(max(cores, busy), MAX_THREADS):
        return room, f"memory for {room + 1} batches"
    return min(max(cores, busy), MAX_THREADS), f"{cores} cores" if busy <= cores else "remote records"


@dataclass(frozen=True)
class State:
    """The complete state of a loader: the seed, the epoch and how many positions all ranks have used."""

    seed: int
    epoch: int
    samples: int
    records: int
    collection: str
    plan: Plan

    def to_json(self) -> dict[str, object]:
        return {
            "version": VERSION,
            "seed": self.seed,
            "epoch": self.epoch,
            "samples": self.samples,
            "records": self.records,
            "collection": self.collection,
            "order": [self.plan.mode, self.plan.block, self.plan.window],
            **(
                {"length_buckets": [self.plan.buckets.span, self.plan.buckets.size]}
                if self.plan.buckets.is_used
                else {}
            ),
        }

    def resumed(self, saved: Mapping[str, object], *, any_order: bool) -> "State":
        """The saved state, if it belongs to the same data and seed (and order, unless any order is allowed)."""
        if saved.get("version") != VERSION:
            raise StateMismatch(f"a loader state of version {saved.get('version')!r}; this version reads {VERSION}")
        mode, block, window = cast("tuple[Mode, int, int]", saved["order"])
        fixed = ["seed", "records", "collection"]
        theirs, mine = ({key: state.get(key) for key in fixed} for state in (saved, self.to_json()))
        if not any_order:  # its geometry depends on the memory, and is taken from the state
            theirs, mine = {**theirs, "order": mode}, {**mine, "order": self.plan.mode}
        if differs := config_diff(theirs, mine):
            raise StateMismatch(f"the state does not fit this loader (saved -> here): {differs}")
        buckets = LengthBuckets(*cast("Sequence[int]", saved.get("length_buckets", [1, 1])))
        plan = Plan(mode, block, window, "as in the state resumed", buckets)
        return replace(self, epoch=cast(int, saved["epoch"]), samples=cast(int, saved["samples"]), plan=plan)


def _can_pin() -> bool:
    import torch

    if torch.cuda.is_available():
        return True
    say("loader: no CUDA device found; pin_memory has no effect")
    return False


def _pin(batch: dict[str, object]) -> dict[str, object]:
    import torch

    return {name: value.pin_memory() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
