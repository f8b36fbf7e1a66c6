"""An interrupted epoch resumes in another process, with other threads, ranks and batches; every record comes once."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.errors import StateMismatch
from support.effort import num_examples
from support.loading import draw, numbers_of, same, write_traces
from support.nursery import Nursery

LABEL = ms.features.fields("label")
SEED = 11


def make(collection: ms.Collection, **options: Any) -> ms.Loader:
    return ms.Loader(collection, **{"features": LABEL, "seed": SEED, "order": "exact", "threads": 0, **options})


def ranks(collection: ms.Collection, world: int, **options: Any) -> list[ms.Loader]:
    return [make(collection, rank=rank, world=world, **options) for rank in range(world)]


def saved(state: dict[str, object]) -> dict[str, object]:
    """As it comes back from a file."""
    return json.loads(json.dumps(state))


@settings(max_examples=num_examples(30))
@given(data=st.data())
def test_the_rest_of_an_epoch_is_every_remaining_record_once(traces: ms.Traces, data: st.DataObject):
    n = data.draw(st.integers(1, 101), "n")
    sizes = data.draw(st.tuples(st.integers(1, 20), st.integers(1, 20)), "batch sizes")
    threads = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)), "threads")
    worlds = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)), "worlds")
    order = data.draw(st.sampled_from(["exact", "window", "none"]), "order")
    tail = data.draw(st.sampled_from(["drop", "pad"]), "tail")
    epoch = data.draw(st.integers(0, 3), "epoch")
    part = traces.subset(range(n))
    options = {"order": order, "tail": tail}

    before = ranks(part, worlds[0], batch_size=sizes[0], threads=threads[0], **options)
    done = data.draw(st.integers(0, len(before[0])), "batches before")
    given: list[int] = []
    for loader in before:
        loader.set_epoch(epoch)
        given += numbers_of(islice(loader, done))
    states = [saved(loader.state_dict()) for loader in before]
    assert all(state == states[0] for state in states), "the state is that of all ranks together"

    after = ranks(part, worlds[1], batch_size=sizes[1], threads=threads[1], **options)
    for loader in after:
        loader.load_state_dict(states[0])
        assert loader.epoch == epoch
    remaining = {loader.remaining for loader in after}
    rest = [list(loader) for loader in after]
    assert {len(batches) for batches in rest} == remaining
    assert {loader.epoch for loader in after} == {epoch + 1}

    for batches in rest:
        given += numbers_of(batches)
    counts = Counter(given)
    if tail == "drop":
        assert max(counts.values(), default=1) == 1
        assert n - len(counts) < worlds[1]
    else:
        assert set(counts) == set(range(n))
        assert len(given) - n <= worlds[0] - 1 + worlds[1] - 1

    in_next = [number for loader in after for number in numbers_of(loader)]
    assert len(set(in_next)) > n - worlds[1]
    assert in_next == [number for loader in _fresh(part, worlds[1], sizes[1], epoch + 1, options) for number in loader]


def _fresh(part: ms.Collection, world: int, batch_size: int, epoch: int, options: dict[str, str]) -> list[list[int]]:
    """The records of each rank in an epoch that nothing came before."""
    loaders = ranks(part, world, batch_size=batch_size, **options)
    for loader in loaders:
        loader.set_epoch(epoch)
    return [numbers_of(loader) for loader in loaders]


@settings(max_examples=num_examples(15))
@given(done=st.integers(0, 15), threads=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_a_resumed_epoch_has_the_same_batches_as_an_uninterrupted_one(
    traces: ms.Traces, done: int, threads: tuple[int, int]
):
    feature = [ms.features.each(draw, fields=["label"]), ms.features.fields("hidden", "grade", "question")]
    whole = list(make(traces, batch_size=7, features=feature))
    stopped = make(traces, batch_size=7, features=feature, threads=threads[0])
    assert same(list(islice(stopped, done)), whole[:done])
    resumed = make(traces, batch_size=7, features=feature, threads=threads[1])
    resumed.load_state_dict(saved(stopped.state_dict()))
    assert same(list(resumed), whole[done:])


def test_an_epoch_can_be_interrupted_again_and_again(traces: ms.Traces):
    state, given = make(traces, batch_size=3).state_dict(), list[int]()
    for size in (1, 5, 2, 8, 3, 30, 100):
        loader = make(traces, batch_size=size)
        loader.load_state_dict(saved(state))
        given += numbers_of(islice(loader, 2))
        state = loader.state_dict()
    assert given == ms.Order(101, SEED)[:].tolist()


def test_the_state_counts_every_batch_that_the_loop_received(traces: ms.Traces):
    loader = make(traces, batch_size=10, threads=2)
    before = loader.state_dict()
    assert before["samples"] == 0 and before["epoch"] == 0
    within = [loader.state_dict() for _ in loader]  # as a training loop saves: after the step
    assert [state["samples"] for state in within] == [*range(10, 101, 10), 101]
    assert {state["epoch"] for state in within} == {0}
    after = loader.state_dict()
    assert after["samples"] == 0 and after["epoch"] == 1


def test_a_state_from_before_the_first_batch_is_a_whole_epoch(traces: ms.Traces):
    loader = make(traces, batch_size=10)
    loader.set_epoch(4)
    resumed = make(traces, batch_size=10)
    resumed.load_state_dict(saved(loader.state_dict()))
    assert resumed.epoch == 4 and numbers_of(resumed) == ms.Order(101, SEED, 4)[:].tolist()


def test_a_state_from_the_last_batch_of_an_epoch_ends_it_and_the_next_is_whole(traces: ms.Traces):
    """A loop over epochs from `loader.epoch` on neither repeats nor skips one."""
    loader = make(traces, batch_size=10)
    states = [loader.state_dict() for _ in loader]
    resumed = make(traces, batch_size=10)
    resumed.load_state_dict(saved(states[-1]))
    assert resumed.epoch == 0 and resumed.remaining == 0 and list(resumed) == []
    assert resumed.epoch == 1 and numbers_of(resumed) == ms.Order(101, SEED, 1)[:].tolist()


def test_set_epoch_keeps_the_position_only_for_the_resumed_epoch(traces: ms.Traces):
    loader = make(traces, batch_size=10)
    list(islice(loader, 3))
    state = saved(loader.state_dict())
    resumed = make(traces, batch_size=10)
    resumed.load_state_dict(state)
    resumed.set_epoch(0)
    assert resumed.remaining == 8
    resumed.set_epoch(1)
    assert resumed.remaining == 11 and numbers_of(resumed) == ms.Order(101, SEED, 1)[:].tolist()


def test_the_state_is_plain_json_with_a_version(traces: ms.Traces):
    state = make(traces, batch_size=10).state_dict()
    assert saved(state) == state
    assert state["version"] == 1
    assert set(state) == {"version", "seed", "epoch", "samples", "records", "collection", "order"}


def test_an_epoch_resumes_in_another_process(traces: ms.Traces, nursery: Nursery):
    loader = make(traces, batch_size=9, threads=2)
    before = numbers_of(islice(loader, 4))
    code = f"""
