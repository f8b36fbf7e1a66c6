"""The page of reads in a real browser: by keyboard, and without external requests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.browser import wait_until

pytest.importorskip("tokenizers", reason="no tokenizer files: pip install 'millstream[reads]'")

import millstream as ms
from millstream.reads.view import view_of

EVIL = "<img/src=x/onerror=alert(1)>"  # what a header may hold
TEXT = "([place, text]) => document.querySelector(place).textContent.includes(text)"


def wait(page: Any, what: str, *given: object) -> None:
    """Wait until this is true in the page."""
    wait_until(page, what, list(given))


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 reads of FASTQ, the first of them 5,000 bases long, and a tokenizer.json beside them."""
    from tokenizers import Tokenizer, models

    rng = np.random.default_rng(5)
    folder = tmp_path_factory.mktemp("reads")
    with (folder / "reads.fq").open("w") as file:
        for number in range(200):
            bases = rng.choice(list("ACGT"), 5000 if number == 0 else 60).astype("S1").tobytes().decode()
            name = EVIL if number == 3 else f"read{number}"
            file.write(f"@{number % 30}|{name}\n{bases}\n+\n{'I' * len(bases)}\n")
    ms.open(folder / "reads.fq", header_regex=r"^(?P<class_id>\d+)\|")
    vocab = {token: number for number, token in enumerate([*"ACGT", "AC", "GT"])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("A", "C"), ("G", "T")]))
    made.save(str(folder / "tokenizer.json"))
    return folder / "reads.fq"


@pytest.fixture(scope="module")
def address(reads: Path, serve_views: Callable[..., str]) -> str:
    return serve_views([view_of(reads, tokenizer=str(reads.parent / "tokenizer.json"))])


def test_a_record_is_looked_up_by_number_and_by_name(address: str, reads: Path, open_page: Callable[..., Any]):
    page, known = open_page(address).page, ms.open(reads)
    wait(page, TEXT, "#name", "0|read0")
    page.keyboard.press("/")
    page.keyboard.type("42")
    page.keyboard.press("Enter")
    wait(page, TEXT, "#name", known[42].name)
    assert page.locator("#sequence .text").inner_text() == known[42].sequence
    page.locator("#wanted").fill(known[77].name)
    page.keyboard.press("Enter")
    wait(page, TEXT, "#record-title", "Record 77")
    page.get_by_role("button", name="Next record").press("Enter")
    wait(page, TEXT, "#name", known[78].name)
    page.locator("#wanted").fill("nobody")
    page.keyboard.press("Enter")
    wait(page, TEXT, "#look-text", "nobody")
    page.reload()  # the address says what was shown
    wait(page, TEXT, "#name", known[78].name)


def test_tokens_are_selected_by_keyboard(address: str, reads: Path, open_page: Callable[..., Any]):
    page, read = open_page(address + "#number=5").page, ms.open(reads)[5]
    wait(page, TEXT, "#readout", "tokenizer.json")  # the one of the command line comes first
    page.locator("#tokenizer").select_option("kmer(6, stride=6)")
    wait(page, TEXT, "#readout", "kmer(6, stride=6): 10 tokens")
    page.locator("#sequence").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#readout").inner_text().startswith(f"{read.sequence[6:12]}: id ")
    assert page.locator("#sequence .now").inner_text() == read.sequence[6:12]
    page.locator("#sequence [data-token='3']").hover()
    assert f"{read.sequence[18:24]}: id" in page.locator("#readout").inner_text()
    page.mouse.move(0, 0)
    page.locator("#tokenizer").select_option("other")
    page.keyboard.type("kmer(4, stride=4)")
    page.keyboard.press("Enter")
    wait(page, TEXT, "#readout", "kmer(4, stride=4): 15 tokens")
    page.locator("#typed").fill(f"hf({reads.parent})")
    page.keyboard.press("Enter")
    wait(page, TEXT, "#readout", "--tokenizer")
    assert page.locator("#sequence .text").inner_text() == read.sequence
    page.get_by_role("checkbox", name="reverse complement").press("Space")
    wait(page, TEXT, "#sequence-text", "reverse complement")
    turned = read.sequence[::-1].translate(str.maketrans("ACGT", "TGCA"))
    assert page.locator("#sequence .text").inner_text() == turned


def test_a_long_record_is_shown_in_windows(address: str, reads: Path, open_page: Callable[..., Any]):
    page, read = open_page(address).page, ms.open(reads)[0]
    wait(page, TEXT, "#sequence-text", "Bases 0 to 1,200 of 5,000")
    page.get_by_role("button", name="Next bases").press("Enter")
    wait(page, TEXT, "#sequence-text", "Bases 1,200 to 2,400")
    page.locator("#from").fill("4800")
    page.locator("#from").press("Enter")
    wait(page, TEXT, "#sequence-text", "Bases 4,800 to 5,000")
    assert "".join(page.locator("#sequence .text").all_inner_texts()) == read.sequence[4800:]


def test_classes_are_searched_and_reads_listed(address: str, open_page: Callable[..., Any], tmp_path: Path):
    page = open_page(address).page
    wait(page, TEXT, "#classes-text", "30 values of class_id")
    page.get_by_role("button", name="Less common").press("Enter")
    wait(page, TEXT, "#class-place", "13 to 24 of 30")
    page.locator("#search").focus()
    page.keyboard.type("29")
    wait(page, TEXT, "#classes-text", "1 fit, of 6 reads")
    page.get_by_role("button", name="Next reads").press("Enter")
    wait(page, TEXT, "#list-text", "to 29 of 200")
    page.get_by_role("button", name="Show record 20").press("Enter")
    wait(page, TEXT, "#name", "20|read20")
    page.wait_for_selector("#gc svg")
    assert page.locator("#lengths rect").count() > 0 and page.locator("#quality path").count() == 2
    page.screenshot(path=tmp_path / "reads.png", full_page=True)
    assert (tmp_path / "reads.png").stat().st_size > 20_000


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1440, "dark")])
def test_reads_fit_a_phone_and_header_text_does_not_run(
    address: str, open_page: Callable[..., Any], width: int, scheme: str
):
    opened = open_page(address + "#number=3", width=width, scheme=scheme)
    wait(opened.page, TEXT, "#name", EVIL)
    opened.page.wait_for_selector("#class-rows li")
    assert opened.never_scrolls_sideways()
    assert opened.page.locator("main img").count() == 0
