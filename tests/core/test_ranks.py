"""Ranks read disjoint positions that cover an epoch, with equal numbers of batches; also after a resume."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.core.order import Layout, Tail, find_ranks

SIZES, BATCHES, WORLDS = st.integers(0, 300), st.integers(1, 40), st.integers(1, 9)
TAILS = st.sampled_from(["drop", "pad"])


def epoch(n: int, batch_size: int, world: int, *, start: int = 0, drop_last: bool = False, tail: Tail = "drop"):
    """The positions of every batch, by rank and step."""
    layouts = [Layout(n, batch_size, rank, world, drop_last, tail) for rank in range(world)]
    (steps,) = {layout.steps(start) for layout in layouts}
    return [[layout.positions(start, step).tolist() for step in range(steps)] for layout in layouts]


def flat(ranks: list[list[list[int]]]) -> list[int]:
    return [position for batches in ranks for batch in batches for position in batch]


@given(SIZES, BATCHES)
def test_one_process_reads_everything_in_order(n: int, batch_size: int):
    (batches,) = epoch(n, batch_size, 1)
    assert [position for batch in batches for position in batch] == list(range(n))
    assert all(len(batch) == batch_size for batch in batches[:-1])


@given(SIZES, BATCHES, WORLDS)
def test_ranks_have_equally_many_batches_disjoint_and_complete_but_for_at_most_world_less_one(
    n: int, batch_size: int, world: int
):
    ranks = epoch(n, batch_size, world)
    read = flat(ranks)
    assert len(read) == len(set(read))
    dropped = set(range(n)) - set(read)
    assert len(dropped) < world
    assert dropped == set(range(n - len(dropped), n))  # the last positions, a different record every epoch
    if not dropped:
        assert sorted(read) == list(range(n))
    assert len({len(batches) for batches in ranks}) == 1
    assert all(batch for batches in ranks for batch in batches)


@given(SIZES, BATCHES, WORLDS)
def test_nothing_is_dropped_unless_a_rank_would_be_left_without_a_record(n: int, batch_size: int, world: int):
    left = n % (batch_size * world)
    num_dropped = n - len(flat(epoch(n, batch_size, world)))
    assert num_dropped == (left if left < world else 0)


@given(SIZES, BATCHES, WORLDS)
def test_last_batches_differ_by_one_record_at_most(n: int, batch_size: int, world: int):
    ranks = epoch(n, batch_size, world)
    for batches in zip(*ranks, strict=True):
        sizes = [len(batch) for batch in batches]
        assert max(sizes) - min(sizes) <= 1 and max(sizes) <= batch_size


@given(SIZES, BATCHES, WORLDS, TAILS)
def test_interleaved_ranks_give_the_order_of_one_process(n: int, batch_size: int, world: int, tail: Tail):
    ranks = epoch(n, batch_size, world, tail=tail)
    merged: list[int] = []
    for batches in zip(*ranks, strict=True):
        longest = max(map(len, batches))
        merged += [batch[row] for row in range(longest) for batch in batches if row < len(batch)]
    alone = flat(epoch(n, batch_size, 1))
    assert merged[:n] == alone[: len(merged)]


@given(SIZES, BATCHES, WORLDS)
def test_padded_batches_are_equal_on_all_ranks_and_repeat_no_more_than_that_takes(n: int, batch_size: int, world: int):
    ranks = epoch(n, batch_size, world, tail="pad")
    for batches in zip(*ranks, strict=True):
        assert len({len(batch) for batch in batches}) == 1
    read = flat(ranks)
    assert set(read) == set(range(n))
    assert len(read) == -(-n // world) * world  # the next multiple of world: no shorter list could be dealt out
    times = np.bincount(read, minlength=n)
    assert n == 0 or times.max() - times.min() <= 1
    assert (np.diff(times) <= 0).all()  # it is the first of the epoch that come again


@given(SIZES, BATCHES, WORLDS, TAILS)
def test_drop_last_leaves_full_batches_only(n: int, batch_size: int, world: int, tail: Tail):
    ranks = epoch(n, batch_size, world, drop_last=True, tail=tail)
    assert all(len(batch) == batch_size for batches in ranks for batch in batches)
    kept = n - n % (batch_size * world)
    assert sorted(flat(ranks)) == list(range(kept))


@given(SIZES, BATCHES, WORLDS, BATCHES, WORLDS, TAILS, st.data())
def test_a_resume_with_other_ranks_and_batches_reads_what_remains_exactly_once(
    n: int, batch_size: int, world: int, new_size: int, new_world: int, tail: Tail, data: st.DataObject
):
    before = epoch(n, batch_size, world, tail=tail)
    done = data.draw(st.integers(0, len(before[0])))
    samples = Layout(n, batch_size, 0, world, tail=tail).samples(0, done)
    used = flat([batches[:done] for batches in before])
    rest = flat(epoch(n, new_size, new_world, start=samples))
    assert set(used) == set(range(samples))
    assert len(rest) == len(set(rest))
    missing = set(range(n)) - set(used) - set(rest)
    assert not set(used) & set(rest) and len(missing) < new_world
    if new_world == 1:
        assert rest == list(range(samples, n))
    padded = flat(epoch(n, new_size, new_world, start=samples, tail="pad"))
    assert set(padded) >= set(range(samples, n)) and len(padded) == -(-(n - samples) // new_world) * new_world


@given(SIZES, BATCHES, WORLDS, st.lists(st.tuples(BATCHES, WORLDS, st.integers(0, 5)), max_size=4))
def test_any_number_of_resumes_add_up_to_one_epoch(
    n: int, batch_size: int, world: int, changes: list[tuple[int, int, int]]
):
    read: list[int] = []
    start = 0
    for size, ranks, wanted in [(batch_size, world, 3), *changes, (7, 1, 10**6)]:
        batches = epoch(n, size, ranks, start=start)
        done = min(wanted, len(batches[0]))
        read += flat([of_rank[:done] for of_rank in batches])
        start = Layout(n, size, 0, ranks).samples(start, done)
    assert sorted(read) == list(range(n))


def test_after_the_last_batch_all_positions_count_as_used():
    layout = Layout(10, 3, rank=1, world=2)
    assert layout.steps() == 2
    assert [layout.samples(0, step) for step in (0, 1, 2)] == [0, 6, 10]
    assert layout.steps(10) == 0 == layout.steps(99)


def test_a_layout_of_a_trillion_positions_needs_no_memory():
    layout = Layout(10**12, 1024, rank=5, world=8)
    assert layout.steps() == -(-(10**12) // 8192)
    assert layout.positions(0, layout.steps() - 1)[0] == 8192 * (layout.steps() - 1) + 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"rank": 2, "world": 2}, "rank=2 of world=2"),
        ({"rank": -1}, "rank=-1"),
        ({"tail": "keep"}, "tail='keep'"),
    ],
)
def test_a_bad_layout_is_an_error_with_the_value(wrong: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        Layout(**{"n": 10, "batch_size": 2, **wrong})


def test_ranks_come_from_the_arguments_torchrun_or_a_single_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert find_ranks(None, None) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert find_ranks(None, None) == (3, 4)
    assert find_ranks(1, 2) == (1, 2)
    with pytest.raises(ValueError, match=r"rank=.*world="):
        find_ranks(1, None)
