"""The taxa above classes: from an NCBI dump, from lineages such as d__Bacteria;p__..., or from columns of ranks."""

import re
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millstream.core.config import first_few
from millstream.core.console import say
from millstream.errors import BadSource

RANKS = ("species", "genus", "family", "order", "class", "phylum", "kingdom", "domain")  # from the lowest
ROOT = 1
NODES, NAMES, MERGED = "nodes.dmp", "names.dmp", "merged.dmp"
_ALIASES = {"superkingdom": "domain", "acellular root": "domain"}
_PREFIXES = {rank[0]: rank for rank in RANKS}
LINEAGES = ("lineage", "taxonomy", "gtdb_taxonomy")  # columns of lineages
Row = Mapping[str, object]  # of a mapping


@dataclass(frozen=True)
class Taxon:
    """A taxon; `tax_id` is 0 if it is not known."""

    name: str
    tax_id: int


Lineage = Mapping[str, Taxon]  # a taxon at each rank of RANKS that is known


def lineages_of(rows: Sequence[Row], classes: Sequence[Taxon], *, where: str) -> list[Lineage]:
    """The lineage of each class, from columns named like ranks, and one of lineages like `d__Bacteria;...;s__...`.

    The tax ids of taxa are in columns such as `genus_tax_id`. A class with the name of its lowest taxon, or without a
    name, is that taxon: both have one tax id. Classes of a taxon share the taxa above it; what one of them
    lacks is filled in.
    """
    named = [_names(row, where=where) for row in rows]
    known, own = defaultdict[tuple[str, str], set[int]](set), defaultdict[tuple[str, str], set[int]](set)
    for row, names, one in zip(rows, named, classes, strict=True):
        for place, (rank, name) in enumerate(names.items()):
            if given := _integer(row.get(f"{rank}_tax_id")):
                known[rank, name].add(given)
            if not place and one.name in ("", name):
                own[rank, name].add(one.tax_id)

    def taxon(row: Row, rank: str, name: str) -> Taxon:
        found = known[rank, name] or own[rank, name]
        is_one = len(found) == 1
        return Taxon(name, next(iter(found)) if is_one else _integer(row.get(f"{rank}_tax_id")))

    found = [
        {rank: taxon(row, rank, name) for rank, name in names.items()} for row, names in zip(rows, named, strict=True)
    ]
    return _joined(found, where=where)


def _integer(value: object) -> int:
    return value if isinstance(value, int) else 0


def _names(row: Row, *, where: str) -> dict[str, str]:
    """The names at each rank, from the lowest."""
    text = next((value for name in LINEAGES if isinstance(value := row.get(name), str) and value), "")
    found = parse_lineage(text, where=where)
    found |= {rank: str(row[rank]) for rank in RANKS if row.get(rank) not in (None, "")}
    return {rank: found[rank] for rank in RANKS if rank in found}


def parse_lineage(text: str, *, where: str) -> dict[str, str]:
    """The names at each rank of `d__Bacteria;p__Bacillota;...;s__`; without ranks that have no name.

    >>> parse_lineage("d__Bacteria;g__Bacillus;s__", where="species.tsv")
    {'domain': 'Bacteria', 'genus': 'Bacillus'}
    """
    found: dict[str, str] = {}
    for part in filter(None, map(str.strip, re.split(r"[;|]", text))):
        prefix, mark, name = part.partition("__")
        rank = _PREFIXES.get(prefix)
        if not mark or rank is None or rank in found:
            raise BadSource(
                f"{where}: not a lineage: {text!r}. Expected taxa as in d__Bacteria;g__Bacillus;s__Bacillus subtilis, "
                f"one per rank, with the prefixes {', '.join(f'{one}__' for one in reversed(_PREFIXES))}"
            )
        if name:
            found[rank] = name
    return found


def _joined(lineages: Sequence[Lineage], *, where: str) -> list[Lineage]:
    """With the taxa above a taxon that any of its classes has; BadSource if these differ."""
    above = defaultdict[tuple[str, Taxon], dict[str, Taxon]](dict)
    for lineage in lineages:
        for place, rank in enumerate(RANKS):
            if rank not in lineage:
                continue
            own = above[rank, lineage[rank]]
            for higher in RANKS[place + 1 :]:
                if higher in lineage and own.setdefault(higher, lineage[higher]) != lineage[higher]:
                    taxa = " and in ".join(
                        sorted(
                            f"{one.name} ({one.tax_id})" if one.tax_id else one.name
                            for one in (own[higher], lineage[higher])
                        )
                    )
                    raise BadSource(
                        f"{where}: the {rank} {lineage[rank].name} is in two taxa at rank {higher}, in {taxa}. Correct "
                        f"one, or tell taxa of the same name apart by their tax ids, in a column {rank}_tax_id"
                    )
    joined: list[Lineage] = []
    for lineage in lineages:
        for rank in RANKS:  # what is filled in is joined in its turn
            if rank in lineage:
                lineage = {**above[rank, lineage[rank]], **lineage}
        joined.append(lineage)
    return joined


