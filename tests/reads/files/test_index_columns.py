"""Packed columns, checksummed sections and tables of names: what goes in comes out, or damage is told."""

import errno
import io
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from read_files import complaint

from millstream.errors import StoreFull
from millstream.source.names import hash_name, hash_names, name_of
from millstream.store import name_table, packed, sections
from millstream.store.name_table import NameTable, NameTableWriter
from millstream.store.packed import ANCHOR, CHUNK, Packed, PackedWriter, pack, sums_before
from millstream.store.sections import Sections, SectionsWriter

Numbers = NDArray[np.int64]
LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
quick = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def columns(draw: st.DrawFn) -> Numbers:
    """Up to three chunks and a bit, of values that need any number of bits."""
    count = draw(st.sampled_from([1, 2, 31, 33, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 77]))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    bits = draw(st.integers(0, 64))
    spread = (
        rng.integers(0, 1 << 64, count, dtype=np.uint64) >> np.uint64(64 - bits) if bits else np.zeros(count, np.uint64)
    )
    values = spread.view(np.int64) + np.int64(draw(st.sampled_from([0, 1, -5, 10**12])))
    constant = draw(st.integers(0, count))  # so many are the same, at the start
    values[:constant] = values[0]
    return values


def written(values: Numbers, pieces: list[int]) -> tuple[PackedWriter, Packed]:
    directory, words = io.BytesIO(), io.BytesIO()
    writer = PackedWriter(directory, words)
    for part in np.split(values, sorted(piece % (len(values) + 1) for piece in pieces)):
        writer.append(part)
    writer.finish()
    pairs = np.frombuffer(bytearray(directory.getvalue()), np.int64).reshape(-1, 2)
    return writer, Packed(writer.rows, pairs, np.frombuffer(bytearray(words.getvalue()), np.uint64))


@quick
@given(values=columns(), pieces=st.lists(st.integers(0, 20_000), max_size=4))
def test_a_column_gives_back_what_was_appended_in_whatever_pieces(values: Numbers, pieces: list[int]):
    writer, column = written(values, pieces)
    assert writer.rows == len(values)
    rows = np.random.default_rng(0).permutation(len(values))
    assert np.array_equal(column.take(rows), values[rows])


@pytest.mark.parametrize("values", [[LOWEST, HIGHEST], [HIGHEST], [LOWEST], [LOWEST, -1, 0, 1, HIGHEST], [-1, 0]])
def test_the_largest_and_smallest_integers_survive(values: list[int]):
    numbers = np.array(values * 50, np.int64)
    _, column = written(numbers, [7])
    assert column.take(np.arange(len(numbers))).tolist() == numbers.tolist()


def test_an_empty_column_can_be_asked_for_nothing():
    _, column = written(np.empty(0, np.int64), [])
    assert column.rows == 0 and column.take(np.empty(0, np.int64)).tolist() == []
    assert column.find(np.array([5])).tolist() == [-1]


def test_a_constant_column_takes_no_words():
    writer, column = written(np.full(10 * CHUNK, 7), [1, 5000])
    assert writer.num_words == 0 and column.take(np.array([0, 9 * CHUNK + 5])).tolist() == [7, 7]


def test_values_take_the_bits_they_need():
    values = np.random.default_rng(0).integers(10**15, 10**15 + 64, 4 * CHUNK)
    writer, _ = written(values, [])
    assert writer.num_words == 4 * CHUNK * 6 // 64


def test_callers_may_use_their_buffer_again():
    directory, words = io.BytesIO(), io.BytesIO()
    writer = PackedWriter(directory, words)
    buffer = np.arange(100)
    for start in range(0, 1000, 100):
        buffer[:] = np.arange(start, start + 100)
        writer.append(buffer)
    writer.finish()
    column = Packed(1000, np.frombuffer(directory.getvalue(), np.int64).reshape(-1, 2).copy(),
                    np.frombuffer(words.getvalue(), np.uint64).copy())  # fmt: skip
    assert column.take(np.arange(1000)).tolist() == list(range(1000))


