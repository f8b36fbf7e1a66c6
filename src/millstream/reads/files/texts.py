"""The text of a read file by position: mapped if it is plain, decoded block by block if it is compressed.

Holds at most `memory` bytes: larger plain files are read instead of mapped, and the least recently used decoded blocks
are dropped.
"""

import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import numpy as np

from millstream.core.collection import Numbers
from millstream.core.console import quoted
from millstream.core.memory import Map
from millstream.core.record import Bytes, crc32c
from millstream.errors import BadSource
from millstream.reads.files.containers import Kind, decode_frame
from millstream.reads.files.inflate import bgzf_size, decode_bgzf, inflate
from millstream.reads.files.pieces import copy_pieces, gather, read_ranges
from millstream.reads.files.sections import Sections

PAGE_BYTES = 4096
_MANY_BLOCKS = 1 << 18  # whose starts take 2 MB
_NEAR_BYTES = 4096  # reading this many bytes in vain costs less than a second system call


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


class Text(Protocol):
    """Text that records are fetched from."""

    decoded: int  # blocks so far

    def gather(self, runs: Runs) -> tuple[Bytes, Numbers]:
        """The characters of all runs: flat, and n+1 offsets."""
        ...

    def read(self, start: int, count: int) -> bytes:
        """The bytes, line ends included."""
        ...

    def held_bytes(self) -> int:
        """Bytes held in memory now."""
        ...

    @property
    def run_bytes(self) -> int:
        """How much text must be read to get one byte."""
        ...

    def will_need(self, start: int, end: int) -> None:
        """Start reading this range of the text from disk."""
        ...

    def release(self, start: int, end: int) -> None:
        """This range of the text is no longer needed."""
        ...


class MappedText:
    """A plain file that fits into the memory budget."""

    decoded = 0

    def __init__(self, path: Path) -> None:
        self._map = Map(path)

    def gather(self, runs: Runs) -> tuple[Bytes, Numbers]:
        return runs.from_text(self._map.view, runs.starts)

    def read(self, start: int, count: int) -> bytes:
        return self._map.view[start : start + count].tobytes()

    def held_bytes(self) -> int:
        return self._map.num_bytes

    @property
    def run_bytes(self) -> int:
        return PAGE_BYTES

    def will_need(self, start: int, end: int) -> None:
        self._map.will_need(start, end - start)

    def release(self, start: int, end: int) -> None:
        """The whole file fits into the budget."""


class PlainText:
    """A plain file larger than the memory budget: read on demand, nothing is kept.

    It is not mapped for random access: the kernel maps 64 kB around each byte that is touched, and dropping and mapping
    that again costs more (4 us per read) than reading the bytes (1 us). For neighbouring reads in sequence it is
    mapped, from the first `will_need` until `release`.
    """

    decoded = 0

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: Map | None = None
        self._held = 0

    def gather(self, runs: Runs) -> tuple[Bytes, Numbers]:
        if self._map is not None:
            return runs.from_text(self._map.view, runs.starts)
        return runs.from_text(*self._read(runs.starts, runs.starts + runs.num_bytes))

    def read(self, start: int, count: int) -> bytes:
        return self._read(np.array([start], np.int64), np.array([start + count], np.int64))[0].tobytes()

    def held_bytes(self) -> int:
        return self._held

    @property
    def run_bytes(self) -> int:
        return PAGE_BYTES

    def will_need(self, start: int, end: int) -> None:
        if self._map is None:
            self._map = Map(self._path)
        _read_ahead(self._path, start, end)
        self._held += end - start

    def release(self, start: int, end: int) -> None:
        if self._map is not None:
            self._map.drop(start, end)
            self._held -= end - start

    def _read(self, starts: Numbers, ends: Numbers) -> tuple[Bytes, Numbers]:
        """The bytes of all ranges, neighbours read together, and where each range starts in them."""
        if not len(starts):
            return np.empty(0, np.uint8), starts
        order = np.argsort(starts)
        ordered, reach = starts[order], np.maximum.accumulate(ends[order])
        first = np.flatnonzero(np.append(True, ordered[1:] - reach[:-1] > _NEAR_BYTES))
        low, high = ordered[first], reach[np.append(first[1:], len(order)) - 1]
        offsets = np.append(0, np.cumsum(high - low))
        text = np.empty(int(offsets[-1]), np.uint8)
        with _opened(self._path) as fd:
            read_ranges(fd, low, high - low, text, offsets[:-1])
        run = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(order))))
        places = np.empty(len(order), np.int64)
        places[order] = ordered - low[run] + offsets[run]
        return text, places


