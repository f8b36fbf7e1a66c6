"""What a detector is. Another one is a file with such a class, named `model=package.module:Class`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from millstream.collection import Collection

Scores = NDArray[np.float64]
Arrays = dict[str, NDArray[np.generic]]


@dataclass(frozen=True)
class Means:
    """What a detector may use: the seed of its chance, and bytes for what it holds of the data."""

    seed: int = 0
    memory: int = 500_000_000
    batch_size: int = 256  # of those that learn nothing from the size of a batch


class Detector(Protocol):
    """Tells answers that are wrong (label 1) from those that are right (label 0).

    Records have the fields of their store and `label`. It reads them through `ms.Loader` within `means.memory`, and
    chooses what there is to choose on `val`. It is made by `Class(means)`.
    """

    fields: Sequence[str]
    """Of a record that it reads; a store that lacks one cannot use it."""
    arrays: Arrays
    """All that `fit` learned: kept with the run, and set again before it scores other records."""
    chosen: dict[str, object]
    """What was chosen on validation, as JSON, for the report."""
    # Optional: `probabilities = True` where scores are chances of being wrong, and `parameters`, how many it has.

    def fit(self, train: Collection, val: Collection) -> None: ...

    def score(self, collection: Collection) -> Scores:
        """One number a record, in the order of the collection; higher: more likely wrong."""
        ...
