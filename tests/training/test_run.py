"""`ms.train` and `ms.evaluate`: one split for all models, a complete run folder, nothing trained twice."""

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import millstream as ms
from millstream.core.tables import publish_table
from millstream.errors import BadSetting, BadSource, BadSplit, ConfigMismatch, MissingLabel, NotFinite
from millstream.report.measures import auroc
from millstream.traces.detectors import detector_specs
from millstream.traces.detectors.baselines import BASELINES
from millstream.traces.examples import open_labelled
from millstream.traces.kind import TrainSettings
from millstream.traces.report.evaluate import read_results
from millstream.traces.study import make_study
from support.commands import run_here
from support.making_traces import make_traces
from support.training import SHORT, lines_of, losses_of, scores_of

pytestmark = pytest.mark.usefixtures("unrendered_figures", "roughly_measured_memory", "quick_fits")

MODELS = "lstm,gnn,gvae,charm,gnn_shuffled,mean_logprob,p_true,token_stats,probe_last_answer,lapeigvals"


@pytest.fixture(scope="module")
def run(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One detector of each kind, briefly."""
    out = tmp_path_factory.mktemp("runs") / "all"
    done = ms.train(store, model=MODELS, out=str(out), **{**SHORT, "epochs": 1, "seeds": 2})
    assert not done.interrupted and sorted(done.models) == sorted(MODELS.split(","))
    return out


def test_baselines_stand_for_all_baselines_and_the_nulls_of_the_given_models():
    settings = TrainSettings(data="x", model="gnn,baselines")
    of_samples = [name for name, baseline in BASELINES.items() if baseline.needs_samples]
    names = [spec.name for spec in detector_specs(settings, ["p_true", "topology", *of_samples])]
    assert names[0] == "gnn" and {"length", "p_true", "lookback", "charm", "gnn_shuffled", "gnn_unwired"} <= set(names)
    assert len(names) == len(set(names)) == 1 + len(BASELINES) + 3 and "gvae_unwired" not in names
    bare = [spec.name for spec in detector_specs(settings, [])]
    assert "p_true" not in bare  # costs more passes at extraction
    assert "toha" not in bare  # reads what no tier keeps


def test_settings_without_effect_on_the_chosen_detectors_are_named(store: Path, tmp_path: Path):
    def named(model: str, **given: Any) -> list[str]:
        lines = make_study({"data": str(store), "model": model, **given}).summary().splitlines()
        return [line.partition("=")[0] for line in lines if f"has no effect on {model}" in line]

    changed = {"k": 3, "threshold": 0.5, "kl_weight": 0.5, "token": "mean_answer"}
    assert named("mean_logprob", epochs=1, parameters=9, token_stats=False, **changed) == [
        "epochs", "parameters", "token", "token_stats", "k", "threshold", "kl_weight"
    ]  # fmt: skip
    assert named("lstm", epochs=1, **changed) == ["k", "threshold", "kl_weight"]
    assert named("gnn_unwired", **changed) == ["token", "k", "threshold", "kl_weight"]
    assert named("gvae", **changed) == ["token"] and named("lstm, gvae, length", **changed) == []


def test_a_field_to_split_by_that_no_record_has_is_named(store: Path):
    with pytest.raises(BadSplit, match="'genus'"):
        make_study({"data": str(store), "by": "genus"})


def test_a_run_folder_has_all_documented_files(run: Path):
    for name in ("config.yaml", "metrics.jsonl", "predictions.parquet", "env.json", "split.json", "data.json"):
        assert (run / name).stat().st_size > 0
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["epochs"] == 1 and config["warmup"] == 0.05
    card = json.loads((run / "data.json").read_text())
    assert card["records"] == 160 and card["verdicts"]["right"] + card["verdicts"]["wrong"] == 160
    assert sum(part["records"] for part in card["parts"].values()) == 160


def test_all_models_are_compared_on_the_same_questions_which_are_in_no_other_split(run: Path, store: Path):
    asked = {tuple(sorted(scores)) for scores in scores_of(run).values()}
    assert len(asked) == 1
    rows = pq.read_table(run / "predictions.parquet").to_pylist()
    val, test = ({row["question_id"] for row in rows if row["part"] == part} for part in ("val", "test"))
    split = ms.Split.load(run / "split.json", ms.open(store))
    train = set(split["train"].column("question_id").to_pylist())
    assert val and test and not val & test and not train & (val | test)
    assert len(train | val | test) == 160
    table = pq.read_table(store / "labels.parquet")
    labels = dict(zip(table.column("question_id").to_pylist(), table.column("label").to_pylist(), strict=True))
    assert all(row["label"] == labels[row["question_id"]] for row in rows)


def test_models_are_trained_once_per_seed_and_differ(run: Path):
    found = scores_of(run)
    assert {seed for name, seed in found if name == "lstm"} == {0, 1}
    assert {seed for name, seed in found if name == "mean_logprob"} == {0}
    assert found["lstm", 0] != found["lstm", 1]


def test_the_three_models_have_similar_numbers_of_parameters(store: Path, tmp_path: Path):
    fits = {line["model"]: line["parameters"] for line in lines_of(_briefly(store, tmp_path), "fit")}
    counts = [fits[name] for name in ("lstm", "gnn", "gvae")]
    assert max(counts) <= 1.2 * min(counts) and min(counts) > 80_000


def _briefly(store: Path, tmp_path: Path) -> Path:
    out = tmp_path / "run"
    ms.train(store, model="lstm,gnn,gvae", out=str(out), **{**SHORT, "epochs": 1, "parameters": 100_000})
    return out


def test_a_damaged_labels_file_is_named_in_one_line(store: Path, tmp_path: Path):
    copy = shutil.copytree(store, tmp_path / "traces")
    publish_table(copy / "labels.parquet", pa.table({"verdict": ["right", "wrong"] * 80}))
    data = bytearray((copy / "labels.parquet").read_bytes())
    data[len(data) // 2] ^= 4
    (copy / "labels.parquet").write_bytes(data)
    with pytest.raises(BadSource, match=r"labels\.parquet"):
        ms.train(copy, model="lstm", out=str(tmp_path / "run"), **SHORT)


def test_detectors_learn_a_learnable_signal(store: Path, tmp_path: Path):
    out = tmp_path / "longer"
    ms.train(store, model="lstm,gnn", out=str(out), **{**SHORT, "epochs": 12, "lr": 3e-3})
    rows = pq.read_table(out / "predictions.parquet").to_pylist()
    for name in ("lstm", "gnn"):
        mine = [row for row in rows if row["model"] == name and row["part"] == "test"]
        assert auroc(*(np.array([row[key] for row in mine]) for key in ("label", "score"))) > 0.8
        assert losses_of(out)[-1] < losses_of(out)[0]


def test_a_finished_run_is_not_trained_again_and_more_models_can_be_added(run: Path, store: Path):
    before = (run / "checkpoints" / "lstm-0" / "best.safetensors").stat().st_mtime_ns
    asked = {**SHORT, "epochs": 1, "seeds": 1}
    done = ms.train(store, model="lstm,probe_last_answer", out=str(run), **asked)
    assert done.models == ["lstm", "probe_last_answer"]
    assert (run / "checkpoints" / "lstm-0" / "best.safetensors").stat().st_mtime_ns == before
    assert ("gvae", 1) in scores_of(run)


def test_large_libraries_are_imported_for_the_detectors_that_need_them(store: Path):
    libraries = {
        name: list(make_study({"data": str(store), "model": name}).libraries) for name in ("lstm", "lapeigvals")
    }
    assert libraries == {"lstm": [], "lapeigvals": ["sklearn.decomposition"]}


def test_what_a_caller_has_frozen_stays_frozen(store: Path, tmp_path: Path):
    gc.freeze()
    ms.train(store, model="length", out=str(tmp_path / "run"), **SHORT)
    assert gc.get_freeze_count()


def test_a_folder_of_another_run_is_an_error_with_the_differences(run: Path, store: Path, tmp_path: Path):
    with pytest.raises(ConfigMismatch, match=r"lr: None -> 0\.01"):
        ms.train(store, model="lstm", out=str(run), **{**SHORT, "epochs": 1, "lr": 0.01})
    other = make_traces(tmp_path / "other", num=60, seed=5)
    with pytest.raises(ConfigMismatch, match="fingerprint"):
        ms.train(other, model="lstm", out=str(run), **{**SHORT, "epochs": 1})
    relabelled = make_traces(tmp_path / "same", num=160)
    table = pq.read_table(relabelled / "labels.parquet").to_pydict()
    table["verdict"][:2] = ["wrong", "right"] if table["verdict"][0] == "right" else ["right", "wrong"]
    publish_table(relabelled / "labels.parquet", pa.table(table))
    with pytest.raises(ConfigMismatch, match="label_digest"):
        ms.train(relabelled, model="lstm", out=str(run), **{**SHORT, "epochs": 1})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    with pytest.raises(BadSource, match="full"):
        ms.train(store, model="lstm", out=str(tmp_path / "full"), **SHORT)


def test_evaluating_a_run_reproduces_its_scores(run: Path):
    again = scores_of(ms.evaluate(run))
    before = scores_of(run)
    assert set(again) == set(before)
    for job, scores in again.items():
        assert scores == pytest.approx(before[job], abs=1e-6), job


def test_detectors_score_another_store(run: Path, tmp_path: Path):
    other = make_traces(tmp_path / "other", num=50, seed=3)
    out = ms.evaluate(run, data=str(other), model="lstm,mean_logprob")
    rows = pq.read_table(out / "predictions.parquet").to_pylist()
    tested = [row for row in rows if row["part"] == "test" and row["model"] == "lstm" and row["seed"] == 0]
    assert {row["question_id"] for row in tested} == {f"q{n}" for n in range(50)}
    validated = [row for row in rows if row["part"] == "val" and row["model"] == "lstm" and row["seed"] == 0]
    mine = [row for row in pq.read_table(run / "predictions.parquet").to_pylist() if row["part"] == "val"]
    assert {row["score"] for row in validated} <= {row["score"] for row in mine}
    assert {model.name for model in read_results(out, resamples=50).models} == {"lstm", "mean_logprob"}


def test_questions_that_a_run_was_trained_on_are_left_out_of_its_evaluation_unless_included(
    run: Path, store: Path, tmp_path: Path, capfd
):
    split = ms.Split.load(run / "split.json", ms.open(store))
    test = set(split["test"].column("question_id").to_pylist())
    renamed = _copied(store, tmp_path / "renamed", lambda row: {**row, "question_id": f"x{row['question_id']}"})
    nameless = _copied(store, tmp_path / "nameless", lambda row: {**row, "question": None})
    for other, prefix in ((store, ""), (renamed, "x"), (nameless, "")):
        capfd.readouterr()
        out = ms.evaluate(run, data=str(other), model="mean_logprob", out=str(tmp_path / f"without-{other.name}"))
        (scores,) = scores_of(out).values()
        assert set(scores) == {prefix + name for name in test}
        left_out = 160 - len(test)
        assert f"{left_out} of 160 records left out" in capfd.readouterr().err
        assert any(f"{left_out} records are left out" in text for text in read_results(out, resamples=50).findings)
    out = ms.evaluate(run, data=str(store), model="mean_logprob", out=str(tmp_path / "all"), include_seen=True)
    (scores,) = scores_of(out).values()
    assert len(scores) == 160
    assert any("NOT results on new questions" in text for text in read_results(out, resamples=50).findings)


def test_a_store_of_training_questions_only_or_a_run_that_does_not_list_them_is_an_error(
    run: Path, store: Path, tmp_path: Path
):
    train = set(ms.Split.load(run / "split.json", ms.open(store))["train"].column("question_id").to_pylist())
    only = _copied(store, tmp_path / "only", lambda row: row if row["question_id"] in train else None)
    with pytest.raises(BadSource, match=f"all {len(train)} .*include_seen=true"):
        ms.evaluate(run, data=str(only), model="mean_logprob")
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "seen.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadSource, match=r"seen\.parquet"):
        ms.evaluate(copy, data=str(store), model="mean_logprob")


def test_test_questions_that_were_also_trained_on_under_another_id_are_reported(store: Path, tmp_path: Path):
    same = _copied(store, tmp_path / "same", lambda row: {**row, "question": "Who mills?"})
    ms.train(same, model="length", out=str(tmp_path / "run"), **SHORT)
    assert any("NOT results on new questions" in text for text in read_results(tmp_path / "run", resamples=50).findings)


def test_an_evaluation_with_labels_of_another_rule_says_that_thresholds_were_fitted_to_others(
    store: Path, tmp_path: Path
):
    path = shutil.copytree(store, tmp_path / "traces")
    ms.train(path, model="length,mean_logprob", out=str(tmp_path / "run"), **SHORT)
    sentence = "fitted to other labels"
    assert not any(sentence in text for text in read_results(ms.evaluate(tmp_path / "run"), resamples=50).findings)
    table = pq.read_table(path / "labels.parquet").to_pydict()
    table["verdict"][:2] = ["wrong", "right"] if table["verdict"][0] == "right" else ["right", "wrong"]
    publish_table(path / "labels.parquet", pa.table(table))
    assert any(sentence in text for text in read_results(ms.evaluate(tmp_path / "run"), resamples=50).findings)


def test_label_columns_of_our_own_are_taken_in_their_own_sense_and_others_must_say_theirs(tmp_path: Path):
    store = make_traces(tmp_path / "traces", num=100)
    table = pq.read_table(store / "labels.parquet")
    wrong = np.array(table.column("label").to_pylist())
    columns = {"em": wrong == 0, "contains": wrong == 0, "judge": wrong, "good": 1 - wrong, "grade": wrong / 2}
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values))
    about = {"millstream.rule": "default", "millstream.label_version": "default-1"}
    publish_table(store / "labels.parquet", table.replace_schema_metadata(about))

    def labels_of(label: str, positive: str | None = None) -> list[int]:
        return open_labelled(str(store), label, positive).column("label").to_pylist()

    expected = wrong.tolist()
    for label, positive in (("verdict", None), ("label", None), ("em", None), ("em", "right"), ("contains", None)):
        assert labels_of(label, positive) == expected
    assert labels_of("judge", "wrong") == labels_of("good", "right") == expected
    for label, positive in (("judge", None), ("em", "wrong"), ("verdict", "right")):
        with pytest.raises(BadSetting, match=r"positive="):
            labels_of(label, positive)
    with pytest.raises(BadSource, match=r"grade has the value 0\.5"):
        labels_of("grade", "wrong")
    settings = {"model": "mean_logprob", "out": str(tmp_path / "run"), **SHORT}
    with pytest.raises(BadSetting, match="positive=yes"):
        ms.train(store, label="em", positive="yes", **settings)
    ms.train(store, label="em", **settings)
    rows = pq.read_table(tmp_path / "run" / "predictions.parquet").to_pylist()
    assert all(row["label"] == expected[row["record"]] for row in rows)
    assert auroc(np.array([row["label"] for row in rows]), np.array([row["score"] for row in rows])) > 0.6
    again = pq.read_table(ms.evaluate(tmp_path / "run") / "predictions.parquet").to_pylist()
    assert all(row["label"] == expected[row["record"]] for row in again)


def test_inverted_labels_of_some_records_keep_their_records(tmp_path: Path):
    store = make_traces(tmp_path / "traces", num=6)
    em = [True, None, False, True, None, False]
    publish_table(store / "labels.parquet", pa.table({"question_id": [f"q{n}" for n in range(6)], "em": em}))
    with pytest.raises(BadSetting, match=r"positive="):  # a table of one's own
        open_labelled(str(store), "em")
    found = open_labelled(str(store), "em", "right")
    assert found.column("question_id").to_pylist() == ["q0", "q2", "q3", "q5"]
    assert found.column("label").to_pylist() == [0, 1, 0, 1]


def test_a_field_of_the_records_is_a_label_column_of_a_labelled_store_too(tmp_path: Path):
    store = make_traces(tmp_path / "traces", num=6)
    path = _copied(store, tmp_path / "mine", lambda record: {**record, "good": int(record["question_id"] > "q2")})
    assert open_labelled(str(path), "good", "right").column("label").to_pylist() == [1, 1, 1, 0, 0, 0]


def _copied(store: Path, path: Path, change: Callable[[dict], dict | None]) -> Path:
    """A copy of a store and its verdicts with changed records, without those that become None."""
    verdicts = pq.read_table(store / "labels.parquet").column("verdict").to_pylist()
    ids, kept = [], []
    traces = ms.open(store)
    with ms.TraceWriter(path, schema=traces.fields, config=dict(traces.config)) as writer:
        for record, verdict in zip(traces, verdicts, strict=True):
            if changed := change(dict(record)):
                writer.append(changed)
                ids.append(changed["question_id"])
                kept.append(verdict)
    publish_table(path / "labels.parquet", pa.table({"question_id": ids, "verdict": kept}))
    return path


class ByNumber:
    """A detector of one's own: the smallest there can be."""

    fields = ("answer_len",)

    def __init__(self, means) -> None:
        self.arrays: dict = {}
        self.chosen: dict = {}

    def fit(self, train, val) -> None:
        self.arrays = {"mean": np.array([np.mean(train.column("label").to_pylist())])}

    def score(self, collection) -> np.ndarray:
        return np.array(collection.column("answer_len").to_pylist()) * float(self.arrays["mean"][0])


def test_a_custom_detector_is_one_class(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setitem(sys.modules, "own_detector", sys.modules[__name__])
    ms.train(store, model="own_detector:ByNumber,length", out=str(tmp_path / "run"), **SHORT)
    found = scores_of(tmp_path / "run")
    own = found["own_detector:ByNumber", 0]
    assert len(set(own.values())) > 1 and set(own) == set(found["length", 0])
    again = scores_of(ms.evaluate(tmp_path / "run", model="own_detector:ByNumber"))
    assert again["own_detector:ByNumber", 0] == own
    assert list(scores_of(ms.evaluate(tmp_path / "run", out=str(tmp_path / "ours")))) == [("length", 0)]


class NoArguments:
    """Not a detector."""


class NoScore(ByNumber):
    score = property()


@pytest.mark.parametrize(
    ("name", "word"),
    [("NoArguments", "resources"), ("NoScore", "no score"), ("SHORT", "callable"), ("", "imported")],
)
def test_a_class_that_is_no_detector_is_refused_in_one_line(
    name: str, word: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import sys

    monkeypatch.setitem(sys.modules, "own_detector", sys.modules[__name__])
    with pytest.raises(BadSetting, match=f"{name}.*{word}"):
        ms.train(store, model=f"own_detector:{name}" if name else ":", out=str(tmp_path / "run"), **SHORT)


def test_an_evaluation_on_answers_of_one_kind_says_to_evaluate_on_others(run: Path, store: Path, tmp_path: Path):
    def wrong(row: dict) -> dict:
        return {**row, "question_id": f"new {row['question_id']}", "question": f"new {row['question']}"}

    other = _copied(store, tmp_path / "wrong", wrong)
    ids = ms.open(other).column("question_id").to_pylist()
    publish_table(other / "labels.parquet", pa.table({"question_id": ids, "verdict": ["wrong"] * len(ids)}))
    code, _, err = run_here("evaluate", run, f"data={other}", "model=mean_logprob", f"out={tmp_path / 'out'}")
    assert code == 1 and "only wrong answers" in err and "Evaluate on" in err and "train" not in err.splitlines()[-1]


def test_a_run_folder_imports_no_code_unless_the_user_names_it(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
):
    run = tmp_path / "run"
    ms.train(store, model="length", out=str(run), **SHORT)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'was-here')!r}, 'w')\nclass Detector: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("evil:Detector-0", "builtins:print-0", "unknown-0", "length-one"):
        shutil.copytree(run / "checkpoints" / "length-0", run / "checkpoints" / name)
    assert list(scores_of(ms.evaluate(run))) == [("length", 0)]
    assert "model=builtins:print,evil:Detector,unknown" in capfd.readouterr().err
    shutil.rmtree(run / "checkpoints" / "length-0")
    with pytest.raises(BadSource, match="model=builtins:print"):
        ms.evaluate(run)
    for name, error in (("nowhere:Class", BadSource), ("lstm", BadSource), ("unknown", BadSetting)):
        with pytest.raises(error, match=name):
            ms.evaluate(run, model=name)
    assert not (tmp_path / "was-here").exists()


