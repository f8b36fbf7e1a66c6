"""Damaged bytes never reach a native parser: each batch of damages is read by a child, whose death is a failure."""

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millstream as ms
from millstream.core.memory import Map
from millstream.core.record import crc32c
from millstream.core.tables import is_table_intact, publish_table, read_table
from millstream.errors import BadSource
from millstream.traces.store.format import read_shard
from millstream.traces.store.manifest import DAMAGED, LABELS, MANIFEST, shard_name
from millstream.traces.store.repair import repair
from millstream.traces.store.traces import Traces
from support.effort import THOROUGH, num_examples
from support.making import damages, flip, run_child
from support.store_commands import COUNT, read_damaged, read_flipped, record, verify_and_repair_damaged


@pytest.fixture(params=["none", "lz4"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """One shard of tensors in slices, with labels."""
    with ms.TraceWriter(tmp_path / "store", compression=request.param) as writer:
        for number in range(COUNT):
            writer.append({**record(number), "note": None, "states": np.full((3, 5000), number, np.uint8)})
    ms.label(tmp_path / "store")
    return tmp_path / "store"


def test_every_flipped_bit_of_the_header_and_the_frame_of_the_first_record_is_noticed(store: Path) -> None:
    _, rows, _ = read_shard(Map(store / shard_name(0)).view)
    end = min(tensor.offset for tensor in rows[0].tensors.values() if tensor)
    step = 1 if THOROUGH else 8
    assert run_child(read_flipped, store, range(random.randrange(step), end, step)) == []


def test_random_damage_of_several_bytes_kills_no_reader(store: Path) -> None:
    for seed in range(10 if THOROUGH else 4):
        count = num_examples(1000)
        assert run_child(read_damaged, store, seed, count) == [count]


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
    ],
)
def test_a_manifest_with_a_valid_checksum_and_wrong_values_is_rebuilt(old: str, new: str, store: Path) -> None:
    body = (store / MANIFEST).read_bytes().rpartition(b',\n "crc32c"')[0]
    assert old.encode() in body
    body = body.replace(old.encode(), new.encode(), 1)
    (store / MANIFEST).write_bytes(body + f',\n "crc32c": {crc32c(body)}\n}}\n'.encode())
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


def test_a_table_of_another_program_is_read_without_a_checksum(tmp_path: Path) -> None:

    pq.write_table(pa.table({"a": pa.array([1, 2])}), tmp_path / "other.parquet", compression="zstd")
    assert read_table(tmp_path / "other.parquet").num_rows == 2


def test_a_table_changed_by_another_program_that_keeps_the_metadata_is_read(tmp_path: Path) -> None:
    publish_table(tmp_path / "ours.parquet", pa.table({"a": pa.array([1, 2])}))
    table = pq.read_table(tmp_path / "ours.parquet").take(np.array([1]))
    pq.write_table(table, tmp_path / "ours.parquet", compression="zstd")
    assert read_table(tmp_path / "ours.parquet").column("a").to_pylist() == [2]
