"""File names in the folder of a store, and the manifest.

The manifest can always be rebuilt from the sealed shards. Readers also look for shards that it does not list, so a
writer that dies before it updates the manifest loses nothing.
"""

import base64
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from millstream.core.config import config_hash, parse_json
from millstream.core.console import quoted
from millstream.core.files import publish
from millstream.core.hf_datasets import is_datasets_folder
from millstream.core.memory import Map
from millstream.core.record import Bytes, Schema, crc32c, refine
from millstream.core.registry import extensions
from millstream.core.remote import RemoteFile, RemotePath, read_object
from millstream.core.tables import is_table_intact
from millstream.errors import CorruptShard, NewerFormat, NotAStore
from millstream.traces.store.format import (
    SEAL,
    Seal,
    arrow_schema,
    compression_of,
    metadata_of,
    read_header,
    read_seal,
    record_schema,
)

FORMAT = "millstream.traces"
VERSION = 2  # 1: every tensor is cut along its first axis
MANIFEST = "manifest.json"
DAMAGED = "damaged"  # folder for files that repair sets aside
IDS = "ids.arrow"  # the id index
LABELS, GROUPS = "labels.parquet", "groups.parquet"
HUMAN_VERDICTS, JUDGE_REPLIES = "verdicts.jsonl", "judge.jsonl"
TOKENIZER = "tokenizer.json"  # of the language model, as Hugging Face writes it
APPEND_AGAIN = "Records appended so far are saved; free some space and append again, or run the same command to resume"
_SHARD = re.compile(r"shard-([0-9]{5,9})\.arrow(\.open)?")  # a number fits 32 bits
_HEADER_BYTES, _MOST_HEADER_BYTES = 64 << 10, 16 << 20  # of a shard: what is fetched at first, and at most
_MOST = 1 << 48  # records or bytes of a store
_CRC_LINE = ',\n "crc32c": {}\n}}\n'  # ends the manifest; covers every byte before it


@dataclass(frozen=True)
class ShardInfo:
    """One sealed shard. `seconds` is the time from creation to sealing."""

    number: int
    records: int
    bytes: int
    seconds: float
    sidecar_crc32c: int | None  # None: unknown, because shard and manifest are both damaged
    largest: int | None = None  # bytes of the tensors of the largest record; None in shards of older versions


@dataclass(frozen=True)
class Manifest:
    """Configuration, schema and shards of a store."""

    config: Mapping[str, object] = field(default_factory=dict[str, object])
    compression: str = "none"
    arrow_schema: pa.Schema | None = None
    shards: tuple[ShardInfo, ...] = ()

    @property
    def fields(self) -> Schema:
        """The fields of the records; empty before the first record."""
        return record_schema(self.arrow_schema) if self.arrow_schema else {}


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.arrow"


def sidecar_name(number: int) -> str:
    return f"shard-{number:05d}.parquet"


def new_schema(fields: Schema, *, compression: str, config: Mapping[str, object]) -> pa.Schema:
    """The Arrow schema of a new shard, with what is needed to rebuild the manifest from it."""
    metadata = {
        "millstream.version": str(VERSION),
        "millstream.created": repr(time.time()),
        "millstream.config": json.dumps(config),
    }
    return arrow_schema(fields, compression=compression, metadata=metadata)


def open_file(path: Path, number: int) -> Path:
    """The shard's file while it is being written."""
    return path / (shard_name(number) + ".open")


def list_shards(path: Path) -> tuple[list[int], list[int]]:
    """Numbers of the sealed and the open shards in the folder, ascending."""
    sealed: list[int] = []
    opened: list[int] = []
    for name in path.entries() if isinstance(path, RemotePath) else os.listdir(path):
        if (number := _shard_number(path, name)) is not None:
            (opened if name.endswith(".open") else sealed).append(number)
    return sorted(sealed), sorted(opened)


def _shard_number(path: Path, name: str) -> int | None:
    """The number of a shard by its name, None for another file; CorruptShard for one that would be left out."""
    match = _SHARD.fullmatch(name)
    if match and name.startswith(shard_name(int(match[1]))):
        return int(match[1])
    if name.startswith("shard-") and name.removesuffix(".open").endswith(".arrow"):
        raise CorruptShard(
            f"{path / name}: would not be read, because a shard is named shard-NUMBER.arrow, with 5 to 9 digits. "
            "Rename it, or move it elsewhere if it is a copy"
        )
    return None


