"""The text of a read file by position: mapped if it is plain, decoded block by block if it is compressed.

Holds at most `memory` bytes: larger plain files are read instead of mapped, and the least recently used decoded blocks
are dropped. The text of an object is read in large ranges.
"""

import os
import zlib
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from millstream.core.bucket import ObjectInfo
from millstream.core.collection import Numbers
from millstream.core.console import quoted
from millstream.core.fingerprint import Fingerprint
from millstream.core.instructions import prefetch
from millstream.core.kernels import kernel
from millstream.core.memory import Map, empty_bytes
from millstream.core.record import Bytes, crc32c
from millstream.core.remote import RemoteFile, RemotePath
from millstream.errors import BadSource
from millstream.reads.files.blocks import REQUEST_BYTES, Blocks, BlockSpan, Ranges, equal_blocks, kept_bytes, opened
from millstream.reads.files.containers import Kind, decode_frame
from millstream.reads.files.inflate import bgzf_size, decode_bgzf, inflate
from millstream.reads.files.ranges import copy, read_bytes, read_near
from millstream.reads.files.sections import Sections

PAGE_BYTES = 4096
_AROUND_BYTES = 64 << 10  # what the kernel maps around a byte that is touched
_NEWLINE, _SEMICOLON = 10, 59
_AHEAD = 16  # records that are prefetched before they are copied


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

    def will_need(self, ranges: Ranges) -> None:
        """Start reading these ranges of the text from disk."""
        for start, end in ranges:
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
        with opened(self._path) as fd:
            return runs.from_text(*read_near(fd, runs.starts, runs.starts + runs.num_bytes))

    def read(self, start: int, count: int) -> bytes:
        with opened(self._path) as fd:
            return read_bytes(fd, start, count)

    def between(self, start: int, end: int) -> Bytes:
        with opened(self._path) as fd:
            return read_near(fd, np.array([start], np.int64), np.array([end], np.int64))[0]

    def held_bytes(self) -> int:
        return self._held

    def will_need(self, ranges: Ranges) -> None:
        if self._map is None:
            self._map = Map(self._path, is_cache=True)
        with opened(self._path) as fd:
            for start, end in ranges:
                os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_WILLNEED)
                self._held += end - start

    def release(self, start: int, end: int) -> None:
        if self._map is not None:
            self._map.drop(max(start - _AROUND_BYTES, 0), end + _AROUND_BYTES)
            self._held -= end - start


class RemoteText:
    """A plain object. What fits into the budget is read in blocks and kept, and so are the windows of `window` order.

    Otherwise exactly what is wanted is requested.
    """

    run_bytes = REQUEST_BYTES

    def __init__(self, file: RemoteFile, *, memory: int) -> None:
        self._file = file
        self._is_kept = file.num_bytes <= kept_bytes(memory)
        # Neighbours of a window end anywhere in a block, which another window reads again: small blocks waste little.
        edges, spans = equal_blocks(file.num_bytes, REQUEST_BYTES if self._is_kept else _AROUND_BYTES)
        self._blocks = Blocks(file, edges, spans=spans, decode=lambda _, raw: raw, is_checked=False, memory=memory)

    def gather(self, runs: Runs) -> tuple[Bytes, Numbers]:
        if not self._is_kept:
            return runs.from_text(*read_near(self._file, runs.starts, runs.starts + runs.num_bytes))
        text, offsets = self._blocks.text(runs.starts, runs.num_bytes)
        return runs.from_text(text, offsets[:-1]) if runs.lines.any() else (text, offsets)

    def read(self, start: int, count: int) -> bytes:
        return self._blocks.read(start, count) if self._is_kept else self._file.read(start, count)

    def between(self, start: int, end: int) -> Bytes:
        return np.array(memoryview(self.read(start, end - start)))  # writable: else the kernels are compiled again

    def held_bytes(self) -> int:
        return self._blocks.held_bytes

    @property
    def decoded(self) -> int:
        return 0

    def will_need(self, ranges: Ranges) -> None:
        self._is_kept = True
        self._blocks.will_need(ranges)

    def release(self, start: int, end: int) -> None:
        """The least recently used blocks are dropped anyway."""


