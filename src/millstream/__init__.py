"""millstream: train on data far larger than memory.

The public API. Everything is imported on first use, so `import millstream` is fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from millstream.core.arguments import checked
from millstream.core.config import Count, SizeInBytes

if TYPE_CHECKING:
    from millstream import errors, features
    from millstream.core.collection import Collection, Subset, subset
    from millstream.core.loader import Loader
    from millstream.core.mixture import concat, mix
    from millstream.core.order import Order
    from millstream.core.split import Split, labelled, split
    from millstream.core.torch_data import RecordDataset, RecordStream
    from millstream.reads.batch import Read, ReadBatch
    from millstream.reads.classify import classify
    from millstream.reads.mapping import MappingSource
    from millstream.reads.prepare import index, pack, simulate
    from millstream.reads.reads import Reads
    from millstream.tables.rows import Rows
    from millstream.traces.evaluate import evaluate
    from millstream.traces.extract import extract, replay
    from millstream.traces.features import featurize
    from millstream.traces.label import label
    from millstream.traces.store.traces import Traces
    from millstream.traces.store.writer import TraceWriter
    from millstream.training.run import train

__version__ = "0.2.0"
__all__ = [
    "Collection",
    "Loader",
    "Order",
    "Read",
    "ReadBatch",
    "Reads",
    "RecordDataset",
    "RecordStream",
    "Rows",
    "Split",
    "Subset",
    "TraceWriter",
    "Traces",
    "__version__",
    "classify",
    "concat",
    "errors",
    "evaluate",
    "extract",
    "features",
    "featurize",
    "index",
    "label",
    "labelled",
    "mix",
    "open",
    "pack",
    "replay",
    "simulate",
    "split",
    "subset",
    "train",
]

_HOME = {
    "Collection": "millstream.core.collection",
    "Loader": "millstream.core.loader",
    "Order": "millstream.core.order",
    "Read": "millstream.reads.batch",
    "ReadBatch": "millstream.reads.batch",
    "Reads": "millstream.reads.reads",
    "RecordDataset": "millstream.core.torch_data",
    "RecordStream": "millstream.core.torch_data",
    "Rows": "millstream.tables.rows",
    "Split": "millstream.core.split",
    "Subset": "millstream.core.collection",
    "TraceWriter": "millstream.traces.store.writer",
    "Traces": "millstream.traces.store.traces",
    "classify": "millstream.reads.classify",
    "concat": "millstream.core.mixture",
    "evaluate": "millstream.traces.evaluate",
    "extract": "millstream.traces.extract",
    "replay": "millstream.traces.extract",
    "featurize": "millstream.traces.features",
    "label": "millstream.traces.label",
    "labelled": "millstream.core.split",
    "mix": "millstream.core.mixture",
    "index": "millstream.reads.prepare",
    "pack": "millstream.reads.prepare",
    "simulate": "millstream.reads.prepare",
    "split": "millstream.core.split",
    "subset": "millstream.core.collection",
    "train": "millstream.training.run",
}
_MODULES = {"errors": "millstream.errors", "features": "millstream.features"}


@checked
def open(
    path: str | Path | Sequence[str | Path],
    *,
    verify: Literal["always", "never"] = "always",
    open_shards: Count = 256,
    header_regex: str | None = None,
    columns: Sequence[str] | None = None,
    on_mismatch: Literal["error", "skip", "null"] = "error",
    mapping: MappingSource | None = None,
    labels: str | Path | None = None,
    memory: SizeInBytes | None = None,
    index_dir: str | Path | None = None,
    salvage: bool = False,
    unverified: bool = False,
    cache: int | str | None = None,
    cache_dir: str | Path | None = None,
) -> Traces | Reads | Rows:
    """Open a trace store; reads (FASTA or FASTQ files, plain, gzip, BGZF or zstd, or packed); or the rows of tables.

    Paths may be URLs: s3://, gs://, az://, https://, hf://. What is fetched is cached on local disk, at most `cache`
    bytes (default: 20GB; 0: nothing) in `cache_dir`, in this process and those it starts.

    Traces: `verify="never"` skips the checksums; `open_shards` is the maximum number of mapped shards.

    Reads: a file, a folder, a pattern or a list opens as one collection; missing indexes are built. The named
    groups of `header_regex` become columns (`columns` keeps only some); `mapping` joins labels to them, or to the names
    of files, or to those of reads in a table, `labels` (such as CAMI's reads_mapping.tsv). `memory` is the budget for
    decoded blocks and mapped files, by default half of the available memory. `salvage` reads what the checksums of a
    damaged file verify before the damage; `unverified` also reads text that no checksum verifies.

    Tables: Parquet, JSON lines (.jsonl) or CSV (.csv, .tsv); a file, a pattern or a list. `memory` is the budget for
    decoded row groups. A text file of more than 16 MB is indexed first, beside it or in `index_dir`.

    >>> traces = ms.open("traces/")
    >>> reads = ms.open("reads.fa.gz", header_regex=r"lbl\\|(?P<class_id>\\d+)", mapping="species.tsv")
    >>> questions = ms.open("triviaqa.jsonl")
    """
    from millstream.core.block_cache import set_cache
    from millstream.core.registry import kind_at, plug
    from millstream.core.remote import to_path
    from millstream.errors import BadSource

    paths = [path] if isinstance(path, str | Path) else path
    if not paths:
        raise BadSource("no files given")
    set_cache(cache, cache_dir)
    return plug(kind_at(to_path(paths[0])), "kind").open(
        path,
        verify=verify,
        open_shards=open_shards,
        header_regex=header_regex,
        columns=columns,
        on_mismatch=on_mismatch,
        mapping=mapping,
        labels=labels,
        memory=memory,
        index_dir=index_dir,
        salvage=salvage,
        unverified=unverified,
    )


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOME:
        raise AttributeError(f"module 'millstream' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
