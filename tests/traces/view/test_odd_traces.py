"""Unusual stores are shown too: other dtypes, missing fields, damage, growth."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import millstream as ms
from millstream.classic.records import to_record
from millstream.core.tables import publish_table
from millstream.errors import MillstreamError
from millstream.traces.view.inside import TokenTexts
from support.making_traces import make_traces
from support.querying_traces import make_run, querying


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_traces(tmp_path / "traces", num=8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float16"])
def test_every_dtype_is_shown_as_numbers(tmp_path: Path, dtype: str):
    schema = {"tokens": "int32[token]", "logprobs": f"{dtype}[step]", "topk_ids": "int32[step, k]",
              "topk_logprobs": f"{dtype}[step, k]", "hidden": f"{dtype}[layer, token, dim]",
              "attention": f"{dtype}[layer, head, query, key]"}  # fmt: skip
    rng = torch.Generator().manual_seed(3)
    shapes = {"logprobs": (3,), "topk_logprobs": (3, 4), "hidden": (2, 6, 4), "attention": (2, 2, 6, 6)}
    values = {
        name: (torch.rand(shape, generator=rng) - 0.5).to(getattr(torch, dtype)) for name, shape in shapes.items()
    }
    with ms.TraceWriter(tmp_path / "s", schema=schema) as writer:
        writer.append({"tokens": np.arange(6, dtype=np.int32), "topk_ids": np.ones((3, 4), np.int32), **values})
    query = querying(tmp_path / "s")
    tokens = query("trace", number=0)["tokens"]
    assert tokens["logprobs"] == pytest.approx(values["logprobs"].float().tolist()) and tokens["start"] == 3
    probabilities = [[other["probability"] for other in step] for step in tokens["alternatives"]]
    np.testing.assert_allclose(probabilities, values["topk_logprobs"].float().exp(), rtol=1e-5)
    norms = torch.linalg.vector_norm(values["hidden"].float(), dim=2)
    np.testing.assert_allclose(query("layers", number=0)["norm"], norms, rtol=1e-5)
    assert query("attention", number=0, layer=1, head="1", k=1)["num_heads"] == 2


def test_nan_is_null_and_a_failed_record_is_empty(tmp_path: Path):
    names = {"tokens": "int32[token]", "logprobs": "float32[step]", "hidden": "float16[layer, token, dim]",
             "attention": "float16[layer, head, query, key]", "prompt_len": "int32"}  # fmt: skip
    with ms.TraceWriter(tmp_path / "s", schema=names) as writer:
        writer.append({"question": "a", "status": "error", **dict.fromkeys(names)})
        writer.append(
            {"question": "b", "status": "ok", "tokens": np.array([5, 6, 7], np.int32), "prompt_len": 1,
             "logprobs": np.array([np.nan, -np.inf], np.float32), "hidden": np.full((2, 3, 4), np.inf, np.float16),
             "attention": np.full((2, 1, 3, 3), np.nan, np.float16)}
        )  # fmt: skip
    query = querying(tmp_path / "s")
    assert query("trace", number=0)["tokens"]["ids"] == [] and query("trace", number=0)["num_layers"] == 0
    assert query("layers", number=0) is None and query("attention", number=0) is None
    assert query("trace", number=1)["tokens"]["logprobs"] == [None, None]
    assert query("layers", number=1)["cosine"] == [[None] * 3] * 2
    assert set(np.ravel(query("attention", number=1)["source"])) == {-1}


def test_tensors_named_like_text_fields_are_not_shown_as_text(tmp_path: Path):
    with ms.TraceWriter(tmp_path / "s") as writer:
        pair = {name: np.ones(2) for name in ("answer", "topk_ids", "topk_logprobs")}
        writer.append({"question": np.zeros(3), "attention": np.array(3.0), **pair})
    query = querying(tmp_path / "s")
    assert query("list")["rows"][0]["question"] is None and query("list", q="x")["total"] == 0
    trace = query("trace", number=0)
    assert trace["shapes"]["answer"] == [2] and trace["num_layers"] == 0 and trace["references"] == []


def test_an_empty_store_is_an_empty_list(tmp_path: Path):
    with ms.TraceWriter(tmp_path / "s"):
        pass
    query = querying(tmp_path / "s")
    assert query("about")["records"] == 0 and query("list")["rows"] == query("list", q="x")["rows"] == []


def test_attention_stored_for_the_last_tokens_is_shown_at_the_last_tokens(tmp_path: Path):
    weights = np.zeros((1, 1, 2, 5), np.float32)  # of tokens 3 and 4
    weights[0, 0, 0, 1], weights[0, 0, 1, 3], weights[0, 0, 1, 4] = 0.7, 0.6, 0.4
    with ms.TraceWriter(tmp_path / "s") as writer:
        writer.append({"tokens": np.arange(5), "attention": weights})
    shown = querying(tmp_path / "s")("attention", number=0, k=1)
    assert shown["source"] == [[-1], [-1], [-1], [1], [3]]


def test_damaged_labels_and_scores_are_reported_and_the_rest_is_shown(store: Path, tmp_path: Path):
    run = make_run(tmp_path / "run", store, {"lstm": {1: [0.5]}})
    for file, start in ((store / "labels.parquet", "No labels: "), (run / "predictions.parquet", "No scores: ")):
        whole = file.read_bytes()
        for broken in (whole[:50], b""):
            file.write_bytes(broken)
            query = querying(store, run=run)
            (problem,) = query("about")["problems"]
            assert problem.startswith(f"{start}{file}: is damaged") and "Next: " in problem
            assert len(query("list")["rows"]) == 8 and query("trace", number=1)["question"] == "Who mills 1?"
        file.write_bytes(whole)
    assert querying(store, run=run)("about")["problems"] == []


def test_a_table_without_predictions_is_reported(store: Path, tmp_path: Path):
    run = make_run(tmp_path / "run", store, {"lstm": {1: [0.5]}})
    publish_table(run / "predictions.parquet", pa.table({"record": [1], "score": [0.5]}))
    assert '"model" does not exist' in querying(store, run=run)("about")["problems"][0]


def test_a_reopened_page_shows_new_records(store: Path, tmp_path: Path):
    run = make_run(tmp_path / "run", store, {"lstm": {1: [0.5]}})
    scores = (run / "predictions.parquet").rename(tmp_path / "later")
    labels = (store / "labels.parquet").rename(tmp_path / "labels")
    query = querying(store, run=run)
    about = query("about")
    assert (about["records"], about["detectors"], about["verdicts"]) == (8, [], {"unlabelled": 8})
    more = make_traces(tmp_path / "more", num=3)
    with ms.TraceWriter(store) as writer:
        for record in ms.open(more):
            writer.append(record)
    labels.rename(store / "labels.parquet")
    scores.rename(run / "predictions.parquet")
    about = query("about")
    assert (about["records"], about["detectors"]) == (11, ["lstm"]) and set(about["verdicts"]) == {"right", "wrong"}
    assert query("list", size=500)["total"] == 11 and query("trace", number=10)["records"] == 11


def test_records_with_the_same_id_have_their_own_verdicts(tmp_path: Path):
    with ms.TraceWriter(tmp_path / "s") as writer:
        for _ in range(3):
            writer.append({"question_id": "q", "x": np.zeros(1)})
    verdicts = ["right", "wrong", "refused"]
    publish_table(tmp_path / "s" / "labels.parquet", pa.table({"question_id": ["q"] * 3, "verdict": verdicts}))
    query = querying(tmp_path / "s")
    assert [row["verdict"] for row in query("list")["rows"]] == verdicts
    assert query("trace", number=1)["labels"]["verdict"] == "wrong"


def test_scores_that_are_not_probabilities_are_ranked_to_find_the_worst_errors(store: Path, tmp_path: Path):
    verdicts = pq.read_table(store / "labels.parquet").column("verdict").to_pylist()
    right = [number for number, verdict in enumerate(verdicts) if verdict == "right"][:2]
    wrong = [number for number, verdict in enumerate(verdicts) if verdict == "wrong"][:2]
    lengths = {right[0]: [40.0], wrong[0]: [3.0], right[1]: [5.0], wrong[1]: [30.0]}
    query = querying(store, run=make_run(tmp_path / "run", store, {"length": lengths}))
    rows = query("list", sort="mistaken", detector="length")["rows"]
    assert {row["number"] for row in rows[:2]} == {right[0], wrong[0]}


def test_a_long_answer_is_clipped_in_the_list_and_complete_in_the_trace(tmp_path: Path):
    long, aliases = "word " * 4000, [f"alias {number}" for number in range(300)]
    with ms.TraceWriter(tmp_path / "s", schema={"aliases": "list<string>"}) as writer:
        writer.append({"question": long, "generated_answer": long, "aliases": aliases, "x": np.zeros(1)})
    query = querying(tmp_path / "s")
    (row,) = query("list", q="word 299")["rows"]
    assert long.startswith(row["answer"].removesuffix("…")) and len(str(row)) < 2000
    trace = query("trace", number=0)
    assert trace["answer"] == trace["question"] == long and trace["references"] == aliases


def test_token_ids_are_shown_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"is": 2}, unk_token="is")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    assert TokenTexts(tmp_path / "tokenizer.json").of([2, -100]) == ["is", "<-100>"]
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # not installed
    texts = TokenTexts(tmp_path / "tokenizer.json")
    assert texts.of([2]) == ["2"] and "pip install" in (texts.problem or "")


def test_a_damaged_shard_affects_only_its_records(tmp_path: Path):
    store = make_traces(tmp_path / "s", num=60)
    shutil.move(store / "shard-00000.arrow", tmp_path / "gone")
    query = querying(store)
    assert len(query("list")["rows"]) == 50  # the texts are in the sidecar
    with pytest.raises(MillstreamError, match=r"shard-00000\.arrow"):
        query("trace", number=3)
    assert query("trace", number=55)["tokens"]["ids"]


def test_layers_stored_step_by_step_are_joined(tmp_path: Path):
    rng = np.random.default_rng(0)
    hidden = rng.random((2, 7, 4), np.float32)
    attention = np.tril(rng.random((2, 3, 7, 7), np.float32))
    places = [(0, 5), (5, 6), (6, 7)]
    old = {
        "tokens": [7, 8, 9],
        "prompt_length": 5,
        "hidden_states": [[layer[None, low:high] for low, high in places] for layer in hidden],
        "attentions": [[layer[None, :, low:high, :high] for low, high in places] for layer in attention],
    }
    with ms.TraceWriter(tmp_path / "old") as writer:
        writer.append(to_record(old))
    with ms.TraceWriter(tmp_path / "new") as writer:
        writer.append({"tokens": np.arange(7), "prompt_len": 5, "hidden": hidden, "attention": attention})
    old_store, new_store = querying(tmp_path / "old"), querying(tmp_path / "new")
    np.testing.assert_allclose(old_store("layers", number=0)["norm"], new_store("layers", number=0)["norm"])
    for head in ("mean", "2"):
        assert old_store("attention", number=0, layer=1, head=head) == new_store(
            "attention", number=0, layer=1, head=head
        )
    assert old_store("trace", number=0)["num_layers"] == 2
    assert old_store("trace", number=0)["tokens"]["start"] == 0  # the prompt is not among its tokens


def test_a_failed_record_reports_its_missing_field_and_others_have_scores_by_layer(tmp_path: Path):
    pytest.importorskip("lightning_fabric")
    store = make_traces(tmp_path / "traces", num=60)
    failed = {**dict.fromkeys(ms.open(store).field_names), "question_id": "failed", "status": "error"}
    with ms.TraceWriter(tmp_path / "with") as writer:
        writer.append(ms.open(store)[0] | failed)
        writer.extend(ms.open(store))
    shutil.copy(store / "labels.parquet", tmp_path / "with")
    run = tmp_path / "run"
    ms.train(
        data=str(tmp_path / "with"), out=str(run), model="lstm", seeds=1, epochs=1, parameters=2000, memory="100MB"
    )
    query = querying(tmp_path / "with", run=run)
    with pytest.raises(ValueError, match="record 0"):
        query("evolution", number=0)
    assert len(query("evolution", number=1)["scores"]["lstm"]["scores"]) == 4
