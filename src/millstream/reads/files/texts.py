"""The text of a read file by position: mapped when it is plain, decoded block by block when it is compressed.

They hold no more than `memory` bytes: a larger file is read instead of mapped, decoded blocks are forgotten, oldest use
first.
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

from millstream.console import quoted
from millstream.errors import BadSource
from millstream.records import Bytes, crc32c
from millstream.source.containers import Kind, bgzf_size, decode_bgzf, decode_frame, inflate
from millstream.source.gather import copy_pieces, gather
from millstream.store.maps import Map
from millstream.store.packed import Numbers
from millstream.store.read_ranges import read_ranges
from millstream.store.sections import Sections

PAGE_BYTES = 4096
_MANY_BLOCKS = 1 << 18  # 2 MB of their starts
_NEAR_BYTES = 4096  # reading so many bytes for nothing costs less than asking twice


class Runs(NamedTuple):
    """Letters to cut: `counts[i]` from `starts[i]` on, which lie within `spans[i]` bytes.

    `phases[i]` letters of the first line come before `starts[i]`.
    """

    starts: Numbers
    counts: Numbers
    spans: Numbers
    lines: Numbers
    eols: Numbers
    phases: Numbers | None = None

    def from_text(self, text: Bytes, starts: Numbers) -> tuple[Bytes, Numbers]:
        """The letters out of text in which the runs start here."""
        return gather(text, starts, self.counts, self.lines, self.eols, self.phases)

    @property
    def num_bytes(self) -> Numbers:
        """How much text each run takes: no more than its letters, if they are one line."""
        return np.where(self.lines == 0, self.counts, self.spans)


class Text(Protocol):
    """Text that records are cut from."""

    def letters(self, runs: Runs) -> tuple[Bytes, Numbers]:
        """The letters of all runs: flat, and n+1 offsets."""
        ...

    decoded: int  # blocks so far

    def read(self, start: int, count: int) -> bytes:
        """The bytes as they are."""
        ...

    def held_bytes(self) -> int:
        """What it holds in memory at present."""
        ...

    @property
    def run_bytes(self) -> int:
        """How much of the text has to be read to get at one byte."""
        ...

    def will_need(self, start: int, end: int) -> None:
        """Start reading this part of the text from disk."""
        ...

    def release(self, start: int, end: int) -> None:
        """This part of the text is not needed any more."""
        ...


class MappedText:
    """A plain file that may be held in memory whole."""

    decoded = 0

    def __init__(self, path: Path) -> None:
        self._map = Map(path)

    def letters(self, runs: Runs) -> tuple[Bytes, Numbers]:
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
        """The whole file may be held."""


class PlainText:
    """A plain file larger than the memory it may take: read where it is wanted, and nothing kept.

    A mapping would do, but the kernel maps 64 kB around each byte that is touched, and letting go of that and taking it
    again costs more (4 us a read) than asking for the bytes (1 us). Where neighbours are wanted one after another it is
    mapped: from the first `will_need` on, until `release`.
    """

    decoded = 0

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: Map | None = None
        self._held = 0

    def letters(self, runs: Runs) -> tuple[Bytes, Numbers]:
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
        _ask_for(self._path, start, end)
        self._held += end - start

    def release(self, start: int, end: int) -> None:
        if self._map is not None:
            self._map.drop(start, end)
            self._held -= end - start

    def _read(self, starts: Numbers, ends: Numbers) -> tuple[Bytes, Numbers]:
        """The bytes of all ranges, neighbours read together, and where each begins in them."""
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
    """A compressed file. Blocks are decoded once, by whichever thread wants one first, and kept within `memory`."""

    def __init__(self, path: Path, sections: Sections, *, memory: int) -> None:
        self._path = path
        self._kind: Kind = sections.meta["kind"]  # pyright: ignore
        self._edges = {"raw": os.path.getsize(path), "plain": cast(int, sections.meta["text_bytes"])}
        self._windows = sections.view("block.windows")
        self._edges["window"] = len(self._windows)
        self._columns = {name: sections.column(f"block.{name}").whole() for name in (*self._edges, "crc32c")}
        self._windows_at = sections.place("block.windows")[0]
        plain = self._columns["plain"]
        # Searched for every read: at hand, unless there are so many that it would be part of the budget.
        self._plain = plain.take(np.arange(plain.rows)) if plain.rows <= _MANY_BLOCKS else None
        self._plain_ends = np.append(self._plain if self._plain is not None else 0, self._edges["plain"])[1:]
        self._sections = sections
        self._memory = memory
        self._start()

    def __del__(self) -> None:
        helpers: ThreadPoolExecutor | None = getattr(self, "_helpers", None)
        if helpers is not None and self._pid == os.getpid():
            helpers.shutdown(wait=False)

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._cache: OrderedDict[int, tuple[int, Future[Bytes]]] = OrderedDict()
        self._held = 0
        self._helpers: ThreadPoolExecutor | None = None
        self.decoded = 0  # blocks so far

    def letters(self, runs: Runs) -> tuple[Bytes, Numbers]:
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
        (far,) = np.nonzero(starts + counts > self._ends(first))  # goes on in the next block, or several
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
        for late in ahead:  # nobody waits for it any more: begun later, it would decode what is already forgotten
            late.cancel()
        return out, offsets

    def _find(self, positions: Numbers) -> Numbers:
        """The block that holds each position of the text."""
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
        _ask_for(self._path, raw, raw_end)

    def release(self, start: int, end: int) -> None:
        """Blocks not used for long are forgotten by themselves."""

    def _decode_ahead(self, places: "Sequence[_Place]") -> list[Future[Bytes]]:
        """Let other threads decode blocks that are not there yet, as far as they surely fit beside each other."""
        missing = [place for place in places if place.block not in self._cache]
        room = self._memory // 2
        ahead: list[Future[Bytes]] = []
        for place in missing[1:]:
            room -= place.plain_end - place.plain
            if room < 0:
                break
            if self._helpers is None:
                self._helpers = ThreadPoolExecutor(max_workers=max((os.cpu_count() or 2) - 1, 1))
            ahead.append(self._helpers.submit(self._block, place))
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
            f"damaged. Look at it: millstream verify {quoted(self._path)}"
        )


@contextmanager
def _opened(path: Path) -> Generator[int]:
    """A descriptor for as long as something is read: a folder may have more files than a process may have open."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _ask_for(path: Path, start: int, end: int) -> None:
    with _opened(path) as fd:
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_WILLNEED)


def _order(blocks: Numbers) -> Numbers:
    """The stable order of blocks; numpy sorts 16-bit numbers by radix, ten times as fast as others."""
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
