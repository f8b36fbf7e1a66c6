"""Reads as the tokenizers take them, the real data if it is there, and a second interpreter without a compiler."""

import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
DATA = ROOT / ".." / "shared" / "data"
METAGENE = DATA / "metagene"

needs_data = pytest.mark.skipif(not METAGENE.is_dir(), reason=f"the METAGENE-1 tokenizer is not at {METAGENE}")


def pack(reads: Sequence[str]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """A batch: flat letters and offsets."""
    flat = np.frombuffer("".join(reads).encode("latin-1"), np.uint8)
    return flat, np.cumsum([0, *map(len, reads)], dtype=np.int64)


def unpack(flat: NDArray[np.uint8], offsets: NDArray[np.int64]) -> list[str]:
    text = flat.tobytes().decode("latin-1")
    return [text[offsets[i] : offsets[i + 1]] for i in range(offsets.size - 1)]


def random_reads(num: int, *, length: int, seed: int, letters: str = "ACGT") -> list[str]:
    """Reads with repeats in them, as genomes have: merges then meet each other more than in plain noise."""
    rng = np.random.default_rng(seed)
    reads: list[str] = []
    for _ in range(num):
        read = ""
        while len(read) < length:
            unit = "".join(rng.choice(list(letters), rng.integers(1, 6)))
            read += unit * int(rng.integers(1, 8))
        reads.append(read[:length])
    return reads


def genome_reads(num: int, *, length: int) -> list[str]:
    rng = np.random.default_rng(0)
    genomes: list[str] = []
    for file in sorted((DATA / "genomes").glob("*.fna.gz"))[:3]:
        with gzip.open(file, "rt") as lines:
            genomes.append("".join(line.strip() for line in lines if not line.startswith(">")).upper())
    starts = [(genome, int(rng.integers(len(genome) - length))) for genome in genomes for _ in range(num // 3)]
    return [genome[start : start + length] for genome, start in starts]
