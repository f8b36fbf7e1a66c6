"""Stored features equal those computed on the fly; a killed run resumes, and every record is written once."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream as ms
from millstream.core.batches import fetch_batch
from millstream.core.features import Feature
from millstream.core.memory import file_bytes
from millstream.errors import BadSetting, ConfigMismatch, SchemaMismatch
from millstream.traces.features import featurize
from support.commands import run_here
from support.loading import write_records
from support.nursery import Nursery

COUNT, FAILED = 40, (3, 17, 39)
GOOD = [number for number in range(COUNT) if number not in FAILED]
SCALARS = ["question_id", "question", "aliases", "status", "prompt_len", "score"]


def record(number: int) -> dict[str, object]:
    """An embedding and two layers, 3 to 7 tokens, three heads; some have failed and have no tensors."""
    rng = np.random.default_rng(number)
    tokens = 3 + number % 5
    attention = np.tril(rng.random((2, 3, tokens, tokens), np.float32))
    failed = number in FAILED
    return {
        "question_id": f"q{number}",
        "question": f"Wer mahlt {number}?",
        "aliases": ["die Mühle", str(number)],
        "status": "error" if failed else "ok",
        "prompt_len": 1 + number % 2,
        "score": None if number % 7 == 2 else number / 4,
        "logprobs": None if failed else rng.normal(size=tokens).astype(np.float32),
        "hidden": None if failed else rng.normal(size=(3, tokens, 4)).astype(np.float16),
        "attention": None if failed else attention / attention.sum(axis=-1, keepdims=True),
    }


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only."""
    path = tmp_path_factory.mktemp("traces") / "store"
    schema = {
        "logprobs": "float32[step]",
        "hidden": "float16[layer, token, dim]",
        "attention": "float32[layer, head, query, key]",
    }
    with ms.TraceWriter(path, shard_records=11, schema=schema) as writer:
        writer.extend(record(number) for number in range(COUNT))
    return path


def opened(path: Path) -> ms.Traces:
    traces = ms.open(path)
    assert isinstance(traces, ms.Traces)
    return traces


def on_the_fly(store: Path, feature: Feature, number: int) -> Any:
    """The feature of one record alone."""
    return feature(fetch_batch(opened(store), np.array([number]), feature.fields))


# -- the same as on the fly


@pytest.mark.parametrize("token", ["first", "last", "mean", "last_prompt", "first_answer", "mean_answer", "1", "-2"])
def test_stored_layers_equal_those_computed_on_the_fly(token: Any, store: Path, tmp_path: Path):
    featurize(store, tmp_path / "out", token=token, dtype="float32")
    place = int(token) if token.lstrip("-").isdigit() else token
    found = opened(tmp_path / "out")
    assert found.ids == [f"q{number}" for number in GOOD]
    for kept, number in zip(found, GOOD, strict=True):
        expected = on_the_fly(store, ms.features.layers(place), number)["layers"][0]
        assert np.array_equal(kept["layers"], expected)  # pyright: ignore


def test_layers_are_stored_in_the_given_dtype(store: Path, tmp_path: Path):
    for dtype in ("float16", "float32", "float64"):
        featurize(store, tmp_path / dtype, dtype=dtype)
        assert opened(tmp_path / dtype)[0]["layers"].dtype == np.dtype(dtype)  # pyright: ignore


@pytest.mark.parametrize("options", [{}, {"k": 2, "threshold": 0.1}], ids=["defaults", "k and threshold"])
def test_a_stored_graph_is_that_of_a_batch_of_one(options: dict[str, Any], store: Path, tmp_path: Path):
    featurize(store, tmp_path / "out", feature="graphs", dtype="float32", **options)
    found = opened(tmp_path / "out")
    assert found.ids == [f"q{number}" for number in GOOD]
    for kept, number in zip(found, GOOD, strict=True):
        expected = on_the_fly(store, ms.features.graphs(**options), number)
        assert kept.keys() == expected.keys() | set(SCALARS)
        for name, value in expected.items():
            assert np.array_equal(kept[name], value), name  # pyright: ignore


def test_stored_fields_are_the_fields_and_their_layers(store: Path, tmp_path: Path):
    featurize(store, tmp_path / "out", feature="fields", fields="logprobs, hidden[0,-1]")
    for kept, number in zip(opened(tmp_path / "out"), GOOD, strict=True):
        whole: Any = record(number)
        assert np.array_equal(kept["logprobs"], whole["logprobs"])  # pyright: ignore
        assert np.array_equal(kept["hidden"], whole["hidden"][[0, 2]])  # pyright: ignore
        assert "attention" not in kept


