"""The data of the training benchmark: made-up traces of the tier `probe`, shaped like a 7B model's, and token graphs.

Record `i` depends on `i` alone. Numbers are cut out of one long draw of chance: writing costs about what a memcpy does.
"""

# L layers, H heads, T tokens, N generated tokens, D hidden, K edges of a token

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

import millstream as ms
from millstream.source.llm.fields import NODE_DIM, NUM_EDGES, NUM_EIGENVALUES, POSITIONS, TOP_K, parse_fields

Record = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Of a language model, and how many tokens its prompts and answers have."""

    layers: int = 32
    heads: int = 32
    hidden: int = 4096
    prompt: tuple[int, int] = (20, 80)  # from, to
    answer: tuple[int, int] = (2, 8)


def write_store(path: Path, num_bytes: int, shape: Shape) -> int:
    """A store of so many bytes; how many records it has."""
    schema = parse_fields("probe", None, stored="float16").schema()
    written = 0
    with ms.TraceWriter(path, schema=schema) as writer:
        for number in count():
            record = trace(number, shape)
            writer.append(record)
            written += sum(value.nbytes for value in record.values() if isinstance(value, np.ndarray))
            if written >= num_bytes:
                return number + 1
    raise AssertionError


def trace(number: int, shape: Shape) -> Record:
    """One record with all fields of the tier `probe` and a label; a stop token follows the answer."""
    rng = np.random.default_rng((1, number))
    prompt, answer = int(rng.integers(*shape.prompt, endpoint=True)), int(rng.integers(*shape.answer, endpoint=True))
    steps, layers, heads = answer + 1, shape.layers, shape.heads
    tokens, rows = prompt + steps, answer + 1
    target_T1 = np.arange(tokens)[:, None]
    source_LTK = (rng.random((layers, tokens, NUM_EDGES), np.float32) * target_T1).astype(np.int16)
    source_LTK = np.where(np.arange(NUM_EDGES) < target_T1, source_LTK, -1).astype(np.int16)
    weight_LTK = _share(rng, layers, tokens, NUM_EDGES) * np.float16(0.1) * (source_LTK >= 0)
    top_NK = -np.sort(_share(rng, steps, TOP_K).astype(np.float32) * 8, axis=1)
    return {
        "question_id": f"q{number:06d}",
        "generated_answer": "a word or two",
        "prompt_len": prompt,
        "answer_len": answer,
        "label": int(rng.integers(2)),
        "tokens": rng.integers(0, 32_000, tokens, np.int32),
        "logprobs": top_NK[:, 0].copy(),
        "entropy": -top_NK.mean(axis=1),
        "rank": np.zeros(steps, np.int32),
        "topk_ids": rng.integers(0, 32_000, (steps, TOP_K), np.int32),
        "topk_logprobs": top_NK,
        "self_attention": _share(rng, layers, heads, rows),
        "attention_entropy": _share(rng, layers, heads, rows),
        "prompt_attention": _share(rng, layers, heads, rows),
        "laplacian": _share(rng, layers, heads, NUM_EIGENVALUES),
        "attention_logdet": -_share(rng, layers, heads).astype(np.float32),
        "nodes": _normal(rng, layers + 1, tokens, NODE_DIM),
        "edge_source": source_LTK,
        "edge_weight": weight_LTK,
        "edge_rest": _share(rng, layers, tokens),
        "states": _normal(rng, layers + 1, len(POSITIONS), shape.hidden),
    }


def graph_records(num: int, *, layers: int, tokens: int, dim: int, k: int | None) -> list[Record]:
    """Hidden states [L, T, D] and head-mean attention [L, T, T] of `num` records, a quarter shorter to longer.

    With `k` only the strongest entries of each token before it are left in `attention`, and the same ones are in
    `edge_source` and `edge_weight` [L, T, k], as the tier `graph` keeps them; without, the diagonal is there as well.
    """
    return list(_graph_records(num, layers, tokens, dim, k))


def _graph_records(num: int, layers: int, tokens: int, dim: int, k: int | None) -> Iterator[Record]:
    for number in range(num):
        rng = np.random.default_rng((2, number))
        size = int(rng.integers(tokens * 3 // 4, tokens * 5 // 4, endpoint=True))
        weights = np.tril(np.exp(rng.standard_normal((layers, size, size))))
        attention = (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float16)
        record = {"hidden": _normal(rng, layers, size, dim), "attention": attention}
        if k is not None:
            earlier = np.tril(attention, -1)
            source = np.argsort(-earlier, axis=-1, kind="stable")[..., :k]
            weight = np.take_along_axis(earlier, source, axis=-1)
            record["attention"] = np.zeros_like(attention)
            np.put_along_axis(record["attention"], source, weight, axis=-1)
            record |= {"edge_source": np.where(weight > 0, source, -1).astype(np.int16), "edge_weight": weight}
        yield record


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return _slice(rng, _pool(), shape)


def _share(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Between 0 and 1."""
    return _slice(rng, _shares(), shape)


def _slice(rng: np.random.Generator, pool: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape))
    start = int(rng.integers(pool.size - size))
    return pool[start : start + size].reshape(shape)


@lru_cache(maxsize=1)
def _pool() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(1 << 23, dtype=np.float32).astype(np.float16)


@lru_cache(maxsize=1)
def _shares() -> np.ndarray:
    return np.random.default_rng(0).uniform(0.01, 0.99, 1 << 20).astype(np.float16)
