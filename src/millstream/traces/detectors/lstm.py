"""`lstm`: a bidirectional LSTM over the layers' vectors at one token."""

# B batch, L layers, D hidden, W width

from typing import cast

import torch
from torch import Tensor, nn

from millstream.traces.detectors.net import DetectorNet, Reader, Scale
from millstream.training.net import Batch, Moments


class LayerLSTM(DetectorNet):
    """Takes `layers` [B, L, D] and, if `num_stats`, `stats` [B, S]."""

    def __init__(self, width: int, *, num_layers: int, dim: int, num_stats: int, dropout: float) -> None:
        super().__init__(width, num_stats)
        self.layers = Scale(num_layers, dim)
        self.project = nn.Linear(dim, width)
        self.reader = Reader(width, width, num_stats=num_stats, dropout=dropout)

    def observe(self, batch: Batch, moments: dict[str, Moments]) -> None:
        super().observe(batch, moments)
        num_layers, dim = self.layers.mean.shape
        rows_BLD = batch["layers"]
        group = torch.arange(num_layers).repeat(len(rows_BLD))
        moments["layers"].add(rows_BLD.reshape(-1, dim), group, num_groups=num_layers)

    def sequence(self, batch: Batch) -> Tensor:
        layers_BLD = cast(Tensor, self.layers(batch["layers"]))
        return nn.functional.gelu(self.project(layers_BLD))

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return self.reader(self.sequence(batch), self.scaled_stats(batch)), {}
