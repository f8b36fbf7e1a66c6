"""A packed file -> FASTA or FASTQ: always the same records, and the same bytes if their line layout was regular."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from millstream.core.collection import Numbers
from millstream.core.console import Progress, silent
from millstream.core.files import publishing_text
from millstream.core.kernels import kernel
from millstream.core.record import Bytes, crc32c
from millstream.errors import BadIndex
from millstream.reads.pack.pack_file import PackFile

MEMORY = 256 << 20
WINDOW_BASES = 4 << 20
_ROWS = 1 << 16
_NO_LIMIT = 1 << 62


def unpack(path: Path, out: BinaryIO | Path, *, progress: Progress = silent, window_bases: int = WINDOW_BASES) -> int:
    """Write the text; returns its number of bytes. A path ending in .gz is compressed; it appears when it is complete.

    `progress` gets the number of records done. At most `window_bases` are decoded at once, however long a record is.
    """
    restorer = TextRestorer(PackFile(path, memory=MEMORY), window_bases=window_bases)
    if isinstance(out, Path):
        with publishing_text(out) as write:
            return _unpack(restorer, write, progress)
    return _unpack(restorer, out.write, progress)


def _unpack(restorer: "TextRestorer", write: Callable[[memoryview], object], progress: Progress) -> int:
    done = crc = 0
    for text, row in restorer.texts():
        write(text.data)
        crc = crc32c(text, crc)
        done += len(text)
        progress(row)
    source = restorer.source
    if source.is_exact and (done, crc) != (source.meta["text_bytes"], source.meta["text_crc32c"]):
        raise BadIndex(
            f"{source.path}: unpacked {done} bytes with checksum {crc:08x}, but {source.meta['text_bytes']} bytes "
            f"with {source.meta['text_crc32c']:08x} were packed. Pack the source again"
        )
    return done


class TextRestorer:
    """Writes the records of a packed file as text again, in the line layout of the file."""

    def __init__(self, source: PackFile, *, window_bases: int) -> None:
        self.source = source
        self._window_bases = window_bases
        self._fastq = source.has_quality
        self._layout = source.layout
        self._line = source.layout.line or _NO_LIMIT
        self._eol = np.frombuffer(bytearray(b"\r\n" if source.layout.crlf else b"\n"), np.uint8)

    def texts(self) -> Generator[tuple[Bytes, int]]:
        """The text in pieces of a few megabytes, however long the records are; the records begun so far."""
        row, records = 0, self.source.records
        while row < records:
            rows = np.arange(row, min(row + _ROWS, records), dtype=np.int64)
            count = int(np.searchsorted(np.cumsum(self.source.lengths(rows)), self._window_bases, side="right"))
            row += max(count, 1)
            text = np.empty(0, np.uint8)
            for following in self._records(rows[:count]) if count else self._long_record(rows[:1]):
                yield text, row
                text = following
            is_cut = row == records and not self._layout.final_newline
            yield text[: len(text) - len(self._eol) * is_cut], row

    def _records(self, rows: Numbers) -> Generator[Bytes]:
        """The text of whole records."""
        lengths = self.source.lengths(rows)
        offsets = np.append(np.zeros(1, np.int64), np.cumsum(lengths))
        starts = self.source.starts(rows)
        headers, header_starts, header_ends = self.source.headers(rows)
        sequences = self.source.sequences(starts, offsets)
        qualities = self.source.qualities(starts, offsets) if self._fastq else sequences
        num_lines = int((lengths // self._line + 2).sum())  # and the header's; no fewer than there are
        num_bytes = len(headers) + len(sequences) + len(self._eol) * num_lines + len(rows)
        out = np.empty(2 * num_bytes if self._fastq else num_bytes, np.uint8)
        end = _restore(
            headers, header_starts, header_ends, sequences, qualities, offsets,
            self._line, self._eol, self._fastq, self._layout.repeats_header, out,
        )  # fmt: skip
        yield out[:end]

    def _long_record(self, row: Numbers) -> Generator[Bytes]:
        """The text of one record, a window at a time, ending in a line end."""
        header, eol = self.source.headers(row)[0].tobytes(), self._eol.tobytes()
        yield _bytes(b"@" if self._fastq else b">", header, eol)
        yield from self._wrapped(row, self.source.sequences)
        if self._fastq:
            yield _bytes(eol, b"+", header if self._layout.repeats_header else b"", eol)
            yield from self._wrapped(row, self.source.qualities)
        yield self._eol

    def _wrapped(self, row: Numbers, decode: Callable[[Numbers, Numbers], Bytes]) -> Generator[Bytes]:
        length, start = int(self.source.lengths(row)[0]), int(self.source.starts(row)[0])
        for place in range(0, length, self._window_bases):
            count = min(self._window_bases, length - place)
            flat = decode(np.array([start + place], np.int64), np.array([0, count], np.int64))
            column = (place - 1) % self._line + 1 if place else 0
            out = np.empty(count + (count // self._line + 1) * len(self._eol), np.uint8)
            yield out[: _wrap(flat, 0, count, column, self._line, self._eol, out, 0)]


def _bytes(*parts: bytes) -> Bytes:
    return np.frombuffer(b"".join(parts), np.uint8)


@kernel
def _copy(source: Bytes, start: int, end: int, out: Bytes, at: int) -> int:
    origin, target = source[start:end], out[at : at + end - start]
    for place in range(end - start):  # twice as fast as assigning one slice to the other
        target[place] = origin[place]
    return at + end - start


@kernel
def _wrap(flat: Bytes, start: int, end: int, column: int, line: int, eol: Bytes, out: Bytes, at: int) -> int:
    """flat[start:end] over lines, the first of which has `column` bases already; without the last line end."""
    while start < end:
        if column == line:
            at = _copy(eol, 0, len(eol), out, at)
            column = 0
        count = min(end - start, line - column)
        at = _copy(flat, start, start + count, out, at)
        start += count
        column += count
    return at


@kernel
def _restore(
    headers: Bytes,
    header_starts: Numbers,
    header_ends: Numbers,
    sequences: Bytes,
    qualities: Bytes,
    offsets: Numbers,
    line: int,
    eol: Bytes,
    fastq: bool,
    repeats_header: bool,
    out: Bytes,
) -> int:
    """Write whole records; the number of bytes."""
    at = 0
    for row in range(len(header_starts)):
        start, end = offsets[row], offsets[row + 1]
        out[at] = 64 if fastq else 62
        at = _copy(headers, header_starts[row], header_ends[row], out, at + 1)
        at = _copy(eol, 0, len(eol), out, at)
        at = _wrap(sequences, start, end, 0, line, eol, out, at)
        if fastq:
            at = _copy(eol, 0, len(eol), out, at)
            out[at] = 43
            at += 1
            if repeats_header:
                at = _copy(headers, header_starts[row], header_ends[row], out, at)
            at = _copy(eol, 0, len(eol), out, at)
            at = _wrap(qualities, start, end, 0, line, eol, out, at)
        if fastq or end > start:  # FASTA has no line for an empty sequence
            at = _copy(eol, 0, len(eol), out, at)
    return at
