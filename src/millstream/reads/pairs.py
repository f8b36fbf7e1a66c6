"""Read pairs: mates as neighbours of one collection, whether they are in one file or in two."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from millstream.core.collection import Collection, Numbers, Subset
from millstream.errors import BadSource
from millstream.reads.reads import Part, Reads

CHECKED = 1 << 16  # names per step


@dataclass(frozen=True)
class Alternating:
    """Runs of 2n numbers as 0, n, 1, n + 1, ...: a read of the first half, then its mate in the second. Runs of n
    without mates are as they are.
    """

    runs: tuple[tuple[int, bool], ...]  # n, and whether a second half has the mates
    keeps_neighbours = True  # in each half

    def __len__(self) -> int:
        return sum(n * (1 + has_mates) for n, has_mates in self.runs)

    def take(self, positions: Numbers) -> Numbers:
        sizes = np.array([n for n, _ in self.runs])
        has_mates = np.array([has_mates for _, has_mates in self.runs])
        ends = np.cumsum(sizes * (1 + has_mates))
        run = np.searchsorted(ends, positions, side="right")
        first = ends[run] - sizes[run] * (1 + has_mates[run])
        place = positions - first
        return first + np.where(has_mates[run], place // 2 + place % 2 * sizes[run], place)

    def digest(self) -> str:
        if len(self.runs) == 1:
            return f"alternating {self.runs[0][0]}"
        return "alternating " + " ".join(f"{n}{'+' * has_mates}" for n, has_mates in self.runs)


def shared_names(names: Sequence[str], *, first: int, where: str) -> list[str]:
    """The name of each read pair, without /1 and /2; pairs are numbered from `first` on."""
    bare = [_bare(name) for name in names]
    ones, others = bare[::2], bare[1::2]
    if ones != others:
        place = next(place for place, name in enumerate(ones) if name != others[place])
        raise BadSource(
            f"{where}: pair {first + place + 1} is {names[2 * place]} and {names[2 * place + 1]}, which are not mates. "
            "Mates must have the same name, except for /1 and /2, and be in the same order"
        )
    return ones


def interleaved(reads: Reads) -> Collection:
    """Reads in turn with their mates, where these are in the next file; reads of other files in their order."""
    parts = reads.parts
    starts = np.cumsum([0, *(part.records for part in parts)])
    runs: list[tuple[int, bool]] = []
    place = 0
    while place < len(parts):
        n, has_mates = parts[place].records, False
        if n and place + 1 < len(parts) and parts[place + 1].records:
            first = starts[place]
            one, own, other = map(_bare, header_names(parts, np.array([first, first + (n > 1), starts[place + 1]])))
            has_mates = one == other and (n == 1 or one != own)  # else its own neighbours are mates
        if has_mates and (others := parts[place + 1].records) != n:
            one, other = (parts[at].path for at in (place, place + 1))
            raise BadSource(f"{one} has {n} reads, but {other} has {others}: their reads are not mates")
        runs.append((n, has_mates))
        place += 1 + has_mates
    return Subset(reads, Alternating(tuple(runs))) if any(has_mates for _, has_mates in runs) else reads


def as_pairs(reads: Reads, collection: Collection) -> Collection:
    """Reads with mates as neighbours, which is checked."""
    parts, where = reads.parts, str(reads.parts[0].path)
    if len(collection) % 2:
        raise BadSource(f"{where}: {len(collection)} reads are an odd number, not read pairs. Leave out paired=true")
    for first in range(0, len(collection), CHECKED):
        numbers = collection.record_numbers(np.arange(first, min(first + CHECKED, len(collection))))
        shared_names(header_names(parts, numbers), first=first // 2, where=where)
    return collection


def by_part(parts: Sequence[Part], numbers: Numbers) -> Iterator[tuple[Part, Numbers, Numbers]]:
    """For each part that has some of these records, its rows and their places among `numbers`."""
    starts = np.cumsum([0, *(part.records for part in parts)])
    owner = np.searchsorted(starts, numbers, side="right") - 1
    for place in np.unique(owner).tolist():
        (here,) = np.nonzero(owner == place)
        yield parts[place], numbers[here] - starts[place], here


def header_names(parts: Sequence[Part], numbers: Numbers) -> list[str]:
    """The first word of the header of each read."""
    names = np.empty(len(numbers), object)
    for part, rows, here in by_part(parts, numbers):
        names[here] = part.names_of(rows)
    return names.tolist()


def _bare(name: str) -> str:
    return name[:-2] if name.endswith(("/1", "/2")) else name
