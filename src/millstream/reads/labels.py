"""The class of a read, if its header does not have a class id: that of its file, of its tax id, or in a table."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from millstream.core.collection import Numbers
from millstream.core.config import first_few
from millstream.errors import BadSource
from millstream.reads.files import ReadFile
from millstream.reads.files.source import first_header
from millstream.reads.mapping import KEY, TAX_ID, LabelMapping
from millstream.reads.pack import PackFile, is_pack
from millstream.reads.read_table import TableColumns, joined_columns

SPECIES = "species"
BINOMIAL = re.compile(r"[A-Z][a-z]+_[a-z]+")
ENDING = re.compile(r"(\.(fa|fasta|fna|fq|fastq|pack|bam|cram))?(\.(gz|bgz|zst|bz2|xz))?$", re.IGNORECASE)
Part = ReadFile | PackFile


def taxon_of(path: Path, header: str = "") -> int:
    """The tax id at the start of a file's name, as in `562_E_coli.fna`, or in its first header; 0 if there is none."""
    match = re.match(r"(\d+)[_.]", path.name) or re.search(r"kraken:taxid\|(\d+)", header)
    return int(match[1]) if match else 0


def species_of(path: Path) -> str:
    """The species in the name of a file, as in `562_Escherichia_coli_K12.fna`; otherwise the whole name."""
    stem = re.sub(r"^\d+[_.]", "", path.name.split(".")[0])
    return " ".join(stem.split("_")[:2]) if BINOMIAL.match(stem) else stem or path.name


@dataclass(frozen=True, eq=False)
class FileClasses:
    """The classes of files in which all reads are of one."""

    mapping: LabelMapping

    def listed(self, path: Path) -> int | None:
        """The class id of a file in the column `file` of the mapping, with or without its ending."""
        return self.mapping.files.get(path.name, self._stems.get(_stem(path.name)))

    def find(self, path: Path, taxon: Callable[[], int]) -> int | None:
        """The same, or that of its taxon, which is 0 if it is not known, or of the species in its name."""
        found = self.listed(path)
        if found is not None:
            return found
        tax_id = taxon()
        return self.mapping.taxa.get(tax_id) if tax_id else self._species.get(species_of(path))

    @cached_property
    def _stems(self) -> dict[str, int]:
        return {_stem(name): class_id for name, class_id in self.mapping.files.items()}

    @cached_property
    def _species(self) -> dict[str, int]:
        if SPECIES not in self.mapping.labels:
            return {}
        names = self.mapping.column(SPECIES).to_pylist()
        once = {name for name, count in Counter(names).items() if count == 1}
        return {name: own for name, own in zip(names, self.mapping.ids.tolist(), strict=True) if name in once}


def are_by_file(paths: Sequence[Path], mapping: LabelMapping, header_regex: str) -> bool:
    """Whether files are of one class each: the mapping lists them, or knows the taxa in their names and not headers.

    Where it knows only some of them, the headers of the others do not match.
    """
    classes = FileClasses(mapping)
    if mapping.files and all(classes.listed(path) is not None for path in paths):
        return True
    unknown = [path for path in paths if classes.find(path, partial(taxon_of, path)) is None]
    if len(unknown) == len(paths):
        return False
    return re.match(header_regex, header_of((unknown or paths)[0])) is None


def header_of(path: Path) -> str:
    """The first header line of a file."""
    if not is_pack(path):
        return first_header(path)
    text, _, ends = PackFile(path, memory=1 << 20).headers(np.zeros(1, np.int64))
    return text[: ends[0]].tobytes().decode(errors="replace")


def put_table(parts: Sequence[Part], table: Path, *, key: str = KEY, index_dir: Path | None = None) -> bool:
    """Add the columns of a table of reads to these files; returns whether one has the class ids."""
    columns = joined_columns(parts, table, key=key, index_dir=index_dir)
    for part, found in zip(parts, columns, strict=True):
        for name in found.names:
            part.columns.put(name, InTable(found, name))
    return all(key in found.names for found in columns)


