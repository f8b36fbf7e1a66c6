"""What detectors of papers promise: they learn a planted signal, streamed or not, and their arrays are all of it."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import millstream as ms
from millstream.errors import NoDetector
from millstream.report.measures import auroc
from millstream.traces.detectors import OURS, DetectorSpec
from millstream.traces.detectors.stack import Stack
from millstream.traces.kind import TrainSettings
from millstream.training.study import Workplace
from millstream.training.task import FitResources, Model
from support.commands import run_here
from support.fitting import Parts, fitted, restored, scored
from support.making_traces import labelled, make_traces
from support.training import SHORT

pytestmark = pytest.mark.usefixtures("unrendered_figures", "roughly_measured_memory")

OF_TOKENS = ["mil", "attention_pool", "token_transformer"]
NAMES = ["stack", "wepr", "toha", "saplma", *OF_TOKENS]  # icr has a signal of its own: test_formulas.py
IN_PASSES = ["stack", "wepr", "toha"]  # those that depend on the memory in the order of their steps only
TINY = 2_000_000  # a few records at a time


def parts_of(records: ms.Collection) -> Parts:
    return records.subset(range(150)), records.subset(range(150, 200)), records.subset(range(299, 199, -1))


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Parts]:
    path = tmp_path_factory.mktemp("detectors")
    made = {tier: labelled(make_traces(path / tier, num=300, tier=tier)) for tier in ("probe", "full")}
    return {name: parts_of(made["full" if name in OF_TOKENS else "probe"]) for name in NAMES}


@pytest.fixture(scope="module")
def models(stores: Mapping[str, Parts], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Model]:
    path = tmp_path_factory.mktemp("fitted")
    return {name: fitted(name, stores[name], path) for name in NAMES}


def labels_of(records: ms.Collection) -> np.ndarray:
    return records.column("label").to_numpy()


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_a_planted_signal(name: str, models: Mapping[str, Model], stores: Mapping[str, Parts]):
    test = stores[name][2]
    assert auroc(labels_of(test), scored(models[name], test)) > (0.7 if name in ("toha", *OF_TOKENS[1:]) else 0.85)
    assert json.loads(json.dumps(models[name].chosen)) == models[name].chosen


@pytest.mark.parametrize("name", NAMES)
def test_restored_it_scores_alike_in_another_order_and_little_memory(
    name: str, models: Mapping[str, Model], stores: Mapping[str, Parts]
):
    test = stores[name][2]
    again = restored(name, models[name], test, memory=TINY)
    backwards = test.subset(range(99, -1, -1))
    np.testing.assert_allclose(scored(again, backwards)[::-1], scored(models[name], test), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", IN_PASSES)
def test_fitted_within_little_memory_it_is_about_the_same(
    name: str, models: Mapping[str, Model], stores: Mapping[str, Parts], tmp_path: Path
):
    test = stores[name][2]
    streamed = fitted(name, stores[name], tmp_path, memory=TINY // 10)
    # Of stack 0.945 or 0.999, by the strength of the penalty that the last regression chooses.
    assert np.corrcoef(scored(streamed, test), scored(models[name], test))[0, 1] > 0.9


def test_stacks_fitted_together_are_those_fitted_alone_and_about_those_of_their_records_only(
    stores: Mapping[str, Parts],
):
    whole, _, test = stores["stack"]
    folds = [
        (whole.subset(range(99, -1, -1)), whole.subset(range(100, 150))),
        (whole.subset(range(40, 150)), whole.subset(range(40))),
    ]
    one, two, alone, apart = (Stack(FitResources(), whole.field_names) for _ in range(4))
    Stack.fit_together([one, two], whole, folds)
    Stack.fit_together([alone], whole, folds[:1])
    apart.fit(*folds[0])
    assert one.chosen == alone.chosen != two.chosen
    assert all(np.array_equal(one.arrays[name], array) for name, array in alone.arrays.items())
    assert np.corrcoef(one.score(test), apart.score(test))[0, 1] > 0.95


@pytest.mark.parametrize("name", NAMES)
def test_it_reads_only_fields_that_it_lists_and_few_layers(
    name: str, models: Mapping[str, Model], stores: Mapping[str, Parts]
):
    test, listed = stores[name][2], models[name].fields
    wanted = [field.split("[")[0] for field in listed]
    assert not {"nodes", "edge_source", "attention", "laplacian"} & {*wanted}
    assert len(wanted) == len({*wanted}) and {*wanted} <= {*test.field_names}
    if name in ("saplma", "mil"):  # of the chosen layer alone
        states = next(field for field in listed if field.startswith(("states", "hidden")))
        layer = models[name].chosen["layer"]
        assert states in (f"hidden[{layer}]", f"states[[{layer}], 2]")


@pytest.mark.parametrize("name", [*NAMES, "icr"])
def test_a_store_without_its_fields_is_told_in_one_line(name: str):
    with pytest.raises(NoDetector) as caught:
        place = Workplace(TrainSettings(data="x"), None)
        DetectorSpec(name, ["question_id", "label"]).build(resources=FitResources(), place=place)
    assert "\n" not in str(caught.value) and name in OURS


def test_the_layer_is_chosen_on_validation_and_kept_alone(models: Mapping[str, Model]):
    for name in ("saplma", "mil"):
        model = models[name]
        by_layer = model.chosen["auroc_by_layer"]
        assert isinstance(by_layer, list) and model.chosen["layer"] == model.chosen["layers"][np.argmax(by_layer)]  # pyright: ignore
        assert model.chosen["layer"] == 2  # which has the signal
        assert {len(array) for array in model.arrays.values()} == {1}
        assert model.arrays["layer"].tolist() == [2]


@pytest.mark.parametrize("name", OF_TOKENS)
def test_an_answer_of_no_tokens_is_scored(
    name: str, models: Mapping[str, Model], stores: Mapping[str, Parts], tmp_path: Path
):
    record = {key: value for key, value in stores[name][2][0].items() if key != "label"}
    bare = {"hidden": record["hidden"][:, : record["prompt_len"]], "answer_len": 0, "question_id": "none"}
    with ms.TraceWriter(tmp_path / "s") as writer:
        writer.extend([record, {**record, "answer_len": 0, "question_id": "empty"}, {**record, **bare}])
    records = ms.open(tmp_path / "s")
    found = scored(restored(name, models[name], records), records)
    assert np.isfinite(found).all()
    assert found[0] == pytest.approx(scored(models[name], stores[name][2])[0], rel=1e-4)
    if name == "mil":
        assert found[2] == 0.5


def test_train_keeps_what_they_learn_and_evaluate_repeats_their_scores(tmp_path: Path):
    store = make_traces(tmp_path / "s", num=90, tier="full")
    names = ",".join([*NAMES, "icr"])
    settings = [f"{key}={value}" for key, value in {**SHORT, "epochs": 1}.items()]
    code, _, errors = run_here("train", f"data={store}", f"out={tmp_path / 'run'}", f"model={names}", *settings)
    assert code == 0, errors
    rows = pq.read_table(tmp_path / "run" / "predictions.parquet").to_pylist()
    assert {row["model"] for row in rows} == {*names.split(",")}
    again = pq.read_table(ms.evaluate(tmp_path / "run") / "predictions.parquet").to_pylist()
    for one, other in zip(rows, again, strict=True):
        assert one["record"] == other["record"] and one["score"] == pytest.approx(other["score"], rel=1e-4, abs=1e-6)
