"""A packed file -> the text it was made from, byte for byte when names and qualities were kept."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from millstream.console import Progress, silent
from millstream.errors import BadIndex
from millstream.records import Bytes, crc32c
from millstream.store.gaps import HEADER, INSERT, INSERT_BYTES, LETTERS, QUALITIES, RECORD, Weaver
from millstream.store.pack_file import PackFile
from millstream.store.packed import Numbers, Packed
from millstream.store.text_file import writing_text

MEMORY = 256 << 20
WINDOW = 4 << 20  # letters at once
_ROWS = 1 << 16


def unpack(path: Path, out: BinaryIO | Path, *, progress: Progress = silent) -> int:
    """Write the text; how many bytes it has. A path ending in .gz is compressed; it appears when it is complete.

    `progress` is told how many records are done.
    """
    source = PackFile(path, memory=MEMORY)
    if isinstance(out, Path):
        with writing_text(out) as write:
            return _unpack(source, write, progress)
    return _unpack(source, out.write, progress)


def texts(source: PackFile) -> Generator[tuple[Bytes, int]]:
    """The text of a packed file in pieces of a few megabytes, however long its records; the records begun so far."""
    layout = _Layout(source)
    row = 0
    while row < source.records:
        rows = np.arange(row, min(row + _ROWS, source.records), dtype=np.int64)
        ends = np.cumsum(source.lengths(rows))
        count = int(np.searchsorted(ends, WINDOW, side="right"))
        pieces = [layout.small(rows[:count])] if count else layout.large(row)
        row += max(count, 1)
        for text in pieces:
            yield text, row


class _Layout:
    """The gaps of a packed file, woven into its records in order."""

    def __init__(self, source: PackFile) -> None:
        sections = source.sections
        self._source = source
        self._fastq = source.has_quality
        self._weaver = Weaver(fastq=self._fastq)
        self._has_layout = INSERT_BYTES in sections
        if self._has_layout:
            self._records = [sections.column(name) for name in RECORD]
            self._inserts: list[Packed] = [sections.column(name).whole() for name in INSERT]
            sections.array(INSERT_BYTES)
            self._odd = sections.view(INSERT_BYTES)
        self._num_inserts = self._num_odd = 0  # used so far

    def small(self, rows: Numbers) -> Bytes:
        """The text of whole records."""
        lengths = self._source.lengths(rows)
        offsets = np.append(np.zeros(1, np.int64), np.cumsum(lengths))
        starts = self._source.starts(rows)
        headers, header_starts, header_ends = self._source.headers(rows)
        letters = self._source.letters(starts, offsets)
        per_record = 3 if self._fastq else 2
        pieces = np.zeros((len(rows), per_record, 3), np.int64)
        pieces[:, :, 0] = [HEADER, LETTERS, QUALITIES][:per_record]
        pieces[:, 0, 1], pieces[:, 0, 2] = header_starts, header_ends
        pieces[:, 1:, 1], pieces[:, 1:, 2] = offsets[:-1, None], offsets[1:, None]
        pieces = pieces.reshape(-1, 3)
        pieces = pieces[(pieces[:, 0] == HEADER) | (pieces[:, 2] > pieces[:, 1])]
        qualities = self._source.qualities(starts, offsets) if self._fastq else letters[:0]
        return self._weave(pieces, rows, lengths, (headers, letters, qualities))

    def large(self, row: int) -> Generator[Bytes]:
        """The text of one record, a window at a time."""
        rows = np.array([row], np.int64)
        nothing = np.empty(0, np.uint8)
        length, start = int(self._source.lengths(rows)[0]), int(self._source.starts(rows)[0])
        header = self._source.headers(rows)[0]
        head = np.array([[HEADER, 0, len(header)]], np.int64)
        yield self._weave(head, rows, np.array([length], np.int64), (header, nothing, nothing))
        kinds: list[tuple[int, Callable[[Numbers, Numbers], Bytes]]] = [(LETTERS, self._source.letters)]
        if self._fastq:
            kinds.append((QUALITIES, self._source.qualities))
        for kind, read in kinds:
            for place in range(0, length, WINDOW):
                count = min(WINDOW, length - place)
                flat = read(np.array([start + place], np.int64), np.array([0, count], np.int64))
                flats = (nothing, flat, nothing) if kind == LETTERS else (nothing, nothing, flat)
                yield self._weave(np.array([[kind, 0, count]], np.int64), rows[:0], rows[:0], flats)

    def _weave(self, pieces: Numbers, rows: Numbers, lengths: Numbers, flats: tuple[Bytes, Bytes, Bytes]) -> Bytes:
        is_header = pieces[:, 0] == HEADER
        records = np.zeros((len(rows), 4), np.int64)
        records[:, 0] = lengths
        records[:, 2] = 1
        inserts, odd = np.empty((0, 2), np.int64), np.empty(0, np.uint8)
        if self._has_layout:
            for index, column in enumerate(self._records):
                records[:, index + 1] = column.take(rows)
            end = self._weaver.place + int(is_header.sum()) + int((pieces[:, 2] - pieces[:, 1])[~is_header].sum())
            inserts, odd = self._inserts_before(end + 1)
        return self._weaver.weave(pieces, records, flats, inserts, odd)

    def _inserts_before(self, place: int) -> tuple[Numbers, Bytes]:
        places, lengths = self._inserts
        last = int(places.find(np.array([place - 1], np.int64))[0]) + 1
        numbers = np.arange(self._num_inserts, last, dtype=np.int64)
        inserts = np.stack([places.take(numbers), lengths.take(numbers)], axis=1)
        num_bytes = int(inserts[:, 1].sum())
        odd = self._odd[self._num_odd : self._num_odd + num_bytes]
        self._num_inserts, self._num_odd = last, self._num_odd + num_bytes
        return inserts, odd


def _unpack(source: PackFile, write: Callable[[memoryview], object], progress: Progress) -> int:
    done = crc = 0
    for text, row in texts(source):
        write(text.data)
        crc = crc32c(text, crc)
        done += len(text)
        progress(row)
    if source.meta["exact"] and (done, crc) != (source.meta["text_bytes"], source.meta["text_crc32c"]):
        raise BadIndex(
            f"{source.path}: gives {done} bytes of text with checksum {crc:08x}, where {source.meta['text_bytes']} "
            f"with {source.meta['text_crc32c']:08x} were packed. Pack the source again"
        )
    return done
