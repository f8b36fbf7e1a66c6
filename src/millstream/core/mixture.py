"""Several collections as one: concatenated, or mixed by weight."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, inf
from typing import Self

import numpy as np
import pyarrow as pa

from millstream.core.arguments import checked
from millstream.core.batches import chunked, join_fetched
from millstream.core.collection import Collection, Medium, Numbers, Subset, whole_numbers
from millstream.core.config import config_hash
from millstream.core.order import Permutation
from millstream.core.order import mix as mix_bits

MAX_RECORDS = 3 * 10**9  # products of two such numbers fit into 63 bits


class Concat(Collection):
    """Collections concatenated. Made by `ms.concat`."""

    def __init__(self, collections: Sequence[Collection]) -> None:
        self.collections = list(collections)
        self._starts = np.cumsum([0, *map(len, self.collections)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, number: int) -> object:
        ((which, rows, _),) = self._split(np.array([number], np.int64))
        return self.collections[which][int(rows[0])]

    def fetch(self, numbers: Sequence[int] | Numbers, fields: Sequence[str] | None = None) -> object:
        split = self._split(whole_numbers(numbers))
        fetched = [self.collections[which].fetch(rows, fields) for which, rows, _ in split]
        order = np.argsort(np.concatenate([at for _, _, at in split]), kind="stable")
        return join_fetched(fetched, order, names=self.field_names if fields is None else None)

    @property
    def field_names(self) -> list[str]:
        """The fields that all collections have."""
        names = self.collections[0].field_names
        return [name for name in names if all(name in one.field_names for one in self.collections)]

    def column(self, name: str) -> pa.ChunkedArray:
        chunks = [chunk for one in self.collections for chunk in one.column(name).chunks]
        return chunked(chunks) if chunks else self.collections[0].column(name)

    def sizes(self, numbers: Numbers, fields: Sequence[str]) -> Numbers:
        out = np.empty(len(numbers), np.int64)
        for which, rows, at in self._split(numbers):
            out[at] = self.collections[which].sizes(rows, fields)
        return out

    @property
    def medium(self) -> Medium:
        media = [one.medium for one in self.collections]
        num_bytes = sum(medium.num_bytes for medium in media)
        is_random, is_remote = all(m.is_random for m in media), any(m.is_remote for m in media)
        largest = [m.largest_bytes for m in media if m.largest_bytes is not None]
        most = max(largest) if len(largest) == len(media) else None
        return Medium(num_bytes, max(m.run_bytes for m in media), is_random, is_remote, most)

    @property
    def fingerprint(self) -> str:
        return config_hash({"parts": [one.fingerprint for one in self.collections]})

    @property
    def default_key(self) -> str | None:
        keys = {one.default_key for one in self.collections}
        return keys.pop() if len(keys) == 1 else None

    @property
    def id_field(self) -> str | None:
        keys = {one.id_field for one in self.collections}
        return keys.pop() if len(keys) == 1 else None

    @property
    def lineage(self) -> str:
        return "+".join(dict.fromkeys(one.lineage for one in self.collections))

    def within(self, memory: int) -> Self:
        return type(self)([one.within(memory // len(self.collections)) for one in self.collections])

    def in_epoch(self, epoch: int) -> Self:
        return type(self)([one.in_epoch(epoch) for one in self.collections])

    def will_need(self, first: Numbers, last: Numbers) -> None:
        for one, rows, ends in self._ranges(first, last):
            one.will_need(rows, ends)

    def release(self, first: Numbers, last: Numbers) -> None:
        for one, rows, ends in self._ranges(first, last):
            one.release(rows, ends)

    def _ranges(self, first: Numbers, last: Numbers) -> Iterator[tuple[Collection, Numbers, Numbers]]:
        for which, rows, at in self._split(first):
            yield (
                self.collections[which],
                rows,
                np.minimum(last[at] - self._starts[which], len(self.collections[which]) - 1),
            )

    def __repr__(self) -> str:
        return f"Concat({len(self)} records of {len(self.collections)} collections)"

    def _split(self, numbers: Numbers) -> list[tuple[int, Numbers, Numbers]]:
        """The collection, rows in it and their positions in `numbers`, for every collection that has some."""
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < len(self)):
            raise IndexError(f"record {numbers.min()} to {numbers.max()} of {len(self)}")
        owner = np.searchsorted(self._starts, numbers, side="right") - 1
        found = [(which, np.flatnonzero(owner == which)) for which in np.unique(owner).tolist() or [0]]
        return [(which, numbers[at] - self._starts[which], at) for which, at in found]


@checked
def concat(collections: Iterable[Collection]) -> Concat:
    """Several collections of one kind, concatenated.

    >>> both = ms.concat([ms.open("traces/"), ms.open("other_traces/")])
    """
    given = list(collections)
    if not given:
        raise ValueError("nothing to concatenate: pass at least one collection")
    return Concat(given)


class Mixture(Subset):
    """Records of several collections in the shares of the epoch, evenly interleaved. Made by `ms.mix`.

    If an epoch takes only some records of a collection, the next epoch takes others; an exhausted collection starts
    over in another order. `numbers` in its batches refer to the concatenation of the collections.
    """

    def __init__(self, collection: Concat, chosen: "Drawn") -> None:
        super().__init__(collection, chosen)
        self.collections = collection.collections
        self.counts = list(chosen.counts)
        """Records of each collection in this epoch."""

    def _of(self, collection: Collection, epoch: int | None = None) -> Self:
        assert isinstance(collection, Concat) and isinstance(self.chosen, Drawn)
        return type(self)(collection, self.chosen if epoch is None else self.chosen.in_epoch(epoch))

    def __repr__(self) -> str:
        shares = ", ".join(
            f"{count} of {len(collection)}" for collection, count in zip(self.collections, self.counts, strict=True)
        )
        return f"Mixture({len(self)} records per epoch: {shares})"


@checked
def mix(weights: Mapping[Collection, float | Sequence[float]], seed: int = 0, *, repeat: bool = False) -> Mixture:
    """A mixture of collections in these proportions, as large as possible without repeating a record in an epoch.

    A list of weights has one for each epoch; the last one stays. All epochs have the same number of records. With
    `repeat`, an epoch has every record of every collection at least once, and some of them several times.

    >>> both = ms.mix({ms.open("traces/"): 0.7, ms.open("other_traces/"): 0.3}, seed=7)
    >>> later_more = ms.mix({ms.open("traces/"): [0.9, 0.7, 0.5], ms.open("other_traces/"): [0.1, 0.3, 0.5]})
    """
    epochs = _by_epoch(list(weights.values()), repeat=repeat)
    for collection in weights:
        if not len(collection):
            raise ValueError(f"{collection!r} has no records to mix")
    lengths = tuple(map(len, weights))
    needs = [
        length * sum(row) / weight for row in epochs for length, weight in zip(lengths, row, strict=True) if weight
    ]
    records = max(needs) if repeat else min(needs)
    if records > MAX_RECORDS:
        raise ValueError(f"a mixture of {records:.0f} records: must be at most {MAX_RECORDS}")
    counts = [_counts(lengths, row, records, repeat) for row in epochs]
    return Mixture(Concat(list(weights)), Drawn(lengths, _evened(counts, repeat=repeat), seed))


@dataclass(frozen=True)
class Drawn:
    """Numbers of a concatenation: `counts[i]` of its `lengths[i]` records of collection i, evenly interleaved."""

    lengths: tuple[int, ...]
    counts_by_epoch: tuple[tuple[int, ...], ...]  # the last one stays
    seed: int
    epoch: int = 0
    keeps_neighbours = False

    @property
    def counts(self) -> tuple[int, ...]:
        return self.counts_by_epoch[min(self.epoch, len(self.counts_by_epoch) - 1)]

    def __len__(self) -> int:
        return sum(self.counts)

    def take(self, positions: Numbers) -> Numbers:
        out = np.empty(len(positions), np.int64)
        at, left = np.arange(len(positions)), positions
        total, start = len(self), 0
        for which, count in enumerate(self.counts):
            # Of the first m records of this and later collections, m * count // total belong to this one.
            before, after = (places * count // max(total, 1) for places in (left, left + 1))
            mine = after > before
            out[at[mine]] = start + self._rows(which, before[mine])
            at, left = at[~mine], (left - before)[~mine]
            total, start = total - count, start + self.lengths[which]
        return out

    def digest(self) -> str:
        first, *others = self.counts_by_epoch
        later = {"later": others} if others else {}
        return config_hash({"lengths": self.lengths, "counts": first, "seed": self.seed, **later})

    def in_epoch(self, epoch: int) -> "Drawn":
        return replace(self, epoch=epoch)

    def _rows(self, which: int, places: Numbers) -> Numbers:
        """Records of one collection: a permutation spans several epochs, or an epoch several permutations."""
        length, count = self.lengths[which], self.counts[which]
        first, start = self._begins_at(which)
        if count <= length:
            return Permutation(length, mix_bits(self.seed, which, first))(start + places)
        rounds = places // length
        out = np.empty_like(places)
        for number in np.unique(rounds).tolist():
            at = rounds == number
            out[at] = Permutation(length, mix_bits(self.seed, which, first + number))(places[at] - number * length)
        return out

    def _begins_at(self, which: int) -> tuple[int, int]:
        """The permutation of a collection that this epoch begins with, and where in it."""
        length, last = self.lengths[which], len(self.counts_by_epoch) - 1
        cycle = start = 0
        for counts in self.counts_by_epoch[: min(self.epoch, last)]:
            cycle, start = _skipped(cycle, start, counts[which], epochs=1, length=length)
        count = self.counts[which]
        cycle, start = _skipped(cycle, start, count, epochs=max(self.epoch - last, 0), length=length)
        return (cycle, start) if start + count <= length or not start else (cycle + 1, 0)


def _skipped(cycle: int, start: int, count: int, *, epochs: int, length: int) -> tuple[int, int]:
    """Where so many epochs of `count` records end, if no epoch of at most `length` spans two permutations."""
    if not count or not epochs:
        return cycle, start
    if count > length:
        return cycle + bool(start) + epochs * ceil(count / length), 0
    here = min((length - start) // count, epochs)
    if here == epochs:
        return cycle, start + epochs * count
    whole, more = divmod(epochs - here - 1, length // count)
    return cycle + 1 + whole, (more + 1) * count


def _by_epoch(weights: Sequence[float | Sequence[float]], *, repeat: bool) -> list[list[float]]:
    """The weights of all collections, for each epoch."""
    given: list[list[float]] = [np.atleast_1d(np.asarray(weight, np.float64)).tolist() for weight in weights]
    epochs = max(map(len, given), default=0)
    if any(len(row) not in (1, epochs) for row in given):
        raise ValueError(f"lists of weights must be equally long, one weight per epoch, not {[len(r) for r in given]}")
    rows = [[row[epoch % len(row)] for row in given] for epoch in range(epochs)]
    may_be_zero = epochs > 1 and not repeat  # leaves a collection out of some epochs
    least = 0 if may_be_zero else min((weight for row in rows for weight in row if weight > 0), default=1)
    if not given or not all(least <= weight < inf for row in rows for weight in row):
        raise ValueError("a mixture needs collections, all with weights above 0")
    if not all(map(any, (*rows, *given))):
        raise ValueError("every epoch of a mixture, and every collection, needs some weights above 0")
    return rows


def _counts(lengths: Sequence[int], weights: Sequence[float], records: float, repeat: bool) -> tuple[int, ...]:
    """Records of each collection: by weight, at least all of them with repeating, at most all without."""
    exact = [records * weight / sum(weights) for weight in weights]
    if repeat:
        return tuple(max(ceil(share - 1e-6), length) for share, length in zip(exact, lengths, strict=True))
    return tuple(min(floor(share + 1e-6), length) for share, length in zip(exact, lengths, strict=True))


def _evened(counts: Sequence[tuple[int, ...]], *, repeat: bool) -> tuple[tuple[int, ...], ...]:
    """All epochs with as many records: rounding differs by a few, which the largest counts gain or lose."""
    totals = [sum(row) for row in counts]
    total = max(totals) if repeat else min(totals)
    evened: list[tuple[int, ...]] = []
    for row in map(list, counts):
        while (missing := total - sum(row)) != 0:
            row[row.index(max(row))] += 1 if missing > 0 else -1
        evened.append(tuple(row))
    return tuple(evened)
