"""Token graphs of all layers of a batch as one disjoint union, for torch_geometric's layers in one call."""

# B batch, L layers, H heads, T tokens, R with edges, K edges of one, D hidden, N nodes, E edges, G = B * L graphs

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from millstream.buffers import empty
from millstream.dataset.batch import Batch, TraceBatch
from millstream.dataset.layer_feature import as_floats
from millstream.dataset.permutation import mix
from millstream.records import Array

Floats = NDArray[np.floating]
Ints = NDArray[np.int64]
Tokens = Literal["all", "answer"]
Wiring = Literal["attention", "shuffled", "none"]
STORED = "edges"  # as `attention`: the strongest edges that were kept of every token
SPAN = ("prompt_len", "answer_len")


class _Edges(NamedTuple):
    """Edges of the layers of one record: from the token `source` to the token `target`."""

    layer: Ints
    target: Ints
    source: Ints
    weight: Floats


@dataclass(frozen=True)
class GraphFeature:
    """Nodes are tokens, edges follow attention from the token attended to (j) to the one that attends (i).

    Gives, for the graphs of record 0 layer 0, record 0 layer 1, ... one after the other:
    `x` [N, D], `edge_index` [2, E], `edge_attr` [E, 1], `batch` [N] (the graph of a node), `ptr` [G + 1] (where the
    nodes of a graph begin), `last` [G] (the node of its last token) and `num_layers` [B]. With tokens="answer" also
    `answer` [N], whether a node is a token of the answer, the last of which is `last`. Made by `ms.features.graphs`.
    """

    k: int | None
    threshold: float
    hidden: str
    attention: str
    self_loops: bool
    dtype: str
    tokens: Tokens = "all"
    wiring: Wiring = "attention"

    @property
    def fields(self) -> list[str]:
        weights = ["edge_source", "edge_weight"] if self.attention == STORED else [self.attention]
        return [self.hidden, *weights, *(SPAN if self.tokens == "answer" else ())]

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        if not isinstance(batch, TraceBatch):
            raise ValueError("features.graphs takes hidden states and attention of traces; these records are reads")
        columns = {name: cast("Sequence[Array | None]", batch.columns[name]) for name in self.fields}
        parts = [
            self._record(number, {name: values[row] for name, values in columns.items()})
            for row, number in enumerate(batch.numbers.tolist())
        ]
        layers = np.array([len(part.sizes) for part in parts], np.int64)
        sizes = np.concatenate([np.empty(0, np.int64), *(part.sizes for part in parts)])
        ptr = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=ptr[1:])
        x = empty((int(ptr[-1]), parts[0].x.shape[-1] if parts else 0), self.dtype)
        edge_index: list[Ints] = []
        node = 0
        for part in parts:
            count = int(part.sizes.sum())
            x[node : node + count] = part.x
            edge_index.append(part.edge_index + node)
            node += count
        made: dict[str, object] = {
            "x": x,
            "edge_index": np.concatenate([np.empty((2, 0), np.int64), *edge_index], axis=1),
            "edge_attr": np.concatenate([np.empty(0), *(part.weight for part in parts)]).astype(self.dtype)[:, None],
            "batch": np.repeat(np.arange(len(sizes)), sizes),
            "ptr": ptr,
            "last": ptr[1:] - 1,
            "num_layers": layers,
        }
        if self.tokens == "answer":
            made["answer"] = np.concatenate([np.empty(0, np.bool_), *(part.answer for part in parts)])
        return made

    def _record(self, number: int, values: Mapping[str, Array | None]) -> "_Part":
        for name, value in values.items():
            if value is None:
                raise ValueError(f"record {number} has no {name!r}")
        states = as_floats(cast(Array, values[self.hidden]))
        weights = as_floats(cast(Array, values["edge_weight" if self.attention == STORED else self.attention]))
        mean = weights.mean(axis=1, dtype=np.float32) if weights.ndim == 4 else weights
        states = self._checked(number, states, mean, weights.shape)
        start, end = 0, states.shape[1]
        if self.tokens == "answer":  # an empty one has the tokens that end it
            prompt, answer = (int(cast("int", values[name])) for name in SPAN)
            start = min(prompt, states.shape[1] - 1)
            end = min(start + (answer or states.shape[1]), states.shape[1])
        rows = slice(max(start - 1, 0), end)  # the tokens that have edges
        if self.attention == STORED:
            edges = self._stored(np.asarray(cast(Array, values["edge_source"])[:, rows], np.int64), mean[:, rows], rows)
        else:
            layer, row, source = np.nonzero(self._kept(mean[:, rows].astype(np.float32), rows))
            edges = _Edges(layer, row + rows.start, source, mean[layer, row + rows.start, source])
        return _Part.of(states, self._rewired(edges, number), start, end)

    def _rewired(self, edges: _Edges, number: int) -> _Edges:
        """The null graphs: the same number of edges and the same weights, from any token before; or no edges."""
        if self.wiring == "attention":
            return edges
        if self.wiring == "none":
            return _Edges(edges.layer[:0], edges.target[:0], edges.source[:0], edges.weight[:0])
        return edges._replace(source=shuffled_sources(edges.layer, edges.target, edges.source, seed=number))

    def _checked(self, number: int, states: Floats, weights: Floats, found: tuple[int, ...]) -> Floats:
        """The states of the layers that attend: the embedding comes before the first, and attends to nothing."""
        whole = states.shape
        if states.ndim == 3 and weights.ndim == 3 and len(states) == len(weights) + 1:
            states = states[1:]
        square = self.attention == STORED or weights.shape[-1] == weights.shape[1]
        if states.ndim != 3 or weights.ndim != 3 or weights.shape[:2] != states.shape[:2] or not square:
            raise ValueError(
                f"record {number}: {self.hidden!r} {whole} and {self.attention!r} {found} do not go "
                "together, expected [layer, token, dim] and [layer, head, token, token], or stored edges of each token"
            )
        return states

    def _stored(self, source_LRK: Ints, weight_LRK: Floats, rows: slice) -> _Edges:
        if self.k is not None and self.k < source_LRK.shape[2]:
            strongest = np.argsort(-weight_LRK, axis=2, kind="stable")[:, :, : self.k]
            source_LRK = np.take_along_axis(source_LRK, strongest, 2)
            weight_LRK = np.take_along_axis(weight_LRK, strongest, 2)
        kept = (source_LRK >= 0) & (weight_LRK > self.threshold)
        if not self.self_loops:
            token_R1 = np.arange(rows.start, rows.stop, dtype=np.int64).reshape(-1, 1)
            kept &= source_LRK != token_R1
        layer, row, slot = np.nonzero(kept)
        return _Edges(layer, row + rows.start, source_LRK[layer, row, slot], weight_LRK[layer, row, slot])

    def _kept(self, mean_LRT: Floats, rows: slice) -> NDArray[np.bool_]:
        """Which entries are edges: above the threshold, before the token itself, the k strongest of each token."""
        size = mean_LRT.shape[2]
        causal = np.tri(mean_LRT.shape[1], size, rows.start - (not self.self_loops), np.bool_)
        kept = causal & (mean_LRT > self.threshold)
        if self.k is None or self.k >= size:
            return kept
        strength = np.where(kept, mean_LRT, -np.inf)
        strongest = np.argpartition(strength, size - self.k, axis=2)[:, :, size - self.k :]
        among = np.zeros_like(kept)
        np.put_along_axis(among, strongest, True, axis=2)
        return kept & among


