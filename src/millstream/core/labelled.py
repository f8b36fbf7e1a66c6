"""Labels joined to records, from a table or from a field of theirs. A missing label is never given a default."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.collection import Collection, Medium, Numbers
from millstream.dataset.chosen import Listed
from millstream.dataset.subset import Subset
from millstream.errors import BadSource, MissingLabel
from millstream.store.read_batch import Read, ReadBatch
from millstream.store.traces import Traces

if TYPE_CHECKING:
    from millstream.records import Array

LABEL, LABELS_FILE = "label", "labels.parquet"
ANSWERS = ("generated_answer", "generated_answer_clean", "generated_text")  # the first one that a store has
ALIASES = ("aliases", "ground_truth_answers", "answer")
Labels = NDArray[np.int64] | NDArray[np.float64]


class Labelled(Collection):
    """A collection whose records have the field `label`. Made by `ms.labelled`."""

    def __init__(self, collection: Collection, labels: Labels) -> None:
        self.collection = collection
        self.labels = labels

    def __len__(self) -> int:
        return len(self.collection)

    def __getitem__(self, number: int) -> object:
        record, label = self.collection[number], self.labels[number].item()
        if isinstance(record, Read):
            return replace(record, columns={**record.columns, LABEL: label})
        return {**cast("Mapping[str, object]", record), LABEL: label}

    def fetch(self, numbers: Sequence[int] | Numbers, fields: Sequence[str] | None = None) -> object:
        wanted = np.asarray(numbers, np.int64)
        others = None if fields is None else [name for name in fields if name != LABEL]
        fetched = self.collection.fetch(wanted, others)
        if fields is not None and LABEL not in fields:
            return fetched
        labels = self.labels[wanted]
        if isinstance(fetched, ReadBatch):
            return replace(fetched, columns={**fetched.columns, LABEL: labels})
        return {**cast("Mapping[str, Array | list[object]]", fetched), LABEL: labels}

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
        return self.collection.fingerprint  # labels may be mended without changing which records come when

    @property
    def default_key(self) -> str | None:
        return self.collection.default_key

    @property
    def lineage(self) -> str:
        return self.collection.lineage

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
    """The collection with a field `label`: whole numbers, or floats where they are no whole numbers.

    Labels come from the column of a table that has a `question_id` too (a Parquet file or an Arrow table), by default
    of the store's own `labels.parquet`, or where there is none from the field of that name that the records have.
    `values` says what a text stands for, as {"right": 0, "wrong": 1}. A record whose label is missing, NaN or not among
    `values` is an error that counts them, or left out with `missing="drop"`.

    >>> judged = ms.labelled(traces, column="verdict", values={"right": 0, "wrong": 1}, missing="drop")
    """
    if missing not in ("error", "drop"):
        raise ValueError(f"missing={missing!r}: there is error and drop")
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


def references_of(values: Sequence[object]) -> list[str]:
    """All texts among an answer and lists of aliases, each once."""
    flat: list[object] = []
    for value in values:
        flat += cast("list[object]", value) if isinstance(value, list) else [value]
    return list(dict.fromkeys(str(text) for text in flat if text not in (None, "")))


def _find(collection: Collection, table: str | Path | pa.Table | None, column: str) -> tuple[list[object], str]:
    """The value of every record, and where it was found."""
    root = _root(collection)
    if table is None and isinstance(root, Traces) and (root.path / LABELS_FILE).exists():
        table = root.path / LABELS_FILE
    if table is None:
        if column not in collection.field_names:
            raise BadSource(
                f"no {LABELS_FILE} in the store and no field {column!r} in its records, which have "
                f"{', '.join(collection.field_names)}. Give table=..., or column=..."
            )
        return collection.column(column).to_pylist(), "the records"
    source = "the table" if isinstance(table, pa.Table) else str(table)
    rows = table if isinstance(table, pa.Table) else _read(Path(table))
    key = collection.default_key
    if key is None or key not in rows.column_names or column not in rows.column_names:
        wanted = f"the columns {key or 'question_id'!r} and {column!r}"
        raise BadSource(f"{source}: expected {wanted}, found {', '.join(rows.column_names)}")
    values: dict[str, object] = {}
    for name, value in zip(rows.column(key).to_pylist(), rows.column(column).to_pylist(), strict=True):
        value = None if value != value else value  # NaN, which is not even equal to itself
        if values.setdefault(str(name), value) != value:
            raise BadSource(f"{source}: {key} {name!r} has two labels, {values[str(name)]!r} and {value!r}")
    return [values.get(str(name)) for name in collection.column(key).to_pylist()], source


def _read(path: Path) -> pa.Table:
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path)
    except FileNotFoundError:
        raise BadSource(f"{path}: no such file") from None
    except (OSError, pa.ArrowException) as error:
        raise BadSource(f"{path}: is no Parquet file that can be read ({error})") from None


def _root(collection: Collection) -> Collection:
    while isinstance(collection, Subset | Labelled):
        collection = collection.collection
    return collection


def _number(value: object, source: str, column: str) -> float:
    if isinstance(value, bool | int | float):
        return float(value)
    raise BadSource(f"{source}: {column} {value!r} is no number; say what it stands for, values={{{value!r}: 1, ...}}")
