"""Columns of an index: whatever the headers say comes back, in bounded memory, and damage is noticed."""

import errno
import io
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from millstream.errors import StoreFull
from millstream.reads.files.encodings import ANCHOR, CHUNK, BitColumn, BitColumnWriter, last_not_above, sums_before
from millstream.reads.files.index import IndexLimits
from millstream.reads.files.sections import CRC_BYTES, Sections
from millstream.reads.files.sections_writer import SectionsWriter
from support.effort import num_examples
from support.read_files import error_of, opened

Numbers = NDArray[np.int64]
LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
quick = settings(
    max_examples=num_examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
numbers = st.none() | st.integers(0, 4) | st.integers(0, HIGHEST)
words = st.none() | st.text("ab|é", min_size=1, max_size=9)


# -- from headers


@quick
@given(
    pool=st.lists(st.tuples(numbers, words), min_size=1, max_size=12),
    order=st.lists(st.integers(0, 11), max_size=60),
    distinct=st.integers(0, 12),
    buffer_bytes=st.sampled_from([128, 1024]),
)
@example(pool=[(0, "a"), (HIGHEST, None), (None, "é")], order=[0, 1, 2] * 2000, distinct=3, buffer_bytes=1 << 16)
def test_any_values_come_back_for_any_number_of_distinct_ones(
    tmp_path: Path, pool: list[tuple[int | None, str | None]], order: list[int], distinct: int, buffer_bytes: int
):
    rows = [pool[place % len(pool)] for place in [0, *order]]
    file = tmp_path / "reads.fa"
    file.write_text("".join(f">{'' if n is None else n} {t or ''}\nAC\n" for n, t in rows))
    file.with_name("reads.fa.millstream").unlink(missing_ok=True)
    limits = IndexLimits(distinct=distinct, buffer_bytes=buffer_bytes)
    reads = opened(file, header_regex=r"(?P<number>\d+)? (?P<text>.+)?$", limits=limits)
    for column, name in enumerate(("number", "text")):
        assert reads.column(name).to_pylist() == [row[column] for row in rows]
        picked = list(range(len(rows)))[::-7]
        assert list(reads.fetch(picked, [name]).columns[name]) == [rows[number][column] for number in picked]


@pytest.mark.parametrize("distinct", [2999, 3000])
def test_a_full_dictionary_knows_every_value(distinct: int, tmp_path: Path):
    values = np.random.default_rng(0).permutation(3000) * 65536
    text = "".join(f">{value} NC_{value:09d}\nAC\n" for value in [*values, *values])
    (tmp_path / "reads.fa").write_text(text)
    regex, limits = r"(?P<number>\d+) (?P<text>\S+)", IndexLimits(distinct=distinct)
    reads = opened(tmp_path / "reads.fa", header_regex=regex, limits=limits)
    assert reads.column("number").to_pylist() == [*values, *values]
    assert reads.column("text").to_pylist() == [f"NC_{value:09d}" for value in [*values, *values]]
    assert ("text" in reads.table.column_names) == (distinct == 3000)


def test_texts_that_exceed_the_dictionary_stay_in_the_headers(tmp_path: Path):
    texts = [f"{number}" * 30_000 for number in range(100, 160)]
    (tmp_path / "reads.fa").write_text("".join(f">{text}\nAC\n" for text in texts))
    reads = opened(tmp_path / "reads.fa", header_regex=r"(?P<text>\w+)")
    assert "text" not in reads.table.column_names and reads.column("text").to_pylist() == texts


# -- packed integers


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


def written(values: Numbers, pieces: list[int]) -> tuple[BitColumnWriter, BitColumn]:
    directory, words = io.BytesIO(), io.BytesIO()
    writer = BitColumnWriter(directory, words)
    for part in np.split(values, sorted(piece % (len(values) + 1) for piece in pieces)):
        buffer = part.copy()
        writer.append(buffer)
        buffer[:] = 1  # callers use theirs again
    writer.finish()
    pairs = np.frombuffer(bytearray(directory.getvalue()), np.int64).reshape(-1, 2)
    return writer, BitColumn(writer.rows, pairs, np.frombuffer(bytearray(words.getvalue()), np.uint64))


@quick
@given(values=columns(), pieces=st.lists(st.integers(0, 20_000), max_size=4))
@example(values=np.array([LOWEST, -1, 0, 1, HIGHEST] * 50, np.int64), pieces=[7])
@example(values=np.empty(0, np.int64), pieces=[])
def test_a_bit_column_returns_and_finds_values_appended_in_any_pieces(values: Numbers, pieces: list[int]):
    _, column = written(values, pieces)
    rows = np.random.default_rng(0).permutation(len(values))
    assert column.rows == len(values) and np.array_equal(column.take(rows), values[rows])
    ordered = np.sort(values)
    queries = np.concatenate([ordered[::97], ordered[::89] // 2, [LOWEST, HIGHEST]])
    _, column = written(ordered, [])
    near = np.random.default_rng(1).integers(-1, len(ordered), len(queries))
    found = [
        last_not_above(column.directory, column.words, column.rows, query, row)
        for query, row in zip(queries.tolist(), near.tolist(), strict=True)
    ]
    assert np.array_equal(found, np.searchsorted(ordered, queries, side="right") - 1)


@quick
@given(seed=st.integers(0, 99), count=st.sampled_from([1, 31, 32, 33, CHUNK, 2 * CHUNK + 5]), bits=st.integers(0, 45))
def test_sums_before_are_the_sums_of_all_values_before(seed: int, count: int, bits: int):
    values = np.random.default_rng(seed).integers(0, (1 << bits) + 1, count)
    starts = np.cumsum(values) - values
    _, column = written(values, [])
    _, anchors = written(starts[::ANCHOR].copy(), [])
    rows = np.random.default_rng(seed).permutation(count)
    sums, found = sums_before(anchors, column, rows)
    assert np.array_equal(sums, starts[rows]) and np.array_equal(found, values[rows])


def test_values_take_the_bits_they_need_and_a_constant_takes_none():
    values = np.random.default_rng(0).integers(10**15, 10**15 + 64, 4 * CHUNK)
    assert written(values, [])[0].num_words == 4 * CHUNK * 6 // 64
    assert written(np.full(10 * CHUNK, 7), [1, 5000])[0].num_words == 0


# -- the file of an index


def publish(path: Path, values: dict[str, Numbers]) -> None:
    with SectionsWriter(path) as writer:
        for name, column in values.items():
            writer.column(name).append(column)
        writer.publish({})


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    publish(tmp_path / "file", {"a": np.arange(10)})
    before = (tmp_path / "file").read_bytes()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFull, match="Nothing was left behind"):
        publish(tmp_path / "file", {"a": np.arange(20)})
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_bytes() == before


def test_an_open_file_is_unchanged_when_it_is_replaced_on_disk(tmp_path: Path):
    publish(tmp_path / "file", {"a": np.arange(1000)})
    found = Sections(tmp_path / "file")
    publish(tmp_path / "file", {"a": np.arange(1000) + 5})
    assert found.column("a").take(np.array([7])).tolist() == [7]
    assert Sections(tmp_path / "file").column("a").take(np.array([7])).tolist() == [12]


LARGE = np.random.default_rng(0).integers(0, 1 << 40, 160 * CHUNK)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A file of three megabytes, and what is in it."""
    file = tmp_path_factory.mktemp("large") / "file"
    publish(file, {"a": LARGE, "other": np.arange(50_000)})
    return file, file.read_bytes()


@quick
@given(place=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255), seed=st.integers(0, 9))
def test_no_damaged_byte_of_a_large_column_is_used(large: tuple[Path, bytes], place: float, mask: int, seed: int):
    file, data = large
    at = int(place * len(data))
    damaged = file.with_name("damaged")
    damaged.write_bytes(data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :])
    rows = np.random.default_rng(seed).integers(0, len(LARGE), 3)
    for eager_bytes in (0, 1 << 30):
        message = error_of(
            lambda eager_bytes=eager_bytes: np.array_equal(
                Sections(damaged, eager_bytes=eager_bytes).column("a").take(rows), LARGE[rows]
            )
        )
        assert message is None or str(damaged) in message


def test_damage_of_a_large_column_loses_the_rows_of_its_megabyte_and_is_listed(large: tuple[Path, bytes]):
    file, data = large
    damaged = file.with_name("damaged")
    changed = bytearray(data)
    changed[CRC_BYTES + 5] ^= 1
    changed[2 * CRC_BYTES + 5] ^= 1
    damaged.write_bytes(changed)
    column, lost = Sections(damaged, eager_bytes=0).column("a"), 0
    for chunk in range(160):
        rows = np.arange(chunk * CHUNK, (chunk + 1) * CHUNK)
        lost += error_of(lambda rows=rows: np.array_equal(column.take(rows), LARGE[rows])) is not None
    assert 80 <= lost <= 120
    assert [str(damaged) in damage for damage in Sections(damaged).damages()] == [True, True]
