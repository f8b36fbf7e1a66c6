"""millstream: train on data far larger than memory.

The one public door. Everything is imported when first used, so `import millstream` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream import errors
    from millstream.dataset import features
    from millstream.door import open
    from millstream.store.read_batch import Read, ReadBatch
    from millstream.store.reads import Reads
    from millstream.store.traces import Traces
    from millstream.store.writer import TraceWriter

__version__ = "0.1.0"
__all__ = ["Read", "ReadBatch", "Reads", "TraceWriter", "Traces", "__version__", "errors", "features", "open"]

_HOME = {
    "Read": "millstream.store.read_batch",
    "ReadBatch": "millstream.store.read_batch",
    "Reads": "millstream.store.reads",
    "TraceWriter": "millstream.store.writer",
    "Traces": "millstream.store.traces",
    "open": "millstream.door",
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
