"""How old files plug into traces (see `millstream.traces.convert`): recognised, converted to records, used as features.

The old scripts wrote
hidden_states   list of L arrays [T, D], or [layer][step] arrays (1, prompt, D), (1, 1, D), (1, 1, D) ...
attentions      list of L arrays [H, T, T], or [layer][step] arrays (1, H, q, k) with k growing
or both as [step][layer], as `generate` of Hugging Face returns them; these are stored as [layer][step].
Importing this module is fast: the readers of files import torch, so they are imported when a file is read.
"""

# L layers, T tokens, D hidden, H heads, E edges, P values of all steps of a layer, concatenated

import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from millstream.core.batches import Batch, ColumnBatch, Floats, as_floats
from millstream.core.features import Feature, fields
from millstream.core.memory import empty
from millstream.core.record import Array
from millstream.errors import BadSource
from millstream.traces.features import layers
from millstream.traces.graphs import Ints, Wiring, graphs, shuffled_sources

if TYPE_CHECKING:
    import torch

SUFFIXES = (".pkl", ".pkl.gz", ".pt")
NAMES = {
    "hidden": "hidden_states",
    "attention": "attentions",
    "prompt_len": "prompt_length",
    "generated_answer": "generated_answer_clean",
    "aliases": "ground_truth_answers",
    "finish": "cutoff_method",
}
AXES = {
    ("hidden_states", 3): "layer, token, dim",
    ("attentions", 4): "layer, head, query, key",
    ("hidden_states", 2): "layer, value",  # the steps of each layer, concatenated
    ("attentions", 2): "layer, value",
    ("layers", 2): "layer, dim",
    ("x", 3): "layer, token, dim",
    ("edge_index", 2): "end, edge",
    ("edge_attr", 1): "edge",
    ("edge_counts", 1): "layer",
}
SAVED_GRAPHS = ("x", "edge_index", "edge_attr", "edge_counts")
TOKEN_FIELDS = ("tokens", "tokens_full")
_CONTENTS = {None: "traces", "lstm": "preprocessed sequences (lstm)", "gnn": "preprocessed graphs (gnn)"}

Shapes = Sequence[Sequence[int]]


def recognises(path: Path) -> bool:
    """By its suffix, or because it starts like a pickle or a torch file."""
    if path.name.endswith(SUFFIXES):
        return True
    with path.open("rb") as file:
        head = file.read(128)
    if head.startswith(b"\x1f\x8b"):
        try:
            with gzip.open(path) as file:
                head = file.read(1)
        except (OSError, EOFError, zlib.error):
            return False
    return head[:1] == b"\x80" or (head.startswith(b"PK") and b"/data.pkl" in head)


def describe(path: Path) -> str:
    from millstream.classic.preprocessed import is_preprocessed

    return _CONTENTS[is_preprocessed(path)]


def records(path: Path, *, notify: Callable[[str], None]) -> Iterator[dict[str, object]]:
    from millstream.classic.pickles import read_traces
    from millstream.classic.preprocessed import is_preprocessed, read_preprocessed

    if is_preprocessed(path):
        return read_preprocessed(path, notify=notify)
    return map(to_record, read_traces(path, notify=notify))


def layer_feature(field_names: Sequence[str]) -> Feature | None:
    if NAMES["hidden"] in field_names:  # some of these traces do not record where the answer ends
        return _joined(layers("last", field=NAMES["hidden"]), field_names)
    return fields("layers") if "layers" in field_names else None


def graph_feature(field_names: Sequence[str], *, k: int | None, threshold: float, wiring: Wiring) -> Feature | None:
    if {NAMES["hidden"], NAMES["attention"]} <= set(field_names):
        feature = graphs(k, threshold=threshold, wiring=wiring, hidden=NAMES["hidden"], attention=NAMES["attention"])
        return _joined(feature, field_names)
    return SavedGraphFeature(wiring) if set(SAVED_GRAPHS) <= set(field_names) else None


