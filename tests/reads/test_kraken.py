"""The Kraken 2-style report, line by line."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from millstream.errors import BadSource
from millstream.reads.kraken import Assignments, check_tax_ids, kraken_report, ranks_without_tax_ids
from millstream.reads.mapping import load_classes, load_mapping

COLUMNS = {
    "class_id": [0, 1, 2, 3],
    "tax_id": [562, 564, 573, 83333],
    "species": ["Escherichia coli", "Escherichia fergusonii", "Klebsiella pneumoniae", "Escherichia coli"],
    "species_tax_id": [562, 564, 573, 562],
    "genus": ["Escherichia", "Escherichia", "Klebsiella", "Escherichia"],
    "genus_tax_id": [561, 561, 570, 561],
    "class": ["Gammaproteobacteria"] * 4,
    "domain": ["Bacteria"] * 4,
    "domain_tax_id": [2] * 4,
}


def report_of(columns: dict, counts: dict[str, int]) -> list[str]:
    """The lines for these numbers of reads per taxon."""
    assignments = Assignments(load_classes(load_mapping(columns)))
    names = [taxon.name for taxon in assignments.taxa]
    given = np.zeros(len(assignments), int)
    for name, count in counts.items():
        given[names.index(name)] += count
    return kraken_report(assignments, given.tolist()).splitlines()


def test_the_report_has_the_format_of_kraken():
    assignments = Assignments(load_classes(load_mapping(COLUMNS)))
    counts = np.zeros(len(assignments), int)
    counts[:4] = 40, 5, 30, 10
    counts[assignments.starts[1]] = 3  # of the genus Escherichia itself
    counts[assignments.starts[2]] = 2  # of the class, whose tax id is not known
    counts[assignments.unclassified] = 10
    assert kraken_report(assignments, counts.tolist()).splitlines() == [
        " 10.00\t10\t10\tU\t0\tunclassified",
        " 90.00\t90\t0\tR\t1\troot",
        " 90.00\t90\t0\tD\t2\t  Bacteria",
        " 90.00\t90\t2\tC\t0\t    Gammaproteobacteria",
        " 58.00\t58\t3\tG\t561\t      Escherichia",
        " 50.00\t50\t40\tS\t562\t        Escherichia coli",
        " 10.00\t10\t10\tS1\t83333\t          Escherichia coli",
        "  5.00\t5\t5\tS\t564\t        Escherichia fergusonii",
        " 30.00\t30\t0\tG\t570\t      Klebsiella",
        " 30.00\t30\t30\tS\t573\t        Klebsiella pneumoniae",
    ]


def test_taxa_without_reads_are_omitted():
    assert report_of(COLUMNS, {"Klebsiella pneumoniae": 4}) == [
        "100.00\t4\t0\tR\t1\troot",
        "100.00\t4\t0\tD\t2\t  Bacteria",
        "100.00\t4\t0\tC\t0\t    Gammaproteobacteria",
        "100.00\t4\t0\tG\t570\t      Klebsiella",
        "100.00\t4\t4\tS\t573\t        Klebsiella pneumoniae",
    ]
    assert report_of(COLUMNS, {"unclassified": 2}) == ["100.00\t2\t2\tU\t0\tunclassified"]


def test_without_ranks_classes_are_species_below_the_root():
    found = report_of({"class_id": [0, 1], "tax_id": [562, 573], "name": ["coli", "pneu"]}, {"coli": 1, "pneu": 2})
    assert found == [
        "100.00\t3\t0\tR\t1\troot",
        " 66.67\t2\t2\tS\t573\t  pneu",
        " 33.33\t1\t1\tS\t562\t  coli",
    ]


def test_classes_of_one_tax_id_are_one_taxon():
    columns = {"class_id": [0, 1], "tax_id": [562, 562], "name": ["one", "two"], "genus": ["G", "G"]}
    assert report_of(columns, {"one": 1, "two": 2, "G": 1}) == [
        "100.00\t4\t0\tR\t1\troot",
        "100.00\t4\t1\tG\t0\t  G",
        " 75.00\t3\t3\tS\t562\t    one",
    ]


def test_genera_without_tax_ids_are_in_the_report_by_name():
    columns = {"class_id": [0, 1, 2], "tax_id": [562, 564, 573], "name": list("abc"), "genus": ["E", "E", "K"]}
    found = report_of(columns, {"E": 5, "K": 3, "a": 2})
    assert [line.split("\t")[1:] for line in found] == [
        ["10", "0", "R", "1", "root"],
        ["7", "5", "G", "0", "  E"],
        ["2", "2", "S", "562", "    a"],
        ["3", "3", "G", "0", "  K"],
    ]
    assert ranks_without_tax_ids(load_classes(load_mapping(columns))) == ["genus"]
    assert ranks_without_tax_ids(load_classes(load_mapping({**columns, "genus_tax_id": [561, 561, 570]}))) == []


def test_classes_without_tax_ids_are_refused():
    classes = load_classes(load_mapping({"class_id": [0, 1], "tax_id": [562, 0], "name": ["coli", "gut"]}))
    with pytest.raises(BadSource, match=r"1 of 2 classes .*gut"):
        check_tax_ids(classes, "runs/reads")


@pytest.mark.skipif(shutil.which("kraken2") is None, reason="kraken2 is not installed")
def test_kraken_2_writes_the_same_columns(tmp_path: Path):
    """Except the rank code, which some builds of Kraken 2 leave empty."""
    bases = np.random.default_rng(0).choice(list("ACGT"), (3, 4000))
    taxa = [(562, "Escherichia coli", 561), (564, "Escherichia fergusonii", 561), (573, "Klebsiella pneumoniae", 570)]
    nodes = [(1, 1, "no rank", "root"), (2, 1, "superkingdom", "Bacteria")]
    nodes += [(561, 2, "genus", "Escherichia"), (570, 2, "genus", "Klebsiella")]
    nodes += [(own, above, "species", name) for own, name, above in taxa]
    (tmp_path / "db" / "taxonomy").mkdir(parents=True)
    (tmp_path / "db" / "taxonomy" / "nodes.dmp").write_text(
        "".join(f"{own}\t|\t{above}\t|\t{rank}\t|\t\t|\n" for own, above, rank, _ in nodes)
    )
    (tmp_path / "db" / "taxonomy" / "names.dmp").write_text(
        "".join(f"{own}\t|\t{name}\t|\t\t|\tscientific name\t|\n" for own, *_, name in nodes)
    )
    genomes = ["".join(row) for row in bases]
    library = zip(taxa, genomes, strict=True)
    (tmp_path / "lib.fa").write_text("".join(f">kraken:taxid|{t[0]}|g{t[0]}\n{text}\n" for t, text in library))
    counts = [30, 4, 9]
    reads = [genomes[own][at : at + 150] for own, count in enumerate(counts) for at in range(0, count * 50, 50)]
    reads += ["".join(np.random.default_rng(1).choice(list("ACGT"), 150)) for _ in range(7)]
    (tmp_path / "reads.fa").write_text("".join(f">r{number}\n{text}\n" for number, text in enumerate(reads)))
    for command in (
        ["kraken2-build", "--add-to-library", "lib.fa", "--db", "db", "--no-masking"],
        ["kraken2-build", "--build", "--db", "db", "--kmer-len", "31"],
        ["kraken2", "--db", "db", "--output", "-", "--report", "report", "reads.fa"],
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    theirs = [line.split("\t") for line in (tmp_path / "report").read_text().splitlines()]
    columns = {
        "class_id": [0, 1, 2],
        "tax_id": [own for own, *_ in taxa],
        "species": [name for _, name, _ in taxa],
        "genus": ["Escherichia", "Escherichia", "Klebsiella"],
        "genus_tax_id": [561, 561, 570],
        "domain": ["Bacteria"] * 3,
        "domain_tax_id": [2] * 3,
    }
    assignments = Assignments(load_classes(load_mapping(columns)))
    given = np.zeros(len(assignments), int)
    given[:3], given[assignments.unclassified] = counts, 7
    mine = [line.split("\t") for line in kraken_report(assignments, given.tolist()).splitlines()]
    assert [row[:3] + row[4:] for row in mine] == [row[:3] + row[4:] for row in theirs]
    assert all(not their[3] or their[3] == my[3] for my, their in zip(mine, theirs, strict=True))
