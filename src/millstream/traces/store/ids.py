"""The id index of a store: id -> record in O(1), for any number of shards."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.core.files import publish
from millstream.core.memory import Map
from millstream.core.record import Tensor, from_bytes, infer_schema
from millstream.core.remote import is_url, read_object
from millstream.traces.store.format import (
    END_OF_STREAM,
    arrow_schema,
    damaged_fields,
    header,
    id_field,
    read_shard,
    record_schema,
    tail,
)
from millstream.traces.store.manifest import APPEND_AGAIN, IDS, Manifest, ShardInfo, read_shard_seal
from millstream.traces.store.shard_writer import Encoder
from millstream.traces.store.sidecar import load_sidecar

_PER_BUCKET = 4

Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class IdIndex:
    """Sorted hashes, the place (shard number << 32 | row) of each, and the start of each bucket of hashes.

    A lookup reads two pages of the stored index: one with the bounds of a bucket, one with its hashes.
    """

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


def open_index(path: Path, shards: Sequence[ShardInfo], *, field: str) -> list[IdIndex]:
    """The stored index, if there is one, and an index of the shards that it does not cover."""
    stored = load_index(path)
    rest = build_index(path, _uncovered(shards, stored), field=field)
    return [stored, rest] if stored else [rest]


def load_index(path: Path) -> IdIndex | None:
    """The stored index; None if missing or damaged."""
    try:
        view = np.frombuffer(read_object(path / IDS), np.uint8) if is_url(path) else Map(path / IDS).view
        seal = read_shard_seal(path / IDS)
    except (OSError, ValueError):
        return None
    schema, rows, gaps = read_shard(view)
    if seal is None or schema is None or len(rows) != 1 or gaps:
        return None
    (row,) = rows
    fields = cast(dict[str, Tensor], record_schema(schema))
    is_contiguous = row.offset + row.num_bytes + len(END_OF_STREAM) == seal.offset
    if not is_contiguous or damaged_fields(view, row, record_schema(schema)):
        return None
    arrays: dict[str, Any] = {}
    for name, place in row.tensors.items():
        assert place is not None
        data = view[place.offset : place.offset + place.num_bytes(fields[name].itemsize)]
        arrays[name] = from_bytes(fields[name], place.shape, data)
    shards = frozenset((int(number), int(crc)) for number, crc in arrays["shards"])
    return IdIndex(shards, arrays["hashes"], arrays["places"], arrays["starts"])


def build_index(path: Path, shards: Sequence[ShardInfo], *, field: str, old: IdIndex | None = None) -> IdIndex:
    """An index of the id `field` of all shards; entries that `old` covers are reused."""
    hashes, places = _hash_shards(path, _uncovered(shards, old), field)
    current = frozenset(_key(shard) for shard in shards)
    if old:
        kept = np.isin(old.places >> np.uint64(32), [number for number, _ in old.shards & current])
        hashes = np.concatenate([old.hashes[kept], hashes])
        places = np.concatenate([old.places[kept], places])
    order = np.argsort(hashes, kind="stable")
    hashes, places = hashes[order], places[order]
    num_buckets = max(1, len(hashes) // _PER_BUCKET)
    # Bucket b has the hashes h with h * num_buckets >> 64 == b; its first possible hash is ceil(b * 2**64 / buckets).
    bounds = np.array([-(-(b << 64) // num_buckets) for b in range(num_buckets)], np.uint64)
    starts = np.append(np.searchsorted(hashes, bounds), len(hashes))
    return IdIndex(current, hashes, places, starts)


def update_ids(path: Path, manifest: Manifest, *, min_shards: int = 64) -> None:
    """Store the index again once it lacks `min_shards` shards; for fewer, reading their sidecars is faster."""
    old = load_index(path)
    field = id_field(manifest.fields)
    if field not in manifest.fields or len(_uncovered(manifest.shards, old)) < min_shards:
        return
    index = build_index(path, manifest.shards, field=field, old=old)
    covered = np.array(sorted((number, crc or 0) for number, crc in index.shards), np.int64).reshape(-1, 2)
    record = {"shards": covered, "hashes": index.hashes, "places": index.places, "starts": index.starts}
    arrow = arrow_schema(infer_schema(record, {}), compression="none", metadata={})
    head = header(arrow)
    parts, row = Encoder(arrow).encode(record, len(head))
    publish(path / IDS, b"".join([head, *parts, tail(arrow, [row], header_bytes=head, sidecar=b"")]), APPEND_AGAIN)


def _key(shard: ShardInfo) -> tuple[int, int | None]:
    return shard.number, shard.sidecar_crc32c


def _uncovered(shards: Sequence[ShardInfo], index: IdIndex | None) -> list[ShardInfo]:
    return [shard for shard in shards if index is None or _key(shard) not in index.shards]


def _hash_shards(path: Path, shards: Sequence[ShardInfo], field: str) -> tuple[Hashes, Hashes]:
    hashes = [np.empty(0, np.uint64)]
    places = [np.empty(0, np.uint64)]
    for shard in shards:
        ids = load_sidecar(path, shard, {field: pa.null()}).column(field).to_pylist()
        hashes.append(np.array([_hash(key) for key in ids], np.uint64))
        places.append(np.arange(len(ids), dtype=np.uint64) | np.uint64(shard.number << 32))
    return np.concatenate(hashes), np.concatenate(places)


def _hash(key: object) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(str(key).encode(), digest_size=8).digest(), "little"))
