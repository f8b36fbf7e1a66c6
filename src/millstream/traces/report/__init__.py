"""The report on detectors of wrong answers: results of a run, findings, tables, figures and sections."""

from pathlib import Path

from millstream.report.run import Report

TRAIN_SETTINGS = "data=STORE"


def report(run: Path) -> Report:
    """The report on the detectors of a run."""
    from millstream.traces.report.page import report_of_detectors  # matplotlib takes a second to import

    return report_of_detectors(run)
