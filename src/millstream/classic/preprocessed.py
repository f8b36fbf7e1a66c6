"""Old preprocessed training files -> one record per trace, and their folder as a labelled collection.

kind    file written by torch.save                                      record, next to "question_id" and "label"
lstm    "sequences": [B, L, d]                                          "layers": [L, d]
gnn     "graphs": B lists of L torch_geometric.data.Data of             "x": [L, T, d], "edge_counts": [L],
        x [T, d], edge_index [2, E], edge_attr [E] or [E, 1]            "edge_index": [2, all E], "edge_attr": [all E]
both    "labels": [B], "question_ids": B strings

B traces, L layers, T tokens, d hidden size, E edges of one layer. Tensors are read only when their trace is.
"""

import json
import os
import pickle
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch

from millstream.classic.allowed import Array, Refused, StoredTensor, brief
from millstream.classic.file_unpicklers import GRAPHS, GraphObject, KindIsClear, KindUnpickler, LazyUnpickler
from millstream.classic.pickles import BROKEN, LEGACY_TORCH, ZIP, broken, open_pickle, unsafe
from millstream.core.collection import Collection
from millstream.core.console import format_bytes, progress, say
from millstream.core.files import locked, publish_json
from millstream.core.split import Labelled, labelled
from millstream.core.subset import Subset, subset
from millstream.errors import BadSource, StoreExists
from millstream.traces.convert import PROGRESS, convert
from millstream.traces.store.manifest import MANIFEST, list_shards
from millstream.traces.store.traces import Traces

__all__ = ["is_preprocessed", "read_preprocessed", "split_graphs"]

GRAPH_FIELDS = ("x", "edge_index", "edge_attr")


def is_preprocessed(path: str | os.PathLike[str]) -> Literal["lstm", "gnn"] | None:
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
            content = KindUnpickler(*open_pickle(name, opened, KindUnpickler)).load()
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
    if isinstance(fields.get("sequences"), StoredTensor):
        return "lstm"
    return "gnn" if any(key in fields for key in GRAPHS) else None


