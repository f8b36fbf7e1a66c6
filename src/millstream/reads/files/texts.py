"""The text of a read file by position: mapped if it is plain, decoded block by block if it is compressed.

Holds at most `memory` bytes: larger plain files are read instead of mapped, and the least recently used decoded blocks
are dropped.
"""

import os
import threading
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from millstream.core.collection import Numbers
from millstream.core.console import quoted
from millstream.core.kernels import kernel
from millstream.core.memory import Map, Pool, empty_bytes
from millstream.core.record import Bytes, crc32c
from millstream.errors import BadSource
from millstream.reads.files.containers import Kind, decode_frame
from millstream.reads.files.inflate import bgzf_size, decode_bgzf, inflate
from millstream.reads.files.ranges import read_bytes, read_near
from millstream.reads.files.sections import Sections

PAGE_BYTES = 4096
_AROUND_BYTES = 64 << 10  # what the kernel maps around a byte that is touched
_NEWLINE, _SEMICOLON = 10, 59
_GROUP = 32  # records whose first bytes are touched ahead of copying
_LINE = 64  # bytes of a cache line


class Runs(NamedTuple):
    """Characters to fetch: `counts[i]` from `starts[i]` on, within `spans[i]` bytes.

    `phases[i]` characters of the first line come before `starts[i]`.
    """

    starts: Numbers
    counts: Numbers
    spans: Numbers
    lines: Numbers
    eols: Numbers
    phases: Numbers | None = None

    def from_text(self, text: Bytes, starts: Numbers) -> tuple[Bytes, Numbers]:
        """The characters of the runs, from text in which they start at `starts`."""
        return gather(text, starts, self.counts, self.lines, self.eols, self.phases)

    @property
    def num_bytes(self) -> Numbers:
        """Bytes of text to read for each run."""
        return np.where(self.lines == 0, self.counts, self.spans)


class MappedText:
    """A plain file that fits into the memory budget."""

    decoded = 0  # blocks so far
    run_bytes = PAGE_BYTES  # how much text must be read to get one byte

    def __init__(self, path: Path) -> None:
        self._map = Map(path)
        self._bytes = self._map.view.data

    def gather(self, runs: Runs) -> tuple[Bytes, Numbers]:
        """The characters of all runs: flat, and n+1 offsets."""
        return runs.from_text(self._map.view, runs.starts)

    def read(self, start: int, count: int) -> bytes:
        """The bytes, line ends included."""
        return bytes(self._bytes[start : start + count])

    def between(self, start: int, end: int) -> Bytes:
        """The same as an array."""
        return self._map.view[start:end]

    def held_bytes(self) -> int:
        """Bytes held in memory now."""
        return self._map.num_bytes

    def will_need(self, start: int, end: int) -> None:
        """Start reading this range of the text from disk."""
        self._map.will_need(start, end - start)

    def release(self, start: int, end: int) -> None:
        """This range of the text is no longer needed; but the whole file fits into the budget."""


class PlainText:
    """A plain file larger than the memory budget: read on demand, nothing is kept.

    It is not mapped for random access: the kernel maps 64 kB around each byte that is touched, and dropping and mapping
    that again costs more (4 us per read) than reading the bytes (1 us). For neighbouring reads in sequence it is
    mapped, from the first `will_need` until `release`.
    """

    decoded = 0
    run_bytes = PAGE_BYTES

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: Map | None = None
        self._held = 0

    def gather(self, runs: Runs) -> tuple[Bytes, Numbers]:
        if self._map is not None:
            return runs.from_text(self._map.view, runs.starts)
        with _opened(self._path) as fd:
            return runs.from_text(*read_near(fd, runs.starts, runs.starts + runs.num_bytes))

    def read(self, start: int, count: int) -> bytes:
        with _opened(self._path) as fd:
            return read_bytes(fd, start, count)

    def between(self, start: int, end: int) -> Bytes:
        with _opened(self._path) as fd:
            return read_near(fd, np.array([start], np.int64), np.array([end], np.int64))[0]

    def held_bytes(self) -> int:
        return self._held

    def will_need(self, start: int, end: int) -> None:
        if self._map is None:
            self._map = Map(self._path, is_cache=True)
        _read_ahead(self._path, start, end)
        self._held += end - start

    def release(self, start: int, end: int) -> None:
        if self._map is not None:
            self._map.drop(max(start - _AROUND_BYTES, 0), end + _AROUND_BYTES)
            self._held -= end - start


