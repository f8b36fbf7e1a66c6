"""Training: graphs as one union or one by one, streaming or in RAM, and peak memory against store size.

    python benchmarks/train.py                    # about 10 minutes, 12 GB of disk; benchmarks/results/train.json
    python benchmarks/train.py graphs epoch       # parts: graphs, epoch, memory
    python benchmarks/train.py quick=true         # small sizes, in less than a minute; train-quick.json
    python benchmarks/train.py memory dir=FOLDER  # where stores are written; removed at the end

graphs: the same net with the same weights on the same records; our features and one call for all layers of all records,
against one graph per record and layer, one call per layer and a mask scan for the last token of each graph. Once with
the default malloc, once with a malloc that keeps freed memory: otherwise page faults dominate for large tensors.
epoch: the steps of `millstream train` on batches streamed from a store and on the same batches in RAM, interleaved.
memory: one epoch of `ms.train` over a whole store, in its own process: peak PSS of its process tree above that after
imports. Stores are read, not mapped, so the page cache does not count; pages of mapped files, such as libraries, are
included and shown separately.
"""

import gc
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Batch, Data

import millstream as ms
from millstream.core.batches import ColumnBatch
from millstream.core.console import ignore_message, silent
from millstream.core.features import to_torch
from millstream.core.split import LABEL
from millstream.features import fields
from millstream.traces.detectors import DETECTION, DetectorSpec
from millstream.traces.detectors.gnn import GraphLSTM, scatter
from millstream.traces.detectors.net import LIMIT, match_width
from millstream.traces.graphs import GraphFeature
from millstream.traces.kind import TrainSettings
from millstream.traces.study import open_labelled
from millstream.training.folder import Clock, Log, read_lines
from millstream.training.loop import Job, Training, seed_all, steps_of
from millstream.training.run import make_fabric
from millstream.training.study import Workplace
from millstream.training.task import FitResources
from pss import peak_pss, tree_pss
from train_data import Record, Shape, graph_records, write_store

RESULTS = Path(__file__).parent / "results"
MEMORY = 500_000_000
MODELS = ("lstm", "gnn", "gvae")
PARTS = ("graphs", "epoch", "memory")
CHILD = "child"
GRAPHS_S, EPOCHS_S = 12, 35  # a comparison starts no new round after this long
LEAST_TURNS = 2
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}  # glibc: return no memory to the system
LIKE_7B = Shape()
PARAMETERS = TrainSettings().parameters

