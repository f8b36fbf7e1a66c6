"""Writing: shards are sealed, stores are resumed, wrong types are rejected by name, and memory is one record."""

import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millstream as ms
from millstream.errors import ConfigMismatch, SchemaMismatch, StoreExists
from millstream.traces.store.manifest import open_file, shard_name, sidecar_name
from support.making import files_of, record, same, write


def keys(first: int, end: int) -> list[tuple[int, int]]:
    return [(1, number) for number in range(first, end)]


def check(path: Path, count: int) -> None:
    """The store has exactly the records `keys(0, count)`, in order."""
    traces = ms.open(path)
    assert len(traces) == count
    for number, found in enumerate(traces):
        assert same(found, record(1, number))


# -- shards


def test_a_shard_is_sealed_after_shard_records(tmp_path: Path) -> None:
    path = write(tmp_path / "store", keys(0, 7), shard_records=3)
    assert [(shard.number, shard.records) for shard in ms.open(path).shards] == [(0, 3), (1, 3), (2, 1)]
    check(path, 7)


def test_a_shard_is_sealed_once_it_reaches_shard_bytes(tmp_path: Path) -> None:
    one = {"data": np.zeros(10_000, np.uint8)}
    with ms.TraceWriter(tmp_path / "store", shard_bytes="25kB") as writer:
        writer.extend([one] * 8)
    shards = ms.open(tmp_path / "store").shards
    assert [shard.records for shard in shards] == [3, 3, 2]
    assert all(25_000 <= shard.bytes < 36_000 for shard in shards[:-1])


def test_the_first_limit_reached_seals_the_shard(tmp_path: Path) -> None:
    sizes = [30_000, 10, 10, 10, 10, 30_000]
    with ms.TraceWriter(tmp_path / "store", shard_bytes=25_000, shard_records=2) as writer:
        writer.extend({"data": np.zeros(size, np.uint8)} for size in sizes)
    assert [shard.records for shard in ms.open(tmp_path / "store").shards] == [1, 2, 2, 1]


