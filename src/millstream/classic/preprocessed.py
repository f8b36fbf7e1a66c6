"""Old preprocessed training files -> one record per trace. Tensors are read only when their trace is.

kind    file written by torch.save                                      record, next to "question_id" and "label"
lstm    "sequences": [B, L, d], or B tensors [L, d]                     "layers": [L, d]
gnn     "graphs": B lists of L torch_geometric.data.Data of             "x": [L, T, d], "edge_counts": [L],
        x [T, d], edge_index [2, E], edge_attr [E] or [E, 1]            "edge_index": [2, all E], "edge_attr": [all E]
both    "labels": [B], "question_ids": B strings

B traces, L layers, T tokens, d hidden size, E edges of one layer. Graphs are read without torch_geometric.
"""

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from typing import Literal, cast

import numpy as np
import torch

from millstream.classic.limits import OBJECT_BYTES, Input, MemoryLimit
from millstream.classic.pickles import BROKEN, LEGACY_TORCH, ZIP, broken, open_pickle, unsafe
from millstream.classic.unpickle import Array, Refused, StoredTensor, Unpickler, brief, handlers_of, stored_tensor
from millstream.errors import BadSource

Kind = Literal["lstm", "gnn"]

GRAPHS = ("graphs", "graphs_by_layer")  # the keys of lists of graphs, the latter in older files
GRAPH_FIELDS = ("x", "edge_index", "edge_attr")
GRAPH_CLASSES = {
    ("torch_geometric.data.data", "Data"),
    ("torch_geometric.data.data", "DataEdgeAttr"),
    ("torch_geometric.data.data", "DataTensorAttr"),
    ("torch_geometric.data.storage", "GlobalStorage"),
}


def is_preprocessed(path: str | os.PathLike[str], *, memory: int | None = None) -> Kind | None:
    """The kind of a preprocessed file, detected quickly from its content; None for traces and anything else.

        is_preprocessed("gnn/preprocessed_0000.pt")  # "gnn"

    Raises BadSource or UnsafePickle for a torch file that cannot be read, as `read_preprocessed` does.
    """
    name = os.fspath(path)
    with open(name, "rb") as file:
        if not file.read(16).startswith((ZIP, LEGACY_TORCH)):
            return None
    try:
        with ExitStack() as opened:
            content = KindUnpickler(*open_pickle(name, opened, KindUnpickler, MemoryLimit(name, memory))).load()
    except KindIsClear as clear:
        return "gnn" if clear.is_gnn else None
    except Refused as reason:
        raise unsafe(name, reason) from None
    except BROKEN as error:
        raise BadSource(
            f"{name}: broken: {str(error) or type(error).__name__}. Copy the file again or recreate it"
        ) from error
    fields = cast(dict[str, object], content) if isinstance(content, dict) else {}
    if "labels" not in fields and "question_ids" not in fields:
        return None
    if "sequences" in fields:
        return "lstm"
    return "gnn" if any(key in fields for key in GRAPHS) else None


def read_preprocessed(
    path: str | os.PathLike[str], *, notify: Callable[[str], None] | None = None, memory: int | None = None
) -> Iterator[dict[str, object]]:
    """The traces of a preprocessed file as records of torch tensors, one in memory at a time.

        for record in read_preprocessed("lstm_solo/preprocessed_0000.pt"):
            record["question_id"], record["label"], record["layers"].shape  # "tc_33", 1.0, (33, 4096)

    Labels are unchanged: NaN stays NaN, and a missing label is None. Nothing in the file is run: UnsafePickle names
    what was refused. A broken file raises BadSource after its last whole trace. `notify` gets a message about fields
    that are left out of the records. `memory` as in `read_traces`.
    """
    name = os.fspath(path)
    number = 0
    known = {"sequences", "labels", "question_ids", *GRAPHS, *GRAPH_FIELDS}

    def leave_out(fields: Mapping[str, object]) -> None:
        extra = sorted(field for field, value in fields.items() if field not in known and value is not None)
        known.update(extra)
        if extra and notify:
            notify(f"{name}: left out, because training records have no such field: {', '.join(extra)}")

    try:
        with ExitStack() as opened:
            source, find_storage = open_pickle(name, opened, LazyUnpickler, MemoryLimit(name, memory))
            content = LazyUnpickler(source, find_storage).load()
            if not source.at_end():
                raise pickle.UnpicklingError("more bytes follow the end of the pickle")
            key, rows, labels, ids = _columns(name, content, source)
            leave_out(cast(dict[str, object], content))
            for number in range(len(ids)):
                yield {
                    "question_id": _id(ids[number]),
                    "label": _label(labels[number]),
                    **(_layers(rows[number]) if key == "sequences" else _graphs(rows[number], source, leave_out)),
                }
    except Refused as reason:
        raise unsafe(name, reason) from None
    except BROKEN as error:
        raise broken(name, number, error) from error