def shapes_field(field: str) -> str:
    """The field with the shapes of the steps of `field`."""
    return f"{field}_steps"


def join(field: str, number: int, values: "Array | torch.Tensor | None", shapes: Shapes | None) -> Floats:
    """Reshape the values [L, P] of a field to hidden states [L, T, D] or attention [L, H, T, T]."""
    if values is None or not shapes or any(len(shape) not in (3, 4) or shape[0] != 1 for shape in shapes):
        raise ValueError(
            f"record {number}: {field!r} has steps of shapes {shapes}, expected one sequence per step: "
            "[1, token, dim] or [1, head, token, token]"
        )
    values_LP = as_floats(values)
    if len(shapes[0]) == 3:
        return values_LP.reshape(len(values_LP), -1, shapes[0][-1])
    size = sum(shape[2] for shape in shapes)
    joined_LHTT = np.zeros((len(values_LP), shapes[0][1], size, size), values_LP.dtype)
    start = token = 0
    for _, heads, queries, keys in shapes:
        end = start + prod((heads, queries, keys))
        block = values_LP[:, start:end].reshape(-1, heads, queries, keys)
        joined_LHTT[:, :, token : token + queries, :keys] = block
        start, token = end, token + queries
    return joined_LHTT


def _joined(feature: Feature, field_names: Sequence[str]) -> Feature:
    """The first scripts stored tensors step by step."""
    return JoinedSteps(feature) if shapes_field(NAMES["hidden"]) in field_names else feature


# -- traces as the scripts wrote them, and records of a store


def to_record(trace: dict[str, object]) -> dict[str, object]:
    """Convert a trace to a record for a store: tensors, numbers, strings, lists of them, None.

    Layers are stacked: [L, ...] from a list of arrays, [L, P] from [layer][step] arrays, each layer's steps flattened
    and concatenated (traces with one step and with many must fit the same field). The field `<name>_steps` has the
    shapes of the steps.

        record = to_record({"hidden_states": [np.zeros((7, 64))] * 12, "global_example_id": 3})
        record["hidden_states"].shape, record["question_id"]  # (12, 7, 64), "3"
    """
    record: dict[str, object] = {}
    for name, value in _layers_first(trace).items():
        try:
            if not _is_nested(value):
                record[name] = _storable(name, value)
            elif shapes_field(name) in trace:
                raise BadSource(
                    f"field {name!r}: its steps need the field {shapes_field(name)!r}, which is taken. Rename it"
                )
            else:
                record[name], record[shapes_field(name)] = _stack_steps(name, cast(Sequence[Sequence[object]], value))
        except (OverflowError, RecursionError, ValueError) as error:
            raise BadSource(f"field {name!r}: cannot be stored: {error}") from error
    if record.get("question_id") is None and record.get("global_example_id") is not None:
        record["question_id"] = str(record["global_example_id"])
    return record


def restore_steps(record: dict[str, object]) -> dict[str, object]:
    """The inverse of `to_record` for [layer][step] fields: nested lists of views, without the `<name>_steps` fields."""
    trace = dict(record)
    for name, value in record.items():
        steps = record.get(shapes_field(name))
        if isinstance(steps, list | tuple | np.ndarray) and _is_tensor(value):
            shapes = [tuple(map(int, shape)) for shape in cast(Sequence[Sequence[int]], steps)]
            trace[name] = _split_steps(cast(Array, value), shapes)
            del trace[shapes_field(name)]
    return trace


# Torch tensors index, slice and reshape like arrays, so they are typed as arrays here.


