"""Names in a store's folder, the manifest, and the rules of publishing a file.

The manifest can always be rebuilt from the sealed shards; readers take from it what it knows and look at the shards
for the rest, so a writer that dies before its manifest loses nothing.
"""

import base64
import errno
import fcntl
import json
import os
import re
import time
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from millstream.config import config_hash
from millstream.console import quoted
from millstream.errors import NewerFormat, NotAStore, StoreFull
from millstream.records import Schema, crc32c, refine
from millstream.store.maps import Map
from millstream.store.message import Seal, arrow_schema, compression_of, read_header, read_seal, record_schema

FORMAT = "millstream.traces"
VERSION = 1
MANIFEST = "manifest.json"
DAMAGED = "damaged"  # folder where repair sets things aside
IDS = "ids.arrow"  # kept by millstream.store.ids
TOKENIZER = "tokenizer.json"  # of the language model, as Hugging Face writes it
_SHARD = re.compile(r"shard-(\d{5,})\.arrow(\.open)?")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_APPEND_AGAIN = (
    "Every record appended before is kept; free some space and append again, or open the store again to go on"
)
_CRC_LINE = ',\n "crc32c": {}\n}}\n'  # ends the manifest; covers every byte before it
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class ShardInfo:
    """One sealed shard. `seconds` is the time from its creation to its seal."""

    number: int
    records: int
    bytes: int
    seconds: float
    sidecar_crc32c: int | None  # None: not known, because shard and manifest were both damaged


@dataclass(frozen=True)
class Manifest:
    """What a store says about itself as a whole."""

    config: Mapping[str, object] = field(default_factory=dict[str, object])
    compression: str = "none"
    arrow_schema: pa.Schema | None = None
    shards: tuple[ShardInfo, ...] = ()

    @property
    def fields(self) -> Schema:
        """The fields of the records; empty before the first one."""
        return record_schema(self.arrow_schema) if self.arrow_schema else {}


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.arrow"


def sidecar_name(number: int) -> str:
    return f"shard-{number:05d}.parquet"


def shard_metadata(config: Mapping[str, object]) -> dict[str, str]:
    """What every shard says of the store it was written for, so that the manifest can be rebuilt."""
    return {
        "millstream.version": str(VERSION),
        "millstream.created": repr(time.time()),
        "millstream.config": json.dumps(config),
    }


def open_file(path: Path, number: int) -> Path:
    """The shard's file while it is being written."""
    return path / (shard_name(number) + ".open")


def list_shards(path: Path) -> tuple[list[int], list[int]]:
    """Numbers of the sealed and of the open shards in the folder, ascending."""
    sealed: list[int] = []
    opened: list[int] = []
    for name in os.listdir(path):
        if match := _SHARD.fullmatch(name):
            (opened if match[2] else sealed).append(int(match[1]))
    return sorted(sealed), sorted(opened)


def foreign_file(path: Path) -> str | None:
    """A name in the folder that is not a store's, hidden files aside."""
    own = {MANIFEST, IDS, DAMAGED}
    names = sorted(os.listdir(path))
    return next((n for n in names if not (n.startswith((".", "shard-")) or n in own)), None)


def check_store(path: Path) -> None:
    """Raise NotAStore, with the command that may be wanted, unless the folder is a trace store."""
    if not path.exists():
        raise NotAStore(
            f"{path}: no such folder. Old trace files become a store with: millstream convert OLD... {quoted(path)}"
        )
    if not path.is_dir():
        raise NotAStore(
            f"{path}: a file, not a trace store. An old trace file? Run: millstream convert {quoted(path)} traces/"
        )
    if (path / MANIFEST).exists() or any(list_shards(path)):
        return
    old = next((end for end in (".pkl", ".pkl.gz", ".pt") if any(n.endswith(end) for n in os.listdir(path))), None)
    remedy = f"Old trace files are here; run: millstream convert {quoted(f'{path}/*{old}')} OUT" if old else ""
    raise NotAStore(f"{path}: not a trace store (no {MANIFEST}, no shard-*.arrow). {remedy}".rstrip())


