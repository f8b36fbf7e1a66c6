"""The files of a run folder: settings, data card, checkpoints, and metrics.jsonl with one line per event.

Imports torch only to write and load checkpoints: the report and the explorer read runs without it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from millstream.core.console import quoted
from millstream.core.files import publishing, sync_folder
from millstream.core.memory import available_bytes, tree_bytes
from millstream.core.registry import KINDS
from millstream.errors import BadSource, MissingExtra

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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


def requested_models(config: Mapping[str, object]) -> list[str]:
    """The names in the setting `model` of a run; some may stand for several models."""
    return [name.strip() for name in str(config.get("model") or "").split(",") if name.strip()]


def job_folder(run: Path, name: str, seed: int) -> Path:
    """The folder for checkpoints and scores of one model and seed."""
    return run / CHECKPOINTS / f"{name}-{seed}"


def finished_jobs(run: Path) -> list[tuple[str, int]]:
    """The models, with their seeds, whose scores are complete."""
    parts = [file.parent.name.rpartition("-") for file in sorted((run / CHECKPOINTS).glob(f"*/{SCORES}"))]
    return [(name, int(seed)) for name, _, seed in parts if re.fullmatch("[0-9]{1,18}", seed)]


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
        tensors = {name: cast("Tensor", file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
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


_BLOCK = 16 << 20
_MARK = 64
Line = Mapping[str, object]


class Log:
    """Appends lines. When a run resumes, an incomplete last line is cut off and time continues from the last one."""

    def __init__(self, run: Path, *, tensorboard: bool = False) -> None:
        self._path = run / METRICS
        self._lock = threading.Lock()
        self._started = time.monotonic() - _cut_incomplete_line(self._path)
        self._tensorboard = _tensorboard_writer(run) if tensorboard else None

    def write(self, kind: str, **values: object) -> None:
        line = {"kind": kind, "time_s": round(time.monotonic() - self._started, 3), **values}
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._tensorboard is not None and kind == "epoch":
            for name, value in values.items():
                if isinstance(value, float):
                    tag = f"{values['model']}-{values['seed']}/{name}"
                    self._tensorboard.add_scalar(tag, value, values["epoch"])  # pyright: ignore

    @contextmanager
    def memory(self, budget: int, *, interval_s: float = 1.0) -> Generator[None]:
        """Log the memory of this process and its children every `interval_s` seconds."""
        ended = threading.Event()

        def watch() -> None:
            while True:
                self.write("memory", bytes=tree_bytes(), budget=budget)
                if ended.wait(interval_s):
                    return

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


class Tail:
    """Reads what was appended to a metrics.jsonl since the last call, in constant memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0  # increases when the file was cut or replaced, and is read again from the start
        self._restart()

    def blocks(self) -> Iterator[Sequence[object]]:
        """New lines in parsed blocks; a damaged line is the ValueError that says why.

        An incomplete last line is left for later. Use a block before taking the next.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            if self.position:
                self._restart()
            return
        with file:
            stat = os.fstat(file.fileno())
            if self.position and not self._is_continued(file.fileno(), stat):
                self._restart()
            self._inode = stat.st_ino
            while True:
                block = os.pread(file.fileno(), _BLOCK, self.position)
                block = block[: block.rfind(b"\n") + 1]
                if not block:
                    return
                self.position += len(block)
                self._mark = block[-_MARK:]
                yield _parsed(block)

    def _is_continued(self, fd: int, stat: os.stat_result) -> bool:
        """Whether it is the same file and still contains what was read."""
        same = stat.st_ino == self._inode and stat.st_size >= self.position
        return same and os.pread(fd, len(self._mark), self.position - len(self._mark)) == self._mark

    def _restart(self) -> None:
        self.generation += 1
        self.position, self._inode, self._mark = 0, 0, b""  # the position is after the last complete line


def read_lines(run: Path) -> list[Line]:
    """All complete lines of a run, except damaged ones."""
    return _complete_lines(Tail(run / METRICS))


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One model with one seed, trained and scored."""

    family: str  # trained, baseline, null
    title: str
    parameters: int | None
    fit_s: float
    score_s: float
    num_scored: int
    trace_bytes: int  # per record: what the model reads
    extra_forwards: int
    probabilities: bool
    chosen: Mapping[str, object]


