"""`lstm` for reads: k-mers embedded, read both ways, and pooled by attention, as DeepMicrobes does."""

# B batch, T tokens, W width, C classes

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from millstream.model.net import Batch
from millstream.model.read_net import ReadNet, seen_tokens


class ReadLSTM(ReadNet):
    """Takes `input_ids` [B, T] and `attention_mask`."""

    def __init__(self, width: int, *, num_tokens: int, num_classes: int, dropout: float) -> None:
        super().__init__(width, num_classes)
        self.embed = nn.Embedding(num_tokens, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.attend = nn.Sequential(nn.Linear(2 * width, width), nn.Tanh(), nn.Linear(width, 1))
        self.head = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, num_classes)
        )

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        ids_BT, seen_BT = seen_tokens(batch)
        # packed, or the way back would begin with the padding
        packed = pack_padded_sequence(self.embed(ids_BT), seen_BT.sum(1).cpu(), batch_first=True, enforce_sorted=False)
        hidden_BTW, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=ids_BT.shape[1])
        weight_BT = self.attend(hidden_BTW)[:, :, 0].masked_fill(~seen_BT, -torch.inf).softmax(dim=1)
        return self.head((hidden_BTW * weight_BT[:, :, None]).sum(1)), {}

    def num_rows(self, batch: Batch) -> int:
        return 2 * batch["input_ids"].numel()
