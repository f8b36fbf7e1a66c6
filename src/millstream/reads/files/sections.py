"""Named arrays in one checksummed file that is mapped, not loaded: the index of a read file.

    magic | arrays, each at a multiple of 64 | CRC-32C of every 1 MB | JSON: what it is, where the arrays are | tail

The tail is read first; it verifies the JSON and the list of CRCs. A megabyte is verified when it is first used, so
opening takes the same time for any size, and no damaged byte is ever used.
"""

import json
import os
import struct
import tempfile
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from millstream.core.config import parse_json
from millstream.core.files import no_space, publishing, sync_folder
from millstream.core.memory import Map
from millstream.core.record import Bytes, crc32c
from millstream.errors import BadIndex
from millstream.reads.files.encodings import BitColumn, BitColumnWriter

MAGIC = b"MILLSIDX"
VERSION = 1
CRC_BYTES = 1 << 20
_NOTHING_LEFT = "Nothing was left behind. Free some space, or put the index elsewhere with --index-dir"
_TAIL = struct.Struct("<QQQII8s")  # CRC list, JSON, their end; CRCs of both; magic
EAGER_BYTES = 16 << 20  # smaller arrays are verified as a whole on first use: 1 ms


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
        for name, part in self._parts.items():
            out.write(bytes(-out.position % 64))
            part.seek(0)
            start = out.position
            while data := part.read(CRC_BYTES):
                out.write(data)
            places[name] = start, out.position - start
        rows = {name: column.rows for name, column in self._columns.items()}
        crcs = out.finish()
        text = json.dumps({**meta, "version": VERSION, "sections": places, "rows": rows}).encode()
        end = out.position
        file.write(crcs + text)
        file.write(_TAIL.pack(end, end + len(crcs), end + len(crcs) + len(text), crc32c(crcs), crc32c(text), MAGIC))


