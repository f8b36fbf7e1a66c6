"""A finished classifier in a run folder: the run's card and settings say what it is, one file holds its weights."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from torch import Tensor

from millstream.collection import Collection
from millstream.config import config_hash, parse_bytes, read_settings
from millstream.console import quoted
from millstream.errors import BadSetting, BadSource
from millstream.model.detector import Means
from millstream.model.read_net import ReadNet
from millstream.source.classes import Classes, classes_from_card
from millstream.source.fingerprint import file_crc32c
from millstream.train.checkpoint import load
from millstream.train.classification import AskedClassifier, as_built, task_of
from millstream.train.folder import CHECKPOINTS, CONFIG, DATA, DETECTOR, READS, SCORES
from millstream.train.log import read_lines
from millstream.train.read_settings import ReadSettings
from millstream.train.trained import NetModel, Workplace


@dataclass(frozen=True)
class Finished:
    """One model of one seed. `score` is its macro F1 on validation, if the log still says."""

    run: Path
    name: str
    seed: int
    settings: ReadSettings
    classes: Classes
    score: float | None

    @property
    def weights(self) -> Path:
        return self.run / CHECKPOINTS / f"{self.name}-{self.seed}" / DETECTOR

    @property
    def digest(self) -> str:
        """Changes when what it says of reads, or how classes are called, does."""
        named = [
            [taxon.name, taxon.tax_id]
            for taxa in (self.classes.taxa, *(r.taxa for r in self.classes.ranks))
            for taxon in taxa
        ]
        return config_hash({"weights": file_crc32c(self.weights), "taxa": named, "settings": self.settings.science()})

    def restore(self, collection: Collection, *, memory: int | str) -> tuple[NetModel, ReadNet]:
        """The model for records like these, and its net with the weights it was trained to."""
        tensors, _ = load(self.weights)
        settings = as_built(self.name, self.settings, {name: tensor.shape for name, tensor in tensors.items()})
        place = Workplace(settings, AtWork.here(), str(self.run))
        asked = AskedClassifier(self.name, settings, self.classes)
        model = asked.build(means=Means(self.seed, parse_bytes(memory) // 2), place=place).model
        assert isinstance(model, NetModel)
        model.arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        try:
            net = model.restored(collection)
        except RuntimeError as error:
            if "state_dict" not in str(error):
                raise
            raise BadSource(
                f"{self.weights}: its weights are not those of {self.name} as {self.run / CONFIG} and this millstream "
                "build it. Train again, with out= another folder"
            ) from None
        assert isinstance(net, ReadNet)
        model.arrays = {}  # the net has them
        net.eval()
        return model, net


@dataclass(frozen=True)
class AtWork:
    """All that a finished model asks of a Fabric: where it is. Lightning takes seconds to import."""

    device: torch.device

    @staticmethod
    def here() -> "AtWork":
        is_cuda = torch.cuda.is_available()
        if not is_cuda and "OMP_NUM_THREADS" not in os.environ:  # one core for the loader, as in training
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
        return AtWork(torch.device("cuda" if is_cuda else "cpu"))

    def to_device(self, batch: Mapping[str, object]) -> dict[str, Tensor]:
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        return {name: value.to(self.device) for name, value in tensors.items()}


def find_finished(run: Path, name: str | None = None) -> Finished:
    """The first finished seed of the model of this name; or of the one that was best on validation."""
    settings, card = _read(run)
    classes = classes_from_card(card)
    seeds: dict[str, int] = {}
    for model, seed in sorted(_jobs(run), key=lambda job: job[1]):
        seeds.setdefault(model, seed)
    if not seeds:
        raise BadSource(
            f"{run}: no classifier is finished yet. Next: millstream train {quoted(run / CONFIG)} out={quoted(run)}"
        )
    if name is not None and name not in seeds:
        raise BadSetting(f"--model {name}: is not finished in {run}; there is {', '.join(sorted(seeds))}")
    best: dict[str, float] = {}
    key = task_of(settings, len(classes)).key
    for line in read_lines(run):
        model = str(line.get("model"))
        if line["kind"] == "epoch" and line.get("seed") == seeds.get(model):
            best[model] = max(best.get(model, -1.0), float(cast(float, line[key])))
    chosen = name or max(seeds, key=lambda one: best.get(one, -1.0))
    return Finished(run, chosen, seeds[chosen], settings, classes, best.get(chosen))


def _read(run: Path) -> tuple[ReadSettings, Mapping[str, object]]:
    try:
        found = cast("dict[str, Any]", yaml.safe_load((run / CONFIG).read_text()))
        card = cast("dict[str, object]", json.loads((run / DATA).read_text()))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise BadSource(
            f"{run}: is no run of millstream train ({_why(error)}). "
            "Next: millstream train data.train=FILE mapping=TABLE"
        ) from None
    if card.get("kind") != READS:
        raise BadSource(f"{run}: its models judge answers, not reads. Next: millstream evaluate {quoted(run)}")
    return read_settings(ReadSettings, found), card


def _jobs(run: Path) -> list[tuple[str, int]]:
    """The models that are trained, with their seeds."""
    files = sorted((run / CHECKPOINTS).glob(f"*/{SCORES}"))
    parts = [file.parent.name.rpartition("-") for file in files if (file.parent / DETECTOR).exists()]
    return [(name, int(seed)) for name, _, seed in parts]


def _why(error: Exception) -> str:
    return f"it has no {CONFIG}" if isinstance(error, FileNotFoundError | NotADirectoryError) else str(error)
