"""The explorer of traces in a real browser: search, open, slide and hover, by mouse and by keyboard."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream as ms
from millstream.traces.store.rewrite import merge
from millstream.traces.view import view_of
from millstream.view import View
from support.browser import wait_until
from support.making_traces import make_traces
from support.querying_traces import make_run

Serve = Callable[[Sequence[View]], str]
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def address(serve_views: Serve, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("browser")
    store = make_traces(folder / "traces", num=120)
    scores = {"lstm": {number: [number / 120] for number in range(0, 120, 3)}}
    return serve_views([view_of(store, run=make_run(folder / "run", store, scores))])


@pytest.fixture(scope="module")
def many(serve_views: Serve, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store of 20,000 records, whose questions are scripts."""
    folder = tmp_path_factory.mktemp("many")
    bad = "<img src=x onerror=\"console.log('ran')\"><script>console.log('ran')</script>"
    for name, answer in (("first", "hay"), ("last", "needle")):
        with ms.TraceWriter(folder / name, schema={"logprobs": "float32[step]"}) as writer:
            writer.extend(
                {
                    "question_id": f"{name}{number}",
                    "question": f"{bad} number {number}",
                    "generated_answer": answer if number == 1421 else "hay",
                    "logprobs": np.zeros(1, np.float32),
                }
                for number in range(2_000)
            )
    path = folder / "store"
    merge([folder / "first"] * 9 + [folder / "last"], path, mixed=True)
    return serve_views([view_of(path)])


def rows(page: Any) -> list[str]:
    return page.locator("#records tbody tr td:first-child").all_inner_texts()


def test_searching_filtering_and_sorting_change_the_list(open_page: Open, address: str):
    page = open_page(address).page
    page.locator("#records tbody tr").nth(49).wait_for()
    assert rows(page)[:3] == ["0", "1", "2"]
    page.locator("#sort").select_option("highest")
    page.locator("#records tbody tr td:first-child", has_text="117").first.wait_for()
    assert rows(page)[:3] == ["117", "114", "111"]
    page.locator("#verdict").select_option("wrong")
    page.locator("#total", has_text=" of 120 traces").wait_for()
    assert set(page.locator("#records .verdict").all_inner_texts()) == {"wrong"}
    page.locator("#q").fill("no such words")
    page.locator("#total", has_text="0 of 120").wait_for()
    assert rows(page) == []


def test_a_trace_opens_and_its_slider_shows_another_layer(open_page: Open, address: str, tmp_path: Path):
    page = open_page(address).page
    page.locator("#records a").nth(3).click()
    page.locator(".arcs path").first.wait_for()
    assert page.url.endswith("#3") and page.locator("#list").is_hidden()
    before = page.locator(".arcs").inner_html()
    assert page.locator("output").inner_text() == "layer 2 of 3"
    page.locator("#layer").focus()
    page.keyboard.press("ArrowRight")
    page.locator("output", has_text="layer 3 of 3").wait_for()
    wait_until(page, "before => document.querySelector('.arcs').innerHTML !== before", arg=before)
    page.locator("#k").fill("1")
    page.keyboard.press("Enter")
    wait_until(page, "document.querySelectorAll('.arcs path').length <= 20")
    page.locator("#evolution").wait_for()
    page.screenshot(path=tmp_path / "trace.png", full_page=True)
    assert (tmp_path / "trace.png").stat().st_size > 20_000


def test_a_token_shows_its_alternatives(open_page: Open, address: str):
    page = open_page(f"{address}#5").page
    token = page.locator(".tokens .answer").first
    token.hover()
    hint = page.locator("#hint")
    hint.wait_for()
    assert "probability" in hint.inner_text() and hint.locator("tr").count() == 10
    page.mouse.move(5, 5)
    hint.wait_for(state="hidden")
    token.focus()
    hint.wait_for()
    heats = page.locator(".tokens .answer").evaluate_all(
        "all => all.map((one) => one.style.getPropertyValue('--heat'))"
    )
    page.locator("#heat").select_option("entropy")
    others = page.locator(".tokens .answer").evaluate_all(
        "all => all.map((one) => one.style.getPropertyValue('--heat'))"
    )
    assert heats != others and len(set(heats)) > 1


def test_arrow_keys_move_through_the_list_of_a_fresh_page(open_page: Open, address: str):
    page = open_page(address).page
    page.locator("#records tbody tr").nth(49).wait_for()
    for key, number in (("ArrowDown", 0), ("ArrowDown", 1), ("ArrowDown", 2), ("ArrowUp", 1)):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.getAttribute('href')") == f"#{number}"


def test_arrow_keys_step_from_a_trace_that_was_opened_by_its_address(open_page: Open, address: str):
    page = open_page(f"{address}#5").page
    page.locator("#trace .soft", has_text="record 5 of 120").wait_for()
    page.keyboard.press("ArrowRight")
    page.locator("#trace .soft", has_text="record 6 of 120").wait_for()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    page.locator("#trace .soft", has_text="record 4 of 120").wait_for()


