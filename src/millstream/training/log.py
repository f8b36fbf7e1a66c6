"""The log of a run, metrics.jsonl: appended while models train, and read while it grows, in constant memory."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from millstream.core.config import parse_json
from millstream.core.memory import Allowance
from millstream.errors import BadSource, MissingExtra
from millstream.training.folder import METRICS, JobKey, Line

_BLOCK = 16 << 20
_MARK = 64
DAMAGED_LINE = (AttributeError, KeyError, OverflowError, TypeError, ValueError)


def key_of(measure: str) -> str:
    """Where the log has this measure on validation."""
    return f"val_{measure.lower().replace(' ', '_')}"


class Log:
    """Appends lines. When a run resumes, an incomplete last line is cut off and time continues from the last one."""

    def __init__(self, run: Path, *, tensorboard: bool = False) -> None:
        self._path = run / METRICS
        self._lock = threading.Lock()
        self._started = time.monotonic() - _cut_incomplete_line(self._path)
        self._tensorboard = _tensorboard_writer(run) if tensorboard else None

    def write(self, kind: str, **values: object) -> None:
        line = {"kind": kind, "time_s": round(time.monotonic() - self._started, 3), **values}
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._tensorboard is not None and kind == "epoch":
            for name, value in values.items():
                if isinstance(value, float):
                    tag = f"{values['model']}-{values['seed']}/{name}"
                    self._tensorboard.add_scalar(tag, value, values["epoch"])  # pyright: ignore

    @contextmanager
    def memory(self, allowance: Allowance, *, interval_s: float = 1.0) -> Generator[None]:
        """Log the memory of this process and its children every `interval_s` seconds."""
        ended = threading.Event()

        def watch() -> None:
            while True:
                used, limit = allowance.usage()
                self.write("memory", bytes=used, budget=limit)
                if ended.wait(interval_s):
                    return

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


class Tail:
    """Reads what was appended to a metrics.jsonl since the last call, in constant memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0  # increases when the file was cut or replaced, and is read again from the start
        self._restart()

    def blocks(self) -> Iterator[Sequence[object]]:
        """New lines in parsed blocks; a damaged line is the ValueError that says why.

        An incomplete last line is left for later. Use a block before taking the next.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            if self.position:
                self._restart()
            return
        with file:
            stat = os.fstat(file.fileno())
            if self.position and not self._is_continued(file.fileno(), stat):
                self._restart()
            self._inode = stat.st_ino
            while True:
                block = os.pread(file.fileno(), _BLOCK, self.position)
                block = block[: block.rfind(b"\n") + 1]
                if not block:
                    return
                self.position += len(block)
                self._mark = block[-_MARK:]
                yield _parsed(block)

    def _is_continued(self, fd: int, stat: os.stat_result) -> bool:
        """Whether it is the same file and still contains what was read."""
        same = stat.st_ino == self._inode and stat.st_size >= self.position
        return same and os.pread(fd, len(self._mark), self.position - len(self._mark)) == self._mark

    def _restart(self) -> None:
        self.generation += 1
        self.position, self._inode, self._mark = 0, 0, b""  # the position is after the last complete line


def read_lines(run: Path) -> list[Line]:
    """All complete lines of a run, except damaged ones."""
    return _complete_lines(Tail(run / METRICS))


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One model with one seed, trained and scored."""

    family: str  # trained, baseline, null
    title: str
    parameters: int | None
    fit_s: float
    score_s: float
    num_scored: int
    trace_bytes: int  # per record: what the model reads
    extra_forwards: int
    extra_tokens: float | None  # generated for each question, in addition to its answer; None: unknown
    probabilities: bool
    chosen: Mapping[str, object]


@dataclass
class Metrics:
    """The lines of a run; of lines written twice, the last."""

    fits: dict[JobKey, Fit] = field(default_factory=dict[JobKey, Fit])
    epochs: dict[tuple[JobKey, int], Line] = field(default_factory=dict[tuple[JobKey, int], Line])
    memory: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    budget: int | None = None
    missing: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def history(self) -> Sequence[Line]:
        return list(self.epochs.values())

    def take(self, line: Line) -> None:
        """Add a line; raises one of DAMAGED_LINE if it is damaged."""
        kind = line.get("kind")
        if kind == "epoch":
            self.epochs[JobKey.of_line(line), _int(line["epoch"])] = line
        elif kind == "fit":
            self.fits[JobKey.of_line(line)] = _fit(line)
            self.missing.pop(str(line["model"]), None)
        elif kind == "memory":
            self.memory.append((_float(line["time_s"]), _int(line["bytes"])))
            self.budget = self.budget if line.get("budget") is None else _int(line["budget"])
        elif kind == "missing":
            self.missing[str(line["model"])] = str(line["why"])


def read_metrics(file: Path) -> Metrics:
    """The metrics of a run that is training, was resumed, or is finished. An incomplete last line is left out."""
    metrics = Metrics()
    lines = [line for block in Tail(file).blocks() for line in block]
    for number, line in enumerate(lines, start=1):
        if isinstance(line, ValueError):
            raise _damaged(file, number, f"not valid JSON: {line}")
        try:
            metrics.take(cast(Line, line))
        except DAMAGED_LINE as error:
            raise _damaged(file, number, f"{type(error).__name__}: {error}") from None
    return metrics


def _fit(line: Line) -> Fit:
    return Fit(
        family=str(line["family"]),
        title=str(line["title"]),
        parameters=None if line["parameters"] is None else _int(line["parameters"]),
        fit_s=_float(line["fit_s"]),
        score_s=_float(line["score_s"]),
        num_scored=_int(line["num_scored"]),
        trace_bytes=_int(line["trace_bytes"]),
        extra_forwards=_int(line["extra_forwards"]),
        extra_tokens=None if (tokens := line.get("extra_tokens", 0)) is None else _float(tokens),
        probabilities=bool(line["probabilities"]),
        chosen=dict(cast("Mapping[str, object]", line["chosen"])),
    )


def _int(value: object) -> int:
    return int(cast(int, value))


def _float(value: object) -> float:
    return float(cast(float, value))


def _damaged(file: Path, number: int, what: str) -> BadSource:
    return BadSource(f"{file}: line {number} is damaged ({what}). Remove this line; all models are kept")


def _complete_lines(tail: Tail) -> list[Line]:
    lines = (cast(Line, line) for block in tail.blocks() for line in block if isinstance(line, dict))
    return [line for line in lines if "kind" in line]


def _cut_incomplete_line(path: Path) -> float:
    """Cut off an incomplete last line; returns the time of the last complete one, or 0."""
    tail = Tail(path)
    lines = _complete_lines(tail)
    if path.exists() and tail.position < path.stat().st_size:
        os.truncate(path, tail.position)
    times = [line.get("time_s") for line in lines[-1:]]
    return max((float(time_s) for time_s in times if isinstance(time_s, int | float)), default=0.0)


def _parsed(block: bytes) -> Sequence[object]:
    """Parsed as one array, which is three times as fast; line by line if some are damaged."""
    try:
        return cast("list[object]", json.loads(b"[" + block[:-1].replace(b"\n", b",") + b"]"))
    except (ValueError, RecursionError):
        return [_parsed_line(text) for text in block.split(b"\n")[:-1]]


def _parsed_line(text: bytes) -> object:
    try:
        return parse_json(text)
    except ValueError as error:
        return error


def _tensorboard_writer(run: Path) -> object:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        raise MissingExtra("tensorboard=true needs the package 'tensorboard': pip install tensorboard") from None
    return SummaryWriter(str(run / "tensorboard"))
