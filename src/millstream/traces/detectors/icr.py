"""`icr`: whether the residual update of an answer token points to the tokens that it attends to (arXiv 2507.16488).

ICR Probe (Zhang et al., ACL 2025): in every layer, the Jensen-Shannon divergence between the attention to the most
attended tokens and the projection of the update on their states; as in the authors' code both are standardised, then
softmax. Here the mean over answer tokens, and a regression on the layers. From `hidden` and `attention` exactly; from
`nodes` and `edges` approximately: nodes are random projections, which about keep inner products, and edges are without
the attention of a token to itself. Also reads `prompt_len` and `answer_len`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from millstream.core.batches import Batch, ColumnBatch, Floats, as_floats
from millstream.core.record import Array
from millstream.errors import NoDetector
from millstream.traces.detectors.logistic import Inputs, Logistic
from millstream.traces.features import ANSWER, PROMPT
from millstream.training.task import FitResources

# B batch, L layers, T tokens, R answer tokens, K tokens attended to, D hidden

MOST_ATTENDED = 8  # as many as `edges` keeps
_SMALLEST = 1e-8
_NUMBERS = 1 << 23  # states converted at once


@dataclass(frozen=True)
class IcrFeature:
    """`icr` [B, L]: the mean ICR score of the answer tokens in each layer."""

    is_exact: bool

    @property
    def fields(self) -> Sequence[str]:
        return [
            *(("hidden", "attention") if self.is_exact else ("nodes", "edge_source", "edge_weight")),
            PROMPT,
            ANSWER,
        ]

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        assert isinstance(batch, ColumnBatch)
        found: list[NDArray[np.float32]] = []
        for row, number in enumerate(batch.numbers.tolist()):
            values = {name: cast("Sequence[Array | None]", batch.columns[name])[row] for name in self.fields}
            if lacking := [name for name, value in values.items() if value is None]:
                raise ValueError(f"record {number} has no {', '.join(lacking)}")
            found.append(self._record(number, cast("Mapping[str, Array]", values)))
        return {"icr": np.stack(found)}

    def _record(self, number: int, values: Mapping[str, Array]) -> NDArray[np.float32]:
        states_LTD = as_floats(values["hidden" if self.is_exact else "nodes"])
        weights = as_floats(values["attention" if self.is_exact else "edge_weight"])
        num_tokens = states_LTD.shape[1]
        if len(states_LTD) != len(weights) + 1 or weights.shape[-2] != num_tokens:
            raise ValueError(
                f"record {number}: {self.fields[0]!r} {states_LTD.shape} and {self.fields[1]!r} {weights.shape} do not "
                "match; icr needs the states of all layers and tokens"
            )
        start, count = int(values[PROMPT]), int(values[ANSWER])
        end = start + count if count else num_tokens  # for an empty answer, all tokens after the prompt
        found = np.zeros(len(weights), np.float32)
        at_once = max(1, _NUMBERS // states_LTD[0].size)
        for first in range(0, len(weights) if start < end else 0, at_once):
            some = slice(first, min(first + at_once, len(weights)))
            before_LTD = states_LTD[some].astype(np.float32)
            update_LRD = states_LTD[first + 1 : some.stop + 1, start:end] - before_LTD[:, start:end]
            if self.is_exact:
                mean_LRT = weights[some, :, start:end].mean(1, dtype=np.float32)
                source_LRK, weight_LRK = _strongest(mean_LRT)
            else:
                source_LRK = np.asarray(values["edge_source"][some, start:end], np.int64)
                weight_LRK = weights[some, start:end].astype(np.float32)
            found[some] = icr_scores(before_LTD, update_LRD, source_LRK, weight_LRK).mean(1)
        return found


def icr_scores(states_LTD: Floats, update_LRD: Floats, source_LRK: NDArray[np.int64], weight_LRK: Floats) -> Floats:
    """[L, R]: the divergence of attention and projections; a source of -1 is none."""
    lengths_LT = np.linalg.norm(states_LTD, axis=2) + _SMALLEST
    projected_LRT = update_LRD @ states_LTD.transpose(0, 2, 1) / lengths_LT[:, None]
    projected_LRK = np.take_along_axis(projected_LRT, np.maximum(source_LRK, 0), axis=2)
    p_LRK, q_LRK = (_distribution(values, source_LRK >= 0) for values in (projected_LRK, weight_LRK))
    middle_LRK = (p_LRK + q_LRK) / 2
    return (_divergence(p_LRK, middle_LRK) + _divergence(q_LRK, middle_LRK)) / 2


def icr(resources: FitResources, field_names: Sequence[str]) -> Logistic:
    if {"hidden", "attention"} <= {*field_names}:
        return Logistic(resources, inputs=Inputs(IcrFeature(True), _scores))
    if {"nodes", "edge_source"} <= {*field_names}:
        return Logistic(resources, inputs=Inputs(IcrFeature(False), _scores))
    raise NoDetector(
        "the store has neither nodes and edges (tiers graph and probe) nor hidden and attention (full), only "
        f"{', '.join(field_names)}"
    )


def _strongest(weight_LRT: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Tokens attended to most, and their weights; later tokens have none."""
    source_LRK = np.argsort(-weight_LRT, axis=2, kind="stable")[..., :MOST_ATTENDED]
    weight_LRK = np.take_along_axis(weight_LRT, source_LRK, axis=2)
    return np.where(weight_LRK > 0, source_LRK, -1), weight_LRK


def _distribution(values_LRK: Floats, is_known_LRK: NDArray[np.bool_]) -> Floats:
    """Softmax of the standardised known values of each row; 0 elsewhere."""
    count_LR1 = is_known_LRK.sum(2, keepdims=True)
    known_LRK = np.where(is_known_LRK, values_LRK, 0).astype(np.float64)
    centred_LRK = (known_LRK - known_LRK.sum(2, keepdims=True) / np.maximum(count_LR1, 1)) * is_known_LRK
    deviation_LR1 = np.sqrt((centred_LRK**2).sum(2, keepdims=True) / np.maximum(count_LR1 - 1, 1))
    raised_LRK = np.exp(centred_LRK / np.maximum(deviation_LR1, _SMALLEST)) * is_known_LRK
    return raised_LRK / np.maximum(raised_LRK.sum(2, keepdims=True), _SMALLEST)


def _divergence(p_LRK: Floats, q_LRK: Floats) -> Floats:
    """Kullback-Leibler, in nats."""
    return (p_LRK * np.log(np.where(p_LRK > 0, p_LRK, 1) / np.where(p_LRK > 0, q_LRK, 1))).sum(2)


def _scores(batch: Mapping[str, object]) -> Tensor:
    return cast(Tensor, batch["icr"])[:, None]