@quick
@given(values=columns(), seed=st.integers(0, 99))
def test_find_gives_the_last_row_that_is_not_above(values: Numbers, seed: int):
    ordered = np.sort(values)
    _, column = written(ordered, [])
    rng = np.random.default_rng(seed)
    asked = np.concatenate([rng.choice(ordered, 20), rng.choice(ordered, 20) // 2, [LOWEST, HIGHEST]])
    assert np.array_equal(column.find(asked), np.searchsorted(ordered, asked, side="right") - 1)


@quick
@given(seed=st.integers(0, 99), count=st.sampled_from([1, 31, 32, 33, CHUNK, 2 * CHUNK + 5]), bits=st.integers(0, 45))
def test_sums_before_are_the_sums_of_all_values_before(seed: int, count: int, bits: int):
    values = np.random.default_rng(seed).integers(0, (1 << bits) + 1, count)
    starts = np.cumsum(values) - values
    _, column = written(values, [])
    _, anchors = written(starts[::ANCHOR].copy(), [])
    assert np.array_equal(sums_before(anchors, column, np.arange(count)), starts)


@quick
@given(values=columns())
def test_without_numba_the_same_words_are_written_and_read(values: Numbers):
    directory, words = pack(values, first_word=3)
    slow_directory, slow_words = np.empty_like(directory), np.zeros(len(values) + len(directory), np.uint64)
    used = packed._pack_slowly(values, slow_directory, slow_words, 3)
    assert np.array_equal(directory, slow_directory) and np.array_equal(words, slow_words[:used])
    _, column = written(values, [])
    rows = np.random.default_rng(0).permutation(len(values))
    assert np.array_equal(packed._take_slowly(column.directory, column.words, rows), values[rows])


# -- sections


def publish(path: Path, values: dict[str, Numbers]) -> None:
    with SectionsWriter(path) as writer:
        for name, column in values.items():
            writer.column(name).append(column)
        writer.part("text").write(b"some text")
        writer.publish({"what": "a test"})


def test_sections_give_back_columns_arrays_and_what_was_said(tmp_path: Path):
    values = {"a": np.arange(10_000) ** 2, "b": np.zeros(5, np.int64), "c": np.empty(0, np.int64)}
    publish(tmp_path / "file", values)
    found = Sections(tmp_path / "file")
    assert found.meta["what"] == "a test" and found.array("text").tobytes() == b"some text"
    for name, column in values.items():
        assert np.array_equal(found.column(name).take(np.arange(len(column))), column)
    assert os.listdir(tmp_path) == ["file"]


def test_a_column_can_be_read_back_before_it_is_published(tmp_path: Path):
    values = np.random.default_rng(0).integers(0, 10**12, 20_000)
    with SectionsWriter(tmp_path / "file") as writer:
        writer.column("a").append(values)
        assert np.array_equal(np.concatenate(list(writer.read_back("a"))), values)
        writer.drop("a")
        writer.publish({})
    assert "a" not in Sections(tmp_path / "file")


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    publish(tmp_path / "file", {"a": np.arange(10)})
    before = (tmp_path / "file").read_bytes()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFull, match=r"file: no space left on device\. Nothing was left behind"):
        publish(tmp_path / "file", {"a": np.arange(20)})
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_bytes() == before


def test_what_is_open_stays_as_it_is_when_the_file_is_replaced(tmp_path: Path):
    publish(tmp_path / "file", {"a": np.arange(1000)})
    found = Sections(tmp_path / "file")
    publish(tmp_path / "file", {"a": np.arange(1000) + 5})
    assert found.column("a").take(np.array([7])).tolist() == [7]
    assert Sections(tmp_path / "file").column("a").take(np.array([7])).tolist() == [12]


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Numbers]:
    """A column that is checked where it is used, in pieces of 64 kB."""
    monkeypatch.setattr(sections, "_EAGER_BYTES", 0)
    monkeypatch.setattr(sections, "CRC_BYTES", 1 << 16)
    values = np.random.default_rng(0).integers(0, 1 << 40, 40 * CHUNK)
    publish(tmp_path / "file", {"a": values, "other": np.arange(50_000)})
    return tmp_path / "file", values


