"""Remote paths: URLs as paths, exact ranges, bounded retries, and every failure told in one line."""

import os
import pickle
import random
import threading
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest

from millstream.core import bucket
from millstream.core.bucket import MULTIPART_BYTES, upload_part_bytes
from millstream.core.remote import (
    RemoteFile,
    RemotePath,
    is_url,
    read_all,
    read_object,
    requests_at_once,
    to_path,
)
from millstream.errors import AccessDenied, BadSetting, MillstreamError, ObjectChanged, ObjectMissing, RemoteError
from support.faulty_proxy import (
    DELETED,
    DENIED,
    EXPIRED_TOKEN,
    INVALID_KEY,
    Fault,
    FaultyProxy,
    faulty_proxy,
    refusing_address,
    unavailable,
)
from support.http_server import Objects
from support.s3_server import Bucket

DATA = random.Random(1).randbytes(100_000)


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MILLSTREAM_PATIENCE", "20")


@pytest.fixture
def web(web: Objects) -> Objects:
    web["a/b.bin"] = DATA
    return web


@pytest.fixture
def file(proxy: FaultyProxy) -> RemoteFile:
    return RemoteFile(remote(f"{proxy.address}/a/b.bin"))


def remote(url: str) -> RemotePath:
    path = to_path(url)
    assert isinstance(path, RemotePath)
    return path


# -- paths


def test_a_url_is_a_path() -> None:
    path = remote("s3://bucket/traces/") / "shard-00000.arrow"
    assert str(path) == "s3://bucket/traces/shard-00000.arrow" and path.name == "shard-00000.arrow"
    assert str(path.parent) == str(path.parent.absolute().resolve()) == "s3://bucket/traces"
    assert path.with_name("x").key == "traces/x" and path.bucket_url == "s3://bucket"
    assert pickle.loads(pickle.dumps(path)) == path
    assert to_path(Path("s3://bucket/traces")) == path.parent, "as typer gives it"
    assert is_url("hf://datasets/me/it") and not is_url("data/s3/x") and to_path("x") == Path("x")


def test_what_needs_a_local_file_says_so() -> None:
    for use in (os.listdir, open, os.fspath):
        with pytest.raises(RemoteError, match="only a local path works here"):
            use(remote("s3://bucket/x"))


@pytest.mark.parametrize("url", ["https://me:secret@host/x", "https://host/x?X-Amz-Signature=secret"])
def test_a_url_with_a_secret_is_refused_without_printing_it(url: str) -> None:
    with pytest.raises(BadSetting) as caught:
        to_path(url)
    assert "secret" not in str(caught.value)


def test_folders_and_objects_of_a_bucket(s3: Bucket) -> None:
    root = remote(f"{s3.url}/data")
    assert not root.exists()
    for name in ("a.txt", "b c+%20.txt", "sub/ü.txt"):
        (root / name).write_bytes(name.encode())
    assert [str(path) for path in root.iterdir()] == [f"{root}/{name}" for name in ("a.txt", "b c+%20.txt", "sub")]
    assert {name: info.st_size for name, info in root.walk_files().items()} == {
        "a.txt": 5,
        "b c+%20.txt": 11,
        "sub/ü.txt": 10,
    }
    assert root.is_dir() and (root / "a.txt").is_file() and not (root / "a.txt").is_dir() and not (root / "a").exists()
    assert [path.name for path in root.glob("*.txt")] == ["a.txt", "b c+%20.txt"]
    assert (root / "b c+%20.txt").read_text() == "b c+%20.txt"
    (root / "a.txt").unlink()
    assert not (root / "a.txt").exists()


def test_an_object_can_be_claimed_once(s3: Bucket) -> None:
    claim = remote(f"{s3.url}/claim")
    claim.put(b"mine", is_new=True)
    claim.put(b"mine", is_new=True)  # the answer to the first attempt may have been lost
    with pytest.raises(FileExistsError):
        claim.put(b"theirs", is_new=True)
    assert claim.read_bytes() == b"mine"


def test_a_large_upload_has_parts_and_is_verified(s3: Bucket, tmp_path: Path) -> None:
    data = DATA * 170  # 17 MB
    (tmp_path / "large").write_bytes(data)
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        path = remote(f"{s3.url}/large")
        assert path.put(tmp_path / "large").num_bytes == len(data)
        assert proxy.num_requests("PUT") == 3 and proxy.num_requests("GET") == 0
        assert path.read_bytes() == data


