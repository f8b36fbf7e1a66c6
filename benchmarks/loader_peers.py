"""One loader of the benchmark at a time: write a dataset with it, or read an epoch, each in its own process.

    python benchmarks/loader_peers.py write PEER A|B FOLDER [--count N]
    python benchmarks/loader_peers.py read PEER A|B FOLDER --workers N [--epochs 1] [--check] [--limit-s S] ...
    python benchmarks/loader_peers.py limits A|B FOLDER [--count N]
    python benchmarks/loader_peers.py peers

A: traces of 2.7 MB, 600, batches of 16. B: reads of 150 bases, 2 M, batches of 4096. One line of JSON on stdout, all
other output on stderr. For a peer that is not installed: {"peer": ..., "absent": reason}.
"""

import argparse
import contextlib
import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

import loader_data
import millstream as ms
from loader_peers_reads import READ_PEERS
from loader_peers_traces import TRACE_PEERS, Peer
from measuring import Result, clock, drop_cache, peak_pss, read_file, rounded, tree_pss
from millstream.reads.files.index import IndexSettings
from millstream.reads.kind import HEADERS
from millstream.reads.pack.pack import pack

COUNTS = {"A": 600, "B": 2_000_000}
BATCHES = {"A": 16, "B": 4096}
SETTINGS = "loader_peers.json"  # next to the data: what was written
DATA = "data"


# millstream, as a peer. Without workers it is `ms.Loader` with its default threads, with workers the stock DataLoader
# over `collection.stream`.


class Millstream:
    """A trace store; all checksums are verified."""

    name, shuffle, version = "millstream", "exact", ms.__version__
    note = "checksums verified; 0 workers: ms.Loader; 2: DataLoader over collection.stream"

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        with ms.TraceWriter(folder / "store", shard_bytes="64MB", schema=loader_data.SCHEMA) as writer:
            for record in loader_data.traces(count, seed):
                writer.append(record)

    @staticmethod
    def opened(folder: Path) -> tuple[Any, Any]:
        return ms.open(folder / "store"), ms.features.fields("question_id", *loader_data.TENSORS, "label", pad=False)

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[list[loader_data.Record]]:
        return map(_records, _batches(Millstream, folder, workers, batch_size, seed))


class MillstreamReads:
    """A FASTA file and its index."""

    name, shuffle, version = "millstream", "exact", ms.__version__
    note = "straight from FASTA; 0 workers: ms.Loader; 2: DataLoader over collection.stream"
    file = "reads.fa"

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        loader_data.write_fasta(folder / "reads.fa", count, seed)
        ms.open(folder / "reads.fa", header_regex=HEADERS)

    @classmethod
    def opened(cls, folder: Path) -> tuple[Any, Any]:
        return ms.open(folder / cls.file), ms.features.fields("sequence", "class_id")

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[tuple[Any, Any]]:
        for batch in _batches(type(self), folder, workers, batch_size, seed):
            yield batch["sequence"], batch["class_id"]


class MillstreamPack(MillstreamReads):
    name, note, file = "millstream-pack", "2 bits per base", "reads.pack"

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        super().write(folder, count=count, seed=seed)
        pack([folder / "reads.fa"], folder / self.file, settings=IndexSettings(header_regex=HEADERS))
        (folder / "reads.fa").unlink()


@lru_cache
def _loader(kind: type, folder: Path, batch_size: int) -> ms.Loader:
    """One loader for all epochs, as in training: it reuses its memory."""
    collection, feature = kind.opened(folder)
    return ms.Loader(collection, batch_size=batch_size, features=feature, seed=0, order="exact")


def _batches(kind: type, folder: Path, workers: int, batch_size: int, seed: int) -> Iterator[Result]:
    if not workers:
        loader = _loader(kind, folder, batch_size)
        loader.set_epoch(seed)
        return iter(loader)
    collection, feature = kind.opened(folder)
    stream = collection.stream(feature, batch_size=batch_size, seed=seed, order="exact")
    return iter(DataLoader(stream, batch_size=None, num_workers=workers))


def _records(batch: Result) -> list[loader_data.Record]:
    columns = [batch[name] for name in loader_data.TENSORS]
    names, labels = batch["question_id"], batch["label"].tolist()
    return [
        dict(zip(("question_id", *loader_data.TENSORS, "label"), row, strict=True))
        for row in zip(names, *columns, labels, strict=True)
    ]


PEERS: dict[str, dict[str, Callable[[], Peer]]] = {
    "A": {"millstream": Millstream, **TRACE_PEERS},
    "B": {"millstream": MillstreamReads, "millstream-pack": MillstreamPack, **READ_PEERS},
}


def write(name: str, workload: str, folder: Path, *, count: int, seed: int) -> Result:
    """`seconds` includes generating the records (`make_s`); in B the peak includes the arrays of all reads."""
    peer = PEERS[workload][name]()
    shutil.rmtree(folder / DATA, ignore_errors=True)
    (folder / DATA).mkdir(parents=True)
    make_s = clock(lambda: make(workload, count, seed))
    base, _ = tree_pss()
    with peak_pss() as memory:
        seconds = clock(lambda: peer.write(folder / DATA, count=count, seed=seed))
    (folder / SETTINGS).write_text(json.dumps({"peer": name, "workload": workload, "count": count, "seed": seed}))
    files = [file for file in (folder / DATA).rglob("*") if file.is_file()]
    return {
        **_about(peer, workload),
        "seconds": seconds,
        "make_s": make_s,
        "records": count,
        "disk_bytes": sum(file.stat().st_size for file in files),
        "files": len(files),
        "base_pss_bytes": base,
        "peak_pss_bytes": memory.peak_bytes,
    }


