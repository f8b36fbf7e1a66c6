"""A model as judge: what it is asked, what its replies mean, and that nothing is asked twice."""

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import millstream as ms
from millstream.core.lines import read_lines
from millstream.core.remote import to_path
from millstream.errors import BadSetting, BadSource, MillstreamError, RemoteError
from millstream.traces.judge import LocalJudge, prompt_of, replies_file, verdict_of
from millstream.traces.kind import LabelSettings
from millstream.traces.label import label
from millstream.traces.rules import rule_of
from support.commands import run_here
from support.model_server import ModelServer
from support.nursery import Nursery

ANSWERS = {
    "Paris.": "CORRECT",
    "the city on the Seine": "CORRECT",
    "London": "INCORRECT",
    "Paris or Lyon": "INCORRECT",
    "near Versailles": "UNSURE",
    "I don't know": None,  # not asked: it declines
    "": None,
}
EXPECTED = ["right", "right", "wrong", "wrong", "ambiguous", "refused", None]


def graded(prompt: str) -> str:
    match = re.search(r"^Answer to grade: (.*)$", prompt, re.M)
    assert match and "Question: Capital of France?" in prompt and "Correct answers: Paris; Lutetia" in prompt
    return f"{ANSWERS[match[1]]}."


@pytest.fixture
def server(model_server: ModelServer) -> ModelServer:
    model_server.reply = graded
    return model_server


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write(tmp_path / "s", list(ANSWERS))


def write(path: Path, answers: list[str]) -> Path:
    with ms.TraceWriter(path, shard_records=3) as writer:
        for number, text in enumerate(answers):
            row = {"question_id": f"q{number}", "question": "Capital of France?", "generated_answer": text}
            writer.append({**row, "aliases": ["Paris", "Lutetia"], "hidden": np.zeros(3, np.float16)})
    return path


def column(store: Path, name: str) -> list[Any]:
    return pq.read_table(store / "labels.parquet").column(name).to_pylist()


def asked(server: ModelServer) -> list[str]:
    return [body["messages"][-1]["content"] for body in server.seen]


def test_the_judge_decides_and_its_agreement_with_the_string_rule_is_recorded(server: ModelServer, store: Path) -> None:
    done = label(store, rule="judge", endpoint=server.url)
    assert column(store, "verdict") == EXPECTED
    assert column(store, "source") == ["judge" if verdict else None for verdict in EXPECTED]
    assert done.rule == "judge:tiny" and done.label_version.startswith("judge:tiny-2-")
    body = server.seen[0]
    assert body["temperature"] == 0 and body["max_tokens"] == 16 and body["model"] == "tiny"
    # The default rule calls "Paris or Lyon" right and "the city on the Seine" wrong.
    (found,) = done.agreements
    assert (found.records, found.agreement, found.kappa) == (4, 0.5, 0)
    about = pq.read_metadata(done.path).metadata
    recorded = json.loads(about[b"millstream.agreements"])
    assert recorded == [
        {"first": "judge:tiny", "second": "the rule default", "records": 4, "agreement": 0.5, "kappa": 0.0}
    ]


def test_nothing_is_asked_twice(server: ModelServer, store: Path, tmp_path: Path) -> None:
    label(store, rule="judge", endpoint=server.url)
    assert len(asked(server)) == len(set(asked(server))) == 5
    label(store, rule="judge", endpoint=server.url)
    assert len(asked(server)) == 5 and column(store, "verdict") == EXPECTED
    server.models.append("other")
    label(store, rule="judge", endpoint=server.url, model="other")
    assert len(asked(server)) == 10
    same = write(tmp_path / "same", ["London", "London", "London"])
    label(same, rule="judge", endpoint=server.url, model="tiny")
    assert len(asked(server)) == 11 and column(same, "verdict") == ["wrong"] * 3


def test_the_command_prints_agreement_and_contradictions_in_one_line(
    server: ModelServer, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = "sk-secret"
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    code, out, err = run_here("label", store, "rule=judge", f"endpoint={server.url}", "key_env=JUDGE_KEY")
    assert code == 0, err
    assert "judge:tiny and the rule default agree on 50.0% of 4 answers, Cohen's kappa 0.00" in err
    assert not any(b"sk-secret" in file.read_bytes() for file in store.iterdir())
    assert "sk-secret" not in err + out
    code, _, err = run_here("label", store, "rule=judge")
    assert code == 2 and "endpoint=" in err


def test_labelling_that_was_killed_asks_only_for_the_rest(
    server: ModelServer, nursery: Nursery, tmp_path: Path
) -> None:
    server.reply = lambda prompt: "CORRECT"
    store = write(tmp_path / "s", [f"answer {number}" for number in range(200)])
    code = (
        "import os, signal, sys; from millstream.traces import judge; from millstream.traces.label import label\n"
        "append, left = judge.append_lines, [70]\n"
        "def counted(*args, **options):\n"
        "    append(*args, **options)\n"
        "    left[0] -= 1\n"
        "    left[0] or os.kill(os.getpid(), signal.SIGKILL)\n"
        "judge.append_lines = counted\n"
        "label(sys.argv[1], rule='judge', endpoint=sys.argv[2])"
    )
    child = nursery.run(code, store, server.url)
    assert child.code == -signal.SIGKILL and not (store / "labels.parquet").exists()
    assert len(read_lines(store / "judge.jsonl")[0]) == 70
    label(store, rule="judge", endpoint=server.url)
    keys = [row["key"] for row in read_lines(store / "judge.jsonl")[0]]
    assert len(keys) == len(set(keys)) == 200
    assert column(store, "verdict") == ["right"] * 200


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("CORRECT", "right"),
        ("**Incorrect**", "wrong"),
        ("Unsure.", "ambiguous"),
        ("not correct", "wrong"),
        ("INCORRECT. The correct answer is Paris", "wrong"),
        ("<think>Is it correct? No, incorrect.</think>\n\nUNSURE", "ambiguous"),
        ("The answer is correct.", "right"),
        ("It may be correct or incorrect", None),
        ("incorrectly", None),
        ("", None),
    ],
)
def test_a_reply_means_a_verdict_only_if_it_is_clear(reply: str, verdict: str | None) -> None:
    assert verdict_of(reply) == verdict


def test_unclear_replies_and_refused_requests_leave_answers_unlabelled(server: ModelServer, store: Path) -> None:
    server.reply = lambda prompt: "perhaps" if "Seine" in prompt else graded(prompt)
    server.refuses = lambda body: "context too long" if "Lyon" in body["messages"][0]["content"] else None
    done = label(store, rule="judge", endpoint=server.url)
    assert column(store, "verdict") == ["right", None, "wrong", None, "ambiguous", "refused", None]
    assert [note.partition(" unlabelled")[0] for note in done.notes] == ["1 answer", "1 answer"]
    assert "context too long" in done.notes[1]
    server.refuses = lambda body: None
    label(store, rule="judge", endpoint=server.url)
    assert column(store, "verdict")[3] == "wrong"  # a refusal is not kept


def test_a_server_that_refuses_everything_is_an_error(server: ModelServer, tmp_path: Path) -> None:
    server.refuses = lambda body: "this model has no chat template"
    store = write(tmp_path / "s", [f"answer {number}" for number in range(100)])
    with pytest.raises(RemoteError, match="no chat template"):
        label(store, rule="judge", endpoint=server.url)
    assert len(server.seen) < 100 and not (store / "labels.parquet").exists()


def test_a_local_model_judges_like_one_prompt_at_a_time(llama: Path, tmp_path: Path) -> None:
    judge = LocalJudge(str(llama), 6)
    assert judge.name.startswith("llama@")
    prompts = [(str(number), "what is " + "the fox " * number) for number in range(9)]
    prompts.append(("long", "fox " * 200))
    together = {key: (reply, problem) for key, reply, problem in judge.replies(prompts)}
    assert together.pop("long") == (None, "longer than the context of the model, 128 tokens")
    for key, text in prompts[:-1]:
        assert next(judge.replies([(key, text)]))[1] == together[key][0]


def test_the_command_takes_the_folder_of_a_local_model(llama: Path, tmp_path: Path) -> None:
    store = write(tmp_path / "s", ["Paris", "London", "London"])
    code, _, err = run_here("label", store, "rule=judge", f"model={llama}")
    assert code == 0 and "2 answers unlabelled: longer than the context of the model, 128 tokens" in err
    large = shutil.copytree(llama, tmp_path / "large")
    config = json.loads((large / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (large / "config.json").write_text(json.dumps(config))
    code, _, err = run_here("label", store, "rule=judge", f"model={large}", "max_new_tokens=2")
    assert code == 0 and "3 answers unlabelled: the judge replied none of the three words" in err
    rows, _ = read_lines(store / "judge.jsonl")
    assert len(rows) == 2 and {row["model"] for row in rows} == {LocalJudge(str(large), 2).name}


@pytest.mark.parametrize(
    "settings",
    [
        LabelSettings(rule="judge"),
        LabelSettings(rule="em", model="m"),
        LabelSettings(rule="em", endpoint="http://h/v1"),
        LabelSettings(rule="judge", model="m", key_env="KEY"),
        LabelSettings(rule="judge@0.5", model="m"),
    ],
)
def test_contradictory_settings_are_rejected(settings: LabelSettings) -> None:
    with pytest.raises(BadSetting):
        rule_of(settings)


def test_a_store_without_questions_cannot_be_judged(server: ModelServer, tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "s") as writer:
        writer.append({"question_id": "q", "generated_answer": "Paris", "aliases": ["Paris"]})
    with pytest.raises(BadSource, match="question"):
        label(tmp_path / "s", rule="judge", endpoint=server.url)


def test_wrong_endpoints_are_one_line(server: ModelServer, store: Path) -> None:
    with pytest.raises(MillstreamError, match="has no model 'big', only: tiny"):
        label(store, rule="judge", endpoint=server.url, model="big")
    assert not (store / "labels.parquet").exists()


def test_replies_for_a_store_at_a_url_are_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, other = (replies_file(to_path(f"s3://bucket/{name}")) for name in ("a", "b"))
    assert one != other and one.parent == other.parent == tmp_path / "millstream" / "judge"


def test_texts_with_braces_and_breaks_reach_the_judge_as_they_are() -> None:
    text = prompt_of("What is {x}?", ["{0}", "b"], "a\n{answer}")
    many = prompt_of("?", ["Paris", *(f"alias {number}" for number in range(90)), " paris"], "a")
    assert "Correct answers: Paris; alias 0; " in many and many.count(";") == 19 and "paris" not in many
    assert "Question: What is {x}?" in text and "answers: {0}; b\n" in text and "grade: a\n{answer}\n" in text
