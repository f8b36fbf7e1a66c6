"""Record numbers in, a batch of tensors out: fetch, features, tensors. Knows nothing of order or threads."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import cast

import numpy as np

from millstream.collection import Collection, Numbers
from millstream.dataset.batch import Batch, Feature, fetch_batch
from millstream.dataset.features import fields
from millstream.records import Array
from millstream.store.read_batch import ReadBatch

NUMBERS = "numbers"
_OBJECT_BYTES = 100  # what a text or a list in a batch is taken to need
_RECORD_BYTES = 24  # the least that `Collection.sizes` says of a record


class Recipe:
    """What is made of records: their features, merged into one dict, and `numbers`, the records' own."""

    def __init__(self, collection: Collection, features: "Feature | Sequence[Feature] | None", *, seed: int) -> None:
        given = [fields()] if features is None else features
        self._seed = seed
        self._groups = _group(list(given) if isinstance(given, Sequence) else [given])
        for names, _ in self._groups:
            _check_fields(collection, names)
        self._growth = 0.0  # fresh bytes of the features for each byte fetched, the most seen so far

    def cost(self, collection: Collection, numbers: Numbers) -> int:
        """How many bytes it takes to make a batch of these records; exact for what is fetched, else from experience."""
        names = [name for group, _ in self._groups for name in (collection.field_names if group is None else group)]
        return ceil(int(collection.sizes(numbers, names).sum()) * (1 + self._growth))

    def make(self, collection: Collection, numbers: Numbers, epoch: int) -> "tuple[dict[str, object], int]":
        """The batch, and how many bytes it takes."""
        made: dict[str, object] = {}
        fetched_bytes, kept_bytes, fresh_bytes = 0, 0, 0
        for names, features in self._groups:
            batch = fetch_batch(collection, numbers, names)
            span = _span(batch)
            fetched_bytes += span[1] + _RECORD_BYTES * len(numbers)
            for feature in features:
                asked = batch if len(features) == 1 else _narrowed(batch, feature.fields)
                for name, value in feature(asked, seed=self._seed, epoch=epoch).items():
                    if name in made:
                        raise ValueError(f"two features give {name!r}; a batch has one of each name")
                    made[name] = as_tensor(value)
                    num_bytes, is_fresh = _bytes_of(made[name], span[0])
                    kept_bytes += num_bytes
                    fresh_bytes += num_bytes if is_fresh else 0
            made.setdefault(NUMBERS, as_tensor(batch.numbers))
        self._growth = max(self._growth, fresh_bytes / max(fetched_bytes, 1))
        return made, kept_bytes

    def blame(self, collection: Collection, numbers: Numbers, epoch: int, error: BaseException) -> None:
        """Add to an error of a batch which record it comes from, found by making each one alone."""
        for number in numbers.tolist():
            alone = np.array([number], np.int64)
            try:
                self.make(collection, alone, epoch)
            except Exception:
                record = int(collection.record_numbers(alone)[0])
                error.add_note(f"record {record} is the first in its batch that cannot be made")
                return


def as_tensor(value: object) -> object:
    """Arrays, and lists of them, as torch tensors over the same memory; anything else as it is."""
    import torch

    if isinstance(value, list):
        items = cast("list[object]", value)
        return [as_tensor(item) for item in items] if items and isinstance(items[0], np.ndarray) else items
    if not isinstance(value, np.ndarray):
        return value
    array = cast(Array, value)
    if array.dtype.kind not in "biufc":
        return cast("list[object]", array.tolist())
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


def _group(features: Sequence[Feature]) -> list[tuple[list[str] | None, list[Feature]]]:
    """Features that can share one fetch: none wants other layers of a field than another."""
    groups: list[tuple[dict[str, str] | None, list[Feature]]] = []
    for feature in features:
        wanted = None if feature.fields is None else {_plain(name): name for name in feature.fields}
        for place, (names, members) in enumerate(groups):
            if names is None or wanted is None:
                alike = names is wanted or all(plain == name for plain, name in (names or wanted or {}).items())
                merged = None
            else:
                alike = all(names.get(plain, name) == name for plain, name in wanted.items())
                merged = {**names, **wanted}
            if alike:
                groups[place] = merged, [*members, feature]
                break
        else:
            groups.append((wanted, [feature]))
    return [(None if names is None else list(names.values()), members) for names, members in groups]


def _plain(name: str) -> str:
    """`hidden[8,-1]` without its layers."""
    return re.sub(r"\[[-\d,\s]*\]$", "", name)


def _narrowed(batch: Batch, names: Sequence[str] | None) -> Batch:
    """A batch that was fetched for several features, with what one of them asked for."""
    if names is None:
        return batch
    asked = set(map(_plain, names))
    columns = {name: values for name, values in batch.columns.items() if name in asked}
    if isinstance(batch, ReadBatch):
        return replace(batch, columns=columns, quality=batch.quality if "quality" in asked else None)
    return replace(batch, columns=columns)


def _check_fields(collection: Collection, names: Sequence[str] | None) -> None:
    for name in names or ():
        if _plain(name) not in collection.field_names and name not in collection.field_names:
            raise ValueError(f"no field {name!r} in these records; they have {', '.join(collection.field_names)}")


def _span(batch: Batch) -> tuple[tuple[int, int], int]:
    """The addresses between which the arrays of a fetched batch lie, and how many bytes they have."""
    arrays: list[Array] = [batch.flat] if isinstance(batch, ReadBatch) else []
    if isinstance(batch, ReadBatch) and batch.quality is not None:
        arrays.append(batch.quality)
    for column in cast("Mapping[str, object]", batch.columns).values():
        values = cast("list[object]", column) if isinstance(column, list) else [column]
        arrays += [cast(Array, value) for value in values if isinstance(value, np.ndarray)]
    starts = [array.ctypes.data for array in arrays if array.nbytes]
    ends = [array.ctypes.data + array.nbytes for array in arrays if array.nbytes]
    return (min(starts, default=0), max(ends, default=0)), sum(array.nbytes for array in arrays)


def _bytes_of(value: object, span: tuple[int, int]) -> tuple[int, bool]:
    """Bytes of a feature, and whether they are its own, not those that were fetched."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.nbytes, not span[0] <= value.data_ptr() < span[1]
    if isinstance(value, list):
        items = cast("list[object]", value)
        sizes = [_bytes_of(item, span) for item in items]
        return sum(size for size, _ in sizes), all(fresh for _, fresh in sizes)
    return _OBJECT_BYTES, True
