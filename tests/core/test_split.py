"""A split depends on each record's key and on nothing else: not on order, on other records, or on when it is made."""

import json
import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.core.collection import Listed, Marked
from support.effort import num_examples
from support.making_small import write_reads, write_traces

SHARES = {"train": 0.7, "val": 0.15, "test": 0.15}
QUESTIONS = [f"q{number}" for number in range(2_000)]


def scores(name: str) -> dict[str, object]:
    """A record of scalars only: the store is about keys here."""
    return {"question_id": name, "topic": f"topic {int(name[1:]) % 7}", "good": int(name[1:]) % 10 < 3}


def ids(part: ms.Collection) -> list[str]:
    return part.column("question_id").to_pylist()


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> ms.Traces:
    return write_traces(tmp_path_factory.mktemp("split") / "traces", QUESTIONS, scores)


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> ms.Reads:
    return write_reads(tmp_path_factory.mktemp("split") / "reads.fa", range(3_000))


# -- what is where


def test_every_record_is_in_one_split_and_shares_are_approximately_as_requested(traces: ms.Traces):
    train, val, test = split = ms.split(traces, SHARES)
    assert sorted(ids(train) + ids(val) + ids(test)) == sorted(QUESTIONS)
    for part, share in zip(split, SHARES.values(), strict=True):
        assert len(part) / len(traces) == pytest.approx(share, abs=0.03)
    assert len(split) == 3 and split["val"] is val
    with pytest.raises(KeyError, match="train, val, test"):
        split["dev"]


def test_a_split_keeps_the_order_of_the_store(traces: ms.Traces):
    for part in ms.split(traces, SHARES):
        numbers = part.record_numbers(np.arange(len(part)))
        assert (np.diff(numbers) > 0).all()
        assert ids(part) == [f"q{number}" for number in numbers]


def test_shares_below_one_leave_the_rest_out(traces: ms.Traces):
    small, tiny = ms.split(traces, {"small": 0.3, "tiny": 0.05})
    assert len(small) / len(traces) == pytest.approx(0.3, abs=0.03)
    assert len(tiny) / len(traces) == pytest.approx(0.05, abs=0.02)
    assert not set(ids(small)) & set(ids(tiny))


def test_equal_questions_stay_together(tmp_path: Path):
    names = [f"q{number % 40}" for number in range(200)]
    split = ms.split(write_traces(tmp_path / "t", names, scores), SHARES)
    for one, other in combinations(split, 2):
        assert not set(ids(one)) & set(ids(other))
    assert sum(map(len, split)) == 200


def test_a_text_column_keeps_its_values_together(traces: ms.Traces, reads: ms.Reads):
    parts = [set(part.column("topic").to_pylist()) for part in ms.split(traces, {"a": 0.5, "b": 0.5}, by="topic")]
    assert parts[0] | parts[1] == {f"topic {number}" for number in range(7)} and not parts[0] & parts[1]
    genomes = [set(part.column("tax_id").to_pylist()) for part in ms.split(reads, SHARES, by="tax_id")]
    assert len(set.union(*genomes)) == 300 == sum(map(len, genomes))


def test_a_column_of_integers_keeps_its_values_together(reads: ms.Reads):
    split = ms.split(reads, folds=3, by="class_id")
    classes = [set(part.column("class_id").to_pylist()) for part in split]
    assert sorted(label for part in classes for label in part) == [0, 1, 2, 3, 4]
    assert sum(map(len, split)) == 3_000


def test_reads_are_split_independently_unless_a_column_is_given(reads: ms.Reads):
    split = ms.split(reads, SHARES)
    assert split.rule.by is None
    for part, share in zip(split, SHARES.values(), strict=True):
        assert len(part) / 3_000 == pytest.approx(share, abs=0.03)
    assert len(set(split["test"].column("tax_id").to_pylist())) > 200


def test_another_salt_gives_another_split(traces: ms.Traces):
    one, other = (set(ids(ms.split(traces, SHARES, salt=salt)["test"])) for salt in ("a", "b"))
    assert 0.05 < len(one & other) / len(one) < 0.3  # 0.15 expected of independent ones
    assert set(ids(ms.split(traces, SHARES, salt="a")["test"])) == one


# -- what it does not depend on