def _storable(name: str, value: object) -> object:
    if _is_torch(value):
        return cast("torch.Tensor", value).detach().cpu()
    if isinstance(value, np.ndarray):
        array = cast(Array, value)
        if array.dtype.kind == "U":
            return array.tolist()
        if array.dtype.kind not in "biufc":
            raise BadSource(f"field {name!r}: cannot store an array of {array.dtype}, only numbers and strings")
        return array
    if not isinstance(value, list | tuple):
        return _plain(name, value)
    items = cast(Sequence[object], value)
    if any(_is_tensor(item) for item in items):
        return _stack(name, items)
    if name in TOKEN_FIELDS and all(type(item) is int or isinstance(item, np.integer) for item in items):
        return np.array(items, np.int64)
    return _plain(name, items)


def _plain(name: str, value: object) -> object:
    if isinstance(value, np.generic):
        value = cast(object, value.item())
    if isinstance(value, str):
        value.encode()  # Arrow rejects lone surrogates, pickle does not
    elif isinstance(value, list | tuple):
        return [_plain(name, item) for item in cast(Sequence[object], value)]
    elif isinstance(value, dict):
        return {key: _plain(name, item) for key, item in cast(dict[object, object], value).items()}
    elif not isinstance(value, bool | int | float | bytes | None):
        raise BadSource(f"field {name!r}: cannot store a {type(value).__name__} here, only numbers, strings and lists")
    return value


def _is_tensor(value: object) -> bool:
    return isinstance(value, np.ndarray) or _is_torch(value)


def _is_torch(value: object) -> bool:
    return hasattr(value, "__torch_function__")


def _is_nested(value: object) -> bool:
    """Whether the value is [layer][step] tensors."""
    if not isinstance(value, list | tuple):
        return False
    items = cast(Sequence[object], value)
    layers = [cast(Sequence[object], item) for item in items if isinstance(item, list | tuple)]
    return len(layers) == len(items) and any(_is_tensor(step) for layer in layers for step in layer)


def _layers_first(trace: dict[str, object]) -> dict[str, object]:
    """The trace with hidden states and attentions as [layer][step], also if they are [step][layer].

    The steps of a layer differ in shape: the prompt first, then one token each, seeing more and more. Shapes of hidden
    states are all equal if the prompt has one token; then attentions decide, or the number of tokens.
    """
    nested = {
        name: cast(Sequence[Sequence[object]], trace[name])
        for name in (NAMES["hidden"], NAMES["attention"])
        if _is_nested(trace.get(name))
    }
    found = {name: _order_of_axes(values) for name, values in nested.items()}
    known = {order for order in found.values() if order}
    if len(known) > 1:
        raise BadSource(f"fields {', '.join(map(repr, nested))}: one is [layer][step], the other [step][layer]")
    if nested and not known:
        name, values = next(iter(nested.items()))
        known = {_order_by_counts(trace, name, len(values), len(values[0]))}
    if known != {"step, layer"}:
        return trace
    return {**trace, **{name: list(map(list, zip(*steps, strict=True))) for name, steps in nested.items()}}


def _order_of_axes(values: Sequence[Sequence[object]]) -> str | None:
    """None if the shapes fit both orders. If they fit neither, they are reported when they are stacked."""
    shapes = [[tuple(getattr(item, "shape", ())) for item in inner] for inner in values]
    by_layer = all(inner == shapes[0] for inner in shapes)
    by_step = all(len(inner) == len(shapes[0]) and len(set(inner)) == 1 for inner in shapes)
    if by_layer and by_step:
        return None
    return "step, layer" if by_step else "layer, step"


def _order_by_counts(trace: dict[str, object], name: str, outer: int, inner: int) -> str:
    if inner == 1:  # one step: a model has at least two hidden states
        return "layer, step"
    if outer == 1:
        return "step, layer"
    counts = {
        len(cast(Sequence[object], trace[field])) for field in TOKEN_FIELDS if hasattr(trace.get(field), "__len__")
    }
    prompt = trace.get(NAMES["prompt_len"])
    counts |= {count - prompt for count in counts if isinstance(prompt, int)}
    if (outer in counts) == (inner in counts):
        raise BadSource(
            f"field {name!r}: {outer} lists of {inner} tensors of one shape can be [layer][step] or [step][layer]. "
            "Save one array [token, dim] per layer"
        )
    return "step, layer" if outer in counts else "layer, step"


