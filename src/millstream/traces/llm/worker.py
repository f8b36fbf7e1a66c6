"""A process of `extract`: its model traces batches of questions and appends their records to a store."""

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from millstream.core.config import parse_bytes
from millstream.core.console import MEMORY_S, ignore_message
from millstream.core.memory import Allowance
from millstream.errors import BadSetting, BadSource
from millstream.traces.kind import ExtractSettings
from millstream.traces.llm.answers import Part
from millstream.traces.llm.decoding import Decoding
from millstream.traces.llm.endpoint import Endpoint, Request
from millstream.traces.llm.fields import Fields, parse_fields
from millstream.traces.llm.model import ModelCard, ModelSettings, describe_model, load_model
from millstream.traces.llm.prompts import Prompt, built_in_prompts, make_prompt
from millstream.traces.llm.questions import Given, Question
from millstream.traces.llm.tracer import Record, Tracer
from millstream.traces.store.jobs import JobWriter

FRAMING = 200  # bytes of a store per field and record, measured


@dataclass(frozen=True)
class Batch:
    """Questions traced together; `skip` has the ids of records already in the store."""

    questions: list[Question]
    skip: frozenset[str] = frozenset()
    too_long: bool = False  # every prompt exceeds the context of the model


@dataclass(frozen=True)
class Difference:
    """How far given log-probabilities are from those of the model that replays the answers."""

    tokens: int = 0
    total: float = 0.0
    largest: float = 0.0

    def __add__(self, other: "Difference") -> "Difference":
        return Difference(self.tokens + other.tokens, self.total + other.total, max(self.largest, other.largest))

    def __str__(self) -> str:
        mean = self.total / self.tokens
        return (
            f"given log-probs differ by {mean:.2g} on average, at most {self.largest:.2g}, over {self.tokens:,} tokens"
        )


@dataclass(frozen=True)
class Traced:
    """Counts, sizes and times of a traced batch."""

    records: int
    errors: int
    prompt_tokens: int
    new_tokens: int
    bytes: int
    seconds: float
    difference: Difference
    worker: tuple[str, int]  # host and process
    worker_bytes: int
    worker_budget: int
    shard: int | None


class ExtractWorker:
    """A model and a writer: traces batches and appends their records."""

    def __init__(self, path: Path, settings: ExtractSettings, prompt: Prompt, job: str) -> None:
        card = describe_model(model_settings(settings), notify=ignore_message)
        self._settings = settings
        self._endpoint = make_endpoint(settings)
        self.tracer = make_tracer(settings, card, prompt)
        self._writer = JobWriter(
            path,
            job=job,
            config=store_config(settings, card, prompt),
            schema=self.tracer.schema(),
            shard_bytes=settings.shard_bytes,
            shard_records=settings.shard_records,
        )
        self._allowance = Allowance(settings.memory)  # the model is already loaded
        self._usage, self._measured = self._allowance.usage(), time.monotonic()

    def do(self, batch: Batch) -> Traced:
        begun = time.perf_counter()
        records = self._trace(batch)
        failed = all(record["status"] == "error" for record in records)
        if failed and not len(self._writer) and not batch.too_long:
            raise BadSource(f"none of the first {len(records)} questions could be traced: {records[0]['error']}")
        new = [record for record in records if record["record_id"] not in batch.skip]
        for record in new:
            self._writer.append(record)
        if time.monotonic() - self._measured > MEMORY_S:
            self._usage, self._measured = self._allowance.usage(), time.monotonic()
        good = [record for record in new if record["status"] == "ok"]
        return Traced(
            records=len(new),
            errors=len(new) - len(good),
            prompt_tokens=sum(_count(record["prompt_len"]) for record in good),
            new_tokens=sum(len(_tensor(record["logprobs"])) for record in good),
            bytes=sum(getattr(value, "nbytes", 0) + FRAMING for record in new for value in record.values()),
            seconds=time.perf_counter() - begun,
            difference=sum(map(_difference, good), Difference()),
            worker=(socket.gethostname(), os.getpid()),
            worker_bytes=self._usage[0],
            worker_budget=self._usage[1],
            shard=self._writer.shard_number,
        )

    def _trace(self, batch: Batch) -> list[Record]:
        if self._endpoint is None:
            return self.tracer.trace(self.tracer.encode(batch.questions))
        questions = [question for question in batch.questions if question.given is not None]
        asked = [question for question in batch.questions if question.given is None]
        answered, refused = self._answers(self._endpoint, asked) if asked else ([], [])
        records = self.tracer.trace(self.tracer.encode([*questions, *answered])) if questions or answered else []
        return [*records, *refused]

    def _answers(self, endpoint: Endpoint, questions: Sequence[Question]) -> tuple[list[Question], list[Record]]:
        """The questions with each answer of the server, and records of those that it refuses.

        It gets the token ids of the prompt, so that it sees the tokens that are replayed; a server that takes none gets
        the text.
        """
        settings, tracer = self._settings, self.tracer
        encoded = [answer for one in tracer.encode(questions) for answer in tracer.samples(one)]

        def request(number: int, prompt: str | list[int]) -> Request:
            greedy = settings.samples > 0 and not encoded[number].question.sample
            return Request(
                id=number,
                prompt=prompt,
                max_tokens=settings.max_new_tokens,
                temperature=0.0 if greedy else settings.temperature,
                top_p=None if greedy else settings.top_p,
                top_k=None if greedy else settings.top_k,
                stop=tracer.prompt.stop,
                seed=settings.seed + encoded[number].question.sample,
                logprobs=True,
                token_ids=True,
            )

        found = {
            answer.id: answer for answer in endpoint.complete(request(n, one.ids) for n, one in enumerate(encoded))
        }
        texts = [tracer.prompt.text_of(tracer.loaded.tokenizer, one.question) for one in encoded]
        again = [request(n, text[0]) for n, text in enumerate(texts) if found[n].error and text is not None]
        found |= {answer.id: answer for answer in endpoint.complete(again)}
        answered: list[Question] = []
        refused: list[Record] = []
        for number, one in enumerate(encoded):
            answer = found[number]
            if answer.error or not answer.choices:
                refused.append(tracer.failed(one, answer.error or "the server gave no answer"))
                continue
            choice, text = answer.choices[0], texts[number]
            given = Given(
                text=choice.text,
                ids=choice.ids,
                prompt_ids=tuple(one.ids) if choice.ids is not None else None,
                logprobs=choice.logprobs if choice.ids is not None else None,
                finish=choice.finish,
            )
            prompt = text[0] if text is not None else None  # as it is: no space before the answer
            answered.append(replace(one.question, given=given, prompt=prompt))
        return answered, refused

    def close(self) -> None:
        self._writer.close()


