"""Damaged bytes never reach a native parser: each batch of damages is read by a child, whose death is a failure."""

import random
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millstream as ms
from millstream.core.memory import Map
from millstream.core.record import crc32c
from millstream.core.tables import is_table_intact, publish_table, read_parquet, read_table, to_parquet
from millstream.errors import BadSource, DamageWarning, StoreError
from millstream.traces import view
from millstream.traces.store.format import SEAL, read_shard
from millstream.traces.store.inspect import summarise
from millstream.traces.store.labels import read_labels
from millstream.traces.store.manifest import (
    DAMAGED,
    LABELS,
    MANIFEST,
    read_manifest,
    read_shard_seal,
    shard_name,
    sidecar_name,
    write_manifest,
)
from millstream.traces.store.repair import repair
from millstream.traces.store.traces import Traces
from support.effort import THOROUGH, num_examples
from support.making import damages, flip, run_child
from support.store_commands import COUNT, read_damaged, read_flipped, record, verify_and_repair_damaged

either_compression = pytest.mark.parametrize("store", ["none", "lz4"], indirect=True)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """One shard of tensors in slices, with labels; lz4 if a test does not say how it is compressed."""
    with ms.TraceWriter(tmp_path / "store", compression=getattr(request, "param", "lz4")) as writer:
        for number in range(COUNT):
            writer.append({**record(number), "note": None, "states": np.full((3, 5000), number, np.uint8)})
    ms.label(tmp_path / "store")
    return tmp_path / "store"


@either_compression
def test_every_flipped_bit_of_the_header_and_the_frame_of_the_first_record_is_noticed(store: Path) -> None:
    _, rows, _ = read_shard(Map(store / shard_name(0)).view)
    end = min(tensor.offset for tensor in rows[0].tensors.values() if tensor)
    step = 1 if THOROUGH else 24
    assert run_child(read_flipped, store, range(random.randrange(step), end, step)) == []


@either_compression
def test_random_damage_of_several_bytes_kills_no_reader(store: Path) -> None:
    for seed in range(10 if THOROUGH else 1):
        count = num_examples(1000)
        assert run_child(read_damaged, store, seed, count) == [count]


@either_compression
def test_verify_and_repair_survive_damaged_headers_and_lose_nothing_else(store: Path) -> None:
    left = run_child(verify_and_repair_damaged, store, 7, num_examples(100))
    assert min(left) >= COUNT - 2  # only records among the first bytes


def test_a_sidecar_is_trusted_by_its_own_checksum_when_seal_and_manifest_are_damaged(store: Path) -> None:
    flip(store / shard_name(0), (store / shard_name(0)).stat().st_size - 100)
    flip(store / MANIFEST, 30)
    flip(store / shard_name(0), 300)  # the header: without the sidecar nothing could be read
    repair(store)
    assert len(Traces(store)) == COUNT


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"records": 24', '"records": -1'),
        ('"records": 24', '"records": "many"'),
        ('"records": 24', '"rows": 24'),
        ('"config": {}', '"config": []'),
        ('"compression": "', '"compression": "x'),
        ('"arrow_schema": "', '"arrow_schema": "AAAA'),
        ('"shards": [', '"shards": [7, '),
        ('"shards": [', '"shardes": ['),
        ('"records": 24', '"records": 1e300'),
        ('"records": 24', '"records": 24, "more": 1'),
        ('"records": 24', f'"records": {1 << 70}'),
        ('"number": 0', '"number": -7'),
        ('"number": 0', '"number": "../../7"'),
        ('"seconds": ', '"seconds": -'),
        ('"seconds": ', '"seconds": NaN, "x": '),
        ('"sidecar_crc32c": ', '"sidecar_crc32c": -'),
        ('"config": {}', '"config": ' + '{"a":' * 5000 + "1" + "}" * 5000),
        ('"config": {}', '"config": ' + "9" * 5000),
        ('"version": 2', '"version": "one"'),
    ],
    ids=lambda text: text[:40],
)
def test_a_manifest_with_a_valid_checksum_and_wrong_values_is_rebuilt(old: str, new: str, store: Path) -> None:
    _forge_manifest(store, old, new)
    assert len(Traces(store)) == COUNT
    assert [damage.file for damage in damages(store)] == [MANIFEST]
    repair(store)
    assert damages(store) == [] and len(Traces(store)) == COUNT


def test_every_flipped_bit_of_the_labels_is_noticed(store: Path) -> None:
    data = (store / LABELS).read_bytes()
    assert is_table_intact(data) is True
    for place in range(len(data)):
        damaged = data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]
        assert is_table_intact(damaged) is False


def test_damaged_labels_are_reported_refused_and_set_aside(store: Path) -> None:
    flip(store / LABELS, 40)
    assert [damage.file for damage in damages(store)] == [LABELS]
    with pytest.raises(BadSource, match=LABELS):
        ms.labelled(Traces(store), column="verdict", values={"right": 0, "wrong": 1})
    assert repair(store).set_aside == [LABELS]
    assert (store / DAMAGED / LABELS).exists() and damages(store) == []
    assert len(Traces(store)) == COUNT