def test_adding_records_moves_no_other_record(tmp_path: Path):
    few = ms.split(write_traces(tmp_path / "t", QUESTIONS[:300], scores), SHARES)
    before = {name: ids(few[name]) for name in SHARES}
    grown = ms.split(write_traces(tmp_path / "t", QUESTIONS[300:500], scores), SHARES)
    for name in SHARES:
        assert ids(grown[name])[: len(before[name])] == before[name]
        assert not set(ids(grown[name])[len(before[name]) :]) & set(QUESTIONS[:300])
    assert sum(map(len, grown)) == 500


def test_adding_reads_moves_no_other_read(tmp_path: Path):
    few = ms.split(write_reads(tmp_path / "few.fa", range(400)), SHARES)
    many = ms.split(write_reads(tmp_path / "many.fa", range(700)), SHARES)
    for one, other in zip(few, many, strict=True):
        numbers = other.record_numbers(np.arange(len(other)))
        assert numbers[numbers < 400].tolist() == one.record_numbers(np.arange(len(one))).tolist()


def test_the_order_of_writing_does_not_matter(tmp_path: Path, traces: ms.Traces):
    shuffled = np.random.default_rng(0).permutation(QUESTIONS[:300]).tolist()
    other = ms.split(write_traces(tmp_path / "t", shuffled, scores), SHARES)
    for part, same in zip(ms.split(traces, SHARES), other, strict=True):
        assert set(ids(same)) == set(ids(part)) & set(shuffled)


def test_a_key_is_in_the_same_split_in_any_collection(tmp_path: Path, traces: ms.Traces):
    """Traces of two models on the same questions have the same test split, whatever else is in the stores."""
    other = write_traces(tmp_path / "t", [*QUESTIONS[500:700], "q9999"], scores)
    test = set(ids(ms.split(traces, SHARES)["test"]))
    assert set(ids(ms.split(other, SHARES)["test"])) - {"q9999"} == test & set(QUESTIONS[500:700])
    view = traces.subset(np.arange(500, 700))
    assert set(ids(ms.split(view, SHARES)["test"])) == test & set(QUESTIONS[500:700])


def test_splits_never_change_between_versions(traces: ms.Traces, reads: ms.Reads):
    """Results are compared on these: they must never change."""
    assert {name: ids(ms.split(traces, SHARES)[name])[:5] for name in SHARES} == BY_QUESTION
    assert {name: _numbers(ms.split(reads, SHARES)[name])[:5] for name in SHARES} == BY_NUMBER
    assert [_numbers(fold)[:3] for fold in ms.split(reads, folds=3)] == FOLDS


def _numbers(part: ms.Collection) -> list[int]:
    return part.record_numbers(np.arange(len(part))).tolist()


BY_QUESTION = {
    "train": ["q0", "q1", "q2", "q4", "q6"],
    "val": ["q3", "q11", "q19", "q28", "q58"],
    "test": ["q5", "q15", "q33", "q45", "q55"],
}
BY_NUMBER = {"train": [0, 1, 2, 3, 5], "val": [10, 13, 25, 28, 47], "test": [4, 9, 17, 26, 43]}
FOLDS = [[0, 3, 7], [2, 5, 9], [1, 4, 6]]


# -- files


def test_a_saved_split_is_the_same_when_loaded(tmp_path: Path, traces: ms.Traces, reads: ms.Reads):
    for collection, by in ((traces, None), (reads, "tax_id"), (reads, None)):
        split = ms.split(collection, SHARES, by=by, salt="x")
        split.save(tmp_path / "split.json")
        again = ms.Split.load(tmp_path / "split.json", collection)
        assert again.rule == split.rule
        for one, other in zip(split, again, strict=True):
            assert one.fingerprint == other.fingerprint and one.lineage == other.lineage
            assert np.array_equal(one.record_numbers(np.arange(len(one))), other.record_numbers(np.arange(len(other))))


