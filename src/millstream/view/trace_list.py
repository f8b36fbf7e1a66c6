"""All texts of a store, searched, filtered, sorted and turned over page by page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from millstream.dataset.labels import ALIASES, ANSWERS, LABELS_FILE
from millstream.errors import BadSetting
from millstream.store.traces import Traces
from millstream.view.trace_scores import Floats, TraceScores
from millstream.view.view import Query

QUESTION, REFERENCE, STATUS = "question", "answer", "status"
UNLABELLED = "unlabelled"
PAGE_ROWS = 50
MOST_PAGE_ROWS = 500


@dataclass(frozen=True)
class TextFields:
    """Which fields of a store hold what the list shows."""

    key: str | None
    question: str | None
    answer: str | None
    references: Sequence[str]
    status: str | None

    @staticmethod
    def of(traces: Traces) -> "TextFields":
        names = traces.field_names
        known = [name for name in (REFERENCE, *ALIASES) if name in names]
        answer = next((name for name in ANSWERS if name in names), None)
        references = list(dict.fromkeys(known))
        return TextFields(traces.default_key, _if(QUESTION, names), answer, references, _if(STATUS, names))

    @property
    def names(self) -> list[str]:
        single = (self.key, self.question, self.answer, self.status)
        return [*dict.fromkeys(name for name in (*single, *self.references) if name is not None)]


class TraceTexts:
    """One text of each record to search in: question, answer, references and id, in small letters."""

    def __init__(self, traces: Traces) -> None:
        fields = TextFields.of(traces)
        names = [name for name in fields.names if name != fields.status]
        columns = [traces.column(name).to_pylist() for name in names]
        self._texts = ["\n".join(references_of(values)).lower() for values in zip(*columns, strict=True)]
        self._texts = self._texts if columns else [""] * len(traces)

    def having(self, words: str) -> NDArray[np.bool_]:
        """Which records have every one of the words."""
        found = np.ones(len(self._texts), np.bool_)
        for word in words.lower().split():
            found &= np.fromiter((word in text for text in self._texts), np.bool_, len(self._texts))
        return found


class Labels:
    """labels.parquet, by the ids of records: the verdict of each, and the scores it came from."""

    def __init__(self, traces: Traces) -> None:
        file, key = traces.path / LABELS_FILE, traces.default_key
        self.verdicts = np.full(len(traces), UNLABELLED, object)
        self._rows: dict[str, int] = {}
        if key is None or not file.exists():
            return
        self._table = pq.ParquetFile(file).read()
        if key not in self._table.column_names:
            return
        self._rows = {str(name): row for row, name in enumerate(self._table.column(key).to_pylist())}
        if "verdict" in self._table.column_names:
            known = self._table.column("verdict").to_pylist()
            rows = [self._rows.get(str(name)) for name in traces.column(key).to_pylist()]
            self.verdicts[:] = [UNLABELLED if row is None else known[row] or UNLABELLED for row in rows]

    def of(self, key: object) -> dict[str, Any]:
        """The whole row of a record."""
        row = self._rows.get(str(key))
        return {} if row is None else self._table.take(np.array([row])).to_pylist()[0]


@dataclass(frozen=True)
class Known:
    """What is known of all records, beside their texts."""

    labels: Labels
    scores: TraceScores

    @property
    def verdicts(self) -> NDArray[np.object_]:
        return self.labels.verdicts

    def chosen(self, query: Query, texts: TraceTexts | None) -> NDArray[np.int64]:
        """The numbers of the records that a page asks for, in its order."""
        found = np.ones(len(self.verdicts), np.bool_) if texts is None else texts.having(query.text("q"))
        if verdict := query.text("verdict"):
            found &= self.verdicts == verdict
        if part := query.text("part"):
            names = list(self.scores.part_names)
            found &= self.scores.parts == (names.index(part) if part in names else -2)
        numbers = np.flatnonzero(found)
        sort = query.text("sort", "number")
        if sort not in ("number", "highest", "lowest", "mistaken"):
            raise BadSetting(f"sort={sort}: there is number, highest, lowest and mistaken")
        if sort == "number":
            return numbers
        scores = self._scores(query.text("detector"))[numbers]
        if sort == "mistaken":  # furthest from what the answer is
            wrong = self.verdicts[numbers]
            scores = np.where(wrong == "wrong", 1 - scores, np.where(wrong == "right", scores, np.nan))
        order = np.argsort(scores if sort == "lowest" else -scores, kind="stable")  # NaN comes last
        return numbers[order]

    def _scores(self, detector: str) -> Floats:
        if detector not in self.scores.by_model:
            raise BadSetting(f"detector={detector}: there is {', '.join(self.scores.by_model) or 'none'}")
        return self.scores.by_model[detector]


def rows_of(traces: Traces, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """What the list shows of these records; reads nothing of any other shard."""
    fields = TextFields.of(traces)
    found = traces.fetch(list(numbers), fields.names) if fields.names and len(numbers) else {}
    rows: list[dict[str, Any]] = []
    for place, number in enumerate(numbers):
        value: dict[str, Any] = {name: column[place] for name, column in found.items()}
        rows.append(
            {
                "number": int(number),
                "id": value.get(fields.key or ""),
                "question": value.get(fields.question or ""),
                "answer": value.get(fields.answer or ""),
                "references": references_of([value[name] for name in fields.references]),
                "status": value.get(fields.status or ""),
            }
        )
    return rows


def references_of(values: Sequence[object]) -> list[str]:
    """All texts of an answer and its aliases, each once."""
    flat: list[object] = []
    for value in values:
        flat += cast("list[object]", value) if isinstance(value, list) else [value]
    return list(dict.fromkeys(str(text) for text in flat if text not in (None, "")))


def _if(name: str, names: Sequence[str]) -> str | None:
    return name if name in names else None
