"""The page of a run folder: training progress while it runs, and the report, made in the background."""

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from millstream.core.console import format_seconds
from millstream.core.registry import plug
from millstream.errors import BadSource, MillstreamError
from millstream.report import report_of
from millstream.report.measures import spaced
from millstream.report.tables import clipped, flat
from millstream.training.folder import (
    CHECKPOINTS,
    CONFIG,
    DATA,
    ENVIRONMENT,
    METRICS,
    PREDICTIONS,
    SCORES,
    JobKey,
    kind_of,
    read_mapping,
    requested_models,
)
from millstream.training.log import Fit, Metrics, Tail
from millstream.view import Query, View

PAGE = "report.html"
_MAX_TEXT = 2000  # characters of a setting
_FIT = ("family", "title", "parameters", "fit_s", "score_s", "num_scored")
MOST_POINTS = 400  # per chart: more would not be visible
QUIET_S = 10.0  # training writes a line every second
_NAMED = 6  # models listed in a sentence
_NOT_MEASURED = frozenset(("kind", "time_s", "model", "seed", "fold", "labels", "epoch"))
Line = Mapping[str, Any]


def run_view(run: Path) -> View:
    """The page of a run that is training, has stopped or is finished.

    >>> run_view(Path("runs/first")).answers["state"](Query({}))
    """
    shown = _Run(run)
    return View(
        "run",
        "Run",
        answers={"state": shown.state, "settings": shown.settings},
        actions={"make-report": shown.make_report},
        files={"report": lambda: shown.report.path},
    )


class _Run:
    def __init__(self, run: Path) -> None:
        if not (run / CONFIG).is_file():
            raise BadSource(f"{run}: has no {CONFIG}, so it is not a run. Next: millstream train --help")
        self._run = run
        self.report = RunReport(run)
        self._state = RunState(run)
        self._log = RunLog(run / METRICS)
        self._lock = threading.Lock()  # several pages may query in parallel

    def state(self, query: Query) -> object:
        """Everything, or what has changed since the page saw `since` lines of log `generation`."""
        with self._lock:
            log = self._log
            log.refresh()
            begins = query.number("generation") != log.generation
            since = 0 if begins else query.number("since")
            state = self._state.summary(log, self._config())
            return {
                **state,
                "generation": log.generation,
                "begins": begins,
                "lines": log.num_lines,
                "damaged": log.num_damaged,
                "elapsed_s": log.last_s,
                "curves": [_curve(job, log) for job, curve in log.curves.items() if curve.changed > since or begins],
                "fits": [_fit(job, fit) for job, fit in log.metrics.fits.items()],
                "missing": [{"model": model, "why": why} for model, why in log.metrics.missing.items()],
                "memory": {"time_s": list(log.memory.times), "bytes": list(log.memory.values), "budget": log.budget}
                if begins or log.num_lines > since
                else None,
                "report": self.report.summary(),
            }

    def settings(self, query: Query) -> object:
        """The settings, data and environment of the run as names and texts."""
        tables: dict[str, list[tuple[str, str]]] = {}
        for title, name in (("Settings", CONFIG), ("Data", DATA), ("Environment", ENVIRONMENT)):
            if (self._run / name).is_file():
                tables[title] = [(key, clipped(text, _MAX_TEXT)) for key, text in flat(read_mapping(self._run / name))]
        return {"epochs": self._config().get("epochs"), "tables": tables}

    def make_report(self, query: Query) -> object:
        """Start making report.html; `state` reports when it is ready."""
        return self.report.make()

    def _config(self) -> Mapping[str, object]:
        return read_mapping(self._run / CONFIG)