def read_preprocessed(
    path: str | os.PathLike[str], *, notify: Callable[[str], None] | None = None
) -> Iterator[dict[str, object]]:
    """The traces of a preprocessed file as records of torch tensors, one in memory at a time.

        for record in read_preprocessed("lstm_solo/preprocessed_0000.pt"):
            record["question_id"], record["label"], record["layers"].shape  # "tc_33", 1.0, (33, 4096)

    Labels are unchanged: NaN stays NaN, and a missing label is None. Nothing in the file is run: UnsafePickle names
    what was refused. A broken file raises BadSource after its last whole trace. `notify` gets a message about fields
    that are left out of the records.
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
            source, find_storage = open_pickle(name, opened, LazyUnpickler)
            content = LazyUnpickler(source, find_storage).load()
            if not source.at_end():
                raise pickle.UnpicklingError("more bytes follow the end of the pickle")
            rows, labels, ids = _columns(name, content)
            leave_out(cast(dict[str, object], content))
            for number in range(len(ids)):
                yield {
                    "question_id": _id(ids[number]),
                    "label": _label(labels[number]),
                    **_tensors(rows, number, leave_out),
                }
    except Refused as reason:
        raise unsafe(name, reason) from None
    except BROKEN as error:
        raise broken(name, number, error) from error


def split_graphs(record: Mapping[str, object]) -> list[dict[str, Array]]:
    """The graph of each layer as views: `x` [T, d], `edge_index` [2, E] and, if present, `edge_attr` [E].

    graphs = [Data(**{name: torch.from_numpy(x) for name, x in g.items()}) for g in split_graphs(traces[0])]
    """
    counts = [int(count) for count in cast(Array, record["edge_counts"])]
    x, edge_index, edge_attr = (cast(Array, record[field]) for field in GRAPH_FIELDS)
    graphs: list[dict[str, Array]] = []
    for layer, (start, stop) in enumerate(pairwise(accumulate(counts, initial=0))):
        graph = {"x": x[layer], "edge_index": edge_index[:, start:stop]}
        if record["edge_attr"] is not None:
            graph["edge_attr"] = edge_attr[start:stop]
        graphs.append(graph)
    return graphs


# -- the columns of a file: rows, labels, ids

Rows = StoredTensor | Sequence[object]


def _columns(name: str, content: object) -> tuple[Rows, Sequence[object], Sequence[object]]:
    fields = cast(dict[str, object], content) if isinstance(content, dict) else {}
    key = next((key for key in ("sequences", *GRAPHS) if key in fields), None)
    if key is None:
        raise BadSource(f"{name}: not a preprocessed file: it has neither 'sequences' nor 'graphs'")
    rows = fields[key]
    if isinstance(rows, StoredTensor) and key == "sequences":
        num_rows = rows.shape[0] if len(rows.shape) == 3 else -1
    elif isinstance(rows, list | tuple) and key != "sequences":
        num_rows = len(cast(Sequence[object], rows))
    else:
        num_rows = -1
    if num_rows < 0:
        shape = f" of shape {rows.shape}" if isinstance(rows, StoredTensor) else ""
        wanted = "a tensor [trace, layer, dim]" if key == "sequences" else "lists of graphs"
        raise pickle.UnpicklingError(f"expected {key!r} to be {wanted}, found {brief(fields[key])}{shape}")
    missing = [None] * num_rows
    labels = _items("labels", fields["labels"]) if "labels" in fields else missing
    ids = _items("question_ids", fields["question_ids"]) if "question_ids" in fields else missing
    if not num_rows == len(labels) == len(ids):
        raise BadSource(
            f"{name}: {num_rows} {key}, {len(labels)} labels and {len(ids)} question_ids, so they cannot be "
            "matched. Recreate it with the script that wrote it"
        )
    return cast(Rows, rows), labels, ids


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


def _tensors(rows: Rows, number: int, leave_out: Callable[[Mapping[str, object]], None]) -> dict[str, object]:
    if isinstance(rows, StoredTensor):
        return {"layers": rows[number].read()}
    graphs = [_fields(graph, leave_out) for graph in cast(Sequence[object], rows[number])]
    if not graphs:
        raise pickle.UnpicklingError("it has no layers")
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


# Location of the old training data -> a labelled collection.
#
# Old .pt files are converted once, into a store next to them, which is reused until the files change.


Kind = Literal["lstm", "gnn"]
SUBFOLDERS = {"lstm": "lstm_solo", "gnn": "gnn"}  # as the old preprocessing script wrote them
PATTERNS = ("preprocessed_*.pt", "batch_*.pt")
SOURCES = ".sources.json"  # in a converted store: name, size and mtime of its files, and whether all are converted


class Scratch:
    """A temporary folder, removed with the last dataset that refers to it, by the process that created it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="millstream-"))
        weakref.finalize(self, _remove, self.path, os.getpid())


def open_preprocessed(
    place: str | Path | Collection, kind: Kind, files: Sequence[str | Path] | None
) -> tuple[Collection, Scratch | None]:
    """The labelled traces of a folder (or of some of its files), and the temporary folder they need, if any."""
    if isinstance(place, Collection):
        if files is not None:
            raise ValueError("batch_files_to_load needs a folder; for a collection, take a subset first")
        return _labelled(place), None
    folder = _find(Path(place), kind)
    if _is_store(folder):
        traces, scratch = Traces(folder), None
    else:
        store, scratch = _converted(folder, kind)
        traces = Traces(store)
        _check_folder(files or (), folder)
    return _labelled(traces if files is None else _from_files(traces, files)), scratch


def store_name(kind: Kind) -> str:
    """The name of the store that the old files of a folder are converted into."""
    return f"millstream-{kind}"


def old_files(folder: Path) -> list[Path]:
    """The old files of a folder, sorted by name."""
    return sorted({file for pattern in PATTERNS for file in folder.glob(pattern)})


def _find(path: Path, kind: Kind) -> Path:
    """The folder with the traces: this one, or its subfolder for this kind."""
    for folder in (path, path / SUBFOLDERS[kind]):
        if folder.is_dir() and (_is_store(folder) or old_files(folder)):
            return folder
    found = "contains no training data" if path.exists() else "no such folder"
    raise BadSource(
        f"{path}: {found}; expected {' or '.join(PATTERNS)}, a subfolder {SUBFOLDERS[kind]} with them, or a trace store"
    )


def _is_store(folder: Path) -> bool:
    return (folder / MANIFEST).exists() or any(list_shards(folder))


# -- converting


