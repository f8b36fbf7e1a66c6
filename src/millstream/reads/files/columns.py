"""Header columns, written to an index and read from it, encoded in bounded memory."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, Literal, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.core.collection import Numbers
from millstream.core.kernels import kernel
from millstream.core.record import Bytes
from millstream.errors import BadSource
from millstream.reads.files.bit_columns import BitColumnWriter
from millstream.reads.files.headers import HeaderColumn, Headers, Integers, Texts
from millstream.reads.files.sections import Column, Sections, SectionsWriter

LIMIT = 65536  # distinct values of a column with codes
_at = np.uint64  # an unsigned index needs no check for being negative
Kept = Literal["values", "codes", "length", "header"]
OnMismatch = Literal["error", "skip", "null"]
SHOWN = 5
T = TypeVar("T", bound=np.generic)
_KEPT: dict[str, Literal["values", "codes"]] = {"integer": "values", "text": "codes"}


@dataclass(frozen=True)
class Stored:
    """How a column is stored: its `values`, `codes` of them, as the sequence `length`, or only in the `header`."""

    name: str
    kind: Literal["integer", "text"]
    kept: Kept
    nullable: bool


class Mismatches:
    """Counts headers that do not match the regex, and keeps the first few as examples."""

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
                f"{self._path}: {self.count} of the first {first + len(starts)} headers do not match header_regex "
                f"{self._regex}, e.g. {'; '.join(self.examples)}. Change the regex, or set on_mismatch to 'skip' (skip "
                "these records) or 'null' (keep them without values)"
            )


class ColumnsWriter:
    """Parses headers as they are found, and writes their columns when their records end.

    A column of more than `distinct` distinct values has no codes.
    """

    def __init__(
        self, headers: Headers, names: tuple[str, ...], sections: SectionsWriter, *, distinct: int = LIMIT
    ) -> None:
        self._headers = headers
        self._columns = [
            _ColumnWriter(column, sections, distinct) for column in headers.columns if column.name in names
        ]

    def add(self, buffer: Bytes, starts: Numbers, ends: Numbers) -> NDArray[np.bool_]:
        """Parse the headers; returns which of them match."""
        parsed = self._headers.parse(buffer, starts, ends)
        for column in self._columns:
            column.add(parsed.columns[column.name])
        return parsed.matched

    def emit(self, lengths: Numbers, kept: NDArray[np.bool_] | None) -> None:
        """Write the columns of the oldest `len(lengths)` headers, whose records have ended: those that are `kept`."""
        for column in self._columns:
            column.emit(lengths, kept)

    def finish(self) -> list[Stored]:
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


class HeaderColumnReader:
    """A stored column of an index."""

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
                texts = [bytes(flat[a:b]).decode(errors="replace") for a, b in pairwise(ends)]
                self.distinct = pa.array(texts, pa.string())

    @property
    def needs_lengths(self) -> bool:
        return self.stored.kept == "length"

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
            values = self.distinct[values] if len(self.distinct) else values  # without distinct values all are null
        return pa.array(values, mask=mask)


class IntegerDictionary:
    """Distinct integers in order of first appearance.

    dictionary = IntegerDictionary()
    dictionary.encode(np.array([562, 9606, 562]), np.array([True, True, True]))  # array([0, 1, 0])
    dictionary.values  # array([562, 9606])
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.overflowed = False
        self._allocate(limit)

    @property
    def values(self) -> NDArray[np.int64]:
        """The value of each code; none after an overflow."""
        return self._values[: self._num_values].copy()

    def encode(self, values: NDArray[np.int64], valid: NDArray[np.bool_]) -> NDArray[np.int64] | None:
        """The code of each value, 0 where it is not valid; None once there are too many distinct values."""
        if self.overflowed:
            return None
        codes = np.empty(len(values), np.int64)
        count = int(_encode_integers(values, valid, self._values, self._slots, self._num_values, codes))
        if count < 0:
            self.overflowed = True
            self._allocate(0)
            return None
        self._num_values = count
        return codes

    def _allocate(self, limit: int) -> None:
        self._num_values = 0
        self._values = np.empty(limit, np.int64)
        self._slots = _empty_slots(limit)


