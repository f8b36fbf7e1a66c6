"""Subsets, concatenations and labelled collections give the records they are made of, and no others."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millstream as ms
from millstream.core.tables import publish_table
from support.making_small import ids, rows, write_reads, write_traces

# -- subsets


def test_a_subset_has_the_given_records_in_the_given_order(trivia: ms.Traces, few_reads: ms.Reads):
    for collection in (trivia, few_reads):
        chosen = [70, 3, 3, 41, -1]
        part = collection.subset(chosen)
        assert len(part) == 5 and part.field_names == collection.field_names
        expected = rows(collection, [number % len(collection) for number in chosen])
        assert rows(part, [0, 1, 2, 3, 4]) == expected
        assert rows(part, [4, 0, 0]) == [expected[4], expected[0], expected[0]]
        assert rows(part, [-1, -5]) == [expected[4], expected[0]]
        assert part.record_numbers(np.arange(5)).tolist() == [70, 3, 3, 41, len(collection) - 1]
        assert part.sizes(np.array([1, 0]), ["question_id"] if collection is trivia else ["sequence"]).tolist() == (
            collection.sizes(np.array([3, 70]), ["question_id"] if collection is trivia else ["sequence"]).tolist()
        )


def test_columns_of_a_subset_are_those_of_its_records(trivia: ms.Traces, few_reads: ms.Reads):
    assert ids(trivia.subset([70, 3, 41])) == ["q70", "q3", "q41"]
    assert few_reads.subset([70, 3, 41]).column("tax_id").to_pylist() == ["g7", "g0", "g4"]


def test_a_record_of_a_subset_equals_that_of_its_collection(trivia: ms.Traces, few_reads: ms.Reads):
    record: Any = trivia.subset([5, 9])[1]
    assert record["question_id"] == "q9"
    assert few_reads.subset([5, 9])[-2] == few_reads[5]


def test_a_subset_of_a_subset_has_the_same_records(trivia: ms.Traces):
    inner = trivia.subset([9, 8, 7, 6]).subset([3, 0])
    assert ids(inner) == ["q6", "q9"]
    assert inner.record_numbers(np.arange(2)).tolist() == [6, 9]


def test_a_record_number_out_of_range_is_an_index_error(trivia: ms.Traces):
    for wrong in ([100], [-101], [0, 100]):
        with pytest.raises(IndexError, match="100"):
            trivia.subset(wrong)
    part = trivia.subset([1, 2, 3])
    for wrong in ([3], [-4]):
        with pytest.raises(IndexError, match="3"):
            part.fetch(wrong)


def test_an_empty_subset_is_a_collection(trivia: ms.Traces, few_reads: ms.Reads):
    for collection in (trivia, few_reads):
        part = collection.subset([])
        assert len(part) == 0 and rows(part, []) == []
        with pytest.raises(IndexError):
            part.fetch([0])


@pytest.mark.parametrize("wrong", [np.arange(100) > 90, [1.5]])
def test_a_subset_takes_only_record_numbers(trivia: ms.Traces, wrong: Any):
    with pytest.raises((ValueError, TypeError, IndexError)):
        trivia.subset(wrong)


# -- concatenations


@pytest.mark.parametrize("wrong", [[1.5], [True, False], ["1"], [10**30]])
def test_only_whole_record_numbers_are_fetched(trivia: ms.Traces, reads: ms.Reads, wrong: Any):
    for collection in (trivia, reads, ms.subset(trivia, [3, 1, 4]), ms.concat([trivia, trivia])):
        with pytest.raises(ValueError, match="expected record numbers"):
            collection.fetch(wrong)
        assert len(collection.fetch([], ["question_id" if collection is not reads else "sequence"])) is not None


def test_the_number_of_a_record_is_whole(trivia: ms.Traces, reads: ms.Reads):
    for wrong in ("a", 1.5, None):
        for collection, remedy in ((trivia, "by_id"), (reads, "by_name")):
            with pytest.raises(ms.errors.BadSetting, match=remedy):
                collection[wrong]


def test_a_concatenation_has_the_records_of_all_collections_in_turn(
    trivia: ms.Traces, popqa: ms.Traces, few_reads: ms.Reads, more_reads: ms.Reads
):
    for one, other in ((trivia, popqa), (few_reads, more_reads)):
        both = ms.concat([one, other])
        assert len(both) == len(one) + len(other)
        assert rows(both, list(range(len(both)))) == rows(one, list(range(len(one)))) + rows(
            other, list(range(len(other)))
        )
        mixed = [len(one) + 3, 5, len(both) - 1, 0, len(one), 5]
        assert rows(both, mixed) == [rows(both, [number])[0] for number in mixed]
        for wrong in (len(both), -1):
            with pytest.raises(IndexError, match=str(len(both))):
                both.fetch([0, wrong])


def test_columns_and_sizes_of_a_concatenation_are_those_of_its_collections(trivia: ms.Traces, popqa: ms.Traces):
    both = ms.concat([trivia, popqa])
    assert ids(both) == ids(trivia) + ids(popqa)
    sizes = both.sizes(np.array([120, 7]), ["tokens"]).tolist()
    assert sizes == [popqa.sizes(np.array([20]), ["tokens"])[0], trivia.sizes(np.array([7]), ["tokens"])[0]]
    assert both.medium.num_bytes == trivia.medium.num_bytes + popqa.medium.num_bytes
    assert both.default_key == "question_id"


def test_columns_of_different_integer_types_are_concatenated(tmp_path: Path):
    """Class ids are kept in as few bytes as each file needs."""
    parts: list[ms.Reads] = []
    for name, labels in (("a", [1, 2]), ("b", [300, 70_000])):
        file = tmp_path / f"{name}.fa"
        file.write_text("".join(f">{label}\nACGT\n" for label in labels))
        opened = ms.open(file, header_regex=r"(?P<class_id>\d+)")
        assert isinstance(opened, ms.Reads)
        parts.append(opened)
    both = ms.concat(parts)
    assert both.column("class_id").to_pylist() == [1, 2, 300, 70_000]
    assert both.fetch([3, 0]).columns["class_id"].tolist() == [70_000, 1]  # pyright: ignore
    assert sorted(ms.mix({parts[0]: 1, parts[1]: 1}).column("class_id").to_pylist()) == [1, 2, 300, 70_000]


def test_a_concatenation_has_the_fields_that_all_collections_have(
    tmp_path: Path, trivia: ms.Traces, few_reads: ms.Reads
):
    bare = write_traces(tmp_path / "bare", ["q1"], lambda name: {"question_id": name, "score": 1.0})
    both = ms.concat([trivia, bare])
    assert both.field_names == ["question_id", "score"]
    assert rows(both, [0, 100]) == [{"question_id": "q0", "score": 0.0}, {"question_id": "q1", "score": 1.0}]
    plain = write_reads(tmp_path / "plain.fa", range(3), regex=None)
    assert ms.concat([few_reads, plain]).fetch([0, 81]).columns == {}  # pyright: ignore


def test_a_batch_from_one_collection_has_the_same_fields_as_a_batch_from_both(tmp_path: Path, trivia: ms.Traces):
    bare = write_traces(tmp_path / "bare", ["q1"], lambda name: {"question_id": name, "score": 1.0})
    both = ms.concat([trivia, bare])
    assert rows(both, [0])[0].keys() == rows(both, [0, 100])[0].keys()


def test_traces_and_reads_cannot_share_a_batch(trivia: ms.Traces, few_reads: ms.Reads):
    both = ms.concat([trivia, few_reads])
    with pytest.raises(ValueError, match="kinds"):
        both.fetch([0, 150])
    mixture = ms.mix({trivia: 1, few_reads: 1})
    with pytest.raises(ValueError, match="kinds"):
        mixture.fetch(np.arange(10))


def test_concatenating_no_collection_is_an_error(trivia: ms.Traces):
    with pytest.raises(ValueError, match="collection"):
        ms.concat([])
    assert rows(ms.concat([trivia.subset([]), trivia]), [0]) == rows(trivia, [0])
    assert rows(ms.concat([trivia]), []) == []


# -- all of them


def made(path: Path) -> dict[str, ms.Collection]:
    """One of each kind, over reopened files."""
    one, other = ms.open(path / "trivia"), ms.open(path / "popqa")
    few_reads = ms.open(path / "reads.fa")
    return {
        "subset": one.subset([5, 3]),
        "another subset": one.subset([3, 5]),
        "marked": ms.split(one, {"a": 0.5, "b": 0.5})["a"],
        "the other part": ms.split(one, {"a": 0.5, "b": 0.5})["b"],
        "concat": ms.concat([one, other]),
        "the other way round": ms.concat([other, one]),
        "mixture": ms.mix({one: 1, other: 1}, seed=1),
        "another seed": ms.mix({one: 1, other: 1}, seed=2),
        "other weights": ms.mix({one: 1, other: 2}, seed=1),
        "reads": few_reads.subset([5, 3]),
        "labelled": ms.labelled(one, column="score"),
        "of one another": ms.concat([ms.mix({one: 1, other: 1}).subset([1, 2]), ms.labelled(other, column="score")]),
    }


def test_fingerprints_differ_and_are_the_same_when_opened_again(
    folder: Path, trivia: ms.Traces, popqa: ms.Traces, few_reads: ms.Reads
):
    first, again = ({name: each.fingerprint for name, each in made(folder).items()} for _ in range(2))
    assert first == again
    assert len(set(first.values())) == len(first)
    assert first["labelled"] == trivia.fingerprint  # labels may be mended without changing which records come when
    assert all(len(value) == 16 for value in first.values())


def test_a_fingerprint_changes_when_records_are_added(tmp_path: Path):
    before = write_traces(tmp_path / "t", ["q1", "q2"])
    old = [before.subset([0]).fingerprint, ms.concat([before]).fingerprint, ms.mix({before: 1}).fingerprint]
    after = write_traces(tmp_path / "t", ["q3"])
    new = [after.subset([0]).fingerprint, ms.concat([after]).fingerprint, ms.mix({after: 1}).fingerprint]
    assert all(one != other for one, other in zip(old, new, strict=True))


def test_collections_can_be_pickled_to_another_process(
    folder: Path, trivia: ms.Traces, popqa: ms.Traces, few_reads: ms.Reads
):
    for name, collection in made(folder).items():
        again = pickle.loads(pickle.dumps(collection))
        assert len(again) == len(collection), name
        assert again.fingerprint == collection.fingerprint and again.lineage == collection.lineage
        assert rows(again, [1, 0]) == rows(collection, [1, 0])


def test_less_memory_and_another_epoch_keep_length_and_records(
    folder: Path, trivia: ms.Traces, popqa: ms.Traces, few_reads: ms.Reads
):
    for collection in made(folder).values():
        tight = collection.within(1 << 20)
        assert rows(tight, [1, 0, 1]) == rows(collection, [1, 0, 1])
        assert tight.fingerprint == collection.fingerprint and len(collection.in_epoch(3)) == len(collection)
        collection.will_need(np.array([0]), np.array([len(collection) - 1]))


@pytest.mark.parametrize("way", ["concat", "mix", "labelled"])
def test_every_collection_gives_single_records_of_its_subsets(trivia: ms.Traces, way: str):
    whole = {
        "concat": lambda: ms.concat([trivia]),
        "mix": lambda: ms.mix({trivia: 1}),
        "labelled": lambda: ms.labelled(trivia, column="score"),
    }[way]()
    record: Any = ms.subset(whole, [3])[0]
    assert record["question_id"] == rows(whole, [3], ["question_id"])[0]["question_id"]


# -- labels


@pytest.fixture
def store(tmp_path: Path) -> ms.Traces:
    return write_traces(tmp_path / "store", [f"q{number}" for number in range(20)])


def label_table(numbers: range | list[int], labels: list[object] | None = None, **more: list[object]) -> pa.Table:
    names = [f"q{number}" for number in numbers]
    return pa.table({"question_id": names, "label": labels or [number % 3 for number in numbers], **more})


def labels_of(collection: ms.Collection) -> list[float]:
    fetched: Any = collection.fetch(np.arange(len(collection)), ["label"])
    columns = fetched.columns if isinstance(fetched, ms.ReadBatch) else fetched
    assert list(columns) == ["label"]
    assert collection.column("label").to_pylist() == columns["label"].tolist()
    return columns["label"].tolist()


def test_labels_of_the_store_are_joined_by_question_in_any_order(store: ms.Traces):
    publish_table(store.path / "labels.parquet", label_table(list(range(25))[::-1]))
    labelled = ms.labelled(store)
    assert labels_of(labelled) == [number % 3 for number in range(20)]
    assert labelled.fetch([4])["label"].dtype == np.int64  # pyright: ignore
    assert rows(labelled, [7, 2], ["question_id", "label"]) == [
        {"question_id": "q7", "label": 1},
        {"question_id": "q2", "label": 2},
    ]
    assert labelled.field_names == [*store.field_names, "label"]
    assert "label" not in rows(labelled, [7], ["score"])[0]
    assert rows(labelled, [3])[0] == {**rows(store, [3])[0], "label": 0}


def test_labels_come_from_a_table_a_file_or_a_field(store: ms.Traces, tmp_path: Path):
    table = label_table(range(20), other=[float(number) / 4 for number in range(20)])
    pq.write_table(table, tmp_path / "mine.parquet")
    for source in (table, tmp_path / "mine.parquet", str(tmp_path / "mine.parquet")):
        assert labels_of(ms.labelled(store, source)) == [number % 3 for number in range(20)]
        assert labels_of(ms.labelled(store, source, column="other")) == [number / 4 for number in range(20)]
    assert labels_of(ms.labelled(store, column="score")) == [number / 2 for number in range(20)]


def test_values_map_texts_to_numbers(store: ms.Traces):
    labelled = ms.labelled(store, column="verdict", values={"right": 0, "wrong": 1})
    assert labels_of(labelled) == [number % 2 for number in range(20)]
    with pytest.raises(ms.errors.BadSource, match="'right'"):
        ms.labelled(store, column="verdict")


def test_labels_follow_subsets_and_splits(store: ms.Traces):
    labelled = ms.labelled(store, column="score")
    assert labels_of(labelled.subset([7, 3])) == [3.5, 1.5]
    assert labels_of(ms.labelled(store.subset([7, 3]), label_table(range(20)))) == [1, 0]
    for part in ms.split(labelled, {"a": 0.5, "b": 0.5}):
        assert labels_of(part) == [float(name[1:]) / 2 for name in ids(part)]


def test_reads_are_labelled_by_a_column(few_reads: ms.Reads):
    labelled = ms.labelled(few_reads, column="class_id")
    assert labels_of(labelled) == [number % 5 for number in range(80)]
    assert rows(labelled, [7], ["sequence", "label"]) == [{**rows(few_reads, [7], ["sequence"])[0], "label": 2}]
    with pytest.raises(ms.errors.BadSource, match="column="):
        ms.labelled(few_reads, label_table(range(3)))


def test_missing_labels_are_an_error_that_counts_them(store: ms.Traces):
    with pytest.raises(ms.errors.MissingLabel, match=r"8 of 20 .*'label'.* 12\b"):
        ms.labelled(store, label_table(range(12)))
    some: list[object] = [1.0, None, float("nan"), *[0.5] * 17]
    with pytest.raises(ms.errors.MissingLabel, match=r"2 of 20 .* 1\b"):
        ms.labelled(store, label_table(range(20), some))
    with pytest.raises(ms.errors.MissingLabel, match=r"10 of 20 .*'right'"):
        ms.labelled(store, column="verdict", values={"right": 0})


def test_records_without_a_label_can_be_left_out(store: ms.Traces):
    kept = ms.labelled(store, label_table([2, 4, 6]), missing="drop")
    assert ids(kept) == ["q2", "q4", "q6"] and labels_of(kept) == [2, 1, 0]
    assert kept.record_numbers(np.arange(3)).tolist() == [2, 4, 6]
    with pytest.raises(ValueError, match="missing='keep'"):
        ms.labelled(store, missing="keep")  # pyright: ignore[reportArgumentType]


def test_a_question_with_two_different_labels_is_an_error_and_a_repeated_label_is_not(store: ms.Traces):
    twice = pa.concat_tables([label_table(range(20)), label_table([3])])
    assert labels_of(ms.labelled(store, twice))[3] == 0
    with pytest.raises(ms.errors.BadSource, match=r"'q3'.* 0 .*1"):
        ms.labelled(store, pa.concat_tables([label_table(range(20)), label_table([3], [1])]))


def test_missing_label_sources_are_errors_that_name_them(store: ms.Traces, tmp_path: Path):
    with pytest.raises(ms.errors.BadSource, match="'label'"):
        ms.labelled(store)
    with pytest.raises(ms.errors.BadSource, match=r"none\.parquet"):
        ms.labelled(store, tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("no parquet")
    with pytest.raises(ms.errors.BadSource, match=r"text\.parquet"):
        ms.labelled(store, tmp_path / "text.parquet")
    with pytest.raises(ms.errors.BadSource, match=r"'question_id'.*'grade'"):
        ms.labelled(store, label_table(range(20)), column="grade")
