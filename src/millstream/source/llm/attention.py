"""Attention weights without eager attention everywhere: an attention function that shows them when it is asked to."""

# B batch, H heads, R rows (queries), K keys

from typing import TYPE_CHECKING, Protocol

import torch

from millstream.source.llm.library import transformers

if TYPE_CHECKING:
    from torch import nn

NAME = "millstream_trace"
TAP = "millstream_tap"  # attribute of a module: who may want its weights


class Tap(Protocol):
    """Takes the attention weights of one layer, when it wants them."""

    @property
    def wanted(self) -> bool: ...

    def take(self, weights_BHRK: torch.Tensor) -> None: ...


def register() -> str:
    """Make the function known to transformers, with a mask function: without one it would be given mask=None."""
    transformers().AttentionInterface.register(NAME, trace_attention)
    transformers().AttentionMaskInterface.register(NAME, transformers("masking_utils").sdpa_mask)
    return NAME


def trace_attention(
    module: "nn.Module",
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """sdpa; or, where somebody wants the weights or sdpa lacks the formula, softmax(q k^T) v by its definition."""
    tap: Tap | None = getattr(module, TAP, None)
    wanted = tap is not None and tap.wanted
    if not wanted and options.get("softcap") is None and options.get("s_aux") is None:
        sdpa = transformers("integrations.sdpa_attention").sdpa_attention_forward
        return sdpa(module, query, key, value, attention_mask, **options)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    weights_BHRK = _weights(query, key, attention_mask, options)
    if tap is not None and wanted:
        tap.take(weights_BHRK)
    return torch.matmul(weights_BHRK.to(value.dtype), value).transpose(1, 2).contiguous(), None


def _weights(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, options: dict[str, object]
) -> torch.Tensor:
    scaling, softcap = options.get("scaling"), options.get("softcap")
    scale = float(scaling) if isinstance(scaling, int | float) else query.shape[-1] ** -0.5
    scores_BHRK = torch.matmul(query, key.transpose(2, 3)).mul_(scale)
    if isinstance(softcap, int | float):
        scores_BHRK = torch.tanh(scores_BHRK / softcap) * softcap
    bias = options.get("position_bias")
    if isinstance(bias, torch.Tensor):
        scores_BHRK = scores_BHRK + bias
    rows, keys = scores_BHRK.shape[2:]
    if mask is None and rows > 1:  # sdpa would be told is_causal
        mask = torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril(keys - rows)
    if mask is not None:
        mask = mask[..., :keys]
        # The smallest number, not -inf: a padded row that sees nothing stays finite, its values count with weight 0.
        lowest = torch.finfo(scores_BHRK.dtype).min
        scores_BHRK = scores_BHRK.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores_BHRK + mask
    sinks = options.get("s_aux")
    if isinstance(sinks, torch.Tensor):
        column = sinks.reshape(1, -1, 1, 1).expand(scores_BHRK.shape[0], -1, rows, 1)
        return torch.cat([scores_BHRK, column.to(scores_BHRK.dtype)], dim=-1).softmax(-1, torch.float32)[..., :-1]
    return scores_BHRK.softmax(-1, torch.float32)
