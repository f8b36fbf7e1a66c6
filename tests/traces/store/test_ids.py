"""id -> record, with and without the index on disk; stores with several answers to a question."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millstream as ms
from millstream.errors import ConfigMismatch, MissingLabel
from millstream.traces.store.ids import load_index, update_ids
from millstream.traces.store.inspect import compare
from millstream.traces.store.manifest import IDS, read_manifest, sidecar_name
from millstream.traces.store.repair import verify
from millstream.traces.store.rewrite import find_ids, merge, subset_records
from support.making import record, same, write


def keys(first: int, end: int) -> list[tuple[int, int]]:
    return [(4, number) for number in range(first, end)]


def index(path: Path) -> Path:
    """Update the index of a store if it lacks two shards."""
    update_ids(path, read_manifest(path), min_shards=2)
    return path


def keep_only(path: Path, number: int) -> None:
    """Remove every sidecar but one: reading another gives a warning, and warnings are errors."""
    for file in path.glob("*.parquet"):
        if file.name != sidecar_name(number):
            file.unlink()


# -- by id


def test_every_record_is_found_by_its_id(tmp_path: Path) -> None:
    path = write(tmp_path / "store", keys(0, 7), shard_records=3)
    traces = ms.open(path)
    for number in (6, 0, 3, 5):
        assert traces.find(f"4:{number}") == number
        assert same(traces.by_id(f"4:{number}"), record(4, number))
    assert not (path / IDS).exists()


def test_an_unknown_id_is_a_key_error_with_the_id(tmp_path: Path) -> None:
    traces = ms.open(write(tmp_path / "store", keys(0, 2)))
    for key in ("4:2", "", "4:0 ", None, 7):
        with pytest.raises(KeyError, match="question_id") as error:
            traces.by_id(key)
        assert repr(key) in str(error.value)


def test_the_first_of_several_records_with_the_same_id_is_found(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store", shard_records=2) as writer:
        writer.extend({"question_id": key, "n": n} for n, key in enumerate(["a", "b", "a", "b", "c", "a"]))
    traces = ms.open(tmp_path / "store")
    assert [traces.find(key) for key in "abc"] == [0, 1, 4]
    assert traces.by_id("b") == {"question_id": "b", "n": 1}


@pytest.mark.parametrize("key", [42, np.int64(42), "42"])
def test_numeric_ids_are_found_by_number_and_by_text(key: object, tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.extend({"question_id": n} for n in (7, 42, -3))
    traces = ms.open(tmp_path / "store")
    assert traces.find(key) == 1
    assert traces.by_id(-3) == {"question_id": -3}
    assert traces.ids == [7, 42, -3]


def test_a_record_without_an_id_is_not_found_as_none(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.extend({"question_id": key} for key in (None, "a", "None"))
    traces = ms.open(tmp_path / "store")
    assert traces.find("None") == 2
    with pytest.raises(KeyError):
        traces.find(None)


def test_nothing_is_found_if_all_ids_are_none(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.extend({"question_id": None} for _ in range(3))
    with pytest.raises(KeyError, match="'a'"):
        ms.open(tmp_path / "store").by_id("a")


def test_a_store_without_ids_is_a_key_error_with_its_fields(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.append({"name": "a", "n": 1})
    traces = ms.open(tmp_path / "store")
    with pytest.raises(KeyError, match=r"question_id.*name, n"):
        traces.by_id("a")
    with pytest.raises(KeyError, match=r"question_id.*name, n"):
        traces.ids  # noqa: B018


def test_ids_that_are_none_at_first_are_found_later(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.extend({"question_id": key} for key in (None, "a", "b"))
    assert ms.open(tmp_path / "store").find("b") == 2


# -- the index on disk


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_lookup_with_an_index_reads_only_the_sidecar_of_the_record(compression: Any, tmp_path: Path) -> None:
    path = index(write(tmp_path / "store", keys(0, 7), shard_records=2, compression=compression))
    stored = load_index(path)
    assert stored is not None and {number for number, _ in stored.shards} == {0, 1, 2, 3}
    assert list(verify(path)) == []
    keep_only(path, 2)
    traces = ms.open(path)
    assert traces.find("4:5") == 5
    assert same(traces.by_id("4:4"), record(4, 4))
    with pytest.raises(KeyError, match="'nobody'"):
        traces.find("nobody")


def test_a_writer_stores_an_index_once_there_are_64_shards(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with ms.TraceWriter(path, shard_records=1) as writer:
        writer.extend({"question_id": n} for n in range(63))
    assert not (path / IDS).exists()
    with ms.TraceWriter(path) as writer:
        writer.append({"question_id": 63})
    assert (path / IDS).exists()
    assert [ms.open(path).find(n) for n in (0, 62, 63)] == [0, 62, 63]


def test_records_of_shards_that_the_index_does_not_cover_are_found(tmp_path: Path) -> None:
    path = index(write(tmp_path / "store", keys(0, 4), shard_records=2))
    before = (path / IDS).read_bytes()
    index(write(path, keys(4, 5)))
    assert (path / IDS).read_bytes() == before
    traces = ms.open(path)
    assert [traces.find(f"4:{number}") for number in range(5)] == list(range(5))


def test_the_index_grows_with_the_store(tmp_path: Path) -> None:
    path = index(write(tmp_path / "store", keys(0, 4), shard_records=2))
    index(write(path, keys(4, 9), shard_records=2))
    stored = load_index(path)
    assert stored is not None and {number for number, _ in stored.shards} == {0, 1, 2, 3, 4}
    assert len(stored.hashes) == 9
    traces = ms.open(path)
    assert [traces.find(f"4:{number}") for number in range(9)] == list(range(9))
    keep_only(path, 4)
    assert ms.open(path).find("4:8") == 8


def test_the_first_record_with_an_id_is_found_inside_and_outside_the_index(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with ms.TraceWriter(path, shard_records=1) as writer:
        writer.extend({"question_id": key, "n": n} for n, key in enumerate("abab"))
    index(path)
    with ms.TraceWriter(path) as writer:
        writer.extend({"question_id": key, "n": n} for n, key in enumerate("bca", start=4))
    traces = ms.open(path)
    assert [traces.find(key) for key in "abc"] == [0, 1, 5]


def test_lookups_are_the_same_without_the_index(tmp_path: Path) -> None:
    path = index(write(tmp_path / "store", keys(0, 5), shard_records=1))
    (path / IDS).unlink()
    assert [ms.open(path).find(f"4:{number}") for number in range(5)] == list(range(5))


def test_an_index_of_other_shards_never_finds_a_wrong_record(tmp_path: Path) -> None:
    mine = index(write(tmp_path / "mine", keys(0, 6), shard_records=2))
    other = write(tmp_path / "other", [(5, 0), (4, 5), (4, 3), (4, 1), (5, 1), (5, 2)], shard_records=3)
    (other / IDS).write_bytes((mine / IDS).read_bytes())
    traces = ms.open(other)
    assert [traces.find(key) for key in ("5:0", "4:5", "4:3", "4:1", "5:2")] == [0, 1, 2, 3, 5]
    with pytest.raises(KeyError):
        traces.find("4:0")


def test_all_of_many_ids_are_found_and_no_others(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = [f"q{n}" for n in rng.choice(10**6, 3000, replace=False)]
    with ms.TraceWriter(tmp_path / "store", shard_records=1000) as writer:
        writer.extend({"question_id": name} for name in names)
    assert (index(tmp_path / "store") / IDS).exists()
    traces = ms.open(tmp_path / "store")
    assert [traces.find(name) for name in names[::7]] == list(range(0, 3000, 7))
    absent = [f"q{n}" for n in range(200) if f"q{n}" not in names]
    for name in absent:
        with pytest.raises(KeyError):
            traces.find(name)


def test_stores_without_ids_have_no_index(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store", shard_records=1) as writer:
        writer.extend({"n": n} for n in range(5))
    assert not (index(tmp_path / "store") / IDS).exists()


# -- several answers to a question


def answers(path: Path, questions: str = "ab", samples: int = 3) -> ms.Traces:
    """A store in which the greedy answer (sample 0) to every question is right, and the others are wrong."""
    with ms.TraceWriter(path, shard_records=2) as writer:
        for name in questions:
            for n in range(samples):
                key = f"{name}#{n}" if n else name
                said = "yes" if n == 0 else "no"
                row = {"record_id": key, "question_id": name, "sample": n, "generated_answer": said, "aliases": ["yes"]}
                writer.append(row)
    traces = ms.open(path)
    assert isinstance(traces, ms.Traces)
    return traces


def test_an_answer_is_found_by_its_record_id_with_and_without_the_index(tmp_path: Path) -> None:
    traces = answers(tmp_path / "store")
    assert traces.ids == ["a", "a#1", "a#2", "b", "b#1", "b#2"]
    assert [traces.find(key) for key in ("b#1", "a")] == [4, 0]
    index(tmp_path / "store")
    assert ms.open(tmp_path / "store").by_id("b#2")["sample"] == 2
    with pytest.raises(KeyError, match="record_id"):
        traces.find("b#3")


def test_a_resumed_writer_knows_the_record_ids(tmp_path: Path) -> None:
    answers(tmp_path / "store")
    with ms.TraceWriter(tmp_path / "store") as writer:
        assert writer.done_ids == {"a", "a#1", "a#2", "b", "b#1", "b#2"}


def test_answers_to_one_question_have_their_own_labels_and_one_split(tmp_path: Path) -> None:
    traces = answers(tmp_path / "store", questions="abcdefgh")
    done = ms.label(tmp_path / "store")
    assert done.conflicting == 0 and (done.counts["right"], done.counts["wrong"]) == (8, 16)
    judged = ms.labelled(traces)
    assert judged.column("label").to_pylist() == [0, 1, 1] * 8
    halves = ms.split(judged, {"one": 0.5, "other": 0.5})
    questions = [set(half.column("question_id").to_pylist()) for half in halves]
    assert questions[0] and questions[1] and not questions[0] & questions[1]


def test_a_table_by_question_labels_the_first_answer_to_each_question(tmp_path: Path) -> None:
    traces = answers(tmp_path / "store")
    table = pa.table({"question_id": ["a", "b"], "label": [0, 1]})
    with pytest.raises(MissingLabel):
        ms.labelled(traces, table)
    assert ms.labelled(traces, table, missing="drop").column("record_id").to_pylist() == ["a", "b"]
    by_record = pa.table({"record_id": traces.ids, "question_id": list("aaabbb"), "label": [0, 1, 1, 1, 0, 0]})
    assert ms.labelled(traces, by_record).column("label").to_pylist() == [0, 1, 1, 1, 0, 0]


def test_references_by_question_judge_all_answers_and_scores_by_record_only_theirs(tmp_path: Path) -> None:
    answers(tmp_path / "store")
    (tmp_path / "gold.jsonl").write_text('{"id": "a", "answer": "no"}\n{"id": "b", "answer": "yes"}\n')
    counts = ms.label(tmp_path / "store", references=tmp_path / "gold.jsonl").counts
    assert (counts["right"], counts["wrong"]) == (3, 3)
    (tmp_path / "scores.csv").write_text("record_id,question_id,score\na#1,a,0.9\nb,b,0.1\n")
    counts = ms.label(tmp_path / "store", rule="scores", scores=tmp_path / "scores.csv").counts
    assert (counts["right"], counts["wrong"], counts["unlabelled"]) == (1, 1, 4)


def test_answers_keep_their_labels_in_a_subset_and_in_a_merged_store(tmp_path: Path) -> None:
    traces = answers(tmp_path / "store")
    ms.label(tmp_path / "store")
    (tmp_path / "ids.txt").write_text('a#1\n{"record_id": "b", "question_id": "b"}\n')
    subset_records(traces, tmp_path / "some", find_ids(traces, tmp_path / "ids.txt"))
    assert ms.labelled(ms.open(tmp_path / "some")).column("label").to_pylist() == [1, 0]
    answers(tmp_path / "other", questions="c")
    ms.label(tmp_path / "other")
    merge([tmp_path / "some", tmp_path / "other"], tmp_path / "both")
    assert ms.labelled(ms.open(tmp_path / "both")).column("label").to_pylist() == [1, 0, 0, 1, 1]


def test_stores_with_the_same_answers_are_not_merged_and_compare_as_the_same(tmp_path: Path) -> None:
    answers(tmp_path / "store")
    answers(tmp_path / "again")
    with pytest.raises(ConfigMismatch, match="a#1"):
        merge([tmp_path / "store", tmp_path / "again"], tmp_path / "both")
    assert compare(tmp_path / "store", tmp_path / "again").same == 6
