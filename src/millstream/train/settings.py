"""What `millstream train` takes as `key=value` or from a YAML file."""

from dataclasses import asdict, dataclass

from millstream.config import parse_bytes
from millstream.errors import BadSetting

_NOT_SCIENCE = (  # what may differ when a run goes on
    "data",
    "model",
    "out",
    "seeds",
    "memory",
    "accelerator",
    "devices",
    "checkpoint_minutes",
    "checkpoint_steps",
    "tensorboard",
)


@dataclass(frozen=True)
class LoopSettings:
    """What training takes, whatever is learned."""

    model: str = ""  # which are trained and compared, with commas between them
    out: str | None = None  # the run folder; runs/ and the name of the data if not given
    seeds: int = 1  # how often each model is trained
    seed: int = 0  # the first of them
    epochs: int = 30  # at most
    batch_size: int = 32  # over all devices
    lr: float | None = None  # the highest; that of each model if not given
    weight_decay: float = 0.01  # of AdamW
    warmup: float = 0.05  # share of the steps in which the learning rate rises
    clip: float = 1.0  # the largest norm of the gradient
    patience: int = 6  # epochs that are no better on validation, after which training ends
    dropout: float = 0.2  # of nets
    memory: int | str = "2GB"  # for the loader and for what a model works on
    accelerator: str = "auto"  # cpu, cuda, mps, or what there is
    devices: int = 1  # GPUs, or processes on the CPU
    precision: str = "auto"  # bf16-mixed on GPUs, 32-true on the CPU, or what Lightning Fabric knows
    checkpoint_minutes: float = 5.0  # between checkpoints; there is one at the end of each epoch too
    checkpoint_steps: int | None = None  # and after so many steps
    tensorboard: bool = False  # write the curves for TensorBoard too

    def check(self) -> None:
        """Say what is wrong before anything is made."""
        for name in ("seeds", "epochs", "batch_size", "patience", "devices", "checkpoint_steps"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise BadSetting(f"{name}={getattr(self, name)}: at least 1")
        if self.batch_size % self.devices:
            raise BadSetting(f"batch_size={self.batch_size}: has to be a multiple of devices={self.devices}")
        if (
            (self.lr is not None and self.lr <= 0)
            or not 0 <= self.dropout < 1
            or not 0 <= self.warmup < 1
            or self.checkpoint_minutes <= 0
        ):
            raise BadSetting("lr and checkpoint_minutes are above 0, dropout and warmup from 0 to below 1")
        parse_bytes(self.memory)

    def science(self) -> dict[str, object]:
        """The settings that decide the numbers a run finds."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_SCIENCE}


@dataclass(frozen=True)
class TrainSettings(LoopSettings):
    """One split and one recipe for all detectors of a run."""

    model: str = "lstm,gnn,gvae,baselines"  # also names of single ones, and package.module:Class
    data: str = ""  # a trace store with labels
    label: str = "verdict"  # right or wrong; or a column of 0 (right) and 1 (wrong)
    train: float = 0.7  # share of the questions
    val: float = 0.15  # the rest is for the test
    by: str = "question_id"  # records that are equal in it stay together
    salt: str = ""  # another one is another split
    seeds: int = 3
    parameters: int = 100_000  # of each model: its width follows
    token: str = "last_answer"  # whose vectors the LSTM reads: last_prompt, first_answer, last_answer, mean_answer
    token_stats: bool = True  # whether models see log-probabilities and the like beside the states
    k: int | None = 8  # edges of a token; none: all above the threshold
    threshold: float = 0.0  # attention an edge has at least
    kl_weight: float = 0.1  # of gvae: how much explaining the graph counts
    free_bits: float = 0.05  # of gvae: what a latent number may tell at no cost

    def check(self) -> None:
        if not self.data:
            raise BadSetting("data=STORE: name the trace store to train on")
        if min(self.train, self.val) <= 0 or self.train + self.val >= 1:
            raise BadSetting(f"train={self.train} val={self.val}: both above 0, and together below 1 to leave a test")
        for name in ("parameters", "k"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise BadSetting(f"{name}={getattr(self, name)}: at least 1")
        super().check()
