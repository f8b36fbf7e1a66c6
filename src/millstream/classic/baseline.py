"""`python -m millstream.classic.baseline`: the old training script's flags on `millstream train`."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from millstream.classic.preprocessed import Kind
from millstream.classic.preprocessed_folder import SUBFOLDERS, Scratch, find_folder, holds, is_store, store_in
from millstream.cli.process import run_script
from millstream.core.config import parse_bytes, read_settings
from millstream.core.console import format_bytes, printable, progress, say
from millstream.core.files import publish_json
from millstream.errors import (
    BadSetting,
    BadSource,
    BadSplit,
    ConfigMismatch,
    MillstreamError,
    MissingExtra,
    NoDetector,
    OverBudget,
)
from millstream.report.measures import Floats, Labels, auroc, f1_score, precision_recall
from millstream.traces.convert import convert, expand
from millstream.traces.detectors import Recipe, net_features
from millstream.traces.examples import open_labelled
from millstream.traces.kind import TrainSettings
from millstream.traces.label import UNLABELLED, label
from millstream.traces.report.results import Run as Finished
from millstream.traces.report.results import read_run
from millstream.traces.rules import WRONG
from millstream.traces.scores import USUAL
from millstream.traces.store.traces import Traces
from millstream.traces.study import data_card
from millstream.training.folder import DATA, PREDICTIONS, read_mapping
from millstream.training.run import Run, train

KINDS: Mapping[str, Kind] = {"lstm": "lstm", "gnn": "gnn", "gvae": "gnn"}  # the preprocessed files that a model reads
TITLES = {"lstm": "LSTM-solo", "gnn": "GNN-det+LSTM", "gvae": "GVAE+LSTM"}
SWITCHES = {"lstm": "run-lstm", "gnn": "run-gnn-det", "gvae": "run-gvae"}
OUTPUT_DIR, TRACES, TOGETHER = "results", "traces", "all_models"
RUNS = (TOGETHER, *SUBFOLDERS.values())
BATCH_MEMORY = "2GB"  # per cached file, according to the old guide
ATTN_THRESHOLD = 0.01
LABEL = "verdict"
METRICS = "metrics.json"
DATA_KEYS = ("store", "records", "used", "verdicts", "parts", "split")
MEASURES = ("auroc", "accuracy", "precision", "recall", "f1", "threshold")

Numbers = dict[str, float | int | str]


@dataclass(frozen=True)
class Job:
    """Models to train on one store, in the run folder `run`."""

    run: str
    store: Path
    models: Sequence[str]
    scratch: Scratch | None = None  # keeps a temporary store alive


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
        print(f"baseline: {printable(str(error))}{hint}", file=sys.stderr)
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
        "positive": WRONG,  # by the old scripts' definition
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
    chosen: dict[str, Any] = {**settings, "model": ",".join(job.models), "out": str(out)}
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
    before = read_mapping(run / DATA)
    now = data_card(str(store), open_labelled(str(store), LABEL, WRONG), {}, "")
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
    return set(map(str, open_labelled(str(store), LABEL, WRONG).column("question_id").to_pylist()))


def _report(run: Path) -> None:
    try:
        from millstream.traces.report import report
    except MissingExtra as error:
        say(f"{run}: no report.html. {error}")
        return
    say(f"{report(run).write_page(run / 'report.html')}: the comparison, with confidence intervals and curves")


# -- what to train on which store


def preprocessed_jobs(place: Path, models: Mapping[str, bool]) -> list[Job]:
    """For a folder of preprocessed files, one of its subfolders, or a trace store. `models`: name -> is it required.

    Old files are converted once, into stores next to them.
    """
    if is_store(place):
        return [Job(TOGETHER, place, list(models))]
    jobs: list[Job] = []
    for kind in SUBFOLDERS:
        names = [model for model in models if KINDS[model] == kind]
        if names and (any(models[name] for name in names) or holds(place, kind)):
            store, scratch = store_in(find_folder(place, kind), kind)
            jobs.append(Job(SUBFOLDERS[kind], store, names, scratch))
        elif names:
            say(f"{place}: nothing for {', '.join(names)}, skipped; there is no folder {SUBFOLDERS[kind]}")
    if not jobs:
        kind = KINDS[next(iter(models))]
        store_in(find_folder(place, kind), kind)  # raises an error that names what is missing
    return jobs


def traces_job(pattern: str, scores: Path, threshold: float, *, out: Path, models: Sequence[str]) -> Job:
    """For old traces and a CSV of their scores: convert them once into a store, and label it each time."""
    if not scores.is_file():
        raise BadSource(f"{scores}: no such file; expected a CSV with the columns question_id and {USUAL}")
    files = expand([pattern])
    store = out / TRACES
    try:
        with progress("convert", sum(file.stat().st_size for file in files), unit="bytes") as update:
            convert(files, store, notify=say, progress=update)
    except ConfigMismatch:
        raise ConfigMismatch(
            f"{store}: was made from other files than {pattern} matches now; remove it or choose another --output-dir"
        ) from None
    found = label(store, rule="scores", scores=scores, column=USUAL, threshold=threshold)
    right, wrong, without = (found.counts[name] for name in ("right", "wrong", UNLABELLED))
    if not right + wrong:
        raise BadSource(f"{scores}: has no score for any of the {found.records} traces of {pattern}")
    say(
        f"{store}: {found.records} traces, {right} right and {wrong} wrong ({USUAL} below {threshold:g}); "
        f"{without} without a score are skipped"
    )
    return Job(TOGETHER, store, models)


# -- metrics


def write_metrics(out: Path, runs: Sequence[Finished]) -> dict[str, Numbers]:
    """Write metrics.json in `out` with every model of these runs; if a model is in two runs, the later one counts."""
    found: dict[str, Numbers] = {}
    for run in runs:
        found |= read_models(run)
    ordered = {title: found[title] for title in TITLES.values() if title in found}
    about = {
        "models": ordered,
        "threshold": "per model: the score that maximises Youden's J (recall - false positive rate) on validation",
        "data": {run.path.name: {name: run.data[name] for name in DATA_KEYS} for run in runs},
    }
    publish_json(out / METRICS, about)
    return ordered


def read_models(run: Finished) -> dict[str, Numbers]:
    """The metrics of each model of a run, from its predictions."""
    return {
        TITLES[model]: {
            **measure(run.test.labels, trials[0].test, youden_threshold(run.val.labels, trials[0].val)),
            "test_records": len(run.test.labels),
            "test_wrong": int(run.test.labels.sum()),
            "run": run.path.name,
        }
        for model, trials in run.trials.items()
        if model in TITLES
    }


def measure(labels: Labels, scores: Floats, threshold: float) -> Numbers:
    """MEASURES; scores from the threshold up predict a wrong answer."""
    precision, recall = precision_recall(labels, scores, threshold)
    values = (
        auroc(labels, scores),
        float(((scores >= threshold) == (labels == 1)).mean()),
        precision,
        recall,
        f1_score(labels, scores, threshold),
        threshold,
    )
    return dict(zip(MEASURES, values, strict=True))


def youden_threshold(labels: Labels, scores: Floats) -> float:
    """The decision threshold that maximises Youden's J, as in the old script; of several, the highest."""
    levels = np.unique(scores)[::-1]
    rates = [_fraction_from(levels, scores[labels == label]) for label in (1, 0)]
    return float(levels[np.argmax(rates[0] - rates[1])])


