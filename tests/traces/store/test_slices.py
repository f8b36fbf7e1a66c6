"""Tensors are stored in slices along an axis or two, each verified and compressed on its own."""

from math import prod
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream.core.record import Tensor, crc32c
from millstream.errors import CorruptRecord
from millstream.traces.store.inspect import compare
from millstream.traces.store.manifest import Manifest, new_schema, shard_name, write_manifest
from millstream.traces.store.rewrite import merge, subset_records
from millstream.traces.store.shard_writer import ShardWriter
from support.effort import THOROUGH

pytestmark = pytest.mark.on_disk

DTYPES = ("uint8", "float16", "float32", "float64", "complex128")

SHAPES = {  # of 2-byte values -> number of slices
    (): 1,
    (1_000_000,): 1,  # a vector
    (12, 50, 768): 12,  # hidden states
    (12, 8, 50, 50): 12,  # attention
    (7, 2048): 7,  # a slice is exactly one page
    (7, 2047): 1,
    (1, 50, 768): 1,
    (0, 50, 768): 1,
    (12, 0, 768): 1,
    (12, 50, 0): 1,
}


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_a_tensor_is_stored_in_slices_of_its_first_axis_if_a_slice_is_a_page_or_more(
    compression: Any, tmp_path: Path
) -> None:
    with ms.TraceWriter(tmp_path / "store", compression=compression) as writer:
        writer.append({str(shape): np.zeros(shape, np.float16) for shape in SHAPES})
    tensors = ms.open(tmp_path / "store").row(0).tensors
    assert {name: place and len(place.crc32c) for name, place in tensors.items()} == {
        str(shape): slices for shape, slices in SHAPES.items()
    }


def test_the_checksum_is_the_published_crc_32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_a_checksum_can_be_continued_over_bytes_arrays_and_buffers(a: bytes, b: bytes) -> None:
    whole = google_crc32c.value(a + b)
    assert crc32c(b, crc32c(a)) == whole
    assert crc32c(np.frombuffer(b, np.uint8), crc32c(pa.py_buffer(a))) == whole


