"""The predictions.parquet of a run of classifiers: how each model of one seed classifies the reads of a split."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.core.batches import text_codes_of
from millstream.core.tables import open_table
from millstream.errors import BadSource
from millstream.reads.mapping import prediction_column
from millstream.report import damaged

UNKNOWN = -1  # the label of a read of no known class
UNCLASSIFIED = -1  # the assignment of a read without evidence for any class, whose probability is 0
Key = tuple[str, int]  # a model and a seed


@dataclass(frozen=True)
class Predictions:
    """How a model of one seed classifies the reads of a split."""

    labels: NDArray[np.int32]  # -1: of no known class
    found: NDArray[np.int32]  # -1: unclassified, here and in ranks
    probabilities: NDArray[np.float32]
    ranks: Mapping[str, NDArray[np.int32]]  # the assigned taxon at each rank


class PredictionsFile:
    """The contiguous rows of each model, seed and split: located once, and sliced on request."""

    def __init__(self, file: Path, *, num_classes: int, ranks: Sequence[str]) -> None:
        self._file, self._num_classes = file, num_classes
        try:
            self._open = open_table(file)
            names = self._open.schema_arrow.names
            self.ranks = [rank for rank in ranks if f"{prediction_column(rank)}_probability" in names]
            rank_columns = map(prediction_column, self.ranks)
            self._columns = {name: self._numbers(name) for name in ("record", "label", "class", *rank_columns)}
            self._probabilities = self._column("probability").astype(np.float32, copy=False)
            models, model_names = self._coded("model")
            splits, split_names = self._coded("part")
            seeds = self._numbers("seed")
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise damaged(file, str(error).partition("\n")[0]) from None
        changes = (np.diff(models) != 0) | (np.diff(splits) != 0) | (np.diff(seeds) != 0)
        edges = [0, *(np.flatnonzero(changes) + 1).tolist(), len(models)] if len(models) else [0]
        self._runs: dict[tuple[str, int, str], list[slice]] = {}
        for start, stop in pairwise(edges):
            key = model_names[int(models[start])], int(seeds[start]), split_names[int(splits[start])]
            self._runs.setdefault(key, []).append(slice(start, stop))
        self.keys: list[Key] = list(dict.fromkeys((model, seed) for model, seed, _ in self._runs))
        self.splits: list[str] = list(dict.fromkeys(split for *_, split in self._runs))
        self._first: dict[str, tuple[Key, NDArray[Any]]] = {}

    def read(self, key: Key, split: str) -> Predictions:
        """The predictions on a split; all models must have classified the same reads."""
        labels, found = self._rows("label", key, split), self._rows("class", key, split)
        if not len(labels):
            raise self._damaged(f"{key[0]}, seed {key[1]}, has no predictions on {split}")
        if labels.max() >= self._num_classes or labels.min() < -1:
            raise self._damaged(f"a label of {split} is not one of the {self._num_classes} classes on the data card")
        if found.max() >= self._num_classes or found.min() < 0:
            raise self._damaged(
                f"{key[0]} predicts a class that is not one of the {self._num_classes} on the data card"
            )
        rows = np.stack([self._rows("record", key, split), labels])
        first, same = self._first.setdefault(split, (key, rows))
        if not np.array_equal(rows, same):
            raise self._damaged(f"{key[0]}, seed {key[1]}, classified other reads of {split} than {first[0]} did")
        probabilities = self._cut(self._probabilities, key, split)
        is_classified = probabilities > 0

        def assigned(taxa: NDArray[np.int32]) -> NDArray[np.int32]:
            return np.where(is_classified, taxa, UNCLASSIFIED)

        ranks = {rank: assigned(self._rows(prediction_column(rank), key, split)) for rank in self.ranks}
        return Predictions(labels, assigned(found), probabilities, ranks)

    def labels(self, split: str) -> NDArray[np.int32]:
        """The labels of a split that has been read."""
        return self._first[split][1][1]

    def _rows(self, name: str, key: Key, split: str) -> NDArray[Any]:
        return self._cut(self._columns[name], key, split)

    def _cut(self, column: NDArray[Any], key: Key, split: str) -> NDArray[Any]:
        runs = [column[run] for run in self._runs.get((*key, split), [])]
        return runs[0] if len(runs) == 1 else np.concatenate(runs) if runs else column[:0]

    def _column(self, name: str) -> NDArray[Any]:
        return self._open.read([name], use_threads=False).column(name).to_numpy()

    def _numbers(self, name: str) -> NDArray[Any]:
        numbers = self._column(name)
        if not np.issubdtype(numbers.dtype, np.integer):
            raise ValueError(f"{name}: expected integers, found {numbers.dtype}")
        return numbers

    def _coded(self, name: str) -> tuple[NDArray[np.int64], list[str]]:
        return text_codes_of(self._open.read([name], use_threads=False).column(name))

    def _damaged(self, what: str) -> BadSource:
        return damaged(self._file, what)
