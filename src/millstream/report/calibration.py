"""Scores -> probabilities (Platt), and how far probabilities are from what happens."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millstream.report.measures import Floats, Labels
from millstream.report.results import Curve

NUM_BINS = 15
_MAX_STEPS = 100


@dataclass(frozen=True)
class Platt:
    """A logistic curve through scores: `platt(scores)` are probabilities of being wrong."""

    mean: float
    scale: float
    slope: float
    offset: float

    def __call__(self, scores: Floats) -> Floats:
        return _logistic(self.slope * (scores - self.mean) / self.scale + self.offset)


def fit_platt(labels: Labels, scores: Floats) -> Platt:
    """Logistic regression of labels on standardised scores.

    With Platt's targets, which are not quite 0 and 1, so that classes without overlap have a finite slope too.
    """
    mean, scale = float(scores.mean()), float(scores.std()) or 1.0
    design = np.stack([(scores - mean) / scale, np.ones(len(scores))], axis=1)
    num_wrong = int(labels.sum())
    targets = np.where(labels == 1, (num_wrong + 1) / (num_wrong + 2), 1 / (len(labels) - num_wrong + 2))
    weights = np.zeros(2)
    loss = _loss(design @ weights, targets)
    for _ in range(_MAX_STEPS):
        probabilities = _logistic(design @ weights)
        gradient = design.T @ (probabilities - targets)
        curvature = probabilities * (1 - probabilities)
        step = np.linalg.solve(design.T @ (design * curvature[:, None]) + 1e-9 * np.eye(2), gradient)
        # Newton overshoots where the curve is flat: go as far as it helps.
        while (tried := _loss(design @ (weights - step), targets)) > loss and np.abs(step).max() > 1e-12:
            step = step / 2
        weights, loss = weights - step, tried
        if np.abs(step).max() < 1e-9:
            break
    return Platt(mean, scale, float(weights[0]), float(weights[1]))


def brier(labels: Labels, probabilities: Floats) -> float:
    """The mean squared distance of probabilities from what happened."""
    return float(np.mean((probabilities - labels) ** 2))


def ece(labels: Labels, probabilities: Floats, num_bins: int = NUM_BINS) -> float:
    """The expected calibration error over bins of equal counts; equal probabilities share a bin."""
    said, happened, sizes = binned(labels, probabilities, num_bins)
    return float(np.abs(said - happened) @ sizes / len(labels))


def calibration_curve(labels: Labels, probabilities: Floats, num_bins: int = NUM_BINS) -> Curve:
    """The mean probability of each bin, and the share of wrong answers in it."""
    said, happened, _ = binned(labels, probabilities, num_bins)
    return Curve(said.tolist(), happened.tolist())


def binned(labels: Labels, probabilities: Floats, num_bins: int = NUM_BINS) -> tuple[Floats, Floats, Floats]:
    """Of each bin the mean probability, the share of labels 1, and its size."""
    bins = equal_bins(probabilities, num_bins)
    sizes = np.bincount(bins).astype(np.float64)
    return np.bincount(bins, probabilities) / sizes, np.bincount(bins, labels) / sizes, sizes


def equal_bins(values: NDArray[np.generic], num_bins: int) -> NDArray[np.int64]:
    """The bin of every value, from 0: of about equal counts, with equal values in the same one, and none empty."""
    ranked = np.sort(values)
    starts = np.unique(ranked[[len(ranked) * number // num_bins for number in range(num_bins)]])
    return np.searchsorted(starts, values, side="right") - 1


def _logistic(values: Floats) -> Floats:
    return np.exp(-np.logaddexp(0, -values))


def _loss(values: Floats, targets: Floats) -> float:
    return float(np.sum(np.logaddexp(0, values) - targets * values))
