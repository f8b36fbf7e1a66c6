"""A header regex as a tree, and the same regex for RE2."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

# A set of characters is an int with one bit per ASCII character and one for all others. A set of what may come next has
# two more: the end of the header, and "anything, the regex has matched".
OTHERS = 1 << 128
DIGITS = sum(1 << c for c in b"0123456789")
SPACES = sum(1 << c for c in b" \t\n\r\f\v")
WORDS = sum(1 << c for c in range(128) if chr(c).isalnum() or c == ord("_"))
ALL = (1 << 129) - 1
THE_END = 1 << 129
ANYTHING = 1 << 130
UNBOUNDED = 1 << 62  # how often `*` and `+` repeat
_CATEGORIES = {"DIGIT": DIGITS, "SPACE": SPACES, "WORD": WORDS}


@dataclass(frozen=True)
class Run:
    """`low` to `high` characters of a set; a literal character is a run of exactly one."""

    chars: int
    low: int = 1
    high: int = 1


@dataclass(frozen=True)
class Group:
    """A capturing group; `name` is None if it has none."""

    name: str | None
    body: "Nodes"


@dataclass(frozen=True)
class Repeat:
    """`low` to `high` times something that is not a run, or a run as short as possible (`lazy`)."""

    body: "Nodes"
    low: int
    high: int
    lazy: bool


@dataclass(frozen=True)
class Either:
    """Alternatives, tried in order."""

    bodies: tuple["Nodes", ...]


@dataclass(frozen=True)
class Anchor:
    """The first (`^`) or the last (`$`) position of the header."""

    at_end: bool


@dataclass(frozen=True)
class Other:
    """Anything only `re` understands: look-around, back reference, other flags, a non-ASCII character, ..."""

    bodies: tuple["Nodes", ...]


Node = Run | Group | Repeat | Either | Anchor | Other
Nodes = tuple[Node, ...]


def tree_of(regex: str) -> Nodes:
    """The tree of a regex. Never fails for a regex that compiles: anything unknown is an `Other`."""
    # Private, but no public module parses regexes, and a parser of our own would have to agree with `re` on every one.
    # tests/test_private_modules.py fails if Python changes it.
    from re import _parser  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]

    parsed = cast(Any, _parser).parse(regex, re.ASCII)
    names = {number: name for name, number in cast(dict[str, int], parsed.state.groupdict).items()}
    nodes = _nodes(parsed, names)
    known = re.ASCII | re.UNICODE | re.VERBOSE | re.DOTALL
    return nodes if not parsed.state.flags & ~known else (Other((nodes,)),)


def inside(nodes: Nodes) -> Iterator[Node]:
    """Every node of a tree, in pattern order."""
    for node in nodes:
        yield node
        bodies = (node.body,) if isinstance(node, Group | Repeat) else getattr(node, "bodies", ())
        for body in cast("tuple[Nodes, ...]", bodies):
            yield from inside(body)


def is_nullable(nodes: Nodes) -> bool:
    """Whether a sequence can match the empty string."""
    return bool(first_of(nodes, ANYTHING) & ANYTHING)


def first_of(nodes: Nodes, follow: int) -> int:
    """What a sequence can start with, if `follow` may come after it."""
    found = 0
    for node in nodes:
        match node:
            case Run():
                found |= node.chars
                nullable = node.low == 0
            case Group():
                found |= first_of(node.body, 0)
                nullable = is_nullable(node.body)
            case Repeat():
                found |= first_of(node.body, 0)
                nullable = node.low == 0 or is_nullable(node.body)
            case Either():
                found |= _union(first_of(body, 0) for body in node.bodies)
                nullable = any(is_nullable(body) for body in node.bodies)
            case Anchor():
                nullable = True
            case Other():
                found |= ALL
                nullable = True
        if not nullable:
            return found
    return found | follow


def is_digits(body: Nodes) -> bool:
    """Whether a sequence can match nothing but digits."""
    runs = [node for node in inside(body) if isinstance(node, Run)]
    others = any(isinstance(node, Other) for node in inside(body))
    return bool(runs) and not others and not any(run.chars & ~DIGITS for run in runs)


def required_groups(nodes: Nodes) -> set[str]:
    """The named groups that match in every header that matches."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, Group):
            found |= required_groups(node.body) | ({node.name} if node.name else set())
        elif isinstance(node, Repeat) and node.low > 0:
            found |= required_groups(node.body)
    return found


def is_same_in_re2(nodes: Nodes, *, optional: bool) -> bool:
    """Whether RE2 and `re` certainly agree: they differ in the groups they keep from a loop.

    `optional`: the nodes need not match. RE2 does not distinguish a group that did not match from an empty one.
    """
    for node in nodes:
        match node:
            case Run():
                same = node.chars != 0
            case Group():
                unclear = optional and node.name is not None and is_nullable(node.body) and not is_digits(node.body)
                same = not unclear and is_same_in_re2(node.body, optional=optional)
            case Repeat():
                has_group = any(isinstance(inner, Group) and inner.name for inner in inside(node.body))
                loops = is_nullable(node.body) or (has_group and node.high > 1)
                same = not loops and is_same_in_re2(node.body, optional=optional or node.low == 0)
            case Either():
                same = all(is_same_in_re2(body, optional=True) for body in node.bodies)
            case Anchor():
                same = True
            case Other():
                same = False
        if not same:
            return False
    return True


