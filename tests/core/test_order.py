"""The order of an epoch: a permutation, computed at any position, close to a true shuffle, the same in all versions."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from millstream.core.order import Mode, Order
from support.effort import num_examples

Numbers = NDArray[np.int64]
MODES = st.sampled_from(["exact", "window", "none"])


def windows_of(order: Order) -> list[range]:
    """The positions of each window, from the sizes of its blocks."""
    ends = [0]
    while ends[-1] < order.n:
        first, last = order.blocks_of(len(ends) - 1)
        ends.append(ends[-1] + int((last - first + 1).sum()))
    return [range(a, b) for a, b in pairwise(ends)]


# -- an epoch is a permutation


@pytest.mark.parametrize("mode", ["exact", "window", "none"])
def test_every_record_comes_exactly_once_for_every_small_n(mode: Mode):
    for n in range(50):
        order = Order(n, seed=n, epoch=1, mode=mode, block=4, window=3)
        assert len(order) == n
        assert sorted(order[:].tolist()) == list(range(n))
        assert order.inverse(order[:]).tolist() == list(range(n))


def test_every_record_comes_exactly_once_for_every_small_block_and_window():
    for n, block, window in product(range(16), (1, 2, 3, 5), (1, 2, 3)):
        order = Order(n, seed=block, epoch=window, mode="window", block=block, window=window)
        assert sorted(order[:].tolist()) == list(range(n))


@settings(max_examples=num_examples(20))
@given(st.integers(0, 5_000), st.integers(0, 2**64), st.integers(0, 10**6), st.integers(20, 500), st.integers(1, 40))
def test_every_record_comes_exactly_once_with_any_blocks(n: int, seed: int, epoch: int, block: int, window: int):
    order = Order(n, seed, epoch, "window", block, window)
    numbers = order[:]
    assert (np.bincount(numbers, minlength=n) == 1).all()
    assert np.array_equal(order.inverse(numbers), np.arange(n))


@settings(max_examples=num_examples(30))
@given(st.integers(1, 2**62), MODES, st.integers(1, 10**6), st.integers(1, 10**6), st.data())
def test_inverse_returns_the_position_of_a_record_for_any_n(
    n: int, mode: Mode, block: int, window: int, data: st.DataObject
):
    order = Order(n, seed=5, epoch=2, mode=mode, block=block, window=window)
    asked = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=8)), np.int64)
    numbers = order[asked]
    assert ((numbers >= 0) & (numbers < n)).all()
    assert np.array_equal(order.inverse(numbers), asked)
    assert np.array_equal(order[order.inverse(asked)], asked)


@pytest.mark.parametrize("mode", ["exact", "window", "none"])
@pytest.mark.parametrize("n", [10**12, 10**12 + 1, 2**62])
def test_an_order_of_a_trillion_records_needs_no_memory(mode: Mode, n: int):
    order = Order(n, seed=1, mode=mode)
    for start in (0, n // 3, n - 5):
        numbers = order[start : start + 5]
        assert len(set(numbers.tolist())) == 5
        assert order.inverse(numbers).tolist() == list(range(start, start + 5))


@settings(max_examples=num_examples(15))
@given(st.integers(1, 400), MODES, st.integers(1, 50), st.integers(1, 20), st.data())
def test_a_slice_equals_its_positions_one_by_one(n: int, mode: Mode, block: int, window: int, data: st.DataObject):
    order = Order(n, seed=9, epoch=4, mode=mode, block=block, window=window)
    a, b = sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
    b = min(b, a + 12)
    alone = [order[position] for position in range(a, b)]
    assert order[a:b].tolist() == alone == order[np.arange(a, b)].tolist()
    assert order[:][a:b].tolist() == alone
    assert all(type(number) is int for number in alone)


def test_slices_work_like_those_of_a_list():
    order = Order(10, seed=3)
    whole = order[:].tolist()
    for part in (slice(-3, None), slice(4, 99), slice(7, 2), slice(0, 10, 3), slice(None, None, -1)):
        assert order[part].tolist() == whole[part]


@pytest.mark.parametrize("mode", ["exact", "window", "none"])
def test_a_position_or_record_out_of_range_is_an_index_error(mode: Mode):
    order = Order(10, mode=mode, block=3, window=2)
    for wrong in (10, -1):
        with pytest.raises(IndexError):
            order[wrong]
        with pytest.raises(IndexError):
            order[np.array([0, wrong])]
        with pytest.raises(IndexError):
            order.inverse(np.array([wrong]))
    assert order[np.empty(0, np.int64)].tolist() == []


def test_a_bad_mode_block_or_window_is_an_error():
    with pytest.raises(ValueError, match="mode='random'"):
        Order(10, mode="random")  # pyright: ignore[reportArgumentType]
    for block, window in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match=r"(block|window)=0"):
            Order(10, mode="window", block=block, window=window)


@pytest.mark.parametrize("mode", ["exact", "window"])
def test_another_seed_or_epoch_gives_another_order(mode: Mode):
    orders = [Order(1_000, seed, epoch, mode, 10, 10)[:] for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]]
    for number, one in enumerate(orders):
        for other in orders[:number]:
            assert np.count_nonzero(one == other) < 20


# -- windows


@settings(max_examples=num_examples(25))
@given(st.integers(1, 300), st.integers(0, 1_000), st.integers(3, 40), st.integers(2, 12))
def test_the_blocks_of_a_window_are_the_records_at_its_positions(n: int, seed: int, block: int, window: int):
    order = Order(n, seed, 0, "window", block, window)
    numbers = order[:]
    seen = 0
    for index, positions in enumerate(windows_of(order)):
        first, last = order.blocks_of(index)
        assert len(first) <= window and (first % block == 0).all()
        covered = {record for a, b in zip(first, last, strict=True) for record in range(a, b + 1)}
        assert covered == set(numbers[positions.start : positions.stop].tolist())
        seen += len(positions)
    assert seen == n
    assert len(order.blocks_of(-(-n // (block * window)))[0]) == 0


def test_the_short_block_may_be_in_any_window():
    found: set[int] = set()
    for seed in range(60):
        order = Order(95, seed, 0, "window", block=10, window=3)
        sizes = [len(positions) for positions in windows_of(order)]
        found.add(next(index for index, size in enumerate(sizes) if size % 10))
        numbers = order[:]
        for index, positions in enumerate(windows_of(order)):
            first, last = order.blocks_of(index)
            at = numbers[positions.start : positions.stop]
            assert sorted(at.tolist()) == sorted(r for a, b in zip(first, last, strict=True) for r in range(a, b + 1))
    assert found == {0, 1, 2, 3}


def test_window_order_uses_whole_blocks_of_one_window_at_a_time():
    order = Order(10_000, seed=1, mode="window", block=50, window=8)
    numbers = order[:]
    for start in range(0, 10_000, 400):
        records = numbers[start : start + 400]
        assert len(np.unique(records // 50)) == 8
        assert (np.bincount(records // 50)[np.unique(records // 50)] == 50).all()


# -- how random it is

N, CLASSES, BATCH = 200_000, 20, 250
LEVELS = [0.05, 0.25, 0.5, 0.75, 0.95]


def buffer_shuffle(n: int, size: int, rng: np.random.Generator) -> Numbers:
    """What a shuffle buffer makes of a stream: hand out one of those held, by chance, and hold the next instead."""
    held, picks, out = list(range(size)), rng.integers(0, size, n - size).tolist(), np.empty(n, np.int64)
    for position, pick in enumerate(picks):
        out[position] = held[pick]
        held[pick] = size + position
    out[n - size :] = rng.permutation(held)
    return out


def distances(numbers: Numbers) -> Numbers:
    return np.abs(np.diff(numbers))


def class_runs(numbers: Numbers) -> int:
    """In how many runs of one class a file that is sorted by class comes."""
    return 1 + int(np.count_nonzero(np.diff(numbers * CLASSES // N)))


def imbalance(numbers: Numbers) -> float:
    """The mean chi-square of a batch's classes, by its degrees of freedom: 1 for a true shuffle."""
    batches = (numbers * CLASSES // N).reshape(-1, BATCH)
    counts = np.stack([(batches == label).sum(axis=1) for label in range(CLASSES)])
    expected = BATCH / CLASSES
    return float(((counts - expected) ** 2 / expected).sum(axis=0).mean() / (CLASSES - 1))


@pytest.fixture(scope="module")
def uniform() -> Numbers:
    return np.random.default_rng(0).permutation(N)


@pytest.fixture(scope="module")
def buffered() -> Numbers:
    return buffer_shuffle(N, 1_000, np.random.default_rng(0))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_exact_is_as_random_as_a_true_shuffle(uniform: Numbers, seed: int):
    exact = Order(N, seed)[:]
    assert distances(exact).mean() == pytest.approx(distances(uniform).mean(), rel=0.01)
    found, expected = np.quantile(distances(exact), LEVELS), np.quantile(distances(uniform), LEVELS)
    assert found == pytest.approx(expected, rel=0.04)
    assert class_runs(exact) == pytest.approx(class_runs(uniform), rel=0.003)
    assert imbalance(exact) == pytest.approx(1, abs=0.05)
    assert abs(np.corrcoef(np.arange(N), exact)[0, 1]) < 0.01


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_window_is_close_to_a_true_shuffle(uniform: Numbers, seed: int):
    window = Order(N, seed, 0, "window", block=256, window=128)[:]
    assert distances(window).mean() == pytest.approx(distances(uniform).mean(), rel=0.02)
    found, expected = np.quantile(distances(window), LEVELS[1:]), np.quantile(distances(uniform), LEVELS[1:])
    assert found == pytest.approx(expected, rel=0.05)
    assert class_runs(window) == pytest.approx(class_runs(uniform), rel=0.01)
    assert imbalance(window) < 5  # a window's blocks are a sample of 128: its classes vary more than those of all
    assert abs(np.corrcoef(np.arange(N), window)[0, 1]) < 0.1


def test_a_shuffle_buffer_of_a_thousand_fails_the_same_measures(uniform: Numbers, buffered: Numbers):
    assert sorted(buffered.tolist()) == list(range(N))
    assert distances(buffered).mean() < 0.02 * distances(uniform).mean()
    assert np.quantile(distances(buffered), 0.95) < 0.05 * np.quantile(distances(uniform), 0.95)
    assert class_runs(buffered) < 0.15 * class_runs(uniform)
    assert imbalance(buffered) > 100
    assert np.corrcoef(np.arange(N), buffered)[0, 1] > 0.99


@pytest.mark.parametrize("mode", ["exact", "window"])
def test_every_record_is_equally_likely_to_be_first_or_last(mode: Mode):
    num_seeds, n = 500, 50
    ends = np.array([0, n - 1])
    found = np.stack([Order(n, seed, 0, mode, block=4, window=5)[ends] for seed in range(num_seeds)])
    expected = num_seeds / n
    for column in found.T:
        chi_square = float(((np.bincount(column, minlength=n) - expected) ** 2 / expected).sum())
        assert chi_square < (n - 1) + 4 * np.sqrt(2 * (n - 1))


# -- golden numbers

# Training runs resume by these. They must never change: if this test fails, the code is wrong, not the numbers.
GOLDEN = {
    # n, seed, epoch, mode, block, window: the first ten record numbers
    (10, 0, 0, "exact", 1024, 1024): [7, 3, 1, 9, 8, 6, 4, 0, 2, 5],
    (10, 0, 1, "exact", 1024, 1024): [5, 6, 9, 7, 0, 3, 2, 8, 4, 1],
    (10, 1, 0, "exact", 1024, 1024): [7, 9, 4, 1, 5, 6, 3, 2, 8, 0],
    (1_000, 7, 3, "exact", 1024, 1024): [313, 166, 85, 848, 477, 63, 961, 446, 2, 90],
    (65_537, 7, 0, "exact", 1024, 1024): [24606, 37276, 24231, 42520, 3326, 47509, 61404, 40184, 41981, 7730],
    (13_000_000, 42, 5, "exact", 1024, 1024): [
        1968163,
        2296926,
        3245594,
        2939242,
        2859444,
        10390679,
        12466142,
        106143,
        6082243,
        11262198,
    ],
    (10**12, 7, 3, "exact", 1024, 1024): [
        220547569386,
        293834397463,
        510116723813,
        480923764076,
        968870329138,
        737055136532,
        44853474964,
        402474368119,
        174414358199,
        751499296011,
    ],
    (2**62, 2**63, 10**6, "exact", 1024, 1024): [
        1978310990989662983,
        2204414540565888447,
        3086545872755273345,
        2504188460868309577,
        2873264908712655929,
        3211809696662881504,
        3716995180278247460,
        204354302560244586,
        4350065530542485474,
        1993344396169706890,
    ],
    (10, 0, 0, "window", 3, 2): [1, 3, 2, 4, 0, 5, 6, 9, 8, 7],
    (1_000, 7, 3, "window", 64, 4): [972, 61, 6, 967, 530, 329, 538, 331, 516, 38],
    (1_000, 7, 4, "window", 64, 4): [456, 108, 116, 774, 682, 693, 653, 798, 110, 659],
    (13_000_000, 42, 5, "window", 1024, 1024): [
        4616340,
        605602,
        2209469,
        2263460,
        1243207,
        11272266,
        5205090,
        4086043,
        370476,
        1172115,
    ],
    (10**12, 7, 3, "window", 256, 128): [
        224574004773,
        55233885401,
        747802303872,
        948868335893,
        848136794627,
        160974816228,
        134404320608,
        938482168404,
        470492255152,
        848136794688,
    ],
    (1_000, 7, 3, "none", 1024, 1024): [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
}
# The last ten, which come after the short block
GOLDEN_ENDS = {
    (1_000, 7, 3, "window", 64, 4): [600, 669, 464, 640, 701, 212, 594, 647, 622, 231],
    (13_000_000, 42, 5, "window", 1024, 1024): [
        11329714,
        6331594,
        6231638,
        4000799,
        3788923,
        3937732,
        2828054,
        9593204,
        3827891,
        9723678,
    ],
}


@pytest.mark.parametrize("arguments", GOLDEN)
def test_the_order_never_changes_between_versions(arguments: tuple[int, int, int, Mode, int, int]):
    assert Order(*arguments)[:10].tolist() == GOLDEN[arguments]


@pytest.mark.parametrize("arguments", GOLDEN_ENDS)
def test_the_end_of_the_order_never_changes_between_versions(arguments: tuple[int, int, int, Mode, int, int]):
    assert Order(*arguments)[-10:].tolist() == GOLDEN_ENDS[arguments]
