"""Training: graphs as one union or one by one, streaming or in RAM, reads of uneven lengths.

    python benchmarks/train.py                    # about 5 minutes, 1 GB of disk; benchmarks/results/train.json
    python benchmarks/train.py graphs epoch       # parts: graphs, epoch, lengths
    python benchmarks/train.py quick=true         # small sizes, in less than a minute; train-quick.json
    python benchmarks/train.py dir=FOLDER         # where the store is written; removed at the end

graphs: the same net with the same weights on the same records; our features and one call for all layers of all records,
against one graph per record and layer, one call per layer and a mask scan for the last token of each graph. Once with
the default malloc, once with a malloc that keeps freed memory: otherwise page faults dominate for large tensors.
epoch: the steps of `millstream train` on batches streamed from a store and on the same batches in RAM, interleaved.
lengths: the passes of nets over reads of 40 to 2,000 bases, in the order of the epoch and by length within a step.
"""

import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import millstream as ms
from measuring import Result, drop_cache, save
from millstream.core.console import ignore_message, silent
from millstream.core.split import LABEL
from millstream.features import fields
from millstream.traces.detectors import DETECTION, DetectorSpec
from millstream.traces.kind import TrainSettings
from millstream.traces.study import open_labelled
from millstream.training.folder import JobKey
from millstream.training.log import Log
from millstream.training.loop import Clock, Job, Training, seed_all, steps_of
from millstream.training.run import make_fabric
from millstream.training.study import Workplace
from millstream.training.task import FitResources
from train_data import Shape, write_store
from train_graphs import LEAST_TURNS, GraphSizes, all_graphs, show_graphs
from train_lengths import LengthSizes, all_lengths, show_lengths

