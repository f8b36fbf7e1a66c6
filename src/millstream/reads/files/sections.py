"""Named arrays in one checksummed file that is mapped, not loaded: the index of a read file.

    magic | arrays, each at a multiple of 64 | CRC-32C of every 1 MB | JSON: what it is, where the arrays are | tail

The tail is read first; it verifies the JSON and the list of CRCs. A megabyte is verified when it is first used, so
opening takes the same time for any size, and no damaged byte is ever used.
"""

import os
import struct
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from millstream.core.block_cache import cache_settings
from millstream.core.config import parse_json
from millstream.core.memory import FilledMap, Map
from millstream.core.record import Bytes, crc32c
from millstream.core.remote import RemoteFile, RemotePath, read_all
from millstream.errors import BadIndex
from millstream.reads.files.blocks import Blocks, BlockSpan, Ranges, equal_blocks
from millstream.reads.files.encodings import BitColumn
from millstream.reads.files.ranges import read_bytes, read_near

MAGIC = b"MILLSIDX"
VERSION = 1
CRC_BYTES = 1 << 20
TAIL = struct.Struct("<QQQII8s")  # CRC list, JSON, their end; CRCs of both; magic
_TAIL_BYTES = 64 << 10  # of an object, requested at once
_AT_ONCE = 16  # megabytes requested at once
EAGER_BYTES = 16 << 20  # smaller arrays are verified as a whole on first use: 1 ms