def foreign_file(path: Path) -> str | None:
    """The first file in the folder that does not belong to a store, ignoring hidden files."""
    own = {MANIFEST, IDS, DAMAGED}
    names = sorted(entry.name for entry in path.iterdir())
    return next((n for n in names if not (n.startswith((".", "shard-")) or n in own)), None)


_OTHERS = (IDS, LABELS, GROUPS, HUMAN_VERDICTS, JUDGE_REPLIES, TOKENIZER)


def files_of_store(path: Path) -> dict[str, Path]:
    """The files of a store by name, from its manifest: a web server lists nothing."""
    numbers = [shard.number for shard in read_manifest(path).shards]
    names = [MANIFEST, *map(shard_name, numbers), *map(sidecar_name, numbers)]
    return {name: path / name for name in (*names, *(n for n in _OTHERS if (path / n).is_file()))}


def check_store(path: Path) -> None:
    """Raise NotAStore, with a command that may help, unless the folder is a trace store."""
    if isinstance(path, RemotePath):
        if (path / MANIFEST).is_file() or any(list_shards(path)):
            return
        raise NotAStore(f"{path}: not a trace store (no {MANIFEST}, no shard-*.arrow)")
    if not path.exists():
        raise NotAStore(f"{path}: no such folder. To import old trace files: millstream convert OLD... {quoted(path)}")
    if not path.is_dir():
        raise NotAStore(
            f"{path}: a file, not a trace store. To import a trace file: millstream convert {quoted(path)} traces/"
        )
    if (path / MANIFEST).exists() or any(list_shards(path)):
        return
    suffixes = [suffix for importer in extensions("importers") for suffix in importer.SUFFIXES]
    old = next((end for end in suffixes if any(name.endswith(end) for name in os.listdir(path))), None)
    remedy = f"Trace files to import are here; run: millstream convert {quoted(f'{path}/*{old}')} OUT" if old else ""
    if is_datasets_folder(path):
        remedy = f"A dataset of Hugging Face is here; run: millstream convert {quoted(path)} OUT"
    raise NotAStore(f"{path}: not a trace store (no {MANIFEST}, no shard-*.arrow). {remedy}".rstrip())


def read_manifest(path: Path) -> Manifest:
    """The manifest, updated with the sealed shards in the folder."""
    check_store(path)
    parsed = _parse_manifest(path)
    stored, damaged = parsed or Manifest(), parsed is None
    known = {shard.number: shard for shard in stored.shards}  # a missing shard stays listed: reading it raises
    sizes = _sealed_sizes(path)
    unknown = [n for n, size in sizes.items() if n not in known or _is_replaced(path, known[n], size)]
    shards = known | {number: shard_info(path, number) for number in unknown}
    copies = copied_shards(path, list(shards.values())) if unknown else {}  # the known shards come first
    for copy in [number for number in copies if number not in known]:
        del shards[copy]
        unknown.remove(copy)
    schema, compression, config = stored.arrow_schema, stored.compression, stored.config
    for number in unknown:
        found = shard_schema(path, number)
        if found is None:
            continue
        if damaged:
            compression = compression_of(found)
            config = _config_of(found) or config
        schema = _merged(schema, found, compression)
    return Manifest(config, compression, schema, tuple(shards[number] for number in sorted(shards)))


def copied_shards(path: Path, shards: Sequence[ShardInfo]) -> dict[int, int]:
    """Shards whose file is a copy of an earlier one in the list, with the number of the original."""
    copies: dict[int, int] = {}
    seen: dict[int | None, list[int]] = {}
    for shard in shards:
        alike = seen.setdefault(shard.sidecar_crc32c, [])
        if alike and shard.sidecar_crc32c is not None:  # else two shards of equal records, unless the headers are equal
            mine = _header_crc32c(path, shard.number)
            original = next((number for number in alike if mine and _header_crc32c(path, number) == mine), None)
            if original is not None:
                copies[shard.number] = original
        alike.append(shard.number)
    return copies


def write_manifest(path: Path, manifest: Manifest, *, is_new: bool = False) -> None:
    """Publish the manifest. With `is_new` and a URL, raises FileExistsError if another writer has just done so."""
    schema = manifest.arrow_schema
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "fields": {name: str(kind) for name, kind in manifest.fields.items()},
        "config": dict(manifest.config),
        "config_hash": config_hash(manifest.config),
        "compression": manifest.compression,
        "arrow_schema": base64.b64encode(schema.serialize().to_pybytes()).decode() if schema else None,
        "shards": [{"name": shard_name(shard.number), **asdict(shard)} for shard in manifest.shards],
    }
    body = json.dumps(content, indent=1, ensure_ascii=False).removesuffix("\n}").encode()
    data = body + _CRC_LINE.format(crc32c(body)).encode()
    if is_new and isinstance(path, RemotePath):
        (path / MANIFEST).put(data, is_new=True)
    else:
        publish(path / MANIFEST, data, APPEND_AGAIN)


