"""An S3 server for reading, fast enough not to be what is measured: files of a folder by sendfile, in one process.

    with object_server(folder) as address: ...                   # http://127.0.0.1:port, with the bucket `bench`
    with object_server(folder, latency_ms=30, rate_mb=50): ...   # every request waits, every connection is limited
    os.environ.update(environment_of(address))
    counts_of(address)                                           # requests and bytes since the last call

It answers GET and HEAD with ranges, and listings. Objects are files below `folder/bench`. It checks no signatures.
Latency and a limited rate per connection are what real object stores have; together they have no limit here.
"""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bench"
SLICE_BYTES = 64 << 10  # of a limited connection
COUNTS = "/counts"
STATUS = {200: "OK", 206: "Partial Content", 404: "Not Found", 416: "Range Not Satisfiable"}


@contextlib.contextmanager
def object_server(folder: Path, *, latency_ms: float = 0, rate_mb: float = 0) -> Iterator[str]:
    """The address of a server of the files below `folder`, in a process of its own."""
    command = [sys.executable, __file__, str(folder), str(latency_ms), str(rate_mb)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.terminate()


def counts_of(address: str) -> dict[str, int]:
    """Requests and bytes of bodies since the last call."""
    with urllib.request.urlopen(address + COUNTS) as answer:
        return json.load(answer)


def environment_of(address: str) -> dict[str, str]:
    """What clients need: obstore and boto3 alike."""
    keys = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "us-east-1"}
    none = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    endpoint = {"AWS_ENDPOINT_URL": address, "S3_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": "true"}
    return {**keys, **none, **endpoint}


# -- the process


@dataclass
class Connections:
    """What all connections share."""

    folder: Path
    latency_s: float
    rate: float  # bytes per second and connection; 0: no limit
    requests: int = 0
    num_bytes: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # RuntimeError: the client closed the connection in the middle of a body.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, RuntimeError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                method, target = head.split(" ", 2)[:2]
                if target == COUNTS:
                    counts = {"requests": self.requests, "bytes": self.num_bytes}
                    self.requests = self.num_bytes = 0
                    await self._answer(writer, 200, json.dumps(counts).encode())
                    continue
                self.requests += 1
                await asyncio.sleep(self.latency_s)
                await self._object(writer, method, urlsplit(target), head)
        writer.close()

    async def _object(self, writer: asyncio.StreamWriter, method: str, target, head: str) -> None:
        path = self.folder / unquote(target.path).strip("/")
        if not path.is_file():
            query = {name: values[0] for name, values in parse_qs(target.query).items()}
            if "list-type" in query:
                await self._answer(writer, 200, listing(path, query))
            else:
                code = b"<Error><Code>NoSuchKey</Code></Error>" if method == "GET" else b""
                await self._answer(writer, 404, code)
            return
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            start, end, status = 0, stat.st_size, 200
            if asked := re.search(r"\r\nrange: *bytes=(\d*)-(\d*)", head, re.IGNORECASE):
                first, last = asked.groups()
                start = int(first) if first else max(end - int(last), 0)
                end = min(int(last) + 1, end) if first and last else end
                status = 206 if start < end else 416
            etag = f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"'
            modified = formatdate(stat.st_mtime, usegmt=True)
            headers = f"ETag: {etag}\r\nLast-Modified: {modified}\r\nAccept-Ranges: bytes\r\n"
            if status == 206:
                headers += f"Content-Range: bytes {start}-{end - 1}/{stat.st_size}\r\n"
            send(writer, status, max(end - start, 0), headers)
            if method == "GET" and start < end:
                self.num_bytes += end - start
                await self._body(writer, file, start, end)
            await writer.drain()

    async def _body(self, writer: asyncio.StreamWriter, file, start: int, end: int) -> None:
        loop, begun = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        step = SLICE_BYTES if self.rate else end - start
        for at in range(start, end, step):
            count = min(step, end - at)
            await loop.sendfile(writer.transport, file, at, count)
            if self.rate:
                await asyncio.sleep(begun + (at + count - start) / self.rate - loop.time())

    @staticmethod
    async def _answer(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        send(writer, status, len(body), "Content-Type: application/xml\r\n")
        writer.write(body)
        await writer.drain()


def send(writer: asyncio.StreamWriter, status: int, count: int, headers: str) -> None:
    writer.write(f"HTTP/1.1 {status} {STATUS[status]}\r\nContent-Length: {count}\r\n{headers}\r\n".encode())


def listing(bucket: Path, query: dict[str, str]) -> bytes:
    """ListObjectsV2: pages of `max-keys` names after `start-after` or the token, which is a name."""
    prefix, most = query.get("prefix", ""), int(query.get("max-keys", 1000))
    after = query.get("continuation-token", query.get("start-after", ""))
    found = {}
    for file in (bucket / prefix.rpartition("/")[0]).rglob("*"):
        name = file.relative_to(bucket).as_posix()
        if file.is_file() and name.startswith(prefix):
            folder, slash, _ = name[len(prefix) :].partition("/")
            is_folder = query.get("delimiter") == "/" and slash
            found[prefix + folder + slash if is_folder else name] = None if is_folder else file.stat()
    names = sorted(name for name in found if name > after)
    rows = []
    for name in names[:most]:
        if (stat := found[name]) is None:
            rows.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
            continue
        etag = f"&quot;{stat.st_mtime_ns:x}-{stat.st_size:x}&quot;"
        rows.append(
            f"<Contents><Key>{escape(name)}</Key><Size>{stat.st_size}</Size><ETag>{etag}</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><StorageClass>STANDARD</StorageClass></Contents>"
        )
    more = f"<NextContinuationToken>{escape(names[most - 1])}</NextContinuationToken>" if len(names) > most else ""
    head = f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(rows)}</KeyCount>"
    head += f"<MaxKeys>{most}</MaxKeys><IsTruncated>{str(bool(more)).lower()}</IsTruncated>"
    return f'<?xml version="1.0"?><ListBucketResult>{head}{more}{"".join(rows)}</ListBucketResult>'.encode()


async def main(folder: str, latency_ms: str, rate_mb: str) -> None:
    connections = Connections(Path(folder), float(latency_ms) / 1e3, float(rate_mb) * 1e6)
    server = await asyncio.start_server(connections.serve, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(*sys.argv[1:]))
