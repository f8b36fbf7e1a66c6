"""Which fields a trace has, how many bytes that is, and how many prompts go in a batch."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import BadSetting
from millstream.traces.llm.fields import (
    LAYERED,
    MAX_ROWS,
    MIN_CHUNK,
    TIERS,
    Fields,
    Need,
    Size,
    parse_fields,
    plan_batches,
)
from support.tiny_models import QUESTIONS, TinyModels, make_tracer

SIZE = Size(layers=3, heads=4, hidden=32, vocab=300, kv_width=16, intermediate=64, item=4)
PROBE = parse_fields("probe", None, stored="float16")


# -- fields


@pytest.mark.parametrize("tier", sorted(TIERS))
def test_a_tier_is_a_name_for_fields(tier: str):
    fields = parse_fields(tier, None, stored="float16")
    assert fields == parse_fields("", ",".join(TIERS[tier]), stored="float16")


def test_each_tier_up_to_probe_contains_the_one_before():
    assert set(TIERS["stats"]) < set(TIERS["graph"]) < set(TIERS["probe"])


def test_the_layers_of_a_tier_are_those_of_each_of_its_fields_with_layers():
    answer = parse_fields("answer[1, -1]", None, stored="float16")
    assert answer == parse_fields("", "answer_hidden[1,-1]", stored="float16")
    full = parse_fields("full[2]", None, stored="float16")
    assert full.layers == {name: (2,) for name in TIERS["full"] if name in LAYERED}
    for tier in ("stats[1]", "answer[", "answer[]", "answer[a]"):
        with pytest.raises(BadSetting, match="layers as in"):
            parse_fields(tier, None, stored="float16")


def test_layers_are_given_in_brackets_and_may_be_negative():
    fields = parse_fields("stats", " hidden[0, 2,-1] , attention[1],edges", stored="float32")
    assert fields == Fields(("hidden", "attention", "edges"), {"hidden": (0, 2, -1), "attention": (1,)}, "float32")
    assert fields.layers_of("hidden", SIZE) == (0, 2, 3) and fields.layers_of("attention", SIZE) == (1,)


def test_without_brackets_all_layers_are_kept_and_the_embedding_for_hidden():
    fields = parse_fields("stats", "hidden,attention", stored="float16")
    assert fields.layers_of("hidden", SIZE) == (0, 1, 2, 3) and fields.layers_of("attention", SIZE) == (0, 1, 2)


def test_layers_are_sorted_and_unique():
    assert parse_fields("", "hidden[3,1,-1]", stored="float16").layers_of("hidden", SIZE) == (1, 3)


@pytest.mark.parametrize("text", ["hidden[4]", "hidden[-5]", "attention[3]", "attention[0,-4]"])
def test_an_unknown_layer_is_refused_with_the_valid_range(text: str):
    fields = parse_fields("", text, stored="float16")
    with pytest.raises(BadSetting, match=r"0 to [23]"):
        fields.layers_of(text.split("[")[0], SIZE)


@pytest.mark.parametrize(
    "text", ["", ",", "hiden", "edges[1]", "hidden[", "hidden[]", "hidden[a]", "hidden]1[", "heads,heads", "hidden[1]2"]
)
def test_an_unknown_field_is_refused_and_quoted(text: str):
    with pytest.raises(BadSetting) as refusal:
        parse_fields("stats", text, stored="float16")
    assert str(refusal.value).startswith(f"fields={text}: ")


def test_unknown_tiers_and_number_formats_are_refused():
    with pytest.raises(BadSetting, match="tier=all"):
        parse_fields("all", None, stored="float16")
    with pytest.raises(BadSetting, match="stored=int8"):
        parse_fields("full", None, stored="int8")


def test_fields_of_the_answer_need_no_capture_of_the_prompt():
    assert not parse_fields("", "heads,states", stored="float16").need_prompt
    assert parse_fields("", "heads", stored="float16").need_attention
    assert not parse_fields("", "states,nodes,hidden,post_norm", stored="float16").need_attention


# -- bytes


@pytest.mark.parametrize("stored", ["float16", "float32"])
@pytest.mark.parametrize("fields", [*(",".join(TIERS[tier]) for tier in sorted(TIERS)), "hidden[-1,0,3],attention[1]"])
def test_the_estimated_bytes_are_those_of_the_tensors(tiny: TinyModels, fields: str, stored: str):
    pytest.importorskip("transformers")
    tracer = make_tracer(tiny.loaded("llama"), fields=fields, stored=stored)
    records: Any = tracer.trace(tracer.encode(QUESTIONS))
    for record in records:
        tensors = [value for value in record.values() if isinstance(value, torch.Tensor)]
        prompt = record["prompt_len"]
        foretold = tracer.fields.trace_bytes(
            tracer.loaded.card.size, prompt=prompt, answer=len(record["tokens"]) - prompt
        )
        assert sum(value.numel() * value.itemsize for value in tensors) == foretold


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_tensors_have_the_type_and_axes_of_the_schema(tiny: TinyModels, stored: str):
    pytest.importorskip("transformers")
    tracer = make_tracer(tiny.loaded("llama"), stored=stored)
    record: Any = tracer.trace(tracer.encode(QUESTIONS))[0]
    for name, kind in tracer.fields.schema().items():
        if name == "given_logprobs":
            assert record[name] is None
            continue
        assert record[name].dtype == getattr(torch, kind.dtype), name
        assert record[name].ndim == len(kind.axes), name


# -- batches

lengths_of_questions = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), max_size=80)
NEED = Need(SIZE, PROBE)


def plan(
    lengths: list[tuple[int, int]], *, memory: int = 1 << 20, window: int | None = None, need: Need = NEED
) -> list[list[int]]:
    return plan_batches(lengths, need=need, memory=memory, window=window)


@given(lengths_of_questions, st.integers(1, 1 << 22), st.none() | st.integers(1, 90))
def test_every_question_is_in_one_batch(lengths: list[tuple[int, int]], memory: int, window: int | None):
    batches = plan(lengths, memory=memory, window=window)
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    assert all(1 <= len(batch) <= MAX_ROWS for batch in batches)


@given(lengths_of_questions, st.integers(1, 1 << 22))
def test_the_longest_sequences_come_first(lengths: list[tuple[int, int]], memory: int):
    order = [sum(lengths[place]) for batch in plan(lengths, memory=memory) for place in batch]
    assert order == sorted(order, reverse=True)


@given(lengths_of_questions, st.integers(1, 1 << 22), st.integers(1, 3), st.booleans())
def test_a_batch_of_several_questions_stays_within_the_memory_budget(
    lengths: list[tuple[int, int]], memory: int, rows: int, generated: bool
):
    need = Need(SIZE, PROBE, rows=rows, generated=generated)
    for batch in plan(lengths, memory=memory, need=need):
        prompt, answer = (max(lengths[place][side] for place in batch) for side in (0, 1))
        assert len(batch) == 1 or len(batch) * need.bytes(prompt, answer, memory=memory) <= memory
        assert len(batch) * rows <= max(MAX_ROWS, rows)


@given(lengths_of_questions, st.integers(1, 20))
def test_a_window_is_done_before_the_next_begins(lengths: list[tuple[int, int]], window: int):
    windows = [[place // window for place in batch] for batch in plan(lengths, window=window)]
    assert all(len(set(batch)) == 1 for batch in windows)
    assert [batch[0] for batch in windows] == sorted(batch[0] for batch in windows)


def test_the_same_questions_make_the_same_batches():
    lengths = [(length, 8) for length in (5, 9, 5, 30, 9, 5)]
    assert plan(lengths, memory=10**9) == [[3, 1, 4, 0, 2, 5]]  # equal ones in the order they came
    assert plan(lengths, memory=1) == [[3], [1], [4], [0], [2], [5]]
    assert plan([]) == []


@given(st.integers(1, 200), st.integers(1, 50))
def test_longer_prompts_more_rows_and_more_fields_take_more_memory(prompt: int, new: int):
    full = parse_fields("full", None, stored="float16")

    def take(length: int, rows: int, fields: Fields) -> int:
        return Need(SIZE, fields, rows=rows).bytes(length, new, memory=1 << 40)

    assert take(prompt, 1, PROBE) < take(prompt + 1, 1, PROBE)
    assert take(prompt, 1, PROBE) < take(prompt, 2, PROBE)
    assert PROBE.trace_bytes(SIZE, prompt=prompt, answer=new) <= take(prompt, 1, PROBE)
    assert full.trace_bytes(SIZE, prompt=prompt, answer=new) <= take(prompt, 1, full)


@given(st.integers(1, 20_000), st.integers(1, 1 << 32))
def test_a_pass_over_a_long_sequence_is_cut_into_chunks_that_fit(total: int, memory: int):
    chunk = NEED.chunk(total, memory=memory)
    assert chunk == total or MIN_CHUNK <= chunk < total + MIN_CHUNK
    weights = 6 * SIZE.heads * 4 * total
    assert chunk <= MIN_CHUNK or chunk * weights <= memory / 3
