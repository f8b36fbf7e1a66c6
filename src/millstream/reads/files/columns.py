"""Columns pulled from headers, on their way into an index and out of it.

An integer column is packed as it is or as codes of its distinct values, whichever is smaller; one that equals the
sequence's length in every record, or follows from another column (the taxon of a class), takes no space. A text column
is codes of its distinct values; one with too many of them (a read's own name) stays in the data file and is read from
the header when asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, Literal, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.errors import BadSource
from millstream.records import Bytes
from millstream.source.dictionary import IntegerDictionary, TextDictionary
from millstream.source.headers import HeaderColumn, Headers, Integers, Texts
from millstream.store.packed import Numbers, PackedWriter
from millstream.store.sections import Column, Sections, SectionsWriter

Kept = Literal["values", "codes", "length", "follows", "header"]
OnMismatch = Literal["error", "skip", "null"]
SHOWN = 5
T = TypeVar("T", bound=np.generic)
_KEPT: dict[str, Literal["values", "codes"]] = {"integer": "values", "text": "codes"}


@dataclass(frozen=True)
class Stored:
    """How a column is kept: `values`, `codes`, the sequence's `length`, what `follows` from `of`, the `header` only."""

    name: str
    kind: Literal["integer", "text"]
    kept: Kept
    nullable: bool
    of: str | None = None


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
        integers = [column for column in self._columns if column.kind == "integer"]
        self._follows = [_Follows(one, other) for index, one in enumerate(integers) for other in integers[index + 1 :]]

    def add(self, buffer: Bytes, starts: Numbers, ends: Numbers) -> NDArray[np.bool_]:
        """Parse the headers; which of them fit."""
        parsed = self._headers.parse(buffer, starts, ends)
        for column in self._columns:
            column.add(parsed.columns[column.name])
        self._follows = [follows for follows in self._follows if follows.holds()]
        return parsed.matched

    def emit(self, lengths: Numbers, kept: NDArray[np.bool_] | None) -> None:
        """The records of the oldest `len(lengths)` headers have ended; write those that are kept."""
        for column in self._columns:
            column.emit(lengths, kept)

    def finish(self) -> list[Stored]:
        follows = {follows.other.name: follows for follows in reversed(self._follows)}
        return [column.finish(follows.get(column.name)) for column in self._columns]


class _ColumnWriter:
    def __init__(self, column: HeaderColumn, sections: SectionsWriter) -> None:
        self.name = column.name
        self.kind: Literal["integer", "text"] = column.kind
        self._sections = sections
        self._dictionary = IntegerDictionary() if column.kind == "integer" else TextDictionary()
        self._values = Pending[np.int64]()
        self._valid = Pending[np.bool_]()
        self.latest: tuple[Integers, Numbers | None] | None = None  # values and codes of the last headers
        self._rows = 0
        self._is_length = column.kind == "integer"
        self._nullable = False

    def add(self, parsed: Integers | Texts) -> None:
        if isinstance(parsed, Integers):
            self._values.add(parsed.values)
            assert isinstance(self._dictionary, IntegerDictionary)
            self.latest = parsed, self._dictionary.encode(parsed.values, parsed.valid)
        else:
            assert isinstance(self._dictionary, TextDictionary)
            codes = self._dictionary.encode(parsed)
            # Once there are too many distinct values the codes are worth nothing, also those already written.
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

    def finish(self, follows: "_Follows | None") -> Stored:
        column = self._sections.column(f"{self.name}.{_KEPT[self.kind]}")
        column.finish()
        kept = self._choose(column, follows)
        if kept == "codes" and isinstance(self._dictionary, IntegerDictionary):
            self._transcode(self._dictionary)
        if kept == "follows" and follows:
            self._sections.part(f"{self.name}.follows").write(follows.table.tobytes())
        if kept != _KEPT[self.kind]:
            self._sections.drop(f"{self.name}.{_KEPT[self.kind]}")
        if not self._dictionary.overflowed:
            _write_values(self._dictionary, self._sections, self.name)
        return Stored(self.name, self.kind, kept, self._nullable, follows.one.name if follows else None)

    def _choose(self, column: PackedWriter, follows: "_Follows | None") -> Kept:
        if self.kind == "text":
            return "header" if self._dictionary.overflowed else "codes"
        if self._is_length and not self._nullable:
            return "length"
        if follows:
            return "follows"
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
        """Replace values by codes of the distinct values, which are smaller."""
        codes = self._sections.column(f"{self.name}.codes")
        valid = self._sections.read_back(f"{self.name}.valid") if self._nullable else None
        for values in self._sections.read_back(f"{self.name}.values"):
            found = dictionary.encode(values, np.ones(len(values), np.bool_) if valid is None else next(valid) > 0)
            assert found is not None
            codes.append(found)


class _Follows:
    """Whether one column's value decides another's, as long as it does."""

    def __init__(self, one: _ColumnWriter, other: _ColumnWriter) -> None:
        self.one, self.other = one, other
        self._table = np.zeros(0, np.int64)

    def holds(self) -> bool:
        """Look at the last headers."""
        if self.one.latest is None or self.other.latest is None:
            return False
        (first, codes), (second, _) = self.one.latest, self.other.latest
        if codes is None or not len(codes) or not first.valid.all() or not second.valid.all():
            return codes is not None and not len(codes)
        known = len(self._table)
        self._table = np.append(self._table, np.zeros(max(int(codes.max()) + 1 - known, 0), np.int64))
        new = codes >= known
        self._table[codes[new]] = second.values[new]
        return bool((self._table[codes] == second.values).all())

    @property
    def table(self) -> Numbers:
        """The other's value for each of the one's distinct values."""
        return self._table


class Pending(Generic[T]):
    """Values that wait for their record to end."""

    def __init__(self) -> None:
        self._parts: list[NDArray[T]] = []

    def add(self, values: NDArray[T]) -> None:
        self._parts.append(values)

    def take(self, count: int) -> NDArray[T]:
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

    def __init__(self, stored: Stored, sections: Sections, others: "Mapping[str, HeaderColumnReader]") -> None:
        self.stored = stored
        self._column: Column | None = None
        self._of = others[stored.of] if stored.kept == "follows" and stored.of else None
        if self._of is not None:
            self._follows = sections.array(f"{stored.name}.follows", np.int64)
            assert isinstance(self._of.distinct, np.ndarray)
            self._order = np.argsort(self._of.distinct)
            self._sorted = self._of.distinct[self._order]
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
                texts = [bytes(flat[a:b]).decode(errors="replace") for a, b in pairwise(ends)]
                self.distinct = pa.array(texts, pa.string())

    @property
    def needs_lengths(self) -> bool:
        return self._of.needs_lengths if self._of else self.stored.kept == "length"

    def take(self, rows: Numbers, lengths: Numbers) -> pa.Array:
        """The values of these rows, whose sequence lengths are known, as an Arrow array."""
        if self._of is not None:  # neither has a null
            keys = np.asarray(self._of.take(rows, lengths), np.int64)
            return pa.array(self._follows[self._order[np.searchsorted(self._sorted, keys)]])
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
