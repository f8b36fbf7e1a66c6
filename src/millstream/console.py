"""What people see while a command runs: progress on a terminal, plain lines elsewhere, all on stderr."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol

INTERVAL_S = 10.0


class Progress(Protocol):
    """Told how far a job has come."""

    def __call__(self, done: int, note: str = "") -> None: ...


def silent(done: int, note: str = "") -> None:
    """Progress that nobody looks at."""


def unsaid(text: str) -> None:
    """`say` to nobody."""


def format_bytes(num_bytes: float) -> str:
    """`2.1 GB`: three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def say(text: str) -> None:
    """Talk to the person; stdout is for data."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def progress(label: str, total: int, *, unit: str = "records") -> Generator[Progress]:
    """A progress display that shows items, rate and time left."""
    if sys.stderr.isatty():
        with _bar(label, total, unit) as update:
            yield update
        return
    start = last = time.monotonic()

    def line(done: int, note: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= INTERVAL_S:
            last = now
            rate = done / (now - start)
            say(f"{label}: {_amount(done, unit)} of {_amount(total, unit)}, {_amount(rate, unit)}/s {note}".rstrip())

    yield line


@contextmanager
def _bar(label: str, total: int, unit: str) -> Generator[Progress]:
    from rich import progress as rich
    from rich.console import Console

    bytes_columns = (rich.DownloadColumn(), rich.TransferSpeedColumn())
    count_columns = (rich.MofNCompleteColumn(), rich.TextColumn(unit))
    columns = bytes_columns if unit == "bytes" else count_columns
    with rich.Progress(
        rich.TextColumn(label),
        rich.BarColumn(),
        *columns,
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        transient=True,
    ) as display:
        task = display.add_task(label, total=total, note="")

        def update(done: int, note: str = "") -> None:
            display.update(task, completed=done, note=note)

        yield update


def _amount(count: float, unit: str) -> str:
    return format_bytes(count) if unit == "bytes" else f"{count:.0f} {unit}"


@contextmanager
def interruptible() -> Generator[Callable[[], bool]]:
    """Within it the first Ctrl-C only makes the function given true; the second one interrupts."""
    asked = False

    def ask(signum: int, frame: object) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, before)
        say("finishing the batch in progress; press Ctrl-C again to stop at once")

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def format_seconds(seconds: float) -> str:
    """`2 h 5 min`, `3 min 20 s`, `40 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
