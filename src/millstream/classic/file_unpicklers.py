"""Pickle bytes -> content of old files: traces one at a time, or a torch file whose tensors stay on disk.

Knows how torch_geometric pickles graphs: returns their plain attributes without importing torch_geometric.
"""

import pickle
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from types import FunctionType
from typing import cast

import numpy as np
import torch

from millstream.classic.allowed import NDArrayType, Refused, Storage, brief, stored_tensor
from millstream.classic.unpickle import FindStorage, Input, Trace, Unpickler, handlers_of

MAX_KEPT_TEXT = (
    4096  # longest string that stays in the memo after its trace: keys and constants are shared by all traces
)
GRAPHS = ("graphs", "graphs_by_layer")  # the keys of lists of graphs, the latter in older files

GRAPH_CLASSES = {
    ("torch_geometric.data.data", "Data"),
    ("torch_geometric.data.data", "DataEdgeAttr"),
    ("torch_geometric.data.data", "DataTensorAttr"),
    ("torch_geometric.data.storage", "GlobalStorage"),
}


class SharedObject(Exception):
    """The pickle refers back to an object of a trace that has already been yielded and dropped."""


class TraceUnpickler(Unpickler):
    """Yields the dicts of a pickled list, or of {"traces": list}, while it is still reading the list.

    A dict of that list is complete when the next one begins or the list is extended. With `drop`, the memo is then
    cleared except for small constants, so the trace can be freed; a file that later refers to one of its objects
    raises SharedObject and must be read again without `drop`.
    """

    def __init__(self, source: Input, find_storage: FindStorage | None = None, *, drop: bool) -> None:
        super().__init__(source, find_storage)
        self.drop = drop
        self.trace_list: list[object] | None = None
        self.num_memoised = 0
        self.kept: dict[int, object] = {}  # memo entries of earlier traces; `memo` is that of the trace being read

    def traces(self) -> Iterator[Trace]:
        yield from self.run()
        if not self.source.at_end():
            raise pickle.UnpicklingError("more bytes follow the end of the pickle")
        if self.trace_list is None:  # a single dict, or a tuple
            value = self.value
            if isinstance(value, dict):
                value = cast(Trace, value).get("traces", [cast(Trace, value)])
            if not isinstance(value, list | tuple):
                raise pickle.UnpicklingError(f"it contains {brief(value)}, not a list of traces")
            for item in cast(list[object], value):
                yield _trace(item)

    def hand_out(self, item: object) -> None:
        """The next item of the trace list is complete."""
        trace = _trace(item)
        self.ready.append(trace)
        if self.drop:
            constants = {id(value) for value in trace.values() if _is_constant(value)}
            for key, value in self.memo.items():
                if (type(value) in KEPT and _is_small(value)) or id(value) in constants:
                    self.kept[key] = value
            self.memo.clear()
        elif self.trace_list is not None:
            self.trace_list.append(trace)

    def among_traces(self) -> bool:
        """Whether the stack contains the next items of the trace list: MARK item item ... APPENDS."""
        outer = self.metastack[-1] if self.metastack and self.trace_list is not None else None
        return bool(outer) and outer[-1] is self.trace_list

    def dict_arrived(self) -> None:
        """A dict was pushed. Directly on top of an item that is a dict it cannot be a value, so it is the next item."""
        if len(self.stack) == 2 and isinstance(self.stack[0], dict) and self.among_traces():
            self.hand_out(self.stack.pop(0))

    def load_empty_dictionary(self) -> None:
        self.append({})
        self.dict_arrived()

    def load_empty_list(self) -> None:
        if self.trace_list is None and self.begins_trace_list():
            self.trace_list = []
            self.kept.update(self.memo)  # entries before the list belong to no trace
            self.memo.clear()
            self.append(self.trace_list)
        else:
            self.append([])

    def load_append(self) -> None:
        if self.trace_list is not None and len(self.stack) > 1 and self.stack[-2] is self.trace_list:
            self.hand_out(self.stack.pop())
        else:
            super().load_append()

    def load_appends(self) -> None:
        if self.among_traces():
            for item in self.pop_mark():
                self.hand_out(item)
        else:
            super().load_appends()

    def load_reduce(self) -> None:
        args = cast(tuple[str | bytes, ...], self.stack[-1])
        super().load_reduce()
        value = self.stack[-1]
        if type(value) is OrderedDict:
            self.dict_arrived()
        elif self.drop and type(value) in (bytes, Storage) and args and len(args[0]) > 1:
            # An array at protocol 2 is a string to be encoded, and a pickled tensor a small torch file. Nothing refers
            # to either again, and each is as large as the array: dropping them now halves the memory of a trace.
            for key in list(islice(reversed(self.memo), 3)):
                if self.memo[key] is args or self.memo[key] is args[0]:
                    del self.memo[key]

    # -- the memo

    def load_memoize(self) -> None:
        self.memo[self.num_memoised] = self.stack[-1]
        self.num_memoised += 1

    def load_binput(self) -> None:
        self.remember(self.read(1)[0])

    def load_long_binput(self) -> None:
        self.remember(int.from_bytes(self.read(4), "little"))

    def remember(self, key: int) -> None:
        self.memo[key] = self.stack[-1]
        if key >= self.num_memoised:
            self.num_memoised = key + 1

    def load_binget(self) -> None:
        self.recall(self.read(1)[0])

    def load_long_binget(self) -> None:
        self.recall(int.from_bytes(self.read(4), "little"))

    def recall(self, key: int) -> None:
        if key in self.memo:
            value = self.memo[key]
        elif key in self.kept:
            value = self.kept[key]
        elif self.drop and key < self.num_memoised:
            raise SharedObject
        else:
            raise pickle.UnpicklingError(f"memo entry {key} does not exist")
        if value is self.trace_list and self.drop:
            raise SharedObject  # with `drop` the list stays empty
        self.append(value)
        if isinstance(value, dict):
            self.dict_arrived()