def is_manifest_intact(path: Path) -> bool:
    """Whether the manifest exists and its checksum matches."""
    return _parse_manifest(path) is not None


def shard_info(path: Path, number: int) -> ShardInfo:
    """A sealed shard as described by its seal, or by its sidecar if the seal is damaged."""
    file = path / shard_name(number)
    seal = read_shard_seal(file)
    data = read_sidecar(path, number, seal and seal.sidecar_crc32c)
    records, seconds, largest = 0, 0.0, None
    if data is not None:
        with suppress(OSError, ValueError, pa.ArrowException):  # a checksum of our own, but not a Parquet file
            sidecar = pq.ParquetFile(pa.BufferReader(data))
            records = sidecar.metadata.num_rows
            seconds = number_of(sidecar.schema_arrow, "seconds")
            largest = int(number_of(sidecar.schema_arrow, "largest")) or None
    if seal is None:
        return ShardInfo(number, records, file.stat().st_size, seconds, None)
    return ShardInfo(number, seal.records, file.stat().st_size, seconds, seal.sidecar_crc32c, largest)


def read_sidecar(path: Path, number: int, crc: int | None) -> bytes | None:
    """The verified bytes of a sidecar; None if missing or damaged. If the shard's CRC of it is lost, its own counts."""
    try:
        data = read_object(path / sidecar_name(number), is_intact=lambda data: crc is None or crc == crc32c(data))
    except OSError:
        return None
    return data if (is_table_intact(data) if crc is None else crc == crc32c(data)) else None


def read_shard_seal(file: Path) -> Seal | None:
    """The seal at the end of a shard file; None if damaged."""
    with file.open("rb") as f:
        size = f.seek(0, os.SEEK_END)
        f.seek(max(0, size - 10))  # the length of the footer, and the magic
        end_bytes = SEAL.size + int.from_bytes(f.read(4), "little") + 10
        if end_bytes > size:
            return None
        f.seek(size - end_bytes)
        return read_seal(f.read(), size)


def shard_schema(path: Path, number: int) -> pa.Schema | None:
    """The Arrow schema in the header of a sealed shard, or from its sidecar if the header is damaged."""
    file = path / shard_name(number)
    view = _remote_header(file) if isinstance(file, RemotePath) else Map(file).view
    seal = read_shard_seal(file)
    try:
        schema, start = read_header(view)
        check_version(path, number_of(schema, "version"))
        if seal is None or crc32c(view[:start]) == seal.header_crc32c:
            return schema
    except (ValueError, pa.ArrowException):
        pass
    data = read_sidecar(path, number, seal and seal.sidecar_crc32c)
    if data is None:
        return None
    try:
        schema = pq.ParquetFile(pa.BufferReader(data)).schema_arrow
        fields = {name: kind for name, kind in record_schema(schema).items() if not name.startswith("_")}
        return arrow_schema(fields, compression=compression_of(schema), metadata={})
    except (OSError, ValueError, KeyError, pa.ArrowException):
        return None


def _remote_header(file: RemotePath) -> Bytes:
    remote = RemoteFile(file)
    head = remote.read(0, _HEADER_BYTES)
    end = 16 + int.from_bytes(head[12:16], "little")
    if len(head) < end <= _MOST_HEADER_BYTES:
        head = remote.read(0, end)
    return np.frombuffer(head, np.uint8)


def number_of(schema: pa.Schema, key: str) -> float:
    """The number `millstream.{key}` in the metadata of a shard or sidecar; 0 if it is missing or not one."""
    try:
        value = float(metadata_of(schema, key, "0"))
    except ValueError:
        return 0.0
    return value if isfinite(value) and value >= 0 else 0.0


def check_version(path: Path, version: float) -> None:
    """Raise NewerFormat for a store that a newer millstream wrote."""
    if version > VERSION:
        raise NewerFormat(
            f"{path}: written in format {version:g}, this millstream reads up to {VERSION}. "
            "Upgrade: pip install --upgrade millstream"
        )


