"""Headers of a read file -> typed columns, by a regex with named groups. Knows bytes and regexes, not files.

A header matches when `re.match(regex, header, re.ASCII)` does: `\\d`, `\\w` and `\\s` are ASCII, and without `$` a
prefix is enough. Text is UTF-8; bytes that are not are kept as they are (`surrogateescape`). No header holds a newline.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from millstream.errors import BadSource
from millstream.kernels import HAVE_NUMBA
from millstream.source.header_shape import Shape
from millstream.source.header_tree import (
    DIGITS,
    OTHERS,
    UNBOUNDED,
    Anchor,
    Either,
    Group,
    Node,
    Nodes,
    Other,
    Repeat,
    Run,
    inside,
    is_nullable,
    tree_of,
)

if TYPE_CHECKING:
    import polars as pl

EXAMPLE = r"^lbl\|(?P<class_id>\d+)\|(?P<tax_id>\d+)?\|(?P<name>[^/\s]+)(?:/(?P<mate>\d+))?$"

Buffer = NDArray[np.uint8]
Positions = NDArray[np.int64]


@dataclass(frozen=True)
class HeaderColumn:
    """A named group; its column holds integers when the group can only match digits."""

    name: str
    kind: Literal["integer", "text"]


@dataclass(frozen=True)
class Integers:
    """One number a header; 0 where it is not valid: no match, a group that took no part, or one that was empty."""

    values: NDArray[np.int64]
    valid: NDArray[np.bool_]


@dataclass(frozen=True)
class Texts:
    """One text a header, the bytes `flat[starts[i]:ends[i]]`; not valid: no match, or a group that took no part."""

    flat: Buffer
    starts: Positions
    ends: Positions
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
            raise BadSource(f"header_regex {regex!r} does not compile: {error}. An example: {EXAMPLE}") from None
        if not self._re.groupindex:
            raise BadSource(f"header_regex {regex!r} has no named groups, so no columns. An example: {EXAMPLE}")
        self._tree = tree_of(regex)
        bodies = {node.name: node.body for node in inside(self._tree) if isinstance(node, Group)}
        self.columns = tuple(
            HeaderColumn(name, "integer" if name in bodies and _is_digits(bodies[name]) else "text")
            for name in self._re.groupindex
        )

    @property
    def path(self) -> Literal["fast", "polars", "re"]:
        """How headers are parsed: one compiled pass over the bytes, Rust's regex engine or Python's."""
        return "fast" if self._shape else "polars" if self._rust else "re"

    def parse(self, buffer: Buffer, starts: Positions, ends: Positions) -> Parsed:
        """Parse the headers `buffer[starts[i]:ends[i]]`, which come one after the other in the (writable) buffer."""
        if self._shape:
            return self._parse_fast(self._shape, buffer, starts, ends)
        texts = _polars_texts(buffer, starts, ends) if self._rust else None
        if self._rust and texts is not None:
            return self._parse_polars(self._rust, texts)
        data = buffer.tobytes()
        return self._parse_re([_decode(data[a:b]) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)])

    @cached_property
    def _shape(self) -> Shape | None:
        if not HAVE_NUMBA:  # as plain Python it would be slower than `re`
            return None
        return Shape.of(self._tree, integers=[column.kind == "integer" for column in self.columns])

    @cached_property
    def _rust(self) -> str | None:
        """The regex for polars, if it is there and means the same."""
        names = [column.name for column in self.columns]
        if not all(_is_same_in_rust(node) for node in inside(self._tree)):
            return None
        try:
            import polars as pl
        except ImportError:
            return None
        try:
            rust = rf"\A{_rust_regex(self._tree, names)}()"  # the last group takes part in every match
            pl.Series([""]).str.extract_groups(rust)
        except pl.exceptions.ComputeError:  # a limit of Rust's: 10 MB for a compiled regex
            return None
        return rust

    def _parse_fast(self, shape: Shape, buffer: Buffer, starts: Positions, ends: Positions) -> Parsed:
        spans = shape.match(buffer, starts, ends)
        if spans.too_large >= 0:
            raise self._too_large(_decode(buffer[starts[spans.too_large] : ends[spans.too_large]].tobytes()))
        columns: dict[str, Integers | Texts] = {}
        for column, first, last, valid in zip(self.columns, spans.first, spans.last, spans.valid, strict=True):
            is_integer = column.kind == "integer"
            columns[column.name] = Integers(first, valid) if is_integer else Texts(buffer, first, last, valid)
        return Parsed(spans.matched, columns)

    def _parse_polars(self, rust: str, texts: "pl.Series") -> Parsed:
        import polars as pl

        *groups, matched = texts.str.extract_groups(rust).struct.unnest().get_columns()
        columns: dict[str, Integers | Texts] = {}
        for column, values in zip(self.columns, groups, strict=True):
            if column.kind == "text":
                filled = values.fill_null("")
                flat, lengths = cast(str, filled.str.join("").item()).encode(), filled.str.len_bytes().to_numpy()
                columns[column.name] = _texts(flat, lengths=lengths, valid=values.is_not_null().to_numpy())
                continue
            numbers = values.cast(pl.Int64, strict=False)
            lost = numbers.is_null() & values.is_not_null() & (values != "")
            if lost.any():
                raise self._too_large(cast(str, texts[lost.arg_max() or 0]))
            columns[column.name] = Integers(
                numbers.fill_null(0).to_numpy(writable=True), numbers.is_not_null().to_numpy(writable=True)
            )
        return Parsed(matched.is_not_null().to_numpy(writable=True), columns)

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

    def _too_large(self, header: str) -> BadSource:
        return BadSource(
            f"header {header!r}: a number above {2**63 - 1}, the largest a column holds. To keep it as text, let its "
            f"group in header_regex {self.regex!r} match more than digits: [^|]+ or \\w+ instead of \\d+"
        )


def _is_digits(body: Nodes) -> bool:
    runs = [node for node in inside(body) if isinstance(node, Run)]
    others = any(isinstance(node, Other) for node in inside(body))
    return bool(runs) and not others and not any(run.chars & ~DIGITS for run in runs)


def _decode(header: bytes) -> str:
    return header.decode("utf-8", "surrogateescape")


def _texts(flat: bytes, *, lengths: ArrayLike, valid: ArrayLike) -> Texts:
    """Texts that stand one after the other in `flat`."""
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = np.append(np.zeros(1, np.int64), ends)[: len(ends)]
    return Texts(np.frombuffer(bytearray(flat), np.uint8), starts, ends, np.array(valid, np.bool_))


# -- the same regex for Rust


def _polars_texts(buffer: Buffer, starts: Positions, ends: Positions) -> "pl.Series | None":
    """The headers as a column of strings, None if one is not UTF-8 or they are not in order."""
    import polars as pl

    # Every second value is a header, those between are what lies between headers: no byte is copied.
    offsets = np.append(np.stack([starts, ends], axis=1).reshape(-1), ends[-1] if len(ends) else 0)
    if np.any(np.diff(offsets) < 0):
        return None
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(buffer)]
    values = pa.Array.from_buffers(pa.large_binary(), 2 * len(starts), buffers)
    try:
        return cast(pl.Series, pl.from_arrow(cast(Any, values))).gather_every(2).cast(pl.String)
    except pl.exceptions.ComputeError:
        return None


def _is_same_in_rust(node: Node) -> bool:
    """Whether Rust's regex and `re` agree on it beyond doubt: engines differ in what they remember of a loop."""
    if isinstance(node, Repeat):
        has_group = any(isinstance(inner, Group) and inner.name for inner in inside(node.body))
        return not is_nullable(node.body) and not (has_group and node.high > 1)
    return not isinstance(node, Other) and not (isinstance(node, Run) and node.chars == 0)


