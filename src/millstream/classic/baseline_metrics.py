"""Runs of the old training script -> its metrics.json: each model's numbers on the test part."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millstream.errors import BadSplit
from millstream.model.auroc import auroc
from millstream.report.measures import Floats, Labels, f1_score, precision_recall
from millstream.report.read_run import Run
from millstream.train.folder import write_json

TITLES = {"lstm": "LSTM-solo", "gnn": "GNN-det+LSTM", "gvae": "GVAE+LSTM"}
METRICS = "metrics.json"
DATA = ("store", "records", "used", "verdicts", "parts", "split")
MEASURES = ("auroc", "accuracy", "precision", "recall", "f1", "threshold")

Numbers = dict[str, float | int | str]


def write_metrics(out: Path, runs: Sequence[Run]) -> dict[str, Numbers]:
    """metrics.json in `out`: of every model of these runs, where one is in two of them that of the later."""
    found: dict[str, Numbers] = {}
    for run in runs:
        found |= read_models(run)
    ordered = {title: found[title] for title in TITLES.values() if title in found}
    about = {
        "models": ordered,
        "threshold": "of each model, where Youden's J (recall - false positive rate) is highest on validation",
        "data": {run.path.name: {name: run.data[name] for name in DATA} for run in runs},
    }
    write_json(out / METRICS, about)
    return ordered


def read_models(run: Run) -> dict[str, Numbers]:
    """The numbers of each model of a run, from its predictions."""
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
    """MEASURES; an answer is called wrong from the threshold on."""
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
    """The score from which on to say "wrong", as the old script chose it; the highest of several that are as good."""
    levels = np.unique(scores)[::-1]
    rates = [_share_from(levels, scores[labels == label]) for label in (1, 0)]
    return float(levels[np.argmax(rates[0] - rates[1])])


def metrics_text(models: Mapping[str, Numbers]) -> str:
    """A table of MEASURES."""
    rows = [["model", *MEASURES]]
    rows += [[title, *(f"{numbers[name]:.4f}" for name in MEASURES)] for title, numbers in models.items()]
    return "\n".join(f"{row[0]:<14}" + "".join(f"{cell:>11}" for cell in row[1:]) for row in rows)


def check_same_split(runs: Sequence[Run], questions: Sequence[set[str]]) -> int:
    """The number of test questions that all runs share; an error if one of them is in another part of another run."""
    common = questions[0].intersection(*questions[1:])
    tests = [common & set(map(str, run.test.question_ids)) for run in runs]
    for run, test in zip(runs, tests, strict=True):
        if strange := test ^ tests[0]:
            raise BadSplit(
                f"{runs[0].path} and {run.path} do not have the same test part: {len(strange)} questions are in one "
                f"alone, as {min(strange)!r}. Remove the older run and train again"
            )
    return len(tests[0])


def _share_from(levels: NDArray[np.float64], scores: Floats) -> NDArray[np.float64]:
    """Of these scores, the share that reaches each level."""
    return 1 - np.searchsorted(np.sort(scores), levels) / max(len(scores), 1)