def metrics_text(models: Mapping[str, Numbers]) -> str:
    """A table of MEASURES."""
    rows = [["model", *MEASURES]]
    rows += [[title, *(f"{numbers[name]:.4f}" for name in MEASURES)] for title, numbers in models.items()]
    return "\n".join(f"{row[0]:<14}" + "".join(f"{cell:>11}" for cell in row[1:]) for row in rows)


def check_same_split(runs: Sequence[Finished], questions: Sequence[set[str]]) -> int:
    """The number of test questions that all runs share; BadSplit if one is in another split of another run."""
    common = questions[0].intersection(*questions[1:])
    tests = [common & set(map(str, run.test.question_ids)) for run in runs]
    for run, test in zip(runs, tests, strict=True):
        if strange := test ^ tests[0]:
            raise BadSplit(
                f"{runs[0].path} and {run.path} have different test splits: {len(strange)} questions are in only one "
                f"of them, such as {min(strange)!r}. Remove the older run and train again"
            )
    return len(tests[0])


def _fraction_from(levels: NDArray[np.float64], scores: Floats) -> NDArray[np.float64]:
    """The fraction of these scores that reaches each level."""
    return 1 - np.searchsorted(np.sort(scores), levels) / max(len(scores), 1)


if __name__ == "__main__":
    run_script(main, "baseline")
