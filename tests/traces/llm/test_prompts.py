"""Prompts contain every question unchanged and once."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import BadSetting
from millstream.traces.llm.prompts import FEW_SHOT, PLAIN, make_prompt
from millstream.traces.llm.questions import Given, Question
from support.extras import need
from support.tiny_models import make_tokenizer

need("transformers")

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}<assistant>"
TOKENIZER = make_tokenizer()
CHATTY = make_tokenizer(chat_template=TEMPLATE)


def test_plain_asks_for_a_concise_answer_and_stops_at_the_end_of_the_line():
    prompt = make_prompt("plain", TOKENIZER, stop=None)
    assert prompt.fill("Who?") == "Answer the question concisely. Q: Who? A:"
    assert (prompt.name, prompt.stop, prompt.special) == ("plain", ("\n",), True)


def test_few_shot_shows_three_answers_before_the_question():
    text = make_prompt("few-shot", TOKENIZER, stop=None).fill("Who?")
    assert text.count("\nA: ") == 3 and text.endswith("\n\nQ: Who?\nA:")


def test_chat_uses_the_template_of_the_model_and_ends_where_the_answer_starts():
    prompt = make_prompt("chat", CHATTY, stop=None)
    text = prompt.fill("Who?")
    assert text.startswith("<user>Answer the question") and text.endswith("Who?</user><assistant>")
    assert (prompt.stop, prompt.special) == ((), False)


def test_auto_is_chat_if_the_model_has_a_template_and_plain_otherwise():
    assert make_prompt("auto", CHATTY, stop=None).name == "chat"
    assert make_prompt("auto", TOKENIZER, stop=None) == make_prompt("plain", TOKENIZER, stop=None)


def test_chat_without_a_template_is_refused():
    with pytest.raises(BadSetting, match="prompt=chat"):
        make_prompt("chat", TOKENIZER, stop=None)


def test_a_custom_text_has_the_question_at_its_placeholder():
    prompt = make_prompt("Question {question} / Answer", TOKENIZER, stop=None)
    assert (prompt.name, prompt.fill("Who?")) == ("own", "Question Who? / Answer")


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("Given {{context}}, Q: {question} A:", "{{context}}"),
        ("{question} {answer}", "{answer}"),
        ("{Question}: {question}", "{Question}"),
        ("{{question}} A:", "{{question}}"),
        ("{{x}} {größe} {question}", "{größe}"),
        ("Given { context }: {question}", "{ context }"),
        ("Given {docs[0].text!r:>9}: {question}", "{docs[0].text!r:>9}"),
    ],
)
def test_a_placeholder_that_is_not_filled_in_is_refused(tmp_path: Path, text: str, unknown: str):
    file = tmp_path / "prompt.txt"
    file.write_text(text, encoding="utf-8")
    for spec in (text, str(file)):
        with pytest.raises(BadSetting, match=re.escape(f"contains {unknown},")):
            make_prompt(spec, TOKENIZER, stop=None)


def test_a_placeholder_in_a_system_message_is_refused_and_doubled_braces_are_kept_once():
    for system in ("Use {docs}.", "Mind {{x}} and {{question}}."):
        with pytest.raises(BadSetting, match=r"system=.*: contains "):
            make_prompt("chat", CHATTY, stop=None, system=system)
    assert "Mind {x}." in make_prompt("chat", CHATTY, stop=None, system="Mind {{x}}.").text


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        (r"$\frac{{x}}{2}$ {question}", r"$\frac{x}{2}$ {name}?"),
        (r"Answer in \boxed{}: {question}", r"Answer in \boxed{}: {name}?"),
        ('Reply {"answer": 1}. {question}', 'Reply {"answer": 1}. {name}?'),
    ],
)
def test_other_braces_reach_the_model(text: str, filled: str):
    assert make_prompt(text, TOKENIZER, stop=None).fill("{name}?") == filled


def test_a_prompt_can_be_a_text_file(tmp_path: Path):
    file = tmp_path / "ask.txt"
    file.write_text("Réponds: {question}\n-", encoding="utf-8")
    assert make_prompt(str(file), TOKENIZER, stop=None).fill("Who?") == "Réponds: Who?\n-"


@pytest.mark.parametrize("spec", ["", "few_shot", "missing.txt", "no placeholder", "{question} {question}", "{q}"])
def test_a_text_without_exactly_one_placeholder_is_refused(spec: str):
    with pytest.raises(BadSetting, match=re.escape(f"prompt={spec}")):
        make_prompt(spec, TOKENIZER, stop=None)


@pytest.mark.parametrize("question", ["{question}", "a {question} of {braces}", "{}", "{0}", "}{", "%s \\n $1"])
@pytest.mark.parametrize("spec", ["plain", "chat", "few-shot", "{question}"])
def test_braces_in_a_question_are_ordinary_characters(spec: str, question: str):
    prompt = make_prompt(spec, CHATTY, stop=None)
    before, after = prompt.text.split("{question}")
    assert prompt.fill(question) == before + question + after


@given(st.text(max_size=20))
def test_any_question_is_in_the_prompt_unchanged(question: str):
    assert make_prompt("plain", TOKENIZER, stop=None).fill(question) == PLAIN.split("{question}")[0] + question + " A:"


def test_ids_are_the_tokens_of_the_filled_prompt():
    prompt = make_prompt("few-shot", TOKENIZER, stop=None)
    found = prompt.encode(TOKENIZER, [Question("a", "who?"), Question("b", "Zoë")])
    assert [TOKENIZER.decode(one.ids) for one in found] == [
        FEW_SHOT.replace("{question}", text) for text in ("who?", "Zoë")
    ]
    assert prompt.encode(TOKENIZER, []) == []


USER, SYSTEM = {"role": "user", "content": "Who? "}, {"role": "system", "content": "Be brief"}


def test_a_prompt_or_messages_or_ids_of_a_question_are_used_as_they_are_in_their_place():
    questions = [
        Question("a", "Who?"),
        Question("b", "Who?", prompt=" All of\nit {question}"),
        Question("c", "Who?", messages=(SYSTEM, USER)),
        Question("d", "Who?", prompt="other", given=Given(ids=(7,), prompt_ids=(5, 6))),
        Question("e", "Where?"),
    ]
    *filled, given, last = [one.ids for one in make_prompt("plain", CHATTY, stop=None).encode(CHATTY, questions)]
    assert [CHATTY.decode(ids) for ids in filled] == [
        "Answer the question concisely. Q: Who? A:",
        " All of\nit {question}",
        "<system>Be brief</system><user>Who?</user><assistant>",
    ]
    assert given == [5, 6]
    assert CHATTY.decode(last) == "Answer the question concisely. Q: Where? A:"


def test_special_tokens_are_added_to_a_prompt_that_does_not_begin_with_one():
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(bos_token="<eos>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
    prompt = make_prompt("plain", tokenizer, stop=None)
    one, other = prompt.encode(tokenizer, [Question("a", "?", prompt="Who?"), Question("b", "?", prompt="<eos>Who?")])
    assert one.ids == other.ids
    assert tokenizer.decode(one.ids) == "<eos>Who?"


def test_messages_for_a_model_without_a_chat_template_are_refused():
    with pytest.raises(BadSetting, match="chat template"):
        make_prompt("plain", TOKENIZER, stop=None).encode(TOKENIZER, [Question("a", "Who?", messages=(USER,))])


@pytest.mark.parametrize(
    ("given_stop", "stop"),
    [
        ("", ()),
        (".", (".",)),
        (r"\n", ("\n",)),
        (r"\n|Q:", ("\n", "Q:")),
        ("|a||b|", ("a", "b")),
        ("é。", ("é。",)),
        (r"é\n|。🚁\t", ("é\n", "。🚁\t")),
        (r"a\\b", ("a\\b",)),
    ],
    ids=["none", "one", "escaped", "two", "empty parts", "accents", "accents and escapes", "backslash"],
)
@pytest.mark.parametrize("spec", ["plain", "chat"])
def test_stop_strings_are_separated_by_bars_and_may_contain_escapes(spec: str, given_stop: str, stop: tuple[str, ...]):
    assert make_prompt(spec, CHATTY, stop=given_stop).stop == stop
