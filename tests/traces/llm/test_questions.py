"""Question sets in all known layouts give the same questions; repeats are left out and counted."""

import csv
import json
import os
import re
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.errors import BadSetting, BadSource, MissingExtra
from millstream.traces.llm.questions import Given, Question, QuestionSet, Span, read_questions
from millstream.traces.scores import normalise
from support.effort import num_examples

DATA = Path(os.environ.get("MILLSTREAM_DATA", ""))

Rows = Sequence[Mapping[str, Any]]


def write_lines(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_json(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return path


def write_csv(path: Path, rows: Rows) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path: Path, rows: Rows) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def many(count: int) -> list[Question]:
    return [Question(f"q{i}", f"what is {i} times {i}?", str(i * i), (str(i * i),)) for i in range(count)]


def ids(found: QuestionSet) -> list[str]:
    return [question.id for question in found.questions]


# -- layouts

ROWS = [
    {
        "id": "q0",
        "question": "Who mills the corn, says “Zoë”?",
        "answer": "the miller",
        "aliases": ["the miller", "she"],
    },
    {"id": "q1", "question": "Where, exactly?\nAt sea?", "answer": "mill", "aliases": ["mill"]},
]
EXPECTED = [
    Question("q0", "Who mills the corn, says “Zoë”?", "the miller", ("the miller", "she")),
    Question("q1", "Where, exactly?\nAt sea?", "mill", ("mill",)),
]
WRITERS = {
    "q.jsonl": write_lines,
    "q.json": write_json,
    "q.csv": write_csv,
    "q.tsv": write_csv,
    "q.parquet": write_parquet,
    "q": write_lines,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_file_format_gives_the_same_questions(name: str, tmp_path: Path):
    path = WRITERS[name](tmp_path / name, ROWS)
    assert read_questions(path).questions == EXPECTED
    assert read_questions(str(path)).questions == EXPECTED


@pytest.mark.parametrize("name", ["q.jsonl", "q.json", "q.csv"])
def test_a_byte_order_mark_is_ignored(name: str, tmp_path: Path):
    path = WRITERS[name](tmp_path / name, ROWS)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_questions(path).questions == EXPECTED


TRIVIA = {
    "Question": "Which city is the capital of France?",
    "QuestionId": "tc_1",
    "Answer": {
        "Aliases": ["Paris", "Paname"],
        "HumanAnswers": ["City of Light"],
        "MatchedWikiEntityName": "Paris",
        "NormalizedAliases": ["paname", "paris"],
        "NormalizedValue": "paris",
        "Type": "WikipediaEntity",
        "Value": "PARIS",
    },
}


def test_the_official_file_of_triviaqa_has_its_questions_under_data(tmp_path: Path):
    path = write_json(tmp_path / "dev.json", {"Data": [TRIVIA], "Domain": "unfiltered-web", "Version": 1.0})
    (question,) = read_questions(path).questions
    assert (question.id, question.question) == ("tc_1", "Which city is the capital of France?")
    assert question.answer == "PARIS"
    assert question.aliases == ("PARIS", "Paris", "Paname", "City of Light", "paname", "paris")


LAYOUTS: dict[str, tuple[dict[str, Any], Question]] = {
    "TriviaQA of the hub": (
        {
            "question": "Capital?",
            "question_id": "tc_2",
            "answer": {"value": "Paris", "aliases": ["Paname"], "normalized_aliases": ["paname", "paris"]},
        },
        Question("tc_2", "Capital?", "Paris", ("Paris", "Paname", "paname", "paris")),
    ),
    "NQ-open": (
        {"question": "last time on the moon", "answer": ["14 December 1972 UTC", "December 1972"]},
        Question("q-0", "last time on the moon", "14 December 1972 UTC", ("14 December 1972 UTC", "December 1972")),
    ),
    "WebQuestions": (
        {"url": "http://www.freebase.com/view/en/x", "question": "what is it?", "answers": ["Jazz", "Blues"]},
        Question("q-0", "what is it?", "Jazz", ("Jazz", "Blues")),
    ),
    "PopQA": (
        {"id": 4222362, "prop": "occupation", "obj": "politician", "question": "What is his job?"}
        | {"possible_answers": '["politician", "political leader", "polit."]'},
        Question(
            "4222362", "What is his job?", "politician", ("politician", "political leader", "polit."), "occupation"
        ),
    ),
    "TruthfulQA": (
        {"type": "Adversarial", "category": "Law", "question": "Is it legal?", "best_answer": "No"}
        | {"correct_answers": ["It is not", "No"], "incorrect_answers": ["Yes"]},
        Question("q-0", "Is it legal?", "No", ("No", "It is not"), "Law"),
    ),
    "SimpleQA": (
        {"problem": "Who got it in 2010?", "answer": "Michio Sugeno"},
        Question("q-0", "Who got it in 2010?", "Michio Sugeno", ("Michio Sugeno",)),
    ),
}


@pytest.mark.parametrize("name", ["q.jsonl", "q.parquet"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_known_question_sets_need_no_settings(layout: str, name: str, tmp_path: Path):
    row, expected = LAYOUTS[layout]
    path = WRITERS[name](tmp_path / name, [row])
    assert read_questions(path).questions == [expected]


@pytest.mark.parametrize("layout", ["PopQA", "SimpleQA"])
def test_known_question_sets_can_be_csv_or_tsv(layout: str, tmp_path: Path):
    row, expected = LAYOUTS[layout]
    for name in ("q.csv", "q.tsv"):
        assert read_questions(write_csv(tmp_path / name, [row])).questions == [expected]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('["a", "b"]', ("a", "b")),
        ("['a', \"b's\"]", ("a", "b's")),
        ("[]", ()),
        ("", ()),
        ("[sic] a", ("[sic] a",)),
        ("[not a list]", ("[not a list]",)),
        ("a, b", ("a, b",)),
    ],
    ids=["json", "python", "empty list", "empty", "begins like one", "only looks like one", "plain"],
)
def test_a_list_written_as_text_is_parsed_and_other_text_is_kept(written: str, read: tuple[str, ...], tmp_path: Path):
    path = write_csv(tmp_path / "q.csv", [{"question": "who?", "possible_answers": written}])
    (question,) = read_questions(path).questions
    assert question.aliases == read
    assert question.answer == (read[0] if read else None)


def test_numbers_as_ids_and_answers_become_text(tmp_path: Path):
    path = write_lines(tmp_path / "q.jsonl", [{"id": 7, "question": "six times seven?", "answer": 42}])
    assert read_questions(path).questions == [Question("7", "six times seven?", "42", ("42",))]


def test_kind_and_exposure_are_kept(tmp_path: Path):
    path = write_lines(tmp_path / "q.jsonl", [{"question": "who?", "kind": "person", "exposure": "never"}])
    (question,) = read_questions(path).questions
    assert (question.kind, question.exposure, question.answer) == ("person", "never", None)


def test_lines_may_have_different_keys(tmp_path: Path):
    rows = [{"question": "a b?"}, {"id": "x", "question": "c d?", "aliases": ["e"]}, {"question": "f?", "answer": "g"}]
    path = write_lines(tmp_path / "some.jsonl", rows)
    assert read_questions(path).questions == [
        Question("some-0", "a b?"),
        Question("x", "c d?", "e", ("e",)),
        Question("some-2", "f?", "g", ("g",)),
    ]


def test_missing_ids_are_made_from_file_name_and_row(tmp_path: Path):
    rows = [{"question": f"number {i}?"} for i in range(3)]
    assert ids(read_questions(write_lines(tmp_path / "nq.dev.jsonl", rows))) == ["nq-0", "nq-1", "nq-2"]


def test_generated_ids_do_not_depend_on_the_sample(tmp_path: Path):
    path = write_lines(tmp_path / "nq.jsonl", [{"question": f"number {i}?"} for i in range(20)])
    whole = {question.question: question.id for question in read_questions(path).questions}
    some = read_questions(path, num_samples=5, shuffle_seed=1).questions
    assert {question.question: question.id for question in some}.items() <= whole.items()


def test_a_list_of_questions_is_kept_unchanged():
    assert read_questions(many(3)).questions == many(3)


def test_the_built_in_set_has_questions_with_answers():
    found = read_questions("facts")
    assert len(found.questions) > 100
    assert all(question.answer in question.aliases for question in found.questions)
    assert (found.same_id, found.same_text) == (0, 0)


# -- contexts, prompts and given answers


def one(row: Mapping[str, Any], tmp_path: Path, *, name: str = "q.jsonl", **options: Any) -> Question:
    (question,) = read_questions(WRITERS[name](tmp_path / name, [row]), **options).questions
    return question


@pytest.mark.parametrize("name", ["q.jsonl", "q.parquet", "q.csv"])
def test_passages_are_joined_to_one_context_by_blank_lines(name: str, tmp_path: Path):
    assert one({"question": "who?", "contexts": ["[1] a", "b\n"]}, tmp_path, name=name).context == "[1] a\n\nb"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("Zoë\nmills.", "Zoë\nmills."),
        ("[1] a", "[1] a"),
        ("[1]", "[1]"),
        ("", None),
        ([], None),
        (None, None),
        ([{"title": "Mill", "text": "It mills."}, {"text": "b", "score": 0.5}], "Mill\nIt mills.\n\nb"),
    ],
    ids=["text", "begins like a list", "looks like a list", "empty", "no passages", "none", "titled passages"],
)
def test_a_context_is_a_text_or_a_list_of_passages(written: object, read: str | None, tmp_path: Path):
    assert one({"question": "who?", "context": written}, tmp_path).context == read


