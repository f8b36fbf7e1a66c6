"""Records of the store benchmark: traces of 4 MB, cheap to generate."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

# L layers, H heads, T tokens, D hidden
L, H, D = 17, 12, 768
MIN_T, MAX_T = 52, 91  # 26112 T + 408 T^2 bytes per record: 4.0 MB on average
SHARD_RECORDS = 50  # 200 MB: shard size of the formats that hold a whole shard in memory

TEXTS = ("question_id", "question", "answer")
VECTORS = {"tokens": "int32", "logprobs": "float32"}  # [T]
TENSORS = ("hidden", "attention")  # float16 [L,T,D] and [L,H,T,T]
ARRAYS = VECTORS | dict.fromkeys(TENSORS, "float16")

Record = dict[str, Any]


def records(num: int, seed: int = 0) -> Iterator[Record]:
    """The first `num` records of an endless series: `records(20)` are the first 20 of `records(500)`."""
    pool = _noise(seed)
    rng = np.random.default_rng((seed, 1))

    def noise(*shape: int) -> np.ndarray:
        size = int(np.prod(shape))
        start = int(rng.integers(pool.size - size))
        return pool[start : start + size].reshape(shape).copy()  # a copy: writers that keep records must pay for it

    for i in range(num):
        t = int(rng.integers(MIN_T, MAX_T + 1))
        yield {
            "question_id": f"q{i:06d}",
            "question": f"Which of the {t} rivers named in document {i} reaches the sea first?",
            "answer": f"River number {i % t}.",
            "label": int(rng.integers(2)),
            "tokens": rng.integers(0, 50_000, t, dtype=np.int32),
            "logprobs": -rng.random(t, dtype=np.float32),
            "hidden": noise(L, t, D),
            "attention": noise(L, H, t, t),
        }


def record_bytes(r: Record) -> int:
    """Payload of a record: array bytes, UTF-8 text, 8 for the label. Accepts numpy and torch."""
    return sum(r[f].nbytes for f in ARRAYS) + sum(len(r[f].encode()) for f in TEXTS) + 8


@lru_cache(maxsize=1)
def _noise(seed: int) -> np.ndarray:
    """16 MB of random float16, drawn once: taking a record from it costs a memcpy."""
    return np.random.default_rng((seed, 0)).standard_normal(1 << 23, dtype=np.float32).astype(np.float16)
