"""How old files plug into traces (see `millstream.traces.convert`): recognised, converted to records, used as features.

Importing this module is fast: the readers of files import torch, so they are imported when a file is read.
"""

# L layers, T tokens, D hidden, H heads, E edges, P values of all steps of a layer, concatenated

import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from millstream.classic.records import NAMES, shapes_field, to_record
from millstream.core.batches import Batch, ColumnBatch, Floats, as_floats
from millstream.core.features import Feature, fields
from millstream.core.memory import empty
from millstream.core.record import Array
from millstream.errors import BadSource
from millstream.traces.features import layers
from millstream.traces.graphs import Ints, Wiring, graphs, shuffled_sources
from millstream.traces.hidden_files import AXES as HIDDEN_AXES
from millstream.traces.hidden_files import answer_of, token_ids_of

if TYPE_CHECKING:
    import torch

SUFFIXES = (".pkl", ".pkl.gz", ".pt")
AXES = {
    **HIDDEN_AXES,
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


def has_one_record(path: Path) -> bool:
    """As speculators wrote them before they became safetensors files: data_17.pt."""
    return re.fullmatch(r"data_\d+\.pt", path.name) is not None


def describe(path: Path, *, memory: int | None = None) -> str:
    from millstream.classic.preprocessed import is_preprocessed

    return _CONTENTS[is_preprocessed(path, memory=memory)]


def records(path: Path, *, notify: Callable[[str], None], memory: int | None = None) -> Iterator[dict[str, object]]:
    from millstream.classic.pickles import read_traces
    from millstream.classic.preprocessed import is_preprocessed, read_preprocessed

    if is_preprocessed(path, memory=memory):
        return read_preprocessed(path, notify=notify, memory=memory)
    made = map(to_record, read_traces(path, notify=notify, memory=memory))
    return _located(path, map(partial(_of_speculators, path), made))


def _of_speculators(path: Path, record: dict[str, object]) -> dict[str, object]:
    """The same record, or that of one request with our names: `hidden`, `tokens` and where the answer is."""
    if not {"input_ids", "hidden_states", "loss_mask"} <= record.keys():
        return record
    ids, mask = (np.asarray(record[name]) for name in ("input_ids", "loss_mask"))
    shape = getattr(record["hidden_states"], "shape", ())
    if len(shape) != 3 or shape[1] != len(ids):
        raise BadSource(f"{path}: hidden_states {list(shape)} of {len(ids)} tokens, expected [layer, token, dim]")
    tokens = token_ids_of(ids, str(path))
    return {"tokens": tokens, **answer_of(mask, len(tokens), str(path)), "hidden": record["hidden_states"]}


def _located(path: Path, made: Iterator[dict[str, object]]) -> Iterator[dict[str, object]]:
    """The same records; an error of `to_record` names the file and the trace."""
    number = 0
    try:
        for record in made:
            yield record
            del record  # before the next one is read
            number += 1
    except BadSource as error:
        raise error if str(path) in str(error) else BadSource(f"{path}: trace {number}: {error}") from None


def layer_feature(field_names: Sequence[str]) -> Feature | None:
    if NAMES["hidden"] in field_names:  # some of these traces do not record where the answer ends
        return _joined(layers("last", field=NAMES["hidden"]), field_names)
    return fields("layers") if "layers" in field_names else None


def graph_feature(field_names: Sequence[str], *, k: int | None, threshold: float, wiring: Wiring) -> Feature | None:
    if {NAMES["hidden"], NAMES["attention"]} <= set(field_names):
        feature = graphs(k, threshold=threshold, wiring=wiring, hidden=NAMES["hidden"], attention=NAMES["attention"])
        return _joined(feature, field_names)
    return SavedGraphFeature(wiring) if set(SAVED_GRAPHS) <= set(field_names) else None


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
            "position": np.arange(len(x)) - np.repeat(ptr[:-1], sizes),
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
