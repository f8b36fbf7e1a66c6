"""Stores -> a new store, by copying shard files or the messages of records. Tensors are never decoded.

A local store appears when it is complete. At a URL, sealed shards are uploaded from the spool, as those of a writer,
and the same command on the same machine resumes after the last one.
"""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from millstream.core.config import config_diff, config_hash, parse_bytes, parse_json
from millstream.core.console import Progress, plural, quoted, silent
from millstream.core.files import NOTHING_LEFT, already_exists, publish, publish_json, publishing, publishing_folder
from millstream.core.memory import Map
from millstream.core.record import Bytes, Schema, crc32c, refine
from millstream.core.remote import RemoteFile, RemotePath, spool_folder
from millstream.core.transfer import fetch
from millstream.errors import ConfigMismatch, CorruptRecord, SchemaMismatch, StoreError, StoreExists
from millstream.traces.store.format import RECORD_ID, Row, damaged_fields, id_field, is_row_intact, read_header
from millstream.traces.store.ids import update_ids
from millstream.traces.store.labels import carry_labels, carry_verdicts
from millstream.traces.store.locks import StoreLock, only_job
from millstream.traces.store.manifest import (
    LABELS,
    MANIFEST,
    TOKENIZER,
    Manifest,
    ShardInfo,
    list_shards,
    new_schema,
    read_manifest,
    read_shard_seal,
    shard_name,
    sidecar_name,
    write_manifest,
)
from millstream.traces.store.repair import rebuild
from millstream.traces.store.shard_writer import ShardWriter
from millstream.traces.store.sidecar import load_sidecar
from millstream.traces.store.traces import Traces
from millstream.traces.store.uploads import MOST_WAITING, Uploads
from millstream.traces.store.writer import MAX_SHARD_RECORDS, SHARD_BYTES

_COPY_BYTES = 64 << 20
_ORIGIN = ".origin.json"  # what the store was made from, so that the same command again finds it finished
_INPUTS = ("converted", "source")  # in a configuration: files that were read, which are not settings


@dataclass(frozen=True)
class Written:
    """A store that was written: its path and its size."""

    path: Path
    records: int
    bytes: int
    note: str = ""  # what a user should know of it: its labels, records with the same id


def merge(sources: Sequence[Path], out: Path, *, mixed: bool = False, progress: Progress = silent) -> Written:
    """Write all records of several stores, in order, to one store. Whole shard files are copied, and labels.

    Stores of different models or settings, or with records of the same id, are refused unless `mixed`.
    """
    with _unchanged(sources):
        return _merge(sources, out, mixed, progress)


def _merge(sources: Sequence[Path], out: Path, mixed: bool, progress: Progress) -> Written:
    origin = {"merge": [_state(source) for source in sources], "mixed": mixed}
    if (finished := _finished(out, origin)) is not None:
        return finished
    manifests = [read_manifest(source) for source in sources]
    schema = _common_schema(sources, manifests)
    note = _check_mixed(sources, manifests, mixed)
    configs = [manifest.config for manifest in manifests]
    config: Mapping[str, object] = configs[0] if all(c == configs[0] for c in configs) else {"merged": configs}
    compression = manifests[0].compression
    arrow = new_schema(schema, compression=compression, config=config)
    with _new_store(out, Manifest(config, compression, arrow if schema else None), origin) as new:
        every = [(source, shard) for source, m in zip(sources, manifests, strict=True) for shard in m.shards]
        done = sum(shard.bytes for shard in new.shards)
        for source, shard in every[len(new.shards) :]:
            new.add(_copy_shard(source, shard, new.folder, len(new.shards)))
            done += shard.bytes
            progress(done, f"{source.name}/{shard_name(shard.number)}")
        return new.finish(sources, note)


def subset_shards(source: Path, out: Path, numbers: Sequence[int], *, progress: Progress = silent) -> Written:
    """Copy some shards of a store, with their labels, to a new store."""
    with _unchanged([source]):
        return _subset_shards(source, out, numbers, progress)


def _subset_shards(source: Path, out: Path, numbers: Sequence[int], progress: Progress) -> Written:
    origin = {"subset": _state(source), "shards": list(numbers)}
    if (finished := _finished(out, origin)) is not None:
        return finished
    manifest = read_manifest(source)
    known = {shard.number: shard for shard in manifest.shards}
    missing = [number for number in numbers if number not in known]
    if missing:
        raise StoreError(f"{source}: no shard {missing[0]}; it has {_ranges(sorted(known))}")
    with _new_store(out, replace(manifest, shards=()), origin) as new:
        for number in list(dict.fromkeys(numbers))[len(new.shards) :]:  # each once
            new.add(_copy_shard(source, known[number], new.folder, len(new.shards)))
            progress(len(new.shards), shard_name(number))
        return new.finish([source])


