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
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from millstream.core.config import parse_json, parse_yaml
from millstream.core.console import quoted
from millstream.core.files import publishing, sync_path
from millstream.core.memory import Allowance, available_bytes
from millstream.core.record import crc32c
from millstream.core.registry import KINDS
from millstream.errors import BadSource, MissingExtra

if TYPE_CHECKING:
    import pyarrow as pa
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
LATEST, BEST = "latest.safetensors", "best.safetensors"
ABOUT = "millstream"  # the key of the metadata in a checkpoint
CHECKSUM = "crc32c"  # in the metadata
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
        return cls(str(line["model"]), _int(line["seed"]), _int(line.get("fold", 0)), _int(line.get("labels", 0)))


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


def _checksum(tensors: Mapping[str, Tensor], about: Mapping[str, object]) -> int:
    """CRC-32C of the metadata, and of the name, type, shape and bytes of every tensor."""
    import torch

    crc = crc32c(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        crc = crc32c(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), crc)
        crc = crc32c(tensor.reshape(-1).view(torch.uint8).numpy(), crc)
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


_BLOCK = 16 << 20
_MARK = 64
Line = Mapping[str, object]
DAMAGED_LINE = (AttributeError, KeyError, OverflowError, TypeError, ValueError)


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
    def memory(self, allowance: Allowance, *, interval_s: float = 1.0) -> Generator[None]:
        """Log the memory of this process and its children every `interval_s` seconds."""
        ended = threading.Event()

        def watch() -> None:
            while True:
                used, limit = allowance.usage()
                self.write("memory", bytes=used, budget=limit)
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
    extra_tokens: float | None  # generated for each question, in addition to its answer; None: unknown
    probabilities: bool
    chosen: Mapping[str, object]


@dataclass
class Metrics:
    """The lines of a run; of lines written twice, the last."""

    fits: dict[JobKey, Fit] = field(default_factory=dict[JobKey, Fit])
    epochs: dict[tuple[JobKey, int], Line] = field(default_factory=dict[tuple[JobKey, int], Line])
    memory: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    budget: int | None = None
    missing: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def history(self) -> Sequence[Line]:
        return list(self.epochs.values())

    def take(self, line: Line) -> None:
        """Add a line; raises one of DAMAGED_LINE if it is damaged."""
        kind = line.get("kind")
        if kind == "epoch":
            self.epochs[JobKey.of_line(line), _int(line["epoch"])] = line
        elif kind == "fit":
            self.fits[JobKey.of_line(line)] = _fit(line)
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
        except DAMAGED_LINE as error:
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
        extra_tokens=None if (tokens := line.get("extra_tokens", 0)) is None else _float(tokens),
        probabilities=bool(line["probabilities"]),
        chosen=dict(cast("Mapping[str, object]", line["chosen"])),
    )


def _int(value: object) -> int:
    return int(cast(int, value))


def _float(value: object) -> float:
    return float(cast(float, value))


def _damaged(file: Path, number: int, what: str) -> BadSource:
    return BadSource(f"{file}: line {number} is damaged ({what}). Remove this line; all models are kept")


def _complete_lines(tail: Tail) -> list[Line]:
    lines = (cast(Line, line) for block in tail.blocks() for line in block if isinstance(line, dict))
    return [line for line in lines if "kind" in line]


def _cut_incomplete_line(path: Path) -> float:
    """Cut off an incomplete last line; returns the time of the last complete one, or 0."""
    tail = Tail(path)
    lines = _complete_lines(tail)
    if path.exists() and tail.position < path.stat().st_size:
        os.truncate(path, tail.position)
    times = [line.get("time_s") for line in lines[-1:]]
    return max((float(time_s) for time_s in times if isinstance(time_s, int | float)), default=0.0)


def _parsed(block: bytes) -> Sequence[object]:
    """Parsed as one array, which is three times as fast; line by line if some are damaged."""
    try:
        return cast("list[object]", json.loads(b"[" + block[:-1].replace(b"\n", b",") + b"]"))
    except (ValueError, RecursionError):
        return [_parsed_line(text) for text in block.split(b"\n")[:-1]]


def _parsed_line(text: bytes) -> object:
    try:
        return parse_json(text)
    except ValueError as error:
        return error


def _tensorboard_writer(run: Path) -> object:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        raise MissingExtra("tensorboard=true needs the package 'tensorboard': pip install tensorboard") from None
    return SummaryWriter(str(run / "tensorboard"))
