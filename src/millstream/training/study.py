"""A study is what a run compares: models, the records they train on, and those they score. Each kind has its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from millstream.core.collection import Collection
from millstream.training.settings import LoopSettings
from millstream.training.task import FitResources, Model
from millstream.training.trained import Workplace


@dataclass(frozen=True)
class Built:
    """A model and its description for the report."""

    model: Model
    title: str
    kind: str
    extra_forwards: int = 0
    train: Collection | None = None  # its training records, if not those of the other models


class ModelSpec(Protocol):
    """A model named in the settings."""

    @property
    def name(self) -> str: ...
    @property
    def by_gradients(self) -> bool:
        """Whether it is a net: trained by all processes, once per seed."""
        ...

    def build(self, *, resources: FitResources, place: Workplace, folder: Path | None = None) -> Built: ...


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
        """The splits that finished models score, `val` among them."""
        ...

    @property
    def specs(self) -> Sequence[ModelSpec]: ...
    @property
    def keys(self) -> Sequence[str]:
        """Entries of the card that make it a different run when they change."""
        ...

    @property
    def libraries(self) -> Sequence[str]:
        """Modules that its models import; their memory does not count towards the budget."""
        ...

    @property
    def card(self) -> Mapping[str, object]:
        """The data card: a description of the data."""
        ...

    def keep(self, run: Path) -> None:
        """Write further files into the run folder."""
        ...

    def summary(self) -> str:
        """The data in a few lines, printed before training."""
        ...

    def table(self, built: Built, split: str, /) -> pa.Table:
        """The predictions of a model for a split: rows of predictions.parquet, without the model and its seed."""
        ...


class StudyPlug(Protocol):
    """The module `study` of a kind of record."""

    def make_study(self, settings: Mapping[str, object]) -> Study: ...
