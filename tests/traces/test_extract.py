"""Every question becomes exactly one trace, bit for bit the same after a rerun, a kill, Ctrl-C or a failure."""

import json
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import millstream as ms
from millstream.core.console import ignore_message
from millstream.core.record import Tensor
from millstream.errors import BadSetting, BadSource, ConfigMismatch, EngineError, StoreFull
from millstream.traces.extract import ExtractWorker
from millstream.traces.llm.fields import TIERS, parse_fields
from millstream.traces.llm.model import ModelSettings, describe_model
from millstream.traces.llm.questions import Question, read_questions
from millstream.traces.llm.tracer import EncodedQuestion, Tracer
from millstream.traces.store.traces import Traces
from support.commands import run_here as run
from support.extracting import (
    COUNT,
    SETTINGS,
    as_arguments,
    assert_all_sealed,
    assert_same_traces,
    recovered_ids,
    run_and_send,
    shard_files,
    traces_by_id,
    write_questions,
)
from support.extras import need
from support.making import same
from support.nursery import Nursery
from support.remote_stores import SPOOL, environment, remote
from support.s3_server import Bucket

need("transformers")


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("questions") / "q.jsonl")


@pytest.fixture(scope="module")
def whole(llama: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All traces, extracted without interruption; read-only."""
    path = tmp_path_factory.mktemp("whole") / "store"
    ms.extract(questions, path, model=str(llama), **SETTINGS)
    return path


def extract(questions: Any, path: Path, model: Path, **settings: Any) -> Any:
    return ms.extract(questions, path, model=str(model), **{**SETTINGS, **settings})


def opened(path: Path) -> Traces:
    traces = ms.open(path)
    assert isinstance(traces, Traces)
    return traces


# -- the store


def test_every_question_becomes_a_record_with_its_id_and_texts(questions: Path, whole: Path):
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    found = traces_by_id(whole)
    assert found.keys() == {row["id"] for row in rows}
    for row in rows:
        ours = found[row["id"]]
        assert [ours[name] for name in ("question", "answer", "aliases")] == [
            row[name] for name in ("question", "answer", "aliases")
        ]
        assert (ours["status"], ours["error"]) == ("ok", None)
    assert_all_sealed(whole)


def test_the_result_summarises_the_store(llama: Path, tmp_path: Path):
    done = extract([Question("a", "who?"), Question("b", "why?")], tmp_path / "s", llama)
    assert (done.path, done.records, done.errors, done.interrupted) == (tmp_path / "s", 2, 0, False)
    assert done.bytes == opened(tmp_path / "s").num_bytes > 0


@pytest.mark.parametrize("tier", TIERS)
def test_a_tier_has_its_fields_and_no_others(tier: str, llama: Path, questions: Path, tmp_path: Path):
    extract(questions, tmp_path / "s", llama, tier=tier, num_samples=3)
    traces = opened(tmp_path / "s")
    expected = parse_fields(tier, None, stored="float16").schema()
    tensors = {name: kind for name, kind in traces.fields.items() if isinstance(kind, Tensor)}
    assert {name: str(kind) for name, kind in tensors.items()} == {name: str(kind) for name, kind in expected.items()}
    tensors.pop("given_logprobs")
    assert all(record[name] is not None for record in traces for name in tensors)


def test_fields_with_layers_keep_those_layers(llama: Path, questions: Path, whole: Path, tmp_path: Path):
    extract(questions, tmp_path / "s", llama, fields="hidden[0,2],edges", num_samples=5)
    for name, found in traces_by_id(tmp_path / "s").items():
        expected: Any = opened(whole).by_id(name)
        hidden: Any = found["hidden"]
        assert np.array_equal(found["tokens"], expected["tokens"])  # pyright: ignore
        assert np.allclose(hidden.astype(np.float32), expected["hidden"][[0, 2]].astype(np.float32), atol=4e-3)
        assert found["edge_source"] is not None
        assert "attention" not in found and "nodes" not in found


def test_it_prints_the_number_of_questions_and_estimates_size_and_time(
    llama: Path, questions: Path, tmp_path: Path, capsys: Any
):
    extract(questions, tmp_path / "s", llama, num_samples=6)
    capsys.readouterr()
    extract(questions, tmp_path / "s", llama)
    lines = capsys.readouterr().err.splitlines()
    size = r"\d+(\.\d)? [kMGT]?B"
    expected = [
        rf"questions: {COUNT}",
        r"prompt \(own\): 'Q: \{question\}'; an answer ends at '\\n' or end of text",
        rf"{tmp_path}/s: 6 of {COUNT} done already, {COUNT - 6} left in \d+ batches",
        rf"{size} per trace in the first batch; about {size} in total, {size} free, about \d+ (s|min \d+ s)",
    ]
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line


def test_the_estimated_size_is_close_to_the_real_one(llama: Path, questions: Path, tmp_path: Path, capsys: Any):
    done = extract(questions, tmp_path / "s", llama)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "in total" in line]
    amount, unit = line.split("about ")[1].split(" ")[:2]
    foreseen = float(amount) * {"kB": 1e3, "MB": 1e6}[unit]
    assert 0.8 < foreseen / done.bytes < 1.25


def test_repeated_questions_are_left_out_and_reported(llama: Path, tmp_path: Path, capsys: Any):
    repeated = [Question("a", "who?"), Question("a", "where?"), Question("b", "Who"), Question("c", "why?")]
    assert extract(repeated, tmp_path / "s", llama).records == 2
    assert "questions: 2, 1 with a repeated id left out, 1 with a repeated text left out" in (capsys.readouterr().err)


# -- running again


def test_running_again_changes_nothing(llama: Path, questions: Path, whole: Path, capsys: Any):
    before = shard_files(whole)
    done = extract(questions, whole, llama)
    assert (done.records, done.errors) == (COUNT, 0)
    assert shard_files(whole) == before
    assert f"{COUNT} of {COUNT} done already, 0 left in 0 batches" in capsys.readouterr().err


@pytest.mark.parametrize("more", [{"memory": "3MB"}, {"shard_records": 2}, {"shard_bytes": "1MB"}, {"num_samples": 3}])
def test_settings_that_do_not_change_a_trace_may_change(
    more: dict[str, Any], llama: Path, questions: Path, whole: Path
):
    before = shard_files(whole)
    assert extract(questions, whole, llama, **more).records == COUNT
    assert shard_files(whole) == before


def test_more_samples_are_appended_to_the_store(llama: Path, questions: Path, tmp_path: Path):
    extract(questions, tmp_path / "s", llama, num_samples=8)
    first, ids = shard_files(tmp_path / "s"), opened(tmp_path / "s").ids
    assert set(ids) == {f"q{i}" for i in range(8)}
    assert extract(questions, tmp_path / "s", llama).records == COUNT
    assert shard_files(tmp_path / "s").items() >= first.items()
    assert opened(tmp_path / "s").ids[:8] == ids
    assert len(traces_by_id(tmp_path / "s")) == COUNT


def test_a_shuffled_set_is_extended_in_its_shuffled_order(llama: Path, questions: Path, tmp_path: Path):
    for count in (4, 7):
        extract(questions, tmp_path / "s", llama, tier="stats", num_samples=count, shuffle_seed=3)
    expected = read_questions(questions, num_samples=7, shuffle_seed=3).questions
    assert set(opened(tmp_path / "s").ids) == {question.id for question in expected}


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"max_new_tokens": 5}, "max_new_tokens: 4 -> 5"),
        ({"tier": "stats"}, "fields: 'heads,laplacian,hidden,post_norm,attention' -> 'heads,laplacian'"),
        ({"temperature": 0.5}, r"temperature: 0.0 -> 0.5, seed: None -> 0"),
        ({"prompt": "A: {question}"}, r"prompt: 'Q: \{question\}' -> 'A: \{question\}'"),
        ({"stop": "ox"}, r"stop: \['\\n'\] -> \['ox'\]"),
        ({"stored": "float32"}, "stored: 'float16' -> 'float32'"),
        ({"p_true": True}, "p_true: False -> True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_changed_setting_is_refused_and_named(
    changed: dict[str, Any], difference: str, llama: Path, questions: Path, whole: Path
):
    before = shard_files(whole)
    with pytest.raises(ConfigMismatch, match=difference):
        extract(questions, whole, llama, **changed)
    assert shard_files(whole) == before


def test_a_model_whose_weights_changed_is_another_model(llama: Path, questions: Path, tmp_path: Path):
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    extract(questions, tmp_path / "s", model, num_samples=2)
    (weights,) = model.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ConfigMismatch, match=r"\(revision: '\w+' -> '\w+'\)"):
        extract(questions, tmp_path / "s", model, num_samples=2)


def test_other_questions_with_the_same_ids_are_refused(llama: Path, whole: Path):
    with pytest.raises(ConfigMismatch, match="q3"):
        extract([Question("q3", "why?")], whole, llama, retry_errors=True)


# -- killed and interrupted


@pytest.mark.parametrize("temperature", [0, 1])
def test_killed_several_times_it_ends_with_the_same_store(
    temperature: int, nursery: Nursery, llama: Path, questions: Path, whole: Path, tmp_path: Path
):
    settings = {**SETTINGS, "temperature": temperature}
    if temperature:
        whole = tmp_path / "whole"
        ms.extract(questions, whole, model=str(llama), **settings)
    store, ids = tmp_path / "s", opened(whole).ids
    command = ["extract", questions, store, *as_arguments({"model": llama, **settings})]
    done = 0
    for more in (1, 6, 8):
        assert run_and_send(nursery, *command, after=more, send=signal.SIGKILL).code == -signal.SIGKILL
        done += more
        assert recovered_ids(store) == ids[:done]
    ms.extract(questions, store, model=str(llama), **settings)
    assert opened(store).ids == ids
    assert_same_traces(store, whole)
    assert_all_sealed(store)


def test_killed_and_resumed_at_a_url_it_ends_with_the_same_store_to_label_and_featurize(
    nursery: Nursery, s3: Bucket, llama: Path, questions: Path, whole: Path, tmp_path: Path, monkeypatch: Any
):
    url, environ = f"{s3.url}/traces", environment(tmp_path / "spool")
    for name, value in {**environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    command = ["extract", questions, url, *as_arguments({"model": llama, **SETTINGS})]
    assert run_and_send(nursery, *command, after=8, send=signal.SIGKILL).code == -signal.SIGKILL
    code, _, err = run(*command)
    assert code == 0 and f"8 of {COUNT} done already" in err and f"millstream label {url}" in err
    found = {record["question_id"]: record for record in opened(remote(url))}
    assert len(found) == len(opened(remote(url))) == COUNT
    expected = traces_by_id(whole)
    for name, record in expected.items():
        assert same({key: found[name][key] for key in record}, record)

    assert run("label", url)[0] == 0
    assert (remote(url) / "labels.parquet").is_file()
    code, _, err = run("featurize", url, f"{url}-last", "feature=layers", "token=last")
    assert code == 0 and "labels copied" in err
    assert opened(remote(f"{url}-last")).ids == opened(remote(url)).ids
    code, _, err = run(*command[:3], "--retry-errors", *command[3:])
    assert code == 1 and "millstream copy" in err


def test_traces_that_a_lost_worker_has_not_uploaded_are_an_error_and_not_forgotten(
    s3: Bucket, llama: Path, questions: Path, tmp_path: Path, monkeypatch: Any
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(SPOOL, str(tmp_path / "here"))
    url, settings = remote(f"{s3.url}/traces"), {"tier": "stats", "num_samples": 4}

    def die(worker: ExtractWorker) -> None:
        worker._writer._shard.release()
        monkeypatch.setenv(SPOOL, str(tmp_path / elsewhere))

    for elsewhere in ("here", "elsewhere"):
        with monkeypatch.context() as patch:
            patch.setattr(ExtractWorker, "close", die)
            if elsewhere == "here":  # on this machine: the last one uploads what it left
                assert extract(questions, url, llama, **settings).records == 4
                continue
            with pytest.raises(EngineError, match="2 traces"):
                extract(questions, url, llama, **{**settings, "num_samples": 6})
    assert len(opened(url)) == 4
    monkeypatch.setenv(SPOOL, str(tmp_path / "here"))  # it is back
    assert extract(questions, url, llama, **{**settings, "num_samples": 6}).records == 6


def test_sampled_answers_differ_from_greedy_ones_and_between_seeds(llama: Path, questions: Path, tmp_path: Path):
    answers: list[list[object]] = []
    for name, more in (("a", {"temperature": 0}), ("b", {"temperature": 1}), ("c", {"temperature": 1, "seed": 1})):
        extract(questions, tmp_path / name, llama, tier="stats", num_samples=4, **more)
        found = traces_by_id(tmp_path / name)
        answers.append([found[f"q{i}"]["tokens"].tolist() for i in range(4)])  # pyright: ignore
    assert answers[0] != answers[1] != answers[2] != answers[0]


def test_ctrl_c_finishes_the_current_batch_and_the_same_command_resumes(
    nursery: Nursery, llama: Path, questions: Path, whole: Path, tmp_path: Path
):
    store = tmp_path / "s"
    command = ["extract", questions, store, *as_arguments({"model": llama, **SETTINGS})]
    done = run_and_send(nursery, *command, after=3, send=signal.SIGINT)
    assert done.code == 130
    log = done.err
    assert "finishing the current batch; press Ctrl-C again" in log
    assert log.endswith("interrupted; progress saved; run the same command to resume\n")
    assert "Traceback" not in log
    assert_all_sealed(store)
    done = len(opened(store))
    assert 3 <= done < COUNT
    code, _, err = run(*command)
    assert code == 0
    assert f"{done} of {COUNT} done already" in err
    assert_same_traces(store, whole)


# -- failures


def test_a_question_that_is_too_long_becomes_an_error_record(llama: Path, whole: Path, tmp_path: Path):
    done = extract(write_questions(tmp_path / "q.jsonl", too_long=(2, 9)), tmp_path / "s", llama)
    assert (done.records, done.errors) == (COUNT, 2)
    found, good = traces_by_id(tmp_path / "s"), traces_by_id(whole)
    failed = {name: trace for name, trace in found.items() if trace["status"] == "error"}
    assert failed.keys() == {"q2", "q9"}
    for trace in failed.values():
        assert "and 4 new tokens exceed the context of 128" in str(trace["error"])
        assert trace["tokens"] is None and trace["hidden"] is None and trace["generated_answer"] is None
        assert trace["aliases"]
    for name in good.keys() - failed.keys():
        assert found[name]["generated_text"] == good[name]["generated_text"]


def test_a_question_that_needs_more_than_memory_becomes_an_error_record_and_others_are_traced(
    llama: Path, tmp_path: Path, capsys: Any
):
    questions = [Question(f"q{i}", f"who {i}? " * (14 if i == 1 else 1)) for i in range(3)]
    done = extract(questions, tmp_path / "s", llama, tier="full", memory="500kB")
    assert (done.records, done.errors) == (3, 1)
    assert "more than memory=500.0 kB" in traces_by_id(tmp_path / "s")["q1"]["error"]
    (total,) = re.findall(r"about ([\d.]+) kB in total", capsys.readouterr().err)
    assert float(total) < 100  # without the one that is too long
    with pytest.raises(BadSource, match="none of the first"):
        extract(questions[1:2], tmp_path / "t", llama, tier="full", memory="500kB")


def refuse(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make these questions fail."""
    real = Tracer._problem  # pyright: ignore[reportPrivateUsage]

    def problem(self: Tracer, encoded: EncodedQuestion) -> str | None:
        return "not today" if encoded.question.id in names else real(self, encoded)

    monkeypatch.setattr(Tracer, "_problem", problem)


def test_failed_questions_are_retried_only_on_request(
    llama: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    store = tmp_path / "s"
    with monkeypatch.context() as patch:
        refuse(patch, "q5", "q6", "q13")
        assert extract(questions, store, llama, shard_records=4).errors == 3
    before = shard_files(store)
    assert extract(questions, store, llama, shard_records=4).errors == 3
    assert shard_files(store) == before
    capsys.readouterr()
    done = extract(questions, store, llama, shard_records=4, retry_errors=True)
    assert (done.records, done.errors) == (COUNT, 0)
    assert "retrying 3 questions" in capsys.readouterr().err
    assert {record["status"] for record in traces_by_id(store).values()} == {"ok"}
    after = shard_files(store)
    untouched = [name for name in before if not name.startswith(("shard-00001", "shard-00003"))]
    assert len(untouched) == 8
    assert {name: after[name] for name in untouched} == {name: before[name] for name in untouched}
    assert opened(store).by_id("q13")["status"] == "ok"


def test_a_question_that_fails_again_is_stored_once(llama: Path, tmp_path: Path):
    questions = write_questions(tmp_path / "q.jsonl", count=8, too_long=(2,))
    for retry in (False, True, True):
        done = extract(questions, tmp_path / "s", llama, retry_errors=retry)
        assert (done.records, done.errors) == (8, 1)
    assert traces_by_id(tmp_path / "s").keys() == {f"q{i}" for i in range(8)}


def test_only_failures_among_the_given_questions_are_retried(llama: Path, tmp_path: Path):
    questions = write_questions(tmp_path / "q.jsonl", count=8, too_long=(2, 7))
    extract(questions, tmp_path / "s", llama)
    done = extract(questions, tmp_path / "s", llama, num_samples=5, retry_errors=True)
    assert (done.records, done.errors) == (8, 2)


def test_retrying_in_a_new_store_retries_nothing(llama: Path, questions: Path, tmp_path: Path, capsys: Any):
    assert extract(questions, tmp_path / "s", llama, num_samples=2, retry_errors=True).records == 2
    assert "retrying 0 questions" in capsys.readouterr().err


def test_if_the_whole_first_batch_fails_nothing_is_written(llama: Path, tmp_path: Path):
    questions = write_questions(tmp_path / "q.jsonl", count=6, too_long=range(6))
    with pytest.raises(BadSource, match="context of 128"):
        extract(questions, tmp_path / "s", llama)
    assert len(opened(tmp_path / "s")) == 0
    assert_all_sealed(tmp_path / "s")


def test_a_store_left_empty_by_a_bad_setting_can_be_used(llama: Path, questions: Path, tmp_path: Path):
    with pytest.raises(BadSource, match="128"):
        extract(questions, tmp_path / "s", llama, max_new_tokens=128)
    assert extract(questions, tmp_path / "s", llama, num_samples=2).records == 2


def test_more_than_fits_on_the_disk_is_refused_after_the_first_batch(
    llama: Path, questions: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**9, used=10**9, free=1000))  # pyright: ignore
        with pytest.raises(StoreFull) as caught:
            extract(questions, tmp_path / "s", llama)
        assert str(tmp_path / "s") in str(caught.value) and f"{COUNT} traces" in str(caught.value)
        assert_all_sealed(tmp_path / "s")
        first = len(opened(tmp_path / "s"))
        assert 1 <= first < COUNT / 2
    extract(questions, tmp_path / "s", llama)
    assert_same_traces(tmp_path / "s", whole)


# -- the command line

WRONG = {
    "no model": ["tier=full", "model="],
    "a misspelt setting": ["teir=full"],
    "unknown tier": ["tier=all"],
    "unknown field": ["fields=everything"],
    "unknown layer": ["fields=hidden[9]"],
    "unknown attention layer": ["fields=attention[7]"],
    "not a number": ["temperature=hot"],
    "not a size": ["memory=lots"],
    "negative shard size": ["shard_bytes=-1"],
    "no records": ["shard_records=0"],
    "no tokens": ["max_new_tokens=0"],
    "no samples": ["num_samples=0"],
    "malformed columns": ["columns=question"],
    "prompt without placeholder": ["prompt=Answer me"],
    "no chat template": ["prompt=chat"],
    "beam search with sampling": ["num_beams=2", "temperature=1"],
    "top_k without sampling": ["top_k=5"],
    "unknown dtype": ["dtype=int8"],
    "unknown stored dtype": ["stored=int8"],
    "not a setting": ["full"],
    "unknown engine": ["--engine", "spark"],
    "workers without a cluster": ["--workers", "2"],
    "no workers": ["--engine", "ray", "--workers", "0"],
}


@pytest.mark.parametrize("case", WRONG)
def test_a_bad_setting_prints_one_line_exits_with_2_and_writes_nothing(
    case: str, llama: Path, questions: Path, tmp_path: Path
):
    code, out, err = run("extract", questions, tmp_path / "s", f"model={llama}", "device=cpu", *WRONG[case])
    assert (code, out) == (2, "")
    assert err.startswith("millstream: ") and err.count("\n") == 1
    assert not (tmp_path / "s").exists()


def test_code_that_comes_with_a_model_runs_only_if_trusted(llama: Path, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(llama, model)
    config = json.loads((model / "config.json").read_text())
    changed = {"model_type": "its-own", "auto_map": {"AutoConfig": "code.Config"}}
    (model / "config.json").write_text(json.dumps({**config, **changed}))
    (model / "code.py").write_text(
        f"from pathlib import Path\nfrom transformers import LlamaConfig\nPath({str(ran)!r}).touch()\n"
        "class Config(LlamaConfig):\n    model_type = 'its-own'\n"
    )
    describe_model(ModelSettings(str(llama)), notify=ignore_message)
    with pytest.raises(BadSource, match="trust_remote_code=true"):
        describe_model(ModelSettings(str(model)), notify=ignore_message)
    assert not ran.exists()
    assert describe_model(ModelSettings(str(model), trust_remote_code=True), notify=ignore_message).size.layers == 3
    assert ran.exists()


@pytest.mark.parametrize(
    ("questions_named", "model_named", "message"),
    [("none.jsonl", None, "none.jsonl"), (None, "none/such", "model=none/such")],
    ids=["questions", "model"],
)
def test_missing_questions_or_models_print_one_line_and_exit_with_1(
    questions_named: str | None, model_named: str | None, message: str, llama: Path, questions: Path, tmp_path: Path
):
    code, out, err = run(
        "extract", questions_named or questions, tmp_path / "s", f"model={model_named or llama}", "device=cpu"
    )
    assert (code, out) == (1, "")
    assert err.startswith("millstream: ") and err.count("\n") == 1 and message in err
    assert not (tmp_path / "s").exists()


def test_the_command_prints_its_result_and_the_next_step_and_json_alone_on_stdout(
    llama: Path, questions: Path, tmp_path: Path
):
    settings = as_arguments({"model": llama, **SETTINGS, "num_samples": 3})
    code, out, err = run("extract", questions, tmp_path / "s", *settings, "--json")
    assert code == 0
    size = opened(tmp_path / "s").num_bytes
    expected = {"path": str(tmp_path / "s"), "records": 3, "errors": 0, "bytes": size, "interrupted": False}
    assert json.loads(out) == expected
    assert err.splitlines()[-2].startswith(f"{tmp_path / 's'}: 3 traces, ")
    assert err.splitlines()[-1] == f"Next: millstream label {tmp_path / 's'}"


def test_the_command_counts_failures_and_says_how_to_retry(llama: Path, tmp_path: Path):
    questions = write_questions(tmp_path / "q.jsonl", count=4, too_long=(2,))
    settings = as_arguments({"model": llama, **SETTINGS})
    code, out, err = run("extract", questions, tmp_path / "s", *settings)
    assert (code, out) == (0, "")
    assert "4 traces, 1 of them failed (run again with --retry-errors)" in err
    code, _, err = run("extract", questions, tmp_path / "s", *settings, "--retry-errors")
    assert code == 0 and "retrying 1 questions" in err


def test_questions_are_read_before_a_model_is_looked_for(questions: Path, tmp_path: Path):
    with pytest.raises(BadSource, match=r"none\.jsonl"):
        extract(tmp_path / "none.jsonl", tmp_path / "s", Path("none/such"))


def test_questions_without_correct_answers_are_a_warning_before_a_model_is_looked_for(tmp_path: Path, capsys: Any):
    (tmp_path / "q.jsonl").write_text('{"id": "q0", "question": "Capital of France?"}\n')
    with pytest.raises(BadSource, match="cannot be loaded"):
        extract(tmp_path / "q.jsonl", tmp_path / "s", tmp_path)  # no model
    assert "no question has a correct answer" in capsys.readouterr().err


def test_prompts_are_checked_before_a_model_is_looked_for(questions: Path, tmp_path: Path):
    for wrong in ({"prompt": "{question} {docs}"}, {"prompt": "chat:{docs}"}, {"system": "{docs}"}):
        with pytest.raises(BadSetting, match="docs"):
            extract(questions, tmp_path / "s", tmp_path, **wrong)


def test_settings_are_checked_before_questions_are_read(llama: Path, tmp_path: Path):
    with pytest.raises(BadSetting, match="lots"):
        extract(tmp_path / "none.jsonl", tmp_path / "s", llama, memory="lots")