def test_a_budget_in_which_a_trace_does_not_fit_is_refused_with_one_that_does(store: Path, tmp_path: Path):
    with pytest.raises(BadSetting, match="Set at least memory=") as refused:
        featurize(store, tmp_path / "out", token="mean", memory=1)
    assert not (tmp_path / "out").exists()
    featurize(store, tmp_path / "out", token="mean", memory=str(refused.value).rpartition("memory=")[2])


@pytest.mark.parametrize("memory", ["1GB", "100kB"])
def test_the_memory_budget_does_not_change_the_result(memory: Any, store: Path, tmp_path: Path):
    featurize(store, tmp_path / "one", token="mean")
    featurize(store, tmp_path / "other", token="mean", memory=memory)
    ours, theirs = opened(tmp_path / "one"), opened(tmp_path / "other")
    assert ours.ids == theirs.ids
    assert all(np.array_equal(a["layers"], b["layers"]) for a, b in zip(ours, theirs, strict=True))  # pyright: ignore


def test_no_file_stays_mapped_beside_the_budget(tmp_path: Path):
    records = ({"question_id": f"q{i}", "hidden": np.full((2, 62_500), i, np.float32)} for i in range(100))
    write_records(tmp_path / "store", records)
    before, most = file_bytes(), 0

    def look(done: int, note: str = "") -> None:
        nonlocal most
        most = max(most, file_bytes() - before)

    options = {"feature": "fields", "fields": "hidden", "memory": "8MB"}
    done = featurize(tmp_path / "store", tmp_path / "out", progress=look, chunk_records=10, **options)
    assert done.records == 100
    assert most < 16e6, most  # 50 MB when the shard was mapped


@pytest.mark.parametrize("feature", ["layers", "graphs"])
def test_scalars_of_a_record_are_stored_with_its_features(feature: str, store: Path, tmp_path: Path):
    featurize(store, tmp_path / "out", feature=feature)
    for kept, number in zip(opened(tmp_path / "out"), GOOD, strict=True):
        expected = record(number)
        assert {name: kept[name] for name in SCALARS} == {name: expected[name] for name in SCALARS}


# -- what failed


def test_records_that_failed_are_left_out_and_counted(store: Path, tmp_path: Path):
    done = featurize(store, tmp_path / "out")
    assert (done.path, done.records, done.left_out) == (tmp_path / "out", len(GOOD), len(FAILED))
    assert done.bytes == opened(tmp_path / "out").num_bytes
    assert not {f"q{number}" for number in FAILED} & set(opened(tmp_path / "out").ids)


# -- run again


def shard_files(path: Path) -> dict[str, tuple[bytes, int]]:
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in sorted(path.glob("shard-*"))}


def test_running_again_changes_nothing(store: Path, tmp_path: Path):
    first = featurize(store, tmp_path / "out")
    before = shard_files(tmp_path / "out")
    assert featurize(store, tmp_path / "out") == first
    assert shard_files(tmp_path / "out") == before


def test_progress_is_reported_after_every_chunk(store: Path, tmp_path: Path):
    reported: list[int] = []
    featurize(store, tmp_path / "out", chunk_records=15, progress=lambda done, note="": reported.append(done))
    assert reported == [0, 15, 30, 40]


def test_after_a_kill_it_resumes_to_the_same_store(store: Path, nursery: Nursery, tmp_path: Path):
    code = (
        "import os, signal, sys\n"
        "from millstream.traces.features import featurize\n"
        "from millstream.traces.store.shard_writer import ShardWriter\n"
        "append, count = ShardWriter.append, 0\n"
        "def dying(self, record):\n"
        "    global count\n"
        "    append(self, record)\n"
        "    count += 1\n"
        "    if count == int(sys.argv[3]): os.kill(os.getpid(), signal.SIGKILL)\n"
        "ShardWriter.append = dying\n"
        "featurize(sys.argv[1], sys.argv[2], token='mean')"
    )
    featurize(store, tmp_path / "whole", token="mean")
    for more in (5, 20):
        killed = nursery.run(code, store, tmp_path / "out", more)
        assert killed.code == -signal.SIGKILL, killed.err
    done = featurize(store, tmp_path / "out", token="mean")
    assert (done.records, done.left_out) == (len(GOOD), len(FAILED))
    ours, theirs = opened(tmp_path / "out"), opened(tmp_path / "whole")
    assert [shard.records for shard in ours.shards] == [5, 20, len(GOOD) - 25]
    assert ours.ids == theirs.ids
    assert all(np.array_equal(a["layers"], b["layers"]) for a, b in zip(ours, theirs, strict=True))  # pyright: ignore


