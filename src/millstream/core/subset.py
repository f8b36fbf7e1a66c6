"""Some records of a collection, or several collections as one: subsets, concatenations and weighted mixtures."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import ceil, floor
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.core.batches import chunked, join_fetched
from millstream.core.collection import Collection, Medium, Numbers
from millstream.core.config import config_hash
from millstream.core.order import Permutation
from millstream.core.order import mix as mix_bits

_BLOCK = 256  # numbers per stored count of the marks before them
_WORDS = _BLOCK // 64
# The bit position of mark r of byte b, at 8 * b + r.
_PLACES = np.concatenate([np.argsort([b >> i & 1 ^ 1 for i in range(8)], kind="stable") for b in range(256)])


class Subset(Collection):
    """The chosen records, numbered from 0. Made by `ms.split` and `collection.subset(numbers)`.

    >>> few = traces.subset([3, 1, 4])
    >>> few.record_numbers(np.array([0])).tolist()
    [3]
    """

    def __init__(self, collection: Collection, chosen: "Chosen", *, lineage: str = "") -> None:
        self.collection = collection
        self.chosen = chosen
        self._lineage = lineage

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, number: int) -> object:
        return self.collection[int(self._take([number])[0])]

    def fetch(self, numbers: Sequence[int] | Numbers, fields: Sequence[str] | None = None) -> object:
        return self.collection.fetch(self._take(numbers), fields)

    @property
    def field_names(self) -> list[str]:
        return self.collection.field_names

    def column(self, name: str) -> pa.ChunkedArray:
        return self.collection.column(name).take(self._take(np.arange(len(self))))

    def sizes(self, numbers: Numbers, fields: Sequence[str]) -> Numbers:
        return self.collection.sizes(self._take(numbers), fields)

    @property
    def medium(self) -> Medium:
        whole = self.collection.medium
        share = len(self) / max(len(self.collection), 1)
        # If neighbours here are not neighbours on disk, a window does not help.
        return Medium(
            int(whole.num_bytes * share), whole.run_bytes, whole.is_random or not self.chosen.keeps_neighbours
        )

    @property
    def fingerprint(self) -> str:
        return config_hash({"of": self.collection.fingerprint, "chosen": self.chosen.digest()})

    @property
    def default_key(self) -> str | None:
        return self.collection.default_key

    @property
    def lineage(self) -> str:
        return self._lineage or self.collection.lineage

    @property
    def labels_file(self) -> Path | None:
        return self.collection.labels_file

    def within(self, memory: int) -> Self:
        return self._of(self.collection.within(memory))

    def in_epoch(self, epoch: int) -> Self:
        return self._of(self.collection.in_epoch(epoch), epoch)

    def record_numbers(self, numbers: Numbers) -> Numbers:
        return self.collection.record_numbers(self._take(numbers))

    def resolved(self, numbers: Numbers) -> tuple[Collection, Numbers]:
        return self.collection.resolved(self._take(numbers))

    def will_need(self, first: Numbers, last: Numbers) -> None:
        self.collection.will_need(self._take(first), self._take(last))

    def release(self, first: Numbers, last: Numbers) -> None:
        self.collection.release(self._take(first), self._take(last))

    def __repr__(self) -> str:
        return f"Subset({len(self)} of {len(self.collection)} records of {self.collection!r})"

    def _of(self, collection: Collection, epoch: int | None = None) -> Self:
        return type(self)(collection, self.chosen, lineage=self._lineage)

    def _take(self, numbers: Sequence[int] | Numbers) -> Numbers:
        wanted = np.asarray(numbers, np.int64)
        first, last = (int(wanted.min()), int(wanted.max())) if len(wanted) else (0, -1)
        if first < -len(self) or last >= len(self):
            raise IndexError(f"record {first} to {last} of a subset of {len(self)}")
        return self.chosen.take(wanted if first >= 0 else np.where(wanted < 0, wanted + len(self), wanted))


def subset(collection: Collection, numbers: Sequence[int] | Numbers) -> Subset:
    """The records with these numbers, in the order given.

    >>> few = ms.subset(reads, [3, 1, 4])
    """
    given = np.asarray(numbers).reshape(-1)
    if len(given) and given.dtype.kind not in "iu":
        raise ValueError(f"a subset takes record numbers, not {given.dtype}; for a mask, pass np.flatnonzero(mask)")
    wanted = given.astype(np.int64)
    if len(wanted) and not (-len(collection) <= wanted.min() and wanted.max() < len(collection)):
        raise IndexError(f"record {wanted.min()} to {wanted.max()} of a collection of {len(collection)}")
    return Subset(collection, Listed(np.where(wanted < 0, wanted + len(collection), wanted)))


class Chosen(Protocol):
    """Some numbers, by position."""

    @property
    def keeps_neighbours(self) -> bool:
        """Whether neighbours here are near each other among all numbers."""
        ...

    def __len__(self) -> int: ...
    def take(self, positions: Numbers) -> Numbers: ...
    def digest(self) -> str: ...


class Listed:
    """Numbers in the order given."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self.keeps_neighbours = bool((np.diff(numbers) > 0).all())

    def __len__(self) -> int:
        return len(self._numbers)

    def take(self, positions: Numbers) -> Numbers:
        return self._numbers[positions]

    def digest(self) -> str:
        return blake2b(self._numbers.tobytes(), digest_size=8).hexdigest()


