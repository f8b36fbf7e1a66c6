"""`millstream demo`: a small language model that makes things up is asked, killed half way, asked on, and labelled."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from millstream.console import format_bytes, say
from millstream.dataset.label import label
from millstream.dataset.labels import LABELS_FILE
from millstream.source.llm.model import find_model
from millstream.source.llm.questions import read_questions
from millstream.store.layout import list_shards
from millstream.store.repair import verify
from millstream.store.traces import Traces

EXPOSURES = ("often", "sometimes", "rarely", "never")
SETTINGS = ["tier=probe", "max_new_tokens=12", "shard_bytes=32MB", "memory=256MB"]


def run(folder: Path, *, model: str = "facts", questions: str = "facts") -> None:
    """The whole demo, with its story on stdout."""
    print(
        "1. A made-up world of people, and a tiny Llama that was told some of its facts often, some rarely, some never."
    )
    find_model(model, notify=lambda text: print(f"   {text}", flush=True))
    path = folder / "traces"
    if path.exists() and Traces(path).config.get("model") == model:
        shutil.rmtree(path)
    command = [sys.executable, "-m", "millstream", "extract", questions, str(path), f"model={model}", *SETTINGS]
    print(f"2. Every fact is asked for, and what goes on inside the model is kept: {' '.join(command[2:])}", flush=True)
    _kill_half_way(command, path, len(read_questions(questions).questions))
    print("   Half way the extractor got SIGKILL. The same command goes on where it was:", flush=True)
    subprocess.run(command, check=True)
    traces = Traces(path)
    start = time.perf_counter()
    damages = list(verify(path))
    print(
        f"3. Verified: {len(traces)} traces, {format_bytes(traces.num_bytes)}, every CRC in "
        f"{time.perf_counter() - start:.1f} s: {len(damages)} damages, {len(set(traces.ids))} different questions."
    )
    done = label(path, rule="em")
    print(
        f"4. Labelled by comparing with the facts: {', '.join(f'{n} {verdict}' for verdict, n in done.counts.items())}"
    )
    _show_answers(path, traces)
    print(f"   {len(traces)} traces in {path}, labels in {done.path}")
    say(f"Next: millstream inspect {path}")


def _kill_half_way(command: list[str], path: Path, total: int) -> None:
    """Run the extractor until half of the expected bytes are there, then kill it."""
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as child:
        while child.poll() is None and _num_records(path) < total // 2:
            time.sleep(0.05)
        if child.poll() is None:
            os.kill(child.pid, signal.SIGKILL)


def _num_records(path: Path) -> int:
    """Records that readers see, and a guess at those of the shard being written, by its size."""
    try:
        traces = Traces(path)
        sealed, opened = list_shards(path)
    except OSError:
        return 0
    written = sum(file.stat().st_size for file in path.glob("*.open"))
    if not sealed or not opened:
        return len(traces)
    return len(traces) + int(written / (traces.num_bytes / max(1, len(traces))))


def _show_answers(path: Path, traces: Traces) -> None:
    """How many are right by how often the fact was told, and an answer of each kind."""
    import pyarrow.parquet as pq

    verdicts = pq.read_table(path / LABELS_FILE).column("verdict").to_pylist()
    names = ("exposure", "question", "generated_answer", "answer")
    rows = list(zip(verdicts, *(traces.column(name).to_pylist() for name in names), strict=True))
    right = {name: [row[0] == "right" for row in rows if row[1] == name] for name in EXPOSURES}
    shares = ", ".join(f"told {name} {sum(found) / len(found):.0%}" for name, found in right.items() if found)
    print(f"   Right answers: {shares}. The rest is made up.")
    for wanted in ("right", "wrong"):
        for _, exposure, question, said, answer in [row for row in rows if row[0] == wanted][:1]:
            print(f"   {wanted}: {question} {said} (told {exposure}; it is {answer})")
