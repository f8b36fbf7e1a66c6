"""The detector protocol, and how detectors that are not nets read a collection. Use your own detector with
`model=package.module:Class`.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from millstream.core.collection import Collection
from millstream.core.features import Feature, fields
from millstream.core.labelled import LABEL
from millstream.core.loader import Loader
from millstream.training.task import FitResources, Labels, Model, fitting_batch, labels_of

Scores = NDArray[np.float64]
_THREADS = 2


class Detector(Model, Protocol):
    """Distinguishes wrong answers (label 1) from right ones (label 0). Constructed as `Class(resources)`.

    Records have the fields of their store and `label`. A detector must stay within the budget `resources.memory`.
    """

    def score(self, collection: Collection) -> Scores:
        """One number per record, in the order of the collection; higher: more likely wrong."""
        ...


def reader(collection: Collection, feature: Feature, resources: FitResources, *, shuffle: bool = False) -> Loader:
    """Batches of the feature in record order; with `shuffle`, with `label` in a new random order every epoch."""
    return Loader(
        collection,
        batch_size=fitting_batch(collection, [feature], memory=resources.memory, at_most=resources.batch_size),
        features=[feature, fields(LABEL)] if shuffle else feature,
        seed=resources.seed,
        memory=resources.memory,
        order="exact" if shuffle else "none",
        threads=_THREADS,
        rank=0,
        world=1,  # in a distributed job one process runs the baselines
    )


def binary_labels(collection: Collection, split: str) -> Labels:
    """The labels of a split, in record order; ValueError unless both occur."""
    labels = labels_of(collection)
    found: list[int] = np.unique(labels).tolist()
    if found != [0, 1]:
        raise ValueError(
            f"the {split} split has {len(labels)} records with the labels {found}; it needs both 0 (right) and 1 "
            "(wrong). Label more records, or split them differently"
        )
    return labels
