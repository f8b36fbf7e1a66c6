"""The training commands of the old guides run on small old files, and their metrics are correct."""

import json
import os
import pickle
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("lightning_fabric")

import millstream as ms
from millstream.classic.baseline import METRICS, main
from support.old_files import attention, graphs, old_torch_geometric, states, write_traces

pytestmark = pytest.mark.usefixtures("unrendered_figures", "roughly_measured_memory", "quick_fits")

TRACES = 60
TITLES = ["LSTM-solo", "GNN-det+LSTM", "GVAE+LSTM"]


# -- files as the old scripts wrote them


def write_preprocessed(folder: Path, *, gnn_traces: int = TRACES) -> Path:
    """lstm_solo/ and gnn/, in files split at different places."""
    for kind, total, cut in (("lstm_solo", TRACES, 25), ("gnn", gnn_traces, 40)):
        (folder / kind).mkdir(parents=True)
        for numbers in (range(cut), range(cut, total)):
            rest = {
                "labels": torch.tensor([float(number % 2) for number in numbers]),
                "question_ids": [f"tc_{number}" for number in numbers],
            }
            if kind == "gnn":
                content: dict[str, Any] = {"graphs": [graphs(number) for number in numbers], **rest}
            else:
                last = np.stack([states(number)[:, -1] for number in numbers])
                content = {"sequences": torch.from_numpy(last), **rest}
            with old_torch_geometric():
                torch.save(content, folder / kind / f"preprocessed_{numbers[0]:04d}.pt")
    return folder


def write_scores(file: Path, scores: dict[int, float]) -> None:
    rows = [f"tc_{number},{score}" for number, score in scores.items()]
    file.write_text("\n".join(["question_id,bleurt_score", *rows]) + "\n")


# -- running


@pytest.fixture(scope="module")
def old_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preprocessed(tmp_path_factory.mktemp("old") / "preprocessed_data")


