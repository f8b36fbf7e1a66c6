"""The server of the explorer: loopback only, a token in every address, no files but those a view names."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from email.message import Message
from pathlib import Path
from urllib.parse import urljoin

import pytest

from support.commands import run_here
from support.extras import need

need("starlette", "uvicorn")

from millstream.errors import BadSource  # noqa: E402
from millstream.view import STATIC, Query, View  # noqa: E402
from millstream.view.server import HOST  # noqa: E402

Serve = Callable[[Sequence[View]], str]


def fail(query: Query) -> object:
    raise BadSource("reads.fa: is no FASTA.\nNext: millstream inspect reads.fa")


def refuse(query: Query) -> object:
    raise ValueError("record 60 has no 'nodes'")


@pytest.fixture(scope="module")
def address(serve_views: Serve, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("files")
    (folder / "report.html").write_text("<script>document.title = 'ran'</script>")
    answers = {
        "numbers": lambda query: {"given": query.number("n", 3), "nan": float("nan"), "large": [2**53, 2**53 + 1]},
        "fail": fail,
        "refuse": refuse,
    }
    files = {"report.html": lambda: folder / "report.html", "gone.html": lambda: folder / "gone.html"}
    actions = {"act": lambda query: "done"}
    return serve_views([View("run", "Run", answers, actions, files=files)])


def get(url: str, host: str | None = None, *, method: str = "GET") -> tuple[int, Message, bytes]:
    request = urllib.request.Request(url, headers={} if host is None else {"Host": host}, method=method)
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def test_responses_are_json_with_null_for_nan_and_text_for_large_integers(address: str):
    code, headers, body = get(f"{address}api/numbers?n=5")
    assert code == 200 and headers["Content-Type"] == "application/json"
    assert json.loads(body) == {"given": 5, "nan": None, "large": [2**53, str(2**53 + 1)]}


def test_errors_and_invalid_numbers_are_reported_as_one_line(address: str):
    sentences = {
        "fail": "reads.fa: is no FASTA. Next: millstream inspect reads.fa",
        "refuse": "record 60 has no 'nodes'",
        "numbers?n=x": "n=x",
        f"numbers?n={'9' * 5000}": "n=999",
    }
    for name, sentence in sentences.items():
        code, _, body = get(f"{address}api/{name}")
        assert code == 400 and json.loads(body)["error"].startswith(sentence)


def test_only_a_post_with_the_token_acts_and_only_a_get_queries(address: str):
    code, headers, body = get(f"{address}api/act", method="POST")
    assert (code, body) == (200, b'"done"') and "default-src 'none'" in headers["Content-Security-Policy"]
    assert [get(f"{address}api/act", method=method)[0] for method in ("GET", "HEAD", "PUT")] == [404, 404, 405]
    assert get(f"{address}api/numbers", method="POST")[0] == 404
    without_token = re.sub(r"/[^/]+/run/", "/wrong/run/", address)
    assert without_token != address and get(f"{without_token}api/act", method="POST")[0] == 404


def test_requests_without_the_token_are_404(address: str):
    home = address[: address.index("/", 8) + 1]
    for path in ("", "run/", "wrong/run/", "wrong/run/api/numbers", "wrong/static/common.js", "about"):
        assert get(home + path)[0] == 404
    code, _, body = get(urljoin(address, "../about"))
    assert code == 200 and json.loads(body)["views"] == [{"name": "run", "title": "Run"}]


def test_foreign_host_names_are_404(address: str):
    for host in ("evil.example:80", "127.0.0.1.evil.example", "evil example", "[::", "127.0.0.1@evil.example"):
        assert get(address, host=host)[0] == 404
    assert get(address, host="localhost:80")[0] == 200


@pytest.mark.parametrize("path", ["static/../server.py", "static/%2e%2e%2fserver.py", "static/view.py", "static/x.js"])
def test_only_scripts_and_style_sheets_of_the_package_are_served(address: str, path: str):
    assert get(f"{address.removesuffix('run/')}{path}")[0] == 404


def test_every_response_forbids_external_resources(address: str):
    for path in ("", "api/numbers", "files/report.html", "../static/common.js"):
        code, headers, _ = get(urljoin(address, path))
        assert code == 200
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "http" not in policy and "*" not in policy
        assert headers["Referrer-Policy"] == "no-referrer" and headers["X-Content-Type-Options"] == "nosniff"
    assert "sandbox allow-scripts" in get(f"{address}files/report.html")[1]["Content-Security-Policy"]
    assert get(f"{address}files/gone.html")[0] == 404 and get(f"{address}files/passwd")[0] == 404


def test_pages_have_no_external_links_and_no_inline_scripts():
    files = [file for file in STATIC.parents[1].glob("**/static/*") if file.suffix in (".html", ".js", ".css")]
    assert {"common.js", "run.js", "traces.html", "reads.css"} <= {file.name for file in files}
    for file in files:
        text = file.read_text()
        assert set(re.findall(r"https?://[^\s\"'`)]+", text)) <= {"http://www.w3.org/2000/svg"}, file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), file.name
        assert file.suffix != ".html" or not re.search(r"<script(?![^>]*src=)|\son\w+=|style=", text), file.name


def test_the_explorer_and_its_pages_start_without_torch():
    pages = "millstream.view.server, millstream.traces.view, millstream.reads.view"
    code = f"import sys, {pages}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_path_that_cannot_be_shown_is_one_line_naming_it(tmp_path: Path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n")
    for path in (tmp_path / "nowhere", tmp_path / "picture.png"):
        code, out, err = run_here("view", path)
        assert code == 1 and out == ""
        (line,) = err.splitlines()
        assert line.startswith(f"millstream: {path}")


def test_a_port_in_use_is_a_usage_error(tmp_path: Path):
    import numpy as np

    import millstream as ms

    with ms.TraceWriter(tmp_path / "s") as writer:
        writer.append({"x": np.zeros(3)})
    with socket.create_server((HOST, 0)) as taken:
        code, _, err = run_here("view", tmp_path / "s", "--port", taken.getsockname()[1])
    assert code == 2 and "--port" in err


def test_the_command_prints_a_loopback_address_serves_it_and_stops_cleanly(tmp_path: Path):
    import numpy as np

    import millstream as ms

    with ms.TraceWriter(tmp_path / "s") as writer:
        writer.append({"question_id": "q", "x": np.zeros(3)})
    command = [sys.executable, "-m", "millstream", "view", str(tmp_path / "s")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr
        ender = threading.Timer(60, server.kill)
        ender.start()
        address = re.search(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", next(server.stderr))
        assert address
        assert b"<main>" in get(address[0])[2] and get(f"{address[0]}traces/api/list")[0] == 200
        os.kill(server.pid, signal.SIGINT)
        rest = server.stderr.read()
        ender.cancel()
    assert "Traceback" not in rest and "stopped" in rest and server.returncode == 0
