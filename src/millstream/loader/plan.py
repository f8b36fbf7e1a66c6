"""What a loader chooses by itself, and why: the order, its window, the number of threads."""

import os
from dataclasses import dataclass
from typing import Literal

from millstream.collection import Collection
from millstream.config import available_bytes
from millstream.console import format_bytes
from millstream.loader.order import Mode, Order

OrderName = Literal["auto", "exact", "window", "none"]
BLOCK_BYTES = 256 << 10  # neighbouring records that are read together, in the order `window`
LARGE_RECORD_BYTES = 256 << 10  # a disk reads such records at full speed in any order
MAX_THREADS = 8


@dataclass(frozen=True)
class Plan:
    """An order's mode and geometry, and the reason in words."""

    mode: Mode
    block: int
    window: int
    why: str

    def order(self, n: int, *, seed: int, epoch: int) -> Order:
        return Order(n, seed, epoch, self.mode, self.block, self.window)


def plan_order(collection: Collection, wanted: OrderName, *, room: int) -> Plan:
    """The order to use, when decoded blocks and mapped files may take `room` bytes.

    A window takes a third of them: at its end the next one is in use too, and blocks of records do not end where
    compressed blocks do.
    """
    if wanted not in ("auto", "exact", "window", "none"):
        raise ValueError(f"order={wanted!r}: there is auto, exact, window and none")
    medium = collection.medium
    record_bytes = max(medium.num_bytes // max(len(collection), 1), 1)
    # Four compressed blocks, so that few are cut in two, but at least 32 blocks in a window, so that it mixes.
    block_bytes = max(min(4 * medium.run_bytes, room // 3 // 32), medium.run_bytes, BLOCK_BYTES)
    block = max(block_bytes // record_bytes, 1)
    window = max(room // 3 // (block * record_bytes), 1)
    if wanted != "auto":
        return Plan(wanted, block, window, "asked for")
    if medium.is_random and record_bytes >= LARGE_RECORD_BYTES:
        return Plan("exact", block, window, f"records of {format_bytes(record_bytes)} read well in any order")
    free = available_bytes() if medium.is_random else room
    fits = medium.num_bytes <= free
    kind = "free memory" if medium.is_random else "decoded blocks"
    size = f"{format_bytes(medium.num_bytes)} {'fit' if fits else 'do not fit'} into {format_bytes(free)} of {kind}"
    return Plan("exact" if fits else "window", block, window, size)


def batch_budget(collection: Collection, memory: int, *, batch_size: int) -> int:
    """How much of the memory is for batches: a quarter of it if they are small, three quarters if they are not.

    The rest is for decoded blocks and mapped files; of compressed ones at least half.
    """
    medium = collection.medium
    record_bytes = medium.num_bytes // max(len(collection), 1)
    ample = batch_size * record_bytes * 16 * (MAX_THREADS + 2)  # tokens take 16 bytes a letter
    return min(max(ample, memory // 4), memory * 3 // 4 if medium.is_random else memory // 2)


def file_share(collection: Collection, memory: int) -> int:
    """How much of the memory is for decoded blocks and mapped files where the size of batches is not known."""
    medium = collection.medium
    reads_alone = medium.run_bytes * len(collection) <= 2 * medium.num_bytes  # nothing beside the record itself
    return memory // 4 if reads_alone else memory // 2


def plan_threads(wanted: int | None, *, batch_bytes: int, budget: int) -> tuple[int, str]:
    """How many threads, and why."""
    if wanted is not None:
        if wanted < 0:
            raise ValueError(f"threads={wanted}: 0 works in the loop's own thread")
        return wanted, "asked for"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    room = max(budget // max(batch_bytes, 1) - 1, 1)  # one batch is the consumer's
    if room < min(cores, MAX_THREADS):
        return room, f"memory for {room + 1} batches"
    return min(cores, MAX_THREADS), f"{cores} cores"
