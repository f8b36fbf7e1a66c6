"""Tensors are stored in slices of their first axis, each verified and compressed on its own."""

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
from millstream.core.record import crc32c
from millstream.traces.store.manifest import shard_name
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
