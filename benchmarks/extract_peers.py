"""Other ways to get the same traces: each takes a `Bench` and returns a function that processes the whole batch."""

import copy
from collections.abc import Callable
from typing import Any

import torch

Variant = Callable[[Any], Callable[[], None]]


def generate_with_outputs(bench: Any) -> Callable[[], None]:
    """`generate(output_hidden_states, output_attentions)` in eager attention, assembled into whole traces.

    It has no state for the last token, which is never fed back; with beam search the states would mix beams.
    """
    bench.model.set_attn_implementation("eager")

    @torch.inference_mode()
    def run() -> None:
        ids, mask = bench.padded()
        config = copy.deepcopy(bench.config)
        config.output_hidden_states = config.output_attentions = True
        out = bench.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        width = ids.shape[1]
        for i, row in enumerate(bench.ids):
            first = width - len(row)
            hidden = torch.cat([torch.stack([layer[i] for layer in step]) for step in out.hidden_states], dim=1)
            keys = width + len(out.attentions) - 1
            rows = [
                torch.nn.functional.pad(torch.stack([layer[i] for layer in step]), (0, keys - step[0].shape[-1]))
                for step in out.attentions
            ]
            attention = torch.cat(rows, dim=2)[:, :, first:, first:]
            keep(hidden[:, first:], attention)

    return run


def generate_and_forward(bench: Any) -> Callable[[], None]:
    """Plain generate, then one eager forward pass over prompt and answer that keeps everything."""

    @torch.inference_mode()
    def run() -> None:
        bench.model.set_attn_implementation("sdpa")
        ids, mask = bench.padded()
        out = bench.model.generate(input_ids=ids, attention_mask=mask, generation_config=bench.config)
        bench.model.set_attn_implementation("eager")
        whole = torch.cat([mask, mask.new_ones(len(mask), bench.new)], dim=1)
        places = (whole.cumsum(1) - 1).clamp_min(0)
        seen = bench.model(
            input_ids=out.sequences,
            attention_mask=whole,
            position_ids=places,
            output_hidden_states=True,
            output_attentions=True,
            use_cache=False,
        )
        for i, row in enumerate(bench.ids):
            first = ids.shape[1] - len(row)
            hidden = torch.stack([layer[i, first:] for layer in seen.hidden_states])
            keep(hidden, torch.stack([layer[i, :, first:, first:] for layer in seen.attentions]))

    return run


def with_nnsight(bench: Any) -> Callable[[], None]:
    """nnsight: generate, then trace prompt and answer and save the output of every layer (no attention)."""
    import nnsight

    bench.model.set_attn_implementation("sdpa")
    wrapped = nnsight.LanguageModel(bench.model, tokenizer=bench.loaded.tokenizer)

    def run() -> None:
        ids, mask = bench.padded()
        with torch.inference_mode():
            out = bench.model.generate(input_ids=ids, attention_mask=mask, generation_config=bench.config)
        whole = torch.cat([mask, mask.new_ones(len(mask), bench.new)], dim=1)
        layers = wrapped.model.layers
        with wrapped.trace({"input_ids": out.sequences.clone(), "attention_mask": whole}):
            saved = nnsight.save([layer.output for layer in layers])
        states = [state[0] if isinstance(state, tuple) else state for state in saved]
        for i, row in enumerate(bench.ids):
            first = ids.shape[1] - len(row)
            keep(torch.stack([state[i, first:] for state in states]), torch.empty(0))

    return run


def with_transformer_lens(bench: Any) -> Callable[[], None]:
    """TransformerLens: generate, then `run_with_cache` over prompt and answer, states and patterns of every layer."""
    import transformers
    from transformer_lens.model_bridge import TransformerBridge

    if "bridge" not in bench.own:  # its own copy of the model: the bridge modifies it
        model = transformers.AutoModelForCausalLM.from_pretrained(
            bench.loaded.card.name_or_path, attn_implementation="eager", dtype=torch.float32
        )
        place = bench.loaded.card.name_or_path
        bench.own["bridge"] = TransformerBridge.boot_transformers(place, hf_model=model, device="cpu")
    bridge = bench.own["bridge"]
    bench.model.set_attn_implementation("sdpa")

    @torch.inference_mode()
    def run() -> None:
        ids, mask = bench.padded()
        out = bench.model.generate(input_ids=ids, attention_mask=mask, generation_config=bench.config)
        whole = torch.cat([mask, mask.new_ones(len(mask), bench.new)], dim=1)
        _, cache = bridge.run_with_cache(out.sequences, attention_mask=whole)
        count = bench.loaded.card.size.layers
        for i, row in enumerate(bench.ids):
            first = ids.shape[1] - len(row)
            hidden = torch.stack([cache["resid_post", layer][i, first:] for layer in range(count)])
            keep(hidden, torch.stack([cache["pattern", layer][i, :, first:, first:] for layer in range(count)]))

    return run


def keep(hidden: torch.Tensor, attention: torch.Tensor) -> None:
    """As in the old scripts: half precision, on the host."""
    hidden.half().cpu().contiguous()
    attention.half().cpu().contiguous()


PEERS: dict[str, Variant] = {
    "generate with outputs": generate_with_outputs,
    "generate, then a full forward": generate_and_forward,
    "nnsight": with_nnsight,
    "TransformerLens": with_transformer_lens,
}
