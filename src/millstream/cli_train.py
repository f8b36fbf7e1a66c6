"""The commands for detectors: train, evaluate, report."""

from pathlib import Path
from typing import Annotated

import typer

from millstream.cli_common import Json, print_json

Settings = Annotated[
    list[str] | None, typer.Argument(help="Settings as key=value, or a YAML file.", metavar="[KEY=VALUE]...")
]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.", show_default=False)]


def train(settings: Settings = None, as_json: Json = False) -> None:
    """Train detectors of wrong answers, with baselines beside them, and report. Run again to go on.

    Settings: data=STORE model=lstm,gnn,gvae,baselines (or names of single ones, or package.module:Class) out=RUN;
    label, train, val, by, salt; seeds, seed, epochs, batch_size, lr, weight_decay, warmup, clip, patience, dropout,
    parameters, token, token_stats, k, kl_weight, free_bits; memory, accelerator, devices, precision;
    checkpoint_minutes, checkpoint_steps, tensorboard.
    """
    from dataclasses import asdict

    from millstream.config import read_settings
    from millstream.console import say
    from millstream.train.settings import TrainSettings

    given = read_settings(TrainSettings, settings or [])
    given.check()
    from millstream.train.run import train as fit

    run = fit(**asdict(given))
    if not run.is_first:
        return
    if run.interrupted:
        say("interrupted; the same command goes on from here")
        raise typer.Exit(130)
    _show(run.path, as_json)


def evaluate(
    run: RunFolder,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Score with the detectors of a run: its own test part again, or data=OTHER_STORE, on which nothing is fitted.

    Settings: data=STORE, model=NAMES, memory=2GB, out=FOLDER.
    """
    from dataclasses import asdict

    from millstream.config import read_settings
    from millstream.train.evaluate import EvaluateSettings
    from millstream.train.evaluate import evaluate as score

    _show(score(run, **asdict(read_settings(EvaluateSettings, settings or []))), as_json)


def report(
    run: RunFolder,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The page to write.", show_default="report.html of the run")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the comparison as one HTML page; beside it figures/ (SVG, PNG) and tables/ (CSV, LaTeX)."""
    _show(run, as_json, out)


def _show(run: Path, as_json: bool, out: Path | None = None) -> None:
    """The table on stdout, and the page."""
    from dataclasses import asdict

    from millstream.console import say
    from millstream.report.evaluate import read_results
    from millstream.report.figures import write_figures
    from millstream.report.page import write_report
    from millstream.report.tables import comparison_text, write_tables

    results = read_results(run)
    if as_json:
        found = asdict(results)
        print_json(
            {name: found[name] for name in ("run", "num_test", "num_wrong", "models", "differences", "findings")}
        )
    else:
        print(comparison_text(results))
        for finding in results.findings:
            print(finding)
    page = write_report(results, out or run / "report.html")
    write_figures(results, page.parent / "figures")
    write_tables(results, page.parent / "tables")
    say(f"{run}: {len(results.models)} detectors compared. Open {page}")
