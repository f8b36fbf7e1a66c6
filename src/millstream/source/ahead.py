"""An iterator run in a thread of its own, a few items ahead of whoever takes them."""

import queue
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Iterator[T], *, depth: int) -> Generator[T]:
    """The same items in the same order; errors come where the item would have; closing it stops the thread."""
    line: queue.Queue[tuple[bool, T | BaseException | None]] = queue.Queue(depth)
    stopped = threading.Event()

    def work() -> None:
        try:
            for item in items:
                _put(line, (True, item), stopped)
                if stopped.is_set():
                    return
            _put(line, (False, None), stopped)
        except BaseException as error:
            _put(line, (False, error), stopped)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            more, item = line.get()
            if not more:
                if item is not None:
                    raise item  # pyright: ignore
                return
            yield item  # pyright: ignore
    finally:
        stopped.set()
        thread.join()


def _put(line: "queue.Queue[T]", item: T, stopped: threading.Event) -> None:
    while not stopped.is_set():
        try:
            line.put(item, timeout=0.1)
            return
        except queue.Full:
            continue
