"""The explorer shows the spans of an answer, and the scores of its tokens, where they are in the text."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millstream as ms
from millstream.core.tables import publish_table
from millstream.traces.label import label
from millstream.traces.view import view_of
from millstream.view import View
from support.making_spans import offsets_of
from support.querying_traces import querying

Serve = Callable[[Sequence[View]], str]
Open = Callable[..., Any]
EVIL = "<img src=x onerror=\"console.log('ran')\">"


def make_store(folder: Path) -> tuple[Path, Path]:
    """A store of three answers, and a run with scores of the tokens of the first two, by two seeds."""
    emoji = "👍".encode()
    text, offsets = offsets_of([b"ja ", emoji[:2], emoji[2:], b" no", EVIL.encode()])
    with ms.TraceWriter(folder / "s") as writer:
        for number, spans in enumerate([[{"start": 3, "end": 6, "label": EVIL}], [], None]):
            writer.append(
                {
                    "question_id": f"q{number}",
                    "question": "?",
                    "generated_answer": text,
                    "spans": None if spans is None else json.dumps(spans),
                    "offsets": np.array(offsets, np.int32),
                }
            )
    label(folder / "s", rule="spans")
    (folder / "run").mkdir()
    scores = [[0.1, 0.2, 0.6, 0.9, 0.0, 0.0], [0.3, 0.2, 0.8, 0.9, 0.0, 0.0]]
    models = (("token-probe", 1), ("token-logprob", -5), ("length", 0))
    rows = [
        {"part": "test", "record": record, "question_id": f"q{record}", "label": 1, "model": model, "seed": seed,
         "score": 0.9, "token_scores": [sign * one for one in scores[seed]] if sign else None}
        for record in (0, 1) for seed in (0, 1) for model, sign in models
    ]  # fmt: skip
    publish_table(folder / "run" / "predictions.parquet", pa.Table.from_pylist(rows))
    (folder / "run" / "config.yaml").write_text("{}")
    return folder / "s", folder / "run"


def test_an_answer_is_cut_at_tokens_and_spans_without_splitting_characters(tmp_path: Path):
    store, run = make_store(tmp_path)
    query = querying(store, run=run)
    query("list")
    marks = query("trace", number=0)["marks"]
    assert [(one["text"], one["span"]) for one in marks["pieces"]] == [
        ("ja ", None), ("👍", EVIL), (" n", EVIL), ("o", None), (EVIL, None),
    ]  # fmt: skip
    assert [one["scores"]["token-probe"] for one in marks["pieces"]] == pytest.approx([0.2, 0.7, 0.9, 0.9, 0.0])
    assert marks["is_annotated"] and marks["scales"]["token-probe"] == [0, 1]
    low, high = marks["scales"]["token-logprob"]
    assert -4.6 < low < high <= 0 and list(marks["scales"]) == ["token-probe", "token-logprob"]
    second = query("trace", number=1)["marks"]
    assert second["is_annotated"] and all(one["span"] is None for one in second["pieces"])
    assert query("trace", number=2)["marks"] is None  # neither annotated nor scored


def test_without_a_run_or_labels_the_rest_is_shown(tmp_path: Path):
    store, run = make_store(tmp_path)
    query = querying(store)
    query("list")
    marks = query("trace", number=0)["marks"]
    assert marks["scales"] == {} and [one["text"] for one in marks["pieces"] if one["span"] is not None] == ["👍", " n"]
    (store / "labels.parquet").unlink()
    query = querying(store, run=run)
    query("list")
    marks = query("trace", number=0)["marks"]
    assert not marks["is_annotated"] and all(one["span"] is None for one in marks["pieces"])


def test_the_page_underlines_spans_colours_tokens_and_runs_no_text(serve_views: Serve, open_page: Open, tmp_path: Path):
    store, run = make_store(tmp_path)
    opened = open_page(f"{serve_views([view_of(store, run=run)])}#0")
    page = opened.page
    pieces = page.locator(".given-answer .piece")
    pieces.first.wait_for()
    assert pieces.all_inner_texts() == ["ja ", "👍", " n", "o", EVIL]
    assert page.locator(".given-answer .piece.wrong").all_inner_texts() == ["👍", " n"]
    heat = "all => all.map((one) => one.style.getPropertyValue('--heat'))"
    before = pieces.evaluate_all(heat)
    assert len(set(before)) > 2
    assert EVIL in (pieces.nth(1).get_attribute("title") or "") and "0.7" in (
        pieces.nth(1).get_attribute("title") or ""
    )
    page.locator("#marks").select_option("token-logprob")
    assert pieces.evaluate_all(heat) != before
    assert "annotated as wrong" in page.locator("#marks-key").inner_text()
    assert page.locator(".given-answer img").count() == 0 and opened.trouble == []
