"""Peak memory of everything that takes `memory`, above its base, on data of a chosen size and with no compiled kernels.

    python benchmarks/memory.py                      # all cases on 1 GB; benchmarks/results/memory.json
    python benchmarks/memory.py gb=10 gnn fasta      # the cases whose names contain one of these words
    python benchmarks/memory.py gb=0.05 data=FOLDER  # keep the data there, and use what is there
    python benchmarks/memory.py seconds=60           # stop a case after a minute; its peak so far counts

Each case runs in its own process, which writes down its limit (`Allowance`: base, `memory`, kernels compiled since).
Another process looks at its memory (`tree_bytes`) every 20 ms: what docs/explanation/memory.md promises. Commands that
show no budget are given one when their libraries are imported.
"""

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from measuring import Result, save
from millstream.core.config import parse_bytes
from millstream.core.memory import Allowance, tree_bytes
from millstream.reads.kind import HEADERS
from read_data import short_reads
from train_data import Shape, write_store

CHILD = "child"
MARGIN = 32_000_000  # promised on top of `memory` for each process that loads data
EVERY_S = 0.02
LIKE_7B = Shape()
PACKING = "512MB"  # what pack, unpack and verify are held against, which have no budget: twice their constant
DETECTORS = "model={} epochs=1 seeds=1 train=0.9 val=0.05 label=label positive=wrong"
CLASSIFIERS = "data.train={fasta.gz} mapping={mapping} model={} epochs=1 batch_size=256 width=32 layers=2"


@dataclass(frozen=True)
class Case:
    """A command, or with `feature` a Loader, on one kind of data."""

    name: str
    data: str  # what must exist: traces, fasta, fasta.gz, fastq.gz, pack, run
    memory: str
    command: str = ""  # {traces}, {fasta}, ... are replaced by paths, {out} by a new one
    batch_size: int = 0  # of a Loader
    imports: str = ""  # of a command that shows no budget
    order: str = "auto"


CASES = (
    *(Case(f"train {name}", "traces", "500MB",
           f"train data={{traces}} out={{out}} {DETECTORS.format(name)} memory=500MB")
      for name in ("lstm", "gnn", "gvae", "baselines")),
    *(Case(f"train {name}", "fasta.gz", "300MB", f"train {CLASSIFIERS.replace('{}', name)} out={{out}} memory=300MB")
      for name in ("kmer-linear", "cnn")),
    Case("classify", "run", "300MB", "classify {run} {fasta.gz} -o {out}.tsv --memory 300MB"),
    Case("extract", "questions", "300MB", "extract {questions} {out} model=facts tier=full memory=300MB"),
    Case("featurize layers", "traces", "300MB", "featurize {traces} {out} feature=fields fields=states memory=300MB"),
    Case("featurize graphs", "traces", "300MB", "featurize {traces} {out} feature=fields fields=nodes memory=300MB"),
    Case("index fasta", "fasta", "256MB", "index {fasta} --rebuild --memory 256MB"),
    Case("index fasta.gz", "fasta.gz", "256MB", "index {fasta.gz} --rebuild --memory 256MB"),
    Case("pack fasta", "fasta", PACKING, "pack {fasta} {out}.pack", imports="millstream.reads.pack.pack"),
    Case("pack fastq.gz", "fastq.gz", PACKING, "pack {fastq.gz} {out}.pack", imports="millstream.reads.pack.pack"),
    Case("unpack", "pack", PACKING, "unpack {pack} {out}.fa", imports="millstream.reads.pack.unpack"),
    Case("verify traces", "traces", PACKING, "verify {traces}", imports="millstream.traces.store.repair"),
    Case("verify fasta.gz", "fasta.gz", PACKING, "verify {fasta.gz}", imports="millstream.reads.inspect"),
    Case("Loader traces", "traces", "100MB", batch_size=8),
    Case("Loader fasta window", "fasta", "100MB", batch_size=4096, order="window"),
    *(Case(f"Loader {data} {memory}", data, memory, batch_size=4096)
      for data in ("fasta.gz", "fastq.gz") for memory in ("24MB", "100MB", "300MB")),
    *(Case(f"Loader pack {memory}", "pack", memory, batch_size=4096, order="exact") for memory in ("24MB", "100MB")),
)  # fmt: skip


