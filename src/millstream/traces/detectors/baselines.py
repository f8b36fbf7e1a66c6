"""The baselines by name: single statistics, linear probes and regressions, which a trained detector should beat."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millstream.core.collection import Collection
from millstream.core.features import Feature, fields
from millstream.errors import NoDetector
from millstream.report.measures import auroc
from millstream.traces.detectors.icr import icr
from millstream.traces.detectors.lapeigvals import LapEigvals
from millstream.traces.detectors.logistic import (
    Detector,
    Inputs,
    Logistic,
    Scores,
    binary_labels,
    reader,
)
from millstream.traces.detectors.toha import Toha
from millstream.traces.detectors.wepr import wepr
from millstream.traces.features import layers, token_stats
from millstream.traces.groups import read_groups
from millstream.traces.kind import POSITIONS
from millstream.traces.store.format import QUESTION_ID
from millstream.training.task import Arrays, FitResources

# B batch, L layers, H heads, R rows (the last prompt token, then those generated), E eigenvalues, F features


def logdet(resources: FitResources) -> Logistic:
    """LLM-Check (Sriramanan et al. 2024): mean log self-attention of every layer and head."""
    return Logistic(resources, inputs=Inputs(fields("attention_logdet"), _logdets))


def lookback(resources: FitResources) -> Logistic:
    """Lookback Lens (Chuang et al. 2024): the share of attention that each head pays to the prompt, over the answer."""
    return Logistic(resources, inputs=Inputs(fields("prompt_attention", "answer_len"), lookback_ratios))


def lookback_ratios(batch: Mapping[str, object]) -> Tensor:
    """[B, 1, L * H]: the mean over the answer rows. Row 0 is the last prompt token and does not count.

    For an empty answer, the mean over all generated rows.
    """
    share_BLHR = cast(Tensor, batch["prompt_attention"]).float()
    num_rows = share_BLHR.shape[-1]
    real_BR = cast("Tensor | None", batch.get("prompt_attention_mask"))
    generated_B = torch.full((len(share_BLHR),), num_rows - 1) if real_BR is None else real_BR.sum(1) - 1
    answer_len_B = torch.as_tensor([length or 0 for length in cast("Sequence[int | None]", batch["answer_len"])])
    length_B = torch.where(answer_len_B > 0, torch.minimum(answer_len_B, generated_B), generated_B)
    row_R = torch.arange(num_rows)
    inside_BR = (row_R >= 1) & (row_R <= length_B[:, None])
    total_BLH = (share_BLHR * inside_BR[:, None, None]).sum(-1)
    return (total_BLH / length_B.clamp(min=1)[:, None, None]).flatten(1)[:, None]


def _logdets(batch: Mapping[str, object]) -> Tensor:
    logdet_BLH = cast(Tensor, batch["attention_logdet"])
    return logdet_BLH.float().flatten(1)[:, None]


# B batch, L layers, P positions, D hidden

Position = Literal["last_prompt", "first_answer", "last_answer", "mean_answer"]
Make = Callable[[FitResources, Sequence[str]], Detector]


Read = Callable[[Collection], Scores]


class Single:
    """A number per record, by `read`, with the sign for which higher means wrong on `train`.

    A record without the number gets the mean over the training split.
    """

    probabilities = False

    def __init__(self, fields: Sequence[str], name: str, read: Read, *, is_of_samples: bool = False) -> None:
        self.fields = fields
        self.arrays: Arrays = {}
        self.chosen: dict[str, object] = {}
        self.extra_tokens: float | None = 0.0
        self._name = name
        self._read, self._is_of_samples = read, is_of_samples

    def fit(self, train: Collection, val: Collection) -> None:
        labels = binary_labels(train, "training")
        values = self._read(train)
        known = ~np.isnan(values)
        if not known.any():
            raise ValueError(f"none of the {len(values)} records of the training split has a {self._name!r}")
        found = auroc(labels[known], values[known])
        direction = -1 if found < 0.5 else 1
        self.arrays = {"direction": np.array(direction), "mean": np.array(values[known].mean())}
        self.chosen = {"direction": direction, "train_auroc": max(found, 1 - found)}
        if self._is_of_samples:
            self.extra_tokens = tokens_of_samples(train)

    def score(self, collection: Collection) -> Scores:
        values = self._read(collection)
        filled = np.where(np.isnan(values), self.arrays["mean"], values)
        return filled * int(self.arrays["direction"])


def single(resources: FitResources, *, feature: Feature, key: str) -> Single:
    """The mean of a feature of each record."""

    def read(collection: Collection) -> Scores:
        batches = reader(collection, feature, resources)
        return np.concatenate([np.zeros(0), *(_means(batch[key]) for batch in batches)])

    return Single(list(feature.fields or ()), key, read)


def of_samples(name: str) -> Single:
    """A statistic of the sampled answers to the question of each record, from `groups.parquet`.

    Clusters and their entropy: semantic entropy (Kuhn et al. 2023, arXiv 2302.09664; Farquhar et al. 2024); words
    shared with samples: after SelfCheckGPT (Manakul et al. 2023, 2303.08896); EigenScore: INSIDE (Chen et al. 2024,
    2402.03744).
    """
    return Single([QUESTION_ID], name, partial(of_groups, name), is_of_samples=True)


def tokens_of_samples(collection: Collection) -> float | None:
    """What the samples of a question cost on average; None if it is unknown."""
    tokens = of_groups("sample_tokens", collection)
    return None if np.isnan(tokens).all() else float(np.nanmean(tokens))


def of_groups(name: str, collection: Collection) -> Scores:
    """A column of `groups.parquet` for the question of each record; NaN if it is unknown."""
    table = read_groups(collection.labels_file)
    if table is None:
        raise NoDetector(f"{name} needs several answers per question, and their groups.parquet")
    ids = [str(one) for one in table.column(QUESTION_ID).to_pylist()]
    known = dict(zip(ids, table.column(name).to_pylist(), strict=True))
    values = [known.get(str(one)) for one in collection.column(QUESTION_ID).to_pylist()]
    return np.array(values, np.float64)  # NaN for None


def probe(resources: FitResources, field_names: Sequence[str], *, position: Position) -> Logistic:
    """A linear probe of the best layer, on `states` if the store has them, else on `hidden`."""
    if "hidden" in field_names and "states" not in field_names:
        inputs = Inputs(layers(position), _layers, axis="layer")
    else:
        index = POSITIONS.index(position)
        inputs = Inputs(fields("states"), partial(_states, index=index), axis="layer")
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
    needs_samples: bool = False
    beyond_tiers: str = ""
    """A field it reads that no tier keeps."""


def _means(column: object) -> NDArray[np.float64]:
    """One number per record from a column of a batch: a tensor, or a list that may contain None."""
    if isinstance(column, Tensor):
        return column.double().flatten(1).mean(1).numpy() if column.ndim > 1 else column.double().numpy()
    return np.array(cast("list[float | None]", column), np.float64)  # NaN for None


def _layers(batch: Mapping[str, object]) -> Tensor:
    return cast(Tensor, batch["layers"])


def _states(batch: Mapping[str, object], *, index: int) -> Tensor:
    states_BLPD = cast(Tensor, batch["states"])
    return states_BLPD[:, :, index]


def _stats(batch: Mapping[str, object]) -> Tensor:
    return cast(Tensor, batch["stats"])[:, None]


def _same_for_all(title: str, make: Callable[[FitResources], Detector], *, extra_forwards: int = 0) -> Baseline:
    """A baseline that is made the same way for every store."""

    def make_for(resources: FitResources, field_names: Sequence[str]) -> Detector:
        return make(resources)

    return Baseline(title, make_for, extra_forwards)


def _stat(title: str, stat: str) -> Baseline:
    return _same_for_all(title, partial(single, feature=token_stats(stat), key="stats"))


def _field(title: str, name: str, *, extra_forwards: int = 0) -> Baseline:
    return _same_for_all(title, partial(single, feature=fields(name), key=name), extra_forwards=extra_forwards)


def _of_samples(title: str, name: str) -> Baseline:
    def make_for(resources: FitResources, field_names: Sequence[str]) -> Detector:
        if name not in field_names:
            kept = ", which keep their states (sample_fields=all)" if name == "eigenscore" else ""
            raise NoDetector(f"{name} needs a store with samples{kept}, labelled by millstream label")
        return of_samples(name)

    return Baseline(title, make_for, needs_samples=True)


def _probe(title: str, position: Position) -> Baseline:
    return Baseline(title, partial(probe, position=position))


BASELINES: Mapping[str, Baseline] = {
    "length": _stat("number of answer tokens", "num_tokens"),
    "sequence_logprob": _stat("log-prob of the answer", "sum_logprob"),
    "mean_logprob": _stat("mean log-prob (perplexity)", "mean_logprob"),
    "min_logprob": _stat("lowest log-prob", "min_logprob"),
    "entropy": _stat("mean token entropy", "mean_entropy"),
    "p_true": _field("the model's own P(True)", "p_true", extra_forwards=2),
    "agreement": _of_samples("agreement of samples with the answer", "agreement"),
    "num_clusters": _of_samples("number of clusters of samples", "num_clusters"),
    "semantic_entropy": _of_samples("semantic entropy of samples", "semantic_entropy"),
    "self_check": _of_samples("words shared by answer and samples", "self_check"),
    "eigenscore": _of_samples("EigenScore of the states of samples", "eigenscore"),
    "token_stats": _same_for_all("regression on token statistics", token_probe),
    "logdet": _same_for_all("regression on attention log-determinants", logdet),
    "lookback": _same_for_all("regression on attention to the prompt", lookback),
    "lapeigvals": _same_for_all("regression on Laplacian eigenvalues", LapEigvals),
    "wepr": _same_for_all("regression on entropy by rank", wepr),
    "icr": Baseline("regression on ICR scores of layers", icr),
    "toha": _same_for_all("topological divergence of a few heads", Toha)._replace(beyond_tiers="topology"),
    "probe_last_prompt": _probe("probe at the last prompt token", "last_prompt"),
    "probe_first_answer": _probe("probe at the first answer token", "first_answer"),
    "probe_last_answer": _probe("probe at the last answer token", "last_answer"),
    "probe_mean_answer": _probe("probe of the mean answer token", "mean_answer"),
}
