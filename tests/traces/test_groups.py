"""Several answers to a question: clusters, agreement, semantic entropy, EigenScore, and their baselines."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import millstream as ms
from millstream.errors import BadSource
from millstream.traces.groups import clusters_of, eigenscore, same_words, semantic_entropy
from millstream.traces.label import label
from millstream.traces.nli import Entailment
from millstream.traces.store.repair import verify
from support.commands import run_here
from support.tiny_models import make_tokenizer

ANSWERS = {  # the greedy answer, then those drawn
    "q0": ["Paris", "Paris.", "the paris", "It is Paris", "London", "London, England"],
    "q1": ["Rome", "Oslo", "Bonn", "Kiev"],
    "q2": ["Vienna", "Vienna\nQ: next", "VIENNA"],
    "q3": [None, "Lima", "Lima"],
    "q4": ["alone"],
}
SCHEMA = {"states": "float16[layer,position,dim]"}


def write(path: Path, answers: Mapping[str, Sequence[str | None]] = ANSWERS, *, states: bool = False) -> Path:
    rng = np.random.default_rng(0)
    with ms.TraceWriter(path, schema=SCHEMA, shard_records=4) as writer:
        rows = [(name, sample, text) for name, texts in answers.items() for sample, text in enumerate(texts)]
        for name, sample, text in sorted(rows, key=lambda row: row[1]):  # samples of a question are far apart
            writer.append(
                {
                    "record_id": f"{name}#{sample}" if sample else name,
                    "question_id": name,
                    "sample": sample,
                    "question": f"What is {name}?",
                    "generated_answer": text,
                    "aliases": ["Paris"],
                    "answer_len": 3,
                    "status": "ok" if text else "error",
                    "states": rng.normal(size=(3, 4, 5)).astype(np.float16) if states or not sample else None,
                }
            )
    return path


def groups(store: Path) -> dict[str, dict[str, Any]]:
    return {row.pop("question_id"): row for row in pq.read_table(store / "groups.parquet").to_pylist()}


def test_each_question_gets_its_agreement_clusters_and_entropy(tmp_path: Path) -> None:
    done = label(write(tmp_path / "s"))
    found = groups(tmp_path / "s")
    assert list(found) == list(ANSWERS)
    first = found["q0"]
    assert (first["samples"], first["num_clusters"], first["agreement"], first["sample_tokens"]) == (5, 2, 0.6, 15)
    assert first["semantic_entropy"] == pytest.approx(-0.6 * math.log(0.6) - 0.4 * math.log(0.4))
    assert first["self_check"] == pytest.approx((1 + 1 + 0.5 + 0 + 0) / 5)  # F1: "it is paris" has one word of three
    assert (found["q1"]["num_clusters"], found["q1"]["agreement"]) == (3, 0)
    assert found["q1"]["semantic_entropy"] == pytest.approx(math.log(3))
    assert (found["q2"]["num_clusters"], found["q2"]["agreement"], found["q2"]["semantic_entropy"]) == (1, 1, 0)
    assert (found["q3"]["samples"], found["q3"]["agreement"], found["q3"]["num_clusters"]) == (2, None, 1)
    assert found["q4"] == {**dict.fromkeys(found["q4"]), "samples": 0, "sample_tokens": 0}
    assert {row["eigenscore"] for row in found.values()} == {None}  # no states of samples
    assert "4 questions with 3 samples each, clustered by words" in done.notes[0]


def test_clusters_follow_the_first_answer_of_each() -> None:
    answers = [["paris", "london", "paris france", "france", "london"], [], ["x"]]
    assert clusters_of(["", "", ""], answers, same_words) == [[0, 1, 0, 2, 1], [], [0]]
    long = "it is certainly not true that anybody has ever called this place paris before"
    assert same_words(
        [("", "paris", long), ("", "c", "vitamin c"), ("", "the c", "the c of"), ("", "art", "party")]
    ) == [
        False,
        False,
        True,
        False,
    ]


def test_entropy_and_eigenscore_are_those_of_the_papers() -> None:
    assert semantic_entropy([3, 3, 3]) == 0 and semantic_entropy([0, 1]) == pytest.approx(math.log(2))
    states = np.random.default_rng(1).normal(size=(4, 50))
    centred = states - states.mean(axis=1, keepdims=True)
    covariance = centred @ centred.T / 49 + 1e-3 * np.eye(4)
    assert eigenscore(states) == pytest.approx(np.linalg.slogdet(covariance)[1] / 4)
    same = np.repeat(states[:1], 4, axis=0)
    assert (eigenscore(same) or 0) < (eigenscore(states) or 0)  # answers that differ have more volume
    assert eigenscore(states[:1]) is None and eigenscore(None) is None


def test_the_eigenscore_reads_the_middle_layer_of_the_samples(tmp_path: Path) -> None:
    store = write(tmp_path / "s", states=True)
    label(store)
    traces = ms.open(store)
    numbers = [n for n in range(len(traces)) if traces[n]["question_id"] == "q1" and traces[n]["sample"]]
    states = np.stack([traces[n]["states"][1, 2] for n in numbers]).astype(np.float64)
    assert groups(store)["q1"]["eigenscore"] == pytest.approx(eigenscore(states))
    assert groups(store)["q4"]["eigenscore"] is None


def test_groups_are_written_again_only_if_the_store_or_the_method_has_changed(tmp_path: Path) -> None:
    store = write(tmp_path / "s")
    label(store)
    before = (store / "groups.parquet").stat().st_ino
    label(store, rule="em")
    assert (store / "groups.parquet").stat().st_ino == before
    with ms.TraceWriter(store, schema=SCHEMA) as writer:
        row = {"record_id": "q9", "question_id": "q9", "sample": 0, "question": "?", "generated_answer": "a"}
        writer.append({**row, "aliases": ["a"], "answer_len": 1, "status": "ok", "states": None})
    label(store)
    assert (store / "groups.parquet").stat().st_ino != before and "q9" in groups(store)


def test_a_store_without_samples_has_no_groups(tmp_path: Path) -> None:
    store = write(tmp_path / "s", {"q0": ["a"], "q1": ["b"]})
    assert label(store).notes == () and not (store / "groups.parquet").exists()


def test_damaged_groups_are_noticed(tmp_path: Path) -> None:
    store = write(tmp_path / "s")
    label(store)
    data = bytearray((store / "groups.parquet").read_bytes())
    data[len(data) // 2] ^= 1
    (store / "groups.parquet").write_bytes(data)
    assert "groups.parquet" in [damage.file for damage in verify(store)]
    label(store)
    assert list(verify(store)) == [] and len(groups(store)) == 5


# -- an NLI model


@pytest.fixture(scope="module")
def nli(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random sequence classifier with three labels."""
    return make_nli(tmp_path_factory.mktemp("nli") / "tiny-nli", ["CONTRADICTION", "NEUTRAL", "ENTAILMENT"])


