"""`extract` asks a real OpenAI-compatible server: that of transformers, on loopback, with the tiny model."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import millstream as ms
from support.extracting import wait_until
from support.extras import need

need("transformers")
for _name in ("fastapi", "openai", "uvicorn"):
    pytest.importorskip(_name, reason=f"transformers serve needs {_name}, which is not installed")


def answers_at(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def server(llama: Path, tmp_path: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", str(llama)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, f"--port={port}", "--host=127.0.0.1"], stdout=log, stderr=log, env=environment
        )
    try:
        wait_until(lambda: answers_at(port) or process.poll() is not None, what="transformers serve", pause=0.1)
        assert process.poll() is None, (tmp_path / "log").read_text()
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


def test_its_answers_are_those_of_a_local_run(server: str, llama: Path, tmp_path: Path):
    questions = [{"id": f"q{i}", "question": f"what is {i} times the fox"} for i in range(3)]

    def answers(name: str, **settings: str) -> list[tuple[object, object]]:
        ms.extract(
            questions, tmp_path / name, model=str(llama), tier="stats", max_new_tokens=5, device="cpu", **settings
        )
        return [(record["record_id"], record["generated_text"]) for record in ms.open(tmp_path / name)]  # pyright: ignore

    assert answers("served", endpoint=server, endpoint_model=str(llama)) == answers("local")
