"""Real torchrun agents on loopback, each as on a machine of its own."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from support.effort import PATIENCE_S


def torchrun(machines: Sequence[Mapping[str, str]], *command: str, processes: int = 1) -> list[str]:
    """Run `command` (a script, or -m and a module, and arguments) on machines with these environments.

    Each has this many processes. Returns what each machine said.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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
