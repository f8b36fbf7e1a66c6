"""Detectors over token graphs: `gnn`, its variational version `gvae`, and `charm` (one graph, all heads on its edges).

Plain torch: importing torch_geometric takes four times as long as torch itself, and it would only compute a mean.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from millstream.traces.detectors.net import DetectorNet, Reader, Scale
from millstream.training.task import Batch, Moments

# B batch, L layers, D node features, N nodes, M masked nodes, E edges, G graphs = B * L, W width, Z latent
# A attention values of an edge

NUM_ROUNDS = 2
LOGVAR_LIMIT = 6.0
ACTIVE = 0.01  # a latent unit is active if the variance of its mean over nodes is above this (Burda et al.)


class Messages(nn.Module):
    """A node gets the mean message of the nodes it attends to, and of those that attend to it, with weights of its own.

    A message is relu(node + edge), as in GINE.
    """

    def __init__(self, width: int, edge_dim: int) -> None:
        super().__init__()
        self.forth, self.back = nn.Linear(edge_dim, width), nn.Linear(edge_dim, width)
        self.update = nn.Sequential(nn.Linear(3 * width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, nodes_NW: Tensor, edge_index_2E: Tensor, edges_EA: Tensor) -> Tensor:
        source, target = edge_index_2E
        heard = [
            scatter_mean((nodes_NW.index_select(0, sender) + of_edge(edges_EA)).relu(), hearer, len(nodes_NW))
            for sender, hearer, of_edge in ((source, target, self.forth), (target, source, self.back))
        ]
        return self.update(torch.cat([nodes_NW, *heard], dim=1))


class GraphEncoder(nn.Module):
    """Nodes [N, D] and edges [E, A] -> nodes [N, W]. Graphs are disjoint, so one call takes all."""

    def __init__(self, dim: int, width: int, edge_dim: int) -> None:
        super().__init__()
        self.project = nn.Linear(dim, width)
        self.rounds = nn.ModuleList(Messages(width, edge_dim) for _ in range(NUM_ROUNDS))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(NUM_ROUNDS))
        self.last_norm = nn.LayerNorm(width)

    def forward(self, x_ND: Tensor, edge_index_2E: Tensor, edges_EA: Tensor) -> Tensor:
        nodes_NW = self.project(x_ND)
        for messages, norm in zip(self.rounds, self.norms, strict=True):
            nodes_NW = nodes_NW + messages(norm(nodes_NW), edge_index_2E, edges_EA)
        return self.last_norm(nodes_NW)


class GraphLSTM(DetectorNet):
    """`gnn`: a graph network over the token graphs of all layers, then an LSTM over the layers.

    Takes the output of `ms.features.graphs` and, if `num_stats`, `stats` [B, S]. Beside its features, a node has its
    distance from the last token and whether it is in the answer; an edge, its length.
    """

    def __init__(self, width: int, *, num_layers: int, dim: int, edge_dim: int, num_stats: int, dropout: float) -> None:
        super().__init__(width, num_stats)
        self.x, self.edge_attr = Scale(num_layers, dim), Scale(num_layers, edge_dim)
        self.encoder = GraphEncoder(dim + 2, width, edge_dim + 1)
        self.reader = Reader(2 * width, width, num_stats=num_stats, dropout=dropout)

    @property
    def num_layers(self) -> int:
        return len(self.x.mean)

    def observe(self, batch: Batch, moments: dict[str, Moments]) -> None:
        super().observe(batch, moments)
        layer_N = batch["batch"] % self.num_layers
        moments["x"].add(batch["x"], layer_N, num_groups=self.num_layers)
        layer_E = layer_N[batch["edge_index"][1]]
        moments["edge_attr"].add(batch["edge_attr"], layer_E, num_groups=self.num_layers)

    def scaled_nodes(self, batch: Batch) -> Tensor:
        return self.x(batch["x"], batch["batch"] % self.num_layers)

    def encoded(self, x_ND: Tensor, batch: Batch) -> Tensor:
        """[N, W] from scaled node features."""
        (source, target), graph, token = batch["edge_index"], batch["batch"], batch["position"]
        answer = batch.get("answer")
        in_answer = torch.zeros_like(token) if answer is None else answer
        from_last = token[batch["last"]][graph] - token
        x_ND = torch.cat([x_ND, in_log(from_last), in_answer[:, None].float()], dim=1)
        weights_EA = self.edge_attr(batch["edge_attr"], graph[target] % self.num_layers)
        edges_EA = torch.cat([weights_EA, in_log(token[target] - token[source])], dim=1)
        return self.encoder(x_ND, batch["edge_index"], edges_EA)

    def sequence(self, batch: Batch) -> Tensor:
        return pool_layers(self.encoded(self.scaled_nodes(batch), batch), batch, self.num_layers)

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return self.reader(self.sequence(batch), self.scaled_stats(batch)), {}


def scatter_mean(rows_MW: Tensor, place_M: Tensor, size: int) -> Tensor:
    """[size, W]: the mean of the rows with each place; zeros without any."""
    sums = rows_MW.new_zeros(size, rows_MW.shape[1]).scatter_add_(0, place_M[:, None].expand_as(rows_MW), rows_MW)
    counts = rows_MW.new_zeros(size).scatter_add_(0, place_M, rows_MW.new_ones(len(place_M)))
    return sums / counts.clamp_(min=1)[:, None]


def in_log(distance: Tensor) -> Tensor:
    """A feature [.., 1] of distances in tokens, 1 for 19 of them."""
    return distance[:, None].abs().float().log1p() / 3


def pool_layers(nodes_NW: Tensor, batch: Batch, num_layers: int) -> Tensor:
    """[B, L, 2 W]: for each graph, the last answer token and the mean over the answer, concatenated."""
    num_graphs = len(batch["last"])
    answer = batch.get("answer")
    rows, graph = (nodes_NW, batch["batch"]) if answer is None else (nodes_NW[answer], batch["batch"][answer])
    mean_GW = scatter_mean(rows, graph, num_graphs)
    return torch.cat([nodes_NW[batch["last"]], mean_GW], dim=1).reshape(num_graphs // num_layers, num_layers, -1)


class GraphVAE(GraphLSTM):
    """`gvae`: `gnn` with a variational encoder that learns to reconstruct the graph; the LSTM reads its posterior.

    The decoder predicts which tokens attend to which (inner product), and the features of the masked nodes. The encoder
    sees neither, so there is no trivial solution. All terms are means. `kl_share` rises from 0 to 1 during warm-up; the
    first `free_bits` of a latent unit cost nothing. `masked` is the fraction of nodes whose features are masked.
    """

    kl_share: Tensor

    def __init__(
        self,
        width: int,
        *,
        num_layers: int,
        dim: int,
        edge_dim: int,
        num_stats: int,
        dropout: float,
        kl_weight: float = 0.1,
        free_bits: float = 0.05,
        masked: float = 0.2,
    ) -> None:
        sizes = {"num_layers": num_layers, "dim": dim, "edge_dim": edge_dim, "num_stats": num_stats}
        super().__init__(width, **sizes, dropout=dropout)
        latent = width // 2
        self.kl_weight, self.free_bits, self.masked = kl_weight, free_bits, masked
        self.mask = nn.Parameter(torch.zeros(dim))
        self.posterior = nn.Linear(width, 2 * latent)
        self.edge_gain, self.edge_bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))
        self.decode_nodes = nn.Linear(latent, dim)
        self.reader = Reader(4 * latent, width, num_stats=num_stats, dropout=dropout)
        self.register_buffer("kl_share", torch.ones(()))

    def warm(self, share: float) -> None:
        self.kl_share.fill_(share)

    def encode(self, x_ND: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of each node's latent."""
        nodes_NW = self.encoded(x_ND, batch)
        mu_NZ, logvar_NZ = self.posterior(nodes_NW).chunk(2, dim=1)
        return mu_NZ, logvar_NZ.clamp(-LOGVAR_LIMIT, LOGVAR_LIMIT)

    def sequence(self, batch: Batch) -> Tensor:
        return self._layers(*self.encode(self.scaled_nodes(batch), batch), batch)

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        if not self.training:
            return super().logits(batch)
        x_ND = self.scaled_nodes(batch)
        masked_N = torch.rand(len(x_ND), device=x_ND.device) < self.masked
        mu_NZ, logvar_NZ = self.encode(torch.where(masked_N[:, None], self.mask, x_ND), batch)
        z_NZ = mu_NZ + torch.randn_like(mu_NZ) * (logvar_NZ / 2).exp()
        decoded_MD = self.decode_nodes(z_NZ[masked_N])
        node_loss = functional.mse_loss(decoded_MD, x_ND[masked_N]) if len(decoded_MD) else decoded_MD.sum()
        kl_Z = (mu_NZ.square() + logvar_NZ.exp() - 1 - logvar_NZ).mean(dim=0) / 2
        terms = {
            "node_loss": node_loss * self.kl_weight,
            "edge_loss": self._edge_loss(z_NZ, batch) * self.kl_weight,
            "kl": kl_Z.clamp(min=self.free_bits).mean() * self.kl_weight * self.kl_share,
        }
        return self.reader(self._layers(mu_NZ, logvar_NZ, batch), self.scaled_stats(batch)), terms

    def measures(self, batch: Batch) -> dict[str, Tensor]:
        """The number of active latent units."""
        mu_NZ, _ = self.encode(self.scaled_nodes(batch), batch)
        return {"active_units": (mu_NZ.var(dim=0) > ACTIVE).sum().float()}

    def _layers(self, mu_NZ: Tensor, logvar_NZ: Tensor, batch: Batch) -> Tensor:
        return pool_layers(torch.cat([mu_NZ, logvar_NZ], dim=1), batch, self.num_layers)

    def _edge_loss(self, z_NZ: Tensor, batch: Batch) -> Tensor:
        """Binary cross-entropy of the edges against as many random pairs of nodes of the same graph."""
        source_E, target_E = batch["edge_index"]
        if not len(source_E):
            return (z_NZ.sum() + self.edge_gain.sum() + self.edge_bias.sum()) * 0  # gives all parameters a gradient
        graph_E = batch["batch"][target_E]
        first_E, end_E = batch["ptr"][graph_E], batch["ptr"][graph_E + 1]
        size_E = end_E - first_E
        step_E = 1 + (torch.rand(len(source_E), device=z_NZ.device) * (size_E - 1)).long().clamp(min=0)
        other_E = first_E + (target_E - first_E + step_E) % size_E  # not the node itself; may be a true edge
        gain = self.edge_gain / math.sqrt(z_NZ.shape[1])
        edge_E, drawn_E = (((z_NZ[a] * z_NZ[target_E]).sum(1) * gain + self.edge_bias) for a in (source_E, other_E))
        return (functional.softplus(-edge_E).mean() + functional.softplus(drawn_E).mean()) / 2


