"""Which fields of a trace are kept: names and tiers, memory per batch, and the tensors of each sample."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from millstream.core.record import Tensor
from millstream.errors import BadSetting
from millstream.traces.kind import POSITIONS

# B batch, L layers, H heads, R rows of a pass, K keys, T tokens, D hidden

TOP_K = 20  # most likely tokens kept per step
NUM_EDGES = 8  # strongest attention edges kept per token and layer
NODE_DIM = 64  # width of the random projection of hidden states
NUM_EIGENVALUES = 10

TIERS = {
    "stats": ("heads", "laplacian"),
    "graph": ("heads", "laplacian", "nodes", "edges"),
    "probe": ("heads", "laplacian", "nodes", "edges", "states"),
    "full": ("heads", "laplacian", "hidden", "post_norm", "attention"),
}
_LAYERED = ("hidden", "attention")  # fields that can be limited to some layers
_NAMES = (*_LAYERED, "post_norm", "states", "nodes", "edges", "heads", "laplacian")
_OF_ATTENTION = {"attention", "edges", "heads", "laplacian"}
_OF_PROMPT = {"hidden", "post_norm", "attention", "nodes", "edges", "laplacian"}
MAX_ROWS = 64  # larger batches are no faster per row
Kept = dict[tuple[str, int], list[torch.Tensor]]  # (field, layer) -> chunks of rows
_LARGE = ("hidden", "post_norm", "attention")  # copied once, from the chunks into the trace
_OF_ANSWER = ("self_attention", "attention_entropy", "prompt_attention")  # [B, H, R]
_WHOLE = ("states", "laplacian", "attention_logdet")  # without a token axis


@dataclass(frozen=True)
class Size:
    """The dimensions of a model that determine the size of a trace."""

    layers: int
    heads: int
    hidden: int
    vocab: int
    kv_width: int  # of the keys of one token in one layer
    intermediate: int
    item: int  # bytes per number


@dataclass(frozen=True)
class Fields:
    """Which fields are kept; `layers` limits some of them to the given layers."""

    names: tuple[str, ...]
    layers: dict[str, tuple[int, ...]]
    stored: str = "float16"

    @property
    def need_attention(self) -> bool:
        return not _OF_ATTENTION.isdisjoint(self.names)

    @property
    def need_prompt(self) -> bool:
        """Whether to capture the pass over the prompt too, not only the one over the answer."""
        return not _OF_PROMPT.isdisjoint(self.names)

    def layers_of(self, name: str, size: Size) -> tuple[int, ...]:
        """The layers kept of `hidden` (0 is the embedding) or `attention`."""
        count = size.layers + (name == "hidden")
        wanted = self.layers.get(name, tuple(range(count)))
        for layer in wanted:
            if not -count <= layer < count:
                raise BadSetting(f"fields={name}[{layer}]: this model has layers 0 to {count - 1}")
        return tuple(sorted({layer % count for layer in wanted}))

    def schema(self) -> dict[str, Tensor]:
        """The tensors of a trace: dtype and axis names."""
        kept = self.stored
        found = {
            "tokens": Tensor("int32", ("token",)),
            "logprobs": Tensor("float32", ("step",)),
            "entropy": Tensor("float32", ("step",)),
            "rank": Tensor("int32", ("step",)),
            "topk_ids": Tensor("int32", ("step", "k")),
            "topk_logprobs": Tensor("float32", ("step", "k")),
        }
        more = {
            "hidden": {"hidden": Tensor(kept, ("layer", "token", "dim"))},
            "post_norm": {"post_norm": Tensor(kept, ("token", "dim"))},
            "nodes": {"nodes": Tensor(kept, ("layer", "token", "dim"))},
            "states": {"states": Tensor(kept, ("layer", "position", "dim"))},
            "attention": {"attention": Tensor(kept, ("layer", "head", "query", "key"))},
            "edges": {
                "edge_source": Tensor("int16", ("layer", "token", "edge")),
                "edge_weight": Tensor(kept, ("layer", "token", "edge")),
                "edge_rest": Tensor(kept, ("layer", "token")),
            },
            "heads": {
                "self_attention": Tensor(kept, ("layer", "head", "row")),
                "attention_entropy": Tensor(kept, ("layer", "head", "row")),
                "prompt_attention": Tensor(kept, ("layer", "head", "row")),
            },
            "laplacian": {
                "laplacian": Tensor(kept, ("layer", "head", "eigenvalue")),
                "attention_logdet": Tensor("float32", ("layer", "head")),
            },
        }
        for name in self.names:
            found |= more[name]
        return found

    def trace_bytes(self, size: Size, *, prompt: int, answer: int) -> int:
        """Bytes of the tensors of a trace with this many prompt and answer tokens."""
        tokens, rows, layers, heads = prompt + answer, answer + 1, size.layers, size.heads
        item = 4 if self.stored == "float32" else 2
        numbers = {
            "hidden": len(self.layers_of("hidden", size)) * tokens * size.hidden,
            "post_norm": tokens * size.hidden,
            "nodes": (layers + 1) * tokens * NODE_DIM,
            "states": (layers + 1) * len(POSITIONS) * size.hidden,
            "attention": len(self.layers_of("attention", size)) * heads * tokens * tokens,
            "edges": layers * tokens * (NUM_EDGES + 1),
            "heads": 3 * layers * heads * rows,
            "laplacian": layers * heads * NUM_EIGENVALUES,
        }
        extra = {"edges": layers * tokens * NUM_EDGES * 2, "laplacian": layers * heads * 4}
        steps = 4 * tokens + answer * (12 + TOP_K * 8)
        return steps + sum(numbers[name] * item + extra.get(name, 0) for name in self.names)


def parse_fields(tier: str, fields: str | None, *, stored: str) -> Fields:
    """The fields of a tier, or those named in a text such as `hidden[8,16,24],edges`."""
    if stored not in ("float16", "bfloat16", "float32"):
        raise BadSetting(f"stored={stored}: must be one of float16, bfloat16, float32")
    if fields is None:
        if tier not in TIERS:
            raise BadSetting(f"tier={tier}: must be one of {', '.join(TIERS)}")
        return Fields(TIERS[tier], {}, stored)
    layers: dict[str, tuple[int, ...]] = {}
    names: list[str] = []
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?|[\[\]]", fields.replace(" ", "")):
        match = re.fullmatch(r"(\w+)(?:\[(-?\d+(?:,-?\d+)*)\])?", part)
        if not match or match[1] not in _NAMES or (match[2] and match[1] not in _LAYERED):
            raise BadSetting(
                f"fields={fields}: unknown field {part!r}; must be one of {', '.join(_NAMES)}; "
                "layers as in hidden[8,16,-1]"
            )
        names.append(match[1])
        if match[2]:
            layers[match[1]] = tuple(map(int, match[2].split(",")))
    if not names or len(set(names)) < len(names):
        raise BadSetting(f"fields={fields}: give each field once, as in hidden[8,16,24],edges")
    return Fields(tuple(names), layers, stored)


def plan_batches(
    lengths: Sequence[int],
    *,
    size: Size,
    fields: Fields,
    max_new_tokens: int,
    num_beams: int,
    memory: int,
    window: int | None = None,
) -> list[list[int]]:
    """Indices of the prompts of each batch. With `window`, each window of prompts is batched on its own."""
    batches: list[list[int]] = []
    step = window or max(1, len(lengths))
    for first in range(0, len(lengths), step):
        order = sorted(range(first, min(first + step, len(lengths))), key=lambda index: -lengths[index])
        start = 0
        while start < len(order):
            row = row_bytes(
                lengths[order[start]], size=size, fields=fields, max_new_tokens=max_new_tokens, num_beams=num_beams
            )
            count = max(1, min(MAX_ROWS, memory // row))
            batches.append(order[start : start + count])
            start += count
    return batches


def row_bytes(prompt: int, *, size: Size, fields: Fields, max_new_tokens: int, num_beams: int) -> int:
    """Maximum bytes of one row of a batch, without the model: cache, activations, logits, fields kept."""
    total = prompt + max_new_tokens
    cache = 2 * size.layers * size.kv_width * total * size.item * num_beams
    activations = (8 * size.hidden + 3 * size.intermediate) * size.item * max(prompt * num_beams, max_new_tokens + 1)
    logits = size.vocab * (3 * 4 * num_beams + (size.item + 4) * (max_new_tokens + 1))
    weights = 6 * size.heads * 4 * max(prompt * prompt * num_beams, max_new_tokens * total)  # one layer's attention
    kept = 2 * fields.trace_bytes(size, prompt=prompt, answer=max_new_tokens)
    whole = 2 * cache + activations + logits + weights * fields.need_attention + kept
    return whole * 6 // 5  # the cache exists twice while it is reordered or cut; 6/5: fragmentation of the allocator


@dataclass(frozen=True)
class Span:
    """Start and end of a sample in the padded sequence, and where its answer starts."""

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
    """[L, B, ...] on the host, in one transfer, with the chunks of both passes joined."""
    if name.startswith("edge"):
        layers = [_pad_edges(parts) for parts in layers]
    return torch.stack([torch.cat(parts, dim=1) if len(parts) > 1 else parts[0] for parts in layers]).cpu()


def _pad_edges(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Pad to NUM_EDGES: a short prompt has fewer earlier tokens."""
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
    return _edge_positions(rows, span.first) if name == "edge_source" else rows.contiguous()


def _edge_positions(source: torch.Tensor, first: int) -> torch.Tensor:
    """Positions within the sample; -1 where there is no edge."""
    rows = torch.arange(source.shape[1])[None, :, None]
    position = source - first
    return position.where((position >= 0) & (position < rows), -1).to(torch.int16)


def _copied(name: str, layers: Sequence[list[torch.Tensor]], i: int, span: Span) -> torch.Tensor:
    """A large field of one sample: [L, T, D], [T, D] or [L, H, T, T]. Prompt rows have fewer keys."""
    count, example = span.end - span.first, layers[0][0]
    shape = (example.shape[1], count, count) if name == "attention" else (count, example.shape[-1])
    out = torch.zeros((len(layers), *shape), dtype=example.dtype)
    axis = 2 if name == "attention" else 1  # row axis of a chunk
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
