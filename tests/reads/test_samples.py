"""Several samples with one table, and reads from stdin, give what each file alone gives."""

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.errors import BadSetting
from millstream.reads.classify import classify
from millstream.reads.scorer import find_classifier
from support.classifying import READS, make_run
from support.commands import run_here
from support.effort import PATIENCE_S


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples")
    make_run(path)
    (path / "pooled").mkdir()
    for name in ("a.fa", "b.fq.gz"):
        shutil.copy(path / name, path / "pooled")
    return path


def cells(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text().splitlines()]


def test_each_path_is_a_sample_with_its_own_files_and_a_column_of_the_table(made: Path, tmp_path: Path):
    command = ["classify", made / "run", made / "a.fa", made / "b.fq.gz", made / "pooled", "-o", tmp_path / "out"]
    code, text, err = run_here(*command, "--table", tmp_path / "all.tsv", "--json")
    assert code == 0 and err.count("kmer-linear seed 0") == 1, err
    assert json.loads(text)["num_rows"] == 4 * READS
    head, *rows = cells(tmp_path / "all.tsv")
    assert head == ["class", "tax_id", "taxon", "rank", "a", "b", "pooled"]
    assert [row[0] for row in rows] == ["0", "1", ""]
    sums = [sum(float(row[place]) for row in rows) for place in (4, 5, 6)]
    assert sums == pytest.approx([READS, READS, 2 * READS], abs=0.5)
    alone = tmp_path / "alone.kreport"
    classify(made / "run", made / "b.fq.gz", tmp_path / "alone.tsv", report=alone)
    assert alone.read_bytes() == (tmp_path / "out" / "b.kreport").read_bytes()
    assert (tmp_path / "alone.tsv").read_bytes() == gzip.decompress((tmp_path / "out" / "b.tsv.gz").read_bytes())
    before = (tmp_path / "all.tsv").read_bytes()
    code, _, err = run_here(*command, "--table", tmp_path / "all.tsv")
    assert code == 0 and err.count("already written") == 3 and (tmp_path / "all.tsv").read_bytes() == before
    code, _, err = run_here(*command, "--table", tmp_path / "all.biom")
    biom = json.loads((tmp_path / "all.biom").read_text())
    assert code == 0 and biom["shape"] == [3, 3] and [column["id"] for column in biom["columns"]] == head[4:]
    found = {(row, column): value for row, column, value in biom["data"]}
    assert all(found.get((r, c), 0) == float(row[c + 4]) for r, row in enumerate(rows) for c in range(3))


def test_the_model_is_loaded_once_for_all_samples(made: Path, tmp_path: Path):
    shutil.copytree(made / "run", tmp_path / "run")
    trained = find_classifier(tmp_path / "run")
    classify(trained, made / "a.fa", tmp_path / "a.tsv")
    trained.weights.unlink()
    for out, run in (("b.tsv", trained), ("alone.tsv", made / "run")):
        classify(run, made / "b.fq.gz", tmp_path / out)
    assert (tmp_path / "b.tsv").read_bytes() == (tmp_path / "alone.tsv").read_bytes()


def test_samples_that_cannot_be_told_apart_and_outputs_of_one_sample_are_refused(made: Path, tmp_path: Path):
    table = ["-o", tmp_path / "out", "--table", tmp_path / "all.tsv"]
    for arguments, named in (
        ([made / "a.fa", made / "pooled" / "a.fa", *table], "a: several samples"),
        ([made / "a.fa", *table, "--report", tmp_path / "a.kreport"], "--report"),
        ([made / "a.fa", made / "b.fq.gz", *table, "--mates", made / "c.fa.gz"], "1 for 2 samples"),
        (["-", made / "a.fa", "-o", tmp_path / "o.tsv"], "stdin is one sample"),
        (["-", "-o", tmp_path / "o.tsv", "--engine", "ray"], "workers cannot read the stdin"),
    ):
        code, _, err = run_here("classify", made / "run", *arguments)
        assert code == 2 and named in err, err
    assert list(tmp_path.iterdir()) == []


def test_reads_from_stdin_give_the_rows_of_their_file_and_leave_nothing_behind(made: Path, tmp_path: Path):
    classify(made / "run", made / "b.fq.gz", tmp_path / "file.tsv")
    command = [sys.executable, "-m", "millstream", "classify", made / "run", "-", "-o", tmp_path / "o.tsv"]
    environment = {**os.environ, "MILLSTREAM_SPOOL_DIR": str(tmp_path / "spool")}
    filtered = ["--classified-out", tmp_path / "c.fq.gz"]
    with (made / "b.fq.gz").open("rb") as file:
        done = subprocess.run(
            [*command, *filtered], stdin=file, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
        )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "o.tsv").read_bytes() == (tmp_path / "file.tsv").read_bytes()
    assert gzip.decompress((tmp_path / "c.fq.gz").read_bytes()) == gzip.decompress((made / "b.fq.gz").read_bytes())
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_sample_that_is_missing_is_noticed_before_any_is_classified(made: Path, tmp_path: Path):
    samples = [made / "a.fa", tmp_path / "nothing.fa"]
    code, _, err = run_here("classify", made / "run", *samples, "-o", tmp_path / "out", "--table", tmp_path / "t.tsv")
    assert code == 1 and "nothing.fa: no such file" in err and not (tmp_path / "out").exists()


def test_a_closed_stdout_is_one_line(made: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(BadSetting, match="stdout is closed"):
        classify(made / "run", made / "a.fa", "-")


def test_what_is_wrong_with_stdin_is_said_of_it_and_not_of_a_temporary_file(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    command = ["classify", made / "run", "-", "-o", tmp_path / "out.tsv"]
    whole = (made / "b.fq.gz").read_bytes()
    for data, says in ((b"", "-: empty"), (whole[: len(whole) // 2], "index FILE --unverified, where FILE is stdin")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        code, _, err = run_here(*command)
        assert code == 1 and says in err and "stdin-" not in err
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = run_here(*command)
    assert code == 2 and "-: pipe reads into it" in err