@pytest.mark.parametrize("num_bytes", [1, 17 << 20, 80 << 30, 84 << 30, 870 * 10**9, 5 << 40])
def test_no_upload_has_more_parts_than_a_server_takes(num_bytes: int) -> None:
    part = upload_part_bytes(num_bytes)
    assert -(-num_bytes // part) <= 10_000 and (part == MULTIPART_BYTES or part < num_bytes // 5_000)


def test_an_upload_in_larger_parts_is_verified_by_their_checksum(
    s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "upload_part_bytes", lambda num_bytes: 16 << 20)
    (tmp_path / "large").write_bytes(DATA * 170)
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        remote(f"{s3.url}/large").put(tmp_path / "large")
        assert proxy.num_requests("PUT") == 2 and proxy.num_requests("GET") == 0


# -- ranges


@pytest.mark.parametrize("cache", ["1GB", "0"])
def test_many_ranges_of_an_object(file: RemoteFile, monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    monkeypatch.setenv("MILLSTREAM_CACHE", cache)
    rng = random.Random(2)
    for _ in range(5):
        spans = [(start, min(start + rng.randrange(1, 9000), len(DATA))) for start in rng.choices(range(99_000), k=20)]
        outs = [bytearray(end - start) for start, end in spans]
        read_all([(file, start, memoryview(out)) for (start, _), out in zip(spans, outs, strict=True)])
        assert outs == [DATA[start:end] for start, end in spans]
    assert file.read(99_990, 100) == DATA[99_990:] and file.read(100_000, 5) == b""


def test_a_range_that_is_wanted_several_times_is_one_request(proxy: FaultyProxy, file: RemoteFile) -> None:
    spans = [(5000, 9000), (5000, 9000), (6000, 7000), (0, 100), (8000, 20_000)]
    outs = [bytearray(end - start) for start, end in spans]
    read_all([(file, start, memoryview(out)) for (start, _), out in zip(spans, outs, strict=True)])
    assert outs == [DATA[start:end] for start, end in spans]
    assert sorted(seen.range for seen in proxy.requests("GET")) == [
        "bytes=0-99",
        "bytes=5000-19999",
    ]  # at the same time


def test_no_more_requests_are_on_their_way_than_a_loader_has_memory_for(
    file: RemoteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, lock, third = RemoteFile.fill, threading.Lock(), threading.Event()
    now = most = 0

    def counted(self: RemoteFile, start: int, out: memoryview) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
            if now > 2:
                third.set()
        third.wait(0.02)  # long enough for others to come
        fill(self, start, out)
        with lock:
            now -= 1

    monkeypatch.setattr(RemoteFile, "fill", counted)
    outs = [bytearray(10) for _ in range(12)]
    with requests_at_once(2):
        read_all([(file, 8000 * place, memoryview(out)) for place, out in enumerate(outs)])
    assert most == 2 and outs == [DATA[8000 * place : 8000 * place + 10] for place in range(12)]


def test_neighbours_are_one_request_and_only_what_is_wanted_is_fetched(proxy: FaultyProxy, file: RemoteFile) -> None:
    assert file.num_bytes == len(DATA)
    proxy.forget()
    spans = [(0, 1000), (1000, 2000), (2100, 4000), (50_000, 50_100)]
    read_all([(file, start, memoryview(bytearray(end - start))) for start, end in spans])
    assert proxy.num_requests("GET") == 2
    assert sum(seen.sent_bytes for seen in proxy.requests("GET")) == 4100
    read_all([(file, start, memoryview(bytearray(end - start))) for start, end in spans])
    assert proxy.num_requests("GET") == 2, "the rest came from the cache"
    file.read(500, 49_550)
    assert proxy.requests("GET")[-1].range == "bytes=4000-49999", "only what was missing"


def test_aligned_ranges_are_cached_whole(proxy: FaultyProxy) -> None:
    file = RemoteFile(remote(f"{proxy.address}/a/b.bin"), align=10_000)
    assert file.read(12_345, 10) == DATA[12_345:12_355]
    assert file.read(19_000, 500) == DATA[19_000:19_500]
    assert [seen.range for seen in proxy.requests("GET")] == ["bytes=10000-19999"]


def test_threads_and_forked_children_read(file: RemoteFile) -> None:
    assert file.read(0, 10) == DATA[:10]  # now the client has threads, which a fork does not copy
    if not (pid := os.fork()):
        status = 1
        try:
            status = 0 if file.read(5000, 10) == DATA[5000:5010] else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_server_without_versions_is_read_without_the_cache(
    web: Objects, proxy: FaultyProxy, file: RemoteFile
) -> None:
    web.has_etags = False
    assert file.read(0, 10) == file.read(0, 10) == DATA[:10]
    assert proxy.num_requests("GET") == 2


# -- faults


@pytest.mark.parametrize(
    "fault",
    [
        unavailable(503),
        unavailable(429, retry_after_s=1),
        unavailable(500),
        Fault(cut_at=500),
        Fault(cut_at=-1),
        Fault(drop=10),
        Fault(longer_by=10),
        Fault(delay_s=0.01, chunk_bytes=2000),
    ],
    ids=["503", "429", "500", "cut", "no answer", "short", "wrong length", "slow"],
)
def test_passing_faults_are_not_seen(proxy: FaultyProxy, file: RemoteFile, fault: Fault) -> None:
    proxy.program(fault, method="GET", times=2)
    assert file.read(1000, 20_000) == DATA[1000:21_000]


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        (unavailable(503), RemoteError, "SlowDown"),
        (Fault(cut_at=10), RemoteError, "no complete answer in"),
        (DELETED, ObjectMissing, "no such object"),
        (DENIED, AccessDenied, "AccessDenied"),
        (EXPIRED_TOKEN, AccessDenied, "ExpiredToken"),
        (INVALID_KEY, AccessDenied, "InvalidAccessKeyId"),
    ],
)
def test_lasting_faults_are_one_line(
    proxy: FaultyProxy, file: RemoteFile, monkeypatch: pytest.MonkeyPatch, fault: Fault, error: type, words: str
) -> None:
    monkeypatch.setenv("MILLSTREAM_PATIENCE", "0.3")
    proxy.program(fault, method="GET")
    with pytest.raises(error, match=words) as caught:
        file.read(0, 1000)
    assert "\n" not in str(caught.value) and str(file.path) in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "method", "match"),
    [
        (unavailable(503), "PUT", "partNumber=2"),
        (unavailable(429), "POST", "uploads"),
        (Fault(cut_at=-1, status=503), "PUT", "partNumber=3"),
        (Fault(cut_at=-1), "PUT", "partNumber=2"),
        (unavailable(503), "POST", "uploadId="),
        (Fault(cut_at=-1), "POST", "uploadId="),
    ],
    ids=["part 503", "start 429", "part cut", "part unanswered", "completion 503", "completion unanswered"],
)
def test_passing_faults_of_an_upload_are_not_seen(
    s3: Bucket, tmp_path: Path, fault: Fault, method: str, match: str
) -> None:
    (tmp_path / "large").write_bytes(DATA * 170)
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        rule = proxy.program(fault, method=method, match=match, times=2)
        path = remote(f"{s3.url}/large")
        assert path.put(tmp_path / "large").num_bytes == len(DATA) * 170
        assert rule.hits >= 2
        assert path.read_bytes() == DATA * 170


