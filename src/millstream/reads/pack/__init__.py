"""Packs: reads at two bits per base in one file. Here one is open for reading: rows in, sequences out, in any order."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from millstream.core.collection import Medium, Numbers
from millstream.core.console import quoted, say
from millstream.core.memory import empty_bytes
from millstream.core.record import Bytes
from millstream.core.remote import read_range
from millstream.errors import BadIndex
from millstream.reads.files import NAME, QUALITY, SEQUENCE, Fetched
from millstream.reads.files.columns import HeaderColumns
from millstream.reads.files.encodings import sums_before
from millstream.reads.files.index import index_paths, write_index
from millstream.reads.files.names import NameTable, NameTableWriter, NameText, hash_names, name_of, text_in
from millstream.reads.files.records import Sums, join_lines_of
from millstream.reads.files.sections import CRC_BYTES, MAGIC, Sections
from millstream.reads.files.sections_writer import SectionsWriter
from millstream.reads.files.texts import PAGE_BYTES
from millstream.reads.pack.bases import QUALITIES, STREAM, Qualities, TwoBit
from millstream.reads.pack.header_blocks import HeaderBlocks

SUFFIX = ".pack"
WHAT = "packed reads"
VERSION = 2  # 1 had another description of the line layout, and is read without it
_NAMES = "names of packed reads"
_GRANULE = 16  # log2 of 64 kB: what the kernel maps around a page that is touched
_ROWS_AT_ONCE = 1 << 16


def is_pack(path: Path) -> bool:
    """Whether a file is a pack, perhaps a damaged one; the index of a read file is not."""
    try:
        if read_range(path, 0, len(MAGIC)) != MAGIC:
            return False
    except (FileNotFoundError, IsADirectoryError):
        return False
    try:
        return Sections(path).meta.get("what") == WHAT
    except BadIndex:
        return True


def is_named_pack(path: Path) -> bool:
    """Whether a file is a pack and has the name of one: in a folder, no other file is opened to see it."""
    return path.name.lower().endswith(SUFFIX) and is_pack(path)


def describe_fidelity(meta: Mapping[str, Any]) -> str:
    """What `unpack` restores of the packed text."""
    if meta["exact"]:
        return "bytes exact"
    without: list[str] = []
    if not meta["names"]:
        without.append("names")
    if meta["format"] == "fastq" and not meta["quality"]:
        without.append("base qualities")
    if meta["settings"]["on_mismatch"] == "skip" and meta["mismatches"]["count"]:
        without.append(f"the {meta['mismatches']['count']} that do not match header_regex")
    if meta["damage"]:
        without.append("what follows the damage")
    parts = ["records exact" + (f", without {' and '.join(without)}" if without else "")]
    if meta["irregular_record"] is not None:
        parts.append(f"line layout is irregular, first at record {meta['irregular_record']}")
    elif "layout" not in meta:
        parts.append("line layout is not known (packed by an earlier version)")
    return "; ".join(parts)


def load_pack(path: Path) -> Sections:
    """The sections of a pack; their `meta` describes it."""
    sections = Sections(path, remedy=f"Pack it again: millstream pack SOURCE {quoted(path)} --rebuild")
    meta = sections.meta
    if meta.get("what") != WHAT:
        raise BadIndex(f"{path}: is an {meta.get('what')}, not {WHAT} (millstream pack SOURCE OUT makes those)")
    version = cast(int, meta.setdefault("pack_version", 1))
    if version > VERSION:
        raise BadIndex(f"{path}: packed format {version}, this millstream reads up to {VERSION}; upgrade millstream")
    if version == 1:
        meta.update(exact=False, irregular_record=None)
    return sections


class PackFile:
    """One part of a collection of reads. `rows` are record numbers within it."""

    def __init__(self, path: Path, *, memory: int) -> None:
        self.path = path
        self.sections = sections = load_pack(path)
        self.meta = cast(dict[str, Any], sections.meta)
        self.memory = memory
        self.longest: int = self.meta["longest"]
        self.records: int = self.meta["records"]
        self.bases: int = self.meta["bases"]
        self.has_quality = QUALITIES in sections
        self._anchors, self._lengths = sections.column("anchor"), sections.column("bases")
        self._sums = Sums(sections, self._anchors, self._lengths)
        # A batch of reads in random order would map 64 kB around each of them: a larger file is read instead.
        self._is_mapped = sections.num_bytes <= memory
        if sections.is_remote and not self._is_mapped:
            sections.limit(memory - memory // 8)
        self._stream_at = sections.span(STREAM)[0]
        self.lines: HeaderBlocks | None = None  # header lines, if they were kept
        if self.meta["codec"] is not None:
            self.lines = HeaderBlocks(sections, self.meta["codec"], memory=max(memory // 8, 1 << 20))
        self.columns = HeaderColumns(sections)
        self._names = sections if "names.tags" in sections else self._names_beside()

    @property
    def format(self) -> str:
        """Of the text it was packed from."""
        return f"packed {self.meta['format']}"

    @property
    def is_exact(self) -> bool:
        """Whether `unpack` restores the exact bytes."""
        return self.meta["exact"]

    @property
    def fidelity(self) -> str:
        """What `unpack` restores of the packed text, in words."""
        return describe_fidelity(self.meta)

    @property
    def has_names(self) -> bool:
        """Whether a record can be found by its name without building a table of names first."""
        return self.lines is None or self._names is not None

    @property
    def held_bytes(self) -> int:
        mapped = self.sections.num_bytes if self._is_mapped else self.sections.held_bytes
        return mapped + (self.lines.held_bytes if self.lines else 0)

    @property
    def decoded(self) -> int:
        return self.lines.decoded if self.lines else 0

    @property
    def identity(self) -> object:
        """What changes when the file does."""
        return self.meta["text_crc32c"], self.records

    @property
    def medium(self) -> Medium:
        if self.sections.is_remote:  # verified by the megabyte
            return Medium(self.sections.num_bytes, CRC_BYTES, is_random=False, is_remote=True)
        return Medium(self.sections.num_bytes, PAGE_BYTES, is_random=True)

    def will_need(self, first: Numbers, last: Numbers) -> None:
        """Start reading the bases from row `first[i]` to row `last[i]`."""
        starts = self._stream_at + (self.starts(first) >> 2)
        ends = self._stream_at + (self.starts(last) >> 2) + PAGE_BYTES
        self.sections.will_need_all(list(zip(starts.tolist(), ends.tolist(), strict=True)))

    def release(self, first: Numbers, last: Numbers) -> None:
        """Nothing is kept."""

    def fetch(self, rows: Numbers, fields: Sequence[str]) -> Fetched:
        """Sequences of these rows, and the qualities, names and columns among `fields`."""
        columns = {name: self.column(name, rows) for name in fields if name in self.columns}
        if NAME in fields and NAME not in self.columns:
            columns[NAME] = pa.array(self.names_of(rows), pa.string())
        offsets = np.zeros(len(rows) + 1, np.int64)
        flat, quality = np.empty(0, np.uint8), None
        if SEQUENCE in fields or QUALITY in fields:
            starts, lengths = self._starts_and_lengths(rows)
            np.cumsum(lengths, out=offsets[1:])
            flat = self.sequences(starts, offsets)
            quality = self.qualities(starts, offsets) if QUALITY in fields and self.has_quality else None
        return Fetched(flat, offsets, quality, columns)

    def lengths(self, rows: Numbers) -> Numbers:
        return self._lengths.take(rows)

    def starts(self, rows: Numbers) -> Numbers:
        """Where the records start in the stream of bases."""
        return self._starts_and_lengths(rows)[0]

    def _starts_and_lengths(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """Where these records start in the stream of bases, and how many each has."""
        return sums_before(self._anchors.verified(rows >> 5), self._lengths.verified(rows), rows)

    def sequences(self, starts: Numbers, offsets: Numbers) -> Bytes:
        """`offsets[i+1] - offsets[i]` bases of the stream from `starts[i]` on, for every i."""
        first, last = (self._stream_at + (at >> 2) for at in (starts, starts + np.diff(offsets) + 3))
        self._verify(first, last)
        if self._is_mapped:
            return self._twobit.sequences(starts, offsets)
        return self._twobit.sequences(starts, offsets, self.sections.read_near(first, last))

    def qualities(self, starts: Numbers, offsets: Numbers) -> Bytes:
        """The same for base qualities."""
        if self._is_mapped or self.sections.is_remote:
            return self._qualities.take(starts, offsets)
        flat = empty_bytes(int(offsets[-1]))
        some = max(self.memory >> _GRANULE + 1, 1)  # each maps up to two granules
        for at in range(0, len(starts), some):
            edges = offsets[at : at + some + 1]
            flat[edges[0] : edges[-1]] = self._qualities.take(starts[at : at + some], edges - edges[0])
            self.sections.drop_pages()
        return flat

    def _verify(self, starts: Numbers, ends: Numbers) -> None:
        """Verify the checksums of these bytes, on first use."""
        if not len(starts) or self.sections.verifies_reading:
            return
        if self.sections.is_checked(int(starts.min()), int(ends.max())):
            return
        blocks = np.concatenate([starts // CRC_BYTES, np.maximum(ends - 1, starts) // CRC_BYTES])
        for i in np.flatnonzero(ends - starts > CRC_BYTES).tolist():
            blocks = np.append(blocks, np.arange(int(starts[i]), int(ends[i]), CRC_BYTES) // CRC_BYTES)
        if self.sections.is_remote:
            self.sections.check_blocks(blocks)
            return
        for block in self.sections.unchecked(blocks):
            self.sections.will_need(block * CRC_BYTES, CRC_BYTES)
            self.sections.check_block(block)
            if not self._is_mapped:
                self.sections.drop_pages(block * CRC_BYTES, (block + 1) * CRC_BYTES)

    def one(self, row: int) -> tuple[str, str, str | None]:
        """Name, sequence and quality of one record."""
        start, count = self._sums.one(row)
        line = str(row).encode() if self.lines is None else self.lines.line(row)
        quality = None
        if self.has_quality:
            quality = str(self._qualities_of(start, count).data, "latin-1")
        return name_of(line).decode(errors="replace"), str(self._bases_of(start, count).data, "latin-1"), quality

    def sequence_of(self, row: int) -> Bytes:
        """The sequence of one record."""
        return self._bases_of(*self._sums.one(row))

    def _bases_of(self, start: int, count: int) -> Bytes:
        first, last = self._stream_at + (start >> 2), self._stream_at + (start + count + 3 >> 2)
        if not self.sections.is_checked(first, last):
            self._verify(np.array([first], np.int64), np.array([last], np.int64))
        return self._twobit.one(start, count, None if self._is_mapped else self.sections.read(first, last - first))

    def _qualities_of(self, start: int, count: int) -> Bytes:
        if self._is_mapped and not self.sections.is_remote:
            return self._qualities.one(start, count)
        return self.qualities(np.array([start], np.int64), np.array([0, count], np.int64))

    def lines_of(self, row: int, count: int) -> Iterator[bytes]:
        """Name, sequence and quality of `count` records from a row on, as lines."""
        rows = np.arange(row, row + count, dtype=np.int64)
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum(self.lengths(rows), out=offsets[1:])
        starts = self._sums.one(row)[0] + offsets[:-1]
        quality = self.qualities(starts, offsets) if self.has_quality else None
        return join_lines_of(self.headers(rows), self.sequences(starts, offsets), offsets, quality)

    def length(self, row: int) -> int:
        return int(self.lengths(np.array([row], np.int64))[0])

    def regions(self, rows: Numbers, starts: Numbers, ends: Numbers) -> tuple[Bytes, Numbers]:
        """Bases [start, end) of records."""
        offsets = np.append(0, np.cumsum(ends - starts))
        return self.sequences(self.starts(rows) + starts, offsets), offsets

    def region(self, row: int, start: int, end: int) -> Bytes:
        """Bases [start, end) of one record."""
        first = int(self.starts(np.array([row], np.int64))[0])
        return self.sequences(np.array([first + start], np.int64), np.array([0, end - start], np.int64))

    def headers(self, rows: Numbers) -> tuple[Bytes, Numbers, Numbers]:
        """Header lines without '>': text, starts, ends; the record's number when they were not kept."""
        if self.lines is not None:
            return self.lines.lines(rows)
        texts = [str(row).encode() for row in rows.tolist()]
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        flat = np.frombuffer(bytearray(b"".join(texts)), np.uint8)
        return flat, ends - np.array([len(text) for text in texts], np.int64), ends

    def name_text(self, rows: Numbers) -> NameText:
        """The first words of their headers."""
        return text_in(*self.headers(rows))

    def names_of(self, rows: Numbers) -> list[str]:
        return self.name_text(rows).names()

    def column(self, name: str, rows: Numbers) -> pa.Array:
        """A column of these rows; parsed from their headers if it is not stored."""
        return self.columns.take(name, rows, lengths=self.lengths, headers=self.headers)

    def find(self, name: str) -> list[int]:
        """Rows with this name, in order."""
        if self.lines is None:
            known = name.isascii() and name.isdigit() and name == str(int(name)) and int(name) < self.records
            return [int(name)] if known else []
        return self._name_table.find(name, self.names_of)

    def candidate(self, name: str, after: int) -> int:
        """The next row after a row that may have this name, or -1."""
        if self.lines is None:
            return next((row for row in self.find(name) if row > after), -1)
        return self._name_table.candidate(name, after)

    @cached_property
    def _name_table(self) -> NameTable:
        assert self._names is not None
        return NameTable(self._names)

    def with_names(self) -> "PackFile":
        """The same file, with a name table, built now in a file of its own."""
        say(f"{self.path}: building a table of its {self.records} names, once")
        write_index(self.path, self._write_names)
        return PackFile(self.path, memory=self.memory)

    def verify(self) -> Iterator[str]:
        """Verify the checksums of the file; yields every damage."""
        yield from self.sections.damages()

    def _write_names(self, path: Path) -> None:
        names = NameTableWriter(path.parent, large=True)
        try:
            with SectionsWriter(path) as sections:
                for start in range(0, self.records, _ROWS_AT_ONCE):
                    rows = np.arange(start, min(start + _ROWS_AT_ONCE, self.records), dtype=np.int64)
                    names.append(hash_names(*self.headers(rows)))
                names.finish(sections)
                sections.publish({"what": _NAMES, "of": self._identity()})
        finally:
            names.close()

    def _names_beside(self) -> Sections | None:
        """The name table that was built later, if there is one for this file."""
        for path in index_paths(self.path):
            if path.exists():
                try:
                    sections = Sections(path)
                except BadIndex:
                    continue
                if sections.meta.get("what") == _NAMES and sections.meta["of"] == self._identity():
                    return sections
        return None

    def _identity(self) -> list[int]:
        return [self.sections.num_bytes, self.records, self.bases, self.meta["text_crc32c"]]

    @cached_property
    def _twobit(self) -> TwoBit:
        return TwoBit(self.sections, memory=None if self._is_mapped or self.sections.is_remote else self.memory)

    @cached_property
    def _qualities(self) -> Qualities:
        return Qualities(self.sections, self.meta["grades"])
