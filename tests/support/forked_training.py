"""Training in forked processes: side by side as torchrun starts them, or killed after a given step.

A process that kills itself at a step does so exactly there; a kill from outside could come too late.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from support import nursery as nurseries
from support.nursery import Nursery

Job = dict[str, Any]  # settings, environment, dies_at: the name of a model and a step

_TRAIN = """
import json, os, signal, sys
from millstream.core import memory
from millstream.training import loop
from millstream.training.run import train

settings, (model, number) = map(json.loads, sys.argv[1:])
step = loop.Training._step

def dying(self, *given):
    step(self, *given)
    if (self.job.key.model, self.at.step) == (model, number):
        os.kill(os.getpid(), signal.SIGKILL)

loop.Training._step = dying
memory.tree_bytes = loop.tree_bytes = lambda pid=None: memory.resident_bytes()  # as `roughly_measured_memory`
train(**settings)
"""
_IMPORTS = (
    "jinja2",
    "lightning_fabric",
    "numpy.ma",
    "obstore.store",
    "rich.progress",
    "safetensors.torch",
    "millstream.reads.study",
    "millstream.traces.study",
    "millstream.traces.detectors.gnn",
    "millstream.training.run",
)


@pytest.fixture(scope="session")
def processes(nursery: Nursery) -> Callable[[list[Job]], list[int]]:
    """Runs jobs side by side, each in its own process, and returns their exit codes."""

    def work(jobs: list[Job]) -> list[int]:
        children = [
            nurseries.Job(_TRAIN, (json.dumps(job["settings"]), json.dumps(job["dies_at"])), job["environment"])
            for job in jobs
        ]
        done = nursery.run_together(children, imports=_IMPORTS)
        print(*(child.err for child in done), file=sys.stderr)
        return [child.code for child in done]

    return work
