"""Pickle bytes -> what a torch file holds, with the tensors left in the file. Knows how torch_geometric pickles graphs.

A graph comes as its plain attributes; nothing of torch_geometric is imported, and every other class is refused.
"""

from typing import cast

from millstream.source.allowed import Refused, brief, stored_tensor
from millstream.source.unpickle import Unpickler, handlers_of

GRAPHS = ("graphs", "graphs_by_layer")  # the keys of lists of graphs, the latter in older files

GRAPH_CLASSES = {
    ("torch_geometric.data.data", "Data"),
    ("torch_geometric.data.data", "DataEdgeAttr"),
    ("torch_geometric.data.data", "DataTensorAttr"),
    ("torch_geometric.data.storage", "GlobalStorage"),
}


class GraphClass:
    """Stands for a torch_geometric class, which a pickle names and makes empty objects of."""


class GraphObject:
    """Stands for an object of such a class: what its pickle sets, and no behaviour."""

    def __init__(self) -> None:
        self.state: dict[str, object] = {}


GRAPH_CLASS = GraphClass()


class LazyUnpickler(Unpickler):
    """Makes a StoredTensor of every tensor: the 5 GB of a file with 250 traces are some MB this way."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in GRAPH_CLASSES:
            return GRAPH_CLASS
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return stored_tensor
        return super().find_class(module, name)

    def load_newobj(self) -> None:
        args, kind = self.stack.pop(), self.stack.pop()
        if kind is not GRAPH_CLASS or args != ():
            raise Refused(f"the file asks for an instance of {brief(kind)}")
        self.append(GraphObject())

    def load_build(self) -> None:
        built = self.stack[-2]
        if not isinstance(built, GraphObject):
            return super().load_build()
        state = self.stack.pop()
        if not isinstance(state, dict):
            raise Refused(f"the file asks to set the state of a graph to {brief(state)}")
        built.state = cast(dict[str, object], state)
        built.state.pop("_parent", None)  # the graph that holds this one: a circle, which is freed late


LazyUnpickler.handlers = handlers_of(LazyUnpickler, "NEWOBJ")


class KindIsClear(Exception):
    def __init__(self, *, is_gnn: bool) -> None:
        self.is_gnn = is_gnn


class KindUnpickler(LazyUnpickler):
    """Stops where the kind of a large file is clear: at its list of traces, or at its first graph."""

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