@pytest.mark.parametrize("mark", [b"millstream.checksum", b"millstream-crc32c="])
def test_labels_whose_checksum_is_destroyed_are_never_parsed(mark: bytes, store: Path, monkeypatch) -> None:
    whole = (store / LABELS).read_bytes()
    (store / LABELS).write_bytes(whole.replace(b"millstream.checksum", b"m" * 19).replace(mark, b"x" * len(mark)))
    assert is_table_intact((store / LABELS).read_bytes()) is not True
    assert [damage.file for damage in damages(store)] == [LABELS]

    def parse(*_: object, **__: object) -> None:
        raise AssertionError("unverified bytes reach the parser")

    traces = Traces(store)
    monkeypatch.setattr(pq, "ParquetFile", parse)
    readers: list[Callable[[], object]] = [
        lambda: read_labels(store),
        lambda: view.read_labels(traces),
        lambda: ms.labelled(traces, column="verdict", values={"right": 0, "wrong": 1}),
    ]
    for read in readers:
        with pytest.raises(BadSource, match="checksum"):
            read()


def test_only_a_table_of_the_user_may_lack_a_checksum(tmp_path: Path) -> None:
    file, table = tmp_path / "other.parquet", pa.table({"a": pa.array([1, 2])})
    pq.write_table(table, file, compression="zstd")
    assert read_parquet(file.read_bytes()).equals(table)
    with pytest.raises(pa.ArrowInvalid, match="no checksum"):
        read_table(file)
    publish_table(file, table)
    pq.write_table(pq.read_table(file).take(np.array([1])), file, compression="zstd")  # with metadata: zeros
    assert read_parquet(file.read_bytes()).column("a").to_pylist() == [2]
    with pytest.raises(pa.ArrowInvalid, match="no checksum"):
        read_table(file)


# -- manifests and sidecars with a valid checksum and wrong values


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"records": 24', '"records": 25'),
        ('"records": 24', '"records": 0'),
        ('"number": 0', '"number": 7'),
        ('"bytes": ', '"bytes": 1'),
        ('"sidecar_crc32c": ', '"sidecar_crc32c": 1, "seconds": 0, "x": '),
    ],
)
def test_a_manifest_with_possible_but_wrong_values_costs_no_record(old: str, new: str, store: Path) -> None:
    expected = [repr(one) for one in Traces(store)]
    _forge_manifest(store, old, new)
    _check_forged(store, expected)


def test_a_manifest_with_the_schema_of_other_records_costs_no_record(store: Path, tmp_path: Path) -> None:
    expected, manifest = [repr(one) for one in Traces(store)], read_manifest(store)
    with ms.TraceWriter(tmp_path / "other") as writer:
        writer.append({"id": "1", "states": "text", "more": np.zeros(3)})
    write_manifest(store, replace(manifest, arrow_schema=read_manifest(tmp_path / "other").arrow_schema))
    _check_forged(store, expected)


def _forge_manifest(store: Path, old: str, new: str) -> None:
    """Replace a text of the manifest, with a checksum that matches."""
    body = (store / MANIFEST).read_bytes().rpartition(b',\n "crc32c"')[0]
    assert old.encode() in body
    body = body.replace(old.encode(), new.encode(), 1)
    (store / MANIFEST).write_bytes(body + f',\n "crc32c": {crc32c(body)}\n}}\n'.encode())


def _forge(store: Path, data: bytes) -> None:
    """Put a sidecar in place, with its checksum in the seal and in the manifest."""
    (store / sidecar_name(0)).write_bytes(data)
    file, manifest = store / shard_name(0), read_manifest(store)
    seal = read_shard_seal(file)
    assert seal is not None
    shard = bytearray(file.read_bytes())
    fields = list(SEAL.unpack_from(shard, seal.offset))
    fields[3] = crc32c(data)
    fields[5] = crc32c(SEAL.pack(*fields)[:-4])
    SEAL.pack_into(shard, seal.offset, *fields)
    file.write_bytes(shard)
    write_manifest(store, replace(manifest, shards=(replace(manifest.shards[0], sidecar_crc32c=fields[3]),)))


def _check_forged(store: Path, expected: list[object]) -> None:
    """Every command says what is wrong or is right; after a repair nothing is lost."""
    for command in (summarise, damages, lambda path: list(Traces(path)), lambda path: Traces(path).table, repair):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DamageWarning)
            with suppress(StoreError):
                command(store)
    assert damages(store) == [] and [repr(one) for one in Traces(store)] == expected
    assert (store / DAMAGED / shard_name(0)).exists() is False


def _changed(table: pa.Table, name: str, change: Callable[[list[Any]], object], kind: pa.DataType | None = None) -> Any:
    """The table with one column changed in place."""
    place, values = table.column_names.index(name), table.column(name).to_pylist()
    change(values)
    column = pa.array(values, kind or table.schema.field(name).type)
    return table.set_column(place, table.schema.field(name).with_type(column.type), column)