def test_a_detector_that_lacks_fields_in_the_store_is_left_out_and_reported(tmp_path: Path, capfd):
    with ms.TraceWriter(tmp_path / "few", schema={"hidden": "float16[layer, token, dim]"}) as writer:
        for number in range(80):
            hidden = np.random.default_rng(number).normal(size=(3, 5, 8)).astype(np.float16)
            writer.append(
                {
                    "question_id": f"q{number}",
                    "label": number * 7 % 11 % 2,
                    "hidden": hidden,
                    "prompt_len": 2,
                    "answer_len": 3,
                }
            )
    settings = {"model": "lstm,gnn,p_true,probe_last_answer", "out": str(tmp_path / "run"), **SHORT}
    with pytest.raises(BadSetting, match=r"label=label.*positive="):
        ms.train(tmp_path / "few", **settings)
    done = ms.train(tmp_path / "few", positive="wrong", **settings)
    assert done.models == ["lstm", "probe_last_answer"]
    missing = {line["model"]: line["why"] for line in lines_of(tmp_path / "run", "missing")}
    assert "attention" in missing["gnn"] and "p_true" in missing["p_true"]
    assert "p_true: left out" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": "lstn"}, "model=lstn.* lstm"),
        ({"model": "nowhere:Class"}, "model=nowhere:Class"),
        ({"epochs": 0}, "epochs=0: "),
        ({"train": 0.9, "val": 0.2}, "train=0.9 val=0.2"),
        ({"token": "middle"}, "token=middle"),
        ({"batch_size": 15, "devices": 2}, "batch_size=15.*devices=2"),
        ({"lr": -1}, "lr=-1"),
        ({"epoch": 3}, "epoch=3.* epochs="),
        ({"accelerator": "abacus"}, "accelerator=abacus"),
    ],
)
def test_a_wrong_setting_is_an_error_before_any_work(store: Path, tmp_path: Path, settings: dict, said: str):
    with pytest.raises(BadSetting, match=said):
        ms.train(store, out=str(tmp_path / "run"), **{"model": "lstm", **SHORT, **settings})


