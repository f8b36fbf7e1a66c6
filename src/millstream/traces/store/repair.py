"""Recover the shards of killed writers, find damage (`verify`), make a store readable again (`repair`).

Deletes nothing that cannot be rebuilt.
"""

import itertools
import json
import os
import shutil
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from millstream.core.console import Progress, silent
from millstream.core.files import is_same_file, lock, sync_folder
from millstream.core.memory import Map
from millstream.core.record import Bytes, Schema, crc32c
from millstream.core.remote import mapped
from millstream.core.tables import is_table_intact
from millstream.errors import CorruptShard, StoreError
from millstream.traces.store.format import (
    END_OF_STREAM,
    Row,
    Seal,
    compression_of,
    damaged_fields,
    id_field,
    is_header_torn,
    is_row_intact,
    is_whole,
    read_header,
    read_shard,
    record_schema,
)
from millstream.traces.store.ids import load_index, update_ids
from millstream.traces.store.locks import StoreLock, only_job
from millstream.traces.store.manifest import (
    DAMAGED,
    GROUPS,
    IDS,
    LABELS,
    MANIFEST,
    Manifest,
    ShardInfo,
    check_version,
    copied_shards,
    is_manifest_intact,
    list_shards,
    new_schema,
    number_of,
    open_file,
    read_manifest,
    read_shard_seal,
    read_sidecar,
    shard_info,
    shard_name,
    sidecar_name,
    write_manifest,
)
from millstream.traces.store.shard_writer import ShardWriter
from millstream.traces.store.sidecar import Sidecar


@dataclass(frozen=True)
class LostRecord:
    """A record that could not be recovered; extract the question of its `id` (None if unreadable) again."""

    shard: str
    row: int | None
    id: object
    reason: str


@dataclass(frozen=True)
class Recovery:
    """The result of recovering one interrupted shard."""

    number: int
    shard: ShardInfo | None  # None: it had no complete record
    cut_bytes: int  # of the incomplete record at the end
    lost: tuple[LostRecord, ...] = ()


@dataclass(frozen=True)
class Damage:
    """One damaged file, record or field. `row` is the record in the shard, `number` in the store."""

    file: str
    what: str
    row: int | None = None
    number: int | None = None
    id: object = None
    field: str | None = None

    def __str__(self) -> str:
        record = f", record {self.number} (row {self.row}, id {self.id!r})" if self.row is not None else ""
        return f"{self.file}{record}{f', field {self.field!r}' if self.field else ''}: {self.what}"


@dataclass
class Repair:
    """The result of a repair."""

    recovered: list[Recovery] = field(default_factory=list[Recovery])
    resealed: list[str] = field(default_factory=list[str])
    rebuilt: list[str] = field(default_factory=list[str])
    lost: list[LostRecord] = field(default_factory=list[LostRecord])
    set_aside: list[str] = field(default_factory=list[str])  # copies of shards, damaged labels: no record is lost


def recover_all(path: Path) -> list[Recovery]:
    """Recover every open shard that no running writer has locked."""
    recovered: list[Recovery] = []
    for number in list_shards(path)[1]:
        with _abandoned(open_file(path, number)) as fd:
            if fd is not None:
                recovered.append(_recover(path, number, fd))
    return recovered


def wait_for_writers(path: Path, *, wait_s: float = 60.0) -> None:
    """Wait until no other writer uses the store: the workers of a killed run may take some seconds to exit."""
    until = time.monotonic() + wait_s
    while True:
        recover_all(path)
        held = list_shards(path)[1]
        if not held:
            return
        if time.monotonic() > until:
            raise StoreError(
                f"{open_file(path, held[0])}: another writer is running, and both would do the same work. "
                "Wait for it to finish, or stop it, and run this again"
            )
        time.sleep(0.1)


def verify(path: Path, *, fast: bool = False, progress: Progress = silent) -> Iterator[Damage]:
    """All damage in the store. `fast` checks the structure (headers, footers, sidecars, manifest), not the records."""
    manifest = read_manifest(path)
    if not is_manifest_intact(path):
        yield Damage(MANIFEST, "missing or damaged; it can be rebuilt")
    if (path / IDS).exists() and load_index(path) is None:
        yield Damage(IDS, "damaged; it can be rebuilt")
    for copy, original in _copies(path, manifest).items():
        yield Damage(shard_name(copy), f"a copy of {shard_name(original)}")
    for name in _damaged_tables(path):
        yield Damage(name, "fails its checksum, or has none; write it again with millstream label")
    done = first = 0
    for shard in manifest.shards:
        yield from _Examination(path, shard).damages(first, fast=fast)
        done += shard.bytes
        first += shard.records
        progress(done, shard_name(shard.number))


