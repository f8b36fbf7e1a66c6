"""Measures against scikit-learn or a slow reference; bootstrap draws are fair, paired and small."""

import tracemalloc
from collections.abc import Iterator
from itertools import permutations

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn import linear_model, metrics

from millstream.report import measures
from millstream.report.measures import (
    Interval,
    Measure,
    Resampled,
    bootstrap,
    compare,
    draw,
    holm,
    p_value,
    verdict,
)
from millstream.report.ranking import Ranking

Floats = NDArray[np.float64]
Labels = NDArray[np.int8]


def cases() -> Iterator[tuple[Labels, Floats]]:
    """Many and few records, with and without ties, with common and with rare positives."""
    for seed, (num, share, digits) in enumerate(
        [(300, 0.5, 9), (300, 0.1, 1), (41, 0.8, 0), (20, 0.5, 0), (9, 0.3, 9)]
    ):
        rng = np.random.default_rng(seed)
        labels = (rng.random(num) < share).astype(np.int8)
        labels[:2] = 0, 1
        yield labels, (rng.normal(size=num) + labels).round(digits)


def average_precision(labels: Labels, scores: Floats) -> float:
    return float(Ranking(labels, scores).tally().average_precisions()[0])


CASES = pytest.mark.parametrize(("labels", "scores"), list(cases()))


# -- ranking


@CASES
def test_average_precision_equals_scikit_learn(labels: Labels, scores: Floats):
    expected = metrics.average_precision_score(labels, scores)
    assert average_precision(labels, scores) == pytest.approx(expected)


@CASES
def test_a_record_drawn_twice_counts_as_two_records_in_every_measure(labels: Labels, scores: Floats):
    counts = np.random.default_rng(5).integers(0, 4, (3, len(labels)))
    counts[:, :2] += 1  # both classes
    tally = Ranking(labels, scores).tally(counts)
    for place, row in enumerate(counts):
        many = np.repeat(labels, row), np.repeat(scores, row)
        assert tally.aurocs()[place] == pytest.approx(metrics.roc_auc_score(*many))
        assert tally.average_precisions()[place] == pytest.approx(average_precision(*many))
        assert tally.average_precisions_of_zeros()[place] == pytest.approx(average_precision(1 - many[0], -many[1]))
        assert tally.aurcs()[place] == pytest.approx(measures.aurc(*many))
        kept = Ranking(*many).tally().risks(0.8)[0]
        assert tally.risks(0.8)[place] == pytest.approx(kept)
        f1 = measures.f1_scores(labels, scores, 0.7, row[None])[0]
        assert f1 == pytest.approx(measures.f1_score(*many, 0.7))


def slow_f1(labels: Labels, called: NDArray[np.bool_]) -> float:
    return 2 * int(labels[called].sum()) / (int(called.sum()) + int(labels.sum()))


@CASES
def test_of_equal_f1_the_highest_threshold_is_chosen(labels: Labels, scores: Floats):
    tried = {threshold: slow_f1(labels, scores >= threshold) for threshold in np.unique(scores).tolist()}
    best = max(threshold for threshold, f1 in tried.items() if f1 > max(tried.values()) - 1e-12)
    assert measures.best_threshold(labels, scores) == best


@CASES
def test_precision_recall_and_f1_at_a_threshold_equal_scikit_learn(labels: Labels, scores: Floats):
    for threshold in (scores[0], np.median(scores), scores.max() + 1):
        called = scores >= threshold
        expected = metrics.precision_recall_fscore_support(labels, called, average="binary", zero_division=0)
        found = measures.precision_recall(labels, scores, threshold), measures.f1_score(labels, scores, threshold)
        assert (*found[0], found[1]) == pytest.approx(expected[:3])


@CASES
def test_the_false_positive_rate_at_95_percent_recall_equals_scikit_learn(labels: Labels, scores: Floats):
    fpr, tpr, _ = metrics.roc_curve(labels, scores, drop_intermediate=False)
    assert measures.fpr_at_tpr(labels, scores) == pytest.approx(fpr[np.argmax(tpr >= 0.95 - 1e-9)])


def test_nineteen_of_twenty_is_95_percent():
    labels = np.array([1] * 19 + [0] * 10 + [1], np.int8)
    assert measures.fpr_at_tpr(labels, -np.arange(30.0)) == 0


@CASES
def test_the_area_under_the_roc_curve_is_the_auroc_and_other_curves_end_at_the_prevalence(
    labels: Labels, scores: Floats
):
    roc = measures.roc_curve(labels, scores)
    assert np.trapezoid(roc.y, roc.x) == pytest.approx(metrics.roc_auc_score(labels, scores))
    assert (roc.x[0], roc.y[0], roc.x[-1], roc.y[-1]) == (0, 0, 1, 1)
    for curve in (measures.precision_curve(labels, scores), measures.risk_coverage(labels, scores)):
        assert curve.x[-1] == 1
        assert curve.y[-1] == pytest.approx(labels.mean())


