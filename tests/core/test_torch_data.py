"""The stock DataLoader gives the batches of `ms.Loader`, with any workers, samplers and collation."""

import gc
import os
import pickle
import resource
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

import millstream as ms
from millstream.errors import CorruptRecord, OverBudget
from support.loading import (
    by_number,
    collect,
    draw,
    is_right,
    numbers_of,
    open_traces,
    refuse_60,
    same,
    trace,
    write_records,
)
from support.making import flip, place_of

LABEL = ms.features.fields("label")
SEED = 3


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> ms.Traces:
    """48 records of 160 kB, each full of its number."""
    path = tmp_path_factory.mktemp("big") / "store"
    return write_records(path, ({"big": np.full(40_000, number, np.float32)} for number in range(48)))


def load(dataset: Any, **options: Any) -> list[Any]:
    return list(batches_of(DataLoader(dataset, **options)))


def batches_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """After an error torch's iterator is left to the garbage collector, and then waits 5 s for each worker."""
    batches = iter(loader)
    try:
        yield from batches
    finally:
        if loader.num_workers:
            batches._shutdown_workers()  # pyright: ignore


def loader_batches(collection: ms.Collection, epoch: int = 0, **options: Any) -> list[dict[str, object]]:
    loader = ms.Loader(collection, **{"seed": SEED, "order": "exact", "threads": 0, **options})
    loader.set_epoch(epoch)
    return list(loader)


def order(epoch: int = 0) -> list[int]:
    return ms.Order(101, SEED, epoch)[:].tolist()


# -- map-style


@pytest.mark.parametrize("workers", [0, 2])
def test_default_collation_gives_the_batches_of_a_loader(traces: ms.Traces, workers: int):
    wanted = loader_batches(traces, batch_size=8)
    found = load(traces.dataset(seed=SEED), batch_size=8, sampler=order(), num_workers=workers)
    assert same(found, wanted) and all(map(is_right, found))


def test_spawned_workers_that_persist_see_every_epoch(traces: ms.Traces):
    """One worker each: a spawned one imports torch again."""
    feature = ms.features.each(draw, fields=["label"])
    options = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"}
    dataset, stream = traces.dataset(feature, seed=SEED), traces.stream(feature, batch_size=8, seed=SEED)
    mapped = DataLoader(dataset, batch_size=8, **options)  # pyright: ignore
    streamed = DataLoader(stream, batch_size=None, **options)  # pyright: ignore
    for epoch in (0, 1, 5):
        dataset.set_epoch(epoch)
        stream.set_epoch(epoch)
        both = iter(mapped), iter(streamed)  # started together
        wanted = loader_batches(traces, epoch, batch_size=8, features=feature)
        assert by_number(both[0], "noise", "twice") == by_number(wanted, "noise", "twice")
        assert same(list(both[1]), wanted)


def test_forked_workers_that_persist_see_every_epoch(traces: ms.Traces):
    feature = ms.features.each(draw, fields=["label"])
    dataset = traces.dataset(feature, seed=SEED)
    options = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
    mapped = DataLoader(dataset, batch_size=8, **options)  # pyright: ignore
    epochs: list[dict[int, object]] = []
    for epoch in (0, 1):
        dataset.set_epoch(epoch)
        epochs.append(by_number(mapped, "noise"))
        assert epochs[-1] == by_number(loader_batches(traces, epoch, batch_size=9, features=feature), "noise")
    assert epochs[0] != epochs[1]


def test_samples_can_be_collated_by_hand(traces: ms.Traces):
    dataset = traces.dataset(LABEL)
    batch = torch.utils.data.default_collate([dataset[5], dataset[3]])
    assert batch["numbers"].tolist() == [5, 3]


