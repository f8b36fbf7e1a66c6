"""What notebooks show of collections, splits and runs: tables of HTML, without scripts or styles of their own."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import cast

import numpy as np

from millstream.core.batches import fetch_batch
from millstream.core.collection import Collection
from millstream.core.record import Array

_RECORDS = 3
_SMALL = 4096  # bytes: fields of larger values are named, not read
_LONG = 60  # characters


def collection_html(collection: Collection) -> str:
    """What it is, and its first records: a row per field, a column per record."""
    numbers = np.arange(min(len(collection), _RECORDS))
    fields = collection.field_names if len(numbers) else []
    small = [name for name in fields if collection.sizes(numbers, [name]).max() <= _SMALL]
    rows: list[list[str]] = []
    for name, values in fetch_batch(collection, numbers, small).fields_by_record().items() if small else ():
        texts = list(map(_text, values))
        rows += [[name, *texts]] if any(texts) else []
    large = [name for name in fields if name not in small]
    notes = [f"larger fields: {', '.join(large)}"] if large else []
    return table_html(repr(collection).partition("\n")[0], ["field", *map(str, numbers)], rows, notes)


def table_html(title: str, names: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str] = ()) -> str:
    """A title, a table, and lines below it."""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    below = "".join(f"<div>{escape(note)}</div>" for note in notes)
    return f"<div><b>{escape(title)}</b></div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"


def _text(value: object) -> str:
    """Short; empty for what is missing."""
    if isinstance(value, np.ndarray) and cast(Array, value).ndim:
        array = cast(Array, value)
        return f"{array.dtype} {list(array.shape)}"
    text = (
        "" if value is None else f"{value:.4g}" if isinstance(value, float | np.floating) else str(cast(object, value))
    )
    return text if len(text) <= _LONG else text[:_LONG] + "..."
