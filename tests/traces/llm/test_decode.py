"""Where an answer ends, and that generation ends there too."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import BadSetting, BadSource
from millstream.traces.llm import transformers
from millstream.traces.llm.answers import Answer, cut_answer
from millstream.traces.llm.decoding import Decoding, Draw
from millstream.traces.llm.questions import Question
from support.extras import need
from support.tiny_models import EOS, PAD, TinyModels, generated, load, make_tokenizer, make_tracer, reciting

need("transformers")

TOKENIZER = make_tokenizer()


def ids_of(*texts: str) -> list[int]:
    """The tokens of each text."""
    return [token for text in texts for token in TOKENIZER(text)["input_ids"]]


def cut(ids: list[int], *stop: str) -> Answer:
    return cut_answer(TOKENIZER, ids, eos={EOS}, stop=stop)


# -- where an answer ends


def test_an_answer_ends_before_the_end_of_text_token_which_is_kept():
    assert cut([*ids_of("the", " is"), EOS, PAD, PAD]) == Answer(
        [*ids_of("the", " is"), EOS], 2, "the is", "the is", "eos"
    )


def test_an_answer_that_hits_the_length_limit_is_everything_generated():
    ids = ids_of(" the", " capital")
    assert cut(ids, "\n") == Answer(ids, 2, "the capital", " the capital", "length")


def test_an_answer_that_is_only_the_end_of_text_token_is_empty():
    assert cut([EOS, PAD]) == Answer([EOS], 0, "", "", "eos")


def test_an_answer_ends_before_a_stop_string_and_its_ids_with_the_token_that_completed_it():
    ids = ids_of("the", " of", "\n", " is", " is")
    assert cut(ids, "\n") == Answer(ids[:3], 2, "the of", "the of\n", "stop")


def test_a_stop_string_in_the_middle_of_a_token_leaves_the_whole_token_out_of_the_length():
    assert len(ids_of(" capital")) == 1
    assert cut(ids_of("the", " capital", " is"), "pit") == Answer(
        ids_of("the", " capital"), 1, "the ca", "the capital", "stop"
    )


def test_a_stop_string_over_several_tokens_is_found():
    ids = ids_of("the", " ", "A", "B", " is")
    assert cut(ids, " AB") == Answer(ids[:4], 1, "the", "the AB", "stop")


def test_a_stop_string_at_the_start_leaves_an_empty_answer():
    assert cut(ids_of("\n", "the"), "\n") == Answer(ids_of("\n"), 0, "", "\n", "stop")


def test_the_first_of_several_stop_strings_ends_the_answer():
    ids = ids_of("the", " of", "\n", " is")
    assert cut(ids, " is", "\n") == cut(ids, "\n", " is") == Answer(ids[:3], 2, "the of", "the of\n", "stop")


def test_a_longer_stop_string_completed_later_does_not_shorten_the_answer():
    ids = ids_of("A", "B", "C")
    assert cut(ids, "B", "ABC") == Answer(ids[:2], 1, "A", "AB", "stop")


def test_a_stop_string_after_the_end_of_text_is_ignored():
    assert cut([*ids_of("the"), EOS, *ids_of("\n")], "\n").finish == "eos"


def test_padding_after_a_stop_string_is_cut_off():
    ids = ids_of("the", "\n")
    assert cut([*ids, PAD, PAD], "\n") == cut([*ids, EOS, EOS], "\n") == cut(ids, "\n")


def test_a_padding_token_that_was_generated_is_kept():
    ids = [*ids_of("the"), PAD]
    assert cut(ids, "\n") == Answer(ids, 2, "the", "the", "length")


def test_multibyte_characters_are_counted_in_tokens():
    ids = ids_of("ë", "🚁", "\n", "the")
    assert cut(ids, "\n") == Answer(ids[:7], 6, "ë🚁", "ë🚁\n", "stop")


def test_a_stop_string_of_several_bytes_ends_with_its_last_byte():
    ids = ids_of("the", "ë", " is")
    assert cut(ids, "ë") == Answer(ids[:3], 1, "the", "theë", "stop")


def test_an_incomplete_character_at_the_end_is_not_a_stop_string():
    assert cut(ids_of("the", "ë")[:2], "ë").finish == "length"


@given(st.lists(st.integers(0, 299), min_size=1, max_size=12), st.lists(st.sampled_from(["the", "e", " ", "\n", "is"])))
def test_an_answer_is_a_prefix_of_the_generated_text_without_stop_strings(ids: list[int], stop: list[str]):
    answer = cut(ids, *stop)
    assert answer.ids == ids[: len(answer.ids)] and 0 <= answer.length <= len(answer.ids)
    assert answer.text in answer.whole_text and not any(mark in answer.text for mark in stop)
    assert not any(mark in TOKENIZER.decode(ids[: answer.length], skip_special_tokens=True) for mark in stop)
    assert answer.length == len(answer.ids) or answer.finish != "length"


# -- where generation ends


def recited(tiny: TinyModels, text: str, **how: Any) -> Any:
    loaded = reciting(load(tiny.folder("llama")), [*ids_of(text), EOS])
    tracer = make_tracer(loaded, fields="post_norm", max_new_tokens=30, **how)
    return tracer.trace(tracer.encode([Question("q", text[0])]))[0]


def test_generation_ends_at_the_end_of_text(tiny: TinyModels):
    record = recited(tiny, "?the fox jumps")
    assert generated(record) == [*ids_of("the fox jumps"), EOS] and record["finish"] == "eos"


@pytest.mark.parametrize("stop", ["f", " f", "e f", "the fo"])
def test_generation_ends_with_the_token_that_completes_a_stop_string(tiny: TinyModels, stop: str):
    record = recited(tiny, "?the fox jumps", stop=(stop,))
    assert generated(record) == ids_of("the fo") and record["finish"] == "stop"
    assert record["logprobs"].shape == (len(ids_of("the fo")),)


def test_generation_ends_at_a_stop_string_of_many_bytes(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    stop = "éжאاλ"  # ten tokens of one byte
    loaded = reciting(load(tiny.folder("llama")), [*ids_of(f"?the{stop} fox"), EOS])
    widths: list[int] = []
    generate = loaded.model.generate

    def watched(**options: Any) -> Any:
        found = generate(**options)
        widths.append(found.sequences.shape[1])
        return found

    monkeypatch.setattr(loaded.model, "generate", watched)
    tracer = make_tracer(loaded, fields="post_norm", max_new_tokens=30, stop=(stop,))
    record = tracer.trace(tracer.encode([Question("q", "?")]))[0]
    assert record["generated_answer"] == "the" and widths == [1 + len(ids_of(f"the{stop}"))]


def test_a_stop_string_in_the_prompt_is_ignored(tiny: TinyModels):
    loaded = reciting(load(tiny.folder("llama")), [*ids_of("?the fox"), EOS])
    tracer = make_tracer(loaded, fields="post_norm", stop=("\n",))
    record = tracer.trace(tracer.encode([Question("q", "\n\n?")]))[0]
    assert (record["generated_text"], record["finish"]) == ("the fox", "eos")


# -- sampling


def test_top_k_and_top_p_sample_only_from_the_most_likely_tokens(tiny: TinyModels):
    scores = torch.linspace(-2, 2, 50).expand(200, -1)
    names = [f"q{number}" for number in range(200)]

    def drawn(**how: Any) -> set[int]:
        steps = transformers().LogitsProcessorList(
            Decoding(temperature=1.0, **how).processors(names, torch.device("cpu"))
        )
        return set(steps(torch.zeros(200, 1, dtype=torch.int64), scores.clone()).argmax(-1).tolist())

    assert drawn(top_k=3) == {47, 48, 49}
    assert len(drawn(top_p=0.5)) < len(drawn())


def test_a_low_temperature_samples_the_most_likely_token(tiny: TinyModels):
    steps = transformers().LogitsProcessorList(Decoding(temperature=0.01).processors(["a", "b"], torch.device("cpu")))
    scores = torch.tensor([[0.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    assert steps(torch.zeros(2, 1, dtype=torch.int64), scores).argmax(-1).tolist() == [1, 0]


def test_every_step_uses_new_noise():
    draw = Draw(0, ["a"], torch.device("cpu"))
    scores = torch.zeros(1, 100)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    assert len({int(draw(ids, scores).argmax()) for _ in range(10)}) > 5


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 0},
        {"num_beams": 0},
        {"num_beams": 2, "temperature": 1.0},
        {"temperature": -1.0},
        {"top_k": 5},
        {"top_p": 0.9},
        {"samples": 2},
        {"samples": -1, "temperature": 1.0},
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any]):
    with pytest.raises(BadSetting):
        Decoding(**settings)


def test_weights_that_are_cut_off_are_named_in_one_line(tiny: TinyModels, tmp_path: Path):
    folder = Path(shutil.copytree(tiny.folder("llama"), tmp_path / "model"))
    weights = (folder / "model.safetensors").read_bytes()
    for size in (0, 4, 100, len(weights) // 2, len(weights) - 1):
        (folder / "model.safetensors").write_bytes(weights[:size])
        with pytest.raises(BadSource, match="cannot be loaded") as raised:
            load(folder)
        assert str(folder) in str(raised.value) and "\n" not in str(raised.value)


def test_a_model_without_attention_is_refused_in_one_line(tmp_path: Path):
    from transformers import MambaConfig

    MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(BadSource, match="no attention heads"):
        load(tmp_path)
