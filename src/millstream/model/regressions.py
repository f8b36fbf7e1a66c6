"""The arithmetic of many logistic regressions at once, batch by batch. Knows tensors; knows nothing of collections."""

# B batch, G groups, F features of a group, W weights = F + 1 (the last is the bias), K strengths, M rows of a step

from math import ceil

import torch
from torch import Tensor
from torch.nn import functional

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
        width = self.mean_GF.shape[1] + 1
        self._penalty_WK = penalties.repeat(width, 1)
        self._penalty_WK[-1] = 0  # the bias may be large
        self._class_weights = class_weights  # of label 0 and label 1
        self._chance = torch.Generator().manual_seed(seed)
        self._weights_GWK = _Averaged(torch.zeros(num_groups, width, len(penalties)))

    @property
    def weights_GWK(self) -> Tensor:
        return self._weights_GWK.mean

    def learn(self, rows_BGF: Tensor, label_B: Tensor, *, sweeps: int = 1) -> None:
        """Steps over one batch, each on some of its rows; in every sweep on all of them."""
        x_GBW = self._standardised(rows_BGF)
        target_B, weight_B = label_B.float(), self._class_weights[label_B]
        count = ceil(len(label_B) / STEP_ROWS)  # in equal parts: a step on two rows would be mostly chance
        for _ in range(sweeps):
            for place_M in torch.randperm(len(label_B), generator=self._chance).tensor_split(count):
                self._step(x_GBW[:, place_M], target_B[place_M, None], weight_B[place_M, None] / len(place_M))

    def logits(self, rows_BGF: Tensor) -> Tensor:
        """[B, G, K]"""
        return (self._standardised(rows_BGF) @ self.weights_GWK).transpose(0, 1)

    def _step(self, x_GMW: Tensor, target_M1: Tensor, weight_M1: Tensor) -> None:
        value_GWK = self._weights_GWK.value
        error_GMK = (torch.sigmoid(x_GMW @ value_GWK) - target_M1) * weight_M1
        self._weights_GWK.step(x_GMW.transpose(1, 2) @ error_GMK + value_GWK * self._penalty_WK)

    def _standardised(self, rows_BGF: Tensor) -> Tensor:
        x_GBF = ((rows_BGF - self.mean_GF) * self.factor_GF).transpose(0, 1)
        return functional.pad(x_GBF, (0, 1), value=1.0)


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
        self._square.mul_(_SQUARE_MEMORY).addcmul_(slope, slope, value=1 - _SQUARE_MEMORY)
        rate = _RATE / (1 - _MEMORY**self._steps) * (1 - _SQUARE_MEMORY**self._steps) ** 0.5
        self.value.addcdiv_(self._slope, self._square.sqrt().add_(1e-8), value=-rate)
        self.mean.lerp_(self.value, (1 + _RECENT) / (self._steps + _RECENT))


def _scaling(moments: Moments, num_groups: int) -> tuple[Tensor, Tensor]:
    """What to subtract and what to multiply by, [G, F].

    Inputs may be of any scale, so a constant is what hardly varies beside its own size.
    """
    assert moments.count is not None and moments.mean is not None and moments.spread is not None, "no rows were added"
    if not bool(torch.isfinite(moments.mean).all()):
        raise ValueError("the inputs of the training part hold NaN or infinity; trace those records again")
    deviation = (moments.spread / moments.count).sqrt()
    constant = deviation <= 1e-6 * moments.mean.abs()
    factor = 1 / deviation.masked_fill(constant, 1.0)
    return moments.mean.float().view(num_groups, -1), factor.float().view(num_groups, -1)
