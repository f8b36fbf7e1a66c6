"""Text as people and files have it -> plain values: JSON, YAML, byte sizes, `key=value`, and their fingerprint.

The annotation of a setting has its help and the limits of its numbers: `Annotated[Count, "records per step"]`.
"""

import difflib
import hashlib
import json
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import reduce
from math import inf, isfinite
from operator import index
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Protocol,
    SupportsIndex,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

from millstream.core.bucket import is_url, refuse_secrets
from millstream.errors import BadSetting

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_TYPES = {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "none"}
_TOO_DEEP = "it is nested too deeply"
_TOO_LONG = "a number has too many digits"
_MAX_BITS = 10_000  # Python prints integers of up to 14,000; YAML can write longer ones, in hexadecimal
_MAX_DEPTH = 100  # what is nested deeper can be parsed, but not always printed or written again
_MAX_VALUES = 1_000_000  # in YAML, where a few lines of references can stand for any number
_MOST = 1 << 63  # of integers and bytes
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(size: float | str) -> int:
    """Number of bytes in `"512MB"`, `"1.5GiB"`, `4096` or `2e9`.

    >>> parse_bytes("512MB")
    512000000
    """
    given: object = size  # callers may have no type checker
    pattern = r"\s*(\d{1,300}\.?\d*|\.\d+)\s*([kmgt]i?)?b?\s*"
    match = re.fullmatch(pattern, given.lower()) if isinstance(given, str) else None
    value = float(match[1]) * _UNITS[match[2] or ""] if match else None
    if isinstance(given, float | SupportsIndex) and not isinstance(given, bool):
        value = given if isinstance(given, float) else index(given)
    if value is None:
        raise BadSetting(f"{shown(given)} is not a size in bytes; write for example '512MB', '2GiB' or 4096")
    if not 1 <= value < _MOST:
        raise BadSetting(f"a size in bytes must be positive, and less than 2**63, got {shown(given)}")
    return int(value)


@runtime_checkable
class Limit(Protocol):
    """Part of an annotation: which values of its type are allowed."""

    def refusal(self, value: Any) -> str | None:
        """What a value must be, if it is not."""
        ...


@dataclass(frozen=True)
class Between:
    """Finite numbers from `least` to `most`; neither of these itself if `is_open`, not `most` if `is_below`."""

    least: float = -inf
    most: float = inf
    is_open: bool = False
    is_below: bool = False

    def refusal(self, value: Any) -> str | None:
        number: float = index(value) if isinstance(value, SupportsIndex) else value
        if isinstance(number, int) and number >= _MOST:
            return "must be below 2**63"
        if not isfinite(number):
            return "must be a finite number"
        is_low = number <= self.least if self.is_open else number < self.least
        is_high = number >= self.most if self.is_open or self.is_below else number > self.most
        return f"must be {self}" if is_low or is_high else None

    def __str__(self) -> str:
        low = f"{'above' if self.is_open else 'at least'} {_plain(self.least)}"
        high = f"{'below' if self.is_open or self.is_below else 'at most'} {_plain(self.most)}"
        return " and ".join(text for text, edge in ((low, self.least), (high, self.most)) if isfinite(edge))


def _plain(number: float) -> str:
    return str(int(number)) if isfinite(number) and number == int(number) else f"{number:g}"


class ByteSize:
    """A number of bytes as `parse_bytes` takes it."""

    def refusal(self, value: Any) -> str | None:
        try:
            parse_bytes(value)
        except BadSetting as error:
            return str(error)
        return None


Count = Annotated[int, Between(1)]
Natural = Annotated[int, Between(0)]
Finite = Annotated[float, Between()]
NonNegative = Annotated[float, Between(0)]
Positive = Annotated[float, Between(0, is_open=True)]
Probability = Annotated[float, Between(0, 1)]
Rate = Annotated[float, Between(0, 1, is_below=True)]
Share = Annotated[float, Between(0, 1, is_open=True)]
SizeInBytes = Annotated[int | str, ByteSize()]


def check_limits(name: str, value: object, limits: Iterable[Limit]) -> None:
    """BadSetting, one line, if there is a value and it is outside of a limit."""
    for limit in limits if value is not None else ():
        if why := limit.refusal(value):
            text = f"{name}: {why}" if isinstance(limit, ByteSize) else f"{name}={shown(value)}: {why}"
            raise BadSetting(text)


def shown(value: object) -> str:
    """A value for a message, however large it is."""
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to print huge ones
        return f"an integer of {value.bit_length()} bits"
    return reprlib.repr(value)


