"""Runs commands on Ray, with workers that stop or die. Run as a script:

    python ray_driver.py '{"mark": PATH, "log": PATH, "commands": [[...], ...], "shared": BOOL, "nodes": [{...}, ...]}'

If the file at `mark` exists, the first worker to write a trace renames it to `mark.PID` and stops (SIGSTOP), so a test
can kill the worker or this driver at a known point, however slow the machine is. With `shared`, all commands run on
one cluster that this script starts, `log` gets a line per job, and the first worker of each of the other commands dies
(SIGKILL) in the middle of its first job. Without `shared`, the command starts its own cluster. For each of `nodes`, the
shared cluster has a node with this environment, which works in its PWD.
"""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from millstream.cli.app import main
from millstream.core.engine import Engine, _keep_local  # pyright: ignore
from millstream.errors import BadSource
from millstream.reads import classify, open, scorer
from millstream.reads.files.sections_writer import SectionsWriter
from millstream.reads.pack import each
from millstream.traces import extract, features
from millstream.traces.store.writer import TraceWriter

GIVEN = json.loads(sys.argv[1])


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class StoppingWorker(extract.ExtractWorker):
    """Ray pickles a class of `__main__` by value, so it reaches the workers."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        append = self._writer.append

        def append_and_stop(record: Any) -> None:
            append(record)
            try:
                os.rename(GIVEN["mark"], f"{GIVEN['mark']}.{os.getpid()}")
            except FileNotFoundError:  # another worker has stopped
                return
            os.kill(os.getpid(), signal.SIGSTOP)

        self._writer.append = append_and_stop


def begin(kind: str, job: object) -> bool:
    """Log a job; whether its worker is the first of its kind, which is to die."""
    with Path(GIVEN["log"]).open("a") as log:
        log.write(f"{kind} {job}\n")
    try:
        Path(f"{GIVEN['log']}.{kind}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class DyingIndexWorker(open.IndexWorker):
    """Dies when the index is complete, but not published."""

    def do(self, job: Any) -> Any:
        if begin("index", job.path.name):
            SectionsWriter.publish = die  # pyright: ignore
        return super().do(job)


class DyingPackWorker(each.PackWorker):
    """Saves progress after every piece of text, and dies when the pack is complete, but not published."""

    def do(self, job: Any) -> Any:
        if begin("part" if job.out.parent.suffix == ".parts" else "pack", job.source.name):
            self._write = partial(self._write, commit_s=0.0)
            SectionsWriter.publish = die  # pyright: ignore
        return super().do(job)


class DyingClassifyWorker(scorer.ClassifyWorker):
    """Dies when its rows are complete, but not returned."""

    def do(self, span: Any) -> Any:
        dies = begin("classify", "-".join(map(str, span)))
        rows = super().do(span)
        return die() if dies else rows


class DyingFeaturizeWorker(features.FeaturizeWorker):
    """Dies after ten records."""

    def do(self, numbers: Any) -> Any:
        if begin("featurize", len(numbers)):
            append, left = TraceWriter.append, iter(range(10))
            self._writer.append = lambda record: append(self._writer, record) if next(left, None) is not None else die()
        return super().do(numbers)


def square(item: int) -> int:
    if item == 7:
        raise BadSource("7: not this one")
    return item * item


def start_nodes(environments: list[dict[str, str]]) -> str | None:
    """The address of a cluster of these nodes; None without any."""
    if not environments:
        return None
    _keep_local()
    from ray.cluster_utils import Cluster

    cluster, here = Cluster(), os.getcwd()
    for environment in environments:
        os.chdir(environment["PWD"])
        cluster.add_node(num_cpus=1, env_vars=environment, include_dashboard=False)
    os.chdir(here)
    return cluster.address


def run_on_one_cluster() -> None:
    address = start_nodes(GIVEN["nodes"])
    import ray

    open.IndexWorker, each.PackWorker = DyingIndexWorker, DyingPackWorker
    classify.ClassifyWorker, features.FeaturizeWorker = DyingClassifyWorker, DyingFeaturizeWorker
    classify.classify.__kwdefaults__.update(batch_size=64, chunk_reads=128)  # type: ignore[union-attr]
    if address:
        ray.init(address=address, log_to_driver=False)
    else:
        ray.init(address="local", num_cpus=2, log_to_driver=False, include_dashboard=False)  # it takes seconds to start
    for command in GIVEN["commands"]:
        run(command)
    found: list[int] = []
    try:
        for result in Engine("ray", workers=2).map(square, range(9)):
            found.append(result)
    except BadSource as error:
        print(found == [0, 1, 4, 9, 16, 25, 36][: len(found)], error)
    assert ray.is_initialized(), "a cluster that existed before is left running"
    ray.shutdown()


def run(command: list[str]) -> None:
    sys.argv = ["millstream", *command]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    extract.ExtractWorker = StoppingWorker
    if GIVEN["shared"]:
        run_on_one_cluster()
    else:
        for command in GIVEN["commands"]:
            run(command)
