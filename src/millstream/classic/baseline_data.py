"""Data of the old training script -> trace stores; finished runs -> its metrics.json."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millstream.classic.preprocessed import is_preprocessed
from millstream.classic.preprocessed_store import SUBFOLDERS, Kind, Scratch, old_files, open_preprocessed, store_name
from millstream.core.console import progress, say
from millstream.core.files import publish_json
from millstream.errors import BadSource, BadSplit, ConfigMismatch, MissingLabel
from millstream.report.measures import Floats, Labels, auroc, f1_score, precision_recall
from millstream.traces.convert import convert, expand
from millstream.traces.label import UNLABELLED, label
from millstream.traces.report.results import Run
from millstream.traces.scores import USUAL
from millstream.traces.store.manifest import MANIFEST, list_shards

KINDS: Mapping[str, Kind] = {"lstm": "lstm", "gnn": "gnn", "gvae": "gnn"}  # the preprocessed files that a model reads
TRACES, TOGETHER = "traces", "all_models"
RUNS = (TOGETHER, *SUBFOLDERS.values())


@dataclass(frozen=True)
class Job:
    """Models to train on one store, in the run folder `run`."""

    run: str
    store: Path
    models: Sequence[str]
    scratch: Scratch | None = None  # keeps a temporary store alive


def preprocessed_jobs(place: Path, models: Mapping[str, bool]) -> list[Job]:
    """For a folder of preprocessed files, one of its subfolders, or a trace store. `models`: name -> is it required.

    Old files are converted once, into stores next to them.
    """
    if _is_store(place):
        return [Job(TOGETHER, place, list(models))]
    jobs: list[Job] = []
    kinds: tuple[Kind, ...] = ("lstm", "gnn")
    for kind in kinds:
        names = [model for model in models if KINDS[model] == kind]
        if names and (any(models[name] for name in names) or _holds(place, kind)):
            store, scratch = _store_of(place, kind)
            jobs.append(Job(SUBFOLDERS[kind], store, names, scratch))
        elif names:
            say(f"{place}: nothing for {', '.join(names)}, skipped; there is no folder {SUBFOLDERS[kind]}")
    if not jobs:
        open_preprocessed(place, KINDS[next(iter(models))], None)  # raises an error that names what is missing
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


def _holds(place: Path, kind: Kind) -> bool:
    """Whether the folder has data for models of this kind."""
    for folder in _folders(place, kind):
        if folder.is_dir() and (files := old_files(folder)):
            return is_preprocessed(files[0]) == kind
    return _is_store(place / SUBFOLDERS[kind])


def _store_of(place: Path, kind: Kind) -> tuple[Path, Scratch | None]:
    folders = _folders(place, kind)
    if _is_store(folders[1]):
        return folders[1], None
    scratch: Scratch | None = None
    with suppress(MissingLabel):  # training counts the traces without a label and skips them
        scratch = open_preprocessed(place, kind, None)[1]
    made = [folder / store_name(kind) for folder in ([scratch.path] if scratch else folders)]
    return next(store for store in made if _is_store(store)), scratch


def _folders(place: Path, kind: Kind) -> tuple[Path, Path]:
    return place, place / SUBFOLDERS[kind]


def _is_store(folder: Path) -> bool:
    return folder.is_dir() and ((folder / MANIFEST).exists() or any(list_shards(folder)))


TITLES = {"lstm": "LSTM-solo", "gnn": "GNN-det+LSTM", "gvae": "GVAE+LSTM"}
METRICS = "metrics.json"
DATA = ("store", "records", "used", "verdicts", "parts", "split")
MEASURES = ("auroc", "accuracy", "precision", "recall", "f1", "threshold")

Numbers = dict[str, float | int | str]


def write_metrics(out: Path, runs: Sequence[Run]) -> dict[str, Numbers]:
    """Write metrics.json in `out` with every model of these runs; if a model is in two runs, the later one counts."""
    found: dict[str, Numbers] = {}
    for run in runs:
        found |= read_models(run)
    ordered = {title: found[title] for title in TITLES.values() if title in found}
    about = {
        "models": ordered,
        "threshold": "per model: the score that maximises Youden's J (recall - false positive rate) on validation",
        "data": {run.path.name: {name: run.data[name] for name in DATA} for run in runs},
    }
    publish_json(out / METRICS, about)
    return ordered


def read_models(run: Run) -> dict[str, Numbers]:
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


def check_same_split(runs: Sequence[Run], questions: Sequence[set[str]]) -> int:
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
