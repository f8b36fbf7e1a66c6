"""A job with workers on one or many machines, and the store they write: what is done, and what dead workers left.

What a worker has written to a URL, but not uploaded, is in the spool of its machine. Before a job starts, when a worker
dies and when the job is over, every machine of the cluster uploads what it finds there, so that nothing is done twice.
A machine that joins later may bring records of an earlier job, which others may be doing again just now: they stay in
its spool until the job is over, and those that are in the store by then are dropped.
"""

import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from millstream.core.config import config_hash
from millstream.core.engine import Engine
from millstream.core.files import locked
from millstream.core.remote import RemotePath, is_url, spool_folder
from millstream.traces.store.format import id_field
from millstream.traces.store.locks import StoreLock
from millstream.traces.store.manifest import IDS, MANIFEST, list_shards, read_manifest
from millstream.traces.store.repair import recover_all, wait_for_writers
from millstream.traces.store.rewrite import drop_records
from millstream.traces.store.sidecar import read_table
from millstream.traces.store.traces import Traces
from millstream.traces.store.uploads import Uploads
from millstream.traces.store.writer import TraceWriter, stored_tables

_JOB = ".job"  # in a spool


class JobWriter(TraceWriter):
    """The writer of a worker."""

    def __init__(self, path: Path, *, job: str, **options: Any) -> None:
        self._job = job
        super().__init__(path, **options)

    def _kept_back(self) -> frozenset[int]:
        """What was in the spool before the first worker of the job: the file `.job` has the job and these numbers."""
        file = self._folder / _JOB
        with locked(file):
            job, *numbers = file.read_text().split() or [""]
            if job != self._job:
                numbers = list(map(str, list_shards(self._folder)[0]))
                file.write_text(" ".join([self._job, *numbers]))
        return frozenset(map(int, numbers))


def new_job() -> str:
    """What tells the workers of one job from those of another."""
    return secrets.token_hex(8)


def prepare_store(path: Path, config: Mapping[str, object], *, engine: Engine) -> None:
    """Create or resume the store that workers will append to, or have appended to; raises if its settings differ.

    Dead writers of all machines are recovered. No worker may be running.
    """
    _recover_here(path, config)
    if is_url(path):
        left = engine.on_nodes(partial(_has_left, path))
        for node in (node for node, has_left in left.items() if has_left):  # one by one: they may have the same records
            engine.on_nodes(partial(_recover_here, path, config), [node])


def upload_left(path: Path, config: Mapping[str, object], *, job: str, engine: Engine) -> None:
    """Upload what dead workers of all machines left, while others are running."""
    if is_url(path):
        engine.on_nodes(partial(_upload_of_job, path, config, job))


def done_records(path: Path, fields: Sequence[str]) -> list[tuple[Any, ...]]:
    """These fields of every record in the store, after recovering dead writers: what a resumed job can skip.

    Records in the spools of other machines are not listed. One that is being uploaded may be listed twice.
    """
    folder = spool_folder(path)
    with StoreLock(folder, exclusive=False):
        recover_all(folder)
        tables = [table for table in stored_tables(path, fields) if table.num_rows]
    return [row for table in tables for row in zip(*(table.column(name).to_pylist() for name in fields), strict=True)]


def _has_left(path: Path) -> bool:
    folder = spool_folder(path)
    return folder.is_dir() and any(list_shards(folder))


def _recover_here(path: Path, config: Mapping[str, object]) -> None:
    if isinstance(path, RemotePath) and _has_left(path):
        wait_for_writers(spool_folder(path))
        _drop_repeated(path, spool_folder(path))
    with TraceWriter(path, config=config):
        pass
    wait_for_writers(spool_folder(path))


def _upload_of_job(path: Path, config: Mapping[str, object], job: str) -> None:
    with JobWriter(path, job=job, config=config):
        pass


def _drop_repeated(path: RemotePath, folder: Path) -> None:
    """Drop what this machine had not uploaded when it went away, and others have done again."""
    Uploads(path, folder).settle()
    if not any(list_shards(folder)) or not any(list_shards(path)):
        return
    here, there = read_manifest(folder), read_manifest(path)
    if config_hash(here.config) != config_hash(there.config):
        return  # the writer refuses it

    key = id_field(here.fields)

    def repeated(traces: Traces) -> list[int]:
        known = set(read_table(path, there, [key]).column(key).to_pylist())
        return [number for number, name in enumerate(traces.ids) if name in known]

    if key in here.fields and key in there.fields:
        drop_records(folder, repeated)
        for name in (MANIFEST, IDS):  # they would list shards that are uploaded
            (folder / name).unlink(missing_ok=True)
