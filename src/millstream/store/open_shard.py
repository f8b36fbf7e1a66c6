"""One sealed shard, open for reading: views of its mapped bytes at the sidecar's offsets, checked as they are read."""

from collections.abc import Sequence
from functools import cached_property
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

    def place(self, row: int, name: str) -> TensorRow | None:
        places = self.sidecar.tensor(name)
        return places.row(row) if places else None

    def value(self, row: int, name: str) -> object:
        """One scalar."""
        return self.sidecar.column(name)[row].as_py()

    def check_record(self, row: int) -> None:
        """Raise CorruptRecord unless the record's own bytes (all but the tensors' data) hold."""
        if self._verify and not head_holds(self._map.view, self.sidecar.row(row), self.sidecar.schema):
            self._corrupt(row, "the record's frame", "its bytes")

    def will_need(self, row: int, name: str, layers: Layers) -> None:
        """Start reading what `tensor` will want."""
        place = self.place(row, name)
        if place is not None:
            for offset, size in _ranges(self._spans(place, self._kind(name), self._picks(row, name, place, layers))):
                self._map.will_need(offset, min(size, max(0, self._map.num_bytes - offset)))

    def shape(self, row: int, name: str, layers: Layers) -> tuple[int, ...] | None:
        """The shape `tensor` will give; None for None."""
        place = self.place(row, name)
        if place is None or layers is None or not self._has_layers(name):
            return place and place.shape
        picks = self._picks(row, name, place, layers) or []
        return place.shape[1:] if isinstance(layers, int) else (len(picks), *place.shape[1:])

    def tensor(self, row: int, name: str, layers: Layers = None) -> "Array | torch.Tensor | None":
        """The tensor, or some of its layers: a view of the mapped file wherever the bytes lie side by side."""
        place = self.place(row, name)
        if place is None:
            return None
        kind = self._kind(name)
        shape = self.shape(row, name, layers)
        assert shape is not None
        picks = self._picks(row, name, place, layers)
        spans = self._spans(place, kind, picks)
        if self.sidecar.compression == "none" and len(_ranges(spans)) == 1:
            data = self._stored(row, name, spans)
            if picks is not None and len(place.crc32c) == 1:
                data = np.ascontiguousarray(data.reshape(place.shape[0], -1)[picks]).reshape(-1)
        else:
            data = np.empty(int(np.prod(shape)) * kind.itemsize, np.uint8)
            self.copy(row, name, layers, data)
        return from_bytes(kind, shape, data)

    def copy(self, row: int, name: str, layers: Layers, out: Bytes) -> None:
        """The tensor's (or its layers') raw bytes into `out`, checked."""
        place, kind = self.place(row, name), self._kind(name)
        assert place is not None
        picks = self._picks(row, name, place, layers)
        spans = self._spans(place, kind, picks)
        if picks is not None and len(place.crc32c) == 1:  # too small to be cut: take the layers out of the whole
            whole = np.empty(int(np.prod(place.shape)) * kind.itemsize, np.uint8)
            self.copy(row, name, None, whole)
            out[:] = whole.reshape(place.shape[0], -1)[picks].reshape(-1)
            return
        compression = self.sidecar.compression
        for part, span in zip(out.reshape(len(spans), -1) if out.size else [out], spans, strict=False):
            offset, size, crc = span
            if compression == "none":
                self._check_end(row, name, offset + size)
                part[:] = self._map.view[offset : offset + size]
                if self._verify and crc32c(part) != crc:  # over the copy: it is in the cache
                    part[:] = self._stored(row, name, [span])
            else:
                unpack(self._stored(row, name, [span]), part, kind.itemsize, compression)

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

    def _has_layers(self, name: str) -> bool:
        kind = self.sidecar.schema[name]
        return isinstance(kind, Tensor) and kind.axes[:1] == ("layer",)

    def _picks(self, row: int, name: str, place: TensorRow, layers: Layers) -> list[int] | None:
        """Layer numbers counted from 0; None for all, also for a field that has no layers."""
        if layers is None or not self._has_layers(name):
            return None
        count = place.shape[0]
        picks = [layers] if isinstance(layers, int) else list(layers)
        if any(not -count <= pick < count for pick in picks):
            raise IndexError(f"record {self._first + row}: field {name!r} has {count} layers, asked for {picks}")
        return [pick % count for pick in picks]

    def _spans(self, place: TensorRow, kind: Tensor, picks: list[int] | None) -> list[Span]:
        spans = [(*span, crc) for span, crc in zip(place.spans(kind.itemsize), place.crc32c, strict=True)]
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
