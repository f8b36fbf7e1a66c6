"""Files of classified and of unclassified reads: together the input, byte for byte, after any interruption."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream as ms
from millstream.core.outputs import TextOutput
from millstream.errors import BadSetting, StoreExists
from millstream.reads.classify import classify
from support.classifying import make_run
from support.commands import run_here

SMALL: dict[str, Any] = {"batch_size": 16, "save_s": 0.0}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and pairs of which every third is random DNA: interleaved FASTQ in gzip, and a file per mate."""
    path = tmp_path_factory.mktemp("filtered")
    files, _ = make_run(path)
    rng, reads = np.random.default_rng(3), list(ms.open(files[1], index_dir=path))
    records: list[str] = []
    for number, read in enumerate(reads[:120]):
        name, mate = divmod(number, 2)
        foreign = "".join(rng.choice(list("ACGT"), 150))
        sequence = foreign if name % 3 == 0 else read.sequence
        quality = "".join(rng.choice(list("!5I~"), 150))
        records.append(f"@pair{name}/{mate + 1} from a host\n{sequence}\n+\n{quality}\n")
    (path / "both.fq.gz").write_bytes(gzip.compress("".join(records).encode()))
    (path / "one.fq").write_text("".join(records[::2]))
    (path / "two.fq").write_text("".join(records[1::2]))
    return path


def records_in(path: Path) -> list[str]:
    data = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
    lines = data.decode().splitlines(keepends=True)
    return ["".join(lines[at : at + 4]) for at in range(0, len(lines), 4)]


def test_every_read_is_in_one_of_the_two_files_with_its_header_and_qualities(made: Path, tmp_path: Path):
    keep, drop = tmp_path / "keep.fq", tmp_path / "drop.fq.gz"
    done = classify(made / "run", made / "both.fq.gz", tmp_path / "o.tsv", classified_out=keep, unclassified_out=drop)
    wanted = records_in(made / "both.fq.gz")
    kept, dropped = records_in(keep), records_in(drop)
    assert (len(kept), len(dropped)) == (done.num_classified, done.num_unclassified) and len(dropped) >= 30
    rows = [line.split("\t") for line in (tmp_path / "o.tsv").read_text().splitlines()[1:]]
    is_kept = [row[3] != "unclassified" for row in rows]
    assert kept == [record for record, keep in zip(wanted, is_kept, strict=True) if keep]
    assert dropped == [record for record, keep in zip(wanted, is_kept, strict=True) if not keep]


def test_mates_stay_together_in_one_file_or_in_two(made: Path, tmp_path: Path):
    pairs = {"mates": made / "two.fq", "memory": "20MB"}
    classify(made / "run", made / "one.fq", tmp_path / "o.tsv", unclassified_out=tmp_path / "u#.fq", **pairs)
    classify(made / "run", made / "both.fq.gz", tmp_path / "p.tsv", unclassified_out=tmp_path / "u.fq", paired=True)
    first, second = records_in(tmp_path / "u_1.fq"), records_in(tmp_path / "u_2.fq")
    both = records_in(tmp_path / "u.fq")
    assert len(first) >= 15 and both == [record for pair in zip(first, second, strict=True) for record in pair]
    with pytest.raises(BadSetting, match="#"):
        classify(made / "run", made / "one.fq", tmp_path / "q.tsv", unclassified_out=tmp_path / "v#.fq")


@pytest.mark.parametrize("at", ["save", "finish", "publish"])
def test_killed_at_any_step_of_saving_it_resumes_to_the_same_bytes(made: Path, tmp_path: Path, at: str):
    class Killed(BaseException):
        pass

    (tmp_path / "whole").mkdir()
    for number in range(40):
        folder = tmp_path / "whole" if not number else tmp_path
        outputs = {"classified_out": folder / "c.fa.gz", "unclassified_out": folder / "u#.fq", "mates": made / "two.fq"}
        calls, original = 0, getattr(TextOutput, at)

        def die(*given: Any, limit: int = number, original: Any = original, **named: Any) -> None:
            nonlocal calls
            calls += 1
            original(*given, **named)
            if limit and calls % 7 == limit % 7:
                raise Killed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TextOutput, at, die)
            try:
                classify(
                    made / "run", made / "one.fq", folder / "o.tsv", report=folder / "o.kreport", **outputs, **SMALL
                )
            except Killed:
                continue
        if number:
            break
    names = ["c.fa.gz", "o.abundance.tsv", "o.kreport", "o.tsv", "u_1.fq", "u_2.fq"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == sorted([*names, "whole"])


def test_fasta_is_written_if_the_name_says_so_and_fastq_only_if_there_are_qualities(made: Path, tmp_path: Path):
    classify(made / "run", made / "one.fq", tmp_path / "o.tsv", classified_out=tmp_path / "c.fa")
    assert (tmp_path / "c.fa").read_text().startswith(">pair1/1 from a host\n")
    with pytest.raises(BadSetting, match=r"c\.fq: .*a\.fa has no base qualities"):
        classify(made / "run", made / "a.fa", tmp_path / "p.tsv", classified_out=tmp_path / "c.fq")
    with pytest.raises(BadSetting, match=r"c\.fa"):
        classify(
            made / "run",
            made / "a.fa",
            tmp_path / "p.tsv",
            classified_out=tmp_path / "c.fa",
            unclassified_out=tmp_path / "c.fa",
        )
    with pytest.raises(StoreExists, match=r"c\.fa"):
        classify(made / "run", made / "a.fa", tmp_path / "p.tsv", classified_out=tmp_path / "c.fa")


def test_the_command_writes_them_and_reports_of_two_kinds(made: Path, tmp_path: Path):
    code, _, err = run_here(
        "classify", made / "run", made / "one.fq", "-o", tmp_path / "o.kraken", "--unclassified-out", tmp_path / "u.fq",
        "--report", tmp_path / "o.kreport", "--report", tmp_path / "o.profile",
    )  # fmt: skip
    assert code == 0, err
    rows = [line.split("\t") for line in (tmp_path / "o.kraken").read_text().splitlines()]
    assert all(len(row) == 5 and row[3] == "150" for row in rows)
    unclassified = [row[1] for row in rows if row[0] == "U"]
    assert unclassified == [record.split()[0][1:] for record in records_in(tmp_path / "u.fq")]
    lines = (tmp_path / "o.profile").read_text().splitlines()
    columns = next(line for line in lines if line.startswith("@@"))[2:].split("\t")
    found = [dict(zip(columns, line.split("\t"), strict=True)) for line in lines if line[0] not in "@#"]
    assert sum(float(row["PERCENTAGE"]) for row in found if row["RANK"] == "strain") == pytest.approx(100)
    assert all(row["TAXPATH"].split("|")[-1] == row["TAXID"] for row in found)
    assert (tmp_path / "o.abundance.tsv").exists()
