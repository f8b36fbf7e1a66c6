"""Measurements of other libraries and programs on the same reads. Knows nothing of millstream.

    python benchmarks/read_peers.py check                                        # everything, on 5 MB, verified
    python benchmarks/read_peers.py index tool=pysam path=reads.fa folder=work  # one measurement, one line of JSON

`measure` runs one of them in a new process, so that its time and memory are its own; `jobs` lists them all.
Files are read once before timing, and the output of a library is compared with the bytes of the file afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import read_data
from measuring import (
    Absent,
    Result,
    Watch,
    clock,
    cpu_seconds,
    measure,
    memory_bytes,
    read_file,
    reset_peak,
    run,
    timed,
)
from read_libraries import READERS, Reader, Wanted, decompressor, slice_of

BATCH_READS = 4096
NUM_READS = 10 * BATCH_READS  # fetched in random order
LIMIT_S = 15  # a library that takes longer is measured on fewer reads
SLOW = ("pyfaidx", "biopython")  # minutes and gigabytes on 13 M reads: indexed and opened on fewer


# Measurements: `measure` runs each in its own process, with the same keywords


def index(*, tool: str, path: Path, folder: Path, num_reads: int | None = None) -> Result:
    """Build the index in `folder`. With `num_reads`, of that many reads; seconds and index_mb are then scaled up."""
    source = read_data.first_reads(folder, path, num_reads) if num_reads else path
    scale = path.stat().st_size / source.stat().st_size
    file = _index_file(tool, source, folder)
    unfinished = file.with_name(f"unfinished-{file.name}")  # an interrupted build must not be taken for an index
    if tool == "samtools":
        command = [_program("samtools"), "faidx", source, "--fai-idx", unfinished]
        read_file(source)
        result = _run(command)
    else:
        reader = READERS[tool]()
        for old in _index_parts(unfinished):
            old.unlink()  # SQLite would continue from it
        result = {"base_mb": ready(source)} | timed(lambda: reader.build(source, unfinished))
    index_mb = sum(part.stat().st_size for part in _index_parts(unfinished)) / 1e6
    for part in _index_parts(unfinished):
        part.replace(folder / part.name.removeprefix("unfinished-"))
    rate = source.stat().st_size / 1e6 / result["seconds"]
    result |= {"rate": rate, "unit": "MB/s", "index_mb": index_mb * scale}
    result |= {key: result[key] * scale for key in ("seconds", "cpu_s")}
    return result | _scaled(scale, num_reads)


def fetch(
    *,
    tool: str,
    path: Path,
    folder: Path,
    plain: Path | None = None,
    num_reads: int | None = None,
    count: int = NUM_READS,
    batch_reads: int = BATCH_READS,
) -> Result:
    """Random reads as Python strings, with the index loaded. `plain` is the decompressed text of `path`."""
    reader = READERS[tool]()
    batches, opened = _open_and_choose(reader, tool, path, folder, plain, num_reads, count, batch_reads)
    source = opened.pop("source")
    with contextlib.closing(reader):
        rates, answer = _timed(batches, reader.read)
    _compare(tool, answer, _bases_of(plain or source, batches[0]))
    return opened | rates


def named(*, tool: str, path: Path, folder: Path, count: int = NUM_READS) -> Result:
    """Random reads by name, one at a time."""
    reader = READERS[tool]()
    batches, opened = _open_and_choose(reader, tool, path, folder, None, None, count, BATCH_READS)
    source = opened.pop("source")
    with contextlib.closing(reader):
        rates, answer = _timed(batches, reader.named)
    _compare(tool, answer, _bases_of(source, batches[0]))
    return opened | rates


def iterate(*, tool: str, path: Path) -> Result:
    """Every read in order, its name and sequence touched."""
    reader = READERS[tool]()
    base_mb = ready(path)
    num_reads = num_bases = 0
    start = time.perf_counter()
    for _, bases in reader.every(path):
        num_reads += 1
        num_bases += len(bases)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "rate": num_reads / seconds, "unit": "reads/s", "base_mb": base_mb,
            "num_reads": num_reads, "num_bases": num_bases}  # fmt: skip


def kmers(
    *, tool: str, path: Path, folder: Path, num_reads: int | None = None, count: int = NUM_READS, k: int = 6
) -> Result:
    """Random reads as padded int64 tokens, in the usual way: one dictionary lookup per k-mer."""
    reader = READERS[tool]()
    batches, opened = _open_and_choose(reader, tool, path, folder, None, num_reads, count, BATCH_READS)
    del opened["source"]
    # 0 pads, 1 is any k-mer with an N
    vocabulary = {"".join(kmer): number for number, kmer in enumerate(itertools.product("ACGT", repeat=k), start=2)}

    def tokenize(batch: Sequence[Wanted]) -> np.ndarray:
        rows = [
            [vocabulary.get(bases[i : i + k], 1) for i in range(len(bases) - k + 1)] for bases in reader.read(batch)
        ]
        return _padded(rows)

    with contextlib.closing(reader):
        rates, answer = _timed(batches, tokenize)
    return opened | rates | {"tokens_of_first_batch": int(np.count_nonzero(answer))}


def regions(*, tool: str, path: Path, folder: Path, count: int = NUM_READS, width: int = 150) -> Result:
    """Random regions of wrapped genomes as Python strings."""
    reader = READERS[tool]()
    file = _built(tool, path, folder)
    names, starts, num_bases = read_data.genomes_at(path)
    number, place = read_data.regions(num_bases, count, width=width)
    wanted = [(names[n], p, p + width) for n, p in zip(number.tolist(), place.tolist(), strict=True)]
    batches = _cut(wanted, 256)  # small: pyfastx reads 200 per second
    base_mb = ready(path, *_index_parts(file))
    load_s = clock(lambda: reader.open(path, file))
    with contextlib.closing(reader):
        rates, answer = _timed(batches, reader.regions)
    lines = read_data.LINE_BASES
    truth: list[str] = []
    with path.open("rb") as text:
        for n, p in zip(number[: len(answer)].tolist(), place.tolist(), strict=False):
            text.seek(starts[n] + p + p // lines)
            truth.append(text.read(width + width // lines + 1).replace(b"\n", b"").decode()[:width])
    _compare(tool, answer, truth)
    return {"base_mb": base_mb, "load_s": load_s} | rates | {"unit": "regions/s"}


def decompress(*, tool: str, path: Path, plain: Path) -> Result:
    """Decompress the whole file and discard it; MB of `plain` per second, the median of three."""
    name, _, threads = tool.partition("-")
    programs = {"gzip": ["-dc"], "bgzip": ["-dc", "-@", threads or "1"]}
    if name in programs:
        command = [_program(name), *programs[name], path]
        read_file(path)
        turns = [_run(command) for _ in range(3)]
        result = {key: max(turn[key] for turn in turns) for key in ("peak_mb", "pss_mb", "base_mb")}
        result["seconds"] = median(turn["seconds"] for turn in turns)
    else:
        make = decompressor(name, path, int(threads or 1))
        result, seconds = {"base_mb": ready(path)}, []
        for _ in range(3):
            start, num_bytes = time.perf_counter(), 0
            with contextlib.closing(make()) as file:
                while chunk := file.read(1 << 20):
                    num_bytes += len(chunk)
            seconds.append(time.perf_counter() - start)
            if num_bytes != plain.stat().st_size:
                raise ValueError(f"{tool}: {num_bytes} bytes, not the {plain.stat().st_size} of {plain}")
        result["seconds"] = median(seconds)
    return result | {"rate": plain.stat().st_size / 1e6 / result["seconds"], "unit": "MB/s"}


def bpe(*, tool: str, path: Path, tokenizer: Path, count: int = NUM_READS, threads: int = 1) -> Result:
    """The first `count` reads through `encode_batch_fast`; `rate_padded` with the ids copied into a padded array."""
    assert tool == "tokenizers"
    os.environ |= {"TOKENIZERS_PARALLELISM": str(threads > 1).lower(), "RAYON_NUM_THREADS": str(threads)}
    from tokenizers import Tokenizer

    with path.open("rb") as file:
        reads = [line.decode().strip() for line in itertools.islice(file, 1, 2 * count, 2)]
    encoder = Tokenizer.from_file(str(tokenizer))
    batches = _cut(reads, BATCH_READS)
    encoder.encode_batch_fast(batches[0][:100])  # starts the threads

    def pad(batch: list[str]) -> np.ndarray:
        return _padded([encoding.ids for encoding in encoder.encode_batch_fast(batch)])

    base_mb = ready()
    rates, _ = _timed(batches, encoder.encode_batch_fast)
    padded, answer = _timed(batches, pad)
    crc = zlib.crc32(answer[answer != 0].astype(np.int32).tobytes())
    return {"base_mb": base_mb, "threads": threads} | rates | {"rate_padded": padded["rate"], "crc_of_first_batch": crc}


def limit(*, tool: str, path: Path) -> Result:
    """Limits of the machine: `cat` of the file from the page cache; memcpy of 256 MB."""
    if tool == "cat":
        command = [_program("cat"), path]
        read_file(path)
        turns = [_run(command) for _ in range(5)]
        seconds, num_bytes = median(turn["seconds"] for turn in turns), path.stat().st_size
        result = turns[0] | {"seconds": seconds}
    else:
        assert tool == "memcpy"
        source, copy = np.ones(1 << 28, np.uint8), np.ones(1 << 28, np.uint8)
        seconds, num_bytes = median(clock(lambda: np.copyto(copy, source)) for _ in range(9)), source.nbytes
        result = {"seconds": seconds}
    return result | {"rate": num_bytes / 1e6 / seconds, "unit": "MB/s"}


MEASURES: dict[str, Callable[..., Result]] = {
    "index": index,
    "fetch": fetch,
    "named": named,
    "iterate": iterate,
    "kmers": kmers,
    "regions": regions,
    "decompress": decompress,
    "bpe": bpe,
    "limit": limit,
}


def jobs(
    *,
    reads: Path,
    genomes: Path,
    packed: dict[str, Path],
    folder: Path,
    tokenizer: Path | None = None,
    slow_reads: int = 2_000_000,
) -> list[tuple[str, dict[str, Any]]]:
    """All measurements as arguments of `measure`. Slow libraries get `slow_reads`; `packed`: `read_data.compressed`."""
    every: list[tuple[str, dict[str, Any]]] = [("limit", {"tool": tool, "path": reads}) for tool in ("cat", "memcpy")]

    def add(measure: str, tools: str, **kwargs: Any) -> None:
        for tool in tools.split():
            few = {"num_reads": slow_reads} if kwargs["path"] == reads and tool in SLOW else {}
            every.append((measure, {"tool": tool, **few, **kwargs}))

    add("index", "samtools pysam pyfaidx pyfastx biopython old-scripts", path=reads, folder=folder)
    add("index", "samtools pysam pyfaidx pyfastx biopython old-scripts", path=genomes, folder=folder)
    add("fetch", "pysam pyfaidx pyfastx biopython old-scripts", path=reads, folder=folder)
    add("named", "pysam pyfastx", path=reads, folder=folder)
    add("iterate", "pysam pyfastx", path=reads)
    add("kmers", "pysam old-scripts", path=reads, folder=folder, num_reads=slow_reads)
    add("regions", "pysam pyfaidx pyfastx", path=genomes, folder=folder)
    few = {"folder": folder, "plain": packed["plain"], "count": 400, "batch_reads": 20}
    add("decompress", "gzip python isal rapidgzip-1 rapidgzip-2 indexed_gzip", path=packed["gz"], plain=packed["plain"])
    add("index", "indexed_gzip rapidgzip pyfastx", path=packed["gz"], folder=folder)
    add("fetch", "indexed_gzip rapidgzip pyfastx", path=packed["gz"], **few)
    if "bgz" in packed:
        add("decompress", "bgzip-1 bgzip-2 pysam", path=packed["bgz"], plain=packed["plain"])
        add("index", "pysam", path=packed["bgz"], folder=folder)
        add("fetch", "pysam", path=packed["bgz"], **few | {"count": NUM_READS, "batch_reads": 256})
    for kind in packed.keys() & {"bgz", "gz"}:
        add("iterate", "pysam pyfastx", path=packed[kind])
    if "zst" in packed:
        add("decompress", "zstandard", path=packed["zst"], plain=packed["plain"])
    if tokenizer:
        for threads in (1, 2):
            add("bpe", "tokenizers", path=reads, tokenizer=tokenizer, threads=threads)
    return every


# Helpers


def _index_file(tool: str, path: Path, folder: Path) -> Path:
    return folder / f"{path.name}{'.fai' if tool == 'samtools' else READERS[tool].suffix}"


def _index_parts(file: Path) -> list[Path]:
    return [part for part in file.parent.iterdir() if part.name.startswith(file.name)]


def _built(tool: str, path: Path, folder: Path) -> Path:
    """The tool's index of `path`; built in another process if missing, so that its memory does not count."""
    file = _index_file(tool, path, folder)
    if not file.exists():
        command = [sys.executable, __file__, "index", f"tool={tool}", f"path={path}", f"folder={folder}"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return file


def _open_and_choose(
    reader: Reader,
    tool: str,
    path: Path,
    folder: Path,
    plain: Path | None,
    num_reads: int | None,
    count: int,
    batch_reads: int,
) -> tuple[list[list[Wanted]], Result]:
    source = read_data.first_reads(folder, path, num_reads) if num_reads else path
    scale = path.stat().st_size / source.stat().st_size
    file = _built(tool, source, folder)
    text = plain or source
    numbers = read_data.record_numbers(read_data.count_records(text), count)
    places = read_data.records_at(text, numbers).tolist()
    wanted: list[Wanted] = []
    with text.open("rb") as lines:
        for number, (start, bases, end) in zip(numbers.tolist(), places, strict=True):
            lines.seek(start + 1)
            wanted.append(Wanted(number, lines.read(bases - start - 2).decode(), bases, end))
    base_mb = ready(source, *_index_parts(file))
    load_s = clock(lambda: reader.open(source, file)) * scale
    opened: Result = {"source": source, "base_mb": base_mb, "load_s": load_s}
    return _cut(wanted, batch_reads), opened | _scaled(scale, num_reads)


def _scaled(scale: float, num_reads: int | None) -> Result:
    return {"scaled": True, "measured_reads": num_reads} if scale > 1 else {}


def _timed(batches: Sequence[Any], action: Callable[[Any], Any]) -> tuple[Result, Any]:
    """Seconds and rate over the batches that LIMIT_S allows; the first result."""
    action(batches[0][:20])  # warm-up: one-time costs are not timed
    first: Any = None
    seconds: list[float] = []
    cpu = cpu_seconds()
    for batch in batches:
        start = time.perf_counter()
        answer = action(batch)
        seconds.append(time.perf_counter() - start)
        first = answer if first is None else first
        if sum(seconds) > LIMIT_S:
            break
    num_reads = sum(map(len, batches[: len(seconds)]))
    rate = num_reads / sum(seconds)
    found = {"seconds": sum(seconds), "rate": rate, "unit": "reads/s", "num_reads": num_reads}
    return found | {"cpu_s": cpu_seconds() - cpu}, first


def _bases_of(path: Path, batch: Sequence[Wanted]) -> list[str]:
    with path.open("rb") as file:
        return [slice_of(file, wanted.start, wanted.end) for wanted in batch]


def _compare(tool: str, found: list[str], truth: list[str]) -> None:
    if found != truth:
        raise ValueError(f"{tool}: {sum(map(str.__ne__, found, truth))} of {len(truth)} results differ from the file")


def _padded(rows: list[list[int]]) -> np.ndarray:
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    return ids


def _cut(values: list[Any], size: int) -> list[list[Any]]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def ready(*paths: Path) -> float:
    """Read files into the page cache and reset the memory peak of this process; returns its MB before the work."""
    read_file(*paths)
    with contextlib.suppress(OSError):  # where /proc is read-only the peak includes the preparations
        reset_peak()
    return memory_bytes("VmRSS") / 1e6


def _program(name: str) -> str:
    if found := shutil.which(name):
        return found
    raise Absent(f"{name}: program not found")


def _run(command: Sequence[str | Path]) -> Result:
    """Seconds and memory of a program; its output is discarded."""
    start, cpu = time.perf_counter(), cpu_seconds()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with Watch(process.pid) as watch:
        code = process.wait()
        seconds = time.perf_counter() - start
    if code:
        raise subprocess.CalledProcessError(code, command)
    return {
        "seconds": seconds,
        "cpu_s": cpu_seconds() - cpu,
        "base_mb": 0.0,
        "peak_mb": watch.peak_mb,
        "pss_mb": watch.pss_mb,
    }


def check(tokenizer: str | None = None) -> int:
    """Run everything on 5 MB and print a table; returns 1 if anything failed or returned wrong bases."""
    columns = ("seconds", "load_s", "rate", "unit", "index_mb", "base_mb", "peak_mb", "pss_mb")
    print(f"{'':42}", *(f"{column:>9}" for column in columns))
    failed = 0
    with tempfile.TemporaryDirectory(prefix="millstream-reads-", dir=os.environ.get("MILLSTREAM_BENCH_DIR")) as name:
        folder = Path(name)
        reads = read_data.short_reads(folder, 30_000)
        genomes = read_data.wrapped_genomes(folder, 5_000_000, genome_bases=(100_000, 1_000_000))
        packed = read_data.compressed(folder, reads, 2_000_000)
        path = Path(tokenizer) if tokenizer else None
        for measure_name, kwargs in jobs(
            reads=reads, genomes=genomes, packed=packed, folder=folder, tokenizer=path, slow_reads=10_000
        ):
            result = measure(__file__, measure_name, timeout_s=60, **kwargs)
            kind = {reads: "reads", genomes: "genomes"}.get(kwargs["path"], kwargs["path"].suffix[1:])
            title = f"{measure_name} {kind} {kwargs['tool']} {kwargs.get('threads', '')}"
            stop = next((f"{key}: {result[key]}" for key in ("absent", "timeout", "error") if key in result), None)
            failed += "error" in result or "timeout" in result
            print(f"{title:42}", stop or " ".join(f"{result.get(column, ''):>9}" for column in columns), flush=True)
    return int(failed > 0)


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in ("check", *MEASURES):
        print(f"{__doc__}\nMeasurements: {', '.join(MEASURES)}", file=sys.stderr)
        return 2
    name, *rest = sys.argv[1:]
    return check(**dict(argument.split("=", 1) for argument in rest)) if name == "check" else run(MEASURES, name, rest)


if __name__ == "__main__":
    sys.exit(main())
