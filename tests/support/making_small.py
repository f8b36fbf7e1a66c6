"""Small stores and read files, each record a function of its id."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import millstream as ms

REGEX = r"lbl\|(?P<class_id>\d+)\|(?P<tax_id>\w+)"


def trace(name: str) -> dict[str, object]:
    """A record whose tensor differs in length from those of others."""
    number = int(name.strip("qp"))
    return {
        "question_id": name,
        "topic": f"topic {number % 7}",
        "score": number / 2,
        "verdict": ["right", "wrong"][number % 2],
        "vector": np.full(3, number, np.float32),
        "tokens": np.arange(number % 4 + 1, dtype=np.int32) + number,
    }


def write_traces(path: Path, names: Iterable[str], make: Callable[[str], dict[str, object]] = trace) -> ms.Traces:
    """Write these records to a store, or append them to it."""
    with ms.TraceWriter(path, shard_records=64) as writer:
        writer.extend(make(name) for name in names)
    opened = ms.open(path)
    assert isinstance(opened, ms.Traces)
    return opened


def sequence(number: int) -> str:
    return "".join(np.random.default_rng(number).choice(list("ACGT"), 5 + number % 9))


def write_reads(path: Path, numbers: Sequence[int], *, regex: str | None = REGEX) -> ms.Reads:
    """Reads of class `number % 5` and genome `g<number // 10>`."""
    lines = [f">lbl|{number % 5}|g{number // 10}\n{sequence(number)}\n" for number in numbers]
    path.write_text("".join(lines))
    opened = ms.open(path, header_regex=regex)
    assert isinstance(opened, ms.Reads)
    return opened


def rows(collection: ms.Collection, numbers: list[int], fields: list[str] | None = None) -> list[dict[str, Any]]:
    """Records as plain values, one dict each, however they are packed."""
    fetched: Any = collection.fetch(numbers, fields)
    columns = dict(fetched.columns, sequence=fetched.sequences()) if isinstance(fetched, ms.ReadBatch) else fetched
    found = [{name: values[place] for name, values in columns.items()} for place in range(len(numbers))]
    return [{name: np.asarray(value).tolist() for name, value in row.items()} for row in found]


def ids(collection: ms.Collection) -> list[str]:
    return collection.column("question_id").to_pylist()
