"""Commands on one store, to be run by two processes at the same time."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

import millstream as ms
from millstream.errors import CorruptRecord, CorruptShard, MillstreamError
from millstream.traces.convert import convert
from millstream.traces.store.repair import repair, verify
from millstream.traces.store.rewrite import drop_records, merge
from millstream.traces.store.traces import Traces
from support.making import quiet

COUNT, DAMAGED_RECORD = 24, 7


def record(number: int) -> dict[str, object]:
    hidden = np.full((2, 3, 4), number, np.float16)
    return {"question_id": f"q{number}", "generated_answer": "yes", "aliases": ["yes"], "hidden": hidden}


def append(path: Path) -> None:
    with ms.TraceWriter(path, shard_records=2) as writer:
        for number in range(COUNT, COUNT + 4):
            writer.append(record(number))


def open_and_close(path: Path) -> None:
    ms.TraceWriter(path).close()


def read(path: Path) -> None:
    for number in range(len(traces := Traces(path))):
        with suppress(CorruptRecord, CorruptShard):  # one record is damaged; a repair may replace its shard
            traces[number]


def drop_last(path: Path) -> None:
    drop_records(path, lambda traces: [number for number, name in enumerate(traces.ids) if name == "q19"])


COMMANDS: dict[str, Callable[[Path], object]] = {
    "repair": repair,
    "append": append,
    "recover": open_and_close,
    "label": ms.label,
    "drop": drop_last,
    "read": read,
    "verify": lambda path: list(verify(path)),
}


def run(command: Callable[[Path], object], path: Path, delay: float) -> str | None:
    """The refusal of a command, if any."""
    time.sleep(delay)
    try:
        with quiet():
            command(path)
    except MillstreamError as error:
        return str(error)
    return None


def run_named(name: str, path: Path, delay: float) -> str | None:
    return run(COMMANDS[name], path, delay)


def convert_all(path: Path) -> None:
    convert(sorted(path.parent.glob("*.pkl")), path)


def featurize_all(path: Path) -> None:
    ms.featurize(path.parent / "store", path, feature="layers", token="last", field="hidden")


def merge_two(path: Path) -> None:
    merge([path.parent / "store", path.parent / "other"], path)
