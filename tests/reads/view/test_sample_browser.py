"""The page of a classified sample in a real browser: by keyboard, narrow, and with names from anywhere."""

from collections.abc import Callable
from typing import Any

import pytest

from millstream.core.console import ignore_message
from millstream.reads.kind import ROW_COLUMNS
from millstream.view.server import views_of
from support.browser import wait_until

EVIL = "<img/src=x/onerror=alert(1)>"
TEXT = "([place, text]) => document.querySelector(place).textContent.includes(text)"
REPORT = """\
 10.00\t10\t10\tU\t0\tunclassified
 90.00\t90\t0\tR\t1\troot
 90.00\t90\t0\tD\t2\t  Bacteria
 60.00\t60\t0\tG\t561\t    Escherichia
 60.00\t60\t60\tS\t562\t      Escherichia coli
 30.00\t30\t30\tS\t573\t    Klebsiella pneumoniae
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, serve_views: Callable[..., str]) -> str:
    folder = tmp_path_factory.mktemp("sample")
    taxa = [("3", "562", "Escherichia coli", "species")] * 60 + [("5", "573", EVIL, "species")] * 30
    taxa += [("", "0", "unclassified", "")] * 10 + [(f"{n}", f"{n}", f"rare {n}", "genus") for n in range(900, 920)]
    rows = [ROW_COLUMNS, *((f"read{at}", *taxon, f"{at / 120:.4f}") for at, taxon in enumerate(taxa))]
    (folder / "sample.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    (folder / "sample.kreport").write_text(REPORT)
    return serve_views(views_of(folder / "sample.tsv", notify=ignore_message))


def test_taxa_are_searched_and_the_tree_is_folded_by_keyboard(address: str, open_page: Callable[..., Any]):
    page = open_page(address).page
    wait_until(page, TEXT, ["#tiles", "120"])
    wait_until(page, TEXT, ["#tree", "Klebsiella pneumoniae"])
    assert (
        EVIL in page.locator("#taxa").inner_text()
        and "unclassified 8.33 %" in page.locator("#shares-legend").inner_text()
    )
    page.keyboard.press("/")
    page.keyboard.type("rare 91")
    wait_until(page, TEXT, ["#taxa-text", "10 taxa fit"])
    page.locator("#search").fill("")
    page.locator("#less-common").wait_for()  # hidden while the taxa that fit are on one page
    page.locator("#less-common").press("Enter")
    wait_until(page, TEXT, ["#place", "16 to 22 of 22"])
    page.locator("#rank").select_option("species")
    wait_until(page, TEXT, ["#place", "1 to 2 of 2"])
    page.get_by_role("button", name="Hide taxa below Escherichia").press("Enter")
    assert "Escherichia coli" not in page.locator("#tree").inner_text()
    page.keyboard.press("Enter")  # the focus stays
    assert "Escherichia coli" in page.locator("#tree").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone(address: str, open_page: Callable[..., Any], scheme: str):
    opened = open_page(address, width=360, scheme=scheme)
    wait_until(opened.page, TEXT, ["#tree", "Klebsiella pneumoniae"])
    wait_until(opened.page, "document.querySelector('#confidence svg') !== null")
    assert opened.never_scrolls_sideways()
