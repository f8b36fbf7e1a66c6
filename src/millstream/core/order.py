"""The order of an epoch as a pure function from position to record number. Knows integers; knows nothing of data."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np

from millstream.dataset.permutation import Numbers, Permutation, mix

Mode = Literal["exact", "window", "none"]
_BLOCKS = -1  # the key of the order of the blocks; windows have the keys 0, 1, 2, ...


@dataclass(frozen=True)
class Order:
    """Which record comes at which position of an epoch: the same for ever for the same arguments.

    `exact` is a permutation of all records. `window` permutes blocks of `block` neighbouring records, takes `window`
    blocks at a time and permutes the records of these: a disk sees large reads, and only `window * block` records are
    in use at once. `none` is the order of the records.

    >>> order = ms.Order(10**12, seed=7, epoch=3)
    >>> order.inverse(order[0:5]).tolist()
    [0, 1, 2, 3, 4]
    """

    n: int
    seed: int = 0
    epoch: int = 0
    mode: Mode = "exact"
    block: int = 1024
    window: int = 1024

    def __post_init__(self) -> None:
        if self.mode not in ("exact", "window", "none"):
            raise ValueError(
                f"mode={self.mode!r}: there is exact, window and none (auto is a loader's, which knows the data)"
            )
        if self.block < 1 or self.window < 1:
            raise ValueError(f"block={self.block}, window={self.window}: a window has at least one block of one record")

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, positions: int) -> int: ...
    @overload
    def __getitem__(self, positions: slice | Numbers) -> Numbers: ...
    def __getitem__(self, positions: int | slice | Numbers) -> int | Numbers:
        """The record numbers at these positions."""
        if isinstance(positions, slice):
            return self._numbers(np.arange(*positions.indices(self.n), dtype=np.int64))
        if isinstance(positions, np.ndarray):
            return self._numbers(positions)
        return int(self._numbers(np.array([positions], np.int64))[0])

    def blocks_of(self, window: int) -> tuple[Numbers, Numbers]:
        """First and last record of every block of a window."""
        count = -(-self.n // self.block)
        slots = np.arange(window * self.window, min((window + 1) * self.window, count), dtype=np.int64)
        blocks = Permutation(count, self.key(_BLOCKS))(slots)
        return blocks * self.block, np.minimum((blocks + 1) * self.block, self.n) - 1

    def inverse(self, numbers: Numbers) -> Numbers:
        """The positions at which these records come."""
        if self.mode == "exact":
            return Permutation(self.n, self.key()).inverse(numbers)
        self._check(numbers)
        return _Windows(self).positions(numbers) if self.mode == "window" else numbers.copy()

    def _numbers(self, positions: Numbers) -> Numbers:
        if self.mode == "exact":
            return Permutation(self.n, self.key())(positions)
        self._check(positions)
        return _Windows(self).numbers(positions) if self.mode == "window" else positions.copy()

    def key(self, *of: int) -> int:
        """The key of one of its permutations."""
        return mix(self.seed, self.epoch, *of)

    def _check(self, values: Numbers) -> None:
        if len(values) and not (int(values.min()) >= 0 and int(values.max()) < self.n):
            raise IndexError(f"{values.min()} to {values.max()} in an order of {self.n} records")


class _Windows:
    """The order `window`. A place is where a record stands once blocks are permuted; the last block may be short."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._size = order.block * order.window  # places of a window
        count = -(-order.n // order.block)
        self._blocks = Permutation(count, order.key(_BLOCKS))
        self._missing = count * order.block - order.n  # in the last block
        last = np.array([count - 1], np.int64)
        # The places of the short block's missing records, which no position has
        self._gap = (int(self._blocks.inverse(last)[0]) + 1) * order.block - self._missing if count else 0

    def numbers(self, positions: Numbers) -> Numbers:
        out = np.empty_like(positions)
        for window, at in _by_value(self._window_of(positions)):
            start, size = self._extent(window)
            shuffle = Permutation(size, self._order.key(window))
            places = start + shuffle(positions[at] - start)
            places = np.where(places >= self._gap, places + self._missing, places) - window * self._size
            slots = places // self._order.block
            first = window * self._order.window
            blocks = self._blocks(np.arange(first, min(first + self._order.window, self._blocks.n), dtype=np.int64))
            out[at] = blocks[slots] * self._order.block + (places - slots * self._order.block)
        return out

    def positions(self, numbers: Numbers) -> Numbers:
        blocks = numbers // self._order.block
        places = self._blocks.inverse(blocks) * self._order.block + (numbers - blocks * self._order.block)
        places = np.where(places >= self._gap + self._missing, places - self._missing, places)
        out = np.empty_like(places)
        for window, at in _by_value(self._window_of(places)):
            start, size = self._extent(window)
            out[at] = start + Permutation(size, self._order.key(window)).inverse(places[at] - start)
        return out

    def _window_of(self, positions: Numbers) -> Numbers:
        """The window of each position: all are full but that of the short block, which ends earlier."""
        short_ends = (self._gap // self._size + 1) * self._size - self._missing
        return np.where(positions < short_ends, positions, positions + self._missing) // self._size

    def _extent(self, window: int) -> tuple[int, int]:
        """First position and number of records of a window."""
        edges = [min(at * self._size, self._order.n + self._missing) for at in (window, window + 1)]
        first, end = (edge - self._missing if edge > self._gap else edge for edge in edges)
        return first, end - first


def _by_value(values: Numbers) -> Iterator[tuple[int, "Numbers | slice"]]:
    """Every value, and where it stands."""
    if len(values) and values[0] == values[-1] and (values == values[0]).all():
        yield int(values[0]), slice(None)
        return
    for value in np.unique(values).tolist():
        yield value, np.flatnonzero(values == value)
