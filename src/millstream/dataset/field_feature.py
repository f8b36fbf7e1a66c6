"""Fields as they are, and what a function of the user's makes of each record."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from millstream.buffers import empty
from millstream.dataset.batch import Batch
from millstream.dataset.padding import stack
from millstream.dataset.permutation import mix
from millstream.records import Array, Bytes
from millstream.store.read_batch import ReadBatch

if TYPE_CHECKING:
    import torch

Transform = Callable[[dict[str, object], np.random.Generator], Mapping[str, object]]


@dataclass(frozen=True)
class FieldFeature:
    """Fields of records as they are stored. Made by `ms.features.fields`."""

    fields: tuple[str, ...] | None
    pad: bool

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        """Numbers as arrays, texts as lists, tensors stacked (and padded, with a mask) or a list."""
        out: dict[str, object] = {}
        for name, values in batch.columns.items():
            out |= collate(name, values, pad=self.pad, numbers=batch.numbers)
        if isinstance(batch, ReadBatch) and (self.fields is None or "sequence" in self.fields):
            out |= letters("sequence", batch.flat, batch.offsets)
        if isinstance(batch, ReadBatch) and batch.quality is not None:
            out |= letters("quality", batch.quality, batch.offsets)
        return out


@dataclass(frozen=True)
class EachFeature:
    """What a function makes of each record. Made by `ms.features.each`."""

    transform: Transform
    fields: tuple[str, ...] | None
    pad: bool

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        columns: dict[str, Sequence[object]] = {name: cast("Sequence[object]", v) for name, v in batch.columns.items()}
        if isinstance(batch, ReadBatch):
            columns["sequence"] = batch.sequences()
        made: list[Mapping[str, object]] = []
        for row, number in enumerate(batch.numbers.tolist()):
            record = {name: values[row] for name, values in columns.items()}
            made.append(self.transform(record, np.random.Generator(np.random.Philox(mix(seed, epoch, number)))))
        out: dict[str, object] = {}
        for name in made[0] if made else ():
            out |= collate(name, [record[name] for record in made], pad=self.pad, numbers=batch.numbers)
        return out


def collate(name: str, values: object, *, pad: bool, numbers: NDArray[np.int64]) -> dict[str, object]:
    """One column of a batch, and `<name>_mask` where it had to be padded."""
    if not isinstance(values, list):
        return {name: values}
    rows = cast("list[object]", values)
    kinds = {_kind(value) for value in rows}
    if "array" in kinds:
        if None in kinds:
            first = next(place for place, value in enumerate(rows) if value is None)
            raise ValueError(f"record {numbers[first]} has no {name!r}; take a subset of the records that have one")
        if not pad:
            return {name: rows}
        whole, mask = stack(cast("Sequence[Array | torch.Tensor]", rows))
        return {name: whole} if mask is None else {name: whole, f"{name}_mask": mask}
    return {name: np.array(rows) if kinds == {"number"} else rows}


def letters(name: str, flat: Bytes, offsets: NDArray[np.int64]) -> dict[str, object]:
    """Letters of reads as bytes, a row a read; zeros and a mask where they differ in length."""
    lengths = np.diff(offsets)
    width = int(lengths.max(initial=0))
    if (lengths == width).all():
        return {name: flat[: len(lengths) * width].reshape(len(lengths), width)}
    out = empty((len(lengths), width), np.uint8)
    mask = np.arange(width) < lengths[:, None]
    out[~mask] = 0
    out[mask] = flat[: int(offsets[-1])]
    return {name: out, f"{name}_mask": mask}


def _kind(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, np.ndarray) or hasattr(value, "__torch_function__"):
        return "array"
    return "number" if isinstance(value, bool | int | float | np.generic) else "other"
