"""Activations of a forward pass -> the fields to keep. Each layer is reduced on its device and then freed."""

from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from millstream.errors import BadSource
from millstream.traces.llm import transformers
from millstream.traces.llm.fields import (
    LAYERED,
    NODE_DIM,
    NUM_EDGES,
    NUM_EIGENVALUES,
    Fields,
    Kept,
    Size,
    Span,
    repeated,
    samples_of,
)
from millstream.traces.llm.topology import Tree, divergence, grown

# B batch, L layers, H heads, R rows (queries) of a pass, K keys, T tokens, D hidden, P prompt with padding, N generated

NAME = "millstream_trace"
TAP = "millstream_tap"  # attribute of a module: the receiver of its attention weights
_PROJECTION_SEED = 20170505


@dataclass(frozen=True)
class Padded:
    """A padded batch: prompts end and answers start at the column `prompt`."""

    ids_BT: torch.Tensor
    mask_BT: torch.Tensor
    prompt: int
    answers: Sequence[int] = ()  # tokens of each; of an empty one, all up to the token that ended it
    thinking: Sequence[int] = ()  # tokens of reasoning at the end of each prompt


@dataclass
class Pass:
    """One forward pass to capture: rows of the padded sequence from `start` on."""

    start: int
    real_BR: torch.Tensor  # which rows are tokens, not padding
    last_prompt: int  # place in the sequence of the last prompt token
    weights_BPR: torch.Tensor | None  # how much of each row is in each position of the field `states`
    once: bool = False  # the passes after it are not captured

    @property
    def first(self) -> int:
        """The first row from the last prompt token on."""
        return max(self.last_prompt - self.start, 0)

    @property
    def reaches_answer(self) -> bool:
        return self.first < self.real_BR.shape[1]


