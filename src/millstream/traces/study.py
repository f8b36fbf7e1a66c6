"""Detectors of wrong answers, compared on one split of a labelled trace store."""

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from millstream.core.collection import Collection
from millstream.core.config import read_settings
from millstream.core.console import quoted
from millstream.core.labelled import LABEL, labelled
from millstream.core.split import Split, split
from millstream.errors import BadSplit, MissingLabel
from millstream.traces.detectors.detector import Scores
from millstream.traces.detectors.zoo import detector_specs, scores_of
from millstream.traces.settings import TrainSettings
from millstream.traces.store.traces import LABELS_FILE, Traces
from millstream.training.folder import SPLIT
from millstream.training.study import Built, ModelSpec

VERDICTS = {"right": 0, "wrong": 1}


def open_labelled(path: str, label: str) -> Collection:
    """The records labelled right or wrong; the data card counts the others."""
    traces = Traces(path)
    labels_file = traces.path / LABELS_FILE
    has_verdicts = labels_file.exists() and label in pq.ParquetFile(labels_file).schema_arrow.names
    if label == "verdict" and not has_verdicts and LABEL not in traces.field_names:
        raise MissingLabel(f"{path}: its answers are not labelled. Next: millstream label {quoted(path)}")
    if label == "verdict" and has_verdicts:
        return labelled(traces, column=label, values=cast("dict[object, float]", VERDICTS), missing="drop")
    return labelled(traces, column=LABEL if label == "verdict" else label, missing="drop")


def split_of(collection: Collection, settings: TrainSettings) -> Split:
    """Train, val and test splits, by question unless set otherwise. Each must have right and wrong answers."""
    shares = {"train": settings.train, "val": settings.val, "test": 1 - settings.train - settings.val}
    parts = split(collection, shares, by=settings.by, salt=settings.salt)
    for name in shares:
        labels = np.asarray(parts[name].column(LABEL).to_numpy(), np.float64)
        if len(np.unique(labels)) < 2 or not np.isin(labels, (0, 1)).all():
            found = dict(Counter[object](labels.tolist()))
            raise BadSplit(
                f"{settings.data}: the {name} split has {len(labels)} records with the labels {found}; "
                "a detector needs 0 (right) and 1 (wrong) in each split: label or extract more, or choose another salt="
            )
    return parts


def data_card(path: str, collection: Collection, parts: Mapping[str, Collection], how: str) -> dict[str, object]:
    """A summary of the data that accounts for every record."""
    traces = Traces(path)
    names = traces.field_names
    verdicts: Counter[str] = Counter()
    labels_file = traces.path / LABELS_FILE
    about: dict[str, object] = {}
    if labels_file.exists():
        table = pq.read_table(labels_file)
        written = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        about = {name: written.get(f"millstream.{name}") for name in ("rule", "label_version")}
        if "verdict" in table.column_names:
            verdicts.update(str(v or "unlabelled") for v in table.column("verdict").to_pylist())
    if "status" in names:
        failed = sum(status == "error" for status in traces.column("status").to_pylist())
        verdicts["unlabelled"] = max(0, verdicts["unlabelled"] - failed)  # a failed record has no verdict
        verdicts["error"] = failed
    config = dict(traces.config)
    return {
        "store": str(Path(path).resolve()),
        "fingerprint": traces.fingerprint,
        "records": len(traces),
        "label_digest": _digest(collection),
        "used": len(collection),
        "verdicts": dict(verdicts),
        "parts": {name: _counts(part) for name, part in parts.items()},
        "split": how,
        "language_model": str(config.get("model", "")),
        "label_rule": about.get("rule"),
        "label_version": about.get("label_version"),
        "trace_bytes": traces.num_bytes // max(1, len(traces)),
        "fields": names,
        "config": config,
    }


def make_study(settings: Mapping[str, object]) -> "Detection":
    return Detection(read_settings(TrainSettings, settings))


class Detection:
    """A comparison of detectors: all of them see the same splits, by question."""

    keys: Sequence[str] = ("fingerprint", "label_digest")  # other records or labels make another run
    libraries: Sequence[str] = ("torch_geometric.nn", "sklearn.decomposition")

    def __init__(self, settings: TrainSettings) -> None:
        settings.check()
        self.settings, self.source = settings, settings.data
        self.collection = open_labelled(settings.data, settings.label)
        self.parts: Split = split_of(self.collection, settings)
        self.specs: Sequence[ModelSpec] = detector_specs(settings, self.collection.field_names)
        self.card = self._card()

    @property
    def train(self) -> Collection:
        return self.parts["train"]

    @property
    def scored(self) -> Mapping[str, Collection]:
        return {name: self.parts[name] for name in ("val", "test")}

    def _card(self) -> Mapping[str, object]:
        rule = self.parts.rule
        parts = {name: self.parts[name] for name in rule.shares}
        return data_card(self.source, self.collection, parts, f"by a hash of {rule.by}, salt {rule.salt!r}")

    def keep(self, run: Path) -> None:
        self.parts.save(run / SPLIT)

    def summary(self) -> str:
        used = f"{self.source}: {len(self.collection)} of {self.card['records']} records are right or wrong"
        return f"{used}\n{self.parts.report(LABEL)}"

    def table(self, built: Built, part: str) -> pa.Table:
        return scores_table(part, self.parts[part], scores_of(built.model, self.parts[part]))


def scores_table(name: str, part: Collection, scores: Scores) -> pa.Table:
    """Rows of predictions.parquet, without the model and its seed."""
    records = part.record_numbers(np.arange(len(part)))
    ids = part.column("question_id").to_pylist() if "question_id" in part.field_names else records.tolist()
    return pa.table(
        {
            "part": pa.array([name] * len(part), pa.string()),
            "record": pa.array(records),
            "question_id": pa.array([None if name is None else str(name) for name in ids], pa.string()),
            "label": pa.array(np.asarray(part.column(LABEL).to_numpy(), np.int8)),
            "score": pa.array(np.asarray(scores, np.float64)),
        }
    )


def _digest(collection: Collection) -> str:
    """Changes when a label changes, or the set of labelled records."""
    numbers = collection.record_numbers(np.arange(len(collection)))
    labels = np.asarray(collection.column(LABEL).to_numpy(), np.float64)
    return blake2b(numbers.tobytes() + labels.tobytes(), digest_size=8).hexdigest()


def _counts(part: Collection) -> dict[str, int]:
    """Records, questions and wrong answers of a split."""
    questions = part.column("question_id") if "question_id" in part.field_names else None
    wrong = int(np.asarray(part.column(LABEL).to_numpy(), np.int64).sum())
    num_questions = len(part) if questions is None else len(set(questions.to_pylist()))
    return {"records": len(part), "questions": num_questions, "wrong": wrong}
