"""Extraction with a tiny model in this process or in a child that is killed, and comparison of trace stores."""

import json
import os
import signal
import subprocess
import sys
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


class Nursery:
    """A process that has imported everything and forks a child per command; a new interpreter takes seconds."""

    CODE = """if True:
        import json, os, sys
        import transformers.models.llama.modeling_llama, millstream.traces.extract, millstream.traces.llm.tracer
        from millstream.cli.app import main, make_app
        from millstream.traces.store.writer import TraceWriter

        make_app()  # imports the commands

        def send_after(count, signal):
            append = TraceWriter.append
            def counted(self, record):
                nonlocal count
                append(self, record)
                count -= 1
                if not count:
                    os.kill(os.getpid(), signal)
            TraceWriter.append = counted

        for line in sys.stdin:
            environment, log, after, signal, *command = json.loads(line)
            pid = os.fork()
            if not pid:
                os.environ.update(environment)
                send_after(after, signal)
                file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(file, 1), os.dup2(file, 2)
                sys.argv = command
                sys.exit(main())
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def run(
        self, *command: object, after: int, send: signal.Signals, environment: Mapping[str, str] | None = None
    ) -> int:
        """The exit code of a child that runs this command and signals itself after writing `after` records."""
        assert self.process.stdin
        words = [environment or {}, str(self.log), after, send.value, "millstream", *map(str, command)]
        print(json.dumps(words), file=self.process.stdin, flush=True)
        return self._exit_code()

    def read_log(self) -> str:
        return self.log.read_text()

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def _exit_code(self) -> int:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the nursery has died"
        return int(line)


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
