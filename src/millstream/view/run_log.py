"""metrics.jsonl followed while it grows: curves, fits and memory. What is kept stays small, however many lines come."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

MOST_POINTS = 400  # of a chart: more are not seen
_BLOCK = 16 << 20
_MARK = 64
_NOT_MEASURED = frozenset(("kind", "time_s", "model", "seed", "epoch"))
Job = tuple[str, int]  # a model and its seed
Line = Mapping[str, Any]


class Tail:
    """The whole lines that a file has got since the last look; one that was cut or replaced begins anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0  # how often it began
        self._forget()

    def blocks(self) -> Iterator[bytes]:
        """New lines, many at once. A torn last line waits for its end. Ask for the next after using one."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            if self._at:
                self._forget()
            return
        with file:
            stat = os.fstat(file.fileno())
            if self._at and not self._goes_on(file.fileno(), stat):
                self._forget()
            self._inode = stat.st_ino
            while True:
                block = os.pread(file.fileno(), _BLOCK, self._at)
                block = block[: block.rfind(b"\n") + 1]
                if not block:
                    return
                self._at += len(block)
                self._mark = block[-_MARK:]
                yield block

    def _goes_on(self, fd: int, stat: os.stat_result) -> bool:
        """Whether it is the file that was read, and still ends its first part as it did."""
        same = stat.st_ino == self._inode and stat.st_size >= self._at
        return same and os.pread(fd, len(self._mark), self._at - len(self._mark)) == self._mark

    def _forget(self) -> None:
        self.generation += 1
        self._at, self._inode, self._mark = 0, 0, b""


class Peaks:
    """The highest of a number over time, in at most twice MOST_POINTS points."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.values: list[int] = []
        self._each, self._in_last = 1, 0  # numbers in a point, and in the last one

    def add(self, time_s: float, value: int) -> None:
        if self._in_last and self._in_last < self._each:
            self.times[-1], self.values[-1] = time_s, max(self.values[-1], value)
            self._in_last += 1
            return
        if len(self.times) == 2 * MOST_POINTS:
            self.times = self.times[1::2]
            self.values = [max(pair) for pair in zip(self.values[::2], self.values[1::2], strict=True)]
            self._each *= 2
        self.times.append(time_s)
        self.values.append(value)
        self._in_last = 1


@dataclass
class Curve:
    """The epochs of one model and seed; of one that was written twice, the later."""

    epochs: dict[int, Line] = field(default_factory=dict[int, Line])
    changed: int = 0  # the number of lines there were then

    def columns(self) -> dict[str, list[Any]]:
        """Each thing measured, over a choice of epochs if they are many: the first, the last and the best are in it."""
        numbers = sorted(self.epochs)
        if len(numbers) > MOST_POINTS:
            places = {round(place * (len(numbers) - 1) / (MOST_POINTS - 1)) for place in range(MOST_POINTS)}
            best = self.best()
            places |= set() if best is None else {numbers.index(best[0])}
            numbers = [numbers[place] for place in sorted(places)]
        names = dict.fromkeys(name for number in numbers for name in self.epochs[number])
        return {"epoch": numbers, **{name: [self.epochs[n].get(name) for n in numbers] for name in names}}

    def best(self) -> tuple[int, str, float] | None:
        """The epoch that was best on validation, by what, and how good."""
        found = [
            (float(value), -epoch, name)
            for epoch, line in self.epochs.items()
            for name, value in line.items()
            if name.startswith("val_") and value is not None and math.isfinite(value)
        ]
        if not found:
            return None
        value, epoch, name = max(found)
        return -epoch, name, value


class RunLog:
    """What a metrics.jsonl says so far. `refresh` reads on from where it was."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._reset()

    @property
    def generation(self) -> int:
        """Another one: nothing of what was known before holds."""
        return self._tail.generation

    def refresh(self) -> None:
        generation = self.generation
        for block in self._tail.blocks():
            if self.generation != generation:
                self._reset()
                generation = self.generation
            for line in _lines(block):
                self.num_lines += 1
                try:
                    self._take(cast(Line, line))
                except (AttributeError, KeyError, TypeError, ValueError):
                    self.num_damaged += 1
        if self.generation != generation:
            self._reset()

    def _reset(self) -> None:
        self.num_lines = self.num_damaged = 0
        self.last_s: float | None = None
        self.curves: dict[Job, Curve] = {}
        self.fits: dict[Job, Line] = {}
        self.missing: dict[str, str] = {}
        self.memory = Peaks()
        self.budget: int | None = None
        self.at_work: Job | None = None  # the last one that said something and is not finished

    def _take(self, line: Line) -> None:
        kind = line["kind"]
        self.last_s = float(line.get("time_s", self.last_s or 0.0))
        if kind == "memory":
            self.memory.add(self.last_s, int(line["bytes"]))
            self.budget = line.get("budget") or self.budget
            return
        if kind == "missing":
            self.missing[str(line["model"])] = str(line["why"])
            return
        if kind not in ("look", "epoch", "fit"):
            return
        job = str(line["model"]), int(line["seed"])
        self.at_work = None if kind == "fit" else job
        if kind == "fit":
            self.fits[job] = line
            self.missing.pop(job[0], None)
        elif kind == "epoch":
            curve = self.curves.setdefault(job, Curve())
            curve.epochs[int(line["epoch"])] = {
                name: value
                for name, value in line.items()
                if name not in _NOT_MEASURED and (value is None or isinstance(value, int | float))
            }
            curve.changed = self.num_lines


def _lines(block: bytes) -> Sequence[object]:
    """Parsed at once, which is three times as fast; one by one where some are damaged."""
    try:
        return cast("list[object]", json.loads(b"[" + block[:-1].replace(b"\n", b",") + b"]"))
    except ValueError:
        return [_line(text) for text in block.splitlines()]


def _line(text: bytes) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
