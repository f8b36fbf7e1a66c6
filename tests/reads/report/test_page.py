"""The report on classifiers of reads as a file: what it shows, what it leaves out, and that data stay data."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from millstream.report.reads.evaluate import read_results
from millstream.report.reads.figures import draw, part_names, write_figures
from millstream.report.reads.page import write_report
from millstream.report.reads.results import ReadResults
from millstream.report.reads.tables import comparison_text, summary, write_tables
from report.making_read_run import EVIL, MODELS, make_read_run
from report.test_page import Page

SECTIONS = [
    "comparison",
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
    run = make_read_run(tmp_path_factory.mktemp("reads"), seeds=2, empty=(5,), asked="cnn,kmer-linear,lstm")
    return read_results(run, resamples=100)


@pytest.fixture(scope="module")
def html(results: ReadResults, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page") / "deep" / "report.html"
    assert write_report(results, out) == out
    return out.read_text()


def page_of(results: ReadResults, out: Path) -> str:
    """Without figures, which take most of the time."""
    return write_report(results, out / "report.html", drawings=[]).read_text()


def test_the_sections_come_in_their_order_and_the_findings_first(html: str, results: ReadResults):
    places = [html.index(f'<section id="{name}"') for name in SECTIONS]
    assert places == sorted(places)
    assert html.index(results.findings[0]) < places[0]
    assert "Classifiers compared on <bdi>train.fa</bdi>" in html
    for text in ("known: 600 reads of 6 classes, 20 of them of no known class", "Genus2 species5", "heldout.fa"):
        assert text in html
    assert "500.0 MB at most, of 1.0 GB" in html and "not finished; the same command goes on with it" in html


def test_every_part_has_its_table_its_classes_and_its_figures(html: str):
    assert html.count('<table class="sortable comparison">') == html.count('<table class="sortable by-class">') == 3
    titles = re.findall(r'<h3 id="[\w-]+-title">(.*?)</h3>', html)
    for part in ("known", "heldout", "val"):
        kinds = (
            f"cnn on {part}",
            f"Precision and coverage on {part}",
            f"Threshold on {part}",
            f"Calibration on {part}",
        )
        assert set(kinds) <= set(titles)
    others = [
        "Macro F1 by part",
        "Training loss",
        "Validation macro F1",
        "Throughput of training",
        "Speed and macro F1",
    ]
    assert titles[12:] == [*others, "Memory"]


def test_nothing_is_loaded_from_anywhere_and_every_id_is_there_once(html: str):
    page = Page(html)
    assert "http://" not in html and "https://" not in html and "@import" not in html
    assert page.tags["link"] == page.tags["iframe"] == 0 and not page.values("src")
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in page.values("href")} | set(page.values("aria-labelledby")) <= set(ids)
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:" in page.values(
        "content"
    )
    assert len(html.encode()) < 1_000_000


def test_figures_take_the_colours_of_the_page(html: str):
    for figure in re.findall(r"<figure.*?</figure>", html, re.DOTALL):
        assert "var(--ink)" in figure and not re.search(r"#[0-9a-f]{6}\b", figure)


def test_names_of_classes_models_and_parts_stay_texts(html: str, results: ReadResults, tmp_path: Path):
    assert EVIL not in html and "&lt;b&gt;x&lt;/b&gt;" in html
    best = replace(results.models[0], name=EVIL, title=EVIL)
    evil = replace(best, parts={part + EVIL: found for part, found in best.parts.items()} | {"val": best.parts["val"]})
    parts = [*(part + EVIL for part in ("known", "heldout")), "val"]
    config, missing = {EVIL: EVIL}, {EVIL: EVIL}
    wild = replace(results, models=[evil], parts=parts, config=config, missing=missing, findings=[EVIL])
    text = page_of(wild, tmp_path)
    assert EVIL not in text and Page(text).tags["b"] == 2  # of the template


def test_parts_get_names_that_files_and_ids_can_have():
    assert part_names(["a b", "a/b", "é<", "val"]) == {"a b": "a_b", "a/b": "a_b_", "é<": "_", "val": "val"}


def test_one_model_without_ranks_and_test_parts_says_what_is_left_out(tmp_path: Path):
    run = make_read_run(tmp_path, models={"cnn": MODELS["cnn"]}, ranks=(), parts=("val",), unknown=0)
    text = page_of(read_results(run, resamples=20), tmp_path)
    assert "the mapping names no ranks" in text and "no two classifiers to compare" in text
    assert "genus F1" not in text and "None: every classifier that was asked for has run." in text


def test_without_any_model_the_page_says_so(results: ReadResults, tmp_path: Path):
    none = replace(results, models=[], differences=[], gaps=[], history=[], memory=[], ranks={}, findings=["None."])
    text = write_report(none, tmp_path / "report.html").read_text()
    assert [name for name in SECTIONS if f'<section id="{name}"' not in text] == []
    assert text.count("no classifier was judged") == 13 and "<figure" not in text
    assert comparison_text(none).startswith("part, model")


def test_many_classes_have_their_most_confused_pairs_instead_of_a_matrix(tmp_path: Path):
    found = read_results(make_read_run(tmp_path, num_classes=42, num_reads=2000), resamples=20)
    matrix = draw(replace(found, parts=["val"], history=[], memory=[]))[0]
    assert matrix.figure is None and "42 classes are too many" in matrix.missing
    text = page_of(found, tmp_path)
    assert "Most confused pairs of heldout" in text


def test_figures_and_tables_are_written(results: ReadResults, tmp_path: Path):
    few = replace(results, parts=["val"], history=[], memory=[])
    names = ["confusion-val", "coverage-val", "threshold-val", "calibration-val", "parts", "speed"]
    written = [file.name for file in write_figures(few, tmp_path / "figures")]
    assert written == [f"{name}.{kind}" for name in names for kind in ("svg", "png")]
    files = {file.name: file.read_text() for file in write_tables(results, tmp_path / "tables")}
    rows = list(csv.DictReader(files["comparison.csv"].splitlines()))
    assert [(row["part"], row["model"]) for row in rows[:3]] == [
        ("known", "cnn"),
        ("known", "kmer-linear"),
        ("heldout", "cnn"),
    ]
    found = results.models[0].parts["known"]
    assert float(rows[0]["macro_f1_low"]) == found.macro_f1.low and rows[0]["num_unknown"] == "20"
    classes = list(csv.DictReader(files["classes.csv"].splitlines()))
    assert len(classes) == 2 * 3 * 6 and classes[5]["training_reads"] == "0" and classes[1]["name"] == EVIL
    assert {row["rank"] for row in csv.DictReader(files["ranks.csv"].splitlines())} == {"species", "genus"}
    thresholds = list(csv.DictReader(files["thresholds.csv"].splitlines()))
    assert [row["val_precision"] for row in thresholds[:4]] == ["0.9", "0.95", "0.99", "0.999"]
    for name, text in files.items():
        if name.endswith(".tex"):
            lines = [line for line in text.splitlines() if line.endswith(r"\\")]
            assert len({len(re.findall(r"(?<!\\)&", line)) for line in lines}) == 1 and text.isascii()


def test_the_comparison_for_a_terminal_has_a_line_for_each_part_and_model(results: ReadResults):
    lines = comparison_text(results).splitlines()
    assert len(lines) == 8 and lines[1].split()[:2] == ["known", "cnn"] and lines[6].split()[0] == "val"
    assert max(map(len, lines[:-1])) <= 110
    assert lines[-1].startswith("reads: known 600 (20 of no known class), heldout 600 (20 of no known class), val 600.")


def test_the_summary_is_json_without_curves(results: ReadResults):
    found = json.loads(json.dumps(summary(results), default=str))
    assert found["best"] == "cnn" and found["kind"] == "reads" and list(found["missing"]) == ["lstm"]
    known = found["models"][0]["parts"]["known"]
    assert known["macro_f1"]["value"] == results.models[0].parts["known"].macro_f1.value
    assert known["ranks"][1]["rank"] == "genus" and "called" not in known and "confusion" not in known


def test_the_command_chooses_the_report_by_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from millstream.cli import app

    monkeypatch.setattr("millstream.report.reads.figures.draw", lambda _: [])  # they take seconds
    run = make_read_run(tmp_path, num_reads=100)
    done = CliRunner().invoke(app, ["report", str(run), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["best"] == "cnn"
    assert f"2 classifiers compared. Open {run / 'report.html'}" in done.stderr
    assert "Classifiers compared on" in (run / "report.html").read_text() and (run / "tables/classes.csv").exists()
