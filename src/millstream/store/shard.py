"""One shard being written: messages go to `shard-N.arrow.open`, sealing turns it into `shard-N.arrow`."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from millstream.records import Bytes, Schema, crc32c
from millstream.store.encode import Encoder
from millstream.store.layout import (
    ShardInfo,
    claim_shard,
    no_space,
    open_file,
    publish,
    shard_name,
    sidecar_name,
    sync_folder,
)
from millstream.store.message import Row, compression_of, header, record_schema, tail
from millstream.store.sidecar import to_parquet

_IOV_MAX = 1024


class ShardWriter:
    """Appends records to one `.open` shard. Every append is one write(2); a failed one leaves no trace."""

    def __init__(
        self, path: Path, number: int, fd: int, schema: pa.Schema, *, rows: list[Row], position: int, file: Path
    ) -> None:
        self.number = number
        self.rows = rows
        self.num_bytes = position
        self._path = path
        self._fd = fd
        self._schema = schema
        self._file = file
        self._encoder: Encoder | None = None

    @classmethod
    def create(cls, path: Path, *, first: int, schema: pa.Schema) -> "ShardWriter":
        """A new shard under a number no other writer has."""
        number, fd = claim_shard(path, first)
        return cls._start(path, number, fd, schema, open_file(path, number))

    @classmethod
    def rebuild(cls, path: Path, number: int, schema: pa.Schema) -> "ShardWriter":
        """A replacement for shard `number`, under a temporary name until it is sealed."""
        file = path / f".{shard_name(number)}.rebuild"
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        return cls._start(path, number, fd, schema, file)

    @classmethod
    def _start(cls, path: Path, number: int, fd: int, schema: pa.Schema, file: Path) -> "ShardWriter":
        shard = cls(path, number, fd, schema, rows=[], position=0, file=file)
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

    def append(self, record: Mapping[str, object]) -> Row:
        """Write one record."""
        self._encoder = self._encoder or Encoder(self._schema)
        parts, row = self._encoder.encode(record, self.num_bytes)
        self._add(parts, row)
        return row

    def append_message(self, message: Bytes, row: Row) -> None:
        """Write a record that is already a message, as it stands in another shard."""
        self._add([pa.py_buffer(message)], row.moved(self.num_bytes))

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def seal(self, *, seconds: float | None = None) -> ShardInfo:
        """Footer, sidecar, rename: after it the shard is complete under its final name. Can be tried again."""
        created = float((self._schema.metadata or {}).get(b"millstream.created", b"0"))
        seconds = round(time.time() - created if seconds is None else seconds, 3)
        fields, compression = record_schema(self._schema), compression_of(self._schema)
        sidecar = to_parquet(self.rows, fields, compression=compression, seconds=seconds)
        end = tail(self._schema, self.rows, header_bytes=header(self._schema), sidecar=sidecar)
        self._write([end])
        os.ftruncate(self._fd, self.num_bytes + len(end))
        self.sync()
        final, beside = self._path / shard_name(self.number), self._path / sidecar_name(self.number)
        replaces = final.exists()  # then the sidecar there belongs to the old file until that is gone
        if not replaces:
            publish(beside, sidecar)
        os.rename(self._file, final)  # the commit point
        if replaces:
            publish(beside, sidecar)
        self.release()
        sync_folder(self._path)
        size = self.num_bytes + len(end)
        return ShardInfo(self.number, len(self.rows), size, seconds, crc32c(sidecar))

    def discard(self) -> None:
        """Remove the open shard."""
        self._file.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Let go of the file as it is; whoever opens the store for writing next recovers it."""
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
            with no_space(self._file):
                position = start
                queue = [memoryview(part) for part in parts]
                while queue:
                    written = os.pwritev(self._fd, queue[:_IOV_MAX], position)
                    position += written
                    queue = _rest(queue, written)
        except BaseException:
            os.ftruncate(self._fd, start)
            raise


def _rest(queue: list[memoryview], written: int) -> list[memoryview]:
    """What is left after `written` bytes."""
    while queue and written >= len(queue[0]):
        written -= len(queue[0])
        queue = queue[1:]
    return [queue[0][written:], *queue[1:]] if queue and written else queue