def _stack(name: str, items: Sequence[object]) -> Array:
    """Stack tensors of equal shape along a new first axis. (np.stack would change the byte order.)"""
    first, *_ = tensors = _of_one_kind(name, items)
    if any(tensor.shape != first.shape for tensor in tensors):
        shapes = ", ".join(sorted({str(tuple(tensor.shape)) for tensor in tensors})[:4])
        raise BadSource(f"field {name!r}: expected tensors of one shape, found {shapes}")
    stacked = _empty((len(tensors), *first.shape), first)
    for number, tensor in enumerate(tensors):
        stacked[number] = tensor
    return stacked


def _stack_steps(name: str, layers: Sequence[Sequence[object]]) -> tuple[Array, list[list[int]]]:
    tensors = _of_one_kind(name, [step for layer in layers for step in layer])
    shapes = [tuple(tensor.shape) for tensor in tensors]
    num_steps = len(layers[0])
    steps = shapes[:num_steps]
    for number, layer in enumerate(layers):
        if len(layer) != num_steps or shapes[number * num_steps : (number + 1) * num_steps] != steps:
            raise BadSource(f"field {name!r}: the steps of layer {number} differ in shape from those of layer 0")
    stacked = _empty((len(layers), sum(map(prod, steps))), tensors[0])
    for number, place in enumerate(place for layer in _split_steps(stacked, steps) for place in layer):
        place[...] = tensors[number]
    return stacked, [list(shape) for shape in steps]


def _split_steps(stacked: Array, steps: list[tuple[int, ...]]) -> list[list[Array]]:
    """[layer][step] views of [L, P]."""
    bounds = list(pairwise(accumulate(map(prod, steps), initial=0)))
    return [
        [layer[start:stop].reshape(shape) for (start, stop), shape in zip(bounds, steps, strict=True)]
        for layer in stacked
    ]


def _of_one_kind(name: str, items: Sequence[object]) -> list[Array]:
    kinds = {(type(item).__name__, str(getattr(item, "dtype", ""))) for item in items}
    if len(kinds) > 1:
        found = ", ".join(sorted(" ".join(kind) for kind in kinds)[:4])
        raise BadSource(f"field {name!r}: expected tensors of one kind and dtype, found {found}")
    return [cast(Array, _storable(name, item)) for item in items]


def _empty(shape: tuple[int, ...], like: object) -> Array:
    if _is_torch(like):
        return cast(Array, cast("torch.Tensor", like).new_empty(shape))
    return np.empty(shape, cast(Array, like).dtype)


# -- features


