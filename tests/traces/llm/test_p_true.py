"""P(True) averages both orders of the choices, each equal to a separate forward pass."""

from typing import Any

import pytest
import torch

from millstream.traces.llm.tracer import p_true
from support.extras import need
from support.slow_reference import look
from support.tiny_models import QUESTIONS, TinyModels, load, make_tokenizer, make_tracer

need("transformers")

TEXT = "Question: {}\nProposed answer: {}\nIs the proposed answer:\n (A) {}\n (B) {}\nThe proposed answer is: ("
PAIRS = [("who?", "Paris"), ("what is the capital of France and why", ""), ("{question} {0}", "the {answer} fox")]


def choose_a(model: Any, question: str, answer: str, first: str, second: str) -> float:
    """The probability of the letter A among A and B."""
    tokenizer = make_tokenizer()
    likely = look(model, tokenizer(TEXT.format(question, answer, first, second))["input_ids"]).logits[-1].softmax(-1)
    a, b = (float(likely[tokenizer(letter)["input_ids"][0]]) for letter in "AB")
    return a / (a + b)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_p_true_is_the_mean_over_both_orders_of_the_choices(tiny: TinyModels, kind: str):
    tracer = make_tracer(tiny.loaded(kind))
    with torch.inference_mode():
        records: Any = p_true(tracer.loaded, PAIRS)
    for record, (question, answer) in zip(records, PAIRS, strict=True):
        as_a = choose_a(tiny.eager(kind), question, answer, "True", "False")
        as_b = 1 - choose_a(tiny.eager(kind), question, answer, "False", "True")
        assert record["p_true_a"] == pytest.approx(as_a, abs=1e-5)
        assert record["p_true_b"] == pytest.approx(as_b, abs=1e-5)
        assert record["p_true"] == pytest.approx((as_a + as_b) / 2, abs=1e-5)
        assert abs(as_a - as_b) > 1e-3


def test_a_model_that_always_prefers_one_letter_is_undecided(tiny: TinyModels):
    loaded = load(tiny.folder("llama"))
    head = torch.nn.Linear(32, 300)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
        head.bias[make_tokenizer()("A")["input_ids"][0]] = 2.0
    loaded.model.lm_head = head
    with torch.inference_mode():
        record: Any = p_true(loaded, PAIRS[:1])[0]
    assert record["p_true_a"] == pytest.approx(torch.tensor(2.0).sigmoid().item(), abs=1e-6)
    assert record["p_true"] == pytest.approx(0.5, abs=1e-6)


def test_p_true_of_a_record_is_about_its_own_answer(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"), fields="heads", p_true=True)
    records: Any = tracer.trace(tracer.encode(QUESTIONS))
    assert [name for name in tracer.schema() if name.startswith("p_true")] == ["p_true", "p_true_a", "p_true_b"]
    for record in records:
        expected = choose_a(tiny.eager("llama"), record["question"], record["generated_answer"], "True", "False")
        assert record["p_true_a"] == pytest.approx(expected, abs=1e-5)


def test_p_true_is_off_by_default(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"), fields="heads")
    assert not any("p_true" in name for name in tracer.trace(tracer.encode(QUESTIONS[:1]))[0])
