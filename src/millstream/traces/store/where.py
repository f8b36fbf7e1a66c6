"""`subset --where`: an SQL condition on the scalars and labels of a store -> numbers of records.

SQLite evaluates it on disk, so memory stays small. A condition is an expression over the columns and nothing else: no
SELECT, no function that makes large or random values, and a limit on time and memory.
"""

import json
import sqlite3
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from millstream.core.record import Tensor
from millstream.errors import StoreError
from millstream.traces.store.format import id_field
from millstream.traces.store.labels import read_labels
from millstream.traces.store.sidecar import load_sidecar
from millstream.traces.store.traces import Traces

LIMIT_S = 60.0
_HEAP_BYTES = 512 << 20  # of SQLite, in this process
_VALUE_BYTES = 64 << 20
_NAMES = """-> ->> abs ceil coalesce floor glob ifnull iif instr json_array_length json_extract json_type json_valid
length like lower ltrim max min nullif replace round rtrim sign substr substring trim typeof unicode upper"""
_FUNCTIONS = frozenset(_NAMES.split())
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: _VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 1 << 20,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}


def select_where(traces: Traces, where: str, *, limit_s: float = LIMIT_S) -> list[int]:
    """Numbers of the records that match an SQL condition on their scalars and labels.

    The columns are `number`, the scalar fields and, if the store is labelled, those of its labels, such as `verdict`;
    lists are JSON text.
    """
    fields = [name for name, kind in traces.fields.items() if not isinstance(kind, Tensor)]
    labels = _labels_by_id(traces, fields)
    names = [*fields, *labels]
    with tempfile.TemporaryDirectory() as folder:
        database = sqlite3.connect(Path(folder) / "scalars.sqlite", isolation_level=None)
        try:
            _fill(database, traces, fields, labels)
            allowed = _Allowed(time.monotonic() + limit_s)
            database.execute(f"PRAGMA hard_heap_limit = {_HEAP_BYTES}")
            for limit, value in _LIMITS.items():
                database.setlimit(limit, value)
            database.set_authorizer(allowed)
            database.set_progress_handler(allowed.is_late, 10_000)
            query = f"SELECT number FROM traces WHERE (\n{where}\n) ORDER BY number"
            try:
                return [number for (number,) in database.execute(query).fetchall()]
            except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
                reason = allowed.refused or error or "needs too much memory"
                if allowed.is_late():
                    reason = f"takes longer than {limit_s:g} s"
                shown = where if len(where) <= 200 else f"{where[:200]}..."
                raise StoreError(f"--where {shown!r}: {reason}. The columns are number, {', '.join(names)}") from None
        finally:
            database.close()


class _Allowed:
    """What SQLite may do for a condition: read the columns of one table, and call harmless functions, for some time."""

    def __init__(self, until: float) -> None:
        self.refused = ""
        self._until = until
        self._selects = 0

    def is_late(self) -> bool:
        return time.monotonic() > self._until

    def __call__(self, action: int, first: str | None, second: str | None, _: str | None, __: str | None) -> int:
        if action == sqlite3.SQLITE_SELECT:
            self._selects += 1
            if self._selects == 1:  # ours
                return sqlite3.SQLITE_OK
            self.refused = "must be an expression, without SELECT"
        elif action == sqlite3.SQLITE_READ:
            if first == "traces":
                return sqlite3.SQLITE_OK
            self.refused = f"cannot read {first}"
        elif action == sqlite3.SQLITE_FUNCTION:
            if second in _FUNCTIONS:
                return sqlite3.SQLITE_OK
            self.refused = f"no function {second}; must be one of {', '.join(sorted(_FUNCTIONS))}"
        else:
            self.refused = "must be an expression"
        return sqlite3.SQLITE_DENY


def _fill(
    database: sqlite3.Connection, traces: Traces, fields: Sequence[str], labels: Mapping[str, Mapping[str, object]]
) -> None:
    """Create the table `traces` with the scalars and labels of all records."""
    quoted = ['"' + name.replace('"', '""') + '"' for name in (*fields, *labels)]
    database.execute("PRAGMA journal_mode = OFF")
    database.execute("PRAGMA synchronous = OFF")
    try:
        database.execute(f"CREATE TABLE traces ({', '.join(['number INTEGER PRIMARY KEY', *quoted])})")
    except sqlite3.Error as error:
        raise StoreError(f"--where: {error}") from None
    database.execute("BEGIN")
    marks = ", ".join("?" * (len(quoted) + 1))
    number = 0
    for shard in traces.shards:
        table = load_sidecar(traces.path, shard, traces.fields).table(fields)
        columns = [table.column(name).to_pylist() for name in fields]
        if labels:
            ids = [str(name) for name in columns[fields.index(id_field(fields))]]
            columns += [[values.get(name) for name in ids] for values in labels.values()]
        rows = zip(range(number, number + shard.records), *columns, strict=True)
        database.executemany(f"INSERT INTO traces VALUES ({marks})", map(_sqlite_row, rows))
        number += shard.records
    database.execute("COMMIT")


def _labels_by_id(traces: Traces, fields: Sequence[str]) -> dict[str, dict[str, object]]:
    """The columns of the labels by name, each by id; a field of the same name (in any case) wins."""
    table = read_labels(traces.path) if id_field(fields) in fields else None
    if table is None:
        return {}
    ids = [str(name) for name in table.column(id_field(fields)).to_pylist()]
    taken = {name.lower() for name in (*fields, "number")}
    names = [name for name in table.column_names if name.lower() not in taken]
    return {name: dict(zip(ids, table.column(name).to_pylist(), strict=True)) for name in names}


def _sqlite_row(row: Sequence[object]) -> tuple[object, ...]:
    plain = (type(None), bool, int, float, str, bytes)
    row = tuple(float(v) if isinstance(v, int) and v >= 2**63 else v for v in row)
    return tuple(v if isinstance(v, plain) else json.dumps(v, default=str, ensure_ascii=False) for v in row)
