"""How sure a number is: the questions of the test part, drawn again and again. All numbers see the same draws."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from millstream.report.measures import Counts, Floats, Labels
from millstream.report.results import Interval

Measure = Callable[[Counts], Floats]
"""Of R sets of counts, how often each record was drawn: K numbers each, K x R."""
Key = TypeVar("Key", bound=Hashable)

SEED = 20_240_607
CHUNK_BYTES = 10_000_000  # five times as many take twice the time: new pages instead of cached ones
_ARRAYS = 10  # of eight bytes a count, that a measure holds at once


@dataclass(frozen=True)
class Resampled:
    """A number on all records, and on each of R draws of questions."""

    value: float
    drawn: Floats

    @property
    def interval(self) -> Interval:
        low, high = np.quantile(self.drawn, [0.025, 0.975]).tolist()
        return Interval(self.value, low, high)

    def __sub__(self, other: "Resampled") -> "Resampled":
        """The difference on the same draws: what is hard for both does not blur it."""
        return Resampled(self.value - other.value, self.drawn - other.drawn)


def bootstrap(
    measures: Mapping[Key, Measure], labels: Labels, *, questions: NDArray[np.int64], resamples: int, seed: int = SEED
) -> dict[Key, list[Resampled]]:
    """The numbers of every measure on all records and on `resamples` draws, the same for all.

    `questions` are numbers from 0: the records of a question are drawn together.
    """
    if resamples < 1:
        raise ValueError(f"resamples={resamples}: at least 1")
    drawn: dict[Key, list[Floats]] = {key: [] for key in measures}
    for counts in draw(labels, questions, resamples=resamples, seed=seed):
        for key, measure in measures.items():
            drawn[key].append(measure(counts))
    once = np.ones((1, len(labels)), np.int32)
    found: dict[Key, list[Resampled]] = {}
    for key, measure in measures.items():
        values_K, drawn_KR = measure(once)[:, 0], np.concatenate(drawn[key], axis=1)
        found[key] = [Resampled(float(value), drawn_KR[number]) for number, value in enumerate(values_K)]
    return found


def draw(
    labels: Labels,
    questions: NDArray[np.int64],
    *,
    resamples: int,
    seed: int = SEED,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[NDArray[np.int32]]:
    """How often each record was drawn, some resamples at a time, whatever their size the same ones in all.

    As many questions are drawn as there are, with replacement. A draw without a right or a wrong answer is drawn again.
    """
    num_questions, num_wrong = int(questions.max()) + 1, int(labels.sum())
    assert 0 < num_wrong < len(labels), "one class only: there would be no draw of two"
    rng = np.random.default_rng(seed)
    rows = min(max(chunk_bytes // (8 * _ARRAYS * len(labels)), 1), resamples)
    left = resamples
    while left:
        numbers = rng.integers(num_questions, size=(rows, num_questions))
        numbers += num_questions * np.arange(rows)[:, None]
        counts = np.bincount(numbers.ravel(), minlength=rows * num_questions).reshape(rows, num_questions)
        counts = counts.astype(np.int32)[:, questions]
        wrong = counts @ labels.astype(np.int32)
        counts = counts[(wrong > 0) & (wrong < counts.sum(axis=1))][:left]
        left -= len(counts)
        yield counts


def p_value(difference: Resampled) -> float:
    """Two-sided: twice the share of draws on the rarer side of zero. Never 0: that takes more draws than there are."""
    below, above = int(np.sum(difference.drawn <= 0)), int(np.sum(difference.drawn >= 0))
    return min(1.0, 2 * (min(below, above) + 1) / (len(difference.drawn) + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """The same, corrected for having made all of these comparisons."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)
    corrected = np.empty(len(p_values))
    corrected[order] = np.minimum(np.maximum.accumulate(np.asarray(p_values, np.float64)[order] * factors), 1)
    return corrected.tolist()
