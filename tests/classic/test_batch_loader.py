"""The old vocabulary, and the code examples of the old documentation as they were printed."""

from pathlib import Path

import numpy as np
import pytest

import millstream as ms
from millstream.classic import TraceBatchLoader, batch_loader, extract_batch_subset, inspect_traces, merge_batches

BATCHES, SIZE = 10, 5


def trace(g: int) -> dict[str, object]:
    return {
        "question_id": f"q{g}",
        "question": f"Question {g}?",
        "generated_answer": f"Answer {g}",
        "tokens": np.arange(7 + g % 4),
        "prompt_length": 5,
        "hidden_states": np.full((3, 4, 8), g, np.float16),
    }


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ./traces_data in it, as the old scripts expected to be run."""
    monkeypatch.chdir(tmp_path)
    with ms.TraceWriter("traces_data", shard_records=SIZE) as writer:
        writer.extend(trace(g) for g in range(BATCHES * SIZE))
    return tmp_path


# From the old documentation; only the import line differs.
EXAMPLE_1 = """
from millstream.classic import TraceBatchLoader

loader = TraceBatchLoader()

# Calcular estadística global
total_tokens = 0
count = 0

for trace in loader.iter_traces():
    num_tokens = len(trace['tokens']) - trace['prompt_length']
    total_tokens += num_tokens
    count += 1

print(f"Promedio de tokens: {total_tokens / count:.2f}")
"""

EXAMPLE_2 = """
from millstream.classic import TraceBatchLoader

loader = TraceBatchLoader()

for epoch in range(num_epochs):
    for batch_idx, batch in enumerate(loader.iter_batches()):
        # Procesar batch completo (500 traces)
        graphs = build_graphs_from_batch(batch)
        loss = model.train_step(graphs)
        print(f"Epoch {epoch}, Batch {batch_idx}, Loss: {loss}")
"""

EXAMPLE_3 = """
from millstream.classic import TraceBatchLoader, extract_batch_subset

loader = TraceBatchLoader()
total_batches = len(loader)

# 80% train, 10% val, 10% test
train_batches = list(range(0, int(0.8 * total_batches)))
val_batches = list(range(int(0.8 * total_batches), int(0.9 * total_batches)))
test_batches = list(range(int(0.9 * total_batches), total_batches))

