"""A weighted mixture of collections, as a collection: which record comes where is a function of seed and epoch."""

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import pyarrow as pa

from millstream.collection import Collection, Medium, Numbers
from millstream.config import config_hash
from millstream.dataset.concat import fetch_from
from millstream.dataset.permutation import Permutation
from millstream.dataset.permutation import mix as mix_bits
from millstream.store.arrow_columns import chunked

MAX_RECORDS = 3 * 10**9  # products of two such numbers fit into 63 bits


class Mixture(Collection):
    """Records of several collections in fixed shares, evenly interleaved. Made by `ms.mix`.

    A collection of which an epoch takes only a part goes on in the next epoch where it stopped; one that is used up
    begins again in another order.
    """

    def __init__(self, parts: Sequence[Collection], counts: Sequence[int], *, seed: int, epoch: int = 0) -> None:
        self.parts = list(parts)
        self.counts = list(counts)
        """How many records of each an epoch has."""
        self._seed = seed
        self._epoch = epoch
        self._starts = np.cumsum([0, *map(len, self.parts)], dtype=np.int64)

    def __len__(self) -> int:
        return sum(self.counts)

    def fetch(self, numbers: Sequence[int] | Numbers, fields: Sequence[str] | None = None) -> object:
        split = self._split(np.asarray(numbers, np.int64))
        return fetch_from([(self.parts[part], rows, at) for part, rows, at in split], fields)

    @property
    def field_names(self) -> list[str]:
        """Those that all have."""
        return [name for name in self.parts[0].field_names if all(name in part.field_names for part in self.parts)]

    def column(self, name: str) -> pa.ChunkedArray:
        chunks = [chunk for part in self.parts for chunk in part.column(name).chunks]
        return chunked(chunks).take(self.record_numbers(np.arange(len(self))))

    def sizes(self, numbers: Numbers, fields: Sequence[str]) -> Numbers:
        out = np.empty(len(numbers), np.int64)
        for part, rows, at in self._split(numbers):
            out[at] = self.parts[part].sizes(rows, fields)
        return out

    @property
    def medium(self) -> Medium:
        media = [part.medium for part in self.parts]
        shares = [count / max(len(part), 1) for part, count in zip(self.parts, self.counts, strict=True)]
        num_bytes = sum(int(m.num_bytes * min(share, 1)) for m, share in zip(media, shares, strict=True))
        # Neighbours here are not neighbours on disk: no window of them would help.
        return Medium(num_bytes, max(m.run_bytes for m in media), is_random=True)

    @property
    def fingerprint(self) -> str:
        parts = [part.fingerprint for part in self.parts]
        return config_hash({"mixed": parts, "counts": self.counts, "seed": self._seed})

    @property
    def default_key(self) -> str | None:
        keys = {part.default_key for part in self.parts}
        return keys.pop() if len(keys) == 1 else None

    def within(self, memory: int) -> Self:
        parts = [part.within(memory // len(self.parts)) for part in self.parts]
        return type(self)(parts, self.counts, seed=self._seed, epoch=self._epoch)

    def in_epoch(self, epoch: int) -> Self:
        parts = [part.in_epoch(epoch) for part in self.parts]
        return type(self)(parts, self.counts, seed=self._seed, epoch=epoch)

    def record_numbers(self, numbers: Numbers) -> Numbers:
        """The numbers the records have in the concatenation of the collections."""
        out = np.empty(len(numbers), np.int64)
        for part, rows, at in self._split(numbers):
            out[at] = rows + self._starts[part]
        return out

    def __repr__(self) -> str:
        shares = ", ".join(f"{count} of {len(part)}" for part, count in zip(self.parts, self.counts, strict=True))
        return f"Mixture({len(self)} records an epoch: {shares})"

    def _split(self, numbers: Numbers) -> list[tuple[int, Numbers, Numbers]]:
        """Part, rows in it and their places among `numbers`."""
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < len(self)):
            raise IndexError(f"record {numbers.min()} to {numbers.max()} of a mixture of {len(self)}")
        found: list[tuple[int, Numbers, Numbers]] = []
        at, left = np.arange(len(numbers)), numbers
        total = len(self)
        for part, count in enumerate(self.counts):
            # Of the first m records of this part and those after it, m * count // total are of this part.
            before, after = (places * count // max(total, 1) for places in (left, left + 1))
            mine = after > before
            if mine.any() or not len(numbers):
                found.append((part, self._rows(part, before[mine]), at[mine]))
            at, left = at[~mine], (left - before)[~mine]
            total -= count
        return found

    def _rows(self, part: int, places: Numbers) -> Numbers:
        """The records at these places of the endless sequence of a collection's permutations."""
        cycles, offsets = np.divmod(places + self._epoch * self.counts[part], len(self.parts[part]))
        rows = np.empty_like(places)
        for cycle in np.unique(cycles).tolist():
            at = cycles == cycle
            rows[at] = Permutation(len(self.parts[part]), mix_bits(self._seed, part, cycle))(offsets[at])
        return rows


def mix(weights: Mapping[Collection, float], seed: int = 0, *, repeat: bool = False) -> Mixture:
    """A mixture of collections in these proportions: as many records as there are without taking one twice.

    With `repeat` there are as many as it takes to have every record of every collection, some of them several times.

    >>> both = ms.mix({trivia: 0.7, nq: 0.3}, seed=7)
    """
    total = sum(weights.values())
    if not weights or min(weights.values()) <= 0:
        raise ValueError("a mixture needs collections with weights above 0")
    for collection in weights:
        if not len(collection):
            raise ValueError(f"{collection!r} has no records to mix")
    lengths = [len(collection) / (weight / total) for collection, weight in weights.items()]
    records = int(max(lengths) if repeat else min(lengths))
    if records > MAX_RECORDS:
        raise ValueError(f"a mixture of {records} records: at most {MAX_RECORDS}")
    exact = [records * weight / total for weight in weights.values()]
    bound = max if repeat else min  # rounding neither loses the last record of one nor asks for one more than it has
    counts = [bound(round(share), len(c)) for c, share in zip(weights, exact, strict=True)]
    return Mixture(list(weights), counts, seed=seed)
