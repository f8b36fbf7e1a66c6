"""`extract` of answers that are given, that a server gives, and of several per question; `ms.replay`."""

import json
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import millstream as ms
from millstream.errors import BadSetting, BadSource, ConfigMismatch
from millstream.traces.examples import open_labelled
from millstream.traces.llm import transformers
from millstream.traces.store.traces import Traces
from millstream.traces.study import data_card
from support.extras import need
from support.model_server import ModelServer
from support.tiny_models import TinyModels, make_tokenizer

need("transformers")

SETTINGS: dict[str, Any] = {"tier": "full", "max_new_tokens": 4, "device": "cpu", "prompt": "Q: {question}", "stop": ""}
ROWS: list[dict[str, Any]] = [
    {"id": f"q{i}", "question": f"what is {i} times the fox" + " quick" * (i % 3), "answer": str(i)} for i in range(6)
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def extract(rows: list[dict[str, Any]], store: Path, model: Path, **settings: Any) -> dict[str, Mapping[str, Any]]:
    """The records by id."""
    ms.extract(rows, store, model=str(model), **{**SETTINGS, **settings})
    traces = ms.open(store)
    assert isinstance(traces, Traces)
    return {str(record["record_id"]): record for record in traces}


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any], *, but: tuple[str, ...] = ()) -> None:
    for name in one.keys() - {"generate_s", "replay_s", *but}:
        if isinstance(one[name], np.ndarray):
            assert np.allclose(one[name].astype(np.float32), other[name].astype(np.float32), atol=4e-3), name
        else:
            assert one[name] == other[name], name


# -- given answers


def test_a_file_with_ids_and_log_probs_as_servers_return_them(llama: Path, tmp_path: Path, capsys: Any):
    generated = extract(ROWS, tmp_path / "generated", llama)
    rows = [
        {
            **row,
            "prompt_token_ids": generated[row["id"]]["tokens"][: generated[row["id"]]["prompt_len"]].tolist(),
            "token_ids": generated[row["id"]]["tokens"][generated[row["id"]]["prompt_len"] :].tolist(),
            "logprobs": generated[row["id"]]["logprobs"].tolist(),
        }
        for row in ROWS
    ]
    file = write(tmp_path / "answers.jsonl", rows)
    capsys.readouterr()
    replayed = extract(str(file), tmp_path / "replayed", llama)  # pyright: ignore[reportArgumentType]
    told = capsys.readouterr().err
    assert "questions: 6, 6 with an answer to replay" in told
    assert "given log-probs differ by" in told and "warning: given" not in told
    for name, record in replayed.items():
        assert_same(record, generated[name], but=("finish", "given_logprobs"))
        assert np.allclose(record["given_logprobs"], record["logprobs"], atol=1e-5)


def test_log_probs_of_another_model_are_noticed(llama: Path, tmp_path: Path, capsys: Any):
    rows = [{**row, "token_ids": [5, 6, 7], "logprobs": [-0.1, -0.1, -0.1]} for row in ROWS]
    extract(rows, tmp_path / "s", llama)
    assert "warning: given log-probs differ by" in capsys.readouterr().err


def test_given_and_missing_answers_are_in_one_store_and_a_rerun_adds_the_rest(llama: Path, tmp_path: Path):
    rows = [{**row, "generated_answer": " the fox"} if i % 2 else row for i, row in enumerate(ROWS)]
    first = extract(rows[:3], tmp_path / "s", llama)
    found = extract(rows, tmp_path / "s", llama)
    assert found.keys() == {row["id"] for row in rows} and len(first) == 3
    assert [found[f"q{i}"]["generated_answer"] == " the fox" for i in range(6)] == [False, True] * 3


