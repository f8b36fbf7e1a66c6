"""Which characters a token covers, which part of a text is the answer, and answers that are given."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import BadSetting
from millstream.traces.llm.answers import Part, cut_answer, decode, given_answer
from millstream.traces.llm.questions import Given
from support.extras import need
from support.tiny_models import EOS, make_tokenizer

need("transformers")

TOKENIZER = make_tokenizer()


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def cut(text: str, *stop: str, **part: Any) -> Any:
    return cut_answer(TOKENIZER, [*ids_of(text), EOS], eos={EOS}, stop=stop, part=Part(**part))


# -- characters of tokens


@given(st.text(max_size=30))
def test_the_tokens_of_a_text_cover_it(text: str):
    decoded, ranges, complete = decode(TOKENIZER, ids_of(text))
    assert decoded == text and len(ranges) == len(complete) == len(ids_of(text))
    covered = {place for start, end in ranges for place in range(start, end)}
    assert covered == set(range(len(text)))
    assert [start for start, _ in ranges] == sorted(start for start, _ in ranges)
    assert complete == sorted(complete) and (not text or complete[-1] == len(text))


def test_every_part_of_a_character_covers_all_of_it():
    ids = ids_of("a🚁é")
    assert len(ids) == 1 + 4 + 2
    text, ranges, complete = decode(TOKENIZER, ids)
    assert (text, ranges) == ("a🚁é", [(0, 1)] + [(1, 2)] * 4 + [(2, 3)] * 2)
    assert complete == [1, 1, 1, 1, 2, 2, 3]


def test_a_special_token_has_no_text():
    ids = [*ids_of("the"), EOS, *ids_of(" fox")]
    text, ranges, _ = decode(TOKENIZER, ids)
    assert text == "the fox" and ranges[1] == (3, 3)


def test_a_character_that_is_never_complete_is_a_replacement_character():
    text, ranges, complete = decode(TOKENIZER, ids_of("the🚁")[:-1])
    assert text == "the\ufffd" and ranges == [(0, 3)] + [(3, 4)] * 3 and complete[-1] == 3


def test_a_decoder_whose_tokens_depend_on_what_follows_is_decoded_from_the_start():
    class Clean:
        """Removes the space before a full stop, as `clean_up_tokenization_spaces` does."""

        def decode(self, ids: list[int], **options: object) -> str:
            return "".join({0: "the", 1: " ", 2: "."}[token] for token in ids).replace(" .", ".")

    text, ranges, complete = decode(Clean(), [0, 1, 2])  # pyright: ignore[reportArgumentType]
    assert (text, ranges, complete) == ("the.", [(0, 3), (3, 3), (3, 4)], [3, 3, 4])


# -- which part


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Paris. It is big.", "Paris."),
        ("J. K. Rowling wrote it. Yes", "J. K. Rowling wrote it."),
        ('"Paris!" he said', '"Paris!"'),
        ("3.5 million people", "3.5 million people"),
        ("Dr. Who? No", "Dr. Who?"),
        ("1. Paris is it. 2. No", "1. Paris is it."),
        ("Paris\nLondon", "Paris"),
        ("\n Paris ", "Paris"),
    ],
)
def test_the_first_sentence(text: str, answer: str):
    assert cut(text, end="sentence").text == answer


def test_the_first_line():
    found = cut("\n the. fox \n dog", end="line")
    assert found.text == "the. fox" and found.whole_text == "\n the. fox \n dog"
    assert found.ids == [*ids_of("\n the. fox \n dog"), EOS]
    assert found.length == len(ids_of("\n the. fox "))


def test_an_answer_begins_after_the_mark():
    found = cut("the fox</think>\n\nParis is", after="</think>")
    assert found.text == "Paris is" and found.begin == len(ids_of("the fox</think>"))
    assert found.length == len(found.ids) - 1 - found.begin
    covered = [found.text[a:b] for a, b in found.offsets[found.begin : -1]]
    assert "".join(covered) == "Paris is" and set(found.offsets[: found.begin]) == {(0, 0)}


def test_a_mark_that_is_a_special_token():
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    ids = tokenizer("the fox</think>Paris")["input_ids"]
    found = cut_answer(tokenizer, [*ids, EOS], eos={EOS}, stop=(), part=Part(after="</think>"))
    assert (found.text, found.begin, found.whole_text) == ("Paris", 4, "the foxParis")


def test_reasoning_that_does_not_end_has_no_answer_and_a_text_without_reasoning_is_one():
    part = Part(after="</think>")
    cut_off = cut_answer(TOKENIZER, ids_of("the fox"), eos={EOS}, stop=(), part=part)
    assert (cut_off.text, cut_off.length, cut_off.finish, cut_off.begin) == ("", 0, "length", 2)
    assert cut("the fox", after="</think>").text == "the fox"


@pytest.mark.parametrize(("part", "named"), [({"end": "word"}, "answer_end=word"), ({"after": ""}, "answer_after")])
def test_an_unknown_part_is_refused(part: dict[str, str], named: str):
    with pytest.raises(BadSetting, match=named):
        Part(**part)


# -- given answers


def test_a_given_text_is_kept_as_it_is_with_the_characters_of_its_tokens():
    found = given_answer(TOKENIZER, Given(text="Zoë\n"), [*ids_of(" Zoë\n"), EOS], eos={EOS})
    assert (found.text, found.finish, found.length) == ("Zoë\n", "eos", len(found.ids) - 1)
    assert found.offsets is not None
    assert [found.text[a:b] for a, b in found.offsets] == ["", "Z", "o", "ë", "ë", "\n", ""]


def test_given_ids_without_a_text_are_decoded():
    found = given_answer(TOKENIZER, Given(ids=tuple(ids_of(" Paris"))), ids_of(" Paris"), eos={EOS})
    assert (found.text, found.whole_text, found.finish) == ("Paris", " Paris", "given")


@pytest.mark.parametrize("stop", ["\n", "\nQ:", "x ju", " the"])
@pytest.mark.parametrize("part", [Part(), Part(after="</think>"), Part(end="sentence")], ids=str)
def test_a_text_without_the_stop_string_of_its_tokens_is_the_answer_that_generation_ends_there(stop: str, part: Part):
    ids = ids_of(" so</think> Zoë is. A fox\nQ: the fox jumps over the")
    wanted = cut_answer(TOKENIZER, ids, eos={EOS}, stop=(stop,), part=part)
    text = TOKENIZER.decode(ids).partition(stop)[0]  # as servers return it, with the tokens of the stop string
    found = given_answer(TOKENIZER, Given(text=text, ids=tuple(wanted.ids)), wanted.ids, eos={EOS}, part=part)
    assert (found.text.strip(), found.length, found.begin) == (wanted.text, wanted.length, wanted.begin)
    lead = len(found.text) - len(found.text.lstrip())
    ends = [(max(first - lead, 0), min(max(last - lead, 0), len(wanted.text))) for first, last in found.offsets or ()]
    assert ends == wanted.offsets


@pytest.mark.parametrize("more", ["", "\nQ:"])
def test_a_text_without_the_reasoning_of_its_tokens_begins_after_it(more: str):
    ids = ids_of(f" so</think>\n\n Zoë is. A fox{more}")
    found = given_answer(
        TOKENIZER, Given(text="Zoë is. A fox", ids=tuple(ids)), ids, eos={EOS}, part=Part(after="</think>")
    )
    begin = len(ids_of(" so</think>"))
    assert (found.text, found.begin, found.length) == ("Zoë is. A fox", begin, len(ids_of("\n\n Zoë is. A fox")))
    assert found.offsets is not None
    covered = [found.text[a:b] for a, b in found.offsets[begin:]]
    assert "".join(covered).replace("ëë", "ë") == found.text
    sentence = Part(after="</think>", end="sentence")
    first = given_answer(TOKENIZER, Given(text="Zoë is. A fox", ids=tuple(ids)), ids, eos={EOS}, part=sentence)
    assert (first.text, first.begin) == ("Zoë is.", begin)


def test_an_empty_text_before_a_stop_string_has_no_tokens():
    found = given_answer(TOKENIZER, Given(text="", ids=tuple(ids_of("\n"))), ids_of("\n"), eos={EOS})
    assert (found.text, found.length, found.offsets) == ("", 0, [(0, 0)])


def test_a_text_of_other_tokens_has_no_offsets():
    found = given_answer(TOKENIZER, Given(text="London"), ids_of("Paris"), eos={EOS})
    assert (found.text, found.offsets, found.length) == ("London", None, len(ids_of("Paris")))


def test_a_tokenizer_that_changes_texts_says_where_its_tokens_are():
    from tokenizers import normalizers

    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    found = given_answer(tokenizer, Given(text="THE FOX"), tokenizer("THE FOX")["input_ids"], eos={EOS})
    assert found.offsets is not None and found.text == "THE FOX"
    assert found.offsets[0] == (0, 3) and found.offsets[-1][1] == 7


def test_the_first_sentence_of_a_given_answer():
    text = " Paris. London."
    found = given_answer(TOKENIZER, Given(text=text), ids_of(text), eos={EOS}, part=Part(end="sentence"))
    assert (found.text, found.whole_text) == ("Paris.", text)
    assert found.length == len(ids_of(" Paris."))