class RunReport:
    """The report of a run folder. Drawing it takes seconds, so a thread does it."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._making: threading.Thread | None = None
        self._error: str | None = None

    @property
    def path(self) -> Path:
        return self._run / PAGE

    def summary(self) -> dict[str, object]:
        written, scored = _modified(self.path), _modified(self._run / PREDICTIONS)
        return {
            "version": None if written is None else str(written),
            "is_older": written is not None and scored is not None and written < scored,
            "can_be_made": scored is not None,
            "is_being_made": self._making is not None and self._making.is_alive(),
            "error": self._error,
        }

    def make(self) -> dict[str, object]:
        """Start making the report, unless a thread already does."""
        with self._lock:
            if self._making is None or not self._making.is_alive():
                self._error = None
                self._making = threading.Thread(target=self._make)  # no daemon: a report that was started is finished
                self._making.start()
        return self.summary()

    def wait(self) -> None:
        """Wait for the report that is being made."""
        if self._making is not None:
            self._making.join()

    def _make(self) -> None:
        try:
            report_of(self._run).write(self.path)
        except (MillstreamError, OSError) as error:
            self._error = " ".join(str(error).split())
        except Exception as error:  # the waiting page must see unexpected errors, too
            self._error = f"{type(error).__name__}: {error}"
            raise


class RunLog:
    """The metrics of a run so far. `refresh` reads what was added to its metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._reset()

    @property
    def generation(self) -> int:
        """A new number means that nothing read before is valid."""
        return self._tail.generation

    def refresh(self) -> None:
        generation = self.generation
        for block in self._tail.blocks():
            if self.generation != generation:
                self._reset()
                generation = self.generation
            for line in block:
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
        self.metrics = Metrics()  # without memory, of which only the peaks are kept
        self.memory = Peaks()
        self.budget: int | None = None
        self.curves: dict[JobKey, Curve] = {}
        self.at_work: JobKey | None = None  # the last job that logged something and is not finished

    def _take(self, line: Line) -> None:
        kind = line["kind"]
        self.last_s = float(line.get("time_s", self.last_s or 0.0))
        if kind == "memory":
            self.memory.add(self.last_s, int(line["bytes"]))
            self.budget = line.get("budget") or self.budget
            return
        self.metrics.take(line)
        if kind in ("look", "epoch", "fit"):
            job = JobKey.of_line(line)
            self.at_work = None if kind == "fit" else job
            if kind == "epoch":
                self.curves.setdefault(job, Curve()).add(line, at=self.num_lines)


