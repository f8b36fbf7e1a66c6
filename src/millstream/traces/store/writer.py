"""Records -> shards, one record at a time. Once `append` returns, kill -9 loses nothing."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

import pyarrow as pa

from millstream.core.arguments import checked
from millstream.core.config import Count, SizeInBytes, config_diff, config_hash, parse_bytes, shown
from millstream.core.files import sync_path
from millstream.core.record import (
    Kind,
    Schema,
    Tensor,
    are_alike,
    infer_kind,
    infer_schema,
    parse_schema,
    plain,
    refine,
)
from millstream.core.remote import RemotePath, spool_folder, to_path
from millstream.errors import (
    BadSetting,
    ConfigMismatch,
    CorruptShard,
    DamageWarning,
    RemoteError,
    SchemaMismatch,
    StoreExists,
    StoreFull,
)
from millstream.traces.store.format import QUESTION_ID, RECORD_ID, id_field
from millstream.traces.store.ids import update_ids
from millstream.traces.store.locks import StoreLock
from millstream.traces.store.manifest import (
    MANIFEST,
    Manifest,
    foreign_file,
    list_shards,
    new_schema,
    read_manifest,
    write_manifest,
)
from millstream.traces.store.repair import Recovery, recover_all
from millstream.traces.store.shard_writer import ShardWriter
from millstream.traces.store.sidecar import check_storable, read_table
from millstream.traces.store.uploads import MOST_WAITING, Uploads

SHARD_BYTES = "512MB"  # default
NO_LIMIT = 2**62
MAX_SHARD_RECORDS = 65_536  # bounds memory: a writer keeps the sidecar rows of one shard


@checked
class TraceWriter:
    """Appends records to a new or existing trace store.

    Interrupted shards are recovered first; sealed shards are never rewritten. Several writers may share a store.
    At a URL, records are appended to a spool on this machine, whose sealed shards are uploaded in the background; an
    upload that fails raises RemoteError at the next append or close, and the next writer of the URL on this machine
    finishes it.

    >>> with ms.TraceWriter("mine/", shard_bytes="512MB") as writer:
    ...     writer.append({"question_id": "q1", "question": "Why?", "hidden": np.zeros((17, 20, 64), np.float16)})
    """

    def __init__(
        self,
        path: str | Path,
        *,
        shard_bytes: SizeInBytes | None = None,
        shard_records: Count | None = None,
        durability: Literal["process", "power"] = "process",
        schema: Mapping[str, str | Tensor | pa.DataType] | None = None,
        compression: Literal["none", "lz4", "zstd"] | None = None,
        config: Mapping[str, object] | None = None,
    ) -> None:
        try:
            config_hash(config or {})
        except (TypeError, ValueError) as error:
            raise BadSetting(f"config={shown(config)}: must be a JSON object ({error})") from None
        self.path = to_path(path)
        self._folder = spool_folder(self.path)  # where shards are written
        self._uploads = Uploads(self.path, self._folder) if isinstance(self.path, RemotePath) else None
        self._shard_bytes = parse_bytes(
            shard_bytes if shard_bytes is not None else SHARD_BYTES if shard_records is None else NO_LIMIT
        )
        self._shard_records = min(shard_records or MAX_SHARD_RECORDS, MAX_SHARD_RECORDS)
        self._durable = durability == "power"
        self._given = parse_schema(schema)
        self._shard: ShardWriter | None = None
        self._ids: set[object] | None = None
        self._closed = False
        self.recovered: list[Recovery] = []
        self._lock = StoreLock(self._folder, exclusive=False)
        try:
            self._open(config, compression)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, config: Mapping[str, object] | None, compression: str | None) -> None:
        """Create the store, or recover it and take its settings."""
        manifest = self._recover_spool(config, compression) if self._uploads else self._recover(config, compression)
        self.config: dict[str, object] = dict(manifest.config)
        if config is not None and config_hash(config) != config_hash(self.config):
            raise ConfigMismatch(
                f"{self.path}: written with another configuration ({config_diff(manifest.config, config)}). "
                "Use the old settings, or write to a new folder"
            )
        if compression is not None and compression != manifest.compression:
            raise ConfigMismatch(
                f"{self.path}: its compression is {manifest.compression!r}, not {compression!r}. "
                "Leave the option out, or write to a new folder"
            )
        self._compression = manifest.compression
        self._schema: Schema | None = manifest.fields if manifest.arrow_schema else None
        if self._schema is not None:
            for name, kind in self._given.items():
                if not are_alike(found := self._schema.get(name), kind):
                    found = "no such field" if found is None else found
                    raise SchemaMismatch(f"field {name!r}: {kind} in the given schema, {found} in {self.path}")
        self._num_sealed = sum(shard.records for shard in manifest.shards)
        if lost := [record for recovery in self.recovered for record in recovery.lost]:
            warnings.warn(
                f"{self.path}: {len(lost)} damaged records set aside; see {self._folder}/damaged/lost.jsonl",
                DamageWarning,
                stacklevel=3,
            )

    def _recover(self, config: Mapping[str, object] | None, compression: str | None) -> Manifest:
        _create(self.path, config, compression)
        manifest = read_manifest(self.path)  # raises for a newer format before anything is changed
        self.recovered = recover_all(self.path)
        if self.recovered:
            manifest = read_manifest(self.path)
            write_manifest(self.path, manifest)
        return manifest

    def _recover_spool(self, config: Mapping[str, object] | None, compression: str | None) -> Manifest:
        """The same for a store at a URL: what a killed writer left in the spool is uploaded."""
        assert self._uploads
        (self._folder / MANIFEST).unlink(missing_ok=True)  # of a repair; it would list shards that are uploaded now
        self.recovered = recover_all(self._folder)
        self._uploads.kept_back = self._kept_back()
        if not self._uploads.waiting():
            _create(self.path, config, compression)
            return read_manifest(self.path)
        left = read_manifest(self._folder)
        if not any(list_shards(self.path)) and not (self.path / MANIFEST).exists():
            _create(self.path, left.config, left.compression)
        manifest = read_manifest(self.path)
        if config_hash(left.config) != config_hash(manifest.config):
            raise ConfigMismatch(
                f"{self._folder}: holds records for {self.path} that were written with another configuration "
                f"({config_diff(manifest.config, left.config)}). Remove this folder to discard them"
            )
        self._uploads.wait()
        return read_manifest(self.path)

    def _kept_back(self) -> frozenset[int]:
        """The sealed shards of the spool that are not for this writer to upload."""
        return frozenset()

    def append(self, record: Mapping[str, object]) -> None:
        """Write one record. Once this returns, the record survives a crash of this process."""
        if self._closed:
            raise ValueError(f"{self.path}: this writer is closed")
        if not isinstance(record, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SchemaMismatch(f"{self.path}: a record is a mapping of field names to values, not {shown(record)}")
        if self._uploads:
            self._uploads.check()
        if self._is_full():
            self._end_shard()
        schema = self._fit(record)
        if schema != self._schema:
            self._end_shard()  # a field that was None so far has a type now: start a shard with it
        if self._shard is None:
            self._shard = self._new_shard(schema)
        try:
            self._shard.append(record)
        except SchemaMismatch:
            if not self._shard.rows:  # ignore the schema of a rejected first record
                self._shard.discard()
                self._shard = None
            raise
        self._schema = schema
        if self._durable:
            self._shard.sync()
        if self._ids is not None and (key := plain(record.get(id_field(record)))) is not None:
            self._ids.add(key)
        if self._is_full():
            with suppress(StoreFull):  # the record is written; the next append or close tries again and raises
                self._end_shard()

    @checked
    def extend(self, records: Iterable[Mapping[str, object]]) -> None:
        """Append every record of an iterable."""
        for record in records:
            self.append(record)

    def seal(self) -> None:
        """Complete the current shard, so that readers see its records. The next append starts a new one."""
        self._end_shard()
        if self._uploads:
            self._uploads.wait()

    def _end_shard(self) -> None:
        # Manifest last. It can be rebuilt, so a full disk matters only on close; shards that a concurrent writer leaves
        # out of it are found in the folder.
        if not self._complete_shard():
            return
        if self._uploads:
            self._uploads.start()
        else:
            with suppress(StoreFull):
                write_manifest(self.path, read_manifest(self.path))

    def close(self) -> None:
        """Seal the current shard; update the manifest and the id index."""
        if self._closed:
            return
        self._complete_shard()
        if self._uploads:
            self._uploads.wait()
        manifest = read_manifest(self.path)
        if not self._uploads:  # else written with the last upload
            write_manifest(self.path, manifest)
        update_ids(self.path, manifest)
        self._closed = True
        self._lock.release()

    @property
    def done_ids(self) -> set[object]:
        """The id of every record in the store, unsealed ones of this writer included: what a resumed job can skip."""
        if self._ids is None:
            self._ids = {row.values.get(id_field(row.values)) for row in (self._shard.rows if self._shard else ())}
            for table in stored_tables(self.path, [RECORD_ID, QUESTION_ID]):
                key = id_field(table.column_names)
                self._ids |= set(table.column(key).to_pylist() if key in table.column_names else ())
            self._ids.discard(None)
        return self._ids

    @property
    def shard_number(self) -> int | None:
        """The number of the shard being written; None between shards."""
        return self._shard.number if self._shard else None

    @property
    def fields(self) -> list[str]:
        """Names of the store's fields; empty before the first record."""
        return list(self._schema or {})

    def __len__(self) -> int:
        return self._num_sealed + (len(self._shard.rows) if self._shard else 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, RemoteError):
                self._complete_shard()  # without the server, which the next writer of the spool may find answering
            else:
                self.close()
        except StoreFull:
            if error is None:
                raise
        finally:
            if self._shard is not None:  # could not be sealed; the next writer recovers it
                self._shard.release()
                self._shard = None
            self._closed = True
            self._lock.release()

    def __repr__(self) -> str:
        return f"TraceWriter({str(self.path)!r}: {len(self)} records)"

    def _complete_shard(self) -> bool:
        """Seal the current shard, if it has records; True if the manifest has to be updated."""
        if self._shard is None:
            return False
        sealed = bool(self._shard.rows)
        if sealed:
            self._num_sealed += self._shard.seal().records
        else:
            self._shard.discard()
        self._shard = None
        return sealed

    def _is_full(self) -> bool:
        shard = self._shard
        return shard is not None and (shard.num_bytes >= self._shard_bytes or len(shard.rows) >= self._shard_records)

    def _fit(self, record: Mapping[str, object]) -> Schema:
        """The schema for this record: that of the store, with types for fields that were None so far."""
        if self._schema is None:
            schema = {name: _sliced(kind) for name, kind in infer_schema(record, self._given).items()}
            check_storable(schema, self._compression)
            return schema
        if record.keys() != self._schema.keys():
            for name in self._schema.keys() - record.keys():
                raise SchemaMismatch(
                    f"field {name!r}: expected {self._schema[name]}, but the record lacks it; None is allowed"
                )
            for name in record.keys() - self._schema.keys():
                raise SchemaMismatch(f"field {name!r}: not among the store's fields {', '.join(self._schema)}")
        refined = {name: _refined(name, kind, record[name]) for name, kind in self._schema.items()}
        if refined == self._schema:
            return self._schema
        check_storable(refined, self._compression)
        return refined

    def _new_shard(self, schema: Schema) -> ShardWriter:
        if self._uploads:
            self._uploads.wait(MOST_WAITING)
        sealed, opened = list_shards(self._folder)
        arrow = new_schema(schema, compression=self._compression, config=self.config)
        shard = ShardWriter.create(self._folder, first=max([-1, *sealed, *opened]) + 1, schema=arrow)
        if self._durable:
            sync_path(self._folder)
        return shard


