"""Measures of read classifiers against scikit-learn, with reads of no known class and absent classes."""

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, precision_recall_fscore_support

from millstream.reads.report import predictions
from millstream.reads.report.predictions import ThresholdCurve, confusion, draws_of, tally
from millstream.report.measures import macro_f1, mean

Codes = NDArray[np.int64]


def made(
    seed: int, *, size: int = 500, num_classes: int = 7, unknown: bool = True, unclassified: bool = False
) -> tuple[Codes, Codes, Codes]:
    """Labels without the class 2, predictions without 3, and probabilities with ties; 0 for unclassified reads (-1)."""
    rng = np.random.default_rng(seed)
    labels = rng.choice([label for label in range(-1 if unknown else 0, num_classes) if label != 2], size)
    found = np.where(rng.random(size) < 0.6, labels, rng.integers(num_classes, size=size))
    found[(found == 3) | (found < 0)] = 4
    chances = rng.integers(1, 50, size) / 50
    if unclassified:
        none = rng.random(size) < 0.2
        found[none], chances[none] = -1, 0
    return labels, found, chances


@pytest.mark.parametrize(("seed", "unknown", "unclassified"), list(product(range(3), *2 * [(True, False)])))
def test_accuracy_and_f1_equal_scikit_learn_on_reads_of_known_classes(seed: int, unknown: bool, unclassified: bool):
    labels, found, _ = made(seed, unknown=unknown, unclassified=unclassified)
    known = labels >= 0
    present = np.unique(labels[known])
    counts = tally(labels, found, 7)
    assert counts.accuracy[0] == pytest.approx(accuracy_score(labels[known], found[known]))
    expected = f1_score(labels[known], found[known], labels=present, average="macro", zero_division=0)
    assert counts.macro_f1[0] == pytest.approx(expected) == pytest.approx(macro_f1(labels, found))
    precision, recall, f1, support = precision_recall_fscore_support(
        labels[known], found[known], labels=range(7), zero_division=np.nan
    )
    assert np.array_equal(counts.true[0], support)
    for mine, theirs in ((counts.precision, precision), (counts.recall, recall)):
        assert mine[0] == pytest.approx(theirs, nan_ok=True)
    assert counts.f1[0][present] == pytest.approx(f1[present])
    assert np.isnan(counts.recall[0, 2]) and np.isnan(counts.precision[0, 3]) and counts.f1[0, 3] == 0


def test_a_class_without_reads_and_predictions_has_no_f1():
    counts = tally(np.array([0, 0, 1]), np.array([0, 1, 1]), 5)
    assert np.isnan(counts.f1[0, 2:]).all() and counts.macro_f1[0] == pytest.approx(2 / 3)


def test_without_reads_of_known_classes_measures_are_nan():
    counts = tally(np.array([-1, -1]), np.array([0, 1]), 2)
    assert np.isnan(counts.accuracy[0]) and np.isnan(counts.macro_f1[0])


@pytest.mark.parametrize(("most", "unclassified"), list(product([4_000_000, 1], [True, False])))
def test_the_confusion_matrix_equals_scikit_learn(most: int, unclassified: bool):
    labels, found, _ = made(1, unclassified=unclassified)
    cells = confusion(labels, found, 7, max_dense=most)
    expected = confusion_matrix(labels, found, labels=[*range(7), -1])
    assert np.array_equal(cells.dense(7), expected)
    assert np.array_equal(cells.unknown(7), expected[-1, :7])
    one, other = cells.tally(7), tally(labels, found, 7)
    assert all(np.array_equal(getattr(one, name), getattr(other, name)[0]) for name in ("true", "assigned", "hits"))


def brute(labels: Codes, found: Codes, chances: NDArray[np.float64], threshold: float) -> tuple[float, float, float]:
    called, right = chances >= threshold, found == labels
    return called.mean(), right[called].mean(), (right & called).sum() / (labels >= 0).sum()


@pytest.mark.parametrize("seed", range(3))
def test_classified_unknown_reads_are_errors_at_every_threshold(seed: int):
    labels, found, chances = made(seed)
    curve = predictions.threshold_curve(labels, found == labels, chances)
    assert np.array_equal(curve.threshold, np.unique(chances)[::-1])
    for place, threshold in enumerate(curve.threshold.tolist()):
        expected = brute(labels, found, chances, threshold)
        assert (curve.coverage[place], curve.precision[place], curve.recall[place]) == pytest.approx(expected)
        at = predictions.at_threshold(labels, found == labels, chances, threshold)
        assert (at.coverage, at.precision, at.recall) == pytest.approx(expected)
        assert at.unknown == pytest.approx((chances[labels < 0] >= threshold).mean())
    assert curve.coverage[-1] == 1


def test_unclassified_reads_are_below_every_threshold():
    labels, found, chances = made(0, unclassified=True)
    right = (found == labels) & (labels >= 0)
    assert ((labels < 0) & (found < 0)).any()
    curve = predictions.threshold_curve(labels, right, chances)
    assert curve.threshold[-1] > 0 and curve.coverage[-1] == (found >= 0).mean()
    at = predictions.at_threshold(labels, right, chances, 0.0)
    assert (at.coverage, at.precision, at.recall) == (curve.coverage[-1], curve.precision[-1], curve.recall[-1])
    assert at.unknown == (found[labels < 0] >= 0).mean()


