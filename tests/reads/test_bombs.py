"""Small files with far more text than memory: streamed within the budget, or refused in one line."""

import gzip
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import millstream as ms
from millstream.errors import BadSetting
from millstream.reads import inspect
from millstream.reads.inspect import summarise_reads
from millstream.reads.pack.pack import pack
from millstream.reads.simulate import SimulateSettings, simulate
from support.read_files import bgzf

NUM_BASES = 120_000_000
MEMORY = 100_000_000


@pytest.fixture(scope="module")
def bomb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gzip file of 120 kB with a record of 120 million bases between two short ones."""
    path = tmp_path_factory.mktemp("bomb") / "562_bomb.fa.gz"
    piece = b"ACGT" * (NUM_BASES // 400)
    with gzip.open(path, "wb", compresslevel=6) as file:
        file.write(b">first\nACGT\n>bomb\n")
        for _ in range(100):
            file.write(piece)
        file.write(b"\n>last\nGG\n")
    return path


@contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()


def test_a_record_larger_than_memory_is_packed_in_pieces(bomb, tmp_path):
    with at_most(2 * NUM_BASES):  # buffers of a scanner, most of which are never touched
        done = pack([bomb], tmp_path / "out.pack")
    assert (done.records, done.bases, done.is_exact) == (3, NUM_BASES + 6, True)
    with at_most(NUM_BASES):
        assert not [damage for part in ms.open(tmp_path / "out.pack").parts for damage in part.verify()]


def test_inspect_shows_the_start_of_a_record_larger_than_memory(bomb, tmp_path):
    with at_most(NUM_BASES):
        summary = summarise_reads(ms.open(bomb, memory=1, index_dir=tmp_path), examples=3)
    assert summary.lengths["longest"] == NUM_BASES and summary.lengths["median"] == 4
    assert [example["name"] for example in summary.examples] == ["first", "bomb", "last"]
    assert str(summary.examples[1]["sequence"]).startswith("ACGTACGT") and len(str(summary.examples[1])) < 200


def test_inspect_counts_lengths_and_columns_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect, "_CHUNK_READS", 3)
    for name, first in (("a.fa", 0), ("b.fa", 4)):
        records = [f">x|{number % 3}\n{'A' * number}\n" for number in range(first, first + 4)]
        (tmp_path / name).write_text("".join(records))
    reads = ms.open([tmp_path / "a.fa", tmp_path / "b.fa"], header_regex=r"x\|(?P<kind>\d)")
    summary = summarise_reads(reads)
    assert summary.lengths == {"shortest": 0, "median": 3.5, "longest": 7, "mean": 3.5}
    assert summary.columns == {"kind": {"distinct": 3, "most": "0 (3), 1 (3), 2 (2)"}}


@pytest.mark.parametrize("wrap", [lambda path: path, lambda path: _packed(path)])
def test_one_record_that_does_not_fit_is_refused_by_number_and_size(bomb, tmp_path, wrap: Callable[[Path], Path]):
    reads = ms.open(wrap(bomb), memory=MEMORY)
    for read in (lambda: reads[1], lambda: reads.fetch([0, 1]), lambda: list(reads)):
        with at_most(NUM_BASES), pytest.raises(BadSetting, match=rf"record 1 .*{NUM_BASES:,}") as refused:
            read()
        assert "\n" not in str(refused.value)
    assert reads[2].sequence == "GG" and reads.region(1, NUM_BASES - 5, NUM_BASES) == "TACGT"
    assert len(reads.fetch([1], ["name"])) == 1


def test_a_record_that_must_be_read_whole_is_refused_too(tmp_path):
    lines = b"\n".join([b"A" * 1_000_000, b"C" * 20, b"A" * 20_000_000])
    (tmp_path / "ragged.fa").write_bytes(b">ragged\n" + lines + b"\n")
    reads = ms.open(tmp_path / "ragged.fa", memory=1)
    with pytest.raises(BadSetting, match=r"record 0 .*21,000,020"):
        reads.region(0, 0, 10)
    assert summarise_reads(reads, examples=1).examples[0]["sequence"] == "... (21000020 bases)"
    assert ms.open(tmp_path / "ragged.fa", memory=MEMORY).region(0, 999_998, 1_000_002) == "AACC"


def test_genomes_are_read_in_pieces_and_refused_beyond_the_budget(bomb, tmp_path):
    settings = SimulateSettings(reads=10, length=50)
    with pytest.raises(BadSetting, match=rf"{bomb.name}: {NUM_BASES + 6:,}"):
        simulate([bomb], [tmp_path / "out.fa"], settings=settings, memory=MEMORY)
    with at_most(NUM_BASES + 200_000_000):
        simulate([bomb], [tmp_path / "out.fa"], settings=settings, memory=2 * MEMORY)
    assert len(ms.open(tmp_path / "out.fa")) == 10


def test_gzip_text_that_can_only_be_decoded_together_counts_against_the_budget(tmp_path):
    file = tmp_path / "block.fa.gz"
    file.write_bytes(_one_block(b">bomb\nA", repeats=270_000))  # 70 MB of text
    reads = ms.open(file, memory=1)
    assert summarise_reads(reads, examples=0).bases == 1 + 258 * 270_000
    for read in (lambda: reads.by_name("bomb"), lambda: reads.region(0, 0, 1)):
        with pytest.raises(BadSetting, match=r"69\.7 MB"):
            read()
    assert ms.open(file, memory=MEMORY).region(0, 5_000_000, 5_000_003) == "AAA"
    assert pack([file], tmp_path / "out.pack").bases == 1 + 258 * 270_000


def test_a_bgzf_block_larger_than_the_format_allows_is_read_as_gzip(tmp_path):
    text = b">r\n" + b"A" * 300_000 + b"\n"
    (tmp_path / "large.fa.gz").write_bytes(bgzf(text, len(text)))
    reads = ms.open(tmp_path / "large.fa.gz")
    assert reads.formats == ["fasta in gzip"] and reads[0].sequence == "A" * 300_000


def _packed(path: Path) -> Path:
    out = path.with_name("bomb.pack")
    if not out.exists():
        pack([path], out)
    return out


def _one_block(start: bytes, *, repeats: int) -> bytes:
    """A gzip member of one deflate block with fixed codes: `start`, then matches of length 258 at distance 1."""
    literals = [int(bit) for byte in start for bit in f"{0x30 + byte:08b}"]
    match = [int(bit) for bit in "1100010100000"]
    bits = np.concatenate([[1, 1, 0], literals, np.tile(match, repeats), np.zeros(7, int)])
    text = start + start[-1:] * (258 * repeats)
    deflated = np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + deflated + struct.pack("<II", zlib.crc32(text), len(text))