def test_a_large_column_is_checked_only_where_it_is_used(large: tuple[Path, Numbers]):
    file, values = large
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    column = Sections(file).column("a")
    lost = 0
    for chunk in range(40):
        rows = np.arange(chunk * CHUNK, (chunk + 1) * CHUNK)
        said = complaint(lambda rows=rows: np.array_equal(column.take(rows), values[rows]))
        assert said is None or (str(file) in said and "damaged between byte" in said)
        lost += said is not None
    assert 1 <= lost <= 5


@quick
@given(place=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255), seed=st.integers(0, 9))
def test_no_damaged_byte_of_a_large_column_is_believed(large: tuple[Path, Numbers], place: float, mask: int, seed: int):
    file, values = large
    data = bytearray(file.read_bytes())
    at = int(place * len(data))
    data[at] ^= mask
    damaged = file.with_name("damaged")
    damaged.write_bytes(data)
    rows = np.random.default_rng(seed).integers(0, len(values), 50)
    said = complaint(lambda: np.array_equal(Sections(damaged).column("a").take(rows), values[rows]))
    assert said is None or str(damaged) in said
    said = complaint(lambda: np.array_equal(Sections(damaged).column("a").whole().take(rows), values[rows]))
    assert said is None or str(damaged) in said


def test_every_damage_is_listed(large: tuple[Path, Numbers]):
    file, _ = large
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    data[(3 << 16) + 5] ^= 1
    file.write_bytes(data)
    assert [str(file) in damage for damage in Sections(file).damages()] == [True, True]


# -- names


@pytest.mark.parametrize(
    "header", [b"", b"a", b"a b", b" a", b"\ta", b"a\tb", b"lbl|1|2", "é ü".encode(), b"\x80\xff x"]
)
def test_the_hash_of_a_header_is_that_of_its_name(header: bytes):
    text = np.frombuffer(bytearray(b"xx" + header + b"yy"), np.uint8)
    hashed = hash_names(text, np.array([2]), np.array([2 + len(header)]))
    assert hashed.tolist() == [hash_name(name_of(header))] and 0 <= hashed[0] < 1 << 63


def table_of(path: Path, names: list[bytes], *, large: bool, step: int = 1000) -> NameTable | None:
    writer = NameTableWriter(path.parent, large=large)
    with SectionsWriter(path) as out:
        for start in range(0, len(names), step):
            writer.append(np.array([hash_name(name) for name in names[start : start + step]], np.int64))
        writer.finish(out)
        writer.close()
        out.publish({})
    found = Sections(path)
    return NameTable(found) if "names.tags" in found else None


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1000, 5000])
def test_every_name_is_among_its_candidates_and_few_others(count: int, tmp_path: Path):
    names = [b"read%d" % (number % 4000) for number in range(count)]
    table = table_of(tmp_path / "file", names, large=False)
    assert table is not None
    extra = 0
    for number, name in enumerate(names):
        candidates = table.candidates(name)
        assert candidates == sorted(candidates) and number in candidates
        extra += sum(names[other] != name for other in candidates)
    assert extra <= count // 4 + 2
    assert all(names[other] != b"nobody" for other in table.candidates(b"nobody"))


def test_one_name_may_be_that_of_every_record(tmp_path: Path):
    table = table_of(tmp_path / "file", [b"same"] * 3000, large=False)
    assert table is not None and table.candidates(b"same") == list(range(3000))


@pytest.mark.parametrize("count", [4096, 4097, 20_000])
def test_more_names_than_memory_may_hold_are_sorted_in_parts_on_disk(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(name_table, "SMALL", 4096)
    names = [b"read%d" % number for number in range(count)]
    table = table_of(tmp_path / "file", names, large=True, step=700)
    assert table is not None
    for number in [*range(0, count, 37), count - 1]:
        assert number in table.candidates(names[number])
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(("count", "there"), [(4095, True), (4096, True), (4097, False), (20_000, False)])
def test_a_table_that_nobody_asked_for_is_made_only_for_a_small_file(
    count: int, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(name_table, "SMALL", 4096)
    names = [b"read%d" % number for number in range(count)]
    table = table_of(tmp_path / "file", names, large=False)
    assert (table is not None) == there
    if table is not None:
        assert count - 1 in table.candidates(names[-1])
