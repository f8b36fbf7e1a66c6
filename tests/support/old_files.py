"""Old files as the scripts wrote them: torch's two formats, and torch_geometric's graphs without torch_geometric."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch


class DataEdgeAttr:
    pass


class DataTensorAttr:
    pass


class GlobalStorage:
    def __init__(self, parent: object, mapping: dict[str, object]) -> None:
        self._mapping = mapping
        self._parent = parent


class Data:
    def __init__(self, **fields: object) -> None:
        self._edge_attr_cls = DataEdgeAttr
        self._tensor_attr_cls = DataTensorAttr
        self._store = GlobalStorage(self, fields)


class Batch:
    """A class that the old files do not use."""


CLASSES: dict[str, list[type]] = {
    "torch_geometric": [],
    "torch_geometric.data": [],
    "torch_geometric.data.data": [Data, DataEdgeAttr, DataTensorAttr],
    "torch_geometric.data.storage": [GlobalStorage],
    "torch_geometric.data.batch": [Batch],
}
for module_name, classes in CLASSES.items():
    for cls in classes:
        cls.__module__ = module_name


@contextmanager
def old_torch_geometric() -> Iterator[None]:
    """As much of torch_geometric as pickle needs while a file is written."""
    with pytest.MonkeyPatch.context() as patch:
        for name, classes in CLASSES.items():
            module = ModuleType(name)
            for cls in classes:
                setattr(module, cls.__name__, cls)
            patch.setitem(sys.modules, name, module)
        yield


def torch_bytes(value: object, *, legacy: bool = False) -> bytes:
    """A file of `torch.save`, in the format before torch 1.6 or in the one since."""
    file = io.BytesIO()
    with old_torch_geometric():
        torch.save(value, file, _use_new_zipfile_serialization=not legacy)
    return file.getvalue()


class Call:
    """Pickles as a call of `function` and, if given, the setting of a state."""

    def __init__(self, function: object, *args: object, state: object = None) -> None:
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> tuple[object, ...]:
        return self.reduced
