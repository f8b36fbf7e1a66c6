"""`toha`: the topological divergence of the answer from the prompt, averaged over a few heads (arXiv 2504.10063).

TOHA (Bazarova et al. 2025): heads are ranked by how much larger the divergence is in wrong answers, and the best few
are averaged; how many is chosen on validation. Reads `topology`.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from millstream.core.collection import Collection
from millstream.core.features import fields
from millstream.core.split import LABEL
from millstream.report.measures import auroc
from millstream.traces.detectors.logistic import Scores, as_tensor, binary_labels, check_finite, reader
from millstream.training.task import Arrays, FitResources, Moments

# B batch, L layers, H heads, F = L * H

MOST_HEADS = 10
_FEATURE = fields("topology")


class Toha:
    """The mean divergence of a few heads; higher means wrong."""

    probabilities = False

    def __init__(self, resources: FitResources) -> None:
        self.fields: Sequence[str] = ["topology"]
        self.arrays: Arrays = {}
        self.chosen: dict[str, object] = {}
        self._resources = resources

    def fit(self, train: Collection, val: Collection) -> None:
        binary_labels(train, "training")
        labels = binary_labels(val, "validation")
        by_label, num_heads = Moments(), 1
        for batch in reader(train, _FEATURE, self._resources, labels=True):
            rows_BF = check_finite(_divergences(batch), batch, _FEATURE)
            by_label.add(rows_BF, cast(Tensor, batch[LABEL]), num_groups=2)
            num_heads = cast(Tensor, batch["topology"]).shape[2]
        assert by_label.mean is not None
        gap_F = (by_label.mean[1] - by_label.mean[0]).numpy()
        ranked = np.argsort(-gap_F, kind="stable")[:MOST_HEADS]
        auroc_by_count = [auroc(labels, scores) for scores in self._means(val, ranked).T]
        count = int(np.argmax(auroc_by_count)) + 1
        self.arrays = {"heads": ranked[:count]}
        heads = [list(divmod(int(head), num_heads)) for head in ranked[:count]]
        self.chosen = {"heads": heads, "val_auroc": max(auroc_by_count), "auroc_by_heads": auroc_by_count}

    def score(self, collection: Collection) -> Scores:
        return self._means(collection, np.asarray(self.arrays["heads"], np.int64))[:, -1]

    def _means(self, collection: Collection, heads: np.ndarray) -> Scores:
        """[N, heads]: the mean of the first head, of the first two, and so on."""
        batches = reader(collection, _FEATURE, self._resources)
        picked = [_divergences(batch)[:, as_tensor(heads)] for batch in batches]
        found_NF = torch.cat([torch.zeros(0, len(heads)), *picked]).double().numpy()
        return found_NF.cumsum(1) / np.arange(1, len(heads) + 1)


def _divergences(batch: Mapping[str, object]) -> Tensor:
    return cast(Tensor, batch["topology"]).float().flatten(1)
