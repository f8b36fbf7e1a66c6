"""A small OpenAI-compatible server on loopback: completions and chats, as vLLM or llama.cpp answer them.

def test_answers(model_server: ModelServer) -> None:
    model_server.reply = lambda prompt: "Paris"
    Endpoint(model_server.url).complete([Request(id="q1", prompt="Capital of France?", max_tokens=4)])
"""

import json
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from support.effort import PATIENCE_S
from support.http_server import Handler, Server, serving


@dataclass
class ModelServer:
    """What it answers, and what it has seen. `ids` gives tokens of a text, as vLLM does with `return_token_ids`."""

    url: str = ""
    models: list[str] = field(default_factory=lambda: ["tiny"])
    reply: Callable[[str], str] = lambda prompt: f"{prompt}!"  # to a prompt, or the last message of a chat
    ids: Callable[[str], Sequence[int]] | None = None
    logprob: float = -0.5  # of every token
    key: str | None = None
    ignores_n: bool = False
    refuses: Callable[[dict[str, Any]], str | None] = lambda body: None  # why it refuses a request, with status 400
    broken: list[int] = field(default_factory=list[int])  # statuses of the next answers; 0 cuts the connection
    garbage: bytes | None = None  # what it answers instead of JSON
    seen: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # bodies, with `path`
    most_at_once: int = 0
    gate: threading.Event | None = None  # answers wait for it, which opens
    gate_opens_at: int = 1  # when so many requests are there
    num_now: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@pytest.fixture
def model_server(monkeypatch: pytest.MonkeyPatch) -> Generator[ModelServer]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serving(_Handler, ModelServer()) as server:
        server.state.url = f"{server.address}/v1"
        yield server.state


class _Handler(Handler):
    server: Server[ModelServer]  # pyright: ignore

    def do_GET(self) -> None:
        state = self.server.state
        if self._is_broken(state):
            return
        if self.path == "/v1/models":
            self._json({"object": "list", "data": [{"id": name} for name in state.models]})
        else:
            self._json({"error": {"message": "Not Found"}}, 404)

    def do_POST(self) -> None:
        state = self.server.state
        body = json.loads(self.received())
        with state.lock:
            state.seen.append({**body, "path": self.path})
            state.num_now += 1
            state.most_at_once = max(state.most_at_once, state.num_now)
        try:
            if state.gate:
                if state.num_now >= state.gate_opens_at:
                    state.gate.set()
                state.gate.wait(PATIENCE_S)
        finally:
            with state.lock:
                state.num_now -= 1  # before it answers: the next request may be there right after
        if not self._is_broken(state):
            self._answer(state, body)

    def _is_broken(self, state: ModelServer) -> bool:
        with state.lock:
            status = state.broken.pop(0) if state.broken else None
        if status == 0:
            self.close_connection = True
        elif status is not None:
            self._json({"error": {"message": "try again"}}, status)
        elif state.key and self.headers.get("Authorization") != f"Bearer {state.key}":
            told = f"Incorrect API key provided: {self.headers.get('Authorization', 'none')}"
            self._json({"error": {"message": told}}, 401)
        elif state.garbage is not None:
            self.answer(200, state.garbage)
        else:
            return False
        return True

    def _answer(self, state: ModelServer, body: dict[str, Any]) -> None:
        is_chat = self.path == "/v1/chat/completions"
        if not is_chat and self.path != "/v1/completions":
            self._json({"detail": "Not Found"}, 404)
        elif body["model"] not in state.models:
            self._json({"error": {"message": f"The model `{body['model']}` does not exist."}}, 404)
        elif why := state.refuses(body):
            self._json({"error": {"message": why, "code": 400}}, 400)
        else:
            prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
            text = state.reply(prompt if isinstance(prompt, str) else " ".join(map(str, prompt)))
            ids = list(state.ids(text)) if state.ids and body.get("return_token_ids") else None
            logprobs = self._logprobs(state, text, is_chat) if body.get("logprobs") else None
            choice: dict[str, Any] = {"finish_reason": "stop", "logprobs": logprobs}
            choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            answer: dict[str, Any] = {"id": "cmpl-1", "model": body["model"]}
            if ids is not None and state.ids:
                choice["token_ids"] = ids
                prompt_ids = list(state.ids(prompt)) if isinstance(prompt, str) else prompt
                (answer if is_chat else choice)["prompt_token_ids"] = prompt_ids
            num = 1 if state.ignores_n else body.get("n", 1)
            self._json({**answer, "choices": [{**choice, "index": index} for index in range(num)]})

    def _logprobs(self, state: ModelServer, text: str, is_chat: bool) -> dict[str, object]:
        tokens = [str(token) for token in (state.ids(text) if state.ids else text.split())]
        if is_chat:
            return {"content": [{"token": token, "logprob": state.logprob} for token in tokens]}
        return {"tokens": tokens, "token_logprobs": [state.logprob] * len(tokens)}

    def _json(self, value: object, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})
