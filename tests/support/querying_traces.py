"""Queries to the explorer page of a trace store, and run folders with given scores."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from millstream.core.tables import publish_table
from millstream.traces.view import view_of
from millstream.view import Query, plain


def querying(path: Path, **options: Any) -> Callable[..., Any]:
    """A function like query("list", q="fox"), which repeats a query until its answer is complete, as the page does."""
    view = view_of(path, **options)

    def query(name: str, **values: object) -> Any:
        while True:
            found = plain(view.answers[name](Query({key: str(value) for key, value in values.items()})))
            if not isinstance(found, Mapping) or found.get("ready", True):
                return found
            time.sleep(0.002)  # the rest is computed in the background

    return query


def make_run(run: Path, store: Path, scores: Mapping[str, Mapping[int, list[float]]]) -> Path:
    """A run folder with predictions: scores by detector and record, one per seed."""
    run.mkdir(parents=True)
    rows = [
        {"part": "test" if record % 2 else "val", "record": record, "question_id": f"q{record}", "label": 1,
         "model": model, "seed": seed, "score": score}
        for model, records in scores.items() for record, found in records.items() for seed, score in enumerate(found)
    ]  # fmt: skip
    publish_table(run / "predictions.parquet", pa.Table.from_pylist(rows))
    (run / "config.yaml").write_text("{}")
    (run / "data.json").write_text(json.dumps({"store": str(store.resolve())}))
    return run
