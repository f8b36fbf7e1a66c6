"""Which fields a trace has, how many bytes that is, and how many prompts go in a batch."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import BadSetting
from millstream.traces.llm.fields import MAX_ROWS, TIERS, Fields, Size, parse_fields, plan_batches, row_bytes
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
        assert record[name].dtype == getattr(torch, kind.dtype), name
        assert record[name].ndim == len(kind.axes), name


# -- batches

lengths_of_prompts = st.lists(st.integers(1, 60), max_size=80)


def plan(lengths: list[int], *, memory: int = 1 << 20, window: int | None = None) -> list[list[int]]:
    return plan_batches(lengths, size=SIZE, fields=PROBE, max_new_tokens=8, num_beams=1, memory=memory, window=window)


@given(lengths_of_prompts, st.integers(1, 1 << 22), st.none() | st.integers(1, 90))
def test_every_prompt_is_in_one_batch(lengths: list[int], memory: int, window: int | None):
    batches = plan(lengths, memory=memory, window=window)
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    assert all(1 <= len(batch) <= MAX_ROWS for batch in batches)


@given(lengths_of_prompts, st.integers(1, 1 << 22))
def test_the_longest_prompts_come_first(lengths: list[int], memory: int):
    order = [lengths[place] for batch in plan(lengths, memory=memory) for place in batch]
    assert order == sorted(lengths, reverse=True)


@given(lengths_of_prompts, st.integers(1, 1 << 22), st.integers(1, 3))
def test_a_batch_of_several_prompts_stays_within_the_memory_budget(lengths: list[int], memory: int, beams: int):
    how: dict[str, Any] = {"size": SIZE, "fields": PROBE, "max_new_tokens": 8, "num_beams": beams}
    for batch in plan_batches(lengths, memory=memory, **how):
        longest = max(lengths[place] for place in batch)
        assert len(batch) == 1 or len(batch) * row_bytes(longest, **how) <= memory


@given(lengths_of_prompts, st.integers(1, 20))
def test_a_window_is_done_before_the_next_begins(lengths: list[int], window: int):
    windows = [[place // window for place in batch] for batch in plan(lengths, window=window)]
    assert all(len(set(batch)) == 1 for batch in windows)
    assert [batch[0] for batch in windows] == sorted(batch[0] for batch in windows)


def test_the_same_prompts_make_the_same_batches():
    lengths = [5, 9, 5, 30, 9, 5]
    assert plan(lengths, memory=10**9) == [[3, 1, 4, 0, 2, 5]]  # equal ones in the order they came
    assert plan(lengths, memory=1) == [[3], [1], [4], [0], [2], [5]]
    assert plan([]) == []


@given(st.integers(1, 200), st.integers(1, 50))
def test_longer_prompts_more_beams_and_more_fields_take_more_memory(prompt: int, new: int):
    full = parse_fields("full", None, stored="float16")

    def take(length: int, beams: int, fields: Fields) -> int:
        return row_bytes(length, size=SIZE, fields=fields, max_new_tokens=new, num_beams=beams)

    assert take(prompt, 1, PROBE) < take(prompt + 1, 1, PROBE)
    assert take(prompt, 1, PROBE) < take(prompt, 2, PROBE)
    assert PROBE.trace_bytes(SIZE, prompt=prompt, answer=new) <= take(prompt, 1, PROBE)
    assert full.trace_bytes(SIZE, prompt=prompt, answer=new) <= take(prompt, 1, full)
