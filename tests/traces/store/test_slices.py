"""Tensors as slices of the first axis, each checked and compressed alone."""

from math import prod
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.core.record import Bytes, crc32c
from millstream.traces.store.format import MIN_SLICE_BYTES, num_slices, store, unpack
from support.effort import num_examples


@pytest.mark.parametrize(
    ("shape", "itemsize", "slices"),
    [
        ((), 8, 1),
        ((1_000_000,), 2, 1),  # a vector
        ((12, 50, 768), 2, 12),  # hidden states
        ((12, 8, 50, 50), 2, 12),  # attention
        ((7, MIN_SLICE_BYTES), 1, 7),  # a slice is exactly one page
        ((7, MIN_SLICE_BYTES - 1), 1, 1),
        ((7, MIN_SLICE_BYTES // 4), 4, 7),
        ((1, 50, 768), 2, 1),
        ((0, 50, 768), 2, 1),
        ((12, 0, 768), 2, 1),
        ((12, 50, 0), 2, 1),
    ],
)
def test_a_tensor_is_cut_along_its_first_axis_where_a_slice_is_a_page_or_more(
    shape: tuple[int, ...], itemsize: int, slices: int
) -> None:
    assert num_slices(shape, itemsize) == slices


def test_the_checksum_is_the_published_crc_32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_a_checksum_continues_where_another_ended_whatever_holds_the_bytes(a: bytes, b: bytes) -> None:
    whole = google_crc32c.value(a + b)
    assert crc32c(b, crc32c(a)) == whole
    assert crc32c(np.frombuffer(b, np.uint8), crc32c(pa.py_buffer(a))) == whole


def as_bytes(array: np.ndarray[Any, Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def restore(data: Bytes, sizes: tuple[int, ...], num_bytes: int, itemsize: int, compression: str) -> Bytes:
    """Every slice unpacked on its own."""
    out = np.empty(num_bytes, np.uint8)
    ends = np.cumsum(sizes)
    for part, end, size in zip(out.reshape(len(sizes), -1), ends, sizes, strict=True):
        unpack(data[end - size : end], part, itemsize, compression)
    return out


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@settings(deadline=None, derandomize=True, max_examples=num_examples(60))
@given(
    itemsize=st.sampled_from([1, 2, 4, 8, 16, 32]),
    shape=st.sampled_from([(), (1,), (5,), (3000,), (2, 3), (3, 4096), (2, 2, 1500), (1, 2, 3)]),
    period=st.sampled_from([1, 2, 7, 1000, 10**6]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_compressed_slice_unpacks_alone_to_its_bytes(
    compression: str, itemsize: int, shape: tuple[int, ...], period: int, seed: int
) -> None:
    num_bytes = prod(shape) * itemsize
    noise = np.random.default_rng(seed).integers(0, 256, min(period, num_bytes), np.uint8)
    data = np.resize(noise, num_bytes)  # the shorter the period, the better it packs
    stored = store(data, shape, itemsize, compression)
    assert stored.sizes is not None
    assert len(stored.crc32c) == len(stored.sizes) == num_slices(shape, itemsize)
    assert sum(stored.sizes) == stored.data.size
    assert restore(stored.data, stored.sizes, num_bytes, itemsize, compression).tobytes() == data.tobytes()
    ends = np.cumsum(stored.sizes)
    parts = [stored.data[end - size : end] for end, size in zip(ends, stored.sizes, strict=True)]
    assert list(stored.crc32c) == [google_crc32c.value(part.tobytes()) for part in parts]


def test_without_compression_the_bytes_are_passed_on_with_a_checksum_a_slice() -> None:
    array = np.random.default_rng(0).random((3, 40, 50), np.float32)
    data = as_bytes(array)
    stored = store(data, array.shape, 4, "none")
    assert stored.data is data and stored.sizes is None
    assert list(stored.crc32c) == [google_crc32c.value(layer.tobytes()) for layer in array]


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("shape", [(0,), (2, 0, 3), (0, 5, 5)])
def test_a_tensor_without_elements_is_one_slice(shape: tuple[int, ...], compression: str) -> None:
    stored = store(np.empty(0, np.uint8), shape, 4, compression)
    assert len(stored.crc32c) == 1
    assert stored.crc32c[0] == google_crc32c.value(stored.data.tobytes())


def stored_bytes(path: Path, name: str) -> list[int]:
    """What each slice of the first record's field takes in the store."""
    place = ms.open(path).row(0).tensors[name]
    assert place is not None and place.sizes is not None
    return list(place.sizes)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compression_takes_out_the_zeros_of_causal_attention(compression: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = np.tril(np.exp(rng.normal(size=(4, 2, 120, 120))))
    attention = (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float16)
    for name in ("none", compression):
        with ms.TraceWriter(tmp_path / name, compression=name) as writer:
            writer.append({"attention": attention})
    assert max(stored_bytes(tmp_path / compression, "attention")) < 0.62 * attention[0].nbytes
    assert ms.open(tmp_path / compression).num_bytes < 0.65 * ms.open(tmp_path / "none").num_bytes
    assert np.array_equal(ms.open(tmp_path / compression)[0]["attention"], attention)


def test_zstd_shrinks_hidden_states_because_it_sees_their_high_bytes_apart(tmp_path: Path) -> None:
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


def test_the_sidecar_holds_the_checksum_of_every_layer(tmp_path: Path) -> None:
    hidden = np.random.default_rng(0).random((5, 30, 40), np.float32)
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.append({"hidden": hidden, "tokens": np.arange(5000)})
    tensors = ms.open(tmp_path / "store").row(0).tensors
    assert tensors["hidden"] is not None and tensors["tokens"] is not None
    assert list(tensors["hidden"].crc32c) == [google_crc32c.value(layer.tobytes()) for layer in hidden]
    assert list(tensors["tokens"].crc32c) == [google_crc32c.value(np.arange(5000).tobytes())]
