"""`cnn`: residual convolutions over the bases of a read."""

# B batch, T bases, S starts of motifs, P positions after pooling, W width, C classes

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from millstream.reads.classifiers.net import ReadNet
from millstream.training.net import Batch

SYMBOLS = 6  # padding, A C G T, N
MOTIF, POOLED, INNER = 6, 4, 5
FEW, MANY = 8, 64  # reads: smaller batches use running statistics, updated over about this many reads


class Norm(nn.BatchNorm1d):
    """Batch norm that uses running statistics for small batches, whose own are too noisy."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or len(input) >= FEW:
            return super().forward(input)
        mean_W, var_W = cast(Tensor, self.running_mean), cast(Tensor, self.running_var)
        with torch.no_grad():
            share = len(input) / MANY
            seen = input.transpose(0, 1).flatten(1).float()
            mean_W += share * (seen.mean(1) - mean_W)
            var_W += share * ((seen - mean_W[:, None]).square().mean(1) - var_W)
        return functional.batch_norm(input, mean_W.clone(), var_W.clone(), self.weight, self.bias, eps=self.eps)


class Residual(nn.Module):
    """A residual block of two convolutions; padded positions stay zero."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.first = nn.Conv1d(width, width, INNER, padding=INNER // 2)
        self.second = nn.Conv1d(width, width, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BWP: Tensor, valid_BP: Tensor) -> Tensor:
        inner = functional.gelu(self.first(self.norm(x_BWP) * valid_BP))
        return x_BWP + self.dropout(self.second(inner)) * valid_BP


class ReadCNN(ReadNet):
    """Takes `input_ids` [B, T] of single bases; 0 is padding.

    Convolutions over six bases, max pooling over four positions, residual blocks, then mean and maximum over the
    read. Normalised over the batch: classes differ by small differences of means.
    """

    lr = 5e-3

    def __init__(self, width: int, *, num_classes: int, layers: int, dropout: float) -> None:
        super().__init__(width, num_classes)
        self.motifs = nn.Conv1d(SYMBOLS - 1, width, MOTIF)
        self.norm = Norm(width)
        self.blocks = nn.ModuleList(Residual(width, dropout) for _ in range(layers))
        self.seen = Norm(2 * width)
        self.head = nn.Linear(2 * width, num_classes)

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        ids_BT = batch["input_ids"]
        ids_BT = functional.pad(ids_BT, (0, max(MOTIF - ids_BT.shape[1], 0)))
        x_BTL = functional.one_hot(ids_BT.long(), SYMBOLS)[:, :, 1:].to(self.head.weight.dtype)
        x_BWS = self.motifs(x_BTL.transpose(1, 2))
        whole_BS = (ids_BT > 0)[:, MOTIF - 1 :]
        whole_BS = (whole_BS | (torch.arange(whole_BS.shape[1], device=ids_BT.device) == 0))[:, None]
        x_BWP = functional.max_pool1d(x_BWS.masked_fill(~whole_BS, -torch.inf), POOLED, ceil_mode=True)
        is_valid_BP = functional.max_pool1d(whole_BS.to(x_BWP.dtype), POOLED, ceil_mode=True) > 0
        valid_BP = is_valid_BP.to(x_BWP.dtype)
        x_BWP = functional.gelu(self.norm(x_BWP.masked_fill(~is_valid_BP, 0.0))) * valid_BP
        for block in self.blocks:
            x_BWP = cast(Tensor, block(x_BWP, valid_BP))
        mean_BW = x_BWP.sum(2) / valid_BP.sum(2)
        most_BW = x_BWP.masked_fill(~is_valid_BP, -torch.inf).amax(2)
        return self.head(self.seen(torch.cat([mean_BW, most_BW], dim=1))), {}

    def num_rows(self, batch: Batch) -> int:
        return batch["input_ids"].numel()
