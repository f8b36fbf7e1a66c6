"""Which fields of a trace are kept: names and tiers, memory per batch, and the tensors of each sample."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from millstream.core.record import Tensor
from millstream.errors import BadSetting
from millstream.traces.kind import POSITIONS, THINKING

# B batch, L layers, H heads, R rows of a pass, K keys, T tokens, D hidden

TOP_K = 20  # most likely tokens kept per step
NUM_EDGES = 8  # strongest attention edges kept per token and layer
NODE_DIM = 64  # width of the random projection of hidden states
NUM_EIGENVALUES = 10
_CHOICE = r"\[-?\d+(?:,-?\d+)*\]"  # of layers

TIERS = {
    "stats": ("heads", "laplacian"),
    "graph": ("heads", "laplacian", "nodes", "edges"),
    "probe": ("heads", "laplacian", "nodes", "edges", "states"),
    "full": ("heads", "laplacian", "hidden", "post_norm", "attention"),
    "answer": ("answer_hidden",),
}
LAYERED = ("hidden", "answer_hidden", "attention")  # fields that can be limited to some layers
_NAMES = (*LAYERED, "post_norm", "states", "nodes", "edges", "edge_heads", "heads", "laplacian", "topology")
_OF_ATTENTION = {"attention", "edges", "edge_heads", "heads", "laplacian", "topology"}
_OF_PROMPT = {"hidden", "post_norm", "attention", "nodes", "edges", "laplacian"}
MAX_ROWS = 64  # larger batches are no faster per row
MIN_CHUNK = 16  # tokens of a forward pass, however small the budget
Kept = dict[tuple[str, int], list[torch.Tensor]]  # (field, layer) -> chunks of rows
_LARGE = ("hidden", "answer_hidden", "post_norm", "attention")  # copied once, from the chunks into the trace
_OF_ANSWER = ("self_attention", "attention_entropy", "prompt_attention")  # [B, H, R]
_WHOLE = ("states", "laplacian", "attention_logdet", "topology")  # without a token axis


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
    thinking: bool = False  # whether answers begin after tokens of reasoning, which have positions in `states` too

    @property
    def positions(self) -> tuple[str, ...]:
        return POSITIONS + (THINKING if self.thinking else ())

    @property
    def need_attention(self) -> bool:
        return not _OF_ATTENTION.isdisjoint(self.names)

    @property
    def need_prompt(self) -> bool:
        """Whether to capture the pass over the prompt too, not only the one over the answer."""
        return not _OF_PROMPT.isdisjoint(self.names)

    @property
    def longest(self) -> int:
        """The most tokens of a trace: the sources of edges are 16-bit numbers."""
        return 32_767 if "edges" in self.names else 2**62

    def layers_of(self, name: str, size: Size) -> tuple[int, ...]:
        """The layers kept of `hidden` and `answer_hidden` (0 is the embedding) or `attention`."""
        count = size.layers + (name != "attention")
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
            "offsets": Tensor("int32", ("step", "end")),
            "given_logprobs": Tensor("float32", ("step",)),
        }
        if self.thinking:
            found["thinking_logprobs"] = Tensor("float32", ("thought",))
        more = {
            "hidden": {"hidden": Tensor(kept, ("layer", "token", "dim"))},
            "answer_hidden": {"answer_hidden": Tensor(kept, ("layer", "step", "dim"))},
            "post_norm": {"post_norm": Tensor(kept, ("token", "dim"))},
            "nodes": {"nodes": Tensor(kept, ("layer", "token", "dim"))},
            "states": {"states": Tensor(kept, ("layer", "position", "dim"))},
            "attention": {"attention": Tensor(kept, ("layer", "head", "query", "key"))},
            "edges": {
                "edge_source": Tensor("int16", ("layer", "token", "edge")),
                "edge_weight": Tensor(kept, ("layer", "token", "edge")),
                "edge_rest": Tensor(kept, ("layer", "token")),
            },
            "edge_heads": {"edge_heads": Tensor(kept, ("layer", "row", "head", "edge"))},
            "heads": {
                "self_attention": Tensor(kept, ("layer", "head", "row")),
                "attention_entropy": Tensor(kept, ("layer", "head", "row")),
                "prompt_attention": Tensor(kept, ("layer", "head", "row")),
            },
            "laplacian": {
                "laplacian": Tensor(kept, ("layer", "head", "eigenvalue")),
                "attention_logdet": Tensor("float32", ("layer", "head")),
            },
            "topology": {"topology": Tensor("float32", ("layer", "head"))},
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
            "answer_hidden": len(self.layers_of("answer_hidden", size)) * answer * size.hidden,
            "post_norm": tokens * size.hidden,
            "nodes": (layers + 1) * tokens * NODE_DIM,
            "states": (layers + 1) * len(self.positions) * size.hidden,
            "attention": len(self.layers_of("attention", size)) * heads * tokens * tokens,
            "edges": layers * tokens * (NUM_EDGES + 1),
            "edge_heads": layers * rows * heads * NUM_EDGES,
            "heads": 3 * layers * heads * rows,
            "laplacian": layers * heads * NUM_EIGENVALUES,
            "topology": 0,
        }
        small = 4 * layers * heads
        extra = {"edges": layers * tokens * NUM_EDGES * 2, "laplacian": small, "topology": small}
        steps = 4 * tokens + answer * (12 + TOP_K * 8 + 8)
        return steps + sum(numbers[name] * item + extra.get(name, 0) for name in self.names)


def parse_fields(tier: str, fields: str | None, *, stored: str, thinking: bool = False) -> Fields:
    """The fields of a tier, such as `answer[8,16]`, or those named in a text such as `hidden[8,16,24],edges`."""
    if stored not in ("float16", "bfloat16", "float32"):
        raise BadSetting(f"stored={stored}: must be one of float16, bfloat16, float32")
    if fields is None:
        match = re.fullmatch(rf"({'|'.join(TIERS)})({_CHOICE})?", tier.replace(" ", ""))
        layered = [name for name in TIERS[match[1]] if name in LAYERED] if match else []
        if not match or (match[2] and not layered):
            raise BadSetting(f"tier={tier}: must be one of {', '.join(TIERS)}; layers as in answer[8,16,-1]")
        chosen = _layers(match[2])
        return Fields(TIERS[match[1]], {name: chosen for name in layered if chosen}, stored, thinking)
    layers: dict[str, tuple[int, ...]] = {}
    names: list[str] = []
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?|[\[\]]", fields.replace(" ", "")):
        match = re.fullmatch(rf"(\w+)({_CHOICE})?", part)
        if not match or match[1] not in _NAMES or (match[2] and match[1] not in LAYERED):
            raise BadSetting(
                f"fields={fields}: unknown field {part!r}; must be one of {', '.join(_NAMES)}; "
                "layers as in hidden[8,16,-1]"
            )
        names.append(match[1])
        if match[2]:
            layers[match[1]] = _layers(match[2])
    if not names or len(set(names)) < len(names):
        raise BadSetting(f"fields={fields}: give each field once, as in hidden[8,16,24],edges")
    if "edge_heads" in names and "edges" not in names:
        raise BadSetting(f"fields={fields}: edge_heads is the attention along edges; add edges")
    return Fields(tuple(names), layers, stored, thinking)


def _layers(choice: str | None) -> tuple[int, ...]:
    return tuple(map(int, choice[1:-1].split(","))) if choice else ()


@dataclass(frozen=True)
class Need:
    """What a batch needs of memory, in addition to the model: its tokens, and how many sequences share a prompt."""

    size: Size
    fields: Fields
    rows: int = 1  # beams, or the samples of a question
    generated: bool = True  # answers are generated; or given, and only replayed
    whole: bool = False  # a model whose passes cannot be cut into chunks

    def chunk(self, total: int, *, memory: int) -> int:
        """Tokens per forward pass over a sequence: all, or as many as need a third of the budget for one sequence."""
        fit = memory // 3 // self._per_token(total)
        return total if fit >= total or self.whole else max(MIN_CHUNK, fit // MIN_CHUNK * MIN_CHUNK)

    def bytes(self, prompt: int, answer: int, *, memory: int) -> int:
        """Maximum bytes of one question of a batch: caches, activations, logits, fields kept."""
        total = prompt + answer
        chunk = self.chunk(total, memory=memory)
        cached = self.generated or chunk < total
        cache = 2 * self.size.layers * self.size.kv_width * total * self.size.item * self.rows * cached
        at_once = self._per_token(total) * max(min(chunk, prompt), min(chunk, answer + 1) * self.rows)
        logits = self.size.vocab * 4 * 4 * self.rows if self.generated else 0
        kept = 2 * self.fields.trace_bytes(self.size, prompt=prompt, answer=answer)
        copied = 2 * cache // self.size.layers  # one layer, when it grows or is reordered
        return (cache + copied + at_once + logits + kept) * 6 // 5  # fragmentation of the allocator

    def _per_token(self, total: int) -> int:
        """Activations of one layer per token of a pass, with its attention to `total` tokens."""
        activations = (8 * self.size.hidden + 3 * self.size.intermediate) * self.size.item
        return activations + 6 * self.size.heads * 4 * total * self.fields.need_attention


def plan_batches(
    lengths: Sequence[tuple[int, int]], *, need: Need, memory: int, window: int | None = None
) -> list[list[int]]:
    """Indices of the questions of each batch, given the tokens of their prompts and answers.

    With `window`, each window of questions is batched on its own.
    """
    batches: list[list[int]] = []
    step = window or max(1, len(lengths))
    for first in range(0, len(lengths), step):
        order = sorted(range(first, min(first + step, len(lengths))), key=lambda index: -sum(lengths[index]))
        start = 0
        while start < len(order):
            # A batch is as wide as its longest prompt and its longest answer, which may be of different questions.
            prompt = answer = count = 0
            for index in order[start : start + max(1, MAX_ROWS // need.rows)]:
                prompt, answer = max(prompt, lengths[index][0]), max(answer, lengths[index][1])
                if count and (count + 1) * need.bytes(prompt, answer, memory=memory) > memory:
                    break
                count += 1
            batches.append(order[start : start + count])
            start += count
    return batches


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
        name: _stacked(name, [kept[name, n] for n in found], len(spans))
        for name, found in layers.items()
        if name not in _LARGE
    }
    samples: list[dict[str, torch.Tensor]] = []
    for i, span in enumerate(spans):
        sample = {name: _cut(name, values[:, i], span) for name, values in small.items()}
        for name in _LARGE:
            if name in layers:
                rows = [
                    [part[i * len(part) // len(spans)] for part in kept[name, n]] for n in layers[name]
                ]  # of samples that share a prompt, its row
                sample[name] = _copied(name, rows, span)
        samples.append(sample)
    return samples


def repeated(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Values of prompts, for every sample of each."""
    return values if len(values) == rows else values.repeat_interleave(rows // len(values), 0)


def _stacked(name: str, layers: Sequence[list[torch.Tensor]], rows: int) -> torch.Tensor:
    """[L, B, ...] on the host, in one transfer, with the chunks of all passes joined."""
    if name.startswith("edge"):
        layers = [_pad_edges(parts) for parts in layers]
    axis = 2 if name in _OF_ANSWER else 1
    joined = [
        torch.cat([repeated(part, rows) for part in parts], dim=axis) if len(parts) > 1 else parts[0]
        for parts in layers
    ]
    return torch.stack(joined).cpu()


def _pad_edges(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Pad to NUM_EDGES: a short prompt has fewer earlier tokens."""
    if parts[0].ndim < 3:
        return parts
    nothing = 0.0 if parts[0].is_floating_point() else -1
    return [nn.functional.pad(part, (0, NUM_EDGES - part.shape[-1]), value=nothing) for part in parts]


def _cut(name: str, values: torch.Tensor, span: Span) -> torch.Tensor:
    """A small field of one sample, [L, ...], cut to its tokens."""
    if name in _WHOLE:
        return values.contiguous()
    if name in _OF_ANSWER:
        return values[:, :, : span.end - span.answer + 1].contiguous()
    if name == "edge_heads":
        return values[:, : span.end - span.answer + 1].contiguous()
    rows = values[:, span.first : span.end]
    return _edge_positions(rows, span.first) if name == "edge_source" else rows.contiguous()


def _edge_positions(source: torch.Tensor, first: int) -> torch.Tensor:
    """Positions within the sample; -1 where there is no edge."""
    rows = torch.arange(source.shape[1])[None, :, None]
    position = source - first
    return position.where((position >= 0) & (position < rows), -1).to(torch.int16)


def _copied(name: str, layers: Sequence[list[torch.Tensor]], span: Span) -> torch.Tensor:
    """A large field of one sample: [L, T, D], [T, D] or [L, H, T, T]. Earlier rows have fewer keys."""
    origin = span.answer if name == "answer_hidden" else 0  # where the first chunk starts in the sequence
    first = max(span.first, origin)
    count, example = span.end - first, layers[0][0]
    shape = (example.shape[0], count, count) if name == "attention" else (count, example.shape[-1])
    out = torch.zeros((len(layers), *shape), dtype=example.dtype)
    axis = 1 if name == "attention" else 0  # row axis of a chunk
    for target, parts in zip(out, layers, strict=True):
        start = origin
        for part in parts:
            begin, end = max(first, start), min(span.end, start + part.shape[axis])
            if begin < end and name == "attention":
                keys = min(span.end, part.shape[2])
                rows = part[:, begin - start : end - start, first:keys]
                target[:, begin - first : end - first, : keys - first] = rows
            elif begin < end:
                target[begin - first : end - first] = part[begin - start : end - start]
            start += part.shape[axis]
    return out[0] if name == "post_norm" else out
