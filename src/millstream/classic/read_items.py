"""Reads as DataLoader gets them: the items of a batch, and the batch that the default collation makes of them."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate, get_worker_info  # pyright: ignore

from millstream.core.torch_data import default_collate_fn_map  # pyright: ignore
from millstream.reads.tokenizers.kmers import Numbers

Compact = NDArray[np.int16 | np.int32 | np.int64]


class Rows(NamedTuple):
    """Some reads, one row each: row i of `ids` is `counts[i]` tokens followed by padding."""

    ids: Compact
    counts: Numbers
    columns: Numbers  # one column per name in `names`

    def take(self, places: Numbers) -> "Rows":
        return Rows(self.ids[places], self.counts[places], self.columns[places])


class ReadItem(dict[str, "torch.Tensor | int"]):
    """One read. DataLoader's default collation makes a batch of the rows that the items of a batch come from."""


class ReadItems(Sequence[ReadItem]):
    """The items of one batch, made when they are accessed: views of its rows."""

    def __init__(self, rows: Rows, names: Sequence[str]) -> None:
        self.names = names
        self.arrays = rows.ids, mask_of(rows), rows.columns

    def __len__(self) -> int:
        return len(self.arrays[2])

    @overload
    def __getitem__(self, index: int) -> ReadItem: ...
    @overload
    def __getitem__(self, index: slice) -> list[ReadItem]: ...
    def __getitem__(self, index: int | slice) -> ReadItem | list[ReadItem]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        ids, mask, columns = (array[index] for array in self.arrays)
        item = ReadItem(zip(self.names[1:], columns[1:].tolist(), strict=True))
        return ReadItem(input_ids=as_tensor(ids), attention_mask=as_tensor(mask), labels=as_tensor(columns)[0], **item)


class SentBatch:
    """A batch on its way from a worker: pickled as plain bytes.

    torch sends each tensor as a file in shared memory; a batch of one read has five, and is small.
    """

    def __init__(self, items: ReadItems) -> None:
        self._items = items

    def __reduce__(self) -> tuple[object, ...]:
        return _batch, (*self._items.arrays, self._items.names)


def _batch(ids: Compact, mask: Compact, columns: Numbers, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """What the default collation makes of the items of these rows."""
    batch = {"input_ids": as_tensor(ids), "attention_mask": as_tensor(mask)}
    batch.update(zip(names, as_tensor(columns.T.copy()).unbind(), strict=True))
    return batch


def _collate(items: Sequence[ReadItem], *, collate_fn_map: object = None) -> object:
    if not isinstance(items, ReadItems):
        return default_collate([dict(item) for item in items])
    return SentBatch(items) if get_worker_info() else _batch(*items.arrays, items.names)


cast("dict[type, Callable[..., object]]", default_collate_fn_map)[ReadItem] = _collate


def mask_of(rows: Rows) -> Numbers:
    """1 where an id is a token, 0 where it is padding."""
    return (_places(rows.ids.shape[1]) < rows.counts[:, None]).astype(np.int64)


@cache
def _places(width: int) -> Numbers:
    return np.arange(width, dtype=np.int64)


def as_tensor(array: Compact) -> torch.Tensor:
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
