"""The files of a run folder: their names, the settings and data card, and checkpoints."""

import json
import os
import platform
import re
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from torch import Tensor

from millstream.core.files import publishing, sync_folder
from millstream.core.memory import available_bytes
from millstream.core.registry import KINDS
from millstream.errors import BadSource

CONFIG = "config.yaml"
DATA = "data.json"  # the data card
SPLIT = "split.json"
ENVIRONMENT = "env.json"
METRICS = "metrics.jsonl"
PREDICTIONS = "predictions.parquet"
CHECKPOINTS = "checkpoints"  # a folder for each model and seed, with:
SCORES = "scores.parquet"
WEIGHTS = "detector.safetensors"  # of any kind of model: the name is part of the format
ABOUT = "millstream"  # the key of the metadata in a checkpoint
OPTIMIZER = "optimizer."
_DISK_FULL = "The previous checkpoint is kept; free some space and run the same command to resume"
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


def kind_of(folder: Path) -> str:
    """The kind of record of a run, from its data card."""
    try:
        card = json.loads((folder / DATA).read_text())
    except (OSError, ValueError):
        card = None
    return card_kind(cast("dict[str, object]", card) if isinstance(card, dict) else {})


def card_kind(card: Mapping[str, object]) -> str:
    """The kind of record on a data card; the first kind if the card names none."""
    kind = card.get("kind")
    return str(kind) if kind in KINDS else KINDS[0]


def load_run(run: Path, *, remedy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings and the data card of a run."""
    try:
        config, card = yaml.safe_load((run / CONFIG).read_text()), json.loads((run / DATA).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        why = f"it has no {Path(str(error.filename)).name}" if missing else str(error)
        raise BadSource(f"{run}: not a run of millstream train ({why}). {remedy}") from None
    if not isinstance(config, dict) or not isinstance(card, dict):
        raise BadSource(f"{run}: not a run of millstream train ({CONFIG} or {DATA} is damaged). {remedy}")
    return cast("dict[str, Any]", config), cast("dict[str, Any]", card)


def job_folder(run: Path, name: str, seed: int) -> Path:
    """The folder for checkpoints and scores of one model and seed."""
    return run / CHECKPOINTS / f"{name}-{seed}"


def finished_jobs(run: Path) -> list[tuple[str, int]]:
    """The models, with their seeds, whose scores are complete."""
    parts = [file.parent.name.rpartition("-") for file in sorted((run / CHECKPOINTS).glob(f"*/{SCORES}"))]
    return [(name, int(seed)) for name, _, seed in parts]


def environment() -> dict[str, object]:
    """Versions and hardware, for env.json."""
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


def save(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, object]) -> None:
    """Write tensors by name, and `about` as JSON metadata. CPU tensors are not copied."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with publishing(path, _DISK_FULL) as file:
        try:
            save_file(whole, file.name, metadata={ABOUT: json.dumps(about)})
        except SafetensorError as error:  # it keeps only the text of an OSError
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else 0, str(error)) from None
        with open(file.name, "rb") as written:  # safetensors may have replaced it with a file private to its owner
            os.fchmod(written.fileno(), os.fstat(file.fileno()).st_mode)
            os.fsync(written.fileno())
    sync_folder(path.parent)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The tensors by name, and `about`."""
    with _opened(path) as file:
        tensors = {name: cast(Tensor, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        return tensors, cast("dict[str, object]", json.loads(file.metadata()[ABOUT]))


def load_shapes(path: Path) -> dict[str, list[int]]:
    """The shape of each tensor, by name; no tensor is read."""
    with _opened(path) as file:
        return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def pack_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of every parameter, keyed by number and name."""
    state = cast("dict[int, dict[str, Tensor]]", optimizer.state_dict()["state"])
    return {f"{OPTIMIZER}{number}.{name}": value for number, values in state.items() for name, value in values.items()}


def unpack_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith(OPTIMIZER):
            number, key = name.removeprefix(OPTIMIZER).split(".")
            state.setdefault(int(number), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


@contextmanager
def _opened(path: Path) -> Generator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:  # pyright: ignore[reportUnknownVariableType]
            yield cast(Any, file)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise BadSource(
            f"{path}: not a millstream checkpoint, or damaged ({error}). Remove it and train again"
        ) from None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