def test_the_same_question_about_another_context_is_another_question(tmp_path: Path):
    rows = [{"question": "who?", "context": text} for text in ("a", "b", "a")]
    found = read_questions(write_lines(tmp_path / "q.jsonl", rows))
    assert ([question.context for question in found.questions], found.same_text) == (["a", "b"], 1)


CHAT = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Who?"}]
ANSWERED = [*CHAT, {"role": "assistant", "content": "Zoë"}]


@pytest.mark.parametrize(
    ("name", "column"),
    [
        *((name, column) for name in ("q.jsonl", "q.parquet") for column in ("messages", "prompt")),
        ("q.csv", "messages"),
    ],
)
def test_the_question_of_a_chat_is_what_the_user_says_last(name: str, column: str, tmp_path: Path):
    question = one({column: CHAT}, tmp_path, name=name)
    assert (question.question, question.messages, question.prompt) == ("Who?", tuple(CHAT), None)
    assert question.given is None


def test_a_last_message_of_the_assistant_is_a_given_answer(tmp_path: Path):
    question = one({"messages": ANSWERED}, tmp_path)
    assert (question.messages, question.given) == (tuple(CHAT), Given("Zoë"))


def test_a_prompt_alone_is_also_the_question(tmp_path: Path):
    question = one({"prompt": " Q: Who?\nA:"}, tmp_path)
    assert (question.question, question.prompt) == ("Q: Who?\nA:", " Q: Who?\nA:")


