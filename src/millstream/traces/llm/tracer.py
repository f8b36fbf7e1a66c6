"""A batch of questions -> their traces: generate, then replay the answers on the truncated cache and capture."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from millstream.traces.llm.capture import Capture
from millstream.traces.llm.fields import TOP_K, Fields
from millstream.traces.llm.model import Answer, Decoding, LoadedModel, Tokenizer, as_lists, cut_answer
from millstream.traces.llm.prompts import Prompt
from millstream.traces.llm.questions import Question

# B batch, P prompt with padding, N generated, T = P + N, V vocabulary

P_TRUE_SCHEMA = {"p_true": "float32", "p_true_a": "float32", "p_true_b": "float32"}
_P_TRUE_PROMPT = """Question: {question}
Proposed answer: {answer}
Is the proposed answer:
 (A) {first}
 (B) {second}
The proposed answer is: ("""
Padding = Callable[[Sequence[Sequence[int]]], tuple[torch.Tensor, torch.Tensor]]
Record = dict[str, object]
_FLOAT16_MAX = 65504.0


@dataclass(frozen=True)
class EncodedQuestion:
    """A question and its prompt as token ids."""

    question: Question
    ids: list[int]


class Tracer:
    """Runs a model on questions and returns a record for each, in order; a failure becomes a record with its reason."""

    def __init__(
        self, loaded: LoadedModel, *, fields: Fields, decoding: Decoding, prompt: Prompt, p_true: bool = False
    ) -> None:
        self.loaded = loaded
        self.decoding = decoding
        self.prompt = prompt
        self.fields = fields
        self._p_true = p_true
        self._capture = Capture(loaded.base, loaded.layers, fields, loaded.card.size)
        self._config = decoding.config(eos=sorted(loaded.eos) or None, pad=loaded.pad)
        self._max_cells: int | None = None  # tokens of the smallest batch that ran out of memory

    def encode(self, questions: Sequence[Question]) -> list[EncodedQuestion]:
        """The questions with their prompts as token ids."""
        ids = self.prompt.ids(self.loaded.tokenizer, questions)
        return [EncodedQuestion(question, tokens) for question, tokens in zip(questions, ids, strict=True)]

    def trace(self, batch: Sequence[EncodedQuestion]) -> list[Record]:
        """A record per question. A batch that fails or runs out of memory is halved to isolate the cause."""
        problems = [self._length_problem(encoded) for encoded in batch]
        traced = iter(self._halving([encoded for encoded, problem in zip(batch, problems, strict=True) if not problem]))
        return [
            self.failed(encoded, problem) if problem else next(traced)
            for encoded, problem in zip(batch, problems, strict=True)
        ]

    def _length_problem(self, encoded: EncodedQuestion) -> str | None:
        total = len(encoded.ids) + self.decoding.max_new_tokens
        context = self.loaded.card.context
        if not encoded.ids:
            return "the prompt has no tokens"
        if context is not None and total > context:
            new = self.decoding.max_new_tokens
            return f"a prompt of {len(encoded.ids)} tokens and {new} new tokens exceed the context of {context} tokens"
        if "edges" in self.fields.names and total > 32_767:
            return f"{total} tokens exceed the maximum of 32767 for edges"
        return None

    def _halving(self, batch: Sequence[EncodedQuestion]) -> list[Record]:
        if not batch:
            return []
        half = len(batch) // 2
        if half and self._max_cells is not None and self._cells(batch) >= self._max_cells:
            return self._halving(batch[:half]) + self._halving(batch[half:])
        try:
            return self._trace(batch)
        except (RuntimeError, MemoryError, ValueError, IndexError) as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if _is_out_of_memory(error):
                self._max_cells = min(self._max_cells or 2**62, self._cells(batch))
        # Outside of `except`, or the traceback would keep the tensors of the failed batch alive.
        self._capture.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not half:
            return [self.failed(batch[0], problem)]
        return self._halving(batch[:half]) + self._halving(batch[half:])

    def _cells(self, batch: Sequence[EncodedQuestion]) -> int:
        longest = max(len(encoded.ids) for encoded in batch)
        return len(batch) * (longest + self.decoding.max_new_tokens)

    @torch.inference_mode()
    def _trace(self, batch: Sequence[EncodedQuestion]) -> list[Record]:
        begun = time.perf_counter()
        prompt_BP, mask_BP = self._pad([encoded.ids for encoded in batch])
        generated = self._generate(batch, prompt_BP, mask_BP)
        width = prompt_BP.shape[1]
        answers = [
            cut_answer(self.loaded.tokenizer, row, eos=set(self.loaded.eos), stop=self.decoding.stop)
            for row in as_lists(generated.sequences[:, width:])
        ]
        after_generate = time.perf_counter()
        mask_BT, logits_NBV = self._replay(prompt_BP, mask_BP, answers, generated)
        del generated
        largest = self._capture.largest_B
        tensors = self._capture.traces(mask_BT)
        steps: list[Record] = []
        for i, answer in enumerate(answers):
            logits_NV = torch.stack([step_BV[i] for step_BV in logits_NBV[: len(answer.ids)]])
            steps.append(_token_statistics(logits_NV, answer.ids))
        after_replay = time.perf_counter()
        extra = self._p_true_fields(batch, answers)
        records: list[Record] = []
        for i, (encoded, answer) in enumerate(zip(batch, answers, strict=True)):
            tokens = torch.tensor(encoded.ids + answer.ids, dtype=torch.int32)
            record = {**self._about(encoded), "tokens": tokens, **steps[i], **tensors[i], **extra[i]}
            record |= {
                "generated_answer": answer.text,
                "generated_text": answer.whole_text,
                "answer_len": answer.length,
                "finish": answer.finish,
                "generate_s": (after_generate - begun) / len(batch),
                "replay_s": (after_replay - after_generate) / len(batch),
            }
            problem = self._numeric_problem(steps[i], None if largest is None else float(largest[i]))
            records.append(self.failed(encoded, problem) if problem else self._in_order(record))
        return records

    def _generate(self, batch: Sequence[EncodedQuestion], prompt_BP: torch.Tensor, mask_BP: torch.Tensor) -> Any:
        ids = [encoded.question.id for encoded in batch]
        self._capture.clear()
        with self._capture.prompt(mask_BP, beams=self.decoding.num_beams):
            return self.loaded.model.generate(
                input_ids=prompt_BP,
                attention_mask=mask_BP,
                generation_config=self._config,
                logits_processor=self.decoding.processors(ids, prompt_BP.device),
                stopping_criteria=self.decoding.stopping(self.loaded.tokenizer, prompt_BP.shape[1]),
            )

    def _replay(
        self, prompt_BP: torch.Tensor, mask_BP: torch.Tensor, answers: Sequence[Answer], generated: Any
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """One pass over the answers. Returns mask and logits [B, V] of each step (of `generate` unless beams)."""
        device = prompt_BP.device
        count, width = max(len(answer.ids) for answer in answers), prompt_BP.shape[1]
        answer_BN = torch.full((len(answers), count), self.loaded.pad)
        mask_BN = torch.zeros((len(answers), count), dtype=mask_BP.dtype)
        for i, answer in enumerate(answers):
            answer_BN[i, : len(answer.ids)] = torch.tensor(answer.ids)
            mask_BN[i, : len(answer.ids)] = 1
        ids_BT = torch.cat([prompt_BP, answer_BN.to(device)], dim=1)
        mask_BT = torch.cat([mask_BP, mask_BN.to(device)], dim=1)
        position_BT = (mask_BT.cumsum(1) - 1).clamp_min(0)
        # For an empty answer: its end-of-text or stop token.
        lengths = torch.tensor([answer.length or len(answer.ids) for answer in answers])
        cache = generated.past_key_values
        cut = _cut_back(cache, width - 1, rows=len(answers))
        start = width - 1 if cut else 0
        with self._capture.replay(mask_BT, lengths, whole=not cut):
            inputs = {
                "input_ids": ids_BT[:, start:],
                "attention_mask": mask_BT,
                "position_ids": position_BT[:, start:],
                "past_key_values": cache if cut else None,
                "use_cache": cut,
            }
            if generated.logits is not None:
                self.loaded.base(**inputs)  # without the LM head, a fifth of the work of a small model
                return mask_BT, generated.logits
            output = self.loaded.model(**inputs, logits_to_keep=count + 1)
        return mask_BT, output.logits[:, -count - 1 : -1].unbind(1)

    def _p_true_fields(self, batch: Sequence[EncodedQuestion], answers: Sequence[Answer]) -> list[Record]:
        if not self._p_true:
            return [{} for _ in batch]
        pairs = [(encoded.question.question, answer.text) for encoded, answer in zip(batch, answers, strict=True)]
        return p_true(self.loaded, pairs, pad=self._pad)

    def _pad(self, rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask, padded on the left."""
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self.loaded.pad)
        mask = torch.zeros((len(rows), width), dtype=torch.int64)
        for i, row in enumerate(rows):
            ids[i, width - len(row) :] = torch.tensor(row)
            mask[i, width - len(row) :] = 1
        return ids.to(self.loaded.device), mask.to(self.loaded.device)

    def _numeric_problem(self, steps: Record, largest: float | None) -> str | None:
        if not bool(torch.isfinite(steps["logprobs"]).all()):  # pyright: ignore[reportArgumentType]
            return "the model's logits are not finite"
        if largest is not None and not largest <= _FLOAT16_MAX:
            return (
                f"hidden states reach {largest:.4g}, beyond the range of float16: use stored=bfloat16 or stored=float32"
            )
        return None

    def _about(self, encoded: EncodedQuestion) -> Record:
        question = encoded.question
        return {
            "record_id": question.record_id,
            "question_id": question.id,
            "sample": question.sample,
            "dataset_index": question.index,
            "question": question.question,
            "answer": question.answer,
            "aliases": list(question.aliases),
            "kind": question.kind,
            "exposure": question.exposure,
            "status": "ok",
            "prompt_len": len(encoded.ids),
        }

    def failed(self, encoded: EncodedQuestion, problem: str) -> Record:
        """The record of a question that could not be traced."""
        return self._in_order({**self._about(encoded), "status": "error", "error": problem})

    def _in_order(self, record: Record) -> Record:
        return {name: record.get(name) for name in self.schema()}

    def schema(self) -> dict[str, Any]:
        """Every field of a record and its type."""
        scalars = {
            "record_id": "string",
            "question_id": "string",
            "sample": "int32",
            "dataset_index": "int32",
            "question": "string",
            "answer": "string",
            "aliases": "list<string>",
            "kind": "string",
            "exposure": "string",
            "status": "string",
            "error": "string",
            "generated_answer": "string",
            "generated_text": "string",
            "finish": "string",
            "prompt_len": "int32",
            "answer_len": "int32",
            "generate_s": "float32",
            "replay_s": "float32",
        }
        return {**scalars, **(P_TRUE_SCHEMA if self._p_true else {}), **self.fields.schema()}


