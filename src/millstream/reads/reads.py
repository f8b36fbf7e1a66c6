"""Reads as a collection: FASTA or FASTQ files, compressed or not, by record number."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Literal, Self, cast, overload

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike

from millstream.core.batches import chunked, values
from millstream.core.collection import PIECE, Collection, Medium, Numbers, whole_numbers
from millstream.core.config import config_hash
from millstream.core.console import format_bytes
from millstream.core.record import Bytes
from millstream.errors import BadSetting, BadSource
from millstream.reads.batch import Read, ReadBatch, as_list, join_parts
from millstream.reads.files import BYTES_PER_BASE, NAME, QUALITY, SEQUENCE, Fetched, ReadFile, is_large
from millstream.reads.mapping import LabelMapping
from millstream.reads.names import FILE, files_of, find_region, name_or_file, where_of
from millstream.reads.pack import PackFile
from millstream.reads.single import fetch_reads, iterate

LONG_BASES = 64 << 10  # of a record that is not read only to see its name
LABEL = "label"
Unknown = Literal["error", "null"]  # for class ids that are not in the mapping; null: no label
Part = ReadFile | PackFile  # one file of a collection


class Reads(Collection):
    """FASTA/FASTQ files open for random access by number. Made by `ms.open`.

    Safe to use from threads, after fork, and pickled into other processes (it reopens by path).

    >>> reads = ms.open("reads.fa.gz", header_regex=r"lbl\\|(?P<class_id>\\d+)")
    >>> sequence, bases, part = reads[7].sequence, reads.fetch([3, 1, 4]).flat, reads.region(7, 10, 20)
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        reopen: "Callable[[int | None], Reads]",
        mapping: LabelMapping | None = None,
        unknown: Unknown = "error",
    ) -> None:
        self._parts = list(parts)
        self._reopen = reopen
        self._mapping, self._unknown = mapping, unknown
        self._starts = np.array(list(accumulate((part.records for part in parts), initial=0)), np.int64)
        self._first_numbers: list[int] = self._starts.tolist()
        self._first_of = lru_cache(maxsize=1024)(self._find_first)
        self._header_columns = self._check_columns()
        self.has_large = any(is_large(part.longest, part.memory) for part in self._parts)
        self.longest = max(part.longest for part in self._parts)
        if mapping is not None:
            self._check_mapping(mapping)
        self._has_columns = bool(self.column_names)
        self._stored = {name for name in self._header_columns if self._is_indexed(name)}

    @property
    def parts(self) -> list[Part]:
        """The files, in order."""
        return list(self._parts)

    @property
    def paths(self) -> list[Path]:
        return [part.path for part in self._parts]

    @property
    def formats(self) -> list[str]:
        """The formats of the files: `fasta`, `fastq in gzip`, `packed fasta`, ..."""
        return sorted({part.format for part in self._parts})

    @property
    def index_paths(self) -> list[Path]:
        return [part.sections.path for part in self._parts]

    @property
    def index_bytes(self) -> int:
        """Bytes of the indexes."""
        return sum(part.sections.num_bytes for part in self._parts)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @overload
    def __getitem__(self, number: int) -> Read: ...
    @overload
    def __getitem__(self, number: slice) -> list[Read]: ...
    def __getitem__(self, number: int | slice) -> Read | list[Read]:
        if isinstance(number, slice):
            return list(iterate(self, range(*number.indices(len(self)))))
        if not hasattr(number, "__index__"):
            raise BadSetting(f"reads[{number!r}]: must be a whole number or a slice. By name: reads.by_name(...)")
        place = self._number(number)
        part, row = self._part_of(place)
        fields = None if self.has_large else part.one(row)
        if fields is None:
            return fetch_reads(self, np.array([place], np.int64))[0]
        return Read(*fields, (self, place) if self._has_columns else None)

    def __iter__(self) -> Iterator[Read]:
        return iterate(self, range(len(self)))

    def columns_of(self, number: int) -> dict[str, object]:
        """The columns of one read."""
        names = tuple(self.column_names)
        return dict(zip(names, self.values_of(number, names), strict=True))

    def values_of(self, number: int, names: tuple[str, ...]) -> list[object]:
        """The values of some columns of one read."""
        if self._stored.issuperset(names):
            part, row = self._part_of(number)
            return part.columns.one(row, names, lengths=part.lengths)
        columns = self.fetch([number], names).columns
        return [as_list(columns[name])[0] for name in names]

    def sequence_of(self, number: int) -> bytes | Bytes:
        """The sequence of one read, without the rest of it."""
        part, row = self._part_of(number)
        found = None if self.has_large else part.sequence_of(row)
        return self[number].sequence.encode("latin-1") if found is None else found

    def fetch(self, numbers: Sequence[int] | Numbers, fields: Sequence[str] | None = None) -> ReadBatch:
        """Sequences and columns of many reads, in the given order.

        `fields` may contain `sequence`, `quality`, `name`, `file` and any column; default: the sequence, the quality of
        FASTQ, and every column in the index. A column that is only in the headers (such as a read's own name) is parsed
        from there if it is requested.
        """
        wanted = self._check(whole_numbers(numbers))
        names = self._fields(fields)
        needed = [*names, self._mapping.key] if self._mapping else names
        split = self.split(wanted)
        if self.has_large and (SEQUENCE in names or QUALITY in names):
            self.check_memory(wanted)
        parts = [part.fetch(rows, needed) for part, rows, _ in split]
        fetched = parts[0] if len(parts) == 1 else join_parts(parts, [places for _, _, places in split])
        columns = {name: fetched.columns[name] for name in names if name in fetched.columns}
        if self._mapping:
            columns |= self._labels(self._mapping, names, fetched.columns[self._mapping.key])
        if FILE in names and FILE not in columns:
            columns[FILE] = files_of(self._parts, np.searchsorted(self._starts, wanted, side="right") - 1)
        plain = {name: values(column) for name, column in columns.items()}
        return ReadBatch(wanted, fetched.flat, fetched.offsets, plain, fetched.quality)

    def lengths(self, numbers: Sequence[int] | Numbers) -> Numbers:
        """The length of each read, in bases, from the index."""
        wanted = self._check(whole_numbers(numbers))
        out = np.empty(len(wanted), np.int64)
        for part, rows, places in self.split(wanted):
            out[places] = part.lengths(rows)
        return out

    def check_memory(self, numbers: Numbers) -> None:
        """BadSetting if one of these records is too large for the memory budget. A small gzip file may have such."""
        for part, rows, places in self.split(numbers):
            lengths = part.lengths(rows)
            if len(rows) and is_large(longest := int(lengths.max()), part.memory):
                number = int(numbers[places][lengths.argmax()])
                need, has = (format_bytes(b * len(self._parts)) for b in (longest * BYTES_PER_BASE, part.memory))
                raise BadSetting(
                    f"{part.path}: record {number} has {longest:,} bases, too many for the memory budget of {has}; "
                    f"reading it needs {need}. Raise memory, or read a part of it: reads.region({number}, start, end)"
                )

    def find(self, name: str) -> list[int]:
        """The numbers of all records with this name, the first word of the header line."""
        found: list[int] = []
        for index, first in enumerate(self._first_numbers[:-1]):
            found += [first + row for row in self._with_names(index).find(name)]
        return found

    def _with_names(self, index: int) -> Part:
        """A part with a table of names, which may be built now."""
        if not self._parts[index].has_names:
            self._parts[index] = self._parts[index].with_names()
        return self._parts[index]

    def _find_first(self, name: str) -> int | None:
        return next(iter(self.find(name)), None)

    def by_name(self, name: str) -> Read:
        """The first record with this name; KeyError if there is none."""
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadSetting(f"by_name({name!r}): must be a text")
        if self.longest > LONG_BASES:
            return self[self._number(name)]
        for index, first in enumerate(self._first_numbers[:-1]):
            part = self._with_names(index)
            row = part.candidate(name, -1)
            while row >= 0:
                read = self[first + row]
                if read.name == name:
                    return read
                row = part.candidate(name, row)
        raise KeyError(f"{self._where()}: no record named {name!r}")

    def region(self, name: str | int, start: int | None = None, end: int | None = None) -> str:
        """Bases [start, end) of the record with this name or number, without reading the rest of it.

        Without `start` and `end`, a text is a name or a region as samtools has them, from 1 with both ends included.

        >>> same = reads.region(7, 10, 20), reads.region(f"{reads[7].name}:11-20")
        """
        if start is None and end is None and isinstance(name, str):
            _, name, start, end = find_region(self, name)
        number = self._number(name)
        start, end = start or 0, int(self.lengths([number])[0]) if end is None else end
        part, row = self._part_of(number)
        if not 0 <= start <= end <= part.length(row):
            has = f"which has {part.length(row)} bases"
            raise IndexError(f"{self._where()}: region {start}:{end} of record {name!r}, {has}")
        return part.region(row, start, end).tobytes().decode("latin-1") if end > start else ""

    def regions(self, numbers: Sequence[int] | Numbers, starts: ArrayLike, ends: ArrayLike) -> ReadBatch:
        """Bases [start, end) of many records at once."""
        wanted = self._check(whole_numbers(numbers))
        begin, end = (np.broadcast_to(np.asarray(at, np.int64), wanted.shape) for at in (starts, ends))
        lengths = self.lengths(wanted)
        (wrong,) = np.nonzero((begin < 0) | (begin > end) | (end > lengths))
        if len(wrong):
            at = int(wrong[0])
            raise IndexError(
                f"{self._where()}: region {begin[at]}:{end[at]} of record {wanted[at]}, which has {lengths[at]} bases"
            )
        split = self.split(wanted)
        parts = [Fetched(*part.regions(rows, begin[at], end[at]), None, {}) for part, rows, at in split]
        fetched = parts[0] if len(parts) == 1 else join_parts(parts, [places for _, _, places in split])
        return ReadBatch(wanted, fetched.flat, fetched.offsets, {})

    @property
    def field_names(self) -> list[str]:
        return list(dict.fromkeys([SEQUENCE, QUALITY, NAME, *self.column_names, FILE]))

    def sizes(self, numbers: Numbers, fields: Sequence[str]) -> Numbers:
        """How many bytes `fetch` takes for each read."""
        per_base = (SEQUENCE in fields) + (QUALITY in fields)
        others = 8 * len(fields) + 16  # a number per column, and the read's own number and offset
        return self.lengths(numbers) * per_base + others if per_base else np.full(len(numbers), others, np.int64)

    @property
    def medium(self) -> Medium:
        media = [part.medium for part in self._parts]
        return Medium(
            sum(medium.num_bytes for medium in media),
            max(medium.run_bytes for medium in media),
            all(medium.is_random for medium in media),
            any(medium.is_remote for medium in media),
        )

    @property
    def fingerprint(self) -> str:
        mapping = {n: self._mapping.column(n).to_pylist() for n in self._mapping.labels} if self._mapping else None
        beside = [part.columns.identity for part in self._parts]
        more = {"beside": beside} if any(one is not None for one in beside) else {}
        return config_hash({"files": [part.identity for part in self._parts], "mapping": mapping, **more})

    def within(self, memory: int) -> Self:
        """The same reads, reopened with another memory budget."""
        return cast(Self, self._reopen(memory))

    def will_need(self, first: Numbers, last: Numbers) -> None:
        """Start reading the reads from `first[i]` to `last[i]`."""
        for part, rows, ends in self._ranges(first, last):
            part.will_need(rows, ends)

    def release(self, first: Numbers, last: Numbers) -> None:
        for part, rows, ends in self._ranges(first, last):
            part.release(rows, ends)

    def _ranges(self, first: Numbers, last: Numbers) -> Iterator[tuple[Part, Numbers, Numbers]]:
        for part, rows, at in self.split(first):
            ends = last[at] - self._first_numbers[self._parts.index(part)]
            yield part, rows, np.clip(ends, rows, part.records - 1)

    @property
    def column_names(self) -> list[str]:
        """The columns of the headers, and those from the mapping."""
        return [*self._header_columns, *(self._mapping_names(self._mapping) if self._mapping else ())]

    @property
    def indexed_columns(self) -> list[str]:
        """The columns that are in the index, or from the mapping, and not only in the headers."""
        return [name for name in self.column_names if self._is_indexed(name)]

    @property
    def table(self) -> pa.Table:
        """Length and columns of every read as one Arrow table; without columns that are only in the headers."""
        names = self.indexed_columns
        rows = [np.arange(part.records, dtype=np.int64) for part in self._parts]
        lengths = chunked([pa.array(part.lengths(some)) for part, some in zip(self._parts, rows, strict=True)])
        return pa.table({"length": lengths, **{name: self.column(name) for name in names}}).unify_dictionaries()

    def column(self, name: str, start: int = 0, end: int | None = None) -> pa.ChunkedArray:
        """One column of every read, or of those from number `start` to `end`; also `name` and `file`."""
        if name in (NAME, FILE) and name not in self.column_names:
            split = self.split(np.arange(start, len(self) if end is None else end, dtype=np.int64))
            return name_or_file(name, [(part, rows) for part, rows, _ in split])
        if name not in self.column_names:
            raise KeyError(f"{self._where()}: no column {name!r}; it has {', '.join(self.column_names) or 'none'}")
        key = name if name in self._header_columns else self._mapping.key if self._mapping else name
        edges = np.clip(
            [start, len(self) if end is None else end] - self._starts[:-1, None], 0, np.diff(self._starts)[:, None]
        )
        rows = [np.arange(*span, dtype=np.int64) for span in edges.tolist()]
        chunks = [part.column(key, some) for part, some in zip(self._parts, rows, strict=True)]
        if name not in self._header_columns and self._mapping:
            chunks = [self._labels(self._mapping, [name], chunk)[name] for chunk in chunks]
        return chunked(chunks)

    def column_pieces(self, name: str) -> Iterator[pa.ChunkedArray]:
        for start in range(0, len(self), PIECE):
            yield self.column(name, start, min(start + PIECE, len(self)))

    @property
    def num_bases(self) -> int:
        return sum(part.bases for part in self._parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of the data files."""
        return sum(part.path.stat().st_size for part in self._parts)

    @property
    def held_bytes(self) -> int:
        """Bytes of decoded blocks and mapped pages held now; at most `memory`."""
        return sum(part.held_bytes for part in self._parts)

    @property
    def decoded_blocks(self) -> int:
        """Number of compressed blocks decoded so far."""
        return sum(part.decoded for part in self._parts)

    def __reduce__(self) -> tuple[object, ...]:
        return self._reopen, (None,)

    def __repr__(self) -> str:
        size = f"{len(self)} reads, {self.num_bases} bases, {format_bytes(self.num_bytes)}"
        columns = f"\n  {', '.join(self.column_names)}" if self.column_names else ""
        return f"Reads({self._where()}: {size}){columns}"

    def _where(self) -> str:
        return where_of(self.paths)

    def _check(self, numbers: Numbers) -> Numbers:
        if len(numbers) and not (-len(self) <= numbers.min() and numbers.max() < len(self)):
            wrong = numbers[(numbers < -len(self)) | (numbers >= len(self))]
            raise IndexError(f"record {wrong[0]} of {len(self)} in {self._where()}")
        return np.where(numbers < 0, numbers + len(self), numbers)

    def _part_of(self, number: int) -> tuple[Part, int]:
        """The part with a record, and its row there."""
        index = bisect_right(self._first_numbers, number) - 1 if len(self._parts) > 1 else 0
        return self._parts[index], number - self._first_numbers[index]

    def _number(self, name: str | int) -> int:
        if not isinstance(name, str):
            number = int(name)
            size = self._first_numbers[-1]
            if not -size <= number < size:
                raise IndexError(f"record {name} of {len(self)} in {self._where()}")
            return number if number >= 0 else number + size
        number = self._first_of(name)
        if number is None:
            raise KeyError(f"{self._where()}: no record named {name!r}")
        return number

    def _fields(self, fields: Sequence[str] | None) -> list[str]:
        if fields is None:
            return [SEQUENCE, QUALITY, *self.indexed_columns]
        if isinstance(fields, str):
            raise ValueError(f"fields must be a list of names, as in fields=[{fields!r}]")
        for name in fields:
            if name not in self.field_names:
                raise ValueError(f"{self._where()}: no field {name!r}; it has {', '.join(self.field_names)}")
        return list(fields)

    def _is_indexed(self, name: str) -> bool:
        return name not in self._header_columns or all(part.columns.is_indexed(name) for part in self._parts)

    def split(self, numbers: Numbers) -> list[tuple[Part, Numbers, Numbers | slice]]:
        """The parts with these records: part, rows within it, and their places among `numbers`."""
        if len(self._parts) == 1:
            return [(self._parts[0], numbers, slice(None))]
        owner = np.searchsorted(self._starts, numbers, side="right") - 1
        split: list[tuple[Part, Numbers, Numbers | slice]] = []
        for index in map(int, np.unique(owner)):
            (places,) = np.nonzero(owner == index)
            split.append((self._parts[index], numbers[places] - self._starts[index], places))
        return split or [(self._parts[0], numbers, slice(None))]

    def _check_columns(self) -> list[str]:
        names = self._parts[0].columns.names
        for part in self._parts[1:]:
            if part.columns.names != names:
                raise BadSource(
                    f"{part.path} has the columns {', '.join(part.columns.names) or '(none)'}, {self._parts[0].path} "
                    f"has {', '.join(names) or '(none)'}. Use one header_regex for all files"
                )
        return names

    def _check_mapping(self, mapping: LabelMapping) -> None:
        if mapping.key not in self._header_columns:
            raise BadSource(
                f"the reads have no column {mapping.key!r}, which the mapping needs; they have "
                f"{', '.join(self._header_columns) or 'none'}. Add a group named {mapping.key!r} to header_regex, a "
                "column file to the mapping, or labels=TABLE"
            )
        for part in self._parts:
            distinct = part.columns.distinct(mapping.key)
            if distinct is None and not pa.types.is_integer(part.column(mapping.key, np.arange(0)).type):
                raise BadSource(
                    f"{part.path}: {mapping.key} is text, but numbers in the mapping. Let its group in header_regex "
                    f"match only digits, as in (?P<{mapping.key}>\\d+)"
                )
            if self._unknown == "null":
                continue
            if distinct is None:
                distinct = part.column(mapping.key, np.arange(part.records)).unique().drop_null().to_numpy()
            mapping.check(distinct, where=str(part.path))

    def _mapping_names(self, mapping: LabelMapping) -> list[str]:
        return [LABEL, *(_label_name(name) for name in mapping.labels if name not in self._header_columns)]

    def _labels(self, mapping: LabelMapping, names: Sequence[str], keys: pa.Array) -> dict[str, pa.Array]:
        """The mapping's columns for these class ids; None for a read without one."""
        wanted = [name for name in self._mapping_names(mapping) if name in names]
        if not wanted:
            return {}
        known = keys.is_valid().to_numpy(zero_copy_only=False)
        rows = np.full(len(keys), -1, np.int64)
        ids = keys.drop_null().to_numpy()
        rows[known] = mapping.rows(ids) if self._unknown == "error" else mapping.known_rows(ids)
        found = pa.array(rows, mask=rows < 0)
        columns: dict[str, pa.Array] = {}
        for name in wanted:
            source = next((label for label in mapping.labels if _label_name(label) == name), None)
            columns[name] = found if source is None else mapping.column(source).take(found)
        return columns


def _label_name(name: str) -> str:
    """`label` is the number of the class; a column of that name in the mapping is its text."""
    return "label_name" if name == LABEL else name
