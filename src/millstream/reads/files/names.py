"""Names of reads -> record numbers: a hash table on disk, sorted in bounded memory."""

import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from millstream.core.collection import Numbers
from millstream.core.kernels import inlined, kernel
from millstream.core.record import Bytes
from millstream.reads.files.encodings import Words
from millstream.reads.files.records import Checked, table_of, unverified, value_at
from millstream.reads.files.sections import CRC_BYTES, Sections
from millstream.reads.files.sections_writer import SectionsWriter

SMALL = 1 << 20  # files with up to this many records always get a name table
PARTS = 256  # files that a large table is sorted in
_CERTAINLY = 2  # times `small`
_BUCKET = 16  # names per bucket, about
_HASH_BITS = 63


def name_of(header: bytes) -> bytes:
    """The first word of a header line. A Control-A separates the merged headers of NCBI's nr, so it ends a name too."""
    words = header.replace(b"\x01", b" ").split(None, 1)
    return words[0] if words else b""


class NameText(NamedTuple):
    """Names one after another, in UTF-8: name i is `text[offsets[i]:offsets[i + 1]]`."""

    text: Bytes
    offsets: Numbers

    @classmethod
    def of(cls, names: Sequence[str]) -> "NameText":
        coded = [name.encode() for name in names]
        text = np.frombuffer(bytearray(b"".join(coded)), np.uint8)
        return cls(text, np.cumsum([0, *map(len, coded)], dtype=np.int64))

    def names(self) -> list[str]:
        data = self.text.tobytes()
        return [data[start:end].decode(errors="replace") for start, end in pairwise(self.offsets.tolist())]


def text_in(text: Bytes, starts: Numbers, ends: Numbers) -> NameText:
    """The names in the header lines text[starts[i]:ends[i]], as `name_of` has them."""
    offsets, flat = np.zeros(len(starts) + 1, np.int64), np.empty(text.size, np.uint8)
    is_ascii = _cut_names(text, starts, ends, flat, offsets)
    words = NameText(flat[: offsets[-1]], offsets)
    return words if is_ascii else NameText.of(words.names())


def names_in(text: Bytes, starts: Numbers, ends: Numbers) -> list[str]:
    """The same as texts."""
    return text_in(text, starts, ends).names()


def hash_names(text: Bytes, starts: Numbers, ends: Numbers) -> Numbers:
    """63-bit hashes of the first words of text[starts[i]:ends[i]]."""
    out = np.empty(len(starts), np.int64)
    _hash_names(text, starts, ends, out)
    return out


