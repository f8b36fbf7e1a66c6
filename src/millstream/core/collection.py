"""A collection is records by number, which is all the engine knows about data; a subset is some of them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.core.arguments import checked
from millstream.core.config import config_hash

if TYPE_CHECKING:
    from millstream.core.features import Feature
    from millstream.core.torch_data import RecordDataset, RecordStream


Numbers = NDArray[np.int64]

PIECE = 1 << 20  # records per piece of a column
_BLOCK = 256  # numbers per stored count of the marks before them
_WORDS = _BLOCK // 64
# The bit position of mark r of byte b, at 8 * b + r.
_PLACES = np.concatenate([np.argsort([b >> i & 1 ^ 1 for i in range(8)], kind="stable") for b in range(256)])


@dataclass(frozen=True)
class Medium:
    """How records lie on disk, for choosing an order."""

    num_bytes: int
    """Total size of the records as they are read: decoded, if they are compressed."""
    run_bytes: int
    """How much has to be read, or is worth reading, for one record."""
    is_random: bool
    """Whether a record can be read without its neighbours."""
    is_remote: bool = False
    """Whether reading waits for a network, so that more batches should be on their way."""
    largest_bytes: int | None = None
    """What the largest record needs at most, if that is known without looking at the records."""


class Collection(ABC):
    """Records by number. Safe to use from threads, after fork, and pickled into other processes.

    This is all that the loader, splits and features need, so you can train on your own subclass.

    >>> [isinstance(records, ms.Collection) for records in (traces, reads, traces.subset([3, 1]))]
    [True, True, True]
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, number: int) -> object:
        """One record: a dict of fields, or the record type of its kind."""

    @abstractmethod
    def fetch(self, numbers: Sequence[int] | Numbers, fields: Sequence[str] | None = None) -> object:
        """Columns of many records at once: a dict of columns, or the batch type of its kind.

        >>> columns = traces.fetch([3, 1, 4], ["question", "hidden"])
        """

    @property
    @abstractmethod
    def field_names(self) -> list[str]:
        """The fields that `fetch` takes."""

    @abstractmethod
    def column(self, name: str) -> pa.ChunkedArray:
        """One scalar field of every record, without reading its tensors or sequences."""

    def column_pieces(self, name: str) -> Iterator[pa.ChunkedArray]:
        """The same in pieces, of a multiple of 256 records but for the last, if all of it may not fit in memory."""
        yield self.column(name)

    @abstractmethod
    def sizes(self, numbers: Numbers, fields: Sequence[str]) -> Numbers:
        """Bytes that `fetch` needs for each record."""

    @property
    @abstractmethod
    def medium(self) -> Medium:
        """How the records lie on disk, which decides `order="auto"`."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Sixteen hex digits that change when the records, or their numbers, do."""

    @abstractmethod
    def within(self, memory: int) -> Self:
        """The same records, with at most `memory` bytes of their files mapped or decoded."""

    @property
    def default_key(self) -> str | None:
        """Records with equal values of this field belong together in a split; None: every record is independent."""
        return None

    @property
    def id_field(self) -> str | None:
        """The field that identifies a record, by which labels are joined."""
        return self.default_key

    @property
    def labels_file(self) -> Path | None:
        """The Parquet file of labels next to the records, if there is one; `ms.labelled` joins it."""
        return None

    def _repr_html_(self) -> str:
        """For notebooks."""
        from millstream.core.notebook import collection_html

        return collection_html(self)

    @property
    def lineage(self) -> str:
        """Which splits this is a subset of, so that splitting it again is an independent draw."""
        return ""

    def in_epoch(self, epoch: int) -> Self:
        """The collection in this epoch; only mixtures change."""
        return self

    def record_numbers(self, numbers: Numbers) -> Numbers:
        """The numbers these records have in the collection this one was taken from."""
        return numbers

    def resolved(self, numbers: Numbers) -> "tuple[Collection, Numbers]":
        """The same records in the underlying collection, if this one only renumbers them: numbers are mapped once."""
        return self, numbers

    def will_need(self, first: Numbers, last: Numbers) -> None:
        """Start reading the records from `first[i]` to `last[i]`, for every i, from disk if that helps."""
        return

    def release(self, first: Numbers, last: Numbers) -> None:
        """The records passed to `will_need` are no longer needed."""
        return

    def subset(self, numbers: Sequence[int] | Numbers) -> "Subset":
        """Some of the records, in the order given.

        >>> few = traces.subset([3, 1, 4])
        """
        return subset(self, numbers)

    def dataset(
        self, features: "Feature | Sequence[Feature] | None" = None, *, seed: int = 0, memory: int | str = "2GB"
    ) -> "RecordDataset":
        """A map-style `torch.utils.data.Dataset` for the stock DataLoader, its samplers, Lightning and Accelerate.

        The DataLoader's default collation gives the same batches as `ms.Loader`, each fetched in one call.

        >>> dataset = traces.dataset(ms.features.layers(token="last"))
        >>> loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2)
        """
        from millstream.core.torch_data import RecordDataset  # imports torch

        return RecordDataset(self, features, seed=seed, memory=memory)

    def stream(
        self,
        features: "Feature | Sequence[Feature] | None" = None,
        *,
        batch_size: int | None = None,
        seed: int = 0,
        order: Literal["auto", "exact", "window", "none"] = "auto",
        memory: int | str = "2GB",
        rank: int | None = None,
        world: int | None = None,
        drop_last: bool = False,
    ) -> "RecordStream":
        """A `torch.utils.data.IterableDataset` that shuffles and splits an epoch over ranks and workers.

        With `batch_size` it yields whole batches, for `DataLoader(stream, batch_size=None)`, in the same order for any
        number of workers. Without it, it yields records. `set_epoch` sets the order of the next epoch; Accelerate calls
        it, Lightning does not (call it in `on_train_epoch_end`). Accelerate distributes the batches of a stream to its
        processes itself: pass `rank=0, world=1` there.

        >>> stream = traces.stream(ms.features.layers(token="last"), batch_size=32, seed=7)
        >>> loader = DataLoader(stream, batch_size=None, num_workers=2)
        """
        from millstream.core.torch_data import RecordStream  # imports torch

        return RecordStream(
            self,
            features,
            batch_size=batch_size,
            seed=seed,
            order=order,
            memory=memory,
            rank=rank,
            world=world,
            drop_last=drop_last,
        )


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

    def column_pieces(self, name: str) -> Iterator[pa.ChunkedArray]:
        if len(self) <= PIECE:
            yield self.column(name)
            return
        for first in range(0, len(self), PIECE):
            fetched: Any = self.fetch(np.arange(first, min(first + PIECE, len(self))), [name])
            columns = cast("Mapping[str, Any]", fetched if isinstance(fetched, Mapping) else fetched.columns)
            yield pa.chunked_array([pa.array(columns[name])])

    def sizes(self, numbers: Numbers, fields: Sequence[str]) -> Numbers:
        return self.collection.sizes(self._take(numbers), fields)

    @property
    def medium(self) -> Medium:
        whole = self.collection.medium
        share = len(self) / max(len(self.collection), 1)
        # If neighbours here are not neighbours on disk, a window does not help.
        is_random = whole.is_random or not self.chosen.keeps_neighbours
        return replace(whole, num_bytes=int(whole.num_bytes * share), is_random=is_random)

    @property
    def fingerprint(self) -> str:
        return config_hash({"of": self.collection.fingerprint, "chosen": self.chosen.digest()})

    @property
    def default_key(self) -> str | None:
        return self.collection.default_key

    @property
    def id_field(self) -> str | None:
        return self.collection.id_field

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
        return self.chosen.take(checked_numbers(numbers, len(self)))


