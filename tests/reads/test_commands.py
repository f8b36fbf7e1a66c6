"""The commands for reads, as users type them."""

import gzip
import json
import subprocess
from pathlib import Path

import pytest

from support.commands import run_here

REGEX = r"lbl\|(?P<class_id>\d+)\|(?P<tax_id>\d+)?"
TEXT = "".join(f">lbl|{i % 3}|{500 + i % 3}|x{i} more\n{'ACGT' * (i % 5 + 1)}\n" for i in range(50))


def millstream(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(arguments, *run_here(*arguments))


@pytest.fixture
def reads(tmp_path: Path) -> Path:
    file = tmp_path / "reads.fa.gz"
    file.write_bytes(gzip.compress(TEXT.encode()))
    return file


def test_index_then_inspect_then_verify(reads: Path):
    done = millstream("index", reads, "--header-regex", REGEX, "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert (answer["records"], answer["columns"]) == (50, ["class_id", "tax_id"])
    assert answer["indexes"] == [f"{reads}.millstream"]
    assert f"Next: millstream inspect {reads}" in done.stderr
    seen = millstream("inspect", reads, "--examples", "1").stdout
    assert "fasta in gzip: 50 reads" in seen
    assert "class_id  distinct 3, most 0 (17), 1 (17), 2 (16)" in seen
    assert "read 0  lbl|0|500|x0" in seen
    assert "all checksums match" in millstream("verify", reads).stderr


def test_a_changed_file_is_refused_with_the_command_to_run(reads: Path):
    assert millstream("index", reads).returncode == 0
    reads.write_bytes(gzip.compress(TEXT.encode() + b">new\nACGT\n"))
    done = millstream("inspect", reads)
    assert done.returncode == 1
    assert f"millstream index {reads} --rebuild" in done.stderr
    assert "Traceback" not in done.stderr
    assert millstream("index", reads, "--rebuild").returncode == 0
    assert "51 reads" in millstream("inspect", reads).stdout


def test_pack_and_unpack_round_trip(reads: Path, tmp_path: Path):
    packed, out = tmp_path / "reads.pack", tmp_path / "again.fa"
    done = millstream("pack", reads, packed, "--header-regex", REGEX, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["records"], answer["exact"]) == (50, True)
    assert "bytes exact" in done.stderr
    seen = millstream("inspect", packed).stdout
    assert "packed" in seen and "bytes exact" in seen
    assert "all checksums match" in millstream("verify", packed).stderr
    done = millstream("unpack", packed, out)
    assert done.returncode == 0 and "bytes exact" in done.stderr
    assert out.read_text() == TEXT
    assert millstream("unpack", packed, "-").stdout == TEXT


def test_fai_is_written_on_request(tmp_path: Path):
    file = tmp_path / "a.fa"
    file.write_text(">a\nACGT\n")
    assert millstream("index", file, "--fai").returncode == 0
    assert (tmp_path / "a.fa.fai").read_text() == "a\t4\t3\t4\t5\n"


def test_unknown_class_ids_are_listed(reads: Path, tmp_path: Path):
    mapping = tmp_path / "species.tsv"
    mapping.write_text("class_id\tspecies\n0\tx\n1\ty\n")
    done = millstream("index", reads, "--header-regex", REGEX, "--mapping", mapping)
    assert done.returncode == 1
    assert "species.tsv (2 classes from 0 to 1): 2." in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["index", "missing.fa"], 1, "missing.fa"),
        (["index", "x.fa", "--on-mismatch", "perhaps"], 2, "perhaps"),
        (["index", "x.fa", "--memory", "1MB"], 2, "1MB"),
        (["pack", "only.fa"], 2, "millstream pack"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], code: int, says: str):
    done = millstream(*arguments)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert says in done.stderr and len(done.stderr.splitlines()) == 1