def test_readers_see_a_full_shard_immediately(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store", shard_records=2) as writer:
        for number in range(5):
            writer.append(record(1, number))
            assert len(ms.open(tmp_path / "store")) == (number + 1) // 2 * 2


def test_seal_makes_appended_records_visible_and_writing_continues(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with ms.TraceWriter(path) as writer:
        writer.append(record(1, 0))
        assert len(ms.open(path)) == 0
        writer.seal()
        check(path, 1)
        writer.seal()  # nothing to seal
        writer.append(record(1, 1))
    check(path, 2)
    assert [shard.records for shard in ms.open(path).shards] == [1, 1]


def test_an_open_shard_has_a_different_file_name(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with ms.TraceWriter(path) as writer:
        writer.append(record(1, 0))
        assert open_file(path, 0).exists() and not (path / shard_name(0)).exists()
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", shard_name(0), sidecar_name(0)]


# -- resuming


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_appending_to_a_store_rewrites_no_sealed_shard_and_continues_the_numbering(
    compression: Any, tmp_path: Path
) -> None:
    path = write(tmp_path / "store", keys(0, 5), shard_records=2, compression=compression)

    def sealed() -> dict[str, tuple[object, ...]]:
        stats = {name: os.stat(path / name) for name in files_of(path) if name.startswith("shard-")}
        return {name: (s.st_ino, s.st_mtime_ns, (path / name).read_bytes()) for name, s in stats.items()}

    before = sealed()
    assert len(before) == 6
    with ms.TraceWriter(path, shard_records=2) as writer:
        assert len(writer) == 5
        assert writer.recovered == []
        writer.extend(record(1, number) for number in range(5, 8))
    after = sealed()
    assert {name: after[name] for name in before} == before
    assert [(s.number, s.records) for s in ms.open(path).shards] == [(0, 2), (1, 2), (2, 1), (3, 2), (4, 1)]
    assert ms.open(path).compression == compression
    check(path, 8)


def test_opening_and_closing_a_store_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "store", keys(0, 3))
    before = files_of(path)
    ms.TraceWriter(path).close()
    assert files_of(path) == before


def test_an_empty_store_opens_and_can_be_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "store"
    ms.TraceWriter(path, config={"seed": 1}).close()
    assert len(ms.open(path)) == 0 and ms.open(path).fields == {} and ms.open(path).config == {"seed": 1}
    with ms.TraceWriter(path, config={"seed": 1}) as writer:
        assert writer.fields == [] and writer.done_ids == set()
        writer.append(record(1, 0))
    check(path, 1)


def test_a_different_configuration_is_rejected_with_the_difference(tmp_path: Path) -> None:
    path = write(tmp_path / "store", keys(0, 1), config={"model": "gpt2", "seed": 1})
    before = files_of(path)
    with pytest.raises(ConfigMismatch) as error:
        ms.TraceWriter(path, config={"model": "pythia", "seed": 1})
    assert str(path) in str(error.value)
    assert "(model: 'gpt2' -> 'pythia')" in str(error.value)
    assert files_of(path) == before


@pytest.mark.parametrize("config", [{"model": "gpt2", "layers": [0, 6]}, {"layers": [0, 6], "model": "gpt2"}, None])
def test_the_same_configuration_or_none_resumes_the_store(config: dict[str, object] | None, tmp_path: Path) -> None:
    path = write(tmp_path / "store", keys(0, 1), config={"model": "gpt2", "layers": [0, 6]})
    with ms.TraceWriter(path, config=config) as writer:
        assert writer.config == {"model": "gpt2", "layers": [0, 6]}
        writer.append(record(1, 1))
    assert ms.open(path).config == {"model": "gpt2", "layers": [0, 6]}


def test_a_configuration_with_a_tuple_matches_itself(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / "store", keys(number, number + 1), config={"layers": (0, 6)})
    check(tmp_path / "store", 2)


def test_a_different_compression_is_rejected_and_the_default_is_that_of_the_store(tmp_path: Path) -> None:
    path = write(tmp_path / "store", keys(0, 1), compression="lz4")
    with pytest.raises(ConfigMismatch, match=r"'lz4'.*'zstd'"):
        ms.TraceWriter(path, compression="zstd")
    write(path, keys(1, 2), compression="lz4")
    write(path, keys(2, 3))
    assert ms.open(path).compression == "lz4"
    check(path, 3)


def test_a_folder_with_other_files_is_rejected_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StoreExists, match=r"notes\.txt"):
        ms.TraceWriter(tmp_path)
    assert files_of(tmp_path) == {"notes.txt": b"mine"}


def test_a_schema_that_contradicts_the_store_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "store", keys(0, 1))
    with pytest.raises(SchemaMismatch, match=r"'hidden': float16\[block, token, dim\]"):
        ms.TraceWriter(path, schema={"hidden": "float16[block, token, dim]"})
    with pytest.raises(SchemaMismatch, match="field 'other'"):
        ms.TraceWriter(path, schema={"other": "string"})
    write(path, keys(1, 2), schema={"hidden": "float16[layer, axis1, axis2]", "score": "double"})
    check(path, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"durability": "maybe"}, "durability.*'maybe'"),
        ({"compression": "gzip"}, "compression.*'gzip'"),
        ({"shard_records": 0}, "shard_records=0"),
        ({"shard_bytes": 0}, " 0"),
        ({"shard_bytes": "much"}, "'much'"),
        ({"schema": {"x": "strin"}}, "'x': 'strin'"),
    ],
)
def test_a_bad_option_is_rejected_before_anything_is_created(options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, SchemaMismatch), match=message):
        ms.TraceWriter(tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


# -- the writer's own view


def test_len_counts_existing_sealed_and_open_records(tmp_path: Path) -> None:
    path = write(tmp_path / "store", keys(0, 3))
    with ms.TraceWriter(path, shard_records=2) as writer:
        assert len(writer) == 3
        for number in range(3, 6):
            writer.append(record(1, number))
            assert len(writer) == number + 1
    assert len(writer) == 6
    assert repr(writer) == f"TraceWriter({str(path)!r}: 6 records)"


def test_done_ids_include_those_of_the_store_and_of_this_writer(tmp_path: Path) -> None:
    path = write(tmp_path / "store", keys(0, 3), shard_records=2)
    with ms.TraceWriter(path, shard_records=2) as writer:
        writer.append(record(1, 3))
        assert writer.done_ids == {"1:0", "1:1", "1:2", "1:3"}
        writer.append(record(1, 4))
        assert writer.done_ids == {"1:0", "1:1", "1:2", "1:3", "1:4"}


def test_done_ids_may_be_numbers(tmp_path: Path) -> None:
    for number in (7, np.int64(8)):
        with ms.TraceWriter(tmp_path / "store") as writer:
            writer.append({"question_id": number})
    with ms.TraceWriter(tmp_path / "store") as writer:
        assert writer.done_ids == {7, 8}


@pytest.mark.parametrize("one", [{"score": 1.0}, {"question_id": None}])
def test_records_without_an_id_add_nothing_to_done_ids(one: dict[str, object], tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        assert writer.done_ids == set()
        writer.append(one)
        assert writer.done_ids == set()
    with ms.TraceWriter(tmp_path / "store") as writer:
        assert writer.done_ids == set()


def test_fields_are_known_from_the_first_record_on(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        assert writer.fields == []
        writer.append({"b": 1, "a": None})
        assert writer.fields == ["b", "a"]
    with ms.TraceWriter(tmp_path / "store") as writer:
        assert writer.fields == ["b", "a"]


def test_fields_may_come_in_another_order(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.extend([{"a": 1, "b": "x"}, {"b": "y", "a": 2}])
    assert list(ms.open(tmp_path / "store")) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]


# -- closing


def test_a_writer_can_be_closed_twice_and_then_rejects_records(tmp_path: Path) -> None:
    writer = ms.TraceWriter(tmp_path / "store")
    writer.append(record(1, 0))
    writer.close()
    writer.close()
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match="closed"):
        writer.append(record(1, 1))
    assert files_of(tmp_path) == before
    check(tmp_path / "store", 1)


def test_an_exception_in_the_with_block_propagates_and_appended_records_are_sealed(tmp_path: Path) -> None:
    def fail_half_way() -> None:
        with ms.TraceWriter(tmp_path / "store") as writer:
            writer.append(record(1, 0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    check(tmp_path / "store", 1)
    assert not list((tmp_path / "store").glob("*.open"))


@pytest.mark.parametrize(("durability", "calls"), [("power", 1), ("process", 0)])
def test_power_durability_syncs_after_every_record(
    durability: Any, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(fd) or real(fd))
    with ms.TraceWriter(tmp_path / "store", durability=durability) as writer:
        for number in range(3):
            writer.append(record(1, number))
            assert len(synced) == calls * (number + 1)
    check(tmp_path / "store", 3)


def test_a_new_store_survives_a_power_failure_with_the_folders_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or real(fd))
    store = tmp_path / "new" / "deep" / "store"
    with ms.TraceWriter(store, durability="power") as writer:
        writer.append(record(1, 0))
        assert {str(folder) for folder in (store, *list(store.parents)[:3])} <= set(synced)
    synced.clear()
    with ms.TraceWriter(tmp_path / "other" / "store") as writer:
        writer.append(record(1, 0))
        assert str(tmp_path) not in synced
        writer.seal()
        assert {str(tmp_path / "other" / "store"), str(tmp_path / "other"), str(tmp_path)} <= set(synced)


# -- wrong types

FIRST = {
    "question_id": "a",
    "count": 1,
    "score": 0.5,
    "ok": True,
    "raw": b"x",
    "tags": ["t"],
    "more": {"why": "so", "n": 1},
    "hidden": np.zeros((2, 3, 4), np.float16),
    "tokens": np.zeros(3, np.int32),
    "unknown": None,
}


@pytest.mark.parametrize(
    ("name", "value", "expected", "found"),
    [
        ("question_id", 5, "string", "int '5'"),
        ("question_id", np.zeros(2), "string", "ndarray"),
        ("question_id", b"a", "string", "bytes"),
        ("count", "many", "int64", "str 'many'"),
        ("count", 1.5, "int64", "float '1.5'"),
        ("count", True, "int64", "bool 'True'"),
        ("count", 2**63, "int64", "int '9223372036854775808'"),
        ("count", 2**80, "int64", "int '1208925819614629174706176'"),
        ("count", np.zeros((), np.int64), "int64", "ndarray"),
        ("score", "high", "double", "str 'high'"),
        ("score", 2**53 + 1, "double", "int '9007199254740993'"),
        ("ok", 1, "bool", "int '1'"),
        ("raw", "text", "binary", "str 'text'"),
        ("raw", 3, "binary", "int '3'"),
        ("tags", "t", "list<item: string>", "str 't'"),
        ("tags", b"t", "list<item: string>", "bytes"),
        ("tags", [1], "list<item: string>", "list '[1]'"),
        ("more", {"why": 3, "n": 1}, "struct<why: string, n: int64>", "dict"),
        ("more", {"why": "so", "n": 1, "extra": 2}, "struct<why: string, n: int64>", "dict"),
        ("more", {"why": "so"}, "struct<why: string, n: int64>", "dict"),
        ("more", {}, "struct<why: string, n: int64>", "dict"),
        ("more", ["why"], "struct<why: string, n: int64>", "list"),
        ("hidden", np.zeros((2, 3, 4), np.float32), "float16[layer, axis1, axis2]", "float32 of shape [2, 3, 4]"),
        ("hidden", np.zeros((3, 4), np.float16), "float16[layer, axis1, axis2]", "float16 of shape [3, 4]"),
        ("hidden", [[[1.0]]], "float16[layer, axis1, axis2]", "list"),
        ("hidden", "text", "float16[layer, axis1, axis2]", "str"),
        ("tokens", np.array(["a"]), "a numeric array", "dtype <U1"),
        ("tokens", np.array([None]), "a numeric array", "dtype object"),
        ("unknown", object(), "a tensor, number, text or list", "object"),
        ("unknown", np.array([None]), "a numeric array", "dtype object"),
    ],
)
def test_a_value_of_the_wrong_type_is_rejected_with_both_types_and_writes_nothing(
    name: str, value: object, expected: str, found: str, tmp_path: Path
) -> None:
    path = tmp_path / "store"
    with ms.TraceWriter(path) as writer:
        writer.append(FIRST)
        with pytest.raises(SchemaMismatch) as error:
            writer.append({**FIRST, name: value})
        assert f"field {name!r}: expected {expected}, found {found}" in str(error.value)
        assert len(writer) == 1
        writer.append({**FIRST, "question_id": "b"})
    assert ms.open(path).ids == ["a", "b"]
    assert same(ms.open(path)[0], FIRST)


def test_a_missing_field_is_named_with_its_type(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.append(FIRST)
        with pytest.raises(SchemaMismatch, match="field 'score': expected double"):
            writer.append({name: value for name, value in FIRST.items() if name != "score"})
        writer.append({**FIRST, "score": None})
    assert ms.open(tmp_path / "store").column("score").to_pylist() == [0.5, None]


def test_an_unknown_field_is_named_with_the_known_fields(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.append({"a": 1, "b": 2})
        with pytest.raises(SchemaMismatch, match=r"field 'c': .*a, b"):
            writer.append({"a": 1, "b": 2, "c": 3})


@pytest.mark.parametrize(
    ("one", "message"),
    [
        ({"a": {}}, "found struct<>"),
        ({"a": [{}]}, "found list<item: struct<>>"),
        ({"a": 1, "_b": 2}, "field '_b'"),
        ({"": 2}, "field ''"),
        ({"a": 2**70}, "field 'a'"),
        ({"a": np.array([object()])}, "dtype object"),
    ],
)
def test_a_first_record_that_cannot_be_stored_is_rejected_and_the_next_may_have_other_fields(
    one: dict[str, object], message: str, tmp_path: Path
) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        with pytest.raises(SchemaMismatch) as error:
            writer.append(one)
        assert message in str(error.value)
        writer.append({"quite": "another"})
    assert list(ms.open(tmp_path / "store")) == [{"quite": "another"}]


def test_an_empty_dict_in_a_field_that_was_none_so_far_is_rejected_by_name(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.append({"more": None})
        with pytest.raises(SchemaMismatch, match=r"field 'more': expected .*, found (struct<>|dict)"):
            writer.append({"more": {}})
        writer.append({"more": {"a": 1}})
    assert list(ms.open(tmp_path / "store")) == [{"more": None}, {"more": {"a": 1}}]


def test_a_rejected_record_does_not_fix_the_fields_of_a_new_store(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store", schema={"count": "int64"}) as writer:
        with pytest.raises(SchemaMismatch, match="'count': expected int64, found str 'many'"):
            writer.append({"count": "many", "typo": 1})
        writer.append({"count": 1})
        assert writer.fields == ["count"]
    assert list(ms.open(tmp_path / "store")) == [{"count": 1}]


def test_a_rejected_record_does_not_fix_the_type_of_a_field_that_was_none(tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.append({"answer": None, "count": 1})
        with pytest.raises(SchemaMismatch, match="field 'count'"):
            writer.append({"answer": "text", "count": "many"})
        writer.append({"answer": 42, "count": 2})
    assert list(ms.open(tmp_path / "store")) == [{"answer": None, "count": 1}, {"answer": 42, "count": 2}]
    assert len(ms.open(tmp_path / "store").shards) == 2


def test_the_order_of_a_dicts_keys_does_not_matter(tmp_path: Path) -> None:
    records = [{"more": {"a": None, "b": 1}}, {"more": {"b": 2, "a": "x"}}, {"more": {"a": "y", "b": None}}]
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.extend(records)
    assert list(ms.open(tmp_path / "store")) == records


def test_a_given_schema_names_axes_and_narrows_types(tmp_path: Path) -> None:
    schema = {"hidden": "float32[layer, dim]", "score": "float32", "tags": "list<string>", "n": pa.int16()}
    with ms.TraceWriter(tmp_path / "store", schema=schema) as writer:
        writer.append({"n": 3, "tags": [], "score": 0.1, "hidden": np.ones((2, 3), np.float32), "text": "x"})
        with pytest.raises(SchemaMismatch, match="field 'n': expected int16, found int '40000'"):
            writer.append({"n": 40000, "tags": [], "score": 0.1, "hidden": None, "text": "x"})
    traces = ms.open(tmp_path / "store")
    assert {name: str(kind) for name, kind in traces.fields.items()} == {
        "n": "int16",
        "tags": "list<item: string>",
        "score": "float",
        "hidden": "float32[layer, dim]",
        "text": "string",
    }
    assert traces[0]["score"] == np.float32(0.1)
    assert traces.fetch([0], layers=1)["hidden"].shape == (1, 3)


# -- memory


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_writer_never_holds_two_records_in_memory(compression: Any, tmp_path: Path) -> None:
    record_bytes = 2_000_000
    hidden = np.random.default_rng(0).integers(0, 256, (10, record_bytes // 10), np.uint8)
    with ms.TraceWriter(tmp_path / "store", shard_bytes="30MB", compression=compression) as writer:
        writer.append({"question_id": "first", "hidden": hidden})
        arrow = pa.total_allocated_bytes()
        tracemalloc.start()
        try:
            for number in range(40):
                writer.append({"question_id": str(number), "hidden": hidden ^ np.uint8(number)})  # a new array each
                assert pa.total_allocated_bytes() - arrow < record_bytes
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert record_bytes <= peak < 2 * record_bytes * (1 if compression == "none" else 2)
    assert len(ms.open(tmp_path / "store")) == 41


def test_the_names_of_metadata_on_disk_never_change(tmp_path: Path):
    """Stores of every earlier version are read by these names."""
    with ms.TraceWriter(tmp_path / "store", config={"model": "m"}) as writer:
        writer.append(record(1, 0))
    with pa.ipc.open_file(tmp_path / "store" / "shard-00000.arrow") as shard:
        names = {name.decode() for name in shard.schema.metadata}
    assert {"millstream.version", "millstream.created", "millstream.config", "millstream.compression"} <= names


@pytest.mark.filterwarnings("ignore::millstream.errors.DamageWarning")
def test_a_sidecar_whose_column_names_are_not_text_costs_no_record(tmp_path: Path):
    """pyarrow raises UnicodeDecodeError for such a file, which is neither an OSError nor an ArrowException."""
    with ms.TraceWriter(tmp_path / "store") as writer:
        for number in range(3):
            writer.append(record(1, number))
    (tmp_path / "store" / "manifest.json").unlink()
    sidecar = tmp_path / "store" / sidecar_name(0)
    sidecar.write_bytes(sidecar.read_bytes().replace(b"question_id", b"\xe5uestion_id"))
    check(tmp_path / "store", 3)
