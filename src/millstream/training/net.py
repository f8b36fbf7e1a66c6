"""What every net has: a loss, a width, and a preparation step on the training data, such as fitting a scaler."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# B batch, N rows, D features

Batch = Mapping[str, Tensor]
SMALLEST = 1e-5  # a smaller standard deviation is a constant, which must not be scaled up


class Net(nn.Module):
    """Trained by gradients. Subclasses give `logits`, `loss`, `loss_name` and `num_rows`; the rest has defaults."""

    lr = 2e-3  # learning rate, unless the settings have one
    at_most = 64  # records per pass; fewer if they would not fit in the cache
    most_records = 1 << 62  # over all epochs: training ends after so many
    clips = True  # whether to clip its gradient norm
    loss_name: str  # of `loss` in the log

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits, and further loss terms by name (in training; already weighted)."""
        raise NotImplementedError

    def loss(self, logits: Tensor, target_B: Tensor, weight_B: Tensor) -> Tensor:
        raise NotImplementedError

    def num_rows(self, batch: Batch) -> int:
        """Rows of its largest activation, each `width` wide."""
        raise NotImplementedError

    @property
    def needs_preparation(self) -> bool:
        """Whether `prepare` has to be called before the first step."""
        return False

    def prepare(self, batches: Iterable[Batch]) -> None:
        """One pass over the training split, with labels, before the first step: fit a scaler, count features."""

    def warm(self, share: float) -> None:
        """Called before each step with the completed share of the warm-up (the first fifth of training), 0 to 1."""

    def measures(self, batch: Batch) -> dict[str, Tensor]:
        """Values to log for a batch of the validation split, besides the scores."""
        return {}

    def forward(self, batch: Batch, target_B: Tensor, weight_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and its terms by name."""
        logits, terms = self.logits(batch)
        loss = self.loss(logits, target_B, weight_B)
        parts = {self.loss_name: loss.detach(), **{name: term.detach() for name, term in terms.items()}}
        return loss + sum(terms.values()), parts

    def optimizer(self, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=lr, weight_decay=weight_decay)


def count_parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


@dataclass
class Moments:
    """Mean and variance of rows that come in batches; each row belongs to one of several groups, or all to one."""

    count: Tensor | None = None  # [groups]
    mean: Tensor | None = None  # [groups, dim]
    spread: Tensor | None = None  # sum of squared distances from the mean

    def add(self, rows_ND: Tensor, group_N: Tensor | None = None, *, num_groups: int = 1) -> None:
        """Merge a batch (Chan et al.) in float64: plain sums of squares lose all precision for a large mean."""
        rows = rows_ND.double()
        group = torch.zeros(len(rows), dtype=torch.long) if group_N is None else group_N
        empty = torch.zeros(num_groups, rows.shape[1], dtype=torch.float64)
        count = torch.bincount(group, minlength=num_groups).double()[:, None]
        mean = empty.index_add(0, group, rows) / count.clamp(min=1)
        spread = empty.index_add(0, group, (rows - mean[group]).square())
        if self.count is None or self.mean is None or self.spread is None:
            self.count, self.mean, self.spread = count, mean, spread
            return
        both = (self.count + count).clamp(min=1)
        step = mean - self.mean
        self.spread = self.spread + spread + step.square() * self.count * count / both
        self.mean = self.mean + step * count / both
        self.count = self.count + count

    def scaling(self) -> tuple[Tensor, Tensor]:
        """The mean to subtract and the factor to multiply by, float32 [groups, dim]."""
        assert self.count is not None and self.mean is not None and self.spread is not None, "no rows were added"
        deviation = (self.spread / self.count.clamp(min=1)).sqrt()
        return self.mean.float(), (1 / torch.where(deviation < SMALLEST, 1.0, deviation)).float()
