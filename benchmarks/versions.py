"""Two versions of millstream on the same work, interleaved in one run: does a change cost speed?

    python benchmarks/versions.py BEFORE AFTER          # two checkouts; benchmarks/results/versions.json
    python benchmarks/versions.py BEFORE AFTER turns=5 only=store,index

Each job uses the public API alone, so any two versions can run it. It runs in its own process, once per version and
turn, and both versions read the same files. Compare the ratio of the fastest turns; below 1, AFTER is faster.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "versions.json"
HEADER = r"^lbl\|(?P<class_id>\d+)\|(?P<tax_id>\d+)?\|(?P<readlen>\d+)?\|(?P<name>[^/\s]+)(?:/(?P<mate>\d+))?$"
LAYERS, TOKENS, DIM = 16, 64, 1024
NUM_TRACES, NUM_SMALL, NUM_READS, READ_BASES, NUM_CLASSES = 300, 3_000, 1_000_000, 150, 20

Seconds = dict[str, float]


def main() -> int:
    before, after, *rest = sys.argv[1:]
    options = dict(argument.split("=", 1) for argument in rest)
    versions = {"before": Path(before).resolve(), "after": Path(after).resolve()}
    wanted = options.get("only", ",".join(JOBS)).split(",")
    fastest: dict[str, Seconds] = {name: {} for name in versions}
    with tempfile.TemporaryDirectory(dir=options.get("dir"), prefix="millstream-versions-") as place:
        make_data(Path(place))
        for turn in range(int(options.get("turns", 3)) + 1):  # the first turn compiles kernels and is not counted
            for name in versions if turn % 2 else reversed(versions):
                for job in wanted:
                    for part, seconds in run(job, versions[name], Path(place)).items():
                        if turn:
                            fastest[name][part] = min(seconds, fastest[name].get(part, seconds))
    print(f"{'':28} {'before':>9} {'after':>9}  ratio")
    for part, seconds in fastest["before"].items():
        other = fastest["after"][part]
        print(f"{part:28} {seconds:8.3f}s {other:8.3f}s  {other / seconds:.2f}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), **fastest}, indent=1))
    return 0


def run(job: str, version: Path, folder: Path) -> Seconds:
    """The seconds of each part of a job, measured in a process that imports this version."""
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(version / "src"), "NUMBA_CACHE_DIR": str(folder / version.name)}
    code = f"import json, versions; print(json.dumps(versions.JOBS[{job!r}](versions.Path({str(folder)!r}))))"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, env=environment, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{job} failed with {version}:\n{done.stderr.decode()}")
    return json.loads(done.stdout.splitlines()[-1])


def make_data(folder: Path) -> None:
    """Reads as FASTA, plain and gzipped, and their mapping; genomes are random."""
    rng = np.random.default_rng(0)
    bases = np.frombuffer(b"ACGT", np.uint8)
    genomes = bases[rng.integers(0, 4, (NUM_CLASSES, 200_000))]
    plain = folder / "reads.fa"
    with plain.open("wb") as file:
        for number in range(NUM_READS):
            kind, start = number % NUM_CLASSES, int(rng.integers(0, 200_000 - READ_BASES))
            file.write(b">lbl|%d|%d|150|r%d/1\n" % (kind, 100 + kind, number))
            file.write(genomes[kind, start : start + READ_BASES].tobytes() + b"\n")
    subprocess.run(["gzip", "-1", "-k", plain], check=True)
    rows = [f"{kind}\tspecies{kind}\t{100 + kind}\tgenus{kind // 4}" for kind in range(NUM_CLASSES)]
    (folder / "species.tsv").write_text("\n".join(["class_id\tname\ttax_id\tgenus", *rows]) + "\n")


def clocked(part: Callable[[], object]) -> float:
    started = time.perf_counter()
    part()
    return time.perf_counter() - started


def drain(batches: Iterator[Any]) -> None:
    for _ in batches:
        pass


def store(folder: Path) -> Seconds:
    """Traces of 2 MB: written, fetched in random order, one layer alone, and an epoch of the loader."""
    import millstream as ms

    path = folder / "work" / "traces"
    values = np.random.default_rng(0).normal(size=(LAYERS, TOKENS, DIM)).astype(np.float16)

    def write() -> None:
        with ms.TraceWriter(path) as writer:
            for number in range(NUM_TRACES):
                writer.append({"hidden": values, "question_id": f"q{number}", "label": number % 2})

    seconds = {"store: write": clocked(write)}
    traces = ms.open(path)
    order = np.random.default_rng(1).permutation(NUM_TRACES)
    seconds["store: fetch any record"] = clocked(lambda: [traces[int(number)] for number in order])
    seconds["store: one layer"] = clocked(lambda: [traces.fetch([int(n)], ["hidden[8]"]) for n in order])
    loader = ms.Loader(traces, batch_size=16, seed=0, memory="400MB")
    seconds["loader: epoch of traces"] = clocked(lambda: drain(iter(loader)))
    return seconds


def index(folder: Path) -> Seconds:
    """A million reads: indexed plain and gzipped, fetched in random order, packed, and an epoch of the loader."""
    import millstream as ms

    work = folder / "work"
    seconds: Seconds = {}
    for name in ("reads.fa", "reads.fa.gz"):
        os.link(folder / name, work / name)
        seconds[f"reads: index {name}"] = clocked(lambda name=name: ms.open(work / name, header_regex=HEADER))
    reads = ms.open(work / "reads.fa", header_regex=HEADER)
    order = np.random.default_rng(1).permutation(NUM_READS)[:400_000].reshape(-1, 4000)
    seconds["reads: fetch any"] = clocked(lambda: [reads.fetch(numbers, None) for numbers in order])
    pack = [sys.executable, "-m", "millstream", "pack", str(work / "reads.fa.gz"), str(work / "reads.pack")]
    seconds["reads: pack"] = clocked(lambda: subprocess.run(pack, check=True, capture_output=True))
    loader = ms.Loader(reads, batch_size=4096, seed=0, memory="400MB")
    seconds["loader: epoch of reads"] = clocked(lambda: drain(iter(loader)))
    gzipped = ms.open(work / "reads.fa.gz", header_regex=HEADER, memory="100MB")
    windows = ms.Loader(gzipped, batch_size=4096, seed=0, memory="200MB")
    seconds["loader: epoch of gzipped reads"] = clocked(lambda: drain(iter(windows)))
    return seconds


def detectors(folder: Path) -> Seconds:
    """Small traces, an LSTM and a probe on them, with the report."""
    import millstream as ms

    path, rng = folder / "work" / "traces", np.random.default_rng(0)
    top = -np.sort(rng.random((4, 10), np.float32) * 9)
    steps = {"logprobs": top[:, 0].copy(), "entropy": -top.mean(axis=1), "rank": np.zeros(4, np.int32)}
    steps |= {"tokens": np.arange(12, dtype=np.int32), "topk_logprobs": top, "prompt_len": 8, "answer_len": 4}
    with ms.TraceWriter(path) as writer:
        for number in range(NUM_SMALL):
            hidden = rng.normal(size=(12, 12, 256)).astype(np.float16) + np.float16(number % 2)
            writer.append(
                {"hidden": hidden, "question_id": f"q{number}", "label": number % 2, "generated_answer": "a", **steps}
            )
    command = ["train", f"data={path}", f"out={folder / 'work' / 'run'}", "model=lstm", "label=label", "epochs=3"]
    return {"train: lstm, 3 epochs": clocked(lambda: millstream(*command, "seeds=1", "patience=9"))}


def classifiers(folder: Path) -> Seconds:
    """kmer-linear trained on a million gzipped reads, which it then classifies."""
    work, given = folder / "work", folder / "work" / "reads.fa.gz"
    os.link(folder / "reads.fa.gz", given)
    settings = [f"data.train={given}", f"mapping={folder / 'species.tsv'}", "model=kmer-linear", "memory=500MB"]
    train = clocked(lambda: millstream("train", *settings, f"out={work / 'run'}", "val_reads=5000"))
    out = ["-o", str(work / "out.tsv"), "--kraken-output", str(work / "out.kreport")]
    return {
        "train: kmer-linear": train,
        "classify: a million reads": clocked(lambda: millstream("classify", str(work / "run"), str(given), *out)),
    }


def startup(folder: Path) -> Seconds:
    return {"millstream --help": min(clocked(lambda: millstream("--help")) for _ in range(5))}


def millstream(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "millstream", *arguments], check=True, stdout=subprocess.DEVNULL)


JOBS: dict[str, Callable[[Path], Seconds]] = {
    "startup": startup,
    "store": store,
    "index": index,
    "detectors": detectors,
    "classifiers": classifiers,
}

if __name__ == "__main__":
    sys.exit(main())
