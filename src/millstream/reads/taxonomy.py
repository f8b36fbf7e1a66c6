"""The classes of a mapping: their names, and the taxa above them, from the mapping or from NCBI's taxonomy dump."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.errors import BadSource
from millstream.reads.mapping import LabelMapping, load_mapping

RANKS = ("species", "genus", "family", "order", "class", "phylum", "kingdom", "domain")  # from the lowest
ROOT = 1
_NAMES = ("species", "name", "label", "organism", "strain")  # columns that name a class, the best first
_ALIASES = {"superkingdom": "domain", "acellular root": "domain"}
_TAX_ID = ("tax_id", "taxid", "taxon_id")


@dataclass(frozen=True)
class Taxon:
    """A taxon; `tax_id` is 0 if it is not known."""

    name: str
    tax_id: int


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


def load_classes(mapping: LabelMapping, taxonomy: Path | None = None) -> Classes:
    """Classes with the ranks that the mapping has columns for (`genus`, ...), or all ranks of a taxonomy dump.

    >>> load_classes(load_mapping("species.tsv")).ranks[1].taxa[0].name
    """
    tax_ids = _tax_ids(mapping)
    names = _class_names(mapping)
    if taxonomy is None:
        lineages = [_row_lineage(row) for row in mapping.table.to_pylist()]
    else:
        if not any(tax_ids):
            raise BadSource(f"{mapping.source}: has no column tax_id to look up in the taxonomy")
        lineages = read_lineages(taxonomy, tax_ids, where=mapping.source)
    taxa = [Taxon(name, tax_id) for name, tax_id in zip(names, tax_ids, strict=True)]
    return Classes(mapping, taxa, [rank for name in RANKS if (rank := _rank(name, lineages))])


def classes_from_card(card: Mapping[str, object]) -> Classes:
    """The classes on the data card of a run, without its mapping and taxonomy files."""
    rows = cast("list[dict[str, Any]]", card["classes"])
    ranks = cast("dict[str, list[dict[str, Any]]]", card["ranks"])
    columns = {name: [row[name] for row in rows] for name in ("class_id", "name", "tax_id")}
    return Classes(
        load_mapping(columns),
        [Taxon(row["name"], row["tax_id"]) for row in rows],
        [
            Rank(name, [Taxon(**taxon) for taxon in taxa], np.array([row[name] for row in rows], np.int64))
            for name, taxa in ranks.items()
        ],
    )


def answer_column(rank: str) -> str:
    """The column of predictions at a rank: `class` is the predicted class, so the rank of that name is `rank_class`."""
    return "rank_class" if rank == "class" else rank


def read_lineages(folder: Path, tax_ids: Sequence[int], *, where: str) -> list[dict[str, Taxon]]:
    """For each tax id, the taxon at its own and every higher rank, from nodes.dmp and names.dmp in a folder."""
    parents, ranks = _read_nodes(folder / "nodes.dmp")
    lineages: list[dict[str, int]] = []
    for tax_id in tax_ids:
        if tax_id == 0:  # not known
            lineages.append({})
            continue
        if tax_id not in parents:
            raise BadSource(
                f"{where}: tax id {tax_id} is not in {folder / 'nodes.dmp'}. Use a newer dump, or correct the tax id"
            )
        lineage: dict[str, int] = {}
        at = tax_id
        while at != ROOT and at in parents:
            lineage.setdefault(ranks[at], at)
            at = parents[at]
        lineages.append(lineage)
    names = _read_names(folder / "names.dmp", {at for lineage in lineages for at in lineage.values()})
    return [{rank: Taxon(names.get(at, str(at)), at) for rank, at in lineage.items()} for lineage in lineages]


def _rank(name: str, lineages: Sequence[dict[str, Taxon]]) -> Rank | None:
    of = [lineage.get(name) for lineage in lineages]
    taxa = list(dict.fromkeys(taxon for taxon in of if taxon is not None))
    place = {taxon: number for number, taxon in enumerate(taxa)}
    numbers = [-1 if taxon is None else place[taxon] for taxon in of]
    return Rank(name, taxa, np.array(numbers, np.int64)) if taxa else None


def _row_lineage(row: dict[str, object]) -> dict[str, Taxon]:
    """From columns named like ranks; their tax ids, if any, are in columns such as `genus_tax_id`."""
    own = next((row[name] for name in _TAX_ID if isinstance(row.get(name), int)), 0)
    lineage: dict[str, Taxon] = {}
    for rank in RANKS:
        if row.get(rank) not in (None, ""):
            tax_id = row.get(f"{rank}_tax_id", own if rank == RANKS[0] else 0)
            lineage[rank] = Taxon(str(row[rank]), tax_id if isinstance(tax_id, int) else 0)
    return lineage


def _tax_ids(mapping: LabelMapping) -> list[int]:
    name = next((name for name in _TAX_ID if name in mapping.table.column_names), None)
    if name is None:
        return [0] * mapping.num_classes
    column = mapping.table.column(name)
    if not pa.types.is_integer(column.type):
        raise BadSource(f"{mapping.source}: expected integers in {name}, found {column.type}")
    return [value or 0 for value in column.to_pylist()]


def _class_names(mapping: LabelMapping) -> list[str]:
    texts = [name for name in mapping.labels if pa.types.is_string(mapping.table.schema.field(name).type)]
    name = next((name for name in (*_NAMES, *texts) if name in texts), None)
    ids = mapping.ids.tolist()
    values = [None] * len(ids) if name is None else mapping.column(name).to_pylist()
    return [str(value) if value else f"class {own}" for value, own in zip(values, ids, strict=True)]


def _read_nodes(path: Path) -> tuple[dict[int, int], dict[int, str]]:
    parents: dict[int, int] = {}
    ranks: dict[int, str] = {}
    kept: dict[str, str] = {}  # one string for each rank, not one for each of millions of nodes
    for own, parent, rank, *_ in _rows(path):
        parents[int(own)] = int(parent)
        ranks[int(own)] = kept.setdefault(rank, _ALIASES.get(rank, rank))
    return parents, ranks


def _read_names(path: Path, wanted: set[int]) -> dict[int, str]:
    names: dict[int, str] = {}
    for own, name, _, kind, *_ in _rows(path):
        if kind == "scientific name" and int(own) in wanted:
            names[int(own)] = name
    return names


def _rows(path: Path) -> Iterator[list[str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                cells = [cell.strip() for cell in line.rstrip("\n").removesuffix("|").split("|")]
                if len(cells) < 4 or not cells[0].isdigit():
                    raise BadSource(
                        f"{path}: line {number} is not in the format of the NCBI taxonomy dump: {line.strip()[:60]!r}"
                    )
                yield cells
    except (FileNotFoundError, NotADirectoryError):
        raise BadSource(f"{path}: no such file; taxonomy= must be the folder of an NCBI taxonomy dump") from None
