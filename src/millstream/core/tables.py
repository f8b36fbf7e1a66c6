"""Parquet tables that carry their own checksum: damage is noticed before the bytes reach a native parser.

The checksum is in the metadata of the file, computed with zeros in its place. Other tools ignore it. A table of ours
without one is refused: damage may have destroyed it. Only tables of users, which have none, are parsed unverified.
"""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from millstream.core.files import publish
from millstream.core.record import crc32c

_KEY, _MARK, _ZEROS = b"millstream.checksum", b"millstream-crc32c=", b"00000000"


def to_parquet(table: pa.Table) -> bytes:
    """The bytes of a Parquet file with its checksum."""
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    metadata[_KEY.decode()] = (_MARK + _ZEROS).decode()
    sink = io.BytesIO()
    pq.write_table(table.cast(table.schema.with_metadata(metadata)), sink, compression="zstd")
    return _with_checksum(sink.getvalue())


def is_table_intact(data: bytes) -> bool | None:
    """Whether the bytes of a Parquet file match their checksum; None if they have none.

    A program that changes the table and keeps its metadata writes zeros, so that its file has none.
    """
    if _MARK not in data:
        return False if _KEY in data else None
    start = data.rindex(_MARK) + len(_MARK)
    return None if data[start : start + len(_ZEROS)] == _ZEROS else _with_checksum(data) == data


def publish_table(file: Path, table: pa.Table, advice: str | None = None) -> None:
    """Write a table so that its name always holds either the old one or all of the new one."""
    publish(file, to_parquet(table), *([advice] if advice else []))


def check_table(data: bytes) -> None:
    """Raise pa.ArrowInvalid unless these are the bytes of a table that we wrote."""
    found = is_table_intact(data)
    if not found:
        raise pa.ArrowInvalid("its checksum does not match" if found is False else "it has no checksum of millstream")


def read_table(file: Path) -> pa.Table:
    """A table that we wrote, verified. Raises OSError, or pa.ArrowInvalid if damaged or written by others."""
    return open_table(file).read(use_threads=False)  # see `read_parquet`


def open_table(file: Path) -> pq.ParquetFile:
    """The same, to read some of its columns."""
    data = file.read_bytes()
    check_table(data)
    return pq.ParquetFile(pa.BufferReader(data))


def read_parquet(data: bytes) -> pa.Table:
    """The table in the bytes of any Parquet file, verified if it has a checksum; raises pa.ArrowInvalid if damaged.

    On this thread: threads of Arrow's CSV reader aborted commands that ended soon after. Those of its Parquet reader
    were not seen to, but these files are small and need none.
    """
    return open_parquet(data).read(use_threads=False)


def open_parquet(data: bytes) -> pq.ParquetFile:
    """The same, to read some of its rows or columns."""
    if is_table_intact(data) is False:
        check_table(data)
    return pq.ParquetFile(pa.BufferReader(data))


def _with_checksum(data: bytes) -> bytes:
    """The bytes with the checksum where it belongs: at the last mark, since texts of the table come before it."""
    start = data.rindex(_MARK) + len(_MARK)
    before, after = data[:start], data[start + len(_ZEROS) :]
    return before + b"%08x" % (crc32c(after, crc32c(before + _ZEROS)) or 1) + after
