"""FASTA and FASTQ files. Here one is open with its index: row numbers in, sequences out; and the index as a .fai."""

import os
import struct
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from millstream.core.collection import Medium, Numbers
from millstream.core.console import format_bytes, quoted
from millstream.core.files import publish
from millstream.core.fingerprint import Fingerprint, file_crc32c
from millstream.core.record import Bytes
from millstream.core.remote import is_url
from millstream.errors import BadSetting, BadSource, StaleIndex
from millstream.reads.files.blocks import REQUEST_BYTES
from millstream.reads.files.columns import HeaderColumns
from millstream.reads.files.containers import MAX_FRAME_BYTES
from millstream.reads.files.index import add_names, index_command
from millstream.reads.files.names import NameTable, NameText, name_of, names_in, text_in
from millstream.reads.files.records import Geometry, Locations, Place, write_lines
from millstream.reads.files.scanner import IRREGULAR
from millstream.reads.files.sections import Sections
from millstream.reads.files.texts import Runs, Text, open_text

SEQUENCE, QUALITY, NAME = "sequence", "quality", "name"
_NO_BASES = np.empty(0, np.uint8)
_ROWS = 65536
BYTES_PER_BASE = 4  # of memory while a record is read: the text with line ends, its bases, and a str of them
_ALWAYS_BYTES = 64 << 20  # records that need no more are read whatever the budget


def is_large(num_bases: int, memory: int) -> bool:
    """Whether a record with this many bases is too large for a memory budget."""
    return num_bases * BYTES_PER_BASE > max(memory, _ALWAYS_BYTES)


class Fetched(NamedTuple):
    """Sequences and columns of rows of one part of a collection."""

    flat: Bytes
    offsets: Numbers
    quality: Bytes | None
    columns: dict[str, pa.Array]


