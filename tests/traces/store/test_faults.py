"""Truncation, flipped bits, full disks, many writers, other folders: detected, named and survived."""

import json
import multiprocessing
import os
import pickle
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from millstream import open as ms_open
from millstream.core.memory import Map
from millstream.core.record import infer_schema
from millstream.errors import CorruptRecord, DamageWarning, NewerFormat, NotAStore, StoreError, StoreExists, StoreFull
from millstream.traces.store.format import arrow_schema, read_header
from millstream.traces.store.ids import load_index, update_ids
from millstream.traces.store.manifest import (
    DAMAGED,
    IDS,
    MANIFEST,
    Manifest,
    is_manifest_intact,
    list_shards,
    read_manifest,
    shard_info,
    shard_name,
    sidecar_name,
    write_manifest,
)
from millstream.traces.store.repair import repair, verify, wait_for_writers
from millstream.traces.store.rewrite import merge
from millstream.traces.store.shard_writer import ShardWriter
from millstream.traces.store.traces import Traces
from millstream.traces.store.writer import TraceWriter
from support.effort import PATIENCE_S, num_examples
from support.making import (
    PROCESSES,
    Child,
    Key,
    append_forever,
    append_some,
    append_under_limit,
    append_until_full,
    assert_holds,
    damages,
    die_on_full_disk,
    files_of,
    fill,
    flip,
    hold_all,
    key_of,
    keys_in,
    lost_ids,
    noted,
    open_shard,
    open_write_close,
    plain,
    quiet,
    read_in_fork,
    read_keys,
    read_pickled,
    record,
    run_child,
    same,
    same_value,
    small,
    write,
    write_open,
)

pytestmark = pytest.mark.on_disk

KEYS = [(7, number) for number in range(6)]
SHARD_RECORDS = 2
CONFIG = {"model": "Mühle", "rate": 1e-05}

examples = settings(
    deadline=None, max_examples=num_examples(15), suppress_health_check=[HealthCheck.too_slow], database=None
)
bits = st.integers(0, 7)


