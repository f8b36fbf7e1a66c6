"""Spans of an answer that are hallucinated -> a label per token, by the characters that each token covers."""

from collections.abc import Iterable, Mapping, Sequence
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
WHOLE = "generated_text"  # of which the answer may be a part
_AT_ONCE = 1024  # records
_IDS = (RECORD_ID, *COLUMNS["id"])
_NAMES = ("start", "end", "label")
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

    A file has characters of `generated_answer`. A record has those of the whole given text; if only a part of it was
    taken as the answer, its spans are moved there. Spans of characters that a text does not have are refused.
    """
    by_id = None if file is None else _read_spans(file)
    whole = WHOLE if file is None and answer is not None and WHOLE in traces.fields else None
    names = [name for name in (answer, whole, OFFSETS, *([] if by_id else [SPANS])) if name in traces.fields]
    spans: list[list[dict[str, object]] | None] = []
    labels: list[TokenLabels | None] = []
    for first in range(0, len(traces), _AT_ONCE):
        numbers = range(first, min(first + _AT_ONCE, len(traces)))
        columns = traces.fetch(list(numbers), names)
        cell: dict[str | None, Sequence[object]] = {name: cast("Sequence[object]", columns[name]) for name in names}
        nothing = [None] * len(numbers)
        for row, number in enumerate(numbers):
            value = cell[SPANS][row] if by_id is None else by_id.get(ids[number])
            text, all_of_it = (cast("str | None", cell.get(name, nothing)[row]) for name in (answer, whole))
            try:
                parsed = cells.spans(value, all_of_it or text)
            except ValueError as error:
                raise BadSource(f"{file or traces.path}: record {ids[number]!r} {error}") from None
            own = None if parsed is None else _within(parsed, text, all_of_it)
            ranges = cast("NDArray[np.int32] | None", cell.get(OFFSETS, nothing)[row])
            labels.append(None if own is None or ranges is None else label_tokens(own, ranges))
            named: list[dict[str, object]] = [dict(zip(_NAMES, one, strict=True)) for one in own or ()]
            spans.append(None if own is None else named)
    if ids and all(one is None for one in spans):
        raise BadSource(f"{file or traces.path}: no record has spans. Their ids are such as {ids[0]!r}")
    return pa.table({SPANS: pa.array(spans, _ARROW), TOKEN_LABELS: pa.array(as_lists(labels), pa.list_(pa.int8()))})


def _within(spans: Iterable[Span], text: str | None, whole: str | None) -> list[Span] | None:
    """Spans of `whole` in its part `text`, sorted; None if that part may be in several places."""
    start, size = 0, 1 << 62
    if text is not None and whole is not None and text != whole:
        if not text or whole.count(text) != 1:
            return None
        start, size = whole.index(text), len(text)
    moved = {(max(first - start, 0), min(last - start, size), label) for first, last, label in spans}
    return sorted((one for one in moved if one[0] < one[1]), key=itemgetter(0, 1))


def as_token_labels(values: Sequence[int | None] | None) -> TokenLabels | None:
    """The labels of an answer as they are in labels.parquet."""
    return None if values is None else np.array([NO_TEXT if one is None else one for one in values], np.int8)


def as_lists(labels: Iterable[TokenLabels | None]) -> list[list[int | None] | None]:
    """The labels of answers as they are written to files."""
    return [None if one is None else [None if label == NO_TEXT else label for label in one.tolist()] for one in labels]


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
