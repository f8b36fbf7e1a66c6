"""All texts of a store, searched, filtered, sorted and turned over page by page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from millstream.dataset.labels import ALIASES, ANSWERS, LABELS_FILE, references_of
from millstream.errors import BadSetting, BadSource
from millstream.records import Tensor
from millstream.store.traces import Traces
from millstream.view.trace_scores import Floats, TraceScores
from millstream.view.view import Query

QUESTION, REFERENCE, STATUS = "question", "answer", "status"
UNLABELLED = "unlabelled"
PAGE_ROWS = 50
MOST_PAGE_ROWS = 500
_LETTERS, _REFERENCES = 400, 6  # of a row


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
        names = [name for name, kind in traces.fields.items() if not isinstance(kind, Tensor)]
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
    """A table of labels, by the ids of records: the verdict of each, and the scores it came from."""

    def __init__(self, traces: Traces, table: pa.Table | None) -> None:
        key = traces.default_key
        self.verdicts = np.full(len(traces), UNLABELLED, object)
        self._table = table
        self._rows: list[int | None] = [None] * len(traces)  # of the table, by record
        if table is None or key is None or key not in table.column_names:
            return
        ids, labelled = (
            [str(name) for name in column.to_pylist()] for column in (traces.column(key), table.column(key))
        )
        if ids == labelled:  # as `label` writes it: ids that are there twice have rows of their own
            self._rows = list(range(len(ids)))
        else:
            rows = {name: row for row, name in enumerate(labelled)}
            self._rows = [rows.get(name) for name in ids]
        if "verdict" in table.column_names:
            known = table.column("verdict").to_pylist()
            self.verdicts[:] = [UNLABELLED if row is None else known[row] or UNLABELLED for row in self._rows]

    def of(self, number: int) -> dict[str, Any]:
        """The whole row of a record."""
        row = self._rows[number]
        return {} if row is None or self._table is None else self._table.take(np.array([row])).to_pylist()[0]


def read_labels(traces: Traces) -> pa.Table | None:
    """labels.parquet of a store that has been labelled."""
    file = traces.path / LABELS_FILE
    try:
        return pq.ParquetFile(file).read() if file.exists() else None
    except (OSError, pa.ArrowException) as error:
        raise BadSource(f"{file}: is damaged ({error}). Next: millstream label {traces.path}") from None


@dataclass(frozen=True)
class Known:
    """What is known of all records, beside their texts."""

    labels: Labels
    scores: TraceScores
    troubles: Sequence[str] = ()  # why labels or scores are missing

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
        scores = self._scores(query.text("detector"))
        if sort == "mistaken":  # furthest from what the answer is
            shares, is_right, is_wrong = _shares(scores), self.verdicts == "right", self.verdicts == "wrong"
            scores = np.where(is_wrong, 1 - shares, np.where(is_right, shares, np.nan))
        scores = scores[numbers]
        order = np.argsort(scores if sort == "lowest" else -scores, kind="stable")  # NaN comes last
        return numbers[order]

    def _scores(self, detector: str) -> Floats:
        if detector not in self.scores.by_model:
            raise BadSetting(f"detector={detector}: there is {', '.join(self.scores.by_model) or 'none'}")
        return self.scores.by_model[detector]


def _shares(scores: Floats) -> Floats:
    """Scores from 0 to 1 as they are; others, such as lengths, as the share of records that have a lower one."""
    known = scores[~np.isnan(scores)]
    if not len(known) or (known.min() >= 0 and known.max() <= 1):
        return scores
    return np.where(np.isnan(scores), np.nan, np.searchsorted(np.sort(known), scores) / max(len(known) - 1, 1))


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
                "question": _head(value.get(fields.question or "")),
                "answer": _head(value.get(fields.answer or "")),
                "references": [
                    _head(text) for text in references_of([value[name] for name in fields.references])[:_REFERENCES]
                ],
                "status": value.get(fields.status or ""),
            }
        )
    return rows


def _head(text: Any) -> Any:
    """As much of a text as a row can show: answers may have thousands of words."""
    return f"{text[:_LETTERS]}…" if isinstance(text, str) and len(text) > _LETTERS else text


def _if(name: str, names: Sequence[str]) -> str | None:
    return name if name in names else None
