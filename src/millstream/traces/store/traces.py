"""A trace store as a collection: records by number and by id, and fields of many records (`fetch`)."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, cast, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.core.arguments import checked
from millstream.core.collection import Collection, Medium, whole_numbers
from millstream.core.config import Count, config_hash
from millstream.core.console import format_bytes, plural
from millstream.core.memory import empty
from millstream.core.record import Array, Bytes, Schema, Tensor, from_bytes
from millstream.core.remote import is_url, to_path
from millstream.errors import BadSetting
from millstream.traces.store.format import QUESTION_ID, Row, id_field
from millstream.traces.store.ids import IdIndex, open_index
from millstream.traces.store.manifest import LABELS, ShardInfo, list_shards, read_manifest
from millstream.traces.store.plan import WHOLE, Layers, Pick, Plan
from millstream.traces.store.remote_shard import RemoteShard
from millstream.traces.store.shard_reader import ShardReader
from millstream.traces.store.sidecar import read_table

if TYPE_CHECKING:
    import torch

Record = dict[str, object]
SCALAR_BYTES = 64  # estimated memory of a number or text
LABELS_FILE = LABELS
REMOTE_OPENERS = 16  # sidecars requested at once
AHEAD = 4  # records to prefetch when iterating
Planned = tuple[ShardReader, Plan | None]  # None: the tensor is None
Plans = Mapping[str, Sequence[Planned]]


@checked
class Traces(Collection):
    """A trace store open for reading. Opening reads only the manifest; sidecars and shards are read on demand.

    Safe to use from threads, after fork, and pickled into other processes (it reopens by path). Tensors are views of
    the mapped files; writing to one changes only the copy of this process.

    >>> traces = ms.open("traces/")
    >>> hidden = traces[7]["states"]
    >>> last_layer = traces.fetch([3, 1, 4], fields=["states"], layers=-1)["states"]
    """

    def __init__(
        self,
        path: str | Path,
        *,
        verify: Literal["always", "never"] = "always",
        open_shards: Count = 256,
        shards: Sequence[int] | None = None,
        mapped: bool = True,
    ) -> None:
        self.path = to_path(path)
        self._verify: Literal["always", "never"] = verify
        self._open_shards = open_shards
        self._mapped = mapped and not is_url(self.path)
        self._load(None if shards is None else set(shards))

    def refresh(self) -> Self:
        """Include shards sealed since the store was opened."""
        self._load(None)
        return self

    def _load(self, only: set[int] | None) -> None:
        manifest = read_manifest(self.path)
        if only is not None:
            kept = tuple(shard for shard in manifest.shards if shard.number in only)
            manifest = replace(manifest, shards=kept)
        self._manifest = manifest
        self.fields: Schema = manifest.fields
        self._num_bytes = sum(shard.bytes for shard in manifest.shards)
        self._starts = list(accumulate((shard.records for shard in manifest.shards), initial=0))
        # lru_cache is thread-safe: at worst two threads open the same shard twice.
        self._open = lru_cache(maxsize=self._open_shards)(self._open_shard)
        self._opened = set[int]()  # at least once
        self._table: pa.Table | None = None
        self._index: list[IdIndex] | None = None

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, number: int) -> Record: ...
    @overload
    def __getitem__(self, number: slice) -> list[Record]: ...
    def __getitem__(self, number: int | slice) -> Record | list[Record]:
        if isinstance(number, slice):
            return list(self._iterate(range(*number.indices(len(self)))))
        if not hasattr(number, "__index__"):
            raise BadSetting(f"traces[{number!r}]: must be a whole number or a slice. By id: traces.by_id(...)")
        return self._record(number)

    def __iter__(self) -> Iterator[Record]:
        return self._iterate(range(len(self)))

    def fetch(
        self,
        numbers: Sequence[int] | NDArray[np.integer],
        fields: Sequence[str] | None = None,
        layers: Layers = None,
    ) -> "dict[str, Array | torch.Tensor | list[object]]":
        """Columns of many records. Tensors of equal shape are stacked, others are a list of views.

        `layers` selects layers of the fields whose first axis is `layer`: an int drops the axis, a list keeps it.
        `fields=["hidden[8,-1]"]` does so for one field; `states[:, 2]` and `states[[8, -1], 2]` select one index of the
        second axis, which drops it. Only the selected data is read.
        """
        picks = self._fields(fields)
        names = list(picks)
        if layers is not None and not any(self._has_layers(name) for name in names):
            raise ValueError(
                f"layers={layers!r}: none of {', '.join(names)} has a first axis named 'layer'; name it when writing, "
                "as in TraceWriter(..., schema={'hidden': 'float16[layer, token, dim]'})"
            )
        shards, rows = self._locate(numbers)
        wanted = [name for name in names if isinstance(self.fields[name], Tensor)]
        self._open_all(shards)
        located = [(self._open(shard), row) for shard, row in zip(shards, rows, strict=True)] if wanted else []
        every = WHOLE if layers is None else Pick(layers)
        chosen = {name: every if picks[name] is WHOLE else picks[name] for name in wanted}
        plans = {name: [(shard, shard.plan(row, name, chosen[name])) for shard, row in located] for name in wanted}
        tensors = self._views(plans) if self._mapped else self._copies(plans)
        return {name: tensors[name] if name in tensors else self._scalar_column(name, shards, rows) for name in names}

    @property
    def field_names(self) -> list[str]:
        return list(self.fields)

    @property
    def default_key(self) -> str | None:
        return QUESTION_ID if QUESTION_ID in self.fields else None

    @property
    def id_field(self) -> str | None:
        return key if (key := id_field(self.fields)) in self.fields else None

    @property
    def labels_file(self) -> Path | None:
        """The `labels.parquet` of the store, if it exists."""
        return path if (path := self.path / LABELS_FILE).exists() else None

    def sizes(self, numbers: NDArray[np.int64], fields: Sequence[str]) -> NDArray[np.int64]:
        """Bytes that `fetch` needs per record."""
        shards, rows = self._locate(numbers)
        sizes = np.full(len(numbers), SCALAR_BYTES * len(fields), np.int64)
        picks = self._fields(fields)
        self._open_all(shards)
        for index in set(shards):
            (at,) = np.nonzero(np.asarray(shards) == index)
            sizes[at] += self._open(index).sizes(np.asarray(rows)[at], picks)
        return sizes

    @property
    def medium(self) -> Medium:
        run_bytes = self.num_bytes // max(len(self), 1)
        largest = [shard.largest for shard in self.shards if shard.largest is not None]
        most = max(largest, default=0) + SCALAR_BYTES * len(self.fields) if len(largest) == len(self.shards) else None
        return Medium(self.num_bytes, run_bytes, is_random=True, is_remote=is_url(self.path), largest_bytes=most)

    @property
    def fingerprint(self) -> str:
        shards = [[shard.number, shard.records, shard.sidecar_crc32c] for shard in self._manifest.shards]
        return config_hash({"shards": shards})

    def within(self, memory: int) -> Self:
        """The same records, read instead of mapped: tensors are copies, and no file stays in memory."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), _mapped=False)
        return copy

    def find(self, record_id: object) -> int:
        """The number of the first record with this id; KeyError if there is none."""
        key = id_field(self.fields)
        if key not in self.fields:
            raise KeyError(f"{self.path}: its records have no {key!r}, only {', '.join(self.fields)}")
        if self._index is None:
            self._index = open_index(self.path, self._manifest.shards, field=key)
        position = {shard.number: index for index, shard in enumerate(self._manifest.shards)}
        places = sorted({place for index in self._index for place in index.find(record_id)})
        for number, row in places:
            shard = position.get(number)
            if shard is None or row >= self._manifest.shards[shard].records:
                continue  # the index covers a shard that was replaced since
            found = self._open(shard).value(row, key)
            if None not in (found, record_id) and str(found) == str(record_id):
                return self._starts[shard] + row
        raise KeyError(f"{self.path}: no record with {key} {record_id!r}")

    def by_id(self, record_id: object) -> Record:
        """The first record with this id, found in O(1)."""
        return self._record(self.find(record_id))

    @property
    def shards(self) -> tuple[ShardInfo, ...]:
        """Every sealed shard: number, records, bytes and seconds of writing time."""
        return self._manifest.shards

    @property
    def config(self) -> Mapping[str, object]:
        """The configuration the store was written with."""
        return self._manifest.config

    @property
    def compression(self) -> str:
        return self._manifest.compression

    @property
    def num_bytes(self) -> int:
        """Bytes of all sealed shards."""
        return self._num_bytes

    @property
    def table(self) -> pa.Table:
        """All scalars and texts as one Arrow table, read from the sidecars on first use."""
        if self._table is None:
            self._table = read_table(self.path, self._manifest)
        return self._table

    @property
    def ids(self) -> list[object]:
        """The id of every record, in record order: its `record_id`, or `question_id` if there is none."""
        return self.column(id_field(self.fields)).to_pylist()

    def column(self, name: str) -> pa.ChunkedArray:
        """One scalar field of every record, read from the sidecars and not kept."""
        if isinstance(self.fields.get(name), Tensor | None):
            raise KeyError(f"{self.path}: no scalar field {name!r}; it has {', '.join(self.fields)}")
        return read_table(self.path, self._manifest, [name]).column(name)

    def locate(self, number: int) -> tuple[int, int]:
        """The index in `shards` of the shard of a record, and its row there."""
        number = self._check(number)
        shard = bisect_right(self._starts, number) - 1
        return shard, number - self._starts[shard]

    def row(self, number: int) -> Row:
        """What the sidecar stores of a record: scalars, and offset, shape and checksums of its tensors."""
        shard, row = self.locate(number)
        return self._open(shard).sidecar.row(row)

    def close(self) -> None:
        """Close the mapped files; existing views stay valid."""
        self._open.cache_clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        # With the current shards, so that another process numbers the records the same while a writer is running.
        shards = np.array([shard.number for shard in self._manifest.shards], np.int32)
        return _reopen, (str(self.path), self._verify, self._open_shards, shards.tobytes(), self._mapped)

    def __repr__(self) -> str:
        is_local = not is_url(self.path)
        open_shards = len(list_shards(self.path)[1]) if is_local and self.path.exists() else 0
        unsealed = f", {plural(open_shards, 'shard')} not sealed yet" if open_shards else ""
        fields = ", ".join(f"{name} {kind}" for name, kind in self.fields.items())
        size = f"{len(self)} records in {plural(len(self.shards), 'shard')}, {format_bytes(self.num_bytes)}"
        return f"Traces({str(self.path)!r}: {size}{unsealed})\n  {fields}"

    def _check(self, number: int) -> int:
        if not -len(self) <= number < len(self):
            raise IndexError(f"record {number} of {len(self)} in {self.path}")
        return number % len(self)

    def _fields(self, fields: Sequence[str] | None) -> dict[str, Pick]:
        """Field names and what is wanted of them: `hidden[8,-1]` is {"hidden": Pick([8, -1])}."""
        if isinstance(fields, str):
            raise ValueError(f"fields must be a list of names, as in fields=[{fields!r}]")
        wanted: dict[str, Pick] = {}
        for name in self.fields if fields is None else fields:
            plain, pick = (None if name in self.fields else Pick.parse(name)) or (name, WHOLE)
            if plain not in self.fields:
                raise ValueError(f"{self.path}: no field {plain!r}; it has {', '.join(self.fields)}")
            if pick.layers is not None and not self._has_layers(plain):
                raise ValueError(f"{self.path}: {name!r}: the first axis of {plain!r} is not named 'layer'")
            kind = self.fields[plain]
            if pick.second is not None and not (isinstance(kind, Tensor) and len(kind.axes) > 1):
                raise ValueError(f"{self.path}: {name!r}: {plain!r} is {kind}, which has no second axis")
            wanted[plain] = pick
        return wanted

    def _has_layers(self, name: str) -> bool:
        kind = self.fields[name]
        return isinstance(kind, Tensor) and kind.axes[:1] == ("layer",)

    def _locate(self, numbers: Sequence[int] | NDArray[np.integer]) -> tuple[list[int], list[int]]:
        """The shard and the row of each record."""
        wanted = whole_numbers(numbers)
        if len(wanted) <= 16:  # for a few, numpy is slower
            places = [self.locate(number) for number in wanted.tolist()]
            return [shard for shard, _ in places], [row for _, row in places]
        if (wrong := wanted[(wanted < -len(self)) | (wanted >= len(self))]).size:
            self._check(int(wrong[0]))
        wanted = wanted % len(self)
        shards = np.searchsorted(self._starts, wanted, side="right") - 1
        return shards.tolist(), (wanted - np.asarray(self._starts)[shards]).tolist()

    def _open_shard(self, index: int) -> ShardReader:
        info = self._manifest.shards[index]
        verify = self._verify == "always"
        return self._reader(self.path, info, first=self._starts[index], verify=verify, fields=self.fields)

    @property
    def _reader(self) -> type[ShardReader]:
        return RemoteShard if is_url(self.path) else ShardReader

    def _open_all(self, shards: Sequence[int]) -> None:
        """Open remote shards at once: each waits for its sidecar, the first time."""
        if is_url(self.path) and len(wanted := set(shards) - self._opened) > 1:
            self._opened |= wanted
            with ThreadPoolExecutor(min(len(wanted), REMOTE_OPENERS)) as threads:
                deque(threads.map(self._open, list(wanted)[: self._open_shards]), maxlen=0)

    def _record(self, number: int) -> Record:
        index, row = self.locate(number)
        shard = self._open(index)
        shard.will_need_record(row)
        values = shard.record(row)
        return {name: values[name] for name in self.fields}

    def _iterate(self, numbers: range) -> Iterator[Record]:
        for position, number in enumerate(numbers):
            for ahead in numbers[position + AHEAD : position + AHEAD + 1]:
                index, row = self.locate(ahead)
                self._open(index).will_need_record(row)
            yield self._record(number)

    def _views(self, plans: Plans) -> "dict[str, Array | torch.Tensor | list[object]]":
        """Tensors of equal shape stacked, others as views of the mapped files."""
        for column in plans.values():  # prefetch everything before the first read
            for shard, plan in column:
                shard.will_need(plan)
        columns: dict[str, Array | torch.Tensor | list[object]] = {}
        for name, column in plans.items():
            if not _are_alike(column):
                columns[name] = [plan and shard.tensor(plan) for shard, plan in column]
                continue
            out = np.empty((len(column), _num_bytes(column[0][1])), np.uint8)
            for (shard, plan), part in zip(column, out, strict=True):
                assert plan is not None
                shard.copy(plan, part)
            columns[name] = _stacked(column, out.reshape(-1))
        return columns

    def _copies(self, plans: Plans) -> "dict[str, Array | torch.Tensor | list[object]]":
        """The same, read into one block of memory; tensors that cannot be stacked are aligned to 64 bytes."""
        starts: dict[str, list[int]] = {}
        total = 0
        alike = {name: _are_alike(column) for name, column in plans.items()}
        for name, column in plans.items():
            gap = 1 if alike[name] else 64
            starts[name] = list(accumulate((-(-_num_bytes(plan) // gap) * gap for _, plan in column), initial=total))
            total = -(-starts[name][-1] // 64) * 64
        memory = cast(Bytes, empty(total, np.uint8))
        columns: dict[str, Array | torch.Tensor | list[object]] = {}
        parts: list[tuple[ShardReader, Plan, Bytes]] = []
        for name, column in plans.items():
            tensors: list[object] = []
            for (shard, plan), at in zip(column, starts[name], strict=False):
                part = memory[at : at + _num_bytes(plan)]
                if plan is not None:
                    parts.append((shard, plan, part))
                if not alike[name]:
                    tensors.append(plan and from_bytes(plan.kind, plan.shape, part))
            whole = memory[starts[name][0] : starts[name][-1]]
            columns[name] = _stacked(column, whole) if alike[name] else tensors
        self._reader.copy_all(parts)
        return columns

    def _scalar_column(self, name: str, shards: Sequence[int], rows: Sequence[int]) -> "Array | list[object]":
        """Numbers as an array; texts, lists and columns with None as a list."""
        arrays = [self._open(shard).sidecar.numbers(name) for shard in shards]
        numbers = [array[row] for array, row in zip(arrays, rows, strict=True) if array is not None]
        if numbers and len(numbers) == len(rows):
            return np.array(numbers)
        values: list[object] = [self._open(shard).value(row, name) for shard, row in zip(shards, rows, strict=True)]
        if values and all(isinstance(value, bool | int | float) for value in values):
            return np.array(values)
        return values


def _are_alike(column: Sequence[Planned]) -> bool:
    """Whether all tensors have the same shape and order of bytes, so that they can be stacked."""
    first = column[0][1] if column else None
    return first is not None and all(
        plan is not None and plan.shape == first.shape and plan.kind.sliced == first.kind.sliced for _, plan in column
    )


def _stacked(column: Sequence[Planned], data: Bytes) -> "Array | torch.Tensor":
    plan = column[0][1]
    assert plan is not None
    return from_bytes(plan.kind, (len(column), *plan.shape), data)


def _num_bytes(plan: Plan | None) -> int:
    return 0 if plan is None else plan.num_bytes


def _reopen(path: str, verify: Literal["always", "never"], open_shards: int, shards: bytes, mapped: bool) -> Traces:
    numbers = np.frombuffer(shards, np.int32).tolist()
    return Traces(path, verify=verify, open_shards=open_shards, shards=numbers, mapped=mapped)
