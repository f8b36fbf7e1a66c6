"""One training loop for any task: settings, loop, checkpoints, log and run folder. Knows no kind of record."""

from dataclasses import asdict, dataclass
from typing import Annotated

from millstream.core.config import Between, Count, NonNegative, Positive, Rate, SizeInBytes, parse_bytes
from millstream.core.console import format_bytes
from millstream.errors import BadSetting

LEAST_MEMORY = 100_000_000  # a run over 2,000 reads took 80 MB
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
    seeds: Annotated[int, Between(1, 1000), "training runs per model, each with its own seed"] = 1
    seed: Annotated[int, Between(0, 10**9), "first seed"] = 0
    epochs: Annotated[Count, "maximum number of epochs"] = 30
    batch_size: Annotated[Count, "records per step, over all devices"] = 32
    lr: Annotated[Positive | None, "peak learning rate; default: chosen per model"] = None
    weight_decay: Annotated[NonNegative, "AdamW weight decay"] = 0.01
    warmup: Annotated[Rate, "fraction of steps for learning-rate warm-up"] = 0.05
    clip: Annotated[Positive, "maximum gradient norm"] = 1.0
    patience: Annotated[Count, "early-stopping patience, in epochs"] = 6
    dropout: Annotated[Rate, "dropout rate"] = 0.2
    memory: Annotated[SizeInBytes, "memory budget of the loader and the working data of a model"] = "2GB"
    accelerator: Annotated[str, "cpu, cuda, mps, or auto to use what is available"] = "auto"
    devices: Annotated[Count, "number of GPUs, or of processes on the CPU"] = 1
    threads: Annotated[Count | None, "threads of torch on the CPU, and of the loader; default: by the cores"] = None
    precision: Annotated[str, "any precision of Lightning Fabric; auto: bf16-mixed on GPUs, 32-true on the CPU"] = (
        "auto"
    )
    checkpoint_minutes: Annotated[Positive, "minutes between checkpoints; every epoch ends with one too"] = 5.0
    checkpoint_steps: Annotated[Count | None, "steps between checkpoints"] = None
    tensorboard: Annotated[bool, "also log to TensorBoard"] = False

    def check(self) -> None:
        """Raise BadSetting before any work is done."""
        if parse_bytes(self.memory) < LEAST_MEMORY:
            raise BadSetting(
                f"memory={self.memory}: must be at least {format_bytes(LEAST_MEMORY).replace(' ', '')}, which training "
                "takes for any data"
            )
        if self.batch_size % self.devices:
            raise BadSetting(f"batch_size={self.batch_size}: must be a multiple of devices={self.devices}")

    def science(self) -> dict[str, object]:
        """The settings that affect the results of a run."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_SCIENCE}
