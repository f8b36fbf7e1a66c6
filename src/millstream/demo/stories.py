"""The two halves of `millstream demo`: traces (killed halfway and resumed), then half a million reads."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import CalledProcessError

import numpy as np
from numpy.typing import NDArray

from millstream.cli.process import PART
from millstream.core.bucket import is_url
from millstream.core.console import format_bytes, format_seconds, quoted, say
from millstream.errors import BadSetting
from millstream.reads.kind import HEADERS
from millstream.traces.label import label
from millstream.traces.llm.model import find_model
from millstream.traces.llm.questions import read_questions
from millstream.traces.store.manifest import list_shards
from millstream.traces.store.repair import verify
from millstream.traces.store.traces import LABELS_FILE, Traces

DETECTORS = "model=stack,lstm,gnn,baselines"
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
    train=(DETECTORS, "seeds=1", "epochs=6", "batch_size=64", "parameters=30000", "memory=500MB"),
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
    train=(DETECTORS, "seeds=1", "epochs=6", "parameters=50000", "memory=1GB"),
    num_questions=1500,
)
Run = Callable[[list[str]], object]
STORIES = {"facts": FACTS, "smollm2": WORLD}


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


def run_child(arguments: list[str]) -> None:
    with child_decides():
        subprocess.run(arguments, check=True)


def shown(command: list[str]) -> str:
    """The command as typed in a shell."""
    return shlex.join(["millstream", *command[3:]])


def run_traces(folder: Path, story: Story, *, run: Run = run_child) -> None:
    """Run the first half and print each step; `run` executes a command, by default in a child process."""
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
    run(extract)
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
    run(train)
    print(f"6. The report, after {format_seconds(time.monotonic() - started)}: {trained / 'report.html'}")
    say(f"Next: millstream view {quoted(trained)}")


def story_of(name: str) -> Story:
    if name not in STORIES:
        raise BadSetting(f"--model {name}: must be one of {', '.join(STORIES)}")
    return STORIES[name]


def check_half(name: str | None) -> None:
    if name not in (None, "traces", "reads"):
        raise BadSetting(f"--only {name}: must be one of traces, reads")


def make_folder(path: Path) -> None:
    """Before anything is trained."""
    if is_url(path):
        raise BadSetting(f"{path}: the demo runs in a local folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadSetting(
            f"{path}: cannot be made ({error.strerror}). Choose another folder: millstream demo FOLDER"
        ) from None


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
    from millstream.core.tables import read_table

    verdicts = read_table(path / LABELS_FILE).column("verdict").to_pylist()
    names = ("exposure", "question", "generated_answer", "answer")
    rows = list(zip(verdicts, *(traces.column(name).to_pylist() for name in names), strict=True))
    right = {name: [row[0] == "right" for row in rows if row[1] == name] for name in EXPOSURES}
    shares = ", ".join(f"{name} {sum(found) / len(found):.0%}" for name, found in right.items() if found)
    print(f"   Correct answers by exposure: {shares}")
    for wanted in ("right", "wrong"):
        for _, exposure, question, generated, answer in [row for row in rows if row[0] == wanted][:1]:
            print(f"   {wanted}: {question} {generated} ({exposure}; expected {answer})")


GENERA = ("Alba", "Brevia", "Cinera", "Durula", "Elgia", "Fenna")
SPECIES = ("minor", "major")
STRAINS = ("train", "val", "strains")  # to train on; to select by; never seen in training
FIRST_TAXON = 9_000_001  # above the ids of NCBI
BASES = np.frombuffer(b"ACGT", np.uint8)
CONCENTRATION, CONTEXT = 3.0, 3  # of the Dirichlet prior of base frequencies; number of bases they depend on
PIECE = 1000  # bases of each region that is unique to a strain
WIDTH = 80
Genome = NDArray[np.uint8]


@dataclass(frozen=True)
class ReadStory:
    """The number of bases and reads, and the training settings of the classifiers."""

    genome_bases: int = 300_000
    reads: int = 500_000
    scored: int = 10_000  # reads of each other split
    train: Sequence[str] = (
        "model=kmer-linear,cnn",
        "memory=300MB",
        "epochs=1",
        "batch_size=256",
        "width=32",
        "layers=2",
    )


def run_reads(folder: Path, story: ReadStory, *, run: Run = run_child) -> None:
    """Run the second half and print each step; `run` executes a command, by default in a child process."""
    started = time.monotonic()

    def execute(arguments: list[str]) -> None:
        print(f"   {shown(arguments)}", flush=True)
        run(arguments)

    if folder.exists():
        if not (folder / "genomes" / "train").is_dir():
            raise BadSetting(
                f"{folder}: exists and was not made by the demo. Choose another folder: millstream demo FOLDER"
            )
        shutil.rmtree(folder)
    genomes, trained, mapping = folder / "genomes", folder / "run", folder / "species.tsv"
    num = make_genomes(genomes, story.genome_bases, seed=0)
    kinds = f"{num // len(STRAINS)} species in {len(GENERA)} genera, {len(STRAINS)} strains of each"
    print(f"1. Genomes of fictional bacteria, {kinds}: {genomes}")
    files = {
        "train.fa.gz": ("train", story.reads),
        "val.fa": ("val", story.scored),
        "known.fa": ("train", story.scored),
        "strains.fa": ("strains", story.scored),
    }
    print("2. Reads of 150 bases with an error rate of 1 %, labelled with their class:", flush=True)
    for seed, (name, (strain, count)) in enumerate(files.items()):
        drawn = command("simulate", str(genomes / strain), "-o", str(folder / name), "--reads", str(count))
        execute([*drawn, "--mapping", str(mapping), "--seed", str(seed)])
    size = format_bytes((folder / "train.fa.gz").stat().st_size)
    print(f"3. Index the gzipped file in place ({size}):", flush=True)
    execute(command("index", str(folder / "train.fa.gz"), "--header-regex", HEADERS))
    print("4. Train two classifiers; reads of strains they never saw are the fair test:", flush=True)
    splits = [f"data.train={folder / 'train.fa.gz'}", f"data.val={folder / 'val.fa'}"]
    tests = f"data.test={folder / 'known.fa'},{folder / 'strains.fa'}"
    execute(command("train", *splits, tests, f"mapping={mapping}", f"out={trained}", *story.train))
    print("5. The better model classifies every read and writes a Kraken 2-style report:", flush=True)
    report = folder / "strains.kreport"
    classify = command("classify", str(trained), str(folder / "strains.fa"), "-o", str(folder / "strains.tsv"))
    execute([*classify, "--threshold", "0.9", "--report", str(report)])
    print("\n".join(f"   {line}" for line in report.read_text().splitlines()[:6]))
    print(f"6. The report, after {format_seconds(time.monotonic() - started)}: {trained / 'report.html'}")
    say(f"Next: millstream view {quoted(trained)}")


def make_genomes(folder: Path, num_bases: int, *, seed: int) -> int:
    """Write a genome for every strain of every species; returns their number.

    Each genus has its own base frequencies, which depend on the three bases before. Its species differ in one base in
    eight. A strain differs from its species in one base in fifty, and a tenth of its genome is unique to it.
    """
    rng = np.random.default_rng(seed)
    number = 0
    for genus in GENERA:
        frequencies = rng.dirichlet(np.full(4, CONCENTRATION), 4**CONTEXT)
        ancestor = _sample(frequencies, num_bases, rng)
        for species in SPECIES:
            own = _substituted(ancestor, 1 / 8, rng)
            for strain in STRAINS:
                genome = _substituted(own, 1 / 50, rng)
                for start in range(0, num_bases - PIECE + 1, 10 * PIECE):
                    genome[start : start + PIECE] = _sample(frequencies, PIECE, rng)
                name = f"{FIRST_TAXON + number // len(STRAINS)}_{genus}_{species}"
                _write(folder / strain / f"{name}.fna", f"{genus}_{species}_{strain}", genome)
                number += 1
    return number


def _sample(frequencies: NDArray[np.float64], num_bases: int, rng: np.random.Generator) -> Genome:
    """A sequence in which each base is sampled given those before it."""
    ends: list[list[float]] = np.cumsum(frequencies, axis=1)[:, :3].tolist()
    state, codes = 0, bytearray(num_bases)
    for position, drawn in enumerate(rng.random(num_bases).tolist()):
        a, b, c = ends[state]
        code = (drawn > a) + (drawn > b) + (drawn > c)
        codes[position] = code
        state = (4 * state + code) % len(ends)
    return BASES[np.frombuffer(codes, np.uint8)]


def _substituted(genome: Genome, rate: float, rng: np.random.Generator) -> Genome:
    """A copy with substitutions at this rate per base."""
    changed = genome.copy()
    at = np.flatnonzero(rng.random(genome.size) < rate)
    changed[at] = BASES[(np.searchsorted(BASES, genome[at]) + rng.integers(1, 4, at.size)) % 4]
    return changed


def _write(path: Path, name: str, genome: Genome) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = genome.tobytes().decode()
    lines = [text[start : start + WIDTH] for start in range(0, len(text), WIDTH)]
    path.write_text("\n".join([f">{name}", *lines, ""]))