def parse_json(text: str | bytes, *, object_hook: Callable[[dict[str, Any]], object] | None = None) -> Any:
    """The value of a JSON text; ValueError, one line, if it is not JSON, nested too deeply, or has a huge number."""
    try:
        found = json.loads(text, object_hook=object_hook)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as error:
        raise ValueError(_reason(error)) from None
    opening = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(text.count(mark) for mark in opening) > _MAX_DEPTH:  # pyright: ignore[reportArgumentType]
        _check_nesting(found)
    return found


def parse_yaml(text: str) -> Any:
    """The same for a YAML text, which can also refer to itself."""
    import yaml

    try:
        found = yaml.safe_load(text)
        _check_nesting(found)
        return found
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(_reason(error)) from None


def config_hash(config: Mapping[str, object]) -> str:
    """Sixteen hex digits that change when any setting does."""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=8).hexdigest()


def config_diff(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    """`model: 'a' -> 'b', seed: 1 -> 2`: every setting that differs, on one line."""
    keys = [key for key in {**old, **new} if (key in old, old.get(key)) != (key in new, new.get(key))]
    return ", ".join(f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in keys)


def read_settings(kind: type[T], given: Sequence[str] | Mapping[str, object]) -> T:
    """A dataclass of settings from `key=value` strings and YAML file names (or a mapping); later ones win.

    Nested settings are written `data.train=train.csv`, or as a nested mapping.

    >>> read_settings(LoopSettings, ["base.yaml", "epochs=5", "lr=0.001"])
    """
    known = {setting.name: setting for setting in list_settings(kind)}
    values: dict[str, object] = {}
    for key, value in setting_pairs(given):
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}=?" if near else f"must be one of {', '.join(known)}"
            raise BadSetting(f"{key}={value}: unknown setting; {hint}")
        values[key] = _typed(value, known[key])
    settings = _built(kind, values)
    check_settings(settings)
    return settings


def check_settings(settings: "DataclassInstance") -> None:
    """BadSetting, one line, for the first number that is outside of its limits."""
    for setting in list_settings(type(settings)):
        value = reduce(getattr, setting.name.split("."), cast(object, settings))
        check_limits(setting.name, value, setting.limits)


@dataclass(frozen=True)
class Setting:
    """One `name=value` of a settings dataclass."""

    name: str
    types: tuple[Any, ...]
    default: object
    help: str
    limits: tuple[Limit, ...] = ()

    @property
    def type(self) -> str:
        """In words: `integer or none`."""
        # Sorted: typing caches unions by their set of types, so that their order depends on what was imported first.
        return " or ".join(sorted((_TYPES[kind] for kind in self.types), key=lambda name: (name == "none", name)))


def list_settings(kind: type[Any], prefix: str = "") -> list[Setting]:
    """The settings of a dataclass, those of inner dataclasses by their full names, such as `data.train`.

    The help text and the limits of a field are the metadata of its type, `Annotated[Count, "help text"]`. A subclass
    that changes only a default, `epochs: int = 3`, keeps those of its base class.
    """
    plain, found = get_type_hints(kind), list[Setting]()
    marks: dict[str, list[object]] = {}
    for base in reversed(kind.__mro__):
        marked = {name: marks_of(hint) for name, hint in get_type_hints(base, include_extras=True).items()}
        marks |= {name: values for name, values in marked.items() if values}
    for field in fields(kind):
        hint: Any = plain[field.name]
        if is_dataclass(hint):
            found += list_settings(cast("type[Any]", hint), f"{prefix}{field.name}.")
            continue
        default = None if field.default is MISSING else field.default
        text = next((mark for mark in marks.get(field.name, ()) if isinstance(mark, str)), "")
        limits = tuple(mark for mark in marks.get(field.name, ()) if isinstance(mark, Limit))
        found.append(Setting(prefix + field.name, get_args(hint) or (hint,), default, text, limits))
    return found


def marks_of(hint: Any) -> list[object]:
    """The metadata of an annotation, and of the types in a union."""
    if get_origin(hint) is Annotated:
        return [*hint.__metadata__, *marks_of(hint.__origin__)]
    return [mark for inner in get_args(hint) for mark in marks_of(inner)] if is_union(hint) else []


def is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def _built(kind: type[T], values: Mapping[str, object], prefix: str = "") -> T:
    hints: dict[str, Any] = get_type_hints(kind)
    given: dict[str, object] = {}
    for field in fields(kind):
        name = prefix + field.name
        if is_dataclass(hints[field.name]):
            given[field.name] = _built(hints[field.name], values, f"{name}.")
        elif name in values:
            given[field.name] = values[name]
    return kind(**given)


