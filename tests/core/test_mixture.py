"""A mixture has its shares evenly interleaved, in every epoch, and continues with what earlier epochs left out."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.core.mixture import Mixture
from millstream.errors import StateMismatch
from support.effort import num_examples
from support.making_small import ids, rows


def sources_of(mixture: Mixture) -> np.ndarray:
    """Of which collection the record at each place is."""
    numbers = mixture.record_numbers(np.arange(len(mixture)))
    return np.searchsorted(np.cumsum([len(one) for one in mixture.collections]), numbers, side="right")


@settings(max_examples=num_examples(25))
@given(
    st.lists(st.tuples(st.integers(10, 80), st.floats(0.1, 1)), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 5),
)
def test_a_mixture_has_its_shares_evenly_interleaved(
    trivia: ms.Traces, sizes: list[tuple[int, float]], repeat: bool, epoch: int
):
    weights: dict[ms.Collection, float] = {trivia.subset(np.arange(size)): weight for size, weight in sizes}
    mixture = ms.mix(weights, seed=3, repeat=repeat).in_epoch(epoch)
    total = sum(weights.values())
    found = sources_of(mixture)
    places = np.arange(1, len(mixture) + 1)
    for number, (part, weight) in enumerate(weights.items()):
        assert abs(mixture.counts[number] - len(mixture) * weight / total) <= 1.5 + 0.5 * len(weights)
        assert np.count_nonzero(found == number) == mixture.counts[number]
        so_far = np.cumsum(found == number)
        assert np.abs(so_far - places * mixture.counts[number] / len(mixture)).max() <= max(len(weights) - 1, 1)
        assert mixture.counts[number] >= len(part) if repeat else mixture.counts[number] <= len(part)


def test_a_mixture_is_as_large_as_possible_without_repeating_a_record(trivia: ms.Traces, popqa: ms.Traces):
    mixture = ms.mix({trivia: 0.75, popqa: 0.25}, seed=1)
    assert mixture.counts == [100, 33]
    names = ids(mixture)
    assert len(set(names)) == len(names) == 133
    assert set(ids(trivia)) <= set(names)


def test_with_repeat_every_record_occurs_and_scarce_ones_several_times(trivia: ms.Traces, popqa: ms.Traces):
    mixture = ms.mix({trivia: 0.5, popqa: 0.5}, seed=1, repeat=True)
    assert mixture.counts == [100, 100]
    times = Counter(ids(mixture))
    assert set(times) == set(ids(trivia)) | set(ids(popqa))
    assert {times[name] for name in ids(trivia)} == {1}
    assert {times[name] for name in ids(popqa)} == {2, 3}


def test_rounding_leaves_out_no_record_of_a_mixture_with_repeat(trivia: ms.Traces):
    many, few = trivia.subset(np.arange(23)), trivia.subset(np.arange(50, 52))
    mixture = ms.mix({many: 0.9, few: 0.1}, repeat=True)
    assert set(mixture.record_numbers(np.arange(len(mixture))).tolist()) == set(range(25))


def test_the_next_epoch_of_a_mixture_continues_with_other_records(trivia: ms.Traces, popqa: ms.Traces):
    small = popqa.subset(np.arange(10))
    mixture = ms.mix({trivia: 0.5, small: 0.5}, seed=4)
    assert mixture.counts == [10, 10]
    epochs = [mixture.in_epoch(epoch) for epoch in range(10)]
    taken = [number for epoch in epochs for number in epoch.record_numbers(np.arange(20)).tolist()]
    assert sorted(number for number in taken if number < 100) == list(range(100))  # all of it in ten epochs
    orders = [[number for number in epoch.record_numbers(np.arange(20)).tolist() if number >= 100] for epoch in epochs]
    assert all(sorted(order) == list(range(100, 110)) for order in orders)
    assert len({tuple(order) for order in orders}) == 10  # what is used up begins again in another order
    assert len({epoch.fingerprint for epoch in epochs}) == 1


def test_no_epoch_of_a_mixture_repeats_a_record(trivia: ms.Traces, popqa: ms.Traces):
    mixture = ms.mix({trivia: 0.6, popqa: 0.4}, seed=1)
    for epoch in range(6):
        numbers = mixture.in_epoch(epoch).record_numbers(np.arange(len(mixture)))
        assert len(set(numbers.tolist())) == len(numbers)


def test_every_epoch_of_a_mixture_with_repeat_has_every_record(trivia: ms.Traces, popqa: ms.Traces):
    mixture = ms.mix({trivia: 0.65, popqa: 0.35}, seed=1, repeat=True)
    for epoch in range(6):
        numbers = mixture.in_epoch(epoch).record_numbers(np.arange(len(mixture)))
        assert len(set(numbers.tolist())) == 140


def test_records_of_a_mixture_are_those_of_its_collections(
    trivia: ms.Traces, popqa: ms.Traces, few_reads: ms.Reads, more_reads: ms.Reads
):
    for one, other in ((trivia, popqa), (few_reads, more_reads)):
        mixture = ms.mix({one: 0.6, other: 0.4}, seed=9)
        places = np.random.default_rng(0).permutation(len(mixture))
        whole = ms.concat([one, other])
        assert rows(mixture, places.tolist()) == rows(whole, mixture.record_numbers(places).tolist())
        assert rows(mixture, []) == []
        key = "question_id" if one is trivia else "class_id"
        assert mixture.column(key).to_pylist() == [row[key] for row in rows(mixture, list(range(len(mixture))))]
        for wrong in (-len(mixture) - 1, len(mixture)):
            with pytest.raises(IndexError, match=str(len(mixture))):
                mixture.fetch([wrong])


def test_a_mixture_depends_on_its_seed(trivia: ms.Traces, popqa: ms.Traces):
    orders = [ms.mix({trivia: 1, popqa: 1}, seed=seed).record_numbers(np.arange(80)).tolist() for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def schedule_of(mixture: ms.Collection, epochs: int) -> list[list[int]]:
    """The record numbers of each epoch."""
    changing = [mixture.in_epoch(epoch) for epoch in range(epochs)]
    return [epoch.record_numbers(np.arange(len(epoch))).tolist() for epoch in changing]


def test_weights_that_change_by_epoch_keep_the_length_and_stay_at_the_last(trivia: ms.Traces, popqa: ms.Traces):
    mixture = ms.mix({trivia: [0.8, 0.5, 0.2], popqa: [0.2, 0.5, 0.8]}, seed=5)
    epochs = schedule_of(mixture, 6)
    few = [sum(number >= 100 for number in epoch) for epoch in epochs]
    assert {len(epoch) for epoch in epochs} == {len(mixture)} == {50}
    assert few == [10, 25, 40, 40, 40, 40]
    assert all(len(set(epoch)) == 50 for epoch in epochs), "no epoch repeats a record"
    assert len({mixture.in_epoch(epoch).fingerprint for epoch in range(6)}) == 1
    assert [mixture.in_epoch(epoch).counts for epoch in (0, 2)] == [[40, 10], [10, 40]]


def test_changing_weights_continue_with_records_that_earlier_epochs_left_out(trivia: ms.Traces, popqa: ms.Traces):
    epochs = schedule_of(ms.mix({trivia: [0.8, 0.5, 0.2], popqa: [0.2, 0.5, 0.8]}, seed=5), 3)
    many = [number for epoch in epochs for number in epoch if number < 100]
    assert len(many) == len(set(many)) == 40 + 25 + 10


def test_equal_weights_in_every_epoch_are_those_of_a_mixture_without_a_list(trivia: ms.Traces, popqa: ms.Traces):
    """The order of a constant mixture is pinned: epoch 3 goes on where epoch 2 ended, in either way of writing it."""
    constant = ms.mix({trivia: 0.6, popqa: 0.4}, seed=1)
    for weights in ({trivia: [0.6], popqa: [0.4]}, {trivia: [0.6] * 3, popqa: 0.4}):
        assert schedule_of(ms.mix(weights, seed=1), 9) == schedule_of(constant, 9)
    assert ms.mix({trivia: [0.6], popqa: 0.4}, seed=1).fingerprint == constant.fingerprint
    assert constant.in_epoch(3).record_numbers(np.arange(8)).tolist() == [131, 70, 113, 22, 40, 105, 85, 125]
    assert constant.chosen.digest() == "57d83554ddd24cae"


def test_a_collection_may_be_left_out_of_some_epochs_only(trivia: ms.Traces, popqa: ms.Traces):
    epochs = schedule_of(ms.mix({trivia: [1, 0.5], popqa: [0, 0.5]}, seed=1), 3)
    assert [sum(number >= 100 for number in epoch) for epoch in epochs] == [0, 40, 40]
    for wrong in (
        {trivia: [1, 0], popqa: [1, 0]},
        {trivia: [1, 1], popqa: [0, 0]},
        {trivia: [1, 2, 3], popqa: [1, 2]},
        {trivia: [1, -1], popqa: 1},
        {trivia: [1, float("nan")], popqa: 1},
        {trivia: [], popqa: 1},
    ):
        with pytest.raises(ValueError, match="weights"):
            ms.mix(wrong)
    with pytest.raises(ValueError, match="weights above 0"):
        ms.mix({trivia: [1, 1], popqa: [0, 1]}, repeat=True)


@pytest.mark.parametrize("repeat", [False, True])
def test_with_any_weights_by_epoch_every_epoch_keeps_its_promise(trivia: ms.Traces, popqa: ms.Traces, repeat: bool):
    rng = np.random.default_rng(0)
    for seed in range(6):
        sizes = rng.integers(1, 40, 3)
        parts = [trivia.subset(np.arange(sizes[0])), popqa.subset(np.arange(sizes[1])), trivia.subset(range(sizes[2]))]
        weights = rng.integers(1, 9, (3, 4)).tolist()
        mixture = ms.mix(dict(zip(parts, weights, strict=True)), seed=seed, repeat=repeat)
        for epoch, numbers in enumerate(schedule_of(mixture, 7)):
            assert len(numbers) == len(mixture)
            if repeat:
                assert set(numbers) == set(range(sum(map(len, parts)))), epoch
            else:
                assert len(set(numbers)) == len(numbers), epoch


def test_a_loader_over_changing_weights_resumes_exactly(trivia: ms.Traces, popqa: ms.Traces):
    def loader(last: float) -> ms.Loader:
        mixture = ms.mix({trivia: [0.8, 0.5], popqa: [0.2, last]}, seed=5)
        return ms.Loader(mixture, batch_size=8, features=ms.features.fields("question_id"), seed=2, threads=1)

    whole = loader(0.5)
    epochs = [[name for batch in whole for name in batch["question_id"]] for _ in range(3)]
    interrupted, seen = loader(0.5), list[object]()
    interrupted.set_epoch(1)
    for batch in islice(interrupted, 3):
        seen += batch["question_id"]
        state = interrupted.state_dict()
    again = loader(0.5)
    again.load_state_dict(state)
    seen += [name for batch in again for name in batch["question_id"]]
    assert seen == epochs[1]
    assert [name for batch in again for name in batch["question_id"]] == epochs[2]
    with pytest.raises(StateMismatch, match="collection"):
        loader(0.6).load_state_dict(state)


def test_a_mixture_with_bad_weights_or_no_records_is_an_error(trivia: ms.Traces):
    for wrong in ({}, {trivia: 0.0}, {trivia: -1.0}):
        with pytest.raises(ValueError, match="weights"):
            ms.mix(wrong)
    with pytest.raises(ValueError, match="Subset"):
        ms.mix({trivia: 1, trivia.subset([]): 1})
