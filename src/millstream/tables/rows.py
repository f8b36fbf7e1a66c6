"""Rows of tables as a collection; the index of a large text file is kept beside it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, Self, cast

import numpy as np
import pyarrow as pa

from millstream.core.batches import Column, join_columns
from millstream.core.bucket import CONNECTIONS
from millstream.core.collection import Collection, Medium, Numbers, checked_numbers
from millstream.core.config import config_hash, parse_bytes, parse_json
from millstream.core.console import format_bytes, progress, say
from millstream.core.fingerprint import Fingerprint
from millstream.core.memory import available_bytes
from millstream.core.remote import is_url, to_path
from millstream.core.tables import publish_table, read_table
from millstream.errors import AccessDenied, BadSource, RemoteError
from millstream.tables.parquet import DecodedGroups, ParquetTable
from millstream.tables.source import Source
from millstream.tables.text import TextIndex, TextTable, scan

PARQUET = (".parquet", ".pq")
KEY = "question_id"  # as in traces: rows of one question stay together in a split
SUFFIX = ".rows"  # of an index
SMALL_BYTES = 16 << 20  # read again in less than a second, so the index is not kept
_VERSION = "1"
_ITERATED = 1024  # rows


class Table(Protocol):
    """One file of rows."""

    @property
    def source(self) -> Source: ...
    @property
    def format(self) -> str: ...
    @property
    def names(self) -> list[str]: ...
    @property
    def types(self) -> Mapping[str, pa.DataType]: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def run_bytes(self) -> int: ...
    @property
    def is_random(self) -> bool: ...
    @property
    def fingerprint(self) -> list[int]: ...
    def sizes(self, rows: Numbers, names: Sequence[str]) -> Numbers: ...
    def fetch(self, rows: Numbers, names: Sequence[str], cache: DecodedGroups) -> Mapping[str, Column]: ...
    def will_need(self, first: Numbers, last: Numbers, names: Sequence[str], cache: DecodedGroups) -> None: ...
    def column(self, name: str) -> Iterator[pa.Array]: ...
    def verify(self) -> Iterator[str]: ...


class Rows(Collection):
    """Rows of Parquet, JSON lines or CSV files; a row is a dict. Opened by `ms.open`.

    A `fetch` returns integers, floats and booleans as arrays if none is missing, lists of numbers in Parquet as one
    array per row, and anything else as a list of Python values.

    >>> questions = ms.open("triviaqa.jsonl")
    >>> texts = questions.fetch([2, 0], ["question"])["question"]
    """

    def __init__(self, tables: Sequence[Table], *, memory: int) -> None:
        self.tables = list(tables)
        first = self.tables[0]
        for table in self.tables:
            if twice := [name for name in table.names if table.names.count(name) > 1]:
                raise BadSource(f"{table.source.path}: has two columns {twice[0]!r}. Rename one of them")
            if set(table.names) != set(first.names):
                differ = ", ".join(sorted(set(table.names) ^ set(first.names)))
                raise BadSource(
                    f"{table.source.path}: has other columns than {first.source.path} (only in one of them: {differ}). "
                    "Open them one by one"
                )
        self._edges = np.cumsum([0, *(table.num_rows for table in self.tables)], dtype=np.int64)
        self._cache = DecodedGroups(memory)
        self._used: list[str] = []  # the columns asked for last

    def __len__(self) -> int:
        return int(self._edges[-1])

    def __getitem__(self, number: int) -> dict[str, object]:
        return next(self._records(checked_numbers([number], len(self))))

    def __iter__(self) -> Iterator[dict[str, object]]:
        for start in range(0, len(self), _ITERATED):
            yield from self._records(np.arange(start, min(start + _ITERATED, len(self))))

    def fetch(self, numbers: Sequence[int] | Numbers, fields: Sequence[str] | None = None) -> dict[str, Column]:
        names = self._checked(fields)
        wanted = checked_numbers(numbers, len(self))
        if not len(wanted):
            return {name: [] for name in names}
        order = np.argsort(wanted, kind="stable")
        rows = wanted[order]
        owner = np.searchsorted(self._edges, rows, side="right") - 1
        places: list[int] = np.unique(owner).tolist()
        found = [self.tables[one].fetch(rows[owner == one] - self._edges[one], names, self._cache) for one in places]
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        if len(found) > 1:
            return join_columns(found, back)
        return {name: _reordered(column, back) for name, column in found[0].items()}

    @property
    def field_names(self) -> list[str]:
        return list(self.tables[0].names)

    @property
    def paths(self) -> list[Path]:
        return [table.source.path for table in self.tables]

    @property
    def types(self) -> dict[str, str]:
        """The type of each column, in words."""
        return {name: _type_name(kind) for name, kind in self.tables[0].types.items()}

    def column(self, name: str) -> pa.ChunkedArray:
        (name,) = self._checked([name])
        chunks = [chunk for table in self.tables for chunk in table.column(name)]
        kinds = {chunk.type for chunk in chunks if not pa.types.is_null(chunk.type)}
        if len(kinds) > 1:
            kind = pa.float64() if all(map(_is_number, kinds)) else pa.string()
            chunks = [chunk.cast(kind) for chunk in chunks]
        return pa.chunked_array(chunks) if chunks else pa.chunked_array([pa.nulls(0, self.tables[0].types[name])])

    def sizes(self, numbers: Numbers, fields: Sequence[str]) -> Numbers:
        names = self._used = self._checked(fields)  # a loader asks for sizes first
        owner = np.searchsorted(self._edges, numbers, side="right") - 1
        out = np.empty(len(numbers), np.int64)
        places: list[int] = np.unique(owner).tolist()
        for one in places:
            out[owner == one] = self.tables[one].sizes(numbers[owner == one] - self._edges[one], names)
        return out + 24

    def will_need(self, first: Numbers, last: Numbers) -> None:
        """Request these rows of objects, the columns that were asked for last, and keep them within the budget."""
        for table, low, high in zip(self.tables, self._edges[:-1].tolist(), self._edges[1:].tolist(), strict=True):
            if table.source.is_remote and (here := (last >= low) & (first < high)).any():
                ends = np.maximum(first[here], low) - low, np.minimum(last[here], high - 1) - low
                table.will_need(*ends, self._used, self._cache)

    @property
    def medium(self) -> Medium:
        num_bytes, longest = sum(table.num_bytes for table in self.tables), max(t.run_bytes for t in self.tables)
        is_random, is_remote = all(t.is_random for t in self.tables), any(t.source.is_remote for t in self.tables)
        return Medium(num_bytes, longest, is_random, is_remote)

    @property
    def fingerprint(self) -> str:
        return config_hash({"tables": [table.fingerprint for table in self.tables], "columns": self.field_names})

    @property
    def default_key(self) -> str | None:
        """`question_id`, if there is such a column."""
        return KEY if KEY in self.field_names else None

    def within(self, memory: int) -> Self:
        return type(self)(self.tables, memory=memory)

    def verify(self) -> Iterator[str]:
        """Read everything; yields every damage."""
        for table in self.tables:
            yield from table.verify()

    def __repr__(self) -> str:
        more = f" and {len(self.tables) - 1} more files" if len(self.tables) > 1 else ""
        columns = ", ".join(f"{name} {kind}" for name, kind in self.types.items())
        size = format_bytes(sum(table.source.size for table in self.tables))
        return f"Rows({str(self.paths[0])!r}{more}: {len(self)} rows, {size}, {self.fingerprint})\n  {columns}"

    def _records(self, numbers: Numbers) -> Iterator[dict[str, object]]:
        columns = self.fetch(numbers)
        for place in range(len(numbers)):
            values = {name: column[place] for name, column in columns.items()}
            yield {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}

    def _checked(self, names: Sequence[str] | None) -> list[str]:
        if isinstance(names, str):
            raise ValueError(f"fields must be a list of names, as in fields=[{names!r}]")
        known = self.field_names
        for name in names or ():
            if name not in known:
                raise ValueError(f"{self.paths[0]}: no column {name!r}; it has {', '.join(known)}")
        return known if names is None else list(names)


def open_rows(paths: Sequence[Path], *, memory: int | str | None = None, index_dir: str | Path | None = None) -> Rows:
    """The rows of files as one collection, in the order given; large text files are indexed first."""
    folder = None if index_dir is None else to_path(index_dir)

    def opened(path: Path) -> Table:
        return ParquetTable(path) if path.suffix.lower() in PARQUET else _open_text(path, folder)

    if len(paths) > 1 and all(is_url(path) and path.suffix.lower() in PARQUET for path in paths):
        with ThreadPoolExecutor(CONNECTIONS) as pool:  # what is slow is to wait for answers
            tables = list(pool.map(opened, paths))
    else:
        tables = [opened(path) for path in paths]
    return Rows(tables, memory=available_bytes() // 2 if memory is None else parse_bytes(memory))


def _open_text(path: Path, folder: Path | None) -> TextTable:
    source = Source.at(path)
    if source.size < SMALL_BYTES:
        return TextTable(source, scan(source))
    file = path.with_name(path.name + SUFFIX) if folder is None else folder / (path.name + SUFFIX)
    index = _load(file, path)
    if index is None:
        with progress(f"index {path.name}", source.size, unit="bytes") as update:
            index = scan(source, progress=update)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            _save(file, source, index)
        except (PermissionError, RemoteError):  # such as a web server
            say(f"{file}: cannot be written, so the index is not kept. Choose a folder for it with index_dir=...")
    return TextTable(source, index)


def _save(file: Path, source: Source, index: TextIndex) -> None:
    url = str(source.path) if source.etag else None
    samples = source.samples_crc32c()
    mark = Fingerprint(source.size, source.mtime_ns, samples, index.crc32c, url, source.etag)
    about = {"types": index.types, "crc32c": index.crc32c, "fingerprint": mark.to_json()}
    columns = {"start": pa.array(index.starts), "row": pa.array(index.firsts)}
    table = pa.table(columns)
    metadata = {"millstream.rows": _VERSION, "about": json.dumps(about)}
    publish_table(file, table.cast(table.schema.with_metadata(metadata)))


def _load(file: Path, path: Path) -> TextIndex | None:
    """The index of a file; None if there is none that fits the file as it is now."""
    try:
        table = read_table(file)
        metadata = table.schema.metadata or {}
        if metadata.get(b"millstream.rows") != _VERSION.encode():
            raise ValueError("it is from another version of millstream")
        about = parse_json(metadata[b"about"])
        difference = Fingerprint.of_json(about["fingerprint"]).difference(path)
        starts, firsts = (table.column(name).to_numpy() for name in ("start", "row"))
        found = TextIndex(starts, firsts, about["types"], cast(int, about["crc32c"]))
    except (FileNotFoundError, AccessDenied):  # some servers refuse to tell that there is no such object
        return None
    except (OSError, ValueError, LookupError, TypeError, pa.ArrowException) as error:
        say(f"{file}: cannot be used ({error}); indexing {path} again")
        return None
    if difference is not None:
        say(f"{path}: has changed since it was indexed ({difference}); indexing it again")
        return None
    return found


def _reordered(column: Column, order: Numbers) -> Column:
    return column[order] if isinstance(column, np.ndarray) else [column[place] for place in order.tolist()]


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _type_name(kind: pa.DataType) -> str:
    return "text" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else str(kind).replace("null", "mixed")