def test_samplers_choose_the_records(traces: ms.Traces):
    dataset = traces.dataset(LABEL)
    weights = [1.0 if number in (7, 70) else 0.0 for number in range(101)]
    weighted = load(dataset, batch_size=10, sampler=WeightedRandomSampler(weights, 50))
    assert len(numbers_of(weighted)) == 50 and set(numbers_of(weighted)) == {7, 70}
    some = load(dataset, batch_size=10, sampler=SubsetRandomSampler(range(20, 45)), num_workers=1)
    assert sorted(numbers_of(some)) == list(range(20, 45))
    batched = load(dataset, batch_sampler=BatchSampler(SequentialSampler(dataset), 40, drop_last=True))
    assert [batch["label"].tolist() for batch in batched] == [[*range(40)], [*range(40, 80)]]
    shuffled = load(dataset, batch_size=10, shuffle=True, generator=torch.Generator().manual_seed(1))
    assert sorted(numbers_of(shuffled)) == list(range(101)) != numbers_of(shuffled)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_custom_collate_fn_receives_every_sample_as_a_mapping(traces: ms.Traces, workers: int):
    def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        assert all(isinstance(sample, Mapping) for sample in samples)
        assert all(set(sample) == {*trace(0), "numbers"} for sample in samples)
        return {
            "ids": [sample["question_id"] for sample in samples],
            "sum": torch.stack([sample["hidden"].float().sum() for sample in samples]),
            "grade": torch.stack([sample["grade"] for sample in samples]),
            "hidden": [sample["hidden"] for sample in samples],
        }

    found = load(traces.dataset(), batch_size=25, num_workers=workers, collate_fn=collate)
    assert [name for batch in found for name in batch["ids"]] == [f"q{number}" for number in range(101)]
    sums = [float(np.asarray(trace(number)["hidden"]).astype(float).sum()) for number in range(101)]
    assert [value for batch in found for value in batch["sum"].tolist()] == sums
    hidden = [tensor for batch in found for tensor in batch["hidden"]]
    assert all(torch.equal(tensor, torch.as_tensor(trace(n)["hidden"])) for n, tensor in enumerate(hidden))
    assert all(batch["grade"].dtype == torch.bfloat16 for batch in found)


def test_a_dataset_is_a_sequence_of_records(traces: ms.Traces):
    dataset = traces.dataset()
    assert len(dataset) == 101
    assert dict(dataset[5])["question"] == trace(5)["question"] and int(dataset[-1]["label"]) == 100  # pyright: ignore
    assert torch.equal(dataset[7]["vector"], torch.full((5,), 7.0))  # pyright: ignore
    for wrong in (101, -102):
        with pytest.raises(IndexError, match="of 101"):
            dataset[wrong]


def test_samples_of_two_datasets_in_one_batch_are_an_error(traces: ms.Traces):
    both = torch.utils.data.ConcatDataset([traces.dataset(LABEL), traces.dataset(LABEL)])
    with pytest.raises(ValueError, match=r"ms\.concat"):
        load(both, batch_size=8, sampler=[1, 102])
    assert numbers_of(load(both, batch_size=2, sampler=[1, 2, 102, 103])) == [1, 2, 1, 2]


def test_a_dataset_survives_a_plain_pickle(traces: ms.Traces):
    feature = ms.features.each(draw, fields=["label"])
    dataset, stream = traces.dataset(feature, seed=SEED), traces.stream(feature, batch_size=8, seed=SEED)
    dataset.set_epoch(2)
    stream.set_epoch(2)
    list(islice(stream, 3))
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again, flow = pickle.loads(pickle.dumps((dataset, stream), protocol))
        assert same(load(again, batch_size=8), load(dataset, batch_size=8))
        assert same(list(flow), loader_batches(traces, 2, batch_size=8, features=feature))


# -- streams


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on a machine of two cores
def test_batches_of_a_stream_come_in_one_order_for_any_number_of_workers(traces: ms.Traces):
    wanted = loader_batches(traces, 2, batch_size=7)
    stream = traces.stream(batch_size=7, seed=SEED)
    stream.set_epoch(2)
    for workers in (0, 1, 2, 3):
        loader = DataLoader(stream, batch_size=None, num_workers=workers)
        assert len(loader) == len(stream) == 15
        assert same(list(loader), wanted)


def test_a_stream_without_batches_yields_every_record_once_over_all_workers(traces: ms.Traces):
    stream = traces.stream(seed=SEED)
    assert len(stream) == 101 and len(DataLoader(stream, batch_size=8)) == 13
    alone = load(stream, batch_size=8)
    assert same(alone, loader_batches(traces, batch_size=8))
    for workers in (1, 2):
        found = load(stream, batch_size=8, num_workers=workers)
        assert all(map(is_right, found))
        assert sorted(numbers_of(found)) == list(range(101))


