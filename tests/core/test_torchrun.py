"""Ranks of a real torchrun job find their rank and share an epoch."""

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch.distributed

import millstream as ms
from support.effort import PATIENCE_S

JOB = """
import json, os, sys
import torch, torch.distributed as dist
import millstream as ms

traces, label = ms.open(sys.argv[1]), ms.features.fields("label")

def numbers(loader):
    return [batch["numbers"].tolist() for batch in loader]

said = {"variables": numbers(ms.Loader(traces, batch_size=8, features=label, seed=5))}
dist.init_process_group("gloo")
loader = ms.Loader(traces, batch_size=8, features=label, seed=5)
said["group"] = numbers(loader)
said["next"] = numbers(loader)
said["padded"] = numbers(ms.Loader(traces, batch_size=8, features=label, seed=5, tail="pad"))
said["stream"] = [batch["numbers"].tolist() for batch in traces.stream(label, batch_size=8, seed=5)]
said["len"] = len(loader)
for _ in loader:  # ranks that had different numbers of batches would wait here for ever
    dist.all_reduce(torch.ones(1))
with open(os.path.join(sys.argv[2], f"rank{dist.get_rank()}.json"), "w") as f:
    json.dump(said, f)
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_the_ranks_of_a_torchrun_job_share_every_epoch(traces: ms.Traces, tmp_path: Path):
    script = tmp_path / "job.py"
    script.write_text(JOB)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [sys.executable, *command, str(script), str(traces.path), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("loader: 101 records") == 3, "only rank 0 talks, once for each of its loaders"
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["len"] == second["len"] == 7
    for name, epoch in {"variables": 0, "group": 0, "next": 1, "padded": 0, "stream": 0}.items():
        assert len(first[name]) == len(second[name]) == 7, name
        order = ms.Order(101, 5, epoch)[:].tolist()
        expected = [*order, order[0]] if name == "padded" else order
        assert interleaved(list(chain(*first[name])), list(chain(*second[name]))) == expected, name


def interleaved(first: list[int], second: list[int]) -> list[int]:
    """One of each in turn; the first may have one more."""
    pairs = [number for pair in zip(first, second, strict=False) for number in pair]
    return pairs + first[len(second) :]
