"""Answers that are given, samples that share a prompt, long prompts in chunks: as one pass over the same tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream.traces.llm.answers import Part
from millstream.traces.llm.fields import NUM_EDGES, Need
from millstream.traces.llm.questions import Given, Question, Span
from support.effort import THOROUGH
from support.extras import need
from support.slow_reference import look
from support.tiny_models import (
    EOS,
    NEW,
    QUESTIONS,
    TinyModels,
    generated,
    load,
    make_model,
    make_tokenizer,
    make_tracer,
)

need("transformers")

CLOSE = {"rtol": 0, "atol": 1e-5}
TEXTS = [" Paris", " because of the lazy dog; Paris", "", " Zoë 🚁 jumps", " the the the"]


def given_ids(tiny: TinyModels, kind: str) -> list[Question]:
    """QUESTIONS with the answers that the model generates to them, as ids."""
    answers = [tuple(ids) for ids, _ in tiny.expected(kind, 1)]
    return [replace(one, given=Given(ids=ids)) for one, ids in zip(QUESTIONS, answers, strict=True)]


def assert_as_seen(record: Any, seen: Any) -> None:
    """Every field, from what the slow reference saw of the tokens."""
    first, count = record["prompt_len"], record["answer_len"]
    torch.testing.assert_close(record["hidden"], seen.hidden, **CLOSE)
    torch.testing.assert_close(record["answer_hidden"], seen.hidden[:, first:], **CLOSE)
    torch.testing.assert_close(record["post_norm"], seen.post_norm, **CLOSE)
    torch.testing.assert_close(record["attention"], seen.attention, **CLOSE)
    answer = seen.hidden[:, first : first + count]
    question = first - 1 - record["thinking_len"]
    states = torch.stack([seen.hidden[:, question], answer[:, 0], answer[:, -1], answer.mean(1)], dim=1)
    torch.testing.assert_close(record["states"][:, :4], states, **CLOSE)
    mean = seen.attention.mean(1)
    sorted_weights = torch.stack(
        [mean[:, row].where(torch.arange(mean.shape[-1]) < row, 0.0) for row in range(mean.shape[1])], dim=1
    ).sort(descending=True)
    edges = sorted_weights.values[..., :NUM_EDGES]
    torch.testing.assert_close(record["edge_weight"][..., : edges.shape[-1]], edges, **CLOSE)
    own = seen.attention.diagonal(dim1=2, dim2=3)
    torch.testing.assert_close(record["self_attention"], own[..., first - 1 :], **CLOSE)
    torch.testing.assert_close(record["attention_logdet"], own.log().mean(-1), **CLOSE)
    received = torch.stack([seen.attention[..., j:, j].mean(-1) for j in range(mean.shape[-1])], dim=-1)
    values = (received - own).sort(descending=True).values[..., :10]
    torch.testing.assert_close(record["laplacian"][..., : values.shape[-1]], values, **CLOSE)
    logprobs = seen.logits[first - 1 : -1].log_softmax(-1)
    ids = record["tokens"][first:].long()
    torch.testing.assert_close(record["logprobs"], logprobs.gather(1, ids[:, None])[:, 0], **CLOSE)
    torch.testing.assert_close(record["entropy"], -(logprobs.exp() * logprobs).sum(-1), **CLOSE)


# -- given answers


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "gemma2", "gptoss"])
def test_given_ids_are_replayed_as_one_unpadded_pass_would_see_them(tiny: TinyModels, kind: str, batch_size: int):
    tracer = make_tracer(tiny.loaded(kind))
    tracer.loaded.model.generate = None  # nothing is generated
    try:
        encoded = tracer.encode(given_ids(tiny, kind))
        records: list[Any] = []
        for first in range(0, len(encoded), batch_size):
            records += tracer.trace(encoded[first : first + batch_size])
    finally:
        del tracer.loaded.model.generate
    for record, (ids, seen) in zip(records, tiny.expected(kind, 1), strict=True):
        assert generated(record) == ids
        assert_as_seen(record, seen)


def test_a_replayed_answer_has_the_record_of_a_generated_one(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"))
    replayed = tracer.trace(tracer.encode(given_ids(tiny, "llama")))
    timed = {"generate_s", "replay_s", "finish"}
    for record, other in zip(replayed, tiny.traced("llama", 1, 5), strict=True):
        assert list(record) == list(other)
        for name in record.keys() - timed:
            if isinstance(record[name], torch.Tensor):
                torch.testing.assert_close(record[name], other[name], **CLOSE)
            else:
                assert record[name] == other[name], name
        assert record["finish"] in ("given", "eos")


def test_the_ids_of_a_prompt_are_used_as_they_are(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"))
    given = Given(ids=(7, 8, EOS), prompt_ids=(9, 10, 11, 300 - 1), logprobs=(-1.5, -2.0, -0.5))
    record: Any = tracer.trace(tracer.encode([Question("a", "who?", given=given)]))[0]
    assert record["tokens"].tolist() == [9, 10, 11, 299, 7, 8, EOS]
    assert (record["prompt_len"], record["answer_len"], record["finish"]) == (4, 2, "eos")
    assert record["given_logprobs"].tolist() == [-1.5, -2.0, -0.5]
    assert_as_seen(record, look(tiny.eager("llama"), record["tokens"].tolist()))


def test_given_texts_are_replayed_as_the_tokens_that_follow_the_prompt(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"))
    questions = [replace(one, given=Given(text=text)) for one, text in zip(QUESTIONS, TEXTS, strict=True)]
    records: Any = tracer.trace(tracer.encode(questions))
    tokenizer = make_tokenizer()
    for question, text, record in zip(questions, TEXTS, records, strict=True):
        if not text:
            assert record["error"] == "the given answer has no tokens"
            continue
        prompt, whole = (tokenizer(both)["input_ids"] for both in (question.question, question.question + text))
        assert record["tokens"].tolist() == whole and record["prompt_len"] == len(prompt)
        assert record["generated_answer"] == text
        assert_as_seen(record, look(tiny.eager("llama"), whole))


def test_a_space_is_put_between_a_prompt_of_ours_and_an_answer_and_the_answer_is_kept(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"))
    spaced, bare, own = tracer.encode(
        [
            Question("a", "who?", given=Given(text=" Paris")),
            Question("b", "who?", given=Given(text="Paris")),
            Question("c", "who?", prompt="who?", given=Given(text="Paris")),
        ]
    )
    assert spaced.answer_ids == bare.answer_ids != own.answer_ids
    records: Any = tracer.trace([spaced, bare, own])
    assert [record["generated_answer"] for record in records] == [" Paris", "Paris", "Paris"]
    assert records[1]["offsets"].tolist() == [[max(a - 1, 0), b - 1] for a, b in records[0]["offsets"].tolist()]


def test_an_answer_that_shares_a_token_with_the_prompt_is_tokenised_alone(tiny: TinyModels):
    tokenizer = make_tokenizer()
    prompt = tokenizer("th")["input_ids"]
    assert tokenizer("the")["input_ids"][: len(prompt)] != prompt
    tracer = make_tracer(tiny.loaded("llama"))
    encoded = tracer.encode([Question("a", "?", prompt="th", given=Given(text="e"))])[0]
    assert (encoded.ids, encoded.answer_ids) == (prompt, tokenizer("e")["input_ids"])


def test_spans_verdict_and_what_the_file_says_are_kept(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"), fields="heads")
    given = Question(
        "a", "who?", given=Given(text=" the fox"), spans=(Span(1, 4, "invented"),), verdict="wrong", about="{}"
    )
    record: Any = tracer.trace(tracer.encode([replace(given, sample=3)]))[0]
    assert record["spans"] == '[{"start": 1, "end": 4, "label": "invented"}]'
    assert (record["given_verdict"], record["about"], record["record_id"]) == ("wrong", "{}", "a#3")
    assert [record["generated_answer"][a:b] for a, b in record["offsets"].tolist()] == [" the", " fo", "x"]


def test_given_and_generated_answers_may_be_in_one_batch(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"))
    mixed = [QUESTIONS[0], given_ids(tiny, "llama")[1], QUESTIONS[2]]
    for record, other in zip(tracer.trace(tracer.encode(mixed)), tiny.traced("llama", 1, 5), strict=False):
        assert generated(record) == generated(other)
        torch.testing.assert_close(record["hidden"], other["hidden"], **CLOSE)


# -- long prompts


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("long"), context=16_384)


LONG_FIELDS = "answer_hidden,edges,edge_heads,heads,laplacian,topology,nodes,states"


LENGTH = 8000 if THOROUGH else 2000


@pytest.mark.parametrize("given", [False, True], ids=["generated", "given"])
def test_a_long_prompt_is_replayed_in_chunks_within_memory(
    long_model: Path, monkeypatch: pytest.MonkeyPatch, given: bool
):
    loaded = load(long_model)
    memory = 8_000 * LENGTH
    tracer = make_tracer(loaded, fields=LONG_FIELDS, memory=memory)
    generator = torch.Generator().manual_seed(0)
    prompt = tuple(torch.randint(2, 300, (LENGTH,), generator=generator).tolist())
    question = Question("a", "who?", given=Given(ids=(5, 6, 7), prompt_ids=prompt))
    encoded = tracer.encode([question])[0]
    largest = 0

    def watch(module: object, args: Any, kwargs: Any) -> None:
        nonlocal largest
        largest = max(largest, kwargs["input_ids"].shape[1])

    loaded.base.register_forward_pre_hook(watch, with_kwargs=True)
    record: Any = tracer.trace([encoded if given else replace(encoded, answer_ids=None)])[0]
    assert record["status"] == "ok", record["error"]
    assert largest * 4 * (LENGTH + 3) * 4 < memory / 3 and largest >= 16
    whole = make_tracer(load(long_model), fields=LONG_FIELDS, memory=1 << 36)
    given_again = Question("a", "who?", given=Given(ids=tuple(generated(record)), prompt_ids=prompt))
    other: Any = whole.trace(whole.encode([given_again]))[0]
    for name in (
        *("answer_hidden", "edge_weight", "edge_heads", "attention_entropy", "laplacian", "topology"),
        *("nodes", "states", "logprobs"),
    ):
        torch.testing.assert_close(record[name], other[name], **CLOSE)


def test_8000_tokens_in_chunks_are_those_of_one_plain_pass(long_model: Path):
    from transformers import AutoModelForCausalLM

    tracer = make_tracer(load(long_model), fields="answer_hidden,states,heads", memory=40_000_000)
    ids = torch.randint(2, 300, (8000,), generator=torch.Generator().manual_seed(0)).tolist()
    question = Question("a", "who?", given=Given(ids=tuple(ids[-9:]), prompt_ids=tuple(ids[:-9])))
    record: Any = tracer.trace(tracer.encode([question]))[0]
    plain: Any = AutoModelForCausalLM.from_pretrained(long_model, dtype="float32").eval()
    with torch.no_grad():
        seen = plain(torch.tensor([ids]), output_hidden_states=True, logits_to_keep=10)
    layers = torch.stack(seen.hidden_states[:-1])[:, 0]  # the last is normalised
    torch.testing.assert_close(record["answer_hidden"][:-1], layers[:, -9:], **CLOSE)
    torch.testing.assert_close(record["states"][:-1, 0], layers[:, -10], **CLOSE)
    logprobs = seen.logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[-9:])[:, None])[:, 0]
    torch.testing.assert_close(record["logprobs"], logprobs, **CLOSE)


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}, {"samples": 2, "temperature": 1.0}], ids=str)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_chunks_do_not_change_a_record(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, kind: str, how: dict[str, Any]
):
    tracer = make_tracer(tiny.loaded(kind), trace_samples=True, **how)
    encoded = tracer.encode([*QUESTIONS, *(replace(one, id=f"g{one.id}") for one in given_ids(tiny, kind))])
    whole = tracer.trace(encoded)
    monkeypatch.setattr(Need, "chunk", lambda *args, **options: 3)
    for record, other in zip(tracer.trace(encoded), whole, strict=True):
        assert generated(record) == generated(other)
        for name, value in record.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                torch.testing.assert_close(value, other[name], **CLOSE)


def test_a_question_that_does_not_fit_in_memory_is_a_record_that_says_so(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"), memory=100_000)
    record: Any = tracer.trace(tracer.encode(QUESTIONS[1:2]))[0]
    assert record["status"] == "error" and "more than memory=" in record["error"]


# -- samples


def test_samples_share_the_prompt_and_are_those_of_separate_runs(tiny: TinyModels):
    loaded = tiny.loaded("llama")
    together = make_tracer(loaded, samples=3, temperature=1.0, seed=4, trace_samples=True)
    records: Any = together.trace(together.encode(QUESTIONS))
    assert [record["record_id"] for record in records[:5]] == ["q0", "q0#1", "q0#2", "q0#3", "q1"]
    assert [record["sample"] for record in records[:5]] == [0, 1, 2, 3, 0]
    for record, other in zip(records[::4], tiny.traced("llama", 1, 5), strict=True):
        assert generated(record) == generated(other)  # the greedy answer
    assert len({tuple(generated(record)) for record in records[:4]}) == 4
    for record in records:
        assert_as_seen(record, look(tiny.eager("llama"), record["tokens"].tolist()))


def test_the_prompt_of_samples_is_prefilled_once(tiny: TinyModels):
    loaded = load(tiny.folder("llama"))
    tracer = make_tracer(loaded, samples=3, temperature=1.0)
    shapes: list[tuple[int, ...]] = []

    def watch(module: object, args: Any, kwargs: Any) -> None:
        shapes.append(tuple(kwargs["input_ids"].shape))

    loaded.base.register_forward_pre_hook(watch, with_kwargs=True)
    tracer.trace(tracer.encode(QUESTIONS[1:3]))
    width = max(map(len, tiny.prompts()[1:3]))
    assert shapes[0] == (2, width - 1)
    assert shapes[1:-1] == [(8, 1)] * (len(shapes) - 2)
    assert shapes[-1][0] == 2  # of the greedy answers only


def test_samples_keep_their_text_and_log_probs_only_by_default(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"), samples=2, temperature=1.0)
    greedy, *drawn = tracer.trace(tracer.encode(QUESTIONS[:1]))
    assert greedy["hidden"] is not None
    for record in drawn:
        assert record["hidden"] is None and record["replay_s"] is None and record["status"] == "ok"
        seen = look(tiny.eager("llama"), record["tokens"].tolist())  # pyright: ignore
        logprobs = seen.logits[record["prompt_len"] - 1 : -1].log_softmax(-1)  # pyright: ignore
        own = logprobs.gather(1, torch.tensor(generated(record))[:, None])[:, 0]
        torch.testing.assert_close(record["logprobs"], own, **CLOSE)


def test_a_sample_is_the_same_in_any_batch(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"), samples=2, temperature=1.0, fields="heads")
    together = tracer.trace(tracer.encode(QUESTIONS))
    alone = tracer.trace(tracer.encode(QUESTIONS[3:4]))
    assert [generated(record) for record in together[9:12]] == [generated(record) for record in alone]


def test_a_question_that_fails_has_a_record_for_each_sample(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"), samples=2, temperature=1.0)
    records = tracer.trace(tracer.encode([Question("empty", "")]))
    assert [record["record_id"] for record in records] == ["empty", "empty#1", "empty#2"]
    assert {record["error"] for record in records} == {"the prompt has no tokens"}


# -- reasoning


def test_states_of_an_answer_after_reasoning_and_of_the_reasoning(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"), part=Part(after=";"))
    given = Given(text=" the lazy dog; Paris")
    record: Any = tracer.trace(tracer.encode([Question("a", "who?", given=given)]))[0]
    seen = look(tiny.eager("llama"), record["tokens"].tolist())
    begin, question = record["prompt_len"], len(tracer.encode([Question("a", "who?")])[0].ids)
    assert begin - record["thinking_len"] == question
    assert record["generated_answer"] == "Paris" and record["generated_text"] == given.text
    assert_as_seen(record, seen)
    thinking = seen.hidden[:, question:begin]
    torch.testing.assert_close(record["states"][:, 4], thinking[:, -1], **CLOSE)
    torch.testing.assert_close(record["states"][:, 5], thinking.mean(1), **CLOSE)


def test_reasoning_that_is_generated_keeps_its_log_probs_apart(tiny: TinyModels):
    plain = make_tracer(tiny.loaded("llama"), max_new_tokens=12)
    before: Any = plain.trace(plain.encode(QUESTIONS))
    marks = [make_tokenizer().decode(generated(record)[3:4]) for record in before]
    place = next(
        place for place, mark in enumerate(marks) if mark.isascii() and before[place]["generated_text"].count(mark) == 1
    )
    tracer = make_tracer(tiny.loaded("llama"), part=Part(after=marks[place]), max_new_tokens=12)
    record: Any = tracer.trace(tracer.encode(QUESTIONS))[place]
    assert record["tokens"].tolist() == before[place]["tokens"].tolist()
    assert (record["thinking_len"], len(record["logprobs"])) == (4, 12 - 4)
    both = torch.cat([record["thinking_logprobs"], record["logprobs"]])
    torch.testing.assert_close(both, before[place]["logprobs"], **CLOSE)
    assert_as_seen(record, look(tiny.eager("llama"), record["tokens"].tolist()))


def test_reasoning_without_an_end_has_an_empty_answer(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"), part=Part(after="</think>"))
    record: Any = tracer.trace(tracer.encode(QUESTIONS[:1]))[0]
    assert (record["generated_answer"], record["answer_len"], record["thinking_len"]) == ("", 0, NEW - 1)
    assert record["logprobs"].shape == (1,) and record["hidden"].shape[1] == len(record["tokens"])


def test_each_given_answer_to_a_question_keeps_its_context(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"), fields="heads")
    question = Question("a", "who?", context="the fox", given=Given(text=" the"))
    records = tracer.trace(tracer.encode([question, replace(question, sample=1)]))
    assert [record["context"] for record in records] == ["the fox", "the fox"]
