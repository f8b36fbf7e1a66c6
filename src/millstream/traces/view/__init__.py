"""The explorer view of a trace store: a list of its records, and the details of one record."""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.core.batches import text_codes_of
from millstream.core.config import parse_json
from millstream.core.console import quoted
from millstream.core.record import Tensor
from millstream.core.remote import ObjectInfo, RemotePath, to_path
from millstream.core.tables import read_table
from millstream.errors import BadSetting, BadSource, MillstreamError
from millstream.report.tables import clipped
from millstream.traces.label import STATUS, UNLABELLED, alias_fields, answer_fields, references_of
from millstream.traces.store.format import id_field
from millstream.traces.store.manifest import MANIFEST
from millstream.traces.store.traces import LABELS_FILE, Traces
from millstream.traces.view import inside
from millstream.traces.view.inside import LayerScores, TokenTexts, find_tokenizer
from millstream.traces.view.labelling import HumanVerdicts, labelling_view_of
from millstream.traces.view.marks import TokenScores, marks_of
from millstream.training.folder import DATA, PREDICTIONS
from millstream.view import PATIENCE_S, Answer, Later, Query, View

__all__ = ["labelling_view_of", "records_of", "view_of"]

Floats = NDArray[np.float64]

QUESTION, REFERENCE = "question", "answer"
PAGE_ROWS = 50
MAX_PAGE_ROWS = 500
NETS_AFTER_S = 0.1  # after the first list is answered: torch takes seconds to import, while somebody looks at the list
FIRST = ("lstm", "gnn", "gvae")  # detectors to list first
_MAX_CHARACTERS, _MAX_REFERENCES = 400, 6  # per row


@dataclass(frozen=True)
class TextFields:
    """The fields of a store that the list shows."""

    key: str | None
    question: str | None
    answer: str | None
    references: Sequence[str]
    status: str | None

    @staticmethod
    def of(traces: Traces) -> "TextFields":
        names = [name for name, kind in traces.fields.items() if not isinstance(kind, Tensor)]
        known = [name for name in (REFERENCE, *alias_fields()) if name in names]
        answer = next((name for name in answer_fields() if name in names), None)
        references = list(dict.fromkeys(known))
        return TextFields(traces.id_field, _if(QUESTION, names), answer, references, _if(STATUS, names))

    @property
    def names(self) -> list[str]:
        single = (self.key, self.question, self.answer, self.status)
        return [*dict.fromkeys(name for name in (*single, *self.references) if name is not None)]


class TraceTexts:
    """The searchable text of each record: question, answer, references and id, in lower case."""

    def __init__(self, traces: Traces) -> None:
        fields = TextFields.of(traces)
        names = [name for name in fields.names if name != fields.status]
        columns = [traces.column(name).to_pylist() for name in names]
        self._texts = ["\n".join(references_of(values)).lower() for values in zip(*columns, strict=True)]
        self._texts = self._texts if columns else [""] * len(traces)

    def matching(self, words: str) -> NDArray[np.bool_]:
        """Which records contain all the words."""
        found = np.ones(len(self._texts), np.bool_)
        for word in words.lower().split():
            found &= np.fromiter((word in text for text in self._texts), np.bool_, len(self._texts))
        return found


class Labels:
    """Labels joined to records by id: the verdict of each, and the scores it is based on."""

    def __init__(self, traces: Traces, table: pa.Table | None) -> None:
        key = traces.id_field
        self.verdicts = np.full(len(traces), UNLABELLED, object)
        self._table = table
        self._rows: list[int | None] = [None] * len(traces)  # row in the table, by record
        if table is None or key is None or key not in table.column_names:
            return
        ids, labelled = (
            [str(name) for name in column.to_pylist()] for column in (traces.column(key), table.column(key))
        )
        if ids == labelled:  # as written by `label`: repeated ids have their own rows
            self._rows = list(range(len(ids)))
        else:
            rows = {name: row for row, name in enumerate(labelled)}
            self._rows = [rows.get(name) for name in ids]
        if "verdict" in table.column_names:
            known = table.column("verdict").to_pylist()
            self.verdicts[:] = [UNLABELLED if row is None else known[row] or UNLABELLED for row in self._rows]

    def of(self, number: int) -> dict[str, Any]:
        """The row of a record in the table of labels."""
        row = self._rows[number]
        return {} if row is None or self._table is None else self._table.take(np.array([row])).to_pylist()[0]


def read_labels(traces: Traces) -> pa.Table | None:
    """The labels.parquet of a store; None if it is not labelled."""
    file = traces.path / LABELS_FILE
    try:
        return read_table(file) if file.exists() else None
    except (OSError, pa.ArrowException) as error:
        raise BadSource(f"{file}: is damaged ({error}). Next: millstream label {quoted(traces.path)}") from None