@pytest.mark.parametrize("column", ["generated_answer", "response", "output", "completion", "generated_text"])
def test_a_given_answer_is_kept_unchanged_beside_the_correct_one(column: str, tmp_path: Path):
    question = one({"question": "Who?", "answer": "Zoë", column: " Zoë.\n"}, tmp_path)
    assert (question.answer, question.given) == ("Zoë", Given(" Zoë.\n"))


def test_columns_can_say_that_the_answer_is_a_given_one(tmp_path: Path):
    question = one({"question": "Who?", "answer": "Zoë"}, tmp_path, columns="generated_answer=answer")
    assert (question.answer, question.given) == (None, Given("Zoë"))


LOGPROBS: dict[str, object] = {
    "numbers": [-0.5, -2],
    "of a completion": {"tokens": ["a", "b"], "token_logprobs": [-0.5, -2]},
    "of a chat completion": {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -2}]},
    "of vLLM": [{"7": {"logprob": -0.5, "rank": 1}}, {"9": {"logprob": -1, "rank": 1}, "8": {"logprob": -2}}],
}


@pytest.mark.parametrize(
    ("name", "form"), [*(("q.jsonl", form) for form in LOGPROBS), ("q.csv", "numbers"), ("q.csv", "of vLLM")]
)
def test_token_ids_and_logprobs_of_servers_are_read(name: str, form: str, tmp_path: Path):
    row = {"prompt": "Who?", "prompt_token_ids": [5, 6], "token_ids": [7, 8], "logprobs": LOGPROBS[form]}
    assert one(row, tmp_path, name=name).given == Given(None, (7, 8), (5, 6), (-0.5, -2.0))


def test_several_given_answers_of_an_id_are_its_samples_and_stand_together(tmp_path: Path):
    rows = [
        {"id": name, "question": f"{name}?", "response": text} for name, text in ("aA", "bB", "aC", "bD", "aA", "cE")
    ]
    found = read_questions(write_lines(tmp_path / "q.jsonl", rows), num_samples=2)
    assert [(q.id, q.sample, q.index, q.given) for q in found.questions] == [
        ("a", 0, 0, Given("A")),
        ("a", 1, 2, Given("C")),
        ("a", 2, 4, Given("A")),
        ("b", 0, 1, Given("B")),
        ("b", 1, 3, Given("D")),
    ]
    assert (found.same_id, found.same_text) == (0, 0)