# Extraer splits
extract_batch_subset(train_batches, "./traces_data/train_set.pkl")
extract_batch_subset(val_batches, "./traces_data/val_set.pkl")
extract_batch_subset(test_batches, "./traces_data/test_set.pkl")
"""


def test_example_1_counts_tokens_over_all_traces(here: Path, capsys: pytest.CaptureFixture[str]):
    exec(EXAMPLE_1, {})
    expected = np.mean([2 + g % 4 for g in range(BATCHES * SIZE)])
    assert capsys.readouterr().out == f"Promedio de tokens: {expected:.2f}\n"


def test_example_2_trains_batch_by_batch(here: Path, capsys: pytest.CaptureFixture[str]):
    class Model:
        def train_step(self, graphs: list[object]) -> int:
            return len(graphs)

    build = lambda batch: [t["hidden_states"].mean() for t in batch]  # noqa: E731
    exec(EXAMPLE_2, {"num_epochs": 2, "build_graphs_from_batch": build, "model": Model()})
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"Epoch {e}, Batch {b}, Loss: {SIZE}" for e in range(2) for b in range(BATCHES)]


def test_example_3_makes_three_stores_and_can_be_run_again(here: Path):
    for _ in range(2):
        exec(EXAMPLE_3, {})
        sizes = [
            TraceBatchLoader(f"./traces_data/{name}_set.pkl").get_total_traces() for name in ("train", "val", "test")
        ]
        assert sizes == [8 * SIZE, SIZE, SIZE]
    assert next(iter(TraceBatchLoader("./traces_data/test_set.pkl").iter_traces()))["question"] == "Question 45?"
    assert len(TraceBatchLoader()) == BATCHES  # the splits inside the folder do not count as batches


def test_batch_info_reads_no_trace(here: Path):
    for file in (here / "traces_data").glob("*.parquet"):
        file.unlink()
    info = TraceBatchLoader().get_batch_info()
    assert [i["num_traces"] for i in info] == [SIZE] * BATCHES
    assert (info[3]["batch_idx"], info[3]["filename"]) == (3, "shard-00003.arrow")
    assert info[3]["size_mb"] == (here / "traces_data" / "shard-00003.arrow").stat().st_size / 2**20


def test_traces_have_the_old_keys(here: Path):
    loader = TraceBatchLoader("./traces_data")
    got = loader.get_trace_by_global_id(13)
    assert got is not None
    assert (got["example_id"], got["global_example_id"], got["batch_number"]) == (3, 13, 2)
    assert got["question"] == "Question 13?"
    assert loader.get_trace_by_global_id(BATCHES * SIZE) is None
    assert loader.get_trace_by_global_id(-1) is None
    assert loader.get_total_traces() == BATCHES * SIZE


def test_ids_from_the_old_files_take_precedence_over_positions_in_the_store(tmp_path: Path):
    with ms.TraceWriter(tmp_path / "part", shard_records=2) as writer:
        writer.extend({**trace(g), "global_example_id": g, "batch_number": 2} for g in range(10, 15))
    loader = TraceBatchLoader(tmp_path / "part")
    got = loader.get_trace_by_global_id(13)
    assert got is not None
    assert (got["question"], got["batch_number"]) == ("Question 13?", 2)
    assert loader.get_trace_by_global_id(3) is None


def test_a_batch_is_a_sequence_that_keeps_no_trace_in_memory(here: Path):
    loader = TraceBatchLoader()
    batch = loader.get_batch(4)
    assert len(batch) == SIZE
    assert batch[-1]["question"] == "Question 24?"
    assert [t["example_id"] for t in batch[1:3]] == [1, 2]
    assert sum(1 for _ in loader.iter_batches()) == len(loader) == BATCHES
    for wrong in (-1, BATCHES):
        with pytest.raises(IndexError, match=f"batch {wrong} of {BATCHES}"):
            loader.get_batch(wrong)


def test_merge_batches_makes_one_batch(here: Path):
    merge_batches()
    merged = TraceBatchLoader("./traces_data/all_traces_merged.pkl")
    assert (len(merged), merged.get_total_traces()) == (1, BATCHES * SIZE)
    assert [t["question_id"] for t in merged.iter_traces()] == [f"q{g}" for g in range(BATCHES * SIZE)]


def test_an_output_that_is_not_a_store_is_never_replaced(here: Path):
    (here / "notes").mkdir()
    (here / "notes" / "thesis.txt").write_text("dear")
    with pytest.raises(ms.errors.NotAStore):
        extract_batch_subset([0], "notes")
    assert (here / "notes" / "thesis.txt").read_text() == "dear"
    with pytest.raises(IndexError):
        extract_batch_subset([99], "out")
    assert not (here / "out").exists()


def test_a_missing_traces_folder_is_a_file_not_found_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="traces_data"):
        TraceBatchLoader()


def test_inspect_traces_shows_statistics_and_examples_of_different_batches(
    here: Path, capsys: pytest.CaptureFixture[str]
):
    inspect_traces.main([])
    shown = capsys.readouterr().out
    assert "50 records, 10 shards" in shown
    assert "generated tokens: mean 3.46, median 3.00, min 2, max 5" in shown
    assert "trace 45 (batch 9, example 0)" in shown
    inspect_traces.main(["traces_data", "--compare", "traces_data"])
    assert "identical  50" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="inspect_traces: nowhere"):
        inspect_traces.main(["nowhere"])


def test_batch_loader_lists_the_batches_of_a_folder(here: Path, capsys: pytest.CaptureFixture[str]):
    batch_loader.main([])
    *lines, total = capsys.readouterr().out.splitlines()
    assert len(lines) == BATCHES and "shard-00009.arrow, 5 traces" in lines[9]
    assert f"{BATCHES * SIZE} traces" in total
    with pytest.raises(SystemExit, match="batch_loader: nowhere"):
        batch_loader.main(["nowhere"])