Result = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements."""

    records: int = 16  # per batch of graphs
    layers: int = 32
    tokens: int = 48
    turns: int = 9  # rounds of the graph comparison
    shape: Shape = LIKE_7B
    stores: tuple[int, int] = (1_000_000_000, 10_000_000_000)
    epochs: int = 7  # interleaved, after one warm-up
    num_records: tuple[tuple[str, int], ...] = (("lstm", 640), ("gnn", 512), ("gvae", 384))  # per epoch
    memory_of: tuple[str, ...] = ("lstm", "gnn")


QUICK = Sizes(
    records=8,
    layers=8,
    tokens=24,
    turns=3,
    shape=Shape(layers=6, heads=4, hidden=1024, prompt=(10, 40), answer=(2, 6)),
    stores=(20_000_000, 80_000_000),
    epochs=3,
    num_records=(("lstm", 192), ("gnn", 128), ("gvae", 128)),
    memory_of=("gnn",),
)


def main() -> int:
    options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    quick = options.get("quick", "false") == "true"
    sizes = QUICK if quick else Sizes()
    threads = sorted({1, torch.get_num_threads()})
    if CHILD in options:
        name = options[CHILD]
        found = all_graphs(sizes, threads) if name == "graphs" else trained(options["store"], name, options["out"])
        print(json.dumps(found))
        return 0
    parts = [word for word in sys.argv[1:] if "=" not in word] or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        print(f"{', '.join(unknown)}: must be one of: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    file = RESULTS / ("train-quick.json" if quick else "train.json")
    file.parent.mkdir(exist_ok=True)
    result: Result = {"sizes": asdict(sizes), "threads": threads, "torch": torch.__version__}
    started = time.perf_counter()

    def keep(part: str, found: object) -> None:
        result[part] = found
        result["seconds"] = time.perf_counter() - started
        file.write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory(dir=options.get("dir"), prefix="millstream-train-") as place:
        folder = Path(place)
        if "graphs" in parts:
            kept = child("graphs", f"quick={str(quick).lower()}", environment=KEEPING)
            keep("graphs", {"as it is": all_graphs(sizes, threads), "freed memory kept": kept})
            show_graphs(result["graphs"], sizes)
        stores = make_stores(folder, sizes, "memory" in parts) if {"epoch", "memory"} & set(parts) else []
        if "epoch" in parts:
            pairs = [(model, count) for model in sizes.num_records for count in threads]
            keep("epoch", [epochs(name, stores[0], folder, sizes, num, count) for (name, num), count in pairs])
            show_epochs(result["epoch"])
        if "memory" in parts:
            keep("memory", [memory(name, stores, folder) for name in sizes.memory_of])
            show_memory(result["memory"])
    print(f"\n{file} ({result['seconds']:.0f} s)")
    return 0


def child(name: str, *arguments: str, environment: dict[str, str] | None = None) -> Any:
    """The result of a measurement in its own process, or the error if it fails; the others still run."""
    command = [sys.executable, __file__, f"{CHILD}={name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    if done.returncode:
        print(f"{' '.join(command[2:])} failed:\n{done.stderr[-2000:]}")
        return {"failed": done.stderr[-2000:]}
    return json.loads(done.stdout.splitlines()[-1])


# Graphs: B records, L layers, T tokens, D width of a node, N nodes, W width


def all_graphs(sizes: Sizes, threads: Sequence[int]) -> list[Result]:
    return [graphs(how, sizes, count) for how in ("tier graph", "seed") for count in threads]


def graphs(how: str, sizes: Sizes, threads: int) -> Result:
    """Seconds to build graphs and run the net, as one union and one by one."""
    torch.set_num_threads(threads)
    is_tier = how == "tier graph"
    dim, k = (64, 8) if is_tier else (128, None)
    records = graph_records(sizes.records, layers=sizes.layers, tokens=sizes.tokens, dim=dim, k=k)
    if is_tier:  # as stored in a trace: the eight strongest edges per token
        feature = ms.features.graphs(k, hidden="hidden", attention="edges")
    else:  # all pairs of tokens, with self-loops
        feature = ms.features.graphs(None, hidden="hidden", attention="attention", self_loops=True)
    net = graph_net(sizes.layers, dim, None if is_tier else 128)

    def forward(batch: Result) -> torch.Tensor:
        return net.logits(batch)[0]

    def backward(logits: torch.Tensor) -> None:
        net.zero_grad()
        logits.sum().backward()

    union = build_union(feature, records)
    by_layer = build_each(records, with_numpy)
    check_alike(net, union, by_layer, build_each(records, with_loop))
    ways: dict[str, Callable[[], object]] = {
        "build union": lambda: build_union(feature, records),
        "build numpy": lambda: build_each(records, with_numpy),
        "build loop": lambda: build_each(records, with_loop),
        "forward union": _no_grad(lambda: forward(union)),
        "forward each": _no_grad(lambda: forward_each(net, by_layer)),
        "step union": lambda: backward(forward(union)),
        "step each": lambda: backward(forward_each(net, by_layer)),
    }
    times, turns = in_turns(ways, sizes.turns)
    return {
        "how": how,
        "threads": threads,
        "dim": dim,
        "width": net.reader.head[-1].in_features,
        "nodes": len(union["x"]),
        "edges": union["edge_index"].shape[1],
        "turns": turns,
        "seconds": times,
        "rows": graph_rows(times),
    }


def graph_rows(times: dict[str, float]) -> dict[str, list[float]]:
    """Per step: seconds for the union, for graphs one by one, and for graphs built pair by pair."""
    build = [times["build union"], times["build numpy"], times["build loop"]]
    rows = {"build": build}
    for what, name in (("forward", "forward"), ("forward and backward", "step")):
        alone = [times[f"{name} union"], times[f"{name} each"], times[f"{name} each"]]
        rows[what] = alone
        rows[f"build, {what}"] = [a + b for a, b in zip(build, alone, strict=True)]
    return rows


def graph_net(num_layers: int, dim: int, width: int | None) -> GraphLSTM:
    """The net of `millstream train`, or with the given width; with random input scaling."""

    def build(width: int) -> GraphLSTM:
        return GraphLSTM(width, num_layers=num_layers, dim=dim, num_stats=0, dropout=0.0)

    wide = width or match_width(build, PARAMETERS)
    seed_all(0)
    net = build(wide).eval()
    torch.nn.init.normal_(net.x.mean, std=0.1)
    torch.nn.init.uniform_(net.x.factor, 0.5, 1.5)
    return net


def build_union(feature: GraphFeature, records: Sequence[Record]) -> Result:
    columns = {name: [record[name] for record in records] for name in feature.fields}
    made = feature(ColumnBatch(np.arange(len(records)), columns))
    return {name: to_torch(value) for name, value in made.items()}


def build_each(records: Sequence[Record], edges: Callable[[np.ndarray], tuple[Any, Any, Any]]) -> list[Batch]:
    """One graph per record and layer; the graphs of all records are batched per layer."""
    graphs: list[list[Data]] = []
    for record in records:
        graphs.append([])
        for states_TD, attention_TT in zip(record["hidden"], record["attention"], strict=True):
            sources, targets, weights = edges(attention_TT)
            graphs[-1].append(
                Data(
                    x=torch.from_numpy(states_TD.astype(np.float32)),
                    edge_index=torch.from_numpy(np.array([sources, targets], np.int64)),
                    edge_attr=torch.from_numpy(np.array(weights, np.float32)[:, None]),
                )
            )
    return [Batch.from_data_list([graph[layer] for graph in graphs]) for layer in range(len(graphs[0]))]


def with_loop(attention_TT: np.ndarray) -> tuple[list[int], list[int], list[float]]:
    """Pair by pair, as in the old script; over a list, which is faster than over an array."""
    sources: list[int] = []
    targets: list[int] = []
    weights: list[float] = []
    rows = attention_TT.tolist()
    for target in range(len(rows)):
        for source in range(target + 1):
            if rows[target][source] > 0:
                sources.append(source)
                targets.append(target)
                weights.append(rows[target][source])
    return sources, targets, weights


def with_numpy(attention_TT: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vectorised, but one graph at a time."""
    targets, sources = np.nonzero(attention_TT)  # nothing above the diagonal
    return sources, targets, attention_TT[targets, sources]