def model_settings(settings: ExtractSettings) -> ModelSettings:
    if not settings.model:
        raise BadSetting("model= is missing: a name on the Hugging Face hub, a folder, facts or smollm2")
    return ModelSettings(
        model=settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        device=settings.device,
        device_map=settings.device_map,
        quantize=settings.quantize,
        trust_remote_code=settings.trust_remote_code,
    )


def make_tracer(settings: ExtractSettings, card: ModelCard, prompt: Prompt) -> Tracer:
    return Tracer(
        load_model(model_settings(settings), card),
        fields=kept_fields(settings),
        decoding=decoding(settings, prompt),
        prompt=prompt,
        memory=parse_bytes(settings.memory),
        p_true=settings.p_true,
        trace_samples=settings.sample_fields == "all",
    )


def make_endpoint(settings: ExtractSettings) -> Endpoint | None:
    if settings.endpoint is None:
        return None
    if settings.num_beams > 1:
        raise BadSetting(
            f"num_beams={settings.num_beams}: has no effect with endpoint=, which chooses the tokens itself"
        )
    return Endpoint(
        settings.endpoint, settings.endpoint_model, key_env=settings.key_env, concurrency=settings.concurrency
    )


def kept_fields(settings: ExtractSettings) -> Fields:
    if settings.sample_fields not in ("logprobs", "all"):
        raise BadSetting(f"sample_fields={settings.sample_fields}: must be one of logprobs, all")
    thinking = settings.answer_after is not None
    return parse_fields(settings.tier, settings.fields, stored=settings.stored, thinking=thinking)


def prompt_for(questions: Sequence[Question], settings: ExtractSettings, card: ModelCard) -> Prompt:
    has_own = settings.prompt == "auto" and settings.model in built_in_prompts()
    return make_prompt(
        settings.model if has_own else settings.prompt,
        card.tokenizer,
        stop=settings.stop,
        context=any(question.context is not None for question in questions),
        system=settings.system,
        part=Part(after=settings.answer_after, end=settings.answer_end),
        truncate=settings.truncate,
    )


def decoding(settings: ExtractSettings, prompt: Prompt) -> Decoding:
    return Decoding(
        max_new_tokens=settings.max_new_tokens,
        num_beams=settings.num_beams,
        samples=settings.samples,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        seed=settings.seed,
        stop=prompt.stop,
    )


def store_config(settings: ExtractSettings, card: ModelCard, prompt: Prompt) -> dict[str, object]:
    """The settings that determine the content of a trace; they must not change on resume."""
    kept = kept_fields(settings)
    fields = [
        f"{name}[{','.join(map(str, layers))}]" if (layers := kept.layers.get(name)) else name for name in kept.names
    ]
    return {
        "model": settings.model,
        "revision": card.revision,
        "dtype": card.dtype,
        "quantize": settings.quantize,
        "fields": ",".join(fields),
        "stored": settings.stored,
        "max_new_tokens": settings.max_new_tokens,
        "num_beams": settings.num_beams,
        "samples": settings.samples,
        "sample_fields": settings.sample_fields if settings.samples else None,
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "seed": settings.seed if settings.temperature else None,
        "generated_by": settings.endpoint_model if settings.endpoint else None,
        "prompt": prompt.text,
        "system": prompt.system,
        "stop": list(prompt.stop),
        "answer_after": settings.answer_after,
        "answer_end": settings.answer_end,
        "truncate": settings.truncate,
        "p_true": settings.p_true,
    }


def _difference(record: Record) -> Difference:
    given = record["given_logprobs"]
    if given is None or len(_tensor(given)) != len(_tensor(record["logprobs"])):
        return Difference()
    apart = (_tensor(given) - _tensor(record["logprobs"])).abs().nan_to_num_()
    return Difference(len(apart), float(apart.sum()), float(apart.max()))


def _tensor(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value


def _count(value: object) -> int:
    assert isinstance(value, int)
    return value
