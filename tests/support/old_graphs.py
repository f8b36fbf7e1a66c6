"""torch_geometric's graphs as old files pickled them, without torch_geometric."""

import sys
from contextlib import contextmanager
from types import ModuleType

import pytest


class GlobalStorage:
    def __init__(self, mapping: dict[str, object]) -> None:
        self._mapping = mapping


class Data:
    def __init__(self, **fields: object) -> None:
        self._store = GlobalStorage(fields)


Data.__module__, GlobalStorage.__module__ = "torch_geometric.data.data", "torch_geometric.data.storage"


@contextmanager
def old_torch_geometric():
    """As far as torch.save needs it."""
    modules = {name: ModuleType(name) for name in ("torch_geometric", "torch_geometric.data")}
    for cls in (Data, GlobalStorage):
        modules[cls.__module__] = ModuleType(cls.__module__)
        setattr(modules[cls.__module__], cls.__name__, cls)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield
