"""What is read once, into a pack: bzip2 and xz, alignments as they were sequenced, and stdin."""

import bz2
import gzip
import io
import lzma
import sys
from pathlib import Path

import numpy as np
import pytest

import millstream as ms
from millstream.errors import BadSetting, BadSource, StoreExists
from millstream.reads.files.index import IndexLimits
from millstream.reads.pack.pack import pack
from support.commands import run_here

RECORDS = 3000
CODECS = {"bz2": bz2.compress, "xz": lzma.compress}


@pytest.fixture(scope="module")
def text() -> bytes:
    rng = np.random.default_rng(0)
    bases = rng.choice(np.frombuffer(b"ACGT", np.uint8), (RECORDS, 100))
    return b"".join(b"@r%d\n%s\n+\n%s\n" % (n, row.tobytes(), b"I" * 100) for n, row in enumerate(bases))


def restored(path: Path) -> bytes:
    out = path.with_suffix(".again")
    code, _, err = run_here("unpack", path, out)
    assert code == 0, err
    return out.read_bytes()


@pytest.mark.parametrize("codec", CODECS)
def test_bzip2_and_xz_are_packed_to_their_exact_text(tmp_path: Path, text: bytes, codec: str):
    compress, half = CODECS[codec], text.index(b"@r1500\n")
    source = tmp_path / f"reads.fq.{codec}"
    source.write_bytes(compress(text[:half]) + compress(text[half:]) + bytes(8 if codec == "xz" else 0))
    done = pack([source], tmp_path / "reads.pack")
    assert done.records == RECORDS and done.is_exact
    assert restored(tmp_path / "reads.pack") == text
    with pytest.raises(BadSource, match="Pack it first: millstream pack"):
        ms.open(source)


@pytest.mark.parametrize("codec", CODECS)
def test_a_truncated_or_damaged_file_is_noticed_and_salvaged_up_to_its_last_whole_stream(
    tmp_path: Path, text: bytes, codec: str
):
    compress, half = CODECS[codec], text.index(b"@r1500\n")
    whole = compress(text[:half]) + compress(text[half:])
    source = tmp_path / f"reads.fq.{codec}"
    source.write_bytes(whole[:-1000])
    with pytest.raises(BadSource, match=r"in the middle of a stream.*millstream pack .* OUT --salvage"):
        pack([source], tmp_path / "reads.pack")
    assert run_here("pack", source, tmp_path / "reads.pack", "--salvage")[0] == 0
    assert len(ms.open(tmp_path / "reads.pack")) == 1500
    flipped = bytearray(whole)
    flipped[len(compress(text[:half])) // 2] ^= 16
    source.write_bytes(flipped)
    with pytest.raises(BadSource, match="is damaged before byte"):
        pack([source], tmp_path / "other.pack")


@pytest.mark.parametrize("codec", CODECS)
def test_an_interrupted_pack_is_resumed_to_the_same_bytes(tmp_path: Path, text: bytes, codec: str):
    source = tmp_path / f"reads.fq.{codec}"
    source.write_bytes(CODECS[codec](text))
    limits = IndexLimits(buffer_bytes=1 << 16)
    calls: list[int] = []

    def stop(done: int, note: str = "") -> None:
        calls.append(done)
        if len(calls) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack([source], tmp_path / "a.pack", progress=stop, limits=limits, commit_s=0)
    assert (tmp_path / "a.pack.partial").exists()
    pack([source], tmp_path / "a.pack", limits=limits)
    pack([source], tmp_path / "b.pack", limits=limits)
    assert (tmp_path / "a.pack").read_bytes() == (tmp_path / "b.pack").read_bytes()


def stdin_of(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress])
def test_stdin_is_packed_like_a_file(tmp_path: Path, text: bytes, monkeypatch: pytest.MonkeyPatch, compress):  # pyright: ignore
    stdin_of(monkeypatch, compress(text))
    out = tmp_path / "reads.pack"
    code, _, err = run_here("pack", "-", out)
    assert code == 0, err
    assert restored(out) == text
    stdin_of(monkeypatch, b">a\nACGT\n")
    with pytest.raises(StoreExists, match="already exists"):
        pack([Path("-")], out)
    assert run_here("pack", "-", out, "--rebuild")[0] == 0
    assert ms.open(out)[0].sequence == "ACGT"  # pyright: ignore


def test_what_a_stream_cannot_do_is_one_line(tmp_path: Path, text: bytes, monkeypatch: pytest.MonkeyPatch):
    for given, says in (
        (["-", "-"], "stdin can only be read once"),
        (["-", "--salvage"], "what to salvage"),
        (["-", f"{tmp_path}/"], "needs a name"),
    ):
        stdin_of(monkeypatch, text)
        code, _, err = run_here("pack", *given, *([] if given[-1].endswith("/") else [tmp_path / "out.pack"]))
        assert (code, says in err) == (2, True), err
    stdin_of(monkeypatch, text[:-50])
    with pytest.raises(BadSource, match="ends in the middle of record 2999"):
        pack([Path("-")], tmp_path / "cut.pack")
    stdin_of(monkeypatch, gzip.compress(text)[:-50])
    with pytest.raises(BadSource, match="save stdin as FILE, then millstream pack FILE OUT --unverified"):
        pack([Path("-")], tmp_path / "cut.pack")


# -- alignments

FORWARD, BACK = "AACCGGTTAC", "GTAACCGGTT"
QUALITIES = "ABCDEFGHIJ"


