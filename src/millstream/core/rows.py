"""The rows of JSON lines, JSON, CSV and Parquet files, one after another. Knows nothing of what a column means."""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Self, TypeVar, cast

from millstream.core.config import parse_json
from millstream.core.hf_datasets import is_datasets_folder, read_folder
from millstream.core.record import crc32c
from millstream.core.remote import open_raw
from millstream.errors import BadSource

Row = Mapping[str, object]
T = TypeVar("T")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
PARQUET = (".parquet", ".pq")
SUFFIXES = (".jsonl", ".ndjson", ".json", *DELIMITERS, *PARQUET)
MAX_ROW_BYTES = 256 << 20
_BATCH_ROWS = 256  # of Parquet, decoded at once: they may have long texts
_BOM = b"\xef\xbb\xbf"
_VISIBLE = re.compile(rb"\S")
csv.field_size_limit(max(csv.field_size_limit(), MAX_ROW_BYTES))  # of the process; the default refuses long answers


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, by its suffix; without one of ours, JSON lines. BadSource, with the line, if it is damaged.

    A JSON file is a list of rows, or one object, which is the only row; it may also have a row per line. A folder is a
    dataset that Hugging Face `datasets` saved.
    """
    suffix = path.suffix.lower()
    if is_datasets_folder(path):
        yield from read_folder(path)
    elif suffix in PARQUET:
        yield from _parquet_rows(path)
    elif suffix == ".json":
        yield from _json_file(path)
    else:
        yield from _text_rows(path, DELIMITERS.get(suffix))


class Lines:
    """The lines of a file as text: how many so far, the position after them, and the CRC-32C of their bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = io.BufferedReader(cast(io.RawIOBase, file), 1 << 20)
        mark = self._file.read(len(_BOM)) if self._file.peek(len(_BOM)).startswith(_BOM) else b""
        self.count, self.position, self.crc32c = 0, len(mark), crc32c(mark)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        line = self._file.readline(MAX_ROW_BYTES)
        if not line:
            raise StopIteration
        self.crc32c = crc32c(line, self.crc32c)
        self.position += len(line)
        self.count += 1
        return line.decode()

    def json_rows(self, path: Path) -> Iterator[Row | None]:
        """The object on each line; None for a blank one."""
        return self._checked(
            path, (json_row(line, f"{path}: line {self.count}") if line.strip() else None for line in self)
        )

    def csv_rows(self, path: Path, delimiter: str) -> Iterator[Sequence[str]]:
        """The names of the columns, then the cells of each row, which may have several lines; none for a blank line."""
        return self._checked(path, self._csv_rows(path, delimiter))

    def _csv_rows(self, path: Path, delimiter: str) -> Iterator[Sequence[str]]:
        names: Sequence[str] = []
        for cells in split_cells(self, delimiter):
            if cells and not names:
                cells = names = _header(cells, path)
            if cells and len(cells) != len(names):
                raise BadSource(
                    f"{path}: line {self.count}: a row of {len(cells)} cells, but the header has {len(names)}. Cells "
                    "that contain the delimiter or a line break need double quotes"
                )
            yield cells

    def _checked(self, path: Path, rows: Iterator[T]) -> Iterator[T]:
        try:
            yield from rows
        except csv.Error as error:
            raise BadSource(f"{path}: line {self.count} is not valid CSV ({error})") from None
        except UnicodeDecodeError as error:
            raise BadSource(f"{path}: line {self.count} is not valid UTF-8 ({error.reason})") from None


def json_row(line: str | bytes, where: str) -> Row:
    """The object on a line."""
    try:
        row: object = parse_json(line)
    except ValueError as error:
        raise BadSource(f"{where} is not valid JSON ({error})") from None
    if not isinstance(row, dict):
        raise BadSource(f"{where} is not a JSON object")
    return cast("Row", row)


def split_cells(lines: Iterable[str], delimiter: str) -> Iterator[list[str]]:
    """The cells of each row of CSV; none for a blank line."""
    return csv.reader(lines, delimiter=delimiter, strict=True)


def _header(cells: Sequence[str], path: Path) -> list[str]:
    names = [name or f"column {place}" for place, name in enumerate(cells)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadSource(f"{path}: the header has two columns {twice!r}. Rename one of them")
    if len(names) == 1 and (other := next((mark for mark in ";\t|" if mark in names[0]), None)):
        raise BadSource(
            f"{path}: its columns are separated by {other!r}. Separate them by commas (.csv) or tabs (.tsv)"
        )
    return names


def _text_rows(path: Path, delimiter: str | None) -> Iterator[Row]:
    with open_raw(path) as file:
        lines = Lines(cast(BinaryIO, file))
        if delimiter is None:
            yield from (row for row in lines.json_rows(path) if row is not None)
            return
        rows = (cells for cells in lines.csv_rows(path, delimiter) if cells)
        names = next(rows, list[str]())
        for cells in rows:
            yield dict(zip(names, cells, strict=True))


def _json_file(path: Path) -> Iterator[Row]:
    data = path.read_bytes()
    start = _VISIBLE.search(data)
    end = data.find(b"\n", start.start() if start else 0)
    if end > 0 and data[:end].rstrip().endswith(b"}") and _VISIBLE.search(data, end):  # a first row on its own line
        del data
        yield from _text_rows(path, None)
        return
    try:
        found: object = parse_json(data)
    except ValueError as error:
        raise BadSource(f"{path}: is not valid JSON ({error})") from None
    del data
    rows = cast("list[object]", found) if isinstance(found, list) else [found]
    if not all(isinstance(row, dict) for row in rows):
        raise BadSource(f"{path}: must be a JSON object or a list of them")
    yield from cast("list[Row]", rows)


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow as pa

    from millstream.core.tables import open_parquet

    try:
        for batch in open_parquet(path.read_bytes()).iter_batches(_BATCH_ROWS, use_threads=False):
            yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise BadSource(f"{path}: is not a valid Parquet file ({error})") from None
