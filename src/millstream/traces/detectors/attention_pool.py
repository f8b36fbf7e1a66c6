"""`attention_pool`: a learned query per layer weighs the answer tokens; the logits of layers are averaged.

An attention-pooling probe, as of CH-Wang et al. (arXiv 2312.17249). Reads up to eight layers of `answer_hidden`, or of
`hidden` with `prompt_len`; `answer_len`; and token statistics.
"""

from typing import cast

import torch
from torch import Tensor, nn

from millstream.traces.detectors.net import DetectorNet, Scale
from millstream.traces.detectors.tokens import observe_tokens
from millstream.training.task import Batch, Moments

# B batch, A answer tokens of all records, concatenated, L layers, D hidden, S statistics


class AttentionPool(DetectorNet):
    """Takes `x` [A, L, D], `num_tokens` [B] and, if `num_stats`, `stats` [B, S]."""

    def __init__(self, *, num_layers: int, dim: int, num_stats: int, dropout: float) -> None:
        super().__init__(dim, num_stats)
        self.layers = Scale(num_layers, dim)
        self.query = nn.Parameter(torch.zeros(num_layers, dim))  # at first, the mean of the tokens
        self.weight = nn.Parameter(torch.zeros(num_layers, dim))
        self.bias = nn.Parameter(torch.zeros(num_layers))
        self.of_stats = nn.Linear(num_stats, 1, bias=False) if num_stats else None
        self.dropout = nn.Dropout(dropout)

    def observe(self, batch: Batch, moments: dict[str, Moments]) -> None:
        super().observe(batch, moments)
        observe_tokens(batch["x"], moments["layers"])

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        x_ALD = self.dropout(cast(Tensor, self.layers(batch["x"].float())))
        num_tokens = batch["num_tokens"]
        record_A = torch.arange(len(num_tokens), device=x_ALD.device).repeat_interleave(num_tokens)
        share_AL = softmax_within((x_ALD * self.query).sum(2) / x_ALD.shape[2] ** 0.5, record_A, len(num_tokens))
        said_AL = (x_ALD * self.weight).sum(2)
        none_BL = said_AL.new_zeros(len(num_tokens), said_AL.shape[1])
        logits_B = (none_BL.index_add(0, record_A, (share_AL * said_AL).to(none_BL.dtype)) + self.bias).mean(1)
        stats_BS = self.scaled_stats(batch)
        if stats_BS is not None and self.of_stats is not None:
            logits_B = logits_B + self.of_stats(stats_BS)[:, 0]
        return logits_B, {}

    def num_rows(self, batch: Batch) -> int:
        return -(-batch["x"].numel() // self.width)


def softmax_within(values_AL: Tensor, record_A: Tensor, num_records: int) -> Tensor:
    """Softmax over the tokens of each record."""
    index_AL = record_A[:, None].expand_as(values_AL)
    lowest_BL = values_AL.new_full((num_records, values_AL.shape[1]), float("-inf"))
    highest_BL = lowest_BL.scatter_reduce(0, index_AL, values_AL.detach(), "amax")
    raised_AL = (values_AL - highest_BL[record_A]).exp()
    total_BL = torch.zeros_like(lowest_BL).index_add(0, record_A, raised_AL)
    return raised_AL / total_BL[record_A]
