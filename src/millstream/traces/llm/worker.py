"""A process of `extract`: its model traces batches of questions and appends their records to a store."""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from millstream.core.config import parse_bytes
from millstream.core.console import MEMORY_S, ignore_message, plural
from millstream.core.memory import Allowance
from millstream.errors import BadSetting, BadSource
from millstream.traces.kind import ExtractSettings
from millstream.traces.llm.answers import Part
from millstream.traces.llm.decoding import Decoding
from millstream.traces.llm.endpoint import Endpoint, Request
from millstream.traces.llm.fields import Fields, parse_fields
from millstream.traces.llm.model import ModelCard, ModelSettings, describe_model, load_model
from millstream.traces.llm.prompts import EncodedQuestion, Prompt, built_in_prompts, make_prompt
from millstream.traces.llm.questions import Given, Question
from millstream.traces.llm.tracer import Record, Tracer
from millstream.traces.store.jobs import JobWriter

FRAMING = 200  # bytes of a store per field and record, measured


@dataclass(frozen=True)
class Batch:
    """Questions traced together; `skip` has the ids of records already in the store."""

    questions: list[Question]
    skip: frozenset[str] = frozenset()
    too_long: bool = False  # every one exceeds the context of the model, or the memory


@dataclass(frozen=True)
class Difference:
    """How far given log-probabilities are from those of the model that replays the answers."""

    tokens: int = 0
    total: float = 0.0
    largest: float = 0.0
    others: int = 0  # answers whose text has another number of tokens here

    def __add__(self, other: "Difference") -> "Difference":
        return Difference(
            self.tokens + other.tokens,
            self.total + other.total,
            max(self.largest, other.largest),
            self.others + other.others,
        )

    def __str__(self) -> str:
        mean = self.total / self.tokens
        return (
            f"given log-probs differ by {mean:.2g} on average, at most {self.largest:.2g}, over {self.tokens:,} tokens"
        )

    def notes(self) -> list[str]:
        """What a user should know in the end."""
        others = (
            f"given log-probs of {plural(self.others, 'answer')} not compared: the text has another number of tokens "
            "here. Also give token_ids"
        )
        return [*([str(self)] if self.tokens else []), *([others] if self.others else [])]


@dataclass(frozen=True)
class Counts:
    """What records were made, and their size."""

    records: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    bytes: int = 0
    difference: Difference = Difference()

    @staticmethod
    def of(record: Record) -> "Counts":
        size = sum(getattr(value, "nbytes", 0) + FRAMING for value in record.values())
        if record["status"] != "ok":
            return Counts(records=1, errors=1, bytes=size)
        new_tokens = len(_tensor(record["logprobs"]))
        return Counts(1, 0, _count(record["prompt_len"]), new_tokens, size, _difference(record))

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.records + other.records,
            self.errors + other.errors,
            self.prompt_tokens + other.prompt_tokens,
            self.new_tokens + other.new_tokens,
            self.bytes + other.bytes,
            self.difference + other.difference,
        )


@dataclass(frozen=True)
class Traced:
    """A traced batch: what was made, by which worker."""

    counts: Counts
    seconds: float
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
        made = Counts()
        failed: list[Record] = []  # kept back until one is good: if all of the first batch fail, nothing is written
        may_fail = len(self._writer) > 0 or batch.too_long
        for records in self._trace(batch):
            may_fail = may_fail or any(record["status"] == "ok" for record in records)
            failed += records
            if may_fail:
                for record in failed:
                    if record["record_id"] not in batch.skip:
                        self._writer.append(record)
                        made += Counts.of(record)
                failed = []
        if failed:
            raise BadSource(f"none of the first {len(failed)} questions could be traced: {failed[0]['error']}")
        if time.monotonic() - self._measured > MEMORY_S:
            self._usage, self._measured = self._allowance.usage(), time.monotonic()
        return Traced(
            counts=made,
            seconds=time.perf_counter() - begun,
            worker=(socket.gethostname(), os.getpid()),
            worker_bytes=self._usage[0],
            worker_budget=self._usage[1],
            shard=self._writer.shard_number,
        )

    def _trace(self, batch: Batch) -> Iterator[list[Record]]:
        """The records of a batch. What a server is asked for at once may be replayed in several passes."""
        tracer = self.tracer
        if self._endpoint is None:
            yield tracer.trace(tracer.encode(batch.questions))
            return
        given = [one for one in batch.questions if one.given is not None and one.record_id not in batch.skip]
        answered, refused = self._answers(self._endpoint, batch)
        for part in tracer.split([*tracer.encode(given), *answered]):
            yield tracer.trace(part)
        if refused:
            yield refused

    def _answers(self, endpoint: Endpoint, batch: Batch) -> tuple[list[EncodedQuestion], list[Record]]:
        """The questions with each answer of the server, and records of those that it refuses.

        It gets the token ids of the prompt, so that it sees the tokens that are replayed; a server that takes none gets
        the text. What is in the store is not asked again.
        """
        settings, tracer = self._settings, self.tracer
        questions = tracer.encode([question for question in batch.questions if question.given is None])
        samples = [sample for one in questions for sample in tracer.samples(one)]
        encoded = [one for one in samples if one.question.record_id not in batch.skip]

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
        answered: list[tuple[Question, int]] = []
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
            answered.append((replace(one.question, given=given, prompt=prompt), one.cut))
        made = tracer.encode([question for question, _ in answered])
        return [replace(one, cut=cut) for one, (_, cut) in zip(made, answered, strict=True)], refused

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
    if given is None:
        return Difference()
    if len(_tensor(given)) != len(_tensor(record["logprobs"])):
        return Difference(others=1)
    apart = (_tensor(given) - _tensor(record["logprobs"])).abs()
    apart = apart[apart.isfinite()]  # a token that was ruled out has -inf
    return Difference(len(apart), float(apart.sum()), float(apart.max())) if len(apart) else Difference()


def _tensor(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value


def _count(value: object) -> int:
    assert isinstance(value, int)
    return value
