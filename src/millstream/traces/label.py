"""A trace store -> its `labels.parquet`: the scores of every answer, and its verdict under a named rule."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millstream.core.arguments import checked
from millstream.core.config import Count
from millstream.core.console import Progress, silent
from millstream.core.files import sync_folder
from millstream.core.remote import to_path
from millstream.core.split import LABEL
from millstream.core.tables import publish_table
from millstream.errors import BadSource
from millstream.traces.convert import names_of
from millstream.traces.groups import write_groups
from millstream.traces.judge import PROMPT, Judge, Judging, judge_answers, make_judge, replies_file
from millstream.traces.kind import LabelSettings
from millstream.traces.rules import (
    GIVEN,
    JUDGE,
    NONE,
    RIGHT,
    VERDICTS,
    WRONG,
    Evidence,
    Verdicts,
    decide,
    parse_rule,
    rule_of,
)
from millstream.traces.scores import (
    Bools,
    ScoreFile,
    first_line,
    is_refusal,
    normalise_all,
    read_scores,
    score,
    values_of,
    whole_numbers,
)
from millstream.traces.spans import SPANS, spans_table
from millstream.traces.store.format import QUESTION_ID, RECORD_ID, id_field
from millstream.traces.store.locks import StoreLock
from millstream.traces.store.traces import LABELS_FILE, Traces
from millstream.traces.verdicts import (
    Agreement,
    agreement_of,
    codes_of,
    given_texts,
    given_verdicts,
    read_verdicts,
)

STATUS = "status"
QUESTION = "question"
UNLABELLED = "unlabelled"
CHUNK_RECORDS = 20_000  # records per job

Map = Callable[[Callable[[pa.Table], pa.Table], Iterable[pa.Table]], Iterable[pa.Table]]

_TEXTS = pa.list_(pa.string())
_SCORED = pa.schema(
    [
        ("em", pa.bool_()),
        ("f1", pa.type_for_alias("float32")),
        ("rouge_l", pa.type_for_alias("float32")),
        ("contains", pa.bool_()),
        ("num_tokens", pa.int32()),
        ("refused", pa.bool_()),
    ]
)


@dataclass(frozen=True)
class Labelling:
    """The result of `label`. `counts` has every verdict and `unlabelled`, which includes `conflicting`.

    `human` verdicts of people replaced those of the rule; `agreements` say how well they, the rule and a judge agree.
    """

    path: Path
    rule: str
    label_version: str
    records: int
    counts: Mapping[str, int]
    conflicting: int
    human: int = 0
    agreements: Sequence[Agreement] = ()
    notes: Sequence[str] = ()


@checked
def label(
    store: str | Path,
    *,
    rule: str = "default",
    scores: str | Path | None = None,
    column: str | None = None,
    threshold: float | None = None,
    positive: str | None = None,
    references: str | Path | None = None,
    columns: str | None = None,
    spans: str | Path | None = None,
    endpoint: str | None = None,
    model: str | None = None,
    key_env: str | None = None,
    concurrency: int = 8,
    max_new_tokens: int = 16,
    nli: str | None = None,
    chunk_records: Count = CHUNK_RECORDS,
    map: Map = map,
    progress: Progress = silent,
) -> Labelling:
    """Write the `labels.parquet` of a store, one row per record in record order, and count the verdicts.

    Rules are `default`, `em`, `f1@0.5`, `rougeL@0.3`, `spans`, `given` and `scores`. `scores` labels an answer right if
    its score in a CSV or Parquet file with a `record_id` or `question_id` is at least `threshold` (wrong, with
    `positive="wrong"`); `spans` labels it wrong if it has hallucinated spans, by its record or the file `spans`, and
    labels its tokens; `given` takes the verdict that came with it. A record has no verdict if its answer, all aliases,
    the score or the spans are missing, if `status` is not "ok", or if records with the same id would get different
    verdicts, because labels are joined by id.
    `references` is a questions file whose answers are used instead of those of the store, `columns` names its columns.
    `map` runs `score_chunk` over chunks of at most `chunk_records` records, in order, possibly in other processes.

    With `rule="judge"` a language model compares the answers: `model` of an OpenAI-compatible server at `endpoint`,
    whose key is in the environment variable `key_env`, or a local one. Its replies are kept, and asked for only once.
    The verdict of a person, given in `millstream view --label`, replaces that of any rule.

    For a store with several answers to a question, `groups.parquet` says how far they agree: by their words, or by the
    model `nli`, a name on the Hugging Face hub or a folder.

    >>> counts = ms.label("traces/", rule="f1@0.5").counts
    """
    files = [None if file is None else str(file) for file in (scores, references, spans)]
    compared = LabelSettings(rule, files[0], column, threshold, positive, files[1], columns, files[2])
    asked = {"endpoint": endpoint, "model": model, "key_env": key_env, "concurrency": concurrency}
    chosen = rule_of(replace(compared, **asked, max_new_tokens=max_new_tokens))
    traces = Traces(store)  # raises for anything but a store
    with StoreLock(traces.path, exclusive=False):  # until the labels are written, no shard is replaced
        traces.refresh()
        if traces.id_field is None:
            found = ", ".join(traces.fields) or "no fields"
            raise BadSource(
                f"{store}: labels need the field {id_field(traces.fields)!r}; its records have only {found}"
            )
        ids = [str(name) for name in traces.ids]  # as `ms.labelled` compares them
        file = (
            read_scores(to_path(scores), keys=(RECORD_ID, QUESTION_ID), column=column) if scores is not None else None
        )
        by_id = np.full(len(ids), np.nan) if file is None else _scores_of(file, ids)
        is_usable = _is_usable(traces)
        added = None if references is None else _references_of(references, traces, columns=columns)
        is_compared = chosen.name not in ("scores", SPANS, GIVEN)
        answer = _text_field(traces, answer_fields(), is_needed=is_compared)
        aliases = _text_field(traces, alias_fields(), is_needed=is_compared and added is None)
        more = {} if file is None else file.columns(ids)
        if chosen.name == SPANS:
            marked = _spans_of(traces, spans, ids, answer)
            by_id = _numbers(pc.list_value_length(_whole(marked, SPANS)))
            more = {name: marked.column(name) for name in marked.column_names}
        texts = _Texts(
            traces=traces, is_usable=is_usable, answer=answer, aliases=aliases, added=added, chunk_records=chunk_records
        )
        scored = _score(texts.chunks(), len(traces), map=map, progress=progress)
        evidence = _evidence(traces, scored, is_usable, by_id)
        notes: list[str] = []
        agreements: list[Agreement] = []
        if chosen.name == JUDGE:
            judge = make_judge(
                endpoint=endpoint, model=model, key_env=key_env, concurrency=concurrency, max_new_tokens=max_new_tokens
            )
            chosen = replace(chosen, judge=judge.name, prompt=f"{max_new_tokens} {PROMPT}")
            judging = _judge(judge, traces, texts, evidence, max_new_tokens=max_new_tokens, progress=progress)
            evidence = replace(evidence, judged=judging.verdicts)
            notes += judging.notes()
            by_words = decide(parse_rule("default"), evidence)
            agreements.append(agreement_of(str(chosen), judging.verdicts, "the rule default", by_words))
        if chosen.name == GIVEN:
            evidence = replace(evidence, judged=given_verdicts(traces))
        verdicts = decide(chosen, evidence)
        by_people = codes_of(read_verdicts(traces.path), ids, texts.answers())
        if (is_human := by_people != NONE).any():
            agreements.append(
                agreement_of("people", by_people, str(chosen) if chosen.judge else f"the rule {chosen}", verdicts)
            )
        verdicts, conflicting = _without_conflicts(ids, np.where(is_human, by_people, verdicts))
        is_human &= verdicts != NONE
        if answer is not None:
            notes += filter(None, [write_groups(traces, answer, is_usable, nli, progress)])
        counts = {name: int((verdicts == code).sum()) for code, name in [*enumerate(VERDICTS), (NONE, UNLABELLED)]}
        if chosen.name != GIVEN and not counts[RIGHT] + counts[WRONG] and any(given_texts(traces)):
            notes.append("the answers came with verdicts: rule=given takes them")
        about = {
            "rule": str(chosen),
            "label_version": chosen.version,
            "counts": json.dumps(counts),
            "threshold": json.dumps(chosen.threshold),
            "store_fingerprint": traces.fingerprint,
            **({} if references is None else {"references": str(references)}),
            "agreements": json.dumps([asdict(one) for one in agreements]),
        }
        kinds = pa.array([JUDGE if chosen.judge else "rule", "human"])
        source = kinds.take(pa.array(is_human.astype(np.int64), mask=verdicts == NONE))
        out = traces.path / LABELS_FILE
        _publish(out, _join(traces, verdicts, source, scored, more, file), about)
        human = int(is_human.sum())
        return Labelling(
            out, str(chosen), chosen.version, len(traces), counts, conflicting, human, tuple(agreements), tuple(notes)
        )


def _judge(
    judge: Judge, traces: Traces, texts: "_Texts", evidence: Evidence, *, max_new_tokens: int, progress: Progress
) -> Judging:
    """The verdicts of a model on all answers but refusals, which need none."""
    question = _text_field(traces, names_of(QUESTION), is_needed=True)
    wanted = evidence.has_answer & evidence.has_reference & (evidence.em | ~evidence.refused)
    file = replies_file(traces.path)
    chunks = texts.chunks(question)
    return judge_answers(judge, chunks, wanted, file, max_new_tokens=max_new_tokens, progress=progress)


def _spans_of(traces: Traces, file: str | Path | None, ids: Sequence[str], answer: str | None) -> pa.Table:
    if file is None and SPANS not in traces.fields:
        raise BadSource(
            f"{traces.path}: its records have no field {SPANS!r}. Extract questions with spans, or give a file: "
            "spans=FILE"
        )
    return spans_table(traces, None if file is None else to_path(file), ids, answer)


def _scores_of(file: ScoreFile, ids: Sequence[str]) -> NDArray[np.float64]:
    """The score of every record, NaN without one; a file without a single score would remove all labels."""
    found = file.numbers(ids)
    if len(ids) and np.isnan(found).all():
        why = f"Their ids are such as {ids[0]!r}, those of the file such as {next(iter(file.rows), None)!r}"
        if not file.rows:
            why = "The file has no rows"
        elif any(name in file.rows for name in ids):
            why = "The scores of their ids are missing or NaN"
        raise BadSource(f"{file.path}: has no score for any of the {len(ids)} records. {why}")
    return found


def score_chunk(chunk: pa.Table) -> pa.Table:
    """Scores of records from the columns `answer` and `aliases`; null where one is missing."""
    answers = [first_line(answer) for answer in chunk.column("answer").to_pylist()]
    found = score(answers, cast(pa.Array, chunk.column("aliases").combine_chunks()))
    no_answer = np.array([not text for text in answers], np.bool_)
    unknown = no_answer | (found.num_aliases == 0)
    columns = [
        pa.array(found.em, mask=unknown),
        pa.array(found.f1, mask=unknown),
        pa.array(found.rouge_l, mask=unknown),
        pa.array(found.contains, mask=unknown),
        pa.array(found.num_tokens.astype(np.int32), mask=no_answer),
        pa.array([is_refusal(text) for text in normalise_all(answers)], pa.bool_(), mask=no_answer),
    ]
    return pa.Table.from_arrays(columns, schema=_SCORED)


def answer_fields() -> list[str]:
    """The names that the answer of a trace can have; the first one that a store has is used."""
    return [*names_of("generated_answer"), "generated_text"]


def alias_fields() -> list[str]:
    """The names that the accepted answers of a trace can have; the first one that a store has is used."""
    return [*names_of("aliases"), "answer"]


def references_of(values: Sequence[object]) -> list[str]:
    """All accepted answers among single texts and lists of aliases, each once."""
    flat: list[object] = []
    for value in values:
        flat += cast("list[object]", value) if isinstance(value, list) else [value]
    return list(dict.fromkeys(str(text) for text in flat if text not in (None, "")))


def _text_field(traces: Traces, names: Sequence[str], *, is_needed: bool) -> str | None:
    """The first of these fields that the store has; None if it has none."""
    found = _first(traces, names)
    if is_needed and found is None:
        raise BadSource(
            f"{traces.path}: labels need a field {' or '.join(names)}; its records have only "
            f"{', '.join(traces.fields)}. Or take correct answers or verdicts from a file: references=FILE, or "
            "rule=scores scores=FILE"
        )
    return found


def _references_of(file: str | Path, traces: Traces, *, columns: str | None) -> list[list[str] | None]:
    """The accepted answers of every record in a references file; None if it has none."""
    from millstream.traces.llm.questions import read_references

    found = read_references(file, columns=columns)
    ids = [str(name) for name in traces.column(traces.default_key or id_field(traces.fields)).to_pylist()]
    added = [found.get(name) for name in ids]
    if ids and not any(added):
        raise BadSource(
            f"{file}: has no answer for any of the {len(ids)} records. Their ids are such as {ids[0]!r}, those of the "
            f"file such as {next(iter(found))!r}. Choose the id column: columns=id=NAME"
        )
    return added


def _score(chunks: Iterable[pa.Table], num_records: int, *, map: Map, progress: Progress) -> pa.Table:
    """The scores of all records, computed chunk by chunk."""
    parts = [_SCORED.empty_table()]
    done = 0
    progress(done)
    for part in map(score_chunk, chunks):
        parts.append(part)
        progress(done := done + part.num_rows)
    assert done == num_records, f"map returned {done} of {num_records} records"
    return pa.concat_tables(parts)


@dataclass(frozen=True, kw_only=True)
class _Texts:
    """Answers and accepted answers (`added`, or those of the store) of the usable records, null for the others."""

    traces: Traces
    is_usable: Bools
    answer: str | None
    aliases: str | None
    added: Sequence[list[str] | None] | None
    chunk_records: int

    def chunks(self, question: str | None = None) -> Iterator[pa.Table]:
        """The texts, `chunk_records` at a time, perhaps with questions. Only one chunk or one shard is in memory."""
        start = 0
        for part in self._parts():
            rows = pa.array(np.arange(len(part)), mask=~self.is_usable[start : start + len(part)])
            answers = _texts(part, self.answer)
            accepted = pa.nulls(len(part), _TEXTS) if self.aliases is None else _as_lists(_column(part, self.aliases))
            if self.added is not None:
                pairs = zip(self.added[start : start + len(part)], accepted.to_pylist(), strict=True)
                accepted = pa.array([new or old for new, old in pairs], _TEXTS)
            table = pa.table({"answer": answers.take(rows), "aliases": accepted})
            if question is not None:
                table = table.append_column(QUESTION, _texts(part, question))
            for first in range(0, len(part), self.chunk_records):
                # Taken, not sliced: pickling a slice pickles the whole table.
                yield table.take(np.arange(first, min(first + self.chunk_records, len(part))))
            start += len(part)

    def answers(self) -> Iterator[str | None]:
        for part in self._parts():
            yield from _texts(part, self.answer).to_pylist()

    def _parts(self) -> Iterator[Traces]:
        for numbers in _groups(self.traces, self.chunk_records):
            yield Traces(self.traces.path, shards=numbers)


def _groups(traces: Traces, chunk_records: int) -> Iterator[list[int]]:
    """Numbers of consecutive shards that together have at most `chunk_records` records, or of one larger shard."""
    group: list[int] = []
    records = 0
    for shard in traces.shards:
        if group and records + shard.records > chunk_records:
            yield group
            group, records = [], 0
        group.append(shard.number)
        records += shard.records
    if group:
        yield group


def _evidence(traces: Traces, scored: pa.Table, is_usable: Bools, by_id: NDArray[np.float64]) -> Evidence:
    has_texts = _first(traces, answer_fields()) is not None  # without texts a score is the only evidence
    values = {name: _numbers(_whole(scored, name)) for name in scored.column_names}
    return Evidence(
        has_answer=~np.isnan(values["num_tokens"]) if has_texts else is_usable,
        has_reference=~np.isnan(values["em"]),
        em=values["em"] == 1,
        f1=values["f1"].astype(np.float32),
        rouge_l=values["rouge_l"].astype(np.float32),
        contains=values["contains"] == 1,
        refused=values["refused"] == 1,
        num_tokens=values["num_tokens"],
        score=by_id,
    )


def _without_conflicts(ids: Sequence[str], verdicts: Verdicts) -> tuple[Verdicts, int]:
    """Remove the verdicts of ids whose records disagree; also the number of these records."""
    question = whole_numbers(pa.array(ids, pa.string()).dictionary_encode().indices)
    low, high = np.full(len(ids), len(VERDICTS)), np.full(len(ids), NONE)
    np.minimum.at(low, question, verdicts)
    np.maximum.at(high, question, verdicts)
    in_conflict = (low != high)[question]
    return np.where(in_conflict, NONE, verdicts).astype(np.int8), int(in_conflict.sum())


def _join(
    traces: Traces,
    verdicts: Verdicts,
    source: pa.Array,
    scored: pa.Table,
    more: Mapping[str, pa.Array | pa.ChunkedArray],
    file: ScoreFile | None,
) -> pa.Table:
    """The rows of `labels.parquet`; `more` columns are of a scores file, or of spans."""
    right, wrong = VERDICTS.index(RIGHT), VERDICTS.index(WRONG)
    columns: dict[str, pa.Array | pa.ChunkedArray] = {
        **{name: traces.column(name) for name in (RECORD_ID, QUESTION_ID) if name in traces.fields},
        "verdict": pa.array(VERDICTS).take(pa.array(verdicts.astype(np.int64), mask=verdicts == NONE)),
        LABEL: pa.array((verdicts == wrong).astype(np.int8), mask=(verdicts != right) & (verdicts != wrong)),
        "source": source,
        **{name: scored.column(name) for name in scored.column_names if name != "refused"},
    }
    for name, values in more.items():
        if name in columns:
            raise BadSource(
                f"{file and file.path}: column {name!r} clashes with one of {LABELS_FILE}. Rename it, or choose another"
            )
        columns[name] = values
    return pa.table(columns)


def _publish(out: Path, table: pa.Table, about: Mapping[str, str]) -> None:
    """Write the labels atomically: after a crash either the new or the old ones are there."""
    described = table.cast(table.schema.with_metadata({f"millstream.{key}": value for key, value in about.items()}))
    publish_table(out, described, "The old labels are kept; free some space and run the same command again")
    sync_folder(out.parent)


def _is_usable(traces: Traces) -> Bools:
    """Which records have status "ok", or no status."""
    if STATUS not in traces.fields:
        return np.ones(len(traces), np.bool_)
    return np.array([status == "ok" for status in traces.column(STATUS).to_pylist()], np.bool_)


def _first(traces: Traces, names: Sequence[str]) -> str | None:
    return next((name for name in names if isinstance(traces.fields.get(name), pa.DataType)), None)


def _column(traces: Traces, name: str) -> pa.Array:
    return cast(pa.Array, traces.column(name).combine_chunks())


def _whole(table: pa.Table, name: str) -> pa.Array:
    return cast(pa.Array, table.column(name).combine_chunks())


def _texts(traces: Traces, name: str | None) -> pa.Array:
    return pa.nulls(len(traces), pa.string()) if name is None else _column(traces, name).cast(pa.string())


def _as_lists(aliases: pa.Array) -> pa.Array:
    """Lists of texts; a single text becomes a list of one."""
    if pa.types.is_string(aliases.type):
        return pa.array([None if text is None else [text] for text in aliases.to_pylist()], _TEXTS)
    return aliases.cast(_TEXTS)


def _numbers(column: pa.Array) -> NDArray[np.float64]:
    """Numbers or booleans as floats, NaN for null."""
    values = column.cast(pa.float64())
    return values_of(values.fill_null(np.nan), np.float64)
