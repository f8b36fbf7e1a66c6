"""OpenAI-compatible servers: requests, answers, failures, and the key, which nothing keeps."""

import os
import pickle
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from millstream.errors import AccessDenied, BadSetting, MillstreamError, RemoteError
from millstream.traces.llm.endpoint import Answer, Choice, Endpoint, Request
from support.model_server import ModelServer

SECRET = "sk-secret-of-the-tests"


def ask(server: ModelServer, *prompts: str, **options: Any) -> dict[object, Answer]:
    requests = [Request(id=prompt, prompt=prompt, max_tokens=4, **options) for prompt in prompts]
    return {answer.id: answer for answer in Endpoint(server.url).complete(requests)}


def test_answers_come_with_the_id_of_their_request(model_server: ModelServer) -> None:
    found = ask(model_server, *(f"q{number}" for number in range(100)))
    assert {id: answer.choices[0].text for id, answer in found.items()} == {f"q{n}": f"q{n}!" for n in range(100)}
    assert all(answer.error is None for answer in found.values())


def test_tokens_and_their_log_probs_are_kept_if_the_server_has_them(model_server: ModelServer) -> None:
    model_server.ids = lambda text: list(text.encode())
    want = {"id": 1, "max_tokens": 4, "logprobs": True, "token_ids": True}
    endpoint = Endpoint(model_server.url)
    choice = Choice(text="ab!", finish="stop", ids=(97, 98, 33), logprobs=(-0.5,) * 3)
    messages = [{"role": "user", "content": "ab"}]
    for request in (Request(prompt="ab", **want), Request(messages=messages, **want)):
        assert endpoint.answer(request) == Answer(id=1, choices=(choice,), prompt_ids=(97, 98))
    given = endpoint.answer(Request(prompt=[7, 8], **want))
    assert given.prompt_ids == (7, 8) and given.choices[0].text == "7 8!"


def test_what_is_asked_reaches_the_server(model_server: ModelServer) -> None:
    options = {"n": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "stop": ("\n",), "seed": 4}
    found = ask(model_server, "q", **options)
    assert len(found["q"].choices) == 3
    (body,) = model_server.seen
    expected = {"model": "tiny", "prompt": "q", "max_tokens": 4, "stream": False, **options, "stop": ["\n"]}
    assert {name: body[name] for name in expected} == expected and body.keys() - expected.keys() == {"path"}


def test_a_server_that_ignores_n_is_asked_again_with_other_seeds(model_server: ModelServer) -> None:
    model_server.ignores_n = True
    assert len(ask(model_server, "q", n=3, seed=10)["q"].choices) == 3
    assert [body["seed"] for body in model_server.seen] == [10, 11, 12]


def test_the_number_of_requests_at_once_is_bounded_and_requests_are_taken_lazily(model_server: ModelServer) -> None:
    model_server.gate = threading.Event()
    model_server.gate_opens_at = 3
    taken: list[int] = []

    def requests() -> Iterator[Request]:
        for number in range(1000):
            taken.append(number)
            yield Request(id=number, prompt="q", max_tokens=1)

    endpoint = Endpoint(model_server.url, concurrency=3)
    answers = endpoint.complete(requests())
    next(answers)
    assert model_server.most_at_once == 3 and len(taken) == 12
    answers.close()
    assert len(model_server.seen) <= 12  # the others were never sent


