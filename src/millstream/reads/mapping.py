"""Class ids -> labels and taxa: the mapping a user keeps beside the reads, and the classes with the taxa above them."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from millstream.core.config import first_few
from millstream.core.remote import to_path
from millstream.core.tables import read_parquet
from millstream.errors import BadSource
from millstream.reads.taxonomy import LINEAGES, RANKS, Lineage, Taxon, lineages_of, load_lineages

KEY, FILE = "class_id", "file"
CLASS, PROBABILITY = "class", "probability"  # of predictions
TAX_ID = ("tax_id", "taxid", "taxon_id")  # columns of tax ids
_NAMES = ("species", "name", "label", "organism", "strain")  # columns that name a class, the best first
_NULLS = ("", "NA", "N/A", "#N/A", "null", "NULL", "NaN", "nan")  # in a column of numbers
GENOME_LENGTH = "genome_length"
_LENGTH = (GENOME_LENGTH, "length")


class DataFrame(Protocol):
    """The used interface of pandas.DataFrame."""

    @property
    def columns(self) -> Sequence[str]: ...
    def to_dict(self, orient: str) -> Mapping[str, Sequence[object]]: ...


@dataclass(frozen=True, eq=False)
class LabelMapping:
    """One row per class, in order of class id. The row number is the label that models are trained on."""

    key: str
    table: pa.Table
    source: str  # its name in error messages
    files: Mapping[str, int] = field(default_factory=dict[str, int])  # class ids by file name, from the column `file`

    @property
    def labels(self) -> list[str]:
        """The names of the columns that are not the class id."""
        return [name for name in self.table.column_names if name != self.key]

    @property
    def num_classes(self) -> int:
        return self.table.num_rows

    @property
    def tax_id(self) -> str | None:
        """The name of the column with tax ids."""
        return next((name for name in TAX_ID if name in self.table.column_names), None)

    def column(self, name: str) -> pa.Array:
        """One of the labels, in order of class id. Every batch takes from it, so it is made once."""
        if name not in self._columns:
            self._columns[name] = pa.array(self.table.column(name).to_pylist())
        return self._columns[name]

    @cached_property
    def _columns(self) -> dict[str, pa.Array]:
        return {}

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """The class ids, ascending."""
        return np.asarray(self.table.column(self.key).to_numpy(), np.int64)

    @cached_property
    def taxa(self) -> dict[int, int]:
        """Tax ids -> class ids; BadSource if two classes have the same."""
        classes: dict[int, int] = {}
        for class_id, tax_id in zip(self.ids.tolist(), _tax_ids(self), strict=True):
            if tax_id and classes.setdefault(tax_id, class_id) != class_id:
                raise BadSource(
                    f"{self.source}: tax id {tax_id} is that of {self.key} {classes[tax_id]} and of {class_id}. Reads "
                    "cannot be looked up by their tax id unless each is that of one class"
                )
        return classes

    def rows(self, values: ArrayLike) -> NDArray[np.int64]:
        """The row, 0 to num_classes - 1, of each class id; BadSource if one is not in the mapping."""
        rows = self.known_rows(values)
        if (rows < 0).any():
            self.check(values, where="the given class ids")
        return rows

    def known_rows(self, values: ArrayLike) -> NDArray[np.int64]:
        """The row of each class id; -1 if it is not in the mapping."""
        wanted = np.asarray(values, np.int64)
        rows = np.minimum(np.searchsorted(self.ids, wanted), self.num_classes - 1)
        return np.where(self.ids[rows] == wanted, rows, -1)

    def row(self, value: int) -> int:
        """The row of one class id, without an array."""
        at = int(self.ids.searchsorted(value))
        if at == len(self.ids) or self.ids[at] != value:
            self.check([value], where="the given class ids")
        return at

    def check(self, ids: ArrayLike, *, where: str) -> None:
        """BadSource if a class id found in `where` (a file, usually) is not in the mapping."""
        unknown = np.setdiff1d(np.asarray(ids, np.int64), self.ids)
        if len(unknown):
            raise BadSource(
                f"{where}: {len(unknown)} {self.key} values are not in {self.source} ({self.num_classes} classes from "
                f"{self.ids[0]} to {self.ids[-1]}): {first_few(unknown.tolist())}. Add them, or use another mapping"
            )


MappingSource = str | Path | DataFrame | pa.Table | Mapping[str, Sequence[object]] | Mapping[int, object]


def load_mapping(source: MappingSource) -> LabelMapping:
    """The mapping in a TSV, CSV or Parquet file, a data frame, an Arrow table, `{id: label}` or `{column: values}`.

    Class ids are in the column `class_id`, else in the first whose name ends in "id", else in the first. A column
    `file` has the names of files with reads of one class each, one per row; without ids, rows that differ in another
    column are classes.

    load_mapping({562: "Escherichia coli", 9606: "Homo sapiens"}).rows([9606])  # array([1])
    """
    name = str(source) if isinstance(source, str | Path) else "the mapping"
    if isinstance(source, str | Path):
        table = _load_table(to_path(source))
    elif isinstance(source, pa.Table):
        table = source
    elif isinstance(source, Mapping):
        table = _from_dict(cast("Mapping[object, object]", source))
    elif hasattr(source, "to_dict") and hasattr(source, "columns"):
        table = _from_columns(source.to_dict("list"), name)
    else:
        kinds = "a TSV, CSV or Parquet file, a data frame, an Arrow table or a dict"
        raise BadSource(f"the mapping: expected {kinds}, found a {type(source).__name__}")
    if not table.num_rows or not table.column_names:
        raise BadSource(f"{name}: expected a class id and its labels in each row, found no rows")
    is_by_file = FILE in table.column_names
    if is_by_file and len(table.column_names) > 1 and not any(map(_is_id, table.column_names)):
        table = _numbered(table)
    key = _find_key(table, name=name)
    table = _with_integer_key(table, key, name=name)
    files: dict[str, int] = {}
    if is_by_file:
        files = _classes_of_files(table, key, name=name)
        table = table.select([column for column in table.column_names if column != FILE])
    return LabelMapping(key, _sorted(table, key, name=name), name, files)


def _load_table(path: Path) -> pa.Table:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise BadSource(f"{path}: no such file; expected a TSV, CSV or Parquet table of class ids and labels") from None
    except OSError as error:
        raise BadSource(f"{path}: cannot be read as a mapping: {error.strerror or error}") from None
    try:
        if data[:4] == b"PAR1":
            return read_parquet(data)
        if b"\0" in data[:4096]:
            raise BadSource(f"{path}: expected a TSV, CSV or Parquet table, found other binary data")
        first_line = data.lstrip().split(b"\n", 1)[0]
        is_csv = b"\t" not in first_line and b"," in first_line and path.suffix.lower() != ".tsv"
        table = _parse_table(data.decode("utf-8-sig"), delimiter="," if is_csv else "\t")
    except (pa.ArrowException, OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadSource(f"{path}: expected a TSV, CSV or Parquet table of class ids and labels: {error}") from None
    values = [name for name in table.column_names if name.strip().isdigit()]
    if values:
        raise BadSource(
            f"{path}: expected column names in the first line, found {first_few(values)}. Add a header line"
        )
    return table


def _parse_table(text: str, *, delimiter: str) -> pa.Table:
    """Not by Arrow's CSV reader: its threads can abort a process that ends soon after (1 of 100, Arrow 26)."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names, rows = next((row for row in reader if row), list[str]()), list[list[str]]()
    for row in reader:
        if row and len(row) != len(names):
            raise csv.Error(f"line {reader.line_num}: expected {len(names)} columns, found {len(row)}")
        rows += [row] if row else []
    columns = [_parse_column(column) for column in (zip(*rows, strict=True) if rows else [()] * len(names))]
    fields = [pa.field(name, column.type) for name, column in zip(names, columns, strict=True)]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _parse_column(values: Sequence[str]) -> pa.Array:
    """Integers if all values are, else floats, else text."""
    numbers = pa.array([None if value.strip() in _NULLS else value.strip() for value in values], pa.string())
    for kind in (pa.int64(), pa.float64()):
        try:
            return numbers.cast(kind)
        except pa.ArrowInvalid:
            continue
    return pa.array(values, pa.string())


