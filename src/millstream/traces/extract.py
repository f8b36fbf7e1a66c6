"""`extract`: questions and a language model -> a trace store. Run again to resume."""

import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from millstream.core.arguments import checked
from millstream.core.config import Natural, parse_bytes, read_settings
from millstream.core.console import (
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
from millstream.core.remote import is_url, to_path
from millstream.core.rows import Row
from millstream.errors import BadSetting, ConfigMismatch, EngineError, StoreFull
from millstream.traces.kind import ExtractSettings
from millstream.traces.llm.fields import LAYERED, Need, plan_batches
from millstream.traces.llm.model import ModelCard, describe_model
from millstream.traces.llm.prompts import Prompt, check_prompt, with_texts
from millstream.traces.llm.questions import Question, QuestionSet, read_questions
from millstream.traces.llm.tracer import Record
from millstream.traces.llm.worker import (
    Batch,
    Counts,
    Difference,
    ExtractWorker,
    Traced,
    decoding,
    kept_fields,
    make_endpoint,
    make_tracer,
    model_settings,
    prompt_for,
    store_config,
)
from millstream.traces.store.format import RECORD_ID
from millstream.traces.store.jobs import done_records, new_job, prepare_store, upload_left
from millstream.traces.store.locks import only_job
from millstream.traces.store.manifest import TOKENIZER
from millstream.traces.store.rewrite import drop_records
from millstream.traces.store.traces import Traces

ENCODED = 1000  # questions whose tokens are in memory at a time while they are counted
WRONG_MODEL = 0.5  # mean difference of log-probabilities above which the answers are hardly of this model
_ROUNDS = 4  # times its concurrency: the answers that a server is asked for before they are replayed
FREE_SHARE = 0.98  # fraction of the free disk space that may be filled


@dataclass(frozen=True)
class Extracted:
    """What the store contains; `interrupted` if some questions are left."""

    path: Path
    records: int
    errors: int
    bytes: int
    interrupted: bool = False


@checked
def extract(
    questions: str | Path | Sequence[Question | Row],
    path: str | Path,
    *,
    shuffle_seed: Natural | None = None,
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


@checked
def replay(model: str | Path, records: Sequence[Question | Row], **settings: object) -> list[Record]:
    """The traces of answers, in memory: for a notebook, or for a few.

    A record is a dict with the columns that `extract` reads from a file: `question`, and `generated_answer`, or
    `prompt_token_ids` and `token_ids`; without an answer, one is generated. Other settings are those of `extract`.

    >>> answers = [{"question": "Who wrote Emma?", "generated_answer": "Jane Austen"}]
    >>> trace = ms.replay("Qwen/Qwen3-4B", answers, tier="full")[0]
    >>> hidden, logprobs = trace["hidden"], trace["logprobs"]
    """
    chosen = read_settings(ExtractSettings, {"model": str(model), **settings})
    if chosen.endpoint is not None:
        raise BadSetting(f"endpoint={chosen.endpoint}: has no effect on ms.replay; use ms.extract")
    found_questions = read_questions(records, columns=chosen.columns, num_samples=chosen.num_samples).questions
    card = describe_model(model_settings(chosen), notify=ignore_message)
    questions = with_texts(card.tokenizer, found_questions)
    tracer = make_tracer(chosen, card, prompt_for(questions, chosen, card))
    encoded = tracer.encode(questions)
    found: dict[int, list[Record]] = {}
    for indices in plan(questions, [tracer.length(one) for one in encoded], chosen, card):
        traced = tracer.trace([encoded[index] for index in indices])
        each = len(traced) // len(indices)
        found.update((index, traced[place * each : (place + 1) * each]) for place, index in enumerate(indices))
    return [record for index in range(len(questions)) for record in found[index]]


def plan(
    questions: Sequence[Question], lengths: Sequence[tuple[int, int]], settings: ExtractSettings, card: ModelCard
) -> Iterator[list[int]]:
    """The indices of the questions of each batch: their answers are all generated here, or none are."""
    local = [_is_generated(question, settings) for question in questions]
    for generated in (True, False):
        chosen = [index for index, here in enumerate(local) if here == generated]
        batches = plan_batches(
            [lengths[index] for index in chosen],
            need=_need(settings, card, generated=generated),
            memory=parse_bytes(settings.memory),
            window=settings.shard_records,
        )
        for batch in batches:
            yield [chosen[place] for place in batch]


def _is_generated(question: Question, settings: ExtractSettings) -> bool:
    """Whether the answer is generated here: neither given nor by a server."""
    return question.given is None and settings.endpoint is None


def _need(settings: ExtractSettings, card: ModelCard, *, generated: bool) -> Need:
    rows = max(settings.num_beams, 1 + settings.samples) if generated else 1
    return Need(card.size, kept_fields(settings), rows=rows, generated=generated)


class _Run:
    """One run of `extract`: its questions, and which of them are done."""

    def __init__(
        self,
        questions: str | Path | Sequence[Question | Row],
        path: Path,
        settings: ExtractSettings,
        shuffle_seed: int | None,
        engine: Engine,
    ) -> None:
        self.path = path
        self.engine = engine
        self.job = new_job()
        self.fields = kept_fields(settings)  # reports a bad setting before a model is made or loaded
        check_prompt(settings.prompt, settings.system)
        found = read_questions(
            questions, columns=settings.columns, num_samples=settings.num_samples, shuffle_seed=shuffle_seed
        )
        if not any(question.aliases or question.verdict for question in found.questions):
            say(
                "warning: no question has a correct answer (a column answer or aliases; choose it with "
                "columns=answer=NAME). Answers can be labelled later with: millstream label STORE references=FILE"
            )
        self.card: ModelCard = describe_model(model_settings(settings), notify=say)
        if (endpoint := make_endpoint(settings)) is not None:  # without a name, the only model that it has
            settings = replace(settings, endpoint_model=endpoint.model)
        self.settings = settings
        self.needs = [_need(settings, self.card, generated=generated) for generated in (False, True)]
        self.questions = with_texts(self.card.tokenizer, found.questions)
        self.prompt: Prompt = prompt_for(self.questions, settings, self.card)
        self.config = store_config(settings, self.card, self.prompt)
        decoding(settings, self.prompt)  # also reports bad settings
        for name in LAYERED:
            self.fields.layers_of(name, self.card.size)
        self._describe(found)
        self.lengths = self._measure()

    def _describe(self, found: QuestionSet) -> None:
        left_out = [(found.same_id, "id"), (found.same_text, "text")]
        repeats = "".join(f", {count} with a repeated {what} left out" for count, what in left_out if count)
        given = sum(question.given is not None for question in self.questions)
        answers = f", {given:,} with an answer to replay" if given else ""
        say(f"questions: {len(self.questions):,}{answers}{repeats}")
        if given and self.settings.samples:
            raise BadSetting(
                f"samples={self.settings.samples}: the questions have answers to replay, so none are drawn"
            )
        if any(question.prompt is None and question.messages is None for question in self.questions):
            ends = " or ".join([*map(repr, self.prompt.stop), "end of text"])
            say(f"prompt ({self.prompt.name}): {self.prompt.text!r}; an answer ends at {ends}")

    def _measure(self) -> list[tuple[int, int]]:
        """Tokens of each prompt and answer: their number only, as those of long prompts would take gigabytes."""
        context, new = self.card.context, self.settings.max_new_tokens
        found: list[tuple[int, int]] = []
        for first in range(0, len(self.questions), ENCODED):
            part = self.questions[first : first + ENCODED]
            for one in self.prompt.encode(self.card.tokenizer, part, context=context, new=new):
                found.append((len(one.ids), new if one.answer_ids is None else len(one.answer_ids)))
        return found

    def prepare(self, *, retry_errors: bool) -> None:
        """Recover interrupted shards; refuse a store with another configuration or other questions."""
        prepare_store(self.path, self.config, engine=self.engine)
        if (fields := Traces(self.path).fields) and RECORD_ID not in fields:
            raise ConfigMismatch(
                f"{self.path}: was begun by an older version, whose records have no {RECORD_ID}. Write to a new folder"
            )
        self._keep_tokenizer()
        self.done = self._read_done()
        texts = {name: question.question for question in self.questions for name in self._record_ids(question)}
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

    def _record_ids(self, question: Question) -> list[str]:
        """The answers to a question that are traced."""
        samples = 0 if question.given is not None else self.settings.samples
        return [question.record_id, *(replace(question, sample=n).record_id for n in range(1, samples + 1))]

    def batches(self) -> list[Batch]:
        """The questions left, in batches that are the same in every run."""
        left: list[Batch] = []
        batches = plan(self.questions, self.lengths, self.settings, self.card)
        for indices in batches if self.settings.endpoint is None else self._asked_at_once(batches):
            questions = [self.questions[index] for index in indices]
            names = [name for question in questions for name in self._record_ids(question)]
            skip = frozenset(name for name in names if name in self.done)
            if len(skip) < len(names):
                left.append(Batch(questions, skip, too_long=all(map(self._is_too_long, indices))))
        left.sort(key=lambda batch: batch.too_long)  # if the first batch fails, all will
        if left and left[0].too_long and not self.done:
            left[0] = replace(left[0], too_long=False)
        return left

    def _is_too_long(self, index: int) -> bool:
        """Whether a question exceeds the context of the model, or the memory, whatever the others do."""
        prompt, answer = self.lengths[index]
        if prompt + answer > min(self.card.context or 2**62, self.fields.longest):
            return True
        need = self.needs[_is_generated(self.questions[index], self.settings)]
        memory = parse_bytes(self.settings.memory)
        return need.bytes(prompt, answer, memory=memory) > memory

    def _asked_at_once(self, batches: Iterable[list[int]]) -> Iterator[list[int]]:
        """Batches joined until a server has enough to do: few answers to long prompts fit into memory together."""
        enough = _ROUNDS * self.settings.concurrency
        joined: list[int] = []
        for indices in batches:
            joined += indices
            asked = sum(self.questions[index].given is None for index in joined)
            if asked * (1 + self.settings.samples) >= enough or not asked:
                yield joined
                joined = []
        if joined:
            yield joined

    def left_of(self, batch: Batch) -> Batch | None:
        """The rest of a batch whose worker died; the records it appended are recovered first."""
        upload_left(self.path, self.config, job=self.job, engine=self.engine)
        self.done = self._read_done()
        names = [name for question in batch.questions for name in self._record_ids(question)]
        skip = frozenset(name for name in names if name in self.done)
        return replace(batch, skip=skip) if len(skip) < len(names) else None

    def work(self) -> Extracted:
        batches = self.batches()
        wanted = {name for question in self.questions for name in self._record_ids(question)}
        total, missing = len(wanted), len(wanted - self.done.keys())
        say(f"{self.path}: {total - missing:,} of {total:,} done already, {missing:,} left in {len(batches):,} batches")
        interrupted = False
        if batches:
            make = partial(ExtractWorker, self.path, self.settings, self.prompt, self.job)
            begun = time.monotonic()
            counts = Counts()
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
                    if not counts.records:
                        self._estimate(traced, missing)
                        self._compare(traced.counts.difference)
                    counts += traced.counts
                    memory[traced.worker] = (traced.worker_bytes, traced.worker_budget)
                    rate = counts.new_tokens / (time.monotonic() - begun)
                    failed = f", {counts.errors} failed" if counts.errors else ""
                    shard = "" if traced.shard is None else f", shard {traced.shard}"
                    update(counts.records, f"{rate:,.0f} tokens/s{shard}{failed}")
                    if stop():
                        interrupted = True
                        break
            for note in counts.difference.notes():
                say(note)
        if is_url(self.path) and not interrupted:
            self._check_uploaded(wanted)
        return self._summary(interrupted=interrupted)

    def _compare(self, difference: Difference) -> None:
        """A wrong model or template shows in the first batch."""
        if difference.tokens and difference.total / difference.tokens > WRONG_MODEL:
            say(
                f"warning: {difference}. Were the answers generated by another model, with another prompt, or are "
                "these the log-probs after temperature?"
            )

    def _check_uploaded(self, wanted: Set[str]) -> None:
        """Workers upload when they are closed; what a dead one left is in the spool of its machine."""
        prepare_store(self.path, self.config, engine=self.engine)
        self.done = self._read_done()
        if missing := len(wanted - self.done.keys()):
            raise EngineError(
                f"{self.path}: {plural(missing, 'trace')} of workers that died were not uploaded. Run the same "
                "command again"
            )

    def _estimate(self, traced: Traced, missing: int) -> None:
        """Estimate the total size and time from the first batch; raise StoreFull if the disk is too small."""
        first = traced.counts
        good = first.records - first.errors
        if not good:
            return
        answer = first.new_tokens / good
        size = self.card.size
        trace_bytes = partial(self.fields.trace_bytes, size, answer=round(answer))
        lengths = [
            prompt
            for index, (question, (prompt, _)) in enumerate(zip(self.questions, self.lengths, strict=True))
            for name in self._record_ids(question)
            if name not in self.done and not self._is_too_long(index)
        ]
        measured = first.bytes / (good * trace_bytes(prompt=round(first.prompt_tokens / good)))
        total = int(measured * sum(trace_bytes(prompt=length) for length in lengths))
        free = None if is_url(self.path) else shutil.disk_usage(self.path).free + first.bytes
        seconds = traced.seconds * (sum(lengths) + answer * len(lengths)) / (first.prompt_tokens + first.new_tokens)
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