class TextDictionary:
    """Distinct texts in order of first appearance, at most `limit` of them and `limit_bytes` in total."""

    def __init__(self, limit: int = LIMIT, *, limit_bytes: int = 4 << 20) -> None:
        self.limit = limit
        self.limit_bytes = limit_bytes
        self.overflowed = False
        self._allocate(limit, limit_bytes)

    @property
    def values(self) -> list[bytes]:
        """The text of each code; none after an overflow."""
        ends = self._ends[: self._num_values + 1].tolist()
        pool = self._pool[: ends[-1]].tobytes()
        return [pool[start:end] for start, end in pairwise(ends)]

    def encode(self, texts: Texts) -> NDArray[np.int64] | None:
        """The code of each text, 0 where it is not valid; None once there are too many distinct texts."""
        if self.overflowed:
            return None
        codes = np.empty(len(texts.starts), np.int64)
        known = self._ends, self._hashes, self._pool, self._slots
        count = int(_encode_texts(texts.flat, texts.starts, texts.ends, texts.valid, *known, self._num_values, codes))
        if count < 0:
            self.overflowed = True
            self._allocate(0, 0)
            return None
        self._num_values = count
        return codes

    def _allocate(self, limit: int, limit_bytes: int) -> None:
        self._num_values = 0
        self._ends = np.zeros(limit + 1, np.int64)  # text i is pool[ends[i]:ends[i + 1]]
        self._hashes = np.empty(limit, np.int64)
        self._pool = np.empty(limit_bytes, np.uint8)  # pages are only allocated as it fills
        self._slots = _empty_slots(limit)


class _ColumnWriter:
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
            codes = self._dictionary.encode(parsed)
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


def _empty_slots(limit: int) -> NDArray[np.int64]:
    """An open-addressing table of codes, at most half full; its size is a power of two."""
    return np.full(2 << max(limit, 1).bit_length(), -1, np.int64)


@kernel
def _encode_integers(
    values: NDArray[np.int64],
    valid: NDArray[np.bool_],
    known: NDArray[np.int64],
    slots: NDArray[np.int64],
    num_known: int,
    codes: NDArray[np.int64],
) -> int:
    """Fill `codes` and add new values to `known`; returns how many are known, or -1 if there is no room."""
    mask = len(slots) - 1
    for i in range(len(values)):
        if not valid[i]:
            codes[i] = 0
            continue
        value = int(values[i])
        # Products stay below 2**63: nothing overflows.
        mixed = (value ^ (value >> 31) ^ (value >> 62)) & 0x7FFFFFFF
        slot = (((mixed ^ (mixed >> 15)) * 0x9E3779B1) >> 16) & mask
        code = slots[_at(slot)]
        while code >= 0 and known[_at(code)] != value:
            slot = (slot + 1) & mask
            code = slots[_at(slot)]
        if code < 0:
            if num_known == len(known):
                return -1
            code = num_known
            slots[slot] = code
            known[code] = value
            num_known += 1
        codes[i] = code
    return num_known


@kernel
def _hash(flat: NDArray[np.uint8], start: int, size: int) -> int:
    """31 bits of hash, four bytes at a time; products stay below 2**63 here too."""
    hashed, p = size & 0x7FFFFFFF, start
    for _ in range(size >> 2):
        low = int(flat[_at(p)]) | int(flat[_at(p + 1)]) << 8
        high = int(flat[_at(p + 2)]) | int(flat[_at(p + 3)]) << 8
        product = (hashed ^ low ^ high << 16) * 0x5BD1E995
        hashed = (product ^ (product >> 24)) & 0x7FFFFFFF
        p += 4
    for _ in range(size & 3):
        product = (hashed ^ int(flat[_at(p)])) * 0x5BD1E995
        hashed = (product ^ (product >> 24)) & 0x7FFFFFFF
        p += 1
    return hashed


@kernel
def _encode_texts(
    flat: NDArray[np.uint8],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    valid: NDArray[np.bool_],
    known_ends: NDArray[np.int64],
    known_hashes: NDArray[np.int64],
    pool: NDArray[np.uint8],
    slots: NDArray[np.int64],
    num_known: int,
    codes: NDArray[np.int64],
) -> int:
    """Fill `codes` and add new texts to `pool`; returns how many are known, or -1 if there is no room."""
    mask = len(slots) - 1
    for i in range(len(starts)):
        if not valid[i]:
            codes[i] = 0
            continue
        start, size = int(starts[i]), int(ends[i] - starts[i])
        hashed = _hash(flat, start, size)
        slot = (hashed ^ (hashed >> 15)) & mask
        code = slots[_at(slot)]
        while code >= 0:
            first = known_ends[_at(code)]
            if known_hashes[_at(code)] == hashed and known_ends[_at(code + 1)] - first == size:
                same = 0
                while same < size and pool[_at(first + same)] == flat[_at(start + same)]:
                    same += 1
                if same == size:
                    break
            slot = (slot + 1) & mask
            code = slots[_at(slot)]
        if code < 0:
            end = int(known_ends[num_known])
            if num_known == len(known_hashes) or end + size > len(pool):
                return -1
            code = num_known
            slots[slot] = code
            known_hashes[code] = hashed
            for k in range(size):
                pool[end + k] = flat[start + k]
            num_known += 1
            known_ends[num_known] = end + size
        codes[i] = code
    return num_known