def make_nli(folder: Path, labels: Sequence[str]) -> Path:
    import torch
    import transformers as hf

    torch.manual_seed(0)
    config = hf.DistilBertConfig(
        vocab_size=300, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=64, pad_token_id=1,
        initializer_range=0.6,
        id2label=dict(enumerate(labels)), label2id={name: place for place, name in enumerate(labels)},
    )  # fmt: skip
    model = hf.DistilBertForSequenceClassification(config)
    model.save_pretrained(folder)
    make_tokenizer(model_input_names=["input_ids", "attention_mask"]).save_pretrained(folder)
    return folder


def test_answers_that_entail_each_other_are_one_cluster(nli: Path) -> None:
    """Compared with single pairs, without batches or padding."""
    import torch
    import transformers as hf

    model = hf.AutoModelForSequenceClassification.from_pretrained(nli).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(nli)

    def entails(first: str, second: str) -> bool:
        inputs = tokenizer(first, second, truncation=True, max_length=64, return_tensors="pt")
        with torch.inference_mode():
            return int(model(**inputs).logits.argmax()) == 2

    words = ["the quick fox", "fox", "Paris is the capital", "lazy dog", "jumps", "over " * 60, "what of France", "it"]
    pairs = [("who?", one, other) for one in words for other in words]
    expected = [entails(f"{q} {a}", f"{q} {b}") and entails(f"{q} {b}", f"{q} {a}") for q, a, b in pairs]
    assert Entailment(str(nli)).same(pairs) == expected
    assert 0 < sum(expected) < len(expected)


def test_the_command_takes_the_folder_of_an_nli_model(nli: Path, tmp_path: Path) -> None:
    store = write(tmp_path / "s")
    label(store)
    before = (store / "groups.parquet").stat().st_ino
    code, _, err = run_here("label", store, f"nli={nli}")
    assert code == 0 and "clustered by nli:tiny-nli@" in err
    assert (store / "groups.parquet").stat().st_ino != before
    assert groups(store)["q2"]["num_clusters"] >= 1 and groups(store)["q2"]["samples"] == 2
    about = pq.read_metadata(store / "groups.parquet").metadata
    assert about[b"millstream.clusters"].startswith(b"nli:tiny-nli@")


def test_a_model_without_entailment_is_refused_in_one_line(tmp_path: Path) -> None:
    other = make_nli(tmp_path / "sentiment", ["POSITIVE", "NEGATIVE"])
    with pytest.raises(BadSource, match="has no label ENTAILMENT, only positive, negative"):
        Entailment(str(other))
    with pytest.raises(BadSource, match="cannot be loaded") as raised:
        Entailment(str(tmp_path / "missing"))
    assert "\n" not in str(raised.value)
    assert json.loads((other / "config.json").read_text())["id2label"]["0"] == "POSITIVE"
