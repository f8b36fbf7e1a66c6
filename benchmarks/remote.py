"""Reading from an object store against MDS and litdata: same records, same server, medians of interleaved turns.

    python benchmarks/remote.py                          # an hour; benchmarks/results/remote.json
    python benchmarks/remote.py traces=40 reads=100000 turns=1
    python benchmarks/remote.py only=cold,layer server=throttled

cold: an epoch over traces of 2.7 MB in batches of 16, with an empty cache; then again with a warm one, and over local
files. small: the same with a cache of a third of the data. layer: an epoch over one layer of 32, in bytes. pack: an
epoch over reads of 150 bases. first: the first batch of a store of 500 shards. memory: what the loader holds, and what
the block cache takes, against their limits. Every measurement is a process of its own; of 0 and 2 workers, a peer's
better median counts. Ratios are medians over the turns, each of which runs all loaders.

Two servers, both benchmarks/object_server.py on loopback: `unlimited`, and `throttled`, which waits 30 ms per request
and gives each connection 50 MB/s, as object stores do.
"""

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import loader_peers_reads
import loader_peers_traces
import millstream as ms
from loader_data import SCHEMA, as_torch_list, copied_list, traces, write_fasta
from measuring import Result, measure, peak_pss, run, save
from millstream.reads.pack import PackFile  # noqa: F401  (fails early without the extra)
from object_server import BUCKET, counts_of, environment_of, object_server

TRACE_BATCH, READ_BATCH = 16, 4096
LAYERS, TOKENS, DIM = 32, 64, 1024
SHARDS = 500
SMALL_CACHE = 3  # of the data, one part; MDS refuses less than four shards
PEERS = {"A": ("mosaic-py1e", "mosaic-naive", "litdata"), "B": ("mosaic-naive", "litdata")}
SERVERS: dict[str, dict[str, float]] = {"unlimited": {}, "throttled": {"latency_ms": 30, "rate_mb": 50}}
PARTS = ("cold", "small", "layer", "pack", "first", "memory")


def main() -> int:
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    counts = {"A": int(options.get("traces", 300)), "B": int(options.get("reads", 1_000_000))}
    turns = int(options.get("turns", 3))
    only = options.get("only", ",".join(PARTS)).split(",")
    servers = options.get("server", ",".join(SERVERS)).split(",")
    result: Result = {"counts": counts, "turns": turns}
    with tempfile.TemporaryDirectory(dir=options.get("dir"), prefix="millstream-remote-") as place:
        folder = Path(place)
        write_all(folder / BUCKET, counts, only)
        for name in servers:
            with object_server(folder, **SERVERS[name]) as address:
                os.environ.update(environment_of(address))
                print(f"\n== {name} server")
                for part in (part for part in PARTS if part in only):
                    result[f"{name} {part}"] = globals()[f"{part}_part"](folder, counts, turns)
                    save("remote", result)
    return 0


