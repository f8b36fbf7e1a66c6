"""millstream: train on data far larger than memory.

The one public door. Everything is imported when first used, so `import millstream` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream import errors
    from millstream.collection import Collection
    from millstream.dataset import features
    from millstream.dataset.concat import concat
    from millstream.dataset.featurize import featurize
    from millstream.dataset.label import label
    from millstream.dataset.labels import labelled
    from millstream.dataset.mix import mix
    from millstream.dataset.split import Split, split
    from millstream.dataset.subset import Subset, subset
    from millstream.door import open
    from millstream.loader.datasets import RecordDataset, RecordStream
    from millstream.loader.loader import Loader
    from millstream.loader.order import Order
    from millstream.store.extract import extract
    from millstream.store.read_batch import Read, ReadBatch
    from millstream.store.reads import Reads
    from millstream.store.traces import Traces
    from millstream.store.writer import TraceWriter
    from millstream.train.classify import classify
    from millstream.train.evaluate import evaluate
    from millstream.train.run import train

__version__ = "0.1.0"
__all__ = [
    "Collection",
    "Loader",
    "Order",
    "Read",
    "ReadBatch",
    "Reads",
    "RecordDataset",
    "RecordStream",
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
    "label",
    "labelled",
    "mix",
    "open",
    "split",
    "subset",
    "train",
]

_HOME = {
    "Collection": "millstream.collection",
    "Loader": "millstream.loader.loader",
    "Order": "millstream.loader.order",
    "Read": "millstream.store.read_batch",
    "ReadBatch": "millstream.store.read_batch",
    "Reads": "millstream.store.reads",
    "RecordDataset": "millstream.loader.datasets",
    "RecordStream": "millstream.loader.datasets",
    "Split": "millstream.dataset.split",
    "Subset": "millstream.dataset.subset",
    "TraceWriter": "millstream.store.writer",
    "Traces": "millstream.store.traces",
    "classify": "millstream.train.classify",
    "concat": "millstream.dataset.concat",
    "evaluate": "millstream.train.evaluate",
    "extract": "millstream.store.extract",
    "featurize": "millstream.dataset.featurize",
    "label": "millstream.dataset.label",
    "labelled": "millstream.dataset.labels",
    "mix": "millstream.dataset.mix",
    "open": "millstream.door",
    "split": "millstream.dataset.split",
    "subset": "millstream.dataset.subset",
    "train": "millstream.train.run",
}


_MODULES = {"errors": "millstream.errors", "features": "millstream.dataset.features"}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOME:
        raise AttributeError(f"module 'millstream' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