def test_a_line_may_have_token_ids_and_no_text(llama: Path, tmp_path: Path):
    tokenizer = make_tokenizer()
    prompts = [tokenizer(text)["input_ids"] for text in ("the fox?", "the dog?", "the fox?")]
    rows = [{"prompt_token_ids": ids, "token_ids": [5, 6 + n]} for n, ids in enumerate(prompts)]
    file = write(tmp_path / "ids.jsonl", rows)
    for _ in range(2):  # a rerun finds the same questions
        ms.extract(file, tmp_path / "s", model=str(llama), **SETTINGS)
    found: Any = {record["record_id"]: record for record in ms.open(tmp_path / "s")}  # pyright: ignore
    assert {name: one["question"] for name, one in found.items()} == {
        "ids-0": "the fox?",
        "ids-1": "the dog?",
        "ids-0#1": "the fox?",
    }
    assert found["ids-1"]["tokens"].tolist() == [*prompts[1], 5, 7]
    with pytest.raises(BadSource, match="row 1 has no question"):
        ms.extract([{"prompt_token_ids": [5]}], tmp_path / "t", model=str(llama), **SETTINGS)


def test_tokens_that_the_model_does_not_have_are_an_error_of_their_record(llama: Path, tmp_path: Path):
    found = extract([{**ROWS[0], "token_ids": [5, 300]}, {**ROWS[1], "token_ids": [5, 299]}], tmp_path / "s", llama)
    assert found["q0"]["error"] == "the given token 300 is of another model: this one has 300"
    assert found["q1"]["status"] == "ok"


def test_log_probs_that_cannot_be_compared_are_not_and_it_is_said(llama: Path, tmp_path: Path, capsys: Any):
    rows = [
        {**ROWS[0], "token_ids": [5, 6], "logprobs": [-np.inf, -5.0]},  # the first was ruled out by top_p
        {**ROWS[1], "generated_answer": "fox", "logprobs": [-1.0] * 7},
    ]
    found = extract(rows, tmp_path / "s", llama)
    told = capsys.readouterr().err
    assert "over 1 tokens" in told and "given log-probs of 1 answer not compared" in told
    apart = float(re.findall(r"differ by (\S+)", told)[-1])
    assert abs(apart - abs(found["q0"]["logprobs"][1] + 5)) < 0.1


def test_samples_are_not_drawn_of_given_answers(llama: Path, tmp_path: Path):
    rows = [{**row, "generated_answer": "x"} for row in ROWS]
    with pytest.raises(BadSetting, match="samples=2"):
        extract(rows, tmp_path / "s", llama, samples=2, temperature=1.0)


# -- samples


def test_samples_are_records_of_their_question(llama: Path, tmp_path: Path):
    greedy = extract(ROWS, tmp_path / "greedy", llama)
    found = extract(ROWS, tmp_path / "s", llama, samples=2, temperature=1.0)
    assert list(found) == [f"{row['id']}{n}" for row in sorted_rows(found) for n in ("", "#1", "#2")]
    for name, record in found.items():
        assert record["question_id"] == name.split("#")[0]
        if record["sample"]:
            assert record["hidden"] is None and len(record["logprobs"]) > 0 and record["context"] is None
        else:
            assert_same(record, greedy[name])
    parts = ms.split(ms.open(tmp_path / "s"), {"train": 0.5, "test": 0.5}, by="question_id")
    groups = [set(parts[name].column("question_id").to_pylist()) for name in ("train", "test")]
    assert not groups[0] & groups[1]


