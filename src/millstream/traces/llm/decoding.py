"""How the next token is chosen: greedy, sampling or beam search; what is kept of each step; where generation stops."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from millstream.errors import BadSetting
from millstream.traces.llm import transformers
from millstream.traces.llm.fields import TOP_K
from millstream.traces.llm.model import Tokenizer

# B batch, P prompt with padding, N generated, V vocabulary


@dataclass(frozen=True)
class Decoding:
    """How the next token is chosen. `temperature` 0 is greedy, or beam search with more than one beam.

    With `samples`, a greedy answer comes first, and so many are drawn at the temperature.
    """

    max_new_tokens: int = 32
    num_beams: int = 1
    samples: int = 0
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
        if self.samples < 0 or (self.samples and self.temperature == 0):
            raise BadSetting(
                f"samples={self.samples} temperature={self.temperature}: samples are drawn at a temperature above 0, "
                "as in samples=10 temperature=1"
            )

    @property
    def rows(self) -> int:
        """Sequences generated per question."""
        return max(self.num_beams, 1 + self.samples)

    def config(self, *, eos: Sequence[int] | None, pad: int) -> Any:
        """A complete configuration: the generation_config.json of the model is ignored."""
        return transformers().GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            num_beams=self.num_beams,
            early_stopping=self.num_beams > 1,
            do_sample=False,  # sampling is done by Draw
            eos_token_id=eos,
            pad_token_id=pad,
            return_dict_in_generate=True,
            use_cache=True,
        )

    def processors(self, names: Sequence[str | None], device: torch.device) -> list[Any]:
        """Logits processors of each step; none without sampling. A row without a name is greedy."""
        hf, steps = transformers(), list[Any]()
        if self.temperature > 0:
            steps.append(hf.TemperatureLogitsWarper(self.temperature))
            steps += [hf.TopKLogitsWarper(self.top_k)] if self.top_k is not None else []
            steps += [hf.TopPLogitsWarper(self.top_p)] if self.top_p is not None else []
            steps.append(Draw(self.seed, names, device))
        return steps

    def stopping(self, tokenizer: Tokenizer, prompt: int) -> Any:
        """Stopping criteria in addition to the end-of-text token; `prompt` is the number of prompt tokens."""
        stops = [StopAt(tokenizer, self.stop, prompt)] if self.stop else []
        return transformers().StoppingCriteriaList(stops)


class Draw:
    """Sampling by the Gumbel-max trick, with noise that depends only on (seed, record id, step).

    A question therefore gets the same answers in any batch, and after an interruption. A row without a name gets none.
    """

    def __init__(self, seed: int, names: Sequence[str | None], device: torch.device) -> None:
        self._generators = [
            None
            if name is None
            else torch.Generator(device).manual_seed(
                int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest())
            )
            for name in names
        ]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise = torch.ones_like(scores, dtype=torch.float32)
        for row, generator in zip(noise, self._generators, strict=True):
            if generator is not None:
                row.exponential_(generator=generator)
        return scores - noise.log_().to(scores.dtype)


class Steps:
    """Keeps the statistics of every generated token, as a logits processor: the logits of one step are in memory."""

    def __init__(self) -> None:
        self._steps: list[dict[str, torch.Tensor]] = []
        self._logits_BV: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._finish(input_ids[:, -1])
        self._logits_BV = scores
        return scores

    def of_rows(self, sequences: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        """The statistics of each row, [N, ...], given all tokens."""
        self._finish(sequences[:, -1])
        joined = {name: torch.stack([step[name] for step in self._steps], dim=1).cpu() for name in self._steps[0]}
        return [{name: values[row] for name, values in joined.items()} for row in range(len(sequences))]

    def _finish(self, chosen_B: torch.Tensor) -> None:
        """Only the call after a step shows the tokens it chose."""
        if self._logits_BV is not None:
            self._steps.append(token_statistics(self._logits_BV, chosen_B))
        self._logits_BV = None


def token_statistics(logits_MV: torch.Tensor, ids_M: torch.Tensor) -> dict[str, torch.Tensor]:
    """Log-probability, entropy and rank of tokens under the model, and the top tokens, on the device of the logits."""
    logprobs = logits_MV.float().log_softmax(-1)
    own = logprobs.gather(1, ids_M[:, None])
    top = logprobs.topk(min(TOP_K, logprobs.shape[1]), dim=-1)
    return {
        "logprobs": own[:, 0],
        "entropy": -(logprobs.exp() * logprobs).nan_to_num_().sum(-1),
        "rank": (logprobs > own).sum(-1).to(torch.int32),
        "topk_ids": top.indices.to(torch.int32),
        "topk_logprobs": top.values,
    }


class StopAt:
    """Stops a row as soon as its generated text contains one of the strings."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], prompt: int) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._prompt = prompt
        # A token has at least one byte; a few more for characters that are cut.
        self._tail = max(len(mark.encode()) for mark in stop) + 4

    def __call__(self, input_ids: torch.Tensor, scores: object, **options: object) -> torch.Tensor:
        tails = input_ids[:, max(self._prompt, input_ids.shape[1] - self._tail) :]
        texts = self._tokenizer.batch_decode(as_lists(tails), skip_special_tokens=True)
        found = [any(stop in text for stop in self._stop) for text in texts]
        return torch.tensor(found, device=input_ids.device)


def as_lists(ids: torch.Tensor) -> list[list[int]]:
    return ids.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
