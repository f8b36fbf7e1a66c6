"""A study is what a run compares: models (a net among them), the records they train on, and those they score."""

import gc
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from millstream.core.collection import Collection
from millstream.core.console import Progress, ignore_message, progress, silent
from millstream.core.features import Feature, fields, fitting_batch
from millstream.core.loader import Loader
from millstream.core.memory import Allowance
from millstream.core.split import LABEL
from millstream.errors import BadSource, NotFinite
from millstream.training import LoopSettings
from millstream.training.folder import CHECKPOINTS, JobKey
from millstream.training.log import Log
from millstream.training.loop import LATEST, SCORED_AT_ONCE, Clock, Job, Training, predict, seed_all
from millstream.training.task import (
    Arrays,
    FitResources,
    Model,
    Net,
    Outcome,
    Task,
    count_parameters,
    records_at_once,
)

NUM_EXAMPLES = 16


class Interrupted(Exception):
    """Training was stopped and can resume from its checkpoint."""


@dataclass(frozen=True)
class Workplace:
    """Where nets are trained: devices, log, memory budget, and what stops them."""

    settings: LoopSettings
    fabric: Any
    source: str = ""  # of the records, for messages
    log: Log | None = None
    allowance: Allowance | None = None
    stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Kit:
    """What a net sees of records, and how to build it for an example batch."""

    features: Sequence[Feature]
    build: Callable[[Mapping[str, Tensor]], Net]
    scoring: Sequence[Feature] | None = None  # for scoring, if different


