"""The explorer view of a trace store: a list of its records, and the details of one record."""

import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from millstream.core.records import Tensor
from millstream.errors import MillstreamError
from millstream.traces.label import references_of
from millstream.traces.store.traces import Traces
from millstream.traces.view import inside
from millstream.traces.view.inside import LayerScores, TokenTexts, find_tokenizer
from millstream.traces.view.list import (
    MAX_PAGE_ROWS,
    PAGE_ROWS,
    Known,
    Labels,
    TextFields,
    TraceScores,
    TraceTexts,
    read_labels,
    read_scores,
    rows_of,
)
from millstream.training.folder import PREDICTIONS
from millstream.view.background import PATIENCE_S, Later
from millstream.view.view import Answer, Query, View

NETS_AFTER_S = 1.0  # after the first list: importing torch slows everything down
FIRST = ("lstm", "gnn", "gvae")  # detectors to list first


def traces_view(path: Path, *, run: Path | None = None, tokenizer: str | None = None) -> View:
    """A list to search, filter, sort and page through; for each record its tokens, layers, attention and scores."""
    latest = _Latest(path, run, tokenizer)
    answers: dict[str, Answer] = {
        "about": lambda query: latest.refresh().about(query),
        "list": lambda query: latest.shown.rows(query),
        "trace": lambda query: latest.shown.trace(query),
        "layers": lambda query: latest.shown.layers(query),
        "attention": lambda query: latest.shown.attention(query),
        "evolution": lambda query: latest.shown.evolution(query),
    }
    return View("traces", "Traces", answers)


class _Latest:
    """The store when a page was last opened, with its shards, labels and scores at that time."""

    def __init__(self, path: Path, run: Path | None, tokenizer: str | None) -> None:
        self._from = path, run, tokenizer
        self._lock = threading.Lock()  # several pages may be opened at once
        self._seen = self._modified()
        self.shown = _Shown(*self._from)

    def refresh(self) -> "_Shown":
        with self._lock:
            if (now := self._modified()) != self._seen:
                self.shown, self._seen = _Shown(*self._from), now
            return self.shown

    def _modified(self) -> list[int]:
        """Modification times of the store folder and the predictions; every file is published by rename."""
        path, run, _ = self._from
        files = [path, *([] if run is None else [run / PREDICTIONS])]
        return [file.stat().st_mtime_ns for file in files if file.exists()]


class _Shown:
    """A store, its labels and the scores of a run, in answer to the queries of the page."""

    def __init__(self, path: Path, run: Path | None, tokenizer: str | None) -> None:
        self._traces = Traces(path)
        self._run = run
        file = find_tokenizer(path, tokenizer)
        self._tokens = Later(lambda: TokenTexts(file))
        self._texts = Later(lambda: TraceTexts(self._traces))
        self._known = Later(self._load_known)
        self._nets = Later(self._restore_nets)
        for part in (self._tokens, self._texts, self._known):
            part.start()

    def _load_known(self) -> Known:
        """Labels and scores; what cannot be read becomes a problem on the page."""
        traces, problems = self._traces, list[str]()
        labels = Labels(traces, None)
        scores = TraceScores({}, np.full(len(traces), -1, np.int8), ())
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
        for row in rows:
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
            "labels": {} if known is None else known.labels.of(number),
            **self._verdict_and_score(known, number, ""),
            "tokens": inside.tokens_of(traces, number, self._tokens.wait()),
            "num_layers": inside.num_layers(traces, number),
        }

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
