"""Attention graphs over tokens: a disjoint union of all layers, or one graph per record with all heads on its edges."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from millstream.core.arguments import checked
from millstream.core.batches import Batch, ColumnBatch, Floats, as_floats
from millstream.core.config import Count, Probability
from millstream.core.memory import empty
from millstream.core.order import mix
from millstream.core.record import Array

# B batch, L layers, H heads, T tokens, R rows (tokens with edges), K edges per row, D hidden, N nodes, E edges
# G = B * L graphs, A = L or L * H attention values of an edge

Ints = NDArray[np.int64]
Tokens = Literal["all", "answer"]
Wiring = Literal["attention", "shuffled", "none"]
STORED = "edges"  # value of `attention`: use the strongest edges stored for each token
SPAN = ("prompt_len", "answer_len")
THRESHOLD = 0.05  # minimum attention of an edge in some layer or head


class _Edges(NamedTuple):
    """Edges in all layers of one record, from the token `source` to the token `target`."""

    layer: Ints
    target: Ints
    source: Ints
    weight: Floats


@dataclass(frozen=True)
class GraphFeature:
    """Nodes are tokens; an edge goes from the token attended to (j) to the token that attends (i).

    The graphs are in the order record 0 layer 0, record 0 layer 1, ...:
    `x` [N, D], `edge_index` [2, E], `edge_attr` [E, 1], `batch` [N] (the graph of a node), `ptr` [G + 1] (the first
    node of each graph), `last` [G] (the node of its last token) and `num_layers` [B]. With tokens="answer" also
    `answer` [N], whether a node is an answer token; `last` is the last of them. Made by `ms.features.graphs`.
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
        if not isinstance(batch, ColumnBatch):
            raise ValueError("features.graphs needs the hidden states and attention of traces; these records are reads")
        parts = [self._record(number, values) for number, values in _records(batch, self.fields)]
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

    def _record(self, number: int, values: Mapping[str, Array]) -> "_Part":
        states = as_floats(values[self.hidden])
        weights = as_floats(values["edge_weight" if self.attention == STORED else self.attention])
        mean = weights.mean(axis=1, dtype=np.float32) if weights.ndim == 4 else weights
        states = self._checked(number, states, mean, weights.shape)
        start, end = 0, states.shape[1]
        if self.tokens == "answer":
            start, end = _answer(values, end)
        rows = slice(max(start - 1, 0), end)  # the tokens that have edges
        if self.attention == STORED:
            edges = self._stored(np.asarray(values["edge_source"][:, rows], np.int64), mean[:, rows], rows)
        else:
            layer, row, source = np.nonzero(self._kept(mean[:, rows].astype(np.float32), rows))
            edges = _Edges(layer, row + rows.start, source, mean[layer, row + rows.start, source])
        return _Part.of(states, self._rewired(edges, number), start, end)

    def _rewired(self, edges: _Edges, number: int) -> _Edges:
        """The null graphs: the same number and weights of edges, but from random earlier tokens; or no edges."""
        if self.wiring == "attention":
            return edges
        if self.wiring == "none":
            return _Edges(edges.layer[:0], edges.target[:0], edges.source[:0], edges.weight[:0])
        return edges._replace(source=shuffled_sources(edges.layer, edges.target, edges.source, seed=number))

    def _checked(self, number: int, states: Floats, weights: Floats, found: tuple[int, ...]) -> Floats:
        """The states of the layers with attention: without the embedding, which comes first and has none."""
        whole = states.shape
        if states.ndim == 3 and weights.ndim == 3 and len(states) == len(weights) + 1:
            states = states[1:]
        square = self.attention == STORED or weights.shape[-1] == weights.shape[1]
        if states.ndim != 3 or weights.ndim != 3 or weights.shape[:2] != states.shape[:2] or not square:
            raise ValueError(
                f"record {number}: {self.hidden!r} {whole} and {self.attention!r} {found} do not "
                "match; expected [layer, token, dim] and [layer, head, token, token], or stored edges of each token"
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
        """Which entries are edges: from earlier tokens, above the threshold, the k strongest per token."""
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


@checked
def graphs(
    k: Count | None = 8,
    *,
    threshold: Probability = 0.0,
    hidden: str = "hidden",
    attention: str = "attention",
    self_loops: bool = False,
    tokens: Tokens = "all",
    wiring: Wiring = "attention",
    dtype: str = "float32",
) -> GraphFeature:
    """The token graph of every layer of every record, as one disjoint union (see GraphFeature for its content).

    A token has edges from the `k` earlier tokens it attends to most (mean over heads), or from all with `k=None`, if
    the attention is above `threshold`. `hidden="nodes", attention="edges"` uses what the tier `graph` stores. With
    `tokens="answer"` only the answer tokens and the last prompt token have edges, and unconnected tokens are left out.
    `wiring` makes null graphs: "shuffled" draws the source of each edge from all earlier tokens, "none" has no edges.

    >>> loader = ms.Loader(traces, batch_size=4, features=ms.features.graphs(k=4))
    >>> batch = next(iter(loader))  # x, edge_index, edge_attr, batch, ...
    """
    return GraphFeature(k, threshold, hidden, attention, self_loops, dtype, tokens, wiring)


@dataclass(frozen=True)
class HeadGraphFeature:
    """`x` [N, L * H + 1] (self-attention per head, and whether the token is in the answer), `edge_index`,
    `edge_attr` [E, A], `batch` [N], `ptr` [B + 1], `answer` [N].

    From `attention`, with one value per head; or from the stored edges, with one value per layer.
    """

    from_attention: bool

    @property
    def fields(self) -> list[str]:
        return ["attention", *SPAN] if self.from_attention else ["edge_source", "edge_weight", "self_attention", *SPAN]

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        if not isinstance(batch, ColumnBatch):
            raise ValueError("a graph over heads needs the attention of traces; these records are reads")
        x: list[NDArray[np.float32]] = []
        edges: list[Ints] = [np.empty((2, 0), np.int64)]
        values: list[NDArray[np.float32]] = []
        counts: list[int] = []
        for _, record in _records(batch, self.fields):
            own_RA, attended_RTA, first = self._record(record)
            target, source = np.nonzero((attended_RTA > THRESHOLD).any(axis=2))
            kept = source != target + first
            target, source = target[kept], source[kept]
            used = np.zeros(attended_RTA.shape[1], np.bool_)
            used[first : first + len(own_RA)] = True
            used[source] = True
            node = np.cumsum(used) - 1
            nodes = np.zeros((int(used.sum()), own_RA.shape[1] + 1), np.float32)
            nodes[node[first : first + len(own_RA)], :-1] = own_RA
            nodes[node[first + 1 : first + len(own_RA)], -1] = 1
            edges.append(np.stack([node[source], node[target + first]]) + sum(counts))
            values.append(attended_RTA[target, source].astype(np.float32))
            x.append(nodes)
            counts.append(len(nodes))
        whole = np.concatenate(x)
        return {
            "x": whole,
            "edge_index": np.concatenate(edges, axis=1),
            "edge_attr": np.concatenate(values),
            "batch": np.repeat(np.arange(len(counts)), counts),
            "ptr": np.cumsum([0, *counts]),
            "answer": whole[:, -1] == 1,
        }

    def _record(self, record: Mapping[str, Array]) -> tuple[Floats, Floats, int]:
        """Self-attention [R, L * H], attention [R, T, A], and the token of the first row."""
        num_tokens = record["attention"].shape[-1] if self.from_attention else record["edge_source"].shape[1]
        start, end = _answer(record, num_tokens, first=1)
        if self.from_attention:
            weights = as_floats(record["attention"])[:, :, start - 1 : end]
            attended = weights.reshape(-1, end - start + 1, num_tokens).transpose(1, 2, 0)
            rows = np.arange(end - start + 1)
            return attended[rows, rows + start - 1], attended, start - 1
        source = np.asarray(record["edge_source"][:, start - 1 : end], np.int64)
        layer, row, slot = np.nonzero(source >= 0)
        attended = np.zeros((end - start + 1, num_tokens, len(source)), np.float32)
        weights = as_floats(record["edge_weight"])[:, start - 1 : end]
        attended[row, source[layer, row, slot], layer] = weights[layer, row, slot]
        own = as_floats(record["self_attention"])[:, :, : end - start + 1]
        return own.reshape(-1, own.shape[2]).T, attended, start - 1


def _records(batch: ColumnBatch, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Array]]]:
    """Number and fields of each record; ValueError if it lacks one."""
    for row, number in enumerate(batch.numbers.tolist()):
        values = {name: cast("Sequence[Array | None]", batch.columns[name])[row] for name in names}
        for name, value in values.items():
            if value is None:
                raise ValueError(f"record {number} has no {name!r}")
        yield number, cast("Mapping[str, Array]", values)


