"""The order of an epoch as a pure function from position to record number, and which positions each rank reads.

Knows integers; knows nothing of data.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray

from millstream.core.arguments import checked
from millstream.core.collection import Collection, Numbers
from millstream.core.config import Count, Natural
from millstream.errors import MillstreamError

Mode = Literal["exact", "window", "none"]
_Words = NDArray[np.uint64]
_MASK = 2**64 - 1
_ROUNDS, _SMALL_ROUNDS = 8, 24  # few bits mix slowly: with 8, some orders of 5 numbers are twice as likely
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
_CHUNK = 1 << 14  # numbers per pass, so that working arrays stay in the cache
_BLOCKS, _BUCKETS = -1, -2  # keys of the block permutation and of buckets; windows have the keys 0, 1, 2, ...
_SPANS = 8  # whose records are kept, for the threads that make batches of them


@checked
@dataclass(frozen=True)
class Order:
    """Which record comes at which position of an epoch: always the same for the same arguments.

    `exact` is a permutation of all records. `window` permutes blocks of `block` neighbouring records, takes `window`
    blocks at a time and permutes their records: disk accesses are large, and only `window * block` records are in use
    at a time. `none` keeps the stored order.

    >>> order = ms.Order(10**12, seed=7, epoch=3)
    >>> order.inverse(order[0:5]).tolist()
    [0, 1, 2, 3, 4]
    """

    n: Natural
    seed: int = 0
    epoch: int = 0
    mode: Mode = "exact"
    block: Count = 1024
    window: Count = 1024

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
        """The positions of these records."""
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


class Permutation:
    """The numbers below n, each exactly once, in an order decided by `key`. Takes no memory, however large n is.

    A Feistel network over the smallest power of two that holds n; results outside the range go through it again until
    they fall inside (cycle walking), so it stays a bijection.

    >>> shuffle = Permutation(10**12, key=7)
    >>> shuffle.inverse(shuffle(np.arange(5)))
    array([0, 1, 2, 3, 4])
    """

    def __init__(self, n: int, key: int) -> None:
        if not 0 <= n < 2**63:
            raise ValueError(f"a permutation of {n} numbers: n must be between 0 and 2^63 - 1")
        self.n = n
        bits = max((n - 1).bit_length(), 2)
        self._low_bits = bits // 2
        self._high_bits = bits - self._low_bits
        self._turns = range(_ROUNDS if bits >= 16 else _SMALL_ROUNDS)
        self._keys = [np.uint64(mix(key, turn)) for turn in self._turns]

    def __call__(self, places: Numbers) -> Numbers:
        """The numbers at these places."""
        return self._walk(places, self._turns)

    def inverse(self, numbers: Numbers) -> Numbers:
        """The places of these numbers."""
        return self._walk(numbers, self._turns[::-1])

    def _walk(self, values: Numbers, turns: range) -> Numbers:
        if len(values) and not (int(values.min()) >= 0 and int(values.max()) < self.n):
            raise IndexError(f"{values.min()} to {values.max()} in a permutation of {self.n} numbers")
        out = np.empty(len(values), np.uint64)
        for start in range(0, len(values), _CHUNK):
            out[start : start + _CHUNK] = self._network(values[start : start + _CHUNK].astype(np.uint64), turns)
        (outside,) = np.nonzero(out >= self.n)
        while len(outside):
            again = self._network(out[outside], turns)
            out[outside] = again
            outside = outside[again >= self.n]
        return out.astype(np.int64)

    def _network(self, values: _Words, turns: range) -> _Words:
        low_bits = np.uint64(self._low_bits)
        high, low = values >> low_bits, values & np.uint64((1 << self._low_bits) - 1)
        noise, shifted = np.empty_like(values), np.empty_like(values)
        for turn in turns:
            source, target, bits = (low, high, self._high_bits) if turn % 2 == 0 else (high, low, self._low_bits)
            np.add(source, self._keys[turn], out=noise)
            np.multiply(noise, _FIRST, out=noise)
            np.right_shift(noise, _HALF, out=shifted)
            np.bitwise_xor(noise, shifted, out=noise)
            np.multiply(noise, _SECOND, out=noise)
            np.right_shift(noise, np.uint64(64 - bits), out=noise)
            np.bitwise_xor(target, noise, out=target)
        return (high << low_bits) | low


def mix(*parts: int) -> int:
    """64 pseudo-random bits for a tuple of integers: splitmix64 over each in turn."""
    key = 0
    for part in parts:
        key = ((key ^ (part & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key


def mix_words(numbers: Numbers, *before: int) -> _Words:
    """`mix(*before, number)` for many numbers."""
    key = np.full(len(numbers), mix(*before), np.uint64) ^ numbers.astype(np.uint64)
    key = key + np.uint64(0x9E3779B97F4A7C15)  # arrays wrap around as intended; scalars would warn
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))


class _Windows:
    """The order `window`. A place is the position of a record after permuting blocks; the last block may be short."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._size = order.block * order.window  # places of a window
        count = -(-order.n // order.block)
        self._blocks = Permutation(count, order.key(_BLOCKS))
        self._missing = count * order.block - order.n  # in the last block
        last = np.array([count - 1], np.int64)
        # The places of the records missing from the short block, which no position maps to
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
        """The window of each position: all are full except the one with the short block, which ends earlier."""
        short_ends = (self._gap // self._size + 1) * self._size - self._missing
        return np.where(positions < short_ends, positions, positions + self._missing) // self._size

    def _extent(self, window: int) -> tuple[int, int]:
        """First position and number of records of a window."""
        edges = [min(at * self._size, self._order.n + self._missing) for at in (window, window + 1)]
        first, end = (edge - self._missing if edge > self._gap else edge for edge in edges)
        return first, end - first


def _by_value(values: Numbers) -> Iterator[tuple[int, "Numbers | slice"]]:
    """Every distinct value, and where it occurs."""
    if len(values) and values[0] == values[-1] and (values == values[0]).all():
        yield int(values[0]), slice(None)
        return
    for value in np.unique(values).tolist():
        yield value, np.flatnonzero(values == value)


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


@dataclass(frozen=True)
class LengthBuckets:
    """Deals out the records of every `span` positions again, so that `size` neighbours are of similar length.

    The records of a span are sorted by length and cut into buckets, which come in random order.
    """

    span: int = 1
    size: int = 1

    @property
    def is_used(self) -> bool:
        return self.span > self.size

    def deal(self, numbers: Numbers, lengths: Numbers, *, key: int) -> Numbers:
        """The records of one span in their new order; a bucket that is not full, of the longest, comes last."""
        if (lengths == lengths[0]).all():
            return numbers
        sorted_by_length = numbers[np.argsort(lengths, kind="stable")]
        count = len(numbers) // self.size
        full, rest = np.split(sorted_by_length, [count * self.size])
        return np.concatenate(
            [full.reshape(count, self.size)[Permutation(count, key)(np.arange(count))].reshape(-1), rest]
        )


class Positions:
    """The record numbers of each batch from position `start` on. Safe to use from threads.

    With `buckets`, records are dealt out by the lengths that `lengths` returns.
    """

    def __init__(
        self,
        order: Order,
        layout: Layout,
        start: int,
        *,
        buckets: LengthBuckets = LengthBuckets(),  # noqa: B008 - frozen
        lengths: Callable[[Numbers], Numbers] | None = None,
    ) -> None:
        self._order, self._layout, self._start = order, layout, start
        self._buckets, self._lengths = buckets, lengths
        self._spans: dict[int, Numbers] = {}
        self._chunk: tuple[int, Numbers] = (-1, np.empty(0, np.int64))
        self._lock, self._spans_lock = threading.Lock(), threading.Lock()
        self._windows_requested = -1
        self._reader: threading.Thread | None = None

    def of(self, step: int) -> Numbers:
        """The record numbers of a batch."""
        positions = self._layout.positions(self._start, step)
        if not self._buckets.is_used:
            return self._in_order(positions)
        found = np.empty_like(positions)
        for span, at in _by_value(positions // self._buckets.span):
            found[at] = self._dealt(span)[positions[at] - span * self._buckets.span]
        return found

    def _dealt(self, span: int) -> Numbers:
        """The record numbers of one span, in their new order."""
        with self._spans_lock:
            if span not in self._spans:
                first = span * self._buckets.span
                numbers = self._in_order(np.arange(first, min(first + self._buckets.span, self._order.n)))
                assert self._lengths is not None
                if len(self._spans) >= _SPANS:
                    del self._spans[min(self._spans)]
                key = self._order.key(_BUCKETS, span)
                self._spans[span] = self._buckets.deal(numbers, self._lengths(numbers), key=key)
            return self._spans[span]

    def _in_order(self, positions: Numbers) -> Numbers:
        """The record numbers at these positions of the order."""
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
        batch, span = self._layout.batch_size * self._layout.world, self._buckets.span
        starts = (self._start + step * batch) // span * span, -(-(self._start + (step + 1) * batch) // span) * span
        first, last = (_window_of(position, order) for position in starts)
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
                used = window - 3  # not the one before: a thread may still read it
                if used >= _window_of(self._start, order):
                    collection.release(*order.blocks_of(used))


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
