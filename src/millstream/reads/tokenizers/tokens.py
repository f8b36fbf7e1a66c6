"""What every tokenizer returns: a rectangle of ids and its mask. Knows padding; knows nothing of bases.

A batch of reads is `flat` (the bases of all reads, one after another) and `offsets`, one more than reads: read i is
flat[offsets[i]:offsets[i + 1]].
"""

from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from millstream.core.kernels import kernel

Bases = NDArray[np.uint8]
Numbers = NDArray[np.int64]
Ids = NDArray[np.int32 | np.int64]
IdType = type[np.int32 | np.int64]
Pad = Literal["longest", "max_length"]


class Tokens(NamedTuple):
    """One row per read, padded on the right; the mask is 1 on tokens and 0 on padding, with the dtype of the ids."""

    input_ids: Ids
    attention_mask: Ids


class Tokenizer(Protocol):
    """Reads in, token ids out. Must be thread-safe, and small to pickle for a spawned worker."""

    @property
    def name(self) -> str:
        """The name of this tokenizer in a configuration: `tokenizer(name)` makes it again."""
        ...

    @property
    def vocab_size(self) -> int:
        """The largest id plus one: the number of rows of an embedding."""
        ...

    @property
    def pad_id(self) -> int: ...

    def tokenize(
        self,
        flat: Bases,
        offsets: Numbers,
        *,
        max_length: int | None = None,
        pad: Pad = "longest",
        dtype: IdType = np.int32,
    ) -> Tokens:
        """The tokens of every read, truncated to `max_length` (special tokens included) and padded to one width."""
        ...


def frozen(flat: Bases, offsets: Numbers) -> tuple[Bases, Numbers]:
    """The batch as read-only arrays: numba would compile again for writable ones."""
    views = np.ascontiguousarray(flat, np.uint8).view(), np.ascontiguousarray(offsets, np.int64).view()
    for view in views:
        view.flags.writeable = False
    return views


def width_of(counts: Numbers, *, max_length: int | None, pad: Pad) -> int:
    """The number of columns for reads with these numbers of tokens."""
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length={max_length}: must be at least 1; leave it out to truncate nothing")
    if pad == "max_length":
        if max_length is None:
            raise ValueError('pad="max_length" needs a max_length; pad="longest" does not')
        return max_length
    longest = int(counts.max()) if counts.size else 0
    return longest if max_length is None else min(longest, max_length)


def rectangle(num_reads: int, width: int, *, dtype: IdType) -> Tokens:
    """Ids and mask, uninitialised, in one allocation: numpy requests huge pages from 4 MB on."""
    ids, mask = np.empty((2, num_reads, width), dtype)
    return Tokens(ids, mask)


def pad_rows(tokens: NDArray[np.int32], starts: Numbers, counts: Numbers, *, width: int, pad_id: int) -> Tokens:
    """Flat tokens, `counts[i]` from `starts[i]` on, as the rows of a rectangle."""
    rows = rectangle(counts.size, width, dtype=np.int32)
    _pad_rows(tokens, starts, counts, pad_id, rows.input_ids, rows.attention_mask)
    return rows


@kernel
def _pad_rows(
    tokens: NDArray[np.int32],
    starts: Numbers,
    counts: Numbers,
    pad_id: int,
    ids: Ids,
    mask: Ids,
) -> None:
    width = ids.shape[1]
    for row in range(counts.size):
        start, count = starts[row], min(counts[row], width)
        for column in range(count):
            ids[row, column] = tokens[start + column]
            mask[row, column] = 1
        for column in range(count, width):
            ids[row, column] = pad_id
            mask[row, column] = 0
