"""The area under the ROC curve, also with a weight for every record (as a bootstrap draws them)."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def auroc(
    labels: NDArray[np.generic], scores: NDArray[np.generic], weights: NDArray[np.generic] | None = None
) -> float:
    """The chance that a record of label 1 has a higher score than one of label 0; ties count half.

    NaN where there is only one class.
    """
    drawn = np.ones((1, len(labels))) if weights is None else np.asarray(weights, np.float64)[None]
    return float(aurocs(labels, scores, drawn)[0])


def aurocs(labels: NDArray[np.generic], scores: NDArray[np.generic], weights_RN: NDArray[np.generic]) -> Floats:
    """One area for each of R sets of weights: the scores are sorted once for all of them."""
    order = np.argsort(scores, kind="stable")
    ranked = np.asarray(scores, np.float64)[order]
    positive = np.asarray(labels)[order] == 1
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], len(ranked) > 0))  # the end of each group of ties
    weights = np.asarray(weights_RN)[:, order].astype(np.float64)
    ones = np.diff(np.cumsum(weights * positive, axis=1)[:, last], axis=1, prepend=0)
    below = np.cumsum(weights * ~positive, axis=1)[:, last]
    zeros = np.diff(below, axis=1, prepend=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (ones * (below - zeros / 2)).sum(axis=1) / (ones.sum(axis=1) * zeros.sum(axis=1))