class BlockText:
    """A compressed file. A block is decoded by the first thread that needs it, and cached within `memory`."""

    def __init__(self, path: Path, sections: Sections, *, memory: int, file: RemoteFile | None = None) -> None:
        self._path, self._file = path, file
        self._kind: Kind = sections.meta["kind"]  # pyright: ignore
        self._windows = sections.view("block.windows")
        self._windows_at = sections.span("block.windows")[0]
        self._sections = sections
        self._memory = memory
        self._known: dict[int, BlockSpan] = {}
        self._made = None if file is not None else self._make_blocks()  # of an object, its index is read when needed

    @property
    def _blocks(self) -> Blocks:
        if self._made is None:
            self._made = self._make_blocks()
        return self._made

    def _make_blocks(self) -> Blocks:
        sections, file = self._sections, self._file
        columns = {name: sections.column(f"block.{name}") for name in ("raw", "window", "crc32c", "plain")}
        plain = columns.pop("plain").whole()
        self._columns = columns if file is not None else {name: column.whole() for name, column in columns.items()}
        size = os.path.getsize(self._path) if file is None else file.num_bytes
        raw_end = cast("int | None", sections.meta.get("blocks_end")) or size
        self._ends = {"raw": raw_end, "window": len(self._windows)}  # of the last block
        # Searched for every read, so decoded: 8 bytes per block. Block i is the text from plain[i] to plain[i + 1].
        self._plain = np.append(plain.take(np.arange(plain.rows)), cast(int, sections.meta["text_bytes"]))
        self._last = plain.rows - 1
        source = self._path if file is None else file
        return Blocks(source, self._plain, spans=self._spans, decode=self._decode, is_checked=True, memory=self._memory)

    def gather(self, runs: Runs) -> tuple[Bytes, Numbers]:
        text, offsets = self._blocks.text(runs.starts, runs.num_bytes)
        return runs.from_text(text, offsets[:-1]) if runs.lines.any() else (text, offsets)

    def read(self, start: int, count: int) -> bytes:
        return self._blocks.read(start, count)

    def between(self, start: int, end: int) -> Bytes:
        return self._blocks.text(np.array([start], np.int64), np.array([end - start], np.int64))[0]

    def held_bytes(self) -> int:
        return self._made.held_bytes if self._made else 0

    @property
    def decoded(self) -> int:
        return self._made.decoded if self._made else 0

    @property
    def run_bytes(self) -> int:
        return self._blocks.run_bytes

    def will_need(self, ranges: Ranges) -> None:
        self._blocks.will_need(ranges)

    def release(self, start: int, end: int) -> None:
        """The least recently used blocks are dropped anyway."""

    def _spans(self, blocks: Numbers) -> list[BlockSpan]:
        """Batches of a window are in the same few blocks: what was found for the last one is kept."""
        known = self._known
        if not all(map(known.__contains__, blocks.tolist())):
            known = self._known = {span.block: span for span in self._find_spans(blocks)}
        return [known[block] for block in blocks.tolist()]

    def _find_spans(self, blocks: Numbers) -> list[BlockSpan]:
        columns = [blocks, self._plain[blocks], self._plain[blocks + 1], self._columns["crc32c"].take(blocks)]
        after = np.minimum(blocks + 1, self._last)
        for name, end in self._ends.items():
            column = self._columns[name]
            columns += [column.take(blocks), np.where(blocks == self._last, end, column.take(after))]
        return [BlockSpan(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def _decode(self, span: BlockSpan, raw: memoryview) -> bytes:
        data = bytes(raw)
        try:
            if self._kind == "bgzf":
                text = decode_bgzf(data[18 : bgzf_size(data[:18])])
            elif self._kind == "zstd":
                text = decode_frame(data, size=span.size)
            else:
                text = inflate(data, size=span.size, window=self._window(span))
        except zlib.error as error:
            raise self._wrong(span, str(error)) from None
        if len(text) != span.size or crc32c(text) != span.crc32c:
            raise self._wrong(span, "its checksum does not match")
        return text

    def _window(self, span: BlockSpan) -> bytes:
        self._sections.check(self._windows_at + span.window, self._windows_at + span.window_end)
        data = self._windows[span.window : span.window_end].tobytes()
        return zlib.decompress(data) if data else b""

    def _wrong(self, span: BlockSpan, reason: str) -> BadSource:
        return BadSource(
            f"{self._path}: the block at byte {span.raw} cannot be decoded ({reason}); the file has changed or is "
            f"damaged. Check it: millstream verify {quoted(self._path)}"
        )


Text = MappedText | PlainText | RemoteText | BlockText


def open_text(path: Path, sections: Sections, *, memory: int) -> Text:
    """The text of an indexed file."""
    file = None
    if isinstance(path, RemotePath):
        indexed = Fingerprint.of_json(sections.meta["fingerprint"])
        known = path.bucket.known(path.key) or path.info()
        if indexed.url == str(path):  # read no other version than the index describes
            known = ObjectInfo(indexed.size, indexed.etag, indexed.mtime_ns)
        file = RemoteFile(path, known=known)
    if sections.meta["kind"] != "plain":
        return BlockText(path, sections, memory=memory, file=file)
    if file is not None:
        return RemoteText(file, memory=memory)
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
def _gather(
    text: Bytes, starts: Numbers, lines: Numbers, eols: Numbers, phases: Numbers, offsets: Numbers, out: Bytes
) -> None:
    for index in range(-_AHEAD, len(starts)):
        ahead = index + _AHEAD
        if ahead < len(starts):  # overlaps cache misses; a loop over all cache lines costs more than it saves
            prefetch(text, starts[ahead])
            prefetch(text, starts[ahead] + offsets[ahead + 1] - offsets[ahead] - 1)
        if index < 0:
            continue
        source = starts[index]
        target = offsets[index]
        end = offsets[index + 1]
        line = lines[index]
        if line == 0:
            copy(text, source, end - target, out, target)
        elif line > 0:
            rest = line - phases[index]
            while target < end:
                count = min(rest, end - target)
                target = copy(text, source, count, out, target)
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
