"""`extract`: questions and a language model -> a trace store. Run again to resume."""

import os
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from millstream.core.config import parse_bytes, read_settings
from millstream.core.console import (
    MEMORY_S,
    format_bytes,
    format_seconds,
    ignore_message,
    interruptible,
    plural,
    progress,
    say,
)
from millstream.core.engine import Engine
from millstream.core.files import publish
from millstream.core.memory import Allowance
from millstream.core.remote import is_url, to_path
from millstream.errors import BadSetting, BadSource, ConfigMismatch, EngineError, StoreFull
from millstream.traces.kind import ExtractSettings
from millstream.traces.llm.fields import Fields, parse_fields, plan_batches
from millstream.traces.llm.model import Decoding, ModelCard, ModelSettings, describe_model, load_model
from millstream.traces.llm.prompts import Prompt, built_in_prompts, make_prompt
from millstream.traces.llm.questions import Question, read_questions
from millstream.traces.llm.tracer import EncodedQuestion, Tracer
from millstream.traces.store.format import RECORD_ID
from millstream.traces.store.jobs import JobWriter, done_records, new_job, prepare_store, upload_left
from millstream.traces.store.locks import only_job
from millstream.traces.store.manifest import TOKENIZER
from millstream.traces.store.rewrite import drop_records
from millstream.traces.store.traces import Traces

FREE_SHARE = 0.98  # fraction of the free disk space that may be filled


@dataclass(frozen=True)
class Extracted:
    """What the store contains; `interrupted` if some questions are left."""

    path: Path
    records: int
    errors: int
    bytes: int
    interrupted: bool = False


def extract(
    questions: str | Path | Sequence[Question],
    path: str | Path,
    *,
    shuffle_seed: int | None = None,
    retry_errors: bool = False,
    engine: Engine | str = "local",
    **settings: object,
) -> Extracted:
    """Run a causal language model on every question and write the traces to the store at `path`.

    For the settings see `ExtractSettings`. Questions already in the store are skipped; Ctrl-C stops after the current
    batch; a question that fails becomes a record with `status="error"`, which `retry_errors` runs again.

    >>> done = ms.extract("triviaqa.jsonl", "traces/", model="Qwen/Qwen3-4B", tier="probe", max_new_tokens=64)
    """
    chosen = read_settings(ExtractSettings, settings)
    run = _Run(questions, to_path(path), chosen, shuffle_seed, engine if isinstance(engine, Engine) else Engine(engine))
    with only_job(run.path):
        run.prepare(retry_errors=retry_errors)
        return run.work()


@dataclass(frozen=True)
class Batch:
    """Questions traced together; `skip` has the ids already in the store."""

    questions: list[EncodedQuestion]
    skip: frozenset[str] = frozenset()
    too_long: bool = False  # every prompt exceeds the context of the model


@dataclass(frozen=True)
class Traced:
    """Counts, sizes and times of a traced batch."""

    records: int
    errors: int
    prompt_tokens: int
    new_tokens: int
    bytes: int
    seconds: float
    worker: tuple[str, int]  # host and process
    worker_bytes: int
    worker_budget: int
    shard: int | None


class ExtractWorker:
    """A model and a writer: traces batches and appends their records."""

    def __init__(self, path: Path, settings: ExtractSettings, job: str) -> None:
        card = describe_model(model_settings(settings), notify=ignore_message)
        prompt = make_prompt(settings.prompt, card.tokenizer, stop=settings.stop)
        self._tracer = Tracer(
            load_model(model_settings(settings), card),
            fields=kept_fields(settings),
            decoding=decoding(settings, prompt),
            prompt=prompt,
            p_true=settings.p_true,
        )
        self._writer = JobWriter(
            path,
            job=job,
            config=store_config(settings, card, prompt),
            schema=self._tracer.schema(),
            shard_bytes=settings.shard_bytes,
            shard_records=settings.shard_records,
        )
        self._allowance = Allowance(settings.memory)  # the model is already loaded
        self._usage, self._measured = self._allowance.usage(), time.monotonic()

    def do(self, batch: Batch) -> Traced:
        begun = time.perf_counter()
        records = self._tracer.trace(batch.questions)
        failed = all(record["status"] == "error" for record in records)
        if failed and not len(self._writer) and not batch.too_long:
            raise BadSource(f"none of the first {len(records)} questions could be traced: {records[0]['error']}")
        new = [record for record in records if record["record_id"] not in batch.skip]
        for record in new:
            self._writer.append(record)
        if time.monotonic() - self._measured > MEMORY_S:
            self._usage, self._measured = self._allowance.usage(), time.monotonic()
        return Traced(
            records=len(new),
            errors=sum(record["status"] == "error" for record in new),
            prompt_tokens=sum(_count(record["prompt_len"]) for record in new if record["status"] == "ok"),
            new_tokens=sum(len(record["logprobs"]) for record in new if record["status"] == "ok"),  # pyright: ignore
            bytes=sum(getattr(value, "nbytes", 0) for record in new for value in record.values()),
            seconds=time.perf_counter() - begun,
            worker=(socket.gethostname(), os.getpid()),
            worker_bytes=self._usage[0],
            worker_budget=self._usage[1],
            shard=self._writer.shard_number,
        )

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


