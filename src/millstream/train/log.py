"""metrics.jsonl: what happens in a run, a line each, and how much memory it takes, looked at every second."""

import ctypes
import json
import os
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar, cast

from millstream.config import resident_bytes, tree_bytes
from millstream.errors import MissingExtra
from millstream.train.folder import METRICS

INTERVAL_S = 1.0
T = TypeVar("T")


class Log:
    """Appends lines. A line that a kill has torn is cut off when the run goes on, and time goes on from the last."""

    def __init__(self, run: Path, *, tensorboard: bool = False) -> None:
        self._path = run / METRICS
        self._lock = threading.Lock()
        self._begun = time.monotonic() - _mend(self._path)[1]
        self._board = _board(run) if tensorboard else None

    def write(self, kind: str, **values: object) -> None:
        line = {"kind": kind, "time_s": round(time.monotonic() - self._begun, 3), **values}
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._board is not None and kind == "epoch":
            for name, value in values.items():
                if isinstance(value, float):
                    tag = f"{values['model']}-{values['seed']}/{name}"
                    self._board.add_scalar(tag, value, values["epoch"])  # pyright: ignore

    @contextmanager
    def memory(self, budget: int) -> Generator[None]:
        """Within it the memory of this process and its children is written down every second."""
        ended = threading.Event()

        def watch() -> None:
            while True:
                self.write("memory", bytes=tree_bytes(), budget=budget)
                if ended.wait(INTERVAL_S):
                    return

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


def read_lines(run: Path) -> list[dict[str, object]]:
    """All whole lines of a run."""
    return _mend(run / METRICS, cut=False)[0]


class Clock:
    """How long a loop takes, and how much of it is waiting for data."""

    def __init__(self) -> None:
        self.waited = 0.0
        self._begun = time.perf_counter()
        self._ended: float | None = None

    @property
    def seconds(self) -> float:
        return (self._ended or time.perf_counter()) - self._begun

    @property
    def share(self) -> float:
        return self.waited / max(self.seconds, 1e-9)

    def stop(self) -> None:
        self._ended = time.perf_counter()

    def watch(self, batches: Iterable[T]) -> Generator[T]:
        iterator = iter(batches)
        while True:
            begun = time.perf_counter()
            batch = next(iterator, None)
            self.waited += time.perf_counter() - begun
            if batch is None:
                return
            yield batch
            del batch


class Heap:
    """Lets malloc return what was freed: tensors of ever new sizes leave holes, which glibc would keep for itself.

    When the process has grown by `slack` bytes; more often, getting the pages again would cost more than it saves.
    """

    def __init__(self, slack: int) -> None:
        self._slack = slack
        self._floor = resident_bytes()

    def settle(self) -> None:
        if resident_bytes() > self._floor + self._slack:
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
            self._floor = resident_bytes()


def _mend(path: Path, *, cut: bool = True) -> tuple[list[dict[str, object]], float]:
    """The whole lines of a file, and the time of the last one."""
    lines: list[dict[str, object]] = []
    if not path.exists():
        return lines, 0.0
    end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            lines.append(cast("dict[str, object]", json.loads(line)))
    if cut and end < path.stat().st_size:
        os.truncate(path, end)
    return lines, float(cast(float, lines[-1].get("time_s", 0.0))) if lines else 0.0


def _board(run: Path) -> object:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        raise MissingExtra("tensorboard=true needs it: pip install tensorboard") from None
    return SummaryWriter(str(run / "tensorboard"))
