"""`ms.train`: every model asked for, on one set of data, into a run folder. Run again, it goes on."""

import gc
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from millstream.collection import Collection
from millstream.config import config_diff, parse_bytes, read_settings, tree_bytes
from millstream.console import format_seconds, interruptible, say
from millstream.errors import BadSource, ConfigMismatch, NoDetector
from millstream.model.detector import Means
from millstream.store.layout import publish
from millstream.train.checkpoint import save
from millstream.train.devices import make_fabric
from millstream.train.environment import environment
from millstream.train.folder import (
    CHECKPOINTS,
    CONFIG,
    DATA,
    DETECTOR,
    ENVIRONMENT,
    PREDICTIONS,
    SCORES,
    write_json,
    write_table,
)
from millstream.train.log import Log
from millstream.train.read_settings import ReadSettings, are_of_reads
from millstream.train.settings import TrainSettings
from millstream.train.study import Asked, Study
from millstream.train.trained import Interrupted, Workplace


@dataclass(frozen=True)
class Run:
    """A run folder; `interrupted` when not all that was asked for is in it."""

    path: Path
    models: list[str]
    interrupted: bool = False
    is_first: bool = True  # of the processes that train together


def train(data: str | Path | Mapping[str, object] | None = None, **settings: object) -> Run:
    """Train and compare detectors on the labelled traces of a store, or classifiers on files of reads.

    Settings are those of `TrainSettings`, or of `ReadSettings` when `data` is a mapping with files to train on. All
    models see the same data; each is trained once for every seed; what is chosen is chosen on validation. Finished
    models are not trained again, and an interrupted one goes on from its checkpoint.

    >>> run = ms.train("traces/", model="lstm,mean_logprob", out="runs/second", seeds=1, epochs=3, memory="500MB")
    >>> run = ms.train({"train": "train.fa.gz", "val": "val.fa"}, mapping="species.tsv", model="kmer-linear", bits=12)
    """
    if isinstance(data, Mapping):
        data = {name: str(value) if isinstance(value, Path) else value for name, value in data.items()}
    given = {**settings, **({} if data is None else {"data": str(data) if isinstance(data, Path) else data})}
    return _Training(study_of(given)).work()


def study_of(settings: Mapping[str, object]) -> Study:
    """Of reads, if the data are files to train on; of traces otherwise."""
    if are_of_reads(settings):
        from millstream.train.classification import Classification

        return Classification(read_settings(ReadSettings, settings))
    from millstream.train.detection import Detection

    return Detection(read_settings(TrainSettings, settings))


