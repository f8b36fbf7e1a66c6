"""Verdicts of people: appended by the page, shown in the explorer, used by `label`."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import millstream as ms
from millstream.errors import BadSetting, BadSource
from millstream.traces.label import label
from millstream.traces.store.rewrite import merge
from millstream.traces.verdicts import add_verdict, agreement_of, answer_hash
from millstream.traces.view import labelling_view_of, view_of
from millstream.view import Query, View, plain
from millstream.view.server import views_of
from support.commands import run_here
from support.making_small import write_reads
from support.querying_traces import querying

ANSWERS = [
    "Paris",
    "London",
    "the city of light",
    "I don't know",
    "Lyon or Paris, or maybe some other place somewhere in the north or the far south",
    "",
]


def write(path: Path, answers: Sequence[str] = ANSWERS, *, first: int = 0) -> Path:
    with ms.TraceWriter(path, shard_records=3) as writer:
        for number, text in enumerate(answers, first):
            row = {"question_id": f"q{number}", "question": f"Capital of {number}?", "generated_answer": text}
            status = "error" if not text else "ok"
            writer.append({**row, "aliases": ["Paris"], "status": status, "hidden": np.zeros(3, np.float16)})
    return path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write(tmp_path / "s")


def asking(view: View) -> Callable[..., Any]:
    def ask(name: str, **values: object) -> Any:
        handlers = {**view.answers, **view.actions}
        return plain(handlers[name](Query({key: str(value) for key, value in values.items() if value is not None})))

    return ask


def judge(ask: Callable[..., Any], shown: Mapping[str, Any], verdict: str | None) -> None:
    ask("set", number=shown["number"], id=shown["id"], hash=shown["hash"], verdict=verdict)


def labels(store: Path, name: str) -> list[Any]:
    return pq.read_table(store / "labels.parquet").column(name).to_pylist()


def test_answers_come_one_after_another_until_all_have_a_verdict(store: Path) -> None:
    ask = asking(labelling_view_of(store))
    assert ask("about")["records"] == 5  # not the failed one
    seen: list[str] = []
    shown = ask("answer", order="stored")
    while shown["done"] < shown["total"]:
        seen.append(shown["answer"])
        judge(ask, shown, "right")
        shown = ask("answer", order="stored", after=shown["place"])
    assert seen == ANSWERS[:5] and shown["total"] == 5
    shuffled = [ask("answer", place=place)["answer"] for place in range(5)]
    assert sorted(shuffled) == sorted(seen) and shuffled != seen
    assert [ask("answer", place=place)["answer"] for place in range(5)] == shuffled


def test_a_page_shows_what_is_needed_to_judge_but_no_verdict_of_a_rule(store: Path) -> None:
    label(store)
    ask = asking(labelling_view_of(store))
    shown = ask("answer", order="stored", place=1)
    assert (shown["question"], shown["references"], shown["answer"]) == ("Capital of 1?", ["Paris"], "London")
    assert "verdict" not in shown and shown["human"] is None
    assert ask("about")["verdicts"] == {"right": 1, "wrong": 2, "refused": 1, "ambiguous": 1}
    assert ask("answer", verdict="ambiguous")["answer"] == ANSWERS[4]
    assert ask("answer", verdict="none of them") == {"total": 0, "done": 0, "place": 0}
    with pytest.raises(BadSetting, match="order=odd"):
        ask("answer", order="odd")


def test_a_verdict_can_be_replaced_and_taken_back_and_every_line_stays(store: Path) -> None:
    ask = asking(labelling_view_of(store))
    for verdict in ("right", "wrong", "unsure", None, "right"):
        judge(ask, ask("answer", order="stored", place=1), verdict)
        assert ask("answer", order="stored", place=1)["human"] == verdict
    lines = [json.loads(line) for line in (store / "verdicts.jsonl").read_text().splitlines()]
    assert [line["verdict"] for line in lines] == ["right", "wrong", "unsure", None, "right"]
    assert {line["id"] for line in lines} == {"q1"} and {line["answer"] for line in lines} == {answer_hash("London")}
    with pytest.raises(BadSetting, match="verdict=maybe"):
        judge(ask, ask("answer", order="stored", place=1), "maybe")


def test_two_windows_see_the_verdicts_of_each_other(store: Path) -> None:
    one, other = asking(labelling_view_of(store)), asking(labelling_view_of(store))
    first = one("answer", order="stored")
    judge(one, first, "wrong")
    second = other("answer", order="stored")
    assert (first["answer"], second["answer"], second["done"]) == ("Paris", "London", 1)
    judge(other, second, "right")
    assert one("answer", order="stored")["done"] == 2
    judge(other, {**first}, "right")
    assert one("answer", order="stored", place=0)["human"] == "right"


def test_a_verdict_on_another_answer_is_neither_taken_nor_used(store: Path, tmp_path: Path) -> None:
    ask = asking(labelling_view_of(store))
    shown = ask("answer", order="stored", place=1)
    with pytest.raises(BadSource, match="Reload"):
        judge(ask, {**shown, "hash": answer_hash("Rome")}, "right")
    add_verdict(store, "q1", "Rome", "right")
    assert label(store).human == 0 and labels(store, "source")[1] == "rule"
    assert ask("answer", order="stored", place=1)["human"] is None


def test_the_verdict_of_a_person_replaces_that_of_the_rule(store: Path) -> None:
    add_verdict(store, "q0", ANSWERS[0], "wrong")
    add_verdict(store, "q1", ANSWERS[1], "wrong")
    add_verdict(store, "q2", ANSWERS[2], "right")
    add_verdict(store, "q3", ANSWERS[3], "unsure")
    code, _, err = run_here("label", store)
    assert code == 0, err
    assert labels(store, "verdict") == ["wrong", "wrong", "right", "ambiguous", "ambiguous", None]
    assert labels(store, "source") == ["human"] * 4 + ["rule", None]
    assert labels(store, "label") == [1, 1, 0, None, None, None]
    assert "verdicts of people replace those of the rule: 4" in err
    assert "people and the rule default agree on 33.3% of 3 answers" in err
    add_verdict(store, "q0", ANSWERS[0], None)
    assert label(store).human == 3 and labels(store, "verdict")[0] == "right"


def test_damaged_lines_are_ignored_and_told(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_verdict(store, "q0", ANSWERS[0], "wrong")
    file = store / "verdicts.jsonl"
    file.write_bytes(file.read_bytes() + b'{"id": "q1", "verd')
    add_verdict(store, "q2", ANSWERS[2], "right")
    assert label(store).human == 2
    assert "verdicts.jsonl: 1 damaged line ignored" in capsys.readouterr().err


def test_the_explorer_shows_the_verdict_of_a_person(store: Path) -> None:
    query = querying(store)
    assert {row["human"] for row in query("list")["rows"]} == {None}
    add_verdict(store, "q1", ANSWERS[1], "unsure")
    assert [row["human"] for row in query("list")["rows"]] == [None, "unsure", None, None, None, None]
    assert query("trace", number=1)["human"] == "unsure" and query("trace", number=2)["human"] is None


def test_merged_and_cut_stores_keep_the_verdicts_of_their_records(store: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", ["Rome", "Paris"], first=10)
    add_verdict(store, "q1", "London", "right")
    add_verdict(store, "q2", ANSWERS[2], "right")
    add_verdict(other, "q10", "Rome", "unsure")
    merge([store, other], tmp_path / "merged")
    assert label(tmp_path / "merged").human == 3
    code, _, err = run_here(
        "subset", tmp_path / "merged", tmp_path / "cut", "--where", "question_id in ('q1', 'q10', 'q11')"
    )
    assert code == 0, err
    assert label(tmp_path / "cut").human == 2 and labels(tmp_path / "cut", "verdict") == ["right", "ambiguous", "right"]


def test_only_local_stores_with_answers_can_be_judged(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "bare") as writer:
        writer.append({"question_id": "q", "hidden": np.zeros(3)})
    with pytest.raises(BadSource, match="no answers"):
        labelling_view_of(tmp_path / "bare")
    write_reads(tmp_path / "reads.fa", range(3))
    with pytest.raises(BadSetting, match="--label"):
        views_of(tmp_path / "reads.fa", label=True, notify=print)
    (write(tmp_path / "damaged") / "labels.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadSource, match="millstream label"):
        labelling_view_of(tmp_path / "damaged")
    assert [view.name for view in views_of(write(tmp_path / "s"), label=True, notify=print)] == ["label", "traces"]


def test_agreement_is_that_of_the_textbook() -> None:
    ours, theirs = np.repeat([0, 0, 1, 1, 2], [20, 5, 10, 15, 7]), np.repeat([0, 1, 0, 1, 0], [20, 5, 10, 15, 7])
    found = agreement_of("a", ours.astype(np.int8), "b", theirs.astype(np.int8))
    assert (found.records, found.agreement, found.kappa) == (50, 0.7, pytest.approx(0.4))
    same = agreement_of("a", np.zeros(3, np.int8), "b", np.zeros(3, np.int8))
    assert (same.agreement, same.kappa) == (1, None)
    assert agreement_of("a", np.full(2, -1, np.int8), "b", np.zeros(2, np.int8)).agreement is None


# -- in the browser

Serve = Callable[[Sequence[View]], str]
Open = Callable[..., Any]


def test_answers_are_judged_by_single_keys(open_page: Open, serve_views: Serve, tmp_path: Path) -> None:
    bad = "<img src=x onerror=\"console.log('ran')\">"
    store = write(tmp_path / "s", [f"{bad} answer {number}" for number in range(8)])
    label(store)
    opened = open_page(serve_views([labelling_view_of(store), view_of(store)]), width=700)
    page = opened.page
    page.locator("#order").select_option("stored")
    page.locator("#text", has_text="answer 0").wait_for()
    page.keyboard.type("rwu")  # faster than the server
    page.locator("#progress", has_text="3 of 8 judged").wait_for()
    assert page.locator("#text").inner_text() == f"{bad} answer 3"
    page.keyboard.press("z")
    page.locator("#text", has_text="answer 2").wait_for()
    page.locator("#progress", has_text="2 of 8").wait_for()
    page.keyboard.press("Backspace")
    page.locator("#text", has_text="answer 1").wait_for()
    page.keyboard.press("r")
    page.locator("#text", has_text="answer 2").wait_for()
    page.keyboard.press("ArrowLeft")
    page.locator("#choices [data-verdict=right][aria-pressed=true]").wait_for()
    page.locator("#choices [data-verdict=wrong]").click()
    page.locator("#text", has_text="answer 2").wait_for()
    for _ in range(6):
        page.keyboard.press("w")
    page.locator("#finished").wait_for()
    page.locator("#progress", has_text="8 of 8 judged").wait_for()
    assert opened.never_scrolls_sideways()
    assert label(store).human == 8 and labels(store, "verdict") == ["right"] + ["wrong"] * 7
    page.locator("nav a", has_text="Traces").click()
    page.locator("#records .human").nth(7).wait_for()
    assert page.locator("#records .human").first.inner_text() == "right (person)"
    page.locator("#records a").first.click()
    page.locator("#trace .verdict.human", has_text="right (person)").wait_for()


def test_a_verdict_that_cannot_be_written_is_an_error_on_the_page(
    open_page: Open, serve_views: Serve, tmp_path: Path
) -> None:
    store = write(tmp_path / "s")
    opened = open_page(serve_views([labelling_view_of(store)]))
    opened.page.locator("#answer").wait_for()
    (store / "verdicts.jsonl").mkdir()  # cannot be appended to
    opened.page.keyboard.press("r")
    opened.page.locator("#problem .error").wait_for()
    opened.trouble[:] = [line for line in opened.trouble if "400" not in line]
