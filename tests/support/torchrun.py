"""Real torchrun agents on loopback, each as on a machine of its own; and what their ranks find in the environment."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from support.effort import PATIENCE_S


def rank_environments(world: int, *, nodes: int = 1, name: str = "job") -> list[dict[str, str]]:
    """Of each rank, as torchrun starts it: its agents take seconds."""
    local = world // nodes
    common = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local, "TORCHELASTIC_RUN_ID": name}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    ranks = [{"RANK": rank, "LOCAL_RANK": rank % local, "GROUP_RANK": rank // local} for rank in range(world)]
    return [{key: str(value) for key, value in (common | rank).items()} for rank in ranks]


def torchrun(machines: Sequence[Mapping[str, str]], *command: str, processes: int = 1) -> list[str]:
    """Run `command` (a script, or -m and a module, and arguments) on machines with these environments.

    Each has this many processes. Returns what each machine said.
    """
    port = _free_port()
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    counts = ["--nnodes", str(len(machines)), "--nproc-per-node", str(processes)]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *counts, *meeting, *command],
            env={**os.environ, **machine},
            stderr=subprocess.PIPE,
            text=True,
        )
        for machine in machines
    ]
    said = [agent.communicate(timeout=PATIENCE_S)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * len(agents), said
    return said


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
