"""What comes out of a collection of reads: one `Read`, or many at once as a `ReadBatch` of flat arrays."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from millstream.records import Bytes
from millstream.source.gather import gather

ColumnValues = NDArray[np.int64] | list[object]


@dataclass(frozen=True, slots=True)
class Read:
    """One record: its name, letters, quality letters (FASTQ), and the columns of its header.

    >>> read = reads[7]
    >>> length, taxon = len(read), read.columns["tax_id"]
    """

    name: str
    sequence: str
    quality: str | None = None
    columns: Mapping[str, object] = field(default_factory=dict[str, object])

    def __len__(self) -> int:
        return len(self.sequence)


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Many reads: read i is `flat[offsets[i]:offsets[i+1]]`.

    Integer columns are int64 arrays; texts, and integers with a None among them, are lists.

    >>> batch = reads.fetch([3, 1, 4])
    >>> letters = batch.flat[batch.offsets[0] : batch.offsets[1]]
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
        """How many letters each read has."""
        return np.diff(self.offsets)

    def sequences(self) -> list[str]:
        """Every read's letters as text."""
        return list(split_text(self.flat, self.offsets))


Letters = tuple[Bytes, NDArray[np.int64], Bytes | None]  # flat, offsets, quality


def join_letters(parts: Sequence[Letters], order: NDArray[np.int64]) -> Letters:
    """The letters of several batches as one, in another order; quality only if all have it."""
    if len(parts) == 1:
        return parts[0]
    lengths = np.concatenate([np.diff(offsets) for _, offsets, _ in parts])[order]
    bases = np.cumsum([0, *(len(flat) for flat, _, _ in parts[:-1])])
    begins = np.concatenate([offsets[:-1] + base for (_, offsets, _), base in zip(parts, bases, strict=True)])[order]
    nothing = np.zeros(len(order), np.int64)
    flat, offsets = gather(np.concatenate([flat for flat, _, _ in parts]), begins, lengths, nothing, nothing)
    grades = [quality for _, _, quality in parts if quality is not None]
    if len(grades) < len(parts):
        return flat, offsets, None
    return flat, offsets, gather(np.concatenate(grades), begins, lengths, nothing, nothing)[0]


def split_text(flat: Bytes, offsets: NDArray[np.int64]) -> Iterator[str]:
    """Flat letters as one text a read."""
    text = flat.tobytes().decode("latin-1")  # one character a byte
    edges = offsets.tolist()
    for start, end in pairwise(edges):
        yield text[start:end]
