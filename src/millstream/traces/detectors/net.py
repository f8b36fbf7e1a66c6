"""What the trained detectors share (input scaling, an LSTM over layers, the loss), and `lstm`, the simplest of them."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from millstream.training.task import Batch, Moments, Net, count_parameters

# B batch, L layers, D input features, S token statistics, W width


LIMIT = 8.0  # standard deviations; a few units of large models reach hundreds


class Scale(nn.Module):
    """Standardises rows with the statistics of the training split, separately per group (layer)."""

    mean: Tensor
    factor: Tensor

    def __init__(self, num_groups: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_groups, dim))
        self.register_buffer("factor", torch.ones(num_groups, dim))

    def set(self, moments: Moments) -> None:
        mean, factor = moments.scaling()
        self.mean.copy_(mean)
        self.factor.copy_(factor)

    def forward(self, rows: Tensor, group: Tensor | None = None) -> Tensor:
        """`group` is the group of each row; by default the second-to-last axis."""
        mean, factor = (self.mean, self.factor) if group is None else (self.mean[group], self.factor[group])
        return ((rows - mean) * factor).clamp(-LIMIT, LIMIT)


class Reader(nn.Module):
    """A bidirectional LSTM over the layers, and a head on its last states and the token statistics."""

    def __init__(self, dim: int, width: int, *, num_stats: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(dim, width // 2, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Sequential(
            nn.Linear(2 * (width // 2) + num_stats, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, 1)
        )

    def forward(self, layers_BLD: Tensor, stats_BS: Tensor | None) -> Tensor:
        _, (last_2BW, _) = self.lstm(self.dropout(layers_BLD))
        read_BW = torch.cat([last_2BW[0], last_2BW[1]], dim=1)
        seen = read_BW if stats_BS is None else torch.cat([read_BW, stats_BS], dim=1)
        return self.head(seen)[:, 0]


class DetectorNet(Net):
    """A net with `logits` [B] of an answer being wrong. `prepare` fits the scaling of its inputs."""

    loss_name = "bce"

    def __init__(self, width: int, num_stats: int) -> None:
        super().__init__(width)
        self.stats = Scale(1, num_stats) if num_stats else None

    @property
    def needs_preparation(self) -> bool:
        return any(isinstance(module, Scale) for module in self.modules())

    def prepare(self, batches: Iterable[Batch]) -> None:
        """Fit the scaler of each input."""
        moments: defaultdict[str, Moments] = defaultdict(Moments)
        for batch in batches:
            self.observe(batch, moments)
        for name, found in moments.items():
            cast(Scale, getattr(self, name)).set(found)

    def observe(self, batch: Batch, moments: dict[str, Moments]) -> None:
        """Add a batch to the moments of each input, by the name of its `Scale`."""
        if self.stats is not None:
            moments["stats"].add(batch["stats"])

    def sequence(self, batch: Batch) -> Tensor | None:
        """[B, L, W]: the input of `reader`, layer by layer; None for a net without one."""
        return None

    def by_layer(self, batch: Batch) -> Tensor | None:
        """[B, L]: the score if each layer were the last; the last column is the final score."""
        layers_BLW = self.sequence(batch)
        if layers_BLW is None:
            return None
        read, stats_BS = cast(Reader, self.reader), self.scaled_stats(batch)
        logits = [read(layers_BLW[:, : last + 1], stats_BS) for last in range(layers_BLW.shape[1])]
        return torch.stack(logits, dim=1).float().sigmoid()

    def loss(self, logits: Tensor, target_B: Tensor, weight_B: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(logits, target_B.float(), weight_B)

    def num_rows(self, batch: Batch) -> int:
        return max(len(batch[name]) for name in ("layers", "x", "edge_attr") if name in batch)

    def scaled_stats(self, batch: Batch) -> Tensor | None:
        return None if self.stats is None else self.stats(batch["stats"])


def score_of(net: Net, batch: Batch) -> dict[str, Tensor]:
    """The probability that each answer is wrong."""
    return {"score": net.logits(batch)[0].float().sigmoid()}


def match_width(build: Callable[[int], nn.Module], parameters: int) -> int:
    """The width that gives a net about this many parameters; even, and at least 8."""

    @cache
    def size(width: int) -> int:
        with torch.device("meta"):
            return count_parameters(build(width))

    low, high = 8, 16
    while high < 4096 and size(high) <= parameters:  # start small: building a net takes time
        low, high = high, 2 * high
    while high - low > 2:
        middle = (low + high) // 4 * 2
        low, high = (middle, high) if size(middle) <= parameters else (low, middle)
    return min((low, high), key=lambda width: abs(size(width) - parameters))


# B batch, L layers, D hidden, W width


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
