"""A net as a model: `fit` trains it, `outcome` is what it says of records."""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from millstream.collection import Collection
from millstream.config import tree_bytes
from millstream.console import Progress, progress, silent, unsaid
from millstream.dataset.batch import Feature
from millstream.dataset.features import fields
from millstream.dataset.labels import LABEL
from millstream.errors import NotFinite
from millstream.loader.loader import Loader
from millstream.model.detector import Arrays, Means, Scores
from millstream.model.moments import Moments
from millstream.model.net import Net, count_parameters
from millstream.model.reading import fitting_batch
from millstream.train.log import Clock, Log
from millstream.train.loop import LATEST, SCORED_AT_ONCE, Job, Training, predict, seed_all
from millstream.train.settings import LoopSettings
from millstream.train.task import Outcome, Task

NUM_EXAMPLES = 16
PASS_BYTES = 4 << 20  # of one activation: larger ones leave the cache, and malloc gives their pages back every time


class Interrupted(Exception):
    """Training was asked to stop, and can go on from its checkpoint."""


@dataclass(frozen=True)
class Workplace:
    """Where nets are trained: on which devices, and who is told."""

    settings: LoopSettings
    fabric: Any
    source: str = ""  # of the records, for messages
    log: Log | None = None
    budget: int = 0
    stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Kit:
    """What a net sees of records, and how it is built for those of an example batch."""

    features: Sequence[Feature]
    build: Callable[[Mapping[str, Tensor]], Net]
    scoring: Sequence[Feature] | None = None  # of records that are scored, if it sees those otherwise


class NetModel:
    """A net that learns a task. What it says of records is `outcome`; a detector's score is one of that."""

    probabilities = True

    def __init__(
        self, name: str, kit: Kit, *, task: Task, means: Means, place: Workplace, folder: Path | None = None
    ) -> None:
        self.name, self.kit, self.task = name, kit, task
        self.means, self.place, self.folder = means, place, folder
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
        seed_all(self.means.seed)
        net = self._build(train)
        self.parameters = count_parameters(net)
        if net.has_scales and not (self.folder / LATEST).exists():
            net.set_scales(self._moments(net, train))
        job = Job(
            self.name,
            self.means.seed,
            self.folder,
            settings,
            self.task,
            self.kit.features,
            self.scoring,
            memory=self.means.memory,
            source=self.place.source,
            at_once=self.at_once,
        )
        num_records = min(len(train) * settings.epochs, net.most_records)
        with self._shown(f"{self.name} seed {self.means.seed}", num_records) as shown:
            training = Training(job, self.fabric, net, log=log, progress=shown, stop=self.place.stop)
            if not training.run(train, val):
                raise Interrupted
        self.arrays = {name: tensor.cpu().numpy() for name, tensor in net.state_dict().items()}
        self.chosen = {"epoch": training.at.best_epoch, "width": net.width}
        self._net = net

    def outcome(self, collection: Collection) -> Outcome:
        """What the net says of every record."""
        net = self.restored(collection)
        with self._shown(f"{self.name} is asked", len(collection)) as shown:
            return predict(
                net,
                collection,
                self.scoring,
                memory=self.means.memory,
                fabric=self.fabric,
                at_once=self.at_once,
                mates=self.task.mates,
                progress=shown,
            )[0]

    def score(self, collection: Collection) -> Scores:
        return self.outcome(collection)["score"].astype(np.float64)

    def by_layer(self, collection: Collection) -> Scores | None:
        """[N, L]: what it would say of each record if a layer were the last; None if it does not go layer by layer."""
        net = self.restored(collection).eval()
        with torch.inference_mode():
            found = [net.by_layer(self.fabric.to_device(batch)) for batch in self._loader(collection)]
        known = [scores for scores in found if scores is not None]
        return torch.cat(known).double().cpu().numpy() if known else None

    def restored(self, collection: Collection) -> Net:
        """The net, as it was trained, for records like these."""
        if self._net is None:
            net = self._build(collection)
            net.load_state_dict({name: torch.tensor(np.asarray(array)) for name, array in self.arrays.items()})
            self._net = net.to(self.fabric.device)
        return self._net

    @contextmanager
    def _shown(self, label: str, total: int) -> Generator[Progress]:
        """Progress beside the budget; of several processes the first one shows it."""
        if self.fabric.global_rank:
            yield silent
            return
        budget = self.place.budget
        with progress(label, total, memory=(lambda: (tree_bytes(), budget)) if budget else None) as shown:
            yield shown

    def _build(self, collection: Collection) -> Net:
        """A net for these records, and how many of them go through it at once."""
        some = np.unique(np.linspace(0, len(collection) - 1, NUM_EXAMPLES).astype(np.int64))
        example = next(iter(self._loader(collection.subset(some))))
        net = self.kit.build(example)
        row_bytes = 4 * net.width * net.num_rows(example) / len(example["numbers"])
        self.at_once = max(1, min(net.at_most, int(PASS_BYTES / max(row_bytes, 1))))
        return net

    def _moments(self, net: Net, train: Collection) -> dict[str, Moments]:
        """Of each input, over the training part alone."""
        moments: defaultdict[str, Moments] = defaultdict(Moments)
        place = 0
        clock = Clock()
        with self._shown(f"{self.name} looks at the data", len(train)) as shown:
            for batch in clock.watch(self._loader(train, most=net.at_most, labels=True)):
                if not _is_finite(batch):
                    self._blame(train, range(place, place + len(batch["numbers"])))
                net.observe(batch, moments)
                place += len(batch["numbers"])
                shown(place)
                if self.place.stop():
                    raise Interrupted
        if self.place.log is not None and self.fabric.global_rank == 0:
            self.place.log.write(
                "look",
                model=self.name,
                seed=self.means.seed,
                records_per_s=place / max(clock.seconds, 1e-9),
                waiting=clock.share,
            )
        return moments

    def _blame(self, train: Collection, places: Iterable[int]) -> NoReturn:
        """Say which records have numbers that are none: one of them would spoil the scale of all."""
        bad = [place for place in places if not _is_finite(next(iter(self._loader(train.subset([place])))))]
        numbers = train.record_numbers(np.array(bad, np.int64)).tolist()
        raise NotFinite(
            f"{self.name}: NaN or infinity in the inputs of the records {', '.join(map(str, numbers))} of "
            f"{self.place.source}, read from {', '.join(self.fields)}. Leave them out: millstream subset"
        )

    def _loader(
        self, collection: Collection, *, most: int = SCORED_AT_ONCE, labels: bool = False
    ) -> Iterable[dict[str, Any]]:
        seen = self.kit.features
        return Loader(
            collection,
            batch_size=fitting_batch(collection, seen, memory=self.means.memory, at_most=most),
            features=[*seen, fields(LABEL)] if labels else seen,
            order="none",
            memory=self.means.memory,
            rank=0,
            world=1,
            notify=unsaid,
        )


def _is_finite(batch: Mapping[str, object]) -> bool:
    floats = [value for value in batch.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    return all(bool(value.isfinite().all()) for value in floats)