def _from_dict(source: Mapping[object, object]) -> pa.Table:
    if all(isinstance(item, int | np.integer) for item in source):
        return _from_columns({KEY: list(source), "label": list(source.values())}, "the mapping")
    return _from_columns(cast("Mapping[str, Sequence[object]]", source), "the mapping")


def _from_columns(columns: Mapping[str, Sequence[object]], name: str) -> pa.Table:
    try:
        # from_pandas: NaN means null there.
        return pa.Table.from_pydict({str(key): pa.array(values, from_pandas=True) for key, values in columns.items()})
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise BadSource(f"{name}: expected columns of equal length, each of one type: {error}") from None


def _find_key(table: pa.Table, *, name: str) -> str:
    names = table.column_names
    twice = sorted({column for column in names if names.count(column) > 1})
    if twice:
        raise BadSource(f"{name}: expected columns of different names, found {first_few(twice)} more than once")
    ending = [column for column in names if _is_id(column)]
    return KEY if KEY in names else ending[0] if ending else names[0]


def _is_id(column: str) -> bool:
    return column.lower().endswith("id")


def _with_integer_key(table: pa.Table, key: str, *, name: str) -> pa.Table:
    column = table.column(key)
    if not pa.types.is_integer(column.type):
        kinds = ", ".join(f"{field.name} ({field.type})" for field in table.schema)
        raise BadSource(
            f"{name}: expected integers in the class id column {key!r}, found {column.type}. The columns are {kinds}; "
            f"rename the one with class ids to {KEY}"
        )
    if column.null_count:
        raise BadSource(f"{name}: expected a class id in each row, found {column.null_count} rows without {key!r}")
    try:
        return table.set_column(table.column_names.index(key), key, column.cast(pa.int64()))
    except pa.ArrowInvalid as error:
        raise BadSource(f"{name}: class ids in {key!r} do not fit into int64: {error}") from None


