"""Columns pulled from headers, on their way into an index and out of it.

An integer column is packed as it is or as codes of its distinct values, whichever is smaller; one that equals the
sequence's length in every record is not stored at all. A text column is codes of its distinct values; one with too many
of them (a read's own name) stays in the data file and is read from the header when asked for.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.errors import BadSource
from millstream.records import Bytes
from millstream.source.dictionary import IntegerDictionary, TextDictionary
from millstream.source.headers import HeaderColumn, Headers, Integers, Texts
from millstream.store.packed import Numbers
from millstream.store.sections import Column, Sections, SectionsWriter

OnMismatch = Literal["error", "skip", "null"]
SHOWN = 5


@dataclass(frozen=True)
class Stored:
    """How a column is kept: as `values`, as `codes`, as the sequence's `length`, or in the `header` only."""

    name: str
    kind: Literal["integer", "text"]
    kept: Literal["values", "codes", "length", "header"]
    nullable: bool


class Mismatches:
    """Headers that the regex does not fit: counted, and the first few shown."""

    def __init__(self, regex: str, on_mismatch: OnMismatch, path: object) -> None:
        self._regex, self._on_mismatch, self._path = regex, on_mismatch, path
        self.count = 0
        self.examples: list[str] = []

    def add(self, buffer: Bytes, starts: Numbers, ends: Numbers, wrong: Numbers, first: int) -> None:
        for row in wrong[: SHOWN - len(self.examples)].tolist():
            self.examples.append(bytes(buffer[starts[row] : ends[row]]).decode(errors="replace"))
        self.count += len(wrong)
        if self._on_mismatch == "error":
            raise BadSource(
                f"{self._path}: {self.count} of the first {first + len(starts)} headers do not fit header_regex "
                f"{self._regex}, as: {'; '.join(self.examples)}. Change the regex, or say on_mismatch='skip' (leave "
                "such records out) or 'null' (keep them without values)"
            )


class ColumnsWriter:
    """Takes headers as they are found, and writes their columns when their records end."""

    def __init__(self, headers: Headers, names: tuple[str, ...], sections: SectionsWriter) -> None:
        self._headers = headers
        self._columns = [_ColumnWriter(column, sections) for column in headers.columns if column.name in names]
        self._matched: list[NDArray[np.bool_]] = []

    def add(self, buffer: Bytes, starts: Numbers, ends: Numbers) -> NDArray[np.bool_]:
        """Parse the headers; which of them fit."""
        parsed = self._headers.parse(buffer, starts, ends)
        for column in self._columns:
            column.add(parsed.columns[column.name])
        return parsed.matched

    def emit(self, lengths: Numbers, kept: NDArray[np.bool_] | None) -> None:
        """The records of the oldest `len(lengths)` headers have ended; write those that are kept."""
        for column in self._columns:
            column.emit(lengths, kept)

    def finish(self) -> list[Stored]:
        return [column.finish() for column in self._columns]


