"""Mean and standard deviation of what flows by, in one pass and little memory: what inputs are scaled with."""

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST = 1e-5  # a standard deviation below it is a constant, which must not be blown up


@dataclass
class Moments:
    """Of rows that come in batches; each row belongs to one of several groups (as layers), or all to one."""

    count: Tensor | None = None  # [groups]
    mean: Tensor | None = None  # [groups, dim]
    spread: Tensor | None = None  # sum of squared distances from the mean

    def add(self, rows_ND: Tensor, group_N: Tensor | None = None, *, num_groups: int = 1) -> None:
        """Merge a batch in (Chan et al.), in float64: sums of squares alone lose everything for a large mean."""
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
        """What to subtract and what to multiply by, float32 [groups, dim]."""
        assert self.count is not None and self.mean is not None and self.spread is not None, "no rows were added"
        deviation = (self.spread / self.count.clamp(min=1)).sqrt()
        return self.mean.float(), (1 / torch.where(deviation < SMALLEST, 1.0, deviation)).float()