import json, sys
import millstream as ms
loader = ms.Loader(ms.open({str(traces.path)!r}), batch_size=16, features=ms.features.fields("label"), seed={SEED})
loader.load_state_dict(json.loads(sys.argv[1]))
print(json.dumps([number for batch in loader for number in batch["numbers"].tolist()]))
"""
    ran = nursery.run(code, json.dumps(loader.state_dict()))
    assert ran.code == 0, ran.err
    assert before + json.loads(ran.out) == ms.Order(101, SEED)[:].tolist()
    assert ran.err.startswith("loader: ") and "as in the state resumed" in ran.err


# -- what is refused


def test_a_state_of_another_seed_is_an_error(traces: ms.Traces):
    state = saved(make(traces, batch_size=10).state_dict())
    with pytest.raises(StateMismatch, match=r"seed: 11 -> 12$"):
        make(traces, batch_size=10, seed=12).load_state_dict(state)


def test_a_state_of_a_store_that_has_grown_is_an_error_but_a_subset_of_the_old_records_resumes(tmp_path: Path):
    traces = write_traces(tmp_path / "store", range(20))
    loader = make(traces, batch_size=4)
    before = numbers_of(islice(loader, 2))
    state = saved(loader.state_dict())
    grown = write_traces(tmp_path / "store", range(20, 25))
    with pytest.raises(StateMismatch, match=r"records: 20 -> 25, collection: '\w{16}' -> '\w{16}'"):
        make(grown, batch_size=4).load_state_dict(state)
    old = make(traces, batch_size=4)  # opened before, it still has 20 records
    old.load_state_dict(state)
    assert sorted(before + numbers_of(old)) == list(range(20))


def test_a_state_of_another_store_of_equal_length_is_an_error(tmp_path: Path, traces: ms.Traces):
    state = saved(make(traces, batch_size=10).state_dict())
    other = write_traces(tmp_path / "store", range(1, 102))
    with pytest.raises(StateMismatch, match=r": collection: '\w{16}' -> '\w{16}'$"):
        make(other, batch_size=10).load_state_dict(state)
    with pytest.raises(StateMismatch, match="collection"):
        make(traces.subset(np.roll(np.arange(101), 1)), batch_size=10).load_state_dict(state)


def test_a_state_of_another_order_is_an_error_only_if_an_order_was_requested(traces: ms.Traces):
    loader = make(traces, batch_size=10, order="window")
    before = numbers_of(islice(loader, 3))
    state = saved(loader.state_dict())
    with pytest.raises(StateMismatch, match=r": order: 'window' -> 'exact'$"):
        make(traces, batch_size=10, order="exact").load_state_dict(state)
    auto = make(traces, batch_size=10, order="auto")
    auto.load_state_dict(state)
    assert sorted(before + numbers_of(auto)) == list(range(101))


@pytest.mark.parametrize("order", ["exact", "window"])
def test_an_epoch_resumes_with_another_memory_budget(traces: ms.Traces, order: str):
    """The size of a window depends on the memory; a resumed epoch keeps the window it started with."""
    many = traces.subset(np.arange(3_000) % 101)
    loader = make(many, batch_size=10, order=order, memory="1MB")
    whole = numbers_of(loader)
    loader.set_epoch(0)
    before = numbers_of(islice(loader, 100))
    resumed = make(many, batch_size=10, order=order, memory="100MB")
    assert resumed.state_dict()["order"] != loader.state_dict()["order"]
    resumed.load_state_dict(saved(loader.state_dict()))
    assert before + numbers_of(resumed) == whole
    assert resumed.state_dict()["order"] == loader.state_dict()["order"]


@pytest.mark.parametrize("version", [2, None])
def test_a_state_of_another_version_is_an_error(traces: ms.Traces, version: int | None):
    state = saved(make(traces, batch_size=10).state_dict()) | {"version": version}
    with pytest.raises(StateMismatch, match=f"version {version}"):
        make(traces, batch_size=10).load_state_dict(state)


def test_a_rejected_state_leaves_the_loader_unchanged(traces: ms.Traces):
    loader = make(traces, batch_size=10)
    state = saved(loader.state_dict())
    with pytest.raises(StateMismatch):
        loader.load_state_dict(state | {"samples": 50, "seed": 3})
    assert loader.state_dict() == state


# -- streams


@settings(max_examples=num_examples(25))
@given(
    done=st.integers(0, 13),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    worlds=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_a_stream_resumes_after_a_number_of_batches(
    traces: ms.Traces, done: int, sizes: tuple[int, int], worlds: tuple[int, int]
):
    def streams(world: int, size: int) -> list[ms.RecordStream]:
        made = [traces.stream(LABEL, batch_size=size, seed=SEED, rank=rank, world=world) for rank in range(world)]
        for stream in made:
            stream.set_epoch(2)
        return made

    before = streams(worlds[0], sizes[0])
    done = min(done, len(before[0]))
    given = [number for stream in before for number in numbers_of(islice(stream, done))]  # pyright: ignore
    states = [saved(stream.state_dict(batches=done)) for stream in before]
    assert all(state == states[0] for state in states)
    assert saved(before[0].state_dict()) == states[0], "in its own process a stream counts by itself"
    after = streams(worlds[1], sizes[1])
    for stream in after:
        stream.load_state_dict(states[0])
        num_batches = len(stream)
        rest = list(stream)
        assert len(rest) == num_batches
        given += numbers_of(rest)  # pyright: ignore
    assert len(set(given)) == len(given) > 101 - worlds[1]


def test_a_stream_of_records_counts_records(traces: ms.Traces):
    stream = traces.stream(LABEL, seed=SEED, order="exact")
    before = [sample.number for sample in islice(stream, 33)]  # pyright: ignore
    state = saved(stream.state_dict())
    assert state == stream.state_dict(batches=33)
    again = traces.stream(LABEL, seed=SEED, order="exact")
    again.load_state_dict(state)
    assert len(again) == 68
    assert before + [sample.number for sample in again] == ms.Order(101, SEED)[:].tolist()  # pyright: ignore
    again.set_epoch(1)
    assert len(again) == 101


def test_a_stream_and_a_loader_accept_each_others_states(traces: ms.Traces):
    loader = make(traces, batch_size=10)
    before = numbers_of(islice(loader, 4))
    stream = traces.stream(LABEL, batch_size=10, seed=SEED, order="exact")
    stream.load_state_dict(saved(loader.state_dict()))
    assert before + numbers_of(stream) == ms.Order(101, SEED)[:].tolist()  # pyright: ignore
    with pytest.raises(StateMismatch, match="seed"):
        traces.stream(LABEL, batch_size=10, seed=1).load_state_dict(loader.state_dict())
