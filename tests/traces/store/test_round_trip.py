"""Whatever goes in comes out the same to the bit, in millstream and in the tools that read Arrow and Parquet."""

import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.traces.store.manifest import shard_name, sidecar_name
from support.effort import num_examples
from support.making import record, same, write

pytestmark = pytest.mark.on_disk

COMPRESSIONS = ["none", "lz4", "zstd"]
RAM = "/dev/shm" if Path("/dev/shm").is_dir() else None  # hundreds of little stores: spare the disk its fsyncs

# -- any record

NUMPY = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "longdouble", "complex64", "complex128", "clongdouble"),
]
TORCH = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.int64, torch.bool]
SHAPES = {
    0: [()],
    1: [(0,), (1,), (7,), (3000,)],
    2: [(0, 3), (3, 0), (2, 3), (3, 2100)],
    3: [(2, 0, 3), (0, 2, 2), (1, 2, 3), (3, 30, 80), (4, 1, 5)],
    4: [(2, 2, 2, 2), (2, 3, 0, 1)],
}
Pair = tuple[object, object]  # what is written, what must come back


def numpy_array(dtype: str, shape: tuple[int, ...], layout: str, seed: int) -> Pair:
    rng = np.random.default_rng(seed)
    if dtype in ("longdouble", "clongdouble"):  # not all of their bits are part of the number
        array = np.asarray(rng.normal(size=shape), np.dtype(dtype))
    elif dtype == "bool":
        array = rng.integers(0, 2, shape).astype(bool)
    else:  # any bits: infinities and every kind of NaN
        array = np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape)
    if layout == "fortran":
        return np.array(array, order="F"), array
    if layout == "big-endian":
        return array.byteswap().view(array.dtype.newbyteorder(">")), array
    if layout == "strided" and array.ndim:
        wide = np.repeat(array, 2, axis=-1)
        return wide[..., ::2], array
    if layout == "reversed" and array.ndim:
        return np.ascontiguousarray(array[::-1])[::-1], array
    return array, array


def torch_tensor(dtype: torch.dtype, shape: tuple[int, ...], layout: str, seed: int) -> Pair:
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, num_bytes, np.uint8)
    tensor = torch.frombuffer(data, dtype=dtype).reshape(shape) if num_bytes else torch.empty(shape, dtype=dtype)
    expected = tensor.numpy() if dtype in (torch.float32, torch.int64, torch.bool) else tensor
    if layout == "fortran":
        backwards = tuple(reversed(range(tensor.ndim)))
        tensor = tensor.permute(backwards).contiguous().permute(backwards)
    elif layout == "strided" and tensor.ndim:
        tensor = torch.stack([tensor, tensor], dim=-1)[..., 0]
    return tensor, expected


LAYOUTS = st.sampled_from(["plain", "fortran", "big-endian", "strided", "reversed"])
SEEDS = st.integers(0, 2**32 - 1)
SCALARS: list[st.SearchStrategy[object]] = [
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(),
    st.binary(),
]
NAMES = st.text(min_size=1, max_size=8).filter(lambda name: not name.startswith("_"))


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    """Values of one tensor field: a dtype and a number of axes, then any shape and layout."""
    make: Callable[..., Pair] = draw(st.sampled_from([numpy_array, torch_tensor]))
    dtype = draw(st.sampled_from(NUMPY if make is numpy_array else TORCH))
    shapes = SHAPES[draw(st.sampled_from(list(SHAPES)))]
    return st.builds(make, st.just(dtype), st.sampled_from(shapes), LAYOUTS, SEEDS)


@st.composite
def plain_values(draw: st.DrawFn) -> Any:
    """Values of one field that is no tensor: a scalar, lists of it, lists of lists, dicts of fixed keys."""
    values = draw(st.sampled_from(SCALARS))
    shape = draw(st.sampled_from(["one", "list", "nested", "dict", "dicts"]))
    if shape == "list":
        values = st.lists(st.none() | values, max_size=4)
    elif shape == "nested":
        values = st.lists(st.none() | st.lists(values, max_size=3), max_size=3)
    elif shape in ("dict", "dicts"):
        keys = draw(st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3, unique=True))
        values = st.fixed_dictionaries({key: st.none() | draw(st.sampled_from(SCALARS)) for key in keys})
        values = st.lists(values, max_size=3) if shape == "dicts" else values
    return values.map(lambda value: (value, value))


@st.composite
def record_lists(draw: st.DrawFn) -> list[dict[str, Pair]]:
    """A few records of the same fields; any value may be None."""
    kinds = st.one_of(tensors(), tensors(), plain_values())
    fields = draw(st.dictionaries(NAMES, kinds, min_size=1, max_size=5))
    columns = {name: st.just((None, None)) | values for name, values in fields.items()}
    return draw(st.lists(st.fixed_dictionaries(columns), min_size=1, max_size=3))