def repair(path: Path, *, progress: Progress = silent) -> Repair:
    """Recover interrupted shards, re-seal or rebuild damaged ones, set damaged records aside with their ids."""
    read_manifest(path)  # raises for anything but a store, and for a newer format
    with only_job(path, wait_s=0), StoreLock(path, exclusive=True, wait_s=0):
        return _repair(path, progress)


def _repair(path: Path, progress: Progress) -> Repair:
    for number in list_shards(path)[1]:
        with _abandoned(open_file(path, number)) as fd:
            if fd is None:
                raise StoreError(f"{open_file(path, number)}: a writer is running. Stop it, then repair")
    result = Repair(recovered=recover_all(path))
    result.lost = [record for recovery in result.recovered for record in recovery.lost]
    copies = _copies(path, read_manifest(path))
    aside = [name for copy in copies for name in (shard_name(copy), sidecar_name(copy)) if (path / name).exists()]
    result.set_aside = [*aside, *_damaged_tables(path)]
    for name in result.set_aside:
        _set_aside(path, path / name, [])
        (path / name).unlink()
    manifest = read_manifest(path)
    manifest = replace(manifest, shards=tuple(shard for shard in manifest.shards if shard.number not in copies))
    shards: list[ShardInfo] = []
    done = 0
    for shard in manifest.shards:
        kept = _repair_shard(path, shard, manifest.config, result)
        if kept is not None:
            shards.append(kept)
        done += shard.bytes
        progress(done, shard_name(shard.number))
    for leftover in [*path.glob(".*.tmp"), *path.glob(".*.rebuild")]:
        leftover.unlink()
    manifest = replace(manifest, shards=tuple(shards))
    write_manifest(path, manifest)
    if (path / IDS).exists() and load_index(path) is None:
        (path / IDS).unlink()
    update_ids(path, manifest)
    return result


def rebuild(
    path: Path,
    number: int,
    *,
    source: Path,
    schema: pa.Schema,
    rows: Sequence[Row],
    lost: Sequence[LostRecord] | None = None,
    seconds: float = 0,
) -> ShardInfo:
    """Write shard `number` again with these rows of `source`. With a list of lost records, `source` is set aside."""
    view = Map(source, sequential=True).view
    shard = ShardWriter.rebuild(path, number, schema)
    try:
        for row in rows:
            shard.append_message(view[row.offset : row.offset + row.num_bytes], row)
        if lost is not None:
            _set_aside(path, source, lost)
        return shard.seal(seconds=seconds)
    except BaseException:
        shard.discard()
        raise


@contextmanager
def _abandoned(file: Path) -> Generator[int | None]:
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


def _recover(path: Path, number: int, fd: int) -> Recovery:
    file = open_file(path, number)
    view = Map(file, sequential=True).view
    schema, rows, gaps = read_shard(view)
    if schema is not None:
        check_version(path, number_of(schema, "version"))
    cut_bytes = 0
    if gaps and gaps[-1][1] == len(view) and not is_whole(view, gaps[-1][0]):  # else its append had completed
        start, end = gaps.pop()
        cut_bytes = end - start
    if (path / shard_name(number)).exists():  # a rebuild was interrupted after publishing its shard
        _set_aside(path, file, [])
        file.unlink()
        return Recovery(number, None, 0)
    if schema is None and not is_header_torn(view):
        lost = [LostRecord(file.name, None, None, "unreadable header")]
        _set_aside(path, file, lost)
        file.unlink()
        return Recovery(number, None, 0, tuple(lost))
    if schema is None or not (rows or gaps):
        file.unlink()
        return Recovery(number, None, cut_bytes)

    good, lost = _sort_out(file, view, rows, gaps, record_schema(schema))
    if not lost:
        seconds = max(0.0, os.fstat(fd).st_mtime - number_of(schema, "created"))
        shard = ShardWriter(path, number, os.dup(fd), schema, file=file, rows=rows)
        try:
            return Recovery(number, shard.seal(seconds=seconds), cut_bytes)
        finally:
            shard.release()
    info = rebuild(path, number, source=file, schema=schema, rows=good, lost=lost) if good else None
    if not good:
        _set_aside(path, file, lost)
    file.unlink()
    return Recovery(number, info, cut_bytes, tuple(lost))


