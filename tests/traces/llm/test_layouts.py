"""Published question sets are read from their own files: each small file here has the layout of the original."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millstream.errors import BadSource
from millstream.traces.llm.questions import Given, Question, Span, read_questions

Rows = Sequence[Mapping[str, Any]]


def write_lines(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: Rows) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def write_json(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def read(path: Path) -> list[Question]:
    return read_questions(path).questions


# -- RAGTruth: https://github.com/ParticleMedia/RAGTruth

PASSAGES = "passage 1:Roast the beets.\n\npassage 2:Sauté the greens.\n\n"
QA_PROMPT = f"Briefly answer the following question:\nhow to cook beets\nBear in mind ... passages:\n{PASSAGES}output:"
SUMMARY_PROMPT = "Summarize the following news within 12 words:\nThe miller mills corn.\noutput:"
BUSINESS = {"name": "The Mill", "attributes": {"WiFi": "no", "Music": None}, "business_stars": 3.0}
BUSINESS_PROMPT = f"Instruction:\nWrite an objective overview. Structured data:\n{BUSINESS}\nOverview:"
SOURCES = [
    {"source_id": "1", "task_type": "QA", "source": "MARCO", "prompt": QA_PROMPT}
    | {"source_info": {"question": "how to cook beets", "passages": PASSAGES}},
    {"source_id": "2", "task_type": "Summary", "source": "CNN/DM", "prompt": SUMMARY_PROMPT}
    | {"source_info": "The miller mills corn."},
    {"source_id": "3", "task_type": "Data2txt", "source": "Yelp", "prompt": BUSINESS_PROMPT, "source_info": BUSINESS},
]
LABEL = {"start": 0, "end": 4, "text": "Sauté", "meta": "HIGH INTRO OF NEW INFO", "label_type": "Evident Conflict"}


def response(number: int, source: int, text: str, *labels: object, model: str = "llama-2-7b-chat") -> dict[str, object]:
    about = {"id": str(number), "source_id": str(source), "model": model, "temperature": 0.775}
    return {**about, "labels": list(labels), "split": "train", "quality": "good", "response": text}


def test_answers_of_ragtruth_are_joined_with_their_sources(tmp_path: Path):
    write_lines(tmp_path / "source_info.jsonl", SOURCES)
    answers = [
        response(10, 1, "Sauté them.", LABEL, model="gpt-4-0613"),
        response(11, 1, "Roast them."),
        response(12, 2, "A miller mills."),
        response(13, 3, "The Mill has no WiFi."),
    ]
    first, second, summary, overview = read(write_lines(tmp_path / "response.jsonl", answers))
    assert first == Question(
        "1",
        "how to cook beets",
        kind="QA",
        context=PASSAGES.strip(),
        messages=({"role": "user", "content": QA_PROMPT},),
        given=Given("Sauté them."),
        spans=(Span(0, 4, "Evident Conflict"),),
        verdict="wrong",
        about='{"model": "gpt-4-0613", "split": "train", "quality": "good"}',
    )
    assert (second.id, second.sample, second.spans, second.verdict) == ("1", 1, (), "right")
    assert (summary.question, summary.context) == (
        "Summarize the following news within 12 words:",
        "The miller mills corn.",
    )
    assert overview.question.endswith("Structured data:") and overview.context == str(BUSINESS)


def test_answers_of_ragtruth_without_their_sources_are_refused(tmp_path: Path):
    answers = write_lines(tmp_path / "response.jsonl", [response(10, 1, "Roast them.")])
    with pytest.raises(BadSource, match=r"source_info\.jsonl, which is missing"):
        read(answers)
    write_lines(tmp_path / "source_info.jsonl", SOURCES[1:])
    with pytest.raises(BadSource, match=r"has no source '1'"):
        read(answers)


# -- SQuAD: https://rajpurkar.github.io/SQuAD-explorer, and rajpurkar/squad_v2 on the hub

MILL = "The mill was built in 1850 by Zoë."
BUILT = {"id": "56be", "question": "When was the mill built?", "answers": [{"text": "1850", "answer_start": 22}] * 2}
IMPOSSIBLE = {"id": "5a7d", "question": "When was it torn down?", "answers": [], "is_impossible": True}
PLAUSIBLE = {"plausible_answers": [{"text": "1850", "answer_start": 22}]}
ARTICLE = {"title": "Mill", "paragraphs": [{"context": MILL, "qas": [BUILT, {**IMPOSSIBLE, **PLAUSIBLE}]}]}
SQUAD = [
    Question("56be", "When was the mill built?", "1850", ("1850",), context=MILL),
    Question("5a7d", "When was it torn down?", "unanswerable", ("unanswerable",), "unanswerable", context=MILL),
]


def test_the_official_files_of_squad_are_read(tmp_path: Path):
    assert read(write_json(tmp_path / "train-v2.0.json", {"version": "v2.0", "data": [ARTICLE]})) == SQUAD
    first = {"version": "1.1", "data": [{"title": "Mill", "paragraphs": [{"context": MILL, "qas": [BUILT]}]}]}
    assert read(write_json(tmp_path / "train-v1.1.json", first)) == SQUAD[:1]


@pytest.mark.parametrize("write", [write_lines, write_parquet])
def test_the_rows_of_squad_on_the_hub_are_read(write: Any, tmp_path: Path):
    rows = [
        {"id": "56be", "title": "Mill", "context": MILL, "question": "When was the mill built?"}
        | {"answers": {"text": ["1850", "1850"], "answer_start": [22, 22]}},
        {"id": "5a7d", "title": "Mill", "context": MILL, "question": "When was it torn down?"}
        | {"answers": {"text": [], "answer_start": []}},
    ]
    found = read(write(tmp_path / ("squad.parquet" if write is write_parquet else "squad.jsonl"), rows))
    assert found == SQUAD
    assert found[0].context is found[1].context  # in memory once


# -- HotpotQA: https://hotpotqa.github.io, and hotpotqa/hotpot_qa on the hub

TITLES, SENTENCES = ["Mill", "Zoë"], [["It mills.", " Corn, mostly."], ["She built it."]]
HOTPOT = {"question": "Who built what mills?", "answer": "Zoë", "type": "bridge", "level": "hard"}
HOTPOT_QUESTION = Question(
    "5a8b",
    "Who built what mills?",
    "Zoë",
    ("Zoë",),
    "bridge",
    context="Mill\nIt mills. Corn, mostly.\n\nZoë\nShe built it.",
)


def test_the_official_file_of_hotpotqa_is_read(tmp_path: Path):
    row = {"_id": "5a8b", **HOTPOT, "supporting_facts": [["Mill", 0]]}
    row["context"] = [[title, some] for title, some in zip(TITLES, SENTENCES, strict=True)]
    assert read(write_json(tmp_path / "hotpot_dev_distractor_v1.json", [row])) == [HOTPOT_QUESTION]


@pytest.mark.parametrize("write", [write_lines, write_parquet])
def test_the_rows_of_hotpotqa_on_the_hub_are_read(write: Any, tmp_path: Path):
    row = {"id": "5a8b", **HOTPOT, "supporting_facts": {"title": ["Mill"], "sent_id": [0]}}
    row["context"] = {"title": TITLES, "sentences": SENTENCES}
    name = "hotpot.parquet" if write is write_parquet else "hotpot.jsonl"
    assert read(write(tmp_path / name, [row])) == [HOTPOT_QUESTION]


# -- CoQA: https://stanfordnlp.github.io/coqa, and stanfordnlp/coqa on the hub

STORY = "The mill was built by Zoë."
SAID = f"{STORY}\n\nQ: What was built?\nA: a mill"
COQA = [
    Question("3zot-0", "What was built?", "a mill", ("a mill", "The mill"), "wikipedia", context=STORY),
    Question("3zot-1", "By whom?", "Zoë", ("Zoë",), "wikipedia", context=SAID),
]


def turns(*texts: str) -> list[dict[str, object]]:
    return [
        {"span_start": 0, "span_end": 8, "span_text": STORY[:8], "input_text": text, "turn_id": turn}
        for turn, text in enumerate(texts, 1)
    ]


def test_every_turn_of_coqa_is_a_question_that_sees_the_turns_before(tmp_path: Path):
    asked = [{"input_text": "What was built?", "turn_id": 1}, {"input_text": "By whom?", "turn_id": 2}]
    story = {"source": "wikipedia", "id": "3zot", "filename": "Mill.txt", "story": STORY, "name": "Mill.txt"}
    story |= {"questions": asked, "answers": turns("a mill", "Zoë")}
    story["additional_answers"] = {"0": turns("The mill", "Zoë"), "1": turns("a mill", "Zoë")}
    assert read(write_json(tmp_path / "coqa-dev-v1.0.json", {"version": "1.0", "data": [story]})) == COQA


@pytest.mark.parametrize("write", [write_lines, write_parquet])
def test_the_rows_of_coqa_on_the_hub_are_read(write: Any, tmp_path: Path):
    row = {"source": "wikipedia", "story": STORY, "questions": ["What was built?", "By whom?"]}
    row["answers"] = {"input_text": ["a mill", "Zoë"], "answer_start": [0, 22], "answer_end": [8, 25]}
    found = read(write(tmp_path / ("coqa.parquet" if write is write_parquet else "coqa.jsonl"), [row]))
    assert [question.id for question in found] == ["coqa-0", "coqa-0-1"]
    assert [question.context for question in found] == [STORY, SAID]
    assert [question.answer for question in found] == ["a mill", "Zoë"]


# -- HaluEval: https://github.com/RUCAIBox/HaluEval (its .json files are JSON lines), and pminervini/HaluEval on the hub


def test_both_answers_of_halueval_are_given_with_their_verdict(tmp_path: Path):
    pairs = [
        {"knowledge": f"Zoë built mill {i}.", "question": f"Who built mill {i}?", "right_answer": "Zoë"}
        | {"hallucinated_answer": "Max built it."}
        for i in range(2)
    ]
    found = read(write_lines(tmp_path / "qa_data.json", pairs))
    assert [(q.id, q.sample, q.given, q.verdict) for q in found] == [
        ("qa_data-0", 0, Given("Zoë"), "right"),
        ("qa_data-0", 1, Given("Max built it."), "wrong"),
        ("qa_data-1", 0, Given("Zoë"), "right"),
        ("qa_data-1", 1, Given("Max built it."), "wrong"),
    ]
    assert {question.answer for question in found} == {"Zoë"}
    assert found[1].context == "Zoë built mill 0."


def test_the_samples_of_halueval_have_a_given_answer_and_no_correct_one(tmp_path: Path):
    row = {"knowledge": "Zoë built it.", "question": "Who?", "answer": "Max", "hallucination": "yes"}
    (question,) = read(write_parquet(tmp_path / "samples.parquet", [row]))
    assert (question.answer, question.given, question.verdict) == (None, Given("Max"), "wrong")


@pytest.mark.parametrize("label", [{"hallucination_label": "no"}, {"hallucination": "no", "hallucination_spans": []}])
def test_the_general_file_of_halueval_is_read(label: dict[str, object], tmp_path: Path):
    row = {"ID": "7", "user_query": "Name a mill.", "chatgpt_response": "The old mill.", **label}
    (question,) = read(write_lines(tmp_path / "general_data.json", [row]))
    assert question == Question("7", "Name a mill.", given=Given("The old mill."), verdict="right")


# -- GSM8K: https://github.com/openai/grade-school-math


def test_the_answer_of_gsm8k_is_what_follows_the_solution(tmp_path: Path):
    rows = [
        {"question": "How many?", "answer": "2 * 36 = <<2*36=72>>72\n#### 72"},
        {"question": "How much?", "answer": "It is $2,000.\n#### 2,000"},
        {"question": "Which mark?", "answer": "####"},
    ]
    found = read(write_lines(tmp_path / "gsm8k.jsonl", rows))
    assert [question.aliases for question in found] == [("72",), ("2,000", "2000"), ("####",)]


# -- all of them


@pytest.mark.parametrize(
    ("row", "dataset"),
    [
        ({"story": "a", "questions": ["b?", "c?"], "answers": ["d"]}, "CoQA"),
        ({"paragraphs": [{"context": "a", "qas": [3]}]}, "SQuAD"),
        ({"question": "a?", "context": {"title": ["a"], "sentences": []}}, "HotpotQA"),
    ],
)
def test_other_values_in_known_columns_are_refused_with_the_row(row: dict[str, Any], dataset: str, tmp_path: Path):
    path = write_lines(tmp_path / "q.jsonl", [{**{name: [] for name in row}, "question": "x?"}, row])
    with pytest.raises(BadSource, match=rf"q\.jsonl: row 2 has the columns of {dataset}"):
        read(path)
