"""Settings of short runs, and the contents of run folders."""

import json
from pathlib import Path

import pyarrow.parquet as pq

SHORT = {"epochs": 3, "seeds": 1, "batch_size": 16, "parameters": 5000, "memory": "200MB"}


def lines_of(run: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def losses_of(run: Path) -> list[float]:
    return [line["loss"] for line in lines_of(run, "epoch")]


def scores_of(run: Path) -> dict[tuple[str, int], dict[str, float]]:
    """For every model and seed: test question -> score."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in pq.read_table(run / "predictions.parquet").to_pylist():
        if row["part"] == "test":
            found.setdefault((row["model"], row["seed"]), {})[row["question_id"]] = row["score"]
    return found


def weights_of(run: Path, job: str) -> dict[str, bytes]:
    """The bytes of the latest and the best weights."""
    return {
        name: (run / "checkpoints" / job / name).read_bytes() for name in ("latest.safetensors", "best.safetensors")
    }
