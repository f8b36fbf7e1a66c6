"""Which characters of an answer are wrong: by the spans of its labels, and by detectors that score tokens."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.core.batches import text_codes_of
from millstream.traces.spans import OFFSETS, SPANS, TOKEN_SCORES
from millstream.traces.store.traces import Traces

Floats = NDArray[np.float64]
_PROBABILITY = (0.0, 1.0)
_SHARE = 0.02  # of the scores of a detector may be beyond each end of the scale


class TokenScores:
    """Scores of tokens in the predictions of a run, as means over seeds; `scales` are low and high by detector."""

    def __init__(self, predictions: pa.Table | None) -> None:
        self.scales: dict[str, tuple[float, float]] = {}
        self._rows: dict[int, list[tuple[str, int]]] = {}  # record -> detector and row
        if predictions is None or TOKEN_SCORES not in predictions.column_names:
            return
        column = cast(pa.Array, predictions.column(TOKEN_SCORES).combine_chunks())
        known = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        self._table = predictions.select([TOKEN_SCORES]).take(known)
        models, names = text_codes_of(predictions.column("model").take(known))
        records = predictions.column("record").take(known).to_numpy().astype(np.int64)
        for row, record in enumerate(records.tolist()):
            self._rows.setdefault(record, []).append((names[int(models[row])], row))
        for model in np.unique(models).tolist():
            own = self._table.take(np.flatnonzero(models == model)).column(TOKEN_SCORES)
            flat = np.concatenate([np.zeros(0), *(np.array(one, np.float64) for one in own.to_pylist())])
            if len(flat):
                low, high = np.quantile(flat, [_SHARE, 1 - _SHARE]).tolist()
                self.scales[names[model]] = _PROBABILITY if flat.min() >= 0 and flat.max() <= 1 else (low, high)

    def of(self, number: int) -> dict[str, Floats]:
        """The scores of the tokens of a record, by detector."""
        found: dict[str, list[Floats]] = {}
        for name, row in self._rows.get(number, []):
            values = self._table.take(np.array([row])).column(TOKEN_SCORES).to_pylist()[0]
            found.setdefault(name, []).append(np.array(values, np.float64))
        return {name: np.mean(values, axis=0) for name, values in found.items()}


def marks_of(
    traces: Traces, number: int, *, answer: object, labels: Mapping[str, Any], scores: TokenScores
) -> dict[str, object] | None:
    """The answer in pieces, each with its span and the highest score of its tokens; None if nothing is known of it."""
    spans = cast("Sequence[Mapping[str, Any]] | None", labels.get(SPANS))
    by_model = scores.of(number)
    offsets = traces.fetch([number], [OFFSETS])[OFFSETS][0] if OFFSETS in traces.fields else None
    if not isinstance(answer, str) or (spans is None and (offsets is None or not by_model)):
        return None
    ranges = np.zeros((0, 2), np.int64) if offsets is None else np.asarray(offsets, np.int64).reshape(-1, 2)
    by_model = {name: values for name, values in by_model.items() if len(values) == len(ranges)}
    edges = {
        0,
        len(answer),
        *ranges.ravel().tolist(),
        *(span[side] for span in spans or () for side in ("start", "end")),
    }
    pieces: list[dict[str, object]] = []
    for start, end in pairwise(sorted(edge for edge in edges if 0 <= edge <= len(answer))):
        inside = next((one for one in spans or () if one["start"] < end and one["end"] > start), None)
        tokens = (ranges[:, 0] < end) & (ranges[:, 1] > start)
        pieces.append(
            {
                "text": answer[start:end],
                "span": None if inside is None else inside.get("label") or "",
                "scores": {name: float(values[tokens].max()) for name, values in by_model.items() if tokens.any()},
            }
        )
    names = sorted(
        by_model, key=lambda name: (scores.scales[name] != _PROBABILITY, name)
    )  # what was trained comes first
    scales = {name: scores.scales[name] for name in names}
    return {"pieces": pieces, "is_annotated": spans is not None, "scales": scales}
