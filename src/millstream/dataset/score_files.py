"""Scores from elsewhere (BLEURT, a judge), by question: CSV or Parquet -> columns in the order of the records."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from millstream.errors import BadSource

USUAL = "bleurt_score"  # of the old ground_truth_scores.csv


@dataclass(frozen=True, kw_only=True)
class ScoreFile:
    """The values of every question under `names`; `main` is the one a verdict can be made of, if any is."""

    path: Path
    names: tuple[str, ...]
    main: str | None
    rows: dict[str, tuple[object, ...]]

    def columns(self, ids: Sequence[str]) -> dict[str, pa.Array]:
        """Each column, a value an id, null where the file has none."""
        nothing = (None,) * len(self.names)
        rows = [self.rows.get(name, nothing) for name in ids]
        return {name: pa.array([row[at] for row in rows]) for at, name in enumerate(self.names)}

    def numbers(self, ids: Sequence[str]) -> NDArray[np.float64]:
        """The main column, a number an id, NaN where the file has none."""
        if self.main is None:
            raise BadSource(f"{self.path}: which column counts, {', '.join(self.names)}? Name it: column=...")
        at = self.names.index(self.main)
        values = [self.rows[name][at] if name in self.rows else None for name in ids]
        return np.array([np.nan if value is None else self._number(value) for value in values], np.float64)

    def _number(self, value: object) -> float:
        if isinstance(value, bool | int | float):
            return float(value)
        raise BadSource(f"{self.path}: {self.main} {value!r} is no number. Name another column: column=...")


def read_scores(path: Path, *, key: str, column: str | None = None) -> ScoreFile:
    """The file's columns by its `key`, or the one named; a value that is empty or NaN is None."""
    columns = _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path, key)
    others = [name for name in columns if name not in (key, "")]  # pandas writes its row numbers under no name
    if key not in columns or (column or "") not in ("", *others) or not others:
        wanted = f"the columns {key!r} and {column or 'a score'!r}"
        raise BadSource(f"{path}: expected {wanted}, found {', '.join(columns) or 'nothing'}")
    names = (column,) if column else tuple(others)
    main = USUAL if USUAL in names else names[0] if len(names) == 1 else None
    rows: dict[str, tuple[object, ...]] = {}
    for name, *values in zip(columns[key], *(columns[name] for name in names), strict=True):
        row = tuple(None if value != value else value for value in values)  # NaN is not even equal to itself
        if rows.setdefault(str(name), row) != row:
            raise BadSource(f"{path}: {key} {name!r} has two rows that differ, {rows[str(name)]} and {row}")
    return ScoreFile(path=path, names=names, main=main, rows=rows)


def _read_parquet(path: Path) -> dict[str, list[object]]:
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise BadSource(f"{path}: no such file") from None
    except (OSError, pa.ArrowException) as error:
        raise BadSource(f"{path}: is no Parquet file that can be read ({error})") from None
    return {name: table.column(name).to_pylist() for name in table.column_names}


def _read_csv(path: Path, key: str) -> dict[str, list[object]]:
    """Columns of texts, or of numbers where all are. Ids are texts in any case: `007` is not 7."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            header, *lines = list(csv.reader(file, strict=True)) or [[]]
    except FileNotFoundError:
        raise BadSource(f"{path}: no such file") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadSource(f"{path}: is no CSV file that can be read ({error})") from None
    for number, line in enumerate(lines, 2):
        if len(line) not in (0, len(header)):
            raise BadSource(f"{path}: row {number} has {len(line)} values, the header has {len(header)}")
    kept = [line for line in lines if line]
    columns = {name: [line[at] for line in kept] for at, name in enumerate(header)}
    return {name: list(values) if name == key else _numbers(values) for name, values in columns.items()}


def _numbers(values: Sequence[str]) -> list[object]:
    try:
        return [float(value) if value.strip() else None for value in values]
    except ValueError:
        return [value or None for value in values]