class Marked:
    """Numbers in ascending order: one bit for each of all n numbers, and a small index."""

    keeps_neighbours = True

    def __init__(self, masks: Iterable[NDArray[np.bool_]], *, most_listed: int = 1 << 16) -> None:
        """`masks`, concatenated, say for each number below n whether it is in; all but the last have a multiple of 256.

        Up to `most_listed` numbers are also stored as a list, which is ten times faster for small batches.
        """
        packed = [np.packbits(np.pad(mask, (0, -len(mask) % _BLOCK)), bitorder="little") for mask in masks]
        self._words = np.concatenate([np.empty(0, np.uint8), *packed]).view(np.uint64).reshape(-1, _WORDS)
        self._before = np.zeros(len(self._words) + 1, np.int64)
        np.cumsum(np.bitwise_count(self._words).sum(axis=1), out=self._before[1:])
        self._list = self._find(np.arange(len(self))) if len(self) <= most_listed else None

    def __len__(self) -> int:
        return int(self._before[-1])

    def take(self, positions: Numbers) -> Numbers:
        return self._find(positions) if self._list is None else self._list[positions]

    def digest(self) -> str:
        return blake2b(self._words.data, digest_size=8).hexdigest()

    def _find(self, positions: Numbers) -> Numbers:
        blocks = np.searchsorted(self._before, positions, side="right") - 1
        ranks = positions - self._before[blocks]
        word, words, ranks = _pick(self._words[blocks], ranks.astype(np.uint8))
        octet, octets, ranks = _pick(words.view(np.uint8).reshape(-1, 8), ranks)
        return blocks * _BLOCK + word * 64 + octet * 8 + _PLACES[octets.astype(np.int64) * 8 + ranks]


def _pick(columns: NDArray[Any], ranks: NDArray[np.uint8]) -> tuple[Numbers, NDArray[Any], NDArray[np.uint8]]:
    """For each row, the column that holds the mark of this rank, its content, and the rank of the mark in it.

    The counts of 4 or 8 columns fit in one word, so one multiplication sums them and one comparison compares them: as
    fast as a compiled loop, without a compiler.
    """
    num_columns = columns.shape[1]
    wide = np.uint32 if num_columns == 4 else np.uint64
    counts = np.bitwise_count(columns)
    # A full block has 256 marks, which overflows a byte; that only affects the last column, whose end is not used.
    ends = (counts.view(wide) * wide(0x0101010101010101 >> 64 - 8 * num_columns)).view(np.uint8)
    passed = (ends <= ranks[:, None]).view(wide)[:, 0] & wide((1 << 8 * (num_columns - 1)) - 1)
    picked = np.bitwise_count(passed).astype(np.int64)
    at = picked + np.arange(0, columns.size, num_columns)
    return picked, columns.reshape(-1)[at], ranks - ends.reshape(-1)[at] + counts.reshape(-1)[at]


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
        split = self._split(np.asarray(numbers, np.int64))
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
        return Medium(num_bytes, max(m.run_bytes for m in media), all(m.is_random for m in media))

    @property
    def fingerprint(self) -> str:
        return config_hash({"parts": [one.fingerprint for one in self.collections]})

    @property
    def default_key(self) -> str | None:
        keys = {one.default_key for one in self.collections}
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


