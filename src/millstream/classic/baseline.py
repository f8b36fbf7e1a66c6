"""`python -m millstream.classic.baseline`: the old training script's flags on `millstream train`."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from millstream.classic.baseline_data import RUNS, Job, preprocessed_jobs, traces_job
from millstream.classic.baseline_metrics import METRICS, TITLES, check_same_split, metrics_text, write_metrics
from millstream.config import parse_bytes, read_settings
from millstream.console import format_bytes, say
from millstream.errors import BadSetting, ConfigMismatch, MillstreamError, MissingExtra, NoDetector, OverBudget
from millstream.model.zoo import Recipe, net_features
from millstream.process import run_script
from millstream.report.read_run import Run as Finished
from millstream.report.read_run import read_run
from millstream.store.traces import Traces
from millstream.train.data import data_card, open_labelled
from millstream.train.folder import DATA, PREDICTIONS
from millstream.train.run import Run, train
from millstream.train.settings import TrainSettings

OUTPUT_DIR = "results"
BATCH_MEMORY = "2GB"  # what the old guide says a file in the cache takes
ATTN_THRESHOLD = 0.01
LABEL = "verdict"
SWITCHES = {"lstm": "run-lstm", "gnn": "run-gnn-det", "gvae": "run-gvae"}


def main(arguments: list[str] | None = None) -> None:
    """Train LSTM-solo, GNN-det+LSTM and GVAE+LSTM on one split by question: metrics, checkpoints, predictions, report.

    What is finished is not trained again, and after an interruption the same command goes on. A run with other settings
    that is in the way is kept under another name.
    """
    options = _parser().parse_args(arguments)
    try:
        runs = work(options)
    except MillstreamError as error:
        hint = " (--max-cache-batches, --batch-size)" if isinstance(error, OverBudget) else ""
        print(f"baseline: {error}{hint}", file=sys.stderr)
        sys.exit(2 if isinstance(error, BadSetting) else 1)
    if any(run.interrupted for run in runs):
        say("interrupted; the same command goes on from here")
        sys.exit(130)


def work(options: argparse.Namespace) -> list[Run]:
    """Train, check the split, and write down the numbers; after an interruption the runs so far."""
    out: Path = options.output_dir
    settings = _settings(options)
    jobs = [_possible(job, options) for job in _jobs(options)]
    say("every model sees the same split: a hash of its question_id puts a trace into train, val or test")
    runs: list[Run] = []
    for job in jobs:
        runs.append(_train(job, out / job.run, settings))
        if runs[-1].interrupted:
            return runs
    trained = [read_run(run.path) for run in runs]
    if len(jobs) > 1:
        shared = check_same_split(trained, [_questions(job.store) for job in jobs])
        say(f"checked: {' and '.join(job.run for job in jobs)} have the same {shared} test questions in common")
    print(metrics_text(write_metrics(out, [*_earlier(out, jobs), *trained])))
    for run in runs:
        _report(run.path)
    folders = ", ".join(str(run.path) for run in runs)
    say(f"{out / METRICS}: the numbers above; checkpoints and predictions are in {folders}")
    return runs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="baseline", description=main.__doc__)
    parser.add_argument(
        "--preprocessed-dir", type=Path, help="folder with lstm_solo/ and gnn/, one of these, or a store"
    )
    parser.add_argument("--data-pattern", metavar="PATTERN", help="old traces instead, as in 'traces_data/*.pkl*'")
    parser.add_argument("--scores-file", type=Path, help="CSV of them: question_id, bleurt_score")
    parser.add_argument("--score-threshold", type=float, default=0.5, help="wrong below it (default %(default)s)")
    parser.add_argument(
        "--attn-threshold",
        type=float,
        help=f"attention above which traces have an edge (default {ATTN_THRESHOLD}); preprocessed graphs have theirs",
    )
    parser.add_argument(
        "--max-cache-batches",
        type=int,
        default=2,
        metavar="N",
        help=f"accepted as before; nothing is cached, but memory stays below N x {BATCH_MEMORY} (default %(default)s)",
    )
    parser.add_argument("--epochs", type=int, default=50, help="at most; ends where validation does (default 50)")
    parser.add_argument("--batch-size", type=int, default=16, help="(default %(default)s)")
    parser.add_argument("--lr", type=float, help="learning rate (default 0.001)")
    parser.add_argument("--kl-weight", type=float, help="of GVAE: how much explaining the graph counts (default 0.1)")
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
    """What is to be trained on what."""
    asked = {model: vars(options)[model] for model in SWITCHES}
    models = {model: given is True for model, given in asked.items() if given is not False}
    if not models:
        raise BadSetting("all models are switched off; leave out one of --no-" + ", --no-".join(SWITCHES.values()))
    if (options.preprocessed_dir is None) == (options.data_pattern is None):
        raise BadSetting("give --preprocessed-dir DIR, or --data-pattern PATTERN with --scores-file FILE")
    if (options.scores_file is None) != (options.data_pattern is None):
        raise BadSetting("--data-pattern and --scores-file go together; preprocessed files have labels of their own")
    if options.data_pattern is None:
        return preprocessed_jobs(options.preprocessed_dir, models)
    threshold, out = options.score_threshold, options.output_dir
    return [traces_job(options.data_pattern, options.scores_file, threshold, out=out, models=list(models))]


def _possible(job: Job, options: argparse.Namespace) -> Job:
    """Without the models whose fields the store lacks; one that was asked for by name has to be there."""
    names = Traces(job.store).field_names
    models: list[str] = []
    for model in job.models:
        try:
            net_features(model, names, Recipe())
            models.append(model)
        except NoDetector as error:
            said = f"{job.store}: nothing for {TITLES[model]}, {error}"
            if vars(options)[model] or (model == job.models[-1] and not models):
                raise NoDetector(said) from None
            say(said.partition(", only ")[0])  # not all the fields it has
    return replace(job, models=models)


def _settings(options: argparse.Namespace) -> dict[str, object]:
    """Those of `millstream train`, checked before anything is made."""
    if options.max_cache_batches < 1:
        raise BadSetting(f"--max-cache-batches {options.max_cache_batches}: at least 1")
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
    """The run of a job; one that is in the way, of other settings, data or labels, is set aside."""
    memory = format_bytes(cast(int, settings["memory"]))
    say(f"{', '.join(TITLES[model] for model in job.models)}: from {job.store}, below {memory} of memory")
    asked = {**settings, "model": ",".join(job.models), "out": str(out)}
    if _has_other_labels(out, job.store):
        _set_aside(out)
    try:
        return train(job.store, **asked)
    except ConfigMismatch:
        _set_aside(out)
        return train(job.store, **asked)


def _has_other_labels(run: Path, store: Path) -> bool:
    """Whether the store was labelled otherwise since: the fingerprint of a store does not tell."""
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
    say(f"{run}: was a run with other settings or data, which is now {kept}")


def _earlier(out: Path, jobs: Sequence[Job]) -> list[Finished]:
    """The runs of earlier commands in the same folder, for the models that were not trained now."""
    now = {job.run for job in jobs}
    return [read_run(out / name) for name in RUNS if name not in now and (out / name / PREDICTIONS).exists()]


def _questions(store: Path) -> set[str]:
    """The questions that have a label."""
    return set(map(str, open_labelled(str(store), LABEL).column("question_id").to_pylist()))


def _report(run: Path) -> None:
    try:
        from millstream.report.evaluate import read_results
        from millstream.report.page import write_report
    except MissingExtra as error:
        say(f"{run}: no report.html. {error}")
        return
    say(f"{write_report(read_results(run), run / 'report.html')}: the comparison with intervals and curves")


if __name__ == "__main__":
    run_script(main, "baseline")
