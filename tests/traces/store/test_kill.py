"""SIGKILL at random moments and between any two steps: no acknowledged record is lost or duplicated."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millstream import open as ms_open
from millstream.errors import NotAStore, StoreError
from millstream.traces.store.manifest import read_shard_seal
from millstream.traces.store.repair import repair
from millstream.traces.store.rewrite import merge, subset_records, subset_shards
from millstream.traces.store.writer import TraceWriter
from support.effort import THOROUGH, num_examples
from support.making import (
    Child,
    Key,
    append_forever,
    append_some,
    assert_holds,
    damages,
    die_everywhere,
    files_of,
    flip,
    key_of,
    lost_ids,
    merge_stores,
    noted,
    open_and_close,
    open_shard,
    place_of,
    plain,
    quiet,
    read_keys,
    record,
    repair_store,
    same,
    take_records,
    take_shards,
    write,
    write_open,
)

KILLS = 10 if THOROUGH else 4  # of each of the five ways to write

WAYS = {
    "rolling at every record": {"shard_records": 1},
    "rolling by records": {"shard_records": 3},
    "one shard": {},
    "lz4, rolling by bytes": {"compression": "lz4", "shard_bytes": "60kB"},
    "zstd, safe from power loss": {"compression": "zstd", "shard_records": 4, "durability": "power"},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_writer_killed_at_a_random_moment_loses_at_most_the_record_in_progress(way: str, tmp_path: Path) -> None:
    rng = random.Random(way)
    path, options, seed = tmp_path / "store", WAYS[way], rng.randrange(1000)
    kept = 0  # records 0 .. kept - 1 were acknowledged
    for _ in range(KILLS):
        child = Child(append_forever, path, seed, options)
        opened = child.receive()
        assert opened in (kept, kept + 1)
        kept = opened
        for _ in range(rng.randrange(8)):
            kept = child.receive() or kept
        time.sleep(rng.random() * 0.02)  # only chooses the moment; any moment must pass
        child.kill()
        for reported in child.rest():
            kept = reported
        assert child.join() < 0

        sealed = read_keys(path)  # readers need no recovery
        assert sealed == [(seed, number) for number in range(len(sealed))]
        assert len(sealed) <= kept + 1
        if rng.random() < 0.5:  # else the next child recovers
            with TraceWriter(path) as writer:
                assert len(writer) in (kept, kept + 1)
                kept = len(writer)
                assert not [lost for recovery in writer.recovered for lost in recovery.lost]
            assert read_keys(path)[kept - 9 :] == [(seed, number) for number in range(kept)][kept - 9 :]

    with TraceWriter(path, **options) as writer:
        assert len(writer) in (kept, kept + 1)
        kept = len(writer)
        assert writer.done_ids == {f"{seed}:{number}" for number in range(kept)}
        writer.extend(record(seed, number) for number in range(kept, kept + 3))
    assert [*read_keys(path)] == [(seed, number) for number in range(kept + 3)]
    assert damages(path) == []


def test_a_writer_killed_while_it_opens_loses_nothing(tmp_path: Path) -> None:
    rng = random.Random(5)
    keys = [(5, number) for number in range(12)]
    path, _ = write_open(tmp_path / "store", keys)
    for _ in range(num_examples(8)):
        child = Child(append_forever, path, 6, {})
        time.sleep(rng.random() * 0.06)
        child.kill()
        reported = list(child.rest())
        child.join()
        assert not reported or reported[0] >= len(keys)
        extra = [(6, len(keys) + i) for i in range(max(0, (reported or [0])[-1] - len(keys)))]
        with TraceWriter(path) as writer:
            assert len(writer) - len(keys) - len(extra) in (0, 1)
        found = read_keys(path)
        assert found[: len(keys) + len(extra)] == keys + extra
        keys = found
    assert_holds(path, keys)


# -- between any two steps

OLD = [(1, number) for number in range(3)]
NEW = [(2, number) for number in range(3)]
KEYS = [(1, number) for number in range(6)]


def check_writer(path: Path, old: list[Key], reported: list[int]) -> None:
    """What an interrupted writer left is readable, recovered and can be appended to."""
    acknowledged = len(old) + (reported[-1] if reported else 0)
    try:
        sealed = read_keys(path, plain)
    except NotAStore:
        assert not old and not reported
    else:
        assert sealed == [*old, *NEW][: len(sealed)] and len(sealed) >= len(old)
    with TraceWriter(path) as writer:
        assert len(writer) in (acknowledged, acknowledged + 1)
        kept = [*old, *NEW][: len(writer)]
        writer.append(plain(3, 0))
    assert read_keys(path, plain) == [*kept, (3, 0)]
    assert damages(path) == []


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_death_between_any_two_steps_of_sealing_neither_loses_nor_duplicates_records(
    compression: str, tmp_path: Path
) -> None:
    template = write(tmp_path / "template", OLD, plain, compression=compression)
    for path, reported, how in die_everywhere(template, tmp_path, append_some, NEW, {"shard_records": 2}):
        with noted(how):
            check_writer(path, OLD, reported)


def test_death_between_any_two_steps_of_a_new_store_loses_nothing(tmp_path: Path) -> None:
    for path, reported, how in die_everywhere(None, tmp_path, append_some, NEW[:1], {}):
        with noted(how):
            check_writer(path, [], reported)


def test_death_between_any_two_steps_of_a_recovery_loses_nothing(tmp_path: Path) -> None:
    template, ends = write_open(tmp_path / "template", NEW, plain)
    with open(open_shard(template), "ab") as f:
        f.truncate(ends[2] - 100)
    for path, _, how in die_everywhere(template, tmp_path, open_and_close):
        with noted(how):
            assert len(ms_open(path)) in (0, 2)
            open_and_close(path, print)
            assert_holds(path, NEW[:2], plain)


@pytest.mark.parametrize("where", ["tensor", "frame"])
def test_death_between_any_two_steps_of_a_recovery_with_damage_keeps_the_good_records(
    where: str, tmp_path: Path
) -> None:
    template, ends = write_open(tmp_path / "template", NEW, plain)
    flip(open_shard(template), ends[1] - 300 if where == "tensor" else ends[0] + 40)
    for path, _, how in die_everywhere(template, tmp_path, open_and_close):
        with noted(how):
            assert read_keys(path, plain) in ([], [NEW[0], NEW[2]])
            open_and_close(path, print)
            assert_holds(path, [NEW[0], NEW[2]], plain)
            assert lost_ids(path) == {"2:1" if where == "tensor" else None}


def damage(path: Path, where: str) -> list[Key]:
    """Damage shard 1 of a store; the keys of the damaged records."""
    shard, offset = place_of(path, 4, "hidden")
    seal = read_shard_seal(shard)
    assert seal is not None
    if where == "tensor":
        flip(shard, offset + 7)
        return [(1, 4)]
    if where == "frame":
        flip(shard, offset - 64)
        return [(1, 4)]
    file, position = {
        "header": (shard, 200),
        "seal": (shard, seal.offset + 10),
        "sidecar": (shard.with_suffix(".parquet"), 700),
    }[where]
    flip(file, position)
    return []


@pytest.mark.parametrize("where", ["tensor", "frame", "header", "seal", "sidecar"])
def test_death_between_any_two_steps_of_a_repair_keeps_the_good_records(where: str, tmp_path: Path) -> None:
    template = write(tmp_path / "template", KEYS, plain, shard_records=3)
    bad = damage(template, where)
    good = [key for key in KEYS if key not in bad]
    for path, _, how in die_everywhere(template, tmp_path, repair_store):
        with noted(how), quiet():
            readable = readable_keys(path)
            assert {*KEYS[:3]} <= {*readable}
            if not damages(path):
                assert readable == good, "verify finds no damage, but not all records are readable"
            repair(path)
            assert read_keys(path, plain) == good
            assert damages(path) == []
            assert {f"{seed}:{number}" for seed, number in bad} <= lost_ids(path)


def readable_keys(path: Path) -> list[Key]:
    """The keys of the readable records; the others raise and never give wrong data."""
    traces = ms_open(path)
    keys: list[Key] = []
    for number in range(len(traces)):
        try:
            found = traces[number]
        except StoreError:
            continue
        keys.append(key_of(found))
        assert same(found, plain(*keys[-1]))
    return keys


def test_a_writer_can_append_after_an_interrupted_repair(tmp_path: Path) -> None:
    template = write(tmp_path / "template", KEYS, plain, shard_records=3)
    damage(template, "tensor")
    for path, _, how in die_everywhere(template, tmp_path, repair_store):
        with noted(how), quiet():
            write(path, [(2, 0)], plain)
            repair(path)
            assert_holds(path, [*KEYS[:4], *KEYS[5:], (2, 0)], plain)


# -- merge and subset


def check_output(path: Path, again: Callable[[Path], object], expected: list[Key]) -> None:
    """An interrupted job left no output or all of it, and can be run again."""
    if not path.exists():
        again(path)
    assert read_keys(path, plain) == expected
    assert damages(path) == []
    assert os.listdir(path.parent) == [path.name]


def test_an_interrupted_merge_leaves_no_store(tmp_path: Path) -> None:
    a = write(tmp_path / "a", OLD, plain, shard_records=2)
    b = write(tmp_path / "b", NEW, plain)
    before = files_of(a), files_of(b)
    for path, _, how in die_everywhere(None, tmp_path, merge_stores, [a, b]):
        with noted(how):
            check_output(path, lambda path: merge([a, b], path), [*OLD, *NEW])
    assert (files_of(a), files_of(b)) == before


def test_an_interrupted_subset_of_shards_leaves_no_store(tmp_path: Path) -> None:
    source = write(tmp_path / "source", [*OLD, *NEW], plain, shard_records=2)
    for path, _, how in die_everywhere(None, tmp_path, take_shards, source, [2, 0]):
        with noted(how):
            check_output(path, lambda path: subset_shards(source, path, [2, 0]), [*NEW[1:], *OLD[:2]])


def test_an_interrupted_subset_of_records_leaves_no_store(tmp_path: Path) -> None:
    source = write(tmp_path / "source", [*OLD, *NEW], plain, shard_records=2)
    for path, _, how in die_everywhere(None, tmp_path, take_records, source, [5, 1, 3]):
        with noted(how):
            take = lambda path: subset_records(ms_open(source), path, [5, 1, 3])  # noqa: E731
            check_output(path, take, [NEW[2], OLD[1], NEW[0]])