def ambiguities(nodes: Nodes, follow: int = ANYTHING) -> int:
    """In how many places a backtracking engine may have to try many ways to match the same text.

    Each place multiplies the time by the length of the header; one in a loop counts as often as the loop repeats.
    """
    total = 0
    for place, node in enumerate(nodes):
        after = first_of(nodes[place + 1 :], follow)
        match node:
            case Run():
                total += bool(node.high > node.low and node.chars & after)
            case Group():
                total += ambiguities(node.body, after)
            case Repeat():
                start = first_of(node.body, 0)
                again = after | (start if node.high > 1 else 0)
                total += bool(start & after)
                total += (ambiguities(node.body, again) + (node.high > 1 and is_nullable(node.body))) * node.high
            case Either():
                starts = [first_of(body, after) for body in node.bodies]
                total += sum(bool(start & _union(starts[:index])) for index, start in enumerate(starts))
                total += sum(ambiguities(body, after) for body in node.bodies)
            case Anchor():
                pass
            case Other():
                total += sum(ambiguities(body, after) for body in node.bodies)
    return total


def re2_regex(nodes: Nodes, names: list[str]) -> str:
    """RE2 has no re.ASCII for texts, so character sets are spelled out; group `names[i]` becomes `gi`."""
    parts: list[str] = []
    for node in nodes:
        match node:
            case Run():
                parts.append(_re2_set(node.chars) + _re2_times(node.low, node.high))
            case Group():
                name = f"?P<g{names.index(node.name)}>" if node.name else "?:"
                parts.append(f"({name}{re2_regex(node.body, names)})")
            case Repeat():
                times = _re2_times(node.low, node.high) + ("?" if node.lazy else "")
                parts.append(f"(?:{re2_regex(node.body, names)}){times}")
            case Either():
                parts.append(f"(?:{'|'.join(re2_regex(body, names) for body in node.bodies)})")
            case Anchor():
                parts.append(r"\z" if node.at_end else r"\A")
            case Other():
                raise AssertionError(node)
    return "".join(parts)


def _nodes(parsed: Any, names: dict[int, str]) -> Nodes:
    return tuple(_node(str(op), value, names) for op, value in parsed)


def _node(op: str, value: Any, names: dict[int, str]) -> Node:
    if op in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
        chars = _chars(op, value)
        return Other(()) if chars is None else Run(chars)
    if op in ("MAX_REPEAT", "MIN_REPEAT"):
        low, high, body = int(value[0]), int(value[1]), _nodes(value[2], names)
        high = UNBOUNDED if str(value[1]) == "MAXREPEAT" else high
        only = body[0] if len(body) == 1 else None
        if isinstance(only, Run) and (only.low, only.high, op) == (1, 1, "MAX_REPEAT"):
            return Run(only.chars, low, high)
        return Repeat(body, low, high, lazy=op == "MIN_REPEAT")
    if op == "SUBPATTERN" and not (value[1] or value[2]):
        return Group(names.get(value[0]), _nodes(value[3], names))
    if op == "BRANCH":
        return Either(tuple(_nodes(body, names) for body in value[1]))
    if op == "AT" and str(value) in ("AT_BEGINNING", "AT_BEGINNING_STRING", "AT_END", "AT_END_STRING"):
        return Anchor(at_end="END" in str(value))
    return Other(tuple(_nodes(body, names) for body in _bodies(value)))


def _bodies(value: Any) -> Iterator[Any]:
    """The patterns anywhere in the argument of an opcode."""
    if hasattr(value, "state"):
        yield value
    elif isinstance(value, list | tuple):
        for item in cast(Sequence[Any], value):
            yield from _bodies(item)


def _chars(op: str, value: Any) -> int | None:
    """The set of characters; None if it distinguishes non-ASCII characters. Headers have no newline, so `.` is all."""
    if op == "ANY":
        return ALL
    if op == "LITERAL":
        return 1 << value if value < 128 else None
    if op == "NOT_LITERAL":
        return ALL & ~(1 << value) if value < 128 else None
    if op == "RANGE":
        return (1 << value[1] + 1) - (1 << value[0]) if value[1] < 128 else None
    if op == "CATEGORY":
        name = str(value).removeprefix("CATEGORY_")
        chars = _CATEGORIES[name.removeprefix("NOT_")]
        return ALL & ~chars if name.startswith("NOT_") else chars
    negate = str(value[0][0]) == "NEGATE"
    parts = [_chars(str(item), argument) for item, argument in value[1 if negate else 0 :]]
    if any(part is None for part in parts):
        return None
    chars = _union(part or 0 for part in parts)
    return ALL & ~chars if negate else chars


def _union(sets: Iterable[int]) -> int:
    found = 0
    for chars in sets:
        found |= chars
    return found


def _re2_times(low: int, high: int) -> str:
    return f"{{{low},}}" if high >= UNBOUNDED else f"{{{low},{high}}}"


def _re2_set(chars: int) -> str:
    members = "".join(rf"\x{{{char:x}}}" for char in range(128) if chars >> char & 1)
    others = r"\x{80}-\x{10ffff}" if chars & OTHERS else ""
    return f"[{members}{others}]"
