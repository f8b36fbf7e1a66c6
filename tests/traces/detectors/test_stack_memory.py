"""`stack` stays within its memory: what it takes of batches, beside what loads them, is counted too."""

import select
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import millstream as ms
from millstream.core.memory import tree_bytes
from support.effort import PATIENCE_S

MB = 10**6
BUDGET = 40 * MB  # 61 MB of records; a batch of 256 has 5 MB
BESIDE = 32 * MB  # as for loaders, see tests/core/test_memory_budget.py

CHILD = """
import sys
import torch
import millstream as ms
from millstream.traces.detectors import stack
from millstream.training.task import FitResources

torch.set_num_threads(1)
stack.duration = lambda num_rows: (1, 1)  # one epoch has the peak of all
traces = ms.open(sys.argv[1])

def fit(num):
    resources = FitResources(memory=int(sys.argv[2]))
    stack.Stack(resources, traces.field_names).fit(traces.subset(range(num)), traces.subset(range(num, num + 50)))

fit(50)  # what is imported when first used
print("ready", flush=True)
sys.stdin.readline()
fit(len(traces) - 50)
print("done", flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is measured in /proc")
def test_stack_is_fitted_within_its_memory(tmp_path: Path):
    states = np.random.default_rng(0).normal(size=(4, 4, 640)).astype(np.float16)
    with ms.TraceWriter(tmp_path / "store", schema={"states": "float16[layer, position, dim]"}) as writer:
        for number in range(1500):
            row = np.roll(states, number, axis=2) + np.float16(number % 2)
            writer.append({"question_id": f"q{number}", "label": number % 2, "states": row})
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path / "store"), str(BUDGET)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin and child.stdout
    with child:
        assert child.stdout.readline() == "ready\n"
        before = most = tree_bytes(child.pid)
        child.stdin.write("go\n")
        child.stdin.flush()
        while not select.select([child.stdout], [], [], 0.01)[0]:
            most = max(most, tree_bytes(child.pid))
        assert child.stdout.readline() == "done\n"
    assert child.wait(PATIENCE_S) == 0
    print(f"+{(most - before) / MB:.0f} MB")
    assert most - before <= BUDGET + BESIDE
