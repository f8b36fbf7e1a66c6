"""Headers of a read file -> typed columns, by a regex with named groups. Knows bytes and regexes, not files.

A header matches when `re.match(regex, header, re.ASCII)` does: `\\d`, `\\w` and `\\s` are ASCII, and without `$` a
prefix is enough. Text is UTF-8; other bytes are preserved (`surrogateescape`). Headers have no newline.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from millstream.core.collection import Numbers
from millstream.core.record import Bytes
from millstream.errors import BadSource
from millstream.reads.files.header_regex import (
    Group,
    ambiguities,
    inside,
    is_digits,
    is_same_in_re2,
    re2_regex,
    required_groups,
    tree_of,
)
from millstream.reads.files.header_shape import Shape

_MAX_AMBIGUITIES = 3  # the time per header is up to its length to the power of this
EXAMPLE = r"^lbl\|(?P<class_id>\d+)\|(?P<tax_id>\d+)?\|(?P<name>[^/\s]+)(?:/(?P<mate>\d+))?$"


@dataclass(frozen=True)
class HeaderColumn:
    """A named group; its column is of integers if the group can only match digits."""

    name: str
    kind: Literal["integer", "text"]


@dataclass(frozen=True)
class Integers:
    """One number per header; 0 where it is not valid: no match, or a group that did not match or is empty."""

    values: Numbers
    valid: NDArray[np.bool_]


@dataclass(frozen=True)
class Texts:
    """One text per header, the bytes `flat[starts[i]:ends[i]]`; not valid: no match, or a group that did not match."""

    flat: Bytes
    starts: Numbers
    ends: Numbers
    valid: NDArray[np.bool_]


@dataclass(frozen=True)
class Parsed:
    """Which headers matched, and a column for each named group, in pattern order."""

    matched: NDArray[np.bool_]
    columns: dict[str, Integers | Texts]


class Headers:
    """A header regex, ready to parse many headers at once.

    headers = Headers(r"(?P<name>[^;]+);size=(?P<size>\\d+)")
    buffer = np.frombuffer(bytearray(b"otu1;size=42"), np.uint8)
    headers.parse(buffer, np.array([0]), np.array([12])).columns["size"].values  # array([42])
    """

    def __init__(self, regex: str) -> None:
        self.regex = regex
        try:
            self._re = re.compile(regex, re.ASCII)
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            raise BadSource(f"header_regex {regex!r} does not compile: {error}. Example: {EXAMPLE}") from None
        if not self._re.groupindex:
            raise BadSource(f"header_regex {regex!r} has no named groups, so no columns. Example: {EXAMPLE}")
        self._tree = tree_of(regex)
        bodies = {node.name: node.body for node in inside(self._tree) if isinstance(node, Group)}
        self.columns = tuple(
            HeaderColumn(name, "integer" if name in bodies and is_digits(bodies[name]) else "text")
            for name in self._re.groupindex
        )
        self._backtracks = ambiguities(self._tree) > _MAX_AMBIGUITIES
        if self._backtracks and self.path == "re":
            raise self._too_slow("look-around, a back reference, a flag or a repeated group or empty text")

    @property
    def path(self) -> Literal["fast", "re2", "re"]:
        """How headers are parsed: by a compiled kernel, RE2, or Python's regex engine."""
        return "fast" if self._shape else "re2" if self._re2 else "re"

    def parse(self, buffer: Bytes, starts: Numbers, ends: Numbers) -> Parsed:
        """Parse the headers `buffer[starts[i]:ends[i]]`, which are in ascending order in the (writable) buffer."""
        if self._shape:
            return self._parse_fast(self._shape, buffer, starts, ends)
        texts = _arrow_texts(buffer, starts, ends) if self._re2 else None
        parsed = self._parse_re2(self._re2, texts) if self._re2 and texts is not None else None
        if parsed is not None:
            return parsed
        if self._backtracks:
            raise self._too_slow("a header that is not UTF-8 or has a number above int64")
        data = buffer.tobytes()
        return self._parse_re([_decode(data[a:b]) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)])

    @cached_property
    def _shape(self) -> Shape | None:
        return Shape.of(self._tree, integers=[column.kind == "integer" for column in self.columns])

    @cached_property
    def _re2(self) -> str | None:
        """The regex for RE2, if it has the same meaning there."""
        if not is_same_in_re2(self._tree, optional=False):
            return None
        pattern = rf"\A{re2_regex(self._tree, [column.name for column in self.columns])}"
        try:
            pc.extract_regex(pa.array([""], pa.large_string()), pattern)
        except pa.ArrowInvalid:  # a limit of RE2: 1000 repetitions, 8 MB for a compiled regex
            return None
        return pattern

    def _parse_fast(self, shape: Shape, buffer: Bytes, starts: Numbers, ends: Numbers) -> Parsed:
        spans = shape.match(buffer, starts, ends)
        if spans.too_large >= 0:
            raise self._too_large(_decode(buffer[starts[spans.too_large] : ends[spans.too_large]].tobytes()))
        columns: dict[str, Integers | Texts] = {}
        for column, first, last, valid in zip(self.columns, spans.first, spans.last, spans.valid, strict=True):
            is_integer = column.kind == "integer"
            columns[column.name] = Integers(first, valid) if is_integer else Texts(buffer, first, last, valid)
        return Parsed(spans.matched, columns)

    def _parse_re2(self, pattern: str, texts: pa.Array) -> Parsed | None:
        """None if a number is not an int64: then Python finds the header."""
        found = pc.extract_regex(texts, pattern)
        matched = np.array(found.is_valid(), np.bool_)
        required = required_groups(self._tree)
        columns: dict[str, Integers | Texts] = {}
        for number, column in enumerate(self.columns):
            values = found.field(number)  # "" where the header or the group does not match
            lengths = np.array(pc.binary_length(values), np.int64)
            if column.kind == "text":
                valid = matched if column.name in required else lengths > 0
                flat = b"".join(cast("list[bytes]", values.cast(pa.large_binary()).to_pylist()))
                columns[column.name] = _texts(flat, lengths=lengths, valid=valid)
                continue
            try:
                numbers = pc.if_else(pa.array(lengths > 0), values, "0").cast(pa.int64())
            except pa.ArrowInvalid:
                return None
            columns[column.name] = Integers(np.array(numbers, np.int64), lengths > 0)
        return Parsed(matched, columns)

    def _parse_re(self, texts: list[str]) -> Parsed:
        matches = [self._re.match(text) for text in texts]
        columns: dict[str, Integers | Texts] = {}
        for column in self.columns:
            groups = [None if match is None else cast("str | None", match[column.name]) for match in matches]
            if column.kind == "text":
                encoded = [(group or "").encode("utf-8", "surrogateescape") for group in groups]
                lengths, valid = [len(text) for text in encoded], [group is not None for group in groups]
                columns[column.name] = _texts(b"".join(encoded), lengths=lengths, valid=valid)
                continue
            values = np.zeros(len(groups), np.int64)
            for i, group in enumerate(groups):
                digits = (group or "").lstrip("0")
                if len(digits) > 18 and (len(digits) > 19 or int(digits) >= 1 << 63):
                    raise self._too_large(texts[i])
                values[i] = int(digits or 0)
            columns[column.name] = Integers(values, np.array([bool(group) for group in groups], np.bool_))
        return Parsed(np.array([match is not None for match in matches], np.bool_), columns)

    def _too_slow(self, reason: str) -> BadSource:
        return BadSource(
            f"header_regex {self.regex!r} may take for ever: {reason} needs backtracking, and its repetitions can "
            f"match the same text in too many ways. Simplify it. Example: {EXAMPLE}"
        )

    def _too_large(self, header: str) -> BadSource:
        return BadSource(
            f"header {header!r}: a number above {2**63 - 1}, the maximum of int64. To store it as text, let its "
            f"group in header_regex {self.regex!r} match more than digits: [^|]+ or \\w+ instead of \\d+"
        )


def _decode(header: bytes) -> str:
    return header.decode("utf-8", "surrogateescape")


def _texts(flat: bytes, *, lengths: ArrayLike, valid: ArrayLike) -> Texts:
    """Texts that are one after the other in `flat`."""
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = np.append(np.zeros(1, np.int64), ends)[: len(ends)]
    return Texts(np.frombuffer(bytearray(flat), np.uint8), starts, ends, np.array(valid, np.bool_))


def _arrow_texts(buffer: Bytes, starts: Numbers, ends: Numbers) -> pa.Array | None:
    """The headers as a column of strings; None if one is not UTF-8 or they are not in order."""
    # Every second value is a header; the others are the text between headers.
    offsets = np.append(np.stack([starts, ends], axis=1).reshape(-1), ends[-1] if len(ends) else 0)
    if np.any(np.diff(offsets) < 0):
        return None
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(buffer)]
    values = pa.Array.from_buffers(pa.large_binary(), 2 * len(starts), buffers)
    try:
        return values.take(pa.array(np.arange(0, 2 * len(starts), 2))).cast(pa.large_string())
    except pa.ArrowInvalid:
        return None
