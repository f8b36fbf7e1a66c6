"""A cache of remote bytes on local disk, shared by the processes of a machine and bounded in bytes.

    CACHE/size               bytes of all blocks, never less than they take; locked by whoever writes or removes
    CACHE/ab/abcdef.7        block 7 of the object version `abcdef`: 16 random bytes, by which a process notices that a
                             block it knows was replaced, and pieces of it, in the order in which they came

    piece: magic, start in the block, number of bytes, their CRC-32C, CRC-32C of these four; the bytes

A block holds exactly the ranges that were asked for, because whole blocks would be many times the bytes of one layer.
A piece counts once the file is long enough to hold it. What a killed writer left is cut off by the next one.
Blocks are removed whole, the least recently used first; a process that reads one keeps its open file.
"""

import os
import struct
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

from millstream.core.config import parse_bytes
from millstream.core.console import say
from millstream.core.files import cache_folder, lock
from millstream.core.record import crc32c

BLOCK_BYTES = 4 << 20
_PIECE = struct.Struct("<4sIIII")
_MAGIC = b"MSBP"
_MARK_BYTES = 16
_KNOWN_BLOCKS = 2048  # whose pieces are remembered: at 50 pieces each, 10 MB
_TOUCH_S = 60  # a block's time of use is renewed at most this often
_SPARE = 0.05  # of the limit is freed at once, so that not every write has to look for the oldest block

Gaps = list[tuple[int, int]]


@dataclass(frozen=True)
class CacheSettings:
    """Where remote bytes are cached, and how many; 0: nowhere."""

    num_bytes: int
    folder: Path


def cache_settings() -> CacheSettings:
    """The settings of this process, from MILLSTREAM_CACHE and MILLSTREAM_CACHE_DIR."""
    size = os.environ.get("MILLSTREAM_CACHE", "20GB")
    folder = os.environ.get("MILLSTREAM_CACHE_DIR")
    num_bytes = 0 if size.strip() in ("0", "0B", "") else parse_bytes(size)
    return CacheSettings(num_bytes, Path(folder) if folder else cache_folder() / "blocks")


def set_cache(size: int | str | None, folder: str | Path | None) -> None:
    """Set them for this process and those it starts; None leaves what is set."""
    if size is not None:
        os.environ["MILLSTREAM_CACHE"] = str(size)
        cache_settings()  # raises for a size that is none
    if folder is not None:
        os.environ["MILLSTREAM_CACHE_DIR"] = str(Path(folder).absolute())


def block_cache() -> "BlockCache | None":
    """The cache of this process; None if nothing is to be cached."""
    settings = cache_settings()
    return _cache_of(settings) if settings.num_bytes else None