class Sections:
    """A published file. `meta` is what `publish` was given; arrays are views of the mapped file.

    `remedy` ends the error message for a damaged file. A column of more than `eager_bytes` is verified where it is
    used, not when it is opened.
    """

    def __init__(self, path: Path, *, remedy: str = "", eager_bytes: int = EAGER_BYTES) -> None:
        self.path = path
        self.eager_bytes = eager_bytes
        self._remedy = remedy
        self._remote: RemoteFile | None = None
        self._blocks: Blocks | None = None  # of a large object
        if isinstance(path, RemotePath):
            self.eager_bytes = -1
            self._remote = RemoteFile(path, align=CRC_BYTES, known=path.info())
            cache = cache_settings()
            self._map: Map = FilledMap(self._remote.num_bytes, cache.folder if cache.num_bytes else None)
            for fresh in (False, True):  # again, if it is damaged on its way or in the cache
                read, size = _tail_reader(self._remote, fresh=fresh), self._remote.num_bytes
                fault, crcs_at, crcs, text = _table_of_contents(read, size)
                if not fault:
                    break
        else:
            with open(path, "rb") as file:
                fd = file.fileno()
                size = os.fstat(fd).st_size
                fault, crcs_at, crcs, text = _table_of_contents(lambda at, count: os.pread(fd, count, at), size)
                self._map = Map(path, descriptor=fd, is_cache=True)
                self._inode = _inode(fd)
        if fault:
            raise BadIndex(f"{path}: {fault}. {remedy}")
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

    @property
    def is_remote(self) -> bool:
        return self._remote is not None

    def limit(self, memory: int) -> None:
        """Hold at most `memory` bytes of what `read_near` and `read` return; for an object larger than that."""
        assert self._remote is not None
        edges, spans = equal_blocks(self._end, CRC_BYTES)
        self._blocks = Blocks(self._remote, edges, spans=spans, decode=self._verified, is_checked=True, memory=memory)

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
        if start < end:
            blocks = range(start // CRC_BYTES, -(-end // CRC_BYTES))
            self._check_all([block for block in blocks if not self._checked[block]])

    def is_checked(self, start: int, end: int) -> bool:
        """Whether the checksums of these bytes were verified."""
        some = self._checked[start // CRC_BYTES : -(-end // CRC_BYTES)]
        return bool(some[0] if len(some) == 1 else some.all())

    def check_blocks(self, blocks: NDArray[np.int64]) -> None:
        if not self._checked[blocks].all():
            self._check_all(self.unchecked(blocks))

    def unchecked(self, blocks: NDArray[np.int64]) -> list[int]:
        """Which of these megabytes have not been verified yet."""
        return [] if self._checked[blocks].all() else np.unique(blocks[~self._checked[blocks]]).tolist()

    def will_need(self, start: int, num_bytes: int) -> None:
        """Start reading this range from disk."""
        self._map.will_need(start, num_bytes)

    def drop_pages(self, start: int = 0, end: int | None = None) -> None:
        """Unmap these bytes of the file from this process; the kernel may keep them cached."""
        self._map.drop(start, end)

    def read_near(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[Bytes, NDArray[np.int64]]:
        """A copy of these ranges, and where each starts in it. Of a file they were verified; of an object they are."""
        if self._blocks is not None:
            text, offsets = self._blocks.text(starts, ends - starts)
            return text, offsets[:-1]
        with self._opened() as fd:
            return read_near(fd, starts, ends)

    def read(self, start: int, count: int) -> bytes:
        """The same for one range."""
        if self._blocks is not None:
            return self._blocks.read(start, count)
        with self._opened() as fd:
            return read_bytes(fd, start, count)

    def verified_bytes(self, start: int, count: int) -> bytes:
        """A copy of one range, verified."""
        if self._blocks is not None:
            return self._blocks.read(start, count)
        self.check(start, start + count)
        return self._map.view[start : start + count].tobytes()

    @contextmanager
    def _opened(self) -> Generator[int]:
        """A descriptor of the file, as long as its path still belongs to it."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            if _inode(fd) != self._inode:
                raise BadIndex(f"{self.path}: was replaced by another file. Open it again")
            yield fd
        finally:
            os.close(fd)

    @property
    def verifies_reading(self) -> bool:
        """Whether `read_near` and `read` verify what they return."""
        return self._blocks is not None

    @property
    def held_bytes(self) -> int:
        """What `limit` limits."""
        return self._blocks.held_bytes if self._blocks else 0

    def will_need_all(self, ranges: Ranges) -> None:
        """Start reading ranges that will be read with `read_near`, or verified and viewed."""
        if self._blocks is not None:
            self._blocks.will_need(ranges)
        elif self._remote is not None:
            blocks = [np.arange(start // CRC_BYTES, -(-min(end, self._end) // CRC_BYTES)) for start, end in ranges]
            self.check_blocks(np.concatenate(blocks))
        else:
            for start, end in ranges:
                self.will_need(start, end - start)

    def check_block(self, block: int) -> None:
        self._check_all([block])

    def _check_all(self, blocks: list[int]) -> None:
        """Verify megabytes; those of an object are requested, all at once."""
        if self._remote is None or not isinstance(self._map, FilledMap):
            for block in blocks:
                self._verify(block, self._map.view[block * CRC_BYTES : self._end_of(block)])
                self._checked[block] = True
            return
        if blocks and len(self._crcs) <= _AT_ONCE:  # a small one is read whole
            blocks = np.flatnonzero(~self._checked).tolist()
        for first in range(0, len(blocks), _AT_ONCE):
            some = blocks[first : first + _AT_ONCE]
            data = [np.empty(self._end_of(block) - block * CRC_BYTES, np.uint8) for block in some]
            wanted = [(self._remote, block * CRC_BYTES, out.data) for block, out in zip(some, data, strict=True)]
            read_all(wanted, is_checked=True)
            for block, out, one in zip(some, data, wanted, strict=True):
                if crc32c(out) != self._crcs[block]:  # damaged on its way, or in the cache
                    read_all([one], fresh=True)
                    self._verify(block, out)
                self._map.fill(block * CRC_BYTES, out)
                self._checked[block] = True

    def _end_of(self, block: int) -> int:
        return min((block + 1) * CRC_BYTES, self._end)

    def _verify(self, block: int, data: Bytes) -> None:
        if crc32c(data) != self._crcs[block]:
            start, end = block * CRC_BYTES, self._end_of(block)
            raise BadIndex(f"{self.path}: damaged between byte {start} and {end}. {self._remedy}")

    def _verified(self, span: BlockSpan, raw: memoryview) -> memoryview:
        self._verify(span.block, np.frombuffer(raw, np.uint8))
        return raw

    def damages(self) -> Generator[str]:
        """Verify everything; yields every damage."""
        for block in range(len(self._crcs)):
            try:
                self.check_block(block)
            except BadIndex as error:
                yield str(error)
            self.drop_pages(block * CRC_BYTES, (block + 1) * CRC_BYTES)


def _table_of_contents(read: Callable[[int, int], bytes], size: int) -> tuple[str, int, bytes, bytes]:
    """What is wrong with it, if anything; where the list of CRCs is, the list and the JSON."""
    tail = read(max(size - TAIL.size, 0), TAIL.size)
    if len(tail) < TAIL.size or tail[-8:] != MAGIC:
        return "not a millstream index, or truncated", 0, b"", b""
    crcs_at, text_at, end, crcs_crc, text_crc, _ = TAIL.unpack(tail)
    if len(MAGIC) <= crcs_at <= text_at <= end == size - TAIL.size:
        crcs, text = read(crcs_at, text_at - crcs_at), read(text_at, end - text_at)
        if crc32c(crcs) == crcs_crc and crc32c(text) == text_crc:
            return "", crcs_at, crcs, text
    return "damaged (its table of contents fails its checksum)", 0, b"", b""


def _tail_reader(file: RemoteFile, *, fresh: bool) -> Callable[[int, int], bytes]:
    """Reads the last bytes of an object, usually with one request."""
    exact = RemoteFile(file.path, known=file.info)

    def fetch(at: int, count: int) -> bytes:
        out = bytearray(count)
        if count:
            read_all([(exact, at, memoryview(out))], fresh=fresh)
        return bytes(out)

    start = max(file.num_bytes - _TAIL_BYTES, 0)
    tail = fetch(start, file.num_bytes - start)
    return lambda at, count: tail[at - start : at - start + count] if at >= start else fetch(at, count)


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
            ends = self._directory_at + self._bits.directory.nbytes, self._words_end + 1
            if all(map(self._sections.is_checked, (self._directory_at, self._words_at), ends)):
                return self._bits  # all of it by now, so there is no need to find out which
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
    def num_bytes(self) -> int:
        """Bytes of the directory and the words."""
        return self._bits.directory.nbytes + self._bits.words.nbytes

    @property
    def is_copied(self) -> bool:
        """Whether it may be too large to be held: `copied` then reads what is needed."""
        return self._sections.verifies_reading

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

    def copied(self, first: NDArray[np.int64], last: NDArray[np.int64]) -> tuple[BitColumn, NDArray[np.int64]]:
        """The chunks with the rows from `first[i]` to `last[i]`, copied; and the row in the copy of each `first[i]`."""
        low, high = first >> 12, last >> 12
        counts = high - low + 1
        chunks = np.unique(np.repeat(low - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum())))
        at = self._directory_at + chunks * 16
        data, _ = self._sections.read_near(at, at + 16)
        directory = data.view(np.int64).reshape(-1, 2).copy()
        start, width = self._words_at + (directory[:, 1] >> 8) * 8, directory[:, 1] & 255
        words, places = self._sections.read_near(start, np.minimum(start + width * 512 + 8, self._words_end + 1))
        directory[:, 1] = (places // 8) << 8 | width
        copied = BitColumn(len(chunks) << 12, directory, np.append(words, np.zeros(8, np.uint8)).view(np.uint64))
        return copied, (np.searchsorted(chunks, low) << 12) + (first & 4095)

    def whole(self) -> BitColumn:
        """The column, all of it verified."""
        self._sections.check(self._directory_at, self._directory_at + self._bits.directory.nbytes)
        self._sections.check(self._words_at, self._words_end + 1)
        return self._bits
