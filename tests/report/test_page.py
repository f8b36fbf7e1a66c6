"""The report as a file: what it shows, what it leaves out, and that data stay data."""

import csv
import math
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

sys.path.insert(0, str(Path(__file__).parent))

from made_results import HOSTILE, made_results

from millstream.report.figures import write_figures
from millstream.report.page import write_report
from millstream.report.results import Curve, Interval, Results
from millstream.report.tables import comparison_text, write_tables

NO = Curve([], [])
SECTIONS = ["comparison", "differences", "figures", "mistakes", "data", "settings", "environment", "not-run"]


class Page(HTMLParser):
    """Tags, ids and texts of a page, as a browser would take them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def values(self, attribute: str) -> list[str]:
        return [value for name, value in self.attributes if name == attribute]


@pytest.fixture(scope="module")
def results() -> Results:
    return made_results()


@pytest.fixture(scope="module")
def small(results: Results) -> Results:
    """Most figures take a fifth of a second; where they do not matter there are none."""
    bare = [replace(m, roc=NO, pr=NO, risk_coverage=NO, calibration=NO, by_length=[]) for m in results.models[:2]]
    return replace(results, models=bare, history=[], memory=[], probe_layers={})


@pytest.fixture(scope="module")
def html(results: Results, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page") / "deep" / "report.html"
    assert write_report(results, out) == out
    return out.read_text()


def nothing(results: Results) -> Results:
    """The results of a run in which nothing worked."""
    empty = {name: [] for name in ("models", "differences", "history", "memory", "mistakes", "findings")}
    tables = {name: {} for name in ("config", "environment", "data", "probe_layers", "missing")}
    return replace(results, **empty, **tables, budget=None, num_test=0, num_wrong=0, prevalence=math.nan)


def test_the_sections_come_in_their_order_and_the_findings_first(html: str, results: Results):
    places = [html.index(f'<section id="{name}"') for name in SECTIONS]
    assert places == sorted(places)
    assert html.index(results.findings[0]) < places[0]
    for text in ("traces/triviaqa", "Llama-3.2-3B", "2026-11-16", "10,240", "semantic_entropy", "chance 0.341"):
        assert text in html


def test_texts_of_the_data_are_shown_and_add_no_element(small: Results, tmp_path: Path):
    texts = {"question": "q", "answer": "a", "references": ["r", "s"]}
    tame = replace(small, mistakes=[replace(small.mistakes[2], **texts)])
    wild = replace(small, mistakes=[small.mistakes[2]])
    expected = Page(write_report(tame, tmp_path / "tame.html").read_text())
    found = Page(write_report(wild, tmp_path / "wild.html").read_text())
    assert found.tags == expected.tags
    assert found.tags["script"] == 1 and found.tags["img"] == 0
    assert found.texts.count(HOSTILE) >= 2
    assert not any(name.startswith("on") for name, _ in found.attributes)


def test_hostile_names_and_settings_stay_texts(small: Results, tmp_path: Path):
    evil = replace(
        small,
        config={HOSTILE: HOSTILE},
        environment={"time": HOSTILE},
        data={"store": HOSTILE, "parts": {HOSTILE: {HOSTILE: HOSTILE}}, "verdicts": {HOSTILE: 3}},
        findings=[HOSTILE],
        missing={HOSTILE: HOSTILE},
        models=[replace(small.models[0], title=HOSTILE, chosen={HOSTILE: HOSTILE})],
    )
    page = Page(write_report(evil, tmp_path / "evil.html").read_text())
    assert page.tags["script"] == 1 and page.tags["img"] == 0
    assert not any(name.startswith("on") for name, _ in page.attributes)


def test_text_that_is_no_unicode_does_not_stop_the_report(small: Results, tmp_path: Path):
    broken = replace(small, mistakes=[replace(small.mistakes[0], answer="half \ud83d a pair")])
    assert "half ? a pair" in write_report(broken, tmp_path / "report.html").read_text()


def test_nothing_is_loaded_from_anywhere(html: str):
    page = Page(html)
    assert "http://" not in html and "https://" not in html and "@import" not in html
    assert page.tags["link"] == page.tags["iframe"] == 0 and not page.values("src")
    assert all(value.startswith("#") for value in page.values("href"))
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:" in page.values(
        "content"
    )


def test_every_id_is_there_once_and_every_reference_has_its_target(html: str):
    page = Page(html)
    ids = page.values("id")
    assert len(ids) == len(set(ids)) > 100
    wanted = {value[1:] for value in page.values("href")} | set(re.findall(r"url\(#([^)]*)\)", html))
    assert wanted | set(page.values("aria-labelledby")) <= set(ids)


def test_figures_take_the_colours_of_the_page(html: str):
    figures = re.findall(r"<figure.*?</figure>", html, re.DOTALL)
    assert len(figures) == 11
    for figure in figures:
        assert "var(--ink)" in figure and not re.search(r"#[0-9a-f]{6}\b", figure)
        assert "<style" not in figure and "<text" in figure
    assert "gnn 0.871" in figures[0]


def test_the_page_is_small(html: str):
    assert len(html.encode()) < 1_500_000


def test_what_is_no_number_is_shown_as_a_dash(small: Results, tmp_path: Path):
    nan = math.nan
    blank = replace(small.models[0], name="blank", auroc=Interval(nan, nan, nan), prr=nan, brier=None, auroc_sd=None)
    out = write_report(replace(small, models=[small.models[1], blank]), tmp_path / "report.html")
    row = re.findall(r'<tr class="trained">.*?</tr>', out.read_text(), re.DOTALL)[1]
    assert row.count("–") == 5  # the four above, and nothing chosen
    assert "nan" not in row and "None" not in row
    assert 'data-order=""' in row


def test_a_tiny_p_is_not_shown_as_nought(small: Results, tmp_path: Path):
    tiny = replace(small, differences=[replace(small.differences[0], p=0.0, p_holm=0.0004)])
    assert write_report(tiny, tmp_path / "report.html").read_text().count("&lt;0.001") == 2


def test_a_section_without_data_says_why(results: Results, tmp_path: Path):
    text = write_report(nothing(results), tmp_path / "report.html").read_text()
    assert [name for name in SECTIONS if f'<section id="{name}"' not in text] == []
    assert text.count('class="missing"') == 19  # findings, seven sections, eleven figures
    for reason in ("no detector was scored", "no probe was run", "logged no memory", "no data card", "None: every"):
        assert reason in text
    assert "<figure" not in text and "<table" not in text


def test_one_model_of_one_seed_is_enough(results: Results, tmp_path: Path):
    alone = replace(results, models=results.models[-1:], differences=[], history=[], mistakes=[], prevalence=1.0)
    assert "Left out: there were no two" in write_report(alone, tmp_path / "report.html").read_text()


def test_a_report_that_fails_leaves_the_old_one(small: Results, tmp_path: Path):
    out = tmp_path / "report.html"
    out.write_text("old")
    with pytest.raises(TypeError):
        write_report(replace(small, num_wrong=None), out)  # pyright: ignore[reportArgumentType]
    assert out.read_text() == "old" and list(tmp_path.iterdir()) == [out]


def test_the_same_results_make_the_same_page(html: str, results: Results, tmp_path: Path):
    assert write_report(results, tmp_path / "again.html").read_text() == html


def test_figures_are_written_as_svg_and_png(results: Results, tmp_path: Path):
    few = replace(results, models=results.models[:2], history=[], memory=[], probe_layers={})
    written = write_figures(few, tmp_path / "figures")
    names = ["roc", "pr", "calibration", "risk_coverage", "length"]
    assert [file.name for file in written] == [f"{name}.{kind}" for name in names for kind in ("svg", "png")]
    assert sorted(written) == sorted((tmp_path / "figures").iterdir())
    assert written[1].read_bytes().startswith(b"\x89PNG") and "fill: #ffffff" in written[0].read_text()


def test_csv_holds_the_numbers_in_full(results: Results, tmp_path: Path):
    odd = replace(results.models[0], brier=None, prr=math.nan, aurc=Interval(1 / 3, 0.25, 2 / 3))
    write_tables(replace(results, models=[odd, *results.models[1:]]), tmp_path)
    with open(tmp_path / "comparison.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    assert [row["name"] for row in rows] == [model.name for model in results.models]
    assert (float(rows[0]["aurc"]), float(rows[0]["aurc_high"])) == (1 / 3, 2 / 3)
    assert (rows[0]["brier"], rows[0]["prr"]) == ("", "")
    assert [float(row["auroc_low"]) for row in rows] == [model.auroc.low for model in results.models]
    with open(tmp_path / "differences.csv", newline="") as f:
        assert [float(row["p_holm"]) for row in csv.DictReader(f)] == [d.p_holm for d in results.differences]
    with open(tmp_path / "data.csv", newline="") as f:
        card = {row["name"]: row["value"] for row in csv.DictReader(f)}
    assert card["verdicts.ambiguous"] == "171" and card["parts.test.wrong"] == "512"


def test_latex_is_escaped_and_whole(results: Results, tmp_path: Path):
    written = write_tables(results, tmp_path)
    texts = {file.name: file.read_text() for file in written if file.suffix == ".tex"}
    assert r"probe\_last\_answer" in texts["comparison.tex"]
    assert r"Answer \& be brief: 100 \%" in texts["data.tex"]
    for text in texts.values():
        rows = [line for line in text.splitlines() if line.endswith(r"\\")]
        assert len({len(re.findall(r"(?<!\\)&", row)) for row in rows}) == 1
        assert not re.search(r"(?<!\\)[_%#]", text) and text.isascii()
        assert text.startswith(r"\begin{tabular}") and text.endswith("\\bottomrule\n\\end{tabular}\n")


def test_the_comparison_for_a_terminal_has_a_line_a_model(results: Results):
    lines = comparison_text(results).splitlines()
    assert len(lines) == len(results.models) + 2
    assert lines[1].split() == ["gnn", "0.871", "[0.850,", "0.890]", "0.004", *lines[1].split()[5:]]
    assert lines[-1].startswith("1500 test questions, 512 wrong: prevalence 0.341")
    assert max(map(len, lines)) <= 100


def test_long_names_are_cut_to_the_width_of_the_terminal(results: Results):
    long = replace(results, models=[replace(results.models[0], name="a.package.of.mine:" + "Detector" * 9)])
    lines = comparison_text(long, width=80).splitlines()
    assert max(map(len, lines)) <= 80 and "…" in lines[1]


@pytest.mark.parametrize(("package", "module"), [("matplotlib", "figures"), ("jinja2", "page")])
def test_a_missing_extra_names_the_command(package: str, module: str):
    code = f"import sys; sys.modules[{package!r}] = None; import millstream.report.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MissingExtra" in done.stderr and "pip install 'millstream[report]'" in done.stderr
