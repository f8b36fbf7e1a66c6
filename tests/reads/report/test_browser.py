"""The report on read classifiers in a real browser: it sorts, fits a phone, requests nothing, logs nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.extras import need

need("matplotlib", "jinja2")
from millstream.reads.report import report_on  # noqa: E402
from millstream.reads.report.evaluate import read_results  # noqa: E402
from millstream.reads.report.figures import draw  # noqa: E402
from support.making_read_run import EVIL, make_read_run  # noqa: E402

ORDERS = "(rows, place) => rows.map((row) => row.cells[place].dataset.order)"
WIDE = "(box) => box.scrollWidth > box.clientWidth"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    results = read_results(make_read_run(folder, num_classes=20, absent=(3,)), resamples=50)
    few = [drawing for drawing in draw(results) if drawing.name in ("confusion-heldout", "coverage-heldout")]
    return report_on(results).write_page(folder / "report.html", few)


@pytest.fixture
def page(open_page: Callable[..., Any], file: Path, request: pytest.FixtureRequest) -> Any:
    width, scheme = getattr(request, "param", (1440, "light"))
    return open_page(file.as_uri(), width=width, scheme=scheme).page


def heading(page: Any, table: Any, title: str) -> Any:
    return table.locator("thead th", has=page.get_by_role("button", name=title, exact=True))


def orders(page: Any, table: Any, title: str) -> list[str]:
    place = heading(page, table, title).evaluate("(heading) => heading.cellIndex")
    return table.locator("tbody tr").evaluate_all(ORDERS, place)


def test_classes_open_with_the_hardest_first_and_sort_by_any_column(page: Any):
    table = page.locator("table.by-class").first
    first = [float(order) for order in orders(page, table, "F1") if order]
    assert first == sorted(first) and len(first) == 19
    for title in ("reads", "training reads", "recall"):
        for direction in ("descending", "ascending"):
            heading(page, table, title).get_by_role("button").click()
            assert heading(page, table, title).get_attribute("aria-sort") == direction
            numbers = [float(order) for order in orders(page, table, title) if order]
            assert numbers == sorted(numbers, reverse=direction == "descending")
    assert orders(page, table, "recall")[-1] == ""  # of the class that the part does not have
    heading(page, table, "class").get_by_role("button").click()
    assert EVIL in orders(page, table, "class")


def test_each_table_sorts_on_its_own(page: Any):
    tables = page.locator("table.comparison")
    assert tables.count() == 3
    heading(page, tables.nth(1), "accuracy").get_by_role("button").click()
    assert page.locator("table.comparison [aria-sort]").count() == 2  # that one, and validation by macro F1
    names = orders(page, tables.nth(1), "classifier")
    assert names == ["kmer-linear", "cnn"] and orders(page, tables.nth(0), "classifier") == ["cnn", "kmer-linear"]


def test_other_splits_unfold(page: Any):
    second = page.locator("table.by-class").nth(1)
    assert not second.is_visible()
    page.locator("#classes summary").nth(1).click()
    assert second.is_visible()


@pytest.mark.parametrize("page", [(390, "light"), (390, "dark"), (1440, "dark"), (320, "light")], indirect=True)
def test_the_page_never_scrolls_sideways(page: Any):
    for summary in page.locator("summary").all():
        if summary.locator("..").get_attribute("open") is None:
            summary.click()
    size = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert size[0] == size[1]


@pytest.mark.parametrize("page", [(390, "light")], indirect=True)
def test_on_a_phone_matrices_scroll_and_long_tables_keep_their_header(page: Any):
    assert page.locator("#figure-confusion-heldout").evaluate(WIDE)
    box = page.locator("#classes .box").first
    box.evaluate("(box) => { box.scrollTop = 300; }")
    top, head = box.bounding_box()["y"], box.locator("thead th").first.bounding_box()["y"]
    assert abs(top - head) < 3


@pytest.mark.parametrize("page", [(800, "light"), (800, "dark")], indirect=True)
def test_cells_of_the_matrix_change_with_the_theme(page: Any):
    fills = (
        "[...document.querySelectorAll('#figure-confusion-heldout path')].map((cell) => getComputedStyle(cell).fill)"
    )
    before = page.evaluate(fills)
    page.locator("#theme").click()
    after = page.evaluate(fills)
    assert len(before) > 40 and before != after
