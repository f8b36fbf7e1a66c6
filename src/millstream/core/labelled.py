"""Labels joined to records, from a table or from one of their own fields. A missing label never gets a default."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.core.batches import with_column
from millstream.core.collection import Collection, Medium, Numbers
from millstream.core.subset import Listed, Subset
from millstream.errors import BadSource, MissingLabel

LABEL = "label"
Labels = NDArray[np.int64] | NDArray[np.float64]


class Labelled(Collection):
    """A collection whose records have the field `label`. Made by `ms.labelled`."""

    def __init__(self, collection: Collection, labels: Labels) -> None:
        self.collection = collection
        self.labels = labels

    def __len__(self) -> int:
        return len(self.collection)

    def __getitem__(self, number: int) -> object:
        return with_column(self.collection[number], LABEL, self.labels[number].item())

    def fetch(self, numbers: Sequence[int] | Numbers, fields: Sequence[str] | None = None) -> object:
        wanted = np.asarray(numbers, np.int64)
        others = None if fields is None else [name for name in fields if name != LABEL]
        fetched = self.collection.fetch(wanted, others)
        if fields is not None and LABEL not in fields:
            return fetched
        return with_column(fetched, LABEL, self.labels[wanted])

    @property
    def field_names(self) -> list[str]:
        return list(dict.fromkeys([*self.collection.field_names, LABEL]))

    def column(self, name: str) -> pa.ChunkedArray:
        return pa.chunked_array([pa.array(self.labels)]) if name == LABEL else self.collection.column(name)

    def sizes(self, numbers: Numbers, fields: Sequence[str]) -> Numbers:
        others = [name for name in fields if name != LABEL]
        return self.collection.sizes(numbers, others) + 8

    @property
    def medium(self) -> Medium:
        return self.collection.medium

    @property
    def fingerprint(self) -> str:
        return self.collection.fingerprint  # correcting a label does not change the order of the records

    @property
    def default_key(self) -> str | None:
        return self.collection.default_key

    @property
    def lineage(self) -> str:
        return self.collection.lineage

    @property
    def labels_file(self) -> Path | None:
        return self.collection.labels_file

    def within(self, memory: int) -> Self:
        return type(self)(self.collection.within(memory), self.labels)

    def in_epoch(self, epoch: int) -> Self:
        return type(self)(self.collection.in_epoch(epoch), self.labels)

    def record_numbers(self, numbers: Numbers) -> Numbers:
        return self.collection.record_numbers(numbers)

    def will_need(self, first: Numbers, last: Numbers) -> None:
        self.collection.will_need(first, last)

    def release(self, first: Numbers, last: Numbers) -> None:
        self.collection.release(first, last)

    def __repr__(self) -> str:
        return f"Labelled({self.collection!r})"


def labelled(
    collection: Collection,
    table: str | Path | pa.Table | None = None,
    *,
    column: str = LABEL,
    values: Mapping[object, float] | None = None,
    missing: Literal["error", "drop"] = "error",
) -> Labelled | Subset:
    """The collection with a field `label`: integers, or floats if some labels have fractions.

    Labels come from a column of a table (a Parquet file or an Arrow table) that also has the records' key, such as
    `question_id`. The default table is the `labels.parquet` of the store; without one, `column` is a field of the
    records. `values` maps texts to numbers, as {"right": 0, "wrong": 1}. If labels are missing, NaN or not among
    `values`, MissingLabel says how many; `missing="drop"` leaves those records out.

    >>> judged = ms.labelled(traces, column="verdict", values={"right": 0, "wrong": 1}, missing="drop")
    """
    if missing not in ("error", "drop"):
        raise ValueError(f"missing={missing!r}: must be one of error, drop")
    found, source = _find(collection, table, column)
    if values is not None:
        found = [None if value is None else values.get(value) for value in found]
    labels = np.array([np.nan if value is None else _number(value, source, column) for value in found], np.float64)
    known = ~np.isnan(labels)
    if not known.all() and missing == "error":
        (without,) = np.nonzero(~known)
        of = f" (or one that is not in {list(values)})" if values else ""
        raise MissingLabel(
            f"{len(without)} of {len(labels)} records have no {column!r} in {source}{of}, the first is record "
            f'{without[0]}. Leave them out with missing="drop", or label them'
        )
    whole = bool((labels[known] == np.round(labels[known])).all())
    kept = np.where(known, labels, 0).astype(np.int64) if whole else labels
    result = Labelled(collection, kept)
    return result if known.all() else Subset(result, Listed(np.flatnonzero(known)))


def _find(collection: Collection, table: str | Path | pa.Table | None, column: str) -> tuple[list[object], str]:
    """The value of every record, and where it comes from."""
    if table is None:
        table = collection.labels_file
    if table is None:
        if column not in collection.field_names:
            raise BadSource(
                f"the records have no labels file and no field {column!r}; their fields are "
                f"{', '.join(collection.field_names)}. Pass table=... or column=..."
            )
        return collection.column(column).to_pylist(), "the records"
    source = "the table" if isinstance(table, pa.Table) else str(table)
    rows = table if isinstance(table, pa.Table) else _read_table(Path(table))
    key = collection.default_key
    if key is None:
        raise BadSource(f"{source}: the records have no key to join on. Use one of their fields instead: column=...")
    if key not in rows.column_names or column not in rows.column_names:
        found = ", ".join(rows.column_names)
        raise BadSource(f"{source}: expected the columns {key!r} and {column!r}, found {found}")
    values: dict[str, object] = {}
    for name, value in zip(rows.column(key).to_pylist(), rows.column(column).to_pylist(), strict=True):
        value = None if value != value else value  # NaN, which is not even equal to itself
        if values.setdefault(str(name), value) != value:
            raise BadSource(f"{source}: {key} {name!r} has two labels, {values[str(name)]!r} and {value!r}")
    return [values.get(str(name)) for name in collection.column(key).to_pylist()], source


def _read_table(path: Path) -> pa.Table:
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path)
    except FileNotFoundError:
        raise BadSource(f"{path}: no such file") from None
    except (OSError, pa.ArrowException) as error:
        raise BadSource(f"{path}: is not a valid Parquet file ({error})") from None


def _number(value: object, source: str, column: str) -> float:
    if isinstance(value, bool | int | float):
        return float(value)
    raise BadSource(f"{source}: {column} {value!r} is not a number; map it to one: values={{{value!r}: 1, ...}}")
