"""S3 on loopback: moto in a process of its own, one per test process, and a bucket per test.

def test_a_store_opens_from_s3(s3: Bucket) -> None:
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        ms.open(s3.url + "/traces")
"""

import http.client
import itertools
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import pytest

from support.effort import PATIENCE_S

PYTHON = os.environ.get("MILLSTREAM_MOTO_PYTHON", sys.executable)  # of an environment that has moto
NUMBERS = itertools.count()

# Of its own: moto's imports and warnings stay out of the tests, and tests may fork. It ends with its stdin.
SERVER = """
import logging, os, sys
logging.disable()
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("http://127.0.0.1:%d" % server.get_host_and_port()[1], flush=True)
sys.stderr = open(os.devnull, "w")
sys.stdin.read()
os._exit(0)
"""

# No credentials of this machine are read, and no metadata service is asked: its port refuses.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "access-key-of-the-tests",
    "AWS_SECRET_ACCESS_KEY": "secret-key-of-the-tests",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_METADATA_ENDPOINT": "http://127.0.0.1:1",  # obstore does not know the variable above
}


def s3_environment(address: str) -> dict[str, str]:
    """What a client needs to use this server."""
    return {**ENVIRONMENT, "AWS_ENDPOINT_URL": address}


@dataclass
class Bucket:
    """A new bucket, with the environment of this process set to find it."""

    name: str
    address: str  # of the server itself
    patch: pytest.MonkeyPatch

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def through(self, address: str) -> None:
        """Clients made from now on use another address, that of a proxy."""
        self.patch.setenv("AWS_ENDPOINT_URL", address)


@contextmanager
def moto_server() -> Generator[str]:
    """The address of a new S3 server, empty."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    command, pipe = [PYTHON, "-c", SERVER], subprocess.PIPE
    with subprocess.Popen(command, env=own | ENVIRONMENT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            assert address, "moto did not start"
            yield address
        finally:
            process.stdin.close()
            try:
                process.wait(PATIENCE_S)
            except BaseException:
                process.kill()
                raise


def make_bucket(address: str, name: str) -> None:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=PATIENCE_S)
    connection.request("PUT", f"/{name}")
    assert connection.getresponse().status == 200
    connection.close()


@pytest.fixture(scope="session")
def s3_address() -> Generator[str]:
    if sys.executable == PYTHON and (find_spec("moto") is None or find_spec("flask_cors") is None):
        pytest.skip("no S3 server: pip install 'moto[s3]' flask flask-cors")
    with moto_server() as address:
        yield address


@pytest.fixture
def s3(s3_address: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket of its own for each test."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3_environment(s3_address).items():
        monkeypatch.setenv(name, value)
    bucket = Bucket(f"tests-{os.getpid()}-{next(NUMBERS)}", s3_address, monkeypatch)
    make_bucket(s3_address, bucket.name)
    return bucket