class BlockText:
    """A compressed file. A block is decoded by the first thread that needs it, and cached within `memory`."""

    def __init__(self, path: Path, sections: Sections, *, memory: int) -> None:
        self._path = path
        self._kind: Kind = sections.meta["kind"]  # pyright: ignore
        self._windows = sections.view("block.windows")
        self._windows_at = sections.span("block.windows")[0]
        names = ("raw", "window", "crc32c", "plain")
        self._columns = {name: sections.column(f"block.{name}").whole() for name in names}
        raw_end = cast("int | None", sections.meta.get("blocks_end")) or os.path.getsize(path)
        self._ends = {"raw": raw_end, "window": len(self._windows)}  # of the last block
        plain = self._columns.pop("plain")
        self._last = plain.rows - 1
        # Searched for every read, so decoded: 8 bytes per block. Block i is the text from plain[i] to plain[i + 1].
        self._plain = np.append(plain.take(np.arange(plain.rows)), cast(int, sections.meta["text_bytes"]))
        self._edges = self._plain.data
        self._sections = sections
        self._memory = memory
        self._start()

    def __del__(self) -> None:
        decoders: ThreadPoolExecutor | None = getattr(self, "_decoders", None)
        if decoders is not None and self._pid == os.getpid():
            decoders.shutdown(wait=False)

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._cache: OrderedDict[int, tuple[int, Future[Bytes]]] = OrderedDict()
        self._held = 0
        self._pool = Pool(self._memory)
        self._decoders: ThreadPoolExecutor | None = None
        self.decoded = 0  # blocks so far

    def gather(self, runs: Runs) -> tuple[Bytes, Numbers]:
        text, offsets = self.text(runs.starts, runs.num_bytes)
        return runs.from_text(text, offsets[:-1]) if runs.lines.any() else (text, offsets)

    def read(self, start: int, count: int) -> bytes:
        block = bisect_right(self._edges, start) - 1
        if self._pid == os.getpid() and block <= self._last and start + count <= self._edges[block + 1]:
            with self._lock:
                found = self._cache.get(block)
                if found is not None:
                    self._cache.move_to_end(block)
            if found is not None:  # without arrays: a tenth of the time
                begin = start - self._edges[block]
                return found[1].result()[begin : begin + count].tobytes()
        return self.between(start, start + count).tobytes()

    def between(self, start: int, end: int) -> Bytes:
        return self.text(np.array([start], np.int64), np.array([end - start], np.int64))[0]

    def text(self, starts: Numbers, counts: Numbers) -> tuple[Bytes, Numbers]:
        """`counts[i]` bytes from `starts[i]` on."""
        if self._pid != os.getpid():  # after a fork: locks, threads and half-decoded blocks belong to the parent
            self._start()
        offsets = np.zeros(len(starts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        out = empty_bytes(int(offsets[-1]))
        first = self._find(starts)
        last = first.copy()
        (far,) = np.nonzero(starts + counts > self._plain[first + 1])  # continues in the next block, or several
        last[far] = self._find(starts[far] + counts[far] - 1)
        rows, blocks = np.arange(len(starts)), first
        if len(far):
            pieces = last - first + 1
            rows, blocks = np.repeat(rows, pieces), np.repeat(first, pieces)
            blocks += np.arange(len(rows)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        order = _order(blocks)
        rows, blocks = rows[order], blocks[order]
        edges = np.flatnonzero(np.diff(blocks, prepend=-1, append=-1))
        spans = self._spans(blocks[edges[:-1]])
        ahead = self._decode_ahead(spans)
        begin, end = self._plain[blocks], self._plain[blocks + 1]
        low = np.maximum(starts[rows], begin)
        sizes = np.minimum(starts[rows] + counts[rows], end) - low
        sources, targets = low - begin, offsets[rows] + low - starts[rows]
        for span, begin_at, end_at in zip(spans, edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            copy_pieces(self._block(span), sources, targets, sizes, begin_at, end_at, out)
        for late in ahead:  # no longer needed: started now, it would decode what was already used
            late.cancel()
        return out, offsets

    def _find(self, positions: Numbers) -> Numbers:
        """The block of each position of the text."""
        return np.searchsorted(self._plain[:-1], positions, side="right") - 1

    def _spans(self, blocks: Numbers) -> "list[_BlockSpan]":
        columns = [blocks, self._plain[blocks], self._plain[blocks + 1], self._columns["crc32c"].take(blocks)]
        after = np.minimum(blocks + 1, self._last)
        for name, end in self._ends.items():
            column = self._columns[name]
            columns += [column.take(blocks), np.where(blocks == self._last, end, column.take(after))]
        return [_BlockSpan(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def held_bytes(self) -> int:
        return self._held

    @property
    def run_bytes(self) -> int:
        return int(self._plain[-1]) // max(self._last + 1, 1)

    def will_need(self, start: int, end: int) -> None:
        first, last = self._spans(self._find(np.array([start, max(end - 1, start)], np.int64)))
        _read_ahead(self._path, first.raw, last.raw_end)

    def release(self, start: int, end: int) -> None:
        """The least recently used blocks are dropped anyway."""

    def _decode_ahead(self, spans: "Sequence[_BlockSpan]") -> list[Future[Bytes]]:
        """Decode missing blocks in other threads, as many as fit into half of the budget."""
        missing = [span for span in spans if span.block not in self._cache]
        room = self._memory // 2
        ahead: list[Future[Bytes]] = []
        for span in missing[1:]:
            room -= span.size
            if room < 0:
                break
            if self._decoders is None:
                self._decoders = ThreadPoolExecutor(max_workers=max((os.cpu_count() or 2) - 1, 1))
            ahead.append(self._decoders.submit(self._block, span))
        return ahead

    def _block(self, span: "_BlockSpan") -> Bytes:
        """The text of a block, decoded or from the cache."""
        with self._lock:
            found = self._cache.get(span.block)
            if found is not None:
                self._cache.move_to_end(span.block)
                mine = found[1]
            else:
                mine = Future[Bytes]()
                self._cache[span.block] = span.size, mine
                self._held += span.size
                while self._held > self._memory and len(self._cache) > 1:
                    self._held -= self._cache.popitem(last=False)[1][0]
        if found is not None:  # decoded, or being decoded by another thread
            return mine.result()
        try:
            mine.set_result(self._decode(span))
        except BaseException as error:
            with self._lock:
                if span.block in self._cache:
                    self._held -= self._cache.pop(span.block)[0]
            mine.set_exception(error)
            raise
        return mine.result()

    def _decode(self, span: "_BlockSpan") -> Bytes:
        self.decoded += 1
        size = span.size
        try:
            with _opened(self._path) as fd:
                raw = os.pread(fd, span.raw_end - span.raw, span.raw)
            if self._kind == "bgzf":
                text = decode_bgzf(raw[18 : bgzf_size(raw[:18])])
            elif self._kind == "zstd":
                text = decode_frame(raw, size=size)
            else:
                text = inflate(raw, size=size, window=self._window(span))
        except zlib.error as error:
            raise self._wrong(span, str(error)) from None
        if len(text) != size or crc32c(text) != span.crc32c:
            raise self._wrong(span, "its checksum does not match")
        data = self._pool.take(size)
        data[:] = np.frombuffer(text, np.uint8)
        return data

    def _window(self, span: "_BlockSpan") -> bytes:
        self._sections.check(self._windows_at + span.window, self._windows_at + span.window_end)
        data = self._windows[span.window : span.window_end].tobytes()
        return zlib.decompress(data) if data else b""

    def _wrong(self, span: "_BlockSpan", reason: str) -> BadSource:
        return BadSource(
            f"{self._path}: the block at byte {span.raw} cannot be decoded ({reason}); the file has changed or is "
            f"damaged. Check it: millstream verify {quoted(self._path)}"
        )


@contextmanager
def _opened(path: Path) -> Generator[int]:
    """A descriptor while something is read: a folder may have more files than a process may have open."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _read_ahead(path: Path, start: int, end: int) -> None:
    with _opened(path) as fd:
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_WILLNEED)


def _order(blocks: Numbers) -> Numbers:
    """The stable order of blocks. numpy radix-sorts 16-bit numbers, ten times as fast as others."""
    if not len(blocks):
        return blocks
    near = blocks - blocks.min()
    return np.argsort(near.astype(np.uint16) if near.max() < 1 << 16 else near, kind="stable")


class _BlockSpan(NamedTuple):
    block: int
    plain: int
    plain_end: int
    crc32c: int
    raw: int
    raw_end: int
    window: int
    window_end: int

    @property
    def size(self) -> int:
        return self.plain_end - self.plain


Text = MappedText | PlainText | BlockText


def open_text(path: Path, sections: Sections, *, memory: int) -> Text:
    """The text of an indexed file."""
    if sections.meta["kind"] != "plain":
        return BlockText(path, sections, memory=memory)
    return MappedText(path) if path.stat().st_size <= memory else PlainText(path)


def gather(
    text: Bytes, starts: Numbers, counts: Numbers, lines: Numbers, eols: Numbers, phases: Numbers | None = None
) -> tuple[Bytes, Numbers]:
    """`counts[i]` characters from `starts[i]` on, without line ends, for every i: flat characters and n+1 offsets.

    `phases[i]` characters of the first line come before `starts[i]`.
    """
    offsets = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    flat = empty_bytes(int(offsets[-1]))
    _gather(text, starts, lines, eols, np.zeros_like(starts) if phases is None else phases, offsets, flat)
    return flat, offsets


@kernel
def copy_pieces(
    block: Bytes, sources: Numbers, targets: Numbers, counts: Numbers, begin: int, end: int, out: Bytes
) -> None:
    """Copy pieces `begin` to `end` of one decoded block to their targets."""
    for index in range(begin, end):
        count = counts[index]
        out[targets[index] : targets[index] + count] = block[sources[index] : sources[index] + count]


@kernel
def _gather(
    text: Bytes, starts: Numbers, lines: Numbers, eols: Numbers, phases: Numbers, offsets: Numbers, out: Bytes
) -> int:
    touched = 0
    for index in range(len(starts)):
        if index % _GROUP == 0:  # overlaps cache misses: 290 -> 230 ns per short read
            for ahead in range(index, min(index + _GROUP, len(starts))):
                count = offsets[ahead + 1] - offsets[ahead]
                if count > 0:
                    for place in (0, min(count - 1, _LINE), min(count - 1, 2 * _LINE)):
                        touched += int(text[starts[ahead] + place])
        source = starts[index]
        target = offsets[index]
        end = offsets[index + 1]
        line = lines[index]
        if line == 0:
            out[target:end] = text[source : source + end - target]
        elif line > 0:
            rest = line - phases[index]
            while target < end:
                count = min(rest, end - target)
                out[target : target + count] = text[source : source + count]
                target += count
                source += rest + eols[index]
                rest = line
        else:
            fresh = True  # at the start of a line
            while target < end:
                byte = text[source]
                if fresh and byte == _SEMICOLON and eols[index] > 0:  # a comment; not in FASTQ, where eol is 0
                    while text[source] != _NEWLINE:
                        source += 1
                    byte = text[source]
                fresh = byte == _NEWLINE
                if byte > 32:
                    out[target] = byte
                    target += 1
                source += 1
    return touched  # otherwise the compiler removes the touching