@pytest.fixture(scope="module")
def bam(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair, a read on the reverse strand with a repeat, an unaligned read, and one without a read group."""
    pysam = pytest.importorskip("pysam")
    path = tmp_path_factory.mktemp("bam") / "reads.bam"
    header = {"HD": {"VN": "1.6"}, "SQ": [{"SN": "chr", "LN": 1000}], "RG": [{"ID": "a"}, {"ID": "b"}]}
    rows = [  # name, flag, position, sequence as stored, read group
        ("pair", 0x1 | 0x40, 5, FORWARD, "a"),
        ("pair", 0x1 | 0x80 | 0x10, 50, BACK, "a"),
        ("back", 0x10, 7, BACK, "b"),
        ("back", 0x100, 90, FORWARD, "b"),
        ("back", 0x800, 95, FORWARD[:5], "b"),
        ("loose", 0x4, -1, FORWARD, "b"),
        ("none", 0, 9, FORWARD, None),
    ]
    with pysam.AlignmentFile(str(path), "wb", header=header) as file:
        for name, flag, position, sequence, group in rows:
            read = pysam.AlignedSegment(file.header)
            read.query_name, read.flag, read.query_sequence = name, flag, sequence
            grades = QUALITIES if flag & 0x10 == 0 else QUALITIES[::-1]
            read.query_qualities = pysam.qualitystring_to_array(grades[: len(sequence)])
            if not flag & 0x4:
                read.reference_id, read.reference_start, read.cigarstring = 0, position, f"{len(sequence)}M"
            if group:
                read.set_tag("RG", group)
            file.write(read)
    return path


def test_reads_of_a_bam_are_packed_as_they_were_sequenced(bam: Path, tmp_path: Path):
    done = pack([bam], tmp_path / "reads.pack")
    reads = ms.open(tmp_path / "reads.pack")
    assert isinstance(reads, ms.Reads) and done.records == 5
    found = reads.fetch(range(5), ["name", "sequence", "quality", "read_group"])
    assert list(found.columns["name"]) == ["pair/1", "pair/2", "back", "loose", "none"]  # pyright: ignore
    assert list(found.columns["read_group"]) == ["a", "a", "b", "b", None]  # pyright: ignore
    assert [reads[n].sequence for n in range(5)] == [FORWARD] * 5
    assert [reads[n].quality for n in range(5)] == [QUALITIES] * 5
    train, val = ms.split(reads.subset([0, 1, 2, 3]), {"train": 0.5, "val": 0.5}, by="read_group")
    assert not {*train.column("read_group").to_pylist()} & {*val.column("read_group").to_pylist()}


def test_a_bam_in_a_folder_and_sam_and_headers_of_ones_own(bam: Path, tmp_path: Path):
    import pysam

    (tmp_path / "folder").mkdir()
    sam = tmp_path / "folder" / "reads.sam"
    with pysam.AlignmentFile(str(bam)) as source, pysam.AlignmentFile(str(sam), "w", template=source) as out:
        for read in source:
            out.write(read)
    code, _, err = run_here("pack", tmp_path / "folder", tmp_path / "reads.pack", "--header-regex", "(?P<start>.)")
    assert code == 0, err
    assert ms.open(tmp_path / "reads.pack").column("start").to_pylist() == list("ppbln")


def test_a_cut_bam_is_noticed_and_training_on_one_says_to_pack_it(bam: Path, tmp_path: Path):
    cut = tmp_path / "cut.bam"
    cut.write_bytes(bam.read_bytes()[:-28])
    with pytest.raises(BadSource, match=r"cut\.bam: cannot be read"):
        pack([cut], tmp_path / "cut.pack")
    (tmp_path / "map.tsv").write_text("class_id\n0\n")
    code, _, err = run_here("train", f"data.train={bam}", f"mapping={tmp_path / 'map.tsv'}", f"out={tmp_path / 'run'}")
    assert code == 1 and "is BAM" in err and "Pack it first: millstream pack" in err


def test_a_cram_needs_its_reference(bam: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import pysam

    monkeypatch.setenv("REF_PATH", str(tmp_path / "nowhere"))
    genome = tmp_path / "genome.fa"
    genome.write_text(">chr\n" + "ACGTACGTAC" * 100 + "\n")
    cram = tmp_path / "reads.cram"
    with (
        pysam.AlignmentFile(str(bam)) as source,
        pysam.AlignmentFile(str(cram), "wc", template=source, reference_filename=str(genome)) as out,
    ):
        for read in source:
            out.write(read)
    code, _, err = run_here("pack", "--reference", genome, cram, tmp_path / "reads.pack")
    assert code == 0, err
    reads = ms.open(tmp_path / "reads.pack")
    assert [read.sequence for read in reads] == [FORWARD] * 5  # pyright: ignore
    genome.rename(tmp_path / "moved.fa")
    Path(f"{genome}.fai").unlink(missing_ok=True)
    code, _, err = run_here("pack", cram, tmp_path / "other.pack")
    assert code == 1 and "--reference genome.fa" in err and len(err.strip().splitlines()) == 1, err


def test_without_pysam_the_command_that_installs_it_is_named(
    bam: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from millstream.errors import MissingExtra

    monkeypatch.setitem(sys.modules, "pysam", None)
    with pytest.raises(MissingExtra, match=r"millstream\[bam\]"):
        pack([bam], tmp_path / "reads.pack")


def test_stdin_that_is_a_terminal_or_bam_is_refused(bam: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stdin_of(monkeypatch, bam.read_bytes())
    with pytest.raises(BadSource, match="samtools fastq"):
        pack([Path("-")], tmp_path / "reads.pack")
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(BadSetting, match="pipe reads into it"):
        pack([Path("-")], tmp_path / "reads.pack")