class Shelf:
    """Stores to be damaged: written once, copied for every example."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._copy = folder / "0"
        self._first_manifest: dict[str, bytes] = {}  # when there was only shard 0
        self.sealed: dict[str, Path] = {}
        for compression in ("none", "lz4", "zstd"):
            path = self.sealed[compression] = folder / compression
            write(path, KEYS[:SHARD_RECORDS], small, compression=compression, config=CONFIG)
            self._first_manifest[path.name] = (path / MANIFEST).read_bytes()
            write(path, KEYS[SHARD_RECORDS:], small, shard_records=SHARD_RECORDS)
            update_ids(path, read_manifest(path), min_shards=1)
        self.open, self.open_ends = write_open(folder / "open", KEYS, small)

    def take(self, template: Path, *, old_manifest: bool = False) -> Path:
        """A copy to damage, which replaces the previous copy."""
        shutil.rmtree(self._copy, ignore_errors=True)
        self._copy = self._copy.with_name(str(int(self._copy.name) + 1))
        shutil.copytree(template, self._copy)
        if old_manifest:
            (self._copy / MANIFEST).write_bytes(self._first_manifest[template.name])
        return self._copy


def spans_of(path: Path, shard: int) -> dict[Key, tuple[int, int]]:
    """(start, end) of every record of a shard in its file."""
    rows = pq.read_table(path / sidecar_name(shard), columns=["question_id", "_offset", "_bytes"]).to_pylist()
    return {key_of(row): (row["_offset"], row["_offset"] + row["_bytes"]) for row in rows}


def id_of(key: Key) -> str:
    return f"{key[0]}:{key[1]}"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("shelf"))


# -- truncation


@examples
@given(data=st.data())
def test_an_open_shard_truncated_at_any_byte_recovers_exactly_the_complete_records(
    shelf: Shelf, data: st.DataObject
) -> None:
    ends = shelf.open_ends
    edges = st.sampled_from([0, 1, 7, 8, *(end + d for end in ends for d in (-8, -1, 0, 1, 8) if end + d <= ends[-1])])
    size = data.draw(st.integers(0, ends[-1]) | edges)
    path = shelf.take(shelf.open)
    os.truncate(open_shard(path), size)
    with quiet(), TraceWriter(path) as writer:
        whole = sum(end <= size for end in ends)
        assert len(writer) == whole
        assert not [lost for recovery in writer.recovered for lost in recovery.lost]
        writer.append(small(8, 0))
    assert_holds(path, [*KEYS[:whole], (8, 0)], small)


@examples
@given(data=st.data())
def test_a_sealed_shard_truncated_at_any_byte_loses_only_the_truncated_records(
    shelf: Shelf, data: st.DataObject
) -> None:
    template = shelf.sealed[data.draw(st.sampled_from(["none", "zstd"]))]
    path = shelf.take(template, old_manifest=data.draw(st.booleans(), label="its writer died before the manifest"))
    shard = data.draw(st.sampled_from([1, 2]))
    file, spans = path / shard_name(shard), spans_of(path, shard)
    length = file.stat().st_size
    edges = [0, 1, 8, 9, *(end + d for _, end in spans.values() for d in (-1, 0, 1)), length - 1]
    size = data.draw(st.integers(0, length - 1) | st.sampled_from(edges))
    os.truncate(file, size)
    cut = [key for key, (_, end) in spans.items() if end > size]

    traces = ms_open(path)
    for number, key in enumerate(KEYS):
        if key not in cut:
            assert same(traces[number], small(*key))
            continue
        with pytest.raises(CorruptRecord) as error:
            traces[number]
        check_named(error.value, number)
    assert damages(path)

    lost = repair(path).lost
    assert read_keys(path, small) == [key for key in KEYS if key not in cut]
    assert damages(path) == []
    assert {record.id for record in lost} == {id_of(key) for key in cut} == lost_ids(path)
    write(path, cut, small)  # extracted again
    assert_holds(path, KEYS, small)


# -- one flipped bit


def check_flip(path: Path, touched: list[Key]) -> None:
    """Wherever the bit is: no wrong data, no other record lost, found by `verify`, gone after `repair`."""
    with quiet():
        traces = ms_open(path)
        assert len(traces) == len(KEYS)
        for number, key in enumerate(KEYS):
            for read, name in ((traces.__getitem__, number), (traces.by_id, id_of(key))):
                check_read(lambda read=read, name=name: [read(name)], [small(*key)], number, key in touched)
            check_fetch(traces, number, key in touched)
        with pytest.raises(KeyError):
            traces.by_id("7:6")
        assert damages(path), "verify found no damage"
        lost = repair(path).lost
        after = read_keys(path, small)
    assert damages(path) == []
    assert after == [key for key in KEYS if key in after]
    assert {*KEYS} - {*after} <= {*touched}
    assert len(lost) == len(KEYS) - len(after)


def check_read(read: Callable[[], list[Any]], expected: list[Any], number: int, touched: bool) -> None:
    try:
        found = read()
    except CorruptRecord as error:
        check_named(error, number)
        assert touched, "this record was not damaged"
        return
    assert all(map(same_value, found, expected))


def check_named(error: CorruptRecord, number: int) -> None:
    shard, row = divmod(number, SHARD_RECORDS)
    assert f"{shard_name(shard)}: record {number} (row {row}" in str(error)
    assert "field '" in str(error) or "frame" in str(error)
    assert "\n" not in str(error)


def check_fetch(traces: Traces, number: int, touched: bool) -> None:
    expected: dict[str, Any] = small(*KEYS[number])
    for layers in (None, 1, -1, [2, 0]):
        want = expected["hidden"] if layers is None else expected["hidden"][layers]
        check_read(partial(fetched, traces, number, ["hidden"], layers), [want], number, touched)
    names = ["tokens", "question", "tags", "attention", "nothing"]
    check_read(partial(fetched, traces, number, names, None), [expected[name] for name in names], number, touched)


def fetched(traces: Traces, number: int, names: list[str], layers: Any) -> list[Any]:
    return [column[0] for column in traces.fetch([number], names, layers).values()]


@examples
@given(data=st.data())
def test_a_flipped_bit_in_a_sealed_shard_costs_at_most_the_record_it_is_in(shelf: Shelf, data: st.DataObject) -> None:
    template = shelf.sealed[data.draw(st.sampled_from(["none", "lz4", "zstd"]))]
    path = shelf.take(template, old_manifest=data.draw(st.booleans(), label="its writer died before the manifest"))
    shard = data.draw(st.sampled_from([1, 2]))
    file, spans = path / shard_name(shard), spans_of(path, shard)
    edges = [0, *(edge for span in spans.values() for edge in span)]
    a, b = data.draw(st.sampled_from([*pairwise(edges), (edges[-1], file.stat().st_size)]), label="part of file")
    assume(a < b)
    position = data.draw(st.integers(a, b - 1) | st.integers(a, min(a + 800, b - 1)))
    flip(file, position, data.draw(bits))
    check_flip(path, [key for key, (start, end) in spans.items() if start <= position < end])


@examples
@given(data=st.data())
def test_a_flipped_bit_in_a_sidecar_costs_no_record(shelf: Shelf, data: st.DataObject) -> None:
    template = shelf.sealed[data.draw(st.sampled_from(["none", "zstd"]))]
    path = shelf.take(template, old_manifest=data.draw(st.booleans(), label="its writer died before the manifest"))
    file = path / sidecar_name(data.draw(st.sampled_from([1, 2])))
    flip(file, data.draw(st.integers(0, file.stat().st_size - 1)), data.draw(bits))
    check_flip(path, [])


@examples
@given(data=st.data())
def test_a_flipped_bit_in_the_manifest_costs_no_record(shelf: Shelf, data: st.DataObject) -> None:
    path = shelf.take(shelf.sealed["zstd"])
    file = path / MANIFEST
    written = file.read_bytes()
    position = data.draw(st.integers(0, len(written) - 1) | st.integers(0, 300))
    flip(file, position, data.draw(bits))
    try:
        ms_open(path)
    except NewerFormat:  # 1 -> 9 cannot be distinguished from a newer store
        assert position == written.index(b'"version": ') + len(b'"version": ')
        return
    check_flip(path, [])
    assert ms_open(path).config == CONFIG


def test_every_bit_of_the_configuration_in_the_manifest_is_checked(shelf: Shelf) -> None:
    path = shelf.take(shelf.sealed["none"])
    file = path / MANIFEST
    written = file.read_bytes()
    unseen: list[bytes] = []
    for position in range(written.index(b'"config": '), written.index(b'"config_hash"')):
        for bit in range(8):
            file.write_bytes(written)
            flip(file, position, bit)
            if is_manifest_intact(path):
                unseen.append(file.read_bytes()[position - 9 : position + 9])
    assert not unseen  # 1e-05 -> 1E-05 is the same number, but not the same bytes


@examples
@given(data=st.data())
def test_a_flipped_bit_in_the_id_index_costs_no_record(shelf: Shelf, data: st.DataObject) -> None:
    path = shelf.take(shelf.sealed["none"])
    file = path / IDS
    flip(file, data.draw(st.integers(0, file.stat().st_size - 1)), data.draw(bits))
    check_flip(path, [])


@examples
@given(data=st.data())
def test_a_flipped_bit_in_an_open_shard_costs_at_most_the_record_it_is_in(shelf: Shelf, data: st.DataObject) -> None:
    path = shelf.take(shelf.open)
    file = open_shard(path)
    edges = [0, read_header(Map(file).view)[1], *shelf.open_ends]
    row = data.draw(st.integers(0, len(KEYS)), label="part of file") - 1
    a, b = edges[row + 1], edges[row + 2]
    position = data.draw(st.integers(a, b - 1) | st.integers(a, min(a + 800, b - 1)))
    flip(file, position, data.draw(bits))
    damaged = file.read_bytes()
    with quiet(), TraceWriter(path) as writer:
        lost = [lost for recovery in writer.recovered for lost in recovery.lost]
        cut_bytes = sum(recovery.cut_bytes for recovery in writer.recovered)
    after = read_keys(path, small)
    assert damages(path) == []
    if row < 0 and not after:  # without the header no record is readable: the file is kept as it is
        assert damaged in files_of(path).values() and lost
        return
    assert after in (KEYS, [key for index, key in enumerate(KEYS) if index != row])
    assert after == KEYS or lost or cut_bytes, "a record was lost silently"


def test_a_flipped_bit_in_the_header_of_an_open_shard_gives_no_wrong_data_and_deletes_nothing(tmp_path: Path) -> None:
    template, _ = write_open(tmp_path / "template", KEYS[:2], plain)
    written = open_shard(template).read_bytes()
    header_bytes = read_header(Map(open_shard(template)).view)[1]
    names = [b"hidden", b"question_id", b"float16", b"layer", b"millstream.axes", b"millstream.created", b"_crc32c"]
    positions = {*range(0, header_bytes, 17), *range(12, 16), *(written.index(name) + 1 for name in names)}
    for position in sorted(positions):
        path = tmp_path / str(position)
        shutil.copytree(template, path)
        flip(open_shard(path), position, position % 8)
        damaged = open_shard(path).read_bytes()
        with noted(f"bit {position % 8} of byte {position} of {header_bytes}"):
            with quiet(), TraceWriter(path) as writer:
                lost = [lost for recovery in writer.recovered for lost in recovery.lost]
            found = read_keys(path, plain)
            assert damages(path) == []
            assert found == KEYS[:2] or (not found and lost and damaged in files_of(path).values())


@pytest.mark.parametrize("num_records", [1, 2])
def test_a_damaged_last_record_of_an_open_shard_is_not_mistaken_for_one_in_progress(
    num_records: int, tmp_path: Path
) -> None:
    path, ends = write_open(tmp_path / "store", KEYS[:num_records], plain)
    flip(open_shard(path), ends[-1] - 3)  # it is complete, so its append had returned
    damaged = open_shard(path).read_bytes()
    with pytest.warns(DamageWarning, match="1 damaged"):
        TraceWriter(path).close()
    assert_holds(path, KEYS[: num_records - 1], plain)
    assert damaged in files_of(path / DAMAGED).values()


def test_every_byte_of_the_id_index_is_checked(shelf: Shelf) -> None:
    path = shelf.take(shelf.sealed["none"])
    file = path / IDS
    written = file.read_bytes()
    for position in range(0, len(written), 2):
        flip(file, position, position % 6)
        with noted(f"bit {position % 6} of byte {position}"):
            assert load_index(path) is None
        file.write_bytes(written)


# -- a full disk


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root; the test with a file size limit does without")
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a small tmpfs here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB."""
    with mounted(tmp_path / "disk", "size=2m") as folder:
        yield folder


