"""Traces and reads with fields of all kinds, and their features."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import millstream as ms
from millstream.core.batches import fetch_batch
from millstream.core.features import Feature

REGEX = r"lbl\|(?P<class_id>\d+)"
NUMBERS = [11, 2, 7, 13, 0]


def record(number: int) -> dict[str, object]:
    """Two layers and an embedding, 3 to 7 tokens, three heads, causal attention."""
    rng = np.random.default_rng(number)
    tokens = 3 + number % 5
    attention = np.tril(rng.random((2, 3, tokens, tokens), np.float32))
    return {
        "question_id": f"q{number}",
        "question": f"Wer mahlt {number}?",
        "prompt_len": 1 + number % 3,
        "score": number / 4,
        "verdict": None if number == 6 else "right",
        "hidden": rng.normal(size=(3, tokens, 4)).astype(np.float16),
        "attention": attention / attention.sum(axis=-1, keepdims=True),
        "vector": np.full(5, number, np.float32),
        "map": rng.normal(size=(1 + number % 3, 1 + number % 2, 2)).astype(np.float32),
        "grade": torch.arange(1 + number % 4).to(torch.bfloat16) + number,
        "maybe": None if number in (4, 5) else np.ones(3, np.float32),
    }


def write_traces(path: Path) -> ms.Traces:
    with ms.TraceWriter(path, shard_records=7, schema={"hidden": "float16[layer, token, dim]"}) as writer:
        writer.extend(record(number) for number in range(20))
    opened = ms.open(path)
    assert isinstance(opened, ms.Traces)
    return opened


def write_reads(path: Path) -> ms.Reads:
    rng = np.random.default_rng(0)
    lines = [f">lbl|{i % 4}\n{''.join(rng.choice(list('ACGTNacgt'), 40 + i % 30))}\n" for i in range(200)]
    path.write_text("".join(lines))
    opened = ms.open(path, header_regex=REGEX)
    assert isinstance(opened, ms.Reads)
    return opened


def make(feature: Feature, collection: ms.Collection, numbers: Sequence[int], **drawn: int) -> dict[str, Any]:
    return dict(feature(fetch_batch(collection, np.array(numbers, np.int64), feature.fields), **drawn))


def padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """A slow reference for padding: value by value."""
    shape = [max(array.shape[axis] for array in arrays) for axis in range(arrays[0].ndim)]
    out = np.zeros((len(arrays), *shape), arrays[0].dtype)
    for row, array in enumerate(arrays):
        for place in np.ndindex(array.shape):
            out[(row, *place)] = array[place]
    return out
