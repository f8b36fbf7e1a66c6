"""Prompts -> batches: longest first, as many rows as the memory given holds. The same prompts make the same batches."""

from collections.abc import Sequence

from millstream.source.llm.fields import Fields, Size

MAX_ROWS = 64  # more rows make a step no cheaper


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
    """Places of the prompts of each batch. `window`: the first so many prompts come first, then the next."""
    batches: list[list[int]] = []
    step = window or max(1, len(lengths))
    for first in range(0, len(lengths), step):
        order = sorted(range(first, min(first + step, len(lengths))), key=lambda place: -lengths[place])
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
    """Bytes that one row of a batch takes beside the model, at most: cache, activations, logits, what is kept."""
    total = prompt + max_new_tokens
    cache = 2 * size.layers * size.kv_width * total * size.item * num_beams * 2  # twice while it is reordered or cut
    activations = (8 * size.hidden + 3 * size.intermediate) * size.item * max(prompt * num_beams, max_new_tokens + 1)
    logits = size.vocab * (3 * 4 * num_beams + (size.item + 4) * (max_new_tokens + 1))
    weights = 6 * size.heads * 4 * max(prompt * prompt * num_beams, max_new_tokens * total)  # one layer's attention
    kept = 2 * fields.trace_bytes(size, prompt=prompt, answer=max_new_tokens)
    whole = cache + activations + logits + weights * fields.need_attention + kept
    return whole * 6 // 5  # what the allocator loses between blocks
