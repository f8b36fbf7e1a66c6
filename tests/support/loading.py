"""Records to load, as functions of their numbers, and ways to compare what comes out."""

import gzip
import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import millstream as ms

REGEX = r"lbl\|(?P<class_id>\d+)"
SHARD = 17
LETTERS = bytes(np.random.default_rng(0).choice(np.frombuffer(b"ACGTN", np.uint8), 10_000)).decode()


def trace(number: int) -> dict[str, object]:
    """A number, texts, tensors of equal and of different shapes, and one of a type that numpy does not have."""
    return {
        "question_id": f"q{number}",
        "question": "Wer mahlt? " * (1 + number % 3) + str(number),
        "label": number,
        "vector": np.full(5, number, np.float32),
        "grade": torch.full((4,), number % 200, dtype=torch.bfloat16),
        "hidden": np.full((3, 2 + number % 5, 4), number, np.float16),
    }


def write_traces(path: Path, numbers: Iterable[int]) -> ms.Traces:
    schema = {"hidden": "float16[layer, token, dim]"}
    return write_records(path, map(trace, numbers), shard_records=SHARD, schema=schema)


def write_records(path: Path, records: Iterable[Mapping[str, object]], **options: Any) -> ms.Traces:
    with not_waiting_for_the_disk(), ms.TraceWriter(path, **options) as writer:
        writer.extend(records)
    return open_traces(path)


@contextmanager
def not_waiting_for_the_disk() -> Generator[None]:
    """That a file is on the disk matters after a power cut only; waiting for others' files takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        patch.setattr(os, "fdatasync", lambda fd: None)
        yield


def open_traces(path: str | Path) -> ms.Traces:
    opened = ms.open(path)
    assert isinstance(opened, ms.Traces)
    return opened


def read(number: int) -> tuple[int, str]:
    """Class and letters of a read."""
    start = number * 7919 % 9_000
    return number % 7, LETTERS[start : start + 30 + number % 40]


def write_reads(path: Path, count: int) -> ms.Reads:
    text = "".join(f">lbl|{label}\n{letters}\n" for label, letters in map(read, range(count))).encode()
    path.write_bytes(gzip.compress(text, 1, mtime=0) if path.suffix == ".gz" else text)
    return open_reads(path, header_regex=REGEX)


def open_reads(path: Path, **options: Any) -> ms.Reads:
    with not_waiting_for_the_disk():
        opened = ms.open(path, **options)
    assert isinstance(opened, ms.Reads)
    return opened


def draw(record: dict[str, object], rng: np.random.Generator) -> dict[str, object]:
    """What a user's transform does: something random, and something of the record."""
    return {"noise": rng.random(3), "twice": 2 * int(str(record["label"]))}


def refuse_60(record: dict[str, object], rng: np.random.Generator) -> dict[str, object]:
    """A user's transform that cannot cope with one record."""
    if record["label"] == 60:
        raise ArithmeticError("sixty is too much")
    return {"label": record["label"]}


def collect(batches: Iterable[Any], into: list[Any]) -> None:
    """What comes before an error, too."""
    for batch in batches:
        into.append(batch)


def numbers_of(batches: Iterable[Mapping[str, object]]) -> list[int]:
    """The record numbers of batches, in order."""
    return [number for batch in batches for number in _tensor(batch["numbers"]).tolist()]


def by_number(batches: Iterable[Mapping[str, object]], *names: str) -> dict[int, object]:
    """The values of every record, as plain lists."""
    found: dict[int, object] = {}
    for batch in batches:
        columns = [_plain(batch[name]) for name in names]
        for row, number in enumerate(_tensor(batch["numbers"]).tolist()):
            assert number not in found
            found[number] = [column[row] for column in columns]
    return found


def same(found: object, expected: object) -> bool:
    """Whether two batches, or lists of them, are the same to the bit and of the same types."""
    if isinstance(expected, Mapping):
        return (
            isinstance(found, Mapping)
            and list(found) == list(expected)
            and all(same(found[name], expected[name]) for name in expected)
        )
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
    return type(found) is type(expected) and found == expected


def is_right(batch: Mapping[str, object]) -> bool:
    """Whether a batch of all fields has what was written under its record numbers."""
    records = [trace(number) for number in _tensor(batch["numbers"]).tolist()]
    longest = max(np.shape(record["hidden"])[1] for record in records)
    hidden = torch.zeros(len(records), 3, longest, 4, dtype=torch.float16)
    for row, record in zip(hidden, records, strict=True):
        row[:, : np.shape(record["hidden"])[1]] = torch.as_tensor(record["hidden"])
    return (
        batch["question_id"] == [record["question_id"] for record in records]
        and batch["question"] == [record["question"] for record in records]
        and _plain(batch["label"]) == [record["label"] for record in records]
        and torch.equal(_tensor(batch["vector"]), torch.stack([torch.as_tensor(r["vector"]) for r in records]))
        and torch.equal(_tensor(batch["grade"]), torch.stack([torch.as_tensor(r["grade"]) for r in records]))
        and torch.equal(_tensor(batch["hidden"]), hidden)
    )


def _tensor(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value


def _plain(values: object) -> list[object]:
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)  # pyright: ignore