def _converted(folder: Path, kind: Kind) -> tuple[Path, Scratch | None]:
    """The store of a folder's old files, created or updated if necessary."""
    files = old_files(folder)
    store = folder / store_name(kind)
    with locked(folder):  # the ranks of a job open their datasets concurrently
        stats = [file.stat() for file in files]
        wanted = [[file.name, stat.st_size, stat.st_mtime_ns] for file, stat in zip(files, stats, strict=True)]
        before = _sources(store)
        if before == {"files": wanted, "complete": True}:
            return store, None
        _check_kind(files[0], kind)
        scratch = None if os.access(store if store.exists() else folder, os.W_OK) else Scratch()
        if scratch:
            store = scratch.path / store_name(kind)
        elif before.get("files") != wanted:  # otherwise resume the interrupted conversion
            _clear(store)
        total = sum(stat.st_size for stat in stats)
        changed = ", which have changed since," if "files" in before and before["files"] != wanted else ""
        kept = "removed with the dataset (the folder is read-only)" if scratch else "reused from now on"
        say(f"{folder}: converting {len(files)} old files ({format_bytes(total)}){changed} into {store}, {kept}")
        store.mkdir(parents=True, exist_ok=True)
        _write_sources(store, wanted, complete=False)
        with progress(f"convert {folder.name}", total, unit="bytes") as update:
            convert(files, store, notify=say, progress=update)
        _write_sources(store, wanted, complete=True)
        return store, scratch


def _write_sources(store: Path, files: list[list[str | int]], *, complete: bool) -> None:
    publish_json(store / SOURCES, {"files": files, "complete": complete})


def _sources(store: Path) -> dict[str, object]:
    try:
        return cast("dict[str, object]", json.loads((store / SOURCES).read_text()))
    except (OSError, ValueError):
        return {}


def _check_kind(file: Path, kind: Kind) -> None:
    found = is_preprocessed(file)
    if found != kind:
        names: dict[str | None, str] = {
            "lstm": "sequences (for the LSTM dataset)",
            "gnn": "graphs (for the GNN dataset)",
        }
        raise BadSource(f"{file}: contains {names.get(found, 'no preprocessed traces')}, expected {names[kind]}")


def _clear(store: Path) -> None:
    """Remove a store that was converted from files that have changed; refuse to remove anything else."""
    if store.is_dir() and ((store / SOURCES).exists() or not any(store.iterdir())):
        shutil.rmtree(store)
    elif store.exists():
        raise StoreExists(f"{store}: exists, but was not made from these files; move it, or open it by its own path")


def _remove(folder: Path, owner: int) -> None:
    """Only the process that created the folder removes it, not a forked worker."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


# -- which records


def _check_folder(files: Sequence[str | Path], folder: Path) -> None:
    """A file of the same name in another folder is a different file."""
    for file in map(Path, files):
        if file.name != str(file) and file.resolve() != (folder / file.name).resolve():
            raise BadSource(f"{file}: is not in {folder}; batch_files_to_load selects files of that folder")


def _from_files(traces: Traces, files: Sequence[str | Path]) -> Subset:
    """The records that came from these files, in the order of the files."""
    try:
        counts = cast("dict[str, int]", json.loads((traces.path / PROGRESS).read_text()))
    except FileNotFoundError:
        raise BadSource(
            f"{traces.path}: does not record which file its records came from; omit batch_files_to_load"
        ) from None
    names = [str(entry["name"]) for entry in cast("list[dict[str, object]]", traces.config.get("converted", []))]
    if sum(counts.values()) != len(traces) or any(f"{name} (2)" in counts for name in names):
        raise BadSource(f"{traces.path}: its records cannot be assigned to files; omit batch_files_to_load")
    ranges = dict(zip(counts, pairwise(accumulate(counts.values(), initial=0)), strict=True))
    numbers = [np.empty(0, np.int64)]
    for name in (Path(file).name for file in files):
        if name not in names:
            raise BadSource(f"{traces.path}: no records from {name!r}; must be one of: {', '.join(names)}")
        numbers.append(np.arange(*ranges.get(name, (0, 0)), dtype=np.int64))  # a file without records has no entry
    return subset(traces, np.concatenate(numbers))


def _labelled(collection: Collection) -> Collection:
    """The collection with a field `label`: its own, or the one `ms.labelled` finds."""
    inner = collection
    while isinstance(inner, Subset):
        inner = inner.collection
    return collection if isinstance(inner, Labelled) else labelled(collection)