def _classes_of_files(table: pa.Table, key: str, *, name: str) -> dict[str, int]:
    classes: dict[str, int] = {}
    for file, class_id in zip(table.column(FILE).to_pylist(), table.column(key).to_pylist(), strict=True):
        if file not in (None, "") and classes.setdefault(str(file), class_id) != class_id:
            raise BadSource(
                f"{name}: {file} is in two classes, {classes[str(file)]} and {class_id}. Keep one row of it"
            )
    return classes


def _numbered(table: pa.Table) -> pa.Table:
    """With a class id for each distinct row, apart from its file."""
    columns: dict[str, list[Any]] = {name: table.column(name).to_pylist() for name in table.column_names}
    rows = list(zip(*(values for name, values in columns.items() if name != FILE), strict=True))
    numbers: dict[tuple[Any, ...], int] = {row: number for number, row in enumerate(dict.fromkeys(rows))}
    return _from_columns({KEY: [numbers[row] for row in rows], **columns}, "the mapping")


def _sorted(table: pa.Table, key: str, *, name: str) -> pa.Table:
    """One row per class id, ascending. Identical rows count once; different labels for one id are an error."""
    ids = np.asarray(table.column(key).to_numpy(), np.int64)
    distinct, first, counts = np.unique(ids, return_index=True, return_counts=True)
    repeated = table.take(np.flatnonzero(np.isin(ids, distinct[counts > 1])))
    seen: dict[int, str] = {}
    different = {row[key] for row in repeated.to_pylist() if seen.setdefault(row[key], repr(row)) != repr(row)}
    if different:
        raise BadSource(
            f"{name}: expected one row per {key}, found different labels for {first_few(sorted(different))}. "
            "Keep one row of each"
        )
    return table.take(first).combine_chunks()


@dataclass(frozen=True)
class Rank:
    """The taxa of one rank; `of_class[label]` is the number of a class's taxon among them, -1 if it has none."""

    name: str
    taxa: Sequence[Taxon]
    of_class: NDArray[np.int64]


@dataclass(frozen=True)
class Classes:
    """In the order of labels. `ranks` are those that at least one class has, from the lowest."""

    mapping: LabelMapping
    taxa: Sequence[Taxon]
    ranks: Sequence[Rank]

    def __len__(self) -> int:
        return len(self.taxa)

    def rank(self, name: str) -> Rank | None:
        return next((rank for rank in self.ranks if rank.name == name), None)

    @property
    def taxa_by_rank(self) -> dict[str, NDArray[np.int64]]:
        """At each rank, the number of each class's taxon."""
        return {rank.name: rank.of_class for rank in self.ranks}

    @property
    def genome_lengths(self) -> NDArray[np.float64] | None:
        """The mean length of the genomes of each class, in bases; None unless it is known of all."""
        name = next((name for name in _LENGTH if name in self.mapping.labels), None)
        if name is None:
            return None
        values = self.mapping.column(name).to_pylist()
        if not all(isinstance(value, int | float) and value > 0 for value in values):
            return None
        return np.array(values, np.float64)

    def card(self) -> dict[str, Any]:
        """Their entries on the data card of a run; `classes_from_card` restores them."""
        rows: list[dict[str, Any]] = [
            {"class_id": class_id, **asdict(taxon), **{rank.name: int(rank.of_class[label]) for rank in self.ranks}}
            for label, (class_id, taxon) in enumerate(zip(self.mapping.ids.tolist(), self.taxa, strict=True))
        ]
        if (lengths := self.genome_lengths) is not None:
            rows = [{**row, GENOME_LENGTH: length} for row, length in zip(rows, lengths.tolist(), strict=True)]
        return {"classes": rows, "ranks": {rank.name: [asdict(taxon) for taxon in rank.taxa] for rank in self.ranks}}


