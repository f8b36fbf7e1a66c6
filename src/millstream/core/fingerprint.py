"""The fingerprint of a file (size, modification time, checksums), which shows whether it has changed."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from millstream.core.bucket import ObjectInfo
from millstream.core.record import crc32c
from millstream.core.remote import RemoteFile, RemotePath, open_raw, read_all

_EDGE_BYTES = 64 << 10
_SAMPLES, _SAMPLE_BYTES = 16, 4096


@dataclass(frozen=True)
class Fingerprint:
    """The state of a file when it was indexed."""

    size: int
    mtime_ns: int
    samples_crc32c: int
    crc32c: int
    url: str | None = None  # of an object, and its version
    etag: str | None = None

    @staticmethod
    def of_json(values: object) -> "Fingerprint":
        return Fingerprint(**cast(dict[str, Any], values))

    def to_json(self) -> dict[str, object]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def difference(self, path: Path) -> str | None:
        """How the file has changed, or None. Reads all of it only if its modification time differs.

        An object is compared by its etag; one that was copied from elsewhere, by its size and samples.
        """
        stat: os.stat_result | ObjectInfo = path.info() if isinstance(path, RemotePath) else path.stat()
        if stat.st_size != self.size:
            return f"size {self.size} -> {stat.st_size}"
        if isinstance(stat, ObjectInfo) and stat.etag and self.url == str(path):
            return None if stat.etag == self.etag else "same size, another version"
        if samples_crc32c(path) != self.samples_crc32c:
            return "same size, different content"
        if isinstance(path, RemotePath):
            return None
        if stat.st_mtime_ns != self.mtime_ns and file_crc32c(path) != self.crc32c:
            return "same size, content partly changed"
        return None


def fingerprint_of(path: Path, stat: os.stat_result | ObjectInfo, crc32c: int) -> Fingerprint:
    """The fingerprint of a file or an object, all of which has been read."""
    url, etag = (str(path), stat.etag) if isinstance(stat, ObjectInfo) else (None, None)
    return Fingerprint(stat.st_size, stat.st_mtime_ns, samples_crc32c(path), crc32c, url, etag)


def version_of(stat: os.stat_result | ObjectInfo) -> tuple[object, ...]:
    """What changes when a file is replaced or written to, or an object replaced."""
    if isinstance(stat, ObjectInfo):
        return stat.num_bytes, stat.etag or stat.modified_ns
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def samples_crc32c(path: Path | RemoteFile) -> int:
    """CRC-32C of both ends of a file and of 16 samples in between."""
    if isinstance(path, RemotePath | RemoteFile):
        file = RemoteFile(path) if isinstance(path, RemotePath) else path
        samples = [bytearray(count) for _, count in _samples(file.num_bytes)]
        wanted = zip(_samples(file.num_bytes), samples, strict=True)
        read_all([(file, start, memoryview(out)) for (start, _), out in wanted if out])
        return crc32c(b"".join(samples))
    with open(path, "rb", buffering=0) as raw:
        crc = 0
        for start, count in _samples(os.fstat(raw.fileno()).st_size):
            crc = crc32c(os.pread(raw.fileno(), count, start), crc)
        return crc


def _samples(size: int) -> list[tuple[int, int]]:
    """Where the samples start, and their bytes."""
    places = [(0, _EDGE_BYTES), *((size * index // _SAMPLES, _SAMPLE_BYTES) for index in range(_SAMPLES))]
    return [(at, min(count, size - at)) for at, count in (*places, (max(size - _EDGE_BYTES, 0), _EDGE_BYTES))]


def file_crc32c(path: Path) -> int:
    """CRC-32C of a whole file, at disk speed."""
    crc = 0
    with open_raw(path) as file:
        while data := file.read(1 << 20):
            crc = crc32c(data, crc)
    return crc
