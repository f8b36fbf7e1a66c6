"""Arrays of different shapes -> one rectangle and a mask of what is real."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from millstream.buffers import empty
from millstream.records import Array

if TYPE_CHECKING:
    import torch


def stack(arrays: "Sequence[Array | torch.Tensor]") -> "tuple[Array | torch.Tensor, NDArray[np.bool_] | None]":
    """One array with a new first axis, zeros after the end of what is shorter.

    The mask is True where there is data; it has the batch axis and the axes that differ, and is None if none does.
    """
    if hasattr(arrays[0], "__torch_function__"):  # often of a dtype numpy lacks: as bits of its size
        import torch

        tensors = cast("Sequence[torch.Tensor]", arrays)
        bits = {1: torch.uint8, 2: torch.uint16, 4: torch.int32, 8: torch.int64}[tensors[0].itemsize]
        whole, mask = stack([cast(Array, tensor.view(bits).numpy()) for tensor in tensors])
        back = torch.from_numpy(cast("NDArray[np.uint8]", whole))  # pyright: ignore[reportUnknownMemberType]
        return back.view(tensors[0].dtype), mask
    rows = cast("Sequence[Array]", arrays)
    if len({(row.ndim, row.dtype) for row in rows}) > 1:
        found = ", ".join(sorted({f"{row.dtype} of {row.ndim} axes" for row in rows}))
        raise ValueError(f"arrays of one dtype and as many axes can be stacked, found {found}")
    shapes = np.array([row.shape for row in rows], np.int64).reshape(len(rows), rows[0].ndim)
    sizes = shapes.max(axis=0, initial=0)
    ragged = np.flatnonzero((shapes != sizes).any(axis=0)).tolist()
    out = empty((len(rows), *sizes.tolist()), rows[0].dtype)
    for place, row in enumerate(rows):
        out[(place, *map(slice, row.shape))] = row
        for axis in ragged:  # what lies past the end on this axis
            out[(place, *(slice(None),) * axis, slice(row.shape[axis], None))] = 0
    if not ragged:
        return out, None
    mask = np.ones((len(rows), *sizes[ragged].tolist()), np.bool_)
    for place, axis in enumerate(ragged):
        inside: NDArray[np.bool_] = np.arange(int(sizes[axis]))[None, :] < shapes[:, axis : axis + 1]
        mask &= inside.reshape(len(rows), *(-1 if other == place else 1 for other in range(len(ragged))))
    return out, mask
