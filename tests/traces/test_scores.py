"""Answers are normalised as by TriviaQA's script, refusals are recognised, scores match a plain implementation."""

import json
import os
import re
import string
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.traces.scores import MAX_BITS, Scores, first_line, is_refusal, normalise, normalise_all, score
from support.effort import num_examples

DATA = Path(os.environ.get("MILLSTREAM_DATA", "")) / "triviaqa"


# -- normalising

PUNCTUATION = {*string.punctuation, "‘", "’", "´", "`"}
ODD = "aAnN tThHeE_-'’‘´`İıßΣσςΑÉe\u0301\u00a0\u3000\u2028\x00\x0b\x1c\x1f\x7f\x85ǅﬁK拳🚁\ufeff\n\t.,0"


def by_definition(text: str) -> str:
    """What TriviaQA's script compares, step by step and character by character."""
    lowered = text.replace("_", " ").lower()
    spaced = "".join(" " if character in PUNCTUATION else character for character in lowered)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", spaced).split())


VECTORS = {
    "The Beatles": "beatles",
    "Jay-Z": "jay z",
    "the_end_of_an_era": "end of era",
    "A.A. Milne": "milne",
    "Rock 'n' Roll": "rock n roll",
    "O’Neill": "o neill",
    "  Saint\u00a0 Helena\n": "saint helena",
    "The": "",
    "...": "",
    "": "",
    "Theatre, banana": "theatre banana",
    "$1,000": "1 000",
    "ÉMILE ZOLA": "émile zola",
    "ΟΔΥΣΣΕΥΣ": "οδυσσευς",
    "İzmir": "i̇zmir",
    "a\u0301": "\u0301",  # a letter and its accent, with a word boundary between them
    "a\x00b": "\x00b",
    "a\x1fan\x1cthe": "",
    "C3PO & R2-D2": "c3po r2 d2",
    "¿Qué?": "¿qué",
}


@pytest.mark.parametrize(("text", "expected"), VECTORS.items(), ids=range(len(VECTORS)))
def test_a_text_is_normalised_by_the_definition(text: str, expected: str):
    assert normalise(text) == by_definition(text) == expected
    assert normalise_all([text]) == [expected]


TEXTS = st.lists(st.text() | st.text(ODD) | st.text(st.characters(max_codepoint=127)), max_size=8)


@settings(max_examples=num_examples(200))
@given(TEXTS)
def test_many_texts_are_normalised_like_each_alone(texts: list[str]):
    assert [normalise(text) for text in texts] == [by_definition(text) for text in texts]
    assert normalise_all(texts) == [by_definition(text) for text in texts]


def test_every_character_is_normalised_the_same_alone_and_between_articles():
    letters = [chr(code) for code in range(0x3100) if not 0xD800 <= code < 0xE000]
    texts = [text for letter in letters for text in (letter, f"a{letter}the", f"x{letter}An{letter}Y")]
    assert normalise_all(texts) == [by_definition(text) for text in texts]


def test_an_answer_is_its_first_line_that_is_not_blank():
    assert first_line("Paris\nQ: What is") == "Paris"
    assert first_line(" \n Paris \r\nLondon") == "Paris"
    assert first_line(" \n\t") == first_line("") == first_line(None) == ""


REFUSED = [
    "I don't know",
    "I don’t know.",
    "I do not know the answer to that question.",
    "Sorry, I don't know",
    "I'm sorry, but I cannot answer that.",
    "I am sorry, but there is no such person",
    "I'm not sure",
    "I'm not entirely sure who that was",
    "I am not certain.",
    "I cannot provide an answer",
    "I can't answer that",
    "As an AI, I have no opinions",
    "As an AI language model, I cannot",
    "As a large language model I do not have feelings",
    "I'm an AI",
    "Unknown",
    "UNKNOWN.",
    "The answer is unknown",
    "No answer",
    "No idea!",
    "I have no idea",
    "Unfortunately, I do not have enough information",
    "There is not enough information to say",
    "It is impossible to say",
    "Unable to determine",
    "idk",
    "Not sure",
]
ANSWERED = [
    "Paris",
    "",
    "The Unknown Soldier",
    "Unknown Pleasures",
    "(I Can't Get No) Satisfaction",
    "I Can't Stop Loving You",
    "I Can't Tell You Why",
    "I'm Not in Love",
    "I'm Sorry",
    "Sorry Seems to Be the Hardest Word",
    "No One Knows",
    "No Answers",
    "As You Like It",
    "As Aida",
    "Not Surely",
    "I, Robot",
    "Well, Paris",
    "Idaho",
    "Paris, but I'm not sure",
]


@pytest.mark.parametrize("answer", REFUSED)
def test_refusals_are_recognised(answer: str):
    assert is_refusal(normalise(answer))


@pytest.mark.parametrize("answer", ANSWERED)
def test_answers_that_resemble_refusals_are_not(answer: str):
    assert not is_refusal(normalise(answer))


# -- scoring


