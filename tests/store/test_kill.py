"""SIGKILL at random moments and between any two steps: nothing acknowledged is lost, nothing comes twice."""

import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from making import (
    Child,
    Key,
    append_forever,
    append_some,
    assert_holds,
    damages,
    dying,
    files_of,
    flip,
    keys_in,
    lost_ids,
    open_shard,
    place_of,
    quiet,
    read_keys,
    record,
    same,
    write,
    write_open,
)

from millstream.door import open as ms_open
from millstream.errors import CorruptRecord, NotAStore, StoreError
from millstream.store.layout import read_shard_seal, shard_name, sidecar_name
from millstream.store.repair import repair
from millstream.store.rewrite import merge, subset_records, subset_shards
from millstream.store.writer import TraceWriter

KILLS = 10  # of each of the five ways to write: fifty

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
        opened = child.hear()
        assert opened in (kept, kept + 1)
        kept = opened
        for _ in range(rng.randrange(8)):
            kept = child.hear() or kept
        time.sleep(rng.random() * 0.02)  # only picks the moment; what must hold holds at any
        child.kill()
        for told in child.rest():
            kept = told
        assert child.join() < 0

        sealed = read_keys(path)  # readers need no recovery
        assert sealed == [(seed, number) for number in range(len(sealed))]
        assert len(sealed) <= kept + 1
        if rng.random() < 0.5:  # else the next child recovers, with nobody looking
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
    for _ in range(8):
        child = Child(append_forever, path, 6, {})
        time.sleep(rng.random() * 0.06)
        child.kill()
        told = list(child.rest())
        child.join()
        assert not told or told[0] >= len(keys)
        extra = [(6, len(keys) + i) for i in range(max(0, (told or [0])[-1] - len(keys)))]
        with TraceWriter(path) as writer:
            assert len(writer) - len(keys) - len(extra) in (0, 1)
        found = read_keys(path)
        assert found[: len(keys) + len(extra)] == keys + extra
        keys = found
    assert_holds(path, keys)


# -- between any two steps


def die_everywhere(
    template: Path | None, path: Path, job: Callable[..., None], *args: object, check: Callable[[list[Any]], None]
) -> None:
    """Run the job on a copy of `template`, each time with a death before, after or in the middle of another step.

    `check` gets what the job told and finds what it left at `path`.
    """

    def run(step: int, when: str) -> list[Any]:
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
        if template is not None:
            shutil.copytree(template, path)
        child = Child(dying, step, when, job, *args)
        told = list(child.rest())
        code = child.join()
        assert (code == 0) == (step == 0), (step, when, told, code)
        return told

    *told, calls = run(0, "never")
    check(told)
    for step, name in enumerate(calls, 1):
        for when in ("before", "torn", "after") if name == "pwritev" else ("before", "after"):
            told = run(step, when)
            try:
                check(told)
            except BaseException as error:
                error.add_note(f"killed {when} step {step} of {len(calls)}: {name}")
                raise


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Where the job of `die_everywhere` works, in a folder of its own."""
    return tmp_path / "work" / "store"


OLD = [(1, number) for number in range(3)]
NEW = [(2, number) for number in range(3)]


def check_writer(path: Path, old: list[Key], new: list[Key], told: list[int]) -> None:
    """What an interrupted writer left reads, recovers and goes on."""
    acknowledged = told[-1] if told else 0
    try:
        sealed = read_keys(path)
    except NotAStore:
        assert not old and not acknowledged and not path.exists() or not any(path.glob("[!.]*"))
    else:
        assert sealed == [*old, *new][: len(sealed)] and len(sealed) >= len(old)
    with TraceWriter(path) as writer:
        assert len(writer) - len(old) in (acknowledged, acknowledged + 1)
        kept = [*old, *new][: len(writer)]
    assert_holds(path, kept)
    write(path, [(3, 0)])
    assert_holds(path, [*kept, (3, 0)])


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_death_between_any_two_steps_of_sealing_loses_nothing_and_doubles_nothing(
    compression: str, tmp_path: Path, store: Path
) -> None:
    template = write(tmp_path / "template", OLD, compression=compression)
    die_everywhere(
        template, store, append_some, store, NEW, {"shard_records": 2}, check=lambda told: check_writer(store, OLD, NEW, told)
    )


def test_death_between_any_two_steps_of_a_new_store_loses_nothing(store: Path) -> None:
    die_everywhere(None, store, append_some, store, NEW[:1], {}, check=lambda told: check_writer(store, [], NEW, told))
