"""What takes longer than a page may wait for: computed once, beside the answers."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Generic, TypeVar

T = TypeVar("T")
PATIENCE_S = 0.5  # that an answer may wait


class Later(Generic[T]):
    """A value that a thread begins to compute when it is made, or with `start=False` when it is first asked for.

    >>> texts = Later(lambda: read_texts(traces))
    >>> texts.soon()  # None: not yet
    """

    def __init__(self, compute: Callable[[], T], *, start: bool = True) -> None:
        self._compute = compute
        self._future: Future[T] = Future()
        self._lock = threading.Lock()
        self._is_started = False
        if start:
            self.start()

    def start(self, delay: float = 0.0) -> None:
        """Begin, after so many seconds, unless that was done before."""
        with self._lock:
            if not self._is_started:
                self._is_started = True
                worker = threading.Timer(delay, self._work)
                worker.daemon = True
                worker.start()

    def _work(self) -> None:
        try:
            self._future.set_result(self._compute())
        except BaseException as error:  # raised where the value is asked for
            self._future.set_exception(error)

    def soon(self, timeout: float = PATIENCE_S) -> T | None:
        """The value, or None if it is not there yet."""
        self.start()
        try:
            return self._future.result(timeout)
        except NotYet:
            return None

    def wait(self) -> T:
        self.start()
        return self._future.result()
