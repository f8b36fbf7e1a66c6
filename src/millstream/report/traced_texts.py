"""What the store of a run says of the tested records: answer lengths, questions and answers. It may be gone."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from millstream.dataset.labels import references_of
from millstream.errors import MillstreamError
from millstream.report.calibration import equal_bins
from millstream.report.measures import Floats
from millstream.report.read_run import Part
from millstream.report.results import Mistake
from millstream.store.traces import Traces

MAX_BINS = 4
MAX_MISTAKES = 12


class TracedTexts:
    """Texts of records by number; none where the store has moved, changed or never had them."""

    def __init__(self, store: object, part: Part) -> None:
        self._part = part
        self._traces: Traces | None = None
        try:
            traces = Traces(str(store))
            if _are_those(traces, part):
                self._traces = traces
        except (MillstreamError, OSError):
            return

    def length_bins(self) -> Mapping[str, NDArray[np.int64]]:
        """Up to four ranges of answer tokens, "3-4", of about equal counts, and which of the records are in each."""
        values = self._values("answer_len", self._part.records)
        known = np.array([row for row, value in enumerate(values) if value is not None], np.int64)
        if not len(known):
            return {}
        lengths = np.array([value for value in values if value is not None]).astype(np.int64)
        bins = equal_bins(lengths, MAX_BINS)
        return {_range(lengths[bins == number]): known[bins == number] for number in range(int(bins.max()) + 1)}

    def mistakes(self, detector: str, probabilities: Floats) -> list[Mistake]:
        """The answers whose probability of being wrong is furthest from what they are."""
        part = self._part
        errors = np.abs(probabilities - part.labels)
        worst = np.argsort(-errors, kind="stable")[:MAX_MISTAKES]
        worst = worst[errors[worst] > 0.5]
        names = ("question", "generated_answer", "answer", "aliases")
        texts = {name: self._values(name, part.records[worst]) for name in names}
        return [
            Mistake(
                detector,
                question_id=str(part.question_ids[at]),
                question=_text(texts["question"][row]),
                answer=_text(texts["generated_answer"][row]),
                references=references_of([texts["answer"][row], texts["aliases"][row]]),
                verdict="wrong" if part.labels[at] else "right",
                probability=float(probabilities[at]),
            )
            for row, at in enumerate(worst.tolist())
        ]

    def _values(self, name: str, records: NDArray[np.int64]) -> Sequence[object]:
        try:
            if self._traces is not None:
                return self._traces.column(name).take(records).to_pylist()
        except (MillstreamError, OSError, KeyError):  # KeyError: there is no such field, or it is a tensor
            pass
        return [None] * len(records)


def _are_those(traces: Traces, part: Part) -> bool:
    """Whether the store still has these records under their numbers."""
    if part.records.max() >= len(traces):
        return False
    if traces.default_key is None:
        return True
    ids = traces.column(traces.default_key).take(part.records).to_pylist()
    return all(found is None or str(found) == wanted for found, wanted in zip(ids, part.question_ids, strict=True))


def _range(lengths: NDArray[np.int64]) -> str:
    low, high = int(lengths.min()), int(lengths.max())
    return str(low) if low == high else f"{low}-{high}"


def _text(value: object) -> str:
    return "" if value is None else str(value)
