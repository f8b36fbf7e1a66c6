"""What the trained detectors share: scaled inputs, a reader of layers, a loss, a width for a number of parameters."""

# B batch, L layers, D width of an input, S token statistics, W width

from collections.abc import Callable, Mapping
from functools import cache
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from millstream.model.moments import Moments

Batch = Mapping[str, Tensor]
LIMIT = 8.0  # standard deviations; a few units of large models are hundreds of them away


class Scale(nn.Module):
    """Standardises rows by what was seen on the training part, for each layer on its own."""

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
        """`group` is each row's; without it the groups are the last axis but one."""
        mean, factor = (self.mean, self.factor) if group is None else (self.mean[group], self.factor[group])
        return ((rows - mean) * factor).clamp(-LIMIT, LIMIT)


class Reader(nn.Module):
    """A bidirectional LSTM over the layers, and a head that sees the token statistics beside what it says."""

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


class Net(nn.Module):
    """What is trained by gradients. As it is here, a detector: `logits` [B] of being wrong."""

    lr = 2e-3  # the learning rate, where none is given
    at_most = 64  # records at once; fewer where they would not fit the cache
    most_records = 1 << 62  # in all epochs, after which there is nothing left to learn
    clips = True  # whether its gradient has a norm to clip
    loss_name = "bce"

    def __init__(self, width: int, num_stats: int) -> None:
        super().__init__()
        self.width = width
        self.stats = Scale(1, num_stats) if num_stats else None

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits, and by name further terms of the loss (while training; already weighted)."""
        raise NotImplementedError

    def sequence(self, batch: Batch) -> Tensor | None:
        """[B, L, W]: what its `reader` reads layer by layer; None for a net that has none."""
        return None

    def by_layer(self, batch: Batch) -> Tensor | None:
        """[B, L]: what it would say if a layer were the last; the last column is the score."""
        layers_BLW = self.sequence(batch)
        if layers_BLW is None:
            return None
        read, stats_BS = cast(Reader, self.reader), self.scaled_stats(batch)
        logits = [read(layers_BLW[:, : last + 1], stats_BS) for last in range(layers_BLW.shape[1])]
        return torch.stack(logits, dim=1).float().sigmoid()

    def observe(self, batch: Batch, moments: dict[str, Moments]) -> None:
        """Add a batch of the training part to the moments of each input."""
        if self.stats is not None:
            moments["stats"].add(batch["stats"])

    @property
    def has_scales(self) -> bool:
        """Whether it has to see the training part before it is trained."""
        return any(isinstance(module, Scale) for module in self.modules())

    def set_scales(self, moments: Mapping[str, Moments]) -> None:
        for name, found in moments.items():
            cast(Scale, getattr(self, name)).set(found)

    def warm(self, share: float) -> None:
        """Told before a step how much of the warm-up, the first fifth of training, is over: from 0 to 1."""

    def measures(self, batch: Batch) -> dict[str, Tensor]:
        """What is worth knowing of a batch of the validation part, beside its scores."""
        return {}

    def forward(self, batch: Batch, target_B: Tensor, weight_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its parts."""
        logits, terms = self.logits(batch)
        loss = self.loss(logits, target_B, weight_B)
        parts = {self.loss_name: loss.detach(), **{name: term.detach() for name, term in terms.items()}}
        return loss + sum(terms.values()), parts

    def loss(self, logits: Tensor, target_B: Tensor, weight_B: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(logits, target_B.float(), weight_B)

    def answer(self, batch: Batch) -> dict[str, Tensor]:
        """What it says of each record, by name."""
        return {"score": self.logits(batch)[0].float().sigmoid()}

    def num_rows(self, batch: Batch) -> int:
        """Of its largest activation, each `width` wide."""
        return max(len(batch[name]) for name in ("layers", "x", "edge_attr") if name in batch)

    def optimizer(self, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=lr, weight_decay=weight_decay)

    def scaled_stats(self, batch: Batch) -> Tensor | None:
        return None if self.stats is None else self.stats(batch["stats"])


def count_parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def match_width(build: Callable[[int], nn.Module], parameters: int) -> int:
    """The width, a multiple of four, that gives a net about so many parameters; at least 8."""

    @cache
    def size(width: int) -> int:
        with torch.device("meta"):
            return count_parameters(build(width))

    low, high = 8, 16
    while high < 4096 and size(high) <= parameters:  # most nets are small, and to build one takes time
        low, high = high, 2 * high
    while high - low > 2:
        middle = (low + high) // 4 * 2
        low, high = (middle, high) if size(middle) <= parameters else (low, middle)
    return min((low, high), key=lambda width: abs(size(width) - parameters))
