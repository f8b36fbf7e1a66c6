"""The same reads with other libraries and programs, each used as documented. Knows nothing of millstream.

    python benchmarks/read_peers.py check                                        # everything, on 5 MB, verified
    python benchmarks/read_peers.py index tool=pysam path=reads.fa folder=work  # one measurement, one line of JSON

`measure` runs one of them in a new process, so that its time and memory are its own; `jobs` lists them all.
Files are read once before timing, and the output of a library is compared with the bytes of the file afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

import numpy as np

import read_data

BATCH_READS = 4096
NUM_READS = 10 * BATCH_READS  # fetched in random order
LIMIT_S = 15  # a library that takes longer is measured on fewer reads
SLOW = ("pyfaidx", "biopython")  # minutes and gigabytes on 13 M reads: indexed and opened on fewer
HEADER = r"^lbl\|(?P<class_id>\d+)\|(?P<tax_id>\d+)?\|(?P<readlen>\d+)?\|(?P<name>[^/\s]+)(?:/(?P<mate>\d+))?$"

Result = dict[str, Any]


class Absent(Exception):
    """A program that is not installed. A missing library raises ImportError, which means the same here."""


class Wanted(NamedTuple):
    """One read, by the keys that libraries use: its number, its name, the offsets of its bases in the plain text."""

    number: int
    name: str
    start: int
    end: int


class Reader(Protocol):
    """A library under test. Creating one imports it."""

    suffix: str  # of its index

    def build(self, path: Path, index: Path) -> None: ...

    def open(self, path: Path, index: Path) -> None: ...

    def read(self, batch: Sequence[Wanted]) -> list[str]:
        """The bases of whole reads."""
        ...

    def close(self) -> None: ...


# Readers


class Pysam:
    """Plain and BGZF; by name."""

    suffix = ".fai"

    def __init__(self) -> None:
        import pysam

        self._pysam = pysam

    def build(self, path: Path, index: Path) -> None:
        self._pysam.faidx(str(path), "--fai-idx", str(index), "--gzi-idx", f"{index}.gzi")

    def open(self, path: Path, index: Path) -> None:
        blocks = f"{index}.gzi" if path.suffix == ".bgz" else None
        self._file = self._pysam.FastaFile(str(path), filepath_index=str(index), filepath_index_compressed=blocks)

    def read(self, batch: Sequence[Wanted]) -> list[str]:
        fetch = self._file.fetch
        return [fetch(wanted.name) for wanted in batch]

    def regions(self, batch: Sequence[tuple[str, int, int]]) -> list[str]:
        fetch = self._file.fetch
        return [fetch(name, start, end) for name, start, end in batch]

    def close(self) -> None:
        self._file.close()


class Pyfaidx:
    """By name: by number it iterates over its dictionary from the start."""

    suffix = ".fai"

    def __init__(self) -> None:
        import pyfaidx

        self._pyfaidx = pyfaidx

    def build(self, path: Path, index: Path) -> None:
        self._pyfaidx.Faidx(str(path), indexname=str(index)).close()

    def open(self, path: Path, index: Path) -> None:
        self._file = self._pyfaidx.Fasta(str(path), indexname=str(index), as_raw=True, rebuild=False)

    def read(self, batch: Sequence[Wanted]) -> list[str]:
        file = self._file
        return [file[wanted.name][:] for wanted in batch]

    def regions(self, batch: Sequence[tuple[str, int, int]]) -> list[str]:
        file = self._file
        return [file[name][start:end] for name, start, end in batch]

    def close(self) -> None:
        self._file.close()


class Pyfastx:
    """Plain and gzip; by number."""

    suffix = ".fxi"

    def __init__(self) -> None:
        import pyfastx

        self._pyfastx = pyfastx

    def build(self, path: Path, index: Path) -> None:
        self._pyfastx.Fasta(str(path), index_file=str(index))

    def open(self, path: Path, index: Path) -> None:
        self._file = self._pyfastx.Fasta(str(path), index_file=str(index))

    def read(self, batch: Sequence[Wanted]) -> list[str]:
        file = self._file
        return [file[wanted.number].seq for wanted in batch]

    def regions(self, batch: Sequence[tuple[str, int, int]]) -> list[str]:
        fetch = self._file.fetch
        return [fetch(name, (start + 1, end)) for name, start, end in batch]

    def close(self) -> None:
        del self._file


class Biopython:
    """SeqIO.index_db, its index for files larger than memory; by name."""

    suffix = ".idx"

    def __init__(self) -> None:
        from Bio import SeqIO

        self._seqio = SeqIO

    def build(self, path: Path, index: Path) -> None:
        self._seqio.index_db(str(index), [str(path)], "fasta").close()

    def open(self, path: Path, index: Path) -> None:
        self._file = self._seqio.index_db(str(index), [str(path)], "fasta")

    def read(self, batch: Sequence[Wanted]) -> list[str]:
        file = self._file
        return [str(file[wanted.name].seq) for wanted in batch]

    def close(self) -> None:
        self._file.close()


class Seed:
    """The old scripts: a pickled list of offsets, seek, readline, `re`, a cache of 10,000 reads.

    Written from their guide, in their favour: binary files, one handle, only offsets.
    """

    suffix = ".index.pkl"
    cache_reads = 10_000

    def build(self, path: Path, index: Path) -> None:
        offsets: list[int] = []
        with path.open("rb") as file:
            offset = file.tell()
            while line := file.readline():
                if line.startswith(b">"):
                    offsets.append(offset)
                offset = file.tell()
        with index.open("wb") as file:
            pickle.dump(offsets, file)

    def open(self, path: Path, index: Path) -> None:
        with index.open("rb") as file:
            self._offsets: list[int] = pickle.load(file)
        self._file = path.open("rb")
        self._header = re.compile(HEADER)
        self._cache: OrderedDict[int, tuple[str, int]] = OrderedDict()

    def read(self, batch: Sequence[Wanted]) -> list[str]:
        return [self._item(wanted.number)[0] for wanted in batch]

    def _item(self, number: int) -> tuple[str, int]:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        self._file.seek(self._offsets[number])
        match = self._header.match(self._file.readline().decode()[1:].strip())
        assert match
        item = self._file.readline().decode().strip(), int(match["class_id"])
        self._cache[number] = item
        if len(self._cache) > self.cache_reads:
            self._cache.popitem(last=False)
        return item

    def close(self) -> None:
        self._file.close()


class IndexedGzip:
    """A gzip file with seek points; the offsets of the reads are given."""

    suffix = ".gzidx"

    def __init__(self) -> None:
        import indexed_gzip

        self._indexed_gzip = indexed_gzip

    def build(self, path: Path, index: Path) -> None:
        with self._indexed_gzip.IndexedGzipFile(str(path)) as file:
            file.build_full_index()
            file.export_index(str(index))

    def open(self, path: Path, index: Path) -> None:
        self._file = self._indexed_gzip.IndexedGzipFile(str(path), index_file=str(index))

    def read(self, batch: Sequence[Wanted]) -> list[str]:
        return [_slice(self._file, wanted) for wanted in batch]

    def close(self) -> None:
        self._file.close()


class Rapidgzip:
    """Like IndexedGzip. A file that is not closed aborts the interpreter at exit."""

    suffix = ".rgzidx"

    def __init__(self) -> None:
        import rapidgzip

        self._rapidgzip = rapidgzip

    def build(self, path: Path, index: Path) -> None:
        with self._rapidgzip.open(str(path), parallelization=1) as file:
            file.export_index(str(index))

    def open(self, path: Path, index: Path) -> None:
        self._file = self._rapidgzip.open(str(path), parallelization=1)
        self._file.import_index(str(index))

    def read(self, batch: Sequence[Wanted]) -> list[str]:
        return [_slice(self._file, wanted) for wanted in batch]

    def close(self) -> None:
        self._file.close()


READERS: dict[str, Callable[[], Reader]] = {
    "pysam": Pysam,
    "pyfaidx": Pyfaidx,
    "pyfastx": Pyfastx,
    "biopython": Biopython,
    "seed": Seed,
    "indexed_gzip": IndexedGzip,
    "rapidgzip": Rapidgzip,
}


def _slice(file: Any, wanted: Wanted) -> str:
    file.seek(wanted.start)
    return file.read(wanted.end - wanted.start).decode()


# Measurements: `measure` runs each in its own process, with the same keywords


def index(*, tool: str, path: Path, folder: Path, num_reads: int | None = None) -> Result:
    """Build the index in `folder`. With `num_reads`, of that many reads; seconds and index_mb are then scaled up."""
    source = read_data.first_reads(folder, path, num_reads) if num_reads else path
    scale = path.stat().st_size / source.stat().st_size
    file = _index_file(tool, source, folder)
    unfinished = file.with_name(f"unfinished-{file.name}")  # an interrupted build must not be taken for an index
    if tool == "samtools":
        command = [_program("samtools"), "faidx", source, "--fai-idx", unfinished]
        _warm(source)
        result = _run(command)
    else:
        reader = READERS[tool]()
        for old in _index_parts(unfinished):
            old.unlink()  # SQLite would continue from it
        result = {"base_mb": ready(source), "seconds": clock(lambda: reader.build(source, unfinished))}
    index_mb = sum(part.stat().st_size for part in _index_parts(unfinished)) / 1e6
    for part in _index_parts(unfinished):
        part.replace(folder / part.name.removeprefix("unfinished-"))
    rate = source.stat().st_size / 1e6 / result["seconds"]
    result |= {"rate": rate, "unit": "MB/s", "index_mb": index_mb * scale, "seconds": result["seconds"] * scale}
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


def kmers(
    *, tool: str, path: Path, folder: Path, num_reads: int | None = None, count: int = NUM_READS, k: int = 6
) -> Result:
    """Random reads as padded int64 tokens, in the usual way: one dictionary lookup per k-mer."""
    reader = READERS[tool]()
    batches, opened = _open_and_choose(reader, tool, path, folder, None, num_reads, count, BATCH_READS)
    del opened["source"]
    vocabulary = {"".join(kmer): number for number, kmer in enumerate(itertools.product("ACGT", repeat=k), start=2)}

    def tokenize(batch: Sequence[Wanted]) -> np.ndarray:
        rows = [
            [vocabulary.get(bases[i : i + k], 1) for i in range(len(bases) - k + 1)] for bases in reader.read(batch)
        ]
        ids = np.zeros((len(rows), max(map(len, rows))), np.int64)  # 0 pads, 1 is any k-mer with an N
        for number, row in enumerate(rows):
            ids[number, : len(row)] = row
        return ids

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
        _warm(path)
        turns = [_run(command) for _ in range(3)]
        result = {key: max(turn[key] for turn in turns) for key in ("peak_mb", "pss_mb", "base_mb")}
        result["seconds"] = median(turn["seconds"] for turn in turns)
    else:
        make = _decompressor(name, path, int(threads or 1))
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
        rows = [encoding.ids for encoding in encoder.encode_batch_fast(batch)]
        ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = row
        return ids

    base_mb = ready()
    rates, _ = _timed(batches, encoder.encode_batch_fast)
    padded, answer = _timed(batches, pad)
    crc = zlib.crc32(answer[answer != 0].astype(np.int32).tobytes())
    return {"base_mb": base_mb, "threads": threads} | rates | {"rate_padded": padded["rate"], "crc_of_first_batch": crc}


def limit(*, tool: str, path: Path) -> Result:
    """Limits of the machine: `cat` of the file from the page cache; memcpy of 256 MB."""
    if tool == "cat":
        command = [_program("cat"), path]
        _warm(path)
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

    add("index", "samtools pysam pyfaidx pyfastx biopython seed", path=reads, folder=folder)
    add("index", "samtools pysam pyfaidx pyfastx biopython seed", path=genomes, folder=folder)
    add("fetch", "pysam pyfaidx pyfastx biopython seed", path=reads, folder=folder)
    add("kmers", "pysam seed", path=reads, folder=folder, num_reads=slow_reads)
    add("regions", "pysam pyfaidx pyfastx", path=genomes, folder=folder)
    few = {"folder": folder, "plain": packed["plain"], "count": 400, "batch_reads": 20}
    add("decompress", "gzip python isal rapidgzip-1 rapidgzip-2 indexed_gzip", path=packed["gz"], plain=packed["plain"])
    add("index", "indexed_gzip rapidgzip pyfastx", path=packed["gz"], folder=folder)
    add("fetch", "indexed_gzip rapidgzip pyfastx", path=packed["gz"], **few)
    if "bgz" in packed:
        add("decompress", "bgzip-1 bgzip-2 pysam", path=packed["bgz"], plain=packed["plain"])
        add("index", "pysam", path=packed["bgz"], folder=folder)
        add("fetch", "pysam", path=packed["bgz"], **few | {"count": NUM_READS, "batch_reads": 256})
    if "zst" in packed:
        add("decompress", "zstandard", path=packed["zst"], plain=packed["plain"])
    if tokenizer:
        for threads in (1, 2):
            add("bpe", "tokenizers", path=reads, tokenizer=tokenizer, threads=threads)
    return every


def measure(name: str, *, script: str = __file__, timeout_s: float = 600, **kwargs: Any) -> Result:
    """Run one measurement in a new process: its result, or {"absent": reason}, {"timeout": s} or {"error": text}."""
    command = [
        sys.executable,
        script,
        name,
        *(f"{key}={value}" for key, value in kwargs.items() if value is not None),
    ]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # so that its child processes can be killed with it
    )
    with _Watch(process.pid) as watch:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return {"timeout": timeout_s}
        finally:
            with contextlib.suppress(ProcessLookupError):
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
    if process.returncode or not out.strip():
        return {"error": f"exit {process.returncode}: {(err.strip().splitlines() or [''])[-1]}"}
    result = json.loads(out.splitlines()[-1])
    return result if "absent" in result else _rounded({"pss_mb": watch.pss_mb} | result)


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
    for batch in batches:
        start = time.perf_counter()
        answer = action(batch)
        seconds.append(time.perf_counter() - start)
        first = answer if first is None else first
        if sum(seconds) > LIMIT_S:
            break
    num_reads = sum(map(len, batches[: len(seconds)]))
    rate = num_reads / sum(seconds)
    return {"seconds": sum(seconds), "rate": rate, "unit": "reads/s", "num_reads": num_reads}, first


def _bases_of(path: Path, batch: Sequence[Wanted]) -> list[str]:
    with path.open("rb") as file:
        return [_slice(file, wanted) for wanted in batch]


def _compare(tool: str, found: list[str], truth: list[str]) -> None:
    if found != truth:
        raise ValueError(f"{tool}: {sum(map(str.__ne__, found, truth))} of {len(truth)} results differ from the file")


def _decompressor(name: str, path: Path, threads: int) -> Callable[[], Any]:
    if name == "python":
        import gzip

        return lambda: gzip.open(path)
    if name == "isal":
        from isal import igzip

        return lambda: igzip.open(path)
    if name == "rapidgzip":
        import rapidgzip

        return lambda: rapidgzip.open(str(path), parallelization=threads)
    if name == "indexed_gzip":
        import indexed_gzip

        return lambda: indexed_gzip.IndexedGzipFile(str(path))
    if name == "pysam":
        import pysam

        return lambda: pysam.BGZFile(str(path), "r")
    if name == "zstandard":
        import zstandard

        return lambda: zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True)
    raise ValueError(f"unknown decompressor {name!r}")


def _cut(values: list[Any], size: int) -> list[list[Any]]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def clock(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _warm(*paths: Path) -> None:
    """Read the files once, into the page cache."""
    buffer = bytearray(1 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def ready(*paths: Path) -> float:
    """Warm the files and reset the memory peak of this process; returns its MB before the work starts."""
    _warm(*paths)
    with contextlib.suppress(OSError):  # where /proc is read-only the peak includes the preparations
        Path("/proc/self/clear_refs").write_text("5")
    return memory_mb("VmRSS")


def _program(name: str) -> str:
    if found := shutil.which(name):
        return found
    raise Absent(f"{name}: program not found")


def _run(command: Sequence[str | Path]) -> Result:
    """Seconds and memory of a program; its output is discarded."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with _Watch(process.pid) as watch:
        code = process.wait()
        seconds = time.perf_counter() - start
    if code:
        raise subprocess.CalledProcessError(code, command)
    return {"seconds": seconds, "base_mb": 0.0, "peak_mb": watch.peak_mb, "pss_mb": watch.pss_mb}


