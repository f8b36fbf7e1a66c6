"""The report on read classifiers as a file: what it shows, what it leaves out, and that text is escaped."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from millstream.reads.report import comparison_text, report_on
from millstream.reads.report.evaluate import read_results
from millstream.reads.report.figures import draw, split_ids
from millstream.reads.report.results import ReadResults
from millstream.report.drawing import Drawing
from millstream.training.log import Metrics
from support.html_page import Page
from support.making_read_run import EVIL, MODELS, make_read_run

SECTIONS = [
    "comparison",
    "findings",
    "ranks",
    "thresholds",
    "differences",
    "classes",
    "confusion",
    "figures",
    "cost",
    "data",
    "settings",
]
SECTIONS += ["environment", "not-run"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> ReadResults:
    run = make_read_run(tmp_path_factory.mktemp("reads"), seeds=2, empty=(5,), configured="cnn,kmer-linear,lstm")
    return read_results(run, resamples=100)


@pytest.fixture(scope="module")
def drawings(results: ReadResults) -> list[Drawing]:
    return draw(results)


@pytest.fixture(scope="module")
def html(results: ReadResults, drawings: list[Drawing], tmp_path_factory: pytest.TempPathFactory) -> str:
    """With one figure per section: writing them takes most of the time."""
    out = tmp_path_factory.mktemp("page") / "deep" / "report.html"
    few = [drawing for drawing in drawings if drawing.name in ("confusion-known", "coverage-known", "memory")]
    assert report_on(results).write_page(out, few) == out
    return out.read_text()


def page_of(results: ReadResults, out: Path) -> str:
    """Without figures, which take most of the time."""
    return report_on(results).write_page(out / "report.html", []).read_text()


def test_findings_come_before_the_sections_in_order(html: str, results: ReadResults):
    places = [html.index(f'<section id="{name}"') for name in SECTIONS]
    assert places == sorted(places)
    assert html.index(results.findings[0]) < places[0]
    assert "Classifiers compared on <bdi>train.fa</bdi>" in html
    for text in ("known: 600 reads (20 of no known class), 6 classes", "Genus2 species5", "heldout.fa", "lstm"):
        assert text in html
    assert "500.0 MB" in html and "1.0 GB" in html


def test_every_split_has_its_table_its_classes_and_its_figures(html: str, drawings: list[Drawing]):
    assert html.count('<table class="sortable comparison">') == html.count('<table class="sortable by-class">') == 3
    assert html.count("<figure") == 3 and all(drawing.figure for drawing in drawings)
    titles = [drawing.title for drawing in drawings]
    for split in ("known", "heldout", "val"):
        kinds = (
            f"cnn on {split}",
            f"Precision and coverage on {split}",
            f"Threshold on {split}",
            f"Calibration on {split}",
        )
        assert set(kinds) <= set(titles)
    others = [
        "Macro F1 by split",
        "Training loss",
        "Validation macro F1",
        "Training throughput",
        "Speed and macro F1",
    ]
    assert titles[0] == "Macro F1" and titles[13:] == [*others, "Memory"]


def test_ids_are_unique_and_the_page_is_small(html: str):
    page = Page(html)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in page.values("href")} | set(page.values("aria-labelledby")) <= set(ids)
    assert len(html.encode()) < 1_000_000


def test_names_of_classes_models_and_splits_are_escaped(html: str, results: ReadResults, tmp_path: Path):
    assert EVIL not in html and "&lt;b&gt;x&lt;/b&gt;" in html
    best = replace(results.models[0], name=EVIL, title=EVIL)
    evil = replace(
        best, splits={name + EVIL: found for name, found in best.splits.items()} | {"val": best.splits["val"]}
    )
    splits = [*(name + EVIL for name in ("known", "heldout")), "val"]
    config, missing = {EVIL: EVIL}, {EVIL: EVIL}
    wild = replace(results, models=[evil], splits=splits, config=config, missing=missing, findings=[EVIL])
    text = page_of(wild, tmp_path)
    assert EVIL not in text and Page(text).tags["b"] == 0


def test_split_names_become_valid_unique_ids():
    assert split_ids(["a b", "a/b", "é<", "val"]) == {"a b": "a_b", "a/b": "a_b_", "é<": "_", "val": "val"}


def test_one_model_without_ranks_and_test_splits_leaves_sections_out(tmp_path: Path):
    run = make_read_run(tmp_path, models={"cnn": MODELS["cnn"]}, ranks=(), parts=("val",), unknown=0)
    text = page_of(read_results(run, resamples=20), tmp_path)
    assert text.count('class="missing"') == 3  # ranks, differences, and what was not run
    assert "genus F1" not in text


def test_a_page_without_models_says_so(results: ReadResults, tmp_path: Path):
    none = replace(results, models=[], differences=[], gaps=[], metrics=Metrics(), ranks={}, findings=["None."])
    text = report_on(none).write_page(tmp_path / "report.html").read_text()
    assert [name for name in SECTIONS if f'<section id="{name}"' not in text] == []
    assert text.count("no classifier was evaluated") == 13 and "<figure" not in text
    assert len(comparison_text(none).splitlines()) == 2


def test_many_classes_are_shown_as_confused_pairs_instead_of_a_matrix(tmp_path: Path):
    found = read_results(make_read_run(tmp_path, num_classes=42, num_reads=2000), resamples=20)
    matrix = draw(replace(found, splits=["val"], metrics=Metrics()))[1]
    assert matrix.figure is None and "42 classes" in matrix.missing
    text = page_of(found, tmp_path)
    assert "Most confused pairs of heldout" in text


def test_a_figure_without_data_is_not_drawn(results: ReadResults):
    few = replace(results, splits=["val"], metrics=Metrics())
    names = ["overview", "confusion-val", "coverage-val", "threshold-val", "calibration-val", "parts", "speed"]
    assert [drawing.name for drawing in draw(few) if drawing.figure] == names


def test_tables_contain_all_models_splits_ranks_thresholds_and_classes(results: ReadResults):
    files = report_on(results).tables()
    rows = list(csv.DictReader(files["comparison.csv"].splitlines()))
    assert [(row["part"], row["model"]) for row in rows[:3]] == [
        ("known", "cnn"),
        ("known", "kmer-linear"),
        ("heldout", "cnn"),
    ]
    found = results.models[0].splits["known"]
    assert float(rows[0]["macro_f1_low"]) == found.macro_f1.low and rows[0]["num_unknown"] == "20"
    classes = list(csv.DictReader(files["classes.csv"].splitlines()))
    assert len(classes) == 2 * 3 * 6 and classes[5]["training_reads"] == "0" and classes[1]["name"] == EVIL
    assert {row["rank"] for row in csv.DictReader(files["ranks.csv"].splitlines())} == {"species", "genus"}
    thresholds = list(csv.DictReader(files["thresholds.csv"].splitlines()))
    assert [row["val_precision"] for row in thresholds[:4]] == ["0.9", "0.95", "0.99", "0.999"]


def test_the_comparison_for_a_terminal_has_a_line_per_split_and_model(results: ReadResults):
    lines = comparison_text(results).splitlines()
    assert len(lines) == 8 and lines[1].split()[:2] == ["known", "cnn"] and lines[6].split()[0] == "val"
    assert max(map(len, lines[:-1])) <= 110
    assert lines[-1].count("600 (20 of no known class)") == 2 and "val 600." in lines[-1]


def test_the_summary_is_json_without_curves(results: ReadResults):
    found = json.loads(json.dumps(report_on(results).summary, default=str))
    assert found["best"] == "cnn" and found["kind"] == "reads" and list(found["missing"]) == ["lstm"]
    known = found["models"][0]["parts"]["known"]
    assert known["macro_f1"]["value"] == results.models[0].splits["known"].macro_f1.value
    assert known["ranks"][1]["rank"] == "genus" and "called" not in known and "confusion" not in known


def test_the_command_chooses_the_report_by_the_data_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from millstream.cli.app import make_app

    monkeypatch.setattr("millstream.reads.report.draw", lambda _: [])  # they take seconds
    run = make_read_run(tmp_path, num_reads=100)
    done = CliRunner().invoke(make_app(), ["report", str(run), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["best"] == "cnn"
    assert f"2 classifiers compared. Open {run / 'report.html'}" in done.stderr
    assert "Classifiers compared on" in (run / "report.html").read_text() and (run / "tables/classes.csv").exists()
