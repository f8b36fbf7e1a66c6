"""The FASTA files of the read benchmark, generated from seeds. Knows nothing of millstream or its peers.

    python benchmarks/read_data.py FOLDER --reads 100000     # generates small versions of all files

A file name contains everything its bytes depend on, and a file gets its name once complete: existing files are reused.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

VERSION = "v1"  # part of every name: increase it if a generator changes
MIN_BASES, MAX_BASES = 100, 150  # of a short read
POOL_BASES = 100_000_000  # all genomes that short reads are sampled from: 13 M reads give 16x coverage
LINE_BASES = 60
CHUNK_READS = 1 << 15  # 7 MB of text at a time
FRAME_BYTES = 1 << 20

ACGT = np.frombuffer(b"ACGT", np.uint8)


def short_reads(folder: Path, num_reads: int = 13_000_000, *, num_classes: int = 100, seed: int = 0) -> Path:
    """One line per read, 100-150 bases, headers `>lbl|class|tax|len|name/mate`: 2.2 GB for 13 million.

    Reads are shuffled. Names are unique, as from a simulator: the accession of the genome, the number of the pair, the
    mate. A class is one genome with its own GC content; one read in a hundred has an N.
    """
    path = folder / f"reads-{num_reads}-c{num_classes}-s{seed}-{VERSION}.fa"
    if path.exists():
        return path
    rng = np.random.default_rng((seed, 0))
    genome_bases = POOL_BASES // num_classes
    pool = np.concatenate([_bases(rng, genome_bases) for _ in range(num_classes)])
    windows = np.lib.stride_tricks.sliding_window_view(pool, MAX_BASES)
    taxids = np.sort(rng.choice(3_000_000, num_classes, replace=False)) + 1
    labels = _text_rows([f">lbl|{c}|{tax}|" for c, tax in enumerate(taxids)])
    names = _text_rows([f"|NC_{n:06d}.{v}-" for n, v in rng.integers((1, 1), (10**6, 10), (num_classes, 2))])

    with _published(path) as temporary, temporary.open("wb") as file:
        for start in range(0, num_reads, CHUNK_READS):
            i = np.arange(start, min(start + CHUNK_READS, num_reads))
            pair, mate = np.divmod(i * _coprime(num_reads) % num_reads, 2)
            drawn = _hash(pair, seed)  # the same for both mates: one genome, positions 200 bases apart
            class_ = (drawn % num_classes).astype(np.intp)
            place = (drawn >> 20) % np.uint64(genome_bases - 200 - MAX_BASES)
            num_bases = np.random.default_rng((seed, 1, start)).integers(MIN_BASES, MAX_BASES + 1, len(i))

            bases = windows[class_ * genome_bases + place.astype(np.intp) + mate * 200]
            bases[np.arange(MAX_BASES) >= num_bases[:, None]] = 0
            ambiguous = np.flatnonzero(i % 100 == 0)
            bases[ambiguous, (drawn[ambiguous] >> 10).astype(np.intp) % MIN_BASES] = ord("N")
            rows = [labels[class_], _digits(num_bases, 3), names[class_], _digits(pair + 1, 8), b"/"]
            rows += [_digits(mate + 1, 1), b"\n", bases, b"\n"]
            file.write(_packed(rows, len(i)))
    return path


def wrapped_genomes(
    folder: Path,
    num_bytes: int = 1_000_000_000,
    *,
    genome_bases: tuple[int, int] = (1_000_000, 10_000_000),
    seed: int = 0,
) -> Path:
    """Genomes of 1-10 Mb in lines of 60 with NCBI-style headers; each has 0-5 runs of 10-10,000 N."""
    low, high = genome_bases
    path = folder / f"genomes-{num_bytes}-{low}-{high}-s{seed}-{VERSION}.fa"
    if path.exists():
        return path
    rng = np.random.default_rng((seed, 2))
    with _published(path) as temporary, temporary.open("wb") as file:
        number = 0
        while (left := num_bytes - file.tell()) > 0:
            number += 1
            size = min(int(rng.integers(low, high + 1)), max(left * LINE_BASES // (LINE_BASES + 1), low))
            bases = _bases(rng, size)
            for _ in range(rng.integers(6)):
                run, place = int(10 ** rng.uniform(1, 4)), int(rng.integers(size))
                bases[place : place + run] = ord("N")
            file.write(
                f">NC_{number:06d}.1 Imaginaria numerata strain MS-{number} chromosome, complete genome\n".encode()
            )
            num_lines = -(-size // LINE_BASES)
            lines = np.full((num_lines, LINE_BASES + 1), ord("\n"), np.uint8)
            bases.resize(num_lines * LINE_BASES)
            lines[:, :LINE_BASES] = bases.reshape(num_lines, LINE_BASES)
            file.write(lines.reshape(-1)[: size + num_lines - 1])  # the last line may be short
            file.write(b"\n")
    return path


def compressed(folder: Path, plain: Path, num_bytes: int = 500_000_000) -> dict[str, Path]:
    """The first reads of `plain`, up to `num_bytes`, as `plain`, `gz` (one member), `bgz` and `zst` (frames of 1 MB).

    `bgz` needs the program bgzip or pysam, `zst` needs zstandard; otherwise they are left out.
    """
    source = first_bytes(folder, plain, num_bytes)
    files = {"plain": source} | {kind: source.with_name(f"{source.name}.{kind}") for kind in ("gz", "bgz", "zst")}
    if not files["gz"].exists():
        with _published(files["gz"]) as temporary, temporary.open("wb") as out:
            if shutil.which("gzip"):
                subprocess.run(["gzip", "-6", "-n", "-c", source], stdout=out, check=True)
            else:
                with source.open("rb") as file, gzip.GzipFile("", "wb", 6, out, mtime=0) as member:
                    shutil.copyfileobj(file, member, 1 << 20)
    if not files["bgz"].exists():
        if shutil.which("bgzip"):
            with _published(files["bgz"]) as temporary, temporary.open("wb") as out:
                subprocess.run(["bgzip", "-c", source], stdout=out, check=True)
        elif importlib.util.find_spec("pysam"):
            import pysam

            with _published(files["bgz"]) as temporary:
                pysam.tabix_compress(str(source), str(temporary))
        else:
            del files["bgz"]
    if not files["zst"].exists():
        if importlib.util.find_spec("zstandard"):
            import zstandard

            with _published(files["zst"]) as temporary, temporary.open("wb") as out, source.open("rb") as file:
                compressor = zstandard.ZstdCompressor(level=3)
                while frame := file.read(FRAME_BYTES):
                    out.write(compressor.compress(frame))
        else:
            del files["zst"]
    return files


def first_bytes(folder: Path, path: Path, num_bytes: int) -> Path:
    """The first whole records of a FASTA file in up to `num_bytes`."""
    out = folder / f"{path.stem}-first-{num_bytes}-bytes.fa"
    if not out.exists():
        _copy(path, out, _end_of_record(path, num_bytes))
    return out


def first_reads(folder: Path, path: Path, num_reads: int) -> Path:
    """The first `num_reads` records of a file of one-line reads; the file itself if it has fewer."""
    out = folder / f"{path.stem}-first-{num_reads}-reads.fa"
    if not out.exists():
        place = records_at(path, np.array([num_reads]))
        if len(place) == 0:
            return path
        _copy(path, out, int(place[0, 0]))
    return out


def count_records(path: Path) -> int:
    """The number of records in one of these files; their headers have no second `>`."""
    with path.open("rb", buffering=0) as file:
        return sum(chunk.count(b">") for chunk in iter(lambda: file.read(1 << 20), b""))


def records_at(path: Path, numbers: np.ndarray) -> np.ndarray:
    """Offsets of these records in a file of one-line reads, and of the start and end of their bases: int64 [n, 3].

    One pass that stores only the result. Numbers past the end are left out.
    """
    lines, slot = np.unique(np.stack([2 * numbers, 2 * numbers + 1, 2 * numbers + 2], axis=1), return_inverse=True)
    starts = np.full(len(lines), -1, np.int64)
    starts[lines == 0] = 0
    num_lines = offset = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
            a, b = np.searchsorted(lines, (num_lines + 1, num_lines + 1 + len(ends)))
            starts[a:b] = ends[lines[a:b] - num_lines - 1] + offset + 1
            num_lines += len(ends)
            offset += len(chunk)
    places = starts[slot.reshape(-1, 3)]
    places = places[(places >= 0).all(axis=1)]
    places[:, 2] -= 1
    return places


def names_at(path: Path, places: np.ndarray) -> list[str]:
    """The header lines of records at these offsets, in which there are no blanks."""
    with path.open("rb") as file:
        return [_header(file, start, bases) for start, bases, _ in places.tolist()]


def _header(file: BinaryIO, start: int, end: int) -> str:
    file.seek(start + 1)
    return file.read(end - start - 2).decode()


def record_numbers(num_records: int, count: int, seed: int = 0) -> np.ndarray:
    """The records that every library fetches: int64, uniform, with replacement."""
    return np.random.default_rng((seed, 3)).integers(num_records, size=count)


def genomes_at(path: Path) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Names of wrapped genomes up to the first blank, offsets of their first bases, and their lengths."""
    with path.open("rb") as file:
        chunks = enumerate(iter(lambda: file.read(1 << 20), b""))
        places = [(number << 20) + match.start() for number, chunk in chunks for match in re.finditer(b">", chunk)]
        headers: list[bytes] = []
        for place in places:
            file.seek(place)
            headers.append(file.readline())
    names = [header[1:].split(maxsplit=1)[0].decode() for header in headers]
    starts = np.array(places) + [len(header) for header in headers]
    num_bytes = np.array([*places[1:], path.stat().st_size]) - starts
    return names, starts, num_bytes + (-num_bytes // (LINE_BASES + 1))  # one newline per line


def regions(num_bases: np.ndarray, count: int, *, width: int = 150, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Record numbers and starts of regions, sampled uniformly over all positions of records of these lengths."""
    ends = np.cumsum(num_bases - width + 1)
    places = np.random.default_rng((seed, 4)).integers(ends[-1], size=count)
    number = np.searchsorted(ends, places, side="right")
    return number, places - (ends - (num_bases - width + 1))[number]


def _bases(rng: np.random.Generator, size: int) -> np.ndarray:
    """Random bases with a GC content of 30-65 %, as in bacterial genomes."""
    gc = int(rng.integers(77, 167))  # of 256
    table = np.repeat(ACGT, ((256 - gc + 1) // 2, gc // 2, (gc + 1) // 2, (256 - gc) // 2))
    return table[rng.integers(256, size=size, dtype=np.uint8)]


def _hash(numbers: np.ndarray, seed: int) -> np.ndarray:
    """splitmix64: a distinct uint64 for every number."""
    x = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _coprime(n: int) -> int:
    """A multiplier that permutes 0..n-1 and separates neighbours."""
    step = max(int(n * 0.6180339887), 1)
    while math.gcd(step, n) != 1:
        step += 1
    return step


# Strings of different lengths are rows of equal width padded with zero bytes: packing drops the zeros of a chunk.


def _text_rows(texts: list[str]) -> np.ndarray:
    rows = np.array([text.encode() for text in texts])
    return rows.view(np.uint8).reshape(len(texts), -1)


def _digits(numbers: np.ndarray, width: int) -> np.ndarray:
    rows = np.empty((len(numbers), width), np.uint8)
    left = numbers.astype(np.uint32)
    for column in reversed(range(width)):
        tens = left // 10
        rows[:, column] = np.where((left > 0) | (column == width - 1), left - tens * 10 + ord("0"), 0)
        left = tens
    return rows


def _packed(columns: list[np.ndarray | bytes], num_rows: int) -> np.ndarray:
    parts = [np.frombuffer(c, np.uint8)[None].repeat(num_rows, 0) if isinstance(c, bytes) else c for c in columns]
    rows = np.concatenate(parts, axis=1).reshape(-1)
    return rows[rows != 0]


def _end_of_record(path: Path, limit: int) -> int:
    """The last offset up to `limit` where a record starts, or the end of the file."""
    if limit >= path.stat().st_size:
        return path.stat().st_size
    with path.open("rb") as file:
        place = limit + 1
        while place > 0:
            start = max(place - (1 << 20), 0)
            file.seek(start)
            if (found := file.read(place - start).rfind(b"\n>")) >= 0:
                return start + found + 1
            place = start + 1 if start else 0
    raise ValueError(f"{path}: its first record does not end within {limit} bytes. Raise the limit.")


def _copy(source: Path, out: Path, num_bytes: int) -> None:
    with _published(out) as temporary, temporary.open("wb") as file, source.open("rb") as whole:
        while num_bytes:
            chunk = whole.read(min(num_bytes, 1 << 20))
            file.write(chunk)
            num_bytes -= len(chunk)


@contextmanager
def _published(path: Path) -> Iterator[Path]:
    """A temporary file that is renamed to `path` on success."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        fd = os.open(temporary, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--reads", type=int, default=13_000_000)
    parser.add_argument("--genome-bytes", type=int, default=1_000_000_000)
    parser.add_argument("--compressed-bytes", type=int, default=500_000_000)
    options = parser.parse_args()
    reads = short_reads(options.folder, options.reads)
    genomes = wrapped_genomes(options.folder, options.genome_bytes)
    files = compressed(options.folder, reads, options.compressed_bytes)
    for path in (reads, genomes, *files.values()):
        print(f"{path.stat().st_size / 1e6:9.1f} MB  {path}")


if __name__ == "__main__":
    main()
