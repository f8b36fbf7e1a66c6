"""What a view is: a page of `static/`, and the queries it may send. Knows nothing about HTTP."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from millstream.errors import BadSetting

_MOST_DIGITS = 18
_EXACT = 1 << 53  # JavaScript cannot represent larger integers exactly


class Query:
    """The parameters of a request: texts by name."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def text(self, name: str, default: str = "") -> str:
        return self._values.get(name, default)

    def number(self, name: str, default: int = 0) -> int:
        """A non-negative integer."""
        given = self._values.get(name, str(default))
        if not given.isascii() or not given.isdigit() or len(given) > _MOST_DIGITS:
            raise BadSetting(f"{name}={given[: 2 * _MOST_DIGITS]}: must be a non-negative integer")
        return int(given)


Answer = Callable[[Query], object]


@dataclass(frozen=True)
class View:
    """One page: `static/{name}.html`, the queries it may send to `api/NAME`, and files it may show."""

    name: str
    title: str
    answers: Mapping[str, Answer]
    files: Mapping[str, Callable[[], Path]] = field(default_factory=dict[str, Callable[[], Path]])


def plain(value: object) -> object:
    """The value as JSON: arrays as lists, NaN and infinity as null, integers too large for JavaScript as texts."""
    if isinstance(value, np.ndarray):
        return plain(cast("list[object]", value.tolist()))
    if isinstance(value, np.generic):
        return plain(cast(object, value.item()))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in cast("list[object]", value)]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, int):
        return value if abs(value) <= _EXACT else str(value)
    if value is None or isinstance(value, str):
        return value
    return str(value)
