"""Lineages: from NCBI dumps, from strings, and from tables; a taxon has one place in the tree."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from millstream.errors import BadSource
from millstream.reads.kraken import Assignments, kraken_report, rank_of
from millstream.reads.mapping import Classes, load_classes, load_mapping
from millstream.reads.taxonomy import Taxon, load_nodes, parse_lineage

GTDB = "d__Bacteria;p__Pseudomonadota;c__Gammaproteobacteria;o__Enterobacterales;f__Enterobacteriaceae;g__{};s__{}"


def classes_of(taxonomy: Path | None = None, /, **columns: list[object]) -> Classes:
    return load_classes(load_mapping({"class_id": list(range(len(next(iter(columns.values()))))), **columns}), taxonomy)


def taxa_at(classes: Classes, rank: str) -> list[Taxon | None]:
    found = classes.rank(rank)
    assert found is not None
    return [found.taxa[number] if number >= 0 else None for number in found.of_class.tolist()]


def names_at(classes: Classes, rank: str) -> list[str | None]:
    return [taxon and taxon.name for taxon in taxa_at(classes, rank)]


def write_dump(folder: Path, nodes: list[tuple[int, int, str]], merged: dict[int, int] | None = None) -> Path:
    folder.mkdir()
    rows = [f"{own}\t|\t{parent}\t|\t{rank}\t|\t\t|\n" for own, parent, rank in nodes]
    names = [f"{own}\t|\ttaxon {own}\t|\t\t|\tscientific name\t|\n" for own, *_ in nodes]
    (folder / "nodes.dmp").write_text("".join(rows))
    (folder / "names.dmp").write_text("".join(names))
    if merged:
        (folder / "merged.dmp").write_text("".join(f"{old}\t|\t{new}\t|\n" for old, new in merged.items()))
    return folder


# -- lineages such as d__Bacteria;...;s__Escherichia coli


def test_a_lineage_gives_every_rank_that_has_a_name():
    text = GTDB.format("Escherichia", "")
    assert parse_lineage(text, where="here") == {
        "domain": "Bacteria",
        "phylum": "Pseudomonadota",
        "class": "Gammaproteobacteria",
        "order": "Enterobacterales",
        "family": "Enterobacteriaceae",
        "genus": "Escherichia",
    }
    assert parse_lineage("k__Fungi|g__Candida", where="here") == {"kingdom": "Fungi", "genus": "Candida"}
    assert parse_lineage("", where="here") == {}


@pytest.mark.parametrize("text", ["Bacteria;Bacillota", "x__Bacteria", "g__A;g__B", "d_Bacteria"])
def test_what_is_not_a_lineage_is_refused_with_its_text(text: str):
    with pytest.raises(BadSource, match=rf"^species\.tsv: .*{text}"):
        parse_lineage(text, where="species.tsv")


@pytest.mark.parametrize("column", ["lineage", "taxonomy", "gtdb_taxonomy"])
def test_a_column_of_lineages_names_classes_of_any_rank(column: str):
    lineages = [GTDB.format("Escherichia", "Escherichia coli"), GTDB.format("Klebsiella", ""), "d__Archaea"]
    classes = classes_of(**{column: lineages, "tax_id": [562, 570, None]})
    assert classes.taxa == [Taxon("Escherichia coli", 562), Taxon("Klebsiella", 570), Taxon("Archaea", 0)]
    assert [rank_of(classes, label) for label in range(3)] == ["species", "genus", "domain"]
    assert names_at(classes, "species") == ["Escherichia coli", None, None]
    assert taxa_at(classes, "genus") == [Taxon("Escherichia", 0), Taxon("Klebsiella", 570), None]
    assert names_at(classes, "domain") == ["Bacteria", "Bacteria", "Archaea"]


def test_strains_are_told_apart_and_share_their_species():
    classes = classes_of(
        species=["Escherichia coli"] * 2 + ["Shigella sonnei"],
        strain=["K-12", "O157", "Ss046"],
        tax_id=[83333, 83334, 9],
    )
    assert [taxon.name for taxon in classes.taxa] == ["K-12", "O157", "Ss046"]
    assert taxa_at(classes, "species")[:2] == [Taxon("Escherichia coli", 0)] * 2  # not two species by their tax ids


def test_classes_of_a_genus_and_of_a_species_in_it_share_a_line_of_the_report():
    lineages = ["d__Bacteria;g__Escherichia", "d__Bacteria;g__Escherichia;s__Escherichia coli"]
    assignments = Assignments(classes_of(lineage=lineages, tax_id=[561, 562]))
    counts = np.zeros(len(assignments), int)
    counts[:2] = 3, 4
    counts[assignments.starts[1]] = 2  # rolled up to the genus
    assert [line.split("\t")[1:] for line in kraken_report(assignments, counts.tolist()).splitlines()] == [
        ["9", "0", "R", "1", "root"],
        ["9", "0", "D", "0", "  Bacteria"],
        ["9", "5", "G", "561", "    Escherichia"],
        ["4", "4", "S", "562", "      Escherichia coli"],
    ]


# -- one place in the tree


def test_what_one_class_of_a_taxon_lacks_comes_from_another():
    classes = classes_of(
        name=list("abc"),
        genus=["G", "G", "H"],
        family=[None, "F", "F"],
        order=[None, None, "O"],
        genus_tax_id=[None, 7, 8],
    )
    assert names_at(classes, "family") == ["F", "F", "F"]
    assert names_at(classes, "order") == ["O", "O", "O"]  # of the genus, by its family
    assert taxa_at(classes, "genus") == [Taxon("G", 7), Taxon("G", 7), Taxon("H", 8)]


def test_a_taxon_in_two_taxa_of_a_rank_is_refused_unless_tax_ids_tell_it_apart():
    genera = {"name": ["bacterium", "fungus"], "genus": ["Morganella"] * 2, "family": ["Morganellaceae", "Agaricaceae"]}
    with pytest.raises(BadSource, match=r"genus Morganella .*family.*Agaricaceae and in Morganellaceae.*genus_tax_id"):
        classes_of(**genera)
    classes = classes_of(**genera, genus_tax_id=[581, 71127])
    assert taxa_at(classes, "genus") == [Taxon("Morganella", 581), Taxon("Morganella", 71127)]


# -- NCBI's dump


def test_merged_tax_ids_are_followed_and_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    nodes = [(1, 1, "no rank"), (562, 561, "species"), (2, 1, "domain"), (561, 2, "genus")]  # not in order
    dump = write_dump(tmp_path / "dump", nodes, merged={662101: 562, 662104: 562, 77: 561})
    classes = classes_of(dump, tax_id=[662101, 562, 77])
    assert classes.taxa == [Taxon("taxon 562", 562), Taxon("taxon 562", 562), Taxon("taxon 561", 561)]
    assert [rank_of(classes, label) for label in range(3)] == ["species", "species", "genus"]
    assert names_at(classes, "genus") == ["taxon 561"] * 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "662101 into 562" in said and "77 into 561" in said and "662104" not in said
    with pytest.raises(BadSource, match="662105"):
        classes_of(dump, tax_id=[662105])


def test_a_dump_in_which_a_taxon_is_above_itself_is_refused(tmp_path: Path):
    dump = write_dump(tmp_path / "dump", [(5, 6, "species"), (6, 5, "genus")])
    with pytest.raises(BadSource, match=r"nodes\.dmp: tax id 5 "):
        classes_of(dump, tax_id=[5])


@pytest.mark.parametrize("line", ["5\t|\tx\t|\tgenus\t|\t|", "5\t|\t6\t|\tgenus", f"{1 << 63}\t|\t5\t|\tgenus\t|\t|"])
def test_a_damaged_line_of_a_dump_is_named(tmp_path: Path, line: str):
    dump = write_dump(tmp_path / "dump", [(1, 1, "no rank")])
    (dump / "nodes.dmp").write_text(f"1\t|\t1\t|\tno rank\t|\t\t|\n{line}\n")
    with pytest.raises(BadSource, match=r"nodes\.dmp: line 2 "):
        classes_of(dump, tax_id=[5])


def test_a_dump_takes_a_few_bytes_per_node(tmp_path: Path):
    """A dictionary of them would take 150; NCBI has 2.7 million."""
    num_nodes = 20_000
    dump = write_dump(tmp_path / "dump", [(own, own // 2 or 1, "species") for own in range(1, num_nodes + 1)])
    tracemalloc.start()
    nodes = load_nodes(dump / "nodes.dmp")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * num_nodes
    assert nodes.find(num_nodes) == num_nodes - 1 and nodes.find(num_nodes + 1) == -1 and nodes.find(0) == -1
