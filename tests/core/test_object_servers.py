"""The servers of the tests behave as object stores do, and the proxy misbehaves as it is told; seen with obstore."""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError, PreconditionError
from obstore.store import HTTPStore, S3Store

from support.faulty_proxy import (
    DELETED,
    EXPIRED_TOKEN,
    INVALID_KEY,
    Fault,
    FaultyProxy,
    Seen,
    faulty_proxy,
    refusing_address,
    unavailable,
)
from support.http_server import Objects
from support.s3_server import Bucket

DATA = bytes(range(256)) * 400
RETRIES: Any = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=20),
    "backoff": {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=5), "base": 2},
}


def store_at(address: str, *, timeout: str = "60s") -> HTTPStore:
    return HTTPStore(address, client_options={"allow_http": True, "timeout": timeout}, retry_config=RETRIES)


@pytest.fixture
def web(web: Objects) -> Objects:
    web["a/b.bin"] = DATA
    return web


@pytest.fixture
def read(proxy: FaultyProxy) -> Callable[[int, int], bytes]:
    store = store_at(proxy.address)
    return lambda start, stop: bytes(obstore.get_range(store, "a/b.bin", start=start, end=stop))


def test_ranges_etags_and_conditions(web: Objects) -> None:
    store = store_at(web.address)
    meta = obstore.head(store, "a/b.bin")
    assert meta["size"] == len(DATA)
    assert bytes(obstore.get_range(store, "a/b.bin", start=300, end=310)) == DATA[300:310]
    assert bytes(obstore.get(store, "a/b.bin", options={"range": {"suffix": 7}}).bytes()) == DATA[-7:]
    assert bytes(obstore.get(store, "a/b.bin", options={"range": {"offset": len(DATA) - 9}}).bytes()) == DATA[-9:]
    obstore.get(store, "a/b.bin", options={"range": (0, 5), "if_match": meta["e_tag"]})
    with pytest.raises(PreconditionError):
        obstore.get(store, "a/b.bin", options={"range": (0, 5), "if_match": '"another"'})
    with pytest.raises(GenericError, match="416"):
        obstore.get_range(store, "a/b.bin", start=len(DATA), end=len(DATA) + 1)
    with pytest.raises(FileNotFoundError):
        obstore.head(store, "a/c.bin")


def test_a_client_that_dies_in_the_middle_of_a_request_has_asked_nothing(web: Objects) -> None:
    with faulty_proxy(web.address) as proxy:
        host, _, port = proxy.address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"PUT /a HTTP/1.1\r\nContent-Length: 10\r\n\r\nhalf")
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
        assert proxy.num_requests() == 0


def test_requests_and_bytes_are_counted(proxy: FaultyProxy, read: Callable[[int, int], bytes]) -> None:
    read(0, 100)
    read(50, 60)
    assert [(seen.method, seen.path, seen.range, seen.status) for seen in proxy.seen] == [
        ("GET", "/a/b.bin", "bytes=0-99", 206),
        ("GET", "/a/b.bin", "bytes=50-59", 206),
    ]
    assert (proxy.num_requests("GET"), proxy.num_bytes(), proxy.num_requests("PUT")) == (2, 110, 0)
    proxy.forget()
    assert proxy.num_requests() == 0


@pytest.mark.parametrize("status", [429, 500, 503])
def test_the_first_requests_are_refused(proxy: FaultyProxy, read: Callable[[int, int], bytes], status: int) -> None:
    proxy.program(unavailable(status, retry_after_s=0), times=2)
    assert read(0, 100) == DATA[:100]
    assert [seen.status for seen in proxy.seen] == [status, status, 206]
    proxy.program(unavailable(status))
    with pytest.raises(GenericError, match=str(status)):
        read(0, 100)


def test_a_cut_body_is_continued_and_then_given_up(proxy: FaultyProxy, read: Callable[[int, int], bytes]) -> None:
    proxy.program(Fault(cut_at=1000), times=1)
    assert read(0, 5000) == DATA[:5000]
    assert [seen.range for seen in proxy.seen] == ["bytes=0-4999", "bytes=1000-4999"]
    proxy.program(Fault(cut_at=1000))
    with pytest.raises(GenericError):
        read(0, 5000)


def test_a_connection_cut_before_an_answer(proxy: FaultyProxy, read: Callable[[int, int], bytes]) -> None:
    proxy.program(Fault(cut_at=-1), times=1)
    assert read(0, 10) == DATA[:10]
    assert [seen.status for seen in proxy.seen] == [0, 206]


def test_wrong_lengths(proxy: FaultyProxy, read: Callable[[int, int], bytes]) -> None:
    proxy.program(Fault(longer_by=100), times=1)
    with pytest.raises(GenericError):
        read(0, 200)
    for fault in (Fault(longer_by=-50), Fault(drop=50)):  # obstore does not notice: whoever reads compares lengths
        proxy.program(fault, times=1)
        assert read(0, 200) == DATA[:150]


def test_a_flipped_bit_is_at_a_byte_of_the_object(proxy: FaultyProxy, read: Callable[[int, int], bytes]) -> None:
    proxy.program(Fault(flip_at=1234))
    assert read(0, 1000) == DATA[:1000]
    damaged = read(1200, 1300)
    assert [at for at in range(100) if damaged[at] != DATA[1200 + at]] == [34]
    assert damaged[34] ^ DATA[1234] == 1


