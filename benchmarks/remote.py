"""Reading from an object store against MDS and litdata: same records, same server (s3rver on loopback), one run.

    python benchmarks/remote.py                          # about 10 minutes; benchmarks/results/remote.json
    python benchmarks/remote.py traces=40 reads=100000   # small and quick
    python benchmarks/remote.py only=cold,layer          # parts: cold, layer, pack, first, memory

cold: an epoch over traces of 2.7 MB in batches of 16, with an empty cache; then again with a warm one, and over local
files. layer: an epoch over one layer of 32, in bytes. pack: an epoch over reads of 150 bases. first: the first batch of
a store of 500 shards. memory: what the loader holds, and what the block cache takes, against their limits. Every
measurement is a process of its own, with the better of 0 and 2 workers for the peers. Compare ratios.
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
from typing import Any

import numpy as np

import millstream as ms
from loader_data import SCHEMA, traces, write_fasta
from measuring import Result, measure, peak_pss, run, save
from millstream.core.bucket import ObjectBucket
from millstream.core.remote import to_path
from millstream.reads.pack import PackFile  # noqa: F401  (fails early without the extra)
from s3rver import BUCKET, environment_of, s3rver

TRACE_BATCH, READ_BATCH = 16, 4096
LAYERS, TOKENS, DIM = 32, 64, 1024
SHARDS = 500
PEERS = ("mosaic-py1e", "mosaic-naive", "litdata")
PARTS = ("cold", "layer", "pack", "first", "memory")


def main() -> int:
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    counts = {"A": int(options.get("traces", 300)), "B": int(options.get("reads", 1_000_000))}
    only = options.get("only", ",".join(PARTS)).split(",")
    result: Result = {"counts": counts}
    with tempfile.TemporaryDirectory(dir=options.get("dir"), prefix="millstream-remote-") as place:
        folder = Path(place)
        with s3rver(folder / "server") as address:
            os.environ.update(environment_of(address) | {"S3_ENDPOINT_URL": address})
            for part in PARTS:
                if part in only:
                    result[part] = globals()[f"{part}_part"](folder, counts)
    print(f"\n{save('remote', result)}")
    return 0


# -- parts


def cold_part(folder: Path, counts: dict[str, int]) -> Result:
    found = {"millstream": ours("A", folder, counts["A"])}
    print(f"\ncold: epoch over {counts['A']} traces of 2.7 MB, batches of {TRACE_BATCH}")
    found |= {name: peer(name, "A", folder, counts["A"]) for name in PEERS}
    return compared(found, "cold")


def pack_part(folder: Path, counts: dict[str, int]) -> Result:
    found = {"millstream": ours("B", folder, counts["B"])}
    print(f"\npack: epoch over {counts['B']:,} reads of 150 bases, batches of {READ_BATCH}")
    found |= {name: peer(name, "B", folder, counts["B"]) for name in PEERS[1:]}
    return compared(found, "pack")


def compared(found: Result, part: str) -> Result:
    """Print a line per loader, and how many times as long it takes."""
    mine = found["millstream"]
    if "cold_s" not in mine:
        print(f"  millstream: {mine}")
        return found
    for name, row in found.items():
        if "cold_s" not in row:
            print(f"  {name:14} {row}")
            continue
        line = f"  {name:14} cold {row['cold_s']:7.2f} s ({row['cold_s'] / mine['cold_s']:.2f}x), fetched "
        line += f"{row['fetched_bytes'] / 1e6:.0f} MB, second epoch {row['warm_s']:.2f} s"
        more = f", local files {row['local_s']:.2f} s, {row['requests']} requests" if name == "millstream" else ""
        print(line + more, flush=True)
    rest = [row["cold_s"] for name, row in found.items() if name != "millstream" and "cold_s" in row]
    found["ratios"] = {
        "best_peer_to_ours": min(rest, default=0) / mine["cold_s"],
        "warm_to_local": mine["warm_s"] / mine["local_s"],
    }
    print(f"  {part}: {found['ratios']}")
    return found


def layer_part(folder: Path, counts: dict[str, int]) -> Result:
    count = max(counts["A"] // 3, 8)
    found = measure(__file__, "layer", tool="millstream", folder=folder / "layer", count=count)
    wanted = count * TOKENS * DIM * 2
    found |= {"wanted_bytes": wanted, "fetched_per_wanted": found.get("fetched_bytes", 0) / wanted, "of_all": LAYERS}
    print(f"\nlayer: {found}", flush=True)
    return found


def first_part(folder: Path, counts: dict[str, int]) -> Result:
    found = measure(__file__, "first", tool="millstream", folder=folder / "first")
    print(f"\nfirst batch of {SHARDS} shards: {found}", flush=True)
    return found


def memory_part(folder: Path, counts: dict[str, int]) -> Result:
    store = folder / "A-millstream"
    if not store.exists():
        ours("A", folder, counts["A"])
    found = {
        f"memory={memory} cache={cache}": measure(
            __file__, "memory", tool="millstream", folder=folder / "memory", memory=memory, cache=cache
        )
        for memory, cache in (("100MB", "100MB"), ("300MB", "0"))
    }
    for name, row in found.items():
        print(f"\n{name}: {row}", flush=True)
    return found


def ours(workload: str, folder: Path, count: int) -> Result:
    return measure(__file__, "millstream", tool="millstream", workload=workload, folder=folder, count=count)


def peer(name: str, workload: str, folder: Path, count: int) -> Result:
    place = folder / f"{workload}-{name}"
    wrote = measure(__file__, "write", tool=name, workload=workload, folder=place, count=count)
    if "error" in wrote:
        return wrote
    rows = [
        measure(__file__, "peer", tool=name, workload=workload, folder=place, workers=str(workers), timeout_s=300)
        for workers in (0, 2)
    ]
    return min(rows, key=lambda row: row.get("cold_s", 1e9))


# -- measurements, each in a process of its own


def measure_millstream(tool: str, workload: str, folder: Path, count: int) -> Result:
    place, url = folder / f"{workload}-millstream", f"s3://{BUCKET}/{workload}-millstream"
    place.mkdir()
    if workload == "A":
        with ms.TraceWriter(place / "traces", schema=SCHEMA, shard_bytes="64MB") as writer:
            for record in traces(count):
                writer.append(record)
        local, remote = place / "traces", f"{url}/traces"
    else:
        write_fasta(place / "reads.fa", count)
        os.system(f"{sys.executable} -m millstream pack {place}/reads.fa {place}/reads.pack >{os.devnull} 2>&1")
        local, remote = place / "reads.pack", f"{url}/reads.pack"
    upload(place, url)
    epoch(str(local), workload)  # imports and kernels; the server has files of its own
    with counted() as fetched, cache_in(folder):
        cpu_s = time.process_time()
        cold_s, _ = epoch(remote, workload)
        cpu_s = time.process_time() - cpu_s
        requests, num_bytes = len(fetched), sum(fetched)
        warm_s = min(epoch(remote, workload)[0] for _ in range(3))
    local_s = min(epoch(str(local), workload)[0] for _ in range(3))
    return {
        "cold_s": cold_s,
        "warm_s": warm_s,
        "local_s": local_s,
        "cpu_s": cpu_s,
        "requests": requests,
        "requests_per_record": requests / count,
        "fetched_bytes": num_bytes,
    }


def measure_layer(tool: str, folder: Path, count: int) -> Result:
    rng = np.random.default_rng(1)
    with ms.TraceWriter(folder, schema={"hidden": "float16[layer, token, dim]"}, shard_bytes="64MB") as writer:
        for number in range(count):
            hidden = rng.integers(0, 1 << 14, (LAYERS, TOKENS, DIM), np.uint16).view(np.float16)
            writer.append({"question_id": f"q{number}", "hidden": hidden})
    url = upload(folder, f"s3://{BUCKET}/layer")
    features = ms.features.each(lambda record, _: {"layer": record["hidden"]}, fields=["hidden[16]"])
    with counted() as fetched, cache_in(folder):
        start, cpu_s = time.perf_counter(), time.process_time()
        loader = ms.Loader(ms.open(url), batch_size=TRACE_BATCH, features=features, seed=1, notify=lambda _: None)
        number = sum(len(batch["numbers"]) for batch in loader)
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_s
    assert number == count
    return {"seconds": seconds, "cpu_s": cpu_s, "fetched_bytes": sum(fetched), "requests": len(fetched)}


def measure_first(tool: str, folder: Path) -> Result:
    with ms.TraceWriter(folder, shard_records=4) as writer:
        for number in range(4 * SHARDS):
            writer.append({"question_id": f"q{number}", "states": np.full((16, 64), number, np.float16)})
    url = upload(folder, f"s3://{BUCKET}/first")
    ms.open(folder)[0]  # imports
    next(iter(ms.Loader(ms.open(folder), batch_size=8, seed=2, notify=lambda _: None)))
    with counted() as fetched, cache_in(folder):
        start = time.perf_counter()
        batch = next(iter(ms.Loader(ms.open(url), batch_size=8, seed=1, notify=lambda _: None)))
        seconds = time.perf_counter() - start
    assert len(batch["numbers"]) == 8
    return {"first_batch_s": seconds, "requests": len(fetched)}


def measure_memory(tool: str, folder: Path, memory: str, cache: str) -> Result:
    url = f"s3://{BUCKET}/A-millstream/traces"
    folder.mkdir(exist_ok=True)
    most_bytes, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most_bytes
        while not done.wait(0.02):
            files = list((folder / "cache").glob("*/*"))
            most_bytes = max(most_bytes, sum(size_of(path) for path in files))

    with cache_in(folder, cache):
        loader = ms.Loader(ms.open(url), batch_size=8, seed=1, memory=memory, notify=lambda _: None)
        sampler = threading.Thread(target=watch)
        sampler.start()
        with peak_pss() as held:
            before = held.peak_bytes
            held.sample()
            before = held.peak_bytes
            for _ in loader:
                pass
        done.set()
        sampler.join()
    return {"above_start_mb": (held.peak_bytes - before) / 1e6, "cache_mb": most_bytes / 1e6}


def measure_write(tool: str, workload: str, folder: Path, count: int) -> Result:
    start = time.perf_counter()
    folder.mkdir(parents=True)
    peer_of(tool, workload).write(folder, count=count, seed=0)
    seconds = time.perf_counter() - start
    upload(folder, f"s3://{BUCKET}/{folder.name}")
    return {"write_s": seconds}


def measure_peer(tool: str, workload: str, folder: Path, workers: int) -> Result:
    """Two epochs: with an empty cache, then with what the first one left."""
    loader, cache = peer_of(tool, workload), folder / f"cache-{workers}"
    url, batch_size = f"s3://{BUCKET}/{folder.name}", TRACE_BATCH if workload == "A" else READ_BATCH
    start = time.perf_counter()
    batches = remote_batches(loader, tool, workload, url, cache, workers=workers, batch_size=batch_size)
    opened_s = time.perf_counter() - start
    times = [clock_epoch(batches) for _ in range(2)]
    times[0] += opened_s
    return {
        "cold_s": times[0],
        "warm_s": times[1],
        "fetched_bytes": sum(size_of(path) for path in cache.rglob("*")),
        "workers": workers,
    }


def remote_batches(
    loader: Any, tool: str, workload: str, url: str, cache: Path, *, workers: int, batch_size: int
) -> Callable[[], Iterable[Any]]:
    """The peer's own loader over a URL, with the collation of the local benchmark."""
    if tool == "litdata":
        options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
        more = {"batch_decode": "all"} if workload == "B" else {}
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
        )
        make = loader._base.StreamingDataLoader
    return lambda: make(rows, batch_size=batch_size, num_workers=workers, collate_fn=list)