class _Watch:
    """The memory of another process. Not ru_maxrss: after fork and exec it starts at the parent's."""

    def __init__(self, pid: int) -> None:
        self.peak_mb = self.pss_mb = 0.0
        self._pid, self._done, self._thread = pid, threading.Event(), threading.Thread(target=self._sample)

    def _sample(self) -> None:
        pause = 0.0
        while not self._done.wait(pause):
            start = time.perf_counter()
            try:
                self.peak_mb = max(self.peak_mb, memory_mb("VmHWM", self._pid))
                self.pss_mb = max(self.pss_mb, memory_mb("Pss", self._pid, "smaps_rollup"))
            except (OSError, StopIteration):  # it has ended
                return
            pause = max(0.02, 50 * (time.perf_counter() - start))  # walking 4 GB of pages takes 20 ms

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def memory_mb(what: str, pid: int | str = "self", file: str = "status") -> float:
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(f"{what}:"))


def _rounded(result: Result) -> Result:
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in result.items()}


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
            result = measure(measure_name, timeout_s=60, **kwargs)
            kind = {reads: "reads", genomes: "genomes"}.get(kwargs["path"], kwargs["path"].suffix[1:])
            title = f"{measure_name} {kind} {kwargs['tool']} {kwargs.get('threads', '')}"
            stop = next((f"{key}: {result[key]}" for key in ("absent", "timeout", "error") if key in result), None)
            failed += "error" in result or "timeout" in result
            print(f"{title:42}", stop or " ".join(f"{result.get(column, ''):>9}" for column in columns), flush=True)
    return int(failed > 0)


def run(measures: dict[str, Callable[..., Result]], name: str, arguments: Sequence[str]) -> int:
    """Run one measurement in this process, on behalf of `measure`; prints one line of JSON."""
    kwargs: dict[str, Any] = dict(argument.split("=", 1) for argument in arguments)
    for key, value in kwargs.items():
        if key in ("path", "plain", "folder", "tokenizer"):
            kwargs[key] = Path(value)
        elif value.isdigit():
            kwargs[key] = int(value)
    try:
        result = measures[name](**kwargs)
        result = {"tool": kwargs["tool"], "peak_mb": memory_mb("VmHWM")} | result
    except (ImportError, Absent) as error:
        result = {"absent": str(error)}
    print(json.dumps(result))
    return 0


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in ("check", *MEASURES):
        print(f"{__doc__}\nMeasurements: {', '.join(MEASURES)}", file=sys.stderr)
        return 2
    name, *rest = sys.argv[1:]
    return check(**dict(argument.split("=", 1) for argument in rest)) if name == "check" else run(MEASURES, name, rest)


if __name__ == "__main__":
    sys.exit(main())