MEMORY = 500_000_000
PARTS = ("graphs", "epoch", "lengths")
CHILD = "child"
EPOCHS_S = 35  # no new round starts after this long
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}  # glibc: return no memory to the system
LIKE_7B, GRAPHS = Shape(), GraphSizes()


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements."""

    graphs: GraphSizes = GRAPHS
    shape: Shape = LIKE_7B
    store_bytes: int = 1_000_000_000
    epochs: int = 7  # interleaved, after one warm-up
    num_records: tuple[tuple[str, int], ...] = (("lstm", 640), ("gnn", 512), ("gvae", 384))  # per epoch


QUICK = Sizes(
    graphs=GraphSizes(records=8, layers=8, tokens=24, turns=3),
    shape=Shape(layers=6, heads=4, hidden=1024, prompt=(10, 40), answer=(2, 6)),
    store_bytes=20_000_000,
    epochs=3,
    num_records=(("lstm", 192), ("gnn", 128), ("gvae", 128)),
)


def main() -> int:
    options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    quick = options.get("quick", "false") == "true"
    sizes = QUICK if quick else Sizes()
    threads = sorted({1, torch.get_num_threads()})
    if CHILD in options:
        found = all_graphs(sizes.graphs, threads)
        print(json.dumps(found))
        return 0
    parts = [word for word in sys.argv[1:] if "=" not in word] or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        print(f"{', '.join(unknown)}: must be one of: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    result: Result = {"sizes": asdict(sizes), "threads": threads, "torch": torch.__version__}
    started = time.perf_counter()

    def keep(part: str, found: object) -> None:
        result[part] = found
        result["seconds"] = time.perf_counter() - started
        save("train-quick" if quick else "train", result)

    with tempfile.TemporaryDirectory(dir=options.get("dir"), prefix="millstream-train-") as place:
        folder = Path(place)
        if "graphs" in parts:
            kept = child("graphs", f"quick={str(quick).lower()}", environment=KEEPING)
            keep("graphs", {"as it is": all_graphs(sizes.graphs, threads), "freed memory kept": kept})
            show_graphs(result["graphs"], sizes.graphs)
        if "epoch" in parts:
            store = make_store(folder, sizes)
            pairs = [(model, count) for model in sizes.num_records for count in threads]
            keep("epoch", [epochs(name, store, folder, sizes, num, count) for (name, num), count in pairs])
            show_epochs(result["epoch"])
        if "lengths" in parts:
            keep("lengths", all_lengths(folder, LengthSizes(512, 512, turns=1) if quick else LengthSizes()))
            show_lengths(result["lengths"])
    print(f"\n{result['seconds']:.0f} s")
    return 0


def child(name: str, *arguments: str, environment: dict[str, str] | None = None) -> Any:
    """The result of a measurement in its own process, or the error if it fails; the others still run."""
    command = [sys.executable, __file__, f"{CHILD}={name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    if done.returncode:
        print(f"{' '.join(command[2:])} failed:\n{done.stderr[-2000:]}")
        return {"failed": done.stderr[-2000:]}
    return json.loads(done.stdout.splitlines()[-1])


# Epochs


def make_store(folder: Path, sizes: Sizes) -> Path:
    """Write a store of traces."""
    path = folder / "store"
    started = time.perf_counter()
    num = write_store(path, sizes.store_bytes, sizes.shape)
    print(f"{path}: {num} records, {sizes.store_bytes / 1e9:.2f} GB, in {time.perf_counter() - started:.0f} s")
    return path


def epochs(name: str, store: Path, folder: Path, sizes: Sizes, num_records: int, threads: int) -> Result:
    """Seconds of streaming epochs and of epochs over the same batches in RAM, interleaved; and of one from disk."""
    settings = TrainSettings(data=str(store), memory=MEMORY, epochs=sizes.epochs + 2)
    traces = open_labelled(settings.data, settings.label, positive="wrong")
    part = traces.subset(range(min(num_records, len(traces))))
    fabric = make_fabric(settings)
    torch.set_num_threads(threads)
    resources = FitResources(0, MEMORY // 2)  # as in a run: the other half is for the model
    spec = DetectorSpec(name, part.field_names)
    detector = spec.build(resources=resources, place=Workplace(settings, fabric, str(store))).model
    seed_all(0)
    net = detector.build(part)
    key = JobKey(name, 0)
    detector.prepare(net, part, key)
    loader = ms.Loader(
        part,
        batch_size=max(s for s in range(1, detector.at_once + 1) if settings.batch_size % s == 0),
        features=[*detector.kit.features, fields(LABEL)],
        memory=resources.memory,
        notify=ignore_message,
    )
    kept = [{entry: value.clone() for entry, value in batch.items()} for batch in loader]
    seen = detector.kit.features
    job = Job(key, folder, settings, DETECTION, seen, seen, resources.memory, str(store), detector.at_once)

    def training() -> Training:
        return Training(job, fabric, deepcopy(net), log=Log(folder), progress=silent, stop=lambda: False)

    sides = {"stream": training(), "ram": training()}
    weight_2 = DETECTION.weights(part)
    seconds: dict[str, list[float]] = {"stream": [], "ram": [], "loader alone": []}
    cpu: dict[str, list[float]] = {"stream": [], "ram": []}
    waiting: list[float] = []
    firsts: list[float] = []

    def run(side: str) -> tuple[float, float, float, float]:
        loader.set_epoch(0)  # the same batches each time
        return one_epoch(sides[side], loader if side == "stream" else kept, weight_2, len(part))

    start = time.perf_counter()
    for turn in range(sizes.epochs + 1):
        if turn > LEAST_TURNS and time.perf_counter() - start > EPOCHS_S:
            break
        for side in ("stream", "ram") if turn % 2 else ("ram", "stream"):
            took, waited, first, cpu_s = run(side)
            if turn:
                seconds[side].append(took)
                cpu[side].append(cpu_s)
                if side == "stream":
                    waiting.append(waited / took)
                    firsts.append(first)
        assert turn or same_losses(sides["stream"], sides["ram"]), "the two sides saw different batches"
        started = time.perf_counter()
        for _ in loader:
            pass
        seconds["loader alone"].append(time.perf_counter() - started)
    drop_cache(store)
    cold, waited, *_ = run("stream")
    batch_bytes = sum(value.nbytes for batch in kept for value in batch.values()) / len(kept)
    return {
        "model": name,
        "threads": threads,
        "records": len(part),
        "steps": len(kept),
        "batch_bytes": batch_bytes,
        "seconds": seconds,
        "ratio": median(seconds["stream"]) / median(seconds["ram"]),
        "cpu": cpu,
        "cpu_ratio": median(cpu["stream"]) / median(cpu["ram"]),  # what the loader adds if no core is idle
        "ratios": [a / b for a, b in zip(seconds["stream"], seconds["ram"], strict=True)],
        "waiting": median(waiting),
        "first_s": median(firsts),
        "cold": {"ratio": cold / median(seconds["ram"]), "waiting": waited / cold},
    }


def one_epoch(
    training: Training, batches: Iterable[Any], weight_2: torch.Tensor, num_records: int
) -> tuple[float, float, float, float]:
    """Like `Training.run`, without validation and checkpoints.

    Returns the total seconds, those spent waiting, those until the first batch, and CPU seconds of all threads.
    """
    given, at = training.job.settings, training.at
    steps = math.ceil(num_records / given.batch_size)
    at.sums = {}
    training.bare.train()
    gc.collect()
    clock, cpu = Clock(), time.process_time()
    first = 0.0
    count = next(given.batch_size // s for s in range(training.job.at_once, 0, -1) if given.batch_size % s == 0)
    for parts in steps_of(clock.watch(batches), -(-num_records * count // given.batch_size), count):
        training._step(parts, weight_2, given.epochs * steps)
        first = first or clock.waited
        if isinstance(batches, ms.Loader):
            at.loader = batches.state_dict()
        training._show(clock, num_records, steps)
    return clock.seconds, clock.waited, first, time.process_time() - cpu


def same_losses(one: Training, other: Training) -> bool:
    return all(math.isclose(one.at.sums[name], other.at.sums[name], rel_tol=1e-3) for name in one.at.sums)


def show_epochs(found: Sequence[Result]) -> None:
    print(f"\na streaming epoch under {MEMORY / 1e6:.0f} MB against one over the same batches in RAM; ms per batch")
    print(
        f"{'model':6}{'threads':>8}{'steps':>6}{'MB':>6}{'RAM ms':>8}{'stream ms':>10}{'loader alone':>13}{'to RAM':>8}"
        f"{'goal':>8}{'CPU':>6}{'least':>6}{'most':>6}{'waiting':>9}{'goal':>7}{'first ms':>9}{'cold':>6}{'waiting':>8}"
    )
    for one in found:
        ram, stream, alone = (median(one["seconds"][way]) / one["steps"] for way in ("ram", "stream", "loader alone"))
        print(
            f"{one['model']:6}{one['threads']:>8}{one['steps']:>6}{one['batch_bytes'] / 1e6:>6.1f}{ram * 1e3:>8.1f}"
            f"{stream * 1e3:>10.1f}{alone * 1e3:>13.1f}{one['ratio']:>8.2f}{'<= 1.05':>8}{one['cpu_ratio']:>6.2f}"
            f"{min(one['ratios']):>6.2f}{max(one['ratios']):>6.2f}{one['waiting']:>9.1%}{'< 5 %':>7}"
            f"{one['first_s'] * 1e3:>9.0f}{one['cold']['ratio']:>6.2f}{one['cold']['waiting']:>8.1%}"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
