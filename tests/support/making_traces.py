"""A small store of synthetic traces with all fields, whose labels can be predicted from several of them.

Each record has a hidden doubt z; its answer is wrong if z plus some noise is above zero. As z grows, the log-probs of
the answer fall, hidden states of layer 2 move, head 0 of layer 0 attends less to the prompt, and the topological
divergence of head 1 of layer 1 grows. The stop token after the answer has random log-probs.
"""

# L layers, H heads, T tokens, N generated, D hidden, K most likely tokens

from pathlib import Path

import numpy as np
import pyarrow as pa

import millstream as ms
from millstream.core.record import Tensor
from millstream.core.tables import publish_table
from millstream.traces.llm.fields import NODE_DIM, NUM_EDGES, NUM_EIGENVALUES, TOP_K, parse_fields

INFORMATIVE_LAYER = 2  # the layer of `states` and `hidden` that depends on z; 0 is the embedding
_VOCAB = 50
TOPOLOGY = Tensor("float32", ("layer", "head"))


def make_traces(
    path: Path,
    *,
    num: int = 120,
    layers: int = 3,
    heads: int = 2,
    dim: int = 16,
    seed: int = 0,
    tier: str = "probe",
    noise: float = 0.3,
) -> Path:
    """Write a store and its labels.parquet (question_id, verdict, label); `noise` blurs the labels.

    Tier "probe" has states, nodes and edges; "full" has hidden and attention instead.
    """
    rng = np.random.default_rng(seed)
    way_D = rng.normal(size=dim)
    projection = rng.normal(size=(dim, NODE_DIM)) / dim**0.5
    doubt = rng.normal(size=num)
    wrong = doubt + noise * rng.normal(size=num) > 0
    topology = np.random.default_rng(seed + 1).normal(size=(num, layers, heads))
    topology[:, 1 % layers, 1 % heads] += doubt
    schema = {"p_true": "float32", "topology": TOPOLOGY, **parse_fields(tier, None, stored="float16").schema()}
    for name in ("post_norm", "offsets", "given_logprobs"):
        schema.pop(name, None)
    with ms.TraceWriter(path, schema=schema, shard_records=50) as writer:
        for number in range(num):
            record = _tokens(rng, number, float(doubt[number]))
            if seed:  # other questions under the same ids
                record["question"] = f"Who mills {number} in the year {seed}?"
            hidden = rng.normal(size=(layers + 1, len(record["tokens"]), dim))
            hidden[min(INFORMATIVE_LAYER, layers), record["prompt_len"] - 1 :] += doubt[number] * way_D
            made = {**record, **_states(hidden, record), **_attention(rng, record, layers, heads, float(doubt[number]))}
            made |= {"nodes": hidden @ projection, "topology": topology[number]}
            kept = {name: np.asarray(made[name], kind.dtype) for name, kind in schema.items() if name != "p_true"}
            writer.append({**record, **kept})
    verdicts = np.where(wrong, "wrong", "right").tolist()
    table = {"question_id": [f"q{number}" for number in range(num)], "verdict": verdicts, "label": wrong.astype(int)}
    publish_table(path / "labels.parquet", pa.table(table))
    return path


def labelled(path: Path) -> ms.Collection:
    """The store with its labels, as input of detectors."""
    return ms.labelled(ms.open(path), column="verdict", values={"right": 0, "wrong": 1}, missing="drop")


def _tokens(rng: np.random.Generator, number: int, doubt: float) -> dict:
    prompt_len, answer_len = int(rng.integers(4, 9)), int(rng.integers(1, 6))
    steps = answer_len + int(number % 5 != 0)  # a stop token, unless the answer was cut off
    sure = np.exp(1.2 - 0.5 * doubt + 0.2 * rng.normal(size=steps))
    sure[answer_len:] = np.exp(rng.normal(size=steps - answer_len))
    logits_NV = sure[:, None] * rng.normal(size=(steps, _VOCAB))
    logprobs_NV = logits_NV - np.log(np.exp(logits_NV).sum(axis=1, keepdims=True))
    order_NK = np.argsort(-logprobs_NV, axis=1)[:, :TOP_K]
    top_NK = np.take_along_axis(logprobs_NV, order_NK, axis=1)
    rank_N = np.where(rng.random(steps) < 0.1, rng.integers(1, 4, steps), 0)
    return {
        "question_id": f"q{number}",
        "question": f"Who mills {number}?",
        "answer": "the miller",
        "aliases": ["the miller"],
        "generated_answer": " ".join(["word"] * int(rng.integers(1, 5))),
        "prompt_len": prompt_len,
        "answer_len": answer_len,
        "status": "ok",
        "p_true": float(1 / (1 + np.exp(doubt + rng.normal()))),
        "tokens": rng.integers(0, _VOCAB, prompt_len + steps),
        "logprobs": np.take_along_axis(top_NK, rank_N[:, None], axis=1)[:, 0],
        "entropy": -(np.exp(logprobs_NV) * logprobs_NV).sum(axis=1),
        "rank": rank_N,
        "topk_ids": order_NK,
        "topk_logprobs": top_NK,
    }


def _states(hidden_LTD: np.ndarray, record: dict) -> dict:
    prompt, answer = record["prompt_len"], record["answer_len"]
    places = [hidden_LTD[:, place] for place in (prompt - 1, prompt, prompt + answer - 1)]
    mean = hidden_LTD[:, prompt : prompt + answer].mean(axis=1)
    return {"hidden": hidden_LTD, "states": np.stack([*places, mean], axis=1)}


def _attention(rng: np.random.Generator, record: dict, layers: int, heads: int, doubt: float) -> dict:
    """Attention of every head, and the fields that `traces/llm/capture.py` derives from it."""
    count, prompt = len(record["tokens"]), record["prompt_len"]
    logits = rng.normal(size=(layers, heads, count, count))
    logits[0, 0, :, :prompt] -= doubt
    weights = np.tril(np.exp(logits))
    weights /= weights.sum(axis=-1, keepdims=True)
    own = weights.diagonal(axis1=2, axis2=3)
    eigenvalues = np.sort(weights.sum(axis=2) / np.arange(count, 0, -1) - own, axis=-1)[..., ::-1]
    top = np.zeros((layers, heads, NUM_EIGENVALUES))
    top[..., : min(count, NUM_EIGENVALUES)] = eigenvalues[..., :NUM_EIGENVALUES]
    rows = weights[:, :, prompt - 1 :]
    earlier = np.tril(weights.mean(axis=1), -1)
    source = np.argsort(-earlier, axis=-1, kind="stable")[..., :NUM_EDGES]
    weight = np.take_along_axis(earlier, source, axis=-1)
    missing = ((0, 0), (0, 0), (0, NUM_EDGES - source.shape[-1]))
    return {
        "attention": weights,
        "self_attention": own[:, :, prompt - 1 :],
        "attention_entropy": -(rows * np.log(np.maximum(rows, 1e-30))).sum(axis=-1),
        "prompt_attention": rows[..., :prompt].sum(axis=-1),
        "laplacian": top,
        "attention_logdet": np.log(own).mean(axis=-1),
        "edge_source": np.pad(np.where(weight > 0, source, -1), missing, constant_values=-1),
        "edge_weight": np.pad(weight, missing),
        "edge_rest": 1 - weight.sum(axis=-1),
    }
