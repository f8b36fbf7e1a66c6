"""The vocabulary of the old scripts (batch, global_example_id, StreamingSequenceDataset) on millstream's engine.

from src.batch_loader import TraceBatchLoader  ->  from millstream.classic import TraceBatchLoader
from modules.dataloading import MetaGeneTokenizer  ->  from millstream.classic import MetaGeneTokenizer
"""

from millstream.classic.batch_loader import TraceBatchLoader, extract_batch_subset, merge_batches
from millstream.classic.metagene_tokenizer import MetaGeneTokenizer
from millstream.classic.sequence_datasets import CachedStreamingDataset, SequenceDataset, StreamingSequenceDataset

__all__ = [
    "CachedStreamingDataset",
    "MetaGeneTokenizer",
    "SequenceDataset",
    "StreamingSequenceDataset",
    "TraceBatchLoader",
    "extract_batch_subset",
    "merge_batches",
]
