"""The folder of a run -> its files in memory, checked. Knows what `millstream train` writes; computes nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

from millstream.dataset.split import text_codes_of
from millstream.errors import BadSource
from millstream.report.measures import Floats, Labels
from millstream.report.metrics_file import Fit, Metrics, read_metrics
from millstream.report.run_files import again, check_run, damaged, read_mapping, unfinished
from millstream.train.folder import CONFIG, DATA, ENVIRONMENT, METRICS, PREDICTIONS


@dataclass(frozen=True)
class Part:
    """The records of validation or test, by number."""

    records: NDArray[np.int64]
    question_ids: NDArray[np.object_]
    labels: Labels


@dataclass(frozen=True)
class Trial:
    """One detector of one seed, and its scores in the order of the parts."""

    seed: int
    fit: Fit
    val: Floats
    test: Floats


@dataclass(frozen=True)
class Run:
    """What a run has so far: every detector with its finished seeds."""

    path: Path
    config: Mapping[str, object]
    environment: Mapping[str, object]
    data: Mapping[str, object]
    val: Part
    test: Part
    trials: Mapping[str, Sequence[Trial]]
    metrics: Metrics
    missing: Mapping[str, str]


def read_run(path: str | Path) -> Run:
    """The run in a folder. What is not finished is left out; what is damaged is an error.

    >>> run = read_run("runs/first"); run.trials["gnn"][0].test.shape == run.test.labels.shape
    """
    folder = Path(path)
    check_run(folder, what="detector")
    file = folder / PREDICTIONS
    metrics = read_metrics(folder / METRICS)
    table = _Predictions(file)
    finished = [key for key in table.keys if key in metrics.fits]
    if not finished:
        raise unfinished(folder, what="detector")
    val, test = (table.part(part, finished[0]) for part in ("val", "test"))
    missing = dict(metrics.missing)
    trials: dict[str, list[Trial]] = {}
    for model, seed in finished:
        scores = [table.scores(part, (model, seed), like) for part, like in (("val", val), ("test", test))]
        if bad := sum(int(np.sum(~np.isfinite(some))) for some in scores):
            missing[model] = f"seed {seed} gave {bad} scores that are not finite"
        trials.setdefault(model, []).append(Trial(seed, metrics.fits[model, seed], *scores))
    return Run(
        folder,
        config=read_mapping(folder / CONFIG),
        environment=read_mapping(folder / ENVIRONMENT),
        data=read_mapping(folder / DATA),
        val=val,
        test=test,
        trials={model: trials[model] for model in trials if model not in missing},
        metrics=metrics,
        missing=missing,
    )


class _Predictions:
    """predictions.parquet by detector and part; of a row that is there twice, the later."""

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            table = parquet.read_table(file)
            self._models, self._model_names = text_codes_of(table.column("model"))
            self._parts, self._part_names = text_codes_of(table.column("part"))
            self._questions, self._question_names = text_codes_of(table.column("question_id"))
            self._seeds = table.column("seed").to_numpy().astype(np.int64)
            self._records = table.column("record").to_numpy().astype(np.int64)
            self._labels = table.column("label").to_numpy().astype(np.int8)
            self._scores = table.column("score").to_numpy().astype(np.float64)
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise self._damaged(str(error).partition("\n")[0]) from None
        pairs = np.unique(np.stack([self._models, self._seeds], axis=1), axis=0)
        self.keys: list[tuple[str, int]] = [(self._model_names[model], seed) for model, seed in pairs.tolist()]

    def part(self, name: str, key: tuple[str, int]) -> Part:
        """The records of a part, as a detector has them."""
        rows = self._rows(name, key)
        labels = self._labels[rows]
        if not np.isin(labels, (0, 1)).all():
            raise self._damaged("labels other than 0 and 1")
        if len(np.unique(labels)) < 2:
            what = "no records" if not len(labels) else f"only {'wrong' if labels[0] else 'right'} answers"
            raise BadSource(
                f"{self._file}: the {name} part has {what}: there is nothing to tell apart. "
                f"Train on more records, or set a larger share. {again(self._file.parent)}"
            )
        codes, numbers = self._questions[rows], self._records[rows]
        pairs = zip(codes.tolist(), numbers.tolist(), strict=True)
        ids: list[str] = [self._question_names[code] if code >= 0 else f"record {number}" for code, number in pairs]
        return Part(numbers, np.array(ids, object), labels)

    def scores(self, name: str, key: tuple[str, int], like: Part) -> Floats:
        rows = self._rows(name, key)
        same = np.array_equal(self._records[rows], like.records) and np.array_equal(self._labels[rows], like.labels)
        if not same:
            raise self._damaged(f"{key[0]}, seed {key[1]}, was scored on other {name} records than {self.keys[0][0]}")
        return self._scores[rows]

    def _rows(self, name: str, key: tuple[str, int]) -> NDArray[np.int64]:
        model, part = self._model_names.index(key[0]), _place(self._part_names, name)
        rows = np.flatnonzero((self._models == model) & (self._seeds == key[1]) & (self._parts == part))[::-1]
        return rows[np.unique(self._records[rows], return_index=True)[1]]

    def _damaged(self, what: str) -> BadSource:
        return damaged(self._file, what)


def _place(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else -2