def read_manifest(path: Path) -> Manifest:
    """The manifest brought up to date with the sealed shards in the folder."""
    check_store(path)
    parsed = _parse_manifest(path)
    stored, damaged = parsed or Manifest(), parsed is None
    known = {shard.number: shard for shard in stored.shards}  # a missing one keeps its place: reading it says so
    sizes = _sealed_sizes(path)
    unknown = [n for n, size in sizes.items() if n not in known or _is_replaced(path, known[n], size)]
    shards = known | {number: shard_info(path, number) for number in unknown}
    schema, compression, config = stored.arrow_schema, stored.compression, stored.config
    for number in unknown:
        found = shard_schema(path, number)
        if found is None:
            continue
        if damaged:
            compression = compression_of(found)
            config = json.loads((found.metadata or {}).get(b"millstream.config", b"null")) or config
        schema = _united(schema, found, compression)
    return Manifest(config, compression, schema, tuple(shards[number] for number in sorted(shards)))


def write_manifest(path: Path, manifest: Manifest) -> None:
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "fields": {name: str(kind) for name, kind in manifest.fields.items()},
        "config": dict(manifest.config),
        "config_hash": config_hash(manifest.config),
        "compression": manifest.compression,
        "arrow_schema": _encode_schema(manifest.arrow_schema),
        "shards": [{"name": shard_name(shard.number), **asdict(shard)} for shard in manifest.shards],
    }
    body = json.dumps(content, indent=1, ensure_ascii=False).removesuffix("\n}").encode()
    publish(path / MANIFEST, body + _CRC_LINE.format(crc32c(body)).encode())


def manifest_holds(path: Path) -> bool:
    """Whether the manifest is there and unchanged since it was written."""
    return _parse_manifest(path) is not None


def shard_info(path: Path, number: int) -> ShardInfo:
    """A sealed shard as it describes itself, or as its sidecar does when its end is damaged."""
    file = path / shard_name(number)
    seal = read_shard_seal(file)
    try:
        sidecar = pq.ParquetFile(path / sidecar_name(number))
        records = sidecar.metadata.num_rows
        seconds = float((sidecar.schema_arrow.metadata or {}).get(b"millstream.seconds", b"0"))
    except (OSError, pa.ArrowException):
        records, seconds = 0, 0.0
    if seal is None:
        return ShardInfo(number, records, file.stat().st_size, seconds, None)
    return ShardInfo(number, seal.records, file.stat().st_size, seconds, seal.sidecar_crc32c)


def read_shard_seal(file: Path) -> Seal | None:
    """The seal at the end of a shard file, if it is whole."""
    with open(file, "rb") as f:
        size = os.fstat(f.fileno()).st_size
        end = b""
        wanted = _TAIL_BYTES
        while True:
            wanted = min(wanted, size)
            f.seek(size - wanted)
            end = f.read(wanted)
            footer_bytes = int.from_bytes(end[-10:-6], "little")
            if wanted == size or footer_bytes + 1024 <= wanted or footer_bytes > size:
                return read_seal(end, size)
            wanted = footer_bytes + 1024


def shard_schema(path: Path, number: int) -> pa.Schema | None:
    """The Arrow schema at the head of a sealed shard, or as its sidecar has it when the head is damaged."""
    file = path / shard_name(number)
    view = Map(file).view
    seal = read_shard_seal(file)
    try:
        schema, start = read_header(view)
        check_version(path, int((schema.metadata or {}).get(b"millstream.version", VERSION)))
        if seal is None or crc32c(view[:start]) == seal.header_crc32c:
            return schema
    except (ValueError, pa.ArrowException):
        pass
    try:
        schema = pq.ParquetFile(path / sidecar_name(number)).schema_arrow
        fields = {name: kind for name, kind in record_schema(schema).items() if not name.startswith("_")}
        return arrow_schema(fields, compression=compression_of(schema), metadata={})
    except (OSError, ValueError, KeyError, pa.ArrowException):
        return None


