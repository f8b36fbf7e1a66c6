"""The bytes of a shard: tensors as slices, records as Arrow messages, header, footer and seal. Knows no files.

    "ARROW1\\0\\0" schema | record ... record | end of stream | seal | footer, its length, "ARROW1"

A record is a record batch of one row: the fields, then `_crc32c`, eight bytes at the end of the message with the
CRC-32C of all its other bytes except tensor data. A tensor is stored in slices along its first axis, or along other
ones, each compressed on its own, with a CRC of its own among the bytes that `_crc32c` covers. The seal, which Arrow
readers skip, covers header, footer and sidecar: every byte of a sealed shard is covered by a CRC.
"""

import io
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any, cast

import numpy as np
import pyarrow as pa

from millstream.core.record import Bytes, Kind, Schema, Tensor, crc32c
from millstream.traces.store.slices import slice_counts

MAGIC = b"ARROW1\0\0"
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
SEAL = struct.Struct("<8sQIIII")  # magic, records, CRCs of header, sidecar, footer and the seal up to here
SEAL_MAGIC = b"MILLSEAL"
CRC_FIELD = "_crc32c"
QUESTION_ID, RECORD_ID = "question_id", "record_id"
_HEADER_CRC = b"millstream-header-crc32c="
DATA, SHAPE, CRCS, SIZES = pa.large_binary(), pa.list_(pa.int32()), pa.list_(pa.uint32()), pa.list_(pa.int64())
_BLOCK = np.dtype([("offset", "<i8"), ("meta_bytes", "<i4"), ("pad", "<i4"), ("body_bytes", "<i8")])


def id_field(fields: Iterable[str]) -> str:
    """The field that finds a record and names it in messages: `record_id` if there is one, else `question_id`.

    Stores with several answers per question have both; the question keeps them together in a split.
    """
    return RECORD_ID if RECORD_ID in fields else QUESTION_ID