def check_message(error: StoreFull, path: Path) -> None:
    assert str(path) in str(error) and "free some space" in str(error)
    assert "\n" not in str(error)


def test_a_file_size_limit_is_a_clear_error_and_the_writer_continues_when_it_is_lifted(tmp_path: Path) -> None:
    *reported, last = run_child(append_under_limit, tmp_path / "store", 150_000)
    refusals = [text for text in reported if isinstance(text, str)]
    assert len(refusals) == 2 and all("file too large" in text and "\n" not in text for text in refusals)
    assert_holds(tmp_path / "store", [(1, number) for number in range(last)])


def test_a_full_disk_is_a_clear_error_and_the_same_writer_continues_when_space_is_freed(disk: Path) -> None:
    path, keys = disk / "store", [(1, number) for number in range(60)]
    writer = TraceWriter(path, shard_records=4)
    fill(disk / "filler", 400_000)
    with pytest.raises(StoreFull) as error:
        writer.extend(record(*key) for key in keys)
    check_message(error.value, path)
    done = len(writer)
    assert done > 4
    with pytest.raises(StoreFull):
        writer.append(record(*keys[done]))
    sealed = read_keys(path)
    assert sealed == keys[: len(sealed)]

    (disk / "filler").unlink()
    writer.extend(record(*key) for key in keys[done : done + 6])
    writer.close()
    assert_holds(path, keys[: done + 6])


