"""Stores merged and subset to S3: through the spool, resumed after any step, never into something else."""

from itertools import count
from pathlib import Path

import pytest

import millstream as ms
from millstream.core.remote import spool_folder
from millstream.errors import RemoteError, StoreError, StoreExists
from millstream.traces.store.manifest import LABELS, TOKENIZER, list_shards
from millstream.traces.store.repair import repair, verify
from millstream.traces.store.rewrite import merge, subset_records, subset_shards
from millstream.traces.store.uploads import CLAIMS, MOST_WAITING
from support.commands import run_here
from support.effort import THOROUGH
from support.http_server import Objects
from support.making import Child, noted, plain, read_keys, write
from support.remote_stores import (
    SPOOL,
    environment,
    merge_remotely,
    objects,
    remote,
    remote_keys,
    take_remotely,
    upload,
)
from support.s3_server import Bucket

KEYS = [(1, number) for number in range(7)]


@pytest.fixture(autouse=True)
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A spool and a cache of its own for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(SPOOL, str(tmp_path / "spool"))
    return tmp_path / "spool"


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Seven records in two stores, in shards of two."""
    folder = tmp_path_factory.mktemp("stores")
    return [
        write(folder / "a", KEYS[:4], plain, shard_records=2),
        write(folder / "b", KEYS[4:], plain, shard_records=2),
    ]


@pytest.fixture
def url(s3: Bucket) -> str:
    return f"{s3.url}/made"


def test_merge_and_subset_write_to_a_url_what_they_write_to_a_folder(
    stores: list[Path], url: str, tmp_path: Path
) -> None:
    merge(stores, remote(f"{url}/merged"))
    assert remote_keys(f"{url}/merged") == KEYS
    assert list(verify(remote(f"{url}/merged"))) == []
    merged = remote(f"{url}/merged")
    subset_shards(merged, remote(f"{url}/shards"), [3, 0])
    assert remote_keys(f"{url}/shards") == [KEYS[6], *KEYS[:2]]
    subset_records(ms.Traces(merged), remote(f"{url}/records"), [5, 0, 6], shard_records=2)
    assert remote_keys(f"{url}/records") == [KEYS[5], KEYS[0], KEYS[6]]
    merge([remote(f"{url}/shards"), remote(f"{url}/records")], tmp_path / "local", mixed=True)
    assert read_keys(tmp_path / "local", plain) == [KEYS[6], *KEYS[:2], KEYS[5], KEYS[0], KEYS[6]]
    for name in ("merged", "shards", "records"):
        assert ms.open(f"{url}/{name}").config == ms.open(stores[0]).config
        assert not any(list_shards(spool_folder(remote(f"{url}/{name}"))))
    assert [name for name in objects(url) if CLAIMS in name] == []


def test_labels_and_tokenizer_are_taken_along_and_the_command_can_be_repeated(url: str, tmp_path: Path) -> None:
    source = tmp_path / "labelled"
    with ms.TraceWriter(source) as writer:
        writer.extend({"question_id": f"q{n}", "generated_answer": "a", "answer": "ab"[n % 2]} for n in range(4))
    (source / TOKENIZER).write_text("{}")
    code, _, said = run_here("label", str(source))
    assert code == 0, said
    command = ["subset", str(source), url, "--where", "verdict = 'right'"]
    code, _, said = run_here(*command)
    assert code == 0 and "labels copied: 2 right" in said
    assert {LABELS, TOKENIZER} < set(objects(url)) and len(ms.open(url)) == 2
    assert "already written by the same command" in run_here(*command)[2]
    refused = run_here("merge", str(source), url)
    assert refused[0] == 1 and "already exists" in refused[2] and len(ms.open(url)) == 2


@pytest.mark.parametrize("kind", ["merge", "subset"])
def test_a_command_killed_between_any_two_steps_resumes(
    kind: str, stores: list[Path], s3: Bucket, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [3, 0, 2, 1]
    for step in count(1, 1 if THOROUGH else 9):
        url = f"{s3.url}/{kind}-{step}"
        place = environment(spool / str(step))
        if kind == "merge":
            child = Child(merge_remotely, place, stores, url, step)
        else:
            child = Child(take_remotely, place, stores[0], numbers, url, step)
        is_finished = child.join() == 0
        monkeypatch.setenv(SPOOL, place[SPOOL])
        with noted(f"killed before step {step}"):
            before = set(objects(url))
            if kind == "merge":
                merge(stores, remote(url))
            else:
                subset_records(ms.Traces(stores[0]), remote(url), numbers, shard_records=2)
            assert remote_keys(url) == (KEYS if kind == "merge" else [KEYS[number] for number in numbers])
            assert {name for name in before if name.startswith("shard-")} <= set(objects(url))
            assert [name for name in objects(url) if name.startswith(CLAIMS)] == []
            assert not any(list_shards(spool_folder(remote(url))))
        if is_finished:
            assert step > 20
            return


def test_the_spool_holds_few_shards_however_many_are_merged(stores: list[Path], url: str) -> None:
    held: list[int] = []

    def watch(done: int, note: str = "") -> None:
        held.append(len(list_shards(spool_folder(remote(url)))[0]))

    merge([stores[0]] * 3, remote(url), mixed=True, progress=watch)
    assert len(held) == 6 and max(held) <= MOST_WAITING


def test_a_url_that_another_machine_is_writing_to_is_refused(
    stores: list[Path], url: str, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Child(merge_remotely, environment(spool / "other"), stores, url, 12)
    assert child.join() != 0
    with pytest.raises(StoreExists, match="already exists"):
        merge(stores, remote(url))
    with pytest.raises(StoreExists, match="already exists"):
        subset_shards(stores[0], remote(url), [0])
    monkeypatch.setenv(SPOOL, str(spool / "other"))
    merge(stores, remote(url))
    assert remote_keys(url) == KEYS


def test_records_of_a_killed_writer_in_the_spool_are_never_discarded(stores: list[Path], url: str) -> None:
    left = write(spool_folder(remote(url)), KEYS[:1], plain)
    with pytest.raises(StoreExists, match=str(left)):
        merge(stores, remote(url))
    assert read_keys(left, plain) == KEYS[:1]


def test_what_cannot_be_written_or_repaired_at_a_url_is_one_line(
    stores: list[Path], url: str, web: Objects, tmp_path: Path
) -> None:
    with pytest.raises(RemoteError, match="read only"):
        merge(stores, remote(f"{web.address}/out"))
    upload(stores[0], url)
    with pytest.raises(StoreError, match="millstream copy"):
        repair(remote(url))
