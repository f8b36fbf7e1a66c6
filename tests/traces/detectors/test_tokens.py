"""Detectors of wrong tokens see each generated token, learn from labelled ones, and score every token of an answer."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.linear_model import LogisticRegression

import millstream as ms
from millstream.core.batches import fetch_batch
from millstream.core.config import read_settings
from millstream.errors import BadSetting, NoDetector, NotFinite
from millstream.report.measures import auroc
from millstream.traces.detectors import DetectorSpec, Recipe, build_net, detector_specs, net_features
from millstream.traces.detectors.tokens import TokenFeature, TokenProbe, TokenStatistic, highest, states_feature
from millstream.traces.examples import open_labelled
from millstream.traces.kind import TrainSettings
from millstream.traces.label import label
from millstream.traces.report.evaluate import read_results
from millstream.training.task import FitResources
from support.commands import run_here
from support.making_spans import DIM, LAYERS, PROMPT, write_spans
from support.training import SHORT

pytestmark = pytest.mark.usefixtures("unrendered_figures", "roughly_measured_memory")

MODELS = "token-probe,token-lstm,token-logprob,token-entropy"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "s"
    write_spans(path, 60)
    label(path, rule="spans")
    return path


@pytest.fixture(scope="module")
def records(store: Path) -> ms.Collection:
    return open_labelled(str(store), "verdict")


def batch_of(records: ms.Collection, feature: object, numbers: list[int]) -> dict[str, np.ndarray]:
    wanted = np.array(numbers, np.int64)
    return dict(feature(fetch_batch(records, wanted, feature.fields)))  # pyright: ignore


@pytest.mark.parametrize("tier", ["hidden", "answer"])
def test_a_feature_has_a_row_per_generated_token(tmp_path: Path, tier: str):
    write_spans(tmp_path / "s", 4, tier=tier)
    label(tmp_path / "s", rule="spans")
    records = open_labelled(str(tmp_path / "s"), "verdict")
    feature = states_feature(records.field_names, "0,-1", stats=True)
    batch = batch_of(records, feature, [3, 0])
    traces = [records[3], records[0]]
    states = [t["hidden"][:, PROMPT:] if tier == "hidden" else t["answer_hidden"] for t in traces]
    np.testing.assert_array_equal(batch["x"], np.concatenate([s[[0, -1]].transpose(1, 0, 2) for s in states]))
    assert batch["num_tokens"].tolist() == [len(t["logprobs"]) for t in traces]
    np.testing.assert_array_equal(batch["token_label"], np.concatenate([t["token_labels"] for t in traces]))
    assert batch["token_label"].tolist().count(-1) == 2  # the tokens that end the answers
    np.testing.assert_array_equal(batch["stats"][:, 1], np.concatenate([t["entropy"] for t in traces]))


def splits(records: ms.Collection) -> tuple[ms.Collection, ms.Collection, ms.Collection]:
    parts = ms.split(records, {"train": 0.6, "val": 0.2, "test": 0.2}, by="question_id")
    return parts["train"], parts["val"], parts["test"]


def tokens_of(records: ms.Collection, scores: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    labels = np.concatenate([records[number]["token_labels"] for number in range(len(records))])  # pyright: ignore
    return labels[labels >= 0], np.concatenate(scores)[labels >= 0]


def test_the_probe_finds_the_layer_and_agrees_with_scikit_learn(records: ms.Collection):
    train, val, test = splits(records)
    feature = states_feature(records.field_names, None, stats=False)
    probe = TokenProbe(FitResources(), feature=feature)
    probe.fit(train, val)
    assert probe.chosen["layer"] == 1
    scores = probe.score_tokens(test)
    labels, found = tokens_of(test, scores)
    assert auroc(labels, found) > 0.9
    x = [batch_of(part, feature, list(range(len(part)))) for part in (train, test)]
    known = [one["token_label"] >= 0 for one in x]
    peer = LogisticRegression(C=float(str(probe.chosen["C"])), class_weight="balanced")
    peer.fit(x[0]["x"][known[0], 1], x[0]["token_label"][known[0]])
    theirs = peer.predict_proba(x[1]["x"][known[1], 1])[:, 1]
    assert np.corrcoef(theirs, found)[0, 1] > 0.98
    np.testing.assert_allclose(probe.score(test), [one[:-1].max() for one in scores])  # without the end of the answer
    again = TokenProbe(FitResources(batch_size=3, memory=100_000), feature=feature)  # in other batches
    again.arrays = probe.arrays
    for ours, other in zip(scores, again.score_tokens(test), strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-5)


def test_a_probe_fits_within_little_memory(records: ms.Collection):
    train, val, test = splits(records)
    feature = states_feature(records.field_names, "1", stats=False)
    probe = TokenProbe(FitResources(memory=60_000), feature=feature)  # a fraction of the states
    probe.fit(train, val)
    assert auroc(*tokens_of(test, probe.score_tokens(test))) > 0.9


def test_a_statistic_has_the_sign_of_the_training_split(records: ms.Collection):
    train, val, test = splits(records)
    for name, sign in (("logprobs", -1), ("entropy", 1)):
        found = TokenStatistic(FitResources(), TokenFeature(None, None, (name,)))
        found.fit(train, val)
        assert found.chosen["direction"] == sign
        for number, scores in enumerate(found.score_tokens(test)):
            np.testing.assert_array_equal(scores, sign * test[number][name])  # pyright: ignore


def test_the_lstm_scores_a_token_alike_in_any_batch(records: ms.Collection):
    recipe = Recipe(parameters=3000, dropout=0.0)
    features = net_features("token-lstm", records.field_names, recipe)

    def batch(numbers: list[int]) -> dict[str, torch.Tensor]:
        found = batch_of(records, features[0], numbers)
        return {name: torch.as_tensor(np.asarray(value)) for name, value in found.items()}

    torch.manual_seed(0)
    net = build_net("token-lstm", batch([0, 1]), recipe).eval()
    with torch.inference_mode():
        alone = [net.logits(batch([number]))[0] for number in range(5)]
        together = net.logits(batch([0, 1, 2, 3, 4]))[0]
    torch.testing.assert_close(torch.cat(alone), together, rtol=1e-4, atol=1e-6)


def test_an_answer_scores_as_its_highest_token_and_an_empty_one_lowest(tmp_path: Path):
    with ms.TraceWriter(tmp_path / "s") as writer:
        writer.extend({"question_id": str(length), "answer_len": length} for length in (2, 0, 1))
    tokens = [np.array(one, np.float32) for one in ([0.1, 0.7, 0.9], [0.9], [0.2])]
    np.testing.assert_allclose(highest(tokens, ms.open(tmp_path / "s")), [0.7, 0.2, 0.2], rtol=1e-6)
    assert highest([np.zeros(0, np.float32)], ms.open(tmp_path / "s").subset([1])).tolist() == [0.0]


def test_a_run_keeps_token_scores_beside_those_of_answers_and_evaluate_repeats_them(store: Path, tmp_path: Path):
    code, _, errors = run_here(
        *("train", f"data={store}", f"out={tmp_path / 'run'}", f"model={MODELS},mean_logprob"),
        *(f"{name}={value}" for name, value in {**SHORT, "seeds": 2}.items()),
    )
    assert code == 0, errors
    table = pq.read_table(tmp_path / "run" / "predictions.parquet")
    rows = table.to_pylist()
    questions = {part: {row["question_id"] for row in rows if row["part"] == part} for part in ("val", "test")}
    assert not questions["val"] & questions["test"]
    traces = ms.open(store)
    for row in rows:
        if row["model"] == "mean_logprob":
            assert row["token_scores"] is None and row["token_labels"] is None
        else:
            assert len(row["token_scores"]) == len(row["token_labels"]) == len(traces[row["record"]]["offsets"])
            assert row["score"] == pytest.approx(max(row["token_scores"][:-1]))
    assert {(row["model"], row["seed"]) for row in rows} >= {("token-lstm", 1), ("token-probe", 0)}
    again = pq.read_table(ms.evaluate(tmp_path / "run") / "predictions.parquet").to_pylist()
    for one, other in zip(rows, again, strict=True):
        assert one["record"] == other["record"] and one["score"] == pytest.approx(other["score"], rel=1e-5)


def test_records_without_token_labels_are_scored(store: Path, tmp_path: Path):
    code, _, errors = run_here(
        *("train", f"data={store}", f"out={tmp_path / 'run'}", f"model={MODELS},mean_logprob"),
        *(f"{name}={value}" for name, value in SHORT.items()),
    )
    assert code == 0, errors
    write_spans(tmp_path / "other", 10, seed=1)
    scores = "\n".join(f"{row},{number % 2}" for number, row in enumerate(ms.open(tmp_path / "other").ids))
    (tmp_path / "scores.csv").write_text(f"record_id,score\n{scores}\n")
    label(tmp_path / "other", rule="scores", scores=tmp_path / "scores.csv", positive="wrong")
    found = ms.evaluate(tmp_path / "run", data=str(tmp_path / "other"), include_seen=True)
    rows = [row for row in pq.read_table(found / "predictions.parquet").to_pylist() if row["part"] == "test"]
    by_model = {row["model"]: row for row in rows}
    assert by_model["token-probe"]["token_scores"] and by_model["mean_logprob"]["token_scores"] is None
    assert all(row["token_labels"] is None for row in rows)
    assert read_results(found, resamples=20).tokens is None


def test_stores_without_token_labels_or_states_leave_token_detectors_out(tmp_path: Path, store: Path):
    fields = ms.open(store).field_names
    for name in MODELS.split(","):
        with pytest.raises(NoDetector, match="rule=spans"):
            DetectorSpec(name, fields).build(resources=FitResources(), place=_place(), folder=tmp_path)
    with pytest.raises(NoDetector, match="answer and full"):
        states_feature(["token_labels", "logprobs"], None, stats=True)
    with pytest.raises(BadSetting, match="layers=a"):
        states_feature([*fields, "token_labels"], "a", stats=True)
    names = [spec.name for spec in detector_specs(read_settings(TrainSettings, {"model": "baselines"}), fields)]
    assert not set(names) & set(MODELS.split(","))
    labelled = [*fields, "token_labels"]
    names = [spec.name for spec in detector_specs(read_settings(TrainSettings, {"model": "baselines"}), labelled)]
    assert {"token-logprob", "token-entropy"} < set(names)


def _place() -> object:
    from millstream.training.study import Workplace

    return Workplace(read_settings(TrainSettings, {}), None)


def test_bad_states_and_stale_labels_name_the_record(tmp_path: Path):
    with ms.TraceWriter(tmp_path / "s") as writer:
        for number in range(2):
            hidden = np.zeros((LAYERS, 3, DIM), np.float32)
            hidden[0, 1, 0] = np.inf if number else 0
            writer.append(
                {
                    "question_id": str(number),
                    "answer_hidden": hidden,
                    "token_labels": np.zeros(3 - (not number), np.int8),
                }
            )
    traces = ms.open(tmp_path / "s")
    feature = states_feature(traces.field_names, None, stats=False)
    with pytest.raises(NotFinite, match="record 1"):
        batch_of(traces, feature, [1])
    with pytest.raises(ValueError, match="record 0 has 3 tokens, but 2 token labels"):
        batch_of(traces, feature, [0])
