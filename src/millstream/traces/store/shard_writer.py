"""Records -> one shard: written as `shard-N.arrow.open`, sealed as `shard-N.arrow`. Tensor bytes are never copied."""

import io
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa

from millstream.core.files import is_same_file, lock, no_space, publish, sync_path
from millstream.core.record import Bytes, RawTensor, Schema, Tensor, as_tensor, crc32c, in_order, plain
from millstream.errors import SchemaMismatch
from millstream.traces.store.format import (
    CRCS,
    DATA,
    SHAPE,
    SIZES,
    Row,
    TensorRow,
    compression_of,
    empty_batch,
    header,
    record_schema,
    tail,
)
from millstream.traces.store.manifest import APPEND_AGAIN, ShardInfo, number_of, open_file, shard_name, sidecar_name
from millstream.traces.store.sidecar import largest_record, to_parquet
from millstream.traces.store.slices import num_slices, to_slices

_IOV_MAX = 1024


class ShardWriter:
    """Appends records to one `.open` shard. Every append is one write(2); a failed append leaves nothing behind."""

    def __init__(
        self, path: Path, number: int, fd: int, schema: pa.Schema, *, file: Path, rows: Sequence[Row] = ()
    ) -> None:
        """`file`, open as `fd`, already has the records `rows`."""
        self.number = number
        self.rows = list(rows)
        self.num_bytes = rows[-1].offset + rows[-1].num_bytes if rows else 0
        self._path = path
        self._fd = fd
        self._schema = schema
        self._file = file
        self._encoder: Encoder | None = None

    @classmethod
    def create(cls, path: Path, *, first: int, schema: pa.Schema) -> "ShardWriter":
        """A new shard with a number that no other writer uses."""
        number, fd = _claim(path, first)
        return cls._start(path, number, fd, schema, open_file(path, number))

    @classmethod
    def rebuild(cls, path: Path, number: int, schema: pa.Schema) -> "ShardWriter":
        """A replacement for shard `number`, under a temporary name until it is sealed."""
        file = path / f".{shard_name(number)}.rebuild"
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        return cls._start(path, number, fd, schema, file)

    @classmethod
    def _start(cls, path: Path, number: int, fd: int, schema: pa.Schema, file: Path) -> "ShardWriter":
        shard = cls(path, number, fd, schema, file=file)
        head = header(schema)
        try:
            shard._write([head])
        except BaseException:
            shard.discard()
            raise
        shard.num_bytes = len(head)
        return shard

    @property
    def fields(self) -> Schema:
        return record_schema(self._schema)

    @property
    def compression(self) -> str:
        return compression_of(self._schema)

    def append(self, record: Mapping[str, object]) -> None:
        """Write one record."""
        self._encoder = self._encoder or Encoder(self._schema)
        self._add(*self._encoder.encode(record, self.num_bytes))

    def append_message(self, message: Bytes, row: Row) -> None:
        """Copy the message of a record from another shard."""
        self._add([pa.py_buffer(message)], row.moved(self.num_bytes))

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def seal(self, *, seconds: float | None = None) -> ShardInfo:
        """Write footer and sidecar, then rename: the shard is complete under its final name. Can be retried."""
        created = number_of(self._schema, "created")
        seconds = round(time.time() - created if seconds is None else seconds, 3)
        sidecar = to_parquet(self.rows, self.fields, compression=self.compression, seconds=seconds)
        end = tail(self._schema, self.rows, header_bytes=header(self._schema), sidecar=sidecar)
        self._write([end])
        os.ftruncate(self._fd, self.num_bytes + len(end))
        self.sync()
        final, sidecar_file = self._path / shard_name(self.number), self._path / sidecar_name(self.number)
        replaces = final.exists()  # then the existing sidecar belongs to the old file until the rename
        if not replaces:
            publish(sidecar_file, sidecar, APPEND_AGAIN)
        os.rename(self._file, final)  # the commit point
        if replaces:
            publish(sidecar_file, sidecar, APPEND_AGAIN)
        self.release()
        sync_path(self._path)
        size = self.num_bytes + len(end)
        largest = largest_record(self.rows, self.fields)
        return ShardInfo(self.number, len(self.rows), size, seconds, crc32c(sidecar), largest)

    def discard(self) -> None:
        """Remove the open shard."""
        self._file.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Close the file as it is; the next writer of the store recovers it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.release()

    def _add(self, parts: Sequence[bytes | pa.Buffer], row: Row) -> None:
        self._write(parts)
        self.num_bytes += row.num_bytes
        self.rows.append(row)

    def _write(self, parts: Sequence[bytes | pa.Buffer]) -> None:
        """All parts at the current end, or nothing."""
        start = self.num_bytes
        try:
            with no_space(self._file, APPEND_AGAIN):
                position = start
                queue = [memoryview(part) for part in parts]
                while queue:
                    written = os.pwritev(self._fd, queue[:_IOV_MAX], position)
                    position += written
                    queue = _rest(queue, written)
        except BaseException:
            os.ftruncate(self._fd, start)
            raise


