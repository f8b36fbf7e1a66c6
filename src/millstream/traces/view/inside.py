"""One trace as a page shows it: its tokens, its layers, the attention of one layer. Reads only what is asked for."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from millstream.errors import BadSetting
from millstream.records import Tensor
from millstream.source.llm.fields import POSITIONS
from millstream.store.traces import Traces
from millstream.view.token_texts import TokenTexts

STEPS = ("logprobs", "entropy", "rank")
HIDDEN, ATTENTION = ("hidden", "hidden_states"), ("attention", "attentions")
NUM_ALTERNATIVES = 10
MOST_EDGES = 32

Floats = NDArray[np.float32]


def tokens_of(traces: Traces, number: int, texts: TokenTexts) -> dict[str, Any]:
    """Texts of all tokens, and of each generated one what the model thought of it and what else it might have said."""
    names = [name for name in ("tokens", *STEPS, "topk_ids", "topk_logprobs") if _is_tensor(traces, name)]
    names += [name for name in ("prompt_len", "prompt_length", "answer_len") if name in traces.fields]
    found = _record(traces, number, names)
    ids = found.get("tokens")
    ids = [] if ids is None else [int(token) for token in np.asarray(ids).reshape(-1)]
    steps = {name: None if found.get(name) is None else _floats(found[name]).reshape(-1) for name in STEPS}
    start = found.get("prompt_len", found.get("prompt_length"))
    if start is None or start >= len(ids):  # not told, or the prompt is not among the tokens
        generated = max((len(values) for values in steps.values() if values is not None), default=len(ids))
        start = max(0, len(ids) - generated)
    top_ids, top_logprobs = found.get("topk_ids"), found.get("topk_logprobs")
    alternatives: list[list[dict[str, Any]]] = []
    if top_ids is not None and top_logprobs is not None and top_ids.ndim == top_logprobs.ndim == 2:
        chances = np.exp(_floats(top_logprobs)[:, :NUM_ALTERNATIVES]).tolist()
        for row, values in zip(top_ids[:, :NUM_ALTERNATIVES].tolist(), chances, strict=False):
            said = zip(texts.of(row), row, values, strict=False)
            alternatives.append([{"text": text, "id": token, "chance": chance} for text, token, chance in said])
    return {
        "ids": ids,
        "texts": texts.of(ids),
        "trouble": texts.trouble,  # why texts are ids
        "start": int(start),  # the first generated one
        "answer_len": found.get("answer_len"),
        **steps,
        "alternatives": alternatives,
    }


def layers_of(traces: Traces, number: int) -> dict[str, Any] | None:
    """Norm of each layer's state, and its cosine to the one before, at every token or position that is kept."""
    kept = traces.row(number).tensors
    name = next((name for name in (*HIDDEN, "states", "nodes") if kept.get(name) is not None), None)
    if name is None:
        return None
    states_LPD, steps = _floats(_record(traces, number, [name])[name]), _steps(traces, number, name)
    if steps and states_LPD.ndim == 2:
        states_LPD = _joined(name, number, states_LPD, steps)
    if states_LPD.ndim != 3:
        return None
    norm_LP = np.sqrt(np.einsum("lpd,lpd->lp", states_LPD, states_LPD))
    dot_LP = np.einsum("lpd,lpd->lp", states_LPD[1:], states_LPD[:-1])
    with np.errstate(invalid="ignore", divide="ignore"):
        cosine_LP = dot_LP / (norm_LP[1:] * norm_LP[:-1])
    first = np.full((1, norm_LP.shape[1]), np.nan, np.float32)  # the embedding has none before it
    return {
        "field": name,
        "positions": list(POSITIONS) if name == "states" else None,  # None: those of the tokens
        "norm": norm_LP,
        "cosine": np.concatenate([first, cosine_LP]),
    }


