"""predictions.parquet of a run of classifiers -> the answers of one model and part at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

from millstream.dataset.split import text_codes_of
from millstream.errors import BadSource
from millstream.report.run_files import damaged
from millstream.source.classes import answer_column

Key = tuple[str, int]  # a model and a seed


@dataclass(frozen=True)
class Answers:
    """What a model of one seed says of the reads of a part."""

    labels: NDArray[np.int32]  # -1: of no known class
    found: NDArray[np.int32]
    probabilities: NDArray[np.float32]
    ranks: Mapping[str, NDArray[np.int32]]  # the taxon it says at each rank


class AnswersFile:
    """Rows of a model, a seed and a part lie together: they are found once, and cut out when asked for."""

    def __init__(self, file: Path, *, num_classes: int, ranks: Sequence[str]) -> None:
        self._file, self._num_classes = file, num_classes
        try:
            self._open = parquet.ParquetFile(file)
            names = self._open.schema_arrow.names
            self.ranks = [rank for rank in ranks if f"{answer_column(rank)}_probability" in names]
            told = map(answer_column, self.ranks)
            self._columns = {name: self._numbers(name) for name in ("record", "label", "class", *told)}
            self._probabilities = self._column("probability").astype(np.float32, copy=False)
            models, model_names = self._coded("model")
            parts, part_names = self._coded("part")
            seeds = self._numbers("seed")
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise damaged(file, str(error).partition("\n")[0]) from None
        changes = (np.diff(models) != 0) | (np.diff(parts) != 0) | (np.diff(seeds) != 0)
        edges = [0, *(np.flatnonzero(changes) + 1).tolist(), len(models)] if len(models) else [0]
        self._runs: dict[tuple[str, int, str], list[slice]] = {}
        for start, stop in pairwise(edges):
            key = model_names[int(models[start])], int(seeds[start]), part_names[int(parts[start])]
            self._runs.setdefault(key, []).append(slice(start, stop))
        self.keys: list[Key] = list(dict.fromkeys((model, seed) for model, seed, _ in self._runs))
        self.parts: list[str] = list(dict.fromkeys(part for *_, part in self._runs))
        self._first: dict[str, tuple[Key, NDArray[Any]]] = {}

    def read(self, key: Key, part: str) -> Answers:
        """The answers on a part; every model has to have been asked about the same reads."""
        labels, found = self._rows("label", key, part), self._rows("class", key, part)
        if not len(labels):
            raise self._damaged(f"{key[0]}, seed {key[1]}, has no answers on {part}")
        if labels.max() >= self._num_classes or labels.min() < -1:
            raise self._damaged(f"a label of {part} is not of the {self._num_classes} classes of the data card")
        if found.max() >= self._num_classes or found.min() < 0:
            raise self._damaged(f"an answer of {key[0]} is not of the {self._num_classes} classes of the data card")
        asked = np.stack([self._rows("record", key, part), labels])
        first, same = self._first.setdefault(part, (key, asked))
        if not np.array_equal(asked, same):
            raise self._damaged(f"{key[0]}, seed {key[1]}, was asked about other reads of {part} than {first[0]}")
        ranks = {rank: self._rows(answer_column(rank), key, part) for rank in self.ranks}
        return Answers(labels, found, self._cut(self._probabilities, key, part), ranks)

    def labels(self, part: str) -> NDArray[np.int32]:
        """Of a part that was read."""
        return self._first[part][1][1]

    def _rows(self, name: str, key: Key, part: str) -> NDArray[Any]:
        return self._cut(self._columns[name], key, part)

    def _cut(self, column: NDArray[Any], key: Key, part: str) -> NDArray[Any]:
        runs = [column[run] for run in self._runs.get((*key, part), [])]
        return runs[0] if len(runs) == 1 else np.concatenate(runs) if runs else column[:0]

    def _column(self, name: str) -> NDArray[Any]:
        return self._open.read([name]).column(name).to_numpy()

    def _numbers(self, name: str) -> NDArray[Any]:
        numbers = self._column(name)
        if not np.issubdtype(numbers.dtype, np.integer):
            raise ValueError(f"{name}: expected integers, found {numbers.dtype}")
        return numbers

    def _coded(self, name: str) -> tuple[NDArray[np.int64], list[str]]:
        return text_codes_of(self._open.read([name]).column(name))

    def _damaged(self, what: str) -> BadSource:
        return damaged(self._file, what)
