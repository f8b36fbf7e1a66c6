"""A net as a detector: `fit` trains it, `score` is the chance it gives to being wrong."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from millstream.collection import Collection
from millstream.console import progress, silent, unsaid
from millstream.errors import NotFinite
from millstream.loader.loader import Loader
from millstream.model.detector import Arrays, Means, Scores
from millstream.model.moments import Moments
from millstream.model.net import Net, count_parameters
from millstream.model.reading import fitting_batch
from millstream.model.zoo import Recipe, build_net, net_features
from millstream.train.log import Log
from millstream.train.loop import SCORED_AT_ONCE, Job, Training, predict, seed_all
from millstream.train.settings import TrainSettings

NUM_EXAMPLES = 16
PASS_BYTES = 4 << 20  # of one activation: larger ones leave the cache, and malloc gives their pages back every time


class Interrupted(Exception):
    """Training was asked to stop, and can go on from its checkpoint."""


@dataclass(frozen=True)
class Workplace:
    """Where nets are trained: on which devices, and who is told."""

    settings: TrainSettings
    fabric: Any
    log: Log | None = None
    budget: int = 0
    stop: Callable[[], bool] = lambda: False


def recipe_of(settings: TrainSettings) -> Recipe:
    return Recipe(**{field.name: getattr(settings, field.name) for field in fields_of(Recipe)})


class NetDetector:
    """`lstm`, `gnn`, `gvae` and the nets they are compared with."""

    probabilities = True

    def __init__(
        self,
        name: str,
        *,
        means: Means,
        field_names: Sequence[str],
        place: Workplace,
        folder: Path | None = None,
    ) -> None:
        self.name, self.means, self.place, self.folder = name, means, place, folder
        self.settings, self.fabric = place.settings, place.fabric
        self.recipe = recipe_of(place.settings)
        self.features = net_features(name, field_names, self.recipe)
        self.fields: Sequence[str] = list(dict.fromkeys(f for feature in self.features for f in feature.fields or ()))
        self.arrays: Arrays = {}
        self.chosen: dict[str, object] = {}
        self.parameters: int | None = None

    def fit(self, train: Collection, val: Collection) -> None:
        log = self.place.log
        assert self.folder is not None and log is not None
        seed_all(self.means.seed)
        net = self._build(train)
        self.parameters = count_parameters(net)
        net.set_scales(self._moments(net, train))
        job = Job(
            self.name,
            self.means.seed,
            self.folder,
            self.settings,
            self.features,
            memory=self.means.memory,
            budget=self.place.budget,
            at_once=self.at_once,
        )
        with progress(f"{self.name} seed {self.means.seed}", len(train) * self.settings.epochs) as shown:
            shown = shown if self.fabric.global_rank == 0 else silent
            training = Training(job, self.fabric, net, log=log, progress=shown, stop=self.place.stop)
            if not training.run(train, val):
                raise Interrupted
        self.arrays = {name: tensor.cpu().numpy() for name, tensor in net.state_dict().items()}
        self.chosen = {"epoch": training.at.best_epoch, "width": net.width}
        self._net = net

    def score(self, collection: Collection) -> Scores:
        net = getattr(self, "_net", None) or self._restored(collection)
        return predict(
            net, collection, self.features, memory=self.means.memory, fabric=self.fabric, at_once=self.at_once
        )[0]

    def _build(self, collection: Collection) -> Net:
        """A net for these records, and how many of them go through it at once."""
        some = np.unique(np.linspace(0, len(collection) - 1, NUM_EXAMPLES).astype(np.int64))
        example = next(iter(self._loader(collection.subset(some))))
        net = build_net(self.name, example, self.recipe)
        row_bytes = 4 * net.width
        num_rows = max(len(example[name]) for name in ("layers", "x", "edge_attr") if name in example)
        self.at_once = max(1, min(SCORED_AT_ONCE, PASS_BYTES * len(example["numbers"]) // (num_rows * row_bytes)))
        return net

    def _restored(self, collection: Collection) -> Net:
        net = self._build(collection)
        net.load_state_dict({name: torch.tensor(np.asarray(array)) for name, array in self.arrays.items()})
        self._net = net.to(self.fabric.device)
        return self._net

    def _moments(self, net: Net, train: Collection) -> dict[str, Moments]:
        """Of each input, over the training part alone."""
        moments: defaultdict[str, Moments] = defaultdict(Moments)
        place = 0
        for batch in self._loader(train):
            if not _is_finite(batch):
                self._blame(train, range(place, place + len(batch["numbers"])))
            net.observe(batch, moments)
            place += len(batch["numbers"])
        return moments

    def _blame(self, train: Collection, places: Iterable[int]) -> NoReturn:
        """Say which records have numbers that are none: one of them would spoil the scale of all."""
        bad = [place for place in places if not _is_finite(next(iter(self._loader(train.subset([place])))))]
        numbers = train.record_numbers(np.array(bad, np.int64)).tolist()
        raise NotFinite(
            f"{self.name}: NaN or infinity in the inputs of the records {', '.join(map(str, numbers))} of "
            f"{self.settings.data}, read from {', '.join(self.fields)}. Leave them out: millstream subset"
        )

    def _loader(self, collection: Collection) -> Iterable[dict[str, Any]]:
        return Loader(
            collection,
            batch_size=fitting_batch(collection, self.features, memory=self.means.memory, at_most=SCORED_AT_ONCE),
            features=self.features,
            order="none",
            memory=self.means.memory,
            rank=0,
            world=1,
            notify=unsaid,
        )


def _is_finite(batch: Mapping[str, object]) -> bool:
    floats = [value for value in batch.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    return all(bool(value.isfinite().all()) for value in floats)