def _set(number: int, value: object, member: str = "") -> Callable[[list[Any]], object]:
    return lambda rows: rows[number].__setitem__(member, value) if member else rows.__setitem__(number, value)


FORGERIES: dict[str, Callable[[pa.Table], pa.Table]] = {
    "a column is missing": lambda table: table.drop_columns(["_offset"]),
    "a field is missing": lambda table: table.drop_columns(["states"]),
    "another column": lambda table: table.append_column("_more", pa.array([0] * table.num_rows)),
    "another field": lambda table: table.append_column("more", pa.array([0] * table.num_rows)),
    "text for numbers": lambda table: table.set_column(
        table.column_names.index("_bytes"), "_bytes", pa.array([str(n) for n in range(table.num_rows)])
    ),
    "fewer records": lambda table: table.slice(3),
    "no records": lambda table: table.slice(0, 0),
    "records twice": lambda table: pa.concat_tables([table, table]),
    "a time in words": lambda table: table.replace_schema_metadata(
        {**table.schema.metadata, b"millstream.seconds": b"many"}
    ),
    "another compression": lambda table: table.replace_schema_metadata(
        {**table.schema.metadata, b"millstream.compression": b"rot13"}
    ),
    "a negative offset": lambda table: _changed(table, "_offset", _set(2, -1)),
    "an offset beyond the file": lambda table: _changed(table, "_offset", _set(23, 1 << 59)),
    "the largest offset": lambda table: _changed(table, "_offset", _set(2, (1 << 63) - 1)),
    "no offset": lambda table: _changed(table, "_offset", _set(2, None)),
    "no bytes": lambda table: _changed(table, "_bytes", _set(2, 0)),
    "negative bytes": lambda table: _changed(table, "_bytes", _set(2, -5)),
    "a frame larger than its record": lambda table: _changed(table, "_meta_bytes", _set(2, 1 << 30)),
    "no tensor": lambda table: _changed(table, "states", _set(2, None)),
    "a tensor elsewhere": lambda table: _changed(table, "states", _set(2, 1 << 62, "offset")),
    "a tensor before its record": lambda table: _changed(table, "states", _set(2, 0, "offset")),
    "a tensor nowhere": lambda table: _changed(table, "states", _set(2, -7, "offset")),
    "an empty shape": lambda table: _changed(table, "states", _set(2, [], "shape")),
    "no shape": lambda table: _changed(table, "states", _set(2, None, "shape")),
    "a shape of too many axes": lambda table: _changed(table, "states", _set(2, [3, 5000, 1], "shape")),
    "a negative shape": lambda table: _changed(table, "states", _set(2, [3, -5000], "shape")),
    "a huge shape": lambda table: _changed(table, "states", _set(2, [3, (1 << 31) - 1], "shape")),
    "a shape with a hole": lambda table: _changed(table, "states", _set(2, [3, None], "shape")),
    "no checksums": lambda table: _changed(table, "states", _set(2, [], "crc32c")),
    "too many checksums": lambda table: _changed(table, "states", _set(2, [1] * 7, "crc32c")),
    "wrong checksums": lambda table: _changed(table, "states", _set(2, [1] * 3, "crc32c")),
}


@pytest.mark.parametrize("wrong", FORGERIES)
def test_a_sidecar_with_a_valid_checksum_and_wrong_values_is_rebuilt_from_the_shard(wrong: str, store: Path) -> None:
    expected = [repr(one) for one in Traces(store)]
    table = pq.read_table(store / sidecar_name(0))
    _forge(store, to_parquet(FORGERIES[wrong](table)))
    _check_forged(store, expected)


@either_compression
def test_random_numbers_in_a_sidecar_cost_no_record(store: Path) -> None:
    expected, table = [repr(one) for one in Traces(store)], pq.read_table(store / sidecar_name(0))
    rng, numbers = random.Random(5), (-(1 << 31), -1, 0, 1, 7, 300, (1 << 31) - 1)
    members = ["shape", "crc32c", *(["sizes"] if "sizes" in str(table.schema.field("states").type) else [])]
    for _ in range(num_examples(40)):
        row, value = rng.randrange(COUNT), [rng.choice(numbers) for _ in range(rng.randrange(4))]
        member = rng.choice(members)
        value = [abs(n) for n in value] if member == "crc32c" else value
        if rng.random() < 0.3:
            change = _changed(table, rng.choice(["_offset", "_bytes", "_meta_bytes"]), _set(row, rng.choice(numbers)))
        else:
            change = _changed(table, "states", _set(row, value, member))
        _forge(store, to_parquet(change))
        _check_forged(store, expected)


def test_a_sidecar_that_is_no_table_is_rebuilt(store: Path) -> None:
    expected = [repr(one) for one in Traces(store)]
    for data in (b"", b"PAR1", b"PAR1" + bytes(range(256)) + b"PAR1", (store / LABELS).read_bytes()):
        _forge(store, data)
        _check_forged(store, expected)