def exact(value: object) -> object:
    """A value that is equal only for the same type, dtype, shape and bits."""
    if isinstance(value, torch.Tensor):
        return "torch", str(value.dtype), tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, np.ndarray):
        # long doubles have bytes that are not part of the number, and numpy does not always copy them
        bits = value.tolist() if value.dtype.char in "gG" else value.tobytes()
        return "numpy", value.dtype, value.shape, bits
    if isinstance(value, list):
        return [exact(item) for item in value]
    if isinstance(value, dict):
        return {key: exact(item) for key, item in value.items()}
    return type(value), struct.pack("d", value) if isinstance(value, float) else value


def exact_column(column: Any, expected: list[object]) -> list[object]:
    """The values of a fetched column; checks that tensors of equal shape are stacked."""
    if any(isinstance(value, np.ndarray | torch.Tensor) for value in expected):
        shapes = {tuple(value.shape) if value is not None else None for value in expected}
        assert isinstance(column, list) == (len(shapes) > 1)
        return [exact(value if isinstance(value, torch.Tensor | None) else np.asarray(value)) for value in column]
    return [exact(value) for value in (column.tolist() if isinstance(column, np.ndarray) else column)]


# Shrinking a failure takes minutes: remove `phases` to wait for it.
ONCE = settings(
    max_examples=num_examples(35),
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@ONCE
@given(pairs=record_lists())
def test_any_record_comes_back_exactly(compression: Any, pairs: list[dict[str, Pair]]) -> None:
    expected = [{name: pair[1] for name, pair in one.items()} for one in pairs]
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        with ms.TraceWriter(folder, compression=compression) as writer:
            writer.extend({name: pair[0] for name, pair in one.items()} for one in pairs)
        with ms.open(folder) as traces:
            assert len(traces) == len(pairs)
            for number, one in enumerate(expected):
                assert exact(traces[number]) == exact(one)
            columns = traces.fetch(range(len(pairs)))
            assert list(columns) == list(expected[0])
            for name, column in columns.items():
                values = [one[name] for one in expected]
                assert exact_column(column, values) == [exact(value) for value in values]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_names_that_are_prefixes_of_other_names_are_kept_apart(compression: Any, tmp_path: Path) -> None:
    one = {
        "hidden.mean": 0.5,
        "hidden": np.arange(6.0),
        "tags.list": 1,
        "tags": ["a"],
        "tags.list.element": "b",
        "answer.text": "no",
        "answer": {"text": "yes"},
        "hidden.shape": [1],
    }
    with ms.TraceWriter(tmp_path / "store", compression=compression) as writer:
        writer.append(one)
    traces = ms.open(tmp_path / "store")
    assert exact(traces[0]) == exact(one)
    assert traces.column("tags").to_pylist() == [["a"]] and traces.column("answer").to_pylist() == [{"text": "yes"}]
    assert traces.table.to_pylist() == [{name: value for name, value in one.items() if name != "hidden"}]


def test_one_array_in_several_fields_is_stored_for_each(tmp_path: Path) -> None:
    array = np.arange(20_000, dtype=np.int32).reshape(2, 100, 100)
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.append({"a": array, "b": array, "first": array[:1], "text": "x", "flat": array.reshape(-1)})
    found = ms.open(tmp_path / "store")[0]
    assert same(found, {"a": array, "b": array, "first": array[:1], "text": "x", "flat": array.reshape(-1)})


def test_numpy_scalars_and_tuples_come_back_as_python_values(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.append({"a": np.float32(0.5), "b": np.int8(-3), "c": np.bool_(True), "d": (1, 2), "e": [np.uint8(7)]})
    assert exact(ms.open(tmp_path / "store")[0]) == exact({"a": 0.5, "b": -3, "c": True, "d": [1, 2], "e": [7]})


def test_a_record_without_fields_is_still_a_record(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.extend([{}, {}])
    assert list(ms.open(tmp_path / "store")) == [{}, {}]


# -- fields that are None at first


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_field_that_is_none_at_first_gets_its_type_from_its_first_value(compression: Any, tmp_path: Path) -> None:
    nothing = {"question_id": "0", "answer": None, "hidden": None, "tags": [], "more": {"why": None}, "deep": [[]]}
    records = [
        nothing,
        {**nothing, "answer": "yes"},
        {**nothing, "hidden": np.arange(12, dtype=np.float16).reshape(2, 2, 3)},
        {**nothing, "tags": ["a", None], "more": {"why": "so"}},
        {**nothing, "deep": [[1.5], []]},
        nothing,
    ]
    path = tmp_path / "store"
    with ms.TraceWriter(path, compression=compression) as writer:
        writer.extend(records)
    traces = ms.open(path)
    assert {name: str(kind) for name, kind in traces.fields.items()} == {
        "question_id": "string",
        "answer": "string",
        "hidden": "float16[layer, axis1, axis2]",
        "tags": "list<item: string>",
        "more": "struct<why: string>",
        "deep": "list<item: list<item: double>>",
    }
    assert exact(list(traces)) == exact(records)
    columns = traces.fetch(range(6))
    assert exact(columns["hidden"]) == exact([one["hidden"] for one in records])
    assert columns["answer"] == [None, "yes", None, None, None, None]
    assert exact(traces.fetch([2, 2], ["hidden"], layers=1)["hidden"]) == exact(np.stack([records[2]["hidden"][1]] * 2))
    assert traces.table.to_pylist() == [{k: v for k, v in one.items() if k != "hidden"} for one in records]


def test_a_type_found_late_still_applies_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "store"
    for hidden in (None, np.ones(3, np.float32), None):
        with ms.TraceWriter(path) as writer:
            writer.append({"hidden": hidden})
    with ms.TraceWriter(path) as writer, pytest.raises(ms.errors.SchemaMismatch, match="expected float32"):
        writer.append({"hidden": np.ones(3, np.float64)})
    assert exact(list(ms.open(path))) == exact([{"hidden": h} for h in (None, np.ones(3, np.float32), None)])


def test_a_given_schema_types_a_field_that_is_always_none(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store", schema={"hidden": "bfloat16[layer, dim]", "answer": "string"}) as writer:
        writer.append({"answer": None, "hidden": None})
    traces = ms.open(tmp_path / "store")
    assert [str(kind) for kind in traces.fields.values()] == ["string", "bfloat16[layer, dim]"]
    assert traces[0] == {"answer": None, "hidden": None}
    assert traces.table.schema.field("answer").type == pa.string()


# -- other tools


@pytest.fixture(scope="module", params=COMPRESSIONS)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("arrow") / "store"
    return write(path, [(0, number) for number in range(5)], compression=request.param)


def check_batch(batch: pa.RecordBatch, number: int, compressed: bool) -> None:
    expected = record(0, number)
    (row,) = batch.to_pylist()
    for name, value in expected.items():
        if not isinstance(value, np.ndarray):
            assert row[name] == value
            continue
        assert row[name]["shape"] == list(value.shape)
        if not compressed:
            assert row[name]["data"] == value.tobytes()


def test_pyarrow_opens_a_shard_as_an_arrow_file_with_one_batch_per_record(store: Path) -> None:
    with pa.memory_map(str(store / shard_name(0))) as source:
        file = pyarrow.ipc.open_file(source)
        assert file.num_record_batches == 5
        for number in (4, 0, 2):
            batch = file.get_batch(number)
            batch.validate(full=True)
            assert batch.num_rows == 1
            check_batch(batch, number, compressed=ms.open(store).compression != "none")


def test_pyarrow_reads_the_shard_as_a_stream_from_byte_eight(store: Path) -> None:
    data = (store / shard_name(0)).read_bytes()
    batches = list(pyarrow.ipc.open_stream(data[8:]))
    assert len(batches) == 5
    for number, batch in enumerate(batches):
        check_batch(batch, number, compressed=ms.open(store).compression != "none")


def test_a_shard_has_dtype_and_axes_of_its_tensors_as_metadata(store: Path) -> None:
    schema = pyarrow.ipc.open_file(store / shard_name(0)).schema
    assert schema.field("hidden").metadata == {
        b"millstream.dtype": b"float16",
        b"millstream.axes": b"layer,axis1,axis2",
    }
    assert schema.field("question").metadata is None


def test_parquet_readers_find_scalars_shapes_and_checksums_in_the_sidecar(store: Path) -> None:
    table = pq.read_table(store / sidecar_name(0))
    assert table.num_rows == 5
    for number, row in enumerate(table.to_pylist()):
        expected = record(0, number)
        for name, value in expected.items():
            if not isinstance(value, np.ndarray):
                assert row[name] == value
                continue
            assert row[name]["shape"] == list(value.shape)
            assert len(row[name]["crc32c"]) in (1, value.shape[0])
    assert table.schema.field("hidden").metadata[b"millstream.dtype"] == b"float16"


def test_the_sidecar_has_the_offset_of_every_tensor(tmp_path: Path) -> None:
    path = write(tmp_path / "store", [(3, 0), (3, 1)])
    data = (path / shard_name(0)).read_bytes()
    for number, row in enumerate(pq.read_table(path / sidecar_name(0)).to_pylist()):
        hidden = record(3, number)["hidden"].tobytes()
        assert data[row["hidden"]["offset"] :][: len(hidden)] == hidden
