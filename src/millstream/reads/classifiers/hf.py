"""`hf`: a pretrained Hugging Face model, frozen or with LoRA adapters, as a read classifier."""

from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from millstream.errors import BadSetting, MissingExtra
from millstream.reads.classifiers.nets import TokenNet, mean_over_tokens, seen_tokens
from millstream.training.task import Batch

# B batch, T tokens, W width


class Pretrained(TokenNet):
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
        return self.head(mean_over_tokens(cast(Tensor, found.last_hidden_state).float(), seen_BT)), {}

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
        from safetensors import SafetensorError
        from transformers import AutoModel
    except ImportError:
        raise MissingExtra("model=hf needs transformers: pip install 'millstream[llm]'") from None
    try:
        loaded: Any = AutoModel.from_pretrained(name, use_safetensors=True, trust_remote_code=False)  # pyright: ignore
    except (OSError, ValueError, SafetensorError) as error:  # the last: cut off or damaged
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
