"""The pages of a run and of reads in a real browser: by keyboard, live, without a word to anyone outside."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

pytest.importorskip("tokenizers", reason="no tokenizer files: pip install 'millstream[reads]'")

import millstream as ms
from millstream.view.reads_view import reads_view
from millstream.view.run_view import run_view

EVIL = "<img/src=x/onerror=alert(1)>"  # what a header may hold


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
    from report.making_read_run import MODELS, make_read_run

    models = {"kmer-linear": MODELS["kmer-linear"]}
    folder = tmp_path_factory.mktemp("run")
    return make_read_run(folder, models=models, asked="kmer-linear,cnn", num_reads=100, parts=("val", "known"))


def circles(page: Any) -> int:
    return page.locator("#first-chart circle").count()


def wait(page: Any, what: str, *given: object) -> None:
    """Until this is true in the page."""
    wait_until(page, what, list(given))


MORE_CIRCLES = "([count]) => document.querySelectorAll('#first-chart circle').length === count"
TEXT = "([place, text]) => document.querySelector(place).textContent.includes(text)"


def test_a_run_is_followed_while_it_trains(run: Path, serve_views: Callable[..., str], open_page: Callable[..., Any]):
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
    assert "at work" in page.locator("#rows tr", has_text="cnn").inner_text()
    page.get_by_role("checkbox", name="kmer-linear").focus()
    page.keyboard.press("Space")
    wait(page, MORE_CIRCLES, 3)
    page.locator("#second").focus()
    page.keyboard.press("r")  # records/s, by its first letter
    assert "records/s" in page.locator("#second-chart svg").get_attribute("aria-label")
    add(run, epoch(3))
    wait(page, MORE_CIRCLES, 4)  # what was switched off stays off
    assert page.evaluate("document.activeElement.id") == "second"


def test_the_report_is_made_by_a_button_and_shown_in_a_frame(
    run: Path, serve_views: Callable[..., str], open_page: Callable[..., Any], tmp_path: Path
):
    os.utime(run / "metrics.jsonl", (time.time() - 3600,) * 2)
    opened = open_page(serve_views([run_view(run)]))
    page = opened.page
    wait(page, TEXT, "#state", "Stopped")
    assert "Not finished: cnn" in page.locator("#text").inner_text()
    page.get_by_role("button", name="Make the report").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#frame:not([hidden])", timeout=60_000)
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


def test_measures_that_differ_in_the_last_digit_are_drawn(
    tmp_path: Path, serve_views: Callable[..., str], open_page: Callable[..., Any]
):
    (tmp_path / "config.yaml").write_text("{}")
    almost = {"val_macro_f1": 1 - 2**-53, "loss": 1e-3 + 2**-62}
    add(tmp_path, epoch(0, **almost), epoch(1, val_macro_f1=1.0, loss=1e-3), epoch(2, val_macro_f1=1.0, loss=1e-3))
    page = open_page(serve_views([run_view(tmp_path)])).page
    wait(page, MORE_CIRCLES, 3)
    assert page.locator("#second-chart circle").count() == 3


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 reads of FASTQ, the first of them 5,000 letters long, and a tokenizer.json beside them."""
    from tokenizers import Tokenizer, models

    rng = np.random.default_rng(5)
    folder = tmp_path_factory.mktemp("reads")
    with (folder / "reads.fq").open("w") as file:
        for number in range(200):
            letters = rng.choice(list("ACGT"), 5000 if number == 0 else 60).astype("S1").tobytes().decode()
            name = EVIL if number == 3 else f"read{number}"
            file.write(f"@{number % 30}|{name}\n{letters}\n+\n{'I' * len(letters)}\n")
    ms.open(folder / "reads.fq", header_regex=r"^(?P<class_id>\d+)\|")
    vocab = {token: number for number, token in enumerate([*"ACGT", "AC", "GT"])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("A", "C"), ("G", "T")]))
    made.save(str(folder / "tokenizer.json"))
    return folder / "reads.fq"


@pytest.fixture(scope="module")
def address(reads: Path, serve_views: Callable[..., str]) -> str:
    return serve_views([reads_view(reads, tokenizer=str(reads.parent / "tokenizer.json"))])


