"""Records and regions by name, as samtools has them; and the Python functions behind the commands."""

import gzip
from pathlib import Path

import numpy as np
import pytest

import millstream as ms
from millstream.errors import BadSetting
from millstream.reads import names
from support.commands import run_here

CHR = "".join(np.random.default_rng(0).choice(list("ACGT"), 500).tolist())


@pytest.fixture
def genome(tmp_path: Path) -> Path:
    """Wrapped at 70 bases; a name with a colon, one that looks like a region of another, an empty record."""
    lines = "\n".join(CHR[at : at + 70] for at in range(0, len(CHR), 70))
    path = tmp_path / "genome.fa"
    path.write_text(f">chr1 the first\n{lines}\n>HLA:A*01\nACGTACGT\n>chr1:1-5\nTTTT\n>none\n\n")
    return path


@pytest.mark.parametrize(
    ("region", "bases"),
    [
        ("chr1", CHR),
        ("chr1:101-200", CHR[100:200]),
        ("chr1:1-1", CHR[0]),
        ("chr1:1,01-2,00", CHR[100:200]),
        ("chr1:491", CHR[490:]),
        ("chr1:491-", CHR[490:]),
        ("chr1:-10", CHR[:10]),
        ("chr1:491-9999", CHR[490:]),
        ("HLA:A*01", "ACGTACGT"),
        ("HLA:A*01:3-4", "GT"),
        ("chr1:1-5", "TTTT"),  # a record of this name
        ("none", ""),
    ],
)
def test_a_region_counts_from_one_with_both_ends(genome: Path, region: str, bases: str):
    reads = ms.open(genome)
    assert isinstance(reads, ms.Reads)
    assert reads.region(region) == bases


def test_a_region_by_number_or_in_python_counts_from_zero(genome: Path):
    reads = ms.open(genome)
    assert isinstance(reads, ms.Reads)
    assert reads.region(0, 100, 200) == reads.region("chr1", 100, 200) == CHR[100:200]
    assert reads.region(0) == CHR and reads.region(0, 490) == CHR[490:]
    for wrong, error in (
        ("chr9", KeyError),
        ("chr9:1-2", KeyError),
        ("chr1:0-5", IndexError),
        ("chr1:501-600", IndexError),
    ):
        with pytest.raises(error, match=wrong.partition(":")[0]):
            reads.region(wrong)
    with pytest.raises(IndexError, match="chr1:9-3"):
        reads.region("chr1:9-3")


def test_a_wrong_region_names_the_file_that_has_the_record(genome: Path, tmp_path: Path):
    (tmp_path / "another.fa").write_text(">chr7\nACGT\n")
    reads = ms.open([tmp_path / "another.fa", genome])
    assert isinstance(reads, ms.Reads)
    with pytest.raises(IndexError, match=r"genome\.fa: region chr1:0-5"):
        reads.region("chr1:0-5")
    with pytest.raises(KeyError, match=r"another\.fa and 1 more: no record named 'chr9'"):
        reads.region("chr9")


def test_fetch_writes_what_samtools_does(genome: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pysam = pytest.importorskip("pysam")
    genome.write_text(genome.read_text().removesuffix(">none\n\n"))  # which samtools refuses
    asked = ["chr1:11-200", "chr1", "HLA:A*01"]
    pysam.faidx("-n", "60", "-o", str(tmp_path / "samtools.fa"), str(genome), *asked, catch_stdout=False)
    expected = (tmp_path / "samtools.fa").read_text()
    assert expected.startswith(">chr1:11-200\n")
    monkeypatch.setattr(names, "PIECE", 120)  # bases at once
    out = tmp_path / "out.fa.gz"
    code, _, err = run_here("fetch", genome, *asked, "--out", out)
    assert code == 0, err
    assert gzip.decompress(out.read_bytes()).decode() == expected
    assert run_here("fetch", genome, *asked, "-o", out)[0] != 0  # exists
    reads = ms.open(genome)
    assert isinstance(reads, ms.Reads)
    assert b"".join(names.fasta_of(reads, asked)).decode() == expected


def test_an_unknown_name_is_one_line_and_nothing_is_written(genome: Path, tmp_path: Path):
    out = tmp_path / "out.fa"
    code, _, err = run_here("fetch", genome, "chr1", "chr2:1-5", "-o", out)
    assert (code, out.exists()) == (2, False)
    assert err.count("\n") == 1 and "chr2:1-5" in err and "Traceback" not in err


def test_reads_are_simulated_indexed_and_packed_from_python(genome: Path, tmp_path: Path):
    fasta = tmp_path / "562_x.fna"
    fasta.write_text(f">a\n{CHR}\n")
    reads = tmp_path / "reads.fq"
    done = ms.simulate(fasta, reads, reads=20, length=50, profile="illumina", mapping=tmp_path / "map.tsv")
    assert (done.reads, reads.read_text().count("\n")) == (20, 80)
    pairs = [tmp_path / "1.fa", tmp_path / "2.fa"]
    ms.simulate([fasta], pairs, reads=20, length=50, insert=100)
    assert [path.read_text().count(">") for path in pairs] == [10, 10]
    indexed = ms.index(
        reads, header_regex=r"lbl\|(?P<class_id>\d+)", columns=["class_id"], mapping=tmp_path / "map.tsv"
    )
    assert indexed.column("label").to_pylist() == [0] * 20
    (packed,) = ms.pack(reads, tmp_path / "reads.pack", header_regex=r"lbl\|(?P<class_id>\d+)")
    assert (packed.records, packed.is_exact) == (20, True)
    assert [one.path.name for one in ms.pack(pairs, f"{tmp_path}/packs/")] == ["1.pack", "2.pack"]
    with pytest.raises(BadSetting, match="profile=x"):
        ms.simulate(fasta, tmp_path / "no.fa", profile="x")
    with pytest.raises(BadSetting, match="needs"):
        ms.index(reads, memory="1MB")
