"""Cross-validation and learning curves: every record is scored by models that never saw its question."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream.errors import BadSetting, BadSplit
from millstream.report.measures import auroc, fit_platt
from millstream.traces.report.evaluate import read_results
from millstream.traces.report.results import Percentile, read_run
from millstream.traces.study import make_study
from support.making_traces import make_traces
from support.training import SHORT

MODELS = "lstm,mean_logprob,probe_last_answer"
pytestmark = pytest.mark.usefixtures("unrendered_figures", "roughly_measured_memory", "quick_fits")
GIVEN: Any = {**SHORT, "epochs": 1, "seeds": 1, "folds": 3, "curve": "20,60,5000"}


@pytest.fixture(scope="module")
def run(
    store: Path,
    tmp_path_factory: pytest.TempPathFactory,
    unrendered_figures: None,
    roughly_measured_memory: None,
    quick_fits: None,
) -> Path:
    out = tmp_path_factory.mktemp("folds") / "run"
    assert not ms.train(store, model=MODELS, out=str(out), **GIVEN).interrupted
    return out


def test_every_record_is_scored_once_by_a_model_that_did_not_see_its_question(run: Path, store: Path):
    study = make_study({"data": str(store), "model": MODELS, **GIVEN})
    assert [(fold.number, fold.labels) for fold in study.folds] == [
        (number, labels) for number in (1, 2, 3) for labels in (20, 60, 0)
    ]
    tested: list[int] = []
    for fold in study.folds:
        parts = {"train": fold.train, **fold.scored}
        questions = {name: set(part.column("question_id").to_pylist()) for name, part in parts.items()}
        assert not questions["test"] & (questions["train"] | questions["val"])
        assert not questions["train"] & questions["val"]
        if fold.labels:
            assert len(questions["train"] | questions["val"]) == pytest.approx(fold.labels, abs=1)
        else:
            tested += fold.scored["test"].record_numbers(np.arange(len(fold.scored["test"]))).tolist()
    assert sorted(tested) == list(range(160))
    table = pq.read_table(run / "predictions.parquet").to_pylist()
    for model in MODELS.split(","):
        rows = [row for row in table if row["model"] == model and row["part"] == "test" and not row["labels"]]
        assert sorted(row["record"] for row in rows) == list(range(160))


def test_fewer_labels_are_among_those_of_more(store: Path):
    folds = make_study({"data": str(store), "model": MODELS, **GIVEN}).folds[:3]
    questions = [set(fold.train.column("question_id").to_pylist()) for fold in folds]
    assert questions[0] < questions[1] < questions[2]


def test_the_report_pools_percentiles_among_the_validation_scores_of_each_fold(run: Path):
    results, read = read_results(run, resamples=50), read_run(run)
    assert results.num_test == 160
    table = pq.read_table(run / "predictions.parquet").to_pylist()
    mine = [row for row in table if row["model"] == "mean_logprob" and not row["labels"]]
    percentiles, probabilities = np.zeros(160), np.zeros(160)
    for fold in (1, 2, 3):
        val, test = ([row for row in mine if (row["fold"], row["part"]) == (fold, part)] for part in ("val", "test"))
        known, scores = (np.array([row["score"] for row in rows]) for rows in (val, test))
        places = [row["record"] for row in test]
        percentiles[places] = [(np.mean(known < score) + np.mean(known <= score)) / 2 for score in scores]
        probabilities[places] = fit_platt(np.array([row["label"] for row in val]), known)(scores)
    (trial,) = read.trials["mean_logprob"]
    assert np.allclose(trial.test, percentiles, atol=1e-5)
    assert np.allclose(trial.probabilities, probabilities)
    found = next(model for model in results.models if model.name == "mean_logprob")
    assert found.auroc.value == pytest.approx(auroc(read.test.labels, trial.test))
    kept = np.argsort(trial.test, kind="stable")[:128]
    assert found.accuracy_kept.value == pytest.approx(1 - read.test.labels[kept].mean(), abs=1e-6)
    assert [labels for labels, _ in found.learning] == [20, 60, results.data["labelled"]]
    assert found.learning[-1][1] == found.auroc


@given(
    scores=st.lists(st.integers(-5, 5), min_size=2, max_size=40),
    factor=st.floats(0.1, 10),
    offset=st.floats(-100, 100),
)
def test_percentiles_keep_the_order_and_forget_the_scale_of_a_fold(scores: list[int], factor: float, offset: float):
    seen, other = np.array(scores[:20], float), np.arange(-7.0, 8.0)
    found = Percentile.of(seen)(other)
    assert (np.diff(found) > 0).all()
    assert np.allclose(Percentile.of(seen * factor + offset)(other * factor + offset), found, atol=1e-5)


def test_a_stopped_cross_validation_is_resumed_and_nothing_is_trained_twice(run: Path, store: Path):
    before = (run / "predictions.parquet").read_bytes()
    (run / "checkpoints" / "lstm-0.fold2" / "scores.parquet").unlink()
    kept = {file: file.stat().st_mtime_ns for file in run.glob("checkpoints/*/scores.parquet")}
    ms.train(store, model=MODELS, out=str(run), **GIVEN)
    assert all(file.stat().st_mtime_ns == stamp for file, stamp in kept.items())
    assert (run / "predictions.parquet").read_bytes() == before


def test_models_of_all_folds_score_another_store_together(run: Path, store: Path, tmp_path: Path):
    other = make_traces(tmp_path / "other", num=40, seed=5)
    folder = ms.evaluate(run, data=str(other), include_seen=True)
    results = read_results(folder, resamples=20)
    assert results.num_test == 40 and len(results.models) == 3
    rows = [row for row in pq.read_table(folder / "predictions.parquet").to_pylist() if row["part"] == "test"]
    assert len(rows) == 3 * 3 * 40
    again = read_results(ms.evaluate(run), resamples=20)
    assert again.num_test == 160


def test_folds_and_curves_that_cannot_be_are_refused(store: Path):
    with pytest.raises(BadSetting, match="folds=1"):
        make_study({"data": str(store), "folds": 1})
    with pytest.raises(BadSetting, match="curve=0,x"):
        make_study({"data": str(store), "curve": "0,x"})
    with pytest.raises(BadSplit, match="fold "):
        make_study({"data": str(store), "folds": 90})
