"""The report on classifiers of reads: results of a run, findings, columns, figures and sections."""

from pathlib import Path

from millstream.report.run import Report

TRAIN_SETTINGS = "data.train=FILE mapping=TABLE"


def report(run: Path) -> Report:
    """What the classifiers of a run found."""
    from millstream.reads.report.page import report_of_classifiers  # draws: matplotlib takes a second to import

    return report_of_classifiers(run)