def attention_of(traces: Traces, number: int, *, layer: int, head: str, k: int) -> dict[str, Any] | None:
    """The `k` strongest earlier tokens of every token in a layer: of one head, or of the mean over heads."""
    name = next((name for name in ATTENTION if _is_tensor(traces, name)), None)
    k = max(1, min(k, MOST_EDGES))
    if name is not None:
        weights, steps = _layer(traces, number, name, layer), _steps(traces, number, name)
        if weights is not None and weights.ndim == 1 and steps:
            weights = _joined(name, number, weights[None], steps)[0]
        if weights is None or weights.ndim != 3:
            return None
        return _strongest(weights, head=head, k=k)
    if not _is_tensor(traces, "edge_source"):
        return None
    source, weight = (_layer(traces, number, kept, layer) for kept in ("edge_source", "edge_weight"))
    if source is None or weight is None:
        return None
    if head != "mean":
        raise BadSetting(f"head={head}: the store keeps the mean over heads alone (tier=full keeps all)")
    return {"num_heads": 0, "most": source.shape[1], "source": source[:, :k].astype(np.int64), "weight": weight[:, :k]}


def num_layers(traces: Traces, number: int) -> int:
    """How many layers of attention a record has."""
    row = traces.row(number)
    for name in (*ATTENTION, "edge_source"):
        place = row.tensors.get(name)
        num_axes = 3 if name == "edge_source" else 2 if _steps(traces, number, name) else 4
        if place is not None and len(place.shape) == num_axes:
            return place.shape[0]
    return 0


def _strongest(weights_HQK: Floats, *, head: str, k: int) -> dict[str, Any]:
    num_heads, queries, keys = weights_HQK.shape
    if head not in ("mean", *map(str, range(num_heads))):
        raise BadSetting(f"head={head}: there is mean, and 0 to {num_heads - 1}")
    weights_QK = weights_HQK.mean(axis=0) if head == "mean" else weights_HQK[int(head)]
    before = max(0, keys - queries)  # tokens whose own attention is not kept
    weights_QK = np.pad(weights_QK, ((before, 0), (0, 0)))
    earlier = np.tril(np.ones(weights_QK.shape, np.bool_), -1)
    weights_QK = np.where(earlier, weights_QK, 0)
    source = np.argsort(-weights_QK, axis=1, kind="stable")[:, :k]
    weight = np.take_along_axis(weights_QK, source, axis=1)
    return {
        "num_heads": num_heads,
        "most": MOST_EDGES,
        "source": np.where(weight > 0, source, -1),
        "weight": weight,
    }


def _steps(traces: Traces, number: int, name: str) -> list[list[int]] | None:
    """Shapes of the steps that each layer of a field is made of, as in stores converted from the first old files."""
    kept = f"{name}_steps"
    return _record(traces, number, [kept])[kept] if kept in traces.fields else None


def _joined(name: str, number: int, values_LP: Floats, steps: Sequence[Sequence[int]]) -> Floats:
    from millstream.dataset.joined_steps import join_steps  # brings torch, which other stores do not need

    return join_steps(name, number, values_LP, steps)


def _is_tensor(traces: Traces, name: str) -> bool:
    return isinstance(traces.fields.get(name), Tensor)


def _record(traces: Traces, number: int, names: Sequence[str]) -> dict[str, Any]:
    """The fields of one record."""
    if not names:
        return {}
    return {name: cast("Sequence[Any]", column)[0] for name, column in traces.fetch([number], list(names)).items()}


def _layer(traces: Traces, number: int, name: str, layer: int) -> Floats | None:
    kind = traces.fields[name]
    if isinstance(kind, Tensor) and kind.axes[:1] == ("layer",):
        found = cast("Sequence[Any]", traces.fetch([number], [name], layers=layer)[name])[0]
    else:
        whole = _record(traces, number, [name])[name]
        found = None if whole is None else whole[layer]
    return None if found is None else _floats(found)


def _floats(values: Any) -> Floats:
    """numpy has no bfloat16: such tensors come from torch."""
    return np.asarray(values if isinstance(values, np.ndarray) else values.float().numpy(), np.float32)
