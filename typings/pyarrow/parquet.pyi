from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from . import NativeFile, RecordBatch, Schema, Table

class ColumnChunkMetaData:
    path_in_schema: str
    total_uncompressed_size: int
    total_compressed_size: int
    data_page_offset: int
    dictionary_page_offset: int | None

class RowGroupMetaData:
    num_rows: int
    num_columns: int
    def column(self, i: int) -> ColumnChunkMetaData: ...

class FileMetaData:
    num_rows: int
    num_row_groups: int
    def row_group(self, i: int) -> RowGroupMetaData: ...

class ParquetFile:
    metadata: FileMetaData
    schema_arrow: Schema
    def __init__(
        self,
        source: Path | NativeFile | BinaryIO,
        *,
        metadata: FileMetaData | None = ...,
        pre_buffer: bool = ...,
        buffer_size: int = ...,
        page_checksum_verification: bool = ...,
    ) -> None: ...
    def iter_batches(
        self,
        batch_size: int = ...,
        row_groups: Sequence[int] | None = ...,
        columns: Sequence[str] | None = ...,
        *,
        use_threads: bool = ...,
    ) -> Iterator[RecordBatch]: ...
    def read(self, columns: Sequence[str] | None = ..., *, use_threads: bool = ...) -> Table: ...

def write_table(table: Table, where: object, *, compression: str) -> None: ...
def read_table(source: Path) -> Table: ...
