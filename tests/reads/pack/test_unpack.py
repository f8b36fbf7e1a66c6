"""Unpacking: a file appears when it is complete, compressed when its name says so."""

import gzip
import io
from pathlib import Path

import pytest

from millstream.errors import BadIndex, StoreExists
from millstream.reads.pack.pack import pack
from millstream.reads.pack.unpack import unpack

TEXT = b"".join(b">r%d\r\nACGTN\r\nac\r\n" % number for number in range(1000))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "reads.fa").write_bytes(TEXT)
    return pack([tmp_path / "reads.fa"], tmp_path / "reads.pack").path


def test_a_path_is_written_plain_or_as_gzip_and_nothing_else_is_left(tmp_path, file):
    assert unpack(file, tmp_path / "out.fa") == len(TEXT)
    unpack(file, tmp_path / "out.fa.gz")
    assert (tmp_path / "out.fa").read_bytes() == TEXT
    assert gzip.decompress((tmp_path / "out.fa.gz").read_bytes()) == TEXT
    done = {".out.fa.done", ".out.fa.gz.done"}  # how they were written
    assert {path.name for path in tmp_path.iterdir()} == {"reads.fa", "reads.pack", "out.fa", "out.fa.gz", *done}


def test_an_existing_file_is_not_replaced(tmp_path, file):
    with pytest.raises(StoreExists, match=r"reads\.fa"):
        unpack(file, tmp_path / "reads.fa")
    assert (tmp_path / "reads.fa").read_bytes() == TEXT


def test_progress_ends_at_the_number_of_records(file):
    seen: list[int] = []
    unpack(file, io.BytesIO(), progress=lambda done, note="": seen.append(done))
    assert seen[-1] == 1000


def test_damage_leaves_no_file_behind(tmp_path, file):
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with pytest.raises(BadIndex, match="damaged"):
        unpack(file, tmp_path / "out.fa")
    assert {path.name for path in tmp_path.iterdir()} == {"reads.fa", "reads.pack"}


@pytest.mark.parametrize("window_bases", [1, 3, 5, 7, 100])
def test_windows_of_any_size_give_the_same_text(tmp_path, window_bases):
    wrapped = b">a\nACGTA\nCGTNN\nAC\n>b\n>c x\nACGTA\n>d\n" + b"ACGTA\n" * 50
    one_line = b">a\nACGTACGTNNAC\n>b\n>d\n" + b"A" * 250
    fastq = b"@a\nACG\nTA\n+a\n@II\nII\n@b\n\n+b\n\n@c\nACG\nTAC\nGT\n+c\nIII\nIHH\nHH\n"
    for name, text in (("x.fa", wrapped), ("y.fa", one_line), ("x.fq", fastq)):
        (tmp_path / name).write_bytes(text)
        out = io.BytesIO()
        assert pack([tmp_path / name], tmp_path / f"{name}.pack").is_exact
        unpack(tmp_path / f"{name}.pack", out, window_bases=window_bases)
        assert out.getvalue() == text
