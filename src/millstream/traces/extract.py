"""`extract`: questions and a language model -> a trace store. Run again, it goes on where it stopped."""

import os
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from millstream.config import parse_bytes, read_settings, resident_bytes
from millstream.console import format_bytes, format_seconds, interruptible, progress, say, unsaid
from millstream.engine import Engine
from millstream.errors import BadSetting, BadSource, ConfigMismatch, StoreFull
from millstream.source.llm.batches import plan_batches
from millstream.source.llm.model import ModelCard, describe_model
from millstream.source.llm.prompts import Prompt, make_prompt
from millstream.source.llm.question import Question
from millstream.source.llm.questions import read_questions
from millstream.source.llm.settings import ExtractSettings
from millstream.store.layout import TOKENIZER, publish, read_manifest
from millstream.store.recover import recover_all, wait_for_writers
from millstream.store.rewrite import drop_records
from millstream.store.table import read_table
from millstream.store.traces import Traces
from millstream.store.writer import TraceWriter

FREE_SHARE = 0.98  # of the free disk that may be filled


@dataclass(frozen=True)
class Extracted:
    """What is in the store now; `interrupted` when not all questions are."""

    path: Path
    records: int
    errors: int
    bytes: int
    interrupted: bool = False


@dataclass(frozen=True)
class Batch:
    """Prompts that are traced together, and the ids among them that the store already has."""

    asked: "list[Any]"  # of tracer.Asked, which would bring torch with it
    skip: frozenset[str] = frozenset()
    too_long: bool = False  # all of them, for the model


@dataclass(frozen=True)
class Traced:
    """What became of a batch."""

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


def extract(
    questions: str | Path | Sequence[Question],
    path: str | Path,
    *,
    shuffle_seed: int | None = None,
    retry_errors: bool = False,
    engine: Engine | str = "local",
    **settings: object,
) -> Extracted:
    """Ask a causal language model every question and keep its traces in the store at `path`.

    Settings are those of `ExtractSettings`. Questions that the store has are skipped; Ctrl-C ends after the batch in
    progress; a question that fails is a record with `status="error"`, tried again with `retry_errors`.

    >>> done = ms.extract("triviaqa.jsonl", "traces/", model="Qwen/Qwen3-4B", tier="probe", max_new_tokens=64)
    """
    chosen = read_settings(ExtractSettings, settings)
    run = _Run(questions, Path(path), chosen, shuffle_seed)
    run.prepare(retry_errors=retry_errors)
    return run.work(engine if isinstance(engine, Engine) else Engine(engine))


class ExtractWorker:
    """A model and a writer: traces batches and appends their records."""

    def __init__(self, path: Path, settings: ExtractSettings) -> None:
        from millstream.source.llm.model import load_model
        from millstream.source.llm.tracer import Tracer

        card = describe_model(settings.of_model(), notify=unsaid)
        prompt = make_prompt(settings.prompt, card.tokenizer, stop=settings.stop)
        self._tracer = Tracer(
            load_model(settings.of_model(), card),
            fields=settings.kept(),
            decoding=settings.decoding(prompt),
            prompt=prompt,
            p_true=settings.p_true,
        )
        self._writer = TraceWriter(
            path,
            config=settings.remembered(card, prompt),
            schema=self._tracer.schema(),
            shard_bytes=settings.shard_bytes,
            shard_records=settings.shard_records,
        )

        self._budget = resident_bytes() + parse_bytes(settings.memory)  # the model is there already

    def do(self, batch: Batch) -> Traced:
        begun = time.perf_counter()
        records = self._tracer.trace(batch.asked)
        failed = all(record["status"] == "error" for record in records)
        if failed and not len(self._writer) and not batch.too_long:
            raise BadSource(f"none of the first {len(records)} questions could be traced: {records[0]['error']}")
        new = [record for record in records if record["question_id"] not in batch.skip]
        for record in new:
            self._writer.append(record)
        return Traced(
            records=len(new),
            errors=sum(record["status"] == "error" for record in new),
            prompt_tokens=sum(_count(record["prompt_len"]) for record in new if record["status"] == "ok"),
            new_tokens=sum(len(record["logprobs"]) for record in new if record["status"] == "ok"),  # pyright: ignore
            bytes=sum(getattr(value, "nbytes", 0) for record in new for value in record.values()),
            seconds=time.perf_counter() - begun,
            worker=(socket.gethostname(), os.getpid()),
            worker_bytes=resident_bytes(),
            worker_budget=self._budget,
            shard=self._writer.shard_number,
        )

    def close(self) -> None:
        self._writer.close()


