"""The Parquet file next to a shard: scalars and texts of every record, and the offsets of its tensors.

It can always be rebuilt from the shard. Other tools (polars, duckdb) can query texts and lengths in it without reading
a tensor.
"""

import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from millstream.core import tables
from millstream.core.console import quoted
from millstream.core.memory import Map
from millstream.core.record import Schema, Tensor, joined_crc32c, refine
from millstream.core.remote import RemotePath
from millstream.errors import CorruptShard, DamageWarning, SchemaMismatch
from millstream.traces.store.format import (
    CRCS,
    SHAPE,
    SIZES,
    Row,
    TensorRow,
    compression_of,
    read_shard,
    record_schema,
    tensor_field,
)
from millstream.traces.store.manifest import (
    Manifest,
    ShardInfo,
    read_shard_seal,
    read_sidecar,
    shard_name,
    sidecar_name,
)

Ints = NDArray[np.int64]
Span = tuple[int, int, int]  # offset, stored bytes, CRC-32C
OFFSET, NUM_BYTES, META_BYTES = "_offset", "_bytes", "_meta_bytes"
_SMALL_BYTES = 64 << 10
_LARGE_SLICE, _FIRST_TIMES = 32 << 10, 16
_MOST = 1 << 60  # a sum of two fits 64 bits
_MAX_RATIO = 1 << 16  # zstd stores 128 kB of zeros in 4 bytes
_NUMPY = {"float": "float32", "halffloat": "float16"}  # other types have the same name in numpy


def load_sidecar(path: Path, shard: ShardInfo, fields: Schema, *, is_for_table: bool = False) -> "Sidecar":
    """The sidecar of a shard of a store with these fields, verified; rebuilt in memory if it is missing or damaged."""
    data = read_sidecar(path, shard.number, shard.sidecar_crc32c)
    own, file = path / sidecar_name(shard.number), path / shard_name(shard.number)
    if data is not None:
        with suppress(CorruptShard):
            sidecar = Sidecar(data, own, is_for_table=is_for_table)
            if sidecar.num_records == shard.records and (sidecar.schema == fields or _fits(sidecar.schema, fields)):
                return sidecar
    if isinstance(file, RemotePath):
        raise CorruptShard(f"{own}: missing or damaged. Copy the store, repair the copy, and copy it back")
    if not file.exists():
        raise CorruptShard(f"{file}: missing, with its {shard.records} records. See: millstream verify {quoted(path)}")
    schema, rows, _ = read_shard(Map(file).view)
    if (seal := read_shard_seal(file)) and (seal.records, seal.sidecar_crc32c) != (shard.records, shard.sidecar_crc32c):
        raise CorruptShard(
            f"{file}: was rewritten after the store was opened, or its manifest is not of these shards. Open the store "
            f"again; if that does not help, run: millstream repair {quoted(path)}"
        )
    if schema is None or len(rows) != shard.records:
        raise CorruptShard(
            f"{file}: its sidecar is damaged and only {len(rows)} of its {shard.records} records are readable. "
            f"Run: millstream repair {quoted(path)}"
        )
    warnings.warn(
        f"{own}: missing or damaged; read from the shard instead. Run: millstream repair {quoted(path)}",
        DamageWarning,
        stacklevel=2,
    )
    rebuilt = to_parquet(rows, record_schema(schema), compression=compression_of(schema), seconds=shard.seconds)
    return Sidecar(rebuilt, own)


def read_table(path: Path, manifest: Manifest, names: Sequence[str] | None = None) -> pa.Table:
    """Scalars and texts of every record, in record order."""
    schema = manifest.fields
    fields = [(n, k) for n, k in schema.items() if not isinstance(k, Tensor) and (names is None or n in names)]
    target = pa.schema(fields)
    tables = [
        load_sidecar(path, shard, schema, is_for_table=True).table(target.names).select(target.names).cast(target)
        for shard in manifest.shards
    ]
    return pa.concat_tables([target.empty_table(), *tables])


def check_storable(schema: Schema, compression: str) -> None:
    """Raise now for a type that Parquet cannot store when the shard is sealed, such as an empty dict."""
    for name, kind in schema.items():
        try:
            to_parquet([], {name: kind}, compression=compression, seconds=0)
        except pa.ArrowException as error:
            raise SchemaMismatch(
                f"field {name!r}: expected a type that Parquet supports, found {kind} ({error})"
            ) from None