class NameTableWriter:
    """Takes hashes in record order. A table of more than `small` names is written only if `large`."""

    def __init__(self, folder: Path, *, large: bool, small: int = SMALL, parts: int = PARTS) -> None:
        self._folder = folder
        self._large = large
        self._small = small
        self._num_parts = parts
        self._pending: list[Numbers] = []
        self._num_pending = 0
        self._parts: list[BinaryIO] = []
        self._rows = 0
        self.given_up = False  # before there were too many

    @property
    def wanted(self) -> bool:
        """Whether there will be a table."""
        return not self.given_up and (self._large or self._rows <= self._small)

    def expect(self, rows: float) -> None:
        """About how many names will come in all: hashing the first million of many more takes a tenth of indexing."""
        self.given_up = self.given_up or (not self._large and rows > _CERTAINLY * self._small)

    def append(self, hashes: Numbers) -> None:
        self._pending.append(hashes)
        self._num_pending += len(hashes)
        self._rows += len(hashes)
        if not self.wanted:
            self._pending.clear()
        elif self._num_pending >= self._small:
            self._spill()

    def finish(self, sections: SectionsWriter) -> None:
        """Sort and write the table, unless it is not `wanted`."""
        if not self.wanted:
            return
        bits = max(int(self._rows // _BUCKET).bit_length(), 1)
        self._spill()
        numbers, starts = sections.column("names.numbers"), sections.column("names.starts")
        tags = sections.part("names.tags")
        total = 0
        parts = self._parts or [self._part()]
        buckets = (1 << bits) // len(parts)
        for index, part in enumerate(parts):
            part.seek(0)
            pairs = np.frombuffer(part.read(), np.int64).reshape(-1, 2)
            part.close()
            bucket = pairs[:, 0] >> (_HASH_BITS - bits)
            order = np.lexsort((pairs[:, 1], bucket))
            numbers.append(pairs[order, 1])
            tags.write((pairs[order, 0] & 255).astype(np.uint8).tobytes())
            edges = np.arange(index * buckets, (index + 1) * buckets)
            starts.append(total + np.searchsorted(bucket[order], edges))
            total += len(pairs)
        starts.append(np.array([total], np.int64))

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _part(self) -> BinaryIO:
        return tempfile.TemporaryFile(dir=self._folder)

    def _spill(self) -> None:
        if not self._num_pending:
            return
        hashes = np.concatenate(self._pending)
        first = self._rows - len(hashes)
        self._pending.clear()
        self._num_pending = 0
        order = np.argsort(hashes)
        pairs = np.stack([hashes[order], order + first], axis=1)
        if not self._parts:
            # One part is enough for what fits in memory. The number of parts cannot change later.
            count = 1 if not self._large or self._rows < self._small else self._num_parts
            self._parts = [self._part() for _ in range(count)]
        width = _HASH_BITS - (len(self._parts) - 1).bit_length()
        edges = np.searchsorted(pairs[:, 0] >> width, np.arange(len(self._parts) + 1))
        for part, start, end in zip(self._parts, edges[:-1], edges[1:], strict=True):
            part.write(pairs[start:end].tobytes())


class NameTable:
    """The name table of an index or a pack."""

    def __init__(self, sections: Sections) -> None:
        self._starts = sections.column("names.starts")
        self._numbers = sections.column("names.numbers")
        self._tags = sections.view("names.tags")
        self._sections = sections
        self._bits = (self._starts.rows - 1).bit_length() - 1
        tags_at = sections.span("names.tags")[0]
        self._index = sections.words, sections.checked, table_of([self._starts, self._numbers]), self._tags, tags_at

    def find(self, name: str, names_of: Callable[[Numbers], list[str]]) -> list[int]:
        """The records with this name, in order; `names_of` reads the names of records."""
        candidates = self._candidates(name.encode())
        found = names_of(np.array(candidates, np.int64)) if candidates else []
        return [row for row, other in zip(candidates, found, strict=True) if other == name]

    def _candidates(self, name: bytes) -> list[int]:
        """Records whose names have the same hash, in order: nearly always those with this name."""
        text = np.frombuffer(bytearray(name), np.uint8)  # writable, as buffers are: one compilation
        key = int(hash_names(text, np.zeros(1, np.int64), np.array([len(text)], np.int64))[0])
        bucket = key >> (_HASH_BITS - self._bits)
        start, end = self._starts.take(np.array([bucket, bucket + 1], np.int64)).tolist()
        place, _ = self._sections.span("names.tags")
        self._sections.check(place + start, place + end)
        (hits,) = np.nonzero(self._tags[start:end] == key & 255)
        return sorted(self._numbers.take(hits + start).tolist())

    def candidate(self, name: str, after: int) -> int:
        """The next record after `after` whose name has the same hash, or -1; without arrays."""
        word = name.encode()
        while (row := _candidate(word, *self._index, self._bits, after)) < -1:
            self._sections.check_block(-2 - row)
        return row


@kernel
def _cut_names(text: Bytes, starts: Numbers, ends: Numbers, flat: Bytes, offsets: Numbers) -> bool:
    """Fill `flat` and `offsets`; whether all names are ASCII."""
    at, highest = 0, 0
    for index in range(len(starts)):
        position, end = starts[index], ends[index]
        while position < end and _is_blank(int(text[position])):
            position += 1
        while position < end and not _is_blank(int(text[position])):
            highest = max(highest, int(text[position]))
            flat[at] = text[position]
            at += 1
            position += 1
        offsets[index + 1] = at
    return highest < 128


@kernel
def _hash_names(text: Bytes, starts: Numbers, ends: Numbers, out: Numbers) -> None:
    for index in range(len(starts)):
        out[index] = _hash(text, starts[index], ends[index])


@inlined
def _is_blank(byte: int) -> bool:
    return byte == 32 or 9 <= byte <= 13 or byte == 1


@inlined
def _hash(text: Bytes | bytes, first: int, end: int) -> int:
    # Two 32-bit FNV hashes; all products stay below 2^63.
    a = 2166136261
    b = 84696351
    while first < end and text[first] <= 32:
        first += 1
    for position in range(first, end):
        byte = np.int64(text[position])
        if byte <= 32:
            break
        a = ((a ^ byte) * 16777619) & 0xFFFFFFFF
        b = ((b ^ byte) * 709607) & 0xFFFFFFFF
    a = ((a ^ (a >> 16)) * 73244475) & 0xFFFFFFFF
    b = ((b ^ (b >> 15)) * 73244475) & 0xFFFFFFFF
    return int(((a ^ (a >> 16)) << 31) | (b >> 1))


@kernel
def _candidate(
    name: bytes, words: Words, checked: Checked, table: Numbers, tags: Bytes, tags_at: int, bits: int, after: int
) -> int:
    """A row, -1 if there is none, or -2 - a megabyte to verify first. The rows of a bucket ascend."""
    key = _hash(name, 0, len(name))
    bucket = key >> (_HASH_BITS - bits)
    for edge in range(bucket, bucket + 2):
        block = unverified(words, checked, table, 0, edge, edge)
        if block >= 0:
            return -2 - block
    start, end = value_at(words, table, 0, bucket), value_at(words, table, 0, bucket + 1)
    for place in range(start, end):
        block = (tags_at + place) // CRC_BYTES
        if not checked[block]:
            return -2 - block
        if tags[place] == key & 255:
            block = unverified(words, checked, table, 1, place, place)
            if block >= 0:
                return -2 - block
            row = value_at(words, table, 1, place)
            if row > after:
                return row
    return -1