def open_text(path: Path, sections: Sections, *, memory: int) -> Text:
    """The text of an indexed file."""
    if sections.meta["kind"] != "plain":
        return BlockText(path, sections, memory=memory)
    return MappedText(path) if path.stat().st_size <= memory else PlainText(path)


class BlockText:
    """A compressed file. A block is decoded by the first thread that needs it, and cached within `memory`."""

    def __init__(self, path: Path, sections: Sections, *, memory: int) -> None:
        self._path = path
        self._kind: Kind = sections.meta["kind"]  # pyright: ignore
        self._edges = {"raw": os.path.getsize(path), "plain": cast(int, sections.meta["text_bytes"])}
        self._windows = sections.view("block.windows")
        self._edges["window"] = len(self._windows)
        self._columns = {name: sections.column(f"block.{name}").whole() for name in (*self._edges, "crc32c")}
        self._windows_at = sections.place("block.windows")[0]
        plain = self._columns["plain"]
        # Searched for every read, so unpacked, unless that would take much of the budget.
        self._plain = plain.take(np.arange(plain.rows)) if plain.rows <= _MANY_BLOCKS else None
        self._plain_ends = np.append(self._plain if self._plain is not None else 0, self._edges["plain"])[1:]
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
        self._decoders: ThreadPoolExecutor | None = None
        self.decoded = 0  # blocks so far

    def gather(self, runs: Runs) -> tuple[Bytes, Numbers]:
        text, offsets = self.text(runs.starts, runs.num_bytes)
        return runs.from_text(text, offsets[:-1]) if runs.lines.any() else (text, offsets)

    def read(self, start: int, count: int) -> bytes:
        return self.text(np.array([start], np.int64), np.array([count], np.int64))[0].tobytes()

    def text(self, starts: Numbers, counts: Numbers) -> tuple[Bytes, Numbers]:
        """`counts[i]` bytes from `starts[i]` on."""
        if self._pid != os.getpid():  # after a fork: locks, threads and half-decoded blocks belong to the parent
            self._start()
        offsets = np.zeros(len(starts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        out = np.empty(int(offsets[-1]), np.uint8)
        first = self._find(starts)
        last = first.copy()
        (far,) = np.nonzero(starts + counts > self._ends(first))  # continues in the next block, or several
        last[far] = self._find(starts[far] + counts[far] - 1)
        rows, blocks = np.arange(len(starts)), first
        if len(far):
            pieces = last - first + 1
            rows, blocks = np.repeat(rows, pieces), np.repeat(first, pieces)
            blocks += np.arange(len(rows)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        order = _order(blocks)
        rows, blocks = rows[order], blocks[order]
        edges = np.flatnonzero(np.diff(blocks, prepend=-1, append=-1))
        places = self._places(blocks[edges[:-1]])
        ahead = self._decode_ahead(places)
        pieces = np.diff(edges)
        begin = np.repeat(np.array([place.plain for place in places], np.int64), pieces)
        end = np.repeat(np.array([place.plain_end for place in places], np.int64), pieces)
        low = np.maximum(starts[rows], begin)
        sizes = np.minimum(starts[rows] + counts[rows], end) - low
        sources, targets = low - begin, offsets[rows] + low - starts[rows]
        for place, begin_at, end_at in zip(places, edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            copy_pieces(self._block(place), sources, targets, sizes, begin_at, end_at, out)
        for late in ahead:  # no longer needed: started now, it would decode what was already used
            late.cancel()
        return out, offsets

    def _find(self, positions: Numbers) -> Numbers:
        """The block of each position of the text."""
        if self._plain is not None:
            return np.searchsorted(self._plain, positions, side="right") - 1
        return self._columns["plain"].find(positions)

    def _ends(self, blocks: Numbers) -> Numbers:
        """Where these blocks end in the text."""
        column = self._columns["plain"]
        if self._plain is not None:
            return self._plain_ends[blocks]
        after = column.take(np.minimum(blocks + 1, column.rows - 1))
        return np.where(blocks == column.rows - 1, self._edges["plain"], after)

    def _places(self, blocks: Numbers) -> "list[_Place]":
        starts = {name: column.take(blocks) for name, column in self._columns.items()}
        after = np.minimum(blocks + 1, self._columns["plain"].rows - 1)
        is_last = blocks == self._columns["plain"].rows - 1
        ends = {name: np.where(is_last, end, self._columns[name].take(after)) for name, end in self._edges.items()}
        columns = (blocks, starts["raw"], ends["raw"], starts["plain"], ends["plain"], starts["crc32c"])
        windows = starts["window"], ends["window"]
        return [_Place(*row) for row in zip(*(column.tolist() for column in (*columns, *windows)), strict=True)]

    def held_bytes(self) -> int:
        return self._held

    @property
    def run_bytes(self) -> int:
        return self._edges["plain"] // max(self._columns["plain"].rows, 1)

    def will_need(self, start: int, end: int) -> None:
        first, last = self._find(np.array([start, max(end - 1, start)], np.int64))
        places = self._places(np.array([first, last], np.int64))
        raw, raw_end = places[0].raw, places[1].raw_end
        _read_ahead(self._path, raw, raw_end)

    def release(self, start: int, end: int) -> None:
        """The least recently used blocks are dropped anyway."""

    def _decode_ahead(self, places: "Sequence[_Place]") -> list[Future[Bytes]]:
        """Decode missing blocks in other threads, as many as fit into half of the budget."""
        missing = [place for place in places if place.block not in self._cache]
        room = self._memory // 2
        ahead: list[Future[Bytes]] = []
        for place in missing[1:]:
            room -= place.plain_end - place.plain
            if room < 0:
                break
            if self._decoders is None:
                self._decoders = ThreadPoolExecutor(max_workers=max((os.cpu_count() or 2) - 1, 1))
            ahead.append(self._decoders.submit(self._block, place))
        return ahead

    def _block(self, place: "_Place") -> Bytes:
        """The text of a block, decoded or from the cache."""
        with self._lock:
            found = self._cache.get(place.block)
            if found is not None:
                self._cache.move_to_end(place.block)
                mine = found[1]
            else:
                mine = Future[Bytes]()
                self._cache[place.block] = place.plain_end - place.plain, mine
                self._held += place.plain_end - place.plain
                while self._held > self._memory and len(self._cache) > 1:
                    self._held -= self._cache.popitem(last=False)[1][0]
        if found is not None:  # decoded, or being decoded by another thread
            return mine.result()
        try:
            mine.set_result(self._decode(place))
        except BaseException as error:
            with self._lock:
                if place.block in self._cache:
                    self._held -= self._cache.pop(place.block)[0]
            mine.set_exception(error)
            raise
        return mine.result()

    def _decode(self, place: "_Place") -> Bytes:
        self.decoded += 1
        size = place.plain_end - place.plain
        try:
            with _opened(self._path) as fd:
                raw = os.pread(fd, place.raw_end - place.raw, place.raw)
            if self._kind == "bgzf":
                text = decode_bgzf(raw[18 : bgzf_size(raw[:18])])
            elif self._kind == "zstd":
                text = decode_frame(raw, size=size)
            else:
                text = inflate(raw, size=size, window=self._window(place))
        except zlib.error as error:
            raise self._wrong(place, str(error)) from None
        data = np.frombuffer(text, np.uint8)
        if len(data) != size or crc32c(data) != place.crc32c:
            raise self._wrong(place, "its checksum does not match")
        return data

    def _window(self, place: "_Place") -> bytes:
        self._sections.check(self._windows_at + place.window, self._windows_at + place.window_end)
        data = self._windows[place.window : place.window_end].tobytes()
        return zlib.decompress(data) if data else b""

    def _wrong(self, place: "_Place", reason: str) -> BadSource:
        return BadSource(
            f"{self._path}: the block at byte {place.raw} cannot be decoded ({reason}); the file has changed or is "
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


class _Place(NamedTuple):
    block: int
    raw: int
    raw_end: int
    plain: int
    plain_end: int
    crc32c: int
    window: int
    window_end: int
