"""`cnn`: residual convolutions over the letters of a read."""

# B batch, T letters, P places after the first convolution, W width, C classes

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from millstream.model.net import Batch
from millstream.model.read_net import ReadNet

LETTERS = 6  # padding, A C G T, N
KERNEL, STRIDE, INNER = 12, 3, 5


class Residual(nn.Module):
    """Two convolutions beside a shortcut; the first looks further apart with every block."""

    def __init__(self, width: int, dilation: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, width)
        self.first = nn.Conv1d(width, width, INNER, padding=INNER // 2 * dilation, dilation=dilation)
        self.second = nn.Conv1d(width, width, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BWP: Tensor) -> Tensor:
        inner = functional.gelu(self.first(self.norm(x_BWP)))
        return x_BWP + self.dropout(self.second(inner))


class ReadCNN(ReadNet):
    """Takes `input_ids` [B, T] of single letters and `attention_mask`."""

    def __init__(self, width: int, *, num_classes: int, layers: int, dropout: float) -> None:
        super().__init__(width, num_classes)
        self.stem = nn.Conv1d(LETTERS - 1, width, KERNEL, stride=STRIDE)
        self.blocks = nn.ModuleList(Residual(width, 2 ** (depth % 4), dropout) for depth in range(layers))
        self.norm = nn.LayerNorm(2 * width)
        self.head = nn.Linear(2 * width, num_classes)

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        ids_BT = batch["input_ids"]
        if ids_BT.shape[1] < KERNEL:
            ids_BT = functional.pad(ids_BT, (0, KERNEL - ids_BT.shape[1]))
        x_BTL = functional.one_hot(ids_BT.long(), LETTERS)[:, :, 1:].to(self.head.weight.dtype)
        x_BWP = functional.gelu(self.stem(x_BTL.transpose(1, 2)))
        for block in self.blocks:
            x_BWP = cast(Tensor, block(x_BWP))
        there_BP = (ids_BT > 0)[:, KERNEL - 1 :: STRIDE] | (torch.arange(x_BWP.shape[2], device=ids_BT.device) == 0)
        mean_BW = (x_BWP * there_BP[:, None]).sum(2) / there_BP.sum(1, keepdim=True)
        most_BW = x_BWP.masked_fill(~there_BP[:, None], -torch.inf).amax(2)
        return self.head(self.norm(torch.cat([mean_BW, most_BW], dim=1))), {}

    def num_rows(self, batch: Batch) -> int:
        return batch["input_ids"].numel() // STRIDE