def setting_pairs(given: Sequence[str] | Mapping[str, object]) -> list[tuple[str, object]]:
    """Every `key` and its value, in order; nested keys are joined with dots: `data.train`."""
    pairs: list[tuple[str, object]] = _flat(given) if isinstance(given, Mapping) else _parse_pairs(given)
    for _, value in pairs:
        if isinstance(value, str) and is_url(value):
            refuse_secrets(value)
    return pairs


def _parse_pairs(given: Sequence[str]) -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for text in given:
        key, equals, value = text.partition("=")
        if is_url(text):
            refuse_secrets(text)
            raise BadSetting(f"{text}: settings are read from a local file. Copy it: millstream copy {text} .")
        if equals:
            pairs.append((key.strip(), value))
        elif text.endswith((".yaml", ".yml")):
            pairs += _flat(_read_yaml(Path(text)))
        else:
            raise BadSetting(f"{text}: expected key=value or a .yaml file")
    return pairs


def _flat(given: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for key, value in given.items():
        if isinstance(value, Mapping):
            pairs += _flat(cast("Mapping[str, object]", value), f"{prefix}{key}.")
        else:
            pairs.append((prefix + key, value))
    return pairs


def _read_yaml(path: Path) -> dict[str, object]:
    try:
        found = parse_yaml(path.read_text())
    except FileNotFoundError:
        raise BadSetting(f"{path}: no such file") from None
    except OSError as error:
        raise BadSetting(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise BadSetting(f"{path}: is not valid YAML ({error})") from None
    if not isinstance(found, dict):
        raise BadSetting(f"{path}: expected a mapping of key: value, found {type(found).__name__}")
    return {str(key): value for key, value in cast("dict[object, object]", found).items()}


def _typed(value: object, setting: Setting) -> object:
    """The value as one of the types its setting allows."""
    text = reprlib.repr(cast(object, value)) if isinstance(value, list | dict) else str(value).strip()
    allowed = setting.types
    if type(None) in allowed and (value is None or text.lower() in ("none", "null")):
        return None
    if bool in allowed and text.lower() in ("true", "false", "yes", "no", "1", "0"):
        return text.lower() in ("true", "yes", "1")
    for number in (int, float):
        if number in allowed:
            try:
                return number(text)
            except ValueError:
                pass
    if str in allowed and isinstance(value, str | int | float):
        return str(value)
    raise BadSetting(f"{setting.name}={text[:200]}: expected {setting.type}")


def without_effect(settings: object, used_by: Mapping[str, Sequence[str]], chosen: Sequence[str]) -> list[str]:
    """A sentence for each setting that was changed but has no effect on what was chosen."""
    return [
        f"{name}={getattr(settings, name)} has no effect on {first_few(chosen)}; it is for {first_few(users)}"
        for name, users in used_by.items()
        if getattr(settings, name) != getattr(type(settings), name) and not set(users) & set(chosen)
    ]


def first_few(values: Sequence[object], most: int = 5) -> str:
    """`3, 5 and 7 more`."""
    shown = ", ".join(str(value) for value in values[:most])
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"


def _check_nesting(value: object) -> None:
    """ValueError for what cannot be walked or printed: nested too deeply, endless by references, huge integers."""
    level: dict[int, tuple[object, int]] = {0: ([value], 1)}  # containers at this depth, and how often they occur
    for _ in range(_MAX_DEPTH):
        deeper: dict[int, tuple[object, int]] = {}
        for found, times in level.values():
            inner: Iterable[object] = cast("list[object]", found) if isinstance(found, list) else ()
            if isinstance(found, dict):
                inner = cast("dict[object, object]", found).values()
            for item in inner:
                if isinstance(item, int) and item.bit_length() > _MAX_BITS:
                    raise ValueError(_TOO_LONG)
                if isinstance(item, dict | list):
                    place = id(cast(object, item))
                    deeper[place] = (cast(object, item), deeper[place][1] + times if place in deeper else times)
        if not deeper:
            return
        level = deeper
        if sum(times for _, times in level.values()) > max(_MAX_VALUES, len(level)):
            raise ValueError("its references stand for too many values")
    raise ValueError(_TOO_DEEP)


def _reason(error: Exception) -> str:
    """Why a text cannot be parsed, on one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if "integer string conversion" in str(error):
        return _TOO_LONG
    why = f"line {mark.line + 1}: {problem}" if mark else problem or error
    return " ".join(str(why).split())