@dataclass(frozen=True)
class TensorRow:
    """Where one tensor is in the shard file, and its checksums."""

    offset: int
    shape: tuple[int, ...]
    crc32c: tuple[int, ...]
    sizes: tuple[int, ...] | None

    def num_bytes(self, itemsize: int) -> int:
        return sum(self.sizes) if self.sizes is not None else prod(self.shape) * itemsize

    def spans(self, itemsize: int) -> list[tuple[int, int]]:
        """(offset, stored bytes) of each slice."""
        total, count = self.num_bytes(itemsize), len(self.crc32c)
        sizes = self.sizes if self.sizes is not None else (total // count,) * count
        return list(zip(accumulate(sizes[:-1], initial=self.offset), sizes, strict=True))


@dataclass(frozen=True)
class Row:
    """What the sidecar stores of one record: its offset, its scalars and where its tensors are."""

    offset: int
    num_bytes: int
    meta_bytes: int
    values: Mapping[str, object]
    tensors: Mapping[str, TensorRow | None]

    def moved(self, offset: int) -> "Row":
        """The same record at another offset, as in another shard."""
        delta = offset - self.offset
        tensors = {name: t and replace(t, offset=t.offset + delta) for name, t in self.tensors.items()}
        return replace(self, offset=offset, tensors=tensors)


def arrow_schema(schema: Schema, *, compression: str, metadata: Mapping[str, str]) -> pa.Schema:
    """The schema of a shard's record batches."""
    fields = [_arrow_field(name, kind, compression) for name, kind in schema.items()]
    everything = {
        "millstream.compression": compression,
        "millstream.header": f"{_HEADER_CRC.decode()}00000000",
        **metadata,
    }
    return pa.schema([*fields, pa.field(CRC_FIELD, pa.uint64())], metadata=everything)


def record_schema(schema: pa.Schema) -> Schema:
    """The fields of the records behind a shard's Arrow schema."""
    return {field.name: _kind(field) for field in schema if field.name != CRC_FIELD}


def metadata_of(schema: pa.Schema, key: str, default: str) -> str:
    """The entry `millstream.{key}` in the metadata of a shard or sidecar."""
    return (schema.metadata or {}).get(f"millstream.{key}".encode(), default.encode()).decode(errors="replace")


def compression_of(schema: pa.Schema) -> str:
    return metadata_of(schema, "compression", "none")


def header(schema: pa.Schema) -> bytes:
    """The first bytes of a shard. Their CRC-32C is in the schema metadata, computed with zeros in its place."""
    return _with_crc(MAGIC + schema.serialize().to_pybytes())


def read_header(view: Bytes) -> tuple[pa.Schema, int]:
    """The schema of a shard and the offset of its first record. Raises pa.ArrowInvalid if the header is damaged.

    Arrow's parsers can crash on damaged bytes, so none of them sees bytes whose CRC has not been checked.
    """
    end = 16 + int.from_bytes(view[12:16].tobytes(), "little")
    head = view[: min(end, len(view))].tobytes()
    if head[:12] != MAGIC + b"\xff" * 4 or len(head) < end or _with_crc(head) != head:
        raise pa.ArrowInvalid("the magic or the CRC-32C of the header does not match")
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(head[len(MAGIC) :]))
        for kind in record_schema(schema).values():
            _ = isinstance(kind, Tensor) and kind.itemsize  # raises for an unknown dtype
    except (EOFError, OSError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise pa.ArrowInvalid(f"not a millstream schema: {error}") from None
    return schema, end


def is_header_torn(view: Bytes) -> bool:
    """Whether the file ends inside its header, before any record."""
    if len(view) < 16:
        return True
    is_cut = len(view) < 16 + int(view[12:16].view("<u4")[0])
    words = view[16 : len(view) - len(view) % 8].view("<u4")
    return is_cut and not (words[::2] == 0xFFFFFFFF).any()  # the marker that starts a record


def tail(schema: pa.Schema, rows: Iterable[Row], *, header_bytes: bytes, sidecar: bytes) -> bytes:
    """The end of a shard: end of stream, seal, and the footer where Arrow readers look up the records."""
    blocks = np.array([(r.offset, r.meta_bytes, 0, r.num_bytes - r.meta_bytes) for r in rows], _BLOCK)
    footer = _footer(schema, blocks)
    seal = SEAL.pack(SEAL_MAGIC, len(blocks), crc32c(header_bytes), crc32c(sidecar), crc32c(footer), 0)[:-4]
    return END_OF_STREAM + seal + crc32c(seal).to_bytes(4, "little") + footer


@dataclass(frozen=True)
class Seal:
    """The seal at the end of a shard: record count and checksums."""

    records: int
    header_crc32c: int
    sidecar_crc32c: int
    offset: int


def read_seal(end: bytes, file_bytes: int) -> Seal | None:
    """The seal, from the last bytes of a shard file; None if missing or damaged."""
    footer_bytes = int.from_bytes(end[-10:-6], "little") + 10
    start = len(end) - footer_bytes - SEAL.size
    if end[-6:] != MAGIC[:6] or start < 0:
        return None
    magic, records, header_crc, sidecar_crc, footer_crc, own = SEAL.unpack_from(end, start)
    if magic != SEAL_MAGIC or crc32c(end[start : start + SEAL.size - 4]) != own:
        return None
    if crc32c(end[-footer_bytes:]) != footer_crc:
        return None
    return Seal(records, header_crc, sidecar_crc, file_bytes - footer_bytes - SEAL.size)


def read_shard(view: Bytes) -> tuple[pa.Schema | None, list[Row], list[tuple[int, int]]]:
    """The schema of a shard, its readable records and its unreadable gaps (offset, end), from its bytes alone.

    Stops at the end of the stream. After a gap it continues at the next message with a valid checksum.
    """
    try:
        schema, position = read_header(view)
    except (OSError, ValueError, pa.ArrowException):
        return None, [], [(0, len(view))] if len(view) else []
    rows: list[Row] = []
    gaps: list[tuple[int, int]] = []
    tensors = _tensor_buffers(schema)
    while position < len(view) and view[position : position + 8].tobytes() != END_OF_STREAM:
        row = read_row(view, schema, position, tensors)
        if row is not None:
            rows.append(row)
            position += row.num_bytes
        else:
            gaps.append((position, _resync(view, schema, position + 8, tensors)))
            position = gaps[-1][1]
    return schema, rows, gaps


def is_whole(view: Bytes, offset: int) -> bool:
    """Whether a complete message starts at `offset`, damaged or not."""
    frame = _read_frame(view, offset)
    return frame is not None and offset + frame[0] <= len(view)


def read_row(view: Bytes, schema: pa.Schema, offset: int, tensor_buffers: Sequence[int]) -> Row | None:
    """The record whose message starts at `offset`; None if it is incomplete or its CRC does not match."""
    frame = _read_frame(view, offset)
    if frame is None or max(tensor_buffers, default=-1) >= len(frame[2]):
        return None
    num_bytes, meta_bytes, buffers = frame
    if not is_frame_intact(view, offset, num_bytes, [buffers[index] for index in tensor_buffers]):
        return None
    base = view.ctypes.data
    try:
        message = pa.ipc.read_message(pa.py_buffer(view[offset : offset + num_bytes]))
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=True)
        if batch.num_rows != 1:
            return None
        values: dict[str, object] = {}
        tensors: dict[str, TensorRow | None] = {}
        for index, (name, kind) in enumerate(record_schema(schema).items()):
            column = batch.column(index)
            if not isinstance(kind, Tensor):
                values[name] = column[0].as_py()
                continue
            tensors[name] = _tensor_row(cast(pa.StructArray, column), kind, base, default=offset)
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):  # not a millstream record
        return None
    row = Row(offset, num_bytes, meta_bytes, values, tensors)
    return row if is_row_intact(view, row, record_schema(schema)) else None


