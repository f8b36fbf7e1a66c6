"""Unpacking: a file appears when it is complete, compressed when its name says so."""

import gzip
import io
from pathlib import Path

import pytest

from millstream.errors import BadIndex, StoreExists
from millstream.store import unpack as unpack_module
from millstream.store.pack import pack
from millstream.store.unpack import unpack

TEXT = b"; made by hand\n" + b"".join(b">r%d\nACGTN\r\nac\n" % number for number in range(1000))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "reads.fa").write_bytes(TEXT)
    return pack([tmp_path / "reads.fa"], tmp_path / "reads.pack").path


def test_a_path_is_written_plain_or_as_gzip_and_nothing_else_is_left(tmp_path, file):
    assert unpack(file, tmp_path / "out.fa") == len(TEXT)
    unpack(file, tmp_path / "out.fa.gz")
    assert (tmp_path / "out.fa").read_bytes() == TEXT
    assert gzip.decompress((tmp_path / "out.fa.gz").read_bytes()) == TEXT
    assert {path.name for path in tmp_path.iterdir()} == {"reads.fa", "reads.pack", "out.fa", "out.fa.gz"}


def test_a_file_that_is_there_is_not_replaced(tmp_path, file):
    with pytest.raises(StoreExists, match="already there"):
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


@pytest.mark.parametrize("window", [1, 3, 7, 100])
def test_windows_of_any_size_give_the_same_text(tmp_path, monkeypatch, window):
    monkeypatch.setattr(unpack_module, "WINDOW", window)
    fasta = b">a\nACGTA\nCGTNN\nAC\n>b\n>c x\nAC GT\n\nACGTAC\nG\n>d\n" + b"A" * 250
    fastq = b"@a\nACG\nTA\n+a\n@II\nII\n@b\r\n\r\n+\r\n\r\n@c\nACGTACGT\n+\nIIIIHHHH\n"
    for name, text in (("x.fa", fasta), ("x.fq", fastq)):
        (tmp_path / name).write_bytes(text)
        out = io.BytesIO()
        unpack(pack([tmp_path / name], tmp_path / f"{name}.pack").path, out)
        assert out.getvalue() == text
