"""Records -> the buffers of their messages, checked against the schema. Tensor bytes are passed on, never copied."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pyarrow as pa

from millstream.errors import SchemaMismatch
from millstream.records import RawTensor, Tensor, as_tensor, crc32c, plain
from millstream.store.message import (
    CRCS,
    DATA,
    SHAPE,
    SIZES,
    Row,
    TensorRow,
    compression_of,
    empty_batch,
    record_schema,
)
from millstream.store.slices import store


class Encoder:
    """Records -> the buffers of their messages, in one shard's schema. Tensor bytes are passed on, never copied."""

    def __init__(self, schema: pa.Schema) -> None:
        self.arrow_schema = schema
        self.schema = record_schema(schema)
        self._types = {field.name: field.type for field in schema}
        self._compression = compression_of(schema)
        self._sink = _Sink()
        self._stream = pa.ipc.new_stream(cast(io.IOBase, self._sink), schema)
        self._stream.write_batch(empty_batch(schema))
        self._sink.parts.clear()  # the schema message: the shard's header already holds it

    def encode(self, record: Mapping[str, object], offset: int) -> tuple[list[bytes | pa.Buffer], Row]:
        """The message of a record that will stand at `offset`, as buffers to write one after the other."""
        arrays: list[pa.Array] = []
        pending: list[tuple[str, pa.Buffer, TensorRow]] = []
        values: dict[str, object] = {}
        tensors: dict[str, TensorRow | None] = {}
        for name, kind in self.schema.items():
            if isinstance(kind, Tensor):
                raw = check_tensor(name, kind, record[name])
                if raw is None:
                    tensors[name] = None
                    arrays.append(pa.nulls(1, self._types[name]))
                    continue
                stored = store(raw.data, raw.shape, kind.itemsize, self._compression)
                data = pa.py_buffer(stored.data)
                row = TensorRow(offset, raw.shape, stored.crc32c, stored.sizes)
                tensors[name] = row
                if data.size:
                    pending.append((name, data, row))
                arrays.append(_tensor_array(self._types[name], data, row))
            else:
                values[name] = plain(record[name])
                arrays.append(check_scalar(name, kind, values[name]))
        arrays.append(pa.array([0], pa.uint64()))
        self._sink.parts = []
        self._stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self.arrow_schema))
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


def check_tensor(name: str, kind: Tensor, value: object) -> RawTensor | None:
    """The value as a tensor of this kind; None stays None."""
    if value is None:
        return None
    raw = as_tensor(name, value)
    if raw is None:
        raise SchemaMismatch(f"field {name!r}: expected {kind}, found {type(value).__name__}")
    if raw.kind.dtype != kind.dtype or len(raw.shape) != len(kind.axes):
        raise SchemaMismatch(f"field {name!r}: expected {kind}, found {raw.kind.dtype} of shape {list(raw.shape)}")
    return raw


def check_scalar(name: str, kind: pa.DataType, value: object) -> pa.Array:
    """The value as an Arrow array of one element of this type."""
    if type(value).__module__.partition(".")[0] not in ("torch", "numpy") and _fits(kind, value):
        try:
            return pa.array([value], type=kind)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            pass
    raise SchemaMismatch(f"field {name!r}: expected {kind}, found {type(value).__name__} {str(value)[:60]!r}")


def _fits(kind: pa.DataType, value: object) -> bool:
    """pyarrow itself would cut 1.5 to 1, take a text apart into a list and drop keys a struct does not have."""
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


class _Sink:
    """A file for pyarrow to write to that keeps the buffers instead of copying them."""

    closed = False

    def __init__(self) -> None:
        self.parts: list[bytes | pa.Buffer] = []

    def write(self, part: bytes | pa.Buffer) -> int:
        self.parts.append(part)
        return len(part)

    def tell(self) -> int:
        return 0

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


def _joined(parts: Sequence[bytes | pa.Buffer], apart: set[int]) -> list[bytes | pa.Buffer]:
    """The parts with neighbours made one, but for the buffers at the addresses `apart` and the last part."""
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
    """A struct array of one tensor. Built from buffers: three times as fast as from Python lists."""
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