def is_row_intact(view: Bytes, row: Row, schema: Schema) -> bool:
    """Whether the message of a record, except its tensor data, matches its CRC."""
    extents = [(t.offset, t.num_bytes(cast(Tensor, schema[name]).itemsize)) for name, t in row.tensors.items() if t]
    return is_frame_intact(view, row.offset, row.num_bytes, extents)


def is_frame_intact(view: Bytes, offset: int, num_bytes: int, extents: Sequence[tuple[int, int]]) -> bool:
    """`is_row_intact` for a message at `offset` with tensor data at `extents` (offset, bytes)."""
    position, end, crc = offset, offset + num_bytes - 8, 0
    if end + 8 > len(view):
        return False
    for start, size in extents:
        if not size:
            continue
        if not position <= start <= start + size <= end:
            return False
        crc = crc32c(view[position:start], crc)
        position = start + size
    return int(view[end : end + 8].view("<u8")[0]) == crc32c(view[position:end], crc)


def damaged_fields(view: Bytes, row: Row, schema: Schema) -> list[tuple[str, int]]:
    """(field, first bad slice) of each tensor of the record whose CRC does not match."""
    damage: list[tuple[str, int]] = []
    for name, tensor in row.tensors.items():
        if tensor is None:
            continue
        spans = tensor.spans(cast(Tensor, schema[name]).itemsize)
        for index, ((offset, size), crc) in enumerate(zip(spans, tensor.crc32c, strict=True)):
            if offset + size > len(view) or crc32c(view[offset : offset + size]) != crc:
                damage.append((name, index))
                break
    return damage


def tensor_field(name: str, kind: Tensor, members: list[tuple[str, pa.DataType]]) -> pa.Field:
    """A struct field with the dtype and axes of a tensor as metadata."""
    metadata = {"millstream.dtype": kind.dtype, "millstream.axes": ",".join(kind.axes)}
    if kind.sliced:
        metadata["millstream.sliced"] = ",".join(kind.sliced)
    return pa.field(name, pa.struct(members), metadata=metadata)


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def _with_crc(head: bytes) -> bytes:
    before, mark, after = head.partition(_HEADER_CRC)
    crc = crc32c(before + mark + b"00000000" + after[8:])
    return before + mark + b"%08x" % crc + after[8:]


def _arrow_field(name: str, kind: Kind, compression: str) -> pa.Field:
    if not isinstance(kind, Tensor):
        return pa.field(name, kind)
    members: list[tuple[str, pa.DataType]] = [("data", DATA), ("shape", SHAPE), ("crc32c", CRCS)]
    if compression != "none":
        members.append(("sizes", SIZES))
    return tensor_field(name, kind, members)


def _kind(field: pa.Field) -> Kind:
    metadata = field.metadata or {}
    if b"millstream.dtype" not in metadata:
        return field.type
    axes, sliced = (_names(metadata, key) for key in (b"millstream.axes", b"millstream.sliced"))
    if not {*sliced} <= {*axes}:
        raise KeyError(f"no axes {', '.join(sliced)}")
    return Tensor(metadata[b"millstream.dtype"].decode(), axes, sliced)


def _names(metadata: Mapping[bytes, bytes], key: bytes) -> tuple[str, ...]:
    found = metadata.get(key, b"").decode()
    return tuple(found.split(",")) if found else ()


