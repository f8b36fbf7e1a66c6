"""Attention graphs over tokens: a disjoint union of all layers, or one graph per record with all heads on its edges."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from millstream.core.arguments import checked
from millstream.core.batches import Batch, ColumnBatch, Floats, as_float32, as_floats, assign
from millstream.core.config import Count, Probability
from millstream.core.memory import empty
from millstream.core.order import mix
from millstream.core.record import Array

# B batch, L layers, H heads, T tokens, R rows (tokens with edges), K edges per row, D hidden, N nodes, E edges
# G = B * L graphs, A = L or L * H attention values of an edge

Ints = NDArray[np.int64]
Tokens = Literal["all", "answer"]
Wiring = Literal["attention", "shuffled", "none"]
Heads = Literal["mean", "all"]
STORED = "edges"  # value of `attention`: use the strongest edges stored for each token
SPAN = ("prompt_len", "answer_len")
THRESHOLD = 0.05  # minimum attention of an edge in some layer or head


class _Record(NamedTuple):
    """One record: its states [L, T, D], and the weights (and sources) of the edges of the tokens `first` to `end`."""

    number: int
    states: Floats
    weights: Floats  # [L, R, T], or [L, R, K] with the sources
    sources: Ints  # none if edges are made of all attention
    heads: Floats  # their weights in each head, if wanted: [L, R, H, K], or [L, H, R, T] of all attention
    first: int
    start: int  # of the answer
    end: int


class _Edges(NamedTuple):
    """Edges of all graphs, sorted by `row`, the row of the target."""

    row: Ints
    source: Ints
    weight: Floats  # [E], or [E, H] for all heads


@dataclass(frozen=True)
class GraphFeature:
    """Nodes are tokens; an edge goes from the token attended to (j) to the token that attends (i).

    The graphs are in the order record 0 layer 0, record 0 layer 1, ...:
    `x` [N, D], `position` [N] (the token of a node), `edge_index` [2, E], `edge_attr` [E, 1] or [E, H], `batch` [N]
    (the graph of a node), `ptr` [G + 1] (the first node of each graph), `last` [G] (the node of its last token) and
    `num_layers` [B]. With tokens="answer" also `answer` [N], whether a node is an answer token; `last` is the last of
    them. Made by `ms.features.graphs`. `layers` are those to make graphs of, counted from the last, -1; None: all.
    """

    k: int | None
    threshold: float
    hidden: str
    attention: str
    self_loops: bool
    dtype: str | None
    tokens: Tokens = "all"
    wiring: Wiring = "attention"
    heads: Heads = "mean"
    layers: tuple[int, ...] | None = None

    @property
    def fields(self) -> list[str]:
        picked = "" if self.layers is None else f"[{','.join(map(str, self.layers))}]"
        return [*(f"{name}{picked}" for name in self._by_layer), *self._scalars]

    @property
    def _by_layer(self) -> list[str]:
        of_heads = ["edge_heads"] if self.heads == "all" else []
        weights = ["edge_source", "edge_weight", *of_heads] if self.attention == STORED else [self.attention]
        return [self.hidden, *weights]

    @property
    def _scalars(self) -> Sequence[str]:
        return SPAN if self.tokens == "answer" else ()

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        if not isinstance(batch, ColumnBatch):
            raise ValueError("features.graphs needs the hidden states and attention of traces; these records are reads")
        names = [*self._by_layer, *self._scalars]
        records = [self._record(number, values) for number, values in _records(batch, names)]
        grid = _Grid.of(records)
        edges = self._rewired(self._edges(records, grid), records, grid)
        edge_index = cast(Ints, empty((2, len(edges.row)), np.int64))  # of cells
        np.add(grid.origin_M[edges.row], edges.source, out=edge_index[0])
        np.take(grid.cell_M, edges.row, out=edge_index[1], mode="clip")
        nodes, ptr = np.arange(grid.cell_G[-1], dtype=np.int64), grid.cell_G
        if self.tokens == "answer":  # nodes are the tokens with edges and their sources
            is_node = np.zeros(len(nodes), np.bool_)
            is_node[grid.cell_M] = True
            is_node[edge_index[0]] = True
            nodes = np.flatnonzero(is_node)
            ptr = np.searchsorted(nodes, grid.cell_G).astype(np.int64)
            edge_index = (np.cumsum(is_node) - 1)[edge_index]
        weights = edges.weight.astype(self.dtype or np.float32, copy=False)
        made: dict[str, object] = {
            "x": self._states(records, nodes),
            "position": nodes - np.repeat(grid.cell_G[:-1], np.diff(ptr)),
            "edge_index": edge_index,
            "edge_attr": weights if weights.ndim == 2 else weights[:, None],
            "batch": np.repeat(np.arange(len(ptr) - 1), np.diff(ptr)),
            "ptr": ptr,
            "last": ptr[1:] - 1,
            "num_layers": np.array([len(record.states) for record in records], np.int64),
        }
        if self.tokens == "answer":
            made["answer"] = grid.is_answer()[nodes]
        return made

    def _record(self, number: int, values: Mapping[str, Array]) -> _Record:
        states = as_floats(values[self.hidden])
        weights = as_floats(values["edge_weight" if self.attention == STORED else self.attention])
        states = self._checked(number, states, weights)
        start, end = _answer(values, states.shape[1]) if self.tokens == "answer" else (0, states.shape[1])
        rows = slice(max(start - 1, 0), end)  # the tokens that have edges
        if self.attention == STORED:
            sources = cast(Ints, np.asarray(values["edge_source"][:, rows]))
            heads = _of_heads(number, values, sources) if self.heads == "all" else np.empty(0)
            return _Record(number, states, weights[:, rows], sources, heads, rows.start, start, end)
        weights = as_float32(weights[..., rows, :])
        mean = weights.mean(axis=1) if weights.ndim == 4 else weights
        heads = weights if weights.ndim == 4 else weights[:, None]
        return _Record(number, states, mean, np.empty(0, np.int64), heads, rows.start, start, end)

    def _states(self, records: Sequence[_Record], nodes: Ints) -> Array:
        """The states of the nodes; `nodes` are cells of the grid."""
        like = records[0].states if records else np.empty((0, 0, 0), np.float32)
        x = empty((len(nodes), like.shape[2]), self.dtype or like.dtype)
        cell = node = 0
        for record in records:
            states = record.states.reshape(-1, x.shape[1])
            if self.tokens == "answer":
                end = int(np.searchsorted(nodes, cell + len(states)))
                cell, states = cell + len(states), states[nodes[node:end] - cell]
            assign(x[node : node + len(states)], states)
            node += len(states)
        return x

    def _edges(self, records: Sequence[_Record], grid: "_Grid") -> _Edges:
        if self.attention == STORED:
            return self._stored(records, grid)
        kept = [self._kept(record) for record in records]
        ends = [0, *accumulate(int(np.count_nonzero(is_edge)) for is_edge in kept)]
        row_E, source_E = (cast(Ints, empty(ends[-1], np.int64)) for _ in range(2))
        of_heads = (records[0].heads.shape[1],) if self.heads == "all" and records else ()
        edges = _Edges(row_E, source_E, cast(Floats, empty((ends[-1], *of_heads), np.float32)))
        first_row = 0
        for record, is_edge, first, end in zip(records, kept, ends[:-1], ends[1:], strict=True):
            at, size = np.flatnonzero(is_edge), is_edge.shape[2]
            row, own = at // size, slice(first, end)
            np.subtract(at, row * size, out=edges.source[own])
            np.add(row, first_row, out=edges.row[own])
            if self.heads == "all":
                layer, token = np.divmod(row, is_edge.shape[1])
                edges.weight[own] = record.heads[layer, :, token, at - row * size]
            else:
                np.take(record.weights, at, out=edges.weight[own], mode="clip")  # "raise" would buffer the output
            first_row += is_edge.shape[0] * is_edge.shape[1]
        return edges

    def _rewired(self, edges: _Edges, records: Sequence[_Record], grid: "_Grid") -> _Edges:
        """The null graphs: the same number and weights of edges, but from random earlier tokens; or no edges."""
        if self.wiring == "attention":
            return edges
        if self.wiring == "none":
            return _Edges(edges.row[:0], edges.source[:0], edges.weight[:0])
        graph, target = grid.graph_M[edges.row], grid.token_M[edges.row]
        bounds = np.searchsorted(graph, np.cumsum([0, *(len(record.states) for record in records)]))
        drawn = edges.source.copy()
        for record, first, end in zip(records, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            own = slice(first, end)
            drawn[own] = shuffled_sources(graph[own], target[own], edges.source[own], seed=record.number)
        return edges._replace(source=drawn)

    def _checked(self, number: int, states: Floats, weights: Floats) -> Floats:
        """The states of the layers with attention: without the embedding, which comes first and has none."""
        whole, found = states.shape, weights.shape
        if states.ndim == 3 and len(found) in (3, 4) and len(states) == len(weights) + 1:
            states = states[1:]
        square = self.attention == STORED or found[-1] == found[-2]
        axes = len(found) == 3 or (len(found) == 4 and self.attention != STORED)
        if states.ndim != 3 or not axes or (found[0], found[-2]) != states.shape[:2] or not square:
            raise ValueError(
                f"record {number}: {self.hidden!r} {whole} and {self.attention!r} {found} do not "
                "match; expected [layer, token, dim] and [layer, head, token, token], or stored edges of each token"
            )
        return states

    def _stored(self, records: Sequence[_Record], grid: "_Grid") -> _Edges:
        num = records[0].weights.shape[2] if records else 0
        none = np.empty((0, num), np.int16), np.empty((0, num), np.float16)
        source_MK = cast(Ints, np.concatenate([none[0], *(record.sources.reshape(-1, num) for record in records)]))
        stored_MK = np.concatenate([none[1], *(record.weights.reshape(-1, num) for record in records)])
        threshold = float(stored_MK.dtype.type(self.threshold))
        weight_MK = as_float32(stored_MK)
        kept = (source_MK >= 0) & (weight_MK > threshold)
        if not self.self_loops:
            kept &= source_MK != grid.token_M[:, None]
        at = np.flatnonzero(kept)
        if self.k is not None and self.k < num:  # in the order of their weights
            strongest = np.argsort(-weight_MK, axis=1, kind="stable")[:, : self.k]
            strongest += np.arange(0, source_MK.size, num)[:, None]
            at = strongest[kept.reshape(-1)[strongest]]
        row, source = at // max(num, 1), source_MK.reshape(-1)[at].astype(np.int64)
        if self.heads == "mean" or not records:
            return _Edges(row, source, weight_MK.reshape(-1)[at])
        heads_MHK = np.concatenate([record.heads.reshape(-1, *record.heads.shape[2:]) for record in records])
        return _Edges(row, source, as_float32(heads_MHK[row, :, at - row * num]))

    def _kept(self, record: _Record) -> NDArray[np.bool_]:
        """Which entries are edges: from earlier tokens, above the threshold, the k strongest per token."""
        mean_LRT = record.weights
        size = mean_LRT.shape[2]
        kept = mean_LRT > self.threshold
        kept &= np.tri(mean_LRT.shape[1], size, record.first - (not self.self_loops), np.bool_)  # causal
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
    heads: Heads = "mean",
    dtype: str | None = "float32",
) -> GraphFeature:
    """The token graph of every layer of every record, as one disjoint union (see GraphFeature for its content).

    A token has edges from the `k` earlier tokens it attends to most (mean over heads), or from all with `k=None`, if
    the attention is above `threshold`. `hidden="nodes", attention="edges"` uses what the tier `graph` stores. With
    `tokens="answer"` only the answer tokens and the last prompt token have edges, and unconnected tokens are left out.
    With `heads="all"` an edge has the attention of every head, which a store has in `attention` or `edge_heads`. With
    `dtype=None`, `x` keeps the precision that states are stored in.
    `wiring` makes null graphs: "shuffled" draws the source of each edge from all earlier tokens, "none" has no edges.

    >>> loader = ms.Loader(traces, batch_size=4, features=ms.features.graphs(k=4))
    >>> batch = next(iter(loader))  # x, edge_index, edge_attr, batch, ...
    """
    if heads == "all" and attention == STORED and tokens != "answer":
        raise ValueError('heads="all": edge_heads are of the tokens of answers; add tokens="answer"')
    return GraphFeature(k, threshold, hidden, attention, self_loops, dtype, tokens, wiring, heads)


@dataclass(frozen=True)
class HeadGraphFeature:
    """`x` [N, L * H + 1] (self-attention per head, and whether the token is in the answer), `edge_index`,
    `edge_attr` [E, A], `batch` [N], `ptr` [B + 1], `answer` [N].

    From `attention` or `edge_heads`, with a value for each layer and head; or from `edges`, with one for each layer.
    """

    attention: Literal["attention", "edges", "edge_heads"]

    @property
    def fields(self) -> list[str]:
        if self.attention == "attention":
            return ["attention", *SPAN]
        return ["edge_source", "edge_weight" if self.attention == STORED else self.attention, "self_attention", *SPAN]

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        if not isinstance(batch, ColumnBatch):
            raise ValueError("a graph over heads needs the attention of traces; these records are reads")
        x: list[NDArray[np.float32]] = []
        edges: list[Ints] = [np.empty((2, 0), np.int64)]
        values: list[NDArray[np.float32]] = []
        counts: list[int] = []
        for number, record in _records(batch, self.fields):
            own_RA, row, source, value_EA, first, size = self._record(number, record)
            kept = source != row + first
            row, source = row[kept], source[kept]
            used = np.zeros(size, np.bool_)
            used[first : first + len(own_RA)] = True
            used[source] = True
            node = np.cumsum(used) - 1
            nodes = np.zeros((int(used.sum()), own_RA.shape[1] + 1), np.float32)
            nodes[node[first : first + len(own_RA)], :-1] = own_RA
            nodes[node[first + 1 : first + len(own_RA)], -1] = 1
            edges.append(np.stack([node[source], node[row + first]]) + sum(counts))
            values.append(value_EA[kept].astype(np.float32, copy=False))
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

    def _record(self, number: int, record: Mapping[str, Array]) -> tuple[Floats, Ints, Ints, Floats, int, int]:
        """Self-attention [R, L * H]; row, source and values [A] of the edges; the first row's token, and the tokens."""
        size = record["attention"].shape[-1] if self.attention == "attention" else record["edge_source"].shape[1]
        start, end = _answer(record, size, first=1)
        first, num_rows = start - 1, end - start + 1
        if self.attention == "attention":
            weights = as_floats(record["attention"])[:, :, first:end]
            attended_RTA = weights.reshape(-1, num_rows, size).transpose(1, 2, 0)
            row, source = np.nonzero((attended_RTA > THRESHOLD).any(axis=2))
            rows = np.arange(num_rows)
            return attended_RTA[rows, rows + first], row, source, attended_RTA[row, source], first, size
        source_LRK = np.asarray(record["edge_source"][:, first:end], np.int64)
        if self.attention == "edge_heads":
            value_LRHK = _of_heads(number, record, source_LRK)
        else:
            value_LRHK = as_floats(record["edge_weight"])[:, first:end, None]
        layer, row, slot = np.nonzero(source_LRK >= 0)
        pair, value = row * size + source_LRK[layer, row, slot], value_LRHK[layer, row, :, slot]
        pairs = np.unique(pair[(value > THRESHOLD).any(axis=1)])
        kept = np.isin(pair, pairs)
        values = np.zeros((len(pairs), len(source_LRK), value.shape[1]), np.float32)
        values[np.searchsorted(pairs, pair[kept]), layer[kept]] = value[kept]
        own = as_floats(record["self_attention"])[:, :, :num_rows]
        row, source = np.divmod(pairs, size)
        value_EA = values.reshape(len(pairs), values.shape[1] * values.shape[2])
        return own.reshape(-1, num_rows).T, row, source, value_EA, first, size


