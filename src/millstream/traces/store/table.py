"""Sidecars -> one Arrow table, and the id index: question id -> record in O(1) for any number of shards."""

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.core.console import quoted
from millstream.core.files import publish
from millstream.core.memory import Map
from millstream.core.record import Array, Tensor, crc32c, from_bytes, infer_schema
from millstream.errors import CorruptShard, DamageWarning
from millstream.traces.store.encode import Encoder
from millstream.traces.store.format import (
    END_OF_STREAM,
    arrow_schema,
    bad_slice,
    compression_of,
    header,
    read_header,
    read_row,
    read_seal,
    record_schema,
    tail,
)
from millstream.traces.store.manifest import APPEND_AGAIN, IDS, Manifest, ShardInfo, shard_name, sidecar_name
from millstream.traces.store.shard import ID_FIELD, read_shard
from millstream.traces.store.sidecar import Sidecar, to_parquet

COVER_SHARDS = 64  # for fewer uncovered shards, reading sidecars is faster than updating the index
_PER_BUCKET = 4
_TAIL_BYTES = 64 * 1024

Hashes = NDArray[np.uint64]


def load_sidecar(path: Path, shard: ShardInfo) -> Sidecar:
    """The sidecar of a shard, verified; rebuilt in memory from the shard if it is missing or damaged."""
    try:
        data = (path / sidecar_name(shard.number)).read_bytes()
    except FileNotFoundError:
        data = b""
    if data and shard.sidecar_crc32c in (None, crc32c(data)):
        try:
            return Sidecar(data)
        except (OSError, ValueError, pa.ArrowException):  # only if the CRC is unknown
            pass
    file = path / shard_name(shard.number)
    if not file.exists():
        raise CorruptShard(f"{file}: missing, with its {shard.records} records. See: millstream verify {quoted(path)}")
    schema, rows, _ = read_shard(Map(file).view)
    if schema is None or len(rows) != shard.records:
        raise CorruptShard(
            f"{file}: its sidecar is damaged and only {len(rows)} of its {shard.records} records are readable. "
            f"Run: millstream repair {quoted(path)}"
        )
    warnings.warn(
        f"{path / sidecar_name(shard.number)}: missing or damaged; read from the shard instead. "
        f"Run: millstream repair {quoted(path)}",
        DamageWarning,
        stacklevel=2,
    )
    return Sidecar(to_parquet(rows, record_schema(schema), compression=compression_of(schema), seconds=shard.seconds))


def read_table(path: Path, manifest: Manifest, names: Sequence[str] | None = None) -> pa.Table:
    """Scalars and texts of every record, in record order."""
    schema = manifest.fields
    fields = [(n, k) for n, k in schema.items() if not isinstance(k, Tensor) and (names is None or n in names)]
    target = pa.schema(fields)
    tables = [
        load_sidecar(path, shard).table(target.names).select(target.names).cast(target) for shard in manifest.shards
    ]
    return pa.concat_tables([target.empty_table(), *tables])


def read_column(path: Path, manifest: Manifest, name: str) -> pa.ChunkedArray:
    """One scalar field of every record."""
    return read_table(path, manifest, [name]).column(name)


@dataclass(frozen=True)
class IdIndex:
    """Sorted hashes, the place (shard number << 32 | row) of each, and the start of each bucket of hashes."""

    shards: frozenset[tuple[int, int | None]]  # (number, sidecar CRC) of the shards covered
    hashes: Hashes
    places: Hashes
    starts: NDArray[np.int64]

    def find(self, key: object) -> list[tuple[int, int]]:
        """(shard number, row) of every record that may have this id, in record order."""
        wanted = _hash(key)
        bucket = int(wanted) * (len(self.starts) - 1) >> 64
        low, high = self.starts[bucket : bucket + 2]
        places = np.sort(self.places[low:high][self.hashes[low:high] == wanted])
        return [(int(place) >> 32, int(place) & 0xFFFFFFFF) for place in places]


