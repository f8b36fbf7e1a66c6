"""Each baseline reads the fields it lists, has the right direction, and scores records in their order."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import millstream as ms
from millstream.report.measures import auroc
from millstream.traces.detectors.baselines import BASELINES, lookback_ratios
from millstream.traces.detectors.logistic import Detector
from millstream.training.task import FitResources
from support.making_traces import INFORMATIVE_LAYER, labelled, make_traces

LEARNED = {
    name
    for name in BASELINES
    if name.startswith("probe") or name in ("token_stats", "logdet", "lookback", "wepr", "icr")
}
OF_TRACES = [name for name in BASELINES if not BASELINES[name].needs_samples]  # the others: test_samples.py
Parts = tuple[ms.Collection, ms.Collection, ms.Collection]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> ms.Collection:
    return labelled(make_traces(tmp_path_factory.mktemp("baselines") / "traces", num=220))


@pytest.fixture(scope="module")
def parts(traces: ms.Collection) -> Parts:
    return traces.subset(range(120)), traces.subset(range(120, 160)), traces.subset(range(219, 159, -1))


@pytest.fixture(scope="module")
def fitted(traces: ms.Collection, parts: Parts) -> Mapping[str, Detector]:
    detectors = {name: BASELINES[name].make(FitResources(), traces.field_names) for name in OF_TRACES}
    for detector in detectors.values():
        detector.fit(parts[0], parts[1])
    return detectors


def labels_of(collection: ms.Collection) -> np.ndarray:
    return collection.column("label").to_numpy()


def test_only_baselines_that_see_the_signal_separate_wrong_from_right(fitted: Mapping[str, Detector], parts: Parts):
    test = parts[2]
    found = {name: auroc(labels_of(test), detector.score(test)) for name, detector in fitted.items()}
    probes = [f"probe_{position}" for position in ("last_prompt", "first_answer", "last_answer", "mean_answer")]
    assert all(found[name] > 0.85 for name in probes), found
    assert all(found[name] > 0.75 for name in ("mean_logprob", "entropy", "token_stats", "lookback")), found
    assert found["p_true"] > 0.65, found
    assert 0.25 < found["length"] < 0.75, found


def test_a_baseline_lists_its_fields_and_has_a_short_title(traces: ms.Collection, fitted: Mapping[str, Detector]):
    for baseline in BASELINES.values():
        assert len(baseline.title.split()) <= 6
    for name in OF_TRACES:
        assert fitted[name].fields and {field.split("[")[0] for field in fitted[name].fields} <= set(
            traces.field_names
        ), name
    assert [name for name in BASELINES if BASELINES[name].extra_forwards] == ["p_true"]


def test_restored_baselines_score_in_the_order_of_the_collection(
    traces: ms.Collection, fitted: Mapping[str, Detector], parts: Parts
):
    backwards = traces.subset(range(160, 220))
    for name, detector in fitted.items():
        scores = detector.score(parts[2])
        assert scores.shape == (60,) and scores.dtype == np.float64 and len(np.unique(scores)) > 3, name
        again = BASELINES[name].make(FitResources(batch_size=13, memory=4_000_000), traces.field_names)
        again.arrays = {key: array.copy() for key, array in detector.arrays.items()}
        for array in again.arrays.values():
            array.flags.writeable = False  # as if mapped from a file
        np.testing.assert_allclose(again.score(backwards)[::-1], scores, rtol=1e-4, err_msg=name)


def test_regressions_give_probabilities_and_single_numbers_do_not(fitted: Mapping[str, Detector], parts: Parts):
    for name, detector in fitted.items():
        scores = detector.score(parts[1])
        assert getattr(detector, "probabilities") == (name in LEARNED | {"lapeigvals"})  # noqa: B009
        if name in LEARNED:
            assert scores.min() >= 0 and scores.max() <= 1
        assert json.loads(json.dumps(detector.chosen)) == detector.chosen


def test_the_direction_is_chosen_on_the_training_split(parts: Parts):
    directions = {"mean_logprob": -1, "entropy": 1, "p_true": -1}
    for name, direction in directions.items():
        detector = BASELINES[name].make(FitResources(), [])
        detector.fit(parts[0], flipped(parts[1]))
        assert detector.chosen["direction"] == direction
        upright = detector.score(parts[2])
        detector.fit(flipped(parts[0]), parts[1])
        assert detector.chosen["direction"] == -direction
        np.testing.assert_array_equal(detector.score(parts[2]), -upright)


def flipped(collection: ms.Collection) -> ms.Collection:
    names = collection.column("question_id").to_pylist()
    table = dict(zip(names, (1 - labels_of(collection)).tolist(), strict=True))
    return ms.labelled(collection, _table(table))


def _table(labels: Mapping[str, int]):
    import pyarrow as pa

    return pa.table({"question_id": list(labels), "label": list(labels.values())})


def test_a_single_number_is_the_statistic_itself(traces: ms.Collection, fitted: Mapping[str, Detector], parts: Parts):
    trace = traces[219]
    count = trace["answer_len"]
    expected = {
        "length": count,
        "min_logprob": trace["logprobs"][:count].min(),
        "entropy": trace["entropy"][:count].mean(),
    }
    expected["p_true"] = trace["p_true"]
    for name, value in expected.items():
        assert abs(fitted[name].score(parts[2])[0]) == pytest.approx(abs(value), rel=1e-5), name


def test_a_probe_reports_the_chosen_layer_and_the_auroc_of_all(fitted: Mapping[str, Detector]):
    for position in ("last_prompt", "first_answer", "last_answer", "mean_answer"):
        chosen = fitted[f"probe_{position}"].chosen
        by_layer = chosen["auroc_by_layer"]
        assert isinstance(by_layer, list) and len(by_layer) == 4
        assert chosen["layer"] == INFORMATIVE_LAYER == int(np.argmax(by_layer)) and max(by_layer) == chosen["val_auroc"]


def test_a_probe_on_hidden_equals_a_probe_on_states(tmp_path: Path):
    states, hidden = (labelled(make_traces(tmp_path / tier, num=60, tier=tier)) for tier in ("probe", "full"))
    rng = np.random.default_rng(0)
    arrays = {"group": np.array(1), "bias": np.array(0.1), "mean": np.zeros(16), "factor": np.ones(16)}
    arrays |= {"weights": rng.normal(size=16)}
    arrays = {name: array if name == "group" else array.astype(np.float32) for name, array in arrays.items()}
    more = {"last_prompt": ["prompt_len"], "first_answer": ["prompt_len"], "last_answer": ["prompt_len", "answer_len"]}
    for position, lengths in more.items():
        scores: list[np.ndarray] = []
        for traces, read in ((states, ["states"]), (hidden, ["hidden", *lengths])):
            detector = BASELINES[f"probe_{position}"].make(FitResources(), traces.field_names)
            assert detector.fields == read
            detector.arrays = arrays
            scores.append(detector.score(traces))
        np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5)


def test_lookback_is_the_mean_over_the_answer_without_prompt_and_stop_token(traces: ms.Collection):
    names = ("prompt_attention", "answer_len")
    (batch,) = ms.Loader(
        traces.subset(range(30)), batch_size=30, features=ms.features.fields(*names), order="none", threads=0
    )
    found = lookback_ratios(batch)
    assert tuple(found.shape) == (30, 1, 6)
    for row, number in zip(found[:, 0].numpy(), range(30), strict=True):
        share = traces[number]["prompt_attention"].astype(np.float32)
        count = traces[number]["answer_len"]
        np.testing.assert_allclose(row, share[:, :, 1 : count + 1].mean(axis=-1).ravel(), rtol=1e-5)
    batch["answer_len"][:] = 0
    np.testing.assert_allclose(
        lookback_ratios(batch)[3, 0].numpy(),
        traces[3]["prompt_attention"][:, :, 1:].astype(float).mean(-1).ravel(),
        rtol=1e-3,
    )


def test_a_record_without_p_true_gets_the_mean_of_the_training_split(tmp_path: Path):
    with ms.TraceWriter(tmp_path / "s", schema={"p_true": "float32"}) as writer:
        for number in range(12):
            writer.append(
                {"question_id": str(number), "p_true": None if number % 5 == 0 else number / 16, "y": number % 2}
            )
    traces = ms.labelled(ms.open(tmp_path / "s"), column="y")
    detector = BASELINES["p_true"].make(FitResources(batch_size=3), traces.field_names)
    detector.fit(traces.subset([0, 1, 2, 3]), traces)
    scores = detector.score(traces) * int(str(detector.chosen["direction"]))
    np.testing.assert_allclose(scores[[0, 5, 10]], 2 / 16)
    np.testing.assert_allclose(scores[[1, 7, 11]], np.array([1, 7, 11]) / 16)


def test_in_a_distributed_job_a_baseline_reads_all_records(
    fitted: Mapping[str, Detector], parts: Parts, monkeypatch: pytest.MonkeyPatch
):
    whole = fitted["token_stats"].score(parts[2])
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    np.testing.assert_array_equal(fitted["token_stats"].score(parts[2]), whole)


def test_lapeigvals_keeps_the_chosen_components_and_needs_scikit_learn(
    traces: ms.Collection, fitted: Mapping[str, Detector], parts: Parts, monkeypatch: pytest.MonkeyPatch
):
    found = fitted["lapeigvals"]
    top = found.chosen["top_k"]
    assert top in (5, 10) and found.arrays["pca_components"].shape == (found.chosen["components"], 6 * int(str(top)))
    assert found.chosen["components"] == len(found.arrays["weights"]) <= 60
    train = np.stack([traces[number]["laplacian"][..., :top].astype(np.float64).ravel() for number in range(120)])
    np.testing.assert_allclose(found.arrays["pca_mean"], train.mean(axis=0), rtol=1e-3, atol=1e-5)
    monkeypatch.setitem(sys.modules, "sklearn.decomposition", None)
    with pytest.raises(ms.errors.MissingExtra, match=r"pip install 'millstream\[train\]'"):
        BASELINES["lapeigvals"].make(FitResources(), traces.field_names).fit(parts[0], parts[1])
