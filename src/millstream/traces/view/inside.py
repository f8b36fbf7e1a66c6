"""One trace as the page shows it: tokens, layers, the attention of one layer, scores after each layer.

Reads only what is shown.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from millstream.core.record import Tensor
from millstream.core.remote import to_path
from millstream.errors import BadSetting, BadSource, MillstreamError
from millstream.traces.convert import imported_fields, names_of
from millstream.traces.kind import POSITIONS, THINKING
from millstream.traces.store.manifest import TOKENIZER
from millstream.traces.store.traces import Traces
from millstream.training.folder import CHECKPOINTS, WEIGHTS, JobKey

if TYPE_CHECKING:
    from millstream.training.study import NetModel

STEPS = ("logprobs", "entropy", "rank")
NUM_ALTERNATIVES = 10
MAX_EDGES = 32
NET_MEMORY = 200_000_000  # bytes, for the inputs of a few traces

Floats = NDArray[np.float32]


def tokens_of(traces: Traces, number: int, texts: TokenTexts) -> dict[str, Any]:
    """Texts of all tokens; statistics and most likely alternatives of each generated token."""
    names = [name for name in ("tokens", *STEPS, "topk_ids", "topk_logprobs") if _is_tensor(traces, name)]
    prompt_len = next((name for name in names_of("prompt_len") if name in traces.fields), "prompt_len")
    names += [name for name in (prompt_len, "answer_len") if name in traces.fields]
    found = _record(traces, number, names)
    ids = found.get("tokens")
    ids = [] if ids is None else [int(token) for token in np.asarray(ids).reshape(-1)]
    steps = {name: None if found.get(name) is None else _floats(found[name]).reshape(-1) for name in STEPS}
    start = found.get(prompt_len)
    if start is None or start >= len(ids):  # unknown, or the prompt is not among the tokens
        generated = max((len(values) for values in steps.values() if values is not None), default=len(ids))
        start = max(0, len(ids) - generated)
    top_ids, top_logprobs = found.get("topk_ids"), found.get("topk_logprobs")
    alternatives: list[list[dict[str, Any]]] = []
    if top_ids is not None and top_logprobs is not None and top_ids.ndim == top_logprobs.ndim == 2:
        probabilities = np.exp(_floats(top_logprobs)[:, :NUM_ALTERNATIVES]).tolist()
        for row, values in zip(top_ids[:, :NUM_ALTERNATIVES].tolist(), probabilities, strict=False):
            ranked = zip(texts.of(row), row, values, strict=False)
            alternatives.append(
                [{"text": text, "id": token, "probability": probability} for text, token, probability in ranked]
            )
    return {
        "ids": ids,
        "texts": texts.of(ids),
        "problem": texts.problem,  # why ids are shown instead of texts
        "start": int(start),  # the first generated token
        "answer_len": found.get("answer_len"),
        **steps,
        "alternatives": alternatives,
    }


def layers_of(traces: Traces, number: int) -> dict[str, Any] | None:
    """Norm of the state after each layer, and its cosine similarity to the previous one, at every stored position."""
    kept = traces.row(number).tensors
    name = next((name for name in (*names_of("hidden"), "states", "nodes") if kept.get(name) is not None), None)
    if name is None:
        return None
    states_LPD, join = _floats(_record(traces, number, [name])[name]), _joiner(traces, number, name)
    if join and states_LPD.ndim == 2:
        states_LPD = join(states_LPD)
    if states_LPD.ndim != 3:
        return None
    norm_LP = np.sqrt(np.einsum("lpd,lpd->lp", states_LPD, states_LPD))
    dot_LP = np.einsum("lpd,lpd->lp", states_LPD[1:], states_LPD[:-1])
    with np.errstate(invalid="ignore", divide="ignore"):
        cosine_LP = dot_LP / (norm_LP[1:] * norm_LP[:-1])
    first = np.full((1, norm_LP.shape[1]), np.nan, np.float32)  # the embedding has no previous layer
    return {
        "field": name,
        "positions": [*POSITIONS, *THINKING][: norm_LP.shape[1]] if name == "states" else None,  # None: all tokens
        "norm": norm_LP,
        "cosine": np.concatenate([first, cosine_LP]),
    }


def attention_of(traces: Traces, number: int, *, layer: int, head: str, k: int) -> dict[str, Any] | None:
    """The `k` earlier tokens that each token attends to most in a layer: in one head, or in the mean over heads."""
    name = next((name for name in names_of("attention") if _is_tensor(traces, name)), None)
    k = max(1, min(k, MAX_EDGES))
    if name is not None:
        weights, join = _layer(traces, number, name, layer), _joiner(traces, number, name)
        if weights is not None and weights.ndim == 1 and join:
            weights = join(weights[None])[0]
        if weights is None or weights.ndim != 3:
            return None
        return _strongest(weights, head=head, k=k)
    if not _is_tensor(traces, "edge_source"):
        return None
    source, weight = (_layer(traces, number, kept, layer) for kept in ("edge_source", "edge_weight"))
    if source is None or weight is None:
        return None
    if head != "mean":
        raise BadSetting(f"head={head}: this store has only the mean over heads (tier=full keeps all heads)")
    return {"num_heads": 0, "most": source.shape[1], "source": source[:, :k].astype(np.int64), "weight": weight[:, :k]}


def num_layers(traces: Traces, number: int) -> int:
    """The number of layers with attention in a record."""
    row = traces.row(number)
    for name in (*names_of("attention"), "edge_source"):
        place = row.tensors.get(name)
        num_axes = 3 if name == "edge_source" else 2 if _joiner(traces, number, name) else 4
        if place is not None and len(place.shape) == num_axes:
            return place.shape[0]
    return 0


class TokenTexts:
    """Texts of single tokens; without a tokenizer their ids, and `problem` says why."""

    def __init__(self, file: Path | None) -> None:
        self._tokenizer, self.problem = _load(file)

    def of(self, ids: Sequence[int]) -> list[str]:
        return [str(token) if self._tokenizer is None else self._one(int(token)) for token in ids]

    @lru_cache(maxsize=65_536)  # noqa: B019  lives as long as the server
    def _one(self, token: int) -> str:
        piece = self._tokenizer.id_to_token(token) if token >= 0 else None  # -100 marks ignored tokens
        if piece is None:
            return f"<{token}>"
        if "\u2581" in piece:  # the space of SentencePiece, which decoding a single token drops
            return piece.replace("\u2581", " ")
        return self._tokenizer.decode([token], skip_special_tokens=False) or piece


def find_tokenizer(store: Path, given: str | None) -> Path | None:
    """The given tokenizer file, or that of the store."""
    if given is not None:
        path = to_path(given)
        file = path / TOKENIZER if path.is_dir() else path
        if not file.is_file():
            raise BadSource(f"--tokenizer {given}: contains no {TOKENIZER}")
        return file
    return store / TOKENIZER if (store / TOKENIZER).is_file() else None


class LayerScores:
    """Scores of the nets of a run if each layer were the last. Nets are restored once; scores are means over seeds."""

    def __init__(self, run: Path, traces: Traces) -> None:
        self._traces = traces
        self._lock = threading.Lock()  # one trace at a time: torch uses all cores anyway
        self._models = _restore_nets(run, traces)
        if self._models and len(traces):  # build the nets now, which takes seconds; a failed record builds none
            with suppress(MillstreamError, ValueError):
                self.of(0)

    def of(self, number: int) -> dict[str, Any]:
        """By detector: `layers`, 0 is the embedding, and the score after each; the last one is the final score."""
        record = self._traces.subset([number])
        found: dict[str, NDArray[np.float64]] = {}
        from millstream.traces.detectors import scores_by_layer

        with self._lock:
            for name, models in self._models.items():
                scores = [scores_by_layer(model, record) for model in models]
                known = [rows[0] for rows in scores if rows is not None]
                if known:
                    found[name] = np.mean(known, axis=0)
        read = {name: _read_layers(self._models[name][0], len(scores)) for name, scores in found.items()}
        count = max((count for _, count in read.values()), default=0)
        return {
            name: {"layers": [layer + count for layer in layers], "scores": found[name]}
            for name, (layers, _) in read.items()
        }


def _read_layers(model: NetModel, num_scores: int) -> tuple[Sequence[int], int]:
    """The layers that a net reads, counted from the last, -1, and how many there are: graphs have no embedding."""
    from millstream.traces.detectors.layer_nets import SpacedModel

    if isinstance(model, SpacedModel):
        return model.layers, model.num_layers + 1
    return range(-num_scores, 0), num_scores


def _restore_nets(run: Path, traces: Traces) -> Mapping[str, Sequence[NetModel]]:
    """The nets of a run that read layer by layer, by name; empty for an evaluation, which has only scores."""
    files = sorted((run / CHECKPOINTS).glob(f"*/{WEIGHTS}"))
    if not files:
        return {}
    # These import torch, which takes seconds: only a run with nets should wait for it.
    from millstream.traces.detectors import NETS, DetectorSpec
    from millstream.traces.evaluate import load_detector_run
    from millstream.training.devices import ScoringDevice
    from millstream.training.folder import load
    from millstream.training.study import NetModel, Workplace
    from millstream.training.task import FitResources

    models: defaultdict[str, list[NetModel]] = defaultdict(list)
    place = Workplace(load_detector_run(run)[0], ScoringDevice.default(), str(run))
    for file in files:
        job = JobKey.parse(file.parent.name)
        if job is None or job.fold > 1 or job.labels:  # of a cross-validation, the first fold
            continue
        if job.model not in NETS or NETS[job.model].family in ("charm", "token-lstm"):
            continue
        resources = FitResources(job.seed, NET_MEMORY)
        built = DetectorSpec(job.model, traces.field_names).build(resources=resources, place=place)
        assert isinstance(built.model, NetModel)
        built.model.arrays = {key: tensor.numpy() for key, tensor in load(file)[0].items()}
        models[job.model].append(built.model)
    return models


def _strongest(weights_HQK: Floats, *, head: str, k: int) -> dict[str, Any]:
    num_heads, queries, keys = weights_HQK.shape
    if head not in ("mean", *map(str, range(num_heads))):
        raise BadSetting(f"head={head}: must be mean or 0 to {num_heads - 1}")
    weights_QK = weights_HQK.mean(axis=0) if head == "mean" else weights_HQK[int(head)]
    before = max(0, keys - queries)  # tokens whose attention is not stored
    weights_QK = np.pad(weights_QK, ((before, 0), (0, 0)))
    earlier = np.tril(np.ones(weights_QK.shape, np.bool_), -1)
    weights_QK = np.where(earlier, weights_QK, 0)
    source = np.argsort(-weights_QK, axis=1, kind="stable")[:, :k]
    weight = np.take_along_axis(weights_QK, source, axis=1)
    return {
        "num_heads": num_heads,
        "most": MAX_EDGES,
        "source": np.where(weight > 0, source, -1),
        "weight": weight,
    }


def _joiner(traces: Traces, number: int, name: str) -> Callable[[Floats], Floats] | None:
    """A function that joins the pieces of a field that an importer stored in pieces; None for other fields."""
    for others in imported_fields():
        kept = others.shapes_field(name)
        shapes = _record(traces, number, [kept])[kept] if kept in traces.fields else None
        if shapes:
            return partial(others.join, name, number, shapes=shapes)
    return None


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
    """As float32; bfloat16, which numpy lacks, comes as a torch tensor."""
    return np.asarray(values if isinstance(values, np.ndarray) else values.float().numpy(), np.float32)


def _load(file: Path | None) -> tuple[Any, str | None]:
    """The tokenizer, or None and the reason."""
    if file is None:
        return None, f"the store has no {TOKENIZER}; give --tokenizer"
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None, "token texts need tokenizers: pip install 'millstream[view]'"
    try:
        return Tokenizer.from_str(file.read_text("utf-8")), None
    except Exception as error:  # the library raises bare Exceptions
        return None, f"{file}: is not a valid tokenizer ({error})"