# -- the unpicklers


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


# -- the columns of a file: rows, labels, ids

Rows = StoredTensor | Sequence[object]


def _columns(name: str, content: object, source: Input) -> tuple[str, Rows, Sequence[object], Sequence[object]]:
    fields = cast(dict[str, object], content) if isinstance(content, dict) else {}
    key = next((key for key in ("sequences", *GRAPHS) if key in fields), None)
    if key is None:
        raise BadSource(f"{name}: not a preprocessed file: it has neither 'sequences' nor 'graphs'")
    rows = fields[key]
    if isinstance(rows, list | tuple):
        num_rows = len(cast(Sequence[object], rows))
    elif isinstance(rows, StoredTensor) and key == "sequences" and len(rows.shape) == 3:
        num_rows = rows.shape[0]
    else:
        num_rows = -1
    if num_rows < 0:
        shape = f" of shape {rows.shape}" if isinstance(rows, StoredTensor) else ""
        wanted = "a tensor [trace, layer, dim] or a list" if key == "sequences" else "lists of graphs"
        raise pickle.UnpicklingError(f"expected {key!r} to be {wanted}, found {brief(fields[key])}{shape}")
    source.spend(num_rows * OBJECT_BYTES)
    if not isinstance(rows, StoredTensor):
        source.check_traces(num_rows)
    missing = [None] * num_rows
    labels = _items("labels", fields["labels"]) if "labels" in fields else missing
    ids = _items("question_ids", fields["question_ids"]) if "question_ids" in fields else missing
    if not num_rows == len(labels) == len(ids):
        raise BadSource(
            f"{name}: {num_rows} {key}, {len(labels)} labels and {len(ids)} question_ids, so they cannot be "
            "matched. Recreate it with the script that wrote it"
        )
    return key, cast(Rows, rows), labels, ids


def _items(key: str, value: object) -> Sequence[object]:
    if isinstance(value, StoredTensor) and len(value.shape) == 1:
        return cast(list[object], value.read().tolist())  # pyright: ignore[reportUnknownMemberType]
    if isinstance(value, np.ndarray) and cast(Array, value).ndim == 1:
        return cast(list[object], cast(Array, value).tolist())
    if isinstance(value, list | tuple):
        return cast(Sequence[object], value)
    found = brief(cast(object, value))
    raise pickle.UnpicklingError(f"expected {key!r} to be a list or a 1-D tensor, found {found}")


def _label(value: object) -> float | None:
    if isinstance(value, StoredTensor) and not value.shape:
        value = cast(object, value.read().item())
    elif isinstance(value, np.generic):
        value = cast(object, value.item())
    if value is None or isinstance(value, int | float):
        return None if value is None else float(value)
    raise pickle.UnpicklingError(f"its label is {brief(value)}, not a number")


def _id(value: object) -> str | None:
    if isinstance(value, str):
        value.encode()  # Arrow rejects lone surrogates, pickle does not
    elif value is not None and type(value) is not int:
        raise pickle.UnpicklingError(f"its question_id is {brief(value)}, not a string")
    return None if value is None else str(value)


# -- the tensors of a trace


def _layers(sequence: object) -> dict[str, object]:
    if not isinstance(sequence, StoredTensor) or len(sequence.shape) != 2:
        shape = f" of shape {sequence.shape}" if isinstance(sequence, StoredTensor) else ""
        raise pickle.UnpicklingError(
            f"expected its sequence to be a tensor [layer, dim], found {brief(sequence)}{shape}"
        )
    return {"layers": sequence.read()}