def test_a_thinned_curve_keeps_its_ends():
    labels, scores = next(cases())
    labels, scores = np.tile(labels, 9), np.random.default_rng(1).random(9 * len(scores))
    whole = metrics.roc_auc_score(labels, scores)
    roc = measures.roc_curve(labels, scores)
    assert len(roc.x) == len(roc.y) == measures.MAX_POINTS
    assert np.trapezoid(roc.y, roc.x) == pytest.approx(whole, abs=0.002)
    assert (roc.x[-1], roc.y[-1]) == (1, 1)


# -- rejection


def slow_aurc(labels: Labels, scores: Floats) -> float:
    """The mean share of positives among the first k, over all k and all orders of ties."""
    areas: list[float] = []
    for order in permutations(range(len(labels))):
        if (np.diff(scores[list(order)]) >= 0).all():
            kept = labels[list(order)]
            areas.append(float(np.mean([kept[:k].mean() for k in range(1, len(kept) + 1)])))
    return float(np.mean(areas))


@pytest.mark.parametrize("seed", range(4))
def test_aurc_is_the_mean_risk_over_all_coverages_and_orders_of_ties(seed: int):
    rng = np.random.default_rng(seed)
    labels, scores = rng.integers(0, 2, 6).astype(np.int8), rng.integers(0, 3, 6).astype(np.float64)
    assert measures.aurc(labels, scores) == pytest.approx(slow_aurc(labels, scores))


def test_risk_is_measured_on_the_records_with_the_lowest_scores():
    labels, scores = np.array([1, 0, 0, 1], np.int8), np.array([4.0, 1.0, 3.0, 2.0])
    curve = measures.risk_coverage(labels, scores)
    assert curve.x == [0.25, 0.5, 0.75, 1]
    assert curve.y == pytest.approx([0, 1 / 2, 1 / 3, 1 / 2])
    assert measures.aurc(labels, scores) == pytest.approx(np.mean(curve.y))


def test_prr_is_one_for_perfect_zero_for_constant_and_negative_for_reversed_scores():
    labels, scores = next(cases())
    truth = labels.astype(np.float64)
    assert measures.prr(labels, truth) == pytest.approx(1)
    assert measures.prr(labels, np.zeros(len(labels))) == pytest.approx(0)
    assert measures.prr(labels, -truth) < -0.5
    assert 0 < measures.prr(labels, scores) < 1


# -- probabilities


@CASES
def test_the_brier_score_equals_scikit_learn(labels: Labels, scores: Floats):
    probabilities = 1 / (1 + np.exp(-scores))
    assert measures.brier(labels, probabilities) == pytest.approx(metrics.brier_score_loss(labels, probabilities))


def test_ece_is_the_mean_gap_over_fifteen_bins_of_equal_counts():
    labels, scores = next(cases())
    probabilities = 1 / (1 + np.exp(-scores))
    gaps: list[float] = []
    for members in np.array_split(np.argsort(probabilities), 15):
        gaps.append(abs(probabilities[members].mean() - labels[members].mean()) * len(members))
    assert measures.ece(labels, probabilities) == pytest.approx(sum(gaps) / len(labels))
    curve = measures.calibration_curve(labels, probabilities)
    assert len(curve.x) == 15 and list(curve.x) == sorted(curve.x)


def test_equal_probabilities_share_a_bin_so_the_base_rate_is_calibrated():
    labels = (np.random.default_rng(0).random(500) < 0.3).astype(np.int8)
    assert measures.ece(labels, np.full(500, labels.mean())) == pytest.approx(0)
    assert measures.ece(labels, np.full(500, 0.9)) == pytest.approx(0.9 - labels.mean())


def test_bins_have_about_equal_counts_and_follow_the_order_of_values():
    values = np.array([5, 1, 1, 2, 9, 2, 7, 1])
    assert measures.equal_bins(values, 4).tolist() == [1, 0, 0, 1, 2, 1, 2, 0]
    assert set(measures.equal_bins(np.zeros(7), 4).tolist()) == {0}


@CASES
def test_platt_scaling_is_logistic_regression_on_smoothed_targets(labels: Labels, scores: Floats):
    num_wrong, num_right = int(labels.sum()), int((1 - labels).sum())
    target = np.where(labels == 1, (num_wrong + 1) / (num_wrong + 2), 1 / (num_right + 2))
    both = np.concatenate([scores, scores])[:, None]
    regression = linear_model.LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000)
    regression.fit(both, [1] * len(labels) + [0] * len(labels), sample_weight=np.concatenate([target, 1 - target]))
    expected = regression.predict_proba(scores[:, None])[:, 1]
    assert measures.fit_platt(labels, scores)(scores) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("scale", [1e-6, 1, 1e6])
