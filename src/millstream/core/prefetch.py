"""Items made ahead of their consumer by threads, in order, within a budget of bytes. Knows nothing about batches."""

import atexit
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from millstream.core.console import format_bytes
from millstream.errors import OverBudget

T = TypeVar("T")
SHARED_BYTES = 4 << 20  # of work: to start a thread takes as long as reading half a megabyte


class Prefetch(Generic[T]):
    """Makes the items 0 to `steps` - 1, each in one of `threads`, and yields them in order.

    `cost(step)` returns the bytes an item needs while it is made; `make(step)` returns the item and its final bytes.
    Items in progress, waiting items and the consumer's latest item take at most `budget` bytes together; at most
    `ahead` items are in progress or waiting. An error is raised in place of its item. Once the first item is
    made, `cost` is an estimate: an item that seems larger than the budget is then made alone, not refused.

    >>> for item in Prefetch(make, cost, steps=100, threads=2, ahead=4, budget=10**9).items(): ...
    """

    def __init__(
        self,
        make: Callable[[int], tuple[T, int]],
        cost: Callable[[int], int],
        *,
        steps: int,
        threads: int,
        ahead: int,
        budget: int,
    ) -> None:
        self._make, self._cost, self._steps = make, cost, steps
        self._num_threads, self._ahead, self._budget = threads, ahead, budget
        self._turn = threading.Lock()  # held by the thread that starts the next item
        self._changed = threading.Condition()
        self._begun = 0
        self._taken = -1  # the item the consumer has
        self._first_is_made = False
        self._held: dict[int, int] = {}  # bytes by item
        self._made: dict[int, tuple[T | None, BaseException | None]] = {}
        self._stopped = False
        self._threads: list[threading.Thread] = []

    def items(self) -> Generator[T]:
        """The items in order. Closing the generator, or leaving the loop, ends the threads."""
        if not self._num_threads:
            yield from self._inline()
            return
        for number in range(min(self._num_threads, self._steps)):
            thread = threading.Thread(target=self._work, name=f"millstream-loader-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()
        _running.add(self)
        try:
            for step in range(self._steps):
                yield self._next(step)
        finally:
            self.close()

    def close(self) -> None:
        """End the threads, after the items in progress."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        _running.discard(self)
        self._threads.clear()
        self._made.clear()
        self._held.clear()

    def _inline(self) -> Generator[T]:
        for step in range(self._steps):
            need = self._cost(step)
            if not step:
                check_budget(need, self._budget)
            item, _ = self._make(step)
            yield item
            del item

    def _next(self, step: int) -> T:
        with self._changed:
            while step not in self._made:
                self._changed.wait()
            item, error = self._made.pop(step)
            self._taken = step
            self._held.pop(step - 1, None)  # the consumer drops the previous item for this one
            self._changed.notify_all()
        if error is not None:
            raise error
        return item  # pyright: ignore[reportReturnType]

    def _work(self) -> None:
        while True:
            with self._turn:
                step = self._begin()
            if step is None:
                return
            if step >= 0:
                self._finish(step)

    def _begin(self) -> int | None:
        """Wait for room and take the next item; None at the end, -1 if its cost alone is an error."""
        step = self._begun
        with self._changed:  # `cost` learns from the first item what the others take, and must not delay it
            self._changed.wait_for(lambda: self._stopped or self._first_is_made or not step)
        if self._stopped or step >= self._steps:
            return None
        try:
            need = self._cost(step)
            if not step:
                check_budget(need, self._budget)
        except BaseException as error:
            self._begun += 1
            self._publish(step, None, 0, error)
            return -1
        with self._changed:
            while not self._stopped and not self._has_room(step, need):
                self._changed.wait()
            if self._stopped:
                return None
            self._held[step] = need
            self._begun += 1
        return step

    def _has_room(self, step: int, need: int) -> bool:
        if step > self._taken + self._ahead:
            return False
        held = sum(self._held.values())
        return held + need <= self._budget or not held or self._held.keys() == {self._taken}

    def _finish(self, step: int) -> None:
        try:
            item, num_bytes = self._make(step)
            self._publish(step, item, num_bytes, None)
        except BaseException as error:
            self._publish(step, None, 0, error)

    def _publish(self, step: int, item: T | None, num_bytes: int, error: BaseException | None) -> None:
        with self._changed:
            if not self._stopped:
                self._made[step] = item, error
                self._held[step] = num_bytes
            self._first_is_made = True
            self._changed.notify_all()


_sharers = ContextVar("sharers", default=1)


@contextmanager
def shared_by(threads: int) -> Generator[None]:
    """Let `share` in this thread use so many threads."""
    token = _sharers.set(threads)
    try:
        yield
    finally:
        _sharers.reset(token)


def share(work: Callable[[Sequence[T]], None], items: Sequence[T], *, sizes: Sequence[int]) -> None:
    """Do `work` on all items: each thread gets neighbours, of about as many bytes. Small work is not shared."""
    total, count = sum(sizes), _sharers.get()
    if count < 2 or total < SHARED_BYTES:
        work(items)
        return
    parts: list[list[T]] = [[] for _ in range(count)]
    done = 0
    for item, size in zip(items, sizes, strict=True):
        parts[min(done * count // total, count - 1)].append(item)
        done += size
    with ThreadPoolExecutor(count - 1) as threads:
        others = [threads.submit(work, part) for part in parts[1:]]
        work(parts[0])
        for other in others:
            other.result()


def check_budget(need: int, budget: int) -> None:
    """Raise OverBudget if a batch does not fit."""
    if need > budget:
        raise OverBudget(
            f"one batch needs {format_bytes(need)}, but batches may take {format_bytes(budget)}: "
            "increase memory or reduce batch_size"
        )


_running = WeakSet[Prefetch[Any]]()


@atexit.register
def _end() -> None:
    """End threads of abandoned iterators: one that still runs when Python exits aborts it with SIGABRT."""
    for prefetch in list(_running):
        prefetch.close()
