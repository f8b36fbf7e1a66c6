"""The commands that train and compare: train, evaluate, report, classify."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli_common import Json, finish, print_json

if TYPE_CHECKING:
    from millstream.console import Progress

Settings = Annotated[
    list[str] | None, typer.Argument(help="Settings as listed below, or a YAML file of them.", metavar="KEY=VALUE")
]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")]


def train(settings: Settings = None, as_json: Json = False) -> None:
    """Train detectors of wrong answers, or classifiers of reads, and report. Run again to go on.

    Detectors learn from a trace store, data=STORE; classifiers from files of reads, data.train=FILE. For example:
    millstream train data=traces model=lstm,gnn,baselines out=runs/first memory=500MB
    """
    from dataclasses import asdict

    from millstream.config import read_settings
    from millstream.train.read_settings import ReadSettings, are_of_reads
    from millstream.train.settings import TrainSettings

    given = read_settings(ReadSettings if are_of_reads(settings or []) else TrainSettings, settings or [])
    given.check()
    from millstream.train.run import train as fit

    run = fit(**asdict(given))
    if not run.is_first:
        return
    if run.interrupted:
        finish(f"{run.path}: interrupted; the same command goes on from here")
        raise typer.Exit(130)
    _show(run.path, as_json)


def evaluate(
    run: RunFolder,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Score with the detectors of a run: its own test part again, or data=OTHER_STORE, on which nothing is fitted."""
    from dataclasses import asdict

    from millstream.config import read_settings
    from millstream.train.evaluate import EvaluateSettings
    from millstream.train.evaluate import evaluate as score

    _show(score(run, **asdict(read_settings(EvaluateSettings, settings or []))), as_json)


def classify(
    run: RunFolder,
    reads: Annotated[list[str], typer.Argument(help="FASTA or FASTQ files, folders or patterns.", metavar="READS")],
    out: Annotated[Path, typer.Option("--out", "-o", help="TSV to write, gzipped if it ends in .gz.", metavar="FILE")],
    model: Annotated[
        str | None, typer.Option(help="Which model of the run.", show_default="the best on validation", metavar="NAME")
    ] = None,
    paired: Annotated[bool, typer.Option("--paired", help="Neighbouring reads are mates.")] = False,
    mates: Annotated[list[str] | None, typer.Option(help="Files of the second reads of pairs.", metavar="FILE")] = None,
    threshold: Annotated[
        float, typer.Option(help="Less likely classes are given to the genus, or what is above.", metavar="SHARE")
    ] = 0.0,
    kraken_output: Annotated[
        Path | None, typer.Option(help="Also write a report as Kraken 2 does.", metavar="FILE")
    ] = None,
    memory: Annotated[str, typer.Option(help="What reads may take, beside the model.", metavar="SIZE")] = "1GB",
    index_dir: Annotated[
        Path | None, typer.Option(help="Put indexes there, not beside the files.", metavar="FOLDER")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the class of every read, or pair, by a trained classifier: read, class, tax_id, taxon, rank, probability.

    Run again to go on after an interruption.
    """
    from dataclasses import asdict

    from millstream.console import interruptible, progress, within
    from millstream.train.classify import classify as name

    def watch(total: int) -> "AbstractContextManager[Progress]":
        return progress("classify", total, unit="reads", memory=within(memory))  # the model is there by then

    with interruptible() as stop:
        done = name(
            run, reads, out, model=model, mates=mates or None, paired=paired, threshold=threshold,
            kraken_output=kraken_output, memory=memory, index_dir=index_dir,
            watch=watch, stop=stop,
        )  # fmt: skip
    if as_json:
        print_json(asdict(done))
    what = "reads" if done.num_rows == done.num_reads else "pairs"
    count = f"{done.num_rows:,} {what}, {done.num_classified:,} classified, {done.num_unclassified:,} not"
    if done.interrupted:
        finish(f"{out}: {count} so far; interrupted, the same command goes on from here")
        raise typer.Exit(130)
    taxa = f"Taxa are counted in {kraken_output}" if kraken_output else "Another time, --kraken-output counts taxa too"
    finish(f"{out}: {count}; {done.reads_per_s:,.0f} reads/s. {taxa}", "view", run)


def report(
    run: RunFolder,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The page to write.", show_default="report.html of the run", metavar="FILE"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the comparison as one HTML page; beside it figures/ (SVG, PNG) and tables/ (CSV, LaTeX)."""
    _show(run, as_json, out)


def _show(run: Path, as_json: bool, out: Path | None = None) -> None:
    """The table on stdout, and the page."""
    from millstream.report.reported import report_of

    found = report_of(run)
    if as_json:
        print_json(found.summary)
    else:
        print(found.lines())
    page = found.write(out or run / "report.html")
    finish(f"{run}: {found.compared} compared. Open {page}", "view", run)