def p_true(loaded: LoadedModel, pairs: Sequence[tuple[str, str]], *, pad: Padding) -> list[dict[str, object]]:
    """For each (question, answer): `p_true_a` with True as choice A, `p_true_b` with True as choice B, and their mean.

    None where the prompt exceeds the context of the model.
    """
    orders = (("True", "False"), ("False", "True"))
    limit = loaded.card.context or 2**31
    prompts: list[list[list[int]]] = []
    for question, answer in pairs:
        texts = [_P_TRUE_PROMPT.format(question=question, answer=answer, first=a, second=b) for a, b in orders]
        prompts.append(loaded.tokenizer(texts)["input_ids"])
    fits = [max(map(len, both)) <= limit for both in prompts]
    rows = [ids for both, fit in zip(prompts, fits, strict=True) if fit for ids in both]
    choices = iter(_probability_of_a(loaded, *pad(rows)) if rows else [])
    found: list[dict[str, object]] = []
    for fit in fits:
        a, b = (next(choices), 1 - next(choices)) if fit else (None, None)
        found.append({"p_true": None if a is None or b is None else (a + b) / 2, "p_true_a": a, "p_true_b": b})
    return found


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text


def _probability_of_a(loaded: LoadedModel, ids_BP: torch.Tensor, mask_BP: torch.Tensor) -> list[float]:
    """The probability of A, given that the answer is A or B."""
    positions = (mask_BP.cumsum(1) - 1).clamp_min(0)
    logits_BV = loaded.model(
        input_ids=ids_BP, attention_mask=mask_BP, position_ids=positions, use_cache=False, logits_to_keep=1
    ).logits[:, -1]
    logprobs = logits_BV.float().log_softmax(-1)
    first, second = (logprobs[:, _letter_ids(loaded.tokenizer, letter)].logsumexp(-1) for letter in "AB")
    return [float(chosen) for chosen in torch.sigmoid(first - second)]