def test_given_answers_to_one_text_without_an_id_are_samples_of_one_question(tmp_path: Path):
    rows = [{"question": text, "response": "x"} for text in ("Who?", "Where?", "who? ")]
    found = read_questions(write_lines(tmp_path / "q.jsonl", rows)).questions
    assert [(question.id, question.sample) for question in found] == [("q-0", 0), ("q-0", 1), ("q-1", 0)]


def test_a_sample_column_numbers_the_answers_and_repeats_are_left_out(tmp_path: Path):
    rows = [{"id": "a", "question": "Who?", "sample": sample, "response": "x"} for sample in (3, 0, 3)]
    found = read_questions(write_lines(tmp_path / "q.jsonl", rows))
    assert ([question.sample for question in found.questions], found.same_id) == ([3, 0], 1)


def test_a_shuffle_keeps_the_samples_of_a_question_together(tmp_path: Path):
    rows = [{"id": f"q{i % 8}", "question": f"{i % 8}?", "response": "x"} for i in range(16)]
    found = read_questions(write_lines(tmp_path / "q.jsonl", rows), shuffle_seed=0).questions
    assert [question.id for question in found][::2] == ids(read_questions(many(8), shuffle_seed=0))
    assert [question.sample for question in found] == [0, 1] * 8


def test_two_questions_with_given_answers_and_one_id_are_refused(tmp_path: Path):
    rows = [{"id": "a", "question": text, "response": "x"} for text in ("Who?", "Where?")]
    with pytest.raises(BadSource, match=r"'a'.*Who\?.*Where\?.*columns=id="):
        read_questions(write_lines(tmp_path / "q.jsonl", rows))


def test_one_text_with_two_ids_keeps_both_given_answers(tmp_path: Path):
    rows = [{"id": name, "question": "Who?", "response": "x"} for name in "abb"]
    found = read_questions(write_lines(tmp_path / "q.jsonl", rows))
    assert ([(q.id, q.sample) for q in found.questions], found.same_text) == ([("a", 0), ("b", 0), ("b", 1)], 0)


@pytest.mark.parametrize(
    "written",
    [[{"start": 0, "end": 3, "label": "conflict"}, {"start": 3, "end": 4}], [[0, 3, "conflict"], [3, 4]]],
    ids=["dicts", "lists"],
)
def test_spans_of_a_given_answer_are_read(written: object, tmp_path: Path):
    question = one({"question": "Who?", "response": "Zoë!", "spans": written}, tmp_path)
    assert question.spans == (Span(0, 3, "conflict"), Span(3, 4))


def test_no_spans_differ_from_unknown_ones(tmp_path: Path):
    assert one({"question": "Who?", "response": "Zoë", "spans": []}, tmp_path).spans == ()
    assert one({"question": "Who?", "response": "Zoë"}, tmp_path).spans is None


WRONG_CELLS: dict[str, tuple[str, object]] = {
    "a context of numbers": ("context", [1, 2]),
    "no messages": ("messages", "Who?"),
    "a message without a role": ("messages", [{"content": "Who?"}]),
    "an answer only": ("messages", ANSWERED[-1:]),
    "an answer that is a list": ("generated_answer", ["a"]),
    "ids that are texts": ("token_ids", ["a"]),
    "negative ids": ("prompt_token_ids", [-1]),
    "a sample below zero": ("sample", -1),
    "a missing logprob": ("logprobs", [None, -1]),
    "a span without an end": ("spans", [{"start": 1}]),
    "a span beyond the answer": ("spans", [[0, 9]]),
    "a span that ends before it starts": ("spans", [[2, 1]]),
    "another verdict": ("verdict", "true"),
}


@pytest.mark.parametrize("case", WRONG_CELLS)
def test_an_invalid_cell_is_refused_with_row_and_column(case: str, tmp_path: Path):
    column, value = WRONG_CELLS[case]
    rows = [{"question": "a?"}, {"question": "b?", "generated_answer": "abc", column: value}]
    with pytest.raises(BadSource, match=rf"q\.jsonl: row 2 column '{column}'"):
        read_questions(write_lines(tmp_path / "q.jsonl", rows))