class Sections:
    """A published file. `meta` is what `publish` was given; arrays are views of the mapped file.

    `remedy` ends the error message for a damaged file. A column of more than `eager_bytes` is verified where it is
    used, not when it is opened.
    """

    def __init__(self, path: Path, *, remedy: str = "", eager_bytes: int = EAGER_BYTES) -> None:
        self.path = path
        self.eager_bytes = eager_bytes
        self._remedy = remedy
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(size - _TAIL.size, 0))
            tail = file.read()
            if len(tail) < _TAIL.size or tail[-8:] != MAGIC:
                raise BadIndex(f"{path}: not a millstream index, or truncated. {remedy}")
            crcs_at, text_at, end, crcs_crc, text_crc, _ = _TAIL.unpack(tail)
            in_order = len(MAGIC) <= crcs_at <= text_at <= end == size - _TAIL.size
            file.seek(crcs_at if in_order else 0)
            crcs, text = (file.read(text_at - crcs_at), file.read(end - text_at)) if in_order else (b"", b"")
            self._map = Map(path, descriptor=file.fileno(), is_cache=True)
            self._inode = _inode(file.fileno())
        if not in_order or crc32c(crcs) != crcs_crc or crc32c(text) != text_crc:
            raise BadIndex(f"{path}: damaged (its table of contents fails its checksum). {remedy}")
        try:
            self.meta: dict[str, object] = parse_json(text)
            version = int(cast(int, self.meta.pop("version")))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise BadIndex(f"{path}: damaged (its table of contents cannot be read: {error}). {remedy}") from None
        if version > VERSION:
            raise BadIndex(f"{path}: format {version}, this millstream reads up to {VERSION}; upgrade millstream")
        self._places: dict[str, tuple[int, int]] = self.meta.pop("sections")  # pyright: ignore
        self._rows: dict[str, int] = self.meta.pop("rows")  # pyright: ignore
        self._end = crcs_at
        self._crcs = np.frombuffer(crcs, np.uint32)
        self._checked = np.zeros(len(self._crcs), np.bool_)

    @cached_property
    def words(self) -> NDArray[np.uint64]:
        """The whole file as words, not verified: `checked` says which megabytes are."""
        return self._map.view[: self.num_bytes // 8 * 8].view(np.uint64)

    @property
    def checked(self) -> NDArray[np.bool_]:
        """Which megabytes were verified."""
        return self._checked

    def __contains__(self, name: str) -> bool:
        return name in self._places or name in self._rows

    @property
    def num_bytes(self) -> int:
        return self._map.num_bytes

    def array(self, name: str, dtype: type[np.generic] = np.uint8) -> NDArray[np.generic]:
        """A whole array, verified."""
        start, size = self._places[name]
        self.check(start, start + size)
        return self._map.view[start : start + size].view(dtype)

    def column(self, name: str) -> "Column":
        """A bit column; a large one is verified where it is used."""
        return Column(self, name)

    def span(self, name: str) -> tuple[int, int]:
        """Where an array is in the file: first byte, number of bytes."""
        return self._places[name]

    def view(self, name: str) -> Bytes:
        """An array, not verified: the caller calls `check`."""
        start, size = self._places[name]
        return self._map.view[start : start + size]

    def rows(self, name: str) -> int:
        return self._rows[name]

    def check(self, start: int, end: int) -> None:
        """Verify the checksums of these bytes of the file."""
        for block in range(start // CRC_BYTES, -(-end // CRC_BYTES)):
            if not self._checked[block]:
                self.check_block(block)

    def is_checked(self, start: int, end: int) -> bool:
        """Whether the checksums of these bytes were verified."""
        return all(self._checked[block] for block in range(start // CRC_BYTES, -(-end // CRC_BYTES)))

    def check_blocks(self, blocks: NDArray[np.int64]) -> None:
        if not self._checked[blocks].all():
            for block in np.unique(blocks).tolist():
                if not self._checked[block]:
                    self.check_block(block)

    def unchecked(self, blocks: NDArray[np.int64]) -> list[int]:
        """Which of these megabytes have not been verified yet."""
        return [] if self._checked[blocks].all() else np.unique(blocks[~self._checked[blocks]]).tolist()

    def will_need(self, start: int, num_bytes: int) -> None:
        """Start reading this range from disk."""
        self._map.will_need(start, num_bytes)

    def drop_pages(self, start: int = 0, end: int | None = None) -> None:
        """Unmap these bytes of the file from this process; the kernel may keep them cached."""
        self._map.drop(start, end)

    @contextmanager
    def opened(self) -> Generator[int]:
        """A descriptor of the file, as long as its path still belongs to it."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            if _inode(fd) != self._inode:
                raise BadIndex(f"{self.path}: was replaced by another file. Open it again")
            yield fd
        finally:
            os.close(fd)

    def check_block(self, block: int) -> None:
        data = self._map.view[block * CRC_BYTES : min((block + 1) * CRC_BYTES, self._end)]
        if crc32c(data) != self._crcs[block]:
            end = min((block + 1) * CRC_BYTES, self._end)
            raise BadIndex(f"{self.path}: damaged between byte {block * CRC_BYTES} and {end}. {self._remedy}")
        self._checked[block] = True

    def damages(self) -> Generator[str]:
        """Verify everything; yields every damage."""
        for block in range(len(self._crcs)):
            try:
                self.check_block(block)
            except BadIndex as error:
                yield str(error)
            self.drop_pages(block * CRC_BYTES, (block + 1) * CRC_BYTES)


def _inode(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


class Column:
    """A bit column of a `Sections` file."""

    def __init__(self, sections: Sections, name: str) -> None:
        self._sections = sections
        self.rows = sections.rows(name)
        directory = sections.view(f"{name}.directory").view(np.int64).reshape(-1, 2)
        words = sections.view(f"{name}.words").view(np.uint64)
        self._bits = BitColumn(self.rows, directory, words)
        self._directory_at, directory_bytes = sections.span(f"{name}.directory")
        self._words_at, words_bytes = sections.span(f"{name}.words")
        self._lazy = directory_bytes + words_bytes > sections.eager_bytes
        if not self._lazy:
            sections.check(self._directory_at, self._directory_at + directory_bytes)
            sections.check(self._words_at, self._words_at + words_bytes)

    def verified(self, rows: NDArray[np.int64]) -> BitColumn:
        """The column, verified where these rows are."""
        if self._lazy and len(rows):
            chunks = np.unique(rows >> 12)
            self._sections.check_blocks((self._directory_at + chunks * 16) // CRC_BYTES)
            self._sections.check_blocks((self._directory_at + chunks * 16 + 15) // CRC_BYTES)
            place = self._bits.directory[chunks, 1]
            first = self._words_at + (place >> 8) * 8
            last = first + (place & 255) * (4096 // 8) + 7
            self._sections.check_blocks(np.minimum(first, self._words_end) // CRC_BYTES)
            self._sections.check_blocks(np.minimum(last, self._words_end) // CRC_BYTES)
        return self._bits

    @property
    def places(self) -> tuple[int, int]:
        """Where its directory and its words are in the words of the file."""
        return self._directory_at // 8, self._words_at // 8

    @property
    def _words_end(self) -> int:
        return self._words_at + self._bits.words.nbytes - 1

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._constant is not None:
            return np.full(len(rows), self._constant)
        return self.verified(rows).take(rows)

    @cached_property
    def _constant(self) -> int | None:
        """The value of all rows, if they are equal: lengths, line widths and gaps of most files are."""
        if self._bits.words.size > 1 or not self.rows:
            return None
        values = self.whole().directory[:, 0]
        return int(values[0]) if (values == values[0]).all() else None

    def whole(self) -> BitColumn:
        """The column, all of it verified."""
        self._sections.check(self._directory_at, self._directory_at + self._bits.directory.nbytes)
        self._sections.check(self._words_at, self._words_end + 1)
        return self._bits


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