@contextmanager
def no_space(file: Path, advice: str = _APPEND_AGAIN) -> Generator[None]:
    """Say plainly that the disk is full, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise StoreFull(f"{file}: {os.strerror(error.errno or 0).lower()}. {advice}") from None


def publish(file: Path, data: bytes) -> None:
    """Write a file so that its name always holds either the old bytes or all of the new ones, also after a crash."""
    with publishing(file) as f:
        f.write(data)


@contextmanager
def publishing(file: Path, advice: str = _APPEND_AGAIN) -> Generator[BinaryIO]:
    """The same for what is written piece by piece: `file` holds it once the block has ended."""
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with no_space(file, advice), open(temporary, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.rename(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_unpublished(file: Path) -> None:
    """Remove what was left by a process that was killed while it published this file; nobody else may be at it."""
    pattern = re.compile(rf"\.{re.escape(file.name)}\.[0-9a-f]{{12}}\.tmp")
    for name in os.listdir(file.parent):
        if pattern.fullmatch(name):
            (file.parent / name).unlink()


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def claim_shard(path: Path, first: int) -> tuple[int, int]:
    """A shard number no other writer has, from `first` on, and the descriptor of its new, locked `.open` file."""
    number = first
    while True:
        file = open_file(path, number)
        try:
            with no_space(file):
                fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            number += 1
            continue
        _lock(fd, wait=True)
        # Between create and lock another writer may have taken the file for an interrupted one and removed it; and the
        # number may have been sealed by a writer that was quicker.
        if _same_file(fd, file) and not (path / shard_name(number)).exists():
            return number, fd
        if _same_file(fd, file):
            file.unlink()
        os.close(fd)
        number += 1


@contextmanager
def abandoned(file: Path) -> Generator[int | None]:
    """The descriptor of an `.open` shard that no living writer holds, locked; None when one does."""
    try:
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        yield fd if _lock(fd, wait=False) and _same_file(fd, file) else None
    finally:
        os.close(fd)


def _lock(fd: int, *, wait: bool) -> bool:
    """flock: the kernel drops it when the process dies, however it dies."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # held by another, or a file system without locks: then nothing counts as abandoned
        return False
    return True


def _same_file(fd: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(file))
    except FileNotFoundError:
        return False


def _sealed_sizes(path: Path) -> dict[int, int]:
    """Bytes of every sealed shard in the folder, by number, ascending."""
    sizes: dict[int, int] = {}
    with os.scandir(path) as entries:
        for entry in entries:
            if (match := _SHARD.fullmatch(entry.name)) and not match[2]:
                sizes[int(match[1])] = entry.stat().st_size
    return dict(sorted(sizes.items()))


def _is_replaced(path: Path, shard: ShardInfo, size: int) -> bool:
    """Whether a whole shard lies there that is not the one the manifest knows: a repair died before its manifest."""
    return size != shard.bytes and read_shard_seal(path / shard_name(shard.number)) is not None


def _united(a: pa.Schema | None, b: pa.Schema, compression: str) -> pa.Schema:
    """The schema of a store with shards of both: fields that are only None in one take their type from the other."""
    if a is None:
        return b
    one, two = record_schema(a), record_schema(b)
    fields = {name: (refine(kind, two[name]) if name in two else None) or kind for name, kind in one.items()}
    metadata = {key.decode(): value.decode() for key, value in (b.metadata or {}).items()}
    return a if fields == one else arrow_schema(fields, compression=compression, metadata=metadata)


def _parse_manifest(path: Path) -> Manifest | None:
    """The manifest as stored, None when absent or damaged."""
    try:
        data = (path / MANIFEST).read_bytes()
        content = json.loads(data)
        version = int(content["version"])
        body, mark, _ = data.rpartition(_CRC_LINE[:12].encode())
        sound = bool(mark) and data[len(body) :] == _CRC_LINE.format(crc32c(body)).encode()
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if content.get("format") != FORMAT and not any(list_shards(path)):
        raise NotAStore(f"{path / MANIFEST}: format {content.get('format')!r}, expected {FORMAT!r}")
    check_version(path, version)  # whatever the checksum says: it may be one that only newer versions know
    if not sound:
        return None
    shards = tuple(ShardInfo(**{k: v for k, v in shard.items() if k != "name"}) for shard in content["shards"])
    return Manifest(content["config"], content["compression"], _decode_schema(content["arrow_schema"]), shards)


def check_version(path: Path, version: int) -> None:
    if version > VERSION:
        raise NewerFormat(
            f"{path}: written in format {version}, this millstream reads up to {VERSION}. "
            "Upgrade: pip install --upgrade millstream"
        )


def _encode_schema(schema: pa.Schema | None) -> str | None:
    return base64.b64encode(schema.serialize().to_pybytes()).decode() if schema else None


def _decode_schema(text: str | None) -> pa.Schema | None:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))) if text else None
