"""Graphs that old files were preprocessed into, as one disjoint union: what GraphFeature gives, from saved edges."""

# B batch, L layers, T tokens, D hidden, N nodes, E edges, G graphs = B * L

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from millstream.buffers import empty
from millstream.dataset.batch import Batch, TraceBatch
from millstream.dataset.graph_feature import Floats, Ints, Wiring, shuffled_sources
from millstream.dataset.layer_feature import as_floats
from millstream.records import Array

if TYPE_CHECKING:
    import torch

SAVED = ("x", "edge_index", "edge_attr", "edge_counts")


@dataclass(frozen=True)
class SavedGraphFeature:
    """What GraphFeature gives, of graphs as they were saved: their edges, self loops among them, and their weights.

    A record has `x` [L, T, D], `edge_index` [2, E] (tokens of a layer; the edges of one layer after those of another),
    `edge_counts` [L] and `edge_attr` [E], or None, which is a weight of 1 for every edge. `x` stays in the precision it
    was saved in: in twice as many bytes there is no more to see.
    """

    wiring: Wiring = "attention"

    @property
    def fields(self) -> list[str]:
        return list(SAVED)

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        if not isinstance(batch, TraceBatch):
            raise ValueError("saved graphs are fields of traces; these records are reads")
        columns = [cast("Sequence[Array | torch.Tensor | None]", batch.columns[name]) for name in SAVED]
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
        """The null graphs: every edge but self loops from any token before, with the same weight; or no edges."""
        if self.wiring == "attention":
            return part.edge_index
        if self.wiring == "none":
            return part.edge_index[:, :0]
        layer = np.repeat(np.arange(len(part.counts)), part.counts)
        source, target = part.edge_index
        return np.stack([shuffled_sources(layer, target, source, seed=part.number), target])


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
                f"{self.counts.tolist()} do not go together, expected [layer, token, dim], [2, edge] and [layer]"
            )

    @property
    def num_tokens(self) -> int:
        return self.x.shape[1]