def test_a_new_writer_resumes_after_a_full_disk(disk: Path) -> None:
    path, filler = disk / "store", disk / "filler"
    fill(filler, 400_000)
    *_, done = run_child(append_until_full, path, 1, {"shard_records": 5})
    keys = [(1, number) for number in range(done)]
    sealed = read_keys(path)
    assert sealed == keys[: len(sealed)]
    fill(disk / "more", 0)
    try:
        TraceWriter(path).close()  # nothing to recover, or no space to seal it: neither loses a record
    except StoreFull as error:
        check_message(error, path)
    filler.unlink()
    write(path, [(2, 0), (2, 1)])
    assert_holds(path, [*keys, (2, 0), (2, 1)])


def test_a_full_disk_that_ends_a_with_block_leaves_everything_to_the_next_writer(disk: Path) -> None:
    path, filler = disk / "store", disk / "filler"
    fill(filler, 200_000)
    done: list[Key] = []

    def write_until_full() -> None:
        with TraceWriter(path) as writer:
            while True:
                writer.append(record(1, len(done)))
                done.append((1, len(done)))

    with pytest.raises(StoreFull):
        write_until_full()
    filler.unlink()
    write(path, [(2, 0)])  # in the same process: the previous writer must have released its shard
    assert_holds(path, [*done, (2, 0)])