def test_platt_scaling_stays_finite_when_classes_do_not_overlap(scale: float):
    labels = np.array([0] * 50 + [1] * 50, np.int8)
    platt = measures.fit_platt(labels, scale * (np.arange(100.0) + 300.0 * labels))
    found = platt(scale * np.array([0.0, 200.0, 399.0]))
    assert np.isfinite([platt.slope, platt.offset]).all()
    assert found[0] < 0.05 and 0.2 < found[1] < 0.8 and found[2] > 0.95


def test_platt_scaling_of_uninformative_scores_is_the_base_rate_and_of_reversed_scores_decreases():
    labels = np.array([0, 0, 0, 1] * 25, np.int8)
    assert measures.fit_platt(labels, np.full(100, 3.0))(np.array([3.0, 4.0]))[0] == pytest.approx(0.25, abs=0.02)
    reversed_ones = measures.fit_platt(labels, -labels.astype(np.float64))(np.array([-1.0, 0.0]))
    assert reversed_ones[0] > 0.9 > 0.1 > reversed_ones[1]


# -- draws


def area(labels: Labels, scores: Floats) -> Measure:
    return lambda counts: Ranking(labels, scores).tally(counts).aurocs()[None]


def drawn(labels: Labels, questions: NDArray[np.int64], **settings: int) -> NDArray[np.int32]:
    return np.concatenate(list(draw(labels, questions, **{"resamples": 200} | settings)))


def test_a_draw_has_as_many_groups_as_the_data_with_all_their_records():
    labels, _ = next(cases())
    questions = np.random.default_rng(2).integers(0, 60, len(labels))
    counts = drawn(labels, questions)
    first = np.unique(questions, return_index=True)[1]
    assert counts.shape == (200, len(labels))
    assert (counts == counts[:, first][:, questions]).all()
    assert (counts[:, first].sum(axis=1) == 60).all()
    assert counts[:, first].var() == pytest.approx(59 / 60, abs=0.05)  # of a multinomial draw
    assert len(np.unique(counts, axis=0)) == 200


def test_draws_depend_on_the_seed_and_not_on_the_chunk_size():
    labels, _ = next(cases())
    labels[:] = 0
    labels[7] = 1  # a third of the draws have to be drawn again
    questions = np.arange(len(labels))
    counts = drawn(labels, questions)
    assert (drawn(labels, questions, chunk_bytes=1) == counts).all()
    assert (drawn(labels, questions, chunk_bytes=250_000) == counts).all()
    assert (drawn(labels, questions, seed=1) != counts).any()


def test_every_draw_has_both_labels():
    labels = np.array([1, 0, 0], np.int8)
    wrong = drawn(labels, np.arange(3), resamples=500) @ labels
    assert wrong.min() == 1 and wrong.max() == 2


def test_duplicating_every_record_of_a_group_does_not_narrow_the_interval():
    labels, scores = next(cases())
    questions = np.arange(len(labels))
    once = bootstrap({"a": area(labels, scores)}, labels, groups=questions, resamples=300)["a"][0]
    twice, same = np.tile(labels, 2), np.tile(scores, 2)
    both = bootstrap({"a": area(twice, same)}, twice, groups=np.tile(questions, 2), resamples=300)["a"][0]
    naive = bootstrap({"a": area(twice, same)}, twice, groups=np.arange(len(twice)), resamples=300)["a"][0]
    assert both.drawn == pytest.approx(once.drawn)
    assert np.std(naive.drawn) < 0.85 * np.std(once.drawn)


def test_an_interval_is_the_middle_95_percent_of_the_draws():
    labels, scores = next(cases())
    found = bootstrap({"a": area(labels, scores)}, labels, groups=np.arange(len(labels)), resamples=1000)["a"][0]
    value = metrics.roc_auc_score(labels, scores)
    wrong = int(labels.sum())
    q1, q2 = value / (2 - value), 2 * value**2 / (1 + value)  # Hanley and McNeil 1982
    variance = value * (1 - value) + (wrong - 1) * (q1 - value**2) + (len(labels) - wrong - 1) * (q2 - value**2)
    error = np.sqrt(variance / (wrong * (len(labels) - wrong)))
    interval = found.interval
    assert interval.value == pytest.approx(value)
    assert np.mean((found.drawn >= interval.low) & (found.drawn <= interval.high)) == pytest.approx(0.95, abs=0.002)
    assert (interval.high - interval.low) / 2 == pytest.approx(1.96 * error, rel=0.15)


