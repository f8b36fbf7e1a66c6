"""Data of the loader benchmark: traces of 2.7 MB and reads of 150 bases, cheap to generate, identified by number.

Record `i` depends only on the seed and `i`, so that it can be generated again and compared after reading.
"""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

# L layers, H heads, T tokens, D hidden
L, H, D = 17, 2, 896
MIN_T, MAX_T = 30, 120  # 2 L D T + 2 L H T^2 + 4 T bytes per record: 2.7 MB on average
BASES = 150
STAMP = 12  # the first bases of a read encode its number: at most 4^12 reads

TENSORS = ("hidden", "attention", "logprobs")

Record = dict[str, Any]


def traces(count: int, seed: int = 0) -> Iterator[Record]:
    """The first `count` of an endless series of model traces: ids, float16 tensors of varying lengths, labels."""
    return (trace(i, seed) for i in range(count))


def trace(i: int, seed: int = 0) -> Record:
    rng = np.random.default_rng((seed, 1, i))
    t = int(rng.integers(MIN_T, MAX_T + 1))
    record = {
        "question_id": f"q{i:06d}",
        "hidden": _slice(rng, seed, L, t, D),
        "attention": _slice(rng, seed, L, H, t, t),
        "logprobs": -rng.random(t, dtype=np.float32),
        "label": int(rng.integers(2)),
    }
    for name in TENSORS:  # float16 is exact up to 2048 only, hence two numbers
        record[name].reshape(-1)[:2] = divmod(i, 1000)
    return record


def trace_bytes(record: Record) -> int:
    """Payload of a trace: array bytes, the id, 8 for the label. Accepts numpy and torch."""
    return sum(record[name].nbytes for name in TENSORS) + len(record["question_id"]) + 8


def same_trace(found: Record, wanted: Record) -> bool:
    """Bit-identical, in numpy or torch."""
    arrays = [(np.asarray(found[name]), wanted[name]) for name in TENSORS]
    return (found["question_id"], int(found["label"])) == (wanted["question_id"], wanted["label"]) and all(
        (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes() for a, b in arrays
    )


def reads(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Bases uint8 [count, 150] as ASCII, and labels int64 [count]."""
    rng = np.random.default_rng((seed, 2))
    alphabet = np.frombuffer(b"ACGT", np.uint8)
    bases = alphabet[rng.integers(0, 4, (count, BASES), dtype=np.uint8)]
    numbers = np.arange(count)
    for column in range(STAMP):
        bases[:, column] = alphabet[(numbers >> 2 * column) & 3]
    return bases, rng.integers(0, 1000, count)


def read_numbers(bases: np.ndarray) -> np.ndarray:
    """The number encoded in each row of `bases`."""
    codes = (bases[:, :STAMP].astype(np.int64) >> 1) & 3  # A C T G -> 0 1 2 3
    codes ^= codes >> 1  # A C G T
    return (codes << 2 * np.arange(STAMP)).sum(1)


def write_fasta(path: Path, count: int, seed: int = 0) -> None:
    """`>lbl|{label}|{tax}|150|read{i}/1` and 150 bases per record."""
    bases, labels = reads(count, seed)
    with path.open("wb") as file:
        for start in range(0, count, 50_000):
            rows = range(start, min(start + 50_000, count))
            file.write(
                b"".join(
                    b">lbl|%d|%d|%d|read%d/1\n%b\n" % (label, 1000 + label, BASES, i, row)
                    for i, label, row in zip(rows, labels[start:].tolist(), map(bytes, bases[start:]), strict=False)
                )
            )


def packed(bases: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """One row of 158 bytes per read, label last: for formats whose record is a byte string."""
    return np.concatenate([bases, labels.astype("<i8").view(np.uint8).reshape(-1, 8)], axis=1)


def unpacked(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bases and labels again, copied."""
    return np.ascontiguousarray(rows[:, :BASES]), np.ascontiguousarray(rows[:, BASES:]).view("<i8").reshape(-1)


@lru_cache(maxsize=1)
def _pool(seed: int) -> np.ndarray:
    """16 MB of random float16, drawn once: taking a record from it costs a memcpy."""
    return np.random.default_rng((seed, 0)).standard_normal(1 << 23, dtype=np.float32).astype(np.float16)


def _slice(rng: np.random.Generator, seed: int, *shape: int) -> np.ndarray:
    pool, size = _pool(seed), int(np.prod(shape))
    start = int(rng.integers(pool.size - size))
    return pool[start : start + size].reshape(shape).copy()
