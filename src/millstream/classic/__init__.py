"""The vocabulary of the old scripts (batch, global_example_id, StreamingSequenceDataset) on millstream's engine.

from src.batch_loader import TraceBatchLoader  ->  from millstream.classic import TraceBatchLoader
from baseline import PreprocessedLSTMDataset  ->  from millstream.classic import PreprocessedLSTMDataset
from modules.dataloading import MetaGeneTokenizer  ->  from millstream.classic import MetaGeneTokenizer
python src/trace_extractor.py ...  ->  python -m millstream.classic.trace_extractor ...
python src/baseline.py ...  ->  python -m millstream.classic.baseline ...
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.classic.batch_loader import TraceBatchLoader, extract_batch_subset, merge_batches
    from millstream.classic.metagene_tokenizer import MetaGeneTokenizer
    from millstream.classic.preprocessed_datasets import (
        PreprocessedGNNDataset,
        PreprocessedLSTMDataset,
        num_workers_for,
        train_val_test,
    )
    from millstream.classic.sequence_datasets import CachedStreamingDataset, SequenceDataset, StreamingSequenceDataset

if sys.argv[:1] == ["-m"]:  # `python -m` sets this while it locates the script; Ctrl-C may arrive during that import
    from millstream.cli.process import RESUME, UNCHANGED, handle_interrupts

    handle_interrupts(
        baseline=RESUME,
        batch_loader=UNCHANGED,
        inspect_traces=UNCHANGED,
        trace_extractor=RESUME,
        train_streaming=RESUME,
    )

__all__ = [
    "CachedStreamingDataset",
    "MetaGeneTokenizer",
    "PreprocessedGNNDataset",
    "PreprocessedLSTMDataset",
    "SequenceDataset",
    "StreamingSequenceDataset",
    "TraceBatchLoader",
    "extract_batch_subset",
    "merge_batches",
    "num_workers_for",
    "train_val_test",
]

# Imported on first use: the datasets import torch (2 seconds), which TraceBatchLoader does not need.
_HOME = {
    "CachedStreamingDataset": "sequence_datasets",
    "MetaGeneTokenizer": "metagene_tokenizer",
    "PreprocessedGNNDataset": "preprocessed_datasets",
    "PreprocessedLSTMDataset": "preprocessed_datasets",
    "SequenceDataset": "sequence_datasets",
    "StreamingSequenceDataset": "sequence_datasets",
    "TraceBatchLoader": "batch_loader",
    "extract_batch_subset": "batch_loader",
    "merge_batches": "batch_loader",
    "num_workers_for": "preprocessed_datasets",
    "train_val_test": "preprocessed_datasets",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'millstream.classic' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"millstream.classic.{_HOME[name]}"), name)