def _sealed_sizes(path: Path) -> dict[int, int]:
    """Bytes of every sealed shard in the folder, by number, ascending."""
    if isinstance(path, RemotePath):
        found = {name: info.num_bytes for name, info in path.entries().items() if name.endswith(".arrow")}
    else:
        with os.scandir(path) as entries:
            found = {entry.name: entry.stat().st_size for entry in entries if entry.name.endswith(".arrow")}
    sizes = {_shard_number(path, name): size for name, size in found.items()}
    return {number: sizes[number] for number in sorted(number for number in sizes if number is not None)}


def _is_replaced(path: Path, shard: ShardInfo, size: int) -> bool:
    """Whether an intact shard differs from the one in the manifest: a repair died before updating the manifest."""
    return size != shard.bytes and read_shard_seal(path / shard_name(shard.number)) is not None


def _header_crc32c(path: Path, number: int) -> int | None:
    """A header has the time of its writing, to the microsecond: two shards with the same one are copies."""
    file = path / shard_name(number)
    seal = read_shard_seal(file) if file.exists() else None
    return seal and seal.header_crc32c


def _config_of(schema: pa.Schema) -> dict[str, object]:
    """The configuration in the header of a shard; empty if there is none, or no mapping."""
    try:
        found = parse_json(metadata_of(schema, "config", "null"))
    except ValueError:
        return {}
    return cast("dict[str, object]", found) if isinstance(found, dict) else {}


def _merged(a: pa.Schema | None, b: pa.Schema, compression: str) -> pa.Schema:
    """The schema of a store with both shards: fields that are only None in one take their type from the other."""
    if a is None:
        return b
    one, two = record_schema(a), record_schema(b)
    fields = {name: (refine(kind, two[name]) if name in two else None) or kind for name, kind in one.items()}
    metadata = {key.decode(): value.decode() for key, value in (b.metadata or {}).items()}
    return a if fields == one else arrow_schema(fields, compression=compression, metadata=metadata)


def _parse_manifest(path: Path) -> Manifest | None:
    """The manifest as stored; None if missing or damaged."""
    try:
        data = (path / MANIFEST).read_bytes()
        content = parse_json(data)
        version = int(content["version"])
        body, mark, _ = data.rpartition(_CRC_LINE[:12].encode())
        is_intact = bool(mark) and data[len(body) :] == _CRC_LINE.format(crc32c(body)).encode()
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    if content.get("format") != FORMAT and not any(list_shards(path)):
        raise NotAStore(f"{path / MANIFEST}: format {content.get('format')!r}, expected {FORMAT!r}")
    check_version(path, version)  # before the checksum: a newer version may compute it differently
    if not is_intact:
        return None
    try:
        shards = tuple(ShardInfo(**{k: v for k, v in shard.items() if k != "name"}) for shard in content["shards"])
        encoded = content["arrow_schema"]
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(encoded))) if encoded else None
        manifest = Manifest(content["config"], content["compression"], schema, shards)
        return manifest if _is_sensible(manifest) and _has_fields_of_shards(path, manifest) else None
    except (KeyError, TypeError, ValueError, AttributeError, OSError, pa.ArrowException):
        return None


def _has_fields_of_shards(path: Path, manifest: Manifest) -> bool:
    """Whether the fields can be those of the first shard; every shard of a store has the same ones."""
    if isinstance(path, RemotePath):
        return True  # sidecars are checked against the fields; opening needs no shard
    first = next((shard.number for shard in manifest.shards if (path / shard_name(shard.number)).exists()), None)
    found = None if first is None else shard_schema(path, first)
    if found is None:
        return True
    fields = record_schema(found)
    return fields.keys() == manifest.fields.keys() and all(
        refine(kind, fields[name]) is not None for name, kind in manifest.fields.items()
    )


def _is_sensible(manifest: Manifest) -> bool:
    """Whether the values of a manifest with a valid checksum can be those of a store; else the shards are read."""
    _ = manifest.fields  # raises for a schema that is not of records
    counts = [(shard.number, shard.records, shard.bytes) for shard in manifest.shards]
    checksums: list[object] = [shard.sidecar_crc32c for shard in manifest.shards]
    return (
        isinstance(manifest.config, dict)
        and manifest.compression in ("none", "lz4", "zstd")
        and all(type(count) is int and 0 <= count < _MOST for shard in counts for count in shard)
        and len({shard.number for shard in manifest.shards}) == len(manifest.shards)
        and all(type(s.seconds) in (int, float) and 0 <= s.seconds < _MOST for s in manifest.shards)
        and all(s.largest is None or (type(s.largest) is int and 0 <= s.largest < _MOST) for s in manifest.shards)
        and all(crc is None or (type(crc) is int and 0 <= crc < 1 << 32) for crc in checksums)
    )
