"""Data of the training benchmark: synthetic traces of the tier `probe`, shaped as for a 7B model.

Record `i` depends only on `i`. Values are slices of one random array, so a record costs about as much as a memcpy.
"""

# L layers, H heads, T tokens, N generated tokens, D hidden, K edges of a token

from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

import millstream as ms
from millstream.traces.llm.fields import NODE_DIM, NUM_EDGES, NUM_EIGENVALUES, POSITIONS, TOP_K, parse_fields

Record = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """The shape of a language model, and the number of tokens of its prompts and answers."""

    layers: int = 32
    heads: int = 32
    hidden: int = 4096
    prompt: tuple[int, int] = (20, 80)  # from, to
    answer: tuple[int, int] = (2, 8)


def write_store(path: Path, num_bytes: int, shape: Shape) -> int:
    """Write a store of this many bytes; returns its number of records."""
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
    weight_LTK = _fraction(rng, layers, tokens, NUM_EDGES) * np.float16(0.1) * (source_LTK >= 0)
    top_NK = -np.sort(_fraction(rng, steps, TOP_K).astype(np.float32) * 8, axis=1)
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
        "offsets": np.arange(2 * steps, dtype=np.int32).reshape(-1, 2),
        "given_logprobs": None,
        "self_attention": _fraction(rng, layers, heads, rows),
        "attention_entropy": _fraction(rng, layers, heads, rows),
        "prompt_attention": _fraction(rng, layers, heads, rows),
        "laplacian": _fraction(rng, layers, heads, NUM_EIGENVALUES),
        "attention_logdet": -_fraction(rng, layers, heads).astype(np.float32),
        "nodes": normal(rng, layers + 1, tokens, NODE_DIM),
        "edge_source": source_LTK,
        "edge_weight": weight_LTK,
        "edge_rest": _fraction(rng, layers, tokens),
        "states": normal(rng, layers + 1, len(POSITIONS), shape.hidden),
    }


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return _slice(rng, _pool(), shape)


def _fraction(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Values between 0 and 1."""
    return _slice(rng, _fractions(), shape)


def _slice(rng: np.random.Generator, pool: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape))
    start = int(rng.integers(pool.size - size))
    return pool[start : start + size].reshape(shape)


@lru_cache(maxsize=1)
def _pool() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(1 << 23, dtype=np.float32).astype(np.float16)


@lru_cache(maxsize=1)
def _fractions() -> np.ndarray:
    return np.random.default_rng(0).uniform(0.01, 0.99, 1 << 20).astype(np.float16)
