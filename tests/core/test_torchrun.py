"""Ranks of a real torchrun job find their rank and share an epoch, also where they share nothing else."""

import json
from itertools import chain
from pathlib import Path
from typing import cast

import pytest
import torch.distributed

import millstream as ms
from support.effort import THOROUGH
from support.loading import numbers_of, write_traces
from support.nursery import Job, Nursery
from support.remote_stores import upload
from support.s3_server import Bucket
from support.torchrun import rank_environments, torchrun

LABEL = ms.features.fields("label")
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

# Each rank as on a machine of its own: only the bucket is shared, and free memory differs.
REMOTE_JOB = """
import json, os, sys
rank, (url, folder, state, steps) = os.environ["RANK"], sys.argv[1:]
import millstream as ms
import millstream.core.loader

millstream.core.loader.available_bytes = lambda: int(rank) << 40
loader = ms.Loader(ms.open(url), batch_size=8, features=ms.features.fields("label", "vector"), seed=5, memory="80kB")
if state := json.loads(state):
    loader.load_state_dict(state)
seen = []
for batch, _ in zip(loader, range(int(steps))):
    assert (batch["vector"] == batch["label"][:, None]).all()
    seen += batch["label"].tolist()
    state = loader.state_dict()
with open(os.path.join(folder, f"rank{rank}.json"), "w") as f:
    json.dump({"seen": seen, "state": state}, f)
"""

needs_distributed = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)


@needs_distributed
def test_the_ranks_of_a_torchrun_job_share_every_epoch(traces: ms.Traces, nursery: Nursery, tmp_path: Path):
    if THOROUGH:
        script = tmp_path / "job.py"
        script.write_text(JOB)
        (said,) = torchrun([{}], str(script), str(traces.path), str(tmp_path), processes=2)
    else:
        ranks = [Job(JOB, (traces.path, tmp_path), environment) for environment in rank_environments(2)]
        done = nursery.run_together(ranks)
        said = "".join(rank.err for rank in done)
        assert [rank.code for rank in done] == [0, 0], said
    assert said.count("loader: 101 records") == 3, "only rank 0 talks, once for each of its loaders"
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["len"] == second["len"] == 7
    for name, epoch in {"variables": 0, "group": 0, "next": 1, "padded": 0, "stream": 0}.items():
        assert len(first[name]) == len(second[name]) == 7, name
        order = ms.Order(101, 5, epoch)[:].tolist()
        expected = [*order, order[0]] if name == "padded" else order
        assert interleaved(list(chain(*first[name])), list(chain(*second[name]))) == expected, name


@needs_distributed
def test_ranks_that_share_nothing_but_a_bucket_see_every_record_once_and_resume_in_another_number(
    s3: Bucket, nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "own"))
    local = write_traces(tmp_path / "store", range(96))
    url = upload(local.path, f"{s3.url}/traces")

    def run(world: int, state: object, steps: int) -> tuple[list[int], list[object]]:
        folder = tmp_path / f"{world}-{steps}"
        folder.mkdir()
        machines = [{"MILLSTREAM_CACHE_DIR": str(folder / f"cache{node}")} for node in range(world)]
        arguments = [url, str(folder), json.dumps(state), str(steps)]
        if THOROUGH:
            script = folder / "job.py"
            script.write_text(REMOTE_JOB)
            torchrun(machines, str(script), *arguments)
        else:
            environments = rank_environments(world, nodes=world)
            ranks = [
                Job(REMOTE_JOB, tuple(arguments), {**machine, **rank})
                for machine, rank in zip(machines, environments, strict=True)
            ]
            assert [done.code for done in nursery.run_together(ranks)] == [0] * world
        assert all(list((folder / f"cache{node}").glob("??/*")) for node in range(world)), "each fetches for itself"
        told = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]
        return [label for one in told for label in one["seen"]], [one["state"] for one in told]

    first, (state, same_state) = run(2, None, 3)
    assert len(first) == 48 and state == same_state
    for world in (1, 3):
        rest = list[int]()
        for rank in range(world):
            loader = ms.Loader(ms.open(url), batch_size=8, seed=5, features=LABEL, rank=rank, world=world)
            loader.load_state_dict(cast("dict[str, object]", state))
            rest += numbers_of(loader)
        assert sorted(first + rest) == list(range(96))
    if THOROUGH:
        rest, _ = run(3, state, 100)
        assert sorted(first + rest) == list(range(96))


def interleaved(first: list[int], second: list[int]) -> list[int]:
    """One of each in turn; the first may have one more."""
    pairs = [number for pair in zip(first, second, strict=False) for number in pair]
    return pairs + first[len(second) :]
