"""Files of reads to be classified, single ones or the two of each pair in turn, and what the reads are called."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from millstream.collection import Collection, Numbers
from millstream.console import say
from millstream.dataset.batch import Batch, Feature
from millstream.dataset.concat import Concat
from millstream.dataset.features import fields
from millstream.dataset.subset import Subset
from millstream.errors import BadSource
from millstream.store.open_reads import open_reads
from millstream.store.read_paths import expand, watch_index
from millstream.store.reads import Part, Reads

NAME = "name"
CHECKED = 1 << 16  # names at once
Paths = str | Path | Sequence[str | Path]


def open_files(
    reads: Paths, mates: Paths | None = None, *, memory: int, index_dir: str | Path | None = None
) -> tuple[Collection, Sequence[Part]]:
    """All reads, with `mates` each before its mate there; and the files."""

    def opened(paths: Paths) -> list[Reads]:
        """Each on its own: their indexes need not have the same columns."""
        given = [paths] if isinstance(paths, str | Path) else paths
        files = [file for path in given for file in expand(path)]
        share = memory // max(len(files), 1)
        return [open_reads([f], memory=share, index_dir=index_dir, watch=watch_index, notify=say) for f in files]

    files, others = opened(reads), [] if mates is None else opened(mates)
    parts = [part for file in (*files, *others) for part in file.parts]
    if mates is None:
        return files[0] if len(files) == 1 else Concat(files), parts
    first, second = (sum(map(len, some)) for some in (files, others))
    if first != second:
        raise BadSource(f"{first_of(reads)}: has {first} reads, {first_of(mates)} has {second}: they are no mates")
    if same := {part.path for part in parts[: len(files)]} & {part.path for part in parts[len(files) :]}:
        raise BadSource(f"{same.pop()}: is given as its own mates. If neighbours in it are mates: --paired")
    return Subset(Concat([*files, *others]), Alternating(first)), parts


def name_feature(parts: Sequence[Part]) -> Feature:
    """`name`: the first word of each header."""
    return HeaderNames(parts) if any(NAME in part.column_names for part in parts) else fields(NAME)


def first_of(paths: Paths) -> str:
    """What messages call them."""
    return str(paths) if isinstance(paths, str | Path) else str(paths[0])


@dataclass(frozen=True)
class Alternating:
    """The numbers below 2n as 0, n, 1, n + 1, ...: a read of the first half, its mate of the second."""

    n: int
    keeps_neighbours = True  # in each half

    def __len__(self) -> int:
        return 2 * self.n

    def take(self, positions: Numbers) -> Numbers:
        return positions // 2 + positions % 2 * self.n

    def digest(self) -> str:
        return f"alternating {self.n}"


@dataclass(frozen=True)
class HeaderNames:
    """`name`: the first word of each header, where the index calls something else so."""

    parts: Sequence[Part]
    fields: tuple[str, ...] = ()

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        return {NAME: header_names(self.parts, batch.numbers)}


def header_names(parts: Sequence[Part], numbers: Numbers) -> list[str]:
    """The first word of the header of each read."""
    starts = np.cumsum([0, *(part.records for part in parts)])
    owner = np.searchsorted(starts, numbers, side="right") - 1
    names = np.empty(len(numbers), object)
    for place in map(int, np.unique(owner)):
        here = owner == place
        names[here] = parts[place].names_of(numbers[here] - starts[place])
    return names.tolist()


def shared_names(names: Sequence[str], *, first: int, where: str) -> list[str]:
    """The name of each pair of neighbours, without /1 and /2; pairs are counted from `first` on."""
    bare = [_bare(name) for name in names]
    ones, others = bare[::2], bare[1::2]
    if ones != others:
        place = next(place for place, name in enumerate(ones) if name != others[place])
        raise BadSource(
            f"{where}: pair {first + place + 1} is {names[2 * place]} and {names[2 * place + 1]}, which are no mates. "
            "Pairs have the same name, but for /1 and /2, and come in the same order"
        )
    return ones


def as_pairs(reads: Reads, collection: Collection) -> Collection:
    """Reads whose neighbours are mates; of two files that are each other's mates, a read of each in turn."""
    parts, where = reads.parts, str(reads.parts[0].path)
    if collection is reads and len(parts) == 2 and parts[0].records == parts[1].records:
        ends = header_names(parts, np.array([0, parts[0].records]))
        if _bare(ends[0]) == _bare(ends[1]):
            collection = Subset(reads, Alternating(parts[0].records))
    if len(collection) % 2:
        raise BadSource(f"{where}: has {len(collection)} reads, which is no number of pairs. Leave out paired=true")
    for first in range(0, len(collection), CHECKED):
        numbers = collection.record_numbers(np.arange(first, min(first + CHECKED, len(collection))))
        shared_names(header_names(parts, numbers), first=first // 2, where=where)
    return collection


def _bare(name: str) -> str:
    return name[:-2] if name.endswith(("/1", "/2")) else name
