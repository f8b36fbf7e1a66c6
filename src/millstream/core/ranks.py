"""Which positions of an epoch each rank reads, batch by batch, and the record numbers there."""

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np

from millstream.core.collection import Collection, Numbers
from millstream.core.order import Order
from millstream.errors import MillstreamError

Tail = Literal["drop", "pad"]
CHUNK = 1 << 16  # positions per computation of record numbers


@dataclass(frozen=True)
class Layout:
    """An epoch of n positions distributed over `world` ranks: rank r reads positions r, r + world, r + 2 * world, ...

    Every rank has the same number of batches. The last one may be short, and its size may differ by one record between
    ranks. If fewer records than ranks remain, they are left out (`drop`: at most world - 1 records), or the first
    records of the epoch are repeated to give all ranks equal last batches (`pad`).
    """

    n: int
    batch_size: int
    rank: int = 0
    world: int = 1
    drop_last: bool = False
    tail: Tail = "drop"

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: must be at least 1")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank={self.rank} of world={self.world}: ranks go from 0 to world - 1")
        if self.tail not in ("drop", "pad"):
            raise ValueError(f"tail={self.tail!r}: must be one of drop, pad")

    def steps(self, start: int = 0) -> int:
        """Batches per rank from global position `start` on."""
        full, left = divmod(max(self.n - start, 0), self.batch_size * self.world)
        if left and not self.drop_last and (left >= self.world or self.tail == "pad"):
            return full + 1
        return full

    @property
    def left_out(self) -> int:
        """Records that no rank gets in a full epoch."""
        return max(self.n - self.steps() * self.batch_size * self.world, 0)

    def positions(self, start: int, step: int) -> Numbers:
        """The positions of this rank's batch."""
        first = start + step * self.batch_size * self.world
        end = min(first + self.batch_size * self.world, self.n)
        if self.tail == "pad":
            end = first + -(-(end - first) // self.world) * self.world
        return np.arange(first + self.rank, end, self.world, dtype=np.int64) % max(self.n, 1)

    def samples(self, start: int, steps: int) -> int:
        """Positions of the epoch that all ranks together have read after `steps` batches."""
        return min(start + steps * self.batch_size * self.world, self.n)


class Positions:
    """The record numbers of each batch from position `start` on. Safe to use from threads."""

    def __init__(self, order: Order, layout: Layout, start: int) -> None:
        self._order, self._layout, self._start = order, layout, start
        self._chunk: tuple[int, Numbers] = (-1, np.empty(0, np.int64))
        self._lock = threading.Lock()
        self._windows_requested = -1
        self._reader: threading.Thread | None = None

    def of(self, step: int) -> Numbers:
        """The record numbers of a batch."""
        positions = self._layout.positions(self._start, step)
        if not len(positions):
            return positions
        first, last = int(positions.min()) // CHUNK, int(positions.max()) // CHUNK
        if first != last:
            return self._order[positions]
        with self._lock:
            if self._chunk[0] != first:
                self._chunk = first, self._order[first * CHUNK : (first + 1) * CHUNK]
            return self._chunk[1][positions - first * CHUNK]

    def read_ahead(self, step: int, collection: Collection) -> None:
        """Request the blocks of this and the next window, once, when a batch is the first in its window."""
        order = self._order
        if order.mode != "window":
            return
        batch = self._layout.batch_size * self._layout.world
        first, last = (_window_of(self._start + at * batch, order) for at in (step, step + 1))
        with self._lock:
            since = first if self._windows_requested < 0 else self._windows_requested + 1
            requested = range(since, last + 2)
            self._windows_requested = max(self._windows_requested, last + 1)
            if not requested:
                return
            self.close()  # one at a time
            # Requesting takes as long as the disk does, so another thread requests what is needed later.
            self._reader = threading.Thread(
                target=self._request, args=(requested, collection), name="millstream-read-ahead"
            )
            self._reader.start()

    def close(self) -> None:
        """Wait until all requests are made."""
        if self._reader is not None:
            self._reader.join()

    def _request(self, windows: range, collection: Collection) -> None:
        order = self._order
        with suppress(MillstreamError):  # reading the records will raise the same error
            for window in windows:
                blocks = order.blocks_of(window)
                if len(blocks[0]):
                    collection.will_need(*blocks)
                if window - 3 >= _window_of(
                    self._start, order
                ):  # a thread may still read the window before the previous one
                    collection.release(*order.blocks_of(window - 3))


def find_ranks(rank: int | None, world: int | None) -> tuple[int, int]:
    """Rank and world as given, from torch.distributed, or from the environment that torchrun sets."""
    if (rank is None) != (world is None):
        raise ValueError(f"rank={rank}, world={world}: pass both or neither")
    if rank is not None and world is not None:
        return rank, world
    import torch.distributed as distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _window_of(position: int, order: Order) -> int:
    """The approximate window of a position: the one with the short block may end earlier."""
    return position // (order.block * order.window)
