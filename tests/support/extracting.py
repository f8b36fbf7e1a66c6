"""Extraction with a tiny model in this process or in a child that is killed, and comparison of trace stores."""

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import millstream as ms
from millstream.traces.store.manifest import list_shards, shard_name, sidecar_name
from millstream.traces.store.repair import verify
from millstream.traces.store.rewrite import drop_records
from millstream.traces.store.writer import TraceWriter
from support.effort import PATIENCE_S
from support.making import same
from support.nursery import Done, Job, Nursery

COUNT = 24
SETTINGS: dict[str, Any] = {
    "tier": "full",
    "max_new_tokens": 4,
    "memory": "1MB",
    "device": "cpu",
    "prompt": "Q: {question}",
}
TIMINGS = {"generate_s", "replay_s"}
TOO_LONG = "what about " + "-".join(map(str, range(90)))  # for a model of 128 tokens


def write_questions(path: Path, *, count: int = COUNT, too_long: Sequence[int] = ()) -> Path:
    """Questions of different lengths; those in `too_long` exceed the context of the model."""
    rows = [
        {
            "id": f"q{i}",
            "question": f"{i}: {TOO_LONG}" if i in too_long else f"what is {i} times the fox" + " quick" * (i % 7),
            "answer": str(i),
            "aliases": [str(i), f"number {i}"],
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_arguments(settings: Mapping[str, object]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


# -- stores


def traces_by_id(path: Path) -> dict[object, dict[str, object]]:
    """The records of an intact store by their unique ids, without timings."""
    assert list(verify(path)) == []
    records = [{name: value for name, value in record.items() if name not in TIMINGS} for record in ms.open(path)]
    found = {record.get("record_id", record["question_id"]): record for record in records}
    assert len(found) == len(records), "repeated ids"
    return found


def assert_same_traces(path: Path, expected: Path) -> None:
    """Both stores have the same traces, bit for bit, in any order."""
    ours, theirs = traces_by_id(path), traces_by_id(expected)
    assert ours.keys() == theirs.keys()
    different = [name for name, record in ours.items() if not same(record, theirs[name])]
    assert different == []


def assert_all_sealed(path: Path) -> None:
    """No shard is open and no temporary file is left."""
    assert list_shards(path)[1] == []
    assert list(path.glob("*.open")) == list(path.glob(".*.tmp")) == []


def shard_files(path: Path) -> dict[str, tuple[bytes, int]]:
    """Content and modification time of all sealed shards and sidecars."""
    names = [name(number) for number in list_shards(path)[0] for name in (shard_name, sidecar_name)]
    return {name: ((path / name).read_bytes(), (path / name).stat().st_mtime_ns) for name in names}


# -- children


def run_and_send(
    nursery: Nursery,
    *command: object,
    after: int,
    send: signal.Signals,
    environment: Mapping[str, str] = {},
) -> Done:
    """A child that runs this command and signals itself after writing `after` records."""
    done = nursery.run_together([Job(_SIGNALLED, (after, send.value, *command), environment)], imports=_IMPORTS)
    return done[0]


_IMPORTS = ("transformers.models.llama.modeling_llama", "millstream.traces.extract", "millstream.traces.llm.tracer")
_SIGNALLED = """
import os, sys
from millstream.cli.app import main
from millstream.traces.store.writer import TraceWriter

left, send = map(int, sys.argv[1:3])
append = TraceWriter.append

def counted(self, record):
    global left
    append(self, record)
    left -= 1
    if not left:
        os.kill(os.getpid(), send)

TraceWriter.append = counted
sys.argv = ["millstream", *sys.argv[3:]]
sys.exit(main())
"""


def drop(path: Path, numbers: list[int], report: Callable[[object], None]) -> None:
    """A job for a child of `making`."""
    drop_records(path, lambda _: numbers)


def wait_until(condition: Callable[[], object], *, what: str, pause: float = 0.001) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"gave up waiting for {what}"
        time.sleep(pause)


def recovered_ids(path: Path) -> list[object]:
    """Ids in a store whose writer was killed, in order."""
    with TraceWriter(path):
        pass
    traces = ms.open(path)
    assert isinstance(traces, ms.Traces)
    return traces.ids if len(traces) else []
