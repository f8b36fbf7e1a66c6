"""Merging, subsetting and dropping: records are copied bit for bit, and no tensor is ever decoded."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream as ms
from millstream.errors import ConfigMismatch, SchemaMismatch, StoreError, StoreExists
from millstream.traces.store import slices as layout
from millstream.traces.store.labels import read_labels
from millstream.traces.store.manifest import shard_name, sidecar_name
from millstream.traces.store.repair import verify
from millstream.traces.store.rewrite import (
    Written,
    drop_records,
    find_ids,
    merge,
    subset_records,
    subset_shards,
)
from millstream.traces.store.where import select_where
from support.extracting import drop, shard_files
from support.making import (
    die_everywhere,
    files_of,
    key_of,
    keys_in,
    noted,
    quiet,
    read_keys,
    record,
    same,
    write,
)

COMPRESSIONS = ["none", "lz4", "zstd"]


def keys(first: int, end: int, seed: int = 7) -> list[tuple[int, int]]:
    return [(seed, number) for number in range(first, end)]


def numbers_of(path: Path) -> list[int]:
    """The numbers of the records in a store, each compared with what was written; the store is verified."""
    assert list(verify(path)) == []
    return [number for _, number in keys_in(ms.open(path))]


def store(path: Path, records: Sequence[dict[str, object]], **options: Any) -> Path:
    with ms.TraceWriter(path, **options) as writer:
        writer.extend(records)
    return path


@pytest.fixture(scope="module", params=["none", "zstd"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten records in shards of three; never modified."""
    path = tmp_path_factory.mktemp("source") / "store"
    return write(path, keys(0, 10), shard_records=3, compression=request.param, config={"model": "gpt2"})


# -- merge


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_merged_store_has_all_records_in_order_as_copies_of_the_shard_files(compression: Any, tmp_path: Path) -> None:
    a = write(tmp_path / "a", keys(0, 5), shard_records=2, compression=compression, config={"seed": 1})
    b = write(tmp_path / "b", keys(5, 7), compression=compression, config={"seed": 1})
    before = files_of(a), files_of(b)
    reported: list[tuple[int, str]] = []
    written = merge([a, b], tmp_path / "out", progress=lambda done, note: reported.append((done, note)))
    out = ms.open(tmp_path / "out")
    assert written == Written(tmp_path / "out", 7, out.num_bytes)
    assert numbers_of(tmp_path / "out") == list(range(7))
    assert out.config == {"seed": 1} and out.compression == compression
    assert [(shard.number, shard.records) for shard in out.shards] == [(0, 2), (1, 2), (2, 1), (3, 2)]
    assert out.shards[3].seconds == ms.open(b).shards[0].seconds
    for name in (shard_name, sidecar_name):
        assert (tmp_path / "out" / name(3)).read_bytes() == (b / name(0)).read_bytes()
    assert reported[-1] == (out.num_bytes, f"b/{shard_name(0)}") and len(reported) == 4
    assert (files_of(a), files_of(b)) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "out"]


def test_the_tokenizer_is_copied_if_all_stores_have_the_same(tmp_path: Path) -> None:
    a, b, c = (write(tmp_path / name, keys(n, n + 2)) for n, name in ((0, "a"), (2, "b"), (4, "c")))
    for path, text in ((a, "one"), (b, "one"), (c, "other")):
        (path / "tokenizer.json").write_text(text)
    merge([a, b], tmp_path / "same")
    subset_shards(a, tmp_path / "shards", [0])
    subset_records(ms.open(a), tmp_path / "records", [1])
    for name in ("same", "shards", "records"):
        assert (tmp_path / name / "tokenizer.json").read_text() == "one"
    merge([a, c], tmp_path / "mixed")
    assert not (tmp_path / "mixed" / "tokenizer.json").exists()


