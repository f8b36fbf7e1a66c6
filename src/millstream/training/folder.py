"""The files of a run folder: settings, data card, and checkpoints; `log` reads and writes metrics.jsonl.

Imports torch only to write and load checkpoints: the report and the explorer read runs without it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from millstream.core.config import parse_json, parse_yaml
from millstream.core.console import quoted
from millstream.core.files import publishing, sync_path
from millstream.core.memory import available_bytes
from millstream.core.record import crc32c
from millstream.core.registry import KINDS
from millstream.errors import BadSource

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray
    from torch import Tensor

CONFIG = "config.yaml"
DATA = "data.json"  # the data card
SPLIT = "split.json"
ENVIRONMENT = "env.json"
METRICS = "metrics.jsonl"
PREDICTIONS = "predictions.parquet"
EVALUATED = "evaluated"  # a folder for each collection that models of the run scored later, among them:
OWN_TEST = "test"  # the test split of the run
CHECKPOINTS = "checkpoints"  # a folder for each model and seed, with:
SCORES = "scores.parquet"
WEIGHTS = "detector.safetensors"  # of any kind of model: the name is part of the format
LATEST, BEST = "latest.safetensors", "best.safetensors"
ABOUT = "millstream"  # the key of the metadata in a checkpoint
ARRAY_TYPES = {"F32": np.float32, "I32": np.int32, "I64": np.int64}  # of safetensors
CHECKSUM = "crc32c"  # in the metadata
_DISK_FULL = "The previous checkpoint is kept; free some space and run the same command to resume"
_PACKAGES = (
    "millstream",
    "torch",
    "numpy",
    "pyarrow",
    "scikit-learn",
    "lightning-fabric",
    "transformers",
)


def kind_of(folder: Path) -> str:
    """The kind of record of a run, from its data card."""
    try:
        return card_kind(read_mapping(folder / DATA))
    except BadSource:
        return KINDS[0]


def card_kind(card: Mapping[str, object]) -> str:
    """The kind of record on a data card; the first kind if the card names none."""
    kind = card.get("kind")
    return str(kind) if kind in KINDS else KINDS[0]


def load_run(run: Path, *, remedy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings and the data card of a run."""
    for name in (CONFIG, DATA):
        if not (run / name).is_file():
            raise BadSource(f"{run}: not a run of millstream train (it has no {name}). {remedy}")
    return read_mapping(run / CONFIG), read_mapping(run / DATA)


def read_mapping(file: Path) -> dict[str, Any]:
    """The names and values in a JSON or YAML file of a run; BadSource if it is damaged."""
    try:
        text = file.read_text()
        found = parse_json(text) if file.suffix == ".json" else parse_yaml(text)
    except OSError as error:
        raise damaged_file(file, "no such file" if isinstance(error, FileNotFoundError) else str(error)) from None
    except ValueError as error:
        raise damaged_file(file, str(error)) from None
    if not isinstance(found, dict):
        raise damaged_file(file, f"a {type(found).__name__}, not a mapping")
    return {str(key): value for key, value in cast("dict[object, object]", found).items()}


def damaged_file(file: Path, why: str) -> BadSource:
    return BadSource(
        f"{file}: is damaged ({why}). Restore it from a copy, or train into another folder with out=; the finished "
        f"models are still in {quoted(file.parent / CHECKPOINTS)}"
    )


def requested_models(config: Mapping[str, object]) -> list[str]:
    """The names in the setting `model` of a run; some may stand for several models."""
    return [name.strip() for name in str(config.get("model") or "").split(",") if name.strip()]


Line = Mapping[str, object]  # of the log


class JobKey(NamedTuple):
    """One training of a model: its seed, its fold of a cross-validation, and how many questions are labelled."""

    model: str
    seed: int
    fold: int = 0  # from 1; 0 without cross-validation
    labels: int = 0  # of a learning curve; 0: all

    @property
    def name(self) -> str:
        """The name of its folder, such as lstm-0, or lstm-0.fold2."""
        return "".join([f"{self.model}-{self.seed}", *(f".{name}{number}" for name, number in self._more.items())])

    def is_first(self, seed: int) -> bool:
        """Whether it is of the first seed, and of the first fold with all labels."""
        return self.seed == seed and self.fold <= 1 and not self.labels

    @property
    def about(self) -> dict[str, str | int]:
        """Its entries in a line of the log."""
        return {"model": self.model, "seed": self.seed, **self._more}

    @property
    def _more(self) -> dict[str, int]:
        return {name: number for name, number in (("fold", self.fold), ("labels", self.labels)) if number}

    def __str__(self) -> str:
        return ", ".join(
            [f"{self.model} seed {self.seed}", *(f"{name} {number}" for name, number in self._more.items())]
        )

    @classmethod
    def parse(cls, name: str) -> JobKey | None:
        """The job of a folder; None if the folder has another name."""
        found = re.fullmatch(r"(.+)-([0-9]{1,18})(?:\.fold([0-9]{1,9}))?(?:\.labels([0-9]{1,9}))?", name)
        return found and cls(found[1], *(int(number or 0) for number in found.groups()[1:]))

    @classmethod
    def of_line(cls, line: Line) -> JobKey:
        """The job that wrote a line of the log."""
        numbers = (int(cast(int, line.get(name, 0))) for name in ("fold", "labels"))
        return cls(str(line["model"]), int(cast(int, line["seed"])), *numbers)


