"""What comes out of a collection of reads: one `Read`, or many at once as a `ReadBatch` of flat arrays."""

from collections.abc import Collection as Container
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Protocol, Self, cast

import numpy as np
from numpy.typing import NDArray

from millstream.core.batches import arrays_of, join_columns, joined, pad_bytes
from millstream.core.collection import Numbers
from millstream.core.record import Array, Bytes
from millstream.reads.files import Fetched
from millstream.reads.files.texts import gather

ColumnValues = NDArray[np.int64] | list[object]


class Columns(Protocol):
    """Where the columns of reads come from when they are asked for."""

    def columns_of(self, number: int) -> dict[str, object]: ...


class Read:
    """One record: its name, sequence, quality string (FASTQ), and the columns of its header.

    >>> read = reads[7]
    >>> length, taxon = len(read), read.columns["tax_id"]
    """

    __slots__ = ("_columns", "name", "quality", "sequence")

    def __init__(
        self,
        name: str,
        sequence: str,
        quality: str | None = None,
        columns: Mapping[str, object] | tuple[Columns, int] | None = None,
    ) -> None:
        """`columns`, or where to get them from, and under which number, once they are asked for."""
        # By hand: made in 80 ns, and a frozen dataclass in 800.
        self.name = name
        self.sequence = sequence
        self.quality = quality
        self._columns = columns

    @property
    def columns(self) -> Mapping[str, object]:
        """The columns of the header, and those of the mapping."""
        columns = self._columns
        if columns is None or isinstance(columns, tuple):
            self._columns = columns = {} if columns is None else columns[0].columns_of(columns[1])
        return columns

    def with_columns(self, columns: Mapping[str, object]) -> "Read":
        """With these columns added, replacing those of the same name."""
        return Read(self.name, self.sequence, self.quality, {**self.columns, **columns})

    def __len__(self) -> int:
        return len(self.sequence)

    def __eq__(self, other: object) -> bool:
        return self._fields() == other._fields() if isinstance(other, Read) else NotImplemented

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        name, sequence, quality, columns = self._fields()
        return f"Read(name={name!r}, sequence={sequence!r}, quality={quality!r}, columns={columns!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return Read, self._fields()

    def _fields(self) -> tuple[str, str, str | None, Mapping[str, object]]:
        return self.name, self.sequence, self.quality, self.columns


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Many reads: read i is `flat[offsets[i]:offsets[i+1]]`.

    Integer columns are int64 arrays; texts, and integers with a None among them, are lists.

    >>> batch = reads.fetch([3, 1, 4])
    >>> bases = batch.flat[batch.offsets[0] : batch.offsets[1]]
    """

    numbers: NDArray[np.int64]
    flat: Bytes
    offsets: NDArray[np.int64]
    columns: Mapping[str, ColumnValues]
    quality: Bytes | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The length of each read, in bases."""
        return np.diff(self.offsets)

    def sequences(self) -> list[str]:
        """The sequence of each read as text."""
        return list(split_text(self.flat, self.offsets))

    def numbered(self, numbers: NDArray[np.int64]) -> Self:
        """The same reads under other numbers."""
        return replace(self, numbers=numbers)

    def with_columns(self, columns: Mapping[str, object]) -> Self:
        """With these columns added, replacing those of the same name."""
        return replace(self, columns={**self.columns, **columns})

    def narrowed(self, names: Container[str]) -> Self:
        """Only with the columns in `names`, and the quality if it is among them."""
        columns = {name: values for name, values in self.columns.items() if name in names}
        return replace(self, columns=columns, quality=self.quality if "quality" in names else None)

    def joined(self, others: Sequence[Self], order: NDArray[np.int64]) -> Self:
        """The reads of this batch and the others, in another order, with the columns that all have."""
        batches = [self, *others]
        flat, offsets, quality = join_reads([FlatReads(one.flat, one.offsets, one.quality) for one in batches], order)
        numbers = np.concatenate([one.numbers for one in batches])[order]
        columns = cast("Mapping[str, ColumnValues]", join_columns([one.columns for one in batches], order))
        return replace(self, numbers=numbers, flat=flat, offsets=offsets, columns=columns, quality=quality)

    def arrays(self) -> list[Array]:
        """The arrays whose memory it holds."""
        return [self.flat, *([] if self.quality is None else [self.quality]), *arrays_of(self.columns)]

    def padded_fields(self, names: Container[str] | None) -> Mapping[str, object]:
        """Sequences and qualities as bytes, one row per read; zeros and a mask where they differ in length."""
        wanted = names is None or "sequence" in names
        sequences = pad_bytes("sequence", self.flat, self.offsets) if wanted else {}
        return sequences if self.quality is None else sequences | pad_bytes("quality", self.quality, self.offsets)

    def fields_by_record(self) -> Mapping[str, Sequence[object]]:
        """The columns and the sequences as text, one value per read."""
        return {**cast("Mapping[str, Sequence[object]]", self.columns), "sequence": self.sequences()}


class FlatReads(NamedTuple):
    """The bases of many reads: read i is flat[offsets[i]:offsets[i + 1]], its quality the same slice of `quality`."""

    flat: Bytes
    offsets: NDArray[np.int64]
    quality: Bytes | None


def as_list(column: ColumnValues) -> list[object]:
    """The values of a column as Python objects."""
    return column if isinstance(column, list) else column.tolist()


def join_reads(parts: Sequence[FlatReads], order: NDArray[np.int64]) -> FlatReads:
    """The reads of several batches as one, in another order; with quality only if all have it."""
    if len(parts) == 1:
        return parts[0]
    lengths = np.concatenate([np.diff(offsets) for _, offsets, _ in parts])[order]
    firsts = np.cumsum([0, *(len(flat) for flat, _, _ in parts[:-1])])
    begins = np.concatenate([offsets[:-1] + first for (_, offsets, _), first in zip(parts, firsts, strict=True)])[order]
    zeros = np.zeros(len(order), np.int64)
    flat, offsets = gather(np.concatenate([flat for flat, _, _ in parts]), begins, lengths, zeros, zeros)
    qualities = [quality for _, _, quality in parts if quality is not None]
    if len(qualities) < len(parts):
        return FlatReads(flat, offsets, None)
    return FlatReads(flat, offsets, gather(np.concatenate(qualities), begins, lengths, zeros, zeros)[0])


def split_text(flat: Bytes, offsets: NDArray[np.int64]) -> Iterator[str]:
    """Flat bases as one text per read."""
    text = flat.tobytes().decode("latin-1")  # one character per byte
    edges = offsets.tolist()
    for start, end in pairwise(edges):
        yield text[start:end]


def join_parts(parts: Sequence[Fetched], places: Sequence[Numbers | slice]) -> Fetched:
    """What was fetched from several parts, in the requested order."""
    order = np.argsort(np.concatenate([np.asarray(place) for place in places]), kind="stable")
    flat, offsets, quality = join_reads([FlatReads(*part[:3]) for part in parts], order)
    columns = {name: joined([part.columns[name] for part in parts], order) for name in parts[0].columns}
    return Fetched(flat, offsets, quality, columns)