def to_parquet(rows: Sequence[Row], schema: Schema, *, compression: str, seconds: float) -> bytes:
    """The sidecar of a shard with these rows, as the bytes of a Parquet file."""
    target = parquet_schema(schema, compression)
    columns: dict[str, Iterable[object]] = {
        name: (
            [_place(row.tensors[name]) for row in rows]
            if isinstance(kind, Tensor)
            else [row.values[name] for row in rows]
        )
        for name, kind in schema.items()
    }
    columns[OFFSET] = [row.offset for row in rows]
    columns[NUM_BYTES] = [row.num_bytes for row in rows]
    columns[META_BYTES] = [row.meta_bytes for row in rows]
    arrays = [pa.array(columns[field.name], field.type) for field in target]
    metadata = {
        "millstream.seconds": repr(seconds),
        "millstream.compression": compression,
        "millstream.largest": str(largest_record(rows, schema)),
    }
    return tables.to_parquet(pa.Table.from_arrays(arrays, schema=target.with_metadata(metadata)))


def largest_record(rows: Iterable[Row], schema: Schema) -> int:
    """Bytes of the tensors of the largest record, decompressed."""
    itemsizes = {name: kind.itemsize for name, kind in schema.items() if isinstance(kind, Tensor)}
    return max(
        (sum(prod(t.shape) * itemsizes[name] for name, t in row.tensors.items() if t is not None) for row in rows),
        default=0,
    )


class Sidecar:
    """A sidecar in memory; columns are decoded, and their values checked, on first use.

    Its checksum says that the bytes are those that were written, not that a writer of ours wrote them: values that
    cannot be those of a shard raise CorruptShard.
    """

    def __init__(self, data: bytes, file: Path, *, is_for_table: bool = False) -> None:
        self._data, self._file = data, file
        try:
            parquet = pq.ParquetFile(pa.BufferReader(data))
            arrow = parquet.schema_arrow
            self._metadata = parquet.metadata
            self.schema = {name: kind for name, kind in record_schema(arrow).items() if not name.startswith("_")}
            self.compression = compression_of(arrow)
            expected = parquet_schema(self.schema, self.compression)
            # All columns of a small one: reading all costs little more than reading one. But those of tensors, which
            # no table has, take most of the time.
            is_whole = len(data) < _SMALL_BYTES and not is_for_table
            self._whole = parquet.read(use_threads=False) if is_whole else None
            self._parquet = parquet if is_for_table else None  # for one thread: opened again otherwise
        except (OSError, ValueError, LookupError, TypeError, pa.ArrowException) as error:
            raise self._wrong(str(error).partition("\n")[0]) from None
        if self.compression not in ("none", "lz4", "zstd") or not arrow.equals(expected):
            raise self._wrong("its columns are not those of a sidecar")
        self.num_records = parquet.metadata.num_rows
        self._columns: dict[str, pa.Array] = {}
        self._numbers: dict[str, NDArray[np.generic] | None] = {}
        self._tensors: dict[str, TensorColumn] = {}

    def check(self) -> None:
        """Read every column now; raises CorruptShard for values that cannot be those of a shard."""
        _ = self._extents
        for name in self.schema:
            _ = self.tensor(name) or self.column(name)

    def column(self, name: str) -> pa.Array:
        """One scalar field of all records."""
        if name not in self._columns:
            self._columns[name] = self._read(name)
        return self._columns[name]

    def numbers(self, name: str) -> "NDArray[np.generic] | None":
        """The same as an array; None unless all values are numbers."""
        if name not in self._numbers:
            column = self.column(name)
            plain = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
            self._numbers[name] = _numbers_of(column) if plain and not column.null_count else None
        return self._numbers[name]

    def tensor(self, name: str) -> "TensorColumn | None":
        """Offsets of one tensor field in all records; None if it has no tensors in this shard."""
        if name not in self._tensors:
            kind = self.schema[name]
            if not isinstance(kind, Tensor):
                return None
            try:
                column = TensorColumn.of(self._read(name), kind)
                column.check(*self._extents[:2])
            except (ValueError, AssertionError) as error:
                raise self._wrong(f"field {name!r}: {error}") from None
            self._tensors[name] = column
        return self._tensors[name]

    def table(self, names: Sequence[str]) -> pa.Table:
        """Scalar fields of all records, not cached."""
        # A new reader for every call: threads may call at the same time. One thread: the files are small.
        file = self._parquet or pq.ParquetFile(pa.BufferReader(self._data), metadata=self._metadata)
        try:
            table = file.read(columns=list(names), use_threads=False)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise self._wrong(str(error).partition("\n")[0]) from None
        if table.num_rows != self.num_records:
            raise self._wrong(f"{table.num_rows} rows of {self.num_records}")
        return table

    def _wrong(self, why: str) -> CorruptShard:
        return CorruptShard(f"{self._file}: damaged ({why}). Run: millstream repair {quoted(self._file.parent)}")

    @cached_property
    def _extents(self) -> tuple[Ints, Ints, Ints]:
        columns = [self._read(name) for name in (OFFSET, NUM_BYTES, META_BYTES)]
        offsets, sizes, frames = (_numbers_of(column).astype(np.int64) for column in columns)
        ends = offsets[:-1] + sizes[:-1]
        if (
            any(column.null_count for column in columns)
            or not ((offsets >= 0) & (offsets < _MOST) & (sizes >= 8) & (sizes < _MOST)).all()
            or not ((frames >= 0) & (frames <= sizes)).all()
            or (ends > offsets[1:]).any()
        ):
            raise self._wrong("offsets or sizes of its records are out of range")
        return offsets, sizes, frames

    def extent(self, number: int) -> tuple[int, int]:
        """Offset and bytes of one record."""
        return int(self._extents[0][number]), int(self._extents[1][number])

    def row(self, number: int) -> Row:
        """Everything stored of one record."""
        offset, num_bytes, meta_bytes = (int(column[number]) for column in self._extents)
        values: dict[str, object] = {}
        tensors: dict[str, TensorRow | None] = {}
        for name, kind in self.schema.items():
            if isinstance(kind, Tensor):
                column = self.tensor(name)
                tensors[name] = column.row(number) if column else None
            else:
                values[name] = self.column(name)[number].as_py()
        return Row(offset, num_bytes, meta_bytes, values, tensors)

    def _read(self, name: str) -> pa.Array:
        table = self.table([name]) if self._whole is None else self._whole
        column = table.column(name).combine_chunks()
        if isinstance(column, pa.ChunkedArray):  # returned by pyarrow for no rows
            return column.chunk(0) if column.num_chunks else pa.array([], column.type)
        return column