@dataclass(frozen=True)
class TraceScores:
    """Mean scores over seeds by detector, NaN for records without a score; and the split of each record."""

    by_model: Mapping[str, Floats]
    parts: NDArray[np.int8]  # indices in `part_names`, -1: none
    part_names: Sequence[str]
    tokens: TokenScores


def read_scores(run: Path, traces: Traces) -> TraceScores:
    """The scores of a run trained or evaluated on this store; BadSource if it scored other records."""
    file = run / PREDICTIONS
    if not file.exists():
        return _no_scores(traces)
    try:
        whole = read_table(file)
        if "fold" in whole.column_names:  # of a cross-validation, scores of models that did not see the question
            is_whole = whole.column("labels").to_numpy() == 0
            whole = whole.filter(pa.array(is_whole & (np.array(whole.column("part").to_pylist()) == "test")))
        table = whole.select(["model", "part", "record", key := id_field(whole.column_names), "score"])
    except (pa.ArrowException, OSError, KeyError) as error:
        raise BadSource(f"{file}: is damaged ({error}). Next: the millstream train command of the run") from None
    records = table.column("record").to_numpy().astype(np.int64)
    _check_same(file, traces, records, table.column(key))
    models, model_names = text_codes_of(table.column("model"))
    parts, part_names = text_codes_of(table.column("part"))
    places = models * len(traces) + records
    size = len(model_names) * len(traces)
    counts = np.bincount(places, minlength=size)
    sums = np.bincount(places, weights=table.column("score").to_numpy().astype(np.float64), minlength=size)
    with np.errstate(invalid="ignore"):
        means = (sums / counts).reshape(len(model_names), len(traces))  # 0 / 0 without a score
    part_of = np.full(len(traces), -1, np.int8)
    part_of[records] = parts
    return TraceScores(dict(zip(model_names, means, strict=True)), part_of, part_names, TokenScores(whole))


def _no_scores(traces: Traces) -> TraceScores:
    return TraceScores({}, np.full(len(traces), -1, np.int8), (), TokenScores(None))


@dataclass(frozen=True)
class Known:
    """Labels and scores of all records."""

    labels: Labels
    scores: TraceScores
    problems: Sequence[str] = ()  # why labels or scores are missing

    @property
    def verdicts(self) -> NDArray[np.object_]:
        return self.labels.verdicts

    def chosen(self, query: Query, texts: TraceTexts | None) -> NDArray[np.int64]:
        """The numbers of the records that match a query, in its order."""
        found = np.ones(len(self.verdicts), np.bool_) if texts is None else texts.matching(query.text("q"))
        if verdict := query.text("verdict"):
            found &= self.verdicts == verdict
        if part := query.text("part"):
            names = list(self.scores.part_names)
            found &= self.scores.parts == (names.index(part) if part in names else -2)
        numbers = np.flatnonzero(found)
        sort = query.text("sort", "number")
        if sort not in ("number", "highest", "lowest", "mistaken"):
            raise BadSetting(f"sort={sort}: must be one of number, highest, lowest, mistaken")
        if sort == "number":
            return numbers
        scores = self._scores(query.text("detector"))
        if sort == "mistaken":  # scores furthest from the label
            ranks, is_right, is_wrong = _ranks(scores), self.verdicts == "right", self.verdicts == "wrong"
            scores = np.where(is_wrong, 1 - ranks, np.where(is_right, ranks, np.nan))
        scores = scores[numbers]
        order = np.argsort(scores if sort == "lowest" else -scores, kind="stable")  # NaN comes last
        return numbers[order]

    def _scores(self, detector: str) -> Floats:
        if detector not in self.scores.by_model:
            raise BadSetting(f"detector={detector}: must be one of {', '.join(self.scores.by_model) or 'none'}")
        return self.scores.by_model[detector]


