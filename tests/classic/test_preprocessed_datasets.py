"""PreprocessedLSTMDataset and PreprocessedGNNDataset: the old items, each exactly once, from old files or any store."""

import os
import pickle
import re
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import millstream as ms
from millstream.classic import PreprocessedGNNDataset, PreprocessedLSTMDataset, num_workers_for, train_val_test
from millstream.classic.preprocessed_datasets import _graph_type
from millstream.classic.preprocessed_folder import SOURCES
from millstream.core.tables import publish_table
from millstream.errors import BadSetting, BadSource, MissingLabel, StoreExists
from millstream.traces.convert import convert, expand
from support.effort import PATIENCE_S
from support.nursery import Nursery
from support.old_files import Data, old_torch_geometric

L, D = 3, 8  # layers, hidden size
DATASETS: dict[str, Any] = {"lstm": PreprocessedLSTMDataset, "gnn": PreprocessedGNNDataset}
KINDS = pytest.mark.parametrize("kind", ["lstm", "gnn"])
STYLES = pytest.mark.parametrize("style", [{}, {"shuffle_buffer_size": 0}], ids=["map", "stream"])

# Warnings of torch about more workers than cores, and of Python 3.12 about any fork.
quiet_loader = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create", "ignore:This process .* is multi-threaded"
)


# -- files as the old scripts wrote them


def content_of(kind: str, first: int, count: int) -> dict[str, Any]:
    numbers = range(first, first + count)
    labels = torch.tensor([float(number % 2) for number in numbers])
    rest = {"labels": labels, "question_ids": [f"tc_{number}" for number in numbers]}
    if kind == "lstm":
        return {"sequences": torch.stack([sequence(number) for number in numbers]), **rest}
    return {"graphs": [[graph(number, layer) for layer in range(L)] for number in numbers], **rest}


def sequence(number: int) -> torch.Tensor:
    return torch.randn(L, D, generator=torch.Generator().manual_seed(number)).half()


def graph(number: int, layer: int) -> Data:
    random = torch.Generator().manual_seed(100 * number + layer)
    tokens, edges = 4 + number % 3, 2 + (number + layer) % 4
    return Data(
        x=torch.randn(tokens, D, generator=random).half(),
        edge_index=torch.randint(tokens, (2, edges), generator=random),
        edge_attr=torch.rand(edges, generator=random).half(),
        num_nodes=tokens,
    )


