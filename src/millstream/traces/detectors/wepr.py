"""`wepr`: a regression on how much each of the most likely tokens contributes to the entropy of a step (2509.04492).

WEPR, learned "entropy production rate" (arXiv 2509.04492): of the 15 most likely tokens at each step, -p log p; their
mean and their maximum over the answer. Reads `topk_logprobs` and `answer_len`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from torch import Tensor

from millstream.core.batches import Batch, ColumnBatch
from millstream.errors import NotFinite
from millstream.traces.detectors.logistic import Inputs, Logistic
from millstream.traces.features import answer_rows, contributions
from millstream.training.task import FitResources

# B batch, A answer tokens of all records, concatenated, K ranks

RANKS = 15


@dataclass(frozen=True)
class EntropyByRank:
    """`contributions` [B, 2 K]: the mean over answer tokens, then the maximum, of -p log p at each rank."""

    ranks: int = RANKS

    @property
    def fields(self) -> Sequence[str]:
        return ["topk_logprobs", "answer_len"]

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        assert isinstance(batch, ColumnBatch)
        top_AK, lengths = answer_rows(batch, "topk_logprobs")
        s_AK = contributions(top_AK[:, : self.ranks])
        out_B2K = np.zeros((len(batch), 2 * s_AK.shape[1]), np.float32)
        some = lengths > 0  # `reduceat` cannot reduce empty records
        if some.any():
            starts = np.cumsum(lengths[some]) - lengths[some]
            sums = np.add.reduceat(s_AK.astype(np.float64), starts)
            out_B2K[some] = np.concatenate([sums / lengths[some, None], np.maximum.reduceat(s_AK, starts)], axis=1)
        if len(bad := np.flatnonzero(~np.isfinite(out_B2K).all(1))):
            raise NotFinite(f"record {batch.numbers[bad[0]]}: NaN in topk_logprobs. Leave it out: millstream subset")
        return {"contributions": out_B2K}


def wepr(resources: FitResources) -> Logistic:
    return Logistic(resources, inputs=Inputs(EntropyByRank(), _contributions))


def _contributions(batch: Mapping[str, object]) -> Tensor:
    return cast(Tensor, batch["contributions"])[:, None]
