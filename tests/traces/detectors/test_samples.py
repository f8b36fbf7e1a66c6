"""Baselines over the samples of a question: they separate wrong from right answers, and tell their cost in tokens."""

import json
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow.parquet as pq
import pytest

import millstream as ms
from millstream.errors import NoDetector
from millstream.report.measures import auroc
from millstream.traces.detectors import detector_specs
from millstream.traces.detectors.baselines import BASELINES
from millstream.traces.detectors.stack import with_samples
from millstream.traces.examples import fields_of, open_labelled
from millstream.traces.kind import TrainSettings
from millstream.traces.label import label
from millstream.training.task import FitResources
from support.commands import run_here

pytestmark = pytest.mark.usefixtures("unrendered_figures", "roughly_measured_memory", "quick_fits")

OF_SAMPLES = [name for name, baseline in BASELINES.items() if baseline.needs_samples]
NUM, DRAWN, TOKENS = 120, 5, 3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions whose wrong answers disagree with their samples, in words and in states."""
    path = tmp_path_factory.mktemp("samples") / "store"
    rng = np.random.default_rng(0)
    schema = {"states": "float16[layer,position,dim]"}
    with ms.TraceWriter(path, schema=schema, shard_records=50) as writer:
        for question in range(NUM):
            doubt = float(np.clip(rng.normal(0.5, 0.35), 0, 1))
            texts = [f"town {rng.integers(50)}" if rng.random() < doubt else "Paris" for _ in range(DRAWN + 1)]
            for sample, text in enumerate(texts):
                states = rng.normal(size=(3, 4, 8)) * (0.2 + doubt)
                about = {"record_id": f"q{question}#{sample}", "question_id": f"q{question}", "sample": sample}
                answer = {"generated_answer": text, "aliases": ["Paris"], "answer_len": TOKENS, "status": "ok"}
                writer.append({**about, "question": f"Q {question}?", **answer, "states": states.astype(np.float16)})
    label(path)
    return path


def test_a_statistic_of_samples_separates_wrong_from_right_and_tells_its_cost(store: Path) -> None:
    examples = open_labelled(str(store), "verdict")
    greedy = examples.subset(np.flatnonzero(np.array(examples.column("sample").to_pylist()) == 0))
    train, test = greedy.subset(range(0, NUM, 2)), greedy.subset(range(NUM - 1, 0, -2))
    labels = test.column("label").to_numpy()
    for name in OF_SAMPLES:
        detector = BASELINES[name].make(FitResources(), fields_of(greedy))
        detector.fit(train, test)
        assert getattr(detector, "extra_tokens") == DRAWN * TOKENS  # noqa: B009
        scores = detector.score(test)
        assert auroc(labels, scores) > 0.7, name
        again = BASELINES[name].make(FitResources(), fields_of(greedy))
        again.arrays = detector.arrays
        assert np.array_equal(again.score(test.subset(range(9, -1, -1))), scores[9::-1])


def test_train_compares_them_and_the_report_has_their_cost_in_tokens(store: Path, tmp_path: Path) -> None:
    of_samples = [*OF_SAMPLES, "stack_samples"]
    names = ",".join([*of_samples, "probe_last_answer"])
    code, _, err = run_here("train", f"data={store}", f"model={names}", f"out={tmp_path / 'run'}")
    assert code == 0, err
    code, out, err = run_here("report", tmp_path / "run", "--json")
    assert code == 0, err
    tokens = {model["name"]: model["extra_tokens"] for model in json.loads(out)["models"]}
    assert tokens == {**dict.fromkeys(of_samples, DRAWN * TOKENS), "probe_last_answer": 0}
    assert "tokens generated for samples" in (tmp_path / "run" / "report.html").read_text()
    predictions = pq.read_table(tmp_path / "run" / "predictions.parquet")
    assert set(predictions.column("model").to_pylist()) == {*of_samples, "probe_last_answer"}
    code, _, err = run_here("evaluate", tmp_path / "run")
    assert code == 0, err


def test_they_belong_to_the_baselines_of_stores_with_samples_only(store: Path, tmp_path: Path) -> None:
    with_samples = fields_of(open_labelled(str(store), "verdict"))
    settings = TrainSettings(model="baselines", data=str(store))
    assert set(OF_SAMPLES) <= {spec.name for spec in detector_specs(settings, with_samples)}
    without = [name for name in with_samples if name not in OF_SAMPLES]
    assert not set(OF_SAMPLES) & {spec.name for spec in detector_specs(settings, without)}
    with pytest.raises(NoDetector, match="samples"):
        BASELINES["agreement"].make(FitResources(), without)


def test_a_stack_reads_all_statistics_of_samples_beside_the_states(store: Path) -> None:
    examples = open_labelled(str(store), "verdict")
    greedy = examples.subset(np.flatnonzero(np.array(examples.column("sample").to_pylist()) == 0))
    train, val, test = (greedy.subset(range(start, NUM, 3)) for start in range(3))
    detector = with_samples(FitResources(), fields_of(greedy))
    detector.fit(train, val)
    assert set(OF_SAMPLES) < set(cast("dict[str, float]", detector.chosen["weights"]))
    assert auroc(test.column("label").to_numpy(), detector.score(test)) > 0.75
    again = with_samples(FitResources(memory=1_000_000), fields_of(greedy))
    again.arrays = detector.arrays
    np.testing.assert_allclose(again.score(test.subset(range(9, -1, -1))), detector.score(test)[9::-1], rtol=1e-5)
    with pytest.raises(NoDetector, match="samples"):
        with_samples(FitResources(), [name for name in fields_of(greedy) if name not in OF_SAMPLES])