def stored_tables(path: Path, fields: Sequence[str]) -> Iterator[pa.Table]:
    """These fields of the sealed records in the spool of a store, and then of those in the store."""
    folder = spool_folder(path)
    for attempt in range(3 if folder != path else 0):
        try:
            table = read_table(folder, read_manifest(folder), fields) if any(list_shards(folder)) else None
        except (FileNotFoundError, CorruptShard):  # uploaded meanwhile, or damaged
            if attempt == 2:
                raise
        else:
            if table is not None:
                yield table
            break
    yield read_table(path, read_manifest(path), fields)


def _create(path: Path, config: Mapping[str, object] | None, compression: str | None) -> None:
    """Create an empty store unless there is one."""
    if any(list_shards(path)):
        return
    if not (path / MANIFEST).exists():
        if (foreign := foreign_file(path)) is not None:
            raise StoreExists(f"{path}: not a trace store and not empty (contains {foreign!r}). Write to a new folder")
        with suppress(FileExistsError):  # by another machine, just now
            write_manifest(path, Manifest(config or {}, compression or "none"), is_new=True)
    elif config is not None and not (found := read_manifest(path)).shards:
        # Left by a run that failed before its first record: its settings do not matter.
        write_manifest(path, Manifest(config, compression or found.compression))


def _sliced(kind: Kind) -> Kind:
    """How a new store keeps a tensor: states at positions of all layers together, because most models read one."""
    if isinstance(kind, Tensor) and kind.axes[:2] == ("layer", "position"):
        return replace(kind, sliced=("position", "layer"))
    return kind


def _refined(name: str, kind: Kind, value: object) -> Kind:
    """The type with unknown parts taken from this value; a value that does not fit raises when written."""
    if value is None or isinstance(kind, Tensor) or not _has_null(kind):
        return kind
    return refine(kind, infer_kind(name, value)) or kind


def _has_null(kind: pa.DataType) -> bool:
    if pa.types.is_null(kind):
        return True
    return any(_has_null(kind.field(i).type) for i in range(kind.num_fields))