def test_a_saved_split_of_a_subset_applies_only_to_that_subset(tmp_path: Path, traces: ms.Traces):
    train, _, _ = ms.split(traces, SHARES)
    inner = ms.split(train, {"a": 0.5, "b": 0.5})
    inner.save(tmp_path / "inner.json")
    assert ids(ms.Split.load(tmp_path / "inner.json", train)["a"]) == ids(inner["a"])
    with pytest.raises(ms.errors.BadSplit, match=r"inner\.json"):
        ms.Split.load(tmp_path / "inner.json", traces)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ""),
        ("not json", ""),
        ("[1, 2]", ""),
        ("{}", ""),
        ("null", ""),
        ('{"millstream split": 99}', "version 99"),
    ],
)
def test_a_file_that_is_not_a_split_is_an_error_that_names_it(tmp_path: Path, traces: ms.Traces, text: str, found: str):
    file = tmp_path / "split.json"
    file.write_text(text)
    with pytest.raises(ms.errors.BadSplit, match=rf"split\.json: .*{found}"):
        ms.Split.load(file, traces)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ms.errors.BadSplit, match=r"split\.json"):
        ms.Split.load(file, traces)


def test_a_missing_split_file_is_an_error_that_names_it(tmp_path: Path, traces: ms.Traces):
    with pytest.raises(ms.errors.BadSplit, match=r"none\.json"):
        ms.Split.load(tmp_path / "none.json", traces)


@pytest.mark.parametrize("parts", [None, 3, {}, {"a": "half"}, {"a": 2.0}])
def test_a_split_file_with_missing_or_invalid_shares_is_an_error(tmp_path: Path, traces: ms.Traces, parts: object):
    file = tmp_path / "split.json"
    ms.split(traces, SHARES).save(file)
    saved = json.loads(file.read_text())
    del saved["parts"]
    file.write_text(json.dumps(saved if parts is None else {**saved, "parts": parts}))
    with pytest.raises(ms.errors.BadSplit):
        ms.Split.load(file, traces)


# -- folds, and splits of splits


def test_folds_cover_every_record_once_and_are_approximately_equal(traces: ms.Traces):
    split = ms.split(traces, folds=5)
    assert sorted(name for part in split for name in ids(part)) == sorted(QUESTIONS)
    assert all(len(part) / 2_000 == pytest.approx(0.2, abs=0.03) for part in split)


def test_pairs_train_on_everything_but_the_fold(traces: ms.Traces):
    held: list[str] = []
    for rest, fold in ms.split(traces, folds=4).pairs():
        assert not set(ids(rest)) & set(ids(fold))
        assert set(ids(rest)) | set(ids(fold)) == set(QUESTIONS)
        held += ids(fold)
    assert sorted(held) == sorted(QUESTIONS)


def test_pairs_leave_out_records_that_are_in_no_split(traces: ms.Traces):
    split = ms.split(traces, {"a": 0.3, "b": 0.3})
    known = set(ids(split["a"])) | set(ids(split["b"]))
    assert all(set(ids(rest)) | set(ids(part)) == known for rest, part in split.pairs())


@pytest.mark.parametrize("by", ["question_id", None])
def test_splitting_a_split_again_is_an_independent_draw(traces: ms.Traces, reads: ms.Reads, by: str | None):
    train = ms.split(traces if by else reads, SHARES)["train"]
    inner = ms.split(train, SHARES)
    for part, share in zip(inner, SHARES.values(), strict=True):
        assert len(part) / len(train) == pytest.approx(share, abs=0.04)
    deeper = ms.split(inner["train"], {"a": 0.5, "b": 0.5})
    assert len(deeper["a"]) / len(inner["train"]) == pytest.approx(0.5, abs=0.05)


def test_folds_are_independent_of_a_split_of_the_same_records(traces: ms.Traces):
    train = set(ids(ms.split(traces, SHARES)["train"]))
    for fold in ms.split(traces, folds=5):
        assert len(train & set(ids(fold))) / len(fold) == pytest.approx(0.7, abs=0.08)
    for rest, _ in ms.split(traces, folds=5).pairs():
        assert len(ms.split(rest, {"a": 0.5, "b": 0.5})["a"]) / len(rest) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    "put_together", [lambda parts: ms.concat(parts), lambda parts: ms.mix(dict.fromkeys(parts, 1))]
)
def test_splitting_concatenated_splits_is_an_independent_draw(traces: ms.Traces, put_together):
    train = put_together([ms.split(traces, SHARES)["train"]])
    assert len(ms.split(train, {"a": 0.5, "b": 0.5})["a"]) / len(train) == pytest.approx(0.5, abs=0.05)


# -- errors and the report


