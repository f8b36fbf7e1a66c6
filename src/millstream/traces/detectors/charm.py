"""`charm`: one graph per record whose edges carry the attention of all layers or heads (after CHARM, Frasca et al.)."""

# B batch, N nodes, E edges, D node features, A attention values of an edge, W width

from typing import cast

import torch
from torch import Tensor, nn

from millstream.traces.detectors.gnn import MessagePassing, scatter
from millstream.traces.detectors.net import DetectorNet, Scale
from millstream.training.net import Batch, Moments

NUM_ROUNDS = 2


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
