"""The snippets of the old guides (lazy loading, IterableDataset, its architecture) run on small data."""

import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from millstream.classic import PreprocessedLSTMDataset, num_workers_for, train_val_test

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create", "ignore:This process .* is multi-threaded"
)
L, D = 4, 16
NUM_FILES, TRACES = 44, 3  # 44 files as in the guide, which have 250 traces each


def write_files(folder: Path, num_files: int, traces: int) -> list[Path]:
    folder.mkdir(parents=True)
    for number in range(num_files):
        content = {
            "sequences": torch.full((traces, L, D), float(number)).half(),
            "labels": torch.tensor([float(row % 2) for row in range(traces)]),
            "question_ids": [f"tc_{number * traces + row}" for row in range(traces)],
        }
        torch.save(content, folder / f"preprocessed_{number:04d}.pt")
    return sorted(folder.glob("preprocessed_*.pt"))


@pytest.fixture
def dir(tmp_path: Path) -> Path:
    write_files(tmp_path / "preprocessed_data" / "lstm_solo", 4, TRACES)
    return tmp_path / "preprocessed_data"


def collate_lstm_batch(batch: list[tuple[torch.Tensor, torch.Tensor, str]]):
    """As in the old script."""
    return torch.stack([item[0] for item in batch]), torch.stack([item[1] for item in batch]), [i[2] for i in batch]


def ids_of(loader: DataLoader) -> list[str]:
    return [name for _, _, names in loader for name in names]


def every(count: int) -> set[str]:
    return {f"tc_{number}" for number in range(count)}


# -- 001: lazy loading


@pytest.mark.parametrize("max_cache_batches", [1, 2, 4])
def test_001_every_cache_size_gives_the_same_traces_in_random_order(dir, max_cache_batches):
    dataset = PreprocessedLSTMDataset(dir, max_cache_batches=max_cache_batches)
    assert len(dataset) == 4 * TRACES
    loader = DataLoader(dataset, batch_size=5, shuffle=True, collate_fn=collate_lstm_batch)
    seen = {}
    for sequences, labels, question_ids in loader:
        assert sequences.shape[1:] == (L, D)
        assert labels.dtype == torch.float32
        seen |= {name: float(sequence[0, 0]) for name, sequence in zip(question_ids, sequences, strict=True)}
    assert seen == {f"tc_{number}": float(number // TRACES) for number in range(4 * TRACES)}


def test_001_ids_and_labels_are_known_without_reading_a_tensor(dir):
    dataset = PreprocessedLSTMDataset(dir)
    for shard in (dir / "lstm_solo" / "millstream-lstm").glob("shard-*.arrow"):
        shard.unlink()
    assert set(dataset.question_ids) == every(4 * TRACES)
    assert dataset.labels.sum() == 4


# -- 002: IterableDataset


def test_002_before_a_single_process_loads(dir):
    dataset = PreprocessedLSTMDataset(dir)
    loader = DataLoader(dataset, num_workers=0)
    assert ids_of(loader) == [f"tc_{number}" for number in range(4 * TRACES)]


def test_002_now_four_workers_load_and_len_works(dir):
    dataset = PreprocessedLSTMDataset(dir, shuffle_buffer_size=1000)
    loader = DataLoader(dataset, num_workers=4)
    assert isinstance(dataset, IterableDataset)
    assert len(dataset) == len(loader) == 4 * TRACES
    first, second = ids_of(loader), ids_of(loader)
    assert len(first) == len(second) == 4 * TRACES
    assert set(first) == set(second) == every(4 * TRACES)
    assert first != second


def test_002_validation_is_not_shuffled(dir):
    dataset = PreprocessedLSTMDataset(dir, shuffle_buffer_size=0)
    assert ids_of(DataLoader(dataset)) == ids_of(DataLoader(dataset)) == [f"tc_{n}" for n in range(4 * TRACES)]


def test_002_the_number_of_workers_is_the_minimum_of_files_cpus_and_4():
    num_cpus = len(os.sched_getaffinity(0))
    for num_files in (1, 2, 30):
        assert num_workers_for(num_files) == min(num_files, num_cpus, 4)


# -- 003: 44 files, split 70/15/15, distributed over workers


def test_003_44_files_split_by_file_and_loaded_by_workers(tmp_path):
    files = write_files(tmp_path / "lstm_solo", NUM_FILES, TRACES)
    train_files, val_files, test_files = files[:31], files[31:37], files[37:]
    train = PreprocessedLSTMDataset(tmp_path, batch_files_to_load=train_files, shuffle_buffer_size=1000)
    val = PreprocessedLSTMDataset(tmp_path, batch_files_to_load=val_files, shuffle_buffer_size=0)
    test = PreprocessedLSTMDataset(tmp_path, batch_files_to_load=test_files, shuffle_buffer_size=0)
    assert [len(part) for part in (train, val, test)] == [31 * TRACES, 6 * TRACES, 7 * TRACES]
    loader = DataLoader(train, batch_size=32, num_workers=4, collate_fn=collate_lstm_batch)
    assert sorted(ids_of(loader)) == sorted(every(31 * TRACES))
    assert ids_of(DataLoader(val)) == [f"tc_{number}" for number in range(31 * TRACES, 37 * TRACES)]
    assert ids_of(DataLoader(test)) == [f"tc_{number}" for number in range(37 * TRACES, 44 * TRACES)]


def test_003_44_files_split_by_question(tmp_path):
    write_files(tmp_path / "lstm_solo", NUM_FILES, TRACES)
    train, val, test = train_val_test(PreprocessedLSTMDataset(tmp_path, shuffle_buffer_size=1000))
    parts = [set(ids_of(DataLoader(part))) for part in (train, val, test)]
    assert set().union(*parts) == every(NUM_FILES * TRACES)
    assert sum(map(len, parts)) == NUM_FILES * TRACES
    assert 0.6 < len(train) / (NUM_FILES * TRACES) < 0.8