class _ColumnWriter:
    def __init__(self, column: HeaderColumn, sections: SectionsWriter) -> None:
        self.name = column.name
        self._kind = column.kind
        self._sections = sections
        self._dictionary = IntegerDictionary() if column.kind == "integer" else TextDictionary()
        self._values = _Pending()
        self._codes = _Pending()
        self._valid = _Pending()
        self._is_length = column.kind == "integer"
        self._nullable = False

    def add(self, parsed: Integers | Texts) -> None:
        if isinstance(parsed, Integers):
            self._values.add(np.where(parsed.valid, parsed.values, 0))
            assert isinstance(self._dictionary, IntegerDictionary)
            codes = self._dictionary.encode(parsed.values, parsed.valid)
        else:
            assert isinstance(self._dictionary, TextDictionary)
            codes = self._dictionary.encode(parsed)
        # Once there are too many distinct values the codes are worth nothing, also those already written.
        self._codes.add(np.zeros(len(parsed.valid), np.int64) if codes is None else codes)
        self._valid.add(parsed.valid.astype(np.int64))

    def emit(self, lengths: Numbers, kept: NDArray[np.bool_] | None) -> None:
        count = len(lengths)
        chosen = slice(None) if kept is None else kept
        valid = self._valid.take(count)[chosen]
        self._column("valid").append(valid)
        self._nullable |= not valid.all()
        self._column("codes").append(self._codes.take(count)[chosen])
        if self._kind == "integer":
            values = self._values.take(count)[chosen]
            self._is_length = self._is_length and bool((values == lengths[chosen]).all())
            self._column("values").append(values)

    def finish(self) -> Stored:
        for kind in ("valid", "codes") + (("values",) if self._kind == "integer" else ()):
            self._column(kind)  # also of a file without records
        kept = self._choose()
        for kind in ("values", "codes"):
            if kind != kept and (kind == "codes" or self._kind == "integer"):
                self._sections.drop(f"{self.name}.{kind}")
        if not self._nullable:
            self._sections.drop(f"{self.name}.valid")
        if not self._dictionary.overflowed:
            _write_values(self._dictionary, self._sections, self.name)
        return Stored(self.name, self._kind, kept, self._nullable)

    def _choose(self) -> Literal["values", "codes", "length", "header"]:
        if self._kind == "text":
            return "header" if self._dictionary.overflowed else "codes"
        if self._is_length and not self._nullable:
            return "length"
        if self._dictionary.overflowed:
            return "values"
        return "codes" if self._column("codes").num_words < self._column("values").num_words else "values"

    def _column(self, kind: str):  # pyright: ignore
        return self._sections.column(f"{self.name}.{kind}")


class _Pending:
    """Values that wait for their record to end."""

    def __init__(self) -> None:
        self._parts: list[Numbers] = []

    def add(self, values: Numbers) -> None:
        self._parts.append(values)

    def take(self, count: int) -> Numbers:
        values = np.concatenate(self._parts) if len(self._parts) != 1 else self._parts[0]
        self._parts = [values[count:]]
        return values[:count]


def _write_values(dictionary: IntegerDictionary | TextDictionary, sections: SectionsWriter, name: str) -> None:
    if isinstance(dictionary, IntegerDictionary):
        sections.part(f"{name}.distinct").write(dictionary.values.astype(np.int64).tobytes())
        return
    values = [bytes(value) for value in dictionary.values]
    ends = np.cumsum([0, *(len(value) for value in values)]).astype(np.int64)
    sections.part(f"{name}.distinct").write(b"".join(values))
    sections.part(f"{name}.ends").write(ends.tobytes())


class HeaderColumnReader:
    """A column of an index that is kept there."""

    def __init__(self, stored: Stored, sections: Sections) -> None:
        self.stored = stored
        self._column: Column | None = None
        if stored.kept in ("values", "codes"):
            self._column = sections.column(f"{stored.name}.{stored.kept}")
        self._valid = sections.column(f"{stored.name}.valid") if stored.nullable else None
        self.distinct: Numbers | pa.Array | None = None
        if f"{stored.name}.distinct" in sections:
            flat = sections.array(f"{stored.name}.distinct")
            if stored.kind == "integer":
                self.distinct = flat.view(np.int64)
            else:
                ends = sections.array(f"{stored.name}.ends", np.int64).tolist()
                texts = [bytes(flat[a:b]).decode(errors="replace") for a, b in zip(ends[:-1], ends[1:], strict=True)]
                self.distinct = pa.array(texts, pa.string())

    def take(self, rows: Numbers, lengths: Numbers) -> pa.Array:
        """The values of these rows, whose sequence lengths are known, as an Arrow array."""
        mask = None if self._valid is None else self._valid.take(rows) == 0
        if self._column is None:
            return pa.array(lengths, mask=mask)
        values = self._column.take(rows)
        if self.stored.kept == "codes":
            assert self.distinct is not None
            if isinstance(self.distinct, pa.Array):
                codes = pa.array(values.astype(np.int32), mask=mask)
                return pa.DictionaryArray.from_arrays(codes, self.distinct)
            values = self.distinct[values] if len(self.distinct) else values  # no distinct value: all are null
        return pa.array(values, mask=mask)
