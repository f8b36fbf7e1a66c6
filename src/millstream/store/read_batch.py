"""What comes out of a collection of reads: one `Read`, or many at once as a `ReadBatch` of flat arrays."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from millstream.records import Bytes

ColumnValues = NDArray[np.int64] | list[object]


@dataclass(frozen=True, slots=True)
class Read:
    """One record: its name, letters, quality letters (FASTQ), and the columns of its header."""

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
        return np.diff(self.offsets)

    def sequences(self) -> list[str]:
        """Every read's letters as text."""
        return list(split_text(self.flat, self.offsets))


def split_text(flat: Bytes, offsets: NDArray[np.int64]) -> Iterator[str]:
    """Flat letters as one text a read."""
    text = flat.tobytes().decode("latin-1")  # one character a byte
    edges = offsets.tolist()
    for start, end in pairwise(edges):
        yield text[start:end]
