"""`python -m millstream.classic.baseline`: the old training script's flags on `millstream train`."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from millstream.classic.baseline_data import (
    METRICS,
    RUNS,
    TITLES,
    Job,
    check_same_split,
    metrics_text,
    preprocessed_jobs,
    traces_job,
    write_metrics,
)
from millstream.cli.process import run_script
from millstream.core.config import parse_bytes, read_settings
from millstream.core.console import format_bytes, say
from millstream.errors import BadSetting, ConfigMismatch, MillstreamError, MissingExtra, NoDetector, OverBudget
from millstream.traces.detectors.zoo import Recipe, net_features
from millstream.traces.report.results import Run as Finished
from millstream.traces.report.results import read_run
from millstream.traces.settings import TrainSettings
from millstream.traces.store.traces import Traces
from millstream.traces.study import data_card, open_labelled
from millstream.training.folder import DATA, PREDICTIONS
from millstream.training.run import Run, train

OUTPUT_DIR = "results"
BATCH_MEMORY = "2GB"  # per cached file, according to the old guide
ATTN_THRESHOLD = 0.01
LABEL = "verdict"
SWITCHES = {"lstm": "run-lstm", "gnn": "run-gnn-det", "gvae": "run-gvae"}


def main(arguments: list[str] | None = None) -> None:
    """Train LSTM-solo, GNN-det+LSTM and GVAE+LSTM on one split by question: metrics, checkpoints, predictions, report.

    Finished models are not trained again; after an interruption, run the same command to resume. An existing run with
    other settings is renamed and kept.
    """
    options = _parser().parse_args(arguments)
    try:
        runs = work(options)
    except MillstreamError as error:
        hint = " (--max-cache-batches, --batch-size)" if isinstance(error, OverBudget) else ""
        print(f"baseline: {error}{hint}", file=sys.stderr)
        sys.exit(2 if isinstance(error, BadSetting) else 1)
    if any(run.interrupted for run in runs):
        say("interrupted; progress saved. Run the same command to resume")
        sys.exit(130)


def work(options: argparse.Namespace) -> list[Run]:
    """Train, check the split and write the metrics; after an interruption, return the runs so far."""
    out: Path = options.output_dir
    settings = _settings(options)
    jobs = [_without_missing(job, options) for job in _jobs(options)]
    say("all models use the same split: a hash of question_id assigns each trace to train, val or test")
    runs: list[Run] = []
    for job in jobs:
        runs.append(_train(job, out / job.run, settings))
        if runs[-1].interrupted:
            return runs
    trained = [read_run(run.path) for run in runs]
    if len(jobs) > 1:
        shared = check_same_split(trained, [_questions(job.store) for job in jobs])
        say(f"checked: {' and '.join(job.run for job in jobs)} have the same {shared} test questions")
    print(metrics_text(write_metrics(out, [*_earlier(out, jobs), *trained])))
    for run in runs:
        _report(run.path)
    folders = ", ".join(str(run.path) for run in runs)
    say(f"{out / METRICS}: the metrics above. Checkpoints and predictions: {folders}")
    return runs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="baseline", description=main.__doc__)
    parser.add_argument(
        "--preprocessed-dir", type=Path, help="folder with lstm_solo/ and gnn/, either of these, or a trace store"
    )
    parser.add_argument(
        "--data-pattern", metavar="PATTERN", help="old trace files instead, such as 'traces_data/*.pkl*'"
    )
    parser.add_argument("--scores-file", type=Path, help="CSV with their scores: question_id, bleurt_score")
    parser.add_argument(
        "--score-threshold", type=float, default=0.5, help="answers that score lower are wrong (default %(default)s)"
    )
    parser.add_argument(
        "--attn-threshold",
        type=float,
        help=f"minimum attention of an edge (default {ATTN_THRESHOLD}); preprocessed graphs keep their own edges",
    )
    parser.add_argument(
        "--max-cache-batches",
        type=int,
        default=2,
        metavar="N",
        help=f"sets the memory limit to N x {BATCH_MEMORY}; no files are cached (default %(default)s)",
    )
    parser.add_argument(
        "--epochs", type=int, default=50, help="maximum number of epochs; training may stop early (default 50)"
    )
    parser.add_argument("--batch-size", type=int, default=16, help="(default %(default)s)")
    parser.add_argument("--lr", type=float, help="learning rate (default 0.001)")
    parser.add_argument("--kl-weight", type=float, help="GVAE: weight of the VAE loss (default 0.1)")
    parser.add_argument("--output-dir", type=Path, default=Path(OUTPUT_DIR), help="(default %(default)s)")
    for model, switch in SWITCHES.items():
        parser.add_argument(
            f"--{switch}",
            dest=model,
            action=argparse.BooleanOptionalAction,
            help=f"train {TITLES[model]} (default: yes)",
        )
    return parser


def _jobs(options: argparse.Namespace) -> list[Job]:
    """Which models to train on which store."""
    switches = {model: vars(options)[model] for model in SWITCHES}
    models = {model: given is True for model, given in switches.items() if given is not False}
    if not models:
        raise BadSetting("all models are switched off; drop one of --no-" + ", --no-".join(SWITCHES.values()))
    if (options.preprocessed_dir is None) == (options.data_pattern is None):
        raise BadSetting("give --preprocessed-dir DIR, or --data-pattern PATTERN with --scores-file FILE")
    if (options.scores_file is None) != (options.data_pattern is None):
        raise BadSetting("--data-pattern and --scores-file go together; preprocessed files contain their labels")
    if options.data_pattern is None:
        return preprocessed_jobs(options.preprocessed_dir, models)
    threshold, out = options.score_threshold, options.output_dir
    return [traces_job(options.data_pattern, options.scores_file, threshold, out=out, models=list(models))]


def _without_missing(job: Job, options: argparse.Namespace) -> Job:
    """Drop the models whose fields the store lacks; raise NoDetector for one that was requested explicitly."""
    names = Traces(job.store).field_names
    models: list[str] = []
    for model in job.models:
        try:
            net_features(model, names, Recipe())
            models.append(model)
        except NoDetector as error:
            message = f"{job.store}: nothing for {TITLES[model]}, {error}"
            if vars(options)[model] or (model == job.models[-1] and not models):
                raise NoDetector(message) from None
            say(message.partition(", only ")[0])  # without the list of fields
    return replace(job, models=models)


def _settings(options: argparse.Namespace) -> dict[str, object]:
    """The settings of `millstream train`, checked before anything is written."""
    if options.max_cache_batches < 1:
        raise BadSetting(f"--max-cache-batches {options.max_cache_batches}: must be at least 1")
    if options.output_dir.exists() and not options.output_dir.is_dir():
        raise BadSetting(f"--output-dir {options.output_dir}: is a file; choose a folder")
    given = {"lr": options.lr, "kl_weight": options.kl_weight}
    settings: dict[str, object] = {
        "label": LABEL,
        "seeds": 1,
        "epochs": options.epochs,
        "batch_size": options.batch_size,
        "k": None,
        "threshold": ATTN_THRESHOLD if options.attn_threshold is None else options.attn_threshold,
        "memory": options.max_cache_batches * parse_bytes(BATCH_MEMORY),
        **{name: value for name, value in given.items() if value is not None},
    }
    read_settings(TrainSettings, {**settings, "data": "."}).check()
    return settings


def _train(job: Job, out: Path, settings: Mapping[str, object]) -> Run:
    """Train the models of a job. An existing run with other settings, data or labels is renamed and kept."""
    memory = format_bytes(cast(int, settings["memory"]))
    say(f"{', '.join(TITLES[model] for model in job.models)}: from {job.store}, memory below {memory}")
    chosen = {**settings, "model": ",".join(job.models), "out": str(out)}
    if _has_other_labels(out, job.store):
        _set_aside(out)
    try:
        return train(job.store, **chosen)
    except ConfigMismatch:
        _set_aside(out)
        return train(job.store, **chosen)


def _has_other_labels(run: Path, store: Path) -> bool:
    """Whether the labels changed since the run; the fingerprint of a store does not cover them."""
    if not (run / DATA).exists():
        return False
    before = json.loads((run / DATA).read_text())
    now = data_card(str(store), open_labelled(str(store), LABEL), {}, "")
    return any(before.get(name) != now[name] for name in ("used", "verdicts", "label_version"))


def _set_aside(run: Path) -> None:
    number = 1
    while (kept := run.with_name(f"{run.name}-{number}")).exists():
        number += 1
    run.rename(kept)
    say(f"{run}: a run with other settings or data; it is now {kept}")


def _earlier(out: Path, jobs: Sequence[Job]) -> list[Finished]:
    """Runs of earlier commands in the same folder, for the models that this command did not train."""
    now = {job.run for job in jobs}
    return [read_run(out / name) for name in RUNS if name not in now and (out / name / PREDICTIONS).exists()]


def _questions(store: Path) -> set[str]:
    """The ids of the questions that have a label."""
    return set(map(str, open_labelled(str(store), LABEL).column("question_id").to_pylist()))


def _report(run: Path) -> None:
    try:
        from millstream.traces.report.evaluate import read_results
        from millstream.traces.report.page import write_report
    except MissingExtra as error:
        say(f"{run}: no report.html. {error}")
        return
    say(f"{write_report(read_results(run), run / 'report.html')}: the comparison, with confidence intervals and curves")


if __name__ == "__main__":
    run_script(main, "baseline")
