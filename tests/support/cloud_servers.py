"""Azure Blob Storage and Google Cloud Storage on loopback, and a container or bucket of each for a test.

Azure is Azurite, Microsoft's emulator, in a process of its own: `azurite-blob` of the PATH, or fetched by npm, once,
into the cache folder. For Google there is none that speaks the XML interface of the client: its requests are translated
to those of S3, for moto.

    def test_a_store_opens(cloud: Cloud) -> None:
        ms.open(cloud.url + "/traces")
"""

import base64
import hashlib
import hmac
import http.client
import itertools
import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

import pytest

from millstream.core import bucket
from millstream.core.files import cache_folder, make_once
from support.effort import PATIENCE_S
from support.http_server import Handler, Server, serving
from support.s3_server import make_bucket

AZURITE = "azurite@3.37.0"
FETCH_S = 240
ACCOUNT, KEY = "devstoreaccount1", base64.b64encode(b"account-key-of-the-tests" * 2).decode()
TOKEN = "bearer-token-of-the-tests"
NUMBERS = itertools.count()


@dataclass
class Cloud:
    """A new container or bucket, with the environment of this process set to find it."""

    scheme: Literal["az", "gs"]
    name: str
    secret: str
    patch: pytest.MonkeyPatch

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.name}"

    def lose_credentials(self) -> str:
        """Clients made from now on have other credentials; returns the secret they have."""
        wrong = base64.b64encode(b"another-key-of-the-tests" * 2).decode()
        self.patch.setenv("AZURE_STORAGE_ACCOUNT_KEY" if self.scheme == "az" else "GOOGLE_BEARER_TOKEN", wrong)
        bucket._here().buckets.clear()
        return wrong


@pytest.fixture(scope="session")
def azure_address() -> Generator[str]:
    command = _find_azurite()
    with azurite(command) as address:
        yield address


@pytest.fixture(scope="session")
def google_address(s3_address: str) -> Generator[str]:
    with serving(_GoogleHandler, s3_address.removeprefix("http://")) as server:
        yield server.address


@pytest.fixture(params=["az", "gs"])
def cloud(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generator[Cloud]:
    """A container of Azure or a bucket of Google of its own for each test."""
    for name in [name for name in os.environ if name.startswith(("AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    name = f"clouds-{os.getpid()}-{next(NUMBERS)}"  # Google shares its server with the buckets of S3
    if request.param == "az":
        address = request.getfixturevalue("azure_address")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{address}/{ACCOUNT}")
        make_container(address, name)
    else:
        monkeypatch.setenv("GOOGLE_BASE_URL", request.getfixturevalue("google_address"))
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", TOKEN)
        make_bucket(request.getfixturevalue("s3_address"), name)
    yield Cloud(request.param, name, KEY if request.param == "az" else TOKEN, monkeypatch)
    bucket._here().buckets.clear()  # their address is that of this session


@contextmanager
def azurite(command: str) -> Generator[str]:
    """The address of a new Azurite, empty."""
    options = ["--blobHost", "127.0.0.1", "--blobPort", "0", "--inMemoryPersistence", "--disableTelemetry"]
    own = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
    started = [command, *options, "--skipApiVersionCheck", "--silent"]
    with subprocess.Popen(started, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            line = next((line for line in process.stdout if "listens on" in line), "")
            assert line, "Azurite did not start"
            yield line.split()[-1]
        finally:
            process.kill()


def make_container(address: str, name: str) -> None:
    date, version = formatdate(usegmt=True), "2021-12-02"
    to_sign = (
        "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    )
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), to_sign.encode(), hashlib.sha256)).decode()
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=PATIENCE_S)
    headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey {ACCOUNT}:{signature}"}
    connection.request("PUT", f"/{ACCOUNT}/{name}?restype=container", headers={**headers, "Content-Length": "0"})
    assert connection.getresponse().status == 201
    connection.close()


def _find_azurite() -> str:
    """The command; the test is skipped if there is none and npm cannot fetch it."""
    if found := shutil.which("azurite-blob"):
        return found
    if not shutil.which("npm") or not shutil.which("node"):
        pytest.skip("no Azure server: it needs node and npm")

    def install(folder: Path) -> None:
        options = ["--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0", "--fetch-timeout=20000"]
        command = ["npm", "install", "--prefix", str(folder), *options, AZURITE]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=FETCH_S)

    try:
        folder = make_once(cache_folder() / AZURITE, install, notify=print)
    except (subprocess.SubprocessError, OSError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        pytest.skip(f"no Azure server: npm cannot fetch {AZURITE}: {next(iter(reason), '')[:200]}")
    return str(folder / "node_modules" / ".bin" / "azurite-blob")


class _GoogleHandler(Handler):
    """The XML interface of Google Cloud Storage, as far as the client uses it, on a server of S3."""

    server: "Server[str]"  # pyright: ignore

    def do_GET(self) -> None:
        body = self.received()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, b"<?xml version='1.0'?><Error><Code>AuthenticationRequired</Code></Error>")
            return
        sent = {name.lower(): value for name, value in self.headers.items()}
        headers = {name: sent[name] for name in ("range", "if-match", "content-type") if name in sent}
        headers["authorization"] = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, Signature=0"
        if sent.get("x-goog-if-generation-match") == "0":
            headers["if-none-match"] = "*"
        if "x-goog-copy-source" in sent:
            headers["x-amz-copy-source"] = sent["x-goog-copy-source"]
        connection = http.client.HTTPConnection(self.server.state, timeout=PATIENCE_S)
        path, mark, query = self.path.partition("?")
        connection.request(self.command, quote(unquote(path)) + mark + query, body or None, headers)
        answer = connection.getresponse()
        data = answer.read()
        self.send_response_only(answer.status)
        for name in ("ETag", "Last-Modified", "Content-Range", "Content-Type"):
            if answer.getheader(name):
                self.send_header(name, answer.getheader(name, ""))
        self.send_header(
            "Content-Length", answer.getheader("Content-Length", "0") if self.command == "HEAD" else str(len(data))
        )
        self.end_headers()
        self.wfile.write(data)
        connection.close()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET
