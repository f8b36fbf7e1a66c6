"""Labels that are not in headers: one class per file, or a tax id that the mapping has."""

import gzip
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


def test_genomes_that_the_mapping_lacks_are_named_and_may_be_validated_on(genomes: Path, tmp_path: Path):
    """Those of other species are foreign reads."""
    mapping = write(tmp_path / "map.tsv", "class_id tax_id species", "6 573 k", "7 562 e")
    (missing,) = genomes.glob("77_*")
    known = ",".join(str(path) for path in sorted(genomes.iterdir()) if path != missing)
    given = {"mapping": str(mapping), "model": "kmer-exact", "memory": "200MB"}
    with pytest.raises(BadSource, match=f"{missing.name}: one of 1 of 3 files") as caught:
        study_of({**given, "data": {"train": str(genomes), "val": known}})
    assert str(mapping) in str(caught.value)
    study = study_of({**given, "data": {"train": known, "val": str(genomes)}})
    assert isinstance(study, Classification)
    assert study.splits.counts["val"].tolist() == [2, 2, 2]


# -- tables of reads

TRUTH = {"S0R0": 562, "S0R1": 573, "S0R2": 562, "S0R3": 77}


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """Pairs of reads whose headers say nothing of their class; one pair is in no table."""
    names = [f"{name}/{mate}" for name in [*TRUTH, "S0R9"] for mate in (1, 2)]
    path = tmp_path / "sample.fq.gz"
    path.write_bytes(gzip.compress("".join(f"@{name} x\nACGT\n+\nIIII\n" for name in names).encode()))
    return path


def mapping_of_three(tmp_path: Path) -> Path:
    return write(tmp_path / "map.tsv", "class_id tax_id species", "2 562 e", "4 573 k", "6 77 o")


TABLES = {
    "mates": [
        "#anonymous_read_id genome_id tax_id read_id",
        *(f"{n}/{m} G{t} {t} c-1" for n, t in TRUTH.items() for m in (2, 1)),
    ],
    "gold": [
        "@Version:0.9.1",
        "@SampleID:s",
        "",
        "@@SEQUENCEID BINID TAXID _LENGTH",
        *(f"{n} G{t} {t} 4" for n, t in TRUTH.items()),
    ],
    "plain": ["tax_id read", *(f"{t} {n}/1" for n, t in reversed(TRUTH.items()))],
    "classes": [
        "read class_id",
        *(f"{n} {dict(zip((562, 573, 77), (2, 4, 6), strict=True))[t]}" for n, t in TRUTH.items()),
    ],
}


@pytest.mark.parametrize("table", TABLES)
def test_a_table_of_reads_gives_each_mate_the_class_of_its_name(sample: Path, tmp_path: Path, table: str):
    labels = write(tmp_path / "labels.tsv", *TABLES[table])
    reads = ms.open(sample, mapping=mapping_of_three(tmp_path), labels=labels)
    assert reads.column("label").to_pylist() == [0, 0, 1, 1, 0, 0, 2, 2, None, None]
    assert reads.fetch([3, 9], ["species"]).columns["species"] == ["k", None]  # pyright: ignore
    if table in ("mates", "gold"):
        assert reads.column("genome_id").to_pylist()[:3] == ["G562", "G562", "G573"]


def test_a_table_is_joined_once_and_again_when_it_changes(
    sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    mapping, labels = mapping_of_three(tmp_path), write(tmp_path / "labels.tsv", *TABLES["mates"])
    first = ms.open(sample, mapping=mapping, labels=labels)
    assert "8 of its 10 reads are in" in capsys.readouterr().err
    assert ms.open(sample, mapping=mapping, labels=labels).fingerprint == first.fingerprint
    assert "reads are in" not in capsys.readouterr().err
    write(labels, "read tax_id", "S0R0 77")
    again = ms.open(sample, mapping=mapping, labels=labels)
    assert again.column("label").to_pylist() == [2, 2, *[None] * 8]
    assert again.fingerprint != first.fingerprint


def test_a_large_table_is_joined_in_parts_whatever_its_order(tmp_path: Path):
    count = 150_000
    rng = np.random.default_rng(0)
    taxa = rng.choice([562, 573, 77], count)
    (tmp_path / "reads.fa").write_text("".join(f">r{number}\nA\n" for number in range(count)))
    order = rng.permutation(count).tolist()
    write(tmp_path / "labels.tsv", "read tax_id", *(f"r{number} {taxa[number]}" for number in order if number % 7))
    reads = ms.open(tmp_path / "reads.fa", mapping=mapping_of_three(tmp_path), labels=tmp_path / "labels.tsv")
    expected = np.where(np.arange(count) % 7 > 0, taxa, -1)
    assert (reads.column("tax_id").fill_null(-1).to_numpy() == expected).all()


def test_a_table_without_these_reads_or_with_two_classes_for_one_is_refused(sample: Path, tmp_path: Path):
    mapping, labels = mapping_of_three(tmp_path), tmp_path / "labels.tsv"
    for rows, says in (
        (["read tax_id", "other 562"], "has none of the 10 reads of .*'S0R0/1'.*'other'"),
        (["read tax_id", "S0R0/1 562", "S0R0/2 77"], "in two classes, one of them 562|in two classes, one of them 77"),
        (["read species", "S0R0 e"], "expected a line of column names.*found read, species"),
        ([""], "labels.tsv: "),
    ):
        with pytest.raises(BadSource, match=says):
            ms.open(sample, mapping=mapping, labels=write(labels, *rows))
    with pytest.raises(BadSource, match="no such file"):
        ms.open(sample, mapping=mapping, labels=tmp_path / "none.tsv")


def test_classifiers_train_on_reads_of_a_table(sample: Path, tmp_path: Path):
    labels = write(tmp_path / "labels.tsv", *TABLES["mates"])
    given = {"data": {"train": str(sample), "val": str(sample), "labels": str(labels)}}
    study = study_of({**given, "mapping": str(mapping_of_three(tmp_path)), "model": "kmer-linear", "memory": "200MB"})
    assert isinstance(study, Classification)
    assert study.splits.counts["train"].tolist() == [4, 2, 2, 2]