def test_answers_without_labels_or_with_a_single_label_are_an_error(tmp_path: Path):
    path = make_traces(tmp_path / "traces", num=40)
    (path / "labels.parquet").rename(tmp_path / "labels.parquet")
    with pytest.raises(MissingLabel, match="millstream label"):
        ms.train(path, model="length", out=str(tmp_path / "run"), **SHORT)
    table = pq.read_table(tmp_path / "labels.parquet").to_pydict()
    table["verdict"] = ["right"] * 40
    publish_table(path / "labels.parquet", pa.table(table))
    with pytest.raises(BadSplit, match="split"):
        ms.train(path, model="length", out=str(tmp_path / "run"), **SHORT)


def test_nan_inputs_are_an_error_that_names_the_record(tmp_path: Path):
    path = make_traces(tmp_path / "traces", num=60)
    records = [dict(record) for record in ms.open(path)]
    broken = next(iter(ms.split(ms.open(path), {"train": 0.7, "val": 0.15, "test": 0.15}))).record_numbers(
        np.array([4])
    )[0]
    records[broken]["states"] = records[broken]["states"].copy()
    records[broken]["states"][1, 2, 3] = np.nan
    with ms.TraceWriter(tmp_path / "broken", schema=ms.open(path).fields) as writer:
        for record in records:
            writer.append(record)
    (path / "labels.parquet").rename(tmp_path / "broken" / "labels.parquet")
    with pytest.raises(NotFinite, match=rf"records {broken} of"):
        ms.train(tmp_path / "broken", model="lstm", out=str(tmp_path / "run"), **SHORT)