def test_slow_bytes_arrive_or_time_out(proxy: FaultyProxy, read: Callable[[int, int], bytes]) -> None:
    proxy.program(Fault(chunk_bytes=100, delay_s=0.001))
    assert read(0, 1000) == DATA[:1000]
    proxy.heal()
    proxy.program(Fault(chunk_bytes=100, delay_s=30))
    with pytest.raises(GenericError):
        obstore.get_range(store_at(proxy.address, timeout="50ms"), "a/b.bin", start=0, end=1000)


def test_no_answer_at_all(proxy: FaultyProxy) -> None:
    proxy.program(Fault(hang=True))
    with pytest.raises(GenericError):
        obstore.get_range(store_at(proxy.address, timeout="50ms"), "a/b.bin", start=0, end=1)
    assert proxy.num_requests() == 3


def test_refused_connections() -> None:
    with refusing_address() as address, pytest.raises(GenericError):
        obstore.get_range(store_at(address), "a/b.bin", start=0, end=1)


def test_an_object_changes_or_goes_from_some_request_on(proxy: FaultyProxy) -> None:
    store = store_at(proxy.address)
    proxy.program(Fault(etag='"new"'), skip=2, times=2)
    proxy.program(DELETED, skip=4)
    first = obstore.get(store, "a/b.bin", options={"range": (0, 1)}).meta["e_tag"]
    obstore.get(store, "a/b.bin", options={"range": (0, 1), "if_match": first})
    assert obstore.get(store, "a/b.bin", options={"range": (0, 1)}).meta["e_tag"] == '"new"'
    with pytest.raises(PreconditionError):
        obstore.get(store, "a/b.bin", options={"range": (0, 1), "if_match": first})
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "a/b.bin", options={"range": (0, 1)})


def test_credentials_that_are_no_good(proxy: FaultyProxy, read: Callable[[int, int], bytes]) -> None:
    rule = proxy.program(INVALID_KEY, times=1)
    with pytest.raises(PermissionDeniedError, match="InvalidAccessKeyId"):
        read(0, 1)
    proxy.program(EXPIRED_TOKEN)
    with pytest.raises(GenericError, match="ExpiredToken"):
        read(0, 1)
    assert rule.hits == 2


def test_a_function_decides_and_may_act(proxy: FaultyProxy, read: Callable[[int, int], bytes], web: Objects) -> None:
    def replace(seen: Seen) -> Fault | None:
        if seen.range == "bytes=10-19":
            web["a/b.bin"] = DATA[::-1]
        return None

    proxy.program(replace)
    assert read(0, 10) == DATA[:10]
    assert read(10, 20) == DATA[::-1][10:20]


def test_closing_ends_open_connections_at_once(web: Objects) -> None:
    def ask_for_ever() -> None:
        with suppress(GenericError):
            obstore.head(store_at(proxy.address), "hang")

    before = threading.active_count()
    with faulty_proxy(web.address) as proxy:
        proxy.program(Fault(hang=True), match="hang")
        waiting = threading.Thread(target=ask_for_ever)
        waiting.start()
        obstore.head(store_at(proxy.address), "a/b.bin")  # its connection stays open
        while proxy.num_requests(match="hang") == 0:
            time.sleep(0.001)
    waiting.join()
    assert threading.active_count() <= before


def s3_store(s3: Bucket) -> S3Store:
    return S3Store.from_url(s3.url, client_options={"allow_http": True}, retry_config=RETRIES)


def test_s3_conditional_puts(s3: Bucket) -> None:
    store = s3_store(s3)
    first = obstore.put(store, "claims/0", b"mine", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "claims/0", b"theirs", mode="create")
    obstore.put(store, "claims/0", b"again", mode={"e_tag": first["e_tag"]})
    with pytest.raises(PreconditionError):
        obstore.put(store, "claims/0", b"stale", mode={"e_tag": first["e_tag"]})
    assert bytes(obstore.get(store, "claims/0").bytes()) == b"again"


def test_s3_lists_uploads_in_parts_and_reads_under_a_condition(s3: Bucket, tmp_path: Path) -> None:
    store = s3_store(s3)
    file = tmp_path / "large"
    file.write_bytes(data := os.urandom(6 << 20))
    obstore.put(store, "shards/large", file, chunk_size=5 << 20)
    obstore.put(store, "shards/deep/small", b"abc")
    listed = obstore.list_with_delimiter(store, "shards")
    assert [meta["path"] for meta in listed["objects"]] == ["shards/large"]
    assert listed["common_prefixes"] == ["shards/deep"]
    etag = obstore.head(store, "shards/large")["e_tag"]
    part = obstore.get(store, "shards/large", options={"range": (5_000_000, 5_500_000), "if_match": etag}).bytes()
    assert bytes(part) == data[5_000_000:5_500_000]
    obstore.put(store, "shards/large", b"replaced")
    with pytest.raises(PreconditionError):
        obstore.get(store, "shards/large", options={"range": (0, 5), "if_match": etag})


def test_a_put_whose_answer_is_lost_has_happened(s3: Bucket) -> None:
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        proxy.program(Fault(cut_at=-1), method="PUT", times=1)
        with pytest.raises(AlreadyExistsError):  # it was ours: whoever claims by a name reads it again
            obstore.put(s3_store(s3), "claims/1", b"mine", mode="create")
        assert bytes(obstore.get(s3_store(s3), "claims/1").bytes()) == b"mine"


def test_buckets_are_empty_and_keys_do_not_show(s3: Bucket) -> None:
    assert obstore.list(s3_store(s3)).collect() == []
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        proxy.program(INVALID_KEY)
        with pytest.raises(PermissionDeniedError) as caught:
            obstore.get(s3_store(s3), "x")
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in str(caught.value) + repr(s3_store(s3))
