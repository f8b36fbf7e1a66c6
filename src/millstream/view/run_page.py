"""The page of a run folder: training progress while it runs, and the report, made in the background."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from millstream.core.registry import plug
from millstream.errors import BadSource, MillstreamError
from millstream.report.run import read_mapping
from millstream.training.folder import CONFIG, DATA, ENVIRONMENT, METRICS, PREDICTIONS, kind_of
from millstream.view.run_log import RunLog, RunState
from millstream.view.view import Query, View

PAGE = "report.html"
_LISTED = 40  # entries shown of a list
_FIT = ("family", "title", "parameters", "fit_s", "score_s", "num_scored")


def run_view(run: Path) -> View:
    """The page of a run that is training, has stopped or is finished.

    >>> run_view(Path("runs/first")).answers["state"](Query({}))
    """
    shown = _Run(run)
    return View(
        "run",
        "Run",
        answers={"state": shown.state, "settings": shown.settings, "make-report": shown.make_report},
        files={"report": lambda: shown.report.path},
    )


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
        from millstream.report.run import report_of

        try:
            report_of(self._run).write(self.path)
        except (MillstreamError, OSError) as error:
            self._error = " ".join(str(error).split())
        except Exception as error:  # the waiting page must see unexpected errors, too
            self._error = f"{type(error).__name__}: {error}"
            raise


class _Run:
    def __init__(self, run: Path) -> None:
        if not (run / CONFIG).is_file():
            raise BadSource(f"{run}: has no {CONFIG}, so it is not a run. Next: millstream train --help")
        self._run = run
        self.report = RunReport(run)
        self._state = RunState(run)
        self._log = RunLog(run / METRICS)
        self._lock = threading.Lock()  # several pages may query at once

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
                "fits": [{"model": m, "seed": s, **_fit(fit)} for (m, s), fit in log.fits.items()],
                "missing": [{"model": model, "why": why} for model, why in log.missing.items()],
                "memory": {"time_s": list(log.memory.times), "bytes": list(log.memory.values), "budget": log.budget}
                if begins or log.num_lines > since
                else None,
                "report": self.report.summary(),
            }

    def settings(self, query: Query) -> object:
        """What the run compares, and its settings, data and environment as names and texts."""
        tables: dict[str, list[tuple[str, str]]] = {}
        for title, name in (("Settings", CONFIG), ("Data", DATA), ("Environment", ENVIRONMENT)):
            if (self._run / name).is_file():
                tables[title] = list(_facts(read_mapping(self._run / name)))
        config = self._config()
        compared = plug(kind_of(self._run), "kind").MODELS
        return {"path": str(self._run), "compared": compared, "epochs": config.get("epochs"), "tables": tables}

    def make_report(self, query: Query) -> object:
        """Start making report.html; `state` reports when it is ready."""
        return self.report.make()

    def _config(self) -> Mapping[str, object]:
        return read_mapping(self._run / CONFIG)


def _modified(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _curve(job: tuple[str, int], log: RunLog) -> dict[str, object]:
    curve = log.curves[job]
    best = curve.best()
    return {
        "model": job[0],
        "seed": job[1],
        "columns": curve.columns(),
        "num_epochs": len(curve.epochs),
        "best_epoch": None if best is None else best[0],
        "measure": None if best is None else best[1],
        "best": None if best is None else best[2],
    }


def _fit(fit: Mapping[str, object]) -> dict[str, object]:
    return {name: fit.get(name) for name in _FIT}


def _facts(values: Mapping[str, object], before: str = "") -> Iterator[tuple[str, str]]:
    """Nested names joined with dots, and each value as one line."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _facts(cast("Mapping[str, object]", value), f"{before}{name}.")
        else:
            yield f"{before}{name}", _text(cast(object, value))


def _text(value: object) -> str:
    if value is None or value == "" or value == {} or value == []:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        some = cast("Sequence[object]", value)
        if any(isinstance(one, Mapping | list) for one in some):
            return f"{len(some)} entries"
        more = f" and {len(some) - _LISTED} more" if len(some) > _LISTED else ""
        return ", ".join(map(str, some[:_LISTED])) + more
    return str(value)
