"""Ratio and speed of the store's `compression` options on real LLM traces, and of rejected alternatives.

    python benchmarks/compression.py --model DIR --questions FILE.jsonl

Answers the first 24 questions greedily, keeps hidden states and attention of prompt and answer (computed in float32,
then rounded) and encodes them as millstream does, slice by slice. Speeds are MB of raw bytes per second of one
thread's CPU time, the best of 10 interleaved rounds. `compress` is all of `to_slices` with CRC-32C; for `none` that is
the CRC alone. `decompress` writes into allocated memory, without the CRC check. The whole trace is hidden and attention
in fp16; its ratio depends on the number of tokens, because attention grows quadratically.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import thread_time
from typing import cast

import numpy as np
import pyarrow as pa

from measuring import save
from millstream.core.record import Bytes, RawTensor, as_tensor, crc32c
from millstream.traces.store.slices import Slices, decompress, num_slices, to_slices

NUM_TRACES, NEW_TOKENS, ROUNDS = 24, 48, 10
ITEMSIZE = 2  # fp16 and bf16
# How to store a tensor, and how to fill a slice's raw bytes (first argument) from its stored bytes (second).
Way = tuple[Callable[[RawTensor], Slices], Callable[[Bytes, Bytes], None]]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(usage="compression.py --model DIR --questions FILE.jsonl")
    parser.add_argument("--model", required=True, type=Path, help="a Hugging Face causal-LM folder")
    parser.add_argument("--questions", required=True, type=Path, help='one JSON object per line, with a "question"')
    args = parser.parse_args(argv) if argv else parser.exit(2, parser.format_usage())
    with args.questions.open(encoding="utf-8") as lines:
        questions = [json.loads(line)["question"] for line in list(lines)[:NUM_TRACES]]
    hidden, attention, bf16 = make_traces(args.model, questions)
    tokens = [raw.shape[1] for raw in hidden]
    print(f"{len(tokens)} traces, tokens min/median/max {min(tokens)}/{np.median(tokens):.0f}/{max(tokens)}\n")
    print(f"| {'data':14} | {'way':29} | stored/raw | compress MB/s | decompress MB/s |\n|---|---|--:|--:|--:|")
    sets = {"hidden fp16": hidden, "attention fp16": attention, "hidden bf16": bf16, "whole trace": hidden + attention}
    results = {data: measure(raws) for data, raws in sets.items()}
    for data, ways in results.items():
        for way, found in ways.items():
            cells = [f"{found['ratio']:.3f}", f"{found['compress']:.0f}"] if "compress" in found else ["", ""]
            print(f"| {data:14} | {way:29} | {cells[0]:>10} | {cells[1]:>13} | {found['decompress']:>15.0f} |")
    facts = {"model": args.model.resolve().name, "pyarrow": pa.__version__, "tokens": tokens, "results": results}
    save("compression", facts)


def make_traces(model_path: Path, questions: Sequence[str]) -> tuple[list[RawTensor], ...]:
    """Hidden states fp16, attention fp16 and hidden states bf16, one [layer, ...] tensor per question."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager").eval()
    fields: tuple[list[RawTensor], ...] = ([], [], [])
    for question in questions:
        text = f"Answer the question concisely. Q: {question} A:"
        if tokenizer.chat_template:  # it adds its own special tokens
            turn = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=not tokenizer.chat_template).input_ids
        with torch.inference_mode():
            ids = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS)
            out = model(ids, output_hidden_states=True, output_attentions=True)
            hidden, attention = torch.cat(out.hidden_states), torch.cat(out.attentions)
        for field, tensor in zip(fields, (hidden.half(), attention.half(), hidden.bfloat16()), strict=True):
            field.append(cast(RawTensor, as_tensor("", tensor)))
    return fields


def measure(raws: Sequence[RawTensor]) -> dict[str, dict[str, float]]:
    """Ratio and best speeds of every method. Rounds are interleaved, so that noise affects all methods alike."""
    outs = [np.empty_like(raw.data) for raw in raws]
    results: dict[str, dict[str, float]] = {name: {} for name in WAYS}
    for name in [*WAYS] * ROUNDS:
        for key, value in one_round(name, raws, outs).items():
            results[name][key] = max(value, results[name].get(key, 0))
    del results["memcpy"]["ratio"], results["memcpy"]["compress"]  # it stores nothing
    return results


def one_round(name: str, raws: Sequence[RawTensor], outs: Sequence[Bytes]) -> dict[str, float]:
    """Store and restore once. Memory is freed on return, so that it is not charged to the next method."""
    pack, restore = WAYS[name]
    start = thread_time()
    stored = [pack(raw) for raw in raws]
    compress_s = thread_time() - start
    pairs: list[tuple[Bytes, Bytes]] = []
    for one, out in zip(stored, outs, strict=True):
        out.fill(0)  # so that bytes of the previous method cannot pass the check
        parts = out.reshape(len(one.crc32c), -1)
        cuts = np.cumsum(one.sizes)[:-1] if one.sizes else len(parts)
        pairs += zip(parts, np.split(one.data, cuts), strict=True)
    start = thread_time()
    for part, packed in pairs:
        restore(part, packed)
    decompress_s = thread_time() - start
    assert all(np.array_equal(raw.data, out) for raw, out in zip(raws, outs, strict=True)), name
    raw_mb, stored_mb = sum(out.size for out in outs) / 1e6, sum(one.data.size for one in stored) / 1e6
    return {"ratio": stored_mb / raw_mb, "compress": raw_mb / compress_s, "decompress": raw_mb / decompress_s}


def as_millstream(option: str) -> Way:
    return (
        lambda raw: to_slices(raw.data, num_slices(raw.kind, raw.shape), ITEMSIZE, option),
        np.copyto
        if option == "none"
        else lambda out, packed: decompress(packed, out, ITEMSIZE, option),  # a copy, like `read`
    )


def whole_slice(codec: pa.Codec, *, shuffle: bool = False) -> Way:
    """Like `to_slices`, but each slice in one piece; with shuffle, all low bytes before all high bytes."""

    def pack(raw: RawTensor) -> Slices:
        packed: list[bytes] = []
        for part in raw.data.reshape(num_slices(raw.kind, raw.shape), -1):
            small = codec.compress(pa.py_buffer(part.reshape(-1, ITEMSIZE).T.copy() if shuffle else part))
            packed.append(small.to_pybytes() if small.size < part.size else part.tobytes())
        return Slices(np.frombuffer(b"".join(packed), np.uint8), tuple(map(crc32c, packed)), tuple(map(len, packed)))

    def restore(out: Bytes, packed: Bytes) -> None:
        small = packed.size < out.size
        raw = np.frombuffer(memoryview(codec.decompress(pa.py_buffer(packed), out.size)), np.uint8) if small else packed
        if not (small and shuffle):
            return np.copyto(out, raw)
        wide, (low, high) = out.view(np.uint16), raw.reshape(ITEMSIZE, -1)
        np.copyto(wide, high)
        wide <<= 8
        wide |= low

    return pack, restore


WAYS: dict[str, Way] = {
    **{option: as_millstream(option) for option in ("none", "lz4", "zstd")},
    "rejected: zstd 3, whole slice": whole_slice(pa.Codec("zstd", compression_level=3)),
    "rejected: zstd 1, whole slice": whole_slice(pa.Codec("zstd", compression_level=1)),
    "rejected: lz4, byte shuffle": whole_slice(pa.Codec("lz4_raw"), shuffle=True),
    "memcpy": (lambda raw: Slices(raw.data, (0,), None), np.copyto),
}

if __name__ == "__main__":
    main(sys.argv[1:])
