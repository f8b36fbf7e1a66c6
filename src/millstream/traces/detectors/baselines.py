"""The baselines by name: single statistics, linear probes and regressions, which a trained detector should beat."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from millstream.core.collection import Collection
from millstream.core.features import Feature, fields
from millstream.report.measures import auroc
from millstream.traces.detectors.attention import LapEigvals, logdet, lookback
from millstream.traces.detectors.detector import Detector, Scores, binary_labels, reader
from millstream.traces.detectors.logistic import Inputs, Logistic
from millstream.traces.features import layers, token_stats
from millstream.traces.llm.fields import POSITIONS
from millstream.training.task import Arrays, FitResources

# B batch, L layers, P positions, D hidden

Position = Literal["last_prompt", "first_answer", "last_answer", "mean_answer"]
Make = Callable[[FitResources, Sequence[str]], Detector]


class Single:
    """The mean of a feature of a record, with the sign for which higher means wrong on `train`.

    A record without the feature gets the mean over the training split.
    """

    probabilities = False

    def __init__(self, resources: FitResources, *, feature: Feature, key: str) -> None:
        self.fields: Sequence[str] = list(feature.fields or ())
        self.arrays: Arrays = {}
        self.chosen: dict[str, object] = {}
        self._resources = resources
        self._feature = feature
        self._key = key

    def fit(self, train: Collection, val: Collection) -> None:
        labels = binary_labels(train, "training")
        values = self._values(train)
        known = ~np.isnan(values)
        if not known.any():
            raise ValueError(f"none of the {len(values)} records of the training split has a {self._key!r}")
        found = auroc(labels[known], values[known])
        direction = -1 if found < 0.5 else 1
        self.arrays = {"direction": np.array(direction), "mean": np.array(values[known].mean())}
        self.chosen = {"direction": direction, "train_auroc": max(found, 1 - found)}

    def score(self, collection: Collection) -> Scores:
        values = self._values(collection)
        filled = np.where(np.isnan(values), self.arrays["mean"], values)
        return filled * int(self.arrays["direction"])

    def _values(self, collection: Collection) -> Scores:
        batches = reader(collection, self._feature, self._resources)
        return np.concatenate([np.zeros(0), *(_means(batch[self._key]) for batch in batches)])


def probe(resources: FitResources, field_names: Sequence[str], *, position: Position) -> Logistic:
    """A linear probe of the best layer, on `states` if the store has them, else on `hidden`."""
    if "hidden" in field_names and "states" not in field_names:
        inputs = Inputs(layers(position), _layers, axis="layer")
    else:
        place = POSITIONS.index(position)
        inputs = Inputs(fields("states"), partial(_states, place=place), axis="layer")
    return Logistic(resources, inputs=inputs)


def token_probe(resources: FitResources) -> Logistic:
    """A regression on all token statistics."""
    return Logistic(resources, inputs=Inputs(token_stats(), _stats))


class Baseline(NamedTuple):
    """A baseline; `make(resources, field_names)` returns a detector for a store with these fields."""

    title: str
    make: Make
    extra_forwards: int = 0
    """Forward passes of the language model in addition to those of the trace."""


def _means(column: object) -> NDArray[np.float64]:
    """One number per record from a column of a batch: a tensor, or a list that may contain None."""
    if isinstance(column, Tensor):
        return column.double().flatten(1).mean(1).numpy() if column.ndim > 1 else column.double().numpy()
    return np.array(cast("list[float | None]", column), np.float64)  # NaN for None


def _layers(batch: Mapping[str, object]) -> Tensor:
    return cast(Tensor, batch["layers"])


def _states(batch: Mapping[str, object], *, place: int) -> Tensor:
    states_BLPD = cast(Tensor, batch["states"])
    return states_BLPD[:, :, place].float()


def _stats(batch: Mapping[str, object]) -> Tensor:
    return cast(Tensor, batch["stats"])[:, None]


def _same_for_all(title: str, make: Callable[[FitResources], Detector], *, extra_forwards: int = 0) -> Baseline:
    """A baseline that is made the same way for every store."""

    def make_for(resources: FitResources, field_names: Sequence[str]) -> Detector:
        return make(resources)

    return Baseline(title, make_for, extra_forwards)


def _stat(title: str, stat: str) -> Baseline:
    return _same_for_all(title, partial(Single, feature=token_stats(stat), key="stats"))


def _field(title: str, name: str, *, extra_forwards: int = 0) -> Baseline:
    return _same_for_all(title, partial(Single, feature=fields(name), key=name), extra_forwards=extra_forwards)


def _probe(title: str, position: Position) -> Baseline:
    return Baseline(title, partial(probe, position=position))


BASELINES: Mapping[str, Baseline] = {
    "length": _stat("number of answer tokens", "num_tokens"),
    "words": _stat("number of answer words", "num_words"),
    "sequence_logprob": _stat("log-prob of the answer", "sum_logprob"),
    "mean_logprob": _stat("mean log-prob (perplexity)", "mean_logprob"),
    "min_logprob": _stat("lowest log-prob", "min_logprob"),
    "entropy": _stat("mean token entropy", "mean_entropy"),
    "margin": _stat("mean top-1 minus top-2 probability", "mean_margin"),
    "p_true": _field("the model's own P(True)", "p_true", extra_forwards=2),
    "logdet_mean": _field("mean attention log-determinant", "attention_logdet"),
    "token_stats": _same_for_all("regression on token statistics", token_probe),
    "logdet": _same_for_all("regression on attention log-determinants", logdet),
    "lookback": _same_for_all("regression on attention to the prompt", lookback),
    "lapeigvals": _same_for_all("regression on Laplacian eigenvalues", LapEigvals),
    "probe_last_prompt": _probe("probe at the last prompt token", "last_prompt"),
    "probe_first_answer": _probe("probe at the first answer token", "first_answer"),
    "probe_last_answer": _probe("probe at the last answer token", "last_answer"),
    "probe_mean_answer": _probe("probe of the mean answer token", "mean_answer"),
}
