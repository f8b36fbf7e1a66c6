"""The .fai and .gzi that `index --fai` writes are, byte for byte, what samtools writes."""

import gzip
import random
import shutil
import subprocess
from pathlib import Path

import pytest

import millstream as ms
from millstream.reads.files import ReadFile, write_fai
from support.read_files import wrapped

samtools = pytest.mark.skipif(
    shutil.which("samtools") is None, reason="samtools is not installed (apt install samtools)"
)
bgzip = pytest.mark.skipif(shutil.which("bgzip") is None, reason="bgzip is not installed (apt install tabix)")


def bases(count: int) -> str:
    return "".join(random.Random(count).choices("ACGTN", k=count))


TEXTS = {
    "wrapped.fa": ">a about\n" + wrapped(bases(200), 60) + ">b\n" + bases(33) + "\n>c x\n" + wrapped(bases(120), 60),
    "no_last_newline.fa": ">a\n" + wrapped(bases(130), 60) + ">b\n" + bases(10),
    "crlf.fa": ">a about\r\n" + wrapped(bases(200), 60, "\r\n") + ">b\r\n" + bases(33) + "\r\n",
    "twice.fa": ">a 1\nACGT\n>b\nAC\n>a 2\nACGTA\n>b\nACG\n",
    "without_bases.fa": ">a\n>b\nACGT\n>c\n\n>d\nAC\n",
    "reads.fq": "".join(f"@r{i} x\n{bases(20 + i)}\n+\n{'I' * (20 + i)}\n" for i in range(5)),
    "named_plus.fq": "".join(f"@r{i}\n{bases(20 + i)}\n+r{i}\n{'I' * (20 + i)}\n" for i in range(5)),
    "crlf.fq": "".join(f"@r{i}\r\n{bases(20 + i)}\r\n+\r\n{'I' * (20 + i)}\r\n" for i in range(5)),
}


def our_index(file: Path) -> list[bytes]:
    (part,) = ms.open(file).parts
    assert isinstance(part, ReadFile)
    return [out.read_bytes() for out in write_fai(part)]


@samtools
@pytest.mark.parametrize("name", sorted(TEXTS))
def test_the_fai_is_what_samtools_writes(tmp_path: Path, name: str):
    file = tmp_path / name
    file.write_bytes(TEXTS[name].encode())
    subprocess.run(["samtools", "fqidx" if name.endswith(".fq") else "faidx", file], check=True, capture_output=True)
    theirs = file.with_name(file.name + ".fai").read_bytes()
    assert our_index(file) == [theirs]


@samtools
@bgzip
def test_the_gzi_of_a_bgzf_file_is_what_samtools_writes(tmp_path: Path):
    file = tmp_path / "genomes.fa"
    file.write_text("".join(f">n{i} x\n{wrapped(bases(900 + i), 60)}" for i in range(300)))
    subprocess.run(["bgzip", file], check=True)
    packed = tmp_path / "genomes.fa.gz"
    subprocess.run(["samtools", "faidx", packed], check=True)
    theirs = [packed.with_name(packed.name + end).read_bytes() for end in (".fai", ".gzi")]
    assert our_index(packed) == theirs


def test_the_fai_of_a_small_file_is_known(tmp_path: Path):
    file = tmp_path / "a.fa"
    file.write_text(">a about\nACGTAC\nGT\n>b\nAC\n")
    assert our_index(file) == [b"a\t8\t9\t6\t7\nb\t2\t22\t2\t3\n"]


def test_the_fai_has_the_first_record_of_each_name_as_samtools_has_it(tmp_path: Path):
    file = tmp_path / "a.fa"
    file.write_text(">a 1\nACGT\n>b\nAC\n>a 2\nACGTA\n")
    assert our_index(file) == [b"a\t4\t5\t4\t5\nb\t2\t13\t2\t3\n"]


def test_ragged_lines_and_plain_gzip_have_no_fai(tmp_path: Path):
    ragged = tmp_path / "ragged.fa"
    ragged.write_text(">a\nAC\nACGT\n")
    with pytest.raises(ms.errors.BadSource, match=r"record 0 \(a\)"):
        our_index(ragged)
    packed = tmp_path / "a.fa.gz"
    packed.write_bytes(gzip.compress(b">a\nACGT\n"))
    with pytest.raises(ms.errors.BadSource, match="bgzip"):
        our_index(packed)
