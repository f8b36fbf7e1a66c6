"""One shard: written as `shard-N.arrow.open`, sealed as `shard-N.arrow`, recovered after an interruption or damage."""

import json
import os
import shutil
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa

from millstream.core.files import is_same_file, lock, no_space, publish, sync_folder
from millstream.core.memory import Map
from millstream.core.record import Bytes, Schema, Tensor, crc32c
from millstream.errors import StoreError
from millstream.traces.store.encode import Encoder
from millstream.traces.store.format import (
    Row,
    bad_slice,
    compression_of,
    header,
    header_is_torn,
    is_whole,
    read_header,
    record_schema,
    tail,
    walk,
)
from millstream.traces.store.manifest import (
    APPEND_AGAIN,
    DAMAGED,
    ShardInfo,
    check_version,
    list_shards,
    open_file,
    shard_name,
    sidecar_name,
)
from millstream.traces.store.sidecar import to_parquet

_IOV_MAX = 1024
ID_FIELD = "question_id"
_WAIT_S = 15.0


class ShardWriter:
    """Appends records to one `.open` shard. Every append is one write(2); a failed append leaves nothing behind."""

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
        """Copy the message of a record from another shard."""
        self._add([pa.py_buffer(message)], row.moved(self.num_bytes))

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def seal(self, *, seconds: float | None = None) -> ShardInfo:
        """Write footer and sidecar, then rename: the shard is complete under its final name. Can be retried."""
        created = float((self._schema.metadata or {}).get(b"millstream.created", b"0"))
        seconds = round(time.time() - created if seconds is None else seconds, 3)
        fields, compression = record_schema(self._schema), compression_of(self._schema)
        sidecar = to_parquet(self.rows, fields, compression=compression, seconds=seconds)
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
        sync_folder(self._path)
        size = self.num_bytes + len(end)
        return ShardInfo(self.number, len(self.rows), size, seconds, crc32c(sidecar))

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


@dataclass(frozen=True)
class LostRecord:
    """A record that could not be recovered; extract its `question_id` (None if unreadable) again."""

    shard: str
    row: int | None
    question_id: object
    reason: str


@dataclass(frozen=True)
class Recovery:
    """The result of recovering one interrupted shard."""

    number: int
    shard: ShardInfo | None  # None: it had no complete record
    cut_bytes: int  # of the incomplete record at the end
    lost: tuple[LostRecord, ...] = ()


def recover_all(path: Path) -> list[Recovery]:
    """Recover every open shard that no running writer has locked."""
    recovered: list[Recovery] = []
    for number in list_shards(path)[1]:
        with abandoned(open_file(path, number)) as fd:
            if fd is not None:
                recovered.append(_recover(path, number, fd))
    return recovered


@contextmanager
def abandoned(file: Path) -> Generator[int | None]:
    """The locked descriptor of an `.open` shard; None if a running writer has locked it."""
    try:
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        # On a file system without locks no shard counts as abandoned: its writer may be running.
        yield fd if lock(fd, without_locks=False) and is_same_file(fd, file) else None
    finally:
        os.close(fd)


def wait_for_writers(path: Path) -> None:
    """Wait until no other writer uses the store: the workers of a killed run take a moment to exit."""
    until = time.monotonic() + _WAIT_S
    while held := list_shards(path)[1]:
        recover_all(path)
        if time.monotonic() > until:
            raise StoreError(
                f"{open_file(path, held[0])}: another writer is running, and both would do the same work. "
                "Wait for it to finish, or stop it, and run this again"
            )
        time.sleep(0.1)


def damaged_fields(view: Bytes, row: Row, schema: Schema) -> list[tuple[str, int]]:
    """(field, slice) of each tensor of the record whose CRC does not match."""
    damage: list[tuple[str, int]] = []
    for name, tensor in row.tensors.items():
        kind = schema[name]
        assert isinstance(kind, Tensor)
        if tensor is not None and (index := bad_slice(view, tensor, kind.itemsize)) is not None:
            damage.append((name, index))
    return damage


