"""What was kept of a batch, layer by layer -> the tensors of each sample, without padding."""

# B batch, L layers, H heads, R rows of a pass, K keys, T tokens, D hidden

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from millstream.source.llm.fields import NUM_EDGES

Kept = dict[tuple[str, int], list[torch.Tensor]]  # parts along the rows, of each field and layer
_LARGE = ("hidden", "post_norm", "attention")  # copied once, from the parts into the trace
_OF_ANSWER = ("self_attention", "attention_entropy", "prompt_attention")  # [B, H, R]
_WHOLE = ("states", "laplacian", "attention_logdet")  # no axis of tokens


@dataclass(frozen=True)
class Span:
    """Where the tokens of a sample are in the padded sequence, and where its answer begins."""

    first: int
    end: int
    answer: int


def samples_of(kept: Kept, spans: Sequence[Span]) -> list[dict[str, torch.Tensor]]:
    """The fields of each sample, [L, ...]."""
    layers: dict[str, list[int]] = defaultdict(list)
    for name, layer in sorted(kept):
        layers[name].append(layer)
    small = {
        name: _stacked(name, [kept[name, n] for n in found]) for name, found in layers.items() if name not in _LARGE
    }
    samples: list[dict[str, torch.Tensor]] = []
    for i, span in enumerate(spans):
        sample = {name: _cut(name, values[:, i], span) for name, values in small.items()}
        for name in _LARGE:
            if name in layers:
                sample[name] = _copied(name, [kept[name, n] for n in layers[name]], i, span)
        samples.append(sample)
    return samples


def _stacked(name: str, layers: Sequence[list[torch.Tensor]]) -> torch.Tensor:
    """[L, B, ...] on the host, in one transfer, with the parts of both passes joined."""
    if name.startswith("edge"):
        layers = [_pad_edges(parts) for parts in layers]
    return torch.stack([torch.cat(parts, dim=1) if len(parts) > 1 else parts[0] for parts in layers]).cpu()


def _pad_edges(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """A short prompt has fewer tokens to attend to than edges are kept."""
    if parts[0].ndim < 3:
        return parts
    nothing = 0.0 if parts[0].is_floating_point() else -1
    return [nn.functional.pad(part, (0, NUM_EDGES - part.shape[2]), value=nothing) for part in parts]


def _cut(name: str, values: torch.Tensor, span: Span) -> torch.Tensor:
    """A small field of one sample, [L, ...], cut to its tokens."""
    if name in _WHOLE:
        return values.contiguous()
    if name in _OF_ANSWER:
        return values[:, :, : span.end - span.answer + 1].contiguous()
    rows = values[:, span.first : span.end]
    return _edge_places(rows, span.first) if name == "edge_source" else rows.contiguous()


def _edge_places(source: torch.Tensor, first: int) -> torch.Tensor:
    """Places among the sample's own tokens; -1 where there is no earlier token to have an edge from."""
    rows = torch.arange(source.shape[1])[None, :, None]
    place = source - first
    return place.where((place >= 0) & (place < rows), -1).to(torch.int16)


def _copied(name: str, layers: Sequence[list[torch.Tensor]], i: int, span: Span) -> torch.Tensor:
    """A large field of one sample: [L, T, D], [T, D] or [L, H, T, T]. Rows over the prompt have fewer keys."""
    count, example = span.end - span.first, layers[0][0]
    shape = (example.shape[1], count, count) if name == "attention" else (count, example.shape[-1])
    out = torch.zeros((len(layers), *shape), dtype=example.dtype)
    axis = 2 if name == "attention" else 1  # of the rows in a part
    for target, parts in zip(out, layers, strict=True):
        start = 0
        for part in parts:
            begin, end = max(span.first, start), min(span.end, start + part.shape[axis])
            if begin < end and name == "attention":
                keys = min(span.end, part.shape[3])
                rows = part[i, :, begin - start : end - start, span.first : keys]
                target[:, begin - span.first : end - span.first, : keys - span.first] = rows
            elif begin < end:
                target[begin - span.first : end - span.first] = part[i, begin - start : end - start]
            start += part.shape[axis]
    return out[0] if name == "post_norm" else out
