"""Labels that are not in headers: one class per file, or a tax id that the mapping has."""

from pathlib import Path

import numpy as np
import pytest

import millstream as ms
from millstream.errors import BadSource
from millstream.reads.kind import HEADERS
from millstream.reads.labels import are_by_file
from millstream.reads.mapping import load_mapping
from millstream.reads.simulate import SimulateSettings, simulate
from millstream.reads.study import Classification
from millstream.training.run import study_of

CONTIGS = {"562_E_coli.fna": "ACGT" * 30, "573_K.fna": "AACC" * 30, "77_other.fna": "AAGT" * 30}


@pytest.fixture
def genomes(tmp_path: Path) -> Path:
    """Three genomes of two contigs each, in files that start with their tax id."""
    folder = tmp_path / "genomes"
    folder.mkdir()
    for name, bases in CONTIGS.items():
        (folder / name).write_text(f">a\n{bases}\n>b some words\n{bases[::-1]}\n")
    return folder


def write(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(row.replace(" ", "\t") for row in rows) + "\n")
    return path


def test_each_file_is_of_the_class_that_the_mapping_has_for_its_name(genomes: Path, tmp_path: Path):
    mapping = write(
        tmp_path / "map.tsv",
        "file class_id species",
        "77_other.fna 8 x",
        "562_E_coli.fna.gz 3 y",  # another ending than the file
        "573_K 8 x",
    )
    reads = ms.open(genomes, mapping=mapping)
    assert isinstance(reads, ms.Reads)
    assert reads.table.column("class_id").to_pylist() == [3, 3, 8, 8, 8, 8]
    assert reads.fetch([5, 0], ["label", "species"]).columns["label"].tolist() == [1, 0]  # pyright: ignore
    assert reads[2].columns["species"] == "x"
    again = ms.open(genomes, mapping=write(mapping, *("file class_id species", *(f"{n} 3 y" for n in CONTIGS))))
    assert again.fingerprint != reads.fingerprint


def test_files_of_a_class_need_no_ids(genomes: Path, tmp_path: Path):
    mapping = write(
        tmp_path / "map.tsv", "file species", *(f"{name} {s}" for name, s in zip(CONTIGS, "yxy", strict=True))
    )
    reads = ms.open(genomes, mapping=mapping)
    assert reads.column("label").to_pylist() == [0, 0, 1, 1, 0, 0]
    assert reads.column("species").to_pylist() == list("yyxxyy")


def test_a_file_may_start_with_a_tax_id_of_the_mapping_and_without_class_ids_tax_ids_are_classes(
    genomes: Path, tmp_path: Path
):
    mapping = write(tmp_path / "map.tsv", "tax_id species", "573 k", "562 e", "77 o")
    assert ms.open(genomes, mapping=mapping).column("tax_id").to_pylist() == [562, 562, 573, 573, 77, 77]
    both = write(tmp_path / "both.tsv", "class_id tax_id", "1 573", "0 562", "2 77")
    assert ms.open(genomes, mapping=both).column("class_id").to_pylist() == [0, 0, 1, 1, 2, 2]


def test_headers_may_have_a_tax_id_instead_of_a_class_id(tmp_path: Path):
    reads = tmp_path / "reads.fa"
    reads.write_text("".join(f">kraken:taxid|{tax_id} r\nACGT\n" for tax_id in (573, 562, 573)))
    mapping = write(tmp_path / "map.tsv", "class_id tax_id species", "4 562 e", "9 573 k")
    regex = r"kraken:taxid\|(?P<tax_id>\d+)"
    opened = ms.open(reads, header_regex=regex, mapping=mapping)
    assert opened.column("class_id").to_pylist() == [9, 4, 9]
    assert opened.column("label").to_pylist() == [1, 0, 1]
    with pytest.raises(BadSource, match=r"1 tax_id values are not in .*: 562"):
        ms.open(reads, mapping=write(tmp_path / "few.tsv", "class_id tax_id", "9 573"))
    with pytest.raises(BadSource, match="tax id 573 is that of class_id 3 and of 9"):
        ms.open(reads, mapping=write(tmp_path / "twice.tsv", "class_id tax_id", "9 573", "3 573"))


def test_a_file_of_two_classes_is_refused(tmp_path: Path):
    with pytest.raises(BadSource, match=r"a\.fna is in two classes, 1 and 2"):
        load_mapping(write(tmp_path / "map.tsv", "file class_id", "a.fna 1", "a.fna 2"))


def test_a_labelled_header_is_believed_more_than_a_file_name_unless_the_mapping_lists_files(
    genomes: Path, tmp_path: Path
):
    mapping = write(tmp_path / "map.tsv", "class_id tax_id", "0 562", "1 573", "2 77")
    labelled = tmp_path / "562_reads.fa"
    labelled.write_text(">lbl|1|573|4|r/1\nACGT\n")
    assert are_by_file(sorted(genomes.iterdir()), load_mapping(mapping), HEADERS)
    assert not are_by_file([labelled], load_mapping(mapping), HEADERS)
    listed = write(tmp_path / "listed.tsv", "file class_id", "562_reads.fa 0")
    assert are_by_file([labelled], load_mapping(listed), HEADERS)


def test_classifiers_train_on_files_of_one_class_and_are_scored_on_labelled_reads(
    genomes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    mapping = write(tmp_path / "map.tsv", "class_id tax_id species", "5 77 o", "6 573 k", "7 562 e")
    files = sorted(genomes.iterdir())
    simulate(files, [tmp_path / "val.fa"], settings=SimulateSettings(reads=30, length=50), mapping=mapping)
    given = {"data": {"train": str(genomes), "val": str(tmp_path / "val.fa")}, "mapping": str(mapping)}
    study = study_of({**given, "model": "kmer-exact", "memory": "200MB"})
    assert isinstance(study, Classification)
    assert study.splits.counts["train"].tolist() == [2, 2, 2, 0]
    assert np.count_nonzero(study.splits.counts["val"][:3]) == 3
    assert "each file has reads of one class (3 files)" in capsys.readouterr().err
