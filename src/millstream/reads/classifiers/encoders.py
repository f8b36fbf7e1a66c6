"""`lstm`, `transformer` and `hf`: encoders of tokens, pooled over the read and classified."""

from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from millstream.errors import BadSetting, MissingExtra
from millstream.reads.classifiers.net import ReadNet, seen_tokens
from millstream.training.net import Batch

# B batch, T tokens, W width, C classes

HEAD_WIDTH = 16  # minimum width of an attention head


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
        # packed, otherwise the backward direction would start in the padding
        packed = pack_padded_sequence(self.embed(ids_BT), seen_BT.sum(1).cpu(), batch_first=True, enforce_sorted=False)
        hidden_BTW, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=ids_BT.shape[1])
        weight_BT = self.attend(hidden_BTW)[:, :, 0].masked_fill(~seen_BT, -torch.inf).softmax(dim=1)
        return self.head((hidden_BTW * weight_BT[:, :, None]).sum(1)), {}

    def num_rows(self, batch: Batch) -> int:
        return 2 * batch["input_ids"].numel()


class ReadTransformer(ReadNet):
    """Takes `input_ids` [B, T] and `attention_mask`, of at most `max_length` tokens."""

    lr = 5e-4

    def __init__(
        self, width: int, *, num_tokens: int, max_length: int, num_classes: int, layers: int, dropout: float
    ) -> None:
        super().__init__(width, num_classes)
        self.embed = nn.Embedding(num_tokens, width)
        self.place = nn.Parameter(torch.randn(max_length, width) * 0.02)
        most = width // (64 if width >= 64 else HEAD_WIDTH)
        num_heads = max(heads for heads in range(1, max(most, 1) + 1) if width % heads == 0)
        layer = nn.TransformerEncoderLayer(
            width, num_heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, num_classes)

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        ids_BT, seen_BT = (found[:, : len(self.place)] for found in seen_tokens(batch))  # longer reads are truncated
        x_BTW = self.embed(ids_BT) + self.place[: ids_BT.shape[1]]
        x_BTW = self.encoder(x_BTW, src_key_padding_mask=~seen_BT)
        return self.head(_mean(x_BTW, seen_BT)), {}

    def num_rows(self, batch: Batch) -> int:
        return 4 * batch["input_ids"].numel()


class Pretrained(ReadNet):
    """A Hugging Face model, frozen or with LoRA adapters, and a linear head over the mean of its last hidden states.

    Only trained weights are parameters of this net, so checkpoints contain the head and the adapters, not the model.
    """

    lr = 1e-3
    at_most = 64

    def __init__(self, name: str, *, num_classes: int, lora: int, dropout: float) -> None:
        model = _load(name, lora)
        super().__init__(int(model.config.hidden_size), num_classes)
        self._held = (model,)  # not a submodule
        self.adapters = nn.ParameterList([weight for weight in model.parameters() if weight.requires_grad])
        self.is_frozen = not len(self.adapters)
        self.head = nn.Sequential(nn.LayerNorm(self.width), nn.Dropout(dropout), nn.Linear(self.width, num_classes))

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        (model,) = self._held
        most = getattr(model.config, "max_position_embeddings", None)
        ids_BT, seen_BT = (found[:, :most] for found in seen_tokens(batch))  # longer reads are truncated
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_frozen):
            found = model(input_ids=ids_BT, attention_mask=seen_BT.long())
        return self.head(_mean(cast(Tensor, found.last_hidden_state).float(), seen_BT)), {}

    def num_rows(self, batch: Batch) -> int:
        return 8 * batch["input_ids"].numel()

    def train(self, mode: bool = True) -> Self:
        self._held[0].train(mode and not self.is_frozen)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._held[0]._apply(fn)  # moves the model along with this net
        return super()._apply(fn, recurse)  # pyright: ignore[reportUnknownMemberType]


def _load(name: str, lora: int) -> Any:
    try:
        from transformers import AutoModel
    except ImportError:
        raise MissingExtra("model=hf needs transformers: pip install 'millstream[llm]'") from None
    try:
        loaded: Any = AutoModel.from_pretrained(name, use_safetensors=True, trust_remote_code=False)  # pyright: ignore
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise BadSetting(f"hf={name}: transformers cannot load it with safetensors ({reason})") from None
    model = cast(Any, loaded)
    for weight in model.parameters():
        weight.requires_grad = False
    if not lora:
        return model
    try:
        from peft import (
            LoraConfig,  # pyright: ignore
            get_peft_model,  # pyright: ignore
        )
    except ImportError:
        raise MissingExtra("lora= needs peft: pip install 'millstream[lora]'") from None
    return get_peft_model(model, LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear"))


def _mean(x_BTW: Tensor, seen_BT: Tensor) -> Tensor:
    weight_BT1 = seen_BT[:, :, None].to(x_BTW.dtype)
    return (x_BTW * weight_BT1).sum(1) / weight_BT1.sum(1)
