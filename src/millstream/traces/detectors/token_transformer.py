"""`token_transformer`: a small transformer over the states of several answer tokens in several layers.

CLAP (Suresh et al., arXiv 2509.09700) reads the layers of a token as a sequence; here of many tokens: every state is
projected, gets the embedding of its layer and of its place in the answer, and an encoder reads one sequence of them
all. Reads up to four layers of `answer_hidden`, or of `hidden` with `prompt_len`; `answer_len`; and token statistics.
"""

from typing import cast

import torch
from torch import Tensor, nn

from millstream.traces.detectors.net import DetectorNet, Scale
from millstream.traces.detectors.tokens import observe_tokens
from millstream.training.task import Batch, Moments

# B batch, A answer tokens of all records, concatenated, T tokens read of a record, L layers, D hidden, W width

MAX_LAYERS = 4
MAX_TOKENS = 32  # longer answers are read at even steps
NUM_BLOCKS, NUM_HEADS = 2, 2


class TokenTransformer(DetectorNet):
    """Takes `x` [A, L, D], `num_tokens` [B] and, if `num_stats`, `stats` [B, S]."""

    place: Tensor

    def __init__(self, width: int, *, num_layers: int, dim: int, num_stats: int, dropout: float) -> None:
        super().__init__(width, num_stats)
        self.layers = Scale(num_layers, dim)
        self.project = nn.Linear(dim, width)
        self.layer = nn.Parameter(torch.randn(num_layers, width) * 0.02)
        self.summary = nn.Parameter(torch.randn(width) * 0.02)
        self.register_buffer("place", _waves(MAX_TOKENS, width), persistent=False)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, NUM_HEADS, 2 * width, dropout, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(NUM_BLOCKS)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width + num_stats, 1)

    def observe(self, batch: Batch, moments: dict[str, Moments]) -> None:
        super().observe(batch, moments)
        observe_tokens(batch["x"], moments["layers"])

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        num_tokens = batch["num_tokens"]
        row_BT, is_token_BT = chosen_tokens(num_tokens)
        x_BTLD = cast(Tensor, self.layers(batch["x"].float()[row_BT]))
        states_BTLW = self.project(x_BTLD) + self.layer + self.place[: row_BT.shape[1], None]
        summary_B1W = self.summary.expand(len(num_tokens), 1, -1)
        read = torch.cat([summary_B1W, states_BTLW.flatten(1, 2).to(summary_B1W.dtype)], dim=1)
        is_real = is_token_BT.repeat_interleave(x_BTLD.shape[2], dim=1)
        is_padding = ~nn.functional.pad(is_real, (1, 0), value=True)
        for block in self.blocks:
            read = block(read, src_key_padding_mask=is_padding)
        summary_BW = self.norm(read[:, 0])
        stats_BS = self.scaled_stats(batch)
        seen = summary_BW if stats_BS is None else torch.cat([summary_BW, stats_BS], dim=1)
        return self.head(seen)[:, 0], {}

    def num_rows(self, batch: Batch) -> int:
        tokens = batch["num_tokens"].clamp(max=MAX_TOKENS)
        rows = int(tokens.max()) * len(tokens) * batch["x"].shape[1]  # of the padded sequence
        return max(4 * rows, -(-batch["x"].numel() // self.width))


def chosen_tokens(num_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """[B, T]: the rows of the tokens to read of each record, and whether there is such a token."""
    read_B1 = num_tokens.clamp(max=MAX_TOKENS)[:, None]
    place_T = torch.arange(max(int(read_B1.max()), 1) if len(read_B1) else 1, device=num_tokens.device)
    step_B1 = (num_tokens[:, None] - 1) / (read_B1 - 1).clamp(min=1)
    is_token_BT = place_T < read_B1
    first_B1 = (num_tokens.cumsum(0) - num_tokens)[:, None]
    row_BT = first_B1 + (place_T * step_B1.clamp(min=0)).round().long()
    return torch.where(is_token_BT, row_BT, 0), is_token_BT


def _waves(count: int, width: int) -> Tensor:
    """[T, W]: sines and cosines of places, of many wavelengths."""
    angle = torch.arange(count)[:, None] / 1000 ** (torch.arange(0, width, 2) / width)
    return torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1)[:, :width]
