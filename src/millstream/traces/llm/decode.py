"""Prompts -> generated ids: greedy, sampling or beam search, and where each answer ends. Knows nothing of traces."""

# B batch, P prompt with padding, N generated, V vocabulary

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from millstream.errors import BadSetting
from millstream.traces.llm.model import Tokenizer, transformers


@dataclass(frozen=True)
class Decoding:
    """How the next token is chosen. `temperature` 0 is greedy, or beam search with more than one beam."""

    max_new_tokens: int = 32
    num_beams: int = 1
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.num_beams < 1 or self.temperature < 0:
            raise BadSetting(
                f"max_new_tokens={self.max_new_tokens} num_beams={self.num_beams} temperature={self.temperature}: "
                "must be at least 1, 1 and 0"
            )
        if self.num_beams > 1 and self.temperature > 0:
            raise BadSetting("num_beams and temperature exclude each other: beam search does not sample")
        if (self.top_k is not None and self.top_k < 1) or not 0 < (self.top_p or 1.0) <= 1:
            raise BadSetting(
                f"top_k={self.top_k} top_p={self.top_p}: top_k must be at least 1, top_p above 0 and at most 1"
            )
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise BadSetting("top_k and top_p need temperature=, for example temperature=1")

    def config(self, *, eos: Sequence[int] | None, pad: int) -> Any:
        """A complete configuration: the generation_config.json of the model is ignored."""
        return transformers().GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            num_beams=self.num_beams,
            early_stopping=self.num_beams > 1,
            do_sample=False,  # we sample ourselves: see Draw
            eos_token_id=eos,
            pad_token_id=pad,
            return_dict_in_generate=True,
            output_logits=self.num_beams == 1,  # beams change their order between steps
            use_cache=True,
        )

    def processors(self, ids: Sequence[str], device: torch.device) -> Any:
        """Logits processors of each step; none without sampling."""
        hf, steps = transformers(), list[Any]()
        if self.temperature > 0:
            steps.append(hf.TemperatureLogitsWarper(self.temperature))
            steps += [hf.TopKLogitsWarper(self.top_k)] if self.top_k is not None else []
            steps += [hf.TopPLogitsWarper(self.top_p)] if self.top_p is not None else []
            steps.append(Draw(self.seed, ids, device))
        return hf.LogitsProcessorList(steps)

    def stopping(self, tokenizer: Tokenizer, prompt: int) -> Any:
        """Stopping criteria in addition to the end-of-text token; `prompt` is the number of prompt tokens."""
        stops = [StopAt(tokenizer, self.stop, prompt)] if self.stop else []
        return transformers().StoppingCriteriaList(stops)


class Draw:
    """Sampling by the Gumbel-max trick: the noise depends only on (seed, question id, step).

    So a question gets the same answer in any batch, and after an interruption.
    """

    def __init__(self, seed: int, ids: Sequence[str], device: torch.device) -> None:
        self._generators = [
            torch.Generator(device).manual_seed(
                int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest())
            )
            for name in ids
        ]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(scores, dtype=torch.float32)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        return scores - noise.log_().to(scores.dtype)


class StopAt:
    """Stops a row as soon as its generated text contains one of the strings."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], prompt: int) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._prompt = prompt
        self._tail = (
            max(len(mark.encode()) for mark in stop) + 4
        )  # a token has at least a byte; a few more for cut characters

    def __call__(self, input_ids: torch.Tensor, scores: object, **options: object) -> torch.Tensor:
        tails = input_ids[:, max(self._prompt, input_ids.shape[1] - self._tail) :]
        texts = self._tokenizer.batch_decode(as_lists(tails), skip_special_tokens=True)
        found = [any(stop in text for stop in self._stop) for text in texts]
        return torch.tensor(found, device=input_ids.device)


@dataclass(frozen=True)
class Answer:
    """The generated answer to one prompt: `ids` up to the token that ended it, the first `length` are the answer."""

    ids: list[int]
    length: int
    text: str  # of the answer
    whole_text: str  # all generated text
    finish: str  # eos, stop or length


def cut_answer(tokenizer: Tokenizer, generated: Sequence[int], *, eos: set[int], stop: Sequence[str]) -> Answer:
    """Cut at the end of the answer: the end-of-text token, a stop string, or the maximum length."""
    ids = list(generated)  # padding only follows an end-of-text token or a stop string, and is cut with it
    end = next((place for place, token in enumerate(ids) if token in eos), None)
    length, finish = (len(ids), "length") if end is None else (end, "eos")
    ids = ids[: length + (end is not None)]
    text = _text(tokenizer, ids[:length])
    if any(mark in text for mark in stop):
        texts = [_text(tokenizer, ids[: count + 1]) for count in range(length)]
        whole = next(count for count, begin in enumerate(texts, 1) if any(mark in begin for mark in stop))
        text = texts[whole - 1]
        cut = min(place for place in map(text.find, stop) if place >= 0)
        length = sum(len(begin) <= cut for begin in texts[:whole])
        return Answer(ids[:whole], length, text[:cut].strip(), text, "stop")
    return Answer(ids, length, text.strip(), text, finish)


def as_lists(ids: torch.Tensor) -> list[list[int]]:
    return ids.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True)
