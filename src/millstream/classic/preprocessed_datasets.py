"""The training datasets of the old scripts, map-style and streamed, for torch's DataLoader.

An item is a tuple of what the model sees, the label (a float tensor without axes) and the question_id.
"""

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import millstream as ms
from millstream.classic.preprocessed_store import Kind, open_preprocessed
from millstream.classic.trace_items import Maker, graph_maker, sequence_maker
from millstream.collection import Collection, Numbers
from millstream.dataset.labels import LABEL
from millstream.errors import BadSource
from millstream.store.recover import ID_FIELD

MAX_WORKERS = 4
READ_BYTES, READ_TRACES = 8 << 20, 64  # what a stream fetches at once
_NO_LOOP = -1

Item = tuple[object, torch.Tensor, str]


class PreprocessedDataset(Dataset[Item]):
    """What both datasets are. Nothing is kept: a trace is read, and checked, when it is asked for."""

    kind: ClassVar[Kind]

    def __new__(cls, *args: object, shuffle_buffer_size: int | None = None, **settings: object) -> Self:
        """DataLoader tells an IterableDataset by its class, so the streamed form is one of its own."""
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
            raise ValueError("max_cache_batches is of the map-style form and shuffle_buffer_size of the streamed one")
        if max_cache_batches is not None and max_cache_batches < 1:
            raise ValueError(f"max_cache_batches={max_cache_batches}: at least 1")
        if shuffle_buffer_size is not None and shuffle_buffer_size < 0:
            raise ValueError(f"shuffle_buffer_size={shuffle_buffer_size}: 0 for the order of the files, or more")
        self.shuffle_buffer_size = shuffle_buffer_size
        self._seed = seed
        traces, self._scratch = open_preprocessed(preprocessed_dir, self.kind, batch_files_to_load)
        if ID_FIELD not in traces.field_names:
            raise BadSource(f"the traces have no {ID_FIELD!r}, only {', '.join(traces.field_names)}")
        self._maker: Maker = {"lstm": sequence_maker, "gnn": graph_maker}[self.kind](traces.field_names)
        self.traces: Collection = traces.within(READ_BYTES)
        self._begin()

    def __len__(self) -> int:
        return len(self.traces)

    def __getitem__(self, index: int) -> Item:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        numbers = np.array([int(index) for index in indices], np.int64)
        wrong = numbers[(numbers < -len(self)) | (numbers >= len(self))]
        if len(wrong):
            raise IndexError(f"trace {wrong[0]} of a dataset of {len(self)}")
        numbers %= max(len(self), 1)
        parts = np.split(numbers, len(numbers)) if self._maker.one_by_one and len(numbers) else [numbers]
        return [item for part in parts for item in self._fetch(part)]

    @property
    def question_ids(self) -> list[str]:
        """Of all traces, without reading them."""
        return [str(name) for name in self.traces.column(ID_FIELD).to_pylist()]

    @property
    def labels(self) -> torch.Tensor:
        """Of all traces, without reading them: float32 [traces]."""
        return torch.tensor(self.traces.column(LABEL).to_pylist(), dtype=torch.float32)

    def part(self, traces: Collection) -> Self:
        """The same dataset of other traces, as of some of `dataset.traces`."""
        twin = copy.copy(self)
        twin.traces = traces
        twin._begin()
        return twin

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} traces)"

    def _begin(self) -> None:
        """What a stream begins with."""

    def _fetch(self, numbers: Numbers) -> list[Item]:
        wanted = [*self._maker.fields, LABEL, ID_FIELD]
        columns = cast("Mapping[str, object]", self.traces.fetch(numbers, wanted))
        seen = self._maker(columns, self.traces.record_numbers(numbers))
        labels = torch.tensor(np.asarray(columns[LABEL]), dtype=torch.float32).unbind()
        ids = [str(name) for name in cast("Sequence[object]", columns[ID_FIELD])]
        return list(zip(seen, labels, ids, strict=True))


class PreprocessedLSTMDataset(PreprocessedDataset):
    """Traces as (sequence, label, question_id); a sequence [layer, dim] is the last token of every layer.

    `preprocessed_dir` is a folder with the old `preprocessed_*.pt` or `batch_*.pt` files, or one with such a folder
    `lstm_solo`. They are converted once, and again when they have changed, into the store `millstream-lstm` beside
    them, which takes as much space as they do. Or it is a trace store: of such files, or with `hidden` (or
    `hidden_states`) [layer, token, dim] and labels, as `ms.labelled` takes them; for other labels, it is what
    `ms.labelled` gave. `batch_files_to_load` leaves only the traces of some of the files.

    Without `shuffle_buffer_size` it is map-style. `max_cache_batches` is accepted as before, and needs no thought any
    more: no file is ever held, a trace is read when it is asked for. With `shuffle_buffer_size` it is an
    IterableDataset that splits its traces over DataLoader workers: 0 for the order of the files; more, whatever the
    number, for an exact shuffle of all traces, which takes no buffer. Each loop has another order, and `set_epoch`
    chooses it; `seed` changes all of them. It knows nothing of other GPUs' processes: for these, there is `ms.Loader`.

    >>> train, val, test = train_val_test(PreprocessedLSTMDataset("preprocessed_data", shuffle_buffer_size=1000))
    >>> loader = DataLoader(train, batch_size=32, num_workers=num_workers_for(30))
    """

    kind = "lstm"


