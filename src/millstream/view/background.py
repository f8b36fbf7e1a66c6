"""Work that goes on while pages ask about it: in a thread, which ends when the process does."""

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

PATIENCE_S = 0.25  # that an answer waits for the work to be whole


class Background:
    """The steps of a generator, one after another. What they change and others read, they change under `lock`."""

    def __init__(self, steps: Iterator[None]) -> None:
        self.lock = threading.Lock()
        self.is_done = False
        self._steps = steps
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._go, daemon=True)

    def start(self) -> None:
        """Begin; while the process ends, nothing is begun any more."""
        with _starting:
            if not _is_ending.is_set():
                self._thread.start()
                _running.add(self)

    def wait(self, seconds: float | None = PATIENCE_S) -> None:
        """Until all is done or the time is over; what went wrong in the thread goes wrong here."""
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """After the step at work."""
        self._stop.set()
        self._thread.join(2)

    def _go(self) -> None:
        try:
            for _ in self._steps:
                if self._stop.is_set():
                    return
            self.is_done = True
        except Exception as error:
            self._error = error


class Later(Generic[T]):
    """A value that takes longer than a page may wait for; it is computed once, from when it is first asked for.

    >>> texts = Later(lambda: read_texts(traces))
    >>> texts.soon()  # None: not yet
    """

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute = compute
        self._found: list[T] = []
        self._work = Background(self._steps())
        self._starting = threading.Lock()
        self._is_started = self._is_due = False

    def start(self, delay: float = 0.0) -> None:
        """Begin, after so many seconds, unless it has begun."""
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
        """The value, or None if it is not there by then."""
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
    """A thread that is within a library when the interpreter goes takes the process down with an ugly word."""
    with _starting:
        _is_ending.set()
        running = list(_running)
    for work in running:
        work.stop()
