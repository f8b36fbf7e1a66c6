"""An OpenAI-compatible server (vLLM, llama.cpp, TGI, an API) -> answers: many requests at once, repeated on failure.

    endpoint = Endpoint("http://127.0.0.1:8000/v1")
    for answer in endpoint.complete(Request(id=q.id, prompt=q.question, max_tokens=32) for q in questions):
        print(answer.id, answer.choices[0].text)

The key comes from an environment variable when a request is sent; no object, file or message ever has it.
"""

import json
import os
import queue
import re
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, cast
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, build_opener
from urllib.request import Request as HTTPRequest

from millstream.core.bucket import IncompleteBody, retried
from millstream.core.config import parse_json
from millstream.errors import AccessDenied, BadSetting, RemoteError
from millstream.traces.llm import cells

KEY_ENV = "OPENAI_API_KEY"
CONCURRENCY = 8
_AHEAD = 4  # times the concurrency: requests that wait while the caller works on the answers it has
_TIMEOUT_S = 600  # without a byte: servers send an answer when all of it is there
_LOCAL = re.compile(r"localhost|127\.[\d.]+|::1")
_PASSING = (408, 425, 429)  # of the statuses below 500
_MOST_BYTES = 1 << 28

# What servers without these extensions answer to them, by the field of the request that they name.
_UNSUPPORTED = re.compile(r"(?i)unsupported|not supported|unrecogni[sz]ed|unexpected|unknown|extra inputs|forbidden")
_DISPENSABLE = ("return_token_ids", "logprobs")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to complete, as text or token ids, or the messages of a chat; `id` comes back with the answer."""

    id: Hashable
    prompt: str | Sequence[int] | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    max_tokens: int
    n: int = 1  # choices
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    stop: Sequence[str] = ()
    seed: int | None = None
    logprobs: bool = False
    token_ids: bool = False  # ask for them, as vLLM returns them


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One answer: its text, and what the server told of its tokens."""

    text: str
    finish: str | None = None  # stop, or length if it was cut at `max_tokens`
    ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the server answered to a request; `error` says why it refused this one, which then has no choices."""

    id: Hashable
    choices: tuple[Choice, ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    error: str | None = None


class Endpoint:
    """A model of a server at `url`, such as `http://127.0.0.1:8000/v1`; without `model`, the only one that it has.

    The key is in the environment variable `key_env`. That of `OPENAI_API_KEY` is sent in the clear, over http, only to
    this machine, unless it is named.
    """

    def __init__(
        self, url: str, model: str | None = None, *, key_env: str | None = None, concurrency: int = CONCURRENCY
    ) -> None:
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            parts, host = None, None
        if parts is None or parts.scheme not in ("http", "https") or not host:
            raise BadSetting(f"endpoint={url}: must be the address of a server, as in http://127.0.0.1:8000/v1")
        if "@" in parts.netloc or parts.query:
            raise BadSetting(
                f"endpoint={parts.scheme}://{host}...: addresses are printed and saved, so they must not have "
                f"credentials or a query. Set the key in the environment variable {KEY_ENV}"
            )
        if concurrency < 1:
            raise BadSetting(f"concurrency={concurrency}: must be at least 1")
        self.url = re.sub(r"(/chat)?(/completions)?/*$", "", url)
        self.concurrency = concurrency
        self._is_local = _LOCAL.fullmatch(host) is not None
        self._may_send_key = self._is_local or parts.scheme == "https" or key_env is not None
        self._key_env = key_env or KEY_ENV
        self._dropped: set[str] = set()  # fields of requests that the server does not know
        self._has_answered = False
        self._key()
        self.model = model or self._only_model()

    def complete(self, requests: Iterable[Request]) -> Iterator[Answer]:
        """The answers, as they arrive. Requests are taken as they are needed, at most `concurrency` are sent at once.

        A failure of the server is raised, once it has lasted MILLSTREAM_PATIENCE seconds; a request that the server
        refuses is an answer with an error.
        """
        waiting: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        done: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()
        is_over = threading.Event()

        def work() -> None:
            while (request := waiting.get()) is not None and not is_over.is_set():
                try:
                    done.put(self.answer(request))
                except Exception as error:  # raised where the answers are taken
                    done.put(error)

        # Daemons, unlike those of a ThreadPoolExecutor: after Ctrl-C the process does not wait for their answers.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(self.concurrency)]
        coming = iter(requests)
        num_waiting, is_last = 0, False
        try:
            for thread in threads:
                thread.start()
            while True:
                while not is_last and num_waiting < _AHEAD * self.concurrency:
                    if (request := next(coming, None)) is None:
                        is_last = True
                    else:
                        waiting.put(request)
                        num_waiting += 1
                if not num_waiting:
                    return
                answer = done.get()
                num_waiting -= 1
                if isinstance(answer, Exception):
                    raise answer
                yield answer
        finally:
            is_over.set()
            for _ in threads:
                waiting.put(None)

    def answer(self, request: Request) -> Answer:
        """The answer to one request."""
        path = "/completions" if request.messages is None else "/chat/completions"
        choices: list[Choice] = []
        prompt_ids: tuple[int, ...] | None = None
        while len(choices) < request.n:  # `transformers serve` ignores n
            found = self._post(path, self._body(request, len(choices)))
            if isinstance(found, str):
                return Answer(id=request.id, error=found)
            try:
                more = [_choice(row) for row in _rows(found["choices"])]
                ids = found.get("prompt_token_ids") or _rows(found["choices"])[0].get("prompt_token_ids")
                prompt_ids = cells.token_ids(ids)
            except (LookupError, TypeError, ValueError) as error:
                raise RemoteError(f"{self.url}{path}: the answer cannot be used ({error})") from None
            choices += more
        return Answer(id=request.id, choices=tuple(choices[: request.n]), prompt_ids=prompt_ids)

    def _body(self, request: Request, num_choices: int) -> dict[str, object]:
        is_chat = request.messages is not None
        body: dict[str, object] = {
            "model": self.model,
            **({"messages": [dict(m) for m in request.messages or ()]} if is_chat else {"prompt": request.prompt}),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "stream": False,
        }
        if request.n - num_choices > 1:
            body["n"] = request.n - num_choices
        if request.seed is not None:
            body["seed"] = request.seed + num_choices
        if request.stop:
            body["stop"] = list(request.stop)
        if request.logprobs:
            body["logprobs"] = True if is_chat else 1  # 0 means none to llama.cpp
        if request.token_ids:
            body["return_token_ids"] = True
        for name in ("top_p", "top_k"):
            if getattr(request, name) is not None:
                body[name] = getattr(request, name)
        return self._adapted(body)

    def _adapted(self, body: dict[str, object]) -> dict[str, object]:
        """The request without what the server does not know."""
        names = {name: name for name in body if name not in self._dropped}
        if "max_tokens" in self._dropped:  # newer models of OpenAI have another name for it in chats
            names["max_tokens"] = "max_completion_tokens" if "messages" in body else "max_tokens"
        return {ours: body[name] for name, ours in names.items() if name in body}

    def _post(self, path: str, body: dict[str, object]) -> dict[str, Any] | str:
        """The answer to a request, or why the server refuses it."""
        while True:
            status, text = self._send(path, body)
            if status < 300:
                return self._parsed(path, text)
            told = _message(text)
            if status not in (400, 413, 422):
                raise self._refusal(path, status, told)
            self._dropped |= {name for name in self._unknown(text) if name in body}
            if (adapted := self._adapted(body)) == body:
                return f"refused by the server ({self._printable(told)})"
            body = adapted

    def _unknown(self, text: str) -> list[str]:
        """The fields of requests that a refusal says are unknown, of those that we can do without."""
        if not _UNSUPPORTED.search(text):
            return []
        renamed = ["max_tokens"] if "max_completion_tokens" in text else []
        return [*renamed, *(name for name in _DISPENSABLE if re.search(rf"\b{name}\b", text))]

    def _only_model(self) -> str:
        names = self._models()
        if len(names) == 1:
            return names[0]
        if not names:
            raise BadSetting(f"{self.url}: does not say which model it has. Name it")
        raise BadSetting(f"{self.url}: has {len(names)} models, name one of them: {', '.join(names[:20])}")

    def _models(self) -> list[str]:
        status, text = self._send("/models")
        if status >= 300:
            raise self._refusal("/models", status, _message(text))
        return [str(row["id"]) for row in _rows(self._parsed("/models", text).get("data")) if "id" in row]

    def _refusal(self, path: str, status: int, told: str) -> Exception:
        if status in (401, 403):
            name = self._key_env
            if self._key() is None:
                return AccessDenied(f"{self.url}: needs a key. Set it in an environment variable, key_env={name}")
            return AccessDenied(f"{self.url}: refuses the key in the environment variable {name} ({status})")
        if "insufficient_quota" in told:
            return AccessDenied(f"{self.url}: the quota of the key in {self._key_env} is used up")
        reason = self._printable(told)
        if status == 404 and path != "/models":
            try:
                names = self._models()
            except RemoteError:
                names = []
            if names and self.model not in names:
                return BadSetting(f"{self.url}: has no model {self.model!r}, only: {', '.join(names[:20])}")
        hint = ". The address of most servers ends in /v1" if status == 404 and not self.url.endswith("/v1") else ""
        return RemoteError(f"{self.url}{path}: refused by the server ({status}: {reason}){hint}")

    def _parsed(self, path: str, text: str) -> dict[str, Any]:
        try:
            found = parse_json(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise RemoteError(
                f"{self.url}{path}: the answer is not a JSON object, so this is no OpenAI-compatible server. The "
                "address of most servers ends in /v1"
            )
        return cast("dict[str, Any]", found)

    def _send(self, path: str, body: Mapping[str, object] | None = None) -> tuple[int, str]:
        """Status and body of the answer, of a server that does not merely ask to try again."""
        return retried(f"{self.url}{path}", lambda: self._send_once(path, body))

    def _send_once(self, path: str, body: Mapping[str, object] | None) -> tuple[int, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "millstream"}
        if (key := self._key()) is not None:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with _opener(self._is_local).open(
                HTTPRequest(self.url + path, data=data, headers=headers), timeout=_TIMEOUT_S
            ) as answer:
                status, text = int(answer.status), answer.read(_MOST_BYTES).decode(errors="replace")
        except HTTPError as error:
            with error:
                status, text = error.code, error.read(1 << 20).decode(errors="replace")
        except (HTTPException, OSError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            if not self._has_answered and not isinstance(reason, TimeoutError):
                raise RemoteError(
                    f"{self.url}: no server answers there ({reason}). Start it, or check the address"
                ) from None
            raise IncompleteBody(str(reason) or type(reason).__name__) from None
        self._has_answered = True
        if (status >= 500 or status in _PASSING) and "insufficient_quota" not in text:
            raise IncompleteBody(f"status: {status} {self._printable(_message(text))}")
        return status, text

    def _key(self) -> str | None:
        """The key, read from the environment each time."""
        key = os.environ.get(self._key_env, "").strip() if self._may_send_key else ""
        if not re.fullmatch(r"[!-~]*", key):
            raise BadSetting(f"the environment variable {self._key_env} is not a key: it has spaces or odd characters")
        return key or None

    def _printable(self, text: str) -> str:
        """A message of the server in one line, without the key."""
        key = self._key()
        return " ".join((text.replace(key, "...") if key else text).split())[:200] or "no reason given"


class _NoRedirects(HTTPRedirectHandler):
    """A redirect is an answer like another: the key goes only to the address that the user named."""

    def redirect_request(self, *_args: object, **_others: object) -> None:
        return None


def _opener(is_local: bool) -> OpenerDirector:
    """By the proxy of the environment, if there is one; this machine is reached directly."""
    return build_opener(_NoRedirects, *([ProxyHandler({})] if is_local else []))


def _choice(row: Mapping[str, Any]) -> Choice:
    text = row["message"].get("content") if "message" in row else row["text"]
    ids = cells.token_ids(row.get("token_ids"))
    return Choice(
        text=str(text or ""),
        finish=row.get("finish_reason"),
        ids=ids,
        logprobs=cells.logprobs(row.get("logprobs"), ids),
    )


def _rows(value: object) -> list[dict[str, Any]]:
    """Dicts in a list; nothing else."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("dict[str, Any]", item) for item in items if isinstance(item, dict)]


def _message(text: str) -> str:
    """What the body of a refusal tells: `error.message`, `message` or `detail`, else all of it."""
    try:
        found = parse_json(text)
        error = found.get("error", found)
        told = error if isinstance(error, str) else error.get("message") or error.get("detail") or text
        code = "" if isinstance(error, str) else error.get("code") or ""
    except (ValueError, AttributeError):
        return text
    return f"{code}: {told}" if code == "insufficient_quota" else str(told)