def test_passing_failures_are_tried_again(model_server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint(model_server.url)
    model_server.broken = [429, 503, 0, 500]
    state = random.getstate()
    assert endpoint.answer(Request(id=1, prompt="q", max_tokens=1)).choices[0].text == "q!"
    assert len(model_server.seen) == 5
    assert random.getstate() == state  # a user's random numbers do not depend on the network
    monkeypatch.setenv("MILLSTREAM_PATIENCE", "0")
    model_server.broken = [503]
    with pytest.raises(RemoteError, match=r"503 try again"):
        list(endpoint.complete([Request(id=1, prompt="q", max_tokens=1)]))


def test_a_refused_request_is_an_answer_with_an_error(model_server: ModelServer) -> None:
    model_server.refuses = lambda body: "maximum context length is 8 tokens" if len(body["prompt"]) > 8 else None
    found = ask(model_server, "short", "very long prompt")
    assert found["short"].error is None
    assert found["very long prompt"] == Answer(
        id="very long prompt", error="refused by the server (maximum context length is 8 tokens)"
    )


def test_fields_that_a_server_does_not_know_are_left_out(model_server: ModelServer) -> None:
    unknown = "Unexpected fields in the request: {'return_token_ids'}"
    model_server.refuses = lambda body: unknown if "return_token_ids" in body else None
    found = ask(model_server, *map(str, range(50)), token_ids=True)
    assert all(answer.choices[0].text == f"{id}!" and not answer.error for id, answer in found.items())
    assert len(model_server.seen) <= 50 + 8  # learnt once


def test_newer_chats_take_the_length_by_another_name(model_server: ModelServer) -> None:
    told = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    model_server.refuses = lambda body: told if "max_tokens" in body else None
    endpoint = Endpoint(model_server.url)
    for id in range(2):
        request = Request(id=id, messages=[{"role": "user", "content": "hi"}], max_tokens=9)
        assert endpoint.answer(request).choices[0].text == "hi!"
    assert [body.get("max_completion_tokens") for body in model_server.seen] == [None, 9, 9]


def test_the_model_is_the_only_one_of_the_server_or_named(model_server: ModelServer) -> None:
    assert Endpoint(model_server.url).model == "tiny"
    assert Endpoint(f"{model_server.url}/chat/completions").url == model_server.url
    with pytest.raises(BadSetting, match=r"has no model 'large', only: tiny"):
        list(Endpoint(model_server.url, "large").complete([Request(id=1, prompt="q", max_tokens=1)]))
    model_server.models.append("small")
    with pytest.raises(BadSetting, match="tiny, small"):
        Endpoint(model_server.url)


def test_mistakes_are_told_in_one_line(model_server: ModelServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    base = model_server.url.removesuffix("/v1")
    cases = {
        f"http://127.0.0.1:{free}/v1": "no server answers there",
        base: "ends in /v1",
        "127.0.0.1:8000/v1": "must be the address",
        "http://user:secret@host/v1": "must not have credentials",
    }
    for url, words in cases.items():
        with pytest.raises(MillstreamError, match=words) as raised:
            Endpoint(url)
        assert "\n" not in str(raised.value) and "secret" not in str(raised.value)
    model_server.garbage = b"<html>welcome</html>"
    with pytest.raises(RemoteError, match="not a JSON object"):
        Endpoint(model_server.url)
    model_server.garbage = b'{"choices": []}'
    with pytest.raises(RemoteError, match="cannot be used"):
        Endpoint(model_server.url, "tiny").answer(Request(id=1, prompt="q", max_tokens=1))


def test_the_key_comes_from_the_environment_and_is_kept_nowhere(
    model_server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_server.key = SECRET
    with pytest.raises(AccessDenied, match="needs a key"):
        Endpoint(model_server.url)
    monkeypatch.setenv("OPENAI_API_KEY", f"{SECRET}-wrong")
    with pytest.raises(AccessDenied, match="OPENAI_API_KEY") as raised:
        Endpoint(model_server.url)
    assert SECRET not in str(raised.value)
    monkeypatch.setenv("OPENAI_API_KEY", "two words")
    with pytest.raises(BadSetting, match="OPENAI_API_KEY") as raised:
        Endpoint(model_server.url)
    assert "two words" not in str(raised.value)
    monkeypatch.setenv("MY_KEY", f"{SECRET}\n")
    endpoint = Endpoint(model_server.url, key_env="MY_KEY")
    assert endpoint.answer(Request(id=1, prompt="q", max_tokens=1)).choices[0].text == "q!"
    assert SECRET.encode() not in pickle.dumps(vars(endpoint)) and os.environ["MY_KEY"] == f"{SECRET}\n"
    model_server.refuses = lambda body: f"bad key {SECRET}"
    assert SECRET not in str(endpoint.answer(Request(id=1, prompt="q", max_tokens=1)).error)


def test_the_usual_key_is_not_sent_in_the_clear_to_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    sent = {url: Endpoint(url, "m")._key() for url in ("http://10.0.0.9/v1", "https://10.0.0.9/v1", "http://[::1]/v1")}  # pyright: ignore
    assert list(sent.values()) == [None, SECRET, SECRET]
    assert Endpoint("http://10.0.0.9/v1", "m", key_env="OPENAI_API_KEY")._key() == SECRET  # pyright: ignore


def test_a_redirect_is_not_followed(model_server: ModelServer) -> None:
    endpoint = Endpoint(model_server.url)
    model_server.broken = [307]
    with pytest.raises(RemoteError, match="307"):
        endpoint.answer(Request(id=1, prompt="q", max_tokens=1))
