"""Reads as DataLoader gets them: the items of a batch, and the batch that the default collation makes of them."""

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate, get_worker_info  # pyright: ignore

from millstream.core.torch_data import default_collate_fn_map  # pyright: ignore
from millstream.reads.tokenizers.kmers import Ids, Numbers

as_tensor = cast("Callable[[NDArray[np.generic]], torch.Tensor]", torch.from_numpy)  # pyright: ignore


class Rows(NamedTuple):
    """Some reads, one row each: tokens followed by padding, 1 where there is a token, and the labels and ids."""

    ids: Ids
    mask: Ids
    columns: Numbers  # one column per name in `names`


Item = dict[str, torch.Tensor | int]


class ReadItem(UserDict[str, torch.Tensor | int]):
    """One read of a batch: a dict that is made when something looks into it.

    DataLoader's default collation only looks at its type, and makes a batch of the rows that the items come from.
    """

    def __init__(self, items: "ReadItems", index: int) -> None:
        self._items, self._index = items, index  # and no `data` yet

    @cached_property
    def data(self) -> Item:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._items.item(self._index)

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (self.data,)

    def __copy__(self) -> Item:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dict(self.data)

    def __or__(self, other: Mapping[str, torch.Tensor | int]) -> Item:  # pyright: ignore
        return {**self.data, **other}


class ReadItems(Sequence[ReadItem]):
    """The items of one batch, made when they are accessed: views of its rows."""

    def __init__(self, rows: Rows, names: Sequence[str]) -> None:
        self.names, self.rows = names, rows

    def __len__(self) -> int:
        return len(self.rows.columns)

    @overload
    def __getitem__(self, index: int) -> ReadItem: ...
    @overload
    def __getitem__(self, index: slice) -> list[ReadItem]: ...
    def __getitem__(self, index: int | slice) -> ReadItem | list[ReadItem]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        size = len(self.rows.columns)
        if not -size <= index < size:
            raise IndexError(f"item {index} of {size}")
        return ReadItem(self, index)

    def item(self, index: int) -> Item:
        """One item: views of its row."""
        ids, mask, columns = self.rows
        item: Item = {
            "input_ids": as_tensor(ids[index]),
            "attention_mask": as_tensor(mask[index]),
            "labels": as_tensor(columns[index, 0, ...]),
        }
        item.update(zip(self.names[1:], columns[index, 1:].tolist(), strict=True))
        return item


class SentBatch:
    """A batch on its way from a worker: pickled as plain bytes.

    torch sends each tensor as a file in shared memory; a batch of one read has five, and is small.
    """

    def __init__(self, items: ReadItems) -> None:
        self._items = items

    def __reduce__(self) -> tuple[object, ...]:
        return _batch, (*self._items.rows, self._items.names)


def _batch(ids: Ids, mask: Ids, columns: Numbers, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """What the default collation makes of the items of these rows."""
    batch = {"input_ids": as_tensor(ids), "attention_mask": as_tensor(mask)}
    by_name = columns.T if len(columns) == 1 else columns.T.copy()
    for name, values in zip(names, by_name, strict=True):
        batch[name] = as_tensor(values)
    return batch


def _collate(items: Sequence[ReadItem], *, collate_fn_map: object = None) -> object:
    if not isinstance(items, ReadItems):
        return default_collate([item.data for item in items])
    return SentBatch(items) if get_worker_info() else _batch(*items.rows, items.names)


cast("dict[type, Callable[..., object]]", default_collate_fn_map)[ReadItem] = _collate
