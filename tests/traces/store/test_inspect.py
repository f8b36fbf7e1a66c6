"""Summaries of stores, exact on tiny ones, and comparisons of two."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import millstream as ms
from millstream.traces.store.inspect import Comparison, FieldSummary, compare, show_comparison, show_summary, summarise
from millstream.traces.store.rewrite import merge
from support.commands import run_here
from support.making import record, write

RECORDS = [
    {
        "question_id": "a",
        "question": "Wie?",
        "score": 1.0,
        "n": 3,
        "ok": True,
        "raw": b"12",
        "tags": ["x", "y"],
        "more": {"k": 1},
        "hidden": np.zeros((2, 3, 4), np.float16),
        "bits": torch.zeros(5, dtype=torch.bfloat16),
        "one": np.array(7, np.float32),
        "never": None,
    },
    {
        "question_id": "b",
        "question": "Müsli",
        "score": None,
        "n": 5,
        "ok": False,
        "raw": None,
        "tags": [],
        "more": None,
        "hidden": None,
        "bits": torch.zeros(6, dtype=torch.bfloat16),
        "one": np.array(8, np.float32),
        "never": None,
    },
    {
        "question_id": "c",
        "question": "",
        "score": 4.0,
        "n": -2,
        "ok": True,
        "raw": b"",
        "tags": ["z"],
        "more": {"k": None},
        "hidden": np.zeros((2, 6, 4), np.float16),
        "bits": None,
        "one": np.array(9, np.float32),
        "never": None,
    },
]


def store(path: Path, records: list[dict[str, object]], **options: Any) -> Path:
    with ms.TraceWriter(path, **options) as writer:
        writer.extend(records)
    return path


# -- summaries


@pytest.mark.parametrize(("shard_records", "compression"), [(1, "none"), (2, "zstd"), (100, "none")])
def test_the_summary_of_a_tiny_store_is_exact(shard_records: int, compression: Any, tmp_path: Path) -> None:
    path = store(tmp_path / "store", RECORDS, shard_records=shard_records, compression=compression)
    summary = summarise(path)
    sizes = [file.stat().st_size for file in path.glob("shard-*.arrow")]
    assert (summary.path, summary.records, summary.shards, summary.bytes, summary.compression, summary.open_shards) == (
        str(path),
        3,
        len(sizes),
        sum(sizes),
        compression,
        0,
    )
    assert summary.seconds == sum(shard.seconds for shard in ms.open(path).shards)

    def values(kind: str, measure: str, mean: float, low: float, high: float, nulls: int = 0) -> FieldSummary:
        return FieldSummary(kind, nulls, 3 - nulls, mean=mean, min=low, max=high, measure=measure)

    expected = {
        "question_id": values("string", "characters", 1, 1, 1),
        "question": values("string", "characters", 3, 0, 5),
        "score": values("double", "value", 2.5, 1, 4, nulls=1),
        "n": values("int64", "value", 2, -2, 5),
        "ok": values("bool", "value", 2 / 3, 0, 1),
        "raw": values("binary", "bytes", 1, 0, 2, nulls=1),
        "tags": values("list<item: string>", "items", 1, 0, 2),
        "more": FieldSummary("struct<k: int64>", nulls=1, count=2),
        "hidden": FieldSummary("float16[layer, axis1, axis2]", nulls=1, count=2, mean_shape=[2, 4.5, 4]),
        "bits": FieldSummary("bfloat16[axis0]", nulls=1, count=2, mean_shape=[5.5]),
        "one": FieldSummary("float32[]", nulls=0, count=3, mean_shape=[]),
        "never": FieldSummary("null", nulls=3, count=0),
    }
    assert {name: asdict(field) for name, field in summary.fields.items()} == {
        name: asdict(field) for name, field in expected.items()
    }


def test_a_type_found_late_is_summarised_over_all_shards(tmp_path: Path) -> None:
    path = store(tmp_path / "store", [{"x": None, "y": None}, {"x": np.ones(4), "y": None}, {"x": None, "y": "text"}])
    fields = summarise(path).fields
    assert fields["x"] == FieldSummary("float64[axis0]", nulls=2, count=1, mean_shape=[4])
    assert fields["y"] == FieldSummary("string", nulls=2, count=1, mean=4, min=4, max=4, measure="characters")


def test_nan_is_ignored_in_minimum_and_maximum(tmp_path: Path) -> None:
    scores = [1.0, math.nan, 5.0, 6.0]
    path = store(tmp_path / "store", [{"score": score} for score in scores], shard_records=2)
    field = summarise(path).fields["score"]
    assert (field.min, field.max) == (1, 6)


def test_examples_come_from_different_shards(tmp_path: Path) -> None:
    path = write(tmp_path / "store", [(6, number) for number in range(9)], shard_records=3)
    examples = summarise(path, examples=3).examples
    assert [(one["number"], one["shard"]) for one in examples] == [
        (0, "shard-00000.arrow"),
        (4, "shard-00001.arrow"),
        (8, "shard-00002.arrow"),
    ]
    for one in examples:
        expected = record(6, int(str(one["number"])))
        for name, value in expected.items():
            assert one[name] == (list(value.shape) if isinstance(value, np.ndarray) else value)


@pytest.mark.parametrize(("examples", "numbers"), [(0, []), (1, [0]), (2, [0, 2]), (3, [0, 1, 2]), (9, [0, 1, 2])])
def test_as_many_distinct_examples_as_requested(examples: int, numbers: list[int], tmp_path: Path) -> None:
    path = store(tmp_path / "store", RECORDS)
    assert [one["number"] for one in summarise(path, examples=examples).examples] == numbers


def test_fields_named_number_and_shard_do_not_hide_the_location_of_an_example(tmp_path: Path) -> None:
    path = store(tmp_path / "store", [{"number": 7, "shard": "mine"}, {"number": 8, "shard": "mine"}])
    text = show_summary(summarise(path))
    assert "record 0 (shard-00000.arrow)" in text and "record 1 (shard-00000.arrow)" in text


def test_the_summary_of_an_empty_store_is_all_zeros(tmp_path: Path) -> None:
    summary = summarise(store(tmp_path / "store", []))
    assert (summary.records, summary.shards, summary.bytes, summary.fields, summary.examples) == (0, 0, 0, {}, [])
    assert "0 records, 0 shards, 0 B" in show_summary(summary)


def test_an_open_shard_is_counted_and_shown(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.append({"a": 1})
        summary = summarise(tmp_path / "store")
        assert (summary.records, summary.open_shards) == (0, 1)
        assert "1 shard not sealed" in show_summary(summary)


def test_a_summary_reads_no_tensor(tmp_path: Path) -> None:
    path = store(tmp_path / "store", RECORDS)
    with open(path / "shard-00000.arrow", "r+b") as shard:
        shard.truncate(100)
    assert summarise(path).fields["hidden"].mean_shape == [2, 4.5, 4]


def test_a_summary_on_the_terminal_shows_counts_fields_and_examples(tmp_path: Path) -> None:
    lines = show_summary(summarise(store(tmp_path / "store", RECORDS))).splitlines()
    assert lines[0] == str(tmp_path / "store")
    assert lines[1].startswith("  3 records, 1 shards, ") and lines[1].endswith("compression none")
    shown = [line.split(maxsplit=1) for line in lines]
    assert ["question", "string, characters 3 (0 to 5)"] in shown
    assert ["hidden", "float16[layer, axis1, axis2], mean shape [2, 4.5, 4], 1 None"] in shown
    assert ["score", "double, value 2.5 (1 to 4), 1 None"] in shown
    assert "  record 1 (shard-00000.arrow)" in lines
    assert ["question", "'Müsli'"] in shown


# -- comparisons


def changed(number: int, **fields: object) -> list[dict[str, object]]:
    return [{**one, **(fields if n == number else {})} for n, one in enumerate(RECORDS)]


@pytest.mark.parametrize("compressions", [("none", "none"), ("zstd", "zstd"), ("lz4", "none")])
def test_the_same_records_are_identical_however_they_are_stored(compressions: Any, tmp_path: Path) -> None:
    a = store(tmp_path / "a", RECORDS, compression=compressions[0], shard_records=2)
    b = store(tmp_path / "b", RECORDS[::-1], compression=compressions[1])
    assert compare(a, b) == Comparison(same=3)


@pytest.mark.parametrize("compression", ["none", "lz4"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("question", "Wo?"),
        ("score", None),
        ("score", 1.5),
        ("tags", ["x"]),
        ("hidden", np.ones((2, 3, 4), np.float16)),
        ("hidden", np.zeros((2, 4, 3), np.float16)),
        ("hidden", None),
        ("bits", torch.ones(5, dtype=torch.bfloat16)),
    ],
)
def test_a_field_that_differs_is_named_and_counted(name: str, value: object, compression: Any, tmp_path: Path) -> None:
    a = store(tmp_path / "a", RECORDS)
    b = store(tmp_path / "b", changed(0, **{name: value}), compression=compression)
    assert compare(a, b) == Comparison(same=2, different=1, differing_fields={name: 1}, first_different=["a"])


@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_another_dtype_of_the_same_bytes_is_a_difference(compression: Any, tmp_path: Path) -> None:
    a = store(tmp_path / "a", [{"question_id": "a", "x": np.zeros(4, np.int32)}])
    b = store(tmp_path / "b", [{"question_id": "a", "x": np.zeros(4, np.float32)}], compression=compression)
    assert compare(a, b) == Comparison(different=1, differing_fields={"x": 1}, first_different=["a"])


def test_records_of_only_one_store_are_counted(tmp_path: Path) -> None:
    a = store(tmp_path / "a", RECORDS[:2])
    b = store(tmp_path / "b", [*RECORDS[1:], {**RECORDS[0], "question_id": "d"}])
    comparison = compare(a, b)
    assert comparison == Comparison(same=1, only_a=1, only_b=2)
    assert show_comparison(comparison, "A", "B").splitlines() == [
        "A against B, by id",
        "  identical  1",
        "  different  0",
        "  only in A  1",
        "  only in B  2",
    ]


def test_a_field_of_only_one_store_is_a_difference(tmp_path: Path) -> None:
    a = store(tmp_path / "a", [{"question_id": "a", "x": 1}])
    b = store(tmp_path / "b", [{"question_id": "a", "y": 2}])
    assert compare(a, b) == Comparison(different=1, differing_fields={"x": 1, "y": 1}, first_different=["a"])


def test_only_the_first_few_differing_ids_are_listed(tmp_path: Path) -> None:
    a = store(tmp_path / "a", [{"question_id": str(n), "x": n} for n in range(9)])
    b = store(tmp_path / "b", [{"question_id": str(n), "x": -n} for n in range(9)])
    comparison = compare(a, b)
    assert (comparison.same, comparison.different, comparison.differing_fields) == (1, 8, {"x": 8})
    assert comparison.first_different == ["1", "2", "3", "4", "5"]
    assert "differing fields: x (8); first: 1, 2, 3, 4, 5" in show_comparison(comparison, "a", "b")


@pytest.mark.parametrize("compression", ["none", "lz4"])
@pytest.mark.parametrize("value", [math.nan, [1.0, math.nan], {"x": math.nan}, np.full(3, math.nan)], ids=repr)
def test_nan_equals_itself(value: object, compression: Any, tmp_path: Path) -> None:
    a = store(tmp_path / "a", [{"question_id": "a", "score": value}])
    b = store(tmp_path / "b", [{"question_id": "a", "score": value}], compression=compression)
    assert compare(a, b) == Comparison(same=1)


def test_a_store_merged_from_stores_of_different_compression_compares_by_value(tmp_path: Path) -> None:
    a = store(tmp_path / "a", RECORDS[:2], compression="none")
    b = store(tmp_path / "b", RECORDS[2:], compression="zstd")
    merge([a, b], tmp_path / "merged")
    whole = store(tmp_path / "whole", RECORDS)
    assert compare(tmp_path / "merged", whole) == Comparison(same=3)
    assert compare(whole, tmp_path / "merged") == Comparison(same=3)


def test_numbers_within_the_tolerance_are_the_same(tmp_path: Path) -> None:
    rows = {"question_id": "a", "text": "x", "n": 2.0, "h": np.array([1.0, np.nan, 100.0], np.float32)}
    near = {**rows, "n": 2.02, "h": np.array([1.01, np.nan, 101.0], np.float32)}
    for name, row in (("a", rows), ("near", near), ("text", near | {"text": "y"}), ("far", near | {"n": 3.0})):
        with ms.TraceWriter(tmp_path / name) as writer:
            writer.append(row)
    assert compare(tmp_path / "a", tmp_path / "near").differing_fields == {"n": 1, "h": 1}
    assert compare(tmp_path / "a", tmp_path / "near", tolerance=0.01) == Comparison(same=1)
    assert compare(tmp_path / "a", tmp_path / "near", tolerance=0.001).different == 1
    assert compare(tmp_path / "a", tmp_path / "text", tolerance=0.01).differing_fields == {"text": 1}
    assert compare(tmp_path / "a", tmp_path / "far", tolerance=0.01).differing_fields == {"n": 1}
    same = ("inspect", tmp_path / "a", tmp_path / "near", "--tolerance", "0.01")
    assert "identical  1" in run_here(*same)[1]
    assert run_here("inspect", tmp_path / "a", "--tolerance", "0.01")[0] == 2
