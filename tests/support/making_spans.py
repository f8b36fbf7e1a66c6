"""Traces of answers with hallucinated spans, as `extract` stores them: offsets of tokens, hidden states, log-probs."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import millstream as ms

LAYERS, DIM, PROMPT = 3, 6, 2


def offsets_of(pieces: Sequence[bytes], more: int = 1) -> tuple[str, list[tuple[int, int]]]:
    """The text of byte-level tokens and the characters that each covers; `more` tokens at the end have none."""
    text = b"".join(pieces).decode()
    owner = [number for number, character in enumerate(text) for _ in character.encode()]  # the character of each byte
    ranges: list[tuple[int, int]] = []
    start = 0
    for piece in pieces:
        own = owner[start : start + len(piece)]
        ranges.append((own[0], own[-1] + 1) if own else (start, start))
        start += len(piece)
    return text, ranges + [(len(text), len(text))] * more


def write_spans(path: Path, num_questions: int = 40, *, tier: str = "hidden", seed: int = 0) -> ms.Traces:
    """Two answers per question; half of the answers have a span of wrong tokens, whose states differ in layer 1."""
    rng = np.random.default_rng(seed)
    with ms.TraceWriter(path, shard_records=30) as writer:
        for number in range(2 * num_questions):
            steps = int(rng.integers(5, 12))
            text, offsets = offsets_of([f"w{step:02d} ".encode() for step in range(steps)])
            is_wrong = np.zeros(steps + 1, np.bool_)
            if number % 2:
                start = int(rng.integers(0, steps - 3))
                is_wrong[start : start + 3] = True
            spans = [{"start": offsets[i][0], "end": offsets[i][1], "label": "made"} for i in np.flatnonzero(is_wrong)]
            hidden = rng.standard_normal((LAYERS, PROMPT + steps + 1, DIM)).astype(np.float32)
            hidden[1, PROMPT:, 0] += 3 * is_wrong
            states = {"hidden": hidden} if tier == "hidden" else {"answer_hidden": hidden[:, PROMPT:]}
            writer.append(
                {
                    "record_id": f"q{number // 2}" if number % 2 == 0 else f"q{number // 2}#1",
                    "question_id": f"q{number // 2}",
                    "question": f"Question {number // 2}?",
                    "generated_answer": text,
                    "spans": json.dumps(spans),
                    "status": "ok",
                    "prompt_len": PROMPT,
                    "answer_len": steps,
                    "offsets": np.array(offsets, np.int32),
                    "logprobs": (rng.normal(-1, 0.5, steps + 1) - is_wrong).astype(np.float32),
                    "entropy": (rng.random(steps + 1) + 0.3 * is_wrong).astype(np.float32),
                    **states,
                }
            )
    opened = ms.open(path)
    assert isinstance(opened, ms.Traces)
    return opened
