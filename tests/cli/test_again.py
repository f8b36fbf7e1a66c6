"""Every command run twice: both succeed, and the second finds its work done. What each suggests as the next step."""

import gzip
import json
import os
import pickle
import shlex
import shutil
import sys
from collections.abc import Generator
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow.parquet as pq
import pytest

import millstream as ms
from millstream.core.files import is_device
from support.commands import run_here
from support.docs_world import make_genomes, make_model

QUESTIONS = 80
TINY = "seeds=1 epochs=1 parameters=2000 memory=500MB"
COMMANDS = {  # in this order; the next step each suggests
    "extract questions.jsonl traces model=lm device=cpu max_new_tokens=6": "label traces",
    "label traces": "inspect traces",  # no answer is right
    "label traces references=references.jsonl": "train data=traces",
    "featurize traces features feature=fields fields=logprobs": "inspect features",
    "inspect traces": "",
    "inspect traces features": "",
    "verify traces": "inspect traces",
    "repair traces": "verify traces",
    f"train data=traces out=run model=length,mean_logprob {TINY}": "view run",
    "evaluate run": "view run/evaluated/test",
    "report run": "view run",
    "merge traces both": "inspect both",
    "subset traces some --shards 0": "inspect some",
    "subset traces right --where \"verdict = 'right'\"": "inspect right",
    "convert old.pkl converted": "inspect converted",
    "simulate genomes -o reads.fa --reads 600 --mapping m.tsv": "train data.train=reads.fa mapping=m.tsv",
    "simulate genomes -o one.fq.gz -o two.fq --reads 60 --insert 300": "index one.fq.gz two.fq",
    "index reads.fa": "inspect reads.fa",
    r"index reads.fa --header-regex 'lbl\|(?P<class_id>\d+)' --mapping m.tsv --fai": "inspect reads.fa",
    "index reads.fa --rebuild": "inspect reads.fa",
    "inspect reads.fa": "",
    "pack reads.fa reads.pack": "inspect reads.pack",
    "unpack reads.pack again.fa": "index again.fa",
    "unpack reads.pack again.fa.gz": "index again.fa.gz",
    "index again.fa --index-dir indexes": "",  # inspect would not find it
    "verify reads.pack": "inspect reads.pack",
    "verify reads.fa": "inspect reads.fa",
    "train data.train=reads.fa mapping=m.tsv out=reads model=kmer-linear epochs=1 bits=12 memory=500MB": "view reads",
    "classify reads reads.fa -o calls.tsv --report taxa.txt": "view calls.tsv",
    "classify reads reads.fa -o calls.tsv.gz": "view calls.tsv.gz",
    "report reads": "view reads",
}


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, unrendered_figures: None, roughly_measured_memory: None, quick_fits: None
) -> Generator[Path]:
    folder = tmp_path_factory.mktemp("again")
    make_model(folder / "lm", QUESTIONS)
    make_genomes(folder / "genomes")
    with chdir(folder):
        rows = [
            {"question_id": f"q{n}", "question": f"Which river flows through town {n}?", "answer": "Aare"}
            for n in range(QUESTIONS)
        ]
        write_lines("questions.jsonl", rows)
        old = [{"example_id": n, "generated_text": "a", "hidden_states": np.zeros((2, 3, 4))} for n in range(3)]
        Path("old.pkl").write_bytes(pickle.dumps(old))
        yield folder


