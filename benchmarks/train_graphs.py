"""Token graphs in the training benchmark: one union of all layers and records, against one graph at a time.

Both run the same net with the same weights on the same records, and are checked to give the same logits and gradients.
"""

# B records, L layers, T tokens, D width of a node, N nodes, W width

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Batch, Data

import millstream as ms
from measuring import Result, clock
from millstream.core.batches import ColumnBatch
from millstream.core.features import to_torch
from millstream.core.memory import Pool
from millstream.traces.detectors.gnn import GraphLSTM, in_log, scatter_mean
from millstream.traces.detectors.net import LIMIT, Scale, match_width
from millstream.traces.graphs import GraphFeature
from millstream.traces.kind import TrainSettings
from millstream.training.loop import seed_all
from train_data import Record, normal

LIMIT_S = 12  # no new round starts after this long
LEAST_TURNS = 2
PARAMETERS = TrainSettings().parameters
POOL = Pool(1 << 30)


@dataclass(frozen=True)
class GraphSizes:
    """The batch of graphs, and the number of rounds."""

    records: int = 16
    layers: int = 32
    tokens: int = 48
    turns: int = 9


def all_graphs(sizes: GraphSizes, threads: Sequence[int]) -> list[Result]:
    return [graphs(how, sizes, count) for how in ("tier graph", "all pairs") for count in threads]


def graphs(how: str, sizes: GraphSizes, threads: int) -> Result:
    """Seconds to build graphs and run the net, as one union and one by one."""
    torch.set_num_threads(threads)
    is_tier = how == "tier graph"
    dim, k = (64, 8) if is_tier else (128, None)
    records = graph_records(sizes.records, layers=sizes.layers, tokens=sizes.tokens, dim=dim, k=k)
    if is_tier:  # as stored in a trace: the eight strongest edges per token
        feature = ms.features.graphs(k, hidden="hidden", attention="edges")
    else:  # all pairs of tokens, with self-loops
        feature = ms.features.graphs(None, hidden="hidden", attention="attention", self_loops=True)
    net = graph_net(sizes.layers, dim, None if is_tier else 128)

    def forward(batch: Result) -> torch.Tensor:
        return net.logits(batch)[0]

    def backward(logits: torch.Tensor) -> None:
        net.zero_grad()
        logits.sum().backward()

    union = build_union(feature, records)
    by_layer = build_each(records, with_numpy)
    check_alike(net, union, by_layer, build_each(records, with_loop))
    ways: dict[str, Callable[[], object]] = {
        "build union": lambda: build_union(feature, records),
        "build numpy": lambda: build_each(records, with_numpy),
        "build loop": lambda: build_each(records, with_loop),
        "forward union": _no_grad(lambda: forward(union)),
        "forward each": _no_grad(lambda: forward_each(net, by_layer)),
        "step union": lambda: backward(forward(union)),
        "step each": lambda: backward(forward_each(net, by_layer)),
    }
    times, turns = in_turns(ways, sizes.turns)
    return {
        "how": how,
        "threads": threads,
        "dim": dim,
        "width": net.reader.head[-1].in_features,
        "nodes": len(union["x"]),
        "edges": union["edge_index"].shape[1],
        "turns": turns,
        "seconds": times,
        "rows": graph_rows(times),
    }


def graph_rows(times: dict[str, float]) -> dict[str, list[float]]:
    """Per step: seconds for the union, for graphs one by one, and for graphs built pair by pair."""
    build = [times["build union"], times["build numpy"], times["build loop"]]
    rows = {"build": build}
    for what, name in (("forward", "forward"), ("forward and backward", "step")):
        alone = [times[f"{name} union"], times[f"{name} each"], times[f"{name} each"]]
        rows[what] = alone
        rows[f"build, {what}"] = [a + b for a, b in zip(build, alone, strict=True)]
    return rows


def graph_net(num_layers: int, dim: int, width: int | None) -> GraphLSTM:
    """The net of `millstream train`, or with the given width; with random input scaling."""

    def build(width: int) -> GraphLSTM:
        return GraphLSTM(width, num_layers=num_layers, dim=dim, edge_dim=1, num_stats=0, dropout=0.0)

    wide = width or match_width(build, PARAMETERS)
    seed_all(0)
    net = build(wide).eval()
    torch.nn.init.normal_(net.x.mean, std=0.1)
    torch.nn.init.uniform_(net.x.factor, 0.5, 1.5)
    return net


def build_union(feature: GraphFeature, records: Sequence[Record]) -> Result:
    columns = {name: [record[name] for record in records] for name in feature.fields}
    with POOL.use():  # as in a Loader
        made = feature(ColumnBatch(np.arange(len(records)), columns))
    return {name: to_torch(value) for name, value in made.items()}


def build_each(records: Sequence[Record], edges: Callable[[np.ndarray], tuple[Any, Any, Any]]) -> list[Batch]:
    """One graph per record and layer; the graphs of all records are batched per layer."""
    graphs: list[list[Data]] = []
    for record in records:
        graphs.append([])
        for states_TD, attention_TT in zip(record["hidden"], record["attention"], strict=True):
            sources, targets, weights = edges(attention_TT)
            graphs[-1].append(
                Data(
                    x=torch.from_numpy(states_TD.astype(np.float32)),
                    edge_index=torch.from_numpy(np.array([sources, targets], np.int64)),
                    edge_attr=torch.from_numpy(np.array(weights, np.float32)[:, None]),
                )
            )
    return [Batch.from_data_list([graph[layer] for graph in graphs]) for layer in range(len(graphs[0]))]


