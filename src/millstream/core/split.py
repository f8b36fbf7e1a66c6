"""Labels joined to records, and train, validation and test splits (or k folds) by a hash of each record's key."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal, Self, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.core.arguments import checked
from millstream.core.batches import codes_of, with_column
from millstream.core.collection import Collection, Listed, Marked, Medium, Numbers, Subset, whole_numbers
from millstream.core.config import parse_json
from millstream.core.files import publish
from millstream.core.order import mix_words
from millstream.core.remote import to_path
from millstream.errors import BadSource, BadSplit, MissingLabel

VERSION = 1
_CHUNK = 1 << 20  # records per step
_OUT = 255  # in no split


@dataclass(frozen=True)
class Rule:
    """What decides the split of a record: the share of each split, in order, the key, and the salt of its hash."""

    shares: Mapping[str, float]
    by: str | None
    """Records with equal values of this field stay together; None: every record is independent."""
    salt: str
    lineage: str

    def edges(self) -> NDArray[np.uint64]:
        """Hashes below `edges[i]` are in one of the first i + 1 splits."""
        sums = np.minimum(np.cumsum(list(self.shares.values())), 1.0)
        return np.array([min(round(edge * 2**64), 2**64 - 1) for edge in sums.tolist()], np.uint64)


class Split:
    """A collection split into several collections. Made by `ms.split`.

    >>> split = ms.split(traces, {"train": 0.7, "val": 0.15, "test": 0.15})
    >>> train, val, test = split
    >>> split.save("split.json")
    >>> same = ms.Split.load("split.json", traces)
    """

    def __init__(self, collection: Collection, rule: Rule) -> None:
        self.rule = rule
        self._collection = collection
        assigned = list(_assign(collection, rule))
        step = f"{rule.lineage}/{rule.salt}:{','.join(rule.shares)}"
        self._subsets = {
            name: Subset(collection, Marked(codes == number for codes in assigned), lineage=f"{step}={name}")
            for number, name in enumerate(rule.shares)
        }

    def __getitem__(self, name: str) -> Subset:
        if name not in self._subsets:
            raise KeyError(f"unknown split {name!r}: must be one of {', '.join(self._subsets)}")
        return self._subsets[name]

    def __iter__(self) -> Iterator[Subset]:
        return iter(self._subsets.values())

    def __len__(self) -> int:
        return len(self._subsets)

    def pairs(self) -> Iterator[tuple[Subset, Subset]]:
        """For every fold: all other records to train on, and the fold itself to validate on."""
        assigned = list(_assign(self._collection, self.rule))
        for number, (name, subset) in enumerate(self._subsets.items()):
            rest = Marked((codes != number) & (codes != _OUT) for codes in assigned)
            yield Subset(self._collection, rest, lineage=f"{subset.lineage}:rest of {name}"), subset

    def report(self, field: str | None = None) -> str:
        """Records and keys per split; with a field, also the share of each of its values."""
        rows = self._counts(field)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)

    def _counts(self, field: str | None = None) -> list[list[str]]:
        codes = np.concatenate([np.empty(0, np.uint8), *_assign(self._collection, self.rule)])
        rows: list[list[str]] = [["split", "records", "share", "keys"]]
        keys = None if self.rule.by is None else codes_of(self._collection.column(self.rule.by))[0]
        classes, names = codes_of(self._collection.column(field)) if field is not None else (codes, [])
        rows[0] += [f"{field}={name}" for name in names]
        for number, (name, subset) in enumerate(self._subsets.items()):
            mine = codes == number
            share = f"{len(subset) / max(len(codes), 1):.1%}"
            num_keys = len(subset) if keys is None else len(np.unique(keys[mine]))
            known = classes[mine] >= 0 if names else mine[:0]
            counts = np.bincount(classes[mine][known], minlength=len(names)) if names else np.empty(0, np.int64)
            shares = [f"{count / max(len(subset), 1):.1%}" for count in counts.tolist()]
            rows.append([name, str(len(subset)), share, str(num_keys), *shares])
        return rows

    def __repr__(self) -> str:
        return f"{self._title}\n{self.report()}"

    def _repr_html_(self) -> str:
        """For notebooks."""
        from millstream.core.notebook import table_html

        names, *rows = self._counts()
        return table_html(self._title, names, rows)

    @property
    def _title(self) -> str:
        return f"Split of {len(self._collection)} records by {self.rule.by or 'record number'}"

    @checked
    def save(self, path: str | Path) -> None:
        """Write the rule to a small JSON file. It also assigns records that are added later."""
        counts = {name: len(subset) for name, subset in self._subsets.items()}
        rule = asdict(self.rule)
        content = {"millstream split": VERSION, "parts": rule.pop("shares"), **rule, "records": counts}
        text = json.dumps(content, indent=1)
        publish(to_path(path), (text + "\n").encode())

    @classmethod
    @checked
    def load(cls, path: str | Path, collection: Collection) -> Self:
        """The split of a collection by a saved rule."""
        try:
            saved = cast("dict[str, object]", parse_json(to_path(path).read_text()))
            version = saved["millstream split"]
        except OSError as error:
            what = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            raise BadSplit(f"{path}: {what}. Make it with ms.split(...).save({str(path)!r})") from None
        except (ValueError, KeyError, TypeError):
            raise BadSplit(f"{path}: is not a saved split") from None
        if version != VERSION:
            raise BadSplit(f"{path}: has version {version}; this version reads {VERSION}")
        try:
            shares = {str(name): float(share) for name, share in cast("dict[str, float]", saved["parts"]).items()}
            by, salt, lineage = cast("str | None", saved["by"]), str(saved["salt"]), str(saved["lineage"])
            _check_shares(shares)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise BadSplit(f"{path}: damaged ({error}). Save the split again") from None
        if lineage != collection.lineage:
            raise BadSplit(
                f"{path}: splits {lineage or 'a whole collection'}, not {collection.lineage or 'a whole collection'}"
            )
        return cls(collection, Rule(shares, by, salt, lineage))


@checked
def split(
    collection: Collection,
    parts: Mapping[str, float] | None = None,
    *,
    folds: int | None = None,
    by: str | None = None,
    salt: str = "",
) -> Split:
    """Split a collection by shares, `{"train": 0.7, "val": 0.15, "test": 0.15}`, or into k equal folds.

    Records with the same value of the field `by` stay together, such as all reads of a genome with `by="tax_id"`. The
    default is the collection's own key; without one, every record is independent. The split of a record depends only
    on that value, the shares and `salt`, not on the other records, so adding records never moves it.

    >>> train, val, test = ms.split(traces, {"train": 0.7, "val": 0.15, "test": 0.15})
    >>> folds = ms.split(reads, folds=5)
    """
    if (parts is None) == (folds is None):
        raise ValueError(
            'pass either shares, such as {"train": 0.7, "val": 0.15, "test": 0.15}, or folds=5, and not both'
        )
    if folds is not None:
        if folds < 2:
            raise ValueError(f"folds={folds}: must be at least 2")
        parts = {f"fold{number}": 1 / folds for number in range(folds)}
    assert parts is not None
    _check_shares(parts)
    salt = salt or ("folds" if folds else "")
    return Split(collection, Rule(dict(parts), by or collection.default_key, salt, collection.lineage))


def _check_shares(parts: Mapping[str, float]) -> None:
    are_shares = all(0 < share <= 1 for share in parts.values()) and sum(parts.values()) <= 1 + 1e-9
    if not parts or not are_shares or len(parts) >= _OUT:
        raise ValueError(f"the shares of a split must be above 0 and sum to at most 1, got {dict(parts)}")


def _assign(collection: Collection, rule: Rule) -> Iterator[NDArray[np.uint8]]:
    """The split of every record, a chunk at a time."""
    salt = int.from_bytes(blake2b(f"{rule.lineage}/{rule.salt}".encode(), digest_size=8).digest(), "little")
    edges = rule.edges()
    if rule.by is None:
        for start in range(0, len(collection), _CHUNK):
            numbers = np.arange(start, min(start + _CHUNK, len(collection)), dtype=np.int64)
            yield _split_of(mix_words(collection.record_numbers(numbers), salt), edges, rule)
        return
    first = 0
    for piece in collection.column_pieces(rule.by):
        codes, values = codes_of(piece)
        if len(codes) and (missing := int(np.count_nonzero(codes < 0))):
            raise BadSplit(
                f"{missing} of {len(codes)} records have no {rule.by!r} (the first is record "
                f"{first + int(np.flatnonzero(codes < 0)[0])}). Split by another field, or take a subset without them"
            )
        hashed = [blake2b(f"{salt}/{value}".encode(), digest_size=8).digest() for value in values]
        of_value = _split_of(np.frombuffer(b"".join(hashed), "<u8"), edges, rule)
        for start in range(0, len(codes), _CHUNK):
            yield of_value[codes[start : start + _CHUNK]]
        first += len(codes)


def _split_of(hashes: NDArray[np.uint64], edges: NDArray[np.uint64], rule: Rule) -> NDArray[np.uint8]:
    found = np.searchsorted(edges, hashes, side="right")
    whole = sum(rule.shares.values()) > 1 - 1e-9  # the last split takes what rounding leaves over
    found = np.minimum(found, len(edges) - 1) if whole else np.where(found == len(edges), _OUT, found)
    return found.astype(np.uint8)


LABEL = "label"
Labels = NDArray[np.int64] | NDArray[np.float64]


class Labelled(Collection):
    """A collection whose records have the field `label`, and perhaps other `columns`. Made by `ms.labelled`."""

    def __init__(
        self, collection: Collection, labels: Labels, columns: Mapping[str, Sequence[object]] | None = None
    ) -> None:
        self.collection = collection
        self.labels = labels
        self.columns: Mapping[str, Sequence[object]] = columns or {}

    def __len__(self) -> int:
        return len(self.collection)

    def __getitem__(self, number: int) -> object:
        record = with_column(self.collection[number], LABEL, self.labels[number].item())
        for name, values in self.columns.items():
            record = with_column(record, name, values[number])
        return record

    def fetch(self, numbers: Sequence[int] | Numbers, fields: Sequence[str] | None = None) -> object:
        wanted = whole_numbers(numbers)
        fetched = self.collection.fetch(wanted, None if fields is None else self._others(fields))
        for name, values in self.columns.items():
            if fields is None or name in fields:
                fetched = with_column(fetched, name, [values[number] for number in wanted.tolist()])
        if fields is not None and LABEL not in fields:
            return fetched
        return with_column(fetched, LABEL, self.labels[wanted])

    def _others(self, fields: Sequence[str]) -> list[str]:
        return [name for name in fields if name != LABEL and name not in self.columns]

    @property
    def field_names(self) -> list[str]:
        return list(dict.fromkeys([*self.collection.field_names, LABEL, *self.columns]))

    def column(self, name: str) -> pa.ChunkedArray:
        if name in self.columns:
            return pa.chunked_array([pa.array(self.columns[name])])
        return pa.chunked_array([pa.array(self.labels)]) if name == LABEL else self.collection.column(name)

    def sizes(self, numbers: Numbers, fields: Sequence[str]) -> Numbers:
        return self.collection.sizes(numbers, self._others(fields)) + 8

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
    def id_field(self) -> str | None:
        return self.collection.id_field

    @property
    def lineage(self) -> str:
        return self.collection.lineage

    @property
    def labels_file(self) -> Path | None:
        return self.collection.labels_file

    def within(self, memory: int) -> Self:
        return type(self)(self.collection.within(memory), self.labels, self.columns)

    def in_epoch(self, epoch: int) -> Self:
        return type(self)(self.collection.in_epoch(epoch), self.labels, self.columns)

    def record_numbers(self, numbers: Numbers) -> Numbers:
        return self.collection.record_numbers(numbers)

    def will_need(self, first: Numbers, last: Numbers) -> None:
        self.collection.will_need(first, last)

    def release(self, first: Numbers, last: Numbers) -> None:
        self.collection.release(first, last)

    def __repr__(self) -> str:
        return f"Labelled({self.collection!r})"


@checked
def labelled(
    collection: Collection,
    table: str | Path | pa.Table | None = None,
    *,
    column: str = LABEL,
    values: Mapping[object, float] | None = None,
    missing: Literal["error", "drop"] = "error",
) -> Labelled | Subset:
    """The collection with a field `label`: integers, or floats if some labels have fractions.

    Labels come from a column of a table (a Parquet file or an Arrow table) that also has the ids of records, such as
    `record_id`; in a table with only `question_id`, the label of a question is that of its first answer. The default
    table is the `labels.parquet` of the store; a `column` that it lacks is a field of the records. `values` maps texts
    to numbers, as {"right": 0, "wrong": 1}. If labels are missing, NaN or not among `values`, MissingLabel says how
    many; `missing="drop"` leaves those records out.

    >>> judged = ms.labelled(traces, column="verdict", values={"right": 0, "wrong": 1}, missing="drop")
    """
    found, source = find_labels(collection, table, column)
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


def find_labels(collection: Collection, table: str | Path | pa.Table | None, column: str) -> tuple[list[object], str]:
    """The value of every record in a column of a table, by default the labels of a store, and where it comes from."""
    is_given = table is not None
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
    rows = table if isinstance(table, pa.Table) else _read_table(to_path(table), is_own=table == collection.labels_file)
    if not is_given and column not in rows.column_names and column in collection.field_names:
        return collection.column(column).to_pylist(), "the records"
    own = collection.id_field
    if own is None:
        raise BadSource(f"{source}: the records have no key to join on. Use one of their fields instead: column=...")
    key = own if own in rows.column_names else collection.default_key
    if key not in rows.column_names or column not in rows.column_names:
        found = ", ".join(rows.column_names)
        raise BadSource(f"{source}: expected the columns {own!r} and {column!r}, found {found}")
    values: dict[str, object] = {}
    for name, value in zip(rows.column(key).to_pylist(), rows.column(column).to_pylist(), strict=True):
        value = None if value != value else value  # NaN, which is not even equal to itself
        if values.setdefault(str(name), value) != value:
            raise BadSource(f"{source}: {key} {name!r} has two labels, {values[str(name)]!r} and {value!r}")
    return [values.get(str(name)) for name in collection.column(own).to_pylist()], source


def _read_table(path: Path, *, is_own: bool) -> pa.Table:
    from millstream.core.tables import read_parquet, read_table

    try:
        return read_table(path) if is_own else read_parquet(path.read_bytes())
    except FileNotFoundError:
        raise BadSource(f"{path}: no such file") from None
    except (OSError, pa.ArrowException) as error:
        raise BadSource(f"{path}: is not a valid Parquet file ({error})") from None


def _number(value: object, source: str, column: str) -> float:
    if isinstance(value, bool | int | float):
        return float(value)
    raise BadSource(f"{source}: {column} {value!r} is not a number; map it to one: values={{{value!r}: 1, ...}}")
