"""The old scripts' training datasets, map-style and streaming, for torch's DataLoader."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import ClassVar, NamedTuple, Self, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from millstream.classic.importer import SAVED_GRAPHS
from millstream.classic.preprocessed import Kind
from millstream.classic.preprocessed_folder import open_preprocessed
from millstream.classic.records import NAMES
from millstream.core.batches import ColumnBatch
from millstream.core.collection import Collection, Numbers
from millstream.core.engine import available_cores
from millstream.core.features import to_torch
from millstream.core.order import Order
from millstream.core.record import Array
from millstream.core.split import LABEL, split
from millstream.core.torch_data import checked_indices
from millstream.errors import BadSource
from millstream.traces.graphs import GraphFeature
from millstream.traces.store.format import QUESTION_ID

# B batch, L layers, H heads, T tokens, D hidden, E edges


EVERY_EDGE = -1.0  # the old script's threshold was `>= 0`
MAX_WORKERS = 4
READ_BYTES, READ_TRACES = 8 << 20, 64  # limits of one fetch of a stream
_NO_PASS = -1

Columns = Mapping[str, object]
Item = tuple[object, torch.Tensor, str]


@dataclass
class Graph:
    """The graph of a layer if torch_geometric is not installed: the attributes of Data that the old scripts used."""

    x: torch.Tensor
    edge_index: torch.Tensor
    edge_attr: torch.Tensor | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.x)


class Maker(NamedTuple):
    """Makes the model input of each trace from some of its fields."""

    fields: tuple[str, ...]
    make: Callable[[Columns, Numbers], Sequence[object]]
    one_by_one: bool  # whether traces are much larger than their model input, so they are fetched one at a time


def sequence_maker(names: Sequence[str]) -> Maker:
    """For traces with these fields: the hidden state of the last token in every layer [L, D]."""
    if "layers" in names:
        return Maker(("layers",), _saved_sequences, one_by_one=False)
    hidden = _field(names, "hidden", "'layers'")
    return Maker((hidden,), partial(_last_tokens, hidden), one_by_one=True)


def graph_maker(names: Sequence[str]) -> Maker:
    """For traces with these fields: the graph of every layer."""
    _graph_type()  # imported once, before workers are forked
    if set(SAVED_GRAPHS) <= set(names):
        return Maker(SAVED_GRAPHS, _saved_graphs, one_by_one=False)
    hidden, attention = (_field(names, ours, ", ".join(map(repr, SAVED_GRAPHS))) for ours in ("hidden", "attention"))
    return Maker((hidden, attention), partial(_attention_graphs, hidden, attention), one_by_one=True)


def _field(names: Sequence[str], ours: str, saved: str) -> str:
    """The name of a field: ours, or that of the old scripts."""
    for name in (ours, NAMES[ours]):
        if name in names:
            return name
    raise BadSource(
        f"the traces have no {ours!r} or {NAMES[ours]!r} (or {saved} of preprocessed files), "
        f"only {', '.join(map(repr, names))}"
    )


def _saved_sequences(columns: Columns, numbers: Numbers) -> Sequence[object]:
    layers = columns["layers"]
    if isinstance(layers, list):  # different shapes
        return [_tensor(value) for value in cast("list[object]", layers)]
    return _tensor(layers).unbind()


def _last_tokens(hidden: str, columns: Columns, numbers: Numbers) -> Sequence[object]:
    made: list[object] = []
    for number, states in zip(numbers.tolist(), cast("Iterable[object]", columns[hidden]), strict=True):
        if states is None or (states_LTD := _tensor(states)).ndim != 3:
            raise ValueError(f"record {number}: {hidden!r} is not [layer, token, dim]")
        made.append(states_LTD[:, -1].clone())  # a copy, so that the other tokens can be freed
    return made


def _saved_graphs(columns: Columns, numbers: Numbers) -> Sequence[object]:
    rows = zip(*(cast("Iterable[object]", columns[name]) for name in SAVED_GRAPHS), strict=True)
    return [
        _split(_tensor(x), _tensor(edges), None if weights is None else _tensor(weights), cast(Numbers, counts))
        for x, edges, weights, counts in rows
    ]


def _attention_graphs(hidden: str, attention: str, columns: Columns, numbers: Numbers) -> Sequence[object]:
    """As the old script made them: from every token to itself and to each later one, weighted by mean attention."""
    made: list[object] = []
    for place, number in enumerate(numbers.tolist()):
        record = {name: cast("Sequence[object]", columns[name])[place : place + 1] for name in (hidden, attention)}
        states = record[hidden]
        dtype = cast(Array, states).dtype.name if isinstance(states, np.ndarray) else "float32"  # for bfloat16
        feature = GraphFeature(None, EVERY_EDGE, hidden, attention, self_loops=True, dtype=dtype)
        union = feature(ColumnBatch(np.array([number]), record))
        ptr = cast(Numbers, union["ptr"])
        edges = cast(Numbers, union["edge_index"])
        starts = np.searchsorted(edges[1], ptr)  # targets ascend from layer to layer
        counts = np.diff(starts)
        x_LTD = _tensor(cast(Array, union["x"]).reshape(len(counts), -1, cast(Array, union["x"]).shape[1]))
        weights = _tensor(union["edge_attr"]).squeeze(1)
        made.append(_split(x_LTD, _tensor(edges - np.repeat(ptr[:-1], counts)), weights, counts))
    return made


def _split(
    x_LTD: torch.Tensor, edge_index_2E: torch.Tensor, edge_attr_E: torch.Tensor | None, counts_L: Numbers
) -> list[object]:
    """The graph of each layer, from the concatenated edges of all layers."""
    make, sizes = _graph_type(), cast("list[int]", counts_L.tolist())
    edges = torch.split(edge_index_2E, sizes, dim=1)
    weights = [None] * len(sizes) if edge_attr_E is None else torch.split(edge_attr_E, sizes)
    return [make(x=x, edge_index=e, edge_attr=w) for x, e, w in zip(x_LTD.unbind(), edges, weights, strict=True)]


@cache
def _graph_type() -> Callable[..., object]:
    try:
        return cast("Callable[..., object]", import_module("torch_geometric.data").Data)
    except ImportError:
        return Graph


def _tensor(value: object) -> torch.Tensor:
    return cast(torch.Tensor, to_torch(value))


class PreprocessedDataset(Dataset[Item]):
    """Base of both datasets. Caches nothing: a trace is read, and its checksums verified, when it is accessed."""

    kind: ClassVar[Kind]

    def __new__(cls, *args: object, shuffle_buffer_size: int | None = None, **settings: object) -> Self:
        """DataLoader recognises an IterableDataset by its class, so the streaming form is a class of its own."""
        if shuffle_buffer_size is None or issubclass(cls, IterableDataset):
            return super().__new__(cls)
        return super().__new__(_STREAMS[cls])

    def __init__(  # pyright: ignore[reportInconsistentConstructor]
        self,
        preprocessed_dir: str | Path | Collection,
        batch_files_to_load: Sequence[str | Path] | None = None,
        *,
        max_cache_batches: int | None = None,
        shuffle_buffer_size: int | None = None,
        seed: int = 0,
    ) -> None:
        if max_cache_batches is not None and shuffle_buffer_size is not None:
            raise ValueError(
                "max_cache_batches is for the map-style form, shuffle_buffer_size for the streaming one; give only one"
            )
        if max_cache_batches is not None and max_cache_batches < 1:
            raise ValueError(f"max_cache_batches={max_cache_batches}: must be at least 1")
        if shuffle_buffer_size is not None and shuffle_buffer_size < 0:
            raise ValueError(f"shuffle_buffer_size={shuffle_buffer_size}: must be 0 (file order) or more (shuffle)")
        self.shuffle_buffer_size = shuffle_buffer_size
        self._seed = seed
        traces, self._scratch = open_preprocessed(preprocessed_dir, self.kind, batch_files_to_load)
        if QUESTION_ID not in traces.field_names:
            raise BadSource(f"the traces have no {QUESTION_ID!r}, only {', '.join(traces.field_names)}")
        self._maker: Maker = {"lstm": sequence_maker, "gnn": graph_maker}[self.kind](traces.field_names)
        self.traces: Collection = traces.within(READ_BYTES)
        self._begin()

    def __len__(self) -> int:
        return len(self.traces)

    def __getitem__(self, index: int) -> Item:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        if get_worker_info():
            _send_without_open_files()
        numbers = checked_indices(indices, len(self))
        parts = np.split(numbers, len(numbers)) if self._maker.one_by_one and len(numbers) else [numbers]
        return [item for part in parts for item in self._fetch(part)]

    @property
    def question_ids(self) -> list[str]:
        """The question ids of all traces, without reading the traces."""
        return [str(name) for name in self.traces.column(QUESTION_ID).to_pylist()]

    @property
    def labels(self) -> torch.Tensor:
        """The labels of all traces as float32 [traces], without reading the traces."""
        return torch.tensor(self.traces.column(LABEL).to_pylist(), dtype=torch.float32)

    def part(self, traces: Collection) -> Self:
        """The same dataset over other traces, such as a subset of `dataset.traces`."""
        twin = copy.copy(self)
        twin.traces = traces
        twin._begin()
        return twin

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} traces)"

    def _begin(self) -> None:
        """Set up the state of a stream."""

    def _fetch(self, numbers: Numbers) -> list[Item]:
        wanted = [*self._maker.fields, LABEL, QUESTION_ID]
        columns = cast("Mapping[str, object]", self.traces.fetch(numbers, wanted))
        inputs = self._maker.make(columns, self.traces.record_numbers(numbers))
        labels = torch.tensor(np.asarray(columns[LABEL]), dtype=torch.float32).unbind()
        ids = [str(name) for name in cast("Sequence[object]", columns[QUESTION_ID])]
        return list(zip(inputs, labels, ids, strict=True))


@cache
def _send_without_open_files() -> None:
    """In a worker: send tensors by name, not as open files.

    A batch of graphs is hundreds of tensors. If a process may not open that many files (`ulimit -n`), torch's thread
    that sends them fails, and the DataLoader waits for ever.
    """
    torch.multiprocessing.set_sharing_strategy("file_system")  # pyright: ignore


class PreprocessedLSTMDataset(PreprocessedDataset):
    """Traces as (sequence, label, question_id); a sequence [layer, dim] is the last token of every layer.

    `preprocessed_dir` is a folder with the old `preprocessed_*.pt` or `batch_*.pt` files, or the parent of such a
    folder named `lstm_solo`. The files are converted once, and again if they change, into the store `millstream-lstm`
    next to them, which takes as much disk space as they do. It can also be a trace store, either converted from such
    files or with `hidden` (or `hidden_states`) [layer, token, dim] and labels as `ms.labelled` accepts them; for other
    labels, pass the result of `ms.labelled`. `batch_files_to_load` selects the traces of some of the files.

    Without `shuffle_buffer_size` it is map-style. `max_cache_batches` is accepted as before but no longer matters: no
    file is held in memory, a trace is read when it is accessed. With `shuffle_buffer_size` it is an IterableDataset
    that splits its traces over DataLoader workers: 0 keeps the order of the files; any larger number gives an exact
    shuffle of all traces, without a buffer. Each pass has another order, which `set_epoch` selects; `seed` changes all
    of them. It does not split over GPUs: use `ms.Loader` for that.

    >>> train, val, test = train_val_test(PreprocessedLSTMDataset("preprocessed_data", shuffle_buffer_size=1000))
    >>> loader = DataLoader(train, batch_size=32, num_workers=num_workers_for(30))
    """

    kind = "lstm"


class PreprocessedGNNDataset(PreprocessedDataset):
    """Traces as (graphs, label, question_id), one graph per layer: `x`, `edge_index` and `edge_attr` of its tokens.

    Graphs are torch_geometric's Data or, without it, objects with these attributes and `num_nodes`. The old files are
    in `preprocessed_dir` or its folder `gnn`, and are converted into `millstream-gnn` next to them. From a trace store
    with `hidden` and `attention` (or `hidden_states` and `attentions`), graphs are built as in the old script: an edge
    from each token to itself and to every later token, weighted by attention averaged over heads. Everything else is
    as in PreprocessedLSTMDataset.

    >>> loader = DataLoader(PreprocessedGNNDataset("preprocessed_data"), collate_fn=collate_gnn_batch)
    """

    kind = "gnn"


class _Stream(PreprocessedDataset, IterableDataset[Item]):
    """The streaming form: traces in the order of an epoch, distributed over DataLoader workers round-robin."""

    def _begin(self) -> None:
        self._epochs = _Epochs()

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch in the next pass, in worker processes too."""
        self._epochs.set(epoch)

    def __iter__(self) -> Iterator[Item]:
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        # The epoch begins now, not when the first item is requested.
        epoch = self._epochs.begin(worker.seed - worker.id if worker else None)
        order = Order(len(self), self._seed, epoch, "exact" if self.shuffle_buffer_size else "none")
        return self._items(order, first, every)

    def _items(self, order: Order, first: int, every: int) -> Iterator[Item]:
        trace_bytes = self.traces.medium.num_bytes // max(len(self), 1)
        step = every * min(max(READ_BYTES // max(trace_bytes, 1), 1), READ_TRACES)
        for start in range(first, len(self), step):
            positions = np.arange(start, min(start + step, len(self)), every, dtype=np.int64)
            yield from self.__getitems__(cast("Sequence[int]", order[positions]))


class PreprocessedLSTMStream(_Stream, PreprocessedLSTMDataset):
    """The class of PreprocessedLSTMDataset(..., shuffle_buffer_size=...)."""


class PreprocessedGNNStream(_Stream, PreprocessedGNNDataset):
    """The class of PreprocessedGNNDataset(..., shuffle_buffer_size=...)."""


_STREAMS: dict[type, type] = {
    PreprocessedLSTMDataset: PreprocessedLSTMStream,
    PreprocessedGNNDataset: PreprocessedGNNStream,
}


class _Epochs:
    """The epoch of each pass over a stream. All workers of a DataLoader agree on it without communicating.

    An epoch that was set applies to the next pass only. Other passes of this process count up from it. Those of
    workers add the number of passes so far to the base seed of their DataLoader, which it draws whenever it starts
    workers.
    """

    def __init__(self) -> None:
        # The epoch that was set, and the pass it is for
        self._cell: torch.Tensor = torch.tensor([0, 0]).share_memory_()
        self._passes = 0  # passes started by this process or the one it was forked from
        self._epoch = -1

    def set(self, epoch: int) -> None:
        self._cell[0], self._cell[1] = epoch, _NO_PASS

    def begin(self, base_seed: int | None) -> int:
        self._passes += 1
        this_pass = ((base_seed or 0) + self._passes) % 2**63
        if int(self._cell[1]) == _NO_PASS:
            self._cell[1] = this_pass  # all workers write the same value
        if int(self._cell[1]) == this_pass:
            self._epoch = int(self._cell[0])
        else:
            self._epoch = self._epoch + 1 if base_seed is None else this_pass
        return self._epoch


AnyDataset = TypeVar("AnyDataset", bound=PreprocessedDataset)


def train_val_test(dataset: AnyDataset, *, seed: int = 0) -> tuple[AnyDataset, AnyDataset, AnyDataset]:
    """Split 70/15/15 by question into datasets of the same kind. Of streams, only the first is shuffled.

    A hash of question_id assigns each trace to a split: an LSTM and a GNN dataset get the same questions in each split
    whatever their files are, and questions added later do not move others.
    """
    shares = {"train": 0.7, "val": 0.15, "test": 0.15}
    parts = split(dataset.traces, shares, salt=str(seed) if seed else "")
    train, val, test = (dataset.part(traces) for traces in parts)
    if isinstance(dataset, IterableDataset):
        val.shuffle_buffer_size = test.shuffle_buffer_size = 0
    return train, val, test


def num_workers_for(files: int) -> int:
    """The number of DataLoader workers for this many files: at most one per core, and at most 4."""
    return min(files, available_cores(), MAX_WORKERS)
