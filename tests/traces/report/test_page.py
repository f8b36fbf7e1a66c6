"""The report on detectors as a file: what it shows and what it leaves out."""

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from millstream.report.measures import Interval
from millstream.traces.report import comparison_text, report_on
from millstream.traces.report.figures import draw
from millstream.traces.report.results import Results
from millstream.training.log import Metrics
from support.html_page import Page
from support.made_results import HOSTILE, made_results

SECTIONS = [
    "comparison",
    "findings",
    "differences",
    "transfer",
    "figures",
    "mistakes",
    "data",
    "settings",
    "environment",
    "not-run",
]


@pytest.fixture(scope="module")
def results() -> Results:
    return made_results()


@pytest.fixture(scope="module")
def html(results: Results, tmp_path_factory: pytest.TempPathFactory) -> str:
    """With a few figures only: writing them takes most of the time."""
    out = tmp_path_factory.mktemp("page") / "deep" / "report.html"
    drawings = draw(results)
    assert len(drawings) == 13 and all(drawing.figure for drawing in drawings)
    few = [drawing for drawing in drawings if drawing.name in ("overview", "roc", "layers")]
    assert report_on(results).write_page(out, few) == out
    return out.read_text()


def page_of(results: Results, out: Path) -> str:
    """Without figures, which take most of the time."""
    return report_on(results).write_page(out / "report.html", []).read_text()


def nothing(results: Results) -> Results:
    """The results of a run in which nothing worked."""
    empty = {name: [] for name in ("models", "differences", "mistakes", "findings")}
    tables = {name: {} for name in ("config", "environment", "data", "probe_layers", "missing")}
    return replace(results, **empty, **tables, metrics=Metrics(), num_test=0, num_wrong=0, prevalence=math.nan)


def test_the_page_begins_with_one_finding_and_one_figure_then_come_the_main_detectors(html: str, results: Results):
    places = [html.index(f'<section id="{name}"') for name in SECTIONS]
    assert places == sorted(places)
    first = html.index(results.findings[0]), html.index('<figure id="figure-overview"')
    assert [*first, places[0]] == sorted([*first, places[0]])
    assert all(places[1] < html.index(finding) < places[2] for finding in results.findings[1:])
    main, whole = (
        html[html.index(f'class="sortable {name}"') :].count('<th scope="row"') for name in ("main", "comparison")
    )
    assert main - whole == 5 and html.index("sortable main") < html.index("<details") < html.index(
        "sortable comparison"
    )
    for text in ("traces/triviaqa", "Llama-3.2-3B", "2026-11-16", "10,240", "semantic_entropy", "chance 0.341"):
        assert text in html
    assert html.count("<figure") == 3 and "gnn 0.871" in html


def test_hostile_text_is_escaped(results: Results, tmp_path: Path):
    evil = replace(
        results,
        config={HOSTILE: HOSTILE},
        environment={"time": HOSTILE},
        data={"store": HOSTILE, "parts": {HOSTILE: {HOSTILE: HOSTILE}}, "verdicts": {HOSTILE: 3}},
        findings=[HOSTILE],
        missing={HOSTILE: HOSTILE},
        models=[replace(results.models[0], title=HOSTILE, chosen={HOSTILE: HOSTILE})],
    )
    page = Page(page_of(evil, tmp_path))
    assert page.tags["script"] == 1 and page.tags["img"] == 0 and page.texts.count(HOSTILE) > 5
    assert not any(name.startswith("on") for name, _ in page.attributes)


def test_missing_numbers_are_dashes(results: Results, tmp_path: Path):
    nan = math.nan
    blank = replace(results.models[0], name="blank", auroc=Interval(nan, nan, nan), prr=nan, brier=None, auroc_sd=None)
    text = page_of(replace(results, models=[results.models[1], blank]), tmp_path)
    text = text[text.index('class="sortable comparison"') :]
    row = next(row for row in re.findall(r"<tr class=\"trained\">.*?</tr>", text, re.DOTALL) if "blank" in row)
    assert row.count("–") == 5  # the four above, and nothing chosen
    assert "nan" not in row and "None" not in row


def test_a_section_without_data_gives_its_reason(results: Results, tmp_path: Path):
    text = report_on(nothing(results)).write_page(tmp_path / "report.html").read_text()
    assert [name for name in SECTIONS if f'<section id="{name}"' not in text] == []
    assert text.count('class="missing"') == 22  # findings, nine sections, twelve figures
    assert "<figure" not in text and "<table" not in text


def test_one_model_and_one_seed_are_enough(results: Results, tmp_path: Path):
    alone = replace(results, models=results.models[-1:], differences=[], metrics=Metrics(), mistakes=[], prevalence=1.0)
    text = page_of(alone, tmp_path)
    assert 'class="sortable differences"' not in text and 'class="sortable comparison"' in text


def test_a_figure_without_data_is_not_drawn(results: Results):
    few = replace(results, models=results.models[:2], metrics=Metrics(), probe_layers={})
    names = ["overview", "roc", "pr", "calibration", "risk_coverage", "length", "learning"]
    assert [drawing.name for drawing in draw(few) if drawing.figure] == names


def test_tables_contain_all_models_differences_and_the_data_card(results: Results):
    texts = report_on(results).tables()
    rows = {
        name: list(csv.DictReader(texts[f"{name}.csv"].splitlines())) for name in ("comparison", "differences", "data")
    }
    assert [row["name"] for row in rows["comparison"]] == [model.name for model in results.models]
    assert [float(row["auroc_low"]) for row in rows["comparison"]] == [model.auroc.low for model in results.models]
    assert [float(row["p_holm"]) for row in rows["differences"]] == [d.p_holm for d in results.differences]
    card = {row["name"]: row["value"] for row in rows["data"]}
    assert card["verdicts.ambiguous"] == "171" and card["parts.test.wrong"] == "512"
    assert r"probe\_last\_answer" in texts["comparison.tex"] and r"Answer \& be brief: 100 \%" in texts["data.tex"]


def test_the_comparison_for_a_terminal_has_a_line_per_model(results: Results):
    lines = comparison_text(results).splitlines()
    assert len(lines) == len(results.models) + 2
    assert lines[1].split()[:5] == ["gnn", "0.871", "[0.850,", "0.890]", "0.004"]
    assert {"1,500", "512", "0.341."} <= set(lines[-1].split())
    assert max(map(len, lines)) <= 100
    long = replace(results, models=[replace(results.models[0], name="a.package.of.mine:" + "Detector" * 9)])
    assert max(map(len, comparison_text(long, width=80).splitlines())) <= 80


def test_the_summary_is_json(results: Results):
    found = json.loads(json.dumps(report_on(replace(results, models=[])).summary, default=str))
    assert list(found) == ["run", "num_test", "num_wrong", "models", "differences", "findings"]
    assert found["differences"][0]["auroc"]["value"] == results.differences[0].value.value