def load_classes(mapping: LabelMapping, taxonomy: Path | None = None) -> Classes:
    """Classes with the ranks that the mapping has columns or lineages for, or those of an NCBI taxonomy dump.

    >>> load_classes(load_mapping("species.tsv")).ranks[1].taxa[0].name
    """
    taxa = [Taxon(*one) for one in zip(_class_names(mapping), _tax_ids(mapping), strict=True)]
    if taxonomy is None:
        lineages = lineages_of(mapping.table.to_pylist(), taxa, where=mapping.source)
        found = [
            next((Taxon(lineage[rank].name, one.tax_id) for rank in RANKS if rank in lineage), one)
            for one, lineage in zip(taxa, lineages, strict=True)
        ]
    else:
        if not any(one.tax_id for one in taxa):
            raise BadSource(f"{mapping.source}: has no column tax_id to look up in the taxonomy")
        found, lineages = load_lineages(taxonomy, [one.tax_id for one in taxa], where=mapping.source)
    taxa = [
        Taxon(one.name or taxon.name or f"class {class_id}", taxon.tax_id)
        for one, taxon, class_id in zip(taxa, found, mapping.ids.tolist(), strict=True)
    ]
    return Classes(mapping, taxa, [rank for name in RANKS if (rank := _rank(name, lineages))])


def classes_from_card(card: Mapping[str, object]) -> Classes:
    """The classes on the data card of a run, without its mapping and taxonomy files."""
    rows = cast("list[dict[str, Any]]", card["classes"])
    ranks = cast("dict[str, list[dict[str, Any]]]", card["ranks"])
    names = ["class_id", "name", "tax_id", *([GENOME_LENGTH] if rows and GENOME_LENGTH in rows[0] else [])]
    columns = {name: [row[name] for row in rows] for name in names}
    return Classes(
        load_mapping(columns),
        [Taxon(row["name"], row["tax_id"]) for row in rows],
        [
            Rank(name, [Taxon(**taxon) for taxon in taxa], np.array([row[name] for row in rows], np.int64))
            for name, taxa in ranks.items()
        ],
    )


def prediction_column(rank: str) -> str:
    """The column of predictions at a rank: `class` is the predicted class, so the rank of that name is `rank_class`."""
    return "rank_class" if rank == "class" else rank


def _rank(name: str, lineages: Sequence[Lineage]) -> Rank | None:
    of = [lineage.get(name) for lineage in lineages]
    taxa = list(dict.fromkeys(taxon for taxon in of if taxon is not None))
    place = {taxon: number for number, taxon in enumerate(taxa)}
    numbers = [-1 if taxon is None else place[taxon] for taxon in of]
    return Rank(name, taxa, np.array(numbers, np.int64)) if taxa else None


def _tax_ids(mapping: LabelMapping) -> list[int]:
    name = mapping.tax_id
    if name is None:
        return [0] * mapping.num_classes
    column = mapping.table.column(name)
    if not pa.types.is_integer(column.type):
        raise BadSource(f"{mapping.source}: expected integers in {name}, found {column.type}: {column[0]}")
    return [value or 0 for value in column.to_pylist()]


def _class_names(mapping: LabelMapping) -> list[str]:
    """From the best column of texts that tells the classes apart, else from the best; empty where it has none."""
    texts = [name for name in mapping.labels if pa.types.is_string(mapping.table.schema.field(name).type)]
    usable = [name for name in (*_NAMES, *texts) if name in texts and name not in LINEAGES]
    columns = [["" if value is None else str(value) for value in mapping.column(name).to_pylist()] for name in usable]
    full = [column for column in columns if len({*column}) == len(column)]
    return next(iter([*full, *columns]), [""] * mapping.num_classes)
