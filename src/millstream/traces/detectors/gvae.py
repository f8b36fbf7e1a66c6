"""`gvae`: the encoder of `gnn` made variational; it has to explain the graph, and the LSTM reads what it believes."""

# B batch, L layers, D width of a node, N nodes, M masked nodes, E edges, G graphs = B * L, W width, Z latent

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from millstream.model.gnn import GraphEncoder, GraphLSTM, read_layers
from millstream.model.net import Batch, Reader

MASKED = 0.2  # share of nodes whose features are hidden from the encoder, and have to be told by the decoder
LOGVAR_LIMIT = 6.0
ACTIVE = 0.01  # variance of a latent mean over nodes, above which the unit is in use (Burda et al.)


class GraphVAE(GraphLSTM):
    """The decoder tells which tokens attend to which (inner product) and what the masked nodes were.

    Both are outside the encoder, so there is no trivial answer. All terms are means. `kl_share` rises from 0 to 1 while
    training begins; a latent unit pays nothing for its first `free_bits`.
    """

    kl_share: Tensor

    def __init__(
        self,
        width: int,
        *,
        num_layers: int,
        dim: int,
        num_stats: int,
        dropout: float,
        kl_weight: float = 0.1,
        free_bits: float = 0.05,
    ) -> None:
        super().__init__(width, num_layers=num_layers, dim=dim, num_stats=num_stats, dropout=dropout)
        latent = width // 2
        self.kl_weight, self.free_bits = kl_weight, free_bits
        self.encoder = GraphEncoder(dim, width)
        self.mask = nn.Parameter(torch.zeros(dim))
        self.belief = nn.Linear(width, 2 * latent)
        self.edge_gain, self.edge_bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))
        self.tell_nodes = nn.Linear(latent, dim)
        self.reader = Reader(4 * latent, width, num_stats=num_stats, dropout=dropout)
        self.register_buffer("kl_share", torch.ones(()))

    def warm(self, share: float) -> None:
        self.kl_share.fill_(share)

    def believe(self, x_ND: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of each node's latent."""
        nodes_NW = self.encoder(x_ND, batch["edge_index"], batch["edge_attr"])
        mu_NZ, logvar_NZ = self.belief(nodes_NW).chunk(2, dim=1)
        return mu_NZ, logvar_NZ.clamp(-LOGVAR_LIMIT, LOGVAR_LIMIT)

    def sequence(self, batch: Batch) -> Tensor:
        return self._layers(*self.believe(self.scaled_nodes(batch), batch), batch)

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        if not self.training:
            return super().logits(batch)
        x_ND = self.scaled_nodes(batch)
        masked_N = torch.rand(len(x_ND), device=x_ND.device) < MASKED
        mu_NZ, logvar_NZ = self.believe(torch.where(masked_N[:, None], self.mask, x_ND), batch)
        z_NZ = mu_NZ + torch.randn_like(mu_NZ) * (logvar_NZ / 2).exp()
        told_MD = self.tell_nodes(z_NZ[masked_N])
        node_loss = functional.mse_loss(told_MD, x_ND[masked_N]) if len(told_MD) else told_MD.sum()
        kl_Z = (mu_NZ.square() + logvar_NZ.exp() - 1 - logvar_NZ).mean(dim=0) / 2
        terms = {
            "node_loss": node_loss * self.kl_weight,
            "edge_loss": self._edge_loss(z_NZ, batch) * self.kl_weight,
            "kl": kl_Z.clamp(min=self.free_bits).mean() * self.kl_weight * self.kl_share,
        }
        return self.reader(self._layers(mu_NZ, logvar_NZ, batch), self.scaled_stats(batch)), terms

    def measures(self, batch: Batch) -> dict[str, Tensor]:
        """How many latent units are in use."""
        mu_NZ, _ = self.believe(self.scaled_nodes(batch), batch)
        return {"active_units": (mu_NZ.var(dim=0) > ACTIVE).sum().float()}

    def _layers(self, mu_NZ: Tensor, logvar_NZ: Tensor, batch: Batch) -> Tensor:
        return read_layers(torch.cat([mu_NZ, logvar_NZ], dim=1), batch, self.num_layers)

    def _edge_loss(self, z_NZ: Tensor, batch: Batch) -> Tensor:
        """Edges that are there against as many pairs of a node and another one of its graph, drawn by chance."""
        source_E, target_E = batch["edge_index"]
        if not len(source_E):
            return (z_NZ.sum() + self.edge_gain.sum() + self.edge_bias.sum()) * 0  # all parameters have a gradient
        graph_E = batch["batch"][target_E]
        first_E, end_E = batch["ptr"][graph_E], batch["ptr"][graph_E + 1]
        size_E = end_E - first_E
        step_E = 1 + (torch.rand(len(source_E), device=z_NZ.device) * (size_E - 1)).long().clamp(min=0)
        other_E = first_E + (target_E - first_E + step_E) % size_E  # not itself, though it may be a true edge
        gain = self.edge_gain / math.sqrt(z_NZ.shape[1])
        there_E, drawn_E = (((z_NZ[a] * z_NZ[target_E]).sum(1) * gain + self.edge_bias) for a in (source_E, other_E))
        return (functional.softplus(-there_E).mean() + functional.softplus(drawn_E).mean()) / 2