@pytest.mark.parametrize("closes", [False, True])
def test_a_disk_that_fills_up_while_sealing_neither_loses_nor_duplicates_records(closes: bool, disk: Path) -> None:
    for num_pages in range(14):
        path, filler = disk / f"store{num_pages}", disk / "filler"
        writer = TraceWriter(path, shard_records=2)
        writer.append(small(1, 0))
        kept = [(1, 0)]
        fill(filler, num_pages * 4096)
        for key in [(1, 2), (1, 3)]:
            try:
                writer.append(small(*key))
                kept.append(key)
            except StoreFull as error:
                check_message(error, path)
        assert len(writer) == len(kept)
        assert read_keys(path, small) == kept[: len(ms_open(path))]
        if closes:
            try:
                writer.close()
            except StoreFull as error:
                check_message(error, path)
        filler.unlink()
        if not closes:
            writer.append(small(1, 5))
            kept.append((1, 5))
        writer.close()
        assert_holds(path, kept, small)
        write(path, [(2, 0)], small)
        assert_holds(path, [*kept, (2, 0)], small)
        shutil.rmtree(path)


def test_a_writer_that_dies_while_the_disk_is_full_loses_nothing(disk: Path) -> None:
    for num_pages in range(14):
        path, filler = disk / f"store{num_pages}", disk / "filler"
        child = Child(die_on_full_disk, path, filler, num_pages * 4096)
        kept = list(child.rest())
        child.join()
        assert read_keys(path, small) in ([], kept)
        filler.unlink()
        write(path, [(2, 0)], small)
        assert_holds(path, [*kept, (2, 0)], small)
        shutil.rmtree(path)


