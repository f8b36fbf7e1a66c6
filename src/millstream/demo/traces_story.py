"""`millstream demo`: a language model that makes things up is asked, killed half way, asked on, and seen through."""

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

from millstream.console import format_bytes, format_seconds, quoted, say
from millstream.dataset.label import label
from millstream.dataset.labels import LABELS_FILE
from millstream.errors import BadSetting
from millstream.process import PART
from millstream.source.llm.model import find_model
from millstream.source.llm.questions import read_questions
from millstream.store.layout import list_shards
from millstream.store.repair import verify
from millstream.store.traces import Traces

ALL = "model=lstm,gnn,gvae,baselines"
EXPOSURES = ("often", "sometimes", "rarely", "never", "popular", "obscure")


@dataclass(frozen=True)
class Story:
    """Who is asked what, and how it is trained on."""

    intro: str
    model: str
    questions: str
    extract: Sequence[str]
    rule: str
    train: Sequence[str]
    num_questions: int | None = None  # the first of a shuffled list


FACTS = Story(
    intro="A made-up world of people, and a tiny Llama that was told some of its facts often, some rarely, some never.",
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
    """The whole demo, with its story on stdout."""
    begun = time.monotonic()
    print(f"1. {story.intro}")
    find_model(story.model, notify=lambda text: print(f"   {text}", flush=True))
    path, trained = folder / "traces", folder / "run"
    if path.exists() and Traces(path).config.get("model") == story.model:
        shutil.rmtree(path)
    if (trained / "config.yaml").exists():
        shutil.rmtree(trained)
    total = story.num_questions or len(read_questions(story.questions).questions)
    extract = command("extract", story.questions, str(path), f"model={story.model}", *story.extract)
    print("2. Every question is asked, and what goes on inside the model is kept:", flush=True)
    print(f"   {shown(extract)}", flush=True)
    _kill_half_way(extract, path, total)
    print("   Half way the extractor got SIGKILL. The same command goes on where it was:", flush=True)
    with child_decides():
        subprocess.run(extract, check=True)
    traces = Traces(path)
    start = time.perf_counter()
    damages = list(verify(path))
    print(
        f"3. Verified: {len(traces):,} traces, {format_bytes(traces.num_bytes)}, every CRC in "
        f"{time.perf_counter() - start:.1f} s: {len(damages)} damages, {len(set(traces.ids))} different questions."
    )
    done = label(path, rule=story.rule)
    counts = ", ".join(f"{n} {verdict}" for verdict, n in done.counts.items())
    print(f"4. Labelled by comparing with the references: {counts}")
    _show_answers(path, traces)
    train = command("train", f"data={path}", f"out={trained}", *story.train)
    print("5. Detectors learn to tell right from made up, on one split by question:", flush=True)
    print(f"   {shown(train)}", flush=True)
    with child_decides():
        subprocess.run(train, check=True)
    print(f"6. The report, after {format_seconds(time.monotonic() - begun)}: {trained / 'report.html'}")
    say(f"Next: millstream view {quoted(trained)}")


def story_of(name: str) -> Story:
    if name not in STORIES:
        raise BadSetting(f"--model {name}: there is {' and '.join(STORIES)}")
    return STORIES[name]


def check_part(name: str | None) -> None:
    if name not in (None, "traces", "reads"):
        raise BadSetting(f"--only {name}: there is traces and reads")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "millstream", *arguments]


@contextmanager
def child_decides() -> Generator[None]:
    """Within it Ctrl-C is for the command that runs, which ends as it does and says why; then so does this one."""

    def leave(signum: int, frame: object) -> None:
        """The child has got it too. Ignoring it would be handed down to the child."""

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
    """As a person would type it."""
    return shlex.join(["millstream", *command[3:]])


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
    """How many are right by how well known the fact is, and an answer of each kind."""
    import pyarrow.parquet as pq

    verdicts = pq.read_table(path / LABELS_FILE).column("verdict").to_pylist()
    names = ("exposure", "question", "generated_answer", "answer")
    rows = list(zip(verdicts, *(traces.column(name).to_pylist() for name in names), strict=True))
    right = {name: [row[0] == "right" for row in rows if row[1] == name] for name in EXPOSURES}
    shares = ", ".join(f"{name} {sum(found) / len(found):.0%}" for name, found in right.items() if found)
    print(f"   Right answers, by how often or how widely a fact is told: {shares}. The rest is made up.")
    for wanted in ("right", "wrong"):
        for _, exposure, question, said, answer in [row for row in rows if row[0] == wanted][:1]:
            print(f"   {wanted}: {question} {said} ({exposure}; it is {answer})")
