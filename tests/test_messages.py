"""The exact sentences that typical mistakes lead to: tests/messages.txt is a transcript, and every entry of it is run.

An entry is a command (`$ millstream ...`) or a line of Python (`>>> ms. ...`), perhaps `# without PACKAGE`, and below
it what a user reads. Other tests assert on the class of an error and the offending value, not on sentences. After
changing a sentence, or adding the first line of an entry, write the answers again and read the diff:

    MILLSTREAM_MESSAGES=write pytest -n 0 tests/test_messages.py
"""

import bz2
import gzip
import os
import pickle
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import millstream as ms
from millstream.core.tables import publish_table
from support.commands import run_here
from support.making import flip, place_of

TRANSCRIPT = Path(__file__).parent / "messages.txt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the entries name."""
    with ms.TraceWriter(tmp_path / "traces", config={"model": "a"}) as writer:
        for number in range(100):
            hidden = np.full((2, 3, 64), number, np.float16)
            writer.append({"question_id": f"q{number}", "answer": "Paris", "hidden": hidden, "topic": None})
    shutil.copytree(tmp_path / "traces", tmp_path / "damaged")
    flip(*place_of(tmp_path / "damaged", 2, "hidden"))
    shutil.copytree(tmp_path / "traces", tmp_path / "newer")
    manifest = tmp_path / "newer" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 99'))
    shutil.copytree(tmp_path / "traces", tmp_path / "labelled")
    verdicts = {"question_id": [f"q{number}" for number in range(100)], "verdict": ["right", "wrong"] * 50}
    publish_table(tmp_path / "labelled" / "labels.parquet", pa.table(verdicts))
    (tmp_path / "questions.jsonl").write_text('{"id": "q0", "question": "Capital of France?", "answer": "Paris"}\n')
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("buy milk\n")
    (tmp_path / "broken.yaml").write_text("epochs: [3\n")
    (tmp_path / "old.pkl").write_bytes(pickle.dumps([{"question": Path("anything")}]))

    reads = "".join(f">lbl|{number % 2}|read{number}\nACGTACGTAC\n" for number in range(4))
    for name in ("reads.fa", "stale.fa"):
        (tmp_path / name).write_text(reads)
        ms.open(tmp_path / name)
    (tmp_path / "stale.fa").write_text(reads + ">lbl|0|read4\nACGT\n")
    (tmp_path / "text.fa").write_text("once upon a time\n")
    (tmp_path / "cut.fa.gz").write_bytes(gzip.compress(reads.encode(), compresslevel=0, mtime=0)[:-20])
    (tmp_path / "562_Escherichia_coli.fna").write_text(f">chromosome\n{'ACGTTGCA' * 100}\n")
    (tmp_path / "species.tsv").write_text("tax_id\tname\n7\tcow\n")
    (tmp_path / "two.tsv").write_text("class_id\ttax_id\n0\t562\n1\t1280\n")
    shutil.copy(tmp_path / "reads.fa", tmp_path / "labelled.fa")
    data, mapping = dict.fromkeys(("train", "val"), tmp_path / "labelled.fa"), str(tmp_path / "two.tsv")
    data["header_regex"] = r"lbl\|(?P<class_id>\d+)"
    ms.train(data, mapping=mapping, model="kmer-linear", bits=12, epochs=1, out=str(tmp_path / "run"))
    (tmp_path / "reads.pack").write_bytes(b"")
    (tmp_path / "reads.bam").write_bytes(gzip.compress(b"BAM\1" + bytes(100), mtime=0))
    (tmp_path / "reads.fa.bz2").write_bytes(bz2.compress(reads.encode())[:-9])
    return tmp_path


def answer(question: str) -> str:
    """What a user reads after a command or a line of Python."""
    line, _, package = question.partition("  # without ")
    with pytest.MonkeyPatch.context() as patch:
        if package:
            patch.setitem(sys.modules, package, None)
        if line.startswith("$ millstream "):
            code, out, err = run_here(*shlex.split(line.removeprefix("$ millstream ")))
            lines = [line for line in f"{out}{err}".splitlines() if "compiling kernels" not in line]  # once per machine
            return "\n".join([*lines, f"(exit code {code})"])
        with pytest.raises(Exception) as caught:
            exec(line.removeprefix(">>> "), {"ms": ms, "np": np, "pa": pa})
        text = caught.value.args[0] if isinstance(caught.value, KeyError) else str(caught.value)
        return f"{type(caught.value).__name__}: {text}"


def test_typical_mistakes_are_answered_in_these_words(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    entries = TRANSCRIPT.read_text().strip().split("\n\n")
    lines = [entry.partition("\n")[0] for entry in entries]
    answers = [line if line.startswith("#") else f"{line}\n{answer(line)}" for line in lines]
    found = "\n\n".join(answers).replace(str(folder), "~")  # some messages have absolute paths
    assert "Traceback" not in found
    if os.environ.get("MILLSTREAM_MESSAGES") == "write":
        TRANSCRIPT.write_text(f"{found}\n")
    assert found == TRANSCRIPT.read_text().strip()
