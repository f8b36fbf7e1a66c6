"""A weighted mixture of collections, as a collection: which record comes where is a function of seed and epoch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor
from typing import Self

import numpy as np

from millstream.collection import Collection, Numbers
from millstream.config import config_hash
from millstream.dataset.concat import Concat
from millstream.dataset.permutation import Permutation
from millstream.dataset.permutation import mix as mix_bits
from millstream.dataset.subset import Subset

MAX_RECORDS = 3 * 10**9  # products of two such numbers fit into 63 bits


@dataclass(frozen=True)
class Drawn:
    """Numbers of a concatenation: `counts[i]` of its `lengths[i]` records of part i, evenly interleaved."""

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
        for part, count in enumerate(self.counts):
            # Of the first m records of this part and those after it, m * count // total are of this part.
            before, after = (places * count // max(total, 1) for places in (left, left + 1))
            mine = after > before
            out[at[mine]] = start + self._rows(part, before[mine])
            at, left = at[~mine], (left - before)[~mine]
            total, start = total - count, start + self.lengths[part]
        return out

    def digest(self) -> str:
        return config_hash({"lengths": self.lengths, "counts": self.counts, "seed": self.seed})

    def in_epoch(self, epoch: int) -> "Drawn":
        return replace(self, epoch=epoch)

    def _rows(self, part: int, places: Numbers) -> Numbers:
        """Records of a part: a permutation serves as many epochs as it has records for, or an epoch takes several."""
        length, count = self.lengths[part], self.counts[part]
        if count <= length:
            cycle, turn = divmod(self.epoch, length // count if count else 1)
            return Permutation(length, mix_bits(self.seed, part, cycle))(turn * count + places)
        rounds = places // length
        out = np.empty_like(places)
        for number in np.unique(rounds).tolist():
            at = rounds == number
            cycle = self.epoch * ceil(count / length) + number
            out[at] = Permutation(length, mix_bits(self.seed, part, cycle))(places[at] - number * length)
        return out


class Mixture(Subset):
    """Records of several collections in fixed shares, evenly interleaved. Made by `ms.mix`.

    A collection of which an epoch takes only a part gives others in the next epoch; one that is used up begins again in
    another order. `numbers` of its batches are those of the concatenation of the collections.
    """

    def __init__(self, collection: Concat, chosen: Drawn) -> None:
        super().__init__(collection, chosen)
        self.parts = collection.parts
        self.counts = list(chosen.counts)
        """How many records of each an epoch has."""

    def _of(self, collection: Collection, epoch: int | None = None) -> Self:
        assert isinstance(collection, Concat) and isinstance(self.chosen, Drawn)
        return type(self)(collection, self.chosen if epoch is None else self.chosen.in_epoch(epoch))

    def __repr__(self) -> str:
        shares = ", ".join(f"{count} of {len(part)}" for part, count in zip(self.parts, self.counts, strict=True))
        return f"Mixture({len(self)} records an epoch: {shares})"


def mix(weights: Mapping[Collection, float], seed: int = 0, *, repeat: bool = False) -> Mixture:
    """A mixture of collections in these proportions: as many records as there are without taking one twice.

    With `repeat` there are as many as it takes to have every record of every collection, some of them several times.

    >>> both = ms.mix({ms.open("traces/"): 0.7, ms.open("other_traces/"): 0.3}, seed=7)
    """
    total = sum(weights.values())
    if not weights or min(weights.values()) <= 0:
        raise ValueError("a mixture needs collections with weights above 0")
    for collection in weights:
        if not len(collection):
            raise ValueError(f"{collection!r} has no records to mix")
    needs = [len(collection) * total / weight for collection, weight in weights.items()]
    records = max(needs) if repeat else min(needs)
    if records > MAX_RECORDS:
        raise ValueError(f"a mixture of {records:.0f} records: at most {MAX_RECORDS}")
    lengths = tuple(map(len, weights))
    return Mixture(
        Concat(list(weights)), Drawn(lengths, _counts(lengths, list(weights.values()), records, repeat), seed)
    )


def _counts(lengths: Sequence[int], weights: Sequence[float], records: float, repeat: bool) -> tuple[int, ...]:
    """How many of each: what the weights say, never less (or more) than there are with (or without) repeating."""
    exact = [records * weight / sum(weights) for weight in weights]
    if repeat:
        return tuple(max(ceil(share - 1e-6), length) for share, length in zip(exact, lengths, strict=True))
    return tuple(min(floor(share + 1e-6), length) for share, length in zip(exact, lengths, strict=True))
