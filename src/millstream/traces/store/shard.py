"""Interrupted shards -> sealed shards, and damaged shards -> shards without the damage.

A torn tail is cut in place; no tensor byte is copied. Only where whole records in the middle are damaged is the shard
written anew from its good messages, and then the old file is set aside under `damaged/`, never deleted.
"""

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa

from millstream.errors import StoreError
from millstream.records import Bytes, Schema, Tensor
from millstream.store.layout import (
    DAMAGED,
    ShardInfo,
    abandoned,
    check_version,
    list_shards,
    open_file,
    shard_name,
    sync_folder,
)
from millstream.store.maps import Map
from millstream.store.message import Row, bad_slice, header_is_torn, is_whole, read_header, record_schema, walk
from millstream.store.shard import ShardWriter

ID_FIELD = "question_id"
_WAIT_S = 15.0


@dataclass(frozen=True)
class LostRecord:
    """A record that could not be kept; `question_id` (where it could be read) says what to extract again."""

    shard: str
    row: int | None
    question_id: object
    reason: str


@dataclass(frozen=True)
class Recovery:
    """What became of one interrupted shard."""

    number: int
    shard: ShardInfo | None  # None: it held no whole record
    cut_bytes: int  # the record that was in progress
    lost: tuple[LostRecord, ...] = ()


def recover_all(path: Path) -> list[Recovery]:
    """Recover every open shard that no living writer holds."""
    recovered: list[Recovery] = []
    for number in list_shards(path)[1]:
        with abandoned(open_file(path, number)) as fd:
            if fd is not None:
                recovered.append(_recover(path, number, fd))
    return recovered


def wait_for_writers(path: Path) -> None:
    """Until no other writer is at work on the store, for a while: the workers of a killed run take a moment to end."""
    until = time.monotonic() + _WAIT_S
    while held := list_shards(path)[1]:
        recover_all(path)
        if time.monotonic() > until:
            raise StoreError(
                f"{open_file(path, held[0])}: a writer is at work on it, and two at once would do the same work twice. "
                "Wait for it to end, or stop it, and run this again"
            )
        time.sleep(0.1)


def damaged_fields(view: Bytes, row: Row, schema: Schema) -> list[tuple[str, int]]:
    """(field, slice) of each tensor of the record that fails its CRC."""
    damage: list[tuple[str, int]] = []
    for name, tensor in row.tensors.items():
        kind = schema[name]
        assert isinstance(kind, Tensor)
        if tensor is not None and (index := bad_slice(view, tensor, kind.itemsize)) is not None:
            damage.append((name, index))
    return damage


def read_shard(view: Bytes) -> tuple[pa.Schema | None, list[Row], list[tuple[int, int]]]:
    """A shard's schema, its readable records and the stretches (offset, end) that are none, from its bytes alone."""
    try:
        schema, start = read_header(view)
    except (OSError, pa.ArrowException):
        return None, [], [(0, len(view))] if len(view) else []
    found = list(walk(view, schema, start))
    return schema, [x for x in found if isinstance(x, Row)], [x for x in found if not isinstance(x, Row)]


def rebuild(
    path: Path, number: int, *, source: Path, schema: pa.Schema, rows: Sequence[Row], lost: Sequence[LostRecord]
) -> ShardInfo:
    """Shard `number` written anew with these rows of `source`, which is set aside with the list of what was lost."""
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
    """Keep the damaged file (a second name for it, no copy) and note what it lost in `damaged/lost.jsonl`."""
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


def _recover(path: Path, number: int, fd: int) -> Recovery:
    file = open_file(path, number)
    view = Map(file, sequential=True).view
    schema, rows, gaps = read_shard(view)
    check_version(path, int(((schema.metadata if schema else None) or {}).get(b"millstream.version", 0)))
    cut_bytes = 0
    if gaps and gaps[-1][1] == len(view) and not is_whole(view, gaps[-1][0]):  # else its append had returned
        start, end = gaps.pop()
        cut_bytes = end - start
    if (path / shard_name(number)).exists():  # a rebuild was interrupted after it had published its shard
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
