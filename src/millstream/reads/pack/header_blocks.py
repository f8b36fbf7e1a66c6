"""Header lines in compressed blocks of 64 kB; a block is decoded when one of its lines is needed, and cached."""

import os
import threading
import zlib
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from importlib.util import find_spec
from typing import Any, BinaryIO, Literal

import numpy as np

from millstream.core.collection import Numbers
from millstream.core.record import Bytes
from millstream.reads.files.containers import decode_frame
from millstream.reads.files.ranges import copy_pieces
from millstream.reads.files.sections import Sections
from millstream.reads.files.sections_writer import SectionsWriter
from millstream.reads.pack.bases import join_lines

Codec = Literal["zstd", "zlib"]
SECTION, ROW, START = "headers", "headers.row", "headers.start"
_BLOCK_BYTES = 64 << 10
_AT_ONCE = 256  # blocks that are added to the columns
_AHEAD = 16  # blocks that wait to be compressed
_READ_BYTES = 1 << 20
_LEVEL = {"zstd": 1, "zlib": 1}


def best_codec() -> Codec:
    """zstd if its package is installed."""
    return "zstd" if find_spec("zstandard") else "zlib"


class HeaderBlocksWriter:
    """Takes header lines in order. Blocks end where lines end, independent of the buffers the lines came in."""

    def __init__(self, sections: SectionsWriter, codec: Codec) -> None:
        self._part = sections.part(SECTION)
        self._rows, self._starts = sections.column(ROW), sections.column(START)
        self._codec: Codec = codec
        self._compressing = ThreadPoolExecutor(1, initializer=self._begin)  # a third of the time of packing
        self._blocks: deque[tuple[int, Future[bytes]]] = deque()  # first row, and what will be written
        self._pending = bytearray()
        self._row = self._first = 0  # lines so far, and before the pending block
        self._end = 0  # of the part; tell() would be a system call each time
        self._written: list[tuple[int, int]] = []  # rows and starts of blocks, for the columns

    def add(self, buffer: Bytes, pieces: Numbers) -> None:
        """Append buffer[start:end] of every piece; none holds a newline."""
        edges = np.cumsum(pieces[:, 1] - pieces[:, 0] + 1)
        flat = join_lines(buffer, pieces)
        line = done = 0
        while line < len(edges):
            # The line with which the pending block is full, if it is among these.
            last = int(np.searchsorted(edges, done + _BLOCK_BYTES - len(self._pending)))
            end = min(last + 1, len(edges))
            self._pending += flat[done : int(edges[end - 1])].tobytes()
            self._row += end - line
            line, done = end, int(edges[end - 1])
            if last < len(edges):
                self._flush()

    def finish(self) -> None:
        if self._pending:
            self._flush()
        self._write(0)

    def close(self) -> None:
        self._compressing.shutdown(cancel_futures=True)

    def lines(self) -> Generator[tuple[Bytes, Numbers, Numbers]]:
        """All lines, after `finish`, in chunks: text, starts, ends."""
        self._part.flush()
        self._part.seek(0)
        rest = b""
        for data in _decoded(self._part, self._codec):
            whole, newline, rest = (rest + data).rpartition(b"\n")
            text = np.frombuffer(bytearray(whole + newline), np.uint8)
            ends = np.flatnonzero(text == 10)
            if len(ends):
                yield text, np.append(np.zeros(1, np.int64), ends[:-1] + 1), ends

    def state(self) -> dict[str, object]:
        self._write(0)
        return {
            "pending": np.frombuffer(bytes(self._pending), np.uint8),
            "row": self._row,
            "first": self._first,
            "end": self._end,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._blocks.clear()
        self._written.clear()
        self._pending = bytearray(state["pending"].tobytes())
        self._row, self._first, self._end = state["row"], state["first"], state["end"]

    def _begin(self) -> None:
        self._compress = _compressor(self._codec)

    def _flush(self) -> None:
        data, self._pending = bytes(self._pending), bytearray()
        self._blocks.append((self._first, self._compressing.submit(lambda: self._compress(data))))
        self._first = self._row
        self._write(_AHEAD)

    def _write(self, left: int) -> None:
        """Write compressed blocks until only `left` of them wait."""
        while len(self._blocks) > left:
            first, data = self._blocks.popleft()
            self._written.append((first, self._end))
            self._end += self._part.write(data.result())
        if self._written and (left == 0 or len(self._written) >= _AT_ONCE):
            for column, values in zip((self._rows, self._starts), np.array(self._written, np.int64).T, strict=True):
                column.append(values)
            self._written.clear()


class HeaderBlocks:
    """The header lines of a published file. Safe to use from threads and after fork."""

    def __init__(self, sections: Sections, codec: Codec, *, memory: int) -> None:
        self._sections = sections
        self._codec = codec
        self._memory = memory
        self._place, self._num_bytes = sections.span(SECTION)
        self._start()

    @cached_property
    def _rows(self) -> Numbers:
        """The first row of each block."""
        return self._whole(ROW)

    @cached_property
    def _starts(self) -> Numbers:
        return np.append(self._whole(START), self._num_bytes)

    def _whole(self, name: str) -> Numbers:
        column = self._sections.column(name).whole()
        return column.take(np.arange(column.rows, dtype=np.int64))

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._cache: OrderedDict[int, tuple[Bytes, Numbers]] = OrderedDict()
        self.held_bytes = 0
        self.decoded = 0

    def lines(self, rows: Numbers) -> tuple[Bytes, Numbers, Numbers]:
        """The lines of these rows: flat text, and where each starts and ends in it."""
        blocks = np.searchsorted(self._rows, rows, side="right") - 1
        order = np.argsort(blocks, kind="stable")
        edges = np.flatnonzero(np.diff(blocks[order], prepend=-1, append=-1))
        lengths, sources = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        found: list[tuple[Bytes, Numbers]] = []
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            wanted = order[begin:end]
            text, starts, first = self._block(int(blocks[wanted[0]]))
            line = rows[wanted] - first
            sources[wanted], lengths[wanted] = starts[line], starts[line + 1] - 1 - starts[line]
            found.append((text, wanted))
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        flat = np.empty(int(offsets[-1]), np.uint8)
        for text, wanted in found:
            copy_pieces(text, sources[wanted], offsets[:-1][wanted], lengths[wanted], 0, len(wanted), flat)
        return flat, offsets[:-1], offsets[1:].copy()

    def line(self, row: int) -> bytes:
        """The line of one row."""
        text, starts, first = self._block(bisect_right(self._rows.data, row) - 1)
        start, end = starts[row - first : row - first + 2].tolist()
        return text[start : end - 1].tobytes()

    def _block(self, block: int) -> tuple[Bytes, Numbers, int]:
        """A block's text, where its lines start (and it ends), and the row of its first line."""
        first = int(self._rows[block])
        if self._pid != os.getpid():  # after a fork the lock belongs to the parent
            self._start()
        with self._lock:
            if block in self._cache:
                self._cache.move_to_end(block)
                return *self._cache[block], first
        text = self._decode(block)
        starts = np.append(np.zeros(1, np.int64), np.flatnonzero(text == 10) + 1)
        with self._lock:
            if block not in self._cache:
                self._cache[block] = text, starts
                self.held_bytes += text.nbytes + starts.nbytes
                self.decoded += 1
            while self.held_bytes > self._memory and len(self._cache) > 1:
                _, (old, lines) = self._cache.popitem(last=False)
                self.held_bytes -= old.nbytes + lines.nbytes
        return text, starts, first

    def _decode(self, block: int) -> Bytes:
        start, end = self._starts[block : block + 2].tolist()
        data = self._sections.verified_bytes(self._place + start, end - start)
        text = zlib.decompress(data) if self._codec == "zlib" else decode_frame(data, size=_BLOCK_BYTES)
        return np.frombuffer(bytearray(text), np.uint8)  # writable: otherwise the kernels would be compiled again


def _decoded(part: BinaryIO, codec: Codec) -> Generator[bytes]:
    """The text of all blocks in order."""
    if codec == "zstd":
        import zstandard

        with zstandard.ZstdDecompressor().stream_reader(part, read_across_frames=True, closefd=False) as reader:
            while text := reader.read(_READ_BYTES):
                yield text
        return
    data = b""
    while data or (data := part.read(_READ_BYTES)):
        inflate = zlib.decompressobj()
        while not inflate.eof and data:
            yield inflate.decompress(data)
            data = inflate.unused_data if inflate.eof else part.read(_READ_BYTES)


def _compressor(codec: Codec) -> Callable[[bytes], bytes]:
    if codec == "zlib":
        return lambda data: zlib.compress(data, _LEVEL["zlib"])
    import zstandard

    return zstandard.ZstdCompressor(level=_LEVEL["zstd"]).compress