def test_logprobs_of_another_number_of_tokens_are_refused(tmp_path: Path):
    with pytest.raises(BadSource, match="1 log-probabilities for 2 tokens"):
        one({"question": "Who?", "token_ids": [1, 2], "logprobs": [-1.0]}, tmp_path)


# -- columns


def test_columns_maps_names_to_those_of_the_file(tmp_path: Path):
    row = {"nr": 3, "text": "who?", "gold": "me", "also": ["I"], "question": "not this one", "topic": "x"}
    path = write_lines(tmp_path / "q.jsonl", [row])
    found = read_questions(path, columns="id=nr, question=text,answer=gold,aliases=also,kind=topic")
    assert found.questions == [Question("3", "who?", "me", ("me", "I"), "x")]


def test_a_missing_column_is_named(tmp_path: Path):
    path = write_lines(tmp_path / "q.jsonl", ROWS)
    with pytest.raises(BadSource, match="gold"):
        read_questions(path, columns="answer=gold")


@pytest.mark.parametrize("wrong", ["question", "question=", "text=question", "=question", "id=a,,answer=b"])
def test_a_malformed_columns_setting_is_refused(wrong: str, tmp_path: Path):
    path = write_lines(tmp_path / "q.jsonl", ROWS)
    with pytest.raises(BadSetting, match=re.escape(f"columns={wrong}")):
        read_questions(path, columns=wrong)


# -- each once


def test_repeated_ids_and_texts_are_left_out_and_counted():
    repeats = [
        Question("q1", "something else"),
        Question("new", "What is 2 times 2?"),
        Question("newer", "  what is the 3 TIMES 3"),
        Question("q2", "What is 2 times 2?"),
    ]
    found = read_questions([*many(4), *repeats])
    assert found == QuestionSet(many(4), same_id=2, same_text=2)


def test_questions_of_punctuation_only_are_distinguished():
    found = read_questions([Question("a", "?"), Question("b", "!"), Question("c", "?")])
    assert (ids(found), found.same_text) == (["a", "b"], 1)


# -- how many, in which order


def test_num_samples_keeps_the_first_distinct_questions():
    assert ids(read_questions([many(1)[0], *many(9)], num_samples=3)) == ["q0", "q1", "q2"]
    assert len(read_questions(many(9), num_samples=100).questions) == 9


@pytest.mark.parametrize("count", [0, -1])
def test_num_samples_below_one_is_refused(count: int):
    with pytest.raises(BadSetting, match=f"num_samples={count}"):
        read_questions(many(3), num_samples=count)


def test_the_order_depends_only_on_the_shuffle_seed():
    orders = [ids(read_questions(many(50), shuffle_seed=seed)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != ids(read_questions(many(50)))
    assert sorted(orders[0]) == sorted(orders[2]) == sorted(ids(read_questions(many(50))))


def test_the_order_of_a_shuffle_seed_is_pinned():
    assert ids(read_questions(many(8), shuffle_seed=0)) == ["q2", "q4", "q3", "q6", "q5", "q0", "q1", "q7"]


def test_more_samples_of_a_shuffled_set_extend_fewer():
    orders = [ids(read_questions(many(50), num_samples=count, shuffle_seed=7)) for count in (5, 20, 50)]
    assert orders[2][:5] == orders[1][:5] == orders[0]
    assert orders[2][:20] == orders[1]


# -- what is wrong

BAD = {
    "no json": ("q.jsonl", '{"question": "a b?"}\n\n{"question": \n', r"q\.jsonl: line 3 "),
    "no object": ("q.jsonl", '{"question": "a b?"}\n[1]\n', r"q\.jsonl: line 2 "),
    "no question column": ("q.jsonl", '{"id": 1, "text": "a"}\n', r"q\.jsonl: .*id, text"),
    "no question": ("q.jsonl", '{"question": "a"}\n{"question": " "}\n', r"q\.jsonl: row 2 "),
    "a number for a question": ("q.jsonl", '{"question": 3}\n', r"q\.jsonl: row 1 "),
    "empty": ("q.jsonl", "\n", r"q\.jsonl: "),
    "cut off": ("q.json", '[{"question": "a"}', r"q\.json: "),
    "another json": ("q.json", '{"rows": []}', r"q\.json: no question column among rows"),
    "a list of something else": ("q.json", '["a", "b"]', r"q\.json: must be a JSON object or a list of them"),
    "no question in csv": ("q.csv", "id,text\n1,a\n", r"q\.csv: .* id, text"),
    "a short row": ("q.csv", "id,question\n1,a\n2\n", r"q\.csv: line 3: a row of 1 cells"),
    "no parquet": ("q.parquet", "PAR1 not", r"q\.parquet: "),
}


@pytest.mark.parametrize("case", BAD)
def test_an_invalid_file_is_refused_with_file_and_line(case: str, tmp_path: Path):
    name, content, message = BAD[case]
    (tmp_path / name).write_text(content)
    with pytest.raises(BadSource, match=message) as caught:
        read_questions(tmp_path / name)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["q.jsonl", "q.json", "q.csv"])
def test_invalid_utf8_is_refused_with_the_file(name: str, tmp_path: Path):
    (tmp_path / name).write_bytes(b'question\n{"question": "\xff\xfe"}\n')
    with pytest.raises(BadSource, match=name):
        read_questions(tmp_path / name)


@pytest.mark.parametrize("name", ["none.jsonl", "none.csv", "none.parquet"])
def test_a_missing_file_is_refused(name: str, tmp_path: Path):
    with pytest.raises(BadSource, match=name):
        read_questions(tmp_path / name)


def test_a_folder_is_not_a_question_set(tmp_path: Path):
    with pytest.raises(BadSource, match=re.escape(str(tmp_path))):
        read_questions(tmp_path)


# -- the hub


def test_a_hub_dataset_without_its_library_names_the_install_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"trivia_qa.*pip install datasets"):
        read_questions("trivia_qa")


