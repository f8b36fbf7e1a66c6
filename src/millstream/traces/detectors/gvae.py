"""`gvae`: `gnn` with a variational encoder that learns to reconstruct the graph; the LSTM reads its posterior."""

# B batch, L layers, D node features, N nodes, M masked nodes, E edges, G graphs = B * L, W width, Z latent

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from millstream.traces.detectors.gnn import GraphEncoder, GraphLSTM, pool_layers
from millstream.traces.detectors.net import Reader
from millstream.training.task import Batch

LOGVAR_LIMIT = 6.0
ACTIVE = 0.01  # a latent unit is active if the variance of its mean over nodes is above this (Burda et al.)


class GraphVAE(GraphLSTM):
    """The decoder predicts which tokens attend to which (inner product), and the features of the masked nodes.

    The encoder sees neither, so there is no trivial solution. All terms are means. `kl_share` rises from 0 to 1 during
    warm-up; the first `free_bits` of a latent unit cost nothing. `masked` is the fraction of nodes whose features are
    masked.
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
        masked: float = 0.2,
    ) -> None:
        super().__init__(width, num_layers=num_layers, dim=dim, num_stats=num_stats, dropout=dropout)
        latent = width // 2
        self.kl_weight, self.free_bits, self.masked = kl_weight, free_bits, masked
        self.encoder = GraphEncoder(dim, width)
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
        nodes_NW = self.encoder(x_ND, batch["edge_index"], batch["edge_attr"])
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
