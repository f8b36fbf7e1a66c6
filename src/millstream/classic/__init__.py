"""The vocabulary of the old scripts (batch, example_id, global_example_id, batch_number) on millstream's engine.

from src.batch_loader import TraceBatchLoader  ->  from millstream.classic import TraceBatchLoader
"""

from millstream.classic.batch_loader import TraceBatchLoader, extract_batch_subset, merge_batches

__all__ = ["TraceBatchLoader", "extract_batch_subset", "merge_batches"]