def read_shard(view: Bytes) -> tuple[pa.Schema | None, list[Row], list[tuple[int, int]]]:
    """The schema of a shard, its readable records and its unreadable gaps (offset, end), from its bytes alone."""
    try:
        schema, start = read_header(view)
    except (OSError, ValueError, pa.ArrowException):
        return None, [], [(0, len(view))] if len(view) else []
    found = list(walk(view, schema, start))
    return schema, [x for x in found if isinstance(x, Row)], [x for x in found if not isinstance(x, Row)]


def rebuild(
    path: Path, number: int, *, source: Path, schema: pa.Schema, rows: Sequence[Row], lost: Sequence[LostRecord]
) -> ShardInfo:
    """Rewrite shard `number` with these rows of `source`, which is set aside with the list of lost records."""
    view = Map(source, sequential=True).view
    shard = ShardWriter.rebuild(path, number, schema)
    try:
        for row in rows:
            shard.append_message(view[row.offset : row.offset + row.num_bytes], row)
        set_aside(path, source, lost)
        return shard.seal(seconds=0)
    except BaseException:
        shard.discard()
        raise


def set_aside(path: Path, file: Path, lost: Sequence[LostRecord]) -> None:
    """Keep the damaged file (as a hard link, if possible) and list its lost records in `damaged/lost.jsonl`."""
    folder = path / DAMAGED
    folder.mkdir(exist_ok=True)
    count = sum(1 for _ in folder.glob(f"{file.name}*"))
    target = folder / (f"{file.name}.{count}" if count else file.name)
    try:
        os.link(file, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(file, target)
    with open(folder / "lost.jsonl", "a", encoding="utf-8") as f:
        f.writelines(json.dumps(asdict(record), default=str) + "\n" for record in lost)
        f.flush()
        os.fsync(f.fileno())
    sync_folder(folder)


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


def _recover(path: Path, number: int, fd: int) -> Recovery:
    file = open_file(path, number)
    view = Map(file, sequential=True).view
    schema, rows, gaps = read_shard(view)
    check_version(path, int(((schema.metadata if schema else None) or {}).get(b"millstream.version", 0)))
    cut_bytes = 0
    if gaps and gaps[-1][1] == len(view) and not is_whole(view, gaps[-1][0]):  # else its append had completed
        start, end = gaps.pop()
        cut_bytes = end - start
    if (path / shard_name(number)).exists():  # a rebuild was interrupted after publishing its shard
        set_aside(path, file, [])
        file.unlink()
        return Recovery(number, None, 0)
    if schema is None and not header_is_torn(view):
        lost = (LostRecord(file.name, None, None, "unreadable header"),)
        set_aside(path, file, lost)
        file.unlink()
        return Recovery(number, None, 0, lost)
    if schema is None or not (rows or gaps):
        file.unlink()
        return Recovery(number, None, cut_bytes)

    fields = record_schema(schema)
    bad = {index: damage for index, row in enumerate(rows) if (damage := damaged_fields(view, row, fields))}
    if not bad and not gaps:
        created = float((schema.metadata or {}).get(b"millstream.created", b"0"))
        seconds = max(0.0, os.fstat(fd).st_mtime - created)
        end = rows[-1].offset + rows[-1].num_bytes
        shard = ShardWriter(path, number, os.dup(fd), schema, rows=rows, position=end, file=file)
        try:
            return Recovery(number, shard.seal(seconds=seconds), cut_bytes)
        finally:
            shard.release()

    lost = [LostRecord(file.name, None, None, f"unreadable bytes {a} to {b}") for a, b in gaps]
    lost += [
        LostRecord(file.name, index, rows[index].values.get(ID_FIELD), f"CRC-32C of {damage[0][0]}")
        for index, damage in bad.items()
    ]
    good = [row for index, row in enumerate(rows) if index not in bad]
    info = rebuild(path, number, source=file, schema=schema, rows=good, lost=lost) if good else None
    if not good:
        set_aside(path, file, lost)
    file.unlink()
    return Recovery(number, info, cut_bytes, tuple(lost))
