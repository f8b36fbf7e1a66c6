"""Stores written to S3: through a spool on disk, by several machines, killed between any two steps."""

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream as ms
from millstream.core.engine import Engine
from millstream.core.remote import spool_folder
from millstream.errors import ConfigMismatch, CorruptShard, RemoteError
from millstream.traces.store.jobs import JobWriter, done_records, prepare_store
from millstream.traces.store.manifest import MANIFEST, list_shards
from millstream.traces.store.repair import repair
from millstream.traces.store.uploads import CLAIMS, Uploads
from support.effort import THOROUGH
from support.faulty_proxy import DELETED, Fault, faulty_proxy, unavailable
from support.making import Child, flip, noted, plain, run_child, same
from support.remote_stores import SPOOL, append_remotely, environment, objects, remote, remote_keys, work_and_die
from support.s3_server import Bucket

KEYS = [(1, number) for number in range(5)]


@pytest.fixture(autouse=True)
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A spool and a cache of its own for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(SPOOL, str(tmp_path / "spool"))
    return tmp_path / "spool"


@pytest.fixture
def url(s3: Bucket) -> str:
    return f"{s3.url}/traces"


def sealed_in_spool(url: str) -> list[int]:
    return list_shards(spool_folder(remote(url)))[0]


def test_what_is_written_is_read_back_and_nothing_stays_in_the_spool(url: str) -> None:
    with ms.TraceWriter(url, shard_records=2, config={"model": "m"}) as writer:
        writer.extend(plain(*key) for key in KEYS)
        assert writer.done_ids == {f"1:{number}" for number in range(5)}
    assert remote_keys(url) == KEYS
    shards = [f"shard-{number:05d}.{end}" for number in range(3) for end in ("arrow", "parquet")]
    assert objects(url) == sorted([MANIFEST, *shards])
    assert sealed_in_spool(url) == []

    with ms.TraceWriter(url, config={"model": "m"}) as writer:
        assert len(writer) == 5 and writer.done_ids == {f"1:{number}" for number in range(5)}
        writer.append(plain(1, 5))
        writer.seal()
        assert remote_keys(url) == [*KEYS, (1, 5)]  # as soon as `seal` returns
    with pytest.raises(ConfigMismatch, match="model"):
        ms.TraceWriter(url, config={"model": "another"})


def test_a_shard_that_the_manifest_does_not_list_is_read_without_fetching_it(s3: Bucket, url: str) -> None:
    big = {"question_id": "1:0", "hidden": np.arange(3 << 20, dtype=np.int32)}
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        with ms.TraceWriter(url) as writer:
            writer.append(big)
        assert proxy.num_requests("POST", "shard-00000.arrow") == 2  # a multipart upload
        (remote(url) / MANIFEST).unlink()
        proxy.forget()
        traces = ms.open(url)
        assert len(traces) == 1 and 0 < proxy.num_bytes("GET") < 1 << 20
        assert same(traces[0], big)