class BlockCache:
    """Pieces of remote objects on local disk. Any failure of the disk is a miss, told once."""

    def __init__(self, settings: CacheSettings) -> None:
        self.settings = settings
        self._known: OrderedDict[Path, _Block] = OrderedDict()
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._after_fork)
        self._is_broken = False

    def _after_fork(self) -> None:
        self._lock = threading.Lock()  # a thread of the parent may have held it

    def read(self, name: str, start: int, out: memoryview, *, verify: bool) -> Gaps:
        """Fill `out` with the bytes from `start` on, as far as they are here; returns what is missing."""
        missing: Gaps = []
        end = start + out.nbytes
        for number in range(start // BLOCK_BYTES, (end - 1) // BLOCK_BYTES + 1 if out.nbytes else 0):
            base = number * BLOCK_BYTES
            low, high = max(start, base), min(end, base + BLOCK_BYTES)
            gaps = self._read_block(self._path(name, number), low - base, out[low - start : high - start], verify)
            missing += [(a + base, b + base) for a, b in gaps]
        return _joined(missing)

    def write(self, name: str, start: int, data: memoryview) -> None:
        """Keep these bytes, after removing older blocks if necessary."""
        if self._is_broken or data.nbytes + _PIECE.size + _MARK_BYTES > self.settings.num_bytes:
            return
        try:
            with self._writing() as count:
                for number in range(start // BLOCK_BYTES, (start + data.nbytes - 1) // BLOCK_BYTES + 1):
                    base = number * BLOCK_BYTES
                    low, high = max(start, base), min(start + data.nbytes, base + BLOCK_BYTES)
                    self._append(count, self._path(name, number), low - base, data[low - start : high - start])
        except OSError as error:
            self._is_broken = True
            say(f"{self.settings.folder}: cannot be used as a cache ({error.strerror}); reading without it")

    def forget(self, name: str, start: int, end: int) -> None:
        """Remove the blocks with these bytes: they are damaged."""
        for number in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            with suppress(OSError):
                self._path(name, number).unlink()

    def _path(self, name: str, number: int) -> Path:
        return self.settings.folder / name[:2] / f"{name[2:]}.{number}"

    def _read_block(self, path: Path, start: int, out: memoryview, verify: bool) -> Gaps:
        end = start + out.nbytes
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return [(start, end)]
        try:
            block = self._block(path, fd)
            gaps: Gaps = []
            at = start
            while at < end:
                piece = block.covering(at)
                if piece is None:
                    after = min(block.next_start(at), end)
                    gaps.append((at, after))
                    at = after
                    continue
                stop = min(piece.start + piece.size, end)
                if not _read_piece(fd, piece, at, out[at - start : stop - start], verify):
                    with suppress(OSError):
                        path.unlink()
                    return [(start, end)]
                at = stop
            return gaps
        except OSError:
            return [(start, end)]
        finally:
            os.close(fd)

    def _block(self, path: Path, fd: int) -> "_Block":
        """The pieces of a block, from memory unless the file has grown."""
        stat = os.fstat(fd)
        with self._lock:
            known = self._known.get(path)
            if known is not None:
                self._known.move_to_end(path)
        mark = os.pread(fd, _MARK_BYTES, 0)
        if known is None or known.mark != mark:
            known = _Block(mark)
        if known.end < stat.st_size:
            known = known.extended(fd, stat.st_size)
        with self._lock:
            self._known[path] = known
            while len(self._known) > _KNOWN_BLOCKS:
                self._known.popitem(last=False)
        if time.time() - stat.st_mtime > _TOUCH_S:
            with suppress(OSError):
                os.utime(fd)
        return known

    # -- writing, one process at a time

    @contextmanager
    def _writing(self) -> "Generator[_Count]":
        self.settings.folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.settings.folder / "size", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            lock(fd, wait=True, without_locks=True)
            yield _Count(fd)
        finally:
            os.close(fd)

    def _append(self, count: "_Count", path: Path, start: int, data: memoryview) -> None:
        needed = _PIECE.size + data.nbytes
        self._make_room(count, needed + _MARK_BYTES)
        path.parent.mkdir(exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size < _MARK_BYTES:
                count.add(os.pwrite(fd, os.urandom(_MARK_BYTES), 0))
            block = self._block(path, fd)
            if block.covers(start, start + data.nbytes):
                return  # another process was faster
            if os.fstat(fd).st_size > block.end:
                os.ftruncate(fd, block.end)  # left by a killed process
            head = _PIECE.pack(_MAGIC, start, data.nbytes, crc32c(data), 0)
            head = head[:-4] + crc32c(head[:-4]).to_bytes(4, "little")
            count.add(needed)
            try:
                if os.pwritev(fd, [head, data], block.end) != needed:
                    raise OSError(28, os.strerror(28))
            except OSError:
                os.ftruncate(fd, block.end)
                raise
        finally:
            os.close(fd)

    def _make_room(self, count: "_Count", needed: int) -> None:
        if count.num_bytes + needed <= self.settings.num_bytes:
            return
        blocks: list[tuple[float, int, Path]] = []
        for folder in self.settings.folder.iterdir():
            if folder.is_dir():
                with os.scandir(folder) as entries:
                    for entry in entries:
                        with suppress(FileNotFoundError):  # a reader has removed a damaged block
                            stat = entry.stat()
                            blocks.append((stat.st_mtime, stat.st_size, Path(entry.path)))
        blocks.sort()
        total = sum(size for _, size, _ in blocks)
        most = self.settings.num_bytes * (1 - _SPARE) - needed
        for _, size, path in blocks:
            if total <= max(most, 0):
                break
            path.unlink(missing_ok=True)
            total -= size
        count.set(total)


class _Count:
    """The bytes of all blocks, in a file that is open and locked."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        try:
            self.num_bytes = int(os.pread(fd, 32, 0))
        except ValueError:
            self.num_bytes = 1 << 62  # unknown: whoever needs room counts

    def set(self, num_bytes: int) -> None:
        # Not published by renaming: a torn number is no number, or is read under the lock only. Never cut off either:
        # ext4 writes a file to disk that was emptied and filled again.
        self.num_bytes = num_bytes
        os.pwrite(self._fd, b"%-31d\n" % num_bytes, 0)

    def add(self, more: int) -> None:
        self.set(self.num_bytes + more)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A range of a block, and where its bytes are in the file of the block."""

    start: int
    size: int
    crc32c: int
    place: int

    @property
    def end(self) -> int:
        return self.start + self.size


class _Block:
    """The pieces of one block; `end` is where the next one is appended."""

    def __init__(self, mark: bytes, pieces: Iterable[_Piece] = (), end: int = _MARK_BYTES) -> None:
        self.mark, self.end = mark, end
        self._pieces = sorted(pieces, key=_start_of)
        self._reach = list(accumulate((piece.end for piece in self._pieces), max))  # of all up to each

    def extended(self, fd: int, file_bytes: int) -> "_Block":
        """With the pieces that were appended since."""
        pieces, end = list(self._pieces), self.end
        while end + _PIECE.size <= file_bytes:
            head = os.pread(fd, _PIECE.size, end)
            if len(head) < _PIECE.size:
                break
            magic, start, size, crc, own = _PIECE.unpack(head)
            if magic != _MAGIC or own != crc32c(head[:-4]) or end + _PIECE.size + size > file_bytes:
                break
            pieces.append(_Piece(start, size, crc, end + _PIECE.size))
            end += _PIECE.size + size
        return _Block(self.mark, pieces, end)

    def covering(self, at: int) -> _Piece | None:
        """A piece with this byte."""
        index = bisect_right(self._pieces, at, key=_start_of) - 1
        while index >= 0 and self._reach[index] > at:
            if self._pieces[index].end > at:
                return self._pieces[index]
            index -= 1
        return None

    def next_start(self, at: int) -> int:
        """Where the first piece after this byte starts."""
        index = bisect_right(self._pieces, at, key=_start_of)
        return self._pieces[index].start if index < len(self._pieces) else BLOCK_BYTES

    def covers(self, start: int, end: int) -> bool:
        while start < end and (piece := self.covering(start)) is not None:
            start = piece.end
        return start >= end


@cache
def _cache_of(settings: CacheSettings) -> BlockCache:
    return BlockCache(settings)


def _start_of(piece: _Piece) -> int:
    return piece.start


def _read_piece(fd: int, piece: _Piece, at: int, out: memoryview, verify: bool) -> bool:
    """Fill `out` with the bytes of a piece from `at` on; False if they are damaged."""
    offset = at - piece.start
    if not verify:
        return os.preadv(fd, [out], piece.place + offset) == out.nbytes
    if out.nbytes == piece.size:
        return os.preadv(fd, [out], piece.place) == piece.size and crc32c(out) == piece.crc32c
    data = os.pread(fd, piece.size, piece.place)
    if len(data) != piece.size or crc32c(data) != piece.crc32c:
        return False
    out[:] = memoryview(data)[offset : offset + out.nbytes]
    return True


def _joined(gaps: Gaps) -> Gaps:
    """Neighbouring gaps as one."""
    joined: Gaps = []
    for start, end in gaps:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined
