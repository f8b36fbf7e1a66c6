"""The trace store against its peers and the limits of the machine, in one run.

    python benchmarks/store.py            # 500 records of 4 MB; prints tables, writes benchmarks/results/store.json

Every format is measured in its own process. The machine is noisy, so each number is reported with the limit measured in
the same process, seconds apart: write(2), memcpy and read(2) of the same bytes. Compare ratios, not MB/s.
"""

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from measuring import Result, clock, drop_cache, memory_bytes, read_file, reset_peak, save
from store_data import TENSORS, D, L, Record, record_bytes, records
from store_peers import PEERS

WARM_S = 15.0  # a peer that takes longer is measured on fewer records


class Millstream:
    """The store under test, with the peers' interface."""

    name = "millstream"
    note = "all checksums verified (CRC-32C)"
    verify = "always"

    def write(self, source: Any, path: Path) -> None:
        import millstream as ms

        with ms.TraceWriter(path, shard_bytes="100GB", schema={"hidden": "float16[layer, token, dim]"}) as writer:
            writer.extend(source)

    def open(self, path: Path) -> None:
        import millstream as ms

        self._traces = ms.open(path, verify=self.verify)

    def read(self, i: int) -> Record:
        return self._traces[i]

    def take(self, i: int, out: np.ndarray) -> None:
        """The record copied to memory: `fetch` copies and verifies slice by slice, within the CPU cache."""
        del out
        self._traces.fetch([i])

    def layer(self, i: int, layer: int) -> np.ndarray:
        return self._traces.fetch([i], fields=["hidden"], layers=layer)["hidden"][0]


class MillstreamViews(Millstream):
    name = "millstream, traces[i]"
    note = "verified views of the mapped file, then copied: the bytes cross the memory bus twice"
    take = None


class MillstreamUnchecked(MillstreamViews):
    name = "millstream, verify=never"
    note = "views without verification, like the peers"
    verify = "never"


FORMATS: dict[str, Callable[[], Any]] = {
    Millstream.name: Millstream,
    MillstreamViews.name: MillstreamViews,
    MillstreamUnchecked.name: MillstreamUnchecked,
    **PEERS,
}


def copy_out(record: Record, out: np.ndarray) -> None:
    """Copy the bytes of a record, as any use does: an untouched view has not been read."""
    for name in TENSORS:
        flat = np.asarray(record[name]).reshape(-1).view(np.uint8)
        out[: flat.size] = flat


def plain_write(source: list[Record], file: Path) -> float:
    """Seconds of write(2) for the same bytes, without fsync."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    seconds = clock(lambda: [os.write(fd, record[name].data) for record in source for name in TENSORS])
    os.close(fd)
    file.unlink()
    return seconds


def measure_append(folder: Path, num: int, repeats: int) -> Result:
    """Append against write(2), interleaved; sealing (footer, sidecar, fsync) is timed separately."""
    import millstream as ms

    source = list(records(num))
    total = sum(map(record_bytes, source))
    ratios, appends, seals, plains, synced = [], [], [], [], []
    for turn in range(repeats):
        os.sync()
        plain = plain_write(source, folder / "plain")
        os.sync()
        writer = ms.TraceWriter(folder / "turn", shard_bytes="100GB", schema={"hidden": "float16[layer, token, dim]"})
        append = clock(lambda: writer.extend(source))  # noqa: B023
        seal = clock(writer.close)
        shutil.rmtree(folder / "turn")
        os.sync()
        if turn:  # the first turn warms up
            ratios.append(plain / append)
            appends.append(total / append / 1e6)
            plains.append(total / plain / 1e6)
            seals.append(seal)
            synced.append(total / (append + seal) / 1e6)
    return {
        "append_mb_s": round(median(appends)),
        "write2_mb_s": round(median(plains)),
        "append_over_write2": round(median(ratios), 3),
        "append_over_write2_all": [round(ratio, 2) for ratio in ratios],
        "seal_s": round(median(seals), 3),
        "append_and_seal_mb_s": round(median(synced)),
    }


def measure_memory(folder: Path, name: str, num: int) -> Result:
    """Peak memory of writing above that of only generating the same records, in records."""
    peer = FORMATS[name]()
    peer.write(records(2), folder / "warm")  # one-time code and buffers
    peaks = []
    for work in (lambda: [None for _ in records(num)], lambda: peer.write(records(num), folder / "memory")):
        gc.collect()
        reset_peak()
        work()
        peaks.append(memory_bytes("VmHWM"))
    mean = sum(map(record_bytes, records(20))) / 20
    return {"writer_records_over_start": round((peaks[1] - peaks[0]) / mean, 2)}


def measure_format(folder: Path, name: str, num: int) -> Result:
    """Write, then read: warm whole records, warm and cold layers, open."""
    peer = FORMATS[name]()
    path = folder / "data"
    source = list(records(num))
    total = sum(map(record_bytes, source))
    result: Result = {"note": peer.note}
    result["write_mb_s"] = round(total / clock(lambda: peer.write(source, path)) / 1e6)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    result["bytes_on_disk_ratio"] = round(size / total, 3)

    # memcpy of the same bytes out of memory, and read(2) out of the page cache
    order = np.random.default_rng(1).permutation(num).tolist()
    out = np.zeros(max(record[name].nbytes for record in source for name in TENSORS), np.uint8)
    tensor_bytes = sum(source[i][name].nbytes for i in order for name in TENSORS)

    def memcpy() -> float:
        return clock(lambda: [copy_out(source[i], out) for i in order])

    peer.open(path)
    copy_out(peer.read(0), out)
    ratios, speeds, copies = [], [], []
    for turn in range(4):
        limit = memcpy()
        start, done = time.perf_counter(), 0
        read_bytes = 0
        for i in order:
            if getattr(peer, "take", None):
                peer.take(i, out)
            else:
                copy_out(peer.read(i), out)
            read_bytes += sum(source[i][name].nbytes for name in TENSORS)
            done += 1
            if time.perf_counter() - start > WARM_S:
                break
        seconds = time.perf_counter() - start
        if turn or seconds > WARM_S:
            speeds.append(read_bytes / seconds / 1e6)
            copies.append(tensor_bytes / limit / 1e6)
            ratios.append(speeds[-1] / copies[-1])
        if seconds > WARM_S:
            break
    result |= {
        "record_mb_s": round(median(speeds)),
        "memcpy_mb_s": round(median(copies)),
        "record_over_memcpy": round(median(ratios), 3),
        "records_measured": done,
    }
    result["layer_warm_us"] = round(_layers(peer, order, num)[0], 1)

    del peer
    gc.collect()
    opens = []
    for _ in range(7):
        peer = FORMATS[name]()
        opens.append(clock(lambda: (peer.open(path), peer.layer(0, 0))))  # noqa: B023
    result["open_and_first_layer_ms"] = round(median(opens) * 1000, 2)
    del peer
    gc.collect()

    wanted = [source[i]["hidden"][L // 2].nbytes for i in order]
    source.clear()
    gc.collect()
    drop_cache(path)
    peer = FORMATS[name]()
    peer.open(path)
    before = _read_bytes()
    micros, done = _layers(peer, order, num)
    result["layer_cold_us"] = round(micros, 1)
    result["layer_cold_bytes_read_over_wanted"] = round((_read_bytes() - before) / sum(wanted[:done]), 2)
    return result


def measure_read2(folder: Path, num: int) -> Result:
    """read(2) of the same bytes, from the page cache and from disk."""
    file = folder / "plain"
    source = list(records(num))
    with open(file, "wb") as f:
        for record in source:
            for name in TENSORS:
                f.write(record[name].data)
    size = file.stat().st_size
    warm = median(clock(lambda: read_file(file)) for _ in range(3))
    drop_cache(folder)
    cold = clock(lambda: read_file(file))
    return {"read2_warm_mb_s": round(size / warm / 1e6), "read2_cold_mb_s": round(size / cold / 1e6)}


def measure_many(folder: Path, num_shards: int) -> Result:
    """A store of many shards: the cost of `open` and `by_id`. All shards are hard links to one file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    import millstream as ms
    from millstream.core.record import crc32c
    from millstream.traces.store.ids import update_ids
    from millstream.traces.store.manifest import ShardInfo, read_manifest, shard_name, sidecar_name, write_manifest

    path = folder / "many"
    with ms.TraceWriter(path) as writer:
        for i in range(500):
            writer.append({"question_id": f"q{i}", "question": "who?", "hidden": np.zeros((2, 8, 16), np.float16)})
    manifest = read_manifest(path)
    table = pq.read_table(path / sidecar_name(0))
    column = table.column_names.index("question_id")
    shards: list[ShardInfo] = []
    for number in range(num_shards):
        ids = pa.array([f"q{number * 500 + row}" for row in range(500)])
        sink = pa.BufferOutputStream()
        pq.write_table(table.set_column(column, "question_id", ids), sink, compression="zstd")
        data = sink.getvalue().to_pybytes()
        (path / sidecar_name(number)).write_bytes(data)
        if number:
            os.link(path / shard_name(0), path / shard_name(number))
        shards.append(ShardInfo(number, 500, manifest.shards[0].bytes, 1.0, crc32c(data)))
    manifest = type(manifest)(manifest.config, manifest.compression, manifest.arrow_schema, tuple(shards))
    write_manifest(path, manifest)
    build = clock(lambda: update_ids(path, manifest))
    code = (
        "import json, sys, time, millstream as ms\n"
        "import millstream.traces.store.traces, pyarrow.parquet\n"
        "rss = lambda: int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "ms.open(sys.argv[2])[0]\n"  # one-time costs
        "start, t = rss(), time.perf_counter()\n"
        "traces = ms.open(sys.argv[1])\n"
        "opened, memory = time.perf_counter() - t, rss() - start\n"
        "t = time.perf_counter()\n"
        "record = traces.by_id('q%d' % (len(traces) - 7))\n"
        "first = time.perf_counter() - t\n"
        "t = time.perf_counter()\n"
        "for i in range(100): traces.by_id('q%d' % (i * 7919 % len(traces)))\n"
        "print(json.dumps({'records': len(traces), 'open_ms': round(opened * 1e3, 1),\n"
        "  'open_mb': round(memory / 1e6, 1), 'first_by_id_ms': round(first * 1e3, 1),\n"
        "  'next_by_id_ms': round((time.perf_counter() - t) * 10, 2), 'all_mb': round((rss() - start) / 1e6, 1)}))\n"
    )
    small = folder / "small"
    with ms.TraceWriter(small) as writer:
        writer.append({"question_id": "q", "hidden": np.zeros((2, 8, 16), np.float16)})
    done = subprocess.run([sys.executable, "-c", code, path, small], capture_output=True, text=True, check=True)
    return {"shards": num_shards, "id_index_built_s": round(build, 1), **json.loads(done.stdout)}


def measure_start(folder: Path) -> Result:
    """The time of `millstream --help`."""
    command = [str(Path(sys.executable).with_name("millstream")), "--help"]
    times = [clock(lambda: subprocess.run(command, capture_output=True, check=True)) for _ in range(7)]
    return {"help_s": round(median(times), 3)}


MEASURES: dict[str, Callable[..., Result]] = {
    "append": measure_append,
    "memory": measure_memory,
    "format": measure_format,
    "read2": measure_read2,
    "many": measure_many,
    "start": measure_start,
}


def _layers(peer: Any, order: list[int], num: int) -> tuple[float, int]:
    """Microseconds to read (and touch) one layer of one record, and the number of layers read."""
    out = np.empty(4 << 20, np.uint8)
    start, done = time.perf_counter(), 0
    for i in order[:num]:
        flat = np.asarray(peer.layer(i, L // 2)).reshape(-1).view(np.uint8)
        assert flat.size % (2 * D) == 0
        out[: flat.size] = flat
        done += 1
        if time.perf_counter() - start > WARM_S:
            break
    return (time.perf_counter() - start) / done * 1e6, done


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def in_process(what: str, *arguments: object) -> Result:
    """Run one measurement of this file in a new process and a new folder."""
    base = os.environ.get("MILLSTREAM_BENCH_DIR")
    with tempfile.TemporaryDirectory(prefix="millstream-bench-", dir=base) as folder:
        command = [sys.executable, __file__, "--measure", what, "--folder", folder, *map(str, arguments)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"error": f"exit {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def table(title: str, rows: dict[str, Result], columns: list[str]) -> None:
    print(f"\n{title}")
    width = max(map(len, rows))
    print(" " * width, *(f"{column:>18}" for column in columns))
    for name, row in rows.items():
        cells = [str(row.get(column, row.get("error", ""))) for column in columns]
        print(
            f"{name:<{width}}",
            *(f"{cell:>{max(18, len(column))}}" for cell, column in zip(cells, columns, strict=True)),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=500)
    parser.add_argument("--shards", type=int, default=10_000, help="number of shards of the large store")
    parser.add_argument("--only", nargs="*", help="measure only these formats")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.measure:
        arguments = [int(word) if word.isdigit() else word for word in rest]
        print(json.dumps(MEASURES[options.measure](options.folder, *arguments)))
        return

    num = options.records
    names = options.only or list(FORMATS)
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    result: Result = {"records": num, "python": sys.version.split()[0]}
    say("start-up, append against write(2), read(2)")
    result["start"] = in_process("start")
    result["append"] = in_process("append", num, 6)
    result["read2"] = in_process("read2", num)
    result["formats"] = {}
    for name in names:
        say(name)
        result["formats"][name] = in_process("memory", name, 120) | in_process("format", name, num)
    say(f"{options.shards} shards")
    result["many"] = in_process("many", options.shards)

    ours = result["formats"].get(Millstream.name, {})
    for row in result["formats"].values():
        if "layer_warm_us" in row and "layer_warm_us" in ours:
            row["layer_warm_times_ours"] = round(row["layer_warm_us"] / ours["layer_warm_us"], 1)
            row["layer_cold_times_ours"] = round(row["layer_cold_us"] / ours["layer_cold_us"], 1)
    file = save("store", result)

    for part in ("start", "append", "read2", "many"):
        print(f"{part}: " + ", ".join(f"{key} {value}" for key, value in result[part].items()))
    formats = result["formats"]
    table(
        "Writing, and whole records in random order from the page cache",
        formats,
        ["write_mb_s", "writer_records_over_start", "record_mb_s", "memcpy_mb_s", "record_over_memcpy"],
    )
    table("One layer of one field", formats, ["layer_warm_us", "layer_cold_us", "layer_cold_bytes_read_over_wanted"])
    table(
        "One layer, times millstream; opening",
        formats,
        ["layer_warm_times_ours", "layer_cold_times_ours", "open_and_first_layer_ms"],
    )
    print()
    for name, row in formats.items():
        print(f"{name}: {row.get('note', row.get('error'))}")
    print(f"\n{file}")


if __name__ == "__main__":
    main()
