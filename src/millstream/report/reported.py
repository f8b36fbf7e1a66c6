"""A run of any kind -> its comparison as text, as JSON and as files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from millstream.train.folder import READS, kind_of


@dataclass(frozen=True)
class Reported:
    """What a run found, for a terminal; `write` makes the page, and beside it figures/ and tables/."""

    text: str
    findings: Sequence[str]
    summary: Mapping[str, object]
    compared: str  # as in "5 detectors"
    write: Callable[[Path], Path]

    def lines(self) -> str:
        """The comparison and what follows from it."""
        return "\n".join([self.text, *self.findings])


def report_of(run: Path) -> Reported:
    """By what its data card says that it compares: classifiers of reads, or detectors.

    >>> report_of(Path("runs/first")).write(Path("report.html"))
    """
    return _of_reads(run) if kind_of(run) == READS else _of_detectors(run)


def _of_detectors(run: Path) -> Reported:
    from millstream.report.evaluate import read_results
    from millstream.report.figures import draw
    from millstream.report.page import write_report
    from millstream.report.tables import comparison_text, summary, write_tables

    results = read_results(run)
    write = partial(_write, results, draw, write_report, write_tables)
    compared = _counted(len(results.models), "detector")
    return Reported(comparison_text(results), results.findings, summary(results), compared, write)


def _of_reads(run: Path) -> Reported:
    from millstream.report.reads.evaluate import read_results
    from millstream.report.reads.figures import draw
    from millstream.report.reads.page import write_report
    from millstream.report.reads.tables import comparison_text, summary, write_tables

    results = read_results(run)
    write = partial(_write, results, draw, write_report, write_tables)
    compared = _counted(len(results.models), "classifier")
    return Reported(comparison_text(results), results.findings, summary(results), compared, write)


def _write(
    results: Any,
    draw: Callable[[Any], Any],
    write_report: Callable[..., Path],
    write_tables: Callable[[Any, Path], object],
    out: Path,
) -> Path:
    from millstream.report.drawing import write_drawings

    drawings = draw(results)
    page = write_report(results, out, drawings=drawings)
    write_drawings(drawings, page.parent / "figures")
    write_tables(results, page.parent / "tables")
    return page


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