@pytest.mark.parametrize(
    ("field", "model"),
    [
        ("logprobs", "mean_logprob"),
        ("laplacian", "lapeigvals"),
        ("prompt_attention", "lookback"),
        ("states", "probe_last_answer"),
    ],
)
def test_nan_in_the_inputs_of_a_baseline_is_an_error_that_names_the_record(tmp_path: Path, field: str, model: str):
    store = make_traces(tmp_path / "traces", num=60)
    number = int(
        ms.split(ms.open(store), {"train": 0.7, "val": 0.15, "test": 0.15})["train"].record_numbers(np.array([4]))[0]
    )

    def spoil(row: dict) -> dict:
        return {**row, field: np.full_like(row[field], np.nan)} if row["question_id"] == f"q{number}" else row

    broken = _copied(store, tmp_path / "broken", spoil)
    with pytest.raises(NotFinite, match=rf"records? {number}\b"):
        ms.train(broken, model=model, out=str(tmp_path / "run"), **SHORT)


def test_a_loss_that_is_not_finite_is_an_error_with_the_records_of_the_batch(store: Path, tmp_path: Path):
    with pytest.raises(NotFinite, match=r"(nan|inf) at epoch \d+, step \d+, .* \d+, "):
        ms.train(store, model="lstm", out=str(tmp_path / "run"), **{**SHORT, "lr": 1e30, "clip": 1e30})


def test_the_commands_end_with_a_table_and_a_page(store: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    config = tmp_path / "detector.yaml"
    config.write_text(yaml.safe_dump({**SHORT, "model": "lstm,mean_logprob"}))
    code, out, err = run_here("train", config, f"data={store}", f"out={tmp_path / 'run'}")
    assert code == 0 and "mean_logprob" in out and "AUROC" in out, err
    assert "report.html" in err and (tmp_path / "run" / "report.html").stat().st_size > 10_000
    code, out, err = run_here("report", tmp_path / "run", "-o", tmp_path / "page.html", "--json")
    assert code == 0 and len(json.loads(out)["models"]) == 2 and (tmp_path / "page.html").exists()
    code, out, err = run_here("evaluate", tmp_path / "run", "model=lstm")
    assert code == 0 and "lstm" in out and "mean_logprob" not in out
    code, _, err = run_here("evaluate", tmp_path / "nowhere")
    assert code == 1 and "nowhere" in err and "\n" not in err.strip()
    code, _, err = run_here("train", "data=", "model=lstm")
    assert code == 2 and "data=" in err