def job_folder(run: Path, job: JobKey) -> Path:
    """The folder for checkpoints and scores of one training."""
    return run / CHECKPOINTS / job.name


def finished_jobs(run: Path) -> list[JobKey]:
    """The jobs whose scores are complete."""
    found = [JobKey.parse(file.parent.name) for file in sorted((run / CHECKPOINTS).glob(f"*/{SCORES}"))]
    return [job for job in found if job is not None]


def read_scores(run: Path, job: JobKey) -> pa.Table:
    """The scores of a finished model."""
    import pyarrow as pa

    from millstream.core.tables import read_table

    file = job_folder(run, job) / SCORES
    try:
        if file.is_dir():  # which would be read as a table of many files
            raise IsADirectoryError("a folder")
        return read_table(file)
    except (OSError, pa.ArrowException) as error:
        why = str(error).partition("\n")[0]
        raise BadSource(
            f"{file}: is damaged ({why}). Remove it and run the same millstream train command to score the model again"
        ) from None


def environment() -> dict[str, object]:
    """Versions and hardware, for env.json."""
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


def save(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, object]) -> None:
    """Write tensors by name, and `about` as JSON metadata. CPU tensors are not copied."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    described = json.dumps({**about, CHECKSUM: _checksum(whole, about)})
    with publishing(path, _DISK_FULL) as file:
        try:
            save_file(whole, file.name, metadata={ABOUT: described})
        except SafetensorError as error:  # it keeps only the text of an OSError
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else 0, str(error)) from None
        with open(file.name, "rb") as written:  # safetensors may have replaced it with a file private to its owner
            os.fchmod(written.fileno(), os.fstat(file.fileno()).st_mode)
            os.fsync(written.fileno())
    sync_path(path.parent)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The tensors by name, and `about`."""
    with _opened(path) as file:
        tensors = {name: cast("Tensor", file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        about = cast("dict[str, object]", parse_json(file.metadata()[ABOUT]))
        if about.pop(CHECKSUM, None) != _checksum(tensors, about):
            raise ValueError("its checksum does not match")
        return tensors, about


def load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The same tensors as arrays, without torch, and never in memory twice; of the types in ARRAY_TYPES only."""
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError("it is not safetensors")
            head = cast("dict[str, Any]", parse_json(file.read(size).decode()))
            about = cast("dict[str, object]", parse_json(head.pop("__metadata__")[ABOUT]))
            found: dict[str, NDArray[Any]] = {}
            for name, spec in head.items():
                file.seek(8 + size + spec["data_offsets"][0])
                found[name] = np.fromfile(file, ARRAY_TYPES[spec["dtype"]], prod(spec["shape"])).reshape(spec["shape"])
        if about.pop(CHECKSUM, None) != _checksum_of_arrays(found, about):
            raise ValueError("its checksum does not match")
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        why = "a folder" if path.is_dir() else str(error).partition("\n")[0]
        raise damaged_checkpoint(path, why) from None
    return found


def _checksum(tensors: Mapping[str, Tensor], about: Mapping[str, object]) -> int:
    """CRC-32C of the metadata, and of the name, type, shape and bytes of every tensor."""
    import torch

    crc = crc32c(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        crc = crc32c(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), crc)
        crc = crc32c(tensor.reshape(-1).view(torch.uint8).numpy(), crc)
    return crc


def _checksum_of_arrays(arrays: Mapping[str, NDArray[Any]], about: Mapping[str, object]) -> int:
    """The same."""
    crc = crc32c(json.dumps(about, sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        crc = crc32c(f"{name} torch.{array.dtype} {list(array.shape)}".encode(), crc)
        crc = crc32c(array.reshape(-1).view(np.uint8), crc)
    return crc


def load_shapes(path: Path) -> dict[str, list[int]]:
    """The shape of each tensor, by name; no tensor is read."""
    with _opened(path) as file:
        return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@contextmanager
def _opened(path: Path) -> Generator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        # By its descriptor: safetensors takes only paths that are UTF-8.
        with open(path, "rb") as opened, safe_open(f"/dev/fd/{opened.fileno()}", "pt") as file:  # pyright: ignore
            yield cast(Any, file)
    except (SafetensorError, OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        why = "a folder" if path.is_dir() else str(error).partition("\n")[0]
        raise damaged_checkpoint(path, why) from None


def damaged_checkpoint(path: Path, why: str) -> BadSource:
    return BadSource(
        f"{path}: not a millstream checkpoint, or damaged ({why}). Remove {quoted(path.parent)} and run the same "
        "millstream train command to train this model again; finished models are kept"
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