def test_a_disk_without_free_inodes_is_a_clear_error(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=2m,nr_inodes=30") as disk:
        path = disk / "store"
        (disk / "filler").mkdir()
        for number in range(12):
            (disk / "filler" / str(number)).touch()
        writer = TraceWriter(path, shard_records=1)
        with pytest.raises(StoreFull) as error:
            writer.extend(small(1, number) for number in range(30))
        check_message(error.value, path)
        done = len(writer)
        shutil.rmtree(disk / "filler")
        writer.append(small(1, done))
        writer.close()
        assert_holds(path, [(1, number) for number in range(done + 1)], small)


# -- many writers


def test_writers_in_many_processes_write_every_record_exactly_once(tmp_path: Path) -> None:
    path = tmp_path / "store"
    keys = {seed: [(seed, number) for number in range(17)] for seed in range(4)}
    children = [Child(append_some, path, keys[seed], {"shard_records": 3}) for seed in keys]
    for child in children:
        assert list(child.rest())[-1] == 17
        assert child.join() == 0
    assert_holds(path, [key for some in keys.values() for key in some], plain)
    numbers = [shard.number for shard in ms_open(path).shards]
    assert numbers == list(range(4 * 6))


def test_two_writers_in_one_process_do_not_interfere(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with TraceWriter(path, shard_records=2) as a, TraceWriter(path, shard_records=3) as b:
        for number in range(7):
            a.append(small(1, number))
            b.append(small(2, number))
        assert len(list_shards(path)[1]) == 2
    assert_holds(path, [(seed, number) for seed in (1, 2) for number in range(7)], small)


def test_writers_in_threads_write_every_record_exactly_once(tmp_path: Path) -> None:
    path = tmp_path / "store"
    keys = [[(seed, number) for number in range(12)] for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda some: write(path, some, small, shard_records=1), keys))
    assert_holds(path, [key for some in keys for key in some], small)


def test_writers_that_create_the_same_store_at_the_same_time_all_succeed(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        for turn in range(8):
            path, start = tmp_path / f"store{turn}", threading.Barrier(4)

            def make(seed: int, path: Path = path, start: threading.Barrier = start) -> None:
                start.wait(PATIENCE_S)
                write(path, [(seed, 0)], plain, config=CONFIG)

            list(threads.map(make, range(4)))
            assert ms_open(path).config == CONFIG
            assert_holds(path, [(seed, 0) for seed in range(4)], plain)


def test_a_writer_does_not_touch_the_open_shard_of_a_running_writer(tmp_path: Path) -> None:
    path = tmp_path / "store"
    first = TraceWriter(path)
    first.append(record(1, 0))
    before = files_of(path)
    with TraceWriter(path) as second:
        assert second.recovered == []
        assert files_of(path) == before
        with pytest.raises(StoreError, match=f"{path}: "):
            repair(path)
        second.append(record(2, 0))
    assert read_keys(path) == [(2, 0)]
    first.append(record(1, 1))
    first.close()
    assert_holds(path, [(1, 0), (1, 1), (2, 0)])


def test_waiting_for_writers_ends_with_the_last_one_or_with_an_error_that_names_its_shard(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with TraceWriter(path) as writer:
        writer.append(small(1, 0))
        with pytest.raises(StoreError) as error:
            wait_for_writers(path, wait_s=0)
        assert str(open_shard(path)) in str(error.value)
    wait_for_writers(path, wait_s=0)
    dead, _ = write_open(tmp_path / "dead", KEYS, small)
    wait_for_writers(dead, wait_s=0)
    assert_holds(dead, KEYS, small)


def test_many_writers_that_open_and_close_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    path, num_writers = tmp_path / "store", 6
    start = PROCESSES.Barrier(num_writers)
    keys = [[(seed, number) for number in range(10)] for seed in range(num_writers)]
    children = [Child(open_write_close, path, some, start) for some in keys]
    for child, some in zip(children, keys, strict=True):
        assert list(child.rest()) == some
        assert child.join() == 0
    assert_holds(path, [key for some in keys for key in some], small)
    assert not (path / DAMAGED).exists()


def test_many_writers_that_die_at_the_same_time_neither_lose_nor_duplicate_records(tmp_path: Path) -> None:
    path, rng = tmp_path / "store", random.Random(3)
    kept: set[Key] = set()
    maybe: set[Key] = set()
    for turn in range(4):
        children = {
            seed: Child(append_forever, path, seed, {"shard_records": 2}) for seed in range(turn * 4, turn * 4 + 4)
        }
        reported = {seed: [child.receive() for _ in range(rng.randrange(1, 5))] for seed, child in children.items()}
        for seed, child in children.items():
            child.kill()
            reported[seed] += child.rest()
            child.join()
            kept |= {(seed, count - 1) for count in reported[seed][1:]}
            maybe.add((seed, reported[seed][-1]))  # the one in progress
    TraceWriter(path).close()
    found = read_keys(path)
    assert kept <= {*found} <= kept | maybe
    assert_holds(path, {*found})


# -- readers and writers at the same time


def test_a_reader_sees_sealed_shards_and_refresh_adds_new_ones(tmp_path: Path) -> None:
    path, keys = tmp_path / "store", [(1, number) for number in range(20)]
    with TraceWriter(path, shard_records=3) as writer:
        traces = ms_open(path)
        pickles: list[tuple[int, bytes]] = []
        for done, key in enumerate(keys, 1):
            sealed = len(traces)
            writer.append(record(*key))
            assert len(traces) == sealed
            assert keys_in(traces) == keys[:sealed]
            pickles.append((sealed, pickle.dumps(traces)))
            traces.refresh()
            assert len(traces) == done - done % 3 == len(ms_open(path))
        assert "1 shard not sealed yet" in repr(traces)
    assert keys_in(traces.refresh()) == keys
    for sealed, data in pickles:
        copy = pickle.loads(data)
        assert len(copy) == sealed
        assert keys_in(copy) == keys[:sealed]


def test_readers_work_while_many_writers_write(tmp_path: Path) -> None:
    path = write(tmp_path / "store", [(9, 0)], small)
    start = PROCESSES.Barrier(4)
    keys = [[(seed, number) for number in range(8)] for seed in range(3)]
    children = [Child(open_write_close, path, some, start) for some in keys]
    traces = ms_open(path)
    start.wait(PATIENCE_S)
    while len(traces) < 1 + 3 * 8:
        assert len({*keys_in(traces, small)}) == len(traces)
        traces.refresh()
        assert len({*keys_in(pickle.loads(pickle.dumps(traces)), small)}) == len(traces)
        if not any(child.process.is_alive() for child in children):
            traces.refresh()
            break
    assert {*keys_in(traces, small)} == {(9, 0), *(key for some in keys for key in some)}
    for child in children:
        child.join()


# -- other formats and folders


def make_newer(path: Path, *, sealed: bool) -> Path:
    """A store as a millstream of format 99 may write it."""
    path.mkdir()
    records = [record(*key) for key in KEYS[:2]]
    arrow = arrow_schema(infer_schema(records[0], {}), compression="none", metadata={"millstream.version": "99"})
    shard = ShardWriter.create(path, first=0, schema=arrow)
    for one in records:
        shard.append(one)
    shards = (shard.seal(),) if sealed else ()
    shard.release()
    write_manifest(path, Manifest(arrow_schema=arrow, shards=shards))
    content = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**content, "version": 99}))
    return path


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("manifest", [True, False])
def test_a_newer_format_is_rejected_and_nothing_is_changed(manifest: bool, sealed: bool, tmp_path: Path) -> None:
    path = make_newer(tmp_path / "store", sealed=sealed)
    if not manifest:
        (path / MANIFEST).unlink()
    before = files_of(path)
    openers: list[Callable[[Path], object]] = [TraceWriter, repair]
    if manifest or sealed:
        openers += [ms_open, lambda path: list(verify(path)), lambda path: merge([path], tmp_path / "out")]
    for opener in openers:
        with pytest.raises(NewerFormat, match=r"\b99\b"):
            opener(path)
        assert files_of(path) == before
    assert not (tmp_path / "out").exists()