def subset_records(
    traces: Traces,
    out: Path,
    numbers: Sequence[int],
    *,
    shard_bytes: int | str = SHARD_BYTES,
    shard_records: int = MAX_SHARD_RECORDS,
    progress: Progress = silent,
) -> Written:
    """Copy some records of a store, with their labels, in the given order, to a new store.

    Messages are verified and copied unchanged.
    """
    limit = parse_bytes(shard_bytes)
    source = traces.path
    chosen = config_hash({"numbers": list(map(int, numbers)), "shard_bytes": limit, "shard_records": shard_records})
    origin = {"subset": _state(source), "records": chosen}
    if (finished := _finished(out, origin)) is not None:
        return finished
    empty = replace(read_manifest(source), shards=())
    with _unchanged([source]), _new_store(out, empty, origin) as new:
        writer: ShardWriter | None = None
        done = sum(shard.records for shard in new.shards)
        for index, group in groupby(map(traces.locate, numbers[done:]), key=lambda place: place[0]):
            info = traces.shards[index]
            file = source / shard_name(info.number)
            record = _records_of(file)
            sidecar = load_sidecar(source, info, traces.fields)
            for _, number in group:
                row = sidecar.row(number)
                message, place = record(row), row.moved(0)
                if not is_row_intact(message, place, sidecar.schema) or damaged_fields(message, place, sidecar.schema):
                    raise CorruptRecord(f"{file}: row {number} is damaged. Run: millstream repair {quoted(source)}")
                if writer is not None and (
                    writer.num_bytes >= limit
                    or len(writer.rows) >= shard_records
                    or (writer.fields, writer.compression) != (sidecar.schema, sidecar.compression)
                ):
                    new.add(writer.seal())
                    writer = None
                if writer is None:
                    arrow = new_schema(sidecar.schema, compression=sidecar.compression, config=traces.config)
                    writer = ShardWriter.create(new.folder, first=len(new.shards), schema=arrow)
                writer.append_message(message, row)
                done += 1
                progress(done, shard_name(info.number))
        if writer is not None:
            new.add(writer.seal())
        return new.finish([source])


def _records_of(file: Path) -> Callable[[Row], Bytes]:
    """Reads the messages of a shard."""
    if isinstance(file, RemotePath):
        remote = RemoteFile(file)
        return lambda row: np.frombuffer(remote.read(row.offset, row.num_bytes), np.uint8)
    mapped = Map(file)

    def record(row: Row) -> Bytes:
        mapped.will_need(row.offset, row.num_bytes)
        return mapped.view[row.offset : row.offset + row.num_bytes]

    return record


def drop_records(path: Path, choose: Callable[[Traces], Sequence[int]]) -> None:
    """Remove the chosen records from a store: shards are rewritten without them, or removed if they become empty.

    Records are chosen once nobody else can change the store.
    """
    with StoreLock(path, exclusive=True):
        traces = Traces(path)
        _drop_records(traces, choose(traces))


def _drop_records(traces: Traces, numbers: Sequence[int]) -> None:
    path = traces.path
    manifest = read_manifest(path)
    for index, group in groupby(map(traces.locate, sorted(numbers)), key=lambda place: place[0]):
        info = traces.shards[index]
        dropped = {row for _, row in group}
        sidecar = load_sidecar(path, info, traces.fields)
        rows = [sidecar.row(row) for row in range(info.records) if row not in dropped]
        file = path / shard_name(info.number)
        others = tuple(shard for shard in manifest.shards if shard.number != info.number)
        if rows:
            schema, _ = read_header(Map(file).view)
            others += (rebuild(path, info.number, source=file, schema=schema, rows=rows, seconds=info.seconds),)
        manifest = replace(manifest, shards=tuple(sorted(others, key=lambda shard: shard.number)))
        write_manifest(path, manifest)
        if not rows:
            for gone in (file, path / sidecar_name(info.number)):
                gone.unlink(missing_ok=True)
    update_ids(path, manifest)