@pytest.mark.parametrize("changed", [{"token": "mean"}, {"feature": "graphs"}, {"dtype": "float32"}])
def test_another_feature_is_refused_with_the_changed_setting(changed: dict[str, Any], store: Path, tmp_path: Path):
    featurize(store, tmp_path / "out")
    before = shard_files(tmp_path / "out")
    (name,) = changed
    with pytest.raises(ConfigMismatch, match=rf"\({name}: '\w+' -> '{changed[name]}'\)"):
        featurize(store, tmp_path / "out", **changed)
    assert shard_files(tmp_path / "out") == before


def test_a_source_that_has_changed_is_refused(store: Path, tmp_path: Path):
    source = Path(shutil.copytree(store, tmp_path / "source"))
    featurize(source, tmp_path / "out")
    with ms.TraceWriter(source) as writer:
        writer.append({**record(1), "question_id": "another"})
    with pytest.raises(ConfigMismatch, match="source: '"):
        featurize(source, tmp_path / "out")


def test_records_without_an_id_are_refused(tmp_path: Path):
    with ms.TraceWriter(tmp_path / "s") as writer:
        writer.append({"hidden": np.zeros((2, 3, 4), np.float16)})
    with pytest.raises(SchemaMismatch, match="'question_id'"):
        featurize(tmp_path / "s", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- used


def test_a_loader_reads_stored_features(store: Path, tmp_path: Path):
    featurize(store, tmp_path / "out")
    feature = ms.features.fields("question_id", "layers")
    loader = ms.Loader(opened(tmp_path / "out"), features=feature, batch_size=8, seed=1)
    seen: list[str] = []
    for batch in loader:
        names: Any = batch["question_id"]
        layers: Any = batch["layers"]
        assert layers.shape == (len(names), 3, 4)
        seen += names
    assert sorted(seen) == sorted(f"q{number}" for number in GOOD)


# -- the command line


def run(*arguments: object) -> tuple[int, str, str]:
    return run_here("featurize", *arguments)


def test_the_command_prints_how_many_records_were_written_and_left_out(store: Path, tmp_path: Path):
    code, out, err = run(store, tmp_path / "out", "token=mean")
    assert (code, out) == (0, "")
    lines = err.splitlines()
    assert lines[0].startswith(f"{tmp_path}/out: 37 records, ") and "; 3 traces lack" in lines[0]
    assert lines[1] == f"Next: millstream inspect {tmp_path}/out"
    code, out, _ = run(store, tmp_path / "out", "token=mean", "--json")
    assert code == 0
    answer = json.loads(out)
    assert (answer["records"], answer["left_out"]) == (37, 3)


WRONG = {
    "no such feature": ["feature=words"],
    "fields without names": ["feature=fields"],
    "no such token": ["token=middle"],
    "no such field": ["field=states"],
    "no such field among several": ["feature=fields", "fields=logprobs,states"],
    "no edges": ["feature=graphs", "k=0"],
    "no such type": ["dtype=float7"],
    "no size": ["memory=lots"],
    "no size of a shard": ["shard_bytes=lots"],
    "a misspelt setting": ["tokn=last"],
    "no such engine": ["--engine", "spark"],
}


@pytest.mark.parametrize("case", WRONG)
def test_a_bad_setting_prints_one_line_exits_with_2_and_writes_nothing(case: str, store: Path, tmp_path: Path):
    code, out, err = run(store, tmp_path / "out", *WRONG[case])
    assert (code, out) == (2, "")
    assert err.startswith("millstream: ") and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_settings_without_effect_on_the_chosen_feature_are_named(store: Path, tmp_path: Path):
    code, _, err = run(store, tmp_path / "out", "feature=fields", "fields=logprobs", "token=first", "k=3")
    assert code == 0
    assert [line.partition("=")[0] for line in err.splitlines() if "has no effect on fields" in line] == ["token", "k"]


@pytest.mark.parametrize(
    "wrong", [{"token": "99"}, {"field": "logprobs"}, {"feature": "fields", "fields": "hidden[7]"}], ids=range(3)
)
def test_a_missing_token_is_a_bad_setting_with_the_record_number(wrong: dict[str, Any], store: Path, tmp_path: Path):
    with pytest.raises(BadSetting, match="record 0"):
        featurize(store, tmp_path / "out", **wrong)
