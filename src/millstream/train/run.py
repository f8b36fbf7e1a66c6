"""`ms.train`: every detector asked for, on one split of one store, into a run folder. Run again, it goes on."""

import gc
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from millstream.collection import Collection
from millstream.config import config_diff, parse_bytes, read_settings
from millstream.console import format_seconds, interruptible, say
from millstream.dataset.labels import LABEL
from millstream.dataset.split import Split
from millstream.errors import BadSource, ConfigMismatch, NoDetector
from millstream.model.detector import Means, Scores
from millstream.store.layout import publish
from millstream.train.checkpoint import save
from millstream.train.data import data_card, open_labelled, split_of
from millstream.train.detectors import Asked, Built, asked_for
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
    SPLIT,
    write_json,
    write_table,
)
from millstream.train.log import Log, tree_bytes
from millstream.train.settings import TrainSettings
from millstream.train.trained import Interrupted, Workplace

KEYS = ("fingerprint", "label_digest")  # of the data card: with other records or labels it is another run


@dataclass(frozen=True)
class Run:
    """A run folder; `interrupted` when not all that was asked for is in it."""

    path: Path
    models: list[str]
    interrupted: bool = False
    is_first: bool = True  # of the processes that train together


def train(data: str | Path | None = None, **settings: object) -> Run:
    """Train and compare detectors on the labelled traces of a store.

    Settings are those of `TrainSettings`. All detectors see the same split, by question; each model is trained once for
    every seed; what is chosen is chosen on validation. Finished models are not trained again, and an interrupted one
    goes on from its checkpoint.

    >>> run = ms.train("traces/", model="lstm,baselines", out="runs/first", memory="500MB")
    """
    given = {**settings, **({} if data is None else {"data": str(data)})}
    return _Training(read_settings(TrainSettings, given)).work()


class _Training:
    def __init__(self, settings: TrainSettings) -> None:
        settings.check()
        self.settings = settings
        self.collection = open_labelled(settings.data, settings.label)
        self.parts: Split = split_of(self.collection, settings)
        self.path = Path(settings.out or Path("runs") / Path(settings.data).resolve().name)
        self.asked = asked_for(settings)
        self.fabric = make_fabric(settings)

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
            asks = stack.enter_context(interruptible())
            if self.is_first:
                stack.enter_context(log.memory(self.budget))
            for asked in sorted(self.asked, key=lambda one: not one.by_gradients):  # other processes end after those
                if not self.is_first and not asked.by_gradients:
                    break
                try:
                    finished = self._each_seed(asked, log, asks)
                except Interrupted:
                    return Run(self.path, done, interrupted=True, is_first=self.is_first)
                done += [asked.name] if finished else []
        return Run(self.path, done, is_first=self.is_first)

    def _prepare(self) -> None:
        """Refuse a folder of another run; write down what this one is."""
        rule = self.parts.rule
        how = f"by a hash of {rule.by}, salt {rule.salt!r}"
        parts = {name: self.parts[name] for name in rule.parts}
        card = data_card(self.settings.data, self.collection, parts, how)
        science = {**self.settings.science(), **{name: card[name] for name in KEYS}}
        config = self.path / CONFIG
        if config.exists():
            before = cast("dict[str, Any]", yaml.safe_load(config.read_text()))
            old = {**{name: before.get(name) for name in self.settings.science()}, **_keys(self.path)}
            if old != science:
                raise ConfigMismatch(
                    f"{self.path}: holds a run with other settings ({config_diff(old, science)}). Choose another "
                    "folder with out=, or remove this one"
                )
        elif self.path.exists() and any(self.path.iterdir()):
            raise BadSource(f"{self.path}: is there and is no run; choose another folder with out=")
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / DATA, card)
        self.parts.save(self.path / SPLIT)
        write_json(self.path / ENVIRONMENT, environment())
        publish(config, yaml.safe_dump(asdict(self.settings), sort_keys=False).encode())
        say(f"{self.settings.data}: {len(self.collection)} of {card['records']} records are right or wrong")
        say(self.parts.report(LABEL))

    def _each_seed(self, asked: Asked, log: Log, stop: Callable[[], bool]) -> bool:
        """Whether the detector could be run."""
        for seed in range(self.settings.seed, self.settings.seed + (self.settings.seeds if asked.by_gradients else 1)):
            folder = self.path / CHECKPOINTS / f"{asked.name}-{seed}"
            if (folder / SCORES).exists():
                continue
            if stop():
                raise Interrupted
            try:
                self._one(asked, seed, folder, log, stop)
            except NoDetector as error:
                if self.is_first:
                    log.write("missing", model=asked.name, why=str(error))
                    say(f"{asked.name}: left out, {error}")
                return False
            finally:
                gc.collect()
        return True

    def _one(self, asked: Asked, seed: int, folder: Path, log: Log, stop: Callable[[], bool]) -> None:
        """One detector, with one seed: fit, score validation and test, keep what it learned."""
        means = Means(seed, self.memory // 2)  # the other half is for the model at work
        place = Workplace(self.settings, self.fabric, log, self.budget, stop)
        names = self.collection.field_names
        built: Built = asked.build(means=means, field_names=names, place=place, folder=folder)
        detector = built.detector
        begun = time.perf_counter()
        detector.fit(self.parts["train"], self.parts["val"])
        fitted = time.perf_counter()
        scores = {name: detector.score(self.parts[name]) for name in ("val", "test")}
        scored = time.perf_counter()
        if not self.is_first:
            return
        arrays = getattr(detector, "arrays", {})
        _keep(folder / DETECTOR, arrays, {"model": asked.name, "seed": seed})
        test = self.parts["test"]
        log.write(
            "fit",
            model=asked.name,
            seed=seed,
            family=built.kind,
            title=built.title,
            parameters=getattr(detector, "parameters", None),
            fit_s=fitted - begun,
            score_s=scored - fitted,
            num_scored=sum(map(len, scores.values())),
            trace_bytes=_bytes_read(test, detector.fields),
            extra_forwards=built.extra_forwards,
            probabilities=bool(getattr(detector, "probabilities", False)),
            chosen=getattr(detector, "chosen", {}),
        )
        tables = [scores_table(name, self.parts[name], found) for name, found in scores.items()]
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


def scores_table(name: str, part: Collection, scores: Scores) -> pa.Table:
    """Rows of predictions.parquet, but for the model and its seed."""
    records = part.record_numbers(np.arange(len(part)))
    ids = part.column("question_id").to_pylist() if "question_id" in part.field_names else records.tolist()
    return pa.table(
        {
            "part": pa.array([name] * len(part), pa.string()),
            "record": pa.array(records),
            "question_id": pa.array([None if name is None else str(name) for name in ids], pa.string()),
            "label": pa.array(np.asarray(part.column(LABEL).to_numpy(), np.int8)),
            "score": pa.array(np.asarray(scores, np.float64)),
        }
    )


def _keep(path: Path, arrays: Mapping[str, Any], about: Mapping[str, object]) -> None:
    import torch

    save(path, {name: torch.tensor(np.array(array, order="C")) for name, array in arrays.items()}, about)


def _bytes_read(collection: Collection, fields: Sequence[str]) -> float:
    some = np.arange(min(64, len(collection)))
    return float(collection.sizes(some, list(fields)).mean()) if len(some) else 0.0


def _keys(run: Path) -> dict[str, object]:
    try:
        card = cast("dict[str, object]", json.loads((run / DATA).read_text()))
    except (OSError, ValueError):
        return {}
    return {name: card.get(name) for name in KEYS}
