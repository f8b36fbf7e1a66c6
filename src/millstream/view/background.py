"""Work in a background thread that pages can query; it ends with the process."""

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

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
