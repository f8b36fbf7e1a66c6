"""Header columns, written to an index and read from it, encoded in bounded memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, cast, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millstream.core.collection import Numbers
from millstream.core.record import Bytes
from millstream.errors import BadSource
from millstream.reads.files.encodings import LIMIT, BitColumnWriter, IntegerDictionary, TextDictionary
from millstream.reads.files.headers import HeaderColumn, Headers, Integers, Parsed, Texts
from millstream.reads.files.records import Values
from millstream.reads.files.scanner import Scanned
from millstream.reads.files.sections import Column, Sections
from millstream.reads.files.sections_writer import SectionsWriter

Kept = Literal["values", "codes", "length", "header"]
OnMismatch = Literal["error", "skip", "null"]
SHOWN = 5
_AT_ONCE = 32768  # records, to amortise the cost of calls
T = TypeVar("T", bound=np.generic)
_KEPT: dict[str, Literal["values", "codes"]] = {"integer": "values", "text": "codes"}


@dataclass(frozen=True)
class Stored:
    """How a column is stored: its `values`, `codes` of them, as the sequence `length`, or only in the `header`."""

    name: str
    kind: Literal["integer", "text"]
    kept: Kept
    nullable: bool


def stored_columns(sections: Sections) -> list[Stored]:
    """The columns of an index or a pack."""
    columns = cast("list[dict[str, Any]]", sections.meta["columns"])
    return [Stored(*(column[name] for name in ("name", "kind", "kept", "nullable"))) for column in columns]


def outdated_column(sections: Sections) -> str | None:
    """The name of a column in a layout that only an older millstream reads, if there is one."""
    return next((column.name for column in stored_columns(sections) if column.kept not in get_args(Kept)), None)


class Mismatches:
    """Counts headers that do not match the regex, and keeps the first few as examples."""

    def __init__(self, regex: str, on_mismatch: OnMismatch) -> None:
        self._regex, self._on_mismatch = regex, on_mismatch
        self.count = 0
        self.examples: list[str] = []

    @property
    def skips(self) -> bool:
        return self._on_mismatch == "skip"

    def add(self, path: Path, found: Scanned, matched: NDArray[np.bool_], *, first: int) -> None:
        """Add headers of a file, the first of which has number `first`."""
        wrong = np.flatnonzero(~matched)
        for row in wrong[: SHOWN - len(self.examples)].tolist():
            header = found.buffer[found.header_starts[row] : found.header_ends[row]]
            self.examples.append(header.tobytes().decode(errors="replace"))
        self.count += len(wrong)
        if self._on_mismatch == "error" and len(wrong):
            raise BadSource(
                f"{path}: {self.count} of the first {first + len(matched)} headers do not match header_regex "
                f"{self._regex}, e.g. {'; '.join(self.examples)}. {self._remedy()}, or set on_mismatch to 'skip' (skip "
                "these records) or 'null' (keep them without values)"
            )

    def _remedy(self) -> str:
        try:  # RE2: no header takes it exponential time
            found: pa.Array = cast(Any, pc).match_substring_regex(pa.array(self.examples), self._regex)
            is_within = any(found.to_pylist())
        except pa.ArrowInvalid:  # RE2 cannot do this regex
            is_within = False
        if not is_within:
            return "Change the regex"
        return f"It has to match from the start of a header, but matches further on: use '.*?{self._regex}'"

    def report(self, notify: Callable[[str], None]) -> None:
        """Say how many headers did not match, if there were any."""
        if self.count:
            what, shown = "skipped" if self.skips else "kept without values", "; ".join(self.examples)
            notify(f"{self.count} headers do not match header_regex and were {what}, e.g. {shown}")

    def meta(self) -> dict[str, object]:
        return {"count": self.count, "examples": self.examples}


class ColumnsWriter:
    """Parses headers as they are found, and writes the columns in `names` when their records end.

    A column of more than `distinct` distinct values has no codes.
    """

    def __init__(
        self,
        regex: str | None,
        names: tuple[str, ...],
        sections: SectionsWriter,
        *,
        on_mismatch: OnMismatch,
        distinct: int = LIMIT,
    ) -> None:
        self.mismatches = Mismatches(regex or "", on_mismatch)
        self._headers = Headers(regex) if regex else None
        parsed = self._headers.columns if self._headers else ()
        self._columns = [ColumnWriter(column, sections, distinct) for column in parsed if column.name in names]
        self._waiting: list[tuple[Numbers, NDArray[np.bool_]]] = []  # what `emit` got
        self._num_waiting = 0

    def parse(self, path: Path, found: Scanned) -> Parsed | None:
        """Parse the headers found in a file; may be called in another thread, ahead of `add`."""
        if self._headers is None or not len(found.header_starts):
            return None
        try:
            return self._headers.parse(found.buffer, found.header_starts, found.header_ends)
        except BadSource as error:
            raise BadSource(f"{path}: {error}") from None

    def add(self, path: Path, found: Scanned, parsed: Parsed | None, *, first: int) -> NDArray[np.bool_]:
        """Add these headers of a file, the first of which has number `first`; returns which records to keep."""
        if parsed is None:
            return np.ones(len(found.header_starts), np.bool_)
        for column in self._columns:
            column.add(parsed.columns[column.name])
        self.mismatches.add(path, found, parsed.matched, first=first)
        return parsed.matched if self.mismatches.skips else np.ones_like(parsed.matched)

    def emit(self, lengths: Numbers, kept: NDArray[np.bool_] | None) -> None:
        """Write the columns of the oldest `len(lengths)` headers, whose records have ended; only `kept`, if given."""
        if self._columns:
            self._waiting.append((lengths, np.ones(len(lengths), np.bool_) if kept is None else kept))
            self._num_waiting += len(lengths)
            if self._num_waiting >= _AT_ONCE:
                self._emit()

    def _emit(self) -> None:
        lengths, kept = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        for column in self._columns:
            column.emit(lengths, None if kept.all() else kept)
        self._waiting.clear()
        self._num_waiting = 0

    def finish(self) -> list[Stored]:
        if self._waiting:
            self._emit()
        return [column.finish() for column in self._columns]


class Pending(Generic[T]):
    """Values whose record has not ended yet."""

    def __init__(self) -> None:
        self._parts: list[NDArray[T]] = []

    def add(self, values: NDArray[T]) -> None:
        self._parts.append(values)

    def take(self, count: int) -> NDArray[T]:
        values = np.concatenate(self._parts) if len(self._parts) != 1 else self._parts[0]
        self._parts = [values[count:]]
        return values[:count]


class Beside(Protocol):
    """A column that is not in the index or pack; `distinct` are the values of one of integers, if they are known."""

    @property
    def distinct(self) -> Numbers | None: ...
    @property
    def identity(self) -> object:
        """What changes when the values do, but neither the file nor the mapping."""
        ...

    def take(self, rows: Numbers) -> pa.Array: ...


class HeaderColumns:
    """The header columns of an index or a pack, by name, and those that were put beside them."""

    def __init__(self, sections: Sections) -> None:
        self._sections = sections
        self._beside: dict[str, Beside] = {}
        self._columns = {stored.name: _ColumnReader(stored, sections) for stored in stored_columns(sections)}
        self._rows: dict[tuple[str, ...], tuple[Values, list[_ColumnReader]]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._columns or name in self._beside

    def put(self, name: str, column: Beside) -> None:
        """Add a column, or replace it."""
        self._beside[name] = column

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*self._columns, *self._beside]))

    @property
    def identity(self) -> object:
        """What changes when the columns that were put here do; None without them."""
        return {name: column.identity for name, column in self._beside.items()} or None

    def kept(self, name: str) -> Kept:
        """How a column is stored."""
        return self._columns[name].stored.kept

    def is_indexed(self, name: str) -> bool:
        """Whether a column is stored by itself, not only in the headers."""
        return name in self._beside or self.kept(name) != "header"

    def distinct(self, name: str) -> Numbers | None:
        """The distinct values of an integer column, if they are stored."""
        if name in self._beside:
            return self._beside[name].distinct
        values = self._columns[name].distinct
        return None if isinstance(values, pa.Array) else values

    def take(
        self,
        name: str,
        rows: Numbers,
        *,
        lengths: Callable[[Numbers], Numbers],
        headers: Callable[[Numbers], tuple[Bytes, Numbers, Numbers]],
    ) -> pa.Array:
        """The values of these rows, from their sequence `lengths` or `headers` if they are not stored by themselves."""
        if name in self._beside:
            return self._beside[name].take(rows)
        if self.is_indexed(name):
            return self._columns[name].take(rows, lengths)
        parsed = self._regex.parse(*headers(rows)).columns[name]
        assert isinstance(parsed, Texts)  # integers are always stored
        text = parsed.flat.tobytes()
        spans = zip(parsed.starts.tolist(), parsed.ends.tolist(), parsed.valid.tolist(), strict=True)
        texts = [text[start:end].decode(errors="replace") if valid else None for start, end, valid in spans]
        return pa.array(texts, pa.string())

    def take_stored(self, name: str, rows: Numbers) -> pa.Array:
        """The values of these rows, of a column that is stored by itself."""
        return self._columns[name].take(rows, np.zeros_like)

    def one(self, row: int, names: tuple[str, ...], *, lengths: Callable[[Numbers], Numbers]) -> list[object]:
        """The values of one row, of columns that are stored by themselves; without an array per column."""
        if self._beside:
            rows = np.array([row], np.int64)
            return [
                self._beside[name].take(rows)[0].as_py()
                if name in self._beside
                else self._columns[name].take(rows, lengths)[0].as_py()
                for name in names
            ]
        found = self._rows.get(names)
        if found is None:
            readers = [self._columns[name] for name in names]
            stored_in = [column for reader in readers for column in reader.stored_in]
            found = self._rows[names] = Values(self._sections, stored_in), readers
        source, readers = found
        values = iter(source.one(row))
        return [reader.one(row, values, lengths) for reader in readers]

    @cached_property
    def _regex(self) -> Headers:
        return Headers(cast("dict[str, Any]", self._sections.meta["settings"])["header_regex"])


class _ColumnReader:
    def __init__(self, stored: Stored, sections: Sections) -> None:
        self.stored = stored
        self._sections = sections
        self._column: Column | None = None
        if stored.kept in ("values", "codes"):
            self._column = sections.column(f"{stored.name}.{stored.kept}")
        self._valid = sections.column(f"{stored.name}.valid") if stored.nullable else None

    @cached_property
    def distinct(self) -> Numbers | pa.Array | None:
        """The distinct values, if they are stored."""
        name = f"{self.stored.name}.distinct"
        if name not in self._sections:
            return None
        flat = self._sections.array(name)
        if self.stored.kind == "integer":
            return flat.view(np.int64)
        ends = self._sections.array(f"{self.stored.name}.ends", np.int64).tolist()
        texts = [bytes(flat[a:b]).decode(errors="replace") for a, b in pairwise(ends)]
        return pa.array(texts, pa.string())

    @cached_property
    def _distinct_values(self) -> list[object]:
        """The same as Python objects, for one value at a time."""
        assert self.distinct is not None
        return self.distinct.to_pylist() if isinstance(self.distinct, pa.Array) else self.distinct.tolist()

    @property
    def stored_in(self) -> Sequence[Column]:
        """The columns of the file with its values, and with whether they are valid."""
        return [column for column in (self._column, self._valid) if column is not None]

    def one(self, row: int, values: Iterator[int], lengths: Callable[[Numbers], Numbers]) -> object:
        """The value of a row, given what `stored_in` has there."""
        if self._column is None:
            value = int(lengths(np.array([row], np.int64))[0])
        else:
            value = next(values)
        if self._valid is not None and not next(values):
            return None
        if self.stored.kept != "codes":
            return value
        return self._distinct_values[value]

    def take(self, rows: Numbers, lengths: Callable[[Numbers], Numbers]) -> pa.Array:
        mask = None if self._valid is None else self._valid.take(rows) == 0
        if self._column is None:
            return pa.array(lengths(rows), mask=mask)
        values = self._column.take(rows)
        if self.stored.kept == "codes":
            assert self.distinct is not None
            if isinstance(self.distinct, pa.Array):
                codes = pa.array(values.astype(np.int32), mask=mask)
                return pa.DictionaryArray.from_arrays(codes, self.distinct)
            values = self.distinct[values] if len(self.distinct) else values  # without distinct values all are null
        return pa.array(values, mask=mask)


class ColumnWriter:
    """Takes the values of one column in order, and writes them once their records have ended."""

    def __init__(self, column: HeaderColumn, sections: SectionsWriter, distinct: int) -> None:
        self.name = column.name
        self.kind: Literal["integer", "text"] = column.kind
        self._sections = sections
        self._dictionary = IntegerDictionary(distinct) if column.kind == "integer" else TextDictionary(distinct)
        self._values = Pending[np.int64]()
        self._valid = Pending[np.bool_]()
        self._rows = 0
        self._is_length = column.kind == "integer"
        self._nullable = False

    def add(self, parsed: Integers | Texts) -> None:
        if isinstance(parsed, Integers):
            self._values.add(parsed.values)
            assert isinstance(self._dictionary, IntegerDictionary)
            self._dictionary.encode(parsed.values, parsed.valid)
        else:
            assert isinstance(self._dictionary, TextDictionary)
            codes = self._dictionary.encode(parsed.flat, parsed.starts, parsed.ends, parsed.valid)
            # With too many distinct values the codes are useless, also those already written.
            self._values.add(np.zeros(len(parsed.valid), np.int64) if codes is None else codes)
        self._valid.add(parsed.valid)

    def emit(self, lengths: Numbers, kept: NDArray[np.bool_] | None) -> None:
        count = len(lengths)
        chosen = slice(None) if kept is None else kept
        values, valid = self._values.take(count)[chosen], self._valid.take(count)[chosen]
        self._write_valid(valid)
        self._is_length = self._is_length and bool((values == lengths[chosen]).all())
        self._rows += len(values)
        if not (self.kind == "text" and self._dictionary.overflowed):
            self._sections.column(f"{self.name}.{_KEPT[self.kind]}").append(values)

    def finish(self) -> Stored:
        column = self._sections.column(f"{self.name}.{_KEPT[self.kind]}")
        column.finish()
        kept = self._choose(column)
        if kept == "codes" and isinstance(self._dictionary, IntegerDictionary):
            self._transcode(self._dictionary)
        if kept != _KEPT[self.kind]:
            self._sections.drop(f"{self.name}.{_KEPT[self.kind]}")
        if not self._dictionary.overflowed:
            _write_values(self._dictionary, self._sections, self.name)
        return Stored(self.name, self.kind, kept, self._nullable)

    def _choose(self, column: BitColumnWriter) -> Kept:
        if self.kind == "text":
            return "header" if self._dictionary.overflowed else "codes"
        if self._is_length and not self._nullable:
            return "length"
        if self._dictionary.overflowed:
            return "values"
        distinct = len(self._dictionary.values)
        with_codes = self._rows * (max(distinct - 1, 0).bit_length() + 2) + distinct * 64
        return "codes" if column.num_words * 64 > with_codes else "values"

    def _write_valid(self, valid: NDArray[np.bool_]) -> None:
        if not self._nullable and not valid.all():
            self._nullable = True
            self._sections.column(f"{self.name}.valid").append_many(1, self._rows)
        if self._nullable:
            self._sections.column(f"{self.name}.valid").append(valid.astype(np.int64))

    def _transcode(self, dictionary: IntegerDictionary) -> None:
        """Replace values by codes, which are smaller."""
        codes = self._sections.column(f"{self.name}.codes")
        valid = self._sections.read_back(f"{self.name}.valid") if self._nullable else None
        for values in self._sections.read_back(f"{self.name}.values"):
            found = dictionary.encode(values, np.ones(len(values), np.bool_) if valid is None else next(valid) > 0)
            assert found is not None
            codes.append(found)


def _write_values(dictionary: IntegerDictionary | TextDictionary, sections: SectionsWriter, name: str) -> None:
    if isinstance(dictionary, IntegerDictionary):
        sections.part(f"{name}.distinct").write(dictionary.values.astype(np.int64).tobytes())
        return
    values = [bytes(value) for value in dictionary.values]
    ends = np.cumsum([0, *(len(value) for value in values)]).astype(np.int64)
    sections.part(f"{name}.distinct").write(b"".join(values))
    sections.part(f"{name}.ends").write(ends.tobytes())
