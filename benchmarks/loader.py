"""The loader against the old scripts' two methods, MDS, litdata, webdataset, HF datasets, grain and Lance, in one run.

    python benchmarks/loader.py                           # about 25 minutes; benchmarks/results/loader.json
    python benchmarks/loader.py traces=60 reads=100000    # small and quick
    python benchmarks/loader.py only=epoch,resume         # parts: A, B, cold, first, epoch, resume

A: traces of 2.7 MB, batches of 16. B: reads of 150 bases with their label, batches of 4096. Every measurement runs in
its own process on files in the page cache, except those marked cold; each peer with the better of 0 and 2 workers, its
best settings and its best shuffle. The other parts are about millstream: reading an uncached file, the time to the
first batch, a training epoch against the old scripts' loaders, resuming. Compare ratios: the machine's speed cancels
out.
"""

import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import millstream as ms
from loader_data import SCHEMA, LastTwo, Rows, ShuffleBuffer, as_torch, in_shards, shuffled, traces, write_fasta
from measuring import Result, clock, drop_cache, read_file, save
from millstream.reads.kind import HEADERS

HERE = Path(__file__).parent
PEERS = {
    "A": ["torch-shards", "pickle-lru", "safetensors", "mosaic-py1e", "mosaic-naive", "litdata", "webdataset",
          "hf-datasets", "grain", "lance"],
}  # fmt: skip
PEERS["B"] = [name for name in PEERS["A"] if name != "mosaic-py1e"]  # its exact shuffle is as fast on reads
NO_LOADER = ("safetensors",)  # a format without a loader: we wrote the loader, so it is shown but not compared
LIMIT_S = 6  # an epoch is stopped after this long
EPOCHS = 3
TURNS = 3  # of a part


def main() -> int:
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    counts = {"A": int(options.get("traces", 600)), "B": int(options.get("reads", 2_000_000))}
    only = options.get("only", ",".join(["A", "B", *PARTS])).split(",")
    result: Result = {"counts": counts}
    with tempfile.TemporaryDirectory(dir=options.get("dir"), prefix="millstream-loader-") as place:
        folder = Path(place)
        for workload in ("A", "B"):
            if workload in only:
                result[workload] = compare(workload, folder, counts[workload])
                show(workload, result[workload])
        for part in PARTS:
            if part in only:
                result[part] = tool("loader.py", part, str(folder / part), str(counts["A"]), str(counts["B"]))
                print(f"\n{part}: " + json.dumps(result[part], indent=1), flush=True)
    print(f"\n{save('loader', result)}")
    return 0


def compare(workload: str, folder: Path, count: int) -> Result:
    """millstream and its peers on the same records."""
    ours = ["millstream"] if workload == "A" else ["millstream", "millstream-pack"]
    found: Result = {"limits": peers("limits", workload, str(folder / "limits"), "--count", str(count)), "peers": {}}
    for name in [*ours, *PEERS[workload], "empty", "millstream again"]:
        peer = name.removesuffix(" again")
        place = folder / f"{workload}-{peer}"
        wrote = {} if place.exists() else peers("write", peer, workload, str(place), "--count", str(count))
        rows: Result = {"write": wrote}
        for workers in (0, 2):
            read = ["read", peer, workload, str(place), "--workers", str(workers), "--limit-s", str(LIMIT_S)]
            rows[f"workers{workers}"] = peers(*read, "--epochs", str(EPOCHS), "--no-memory")
        if fastest := best(rows):  # memory separately: sampling it takes a tenth of a core
            memory = peers(*read[:-3], str(fastest["workers"]), *read[-2:])
            fastest |= {key: memory[key] for key in ("base_pss_bytes", "peak_pss_bytes", "peak_pss_file_bytes")}
        found["peers"][name] = rows
        print(f"{workload} {name}: {_line(rows)}", file=sys.stderr, flush=True)
    return found


