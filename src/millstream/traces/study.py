"""The labelled records of a store, split once for all detectors, and the card that says what they are."""

from collections import Counter
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow.parquet as pq

from millstream.collection import Collection
from millstream.console import quoted
from millstream.dataset.labels import LABEL, LABELS_FILE, labelled
from millstream.dataset.split import Split, split
from millstream.errors import BadSplit, MissingLabel
from millstream.store.traces import Traces
from millstream.train.settings import TrainSettings

VERDICTS = {"right": 0, "wrong": 1}


def open_labelled(path: str, label: str) -> Collection:
    """The records that are known to be right or wrong; the others are counted on the card."""
    traces = Traces(path)
    known = traces.path / LABELS_FILE
    has_verdicts = known.exists() and label in pq.ParquetFile(known).schema_arrow.names
    if label == "verdict" and not has_verdicts and LABEL not in traces.field_names:
        raise MissingLabel(f"{path}: its answers are not labelled. Next: millstream label {quoted(path)}")
    if label == "verdict" and has_verdicts:
        return labelled(traces, column=label, values=cast("dict[object, float]", VERDICTS), missing="drop")
    return labelled(traces, column=LABEL if label == "verdict" else label, missing="drop")


def split_of(collection: Collection, settings: TrainSettings) -> Split:
    """By question, or as the settings say. Each part must have right and wrong answers."""
    shares = {"train": settings.train, "val": settings.val, "test": 1 - settings.train - settings.val}
    parts = split(collection, shares, by=settings.by, salt=settings.salt)
    for name in shares:
        labels = np.asarray(parts[name].column(LABEL).to_numpy(), np.float64)
        if len(np.unique(labels)) < 2 or not np.isin(labels, (0, 1)).all():
            found = dict(Counter[object](labels.tolist()))
            raise BadSplit(
                f"{settings.data}: the {name} part has {len(labels)} records with the labels {found}; a detector needs "
                "0 (right) and 1 (wrong) in each part: label or extract more, or choose another salt="
            )
    return parts


def data_card(path: str, collection: Collection, parts: Mapping[str, Collection], how: str) -> dict[str, object]:
    """What the data is, with every record counted."""
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
        verdicts["unlabelled"] = max(0, verdicts["unlabelled"] - failed)  # what failed has no verdict
        verdicts["error"] = failed
    config = dict(traces.config)
    return {
        "store": str(Path(path).resolve()),
        "fingerprint": traces.fingerprint,
        "records": len(traces),
        "label_digest": _digest(collection),
        "used": len(collection),
        "verdicts": dict(verdicts),
        "parts": {name: _part(part) for name, part in parts.items()},
        "split": how,
        "language_model": str(config.get("model", "")),
        "label_rule": about.get("rule"),
        "label_version": about.get("label_version"),
        "trace_bytes": traces.num_bytes // max(1, len(traces)),
        "fields": names,
        "config": config,
    }


def _digest(collection: Collection) -> str:
    """Changes when a label does, or which records have one."""
    numbers = collection.record_numbers(np.arange(len(collection)))
    labels = np.asarray(collection.column(LABEL).to_numpy(), np.float64)
    return blake2b(numbers.tobytes() + labels.tobytes(), digest_size=8).hexdigest()


def _part(part: Collection) -> dict[str, int]:
    questions = part.column("question_id") if "question_id" in part.field_names else None
    wrong = int(np.asarray(part.column(LABEL).to_numpy(), np.int64).sum())
    num_questions = len(part) if questions is None else len(set(questions.to_pylist()))
    return {"records": len(part), "questions": num_questions, "wrong": wrong}