def forward_each(net: GraphLSTM, by_layer: Sequence[Batch]) -> torch.Tensor:
    """One call of the graph network per layer, and a scan for the last token of each graph."""
    read: list[torch.Tensor] = []
    for layer, graph in enumerate(by_layer):
        x_ND = ((graph.x - net.x.mean[layer]) * net.x.factor[layer]).clamp(-LIMIT, LIMIT)
        nodes_NW = net.encoder(x_ND, graph.edge_index, graph.edge_attr)
        last_BW = torch.stack([nodes_NW[graph.batch == number][-1] for number in range(graph.num_graphs)])
        mean_BW = scatter(nodes_NW, graph.batch, dim=0, dim_size=graph.num_graphs, reduce="mean")
        read.append(torch.cat([last_BW, mean_BW], dim=1))
    return net.reader(torch.stack(read, dim=1), None)


def check_alike(net: GraphLSTM, union: Result, *each: Sequence[Batch]) -> None:
    """Check that all variants give the same logits and gradients."""

    def found(logits: torch.Tensor) -> list[torch.Tensor]:
        return [logits.detach(), *torch.autograd.grad(logits.sum(), list(net.parameters()))]

    wanted = found(net.logits(union)[0])
    for by_layer in each:
        for ours, theirs in zip(wanted, found(forward_each(net, by_layer)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * max(1.0, float(theirs.abs().max())))


def in_turns(ways: dict[str, Callable[[], object]], turns: int) -> tuple[dict[str, float], int]:
    """The median seconds of each variant after one warm-up round, and the number of rounds."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    start = time.perf_counter()
    for turn in range(turns + 1):
        if turn > LEAST_TURNS and time.perf_counter() - start > GRAPHS_S:
            break
        for name, run in ways.items():
            started = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - started)
    return {name: median(found) for name, found in times.items()}, len(times["build union"])


def _no_grad(run: Callable[[], object]) -> Callable[[], object]:
    def without() -> object:
        with torch.inference_mode():
            return run()

    return without


def show_graphs(found: dict[str, Any], sizes: Sizes) -> None:
    print(
        f"\ngraphs of {sizes.records} records, {sizes.layers} layers, about {sizes.tokens} tokens: ms, and ratio "
        "to the union"
    )
    for malloc, rows in found.items():
        for one in rows if isinstance(rows, list) else ():
            print(
                f"\n{one['how']}, {one['threads']} thread(s), {malloc}: {one['dim']}-d nodes, width {one['width']}, "
                f"{one['nodes']} nodes, {one['edges']} edges, {one['turns']} turns"
            )
            print(f"{'':28}{'union':>9}{'each, numpy':>13}{'':>8}{'each, pairs':>13}{'':>8}{'goal':>8}")
            for what, (ours, numpy, loop) in one["rows"].items():
                goal = ">= 5x" if what.startswith("build, ") else ""
                print(
                    f"{what:28}{ours * 1e3:>9.1f}{numpy * 1e3:>13.1f}{numpy / ours:>7.1f}x{loop * 1e3:>13.1f}"
                    f"{loop / ours:>7.1f}x{goal:>8}"
                )
    sys.stdout.flush()


# Epochs


def make_stores(folder: Path, sizes: Sizes, both: bool) -> list[Path]:
    """Write a small store and, if `both`, a large one; smaller than planned if the disk is too full."""
    made: list[Path] = []
    for wanted in sizes.stores[: 1 + both]:
        num_bytes = min(wanted, int(shutil.disk_usage(folder).free * 0.8))
        if num_bytes < wanted:
            print(f"disk too full: writing a store of {num_bytes / 1e9:.1f} GB instead of {wanted / 1e9:.1f} GB")
        path = folder / f"store{len(made)}"
        started = time.perf_counter()
        num = write_store(path, num_bytes, sizes.shape)
        print(f"{path}: {num} records, {num_bytes / 1e9:.2f} GB, written in {time.perf_counter() - started:.0f} s")
        made.append(path)
    return made


def epochs(name: str, store: Path, folder: Path, sizes: Sizes, num_records: int, threads: int) -> Result:
    """Seconds of streaming epochs and of epochs over the same batches in RAM, interleaved; and of one from disk."""
    settings = TrainSettings(data=str(store), memory=MEMORY, epochs=sizes.epochs + 2)
    traces = open_labelled(settings.data, settings.label)
    part = traces.subset(range(min(num_records, len(traces))))
    fabric = make_fabric(settings)
    torch.set_num_threads(threads)
    resources = FitResources(0, MEMORY // 2)  # as in a run: the other half is for the model
    spec = DetectorSpec(name, part.field_names)
    detector = spec.build(resources=resources, place=Workplace(settings, fabric, str(store))).model
    seed_all(0)
    net = detector.build(part)
    detector.prepare(net, part)
    loader = ms.Loader(
        part,
        batch_size=max(s for s in range(1, detector.at_once + 1) if settings.batch_size % s == 0),
        features=[*detector.kit.features, fields(LABEL)],
        memory=resources.memory,
        notify=ignore_message,
    )
    kept = [{key: value.clone() for key, value in batch.items()} for batch in loader]
    seen = detector.kit.features
    job = Job(name, 0, folder, settings, DETECTION, seen, seen, resources.memory, str(store), detector.at_once)

    def training() -> Training:
        return Training(job, fabric, deepcopy(net), log=Log(folder), progress=silent, stop=lambda: False)

    sides = {"stream": training(), "ram": training()}
    weight_2 = DETECTION.weights(part)
    seconds: dict[str, list[float]] = {"stream": [], "ram": [], "loader alone": []}
    waiting: list[float] = []
    firsts: list[float] = []

    def run(side: str) -> tuple[float, float, float]:
        loader.set_epoch(0)  # the same batches each time
        return one_epoch(sides[side], loader if side == "stream" else kept, weight_2, len(part))

    start = time.perf_counter()
    for turn in range(sizes.epochs + 1):
        if turn > LEAST_TURNS and time.perf_counter() - start > EPOCHS_S:
            break
        for side in ("stream", "ram") if turn % 2 else ("ram", "stream"):
            took, waited, first = run(side)
            if turn:
                seconds[side].append(took)
                if side == "stream":
                    waiting.append(waited / took)
                    firsts.append(first)
        assert turn or same_losses(sides["stream"], sides["ram"]), "the two sides saw different batches"
        started = time.perf_counter()
        for _ in loader:
            pass
        seconds["loader alone"].append(time.perf_counter() - started)
    drop_cache(store)
    cold, waited, _ = run("stream")
    batch_bytes = sum(value.nbytes for batch in kept for value in batch.values()) / len(kept)
    return {
        "model": name,
        "threads": threads,
        "records": len(part),
        "steps": len(kept),
        "batch_bytes": batch_bytes,
        "seconds": seconds,
        "ratio": median(seconds["stream"]) / median(seconds["ram"]),
        "ratios": [a / b for a, b in zip(seconds["stream"], seconds["ram"], strict=True)],
        "waiting": median(waiting),
        "first_s": median(firsts),
        "cold": {"ratio": cold / median(seconds["ram"]), "waiting": waited / cold},
    }


def one_epoch(
    training: Training, batches: Iterable[Any], weight_2: torch.Tensor, num_records: int
) -> tuple[float, float, float]:
    """Like `Training.run`, without validation and checkpoints.

    Returns the total seconds, those spent waiting for batches, and those until the first batch.
    """
    given, at = training.job.settings, training.at
    steps = math.ceil(num_records / given.batch_size)
    at.sums = {}
    training.bare.train()
    gc.collect()
    clock = Clock()
    first = 0.0
    count = next(given.batch_size // s for s in range(training.job.at_once, 0, -1) if given.batch_size % s == 0)
    for parts in steps_of(clock.watch(batches), -(-num_records * count // given.batch_size), count):
        training._step(parts, weight_2, given.epochs * steps)
        first = first or clock.waited
        if isinstance(batches, ms.Loader):
            at.loader = batches.state_dict()
        training._show(clock, num_records, steps)
    return clock.seconds, clock.waited, first


def same_losses(one: Training, other: Training) -> bool:
    return all(math.isclose(one.at.sums[name], other.at.sums[name], rel_tol=1e-3) for name in one.at.sums)


def drop_cache(store: Path) -> None:
    """Drop the files from the page cache, unless they are mapped."""
    for path in store.iterdir():
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def show_epochs(found: Sequence[Result]) -> None:
    print(f"\na streaming epoch under {MEMORY / 1e6:.0f} MB against one over the same batches in RAM; ms per batch")
    print(
        f"{'model':6}{'threads':>8}{'steps':>6}{'MB':>6}{'RAM ms':>8}{'stream ms':>10}{'loader alone':>13}{'to RAM':>8}"
        f"{'goal':>8}{'least':>6}{'most':>6}{'waiting':>9}{'goal':>7}{'first ms':>9}{'cold':>6}{'waiting':>8}"
    )
    for one in found:
        ram, stream, alone = (median(one["seconds"][way]) / one["steps"] for way in ("ram", "stream", "loader alone"))
        print(
            f"{one['model']:6}{one['threads']:>8}{one['steps']:>6}{one['batch_bytes'] / 1e6:>6.1f}{ram * 1e3:>8.1f}"
            f"{stream * 1e3:>10.1f}{alone * 1e3:>13.1f}{one['ratio']:>8.2f}{'<= 1.1':>8}{min(one['ratios']):>6.2f}"
            f"{max(one['ratios']):>6.2f}{one['waiting']:>9.1%}{'< 5 %':>7}{one['first_s'] * 1e3:>9.0f}"
            f"{one['cold']['ratio']:>6.2f}{one['cold']['waiting']:>8.1%}"
        )
    sys.stdout.flush()


# Memory


def memory(name: str, stores: Sequence[Path], folder: Path) -> Result:
    """Peak memory of training on each store, each in its own process."""
    runs = [child(name, f"store={store}", f"out={folder / f'run-{name}-{store.name}'}") for store in stores]
    found = [run for run in runs if "failed" not in run]
    growth = found[-1]["peak_bytes"] / found[0]["peak_bytes"] if len(found) > 1 else None
    return {"model": name, "stores": found, "growth": growth}


def trained(store: str, name: str, out: str) -> Result:
    """One epoch of `ms.train` over a whole store: its peak memory above that after imports."""
    import millstream.training.run  # noqa: F401  so that it is in the base, like torch_geometric

    settings = TrainSettings(data=store, train=0.9, val=0.05)
    make_fabric(settings)
    gc.collect()
    base, base_files = tree_pss()
    started = time.perf_counter()
    with peak_pss() as peak:
        ms.train(store, model=name, out=out, epochs=1, seeds=1, train=settings.train, val=settings.val, memory=MEMORY)
    took = time.perf_counter() - started
    (line,) = [line for line in read_lines(Path(out)) if line["kind"] == "epoch"]
    traces = ms.open(store)
    return {
        "store_bytes": traces.num_bytes,
        "records": len(traces),
        "base_bytes": base,
        "peak_bytes": peak.peak_bytes - base,
        "peak_file_bytes": peak.peak_file_bytes - base_files,
        "samples": peak.num_samples,
        "seconds": took,
        "records_per_s": line["records_per_s"],
        "waiting": line["waiting"],
    }


def show_memory(found: Sequence[Result]) -> None:
    print(
        f"\npeak of `ms.train` for one epoch over a whole store, memory={MEMORY / 1e6:.0f}MB: MB of PSS above imports"
    )
    print("waiting is as in metrics.jsonl")
    print(
        f"{'model':8}{'store GB':>9}{'records':>9}{'peak':>8}{'of files':>10}{'of budget':>11}{'goal':>7}{'growth':>8}"
        f"{'goal':>9}{'seconds':>9}{'records/s':>11}{'waiting':>9}{'goal':>7}"
    )
    for one in found:
        for row in one["stores"]:
            growth = f"{row['peak_bytes'] / one['stores'][0]['peak_bytes']:.2f}"
            print(
                f"{one['model']:8}{row['store_bytes'] / 1e9:>9.2f}{row['records']:>9}{row['peak_bytes'] / 1e6:>8.0f}"
                f"{row['peak_file_bytes'] / 1e6:>10.0f}{row['peak_bytes'] / MEMORY:>11.2f}{'<= 1':>7}{growth:>8}"
                f"{'<= 1.1':>9}{row['seconds']:>9.0f}{row['records_per_s']:>11.0f}{row['waiting']:>9.1%}{'< 5 %':>7}"
            )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