def _letter_ids(tokenizer: Tokenizer, letter: str) -> list[int]:
    """The tokens of this letter, with and without a space before it."""
    return sorted({ids[-1] for ids in tokenizer([letter, f" {letter}"], add_special_tokens=False)["input_ids"]})


def _cut_back(cache: Any, length: int, *, rows: int) -> bool:
    """Truncate the cache to the prompt without its last token, one row per sample; False if it cannot be done."""
    if cache is None or not hasattr(cache, "crop"):
        return False
    try:
        have = cache.get_seq_length()
        if cache.layers[0].keys.shape[0] != rows:  # beams share their prompt: keep one of them
            beams = cache.layers[0].keys.shape[0] // rows
            cache.batch_select_indices(torch.arange(rows, device=cache.layers[0].keys.device) * beams)
        cache.crop(length - have)  # negative: how many tokens to remove
    except (RuntimeError, ValueError, AttributeError, NotImplementedError, TypeError):
        return False
    return all(_length(layer) == length for layer in cache.layers)


def _length(layer: Any) -> int:
    keys = getattr(layer, "keys", None)
    return keys.shape[-2] if isinstance(keys, torch.Tensor) and keys.ndim == 4 else -1


def _token_statistics(logits_NV: torch.Tensor, ids: Sequence[int]) -> Record:
    """Log-probability, entropy and rank of each generated token under the model, and the top tokens."""
    logprobs = logits_NV.float().log_softmax(-1)
    chosen = torch.tensor(ids, device=logprobs.device)[:, None]
    own = logprobs.gather(1, chosen)
    top = logprobs.topk(min(TOP_K, logprobs.shape[1]), dim=-1)
    return {
        "logprobs": own[:, 0].cpu(),
        "entropy": -(logprobs.exp() * logprobs).nan_to_num_().sum(-1).cpu(),
        "rank": (logprobs > own).sum(-1).to(torch.int32).cpu(),
        "topk_ids": top.indices.to(torch.int32).cpu(),
        "topk_logprobs": top.values.cpu(),
    }