def put_classes(parts: Sequence[Part], mapping: LabelMapping, *, are_known: bool | None, must_be_known: bool) -> None:
    """Add the column of class ids that the mapping needs to these files, unless they have it.

    `are_known` is whether a table had the class ids; None: there was no table.
    """
    key, classes = mapping.key, FileClasses(mapping)
    name = next((name for name in TAX_ID if all(name in part.columns for part in parts)), None)
    if mapping.files and all(classes.listed(part.path) is not None for part in parts):
        _put_by_file(parts, classes)
    elif are_known or (are_known is None and all(key in part.columns for part in parts)):
        return
    elif name is not None and mapping.tax_id is not None:
        for part in parts:
            part.columns.put(key, OfTaxon(part, name, mapping, must_be_known=must_be_known))
    else:
        found = [classes.find(part.path, partial(_taxon, part)) for part in parts]
        unknown = [part.path for part, one in zip(parts, found, strict=True) if one is None]
        if unknown and len(unknown) < len(parts) and must_be_known:
            raise BadSource(
                f"{unknown[0]}: one of {len(unknown)} of {len(parts)} files for which {mapping.source} has no row, "
                "neither by name nor by tax id. Add rows, or leave the files out"
            )
        if len(unknown) < len(parts):
            _put_by_file(parts, classes)


def _put_by_file(parts: Sequence[Part], classes: FileClasses) -> None:
    for part in parts:
        part.columns.put(classes.mapping.key, OfFile(classes.find(part.path, partial(_taxon, part))))


@dataclass(frozen=True)
class OfFile:
    """A column with one value for all reads of a file; None if its class is not in the mapping."""

    value: int | None

    @property
    def identity(self) -> object:
        return self.value

    @property
    def distinct(self) -> Numbers:
        return np.array([] if self.value is None else [self.value], np.int64)

    def take(self, rows: Numbers) -> pa.Array:
        return pa.array(np.full(len(rows), self.value or 0, np.int64), mask=np.full(len(rows), self.value is None))


@dataclass(frozen=True)
class InTable:
    """A column of a table of reads."""

    table: TableColumns
    name: str

    @property
    def identity(self) -> object:
        return self.table.identity

    @property
    def distinct(self) -> Numbers | None:
        return self.table.columns.distinct(self.name)

    def take(self, rows: Numbers) -> pa.Array:
        return self.table.columns.take_stored(self.name, rows)


class OfTaxon:
    """The class ids of reads by another column, their tax ids; none for a taxon that is not in the mapping."""

    identity = "taxon"

    def __init__(self, part: Part, name: str, mapping: LabelMapping, *, must_be_known: bool) -> None:
        self._part, self._name = part, name
        taxa = sorted(mapping.taxa.items())
        self._taxa = np.array([tax_id for tax_id, _ in taxa], np.int64)
        self._classes = np.array([class_id for _, class_id in taxa], np.int64)
        distinct = part.columns.distinct(name)
        if distinct is None:
            column = part.column(name, np.arange(part.records))
            if not pa.types.is_integer(column.type):
                raise BadSource(
                    f"{part.path}: {name} is text, but numbers in the mapping. Let its group in header_regex match "
                    f"only digits, as in (?P<{name}>\\d+)"
                )
            distinct = column.unique().drop_null().to_numpy()
        is_known = np.isin(distinct, self._taxa)
        if must_be_known and not is_known.all():
            unknown = np.sort(distinct[~is_known])
            raise BadSource(
                f"{part.path}: {len(unknown)} {name} values are not in {mapping.source} ({mapping.num_classes} "
                f"classes): {first_few(unknown.tolist())}. Add them, or use another mapping"
            )
        self.distinct: Numbers = self._classes[np.searchsorted(self._taxa, distinct[is_known])]

    def take(self, rows: Numbers) -> pa.Array:
        tax_ids = self._part.column(self._name, rows).fill_null(-1).to_numpy()
        places = np.minimum(np.searchsorted(self._taxa, tax_ids), len(self._taxa) - 1)
        return pa.array(self._classes[places], mask=self._taxa[places] != tax_ids)


def _taxon(part: Part) -> int:
    """The tax id in the name of a file, or in its first header."""
    return taxon_of(part.path) or taxon_of(part.path, part.names_of(np.zeros(min(part.records, 1), np.int64))[0])


def _stem(name: str) -> str:
    return ENDING.sub("", name)
