"""The kind of record at a path is recognised, and `ms.open` opens it."""

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import millstream as ms
from millstream.core.registry import kind_at
from millstream.errors import BadSetting, BadSource, NotAStore

READ = ">r1\nACGT\n"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with ms.TraceWriter(tmp_path / "store") as writer:
        writer.append({"question_id": "q1", "hidden": np.zeros((2, 3))})
    return tmp_path / "store"


def test_stores_reads_and_files_to_import_are_recognised_by_content(tmp_path: Path, store: Path):
    (tmp_path / "reads").mkdir()
    (tmp_path / "reads" / "any.name").write_text(READ)
    (tmp_path / "gzipped").write_bytes(gzip.compress(READ.encode()))
    traces = [{"tokens": [1, 2]}]
    (tmp_path / "old.pkl").write_bytes(pickle.dumps(traces))
    (tmp_path / "pickled").write_bytes(pickle.dumps(traces))
    (tmp_path / "pickled.gzipped").write_bytes(gzip.compress(pickle.dumps(traces)))
    torch.save(traces, tmp_path / "saved")
    kinds = {
        store: "traces",
        tmp_path / "reads": "reads",
        tmp_path / "reads" / "any.name": "reads",
        tmp_path / "gzipped": "reads",
        **{tmp_path / name: "traces" for name in ("old.pkl", "pickled", "pickled.gzipped", "saved")},
    }
    assert {path: kind_at(path) for path in kinds} == kinds


def test_a_store_with_a_fasta_file_in_its_folder_is_a_store(store: Path):
    (store / "notes.fa").write_text(READ)
    assert kind_at(store) == "traces" and isinstance(ms.open(store), ms.Traces)


def test_a_missing_path_is_an_error_of_the_kind_its_name_suggests(tmp_path: Path):
    with pytest.raises(BadSource, match=r"none\.fa"):
        ms.open(tmp_path / "none.fa")
    with pytest.raises(BadSource, match=r"\*\.gz"):
        ms.open(tmp_path / "*.gz")
    with pytest.raises(NotAStore, match="nowhere"):
        ms.open(tmp_path / "nowhere")


def test_a_file_of_neither_kind_and_a_list_of_stores_are_errors(tmp_path: Path, store: Path):
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(BadSource, match=r"notes\.txt"):
        ms.open(tmp_path / "notes.txt")
    with pytest.raises(BadSetting, match="concat"):
        ms.open([store, store])
    with pytest.raises(BadSource, match="no files"):
        ms.open([])


def test_a_file_that_no_importer_recognises_is_an_error_that_lists_importable_files(tmp_path: Path):
    from millstream.traces.convert import convert

    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(BadSource, match=r"notes\.txt.*\.pkl"):
        convert([tmp_path / "notes.txt"], tmp_path / "out")