@dataclass(frozen=True)
class SavedGraphFeature:
    """The output of GraphFeature from saved graphs, with their own edges (self-loops included) and weights.

    A record has `x` [L, T, D], `edge_index` [2, E] (tokens of a layer; the edges of all layers are concatenated),
    `edge_counts` [L] and `edge_attr` [E], or None for weights of 1. `x` keeps the precision it was saved in: upcasting
    would double the memory and add no information.
    """

    wiring: Wiring = "attention"

    @property
    def fields(self) -> list[str]:
        return list(SAVED_GRAPHS)

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        if not isinstance(batch, ColumnBatch):
            raise ValueError("saved graphs are a feature of traces; these records are reads")
        columns = [cast("Sequence[Array | torch.Tensor | None]", batch.columns[name]) for name in SAVED_GRAPHS]
        parts = [_Graphs(number, *values) for number, *values in zip(batch.numbers.tolist(), *columns, strict=True)]
        layers = np.array([len(part.counts) for part in parts], np.int64)
        sizes = np.repeat(np.array([part.num_tokens for part in parts], np.int64), layers)
        ptr = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=ptr[1:])
        width, dtype = (parts[0].x.shape[-1], np.result_type(*(part.x for part in parts))) if parts else (0, np.float32)
        x = empty((int(ptr[-1]), width), dtype)
        np.concatenate([x[:0], *(part.x.reshape(-1, width) for part in parts)], out=x)
        counts = np.concatenate([np.empty(0, np.int64), *(part.counts for part in parts)])
        edges = [np.empty((2, 0), np.int64), *(self._rewired(part) for part in parts)]
        if self.wiring == "none":
            counts = np.zeros_like(counts)
        weights = [part.weight[: edges[row].shape[1]] for row, part in enumerate(parts, 1)]
        return {
            "x": x,
            "edge_index": np.concatenate(edges, axis=1) + np.repeat(ptr[:-1], counts),
            "edge_attr": np.concatenate([np.empty(0), *weights]).astype(np.float32)[:, None],
            "batch": np.repeat(np.arange(len(sizes)), sizes),
            "ptr": ptr,
            "last": ptr[1:] - 1,
            "num_layers": layers,
        }

    def _rewired(self, part: "_Graphs") -> Ints:
        """The null graphs: each edge but self-loops starts at a random earlier token, same weight; or no edges."""
        if self.wiring == "attention":
            return part.edge_index
        if self.wiring == "none":
            return part.edge_index[:, :0]
        layer = np.repeat(np.arange(len(part.counts)), part.counts)
        source, target = part.edge_index
        return np.stack([shuffled_sources(layer, target, source, seed=part.number), target])


@dataclass(frozen=True)
class JoinedSteps:
    """Apply `feature` to hidden states [L, T, D] and attention [L, H, T, T] joined from per-step values [L, P].

    The first step is the whole prompt, each later one a generated token; `<field>_steps` has their shapes.
    """

    feature: Feature

    @property
    def fields(self) -> list[str]:
        return [name for field in self.feature.fields or () for name in (field, shapes_field(field))]

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        if not isinstance(batch, ColumnBatch):
            raise ValueError("steps are a feature of traces; these records are reads")
        joined: dict[str, Sequence[object]] = {}
        for name in self.feature.fields or ():
            values = cast("Sequence[Array | torch.Tensor | None]", batch.columns[name])
            steps = cast("Sequence[Shapes | None]", batch.columns[shapes_field(name)])
            rows = zip(batch.numbers.tolist(), values, steps, strict=True)
            joined[name] = [join(name, number, value, shapes) for number, value, shapes in rows]
        return self.feature(ColumnBatch(batch.numbers, joined), seed=seed, epoch=epoch)


class _Graphs:
    """The graphs of one record."""

    x: Floats
    edge_index: Ints
    weight: Floats
    counts: Ints

    def __init__(
        self,
        number: int,
        x: "Array | torch.Tensor | None",
        edge_index: "Array | torch.Tensor | None",
        edge_attr: "Array | torch.Tensor | None",
        counts: "Array | torch.Tensor | None",
    ) -> None:
        if x is None or edge_index is None or counts is None:
            raise ValueError(f"record {number} has no graphs")
        self.number = number
        self.x, self.edge_index = as_floats(x), np.asarray(edge_index, np.int64)
        self.counts = np.asarray(counts, np.int64)
        self.weight = np.ones(self.edge_index.shape[1], np.float32) if edge_attr is None else as_floats(edge_attr)
        if self.x.ndim != 3 or len(self.x) != len(self.counts) or self.counts.sum() != self.edge_index.shape[1]:
            raise ValueError(
                f"record {number}: 'x' {self.x.shape}, 'edge_index' {self.edge_index.shape} and 'edge_counts' "
                f"{self.counts.tolist()} do not match, expected [layer, token, dim], [2, edge] and [layer]"
            )

    @property
    def num_tokens(self) -> int:
        return self.x.shape[1]
