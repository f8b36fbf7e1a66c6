"""One sealed shard, open for reading: views of its mapped bytes at the sidecar's offsets, checked as they are read."""

from collections.abc import Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from millstream.errors import CorruptRecord, CorruptShard
from millstream.records import Array, Bytes, Tensor, from_bytes
from millstream.store.layout import ShardInfo, shard_name
from millstream.store.maps import Map
from millstream.store.message import TensorRow, head_holds
from millstream.store.recover import ID_FIELD
from millstream.store.slices import crc32c, unpack
from millstream.store.table import load_sidecar

if TYPE_CHECKING:
    import torch

Layers = int | Sequence[int] | None
Span = tuple[int, int, int]  # offset, stored bytes, CRC-32C


class OpenShard:
    """Reads records of one shard by row. Holds no file descriptor."""

    def __init__(self, path: Path, info: ShardInfo, *, first: int, verify: bool) -> None:
        self._path = path
        self._file = path / shard_name(info.number)
        self._first = first  # the record number of row 0, for messages
        self._verify = verify
        self.sidecar = load_sidecar(path, info)
        if self.sidecar.num_records != info.records:
            raise CorruptShard(
                f"{self._file}: {info.records} records in the manifest, {self.sidecar.num_records} in its sidecar. "
                f"Run: millstream repair {path}"
            )

    @cached_property
    def _map(self) -> Map:
        try:
            return Map(self._file)
        except FileNotFoundError:
            raise CorruptShard(f"{self._file}: missing. See: millstream verify {self._path}") from None

    def value(self, row: int, name: str) -> object:
        """One scalar."""
        return self.sidecar.column(name)[row].as_py()

    def place(self, row: int, name: str) -> TensorRow | None:
        """Where a tensor lies; None for None."""
        places = self.sidecar.tensor(name)
        return places.row(row) if places else None

    def record(self, row: int) -> "dict[str, object]":
        """The whole record, its frame and every tensor checked; tensors are views of the mapped file."""
        found = self.sidecar.row(row)
        if self._verify and not head_holds(self._map.view, found, self.sidecar.schema):
            self._corrupt(row, "the record's frame", "CRC-32C, or the file ends before it")
        values: dict[str, object] = {**found.values}
        for name, place in found.tensors.items():
            values[name] = None if place is None else self.tensor(row, name, place)
        return values

    def will_need_record(self, row: int) -> None:
        """Start reading a whole record."""
        self._advise(*self.sidecar.extent(row))

    def will_need(self, name: str, place: TensorRow | None, layers: Layers) -> None:
        """Start reading what `tensor` will want."""
        if place is not None:
            for offset, size in _ranges(self._spans(name, place, self._picks(name, place, layers))):
                self._advise(offset, size)

    def _advise(self, offset: int, num_bytes: int) -> None:
        self._map.will_need(offset, max(0, min(num_bytes, self._map.num_bytes - offset)))

    def shape(self, name: str, place: TensorRow, layers: Layers) -> tuple[int, ...]:
        """The shape `tensor` will give."""
        picks = self._picks(name, place, layers)
        if picks is None:
            return place.shape
        return place.shape[1:] if isinstance(layers, int) else (len(picks), *place.shape[1:])

    def tensor(self, row: int, name: str, place: TensorRow, layers: Layers = None) -> "Array | torch.Tensor":
        """The tensor, or some of its layers: a view of the mapped file wherever the bytes lie side by side."""
        kind = self._kind(name)
        shape = self.shape(name, place, layers)
        picks = self._picks(name, place, layers)
        spans = self._spans(name, place, picks)
        if self.sidecar.compression == "none" and len(_ranges(spans)) == 1:
            data = self._stored(row, name, spans)
            if picks is not None and len(place.crc32c) == 1:
                data = data.reshape(place.shape[0], -1)[picks].reshape(-1)
        else:
            data = np.empty(prod(shape) * kind.itemsize, np.uint8)
            self.copy(row, name, place, layers, data)
        return from_bytes(kind, shape, data)

    def copy(self, row: int, name: str, place: TensorRow, layers: Layers, out: Bytes) -> None:
        """The tensor's (or its layers') raw bytes into `out`, checked."""
        itemsize, compression = self._kind(name).itemsize, self.sidecar.compression
        picks = self._picks(name, place, layers)
        if picks is not None and len(place.crc32c) == 1:  # too small to be cut: take the layers out of the whole
            whole = np.empty(prod(place.shape) * itemsize, np.uint8)
            self.copy(row, name, place, None, whole)
            out[:] = whole.reshape(place.shape[0], -1)[picks].reshape(-1)
            return
        spans = self._spans(name, place, picks)
        if not out.size:
            return
        for part, span in zip(out.reshape(len(spans), -1), spans, strict=True):
            offset, size, crc = span
            if compression != "none":
                unpack(self._stored(row, name, [span]), part, itemsize, compression)
                continue
            self._check_end(row, name, offset + size)
            part[:] = self._map.view[offset : offset + size]
            if self._verify and crc32c(part) != crc:  # over the copy: it is in the cache
                part[:] = self._stored(row, name, [span])

    def _stored(self, row: int, name: str, spans: Sequence[Span]) -> Bytes:
        """The stored bytes of neighbouring slices, as a view of the map."""
        start, end = spans[0][0], spans[-1][0] + spans[-1][1]
        self._check_end(row, name, end)
        view = self._map.view[start:end]
        if not self._verify or _first_bad(view, spans) is None:
            return view
        # A view handed out earlier may have been written to, which changes this process's copy of the page only.
        fresh = np.empty(end - start, np.uint8)
        with open(self._file, "rb") as f:
            f.seek(start)
            f.readinto(fresh.data)
        bad = _first_bad(fresh, spans)
        if bad is not None:
            self._corrupt(row, f"field {name!r}", f"CRC-32C of the slice at byte {spans[bad][0]}")
        return fresh

    def _check_end(self, row: int, name: str, end: int) -> None:
        if end > self._map.num_bytes:
            what = f"the file ends at byte {self._map.num_bytes}, expected {end} or more"
            self._corrupt(row, f"field {name!r}", what)

    def _corrupt(self, row: int, where: str, what: str) -> None:
        key = f", {ID_FIELD} {self.value(row, ID_FIELD)!r}" if ID_FIELD in self.sidecar.schema else ""
        raise CorruptRecord(
            f"{self._file}: record {self._first + row} (row {row}{key}), {where}: damaged ({what}). "
            f"The other records still read; set it aside with: millstream repair {self._path}"
        )

    def _kind(self, name: str) -> Tensor:
        kind = self.sidecar.schema[name]
        assert isinstance(kind, Tensor)
        return kind

    def _picks(self, name: str, place: TensorRow, layers: Layers) -> list[int] | None:
        """Layer numbers counted from 0; None for all, also for a field that has no layers."""
        if layers is None or self._kind(name).axes[:1] != ("layer",):
            return None
        count = place.shape[0]
        picks = [layers] if isinstance(layers, int) else list(layers)
        if any(not -count <= pick < count for pick in picks):
            raise IndexError(f"{self._file}: field {name!r} has {count} layers, asked for {picks}")
        return [pick % count for pick in picks]

    def _spans(self, name: str, place: TensorRow, picks: list[int] | None) -> list[Span]:
        spans = [(*s, crc) for s, crc in zip(place.spans(self._kind(name).itemsize), place.crc32c, strict=True)]
        return spans if picks is None or len(spans) == 1 else [spans[pick] for pick in picks]


def _ranges(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """(offset, bytes) with neighbouring spans taken together."""
    ranges: list[tuple[int, int]] = []
    for offset, size, _ in spans:
        if ranges and sum(ranges[-1]) == offset:
            ranges[-1] = ranges[-1][0], ranges[-1][1] + size
        else:
            ranges.append((offset, size))
    return ranges


def _first_bad(data: Bytes, spans: Sequence[Span]) -> int | None:
    start = spans[0][0]
    for index, (offset, size, crc) in enumerate(spans):
        if crc32c(data[offset - start : offset - start + size]) != crc:
            return index
    return None
