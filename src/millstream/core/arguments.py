"""Arguments of public functions are checked against their annotations: one line says what must be given.

What is understood: None, bool, numbers, texts, paths, literals, classes, functions, and lists and mappings of them;
anything else is accepted. Numbers stay within the limits of their annotation, such as `Count`.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from inspect import isclass, signature
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal, SupportsIndex, TypeVar, cast, get_args, get_origin

from millstream.core.config import ByteSize, Limit, check_limits, is_union, marks_of, shown
from millstream.errors import BadSetting

F = TypeVar("F", bound=Callable[..., Any])

_WORDS = {int: "integer", float: "number", bool: "True or False", str: "text", type(None): "None", Path: "path"}
_SOURCES = {"Collection": " (from ms.open)", "Feature": " (from ms.features)"}
_MOST_ITEMS = 100  # of a list that are looked at


def checked(function: F) -> F:
    """A function, or a class, that raises BadSetting for an argument that does not fit its annotation."""
    if isclass(function):
        made: Any = function
        made.__init__ = checked(made.__init__)
        return cast(F, made)
    parameters = signature(function)
    hints: dict[str, Any] = {}

    @wraps(function)
    def check_and_call(*args: Any, **kwargs: Any) -> Any:
        if not hints:
            hints.update(_hints(function))
        try:
            given = parameters.bind_partial(*args, **kwargs).arguments
        except TypeError:
            given = dict[str, Any]()  # Python says what is wrong
        for name, value in given.items():
            if name in hints:
                check(name, value, hints[name])
        return function(*args, **kwargs)

    return cast(F, check_and_call)


def check(name: str, value: object, hint: Any) -> None:
    """BadSetting, one line, unless a value fits an annotation."""
    limits = [mark for mark in marks_of(hint) if isinstance(mark, Limit)]
    is_size = any(isinstance(limit, ByteSize) for limit in limits) and value is not None  # which has types of its own
    if not is_size and not _fits(value, hint):
        choices = [choice for one in _members(hint) if get_origin(one) is Literal for choice in get_args(one)]
        wanted = f"must be one of {', '.join(map(str, choices))}" if choices else f"expected {_words(hint)}"
        raise BadSetting(f"{name}={shown(value)}: {wanted}")
    check_limits(name, value, limits)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotation of every parameter, but of those whose types are imported for type checkers only."""
    found: dict[str, Any] = {}
    module = getattr(function, "__globals__", {})
    for name, parameter in signature(function).parameters.items():
        hint = parameter.annotation
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or hint is parameter.empty:
            continue
        try:
            found[name] = eval(hint, module) if isinstance(hint, str) else hint
        except NameError:
            continue
    return found


def _members(hint: Any) -> list[Any]:
    """The types of a union, or the one type; without their limits."""
    if get_origin(hint) is Annotated:
        return _members(hint.__origin__)
    return [member for inner in get_args(hint) for member in _members(inner)] if is_union(hint) else [hint]


def _fits(value: Any, hint: Any) -> bool:
    return any(_fits_one(value, member) for member in _members(hint))


def _fits_one(value: Any, hint: Any) -> bool:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if hint is None or hint is type(None):
        return value is None
    if hint is Any or hint is object:
        return True
    if kind is Literal:
        return any(type(value) is type(choice) and value == choice for choice in inner)
    if kind in (int, float):
        return not _is_bool(value) and isinstance(value, SupportsIndex | Real if kind is float else SupportsIndex)
    if kind is bool:
        return _is_bool(value)
    if kind is Path:
        return isinstance(value, os.PathLike)
    if kind is Callable or hint is Callable:
        return callable(value)
    if kind is type:
        return isclass(value) and issubclass(value, inner)
    if not isclass(kind) or (getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False)):
        return True  # such as Any
    if not isinstance(value, kind) or (
        isinstance(value, str | bytes) and issubclass(kind, Iterable) and kind is not str
    ):
        return False
    if isinstance(value, Mapping) and len(inner) == 2:
        pairs = islice(cast("Mapping[Any, Any]", value).items(), _MOST_ITEMS)
        return all(_fits(key, inner[0]) and _fits(item, inner[1]) for key, item in pairs)
    if isinstance(value, list | tuple) and issubclass(kind, Iterable) and len(inner) == 1:
        return all(_fits(item, inner[0]) for item in islice(cast("Sequence[Any]", value), _MOST_ITEMS))
    return True


def _is_subclass(kind: Any, of: type[object]) -> bool:
    return isclass(kind) and issubclass(kind, of)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")  # numpy


def _words(hint: Any) -> str:
    """`integer or None`."""
    return " or ".join(dict.fromkeys(map(_word, _members(hint))))


def _word(hint: Any) -> str:
    kind: Any = get_origin(hint) or hint
    inner = get_args(hint)
    if hint is None or kind in _WORDS:
        return _WORDS[type(None) if hint is None else kind]
    if kind is Callable:
        return "function"
    if kind is type:
        return f"the class {_words(inner[0])}"
    if _is_subclass(kind, Mapping) and len(inner) == 2:
        return f"mapping of {_words(inner[0])} to {_words(inner[1])}"
    if _is_subclass(kind, Iterable) and len(inner) == 1:
        return f"list of {_words(inner[0])}"
    name = str(getattr(cast(object, kind), "__name__", hint))
    return name + _SOURCES.get(name, "")