def test_models_share_draws_so_paired_differences_are_narrower():
    labels, scores = next(cases())
    near = scores + np.random.default_rng(8).normal(size=len(scores)) * 0.05
    settings = {"groups": np.arange(len(labels)), "resamples": 400}
    together = bootstrap({"a": area(labels, scores), "b": area(labels, near)}, labels, **settings)
    alone = bootstrap({"b": area(labels, near)}, labels, **settings)["b"][0]
    (a,), (b,) = together["a"], together["b"]
    assert (b.drawn == alone.drawn).all()
    assert np.std((a - b).drawn) < 0.2 * np.std(a.drawn)
    assert (a - b).value == pytest.approx(a.value - b.value)
    assert ((a - a).interval.low, (a - a).interval.high, p_value(a - a)) == (0, 0, 1)


def test_draws_of_a_large_test_split_use_little_memory():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 30_000).astype(np.int8)
    scores = rng.random(30_000)
    tracemalloc.start()
    ranking = Ranking(labels, scores)

    def measure(counts: NDArray[np.generic]) -> Floats:
        tally = ranking.tally(counts)
        return np.stack([tally.aurocs(), tally.aurcs()])

    bootstrap({"a": measure}, labels, groups=np.arange(30_000), resamples=40)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50_000_000


def test_resamples_must_be_at_least_one():
    labels, scores = next(cases())
    with pytest.raises(ValueError, match="resamples=0"):
        bootstrap({"a": area(labels, scores)}, labels, groups=np.arange(len(labels)), resamples=0)


# -- differences


def test_p_is_twice_the_share_of_draws_on_the_rarer_side_of_zero():
    def shifted(num_below: int) -> Resampled:
        return Resampled(0.1, np.array([-1.0] * num_below + [1.0] * (999 - num_below)))

    assert p_value(shifted(0)) == pytest.approx(2 / 1000)
    assert p_value(shifted(24)) == pytest.approx(0.05)
    assert p_value(shifted(999 - 24)) == pytest.approx(0.05)
    assert p_value(shifted(499)) == 1


def test_holm_multiplies_the_smallest_p_by_the_number_of_comparisons_and_keeps_the_order():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == [1, 1]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


def resampled(value: float, *, spread: float = 0.01) -> Resampled:
    return Resampled(value, value + spread * np.random.default_rng(3).normal(size=999))


def test_models_are_compared_on_their_split_and_every_p_is_corrected():
    drawn = {("a", "x"): resampled(0.9), ("b", "x"): resampled(0.6, spread=0.02), ("a", "y"): resampled(0.5)}
    drawn["b", "y"] = drawn["a", "y"]
    better, same = compare([("a", "b", "x"), ("a", "b", "y")], drawn)
    assert (better.a, better.b, better.split) == ("a", "b", "x") and better.value.value == pytest.approx(0.3)
    assert better.is_better and better.p_holm == pytest.approx(2 * better.p)
    assert (same.value.value, same.p, same.differs) == (0, 1, False)


def test_a_verdict_names_the_better_model_and_the_difference_or_neither():
    drawn = {("a", "x"): resampled(0.9), ("b", "x"): resampled(0.6, spread=0.02)}
    (better,), (worse,) = compare([("a", "b", "x")], drawn), compare([("b", "a", "x")], drawn)
    assert f"{better.value}" in verdict(better, "b") and "NOT" not in verdict(better, "b")
    assert "WORSE" in verdict(worse, "a") and f"{better.value.value:.3f}" in verdict(worse, "a")
    (same,) = compare([("a", "a", "x")], drawn)
    assert "NOT" in verdict(same, "a") and "p = 1.000" in verdict(same, "a")
    assert "p <= " in verdict(better, "b", least_p=better.p_holm)


def test_an_interval_is_formatted_with_its_bounds():
    assert f"{Interval(0.5, 0.25, 0.75)}" == "0.500 [0.250, 0.750]"
    assert f"{-Interval(0.5, 0.25, 0.75):+.1f}" == "-0.5 [-0.8, -0.2]"


# -- many classes


def test_macro_f1_equals_scikit_learn_over_the_classes_that_occur():
    rng = np.random.default_rng(4)
    labels, predicted = rng.integers(-1, 5, 300), rng.integers(0, 7, 300)
    known = labels >= 0
    expected = metrics.f1_score(labels[known], predicted[known], labels=range(5), average="macro")
    assert measures.macro_f1(labels, predicted) == pytest.approx(expected)
    assert np.isnan(measures.macro_f1(np.array([-1]), np.array([0])))