def _tensor_row(column: pa.StructArray, kind: Tensor, base: int, default: int) -> TensorRow | None:
    if not column[0].is_valid:
        return None
    data = column.field("data").buffers()[2]
    shape, crcs = (tuple(column.field(name)[0].as_py()) for name in ("shape", "crc32c"))
    sizes = tuple(column.field("sizes")[0].as_py()) if column.type.get_field_index("sizes") >= 0 else None
    offset = data.address - base if data is not None and data.size else default
    if any(n < 0 for n in shape) or len(shape) != len(kind.axes) or len(crcs) not in slice_counts(kind, shape):
        raise ValueError("shape and checksums do not match")
    return TensorRow(offset, shape, crcs, sizes)


def _read_frame(view: Bytes, offset: int) -> tuple[int, int, list[tuple[int, int]]] | None:
    """Bytes of the message at `offset`, of its metadata, and extents of its buffers; None if not a record batch.

    The bytes may be damaged: it reads the few fields that lead to the CRC, with every position checked.
    """
    meta_bytes = int.from_bytes(view[offset + 4 : offset + 8], "little")
    meta = view[offset + 8 : offset + 8 + meta_bytes].tobytes()
    if view[offset : offset + 4].tobytes() != b"\xff" * 4 or len(meta) < meta_bytes:
        return None

    def number(kind: str, at: int) -> int:
        if at < 0:
            raise struct.error
        return struct.unpack_from(kind, meta, at)[0]

    def field(table: int, index: int) -> int:
        vtable = table - number("<i", table)
        place = number("<H", vtable + 4 + 2 * index) if 4 + 2 * index < number("<H", vtable) else 0
        return table + place if place else len(meta)  # absent: no number can be read there

    try:
        message = number("<I", 0)
        header, body_bytes = field(message, 2), number("<q", field(message, 3))
        vector = field(header + number("<I", header), 2)
        vector += number("<I", vector)
        places = np.frombuffer(meta, "<i8", 2 * number("<I", vector), vector + 4).reshape(-1, 2).tolist()
    except (struct.error, ValueError):
        return None
    body = offset + 8 + meta_bytes
    buffers = [(body + at, size) for at, size in places]
    return (8 + meta_bytes + body_bytes, 8 + meta_bytes, buffers) if body_bytes >= 0 else None


def _tensor_buffers(schema: pa.Schema) -> list[int]:
    """Positions of the buffers with tensor data among all buffers of a record."""
    found: list[int] = []
    for index, kind in enumerate(record_schema(schema).values()):
        if isinstance(kind, Tensor):
            before = cast(Any, empty_batch(pa.schema(list(schema)[:index]))).serialize()
            frame = _read_frame(np.frombuffer(before, np.uint8), 0)
            found.append(len(frame[2] if frame else ()) + 3)  # validity of the struct, validity and offsets of data
    return found


def _resync(view: Bytes, schema: pa.Schema, start: int, tensor_buffers: Sequence[int]) -> int:
    """The offset of the next message with a valid checksum, or of the end of the stream, from `start` on."""
    whole = view[start : len(view) - len(view) % 8].view("<u4")[::2]
    for index in np.flatnonzero(whole == 0xFFFFFFFF):
        position = start + int(index) * 8
        if view[position : position + 16].tobytes() == END_OF_STREAM + SEAL_MAGIC:
            return position
        if read_row(view, schema, position, tensor_buffers) is not None:
            return position
    return len(view)


def _footer(schema: pa.Schema, blocks: "np.ndarray[tuple[int], np.dtype[np.void]]") -> bytes:
    """An Arrow file footer for record batches at these offsets.

    pyarrow writes a footer for as many empty batches; its fixed-size Block structs are then overwritten.
    """
    sink = io.BytesIO()
    empty = empty_batch(schema)
    with pa.ipc.new_file(sink, schema) as writer:
        for _ in blocks:
            writer.write_batch(empty)
    raw = sink.getvalue()
    size = int.from_bytes(raw[-10:-6], "little")
    footer = bytearray(raw[-10 - size :])
    (root,) = struct.unpack_from("<I", footer, 0)
    (to_vtable,) = struct.unpack_from("<i", footer, root)
    (slot,) = struct.unpack_from("<H", footer, root - to_vtable + 4 + 2 * 3)  # field 3 of Footer: recordBatches
    if len(blocks):
        vector = root + slot + struct.unpack_from("<I", footer, root + slot)[0]
        assert struct.unpack_from("<I", footer, vector)[0] == len(blocks)
        footer[vector + 4 : vector + 4 + blocks.nbytes] = blocks.tobytes()
    return bytes(footer)
