"""`kmer-exact` at work: reads -> the few classes each may be of. Without torch, in the threads that read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from millstream.core.batches import Batch
from millstream.core.features import Feature
from millstream.reads.evidence import LEAST_VOTE
from millstream.reads.kmers.hits import FEATURES, ChosenKmers, Floats, Scoring, find_hits, whole_reads
from millstream.reads.kmers.sets import PARTS, KmerSets
from millstream.reads.mapping import CLASS, PROBABILITY, prediction_column
from millstream.reads.qualities import Masked
from millstream.reads.syncmers import Syncmers

SYNCMERS = Syncmers(k=21, s=16)  # one in three k-mers
AT_ONCE = 4096
CLASSES, LIKELY = "classes", "likely"
WEIGHTS = ("inner.weight", "inner.bias", "outer.weight", "outer.bias")


class Predictions(NamedTuple):
    """By name, as `Assignments.choose` takes them; and [row, K] the plausible classes, the most probable one first."""

    values: dict[str, NDArray[Any]]
    classes: NDArray[np.integer]
    likely: Floats


@dataclass(frozen=True)
class Matches:
    """`classes` [read, BEST], -1 for none, and how `likely` they are."""

    sets: KmerSets
    scoring: Scoring
    num_classes: int

    @property
    def fields(self) -> list[str]:
        return SYNCMERS.fields

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        found = cast("Mapping[str, NDArray[Any]]", SYNCMERS(batch))
        chosen = ChosenKmers(found["kmers"], found["places"], found["starts"])
        pieces = whole_reads(found["lengths"].astype(np.int64))
        hits = find_hits(chosen, pieces, self.sets, by=SYNCMERS, num_classes=self.num_classes)
        return {CLASSES: hits.classes, LIKELY: self.scoring.likely(hits)}


class KmerMatcher:
    """Predicts from the saved tensors of a `KmerExact` what its `ReadPredictions` would."""

    at_once = AT_ONCE
    needs_tensors = False

    @staticmethod
    def fits(tensors: Mapping[str, NDArray[Any]]) -> bool:
        """Whether these are such tensors, and not those of an older version."""
        return {*WEIGHTS, *PARTS} == set(tensors) and tensors[WEIGHTS[0]].shape[1] == FEATURES

    def __init__(
        self,
        tensors: Mapping[str, NDArray[Any]],
        num_classes: int,
        ranks: Mapping[str, NDArray[np.int64]],
        mates: int,
        min_quality: int,
    ) -> None:
        inner, inner_bias, outer, outer_bias = (tensors[name] for name in WEIGHTS)
        sets = KmerSets(*(tensors[name] for name in PARTS))
        matches = Matches(sets, Scoring(inner, inner_bias, outer[0], outer_bias), num_classes)
        self.features: Sequence[Feature] = [Masked(matches, min_quality) if min_quality else matches]
        self._num_classes, self._ranks, self._mates = num_classes, ranks, mates

    def __call__(self, batch: Mapping[str, object], /) -> Predictions:
        classes = cast("NDArray[np.int32]", batch[CLASSES])
        likely = cast(Floats, batch[LIKELY])
        if self._mates > 1:
            classes, likely = self._of_mates(classes, likely)
        order = np.argsort(-likely, axis=1, kind="stable")
        classes, likely = np.take_along_axis(classes, order, axis=1), np.take_along_axis(likely, order, axis=1)
        values: dict[str, NDArray[Any]] = {CLASS: np.maximum(classes[:, 0], 0), PROBABILITY: likely[:, 0]}
        for name, of_class in self._ranks.items():
            taxa = np.where(classes >= 0, of_class[classes], -1)
            sums = _merged(taxa, likely)
            best = sums.argmax(axis=1)[:, None]
            column = prediction_column(name)
            values[column] = np.maximum(np.take_along_axis(taxa, best, axis=1)[:, 0], 0)
            values[f"{column}_{PROBABILITY}"] = np.take_along_axis(sums, best, axis=1)[:, 0]
        return Predictions(values, classes, likely)

    def _of_mates(self, classes: NDArray[np.int32], likely: Floats) -> tuple[NDArray[np.int32], Floats]:
        """The product of what mates say; classes that a mate does not name have LEAST_VOTE, and so has no class."""
        num_pairs, count = len(classes) // self._mates, classes.shape[1]
        is_voting = (classes[:, 0] >= 0).reshape(num_pairs, self._mates)
        none = 1 - likely.reshape(num_pairs, self._mates, count).sum(axis=2)
        keys = classes.reshape(num_pairs, -1)
        is_named = np.stack([_first(keys, place) for place in range(keys.shape[1])], axis=1)
        votes, vote_of_none = is_named.astype(np.float64), np.ones(num_pairs)
        for mate in range(self._mates):
            own = slice(mate * count, (mate + 1) * count)
            is_same = keys[:, :, None] == keys[:, None, own]
            found = (is_same * likely.reshape(num_pairs, -1)[:, None, own]).sum(axis=2)
            votes *= np.where(is_voting[:, mate : mate + 1], np.maximum(found, LEAST_VOTE), 1)
            vote_of_none *= np.where(is_voting[:, mate], np.maximum(none[:, mate], LEAST_VOTE), 1)
        others = (self._num_classes - is_named.sum(axis=1)) * LEAST_VOTE ** is_voting.sum(axis=1)
        total = votes.sum(axis=1) + vote_of_none + others
        return np.where(is_named, keys, -1), (votes / total[:, None]).astype(np.float32)


def _first(keys: NDArray[np.integer], place: int) -> NDArray[np.bool_]:
    """[row]: whether the key at this place is the first of its kind in its row, and not below 0."""
    return ~(keys[:, :place] == keys[:, place : place + 1]).any(axis=1) & (keys[:, place] >= 0)


def _merged(keys: NDArray[np.integer], likely: Floats) -> Floats:
    """[row, K]: the sum over equal keys of a row, at the first of them; 0 elsewhere, and for keys below 0."""
    sums = np.zeros_like(likely)
    for place in range(keys.shape[1]):
        sums[:, place] = (likely * (keys == keys[:, place : place + 1])).sum(axis=1) * _first(keys, place)
    return sums