def test_a_record_is_looked_up_by_number_and_by_name(address: str, reads: Path, open_page: Callable[..., Any]):
    page, known = open_page(address).page, ms.open(reads)
    wait(page, TEXT, "#name", "0|read0")
    page.keyboard.press("/")
    page.keyboard.type("42")
    page.keyboard.press("Enter")
    wait(page, TEXT, "#name", known[42].name)
    assert page.locator("#letters .text").inner_text() == known[42].sequence
    page.locator("#wanted").fill(known[77].name)
    page.keyboard.press("Enter")
    wait(page, TEXT, "#record-title", "Record 77")
    page.get_by_role("button", name="The record after").press("Enter")
    wait(page, TEXT, "#name", known[78].name)
    page.locator("#wanted").fill("nobody")
    page.keyboard.press("Enter")
    wait(page, TEXT, "#look-text", "No record is called nobody")
    page.reload()  # the address says what was shown
    wait(page, TEXT, "#name", known[78].name)


def test_tokens_are_chosen_and_walked_by_keyboard(address: str, reads: Path, open_page: Callable[..., Any]):
    page, read = open_page(address + "#number=5").page, ms.open(reads)[5]
    wait(page, TEXT, "#readout", "tokenizer.json")  # the one of the command line comes first
    page.locator("#tokenizer").select_option("kmer(6, stride=6)")
    wait(page, TEXT, "#readout", "kmer(6, stride=6): 10 tokens")
    page.locator("#letters").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#readout").inner_text().startswith(f"{read.sequence[6:12]}: id ")
    assert page.locator("#letters .now").inner_text() == read.sequence[6:12]
    page.locator("#letters [data-token='3']").hover()
    assert f"{read.sequence[18:24]}: id" in page.locator("#readout").inner_text()
    page.mouse.move(0, 0)
    page.locator("#tokenizer").select_option("other")
    page.keyboard.type("kmer(4, stride=4)")
    page.keyboard.press("Enter")
    wait(page, TEXT, "#readout", "kmer(4, stride=4): 15 tokens")
    page.locator("#typed").fill(f"hf({reads.parent})")
    page.keyboard.press("Enter")
    wait(page, TEXT, "#readout", "--tokenizer")
    assert page.locator("#letters .text").inner_text() == read.sequence
    page.get_by_role("checkbox", name="reverse complement").press("Space")
    wait(page, TEXT, "#letters-text", "reverse complement")
    turned = read.sequence[::-1].translate(str.maketrans("ACGT", "TGCA"))
    assert page.locator("#letters .text").inner_text() == turned


def test_a_long_record_is_walked_through_by_windows(address: str, reads: Path, open_page: Callable[..., Any]):
    page, read = open_page(address).page, ms.open(reads)[0]
    wait(page, TEXT, "#letters-text", "Letters 0 to 1,200 of 5,000")
    page.get_by_role("button", name="Letters after").press("Enter")
    wait(page, TEXT, "#letters-text", "Letters 1,200 to 2,400")
    page.locator("#from").fill("4800")
    page.locator("#from").press("Enter")
    wait(page, TEXT, "#letters-text", "Letters 4,800 to 5,000")
    assert "".join(page.locator("#letters .text").all_inner_texts()) == read.sequence[4800:]


def test_classes_are_searched_and_reads_listed(address: str, open_page: Callable[..., Any], tmp_path: Path):
    page = open_page(address).page
    wait(page, TEXT, "#classes-text", "30 values of class_id")
    page.get_by_role("button", name="Rarer").press("Enter")
    wait(page, TEXT, "#class-place", "13 to 24 of 30")
    page.locator("#search").focus()
    page.keyboard.type("29")
    wait(page, TEXT, "#classes-text", "1 fit, of 6 reads")
    page.get_by_role("button", name="Reads after").press("Enter")
    wait(page, TEXT, "#list-text", "to 29 of 200")
    page.get_by_role("button", name="Show record 20").press("Enter")
    wait(page, TEXT, "#name", "20|read20")
    page.wait_for_selector("#gc svg")
    assert page.locator("#lengths rect").count() > 0 and page.locator("#quality path").count() == 2
    page.screenshot(path=tmp_path / "reads.png", full_page=True)
    assert (tmp_path / "reads.png").stat().st_size > 20_000


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (390, "dark"), (1440, "dark")])
def test_reads_fit_a_phone_and_texts_of_headers_do_not_run(
    address: str, open_page: Callable[..., Any], width: int, scheme: str
):
    opened = open_page(address + "#number=3", width=width, scheme=scheme)
    wait(opened.page, TEXT, "#name", EVIL)
    opened.page.wait_for_selector("#class-rows li")
    assert opened.never_scrolls_sideways()
    assert opened.page.locator("main img").count() == 0