class _Examination:
    """A complete check of one shard: its structure and its records."""

    def __init__(self, path: Path, shard: ShardInfo) -> None:
        self.file = path / shard_name(shard.number)
        self.shard = shard
        self.is_missing = not self.file.exists()
        self.view: Bytes = np.empty(0, np.uint8) if self.is_missing else mapped(self.file)
        self.seal: Seal | None = None if self.is_missing else read_shard_seal(self.file)
        self.arrow, self.start = _header(self.view)
        self.sidecar = self._load_sidecar(path)
        self.is_header_intact = self.arrow is not None and (
            self.seal is None or crc32c(self.view[: self.start]) == self.seal.header_crc32c
        )
        self.rows: list[Row] = []
        self.gaps: list[tuple[int, int]] = []
        self.schema: Schema = {}
        if self.sidecar is not None:
            self.rows = [self.sidecar.row(row) for row in range(self.sidecar.num_records)]
            self.schema = self.sidecar.schema
        elif self.arrow is not None:
            _, self.rows, self.gaps = read_shard(self.view)
            self.schema = record_schema(self.arrow)

    def _load_sidecar(self, path: Path) -> Sidecar | None:
        """The sidecar, if it can be the one of this shard; otherwise the shard itself is read."""
        data = read_sidecar(
            path, self.shard.number, self.seal.sidecar_crc32c if self.seal else self.shard.sidecar_crc32c
        )
        try:
            sidecar = None if data is None else Sidecar(data, path / sidecar_name(self.shard.number))
            if sidecar is not None:
                sidecar.check()
        except CorruptShard:
            return None
        if sidecar is None or (self.seal and self.seal.records != sidecar.num_records):
            return None
        found = sidecar.schema, sidecar.compression
        is_other = self.arrow is not None and found != (record_schema(self.arrow), compression_of(self.arrow))
        return None if is_other else sidecar

    def structure(self) -> Iterator[str]:
        """Damage to the shard apart from its records."""
        if self.is_missing:
            yield "the file is missing"
            return
        if not self.is_header_intact:
            yield "the header is damaged"
        if self.seal is None:
            yield "the end of the file (seal, footer) is damaged"
        else:
            if not self._is_contiguous(self.seal):
                yield "the records do not fill the file from header to seal"
            sealed = self.seal.records, self.seal.sidecar_crc32c
            if sealed != (self.shard.records, self.shard.sidecar_crc32c):
                yield f"the manifest describes a different file than {self.file.name}"
        if self.sidecar is None:
            yield f"its sidecar {sidecar_name(self.shard.number)} is missing or damaged; it can be rebuilt"
        for start, end in self.gaps:
            yield f"unreadable from byte {start} to {end}"

    def _is_contiguous(self, seal: Seal) -> bool:
        edges = [self.start, *(row.offset + row.num_bytes for row in self.rows)]
        return (
            [row.offset for row in self.rows] == edges[:-1]
            and edges[-1] == seal.offset - len(END_OF_STREAM)
            and self.view[edges[-1] : seal.offset].tobytes() == END_OF_STREAM
        )

    def damages(self, first: int, *, fast: bool) -> Iterator[Damage]:
        for what in self.structure():
            yield Damage(self.file.name, what)
        for index, row in enumerate(self.rows):
            if fast and row.offset + row.num_bytes <= len(self.view):
                continue
            for name, what in _problems(self.view, row, self.schema):
                key = row.values.get(id_field(row.values))
                yield Damage(self.file.name, what, row=index, number=first + index, id=key, field=name)


