"""Some records of a collection, as a collection, and how they are chosen: by a list of numbers, or one bit each."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.core.collection import Collection, Medium, Numbers
from millstream.core.config import config_hash

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
