"""Token graphs of all layers of a batch as one disjoint union, for torch_geometric's layers in one call."""

# B batch, L layers, H heads, T tokens, D hidden, N nodes, E edges, G graphs = B * L

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from millstream.buffers import empty
from millstream.dataset.batch import Batch, TraceBatch
from millstream.dataset.layer_feature import as_floats
from millstream.records import Array

Floats = NDArray[np.floating]


@dataclass(frozen=True)
class GraphFeature:
    """Nodes are tokens, edges follow attention from the token attended to (j) to the one that attends (i).

    Gives, for the graphs of record 0 layer 0, record 0 layer 1, ... one after the other:
    `x` [N, D], `edge_index` [2, E], `edge_attr` [E, 1], `batch` [N] (the graph of a node), `ptr` [G + 1] (where the
    nodes of a graph begin), `last` [G] (the node of its last token) and `num_layers` [B]. Made by `ms.features.graphs`.
    """

    k: int | None
    threshold: float
    hidden: str
    attention: str
    self_loops: bool
    dtype: str

    @property
    def fields(self) -> list[str]:
        return [self.hidden, self.attention]

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        if not isinstance(batch, TraceBatch):
            raise ValueError("features.graphs takes hidden states and attention of traces; these records are reads")
        columns = (cast("Sequence[Array | None]", batch.columns[name]) for name in (self.hidden, self.attention))
        records = [self._record(*record) for record in zip(batch.numbers.tolist(), *columns, strict=True)]
        layers = np.array([len(hidden) for hidden, _ in records], np.int64)
        tokens = np.array([hidden.shape[1] for hidden, _ in records], np.int64)
        sizes = np.repeat(tokens, layers)
        ptr = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=ptr[1:])
        width = records[0][0].shape[2] if records else 0
        x = empty((int(ptr[-1]), width), self.dtype)
        edges: list[tuple[NDArray[np.int64], NDArray[np.int64], Floats]] = []
        node = 0
        for hidden, mean in records:
            count = hidden.shape[0] * hidden.shape[1]
            x[node : node + count] = hidden.reshape(count, width)
            layer, target, source = np.nonzero(self._kept(mean))
            base = node + layer * hidden.shape[1]
            edges.append((base + source, base + target, mean[layer, target, source]))
            node += count
        sources, targets, weights = (np.concatenate(part) for part in zip(*edges, strict=True))
        return {
            "x": x,
            "edge_index": np.stack([sources, targets]),
            "edge_attr": weights.astype(self.dtype)[:, None],
            "batch": np.repeat(np.arange(len(sizes)), sizes),
            "ptr": ptr,
            "last": ptr[1:] - 1,
            "num_layers": layers,
        }

    def _record(self, number: int, hidden: Array | None, attention: Array | None) -> tuple[Floats, Floats]:
        """Hidden states [L, T, D] and attention [L, T, T], the mean over heads."""
        if hidden is None or attention is None:
            raise ValueError(f"record {number} has no {self.hidden if hidden is None else self.attention!r}")
        states, weights = as_floats(hidden), as_floats(attention)
        mean = weights.mean(axis=1, dtype=np.float32) if weights.ndim == 4 else weights.astype(np.float32)
        if len(states) == len(mean) + 1:
            states = states[1:]  # the embedding comes before the first layer, and attends to nothing
        if mean.ndim != 3 or states.ndim != 3 or mean.shape != (len(states), states.shape[1], states.shape[1]):
            raise ValueError(
                f"record {number}: {self.hidden!r} {states.shape} and {self.attention!r} {weights.shape} do not go "
                "together, expected [layer, token, dim] and [layer, head, token, token]"
            )
        return states, mean

    def _kept(self, mean_LTT: Floats) -> NDArray[np.bool_]:
        """Which entries are edges: above the threshold, before the token itself, the k strongest of each token."""
        size = mean_LTT.shape[1]
        causal = np.tri(size, size, 0 if self.self_loops else -1, np.bool_)
        kept = causal & (mean_LTT > self.threshold)
        if self.k is None or self.k >= size:
            return kept
        strength = np.where(kept, mean_LTT, -np.inf)
        strongest = np.argpartition(strength, size - self.k, axis=2)[:, :, size - self.k :]
        among = np.zeros_like(kept)
        np.put_along_axis(among, strongest, True, axis=2)
        return kept & among
