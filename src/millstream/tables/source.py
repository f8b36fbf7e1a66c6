"""The file of a table, opened for each access: no descriptor is kept, so any process can use it, and changes show."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from millstream.core.console import quoted
from millstream.errors import BadSource, StaleIndex

COMPRESSED = {".gz": "gunzip -k", ".bgz": "gunzip -k -S .bgz", ".zst": "unzstd", ".bz2": "bunzip2 -k", ".xz": "unxz -k"}


@dataclass(frozen=True)
class Source:
    """A file as it was when it was opened first."""

    path: Path
    size: int
    mtime_ns: int

    @staticmethod
    def at(path: Path) -> "Source":
        """The file at a path; BadSource if there is none, or if it is compressed."""
        if not path.is_file():
            raise BadSource(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}")
        if command := COMPRESSED.get(path.suffix.lower()):
            raise BadSource(
                f"{path}: its rows cannot be read in any order while it is compressed. Decompress it: {command} "
                f"{quoted(path)}; or convert it to Parquet"
            )
        stat = path.stat()
        if not stat.st_size:
            raise BadSource(f"{path}: empty")
        return Source(path, stat.st_size, stat.st_mtime_ns)

    @contextmanager
    def open(self) -> Generator[BinaryIO]:
        """The open file; StaleIndex if it has changed."""
        with open(self.path, "rb", buffering=0) as file:
            stat = os.fstat(file.fileno())
            if (stat.st_size, stat.st_mtime_ns) != (self.size, self.mtime_ns):
                raise StaleIndex(f"{self.path}: has changed since it was opened. Open it again")
            yield file
