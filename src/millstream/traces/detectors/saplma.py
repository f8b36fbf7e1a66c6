"""`saplma`: a net of three hidden layers on the state of the last answer token (Azaria and Mitchell 2023, 2304.13734).

SAPLMA: 256, 128 and 64 units with ReLU, a sigmoid; the layer is chosen on validation. Reads a few layers of `states`,
or of `hidden` with `prompt_len` and `answer_len`.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from millstream.core.features import Feature
from millstream.traces.detectors.layer_nets import LayerLinear, LayerNet
from millstream.traces.detectors.states import last_answer
from millstream.training.task import Batch, Moments

# B batch, L layers, D hidden

WIDTHS = (256, 128, 64)


class Saplma(LayerNet):
    """Takes `layers` [B, L, D]."""

    lr = 1e-3

    def __init__(self, *, layers: Sequence[int], dim: int) -> None:
        super().__init__(WIDTHS[0], layers=layers, dim=dim)
        sizes = (dim, *WIDTHS, 1)
        self.steps = nn.ModuleList(LayerLinear(len(layers), *pair) for pair in pairwise(sizes))

    def observe(self, batch: Batch, moments: dict[str, Moments]) -> None:
        rows_BLD = batch["layers"]
        group = torch.arange(rows_BLD.shape[1]).repeat(len(rows_BLD))
        moments["scale"].add(rows_BLD.flatten(0, 1), group, num_groups=rows_BLD.shape[1])

    def by_each(self, batch: Batch) -> Tensor:
        found = cast(Tensor, self.scale(batch["layers"]))
        for place, step in enumerate(self.steps):
            found = step(found.relu() if place else found)
        return found[:, :, 0].sigmoid()

    def loss_of(self, scores_BL: Tensor, target_B1: Tensor) -> Tensor:
        return functional.binary_cross_entropy(scores_BL, target_B1.expand_as(scores_BL), reduction="none")


def features_of(layers: Sequence[int], *, field: str) -> list[Feature]:
    return [last_answer(layers, field=field)]


def build(example: Mapping[str, Tensor], *, layers: Sequence[int]) -> Saplma:
    return Saplma(layers=layers, dim=example["layers"].shape[2])
