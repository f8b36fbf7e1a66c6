"""Runs commands on Ray, with workers that stop or die. Run as a script:

    python ray_driver.py '{"mark": PATH, "log": PATH, "commands": [[...], ...], "shared": BOOL, "nodes": [{...}, ...]}'

If the file at `mark` exists, the first worker to write a trace renames it to `mark.PID` and stops (SIGSTOP), so a test
can kill the worker or this driver at a known point, however slow the machine is. With `shared`, all commands run on one
cluster that this script starts, `log` gets a line per job, and the first worker of each of the other commands dies
(SIGKILL) in the middle of its first job, except for those of `SPARED`. Without `shared`, the command starts its own
cluster. For each of `nodes`, the shared cluster has a node with this environment, which works in its PWD: the first is
that of this driver and does no jobs; those of the others that died come back after the command.
"""

import json
import os
import signal
import sys
from functools import partial
from inspect import unwrap
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
from millstream.training import run as training

GIVEN = json.loads(sys.argv[1])
# Starting another worker takes seconds, and the engine does the job of a dead one again in the same way for all: shown
# by `featurize`, which knows what of a job is done, and by the parts of a pack, which does not.
SPARED = set[str]() if os.environ.get("MILLSTREAM_THOROUGH") == "1" else {"index", "pack", "train", "classify"}


def die(*_: object, **__: object) -> None:
    if GIVEN["nodes"]:  # the whole node
        assert Path(f"/proc/{os.getppid()}/comm").read_text() == "raylet\n"
        os.kill(os.getppid(), signal.SIGKILL)
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
    if kind in SPARED:
        return False
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


class DyingTrainWorker(training.TrainWorker):
    """Dies when a model is trained, but not returned."""

    def do(self, job: Any) -> Any:
        dies = begin("train", job.name)
        done = super().do(job)
        return die() if dies else done


def square(item: int) -> int:
    if item == 7:
        raise BadSource("7: not this one")
    return item * item


class Nodes:
    """A cluster of nodes with these environments."""

    def __init__(self, environments: list[dict[str, str]]) -> None:
        _keep_local()
        from ray.cluster_utils import Cluster

        self._cluster, self._environments = Cluster(), environments
        self._nodes = [self._start(number) for number in range(len(environments))]
        self.address = self._cluster.address

    def restart_dead(self) -> None:
        for number, node in enumerate(self._nodes):
            if any(process.process.poll() is not None for all_of in node.all_processes.values() for process in all_of):
                self._cluster.remove_node(node, allow_graceful=False)
                self._nodes[number] = self._start(number)

    def _start(self, number: int) -> Any:
        environment, here = self._environments[number], os.getcwd()
        os.chdir(environment["PWD"])
        try:
            return self._cluster.add_node(num_cpus=min(number, 1), env_vars=environment, include_dashboard=False)
        finally:
            os.chdir(here)


def run_on_one_cluster() -> None:
    nodes = Nodes(GIVEN["nodes"]) if GIVEN["nodes"] else None
    import ray

    open.IndexWorker, each.PackWorker = DyingIndexWorker, DyingPackWorker
    classify.ClassifyWorker, features.FeaturizeWorker = DyingClassifyWorker, DyingFeaturizeWorker
    training.TrainWorker = DyingTrainWorker
    unwrap(classify.classify).__kwdefaults__.update(batch_size=64, chunk_reads=128)
    if nodes:
        ray.init(address=nodes.address, log_to_driver=False)
    else:
        ray.init(address="local", num_cpus=2, log_to_driver=False, include_dashboard=False)  # it takes seconds to start
    for command in GIVEN["commands"]:
        run(command)
        if nodes:
            nodes.restart_dead()
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
