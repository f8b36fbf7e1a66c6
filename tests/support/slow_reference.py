"""What a trace should hold, the slow way: eager attention, one sample without padding, everything in one full pass."""

# L layers, H heads, T tokens, D hidden, V vocabulary

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

LAYERS = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers"}


@dataclass(frozen=True)
class Seen:
    """Everything a forward pass shows of one sequence."""

    hidden: torch.Tensor  # [L + 1, T, D]: the embedding, then what each layer gives out
    post_norm: torch.Tensor  # [T, D]
    attention: torch.Tensor  # [L, H, T, T]
    logits: torch.Tensor  # [T, V]


@torch.no_grad()
def look(model: Any, ids: Sequence[int], *, attention: bool = True) -> Seen:
    raw: list[torch.Tensor] = []

    def take(module: object, args: object, output: Any) -> None:
        raw.append((output[0] if isinstance(output, tuple) else output)[0])

    layers = model.get_submodule(LAYERS.get(model.config.model_type, "model.layers"))
    hooks = [layer.register_forward_hook(take) for layer in layers]
    shown = {"output_hidden_states": True, "output_attentions": attention, "use_cache": False}
    out = model(input_ids=torch.tensor([list(ids)]), **shown)
    for hook in hooks:
        hook.remove()
    hidden = torch.stack([out.hidden_states[0][0], *raw])
    weights = torch.stack(out.attentions)[:, 0] if attention else torch.empty(0)
    return Seen(hidden, out.hidden_states[-1][0], weights, out.logits[0])


@torch.no_grad()
def generate_greedily(model: Any, prompt: Sequence[int], *, count: int, eos: int | None) -> list[int]:
    """The most likely token, again and again, with no cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] == eos:
            break
    return ids[len(prompt) :]


def generate_beams(model: Any, prompt: Sequence[int], *, count: int, beams: int, eos: int, pad: int) -> list[int]:
    """As transformers searches with beams for one unpadded prompt."""
    ids = torch.tensor([list(prompt)])
    found = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        num_beams=beams,
        early_stopping=True,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=pad,
    )[0, len(prompt) :].tolist()
    return found[: found.index(eos) + 1] if eos in found else found