def _rust_regex(nodes: Nodes, names: list[str]) -> str:
    """Rust knows no re.ASCII for texts, so character sets are written out; group `names[i]` becomes `gi`."""
    parts: list[str] = []
    for node in nodes:
        match node:
            case Run():
                parts.append(_rust_set(node.chars) + _rust_times(node.low, node.high))
            case Group():
                name = f"?P<g{names.index(node.name)}>" if node.name else "?:"
                parts.append(f"({name}{_rust_regex(node.body, names)})")
            case Repeat():
                times = _rust_times(node.low, node.high) + ("?" if node.lazy else "")
                parts.append(f"(?:{_rust_regex(node.body, names)}){times}")
            case Either():
                parts.append(f"(?:{'|'.join(_rust_regex(body, names) for body in node.bodies)})")
            case Anchor():
                parts.append(r"\z" if node.at_end else r"\A")
            case Other():
                raise AssertionError(node)
    return "".join(parts)


def _rust_times(low: int, high: int) -> str:
    return f"{{{low},}}" if high >= UNBOUNDED else f"{{{low},{high}}}"


def _rust_set(chars: int) -> str:
    members = "".join(rf"\x{{{char:x}}}" for char in range(128) if chars >> char & 1)
    others = r"\x{80}-\x{10ffff}" if chars & OTHERS else ""
    return f"[{members}{others}]"
