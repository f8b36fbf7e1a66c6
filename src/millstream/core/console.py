"""Output while a command runs, on stderr: a progress bar on a terminal, plain lines elsewhere."""

import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import Task

LINE_S = 10.0  # between two lines in a log
REFRESH_S = 0.25  # between two redraws
_WIDE = 120  # columns: in fewer, there is room for the share that is done, but not for a bar and numbers
QUICK_S = 0.5  # shorter work shows nothing
MEMORY_S = 1.0  # between two measurements, which take milliseconds each
# Control characters but tab, marks that reorder text, and halves of pairs: a terminal would act on them or fail.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
RATE_S = 30.0  # the rate is measured over the last half minute


@runtime_checkable
class Progress(Protocol):
    """Called with the work done so far. The first call gives the starting point, which is not 0 after a resume."""

    def __call__(self, done: int, note: str = "") -> None: ...


def silent(done: int, note: str = "") -> None:
    """Progress that shows nothing."""


def ignore_message(text: str) -> None:
    """`say` that prints nothing."""


def say(text: str) -> None:
    """Print a message on stderr, since stdout is for data; of several processes only the first prints."""
    if not _is_first():
        return
    text = _printable_lines(text)
    with _lock:
        if _bars is not None:
            _bars.console.out(text, highlight=False)  # above the bars
        else:
            print(text, file=sys.stderr, flush=True)


def show(text: object) -> None:
    """Print a result on stdout."""
    print(_printable_lines(str(text)))


def printable(text: str) -> str:
    """One line with control characters as in Python source, `\\x1b`: text from data must not command a terminal."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable_json(text: str) -> str:
    """JSON with the control characters escaped that JSON itself allows."""
    return "\n".join(_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", line) for line in text.split("\n"))


def _printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def quoted(path: object) -> str:
    """A path quoted for a shell command."""
    return shlex.quote(str(path))


@contextmanager
def progress(
    label: str,
    total: int,
    *,
    unit: str = "records",
    memory: Callable[[], tuple[int, int]] | None = None,
    line_s: float = LINE_S,
) -> Generator[Progress]:
    """Show the amount done, time left and rate; with `memory`, which returns bytes used and allowed, also the RAM.

    On a terminal this is a bar that disappears when the work is done; elsewhere a line every `line_s` seconds. A thread
    draws it, so calling the function that is yielded costs only an assignment.

    >>> with progress("index", size, unit="bytes", memory=Allowance("256MB").usage) as update:
    ...     update(done)
    """
    meter = _Meter(label, total, unit, memory, line_s)
    watcher = threading.Thread(target=meter.watch, name="progress", daemon=True)
    watcher.start()
    try:
        yield meter.update
    finally:
        meter.ended.set()
        watcher.join()


@contextmanager
def interruptible(doing: str = "finishing the current batch") -> Generator[Callable[[], bool]]:
    """Yields a function that returns True after the first Ctrl-C; the second Ctrl-C interrupts."""
    is_requested = False

    def request(signum: int, frame: object) -> None:
        nonlocal is_requested
        is_requested = True
        signal.signal(signal.SIGINT, before)
        clear_line()
        say(f"{doing}; press Ctrl-C again to stop immediately")

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, request)
    try:
        yield lambda: is_requested
    finally:
        signal.signal(signal.SIGINT, before)


def clear_line() -> None:
    """Remove the ^C that a terminal shows at the cursor."""
    if is_terminal(sys.stderr):
        sys.stderr.write("\r\x1b[K")


def is_terminal(stream: IO[str]) -> bool:
    """Whether lines can be redrawn, which a dumb terminal cannot do."""
    return stream.isatty() and os.environ.get("TERM", "") != "dumb"


def colorize(text: str, color: str, stream: IO[str]) -> str:
    """Text in an ANSI color such as "1;31", on a terminal; NO_COLOR turns it off, FORCE_COLOR on."""
    wanted = not os.environ.get("NO_COLOR") and (is_terminal(stream) or bool(os.environ.get("FORCE_COLOR")))
    return f"\x1b[{color}m{text}\x1b[0m" if wanted else text


def plural(count: int, noun: str) -> str:
    """`1 record`, `2 records`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_bytes(num_bytes: float) -> str:
    """`2.1 GB`: one decimal and a decimal unit."""
    for unit in _BYTE_UNITS[:-1]:
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} {_BYTE_UNITS[-1]}"


