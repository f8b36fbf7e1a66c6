"""Rows of token ids and labels, by record number: what the datasets of reads are made of."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from millstream.dataset.tokens import Numbers

Compact = NDArray[np.int16 | np.int32 | np.int64]
CompactType = type[np.int16 | np.int32 | np.int64]


class Rows(NamedTuple):
    """Some reads, one row each: row i of `ids` is `counts[i]` tokens, and padding after them."""

    ids: Compact
    counts: Numbers
    columns: Numbers  # one column for each of the source's `names`

    def take(self, places: Numbers) -> "Rows":
        return Rows(self.ids[places], self.counts[places], self.columns[places])


class RowSource(Protocol):
    """Rows by record number. `names` are what the columns hold: `labels`, and ids that the headers have."""

    @property
    def names(self) -> tuple[str, ...]: ...
    def __len__(self) -> int: ...
    def fetch(self, numbers: Numbers) -> Rows: ...


def mask_of(rows: Rows) -> NDArray[np.bool_]:
    """Which ids are tokens, not padding."""
    return np.arange(rows.ids.shape[1], dtype=np.int64) < rows.counts[:, None]


def smallest(largest_id: int) -> CompactType:
    """The smallest type that holds ids up to this one."""
    return next(kind for kind in (np.int16, np.int32, np.int64) if largest_id <= np.iinfo(kind).max)
