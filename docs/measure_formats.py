"""Measures the table in docs/how-to/gzip-or-pack.md: python docs/measure_formats.py FOLDER [reads=3000000]

Simulated 150 bp reads, larger than the memory budget: plain, gzipped, packed. Prints for each its size, the seconds to
index or pack it, and reads per second through `ms.Loader` with `base` tokens, batches of 1,024, memory=200MB, in window
and in exact order, for ten seconds each, from the page cache.
"""

import gzip
import shutil
import sys
import time
from pathlib import Path
from typing import Literal

import numpy as np

import millstream as ms
from millstream.reads.pack.pack import pack
from millstream.reads.simulate import SimulateSettings, simulate

SECONDS, BATCH = 10.0, 1024


def main() -> None:
    folder = Path(sys.argv[1])
    count = int(sys.argv[2].partition("=")[2]) if len(sys.argv) > 2 else 3_000_000
    folder.mkdir(parents=True, exist_ok=True)
    plain, zipped, packed = folder / "reads.fa", folder / "reads.fa.gz", folder / "reads.pack"
    for file in (*folder.glob("*.millstream"), packed):
        file.unlink(missing_ok=True)
    if not plain.exists():
        make_reads(folder, plain, count)
        with open(plain, "rb") as source, gzip.open(zipped, "wb", 6) as target:
            shutil.copyfileobj(source, target)
    ms.open(make_small(folder))  # compiles the kernels
    print("| | bytes per read | seconds to index or pack | window, reads/s | exact, reads/s |\n|---|---|---|---|---|")
    for name, file in (("plain FASTA", plain), ("gzip", zipped), ("pack", packed)):
        start = time.perf_counter()
        if file == packed:
            pack([zipped], packed)
        reads = ms.open(file, memory="200MB")
        assert isinstance(reads, ms.Reads)
        took = time.perf_counter() - start
        rates = [f"{rate_of(reads, order):,.0f}" for order in ("window", "exact")]
        print(f"| {name} | {file.stat().st_size / len(reads):.0f} | {took:.1f} | {rates[0]} | {rates[1]} |")


def make_reads(folder: Path, out: Path, count: int) -> None:
    genome = folder / "562_genome.fna"
    bases = np.frombuffer(b"ACGT", np.uint8)[np.random.default_rng(0).integers(0, 4, 5_000_000)]
    genome.write_text(">genome\n" + bases.tobytes().decode() + "\n")
    simulate([genome], [out], settings=SimulateSettings(count, 150))


def make_small(folder: Path) -> Path:
    small = folder / "small.fa"
    small.write_text(">a\nACGT\n>b\nGGCC\n")
    return small


def rate_of(reads: ms.Reads, order: Literal["window", "exact"]) -> float:
    loader = ms.Loader(
        reads, batch_size=BATCH, features=ms.features.tokens("base"), order=order, memory="200MB", notify=lambda _: None
    )
    seen, start = 0, None
    for batch in loader:
        if start is None:  # the first batch compiles kernels
            start = time.perf_counter()
            continue
        seen += np.asarray(batch["numbers"]).size
        if time.perf_counter() - start > SECONDS:
            break
    return seen / (time.perf_counter() - (start or 0))


if __name__ == "__main__":
    main()