def test_a_merged_store_can_be_appended_to(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", keys(0, 2)), write(tmp_path / "b", keys(2, 3))
    merge([a, b], tmp_path / "out")
    write(tmp_path / "out", keys(3, 5))
    assert numbers_of(tmp_path / "out") == list(range(5))
    assert ms.open(tmp_path / "out").find("7:3") == 3


def test_different_configurations_are_refused_unless_allowed_and_then_all_kept(tmp_path: Path) -> None:
    a = write(tmp_path / "a", keys(0, 1), config={"seed": 1})
    b = write(tmp_path / "b", keys(1, 2), config={"seed": 2})
    with pytest.raises(ConfigMismatch, match="seed: 1 -> 2"):
        merge([a, b], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert "seed: 1 -> 2" in merge([a, b], tmp_path / "out", mixed=True).note
    assert ms.open(tmp_path / "out").config == {"merged": [{"seed": 1}, {"seed": 2}]}


def test_ids_in_more_than_one_store_are_named_and_refused_unless_allowed(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", keys(0, 4)), write(tmp_path / "b", keys(2, 6))
    with pytest.raises(ConfigMismatch, match="7:2, 7:3"):
        merge([a, b], tmp_path / "out")
    written = merge([a, b], tmp_path / "out", mixed=True)
    assert written.records == 8 and "7:2, 7:3" in written.note


def answered(number: int, answer: str) -> dict[str, object]:
    hidden = np.full((2, 3, 4), number, np.float16)
    return {"question_id": f"q{number}", "generated_answer": answer, "aliases": ["yes"], "hidden": hidden}


def verdicts_in(path: Path) -> list[object]:
    labels = read_labels(path)
    assert labels is not None and labels.column("question_id").to_pylist() == ms.open(path).ids
    about = {key.decode(): value.decode() for key, value in (labels.schema.metadata or {}).items()}
    found = labels.column("verdict").to_pylist()
    assert about["millstream.store_fingerprint"] == ms.open(path).fingerprint
    assert {name: count for name, count in json.loads(about["millstream.counts"]).items() if count} == Counter(found)
    return found


def test_labels_are_carried_along_to_the_records_of_the_new_store(tmp_path: Path) -> None:
    a = store(tmp_path / "a", [answered(n, "yes" if n % 2 else "no") for n in range(6)], shard_records=2)
    b = store(tmp_path / "b", [answered(n, "no") for n in range(6, 9)])
    ms.label(a)
    note = merge([a, b], tmp_path / "half").note
    assert str(b) in note and not (tmp_path / "half" / "labels.parquet").exists()
    ms.label(b)
    merge([a, b], tmp_path / "all")
    assert verdicts_in(tmp_path / "all") == ["wrong", "right"] * 3 + ["wrong"] * 3
    subset_shards(a, tmp_path / "shards", [2, 0])
    assert verdicts_in(tmp_path / "shards") == ["wrong", "right"] * 2
    traces = ms.open(tmp_path / "all")
    subset_records(traces, tmp_path / "right", select_where(traces, "verdict = 'right' AND label = 0"))
    assert verdicts_in(tmp_path / "right") == ["right"] * 3
    ms.label(b, rule="em")
    assert "different rules" in merge([a, b], tmp_path / "rules").note
    store(a, [answered(9, "yes")])  # since then without a label
    assert "1 record" in subset_records(ms.open(a), tmp_path / "more", [0, 6]).note


def test_stores_that_label_the_same_id_differently_are_merged_without_labels(tmp_path: Path) -> None:
    a, b = store(tmp_path / "a", [answered(0, "yes")]), store(tmp_path / "b", [answered(0, "no")])
    ms.label(a)
    ms.label(b)
    assert "'q0'" in merge([a, b], tmp_path / "out", mixed=True).note
    assert not (tmp_path / "out" / "labels.parquet").exists()


def test_the_same_command_again_finds_its_finished_output_and_another_one_is_refused(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", keys(0, 4), shard_records=2), write(tmp_path / "b", keys(4, 6))
    for name, make in {
        "merged": lambda out: merge([a, b], out),
        "shards": lambda out: subset_shards(a, out, [1]),
        "records": lambda out: subset_records(ms.open(a), out, [2, 0]),
    }.items():
        first = make(tmp_path / name)
        before = files_of(tmp_path / name)
        again = make(tmp_path / name)
        assert (again.records, again.bytes) == (first.records, first.bytes) and again.note
        assert files_of(tmp_path / name) == before
        with pytest.raises(StoreExists):
            subset_shards(a, tmp_path / name, [0])
    write(a, keys(6, 7))
    with pytest.raises(StoreExists):
        merge([a, b], tmp_path / "merged")


def test_fields_that_are_none_in_one_store_take_their_type_from_the_other(tmp_path: Path) -> None:
    full = {"question_id": "f", "answer": "yes", "x": np.ones((2, 2, 2)), "tags": ["t"], "more": {"k": 1}}
    none = {"question_id": "n", "answer": None, "x": None, "tags": [], "more": {"k": None}}
    a, b = store(tmp_path / "a", [none]), store(tmp_path / "b", [full])
    for name, sources, expected in (("ab", [a, b], [none, full]), ("ba", [b, a], [full, none])):
        merge(sources, tmp_path / name)
        traces = ms.open(tmp_path / name)
        assert list(verify(tmp_path / name)) == []
        assert traces.fields == ms.open(b).fields
        assert all(map(same, traces, expected))
        assert traces.table.to_pylist() == [{k: v for k, v in one.items() if k != "x"} for one in expected]
        assert traces.fetch([0, 1], ["answer"])["answer"] == [one["answer"] for one in expected]
        assert [x is None for x in traces.fetch([0, 1], ["x"], layers=0)["x"]] == [one["x"] is None for one in expected]


def test_a_merged_store_without_its_manifest_still_knows_the_types_of_all_its_shards(tmp_path: Path) -> None:
    full = {"question_id": "f", "answer": "yes", "x": np.ones(3)}
    none = {"question_id": "n", "answer": None, "x": None}
    merge([store(tmp_path / "a", [full]), store(tmp_path / "b", [none])], tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    traces = ms.open(tmp_path / "out")
    assert {name: str(kind) for name, kind in traces.fields.items()} == {
        "question_id": "string",
        "answer": "string",
        "x": "float64[axis0]",
    }
    assert traces.column("answer").to_pylist() == ["yes", None]
    assert traces.fetch([0, 1])["x"][0].tolist() == [1, 1, 1]


def test_empty_stores_add_nothing(tmp_path: Path) -> None:
    a, empty = write(tmp_path / "a", keys(0, 2)), store(tmp_path / "empty", [])
    merge([empty, a, empty], tmp_path / "out")
    assert numbers_of(tmp_path / "out") == [0, 1]
    merge([empty, empty], tmp_path / "nothing")
    assert len(ms.open(tmp_path / "nothing")) == 0


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"question_id": "b", "x": np.ones(2, np.float32), "extra": 1}, r"'extra'.*b"),
        ({"question_id": "b"}, r"'x'.*a"),
        ({"question_id": 5, "x": np.ones(2, np.float32)}, r"'question_id'.*a.* string.*b.* int64"),
        ({"question_id": "b", "x": np.ones(2)}, r"field 'x': .*a has float32\[axis0\], .*b has float64\[axis0\]"),
        ({"question_id": "b", "x": "text"}, r"field 'x': .*a has float32\[axis0\], .*b has string"),
    ],
)
def test_stores_with_different_fields_are_rejected_by_name(
    other: dict[str, object], message: str, tmp_path: Path
) -> None:
    a = store(tmp_path / "a", [{"question_id": "a", "x": np.ones(2, np.float32)}])
    b = store(tmp_path / "b", [other])
    with pytest.raises(SchemaMismatch, match=message):
        merge([a, b], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_stores_of_different_compression_can_be_merged_and_subsetted(tmp_path: Path) -> None:
    parts = [
        write(tmp_path / compression, keys(2 * n, 2 * n + 2), compression=compression)
        for n, compression in enumerate(COMPRESSIONS)
    ]
    merge(parts, tmp_path / "merged")
    assert numbers_of(tmp_path / "merged") == list(range(6))
    subset_records(ms.open(tmp_path / "merged"), tmp_path / "subset", [5, 0, 3, 1, 2])
    assert numbers_of(tmp_path / "subset") == [5, 0, 3, 1, 2]


# -- the output


def test_an_output_that_is_not_empty_is_rejected_and_unchanged(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "out", tmp_path / "file"):
        for job in (
            lambda out=out: merge([source], out),
            lambda out=out: subset_shards(source, out, [0]),
            lambda out=out: subset_records(ms.open(source), out, [0]),
        ):
            with pytest.raises(StoreExists) as error:
                job()
            assert str(out) in str(error.value)
    assert files_of(tmp_path) == {"out/mine": b"mine", "file": b"mine"}


def test_the_output_may_be_an_empty_folder_and_parents_are_created(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    subset_shards(source, tmp_path / "out", [1])
    subset_shards(source, tmp_path / "a" / "b" / "out", [1])
    assert numbers_of(tmp_path / "out") == numbers_of(tmp_path / "a" / "b" / "out") == [3, 4, 5]


# -- subset


def test_some_shards_are_copied_in_the_order_given(source: Path, tmp_path: Path) -> None:
    written = subset_shards(source, tmp_path / "out", [3, 1])
    out = ms.open(tmp_path / "out")
    assert written.records == 4 and written.bytes == out.num_bytes
    assert numbers_of(tmp_path / "out") == [9, 3, 4, 5]
    assert [shard.number for shard in out.shards] == [0, 1]
    assert (tmp_path / "out" / shard_name(0)).read_bytes() == (source / shard_name(3)).read_bytes()
    assert out.config == {"model": "gpt2"} and out.fields == ms.open(source).fields


def test_a_missing_shard_is_named_with_the_range_of_shards(source: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"shard 7.* 0 to 3"):
        subset_shards(source, tmp_path / "out", [0, 7])
    assert list(tmp_path.iterdir()) == []


def test_some_records_are_copied_bit_for_bit_in_the_order_given(source: Path, tmp_path: Path) -> None:
    traces = ms.open(source)
    reported: list[int] = []
    wanted = [8, 0, 3, 4, 1]
    written = subset_records(traces, tmp_path / "out", wanted, progress=lambda done, note: reported.append(done))
    out = ms.open(tmp_path / "out")
    assert numbers_of(tmp_path / "out") == wanted
    assert written == Written(tmp_path / "out", 5, out.num_bytes)
    assert reported == [1, 2, 3, 4, 5]
    assert (out.config, out.compression, out.fields) == (traces.config, traces.compression, traces.fields)
    for position, number in enumerate(wanted):
        assert message(tmp_path / "out", position) == message(source, number)


def message(path: Path, number: int) -> bytes:
    """A record's bytes in the shard file."""
    traces = ms.open(path)
    row = traces.row(number)
    data = (path / shard_name(traces.shards[traces.locate(number)[0]].number)).read_bytes()
    return data[row.offset : row.offset + row.num_bytes]


def test_the_shards_of_a_subset_are_limited_in_bytes(source: Path, tmp_path: Path) -> None:
    subset_records(ms.open(source), tmp_path / "out", range(10), shard_bytes=30_000)
    shards = ms.open(tmp_path / "out").shards
    assert len(shards) > 1
    assert all(shard.bytes >= 30_000 for shard in shards[:-1])
    assert max(shard.bytes for shard in shards) < 30_000 + 40_000  # one record more than the limit
    assert numbers_of(tmp_path / "out") == list(range(10))


def test_the_shards_of_a_subset_are_limited_in_records(source: Path, tmp_path: Path) -> None:
    subset_records(ms.open(source), tmp_path / "out", range(10), shard_records=4)
    assert [shard.records for shard in ms.open(tmp_path / "out").shards] == [4, 4, 2]
    assert numbers_of(tmp_path / "out") == list(range(10))


def test_a_subset_of_records_with_late_types_keeps_them(tmp_path: Path) -> None:
    records = [{"n": 0, "x": None}, {"n": 1, "x": np.ones(2)}, {"n": 2, "x": None}]
    path = store(tmp_path / "store", records)
    subset_records(ms.open(path), tmp_path / "out", [2, 0, 1])
    assert list(verify(tmp_path / "out")) == []
    assert all(map(same, ms.open(tmp_path / "out"), [records[2], records[0], records[1]]))
    subset_records(ms.open(path), tmp_path / "first", [0])
    assert list(ms.open(tmp_path / "first")) == records[:1]
    assert ms.open(tmp_path / "first").fields == ms.open(path).fields


def test_a_subset_may_repeat_a_record_or_be_empty(source: Path, tmp_path: Path) -> None:
    subset_records(ms.open(source), tmp_path / "twice", [4, 4])
    assert numbers_of(tmp_path / "twice") == [4, 4]
    subset_records(ms.open(source), tmp_path / "none", [])
    assert numbers_of(tmp_path / "none") == []
    assert ms.open(tmp_path / "none").fields == ms.open(source).fields


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_merge_and_subset_never_decode_a_tensor(
    compression: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "store", keys(0, 4), shard_records=2, compression=compression)
    other = write(tmp_path / "other", keys(4, 8), shard_records=2, compression=compression)

    def refuse(name: str) -> None:
        raise RuntimeError("a tensor was decoded")

    with monkeypatch.context() as patch:
        patch.setattr(layout, "_codec", refuse)
        with pytest.raises(RuntimeError, match="a tensor was decoded"):
            ms.open(path)[0]
        merge([path, other], tmp_path / "merged")
        subset_shards(path, tmp_path / "shards", [1])
        subset_records(ms.open(path), tmp_path / "records", select_where(ms.open(path), "number != 1"))
        assert list(verify(tmp_path / "records")) == []
    assert numbers_of(tmp_path / "merged") == list(range(8))
    assert numbers_of(tmp_path / "shards") == [2, 3]
    assert numbers_of(tmp_path / "records") == [0, 2, 3]


# -- by ids


def test_ids_are_read_from_plain_lines_and_json_lines(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "ids"
    file.write_text('7:8\n\n  7:0 \n{"question_id": "7:3", "why": "so"}\n{"question_id": "7:8"}\n', encoding="utf-8")
    assert find_ids(ms.open(source), file) == [8, 0, 3, 8]


def test_numeric_ids_are_read_from_plain_lines_and_json_lines(tmp_path: Path) -> None:
    path = store(tmp_path / "store", [{"question_id": n} for n in (10, 20, 30)])
    (tmp_path / "ids").write_text('30\n{"question_id": 10}\n{"question_id": "20"}\n')
    assert find_ids(ms.open(path), tmp_path / "ids") == [2, 0, 1]


def test_ids_that_are_not_in_the_store_are_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "ids").write_text('7:1\nnobody\n{"question_id": "noone"}\n')
    with pytest.raises(StoreError, match=r"\bnobody, noone\b") as error:
        find_ids(ms.open(source), tmp_path / "ids")
    assert str(tmp_path / "ids") in str(error.value)


@pytest.mark.parametrize("line", ['{"name": "a"}', '{"question_id": ', "{a}"])
def test_a_line_that_is_neither_is_rejected_with_its_file(line: str, tmp_path: Path) -> None:
    path = store(tmp_path / "store", [{"question_id": "a"}])
    (tmp_path / "ids").write_text(f"a\n{line}\n")
    with pytest.raises(StoreError) as error:
        find_ids(ms.open(path), tmp_path / "ids")
    assert str(tmp_path / "ids") in str(error.value) and line.strip() in str(error.value)


# -- by SQL


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [
        {"question_id": "a", "text": "Grüße", "score": 0.5, "n": 1, "ok": True, "tags": ["x", "ß"], "more": {"k": 1}},
        {"question_id": "b", "text": "it's", "score": None, "n": 2, "ok": False, "tags": [], "more": {"k": None}},
        {"question_id": "c", "text": "", "score": 1.5, "n": 3, "ok": True, "tags": ["y"], "more": None},
        {"question_id": "d", "text": None, "score": -1.0, "n": 2**60, "ok": None, "tags": None, "more": {"k": 4}},
    ]
    path = tmp_path_factory.mktemp("texts") / "store"
    return store(path, [{**one, "x": np.ones(2)} for one in records], shard_records=2)


@pytest.mark.parametrize(
    ("where", "numbers"),
    [
        ("score > 0", [0, 2]),
        ("1", [0, 1, 2, 3]),
        ("0", []),
        ("number >= 2", [2, 3]),
        ("score IS NULL OR text IS NULL", [1, 3]),
        ("text LIKE 'gr%'", [0]),
        ("length(text) = 4", [1]),
        ("text = 'it''s'", [1]),
        ("upper(substr(text, 1, 2)) = 'IT'", [1]),
        ("\"text\" || question_id = 'c'", [2]),
        ("ok", [0, 2]),
        ("n = 1152921504606846976", [3]),
        ("tags LIKE '%\"ß\"%'", [0]),
        ("json_array_length(tags) = 0", [1]),
        ("json_extract(more, '$.k') = 4", [3]),
        ("more IS NULL", [2]),
        ("max(score, 1) > 1", [2]),
        ("ok OR number = 3", [0, 2, 3]),
        ("score > 1 -- the good ones", [2]),
    ],
)
def test_records_are_selected_by_an_sql_condition(where: str, numbers: list[int], texts: Path) -> None:
    assert select_where(ms.open(texts), where) == numbers


@pytest.mark.parametrize("where", ["", "scoer > 1", "score >", "score > 1)", "nosuchfunction(text)", "number = ?", "x"])
def test_an_invalid_condition_is_rejected_with_the_known_columns(where: str, texts: Path) -> None:
    with pytest.raises(StoreError, match="number, question_id, text, score, n, ok, tags, more") as error:
        select_where(ms.open(texts), where)
    assert f"--where {where!r}: " in str(error.value)


@pytest.mark.parametrize(
    "where",
    [
        "1); DELETE FROM traces; --",
        "1); DROP TABLE traces; SELECT (1",
        "1; ATTACH DATABASE '{file}' AS other",
        "1); ATTACH DATABASE '{file}' AS other; --",
        "1) UNION SELECT 12345 --",
        "load_extension('{file}')",
        "writefile('{file}', 'x')",
        "readfile('{file}') IS NULL",
    ],
)
def test_a_condition_cannot_write_attach_or_add_anything(where: str, texts: Path, tmp_path: Path) -> None:
    before = files_of(texts)
    with pytest.raises(StoreError, match="--where"):
        select_where(ms.open(texts), where.format(file=tmp_path / "file"))
    assert files_of(texts) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "where",
    [
        "EXISTS (SELECT 1 FROM json_each(tags))",
        "(WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT count(*) FROM r)",
        "1 IN (SELECT a.number FROM traces a, traces b, traces c)",
        "randomblob(1000000000) IS NULL",
        "length(zeroblob(1000000000)) > 0",
        "printf('%1000000000d', 1) = ''",
        "(" * 5000 + "1" + ")" * 5000,
        "number = 1 \0",
        "text = '\ud800'",
        " || ".join(["text"] * 1000),
    ],
)
def test_a_condition_is_an_expression_over_the_columns(where: str, texts: Path) -> None:
    with pytest.raises(StoreError, match="--where") as error:
        select_where(ms.open(texts), where)
    assert "\n" not in str(error.value)


def test_a_condition_that_needs_too_much_time_or_memory_ends_in_a_refusal(texts: Path) -> None:
    with pytest.raises(StoreError, match="longer than 0 s"):
        select_where(ms.open(texts), f"number IN ({', '.join(map(str, range(20_000)))})", limit_s=0)
    growing = "lower(text)"
    for _ in range(8):
        growing = f"replace({growing}, 'g', 'gggggggggggggggggggggg')"
    with pytest.raises(StoreError, match=r"too big|memory"):
        select_where(ms.open(texts), f"length({growing}) > 1")


@pytest.mark.parametrize("name", ['odd "name"', "a b", "rowid", "select", "traces", "größe", "it's", "a.b"])
def test_a_field_of_any_name_can_be_used_in_a_condition(name: str, tmp_path: Path) -> None:
    path = store(tmp_path / "store", [{name: 1}, {name: 2}])
    quoted = name.replace('"', '""')
    assert select_where(ms.open(path), f'"{quoted}" = 2') == [1]


@pytest.mark.parametrize("one", [{"number": 7, "text": "x"}, {"Text": 1, "text": "x"}], ids=["number", "Text and text"])
def test_fields_that_sql_cannot_distinguish_are_a_store_error(one: dict[str, object], tmp_path: Path) -> None:
    path = store(tmp_path / "store", [one])
    with pytest.raises(StoreError, match=r"number|text"):
        select_where(ms.open(path), "1")


def test_integers_too_large_for_sql_do_not_prevent_a_selection(tmp_path: Path) -> None:
    path = store(tmp_path / "store", [{"hash": n} for n in (1, 2**64 - 1)], schema={"hash": "uint64"})
    assert select_where(ms.open(path), "number = 1") == [1]


def test_a_selection_can_be_written_as_a_store(source: Path, tmp_path: Path) -> None:
    traces = ms.open(source)
    numbers = select_where(traces, "answer IS NOT NULL AND json_array_length(tags) = 2")
    assert numbers == [n for n in range(10) if record(7, n)["answer"] is not None and len(record(7, n)["tags"]) == 2]
    subset_records(traces, tmp_path / "out", numbers)
    assert numbers_of(tmp_path / "out") == numbers
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["config"] == {"model": "gpt2"}


# -- dropping records


def test_dropping_records_leaves_the_others_bit_for_bit_the_same(tmp_path: Path):
    path = write(tmp_path / "s", [(7, number) for number in range(10)], shard_records=3)
    before = files_of(path)
    drop_records(path, lambda _: [7, 1, 3, 4, 5])
    assert read_keys(path) == [(7, number) for number in (0, 2, 6, 8, 9)]
    assert list(verify(path)) == []
    after = files_of(path)
    assert not [name for name in after if name.startswith("shard-00001")]
    assert {name for name, data in after.items() if before.get(name) == data} >= {
        "shard-00003.arrow",
        "shard-00003.parquet",
    }
    traces = ms.open(path)
    assert [shard.number for shard in traces.shards] == [0, 2, 3]
    assert same(traces.by_id("7:8"), record(7, 8))
    with pytest.raises(KeyError, match="7:4"):
        traces.by_id("7:4")


def test_records_are_found_by_id_after_some_were_dropped(tmp_path: Path):
    path = write(tmp_path / "s", [(7, number) for number in range(80)], shard_records=1)
    assert (path / "ids.arrow").exists()
    drop_records(path, lambda _: range(0, 80, 2))
    traces = ms.open(path)
    assert [key_of(traces.by_id(f"7:{number}"))[1] for number in range(1, 80, 2)] == list(range(1, 80, 2))
    for number in range(0, 80, 2):
        with pytest.raises(KeyError):
            traces.by_id(f"7:{number}")


def test_dropping_none_changes_nothing_and_dropping_all_leaves_a_usable_store(tmp_path: Path):
    path = write(tmp_path / "s", [(7, number) for number in range(4)], shard_records=3)
    before = shard_files(path)
    drop_records(path, lambda _: [])
    assert shard_files(path) == before
    drop_records(path, lambda _: range(4))
    assert len(ms.open(path)) == 0 and shard_files(path) == {}
    write(path, [(7, 9)])
    assert read_keys(path) == [(7, 9)]


def test_a_drop_killed_at_any_step_loses_no_other_record_and_can_be_repeated(tmp_path: Path):
    template = write(tmp_path / "template", [(7, number) for number in range(5)], shard_records=2)
    dropped = [(7, number) for number in (1, 2, 3)]
    for path, _, how in die_everywhere(template, tmp_path / "work", drop, [1, 2, 3]):
        with noted(how), quiet():
            found = read_keys(path)
            assert set(found) - set(dropped) == {(7, 0), (7, 4)}
            assert len(set(found)) == len(found)
            numbers = [number for number, key in enumerate(found) if key in dropped]
            drop_records(path, lambda _, numbers=numbers: numbers)
            assert read_keys(path) == [(7, 0), (7, 4)]