class _Run:
    """One run of `extract`: what is asked, what is there already, what is left."""

    def __init__(
        self,
        questions: str | Path | Sequence[Question],
        path: Path,
        settings: ExtractSettings,
        shuffle_seed: int | None,
    ) -> None:
        self.path = path
        self.fields = settings.kept()  # a wrong setting is said before a model is made or loaded
        _check_sizes(settings)
        self.card: ModelCard = describe_model(settings.of_model(), notify=say)
        if settings.prompt == "auto" and settings.model == "facts":
            settings = replace(settings, prompt="facts")
        self.settings = settings
        self.prompt: Prompt = make_prompt(settings.prompt, self.card.tokenizer, stop=settings.stop)
        self.config = settings.remembered(self.card, self.prompt)
        settings.decoding(self.prompt)
        for name in ("hidden", "attention"):
            self.fields.layers_of(name, self.card.size)
        found = read_questions(
            questions, columns=settings.columns, num_samples=settings.num_samples, shuffle_seed=shuffle_seed
        )
        self.questions = found.questions
        left_out = [(found.same_id, "of an id"), (found.same_text, "of a text")]
        repeats = "".join(f", {count} {what} that came before left out" for count, what in left_out if count)
        say(f"questions: {len(self.questions):,}{repeats}")
        ends = " or ".join([*map(repr, self.prompt.stop), "end of text"])
        say(f"prompt ({self.prompt.name}): {self.prompt.text!r}; an answer ends at {ends}")
        self.ids = self.prompt.ids(self.card.tokenizer, [question.question for question in self.questions])

    def prepare(self, *, retry_errors: bool) -> None:
        """Recover what was interrupted, and refuse a store of another configuration or of other questions."""
        with TraceWriter(self.path, config=self.config):
            pass
        wait_for_writers(self.path)
        self._keep_tokenizer()
        self.done = self._read_done()
        texts = {question.id: question.question for question in self.questions}
        for name, text in self.done.items():
            if texts.get(name, text) != text:
                raise ConfigMismatch(
                    f"{self.path}: {name!r} is {text!r} there and {texts[name]!r} here: other questions with the same "
                    "ids. Write to a new folder"
                )
        if retry_errors:
            self._forget_failed(texts)

    def _keep_tokenizer(self) -> None:
        """Beside the shards, so that ids of tokens can be read as text wherever the store is."""
        backend = getattr(self.card.tokenizer, "backend_tokenizer", None)  # those written in Python have none
        if backend is not None and not (self.path / TOKENIZER).exists():
            publish(self.path / TOKENIZER, backend.to_str().encode())

    def _forget_failed(self, asked: Mapping[str, str]) -> None:
        """Take the failed ones among the questions asked out of the store."""
        failed: list[int] = []
        if self.done:
            table = read_table(self.path, read_manifest(self.path), ["question_id", "status"])
            pairs = zip(*(table.column(name).to_pylist() for name in ("question_id", "status")), strict=True)
            failed = [n for n, (name, status) in enumerate(pairs) if status == "error" and name in asked]
        drop_records(self.path, failed)
        self.done = self._read_done()
        say(f"{len(failed)} failed before and are asked again")

    def _read_done(self) -> dict[str, str]:
        manifest = read_manifest(self.path)
        if not manifest.shards:
            return {}
        table = read_table(self.path, manifest, ["question_id", "question"])
        return dict(zip(*(table.column(name).to_pylist() for name in table.column_names), strict=True))

    def batches(self) -> list[Batch]:
        """What is left, in batches that are the same in every run."""
        from millstream.source.llm.tracer import Asked

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
        for places in plan:
            questions = [self.questions[place] for place in places]
            skip = frozenset(question.id for question in questions if question.id in self.done)
            if len(skip) < len(questions):
                asked = [Asked(self.questions[place], self.ids[place]) for place in places]
                shortest = min(len(self.ids[place]) for place in places)
                left.append(Batch(asked, skip, too_long=shortest + self.settings.max_new_tokens > context))
        left.sort(key=lambda batch: batch.too_long)  # a first batch that fails means that all will
        if left and left[0].too_long and not self.done:
            left[0] = replace(left[0], too_long=False)
        return left

    def left_of(self, batch: Batch) -> Batch | None:
        """What is left of a batch whose worker died: the records it had appended are recovered first."""
        recover_all(self.path)
        self.done = self._read_done()
        skip = frozenset(asked.question.id for asked in batch.asked if asked.question.id in self.done)
        return replace(batch, skip=skip) if len(skip) < len(batch.asked) else None

    def work(self, engine: Engine) -> Extracted:
        batches = self.batches()
        missing = sum(len(batch.asked) - len(batch.skip) for batch in batches)
        total = len(self.questions)
        said = f"{total - missing:,} of {total:,} done already, {missing:,} left in {len(batches):,} batches"
        say(f"{self.path}: {said}")
        interrupted = False
        if batches:
            make = partial(ExtractWorker, self.path, self.settings)
            begun = time.monotonic()
            done = errors = tokens = 0
            memory: dict[tuple[str, int], tuple[int, int]] = {}  # held and allowed, of each worker

            def held() -> tuple[int, int]:
                both = list(memory.values())
                return sum(worker[0] for worker in both), sum(worker[1] for worker in both)

            with (
                interruptible() as stop,
                progress("extract", missing, unit="traces", memory=held) as update,
                closing(engine.run(make, batches, redo=self.left_of)) as results,
            ):
                for traced in results:
                    if not done:
                        self._foresee(traced, missing, engine)
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
        return self._summary(interrupted=interrupted)

    def _foresee(self, first: Traced, missing: int, engine: Engine) -> None:
        """Size and time of the whole from the first batch; refuse what the disk cannot hold."""
        good = first.records - first.errors
        if not good:
            return
        answer = first.new_tokens / good
        size = self.card.size
        trace_bytes = partial(self.fields.trace_bytes, size, answer=round(answer))
        asked = zip(self.questions, self.ids, strict=True)
        ours = [len(ids) for question, ids in asked if question.id not in self.done]
        measured = first.bytes / (good * trace_bytes(prompt=round(first.prompt_tokens / good)))
        total = int(measured * sum(trace_bytes(prompt=length) for length in ours))
        free = shutil.disk_usage(self.path).free + first.bytes
        seconds = first.seconds * (sum(ours) + answer * len(ours)) / (first.prompt_tokens + first.new_tokens)
        workers = engine.workers or 1
        say(
            f"{format_bytes(first.bytes / good)} a trace in the first batch, about {format_bytes(total)} in all, "
            f"{format_bytes(free)} free, about {format_seconds(seconds / workers)}"
        )
        if total > free * FREE_SHARE:
            raise StoreFull(
                f"{self.path}: {missing} traces of {self.config['fields']} take about {format_bytes(total)}, "
                f"{format_bytes(free)} are free. Keep less (tier=stats, fields=...), take fewer (num_samples=...), or "
                "write to another disk"
            )

    def _summary(self, *, interrupted: bool) -> Extracted:
        traces = Traces(self.path)
        status = traces.column("status").to_pylist() if len(traces) else []
        return Extracted(self.path, len(traces), status.count("error"), traces.num_bytes, interrupted)


def _check_sizes(settings: ExtractSettings) -> None:
    if settings.shard_records is not None and settings.shard_records < 1:
        raise BadSetting(f"shard_records={settings.shard_records}: at least 1")
    for size in (settings.memory, settings.shard_bytes):
        parse_bytes(1 if size is None else size)


def _count(value: object) -> int:
    assert isinstance(value, int)
    return value