@checked
def subset(collection: Collection, numbers: Sequence[int] | Numbers) -> Subset:
    """The records with these numbers, in the order given.

    >>> few = ms.subset(reads, [3, 1, 4])
    """
    own = whole_numbers(numbers).reshape(-1).copy()  # the caller may change theirs
    return Subset(collection, Listed(checked_numbers(own, len(collection))))


def whole_numbers(numbers: Sequence[int] | NDArray[np.integer]) -> Numbers:
    """Record numbers as an array. ValueError for masks, and for fractions, which numpy would cut off."""
    found = np.asarray(numbers)
    if found.size and found.dtype.kind not in "iu":
        raise ValueError(f"expected record numbers, got {found.dtype}; for a mask, pass np.flatnonzero(mask)")
    return found.astype(np.int64, copy=False)


def checked_numbers(numbers: Sequence[int] | Numbers, length: int) -> Numbers:
    """Record numbers from 0; negative ones count from the end."""
    wanted = whole_numbers(numbers)
    first, last = (int(wanted.min()), int(wanted.max())) if len(wanted) else (0, -1)
    if first < -length or last >= length:
        wrong = wanted[(wanted < -length) | (wanted >= length)]
        raise IndexError(f"record {wrong[0]} of {length}")
    return np.where(wanted < 0, wanted + length, wanted) if first < 0 else wanted


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
