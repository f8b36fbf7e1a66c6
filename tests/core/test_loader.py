"""An epoch has every record once, in the same order for any threads and memory; errors are raised at their batch."""

import gc
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.core.collection import Medium
from millstream.core.loader import REMOTE_THREADS, plan_threads
from millstream.core.prefetch import SHARED_BYTES, share, shared_by
from millstream.errors import CorruptRecord, OverBudget
from support.effort import num_examples
from support.loading import (
    by_number,
    collect,
    draw,
    is_right,
    numbers_of,
    open_traces,
    read,
    refuse_60,
    same,
    write_records,
    write_traces,
)
from support.making import flip, place_of

pytestmark = pytest.mark.on_disk

LABEL = ms.features.fields("label")
# With both given, nothing is printed.
QUIET = {"order": "exact", "threads": 2}


@settings(max_examples=num_examples(25))
@given(n=st.integers(1, 101), batch_size=st.integers(1, 120), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_an_epoch_has_every_record_once_in_the_order_of_ms_order(
    traces: ms.Traces, n: int, batch_size: int, seed: int, epoch: int
):
    loader = ms.Loader(traces.subset(range(n)), batch_size=batch_size, features=LABEL, seed=seed, **QUIET)
    loader.set_epoch(epoch)
    batches = list(loader)
    assert numbers_of(batches) == ms.Order(n, seed, epoch)[:].tolist()
    assert sorted(numbers_of(batches)) == list(range(n))
    assert {len(batch["numbers"]) for batch in batches[:-1]} <= {batch_size}
    assert len(batches) == len(loader) == -(-n // batch_size)


def test_batches_equal_what_was_written_for_any_number_of_threads(traces: ms.Traces):
    runs = [list(ms.Loader(traces, batch_size=9, seed=1, order="exact", threads=t)) for t in (0, 1, 4)]
    assert all(map(is_right, runs[0]))
    assert same(runs[1], runs[0]) and same(runs[2], runs[0])


@pytest.mark.parametrize("threads", [0, 2])
def test_kept_batches_do_not_change_when_others_are_loaded(tmp_path: Path, threads: int):
    """Memory is used again: only that of batches nobody has any more."""
    big = write_records(tmp_path / "store", ({"big": np.full(40_000, n, np.float32)} for n in range(48)))
    loader = ms.Loader(big, batch_size=2, memory="40MB", order="exact", threads=threads)
    kept = [batch for step, batch in enumerate(loader) if step % 3 == 0]
    views = [batch["big"][1, ::7] for step, batch in enumerate(loader) if step % 3 == 0]
    assert all((batch["big"] == batch["numbers"][:, None]).all() for batch in kept)
    order = ms.Order(48, 0, 1)
    assert all((view == order[2 * 3 * place + 1]).all() for place, view in enumerate(views))


def test_the_next_loop_is_the_next_epoch(traces: ms.Traces):
    loader = ms.Loader(traces, batch_size=8, features=LABEL, seed=5, **QUIET)
    loops = [numbers_of(loader) for _ in range(3)]
    assert loader.epoch == 3
    loader.set_epoch(1)
    assert loader.epoch == 1 and numbers_of(loader) == loops[1]
    assert loops == [ms.Order(101, 5, epoch)[:].tolist() for epoch in range(3)]


def test_after_leaving_a_loop_the_next_one_repeats_the_epoch(traces: ms.Traces):
    loader = ms.Loader(traces, batch_size=8, features=LABEL, **QUIET)
    begun = numbers_of(islice(loader, 3))
    assert loader.epoch == 0 and numbers_of(loader)[:24] == begun


def test_len_counts_the_epoch_and_remaining_the_rest_after_a_resume(traces: ms.Traces):
    loader = ms.Loader(traces, batch_size=8, features=LABEL, **QUIET)
    assert len(loader) == loader.remaining == 13
    list(islice(loader, 5))
    again = ms.Loader(traces, batch_size=8, features=LABEL, **QUIET)
    again.load_state_dict(loader.state_dict())
    assert len(again) == 13 and again.remaining == 8 == len(list(again))
    assert again.remaining == 13, "the next loop is a whole epoch"


def test_drop_last_leaves_out_the_short_batch(traces: ms.Traces):
    loader = ms.Loader(traces, batch_size=8, features=LABEL, drop_last=True, **QUIET)
    assert len(loader) == 12
    assert numbers_of(loader) == ms.Order(101)[:96].tolist()


def test_an_empty_collection_has_no_batches(traces: ms.Traces):
    loader = ms.Loader(traces.subset([]), batch_size=8, **QUIET)
    assert len(loader) == 0 and list(loader) == [] and loader.epoch == 1


# -- what goes wrong


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_a_damaged_record_is_named_at_its_batch_and_all_earlier_batches_are_delivered(
    traces: ms.Traces, tmp_path: Path, threads: int
):
    store = tmp_path / "store"
    shutil.copytree(traces.path, store)
    broken = ms.Order(101, 3)[43]
    flip(*place_of(store, broken, "hidden"))
    loader = ms.Loader(open_traces(store), batch_size=8, seed=3, order="exact", threads=threads)
    found: list[dict[str, object]] = []
    with pytest.raises(CorruptRecord, match=f"record {broken} .*'hidden'") as caught:
        collect(loader, found)
    assert numbers_of(found) == ms.Order(101, 3)[:40].tolist() and all(map(is_right, found))
    assert loader.state_dict()["samples"] == 40
    assert any(f"record {broken} " in note for note in caught.value.__notes__)
    assert any("batch 5 of epoch 0" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_an_error_in_a_feature_names_its_record_at_its_batch(traces: ms.Traces, threads: int):
    part = traces.subset(np.arange(50, 101))  # the record is named by its own number, not by the subset's
    at = ms.Order(51, 4)[:].tolist().index(10)
    loader = ms.Loader(part, batch_size=4, seed=4, features=ms.features.each(refuse_60), order="exact", threads=threads)
    found: list[dict[str, object]] = []
    with pytest.raises(ArithmeticError, match="sixty is too much") as caught:
        collect(loader, found)
    assert numbers_of(found) == (ms.Order(51, 4)[: at // 4 * 4] + 50).tolist()
    assert "record 60 is the first in its batch that fails" in caught.value.__notes__


def fail_in_the_body(loader: ms.Loader) -> None:
    for _ in loader:
        raise KeyboardInterrupt


def test_no_thread_outlives_its_loop_however_it_ends(traces: ms.Traces):
    before = set(threading.enumerate())
    loader = ms.Loader(traces, batch_size=4, order="exact", threads=4)

    for _ in loader:
        assert len(set(threading.enumerate()) - before) <= 4
        break
    assert not set(threading.enumerate()) - before, "break"

    with pytest.raises(KeyboardInterrupt):
        fail_in_the_body(loader)
    assert not set(threading.enumerate()) - before, "an exception in the body"

    dropped = iter(loader)
    next(dropped)
    del dropped
    gc.collect()
    assert not set(threading.enumerate()) - before, "dropping the iterator"

    unused = iter(loader)
    del unused
    with pytest.raises(ArithmeticError):
        list(ms.Loader(traces, batch_size=4, features=ms.features.each(refuse_60), order="none", threads=3))
    assert not set(threading.enumerate()) - before, "an error of a batch"

    list(loader)
    assert not set(threading.enumerate()) - before, "the end"


def test_two_simultaneous_loops_do_not_disturb_each_other(traces: ms.Traces):
    loader = ms.Loader(traces, batch_size=8, seed=2, **QUIET)
    other = ms.Loader(traces, batch_size=8, seed=3, **QUIET)
    alone = [list(ms.Loader(traces, batch_size=8, seed=seed, **QUIET)) for seed in (2, 3)]
    first, second, third = zip(*zip(loader, loader, other, strict=True), strict=True)
    assert same(list(first), alone[0]) and same(list(second), alone[0]) and same(list(third), alone[1])


@pytest.mark.parametrize("threads", [0, 2])
def test_a_batch_larger_than_the_budget_is_an_error_with_the_sizes(traces: ms.Traces, threads: int):
    loader = ms.Loader(traces, batch_size=64, memory="20kB", order="exact", threads=threads)
    with pytest.raises(OverBudget, match=r"[\d.]+ kB.* [\d.]+ kB.*batch_size"):
        next(iter(loader))
    with pytest.raises(MemoryError):
        list(loader)
    assert len(list(ms.Loader(traces, batch_size=4, memory="20kB", order="exact", threads=threads))) == 26


def test_a_budget_of_few_compressed_blocks_is_refused_before_the_first_batch(
    traces: ms.Traces, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ms.Traces, "medium", Medium(num_bytes=10**9, run_bytes=6_000_000, is_random=False))
    with pytest.raises(OverBudget, match=r"blocks of these files take 6\.0 MB.* at least 48\.0 MB"):
        ms.Loader(traces, batch_size=4, memory="24MB")
    ms.Loader(traces, batch_size=4, memory="48MB", order="none")


def test_a_large_record_at_the_end_is_refused_before_the_first_batch(tmp_path: Path):
    sizes = [100] * 60 + [40_000]
    records = ({"question_id": f"q{i}", "values": np.zeros(size, np.float32)} for i, size in enumerate(sizes))
    loader = ms.Loader(write_records(tmp_path / "traces", records), batch_size=4, memory="100kB", order="none")
    delivered: list[object] = []
    with pytest.raises(OverBudget):
        delivered.extend(loader)
    assert delivered == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"order": "random"}, "order='random'"),
        ({"rank": 1}, "rank=1, world=None"),
        ({"rank": 2, "world": 2}, "rank=2 of world=2"),
        ({"features": ms.features.fields("hiden")}, "'hiden'.*question_id"),
        ({"memory": "much"}, "'much'"),
    ],
)
def test_a_bad_argument_is_an_error_when_the_loader_is_made(traces: ms.Traces, wrong: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        ms.Loader(traces, **{"batch_size": 8, **wrong})  # pyright: ignore


def test_two_features_with_the_same_output_name_are_an_error(traces: ms.Traces):
    loader = ms.Loader(traces, batch_size=8, features=[LABEL, ms.features.fields("label", "vector")], **QUIET)
    with pytest.raises(ValueError, match="'label'"):
        next(iter(loader))


# -- the plan


def test_the_plan_is_one_line_with_every_choice_and_its_reason(traces: ms.Traces):
    asked = ms.Loader(traces, batch_size=8, rank=1, world=2, **QUIET).plan
    assert re.fullmatch(
        r"101 records, 7 batches of 8 \([\d.]+ kB\), rank 1 of 2; order exact: as requested; 2 threads: as requested; "
        r"memory 2\.0 GB",
        asked,
    )
    chosen = ms.Loader(traces, batch_size=8).plan
    assert re.search(r"order exact: .* fit in .* of free memory; \d+ threads: \d+ cores;", chosen)
    assert "\n" not in chosen


def test_the_plan_is_printed_once_unless_order_and_threads_are_given(
    traces: ms.Traces, capfd: pytest.CaptureFixture[str]
):
    loader = ms.Loader(traces, batch_size=8, features=LABEL)
    list(loader)
    list(loader)
    out, err = capfd.readouterr()
    assert out == "" and err == f"loader: {loader.plan}\n"
    list(ms.Loader(traces, batch_size=8, features=LABEL, **QUIET))
    list(ms.Loader(traces, batch_size=8, features=LABEL, rank=1, world=2))
    assert capfd.readouterr() == ("", "")


# -- features


def test_a_random_transform_of_a_record_is_the_same_in_any_batch_thread_and_order(traces: ms.Traces):
    feature = ms.features.each(draw, fields=["label"])

    def run(epoch: int = 1, seed: int = 8, **options: object) -> dict[int, object]:
        loader = ms.Loader(traces, features=feature, seed=seed, **options)  # pyright: ignore
        loader.set_epoch(epoch)
        return by_number(loader, "noise", "twice")

    first = run(batch_size=8, order="exact", threads=2)
    assert len(first) == 101
    assert first == run(batch_size=101, order="none", threads=0)
    assert first == run(batch_size=1, order="window", threads=4)
    assert first != run(batch_size=8, order="exact", threads=2, epoch=2)
    assert first != run(batch_size=8, order="exact", threads=2, seed=9)
    assert all(twice == 2 * number for number, (_, twice) in first.items())  # pyright: ignore


def test_random_draws_for_a_record_are_the_same_in_a_subset(traces: ms.Traces):
    feature = ms.features.each(draw, fields=["label"])
    whole = by_number(ms.Loader(traces, batch_size=8, features=feature, **QUIET), "noise")
    part = by_number(ms.Loader(traces.subset(range(30, 60)), batch_size=8, features=feature, **QUIET), "noise")
    assert part == {number: whole[number] for number in range(30, 60)}


def test_features_of_different_layers_of_a_field_share_a_batch(traces: ms.Traces):
    wanted = [ms.features.layers(token=0, layers=[1]), ms.features.fields("hidden[0,2]", "vector"), LABEL]
    (batch,) = ms.Loader(traces.subset([4, 9]), batch_size=2, features=wanted, order="none", threads=0)
    assert batch["layers"].shape == (2, 1, 4) and batch["hidden"].shape == (2, 2, 6, 4)
    assert batch["label"].tolist() == [4, 9] == batch["numbers"].tolist()


def test_a_feature_receives_only_its_own_fields(traces: ms.Traces):
    asked = [ms.features.layers(), LABEL, ms.features.each(lambda record, _: {"seen": len(record)}, fields=["vector"])]
    (batch,) = ms.Loader(traces.subset([4, 9]), batch_size=2, features=asked, **QUIET)
    assert list(batch) == ["layers", "label", "seen", "numbers"] and batch["seen"].tolist() == [1, 1]


def test_the_cost_of_texts_is_not_overestimated(traces: ms.Traces):
    many = traces.subset(np.arange(5_000) % 101)
    loader = ms.Loader(many, batch_size=1_000, features=ms.features.fields("question_id"), memory="4MB", **QUIET)
    assert [len(batch["question_id"]) for batch in loader] == [1_000] * 5


def test_without_padding_tensors_are_a_list(traces: ms.Traces):
    feature = ms.features.fields("hidden", "grade", pad=False)
    for batch in ms.Loader(traces, batch_size=8, features=feature, **QUIET):
        assert all(isinstance(tensor, torch.Tensor) for tensor in batch["hidden"])
        assert [tensor.shape[1] for tensor in batch["hidden"]] == [2 + n % 5 for n in batch["numbers"].tolist()]
        assert batch["grade"].dtype == torch.bfloat16


# -- reads


def test_reads_load_with_their_columns_in_window_order(reads: ms.Reads):
    feature = ms.features.fields("sequence", "class_id")
    loader = ms.Loader(reads, batch_size=2048, features=feature, seed=6, order="window", threads=2, memory="4MB")
    order = ms.Order(60_000, 6, 0, *loader.state_dict()["order"])  # pyright: ignore
    assert order.mode == "window" and order.block * order.window < 60_000
    batches = list(loader)
    assert numbers_of(batches) == order[:].tolist()
    for batch in batches[::10]:
        for row, number in enumerate(batch["numbers"].tolist()):
            label, letters = read(number)
            kept = batch["sequence"][row][batch["sequence_mask"][row]]
            assert bytes(kept.tolist()).decode() == letters and batch["class_id"][row] == label


def test_window_order_decodes_each_compressed_block_few_times(reads: ms.Reads):
    if reads.paths[0].suffix != ".gz":
        pytest.skip("this file is not compressed")
    loader = ms.Loader(reads, batch_size=2048, seed=6, order="window", threads=2, memory="8MB")
    list(loader)
    decoded = loader._collection.decoded_blocks  # pyright: ignore
    assert decoded <= 3 * reads.medium.num_bytes / reads.medium.run_bytes


def test_augmented_tokens_of_a_read_are_the_same_in_any_batch_thread_and_order(reads: ms.Reads):
    feature = ms.features.tokens(
        "kmer(3)",
        columns=["class_id"],
        max_length=20,
        pad="max_length",
        crop_length=25,
        reverse_complement=0.5,
        mask=0.1,
    )

    def run(epoch: int = 1, **options: object) -> dict[int, object]:
        loader = ms.Loader(reads.subset(range(300)), features=feature, memory="4MB", **options)  # pyright: ignore
        loader.set_epoch(epoch)
        return by_number(loader, "input_ids", "attention_mask", "class_id")

    first = run(batch_size=64, order="window", threads=2)
    assert len(first) == 300
    assert first == run(batch_size=7, order="exact", threads=0)
    assert first == run(batch_size=300, order="none", threads=4)
    assert first != run(batch_size=64, order="window", threads=2, epoch=2)


def test_a_loader_keeps_the_header_regex_of_its_reads(reads: ms.Reads):
    """A loader opens the files again, with its own memory: the same columns are there."""
    batch = next(iter(ms.Loader(reads, batch_size=4, order="none", threads=0, memory="1MB")))
    assert batch["class_id"].tolist() == [0, 1, 2, 3]


# -- subsets and mixtures


def test_numbers_refer_to_the_whole_collection(traces: ms.Traces):
    split = ms.split(traces, {"train": 0.6, "val": 0.4})
    found: list[int] = []
    for part in split:
        for batch in ms.Loader(part.subset(range(len(part))), batch_size=8, **QUIET):
            assert is_right(batch)
            found += batch["numbers"].tolist()
    assert sorted(found) == list(range(101))


def test_a_mixture_has_other_records_in_other_epochs_and_resumes_exactly(traces: ms.Traces, tmp_path: Path):
    other = write_traces(tmp_path / "other", range(200, 220))
    mixture = ms.mix({traces: 0.5, other: 0.5}, seed=1)
    whole = ms.Loader(mixture, batch_size=4, seed=2, **QUIET)
    epochs = [list(whole) for _ in range(3)]
    assert all(len(numbers_of(epoch)) == 40 for epoch in epochs)
    assert len({tuple(sorted(numbers_of(epoch))) for epoch in epochs}) == 3
    of_traces = [number for epoch in epochs[:2] for number in numbers_of(epoch) if number < 101]
    assert len(set(of_traces)) == 40, "what an epoch did not take comes in the next"
    labels = [label for batch in epochs[0] for label in batch["label"].tolist()]
    assert labels == [n if n < 101 else n - 101 + 200 for n in numbers_of(epochs[0])]

    for threads, (epoch, done) in enumerate([(0, 3), (1, 0), (2, 7)]):
        stopped = ms.Loader(mixture, batch_size=4, seed=2, **QUIET)
        stopped.set_epoch(epoch)
        assert same(list(islice(stopped, done)), epochs[epoch][:done])
        resumed = ms.Loader(ms.mix({traces: 0.5, other: 0.5}, seed=1), batch_size=4, seed=2, threads=threads)
        resumed.load_state_dict(stopped.state_dict())
        assert same(list(resumed), epochs[epoch][done:])


def test_a_program_may_end_in_the_middle_of_a_loop(traces: ms.Traces):
    code = (
        "import os, sys, torch, millstream as ms\n"
        "traces = ms.open(sys.argv[1])\n"
        "for _ in range(3):  # programs, imported once\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        break\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "else:\n"
        "    sys.exit()\n"
        "loader = ms.Loader(traces, batch_size=2, threads=4, order='exact')\n"
        "left_alone = iter(loader)\n"
        "next(left_alone)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(traces.path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_remote_batches_get_more_threads_than_cores_only_if_connections_would_be_idle():
    at_home, _ = plan_threads(None, batch_bytes=1, budget=1 << 30)
    assert plan_threads(None, batch_bytes=1, budget=1 << 30, requests=1000)[0] == at_home
    assert plan_threads(None, batch_bytes=1, budget=1 << 30, requests=1)[0] == max(at_home, REMOTE_THREADS)
    assert plan_threads(None, batch_bytes=100, budget=300, requests=1)[0] <= 2, "memory for three batches"


def test_threads_that_share_a_batch_do_all_of_it_once_and_raise_their_errors():
    done: list[int] = []
    with shared_by(3):
        share(done.extend, range(10), sizes=[SHARED_BYTES] * 10)
    assert sorted(done) == list(range(10))

    def read_some(numbers: Sequence[int]) -> None:
        if 9 in numbers:
            raise CorruptRecord("record 9")

    with shared_by(3), pytest.raises(CorruptRecord, match="record 9"):
        share(read_some, range(10), sizes=[SHARED_BYTES] * 10)


def test_a_large_batch_that_two_threads_read_together_is_the_same(tmp_path: Path):
    with ms.TraceWriter(tmp_path / "large", shard_records=5) as writer:
        for number in range(16):
            writer.append({"hidden": np.full((2, 300 + number, 1000), number, np.float16)})
    traces = ms.open(tmp_path / "large")
    loaders = [ms.Loader(traces, batch_size=8, seed=3, threads=threads) for threads in (None, 0)]
    for shared, alone in zip(*loaders, strict=True):
        assert shared["numbers"].tolist() == alone["numbers"].tolist()
        assert torch.equal(shared["hidden"], alone["hidden"]) and torch.equal(
            shared["hidden_mask"], alone["hidden_mask"]
        )