def show(workload: str, found: Result) -> None:
    """Print a table: the better of 0 and 2 workers, and the speed of millstream relative to each peer."""
    rows = {name: best(row) for name, row in found["peers"].items()}
    ours = max(rows[name]["epoch_records_per_s"] for name in ("millstream", "millstream again") if rows.get(name))
    scale, unit = (2.72e-3, "GB/s") if workload == "A" else (1e-6, "M reads/s")
    print(f"\n{workload}: whole epoch, warm, the better of 0 and 2 workers")
    print(f"{'':18}{'shuffle':>8}{unit:>11}{'2 workers':>11}{'speedup':>8}{'first ms':>10}{'PSS over base, MB':>20}")
    for name, row in rows.items():
        if not row:
            print(f"{name:18}{'absent':>8}")
            continue
        two = found["peers"][name]["workers2"].get("epoch_records_per_s", 0) * scale
        print(
            f"{name:18}{row['shuffle']:>8}{row['epoch_records_per_s'] * scale:>11.2f}{two:>11.2f}"
            f"{ours / row['epoch_records_per_s']:>7.1f}x{(row['open_s'] + row['first_batch_s']) * 1e3:>10.0f}"
            f"{(row['peak_pss_bytes'] - row['base_pss_bytes']) / 1e6:>20.0f}"
        )
    real = {name: row for name, row in rows.items() if row and name in PEERS[workload] and name not in NO_LOADER}
    exact = max((row["epoch_records_per_s"] for row in real.values() if row["shuffle"] == "exact"), default=0)
    every = max((row["epoch_records_per_s"] for row in real.values()), default=0)
    limits = found["limits"]
    print(
        f"speedup over the best peer with exact shuffle: {ours / exact:.1f}x; over the best peer: {ours / every:.1f}x"
    )
    bytes_per_s = ours * (2.72e6 if workload == "A" else 158)
    memcpy, batches = limits["memcpy_bytes_per_s"], limits["memcpy_batches_bytes_per_s"]
    print(
        f"relative to memcpy of a record in cache ({memcpy / 1e9:.1f} GB/s): {bytes_per_s / memcpy:.2f}; of batches "
        f"({batches / 1e9:.1f} GB/s): {bytes_per_s / batches:.2f}"
    )
    found["ratios"] = {
        "to_best_exact_peer": ours / exact,
        "to_best_peer": ours / every,
        "of_memcpy": bytes_per_s / memcpy,
        "of_memcpy_of_batches": bytes_per_s / batches,
    }


def best(rows: Result) -> Result:
    """The faster of 0 and 2 workers."""
    measured = [row for name, row in rows.items() if name != "write" and "absent" not in row]
    return max(measured, key=lambda row: row["epoch_records_per_s"], default={})


def _line(rows: Result) -> str:
    reads = {name: row for name, row in rows.items() if name != "write"}
    return ", ".join(
        f"{name} {row.get('absent') or round(row['epoch_records_per_s'])}/s" for name, row in reads.items()
    )


def peers(*arguments: str) -> Result:
    return tool("loader_peers.py", *arguments)


def tool(script: str, *arguments: str) -> Result:
    """One measurement in its own process; the last line of its output is the result."""
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"absent": f"{' '.join(arguments[:3])}: {done.stderr.strip().splitlines()[-1:]}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


# The parts about millstream


def cold(folder: Path, num_traces: int, num_reads: int) -> Result:
    """Window order on an uncached file, against reading it sequentially."""
    path = folder / "reads.fa"
    write_fasta(path, num_reads)
    ms.open(path, header_regex=HEADERS)
    code = (  # in its own process: pages that a process has mapped cannot be dropped from the cache
        "import sys, time, millstream as ms\n"
        "loader = ms.Loader(ms.open(sys.argv[1]), batch_size=4096, order='window', memory='500MB',\n"
        "                   features=ms.features.fields('sequence', 'class_id'))\n"
        "next(iter(ms.Loader(ms.open(sys.argv[1]).subset(range(9)), batch_size=9)))\n"
        "start = time.perf_counter()\n"
        "for batch in loader: pass\n"
        "print(time.perf_counter() - start)\n"
    )
    rates: dict[str, list[float]] = {"sequential": [], "window": [], "window_warm": []}
    for _ in range(TURNS):
        drop_cache(path)
        rates["sequential"].append(path.stat().st_size / clock(lambda: read_file(path)))
        drop_cache(path)
        rates["window"].append(path.stat().st_size / float(_python(code, str(path))))
        rates["window_warm"].append(path.stat().st_size / float(_python(code, str(path))))
    found = {f"{name}_bytes_per_s": median(values) for name, values in rates.items()}
    return found | {"window_of_sequential": found["window_bytes_per_s"] / found["sequential_bytes_per_s"]}


def first(folder: Path, num_traces: int, num_reads: int) -> Result:
    """Time to the first batch after imports, for a store of 500 shards."""
    with ms.TraceWriter(folder / "store", shard_records=2, schema={"hidden": "float16[layer, token, dim]"}) as writer:
        for number in range(1000):
            hidden = np.full((17, 20, 896), number, np.float16)
            writer.append({"question_id": f"q{number}", "label": number % 2, "hidden": hidden})
    code = (
        "import sys, time, torch, pyarrow.parquet, millstream as ms\n"
        "import millstream.core.loader, millstream.traces.kind, millstream.traces.store.traces\n"
        "start = time.perf_counter()\n"
        "loader = ms.Loader(ms.open(sys.argv[1]), batch_size=16, seed=int(sys.argv[2]))\n"
        "batch = next(iter(loader))\n"
        "print((time.perf_counter() - start) * 1e3)\n"
    )
    times = [float(_python(code, str(folder / "store"), str(turn))) for turn in range(5)]
    return {"shards": 500, "first_batch_ms": median(times), "all_ms": times}


