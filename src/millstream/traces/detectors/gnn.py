"""`gnn`: a graph network over the token graphs of all layers, then an LSTM. `charm`: one graph, all heads on its edges.

torch_geometric has no types: its names are imported and typed here, with the install command if it is missing.
"""

import warnings
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from millstream.errors import MissingExtra
from millstream.traces.detectors.net import DetectorNet, Reader, Scale
from millstream.training.task import Batch, Moments

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it still uses torch.jit
        from torch_geometric.nn import GINEConv as _GINEConv  # pyright: ignore
        from torch_geometric.nn import MessagePassing as _MessagePassing  # pyright: ignore
        from torch_geometric.utils import scatter as _scatter  # pyright: ignore
except ImportError as error:
    raise MissingExtra(f"graphs need torch_geometric ({error}): pip install 'millstream[graph]'") from None


if TYPE_CHECKING:

    class MessagePassing(nn.Module):
        def __init__(self, *, aggr: str) -> None: ...
        def propagate(self, edge_index: Tensor, **inputs: Tensor) -> Tensor: ...
else:
    MessagePassing = _MessagePassing

GINEConv: Any = _GINEConv
scatter: Any = _scatter

# B batch, L layers, D node features, N nodes, E edges, G graphs = B * L, W width

NUM_ROUNDS = 2


class GraphEncoder(nn.Module):
    """Nodes [N, D] -> nodes [N, W]: GINE with attention as edge feature. Graphs are disjoint, so one call takes all."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(dim, width)
        self.rounds = nn.ModuleList(
            GINEConv(
                nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)), edge_dim=1, aggr="mean"
            )
            for _ in range(NUM_ROUNDS)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(NUM_ROUNDS))
        self.last_norm = nn.LayerNorm(width)

    def forward(self, x_ND: Tensor, edge_index_2E: Tensor, edge_attr_E1: Tensor) -> Tensor:
        nodes_NW = self.project(x_ND)
        for convolve, norm in zip(self.rounds, self.norms, strict=True):
            nodes_NW = nodes_NW + convolve(norm(nodes_NW).relu(), edge_index_2E, edge_attr_E1)
        return self.last_norm(nodes_NW)


class GraphLSTM(DetectorNet):
    """Takes the output of `ms.features.graphs` and, if `num_stats`, `stats` [B, S]."""

    def __init__(self, width: int, *, num_layers: int, dim: int, num_stats: int, dropout: float) -> None:
        super().__init__(width, num_stats)
        self.x = Scale(num_layers, dim)
        self.encoder = GraphEncoder(dim, width)
        self.reader = Reader(2 * width, width, num_stats=num_stats, dropout=dropout)

    @property
    def num_layers(self) -> int:
        return len(self.x.mean)

    def observe(self, batch: Batch, moments: dict[str, Moments]) -> None:
        super().observe(batch, moments)
        moments["x"].add(batch["x"], batch["batch"] % self.num_layers, num_groups=self.num_layers)

    def scaled_nodes(self, batch: Batch) -> Tensor:
        return self.x(batch["x"], batch["batch"] % self.num_layers)

    def sequence(self, batch: Batch) -> Tensor:
        nodes_NW = self.encoder(self.scaled_nodes(batch), batch["edge_index"], batch["edge_attr"])
        return pool_layers(nodes_NW, batch, self.num_layers)

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return self.reader(self.sequence(batch), self.scaled_stats(batch)), {}


def pool_layers(nodes_NW: Tensor, batch: Batch, num_layers: int) -> Tensor:
    """[B, L, 2 W]: for each graph, the last answer token and the mean over the answer, concatenated."""
    num_graphs = len(batch["last"])
    answer = batch.get("answer")
    rows, graph = (nodes_NW, batch["batch"]) if answer is None else (nodes_NW[answer], batch["batch"][answer])
    mean_GW = scatter(rows, graph, dim=0, dim_size=num_graphs, reduce="mean")
    return torch.cat([nodes_NW[batch["last"]], mean_GW], dim=1).reshape(num_graphs // num_layers, num_layers, -1)


# B batch, N nodes, E edges, D node features, A attention values of an edge, W width


class HeadMessages(MessagePassing):
    """Each node receives the mean message over its edges; a message depends on the source node and the edge."""

    def __init__(self, width: int, edge_dim: int) -> None:
        super().__init__(aggr="mean")
        self.say = nn.Sequential(nn.Linear(width + edge_dim, width), nn.GELU())
        self.hear = nn.Linear(2 * width, width)

    def forward(self, nodes_NW: Tensor, edge_index_2E: Tensor, edge_attr_EA: Tensor) -> Tensor:
        messages_NW = self.propagate(edge_index_2E, x=nodes_NW, edge_attr=edge_attr_EA)
        return nodes_NW + self.hear(torch.cat([nodes_NW, messages_NW], dim=1)).relu()

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.say(torch.cat([x_j, edge_attr], dim=1))


class HeadGraph(DetectorNet):
    """Takes the output of `HeadGraphFeature`: attention only, as in the original."""

    def __init__(self, width: int, *, dim: int, edge_dim: int, dropout: float) -> None:
        super().__init__(width, 0)
        self.x = Scale(1, dim)
        self.edge_attr = Scale(1, edge_dim)
        self.project = nn.Linear(dim, width)
        self.rounds = nn.ModuleList(HeadMessages(width, edge_dim) for _ in range(NUM_ROUNDS))
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    def observe(self, batch: Batch, moments: dict[str, Moments]) -> None:
        moments["x"].add(batch["x"])
        moments["edge_attr"].add(batch["edge_attr"])

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        nodes_NW = cast(Tensor, self.project(self.x(batch["x"])))
        edges_EA = self.edge_attr(batch["edge_attr"])
        for round in self.rounds:
            nodes_NW = round(nodes_NW, batch["edge_index"], edges_EA)
        answer = batch["answer"]
        num_records = len(batch["ptr"]) - 1
        mean_BW = scatter(nodes_NW[answer], batch["batch"][answer], dim=0, dim_size=num_records, reduce="mean")
        return self.head(mean_BW)[:, 0], {}
