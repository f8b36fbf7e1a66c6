"""Transfer: the detectors of runs on their own test splits and on other stores, without questions they have seen."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
pytest.importorskip("lightning_fabric")

import millstream as ms
from millstream.core.tables import publish_table
from millstream.errors import BadSetting, BadSource
from millstream.report.drawing import axes_of
from millstream.report.measures import Interval, auroc
from millstream.traces.report import report, report_on
from millstream.traces.report.evaluate import read_results
from millstream.traces.report.results import read_run
from millstream.traces.report.transfer import (
    Matrix,
    Row,
    Scored,
    Store,
    draw_transfer,
    joined,
    matrix_text,
    transfer_of,
)
from support.commands import run_here
from support.made_results import made_results
from support.making_traces import make_traces

MODELS = "length,mean_logprob,probe_last_answer"
pytestmark = pytest.mark.usefixtures("unrendered_figures", "roughly_measured_memory", "quick_fits")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, roughly_measured_memory: None, quick_fits: None) -> Path:
    """Stores a, b and one that is also named b; a cross-validated run on a and another run on b."""
    folder = tmp_path_factory.mktemp("transfer")
    make_traces(folder / "a", num=90)
    make_traces(folder / "b", num=100, seed=3)
    (folder / "more").mkdir()
    make_traces(folder / "more" / "b", num=40, seed=5)
    ms.train(folder / "a", model=MODELS, folds=3, out=str(folder / "runs" / "a"))
    ms.train(folder / "b", model=MODELS, out=str(folder / "runs" / "b"))
    return folder


@pytest.fixture(scope="module")
def matrix(world: Path) -> Matrix:
    ms.evaluate(world / "runs" / "a", [world / "a", world / "b", world / "more" / "b"])
    return transfer_of(read_results(world / "runs" / "a", resamples=30), resamples=30)


def test_every_store_has_a_folder_of_its_own_and_that_of_the_run_is_not_scored_again(world: Path, matrix: Matrix):
    run = world / "runs" / "a"
    stores: list[str | Path] = [world / "more" / "b", world / "a", world / "b"]
    folders = ms.evaluate(run, stores, model="length")  # as before, in another order
    assert folders == [run / "evaluated" / "b-2", run, run / "evaluated" / "b"]
    cards = [json.loads((folder / "data.json").read_text()) for folder in folders]
    assert [card["store"] for card in cards] == [str(store) for store in stores]
    ms.evaluate(run, stores)  # all detectors, for the other tests
    named_as_own = make_traces(world / "test", num=40, seed=6)
    assert ms.evaluate(run, named_as_own, model="length") == run / "evaluated" / "test-2"
    with pytest.raises(BadSetting, match="2 stores"):
        ms.evaluate(run, stores[:2], out=str(world / "out"))


def test_the_matrix_has_the_scores_of_the_run_and_then_those_of_every_store(world: Path, matrix: Matrix):
    run = world / "runs" / "a"
    own, *others = matrix.stores
    assert list(matrix.names.values()) == ["a", f"{world.name}/b", "more/b"] and matrix.folds == 3
    results = {model.name: model for model in read_results(run, resamples=30).models}
    for row in matrix.rows:
        assert row.cells[own].auroc == results[row.detector].auroc and row.cells[own].is_own
        for store, folder, num in zip(others, ("b", "b-2"), (100, 40), strict=True):
            cell, scored = row.cells[store], read_run(run / "evaluated" / folder)
            (trial,) = scored.trials[row.detector]
            assert cell.auroc.value == pytest.approx(auroc(scored.test.labels, trial.test))
            assert cell.num_wrong == scored.test.labels.sum() and cell.num_right + cell.num_wrong == num
            assert cell.auroc.low < cell.auroc.value < cell.auroc.high and not cell.is_own


def test_the_report_has_the_matrix_as_a_table_and_a_heat_map(world: Path, matrix: Matrix, tmp_path: Path):
    found = report_on(read_results(world / "runs" / "a", resamples=30), matrix)
    drawings = [drawing for drawing in found.draw() if drawing.name == "transfer"]
    text = found.write_page(tmp_path / "report.html", drawings).read_text()
    section = text[text.index('<section id="transfer"') :].partition("</section>")[0]
    assert section.count("<figure") == 1 and "out-of-fold scores" in section and "more/b" in section
    for row in matrix.rows:
        assert f"trained on a: {row.detector}" in section
        for cell in row.cells.values():
            assert f"{cell.num_right} right, {cell.num_wrong} wrong" in section and f"{cell.auroc.low:.3f}" in section
    table = list(csv.DictReader(found.tables()["transfer.csv"].splitlines()))
    assert [row["detector"] for row in table] == [f"trained on a: {row.detector}" for row in matrix.rows]
    assert float(table[0]["more/b_high"]) == matrix.rows[0].cells[matrix.stores[2]].auroc.high
    assert found.summary["transfer"] == matrix.json
    alone = report_on(made_results())
    assert "no other store was evaluated" in alone.write_page(tmp_path / "alone.html", []).read_text()
    assert "transfer.csv" not in alone.tables()


def test_a_higher_auroc_is_a_deeper_colour_and_the_number_is_in_the_cell(matrix: Matrix):
    (drawing,) = draw_transfer(matrix)
    axes = axes_of(drawing)
    depths = axes.collections[0].get_facecolors()
    areas = [row.cells[store].auroc.value for row in matrix.rows for store in matrix.stores]
    assert [text.get_text() for text in axes.texts] == [f"{area:.3f}" for area in areas]
    assert len({tuple(colour[:3]) for colour in depths}) == 1  # so that in grey, too, only the depth differs
    above = [(area, colour[3]) for area, colour in zip(areas, depths, strict=True) if area > 0.5]
    assert [depth for _, depth in sorted(above)] == sorted(depth for _, depth in above)
    assert len(axes.collections[1].get_paths()) == len(matrix.rows)  # the frames


def test_several_runs_are_one_matrix_of_their_best_detectors_or_of_those_named(world: Path, matrix: Matrix):
    runs, stores = [world / "runs" / name for name in ("a", "b")], [world / name for name in ("a", "b", "more/b")]
    code, out, err = run_here("evaluate", runs[0], stores[0], runs[1], *stores[1:], "--json")
    assert code == 0, err
    found: Any = json.loads(out)
    assert [column["store"] for column in found["columns"]] == [str(store) for store in stores]
    best = [max(read_results(run, resamples=5).models, key=lambda one: one.auroc_val).name for run in runs]
    assert [(row["run"], row["detector"]) for row in found["rows"]] == list(zip(map(str, runs), best, strict=True))
    own = [[cell["is_own"] for cell in row["cells"]] for row in found["rows"]]
    assert own == [[True, False, False], [False, True, False]]
    assert all((run / "report.html").exists() for run in (*runs, *runs[0].glob("evaluated/b*")))

    matrices = {run: transfer_of(read_results(run, resamples=5), resamples=5) for run in runs}
    some = joined({run: matrix.only(["b-2"]) for run, matrix in matrices.items()}, models="length,mean_logprob")
    assert [(row.run, row.detector) for row in some.rows] == [
        (run, row.detector) for run in runs for row in matrices[run].rows if row.detector in ("length", "mean_logprob")
    ]
    assert [store.path for store in some.stores] == [str(stores[0]), str(stores[2]), str(stores[1])]
    code, _, err = run_here("evaluate", *runs)
    assert code == 2 and "stores" in err
    code, _, err = run_here("evaluate", *runs, stores[2], "out=x")
    assert code == 2 and "out=x" in err


def test_one_run_on_one_store_shows_its_comparison_and_renews_the_report_of_the_run(world: Path, matrix: Matrix):
    run = world / "runs" / "a"
    (run / "tables" / "transfer.csv").unlink(missing_ok=True)
    code, out, err = run_here("evaluate", run, world / "b")
    assert code == 0 and "100 scored, each by the models of all 3 folds" in out, err
    assert (run / "tables" / "transfer.csv").exists()


def test_questions_that_a_run_was_fitted_to_are_counted(world: Path, tmp_path: Path):
    run = tmp_path / "run"
    ms.train(world / "b", model="length", out=str(run))
    shared = make_traces(tmp_path / "shared", num=100, seed=3)
    relabelled(shared, flip=10)  # the same questions with other labels: not the data of the run
    for include_seen, sentence in ((False, "records are left out"), (True, "NOT results on new questions")):
        (folder,) = ms.evaluate(run, [shared], include_seen=include_seen)
        assert folder.name == "shared"
        found = transfer_of(read_results(run, resamples=10), resamples=10)
        cell = found.rows[0].cells[found.stores[1]]
        assert bool(cell.num_seen) == include_seen and bool(cell.num_left_out) != include_seen
        assert sentence in matrix_text(found)


def test_answers_of_one_kind_have_a_reason_instead_of_numbers(world: Path, tmp_path: Path):
    run = tmp_path / "run"
    ms.train(world / "b", model="length", out=str(run))
    wrong = make_traces(tmp_path / "wrong", num=30, seed=9)
    ids = [f"q{number}" for number in range(30)]
    publish_table(wrong / "labels.parquet", pa.table({"question_id": ids, "verdict": ["wrong"] * 30}))
    ms.evaluate(run, [wrong, world / "a"])
    found = report(run)
    assert "wrong: left out." in found.text and "only wrong answers" in found.text and "\na: " in found.text


def test_a_store_of_another_language_model_is_refused_before_any_is_scored(world: Path, tmp_path: Path):
    other = tmp_path / "other"
    traces = ms.open(world / "more" / "b")
    with ms.TraceWriter(other, schema=traces.fields, config={"model": "another"}) as writer:
        for record in traces:
            writer.append(dict(record))
    publish_table(other / "labels.parquet", pq.read_table(world / "more" / "b" / "labels.parquet"))
    run = tmp_path / "run"
    ms.train(world / "b", model="length", out=str(run))
    with pytest.raises(BadSource, match="another"):
        ms.evaluate(run, [world / "a", other])
    assert not (run / "evaluated").exists()


def test_stores_are_named_by_as_much_of_their_path_as_tells_them_apart():
    cell = Scored(Interval(0.7, 0.6, 0.8), 10, 20, 0, 0, is_own=False)
    stores = [Store("/x/a", "1"), Store("/y/a", "1"), Store("/y/a", "2"), Store("/z/c", "1")]
    row = Row(Path("run"), stores[0], "length", "baseline", 0.7, dict.fromkeys(stores, cell))
    found = Matrix(stores, [row, replace(row, cells={stores[3]: replace(cell, num_right=1200)})])
    assert list(found.names.values()) == ["x/a", "y/a", "y/a (2)", "c"]
    lines = matrix_text(found).splitlines()
    assert "c: 10 to 1,200 right, 20 wrong" in lines and "x/a: 10 right, 20 wrong" in lines
    assert all(len(line) <= 120 for line in lines) and "[0.600, 0.800]" in lines[2]
    narrow = matrix_text(found, width=60)
    assert "[0.600" not in narrow and "transfer.csv" in narrow


def relabelled(store: Path, *, flip: int) -> None:
    table = pq.read_table(store / "labels.parquet")
    labels = np.array(table["label"].to_pylist())
    labels[:flip] = 1 - labels[:flip]
    verdicts = np.where(labels == 1, "wrong", "right")
    publish_table(
        store / "labels.parquet",
        pa.table({"question_id": table["question_id"], "verdict": verdicts.tolist(), "label": labels}),
    )
