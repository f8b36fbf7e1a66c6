"""Detectors built by name and fitted to collections, as a run does."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

import millstream as ms
from millstream.traces.detectors import DetectorSpec, scores_of
from millstream.traces.examples import fields_of
from millstream.traces.kind import TrainSettings
from millstream.training.devices import make_fabric
from millstream.training.log import Log
from millstream.training.study import Workplace
from millstream.training.task import FitResources, Model

Parts = Sequence[ms.Collection]  # train, val, test


def built(name: str, records: ms.Collection, folder: Path | None = None, *, memory: int = 100_000_000) -> Model:
    """With a folder, a net can be trained."""
    settings = TrainSettings(data="x", accelerator="cpu", threads=1, epochs=5, parameters=4000, dropout=0.0)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    log = None if folder is None else Log(folder)
    place = Workplace(settings, make_fabric(settings), "made records", log)
    resources = FitResources(memory=memory, threads=1)
    return DetectorSpec(name, fields_of(records)).build(resources=resources, place=place, folder=folder).model


def fitted(name: str, parts: Parts, folder: Path, *, memory: int = 100_000_000) -> Model:
    model = built(name, parts[0], folder / f"{name}-0", memory=memory)
    model.fit(parts[0], parts[1])
    return model


def restored(name: str, model: Model, records: ms.Collection, *, memory: int = 100_000_000) -> Model:
    """A new one with what the other has learned, as if loaded from a file."""
    again = built(name, records, memory=memory)
    again.arrays = {key: np.array(array) for key, array in model.arrays.items()}
    return again


def scored(model: Model, records: ms.Collection) -> np.ndarray:
    return scores_of(model, records).scores
