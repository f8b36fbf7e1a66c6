"""Fields, and the output of a function for each record, do not depend on the batch or the order."""

from typing import Any

import numpy as np
import pytest
import torch

import millstream as ms
from millstream.core.batches import stack
from millstream.core.memory import Pool
from support.featuring import NUMBERS, make, padded, record, write_reads, write_traces


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> ms.Traces:
    return write_traces(tmp_path_factory.mktemp("features") / "traces")


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> ms.Reads:
    return write_reads(tmp_path_factory.mktemp("features") / "reads.fa")


# -- fields


def test_fields_of_one_shape_are_stacked_and_texts_are_lists(traces: ms.Traces):
    batch = make(ms.features.fields("vector", "score", "question", "verdict"), traces, [6, 2])
    assert list(batch) == ["vector", "score", "question", "verdict"]
    assert np.array_equal(batch["vector"], [[6] * 5, [2] * 5]) and batch["score"].tolist() == [1.5, 0.5]
    assert batch["question"] == ["Wer mahlt 6?", "Wer mahlt 2?"]
    assert batch["verdict"] == [None, "right"]


@pytest.mark.parametrize("name", ["hidden", "map", "attention"])
def test_fields_of_different_shapes_are_padded_and_have_a_mask(traces: ms.Traces, name: str):
    batch = make(ms.features.fields(name), traces, NUMBERS)
    arrays: list[Any] = [record(number)[name] for number in NUMBERS]
    assert batch[name].dtype == arrays[0].dtype
    assert np.array_equal(batch[name], padded(arrays))
    ragged = [axis for axis in range(arrays[0].ndim) if len({array.shape[axis] for array in arrays}) > 1]
    real = padded([np.ones([array.shape[axis] for axis in ragged], np.bool_) for array in arrays])
    assert batch[f"{name}_mask"].dtype == np.bool_
    assert np.array_equal(batch[f"{name}_mask"], real)


def test_padding_is_zero_in_reused_memory(traces: ms.Traces):
    pool = Pool(64 << 20)
    wide = np.tile(np.float32(7), (300, 100))
    with pool.use():
        for lengths in ([300, 300], [300, 10], [10, 300, 200]):
            arrays = [wide[:length] for length in lengths]
            out, mask = stack(arrays)
            for row, length in enumerate(lengths):
                assert (np.asarray(out)[row, :length] == 7).all() and not np.asarray(out)[row, length:].any()
            del out, mask


def test_without_padding_arrays_stay_a_list(traces: ms.Traces):
    batch = make(ms.features.fields("map", "vector", pad=False), traces, NUMBERS)
    assert isinstance(batch["map"], list) and "map_mask" not in batch
    for found, number in zip(batch["map"], NUMBERS, strict=True):
        assert np.array_equal(found, np.asarray(record(number)["map"]))
    assert batch["vector"].shape == (5, 5)


def test_dtypes_that_numpy_lacks_are_kept(traces: ms.Traces):
    batch = make(ms.features.fields("grade"), traces, [3, 0, 5])
    assert batch["grade"].dtype == torch.bfloat16
    assert batch["grade"].float().tolist() == [[3, 4, 5, 6], [0, 0, 0, 0], [5, 6, 0, 0]]
    assert batch["grade_mask"].tolist() == [[True] * 4, [True, False, False, False], [True, True, False, False]]
    alike = make(ms.features.fields("grade"), traces, [3, 7])
    assert alike["grade"].dtype == torch.bfloat16 and "grade_mask" not in alike
    listed = make(ms.features.fields("grade", pad=False), traces, [3, 0])["grade"]
    assert [row.float().tolist() for row in listed] == [[3, 4, 5, 6], [0]]


def test_layers_of_a_field_can_be_selected(traces: ms.Traces):
    batch = make(ms.features.fields("hidden[2,-3]"), traces, [4, 9])
    for row, number in enumerate([4, 9]):
        hidden: Any = record(number)["hidden"]
        assert np.array_equal(batch["hidden"][row], hidden[[2, 0]])


def test_without_names_all_fields_are_returned(traces: ms.Traces):
    batch = make(ms.features.fields(), traces, [1, 2])
    assert set(traces.field_names) <= set(batch)
    assert set(batch) - set(traces.field_names) == {"hidden_mask", "attention_mask", "map_mask", "grade_mask"}


def test_a_record_without_a_tensor_is_an_error_with_its_number(traces: ms.Traces):
    with pytest.raises(ValueError, match=r"record 4 .*'maybe'"):
        make(ms.features.fields("maybe"), traces, [1, 4, 5])
    with pytest.raises(ValueError, match=r"record 5 .*'maybe'"):
        make(ms.features.fields("maybe"), traces.subset([3, 5]), [0, 1])