def build_index(path: Path, shards: Sequence[ShardInfo], *, old: IdIndex | None = None) -> IdIndex:
    """An index of all shards; entries that `old` covers are reused."""
    covered = old.shards if old else frozenset[tuple[int, int | None]]()
    new = [shard for shard in shards if _key(shard) not in covered]
    hashes, places = _hash_shards(path, new)
    current = {_key(shard) for shard in shards}
    if old:
        kept = np.isin(old.places >> np.uint64(32), [number for number, _ in covered & current])
        hashes = np.concatenate([old.hashes[kept], hashes])
        places = np.concatenate([old.places[kept], places])
    order = np.argsort(hashes, kind="stable")
    hashes, places = hashes[order], places[order]
    num_buckets = max(1, len(hashes) // _PER_BUCKET)
    # Bucket b has the hashes h with h * num_buckets >> 64 == b; its first possible hash is ceil(b * 2**64 / buckets).
    bounds = np.array([-(-(b << 64) // num_buckets) for b in range(num_buckets)], np.uint64)
    starts = np.append(np.searchsorted(hashes, bounds), len(hashes))
    return IdIndex(frozenset(current), hashes, places, starts)


def load_index(path: Path) -> IdIndex | None:
    """The stored index; None if missing or damaged."""
    try:
        view = Map(path / IDS).view
        seal = read_seal(view[-_TAIL_BYTES:].tobytes(), len(view))
        schema, start = read_header(view)
    except (OSError, ValueError, pa.ArrowException):
        return None
    if seal is None or crc32c(view[:start]) != seal.header_crc32c:
        return None
    row = read_row(view, schema, start)
    if row is None or view[start + row.num_bytes : seal.offset].tobytes() != END_OF_STREAM:
        return None
    arrays: dict[str, Array] = {}
    for name, kind in record_schema(schema).items():
        place = row.tensors.get(name)
        if not isinstance(kind, Tensor) or place is None or bad_slice(view, place, kind.itemsize) is not None:
            return None
        data = view[place.offset : place.offset + place.num_bytes(kind.itemsize)]
        arrays[name] = np.asarray(from_bytes(kind, place.shape, data))
    if arrays.keys() != {"shards", "hashes", "places", "starts"}:
        return None
    shards = frozenset((int(number), int(crc)) for number, crc in arrays["shards"])
    return IdIndex(shards, arrays["hashes"], arrays["places"], arrays["starts"])  # pyright: ignore[reportArgumentType]


def update_ids(path: Path, manifest: Manifest) -> None:
    """Update the stored index if it lacks too many shards."""
    schema = manifest.fields
    old = load_index(path)
    covered = old.shards if old else frozenset[tuple[int, int | None]]()
    if ID_FIELD not in schema or sum(_key(shard) not in covered for shard in manifest.shards) < COVER_SHARDS:
        return
    index = build_index(path, manifest.shards, old=old)
    covers = np.array(sorted((n, crc or 0) for n, crc in index.shards), np.int64).reshape(-1, 2)
    record = {"shards": covers, "hashes": index.hashes, "places": index.places, "starts": index.starts}
    arrow = arrow_schema(infer_schema(record, {}), compression="none", metadata={})
    head = header(arrow)
    parts, row = Encoder(arrow).encode(record, len(head))
    publish(path / IDS, b"".join([head, *parts, tail(arrow, [row], header_bytes=head, sidecar=b"")]), APPEND_AGAIN)


def _key(shard: ShardInfo) -> tuple[int, int | None]:
    return shard.number, shard.sidecar_crc32c


def _hash_shards(path: Path, shards: Sequence[ShardInfo]) -> tuple[Hashes, Hashes]:
    hashes = [np.empty(0, np.uint64)]
    places = [np.empty(0, np.uint64)]
    for shard in shards:
        ids = load_sidecar(path, shard).column(ID_FIELD).to_pylist()
        hashes.append(np.array([_hash(key) for key in ids], np.uint64))
        places.append(np.arange(len(ids), dtype=np.uint64) | np.uint64(shard.number << 32))
    return np.concatenate(hashes), np.concatenate(places)


def _hash(key: object) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(str(key).encode(), digest_size=8).digest(), "little"))