class _Training:
    def __init__(self, study: Study) -> None:
        self.study, self.settings = study, study.settings
        self.path = Path(self.settings.out or Path("runs") / Path(study.source).resolve().name)
        self.fabric = make_fabric(self.settings)
        self._is_stale = False  # whether there may be scores that predictions.parquet lacks

    @property
    def is_first(self) -> bool:
        return bool(self.fabric.global_rank == 0)

    def work(self) -> Run:
        if self.is_first:
            self._prepare()
        self.fabric.barrier()
        log = Log(self.path, tensorboard=self.settings.tensorboard and self.is_first)
        for library in ("torch_geometric.nn", "sklearn.decomposition"):  # their memory is not that of the data
            with suppress(ImportError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import_module(library)
        base, self.memory = tree_bytes(), parse_bytes(self.settings.memory)
        self.budget = base + self.memory
        done: list[str] = []
        with ExitStack() as stack:
            gc.freeze()  # to look through all that was imported would take a quarter of a second after each model
            stack.callback(gc.unfreeze)
            asks = stack.enter_context(interruptible())
            if self.is_first:
                stack.enter_context(log.memory(self.budget))
            for asked in sorted(
                self.study.asked, key=lambda one: not one.by_gradients
            ):  # other processes end after those
                if not self.is_first and not asked.by_gradients:
                    break
                try:
                    finished = self._each_seed(asked, log, asks)
                except Interrupted:
                    return Run(self.path, done, interrupted=True, is_first=self.is_first)
                done += [asked.name] if finished else []
        if self.is_first and self._is_stale:  # killed between the two, a run would lack what a model said
            write_predictions(self.path)
        return Run(self.path, done, is_first=self.is_first)

    def _prepare(self) -> None:
        """Refuse a folder of another run; write down what this one is."""
        card = self.study.card
        science = {**self.settings.science(), **{name: card[name] for name in self.study.keys}}
        config = self.path / CONFIG
        if config.exists():
            before = cast("dict[str, Any]", yaml.safe_load(config.read_text()))
            keys = _keys(self.path, self.study.keys)
            old = {**{name: before.get(name) for name in self.settings.science()}, **keys}
            if old != science:
                raise ConfigMismatch(
                    f"{self.path}: holds a run with other settings ({config_diff(old, science)}). Choose another "
                    "folder with out=, or remove this one"
                )
        elif self.path.exists() and any(self.path.iterdir()):
            raise BadSource(f"{self.path}: is there and is no run; choose another folder with out=")
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / DATA, card)
        self.study.keep(self.path)
        write_json(self.path / ENVIRONMENT, environment())
        publish(config, yaml.safe_dump(asdict(self.settings), sort_keys=False).encode())
        say(self.study.told())

    def _each_seed(self, asked: Asked, log: Log, stop: Callable[[], bool]) -> bool:
        """Whether the detector could be run."""
        if asked.by_gradients and self.fabric.world_size > 1:
            stop = partial(self._any, stop)
        for seed in range(self.settings.seed, self.settings.seed + (self.settings.seeds if asked.by_gradients else 1)):
            folder = self.path / CHECKPOINTS / f"{asked.name}-{seed}"
            if (folder / SCORES).exists():
                self._is_stale = True
                continue
            if stop():
                raise Interrupted
            try:
                self._one(asked, seed, folder, log, stop)
            except NoDetector as error:
                if self.is_first:
                    log.write("missing", model=asked.name, why=str(error))
                    say(f"{asked.name}: left out, {str(error).partition(', only ')[0]}")  # not all the fields it has
                return False
            finally:
                gc.collect()
        return True

    def _any(self, stop: Callable[[], bool]) -> bool:
        """Whether one of the processes is to stop: then all do, at the same step, or some would wait for ever."""
        import torch

        asked = torch.tensor(float(stop()), device=self.fabric.device)
        return bool(self.fabric.all_reduce(asked, reduce_op="sum") > 0)

    def _one(self, asked: Asked, seed: int, folder: Path, log: Log, stop: Callable[[], bool]) -> None:
        """One model, with one seed: fit, ask about the parts, keep what it learned and what it said."""
        study = self.study
        means = Means(seed, self.memory * 3 // 8)  # the rest is for the model at work, and for what malloc keeps
        place = Workplace(self.settings, self.fabric, study.source, log, self.budget, stop)
        built = asked.build(means=means, place=place, folder=folder)
        model = built.model
        begun = time.perf_counter()
        model.fit(built.train or study.train, study.scored["val"])
        fitted = time.perf_counter()
        tables = [study.table(built, part) for part in study.scored]
        scored = time.perf_counter()
        if not self.is_first:
            return
        _keep(folder / DETECTOR, getattr(model, "arrays", {}), {"model": asked.name, "seed": seed})
        log.write(
            "fit",
            model=asked.name,
            seed=seed,
            family=built.kind,
            title=built.title,
            parameters=getattr(model, "parameters", None),
            fit_s=fitted - begun,
            score_s=scored - fitted,
            num_scored=sum(map(len, study.scored.values())),
            trace_bytes=_bytes_read(study.scored["val"], model.fields),
            extra_forwards=built.extra_forwards,
            probabilities=bool(getattr(model, "probabilities", False)),
            chosen=getattr(model, "chosen", {}),
        )
        write_table(folder / SCORES, pa.concat_tables(tables))
        write_predictions(self.path)
        say(f"{asked.name} seed {seed}: done in {format_seconds(scored - begun)}")


def write_predictions(run: Path) -> None:
    """predictions.parquet: every score of every finished model, so that anyone can compute anything again."""
    tables: list[pa.Table] = []
    for file in sorted((run / CHECKPOINTS).glob(f"*/{SCORES}")):
        model, _, seed = file.parent.name.rpartition("-")
        table = pq.read_table(file)
        size = table.num_rows
        table = table.append_column("model", pa.array([model] * size))
        tables.append(table.append_column("seed", pa.array(np.full(size, int(seed), np.int32))))
    write_table(run / PREDICTIONS, pa.concat_tables(tables))


def _keep(path: Path, arrays: Mapping[str, Any], about: Mapping[str, object]) -> None:
    import torch

    save(path, {name: torch.as_tensor(np.asarray(array, order="C")) for name, array in arrays.items()}, about)


def _bytes_read(collection: Collection, fields: Sequence[str]) -> float:
    some = np.arange(min(64, len(collection)))
    return float(collection.sizes(some, list(fields)).mean()) if len(some) else 0.0


def _keys(run: Path, names: Sequence[str]) -> dict[str, object]:
    try:
        card = cast("dict[str, object]", json.loads((run / DATA).read_text()))
    except (OSError, ValueError):
        return {}
    return {name: card.get(name) for name in names}