def shuffled_sources(layer_E: Ints, target_E: Ints, source_E: Ints, *, seed: int) -> Ints:
    """For each edge another token before its target; no two edges of a target from the same. Self loops stay.

    Depends on the edges and the seed alone.
    """
    moved = source_E != target_E
    target = target_E[moved]
    _, first, node, count = np.unique(
        layer_E[moved] * (int(target_E.max(initial=0)) + 1) + target,
        return_index=True,
        return_inverse=True,
        return_counts=True,
    )
    rank = np.empty(len(target), np.int64)  # which of its target's edges each is
    rank[np.argsort(node, kind="stable")] = np.arange(len(target)) - np.repeat(np.cumsum(count) - count, count)
    chance = np.random.Generator(np.random.Philox(mix(0, 0, seed))).random((len(count), int(target.max(initial=0))))
    chance[np.arange(chance.shape[1]) >= target[first][:, None]] = 2.0  # not from itself or later
    drawn = source_E.copy()
    drawn[moved] = np.argsort(chance, axis=1)[node, rank]
    return drawn


class _Part(NamedTuple):
    """The graphs of one record, their nodes numbered from 0."""

    x: Floats
    sizes: Ints
    edge_index: Ints
    weight: Floats
    answer: NDArray[np.bool_]

    @classmethod
    def of(cls, states_LTD: Floats, edges: _Edges, start: int, end: int) -> "_Part":
        """With the tokens from `start` to `end`, the one before them, and those that they have edges from."""
        num_layers, num_tokens, _ = states_LTD.shape
        used = np.zeros((num_layers, num_tokens), np.bool_)
        used[:, max(start - 1, 0) : end] = True
        used[edges.layer, edges.source] = True
        place = np.cumsum(used).reshape(used.shape) - 1
        ends = place[edges.layer, edges.source], place[edges.layer, edges.target]
        in_answer = np.zeros_like(used)
        in_answer[:, start:end] = True
        return cls(states_LTD[used], used.sum(axis=1), np.stack(ends), edges.weight, in_answer[used])