def test_bases_of_reads_are_bytes_one_row_per_read(reads: ms.Reads):
    batch = make(ms.features.fields("sequence", "class_id"), reads, [3, 1, 33])
    for row, mask, number in zip(batch["sequence"], batch["sequence_mask"], [3, 1, 33], strict=True):
        text = reads[number].sequence.encode()
        assert row[: len(text)].tobytes() == text and not row[len(text) :].any()
        assert mask.tolist() == [True] * len(text) + [False] * (len(row) - len(text))
    assert batch["class_id"].tolist() == [3, 1, 1]
    alike = make(ms.features.fields("sequence"), reads, [3, 33])
    assert alike["sequence"].shape == (2, 43) and "sequence_mask" not in alike
    assert list(make(ms.features.fields("class_id"), reads, [3])) == ["class_id"]


# -- each


def noisy(given: dict[str, object], rng: np.random.Generator) -> dict[str, object]:
    vector: Any = given["vector"]
    return {"noisy": vector + rng.normal(size=5), "cut": vector[: rng.integers(1, 5)], "id": given["question_id"]}


def test_each_returns_the_output_of_the_function_for_every_record(traces: ms.Traces):
    feature = ms.features.each(
        lambda given, rng: {"double": np.asarray(given["vector"]) * 2, "half": float(given["score"]) / 2},  # pyright: ignore
        fields=["vector", "score"],
    )
    batch = make(feature, traces, [8, 3])
    assert batch["double"].tolist() == [[16] * 5, [6] * 5] and batch["half"].tolist() == [1, 0.375]


def test_random_draws_of_each_depend_only_on_seed_epoch_and_record(traces: ms.Traces):
    feature = ms.features.each(noisy, fields=["vector", "question_id"])
    whole = make(feature, traces, list(range(20)), seed=3, epoch=2)
    shuffled = np.random.default_rng(0).permutation(20)
    other = make(feature, traces, shuffled.tolist(), seed=3, epoch=2)
    assert np.array_equal(other["noisy"], whole["noisy"][shuffled])
    assert other["id"] == [f"q{number}" for number in shuffled]
    some = traces.subset([17, 4, 9])
    assert np.array_equal(make(feature, some, [2, 0], seed=3, epoch=2)["noisy"], whole["noisy"][[9, 17]])
    for drawn_by in ({"seed": 4, "epoch": 2}, {"seed": 3, "epoch": 3}):
        assert not np.isclose(make(feature, traces, list(range(20)), **drawn_by)["noisy"], whole["noisy"]).any()
    drawn = whole["noisy"] - np.arange(20)[:, None]
    assert len(np.unique(drawn.round(9))) == 100


def test_each_pads_unless_pad_is_false(traces: ms.Traces):
    padded_batch = make(ms.features.each(noisy, fields=["vector", "question_id"]), traces, [1, 2, 3, 4])
    assert padded_batch["cut"].shape == padded_batch["cut_mask"].shape
    listed = make(ms.features.each(noisy, fields=["vector", "question_id"], pad=False), traces, [1, 2, 3, 4])
    assert [len(row) for row in listed["cut"]] == padded_batch["cut_mask"].sum(axis=1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_each_may_return_tensors_of_any_dtype_and_length(traces: ms.Traces, dtype: torch.dtype):
    def tensors(given: dict[str, Any], rng: np.random.Generator) -> dict[str, object]:
        return {"x": torch.ones(given["prompt_len"], 2, dtype=dtype), "one": torch.tensor(1, dtype=dtype)}

    feature = ms.features.each(tensors, fields=["prompt_len"])
    batch = make(feature, traces, [0, 2, 1])
    assert batch["x"].dtype == dtype and batch["x"].shape == (3, 3, 2)
    assert batch["x_mask"].tolist() == [[True, False, False], [True, True, True], [True, True, False]]
    assert (batch["x"][..., 0].bool() == torch.tensor(batch["x_mask"])).all()
    assert batch["one"].tolist() == [1, 1, 1]


def test_each_receives_the_bases_of_reads(reads: ms.Reads):
    feature = ms.features.each(
        lambda given, rng: {"gc": sum(map(str(given["sequence"]).count, "GC"))}, fields=["sequence", "class_id"]
    )
    found = make(feature, reads, [5, 9])["gc"].tolist()
    assert found == [sum(map(reads[number].sequence.count, "GC")) for number in (5, 9)]
