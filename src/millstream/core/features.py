"""Features: record numbers in, a batch of tensors out. Knows nothing about order, threads or kinds of record."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import numpy as np

from millstream.core.arguments import checked
from millstream.core.batches import Batch, collate, fetch_batch
from millstream.core.collection import Collection, Numbers
from millstream.core.order import mix
from millstream.core.record import Array

if TYPE_CHECKING:
    import torch

NUMBERS = "numbers"
_OBJECT_BYTES = 100  # assumed size of a text or a list in a batch
_SIZES_AT_ONCE = 1 << 16  # records
_RECORD_BYTES = 24  # the minimum that `Collection.sizes` returns per record

Transform = Callable[[dict[str, object], np.random.Generator], Mapping[str, object]]


@runtime_checkable
class Feature(Protocol):
    """What a model sees of records. Small and picklable.

    Random draws depend only on (seed, epoch, `batch.numbers`).
    """

    @property
    def fields(self) -> Sequence[str] | None:
        """The fields to fetch; None: all."""
        ...

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        """Named arrays, tensors or lists, one row per record unless the feature says otherwise."""
        ...


@dataclass(frozen=True)
class FieldFeature:
    """Fields of records as they are stored. Made by `ms.features.fields`."""

    fields: tuple[str, ...] | None
    pad: bool

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        """Numbers as arrays, texts as lists, tensors stacked (and padded, with a mask) or a list."""
        out: dict[str, object] = {}
        for name, values in batch.columns.items():
            out |= collate(name, values, pad=self.pad, numbers=batch.numbers)
        return out | dict(batch.padded_fields(self.fields))


@dataclass(frozen=True)
class EachFeature:
    """The output of a function for each record. Made by `ms.features.each`."""

    transform: Transform
    fields: tuple[str, ...] | None
    pad: bool

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        columns = batch.fields_by_record()
        made: list[Mapping[str, object]] = []
        for row, number in enumerate(batch.numbers.tolist()):
            record = {name: values[row] for name, values in columns.items()}
            made.append(self.transform(record, np.random.Generator(np.random.Philox(mix(seed, epoch, number)))))
        out: dict[str, object] = {}
        for name in made[0] if made else ():
            out |= collate(name, [record[name] for record in made], pad=self.pad, numbers=batch.numbers)
        return out


class FeaturePipeline:
    """Fetch, features, tensors: the outputs of all features in one dict, plus `numbers`, the record numbers."""

    def __init__(
        self,
        collection: Collection,
        features: Feature | Sequence[Feature] | None,
        *,
        seed: int,
        tensors: bool = True,
    ) -> None:
        given = [FieldFeature(None, pad=True)] if features is None else features
        self._seed = seed
        self._convert: Callable[[object], object] = to_torch if tensors else lambda value: value
        self._groups = _group(list(given) if isinstance(given, Sequence) else [given])
        for names, _ in self._groups:
            _check_fields(collection, names)
        self._growth = 0.0  # new bytes per byte fetched, the maximum so far
        self._largest: int | None = None  # bytes of the largest record

    def _names(self, collection: Collection) -> list[str]:
        return [name for group, _ in self._groups for name in (collection.field_names if group is None else group)]

    def sizes(self, collection: Collection, numbers: Numbers) -> Numbers:
        """Bytes to fetch for each of these records."""
        return collection.sizes(numbers, self._names(collection))

    def cost(self, collection: Collection, numbers: Numbers) -> int:
        """Bytes needed to make a batch of these records: exact for the fetch, else estimated from earlier batches."""
        return ceil(int(self.sizes(collection, numbers).sum()) * (1 + self._growth))

    def excess(self, collection: Collection, batches: Iterable[Numbers], *, batch_size: int, budget: int) -> int | None:
        """The cost of one of these batches that exceeds the budget, if any does, whatever the number of records."""
        names = self._names(collection)
        known = collection.medium.largest_bytes
        if known is not None and batch_size * known * (1 + self._growth) <= budget:
            return None
        if self._largest is None:
            edges = range(0, len(collection), _SIZES_AT_ONCE)
            parts = (np.arange(at, min(at + _SIZES_AT_ONCE, len(collection)), dtype=np.int64) for at in edges)
            self._largest = max(int(collection.sizes(part, names).max()) for part in parts)
        if batch_size * self._largest * (1 + self._growth) <= budget:
            return None  # even a batch of the largest record alone fits: no need to look at each batch
        remaining = iter(batches)
        while some := list(islice(remaining, max(_SIZES_AT_ONCE // batch_size, 1))):
            starts = np.cumsum([0, *map(len, some[:-1])])
            totals = np.add.reduceat(collection.sizes(np.concatenate(some), names), starts)
            if (need := ceil(int(totals.max()) * (1 + self._growth))) > budget:
                return need
        return None

    def make(self, collection: Collection, numbers: Numbers, epoch: int) -> tuple[dict[str, object], int]:
        """The batch, and its size in bytes."""
        made: dict[str, object] = {}
        fetched_bytes, kept_bytes, fresh_bytes = 0, 0, 0
        for names, features in self._groups:
            batch = fetch_batch(collection, numbers, names)
            span = _span(batch)
            fetched_bytes += span[1] + _RECORD_BYTES * len(numbers)
            for feature in features:
                wanted = batch if len(features) == 1 else _narrowed(batch, feature.fields)
                for name, value in feature(wanted, seed=self._seed, epoch=epoch).items():
                    if name in made:
                        raise ValueError(f"two features give {name!r}; names in a batch must be unique")
                    made[name] = self._convert(value)
                    num_bytes, is_fresh = _bytes_of(made[name], span[0])
                    kept_bytes += num_bytes
                    fresh_bytes += num_bytes if is_fresh else 0
            made.setdefault(NUMBERS, self._convert(batch.numbers))
        self._growth = max(self._growth, fresh_bytes / max(fetched_bytes, 1))
        return made, kept_bytes

    def blame(self, collection: Collection, numbers: Numbers, epoch: int, error: BaseException) -> None:
        """Add to the error of a batch which record caused it, found by making each record alone."""
        for number in numbers.tolist():
            alone = np.array([number], np.int64)
            try:
                self.make(collection, alone, epoch)
            except Exception:
                record = int(collection.record_numbers(alone)[0])
                error.add_note(f"record {record} is the first in its batch that fails")
                return


def fitting_batch(collection: Collection, features: Sequence[Feature], *, memory: int, at_most: int) -> int:
    """`at_most`, or fewer if records are so large that a few batches would fill the memory.

    A feature whose output is much larger than what it is made of says how much: `growth`.
    """
    some = np.unique(np.linspace(0, len(collection) - 1, 32).astype(np.int64)) if len(collection) else np.zeros(0, int)
    named = [collection.field_names if feature.fields is None else feature.fields for feature in features]
    names = list(dict.fromkeys(name for names in named for name in names))
    largest = int(collection.sizes(some, names).max(initial=1))
    growth = max((getattr(feature, "growth", 1) for feature in features), default=1)
    return max(1, min(at_most, memory // 8 // (largest * growth)))


def to_torch(value: object) -> object:
    """Arrays, and lists of them, as torch tensors over the same memory; anything else as it is."""
    import torch

    if isinstance(value, list):
        items = cast("list[object]", value)
        return [to_torch(item) for item in items] if items and isinstance(items[0], np.ndarray) else items
    if not isinstance(value, np.ndarray):
        return value
    array = cast(Array, value)
    if array.dtype.kind not in "biufc":
        return cast("list[object]", array.tolist())
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


def _group(features: Sequence[Feature]) -> list[tuple[list[str] | None, list[Feature]]]:
    """Features that can share one fetch: they need the same layers of every field."""
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
    """`hidden[8,-1]` -> `hidden`, `states[[8,-1], 2]` -> `states`."""
    return re.sub(r"\[[-\d,\s:\[\]]*\]$", "", name)


def _check_fields(collection: Collection, names: Sequence[str] | None) -> None:
    for name in names or ():
        if _plain(name) not in collection.field_names and name not in collection.field_names:
            raise ValueError(
                f"no field {name!r} in these records; their fields are {', '.join(collection.field_names)}"
            )


def _narrowed(batch: Batch, names: Sequence[str] | None) -> Batch:
    """A batch fetched for several features, with only the fields of one."""
    return batch if names is None else batch.narrowed({_plain(name) for name in names})


def _span(batch: Batch) -> tuple[tuple[int, int], int]:
    """The address range of the arrays of a fetched batch, and their size in bytes."""
    arrays = batch.arrays()
    # Of many small arrays; `array.ctypes.data` would take as long as reading them.
    sizes = [array.nbytes for array in arrays]
    starts = [cast(int, array.__array_interface__["data"][0]) for array in arrays]
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    some = [place for place, size in enumerate(sizes) if size]
    return (min((starts[p] for p in some), default=0), max((ends[p] for p in some), default=0)), sum(sizes)


def _bytes_of(value: object, span: tuple[int, int]) -> tuple[int, bool]:
    """Bytes of a feature, and whether they are new rather than views of what was fetched."""
    if isinstance(value, np.ndarray):
        array = cast(Array, value)
        return array.nbytes, not span[0] <= cast(int, array.__array_interface__["data"][0]) < span[1]
    if hasattr(value, "data_ptr"):
        tensor = cast("torch.Tensor", value)
        return tensor.nbytes, not span[0] <= tensor.data_ptr() < span[1]
    if isinstance(value, list):
        items = cast("list[object]", value)
        if items and isinstance(items[0], str):
            return _OBJECT_BYTES * len(items), True
        sizes = [_bytes_of(item, span) for item in items]
        return sum(size for size, _ in sizes), all(fresh for _, fresh in sizes)
    return _OBJECT_BYTES, True


@checked
def fields(*names: str, pad: bool = True) -> FieldFeature:
    """Fields as they are stored; without names, all of them. `hidden[8,-1]` selects two layers of a field.

    Tensors of different shapes are padded with zeros and come with a `<name>_mask`; with `pad=False` they stay a list.

    >>> feature = ms.features.fields("question_id", "hidden[1,-1]")
    >>> batch = next(iter(ms.Loader(traces, batch_size=4, features=feature)))  # hidden, hidden_mask, question_id
    """
    return FieldFeature(names or None, pad)


@checked
def each(transform: Transform, *, fields: Sequence[str] | None = None, pad: bool = True) -> EachFeature:
    """The output of `transform(record, rng)` for each record: a dict of arrays, numbers or texts.

    `rng` is a numpy Generator that depends only on (seed, epoch, record number).

    >>> def noisy(record, rng):
    ...     return {"logprobs": record["logprobs"] + rng.normal(size=record["logprobs"].shape)}
    >>> loader = ms.Loader(traces, batch_size=4, features=ms.features.each(noisy, fields=["logprobs"]))
    """
    return EachFeature(transform, None if fields is None else tuple(fields), pad)
