"""The view of a trace store asked as a page asks it, and run folders whose scores are made up."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from millstream.traces.view import view_of
from millstream.view import Query, plain

Ask = Callable[..., Any]


def asking(path: Path, **options: Any) -> Ask:
    """ask("list", q="fox"), asked again until all is known, as a page does."""
    view = view_of(path, **options)

    def ask(name: str, **values: object) -> Any:
        while True:
            found = plain(view.answers[name](Query({key: str(value) for key, value in values.items()})))
            if not isinstance(found, Mapping) or found.get("ready", True):
                return found

    return ask


def make_run(run: Path, store: Path, scores: Mapping[str, Mapping[int, list[float]]]) -> Path:
    """A run folder that has predictions: scores by detector and record, one a seed."""
    run.mkdir(parents=True)
    rows = [
        {"part": "test" if record % 2 else "val", "record": record, "question_id": f"q{record}", "label": 1,
         "model": model, "seed": seed, "score": score}
        for model, records in scores.items() for record, found in records.items() for seed, score in enumerate(found)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), run / "predictions.parquet")
    (run / "config.yaml").write_text("{}")
    (run / "data.json").write_text(json.dumps({"store": str(store.resolve())}))
    return run