class RunState:
    """The state of one run folder: which models are finished, and which one is training."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._kind = plug(kind_of(run), "kind")
        self._expanded: dict[tuple[str, ...], list[str]] = {}  # names, some of them groups -> models
        self._expanding: threading.Thread | None = None

    def summary(self, log: RunLog, config: Mapping[str, object]) -> dict[str, object]:
        """`state` is waiting, training, finished, stopped, or quiet while it is unknown which; `text` explains it."""
        age = self._age()
        if age is None or not log.num_lines:
            return {"state": "waiting", "text": f"{METRICS} is still empty.", "age_s": age, "at_work": None}
        left = self._left(log, config, expand=age > QUIET_S)
        if left == []:
            state, text = "finished", f"All models are finished; the last log line was written {_ago(age)}."
        elif age <= QUIET_S:
            state, text = "training", f"Last log line: {_ago(age)}."
        elif left is None:
            state, text = "quiet", f"Last log line: {_ago(age)}. While training, one is written every second."
        else:
            again = f"millstream train {self._run / CONFIG} out={self._run}"
            text = (
                f"Last log line: {_ago(age)}. While training, one is written every second, so it has stopped or hangs. "
            )
            named = ", ".join(left[:_NAMED]) + (f" and {len(left) - _NAMED} more" if len(left) > _NAMED else "")
            state, text = "stopped", f"{text}Not finished: {named}. To resume: {again}"
        at_work = self._at_work(log) if state == "training" else None
        return {"state": state, "text": text, "age_s": age, "at_work": at_work}

    def _age(self) -> float | None:
        try:
            return max(0.0, time.time() - (self._run / METRICS).stat().st_mtime)
        except OSError:
            return None

    def _left(self, log: RunLog, config: Mapping[str, object], *, expand: bool) -> list[str] | None:
        """The unfinished models of the run; None while that is unknown."""
        if "evaluates" in config:
            return []
        names = requested_models(config)
        if not names:
            return None
        if any(group in names for group in self._kind.MODEL_GROUPS):
            expanded = self._models_of(tuple(names), expand=expand)
            if expanded is None:
                return None
            names = expanded
        first, seeds = _integer(config.get("seed"), 0), _integer(config.get("seeds"), 1)
        folds = range(1, 1 + folds) if (folds := _integer(config.get("folds"), 0)) else range(1)
        left: list[str] = []
        for name in dict.fromkeys(names):
            if name in log.metrics.missing:
                continue
            fits = log.metrics.fits
            is_fitted, is_net = (any(job.model == name for job in jobs) for jobs in (fits, log.curves))
            of_seeds = range(first, first + (1 if is_fitted and not is_net else seeds))  # a baseline is fitted once
            undone = [seed for seed in of_seeds if any(JobKey(name, seed, fold) not in fits for fold in folds)]
            if undone:
                left.append(name if len(undone) == seeds else f"{name} (seed {', '.join(map(str, undone))})")
        return left

    def _models_of(self, names: tuple[str, ...], *, expand: bool) -> list[str] | None:
        """The models in named groups. Importing them takes seconds, so a thread does it, only when needed."""
        if self._expanding is None and expand:
            self._expanding = threading.Thread(target=self._expand, args=[names], daemon=True)
            self._expanding.start()
        return self._expanded.get(names)

    def _expand(self, names: tuple[str, ...]) -> None:
        self._expanded[names] = self._kind.expand_models(names)

    def _at_work(self, log: RunLog) -> dict[str, object] | None:
        job, epoch = log.at_work, None
        if job is not None:
            epochs = log.curves[job].epochs if job in log.curves else {}
            epoch = max(epochs, default=-1) + 1
        else:  # a model that has started but logged nothing yet
            folders = [folder for folder in (self._run / CHECKPOINTS).glob("*-*") if not (folder / SCORES).exists()]
            newest = max(folders, key=lambda folder: folder.stat().st_mtime, default=None)
            if newest is None:
                return None
            job = JobKey.parse(newest.name)
            if job is None or job in log.metrics.fits:
                return None
        return {**job.about, "epoch": epoch}


@dataclass
class Curve:
    """The epochs of one model and seed; of an epoch written twice, the later."""

    epochs: dict[int, Line] = field(default_factory=dict[int, Line])
    changed: int = 0  # number of log lines at its last change

    def add(self, line: Line, *, at: int) -> None:
        self.epochs[int(line["epoch"])] = {
            name: value
            for name, value in line.items()
            if name not in _NOT_MEASURED and (value is None or isinstance(value, int | float))
        }
        self.changed = at

    def columns(self) -> dict[str, list[Any]]:
        """Each measure over the epochs, thinned if there are many; the first, last and best epoch are kept."""
        numbers = sorted(self.epochs)
        if len(numbers) > MOST_POINTS:
            best = self.best()
            places = {*spaced(len(numbers), MOST_POINTS).tolist(), *([] if best is None else [numbers.index(best[0])])}
            numbers = [numbers[place] for place in sorted(places)]
        names = dict.fromkeys(name for number in numbers for name in self.epochs[number])
        return {"epoch": numbers, **{name: [self.epochs[n].get(name) for n in numbers] for name in names}}

    def best(self) -> tuple[int, str, float] | None:
        """The best epoch on the validation split, its measure, and the value."""
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


class Peaks:
    """The peaks of a number over time, in at most twice MOST_POINTS points."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.values: list[int] = []
        self._per_point, self._in_last = 1, 0  # numbers per point, and in the last one

    def add(self, time_s: float, value: int) -> None:
        if self._in_last and self._in_last < self._per_point:
            self.times[-1], self.values[-1] = time_s, max(self.values[-1], value)
            self._in_last += 1
            return
        if len(self.times) == 2 * MOST_POINTS:
            self.times = self.times[1::2]
            self.values = [max(pair) for pair in zip(self.values[::2], self.values[1::2], strict=True)]
            self._per_point *= 2
        self.times.append(time_s)
        self.values.append(value)
        self._in_last = 1


def _modified(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _curve(job: JobKey, log: RunLog) -> dict[str, object]:
    curve = log.curves[job]
    best = curve.best()
    return {
        **job.about,
        "columns": curve.columns(),
        "num_epochs": len(curve.epochs),
        "best_epoch": None if best is None else best[0],
        "measure": None if best is None else best[1],
        "best": None if best is None else best[2],
    }


def _fit(job: JobKey, fit: Fit) -> dict[str, object]:
    return {**job.about, **{name: getattr(fit, name) for name in _FIT}}


def _ago(age: float) -> str:
    return "just now" if age < 2 else f"{format_seconds(age)} ago"


def _integer(value: object, default: int) -> int:
    return value if isinstance(value, int) else default