def test_a_model_that_classifies_nothing_has_no_threshold():
    curve = predictions.threshold_curve(np.zeros(3, np.int64), np.zeros(3, bool), np.zeros(3))
    assert curve.coverage.tolist() == curve.recall.tolist() == [0] and curve.loosest(0.5) is None


def test_the_loosest_threshold_is_the_lowest_with_enough_precision():
    numbers = np.array([0.9, 0.8, 0.7, 0.6])
    curve = ThresholdCurve(numbers, numbers, precision=np.array([1.0, 0.94, 0.96, 0.5]), recall=numbers)
    assert curve.loosest(0.95) == 0.7 and curve.loosest(0.4) == 0 and curve.loosest(1.01) is None
    assert curve.loosest(0.95, coverage=0.7) == 0.7 and curve.loosest(0.99, coverage=0.95) is None


def test_a_threshold_above_all_probabilities_classifies_nothing():
    at = predictions.at_threshold(np.array([0, 1]), np.array([True, False]), np.array([0.5, 0.6]), 0.9)
    assert at.coverage == at.recall == 0 and np.isnan(at.precision) and np.isnan(at.unknown)


def test_a_thinned_curve_keeps_its_ends():
    labels = np.zeros(5000, np.int64)
    chances = np.linspace(1, 5000, 5000) / 5000
    curve = predictions.threshold_curve(labels, labels == 0, chances)
    few = curve.thinned()
    assert len(few.threshold) == predictions.MAX_POINTS
    assert (few.threshold[0], few.threshold[-1], few.coverage[-1]) == (1, 1 / 5000, 1)


def test_abundance_error_is_the_l1_distance_of_profiles_of_classified_and_of_known_reads():
    labels, found, _ = made(2, unclassified=True)
    true = np.array([(labels[labels >= 0] == label).mean() for label in range(7)])
    predicted = np.array([(found[found >= 0] == label).mean() for label in range(7)])
    assert confusion(labels, found, 7).abundance_error(7) == pytest.approx(np.abs(true - predicted).sum())
    assert confusion(labels, labels, 7).abundance_error(7) == 0  # reads of no known class are left unclassified


def test_unclassified_reads_have_no_abundance():
    labels = np.repeat(np.arange(4), 100)
    found = np.where(np.arange(400) % 2, labels, -1)  # half of the reads of every class
    assert confusion(labels, found, 4).abundance_error(4) == pytest.approx(0)
    found[:200] = -1  # and all of two classes
    assert confusion(labels, found, 4).abundance_error(4) == pytest.approx(1.0)
    assert confusion(labels, np.full(400, -1), 4).abundance_error(4) == 1
    assert confusion(labels, 3 - labels, 4).abundance_error(4) == pytest.approx(0)
    assert confusion(labels, np.zeros(400, np.int64), 4).abundance_error(4) == pytest.approx(1.5)


# -- draws


def test_the_value_is_of_all_reads_and_draws_vary_around_it():
    labels, found, _ = made(3, size=900)
    accuracy, macro_f1 = draws_of(900, resamples=2000).accuracy_and_f1(labels, found, 7)
    counts = tally(labels, found, 7)
    assert (accuracy.value, macro_f1.value) == (counts.accuracy[0], counts.macro_f1[0])
    known = int((labels >= 0).sum())
    assert accuracy.drawn.std() == pytest.approx(np.sqrt(accuracy.value * (1 - accuracy.value) / known), rel=0.1)
    assert abs(accuracy.drawn.mean() - accuracy.value) < 0.005


def test_groups_of_reads_have_the_spread_of_single_reads():
    labels, found, _ = made(4, size=5000)
    wide = [draws_of(5000, resamples=500, max_groups=most, number=1) for most in (500, 5000)]
    accuracy, macro_f1 = zip(*(draws.accuracy_and_f1(labels, found, 7) for draws in wide), strict=True)
    for grouped, single in (accuracy, macro_f1):
        assert grouped.value == pytest.approx(single.value)
        assert grouped.drawn.std() == pytest.approx(single.drawn.std(), rel=0.15)


def test_models_share_the_draws_of_a_split_and_splits_are_independent():
    one, again, other = (draws_of(3000, resamples=5, number=number) for number in (0, 0, 1))
    assert np.array_equal(one.groups, again.groups) and np.array_equal(one.counts_RG, again.counts_RG)
    assert not np.array_equal(one.groups, other.groups)
    assert np.bincount(one.groups).tolist() == [3] * 1000
    assert (one.counts_RG.sum(axis=1) == 1000).all()


def test_models_are_compared_on_the_same_draws():
    labels, found, _ = made(5, size=2000)
    better = np.where(np.arange(2000) % 20 == 0, labels, found) % 7
    draws = draws_of(2000, resamples=500)
    (a, _), (b, _) = (draws.accuracy_and_f1(labels, some, 7) for some in (better, found))
    difference = a - b
    assert difference.drawn.std() < 0.5 * np.hypot(a.drawn.std(), b.drawn.std())
    both = mean([a, b])
    assert both.value == pytest.approx((a.value + b.value) / 2) and len(both.drawn) == 500