def test_a_trace_without_a_score_says_so(open_page: Open, address: str):
    page = open_page(address).page
    page.locator("#records td.score", has_text="not scored").first.wait_for()
    scores = page.locator("#records tbody td.score").all_inner_texts()[:4]
    assert scores == ["0.000", "not scored", "not scored", "0.025"]
    assert "splits" in page.locator("#records td.score span.soft").first.get_attribute("title")


def test_search_open_step_and_close_work_by_keyboard(open_page: Open, address: str):
    page = open_page(address).page
    page.locator("#records tbody tr").nth(49).wait_for()
    page.keyboard.press("/")
    wait_until(page, "document.activeElement.id === 'q'")
    page.keyboard.type("q11")
    page.locator("#total", has_text="11 of 120").wait_for()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.locator("#trace .question").wait_for()
    assert page.url.endswith("#110")
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**#111")
    page.locator("#trace .soft", has_text="record 111 of 120").wait_for()
    page.keyboard.press("Escape")
    page.locator("#list").wait_for()
    assert page.evaluate("document.activeElement.getAttribute('href')") == "#111"


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_no_page_scrolls_sideways(open_page: Open, address: str, width: int, scheme: str):
    opened = open_page(address, width=width, scheme=scheme)
    opened.page.locator("#records tbody tr").first.wait_for()
    assert opened.never_scrolls_sideways()
    opened.page.goto(f"{address}#2")
    opened.page.locator(".arcs path").first.wait_for()
    assert opened.never_scrolls_sideways()


def test_search_finds_one_of_20_000_records_and_no_text_runs(open_page: Open, many: str):
    page = open_page(many).page
    page.locator("#total", has_text="20,000 traces").wait_for()
    assert page.locator("#pages").inner_text() == "of 400"
    page.locator("#page").fill("400")
    page.keyboard.press("Enter")
    page.locator("#records td", has_text="19,999").first.wait_for()
    page.locator("#q").fill("NEEDLE")
    page.locator("#total", has_text="1 of 20,000").wait_for()
    page.locator("#records a").first.click()
    page.locator("#trace .question", has_text="number 1421").wait_for()
    assert page.url.endswith("#19421")
    assert page.locator("main img, main script").count() == 0


def test_a_record_out_of_range_is_reported(open_page: Open, address: str):
    opened = open_page(f"{address}#999")
    opened.page.locator("[role=alert]", has_text="record 999 of 120").wait_for()
    assert [text for text in opened.trouble if "400" not in text] == []
    opened.trouble.clear()  # the browser writes down that it was refused


@pytest.fixture(scope="module")
def odd(serve_views: Serve, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Record 0 has log-probs that are NaN; record 1 has 4,200 generated tokens, and 32 edges of each."""
    folder, rng = tmp_path_factory.mktemp("odd"), np.random.default_rng(0)
    kinds = {"tokens": "int32[token]", "logprobs": "float32[step]", "edge_source": "int16[layer, token, k]",
             "edge_weight": "float16[layer, token, k]"}  # fmt: skip
    with ms.TraceWriter(folder / "store", schema=kinds) as writer:
        for steps, logprob in ((2, np.nan), (4200, -0.5)):
            source = rng.integers(0, np.arange(1, steps + 2)[:, None], (1, steps + 1, 32))
            made = {"tokens": np.arange(steps + 1), "logprobs": np.full(steps, logprob), "edge_source": source,
                    "edge_weight": rng.random(source.shape)}  # fmt: skip
            tensors = {name: values.astype(kinds[name].partition("[")[0]) for name, values in made.items()}
            writer.append({"question_id": f"q{steps}", "number": 123_456_789, **tensors})
    others = make_run(folder / "run", folder / "store", {"lstm": {7: [0.5]}})
    return serve_views([view_of(folder / "store", run=others)])


def test_a_nan_probability_is_not_shown_as_a_number(open_page: Open, odd: str):
    page = open_page(f"{odd}#0").page
    page.locator(".tokens .answer").first.focus()
    page.locator("#hint").wait_for()
    assert "id 1" in page.locator("#hint").inner_text() and "probability" not in page.locator("#hint").inner_text()
    page.locator("summary", has_text="scalar fields").click()
    page.locator("td", has_text="123456789").wait_for()


def test_the_strongest_arcs_of_a_long_trace_are_drawn(open_page: Open, odd: str):
    page = open_page(f"{odd}#1").page
    page.locator(".arcs path").first.wait_for(state="attached")
    page.locator("#k").fill("32")
    page.keyboard.press("Enter")
    page.locator(".note", has_text="4,000 strongest of 134,400 arcs").wait_for()
    assert page.locator(".arcs path").count() == 4000


def test_scores_of_other_records_are_reported_and_the_list_is_shown(open_page: Open, odd: str):
    page = open_page(odd).page
    page.locator("#records tbody tr").nth(1).wait_for()
    assert "predictions.parquet" in page.locator("#facts .error").inner_text()
    page.locator("#records a").first.click()
    page.locator("#trace .question").wait_for()
    page.keyboard.press("/")
    wait_until(page, "document.activeElement.id === 'q'")
