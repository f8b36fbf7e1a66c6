"""Spans of an answer that are hallucinated -> a label per token, by the characters that each token covers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.core.rows import Row, read_rows
from millstream.errors import BadSource
from millstream.traces.llm import cells
from millstream.traces.llm.layouts import COLUMNS
from millstream.traces.store.format import RECORD_ID
from millstream.traces.store.traces import Traces

SPANS, OFFSETS, TOKEN_LABELS = "spans", "offsets", "token_labels"
TOKEN_SCORES = "token_scores"  # a column of predictions.parquet
NO_TEXT = -1  # the label of a token without characters of the answer, such as one that ends it; null in files
TokenLabels = NDArray[np.int8]
Span = tuple[int, int, str | None]
_AT_ONCE = 1024  # records
_IDS = (RECORD_ID, *COLUMNS["id"])
_LISTS = ("spans", "labels")  # the names of a column with all spans of an answer
_ARROW = pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32()), ("label", pa.string())]))


def label_tokens(spans: Iterable[Span], offsets: NDArray[np.integer]) -> TokenLabels:
    """1 for each token with a character in a span, 0 for others, -1 for tokens without characters.

    `offsets` [token, 2] are the first character of each token and the one after its last. A token with a part of a
    character covers all of it.

    >>> label_tokens([(4, 9, None)], np.array([[0, 3], [3, 6], [6, 9], [9, 9]])).tolist()
    [0, 1, 1, -1]
    """
    start, end = np.asarray(offsets, np.int64).reshape(-1, 2).T
    is_wrong = np.zeros(len(start), np.bool_)
    for first, last, _ in spans:
        is_wrong |= np.maximum(start, first) < np.minimum(end, last)
    return np.where(start < end, is_wrong, NO_TEXT).astype(np.int8)


def spans_table(traces: Traces, file: Path | None, ids: Sequence[str], answer: str | None) -> pa.Table:
    """`spans` and `token_labels` of every record, null where they are unknown, from a file or the records.

    Spans of characters that an answer does not have are refused: they are of another text.
    """
    texts = [None] * len(traces) if answer is None else traces.column(answer).to_pylist()
    found: list[list[Span] | None] = []
    source = traces.path if file is None else file
    for name, value, text in zip(ids, _given(traces, file, ids), texts, strict=True):
        try:
            parsed = cells.spans(value, cast("str | None", text))
        except ValueError as error:
            raise BadSource(f"{source}: record {name!r} {error}") from None
        found.append(
            None if parsed is None else sorted({one for one in parsed if one[0] < one[1]}, key=itemgetter(0, 1))
        )
    if ids and all(one is None for one in found):
        raise BadSource(f"{source}: no record has spans. Their ids are such as {ids[0]!r}")
    spans = [one and [dict(zip(("start", "end", "label"), span, strict=True)) for span in one] for one in found]
    return pa.table(
        {SPANS: pa.array(spans, _ARROW), TOKEN_LABELS: pa.array(as_lists(_labels(traces, found)), pa.list_(pa.int8()))}
    )


def as_token_labels(values: Sequence[int | None] | None) -> TokenLabels | None:
    """The labels of an answer as they are in labels.parquet."""
    return None if values is None else np.array([NO_TEXT if one is None else one for one in values], np.int8)


def as_lists(labels: Iterable[TokenLabels | None]) -> list[list[int | None] | None]:
    """The labels of answers as they are written to files."""
    return [None if one is None else [None if label == NO_TEXT else label for label in one.tolist()] for one in labels]


def _labels(traces: Traces, spans: Sequence[Sequence[Span] | None]) -> Iterator[TokenLabels | None]:
    for first in range(0, len(traces), _AT_ONCE):
        numbers = list(range(first, min(first + _AT_ONCE, len(traces))))
        offsets: Sequence[NDArray[np.int32] | None] = (
            cast("Sequence[NDArray[np.int32] | None]", traces.fetch(numbers, [OFFSETS])[OFFSETS])
            if OFFSETS in traces.fields
            else [None] * len(numbers)
        )
        for number, ranges in zip(numbers, offsets, strict=True):
            own = spans[number]
            yield None if own is None or ranges is None else label_tokens(own, ranges)


def _given(traces: Traces, file: Path | None, ids: Sequence[str]) -> Iterable[object]:
    """The spans of every record as they are written: a list, or its JSON text; None if unknown."""
    if file is None:
        return traces.column(SPANS).to_pylist()
    by_id = _read_spans(file)
    return [by_id.get(name) for name in ids]


def _read_spans(file: Path) -> Mapping[str, object]:
    """The spans by id: a column of lists, or a row per span with `start`, `end` and perhaps `label`.

    A row without a start says that nothing is wrong with the answer.
    """
    found: dict[str, object] = {}
    for number, row in enumerate(read_rows(file), 1):
        name, column = _first(row, _IDS), _first(row, _LISTS)
        if name is None or (column is None and not {"start", "end"} <= row.keys()):
            raise BadSource(
                f"{file}: row {number} has the columns {', '.join(map(str, row))}; expected {RECORD_ID} or id, and "
                "spans, or start and end"
            )
        key = str(row[name])
        if column is not None:
            if key in found:
                raise BadSource(f"{file}: row {number}: {name} {key!r} has spans already")
            found[key] = row[column]
        else:
            spans = cast("list[object]", found.setdefault(key, []))
            if row["start"] not in (None, ""):
                spans.append([_number(row["start"]), _number(row["end"]), row.get("label") or row.get("label_type")])
    return found


def _first(row: Row, names: Sequence[str]) -> str | None:
    return next((name for name in names if name in row), None)


def _number(value: object) -> object:
    """A whole number, in a CSV file a text."""
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else value