def test_a_newer_version_in_the_manifest_is_reported_before_its_checksum_is_verified(tmp_path: Path) -> None:
    path = write(tmp_path / "store", KEYS[:2])
    content = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**content, "version": 3}))
    for opener in (ms_open, TraceWriter, repair):
        with pytest.raises(NewerFormat, match=r"\b3\b"):
            opener(path)


def test_a_path_that_is_not_a_store_is_rejected_with_a_command_that_helps(tmp_path: Path) -> None:
    (tmp_path / "old_batch_0000.pkl.gz").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for path, advice in [
        (tmp_path / "missing", "millstream convert"),
        (tmp_path / "empty", "empty"),
        (tmp_path, r"millstream convert .*pkl\.gz"),
        (tmp_path / "old_batch_0000.pkl.gz", "millstream convert"),
    ]:
        with pytest.raises(NotAStore, match=advice) as error:
            ms_open(path)
        assert str(path) in str(error.value)
    assert not (tmp_path / "missing").exists()


def test_a_writer_rejects_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StoreExists, match=r"notes\.txt"):
        TraceWriter(tmp_path / "notes.txt")
    assert files_of(tmp_path) == {"notes.txt": b"mine"}


# -- threads, forks, many shards


def many_shards(path: Path, template: Path, count: int) -> tuple[Path, list[Key]]:
    """A store of `count` shards, copies of those of the template: a shard does not contain its number."""
    path.mkdir()
    shards = list_shards(template)[0]
    keys = read_keys(template, plain)
    for number in range(count):
        for name in (shard_name, sidecar_name):
            shutil.copy(template / name(shards[number % len(shards)]), path / name(number))
    infos = tuple(shard_info(path, number) for number in range(count))
    write_manifest(path, replace(read_manifest(template), shards=infos))  # else the copies are not counted
    return path, [keys[number % len(keys)] for number in range(count)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("readers") / "store", KEYS, shard_records=2)