def test_a_writer_killed_between_any_two_steps_loses_and_doubles_nothing(
    s3: Bucket, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in count(1, 1 if THOROUGH else 4):
        url = f"{s3.url}/killed-{step}"
        child = Child(append_remotely, environment(spool / str(step)), url, KEYS[:3], {"shard_records": 2}, step)
        acknowledged = max([0, *child.rest()])
        is_finished = child.join() == 0
        monkeypatch.setenv(SPOOL, str(spool / str(step)))
        with noted(f"killed before step {step}"):
            with ms.TraceWriter(url) as writer:
                assert len(writer) in (acknowledged, acknowledged + 1)
                kept = KEYS[: len(writer)]
                writer.append(plain(2, 0))
            assert remote_keys(url) == [*kept, (2, 0)]
            assert [name for name in objects(url) if name.startswith(CLAIMS)] == []
            assert sealed_in_spool(url) == []
        if is_finished:
            assert step > 20
            return


def test_writers_on_two_machines_write_one_store_at_once(url: str, spool: Path) -> None:
    keys = [[(seed, number) for number in range(6)] for seed in (1, 2)]
    children = [
        Child(append_remotely, environment(spool / str(place)), url, own, {"shard_records": 1}, 0)
        for place, own in enumerate(keys)
    ]
    for child in children:
        assert list(child.rest())[-1] >= 6
        assert child.join() == 0
    found = remote_keys(url)
    assert sorted(found) == sorted(keys[0] + keys[1])
    assert [[key for key in found if key[0] == seed] for seed in (1, 2)] == keys  # each in its order


def test_what_a_dead_machine_has_not_uploaded_is_written_when_it_is_back(url: str, spool: Path) -> None:
    run_child(append_remotely, environment(spool / "alive"), url, KEYS[:1], {}, 0)
    child = Child(append_remotely, environment(spool / "dead"), url, KEYS[1:4], {}, -1)
    assert max(child.rest()) == 4
    child.join()
    assert remote_keys(url) == KEYS[:1]
    run_child(append_remotely, environment(spool / "alive"), url, KEYS[4:], {}, 0)
    run_child(append_remotely, environment(spool / "dead"), url, [], {}, 0)
    assert sorted(remote_keys(url)) == KEYS


def test_the_answer_to_a_claim_may_be_lost(s3: Bucket, url: str) -> None:
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        lost = proxy.program(Fault(cut_at=-1), method="PUT", match=f"{CLAIMS}/0", times=1)
        with ms.TraceWriter(url) as writer:
            writer.append(plain(1, 0))
        assert lost.hits > 1
        assert remote_keys(url) == [(1, 0)] and objects(url)[-1] == "shard-00000.parquet"


def test_a_claim_that_is_gone_before_it_can_be_compared_is_of_another_writer(s3: Bucket, url: str) -> None:
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        with ms.TraceWriter(url) as writer:
            (remote(url) / CLAIMS / "00000").put(b"another")
            proxy.program(DELETED, method="HEAD", match=f"{CLAIMS}/00000", times=1)
            assert writer._uploads
            writer._uploads._first_free = lambda: 0  # listed before the other one claimed it
            writer.append(plain(1, 0))
        assert remote_keys(url) == [(1, 0)] and "shard-00001.arrow" in objects(url)


def test_an_upload_is_verified_by_its_bytes_if_the_etag_is_no_checksum_unless_it_has_been_replaced(
    s3: Bucket, url: str
) -> None:
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        file = remote(url) / "file"
        proxy.program(Fault(etag='"no-checksum"', withheld="If-Match"))
        file.put(b"as it was sent")
        flipped = proxy.program(Fault(etag='"no-checksum"', withheld="If-Match", flip_at=3), method="GET")
        proxy._rules.reverse()
        with pytest.raises(RemoteError, match="differs from what was uploaded"):
            file.put(b"as it was sent")
        assert flipped.hits
        proxy.heal()
        proxy.program(Fault(etag='"replaced-since"'), method="PUT")
        proxy.program(Fault(flip_at=3), method="GET")
        file.put(b"as it was sent")


def test_an_outage_is_one_error_and_the_next_writer_uploads_what_was_written(
    s3: Bucket, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLSTREAM_PATIENCE", "0.2")
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        num_appended = 0
        with pytest.raises(RemoteError, match="shard-00000") as caught, ms.TraceWriter(url, shard_records=1) as writer:
            proxy.program(unavailable(), method="PUT", match="shard-")
            for key in KEYS * 2:
                writer.append(plain(*key))
                num_appended += 1
        assert "\n" not in str(caught.value) and 1 <= num_appended <= 4  # it waited, with few shards in the spool
        assert len(ms.open(url)) == 0
        ids = {name for (name,) in done_records(remote(url), ["question_id"])}
        assert ids == {f"1:{number}" for number in range(num_appended)}
        proxy.heal()
        with ms.TraceWriter(url) as writer:
            assert len(writer) == num_appended
        assert remote_keys(url) == KEYS[:num_appended]


def test_a_server_that_ignores_conditions_is_for_one_machine_at_a_time(s3: Bucket, url: str, capsys: Any) -> None:
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        proxy.program(Fault(withheld="If-None-Match"))
        write_remotely(url, KEYS[:2])
        assert capsys.readouterr().err.count("only one machine at a time") == 1
        proxy.heal()
        write_remotely(url, KEYS[2:])
        assert remote_keys(url) == KEYS
        assert capsys.readouterr().err == ""


def write_remotely(url: str, keys: list[tuple[int, int]], **options: Any) -> None:
    with ms.TraceWriter(url, **options) as writer:
        writer.extend(plain(*key) for key in keys)


def test_records_in_the_spool_never_get_into_a_store_with_other_settings(url: str, spool: Path) -> None:
    child = Child(append_remotely, environment(spool), url, KEYS[:2], {"config": {"model": "a"}}, -1)
    assert max(child.rest()) == 2
    child.join()
    with pytest.raises(ConfigMismatch, match="model"):
        ms.TraceWriter(url, config={"model": "b"})
    for name in objects(url):
        (remote(url) / name).unlink()
    child = Child(append_remotely, environment(spool / "other"), url, KEYS[2:3], {"config": {"model": "b"}}, 0)
    assert max(child.rest()) == 1
    child.join()
    run_child(append_remotely, environment(spool), url, [], {"config": {"model": "b"}}, 0)
    assert remote_keys(url) == KEYS[2:3]


def test_a_shard_that_is_damaged_in_the_spool_is_not_uploaded_before_it_is_repaired(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        for name in ("start", "wait"):
            patch.setattr(Uploads, name, lambda *_: None)
        write_remotely(url, KEYS, shard_records=3)
    folder = spool_folder(remote(url))
    flip(folder / "shard-00000.parquet", 300)
    with pytest.raises(CorruptShard, match=f"millstream repair {folder}"):
        ms.TraceWriter(url)
    repair(folder)
    write_remotely(url, [(2, 0)])
    assert remote_keys(url) == [*KEYS, (2, 0)]


def test_what_a_lost_machine_left_and_others_did_again_is_written_once(
    s3: Bucket, spool: Path, monkeypatch: Any
) -> None:
    """The machine may have died at any step of an upload, before others did its records again or after."""
    for step in count(1, 1 if THOROUGH else 7):
        url = f"{s3.url}/lost-{step}"
        lost = environment(spool / f"lost-{step}")
        child = Child(append_remotely, lost, url, KEYS[:4], {"shard_records": 2}, step)
        acknowledged = max([0, *child.rest()])
        is_finished = child.join() == 0
        others = environment(spool / f"others-{step}")
        known = [key for key in KEYS[:3] if key not in remote_keys(url)] if any(objects(url)) else KEYS[:3]
        run_child(append_remotely, others, url, known, {"config": {}}, 0)
        monkeypatch.setenv(SPOOL, lost[SPOOL])
        with noted(f"killed before step {step}"):
            prepare_store(remote(url), {}, engine=Engine())
            found = remote_keys(url)
            assert sorted(found) == KEYS[: max(3, len(found))] and len(found) >= acknowledged
            assert [name for name in objects(url) if name.startswith(CLAIMS)] == []
            assert sealed_in_spool(url) == []
        if is_finished:
            assert step > 20
            return


def test_a_machine_that_joins_a_job_with_an_old_spool_doubles_nothing(
    url: str, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, others = environment(spool / "old"), environment(spool / "others")
    child = Child(append_remotely, old, url, KEYS[:3], {"config": {}}, -1)
    assert max(child.rest()) == 3
    child.join()
    assert remote_keys(url) == []
    monkeypatch.setenv(SPOOL, others[SPOOL])
    prepare_store(remote(url), {}, engine=Engine())  # the old machine is away

    monkeypatch.setenv(SPOOL, old[SPOOL])  # it joins, and its first worker dies
    assert Child(work_and_die, old, url, "this", KEYS[3]).join() != 0
    with JobWriter(remote(url), job="this", config={}) as writer:
        writer.append(plain(*KEYS[4]))
    assert remote_keys(url) == KEYS[3:]
    run_child(append_remotely, others, url, KEYS[:2], {"config": {}}, 0)
    prepare_store(remote(url), {}, engine=Engine())
    assert sorted(remote_keys(url)) == KEYS
    assert sealed_in_spool(url) == [] and [name for name in objects(url) if name.startswith(CLAIMS)] == []
