"""Spans of characters become labels of tokens, exactly, whatever the bytes of tokens; verdicts follow from spans."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream.errors import BadSetting, BadSource
from millstream.traces.label import label
from millstream.traces.spans import label_tokens
from support.commands import run_here
from support.making_spans import offsets_of, write_spans

TEXTS = st.text(st.sampled_from("ab ñé👍🏽\u0301\u200d日本👩‍💻"), min_size=1, max_size=30)


@given(TEXTS, st.data())
def test_a_token_is_wrong_if_one_of_its_bytes_is_of_a_character_in_a_span(text: str, data: st.DataObject):
    encoded = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(encoded) - 1)), max_size=12)))
    edges = [0, *(cut for cut in cuts if cut < len(encoded)), len(encoded)]
    pieces = [encoded[a:b] for a, b in pairwise(edges)]
    places = st.integers(0, len(text))
    spans = [(min(pair), max(pair), None) for pair in data.draw(st.lists(st.tuples(places, places), max_size=3))]
    _, offsets = offsets_of(pieces, more=2)
    owner = [number for number, character in enumerate(text) for _ in character.encode()]
    in_span = [any(start <= number < end for start, end, _ in spans) for number in owner]
    wanted = [int(any(in_span[a:b])) for a, b in pairwise(edges)]
    assert label_tokens(spans, np.array(offsets)).tolist() == [*wanted, -1, -1]


def test_the_tokens_of_a_byte_level_tokenizer_that_split_an_emoji_are_all_wrong():
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(
        {letter: number for number, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}, []
    ))  # fmt: skip
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = "ja 👍 no é"
    encoded = bpe.encode(text)  # one byte per token
    labels = label_tokens([(3, 4, None)], np.array(encoded.offsets))
    assert np.flatnonzero(labels).tolist() == [3, 4, 5, 6]  # the four bytes of the emoji
    assert offsets_of([bytes([byte]) for byte in text.encode()], more=0)[1] == encoded.offsets


def written(store: Path) -> pa.Table:
    return pq.read_table(store / "labels.parquet")


def test_replayed_answers_are_labelled_token_by_token_to_the_byte(tmp_path: Path):
    """From a questions file to labels, with a byte-level model: the labelled tokens are those with bytes of a span."""
    pytest.importorskip("transformers")
    from support.tiny_models import make_model

    model = make_model("llama", tmp_path)
    answers = ["the capital 👩‍💻 of France", "Zoe\u0308 jumps over 日本 dogs", "the quick brown fox"]
    spans = [[[12, 13]], [[2, 4], [16, 17]], []]  # a part of an emoji; a combining mark; one of two characters
    rows = [
        {"id": str(number), "question": f"who {number}?", "generated_answer": answer, "spans": own}
        for number, (answer, own) in enumerate(zip(answers, spans, strict=True))
    ]
    file = write_file(tmp_path / "answers.jsonl", rows)
    code, _, errors = run_here("extract", file, tmp_path / "s", f"model={model}", "tier=answer", "prompt=plain")
    assert code == 0, errors
    label(tmp_path / "s", rule="spans")
    by_id = {row["record_id"]: row for row in written(tmp_path / "s").to_pylist()}
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    for trace in ms.open(tmp_path / "s"):
        number = int(trace["question_id"])
        answer, labels = trace["generated_answer"], by_id[trace["record_id"]]["token_labels"]
        assert answer == answers[number] and len(labels) == trace["answer_hidden"].shape[1] == len(trace["logprobs"])
        pieces = tokenizer.convert_ids_to_tokens(trace["tokens"][trace["prompt_len"] :].tolist())
        decode = {letter: byte for byte, letter in _byte_letters().items()}
        data = [bytes(decode[letter] for letter in piece) for piece in pieces]
        owner = [place for place, character in enumerate(f" {answer}") for _ in character.encode()]
        wrong = [any(start <= place - 1 < end for start, end in spans[number]) for place in owner]
        assert b"".join(data).decode() == f" {answer}"
        ends = np.cumsum([len(piece) for piece in data]).tolist()
        wanted = [int(any(wrong[end - len(piece) : end])) for end, piece in zip(ends, data, strict=True)]
        assert labels[1:] == wanted[1:] and labels[0] == (None if data[0] == b" " else wanted[0])  # before the answer


def _byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {**{byte: chr(byte) for byte in kept}, **{byte: chr(256 + place) for place, byte in enumerate(others)}}


def test_labels_have_spans_and_token_labels_beside_the_verdict(tmp_path: Path):
    traces = write_spans(tmp_path / "s", 6)
    done = label(tmp_path / "s", rule="spans")
    table = written(tmp_path / "s")
    assert table.column("verdict").to_pylist() == ["right", "wrong"] * 6
    assert done.counts["right"] == done.counts["wrong"] == 6 and str(done.rule) == "spans"
    for row, trace in zip(table.to_pylist(), traces, strict=True):
        spans = json.loads(trace["spans"])
        assert row["spans"] == spans
        assert len(row["token_labels"]) == len(trace["offsets"]) and row["token_labels"][-1] is None
        for wrong, (start, end) in zip(row["token_labels"][:-1], trace["offsets"].tolist(), strict=False):
            assert wrong == any(start < span["end"] and end > span["start"] for span in spans)


def write_file(file: Path, rows: list[dict[str, object]]) -> Path:
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join("" if v is None else str(v) for v in row.values()) for row in rows)]
        file.write_text("\n".join(lines))
    else:
        file.write_text("\n".join(map(json.dumps, rows)))
    return file


BY_ID = [{"id": "q0", "spans": [[0, 3]]}, {"id": "q0#1", "spans": []}, {"id": "q1", "spans": None}]
RAGTRUTH = [
    {"id": "q0", "labels": [{"start": 0, "end": 3, "label_type": "Evident Conflict"}]},
    {"id": "q0#1", "labels": []},
]
BY_ROW = [
    {"record_id": "q0", "start": 0, "end": 2},
    {"record_id": "q0", "start": 1, "end": 3},
    {"record_id": "q0#1", "start": None, "end": None},
]


@pytest.mark.parametrize(
    ("name", "rows"),
    [("a.jsonl", BY_ID), ("a.parquet", BY_ID), ("a.jsonl", RAGTRUTH), ("a.csv", BY_ROW), ("a.parquet", BY_ROW)],
)
def test_spans_come_from_a_file_of_lists_or_with_a_row_per_span(
    tmp_path: Path, name: str, rows: list[dict[str, object]]
):
    write_spans(tmp_path / "s", 3)
    label(tmp_path / "s", rule="spans", spans=write_file(tmp_path / name, rows))
    table = written(tmp_path / "s")
    assert table.column("verdict").to_pylist() == ["wrong", "right", None, None, None, None]
    labels = table.column("token_labels").to_pylist()
    assert labels[0][:2] == [1, 0] and set(labels[1]) == {0, None} and labels[2:] == [None] * 4


def test_token_labels_are_carried_along_by_merge(tmp_path: Path):
    write_spans(tmp_path / "s", 3)
    label(tmp_path / "s", rule="spans")
    code, _, _ = run_here("merge", tmp_path / "s", tmp_path / "m")
    assert code == 0
    for name in ("spans", "token_labels"):
        assert written(tmp_path / "m").column(name).to_pylist() == written(tmp_path / "s").column(name).to_pylist()


def test_spans_of_a_whole_text_are_moved_into_the_part_that_is_the_answer(tmp_path: Path):
    whole = "Paris? No. 👍 It is Lyon. It is."
    texts = ["It is Lyon.", "It is", whole, ""]  # once, in two places, all of it, nowhere
    with ms.TraceWriter(tmp_path / "s") as writer:
        for number, text in enumerate(texts):
            writer.append(
                {
                    "question_id": str(number),
                    "generated_answer": text,
                    "generated_text": whole,
                    "spans": json.dumps([[0, 5], [16, 23], [25, 30]]),
                    "offsets": np.array([(0, 5), (5, min(11, max(5, len(text))))], np.int32),
                }
            )
    label(tmp_path / "s", rule="spans")
    rows = written(tmp_path / "s").to_pylist()
    found = [row["spans"] and [(one["start"], one["end"]) for one in row["spans"]] for row in rows]
    start = whole.index(texts[0])
    assert found == [[(16 - start, 23 - start)], None, [(0, 5), (16, 23), (25, 30)], None]
    assert [row["verdict"] for row in rows] == ["wrong", None, "wrong", None]
    assert rows[0]["token_labels"] == [1, 1] and rows[2]["token_labels"] == [1, 0]


def test_records_without_offsets_have_a_verdict_and_no_token_labels(tmp_path: Path):
    with ms.TraceWriter(tmp_path / "s") as writer:
        writer.append({"question_id": "a", "generated_answer": "ja 👍", "spans": "[[3, 4]]"})
    label(tmp_path / "s", rule="spans")
    assert written(tmp_path / "s").column("verdict").to_pylist() == ["wrong"]
    assert written(tmp_path / "s").column("token_labels").to_pylist() == [None]


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([{"id": "q0", "spans": [[0, 999]]}], "character 999"),
        ([{"id": "q0", "spans": "no list"}], "must be a list"),
        ([{"id": "q0", "spans": [[3, 1]]}], "must be a list"),
        ([{"id": "q0", "text": "x"}], "expected record_id or id"),
        ([{"spans": [[0, 1]]}], "expected record_id or id"),
        ([{"id": "q0", "spans": []}, {"id": "q0", "spans": []}], "has spans already"),
        ([{"id": "zzz", "spans": []}], "no record has spans"),
        ([{"id": "q0", "start": 1.5, "end": 2}], "must be a list"),
    ],
)
def test_a_bad_file_of_spans_is_one_line_with_the_place(tmp_path: Path, rows: list[dict[str, object]], what: str):
    write_spans(tmp_path / "s", 2)
    file = write_file(tmp_path / "a.jsonl", rows)
    with pytest.raises(BadSource, match=what) as raised:
        label(tmp_path / "s", rule="spans", spans=file)
    assert str(file) in str(raised.value) and "\n" not in str(raised.value)
    assert not (tmp_path / "s" / "labels.parquet").exists()


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path):
    write_spans(tmp_path / "s", 2)
    for settings in (
        {"spans": "a.jsonl"},
        {"rule": "spans", "references": "a.jsonl"},
        {"rule": "spans", "threshold": 1},
    ):
        with pytest.raises(BadSetting):
            label(tmp_path / "s", **settings)
    with ms.TraceWriter(tmp_path / "none") as writer:
        writer.append({"question_id": "a", "generated_answer": "x"})
    with pytest.raises(BadSource, match="spans=FILE"):
        label(tmp_path / "none", rule="spans")
