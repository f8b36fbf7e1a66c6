"""Two commands on one store at the same time: nothing is lost or doubled, and a refusal is one line."""

import itertools
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import millstream as ms
from millstream.errors import MillstreamError, StoreError, StoreExists
from millstream.traces.store.locks import StoreLock, only_job
from millstream.traces.store.manifest import DAMAGED, open_file, shard_name, sidecar_name
from millstream.traces.store.repair import repair
from millstream.traces.store.rewrite import subset_shards
from millstream.traces.store.traces import Traces
from support.effort import THOROUGH
from support.making import PROCESSES, damages, flip, lost_ids, place_of
from support.store_commands import (
    COMMANDS,
    COUNT,
    DAMAGED_RECORD,
    convert_all,
    featurize_all,
    merge_two,
    record,
    run,
    run_named,
)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, mp_context=PROCESSES) as executor:
        yield executor


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 22 records in sealed shards, one of them damaged, and 2 in an interrupted one. Read-only."""
    path = tmp_path_factory.mktemp("damaged") / "store"
    with ms.TraceWriter(path, shard_records=5) as writer:
        writer.extend(record(number) for number in range(20))
    file, place = place_of(path, DAMAGED_RECORD, "hidden")
    source = path.with_name("whole")
    with ms.TraceWriter(source) as writer:
        writer.extend(record(number) for number in range(20, COUNT))
        shutil.copyfile(open_file(source, 0), open_file(path, 9))
    flip(file, place)
    return path


@pytest.mark.parametrize("pair", list(itertools.combinations_with_replacement(COMMANDS, 2)), ids="-".join)
def test_two_commands_at_the_same_time_lose_and_double_nothing(
    pair: tuple[str, str], damaged: Path, pool: ProcessPoolExecutor, tmp_path: Path
) -> None:
    for number in range(24 if THOROUGH else 1):
        path = tmp_path / f"store{number}"
        shutil.copytree(damaged, path)
        delays = [random.random() * 0.02 for _ in pair]
        jobs = [pool.submit(run_named, name, path, delay) for name, delay in zip(pair, delays, strict=True)]
        refused = [job.result() for job in jobs]
        assert all(text is None or "\n" not in text for text in refused)
        repair(path)
        expected = {f"q{n}" for n in range(COUNT)} - {f"q{DAMAGED_RECORD}"}
        done = [name for name, text in zip(pair, refused, strict=True) if text is None]
        expected |= {f"q{n}" for n in range(COUNT, COUNT + 4)} if "append" in done else set()
        found = [str(name) for name in Traces(path).ids]
        assert set(found) == expected - ({"q19"} if "drop" in done else set())
        assert len(found) == len(set(found)) + (4 if done.count("append") == 2 else 0)
        assert lost_ids(path) == {f"q{DAMAGED_RECORD}"}
        assert damages(path) == []
        shutil.rmtree(path)


@pytest.mark.parametrize("job", [convert_all, featurize_all, merge_two])
def test_the_same_job_twice_at_the_same_time_writes_every_record_once(
    job: Callable[[Path], object], pool: ProcessPoolExecutor, tmp_path: Path
) -> None:
    for name, numbers in (("store", range(12)), ("other", range(12, 20))):
        with ms.TraceWriter(
            tmp_path / name, shard_records=4, schema={"hidden": "float16[layer, token, dim]"}
        ) as writer:
            writer.extend(record(number) for number in numbers)
    for number in range(3):
        traces = [{"question_id": f"t{number}-{k}", "question": "?", "x": np.zeros(3)} for k in range(4)]
        (tmp_path / f"old{number}.pkl").write_bytes(pickle.dumps(traces))
    count = 20 if job is merge_two else 12
    for number in range(40 if THOROUGH else 4):
        out = tmp_path / f"out{number}"
        jobs = [pool.submit(run, job, out, random.random() * 0.02) for _ in range(2)]
        refused = [text for text in (job.result() for job in jobs) if text is not None]
        assert len(refused) <= (1 if job is merge_two else 0)
        ids = Traces(out).ids
        assert len(ids) == len(set(ids)) == count
        assert damages(out) == []
        assert [file.name for file in tmp_path.glob(".*")] == []
        shutil.rmtree(out)


def test_a_repair_is_refused_while_a_writer_is_between_two_shards(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.append(record(0))
        writer.seal()
        with pytest.raises(StoreError, match="store: a writer or another command"):
            repair(tmp_path / "store")
    repair(tmp_path / "store")


def test_a_writer_that_fails_to_open_leaves_the_store_unlocked(tmp_path: Path) -> None:
    ms.TraceWriter(tmp_path / "store", config={"a": 1}).close()
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.append(record(0))
    with pytest.raises(MillstreamError, match="store"):
        ms.TraceWriter(tmp_path / "store", config={"a": 2})
    repair(tmp_path / "store")


def test_locks_wait_for_each_other_as_long_as_they_are_told(tmp_path: Path) -> None:
    shared = [StoreLock(tmp_path, exclusive=False, wait_s=0) for _ in range(2)]
    with pytest.raises(StoreError):
        StoreLock(tmp_path, exclusive=True, wait_s=0)
    for each in shared:
        each.release()
    with StoreLock(tmp_path, exclusive=True), pytest.raises(StoreError):
        StoreLock(tmp_path, exclusive=False, wait_s=0.05)
    with only_job(tmp_path / "new"), pytest.raises(StoreError), only_job(tmp_path / "new", wait_s=0):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_job_on_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreExists), only_job(tmp_path / "file"):
        pass


def test_a_closed_writer_unlocks_the_store_even_if_a_forked_child_has_its_descriptor(tmp_path: Path) -> None:
    held = StoreLock(tmp_path, exclusive=False)
    copy = os.dup(held._fd)  # as a fork has it  # pyright: ignore[reportPrivateUsage]
    held.release()
    StoreLock(tmp_path, exclusive=True, wait_s=0).release()
    os.close(copy)


def test_a_copied_shard_is_not_counted_is_reported_and_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with ms.TraceWriter(path, shard_records=4) as writer:
        writer.extend(record(number) for number in range(8))
    for name in (shard_name, sidecar_name):
        shutil.copyfile(path / name(1), path / name(5))
    assert len(Traces(path)) == 8
    assert [damage.file for damage in damages(path)] == [shard_name(5)]
    assert repair(path).set_aside == [shard_name(5), sidecar_name(5)]
    assert (path / DAMAGED / shard_name(5)).exists()
    assert damages(path) == []
    assert Traces(path).ids == [f"q{number}" for number in range(8)]


def test_a_shard_listed_twice_is_copied_once(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store", shard_records=4) as writer:
        writer.extend(record(number) for number in range(8))
    assert subset_shards(tmp_path / "store", tmp_path / "out", [1, 1]).records == 4


def test_files_set_aside_never_replace_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "store"
    folder = path / DAMAGED
    with ms.TraceWriter(path) as writer:
        writer.extend(record(number) for number in range(8))
    contents: list[bytes] = []
    for name in (f"{shard_name(0)}.2", "x", "y"):  # the first name that is free, whatever else is there
        file, place = place_of(path, 0, "hidden")
        flip(file, place)
        contents.append(file.read_bytes())
        repair(path)
        contents.append(name.encode())
        (folder / name).write_bytes(name.encode())
    assert sorted(file.read_bytes() for file in folder.iterdir() if file.suffix != ".jsonl") == sorted(contents)