class PreprocessedGNNDataset(PreprocessedDataset):
    """Traces as (graphs, label, question_id), one graph a layer: `x`, `edge_index` and `edge_attr` of its tokens.

    Graphs are torch_geometric's Data, or without it objects with these attributes and `num_nodes`. The old files lie in
    `preprocessed_dir` or its folder `gnn`, and are converted into `millstream-gnn` beside them. Of a trace store with
    `hidden` and `attention` (or `hidden_states` and `attentions`), graphs are as the old script made them: an edge from
    each token to itself and to every later one, weighted by attention, the mean over heads. All else is as in
    PreprocessedLSTMDataset.

    >>> loader = DataLoader(PreprocessedGNNDataset("preprocessed_data"), collate_fn=collate_gnn_batch)
    """

    kind = "gnn"


class _Stream(PreprocessedDataset, IterableDataset[Item]):
    """The streamed form: traces in the order of an epoch, dealt out to DataLoader workers one by one."""

    def _begin(self) -> None:
        self._epochs = _Epochs()

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop have the order of this epoch, also in worker processes."""
        self._epochs.set(epoch)

    def __iter__(self) -> Iterator[Item]:
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        epoch = self._epochs.begin(worker.seed - worker.id if worker else None)  # now, not when the first item is due
        order = ms.Order(len(self), self._seed, epoch, "exact" if self.shuffle_buffer_size else "none")
        return self._loop(order, first, every)

    def _loop(self, order: ms.Order, first: int, every: int) -> Iterator[Item]:
        trace_bytes = self.traces.medium.num_bytes // max(len(self), 1)
        step = every * min(max(READ_BYTES // max(trace_bytes, 1), 1), READ_TRACES)
        for start in range(first, len(self), step):
            positions = np.arange(start, min(start + step, len(self)), every, dtype=np.int64)
            yield from self.__getitems__(cast("Sequence[int]", order[positions]))


class PreprocessedLSTMStream(_Stream, PreprocessedLSTMDataset):
    """What PreprocessedLSTMDataset(..., shuffle_buffer_size=...) is."""


class PreprocessedGNNStream(_Stream, PreprocessedGNNDataset):
    """What PreprocessedGNNDataset(..., shuffle_buffer_size=...) is."""


_STREAMS: dict[type, type] = {
    PreprocessedLSTMDataset: PreprocessedLSTMStream,
    PreprocessedGNNDataset: PreprocessedGNNStream,
}


class _Epochs:
    """Which epoch a loop is. All workers of a DataLoader are in the same, without speaking to each other.

    An epoch that was set is for the one loop that begins next. Other loops of this process take the next number. Those
    of workers take the base seed of their DataLoader, which it draws anew whenever it starts workers, and how often
    they have begun since.
    """

    def __init__(self) -> None:
        self._cell: torch.Tensor = torch.tensor([0, 0]).share_memory_()  # the epoch set, and the loop it is for
        self._loops = 0  # begun by this process, or by the one it was forked from
        self._epoch = -1

    def set(self, epoch: int) -> None:
        self._cell[0], self._cell[1] = epoch, _NO_LOOP

    def begin(self, base_seed: int | None) -> int:
        self._loops += 1
        loop = ((base_seed or 0) + self._loops) % 2**63
        if int(self._cell[1]) == _NO_LOOP:
            self._cell[1] = loop  # several workers write the same
        if int(self._cell[1]) == loop:
            self._epoch = int(self._cell[0])
        else:
            self._epoch = self._epoch + 1 if base_seed is None else loop
        return self._epoch


AnyDataset = TypeVar("AnyDataset", bound=PreprocessedDataset)


def train_val_test(dataset: AnyDataset, *, seed: int = 0) -> tuple[AnyDataset, AnyDataset, AnyDataset]:
    """70, 15 and 15 of 100 questions, as datasets of the same kind. Of streams, only the first is shuffled.

    A hash of its question_id decides where a trace goes: the same questions are in the same part of an LSTM and of a
    GNN dataset, however they lie in files, and questions added later move no other.
    """
    shares = {"train": 0.7, "val": 0.15, "test": 0.15}
    parts = ms.split(dataset.traces, shares, salt=str(seed) if seed else "")
    train, val, test = (dataset.part(traces) for traces in parts)
    if isinstance(dataset, IterableDataset):
        val.shuffle_buffer_size = test.shuffle_buffer_size = 0
    return train, val, test


def num_workers_for(files: int) -> int:
    """How many DataLoader workers so many files are worth: no more than there are cores, and at most 4."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(files, cores, MAX_WORKERS)
