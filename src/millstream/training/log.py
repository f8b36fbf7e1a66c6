"""metrics.jsonl -> what each detector was, how training went and what memory it took."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from millstream.console import quoted
from millstream.errors import BadSource

Line = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One detector of one seed, trained and scored."""

    family: str  # trained, baseline, null
    title: str
    parameters: int | None
    fit_s: float
    score_s: float
    num_scored: int
    trace_bytes: int
    extra_forwards: int
    probabilities: bool
    chosen: Mapping[str, object]


@dataclass
class Metrics:
    """The lines of a run, those that were written twice only as they were written last."""

    fits: dict[tuple[str, int], Fit] = field(default_factory=dict[tuple[str, int], Fit])
    epochs: dict[tuple[str, int, int], Line] = field(default_factory=dict[tuple[str, int, int], Line])
    memory: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    budget: int | None = None
    missing: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def history(self) -> Sequence[Line]:
        return list(self.epochs.values())


def read_metrics(file: Path) -> Metrics:
    """What there is of a run that goes on, was killed and resumed, or is done. A torn last line is left out."""
    metrics = Metrics()
    lines = file.read_text(errors="replace").splitlines()
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
        except ValueError as error:
            if number == len(lines):
                break  # the end of a run that was killed, or is writing it now
            raise _damaged(file, number, f"no JSON: {error}") from None
        try:
            _take(metrics, cast(Line, line))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise _damaged(file, number, f"{type(error).__name__}: {error}") from None
    return metrics


def _take(metrics: Metrics, line: Line) -> None:
    kind = line.get("kind")
    if kind == "epoch":
        metrics.epochs[str(line["model"]), _int(line["seed"]), _int(line["epoch"])] = line
    elif kind == "fit":
        metrics.fits[str(line["model"]), _int(line["seed"])] = _fit(line)
        metrics.missing.pop(str(line["model"]), None)
    elif kind == "memory":
        metrics.memory.append((_float(line["time_s"]), _int(line["bytes"])))
        metrics.budget = metrics.budget if line.get("budget") is None else _int(line["budget"])
    elif kind == "missing":
        metrics.missing[str(line["model"])] = str(line["why"])


def _fit(line: Line) -> Fit:
    return Fit(
        family=str(line["family"]),
        title=str(line["title"]),
        parameters=None if line["parameters"] is None else _int(line["parameters"]),
        fit_s=_float(line["fit_s"]),
        score_s=_float(line["score_s"]),
        num_scored=_int(line["num_scored"]),
        trace_bytes=_int(line["trace_bytes"]),
        extra_forwards=_int(line["extra_forwards"]),
        probabilities=bool(line["probabilities"]),
        chosen=dict(cast("Mapping[str, object]", line["chosen"])),
    )


def _damaged(file: Path, number: int, what: str) -> BadSource:
    again = f"millstream train data=STORE out={quoted(file.parent)}"
    return BadSource(f"{file}: line {number} is damaged ({what}). Next: remove it, or remove the run and {again}")


def _int(value: object) -> int:
    return int(cast(int, value))


def _float(value: object) -> float:
    return float(cast(float, value))
