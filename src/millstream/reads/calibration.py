"""Expected precision -> the probability that a read must reach to be assigned at each rank, from validation reads."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.core.config import first_few
from millstream.core.console import quoted
from millstream.core.files import publish_json
from millstream.core.fingerprint import file_crc32c
from millstream.errors import BadSetting, BadSource
from millstream.reads.mapping import CLASS, PROBABILITY, Classes, prediction_column
from millstream.training.folder import (
    CONFIG,
    SCORES,
    JobKey,
    finished_jobs,
    job_folder,
    read_mapping,
    read_scores,
)

CALIBRATION = "calibration.json"
SCORES_CRC = "scores_crc32c"  # of the scores that it is computed from
VAL = "val"
PRECISIONS: Sequence[float] = (
    *(n / 100 for n in range(50, 100)),
    *(n / 1000 for n in range(991, 1000)),
    0.9995,
    0.9999,
)
Floats = NDArray[np.floating]


@dataclass(frozen=True)
class Calibration:
    """For each of `precisions` a threshold per level: the class, then the ranks from the lowest. None: out of reach.

    At the thresholds of a precision, as many of the reads assigned at each level are expected to be assigned correctly.
    """

    num_reads: int  # for validation
    held_out: str  # how they were: as "files", or as "reads" of the training genomes
    precisions: Sequence[float]
    thresholds: Mapping[str, Sequence[float | None]]
    shares: Mapping[str, Sequence[float]]  # of all reads, those that are assigned at the level

    def at(self, precision: float) -> int | None:
        """The place of the lowest of `precisions` that is at least this high; None if no read would be assigned."""
        place = next((place for place, one in enumerate(self.precisions) if one >= precision), len(self.precisions))
        return place if place <= self._last else None

    @property
    def best(self) -> float | None:
        """The highest precision that can be reached."""
        return self.precisions[self._last] if self._last >= 0 else None

    @property
    def _last(self) -> int:
        usable = [any(one is not None for one in row) for row in zip(*self.thresholds.values(), strict=True)]
        return max((place for place, is_usable in enumerate(usable) if is_usable), default=-1)


def calibrate(scores: pa.Table, classes: Classes, *, held_out: str = "files") -> Calibration:
    """From the predictions for labelled reads, in the columns of predictions.parquet.

    Reads go to the lowest level whose threshold they reach, as in classification; a level is calibrated on those that
    none below takes. Reads of no known class count as wrong. One more error is assumed than was seen: the estimate for
    reads like these is then not too high, however few they are.
    """
    labels = _numbers(scores, "label")
    levels: dict[str, tuple[Floats, NDArray[np.bool_], NDArray[np.int64]]] = {}
    taxa = {prediction_column(rank): of_class for rank, of_class in classes.taxa_by_rank.items()}
    for column, of_class in {CLASS: np.arange(len(classes)), **taxa}.items():
        likely = _numbers(scores, PROBABILITY if column == CLASS else f"{column}_{PROBABILITY}")
        true = np.append(of_class, -1)[labels]  # the label of reads of no known class is -1
        right = (true >= 0) & (true == _numbers(scores, column))
        order = np.argsort(-likely, kind="stable")
        levels[column] = likely, right, order[likely[order] > 0]
    thresholds: dict[str, list[float | None]] = {column: [] for column in levels}
    shares: dict[str, list[float]] = {column: [] for column in levels}
    for precision in PRECISIONS:
        is_left = np.ones(len(labels), np.bool_)
        for column, (likely, right, order) in levels.items():
            mine = order[is_left[order]]
            count = _most_reads(likely[mine], right[mine], precision)
            is_left[mine[:count]] = False
            thresholds[column].append(float(likely[mine[count - 1]]) if count else None)
            shares[column].append(count / max(len(labels), 1))
    return Calibration(len(labels), held_out, PRECISIONS, thresholds, shares)


def _most_reads(likely: Floats, right: NDArray[np.bool_], precision: float) -> int:
    """The largest number of the most probable reads with this precision; reads of equal probability go together."""
    expected = np.cumsum(right) / np.arange(2, len(right) + 2)
    is_last = np.append(likely[1:] != likely[:-1], True)[: len(likely)]
    enough = np.flatnonzero((expected >= precision) & is_last)
    return int(enough[-1]) + 1 if len(enough) else 0


def _numbers(scores: pa.Table, name: str) -> NDArray[Any]:
    return scores.column(name).to_numpy()


def write_calibrations(run: Path, classes: Classes, *, held_out: str) -> None:
    """calibration.json of a run, for all its finished models: of each, unless it is there for the same scores."""
    before, found = _read(run), dict[str, object]()
    for job in finished_jobs(run):
        crc = file_crc32c(job_folder(run, job) / SCORES)
        known = before.get(job.name)
        if isinstance(known, dict) and cast("dict[str, object]", known).get(SCORES_CRC) == crc:
            found[job.name] = known
            continue
        scores = read_scores(run, job)
        scores = scores.filter(pa.array(_numbers(scores, "part") == VAL))
        found[job.name] = {SCORES_CRC: crc, **asdict(calibrate(scores, classes, held_out=held_out))}
    if found != before:
        publish_json(run / CALIBRATION, found)


def read_calibration(run: Path, job: JobKey) -> Calibration:
    try:
        found = _read(run)[job.name]
        return Calibration(**{name: value for name, value in found.items() if name != SCORES_CRC})
    except (AttributeError, KeyError, TypeError):
        raise BadSource(
            f"{run}: has no calibration of {job} for --precision. Compute it from the stored scores, without training: "
            f"millstream train {quoted(run / CONFIG)} out={quoted(run)}"
        ) from None


def _read(run: Path) -> dict[str, Any]:
    """Empty if there is no such file, or it is damaged: it can be computed again."""
    try:
        return read_mapping(run / CALIBRATION)
    except BadSource:
        return {}


@dataclass(frozen=True)
class Thresholds:
    """The probability that a read must reach at each level; `about` says what follows from them."""

    values: Sequence[float]
    about: str


def thresholds_at(precision: float, calibration: Calibration, *, where: str, name: str) -> Thresholds:
    """The thresholds of an expected precision; BadSetting if it cannot be reached.

    >>> thresholds_at(0.99, read_calibration(run, job), where="runs/reads", name="kmer-exact").values
    """
    place, reads = calibration.at(precision), f"{calibration.num_reads:,} validation reads"
    if place is None:
        most = "at most" if calibration.best is not None else "not even"
        raise BadSetting(
            f"--precision {precision:g}: {name} reaches {most} {calibration.best or PRECISIONS[0]:g} on the {reads} of "
            f"{where}. Choose a lower one, or train with more validation reads or a better classifier"
        )
    values = {level: found[place] for level, found in calibration.thresholds.items()}
    used = [
        f"{level} from {values[level] or 0:.4f} ({found[place]:.1%})"
        for level, found in calibration.shares.items()
        if found[place]
    ]
    if calibration.held_out == "reads":
        reads += " of the training genomes, so it is optimistic for other strains"
    about = (
        f"{where}: precision {calibration.precisions[place]:g} is expected, from {reads}. Needed: {first_few(used, 9)}"
    )
    return Thresholds([math.inf if one is None else one for one in values.values()], about)
