"""What a view is: a page of `static/`, and the questions it may ask. Knows nothing of HTTP."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from millstream.errors import BadSetting

_MOST_DIGITS = 18
_EXACT = 1 << 53  # larger whole numbers are others in JavaScript


class Query:
    """What a page asked for: texts by name."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def text(self, name: str, default: str = "") -> str:
        return self._values.get(name, default)

    def number(self, name: str, default: int = 0) -> int:
        """A whole number, not negative."""
        given = self._values.get(name, str(default))
        if not given.isascii() or not given.isdigit() or len(given) > _MOST_DIGITS:
            raise BadSetting(f"{name}={given[: 2 * _MOST_DIGITS]}: a whole number is expected")
        return int(given)


Answer = Callable[[Query], object]


@dataclass(frozen=True)
class View:
    """One page: `static/{name}.html`, the answers it may ask for as `api/NAME`, and whole files it may show."""

    name: str
    title: str
    answers: Mapping[str, Answer]
    files: Mapping[str, Callable[[], Path]] = field(default_factory=dict[str, Callable[[], Path]])


def plain(value: object) -> object:
    """The value as JSON has it: arrays as lists, numbers that are none as null, those too large for a page as texts."""
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