def peer_of(tool: str, workload: str) -> Any:
    import loader_peers_reads
    import loader_peers_traces

    module = loader_peers_traces if workload == "A" else loader_peers_reads
    return {"mosaic-py1e": module.Mosaic, "mosaic-naive": module.MosaicNaive, "litdata": module.LitData}[tool]()


def epoch(path: str, workload: str) -> tuple[float, int]:
    """Seconds and records of one epoch in exact order."""
    start = time.perf_counter()
    features = ms.features.fields(*SCHEMA, "label") if workload == "A" else ms.features.fields("sequence")
    loader = ms.Loader(
        ms.open(path),
        batch_size=TRACE_BATCH if workload == "A" else READ_BATCH,
        features=features,
        seed=1,
        order="exact",
        notify=lambda _: None,
    )
    number = sum(len(batch["numbers"]) for batch in loader)
    return time.perf_counter() - start, number


def clock_epoch(batches: Callable[[], Iterable[Any]]) -> float:
    start = time.perf_counter()
    for _ in batches():
        pass
    return time.perf_counter() - start


def upload(folder: Path, url: str) -> str:
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        to_path(f"{url}/{file.relative_to(folder)}").put(file)  # pyright: ignore
    return url


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of every answer to a GET."""
    sizes: list[int] = []
    real = ObjectBucket.get

    def get(self: ObjectBucket, *arguments: Any) -> Any:
        data, info = real(self, *arguments)
        sizes.append(len(data))
        return data, info

    ObjectBucket.get = get
    try:
        yield sizes
    finally:
        ObjectBucket.get = real


@contextmanager
def cache_in(folder: Path, size: str = "20GB") -> Iterator[None]:
    """An empty block cache."""
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
    "peer": measure_peer,
}

if __name__ == "__main__":
    named = sys.argv[1:] and sys.argv[1] in MEASURES
    sys.exit(run(MEASURES, sys.argv[1], sys.argv[2:]) if named else main())
