"""Many files become a folder of packs, which opens as one collection."""

import json
import sys
from pathlib import Path

import pytest

import millstream as ms
from support.commands import run_here


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two FASTA files of three reads."""
    found = [tmp_path / "a.fa", tmp_path / "b.fna"]
    for file in found:
        file.write_text("".join(f">{file.name}{number}\nACGT\n" for number in range(3)))
    return found


def test_a_folder_gets_a_pack_per_file_and_opens_as_one_collection(files: list[Path], tmp_path: Path):
    packs = tmp_path / "packs"
    code, text, err = run_here("pack", *files, f"{packs}/", "--json")
    assert code == 0 and "2 packs, 6 reads" in err
    rows = json.loads(text)["packs"]
    assert [(Path(row["path"]).name, row["records"], row["exact"]) for row in rows] == [
        ("a.pack", 3, True),
        ("b.pack", 3, True),
    ]
    for file in files:
        assert run_here("pack", file, tmp_path / "one.pack", "--rebuild")[0] == 0
        assert (packs / f"{file.stem}.pack").read_bytes() == (tmp_path / "one.pack").read_bytes()
    for place in (packs, packs / "*.pack"):
        assert [read.name for read in ms.open(place)] == [read.name for file in files for read in ms.open(file)]


def test_finished_packs_are_kept_and_a_changed_file_is_noticed(files: list[Path], tmp_path: Path):
    packs = tmp_path / "packs"
    packs.mkdir()
    assert run_here("pack", files[0], packs)[0] == 0
    before = (packs / "a.pack").stat().st_mtime_ns
    code, _, err = run_here("pack", *files, packs)
    assert code == 0 and "a.pack: already packed" in err
    assert (packs / "a.pack").stat().st_mtime_ns == before
    files[0].write_text(">a\nACGTACGT\n")
    code, _, err = run_here("pack", *files, packs)
    assert code == 1 and "a.fa has changed since it was packed" in err
    code, _, err = run_here("pack", *files, packs, "--rebuild")
    assert code == 0 and "2 packs, 4 reads" in err


def test_in_a_folder_with_reads_their_packs_are_not_counted_again(files: list[Path], tmp_path: Path):
    assert run_here("pack", *files, tmp_path)[0] == 0
    assert len(ms.open(tmp_path)) == 6


def test_what_cannot_be_packed_into_a_folder_is_one_line(files: list[Path], tmp_path: Path):
    (tmp_path / "more").mkdir()
    same = tmp_path / "more" / "a.fq"
    same.write_text("@a\nA\n+\nI\n")
    for arguments, code, named in (
        ([*files, same, tmp_path / "more"], 2, "a.pack"),
        ([*files, tmp_path / "c.fa", tmp_path / "more"], 1, "c.fa: no such file"),
        ([*files, tmp_path / "more", "--workers", "2"], 2, "--engine ray"),
    ):
        found, _, err = run_here("pack", *arguments)
        assert found == code and named in err.splitlines()[-1], err
    assert not (tmp_path / "more" / "a.pack").exists()
    assert "ray" not in sys.modules