class Encoder:
    """Records -> the buffers of their messages, in the schema of one shard."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._fields = record_schema(schema)
        self._types = {field.name: field.type for field in schema}
        self._compression = compression_of(schema)
        self._sink = _Sink()
        self._stream = pa.ipc.new_stream(self._sink, schema)
        self._stream.write_batch(empty_batch(schema))
        self._sink.parts.clear()  # the schema message, which is already in the header of the shard

    def encode(self, record: Mapping[str, object], offset: int) -> tuple[list[bytes | pa.Buffer], Row]:
        """The message of a record to be written at `offset`, as consecutive buffers."""
        arrays: list[pa.Array] = []
        pending: list[tuple[str, pa.Buffer, TensorRow]] = []
        values: dict[str, object] = {}
        tensors: dict[str, TensorRow | None] = {}
        for name, kind in self._fields.items():
            if isinstance(kind, Tensor):
                raw = _check_tensor(name, kind, record[name])
                if raw is None:
                    tensors[name] = None
                    arrays.append(pa.nulls(1, self._types[name]))
                    continue
                slices = to_slices(raw.data, num_slices(kind, raw.shape), kind.itemsize, self._compression)
                data = pa.py_buffer(slices.data)
                row = TensorRow(offset, raw.shape, slices.crc32c, slices.sizes)
                tensors[name] = row
                if data.size:
                    pending.append((name, data, row))
                arrays.append(_tensor_array(self._types[name], data, row))
            else:
                values[name] = plain(record[name])
                arrays.append(_check_scalar(name, kind, values[name]))
        arrays.append(pa.array([0], pa.uint64()))
        self._sink.parts = []
        self._stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        parts, self._sink.parts = _joined(self._sink.parts, {buffer.address for _, buffer, _ in pending}), []

        waiting = iter(pending)
        expected = next(waiting, None)
        position, crc = offset, 0
        for part in parts[:-1]:
            if expected and isinstance(part, pa.Buffer) and part.address == expected[1].address:
                tensors[expected[0]], expected = replace(expected[2], offset=position), next(waiting, None)
            else:
                crc = crc32c(part, crc)
            position += len(part)
        assert expected is None
        parts[-1] = crc.to_bytes(8, "little")
        meta_bytes = 8 + int.from_bytes(cast(bytes, parts[0])[4:8], "little")
        return parts, Row(offset, position + 8 - offset, meta_bytes, values, tensors)


def _claim(path: Path, first: int) -> tuple[int, int]:
    """The first free shard number from `first` on, and the descriptor of its new, locked `.open` file."""
    number = first
    while True:
        file = open_file(path, number)
        try:
            with no_space(file, APPEND_AGAIN):
                fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            number += 1
            continue
        lock(fd, wait=True, without_locks=True)
        # Between create and lock another writer may have taken the file for an interrupted shard and removed it, or a
        # faster writer may have sealed this number.
        if is_same_file(fd, file) and not (path / shard_name(number)).exists():
            return number, fd
        if is_same_file(fd, file):
            file.unlink()
        os.close(fd)
        number += 1


def _rest(queue: list[memoryview], written: int) -> list[memoryview]:
    """What is left after `written` bytes."""
    while queue and written >= len(queue[0]):
        written -= len(queue[0])
        queue = queue[1:]
    return [queue[0][written:], *queue[1:]] if queue and written else queue


def _check_tensor(name: str, kind: Tensor, value: object) -> RawTensor | None:
    """The value as a tensor of this kind, its bytes in the order in which they are stored; None stays None."""
    if value is None:
        return None
    raw = as_tensor(name, in_order(value, kind.order) if kind.sliced else value)
    if raw is None:
        raise SchemaMismatch(f"field {name!r}: expected {kind}, found {type(value).__name__}")
    if raw.kind.dtype != kind.dtype or len(raw.shape) != len(kind.axes):
        raise SchemaMismatch(f"field {name!r}: expected {kind}, found {raw.kind.dtype} of shape {list(raw.shape)}")
    if not kind.sliced:
        return raw
    return replace(raw, shape=tuple(raw.shape[kind.order.index(axis)] for axis in range(len(raw.shape))))


def _check_scalar(name: str, kind: pa.DataType, value: object) -> pa.Array:
    """The value as an Arrow array of this type with one element."""
    if type(value).__module__.partition(".")[0] not in ("torch", "numpy") and _fits(kind, value):
        try:
            return pa.array([value], type=kind)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            pass
    raise SchemaMismatch(f"field {name!r}: expected {kind}, found {type(value).__name__} {str(value)[:60]!r}")


def _fits(kind: pa.DataType, value: object) -> bool:
    """Stricter than pyarrow, which truncates 1.5 to 1, splits a text into a list and drops unknown keys of a struct."""
    if value is None:
        return True
    if pa.types.is_integer(kind):
        return isinstance(value, int)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return isinstance(value, str)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return isinstance(value, bytes | bytearray | memoryview)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return isinstance(value, list) and all(_fits(kind.value_type, x) for x in cast(list[object], value))
    if pa.types.is_struct(kind):
        items = cast(dict[str, object], value) if isinstance(value, dict) else {}
        return items.keys() == {f.name for f in kind} and all(_fits(f.type, items[f.name]) for f in kind)
    return True


class _Sink(io.RawIOBase):
    """A file for pyarrow to write to that keeps the buffers instead of copying them."""

    def __init__(self) -> None:
        self.parts: list[bytes | pa.Buffer] = []

    def write(self, part: bytes | pa.Buffer) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.parts.append(part)
        return len(part)

    def writable(self) -> bool:
        return True


def _joined(parts: Sequence[bytes | pa.Buffer], apart: set[int]) -> list[bytes | pa.Buffer]:
    """Join adjacent parts, except the buffers at the addresses `apart` and the last part."""
    joined: list[bytes | pa.Buffer] = []
    run: list[bytes | pa.Buffer] = []
    for part in parts[:-1]:
        if isinstance(part, pa.Buffer) and part.address in apart:
            joined += [b"".join(run), part]
            run = []
        else:
            run.append(part)
    return [*joined, b"".join(run), parts[-1]] if run else [*joined, parts[-1]]


def _tensor_array(kind: pa.DataType, data: pa.Buffer, row: TensorRow) -> pa.Array:
    """A struct array of one tensor. Built from buffers, three times as fast as from Python lists."""
    members = [
        pa.Array.from_buffers(DATA, 1, [None, _int_buffer([0, data.size], np.int64), data]),
        _list_array(SHAPE, row.shape, np.int32),
        _list_array(CRCS, row.crc32c, np.uint32),
    ]
    if row.sizes is not None:
        members.append(_list_array(SIZES, row.sizes, np.int64))
    return pa.Array.from_buffers(kind, 1, [None], children=members)


def _list_array(kind: pa.ListType, values: Sequence[int], dtype: type[np.integer]) -> pa.Array:
    items = pa.Array.from_buffers(kind.value_type, len(values), [None, _int_buffer(values, dtype)])
    return pa.Array.from_buffers(kind, 1, [None, _int_buffer([0, len(values)], np.int32)], children=[items])


def _int_buffer(values: Sequence[int], dtype: type[np.integer]) -> pa.Buffer:
    return pa.py_buffer(np.array(values, dtype))
