"""Arrays that grow in temporary files and become one checksummed file: how an index or a pack is written.

The layout is described in `sections.py`, which reads it.
"""

import json
import os
import tempfile
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from millstream.core.files import no_space, publishing, sync_folder
from millstream.core.record import crc32c
from millstream.reads.files.encodings import BitColumn, BitColumnWriter
from millstream.reads.files.sections import CRC_BYTES, MAGIC, TAIL, VERSION

_NOTHING_LEFT = "Nothing was left behind. Free some space, or put the index elsewhere with --index-dir"


class SectionsWriter:
    """Grows arrays in temporary files; `publish` makes them one file, or nothing at all.

    The files are unnamed and beside `path`; or named and in `folder`, so that after a crash another writer can resume
    from a saved `state`.
    """

    def __init__(self, path: Path, *, folder: Path | None = None, advice: str = _NOTHING_LEFT) -> None:
        self.path = path
        self._folder = folder
        self._advice = advice
        self._synced: dict[str, int] = {}  # bytes of each part that are on disk for certain
        self._parts: dict[str, BinaryIO] = {}
        self._columns: dict[str, BitColumnWriter] = {}

    def part(self, name: str) -> BinaryIO:
        """The growing array of this name, as a file."""
        if name not in self._parts:
            with no_space(self.path, self._advice):
                self._parts[name] = self._open(name)
        return self._parts[name]

    def column(self, name: str) -> BitColumnWriter:
        """The growing bit column of this name."""
        if name not in self._columns:
            self._columns[name] = BitColumnWriter(self.part(f"{name}.directory"), self.part(f"{name}.words"))
        return self._columns[name]

    def read_back(self, name: str) -> Generator[NDArray[np.int64]]:
        """The values of a bit column, in chunks; completes it, so nothing can be appended afterwards."""
        column = self._columns[name]
        column.finish()
        directory, words = (self.part(f"{name}.{part}") for part in ("directory", "words"))
        directory.flush()
        words.flush()
        if column.rows:
            # mode "c": for read-only arrays the kernels would be compiled again
            pairs, numbers = np.memmap(directory, np.int64, "c"), np.memmap(words, np.uint64, "c")
            bits = BitColumn(column.rows, np.asarray(pairs).reshape(-1, 2), np.asarray(numbers))
            for start in range(0, column.rows, 1 << 20):
                yield bits.take(np.arange(start, min(start + (1 << 20), column.rows), dtype=np.int64))

    def drop(self, name: str) -> None:
        """Discard a bit column."""
        del self._columns[name]
        for part in (f"{name}.directory", f"{name}.words"):
            self.drop_part(part)

    def drop_part(self, name: str) -> None:
        """Discard an array; a file in `folder` stays, for resuming from an earlier state."""
        self._parts.pop(name).close()

    def state(self, parts: Iterable[str], *, sync: bool = False) -> dict[str, object]:
        """Where these parts end, and what their columns have not written yet. `sync`: also flush them to disk."""
        ends = {name: self._parts[name].tell() for name in parts}
        for name, end in ends.items():
            if sync and self._synced.get(name) != end:
                self._parts[name].flush()
                os.fdatasync(self._parts[name].fileno())
                self._synced[name] = end
        columns = {name: column.state() for name, column in self._columns.items() if f"{name}.words" in ends}
        return {"parts": ends, "columns": columns}

    def restore(self, state: Mapping[str, object]) -> None:
        """Truncate the parts to where they ended."""
        for name, end in cast(dict[str, int], state["parts"]).items():
            part = self.part(name)
            part.seek(end)
            part.truncate()
            self._synced.pop(name, None)
        for name, column in cast(dict[str, dict[str, object]], state["columns"]).items():
            self.column(name).restore(column)

    @property
    def part_names(self) -> list[str]:
        return list(self._parts)

    def publish(self, meta: Mapping[str, object]) -> None:
        """Write everything under a temporary name, then rename."""
        for column in self._columns.values():
            column.finish()
        with publishing(self.path, self._advice) as file:
            self._write(file, meta)
        sync_folder(self.path.parent)

    def close(self) -> None:
        for part in self._parts.values():
            with suppress(OSError):  # a full disk: the rest is useless anyway
                part.close()

    def _open(self, name: str) -> BinaryIO:
        if self._folder is None:
            return cast(BinaryIO, tempfile.TemporaryFile(dir=self.path.parent, buffering=1 << 16))
        fd = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        return os.fdopen(fd, "r+b", buffering=1 << 16)

    def __enter__(self) -> "SectionsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, file: BinaryIO, meta: Mapping[str, object]) -> None:
        out = _ChecksummedFile(file)
        out.write(MAGIC)
        places: dict[str, tuple[int, int]] = {}
        for name, part in sorted(self._parts.items()):  # the order they began in depends on the size of buffers
            out.write(bytes(-out.position % 64))
            part.seek(0)
            start = out.position
            while data := part.read(CRC_BYTES):
                out.write(data)
            places[name] = start, out.position - start
        rows = {name: column.rows for name, column in sorted(self._columns.items())}
        crcs = out.finish()
        text = json.dumps({**meta, "version": VERSION, "sections": places, "rows": rows}).encode()
        end = out.position
        file.write(crcs + text)
        file.write(TAIL.pack(end, end + len(crcs), end + len(crcs) + len(text), crc32c(crcs), crc32c(text), MAGIC))


class _ChecksummedFile:
    """Writes to a file and computes the CRC-32C of every megabyte."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._crcs: list[int] = []
        self._crc = 0
        self.position = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        while data:
            room = CRC_BYTES - self.position % CRC_BYTES
            part, data = data[:room], data[room:]
            self._crc = crc32c(part, self._crc)
            self.position += len(part)
            if self.position % CRC_BYTES == 0:
                self._crcs.append(self._crc)
                self._crc = 0

    def finish(self) -> bytes:
        if self.position % CRC_BYTES:
            self._crcs.append(self._crc)
        return np.array(self._crcs, np.uint32).tobytes()