def with_loop(attention_TT: np.ndarray) -> tuple[list[int], list[int], list[float]]:
    """Pair by pair, as in the old script; over a list, which is faster than over an array."""
    sources: list[int] = []
    targets: list[int] = []
    weights: list[float] = []
    rows = attention_TT.tolist()
    for target in range(len(rows)):
        for source in range(target + 1):
            if rows[target][source] > 0:
                sources.append(source)
                targets.append(target)
                weights.append(rows[target][source])
    return sources, targets, weights


def with_numpy(attention_TT: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vectorised, but one graph at a time."""
    targets, sources = np.nonzero(attention_TT)  # nothing above the diagonal
    return sources, targets, attention_TT[targets, sources]


def forward_each(net: GraphLSTM, by_layer: Sequence[Batch]) -> torch.Tensor:
    """One call of the graph network per layer, and a scan for the last token of each graph."""
    read: list[torch.Tensor] = []
    for layer, graph in enumerate(by_layer):
        token, (source, target) = torch.arange(len(graph.x)), graph.edge_index
        from_last = in_log(graph.ptr[graph.batch + 1] - 1 - token)
        x_ND = torch.cat([scaled(net.x, graph.x, layer), from_last, torch.zeros_like(from_last)], dim=1)
        edges_EA = torch.cat([scaled(net.edge_attr, graph.edge_attr, layer), in_log(target - source)], dim=1)
        nodes_NW = net.encoder(x_ND, graph.edge_index, edges_EA)
        last_BW = torch.stack([nodes_NW[graph.batch == number][-1] for number in range(graph.num_graphs)])
        mean_BW = scatter_mean(nodes_NW, graph.batch, graph.num_graphs)
        read.append(torch.cat([last_BW, mean_BW], dim=1))
    return net.reader(torch.stack(read, dim=1), None)


def scaled(scale: Scale, rows: torch.Tensor, layer: int) -> torch.Tensor:
    return ((rows - scale.mean[layer]) * scale.factor[layer]).clamp(-LIMIT, LIMIT)


def check_alike(net: GraphLSTM, union: Result, *each: Sequence[Batch]) -> None:
    """Check that all variants give the same logits and gradients."""

    def found(logits: torch.Tensor) -> list[torch.Tensor]:
        return [logits.detach(), *torch.autograd.grad(logits.sum(), list(net.parameters()))]

    wanted = found(net.logits(union)[0])
    for by_layer in each:
        for ours, theirs in zip(wanted, found(forward_each(net, by_layer)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * max(1.0, float(theirs.abs().max())))


def in_turns(ways: dict[str, Callable[[], object]], turns: int) -> tuple[dict[str, float], int]:
    """The median seconds of each variant after one warm-up round, and the number of rounds."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    start = time.perf_counter()
    for turn in range(turns + 1):
        if turn > LEAST_TURNS and time.perf_counter() - start > LIMIT_S:
            break
        for name, run in ways.items():
            seconds = clock(run)
            if turn:
                times[name].append(seconds)
    return {name: median(found) for name, found in times.items()}, len(times["build union"])


def _no_grad(run: Callable[[], object]) -> Callable[[], object]:
    def without() -> object:
        with torch.inference_mode():
            return run()

    return without


def show_graphs(found: dict[str, Any], sizes: GraphSizes) -> None:
    print(
        f"\ngraphs of {sizes.records} records, {sizes.layers} layers, about {sizes.tokens} tokens: ms, and ratio "
        "to the union"
    )
    for malloc, rows in found.items():
        for one in rows if isinstance(rows, list) else ():
            print(
                f"\n{one['how']}, {one['threads']} thread(s), {malloc}: {one['dim']}-d nodes, width {one['width']}, "
                f"{one['nodes']} nodes, {one['edges']} edges, {one['turns']} turns"
            )
            print(f"{'':28}{'union':>9}{'each, numpy':>13}{'':>8}{'each, pairs':>13}{'':>8}{'goal':>8}")
            for what, (ours, numpy, loop) in one["rows"].items():
                goal = ">= 5x" if what == "build" else ""
                print(
                    f"{what:28}{ours * 1e3:>9.1f}{numpy * 1e3:>13.1f}{numpy / ours:>7.1f}x{loop * 1e3:>13.1f}"
                    f"{loop / ours:>7.1f}x{goal:>8}"
                )
    sys.stdout.flush()


def graph_records(num: int, *, layers: int, tokens: int, dim: int, k: int | None) -> list[Record]:
    """Hidden states [L, T, D] and head-averaged attention [L, T, T] of `num` records; lengths vary by a quarter.

    With `k`, `attention` keeps only the k strongest earlier tokens of each token, which are also in `edge_source` and
    `edge_weight` [L, T, k] as in the tier `graph`; without `k` it also has the diagonal.
    """
    return list(_graph_records(num, layers, tokens, dim, k))


def _graph_records(num: int, layers: int, tokens: int, dim: int, k: int | None) -> Iterator[Record]:
    for number in range(num):
        rng = np.random.default_rng((2, number))
        size = int(rng.integers(tokens * 3 // 4, tokens * 5 // 4, endpoint=True))
        weights = np.tril(np.exp(rng.standard_normal((layers, size, size))))
        attention = (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float16)
        record = {"hidden": normal(rng, layers, size, dim), "attention": attention}
        if k is not None:
            earlier = np.tril(attention, -1)
            source = np.argsort(-earlier, axis=-1, kind="stable")[..., :k]
            weight = np.take_along_axis(earlier, source, axis=-1)
            record["attention"] = np.zeros_like(attention)
            np.put_along_axis(record["attention"], source, weight, axis=-1)
            record |= {"edge_source": np.where(weight > 0, source, -1).astype(np.int16), "edge_weight": weight}
        yield record
