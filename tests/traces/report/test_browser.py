"""The report in a real browser: it sorts, fits a phone, requests nothing, and text from the data does not run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.extras import need

need("matplotlib", "jinja2")

from millstream.traces.report import report_on  # noqa: E402
from millstream.traces.report.figures import draw  # noqa: E402
from support.made_results import made_results  # noqa: E402

TABLE = "table.comparison"
ORDERS = "(rows, place) => rows.map((row) => row.cells[place].dataset.order)"


class Report:
    """The report in the browser, and its table of detectors."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def column(self, title: str) -> Any:
        return self.page.locator(f"{TABLE} thead th", has=self.page.get_by_role("button", name=title, exact=True))

    def orders(self, title: str) -> list[str]:
        place = self.column(title).evaluate("(heading) => heading.cellIndex")
        return self.page.locator(f"{TABLE} tbody tr").evaluate_all(ORDERS, place)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = made_results()
    roc = [drawing for drawing in draw(replace(results, models=results.models[:3])) if drawing.name == "roc"]
    return report_on(results).write_page(tmp_path_factory.mktemp("browser") / "report.html", roc)


@pytest.fixture
def opened(open_page: Callable[..., Any], file: Path, request: pytest.FixtureRequest) -> Report:
    width, scheme = getattr(request, "param", (1440, "light"))
    page = open_page(file.as_uri(), width=width, scheme=scheme).page
    page.locator("summary", has_text="every measure").click()
    return Report(page)


def test_a_click_sorts_by_number_and_a_second_click_reverses(opened: Report):
    for title in ("fit, s", "kB per trace", "AURC"):
        for direction in ("descending", "ascending"):
            opened.column(title).get_by_role("button").click()
            assert opened.column(title).get_attribute("aria-sort") == direction
            numbers = [float(order) for order in opened.orders(title)]
            assert numbers == sorted(numbers, reverse=direction == "descending")
            assert len(set(numbers)) > 1
    assert opened.page.locator(f"{TABLE} [aria-sort]").count() == 1


def test_the_table_opens_with_the_best_model_first(opened: Report):
    assert opened.column("AUROC").get_attribute("aria-sort") == "descending"
    numbers = [float(order) for order in opened.orders("AUROC")]
    assert numbers == sorted(numbers, reverse=True)


def test_the_keyboard_sorts_too(opened: Report):
    opened.column("detector").get_by_role("button").focus()
    opened.page.keyboard.press("Enter")
    names = opened.orders("detector")
    assert names == sorted(names) and opened.column("detector").get_attribute("aria-sort") == "ascending"
    opened.page.keyboard.press("Tab")
    opened.page.keyboard.press("Space")
    kinds = opened.orders("kind")
    assert kinds == sorted(kinds) and len(set(kinds)) == 3


def test_missing_numbers_sort_last_in_both_directions(opened: Report):
    for _ in range(2):
        opened.column("parameters").get_by_role("button").click()
        orders = opened.orders("parameters")
        known = [order for order in orders if order]
        assert 0 < len(known) < len(orders) and orders[: len(known)] == known


@pytest.mark.parametrize("opened", [(390, "light"), (390, "dark"), (1440, "dark"), (320, "light")], indirect=True)
def test_the_page_never_scrolls_sideways(opened: Report):
    size = opened.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert size[0] == size[1]
    box = opened.page.locator(".box", has=opened.page.locator(TABLE))
    assert box.evaluate("(box) => box.scrollWidth > box.clientWidth")
    left = opened.page.locator(f"{TABLE} tbody th").first.evaluate("(cell) => cell.getBoundingClientRect().left")
    box.evaluate("(box) => box.scrollLeft = 400")
    assert opened.page.locator(f"{TABLE} tbody th").first.evaluate("(c) => c.getBoundingClientRect().left") == left


def test_text_from_the_data_does_not_run(opened: Report):
    assert opened.page.evaluate("window.hacked") is None
    assert opened.page.locator("#mistakes img, #mistakes script").count() == 0
    assert "window.hacked = 1</script>" in opened.page.locator("#mistakes article").nth(2).inner_text()


@pytest.mark.parametrize("opened", [(800, "light"), (800, "dark")], indirect=True)
def test_the_button_toggles_light_and_dark(opened: Report):
    ground = "getComputedStyle(document.body).backgroundColor"
    line = "getComputedStyle(document.querySelector('#figure-roc text')).fill"
    seen = [(opened.page.evaluate(ground), opened.page.evaluate(line))]
    for _ in range(2):
        opened.page.locator("#theme").click()
        seen.append((opened.page.evaluate(ground), opened.page.evaluate(line)))
    assert seen[0] == seen[2] and seen[0][0] != seen[1][0] and seen[0][1] != seen[1][1]
