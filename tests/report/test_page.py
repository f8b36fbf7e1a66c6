"""The page of a report: every kind of block, text from the data stays text, one palette with the figures."""

import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from millstream.report.drawing import INK, LINES, PALETTE, Look, curve_drawing, drawing_files, style
from millstream.report.measures import Curve, Interval
from millstream.report.page import (
    Block,
    CardsBlock,
    FiguresBlock,
    FoldBlock,
    HeadingBlock,
    KeyBlock,
    Page,
    PairsBlock,
    Scale,
    Section,
    SideBlock,
    TableBlock,
    TextBlock,
    WordsBlock,
    write_page,
)
from millstream.report.tables import Column, Table
from support import html_page
from support.made_results import HOSTILE

Row = tuple[str, Interval | None]


def page_of(*blocks: Block, **others: object) -> Page:
    page = Page(
        what="model",
        title="data",
        facts={"one": 1, "none": None},
        findings=[],
        sections=[Section("all", "All", blocks, "Left out: nothing here.")],
        settings={},
        environment={},
        not_run={},
    )
    return replace(page, **others)


def table_of(rows: list[Row]) -> TableBlock:
    columns: list[Column[Row]] = [
        Column("name", "name", "", lambda row: row[0], ""),
        Column("area", "area", "a hint", lambda row: row[1]),
    ]
    scale = Scale.of([row[1] for row in rows if row[1]], reference=0.5)
    return TableBlock(table=Table(columns, rows), label=rows[0][0], plot=("area", scale), row_note=lambda row: row[0])


def drawn(name: str = "roc") -> FiguresBlock:
    evil = "<b>x</b> & y"
    looks = {evil: Look(LINES[0])}
    with style():
        return FiguresBlock([curve_drawing((name, evil, evil), ("x", evil), {evil: Curve([0, 1], [0, 1])}, looks)])


def every_block(text: str) -> list[Block]:
    return [
        table_of([(text, Interval(0.5, 0.4, 0.6))]),
        TextBlock(text),
        HeadingBlock(text),
        KeyBlock({"trained": text}),
        WordsBlock(text, [{text: text}]),
        PairsBlock({text: text}),
        CardsBlock([(text, text, {text: [text, text]})]),
        FoldBlock(text, [SideBlock([[TextBlock(text)], [HeadingBlock(text)]])]),
    ]


def written(page: Page, folder: Path) -> str:
    return write_page(page, folder / "deep" / "page.html").read_text()


def test_text_from_the_data_is_escaped(tmp_path: Path):
    tame, wild = (
        html_page.Page(written(page_of(*every_block(text), findings=[text], title=text), tmp_path))
        for text in ("x", HOSTILE)
    )
    assert wild.tags == tame.tags and wild.tags["script"] == 1 and wild.tags["img"] == 0
    assert wild.texts.count(HOSTILE) > 15
    assert not any(name.startswith("on") for name, _ in wild.attributes)


def test_the_page_loads_nothing_external(tmp_path: Path):
    text = written(page_of(*every_block("x"), drawn()), tmp_path)
    page = html_page.Page(text)
    assert "http://" not in text and "https://" not in text and "@import" not in text
    assert page.tags["link"] == page.tags["iframe"] == 0 and not page.values("src")
    assert any(value.startswith("default-src 'none'") for value in page.values("content"))


def test_invalid_unicode_does_not_break_the_page(tmp_path: Path):
    assert "half ? a pair" in written(page_of(TextBlock("half \ud83d a pair")), tmp_path)


def test_an_empty_section_gives_its_reason_and_facts_without_a_value_are_omitted(tmp_path: Path):
    text = written(page_of(), tmp_path)
    assert text.count('class="missing"') == 6 and "Left out: nothing here." in text  # findings, four sections more
    assert ">one<" in text and ">none<" not in text


def test_missing_numbers_are_dashes_without_a_plot_and_sort_last(tmp_path: Path):
    nan = math.nan
    block = table_of([("a", Interval(0.5, 0.4, 0.6)), ("b", Interval(nan, nan, nan)), ("c", None)])
    rows = re.findall(r"<tr class=\"\">.*?</tr>", written(page_of(block), tmp_path), re.DOTALL)
    assert ["<svg" in row for row in rows] == [True, False, False]
    assert ['data-order=""' in row for row in rows] == [False, True, True]
    assert all("–" in row and "nan" not in row and "None" not in row for row in rows[1:])


def test_a_failed_page_keeps_the_old_one(tmp_path: Path):
    old = tmp_path / "page.html"
    old.write_text("old")
    with pytest.raises(AttributeError):
        write_page(page_of(TextBlock("x"), facts=None), old)
    assert old.read_text() == "old" and list(tmp_path.iterdir()) == [old]


def test_figures_use_the_colours_of_the_page_and_unique_ids(tmp_path: Path):
    text = written(page_of(drawn("one"), drawn("two")), tmp_path)
    figures = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    assert len(figures) == 2
    for figure in figures:
        assert "var(--ink)" in figure and "var(--line0)" in figure and not re.search(r"#[0-9a-f]{6}\b", figure)
        assert "<style" not in figure and "<b>" not in figure and "&lt;b&gt;x" in figure
    page = html_page.Page(text)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    wanted = {value[1:] for value in page.values("href")} | set(re.findall(r"url\(#([^)]*)\)", text))
    assert wanted | set(page.values("aria-labelledby")) <= set(ids)


def test_figures_are_deterministic_and_written_as_svg_and_png():
    files, again = (drawing_files(drawn().drawings) for _ in range(2))
    assert list(files) == ["roc.svg", "roc.png"] and files["roc.svg"] == again["roc.svg"]
    assert files["roc.png"].startswith(b"\x89PNG") and b"fill: #ffffff" in files["roc.svg"]


def test_the_palette_comes_from_the_style_sheet():
    assert PALETTE["ink"][0] == INK and len(LINES) == len(set(LINES)) == 7
    assert all(light != dark for light, dark in PALETTE.values())


@pytest.mark.parametrize(("package", "module"), [("matplotlib", "drawing"), ("jinja2", "page")])
def test_a_missing_extra_names_the_command(package: str, module: str):
    code = f"import sys; sys.modules[{package!r}] = None; import millstream.report.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MissingExtra" in done.stderr and "pip install 'millstream[report]'" in done.stderr
