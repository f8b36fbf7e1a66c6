"""Reading: by number, in batches, by layer; views instead of copies; metadata of a store."""

import gc
import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import millstream as ms
from millstream.errors import CorruptRecord, CorruptShard
from millstream.traces.store.manifest import shard_name
from support.making import flip, place_of, record, same, write

pytestmark = pytest.mark.on_disk

COUNT = 7


@pytest.fixture(scope="module", params=["none", "zstd"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven records in shards of three; never modified."""
    path = tmp_path_factory.mktemp("traces") / "store"
    keys = [(2, number) for number in range(COUNT)]
    return write(path, keys, shard_records=3, compression=request.param, config={"model": "gpt2"})


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same records in one shard, not compressed."""
    return write(tmp_path_factory.mktemp("traces") / "plain", [(2, number) for number in range(COUNT)])


EXPECTED = [record(2, number) for number in range(COUNT)]


def all_same(found: list[dict[str, object]], expected: list[dict[str, object]]) -> bool:
    return len(found) == len(expected) and all(map(same, found, expected))


# -- a sequence


def test_records_are_read_by_number_from_either_end(store: Path) -> None:
    traces = ms.open(store)
    assert len(traces) == COUNT
    for number in range(COUNT):
        assert same(traces[number], EXPECTED[number])
        assert same(traces[number - COUNT], EXPECTED[number])
    assert same(traces[np.int64(4)], EXPECTED[4])


@pytest.mark.parametrize("number", [COUNT, -COUNT - 1, 10**12])
def test_a_number_out_of_range_is_an_index_error_with_the_range(store: Path, number: int) -> None:
    with pytest.raises(IndexError, match=f"{number} of {COUNT}"):
        ms.open(store)[number]
    with pytest.raises(IndexError, match=f"{number} of {COUNT}"):
        ms.open(store).fetch([0, number])


@pytest.mark.parametrize(
    "part",
    [slice(2, 5), slice(None), slice(-2, None), slice(None, None, -1), slice(5, 1, -2), slice(3, 3), slice(5, 99)],
)
def test_a_slice_is_like_that_of_a_list(store: Path, part: slice) -> None:
    assert all_same(ms.open(store)[part], EXPECTED[part])


def test_every_iteration_gives_every_record_in_order(store: Path) -> None:
    traces = ms.open(store)
    assert all_same(list(traces), EXPECTED)
    assert all_same(list(traces), EXPECTED)


def test_fields_are_in_the_order_of_the_first_record(store: Path) -> None:
    assert list(ms.open(store).fields) == list(EXPECTED[0])
    assert list(ms.open(store)[-1]) == list(EXPECTED[0])


def test_an_empty_store_has_nothing_to_read(tmp_path: Path) -> None:
    ms.TraceWriter(tmp_path / "store").close()
    traces = ms.open(tmp_path / "store")
    assert list(traces) == [] and traces[:] == [] and traces.fetch([]) == {} and traces.shards == ()
    assert traces.table.num_rows == 0
    with pytest.raises(IndexError, match="0 of 0"):
        traces[0]
    assert len(repr(traces).splitlines()) == 2


# -- fetch


def test_fetch_gives_the_columns_of_the_requested_records_in_the_requested_order(store: Path) -> None:
    numbers = [5, 0, -1, 5]
    columns = ms.open(store).fetch(numbers)
    assert list(columns) == list(EXPECTED[0])
    wanted = [EXPECTED[number] for number in numbers]
    for position, one in enumerate(wanted):
        for name in ("tokens", "hidden", "attention"):
            assert same({name: columns[name][position]}, {name: one[name]})
    assert columns["question"] == [one["question"] for one in wanted]
    assert columns["answer"] == [one["answer"] for one in wanted]
    assert columns["tags"] == [one["tags"] for one in wanted]


def test_fetch_takes_numpy_numbers(store: Path) -> None:
    columns = ms.open(store).fetch(np.array([3, 1]), ["question_id"])
    assert columns == {"question_id": ["2:3", "2:1"]}


def test_tensors_of_equal_shapes_are_stacked_and_others_are_a_list(store: Path) -> None:
    traces = ms.open(store)
    columns = traces.fetch([0, 3, 6], ["hidden", "nothing"])
    assert isinstance(columns["hidden"], list)
    assert isinstance(columns["nothing"], np.ndarray) and columns["nothing"].shape == (3, 0, 4)
    stacked = traces.fetch([4, 4], ["hidden"])["hidden"]
    assert isinstance(stacked, np.ndarray)
    assert same({"x": stacked}, {"x": np.stack([EXPECTED[4]["hidden"]] * 2)})


def test_bfloat16_is_stacked_as_a_torch_tensor(tmp_path: Path) -> None:
    tensors = [torch.full((2, 3), value, dtype=torch.bfloat16) for value in (1.5, -2.0)]
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.extend({"x": tensor} for tensor in tensors)
    found = ms.open(tmp_path / "store").fetch([1, 0])["x"]
    assert isinstance(found, torch.Tensor) and found.dtype == torch.bfloat16
    assert torch.equal(found, torch.stack([tensors[1], tensors[0]]))


def test_numbers_are_fetched_as_arrays_and_texts_lists_and_nones_as_lists(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.append({"n": 1, "x": 0.5, "ok": True, "text": "a", "tags": ["t"], "maybe": 1.5})
        writer.append({"n": 2, "x": 1.5, "ok": False, "text": "b", "tags": [], "maybe": None})
    columns = ms.open(tmp_path / "store").fetch([0, 1])
    assert {name: column.dtype for name, column in columns.items() if isinstance(column, np.ndarray)} == {
        "n": np.int64,
        "x": np.float64,
        "ok": np.bool_,
    }
    assert (columns["text"], columns["tags"], columns["maybe"]) == (["a", "b"], [["t"], []], [1.5, None])


def test_fetch_of_no_records_gives_empty_columns(store: Path) -> None:
    assert ms.open(store).fetch([], ["hidden", "score"]) == {"hidden": [], "score": []}


def test_fetch_gives_none_for_missing_tensors(tmp_path: Path) -> None:
    array = np.ones((2, 2, 2), np.float32)
    with ms.TraceWriter(tmp_path / "store", shard_records=2) as writer:
        writer.extend({"x": x} for x in (None, array, None, None, array))
    traces = ms.open(tmp_path / "store")
    column = traces.fetch([0, 1, 3])["x"]
    assert column[0] is None and column[2] is None and np.array_equal(column[1], array)
    assert traces.fetch([0, 2, 3])["x"] == [None, None, None]
    assert traces.fetch([1, 4])["x"].shape == (2, 2, 2, 2)
    assert traces.fetch([0, 2], layers=0)["x"] == [None, None]


def test_fields_are_in_the_requested_order_and_unknown_ones_are_named(store: Path) -> None:
    traces = ms.open(store)
    assert list(traces.fetch([0], ["score", "hidden"])) == ["score", "hidden"]
    assert traces.fetch([0], []) == {}
    with pytest.raises(ValueError, match=r"'hiden'.* question_id, question, "):
        traces.fetch([0], ["score", "hiden"])
    with pytest.raises(ValueError, match=r"as in fields=\['score'\]"):
        traces.fetch([0], "score")


# -- layers


@pytest.mark.parametrize("layers", [1, -1, [2, 0], [0, 1]])
def test_layers_are_picked_from_every_record_whatever_its_length(store: Path, layers: Any) -> None:
    numbers = [6, 0, 4]
    columns = ms.open(store).fetch(numbers, ["hidden", "tokens"], layers=layers)
    for position, number in enumerate(numbers):
        assert same({"x": columns["hidden"][position]}, {"x": EXPECTED[number]["hidden"][layers]})
        assert same({"x": columns["tokens"][position]}, {"x": EXPECTED[number]["tokens"]})  # has no layers


@pytest.fixture(scope="module", params=["none", "lz4", "zstd"])
def layered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors with one slice per layer, and tensors too small to be sliced; each with three layers."""
    path = tmp_path_factory.mktemp("layers") / "store"
    with ms.TraceWriter(path, compression=request.param, schema={"steps": "int32[layer, value]"}) as writer:
        writer.append(LAYERED)
    return path


LAYERED = {
    "large": np.arange(3 * 50 * 60, dtype=np.float32).reshape(3, 50, 60),
    "small": np.arange(3 * 2 * 5, dtype=np.int16).reshape(3, 2, 5),
    "steps": np.arange(12, dtype=np.int32).reshape(3, 4),
    "empty": np.empty((3, 0, 4), np.float64),
    "tokens": np.arange(3, dtype=np.int64),
}


@pytest.mark.parametrize(
    "layers", [0, 2, -1, [0], [2, 0], [0, 1], [-1, -3], [1, 1], [], (1, 2), range(2), np.array([2, 1])], ids=str
)
def test_layers_are_the_same_whether_or_not_a_tensor_is_stored_in_slices(layered: Path, layers: Any) -> None:
    columns = ms.open(layered).fetch([0], layers=layers)
    picks = layers if isinstance(layers, int) else list(map(int, layers))
    for name, value in LAYERED.items():
        expected = value if name == "tokens" else value[picks]
        assert same({name: columns[name][0]}, {name: expected})


def test_a_numpy_integer_selects_one_layer(layered: Path) -> None:
    assert ms.open(layered).fetch([0], ["large"], layers=np.int64(1))["large"].shape == (1, 50, 60)


@pytest.mark.parametrize("layers", [3, -4, [0, 3], [-4]])
def test_a_layer_out_of_range_is_an_index_error_that_names_the_field(layered: Path, layers: Any) -> None:
    with pytest.raises(IndexError, match=r"record 0 .*'(large|small|steps)'"):
        ms.open(layered).fetch([0], layers=layers)


def test_layers_of_fields_without_a_layer_axis_are_an_error(layered: Path) -> None:
    with pytest.raises(ValueError, match=r"tokens.*'layer'"):
        ms.open(layered).fetch([0], ["tokens"], layers=0)


def test_only_the_requested_layers_and_fields_are_read(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.append({"question_id": "q", **LAYERED})
    file, offset = place_of(tmp_path / "store", 0, "large")
    flip(file, offset + LAYERED["large"][0].nbytes)  # the first byte of layer 1
    traces = ms.open(tmp_path / "store")
    for layers in (0, 2, [2, 0]):
        found = traces.fetch([0], ["large"], layers=layers)["large"]
        assert np.array_equal(found[0], LAYERED["large"][layers])
    assert np.array_equal(traces.fetch([0], ["small"])["small"][0], LAYERED["small"])
    with pytest.raises(CorruptRecord, match=r"record 0 .*'q'.*'large'"):
        traces.fetch([0], ["large"], layers=[0, 1])


def test_without_verification_damage_is_not_noticed(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.append(LAYERED)
    file, offset = place_of(tmp_path / "store", 0, "small")
    flip(file, offset)
    with pytest.raises(CorruptRecord):
        ms.open(tmp_path / "store")[0]
    traces = ms.open(tmp_path / "store", verify="never")
    assert traces[0]["small"].reshape(-1)[:3].tolist() == [1, 1, 2]
    assert traces.fetch([0])["small"].reshape(-1)[:3].tolist() == [1, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify": "sometimes"}, "verify.*'sometimes'"),
        ({"open_shards": 0}, "open_shards=0"),
    ],
)
def test_a_bad_option_of_open_is_rejected(plain: Path, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ms.open(plain, **options)


@pytest.mark.parametrize(
    "name",
    [
        "shard-99999999999999999999.arrow",
        "shard-1.arrow",
        "shard-000000001.arrow",
        "shard-0000\u0661.arrow",
        "shard-00000 (copy).arrow",
        "shard-4294967296.arrow",
    ],
)
def test_a_shard_of_another_name_is_refused_instead_of_being_left_out(plain: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(plain, tmp_path / "store")
    shutil.copy(plain / shard_name(0), tmp_path / "store" / name)
    for command in (ms.open, ms.TraceWriter):
        with pytest.raises(CorruptShard, match=rf"{re.escape(name)}: would not be read"):
            command(tmp_path / "store")
    (tmp_path / "store" / name).unlink()
    with ms.TraceWriter(tmp_path / "store"):
        assert len(ms.open(tmp_path / "store")) == COUNT


# -- views


def test_tensors_are_views_of_the_mapped_file(plain: Path) -> None:
    traces = ms.open(plain)
    first, second = traces[3], traces[3]
    for name in ("tokens", "hidden", "attention"):
        assert np.shares_memory(first[name], second[name])
    one_layer = traces.fetch([2, 3], ["hidden"], layers=1)["hidden"]
    assert isinstance(one_layer, list)
    assert np.shares_memory(one_layer[1], first["hidden"])
    two_layers = traces.fetch([2, 3], ["hidden"], layers=[1, 2])["hidden"]
    assert np.shares_memory(two_layers[1], first["hidden"])


def test_torch_wraps_tensors_without_a_warning_or_a_copy(plain: Path) -> None:
    found = ms.open(plain)[3]["hidden"]
    assert found.flags.writeable and found.flags.aligned and found.flags.c_contiguous
    tensor = torch.from_numpy(found)  # warnings are errors
    assert tensor.data_ptr() == found.ctypes.data


@pytest.mark.parametrize("fields", [None, ["hidden"]])
def test_writing_to_a_view_changes_neither_the_file_nor_later_reads(tmp_path: Path, fields: list[str] | None) -> None:
    path = write(tmp_path / "store", [(2, 0)])
    before = (path / shard_name(0)).read_bytes()
    traces = ms.open(path)
    traces[0]["hidden"][:] = 0
    torch.from_numpy(traces[0]["tokens"]).zero_()
    again = traces[0] if fields is None else {**EXPECTED[0], "hidden": traces.fetch([0], fields)["hidden"][0]}
    assert same(again, EXPECTED[0])
    assert same(ms.open(path)[0], EXPECTED[0])
    assert (path / shard_name(0)).read_bytes() == before


def test_views_outlive_the_store_they_came_from(store: Path) -> None:
    traces = ms.open(store)
    found = traces[4]
    traces.close()
    del traces
    gc.collect()
    assert same(found, EXPECTED[4])


def test_a_closed_store_reopens_its_shards_on_demand(store: Path) -> None:
    with ms.open(store) as traces:
        assert same(traces[1], EXPECTED[1])
    assert mapped(store) == set()
    assert same(traces[1], EXPECTED[1])
    traces.close()
    traces.close()


def mapped(path: Path) -> set[str]:
    """The shards of a store that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line.split()[-1]).name for line in lines if str(path) in line}


def test_at_most_open_shards_are_mapped(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with ms.TraceWriter(path, shard_records=1) as writer:
        writer.extend({"number": number, "x": np.full(2000, number)} for number in range(60))
    descriptors = len(os.listdir("/proc/self/fd"))
    traces = ms.open(path, open_shards=2)
    assert mapped(path) == set()
    for number in [*range(60), *range(0, 60, 7), 3, 3, 59]:
        assert traces[number]["number"] == number
        assert len(mapped(path)) <= 2
    assert [int(one["x"][0]) for one in traces] == list(range(60))
    assert len(mapped(path)) <= 2
    assert traces.fetch(range(59, -1, -1), ["x"])["x"][:, 5].tolist() == list(range(59, -1, -1))
    assert len(mapped(path)) <= 2
    kept = [one["x"] for one in traces]
    assert len(mapped(path)) == 60
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert [int(x[-1]) for x in kept] == list(range(60))


# -- metadata


def test_shards_have_number_records_bytes_and_seconds(store: Path) -> None:
    traces = ms.open(store)
    assert [(shard.number, shard.records) for shard in traces.shards] == [(0, 3), (1, 3), (2, 1)]
    for shard in traces.shards:
        assert shard.bytes == (store / shard_name(shard.number)).stat().st_size
        assert 0 <= shard.seconds < 600
    assert traces.num_bytes == sum(shard.bytes for shard in traces.shards)


def test_the_table_has_every_scalar_with_its_type_and_no_tensor(store: Path) -> None:
    table = ms.open(store).table
    assert {field.name: str(field.type) for field in table.schema} == {
        "question_id": "string",
        "question": "string",
        "answer": "string",
        "score": "double",
        "correct": "bool",
        "tags": "list<item: string>",
    }
    assert table.to_pylist() == [{name: one[name] for name in table.column_names} for one in EXPECTED]


def test_the_table_has_one_type_per_column_even_if_some_shards_have_only_none(tmp_path: Path) -> None:
    records = [
        {"a": None, "b": [], "c": {"x": None}, "d": None},
        {"a": 1, "b": [], "c": {"x": None}, "d": None},
        {"a": None, "b": ["s"], "c": {"x": 1.5}, "d": {"y": [None]}},
        {"a": None, "b": [None], "c": None, "d": {"y": [b"z"]}},
        {"a": 2, "b": None, "c": {"x": None}, "d": {"y": None}},
    ]
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.extend(records)
    table = ms.open(tmp_path / "store").table
    table.validate(full=True)
    assert table.schema.types == [
        pa.int64(),
        pa.list_(pa.string()),
        pa.struct([("x", pa.float64())]),
        pa.struct([("y", pa.list_(pa.binary()))]),
    ]
    assert table.to_pylist() == records
    assert ms.open(tmp_path / "store").column("a").to_pylist() == [None, 1, None, None, 2]


def test_the_table_of_a_store_with_only_tensors_has_no_columns(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.append({"x": np.ones(3)})
    assert ms.open(tmp_path / "store").table.num_columns == 0


def test_ids_and_columns_are_in_record_order(store: Path) -> None:
    traces = ms.open(store)
    assert traces.ids == [f"2:{number}" for number in range(COUNT)]
    assert traces.column("score").to_pylist() == [one["score"] for one in EXPECTED]
    for name in ("hidden", "nowhere"):
        with pytest.raises(KeyError, match=f"'{name}'"):
            traces.column(name)


def test_repr_is_two_lines_with_counts_bytes_and_fields(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with ms.TraceWriter(path, shard_records=1) as writer:
        writer.extend({"id": "a", "x": np.zeros(1_000_000, np.uint8)} for _ in range(2))
        writer.append({"id": None, "x": None})
        first, second = repr(ms.open(path)).splitlines()
    size = f"{sum(file.stat().st_size for file in path.glob('*.arrow')) / 1e6:.1f} MB"
    assert first == f"Traces({str(path)!r}: 3 records in 3 shards, {size})"
    assert second == "  id string, x uint8[axis0]"


def test_repr_mentions_a_shard_that_is_still_being_written(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.append({"a": 1})
        assert "0 records in 0 shards, 0 B, 1 shard not sealed yet)" in repr(ms.open(tmp_path / "store"))


def test_a_record_is_located_by_shard_and_row(store: Path) -> None:
    traces = ms.open(store)
    assert [traces.locate(number) for number in (0, 2, 3, 6, -1)] == [(0, 0), (0, 2), (1, 0), (2, 0), (2, 0)]
    row = traces.row(5)
    assert row.values["question_id"] == "2:5"
    assert row.tensors["hidden"] is not None and row.tensors["hidden"].shape == EXPECTED[5]["hidden"].shape


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_store_without_its_manifest_still_knows_fields_configuration_and_compression(
    compression: Any, tmp_path: Path
) -> None:
    path = tmp_path / "store"
    keys = [(2, number) for number in range(5)]
    write(path, keys, shard_records=2, compression=compression, config={"model": "gpt2", "layers": [1, 2]})
    whole = ms.open(path)
    (path / "manifest.json").unlink()
    traces = ms.open(path)
    assert traces.fields == whole.fields
    assert traces.config == {"model": "gpt2", "layers": [1, 2]}
    assert traces.compression == compression
    assert traces.shards == whole.shards
    assert all_same(list(traces), EXPECTED[:5])
    assert not (path / "manifest.json").exists()  # reading modifies nothing
    write(path, [(2, 5)], config={"model": "gpt2", "layers": [1, 2]})
    assert all_same(list(ms.open(path)), EXPECTED[:6])


def test_the_manifest_is_readable_json(store: Path) -> None:
    manifest = json.loads((store / "manifest.json").read_text())
    assert manifest["format"] == "millstream.traces" and manifest["version"] == 2
    assert manifest["fields"]["hidden"] == "float16[layer, axis1, axis2]" and manifest["fields"]["score"] == "double"
    assert manifest["config"] == {"model": "gpt2"}
    assert [shard["name"] for shard in manifest["shards"]] == [shard_name(number) for number in range(3)]
    assert [shard["records"] for shard in manifest["shards"]] == [3, 3, 1]


# -- over time and between processes


def test_refresh_includes_shards_sealed_since(tmp_path: Path) -> None:
    path = write(tmp_path / "store", [(2, 0), (2, 1)], shard_records=2)
    traces = ms.open(path)
    table = traces.table
    with ms.TraceWriter(path) as writer:
        writer.append(EXPECTED[2])
        assert len(traces.refresh()) == 2
        writer.seal()
        assert len(traces) == 2 and table.num_rows == 2
        assert traces.refresh() is traces
    assert len(traces) == 3 and same(traces[2], EXPECTED[2])
    assert traces.table.num_rows == 3 and traces.find("2:2") == 2


def test_refresh_includes_types_found_since(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store", shard_records=1) as writer:
        writer.append({"x": None})
        traces = ms.open(tmp_path / "store")
        writer.append({"x": np.ones(2)})
        assert str(traces.fields["x"]) == "null"
        assert str(traces.refresh().fields["x"]) == "float64[axis0]"
        assert traces[0] == {"x": None} and traces[1]["x"].tolist() == [1, 1]


def test_a_pickled_store_has_the_same_records_with_the_same_numbers(store: Path) -> None:
    traces = ms.open(store, verify="never", open_shards=2)
    traces[0]
    copy = pickle.loads(pickle.dumps(traces))
    assert all_same(list(copy), EXPECTED)
    assert repr(copy) == repr(traces)


def test_a_pickled_store_does_not_grow_while_a_writer_continues(tmp_path: Path) -> None:
    path = write(tmp_path / "store", [(2, 0), (2, 1)])
    pickled = pickle.dumps(ms.open(path))
    assert len(pickled) < 1000
    write(path, [(2, 2)])
    assert len(pickle.loads(pickled)) == 2 and len(ms.open(path)) == 3
    assert len(pickle.loads(pickled).refresh()) == 3


def test_an_empty_store_can_be_pickled(tmp_path: Path) -> None:
    ms.TraceWriter(tmp_path / "store").close()
    assert len(pickle.loads(pickle.dumps(ms.open(tmp_path / "store")))) == 0
