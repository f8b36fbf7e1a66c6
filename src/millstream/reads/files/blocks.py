"""Text in blocks, each of which is read, and perhaps decoded, as a whole. Knows files and objects, no container.

A block is decoded by the first thread that needs it, and cached within `memory`. Of an object, all missing blocks are
requested at once.
"""

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from millstream.core.collection import Numbers
from millstream.core.memory import Pool, empty_bytes
from millstream.core.record import Bytes
from millstream.core.remote import RemoteFile, read_all
from millstream.errors import MillstreamError
from millstream.reads.files.ranges import copy_pieces

REQUEST_BYTES = 1 << 20  # of an object: worth a request
_ROUND_BYTES = 32 << 20  # requested at once, at most


Ranges = Sequence[tuple[int, int]]  # of a text, from the first byte to before the last


class BlockSpan(NamedTuple):
    """Where a block is: in the text, in the file, and what decoding it needs."""

    block: int
    plain: int
    plain_end: int
    crc32c: int
    raw: int
    raw_end: int
    window: int = 0
    window_end: int = 0

    @property
    def size(self) -> int:
        return self.plain_end - self.plain


class Blocks:
    """The blocks of a file or an object; block i is the text from `edges[i]` to `edges[i + 1]`.

    `spans` tells where blocks are; `decode` makes the text of one from its bytes, and verifies it if `is_checked`.
    """

    def __init__(
        self,
        source: Path | RemoteFile,
        edges: Numbers,
        *,
        spans: Callable[[Numbers], list[BlockSpan]],
        decode: Callable[[BlockSpan, memoryview], bytes | memoryview],
        is_checked: bool,
        memory: int,
    ) -> None:
        self._source = source
        self._plain, self._edges, self._last = edges, edges.data, len(edges) - 2
        self._spans, self._decode, self._is_checked = spans, decode, is_checked
        # Of an object, what is on its way takes the rest: its parts, and the ranges that they are copied to.
        self._memory = memory if isinstance(source, Path) else kept_bytes(memory)
        self._round = min(memory // 16, _ROUND_BYTES)
        self._start()

    def __del__(self) -> None:
        decoders: ThreadPoolExecutor | None = getattr(self, "_decoders", None)
        if decoders is not None and self._pid == os.getpid():
            decoders.shutdown(wait=False)

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._cache: OrderedDict[int, tuple[int, Future[Bytes]]] = OrderedDict()
        self.held_bytes = 0
        self._pool = Pool(self._memory)
        self._decoders: ThreadPoolExecutor | None = None
        self.decoded = 0  # blocks so far

    def read(self, start: int, count: int) -> bytes:
        """The bytes from `start` on."""
        block = bisect_right(self._edges, start) - 1
        if self._pid == os.getpid() and block <= self._last and start + count <= self._edges[block + 1]:
            with self._lock:
                found = self._cache.get(block)
                if found is not None:
                    self._cache.move_to_end(block)
            if found is not None:  # without arrays: a tenth of the time
                begin = start - self._edges[block]
                return found[1].result()[begin : begin + count].tobytes()
        return self.text(np.array([start], np.int64), np.array([count], np.int64))[0].tobytes()

    def text(self, starts: Numbers, counts: Numbers) -> tuple[Bytes, Numbers]:
        """`counts[i]` bytes from `starts[i]` on, for every i: flat, and n+1 offsets."""
        self._restart_after_fork()
        offsets = np.zeros(len(starts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        out = empty_bytes(int(offsets[-1]))
        first = self.find(starts)
        last = first.copy()
        (far,) = np.nonzero(starts + counts > self._plain[first + 1])  # continues in the next block, or several
        last[far] = self.find(starts[far] + counts[far] - 1)
        rows, blocks = np.arange(len(starts)), first
        if len(far):
            pieces = last - first + 1
            rows, blocks = np.repeat(rows, pieces), np.repeat(first, pieces)
            blocks += np.arange(len(rows)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        order = _order(blocks)
        rows, blocks = rows[order], blocks[order]
        edges = np.flatnonzero(np.diff(blocks, prepend=-1, append=-1))
        spans = self._spans(blocks[edges[:-1]])
        begin, end = self._plain[blocks], self._plain[blocks + 1]
        low = np.maximum(starts[rows], begin)
        sizes = np.minimum(starts[rows] + counts[rows], end) - low
        sources, targets = low - begin, offsets[rows] + low - starts[rows]
        pairs = list(pairwise(edges.tolist()))
        for some in self._rounds(spans):
            ahead = self._decode_ahead(spans[some])
            for span, (begin_at, end_at) in zip(spans[some], pairs[some], strict=True):
                copy_pieces(self._block(span), sources, targets, sizes, begin_at, end_at, out)
            for late in ahead:  # no longer needed: started now, it would decode what was already used
                late.cancel()
        return out, offsets

    def find(self, positions: Numbers) -> Numbers:
        """The block of each position of the text."""
        return np.searchsorted(self._plain[:-1], positions, side="right") - 1

    @property
    def run_bytes(self) -> int:
        """The mean size of a block."""
        return int(self._plain[-1]) // max(self._last + 1, 1)

    def will_need(self, ranges: Ranges) -> None:
        """Start reading these ranges of the text; of an object, their blocks are requested and decoded."""
        self._restart_after_fork()
        ends = np.array([(start, max(end - 1, start)) for start, end in ranges], np.int64)
        first, last = self.find(ends[:, 0]), self.find(ends[:, 1])
        if isinstance(self._source, Path):
            with opened(self._source) as fd:
                for low, high in zip(self._spans(first), self._spans(last), strict=True):
                    os.posix_fadvise(fd, low.raw, high.raw_end - low.raw, os.POSIX_FADV_WILLNEED)
            return
        blocks = [
            np.arange(low, high + 1, dtype=np.int64) for low, high in zip(first.tolist(), last.tolist(), strict=True)
        ]
        spans = self._spans(np.unique(np.concatenate(blocks)))
        for some in self._rounds(spans):
            for block in self._decode_ahead(spans[some]):
                with suppress(MillstreamError):  # reading the text raises the same
                    block.result()

    # -- decoding

    def _restart_after_fork(self) -> None:
        if self._pid != os.getpid():  # locks, threads and half-decoded blocks belong to the parent
            self._start()

    def _rounds(self, spans: Sequence[BlockSpan]) -> Generator[slice]:
        """Blocks of an object to request together; all of a file."""
        if isinstance(self._source, Path):
            yield slice(0, len(spans))
            return
        first = held = text = 0
        for place, span in enumerate(spans):
            held, text = held + span.raw_end - span.raw, text + span.size
            if place > first and max(held, text) > self._round:
                yield slice(first, place)
                first, held, text = place, span.raw_end - span.raw, span.size
        if spans:
            yield slice(first, len(spans))

    def _decode_ahead(self, spans: Sequence[BlockSpan]) -> list[Future[Bytes]]:
        """Decode missing blocks in other threads: of a file as many as fit into half of the budget."""
        if isinstance(self._source, RemoteFile):
            return self._request(spans)
        missing = [span for span in spans if span.block not in self._cache]
        room = self._memory // 2
        ahead: list[Future[Bytes]] = []
        for span in missing[1:]:
            room -= span.size
            if room < 0:
                break
            ahead.append(self._threads().submit(self._block, span))
        return ahead

    def _request(self, spans: Sequence[BlockSpan]) -> list[Future[Bytes]]:
        """Request missing blocks, all at once, and decode them in other threads."""
        mine: list[tuple[BlockSpan, Future[Bytes]]] = []
        try:
            for span in spans:
                block, is_new = self._claim(span)
                if is_new:
                    mine.append((span, block))
            raws = self._raws([span for span, _ in mine])
        except BaseException as error:
            for span, block in mine:
                self._fail(span, block, error)
            raise
        if len(mine) == 1 or not self._is_checked:  # nothing to decode, or nothing beside it
            for (span, block), raw in zip(mine, raws, strict=True):
                self._make(span, block, raw)
        else:
            for (span, block), raw in zip(mine, raws, strict=True):
                self._threads().submit(self._make, span, block, raw)
        return [block for _, block in mine]

    def _threads(self) -> ThreadPoolExecutor:
        if self._decoders is None:
            self._decoders = ThreadPoolExecutor(max_workers=max((os.cpu_count() or 2) - 1, 1))
        return self._decoders

    def _block(self, span: BlockSpan) -> Bytes:
        """The text of a block, decoded or from the cache."""
        block, is_new = self._claim(span)
        if is_new:
            self._make(span, block)
        return block.result()  # perhaps decoded by another thread

    def _claim(self, span: BlockSpan) -> tuple[Future[Bytes], bool]:
        """A block, and whether it is new, so that the caller has to make it."""
        with self._lock:
            found = self._cache.get(span.block)
            if found is not None:
                self._cache.move_to_end(span.block)
                return found[1], False
            block = Future[Bytes]()
            self._cache[span.block] = span.size, block
            self.held_bytes += span.size
            while self.held_bytes > self._memory and len(self._cache) > 1:
                self.held_bytes -= self._cache.popitem(last=False)[1][0]
            return block, True

    def _make(self, span: BlockSpan, block: Future[Bytes], raw: memoryview | None = None) -> None:
        try:
            block.set_result(self._decoded(span, self._raws([span])[0] if raw is None else raw))
        except BaseException as error:
            self._fail(span, block, error)

    def _fail(self, span: BlockSpan, block: Future[Bytes], error: BaseException) -> None:
        with self._lock:
            if self._cache.get(span.block, (0, None))[1] is block:
                self.held_bytes -= self._cache.pop(span.block)[0]
        block.set_exception(error)

    def _decoded(self, span: BlockSpan, raw: memoryview) -> Bytes:
        self.decoded += 1
        try:
            text = self._decode(span, raw)
        except MillstreamError:
            if isinstance(self._source, Path) or not self._is_checked:
                raise
            text = self._decode(span, self._raws([span], fresh=True)[0])  # damaged on its way, or in the cache
        data = self._pool.take(span.size)
        data[:] = np.frombuffer(text, np.uint8)
        return data

    def _raws(self, spans: Sequence[BlockSpan], *, fresh: bool = False) -> list[memoryview]:
        """The bytes of blocks in the file; neighbours are requested as one range."""
        if isinstance(self._source, Path):
            with opened(self._source) as fd:
                return [memoryview(os.pread(fd, span.raw_end - span.raw, span.raw)) for span in spans]
        runs: list[tuple[int, int]] = []
        for span in spans:
            start = runs.pop()[0] if runs and runs[-1][1] == span.raw else span.raw
            runs.append((start, span.raw_end))
        data = [np.empty(end - start, np.uint8).data for start, end in runs]
        wanted = [(self._source, start, out) for (start, _), out in zip(runs, data, strict=True) if out.nbytes]
        read_all(wanted, is_checked=self._is_checked, fresh=fresh)
        raws: list[memoryview] = []
        at = 0
        for span in spans:
            while span.raw_end > runs[at][1]:
                at += 1
            raws.append(data[at][span.raw - runs[at][0] : span.raw_end - runs[at][0]])
        return raws


def kept_bytes(memory: int) -> int:
    """How much of an object is kept within a budget."""
    return memory * 7 // 8


def equal_blocks(num_bytes: int, block_bytes: int) -> tuple[Numbers, Callable[[Numbers], list[BlockSpan]]]:
    """Edges and spans of the blocks of an object that is not compressed."""
    edges = np.append(np.arange(0, max(num_bytes, 1), block_bytes, dtype=np.int64), num_bytes)

    def spans(blocks: Numbers) -> list[BlockSpan]:
        rows = zip(blocks.tolist(), edges[blocks].tolist(), edges[blocks + 1].tolist(), strict=True)
        return [BlockSpan(block, start, end, 0, start, end) for block, start, end in rows]

    return edges, spans


@contextmanager
def opened(path: Path) -> Generator[int]:
    """A descriptor while something is read: a folder may have more files than a process may have open."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _order(blocks: Numbers) -> Numbers:
    """The stable order of blocks. numpy radix-sorts 16-bit numbers, ten times as fast as others."""
    if not len(blocks):
        return blocks
    near = blocks - blocks.min()
    return np.argsort(near.astype(np.uint16) if near.max() < 1 << 16 else near, kind="stable")
