"""The first half of `millstream demo`: extract traces, kill the extraction halfway, resume, train detectors."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import CalledProcessError

from millstream.cli.process import PART
from millstream.core.console import format_bytes, format_seconds, quoted, say
from millstream.errors import BadSetting
from millstream.traces.label import label
from millstream.traces.llm.model import find_model
from millstream.traces.llm.questions import read_questions
from millstream.traces.store.manifest import list_shards
from millstream.traces.store.repair import verify
from millstream.traces.store.traces import LABELS_FILE, Traces

ALL = "model=lstm,gnn,gvae,baselines"
EXPOSURES = ("often", "sometimes", "rarely", "never", "popular", "obscure")


@dataclass(frozen=True)
class Story:
    """The model, its questions, and the training settings of the detectors."""

    intro: str
    model: str
    questions: str
    extract: Sequence[str]
    rule: str
    train: Sequence[str]
    num_questions: int | None = None  # of a shuffled list; None: all


FACTS = Story(
    intro="A fictional world of people, and a tiny Llama that saw some of its facts often, some rarely, some never.",
    model="facts",
    questions="facts",
    extract=("tier=probe", "max_new_tokens=12", "shard_bytes=32MB", "memory=256MB"),
    rule="em",
    train=(ALL, "seeds=1", "epochs=6", "batch_size=64", "parameters=30000", "memory=500MB"),
)
WORLD = Story(
    intro="SmolLM2, a real language model of 135 M parameters, and questions about countries, cities and elements.",
    model="smollm2",
    questions="world",
    extract=(
        "tier=probe",
        "prompt=Q: Which planet is known as the Red Planet?\nA: Mars\nQ: Who painted the Mona Lisa?\n"
        "A: Leonardo da Vinci\nQ: {question}\nA:",
        "max_new_tokens=12",
        "memory=500MB",
        "p_true=true",
        "num_samples=1500",
        "--shuffle-seed=0",
    ),
    rule="default",
    train=(ALL, "seeds=1", "epochs=6", "parameters=50000", "memory=1GB"),
    num_questions=1500,
)
STORIES = {"facts": FACTS, "smollm2": WORLD}


def run(folder: Path, story: Story) -> None:
    """Run the first half; prints each step to stdout."""
    started = time.monotonic()
    print(f"1. {story.intro}")
    find_model(story.model, notify=lambda text: print(f"   {text}", flush=True))
    path, trained = folder / "traces", folder / "run"
    if path.exists() and Traces(path).config.get("model") == story.model:
        shutil.rmtree(path)
    if (trained / "config.yaml").exists():
        shutil.rmtree(trained)
    total = story.num_questions or len(read_questions(story.questions).questions)
    extract = command("extract", story.questions, str(path), f"model={story.model}", *story.extract)
    print("2. Run the model on every question and store its activations:", flush=True)
    print(f"   {shown(extract)}", flush=True)
    _kill_halfway(extract, path, total)
    print("   Halfway, the extraction was killed (SIGKILL). The same command resumes it:", flush=True)
    with child_decides():
        subprocess.run(extract, check=True)
    traces = Traces(path)
    start = time.perf_counter()
    damages = list(verify(path))
    print(
        f"3. Verified all checksums in {time.perf_counter() - start:.1f} s: {len(traces):,} traces, "
        f"{format_bytes(traces.num_bytes)}, {len(set(traces.ids)):,} different questions, {len(damages)} damaged."
    )
    done = label(path, rule=story.rule)
    counts = ", ".join(f"{n:,} {verdict}" for verdict, n in done.counts.items())
    print(f"4. Labelled by comparison with the reference answers: {counts}")
    _show_answers(path, traces)
    train = command("train", f"data={path}", f"out={trained}", *story.train)
    print("5. Train detectors of wrong answers on one split by question:", flush=True)
    print(f"   {shown(train)}", flush=True)
    with child_decides():
        subprocess.run(train, check=True)
    print(f"6. The report, after {format_seconds(time.monotonic() - started)}: {trained / 'report.html'}")
    say(f"Next: millstream view {quoted(trained)}")


def story_of(name: str) -> Story:
    if name not in STORIES:
        raise BadSetting(f"--model {name}: must be one of {', '.join(STORIES)}")
    return STORIES[name]


def check_half(name: str | None) -> None:
    if name not in (None, "traces", "reads"):
        raise BadSetting(f"--only {name}: must be one of traces, reads")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "millstream", *arguments]


@contextmanager
def child_decides() -> Generator[None]:
    """Leave Ctrl-C to the running command, which reports it and exits; then exit the same way."""

    def leave(signum: int, frame: object) -> None:
        """The child receives the signal too. SIG_IGN would be inherited by the child."""

    before = signal.signal(signal.SIGINT, leave)
    os.environ[PART] = "1"
    try:
        yield
    except CalledProcessError as error:
        if error.returncode == 130:
            raise KeyboardInterrupt from None
        sys.exit(error.returncode)
    finally:
        signal.signal(signal.SIGINT, before)
        del os.environ[PART]


def shown(command: list[str]) -> str:
    """The command as typed in a shell."""
    return shlex.join(["millstream", *command[3:]])


def _kill_halfway(command: list[str], path: Path, total: int) -> None:
    """Run the extraction until half of the traces are stored, then kill it."""
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as child:
        while child.poll() is None and _num_records(path) < total // 2:
            time.sleep(0.05)
        if child.poll() is None:
            os.kill(child.pid, signal.SIGKILL)


def _num_records(path: Path) -> int:
    """Records in sealed shards, plus an estimate for the open shard from its size."""
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
    """Print accuracy by exposure, and one example of each verdict."""
    import pyarrow.parquet as pq

    verdicts = pq.read_table(path / LABELS_FILE).column("verdict").to_pylist()
    names = ("exposure", "question", "generated_answer", "answer")
    rows = list(zip(verdicts, *(traces.column(name).to_pylist() for name in names), strict=True))
    right = {name: [row[0] == "right" for row in rows if row[1] == name] for name in EXPOSURES}
    shares = ", ".join(f"{name} {sum(found) / len(found):.0%}" for name, found in right.items() if found)
    print(f"   Correct answers by exposure: {shares}")
    for wanted in ("right", "wrong"):
        for _, exposure, question, generated, answer in [row for row in rows if row[0] == wanted][:1]:
            print(f"   {wanted}: {question} {generated} ({exposure}; expected {answer})")
