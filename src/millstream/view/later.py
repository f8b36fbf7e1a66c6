"""What takes longer than a page may wait for: computed once, beside the answers."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Generic, TypeVar

T = TypeVar("T")
PATIENCE_S = 0.5  # that an answer may wait


class Later(Generic[T]):
    """A value that a thread begins to compute at once.

    >>> texts = Later(lambda: read_texts(traces))
    >>> texts.soon()  # None: not yet
    """

    def __init__(self, compute: Callable[[], T]) -> None:
        self._future: Future[T] = Future()

        def work() -> None:
            try:
                self._future.set_result(compute())
            except BaseException as error:  # raised where the value is asked for
                self._future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()

    def soon(self, timeout: float = PATIENCE_S) -> T | None:
        """The value, or None if it is not there yet."""
        try:
            return self._future.result(timeout)
        except NotYet:
            return None

    def wait(self) -> T:
        return self._future.result()
