"""Several collections as one."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self, cast

import numpy as np
import pyarrow as pa

from millstream.collection import Collection, Medium, Numbers
from millstream.config import config_hash
from millstream.records import Array
from millstream.store.arrow_columns import chunked
from millstream.store.read_batch import ColumnValues, ReadBatch, join_letters


class Concat(Collection):
    """One collection after the other. Made by `ms.concat`."""

    def __init__(self, parts: Sequence[Collection]) -> None:
        self.parts = list(parts)
        self._starts = np.cumsum([0, *map(len, self.parts)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, number: int) -> object:
        ((part, rows, _),) = self._split(np.array([number], np.int64))
        return self.parts[part][int(rows[0])]

    def fetch(self, numbers: Sequence[int] | Numbers, fields: Sequence[str] | None = None) -> object:
        split = [(self.parts[part], rows, at) for part, rows, at in self._split(np.asarray(numbers, np.int64))]
        return _fetch(split, fields, self.field_names)

    @property
    def field_names(self) -> list[str]:
        """Those that all have."""
        names = self.parts[0].field_names
        return [name for name in names if all(name in part.field_names for part in self.parts)]

    def column(self, name: str) -> pa.ChunkedArray:
        chunks = [chunk for part in self.parts for chunk in part.column(name).chunks]
        return chunked(chunks) if chunks else self.parts[0].column(name)

    def sizes(self, numbers: Numbers, fields: Sequence[str]) -> Numbers:
        out = np.empty(len(numbers), np.int64)
        for part, rows, at in self._split(numbers):
            out[at] = self.parts[part].sizes(rows, fields)
        return out

    @property
    def medium(self) -> Medium:
        media = [part.medium for part in self.parts]
        num_bytes = sum(medium.num_bytes for medium in media)
        return Medium(num_bytes, max(m.run_bytes for m in media), all(m.is_random for m in media))

    @property
    def fingerprint(self) -> str:
        return config_hash({"parts": [part.fingerprint for part in self.parts]})

    @property
    def default_key(self) -> str | None:
        keys = {part.default_key for part in self.parts}
        return keys.pop() if len(keys) == 1 else None

    @property
    def lineage(self) -> str:
        return "+".join(dict.fromkeys(part.lineage for part in self.parts))

    def within(self, memory: int) -> Self:
        return type(self)([part.within(memory // len(self.parts)) for part in self.parts])

    def in_epoch(self, epoch: int) -> Self:
        return type(self)([part.in_epoch(epoch) for part in self.parts])

    def will_need(self, first: Numbers, last: Numbers) -> None:
        for part, rows, ends in self._ranges(first, last):
            part.will_need(rows, ends)

    def release(self, first: Numbers, last: Numbers) -> None:
        for part, rows, ends in self._ranges(first, last):
            part.release(rows, ends)

    def _ranges(self, first: Numbers, last: Numbers) -> Iterator[tuple[Collection, Numbers, Numbers]]:
        for part, rows, at in self._split(first):
            yield self.parts[part], rows, np.minimum(last[at] - self._starts[part], len(self.parts[part]) - 1)

    def __repr__(self) -> str:
        return f"Concat({len(self)} records of {len(self.parts)} collections)"

    def _split(self, numbers: Numbers) -> list[tuple[int, Numbers, Numbers]]:
        """Part, rows in it and their places among `numbers`, for every part that has some."""
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < len(self)):
            raise IndexError(f"record {numbers.min()} to {numbers.max()} of {len(self)}")
        owner = np.searchsorted(self._starts, numbers, side="right") - 1
        found = [(part, np.flatnonzero(owner == part)) for part in np.unique(owner).tolist() or [0]]
        return [(part, numbers[at] - self._starts[part], at) for part, at in found]


def concat(parts: Iterable[Collection]) -> Concat:
    """Several collections of one kind as one, the records of the first before those of the second.

    >>> both = ms.concat([ms.open("traces/"), ms.open("other_traces/")])
    """
    given = list(parts)
    if not given:
        raise ValueError("nothing to put together: give at least one collection")
    return Concat(given)


def _fetch(
    split: Sequence[tuple[Collection, Numbers, Numbers]], fields: Sequence[str] | None, common: Sequence[str]
) -> object:
    """Records of several collections (collection, numbers, places in the result), put in their places."""
    fetched = [collection.fetch(rows, fields) for collection, rows, _ in split]
    order = np.argsort(np.concatenate([at for _, _, at in split]), kind="stable")
    reads = [part for part in fetched if isinstance(part, ReadBatch)]
    if reads and len(reads) < len(fetched):
        raise ValueError("traces and reads do not go into one batch; concatenate or mix collections of one kind")
    columns = [_columns(part) for part in fetched]
    names = [name for name in columns[0] if all(name in part for part in columns) and (fields or name in common)]
    joined = {name: _join([part[name] for part in columns], order) for name in names}
    if not reads:
        return joined
    letters = join_letters([(part.flat, part.offsets, part.quality) for part in reads], order)
    numbers = np.concatenate([part.numbers for part in reads])[order]
    return ReadBatch(numbers, letters[0], letters[1], cast("Mapping[str, ColumnValues]", joined), letters[2])


def _columns(fetched: object) -> "Mapping[str, Array | list[object]]":
    columns = fetched.columns if isinstance(fetched, ReadBatch) else fetched
    return cast("Mapping[str, Array | list[object]]", columns)


def _join(parts: "Sequence[Array | list[object]]", order: Numbers) -> "Array | list[object]":
    if len(parts) == 1:
        return parts[0]
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts) and len({(part.dtype, part.shape[1:]) for part in arrays}) == 1:
        return np.concatenate(arrays)[order]
    rows = [row for part in parts for row in part]
    return [rows[place] for place in order.tolist()]
