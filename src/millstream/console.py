"""What people see while a command runs: progress on a terminal, plain lines elsewhere, all on stderr."""

import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import IO, Protocol

from millstream.config import parse_bytes, tree_bytes
from millstream.progress_line import Pace, facts_of, fitted_line, format_bytes, format_seconds, plain_line

__all__ = [
    "Progress",
    "format_bytes",
    "format_seconds",
    "interruptible",
    "is_terminal",
    "painted",
    "progress",
    "quoted",
    "say",
    "silent",
    "unsaid",
    "wipe_echo",
    "within",
]

INTERVAL_S = 10.0  # between two lines of a log
REFRESH_S = 0.25  # between two looks on a terminal
QUICK_S = 0.5  # what takes less shows nothing
MEMORY_S = 1.0  # between two looks at the memory: the kernel takes its time to count it
CLEAR = "\r\x1b[K"


class Progress(Protocol):
    """Told how far a job has come. The first time says where it begins, which may be far on when it goes on."""

    def __call__(self, done: int, note: str = "") -> None: ...


def silent(done: int, note: str = "") -> None:
    """Progress that nobody looks at."""


def unsaid(text: str) -> None:
    """`say` to nobody."""


def say(text: str) -> None:
    """Talk to the person; stdout is for data. Of several processes that work together, the first one talks."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    with _writing:
        _wipe()
        print(text, file=sys.stderr, flush=True)


def quoted(path: object) -> str:
    """As it is written in a command, so that it can be pasted."""
    return shlex.quote(str(path))


@contextmanager
def progress(
    label: str, total: int, *, unit: str = "records", memory: Callable[[], tuple[int, int]] | None = None
) -> Generator[Progress]:
    """Shows amount, rate and time left; and bytes held and allowed, if `memory` gives them, as `within("1GB")` does.

    On a terminal one line that goes when the work is done; elsewhere a line every ten seconds. To be told costs an
    assignment: a thread looks.

    >>> with progress("index", size, unit="bytes", memory=within("256MB")) as update:
    ...     update(done)
    """
    meter = _Meter(label, total, unit, memory)
    watcher = threading.Thread(target=meter.watch, name="progress", daemon=True)
    watcher.start()
    try:
        yield meter.update
    finally:
        meter.ended.set()
        watcher.join()


def within(memory: int | str) -> Callable[[], tuple[int, int]]:
    """What this process and its children hold, and may hold: `memory` beside what they have now."""
    budget = tree_bytes() + parse_bytes(memory)
    return lambda: (tree_bytes(), budget)


@contextmanager
def interruptible(doing: str = "finishing the batch in progress") -> Generator[Callable[[], bool]]:
    """Within it the first Ctrl-C only makes the function given true; the second one interrupts."""
    asked = False

    def ask(signum: int, frame: object) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, before)
        wipe_echo()
        say(f"{doing}; press Ctrl-C again to stop at once")

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def wipe_echo() -> None:
    """Take away the ^C that a terminal shows where the cursor is."""
    if is_terminal(sys.stderr):
        sys.stderr.write(CLEAR)


def is_terminal(stream: IO[str]) -> bool:
    """Whether lines can be drawn over: what is called dumb cannot do that."""
    return stream.isatty() and os.environ.get("TERM", "") != "dumb"


def painted(text: str, colour: str, stream: IO[str]) -> str:
    """In a colour (as in "1;31") on a terminal that wants any: NO_COLOR says no, FORCE_COLOR yes."""
    wanted = not os.environ.get("NO_COLOR") and (is_terminal(stream) or bool(os.environ.get("FORCE_COLOR")))
    return f"\x1b[{colour}m{text}\x1b[0m" if wanted else text


_writing = threading.RLock()  # a signal may come, and talk, while its thread is talking
_drawn = ""  # what stands on the last line of the terminal, to be drawn over


def _begin_anew() -> None:
    """In a forked process: the thread that draws is not there, and may have held the lock."""
    global _writing, _drawn
    _writing, _drawn = threading.RLock(), ""


os.register_at_fork(after_in_child=_begin_anew)


def _wipe() -> None:
    global _drawn
    if _drawn:
        sys.stderr.write(CLEAR)
        sys.stderr.flush()
        _drawn = ""


def _draw(line: str, painted_line: str) -> None:
    global _drawn
    with _writing:
        if line != _drawn:
            sys.stderr.write(CLEAR + painted_line)
            sys.stderr.flush()
            _drawn = line


class _Meter:
    """What was told of a job, and the thread that shows it."""

    def __init__(self, label: str, total: int, unit: str, memory: Callable[[], tuple[int, int]] | None) -> None:
        self.label, self.total, self.unit, self.memory = label, total, unit, memory
        self.ended = threading.Event()
        self._pace = Pace()
        self._told: tuple[int, str] | None = None
        self._held: tuple[int, int] | None = None
        self._looked = -MEMORY_S

    def update(self, done: int, note: str = "") -> None:
        if self._told is None:
            self._pace.look(time.monotonic(), done)
        self._told = (done, note)

    def watch(self) -> None:
        drawable = is_terminal(sys.stderr)
        wait = QUICK_S if drawable else INTERVAL_S
        while not self.ended.wait(wait):
            if self._told is not None:
                self._show(*self._told, drawable=drawable)
            wait = REFRESH_S if drawable else INTERVAL_S
        if drawable:
            with _writing:
                _wipe()

    def _show(self, done: int, note: str, *, drawable: bool) -> None:
        now = time.monotonic()
        self._pace.look(now, done)
        if self.memory is not None and now - self._looked >= MEMORY_S:
            self._held, self._looked = self.memory(), now
        facts = facts_of(done, self.total, self.unit, self._pace, self._held)
        if not drawable:
            say(plain_line(self.label, done, self.total, facts, note))
            return
        marks = "━─" if "utf" in (sys.stderr.encoding or "").lower() else "#-"
        width = shutil.get_terminal_size().columns - 3  # where ^C may be shown
        line = fitted_line(self.label, done, self.total, facts, note, width=width, marks=marks)
        full = line.count(marks[0])
        bar = marks[0] * full
        _draw(line, line.replace(bar, painted(bar, "36", sys.stderr), 1) if full > 1 else line)