def _graphs(layers: object, source: Input, leave_out: Callable[[Mapping[str, object]], None]) -> dict[str, object]:
    if not isinstance(layers, list | tuple):
        raise pickle.UnpicklingError(f"expected a list of one graph per layer, found {brief(layers)}")
    if not layers:
        raise pickle.UnpicklingError("it has no layers")
    source.spend(len(cast(Sequence[object], layers)) * OBJECT_BYTES)  # a list may be that of every trace
    graphs = [_fields(graph, leave_out) for graph in cast(Sequence[object], layers)]
    x, edge_index = _of_one_dtype("x", graphs), _of_one_dtype("edge_index", graphs)
    has_attr = any(graph.get("edge_attr") is not None for graph in graphs)
    edge_attr = _of_one_dtype("edge_attr", graphs) if has_attr else []
    _check_shapes(x, edge_index, edge_attr)
    counts = [edges.shape[1] for edges in edge_index]
    return {
        "x": _stack(x),
        "edge_index": _join_edges(edge_index, counts, num_nodes=x[0].shape[0]),
        "edge_attr": torch.cat([weights.read().reshape(-1) for weights in edge_attr]) if has_attr else None,
        "edge_counts": np.array(counts, np.int64),
    }


def _fields(graph: object, leave_out: Callable[[Mapping[str, object]], None]) -> dict[str, object]:
    """x, edge_index, edge_attr and any other attribute of the graph: Data keeps them in `_store._mapping`."""
    store = graph.state.get("_store") if isinstance(graph, GraphObject) else None
    mapping = store.state.get("_mapping") if isinstance(store, GraphObject) else None
    if not isinstance(mapping, dict):
        raise pickle.UnpicklingError(f"expected one graph per layer, found {brief(graph)}")
    leave_out(cast(dict[str, object], mapping))
    return cast(dict[str, object], mapping)


def _of_one_dtype(field: str, graphs: Sequence[dict[str, object]]) -> list[StoredTensor]:
    tensors: list[StoredTensor] = []
    for layer, graph in enumerate(graphs):
        tensor = graph.get(field)
        if not isinstance(tensor, StoredTensor):
            raise pickle.UnpicklingError(f"expected {field} of layer {layer} to be a tensor, found {brief(tensor)}")
        if tensors and tensor.dtype != tensors[0].dtype:
            raise pickle.UnpicklingError(
                f"{field} is {tensors[0].dtype} in layer 0 and {tensor.dtype} in layer {layer}"
            )
        tensors.append(tensor)
    return tensors


def _check_shapes(x: list[StoredTensor], edge_index: list[StoredTensor], edge_attr: list[StoredTensor]) -> None:
    if len(x[0].shape) != 2:
        raise pickle.UnpicklingError(f"expected x to be [token, dim], found shape {x[0].shape}")
    for layer, edges in enumerate(edge_index):
        if x[layer].shape != x[0].shape:
            raise pickle.UnpicklingError(
                f"x has shape {x[0].shape} in layer 0 and {x[layer].shape} in layer {layer}, "
                "but all layers of a trace must have the same tokens and dimensions"
            )
        if len(edges.shape) != 2 or edges.shape[0] != 2 or edges.dtype.is_floating_point:
            raise pickle.UnpicklingError(
                f"expected edge_index of layer {layer} to be integers [2, edge], found {edges.dtype} {edges.shape}"
            )
        if edge_attr and edge_attr[layer].shape not in (edges.shape[1:], (*edges.shape[1:], 1)):
            raise pickle.UnpicklingError(
                f"layer {layer} has {edges.shape[1]} edges, but edge_attr of shape {edge_attr[layer].shape}"
            )


def _stack(layers: list[StoredTensor]) -> torch.Tensor:
    stacked = torch.empty((len(layers), *layers[0].shape), dtype=layers[0].dtype)
    for layer, tensor in enumerate(layers):
        stacked[layer] = tensor.read()
    return stacked


def _join_edges(layers: list[StoredTensor], counts: list[int], *, num_nodes: int) -> torch.Tensor:
    joined = torch.empty((2, sum(counts)), dtype=layers[0].dtype)
    for layer, (start, stop) in enumerate(pairwise(accumulate(counts, initial=0))):
        edges = joined[:, start:stop].copy_(layers[layer].read())
        if edges.numel() and not (edges.min() >= 0 and edges.max() < num_nodes):
            raise pickle.UnpicklingError(
                f"edges of layer {layer} join nodes {int(edges.min())} to {int(edges.max())}, but it has {num_nodes}"
            )
    return joined
