"""Find damage (`verify`) and make a store readable again (`repair`). Deletes nothing that cannot be rebuilt."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from millstream.core.console import Progress, silent
from millstream.core.memory import Map
from millstream.core.record import Bytes, Schema, crc32c
from millstream.errors import StoreError
from millstream.traces.store.format import (
    END_OF_STREAM,
    Row,
    Seal,
    arrow_schema,
    is_row_intact,
    read_header,
    record_schema,
)
from millstream.traces.store.manifest import (
    IDS,
    MANIFEST,
    Manifest,
    ShardInfo,
    is_manifest_intact,
    list_shards,
    open_file,
    read_manifest,
    read_shard_seal,
    shard_info,
    shard_metadata,
    shard_name,
    sidecar_name,
    write_manifest,
)
from millstream.traces.store.shard import (
    ID_FIELD,
    LostRecord,
    Recovery,
    ShardWriter,
    abandoned,
    damaged_fields,
    read_shard,
    rebuild,
    recover_all,
    set_aside,
)
from millstream.traces.store.sidecar import Sidecar
from millstream.traces.store.table import load_index, update_ids


@dataclass(frozen=True)
class Damage:
    """One damaged file, record or field. `row` is the record in the shard, `number` in the store."""

    file: str
    what: str
    row: int | None = None
    number: int | None = None
    question_id: object = None
    field: str | None = None

    def __str__(self) -> str:
        record = (
            f", record {self.number} (row {self.row}, {ID_FIELD} {self.question_id!r})" if self.row is not None else ""
        )
        return f"{self.file}{record}{f', field {self.field!r}' if self.field else ''}: {self.what}"


@dataclass
class Repair:
    """The result of a repair."""

    recovered: list[Recovery] = field(default_factory=list[Recovery])
    resealed: list[str] = field(default_factory=list[str])
    rebuilt: list[str] = field(default_factory=list[str])
    lost: list[LostRecord] = field(default_factory=list[LostRecord])


def verify(path: Path, *, fast: bool = False, progress: Progress = silent) -> Iterator[Damage]:
    """All damage in the store. `fast` checks the structure (headers, footers, sidecars, manifest), not the records."""
    manifest = read_manifest(path)
    if not is_manifest_intact(path):
        yield Damage(MANIFEST, "missing or damaged; it can be rebuilt")
    if (path / IDS).exists() and load_index(path) is None:
        yield Damage(IDS, "damaged; it can be rebuilt")
    done = first = 0
    for shard in manifest.shards:
        yield from _Examination(path, shard).damages(first, fast=fast)
        done += shard.bytes
        first += shard.records
        progress(done, shard_name(shard.number))


def repair(path: Path, *, progress: Progress = silent) -> Repair:
    """Recover interrupted shards, re-seal or rebuild damaged ones, set damaged records aside with their ids."""
    read_manifest(path)  # raises for anything but a store, and for a newer format
    for number in list_shards(path)[1]:
        with abandoned(open_file(path, number)) as fd:
            if fd is None:
                raise StoreError(f"{open_file(path, number)}: a writer is running. Stop it, then repair")
    result = Repair(recovered=recover_all(path))
    result.lost = [record for recovery in result.recovered for record in recovery.lost]
    manifest = read_manifest(path)
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
    manifest = Manifest(manifest.config, manifest.compression, manifest.arrow_schema, tuple(shards))
    write_manifest(path, manifest)
    if (path / IDS).exists() and load_index(path) is None:
        (path / IDS).unlink()
    update_ids(path, manifest)
    return result


class _Examination:
    """A complete check of one shard: its structure and its records."""

    def __init__(self, path: Path, shard: ShardInfo) -> None:
        self.file = path / shard_name(shard.number)
        self.shard = shard
        self.view: Bytes | None = Map(self.file, sequential=True).view if self.file.exists() else None
        self.seal: Seal | None = read_shard_seal(self.file) if self.view is not None else None
        self.arrow, self.start = _header(self.view)
        self.sidecar = _sidecar(path, shard, self.seal)
        self.is_header_intact = (
            self.view is not None
            and self.arrow is not None
            and (self.seal is None or crc32c(self.view[: self.start]) == self.seal.header_crc32c)
        )
        self.rows: list[Row] = []
        self.gaps: list[tuple[int, int]] = []
        self.schema: Schema = {}
        if self.sidecar is not None:
            self.rows = [self.sidecar.row(row) for row in range(self.sidecar.num_records)]
            self.schema = self.sidecar.schema
        elif self.view is not None and self.arrow is not None:
            _, self.rows, self.gaps = read_shard(self.view)
            self.schema = record_schema(self.arrow)

    def structure(self) -> Iterator[str]:
        """Damage to the shard apart from its records."""
        if self.view is None:
            yield "the file is missing"
            return
        if not self.is_header_intact:
            yield "the header is damaged"
        if self.seal is None:
            yield "the end of the file (seal, footer) is damaged"
        elif not self._is_contiguous(self.view, self.seal):
            yield "the records do not fill the file from header to seal"
        if self.seal is not None and (self.seal.records, self.seal.sidecar_crc32c) != (
            self.shard.records,
            self.shard.sidecar_crc32c,
        ):
            yield f"the manifest describes a different file than {self.file.name}"
        if self.sidecar is None:
            yield f"its sidecar {sidecar_name(self.shard.number)} is missing or damaged; it can be rebuilt"
        for start, end in self.gaps:
            yield f"unreadable from byte {start} to {end}"

    def _is_contiguous(self, view: Bytes, seal: Seal) -> bool:
        edges = [self.start, *(row.offset + row.num_bytes for row in self.rows)]
        is_contiguous = [row.offset for row in self.rows] == edges[:-1] and edges[-1] == seal.offset - len(
            END_OF_STREAM
        )
        return is_contiguous and view[edges[-1] : seal.offset].tobytes() == END_OF_STREAM

    def bad_record(self, row: Row) -> list[tuple[str | None, str]]:
        """(field, problem) for all damage in one record."""
        if self.view is None or row.offset + row.num_bytes > len(self.view):
            return [(None, "its bytes are missing")]
        found: list[tuple[str | None, str]] = []
        if not is_row_intact(self.view, row, self.schema):
            found.append((None, "its frame or scalars fail their CRC-32C"))
        fields = damaged_fields(self.view, row, self.schema)
        return found + [(name, f"slice {index} fails its CRC-32C") for name, index in fields]

    def damages(self, first: int, *, fast: bool) -> Iterator[Damage]:
        for what in self.structure():
            yield Damage(self.file.name, what)
        size = 0 if self.view is None else len(self.view)
        for index, row in enumerate(self.rows):
            if fast and row.offset + row.num_bytes <= size:
                continue
            for name, what in self.bad_record(row):
                key = row.values.get(ID_FIELD)
                yield Damage(self.file.name, what, row=index, number=first + index, question_id=key, field=name)


def _repair_shard(path: Path, shard: ShardInfo, config: Mapping[str, object], result: Repair) -> ShardInfo | None:
    """The shard after the repair; None if nothing could be recovered."""
    seen = _Examination(path, shard)
    structure = list(seen.structure())
    bad = {index: found for index, row in enumerate(seen.rows) if (found := seen.bad_record(row))}
    if not structure and not bad:
        return shard_info(path, shard.number)
    lost = [
        LostRecord(seen.file.name, index, seen.rows[index].values.get(ID_FIELD), "; ".join(what for _, what in found))
        for index, found in bad.items()
    ]
    lost += [LostRecord(seen.file.name, None, None, f"unreadable bytes {a} to {b}") for a, b in seen.gaps]
    if not seen.rows:
        lost = [LostRecord(seen.file.name, None, None, f"{shard.records} records: {'; '.join(structure)}")]
    result.lost += lost
    good = [row for index, row in enumerate(seen.rows) if index not in bad]
    sidecar = path / sidecar_name(shard.number)
    if not good:
        for file in (seen.file, sidecar):
            if file.exists():
                set_aside(path, file, lost if file == seen.file or seen.view is None else [])
                file.unlink()
        return None
    if not lost and seen.is_header_intact and seen.arrow is not None and not seen.gaps:
        # All records are intact: rewrite only what follows them and can be derived from them.
        end = good[-1].offset + good[-1].num_bytes
        fd = os.open(seen.file, os.O_RDWR | os.O_CLOEXEC)
        writer = ShardWriter(path, shard.number, fd, seen.arrow, rows=good, position=end, file=seen.file)
        result.resealed.append(seen.file.name)
        return writer.seal(seconds=shard.seconds)
    arrow = seen.arrow
    if not seen.is_header_intact or arrow is None:  # then the rows come from the sidecar
        assert seen.sidecar is not None
        metadata = shard_metadata(config)
        arrow = arrow_schema(seen.schema, compression=seen.sidecar.compression, metadata=metadata)
    result.rebuilt.append(seen.file.name)
    return rebuild(path, shard.number, source=seen.file, schema=arrow, rows=good, lost=lost)


def _header(view: Bytes | None) -> tuple[pa.Schema | None, int]:
    try:
        return read_header(view) if view is not None else (None, 0)
    except (OSError, ValueError, pa.ArrowException):
        return None, 0


def _sidecar(path: Path, shard: ShardInfo, seal: Seal | None) -> Sidecar | None:
    expected = seal.sidecar_crc32c if seal else shard.sidecar_crc32c
    try:
        data = (path / sidecar_name(shard.number)).read_bytes()
        return Sidecar(data) if expected in (None, crc32c(data)) else None
    except (OSError, ValueError, pa.ArrowException):
        return None
