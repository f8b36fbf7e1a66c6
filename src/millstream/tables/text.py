"""Rows of JSON lines and CSV files by number: one pass finds where blocks of rows begin, and the type of each column.

A type holds for every row: a column of integers with one text in its last row is text in CSV, and mixed in JSON.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import BinaryIO, Literal, cast

import numpy as np
import pyarrow as pa

from millstream.core.batches import Column
from millstream.core.collection import Numbers
from millstream.core.console import Progress, silent
from millstream.core.rows import DELIMITERS, Lines, Row, json_row, split_cells
from millstream.errors import BadSource
from millstream.tables.parquet import DecodedGroups, Pieces, indices_between
from millstream.tables.source import Part, Source, Span

BLOCK_BYTES = 16 << 10  # of rows; larger rows are blocks of their own. The index takes 0.1% of the file
RUN_BYTES = 1 << 20  # blocks read together when a column is read as a whole; of an object, always
_TOGETHER = 16  # runs of an object, requested at once
_CHUNK_ROWS = 1 << 12  # of CSV, whose types are found at once
TYPES = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "text": pa.string(), "json": pa.null()}
Type = Literal["int", "float", "bool", "text", "json"]

# Numbers that are written in the one usual way: 007 and +1 stay text, and so does what would lose digits.
_INT = re.compile(r"0|-?[1-9][0-9]{0,17}")
_FLOAT = re.compile(
    r"-?0|-?[1-9][0-9]{0,14}|-?(?:0|[1-9][0-9]*)?\.[0-9]+|-?(?:0|[1-9][0-9]*)\.|"
    r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]*)?[eE][-+]?[0-9]+|nan|-?inf"
)
_NUMBERS: Mapping[Type, re.Pattern[str]] = {"int": _INT, "float": _FLOAT}
_EXACT = 1 << 53  # larger integers have no float of their own


class TextTable:
    """One file of JSON lines or CSV, with the index that `scan` makes."""

    def __init__(self, source: Source, index: "TextIndex") -> None:
        self.source, self._index = source, index
        self._delimiter = DELIMITERS.get(source.path.suffix.lower())
        self.format = "JSON lines" if self._delimiter is None else "CSV" if self._delimiter == "," else "TSV"
        self.names = list(index.types)
        self.types = {name: TYPES[kind] for name, kind in index.types.items()}
        self._starts, self._firsts = index.starts, index.firsts
        runs = np.searchsorted(self._starts[:-1], np.arange(int(self._starts[0]), int(self._starts[-1]), RUN_BYTES))
        self._runs = np.array([*np.unique(runs), len(self._starts) - 1])  # the first block of each, and the end

    @property
    def is_random(self) -> bool:
        return not self.source.is_remote

    @property
    def num_rows(self) -> int:
        return int(self._firsts[-1])

    @property
    def num_bytes(self) -> int:
        return int(self._starts[-1] - self._starts[0])

    @property
    def run_bytes(self) -> int:
        return self.num_bytes // max(len(self._runs if self.source.is_remote else self._starts) - 1, 1)

    @property
    def fingerprint(self) -> list[int]:
        return [self.source.size, self._index.crc32c]

    def sizes(self, rows: Numbers, names: Sequence[str]) -> Numbers:
        """Of whole rows: all of a row is read."""
        blocks = np.searchsorted(self._firsts, rows, side="right") - 1
        return (self._starts[blocks + 1] - self._starts[blocks]) // (self._firsts[blocks + 1] - self._firsts[blocks])

    def fetch(self, rows: Numbers, names: Sequence[str], cache: DecodedGroups) -> dict[str, Column]:
        """Columns of these rows, which are sorted."""
        found: list[Mapping[str, object]] = []
        blocks = np.searchsorted(self._firsts, rows, side="right") - 1
        if not self.source.is_remote:
            with self.source.open() as file:
                self._fetch(file, rows, blocks, found)
        else:
            run_of = np.searchsorted(self._runs, blocks, side="right") - 1
            runs: list[int] = np.unique(run_of).tolist()
            count = self._together(cache)
            for some in (runs[start : start + count] for start in range(0, len(runs), count)):
                here = np.isin(run_of, some)
                with self.source.open(self._kept(some, cache.here())) as file:
                    self._fetch(file, rows[here], blocks[here], found)
        return {name: _column([self._value(row, name) for row in found], self._index.types[name]) for name in names}

    def will_need(self, first: Numbers, last: Numbers, names: Sequence[str], cache: DecodedGroups) -> None:
        """Request the runs of an object with the rows from `first[i]` to `last[i]`, for every i."""
        runs, count = indices_between(self._firsts[self._runs], first, last), self._together(cache)
        for start in range(0, len(runs), count):
            self._kept(runs[start : start + count], cache.here())

    def column(self, name: str) -> Iterator[pa.Array]:
        """One column of all rows."""
        kind = self._index.types[name]
        values = [self._value(row, name) for row in self._rows()] if kind == "json" else []
        if kind == "json":
            try:
                yield pa.array(values)
            except pa.ArrowException as error:
                raise BadSource(
                    f"{self.source.path}: the values of {name!r} have different types ({error}), so it can be fetched, "
                    "but not used as a label or to split by"
                ) from None
            return
        rows = self._rows()
        while some := list(islice(rows, 1 << 16)):
            yield pa.array([self._value(row, name) for row in some], TYPES[kind])

    def verify(self) -> Iterator[str]:
        """Read everything again."""
        try:
            found = scan(self.source)
        except BadSource as error:
            yield str(error)
        else:
            if found.crc32c != self._index.crc32c or found.types != self._index.types:
                yield f"{self.source.path}: has changed since it was indexed"

    def _rows(self) -> Iterator[Mapping[str, object]]:
        for first in range(0, len(self._runs) - 1, _TOGETHER):
            edges: list[int] = self._runs[first : first + _TOGETHER + 1].tolist()
            with self.source.open(self.source.read(self._spans(range(first, first + len(edges) - 1)))) as file:
                for block, end in pairwise(edges):
                    count = int(self._firsts[end] - self._firsts[block])
                    yield from self._parse(self._read(file, block, end), int(self._firsts[block]), np.arange(count))

    def _fetch(self, file: BinaryIO, rows: Numbers, blocks: Numbers, found: list[Mapping[str, object]]) -> None:
        for block in np.unique(blocks).tolist():
            places = rows[blocks == block] - self._firsts[block]
            found += self._parse(self._read(file, block, block + 1), int(self._firsts[block]), places)

    def _spans(self, runs: Iterable[int]) -> list[Span]:
        starts = self._starts[self._runs]
        return [(int(starts[run]), int(starts[run + 1] - starts[run])) for run in runs]

    def _kept(self, runs: Sequence[int], cache: DecodedGroups) -> list[Part]:
        """Runs of an object, requested together unless they are kept."""
        found = {run: cache.get((self.source, run, "")) for run in runs}
        if None in found.values():
            with cache.loading:
                found = {run: kept or cache.get((self.source, run, "")) for run, kept in found.items()}
                missing = [run for run, kept in found.items() if kept is None]
                spans = self._spans(missing)
                num_bytes = sum(count for _, count in spans)
                cache.make_room(num_bytes)
                for run, (_, data) in zip(missing, self.source.read(spans), strict=True):
                    found[run] = pieces = cast(Pieces, [data])
                    if num_bytes <= cache.limit:
                        cache.put((self.source, run, ""), pieces)
        kept = cast("list[Sequence[memoryview]]", list(found.values()))
        return [(start, pieces[0]) for (start, _), pieces in zip(self._spans(runs), kept, strict=True)]

    @staticmethod
    def _together(cache: DecodedGroups) -> int:
        """How many runs are requested at once."""
        return max(min(cache.limit // 2 // RUN_BYTES, _TOGETHER), 1)

    def _read(self, file: BinaryIO, block: int, end: int) -> bytes:
        file.seek(int(self._starts[block]))
        return file.read(int(self._starts[end] - self._starts[block]))

    def _parse(self, data: bytes, first: int, places: Numbers) -> list[Mapping[str, object]]:
        """Some rows of consecutive blocks, the first of which begins with row `first`."""
        where = f"{self.source.path}: row"
        wanted: list[int] = places.tolist()
        try:
            if self._delimiter is None:
                found = [line for line in data.split(b"\n") if line.strip()]
                return [json_row(found[place], f"{where} {first + place}") for place in wanted]
            lines = (line.decode() for line in io.BytesIO(data))
            texts = [cells for cells in split_cells(lines, self._delimiter) if cells]
            return [dict(zip(self.names, texts[place], strict=True)) for place in wanted]
        except (IndexError, ValueError, csv.Error):
            raise BadSource(
                f"{self.source.path}: rows from {first} on are not what was indexed. Open it again"
            ) from None

    def _value(self, row: Mapping[str, object], name: str) -> object:
        """A value as its column has it; in CSV numbers come as text, and an empty cell is a missing number."""
        value, kind = row.get(name), self._index.types[name]
        if self._delimiter is None:
            return float(cast(float, value)) if kind == "float" and value is not None else value
        if kind == "text":
            return value
        return None if value == "" else (int if kind == "int" else float)(cast(str, value))


class TextIndex:
    """Where the blocks of rows begin (and the last one ends), the number of their first rows, and the types."""

    def __init__(self, starts: Numbers, firsts: Numbers, types: Mapping[str, Type], crc: int) -> None:
        self.starts, self.firsts, self.types, self.crc32c = starts, firsts, dict(types), crc


def scan(source: Source, *, progress: Progress = silent) -> TextIndex:
    """One pass over a file; BadSource, with the line, if it is damaged."""
    path, delimiter = source.path, DELIMITERS.get(source.path.suffix.lower())
    types = JsonTypes() if delimiter is None else CsvTypes()
    starts, firsts, row = list[int](), list[int](), 0
    with source.stream() as file:
        lines = Lines(file)
        start = lines.position
        for found in lines.json_rows(path) if delimiter is None else lines.csv_rows(path, delimiter):
            if types.add(found):  # not a blank line or the header
                if not starts or lines.position - starts[-1] > BLOCK_BYTES:
                    starts.append(start)
                    firsts.append(row)
                    progress(start)
                row += 1
            start = lines.position
    progress(source.size)
    if not types.found():
        raise BadSource(f"{path}: has no columns")
    edges, rows = np.array([*starts, start], np.int64), np.array([*firsts, row], np.int64)
    return TextIndex(edges, rows, types.found(), lines.crc32c)


class JsonTypes:
    """Finds the types of the columns of JSON lines."""

    def __init__(self) -> None:
        self._seen: dict[str, set[object]] = {}

    def add(self, row: Row | Sequence[str] | None) -> bool:
        if row is None:
            return False
        for name, value in cast("Row", row).items():
            kind: object = type(value)
            if isinstance(value, int) and not -_EXACT <= value <= _EXACT:
                kind = "large" if -(1 << 63) <= value < 1 << 63 else "huge"
            if name in self._seen:
                self._seen[name].add(kind)
            else:
                self._seen[name] = {kind}
        return True

    def found(self) -> dict[str, Type]:
        return {name: _json_type(kinds - {type(None)}) for name, kinds in self._seen.items()}


def _json_type(kinds: set[object]) -> Type:
    if kinds <= {str}:
        return "text"
    usual: list[tuple[Type, set[object]]] = [("bool", {bool}), ("int", {int, "large"}), ("float", {int, float})]
    found: list[Type] = [name for name, allowed in usual if kinds <= allowed]
    return found[0] if found else "json"


class CsvTypes:
    """Finds the types of the columns of CSV, whose first row has their names."""

    def __init__(self) -> None:
        self._names: Sequence[str] = []
        self._allowed: list[list[Type]] = []  # for each column, the numeric types of all cells so far
        self._has_values: list[bool] = []
        self._rows: list[Sequence[str]] = []

    def add(self, row: Row | Sequence[str] | None) -> bool:
        cells = cast("Sequence[str]", row)
        if not cells:
            return False
        if not self._names:
            self._names = cells
            self._allowed, self._has_values = [["int", "float"] for _ in cells], [False] * len(cells)
            return False
        self._rows.append(cells)
        if len(self._rows) == _CHUNK_ROWS:
            self._narrow()
        return True

    def found(self) -> dict[str, Type]:
        self._narrow()
        best: list[Type] = [
            kinds[0] if kinds and has else "text" for kinds, has in zip(self._allowed, self._has_values, strict=True)
        ]
        return dict(zip(self._names, best, strict=True))

    def _narrow(self) -> None:
        for place, cells in enumerate(zip(*self._rows, strict=True)):
            present = [cell for cell in cells if cell]
            self._has_values[place] |= bool(present)
            self._allowed[place] = [
                kind for kind in self._allowed[place] if all(map(_NUMBERS[kind].fullmatch, present))
            ]
        self._rows = []


def _column(values: list[object], kind: Type) -> Column:
    """Numbers as an array if none is missing."""
    if kind in ("text", "json") or None in values:
        return values
    return np.array(values, {"int": np.int64, "float": np.float64, "bool": np.bool_}[kind])
