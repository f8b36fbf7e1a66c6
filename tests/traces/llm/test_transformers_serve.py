"""A real OpenAI-compatible server: `transformers serve` with a tiny model answers as the model in this process."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import millstream as ms
from millstream.core.lines import read_lines
from millstream.errors import MillstreamError
from millstream.traces.label import label
from millstream.traces.llm.endpoint import Endpoint, Request
from support.effort import PATIENCE_S
from support.extras import need
from support.tiny_models import make_model, make_tokenizer

need("fastapi", "openai", "uvicorn", "pydantic")  # transformers[serving]

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %} ?"
PROMPTS = ["the quick fox", "what is the capital of France", "it is the"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model("llama", tmp_path_factory.mktemp("served"), context=2048)
    make_tokenizer(chat_template=TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    code = "from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", code, "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--device", "cpu", "--dtype", "float32"],
            stdout=out,
            stderr=out,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
    try:
        yield _when_ready(f"http://127.0.0.1:{port}/v1", str(model), process, log)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _when_ready(url: str, model: str, process: "subprocess.Popen[bytes]", log: Path) -> str:
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            Endpoint(url, model).answer(Request(id=0, prompt="the", max_tokens=1))
            return url
        except MillstreamError as error:
            if process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"{error}\n{log.read_text()[-3000:]}") from None
        time.sleep(0.2)


def greedy(model: Path, prompt: str, count: int) -> str:
    import torch
    import transformers as hf

    loaded: Any = hf.AutoModelForCausalLM.from_pretrained(model).eval()
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(model)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        found = loaded.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=1)
    return str(tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_completions_are_those_of_the_model(model: Path, url: str) -> None:
    endpoint = Endpoint(url, str(model))
    # It knows neither `return_token_ids`, which it refuses, nor `n`, which it ignores.
    requests = [Request(id=text, prompt=text, max_tokens=6, n=2, token_ids=True, seed=1) for text in PROMPTS]
    found = {answer.id: answer for answer in endpoint.complete(requests)}
    for text in PROMPTS:
        assert found[text].error is None
        assert [choice.text for choice in found[text].choices] == [greedy(model, text, 6)] * 2
        assert {choice.finish for choice in found[text].choices} <= {"stop", "length"}


def test_a_served_model_judges_answers(model: Path, url: str, tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "s") as writer:
        for number, text in enumerate(["Paris", "London", "London"]):
            row = {"question_id": f"q{number}", "question": "Where?", "generated_answer": text, "aliases": ["Paris"]}
            writer.append({**row, "hidden": np.zeros(3, np.float16)})
    done = label(tmp_path / "s", rule="judge", endpoint=url, model=str(model), max_new_tokens=4)
    assert len(read_lines(tmp_path / "s" / "judge.jsonl")[0]) == 2  # replies without sense, but replies
    assert pq.read_table(done.path).num_rows == 3 and "the judge replied none" in done.notes[0]


def test_extract_replays_its_answers_as_it_generates_them_itself(model: Path, url: str, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f'{{"id": "q{n}", "question": "{text}"}}\n' for n, text in enumerate(PROMPTS)))
    options: dict[str, Any] = {"model": str(model), "max_new_tokens": 5, "device": "cpu", "prompt": "{question}"}
    ms.extract(questions, tmp_path / "here", **options)
    ms.extract(questions, tmp_path / "served", endpoint=url, endpoint_model=str(model), **options)
    here, served = (ms.open(tmp_path / name) for name in ("here", "served"))
    assert len(here) == len(served) == len(PROMPTS)
    for number in range(len(PROMPTS)):
        ours = here.by_id(f"q{number}")
        theirs = served.by_id(f"q{number}")
        assert theirs["generated_answer"] == ours["generated_answer"] and theirs["status"] == "ok"