def format_seconds(seconds: float) -> str:
    """`2 h 5 min`, `3 min 20 s`, `40 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")
_lock = threading.RLock()  # reentrant: a signal handler may print while its own thread is printing
_bars: "Bars | None" = None  # on the terminal now; concurrent jobs share it


def _reset_after_fork() -> None:
    """A forked process has no drawing thread, and its lock may be held by a thread that no longer exists."""
    global _lock, _bars
    _lock, _bars = threading.RLock(), None


os.register_at_fork(after_in_child=_reset_after_fork)


def _is_first() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


class _Meter:
    """The state of one job, and the thread that shows it."""

    def __init__(
        self, label: str, total: int, unit: str, memory: Callable[[], tuple[int, int]] | None, line_s: float
    ) -> None:
        self.label, self.total, self.unit, self.memory, self.line_s = printable(label), total, unit, memory, line_s
        self.ended = threading.Event()
        self._last: tuple[int, str] | None = None
        self._used: tuple[int, int] | None = None
        self._measured = -MEMORY_S

    def update(self, done: int, note: str = "") -> None:
        self._last = (done, note)

    def watch(self) -> None:
        wait = min(QUICK_S, self.line_s)
        while self._last is None or not _is_first():
            if self.ended.wait(wait):
                return
        start = self._last[0]
        if self.ended.wait(wait):
            return
        with _showing(self.label, self.total, start) as (bars, task):
            is_drawn, printed = is_terminal(sys.stderr), time.monotonic()
            while not self.ended.wait(min(REFRESH_S, self.line_s)):
                done, note = self._last
                bars.update(task.id, completed=done)
                if is_drawn:
                    bars.update(task.id, facts=self._facts(task, note, is_narrow=bars.console.width < _WIDE))
                    if bars.live.is_started:
                        bars.refresh()
                    else:
                        bars.start()  # also draws
                elif time.monotonic() - printed >= self.line_s:
                    say(f"{self.label}: {self._facts(task, note)}")
                    printed = time.monotonic()

    def _facts(self, task: "Task", note: str, *, is_narrow: bool = False) -> str:
        """`1,200 of 4,000 records (30%), 28 s left, RAM 210.0 of 500.0 MB, 100 records/s, note`, as far as known."""
        now = time.monotonic()
        if self.memory is not None and now - self._measured >= MEMORY_S:
            self._used, self._measured = self.memory(), now
        done = round(task.completed)
        amount = _of_bytes(done, self.total) if self.unit == "bytes" else f"{done:,} of {self.total:,} {self.unit}"
        if self.total:
            share = f"{100 * done // self.total}%"
            amount = share if is_narrow else f"{amount} ({share})"
        left = f"{format_seconds(task.time_remaining)} left" if task.time_remaining else ""
        used = f"RAM {_of_bytes(*self._used)}" if self._used and self._used[0] else ""
        rate = f"{_format_amount(task.speed, self.unit)}/s" if task.speed else ""
        return ", ".join(filter(None, [amount, left, used, rate, printable(note)]))


@contextmanager
def _showing(label: str, total: int, done: int) -> "Generator[tuple[Bars, Task]]":
    """A bar for one job, and its state; without a terminal only the state, from which rich estimates the rate."""
    global _bars
    with _lock:
        bars = _bars or _make_bars()
        task_id = bars.add_task(label, total=total, completed=done, facts="")
        if is_terminal(sys.stderr):
            _bars = bars
    try:
        yield bars, next(task for task in bars.tasks if task.id == task_id)
    finally:
        with _lock:
            bars.remove_task(task_id)
            if bars is _bars and not bars.tasks:
                bars.stop()
                _bars = None


def _make_bars() -> "Bars":
    from rich.console import Console, RenderableType
    from rich.constrain import Constrain
    from rich.progress import BarColumn, ProgressColumn, TextColumn
    from rich.progress import Progress as Bars
    from rich.table import Column
    from rich.text import Text

    class BarConsole(Console):
        def show_cursor(self, show: bool = True) -> bool:
            return False  # never hide it: a killed command could not restore it

    console = BarConsole(stderr=True, force_jupyter=False)

    class Facts(ProgressColumn):
        def render(self, task: "Task") -> Text:
            return Text(task.fields["facts"], no_wrap=True, overflow="ellipsis")  # shrinks first

    class OneLineBars(Bars):
        def get_renderable(self) -> RenderableType:
            return Constrain(self.make_tasks_table(self.tasks), console.width - 3)  # room for ^C

    label = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, max_width=30))
    bars = [BarColumn(20, complete_style="cyan", finished_style="cyan")] if console.width >= _WIDE else []
    return OneLineBars(
        label,
        *bars,
        Facts(),
        console=console,
        auto_refresh=False,
        speed_estimate_period=RATE_S,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _format_amount(count: float, unit: str) -> str:
    """`1,200 records`, `3.5 records`; for bytes `1.2 MB`."""
    if unit == "bytes":
        return format_bytes(count)
    return f"{count:,.1f} {unit}" if 0 < count < 10 and count != int(count) else f"{count:,.0f} {unit}"


def _of_bytes(part: int, whole: int) -> str:
    """`15.5 of 95.6 MB`: both in the unit of the whole."""
    number, _, unit = format_bytes(whole).partition(" ")
    scale = 1000.0 ** _BYTE_UNITS.index(unit)
    return f"{part / scale:.{0 if unit == 'B' else 1}f} of {number} {unit}"
