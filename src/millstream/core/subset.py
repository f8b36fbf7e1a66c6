"""Some records of a collection, as a collection."""

from collections.abc import Sequence
from typing import Self

import numpy as np
import pyarrow as pa

from millstream.collection import Collection, Medium, Numbers
from millstream.config import config_hash
from millstream.dataset.chosen import Chosen, Listed


class Subset(Collection):
    """The chosen records, numbered from 0. Made by `ms.split` and `collection.subset(numbers)`.

    >>> few = traces.subset([3, 1, 4])
    >>> few.record_numbers(np.array([0])).tolist()
    [3]
    """

    def __init__(self, collection: Collection, chosen: Chosen, *, lineage: str = "") -> None:
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
        # Where neighbours here are not neighbours on disk, no window of them would help.
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

    def within(self, memory: int) -> Self:
        return self._of(self.collection.within(memory))

    def in_epoch(self, epoch: int) -> Self:
        return self._of(self.collection.in_epoch(epoch), epoch)

    def record_numbers(self, numbers: Numbers) -> Numbers:
        return self.collection.record_numbers(self._take(numbers))

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
        if len(wanted) and not (-len(self) <= wanted.min() and wanted.max() < len(self)):
            raise IndexError(f"record {wanted.min()} to {wanted.max()} of a subset of {len(self)}")
        return self.chosen.take(np.where(wanted < 0, wanted + len(self), wanted))


def subset(collection: Collection, numbers: Sequence[int] | Numbers) -> Subset:
    """The records of these numbers, in the order given.

    >>> few = ms.subset(reads, [3, 1, 4])
    """
    given = np.asarray(numbers).reshape(-1)
    if len(given) and given.dtype.kind not in "iu":
        raise ValueError(f"a subset is chosen by record numbers, not by {given.dtype}; of a mask, np.flatnonzero(mask)")
    wanted = given.astype(np.int64)
    if len(wanted) and not (-len(collection) <= wanted.min() and wanted.max() < len(collection)):
        raise IndexError(f"record {wanted.min()} to {wanted.max()} of a collection of {len(collection)}")
    return Subset(collection, Listed(np.where(wanted < 0, wanted + len(collection), wanted)))
