"""Which positions of an epoch each rank reads, batch by batch. Knows integers; knows nothing of data."""

import os
from dataclasses import dataclass
from typing import Literal

import numpy as np

from millstream.collection import Numbers

Tail = Literal["drop", "pad"]


@dataclass(frozen=True)
class Layout:
    """An epoch of n positions dealt out to `world` ranks: rank r reads positions r, r + world, r + 2 * world, ...

    Every rank has the same number of batches. The last one may be short, and differ by one record between ranks; when
    it has fewer records than there are ranks, they are left out (`drop`: at most world - 1 records), or the first
    records of the epoch come again so that all ranks' last batches are equal (`pad`).
    """

    n: int
    batch_size: int
    rank: int = 0
    world: int = 1
    drop_last: bool = False
    tail: Tail = "drop"

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: at least 1")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank={self.rank} of world={self.world}: ranks are 0 to world - 1")
        if self.tail not in ("drop", "pad"):
            raise ValueError(f"tail={self.tail!r}: there is drop and pad")

    def steps(self, start: int = 0) -> int:
        """How many batches each rank has from global position `start` on."""
        full, left = divmod(max(self.n - start, 0), self.batch_size * self.world)
        if left and not self.drop_last and (left >= self.world or self.tail == "pad"):
            return full + 1
        return full

    @property
    def left_out(self) -> int:
        """How many records no rank gets in a whole epoch."""
        return max(self.n - self.steps() * self.batch_size * self.world, 0)

    def positions(self, start: int, step: int) -> Numbers:
        """The positions of this rank's batch."""
        first = start + step * self.batch_size * self.world
        end = min(first + self.batch_size * self.world, self.n)
        if self.tail == "pad":
            end = first + -(-(end - first) // self.world) * self.world
        return np.arange(first + self.rank, end, self.world, dtype=np.int64) % max(self.n, 1)

    def samples(self, start: int, steps: int) -> int:
        """How many positions of the epoch all ranks together have read after so many batches."""
        return min(start + steps * self.batch_size * self.world, self.n)


def find_ranks(rank: int | None, world: int | None) -> tuple[int, int]:
    """Rank and world as given, of torch.distributed, or of the variables torchrun sets."""
    if (rank is None) != (world is None):
        raise ValueError(f"rank={rank}, world={world}: give both or none")
    if rank is not None and world is not None:
        return rank, world
    import torch.distributed as distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