def write_all(bucket: Path, counts: dict[str, int], only: list[str]) -> None:
    """The data of all parts, straight into the folder of the server."""
    wanted = {"A"} if {"cold", "small", "memory"} & set(only) else set[str]()
    for workload in sorted(wanted | ({"B"} if "pack" in only else set())):
        for tool in ("millstream", *PEERS[workload]):
            place = bucket / f"{workload}-{tool}"
            wrote = measure(__file__, "write", tool=tool, workload=workload, folder=place, count=counts[workload])
            print(f"{place.name}: {wrote}", flush=True)
    if "memory" in only:
        only = [*only, "first"]
    for part in {"layer", "first"} & set(only):
        measure(__file__, f"write-{part}", tool="millstream", folder=bucket / part, count=max(counts["A"] // 3, 8))


# -- parts


def cold_part(folder: Path, counts: dict[str, int], turns: int) -> Result:
    return compared("cold", "A", folder, counts["A"], turns)


def small_part(folder: Path, counts: dict[str, int], turns: int) -> Result:
    data = sum(size_of(path) for path in (folder / BUCKET / "A-millstream").rglob("*"))
    return compared("small", "A", folder, counts["A"], turns, cache_bytes=data // SMALL_CACHE)


def pack_part(folder: Path, counts: dict[str, int], turns: int) -> Result:
    return compared("pack", "B", folder, counts["B"], turns)


def compared(
    part: str, workload: str, folder: Path, count: int, turns: int, *, cache_bytes: int | None = None
) -> Result:
    """Measure all loaders in turns; print a line per loader, and how many times as long as ours it takes."""
    loaders = [("millstream", 0), *((peer, workers) for peer in PEERS[workload] for workers in (0, 2))]
    rows: dict[str, list[Result]] = {}
    for _ in range(turns):
        for tool, workers in loaders:
            os.sync()  # what others wrote is not written to disk at the cost of the next
            rows.setdefault(f"{tool} {workers}", []).append(
                measure(
                    __file__,
                    "millstream" if tool == "millstream" else "peer",
                    tool=tool,
                    workload=workload,
                    folder=folder,
                    workers=str(workers),
                    cache_bytes=cache_bytes,
                    timeout_s=300,
                )
            )
            shutil.rmtree(folder / "cache", ignore_errors=True)
    found: Result = {"rows": rows, "cache_bytes": cache_bytes}
    mine = rows["millstream 0"]
    print(f"\n{part}: {count:,} records, medians of {turns}", flush=True)
    for name, turned in rows.items():
        if bad := next((row for row in turned if "cold_s" not in row), None):
            print(f"  {name:16} {bad}")
            continue
        ratios = {
            what: median(row[what] / own[what] for row, own in zip(turned, mine, strict=True))
            for what in ("cold_s", "warm_s", "cpu_s")
        }
        found[name] = {"ratios": ratios} | {
            what: median(row[what] for row in turned)
            for what in ("cold_s", "warm_s", "cpu_s", "fetched_bytes", "requests")
        }
        line = f"  {name:16} cold {found[name]['cold_s']:7.2f} s ({ratios['cold_s']:.2f}x ours, "
        line += f"CPU {ratios['cpu_s']:.2f}x), second epoch {found[name]['warm_s']:.2f} s ({ratios['warm_s']:.2f}x), "
        fetched, requests = found[name]["fetched_bytes"], found[name]["requests"]
        print(f"{line}{fetched / 1e6:.0f} MB in {requests:.0f} requests", flush=True)
    if "local_s" in mine[0]:
        found["warm_to_local"] = median(row["warm_to_local"] for row in mine)
        print(f"  warm cache to local files: {found['warm_to_local']:.2f}")
    return found


def layer_part(folder: Path, counts: dict[str, int], turns: int) -> Result:
    count = max(counts["A"] // 3, 8)
    found = measure(__file__, "layer", tool="millstream", folder=folder, count=count)
    wanted = count * TOKENS * DIM * 2
    found |= {"wanted_bytes": wanted, "fetched_per_wanted": found.get("fetched_bytes", 0) / wanted, "of_all": LAYERS}
    print(f"\nlayer: {found}", flush=True)
    return found


def first_part(folder: Path, counts: dict[str, int], turns: int) -> Result:
    found = [measure(__file__, "first", tool="millstream", folder=folder) for _ in range(turns)]
    print(f"\nfirst batch of {SHARDS} shards: {found}", flush=True)
    return {"rows": found}


def memory_part(folder: Path, counts: dict[str, int], turns: int) -> Result:
    found = {
        f"memory={memory} cache={cache}": measure(
            __file__, "memory", tool="millstream", folder=folder, memory=memory, cache=cache
        )
        for memory, cache in (("100MB", "100MB"), ("200MB", "0"), ("300MB", "0"))
    }
    for name, row in found.items():
        print(f"\n{name}: {row}", flush=True)
    return found


# -- measurements, each in a process of its own


def measure_write(tool: str, workload: str, folder: Path, count: int) -> Result:
    start = time.perf_counter()
    folder.mkdir(parents=True)
    if tool != "millstream":
        peer_of(tool, workload).write(folder, count=count, seed=0)
    elif workload == "A":
        with ms.TraceWriter(folder / "traces", schema=SCHEMA, shard_bytes="64MB") as writer:
            for record in traces(count):
                writer.append(record)
    else:
        write_fasta(folder / "reads.fa", count)
        command = f"{sys.executable} -m millstream pack {folder}/reads.fa {folder}/reads.pack >{os.devnull} 2>&1"
        assert not os.system(command)
    return {"write_s": time.perf_counter() - start}


def measure_write_layer(tool: str, folder: Path, count: int) -> Result:
    rng = np.random.default_rng(1)
    with ms.TraceWriter(folder, schema={"hidden": "float16[layer, token, dim]"}, shard_bytes="64MB") as writer:
        for number in range(count):
            hidden = rng.integers(0, 1 << 14, (LAYERS, TOKENS, DIM), np.uint16).view(np.float16)
            writer.append({"question_id": f"q{number}", "hidden": hidden})
    return {}


def measure_write_first(tool: str, folder: Path, count: int) -> Result:
    with ms.TraceWriter(folder, shard_records=4) as writer:
        for number in range(4 * SHARDS):
            writer.append({"question_id": f"q{number}", "states": np.full((16, 64), number, np.float16)})
    return {}


def measure_millstream(tool: str, workload: str, folder: Path, workers: int, cache_bytes: int | None = None) -> Result:
    """Cold, then warm and local epochs in turns."""
    name = "A-millstream/traces" if workload == "A" else "B-millstream/reads.pack"
    local, remote = str(folder / BUCKET / name), f"s3://{BUCKET}/{name}"
    epoch(local, workload)  # imports and kernels
    with counted() as fetched, cache_in(folder, str(cache_bytes or "20GB")):
        cpu_s = time.process_time()
        cold_s = epoch(remote, workload)
        cpu_s = time.process_time() - cpu_s
    with cache_in(folder, str(cache_bytes or "20GB"), is_empty=False):
        pairs = [(epoch(remote, workload), epoch(local, workload)) for _ in range(5)]
    return {
        "cold_s": cold_s,
        "warm_s": pairs[0][0],
        "local_s": median(local_s for _, local_s in pairs),
        "warm_to_local": median(warm_s / local_s for warm_s, local_s in pairs),
        "cpu_s": cpu_s,
        "requests": fetched["requests"],
        "fetched_bytes": fetched["bytes"],
    }


def measure_layer(tool: str, folder: Path, count: int) -> Result:
    features = ms.features.each(lambda record, _: {"layer": record["hidden"]}, fields=["hidden[16]"])
    with counted() as fetched, cache_in(folder):
        start, cpu_s = time.perf_counter(), time.process_time()
        rows = ms.open(f"s3://{BUCKET}/layer")
        loader = ms.Loader(rows, batch_size=TRACE_BATCH, features=features, seed=1, notify=lambda _: None)
        number = sum(len(batch["numbers"]) for batch in loader)
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_s
    assert number == count
    return {"seconds": seconds, "cpu_s": cpu_s, "fetched_bytes": fetched["bytes"], "requests": fetched["requests"]}


def measure_first(tool: str, folder: Path) -> Result:
    local = folder / BUCKET / "first"
    next(iter(ms.Loader(ms.open(local), batch_size=8, seed=2, notify=lambda _: None)))  # imports
    with counted() as fetched, cache_in(folder):
        start = time.perf_counter()
        rows = ms.open(f"s3://{BUCKET}/first")
        opened_s = time.perf_counter() - start
        batch = next(iter(ms.Loader(rows, batch_size=8, seed=1, notify=lambda _: None)))
        seconds = time.perf_counter() - start
    assert len(batch["numbers"]) == 8
    return {"opened_s": opened_s, "first_batch_s": seconds, "requests": fetched["requests"]}


def measure_memory(tool: str, folder: Path, memory: str, cache: str) -> Result:
    most_bytes, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most_bytes
        while not done.wait(0.02):
            files = list((folder / "cache").glob("*/*"))
            most_bytes = max(most_bytes, sum(size_of(path) for path in files))

    url = f"s3://{BUCKET}/A-millstream/traces"
    next(iter(ms.Loader(ms.open(f"s3://{BUCKET}/first"), batch_size=1, notify=lambda _: None)))  # imports, the client
    with cache_in(folder, str(cache)):
        loader = ms.Loader(ms.open(url), batch_size=8, seed=1, memory=memory, notify=lambda _: None)
        sampler = threading.Thread(target=watch)
        sampler.start()
        with peak_pss() as held:
            held.sample()
            before = held.peak_bytes
            for _ in loader:
                pass
        done.set()
        sampler.join()
    return {"above_start_mb": (held.peak_bytes - before) / 1e6, "cache_mb": most_bytes / 1e6}


def measure_peer(tool: str, workload: str, folder: Path, workers: int, cache_bytes: int | None = None) -> Result:
    """Two epochs: with an empty cache, then with what the first one left."""
    loader, url = peer_of(tool, workload), f"s3://{BUCKET}/{workload}-{tool}"
    with counted() as fetched:
        start, cpu_s = time.perf_counter(), cpu_seconds()
        batches = remote_batches(loader, tool, workload, url, folder / "cache", workers, cache_bytes)
        clock_epoch(batches)
        cold_s, cpu_s = time.perf_counter() - start, cpu_seconds() - cpu_s
    return {
        "cold_s": cold_s,
        "warm_s": clock_epoch(batches),
        "cpu_s": cpu_s,
        "requests": fetched["requests"],
        "fetched_bytes": fetched["bytes"],
    }


def remote_batches(
    loader: Any, tool: str, workload: str, url: str, cache: Path, workers: int, cache_bytes: int | None
) -> Callable[[], Iterable[Any]]:
    """The peer's own loader over a URL, with the collation of the local benchmark."""
    batch_size = TRACE_BATCH if workload == "A" else READ_BATCH
    if workload == "A":  # without workers, what are views of a mapped file has to be read
        litdata_list = list if workers else copied_list
        collate = litdata_list if tool == "litdata" else as_torch_list
    else:
        collate = loader_peers_reads._joined if tool == "litdata" else loader_peers_reads._joined_samples
    if tool == "litdata":
        from litdata.streaming import downloader

        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # otherwise it reads from https:// only
        options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
        more = {"batch_decode": "all"} if workload == "B" else {}
        more |= {"max_cache_size": cache_bytes} if cache_bytes else {}
        rows = loader._lib.StreamingDataset(
            url, cache_dir=str(cache), shuffle=True, seed=1, item_shuffle_window="full", storage_options=options, **more
        )
        make = loader._lib.StreamingDataLoader
    else:
        rows = loader._base.StreamingDataset(
            remote=url,
            local=str(cache),
            batch_size=batch_size,
            shuffle=True,
            shuffle_algo=loader.algorithm,
            shuffle_seed=1,
            cache_limit=cache_bytes,
        )
        make = loader._base.StreamingDataLoader
    return lambda: make(rows, batch_size=batch_size, num_workers=workers, collate_fn=collate)


def peer_of(tool: str, workload: str) -> Any:
    module = loader_peers_traces if workload == "A" else loader_peers_reads
    return {"mosaic-py1e": module.Mosaic, "mosaic-naive": module.MosaicNaive, "litdata": module.LitData}[tool]()


def epoch(path: str, workload: str) -> float:
    """Seconds of one epoch in exact order."""
    start = time.perf_counter()
    features = ms.features.fields(*SCHEMA, "label") if workload == "A" else ms.features.fields("sequence")
    rows = ms.open(path)
    loader = ms.Loader(
        rows,
        batch_size=TRACE_BATCH if workload == "A" else READ_BATCH,
        features=features,
        seed=1,
        order="exact",
        notify=lambda _: None,
    )
    assert sum(len(batch["numbers"]) for batch in loader) == len(rows)
    return time.perf_counter() - start


def clock_epoch(batches: Callable[[], Iterable[Any]]) -> float:
    start = time.perf_counter()
    for _ in batches():
        pass
    return time.perf_counter() - start


def cpu_seconds() -> float:
    """Of this process and of its workers that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Requests and bytes that the server answers."""
    counts_of(os.environ["AWS_ENDPOINT_URL"])
    found: dict[str, int] = {}
    yield found
    found |= counts_of(os.environ["AWS_ENDPOINT_URL"])


@contextmanager
def cache_in(folder: Path, size: str = "20GB", *, is_empty: bool = True) -> Iterator[None]:
    """A block cache of this size."""
    if is_empty:
        shutil.rmtree(folder / "cache", ignore_errors=True)
    os.environ |= {"MILLSTREAM_CACHE": size, "MILLSTREAM_CACHE_DIR": str(folder / "cache")}
    yield


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


MEASURES: dict[str, Callable[..., Result]] = {
    "millstream": measure_millstream,
    "layer": measure_layer,
    "first": measure_first,
    "memory": measure_memory,
    "write": measure_write,
    "write-layer": measure_write_layer,
    "write-first": measure_write_first,
    "peer": measure_peer,
}

if __name__ == "__main__":
    named = sys.argv[1:] and sys.argv[1] in MEASURES
    sys.exit(run(MEASURES, sys.argv[1], sys.argv[2:]) if named else main())