def rows_of(traces: Traces, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """The rows of the list for these records; reads only their shards."""
    fields = TextFields.of(traces)
    found = traces.fetch(list(numbers), fields.names) if fields.names and len(numbers) else {}
    rows: list[dict[str, Any]] = []
    for place, number in enumerate(numbers):
        value: dict[str, Any] = {name: column[place] for name, column in found.items()}
        rows.append(
            {
                "number": int(number),
                "id": value.get(fields.key or ""),
                "question": _head(value.get(fields.question or "")),
                "answer": _head(value.get(fields.answer or "")),
                "references": [
                    _head(text) for text in references_of([value[name] for name in fields.references])[:_MAX_REFERENCES]
                ],
                "status": value.get(fields.status or ""),
            }
        )
    return rows


def _ranks(scores: Floats) -> Floats:
    """Scores between 0 and 1 unchanged; others, such as lengths, as the share of records with a lower score."""
    known = scores[~np.isnan(scores)]
    if not len(known) or (known.min() >= 0 and known.max() <= 1):
        return scores
    return np.where(np.isnan(scores), np.nan, np.searchsorted(np.sort(known), scores) / max(len(known) - 1, 1))


def _head(text: Any) -> Any:
    """The start of a text: answers may have thousands of words."""
    return clipped(text, _MAX_CHARACTERS) if isinstance(text, str) else text


def _if(name: str, names: Sequence[str]) -> str | None:
    return name if name in names else None


def _check_same(file: Path, traces: Traces, records: NDArray[np.int64], ids: pa.ChunkedArray) -> None:
    """Raise BadSource unless the scored records still have the same numbers in the store."""
    other = BadSource(f"{file}: its records differ from those of {traces.path}; give the run of this store with --run")
    if len(records) and (records.min() < 0 or records.max() >= len(traces)):
        raise other
    if traces.id_field is None:
        return
    _, first = np.unique(records, return_index=True)
    found = traces.column(traces.id_field).take(records[first]).cast(pa.string())
    if found.to_pylist() != ids.take(first).cast(pa.string()).to_pylist():
        raise other


def view_of(path: Path, *, run: Path | None = None, tokenizer: str | None = None, mapping: Path | None = None) -> View:
    """A list to search, filter, sort and page through; for each record its tokens, layers, attention and scores."""
    if mapping is not None:
        raise BadSetting(f"--mapping {mapping}: {path} contains traces, which have no classes")
    latest = _Latest(path, run, tokenizer)
    answers: dict[str, Answer] = {
        "about": lambda query: latest.refresh().about(query),
        "list": lambda query: latest.shown.rows(query),
        "trace": lambda query: latest.shown.trace(query),
        "layers": lambda query: latest.shown.layers(query),
        "attention": lambda query: latest.shown.attention(query),
        "evolution": lambda query: latest.shown.evolution(query),
    }
    return View("traces", "Traces", answers, static=Path(__file__).parent / "static")


def records_of(run: Path) -> Path | None:
    """The store that a run was trained on, from its data card."""
    try:
        return to_path(str(parse_json((run / DATA).read_text())["store"])).resolve()
    except (OSError, ValueError, KeyError, TypeError):
        return None


class _Latest:
    """The store when a page was last opened, with its shards, labels and scores at that time."""

    def __init__(self, path: Path, run: Path | None, tokenizer: str | None) -> None:
        self._from = path, run, tokenizer
        self._lock = threading.Lock()  # several pages may be opened in parallel
        self._seen = self._modified()
        self.shown = _Shown(*self._from)

    def refresh(self) -> "_Shown":
        with self._lock:
            if (now := self._modified()) != self._seen:
                self.shown, self._seen = _Shown(*self._from), now
            return self.shown

    def _modified(self) -> list[object]:
        """Modification times of the store folder and the predictions; every file is published by rename."""
        path, run, _ = self._from
        files = [path / MANIFEST, path / LABELS_FILE] if isinstance(path, RemotePath) else [path]
        files += [] if run is None else [run / PREDICTIONS]
        found = [file.stat() for file in files if file.exists()]
        return [one if isinstance(one, ObjectInfo) else one.st_mtime_ns for one in found]


class _Shown:
    """A store, its labels and the scores of a run, in answer to the queries of the page."""

    def __init__(self, path: Path, run: Path | None, tokenizer: str | None) -> None:
        self._traces = Traces(path)
        self._run = run
        file = find_tokenizer(path, tokenizer)
        self._tokens = Later(lambda: TokenTexts(file))
        self._texts = Later(lambda: TraceTexts(self._traces))
        self._known = Later(self._load_known)
        self._human = HumanVerdicts(self._traces)
        self._nets = Later(self._restore_nets)
        for part in (self._tokens, self._texts, self._known):
            part.start()

    def _load_known(self) -> Known:
        """Labels and scores; what cannot be read becomes a problem on the page."""
        traces, problems = self._traces, list[str]()
        labels = Labels(traces, None)
        scores = _no_scores(traces)
        try:
            labels = Labels(traces, read_labels(traces))
        except MillstreamError as error:
            problems.append(f"No labels: {error}")
        try:
            scores = scores if self._run is None else read_scores(self._run, traces)
        except MillstreamError as error:
            problems.append(f"No scores: {error}")
        return Known(labels, scores, problems)

    def _restore_nets(self) -> LayerScores | None:
        return None if self._run is None else LayerScores(self._run, self._traces)

    def about(self, query: Query) -> Mapping[str, object]:
        traces, known = self._traces, self._known.soon()
        scores = None if known is None else known.scores
        detectors = [] if scores is None else sorted(scores.by_model, key=lambda name: (name not in FIRST, name))
        return {
            "ready": known is not None,
            "problems": [] if known is None else known.problems,
            "path": str(traces.path),
            "records": len(traces),
            "shards": len(traces.shards),
            "bytes": traces.num_bytes,
            "config": dict(traces.config),
            "verdicts": None if known is None else Counter(str(verdict) for verdict in known.verdicts),
            "parts": [] if scores is None else scores.part_names,
            "detectors": detectors,
            "run": None if self._run is None else str(self._run),
        }

    def rows(self, query: Query) -> Mapping[str, object]:
        """A page of the list. Unless filtered or sorted, it reads only its own shards. `ready`: labels are loaded."""
        size = min(max(1, query.number("size", PAGE_ROWS)), MAX_PAGE_ROWS)
        is_filtered = (
            any(query.text(name) for name in ("q", "verdict", "part")) or query.text("sort", "number") != "number"
        )
        texts = self._texts.soon() if query.text("q") else None
        known = self._known.soon(PATIENCE_S if is_filtered else 0.05)
        if is_filtered and (known is None or (query.text("q") and texts is None)):
            return {"ready": False, "total": 0, "page": 0, "rows": []}
        numbers = known.chosen(query, texts) if known is not None and is_filtered else np.arange(len(self._traces))
        pages = max(1, -(-len(numbers) // size))
        page = min(query.number("page"), pages - 1)
        wanted = numbers[page * size : (page + 1) * size].tolist()
        self._nets.start(NETS_AFTER_S)
        rows = rows_of(self._traces, wanted)
        human = self._human.by_number()
        for row in rows:
            row["human"] = human.get(row["number"])
            row.update(self._verdict_and_score(known, row["number"], query.text("detector")))
        return {"ready": known is not None, "total": len(numbers), "page": page, "pages": pages, "rows": rows}

    def _verdict_and_score(self, known: Known | None, number: int, detector: str) -> dict[str, object]:
        if known is None:
            return {"verdict": None, "score": None, "part": None}
        scores, part = known.scores.by_model.get(detector), int(known.scores.parts[number])
        return {
            "verdict": known.verdicts[number],
            "score": None if scores is None else scores[number],
            "part": None if part < 0 else known.scores.part_names[part],
        }

    def trace(self, query: Query) -> Mapping[str, object]:
        """The scalars, scores and tokens of a record."""
        traces, number = self._traces, query.number("number")
        row = traces.row(number)
        fields = TextFields.of(traces)
        known = self._known.soon()
        scores = {} if known is None else {name: values[number] for name, values in known.scores.by_model.items()}
        shapes = {name: None if place is None else list(place.shape) for name, place in row.tensors.items()}
        labels = {} if known is None else known.labels.of(number)
        scalars: dict[str, object] = {name: traces.fetch([number], [name])[name][0] for name in self._scalars()}
        return {
            "number": number,
            "records": len(traces),
            "id": scalars.get(fields.key or ""),
            "question": scalars.get(fields.question or ""),
            "answer": scalars.get(fields.answer or ""),
            "references": references_of([scalars[name] for name in fields.references]),
            "scalars": scalars,
            "shapes": shapes,
            "scores": scores,
            "labels": labels,
            "marks": None if known is None else self._marks(known, number, scalars.get(fields.answer or ""), labels),
            "human": self._human.by_number().get(number),
            **self._verdict_and_score(known, number, ""),
            "tokens": inside.tokens_of(traces, number, self._tokens.wait()),
            "num_layers": inside.num_layers(traces, number),
        }

    def _marks(
        self, known: Known, number: int, answer: object, labels: Mapping[str, Any]
    ) -> Mapping[str, object] | None:
        return marks_of(self._traces, number, answer=answer, labels=labels, scores=known.scores.tokens)

    def _scalars(self) -> list[str]:
        return [name for name, kind in self._traces.fields.items() if not isinstance(kind, Tensor)]

    def layers(self, query: Query) -> Mapping[str, object] | None:
        return inside.layers_of(self._traces, query.number("number"))

    def attention(self, query: Query) -> Mapping[str, object] | None:
        return inside.attention_of(
            self._traces,
            query.number("number"),
            layer=query.number("layer"),
            head=query.text("head", "mean"),
            k=query.number("k", 4),
        )

    def evolution(self, query: Query) -> Mapping[str, object]:
        """Scores after each layer; `ready` is false while the nets are being restored."""
        nets = self._nets.soon()
        if nets is None and self._run is not None:
            return {"ready": False, "scores": {}}
        return {"ready": True, "scores": {} if nets is None else nets.of(query.number("number"))}