def common(a: Sequence[str], b: Sequence[str]) -> int:
    """The length of the longest common subsequence, from its definition."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a, 1):
        for j, y in enumerate(b, 1):
            table[i][j] = table[i - 1][j - 1] + 1 if x == y else max(table[i - 1][j], table[i][j - 1])
    return table[-1][-1]


def f_measure(same: int, said: Sequence[str], true: Sequence[str]) -> float:
    if not same:
        return 0.0
    precision, recall = same / len(said), same / len(true)
    return 2 * precision * recall / (precision + recall)


def plain_score(answer: str, aliases: Sequence[str | None]) -> dict[str, object]:
    """One answer, by the official script and the definitions."""
    said = normalise(answer).split()
    truths = [normalise(alias) for alias in aliases if alias]
    f1 = [f_measure(sum((Counter(said) & Counter(true.split())).values()), said, true.split()) for true in truths]
    return {
        "em": any(normalise(answer) == true for true in truths),
        "f1": max(f1, default=0.0),
        "rouge_l": max((f_measure(common(said, t.split()), said, t.split()) for t in truths), default=0.0),
        "contains": any(len(true) >= 2 and f" {true} " in f" {' '.join(said)} " for true in truths),
        "num_tokens": len(said),
        "num_aliases": len(truths),
    }


def assert_plain(found: Scores, answers: Sequence[str], aliases: Sequence[Sequence[str | None]]) -> None:
    expected = [plain_score(answer, some) for answer, some in zip(answers, aliases, strict=True)]
    for name in ("em", "contains", "num_tokens", "num_aliases"):
        assert getattr(found, name).tolist() == [row[name] for row in expected], name
    for name in ("f1", "rouge_l"):
        values = getattr(found, name)
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, [row[name] for row in expected], atol=1e-6, err_msg=name)


WORDS = st.lists(st.sampled_from(["x", "y", "xy", "é", "拳", "The", "a", "z-z", "", "1"]), max_size=7).map(" ".join)
ROWS = st.lists(st.tuples(WORDS, st.lists(WORDS | st.none(), max_size=5)), max_size=8)


@settings(max_examples=num_examples(200))
@given(ROWS)
def test_scores_match_a_plain_implementation(rows: list[tuple[str, list[str | None]]]):
    answers, aliases = [answer for answer, _ in rows], [some for _, some in rows]
    assert_plain(score(answers, pa.array(aliases, pa.list_(pa.string()))), answers, aliases)


@given(st.integers(0, 2**32))
def test_answers_of_more_than_64_words_are_scored_the_same_way(seed: int):
    rng = np.random.default_rng(seed)
    lengths = [3, MAX_BITS - 1, MAX_BITS, MAX_BITS + 1, 200]
    answers = [" ".join(rng.choice(list("wxyz"), length)) for length in lengths]
    aliases = [[" ".join(rng.choice(list("vwxyz"), size)) for size in (1, 2, 4, 70)] + [answer] for answer in answers]
    aliases[-1].pop()
    assert_plain(score(answers, aliases), answers, aliases)


CASES = {
    "an exact match": ("Paris", ["London", "paris!"], True, 1.0, 1.0, True),
    "an alias between word boundaries": ("It is New York City", ["York City"], False, 2 * 2 / 7, 2 * 2 / 7, True),
    "not inside a word": ("Parisian", ["Paris"], False, 0.0, 0.0, False),
    "single characters are not searched for": ("vitamin C", ["C"], False, 2 / 3, 2 / 3, False),
    "but may be the whole answer": ("C", ["C"], True, 1.0, 1.0, False),
    "another order": ("Smith John", ["John Smith"], False, 1.0, 0.5, False),
    "repeated words count with multiplicity": ("x1 x1 x1", ["x1 y1"], False, 0.4, 0.4, False),
    "empty equals empty": ("The", ["A"], True, 0.0, 0.0, False),
    "empty is not contained": ("Paris", ["The"], False, 0.0, 0.0, False),
    "no aliases": ("Paris", [], False, 0.0, 0.0, False),
    "the best alias counts": ("red dwarf", ["blue", "red", "dwarf"], False, 2 / 3, 2 / 3, True),
}


@pytest.mark.parametrize("case", CASES)
def test_scores_of_single_answers(case: str):
    answer, aliases, em, f1, rouge_l, contains = CASES[case]
    found = score([answer], [aliases])
    assert (bool(found.em[0]), bool(found.contains[0])) == (em, contains)
    assert (float(found.f1[0]), float(found.rouge_l[0])) == pytest.approx((f1, rouge_l))


def test_slices_and_nulls_of_arrow_arrays_are_respected():
    answers = pa.array(["no", "paris", None, "rome", "x"]).slice(1, 3)
    aliases = pa.array([["no"], ["q", "Paris", None, ""], ["a"], None, ["x"]]).slice(1, 3)
    found = score(answers, aliases)
    assert found.em.tolist() == [True, True, False]  # a missing text equals "a", which is empty; `label` decides
    assert found.num_aliases.tolist() == [2, 1, 0]


def test_no_answers_have_no_scores():
    assert score([], []).f1.shape == (0,)


@pytest.mark.skipif(not DATA.is_dir(), reason="MILLSTREAM_DATA names no folder with triviaqa in it")
def test_scores_of_real_questions_match_a_plain_implementation():
    rows = [json.loads(line) for line in (DATA / "dev.jsonl").read_text().splitlines()[:1500]]
    aliases = [row["aliases"] for row in rows]
    said = [some[i % len(some)] if i % 3 else f"{aliases[i - 1][0]}, {some[-1]}" for i, some in enumerate(aliases)]
    found = score(said, aliases)
    assert_plain(found, said, aliases)
    assert 0.6 < found.em.mean() < 0.7