def find_ids(traces: Traces, file: Path) -> list[int]:
    """Numbers of the records whose ids a file lists, one per line, or in JSON lines as `record_id` or `question_id`.

    The `id` of lost.jsonl is one, too.
    """
    numbers: list[int] = []
    unknown: list[str] = []
    try:
        lines = (Path("/dev/stdin") if str(file) == "-" else file).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise StoreError(
            f"{file}: is not a text file. List one id per line, or JSON lines with {RECORD_ID!r}"
        ) from None
    for line in lines:
        if not (text := line.strip()):
            continue
        try:
            key = _id_in(parse_json(text)) if text.startswith("{") else text
        except (ValueError, KeyError):  # an id of too many digits, too
            raise StoreError(f"{file}: {text[:200]} is neither an id nor JSON with a {RECORD_ID!r}") from None
        try:
            numbers.append(traces.find(key))
        except KeyError:
            unknown.append(key)
    if not numbers and not unknown:
        raise StoreError(f"{file}: lists no ids. Write one per line")
    if unknown:
        raise StoreError(
            f"{file}: {len(unknown)} of its ids are not in {traces.path} ({', '.join(unknown[:5])}). "
            "Remove them from the file, or use another store"
        )
    return numbers


def _id_in(row: Mapping[str, object]) -> str:
    key = id_field(row)
    return str(row[key if key in row else "id"])  # as in lost.jsonl


@contextmanager
def _unchanged(sources: Sequence[Path]) -> Generator[None]:
    """No other command rewrites the sources meanwhile, so that their manifests describe the shards that are copied."""
    with ExitStack() as held:
        for source in sources:
            read_manifest(source)  # raises for anything but a store
            held.enter_context(StoreLock(source, exclusive=False))
        yield


class _NewStore:
    """A store that is being written: its shards so far, those of an interrupted command included."""

    def __init__(self, out: Path, folder: Path, manifest: Manifest, origin: Mapping[str, object]) -> None:
        self.folder = folder  # where shards are written
        self.shards = list(manifest.shards)
        self._out, self._manifest, self._origin = out, manifest, origin
        self._uploads = Uploads(out, folder) if isinstance(out, RemotePath) else None

    def add(self, shard: ShardInfo) -> None:
        """A shard is complete."""
        self.shards.append(shard)
        if self._uploads:
            self._uploads.start()
            self._uploads.wait(MOST_WAITING)

    def finish(self, sources: Sequence[Path], note: str = "") -> Written:
        """Write what belongs to the shards: manifest, ids, tokenizer, labels."""
        if self._uploads:
            self._uploads.wait()
            place, manifest = self._out, read_manifest(self._out)
        else:
            place, manifest = self.folder, replace(self._manifest, shards=tuple(self.shards))
            write_manifest(place, manifest)
        update_ids(place, manifest)
        tokenizers = [source / TOKENIZER for source in sources]
        if all(file.exists() for file in tokenizers) and len({file.read_bytes() for file in tokenizers}) == 1:
            publish(place / TOKENIZER, tokenizers[0].read_bytes(), NOTHING_LEFT)
        notes = [note]
        if id_field(manifest.fields) in manifest.fields:
            carry_verdicts(sources, place)
            notes.append(carry_labels(sources, place, self._out))
        publish_json(place / _ORIGIN, {**self._origin, "made": Traces(place).fingerprint})
        size = sum(s.records for s in self.shards), sum(s.bytes for s in self.shards)
        return Written(self._out, *size, "\n".join(filter(None, notes)))


@contextmanager
def _new_store(out: Path, manifest: Manifest, origin: Mapping[str, object]) -> Generator[_NewStore]:
    """A hidden folder that is renamed to `out` once the store is complete; or the spool of a URL.

    `manifest`: of the store, without shards.
    """
    if isinstance(out, RemotePath):
        with only_job(out):
            yield _NewStore(out, spool_folder(out), _begun(out, manifest, origin), origin)
            (spool_folder(out) / _ORIGIN).unlink()
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise already_exists(out)
    with publishing_folder(out) as folder:
        yield _NewStore(out, folder, manifest, origin)


def _begun(out: RemotePath, manifest: Manifest, origin: Mapping[str, object]) -> Manifest:
    """Claim a URL for a new store; the manifest, with the shards that the same command has uploaded before.

    The claim is the `.origin.json` of the store, which only one machine can create; the spool has a copy.
    """
    spool, claim = spool_folder(out), out / _ORIGIN
    try:
        mine = parse_json((spool / _ORIGIN).read_bytes())
    except (FileNotFoundError, ValueError):
        mine = None
    if mine != {**json.loads(json.dumps(origin)), "by": mine and mine.get("by")}:
        if any(out.iterdir()):
            raise already_exists(out)
        if mine is None and any(list_shards(spool)):
            raise StoreExists(f"{spool}: holds records for {out}. Upload them to there, or remove this folder")
        publish_json(spool / _ORIGIN, {**origin, "by": secrets.token_hex(16)})
    try:
        claim.put((spool / _ORIGIN).read_bytes(), is_new=True)
    except FileExistsError:
        raise already_exists(out) from None
    if not (out / MANIFEST).exists():
        write_manifest(out, manifest)
    Uploads(out, spool).settle()
    for name in [file.name for file in spool.iterdir() if "shard-" in file.name]:
        (spool / name).unlink()
    return replace(manifest, shards=read_manifest(out).shards)


