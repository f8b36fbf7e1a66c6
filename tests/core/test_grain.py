"""Collections are data sources of the real Grain: its DataLoader, its datasets and its worker processes read them."""

import json
import pickle
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millstream as ms
from support.effort import THOROUGH
from support.making_small import write_reads, write_traces

grain = pytest.importorskip("grain", reason="not installed: pip install grain")
# absl, which Grain imports, closes the stream it found at import when logging is set up again: pytest's stderr.
pytest.importorskip("absl.logging").get_absl_handler().python_handler.stream = sys.__stderr__

NUM_RECORDS = 60
KINDS = ["traces", "reads", "tables", "subset", "mixture"]
# Processes take seconds to start: those of the dataset are tried with one kind, those of the DataLoader with another.
DATASETS = [*((kind, 0) for kind in KINDS), ("tables", 1)]
LOADERS = [*((kind, 0) for kind in KINDS), ("traces", 2), *([("reads", 1), ("tables", 1)] if THOROUGH else [])]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of Grain's own


@pytest.fixture(scope="module", params=KINDS)
def collection(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ms.Collection:
    folder: Path = tmp_path_factory.mktemp("grain")
    if request.param == "reads":
        return write_reads(folder / "reads.fa", range(NUM_RECORDS))
    if request.param == "tables":
        names = pa.array([f"q{number}" for number in range(NUM_RECORDS)])
        pq.write_table(pa.table({"question_id": names}), folder / "rows.parquet", row_group_size=16)
        return ms.open(folder / "rows.parquet")
    traces = write_traces(folder / "traces", [f"q{number}" for number in range(NUM_RECORDS)])
    if request.param == "subset":
        return traces.subset(np.arange(NUM_RECORDS)[::-1])
    parts: dict[ms.Collection, float] = {traces.subset(np.arange(30)): 1, traces.subset(np.arange(30, 60)): 1}
    return ms.mix(parts, seed=1) if request.param == "mixture" else traces


def name_of(record: Any) -> str:
    """What tells one record from the others."""
    return str(record["question_id"] if isinstance(record, dict) else record.name)


pytest.importorskip("cloudpickle").register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def names_of(batches: Iterable[Any]) -> list[str]:
    return [str(name) for batch in batches for name in batch]


def wanted(collection: ms.Collection) -> list[str]:
    return [name_of(collection[number]) for number in range(len(collection))]


def test_a_collection_is_a_random_access_data_source(collection: ms.Collection):
    assert isinstance(collection, grain.sources.RandomAccessDataSource)
    assert name_of(collection[np.int64(3)]) == name_of(collection[3])  # pyright: ignore[reportArgumentType]
    again = pickle.loads(pickle.dumps(collection))
    assert wanted(again) == wanted(collection)
    assert repr(again) == repr(collection), "Grain compares it when it resumes"


@pytest.mark.parametrize(("collection", "workers"), DATASETS, indirect=["collection"])
def test_a_shuffled_dataset_has_every_record_once(collection: ms.Collection, workers: int):
    dataset = grain.MapDataset.source(collection).shuffle(seed=5).map(name_of).batch(8).to_iter_dataset()
    if workers:
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    found = names_of(dataset)
    assert sorted(found) == sorted(wanted(collection)) and found != wanted(collection)


def test_a_dataset_resumes_in_the_middle_of_an_epoch(collection: ms.Collection):
    dataset = grain.MapDataset.source(collection).shuffle(seed=5).map(name_of).batch(8).to_iter_dataset()
    batches = iter(dataset)
    first = names_of(next(batches) for _ in range(3))
    state = json.loads(json.dumps(batches.get_state()))
    again = iter(dataset)
    again.set_state(state)
    assert first + names_of(again) == names_of(dataset)


class Name(grain.transforms.Map):
    def map(self, element: Any) -> str:
        return name_of(element)


@pytest.mark.parametrize(("collection", "workers"), LOADERS, indirect=["collection"])
def test_a_dataloader_reads_every_record_once_and_resumes(collection: ms.Collection, workers: int):
    def loader() -> Any:
        sampler = grain.samplers.IndexSampler(len(collection), num_epochs=1, shuffle=True, seed=7)
        steps = [Name(), grain.transforms.Batch(6)]
        return grain.DataLoader(
            data_source=collection, sampler=sampler, operations=steps, worker_count=workers, worker_buffer_size=1
        )

    whole = names_of(loader())
    assert sorted(whole) == sorted(wanted(collection)) and whole != wanted(collection)
    batches = iter(loader())
    first = names_of(next(batches) for _ in range(4))
    again = iter(loader())
    again.set_state(batches.get_state())
    assert first + names_of(again) == whole
