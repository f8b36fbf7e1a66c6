"""predictions.parquet of a run -> what each detector said of each record of a store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from millstream.dataset.split import text_codes_of
from millstream.errors import BadSource
from millstream.store.traces import Traces
from millstream.train.folder import PREDICTIONS

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TraceScores:
    """Means over seeds by detector, NaN where a record was not scored; and the part of the split each record is in."""

    by_model: Mapping[str, Floats]
    parts: NDArray[np.int8]  # places in `part_names`, -1: in none
    part_names: Sequence[str]


def read_scores(run: Path, traces: Traces) -> TraceScores:
    """Of a run that was trained on this store, or evaluated on it; an error when its records are others."""
    file = run / PREDICTIONS
    if not file.exists():
        return TraceScores({}, np.full(len(traces), -1, np.int8), ())
    try:
        table = pq.ParquetFile(file).read().select(["model", "part", "record", "question_id", "score"])
    except (pa.ArrowException, OSError, KeyError) as error:
        raise BadSource(f"{file}: is damaged ({error}). Next: the millstream train command of the run") from None
    records = table.column("record").to_numpy().astype(np.int64)
    _check_same(file, traces, records, table.column("question_id"))
    models, model_names = text_codes_of(table.column("model"))
    parts, part_names = text_codes_of(table.column("part"))
    places = models * len(traces) + records
    size = len(model_names) * len(traces)
    counts = np.bincount(places, minlength=size)
    sums = np.bincount(places, weights=table.column("score").to_numpy().astype(np.float64), minlength=size)
    with np.errstate(invalid="ignore"):
        means = (sums / counts).reshape(len(model_names), len(traces))  # 0 / 0 where there is no score
    part_of = np.full(len(traces), -1, np.int8)
    part_of[records] = parts
    return TraceScores(dict(zip(model_names, means, strict=True)), part_of, part_names)


def _check_same(file: Path, traces: Traces, records: NDArray[np.int64], ids: pa.ChunkedArray) -> None:
    """The store must still have, under their numbers, the records that were scored."""
    other = BadSource(f"{file}: it scored other records than those of {traces.path}; give the run of this store, --run")
    if len(records) and (records.min() < 0 or records.max() >= len(traces)):
        raise other
    if traces.default_key is None:
        return
    _, first = np.unique(records, return_index=True)
    found = traces.column(traces.default_key).take(records[first]).cast(pa.string())
    if found.to_pylist() != ids.take(first).cast(pa.string()).to_pylist():
        raise other
