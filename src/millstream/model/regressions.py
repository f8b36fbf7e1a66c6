"""The arithmetic of many logistic regressions at once, batch by batch. Knows tensors; knows nothing of collections."""

# B batch, G groups, F features of a group, K strengths of the penalty, M rows of a step

from math import ceil

import torch
from torch import Tensor

from millstream.model.moments import Moments

STEP_ROWS = 32
_RATE = 0.02
_MEMORY, _SQUARE_MEMORY = 0.9, 0.999
_RECENT = 8  # the larger, the more the mean of all steps is that of the last ones


class Regressions:
    """G x K regressions, each on the standardised features of its group and under its own penalty."""

    def __init__(
        self, moments: Moments, *, num_groups: int, penalties: Tensor, class_weights: Tensor, seed: int
    ) -> None:
        self.mean_GF, self.factor_GF = _scaling(moments, num_groups)
        self._penalty_K = penalties
        self._class_weights = class_weights  # of label 0 and label 1
        self._chance = torch.Generator().manual_seed(seed)
        self._weights_GFK = _Averaged(torch.zeros(*self.mean_GF.shape, len(penalties)))
        self._bias_G1K = _Averaged(torch.zeros(num_groups, 1, len(penalties)))

    @property
    def weights_GFK(self) -> Tensor:
        return self._weights_GFK.mean

    @property
    def bias_GK(self) -> Tensor:
        return self._bias_G1K.mean[:, 0]

    def learn(self, rows_BGF: Tensor, label_B: Tensor, *, sweeps: int = 1) -> None:
        """Steps over one batch, each on some of its rows; in every sweep on all of them."""
        x_GBF = self._standardised(rows_BGF)
        count = ceil(len(label_B) / STEP_ROWS)  # in equal parts: a step on two rows would be mostly chance
        for _ in range(sweeps):
            for place_M in torch.randperm(len(label_B), generator=self._chance).tensor_split(count):
                self._step(x_GBF[:, place_M], label_B[place_M])

    def _step(self, x_GMF: Tensor, label_M: Tensor) -> None:
        p_GMK = torch.sigmoid(x_GMF @ self._weights_GFK.value + self._bias_G1K.value)
        error_GMK = (p_GMK - label_M[:, None]) * self._class_weights[label_M][:, None] / len(label_M)
        self._bias_G1K.step(error_GMK.sum(1, keepdim=True))
        slope_GFK = x_GMF.transpose(1, 2) @ error_GMK
        self._weights_GFK.step(slope_GFK + self._weights_GFK.value * self._penalty_K)

    def logits(self, rows_BGF: Tensor) -> Tensor:
        """[B, G, K]"""
        return (self._standardised(rows_BGF) @ self.weights_GFK + self._bias_G1K.mean).transpose(0, 1)

    def _standardised(self, rows_BGF: Tensor) -> Tensor:
        return ((rows_BGF - self.mean_GF) * self.factor_GF).transpose(0, 1)


class _Averaged:
    """Adam at a constant rate, and the mean of its steps, which comes to rest where the steps themselves do not.

    There is no schedule, so that it can stop after any epoch. (`torch.optim` takes 2 s to import.)
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.mean = value.clone()
        self._slope = torch.zeros_like(value)
        self._square = torch.zeros_like(value)
        self._steps = 0

    def step(self, slope: Tensor) -> None:
        self._steps += 1
        self._slope.lerp_(slope, 1 - _MEMORY)
        self._square.lerp_(slope.square(), 1 - _SQUARE_MEMORY)
        rate = _RATE / (1 - _MEMORY**self._steps)
        root = (self._square / (1 - _SQUARE_MEMORY**self._steps)).sqrt_()
        self.value = self.value - rate * self._slope / (root + 1e-8)
        self.mean.lerp_(self.value, (1 + _RECENT) / (self._steps + _RECENT))


def _scaling(moments: Moments, num_groups: int) -> tuple[Tensor, Tensor]:
    """What to subtract and what to multiply by, [G, F]: inputs may be of any scale, so a constant is one that is
    constant beside its own size."""
    assert moments.count is not None and moments.mean is not None and moments.spread is not None, "no rows were added"
    if not bool(torch.isfinite(moments.mean).all()):
        raise ValueError("the inputs of the training part hold NaN or infinity; trace those records again")
    deviation = (moments.spread / moments.count).sqrt()
    constant = deviation <= 1e-6 * moments.mean.abs()
    factor = torch.where(constant, 1.0, 1 / torch.where(constant, 1.0, deviation))
    return moments.mean.float().view(num_groups, -1), factor.float().view(num_groups, -1)
