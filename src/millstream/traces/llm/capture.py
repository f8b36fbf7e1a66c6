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
from millstream.traces.llm.fields import NODE_DIM, NUM_EDGES, NUM_EIGENVALUES, Fields, Kept, Size, Span, samples_of

# B batch, L layers, H heads, R rows (queries) of a pass, K keys, T tokens, D hidden, P prompt with padding, N generated

NAME = "millstream_trace"
TAP = "millstream_tap"  # attribute of a module: the receiver of its attention weights
_PROJECTION_SEED = 20170505


@dataclass
class Pass:
    """One forward pass to capture."""

    start: int  # position of its first row in the padded sequence
    keep: int  # number of rows kept
    every: int  # rows of the batch per sample (beams)
    real_BR: torch.Tensor  # which kept rows are tokens, not padding
    first_answer: int | None  # the row of the last prompt token, if the answer is in this pass
    answer_len_B: torch.Tensor | None


class Capture:
    """Captures activations with hooks on layers and attention, active only in `prompt` and `replay`."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], fields: Fields, size: Size) -> None:
        self.fields = fields
        self.size = size
        self._dtype: torch.dtype = getattr(torch, fields.stored)
        self._hidden = set(fields.layers_of("hidden", size)) if "hidden" in fields.names else set[int]()
        self._attention = set(fields.layers_of("attention", size)) if "attention" in fields.names else set[int]()
        generator = torch.Generator().manual_seed(_PROJECTION_SEED)
        self._projection = torch.randn(size.hidden, NODE_DIM, generator=generator) / size.hidden**0.5
        self._pass: Pass | None = None
        # Any module of a layer may call the attention function.
        self._taps = [(m, Tap(self, index)) for index, layer in enumerate(layers) for m in layer.modules()]
        self.prompt_mask_BP = torch.empty(0)
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

    @contextmanager
    def prompt(self, mask_BP: torch.Tensor, *, beams: int) -> Generator[None]:
        """Capture the next forward pass only: the one over the prompt."""
        self.prompt_mask_BP = mask_BP.bool()
        if not self.fields.need_prompt or mask_BP.shape[1] < 2:
            yield
            return
        real = self.prompt_mask_BP[:, :-1]
        with self._capturing(Pass(0, real.shape[1], beams, real, None, None)):
            yield

    @contextmanager
    def replay(self, mask_BT: torch.Tensor, answer_len_B: torch.Tensor, *, whole: bool) -> Generator[None]:
        """Capture the next forward pass: over the last prompt token and the answer, or over everything if `whole`."""
        last_prompt = self.prompt_mask_BP.shape[1] - 1
        start = 0 if whole else last_prompt
        real = mask_BT.bool()[:, start:]
        if whole:
            self.clear()
        with self._capturing(Pass(start, real.shape[1], 1, real, last_prompt - start, answer_len_B)):
            yield

    @contextmanager
    def _capturing(self, current: Pass) -> Generator[None]:
        self._pass = current
        for module, tap in self._taps:
            setattr(module, TAP, tap)
        try:
            yield
        finally:
            self._pass = None

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
            rows_BRD = self._rows(_first_tensor(output), self._pass)
            self._keep("post_norm", 0, rows_BRD, large=True)
            self._note_largest(rows_BRD, self._pass)
        self._pass = None  # the later steps of `generate` are not captured

    def _rows(self, states: torch.Tensor, current: Pass) -> torch.Tensor:
        return states[:: current.every, : current.keep]

    def _keep(self, name: str, layer: int, values: torch.Tensor, *, large: bool = False) -> None:
        """Small fields stay on the device until the batch is done: one transfer for all layers."""
        # Always a copy: a view would keep all attention of the layer alive.
        kept = values.to(self._dtype if values.is_floating_point() else values.dtype, copy=True)
        self.kept[name, layer].append(kept.cpu() if large else kept)

    def _take_hidden(self, layer: int, states: torch.Tensor, current: Pass) -> None:
        names = self.fields.names
        rows_BRD = self._rows(states, current)
        if layer in self._hidden:
            self._keep("hidden", layer, rows_BRD, large=True)
        if "nodes" in names:
            self._projection = self._projection.to(rows_BRD.device)
            nodes_BRD = rows_BRD.float() @ self._projection
            self._keep("nodes", layer, nodes_BRD)
            self._note_largest(nodes_BRD, current)
        if "states" in names and current.first_answer is not None:
            self._keep("states", layer, _states(rows_BRD[:, current.first_answer :].float(), current))
        if layer in self._hidden or "states" in names:
            self._note_largest(rows_BRD, current)

    def _note_largest(self, rows_BRD: torch.Tensor, current: Pass) -> None:
        """The largest absolute value of each sample, to detect float16 overflow."""
        if self._dtype == torch.float16:
            largest = rows_BRD.masked_fill(~current.real_BR[..., None], 0.0).abs().amax((1, 2)).float().cpu()
            self.largest_B = largest if self.largest_B is None else torch.maximum(self.largest_B, largest)

    def take_attention(self, layer: int, weights: torch.Tensor) -> None:
        names, current = self.fields.names, self._pass
        assert current is not None
        self._captured.add(layer)
        weights_BHRK = weights[:: current.every, :, : current.keep]
        if layer in self._attention:
            self._keep("attention", layer, weights_BHRK, large=True)
        if "edges" in names:
            self._take_edges(layer, weights_BHRK, current)
        if "laplacian" in names:
            self._take_columns(layer, weights_BHRK, current)
        if "heads" in names and current.first_answer is not None:
            rows = weights_BHRK[:, :, current.first_answer :]
            first = current.start + current.first_answer
            self._keep("self_attention", layer, rows.diagonal(first, 2, 3))
            self._keep("attention_entropy", layer, -(rows * rows.clamp_min(1e-30).log()).sum(-1))
            self._keep("prompt_attention", layer, rows[..., : self.prompt_mask_BP.shape[1]].sum(-1))

    def _take_edges(self, layer: int, weights_BHRK: torch.Tensor, current: Pass) -> None:
        """The earlier tokens each token attends to most (mean over heads), and the rest of the row."""
        mean_BRK = weights_BHRK.mean(1)
        earlier = torch.ones(mean_BRK.shape[1:], dtype=torch.bool, device=mean_BRK.device).tril(current.start - 1)
        weight, source = mean_BRK.where(earlier, 0.0).topk(min(NUM_EDGES, mean_BRK.shape[2]), dim=-1)
        self._keep("edge_weight", layer, weight)
        found = source.to(torch.int32).where(weight > 0, -1)  # sliding windows also hide earlier tokens
        self._keep("edge_source", layer, found)
        self._keep("edge_rest", layer, 1 - weight.sum(-1))

    def _take_columns(self, layer: int, weights_BHRK: torch.Tensor, current: Pass) -> None:
        """Attention received by every token, and its self-attention, summed over the passes."""
        real = weights_BHRK * current.real_BR[:, None, :, None]
        received, own = real.sum(2), weights_BHRK.diagonal(current.start, 2, 3).clone()  # not a view of all weights
        if layer in self._received:
            before = self._received[layer]
            received[..., : before.shape[-1]] += before
            own = torch.cat([self._diagonal[layer], own], dim=-1)
        self._received[layer], self._diagonal[layer] = received, own

    def traces(self, mask_BT: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        """The captured tensors of each sample, without padding; clears the capture."""
        if self.fields.need_attention and len(self._captured) < self.size.layers:
            raise BadSource(
                f"this model exposes the attention of only {len(self._captured)} of its {self.size.layers} layers: "
                "keep other fields, as in fields=hidden,post_norm"
            )
        if "laplacian" in self.fields.names:
            self._keep_spectrum(mask_BT)
        mask = mask_BT.bool().cpu()
        padded = [int(count) for count in (~self.prompt_mask_BP).sum(1)]
        ends = [int(end) for end in mask.shape[1] - mask.flip(1).int().argmax(1)]
        answer = self.prompt_mask_BP.shape[1]
        samples = samples_of(self.kept, [Span(first, end, answer) for first, end in zip(padded, ends, strict=True)])
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


def _states(rows_BRD: torch.Tensor, current: Pass) -> torch.Tensor:
    """[B, position, D]: the last prompt token, and the first, last and mean answer token."""
    assert current.answer_len_B is not None
    count = current.answer_len_B.to(rows_BRD.device)
    position = torch.arange(rows_BRD.shape[1], device=rows_BRD.device)[None]
    inside = ((position >= 1) & (position <= count[:, None])).to(rows_BRD.dtype)
    mean = (rows_BRD * inside[..., None]).sum(1) / count[:, None]
    last = rows_BRD[torch.arange(len(count), device=rows_BRD.device), count]
    return torch.stack([rows_BRD[:, 0], rows_BRD[:, 1], last, mean], dim=1)


def _first_tensor(output: object) -> torch.Tensor:
    found = cast("tuple[object, ...]", output)[0] if isinstance(output, tuple) else output
    found = found if isinstance(found, torch.Tensor) else getattr(found, "last_hidden_state", None)
    assert isinstance(found, torch.Tensor)
    return found