def test_ranks_of_a_stream_can_be_given_by_hand(traces: ms.Traces):
    ranks = [traces.stream(LABEL, batch_size=8, seed=SEED, rank=rank, world=3) for rank in range(3)]
    found = [numbers_of(load(stream, batch_size=None, num_workers=2)) for stream in ranks]
    assert [len(numbers) for numbers in found] == [34, 34, 33]
    assert {len(stream) for stream in ranks} == {5}
    assert [found[place % 3][place // 3] for place in range(101)] == order()
    short = traces.stream(LABEL, batch_size=8, seed=SEED, rank=0, world=3, drop_last=True)
    assert [len(batch["numbers"]) for batch in load(short, batch_size=None)] == [8] * 4


def test_an_epoch_with_two_workers_resumes_after_a_number_of_batches(traces: ms.Traces):
    stream = traces.stream(LABEL, batch_size=8, seed=SEED)
    stream.set_epoch(1)
    before = numbers_of(islice(DataLoader(stream, batch_size=None, num_workers=2), 5))
    again = traces.stream(LABEL, batch_size=5, seed=SEED)
    again.load_state_dict(stream.state_dict(batches=5))
    loader = DataLoader(again, batch_size=None, num_workers=2, persistent_workers=True)
    assert before + numbers_of(loader) == order(1)
    again.set_epoch(2)
    assert numbers_of(loader) == order(2)


# -- what goes wrong


@pytest.mark.parametrize("workers", [0, 2])
def test_a_corrupt_record_raises_in_the_main_process_and_is_named(traces: ms.Traces, tmp_path: Path, workers: int):
    store = tmp_path / "store"
    shutil.copytree(traces.path, store)
    flip(*place_of(store, 43, "hidden"))
    broken = open_traces(store)
    for loader, batches in (
        (DataLoader(broken.dataset(), batch_size=8, num_workers=workers), 5),
        (
            DataLoader(broken.stream(batch_size=8, seed=SEED), batch_size=None, num_workers=workers),
            order().index(43) // 8,
        ),
    ):
        found: list[dict[str, object]] = []
        with pytest.raises(CorruptRecord, match="record 43 ") as caught:
            collect(batches_of(loader), found)
        assert len(found) == batches and all(map(is_right, found))
        # A worker's error comes as text, its notes among it.
        assert "record 43 is the first in its batch" in "".join(
            [str(caught.value), *getattr(caught.value, "__notes__", [])]
        )


def test_an_error_of_a_feature_in_a_worker_names_the_record(traces: ms.Traces):
    dataset = traces.dataset(ms.features.each(refuse_60))
    with pytest.raises(ArithmeticError, match=r"(?s)sixty is too much.*record 60 is the first in its batch"):
        load(dataset, batch_size=8, num_workers=1)


def test_a_batch_larger_than_a_workers_share_is_an_error(big: ms.Traces):
    assert len(load(big.dataset(memory="10MB"), batch_size=4)) == 12
    with pytest.raises(OverBudget, match=r"6\d\d\.\d kB.*num_workers"):
        load(big.dataset(memory="2MB"), batch_size=4)
    with pytest.raises(OverBudget, match="num_workers"):
        load(big.dataset(memory="4MB"), batch_size=4, num_workers=2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_large_record_at_the_end_of_a_stream_is_refused_before_the_first_batch(tmp_path: Path, num_workers: int):
    sizes = [100] * 120 + [40_000]
    records = ({"question_id": f"q{i}", "values": np.zeros(size, np.float32)} for i, size in enumerate(sizes))
    stream = write_records(tmp_path / "traces", records).stream(batch_size=4, memory="500kB", order="none")
    delivered: list[object] = []
    with pytest.raises(OverBudget):
        delivered.extend(batches_of(DataLoader(stream, batch_size=None, num_workers=num_workers)))
    assert delivered == []


# -- memory files


def memory_files() -> set[str]:
    """The memory files of workers that this process has mapped."""
    return {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:millstream" in line}


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory files are Linux's")
def test_tensors_stay_valid_after_worker_and_loader_are_gone(big: ms.Traces):
    before = memory_files()
    held = load(big.dataset(), batch_size=2, num_workers=2)
    gc.collect()
    assert len(memory_files() - before) >= len(held), "batches lie where the workers put them"
    assert all((batch["big"] == batch["numbers"][:, None]).all() for batch in held)
    rows = [batch["big"][1] for batch in held[:5]]
    rows[0] += 1000  # they are the consumer's own
    del held
    gc.collect()
    assert [row.unique().item() for row in rows] == [1001, 3, 5, 7, 9]
    del rows
    gc.collect()
    assert memory_files() <= before


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory files are Linux's")
def test_a_workers_memory_is_reused_only_after_the_consumer_dropped_it(big: ms.Traces):
    many = big.subset(np.arange(48 * 4) % 48)
    stream = many.stream(batch_size=2, seed=SEED, order="none")
    held: list[dict[str, Any]] = []
    files: set[str] = set()
    for step, batch in enumerate(DataLoader(stream, batch_size=None, num_workers=2)):
        assert (batch["big"] == batch["numbers"][:, None]).all()
        if step % 12 == 0:
            held.append(batch)
        del batch
        files |= memory_files()
    assert len(held) == 8
    assert all((batch["big"] == batch["numbers"][:, None]).all() for batch in held)
    assert [batch["numbers"].tolist() for batch in held] == [[24 * step % 48, 24 * step % 48 + 1] for step in range(8)]
    assert len(files) < 96, "96 batches took fewer files: their memory was used again"


def every_kind(batch: Any) -> dict[str, object]:
    """A feature's result with everything a batch can hold."""
    rows = len(batch)
    return {
        "bf16": torch.arange(rows, dtype=torch.bfloat16),
        "tensors": [torch.full((row % 3,), row, dtype=torch.int16) for row in range(rows)],
        "arrays": [np.full(row % 4, row, np.float64) for row in range(rows)],
        "texts": [f"Mühle {row}" for row in range(rows)],
        "nested": [[1, "zwei"], None, {"drei": 3.0}],
        "empty": torch.empty(rows, 0),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "scalar": torch.tensor(7, dtype=torch.uint8),
        "flags": np.arange(rows) % 2 == 0,
        "complex": torch.full((rows,), 1 + 2j),
        "number": 3,
    }


class EveryKind:
    fields: Sequence[str] = ("label",)

    def __call__(self, batch: Any, *, seed: int = 0, epoch: int = 0) -> dict[str, object]:
        return every_kind(batch)


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_every_type_of_value_in_a_batch_survives_the_transfer(traces: ms.Traces, kind: str):
    wanted = loader_batches(traces, batch_size=30, features=EveryKind(), order="none")
    here = traces.dataset(EveryKind()) if kind == "map" else traces.stream(EveryKind(), batch_size=30, order="none")
    assert same(load(here, batch_size=30 if kind == "map" else None), wanted)
    assert same(load(here, batch_size=30 if kind == "map" else None, num_workers=2), wanted)


def test_many_small_tensors_share_one_file(traces: ms.Traces):
    feature = ms.features.fields("hidden", "question", pad=False)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard[1]))
    try:
        found = load(traces.dataset(feature), batch_size=400, sampler=[*range(101)] * 40, num_workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, hard)
    assert numbers_of(found) == [*range(101)] * 40
    assert all(
        torch.equal(_first(batch["hidden"]), torch.as_tensor(trace(_first(batch["numbers"]))["hidden"]))
        for batch in found
    )


def _first(values: Iterable[Any]) -> Any:
    first: Iterator[Any] = iter(values)
    value = next(first)
    return int(value) if getattr(value, "ndim", 1) == 0 else value


def test_a_custom_collate_fn_may_change_batches_in_a_worker(big: ms.Traces):
    def renamed(samples: Sequence[Any]) -> dict[str, object]:
        batch = default_collate(samples)
        return {"inputs": batch["big"], "which": batch["numbers"]}

    batches = load(big.dataset(), batch_size=4, num_workers=1, collate_fn=renamed, persistent_workers=False)
    assert [batch["which"].tolist() for batch in batches] == [list(range(at, at + 4)) for at in range(0, 48, 4)]
    for batch in batches:
        assert torch.equal(batch["inputs"], batch["which"].float()[:, None].expand(4, 40_000))
