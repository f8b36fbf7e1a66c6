"""Classes and the taxa above them: from the columns of a mapping, an NCBI dump, or the data card of a run."""

import json
from pathlib import Path

import numpy as np
import pytest

from millstream.errors import BadSource
from millstream.reads.mapping import Classes, Taxon, classes_from_card, load_classes, load_mapping

NODES = [  # tax id, parent, rank, name
    (1, 1, "no rank", "root"),
    (131567, 1, "cellular root", "cellular organisms"),
    (2, 131567, "superkingdom", "Bacteria"),
    (1224, 2, "phylum", "Pseudomonadota"),
    (1236, 1224, "class", "Gammaproteobacteria"),
    (543, 1236, "family", "Enterobacteriaceae"),
    (561, 543, "genus", "Escherichia"),
    (562, 561, "species", "Escherichia coli"),
    (83333, 562, "strain", "Escherichia coli K-12"),
    (570, 543, "genus", "Klebsiella"),
    (573, 570, "species", "Klebsiella pneumoniae"),
    (10239, 1, "acellular root", "Viruses"),
    (10710, 10239, "species", "Lambdavirus lambda"),
]


def write_dump(folder: Path) -> Path:
    """In NCBI's format, with synonyms besides the scientific names."""
    folder.mkdir()
    nodes = [f"{own}\t|\t{parent}\t|\t{rank}\t|\t\t|\t0\t|\n" for own, parent, rank, _ in NODES]
    names = [f"{own}\t|\tbacillus {own}\t|\t\t|\tsynonym\t|\n" for own, *_ in NODES]
    names += [f"{own}\t|\t{name}\t|\t\t|\tscientific name\t|\n" for own, _, _, name in NODES]
    (folder / "nodes.dmp").write_text("".join(nodes))
    (folder / "names.dmp").write_text("".join(names))
    return folder


def taxa_of(classes: Classes, rank: str) -> list[str | None]:
    """The taxon of each class at a rank."""
    found = classes.rank(rank)
    assert found is not None
    return [found.taxa[number].name if number >= 0 else None for number in found.of_class.tolist()]


# -- the mapping alone


def test_columns_named_like_ranks_become_ranks_from_the_lowest():
    classes = load_classes(
        load_mapping(
            {
                "class_id": [7, 3, 5],
                "family": ["Enterobacteriaceae", "Vibrionaceae", "Enterobacteriaceae"],
                "species": ["Escherichia coli", "Vibrio cholerae", "Klebsiella pneumoniae"],
                "genus": ["Escherichia", "Vibrio", "Klebsiella"],
                "tax_id": [562, 666, 573],
                "genus_tax_id": [561, 662, None],
            }
        )
    )
    assert len(classes) == 3
    assert classes.taxa[0] == Taxon("Vibrio cholerae", 666)  # in order of class id
    assert [rank.name for rank in classes.ranks] == ["species", "genus", "family"]
    assert taxa_of(classes, "family") == ["Vibrionaceae", "Enterobacteriaceae", "Enterobacteriaceae"]
    assert list(classes.ranks[0].taxa) == list(classes.taxa)
    assert [taxon.tax_id for taxon in classes.ranks[1].taxa] == [662, 0, 561]
    assert classes.rank("order") is None


def test_a_class_without_a_genus_has_none():
    classes = load_classes(load_mapping({"class_id": [1, 2, 3], "name": list("abc"), "genus": ["G", None, ""]}))
    assert taxa_of(classes, "genus") == ["G", None, None]
    assert [taxon.name for taxon in classes.taxa] == ["a", "b", "c"]


def test_classes_are_named_by_the_best_column_or_their_ids():
    assert load_classes(load_mapping({"class_id": [1], "strain": ["K-12"], "species": ["coli"]})).taxa[0].name == "coli"
    assert load_classes(load_mapping({"class_id": [1], "host": ["gut"]})).taxa[0].name == "gut"
    assert load_classes(load_mapping({"class_id": [4], "size": [12]})).taxa[0] == Taxon("class 4", 0)
    assert load_classes(load_mapping({"class_id": [4, 5], "name": ["a", None]})).taxa[1].name == "class 5"


def test_tax_ids_must_be_integers():
    assert load_classes(load_mapping({"class_id": [1, 2], "taxid": [562, None]})).taxa[1].tax_id == 0
    with pytest.raises(BadSource, match="tax_id, found string"):
        load_classes(load_mapping({"class_id": [1], "tax_id": ["562"]}))


# -- the NCBI dump


def test_the_dump_gives_every_rank_and_a_superkingdom_is_a_domain(tmp_path: Path):
    mapping = load_mapping({"class_id": [0, 1, 2, 3], "tax_id": [562, 83333, 573, 10710], "name": list("abcd")})
    classes = load_classes(mapping, write_dump(tmp_path / "dump"))
    assert [rank.name for rank in classes.ranks] == ["species", "genus", "family", "class", "phylum", "domain"]
    assert taxa_of(classes, "species")[:2] == ["Escherichia coli", "Escherichia coli"]  # also that of a strain
    assert taxa_of(classes, "genus") == ["Escherichia", "Escherichia", "Klebsiella", None]
    assert taxa_of(classes, "domain") == ["Bacteria", "Bacteria", "Bacteria", "Viruses"]
    assert classes.ranks[-1].taxa[0] == Taxon("Bacteria", 2)
    assert [taxon.name for taxon in classes.taxa] == list("abcd")  # the names in the mapping


def test_a_tax_id_missing_from_the_dump_is_named(tmp_path: Path):
    dump = write_dump(tmp_path / "dump")
    with pytest.raises(BadSource, match=r"999 .*nodes\.dmp"):
        load_classes(load_mapping({"class_id": [0, 1], "tax_id": [562, 999]}), dump)
    with pytest.raises(BadSource, match="tax_id"):
        load_classes(load_mapping({"class_id": [0], "name": ["a"]}), dump)


def test_a_damaged_or_missing_dump_is_named_by_line_and_file(tmp_path: Path):
    mapping = load_mapping({"class_id": [0], "tax_id": [562]})
    with pytest.raises(BadSource, match=r"nodes\.dmp"):
        load_classes(mapping, tmp_path)
    dump = write_dump(tmp_path / "dump")
    (dump / "names.dmp").unlink()
    with pytest.raises(BadSource, match=r"names\.dmp"):
        load_classes(mapping, dump)
    lines = (dump / "nodes.dmp").read_text().splitlines(keepends=True)
    (dump / "nodes.dmp").write_text("".join(lines[:2]) + "<html>not found</html>\n")
    with pytest.raises(BadSource, match=r"nodes\.dmp: line 3 .*<html>not found"):
        load_classes(mapping, dump)


# -- the data card


def test_classes_can_be_restored_from_a_data_card(tmp_path: Path):
    mapping = load_mapping({"class_id": [4, 9, 11], "tax_id": [562, 573, 10710], "name": ["a", "b", "c"]})
    classes = load_classes(mapping, write_dump(tmp_path / "dump"))
    again = classes_from_card(json.loads(json.dumps(classes.card())))
    assert again.taxa == classes.taxa and again.mapping.ids.tolist() == [4, 9, 11]
    for one, other in zip(again.ranks, classes.ranks, strict=True):
        assert (one.name, one.taxa) == (other.name, other.taxa)
        assert np.array_equal(one.of_class, other.of_class)
