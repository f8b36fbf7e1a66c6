"""A packed read store: rows in, letters out, at memory speed and in any order."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from millstream.collection import Medium
from millstream.console import quoted, say
from millstream.errors import BadIndex
from millstream.records import Bytes
from millstream.source.headers import Headers, Integers
from millstream.source.names import hash_names, name_of
from millstream.store.header_blocks import HeaderBlocks
from millstream.store.header_columns import HeaderColumnReader
from millstream.store.index import index_places, stored_columns
from millstream.store.name_table import NameTable, NameTableWriter
from millstream.store.packed import Numbers, sums_before
from millstream.store.qualities import SECTION as GRADES
from millstream.store.qualities import Qualities
from millstream.store.read_file import NAME, QUALITY, SEQUENCE, Fetched
from millstream.store.sections import CRC_BYTES, MAGIC, Sections, SectionsWriter
from millstream.store.texts import PAGE_BYTES
from millstream.store.twobit import SECTION as STREAM
from millstream.store.twobit import TwoBit

WHAT = "packed reads"
_NAMES = "names of packed reads"
_GRANULE = 16  # log2 of 64 kB: what the kernel maps around a page that is touched
_ROWS_AT_ONCE = 1 << 16
_READ_ONLY = {13, 30}  # EACCES, EROFS


def is_pack(path: Path) -> bool:
    """Whether a file is a packed read store, perhaps a damaged one; indexes of read files are not."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return False
    try:
        return Sections(path).meta.get("what") == WHAT
    except BadIndex:
        return True


def open_pack(path: Path, memory: int) -> "PackFile":
    """A packed read store, open for reading; of its mapped pages it holds no more than `memory` bytes."""
    return PackFile(path, memory=memory)