def _records(batch: ColumnBatch, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Array]]]:
    """Number and fields of each record; ValueError if it lacks one."""
    for row, number in enumerate(batch.numbers.tolist()):
        values = {name: cast("Sequence[Array | None]", batch.columns[name])[row] for name in names}
        for name, value in values.items():
            if value is None:
                raise ValueError(f"record {number} has no {name!r}")
        yield number, cast("Mapping[str, Array]", values)


def _of_heads(number: int, values: Mapping[str, Array], sources_LRK: Ints) -> Floats:
    """[L, R, H, K]: the attention of every head along the stored edges of the last prompt token and the answer."""
    layers, rows, num = sources_LRK.shape
    heads = as_floats(values["edge_heads"])
    if heads.ndim != 4 or (len(heads), heads.shape[3]) != (layers, num) or heads.shape[1] < rows:
        raise ValueError(
            f"record {number}: 'edge_heads' {heads.shape} and 'edge_source' do not match; expected [layer, row, head, "
            f"edge] with {layers} layers, at least {rows} rows and {num} edges"
        )
    return heads[:, :rows]


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


class _Grid(NamedTuple):
    """The tokens of all graphs of a batch: a cell for each token, and a row for each token with edges."""

    cell_G: Ints  # [G + 1], the first cell of each graph
    start_G: Ints  # the first token of the answer
    end_G: Ints
    graph_M: Ints  # of each row
    token_M: Ints
    origin_M: Ints  # the first cell of its graph
    cell_M: Ints

    @classmethod
    def of(cls, records: Sequence[_Record]) -> "_Grid":
        layers = [len(record.states) for record in records]
        spans = np.array([(r.states.shape[1], r.first, r.start, r.end) for r in records], np.int64).reshape(-1, 4)
        tokens_G, first_G, start_G, end_G = np.repeat(spans, layers, axis=0).T
        cell_G = np.concatenate([[0], np.cumsum(tokens_G)])
        rows_G = end_G - first_G
        token_M = _ranges(first_G, rows_G)
        graph_M = np.repeat(np.arange(len(rows_G)), rows_G)
        origin_M = cell_G[graph_M]
        return cls(cell_G, start_G, end_G, graph_M, token_M, origin_M, origin_M + token_M)

    def is_answer(self) -> NDArray[np.bool_]:
        """Of each cell."""
        marked = np.zeros(self.cell_G[-1], np.bool_)
        marked[_ranges(self.cell_G[:-1] + self.start_G, self.end_G - self.start_G)] = True
        return marked


def _ranges(start: Ints, count: Ints) -> Ints:
    """`count[i]` numbers from `start[i]` on, for all i."""
    return np.arange(int(count.sum()), dtype=np.int64) + np.repeat(start - np.cumsum(count) + count, count)
