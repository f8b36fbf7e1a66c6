"""The page of a run in a real browser: live, and without external requests."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.view.run_page import run_view
from support.browser import wait_until


def add(run: Path, *lines: dict[str, object]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def epoch(number: int, model: str = "cnn", **more: object) -> dict[str, object]:
    measured = {"loss": 1 / (number + 1), "val_macro_f1": 0.5 + number / 20, "records_per_s": 900.0, "waiting": 0.1}
    return {"kind": "epoch", "time_s": number, "model": model, "seed": 0, "epoch": number, **measured, **more}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two classifiers, the first of them finished."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    from support.making_read_run import MODELS, make_read_run

    models = {"kmer-linear": MODELS["kmer-linear"]}
    folder = tmp_path_factory.mktemp("run")
    return make_read_run(folder, models=models, configured="kmer-linear,cnn", num_reads=100, parts=("val", "known"))


def circles(page: Any) -> int:
    return page.locator("#first-chart circle").count()


def wait(page: Any, what: str, *given: object) -> None:
    """Wait until this is true in the page."""
    wait_until(page, what, list(given))


MORE_CIRCLES = "([count]) => document.querySelectorAll('#first-chart circle').length === count"
TEXT = "([place, text]) => document.querySelector(place).textContent.includes(text)"


def test_the_page_follows_a_training_run(run: Path, serve_views: Callable[..., str], open_page: Callable[..., Any]):
    add(run, epoch(0))
    page = open_page(serve_views([run_view(run)])).page
    wait(page, TEXT, "#state", "Training")
    wait(page, TEXT, "#at-work", "cnn, seed 0, epoch 2")
    before = circles(page)
    assert before == 3  # two epochs of the model that is finished, and one of this
    add(run, epoch(1), {"kind": "memory", "time_s": 60.0, "bytes": 900_000_000, "budget": 10**9})
    wait(page, MORE_CIRCLES, 4)
    wait(page, TEXT, "#memory-text", "900.0 MB, 90 % of the budget of 1.0 GB")
    with (run / "metrics.jsonl").open("a") as file:
        line = json.dumps(epoch(2)) + "\n"
        file.write(line[:40])
        file.flush()
        with page.expect_response(lambda response: "/api/state" in response.url):
            pass
        assert circles(page) == 4
        file.write(line[40:])
    wait(page, MORE_CIRCLES, 5)
    assert "training" in page.locator("#rows tr", has_text="cnn").inner_text()
    page.get_by_role("checkbox", name="kmer-linear").focus()
    page.keyboard.press("Space")
    wait(page, MORE_CIRCLES, 3)
    page.locator("#second").focus()
    page.keyboard.press("r")  # records/s, by its first letter
    assert "records/s" in page.locator("#second-chart svg").get_attribute("aria-label")
    add(run, epoch(3))
    wait(page, MORE_CIRCLES, 4)  # what was switched off stays off
    assert page.evaluate("document.activeElement.id") == "second"


def test_a_button_makes_the_report_and_a_frame_shows_it(
    run: Path, serve_views: Callable[..., str], open_page: Callable[..., Any], tmp_path: Path
):
    os.utime(run / "metrics.jsonl", (time.time() - 3600,) * 2)
    opened = open_page(serve_views([run_view(run)]))
    page = opened.page
    wait(page, TEXT, "#state", "Stopped")
    assert "Not finished: cnn" in page.locator("#text").inner_text()
    page.get_by_role("button", name="Make the report").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#frame:not([hidden])")
    frame = page.frame_locator("#frame")
    assert "kmer-linear" in frame.locator("table").first.inner_text()
    assert page.locator("#make").is_hidden()
    assert page.evaluate("document.querySelector('#frame').contentDocument") is None  # it cannot reach this page
    version = page.locator("#frame").get_attribute("src")
    os.utime(run / "report.html", (time.time() + 5,) * 2)
    wait(page, "([before]) => document.querySelector('#frame').getAttribute('src') !== before", version)
    page.screenshot(path=tmp_path / "run.png", full_page=True)
    assert (tmp_path / "run.png").stat().st_size > 20_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_run_fits_a_phone(run: Path, serve_views: Callable[..., str], open_page: Callable[..., Any], scheme: str):
    opened = open_page(serve_views([run_view(run)]), width=390, scheme=scheme)
    wait(opened.page, "() => document.querySelectorAll('#rows tr').length > 0")
    opened.page.wait_for_selector("#settings dl")
    assert opened.never_scrolls_sideways()


def test_nearly_equal_measures_are_drawn(
    tmp_path: Path, serve_views: Callable[..., str], open_page: Callable[..., Any]
):
    (tmp_path / "config.yaml").write_text("{}")
    almost = {"val_macro_f1": 1 - 2**-53, "loss": 1e-3 + 2**-62}
    add(tmp_path, epoch(0, **almost), epoch(1, val_macro_f1=1.0, loss=1e-3), epoch(2, val_macro_f1=1.0, loss=1e-3))
    page = open_page(serve_views([run_view(tmp_path)])).page
    wait(page, MORE_CIRCLES, 3)
    assert page.locator("#second-chart circle").count() == 3
