"""Genomes as records to train on: all their sequences, cut into fragments that overlap."""

from collections.abc import Sequence
from typing import Self, cast

import numpy as np
import pyarrow as pa

from millstream.core.collection import Collection, Medium, Numbers, checked_numbers
from millstream.core.config import config_hash
from millstream.reads.batch import ReadBatch
from millstream.reads.files import NAME, QUALITY, SEQUENCE
from millstream.reads.reads import Reads

GENOME_BASES = 20_000  # sequences this long on average are genomes, not reads
CONTIG_BASES = 1_000  # also these, of draft genomes, in files of one class each


class Fragments(Collection):
    """Neighbouring fragments are neighbouring numbers. Columns are those of the sequence that a fragment is of.

    With an `overlap` of k - 1, every k-mer of a sequence is in one fragment. The last of a sequence may be shorter.
    """

    def __init__(self, reads: Reads, *, length: int, overlap: int = 0) -> None:
        assert 0 <= overlap < length
        self.reads, self.length, self.overlap = reads, length, overlap
        lengths = reads.lengths(np.arange(len(reads)))
        counts = np.maximum(-(-(lengths - overlap) // self.step), 1)
        self._lengths, self._ends = lengths, np.cumsum(counts)

    @property
    def step(self) -> int:
        """How far apart neighbours begin."""
        return self.length - self.overlap

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    def __getitem__(self, number: int) -> object:
        batch = self.fetch([number])
        return {SEQUENCE: batch.sequences()[0], **{name: values[0] for name, values in batch.columns.items()}}

    def fetch(self, numbers: Sequence[int] | Numbers, fields: Sequence[str] | None = None) -> ReadBatch:
        wanted = checked_numbers(numbers, len(self))
        owners, starts, ends = self._places(wanted)
        names = self.field_names if fields is None else list(fields)
        columns = self.reads.fetch(owners, [name for name in names if name != SEQUENCE]).columns
        if SEQUENCE not in names:
            return ReadBatch(wanted, np.empty(0, np.uint8), np.zeros(len(wanted) + 1, np.int64), columns)
        found = self.reads.regions(owners, starts, ends)
        return ReadBatch(wanted, found.flat, found.offsets, columns)

    @property
    def field_names(self) -> list[str]:
        return [name for name in self.reads.field_names if name != QUALITY]

    def column(self, name: str) -> pa.ChunkedArray:
        return self.reads.column(name).take(self._places(np.arange(len(self)))[0])

    def sizes(self, numbers: Numbers, fields: Sequence[str]) -> Numbers:
        _, starts, ends = self._places(numbers)
        return (ends - starts) * (SEQUENCE in fields) + 8 * len(fields) + 16

    @property
    def medium(self) -> Medium:
        return self.reads.medium

    @property
    def fingerprint(self) -> str:
        return config_hash({"of": self.reads.fingerprint, "length": self.length, "overlap": self.overlap})

    @property
    def id_field(self) -> str | None:
        return NAME

    def within(self, memory: int) -> Self:
        return cast(Self, Fragments(self.reads.within(memory), length=self.length, overlap=self.overlap))

    def __repr__(self) -> str:
        return f"Fragments({len(self)} of {self.length} bases of {self.reads!r})"

    def _places(self, numbers: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """The sequence that each fragment is of, and its start and end in it."""
        owners = np.searchsorted(self._ends, numbers, side="right")
        before = np.concatenate([[0], self._ends])[owners]
        starts = (numbers - before) * self.step
        return owners, starts, np.minimum(starts + self.length, self._lengths[owners])


def are_genomes(reads: Reads, *, by_file: bool = False) -> bool:
    """Whether these are genomes, to be cut into fragments, rather than reads. `by_file`: each file is of one class."""
    least = CONTIG_BASES if by_file else GENOME_BASES
    return reads.num_bases >= least * max(len(reads), 1) and not any(part.has_quality for part in reads.parts)
