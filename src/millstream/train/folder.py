"""The files of a run folder, by name, and how they are written: whole or not at all."""

import json
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq

from millstream.store.layout import publish, publishing

CONFIG = "config.yaml"
DATA = "data.json"  # the data card
SPLIT = "split.json"
ENVIRONMENT = "env.json"
METRICS = "metrics.jsonl"
PREDICTIONS = "predictions.parquet"
CHECKPOINTS = "checkpoints"  # a folder for each model and seed, with:
SCORES, DETECTOR = "scores.parquet", "detector.safetensors"
READS = "reads"  # the kind of a run that compares classifiers of reads; that of detectors has none


def kind_of(folder: Path) -> str:
    """What the data card of a run says that it compares; nothing where there is no card to read."""
    try:
        card = json.loads((folder / DATA).read_text())
    except (OSError, ValueError):
        return ""
    return str(cast("dict[str, object]", card).get("kind") or "") if isinstance(card, dict) else ""


def write_json(path: Path, value: object) -> None:
    publish(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def write_table(path: Path, table: pa.Table) -> None:
    with publishing(path) as file:
        pq.write_table(table, file, compression="zstd")
