"""The fingerprint of a file (size, modification time, checksums), which shows whether it has changed."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from millstream.core.record import crc32c

_EDGE_BYTES = 64 << 10
_SAMPLES, _SAMPLE_BYTES = 16, 4096


@dataclass(frozen=True)
class Fingerprint:
    """The state of a file when it was indexed."""

    size: int
    mtime_ns: int
    samples_crc32c: int
    crc32c: int

    @staticmethod
    def of_json(values: object) -> "Fingerprint":
        return Fingerprint(**cast(dict[str, int], values))

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    def difference(self, path: Path) -> str | None:
        """How the file has changed, or None. Reads all of it only if its modification time differs."""
        stat = os.stat(path)
        if stat.st_size != self.size:
            return f"size {self.size} -> {stat.st_size}"
        if samples_crc32c(path) != self.samples_crc32c:
            return "same size, different content"
        if stat.st_mtime_ns != self.mtime_ns and file_crc32c(path) != self.crc32c:
            return "same size, content partly changed"
        return None


def samples_crc32c(path: Path) -> int:
    """CRC-32C of both ends of a file and of 16 samples in between."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        crc = crc32c(file.read(_EDGE_BYTES))
        for index in range(_SAMPLES):
            file.seek(size * index // _SAMPLES)
            crc = crc32c(file.read(_SAMPLE_BYTES), crc)
        file.seek(max(size - _EDGE_BYTES, 0))
        return crc32c(file.read(_EDGE_BYTES), crc)


def file_crc32c(path: Path) -> int:
    """CRC-32C of a whole file, at disk speed."""
    crc = 0
    with open(path, "rb", buffering=0) as file:
        while data := file.read(1 << 20):
            crc = crc32c(data, crc)
    return crc
