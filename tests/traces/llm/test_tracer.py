"""A record depends only on its question, not on its batch, on failures in it or on the model's generation config."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream.traces.llm.prompts import EncodedQuestion
from millstream.traces.llm.questions import Question
from millstream.traces.llm.tracer import Record, Tracer
from support.extras import need
from support.slow_reference import generate_beams, look
from support.tiny_models import (
    EOS,
    KINDS,
    NEW,
    PAD,
    QUESTIONS,
    TinyModels,
    generated,
    load,
    load_eager,
    make_model,
    make_tokenizer,
    make_tracer,
    reciting,
)

need("transformers")


def assert_same(record: Any, other: Any) -> None:
    """The same ids, and tensors within 1e-6 of their largest number."""
    assert record["status"] == other["status"] == "ok"
    assert torch.equal(record["tokens"], other["tokens"])
    for name, value in record.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            atol = 1e-6 * max(1.0, float(other[name].abs().max()))
            torch.testing.assert_close(
                value, other[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name} {text}"
            )


# -- which tokens


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_ids_equal_those_of_a_loop_of_full_forward_passes(tiny: TinyModels, kind: str, batch_size: int):
    expected = [ids for ids, _ in tiny.expected(kind, 1)]
    assert [generated(record) for record in tiny.traced(kind, 1, batch_size)] == expected
    assert len({token for ids in expected for token in ids}) > 3


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_beam_search_in_a_batch_equals_transformers_on_each_prompt_alone(tiny: TinyModels, kind: str, batch_size: int):
    expected = [ids for ids, _ in tiny.expected(kind, 3)]
    assert [generated(record) for record in tiny.traced(kind, 3, batch_size)] == expected


@pytest.mark.parametrize(("kind", "end"), [("llama", 20), ("llama", 287), ("qwen", 255), ("qwen", 283)])
def test_beams_that_end_early_equal_transformers_whatever_the_other_rows_do(tiny: TinyModels, kind: str, end: int):
    expected = [
        generate_beams(tiny.eager(kind), prompt, count=NEW, beams=3, eos=end, pad=PAD) for prompt in tiny.prompts()
    ]
    tracer = make_tracer(replace(tiny.loaded(kind), eos=frozenset({end})), num_beams=3)
    records: Any = tracer.trace(tracer.encode(QUESTIONS))
    assert [generated(record) for record in records] == expected
    assert min(map(len, expected)) < NEW == max(map(len, expected))
    for record in records:
        seen = look(tiny.eager(kind), record["tokens"].tolist())
        torch.testing.assert_close(record["attention"], seen.attention, rtol=0, atol=1e-5)


def test_the_trace_is_of_the_best_beam_not_of_the_greedy_answer(tiny: TinyModels):
    greedy, beams = (tiny.traced("qwen", count, 5) for count in (1, 3))
    won = [(one, three) for one, three in zip(greedy, beams, strict=True) if generated(one) != generated(three)]
    assert len(won) >= 3
    assert all(float(three["logprobs"].sum()) > float(one["logprobs"].sum()) for one, three in won)  # pyright: ignore
    assert all(bool((three["rank"] > 0).any()) for _, three in won)  # pyright: ignore


def test_ids_are_stored_as_generated_even_if_their_text_would_be_tokenised_differently(tiny: TinyModels):
    tokenizer = make_tokenizer()
    again = [tokenizer(record["generated_text"])["input_ids"] for record in tiny.traced("qwen", 1, 5)]
    expected = [ids for ids, _ in tiny.expected("qwen", 1)]
    assert all(ids != theirs for ids, theirs in zip(again, expected, strict=True))
    assert [generated(record) for record in tiny.traced("qwen", 1, 5)] == expected


def test_a_generated_token_that_is_also_the_padding_is_kept(tiny: TinyModels):
    expected = [ids for ids, _ in tiny.expected("llama", 1)]
    loaded = replace(tiny.loaded("llama"), pad=expected[1][-1])
    tracer = make_tracer(loaded, fields="heads")
    assert [generated(record) for record in tracer.trace(tracer.encode(QUESTIONS))] == expected


def test_the_end_of_text_token_is_in_the_trace_but_not_in_the_answer(tiny: TinyModels):
    ids = tiny.expected("qwen", 1)[1][0]
    end = next(token for place, token in enumerate(ids) if place > 1 and token not in ids[:place])
    tracer = make_tracer(replace(tiny.loaded("qwen"), eos=frozenset({end})))
    record: Any = tracer.trace(tracer.encode(QUESTIONS))[1]
    length = ids.index(end)
    assert generated(record) == ids[: length + 1]
    assert (record["answer_len"], record["finish"]) == (length, "eos")
    seen = look(tiny.eager("qwen"), record["tokens"].tolist())
    answer = seen.hidden[:, record["prompt_len"] :][:, :length]
    torch.testing.assert_close(record["states"][:, 2], answer[:, -1], rtol=0, atol=1e-5)
    torch.testing.assert_close(record["states"][:, 3], answer.mean(1), rtol=0, atol=1e-5)
    torch.testing.assert_close(record["attention"], seen.attention, rtol=0, atol=1e-5)


def test_the_states_of_an_empty_answer_are_those_of_its_end_of_text_token(tiny: TinyModels):
    end = tiny.expected("qwen", 1)[1][0][0]
    tracer = make_tracer(replace(tiny.loaded("qwen"), eos=frozenset({end})))
    record: Any = tracer.trace(tracer.encode(QUESTIONS))[1]
    assert (generated(record), record["answer_len"], record["generated_answer"]) == ([end], 0, "")
    assert torch.equal(record["states"][:, 1:], record["hidden"][:, -1:].expand(-1, 3, -1))


def test_generation_ends_at_a_stop_string_with_beams_too(tiny: TinyModels):
    loaded = reciting(load(tiny.folder("llama")), make_tokenizer()("?the fox")["input_ids"])
    tracer = make_tracer(loaded, fields="states", num_beams=3, stop=(" f",))
    records = tracer.trace(tracer.encode([*QUESTIONS[:2], Question("recited", "who?")]))
    assert [record["generated_text"] for record in records[::2]] == ["the fo"] * 2
    assert [record["generated_answer"] for record in records[::2]] == ["the"] * 2


def test_the_generation_config_of_the_model_is_ignored(tiny: TinyModels, tmp_path: Path):
    folder = shutil.copytree(tiny.folder("llama"), tmp_path / "llama")
    defaults = {"repetition_penalty": 5.0, "do_sample": True, "top_k": 3, "temperature": 3.0, "no_repeat_ngram_size": 1}
    (folder / "generation_config.json").write_text(json.dumps({**defaults, "max_length": 9, "eos_token_id": [EOS]}))
    tracer = make_tracer(load(folder), fields="heads")
    expected = [ids for ids, _ in tiny.expected("llama", 1)]
    assert any(len(set(ids)) < len(ids) for ids in expected)  # which those defaults would not allow
    assert [generated(record) for record in tracer.trace(tracer.encode(QUESTIONS))] == expected


def test_a_tokenizer_without_padding_pads_with_the_end_of_text(tiny: TinyModels, tmp_path: Path):
    folder = shutil.copytree(tiny.folder("gpt2"), tmp_path / "gpt2")
    make_tokenizer(pad_token=None).save_pretrained(folder)
    loaded = load(folder)
    assert loaded.tokenizer.pad_token_id is None and loaded.pad in loaded.eos
    tracer = make_tracer(loaded)
    for record, other in zip(tracer.trace(tracer.encode(QUESTIONS)), tiny.traced("gpt2", 1, 5), strict=True):
        assert_same(record, other)


# -- whatever the batch


@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 3}, {"temperature": 1.0, "seed": 4}], ids=["greedy", "beams", "drawn"]
)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_a_record_is_the_same_in_any_order_and_any_batch(tiny: TinyModels, kind: str, how: dict[str, Any]):
    tracer = make_tracer(tiny.loaded(kind), **how)
    encoded = tracer.encode(QUESTIONS)
    together = tracer.trace(encoded)
    backwards = tracer.trace(encoded[::-1])[::-1]
    apart = tracer.trace(encoded[2:3]) + tracer.trace([encoded[4], encoded[0]])
    for record, other in zip(together, backwards, strict=True):
        assert_same(record, other)
    for record, other in zip(apart, (together[2], together[4], together[0]), strict=True):
        assert_same(record, other)


def test_another_seed_or_question_id_samples_another_answer(tiny: TinyModels):
    def answers(seed: int, prefix: str) -> list[list[int]]:
        tracer = make_tracer(tiny.loaded("llama"), fields="post_norm", temperature=1.0, seed=seed)
        encoded = tracer.encode([Question(f"{prefix}{number}", "who?") for number in range(5)])
        return [generated(record) for record in tracer.trace(encoded)]

    first = answers(0, "a")
    assert first == answers(0, "a")
    everything = first + answers(1, "a") + answers(0, "b")
    assert len({tuple(ids) for ids in everything}) == 15


def test_first_tokens_are_sampled_with_the_probabilities_of_the_model(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"), fields="post_norm", temperature=1.0, max_new_tokens=1)
    encoded = tracer.encode([Question(f"id {number}", "who?") for number in range(1024)])
    drawn = [
        generated(record)[0] for start in range(0, 1024, 256) for record in tracer.trace(encoded[start : start + 256])
    ]
    likely = look(tiny.eager("llama"), encoded[0].ids).logits[-1].softmax(-1)
    order = likely.argsort(descending=True)
    group = (likely[order].cumsum(0) * 10).long().clamp_max(9)[order.argsort()]  # ten of about the same probability
    expected = torch.zeros(10).index_add_(0, group, likely) * 1024
    found = torch.bincount(group[torch.tensor(drawn)], minlength=10)
    assert (
        float(((found - expected) ** 2 / expected).sum()) < 27.9
    )  # chi-square of nine: one seed in a thousand is over


# -- caches


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gptoss"])
def test_a_full_sliding_window_is_replayed_on_the_cache_of_the_prompt(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, kind: str
):
    tracer = make_tracer(tiny.loaded(kind))
    done: list[int] = []
    replay = tracer._passes.replay

    def watched(*args: Any, **options: Any) -> Any:
        done.append(options["done"])
        return replay(*args, **options)

    monkeypatch.setattr(tracer._passes, "replay", watched)
    records = tracer.trace(tracer.encode(QUESTIONS))
    assert done == [max(map(len, tiny.prompts()))] and done[0] > 16
    for record, (_, seen) in zip(records, tiny.expected(kind, 1), strict=True):
        torch.testing.assert_close(record["attention"], seen.attention, rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"samples": 2, "temperature": 1.0}], ids=str)
def test_a_model_whose_cache_cannot_be_cut_is_replayed_from_the_start(tiny: TinyModels, how: dict[str, Any]):
    tracer, other = (make_tracer(tiny.loaded("llama"), trace_samples=True, **how) for _ in range(2))
    tracer._passes.can_cut = False
    encoded = tracer.encode(QUESTIONS)
    for record, expected in zip(tracer.trace(encoded), other.trace(encoded), strict=True):
        assert_same(record, expected)


def test_passes_that_cannot_be_cut_are_of_fewer_rows(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"), fields="heads", memory=200_000)
    tracer._passes.can_cut = False
    encoded = tracer.encode(QUESTIONS)
    needed = [tracer._bytes([one]) for one in encoded]
    assert max(needed) < 200_000 < sum(needed)
    rows: list[int] = []
    trace = tracer._trace

    def watched(batch: Sequence[EncodedQuestion]) -> list[list[Record]]:
        rows.append(len(batch))
        return trace(batch)

    tracer._trace = watched  # type: ignore[method-assign]
    assert all(record["status"] == "ok" for record in tracer.trace(encoded))
    assert len(rows) > 1 and sum(rows) == len(encoded)


def test_a_model_with_convolutions_is_replayed_from_the_start(tmp_path: Path):
    model = make_model("lfm2", tmp_path)
    tracer = make_tracer(load(model), fields="hidden,states")
    assert not tracer._passes.can_cut
    records: Any = tracer.trace(tracer.encode(QUESTIONS))
    eager = load_eager(model)
    for record in records:
        seen = look(eager, record["tokens"].tolist(), attention=False)
        torch.testing.assert_close(record["hidden"], seen.hidden, rtol=0, atol=1e-5)


# -- failures


def test_a_prompt_longer_than_the_context_fails_alone(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"))
    long = Question("long", "what is the capital " * 40)
    records = tracer.trace(tracer.encode([QUESTIONS[0], long, QUESTIONS[1]]))
    assert [record["status"] for record in records] == ["ok", "error", "ok"]
    assert "128 tokens" in str(records[1]["error"]) and records[1]["hidden"] is None
    assert_same(records[0], tiny.traced("llama", 1, 5)[0])


def test_an_empty_prompt_fails_alone(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"))
    records = tracer.trace(tracer.encode([Question("empty", ""), QUESTIONS[1]]))
    assert [record["error"] for record in records] == ["the prompt has no tokens", None]


class SmallMemory(Tracer):
    """Runs out of memory with more than `rows` rows."""

    rows: int
    tried: list[int]

    def _trace(self, batch: Sequence[EncodedQuestion]) -> list[list[Record]]:
        self.tried.append(len(batch))
        if len(batch) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super()._trace(batch)


def with_memory_for(rows: int, tracer: Tracer) -> SmallMemory:
    small = SmallMemory(tracer.loaded, fields=tracer.fields, decoding=tracer.decoding, prompt=tracer.prompt)
    small.rows, small.tried = rows, []
    return small


def test_a_batch_that_runs_out_of_memory_is_halved_with_the_same_records(tiny: TinyModels):
    tracer = with_memory_for(2, make_tracer(tiny.loaded("llama")))
    records = tracer.trace(tracer.encode(QUESTIONS))
    assert tracer.tried[0] == 5 and max(tracer.tried[1:]) <= 3
    for record, other in zip(records, tiny.traced("llama", 1, 5), strict=True):
        assert_same(record, other)


def test_later_batches_are_split_before_they_fail(tiny: TinyModels):
    tracer = with_memory_for(2, make_tracer(tiny.loaded("llama"), fields="heads"))
    encoded = tracer.encode(QUESTIONS)
    tracer.trace(encoded)
    tracer.tried.clear()
    assert all(record["status"] == "ok" for record in tracer.trace(encoded))
    assert max(tracer.tried) <= 2


def test_a_question_that_alone_exceeds_memory_becomes_an_error_record(tiny: TinyModels):
    tracer = with_memory_for(0, make_tracer(tiny.loaded("llama"), fields="heads"))
    records = tracer.trace(tracer.encode(QUESTIONS[:2]))
    assert [record["error"] for record in records] == ["OutOfMemoryError: CUDA out of memory"] * 2


def spoiled(tiny: TinyModels, word: str, *, value: float) -> Any:
    """A llama with this value in the embedding of one word."""
    loaded = load(tiny.folder("llama"))
    token = make_tokenizer()(word)["input_ids"][-1]
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[token, 0] = value  # pyright: ignore
    return loaded


def test_a_question_with_nan_logits_fails_alone(tiny: TinyModels):
    tracer = make_tracer(spoiled(tiny, "fox", value=float("nan")))
    records = tracer.trace(tracer.encode(QUESTIONS))
    assert [record["error"] for record in records] == [None, None, "the model's logits are not finite", None, None]
    assert_same(records[1], tiny.traced("llama", 1, 5)[1])


@pytest.mark.parametrize("fields", ["hidden", "nodes", "states"])
def test_a_float16_overflow_is_an_error_that_names_the_remedy(tiny: TinyModels, fields: str):
    tracer = make_tracer(spoiled(tiny, "fox", value=1e6), fields=fields, stored="float16")
    records = tracer.trace(tracer.encode(QUESTIONS))
    assert [record["status"] for record in records] == ["ok", "ok", "error", "ok", "ok"]
    assert "stored=bfloat16" in str(records[2]["error"])


def test_bfloat16_stores_what_overflows_float16(tiny: TinyModels):
    tracer = make_tracer(spoiled(tiny, "fox", value=1e6), fields="hidden,nodes,states", stored="bfloat16")
    records = tracer.trace(tracer.encode(QUESTIONS))
    assert all(record["status"] == "ok" for record in records)
    assert all(bool(record["hidden"].isfinite().all()) for record in records)  # pyright: ignore


def test_a_record_has_every_field_of_the_schema_whether_it_failed_or_not(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"), fields="heads")
    records = tracer.trace(tracer.encode([QUESTIONS[2], Question("empty", "")]))
    assert [list(record) for record in records] == [list(tracer.schema())] * 2
    assert records[0]["aliases"] == ["Paris", "Lutetia"] and records[0]["prompt_len"] == 2
    assert tracer.trace([]) == []