def write_lines(name: str, rows: list[dict[str, object]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def piped(text: bytes, *arguments: object) -> tuple[int, str, str]:
    """The result of a command with this text on stdin."""
    kept, (end, start) = os.dup(0), os.pipe()
    os.write(start, text)  # short enough to fit into the pipe
    os.close(start)
    os.dup2(end, 0)
    try:
        with pytest.MonkeyPatch.context() as patch, open(0, closefd=False) as stdin:
            patch.setattr(sys, "stdin", stdin)
            return run_here(*arguments)
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(end)


def test_every_command_twice_in_a_row_succeeds_and_its_next_step_can_be_run(world: Path):
    suggested: set[str] = set()
    for command, following in COMMANDS.items():
        if "references=" in command:  # half of the answers are right
            rows = [json.loads(line) for line in Path("questions.jsonl").read_text().splitlines()]
            said = ms.open("traces").column("generated_answer").to_pylist()
            write_lines("references.jsonl", [row | {"answer": said[n]} if n % 2 else row for n, row in enumerate(rows)])
        results = [run_here(*shlex.split(command)) for _ in range(2)]
        for code, _, err in results:
            assert code == 0, f"{command}: {err}"
            last = err.splitlines()[-1] if following else ""
            assert last == (f"Next: millstream {following}" if following else ""), command
        suggested.add(following)
    for command in suggested:
        if command and not command.startswith(("view", "train", "label")):
            assert run_here(*command.split())[0] == 0, command


def test_a_finished_file_is_kept_and_one_with_other_settings_or_changes_is_refused_unless_forced(world: Path):
    out, command = Path("mine.tsv"), ("classify", "reads", "reads.fa", "-o", "mine.tsv", "--report", "mine.txt")
    assert run_here(*command)[0] == 0
    before, report, written = out.read_bytes(), Path("mine.txt").read_bytes(), out.stat().st_mtime_ns
    Path("mine.txt").unlink()
    code, found, _ = run_here(*command, "--json")
    assert code == 0 and json.loads(found)["num_rows"] == 600 and Path("mine.txt").read_bytes() == report
    assert out.stat().st_mtime_ns == written
    code, _, err = run_here(*command, "--threshold", "0.9")
    assert code == 1 and "threshold: 0.5 -> 0.9" in err and out.read_bytes() == before
    out.write_bytes(before + b"x")
    code, _, err = run_here(*command)
    assert code == 1 and "mine.tsv: already exists" in err and err.count("\n") == 1
    assert run_here(*command, "--force")[0] == 0 and out.read_bytes() == before
    assert run_here(*command, "--force", "--threshold", "0")[0] == 0
    code, _, err = run_here("simulate", "genomes", "-o", "reads.fa", "--reads", "100")
    assert code == 1 and "reads: 600 -> 100" in err


def test_a_dash_is_stdin_or_stdout(world: Path):
    for command, file in (
        ("classify reads reads.fa -o -", "calls.tsv"),
        ("unpack reads.pack -", "reads.fa"),
        ("simulate genomes -o - --reads 600 --mapping m.tsv", "reads.fa"),
    ):
        code, out, _ = run_here(*command.split())
        assert code == 0 and out == Path(file).read_text(), command
    lines = Path("questions.jsonl").read_bytes()
    code, _, err = piped(lines, "extract", "-", "piped", "model=lm", "device=cpu", "max_new_tokens=2", "num_samples=3")
    assert code == 0 and ms.open("piped").ids == ["q0", "q1", "q2"], err
    code, _, err = piped(b"q1\nq2\n", "subset", "piped", "chosen", "--ids", "-")
    assert code == 0 and ms.open("chosen").ids == ["q1", "q2"], err
    code, _, err = piped(Path("references.jsonl").read_bytes(), "label", "piped", "references=-")
    assert code == 0 and "right" in pq.read_table("piped/labels.parquet")["verdict"].to_pylist(), err
    some = b"".join(Path("reads.fa").read_bytes().splitlines(keepends=True)[:20])
    code, out, err = piped(some, "classify", "reads", "-", "-o", "-")
    assert code == 0 and out.splitlines() == Path("calls.tsv").read_text().splitlines()[:11], err
    code, _, err = piped(some, "pack", "-", "some.pack")
    assert code == 0 and run_here("unpack", "some.pack", "-")[1].encode() == some, err
    code, _, err = run_here("pack", "reads.fa", "-")
    assert code == 2 and err.startswith("millstream: -: ") and err.count("\n") == 1 and not Path("-").exists()


@pytest.mark.parametrize("command", ["index", "inspect", "verify"])
def test_reads_on_stdin_are_refused_in_one_line_with_the_remedy(command: str, world: Path):
    code, _, err = run_here(command, "-")
    assert code == 1 and err.startswith("millstream: -: ") and "cat > reads.fa" in err and err.count("\n") == 1


def test_a_stale_index_is_rebuilt_with_the_settings_it_had(world: Path):
    file = Path("stale.fa")
    file.write_text(">lbl|7 a\nACGT\n")
    assert run_here("index", file, "--header-regex", r"lbl\|(?P<class_id>\d+)", "--names")[0] == 0
    file.write_text(">lbl|7 a\nACGTA\n>lbl|8 b\nACGT\n")
    code, _, err = run_here("inspect", file)
    assert code == 1 and "StaleIndex" not in err
    remedy = shlex.split(err.strip().partition("Rebuild: millstream ")[2])
    code, _, err = run_here(*remedy)
    assert code == 0 and r"lbl\|(?P<class_id>\d+)" in err and "names" in err
    assert ms.open(file).column("class_id").to_pylist() == [7, 8]
    for more in (["--rebuild", "--unverified"], ["--rebuild", "--names"], ["--salvage"]):  # others are kept
        assert run_here("index", file, *more)[0] == 0 and ms.open(file).column_names == ["class_id"], more
    assert run_here("index", file, "--rebuild", "--header-regex", r"lbl\|(?P<other>\d+)")[0] == 0
    assert ms.open(file).column_names == ["other"]


def test_a_report_replaces_a_report_only(world: Path):
    kept = Path("genomes.txt")
    kept.write_text("562")
    code, _, err = run_here("report", "reads", "--out", kept)
    assert code == 1 and err.startswith("millstream: genomes.txt: ") and kept.read_text() == "562"
    for _ in range(2):
        assert run_here("report", "reads", "--out", "page.html")[0] == 0


def test_labels_that_train_cannot_split_do_not_suggest_it(world: Path):
    rows = [json.loads(line) for line in Path("questions.jsonl").read_text().splitlines()]
    rows[0]["answer"] = ms.open("traces")[0]["generated_answer"]
    write_lines("one.jsonl", rows)
    code, _, err = run_here("label", "traces", "references=one.jsonl")
    assert code == 0 and "split has" in err and err.endswith("Next: millstream inspect traces\n")


@pytest.mark.parametrize(
    "command",
    [
        "classify reads reads.fa -o pipe --force",
        "classify reads reads.fa -o device.tsv --report pipe --force",
        "pack reads.fa pipe --rebuild",
        "unpack reads.pack pipe",
        "simulate genomes -o pipe --reads 10",
        "report reads --out pipe",
    ],
)
def test_no_command_replaces_a_device_by_a_file(command: str, world: Path):
    """The same is true of /dev/null, which nobody should have to repair when this fails."""
    if not Path("pipe").exists():
        os.mkfifo("pipe")
    code, _, err = run_here(*command.split())
    assert code == 1 and err.startswith("millstream: pipe: ") and err.count("\n") == 1, err
    assert Path("pipe").is_fifo() and not Path("device.tsv").exists()


def test_files_in_dev_shm_are_files_and_a_name_of_stdout_is_not(world: Path, tmp_path: Path):
    with TemporaryDirectory(dir="/dev/shm") as folder:
        file = shutil.copy("one.fq.gz", folder)
        assert run_here("index", file)[0] == 0 and run_here("pack", file, f"{folder}/one.pack")[0] == 0
    kept = tmp_path / "out.tsv"
    kept.touch()
    assert not is_device(kept) and is_device(Path("/dev/stdout")) and is_device(Path("/proc/self/fd/1"))


@pytest.mark.parametrize("folder", [[], ["--index-dir", "kept elsewhere"]])
def test_the_remedies_of_a_changed_and_damaged_file_lead_to_its_index_with_the_settings_it_had(
    folder: list[str], world: Path
):
    file = Path(f"torn{len(folder)}.fa.gz")
    members = [gzip.compress(f">lbl|{n} a\nACGT\n".encode()) for n in range(3)]
    file.write_bytes(b"".join(members))
    assert run_here("index", file, "--header-regex", r"lbl\|(?P<class_id>\d+)", *folder)[0] == 0
    file.write_bytes(b"".join(members)[:-9])
    command = ["index", str(file), *folder]
    for remedy in ("Rebuild", "To use that", ""):
        code, _, err = run_here(*command)
        assert (code == 0) == (not remedy), err
        command = shlex.split(err.strip().partition(f"{remedy}: millstream ")[2].partition(";")[0])
    assert Path(f"{file}.millstream").exists() == (not folder)
    assert ms.open(file, index_dir=folder[1] if folder else None).column("class_id").to_pylist() == [0]


def test_default_models_can_be_trained_on_a_default_extraction(world: Path):
    assert run_here("label", "traces", "references=references.jsonl")[0] == 0
    few = ("train=0.2", "val=0.4", "threads=1", "batch_size=1")
    code, _, err = run_here("train", "data=traces", "out=defaults", *TINY.split(), *few)
    assert code == 0, err
    assert "left out" not in err and "batch_size=1: " in err
