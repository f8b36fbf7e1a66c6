from collections.abc import Sequence
from pathlib import Path

from . import NativeFile, Schema, Table

class FileMetaData:
    num_rows: int

class ParquetFile:
    metadata: FileMetaData
    schema_arrow: Schema
    def __init__(self, source: Path | NativeFile, *, metadata: FileMetaData | None = ...) -> None: ...
    def read(self, columns: Sequence[str] | None = ..., *, use_threads: bool = ...) -> Table: ...

def write_table(table: Table, where: object, *, compression: str) -> None: ...
def read_table(source: Path) -> Table: ...
