"""Tables are read on the thread that asks for them: threads of Arrow can outlive a short command."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from millstream.core.tables import publish_table

READERS = """
import os, sys
from pathlib import Path
import numpy  # its own threads start on import
from millstream.core.tables import read_table
from millstream.reads.mapping import load_mapping
from millstream.traces.llm.questions import read_questions
from millstream.traces.scores import read_scores

folder = Path(sys.argv[1])
before = len(os.listdir("/proc/self/task"))
read_table(folder / "ours.parquet")
read_scores(folder / "scores.parquet", keys=["question_id"])
read_questions(str(folder / "questions.parquet"))
load_mapping(folder / "mapping.parquet")
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_reading_a_parquet_file_starts_no_thread(tmp_path: Path):
    names = [f"q{i}" for i in range(50)]
    tables = {
        "scores": {"question_id": names, "score": [0.5] * 50, "other": [0.1] * 50},
        "questions": {"id": names, "question": names, "answer": names},
        "mapping": {"class_id": list(range(50)), "species": names, "genus": names},
    }
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    publish_table(tmp_path / "ours.parquet", pa.table(tables["scores"]))
    done = subprocess.run([sys.executable, "-c", READERS, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