def concat(collections: Iterable[Collection]) -> Concat:
    """Several collections of one kind, concatenated.

    >>> both = ms.concat([ms.open("traces/"), ms.open("other_traces/")])
    """
    given = list(collections)
    if not given:
        raise ValueError("nothing to concatenate: pass at least one collection")
    return Concat(given)


class Mixture(Subset):
    """Records of several collections in fixed shares, evenly interleaved. Made by `ms.mix`.

    If an epoch takes only some records of a collection, the next epoch takes others; an exhausted collection starts
    over in another order. `numbers` in its batches refer to the concatenation of the collections.
    """

    def __init__(self, collection: Concat, chosen: "Drawn") -> None:
        super().__init__(collection, chosen)
        self.collections = collection.collections
        self.counts = list(chosen.counts)
        """Records of each collection per epoch."""

    def _of(self, collection: Collection, epoch: int | None = None) -> Self:
        assert isinstance(collection, Concat) and isinstance(self.chosen, Drawn)
        return type(self)(collection, self.chosen if epoch is None else self.chosen.in_epoch(epoch))

    def __repr__(self) -> str:
        shares = ", ".join(
            f"{count} of {len(collection)}" for collection, count in zip(self.collections, self.counts, strict=True)
        )
        return f"Mixture({len(self)} records per epoch: {shares})"


def mix(weights: Mapping[Collection, float], seed: int = 0, *, repeat: bool = False) -> Mixture:
    """A mixture of collections in these proportions, as large as possible without repeating a record.

    With `repeat`, an epoch has every record of every collection at least once, and some of them several times.

    >>> both = ms.mix({ms.open("traces/"): 0.7, ms.open("other_traces/"): 0.3}, seed=7)
    """
    total = sum(weights.values())
    if not weights or min(weights.values()) <= 0:
        raise ValueError("a mixture needs collections, all with weights above 0")
    for collection in weights:
        if not len(collection):
            raise ValueError(f"{collection!r} has no records to mix")
    needs = [len(collection) * total / weight for collection, weight in weights.items()]
    records = max(needs) if repeat else min(needs)
    if records > MAX_RECORDS:
        raise ValueError(f"a mixture of {records:.0f} records: must be at most {MAX_RECORDS}")
    lengths = tuple(map(len, weights))
    return Mixture(
        Concat(list(weights)), Drawn(lengths, _counts(lengths, list(weights.values()), records, repeat), seed)
    )


@dataclass(frozen=True)
class Drawn:
    """Numbers of a concatenation: `counts[i]` of its `lengths[i]` records of collection i, evenly interleaved."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    seed: int
    epoch: int = 0
    keeps_neighbours = False

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
        return config_hash({"lengths": self.lengths, "counts": self.counts, "seed": self.seed})

    def in_epoch(self, epoch: int) -> "Drawn":
        return replace(self, epoch=epoch)

    def _rows(self, which: int, places: Numbers) -> Numbers:
        """Records of one collection: a permutation spans several epochs, or an epoch several permutations."""
        length, count = self.lengths[which], self.counts[which]
        if count <= length:
            cycle, turn = divmod(self.epoch, length // count if count else 1)
            return Permutation(length, mix_bits(self.seed, which, cycle))(turn * count + places)
        rounds = places // length
        out = np.empty_like(places)
        for number in np.unique(rounds).tolist():
            at = rounds == number
            cycle = self.epoch * ceil(count / length) + number
            out[at] = Permutation(length, mix_bits(self.seed, which, cycle))(places[at] - number * length)
        return out


def _counts(lengths: Sequence[int], weights: Sequence[float], records: float, repeat: bool) -> tuple[int, ...]:
    """Records of each collection: by weight, at least all of them with repeating, at most all without."""
    exact = [records * weight / sum(weights) for weight in weights]
    if repeat:
        return tuple(max(ceil(share - 1e-6), length) for share, length in zip(exact, lengths, strict=True))
    return tuple(min(floor(share + 1e-6), length) for share, length in zip(exact, lengths, strict=True))