class ReadFile:
    """One part of a collection of reads. `rows` are record numbers within it."""

    def __init__(self, path: Path, sections: Sections, *, memory: int) -> None:
        self.path = path
        self._path = str(path)
        self.sections = sections
        self.memory = memory
        self.longest: int = sections.meta["longest"]  # pyright: ignore
        self._largest_block: int = sections.meta.get("largest_block", 0)  # pyright: ignore
        self._has_large_block = self._largest_block > max(memory, MAX_FRAME_BYTES)
        self.records: int = sections.meta["records"]  # pyright: ignore
        self.bases: int = sections.meta["bases"]  # pyright: ignore
        self.has_quality = sections.meta["format"] == "fastq"
        self._geometry = Geometry(sections, has_quality=self.has_quality)
        self._is_remote = is_url(path)  # then one version is read, or none
        self._stat = self._state()
        self.text: Text = open_text(path, sections, memory=memory)
        self._first_base = lru_cache(maxsize=1024)(self._find_first_base)
        self.columns = HeaderColumns(sections)

    @property
    def format(self) -> str:
        meta = self.sections.meta
        return str(meta["format"]) if meta["kind"] == "plain" else f"{meta['format']} in {meta['kind']}"

    @property
    def identity(self) -> object:
        """What changes when the file does."""
        return self.sections.meta["fingerprint"]["crc32c"], self.records  # pyright: ignore

    @property
    def medium(self) -> Medium:
        is_random = self.sections.meta["kind"] == "plain" and not self._is_remote
        num_bytes = int(self.sections.meta["text_bytes"])  # pyright: ignore
        run_bytes = max(self.text.run_bytes, REQUEST_BYTES if self._is_remote else 0)
        return Medium(num_bytes, run_bytes, is_random, self._is_remote)

    def will_need(self, first: Numbers, last: Numbers) -> None:
        """Start reading the file from row `first[i]` to row `last[i]`."""
        self.text.will_need(list(self._spans(first, last)))

    def release(self, first: Numbers, last: Numbers) -> None:
        for start, end in self._spans(first, last):
            self.text.release(start, end)

    def _spans(self, first: Numbers, last: Numbers) -> Iterator[tuple[int, int]]:
        starts, ends = self.locate(first).start, self.locate(last)
        return zip(starts.tolist(), (ends.start + ends.span).tolist(), strict=True)

    def verify(self) -> Iterator[str]:
        """Verify the checksums of index and file; yields every damage."""
        yield from self.sections.damages()
        known = Fingerprint.of_json(self.sections.meta["fingerprint"])
        if file_crc32c(self.path) != known.crc32c:
            yield (
                f"{self.path}: its CRC-32C has changed since it was indexed. If that is intended: "
                f"{index_command(self.path, self.sections.path)}"
            )

    def _check_blocks(self) -> None:
        """A gzip file can have gigabytes of text without a place where decoding can start."""
        if self._has_large_block:
            raise BadSetting(
                f"{self.path}: {format_bytes(self._largest_block)} of its text can only be decoded together, more than "
                f"the memory budget of {format_bytes(self.memory)}. Raise memory, or pack it: millstream pack "
                f"{quoted(self.path)} OUT"
            )

    def check_unchanged(self) -> None:
        """Raise StaleIndex if the file was replaced or written to since it was opened; takes 2 us."""
        if self._state() != self._stat:
            raise StaleIndex(
                f"{self.path}: changed while it was open. Rebuild: {index_command(self.path, self.sections.path)}"
            )

    def _state(self) -> tuple[int, int, int] | None:
        if self._is_remote:
            return None
        try:
            stat = os.stat(self._path)
        except FileNotFoundError:
            return None
        return stat.st_ino, stat.st_size, stat.st_mtime_ns

    def fetch(self, rows: Numbers, fields: Sequence[str]) -> Fetched:
        """Sequences of these rows, and the qualities, names and columns among `fields`."""
        found = self.locate(rows)
        columns = {
            name: self.columns.take(name, rows, lengths=lambda _: found.bases, headers=lambda _: self.headers(found))
            for name in fields
            if name in self.columns
        }
        if NAME in fields and NAME not in self.columns:
            columns[NAME] = pa.array(names_in(*self.headers(found)), pa.string())
        needs_bases = SEQUENCE in fields or QUALITY in fields
        flat, offsets = self.sequences(found) if needs_bases else (_NO_BASES, np.zeros(len(rows) + 1, np.int64))
        quality = self.qualities(found) if QUALITY in fields and self.has_quality else None
        return Fetched(flat, offsets, quality, columns)

    def locate(self, rows: Numbers) -> Locations:
        """Where these records are in the text."""
        self.check_unchanged()  # never read from a file that has changed
        self._check_blocks()
        return self._geometry.locate(rows)

    def _locate_one(self, row: int) -> Place:
        self.check_unchanged()
        self._check_blocks()
        return self._geometry.locate_one(row)

    def lengths(self, rows: Numbers) -> Numbers:
        return self._geometry.bases.take(rows)

    def sequence_of(self, row: int) -> bytes | None:
        """The sequence of one record; None if its lines have different lengths."""
        start, head, bases, span, line, _, _ = self._locate_one(row)
        if line < 0 or (line and self.has_quality):
            return None
        if line:
            return self.text.read(start + head, span - head).translate(None, b"\r\n")[:bases]
        return self.text.read(start + head, bases)

    def one(self, row: int) -> tuple[str, str, str | None] | None:
        """Name, sequence and quality of one record; None as above."""
        start, head, bases, span, line, _, gap = self._locate_one(row)
        if line < 0 or (line and self.has_quality):
            return None
        text = self.text.read(start, head + bases if line == 0 and not self.has_quality else span)
        name = name_of(text[1:head]).decode(errors="replace")
        if line:
            return name, text[head:].translate(None, b"\r\n")[:bases].decode("latin-1"), None
        end = head + bases
        quality = text[end + gap : end + gap + bases].decode("latin-1") if self.has_quality else None
        return name, text[head:end].decode("latin-1"), quality

    def lines_of(self, row: int, count: int) -> Iterator[bytes] | None:
        """Name, sequence and quality of `count` records from a row on, as lines; None if they have none as such."""
        self.check_unchanged()
        self._check_blocks()
        found = self._geometry.neighbours(row, count)
        start, end = int(found.start[0]), int(found.start[-1] + found.span[-1])
        if end - start > 8 * int((found.head + found.bases).sum()):  # much that was skipped lies between them
            return None
        if found.line.min() < 0 or (self.has_quality and found.line.any()):  # lines of different lengths
            return None
        return write_lines(self.text.between(start, end), found, has_quality=self.has_quality)

    def sequences(self, found: Locations) -> tuple[Bytes, Numbers]:
        """Bases and offsets."""
        # An eol of 0 means that there are no comments to skip; regular FASTQ has one line per sequence.
        eol = np.zeros_like(found.eol) if self.has_quality else found.eol
        return self.text.gather(Runs(found.start + found.head, found.bases, found.span - found.head, found.line, eol))

    def qualities(self, found: Locations) -> Bytes:
        """Base qualities, with the same offsets as the sequences."""
        start = found.start + found.head + found.bases + found.gap
        line = np.where(found.line == IRREGULAR, IRREGULAR, 0)
        zeros = np.zeros_like(line)
        return self.text.gather(Runs(start, found.bases, found.start + found.span - start, line, zeros))[0]

    def headers(self, found: Locations) -> tuple[Bytes, Numbers, Numbers]:
        """Header lines without '>' or '@' and line end: text, starts, ends."""
        count = found.head - 1
        zeros = np.zeros_like(count)
        flat, offsets = self.text.gather(Runs(found.start + 1, count, count, zeros, zeros))
        ends = offsets[1:].copy()
        for byte in b"\n\r":
            last = flat[np.maximum(ends - 1, 0)] if len(flat) else np.zeros(len(ends), np.uint8)
            ends -= (last == byte) & (ends > offsets[:-1])
        return flat, offsets[:-1], ends

    def name_text(self, rows: Numbers) -> NameText:
        """The first words of their headers."""
        return text_in(*self.headers(self.locate(rows)))

    def names_of(self, rows: Numbers) -> list[str]:
        return self.name_text(rows).names()

    def column(self, name: str, rows: Numbers) -> pa.Array:
        """A column of these rows; parsed from their headers if it is not stored."""
        return self.columns.take(name, rows, lengths=self.lengths, headers=lambda rows: self.headers(self.locate(rows)))

    @cached_property
    def _name_table(self) -> NameTable:
        return NameTable(self.sections)

    @property
    def has_names(self) -> bool:
        return "names.tags" in self.sections

    def with_names(self) -> "ReadFile":
        """The same file, with a name table in its index, built now."""
        index = add_names(self.path, self.sections)
        return ReadFile(self.path, index, memory=self.memory)

    @property
    def held_bytes(self) -> int:
        return self.text.held_bytes()

    @property
    def decoded(self) -> int:
        return self.text.decoded

    def find(self, name: str) -> list[int]:
        """Rows with this name, in order."""
        return self._name_table.find(name, self.names_of)

    def candidate(self, name: str, after: int) -> int:
        """The next row after a row that may have this name, or -1."""
        return self._name_table.candidate(name, after)

    def regions(self, rows: Numbers, starts: Numbers, ends: Numbers) -> tuple[Bytes, Numbers]:
        """Bases [start, end) of records; where the line layout is regular, only those bytes are read."""
        found = self.locate(rows)
        if (found.line == IRREGULAR).any():
            self._check_irregular(rows, found)
            parts = [self.sequences(self.locate(rows[at : at + 1]))[0] for at in range(len(rows))]
            parts = [part[start:end] for part, start, end in zip(parts, starts.tolist(), ends.tolist(), strict=True)]
            return np.concatenate([_NO_BASES, *parts]), np.append(0, np.cumsum(ends - starts))
        line = np.maximum(found.line, 1)  # a sequence on one line has no line length
        skipped = np.where(found.line > 0, found.eol, 0)
        first, last = (at + at // line * skipped for at in (starts, np.maximum(ends - 1, starts)))
        raw = found.start + found.head + first
        runs = Runs(raw, ends - starts, last - first + 1, found.line, found.eol, starts % line)
        return self.text.gather(runs)

    def _check_irregular(self, rows: Numbers, found: Locations) -> None:
        """Records with lines of different lengths are read as a whole."""
        bases = np.where(found.line == IRREGULAR, found.bases, 0)
        if is_large(int(bases.max()), self.memory):
            raise BadSetting(
                f"{self.path}: record {rows[bases.argmax()]} has {bases.max():,} bases in lines of different lengths, "
                f"which are read together: too many for the memory budget of {format_bytes(self.memory)}. Raise "
                f"memory, or pack it: millstream pack {quoted(self.path)} OUT"
            )

    def length(self, row: int) -> int:
        return self._first_base(row)[1]

    def region(self, row: int, start: int, end: int) -> Bytes:
        """Bases [start, end) of one record."""
        self.check_unchanged()
        first, _, line, eol = self._first_base(row)
        if line == IRREGULAR:
            return self.regions(np.array([row]), np.array([start]), np.array([end]))[0]
        skipped = eol if line else 0
        begin = start + start // (line or 1) * skipped
        span = end + (end - 1) // (line or 1) * skipped - begin
        return np.frombuffer(self.text.read(first + begin, span).translate(None, b"\r\n"), np.uint8)

    def _find_first_base(self, row: int) -> tuple[int, int, int, int]:
        """Position of the first base, number of bases, bases per line, bytes per line end."""
        found = self.locate(np.array([row], np.int64))
        first, bases, line, eol = found.start + found.head, found.bases, found.line, found.eol
        return int(first[0]), int(bases[0]), int(line[0]), int(eol[0])


def write_fai(file: ReadFile) -> list[Path]:
    """Write FILE.fai (and FILE.gzi) beside the data; returns the files written."""
    if file.sections.meta["kind"] not in ("plain", "bgzf"):
        raise BadSource(f"{file.path}: samtools reads plain and BGZF files only; recompress it: bgzip")
    fai = file.path.with_name(file.path.name + ".fai")
    seen = set[str]()
    publish(fai, b"".join(_lines(file, start, seen) for start in range(0, file.records, _ROWS)))
    if file.sections.meta["kind"] == "plain":
        return [fai]
    gzi = file.path.with_name(file.path.name + ".gzi")
    raw, plain = (_all(file, f"block.{name}") for name in ("raw", "plain"))
    pairs = np.stack([raw, plain], axis=1)[1:].astype("<u8")
    publish(gzi, struct.pack("<Q", len(pairs)) + pairs.tobytes())
    return [fai, gzi]


def _lines(file: ReadFile, first: int, seen: set[str]) -> bytes:
    found = file.locate(np.arange(first, min(first + _ROWS, file.records), dtype=np.int64))
    (wrong,) = np.nonzero(found.line == IRREGULAR)
    names = names_in(*file.headers(found))
    if len(wrong):
        raise BadSource(
            f"{file.path}: record {first + int(wrong[0])} ({names[int(wrong[0])]}) has lines of different lengths, "
            "which a .fai cannot describe"
        )
    offset = found.start + found.head
    width = np.where(found.line == 0, found.bases, found.line)
    columns = [found.bases, offset, width, width + found.eol]
    if file.has_quality:
        columns.append(offset + found.bases + found.gap)
    rows = zip(names, *(column.tolist() for column in columns), strict=True)
    lines: list[str] = []
    for row in rows:
        if row[1] and row[0] not in seen:  # samtools skips records without bases, and all but the first of a name
            seen.add(row[0])
            lines.append("\t".join(map(str, row)) + "\n")
    return "".join(lines).encode()


def _all(file: ReadFile, name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    column = file.sections.column(name)
    return column.take(np.arange(column.rows, dtype=np.int64))
