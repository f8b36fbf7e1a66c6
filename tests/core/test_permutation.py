"""A keyed permutation is a bijection of any n numbers that takes no memory and is unbiased."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.core.order import Permutation, mix, mix_words
from support.effort import num_examples

KEYS = st.integers(0, 2**64 - 1)


def test_every_number_comes_exactly_once_for_every_small_n():
    for n, key in itertools.product(range(71), (0, 7, 2**64 - 1)):
        shuffle = Permutation(n, key)
        numbers = shuffle(np.arange(n))
        assert sorted(numbers.tolist()) == list(range(n))
        assert shuffle.inverse(numbers).tolist() == list(range(n))


@settings(max_examples=num_examples(25))
@given(st.integers(71, 70_000), KEYS)
def test_every_number_comes_exactly_once_for_any_n(n: int, key: int):
    assert (np.bincount(Permutation(n, key)(np.arange(n)), minlength=n) == 1).all()


@settings(max_examples=num_examples(30))
@given(st.integers(1, 2**63 - 1), KEYS, st.data())
def test_the_inverse_is_exact_in_both_directions_for_any_n(n: int, key: int, data: st.DataObject):
    places = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), np.int64)
    shuffle = Permutation(n, key)
    numbers = shuffle(places)
    assert numbers.dtype == np.int64 and ((numbers >= 0) & (numbers < n)).all()
    assert np.array_equal(shuffle.inverse(numbers), places)
    assert np.array_equal(shuffle(shuffle.inverse(places)), places)


@pytest.mark.parametrize("n", [10**12, 2**40 + 1, 2**62 - 1, 2**62, 2**62 + 1, 2**63 - 1])
def test_trillions_of_numbers_cost_no_more_than_a_few(n: int):
    edges = np.array([0, 1, n // 2, n - 2, n - 1], np.int64)
    shuffle = Permutation(n, key=3)
    assert np.array_equal(shuffle.inverse(shuffle(edges)), edges)
    assert len(set(shuffle(edges).tolist())) == 5


@settings(max_examples=num_examples(20))
@given(st.integers(1, 200_000), KEYS, st.data())
def test_many_numbers_give_the_same_results_as_one_by_one(n: int, key: int, data: st.DataObject):
    places = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=10)), np.int64)
    shuffle = Permutation(n, key)
    alone = [int(shuffle(np.array([place]))[0]) for place in places]
    assert shuffle(places).tolist() == alone
    assert shuffle(np.arange(n))[places].tolist() == alone


def test_a_place_or_number_out_of_range_is_an_index_error():
    shuffle = Permutation(10, key=1)
    for wrong in ([10], [-1], [3, 10]):
        with pytest.raises(IndexError, match="10 numbers"):
            shuffle(np.array(wrong))
        with pytest.raises(IndexError, match="10 numbers"):
            shuffle.inverse(np.array(wrong))
    with pytest.raises(IndexError):
        Permutation(0, key=1)(np.array([0]))
    for size in (-1, 2**63):
        with pytest.raises(ValueError, match="numbers"):
            Permutation(size, key=1)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_order_of_a_few_numbers_is_equally_likely(n: int):
    orders = list(itertools.permutations(range(n)))
    num_keys = 12 * len(orders)
    seen = Counter(tuple(Permutation(n, mix(0, key))(np.arange(n)).tolist()) for key in range(num_keys))
    chi_square = sum((seen[order] - 12) ** 2 / 12 for order in orders)
    freedom = len(orders) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def test_keys_that_differ_by_one_bit_give_unrelated_orders():
    n = 5_000
    base = Permutation(n, key=12345)(np.arange(n))
    for bit in (0, 1, 17, 40, 63):
        other = Permutation(n, 12345 ^ (1 << bit))(np.arange(n))
        assert np.count_nonzero(base == other) < 8  # one is expected of unrelated orders
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.05


def test_the_vectorised_hash_equals_the_scalar_one():
    numbers = np.array([0, 1, 2, 255, 2**31, 2**62, 2**63 - 1])
    assert mix_words(numbers, 5, 9).tolist() == [mix(5, 9, int(number)) for number in numbers]


def test_the_hash_distinguishes_tuples_and_its_bits_are_balanced():
    assert len({mix(), mix(0), mix(0, 0), mix(1, 2), mix(2, 1), mix(-1), mix(1)}) == 7
    bits = np.unpackbits(mix_words(np.arange(20_000)).view(np.uint8)).reshape(-1, 64)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.02


def test_the_permutation_never_changes_between_versions():
    """Splits, mixtures and orders of data in use depend on these: they must never change."""
    assert [mix(0), mix(7, 3), mix(1, 2, 3)] == MIXED
    assert {key: Permutation(*key)(np.arange(min(key[0], 10))).tolist() for key in PERMUTED} == PERMUTED


MIXED = [16294208416658607535, 7758145696617331093, 15020427595393229491]
PERMUTED = {
    (7, 0): [4, 0, 6, 3, 1, 5, 2],
    (7, 1): [4, 3, 0, 5, 1, 2, 6],
    (1_000, 42): [467, 567, 958, 353, 688, 931, 284, 342, 684, 936],
    (100_000, 42): [88377, 25628, 61791, 73581, 41626, 53160, 19968, 53369, 4626, 10031],
    (10**12, 5): [
        130258035481,
        759247188909,
        877411442989,
        964993662369,
        768313911105,
        149046569757,
        202816333078,
        315433416898,
        537283780571,
        750393903459,
    ],
}