def sorted_rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows in the order of their records."""
    order = [name for name in found if "#" not in name]
    return sorted(ROWS, key=lambda row: order.index(row["id"]))


def test_samples_are_resumed_where_they_were_left(llama: Path, tmp_path: Path):
    how: dict[str, Any] = {"samples": 2, "temperature": 1.0, "sample_fields": "all", "shard_records": 3}
    whole = extract(ROWS, tmp_path / "whole", llama, **how)
    extract(ROWS[:4], tmp_path / "s", llama, **how)
    store = tmp_path / "s"
    from millstream.traces.store.rewrite import drop_records

    drop_records(store, lambda traces: [traces.column("record_id").to_pylist().index("q1#2")])
    found = extract(ROWS, store, llama, **how)
    assert found.keys() == whole.keys()
    for name, record in found.items():
        assert_same(record, whole[name])
        assert record["hidden"] is not None
    with pytest.raises(ConfigMismatch):
        extract(ROWS, store, llama, **{**how, "samples": 3})


def test_training_leaves_bare_samples_out_and_counts_every_record(llama: Path, tmp_path: Path):
    store = tmp_path / "s"
    found = extract(ROWS, store, llama, samples=2, temperature=1.0)
    answers = {name: {"record_id": name, "score": i % 2} for i, name in enumerate(found)}
    (tmp_path / "scores.csv").write_text(
        "record_id,score\n" + "".join(f"{n},{a['score']}\n" for n, a in answers.items())
    )
    ms.label(store, rule="scores", scores=str(tmp_path / "scores.csv"))
    examples = open_labelled(str(store), "verdict")
    assert examples.column("sample").to_pylist() == [0] * len(ROWS)
    card: Any = data_card(str(store), examples, {}, "")
    assert card["verdicts"]["sample"] == 2 * len(ROWS) and sum(card["verdicts"].values()) == card["records"] == 18


# -- contexts


def test_a_context_is_shown_and_kept_and_cut_if_it_is_too_long(llama: Path, tmp_path: Path):
    rows = [{**ROWS[0], "context": "the lazy dog"}, {**ROWS[1], "contexts": ["fox " * 400, "Paris"]}]
    prompt = "{context}\nQ: {question}"
    found = extract(rows, tmp_path / "s", llama, prompt=prompt)
    tokenizer = make_tokenizer()
    first = found["q0"]
    text = tokenizer.decode(first["tokens"][: first["prompt_len"]])
    assert text == f"the lazy dog\nQ: {ROWS[0]['question']}" and first["context"] == "the lazy dog"
    assert (first["context_cut"], found["q1"]["status"]) == (0, "error")
    assert "exceed the context of 128" in found["q1"]["error"]
    cut = extract(rows, tmp_path / "cut", llama, prompt=prompt, truncate=True)
    kept = cut["q1"]
    assert kept["status"] == "ok" and 110 < kept["prompt_len"] <= 124
    whole = ("fox " * 400).strip() + "\n\nParis"
    assert kept["context"] == whole[: len(whole) - kept["context_cut"]]
    assert_same(cut["q0"], first)


def test_the_context_is_cut_in_messages_too(llama: Path, tmp_path: Path):
    model = tmp_path / "chat"
    shutil.copytree(llama, model)
    make_tokenizer(chat_template="{% for one in messages %}{{ one['content'] }}{% endfor %} A:").save_pretrained(model)
    context = " ".join(f"fox {n}" for n in range(100))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"From: {context}\nwho?"}]
    row = {"id": "q0", "context": context, "messages": messages, "generated_answer": "the fox"}
    long = {**row, "id": "q1", "context": None}  # whose messages do not say what may be cut
    found = extract([row, long], tmp_path / "s", model, prompt="auto", truncate=True)
    kept = found["q0"]
    assert kept["status"] == "ok" and kept["context"] == context[: -kept["context_cut"]]
    text = make_tokenizer().decode(kept["tokens"][: kept["prompt_len"]])
    assert text == f"Be brief.From: {kept['context']}\nwho? A:"
    assert "exceed the context" in found["q1"]["error"]


@pytest.mark.parametrize("template", [None, "{% for one in messages %}<{{ one['content'] }}>{% endfor %}"])
def test_questions_without_a_context_get_the_prompt_without_one(llama: Path, tmp_path: Path, template: str | None):
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    make_tokenizer(chat_template=template).save_pretrained(model)
    rows = [{"id": "q0", "question": "who?", "context": "fox"}, {"id": "q1", "question": "why?"}]
    mixed = extract(rows, tmp_path / "mixed", model, prompt="auto", stop="|")
    alone = extract(rows[1:], tmp_path / "alone", model, prompt="auto", stop="|")
    assert mixed["q1"]["tokens"].tolist() == alone["q1"]["tokens"].tolist()
    assert "fox" in make_tokenizer().decode(mixed["q0"]["tokens"][: mixed["q0"]["prompt_len"]])


def test_a_prompt_with_a_context_needs_one_of_every_question(llama: Path, tmp_path: Path):
    with pytest.raises(BadSetting, match="'q1' has no context"):
        extract([{**ROWS[0], "context": "the fox"}, ROWS[1]], tmp_path / "s", llama, prompt="{context} {question}")


# -- an endpoint


@pytest.fixture
def served(tiny: TinyModels, model_server: ModelServer) -> Callable[..., ModelServer]:
    """A server with the tiny llama; with `ids`, it returns tokens as vLLM does."""
    loaded, tokenizer = tiny.loaded("llama"), make_tokenizer()
    answers: dict[str, list[int]] = {}

    def reply(prompt: str) -> str:
        ids = [int(part) for part in prompt.split()] if prompt[0].isdigit() else tokenizer(prompt)["input_ids"]
        config = transformers().GenerationConfig(max_new_tokens=4, eos_token_id=0, pad_token_id=1)
        found: list[int] = loaded.model.generate(torch.tensor([ids]), generation_config=config)[0, len(ids) :].tolist()
        text = tokenizer.decode(found, skip_special_tokens=True)
        answers[text] = found
        return text

    def serve(*, ids: bool) -> ModelServer:
        model_server.reply = reply
        model_server.ids = (lambda text: answers.get(text, [1])) if ids else None
        return model_server

    return serve


def test_a_server_that_returns_ids_gives_the_traces_of_a_local_run(llama: Path, tmp_path: Path, served: Any):
    server: ModelServer = served(ids=True)
    local = extract(ROWS, tmp_path / "local", llama)
    found = extract(ROWS, tmp_path / "s", llama, endpoint=server.url, concurrency=2)
    for name, record in found.items():
        assert_same(record, local[name], but=("finish", "given_logprobs", "generated_answer"))
        assert record["generated_answer"].strip() == local[name]["generated_answer"]
        assert set(record["given_logprobs"].tolist()) == {-0.5} and record["finish"] == "stop"
    assert len(server.seen) == len(ROWS) and all(isinstance(body["prompt"], list) for body in server.seen)
    extract(ROWS, tmp_path / "s", llama, endpoint=server.url)
    assert len(server.seen) == len(ROWS)  # nothing is asked twice


def test_what_is_in_the_store_is_not_asked_again(llama: Path, tmp_path: Path, served: Any):
    server: ModelServer = served(ids=True)
    for count in (2, 6):  # whose batches differ
        found = extract(ROWS, tmp_path / "s", llama, endpoint=server.url, num_samples=count)
    assert len(found) == len(server.seen) == 6


def test_a_server_gets_many_requests_at_once_even_if_one_answer_fits_into_memory(
    llama: Path, tmp_path: Path, served: Any
):
    server: ModelServer = served(ids=True)
    server.gate, server.gate_opens_at = threading.Event(), 3
    rows = [{**row, "context": "the lazy fox " * 15} for row in ROWS]
    found = extract(
        rows, tmp_path / "s", llama, endpoint=server.url, concurrency=3, memory="2MB", prompt="{context} {question}"
    )
    assert server.most_at_once == 3 and {record["status"] for record in found.values()} == {"ok"}


def test_a_context_that_is_cut_for_a_server_is_told(llama: Path, tmp_path: Path, served: Any):
    server: ModelServer = served(ids=True)
    rows = [{**ROWS[0], "context": "fox " * 200}]
    settings: dict[str, Any] = {"prompt": "{context} {question}", "truncate": True}
    local = extract(rows, tmp_path / "local", llama, **settings)["q0"]
    found = extract(rows, tmp_path / "s", llama, endpoint=server.url, **settings)["q0"]
    assert found["context_cut"] == local["context_cut"] > 0 and found["context"] == local["context"]


def test_a_server_that_takes_only_texts_is_asked_again(llama: Path, tmp_path: Path, served: Any):
    server: ModelServer = served(ids=False)
    server.refuses = lambda body: None if isinstance(body["prompt"], str) else "the prompt must be a string"
    found = extract(ROWS[:2], tmp_path / "s", llama, endpoint=server.url)
    assert all(record["status"] == "ok" and record["generated_text"] for record in found.values())


def test_a_question_that_the_server_refuses_is_a_record_with_the_reason(llama: Path, tmp_path: Path, served: Any):
    server: ModelServer = served(ids=True)
    first = make_tokenizer()("Q: what is 1")["input_ids"]
    server.refuses = lambda body: (
        "it is too long" if body["prompt"][: len(first)] == first or "is 1 " in str(body["prompt"]) else None
    )
    found = extract(ROWS[:3], tmp_path / "s", llama, endpoint=server.url)
    assert [found[f"q{i}"]["status"] for i in range(3)] == ["ok", "error", "ok"]
    assert "it is too long" in found["q1"]["error"]


def test_samples_that_the_server_refuses_are_a_record_each(llama: Path, tmp_path: Path, served: Any):
    server: ModelServer = served(ids=True)
    server.refuses = lambda body: "no" if body["temperature"] or "is 1 " in str(body["prompt"]) else None
    ms.extract(ROWS[:2], tmp_path / "s", model=str(llama), endpoint=server.url, samples=2, temperature=1.0, **SETTINGS)
    records: Any = list(ms.open(tmp_path / "s"))  # pyright: ignore[reportArgumentType]
    assert sorted(record["record_id"] for record in records) == ["q0", "q0#1", "q0#2", "q1", "q1#1", "q1#2"]


def test_the_store_knows_the_model_of_the_server_and_no_key(
    llama: Path, tmp_path: Path, served: Any, monkeypatch: pytest.MonkeyPatch
):
    server: ModelServer = served(ids=True)
    server.key = "sk-very-secret"
    monkeypatch.setenv("MY_KEY", server.key)
    extract(ROWS[:2], tmp_path / "s", llama, endpoint=server.url, key_env="MY_KEY", samples=1, temperature=0.5)
    traces = ms.open(tmp_path / "s")
    assert isinstance(traces, Traces) and traces.config["generated_by"] == "tiny"
    assert sorted(body["temperature"] for body in server.seen) == [0.0, 0.0, 0.5, 0.5]
    for file in (tmp_path / "s").rglob("*"):
        assert file.is_dir() or b"very-secret" not in file.read_bytes()


def test_beams_have_no_effect_on_a_server(llama: Path, tmp_path: Path, model_server: ModelServer):
    with pytest.raises(BadSetting, match="num_beams=2"):
        extract(ROWS, tmp_path / "s", llama, endpoint=model_server.url, num_beams=2)


# -- replay


def test_replay_returns_the_traces_of_records_in_their_order(llama: Path, tmp_path: Path):
    rows = [{**row, "generated_answer": " the fox" * (1 + i % 3)} for i, row in enumerate(ROWS)]
    stored = extract(rows, tmp_path / "s", llama)
    records = ms.replay(str(llama), rows, **SETTINGS)
    assert [record["record_id"] for record in records] == [row["id"] for row in ROWS]
    for record in records:
        for name in ("hidden", "logprobs", "attention", "tokens"):
            value: Any = record[name]
            kept = stored[str(record["record_id"])][name].astype(np.float32)
            assert np.allclose(value.numpy().astype(np.float32), kept, atol=4e-3)


def test_replay_takes_the_folder_of_a_model_as_a_path(llama: Path):
    (record,) = ms.replay(llama, [{"question": "who?", "generated_answer": "fox"}], **SETTINGS)
    assert record["generated_answer"] == "fox"


def test_replay_asks_no_server(llama: Path):
    with pytest.raises(BadSetting, match=r"ms\.extract"):
        ms.replay(str(llama), ROWS, endpoint="http://127.0.0.1:9/v1")


def test_replay_generates_where_no_answer_is_given(llama: Path):
    greedy, drawn, given = ms.replay(
        str(llama),
        [{"question": "who?"}, {"question": "what?", "generated_answer": " fox"}],
        **{**SETTINGS, "samples": 1, "temperature": 1.0},
    )
    assert [greedy["sample"], drawn["sample"], given["generated_answer"]] == [0, 1, " fox"]
