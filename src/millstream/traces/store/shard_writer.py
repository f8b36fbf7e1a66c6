"""Records -> one shard: written as `shard-N.arrow.open`, sealed as `shard-N.arrow`. Tensor bytes are never copied."""

import io
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

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

Part = bytes | memoryview | pa.Buffer

_IOV_MAX = 1024
_PIECE_BYTES = 256 << 10  # written at once: several fit into the second-level cache of a core
_ZERO = pa.array([0], pa.uint64())


class ShardWriter:
    """Appends records to one `.open` shard. A failed append leaves nothing behind."""

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
        with self._appending():
            self._add(self._encoder.encode(record, self.num_bytes, self._write_at))

    def append_message(self, message: Bytes, row: Row) -> None:
        """Copy the message of a record from another shard."""
        self._write([message.data])
        self._add(row.moved(self.num_bytes))

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

    def _add(self, row: Row) -> None:
        self.num_bytes += row.num_bytes
        self.rows.append(row)

    def _write(self, parts: Sequence[Part]) -> None:
        """All parts at the current end, or nothing."""
        with self._appending():
            self._write_at(self.num_bytes, parts)

    @contextmanager
    def _appending(self) -> Generator[None]:
        """Cut off what was written if not all could be."""
        try:
            with no_space(self._file, APPEND_AGAIN):
                yield
        except BaseException:
            os.ftruncate(self._fd, self.num_bytes)
            raise

    def _write_at(self, position: int, parts: Sequence[Part]) -> None:
        queue = [memoryview(part) for part in parts]
        while queue:
            written = os.pwritev(self._fd, queue[:_IOV_MAX], position)
            position += written
            queue = _rest(queue, written)


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

    def encode(self, record: Mapping[str, object], offset: int, write: Callable[[int, Sequence[Part]], None]) -> Row:
        """Write the message of a record at `offset`: `write` gets consecutive parts of it and the offset of the first.

        It is written piece by piece, each right after its checksum is computed, while it is in the cache of the CPU.
        """
        arrays: list[pa.Array] = []
        waiting: list[tuple[str, Bytes, list[int] | None, NDArray[np.uint32], tuple[int, ...]]] = []
        values: dict[str, object] = {}
        tensors: dict[str, TensorRow | None] = {}
        for name, kind in self._fields.items():
            if not isinstance(kind, Tensor):
                values[name] = plain(record[name])
                arrays.append(_check_scalar(name, kind, values[name]))
                continue
            tensors[name] = None
            raw = _check_tensor(name, kind, record[name])
            if raw is None:
                arrays.append(pa.nulls(1, self._types[name]))
                continue
            data, sizes, crcs = raw.data, None, np.zeros(num_slices(kind, raw.shape), np.uint32)
            if self._compression != "none":
                data, sizes = to_slices(data, len(crcs), kind.itemsize, self._compression)
            waiting.append((name, data, sizes, crcs, raw.shape))
            arrays.append(_tensor_array(self._types[name], data, raw.shape, crcs, sizes))
        arrays.append(_ZERO)
        self._sink.parts = []
        self._stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        parts, self._sink.parts = self._sink.parts, []

        due = iter([one for one in waiting if one[1].size])
        expected = next(due, None)
        out = _Pieces(offset, write)
        position = offset
        for part in parts[:-1]:
            if expected and isinstance(part, pa.Buffer) and part.address == expected[1].ctypes.data:
                name, data, sizes, crcs, shape = expected
                tensors[name] = TensorRow(position, shape, out.add_slices(data, sizes, crcs), _tuple(sizes))
                expected = next(due, None)
            else:
                out.add_covered(part)
            position += len(part)
        assert expected is None
        for name, data, sizes, crcs, shape in waiting:
            if not data.size:
                tensors[name] = TensorRow(offset, shape, tuple(crcs.tolist()), _tuple(sizes))
        out.end()
        meta_bytes = 8 + int.from_bytes(b"".join(parts[:2])[4:8], "little")
        return Row(offset, position + 8 - offset, meta_bytes, values, tensors)


class _Pieces:
    """Writes the parts of a message, a few at a time, and computes their checksums."""

    def __init__(self, offset: int, write: Callable[[int, Sequence[Part]], None]) -> None:
        self._at, self._write = offset, write
        self._queue: list[Part] = []
        self._queued = 0
        self._covered: list[Part] = []  # whose checksum is due
        self._crc = 0

    def add_covered(self, part: Part) -> None:
        """A part that is covered by the checksum of the record."""
        self._covered.append(part)

    def add_slices(self, data: Bytes, sizes: Sequence[int] | None, crcs: NDArray[np.uint32]) -> tuple[int, ...]:
        """The slices of a tensor; their checksums are also put into `crcs`, which are part of the message."""
        self._cover()
        found: list[int] = []
        first = last = 0
        for size in [len(data) // len(crcs)] * len(crcs) if sizes is None else sizes:
            found.append(crc32c(data[last : last + size]))
            last += size
            if last - first + self._queued >= _PIECE_BYTES:
                self._put(data[first:last].data)
                self._flush()
                first = last
        if first < last:
            self._put(data[first:last].data)
        crcs[:] = found
        return tuple(found)

    def end(self) -> None:
        """The checksum of the record ends it."""
        self._cover()
        self._put(self._crc.to_bytes(8, "little"))
        self._flush()

    def _cover(self) -> None:
        joined = b"".join(self._covered)
        self._covered.clear()
        self._crc = crc32c(joined, self._crc)
        self._put(joined)

    def _put(self, part: Part) -> None:
        self._queue.append(part)
        self._queued += len(part)

    def _flush(self) -> None:
        self._write(self._at, self._queue)
        self._at += self._queued
        self._queue, self._queued = [], 0


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
        self.parts: list[Part] = []

    def write(self, part: bytes | pa.Buffer) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.parts.append(part)
        return len(part)

    def writable(self) -> bool:
        return True


def _tensor_array(
    kind: pa.DataType, data: Bytes, shape: Sequence[int], crcs: NDArray[np.uint32], sizes: Sequence[int] | None
) -> pa.Array:
    """A struct array of one tensor. Built from buffers, three times as fast as from Python lists."""
    members = [
        pa.Array.from_buffers(DATA, 1, [None, _int_buffer([0, data.size], np.int64), pa.py_buffer(data)]),
        _list_array(SHAPE, shape, np.int32),
        _list_array(CRCS, crcs, np.uint32),
    ]
    if sizes is not None:
        members.append(_list_array(SIZES, sizes, np.int64))
    return pa.Array.from_buffers(kind, 1, [None], children=members)


def _list_array(kind: pa.ListType, values: Sequence[int] | NDArray[np.uint32], dtype: type[np.integer]) -> pa.Array:
    items = pa.Array.from_buffers(kind.value_type, len(values), [None, _int_buffer(values, dtype)])
    return pa.Array.from_buffers(kind, 1, [None, _int_buffer([0, len(values)], np.int32)], children=[items])


def _int_buffer(values: Sequence[int] | NDArray[np.uint32], dtype: type[np.integer]) -> pa.Buffer:
    """The numbers as a buffer; of an array, its own memory: checksums are filled in later."""
    return pa.py_buffer(np.asarray(values, dtype))


def _tuple(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if sizes is None else tuple(sizes)
