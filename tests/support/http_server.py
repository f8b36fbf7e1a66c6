"""HTTP on loopback for tests: a server that stops cleanly, and one of objects with ranges, etags and conditions."""

import hashlib
import re
import socket
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Generic, TypeVar
from urllib.parse import unquote

import pytest

State = TypeVar("State")


class Server(ThreadingMixIn, TCPServer, Generic[State]):
    """A thread per connection; closing it ends the connections that clients keep open."""

    allow_reuse_address = True
    daemon_threads = False  # joined at the end
    request_queue_size = 128

    def __init__(self, handler: type[BaseHTTPRequestHandler], state: State) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.state = state
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.errors: list[BaseException | None] = []
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    def process_request(self, request, client_address) -> None:  # pyright: ignore
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request) -> None:  # pyright: ignore
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request, client_address) -> None:  # pyright: ignore
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):  # clients give up on purpose
            self.errors.append(error)

    def end_connections(self) -> None:
        with self._lock:
            for request in self._open:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    """One connection of a client, kept open."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        pass

    def received(self) -> bytes:
        """The body of the request, whole: clients send it after the head, and one may be killed in between."""
        num_bytes = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(num_bytes)
        if len(body) < num_bytes:
            raise ConnectionError(f"only {len(body)} of {num_bytes} bytes have arrived")
        return body

    def answer(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
        self.send_response_only(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_range(self, data: bytes, headers: Mapping[str, str] = {}) -> None:
        """All of `data`, or the range that was asked for."""
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self.answer(200, data, headers)
            return
        first, last = asked.groups()
        start = int(first) if first else max(0, len(data) - int(last))
        stop = min(len(data), int(last) + 1) if first and last else len(data)
        if start >= stop:
            self.answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        self.answer(206, data[start:stop], {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], state: State) -> Generator[Server[State]]:
    server = Server(handler, state)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.end_connections()
        server.server_close()  # joins the threads of connections
    assert server.errors == []


class Objects(dict[str, bytes]):
    """What a plain web server has, by path: `objects["reads/a.fa"] = b">1"`. Read with GET and HEAD."""

    address = ""
    has_ranges = True  # without: a request for a range gets everything, 200
    has_etags = True
    modified = "Wed, 18 Nov 2026 12:00:00 GMT"


@contextmanager
def http_objects() -> Generator[Objects]:
    """A plain HTTP server with ranges, ETag, If-Match and If-None-Match."""
    objects = Objects()
    with serving(_ObjectHandler, objects) as server:
        objects.address = server.address
        yield objects


@pytest.fixture
def web() -> Generator[Objects]:
    with http_objects() as objects:
        yield objects


class _ObjectHandler(Handler):
    server: Server[Objects]  # pyright: ignore

    def do_GET(self) -> None:
        objects = self.server.state
        data = objects.get(unquote(self.path).partition("?")[0].lstrip("/"))
        if data is None:
            self.answer(404, b"not here")
            return
        headers = {"Last-Modified": objects.modified}
        if objects.has_etags:
            headers["ETag"] = etag = f'"{hashlib.md5(data).hexdigest()}"'
            if self.headers.get("If-Match", etag) not in (etag, "*"):
                self.answer(412, b"changed")
                return
            if self.headers.get("If-None-Match") in (etag, "*"):
                self.answer(304, b"")
                return
        if objects.has_ranges:
            self.answer_range(data, {**headers, "Accept-Ranges": "bytes"})
        else:
            self.answer(200, data, headers)

    do_HEAD = do_GET
