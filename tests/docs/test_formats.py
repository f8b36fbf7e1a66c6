"""The reader in docs/explanation/formats.md, which does not use millstream, reads what millstream wrote.

It is taken from the page and run unchanged, so the page cannot contradict the files.
"""

import ast
import os
import random
import re
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.reads.files.index import IndexSettings
from millstream.reads.pack.pack import pack
from millstream.reads.reads import Reads
from support.effort import num_examples
from support.making import plain, record, same_value, write, write_open
from support.read_files import (
    REGEX,
    WRAPPERS,
    fasta,
    fasta_texts,
    fastq,
    fastq_texts,
    flushed,
    index_of,
    members,
    opened,
    parse,
    records,
)

PAGE = Path(__file__).parents[2] / "docs/explanation/formats.md"
SETTINGS = settings(deadline=None, max_examples=num_examples(40))


def blocks() -> list[str]:
    """The reader: every Python block of the page except those that use millstream."""
    found = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    shown = next(number for number, block in enumerate(found) if "import millstream" in block)
    assert shown > 0
    return [block for block in found if not re.search(r"\bms\.|Path\(\"", block)]


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves time: only a power failure would make a difference."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)


@pytest.fixture(scope="module")
def reader() -> Any:
    module = ModuleType("reader")
    for block in blocks():
        exec(compile(block, str(PAGE), "exec"), vars(module))
    return module


def test_the_reader_uses_nothing_but_numpy_pyarrow_and_the_standard_library():
    names: set[str] = set()
    for node in ast.walk(ast.parse("\n".join(blocks()))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).split(".")[0])
    standard = {"hashlib", "itertools", "json", "math", "pathlib", "struct", "zlib"}
    assert names == {*standard, "numpy", "pyarrow", "zstandard"}


# -- trace stores