def test_an_upload_that_arrives_damaged_is_an_error(s3: Bucket, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(DATA * 170)
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        for name, data, match in (("large", tmp_path / "large", "partNumber=2"), ("small", b"data", "small")):
            proxy.program(Fault(flip_sent_at=2), method="PUT", match=match, times=1)
            with pytest.raises(RemoteError, match=f"{name}: differs from what was uploaded"):
                remote(f"{s3.url}/{name}").put(data)


def test_one_of_many_claims_wins(s3: Bucket) -> None:
    """Also when all answers to the first requests are lost."""
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        proxy.program(Fault(cut_at=-1), method="PUT", match="claim", times=4)
        won = list[bytes]()

        def claim(number: int) -> None:
            with suppress(FileExistsError):
                remote(f"{s3.url}/claim").put(b"%d" % number, is_new=True)
                won.append(b"%d" % number)

        threads = [Thread(target=claim, args=[number]) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won == [remote(f"{s3.url}/claim").read_bytes()]


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        (unavailable(503), RemoteError, "SlowDown"),
        (Fault(cut_at=-1, status=503), RemoteError, "no complete answer in"),
        (EXPIRED_TOKEN, AccessDenied, "ExpiredToken"),
        (DENIED, AccessDenied, "AccessDenied"),
    ],
    ids=["503", "cut", "expired", "denied"],
)
def test_lasting_faults_of_an_upload_are_one_line(
    s3: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: Fault, error: type, words: str
) -> None:
    monkeypatch.setenv("MILLSTREAM_PATIENCE", "0.3")
    (tmp_path / "large").write_bytes(DATA * 170)
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        proxy.program(fault, match="large")
        with pytest.raises(error, match=words) as caught:
            remote(f"{s3.url}/large").put(tmp_path / "large")
        assert "\n" not in str(caught.value) and f"{s3.url}/large" in str(caught.value)
        proxy.heal()
        assert not remote(f"{s3.url}/large").exists()


