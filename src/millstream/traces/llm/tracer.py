"""A batch of questions -> their traces: answers are generated or given, then replayed and captured."""

import gc
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from inspect import signature
from typing import Any

import torch

from millstream.core.console import format_bytes
from millstream.traces.llm import transformers
from millstream.traces.llm.answers import Answer, cut_answer, given_answer
from millstream.traces.llm.capture import Capture, Padded
from millstream.traces.llm.decoding import Decoding, Steps, as_lists
from millstream.traces.llm.fields import Fields, Need, plan_batches, repeated
from millstream.traces.llm.model import LoadedModel, Tokenizer
from millstream.traces.llm.passes import Passes
from millstream.traces.llm.prompts import EncodedQuestion, Prompt
from millstream.traces.llm.questions import Given, Question

# B batch, P prompt with padding, N generated, T = P + N, V vocabulary

P_TRUE_SCHEMA = {"p_true": "float32", "p_true_a": "float32", "p_true_b": "float32"}
_P_TRUE_PROMPT = """Question: {question}
Proposed answer: {answer}
Is the proposed answer:
 (A) {first}
 (B) {second}
The proposed answer is: ("""
Record = dict[str, object]
_FLOAT16_MAX = 65504.0


class Tracer:
    """Runs a model on questions and returns their records, in order; a failure becomes a record with its reason."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        fields: Fields,
        decoding: Decoding,
        prompt: Prompt,
        memory: int = 2_000_000_000,
        p_true: bool = False,
        trace_samples: bool = False,
    ) -> None:
        self.loaded = loaded
        self.decoding = decoding
        self.prompt = prompt
        self.fields = fields
        self._memory = memory  # of a batch
        self._p_true = p_true
        self._trace_samples = trace_samples  # or keep their tokens and log-probabilities only
        self._capture = Capture(loaded.base, loaded.layers, fields, loaded.card.size)
        self._passes = Passes(loaded, self._capture)
        self._config = decoding.config(eos=sorted(loaded.eos) or None, pad=loaded.pad)
        # Else `generate` would compute the logits of whole prompts.
        self._keeps_few_logits = "logits_to_keep" in signature(loaded.model.forward).parameters
        self._max_cells: int | None = None  # tokens of the smallest batch that ran out of memory

    def encode(self, questions: Sequence[Question]) -> list[EncodedQuestion]:
        """The questions with their prompts and given answers as token ids."""
        context, new = self.loaded.card.context, self.decoding.max_new_tokens
        return self.prompt.encode(self.loaded.tokenizer, questions, context=context, new=new)

    def split(self, encoded: Sequence[EncodedQuestion]) -> list[list[EncodedQuestion]]:
        """Questions with given answers in batches that fit into memory."""
        need = self._need(generated=False)
        plan = plan_batches([self.length(one) for one in encoded], need=need, memory=self._memory)
        return [[encoded[place] for place in places] for places in plan]

    def trace(self, batch: Sequence[EncodedQuestion]) -> list[Record]:
        """The records of each question. A batch that fails or runs out of memory is halved to isolate the cause."""
        problems = [self._problem(encoded) for encoded in batch]
        records = [self._all_failed(encoded, problem or "") for encoded, problem in zip(batch, problems, strict=True)]
        for is_given in (False, True):
            places = [
                place
                for place, (encoded, problem) in enumerate(zip(batch, problems, strict=True))
                if problem is None and (encoded.answer_ids is not None) == is_given
            ]
            for place, found in zip(places, self._halving([batch[place] for place in places]), strict=True):
                records[place] = found
        return [record for found in records for record in found]

    def _problem(self, encoded: EncodedQuestion) -> str | None:
        """Why a question cannot be traced."""
        prompt, answer = self.length(encoded)
        total, context = prompt + answer, self.loaded.card.context
        if not prompt:
            return "the prompt has no tokens"
        if not answer:
            return "the given answer has no tokens"
        largest, known = max((*encoded.ids, *(encoded.answer_ids or ()))), self.loaded.card.size.vocab
        if largest >= known:  # on a GPU, looking it up would end the process
            return f"the given token {largest} is of another model: this one has {known}"
        if context is not None and total > context:
            new = "new tokens" if encoded.answer_ids is None else "of the answer"
            return f"a prompt of {prompt} tokens and {answer} {new} exceed the context of {context} tokens"
        if total > self.fields.longest:
            return f"{total} tokens exceed the maximum of {self.fields.longest} for edges"
        if (needed := self._bytes([encoded])) > self._memory:
            return (
                f"{total} tokens need about {format_bytes(needed)}, more than memory={format_bytes(self._memory)}: "
                "allow more, or keep fewer fields"
            )
        return None

    def length(self, encoded: EncodedQuestion) -> tuple[int, int]:
        """Tokens of the prompt and, at most, of the answer."""
        given = encoded.answer_ids
        return len(encoded.ids), self.decoding.max_new_tokens if given is None else len(given)

    def _need(self, *, generated: bool) -> Need:
        rows = self.decoding.rows if generated else 1
        return Need(self.loaded.card.size, self.fields, rows=rows, generated=generated, whole=not self._passes.can_cut)

    def _bytes(self, batch: Sequence[EncodedQuestion]) -> int:
        """Memory that a batch needs."""
        prompts, answers = zip(*map(self.length, batch), strict=True)
        need = self._need(generated=batch[0].answer_ids is None)
        return len(batch) * need.bytes(max(prompts), max(answers), memory=self._memory)

    def _halving(self, batch: Sequence[EncodedQuestion]) -> list[list[Record]]:
        if not batch:
            return []
        half = len(batch) // 2
        has_failed = self._max_cells is not None and self._cells(batch) >= self._max_cells
        if half and (has_failed or self._bytes(batch) > self._memory):
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
            return [self._all_failed(batch[0], problem)]
        return self._halving(batch[:half]) + self._halving(batch[half:])

    def _cells(self, batch: Sequence[EncodedQuestion]) -> int:
        prompts, answers = zip(*map(self.length, batch), strict=True)
        return len(batch) * (max(prompts) + max(answers))

    @torch.inference_mode()
    def _trace(self, batch: Sequence[EncodedQuestion]) -> list[list[Record]]:
        """The records of each question. Either all answers are given, or none are."""
        begun = time.perf_counter()
        self._capture.clear()
        is_given = batch[0].answer_ids is not None
        prompts = self.loaded.padded([encoded.ids for encoded in batch])
        total = prompts.prompt + max(self.length(encoded)[1] for encoded in batch)
        chunk = self._need(generated=not is_given).chunk(total, memory=self._memory)
        cache = self._passes.new_cache()
        steps: list[dict[str, torch.Tensor]] | None = None
        if is_given:
            targets, answers, done = batch, self._given(batch), 0
            traced = list(range(len(batch)))
        else:
            targets = [one for encoded in batch for one in self.samples(encoded)]
            answers, steps, captured = self._generate(targets, prompts, cache, chunk)
            traced = [row for row, one in enumerate(targets) if self._trace_samples or not one.question.sample]
            done = self._cut_back(cache, captured, traced, of=len(targets))
        after_generate = time.perf_counter()
        if any(answer.begin for answer in answers):  # reasoning is what comes before the answer, as the question is
            self._capture.clear()
            cache, done = self._passes.new_cache(), 0
            prompts = self.loaded.padded([targets[row].ids + answers[row].ids[: answers[row].begin] for row in traced])
        replayed = self._with_answers(prompts, [answers[row] for row in traced])
        states_BND = self._passes.replay(replayed, cache=cache, done=done, chunk=chunk)
        del cache
        if steps is None:
            steps = self._passes.statistics(states_BND, [answer.ids[answer.begin :] for answer in answers])
        largest = self._capture.largest_B
        found = {row: dict[str, object](one) for row, one in zip(traced, self._capture.traces(replayed), strict=True)}
        after_replay = time.perf_counter()
        pairs = [(targets[row], answers[row]) for row in traced]
        for row, more in zip(traced, self._p_true_fields(pairs), strict=True):
            found[row] |= {**more, "replay_s": (after_replay - after_generate) / len(traced)}
        records: list[Record] = []
        for row, (target, answer) in enumerate(zip(targets, answers, strict=True)):
            record = {**self._about(target), **_answer_fields(target, answer), **found.get(row, {})}
            record |= {name: values[-len(answer.ids) + answer.begin :] for name, values in steps[row].items()}
            if answer.begin and len(logprobs := steps[row]["logprobs"]) == len(answer.ids):
                record["thinking_logprobs"] = logprobs[: answer.begin]
            record["generate_s"] = (after_generate - begun) / len(targets)
            high = None if largest is None or row not in found else float(largest[traced.index(row)])
            problem = self._numeric_problem(steps[row], high)
            records.append(self.failed(target, problem) if problem else self._in_order(record))
        each = len(targets) // len(batch)
        return [records[first : first + each] for first in range(0, len(records), each)]

    def samples(self, encoded: EncodedQuestion) -> list[EncodedQuestion]:
        """The answers to generate to a question: the greedy one and samples, or one."""
        return [
            replace(encoded, question=replace(encoded.question, sample=sample))
            for sample in range(1 + self.decoding.samples)
        ]

    def _given(self, batch: Sequence[EncodedQuestion]) -> list[Answer]:
        tokenizer, eos, part = self.loaded.tokenizer, self.loaded.eos, self.prompt.part
        return [
            given_answer(tokenizer, one.question.given or Given(), one.answer_ids or [], eos=eos, part=part)
            for one in batch
        ]

    def _cut_back(self, cache: Any, length: int, traced: Sequence[int], *, of: int) -> int:
        """Truncate a cache to the rows to replay and the first `length` columns; returns its length."""
        if cache is None:
            return 0
        rows = len(cache.layers[0].keys) // of  # beams share their prompt: keep one of them
        if len(traced) < of or rows > 1:
            device = cache.layers[0].keys.device
            cache.batch_select_indices(torch.tensor([row * rows for row in traced], device=device))
        if excess := cache.get_seq_length() - length:
            cache.crop(-excess)  # negative: how many tokens to remove
        return length

    def _generate(
        self, targets: Sequence[EncodedQuestion], prompts: Padded, cache: Any, chunk: int
    ) -> tuple[list[Answer], list[dict[str, torch.Tensor]] | None, int]:
        """The answers and, without beams, the statistics of their tokens; and how much of the prompts needs no replay.

        `generate` does the last chunk of the prompts itself, in one pass that is captured: a step less. But several
        answers to a prompt share all of it except the last token.
        """
        done = prompts.prompt - 1
        first_pass = nullcontext()
        if cache is not None:
            alone = self.decoding.rows == 1 and self._keeps_few_logits
            begun = done // chunk * chunk if alone else done
            self._passes.prefill(prompts, begun, cache=cache, chunk=chunk)
            if self.decoding.rows > 1:
                cache.batch_repeat_interleave(self.decoding.rows)
            if alone and self.fields.need_prompt:
                done = prompts.prompt
                # Only the last prompt token is in a position of `states` that is known now.
                whole = replace(prompts, answers=[1] * len(targets), thinking=[0] * len(targets))
                first_pass = self._capture.over(whole, begun, done, once=True)
        copies = 1 + self.decoding.samples
        steps = Steps() if self.decoding.num_beams == 1 else None
        greedy = self.decoding.samples > 0
        names = [None if greedy and not one.question.sample else one.question.record_id for one in targets]
        processors = [steps] if steps is not None else []
        processors += self.decoding.processors(names, prompts.ids_BT.device)
        with first_pass:
            generated = self.loaded.model.generate(
                input_ids=prompts.ids_BT.repeat_interleave(copies, 0),
                attention_mask=prompts.mask_BT.repeat_interleave(copies, 0),
                past_key_values=cache,
                generation_config=self._config,
                logits_processor=transformers().LogitsProcessorList(processors),
                stopping_criteria=self.decoding.stopping(self.loaded.tokenizer, prompts.prompt),
            )
        ids_BN = generated.sequences[:, prompts.prompt :]
        tokenizer, eos, stop = self.loaded.tokenizer, self.loaded.eos, self.decoding.stop
        part = self.prompt.part
        answers = [cut_answer(tokenizer, row, eos=eos, stop=stop, part=part) for row in as_lists(ids_BN)]
        if steps is None:
            return answers, None, done
        both = zip(steps.of_rows(ids_BN), answers, strict=True)
        found = [{name: values[: len(answer.ids)] for name, values in row.items()} for row, answer in both]
        return answers, found, done

    def _with_answers(self, prompts: Padded, answers: Sequence[Answer]) -> Padded:
        """Prompts and answers, padded on the right; of samples, the prompt is repeated."""
        device, parts = prompts.ids_BT.device, [answer.ids[answer.begin :] for answer in answers]
        width = max(map(len, parts))
        rows = [part + [self.loaded.pad] * (width - len(part)) for part in parts]
        masks = [[1] * len(part) + [0] * (width - len(part)) for part in parts]
        return Padded(
            torch.cat([repeated(prompts.ids_BT, len(rows)), torch.tensor(rows, device=device)], dim=1),
            torch.cat([repeated(prompts.mask_BT, len(rows)), torch.tensor(masks, device=device)], dim=1),
            prompts.prompt,
            answers=[answer.length or len(part) for answer, part in zip(answers, parts, strict=True)],
            thinking=[answer.begin for answer in answers],
        )

    def _p_true_fields(self, pairs: Sequence[tuple[EncodedQuestion, Answer]]) -> list[Record]:
        if not self._p_true:
            return [{} for _ in pairs]
        texts = [(encoded.question.question, answer.text) for encoded, answer in pairs]
        return p_true(self.loaded, texts)

    def _numeric_problem(self, steps: dict[str, torch.Tensor], largest: float | None) -> str | None:
        if not bool(torch.isfinite(steps["logprobs"]).all()):
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
            "context": None if question.sample and encoded.answer_ids is None else question.context,
            "context_cut": encoded.cut if question.context is not None else None,
            "answer": question.answer,
            "aliases": list(question.aliases),
            "kind": question.kind,
            "exposure": question.exposure,
            "about": question.about,
            "given_verdict": question.verdict,
            "spans": None if question.spans is None else json.dumps([asdict(span) for span in question.spans]),
            "status": "ok",
            "prompt_len": len(encoded.ids),
        }

    def failed(self, encoded: EncodedQuestion, problem: str) -> Record:
        """The record of an answer that could not be traced."""
        return self._in_order({**self._about(encoded), "status": "error", "error": problem})

    def _all_failed(self, encoded: EncodedQuestion, problem: str) -> list[Record]:
        """The records of all answers to a question."""
        answers = self.samples(encoded) if encoded.answer_ids is None else [encoded]
        return [self.failed(answer, problem) for answer in answers]

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
            "context": "string",
            "context_cut": "int32",
            "answer": "string",
            "aliases": "list<string>",
            "kind": "string",
            "exposure": "string",
            "about": "string",
            "given_verdict": "string",
            "spans": "string",
            "status": "string",
            "error": "string",
            "generated_answer": "string",
            "generated_text": "string",
            "finish": "string",
            "prompt_len": "int32",
            "thinking_len": "int32",
            "answer_len": "int32",
            "generate_s": "float32",
            "replay_s": "float32",
        }
        return {**scalars, **(P_TRUE_SCHEMA if self._p_true else {}), **self.fields.schema()}


def p_true(loaded: LoadedModel, pairs: Sequence[tuple[str, str]]) -> list[dict[str, object]]:
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
    choices = iter(_probability_of_a(loaded, loaded.padded(rows)) if rows else [])
    found: list[dict[str, object]] = []
    for fit in fits:
        a, b = (next(choices), 1 - next(choices)) if fit else (None, None)
        found.append({"p_true": None if a is None or b is None else (a + b) / 2, "p_true_a": a, "p_true_b": b})
    return found


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text


def _probability_of_a(loaded: LoadedModel, prompts: Padded) -> list[float]:
    """The probability of A, given that the answer is A or B."""
    positions = (prompts.mask_BT.cumsum(1) - 1).clamp_min(0)
    logits_BV = loaded.model(
        input_ids=prompts.ids_BT,
        attention_mask=prompts.mask_BT,
        position_ids=positions,
        use_cache=False,
        logits_to_keep=1,
    ).logits[:, -1]
    logprobs = logits_BV.float().log_softmax(-1)
    first, second = (logprobs[:, _letter_ids(loaded.tokenizer, letter)].logsumexp(-1) for letter in "AB")
    return [float(chosen) for chosen in torch.sigmoid(first - second)]


def _letter_ids(tokenizer: Tokenizer, letter: str) -> list[int]:
    """The tokens of this letter, with and without a space before it."""
    return sorted({ids[-1] for ids in tokenizer([letter, f" {letter}"], add_special_tokens=False)["input_ids"]})


def _answer_fields(encoded: EncodedQuestion, answer: Answer) -> Record:
    given = encoded.question.given
    offsets = None if answer.offsets is None else answer.offsets[answer.begin :]
    return {
        "tokens": torch.tensor(encoded.ids + answer.ids, dtype=torch.int32),
        "offsets": None if offsets is None else torch.tensor(offsets, dtype=torch.int32).reshape(-1, 2),
        "given_logprobs": None
        if given is None or given.logprobs is None
        else torch.tensor(given.logprobs[answer.begin :]),
        "generated_answer": answer.text,
        "generated_text": answer.whole_text,
        "thinking_len": answer.begin,
        "prompt_len": len(encoded.ids) + answer.begin,  # all that comes before the answer
        "answer_len": answer.length,
        "finish": answer.finish,
    }
