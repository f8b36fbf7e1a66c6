"""The `labels.parquet` of a store, and how it is carried along to a store made from others.

Labels are joined by id, so they are carried along for the ids of the new store. `traces/label.py` makes them.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from millstream.core.config import parse_json
from millstream.core.console import plural, quoted
from millstream.core.files import publish
from millstream.core.lines import read_lines, to_lines
from millstream.core.tables import publish_table, read_table
from millstream.errors import BadSource
from millstream.traces.store.format import id_field
from millstream.traces.store.manifest import HUMAN_VERDICTS, LABELS, read_manifest
from millstream.traces.store.traces import Traces

_VERSION, _FINGERPRINT, _COUNTS = "millstream.label_version", "millstream.store_fingerprint", "millstream.counts"
_AGREEMENTS = "millstream.agreements"  # of other records


def read_labels(path: Path) -> pa.Table | None:
    """The labels of a store, verified; None if it has none. BadSource, with the command to run, if damaged."""
    file = path / LABELS
    if not file.exists():
        return None
    try:
        table = read_table(file)
    except (OSError, pa.ArrowException) as error:
        raise BadSource(f"{file}: damaged ({error}). Write it again: millstream label {quoted(path)}") from None
    if (key := id_field(read_manifest(path).fields)) not in table.column_names:
        raise BadSource(f"{file}: has no column {key!r}. Write it again: millstream label {quoted(path)}")
    return table


def carry_labels(sources: Sequence[Path], folder: Path, name: Path) -> str:
    """Write the labels of the records of the store in `folder`, made from `sources`; says what was done.

    `name` is what the store will be called. Without labels for all of it, none are written.
    """
    found = {source: read_labels(source) for source in sources}
    tables = [table for table in found.values() if table is not None]
    traces = Traces(folder)
    again = f"Run: millstream label {quoted(name)}"
    if not tables or not len(traces):
        return ""
    if without := [str(source) for source, table in found.items() if table is None and len(Traces(source))]:
        return f"labels not copied: {', '.join(without)} has none. {again}"
    abouts = [_about(table) for table in tables]
    if len({about.get(_VERSION) for about in abouts}) > 1 or len({tuple(t.schema.names) for t in tables}) > 1:
        return f"labels not copied: the stores were labelled by different rules. {again}"
    names, field = tables[0].schema.names, id_field(traces.fields)
    schema = tables[0].schema.with_metadata(None)
    try:
        table = pa.concat_tables([table.select(names).cast(schema) for table in tables])
    except (ValueError, pa.ArrowException) as error:
        return f"labels not copied: those of the stores have different types ({error}). {again}"
    values = table.column("verdict").to_pylist() if "verdict" in names else [None] * table.num_rows
    verdicts: dict[str, object] = {}
    places: dict[str, int] = {}
    for place, (key, verdict) in enumerate(zip(table.column(field).to_pylist(), values, strict=True)):
        places[str(key)] = place
        if verdicts.setdefault(str(key), verdict) != verdict:
            return f"labels not copied: the stores label {field} {key!r} differently. {again}"
    keys = [str(key) for key in traces.ids]
    if missing := sum(key not in places for key in keys):
        return f"labels not copied: {plural(missing, 'record')} without a label. {again}"
    table = table.take(np.array([places[key] for key in keys]))  # one row per record, in record order, as `label` does
    counts = Counter(str(verdicts[key] or "unlabelled") for key in keys)
    zeros = dict.fromkeys(parse_json(abouts[0].get(_COUNTS, "{}")), 0)
    about = {key: value for key, value in abouts[0].items() if key != _AGREEMENTS}
    about = {**about, _FINGERPRINT: traces.fingerprint, _COUNTS: json.dumps({**zeros, **counts})}
    publish_table(folder / LABELS, table.cast(table.schema.with_metadata(about)))
    return f"labels copied: {', '.join(f'{count:,} {verdict}' for verdict, count in counts.items())}"


def carry_verdicts(sources: Sequence[Path], folder: Path) -> None:
    """Write the verdicts of people on the records of the store in `folder`, made from `sources`."""
    found = [row for source in sources for row in read_lines(source / HUMAN_VERDICTS)[0]]
    if found:
        ids = set(map(str, Traces(folder).ids))
        publish(folder / HUMAN_VERDICTS, to_lines(row for row in found if str(row.get("id")) in ids))


def is_labelled(path: Path) -> bool:
    """Whether the labels of a store were made for the records that it has now."""
    table = read_labels(path)
    return table is not None and _about(table).get(_FINGERPRINT) == Traces(path).fingerprint


def _about(table: pa.Table) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