def _answer(values: Mapping[str, Array], num_tokens: int, *, first: int = 0) -> tuple[int, int]:
    """Start and end of the answer tokens; for an empty answer, of all tokens after the prompt."""
    prompt, answer = (int(values[name]) for name in SPAN)
    start = min(max(prompt, first), num_tokens - 1)
    return start, min(start + (answer or num_tokens), num_tokens)


def shuffled_sources(layer_E: Ints, target_E: Ints, source_E: Ints, *, seed: int) -> Ints:
    """A random earlier token as the source of each edge, distinct per target. Self loops stay.

    Depends only on the edges and the seed.
    """
    moved = source_E != target_E
    target = target_E[moved]
    _, first, node, count = np.unique(
        layer_E[moved] * (int(target_E.max(initial=0)) + 1) + target,
        return_index=True,
        return_inverse=True,
        return_counts=True,
    )
    rank = np.empty(len(target), np.int64)  # of an edge among those of its target
    rank[np.argsort(node, kind="stable")] = np.arange(len(target)) - np.repeat(np.cumsum(count) - count, count)
    random_key = np.random.Generator(np.random.Philox(mix(0, 0, seed))).random((len(count), int(target.max(initial=0))))
    # Never the target itself or a later token.
    random_key[np.arange(random_key.shape[1]) >= target[first][:, None]] = 2.0
    drawn = source_E.copy()
    drawn[moved] = np.argsort(random_key, axis=1)[node, rank]
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
        """The tokens from `start` to `end`, the one before them, and the sources of their edges."""
        num_layers, num_tokens, _ = states_LTD.shape
        used = np.zeros((num_layers, num_tokens), np.bool_)
        used[:, max(start - 1, 0) : end] = True
        used[edges.layer, edges.source] = True
        node = np.cumsum(used).reshape(used.shape) - 1
        ends = node[edges.layer, edges.source], node[edges.layer, edges.target]
        in_answer = np.zeros_like(used)
        in_answer[:, start:end] = True
        return cls(states_LTD[used], used.sum(axis=1), np.stack(ends), edges.weight, in_answer[used])
