"""`ms.evaluate`: the detectors of a run on their own test part again, or on another store."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from millstream.config import config_diff, parse_bytes, read_settings
from millstream.console import progress, say
from millstream.dataset.labels import LABEL
from millstream.dataset.split import Split
from millstream.errors import BadSource, NoDetector
from millstream.model.detector import Means
from millstream.train.checkpoint import load
from millstream.train.data import count_records, open_labelled
from millstream.train.detectors import asked_for
from millstream.train.devices import make_fabric
from millstream.train.log import FILE, read_lines
from millstream.train.run import CHECKPOINTS, CONFIG, DATA, DETECTOR, ENVIRONMENT, SCORES, SPLIT, write_predictions, write_scores
from millstream.train.settings import TrainSettings


@dataclass(frozen=True)
class EvaluateSettings:
    """What `millstream evaluate` takes as `key=value`."""

    data: str | None = None
    model: str | None = None  # those of the run if not given
    memory: int | str = "2GB"
    out: str | None = None


def evaluate(run: str | Path, **settings: object) -> Path:
    """Score with the detectors of a run, and give the folder with the predictions, which reads like a run.

    All labelled records of another store are its test part; thresholds and calibration stay those that were chosen on
    the validation part of the run. Without `data`, the run's own test part is scored again.

    >>> ms.evaluate("runs/trivia", data="nq_traces/")
    """
    given = read_settings(EvaluateSettings, settings)
    path = Path(run)
    ...
    return path