@pytest.mark.parametrize(
    ("compression", "dtype"),
    [
        *(("none", dtype) for dtype in DTYPES),
        *((name, dtype) for name in ("lz4", "zstd") for dtype in (DTYPES if THOROUGH else ("uint8", "complex128"))),
    ],
)
def test_every_slice_is_read_alone_and_has_the_checksum_of_its_stored_bytes(
    compression: Any, dtype: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    record: dict[str, np.ndarray[Any, Any]] = {}
    for shape in [(), (1,), (5,), (3000,), (2, 3), (3, 4096), (2, 2, 1500), (1, 2, 3), (2, 0, 3)]:
        for period in (1, 2, 7, 1000, 10**6):  # the shorter the period, the better it compresses
            num_bytes = prod(shape) * np.dtype(dtype).itemsize
            noise = rng.integers(0, 256, min(period, num_bytes), np.uint8)
            record[f"{shape} {period}"] = np.resize(noise, num_bytes).view(dtype).reshape(shape)
    schema = {name: f"{dtype}[{', '.join(['layer', 'b', 'c'][: value.ndim])}]" for name, value in record.items()}
    with ms.TraceWriter(tmp_path / "store", compression=compression, schema=schema) as writer:
        writer.append(record)
    traces = ms.open(tmp_path / "store")
    data = (tmp_path / "store" / shard_name(0)).read_bytes()
    for name, place in traces.row(0).tensors.items():
        value = record[name]
        assert place is not None
        spans = place.spans(value.itemsize)
        assert [google_crc32c.value(data[at : at + size]) for at, size in spans] == list(place.crc32c)
        if compression == "none":
            assert b"".join(data[at : at + size] for at, size in spans) == value.tobytes()
        count = value.shape[0] if value.ndim else 0
        for layer in sorted({*range(0, count, max(count // 40, 1)), *range(count)[-1:]}):
            assert traces.fetch([0], [name], layers=layer)[name][0].tobytes() == value[layer].tobytes()
        assert traces.fetch([0], [name])[name][0].tobytes() == value.tobytes()


def stored_bytes(path: Path, name: str) -> list[int]:
    """Stored bytes of each slice of a field of the first record."""
    place = ms.open(path).row(0).tensors[name]
    assert place is not None and place.sizes is not None
    return list(place.sizes)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compression_removes_the_zeros_of_causal_attention(compression: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = np.tril(np.exp(rng.normal(size=(4, 2, 120, 120))))
    attention = (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float16)
    for name in ("none", compression):
        with ms.TraceWriter(tmp_path / name, compression=name) as writer:
            writer.append({"attention": attention})
    assert max(stored_bytes(tmp_path / compression, "attention")) < 0.62 * attention[0].nbytes
    assert ms.open(tmp_path / compression).num_bytes < 0.65 * ms.open(tmp_path / "none").num_bytes
    assert np.array_equal(ms.open(tmp_path / compression)[0]["attention"], attention)


def test_zstd_shrinks_hidden_states_because_it_compresses_their_high_bytes_separately(tmp_path: Path) -> None:
    hidden = np.random.default_rng(0).normal(size=(3, 40, 200)).astype(np.float16)
    with ms.TraceWriter(tmp_path / "store", compression="zstd") as writer:
        writer.append({"hidden": hidden})
    assert sum(stored_bytes(tmp_path / "store", "hidden")) < 0.93 * hidden.nbytes
    plain = pa.Codec("zstd", compression_level=1).compress(pa.py_buffer(hidden.tobytes()))
    assert sum(stored_bytes(tmp_path / "store", "hidden")) < plain.size


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_only_the_slices_that_do_not_shrink_are_stored_raw(compression: Any, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 2**32, (3, 5000), np.uint32)
    noise[1] = 7
    with ms.TraceWriter(tmp_path / "store", compression=compression) as writer:
        writer.append({"noise": noise})
    table = {"lz4": 0, "zstd": 4 * noise.itemsize}[compression]  # the lengths of the byte planes
    first, second, third = stored_bytes(tmp_path / "store", "noise")
    assert first == third == noise[0].nbytes + table
    assert second < noise[1].nbytes / 20
    data = (tmp_path / "store" / "shard-00000.arrow").read_bytes()
    if compression == "lz4":
        assert noise[0].tobytes() in data and noise[1].tobytes() not in data
    assert np.array_equal(ms.open(tmp_path / "store")[0]["noise"], noise)


def test_the_sidecar_has_the_checksum_of_every_layer(tmp_path: Path) -> None:
    hidden = np.random.default_rng(0).random((5, 30, 40), np.float32)
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.append({"hidden": hidden, "tokens": np.arange(5000)})
    tensors = ms.open(tmp_path / "store").row(0).tensors
    assert tensors["hidden"] is not None and tensors["tokens"] is not None
    assert list(tensors["hidden"].crc32c) == [google_crc32c.value(layer.tobytes()) for layer in hidden]
    assert list(tensors["tokens"].crc32c) == [google_crc32c.value(np.arange(5000).tobytes())]


# -- along two axes

POSITIONS = {"states": "float16[layer, position, dim]"}
WIDTHS = {2048: 20, 700: 4, 300: 1}  # of 4 layers at 5 positions -> number of slices


def states_of(number: int, width: int) -> dict[str, Any]:
    rng = np.random.default_rng((number, width))
    return {"question_id": f"q{number}", "states": rng.normal(size=(5, 4, width)).astype(np.float16)}


def old_store(path: Path, records: list[dict[str, Any]]) -> Path:
    """As older versions wrote them: every tensor in slices along its first axis."""
    schema = new_schema(
        {"question_id": pa.string(), "states": Tensor("float16", ("layer", "position", "dim"))},
        compression="none",
        config={},
    )
    path.mkdir()
    shard = ShardWriter.create(path, first=0, schema=schema)
    for record in records:
        shard.append(record)
    write_manifest(path, Manifest({}, "none", schema, (shard.seal(),)))
    return path


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("mapped", [True, False])
def test_states_are_read_by_layer_and_by_position(compression: Any, width: int, mapped: bool, tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store", schema=POSITIONS, compression=compression) as writer:
        for number in range(6):
            writer.append({**states_of(number, width), **({"states": None} if number == 3 else {})})
    traces = ms.open(tmp_path / "store") if mapped else ms.open(tmp_path / "store").within(1 << 20)
    place = traces.row(0).tensors["states"]
    assert place is not None and (place.shape, len(place.crc32c)) == ((5, 4, width), WIDTHS[width])
    picks = {"": ..., "[1]": [1], "[3,-1]": [3, 4], "[:, 2]": np.s_[:, 2], "[[4,0], -1]": np.s_[[4, 0], 3]}
    for name, index in picks.items():
        found: Any = traces.fetch([5, 0, 3], [f"states{name}"])["states"]
        assert found[2] is None and np.array_equal(found[0], states_of(5, width)["states"][index])
        assert np.array_equal(found[1], states_of(0, width)["states"][index])
        assert np.array_equal(
            traces.fetch([1, 2], [f"states{name}"])["states"][1], states_of(2, width)["states"][index]
        )
    assert np.array_equal(traces.fetch([1, 2], ["states"], layers=2)["states"][0], states_of(1, width)["states"][2])
    assert np.array_equal(traces[4]["states"], states_of(4, width)["states"])
    sizes = traces.sizes(np.array([0, 3]), ["states[[4,0], 1]"]) - traces.sizes(np.array([0, 3]), ["question_id"])
    assert sizes.tolist() == [2 * 2 * width, 0]


def test_states_at_one_position_are_next_to_each_other_and_only_they_are_verified(tmp_path: Path) -> None:
    record = states_of(0, 2048)
    with ms.TraceWriter(tmp_path / "store", schema=POSITIONS) as writer:
        writer.append(record)
    file = tmp_path / "store" / shard_name(0)
    data = bytearray(file.read_bytes())
    at = data.index(record["states"][:, 2].tobytes())
    data[at + 5000] ^= 1
    file.write_bytes(data)
    traces = ms.open(tmp_path / "store").within(1 << 20)
    for position in (0, 1, 3):
        found = traces.fetch([0], [f"states[:, {position}]"])["states"][0]
        assert np.array_equal(found, record["states"][:, position])
    for damaged in ("states[:, 2]", "states[1]", "states"):
        with pytest.raises(CorruptRecord, match=r"states.*the slice at byte"):
            traces.fetch([0], [damaged])
    assert np.array_equal(traces.fetch([0], ["states[[0,2], 2]"])["states"][0], record["states"][[0, 2], 2])


@pytest.mark.parametrize("width", WIDTHS)
def test_older_stores_are_read_continued_merged_and_compared(width: int, tmp_path: Path) -> None:
    records = [states_of(number, width) for number in range(6)]
    old = old_store(tmp_path / "old", records[:3])
    with ms.TraceWriter(tmp_path / "new", schema=POSITIONS) as writer:
        for record in records[3:]:
            writer.append(record)
    merge([old, tmp_path / "new"], tmp_path / "merged")
    merge([tmp_path / "new", old], tmp_path / "turned")
    mixed = ms.open(tmp_path / "merged").subset([4, 0, 3, 1, 2, 5])
    assert isinstance(mixed, ms.Collection)
    subset_records(ms.open(tmp_path / "merged"), tmp_path / "picked", [4, 0, 5, 1])
    with ms.TraceWriter(old, schema=POSITIONS) as writer:
        for record in records[3:]:
            writer.append(record)
    for path in (old, tmp_path / "merged", tmp_path / "turned", tmp_path / "picked"):
        for traces in (ms.open(path), ms.open(path).within(1 << 20)):
            wanted = np.stack([records[int(str(key)[1:])]["states"] for key in traces.ids])
            for name, index in {"": ..., "[:, 2]": np.s_[:, :, 2], "[[4,0], -1]": np.s_[:, [4, 0], 3]}.items():
                found = traces.fetch(range(len(traces)), [f"states{name}"])["states"]
                assert np.array_equal(np.stack(found), wanted[index])  # pyright: ignore[reportArgumentType, reportCallIssue]
    differ = compare(old, tmp_path / "merged")
    assert not differ.differing_fields and not differ.only_a and not differ.only_b


def test_an_index_that_a_tensor_does_not_have_and_an_axis_that_it_does_not_have_are_refused(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store", schema=POSITIONS) as writer:
        writer.append({**states_of(0, 8), "vector": np.zeros(3)})
    traces = ms.open(tmp_path / "store")
    with pytest.raises(IndexError, match="record 0 has 4 positions of 'states', requested 4"):
        traces.fetch([0], ["states[:, 4]"])
    with pytest.raises(ValueError, match=r"vector.*no second axis"):
        traces.fetch([0], ["vector[:, 1]"])