def test_threads_read_the_same_records(store: Path) -> None:
    traces = ms_open(store, open_shards=1)
    start = threading.Barrier(8)

    def read(_: int) -> bool:
        start.wait(PATIENCE_S)
        return keys_in(traces) == KEYS and key_of(traces.by_id("7:3")) == (7, 3)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(8)))


def test_a_forked_child_reads_a_store_opened_by_its_parent(store: Path) -> None:
    assert run_child(read_in_fork, store) == [0, KEYS]


def test_a_spawned_process_reads_pickled_traces(store: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=read_pickled, args=(ms_open(store), sender))
    process.start()
    sender.close()
    assert receiver.recv() == KEYS
    process.join()


def test_fifty_shards_are_read_with_two_open_shards(tmp_path: Path) -> None:
    template = write(tmp_path / "template", KEYS[:5], plain, shard_records=1)
    path, keys = many_shards(tmp_path / "store", template, 50)
    traces = ms_open(path, open_shards=2)
    assert keys_in(traces, plain) == keys
    found = traces.fetch(range(49, -1, -1), ["question_id", "hidden"], layers=[0, 2])
    assert found["question_id"] == [id_of(key) for key in keys[::-1]]
    expected: list[Any] = [plain(*key)["hidden"] for key in keys[::-1]]
    assert all(same_value(value, whole[[0, 2]]) for value, whole in zip(found["hidden"], expected, strict=True))


def test_records_of_300_shards_are_kept_and_read_with_64_file_descriptors(tmp_path: Path) -> None:
    template = write(tmp_path / "template", KEYS[:5], plain, shard_records=1)
    path, keys = many_shards(tmp_path / "store", template, 300)
    assert run_child(hold_all, path, 64) == [keys]


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_writing_to_views_changes_neither_the_file_nor_later_reads(compression: str, tmp_path: Path) -> None:
    path = write(tmp_path / "store", KEYS, shard_records=4, compression=compression)
    before = files_of(path)
    traces = ms_open(path)
    held = [traces[number] for number in range(len(KEYS))]
    for found in [*held, *traces]:
        for name in ("hidden", "attention", "tokens"):
            found[name][:] = 0  # type: ignore[index]
    assert keys_in(traces) == KEYS
    expected: Any = record(*KEYS[4])
    assert same_value(traces.fetch([4], ["hidden"], 1)["hidden"][0], expected["hidden"][1])
    assert files_of(path) == before
    assert damages(path) == []
    assert not np.any(held[0]["tokens"])  # the view itself has changed
