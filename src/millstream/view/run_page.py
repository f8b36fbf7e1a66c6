"""A run folder as a page: how training goes while it goes, and the report."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from millstream.errors import BadSource
from millstream.report.run_files import read_mapping
from millstream.train.folder import CONFIG, DATA, ENVIRONMENT, METRICS, READS, kind_of
from millstream.view.run_log import RunLog
from millstream.view.run_report import RunReport
from millstream.view.run_state import RunState
from millstream.view.view import Query, View

_LISTED = 40  # entries of a list that are shown
_FIT = ("family", "title", "parameters", "fit_s", "score_s", "num_scored")


def run_view(run: Path) -> View:
    """The page of a run that trains, has stopped or is finished.

    >>> run_view(Path("runs/first")).answers["state"](Query({}))
    """
    shown = _Run(run)
    return View(
        "run",
        "Run",
        answers={"state": shown.state, "settings": shown.settings, "make-report": shown.make_report},
        files={"report": lambda: shown.report.path},
    )


class _Run:
    def __init__(self, run: Path) -> None:
        if not (run / CONFIG).is_file():
            raise BadSource(f"{run}: has no {CONFIG}, so it is no run. Next: millstream train data=STORE out={run}")
        self._run = run
        self.report = RunReport(run)
        self._state = RunState(run)
        self._log = RunLog(run / METRICS)
        self._lock = threading.Lock()  # several pages may ask at once

    def state(self, query: Query) -> object:
        """All there is, or what has changed since the page saw `since` lines of the log it calls `generation`."""
        with self._lock:
            log = self._log
            log.refresh()
            begins = query.number("generation") != log.generation
            since = 0 if begins else query.number("since")
            told = self._state.tell(log, self._config())
            return {
                **told,
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
                "report": self.report.tell(),
            }

    def settings(self, query: Query) -> object:
        """What the run is: of reads or traces, its settings, its data and its environment, as names and texts."""
        tables: dict[str, list[tuple[str, str]]] = {}
        for title, name in (("Settings", CONFIG), ("Data", DATA), ("Environment", ENVIRONMENT)):
            if (self._run / name).is_file():
                tables[title] = list(_facts(read_mapping(self._run / name)))
        config = self._config()
        compared = "classifiers" if kind_of(self._run) == READS else "detectors"
        return {"path": str(self._run), "compared": compared, "epochs": config.get("epochs"), "tables": tables}

    def make_report(self, query: Query) -> object:
        """Begin to make report.html; `state` says when it is there."""
        return self.report.make()

    def _config(self) -> Mapping[str, object]:
        return read_mapping(self._run / CONFIG)


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
    """Nested names with dots between them, and what they stand for in a line."""
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
