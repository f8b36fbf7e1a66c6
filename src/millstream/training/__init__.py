"""One training loop for any task: settings, loop, checkpoints, log and run folder. Knows no kind of record."""

from dataclasses import asdict, dataclass
from typing import Annotated

from millstream.core.config import parse_bytes
from millstream.errors import BadSetting

_NOT_SCIENCE = (  # what may change when a run resumes
    "data",
    "model",
    "out",
    "seeds",
    "memory",
    "accelerator",
    "devices",
    "threads",
    "checkpoint_minutes",
    "checkpoint_steps",
    "tensorboard",
)


@dataclass(frozen=True)
class LoopSettings:
    """Settings of the training loop."""

    model: Annotated[str, "models to train and compare, separated by commas"] = ""
    out: Annotated[str | None, "run folder or URL; default: runs/ and the name of the data"] = None
    seeds: Annotated[int, "training runs per model, each with its own seed"] = 1
    seed: Annotated[int, "first seed"] = 0
    epochs: Annotated[int, "maximum number of epochs"] = 30
    batch_size: Annotated[int, "records per step, over all devices"] = 32
    lr: Annotated[float | None, "peak learning rate; default: chosen per model"] = None
    weight_decay: Annotated[float, "AdamW weight decay"] = 0.01
    warmup: Annotated[float, "fraction of steps for learning-rate warm-up"] = 0.05
    clip: Annotated[float, "maximum gradient norm"] = 1.0
    patience: Annotated[int, "early-stopping patience, in epochs"] = 6
    dropout: Annotated[float, "dropout rate"] = 0.2
    memory: Annotated[int | str, "memory budget of the loader and the working data of a model"] = "2GB"
    accelerator: Annotated[str, "cpu, cuda, mps, or auto to use what is available"] = "auto"
    devices: Annotated[int, "number of GPUs, or of processes on the CPU"] = 1
    threads: Annotated[int | None, "threads of torch on the CPU, and of the loader; default: by the cores"] = None
    precision: Annotated[str, "any precision of Lightning Fabric; auto: bf16-mixed on GPUs, 32-true on the CPU"] = (
        "auto"
    )
    checkpoint_minutes: Annotated[float, "minutes between checkpoints; every epoch ends with one too"] = 5.0
    checkpoint_steps: Annotated[int | None, "steps between checkpoints"] = None
    tensorboard: Annotated[bool, "also log to TensorBoard"] = False

    def check(self) -> None:
        """Raise BadSetting before any work is done."""
        for name in ("seeds", "epochs", "batch_size", "patience", "devices", "threads", "checkpoint_steps"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise BadSetting(f"{name}={getattr(self, name)}: must be at least 1")
        if self.batch_size % self.devices:
            raise BadSetting(f"batch_size={self.batch_size}: must be a multiple of devices={self.devices}")
        for name in ("lr", "checkpoint_minutes"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise BadSetting(f"{name}={getattr(self, name)}: must be above 0")
        for name in ("dropout", "warmup"):
            if not 0 <= getattr(self, name) < 1:
                raise BadSetting(f"{name}={getattr(self, name)}: must be at least 0 and below 1")
        parse_bytes(self.memory)

    def science(self) -> dict[str, object]:
        """The settings that affect the results of a run."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_SCIENCE}