def read_store(reader: Any, store: Path) -> list[dict[str, Any]]:
    shards = [shard["number"] for shard in reader.read_manifest(store)["shards"]]
    return [found for number in shards for found in reader.read_shard(store, number)]


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_every_record_of_a_store_is_read(reader, tmp_path, compression):
    keys = [(1, number) for number in range(9)]
    store = write(tmp_path / "traces", keys, compression=compression, shard_records=4)
    found = read_store(reader, store)
    assert len(found) == len(keys)
    for each, key in zip(found, keys, strict=True):
        wanted = record(*key)
        assert each.keys() == wanted.keys()
        assert all(same_value(each[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_types_that_numpy_lacks_and_missing_tensors_are_read(reader, tmp_path, compression):
    numbers = torch.linspace(-3, 3, 5 * 2048).reshape(5, 2048)
    kinds = {"bfloat16": torch.int16, "float8_e4m3fn": torch.uint8, "float8_e5m2": torch.uint8}
    made = {name: numbers.to(getattr(torch, name)) for name in kinds}
    with ms.TraceWriter(tmp_path / "traces", compression=compression) as writer:
        writer.append({"question_id": "q0", "more": {"a": [1, 2], "b": None}, "int64": np.arange(7), **made})
        writer.append({"question_id": "q1", "more": None, "int64": None, **dict.fromkeys(kinds)})
    full, empty = read_store(reader, tmp_path / "traces")
    assert full["more"] == {"a": [1, 2], "b": None}
    assert full["int64"].tolist() == list(range(7))
    for name, bits in kinds.items():
        assert full[name].tobytes() == made[name].view(bits).numpy().tobytes()
        assert full[name].shape == (5, 2048)
    assert set(empty.values()) == {"q1", None}


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_tensors_that_are_cut_along_two_axes_are_read(reader, tmp_path, compression):
    states = np.random.default_rng(0).normal(size=(3, 4, 2048)).astype(np.float16)
    schema = {"states": "float16[layer, position, dim]"}
    with ms.TraceWriter(tmp_path / "traces", compression=compression, schema=schema) as writer:
        writer.extend({"question_id": f"q{dim}", "states": states[..., :dim]} for dim in (2048, 600, 9))
    for found, dim in zip(read_store(reader, tmp_path / "traces"), (2048, 600, 9), strict=True):
        assert np.array_equal(found["states"], states[..., :dim])


def test_a_flipped_bit_anywhere_in_a_shard_is_detected(reader, tmp_path):
    store = write(tmp_path / "traces", [(3, number) for number in range(2)], plain)
    shard = store / "shard-00000.arrow"
    data = shard.read_bytes()
    ends = [*range(0, len(data), len(data) // 25), len(data) - 60, len(data) - 20, len(data) - 1]
    for at in ends:
        shard.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises((AssertionError, OSError, ValueError)):
            read_store(reader, store)
    shard.write_bytes(data)
    assert len(read_store(reader, store)) == 2


def test_an_open_shard_is_read_up_to_the_record_in_progress(reader, tmp_path):
    keys = [(2, number) for number in range(5)]
    path, ends = write_open(tmp_path / "traces", keys)
    shard = path / "shard-00000.arrow.open"
    assert [batch.column("question_id")[0].as_py() for batch in reader.read_open(shard)] == [f"2:{i}" for i in range(5)]
    shard.write_bytes(shard.read_bytes()[: ends[3] + 100])
    assert len(reader.read_open(shard)) == 4


def test_ids_are_found_in_the_id_index(reader, tmp_path):
    store = write(tmp_path / "traces", [(4, number) for number in range(150)], plain, shard_records=2)
    for number in (0, 77, 149):
        assert reader.find_id(store, f"4:{number}") == [(number // 2, number % 2)]
    assert reader.find_id(store, "nobody") == []


# -- reads


def index(reader: Any, file: Path, **options: Any) -> tuple[Reads, Any]:
    reads = opened(file, **options)
    return reads, reader.Container(index_of(file))


def packed(reader: Any, file: Path, **options: Any) -> Any:
    out = file.with_name(file.name + ".pack")
    pack([file], out, notify=lambda text: None, **options)
    return reader.Container(out)


def agree(found: list[tuple[bytes, bytes, bytes | None]], text: bytes) -> bool:
    """Whether the slow parser of the tests finds the same records in the text."""
    wanted = [(each.header, each.sequence, each.quality) for each in parse(text)]
    return found == wanted


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", ["one line", "wrapped", "fastq"])
def test_indexed_and_packed_reads_agree_in_every_container_and_layout(reader, tmp_path, wrapper, kind):
    made = records(70, seed=5, quality=kind == "fastq")
    text = fastq(made) if kind == "fastq" else fasta(made, width=13 if kind == "wrapped" else 0)
    file = tmp_path / "reads"
    file.write_bytes(WRAPPERS[wrapper](text))
    reads, container = index(reader, file)
    found = reader.read_reads(file, container)
    assert agree(found, text)
    assert [sequence.decode() for _, sequence, _ in found] == [read.sequence for read in reads]
    if kind == "fastq":
        assert [quality.decode() for _, _, quality in found] == [read.quality for read in reads]
    again = packed(reader, file)
    assert reader.read_pack(again) == found
    assert reader.write_text(again) == text


@SETTINGS
@given(st.one_of(fasta_texts(), fastq_texts()))
def test_records_of_odd_texts_are_read_from_index_and_pack(reader, text):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reads"
        file.write_bytes(text)
        _, container = index(reader, file)
        assert agree(reader.read_reads(file, container), text)
        again = packed(reader, file)
        assert agree(reader.read_pack(again), text)
        assert parse(reader.write_text(again)) == parse(text)
        assert reader.write_text(again) == text or not again.about["exact"]


@pytest.mark.parametrize("wrapper", [flushed, members])
def test_blocks_of_a_large_gzip_file_are_decoded_from_their_seek_points(reader, tmp_path, wrapper):
    rng = random.Random(1)
    text = b"".join(b">r%d\n%s\n" % (i, bytes(rng.choices(b"ACGT", k=20_000))) for i in range(60))
    file = tmp_path / "reads.fa.gz"
    file.write_bytes(wrapper(text, 100_000))
    _, container = index(reader, file)
    assert container.about["rows"]["block.raw"] > 1
    assert reader.read_text(file, container) == text


def test_header_columns_are_read_from_every_encoding(reader, tmp_path):
    made = records(9000, seed=8, longest=9)
    file = tmp_path / "reads.fa"
    file.write_bytes(fasta(made))
    reads, container = index(reader, file, header_regex=REGEX)
    kept = {column["name"]: column["kept"] for column in container.about["columns"]}
    assert kept["len"] == "length"
    for name in kept:
        assert reader.read_column(container, name) == reads.column(name).to_pylist(), name
    again = packed(reader, file, settings=IndexSettings(header_regex=REGEX))
    for name in kept:
        assert reader.read_column(again, name) == reads.column(name).to_pylist(), name


def test_large_values_are_read_and_columns_in_the_headers_only_are_refused(reader, tmp_path):
    rng = random.Random(3)
    lines = [f">{(k := rng.randrange(5))}|{k * k + 100}|{rng.randrange(2**40)}|n{i}\nACGT\n" for i in range(70_000)]
    file = tmp_path / "reads.fa"
    file.write_text("".join(lines))
    regex = r"(?P<class_id>\d+)\|(?P<tax_id>\d+)\|(?P<large>\d+)\|(?P<own>\S+)"
    reads, container = index(reader, file, header_regex=regex)
    kept = {column["name"]: column["kept"] for column in container.about["columns"]}
    assert kept == {"class_id": "values", "tax_id": "values", "large": "values", "own": "header"}
    for name in ("class_id", "tax_id", "large"):
        assert reader.read_column(container, name) == reads.column(name).to_pylist(), name
    with pytest.raises(LookupError):
        reader.read_column(container, "own")


def test_records_are_found_by_name(reader, tmp_path):
    file = tmp_path / "reads.fa"
    file.write_text("".join(f">read{i % 900} more\nACGT\n" for i in range(1000)))
    reads, container = index(reader, file)
    for container_of in (container, packed(reader, file)):
        for name in ("read7", "read899"):
            assert set(reads.find(name)) <= set(reader.find_name(container_of, name.encode()))
            assert len(reader.find_name(container_of, name.encode())) < 5
        assert reader.find_name(container_of, b"nobody") == []


# -- split and order


@pytest.mark.parametrize("by", ["question_id", None])
def test_the_rule_of_a_split_assigns_records_as_millstream_does(reader, tmp_path, by):
    if by:
        collection = opened_traces(tmp_path)
    else:
        (tmp_path / "reads.fa").write_text("".join(f">r{i}\nACGT\n" for i in range(500)))
        collection = opened(tmp_path / "reads.fa")
    shares = {"train": 0.5, "val": 0.2, "test": 0.1}
    made = ms.split(collection, shares, salt="rye")
    made.save(tmp_path / "split.json")
    rule = reader.json.loads((tmp_path / "split.json").read_text())
    assert rule["by"] == by
    values = collection.column(by).to_pylist() if by else list(range(len(collection)))
    parts = [reader.part_of(rule, value) for value in values]
    for name in shares:
        wanted = made[name].record_numbers(np.arange(len(made[name]))).tolist()
        assert [number for number, part in enumerate(parts) if part == name] == wanted
    assert None in parts


def opened_traces(folder: Path) -> Any:
    with ms.TraceWriter(folder / "traces") as writer:
        writer.extend({"question_id": f"q{number // 2}"} for number in range(300))
    return ms.open(folder / "traces")


@pytest.mark.parametrize("n", [1, 2, 5, 1000, 70_001])
def test_the_exact_order_is_the_same_as_in_millstream(reader, n):
    order, ours = reader.exact_order(n, seed=7, epoch=3), ms.Order(n, seed=7, epoch=3)
    positions = range(0, n, max(n // 500, 1))
    assert [order[position] for position in positions] == ours[np.array(positions)].tolist()
