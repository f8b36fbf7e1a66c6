"""Azure and Google: what is written there is read there, with their conditions, multipart uploads and copies."""

from pathlib import Path

import numpy as np
import pytest

import millstream as ms
from millstream.core.bucket import MULTIPART_BYTES
from millstream.core.copy import copy
from millstream.core.remote import RemoteFile, read_all, to_path
from millstream.errors import AccessDenied, ObjectChanged, ObjectMissing
from support.cloud_servers import Cloud
from support.copied_kinds import KINDS, check_copies, kinds
from support.extracting import SETTINGS, traces_by_id, write_questions
from support.extras import need
from support.making import keys_in, plain, same
from support.remote_stores import remote, remote_keys

__all__ = ["kinds"]
KEYS = [(0, number) for number in range(12)]


def test_objects_are_put_read_listed_and_removed(cloud: Cloud) -> None:
    path = remote(f"{cloud.url}/a/b c.txt")
    path.put(b"hello")
    remote(f"{cloud.url}/a/d/e").put(b"")
    assert (path.read_bytes(), path.info().num_bytes) == (b"hello", 5)
    assert [str(found) for found in remote(f"{cloud.url}/a").iterdir()] == [str(path), f"{cloud.url}/a/d"]
    file = RemoteFile(path)
    out = [bytearray(2), bytearray(1)]
    read_all([(file, 0, memoryview(out[0])), (file, 4, memoryview(out[1]))])
    assert out == [b"he", b"o"]
    path.unlink()
    assert not path.exists()
    for missing in (path, remote(f"{cloud.scheme}://no-such-bucket/a")):
        with pytest.raises(ObjectMissing, match="no such"):
            missing.info()


def test_a_large_object_arrives_whole_and_is_created_once(cloud: Cloud, tmp_path: Path) -> None:
    path, file = remote(f"{cloud.url}/large"), tmp_path / "large"
    file.write_bytes(np.random.default_rng(0).bytes(MULTIPART_BYTES + 1000))
    path.put(file, is_new=True)
    assert path.read_bytes() == file.read_bytes()
    path.put(file, is_new=True)  # as after an answer that was lost
    with pytest.raises(FileExistsError):
        path.put(b"other", is_new=True)


def test_a_replaced_object_is_noticed(cloud: Cloud) -> None:
    path = remote(f"{cloud.url}/a")
    path.put(b"first")
    file = RemoteFile(path)
    assert file.read(0, 2) == b"fi"
    path.put(b"other")
    with pytest.raises(ObjectChanged):
        file.read(3, 2)


def test_several_writers_fill_one_store(cloud: Cloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url = f"{cloud.url}/traces"
    for number in range(2):
        monkeypatch.setenv("MILLSTREAM_SPOOL_DIR", str(tmp_path / f"spool-{number}"))
        with ms.TraceWriter(url, shard_records=3) as writer:
            for key in KEYS[number::2]:
                writer.append(plain(*key))
    assert sorted(remote_keys(url)) == sorted(KEYS)
    loader = ms.Loader(ms.open(url), batch_size=5, seed=1, features=ms.features.fields("answer"))
    assert sorted(number for batch in loader for number in batch["numbers"].tolist()) == list(range(12))


def test_stores_are_copied_there_within_and_back(cloud: Cloud, tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "traces", shard_records=5) as writer:
        for key in KEYS:
            writer.append(plain(*key))
    for source, target in (
        ("traces", f"{cloud.url}/one"),
        (f"{cloud.url}/one", f"{cloud.url}/two"),
        (f"{cloud.url}/two", "back"),
    ):
        places = [place if "://" in place else tmp_path / place for place in (source, target)]
        assert copy(*places).num_new > 0
        assert copy(*places).num_new == 0
    assert sorted(keys_in(ms.open(tmp_path / "back"), plain)) == sorted(KEYS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_copied_and_opens_there(kinds: Path, kind: str, cloud: Cloud, tmp_path: Path) -> None:
    check_copies(kinds, kind, cloud.url, tmp_path)


def test_answers_are_extracted_there(
    cloud: Cloud, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("transformers")
    monkeypatch.setenv("MILLSTREAM_SPOOL_DIR", str(tmp_path / "spool"))
    questions = write_questions(tmp_path / "q.jsonl", count=3)
    for place in (str(tmp_path / "here"), f"{cloud.url}/there"):
        ms.extract(questions, place, model=str(llama), **SETTINGS)
    here, there = (traces_by_id(place) for place in (tmp_path / "here", to_path(f"{cloud.url}/there")))
    assert here.keys() == there.keys() and all(same(here[key], there[key]) for key in here)


def test_wrong_credentials_are_one_line_without_secrets(cloud: Cloud) -> None:
    remote(f"{cloud.url}/a").put(b"hello")
    secret = cloud.lose_credentials()
    for use in (lambda: remote(f"{cloud.url}/a").read_bytes(), lambda: remote(f"{cloud.url}/a").put(b"x")):
        with pytest.raises(AccessDenied) as error:
            use()
        assert secret not in str(error.value) and "\n" not in str(error.value)
