"""The loader benchmark beyond warm epochs: cold reads, first batch, training, resume.

python benchmarks/loader_parts.py cold|first|epoch|resume FOLDER NUM_TRACES NUM_READS     # one line of JSON
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from loader_data import traces, write_fasta
from loader_millstream import HEADER, SCHEMA

Result = dict[str, Any]
TURNS = 3


def cold(folder: Path, num_traces: int, num_reads: int) -> Result:
    """Window order on an uncached file, against reading it sequentially."""
    import millstream as ms

    path = folder / "reads.fa"
    write_fasta(path, num_reads)
    ms.open(path, header_regex=HEADER)
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
        _drop_cache(path)
        rates["sequential"].append(path.stat().st_size / _clock(lambda: _read(path)))
        _drop_cache(path)
        rates["window"].append(path.stat().st_size / float(_python(code, str(path))))
        rates["window_warm"].append(path.stat().st_size / float(_python(code, str(path))))
    found = {f"{name}_bytes_per_s": median(values) for name, values in rates.items()}
    return found | {"window_of_sequential": found["window_bytes_per_s"] / found["sequential_bytes_per_s"]}


def first(folder: Path, num_traces: int, num_reads: int) -> Result:
    """Time to the first batch after imports, for a store of 500 shards."""
    import millstream as ms

    with ms.TraceWriter(folder / "store", shard_records=2, schema={"hidden": "float16[layer, token, dim]"}) as writer:
        for number in range(1000):
            hidden = np.full((17, 20, 896), number, np.float16)
            writer.append({"question_id": f"q{number}", "label": number % 2, "hidden": hidden})
    code = (
        "import sys, time, torch, pyarrow.parquet, millstream as ms\n"
        "import millstream.core.loader, millstream.traces.store.traces, millstream\n"
        "start = time.perf_counter()\n"
        "loader = ms.Loader(ms.open(sys.argv[1]), batch_size=16, seed=int(sys.argv[2]))\n"
        "batch = next(iter(loader))\n"
        "print((time.perf_counter() - start) * 1e3)\n"
    )
    times = [float(_python(code, str(folder / "store"), str(turn))) for turn in range(5)]
    return {"shards": 500, "first_batch_ms": median(times), "all_ms": times}


def epoch(folder: Path, num_traces: int, num_reads: int) -> Result:
    """An epoch of the old LSTM: from batches in RAM, from a store within a memory limit, and with the old methods."""
    import pickle

    import torch

    import millstream as ms
    from loader_peers_shared import as_torch, in_shards

    with ms.TraceWriter(folder / "store", shard_bytes="64MB", schema=SCHEMA) as writer:
        for record in traces(num_traces):
            writer.append(record)
    for number, shard in enumerate(in_shards(traces(num_traces), 24)):
        torch.save([as_torch(r) for r in shard], folder / f"{number:05d}.pt")
        (folder / f"{number:05d}.pkl").write_bytes(pickle.dumps(shard, protocol=pickle.HIGHEST_PROTOCOL))
    budget = "200MB"
    store = ms.open(folder / "store")
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
                    times[way].append(_clock(lambda batches=batches: _train(batches())))
        seconds = {way: median(values) for way, values in times.items()}
        found[f"torch_threads_{threads}"] = seconds | {"to_ram": seconds["millstream"] / seconds["in_ram"]}
    return found


def resume(folder: Path, num_traces: int, num_reads: int) -> Result:
    """The cost of state_dict, and of the first batch at the start and at 90 % of an epoch."""
    import millstream as ms

    with ms.TraceWriter(folder / "store", shard_bytes="64MB", schema=SCHEMA) as writer:
        for record in traces(num_traces):
            writer.append(record)
    path = folder / "reads.fa"
    write_fasta(path, num_reads)
    found: Result = {}
    for name, collection, batch_size in (
        ("A", ms.open(folder / "store"), 16),
        ("B", ms.open(path, header_regex=HEADER), 4096),
    ):
        loader = ms.Loader(collection, batch_size=batch_size, threads=1, order="exact")
        for _ in loader:
            pass
        state = loader.state_dict()
        found[f"{name}_state_dict_ms"] = median(_clock(loader.state_dict) for _ in range(20)) * 1e3
        for share in (0.0, 0.9):
            times = []
            for epoch in range(15):
                samples = int(share * len(collection)) // batch_size * batch_size
                again = ms.Loader(collection, batch_size=batch_size, threads=1, order="exact")
                again.load_state_dict({**state, "epoch": epoch, "samples": samples})
                times.append(_clock(lambda again=again: next(iter(again))))
            found[f"{name}_first_batch_at_{share:.0%}_ms"] = median(times) * 1e3
    return found


def _old_scripts(folder: Path, way: str, workers: int) -> Iterable[Any]:
    """Whole records by the old scripts' loaders, the last token of each layer taken when a batch is put together."""
    import pickle

    import torch
    from torch.utils.data import DataLoader

    from loader_peers_shared import LastTwo, Rows, ShuffleBuffer, shuffled

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
    import torch
    from torch import nn

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


def _read(path: Path) -> None:
    buffer = bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _drop_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _clock(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    part, place, count_a, count_b = sys.argv[1:]
    Path(place).mkdir(parents=True)
    run = {"cold": cold, "first": first, "epoch": epoch, "resume": resume}[part]
    print(json.dumps(run(Path(place), int(count_a), int(count_b))))
