"""`mil`: multiple-instance learning over the tokens of an answer (HaMI, NeurIPS 2025, arXiv 2504.07863).

HaMI (Niu et al.): a small net scores every token; the score of an answer is the mean of its highest tokens, and wrong
answers should have a higher one than right answers. The layer is chosen on validation. Reads a few layers of
`answer_hidden`, or of `hidden` with `prompt_len`; and `answer_len`.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from millstream.core.features import Feature
from millstream.traces.detectors.layer_nets import LayerLinear, LayerNet
from millstream.traces.detectors.logistic import split_rows
from millstream.traces.detectors.tokens import TokenFeature, observe_tokens, sizes_of
from millstream.training.task import Batch, Moments

# B batch, A answer tokens of all records, concatenated, T tokens of the longest, L layers, D hidden, W width

WIDTH, DROPOUT = 256, 0.3
TOP = 0.1  # share of the tokens of an answer that count, beside one
SMOOTHNESS, LONG = 0.0008, 8  # weight of the differences of neighbours, and tokens of answers that are not smoothed
WEIGHT_DECAY = 5e-4


class Mil(LayerNet):
    """Takes `x` [A, L, D] and `num_tokens` [B]."""

    lr = 1e-3
    loss_name = "pairs"

    def __init__(self, *, layers: Sequence[int], dim: int) -> None:
        super().__init__(WIDTH, layers=layers, dim=dim)
        self.first = LayerLinear(len(layers), dim, WIDTH, bias=False)
        self.norm = LayerBatchNorm(len(layers), WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.last = LayerLinear(len(layers), WIDTH, 1)

    def observe(self, batch: Batch, moments: dict[str, Moments]) -> None:
        observe_tokens(batch["x"], moments["scale"])

    def by_each(self, batch: Batch) -> Tensor:
        return bag_scores(self._tokens(batch))

    def forward(self, batch: Batch, target_B: Tensor, weight_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """1 - s_wrong^2 + s_right^2, in the mean over pairs if both classes weigh the same, and smoothness."""
        scores_BTL = self._tokens(batch)
        bags_BL = bag_scores(scores_BTL).float()
        wrong_B1 = target_B.float()[:, None]
        pairs_BL = wrong_B1 * (1 - bags_BL.square()) + (1 - wrong_B1) * bags_BL.square()
        loss = 2 * (pairs_BL * weight_B[:, None]).mean(0).sum()
        smooth = SMOOTHNESS * roughness(scores_BTL).mean(0).sum()
        return loss + smooth, {self.loss_name: loss.detach() / pairs_BL.shape[1], "smoothness": smooth.detach()}

    def num_rows(self, batch: Batch) -> int:
        return -(-batch["x"].numel() // self.width)

    def optimizer(self, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=lr, weight_decay=WEIGHT_DECAY)

    def _tokens(self, batch: Batch) -> Tensor:
        """[B, T, L]: the scores of tokens, NaN where a record has none."""
        hidden_ALW = self.norm(self.first(self.scale(batch["x"].float()))).relu()
        scores_AL = cast(Tensor, self.last(self.dropout(hidden_ALW)))[:, :, 0].sigmoid()
        rows = split_rows(scores_AL, sizes_of(batch))
        return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=float("nan"))


class LayerBatchNorm(nn.Module):
    """Batch norm over rows, separately for each layer; of a single row by the statistics so far."""

    mean: Tensor
    variance: Tensor

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_layers, width))
        self.bias = nn.Parameter(torch.zeros(num_layers, width))
        self.register_buffer("mean", torch.zeros(num_layers, width))
        self.register_buffer("variance", torch.ones(num_layers, width))

    def forward(self, rows_RLW: Tensor) -> Tensor:
        normed = functional.batch_norm(
            rows_RLW.flatten(1),
            self.mean.view(-1),
            self.variance.view(-1),
            self.weight.view(-1),
            self.bias.view(-1),
            training=self.training and len(rows_RLW) > 1,
        )
        return normed.view_as(rows_RLW)


def bag_scores(scores_BTL: Tensor) -> Tensor:
    """[B, L]: the mean of the highest tokens: a tenth of them, and one. 0.5 without a token."""
    is_token_BTL = ~scores_BTL.isnan()
    count_BL = is_token_BTL.sum(1)
    ranked_BTL = scores_BTL.nan_to_num(-1.0).sort(dim=1, descending=True).values
    kept_BL = ((TOP * count_BL).long() + 1).clamp(max=count_BL)
    rank_T1 = torch.arange(scores_BTL.shape[1], device=scores_BTL.device)[:, None]
    total_BL = (ranked_BTL * (rank_T1 < kept_BL[:, None])).sum(1)
    return torch.where(kept_BL > 0, total_BL / kept_BL.clamp(min=1), 0.5)


def roughness(scores_BTL: Tensor) -> Tensor:
    """[B, L]: the sum of squared differences of neighbouring tokens, of long answers."""
    is_long_BL = (~scores_BTL.isnan()).sum(1) > LONG
    squares_BTL = (scores_BTL[:, 1:] - scores_BTL[:, :-1]).nan_to_num(0.0).square()
    return squares_BTL.sum(1) * is_long_BL


def features_of(layers: Sequence[int], *, field: str) -> list[Feature]:
    return [TokenFeature(field, tuple(layers) or None, (), is_labelled=False, is_cut=True)]


def build(example: Mapping[str, Tensor], *, layers: Sequence[int]) -> Mil:
    return Mil(layers=layers, dim=example["x"].shape[2])
