"""Many logistic regressions at once, by steps on batches: per group of inputs, penalty, and weights of rows."""

from collections.abc import Sequence
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.adam import adam

from millstream.training.task import Moments

# B batch, G groups, F features of a group, W weights = F + 1 (the last is the bias), K strengths of the penalty
# M rows of a step

STEP_ROWS = 32
_RATE = 0.02
_RECENT = 8  # weight of recent steps in the mean over all steps
_NUM_STEPS, _FEW_EPOCHS, _MIN_EPOCHS = 1500, 10, 5


class Regressions:
    """G x K regressions, each on the standardised features of its group; the K of a group differ in their penalty,
    and may differ in the targets and weights of rows: folds, for example, are weights of 0.

    Adam at a constant rate, without a schedule, so that training may stop after any epoch. `weights_GKW` is the mean
    over the steps, which converges even if the steps do not. W is the last axis of all operands: with K of a handful
    last, a product of matrices takes three times as long.
    """

    def __init__(self, moments: Moments, *, num_groups: int, penalties: Tensor, seed: int) -> None:
        self.mean_GF, self.factor_GF = _scaling(moments, num_groups)
        width = self.mean_GF.shape[1] + 1
        self._penalty_KW = penalties[:, None].repeat(1, width)
        self._penalty_KW[:, -1] = 0  # the bias is not penalised
        self._random = torch.Generator().manual_seed(seed)
        self.weights_GKW = torch.zeros(num_groups, len(penalties), width)
        self._last_GKW = self.weights_GKW.clone()
        self._moments_GKW = torch.zeros_like(self._last_GKW), torch.zeros_like(self._last_GKW)
        self._num_adam_steps = torch.tensor(0.0)
        self._num_steps = 0

    @property
    def num_outputs(self) -> int:
        """Logits per row."""
        return self.weights_GKW.shape[0] * self.weights_GKW.shape[1]

    def learn(
        self,
        rows_BGF: Tensor,
        target_BK: Tensor,
        weight_BK: Tensor,
        *,
        among: Tensor | None = None,
        sweeps: int = 1,
        step_rows: int = STEP_ROWS,
    ) -> None:
        """Take steps on chunks of one batch; every sweep covers all its rows, or those `among` them.

        Of targets and weights, K may be 1.
        """
        place_B = torch.arange(len(target_BK)) if among is None else among
        target_BK = target_BK.float()
        count = ceil(len(place_B) / step_rows)  # in equal chunks: a step on two rows would be mostly noise
        for _ in range(sweeps):
            for part_M in torch.randperm(len(place_B), generator=self._random).tensor_split(count):
                row_M = place_B[part_M]
                self._step(self._standardised(rows_BGF[row_M]), target_BK[row_M], weight_BK[row_M] / len(row_M))

    def logits(self, rows_BGF: Tensor) -> Tensor:
        """[B, G, K]"""
        weights_GWK = self.weights_GKW.transpose(1, 2)
        parts = torch.split(rows_BGF, STEP_ROWS)  # pyright: ignore[reportUnknownMemberType]
        return torch.cat([(self._standardised(rows_MGF) @ weights_GWK).transpose(0, 1) for rows_MGF in parts])

    def _step(self, x_GMW: Tensor, target_MK: Tensor, weight_MK: Tensor) -> None:
        error_GMK = (torch.sigmoid(x_GMW @ self._last_GKW.transpose(1, 2)) - target_MK) * weight_MK
        gradient_GKW = error_GMK.transpose(1, 2) @ x_GMW + self._last_GKW * self._penalty_KW
        first_GKW, second_GKW = self._moments_GKW
        adam(  # a small step takes half the time with `fused`, and half of that without torch.optim.Adam around it
            [self._last_GKW], [gradient_GKW], [first_GKW], [second_GKW], [], [self._num_adam_steps], fused=True,
            amsgrad=False, beta1=0.9, beta2=0.999, lr=_RATE, weight_decay=0.0, eps=1e-8, maximize=False,
        )  # fmt: skip
        self._num_steps += 1
        self.weights_GKW.lerp_(self._last_GKW, (1 + _RECENT) / (self._num_steps + _RECENT))

    def _standardised(self, rows_MGF: Tensor) -> Tensor:
        """[G, M, W], of a few rows at a time: what does not leave the cache takes half as long."""
        num_rows, num_groups, width = rows_MGF.shape
        x_GMW = torch.ones(num_groups, num_rows, width + 1)
        x_GMF = x_GMW[:, :, :-1]
        torch.sub(rows_MGF.float().transpose(0, 1), self.mean_GF[:, None], out=x_GMF)
        x_GMF.mul_(self.factor_GF[:, None])
        return x_GMW


def _scaling(moments: Moments, num_groups: int) -> tuple[Tensor, Tensor]:
    """The mean to subtract and the factor to multiply by, [G, F].

    Inputs have any scale, so a feature is constant if its deviation is tiny relative to its mean.
    """
    assert moments.count is not None and moments.mean is not None and moments.spread is not None, "no rows were added"
    deviation = (moments.spread / moments.count).sqrt()
    constant = deviation <= 1e-6 * moments.mean.abs()
    factor = 1 / deviation.masked_fill(constant, 1.0)
    return moments.mean.float().view(num_groups, -1), factor.float().view(num_groups, -1)


def penalties_of(strengths: Sequence[float], num_rows: int) -> Tensor:
    """[K]: the weights of the penalty for values of C: sklearn's C is relative to the sum of losses, not the mean."""
    return 1 / (torch.tensor(strengths) * num_rows)


def balanced(counts: NDArray[np.int64]) -> Tensor:
    """The weights of label 0 and label 1, for which both count the same; 1 on average."""
    return torch.tensor(0.5 / (counts / counts.sum()), dtype=torch.float32)


def duration(num_rows: int, step_rows: int = STEP_ROWS) -> tuple[int, int]:
    """The number of epochs, and of sweeps over each batch, for enough steps at any size of the training split.

    A small split gets several sweeps: reading a batch takes longer than learning from it.
    """
    per_epoch = ceil(num_rows / step_rows)
    sweeps = ceil(_NUM_STEPS / _FEW_EPOCHS / per_epoch)
    return max(ceil(_NUM_STEPS / per_epoch / sweeps), _MIN_EPOCHS), sweeps
