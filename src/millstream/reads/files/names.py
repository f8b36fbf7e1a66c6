"""From a name to the numbers of the records that bear it: numbers in the order of their names' hashes.

About 4 bytes a record: a packed number and one byte of hash; the names themselves stay in the data file, where a
candidate is looked up. Built in parts on disk, so that a billion names need no more memory than a million.
"""

import tempfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from millstream.source.names import hash_name
from millstream.store.packed import Numbers
from millstream.store.sections import Sections, SectionsWriter

SMALL = 1 << 20  # a file of no more records always gets its table
_BUCKET = 16  # names in a bucket, about
_PARTS = 256
_HASH_BITS = 63


class NameTableWriter:
    """Takes hashes in record order. Past `SMALL` names it goes on only if `large`."""

    def __init__(self, folder: Path, *, large: bool) -> None:
        self._folder = folder
        self._large = large
        self._pending: list[Numbers] = []
        self._num_pending = 0
        self._parts: list[BinaryIO] = []
        self._rows = 0

    @property
    def wanted(self) -> bool:
        """Whether there will be a table."""
        return self._large or self._rows <= SMALL

    def append(self, hashes: Numbers) -> None:
        self._pending.append(hashes)
        self._num_pending += len(hashes)
        self._rows += len(hashes)
        if not self.wanted:
            self._pending.clear()
        elif self._num_pending >= SMALL:
            self._spill()

    def finish(self, sections: SectionsWriter) -> None:
        """Sort and write the table, unless there are too many names for one that nobody asked for."""
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
            # One part is enough for what fits in memory; the number of parts must not change later.
            count = 1 if not self._large or self._rows < SMALL else _PARTS
            self._parts = [self._part() for _ in range(count)]
        width = _HASH_BITS - (len(self._parts) - 1).bit_length()
        edges = np.searchsorted(pairs[:, 0] >> width, np.arange(len(self._parts) + 1))
        for part, start, end in zip(self._parts, edges[:-1], edges[1:], strict=True):
            part.write(pairs[start:end].tobytes())


class NameTable:
    """Looks up candidates; the caller compares names."""

    def __init__(self, sections: Sections) -> None:
        self._starts = sections.column("names.starts")
        self._numbers = sections.column("names.numbers")
        self._tags = sections.view("names.tags")
        self._sections = sections
        self._bits = (self._starts.rows - 1).bit_length() - 1

    def candidates(self, name: bytes) -> list[int]:
        """Records whose name has the same hash, in order; nearly always those of that name."""
        key = hash_name(name)
        bucket = key >> (_HASH_BITS - self._bits)
        start, end = self._starts.take(np.array([bucket, bucket + 1], np.int64)).tolist()
        place, _ = self._sections.place("names.tags")
        self._sections.check(place + start, place + end)
        (hits,) = np.nonzero(self._tags[start:end] == key & 255)
        return sorted(self._numbers.take(hits + start).tolist())