def main() -> int:
    options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    if sys.argv[1:2] == [CHILD]:
        return work(Path(sys.argv[2]), json.loads(sys.argv[3]))
    wanted = [word for word in sys.argv[1:] if "=" not in word]
    cases = [case for case in CASES if not wanted or any(word in case.name for word in wanted)]
    if not cases:
        print(f"{' '.join(wanted)}: no such case; there are {', '.join(case.name for case in CASES)}", file=sys.stderr)
        return 2
    size, seconds = int(float(options.get("gb", "1")) * 1e9), float(options.get("seconds", "600"))
    found: list[Result] = []
    print(f"{'case':24}{'data':>10}{'memory':>9}{'base':>7}{'kernels':>9}{'peak':>7}{'of memory':>11}{'at s':>7}  MB")
    with tempfile.TemporaryDirectory(prefix="millstream-memory-") as place:
        data = Data(Path(options.get("data", place)).absolute(), size)
        for case in cases:
            found.append(measure(case, data, Path(place), seconds))
            show(found[-1])
            save("memory", {"bytes": size, "cases": found})
    return 0


class Data:
    """Files of about `size` bytes each, made when first used."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        folder.mkdir(exist_ok=True)

    def path(self, name: str) -> Path:
        path = self.folder / f"data.{name}"
        if not path.exists():
            getattr(self, f"_{name.replace('.', '_')}")(path)
        return path

    def num_bytes(self, name: str) -> int:
        path = self.path(name)
        return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]))

    def _traces(self, path: Path) -> None:
        write_store(path, self.size, LIKE_7B)

    def _fasta(self, path: Path) -> None:
        short_reads(self.folder, self.size // 180).rename(path)
        command("index", path)

    def _fasta_gz(self, path: Path) -> None:
        with path.open("wb") as out:
            subprocess.run(["gzip", "-1", "-c", self.path("fasta")], stdout=out, check=True)
        command("index", path, "--header-regex", HEADERS)

    def _fastq_gz(self, path: Path) -> None:
        """The same reads with base qualities."""
        script = r"""NR % 2 { print "@" substr($0, 2); next }
            { q = substr(Q, 1 + (NR * 7919) % 9000, length($0)); print $0 "\n+\n" q }"""
        qualities = "".join(chr(35 + (i * i * 31 + i // 7) % 38) for i in range(10_000))
        with (
            path.open("wb") as out,
            subprocess.Popen(
                ["awk", "-v", f"Q={qualities.replace(chr(92), 'A')}", script, self.path("fasta")],
                stdout=subprocess.PIPE,
            ) as written,
        ):
            subprocess.run(["gzip", "-1", "-c"], stdin=written.stdout, stdout=out, check=True)
        command("index", path)

    def _pack(self, path: Path) -> None:
        command("pack", self.path("fasta"), path)

    def _mapping(self, path: Path) -> None:
        path.write_text("class_id\ttax_id\n" + "".join(f"{n}\t{n + 10}\n" for n in range(100)))

    def _questions(self, path: Path) -> None:
        """Short questions; a full trace of the model `facts` takes about 1 MB."""
        asked = [{"id": f"q{n}", "question": f"Where was number {n} born?"} for n in range(self.size // 1_000_000)]
        path.with_suffix(".jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
        path.symlink_to(path.with_suffix(".jsonl"))

    def _run(self, path: Path) -> None:
        words = filled(CLASSIFIERS.replace("{}", "kmer-linear"), self, path).split()
        command("train", *words, f"out={path}", "memory=300MB")


def filled(text: str, data: Data, out: Path) -> str:
    for name in ("traces", "fasta.gz", "fastq.gz", "fasta", "pack", "mapping", "run", "questions"):
        if f"{{{name}}}" in text:
            text = text.replace(f"{{{name}}}", str(data.path(name)))
    return text.replace("{out}", str(out))


def command(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "millstream", *map(str, words)], check=True, capture_output=True)


# Measuring


def measure(case: Case, data: Data, folder: Path, seconds: float) -> Result:
    """The peak of a case above its base, from outside."""
    source = "fasta.gz" if case.data == "run" else case.data
    num_bytes = data.num_bytes(source)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        out = Path(own)
        told = {
            "memory": case.memory,
            "imports": case.imports,
            "words": filled(case.command, data, out / "out").split(),
        }
        if case.batch_size:
            told |= {"path": str(data.path(source)), "batch_size": case.batch_size, "order": case.order}
        environment = os.environ | {"NUMBA_CACHE_DIR": str(out / "kernels"), "PYTHONWARNINGS": "ignore"}
        with (out / "log").open("w") as log, subprocess.Popen(
            [sys.executable, __file__, CHILD, str(out / "limits"), json.dumps(told)], stdout=log, stderr=log,
            env=environment, start_new_session=True,
        ) as process:  # fmt: skip
            samples, is_whole = watch(process, seconds)
        limits = (
            [json.loads(line) for line in (out / "limits").read_text().splitlines()]
            if (out / "limits").exists()
            else []
        )
        failed = (out / "log").read_text()[-1500:] if is_whole and process.returncode else ""
    return {
        "case": case.name,
        "data": num_bytes,
        "memory": case.memory,
        "is_whole": is_whole,
        "failed": failed,
    } | peak_of(samples, limits)


def watch(process: subprocess.Popen[Any], seconds: float) -> tuple[list[tuple[float, int]], bool]:
    """Time and memory until the process ends, or is ended."""
    samples: list[tuple[float, int]] = []
    started = time.monotonic()
    while process.poll() is None:
        begun = time.monotonic()
        samples.append((begun, tree_bytes(process.pid)))
        if begun - started > seconds:
            os.killpg(process.pid, signal.SIGKILL)
            return samples, False
        time.sleep(max(EVERY_S, 4 * (time.monotonic() - begun)))
    return samples, True


def peak_of(samples: Sequence[tuple[float, int]], limits: Sequence[Result]) -> Result:
    """The sample that comes closest to its limit, or exceeds it the most; none while a kernel was compiled."""
    begun = [line for line in limits if "limit" in line]
    compilations = [line for line in limits if "compiled" in line]
    if not begun:
        return {"peak": None}
    first = begun[-1]
    best: Result = {"peak": None, "room": 1 << 62}
    for now, used in samples:
        if now < first["time"] or any(line["since"] <= now <= line["time"] for line in compilations):
            continue
        compiled = sum(line["compiled"] for line in compilations if first["time"] < line["time"] <= now)
        room = first["limit"] + compiled - used
        if room < best["room"]:
            base = first["limit"] - first["memory"]
            best = {"base": base, "compiled": compiled, "peak": used - base - compiled, "room": room,
                    "at_s": now - first["time"]}  # fmt: skip
    return best


def show(one: Result) -> None:
    if one["failed"] or one["peak"] is None:
        state = "failed" if one["is_whole"] else "stopped before its work began"
        print(f"{one['case']:24} {state}\n{one['failed']}", flush=True)
        return
    memory = one["room"] + one["peak"]
    margin = MARGIN if one["case"].startswith("Loader") else 0
    mark = "" if one["peak"] <= memory + margin else "  OVER"
    print(
        f"{one['case']:24}{one['data'] / 1e6:>10.0f}{one['memory']:>9}{one['base'] / 1e6:>7.0f}"
        f"{one['compiled'] / 1e6:>9.0f}{one['peak'] / 1e6:>7.0f}{one['peak'] / memory:>11.2f}{one['at_s']:>7.1f}"
        f"  {'' if one['is_whole'] else 'stopped'}{mark}", flush=True,
    )  # fmt: skip


def work(limits: Path, told: dict[str, Any]) -> int:
    """The measured process: write down limits and compilations, then run the command or the Loader."""
    record_limits(limits)
    for name in told["imports"].split():
        import_module(name)
        import_module("numba.core.typing.templates")
    if "path" in told:
        load(told)
        return 0
    if told["imports"]:
        Allowance(told["memory"])
    sys.argv = ["millstream", *told["words"]]
    runpy.run_module("millstream", run_name="__main__")
    return 0


def record_limits(file: Path) -> None:
    """Append every new limit, and every compilation that raises it, to a file."""
    since, base = 0.0, 0
    made, begun, ended = Allowance.__init__, Allowance.begin_compiling, Allowance.end_compiling

    def write(line: dict[str, object]) -> None:
        with file.open("a") as f:
            f.write(json.dumps({"time": time.monotonic(), **line}) + "\n")

    def make(self: Allowance, memory: int | str) -> None:
        made(self, memory)
        write({"limit": self.num_bytes, "memory": parse_bytes(memory)})

    def begin() -> None:
        nonlocal since, base
        begun()
        since, base = time.monotonic(), Allowance.base_bytes()

    def end() -> None:
        ended()
        write({"since": since, "compiled": Allowance.base_bytes() - base})

    Allowance.__init__ = make
    Allowance.begin_compiling, Allowance.end_compiling = staticmethod(begin), staticmethod(end)


def load(told: dict[str, Any]) -> None:
    """One epoch of a Loader over all fields, after its imports."""
    import torch

    import millstream as ms

    collection = ms.open(told["path"])
    loader = ms.Loader(collection, batch_size=told["batch_size"], memory=told["memory"], order=told["order"])
    torch.ones(1 << 20).sum()  # its threads
    gc.collect()
    Allowance(told["memory"])
    for _ in loader:
        pass


if __name__ == "__main__":
    sys.exit(main())
