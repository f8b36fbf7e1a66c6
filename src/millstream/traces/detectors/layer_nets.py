"""Nets of one layer: one per layer of a few, trained side by side; the layer is chosen on validation and kept alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from typing import TypedDict, Unpack, cast

import numpy as np
import torch
from torch import Tensor, nn

from millstream.core.collection import Collection
from millstream.core.features import Feature
from millstream.report.measures import auroc
from millstream.traces.detectors.net import DetectorNet, Scale
from millstream.traces.detectors.states import some_layers, stored_layers
from millstream.training.study import Kit, NetModel, Workplace
from millstream.training.task import Batch, FitResources, Labels, Net, Outcome, Task, labels_of

# B batch, L layers, D hidden, I inputs, O outputs, R rows (records or tokens)

DEPTHS = (0.45, 0.6, 0.75, 0.9)  # of the layers to choose from, as shares of the stored ones
_LAYER = "layer_"  # the scores by one layer, in an outcome


class LayerNet(DetectorNet):
    """The nets of several layers. All its parameters and buffers have the layers as first axis."""

    layer: Tensor
    clips = False  # the norm of one layer would depend on the others

    def __init__(self, width: int, *, layers: Sequence[int], dim: int) -> None:
        super().__init__(width, 0)
        self.register_buffer("layer", torch.tensor(layers))
        self.scale = Scale(len(layers), dim)

    def by_each(self, batch: Batch) -> Tensor:
        """[B, L]: the probability that each answer is wrong, by each layer."""
        raise NotImplementedError

    def loss_of(self, scores_BL: Tensor, target_B1: Tensor) -> Tensor:
        """[B, L]: the loss of scores."""
        raise NotImplementedError

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return self.by_each(batch).mean(1).logit(1e-6), {}

    def forward(self, batch: Batch, target_B: Tensor, weight_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum over layers, which learn nothing from each other."""
        losses_BL = self.loss_of(self.by_each(batch).float(), target_B.float()[:, None]) * weight_B[:, None]
        return losses_BL.mean(0).sum(), {self.loss_name: losses_BL.detach().mean()}


class LayerLinear(nn.Module):
    """A linear layer for each layer of the language model."""

    def __init__(self, num_layers: int, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        bound = 1 / sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(num_layers, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_layers, outputs).uniform_(-bound, bound)) if bias else None

    def forward(self, rows_RLI: Tensor) -> Tensor:
        made_RLO = torch.einsum("rli,lio->rlo", rows_RLI, self.weight)
        return made_RLO if self.bias is None else made_RLO + self.bias


@dataclass(frozen=True)
class LayersOf:
    """Where layers are stored, the features that read some of them (all without any), and the net for an example."""

    field: str
    features: Callable[[Sequence[int]], Sequence[Feature]]
    build: Callable[..., Net]


class Given(TypedDict):
    """What any net is made with."""

    resources: FitResources
    place: Workplace
    folder: Path | None


class LayersModel(NetModel):
    """A net that reads some layers of a field."""

    def __init__(self, name: str, layers: LayersOf, *, task: Task, **given: Unpack[Given]) -> None:
        super().__init__(name, Kit(layers.features([]), layers.build), task=task, **given)
        self._layers = layers

    def _read(self, layers: Sequence[int], build: Callable[..., Net]) -> None:
        """Read these layers of records."""
        features = self._layers.features(layers)
        self.kit, self.scoring = Kit(features, build), features
        self.fields: Sequence[str] = list(dict.fromkeys(name for one in features for name in one.fields or ()))


class SpacedModel(LayersModel):
    """A net that reads a few layers at even steps: `layers`, counted from the last, -1, of all `num_layers`."""

    layers: Sequence[int] = ()
    num_layers = 0

    def __init__(self, name: str, layers: LayersOf, *, task: Task, most: int, **given: Unpack[Given]) -> None:
        super().__init__(name, layers, task=task, **given)
        self._most = most

    def build(self, collection: Collection) -> Net:
        self.num_layers = stored_layers(collection, self._layers.field)
        self.layers = [layer - self.num_layers for layer in some_layers(self.num_layers, self._most)]
        self._read(self.layers, self._layers.build)
        return super().build(collection)


class BestLayerModel(LayersModel):
    """Trains the nets of a few layers, and keeps the one with the best AUROC on validation."""

    def fit(self, train: Collection, val: Collection) -> None:
        count = stored_layers(train, self._layers.field)
        self._choose(tuple(dict.fromkeys(round(depth * (count - 1)) for depth in DEPTHS)))
        super().fit(train, val)
        by_layer = _aurocs(labels_of(val), self.outcome(val))
        layers = self.arrays["layer"].tolist()
        best = int(np.argmax(by_layer))
        self.arrays = {name: array[best : best + 1].copy() for name, array in self.arrays.items()}
        self.chosen |= {"layer": layers[best], "auroc_by_layer": by_layer, "layers": layers}
        self.parameters = (self.parameters or 0) // len(layers)
        self._net = None

    def restored(self, collection: Collection) -> Net:
        if self._net is None:
            self._choose(self.arrays["layer"].tolist())
        return super().restored(collection)

    def _choose(self, layers: Sequence[int]) -> None:
        self._read(layers, partial(self._layers.build, layers=layers))


def layer_scores_of(net: Net, batch: Batch) -> Mapping[str, Tensor]:
    """The probability that each answer is wrong, by each layer and by their mean."""
    scores_BL = cast(LayerNet, net).by_each(batch).float()
    return {"score": scores_BL.mean(1), **{f"{_LAYER}{n}": column for n, column in enumerate(scores_BL.unbind(1))}}


def _aurocs(labels: Labels, outcome: Outcome) -> list[float]:
    return [auroc(labels, scores.astype(np.float64)) for name, scores in outcome.items() if name.startswith(_LAYER)]


def _best_auroc(labels: Labels, outcome: Outcome) -> float:
    return max(_aurocs(labels, outcome))


LAYER_DETECTION = Task(2, "AUROC", _best_auroc, layer_scores_of)
