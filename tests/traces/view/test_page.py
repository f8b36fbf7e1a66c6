"""The view of a trace store: responses match the store, its labels and the predictions of a run."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import millstream as ms
from millstream.errors import BadSetting, BadSource
from millstream.traces.view.inside import TokenTexts
from millstream.view.server import find_run, is_run, views_of
from support.making_traces import make_traces
from support.querying_traces import make_run, querying
from support.remote_stores import remote, upload
from support.s3_server import Bucket


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_traces(tmp_path_factory.mktemp("view") / "traces", num=120)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_traces(tmp_path_factory.mktemp("view") / "full", num=6, tier="full")


def test_every_record_is_listed_once(probe: Path):
    query = querying(probe)
    pages = [query("list", page=page, size=50) for page in range(3)]
    assert [row["number"] for page in pages for row in page["rows"]] == list(range(120))
    assert {page["pages"] for page in pages} == {3} and {page["total"] for page in pages} == {120}
    assert query("list", page=99, size=50)["page"] == 2
    row, record = pages[1]["rows"][3], ms.open(probe)[53]
    assert row["id"] == record["question_id"] and row["question"] == record.get("question")


def test_search_matches_all_words_ignoring_case(tmp_path: Path):
    texts = [("Who wrote Faust?", "Goethe", ["J. W. Goethe"]), ("Who wrote Hamlet?", "Marlowe", ["Shakespeare"]),
             ("What is 7 * 6?", "42", [])]  # fmt: skip
    with ms.TraceWriter(tmp_path / "s", schema={"aliases": "list<string>"}) as writer:
        for number, (question, answer, aliases) in enumerate(texts):
            row = {"question_id": f"id-{number}", "question": question, "generated_answer": answer, "aliases": aliases}
            writer.append({**row, "x": np.zeros(3)})
    query = querying(tmp_path / "s")

    def found(words: str) -> list[int]:
        return [row["number"] for row in query("list", q=words)["rows"]]

    assert found("WHO wrote") == [0, 1]
    assert found("wrote shakespeare") == [1]
    assert found("goethe") == [0] and found("id-2") == [2] and found("* 6") == [2]
    assert found("nobody") == [] and found("wrote 42") == []
    assert query("list", q="shakespeare")["rows"][0]["references"] == ["Shakespeare"]


def test_verdicts_are_counted_and_filter_the_list(probe: Path):
    query = querying(probe)
    verdicts = pq.read_table(probe / "labels.parquet").column("verdict").to_pylist()
    assert query("about")["verdicts"] == {name: verdicts.count(name) for name in ("right", "wrong")}
    rows = query("list", verdict="wrong", size=500)["rows"]
    assert [row["number"] for row in rows] == [n for n, verdict in enumerate(verdicts) if verdict == "wrong"]
    assert {row["verdict"] for row in rows} == {"wrong"}


def test_scores_are_means_over_seeds_and_sort_the_list(probe: Path, tmp_path: Path):
    scores = {"lstm": {3: [0.2, 0.4], 8: [0.9, 0.9], 5: [0.1, 0.2]}, "length": {3: [7.0]}}
    query = querying(probe, run=make_run(tmp_path / "run", probe, scores))
    assert query("about")["detectors"] == ["lstm", "length"] and sorted(query("about")["parts"]) == ["test", "val"]
    rows = query("list", sort="highest", detector="lstm", size=500)["rows"]
    assert [row["number"] for row in rows[:3]] == [8, 3, 5] and len(rows) == 120
    assert [row["score"] for row in rows[:4]] == [pytest.approx(0.9), pytest.approx(0.3), pytest.approx(0.15), None]
    assert [row["number"] for row in query("list", sort="lowest", detector="lstm")["rows"][:3]] == [5, 3, 8]
    assert [row["number"] for row in query("list", part="val", detector="lstm")["rows"]] == [8]
    trace = query("trace", number=3)
    assert trace["scores"] == {"lstm": pytest.approx(0.3), "length": 7.0} and trace["part"] == "test"
    with pytest.raises(BadSetting, match="detector=gnn"):
        query("list", sort="highest", detector="gnn")


def test_worst_errors_are_furthest_from_their_verdict(probe: Path, tmp_path: Path):
    verdicts = pq.read_table(probe / "labels.parquet").column("verdict").to_pylist()
    right, wrong = verdicts.index("right"), verdicts.index("wrong")
    run = make_run(tmp_path / "run", probe, {"lstm": {right: [0.95], wrong: [0.3]}})
    rows = querying(probe, run=run)("list", sort="mistaken", detector="lstm")["rows"]
    assert [row["number"] for row in rows[:2]] == [right, wrong]


def test_scores_of_another_store_are_rejected(probe: Path, tmp_path: Path):
    others = make_run(tmp_path / "run", probe, {"lstm": {500: [0.2]}})
    query = querying(probe, run=others)
    assert (
        "predictions.parquet: its records differ" in query("about")["problems"][0] and query("about")["detectors"] == []
    )
    assert query("list")["total"] == 120
    with ms.TraceWriter(tmp_path / "other") as writer:
        for number in range(3):
            writer.append({"question_id": f"x{number}", "x": np.zeros(2)})
    renamed = make_run(tmp_path / "renamed", tmp_path / "other", {"lstm": {1: [0.2]}})
    assert "--run" in querying(tmp_path / "other", run=renamed)("about")["problems"][0]


def test_a_trace_shows_its_tokens_with_their_probabilities_and_alternatives(probe: Path):
    record, shown = ms.open(probe)[7], querying(probe)("trace", number=7)["tokens"]
    assert shown["ids"] == record["tokens"].tolist() and shown["start"] == record["prompt_len"]
    np.testing.assert_allclose(shown["logprobs"], record["logprobs"], rtol=1e-6)
    np.testing.assert_allclose(shown["entropy"], record["entropy"], rtol=1e-6)
    assert len(shown["alternatives"]) == len(record["logprobs"])
    first = shown["alternatives"][0]
    assert [other["id"] for other in first] == record["topk_ids"][0, : len(first)].tolist()
    np.testing.assert_allclose(
        [other["probability"] for other in first], np.exp(record["topk_logprobs"][0, : len(first)]), rtol=1e-5
    )
    assert "--tokenizer" in shown["problem"] and shown["texts"] == [str(token) for token in shown["ids"]]


def test_norms_and_cosines_equal_those_of_the_states(probe: Path, full: Path):
    for path, name in ((probe, "states"), (full, "hidden")):
        states = np.asarray(ms.open(path)[2][name], np.float64)
        shown = querying(path)("layers", number=2)
        assert shown["field"] == name and (shown["positions"] is None) == (name == "hidden")
        np.testing.assert_allclose(shown["norm"], np.linalg.norm(states, axis=2), rtol=1e-3)
        assert set(shown["cosine"][0]) == {None}
        for layer in range(1, len(states)):
            norms = np.linalg.norm(states[layer], axis=1) * np.linalg.norm(states[layer - 1], axis=1)
            cosine = (states[layer] * states[layer - 1]).sum(1) / norms
            np.testing.assert_allclose(shown["cosine"][layer], cosine, atol=1e-3)


def test_arcs_are_the_strongest_earlier_tokens_of_a_head_or_their_mean(full: Path):
    attention = np.asarray(ms.open(full)[4]["attention"], np.float64)  # layer, head, query, key
    query = querying(full)
    for head, weights in (("mean", attention[1].mean(0)), ("0", attention[1, 0])):
        shown = query("attention", number=4, layer=1, head=head, k=3)
        assert shown["num_heads"] == attention.shape[1]
        for token, (sources, found) in enumerate(zip(shown["source"], shown["weight"], strict=True)):
            kept = [(source, weight) for source, weight in zip(sources, found, strict=True) if source >= 0]
            assert all(source < token for source, _ in kept)
            best = np.sort(weights[token, :token])[::-1][:3]
            np.testing.assert_allclose([weight for _, weight in kept], best[best > 0], rtol=1e-3)
    for head in ("9", "\u00b2"):
        with pytest.raises(BadSetting, match=f"head={head}"):
            query("attention", number=4, layer=1, head=head)


def test_stored_edges_are_shown_as_arcs(probe: Path):
    record = ms.open(probe)[11]
    shown = querying(probe)("attention", number=11, layer=2, k=2)
    assert shown["source"] == record["edge_source"][2][:, :2].tolist()
    np.testing.assert_allclose(shown["weight"], np.asarray(record["edge_weight"][2][:, :2], np.float32), rtol=1e-6)
    with pytest.raises(BadSetting, match="head=1"):
        querying(probe)("attention", number=11, layer=2, head="1")


def test_the_score_after_the_last_layer_is_the_final_score(probe: Path, tmp_path: Path):
    pytest.importorskip("lightning_fabric")
    ms.train(
        data=str(probe), out=str(tmp_path / "run"), model="lstm,gnn,gvae,length", seeds=2, epochs=1, parameters=2000,
        memory="100MB",
    )  # fmt: skip
    table = pq.read_table(tmp_path / "run" / "predictions.parquet").to_pylist()
    number = next(row["record"] for row in table if row["part"] == "test")
    course = querying(probe, run=tmp_path / "run")("evolution", number=number)["scores"]
    assert set(course) == {"lstm", "gnn", "gvae"}
    for model, found in course.items():
        scores = found["scores"]
        notes = [row["score"] for row in table if row["model"] == model and row["record"] == number]
        assert len(notes) == 2 and scores[-1] == pytest.approx(np.mean(notes), abs=1e-5)
        num_layers = len(ms.open(probe)[number]["states"])
        assert list(found["layers"]) == list(range(model != "lstm", num_layers)) and len(scores) == len(found["layers"])
        assert len({round(score, 6) for score in scores}) > 1


def test_nets_that_do_not_read_layer_by_layer_move_no_layer(tmp_path: Path):
    pytest.importorskip("lightning_fabric")
    store = make_traces(tmp_path / "store", num=40, tier="full")
    ms.train(
        data=str(store), out=str(tmp_path / "run"), model="lstm,attention_pool", epochs=1, parameters=2000,
        memory="100MB",
    )  # fmt: skip
    course = querying(store, run=tmp_path / "run")("evolution", number=0)["scores"]
    assert list(course) == ["lstm"]
    assert list(course["lstm"]["layers"]) == list(range(len(ms.open(store)[0]["hidden"])))


def test_without_a_run_there_are_no_scores(probe: Path):
    query = querying(probe)
    assert query("evolution", number=0)["scores"] == {} and query("trace", number=0)["scores"] == {}
    assert query("about")["detectors"] == [] and query("about")["run"] is None


def test_a_store_with_arbitrary_fields_is_shown(tmp_path: Path):
    with ms.TraceWriter(tmp_path / "s") as writer:
        for number in range(3):
            writer.append({"name": f"a{number}", "value": number / 2, "x": np.ones((2, 2)) * number})
    query = querying(tmp_path / "s")
    assert [row["number"] for row in query("list")["rows"]] == [0, 1, 2]
    trace = query("trace", number=1)
    assert trace["scalars"] == {"name": "a1", "value": 0.5} and trace["shapes"] == {"x": [2, 2]}
    assert trace["tokens"]["ids"] == [] and trace["num_layers"] == 0
    assert query("layers", number=1) is None and query("attention", number=1) is None


def test_a_store_by_url_is_shown_as_the_local_one(full: Path, s3: Bucket, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    url = remote(upload(full, f"{s3.url}/full"))
    run = make_run(tmp_path / "run", full, {"lstm": {3: [0.5]}})
    (view,) = views_of(url, notify=lambda _: None)
    assert view.name == "traces"
    there, here = querying(url, run=run), querying(full, run=run)
    assert {**there("about"), "path": None} == {**here("about"), "path": None}
    for name in ("trace", "layers", "attention", "evolution"):
        assert there(name, number=3) == here(name, number=3)
    told = [there("about"), there("list"), there("trace", number=3)]
    assert "key-of-the-tests" not in str(told), "no credentials"
    for asked in ({}, {"q": "who mills"}, {"verdict": "wrong"}):
        assert there("list", **asked) == here("list", **asked)
    (url / "labels.parquet").unlink()
    assert set(there("about")["verdicts"]) == {"unlabelled"}, "the page was opened again"


def test_invalid_and_out_of_range_numbers_are_rejected(probe: Path):
    query = querying(probe)
    with pytest.raises(IndexError, match="record 120 of 120"):
        query("trace", number=120)
    with pytest.raises(BadSetting, match="number=-1"):
        query("trace", number=-1)
    with pytest.raises(BadSetting, match="sort=best"):
        query("list", sort="best")


def test_tokens_are_shown_as_text_with_the_tokenizer_of_the_store(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<s>": 0, "\u2581Paris": 1, "is": 2}
    model = tokenizers.models.WordLevel(words, unk_token="<s>")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    texts = TokenTexts(tmp_path / "tokenizer.json")
    assert texts.of([0, 1, 2, 9]) == ["<s>", " Paris", "is", "<9>"]
    assert texts.problem is None
    (tmp_path / "tokenizer.json").write_text("{}")
    damaged = TokenTexts(tmp_path / "tokenizer.json")
    assert damaged.of([1]) == ["1"] and f"{tmp_path / 'tokenizer.json'}: is no" in (damaged.problem or "")


def test_the_newest_run_of_a_store_is_found(probe: Path, tmp_path: Path):
    store = make_traces(tmp_path / "traces", num=4)
    assert find_run(store) is None
    notes: list[str] = []
    assert [view.name for view in views_of(store, notify=notes.append)] == ["traces"] and notes == []
    run = make_run(tmp_path / "runs" / "first", store, {"lstm": {1: [0.5]}})
    make_run(tmp_path / "other", probe, {"lstm": {1: [0.5]}})
    assert is_run(run) and not is_run(store)
    assert find_run(store) == run.resolve()
    assert [view.name for view in views_of(store, notify=notes.append)] == ["traces", "run"]
    assert str(run) in notes[0]
    assert [view.name for view in views_of(run, notify=notes.append)] == ["run", "traces"]
    with pytest.raises(BadSetting, match="--run"):
        views_of(run, run=run, notify=notes.append)
    with pytest.raises(BadSource, match="--run"):
        views_of(store, run=store, notify=notes.append)
