"""The file of a table, opened for each access: no descriptor is kept, so any process can use it, and changes show.

An object is read in ranges of one version, of which those known beforehand are requested together.
"""

import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from millstream.core.bucket import ObjectInfo
from millstream.core.console import quoted
from millstream.core.fingerprint import samples_crc32c
from millstream.core.remote import RawObject, RemoteFile, RemotePath, RemoteStream, read_all
from millstream.errors import BadSource, ObjectMissing, StaleIndex

COMPRESSED = {".gz": "gunzip -k", ".bgz": "gunzip -k -S .bgz", ".zst": "unzstd", ".bz2": "bunzip2 -k", ".xz": "unxz -k"}
Span = tuple[int, int]  # where it starts, and its bytes
Part = tuple[int, memoryview]  # where it starts, and what is there


@dataclass(frozen=True)
class Source:
    """A file or an object as it was when it was opened first."""

    path: Path
    size: int
    mtime_ns: int
    etag: str | None = None

    @staticmethod
    def at(path: Path) -> "Source":
        """The file at a path; BadSource if there is none, or if it is compressed."""
        if not isinstance(path, RemotePath) and not path.is_file():
            raise BadSource(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}")
        if command := COMPRESSED.get(path.suffix.lower()):
            command = f"{command} {quoted(path.name if isinstance(path, RemotePath) else path)}"
            raise BadSource(
                f"{path}: its rows cannot be read in any order while it is compressed. Decompress it: {command}; or "
                "convert it to Parquet"
            )
        stat = _info(path) if isinstance(path, RemotePath) else path.stat()
        if not stat.st_size:
            raise BadSource(f"{path}: empty")
        etag = stat.etag if isinstance(stat, ObjectInfo) else None
        return Source(path, stat.st_size, stat.st_mtime_ns, etag)

    @property
    def is_remote(self) -> bool:
        return isinstance(self.path, RemotePath)

    @property
    def object(self) -> RemoteFile:
        """This version of the object; any other is an error."""
        known = ObjectInfo(self.size, self.etag, self.mtime_ns)
        return RemoteFile(cast(RemotePath, self.path), known=known)

    @contextmanager
    def open(self, parts: Iterable[Part] = ()) -> Generator[BinaryIO]:
        """The open file; StaleIndex if it has changed. `parts` of an object need no requests."""
        if self.is_remote:
            yield cast(BinaryIO, _Parts(self.object, parts))
            return
        with open(self.path, "rb", buffering=0) as file:
            stat = os.fstat(file.fileno())
            if (stat.st_size, stat.st_mtime_ns) != (self.size, self.mtime_ns):
                raise StaleIndex(f"{self.path}: has changed since it was opened. Open it again")
            yield file

    @contextmanager
    def stream(self) -> Generator[BinaryIO]:
        """The file to read once from its start."""
        if self.is_remote:
            known = ObjectInfo(self.size, self.etag, self.mtime_ns)
            with RemoteStream(cast(RemotePath, self.path), known=known) as stream:
                yield cast(BinaryIO, stream)
        else:
            with self.open() as file:
                yield file

    def read(self, spans: Sequence[Span], *, fresh: bool = False) -> list[Part]:
        """Spans of an object, requested together; `fresh`: not from the block cache. None of a file, which is fast."""
        if not self.is_remote:
            return []
        file = self.object
        parts = [(start, memoryview(bytearray(count))) for start, count in spans]
        read_all([(file, start, out) for start, out in parts], fresh=fresh)
        return parts

    def samples_crc32c(self) -> int:
        """CRC-32C of samples of the file."""
        if self.is_remote:
            return samples_crc32c(self.object)
        with self.open():  # it has not changed
            return samples_crc32c(self.path)


class _Parts(RawObject):
    """An object, some parts of which are here."""

    def __init__(self, file: RemoteFile, parts: Iterable[Part]) -> None:
        super().__init__(file)
        self._parts = list(parts)

    def _bytes(self, start: int, count: int) -> bytes | memoryview:
        for at, data in self._parts:
            if at <= start and start + count <= at + data.nbytes:
                return data[start - at : start - at + count]
        return super()._bytes(start, count)


def _info(path: RemotePath) -> ObjectInfo:
    try:
        return path.bucket.known(path.key) or path.info()  # known from looking for it just before
    except ObjectMissing:
        raise BadSource(f"{path}: no such object") from None