TraceUnpickler.handlers = handlers_of(TraceUnpickler)


class GraphClass:
    """Stands in for a torch_geometric class, which a pickle references and instantiates without arguments."""


class GraphObject:
    """Stands in for an instance of such a class: its pickled state, and no behaviour."""

    def __init__(self) -> None:
        self.state: dict[str, object] = {}


GRAPH_CLASS = GraphClass()


class LazyUnpickler(Unpickler):
    """Turns every tensor into a StoredTensor: a 5 GB file with 250 traces then takes a few MB of memory."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in GRAPH_CLASSES:
            return GRAPH_CLASS
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return stored_tensor
        return super().find_class(module, name)

    def load_newobj(self) -> None:
        args, kind = self.stack.pop(), self.stack.pop()
        if kind is not GRAPH_CLASS or args != ():
            raise Refused(f"the file creates an instance of {brief(kind)}")
        self.append(GraphObject())

    def load_build(self) -> None:
        built = self.stack[-2]
        if not isinstance(built, GraphObject):
            return super().load_build()
        state = self.stack.pop()
        if not isinstance(state, dict):
            raise Refused(f"the file tries to set the state of a graph to {brief(state)}")
        built.state = cast(dict[str, object], state)
        built.state.pop("_parent", None)  # the graph that contains this one: a reference cycle, which is freed late


LazyUnpickler.handlers = handlers_of(LazyUnpickler, "NEWOBJ")


class KindIsClear(Exception):
    def __init__(self, *, is_gnn: bool) -> None:
        self.is_gnn = is_gnn


class KindUnpickler(LazyUnpickler):
    """Stops as soon as the kind of a file is clear: at its list of traces, or at its first graph."""

    def load_empty_list(self) -> None:
        if self.begins_trace_list():
            raise KindIsClear(is_gnn=False)
        self.append([])

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in GRAPH_CLASSES:
            outer = [item for frame in [*self.metastack, self.stack][:2] for item in frame]
            if outer and type(outer[0]) is dict and any(isinstance(item, str) and item in GRAPHS for item in outer):
                raise KindIsClear(is_gnn=True)
        return super().find_class(module, name)


KindUnpickler.handlers = handlers_of(KindUnpickler, "NEWOBJ")


# Types that stay in the memo after their trace, if small. (bytes: for the b"b" that numpy puts into every array.)
KEPT: set[type] = {str, bytes, FunctionType, NDArrayType, torch.dtype, *np.sctypeDict.values()}
KEPT.update(type(np.dtype(code)) for code in np.typecodes["All"])


def _is_small(value: object) -> bool:
    return not isinstance(value, str | bytes) or len(value) <= (MAX_KEPT_TEXT if isinstance(value, str) else 1)


def _is_constant(value: object) -> bool:
    """Whether a value of a trace looks like settings, which a script may have added to every trace."""
    if not isinstance(value, dict | list | tuple):
        return False
    items = list(cast(dict[str, object], value).values()) if isinstance(value, dict) else cast(list[object], value)
    return len(items) <= 64 and all(isinstance(item, str | int | float | None) and _is_small(item) for item in items)


def _trace(value: object) -> Trace:
    if not isinstance(value, dict):
        raise pickle.UnpicklingError(f"it is {brief(value)}, not a dict")
    return cast(Trace, value)