@pytest.fixture
def here(tmp_path: Path, old_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with `preprocessed_data`, without the package that draws reports: drawing takes seconds."""
    monkeypatch.chdir(tmp_path)
    os.symlink(old_folder, "preprocessed_data")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    for module in ("millstream.traces.report", "millstream.report.page"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def run(command: str) -> None:
    """A command of a guide, with fewer epochs."""
    words = shlex.split(command.replace("python src/baseline.py", "python -m millstream.classic.baseline"))
    assert words[:3] == ["python", "-m", "millstream.classic.baseline"]
    main([*words[3:], "--epochs", "1"])


def metrics(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, METRICS).read_text())


def predictions(run: str, model: str, part: str) -> dict[str, tuple[int, float]]:
    """Label and score of each question."""
    rows = pq.read_table(Path(run) / "predictions.parquet").to_pylist()
    return {
        row["question_id"]: (row["label"], row["score"]) for row in rows if (row["model"], row["part"]) == (model, part)
    }


def written(run: str) -> dict[str, int]:
    """When the files of the finished models were written."""
    files = Path(run).glob("checkpoints/*/*")
    return {str(file): file.stat().st_mtime_ns for file in files}


def assert_numbers_are_those_of_the_predictions(folder: str, title: str, run: str, model: str) -> None:
    """Computed again, one answer at a time."""
    found = metrics(folder)["models"][title]
    val, test = ([*predictions(run, model, part).values()] for part in ("val", "test"))

    def rates(threshold: float, pairs: list[tuple[int, float]]) -> tuple[int, int, int, int]:
        called = [(label, score >= threshold) for label, score in pairs]
        return tuple(called.count(case) for case in ((1, True), (0, True), (1, False), (0, False)))  # type: ignore

    def youden(threshold: float) -> float:
        hits, alarms, missed, passed = rates(threshold, val)
        return hits / (hits + missed) - alarms / (alarms + passed)

    assert found["threshold"] in [score for _, score in val]
    assert youden(found["threshold"]) == pytest.approx(max(youden(score) for _, score in val))
    hits, alarms, missed, passed = rates(found["threshold"], test)
    wrong, right = ([score for label, score in test if label == kind] for kind in (1, 0))
    above = sum((w > r) + (w == r) / 2 for w in wrong for r in right)
    assert found["auroc"] == pytest.approx(above / len(wrong) / len(right))
    assert found["accuracy"] == pytest.approx((hits + passed) / len(test))
    assert found["precision"] == pytest.approx(hits / max(hits + alarms, 1))
    assert found["recall"] == pytest.approx(hits / (hits + missed))
    assert found["f1"] == pytest.approx(2 * hits / max(2 * hits + alarms + missed, 1))
    assert (found["test_records"], found["test_wrong"]) == (len(test), len(wrong))


# -- the commands of the guides


def test_001_all_models_share_one_split_and_the_cache_size_changes_nothing(here, capsys):
    run("python src/baseline.py --preprocessed-dir preprocessed_data --epochs 50 --batch-size 16")
    printed = capsys.readouterr()
    assert list(metrics("results")["models"]) == TITLES
    assert all(title in printed.out for title in TITLES)
    parts = {name: predictions("results/lstm_solo", "lstm", name) for name in ("val", "test")}
    for model, title, where in zip(("lstm", "gnn", "gvae"), TITLES, ("lstm_solo", "gnn", "gnn"), strict=True):
        assert_numbers_are_those_of_the_predictions("results", title, f"results/{where}", model)
        assert Path(f"results/{where}/checkpoints/{model}-0/best.safetensors").exists()
        for name, seen in parts.items():
            assert predictions(f"results/{where}", model, name).keys() == seen.keys()
    assert f"the same {len(parts['test'])} test questions" in printed.err
    before = written("results/lstm_solo") | written("results/gnn")
    for cache in (1, 4):  # finished models are kept
        run(f"python src/baseline.py --preprocessed-dir preprocessed_data --max-cache-batches {cache} --epochs 50")
        assert f"below {2 * cache}.0 GB" in capsys.readouterr().err
    assert written("results/lstm_solo") | written("results/gnn") == before
    assert not any(path.name.endswith("-1") for path in Path("results").iterdir())


def test_001_models_trained_one_by_one_each_in_its_own_folder(here):
    flags = "python src/baseline.py --preprocessed-dir preprocessed_data --max-cache-batches 2"
    run(f"{flags} --run-lstm --no-run-gnn-det --no-run-gvae --epochs 50 --output-dir results_lstm")
    run(f"{flags} --no-run-lstm --run-gnn-det --no-run-gvae --epochs 50 --output-dir results_gnn_det")
    run(f"{flags} --no-run-lstm --no-run-gnn-det --run-gvae --epochs 50 --output-dir results_gvae")
    folders = ["results_lstm", "results_gnn_det", "results_gvae"]
    assert [list(metrics(folder)["models"]) for folder in folders] == [[title] for title in TITLES]
    tests = [
        predictions("results_lstm/lstm_solo", "lstm", "test"),
        predictions("results_gnn_det/gnn", "gnn", "test"),
        predictions("results_gvae/gnn", "gvae", "test"),
    ]
    assert tests[0].keys() == tests[1].keys() == tests[2].keys()


def test_002_a_new_batch_size_starts_a_new_run_and_keeps_the_earlier_one(here, capsys):
    flags = "python src/baseline.py --preprocessed-dir preprocessed_data/lstm_solo"
    run(f"{flags} --epochs 1 --batch-size 16")
    assert "nothing for gnn, gvae" in capsys.readouterr().err
    run(f"{flags} --epochs 1 --batch-size 32")
    assert "is now results/lstm_solo-1" in capsys.readouterr().err
    assert list(metrics("results")["models"]) == ["LSTM-solo"]
    assert "batch_size: 32" in Path("results/lstm_solo/config.yaml").read_text()
    assert "batch_size: 16" in Path("results/lstm_solo-1/config.yaml").read_text()
    run("python src/baseline.py --preprocessed-dir preprocessed_data --no-run-lstm --run-gnn-det --no-run-gvae")
    assert list(metrics("results")["models"]) == TITLES[:2]  # of both commands


LEGACY = "python src/baseline.py --data-pattern 'traces_data/*.pkl*' --scores-file ground_truth_scores.csv --epochs 50"


def test_001_old_traces_with_a_table_of_scores(here, capsys):
    write_traces(Path("traces_data"), stepwise=False)
    scores = {number: 0.2 if number % 2 else 0.7 for number in range(TRACES) if number not in (4, 7)}
    write_scores(Path("ground_truth_scores.csv"), scores)
    run(LEGACY)
    assert "60 traces, 29 right and 29 wrong" in capsys.readouterr().err
    found = metrics("results")
    assert found["data"]["all_models"]["verdicts"]["unlabelled"] == 2
    assert (found["data"]["all_models"]["records"], found["data"]["all_models"]["used"]) == (60, 58)
    seen = {}
    for model, title in zip(("lstm", "gnn", "gvae"), TITLES, strict=True):
        assert_numbers_are_those_of_the_predictions("results", title, "results/all_models", model)
        seen[model] = predictions("results/all_models", model, "test")
    assert seen["lstm"].keys() == seen["gnn"].keys() == seen["gvae"].keys()
    assert all(label == int(name[3:]) % 2 for name, (label, _) in seen["lstm"].items())
    # Another threshold gives other labels, so the models are trained again; the traces are already converted.
    converted = {file.name: file.stat().st_mtime_ns for file in Path("results/traces").glob("shard-*.arrow")}
    scores |= {0: 0.65, 2: 0.65}
    write_scores(Path("ground_truth_scores.csv"), scores)
    run(f"{LEGACY} --score-threshold 0.66 --no-run-gvae --no-run-gnn-det")
    printed = capsys.readouterr().err
    assert "27 right and 31 wrong" in printed and "is now results/all_models-1" in printed
    assert {file.name: file.stat().st_mtime_ns for file in Path("results/traces").glob("shard-*.arrow")} == converted
    Path("traces_data/trivia_qa_traces_batch_0002.pkl").write_bytes(pickle.dumps([]))
    with pytest.raises(SystemExit, match="1"):
        run(LEGACY)
    assert "baseline: results/traces: " in capsys.readouterr().err


def test_old_traces_stored_step_by_step_are_trained_on(here):
    write_traces(Path("stepwise"), stepwise=True)
    write_scores(Path("ground_truth_scores.csv"), {number: number % 2 for number in range(TRACES)})
    run(f"{LEGACY.replace('traces_data', 'stepwise')} --no-run-gvae --no-run-lstm")
    assert list(metrics("results")["models"]) == TITLES[1:2]


def test_the_split_is_the_same_when_some_questions_have_no_graphs(tmp_path, here, capsys):
    write_preprocessed(tmp_path / "fewer", gnn_traces=50)
    run("python src/baseline.py --preprocessed-dir fewer --no-run-gvae --lr 0.002 --attn-threshold 0.1")
    lstm, gnn = predictions("results/lstm_solo", "lstm", "test"), predictions("results/gnn", "gnn", "test")
    assert gnn.keys() == {name for name in lstm if int(name[3:]) < 50} != lstm.keys()
    assert f"have the same {len(gnn)} test questions" in capsys.readouterr().err


def test_a_trace_store_is_used_without_conversion(here):
    with ms.TraceWriter("store") as writer:
        for number in range(TRACES):
            label = None if number == 5 else number % 2
            hidden, weights = states(number), attention(number)
            writer.append({"question_id": f"tc_{number}", "hidden": hidden, "attention": weights, "label": label})
    run("python src/baseline.py --preprocessed-dir store --no-run-gvae --no-run-lstm --kl-weight 0.2")
    assert list(metrics("results")["models"]) == ["GNN-det+LSTM"]
    assert metrics("results")["data"]["all_models"]["used"] == TRACES - 1


def test_sequences_without_a_label_are_counted_and_skipped(here, capsys):
    content = torch.load("preprocessed_data/lstm_solo/preprocessed_0000.pt")
    content["labels"][3] = float("nan")
    Path("unsure").mkdir()
    torch.save(content, "unsure/preprocessed_0000.pt")
    os.symlink(Path("preprocessed_data/lstm_solo/preprocessed_0025.pt").resolve(), "unsure/preprocessed_0025.pt")
    run("python src/baseline.py --preprocessed-dir unsure")
    assert "59 of 60 records" in capsys.readouterr().err
    assert metrics("results")["data"]["lstm_solo"]["used"] == 59


def test_the_run_folder_has_a_report(tmp_path, old_folder, monkeypatch):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    run(f"python src/baseline.py --preprocessed-dir {old_folder} --no-run-gnn-det --no-run-gvae")
    assert "LSTM over the layers" in Path("results/lstm_solo/report.html").read_text()


# -- wrong use


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files and folders that commands cannot use."""
    folder = tmp_path_factory.mktemp("mistaken")
    for name in ("empty", "traces_data", "text"):
        (folder / name).mkdir()
    (folder / "scores.csv").write_text("question_id,bleurt_score\n")
    (folder / "nothing.csv").touch()
    (folder / "text" / "notes.pkl").write_text("to do")
    trace = {"question_id": "tc_0", "hidden_states": list(states(0)), "attentions": list(attention(0))}
    (folder / "traces_data" / "batch_0000.pkl").write_bytes(pickle.dumps([trace]))
    for name, count in (("few", 3), ("store", TRACES)):
        with ms.TraceWriter(folder / name) as writer:
            for number in range(count):
                layers = states(number)[:, -1]
                writer.append({"question_id": f"tc_{number}", "layers": layers, "label": number % 2})
    return folder


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ("", 2, "--preprocessed-dir"),
        ("--preprocessed-dir a --data-pattern b", 2, "--data-pattern"),
        ("--data-pattern b", 2, "--scores-file"),
        ("--preprocessed-dir a --scores-file b", 2, "--scores-file"),
        ("--preprocessed-dir a --no-run-lstm --no-run-gnn-det --no-run-gvae", 2, "--no-run-lstm"),
        ("--preprocessed-dir a --max-cache-batches 0", 2, "--max-cache-batches 0: "),
        ("--preprocessed-dir a --output-dir scores.csv", 2, "--output-dir scores.csv: "),
        ("--preprocessed-dir a --epochs 0", 2, "epochs=0: "),
        ("--preprocessed-dir nowhere", 1, "nowhere: "),
        ("--preprocessed-dir empty", 1, "empty: "),
        ("--preprocessed-dir preprocessed_data/gnn --run-lstm", 1, "preprocessed_data/gnn/preprocessed_0000.pt: "),
        ("--data-pattern 'no/*.pkl' --scores-file scores.csv", 1, "no/*.pkl: "),
        ("--data-pattern 'traces_data/*' --scores-file nowhere.csv", 1, "nowhere.csv: "),
        ("--data-pattern 'traces_data/*' --scores-file nothing.csv", 1, "nothing.csv: "),
        ("--data-pattern 'traces_data/*' --scores-file scores.csv", 1, "scores.csv: "),
        ("--data-pattern 'text/*' --scores-file scores.csv", 1, "text/notes.pkl: "),
        ("--preprocessed-dir few", 1, "a detector needs 0 (right) and 1 (wrong)"),
        ("--preprocessed-dir store --run-gvae", 1, "store: nothing for GVAE+LSTM"),
    ],
)
def test_a_usage_error_is_one_line(here, mistaken, capsys, flags, code, message):
    for path in mistaken.iterdir():
        os.symlink(path, path.name)
    with pytest.raises(SystemExit) as ended:
        main([*shlex.split(flags), "--epochs", "1"] if "--epochs" not in flags else shlex.split(flags))
    printed = capsys.readouterr().err
    assert ended.value.code == code
    assert printed.splitlines()[-1].startswith("baseline: ") and message in printed.splitlines()[-1]
    assert "Traceback" not in printed
