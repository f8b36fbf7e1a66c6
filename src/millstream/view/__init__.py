"""What a view of the explorer is: a page, the queries it may send, and work in background threads.

Knows nothing about HTTP or kinds of record; `server.py` serves views, `run_page.py` is the view of a run.
"""

import atexit
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar, cast

import numpy as np

from millstream.errors import BadSetting

STATIC = Path(__file__).parent / "static"  # what all pages share, and the page of a run
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
    """One page: the body, style and script `NAME.html`, `.css` and `.js` of a folder, and what it may request."""

    name: str
    title: str
    answers: Mapping[str, Answer]  # to queries at `api/NAME`; they change nothing
    actions: Mapping[str, Answer] = field(default_factory=dict[str, Answer])  # the same for a POST; they may
    static: Path = STATIC
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


T = TypeVar("T")

PATIENCE_S = 0.25  # how long a query waits for the work to finish


class Background:
    """Runs the steps of a generator in a thread. The steps change shared state only under `lock`."""

    def __init__(self, steps: Iterator[None]) -> None:
        self.lock = threading.Lock()
        self.is_done = False
        self._steps = steps
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start, unless the process is ending."""
        with _starting:
            if not _is_ending.is_set():
                self._thread.start()
                _running.add(self)

    def wait(self, seconds: float | None = PATIENCE_S) -> None:
        """Wait until the work is done or the time is up; raises the error of the thread."""
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop after the current step."""
        self._stop.set()
        self._thread.join(2)

    def _run(self) -> None:
        try:
            for _ in self._steps:
                if self._stop.is_set():
                    return
            self.is_done = True
        except Exception as error:
            self._error = error


class Later(Generic[T]):
    """A value that takes too long for a page to wait for; computed once, in the background, when first requested.

    >>> texts = Later(lambda: read_texts(records))
    >>> texts.soon()  # None: not yet
    """

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute = compute
        self._found: list[T] = []
        self._work = Background(self._steps())
        self._starting = threading.Lock()
        self._is_started = self._is_due = False

    def start(self, delay: float = 0.0) -> None:
        """Start after `delay` seconds, unless it has started."""
        with self._starting:
            if self._is_started or (delay and self._is_due):
                return
            if delay:
                self._is_due = True
                waiting = threading.Timer(delay, self.start)
                waiting.daemon = True
                waiting.start()
            else:
                self._is_started = True
                self._work.start()

    def soon(self, seconds: float | None = PATIENCE_S) -> T | None:
        """The value, or None if it is not ready by then."""
        self.start()
        self._work.wait(seconds)
        return self._found[0] if self._found else None

    def wait(self) -> T:
        self.soon(None)
        return self._found[0]

    def _steps(self) -> Iterator[None]:
        self._found.append(self._compute())
        yield


_running: weakref.WeakSet[Background] = weakref.WeakSet()
_starting, _is_ending = threading.Lock(), threading.Event()


@atexit.register
def _stop_all() -> None:
    """A thread that is inside a library when the interpreter exits would crash the process."""
    with _starting:
        _is_ending.set()
        running = list(_running)
    for work in running:
        work.stop()