@dataclass(frozen=True)
class TensorColumn:
    """Offsets, shapes and checksums of one tensor field of a shard, as flat arrays."""

    offsets: Ints  # -1 where the tensor is None
    shapes: tuple[Ints, Ints]  # list bounds, values
    crc32c: tuple[Ints, Ints]
    sizes: tuple[Ints, Ints] | None
    kind: Tensor
    _axes: dict[int, Ints] = field(default_factory=dict[int, Ints])
    _sliced: list[int] = field(default_factory=list[int])  # rows read in slices, the first times

    @staticmethod
    def of(column: pa.Array, kind: Tensor) -> "TensorColumn":
        assert isinstance(column, pa.StructArray)
        members = {field.name: column.field(field.name) for field in column.type}
        offsets = members["offset"]
        if offsets.null_count or column.null_count:  # avoid importing pyarrow.compute (70 ms) otherwise
            given = column.is_valid().to_numpy(zero_copy_only=False)
            at = np.where(given, offsets.fill_null(-1).to_numpy(), -1)
        else:
            at = _numbers_of(offsets).astype(np.int64)
        sizes = _lists(members["sizes"]) if "sizes" in members else None
        return TensorColumn(at, _lists(members["shape"]), _lists(members["crc32c"]), sizes, kind)

    def check(self, starts: Ints, sizes: Ints) -> None:
        """ValueError unless every tensor has its axes and lies in its record, given by offset and bytes."""
        given, axes = self.offsets >= 0, len(self.kind.axes)
        counts, ranks = np.diff(self.crc32c[0]), np.diff(self.shapes[0])
        if (ranks != np.where(given, axes, 0)).any() or len(self.shapes[1]) != axes * int(given.sum()):
            raise ValueError(f"its tensors do not have {axes} axes")
        shapes = self.all_shapes()
        if (shapes < 0).any():
            raise ValueError("a shape is negative")
        depth = max(len(self.kind.sliced), 1) if len(shapes) else 0
        possible = np.cumprod(shapes[:, self.kind.order[:depth]], axis=1) if axes else shapes
        alike = (counts[given] == 1) | (counts[given][:, None] == possible).any(axis=1)
        if (counts[~given] != 0).any() or not alike.all():
            raise ValueError("the checksums do not match the shapes")
        num_bytes = shapes.astype(np.float64).prod(axis=1) * self.kind.itemsize
        stored = num_bytes
        if self.sizes is not None:
            if (np.diff(self.sizes[0]) != counts).any() or (self.sizes[1] < 0).any():
                raise ValueError("the sizes do not match the checksums")
            total = np.concatenate([[0.0], np.cumsum(self.sizes[1], dtype=np.float64)])
            stored = (total[self.sizes[0][1:]] - total[self.sizes[0][:-1]])[given]
        first = self.offsets[given].astype(np.float64)
        if not ((first >= starts[given]) & (first + stored <= (starts + sizes)[given])).all():
            raise ValueError("a tensor is not inside its record")
        if (num_bytes > _MAX_RATIO * (stored + 1)).any():
            raise ValueError("a shape is larger than the data")

    def all_shapes(self) -> Ints:
        """The shapes of all tensors that are not None, one per row."""
        bounds, values = self.shapes
        axes = int((bounds[1:] - bounds[:-1]).max(initial=0))
        return values.reshape(int((self.offsets >= 0).sum()), axes)

    @cached_property
    def num_bytes(self) -> Ints:
        """Bytes of every tensor; 0 for None."""
        counts = np.zeros(len(self.offsets), np.int64)
        counts[self.offsets >= 0] = self.all_shapes().prod(axis=1)
        return counts * self.kind.itemsize

    def axis(self, axis: int) -> Ints:
        """The size of an axis of every tensor; 0 for None."""
        if axis not in self._axes:
            self._axes[axis] = np.zeros(len(self.offsets), np.int64)
            shapes = self.all_shapes()
            if axis < shapes.shape[1]:
                self._axes[axis][self.offsets >= 0] = shapes[:, axis]
        return self._axes[axis]

    def shape(self, number: int) -> tuple[int, ...] | None:
        """The shape of one tensor; None if the tensor is None."""
        return tuple(_item(self.shapes, number)) if self.offsets[number] >= 0 else None

    def num_slices(self, number: int) -> int:
        bounds = self.crc32c[0]
        return int(bounds[number + 1] - bounds[number])

    @cached_property
    def _whole_crc32c(self) -> tuple[Ints, Ints]:
        """The CRC-32C of every tensor as a whole: list bounds, values."""
        return self._joined_crc32c(np.minimum(np.diff(self.crc32c[0]), 1))

    @cached_property
    def _outer_crc32c(self) -> tuple[Ints, Ints]:
        """The CRC-32C of every index of the outermost axis of tensors that are cut along two: list bounds, values."""
        return self._joined_crc32c(self.axis(self.kind.order[0]))

    def _joined_crc32c(self, num: Ints) -> tuple[Ints, Ints]:
        """The slices of each tensor joined into so many: list bounds, values."""
        bounds, values = self.crc32c
        counts = np.diff(bounds)
        ends = np.cumsum(num)
        out = np.zeros(int(num.sum()), np.int64)
        # np.unique would import numpy.ma, 20 ms
        for count, parts in set(zip(counts.tolist(), num.tolist(), strict=True)):
            if not count or not parts or count % parts:
                continue
            (rows,) = np.nonzero((counts == count) & (num == parts))
            each = count // parts
            follow = (self.num_bytes[rows] // count)[:, None] * np.arange(each - 1, -1, -1, dtype=np.int64)
            crcs = values[bounds[rows][:, None] + np.arange(count)].astype(np.uint32).reshape(-1, each)
            joined = joined_crc32c(crcs, np.repeat(follow, parts, axis=0))
            out[(ends[rows] - parts)[:, None] + np.arange(parts)] = joined.reshape(-1, parts)
        return np.concatenate([np.zeros(1, np.int64), ends]), out

    def whole(self, number: int) -> list[Span]:
        """One tensor as a single span; as its slices if they are compressed.

        Also the first times if they are large: to join the checksums of a shard takes longer than to verify a few.
        """
        is_large = self.num_bytes[number] >= _LARGE_SLICE * self.num_slices(number)
        if self.sizes is not None:
            return self.spans(number)
        if is_large and len(self._sliced) < _FIRST_TIMES:
            self._sliced.append(number)
            return self.spans(number)
        (crc,) = _item(self._whole_crc32c, number)
        return [(int(self.offsets[number]), int(self.num_bytes[number]), crc)]

    def outer(self, number: int, picks: Sequence[int]) -> list[Span]:
        """Some indices of the outermost axis of a tensor that is cut along two, each as a span if not compressed."""
        if self.sizes is not None:
            each = self.num_slices(number) // int(self.axis(self.kind.order[0])[number])
            return self.spans(number, [pick * each + inner for pick in picks for inner in range(each)])
        offset, crcs = int(self.offsets[number]), _item(self._outer_crc32c, number)
        size = int(self.num_bytes[number]) // len(crcs)
        return [(offset + pick * size, size, crcs[pick]) for pick in picks]

    def spans(self, number: int, picks: Sequence[int] | None = None) -> list[Span]:
        """Offset, stored bytes and CRC-32C of each slice of one tensor, or of some of them."""
        offset, crcs = int(self.offsets[number]), _item(self.crc32c, number)
        if self.sizes is None:
            size = int(self.num_bytes[number]) // len(crcs)
            return [(offset + i * size, size, crcs[i]) for i in (range(len(crcs)) if picks is None else picks)]
        sizes = _item(self.sizes, number)
        spans = list(zip(accumulate(sizes, initial=offset), sizes, crcs, strict=False))
        return spans if picks is None else [spans[pick] for pick in picks]

    def row(self, number: int) -> TensorRow | None:
        offset = int(self.offsets[number])
        if offset < 0:
            return None
        sizes = tuple(_item(self.sizes, number)) if self.sizes else None
        return TensorRow(offset, tuple(_item(self.shapes, number)), tuple(_item(self.crc32c, number)), sizes)


def parquet_schema(schema: Schema, compression: str) -> pa.Schema:
    """The columns of a sidecar."""
    members: list[tuple[str, pa.DataType]] = [("offset", pa.int64()), ("shape", SHAPE), ("crc32c", CRCS)]
    if compression != "none":
        members.append(("sizes", SIZES))
    fields = [
        tensor_field(n, kind, members) if isinstance(kind, Tensor) else pa.field(n, kind) for n, kind in schema.items()
    ]
    own = [(OFFSET, pa.int64()), (NUM_BYTES, pa.int64()), (META_BYTES, pa.int32())]
    return pa.schema([*fields, *(pa.field(name, kind) for name, kind in own)])


def _fits(schema: Schema, fields: Schema) -> bool:
    """Whether a shard with this schema can be of a store with these fields."""
    return all(name in schema and refine(kind, schema[name]) is not None for name, kind in fields.items())


def _place(tensor: TensorRow | None) -> dict[str, object] | None:
    if tensor is None:
        return None
    place: dict[str, object] = {"offset": tensor.offset, "shape": tensor.shape, "crc32c": tensor.crc32c}
    if tensor.sizes is not None:
        place["sizes"] = tensor.sizes
    return place


def _lists(column: pa.Array) -> tuple[Ints, Ints]:
    assert isinstance(column, pa.ListArray)
    if column.values.null_count:
        raise ValueError("a number is missing")
    return _numbers_of(column.offsets).astype(np.int64), _numbers_of(column.values).astype(np.int64)


def _item(lists: tuple[Ints, Ints], number: int) -> list[int]:
    bounds, values = lists
    return values[bounds[number] : bounds[number + 1]].tolist()


def _numbers_of(array: pa.Array) -> NDArray[np.generic]:
    """Numbers without nulls, as a numpy view. (`to_numpy` of pyarrow imports pandas if installed.)"""
    dtype = np.dtype(_NUMPY.get(str(array.type), str(array.type)))
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(memoryview(data), dtype)[array.offset : array.offset + len(array)]
