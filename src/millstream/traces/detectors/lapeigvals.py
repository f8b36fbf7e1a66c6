"""`lapeigvals`: a regression on principal components of the largest Laplacian eigenvalues (Binkowski et al. 2025).

LapEigvals (arXiv 2502.17598): the attention of every head as a graph. Reads `laplacian`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from millstream.core.collection import Collection
from millstream.core.features import fields
from millstream.errors import MissingExtra
from millstream.traces.detectors.logistic import (
    Inputs,
    Scores,
    as_tensor,
    binary_labels,
    check_finite,
    fit_logistic,
    reader,
    score_logistic,
)
from millstream.training.task import Arrays, FitResources

# B batch, L layers, H heads, E eigenvalues, F = L * H * E features, C components

TOP = (5, 10)  # numbers of largest eigenvalues per head to choose from
_COMPONENTS = 512


class LapEigvals:
    """LapEigvals: a regression on principal components of the largest Laplacian eigenvalues of all heads."""

    probabilities = True

    def __init__(self, resources: FitResources) -> None:
        self.fields: Sequence[str] = ["laplacian"]
        self.arrays: Arrays = {}
        self.chosen: dict[str, object] = {}
        self._resources = resources

    def fit(self, train: Collection, val: Collection) -> None:
        binary_labels(train, "training")
        found = [_principal(train, top, self._resources) for top in TOP]
        inputs = Inputs(fields("laplacian"), _Projection(found), axis="top_k", names=TOP)
        arrays, chosen = fit_logistic(train, val, inputs=inputs, resources=self._resources)
        best = found[int(arrays["group"])]
        self.arrays = {
            **{name: arrays[name][: len(best.components)] for name in ("mean", "factor", "weights")},
            "bias": arrays["bias"],
            "group": np.array(0),  # only the best is kept
            "top_k": np.array(best.top),
            "pca_mean": best.mean,
            "pca_components": best.components,
        }
        self.chosen = {**chosen, "components": len(best.components)}

    def score(self, collection: Collection) -> Scores:
        mean, components = (cast("NDArray[np.float32]", self.arrays[name]) for name in ("pca_mean", "pca_components"))
        best = _Principal(int(self.arrays["top_k"]), mean, components)
        inputs = Inputs(fields("laplacian"), _Projection([best]))
        return score_logistic(collection, self.arrays, inputs=inputs, resources=self._resources)


@dataclass(frozen=True)
class _Principal:
    """Principal components of the `top` largest eigenvalues."""

    top: int
    mean: NDArray[np.float32]  # [F]
    components: NDArray[np.float32]  # [C, F]


@dataclass(frozen=True)
class _Projection:
    """Projects eigenvalues on their components: one group per choice of `top`, the smaller padded with zeros."""

    choices: Sequence[_Principal]

    def __call__(self, batch: Mapping[str, object]) -> Tensor:
        width = max(len(choice.components) for choice in self.choices)
        groups: list[Tensor] = []
        for choice in self.choices:
            mean_F, components_CF = as_tensor(choice.mean), as_tensor(choice.components)
            x_BC = (_eigenvalues(batch, choice.top) - mean_F) @ components_CF.T
            groups.append(functional.pad(x_BC, (0, width - x_BC.shape[1])))
        return torch.stack(groups, dim=1)


def _principal(train: Collection, top: int, resources: FitResources) -> _Principal:
    """Fit in one pass."""
    pca: _PCA | None = None
    waiting: list[Tensor] = []  # scikit-learn needs at least as many rows at once as components
    for batch in reader(train, fields("laplacian"), resources):
        rows_BF = check_finite(_eigenvalues(batch, top), batch, fields("laplacian"))
        num_components = max(min(_COMPONENTS, rows_BF.shape[1], len(train) // 2), 1)
        pca = pca or _pca(num_components)
        waiting.append(rows_BF)
        if sum(map(len, waiting)) >= num_components:
            pca.partial_fit(torch.cat(waiting).numpy())
            waiting = []
    assert pca is not None, "half of the records are enough for the first chunk"
    if waiting:
        pca.partial_fit(torch.cat(waiting).numpy())
    return _Principal(top, pca.mean_.astype(np.float32), pca.components_.astype(np.float32))


class _PCA(Protocol):
    """The interface used of scikit-learn's IncrementalPCA, which has no types."""

    mean_: NDArray[np.float64]
    components_: NDArray[np.float64]

    def partial_fit(self, X: NDArray[np.float32]) -> object: ...


def _pca(num_components: int) -> _PCA:
    try:
        from sklearn.decomposition import IncrementalPCA  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        raise MissingExtra("lapeigvals needs scikit-learn: pip install 'millstream[train]'") from None
    return cast(_PCA, IncrementalPCA(num_components))


def _eigenvalues(batch: Mapping[str, object], top: int) -> Tensor:
    """[B, F]: the `top` largest of every layer and head; they are stored in descending order."""
    laplacian_BLHE = cast(Tensor, batch["laplacian"])
    return laplacian_BLHE[..., :top].float().flatten(1)