class NetModel:
    """A net that learns a task."""

    probabilities = True

    def __init__(
        self, name: str, kit: Kit, *, task: Task, resources: FitResources, place: Workplace, folder: Path | None = None
    ) -> None:
        self.name, self.kit, self.task = name, kit, task
        self.resources, self.place, self.folder = resources, place, folder
        self.fabric = place.fabric
        self.scoring = kit.features if kit.scoring is None else kit.scoring
        self.fields: Sequence[str] = list(dict.fromkeys(f for feature in kit.features for f in feature.fields or ()))
        self.arrays: Arrays = {}
        self.chosen: dict[str, object] = {}
        self.parameters: int | None = None
        self._net: Net | None = None

    def fit(self, train: Collection, val: Collection) -> None:
        log, settings = self.place.log, self.place.settings
        assert self.folder is not None and log is not None
        key = JobKey.parse(self.folder.name)
        assert key is not None
        seed_all(self.resources.seed)
        net = self.build(train)
        self.parameters = count_parameters(net)
        gc.collect()  # frames of imports and compilers keep a Loader, and with it decoded blocks
        if net.needs_preparation and not (self.folder / LATEST).exists():
            self.prepare(net, train, key)
            gc.collect()
        job = Job(
            key,
            self.folder,
            settings,
            self.task,
            self.kit.features,
            self.scoring,
            memory=self.resources.memory,
            source=self.place.source,
            at_once=self.at_once,
        )
        num_records = min(len(train) * settings.epochs, net.most_records)
        with self._shown(str(key), num_records) as shown:
            training = Training(job, self.fabric, net, log=log, progress=shown, stop=self.place.stop)
            if not training.run(train, val):
                raise Interrupted
        self.arrays = {name: tensor.cpu().numpy() for name, tensor in net.state_dict().items()}
        self.chosen = {"epoch": training.at.best_epoch, "width": net.width}
        self._net = net

    def outcome(self, collection: Collection) -> Outcome:
        """The predictions for every record."""
        net = self.restored(collection)
        with self._shown(f"{self.name}: scoring", len(collection)) as shown:
            return predict(
                net,
                collection,
                self.scoring,
                task=self.task,
                memory=self.resources.memory,
                fabric=self.fabric,
                at_once=self.at_once,
                threads=self.resources.threads,
                progress=shown,
            )[0]

    def restored(self, collection: Collection) -> Net:
        """The net with its trained weights, for records like these."""
        if self._net is None:
            net = self.build(collection)
            weights = {name: torch.tensor(np.asarray(array)) for name, array in self.arrays.items()}
            try:
                net.load_state_dict(weights)
            except RuntimeError as error:  # names or shapes of weights differ
                raise BadSource(
                    f"{CHECKPOINTS}/{self.name}-{self.resources.seed}: the weights do not match the {self.name} that "
                    f"this version of millstream builds from the run's settings ({_first_line(error)}). Train again "
                    "with another out="
                ) from None
            self._net = net.to(self.fabric.device)
        return self._net

    def build(self, collection: Collection) -> Net:
        """An untrained net for these records. Sets `at_once`, the records per pass."""
        example = self._example(collection)
        net = self.kit.build(example)
        self.at_once = records_at_once(net, example, len(example["numbers"]))
        return net

    def fit_passes(self, collection: Collection) -> None:
        """Set `at_once` for records like these, which are not those that it was built for."""
        assert self._net is not None
        example = self._example(collection)
        self.at_once = records_at_once(self._net, example, len(example["numbers"]))

    def _example(self, collection: Collection) -> Mapping[str, Tensor]:
        some = np.unique(np.linspace(0, len(collection) - 1, NUM_EXAMPLES).astype(np.int64))
        return next(iter(self.batches(collection.subset(some))))

    def prepare(self, net: Net, train: Collection, key: JobKey) -> None:
        """One pass of the net over the training split."""
        clock = Clock()
        with self._shown(f"{self.name}: preparing", len(train)) as shown:
            net.prepare(self._finite_batches(net, train, clock, shown))
        if self.place.log is not None and self.fabric.global_rank == 0:
            self.place.log.write(
                "look",
                **key.about,
                records_per_s=len(train) / max(clock.seconds, 1e-9),
                waiting=clock.share,
            )

    def batches(
        self, collection: Collection, *, most: int = SCORED_AT_ONCE, labels: bool = False
    ) -> Iterable[dict[str, Any]]:
        """The training inputs of all records, in stored order."""
        seen = self.kit.features
        return Loader(
            collection,
            batch_size=fitting_batch(collection, seen, memory=self.resources.memory, at_most=most),
            features=[*seen, fields(LABEL)] if labels else seen,
            order="none",
            memory=self.resources.memory,
            threads=self.resources.threads,
            rank=0,
            world=1,
            notify=ignore_message,
        )

    @contextmanager
    def _shown(self, label: str, total: int) -> Generator[Progress]:
        """Progress with the memory budget; of several processes only the first shows it."""
        if self.fabric.global_rank:
            yield silent
            return
        allowance = self.place.allowance
        with progress(label, total, memory=allowance.usage if allowance else None) as shown:
            yield shown

    def _finite_batches(self, net: Net, train: Collection, clock: Clock, shown: Progress) -> Iterator[dict[str, Any]]:
        place = 0
        for batch in clock.watch(self.batches(train, most=net.at_most, labels=True)):
            count = len(batch["numbers"])
            if not _is_finite(batch):
                self._blame(train, range(place, place + count))
            yield batch
            del batch
            place += count
            shown(place)
            if self.place.stop():
                raise Interrupted
        clock.stop()

    def _blame(self, train: Collection, places: Iterable[int]) -> NoReturn:
        """Raise NotFinite with the records that have NaN or infinity: one would spoil the statistics of all."""
        bad = [place for place in places if not _is_finite(next(iter(self.batches(train.subset([place])))))]
        numbers = train.record_numbers(np.array(bad, np.int64)).tolist()
        raise NotFinite(
            f"{self.name}: NaN or infinity in the inputs of the records {', '.join(map(str, numbers))} of "
            f"{self.place.source}, fields {', '.join(self.fields)}. Leave them out: millstream subset"
        )


def _is_finite(batch: Mapping[str, object]) -> bool:
    floats = [value for value in batch.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    return all(bool(value.isfinite().all()) for value in floats)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(":")


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


@dataclass(frozen=True)
class Fold:
    """The records that models train on, and the splits that they score; `val` is the one they choose on.

    The only one of its study, or one of a cross-validation or of the points of a learning curve: see `JobKey`.
    """

    train: Collection
    scored: Mapping[str, Collection]
    number: int = 0
    labels: int = 0
    whole: Collection | None = None  # the records of all folds, if there are several


class Study(Protocol):
    """The settings, the data and the models of a run."""

    @property
    def settings(self) -> LoopSettings: ...
    @property
    def source(self) -> str:
        """Where the training records are."""
        ...

    @property
    def folds(self) -> Sequence[Fold]: ...
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

    def finish(self, run: Path) -> None:
        """Write what follows from the scores of its finished models; called whenever training ends."""
        ...

    def summary(self) -> str:
        """The data in a few lines, printed before training."""
        ...

    def table(self, built: Built, split: str, records: Collection, /) -> pa.Table:
        """The predictions of a model for a split: rows of predictions.parquet, without the model and its seed."""
        ...


class StudyPlug(Protocol):
    """The module `study` of a kind of record."""

    def make_study(self, settings: Mapping[str, object]) -> Study: ...