def test_no_network_is_one_line_after_bounded_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_PATIENCE", "0.3")
    with refusing_address() as closed:
        addresses = [closed, "http://no-such-host.invalid"]
    for address in addresses:
        with pytest.raises(RemoteError, match=r"no complete answer in 0\.3 s") as caught:
            remote(f"{address}/x").read_bytes()
        assert "\n" not in str(caught.value)


def test_an_object_that_is_replaced_while_it_is_read_is_an_error(web: Objects, file: RemoteFile) -> None:
    file.read(0, 1000)
    web["a/b.bin"] = DATA[::-1]
    with pytest.raises(ObjectChanged, match="was replaced"):
        file.read(5000, 1000)
    assert RemoteFile(file.path).read(5000, 10) == DATA[::-1][5000:5010], "opened again"


def test_without_etags_the_time_tells_that_an_object_was_replaced(web: Objects, file: RemoteFile) -> None:
    web.has_etags = False
    file.read(0, 10)
    web.modified = "Wed, 18 Nov 2026 12:00:01 GMT"
    with pytest.raises(ObjectChanged, match=file.path.name):
        file.read(50_000, 10)


def test_an_object_that_was_replaced_since_it_was_listed_is_read_as_it_is_now(s3: Bucket) -> None:
    folder = remote(f"{s3.url}/folder")
    (folder / "x").write_bytes(b"old")
    assert folder.entries()["x"].num_bytes == 3
    file = RemoteFile(folder / "x")
    assert file.num_bytes == 3
    (folder / "x").write_bytes(b"newer")
    assert file.read(0, 3) == b"new"


def test_a_damaged_answer_is_fetched_again_and_not_kept(proxy: FaultyProxy, file: RemoteFile) -> None:
    proxy.program(Fault(flip_at=77), method="GET", times=1)
    assert read_object(file.path, is_intact=lambda data: data == DATA) == DATA
    assert read_object(file.path) == DATA, "the cache has the second answer"


def test_secrets_are_in_no_error_and_no_log(
    s3: Bucket, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MILLSTREAM_PATIENCE", "0.2")
    told: list[str] = []
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        for fault in (DENIED, EXPIRED_TOKEN, unavailable(503), Fault(cut_at=-1)):
            proxy.heal()
            proxy.program(fault)
            path = remote(f"{s3.url}/x")
            for act in (path.info, path.read_bytes, lambda path=path: list(path.iterdir()), lambda p=path: p.put(b"")):
                with pytest.raises(MillstreamError) as caught:
                    act()
                told.append(repr(caught.value) + repr(path.bucket))
    text = "".join((*told, *capfd.readouterr()))
    assert "access-key-of-the-tests" not in text and "secret-key-of-the-tests" not in text


@pytest.mark.parametrize(
    ("url", "variable", "value"),
    [
        ("s3://bucket/x", "AWS_ENDPOINT_URL", "no url, a s3cret"),
        ("az://bucket/x", "AZURE_STORAGE_ACCOUNT_KEY", "not base64, a s3cret"),
        ("gs://bucket/x", "GOOGLE_SERVICE_ACCOUNT_KEY", '{"private_key": "s3cret"}'),
    ],
)
def test_settings_of_a_server_that_are_not_valid_are_one_line_without_them(
    monkeypatch: pytest.MonkeyPatch, url: str, variable: str, value: str
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")
    monkeypatch.setenv(variable, value)
    with pytest.raises(BadSetting) as caught:
        bucket.ObjectBucket(url.removesuffix("/x"))
    assert "\n" not in str(caught.value) and "s3cret" not in str(caught.value)


def test_the_profile_of_the_aws_command_line_is_used(
    s3: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(f"[profile mine]\nregion = eu-west-1\nendpoint_url = {s3.address}\n")
    (tmp_path / "keys").write_text("[mine]\naws_access_key_id = a\naws_secret_access_key = b\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    path = remote(f"{s3.url}/x")
    path.write_bytes(b"hello")
    assert path.read_bytes() == b"hello"


def test_without_credentials_the_error_says_so(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(AccessDenied, match="no credentials found"):
        remote(f"{s3.url}/x").read_bytes()