def _state(source: Path) -> list[object]:
    """What a store made from this one depends on: its records and its labels."""
    labels = source / LABELS
    return [Traces(source).fingerprint, crc32c(labels.read_bytes()) if labels.exists() else None]


def _finished(out: Path, origin: Mapping[str, object]) -> Written | None:
    """The output of the same command on the same stores, if it is complete and unchanged."""
    try:
        found = parse_json((out / _ORIGIN).read_bytes())
        traces = Traces(out)
    except (OSError, ValueError, StoreError):
        return None
    if found != {**json.loads(json.dumps(origin)), "made": traces.fingerprint}:
        return None
    return Written(out, len(traces), traces.num_bytes, "already written by the same command; nothing to do")


def _check_mixed(sources: Sequence[Path], manifests: Sequence[Manifest], mixed: bool) -> str:
    """Refuse stores of different settings, and records with the same id; if allowed, say what is mixed."""
    notes: list[str] = []
    full = [(source, manifest) for source, manifest in zip(sources, manifests, strict=True) if manifest.shards]
    for source, manifest in full[1:]:
        first, mine = (
            {key: value for key, value in one.config.items() if key not in _INPUTS} for one in (full[0][1], manifest)
        )
        if first != mine:
            notes.append(f"{full[0][0]} and {source}: written with different settings ({config_diff(first, mine)})")
            break
    seen: dict[object, Path] = {}
    twice: dict[str, None] = {}
    for source, manifest in full:
        own = set(Traces(source).ids) - {None} if id_field(manifest.fields) in manifest.fields else set[object]()
        twice |= dict.fromkeys(sorted(str(name) for name in own if name in seen))
        seen |= dict.fromkeys(own, source)
    if twice:
        some = ", ".join([*list(twice)[:5], *(["..."] if len(twice) > 5 else [])])
        notes.append(f"{plural(len(twice), 'id')} in more than one of the stores ({some})")
    if notes and not mixed:
        raise ConfigMismatch(f"{'; '.join(notes)}. To merge them anyway: --mixed (mixed=True)")
    return "\n".join(notes)


def _copy_shard(source: Path, shard: ShardInfo, folder: Path, number: int) -> ShardInfo:
    """Copy one shard under another number. Raises if its seal or sidecar is damaged."""
    file, sidecar = source / shard_name(shard.number), source / sidecar_name(shard.number)
    seal = read_shard_seal(file) if file.exists() else None
    if seal is None or not sidecar.exists() or crc32c(sidecar.read_bytes()) != seal.sidecar_crc32c:
        raise StoreError(f"{file}: damaged, or its sidecar is. Run first: millstream repair {quoted(source)}")
    _copy(sidecar, folder / sidecar_name(number))
    _copy(file, folder / shard_name(number))
    return replace(shard, number=number)


def _copy(source: Path, target: Path) -> None:
    """Copy in the kernel; XFS and btrfs share the blocks instead."""
    if isinstance(source, RemotePath):
        fetch(source, target)
        return
    with publishing(target, NOTHING_LEFT) as b, source.open("rb") as a:
        try:
            while os.copy_file_range(a.fileno(), b.fileno(), _COPY_BYTES):
                pass
        except OSError:  # across file systems
            a.seek(0)
            b.seek(0)
            shutil.copyfileobj(a, b, _COPY_BYTES)


def _common_schema(sources: Sequence[Path], manifests: Sequence[Manifest]) -> Schema:
    merged: Schema = {}
    for source, manifest in zip(sources, manifests, strict=True):
        schema = manifest.fields
        if not schema:
            continue
        if not merged:
            merged = schema
        for name in merged.keys() ^ schema.keys():
            where = source if name in schema else sources[0]
            raise SchemaMismatch(f"field {name!r}: only in {where}; stores to merge must have the same fields")
        for name, kind in schema.items():
            common = refine(merged[name], kind)
            if common is None:
                raise SchemaMismatch(f"field {name!r}: {sources[0]} has {merged[name]}, {source} has {kind}")
            merged = {**merged, name: common}
    return merged


def _ranges(numbers: Sequence[int]) -> str:
    return f"shards {numbers[0]} to {numbers[-1]}" if numbers else "none"
