"""What a run was made with: versions, machine, time. No names of people or machines."""

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from millstream.config import available_bytes

_PACKAGES = (
    "millstream",
    "torch",
    "numpy",
    "pyarrow",
    "scikit-learn",
    "lightning-fabric",
    "torch_geometric",
    "transformers",
)


def environment() -> dict[str, object]:
    import torch

    found: dict[str, object] = {
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "cpu": _cpu(),
        "free_memory_bytes": available_bytes(),
        "torch_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