def load_lineages(folder: Path, tax_ids: Sequence[int], *, where: str) -> tuple[list[Taxon], list[Lineage]]:
    """For each tax id its taxon, and that at every rank of it and above, from an NCBI dump; a tax id of 0 has none.

    Tax ids that NCBI has merged into others are followed, and named in a message.
    """
    nodes = load_nodes(folder / NODES)
    missing = [tax_id for tax_id in tax_ids if tax_id and nodes.find(tax_id) < 0]
    merged = _load_merged(folder / MERGED, set(missing)) if missing else {}
    if unknown := [tax_id for tax_id in missing if nodes.find(merged.get(tax_id, 0)) < 0]:
        raise BadSource(
            f"{where}: tax id {first_few(unknown)} is not in {folder / NODES}. Use a newer dump, or correct the tax id"
        )
    if merged:
        pairs = [f"{old} into {new}" for old, new in merged.items()]
        say(f"{where}: NCBI has merged the tax ids {first_few(pairs)}; these are used")
    found = [merged.get(tax_id, tax_id) for tax_id in tax_ids]
    lineages = [nodes.lineage(tax_id, where=folder / NODES) if tax_id else {} for tax_id in found]
    wanted = {*found, *(at for lineage in lineages for at in lineage.values())}
    names = _load_names(folder / NAMES, wanted)

    def taxon(tax_id: int) -> Taxon:
        return Taxon(names.get(tax_id, str(tax_id) if tax_id else ""), tax_id)

    return [*map(taxon, found)], [{rank: taxon(at) for rank, at in lineage.items()} for lineage in lineages]


@dataclass(frozen=True)
class Nodes:
    """The nodes of a dump in order of tax id: 17 bytes each, since NCBI has 2.7 million."""

    ids: NDArray[np.int64]
    parents: NDArray[np.int64]
    ranks: NDArray[np.uint8]  # places in RANKS, or past its end

    def find(self, tax_id: int) -> int:
        """Its place; -1 if there is no such tax id."""
        place = int(self.ids.searchsorted(tax_id))
        return place if place < len(self.ids) and self.ids[place] == tax_id else -1

    def lineage(self, tax_id: int, *, where: Path) -> dict[str, int]:
        """The tax ids at the ranks of RANKS, of it and above."""
        found: dict[str, int] = {}
        passed = set[int]()
        while tax_id != ROOT and (place := self.find(tax_id)) >= 0:
            if tax_id in passed:
                raise BadSource(f"{where}: tax id {tax_id} is above itself. Download the dump again")
            passed.add(tax_id)
            if (rank := int(self.ranks[place])) < len(RANKS):
                found.setdefault(RANKS[rank], tax_id)
            tax_id = int(self.parents[place])
        return found


def load_nodes(path: Path) -> Nodes:
    """nodes.dmp as arrays; the file is read line by line."""
    codes = {rank.encode(): RANKS.index(_ALIASES.get(rank, rank)) for rank in (*RANKS, *_ALIASES)}
    ids, parents, ranks = array("q"), array("q"), array("B")
    for (own, parent), (rank,) in _rows(path, 2, 1):
        ids.append(own)
        parents.append(parent)
        ranks.append(codes.get(rank.strip(), len(RANKS)))
    found = Nodes(np.frombuffer(ids, np.int64), np.frombuffer(parents, np.int64), np.frombuffer(ranks, np.uint8))
    if (np.diff(found.ids) > 0).all():
        return found
    order = np.argsort(found.ids, kind="stable")
    return Nodes(found.ids[order], found.parents[order], found.ranks[order])


def _load_names(path: Path, wanted: set[int]) -> dict[int, str]:
    return {
        own: name.strip().decode(errors="replace")
        for (own,), (name, _, kind) in _rows(path, 1, 3)
        if own in wanted and kind.strip() == b"scientific name"
    }


def _load_merged(path: Path, wanted: set[int]) -> dict[int, int]:
    """The new tax ids of old ones; none without the file."""
    return {old: new for (old, new), _ in _rows(path, 2, 0) if old in wanted} if path.exists() else {}


def _rows(path: Path, num_ids: int, num_others: int) -> Iterator[tuple[list[int], list[bytes]]]:
    """Of each line the tax ids it starts with, and the cells after them, not stripped."""
    num_cells = num_ids + num_others
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                cells = line.split(b"|", num_cells)
                try:
                    ids = [int(cell) for cell in cells[:num_ids]]
                    if len(cells) <= num_cells or not 0 < min(ids) <= max(ids) < 1 << 63:
                        raise ValueError
                except ValueError:
                    shown = line.decode(errors="replace").strip()[:60]
                    raise BadSource(
                        f"{path}: line {number} is not in the format of the NCBI taxonomy dump: {shown!r}"
                    ) from None
                yield ids, cells[num_ids:num_cells]
    except (FileNotFoundError, NotADirectoryError):
        raise BadSource(f"{path}: no such file; taxonomy= must be the folder of an NCBI taxonomy dump") from None