@dataclass
class Metrics:
    """The lines of a run; of lines written twice, the last."""

    fits: dict[tuple[str, int], Fit] = field(default_factory=dict[tuple[str, int], Fit])
    epochs: dict[tuple[str, int, int], Line] = field(default_factory=dict[tuple[str, int, int], Line])
    memory: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    budget: int | None = None
    missing: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def history(self) -> Sequence[Line]:
        return list(self.epochs.values())

    def take(self, line: Line) -> None:
        """Add a line; raises AttributeError, KeyError, TypeError or ValueError if it is damaged."""
        kind = line.get("kind")
        if kind == "epoch":
            self.epochs[str(line["model"]), _int(line["seed"]), _int(line["epoch"])] = line
        elif kind == "fit":
            self.fits[str(line["model"]), _int(line["seed"])] = _fit(line)
            self.missing.pop(str(line["model"]), None)
        elif kind == "memory":
            self.memory.append((_float(line["time_s"]), _int(line["bytes"])))
            self.budget = self.budget if line.get("budget") is None else _int(line["budget"])
        elif kind == "missing":
            self.missing[str(line["model"])] = str(line["why"])


def read_metrics(file: Path) -> Metrics:
    """The metrics of a run that is training, was resumed, or is finished. An incomplete last line is left out."""
    metrics = Metrics()
    lines = [line for block in Tail(file).blocks() for line in block]
    for number, line in enumerate(lines, start=1):
        if isinstance(line, ValueError):
            raise _damaged(file, number, f"not valid JSON: {line}")
        try:
            metrics.take(cast(Line, line))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise _damaged(file, number, f"{type(error).__name__}: {error}") from None
    return metrics


def _fit(line: Line) -> Fit:
    return Fit(
        family=str(line["family"]),
        title=str(line["title"]),
        parameters=None if line["parameters"] is None else _int(line["parameters"]),
        fit_s=_float(line["fit_s"]),
        score_s=_float(line["score_s"]),
        num_scored=_int(line["num_scored"]),
        trace_bytes=_int(line["trace_bytes"]),
        extra_forwards=_int(line["extra_forwards"]),
        probabilities=bool(line["probabilities"]),
        chosen=dict(cast("Mapping[str, object]", line["chosen"])),
    )


def _int(value: object) -> int:
    return int(cast(int, value))


def _float(value: object) -> float:
    return float(cast(float, value))


def _damaged(file: Path, number: int, what: str) -> BadSource:
    again = f"millstream train data=STORE out={quoted(file.parent)}"
    return BadSource(f"{file}: line {number} is damaged ({what}). Next: remove it, or remove the run and {again}")


def _complete_lines(tail: Tail) -> list[Line]:
    return [cast(Line, line) for block in tail.blocks() for line in block if isinstance(line, dict)]


def _cut_incomplete_line(path: Path) -> float:
    """Cut off an incomplete last line; returns the time of the last complete one, or 0."""
    tail = Tail(path)
    lines = _complete_lines(tail)
    if path.exists() and tail.position < path.stat().st_size:
        os.truncate(path, tail.position)
    return float(cast(float, lines[-1].get("time_s", 0.0))) if lines else 0.0


def _parsed(block: bytes) -> Sequence[object]:
    """Parsed as one array, which is three times as fast; line by line if some are damaged."""
    try:
        return cast("list[object]", json.loads(b"[" + block[:-1].replace(b"\n", b",") + b"]"))
    except ValueError:
        return [_parsed_line(text) for text in block.splitlines()]


def _parsed_line(text: bytes) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        return error


def _tensorboard_writer(run: Path) -> object:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        raise MissingExtra("tensorboard=true needs the package 'tensorboard': pip install tensorboard") from None
    return SummaryWriter(str(run / "tensorboard"))
