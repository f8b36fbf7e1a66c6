"""Old traces become records and come back exactly; saved graphs and steps become the features of whole traces."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import millstream as ms
from millstream.classic.importer import SAVED_GRAPHS, SavedGraphFeature
from millstream.classic.records import restore_steps, to_record
from millstream.core.batches import ColumnBatch, fetch_batch
from millstream.errors import BadSource
from millstream.traces.convert import convert, expand
from millstream.traces.detectors import Recipe, net_features
from millstream.traces.graphs import GraphFeature
from support.effort import num_examples
from support.old_files import (
    attention,
    f16,
    graphs,
    new_trace,
    old_torch_geometric,
    old_trace,
    same,
    states,
    torch_trace,
    write_traces,
)

SETTINGS = settings(deadline=None, max_examples=num_examples(150))


# -- records


def test_layers_are_stacked_and_values_made_storable():
    record = to_record(
        new_trace(5) | {"pair": (1, np.int64(2)), "settings": {"beams": np.int32(5)}, "names": np.array(["a"])}
    )
    assert record["hidden_states"].shape == (3, 6, 8)
    assert record["hidden_states"].dtype == np.float16
    assert record["attentions"].shape == (3, 2, 6, 6)
    assert (record["score"], type(record["score"])) == (0.25, float)
    assert (record["pair"], record["settings"], record["names"]) == ([1, 2], {"beams": 5}, ["a"])
    assert record["question_id"] == "tc_5"


def test_steps_of_different_shapes_become_one_row_per_layer():
    trace = old_trace(7)
    record = to_record(trace)
    assert record["hidden_states"].shape == (3, 8 * 8)
    assert record["hidden_states_steps"] == [[1, 5, 8], [1, 1, 8], [1, 1, 8], [1, 1, 8]]
    assert record["tokens"].dtype == np.int64
    assert len(record["tokens"]) == 4
    assert record["question_id"] == "7"
    restored = restore_steps(record)
    assert same(restored["hidden_states"], trace["hidden_states"])
    assert same(restored["attentions"], trace["attentions"])
    assert np.shares_memory(restored["hidden_states"][1][2], record["hidden_states"])
    assert not [name for name in restored if name.endswith("_steps")]


def transposed(values: list[list[np.ndarray]]) -> tuple[tuple[np.ndarray, ...], ...]:
    return tuple(zip(*values, strict=True))


@pytest.mark.parametrize("num_steps", [1, 2, 4])
@pytest.mark.parametrize("fields", [["hidden_states"], ["attentions"], ["hidden_states", "attentions"]])
def test_steps_of_layers_as_hugging_face_returns_them_are_stored_as_layers_of_steps(num_steps, fields):
    trace = old_trace(7, num_steps=num_steps)
    turned = trace | {name: transposed(trace[name]) for name in fields}
    others = {"hidden_states", "attentions"} - set(fields)
    turned, trace = ({name: one[name] for name in one if name not in others} for one in (turned, trace))
    assert same(to_record(turned), to_record(trace))


@pytest.mark.parametrize("turn", [False, True], ids=["layer, step", "step, layer"])
def test_steps_after_a_prompt_of_one_token_are_told_from_layers_by_attention_or_by_the_number_of_tokens(turn):
    hidden = [[f16(1, 1, 8) for _ in range(4)] for _ in range(3)]
    weights = [[f16(1, 2, 1, 1 + step) for step in range(4)] for _ in range(3)]
    for known in ({"attentions": weights}, {"tokens": [1, 2, 3, 4]}, {"tokens_full": [1] * 5, "prompt_length": 1}):
        turned = {
            name: transposed(value) if turn and name not in ("tokens", "tokens_full", "prompt_length") else value
            for name, value in {"hidden_states": hidden, **known}.items()
        }
        assert same(restore_steps(to_record(turned))["hidden_states"], hidden)
    with pytest.raises(BadSource, match="'hidden_states'"):
        to_record({"hidden_states": hidden})


def test_fields_that_contradict_each_other_about_layers_and_steps_are_refused():
    trace = old_trace(7)
    with pytest.raises(BadSource, match="'attentions'"):
        to_record(trace | {"attentions": transposed(trace["attentions"])})


def test_torch_tensors_stay_torch_tensors():
    record = to_record(torch_trace(0) | {"steps": [[torch.ones(1, 2).bfloat16()] * 3] * 2})
    assert record["hidden_states"].shape == (3, 6, 8)
    assert record["steps"].shape == (2, 6)
    assert record["steps"].dtype == record["logits"].dtype == torch.bfloat16
    assert "question_id" not in record


@SETTINGS
@given(
    shapes=st.lists(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3), min_size=1, max_size=4),
    dtype=st.sampled_from(["f2", ">f4", "i8", "?", "c8"]),
    num_layers=st.integers(1, 3),
    use_torch=st.booleans(),
    seed=st.integers(0, 99),
)
def test_steps_come_back_bit_for_bit(shapes, dtype, num_layers, use_torch, seed):
    rng = np.random.default_rng(seed)

    def step(shape: tuple[int, ...]) -> np.ndarray | torch.Tensor:
        bits = rng.integers(0, 2 if dtype == "?" else 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
        array = bits.view(dtype).reshape(shape)  # any bits, so NaNs with a payload too
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="))) if use_torch else array

    trace = {"x": [[step(shape) for shape in shapes] for _ in range(num_layers)]}
    record = to_record(trace)
    assert record["x"].shape[0] == num_layers
    assert same(restore_steps(record), trace)


@pytest.mark.parametrize(
    "value",
    [
        [[f16(1, 2), f16(1, 3)], [f16(1, 3), f16(1, 2)]],
        [[f16(1, 2)], [f16(1, 2), f16(1, 2)]],
        [[f16(2), np.zeros(2)]],
        [[f16(2)], []],
        [f16(2), f16(3)],
        [f16(2), None],
        [f16(2), torch.zeros(2)],
        {"deep": f16(2)},
        np.array([object()]),
        [object()],
        "\ud800",
        np.array(["\ud800"]),
        {"\ud800": 1},
        {1: 2},
        2**63,
        [{"deep": -(2**70)}],
        [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]],
    ],
)
def test_a_value_that_cannot_be_stored_is_reported_by_field(value):
    with pytest.raises(BadSource, match="field 'strange'"):
        to_record({"strange": value})


def test_a_name_with_a_lone_surrogate_is_refused():
    with pytest.raises(BadSource, match="ud800"):
        to_record({"\ud800": 1})


def test_an_error_in_a_field_names_the_file_and_the_trace(tmp_path):
    (tmp_path / "old.pkl").write_bytes(pickle.dumps([{"a": 1}, {"a": 2**70}]))
    with pytest.raises(BadSource, match=r"old\.pkl: trace 1: field 'a'"):
        convert([tmp_path / "old.pkl"], tmp_path / "store")


def test_a_list_nested_without_end_is_a_bad_source():
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(BadSource, match="field 'strange'"):
        to_record({"strange": endless})


def test_restoring_a_record_without_steps_changes_nothing():
    record = to_record(new_trace(1) | {"tokens_steps": 5})
    assert same(restore_steps(record), record)


def test_a_field_that_has_the_name_of_the_steps_is_refused():
    with pytest.raises(BadSource, match="'hidden_states_steps'"):
        to_record(old_trace(0) | {"hidden_states_steps": 4})


# -- features


def test_traces_stored_step_by_step_give_the_same_features(tmp_path):
    for name, stepwise in (("whole", False), ("stepwise", True)):
        write_traces(tmp_path / name, stepwise=stepwise)
        convert(expand([str(tmp_path / name)]), tmp_path / f"{name}_store")
    numbers = np.arange(4)
    for model in ("lstm", "gnn"):
        made = []
        for name in ("whole_store", "stepwise_store"):
            traces = ms.open(tmp_path / name)
            (feature,) = net_features(model, traces.field_names, Recipe(k=None, threshold=0.01))
            made.append(feature(fetch_batch(traces, numbers, feature.fields)))
        assert made[0].keys() == made[1].keys()
        for key, value in made[0].items():
            assert np.array_equal(value, made[1][key]), key


def saved(numbers: range, *, weighted: bool = True, folder: Path) -> Any:
    """A store of old graphs."""
    content = {
        "graphs": [graphs(number, weighted=weighted) for number in numbers],
        "labels": torch.zeros(len(numbers)),
        "question_ids": [f"tc_{number}" for number in numbers],
    }
    with old_torch_geometric():
        torch.save(content, folder / "preprocessed_0000.pt")
    convert([folder / "preprocessed_0000.pt"], folder / "store")
    return ms.open(folder / "store")


def test_saved_graphs_give_the_same_batch_as_graphs_built_from_attention(tmp_path):
    traces = saved(range(7), folder=tmp_path)
    made = SavedGraphFeature()(fetch_batch(traces, np.array([5, 0, 3]), list(SAVED_GRAPHS)))
    columns = {"hidden": [states(n) for n in (5, 0, 3)], "attention": [attention(n) for n in (5, 0, 3)]}
    every_edge = GraphFeature(None, -1.0, "hidden", "attention", self_loops=True, dtype="float32")
    wanted = every_edge(ColumnBatch(np.array([5, 0, 3]), columns))
    assert made.keys() == wanted.keys()
    for key, value in wanted.items():
        assert np.allclose(made[key], value, atol=1e-3), key
        assert np.shape(made[key]) == np.shape(value)
    assert made["x"].dtype == np.float16  # as they were saved


def test_saved_graphs_of_equal_size_give_the_same_batch_as_one_at_a_time(tmp_path):
    traces = saved(range(7), folder=tmp_path)
    feature = SavedGraphFeature()
    together = feature(fetch_batch(traces, np.array([0, 3, 6]), list(SAVED_GRAPHS)))
    alone = [feature(fetch_batch(traces, np.array([number]), list(SAVED_GRAPHS))) for number in (0, 3, 6)]
    assert np.array_equal(together["x"], np.concatenate([one["x"] for one in alone]))
    shifts = np.cumsum([0, *(len(one["x"]) for one in alone[:-1])])
    edges = [one["edge_index"] + shift for one, shift in zip(alone, shifts, strict=True)]
    assert np.array_equal(together["edge_index"], np.concatenate(edges, axis=1))


def test_saved_edges_without_weights_have_weight_1(tmp_path):
    traces = saved(range(3), weighted=False, folder=tmp_path)
    (feature,) = net_features("gnn", traces.field_names, Recipe())
    made = feature(fetch_batch(traces, np.arange(3), feature.fields))
    assert made["edge_attr"].shape == (made["edge_index"].shape[1], 1)
    assert (made["edge_attr"] == 1).all()


def test_saved_graphs_can_be_rewired_for_null_models(tmp_path):
    traces = saved(range(3), folder=tmp_path)
    batch = fetch_batch(traces, np.arange(3), list(SAVED_GRAPHS))
    plain = SavedGraphFeature()(batch)
    shuffled, again = (SavedGraphFeature("shuffled")(batch) for _ in range(2))
    loops = plain["edge_index"][0] == plain["edge_index"][1]
    assert np.array_equal(shuffled["edge_index"], again["edge_index"])
    assert np.array_equal(shuffled["edge_index"][1], plain["edge_index"][1])
    assert np.array_equal(shuffled["edge_index"][0] == shuffled["edge_index"][1], loops)
    assert (shuffled["batch"][shuffled["edge_index"][0]] == shuffled["batch"][shuffled["edge_index"][1]]).all()
    assert (shuffled["edge_index"][0] <= shuffled["edge_index"][1]).all()
    assert not np.array_equal(shuffled["edge_index"], plain["edge_index"])
    none = SavedGraphFeature("none")(batch)
    assert none["edge_index"].shape == (2, 0) and none["edge_attr"].shape == (0, 1)
    assert np.array_equal(none["x"], plain["x"])
