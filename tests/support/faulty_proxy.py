"""A proxy that misbehaves as it is told, between a client and an HTTP server; it records what passes.

    with faulty_proxy(server.address) as proxy:
        proxy.program(Fault(status=503), times=2)                  # the first two requests
        proxy.program(Fault(cut_at=1000), match="shard-00", skip=3)  # that object, from its fourth request on
        ...
        assert proxy.num_requests("GET") == 7

`Host` is forwarded as it came: signatures contain it.
"""

import http.client
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest

from support.http_server import Handler, Objects, Server, serving

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong with an answer. With `status`, the request never reaches the server."""

    status: int | None = None
    withheld: str = ""  # a header of the request that does not reach the server
    headers: dict[str, str] = field(default_factory=dict[str, str])  # added to those of the answer
    body: bytes = b""  # with `status`
    etag: str | None = None  # instead of the object's own; a request that insists on another one gets 412
    cut_at: int | None = None  # the connection closes after so many bytes of the body; -1: before the status line
    longer_by: int = 0  # Content-Length says so many bytes more than follow; negative: fewer
    drop: int = 0  # so many bytes at the end are missing, and Content-Length agrees
    flip_at: int | None = None  # the lowest bit of this byte of the object, if it is in the body
    flip_sent_at: int | None = None  # the lowest bit of this byte of the request's body
    chunk_bytes: int = 1 << 16
    delay_s: float = 0.0  # before each chunk
    hang: bool = False  # no answer, until the client gives up or the proxy closes


def s3_error(status: int, code: str, message: str = "") -> Fault:
    text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message or code}</Message></Error>'
    return Fault(status=status, headers={"Content-Type": "application/xml"}, body=text.encode())


def unavailable(status: int = 503, *, retry_after_s: int | None = None) -> Fault:
    """503 SlowDown, 429 Too Many Requests, 500 ..."""
    slow = s3_error(status, "SlowDown" if status == 503 else "TooManyRequests", "Please reduce your request rate.")
    wait = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return Fault(status=status, headers={**slow.headers, **wait}, body=slow.body)


DELETED = s3_error(404, "NoSuchKey", "The specified key does not exist.")
DENIED = s3_error(403, "AccessDenied", "Access Denied")
EXPIRED_TOKEN = s3_error(400, "ExpiredToken", "The provided token has expired.")  # as AWS answers; MinIO: 403
INVALID_KEY = s3_error(403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records.")


@dataclass
class Seen:
    """One request, as the client sent it, and what it was given."""

    method: str
    path: str  # with the query
    range: str = ""  # of bytes, as in `bytes=0-99`
    if_match: str = ""
    if_none_match: str = ""
    status: int = 0  # of the answer; 0 for none
    sent_bytes: int = 0  # of the answer's body
    received_bytes: int = 0  # of the request's body


Chooses = Callable[[Seen], Fault | None]


@dataclass
class Rule:
    fault: Fault | Chooses
    method: str
    match: str
    skip: int
    times: int | None
    hits: int = 0  # matching requests, those before and after the fault included

    def is_due(self, seen: Seen) -> bool:
        """Counts the request if it matches."""
        if self.method not in ("", seen.method) or self.match not in seen.path:
            return False
        self.hits += 1
        return self.skip < self.hits and (self.times is None or self.hits <= self.skip + self.times)


class FaultyProxy:
    """Forwards requests to `upstream`, with the fault of the first rule that has one. All rules count."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream.removeprefix("http://").rstrip("/")
        self.address = ""  # http://127.0.0.1:port
        self.seen: list[Seen] = []
        self.closing = threading.Event()
        self._rules: list[Rule] = []
        self._lock = threading.Lock()

    def program(
        self,
        fault: Fault | Chooses,
        *,
        method: str = "",
        match: str = "",
        skip: int = 0,
        times: int | None = None,
    ) -> Rule:
        """A fault for requests of this method whose path contains `match`: after `skip` of them, `times` times.

        A function gets the request and returns a fault or None; what it does happens before the request is forwarded.
        """
        rule = Rule(fault, method, match, skip, times)
        with self._lock:
            self._rules.append(rule)
        return rule

    def heal(self) -> None:
        """No faults any more."""
        with self._lock:
            self._rules.clear()

    def forget(self) -> None:
        """Counts from zero."""
        with self._lock:
            self.seen.clear()

    def requests(self, method: str = "", match: str = "") -> list[Seen]:
        with self._lock:
            return [seen for seen in self.seen if method in ("", seen.method) and match in seen.path]

    def num_requests(self, method: str = "", match: str = "") -> int:
        return len(self.requests(method, match))

    def num_bytes(self, method: str = "GET", match: str = "") -> int:
        """Bytes of bodies that were sent to the client."""
        return sum(seen.sent_bytes for seen in self.requests(method, match))

    def fault_of(self, seen: Seen) -> Fault:
        """Records the request, and decides."""
        with self._lock:
            self.seen.append(seen)
            due = [rule.fault for rule in self._rules if rule.is_due(seen)]
        for fault in due:
            chosen = fault(seen) if callable(fault) else fault
            if chosen is not None:
                return chosen
        return Fault()


