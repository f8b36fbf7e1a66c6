"""Which bytes of a shard to read for a tensor, or for some layers of it, or one index of its second axis."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millstream.core.record import Bytes, Tensor
from millstream.traces.store.sidecar import Span, TensorColumn

Layers = int | np.integer | Sequence[int] | NDArray[np.integer] | None
_LAYERS = r"-?\d+(?:\s*,\s*-?\d+)*"
_PICK = re.compile(rf"(.+)\[\s*(?:({_LAYERS})|(?::|\[\s*({_LAYERS})\s*\])\s*,\s*(-?\d+))\s*\]")


@dataclass(frozen=True, slots=True)
class Taken:
    """The part of the bytes read that is wanted: the rows `picks` of the two outermost axes, of `sizes`."""

    sizes: tuple[int, int]
    picks: tuple[Sequence[int], Sequence[int]]

    def read_bytes(self, num_bytes: int) -> int:
        """How much is read for so much that is wanted."""
        return num_bytes // prod(map(len, self.picks)) * prod(self.sizes)

    def of(self, whole: Bytes) -> Bytes:
        outer, inner = self.picks
        rows = whole.reshape(*self.sizes, -1)
        some = rows[:, inner[0]] if len(outer) == self.sizes[0] and len(inner) == 1 else rows[np.ix_(outer, inner)]
        return some.reshape(-1)


@dataclass(frozen=True)
class Part:
    """What is wanted of tensors that are alike: kind and shape of the result, and which slices to read."""

    kind: Tensor
    shape: tuple[int, ...]
    slices: Sequence[int] | None  # None: all
    is_outer: bool  # whether `slices` are indices of the outermost of two axes that are cut
    taken: Taken | None

    @cached_property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.kind.itemsize

    def spans(self, column: TensorColumn, row: int) -> list[Span]:
        if self.slices is None:
            return column.whole(row)
        return column.outer(row, self.slices) if self.is_outer else column.spans(row, self.slices)


@dataclass(frozen=True)
class Pick:
    """What is wanted of a tensor: all of it, some layers, one index of the second axis, or both."""

    layers: Layers = None
    second: int | None = None
    _parts: "dict[tuple[object, ...], Part]" = field(default_factory=dict["tuple[object, ...]", "Part"], compare=False)

    @staticmethod
    def parse(name: str) -> "tuple[str, Pick] | None":
        """A field and what is wanted of it: `hidden[8,-1]`, `states[:, 2]` or `states[[8, -1], 2]`; None if all."""
        found = _PICK.fullmatch(name)
        if found is None:
            return None
        layers, second = found[2] or found[3], found[4]
        picks = None if layers is None else [int(layer) for layer in layers.split(",")]
        return found[1], Pick(picks, None if second is None else int(second))

    def share(self, column: TensorColumn, rows: NDArray[np.int64]) -> "float | NDArray[np.float64]":
        """The share of each tensor that is wanted."""
        share: float | NDArray[np.float64] = 1.0
        for axis, indices in self._indices(column.kind).items():
            share = share * len(indices) / np.maximum(column.axis(axis)[rows], 1)
        return share

    def part(self, kind: Tensor, shape: tuple[int, ...], num_slices: int) -> "Part":
        """What is wanted of a tensor of this shape; once for all tensors of a batch that are alike."""
        key = shape, num_slices, kind.sliced
        if key not in self._parts:
            self._parts[key] = self._part(kind, shape, num_slices)
        return self._parts[key]

    def _part(self, kind: Tensor, shape: tuple[int, ...], num_slices: int) -> "Part":
        wanted = self._indices(kind)
        if not wanted:
            return Part(kind, shape, None, True, None)
        for axis, indices in wanted.items():
            if wrong := [index for index in indices if not -shape[axis] <= index < shape[axis]]:
                raise IndexError(axis, shape[axis], wrong[0])
            wanted[axis] = [index % shape[axis] for index in indices]
        dropped = [*([0] if 0 in wanted and self._is_one else []), *([1] if self.second is not None else [])]
        result = tuple(len(wanted.get(axis, range(size))) for axis, size in enumerate(shape) if axis not in dropped)
        kept = kind.without(dropped)
        order = kind.order
        sizes = [*(shape[axis] for axis in order[:2]), 1][:2]
        outer, inner = (wanted.get(axis) for axis in [*order[:2], -1][:2])
        every = range(sizes[0])
        if len(kind.sliced) == 2 and num_slices == prod(sizes):
            if inner is None:
                return Part(kept, result, every if outer is None else outer, True, None)
            places = [place * sizes[1] + index for place in (every if outer is None else outer) for index in inner]
            return Part(kept, result, places, False, None)
        if num_slices == sizes[0] and outer is not None:
            taken = None if inner is None else Taken((len(outer), sizes[1]), (range(len(outer)), inner))
            return Part(kept, result, outer, False, taken)
        picks = (every if outer is None else outer, range(sizes[1]) if inner is None else inner)
        return Part(kept, result, None, False, Taken((sizes[0], sizes[1]), picks))

    @property
    def _is_one(self) -> bool:
        return isinstance(self.layers, int | np.integer)

    def _indices(self, kind: Tensor) -> dict[int, Sequence[int]]:
        """The indices wanted of axes that are not wanted whole."""
        found: dict[int, Sequence[int]] = {}
        if self.layers is not None and kind.axes[:1] == ("layer",):
            found[0] = [int(self.layers)] if isinstance(self.layers, int | np.integer) else list(map(int, self.layers))
        if self.second is not None:
            found[1] = [self.second]
        return found


WHOLE = Pick()


class Plan(NamedTuple):
    """What to read for one tensor, or some of it. (Several are made per record: a dataclass takes twice as long.)"""

    row: int
    name: str
    kind: Tensor  # of the result
    shape: tuple[int, ...]  # of the result
    num_bytes: int  # of the result
    spans: list[Span]
    taken: Taken | None  # None: all that is read


def plan_of(column: TensorColumn, row: int, name: str, pick: Pick = WHOLE) -> Plan | None:
    """How to read a tensor; None if it is None. IndexError (axis, size, index) for an index that it does not have."""
    shape = column.shape(row)
    if shape is None:
        return None
    if pick is WHOLE:
        return Plan(row, name, column.kind, shape, int(column.num_bytes[row]), column.whole(row), None)
    part = pick.part(column.kind, shape, column.num_slices(row))
    return Plan(row, name, part.kind, part.shape, part.num_bytes, part.spans(column, row), part.taken)
