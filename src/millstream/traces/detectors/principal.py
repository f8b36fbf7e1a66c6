"""Principal components of rows that come in batches."""

from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millstream.errors import MissingExtra

# N rows, F features, C components


@dataclass(frozen=True)
class Components:
    """The directions of the largest variance."""

    mean: NDArray[np.float32]  # [F]
    components: NDArray[np.float32]  # [C, F]
    strengths: NDArray[np.float32]  # [C]: singular values


class Principal:
    """Fits in one pass, in chunks; scikit-learn needs at least as many rows per chunk as components."""

    def __init__(self, num_components: int, *, needed_by: str) -> None:
        try:
            from sklearn.decomposition import IncrementalPCA  # pyright: ignore[reportMissingTypeStubs]
        except ImportError:
            raise MissingExtra(f"{needed_by} needs scikit-learn: pip install 'millstream[train]'") from None
        self._pca = cast(_PCA, IncrementalPCA(num_components))
        self._num_components = num_components
        self._waiting: list[Tensor] = []

    def add(self, rows_NF: Tensor) -> None:
        self._waiting.append(rows_NF)
        if sum(map(len, self._waiting)) >= self._num_components:
            self._fit()

    def found(self) -> Components:
        if self._waiting:
            self._fit()
        fitted = (self._pca.mean_, self._pca.components_, self._pca.singular_values_)
        return Components(*(one.astype(np.float32) for one in fitted))

    def _fit(self) -> None:
        self._pca.partial_fit(torch.cat(self._waiting).numpy())
        self._waiting = []


class _PCA(Protocol):
    """The interface used of scikit-learn's IncrementalPCA, which has no types."""

    mean_: NDArray[np.float64]
    components_: NDArray[np.float64]
    singular_values_: NDArray[np.float64]

    def partial_fit(self, X: NDArray[np.float32]) -> object: ...
