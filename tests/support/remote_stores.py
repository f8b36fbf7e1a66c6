"""Processes that write to object stores from spools of their own, and die between two steps."""

import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from millstream import open as ms_open
from millstream.core.bucket import ObjectBucket
from millstream.core.remote import RemotePath, to_path
from millstream.traces.store.jobs import JobWriter
from millstream.traces.store.rewrite import merge, subset_records
from millstream.traces.store.traces import Traces
from millstream.traces.store.writer import TraceWriter
from support.making import Key, keys_in, plain

SPOOL = "MILLSTREAM_SPOOL_DIR"
STEPS: dict[Any, list[str]] = {os: ["rename", "unlink"], ObjectBucket: ["put", "delete"]}


def environment(spool: Path) -> dict[str, str]:
    """What a child needs to find the bucket of this test, with its own spool."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "XDG_", "MILLSTREAM_"))}
    return {**kept, SPOOL: str(spool)}


def remote(url: str) -> RemotePath:
    path = to_path(url)
    assert isinstance(path, RemotePath)
    return path


def remote_keys(url: str) -> list[Key]:
    """The key of every record, in order; each record is compared with what was written."""
    traces = ms_open(url)
    assert isinstance(traces, Traces)
    return keys_in(traces, plain)


def objects(url: str) -> list[str]:
    return sorted(remote(url).walk_files())


def upload(folder: Path, url: str) -> str:
    """Copy the files of a folder to a URL; returns the URL."""
    for file in folder.rglob("*"):
        if file.is_file():
            remote(f"{url}/{file.relative_to(folder)}").put(file)
    return url


def append_remotely(
    environ: dict[str, str], url: str, keys: Iterable[Key], options: dict[str, Any], step: int, report: Any
) -> None:
    """Append records, reporting each; die before step number `step`; with -1, before closing."""
    os.environ.update(environ)
    die_before(step)
    with TraceWriter(url, **options) as writer:
        report(len(writer))
        for key in keys:
            writer.append(plain(*key))
            report(len(writer))
        if step < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def work_and_die(environ: dict[str, str], url: str, job: str, key: Key, report: Any) -> None:
    """A worker that is killed after its first record."""
    os.environ.update(environ)
    with JobWriter(to_path(url), job=job, config={}) as writer:
        writer.append(plain(*key))
        os.kill(os.getpid(), signal.SIGKILL)


def merge_remotely(environ: dict[str, str], sources: list[Path], url: str, step: int, report: Any) -> None:
    """Merge stores into one at a URL; die before step number `step`."""
    os.environ.update(environ)
    die_before(step)
    merge(sources, to_path(url))


def take_remotely(environ: dict[str, str], source: Path, numbers: list[int], url: str, step: int, report: Any) -> None:
    """The same for some records of a store, two per shard."""
    os.environ.update(environ)
    die_before(step)
    subset_records(Traces(source), to_path(url), numbers, shard_records=2)


def die_before(step: int) -> None:
    """SIGKILL this process before call number `step` of those that change the disk or the bucket; 0: never."""
    num_calls = 0

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: Any, **kwargs: Any) -> object:
            nonlocal num_calls
            num_calls += 1
            if num_calls == step:
                sys.stderr.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for where, names in STEPS.items():
        for name in names:
            setattr(where, name, counted(getattr(where, name)))
