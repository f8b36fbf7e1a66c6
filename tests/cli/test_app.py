"""Commands as transcripts: run one, compare what it prints and returns."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import millstream as ms
from support.commands import run_here


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """In this process; with a folder to run in, in another."""
    command = [sys.executable, "-m", "millstream", *map(str, arguments)]
    if cwd is None:
        return subprocess.CompletedProcess(command, *run_here(*arguments))
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def record(i: int) -> dict[str, object]:
    rng = np.random.default_rng(i)
    return {
        "question_id": f"q{i}",
        "question": "x" * i,
        "right": i % 2 == 0,
        "aliases": ["a"] * (1 + i % 3),
        "hidden": rng.standard_normal((3, 4 + i % 2, 1024)).astype(np.float16),
    }


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "traces"
    with ms.TraceWriter(path, shard_records=4) as writer:
        writer.extend(record(i) for i in range(10))
    return path


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def test_version_and_help_go_to_stdout():
    assert run("--version").stdout == f"millstream {ms.__version__}\n"
    shown = run("--help")
    assert shown.returncode == 0
    for command in ("demo", "inspect", "verify", "repair", "merge", "subset", "convert"):
        assert command in shown.stdout


def test_wrong_usage_is_exit_code_two(tmp_path: Path, store: Path):
    for arguments in (
        ["nonsense"],
        ["inspect"],
        ["merge", store],
        ["convert", store],
        ["subset", store, tmp_path / "out"],
        ["subset", store, tmp_path / "out", "--shards", "0", "--where", "1"],
        ["subset", store, tmp_path / "out", "--shards", "zero"],
        ["subset", store, tmp_path / "out", "--shards", "3-1"],
        ["convert", store, tmp_path / "out", "--compression", "rar"],
    ):
        done = run(*arguments)
        assert done.returncode == 2, arguments
        assert done.stdout == ""
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["inspect", "verify", "repair"])
def test_a_path_that_is_not_a_store_is_one_line_with_the_remedy(tmp_path: Path, command: str):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "trivia_qa_traces_batch_0000.pkl").write_bytes(b"")
    for path in (tmp_path / "nowhere", tmp_path / "old"):
        done = run(command, path)
        assert done.returncode == 1
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"millstream: {path}: ")
        assert "millstream convert" in line


def test_inspect_shows_counts_and_fields_and_examples_from_different_shards_on_request(store: Path):
    short, done = run("inspect", store), run("inspect", store, "--examples", 3)
    assert "10 records, 3 shards" in short.stdout and "  record" not in short.stdout
    assert done.stdout.startswith(short.stdout)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == str(store)
    assert "10 records, 3 shards" in lines[1]
    assert any("hidden" in line and "mean shape [3, 4.5, 1024]" in line for line in lines)
    assert any("question " in line and "characters 4.5 (0 to 9)" in line for line in lines)
    assert [line.split()[-1] for line in lines if line.startswith("  record")] == [
        "(shard-00000.arrow)",
        "(shard-00001.arrow)",
        "(shard-00002.arrow)",
    ]


def test_inspect_prints_json_for_scripts(store: Path):
    answer = json.loads(run("inspect", store, "--json", "--examples", "1").stdout)
    assert (answer["records"], answer["shards"]) == (10, 3)
    assert answer["fields"]["hidden"]["mean_shape"] == [3, 4.5, 1024]
    assert answer["examples"][0]["question_id"] == "q0"


def test_two_extractions_that_differ_only_in_timings_are_identical(tmp_path: Path):
    for name, seconds in (("a", 0.5), ("b", 0.25)):
        with ms.TraceWriter(tmp_path / name) as writer:
            writer.extend({**record(i), "generate_s": seconds, "replay_s": seconds} for i in range(3))
    done = run("inspect", tmp_path / "a", tmp_path / "b")
    assert "identical  3" in done.stdout and "different  0" in done.stdout


def test_inspect_of_two_stores_compares_them_by_id(store: Path, tmp_path: Path):
    other = tmp_path / "other"
    with ms.TraceWriter(other, compression="zstd") as writer:
        writer.extend({**record(i), "question": "changed" if i == 2 else record(i)["question"]} for i in range(8))
    done = run("inspect", other, store, "--examples", 0)
    assert "identical  7" in done.stdout
    assert "different  1" in done.stdout
    assert f"only in {store}  2" in done.stdout
    assert "question (1); first: q2" in done.stdout


def test_verify_names_shard_record_and_field_and_repair_lists_the_ids(store: Path):
    assert run("verify", store).returncode == 0
    place = ms.open(store).row(5).tensors["hidden"]
    assert place is not None
    flip(store / "shard-00001.arrow", place.offset + 15000)
    assert run("verify", store, "--fast").returncode == 0

    done = run("verify", store)
    assert done.returncode == 1
    (line,) = done.stdout.splitlines()
    assert line.startswith("shard-00001.arrow, record 5 (row 1, id 'q5'), field 'hidden': slice 1")
    assert f"millstream repair {store}" in done.stderr
    answer = json.loads(run("verify", store, "--json").stdout)
    assert [(d["file"], d["number"], d["field"]) for d in answer["damages"]] == [("shard-00001.arrow", 5, "hidden")]

    done = run("repair", store)
    assert done.returncode == 0
    assert "'q5'" in done.stdout
    (lost,) = map(json.loads, (store / "damaged" / "lost.jsonl").read_text().splitlines())
    assert lost["id"] == "q5"
    assert run("verify", store).returncode == 0
    assert len(ms.open(store)) == 9


def test_merge_and_subset_name_their_output_and_the_next_command(store: Path, tmp_path: Path):
    done = run("merge", store, store, tmp_path / "both", "--mixed")
    assert done.returncode == 0
    assert f"{tmp_path / 'both'}: 20 records" in done.stderr
    assert f"Next: millstream inspect {tmp_path / 'both'}" in done.stderr

    done = run("subset", store, tmp_path / "some", "--where", "right = 0 AND length(question) > 4", "--json")
    assert json.loads(done.stdout)["records"] == 3
    assert ms.open(tmp_path / "some").ids == ["q5", "q7", "q9"]

    assert run("subset", store, tmp_path / "first", "--shards", "0,2-2").returncode == 0
    assert ms.open(tmp_path / "first").ids == ["q0", "q1", "q2", "q3", "q8", "q9"]

    ids = tmp_path / "ids.txt"
    ids.write_text("q7\n\nq1\n")
    assert run("subset", store, tmp_path / "two", "--ids", ids).returncode == 0
    assert ms.open(tmp_path / "two").ids == ["q7", "q1"]

    for arguments in (
        ["merge", store, tmp_path / "both"],
        ["subset", store, tmp_path / "x", "--shards", "7"],
        ["subset", store, tmp_path / "x", "--shards", f"0-{10**40}"],
        ["subset", store, tmp_path / "x", "--shards", "1-4000000000"],
        ["subset", store, tmp_path / "x", "--where", "no_such_column = 1"],
        ["subset", store, tmp_path / "x", "--ids", tmp_path / "nowhere.txt"],
    ):
        done = run(*arguments)
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "x").exists()


def test_convert_refuses_an_unsafe_pickle_and_names_what_it_would_run(tmp_path: Path):
    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    (tmp_path / "old.pkl").write_bytes(pickle.dumps([{"question": Bomb()}]))
    done = run("convert", tmp_path / "old.pkl", tmp_path / "out")
    assert done.returncode == 1
    assert "system" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "ran").exists()
