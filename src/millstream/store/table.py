"""Sidecars -> one Arrow table. Falls back to the shard itself where a sidecar is missing or damaged."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from millstream.console import quoted
from millstream.errors import CorruptShard, DamageWarning
from millstream.records import Tensor, crc32c
from millstream.store.layout import Manifest, ShardInfo, shard_name, sidecar_name
from millstream.store.maps import Map
from millstream.store.message import compression_of, record_schema
from millstream.store.recover import read_shard
from millstream.store.sidecar import Sidecar, to_parquet


def load_sidecar(path: Path, shard: ShardInfo) -> Sidecar:
    """The shard's sidecar, checked; rebuilt in memory from the shard when it is not what was written."""
    try:
        data = (path / sidecar_name(shard.number)).read_bytes()
    except FileNotFoundError:
        data = b""
    if data and shard.sidecar_crc32c in (None, crc32c(data)):
        try:
            return Sidecar(data)
        except (OSError, pa.ArrowException):  # only where the CRC was not known
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
