"""The question set `world`: balanced kinds, unique questions, and correct answers to well-known ones."""

import re
from collections import Counter
from pathlib import Path

import pytest

from millstream.traces.llm.questions import Question, built_in_questions, read_questions


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return read_questions("world").questions


@pytest.fixture(scope="module")
def by_text(questions: list[Question]) -> dict[str, Question]:
    return {question.question: question for question in questions}


def test_there_are_over_three_thousand_questions_of_nineteen_balanced_kinds(questions: list[Question]):
    kinds = Counter(question.kind for question in questions)
    assert len(questions) >= 3000
    assert len(kinds) == 19
    assert min(kinds.values()) >= 100 and max(kinds.values()) <= len(questions) / 5


def test_sources_and_licences_are_shipped_with_the_questions():
    data = built_in_questions()["world"]
    assert isinstance(data, Path)
    text = data.with_name("world.SOURCES.txt").read_text()
    for name in (
        "GeoNames",
        "Creative Commons Attribution 4.0",
        "iso-codes",
        "LGPL-2.1",
        "periodictable",
        "public domain",
    ):
        assert name in text


def test_questions_and_ids_are_unique(questions: list[Question]):
    assert len({question.id for question in questions}) == len(questions)
    assert len({question.question.casefold() for question in questions}) == len(questions)


def test_every_kind_has_popular_and_obscure_items(questions: list[Question]):
    counts = Counter((question.kind, question.exposure) for question in questions)
    assert {exposure for _, exposure in counts} == {"popular", "obscure"}
    for kind in {question.kind for question in questions}:
        assert min(counts[kind, "popular"], counts[kind, "obscure"]) >= 40, kind


def test_the_first_thousand_have_the_same_shares_of_kinds(questions: list[Question]):
    kinds, first = (Counter(question.kind for question in some) for some in (questions, questions[:1000]))
    for kind, number in kinds.items():
        assert 0.5 < first[kind] / 1000 / (number / len(questions)) < 1.6, kind


def test_an_id_contains_kind_and_key_and_the_answer_is_the_first_alias(questions: list[Question]):
    for question in questions:
        assert question.id.startswith(f"world-{question.kind}-")
        assert question.aliases and question.answer == question.aliases[0]
        assert len(set(question.aliases)) == len(question.aliases)
        assert all(alias == alias.strip() and alias for alias in question.aliases), question
        assert question.question[-1] in "?." and "  " not in question.question


def test_no_question_contains_its_answer(questions: list[Question]):
    for question in questions:
        for alias in question.aliases:
            assert not re.search(rf"\b{re.escape(alias)}\b", question.question), question


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("What is the capital of France?", "Paris"),
        ("What is the capital of the Netherlands?", "Amsterdam"),
        ("What is the capital of Kazakhstan?", "Astana"),
        ("Which country has Nairobi as its capital?", "Kenya"),
        ("What is the currency of Japan?", "yen"),
        ("What is the currency of Senegal?", "West African CFA franc"),
        ("What is the ISO 4217 code of the currency of Switzerland?", "CHF"),
        ("What is the three-letter ISO 3166 code of Germany?", "DEU"),
        ("Which country has the internet domain .ch?", "Switzerland"),
        ("On which continent is Chad?", "Africa"),
        ("On which continent are the Seychelles?", "Africa"),
        ("What is the main language of Japan?", "Japanese"),
        ('Which language has the ISO 639-1 code "sw"?', "Swahili"),
        ("What is the international calling code of Italy?", "+39"),
        ("Which country has the international calling code +81?", "Japan"),
        ("Name a country that borders Portugal.", "Spain"),
        ("What is the chemical symbol of gold?", "Au"),
        ("Which chemical element has the symbol W?", "tungsten"),
        ("What is the atomic number of carbon?", "6"),
        ("Which chemical element has the atomic number 92?", "uranium"),
        ("In which country is the city of Mumbai?", "India"),
        ("In which US state is the city of Seattle?", "Washington"),
    ],
)
def test_known_facts(by_text: dict[str, Question], text: str, answer: str):
    assert by_text[text].answer == answer


@pytest.mark.parametrize(
    ("text", "aliases"),
    [
        ("Which country has Washington, D.C. as its capital?", {"United States", "USA", "the US", "America"}),
        ("What is the capital of Colombia?", {"Bogota", "Bogotá"}),
        ("What is the capital of South Africa?", {"Pretoria", "Cape Town", "Bloemfontein"}),
        ("What is the capital of Bolivia?", {"Sucre", "La Paz"}),
        ("What is the currency of Panama?", {"Balboa", "US dollar"}),
        ("On which continent is Turkey?", {"Asia", "Europe"}),
        ("What is one of the main languages of Switzerland?", {"German", "French", "Italian", "Romansh"}),
        ("Name a country that borders France.", {"Spain", "Germany", "Belgium", "Brazil"}),
        ("What is the atomic number of mercury?", {"80", "eighty"}),
        ("What is the atomic number of oganesson?", {"118", "one hundred and eighteen"}),
        ("Which chemical element has the symbol Al?", {"aluminum", "aluminium"}),
        ("What is the international calling code of France?", {"+33", "33"}),
    ],
)
def test_every_correct_answer_is_an_alias(by_text: dict[str, Question], text: str, aliases: set[str]):
    assert aliases <= set(by_text[text].aliases)


def test_disputed_facts_are_left_out(by_text: dict[str, Question]):
    for text in (
        "What is the capital of Israel?",
        "What is the capital of Singapore?",  # the question contains the answer
        "What is the chemical symbol of iodine?",  # "I" is in every second answer
        "In which country is the city of Hyderabad?",  # India and Pakistan
        "In which country is the city of Valencia?",  # Spain and Venezuela
        "In which US state is the city of Springfield?",
        "In which US state is the city of Kansas City?",
        "Which country has the international calling code +1?",
        "Which country has a province, state or region called Limburg?",  # Belgium and the Netherlands
    ):
        assert text not in by_text


def test_exposure_follows_population(by_text: dict[str, Question]):
    assert by_text["What is the capital of Germany?"].exposure == "popular"
    assert by_text["What is the capital of Tuvalu?"].exposure == "obscure"
    assert by_text["In which country is the city of Shanghai?"].exposure == "popular"
    assert by_text["What is the atomic number of iron?"].exposure == "popular"
    assert by_text["What is the atomic number of dubnium?"].exposure == "obscure"
