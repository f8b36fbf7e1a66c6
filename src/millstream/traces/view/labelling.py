"""The page on which a person judges answers, one after another; and their verdicts by record number."""

import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.core.remote import is_url
from millstream.errors import BadSetting, BadSource
from millstream.traces.label import STATUS, UNLABELLED, alias_fields, answer_fields, references_of
from millstream.traces.store.labels import read_labels
from millstream.traces.store.manifest import HUMAN_VERDICTS
from millstream.traces.store.traces import Traces
from millstream.traces.verdicts import CHOICES, add_verdict, answer_hash, read_verdicts
from millstream.view import Query, View

_CONTEXTS = ("context", "contexts")


class HumanVerdicts:
    """The last verdict of a person on each record that has one; read again when the file has changed."""

    def __init__(self, traces: Traces) -> None:
        self._traces = traces
        self._file = traces.path / HUMAN_VERDICTS
        self._lock = threading.Lock()
        self._seen: object = None
        self._ids: list[str] = []
        self._found: Mapping[int, str] = {}

    def by_number(self) -> Mapping[int, str]:
        with self._lock:
            if (now := self._state()) != self._seen:
                self._found, self._seen = self._read(), now
            return self._found

    def _state(self) -> object:
        if is_url(self._file):
            return "an object is read once"
        try:
            stat = self._file.stat()
        except FileNotFoundError:
            return None
        return stat.st_mtime_ns, stat.st_size

    def _read(self) -> Mapping[int, str]:
        known = read_verdicts(self._traces.path)
        if not known:
            return {}
        self._ids = self._ids or [str(name) for name in self._traces.ids]
        judged = {name for name, _ in known}
        numbers = [number for number, name in enumerate(self._ids) if name in judged]
        answers = answers_of(self._traces, numbers)
        keys = {number: (self._ids[number], answer_hash(text)) for number, text in zip(numbers, answers, strict=True)}
        return {number: known[key] for number, key in keys.items() if key in known}


def answers_of(traces: Traces, numbers: list[int]) -> list[str | None]:
    name = next((name for name in answer_fields() if name in traces.fields), None)
    if name is None or not numbers:
        return [None] * len(numbers)
    return [None if text is None else str(text) for text in traces.fetch(numbers, [name])[name]]


def labelling_view_of(path: Path) -> View:
    """A page that shows answers one by one and appends the verdicts of a person to a file in the store."""
    if is_url(path):
        raise BadSetting(f"--label: verdicts are written into the store, and {path} is a URL. Copy it first")
    shown = _Labelling(path)
    return View(
        "label",
        "Label",
        {"about": shown.about, "answer": shown.answer},
        actions={"set": shown.set},
        static=Path(__file__).parent / "static",
    )


class _Labelling:
    """The answers of a store in a fixed order, and the verdicts on them."""

    def __init__(self, path: Path) -> None:
        self._traces = traces = Traces(path)
        if traces.id_field is None or not set(answer_fields()) & set(traces.fields):
            raise BadSource(f"{path}: has no answers to label, or no ids. Its fields are {', '.join(traces.fields)}")
        self._human = HumanVerdicts(traces)
        self._verdicts = _verdicts_of(traces)
        is_usable = np.ones(len(traces), np.bool_)
        if STATUS in traces.fields:
            is_usable = np.array([status == "ok" for status in traces.column(STATUS).to_pylist()], np.bool_)
        shuffled = np.random.default_rng(0).permutation(len(traces))
        self._orders = {"shuffled": shuffled[is_usable[shuffled]], "stored": np.flatnonzero(is_usable)}

    def about(self, query: Query) -> Mapping[str, object]:
        counts = Counter(str(self._verdicts[number]) for number in self._orders["stored"])
        return {"path": str(self._traces.path), "records": len(self._orders["stored"]), "verdicts": counts}

    def answer(self, query: Query) -> Mapping[str, object]:
        """The answer at a `place` of the order; else the first one without a verdict, after the place `after`."""
        numbers, human = self._chosen(query), self._human.by_number()
        is_done = np.isin(numbers, np.fromiter(human, np.int64, len(human)))
        progress = {"total": len(numbers), "done": int(is_done.sum())}
        if not len(numbers):
            return {**progress, "place": 0}
        if query.text("place"):
            place = min(query.number("place"), len(numbers) - 1)
        else:
            first = query.number("after") + 1 if query.text("after") else 0
            (free,) = np.nonzero(~is_done)
            later = free[free >= first]
            place = int(later[0] if later.size else free[0] if free.size else len(numbers) - 1)
        return {**progress, "place": place, **self._shown(int(numbers[place]), human)}

    def set(self, query: Query) -> Mapping[str, object]:
        """Append a verdict, or without one take it back; only if the record is still the one that was shown."""
        number, verdict = query.number("number"), query.text("verdict") or None
        shown = self._shown(number, {})
        if (shown["id"], shown["hash"]) != (query.text("id"), query.text("hash")):
            raise BadSource(f"record {number} is not what it was: the store has changed. Reload the page")
        if verdict not in (None, *CHOICES):
            raise BadSetting(f"verdict={verdict}: must be one of {', '.join(CHOICES)}")
        add_verdict(self._traces.path, str(shown["id"]), answers_of(self._traces, [number])[0], verdict)
        return {}

    def _chosen(self, query: Query) -> NDArray[np.int64]:
        order = query.text("order", "shuffled")
        if order not in self._orders:
            raise BadSetting(f"order={order}: must be one of {', '.join(self._orders)}")
        numbers, verdict = self._orders[order], query.text("verdict")
        return numbers[self._verdicts[numbers] == verdict] if verdict else numbers

    def _shown(self, number: int, human: Mapping[int, str]) -> dict[str, Any]:
        """What a person needs to judge an answer; not the verdict of a rule, which would influence the person."""
        traces = self._traces
        key = traces.id_field or ""
        names = dict.fromkeys([key, "question", *_CONTEXTS, "answer", *alias_fields()])
        known = [name for name in names if name in traces.fields]
        found = {name: column[0] for name, column in traces.fetch([number], known).items()}
        answer = answers_of(traces, [number])[0]
        references = references_of([found.get(name) for name in ("answer", *alias_fields())])
        return {
            "number": number,
            "id": str(found.get(key)),
            "question": found.get("question"),
            "context": "\n\n".join(references_of([found.get(name) for name in _CONTEXTS])),
            "references": references,
            "answer": answer,
            "hash": answer_hash(answer),
            "human": human.get(number),
        }


def _verdicts_of(traces: Traces) -> NDArray[np.object_]:
    """The verdict on each record in `labels.parquet`, if that was written for these records."""
    found = np.full(len(traces), UNLABELLED, object)
    table = read_labels(traces.path)
    if table is not None and table.num_rows == len(traces) and "verdict" in table.column_names:
        found[:] = [verdict or UNLABELLED for verdict in table.column("verdict").to_pylist()]
    return found
