"""Fetched columns of traces -> what the old datasets gave of each trace: a sequence, or a list of graphs.

All tensors of a fetch are views of few large ones: torch opens a file for each that a worker process sends, and a batch
of graphs sent one by one is "too many open files".
"""

# B batch, L layers, H heads, T tokens, D hidden, E edges

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Protocol, cast

import numpy as np
import torch

from millstream.collection import Numbers
from millstream.dataset.batch import TraceBatch
from millstream.dataset.graph_feature import GraphFeature
from millstream.errors import BadSource
from millstream.loader.recipe import as_tensor
from millstream.records import Array

HIDDEN, ATTENTION = ("hidden", "hidden_states"), ("attention", "attentions")
SEQUENCE, GRAPHS = "layers", ("x", "edge_index", "edge_attr", "edge_counts")  # of converted files
EVERY_EDGE = -1.0  # the old script's threshold was `>= 0`

Columns = Mapping[str, object]


@dataclass
class Graph:
    """The graph of a layer, where torch_geometric is not installed: as much of its Data as the old scripts used."""

    x: torch.Tensor
    edge_index: torch.Tensor
    edge_attr: torch.Tensor | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.x)


class Maker(Protocol):
    """Makes what a model sees of each trace."""

    @property
    def fields(self) -> tuple[str, ...]: ...
    @property
    def one_by_one(self) -> bool:
        """Whether traces are much larger than what is made of them, so that one at a time is fetched."""
        ...

    def __call__(self, columns: Columns, numbers: Numbers) -> Sequence[object]: ...


def sequence_maker(names: Sequence[str]) -> Maker:
    """For traces with these fields, the last token of every layer [L, D]."""
    if SEQUENCE in names:
        return Sequences()
    return LastTokens(_first_of(names, HIDDEN, f"{SEQUENCE!r} of preprocessed files"))


def graph_maker(names: Sequence[str]) -> Maker:
    """For traces with these fields, the graph of every layer."""
    if set(GRAPHS) <= set(names):
        return Graphs()
    instead = f"{', '.join(map(repr, GRAPHS))} of preprocessed files"
    return AttentionGraphs(_first_of(names, HIDDEN, instead), _first_of(names, ATTENTION, instead))


@dataclass(frozen=True)
class Sequences:
    """From preprocessed files: as they are."""

    fields = (SEQUENCE,)
    one_by_one = False

    def __call__(self, columns: Columns, numbers: Numbers) -> Sequence[object]:
        layers = columns[SEQUENCE]
        if isinstance(layers, list):  # of different shapes
            return [_tensor(value) for value in cast("list[object]", layers)]
        return _tensor(layers).unbind()


@dataclass(frozen=True)
class LastTokens:
    """From hidden states."""

    hidden: str
    one_by_one = True

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.hidden,)

    def __call__(self, columns: Columns, numbers: Numbers) -> Sequence[object]:
        made: list[object] = []
        for number, states in zip(numbers.tolist(), cast("Iterable[object]", columns[self.hidden]), strict=True):
            if states is None or (states_LTD := _tensor(states)).ndim != 3:
                raise ValueError(f"record {number}: {self.hidden!r} is not [layer, token, dim]")
            made.append(states_LTD[:, -1].clone())  # the other tokens need not stay in memory
        return made


@dataclass(frozen=True)
class Graphs:
    """From preprocessed files: as they are."""

    fields = GRAPHS
    one_by_one = False

    def __call__(self, columns: Columns, numbers: Numbers) -> Sequence[object]:
        rows = zip(*(cast("Iterable[object]", columns[name]) for name in GRAPHS), strict=True)
        return [
            _split(_tensor(x), _tensor(edges), None if weights is None else _tensor(weights), cast(Numbers, counts))
            for x, edges, weights, counts in rows
        ]


@dataclass(frozen=True)
class AttentionGraphs:
    """From hidden states and attention, as the old script made them.

    An edge goes from every token to itself and to each later one; its weight is the attention, the mean over heads.
    """

    hidden: str
    attention: str
    one_by_one = True

    @property
    def fields(self) -> tuple[str, ...]:
        return self.hidden, self.attention

    def __call__(self, columns: Columns, numbers: Numbers) -> Sequence[object]:
        made: list[object] = []
        for place, number in enumerate(numbers.tolist()):
            record = {name: cast("Sequence[object]", columns[name])[place : place + 1] for name in self.fields}
            states = record[self.hidden]
            dtype = cast(Array, states).dtype.name if isinstance(states, np.ndarray) else "float32"  # for bfloat16
            feature = GraphFeature(None, EVERY_EDGE, self.hidden, self.attention, self_loops=True, dtype=dtype)
            union = feature(TraceBatch(np.array([number]), record))
            ptr = cast(Numbers, union["ptr"])
            edges = cast(Numbers, union["edge_index"])
            starts = np.searchsorted(edges[1], ptr)  # targets ascend from layer to layer
            counts = np.diff(starts)
            x_LTD = _tensor(cast(Array, union["x"]).reshape(len(counts), -1, cast(Array, union["x"]).shape[1]))
            weights = _tensor(union["edge_attr"]).squeeze(1)
            made.append(_split(x_LTD, _tensor(edges - np.repeat(ptr[:-1], counts)), weights, counts))
        return made


def _split(
    x_LTD: torch.Tensor, edge_index_2E: torch.Tensor, edge_attr_E: torch.Tensor | None, counts_L: Numbers
) -> list[object]:
    """The graph of each layer; the edges of all layers stand one after the other."""
    make, sizes = _graph_type(), cast("list[int]", counts_L.tolist())
    edges = torch.split(edge_index_2E, sizes, dim=1)
    weights = [None] * len(sizes) if edge_attr_E is None else torch.split(edge_attr_E, sizes)
    return [make(x=x, edge_index=e, edge_attr=w) for x, e, w in zip(x_LTD.unbind(), edges, weights, strict=True)]


@cache
def _graph_type() -> Callable[..., object]:
    try:
        return cast("Callable[..., object]", import_module("torch_geometric.data").Data)
    except ImportError:
        return Graph


def _tensor(value: object) -> torch.Tensor:
    return cast(torch.Tensor, as_tensor(value))


def _first_of(names: Sequence[str], wanted: Sequence[str], instead: str) -> str:
    found = next((name for name in wanted if name in names), None)
    if found is None:
        raise BadSource(
            f"the traces have no {' or '.join(map(repr, wanted))} (or {instead}), only {', '.join(map(repr, names))}"
        )
    return found
