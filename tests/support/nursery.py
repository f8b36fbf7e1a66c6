"""Children in milliseconds: forked from this process as it was before its first test, with all it had imported.

def test_a_kill_is_seen(nursery: Nursery) -> None:
    assert nursery.run("import os; os.kill(os.getpid(), 9)").code == -9
"""

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import pytest


@dataclass(frozen=True)
class Job:
    """Code for `python -c`, its arguments, and environment variables beside those of this process."""

    code: str
    arguments: tuple[object, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Done:
    """How a child ended, and what it said."""

    code: int
    out: str
    err: str


class Nursery:
    """A process that only forks: it has no threads, which are what makes forking a process that tests dangerous."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            ours.close()
            _serve(theirs)
        theirs.close()
        with ours:
            self._file = ours.makefile("rw", encoding="utf-8")

    def run(self, code: str, *arguments: object, imports: tuple[str, ...] = ()) -> Done:
        """Run a child until it ends. Modules of `imports` are imported once, for this child and later ones."""
        return self.run_together([Job(code, arguments)], imports=imports)[0]

    def run_together(self, jobs: list[Job], *, imports: tuple[str, ...] = ()) -> list[Done]:
        """Run children side by side, until all have ended."""
        with TemporaryDirectory() as folder:
            children: list[dict[str, object]] = []
            for number, job in enumerate(jobs):
                child = {"code": job.code, "arguments": [str(one) for one in job.arguments], "folder": os.getcwd()}
                said = {"out": f"{folder}/{number}.out", "err": f"{folder}/{number}.err"}
                children.append({**child, **said, "environment": {**os.environ, **job.environment}})
            print(json.dumps({"imports": imports, "children": children}), file=self._file, flush=True)
            codes = json.loads(self._file.readline())
            files = [(Path(folder, f"{number}.out"), Path(folder, f"{number}.err")) for number in range(len(jobs))]
            return [Done(code, out.read_text(), err.read_text()) for code, (out, err) in zip(codes, files, strict=True)]

    def close(self) -> None:
        self._file.close()
        os.waitpid(self._pid, 0)


_nursery: Nursery | None = None


def open_nursery() -> None:
    global _nursery
    _nursery = Nursery()


def close_nursery() -> None:
    global _nursery
    if _nursery is not None:
        _nursery.close()
        _nursery = None


@pytest.fixture(scope="session")
def nursery() -> Nursery:
    assert _nursery is not None
    return _nursery


def _serve(connection: socket.socket) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the process that tests
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    file = connection.makefile("rw", encoding="utf-8")
    for line in file:
        asked = json.loads(line)
        for name in asked["imports"]:
            import_module(name)
        gc.freeze()
        pids = [os.fork() or _work(child) for child in asked["children"]]
        print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], file=file, flush=True)
    os._exit(0)


def _work(child: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, name in enumerate((os.devnull, child["out"], child["err"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
        os.environ.clear()
        os.environ.update(child["environment"])
        os.chdir(child["folder"])
        sys.argv = ["-c", *child["arguments"]]
        exec(compile(child["code"], "-c", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)
