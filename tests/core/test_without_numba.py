"""Traces need no compiler: everything about them works where numba is missing. Reads say what to install."""

import subprocess
import sys
from pathlib import Path

import pytest

import millstream as ms

BLOCKED = "import sys; sys.modules['numba'] = None\n"

TRACES = """
import numpy as np
import millstream as ms

with ms.TraceWriter("traces", shard_records=50) as writer:
    for number in range(300):
        hidden = np.full((2, number % 5 + 1, 3), number, np.float32)
        writer.append({"question_id": f"q{number // 2}", "n": number, "label": number % 2, "hidden": hidden})
traces = ms.open("traces")
assert len(traces) == 300 and (traces[7]["hidden"] == 7).all() and traces.by_id("q20")["n"] == 40
some = ms.subset(traces, range(250, 10, -3))
assert some.fetch([0, 1], ["n"])["n"].tolist() == [250, 247]
split = ms.split(traces, {"train": 0.7, "val": 0.3})
parts = [set(split[name].fetch(range(len(split[name])), ["n"])["n"].tolist()) for name in ("train", "val")]
assert parts[0] | parts[1] == set(range(300)) and not parts[0] & parts[1]
loader = ms.Loader(split["train"], features=ms.features.fields("n"), batch_size=16, seed=3)
seen = [number for batch in loader for number in batch["n"].tolist()]
assert sorted(seen) == sorted(parts[0]) and seen != sorted(seen)
print("done")
"""

OPEN = """
import millstream as ms

try:
    ms.open("reads.fa")
except ms.errors.MissingExtra as error:
    print(error)
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", BLOCKED + code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_traces_are_written_read_split_and_loaded(tmp_path: Path) -> None:
    done = run(TRACES, tmp_path)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize("indexed", [False, True])
def test_opening_reads_names_the_extra_to_install(indexed: bool, tmp_path: Path) -> None:
    (tmp_path / "reads.fa").write_text(">a\nACGT\n")
    if indexed:
        pytest.importorskip("numba")
        ms.open(tmp_path / "reads.fa")
    done = run(OPEN, tmp_path)
    assert "pip install 'millstream[reads]'" in done.stdout and done.stdout.count("\n") == 1, done.stderr


@pytest.mark.parametrize("arguments", [["index", "reads.fa"], ["pack", "reads.fa", "reads.pack"]])
def test_commands_for_reads_name_the_extra_in_one_line(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "reads.fa").write_text(">a\nACGT\n")
    done = run(f"sys.argv = ['millstream', *{arguments}]\nfrom millstream.__main__ import main\nmain()", tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "pip install 'millstream[reads]'" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "reads.pack").exists()