@contextmanager
def faulty_proxy(upstream: str) -> Generator[FaultyProxy]:
    """A proxy on loopback in front of a server, `http://127.0.0.1:port`."""
    proxy = FaultyProxy(upstream)
    with serving(_Handler, proxy) as server:
        proxy.address = server.address
        try:
            yield proxy
        finally:
            proxy.closing.set()


@contextmanager
def refusing_address() -> Generator[str]:
    """An address at which connections are refused: the port is taken, and nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def proxy(web: Objects) -> Generator[FaultyProxy]:
    """In front of the web server of this test."""
    with faulty_proxy(web.address) as proxy:
        yield proxy


class _Handler(Handler):
    """One connection of a client, with a connection of its own to the server."""

    server: "Server[FaultyProxy]"  # pyright: ignore

    def do_GET(self) -> None:
        proxy = self.server.state
        sent = self.received()
        seen = Seen(self.command, self.path, self.headers.get("Range", ""), self.headers.get("If-Match", ""))
        seen.if_none_match = self.headers.get("If-None-Match", "")
        seen.received_bytes = len(sent)
        fault = proxy.fault_of(seen)
        if fault.flip_sent_at is not None and sent:
            sent = sent[: fault.flip_sent_at] + bytes([sent[fault.flip_sent_at] ^ 1]) + sent[fault.flip_sent_at + 1 :]
        if fault.hang:
            self._wait_for_the_end(proxy)
            return
        if fault.cut_at == -1 and fault.status is not None:  # never reached the server
            self.close_connection = True
            return
        if fault.status is not None:
            status, headers, body = fault.status, {}, fault.body
        elif fault.etag is not None and seen.if_match not in ("", "*", fault.etag):
            status, headers, body = 412, {}, s3_error(412, "PreconditionFailed").body
        else:
            status, headers, body = self._ask(proxy.upstream, sent, fault.withheld)
        if fault.cut_at == -1:  # the server has done what was asked, and the client never hears of it
            self.close_connection = True
            return
        seen.status = status
        self._answer(seen, status, {**headers, **fault.headers}, body, fault)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _ask(self, upstream: str, sent: bytes, withheld: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(upstream, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in (*HOP_BY_HOP, withheld.lower()):
                    connection.putheader(name, value)
            if sent or self.command in ("PUT", "POST"):
                connection.putheader("Content-Length", str(len(sent)))
            connection.endheaders(sent or None)
            answer = connection.getresponse()
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in HOP_BY_HOP}
            if self.command == "HEAD":
                headers["Content-Length"] = answer.getheader("Content-Length", "0")
            return answer.status, headers, answer.read()
        finally:
            connection.close()

    def _answer(self, seen: Seen, status: int, headers: dict[str, str], body: bytes, fault: Fault) -> None:
        if fault.etag is not None and status < 300:
            headers = {name: value for name, value in headers.items() if name.lower() != "etag"} | {"ETag": fault.etag}
        body = body[: len(body) - fault.drop]
        at = -1 if fault.flip_at is None or status >= 300 else fault.flip_at - _start_of(headers)
        if 0 <= at < len(body):
            body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        self.send_response_only(status)
        if self.command != "HEAD":
            headers["Content-Length"] = str(len(body) + fault.longer_by)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault.longer_by < 0:
            body = body[: fault.longer_by]  # the rest would be taken for the next answer
        if fault.cut_at is not None:
            body = body[: fault.cut_at]
        self.close_connection = self.close_connection or fault.cut_at is not None or fault.longer_by != 0
        step = max(1, fault.chunk_bytes)
        for start in range(0, len(body), step):
            if fault.delay_s and self.server.state.closing.wait(fault.delay_s):
                return
            chunk = body[start : start + step]
            seen.sent_bytes += len(chunk)  # first: the client may read the count as soon as it has the bytes
            self.wfile.write(chunk)

    def _wait_for_the_end(self, proxy: FaultyProxy) -> None:
        self.close_connection = True
        self.connection.settimeout(0.02)
        while not proxy.closing.is_set():
            with suppress(TimeoutError):
                if not self.connection.recv(1):
                    return
                time.sleep(0.02)


def _start_of(headers: dict[str, str]) -> int:
    """The place of the body in the object."""
    spoken = {name.lower(): value for name, value in headers.items()}.get("content-range", "bytes 0-")
    return int(spoken.removeprefix("bytes ").partition("-")[0])