class Capture:
    """Captures activations with hooks on layers and attention, active only in `over`."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], fields: Fields, size: Size) -> None:
        self.fields = fields
        self.size = size
        self._dtype: torch.dtype = getattr(torch, fields.stored)
        self._layers = {name: set(fields.layers_of(name, size)) for name in LAYERED if name in fields.names}
        generator = torch.Generator().manual_seed(_PROJECTION_SEED)
        self._projection = torch.randn(size.hidden, NODE_DIM, generator=generator) / size.hidden**0.5
        self._pass: Pass | None = None
        # Any module of a layer may call the attention function.
        self._taps = [(m, Tap(self, index)) for index, layer in enumerate(layers) for m in layer.modules()]
        self.clear()
        layers[0].register_forward_pre_hook(self._before_first, with_kwargs=True)
        for index, layer in enumerate(layers):
            layer.register_forward_hook(self._after_layer(index + 1))
        model.register_forward_hook(self._after_model)

    def clear(self) -> None:
        self.kept: Kept = defaultdict(list)
        self.largest_B: torch.Tensor | None = None
        self._captured: set[int] = set()  # layers whose attention was captured
        self._received: dict[int, torch.Tensor] = {}
        self._diagonal: dict[int, torch.Tensor] = {}
        self._trees: dict[int, Tree] = {}
        self._states: dict[int, torch.Tensor] = {}

    @contextmanager
    def over(self, batch: Padded, start: int, end: int, *, once: bool = False) -> Generator[None]:
        """Capture the forward pass over these columns, `once`: only the first; passes go from left to right.

        Later passes may have several rows for each row of earlier ones: samples that share their prompt.
        """
        self._pass = Pass(start, batch.mask_BT.bool()[:, start:end], batch.prompt - 1, None, once)
        reaches_states = self._pass.reaches_answer or self.fields.thinking
        if "states" in self.fields.names and batch.answers and reaches_states:
            self._pass.weights_BPR = self._position_weights(self._pass, batch)
        for module, tap in self._taps:
            setattr(module, TAP, tap)
        try:
            yield
        finally:
            self._pass = None

    def _position_weights(self, current: Pass, batch: Padded) -> torch.Tensor:
        device = current.real_BR.device
        at_R = torch.arange(current.start, current.start + current.real_BR.shape[1], device=device)
        first = batch.prompt
        last_B = first - 1 + torch.tensor(batch.answers, device=device)[:, None]
        question_B = first - 1 - torch.tensor(batch.thinking, device=device)[:, None]  # its last token
        found = [at_R == question_B, at_R == first, at_R == last_B, _mean_weights(at_R, first, last_B)]
        if self.fields.thinking:  # without any, the last prompt token
            begin_B = (question_B + 1).clamp_max(first - 1)
            found += [at_R == first - 1, _mean_weights(at_R, begin_B, first - 1)]
        return torch.stack([weights.float().expand(len(last_B), -1) for weights in found], dim=1)

    @property
    def wants_attention(self) -> bool:
        return self._pass is not None and self.fields.need_attention

    def _before_first(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if self._pass is not None:
            found = args[0] if args else kwargs["hidden_states"]
            assert isinstance(found, torch.Tensor)
            self._take_hidden(0, found, self._pass)

    def _after_layer(self, layer: int):
        def hook(module: nn.Module, args: object, output: object) -> None:
            if self._pass is not None:
                self._take_hidden(layer, _first_tensor(output), self._pass)

        return hook

    def _after_model(self, module: nn.Module, args: object, output: object) -> None:
        if self._pass is None:
            return
        if "post_norm" in self.fields.names:
            rows_BRD = _first_tensor(output)
            self._keep("post_norm", 0, rows_BRD, large=True)
            self._note_largest(rows_BRD, self._pass)
        if self._pass.once:
            self._pass = None

    def _keep(self, name: str, layer: int, values: torch.Tensor, *, large: bool = False) -> None:
        """Small fields stay on the device until the batch is done: one transfer for all layers."""
        # Always a copy: a view would keep all attention of the layer alive.
        kept = values.to(self._dtype if values.is_floating_point() else values.dtype, copy=True)
        self.kept[name, layer].append(kept.cpu() if large else kept)

    def _take_hidden(self, layer: int, rows_BRD: torch.Tensor, current: Pass) -> None:
        names = self.fields.names
        hidden = layer in self._layers.get("hidden", ())
        of_answer = layer in self._layers.get("answer_hidden", ()) and current.reaches_answer
        if hidden:
            self._keep("hidden", layer, rows_BRD, large=True)
        if of_answer:
            after_prompt = max(current.last_prompt + 1 - current.start, 0)
            self._keep("answer_hidden", layer, rows_BRD[:, after_prompt:], large=True)
        if "nodes" in names:
            self._projection = self._projection.to(rows_BRD.device)
            nodes_BRD = rows_BRD.float() @ self._projection
            self._keep("nodes", layer, nodes_BRD)
            self._note_largest(nodes_BRD, current)
        if current.weights_BPR is not None:
            first = 0 if self.fields.thinking else current.first
            states = torch.bmm(current.weights_BPR[:, :, first:], rows_BRD[:, first:].float())
            self._states[layer] = states + self._states[layer] if layer in self._states else states
        if hidden or of_answer or "states" in names:
            self._note_largest(rows_BRD, current)

    def _note_largest(self, rows_BRD: torch.Tensor, current: Pass) -> None:
        """The largest absolute value of each sample, to detect float16 overflow."""
        if self._dtype == torch.float16:
            largest = rows_BRD.masked_fill(~current.real_BR[..., None], 0.0).abs().amax((1, 2)).float().cpu()
            before = largest if self.largest_B is None else repeated(self.largest_B, len(largest))
            self.largest_B = torch.maximum(before, largest)

    def take_attention(self, layer: int, weights_BHRK: torch.Tensor) -> None:
        names, current = self.fields.names, self._pass
        assert current is not None
        self._captured.add(layer)
        if layer in self._layers.get("attention", ()):
            self._keep("attention", layer, weights_BHRK, large=True)
        if "edges" in names:
            self._take_edges(layer, weights_BHRK, current)
        if "laplacian" in names:
            self._take_columns(layer, weights_BHRK, current)
        if "heads" in names and current.reaches_answer:
            rows = weights_BHRK[:, :, current.first :]
            self._keep("self_attention", layer, rows.diagonal(current.start + current.first, 2, 3))
            self._keep("attention_entropy", layer, -(rows * rows.clamp_min(1e-30).log()).sum(-1))
            self._keep("prompt_attention", layer, rows[..., : current.last_prompt + 1].sum(-1))
        start = max(current.last_prompt + 1 - current.start, 0)
        if "topology" in names and start < weights_BHRK.shape[2]:
            answer_BHRK, real_BR = weights_BHRK[:, :, start:], current.real_BR[:, start:]
            self._trees[layer] = grown(self._trees.get(layer), answer_BHRK, real_BR, prompt=current.last_prompt + 1)

    def _take_edges(self, layer: int, weights_BHRK: torch.Tensor, current: Pass) -> None:
        """The earlier tokens each token attends to most (mean over heads), and the rest of the row."""
        mean_BRK = weights_BHRK.mean(1)
        earlier = torch.ones(mean_BRK.shape[1:], dtype=torch.bool, device=mean_BRK.device).tril(current.start - 1)
        weight, source = mean_BRK.where(earlier, 0.0).topk(min(NUM_EDGES, mean_BRK.shape[2]), dim=-1)
        self._keep("edge_weight", layer, weight)
        found = source.to(torch.int32).where(weight > 0, -1)  # sliding windows also hide earlier tokens
        self._keep("edge_source", layer, found)
        self._keep("edge_rest", layer, 1 - weight.sum(-1))
        if "edge_heads" in self.fields.names and current.reaches_answer:
            heads = weights_BHRK.shape[1]
            source_BHRE = source[:, None, current.first :].expand(-1, heads, -1, -1)
            of_heads = weights_BHRK[:, :, current.first :].gather(3, source_BHRE)
            is_edge_BRE = weight[:, current.first :] > 0
            self._keep("edge_heads", layer, of_heads.transpose(1, 2) * is_edge_BRE[:, :, None])

    def _take_columns(self, layer: int, weights_BHRK: torch.Tensor, current: Pass) -> None:
        """Attention received by every token, and its self-attention, summed over the passes."""
        real = weights_BHRK * current.real_BR[:, None, :, None]
        received, own = real.sum(2), weights_BHRK.diagonal(current.start, 2, 3).clone()  # not a view of all weights
        if layer in self._received:
            before = repeated(self._received[layer], len(received))
            received[..., : before.shape[-1]] += before
            own = torch.cat([repeated(self._diagonal[layer], len(own)), own], dim=-1)
        self._received[layer], self._diagonal[layer] = received, own

    def traces(self, batch: Padded) -> list[dict[str, torch.Tensor]]:
        """The captured tensors of each sample, without padding; clears the capture."""
        if self.fields.need_attention and len(self._captured) < self.size.layers:
            raise BadSource(
                f"this model exposes the attention of only {len(self._captured)} of its {self.size.layers} layers: "
                "keep other fields, as in fields=hidden,post_norm"
            )
        if "laplacian" in self.fields.names:
            self._keep_spectrum(batch.mask_BT)
        for layer, tree in self._trees.items():
            self.kept["topology", layer] = [divergence(tree, batch.mask_BT[:, batch.prompt :].bool())]
        for layer, states in self._states.items():
            self._keep("states", layer, states)
        mask = batch.mask_BT.cpu()
        edges = zip(mask.argmax(1), mask.shape[1] - mask.flip(1).argmax(1), strict=True)
        samples = samples_of(self.kept, [Span(int(first), int(end), batch.prompt) for first, end in edges])
        self.clear()
        return samples

    def _keep_spectrum(self, mask_BT: torch.Tensor) -> None:
        """Largest eigenvalues of the Laplacian of every head, and its mean log self-attention.

        Attention is causal, so the Laplacian is triangular and the eigenvalues are on its diagonal: the mean attention
        a token receives from itself and later tokens, minus its self-attention.
        """
        order = sorted(self._received)
        received = torch.stack([self._received[layer] for layer in order])
        own = torch.stack([self._diagonal[layer] for layer in order])
        real = mask_BT.bool()
        after_BT = real.flip(1).cumsum(1).flip(1).clamp_min(1)
        diagonal = (received / after_BT[None, :, None] - own).masked_fill(~real[None, :, None], float("-inf"))
        count = min(NUM_EIGENVALUES, diagonal.shape[-1])
        top = diagonal.topk(count, dim=-1).values
        top = nn.functional.pad(top.masked_fill(top.isinf(), 0.0), (0, NUM_EIGENVALUES - count))
        logs = own.clamp_min(1e-12).log().masked_fill(~real[None, :, None], 0.0)
        logdet = logs.sum(-1) / real.sum(1)[None, :, None]
        for layer in order:
            self._keep("laplacian", layer, top[layer])
            self.kept["attention_logdet", layer] = [logdet[layer].float()]


@dataclass(frozen=True)
class Tap:
    """Receives the attention weights of one layer while `wanted`."""

    capture: Capture
    layer: int

    @property
    def wanted(self) -> bool:
        return self.capture.wants_attention

    def take(self, weights_BHRK: torch.Tensor) -> None:
        self.capture.take_attention(self.layer, weights_BHRK)


def register_attention() -> str:
    """Register the attention function with transformers; without a mask function it would get mask=None."""
    transformers().AttentionInterface.register(NAME, trace_attention)
    transformers().AttentionMaskInterface.register(NAME, transformers("masking_utils").sdpa_mask)
    return NAME


def trace_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """sdpa; or explicit softmax(q k^T) v if the weights are wanted or sdpa lacks an option."""
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
    if mask is None and rows > 1:  # for sdpa this would be is_causal
        mask = torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril(keys - rows)
    if mask is not None:
        mask = mask[..., :keys]
        # The lowest finite number, not -inf: a fully masked padding row stays finite.
        lowest = torch.finfo(scores_BHRK.dtype).min
        scores_BHRK = scores_BHRK.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores_BHRK + mask
    sinks = options.get("s_aux")
    if isinstance(sinks, torch.Tensor):
        column = sinks.reshape(1, -1, 1, 1).expand(scores_BHRK.shape[0], -1, rows, 1)
        return torch.cat([scores_BHRK, column.to(scores_BHRK.dtype)], dim=-1).softmax(-1, torch.float32)[..., :-1]
    return scores_BHRK.softmax(-1, torch.float32)


def _mean_weights(at_R: torch.Tensor, first: torch.Tensor | int, last: torch.Tensor | int) -> torch.Tensor:
    return ((at_R >= first) & (at_R <= last)) / (last - first + 1)


def _first_tensor(output: object) -> torch.Tensor:
    found = cast("tuple[object, ...]", output)[0] if isinstance(output, tuple) else output
    found = found if isinstance(found, torch.Tensor) else getattr(found, "last_hidden_state", None)
    assert isinstance(found, torch.Tensor)
    return found