def _repair_shard(path: Path, shard: ShardInfo, config: Mapping[str, object], result: Repair) -> ShardInfo | None:
    """The shard after the repair; None if nothing could be recovered."""
    seen = _Examination(path, shard)
    structure = list(seen.structure())
    good, lost = _sort_out(seen.file, seen.view, seen.rows, seen.gaps, seen.schema)
    if lost and seen.sidecar is not None and seen.arrow is not None:  # is the sidecar wrong, not the records?
        _, rows, gaps = read_shard(seen.view)
        again = _sort_out(seen.file, seen.view, rows, gaps, record_schema(seen.arrow))
        good, lost = max((good, lost), again, key=lambda found: len(found[0]))
    if not structure and not lost and good == seen.rows:
        return shard_info(path, shard.number)
    if not seen.rows:
        lost = [LostRecord(seen.file.name, None, None, f"{shard.records} records: {'; '.join(structure)}")]
    result.lost += lost
    if not good:
        for file in (seen.file, path / sidecar_name(shard.number)):
            if file.exists():
                _set_aside(path, file, lost if file == seen.file or seen.is_missing else [])
                file.unlink()
        return None
    if not lost and seen.is_header_intact and seen.arrow is not None:
        # All records are intact: rewrite only what follows them and can be derived from them.
        fd = os.open(seen.file, os.O_RDWR | os.O_CLOEXEC)
        writer = ShardWriter(path, shard.number, fd, seen.arrow, file=seen.file, rows=good)
        result.resealed.append(seen.file.name)
        return writer.seal(seconds=shard.seconds)
    arrow = seen.arrow
    if not seen.is_header_intact or arrow is None:  # then the rows come from the sidecar
        assert seen.sidecar is not None
        arrow = new_schema(seen.schema, compression=seen.sidecar.compression, config=config)
    result.rebuilt.append(seen.file.name)
    return rebuild(path, shard.number, source=seen.file, schema=arrow, rows=good, lost=lost)


def _sort_out(
    file: Path, view: Bytes, rows: Sequence[Row], gaps: Sequence[tuple[int, int]], schema: Schema
) -> tuple[list[Row], list[LostRecord]]:
    """The intact records of a shard, and the lost ones."""
    good: list[Row] = []
    lost: list[LostRecord] = []
    for index, row in enumerate(rows):
        if problems := _problems(view, row, schema):
            reason = "; ".join(what for _, what in problems)
            lost.append(LostRecord(file.name, index, row.values.get(id_field(row.values)), reason))
        else:
            good.append(row)
    lost += [LostRecord(file.name, None, None, f"unreadable bytes {start} to {end}") for start, end in gaps]
    return good, lost


def _problems(view: Bytes, row: Row, schema: Schema) -> list[tuple[str | None, str]]:
    """(field, problem) for all damage in one record."""
    if row.offset + row.num_bytes > len(view):
        return [(None, "its bytes are missing")]
    found: list[tuple[str | None, str]] = []
    if not is_row_intact(view, row, schema):
        found.append((None, "its frame or scalars fail their CRC-32C"))
    return found + [(name, f"slice {index} fails its CRC-32C") for name, index in damaged_fields(view, row, schema)]


def _damaged_tables(path: Path) -> list[str]:
    """Of what `label` writes."""
    there = [name for name in (LABELS, GROUPS) if (path / name).exists()]
    return [name for name in there if not is_table_intact((path / name).read_bytes())]


def _copies(path: Path, manifest: Manifest) -> dict[int, int]:
    """Numbers of shards that are copies of others, which are in the manifest or have lower numbers."""
    known = [shard.number for shard in manifest.shards]
    others = [number for number in list_shards(path)[0] if number not in known]
    return copied_shards(path, [*manifest.shards, *(shard_info(path, number) for number in others)])


def _set_aside(path: Path, file: Path, lost: Sequence[LostRecord]) -> None:
    """Keep the damaged file (as a hard link, if possible) and list its lost records in `damaged/lost.jsonl`."""
    folder = path / DAMAGED
    folder.mkdir(exist_ok=True)
    names = itertools.chain([file.name], (f"{file.name}.{count}" for count in itertools.count(1)))
    target = next(target for name in names if not (target := folder / name).exists())
    try:
        os.link(file, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(file, target)
    with open(folder / "lost.jsonl", "a", encoding="utf-8") as f:
        f.writelines(json.dumps(asdict(record), default=str) + "\n" for record in lost)
        f.flush()
        os.fsync(f.fileno())
    sync_folder(folder)


def _header(view: Bytes) -> tuple[pa.Schema | None, int]:
    try:
        return read_header(view)
    except (OSError, ValueError, pa.ArrowException):
        return None, 0