def test_a_hub_dataset_is_loaded_by_name_config_and_split_and_its_errors_are_reported(monkeypatch: pytest.MonkeyPatch):
    loaded: list[tuple[object, ...]] = []

    def load_dataset(name: str, subset: str | None, *, split: str) -> list[dict[str, str]]:
        loaded.append((name, subset, split))
        if name == "gone":
            raise ConnectionError("could not\nreach it")
        return [{"question": "who?", "answer": "me"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    found = read_questions("trivia_qa:rc.nocontext:validation")
    assert ids(found) == ["trivia_qa:rc.nocontext:validation-0"]
    read_questions("nq_open")
    with pytest.raises(BadSource, match=r"gone: .*could not reach it"):
        read_questions("gone")
    assert loaded == [
        ("trivia_qa", "rc.nocontext", "validation"),
        ("nq_open", None, "train"),
        ("gone", None, "train"),
    ]


# -- properties

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).map(str.strip).filter(bool)
ANSWER = TEXT.filter(lambda text: not (text.startswith("[") and text.endswith("]")))
QUESTIONS = st.lists(
    st.builds(
        lambda name, text, answers, kind: Question(
            name, text, answers[0] if answers else None, tuple(dict.fromkeys(answers)), kind
        ),
        TEXT,
        TEXT,
        st.lists(ANSWER, max_size=4),
        st.none() | TEXT,
    ),
    min_size=1,
    max_size=8,
    unique_by=(lambda question: question.id, lambda question: normalise(question.question) or question.question),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=num_examples(60))
@given(questions=QUESTIONS)
def test_questions_written_as_json_lines_round_trip(questions: list[Question], tmp_path: Path):
    rows = [{"id": q.id, "question": q.question, "aliases": list(q.aliases), "kind": q.kind} for q in questions]
    assert read_questions(write_lines(tmp_path / "q.jsonl", rows)) == QuestionSet(questions, 0, 0)


# -- real ones

SETS = {
    "triviaqa/dev.jsonl": 8837,
    "nq_open/dev.jsonl": 3610,
    "nq_open/efficientqa_dev.jsonl": 1800,
    "popqa_1k/test.jsonl": 1000,
    "truthfulqa/test.jsonl": 790,
}


@pytest.mark.parametrize("name", SETS)
def test_real_question_sets_are_read_completely(name: str):
    if not os.environ.get("MILLSTREAM_DATA") or not (DATA / name).is_file():
        pytest.skip(f"MILLSTREAM_DATA names no folder with {name} in it")
    rows = [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]
    found = read_questions(DATA / name)
    assert len(found.questions) + found.same_id + found.same_text == len(rows) == SETS[name]
    assert found.same_id == 0
    by_id = {row["id"]: row for row in rows}
    for question in found.questions:
        row = by_id[question.id]
        assert question.question == row["question"].strip()
        assert question.answer == row["answer"].strip()
        assert set(question.aliases) == {answer.strip() for answer in [row["answer"], *row["aliases"]]}