def read(
    name: str,
    workload: str,
    folder: Path,
    *,
    workers: int,
    epochs: int,
    check: bool,
    memory: bool,
    limit_s: float,
    batch: int,
) -> Result:
    """The median epoch of `epochs`; each opens the data again, in this process.

    open_s, first_batch_s and seconds are consecutive: opening, time to the first batch, the rest of the epoch.
    records_per_s is the rate of the rest, epoch_records_per_s that of the whole epoch.
    """
    peer = PEERS[workload][name]()
    settings = json.loads((folder / SETTINGS).read_text())
    if (_family(settings["peer"]), settings["workload"]) != (_family(name), workload):
        raise ValueError(
            f"{folder}: contains {settings}; write it with: loader_peers.py write {name} {workload} {folder}"
        )
    gc.collect()
    base, _ = tree_pss()
    runs = []
    with peak_pss() if memory else contextlib.nullcontext() as peak:
        for epoch in range(epochs):
            runs.append(_epoch(peer, folder / DATA, workload, workers, batch, epoch + 1, limit_s))
            gc.collect()
    run = sorted(runs, key=lambda run: run["first_batch_s"] + run["seconds"])[len(runs) // 2]
    result = {**_about(peer, workload), "workers": workers, "batch_size": batch, **run, "base_pss_bytes": base}
    if peak:
        result |= {"peak_pss_bytes": peak.peak_bytes, "peak_pss_file_bytes": peak.peak_file_bytes}
    if epochs > 1:
        result["epochs_s"] = [run["first_batch_s"] + run["seconds"] for run in runs]
    if check and peer.shuffle != "none":
        batches = peer.batches(folder / DATA, workers=workers, batch_size=batch, seed=1)
        result |= CHECKS[workload](batches, settings["count"], settings["seed"])
    return result


def _epoch(peer: Peer, folder: Path, workload: str, workers: int, batch_size: int, seed: int, limit_s: float) -> Result:
    size_of = SIZES[workload]
    start = time.perf_counter()
    source = peer.batches(folder, workers=workers, batch_size=batch_size, seed=seed)
    opened = time.perf_counter()
    stopped = False
    batches = iter(source)
    first_records, first_bytes = size_of(next(batches))
    first = time.perf_counter()
    num_records = num_bytes = 0
    for batch in batches:
        more_records, more_bytes = size_of(batch)
        num_records += more_records
        num_bytes += more_bytes
        if stopped := time.perf_counter() - first > limit_s:
            break
    seconds = time.perf_counter() - first
    getattr(batches, "close", lambda: None)()  # grain needs it; torch's loaders end with their last reference
    return {
        "open_s": opened - start,
        "first_batch_s": first - opened,
        "seconds": seconds,
        "records": first_records + num_records,
        "bytes": first_bytes + num_bytes,
        "records_per_s": num_records / seconds,
        "bytes_per_s": num_bytes / seconds,
        "epoch_records_per_s": (first_records + num_records) / (first - opened + seconds),
        **({"stopped_after_s": limit_s} if stopped else {}),
    }


def _trace_size(batch: Any) -> tuple[int, int]:
    return len(batch), sum(map(loader_data.trace_bytes, batch))


def _read_size(batch: Any) -> tuple[int, int]:
    bases, labels = batch
    return len(bases), bases.nbytes + labels.nbytes


def check_traces(batches: Any, count: int, seed: int) -> Result:
    """Every record exactly once, and bit-identical to what was written."""
    seen = np.zeros(count, np.int64)
    order: list[int] = []
    wrong = 0
    for batch in batches:
        for record in batch:
            number = int(record["question_id"][1:])
            order.append(number)
            seen[number] += 1
            wrong += not loader_data.same_trace(record, loader_data.trace(number, seed))
    return _checked(seen, order, wrong)


def check_reads(batches: Any, count: int, seed: int) -> Result:
    all_bases, all_labels = loader_data.reads(count, seed)
    seen = np.zeros(count, np.int64)
    order: list[int] = []
    wrong = 0
    for batch in batches:
        bases, labels = (np.asarray(part) for part in batch)
        assert (bases.dtype, bases.shape[1:]) == (np.uint8, (loader_data.BASES,)), "not uint8 [B, 150]"
        numbers = loader_data.read_numbers(bases)
        order += numbers.tolist()
        np.add.at(seen, numbers, 1)
        wrong += int((bases != all_bases[numbers]).any(1).sum() + (labels != all_labels[numbers]).sum())
    return _checked(seen, order, wrong)


def _checked(seen: np.ndarray, order: list[int], wrong: int) -> Result:
    """Neighbours are records that directly follow their predecessor on disk: about 1 in an exact shuffle."""
    neighbours = int((np.diff(order) == 1).sum())
    return {
        "complete": bool((seen == 1).all() and not wrong),
        "missing": int((seen == 0).sum()),
        "repeated": int((seen > 1).sum()),
        "wrong": wrong,
        "neighbours": neighbours,
    }


def limits(workload: str, folder: Path, *, count: int, seed: int) -> Result:
    """memcpy, read(2) and pread of the same bytes in one file, by record (A) or batch of reads (B).

    `memcpy` copies into one record's memory, which stays in the cache; `memcpy_batches` into that of three batches.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "plain"
    sizes = []
    with file.open("wb") as out:
        for part in _parts(workload, count, seed):
            sizes.append(out.write(part))
    total, most = sum(sizes), max(sizes)
    source = np.ones(max(most, min(total, 1 << 28)), np.uint8)  # larger than the CPU caches
    target = np.zeros(most, np.uint8)
    view = memoryview(target)
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    order = np.random.default_rng(seed).permutation(len(sizes)).tolist()

    def copy() -> None:
        for start, size in zip(starts, sizes, strict=True):
            start %= source.size - most + 1
            target[:size] = source[start : start + size]

    per_batch = BATCHES["A"] if workload == "A" else 1
    batches = np.zeros((3, per_batch * most), np.uint8)

    def copy_batches() -> None:
        for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            start %= source.size - most + 1
            at = number % per_batch * most
            batches[number // per_batch % 3, at : at + size] = source[start : start + size]

    def sequential() -> None:
        read_file(file)

    fd = os.open(file, os.O_RDONLY)

    def scattered() -> None:
        for i in order:
            assert os.preadv(fd, [view[: sizes[i]]], starts[i]) == sizes[i]

    rates = {}
    for name, action in (
        ("memcpy", copy),
        ("memcpy_batches", copy_batches),
        ("read_warm", sequential),
        ("pread_warm", scattered),
    ):
        action()
        rates[f"{name}_bytes_per_s"] = total / median(clock(action) for _ in range(3))
    for name, action in (("read_cold", sequential), ("pread_cold", scattered)):
        drop_cache(file)
        rates[f"{name}_bytes_per_s"] = total / clock(action)
    os.close(fd)
    file.unlink()
    return {"peer": "limits", "workload": workload, "bytes": total, "parts": len(sizes), **rates}


def _parts(workload: str, count: int, seed: int) -> Iterator[bytes]:
    if workload == "A":
        for record in loader_data.traces(count, seed):
            yield b"".join(record[f].tobytes() for f in loader_data.TENSORS)
    else:
        rows = loader_data.packed(*loader_data.reads(count, seed))
        for start in range(0, count, BATCHES["B"]):
            yield rows[start : start + BATCHES["B"]].tobytes()


def make(workload: str, count: int, seed: int) -> None:
    """Generate the records, as every writer does."""
    if workload == "A":
        for _ in loader_data.traces(count, seed):
            pass
    else:
        loader_data.reads(count, seed)


def _family(name: str) -> str:
    """mosaic-py1e and mosaic-naive read the same files."""
    return name.partition("-")[0] if name.startswith("mosaic") else name


def _about(peer: Peer, workload: str) -> Result:
    about = {"peer": peer.name, "version": peer.version, "workload": workload, "shuffle": peer.shuffle}
    return about | {"note": peer.note}


SIZES = {"A": _trace_size, "B": _read_size}
CHECKS = {"A": check_traces, "B": check_reads}


def run(arguments: argparse.Namespace) -> Result:
    options = vars(arguments).copy()
    command, workload = options.pop("command"), options.get("workload")
    if command == "peers":
        return {name: "".join(w for w in PEERS if name in PEERS[w]) for peers in PEERS.values() for name in peers}
    if command == "limits":
        return limits(workload, arguments.folder, count=arguments.count or COUNTS[workload], seed=arguments.seed)
    name = arguments.peer
    about = {"peer": name, "workload": workload}
    if name not in PEERS[workload]:
        return about | {"absent": f"unknown peer; must be one of: {', '.join(PEERS[workload])}"}
    try:
        if command == "write":
            count = arguments.count or COUNTS[workload]
            return write(name, workload, arguments.folder, count=count, seed=arguments.seed)
        return read(
            name,
            workload,
            arguments.folder,
            workers=arguments.workers,
            epochs=arguments.epochs,
            check=arguments.check,
            memory=not arguments.no_memory,
            limit_s=arguments.limit_s,
            batch=arguments.batch_size or BATCHES[workload],
        )
    except Exception as error:  # a missing or failing peer must not stop the others
        if not isinstance(error, ImportError):
            import traceback

            traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        return about | {"absent": f"{type(error).__name__}: {lines[0]}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("peers")
    for command in ("write", "read", "limits"):
        sub = commands.add_parser(command)
        if command != "limits":
            sub.add_argument("peer")
        sub.add_argument("workload", choices=("A", "B"))
        sub.add_argument("folder", type=Path)
        if command != "read":
            sub.add_argument("--count", type=int)
            sub.add_argument("--seed", type=int, default=0)
        else:
            sub.add_argument("--workers", type=int, default=0)
            sub.add_argument("--epochs", type=int, default=1)
            sub.add_argument("--batch-size", type=int)
            sub.add_argument("--check", action="store_true")
            sub.add_argument(
                "--no-memory", action="store_true", help="do not sample memory, which takes a tenth of a core"
            )
            sub.add_argument(
                "--limit-s", type=float, default=float("inf"), help="stop an epoch after this many seconds"
            )
    arguments = parser.parse_args()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # progress bars and messages of the libraries and their processes
    with contextlib.redirect_stdout(sys.stderr):
        result = run(arguments)
    print(json.dumps(rounded(result)), file=output, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
