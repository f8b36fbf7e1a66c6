"""A trace store -> its `labels.parquet`: scores of every answer, and a verdict where one can be given."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from millstream.console import Progress, silent
from millstream.dataset.labels import ALIASES, ANSWERS, LABEL, LABELS_FILE
from millstream.dataset.score_files import ScoreFile, read_scores
from millstream.dataset.scores import score, values_of, whole_numbers
from millstream.dataset.verdicts import NONE, RIGHT, VERDICTS, WRONG, Evidence, Rule, Verdicts, decide, parse_rule
from millstream.errors import BadSetting, BadSource
from millstream.source.llm.answers import first_line, is_refusal, normalise_all
from millstream.store.layout import publishing, sync_folder
from millstream.store.traces import Traces

ID, STATUS = "question_id", "status"
UNLABELLED = "unlabelled"
CHUNK_RECORDS = 20_000

Map = Callable[[Callable[[pa.Table], pa.Table], Iterable[pa.Table]], Iterable[pa.Table]]
Bools = NDArray[np.bool_]

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
class LabelSettings:
    """`scores` is a file of scores by question_id, `column` the one that counts, right from `threshold` on."""

    rule: str = "default"  # default, em, f1@0.5, rougeL@0.3, or scores with a file of them
    scores: str | None = None  # CSV or Parquet with question_id and scores
    column: str | None = None  # of that file, if it has several
    threshold: float | None = None  # from which on a score means right

    def check(self) -> Rule:
        """The rule; an error where the settings do not go together."""
        rule = parse_rule(self.rule, threshold=self.threshold)
        if rule.name == "scores" and self.scores is None:
            raise BadSetting("rule=scores needs a file, as in scores=ground_truth_scores.csv")
        if self.column is not None and self.scores is None:
            raise BadSetting(f"column={self.column} is a column of a file of scores; name it, scores=FILE")
        return rule


@dataclass(frozen=True)
class Labelling:
    """What `label` did. `counts` is of every verdict and `unlabelled`, of which `conflicting` are a part."""

    path: Path
    rule: str
    label_version: str
    records: int
    counts: Mapping[str, int]
    conflicting: int


def label(
    store: str | Path,
    *,
    rule: str = "default",
    scores: str | Path | None = None,
    column: str | None = None,
    threshold: float | None = None,
    map: Map = map,
    progress: Progress = silent,
) -> Labelling:
    """Write the store's `labels.parquet`, one row a record in the records' order, and count the verdicts.

    Rules are `default`, `em`, `f1@0.5`, `rougeL@0.3` and `scores`: right from `threshold` on in a CSV or Parquet file
    with a `question_id`. With other rules such a file is only joined. There is no verdict where the answer, all aliases
    or the score is missing, where `status` is not "ok", and where records of one question_id would get different ones,
    because labels are joined by id. `map` runs `score_chunk` over chunks, in their order, and may do so elsewhere.

    >>> counts = ms.label("traces/", rule="f1@0.5").counts
    """
    settings = LabelSettings(rule, None if scores is None else str(scores), column, threshold)
    chosen = settings.check()
    traces = Traces(store)
    if ID not in traces.fields:
        raise BadSource(
            f"{store}: labels go by {ID!r}, and its records have only {', '.join(traces.fields) or 'nothing'}"
        )
    ids = [str(name) for name in traces.ids]  # as `ms.labelled` compares them
    file = read_scores(Path(scores), key=ID, column=column) if scores is not None else None
    is_by_score = chosen.name == "scores"
    by_id = file.numbers(ids) if file and is_by_score else np.full(len(ids), np.nan)
    is_usable = _is_usable(traces)
    scored = _score(traces, is_usable, needed=not is_by_score, map=map, progress=progress)
    verdicts = decide(chosen, _evidence(traces, scored, is_usable, by_id))
    verdicts, conflicting = _without_conflicts(ids, verdicts)
    counts = {name: int((verdicts == code).sum()) for code, name in [*enumerate(VERDICTS), (NONE, UNLABELLED)]}
    about = {
        "rule": str(chosen),
        "label_version": chosen.version,
        "counts": json.dumps(counts),
        "threshold": json.dumps(chosen.threshold),
        "store_fingerprint": traces.fingerprint,
    }
    out = traces.path / LABELS_FILE
    _publish(out, _join(traces, verdicts, scored, file, ids), about)
    return Labelling(out, str(chosen), chosen.version, len(traces), counts, conflicting)


def score_chunk(chunk: pa.Table) -> pa.Table:
    """Scores of records from the columns `answer` and `aliases`, null where one of them is missing."""
    said = [first_line(answer) for answer in chunk.column("answer").to_pylist()]
    found = score(said, cast(pa.Array, chunk.column("aliases").combine_chunks()))
    no_answer = np.array([not text for text in said], np.bool_)
    unknown = no_answer | (found.num_aliases == 0)
    columns = [
        pa.array(found.em, mask=unknown),
        pa.array(found.f1, mask=unknown),
        pa.array(found.rouge_l, mask=unknown),
        pa.array(found.contains, mask=unknown),
        pa.array(found.num_tokens.astype(np.int32), mask=no_answer),
        pa.array([is_refusal(text) for text in normalise_all(said)], pa.bool_(), mask=no_answer),
    ]
    return pa.Table.from_arrays(columns, schema=_SCORED)


def _score(traces: Traces, is_usable: Bools, *, needed: bool, map: Map, progress: Progress) -> pa.Table:
    """The scores of all records, chunk by chunk."""
    fields = [_first(traces, ANSWERS), _first(traces, ALIASES)]
    for field, choices in zip(fields, (ANSWERS, ALIASES), strict=True):
        if needed and field is None:
            raise BadSource(
                f"{traces.path}: answers are judged by a field {' or '.join(choices)}, and its records have only "
                f"{', '.join(traces.fields)}. Verdicts can come from a file too: rule=scores scores=FILE"
            )
    parts = [_SCORED.empty_table()]
    done = 0
    progress(done)
    for part in map(score_chunk, _chunks(traces, is_usable, answer=fields[0], aliases=fields[1])):
        parts.append(part)
        progress(done := done + part.num_rows)
    assert done == len(traces), f"map gave back {done} of {len(traces)} records"
    return pa.concat_tables(parts)


def _chunks(traces: Traces, is_usable: Bools, *, answer: str | None, aliases: str | None) -> Iterator[pa.Table]:
    """Texts of so many records at a time; those of one chunk, or of one shard, are in memory."""
    start = 0
    for numbers in _groups(traces):
        part = Traces(traces.path, shards=numbers)
        rows = pa.array(np.arange(len(part)), mask=~is_usable[start : start + len(part)])
        said = pa.nulls(len(part), pa.string()) if answer is None else _column(part, answer).cast(pa.string())
        true = pa.nulls(len(part), _TEXTS) if aliases is None else _as_lists(_column(part, aliases))
        table = pa.table({"answer": said.take(rows), "aliases": true})
        for first in range(0, len(part), CHUNK_RECORDS):
            # Taken, not sliced: a slice is pickled with all that it was sliced from.
            yield table.take(np.arange(first, min(first + CHUNK_RECORDS, len(part))))
        start += len(part)


def _groups(traces: Traces) -> Iterator[list[int]]:
    """Numbers of neighbouring shards that make up about a chunk."""
    group: list[int] = []
    records = 0
    for shard in traces.shards:
        if group and records + shard.records > CHUNK_RECORDS:
            yield group
            group, records = [], 0
        group.append(shard.number)
        records += shard.records
    if group:
        yield group


def _evidence(traces: Traces, scored: pa.Table, is_usable: Bools, by_id: NDArray[np.float64]) -> Evidence:
    has_texts = _first(traces, ANSWERS) is not None  # if not, a score is all there can be
    values = {name: _numbers(scored.column(name)) for name in scored.column_names}
    return Evidence(
        has_answer=~np.isnan(values["num_tokens"]) if has_texts else is_usable,
        has_truth=~np.isnan(values["em"]),
        em=values["em"] == 1,
        f1=values["f1"].astype(np.float32),
        rouge_l=values["rouge_l"].astype(np.float32),
        contains=values["contains"] == 1,
        refused=values["refused"] == 1,
        num_tokens=values["num_tokens"],
        score=by_id,
    )


def _without_conflicts(ids: Sequence[str], verdicts: Verdicts) -> tuple[Verdicts, int]:
    """No verdict for the records of an id that has several different ones, and the number of these records."""
    question = whole_numbers(pa.array(ids, pa.string()).dictionary_encode().indices)
    low, high = np.full(len(ids), len(VERDICTS)), np.full(len(ids), NONE)
    np.minimum.at(low, question, verdicts)
    np.maximum.at(high, question, verdicts)
    in_conflict = (low != high)[question]
    return np.where(in_conflict, NONE, verdicts).astype(np.int8), int(in_conflict.sum())


def _join(traces: Traces, verdicts: Verdicts, scored: pa.Table, file: ScoreFile | None, ids: Sequence[str]) -> pa.Table:
    """The rows of `labels.parquet`."""
    right, wrong = VERDICTS.index(RIGHT), VERDICTS.index(WRONG)
    columns: dict[str, pa.Array | pa.ChunkedArray] = {
        ID: traces.column(ID),
        "verdict": pa.array(VERDICTS).take(pa.array(verdicts.astype(np.int64), mask=verdicts == NONE)),
        LABEL: pa.array((verdicts == wrong).astype(np.int8), mask=(verdicts != right) & (verdicts != wrong)),
        **{name: scored.column(name) for name in scored.column_names if name != "refused"},
    }
    for name, values in (file.columns(ids) if file else {}).items():
        if name in columns:
            raise BadSource(
                f"{file and file.path}: {LABELS_FILE} has a column {name!r} of its own. Rename it, or name another"
            )
        columns[name] = values
    return pa.table(columns)


def _publish(out: Path, table: pa.Table, about: Mapping[str, str]) -> None:
    """All of the new labels or the old ones, also after a crash."""
    described = table.cast(table.schema.with_metadata({f"millstream.{key}": value for key, value in about.items()}))
    with publishing(out, "The labels that were there are kept; free some space and run it again") as file:
        pq.write_table(described, file, compression="zstd")
    sync_folder(out.parent)


def _is_usable(traces: Traces) -> Bools:
    """Whether a record came to a good end, as far as it says."""
    if STATUS not in traces.fields:
        return np.ones(len(traces), np.bool_)
    return np.array([status == "ok" for status in traces.column(STATUS).to_pylist()], np.bool_)


def _first(traces: Traces, names: Sequence[str]) -> str | None:
    return next((name for name in names if isinstance(traces.fields.get(name), pa.DataType)), None)


def _column(traces: Traces, name: str) -> pa.Array:
    return cast(pa.Array, traces.column(name).combine_chunks())


def _as_lists(aliases: pa.Array) -> pa.Array:
    """Lists of texts, also where each is one text."""
    if pa.types.is_string(aliases.type):
        return pa.array([None if text is None else [text] for text in aliases.to_pylist()], _TEXTS)
    return aliases.cast(_TEXTS)


def _numbers(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """Numbers or truth values, NaN for null."""
    values = cast(pa.Array, column.combine_chunks()).cast(pa.float64())
    return values_of(values.fill_null(np.nan), np.float64)