class PackFile:
    """One packed part of a collection of reads. `rows` are record numbers within it."""

    def __init__(self, path: Path, *, memory: int) -> None:
        self.path = path
        self.sections = sections = _load(path)
        self.meta = cast(dict[str, Any], sections.meta)
        self._memory = memory
        self.records: int = self.meta["records"]
        self.bases: int = self.meta["bases"]
        self.has_quality = GRADES in sections
        self._anchors, self._lengths = sections.column("anchor"), sections.column("bases")
        self._pages = _Pages(sections, memory)
        self._stream_at = sections.place(STREAM)[0]
        self.lines: HeaderBlocks | None = None  # header lines, if they were kept
        if self.meta["codec"] is not None:
            self.lines = HeaderBlocks(sections, self.meta["codec"], memory=max(memory // 8, 1 << 20))
        self.columns: dict[str, HeaderColumnReader] = {}
        for stored in stored_columns(sections):
            self.columns[stored.name] = HeaderColumnReader(stored, sections, self.columns)
        self._names = sections if "names.tags" in sections else self._names_beside()

    @property
    def format(self) -> str:
        """Of the text it was packed from."""
        return f"packed {self.meta['format']}"

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    @property
    def has_names(self) -> bool:
        """Whether a record can be found by its name at once."""
        return self.lines is None or self._names is not None

    @property
    def held_bytes(self) -> int:
        return self._pages.held_bytes + (self.lines.held_bytes if self.lines else 0)

    @property
    def decoded(self) -> int:
        return self.lines.decoded if self.lines else 0

    @property
    def identity(self) -> object:
        """What changes when the file does."""
        return self.meta["text_crc32c"], self.records

    @property
    def medium(self) -> Medium:
        return Medium(self.sections.num_bytes, PAGE_BYTES, is_random=True)

    def will_need(self, first: Numbers, last: Numbers) -> None:
        """Start reading the letters from row `first[i]` to row `last[i]`."""
        starts, ends = self.starts(first) >> 2, self.starts(last) >> 2
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            self.sections.will_need(self._stream_at + start, end - start + PAGE_BYTES)

    def release(self, first: Numbers, last: Numbers) -> None:
        """Pages are let go of when there are too many."""

    def is_indexed(self, name: str) -> bool:
        """Whether a column is stored by itself, not only in the headers."""
        return self.columns[name].stored.kept != "header"

    def distinct(self, name: str) -> Numbers | None:
        """The distinct values of an integer column, if they are stored."""
        values = self.columns[name].distinct
        return None if values is None or isinstance(values, pa.Array) else values

    def fetch(self, rows: Numbers, fields: Sequence[str]) -> Fetched:
        """Letters of these rows, and of quality, `name` and columns what is asked for."""
        columns = {name: self.column(name, rows) for name in fields if name in self.columns}
        if NAME in fields and NAME not in self.columns:
            columns[NAME] = pa.array(self.names_of(rows), pa.string())
        offsets = np.zeros(len(rows) + 1, np.int64)
        flat, quality = np.empty(0, np.uint8), None
        if SEQUENCE in fields or QUALITY in fields:
            np.cumsum(self.lengths(rows), out=offsets[1:])
            starts = self.starts(rows)
            flat = self.letters(starts, offsets)
            quality = self.qualities(starts, offsets) if QUALITY in fields and self.has_quality else None
        return Fetched(flat, offsets, quality, columns)

    def lengths(self, rows: Numbers) -> Numbers:
        return self._lengths.take(rows)

    def starts(self, rows: Numbers) -> Numbers:
        """Where the records begin in the stream of letters."""
        return sums_before(self._anchors.packed(rows >> 5), self._lengths.packed(rows), rows)

    def letters(self, starts: Numbers, offsets: Numbers) -> Bytes:
        """`offsets[i+1] - offsets[i]` letters of the stream from `starts[i]` on, for every i."""
        ends = starts + np.diff(offsets)
        self._pages.touch(self._stream_at + (starts >> 2), self._stream_at + (ends + 3 >> 2))
        flat = self._twobit.letters(starts, offsets)
        self._pages.release()
        return flat

    def qualities(self, starts: Numbers, offsets: Numbers) -> Bytes:
        """The same for quality letters."""
        flat = self._qualities.letters(starts, offsets)
        place, num_bytes = self.sections.place(f"{GRADES}.words")
        at = place + (starts * (num_bytes / max(self.bases, 1))).astype(np.int64)  # about
        self._pages.count(np.minimum(at, place + num_bytes - 1))
        self._pages.release()
        return flat

    def length(self, row: int) -> int:
        return int(self.lengths(np.array([row], np.int64))[0])

    def regions(self, rows: Numbers, starts: Numbers, ends: Numbers) -> tuple[Bytes, Numbers]:
        """Letters [start, end) of records."""
        offsets = np.append(0, np.cumsum(ends - starts))
        return self.letters(self.starts(rows) + starts, offsets), offsets

    def region(self, row: int, start: int, end: int) -> Bytes:
        """Letters [start, end) of one record, whatever its length."""
        first = int(self.starts(np.array([row], np.int64))[0])
        return self.letters(np.array([first + start], np.int64), np.array([0, end - start], np.int64))

    def headers(self, rows: Numbers) -> tuple[Bytes, Numbers, Numbers]:
        """Header lines without '>': text, starts, ends; the record's number when they were not kept."""
        if self.lines is not None:
            return self.lines.lines(rows)
        texts = [str(row).encode() for row in rows.tolist()]
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        flat = np.frombuffer(bytearray(b"".join(texts)), np.uint8)
        return flat, ends - np.array([len(text) for text in texts], np.int64), ends

    def names_of(self, rows: Numbers) -> list[str]:
        """The first words of their headers."""
        flat, starts, ends = self.headers(rows)
        text = flat.tobytes()
        spans = zip(starts.tolist(), ends.tolist(), strict=True)
        return [name_of(text[start:end]).decode(errors="replace") for start, end in spans]

    def column(self, name: str, rows: Numbers) -> pa.Array:
        """A column of these rows; read from their headers if it is kept nowhere else."""
        column = self.columns[name]
        if column.stored.kept != "header":
            return column.take(rows, self.lengths(rows) if column.needs_lengths else rows)
        order = np.argsort(rows, kind="stable")  # the parser wants headers in the order of the text
        parsed = self._header_regex.parse(*self.headers(rows[order])).columns[name]
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        if isinstance(parsed, Integers):
            return pa.array(parsed.values[back], mask=~parsed.valid[back])
        text = parsed.flat.tobytes()
        spans = (values[back].tolist() for values in (parsed.starts, parsed.ends, parsed.valid))
        return pa.array(
            [text[a:b].decode(errors="replace") if valid else None for a, b, valid in zip(*spans, strict=True)],
            pa.string(),
        )

    def find(self, name: str) -> list[int]:
        """Rows of this name, in order."""
        if self.lines is None:
            known = name.isascii() and name.isdigit() and name == str(int(name)) and int(name) < self.records
            return [int(name)] if known else []
        assert self._names is not None
        candidates = NameTable(self._names).candidates(name.encode())
        found = self.names_of(np.array(candidates, np.int64)) if candidates else []
        return [row for row, other in zip(candidates, found, strict=True) if other == name]

    def with_names(self) -> "PackFile":
        """The same file with a table of its names, which is made now in a file of its own."""
        say(f"{self.path}: making a table of its {self.records} names, once")
        for place in index_places(self.path):
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                self._write_names(place)
                return PackFile(self.path, memory=self._memory)
            except OSError as error:
                if error.errno not in _READ_ONLY or place is index_places(self.path)[-1]:
                    raise
        raise AssertionError

    def verify(self) -> Iterator[str]:
        """Check every byte of the file; what is wrong."""
        yield from self.sections.damages()

    def _write_names(self, place: Path) -> None:
        names = NameTableWriter(place.parent, large=True)
        try:
            with SectionsWriter(place) as sections:
                for start in range(0, self.records, _ROWS_AT_ONCE):
                    rows = np.arange(start, min(start + _ROWS_AT_ONCE, self.records), dtype=np.int64)
                    names.append(hash_names(*self.headers(rows)))
                names.finish(sections)
                sections.publish({"what": _NAMES, "of": self._identity()})
        finally:
            names.close()

    def _names_beside(self) -> Sections | None:
        """The table of names that was made later, if there is one and it is of this very file."""
        for place in index_places(self.path):
            if place.exists():
                try:
                    sections = Sections(place)
                except BadIndex:
                    continue
                if sections.meta.get("what") == _NAMES and sections.meta["of"] == self._identity():
                    return sections
        return None

    def _identity(self) -> list[int]:
        return [self.sections.num_bytes, self.records, self.bases, self.meta["text_crc32c"]]

    @cached_property
    def _twobit(self) -> TwoBit:
        return TwoBit(self.sections)

    @cached_property
    def _qualities(self) -> Qualities:
        return Qualities(self.sections.column(GRADES), self.meta["grades"])

    @cached_property
    def _header_regex(self) -> Headers:
        return Headers(self.meta["settings"]["header_regex"])


class _Pages:
    """The mapped pages of a file: checked when they are first used, let go when there are too many."""

    def __init__(self, sections: Sections, memory: int) -> None:
        self._sections = sections
        self._memory = memory
        self._touched = np.zeros((sections.num_bytes >> _GRANULE) + 1, np.bool_)
        self._is_small = sections.num_bytes <= memory

    @property
    def held_bytes(self) -> int:
        return int(np.count_nonzero(self._touched)) << _GRANULE

    def touch(self, starts: Numbers, ends: Numbers) -> None:
        """These bytes are about to be read."""
        if not len(starts):
            return
        blocks = np.concatenate([starts // CRC_BYTES, np.maximum(ends - 1, starts) // CRC_BYTES])
        longest = int((ends - starts).max())
        if longest > CRC_BYTES:
            for i in np.flatnonzero(ends - starts > CRC_BYTES).tolist():
                blocks = np.append(blocks, np.arange(int(starts[i]), int(ends[i]), CRC_BYTES) // CRC_BYTES)
        for block in self._sections.unchecked(blocks):
            self._sections.will_need(block * CRC_BYTES, CRC_BYTES)
            self._sections.check_block(block)
            self._touched[block * CRC_BYTES >> _GRANULE : (block + 1) * CRC_BYTES >> _GRANULE] = True
            self.release()
        self.count(starts)
        for i in np.flatnonzero(ends - starts > 1 << _GRANULE).tolist() if longest > 1 << _GRANULE else ():
            self._touched[starts[i] >> _GRANULE : (ends[i] >> _GRANULE) + 1] = True

    def count(self, starts: Numbers) -> None:
        """These bytes were read."""
        if not self._is_small:
            self._touched[starts >> _GRANULE] = True

    def release(self) -> None:
        """Let all pages go when they are more than the budget."""
        if not self._is_small and self.held_bytes > self._memory:
            self._sections.drop_pages()
            self._touched[:] = False


def _load(path: Path) -> Sections:
    sections = Sections(path, remedy=f"Pack it again: millstream pack SOURCE {quoted(path)} --rebuild")
    if sections.meta.get("what") != WHAT:
        raise BadIndex(
            f"{path}: is an {sections.meta.get('what')}, not {WHAT} (millstream pack SOURCE OUT makes those)"
        )
    return sections