def epoch(folder: Path, num_traces: int, num_reads: int) -> Result:
    """An epoch of the old LSTM: from batches in RAM, from a store within a memory limit, and with the old methods."""
    store = write_store(folder, num_traces)
    for number, shard in enumerate(in_shards(traces(num_traces), 24)):
        torch.save([as_torch(r) for r in shard], folder / f"{number:05d}.pt")
        (folder / f"{number:05d}.pkl").write_bytes(pickle.dumps(shard, protocol=pickle.HIGHEST_PROTOCOL))
    budget = "200MB"
    feature = [ms.features.layers(token="last"), ms.features.fields("label")]
    loader = ms.Loader(store, batch_size=16, features=feature, memory=budget, threads=1)
    held = [{name: value.clone() for name, value in batch.items()} for batch in loader]
    found: Result = {"store_bytes": store.num_bytes, "budget": budget}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        ways: dict[str, Callable[[], Iterable[Any]]] = {"in_ram": lambda: held, "millstream": lambda: loader}
        if threads == 1:
            ways |= {
                f"{way}_{workers}_workers": lambda way=way, workers=workers: _old_scripts(folder, way, workers)
                for way in ("torch_shards", "pickle_lru")
                for workers in (0, 2)
            }
        times: dict[str, list[float]] = {way: [] for way in ways}
        _train(held)
        for turn in range(TURNS):
            for way, batches in ways.items():
                if turn == 0 or way in ("in_ram", "millstream"):
                    times[way].append(clock(lambda batches=batches: _train(batches())))
        seconds = {way: median(values) for way, values in times.items()}
        found[f"torch_threads_{threads}"] = seconds | {"to_ram": seconds["millstream"] / seconds["in_ram"]}
    return found


def resume(folder: Path, num_traces: int, num_reads: int) -> Result:
    """The cost of state_dict, and of the first batch at the start and at 90 % of an epoch."""
    store = write_store(folder, num_traces)
    path = folder / "reads.fa"
    write_fasta(path, num_reads)
    found: Result = {}
    for name, collection, batch_size in (
        ("A", store, 16),
        ("B", ms.open(path, header_regex=HEADERS), 4096),
    ):
        loader = ms.Loader(collection, batch_size=batch_size, threads=1, order="exact")
        for _ in loader:
            pass
        state = loader.state_dict()
        found[f"{name}_state_dict_ms"] = median(clock(loader.state_dict) for _ in range(20)) * 1e3
        for share in (0.0, 0.9):
            times = []
            for epoch in range(15):
                samples = int(share * len(collection)) // batch_size * batch_size
                again = ms.Loader(collection, batch_size=batch_size, threads=1, order="exact")
                again.load_state_dict({**state, "epoch": epoch, "samples": samples})
                times.append(clock(lambda again=again: next(iter(again))))
            found[f"{name}_first_batch_at_{share:.0%}_ms"] = median(times) * 1e3
    return found


def write_store(folder: Path, num_traces: int) -> ms.Traces:
    with ms.TraceWriter(folder / "store", shard_bytes="64MB", schema=SCHEMA) as writer:
        writer.extend(traces(num_traces))
    return ms.open(folder / "store")


def _old_scripts(folder: Path, way: str, workers: int) -> Iterable[Any]:
    """Whole records by the old scripts' loaders, the last token of each layer taken when a batch is put together."""

    def collate(records: list[Any]) -> dict[str, Any]:
        hidden = [torch.as_tensor(record["hidden"])[:, -1].float() for record in records]
        return {"layers": torch.stack(hidden), "label": torch.tensor([record["label"] for record in records])}

    if way == "torch_shards":
        files = sorted(folder.glob("*.pt"))
        rows = ShuffleBuffer(files, lambda file: torch.load(file, weights_only=True), 1)
        return DataLoader(rows, batch_size=16, num_workers=workers, collate_fn=collate)
    files = sorted(folder.glob("*.pkl"))
    last = LastTwo(lambda number: pickle.loads(files[number].read_bytes()))
    sizes = [len(pickle.loads(file.read_bytes())) for file in files]
    rows = Rows(sum(sizes), lambda i: last(i // 24)[i % 24])
    return shuffled(rows, workers=workers, batch_size=16, seed=1, collate=collate)


def _train(batches: Iterable[Any]) -> None:
    """One epoch of LSTM-solo as in the old scripts: two bidirectional layers over the layer vectors, a small head."""
    torch.manual_seed(0)
    lstm = nn.LSTM(896, 256, num_layers=2, batch_first=True, bidirectional=True)
    head = nn.Sequential(nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))
    optimiser = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=1e-3)
    for batch in batches:
        out, _ = lstm(batch["layers"])
        loss = nn.functional.binary_cross_entropy_with_logits(head(out[:, -1])[:, 0], batch["label"].float())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def _python(code: str, *arguments: str) -> str:
    """The output of a separate Python process."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout


PARTS: dict[str, Callable[[Path, int, int], Result]] = {"cold": cold, "first": first, "epoch": epoch, "resume": resume}

if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in PARTS:
        name, place, num_traces, num_reads = sys.argv[1:]
        Path(place).mkdir(parents=True)
        print(json.dumps(PARTS[name](Path(place), int(num_traces), int(num_reads))))
    else:
        sys.exit(main())
