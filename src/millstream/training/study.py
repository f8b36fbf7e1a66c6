"""What a run compares: models, the records they learn from, and those they are judged by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from millstream.collection import Collection
from millstream.model.detector import Detector, Means
from millstream.train.settings import LoopSettings
from millstream.train.trained import NetModel, Workplace


@dataclass(frozen=True)
class Built:
    """A model and what the report says of it."""

    model: Detector | NetModel
    title: str
    kind: str
    extra_forwards: int = 0
    train: Collection | None = None  # what it learns from, if not from what the others do


class Asked(Protocol):
    """A model that was named."""

    @property
    def name(self) -> str: ...
    @property
    def by_gradients(self) -> bool:
        """Whether it is a net: trained by all processes, once for every seed."""
        ...

    def build(self, *, means: Means, place: Workplace, folder: Path | None = None) -> Built: ...


class Study(Protocol):
    """The settings, the data and the models of a run."""

    @property
    def settings(self) -> LoopSettings: ...
    @property
    def source(self) -> str:
        """Where the training records are."""
        ...

    @property
    def train(self) -> Collection: ...
    @property
    def scored(self) -> Mapping[str, Collection]:
        """The parts that finished models are asked about, `val` among them."""
        ...

    @property
    def asked(self) -> Sequence[Asked]: ...
    @property
    def keys(self) -> Sequence[str]:
        """What on the card makes it another run when it changes."""
        ...

    @property
    def card(self) -> Mapping[str, object]:
        """What the data is."""
        ...

    def keep(self, run: Path) -> None:
        """Write into the run folder what else belongs to it."""
        ...

    def told(self) -> str:
        """What a person is told of the data before training."""
        ...

    def table(self, built: Built, part: str) -> pa.Table:
        """What a model says of the records of a part: rows of predictions.parquet, but for the model and its seed."""
        ...
