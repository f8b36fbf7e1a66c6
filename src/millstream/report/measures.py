"""Numbers and curves of one detector's scores. Label 1, the answer is wrong, is what is to be found.

Those of many sets of weights at once (`..s`) take how often each record was drawn: R sets of N counts.
"""

import numpy as np
from numpy.typing import NDArray

from millstream.report.results import Curve

# R sets of weights, N records, G groups of records with equal scores

Floats = NDArray[np.float64]
Labels = NDArray[np.int8]
Counts = NDArray[np.generic]

MAX_POINTS = 500  # of a curve: more would not be seen


def average_precision(labels: Labels, scores: Floats) -> float:
    """The area under precision over recall, in steps (AUPR)."""
    return float(average_precisions(labels, scores, _once(labels))[0])


def average_precisions(labels: Labels, scores: Floats, counts_RN: Counts) -> Floats:
    found_RG, total_RG = _tally(labels, -scores, counts_RN)
    precision_RG = found_RG / np.maximum(total_RG, 1)
    return (np.diff(found_RG, axis=1, prepend=0) * precision_RG).sum(axis=1) / found_RG[:, -1]


def best_threshold(labels: Labels, scores: Floats) -> float:
    """The score from which on to say "wrong" for the highest F1; the highest such score."""
    found_G, total_G, last = _sweep(labels, scores)
    f1_G = 2 * found_G / (total_G + found_G[-1])
    return float(-np.sort(-scores)[last[np.argmax(f1_G)]])


def precision_recall(labels: Labels, scores: Floats, threshold: float) -> tuple[float, float]:
    """Of all called wrong, how many are; of all that are wrong, how many were called so. 0 where there are none."""
    called = scores >= threshold
    hits = int(labels[called].sum())
    return hits / max(int(called.sum()), 1), hits / max(int(labels.sum()), 1)


def f1_score(labels: Labels, scores: Floats, threshold: float) -> float:
    return float(f1_scores(labels, scores, threshold, _once(labels))[0])


def f1_scores(labels: Labels, scores: Floats, threshold: float, counts_RN: Counts) -> Floats:
    called = (scores >= threshold).astype(np.float64)
    wrong = labels.astype(np.float64)
    counts = np.asarray(counts_RN, np.float64)
    return 2 * (counts @ (called * wrong)) / np.maximum(counts @ (called + wrong), 1)


def fpr_at_tpr(labels: Labels, scores: Floats, tpr: float = 0.95) -> float:
    """The share of right answers called wrong, when so many of the wrong ones are to be found."""
    found_G, total_G, _ = _sweep(labels, scores)
    enough = int(np.argmax(found_G >= tpr * found_G[-1] - 1e-9))
    false_G = total_G - found_G
    return float(false_G[enough] / false_G[-1])


def aurc(labels: Labels, scores: Floats) -> float:
    """The mean share of wrong answers among the k with the lowest scores, over all k. Lower is better.

    Of equal scores it is the mean over all orders.
    """
    return float(aurcs(labels, scores, _once(labels))[0])


def aurcs(labels: Labels, scores: Floats, counts_RN: Counts) -> Floats:
    wrong_RG, total_RG = _tally(labels, scores, counts_RN)
    size_RG, wrong_in_RG = np.diff(total_RG, axis=1, prepend=0), np.diff(wrong_RG, axis=1, prepend=0)
    rate_RG = wrong_in_RG / np.maximum(size_RG, 1)
    # In a group, k runs from s + 1 to e, and the share is (w + (k - s) rate) / k = rate + (w - s rate) / k:
    # its sum needs no loop over k, but the harmonic numbers. With w and s at the end of the group it is the same.
    harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, int(total_RG.max()) + 1))])
    of_k_RG = np.diff(harmonic[total_RG.astype(np.int64)], axis=1, prepend=0)
    sums = wrong_RG[:, -1] + ((wrong_RG - total_RG * rate_RG) * of_k_RG).sum(axis=1)
    return sums / total_RG[:, -1]


def prr(labels: Labels, scores: Floats) -> float:
    """The prediction rejection ratio: 1 for an order that keeps all right answers longest, 0 for a random one."""
    base = float(labels.mean())
    return (base - aurc(labels, scores)) / (base - aurc(labels, labels.astype(np.float64)))


def roc_curve(labels: Labels, scores: Floats) -> Curve:
    """False positive rate, true positive rate."""
    found_G, total_G, _ = _sweep(labels, scores)
    false_G = total_G - found_G
    return _curve(np.append(0.0, false_G / false_G[-1]), np.append(0.0, found_G / found_G[-1]))


def precision_curve(labels: Labels, scores: Floats) -> Curve:
    """Recall, precision."""
    found_G, total_G, _ = _sweep(labels, scores)
    precision_G = found_G / total_G
    return _curve(np.append(0.0, found_G / found_G[-1]), np.append(precision_G[0], precision_G))


def risk_coverage(labels: Labels, scores: Floats) -> Curve:
    """The share of answers kept, those of the lowest scores first, and the share of wrong ones among them."""
    wrong_RG, total_RG = _tally(labels, scores, _once(labels))
    return _curve(total_RG[0] / len(labels), wrong_RG[0] / total_RG[0])


def _once(labels: Labels) -> Counts:
    return np.ones((1, len(labels)), np.int64)


def _tally(labels: Labels, scores: Floats, counts_RN: Counts) -> tuple[Floats, Floats]:
    """Wrong answers, and all, up to and with each group of equal scores, from the lowest score on."""
    order, last = _groups(scores)
    counts = np.asarray(counts_RN)[:, order].astype(np.float64)
    ends = slice(None) if len(last) == len(scores) else last  # without ties there is nothing to pick
    total_RG = np.cumsum(counts, axis=1)[:, ends]
    counts *= labels[order]
    return np.cumsum(counts, axis=1)[:, ends], total_RG


def _sweep(labels: Labels, scores: Floats) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """The same from the highest score on, of every record once; and the place of each group's last."""
    wrong_RG, total_RG = _tally(labels, -scores, _once(labels))
    return wrong_RG[0], total_RG[0], _groups(-scores)[1]


def _groups(scores: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    order = np.argsort(scores, kind="stable")
    ranked = scores[order]
    return order, np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))


def _curve(x: Floats, y: Floats) -> Curve:
    kept = np.unique(np.linspace(0, len(x) - 1, min(len(x), MAX_POINTS)).round().astype(np.int64))
    return Curve(x[kept].tolist(), y[kept].tolist())