def test_records_without_a_key_are_an_error_that_counts_them(tmp_path: Path):
    def some(name: str) -> dict[str, object]:
        return {"question_id": name, "topic": None if int(name[1:]) in (3, 5, 8) else "t"}

    traces = write_traces(tmp_path / "t", QUESTIONS[:20], some)
    with pytest.raises(ms.errors.BadSplit, match=r"3 of 20 .*'topic'.* 3\b"):
        ms.split(traces, SHARES, by="topic")
    assert sum(map(len, ms.split(traces, SHARES))) == 20


@pytest.mark.parametrize("parts", [{}, {"a": 0.0, "b": 1.0}, {"a": -0.1}, {"a": 0.7, "b": 0.4}, {"a": 1.1}])
def test_invalid_shares_are_an_error(traces: ms.Traces, parts: dict[str, float]):
    with pytest.raises(ValueError, match=re.escape(str(parts))):
        ms.split(traces, parts)


def test_shares_and_folds_exclude_each_other(traces: ms.Traces):
    for wrong in ({}, {"parts": SHARES, "folds": 3}):
        with pytest.raises(ValueError, match="folds"):
            ms.split(traces, **wrong)
    with pytest.raises(ValueError, match="folds=1"):
        ms.split(traces, folds=1)


def test_shares_that_sum_to_one_after_rounding_leave_nothing_out(traces: ms.Traces):
    for num in (3, 7, 10):
        assert sum(map(len, ms.split(traces, {f"p{i}": 1 / num for i in range(num)}))) == 2_000


def test_a_key_that_no_record_has_is_named(traces: ms.Traces):
    with pytest.raises(KeyError, match="'genus'"):
        ms.split(traces, SHARES, by="genus")


def test_the_report_counts_records_keys_and_classes(traces: ms.Traces):
    split = ms.split(traces, {"a": 0.5, "b": 0.5}, by="topic")
    lines = split.report("good").splitlines()
    assert lines[0].split() == ["split", "records", "share", "keys", "good=True", "good=False"]
    for line, (name, part) in zip(lines[1:], [("a", split["a"]), ("b", split["b"])], strict=True):
        good = sum(part.column("good").to_pylist())
        keys = len(set(part.column("topic").to_pylist()))
        shares = [f"{len(part) / 2_000:.1%}", str(keys), f"{good / len(part):.1%}", f"{1 - good / len(part):.1%}"]
        assert line.split() == [name, str(len(part)), *shares]
    assert repr(split).startswith("Split of 2000 records by topic\n")


def test_an_empty_collection_has_empty_splits(traces: ms.Traces, reads: ms.Reads):
    for collection in (traces, reads):
        assert [len(part) for part in ms.split(collection.subset([]), SHARES)] == [0, 0, 0]


# -- marked numbers


@settings(max_examples=num_examples(50))
@given(st.integers(0, 2_000), st.floats(0, 1), st.integers(0, 100))
def test_marked_numbers_are_the_same_as_listed_ones(n: int, share: float, seed: int):
    rng = np.random.default_rng(seed)
    mask = rng.random(n) < share
    numbers = np.flatnonzero(mask)
    positions = rng.integers(0, max(len(numbers), 1), 50) if len(numbers) else np.empty(0, np.int64)
    for marked in (Marked([mask]), Marked([mask], most_listed=0)):
        assert len(marked) == len(numbers)
        assert np.array_equal(marked.take(positions), numbers[positions])
        assert np.array_equal(marked.take(np.arange(len(numbers))), numbers)


def test_marks_at_every_edge_are_found():
    for numbers in ([0], [63], [64], [255], [256], [1023], [0, 63, 64, 127, 255, 256, 700, 1023], range(1024)):
        mask = np.zeros(1024, np.bool_)
        mask[list(numbers)] = True
        assert Marked([mask], most_listed=0).take(np.arange(len(numbers))).tolist() == list(numbers)


def test_masks_in_pieces_are_the_same_as_one_mask():
    mask = np.random.default_rng(0).random(3_000) < 0.3
    pieces, whole = Marked([mask[:1024], mask[1024:1536], mask[1536:]], most_listed=0), Marked([mask])
    assert pieces.digest() == whole.digest() and len(pieces) == len(whole)
    assert np.array_equal(pieces.take(np.arange(len(whole))), np.flatnonzero(mask))


def test_listed_numbers_stay_in_the_order_given():
    numbers = np.array([5, 1, 9, 1])
    assert Listed(numbers).take(np.array([3, 0])).tolist() == [1, 5]
    assert Listed(numbers).digest() != Listed(numbers[::-1].copy()).digest()