def kept_fields(settings: ExtractSettings) -> Fields:
    return parse_fields(settings.tier, settings.fields, stored=settings.stored)


def decoding(settings: ExtractSettings, prompt: Prompt) -> Decoding:
    return Decoding(
        max_new_tokens=settings.max_new_tokens,
        num_beams=settings.num_beams,
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
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "seed": settings.seed if settings.temperature else None,
        "prompt": prompt.text,
        "stop": list(prompt.stop),
        "p_true": settings.p_true,
    }


class _Run:
    """One run of `extract`: its questions, and which of them are done."""

    def __init__(
        self,
        questions: str | Path | Sequence[Question],
        path: Path,
        settings: ExtractSettings,
        shuffle_seed: int | None,
        engine: Engine,
    ) -> None:
        self.path = path
        self.engine = engine
        self.job = new_job()
        self.fields = kept_fields(settings)  # reports a bad setting before a model is made or loaded
        found = read_questions(
            questions, columns=settings.columns, num_samples=settings.num_samples, shuffle_seed=shuffle_seed
        )
        self.card: ModelCard = describe_model(model_settings(settings), notify=say)
        if settings.prompt == "auto" and settings.model in built_in_prompts():
            settings = replace(settings, prompt=settings.model)
        self.settings = settings
        self.prompt: Prompt = make_prompt(settings.prompt, self.card.tokenizer, stop=settings.stop)
        self.config = store_config(settings, self.card, self.prompt)
        decoding(settings, self.prompt)  # also reports bad settings
        for name in ("hidden", "attention"):
            self.fields.layers_of(name, self.card.size)
        self.questions = found.questions
        left_out = [(found.same_id, "id"), (found.same_text, "text")]
        repeats = "".join(f", {count} with a repeated {what} left out" for count, what in left_out if count)
        say(f"questions: {len(self.questions):,}{repeats}")
        if not any(question.aliases for question in self.questions):
            say(
                "warning: no question has a correct answer (a column answer or aliases; choose it with "
                "columns=answer=NAME). Answers can be labelled later with: millstream label STORE references=FILE"
            )
        ends = " or ".join([*map(repr, self.prompt.stop), "end of text"])
        say(f"prompt ({self.prompt.name}): {self.prompt.text!r}; an answer ends at {ends}")
        self.ids = self.prompt.ids(self.card.tokenizer, self.questions)

    def prepare(self, *, retry_errors: bool) -> None:
        """Recover interrupted shards; refuse a store with another configuration or other questions."""
        prepare_store(self.path, self.config, engine=self.engine)
        if (fields := Traces(self.path).fields) and RECORD_ID not in fields:
            raise ConfigMismatch(
                f"{self.path}: was begun by an older version, whose records have no {RECORD_ID}. Write to a new folder"
            )
        self._keep_tokenizer()
        self.done = self._read_done()
        texts = {question.record_id: question.question for question in self.questions}
        for name, text in self.done.items():
            if texts.get(name, text) != text:
                raise ConfigMismatch(
                    f"{self.path}: the question of {name!r} is {text!r} in the store but {texts[name]!r} in the file: "
                    "other questions with the same ids. Write to a new folder"
                )
        if retry_errors:
            self._drop_failed(texts)

    def _keep_tokenizer(self) -> None:
        """Saved with the shards, so that token ids can be decoded wherever the store is."""
        backend = getattr(self.card.tokenizer, "backend_tokenizer", None)  # slow tokenizers have none
        if backend is not None and not (self.path / TOKENIZER).exists():
            publish(self.path / TOKENIZER, backend.to_str().encode())

    def _drop_failed(self, texts: Mapping[str, str]) -> None:
        """Remove the failed records of these questions from the store."""
        failed: list[int] = []

        def choose(traces: Traces) -> list[int]:
            names, states = (traces.column(name).to_pylist() for name in ("record_id", "status"))
            found = enumerate(zip(names, states, strict=True))
            failed.extend(number for number, (name, status) in found if status == "error" and name in texts)
            return failed

        if self.done:
            drop_records(self.path, choose)
        self.done = self._read_done()
        say(f"retrying {len(failed)} questions that failed")

    def _read_done(self) -> dict[str, str]:
        return dict(done_records(self.path, ["record_id", "question"]))

    def batches(self) -> list[Batch]:
        """The questions left, in batches that are the same in every run."""
        plan = plan_batches(
            list(map(len, self.ids)),
            size=self.card.size,
            fields=self.fields,
            max_new_tokens=self.settings.max_new_tokens,
            num_beams=self.settings.num_beams,
            memory=parse_bytes(self.settings.memory),
            window=self.settings.shard_records,
        )
        left: list[Batch] = []
        context = self.card.context or 2**62
        for indices in plan:
            questions = [self.questions[index] for index in indices]
            skip = frozenset(question.record_id for question in questions if question.record_id in self.done)
            if len(skip) < len(questions):
                encoded = [EncodedQuestion(self.questions[index], self.ids[index]) for index in indices]
                shortest = min(len(self.ids[index]) for index in indices)
                left.append(Batch(encoded, skip, too_long=shortest + self.settings.max_new_tokens > context))
        left.sort(key=lambda batch: batch.too_long)  # if the first batch fails, all will
        if left and left[0].too_long and not self.done:
            left[0] = replace(left[0], too_long=False)
        return left

    def left_of(self, batch: Batch) -> Batch | None:
        """The rest of a batch whose worker died; the records it appended are recovered first."""
        upload_left(self.path, self.config, job=self.job, engine=self.engine)
        self.done = self._read_done()
        skip = frozenset(one.question.record_id for one in batch.questions if one.question.record_id in self.done)
        return replace(batch, skip=skip) if len(skip) < len(batch.questions) else None

    def work(self) -> Extracted:
        batches = self.batches()
        missing = sum(len(batch.questions) - len(batch.skip) for batch in batches)
        total = len(self.questions)
        say(f"{self.path}: {total - missing:,} of {total:,} done already, {missing:,} left in {len(batches):,} batches")
        interrupted = False
        if batches:
            make = partial(ExtractWorker, self.path, self.settings, self.job)
            begun = time.monotonic()
            done = errors = tokens = 0
            memory: dict[tuple[str, int], tuple[int, int]] = {}  # used and allowed, by worker

            def used_memory() -> tuple[int, int]:
                both = list(memory.values())
                return sum(worker[0] for worker in both), sum(worker[1] for worker in both)

            with (
                interruptible() as stop,
                progress("extract", missing, unit="traces", memory=used_memory) as update,
                closing(self.engine.run(make, batches, redo=self.left_of)) as results,
            ):
                for traced in results:
                    if not done:
                        self._estimate(traced, missing)
                    done, errors = done + traced.records, errors + traced.errors
                    tokens += traced.new_tokens
                    memory[traced.worker] = (traced.worker_bytes, traced.worker_budget)
                    rate = tokens / (time.monotonic() - begun)
                    failed = f", {errors} failed" if errors else ""
                    shard = "" if traced.shard is None else f", shard {traced.shard}"
                    update(done, f"{rate:,.0f} tokens/s{shard}{failed}")
                    if stop():
                        interrupted = True
                        break
        if is_url(self.path) and not interrupted:
            self._check_uploaded()
        return self._summary(interrupted=interrupted)

    def _check_uploaded(self) -> None:
        """Workers upload when they are closed; what a dead one left is in the spool of its machine."""
        prepare_store(self.path, self.config, engine=self.engine)
        self.done = self._read_done()
        if missing := sum(question.record_id not in self.done for question in self.questions):
            raise EngineError(
                f"{self.path}: {plural(missing, 'trace')} of workers that died were not uploaded. Run the same "
                "command again"
            )

    def _estimate(self, first: Traced, missing: int) -> None:
        """Estimate the total size and time from the first batch; raise StoreFull if the disk is too small."""
        good = first.records - first.errors
        if not good:
            return
        answer = first.new_tokens / good
        size = self.card.size
        trace_bytes = partial(self.fields.trace_bytes, size, answer=round(answer))
        encoded = zip(self.questions, self.ids, strict=True)
        lengths = [len(ids) for question, ids in encoded if question.record_id not in self.done]
        measured = first.bytes / (good * trace_bytes(prompt=round(first.prompt_tokens / good)))
        total = int(measured * sum(trace_bytes(prompt=length) for length in lengths))
        free = None if is_url(self.path) else shutil.disk_usage(self.path).free + first.bytes
        seconds = first.seconds * (sum(lengths) + answer * len(lengths)) / (first.prompt_tokens + first.new_tokens)
        workers = self.engine.workers or 1
        say(
            f"{format_bytes(first.bytes / good)} per trace in the first batch; about {format_bytes(total)} in total, "
            f"{'' if free is None else f'{format_bytes(free)} free, '}about {format_seconds(seconds / workers)}"
        )
        if free is not None and total > free * FREE_SHARE:
            raise StoreFull(
                f"{self.path}: {missing} traces of {self.config['fields']} need about {format_bytes(total)}, "
                f"but only {format_bytes(free)} are free. Keep less (tier=stats, fields=...), run fewer questions "
                "(num_samples=...), or write to another disk"
            )

    def _summary(self, *, interrupted: bool) -> Extracted:
        traces = Traces(self.path)
        status = traces.column("status").to_pylist() if len(traces) else []
        return Extracted(self.path, len(traces), status.count("error"), traces.num_bytes, interrupted)


def _count(value: object) -> int:
    assert isinstance(value, int)
    return value