def write(folder: Path, kind: str, first: int, count: int, name: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / (name or f"preprocessed_{first:04d}.pt")
    with old_torch_geometric():
        torch.save(content_of(kind, first, count), file)
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As the old preprocessing script left it: 13 traces, in two files of each kind, split at different places."""
    for kind, cut in (("lstm_solo", 5), ("gnn", 9)):
        write(tmp_path / "data" / kind, kind.removesuffix("_solo"), 0, cut)
        write(tmp_path / "data" / kind, kind.removesuffix("_solo"), cut, 13 - cut)
    return tmp_path / "data"


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))


def assert_is(item: tuple[Any, torch.Tensor, str], kind: str, number: int) -> None:
    """The item is the one that the old dataset gave for the trace with this number."""
    seen, label, question_id = item
    assert question_id == f"tc_{number}"
    assert same(label, torch.tensor(float(number % 2)))
    if kind == "lstm":
        assert same(seen, sequence(number))
        return
    assert len(seen) == L
    for layer, got in enumerate(seen):
        want = graph(number, layer)._store._mapping
        assert all(same(getattr(got, name), want[name]) for name in ("x", "edge_index", "edge_attr"))
        assert got.num_nodes == want["num_nodes"]


def ids(loader: Any) -> list[str]:
    """The question ids of an epoch."""
    return [item[2] for batch in loader for item in (batch if isinstance(batch, list) else [batch])]


def loader(dataset: Any, **settings: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=2, collate_fn=list, **settings)


EVERYTHING = sorted(f"tc_{number}" for number in range(13))


# -- items


@KINDS
@STYLES
def test_items_are_what_torch_loads_from_the_old_files(folder, kind, style):
    dataset = DATASETS[kind](folder, **style)
    items = list(dataset)
    assert len(items) == len(dataset) == 13
    for number, item in enumerate(items):
        assert_is(item, kind, number)
    assert_is(dataset[-1], kind, 12)
    assert [item[2] for item in dataset.__getitems__([7, 2])] == ["tc_7", "tc_2"]
    assert dataset.question_ids == [f"tc_{number}" for number in range(13)]
    assert dataset.labels.tolist() == [number % 2 for number in range(13)]
    with pytest.raises(IndexError, match="13 of "):
        dataset[13]


@KINDS
def test_a_dataset_is_map_style_without_a_shuffle_buffer_and_iterable_with_one(folder, kind):
    make = DATASETS[kind]
    for dataset in (make(folder), make(folder, max_cache_batches=4)):
        assert isinstance(dataset, make) and isinstance(dataset, Dataset)
        assert not isinstance(dataset, IterableDataset)
    for size in (0, 1000):
        dataset = make(folder, shuffle_buffer_size=size)
        assert isinstance(dataset, make) and isinstance(dataset, IterableDataset)


def test_invalid_settings_are_refused(folder):
    with pytest.raises(ValueError, match="max_cache_batches=0"):
        PreprocessedLSTMDataset(folder, max_cache_batches=0)
    with pytest.raises(ValueError, match="shuffle_buffer_size=-1"):
        PreprocessedLSTMDataset(folder, shuffle_buffer_size=-1)
    with pytest.raises(ValueError, match="max_cache_batches"):
        PreprocessedLSTMDataset(folder, max_cache_batches=2, shuffle_buffer_size=1000)


@KINDS
@STYLES
def test_a_pickled_dataset_gives_the_same_items(folder, kind, style):
    again = pickle.loads(pickle.dumps(DATASETS[kind](folder, **style)))
    for number, item in enumerate(again):
        assert_is(item, kind, number)


def test_graphs_are_torch_geometric_data_if_it_is_installed(folder, monkeypatch):
    module = ModuleType("torch_geometric.data")
    module.Data = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_geometric", ModuleType("torch_geometric"))
    monkeypatch.setitem(sys.modules, "torch_geometric.data", module)
    _graph_type.cache_clear()
    try:
        assert {type(found) for found in PreprocessedGNNDataset(folder)[0][0]} == {SimpleNamespace}
    finally:
        _graph_type.cache_clear()


def test_the_graphs_of_all_layers_share_a_few_tensors(folder):
    """Torch opens a file for each block of memory that a worker sends."""
    items = PreprocessedGNNDataset(folder).__getitems__([0, 3, 6, 9])  # traces with the same number of tokens
    tensors = [t for graphs, _, _ in items for g in graphs for t in (g.x, g.edge_index, g.edge_attr)]
    pieces = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert len(tensors) == 4 * L * 3
    assert len(pieces) <= 4 * 3


# -- loaders

FEW_FILES = """
import resource, sys
from torch.utils.data import DataLoader
from millstream.classic import PreprocessedGNNDataset, PreprocessedLSTMDataset

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
for dataset in (PreprocessedGNNDataset(sys.argv[1]), PreprocessedLSTMDataset(sys.argv[1], shuffle_buffer_size=9)):
    batches = DataLoader(dataset, batch_size=100, num_workers=2, collate_fn=list, timeout=float(sys.argv[2]))
    print(len({item[2] for batch in batches for item in batch}))
"""


def test_workers_send_more_tensors_than_a_process_may_open_files(nursery: Nursery, tmp_path):
    hidden, attention = np.zeros((3, 4, 8), np.float16), np.ones((3, 2, 4, 4), np.float16)
    with ms.TraceWriter(tmp_path / "store") as writer:
        for number in range(200):
            writer.append({"question_id": f"q{number}", "label": 1, "hidden": hidden, "attention": attention})
    done = nursery.run(FEW_FILES, tmp_path / "store", PATIENCE_S)
    assert done.out.split() == ["200", "200"], done.err


@quiet_loader
@KINDS
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_loader_gives_every_trace_exactly_once(folder, kind, num_workers):
    make = DATASETS[kind]
    for dataset, shuffle in ((make(folder), True), (make(folder, shuffle_buffer_size=1000), None)):
        items = [item for batch in loader(dataset, shuffle=shuffle, num_workers=num_workers) for item in batch]
        assert sorted(item[2] for item in items) == EVERYTHING
        for item in items:
            assert_is(item, kind, int(item[2].removeprefix("tc_")))


@quiet_loader
@pytest.mark.parametrize(
    "settings",
    [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}],
    ids=["no workers", "workers", "persistent"],
)
def test_each_epoch_of_a_stream_is_a_new_permutation_and_set_epoch_selects_one(folder, settings):
    dataset = PreprocessedLSTMDataset(folder, shuffle_buffer_size=1000)
    epochs = loader(dataset, **settings)
    seen = [ids(epochs) for _ in range(3)]
    next(iter(epochs))  # a pass that ends early
    for epoch in (5, None, 5, 6):  # an epoch that was set applies to one pass
        if epoch is not None:
            dataset.set_epoch(epoch)
        seen.append(ids(epochs))
    assert all(sorted(epoch) == EVERYTHING for epoch in seen)
    assert seen[3] == seen[5]
    distinct = {tuple(epoch) for epoch in seen}
    assert len(distinct) == (5 if not settings else 6)  # in this process the pass after epoch 5 is epoch 6
    assert len(dataset) == 13


def test_the_seed_changes_the_order_and_a_buffer_of_0_is_the_order_of_the_files(folder):
    def order(**settings: int) -> list[str]:
        return ids(PreprocessedLSTMDataset(folder, **settings))

    assert order(shuffle_buffer_size=0) == [f"tc_{number}" for number in range(13)]
    assert order(shuffle_buffer_size=1) == order(shuffle_buffer_size=1000) != order(shuffle_buffer_size=0)
    assert order(shuffle_buffer_size=1, seed=1) != order(shuffle_buffer_size=1)


def test_num_workers_are_at_most_files_cores_and_4(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert [num_workers_for(files) for files in (0, 1, 3, 44)] == [0, 1, 3, 4]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    assert num_workers_for(44) == 2


# -- splits


def test_lstm_and_gnn_datasets_are_split_into_the_same_questions(tmp_path):
    write(tmp_path / "lstm_solo", "lstm", 0, 60)
    write(tmp_path / "gnn", "gnn", 41, 19, "batch_0000.pt")
    write(tmp_path / "gnn", "gnn", 0, 41, "batch_0001.pt")
    lstm = train_val_test(PreprocessedLSTMDataset(tmp_path))
    gnn = train_val_test(PreprocessedGNNDataset(tmp_path, shuffle_buffer_size=1000))
    parts = [set(part.question_ids) for part in lstm]
    assert [set(ids(part)) for part in gnn] == parts == [set(ids(part)) for part in lstm]
    assert len(set().union(*parts)) == sum(map(len, lstm)) == 60
    assert 30 < len(lstm[0]) < 54
    assert [set(part.question_ids) for part in train_val_test(PreprocessedLSTMDataset(tmp_path), seed=1)] != parts
    assert_is(lstm[1][0], "lstm", int(lstm[1].question_ids[0].removeprefix("tc_")))


def test_the_split_is_that_of_ms_split(folder):
    dataset = PreprocessedLSTMDataset(folder)
    traces = ms.open(folder / "lstm_solo" / "millstream-lstm")
    split = ms.split(traces, {"train": 0.7, "val": 0.15, "test": 0.15})
    for part, wanted in zip(train_val_test(dataset), split, strict=True):
        assert part.question_ids == wanted.column("question_id").to_pylist()


@KINDS
def test_splits_are_datasets_of_the_same_class_and_only_train_is_shuffled(folder, kind):
    for style in ({}, {"shuffle_buffer_size": 7}):
        dataset = DATASETS[kind](folder, **style)
        for part in train_val_test(dataset):
            assert type(part) is type(dataset)
    train, val, test = train_val_test(DATASETS[kind](folder, shuffle_buffer_size=7))
    assert train.shuffle_buffer_size == 7
    assert len(train) > 4 and ids(train) != ids(train)
    assert ids(val) == val.question_ids and ids(test) == test.question_ids


# -- old files and their store


def converted(folder: Path) -> dict[str, int]:
    """The files of the store in a folder, and when each was written."""
    return {file.name: file.stat().st_mtime_ns for file in (folder / "millstream-lstm").iterdir()}


def test_old_files_are_converted_once_with_a_message(folder, capsys):
    PreprocessedLSTMDataset(folder)
    printed = capsys.readouterr().err
    assert "2 old files" in printed and "millstream-lstm" in printed
    before = converted(folder / "lstm_solo")
    again = PreprocessedLSTMDataset(folder / "lstm_solo", shuffle_buffer_size=0)
    assert capsys.readouterr().err == ""
    assert converted(folder / "lstm_solo") == before
    assert len(again) == 13


def test_changed_added_and_removed_files_are_noticed(folder, capsys):
    assert PreprocessedLSTMDataset(folder).labels[5] == 1
    capsys.readouterr()
    file = folder / "lstm_solo" / "preprocessed_0005.pt"
    size = file.stat().st_size
    content = content_of("lstm", 5, 8)
    torch.save(content | {"labels": 1 - content["labels"]}, file)
    assert file.stat().st_size == size  # corrected labels change nothing else
    assert PreprocessedLSTMDataset(folder).labels[5] == 0
    assert "have changed" in capsys.readouterr().err
    write(folder / "lstm_solo", "lstm", 13, 2)
    assert PreprocessedLSTMDataset(folder).question_ids[-1] == "tc_14"
    file.unlink()
    assert PreprocessedLSTMDataset(folder).question_ids == [f"tc_{number}" for number in (*range(5), 13, 14)]


def test_an_interrupted_conversion_resumes(folder):
    file = folder / "lstm_solo" / "preprocessed_0005.pt"
    data, stat = file.read_bytes(), file.stat()
    file.write_bytes(data[:1000] + bytes(len(data) - 1000))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(BadSource, match="preprocessed_0005"):
        PreprocessedLSTMDataset(folder)
    first = converted(folder / "lstm_solo")["shard-00000.arrow"]
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert [item[2] for item in PreprocessedLSTMDataset(folder)] == [f"tc_{number}" for number in range(13)]
    assert converted(folder / "lstm_solo")["shard-00000.arrow"] == first


def test_datasets_opened_at_the_same_time_convert_once(folder, capsys):
    with ThreadPoolExecutor(4) as pool:
        lengths = list(pool.map(lambda _: len(PreprocessedLSTMDataset(folder)), range(4)))
    assert lengths == [13] * 4
    assert capsys.readouterr().err.count("converting") == 1


def test_in_a_read_only_folder_the_store_is_temporary_and_removed_with_the_last_dataset(folder, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    dataset = PreprocessedLSTMDataset(folder)
    assert "removed with the dataset" in capsys.readouterr().err
    assert not (folder / "lstm_solo" / "millstream-lstm").exists()
    place = dataset._scratch.path
    train = train_val_test(dataset)[0]
    del dataset
    assert len(ids(train)) == len(train)
    del train
    assert not place.exists()


def test_a_foreign_folder_with_the_name_of_the_store_is_left_alone(folder):
    (folder / "lstm_solo" / "millstream-lstm").mkdir()
    (folder / "lstm_solo" / "millstream-lstm" / "thesis.tex").write_text("all of it")
    with pytest.raises(StoreExists, match="millstream-lstm"):
        PreprocessedLSTMDataset(folder)
    assert (folder / "lstm_solo" / "millstream-lstm" / "thesis.tex").exists()


def test_files_of_the_other_kind_or_no_files_are_reported(folder, tmp_path):
    with pytest.raises(BadSource, match=r"gnn/preprocessed_0000\.pt"):
        PreprocessedLSTMDataset(folder / "gnn")
    with pytest.raises(BadSource, match="nowhere"):
        PreprocessedLSTMDataset(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadSource, match="empty"):
        PreprocessedLSTMDataset(tmp_path / "empty")


@KINDS
def test_selected_files_are_loaded_in_the_given_order(folder, kind):
    where = folder / {"lstm": "lstm_solo", "gnn": "gnn"}[kind]
    first, second = sorted(where.glob("*.pt"))
    cut = int(second.stem[-4:])
    assert ids(DATASETS[kind](folder, [second])) == [f"tc_{number}" for number in range(cut, 13)]
    assert ids(DATASETS[kind](folder, [second.name, str(first)], shuffle_buffer_size=0)) == [
        f"tc_{number}" for number in (*range(cut, 13), *range(cut))
    ]
    assert len(DATASETS[kind](folder, batch_files_to_load=[])) == 0
    for wrong in (folder / "preprocessed_0000.pt", "preprocessed_0001.pt"):
        with pytest.raises(BadSource, match=Path(wrong).name):
            DATASETS[kind](folder, [wrong])


@KINDS
def test_a_converted_store_is_opened_directly(folder, tmp_path, kind):
    where = folder / {"lstm": "lstm_solo", "gnn": "gnn"}[kind]
    convert(expand([str(where)]), tmp_path / "store")
    dataset = DATASETS[kind](tmp_path / "store")
    for number, item in enumerate(dataset):
        assert_is(item, kind, number)
    last = sorted(where.glob("*.pt"))[-1]
    part = DATASETS[kind](tmp_path / "store", [last])
    assert part.question_ids == dataset.question_ids[int(last.stem[-4:]) :]
    assert not (tmp_path / "store" / SOURCES).exists()


# -- stores of traces


def trace(number: int, *, tokens: int = 0, dim: int = D) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    tokens = tokens or 4 + number % 3
    attention = np.tril(rng.random((L, 2, tokens, tokens)))
    attention[:, :, -1, 0] = 0  # attention of exactly zero is an edge too
    return {
        "question_id": f"tc_{number}",
        "hidden": rng.standard_normal((L, tokens, dim)).astype(np.float16),
        "attention": attention.astype(np.float16),
    }


def write_traces(path: Path, traces: list[dict[str, Any]]) -> Path:
    with ms.TraceWriter(path) as writer:
        writer.extend(traces)
    return path


@pytest.mark.parametrize("names", [("hidden", "attention"), ("hidden_states", "attentions")], ids=["new", "old"])
def test_a_store_of_traces_gives_the_last_tokens_and_the_graphs_of_the_old_script(tmp_path, names):
    rows = [trace(number) for number in range(6)]
    renamed = [{**row, names[0]: row["hidden"], names[1]: row["attention"], "label": number % 2}
               for number, row in enumerate(rows)]  # fmt: skip
    if names[0] != "hidden":
        renamed = [{key: row[key] for key in row if key not in ("hidden", "attention")} for row in renamed]
    store = write_traces(tmp_path / "store", renamed)
    lstm, gnn = PreprocessedLSTMDataset(store), PreprocessedGNNDataset(store, shuffle_buffer_size=0)
    for number, (row, (states, label, name), (graphs, _, same_name)) in enumerate(zip(rows, lstm, gnn, strict=True)):
        assert name == same_name == row["question_id"]
        assert same(label, torch.tensor(float(number % 2)))
        assert same(states, torch.from_numpy(row["hidden"][:, -1].copy()))
        tokens = row["hidden"].shape[1]
        edges = [(j, i) for i in range(tokens) for j in range(i + 1)]
        assert len(graphs) == L
        for layer, graph in enumerate(graphs):
            assert same(graph.x, torch.from_numpy(row["hidden"][layer]))
            assert [tuple(edge) for edge in graph.edge_index.T.tolist()] == edges
            mean = torch.from_numpy(row["attention"][layer]).mean(dim=0)
            assert same(graph.edge_attr, torch.stack([mean[i, j] for j, i in edges]))
            assert graph.num_nodes == tokens


def test_labels_come_from_a_table_and_a_missing_one_is_an_error(tmp_path):
    store = write_traces(tmp_path / "store", [trace(number) for number in range(4)])
    with pytest.raises(BadSource, match="label"):
        PreprocessedLSTMDataset(store)
    table = pa.table({"question_id": ["tc_0", "tc_1", "tc_3"], "label": [1, 0, 1]})
    publish_table(store / "labels.parquet", table)
    with pytest.raises(MissingLabel, match="1 of 4"):
        PreprocessedLSTMDataset(store)
    dataset = PreprocessedLSTMDataset(ms.labelled(ms.open(store), missing="drop"))
    assert [(name, float(label)) for _, label, name in dataset] == [("tc_0", 1), ("tc_1", 0), ("tc_3", 1)]
    other = pa.table({"question_id": [f"tc_{number}" for number in range(4)], "score": [0.5, 0.25, 0.0, 1.0]})
    given = ms.labelled(ms.open(store), other, column="score")
    assert PreprocessedGNNDataset(given.subset([3, 1])).labels.tolist() == [1.0, 0.25]


def test_a_missing_label_in_an_old_file_is_an_error_too(tmp_path):
    content = content_of("lstm", 0, 4)
    content["labels"][2] = float("nan")
    torch.save(content, tmp_path / "batch_0000.pt")
    with pytest.raises(MissingLabel, match="1 of 4"):
        PreprocessedLSTMDataset(tmp_path)


def test_a_missing_field_is_reported_with_the_fields_of_the_store(tmp_path):
    store = write_traces(tmp_path / "a", [{"question_id": "q", "label": 1, "hidden": np.zeros((L, 2, D))}])
    assert len(PreprocessedLSTMDataset(store)) == 1
    with pytest.raises(BadSource, match=r"no 'attention' or 'attentions'.*'hidden'"):
        PreprocessedGNNDataset(store)
    with pytest.raises(BadSource, match=str(store)):
        PreprocessedLSTMDataset(store, ["preprocessed_0000.pt"])
    store = write_traces(tmp_path / "b", [{"label": 1, "hidden": np.zeros((L, 2, D))}])
    with pytest.raises(BadSource, match="question_id"):
        PreprocessedLSTMDataset(store)


def test_a_batch_of_last_tokens_keeps_one_trace_in_memory_at_a_time(tmp_path):
    rows = [{**trace(number, tokens=100, dim=4096), "label": 0} for number in range(10)]  # 2.5 MB each
    dataset = PreprocessedLSTMDataset(write_traces(tmp_path / "store", rows))
    del rows
    dataset[0]
    tracemalloc.start()
    try:
        items = dataset.__getitems__(range(10))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(items) == 10
    assert peak < 2 * 2_500_000


@pytest.mark.parametrize("files", [2, "preprocessed_0000.pt", [2]])
def test_files_to_load_that_are_not_a_list_of_names_are_refused(tmp_path: Path, files: Any):
    with pytest.raises(BadSetting, match=f"batch_files_to_load={re.escape(repr(files))}"):
        PreprocessedLSTMDataset(tmp_path, files)
