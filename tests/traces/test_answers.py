"""Normalised as TriviaQA's own script does it, one text or many; refusals known, titles of songs not taken for any."""

import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.traces.scores import first_line, is_refusal, normalise, normalise_all
from support.effort import num_examples

PUNCTUATION = {*string.punctuation, "‘", "’", "´", "`"}
ODD = "aAnN tThHeE_-'’‘´`İıßΣσςΑÉe\u0301\u00a0\u3000\u2028\x00\x0b\x1c\x1f\x7f\x85ǅﬁK拳🚁\ufeff\n\t.,0"


def by_definition(text: str) -> str:
    """What TriviaQA's script compares, step by step and letter by letter."""
    lowered = text.replace("_", " ").lower()
    spaced = "".join(" " if letter in PUNCTUATION else letter for letter in lowered)
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
    "a\u0301": "\u0301",  # a letter and its accent: the border of a word is between them
    "a\x00b": "\x00b",
    "a\x1fan\x1cthe": "",
    "C3PO & R2-D2": "c3po r2 d2",
    "¿Qué?": "¿qué",
}


@pytest.mark.parametrize(("text", "expected"), VECTORS.items(), ids=range(len(VECTORS)))
def test_a_text_is_normalised_as_the_definition_says(text: str, expected: str):
    assert normalise(text) == by_definition(text) == expected
    assert normalise_all([text]) == [expected]


TEXTS = st.lists(st.text() | st.text(ODD) | st.text(st.characters(max_codepoint=127)), max_size=8)


@settings(max_examples=num_examples(200))
@given(TEXTS)
def test_many_texts_at_once_are_normalised_as_each_on_its_own(texts: list[str]):
    assert [normalise(text) for text in texts] == [by_definition(text) for text in texts]
    assert normalise_all(texts) == [by_definition(text) for text in texts]


def test_every_character_is_treated_alike_alone_and_between_articles():
    letters = [chr(code) for code in range(0x3100) if not 0xD800 <= code < 0xE000]
    texts = [text for letter in letters for text in (letter, f"a{letter}the", f"x{letter}An{letter}Y")]
    assert normalise_all(texts) == [by_definition(text) for text in texts]


def test_an_answer_ends_with_its_first_line_that_is_not_blank():
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
def test_a_refusal_is_known_by_its_words(answer: str):
    assert is_refusal(normalise(answer))


@pytest.mark.parametrize("answer", ANSWERED)
def test_an_answer_is_not_taken_for_a_refusal(answer: str):
    assert not is_refusal(normalise(answer))
