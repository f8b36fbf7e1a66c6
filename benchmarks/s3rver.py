"""An S3 server that is fast enough to measure with: s3rver on Node.js, installed by npm into a cache folder.

    with s3rver(folder) as address: ...      # http://127.0.0.1:port, with the bucket `bench`
    os.environ.update(environment_of(address))

It answers ranges from files at some 100 MB/s. It ignores conditions (If-Match, If-None-Match) and misunderstands suffix
ranges; tests of those use moto.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = "s3rver@3.7.1"
BUCKET = "bench"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "millstream-benchmarks" / PACKAGE


def install(cache: Path = CACHE) -> Path:
    """Where its script is. Exits with the reason where it cannot be installed."""
    script = cache / "node_modules" / "s3rver" / "bin" / "s3rver.js"
    if shutil.which("node") is None or shutil.which("npm") is None:
        sys.exit("this benchmark reads from s3rver, which needs Node.js: install node and npm")
    if not script.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as new:
            flags = ["--prefix", new, "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
            if subprocess.run(["npm", "install", *flags, PACKAGE]).returncode:
                sys.exit(f"npm could not install {PACKAGE}")
            if not cache.exists():
                Path(new).rename(cache)
                Path(new).mkdir()  # for the end of the block
    return script


@contextmanager
def s3rver(folder: Path) -> Iterator[str]:
    """The address of a server that keeps its objects in `folder`."""
    script = install()
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["-a", "127.0.0.1", "-p", "0", "--silent", "--allow-mismatched-signatures", "--configure-bucket", BUCKET]
    command = ["node", str(script), "-d", str(folder), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            port = next((line.rpartition(":")[2].strip() for line in server.stdout if "listening" in line), "")
            if not port:
                sys.exit("s3rver did not start")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def environment_of(address: str) -> dict[str, str]:
    """What clients need: obstore and boto3 alike. Its one account is S3RVER."""
    keys = {"AWS_ACCESS_KEY_ID": "S3RVER", "AWS_SECRET_ACCESS_KEY": "S3RVER", "AWS_REGION": "us-east-1"}
    none = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    return {**keys, **none, "AWS_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": "true"}