class HeadMessages(nn.Module):
    """Each node receives the mean message over its edges; a message depends on the source node and the edge."""

    def __init__(self, width: int, edge_dim: int) -> None:
        super().__init__()
        self.say = nn.Sequential(nn.Linear(width + edge_dim, width), nn.GELU())
        self.hear = nn.Linear(2 * width, width)

    def forward(self, nodes_NW: Tensor, edge_index_2E: Tensor, edge_attr_EA: Tensor) -> Tensor:
        source, target = edge_index_2E
        said_EW = self.say(torch.cat([nodes_NW.index_select(0, source), edge_attr_EA], dim=1))
        messages_NW = scatter_mean(said_EW, target, len(nodes_NW))
        return nodes_NW + self.hear(torch.cat([nodes_NW, messages_NW], dim=1)).relu()


class HeadGraph(DetectorNet):
    """`charm`: one graph per record, all heads on its edges. Takes the output of `HeadGraphFeature`: attention only."""

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
        nodes_NW: Tensor = self.project(self.x(batch["x"]))
        edges_EA = self.edge_attr(batch["edge_attr"])
        for round in self.rounds:
            nodes_NW = round(nodes_NW, batch["edge_index"], edges_EA)
        answer = batch["answer"]
        num_records = len(batch["ptr"]) - 1
        mean_BW = scatter_mean(nodes_NW[answer], batch["batch"][answer], num_records)
        return self.head(mean_BW)[:, 0], {}
