"""A batch of questions -> their traces: generate, then replay the answers on the cut-back cache, looking inside."""

# B batch, P prompt with padding, N generated, T = P + N, V vocabulary

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from millstream.source.llm.capture import Capture
from millstream.source.llm.decode import Answer, Decoding, as_lists, cut_answer
from millstream.source.llm.fields import TOP_K, Fields
from millstream.source.llm.model import LoadedModel
from millstream.source.llm.p_true import P_TRUE_SCHEMA, p_true
from millstream.source.llm.prompts import Prompt
from millstream.source.llm.question import Question

Record = dict[str, object]
_FLOAT16_MAX = 65504.0


@dataclass(frozen=True)
class Asked:
    """A question and its prompt in tokens."""

    question: Question
    ids: list[int]


class Tracer:
    """Asks a model questions and gives a record for each, in order; one that fails is a record that says why."""

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
        self._max_cells: int | None = None  # tokens of a batch that was too large for the memory there is

    def ask(self, questions: Sequence[Question]) -> list[Asked]:
        """Questions with their prompts as tokens."""
        ids = self.prompt.ids(self.loaded.tokenizer, [question.question for question in questions])
        return [Asked(question, tokens) for question, tokens in zip(questions, ids, strict=True)]

    def trace(self, batch: Sequence[Asked]) -> list[Record]:
        """A record for each question. A batch that memory cannot hold, or that fails, is halved to find the cause."""
        problems = [self._refusal(asked) for asked in batch]
        traced = iter(self._halving([asked for asked, problem in zip(batch, problems, strict=True) if not problem]))
        return [
            self.failed(asked, problem) if problem else next(traced)
            for asked, problem in zip(batch, problems, strict=True)
        ]

    def _refusal(self, asked: Asked) -> str | None:
        total = len(asked.ids) + self.decoding.max_new_tokens
        context = self.loaded.card.context
        if not asked.ids:
            return "the prompt has no tokens"
        if context is not None and total > context:
            new = self.decoding.max_new_tokens
            return f"prompt of {len(asked.ids)} tokens and {new} new ones exceed the model's {context}"
        if "edges" in self.fields.names and total > 32_767:
            return f"{total} tokens are more than edges can number, 32767"
        return None

    def _halving(self, batch: Sequence[Asked]) -> list[Record]:
        if not batch:
            return []
        half = len(batch) // 2
        if half and self._max_cells is not None and self._cells(batch) >= self._max_cells:
            return self._halving(batch[:half]) + self._halving(batch[half:])
        try:
            return self._trace(batch)
        except (RuntimeError, MemoryError, ValueError, IndexError) as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if is_out_of_memory(error):
                self._max_cells = min(self._max_cells or 2**62, self._cells(batch))
        # Outside of `except`, or the traceback would keep the tensors of the failed batch alive.
        self._capture.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not half:
            return [self.failed(batch[0], problem)]
        return self._halving(batch[:half]) + self._halving(batch[half:])

    def _cells(self, batch: Sequence[Asked]) -> int:
        longest = max(len(asked.ids) for asked in batch)
        return len(batch) * (longest + self.decoding.max_new_tokens)

    @torch.inference_mode()
    def _trace(self, batch: Sequence[Asked]) -> list[Record]:
        begun = time.perf_counter()
        prompt_BP, mask_BP = self._pad([asked.ids for asked in batch])
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
        extra = self._ask_itself(batch, answers)
        records: list[Record] = []
        for i, (asked, answer) in enumerate(zip(batch, answers, strict=True)):
            tokens = torch.tensor(asked.ids + answer.ids, dtype=torch.int32)
            record = {**self._about(asked), "tokens": tokens, **steps[i], **tensors[i], **extra[i]}
            record |= {
                "generated_answer": answer.text,
                "generated_text": answer.whole_text,
                "answer_len": answer.length,
                "finish": answer.finish,
                "generate_s": (after_generate - begun) / len(batch),
                "replay_s": (after_replay - after_generate) / len(batch),
            }
            problem = self._wrong_numbers(steps[i], None if largest is None else float(largest[i]))
            records.append(self.failed(asked, problem) if problem else self._in_order(record))
        return records

    def _generate(self, batch: Sequence[Asked], prompt_BP: torch.Tensor, mask_BP: torch.Tensor) -> Any:
        ids = [asked.question.id for asked in batch]
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
        """One pass over the answers; and the logits [B, V] of each step, which `generate` kept unless it had beams."""
        device = prompt_BP.device
        count, width = max(len(answer.ids) for answer in answers), prompt_BP.shape[1]
        answer_BN = torch.full((len(answers), count), self.loaded.pad)
        mask_BN = torch.zeros((len(answers), count), dtype=mask_BP.dtype)
        for i, answer in enumerate(answers):
            answer_BN[i, : len(answer.ids)] = torch.tensor(answer.ids)
            mask_BN[i, : len(answer.ids)] = 1
        ids_BT = torch.cat([prompt_BP, answer_BN.to(device)], dim=1)
        mask_BT = torch.cat([mask_BP, mask_BN.to(device)], dim=1)
        place_BT = (mask_BT.cumsum(1) - 1).clamp_min(0)
        # An answer of no tokens is looked at where its end-of-text or stop token is.
        lengths = torch.tensor([answer.length or len(answer.ids) for answer in answers])
        cache = generated.past_key_values
        cut = _cut_back(cache, width - 1, rows=len(answers))
        start = width - 1 if cut else 0
        with self._capture.replay(mask_BT, lengths, whole=not cut):
            inputs = {
                "input_ids": ids_BT[:, start:],
                "attention_mask": mask_BT,
                "position_ids": place_BT[:, start:],
                "past_key_values": cache if cut else None,
                "use_cache": cut,
            }
            if generated.logits is not None:
                self.loaded.base(**inputs)  # without the head: a fifth of the work of a small model
                return mask_BT, generated.logits
            output = self.loaded.model(**inputs, logits_to_keep=count + 1)
        return mask_BT, output.logits[:, -count - 1 : -1].unbind(1)

    def _ask_itself(self, batch: Sequence[Asked], answers: Sequence[Answer]) -> list[Record]:
        if not self._p_true:
            return [{} for _ in batch]
        pairs = [(asked.question.question, answer.text) for asked, answer in zip(batch, answers, strict=True)]
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

    def _wrong_numbers(self, steps: Record, largest: float | None) -> str | None:
        if not bool(torch.isfinite(steps["logprobs"]).all()):  # pyright: ignore[reportArgumentType]
            return "the model's logits are not finite"
        if largest is not None and not largest <= _FLOAT16_MAX:
            return f"hidden states reach {largest:.4g}, more than float16 holds: use stored=bfloat16 or stored=float32"
        return None

    def _about(self, asked: Asked) -> Record:
        question = asked.question
        return {
            "question_id": question.id,
            "question": question.question,
            "answer": question.answer,
            "aliases": list(question.aliases),
            "kind": question.kind,
            "exposure": question.exposure,
            "status": "ok",
            "prompt_len": len(asked.ids),
        }

    def failed(self, asked: Asked, problem: str) -> Record:
        """The record of a question that could not be traced."""
        return self._in_order({**self._about(asked), "status": "error", "error": problem})

    def _in_order(self, record: Record) -> Record:
        return {name: record.get(name) for name in self.schema()}

    def schema(self) -> dict[str, Any]:
        """Every field of a record and its kind."""
        scalars = {
            "question_id": "string",
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


def _cut_back(cache: Any, length: int, *, rows: int) -> bool:
    """Shorten the cache to the prompt without its last token, one row a sample; False if it cannot be."""
    if cache is None or not hasattr(cache, "crop"):
        return False
    try:
        have = cache.get_seq_length()
        if cache.layers[0].keys.shape[0] != rows:  # beams share their prompt: any of them will do
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
    """Log-probability, entropy and rank of each generated token under the model, and the most likely ones."""
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


def is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text
