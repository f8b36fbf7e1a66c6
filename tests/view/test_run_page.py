"""The state of a run from its log: followed as it grows, thinned when long, training or stopped."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import BadSource
from millstream.training.folder import JobKey
from millstream.view import Query, plain
from millstream.view.run_page import MOST_POINTS, RunLog, RunReport, run_view
from support.effort import num_examples

Line = dict[str, Any]


def epoch(model: str, number: int, *, seed: int = 0, auroc: float = 0.7) -> Line:
    measured = {"loss": 1 / (number + 1), "val_auroc": auroc, "records_per_s": 900.0, "waiting": 0.1}
    return {"kind": "epoch", "time_s": float(number), "model": model, "seed": seed, "epoch": number, **measured}


def fit(model: str, *, seed: int = 0, family: str = "trained") -> Line:
    rest = {"trace_bytes": 0, "extra_forwards": 0, "probabilities": True, "chosen": {}}
    return {"kind": "fit", "time_s": 9.0, **shown_fit(model, seed=seed, family=family), **rest}


def shown_fit(model: str, *, seed: int = 0, family: str = "trained") -> Line:
    cost = {"parameters": 12, "fit_s": 3.5, "score_s": 0.5, "num_scored": 9}
    return {"model": model, "seed": seed, "family": family, "title": f"a {model}", **cost}


def memory(second: int, size: int) -> Line:
    return {"kind": "memory", "time_s": float(second), "bytes": size, "budget": 10_000}


LINES = [
    memory(0, 100),
    {"kind": "look", "time_s": 0.5, "model": "lstm", "seed": 0, "records_per_s": 5.0, "waiting": 0.5},
    epoch("lstm", 0, auroc=0.6),
    epoch("lstm", 1, auroc=0.8),
    memory(1, 900),
    epoch("lstm", 2, auroc=0.7),
    fit("lstm"),
    {"kind": "missing", "time_s": 3.0, "model": "p_true", "why": "the store has no p_true"},
    epoch("gnn", 0, auroc=float("nan")),
    {"kind": "of a later version", "time_s": 4.0},
    memory(2, 300),
]


def text_of(lines: Sequence[Line]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def run_of(folder: Path, lines: Sequence[Line], **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    given = {"model": "lstm,gnn", "seed": 0, "seeds": 1, "epochs": 30, **config}
    (folder / "config.yaml").write_text("".join(f"{name}: {value}\n" for name, value in given.items()))
    (folder / "metrics.jsonl").write_bytes(text_of(lines))
    return folder


def query(view: Any, name: str = "state", **values: object) -> Mapping[str, Any]:
    answer = plain(view.answers[name](Query({key: str(value) for key, value in values.items()})))
    json.dumps(answer, allow_nan=False)
    assert isinstance(answer, dict)
    return answer


def known(log: RunLog) -> object:
    curves = {job: (curve.columns(), curve.best()) for job, curve in log.curves.items()}
    peaks = log.memory.times, log.memory.values, log.budget
    return repr((log.num_lines, log.num_damaged, curves, log.metrics, peaks, log.at_work))


@settings(max_examples=num_examples(30), deadline=None)
@given(cuts=st.lists(st.integers(0, len(text_of(LINES))), max_size=8))
def test_reading_a_growing_log_gives_the_same_state_as_reading_it_once(tmp_path_factory, cuts: list[int]):
    folder = tmp_path_factory.mktemp("run")
    whole, growing = folder / "whole.jsonl", folder / "growing.jsonl"
    whole.write_bytes(text_of(LINES))
    at_once, as_it_grows = RunLog(whole), RunLog(growing)
    at_once.refresh()
    for cut in [*sorted(cuts), len(text_of(LINES))]:
        growing.touch()
        with growing.open("ab") as file:
            file.write(text_of(LINES)[growing.stat().st_size : cut])
        as_it_grows.refresh()
    assert known(as_it_grows) == known(at_once)
    assert as_it_grows.generation == at_once.generation == 1


def test_an_incomplete_line_is_read_when_complete(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    line = text_of([epoch("lstm", 0)])
    file.write_bytes(line[:30])
    log = RunLog(file)
    log.refresh()
    assert log.num_lines == 0 and log.num_damaged == 0
    file.write_bytes(line)
    log.refresh()
    assert log.num_lines == 1 and list(log.curves) == [JobKey("lstm", 0)]


@pytest.mark.parametrize("how", ["cut", "cut and longer again", "replaced", "gone and back"])
def test_a_truncated_or_replaced_log_is_read_from_the_start(tmp_path: Path, how: str):
    run = run_of(tmp_path / "run", LINES)
    view, file = run_view(run), run / "metrics.jsonl"
    before = query(view)
    assert len(before["curves"]) == 2
    new = [epoch("cnn", number) for number in range(60 if how == "cut and longer again" else 1)]
    if how == "replaced":
        other = run / "other"
        other.write_bytes(text_of([epoch("cnn", 0) for _ in range(40)]))
        other.replace(file)
    elif how == "gone and back":
        file.unlink()
        assert query(view, generation=before["generation"], since=before["lines"])["state"] == "waiting"
        file.write_bytes(text_of(new))
    else:
        file.write_bytes(text_of(new))
    after = query(view, generation=before["generation"], since=before["lines"])
    assert after["begins"] and after["generation"] != before["generation"]
    assert [curve["model"] for curve in after["curves"]] == ["cnn"] and after["fits"] == []


def test_only_changes_are_sent(tmp_path: Path):
    run = run_of(tmp_path / "run", LINES)
    view = run_view(run)
    first = query(view)
    seen = {"generation": first["generation"], "since": first["lines"]}
    again = query(view, **seen)
    assert again["curves"] == [] and again["memory"] is None and not again["begins"]
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(text_of([epoch("gnn", 1, auroc=0.9)]))
    (curve,) = query(view, **seen)["curves"]
    assert (curve["model"], curve["columns"]["epoch"], curve["best"], curve["best_epoch"]) == ("gnn", [0, 1], 0.9, 1)


def test_a_model_is_shown_with_its_best_epoch_and_cost(tmp_path: Path):
    state = query(run_view(run_of(tmp_path / "run", LINES)))
    lstm = state["curves"][0]
    assert (lstm["best"], lstm["best_epoch"], lstm["measure"], lstm["num_epochs"]) == (0.8, 1, "val_auroc", 3)
    assert state["fits"] == [shown_fit("lstm")]
    assert state["missing"] == [{"model": "p_true", "why": "the store has no p_true"}]


def test_long_memory_logs_are_thinned_to_their_peaks(tmp_path: Path):
    lines = [memory(second, 5000 + second % 7) for second in range(20_000)]
    lines[12_345] = memory(12_345, 9_999)
    state = query(run_view(run_of(tmp_path / "run", lines)))
    found = state["memory"]
    assert MOST_POINTS <= len(found["bytes"]) <= 2 * MOST_POINTS and max(found["bytes"]) == 9_999
    assert found["time_s"] == sorted(found["time_s"]) and found["time_s"][-1] == 19_999
    assert state["lines"] == 20_000 and len(json.dumps(state)) < 30_000


def test_a_long_curve_is_thinned_and_keeps_its_best_epoch(tmp_path: Path):
    lines = [epoch("lstm", number, auroc=0.9 if number == 1234 else 0.5) for number in range(3000)]
    (curve,) = query(run_view(run_of(tmp_path / "run", lines)))["curves"]
    epochs = curve["columns"]["epoch"]
    assert len(epochs) <= MOST_POINTS + 1 and {0, 1234, 2999} <= set(epochs) and curve["num_epochs"] == 3000
    assert len(curve["columns"]["loss"]) == len(epochs)


def test_damaged_lines_are_counted_and_the_others_read(tmp_path: Path):
    run = run_of(tmp_path / "run", LINES)
    (run / "metrics.jsonl").write_bytes(text_of(LINES[:3]) + b"{no json\n[1]\n" + text_of(LINES[3:]))
    state = query(run_view(run))
    assert state["damaged"] == 2 and len(state["curves"]) == 2


def quiet_for(run: Path, seconds: float) -> None:
    os.utime(run / "metrics.jsonl", (time.time() - seconds,) * 2)


def test_a_run_with_a_growing_log_is_training_and_names_the_model(tmp_path: Path):
    run = run_of(tmp_path / "run", [*LINES, epoch("gnn", 1)])
    state = query(run_view(run))
    assert state["state"] == "training" and state["at_work"] == {"model": "gnn", "seed": 0, "epoch": 2}


def test_a_model_that_has_logged_nothing_is_known_by_its_folder(tmp_path: Path):
    run = run_of(tmp_path / "run", [memory(0, 1), fit("lstm")])
    (run / "checkpoints" / "gnn-0").mkdir(parents=True)
    assert query(run_view(run))["at_work"] == {"model": "gnn", "seed": 0, "epoch": None}


def test_a_run_with_unfinished_models_and_an_old_log_has_stopped(tmp_path: Path):
    run = run_of(tmp_path / "run", LINES, model="lstm,gnn,p_true", seeds=2)
    quiet_for(run, 200)
    state = query(run_view(run))
    assert state["state"] == "stopped" and state["at_work"] is None
    assert "3 min 20 s ago" in state["text"] and "Not finished: lstm (seed 1), gnn." in state["text"]
    assert state["text"].endswith(f"millstream train {run / 'config.yaml'} out={run}")


def test_a_run_with_all_models_fitted_is_finished(tmp_path: Path):
    done = [*LINES, fit("gnn"), fit("length", family="baseline")]
    run = run_of(tmp_path / "run", done, model="lstm,gnn,length,p_true")
    assert query(run_view(run))["state"] == "finished"
    quiet_for(run, 10_000)
    assert query(run_view(run))["state"] == "finished"


def test_a_run_with_an_empty_log_is_waiting(tmp_path: Path):
    run = run_of(tmp_path / "run", [])
    assert query(run_view(run))["state"] == "waiting"
    (run / "metrics.jsonl").unlink()
    assert query(run_view(run))["state"] == "waiting"


def test_settings_and_data_are_shown_as_text(tmp_path: Path):
    run = run_of(tmp_path / "run", LINES, lr="null")
    card = {"kind": "reads", "files": {"train": ["a.fa", "b.fa"]}, "classes": [{"name": "x"}] * 5000, "mates": 1}
    (run / "data.json").write_text(json.dumps(card))
    response = query(run_view(run), "settings")
    assert ["lr", "–"] in response["tables"]["Settings"] and response["epochs"] == 30
    data = [["kind", "reads"], ["files.train", "a.fa, b.fa"], ["classes", "5000 entries"], ["mates", "1"]]
    assert response["tables"]["Data"] == data


def test_a_report_that_cannot_be_made_gives_the_reason(tmp_path: Path):
    run = run_of(tmp_path / "run", LINES)
    view = run_view(run)
    assert query(view)["report"] == {
        "version": None, "is_older": False, "can_be_made": False, "is_being_made": False, "error": None
    }  # fmt: skip
    report = RunReport(run)
    report.make()
    report.wait()
    assert str(run) in str(report.summary()["error"]) and not report.summary()["is_being_made"]


def test_a_folder_that_is_not_a_run_is_rejected(tmp_path: Path):
    with pytest.raises(BadSource, match=re.escape(str(tmp_path))):
        run_view(tmp_path)
