"""Training in forked processes: side by side as torchrun starts them, or killed after a given step.

A process that kills itself at a step does so exactly there; a kill from outside could come too late.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.commands import lean_environment

Job = dict[str, Any]  # settings, environment, dies_at: the name of a model and a step

# Imports once, which takes seconds; for every line, forks processes that train, and prints their exit codes.
_PARENT = """
import gc, json, os, signal, sys, traceback
import jinja2, lightning_fabric, numpy.ma, obstore.store, rich.progress, safetensors.torch, torch_geometric.nn
import millstream.classic, millstream.reads.study, millstream.tables, millstream.traces.study
import millstream.traces.detectors.gnn
from millstream.training.loop import Training
from millstream.training.run import train

def die_at(model, number):
    step = Training._step
    def dying(self, *given):
        step(self, *given)
        if (self.job.key.model, self.at.step) == (model, number):
            os.kill(os.getpid(), signal.SIGKILL)
    Training._step = dying

def work(settings, environment, dies_at):
    try:
        os.environ.update(environment)
        die_at(*dies_at)
        train(**settings)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)

gc.freeze()
for line in sys.stdin:
    children = [os.fork() or work(**job) for job in json.loads(line)]
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], flush=True)
os._exit(0)
"""


@pytest.fixture(scope="session")
def processes() -> Iterator[Callable[[list[Job]], list[int]]]:
    """Runs jobs side by side, each in its own process, and returns their exit codes."""
    environment = {**os.environ, **lean_environment("torchmetrics", "sklearn", "transformers")}
    command = [sys.executable, "-c", _PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        jobs_in, codes_out = parent.stdin, parent.stdout

        def work(jobs: list[Job]) -> list[int]:
            jobs_in.write(json.dumps(jobs) + "\n")
            jobs_in.flush()
            return json.loads(codes_out.readline())

        yield work
        jobs_in.close()
        assert parent.wait() == 0
