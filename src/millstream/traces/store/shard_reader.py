"""One sealed shard, open for reading: views of the mapped file at the sidecar's offsets, verified as they are read."""

import errno
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

import numpy as np
from numpy.typing import NDArray

from millstream.core.console import plural, quoted
from millstream.core.memory import Map
from millstream.core.prefetch import share
from millstream.core.record import Array, Bytes, Schema, Tensor, crc32c, from_bytes
from millstream.errors import CorruptRecord, CorruptShard
from millstream.traces.store.format import id_field, is_frame_intact
from millstream.traces.store.manifest import ShardInfo, shard_name
from millstream.traces.store.plan import WHOLE, Pick, Plan, plan_of
from millstream.traces.store.sidecar import Span, load_sidecar
from millstream.traces.store.slices import decompress

if TYPE_CHECKING:
    import torch

MAX_FILES = 16  # open files of a RangeReader, for any number of shards


class ShardReader:
    """Reads records of one shard by row. Keeps no file descriptor open."""

    def __init__(self, path: Path, info: ShardInfo, *, first: int, verify: bool, fields: Schema) -> None:
        self._path = path
        self.file = path / shard_name(info.number)
        self._first = first  # record number of row 0, for error messages
        self._verify = verify
        self.sidecar = load_sidecar(path, info, fields)
        self._is_compressed = self.sidecar.compression != "none"

    @cached_property
    def _map(self) -> Map:
        try:
            return Map(self.file)
        except FileNotFoundError:
            raise self._missing() from None

    def open(self) -> int:
        """A descriptor of the file, to be closed by the caller."""
        try:
            return os.open(self.file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise self._missing() from None

    def _missing(self) -> CorruptShard:
        return CorruptShard(f"{self.file}: missing. See: millstream verify {quoted(self._path)}")

    def value(self, row: int, name: str) -> object:
        """One scalar."""
        return self.sidecar.column(name)[row].as_py()

    def record(self, row: int) -> dict[str, object]:
        """The whole record, with all checksums verified; tensors are views of the mapped file."""
        schema = self.sidecar.schema
        plans = {name: self.plan(row, name) for name, kind in schema.items() if isinstance(kind, Tensor)}
        if self._verify:
            ends = [(p.spans[0][0], p.spans[-1][0] + p.spans[-1][1]) for p in plans.values() if p is not None]
            extents = [(start, end - start) for start, end in ends]
            if not is_frame_intact(self._map.view, *self.sidecar.extent(row), extents):
                self._corrupt(row, "the record's frame", "CRC-32C, or the file is truncated")
        values: dict[str, object] = {}
        for name in schema:
            plan = plans.get(name)
            if name not in plans:
                values[name] = self.value(row, name)
            else:
                values[name] = None if plan is None else self.tensor(plan)
        return values

    def will_need_record(self, row: int) -> None:
        """Prefetch a whole record."""
        self._map.will_need(*self.sidecar.extent(row))

    def will_need(self, plan: Plan | None) -> None:
        """Prefetch what a plan reads."""
        if plan is None:
            return
        if _are_contiguous(plan.spans):
            first, last = plan.spans[0], plan.spans[-1]
            self._map.will_need(first[0], last[0] + last[1] - first[0])
            return
        for offset, size, _ in plan.spans:
            self._map.will_need(offset, size)

    def plan(self, row: int, name: str, pick: Pick = WHOLE) -> Plan | None:
        """How to read a tensor, or some of it; None if the tensor is None."""
        column = self.sidecar.tensor(name)
        try:
            return plan_of(column, row, name, pick) if column else None
        except IndexError as error:
            axis, size, index = cast(tuple[int, int, int], error.args)
            found = cast(Tensor, self.sidecar.schema[name]).axes[axis]
            what = plural(size, found) if found in ("layer", "position", "token") else f"{size} indices in axis {axis}"
            raise IndexError(
                f"{self._path}: record {self._first + row} has {what} of {name!r}, requested {index}"
            ) from None

    def tensor(self, plan: Plan) -> "Array | torch.Tensor":
        """The tensor of a plan: a view of the mapped file if the bytes are contiguous."""
        if not self._is_compressed and _are_contiguous(plan.spans):
            data = self._stored(plan, plan.spans)
            if plan.taken is not None:
                data = plan.taken.of(data)
        else:
            data = np.empty(plan.num_bytes, np.uint8)
            self.copy(plan, data)
        return from_bytes(plan.kind, plan.shape, data)

    def copy(self, plan: Plan, out: Bytes, reader: "RangeReader | None" = None) -> None:
        """Copy the raw bytes of a plan into `out`, verified; from the mapped file, or read by `reader`."""
        if not out.size:
            return
        if plan.taken is not None:
            whole = np.empty(plan.taken.read_bytes(out.size), np.uint8)
            self._copy_spans(plan, whole, reader)
            out[:] = plan.taken.of(whole)
        else:
            self._copy_spans(plan, out, reader)

    @staticmethod
    def copy_all(wanted: "Sequence[tuple[ShardReader, Plan, Bytes]]") -> None:
        """Copy the raw bytes of many plans, verified. No file is mapped or stays in memory."""
        share(_copy_some, wanted, sizes=[out.size for _, _, out in wanted])

    def _copy_spans(self, plan: Plan, out: Bytes, reader: "RangeReader | None") -> None:
        if len(plan.spans) == 1 and reader is not None and not self._is_compressed:  # most often, and many per batch
            offset, _, crc = plan.spans[0]
            if not reader.read(self, offset, out):
                self._check_end(plan.row, f"field {plan.name!r}", offset + out.size)
            if self._verify and crc32c(out) != crc:
                out[:] = self._stored(plan, plan.spans)  # raises if the file is damaged
            return
        parts = out.reshape(len(plan.spans), -1)
        if self._is_compressed:
            for part, span in zip(parts, plan.spans, strict=True):
                stored = self._stored(plan, [span]) if reader is None else self._read(plan, span, reader)
                decompress(stored, part, plan.kind.itemsize, self.sidecar.compression)
            return
        runs = [(plan.spans[0][0], out)] if _are_contiguous(plan.spans) else []
        for offset, part in runs or [(span[0], part) for span, part in zip(plan.spans, parts, strict=True)]:
            if reader is None:
                self._check_end(plan.row, f"field {plan.name!r}", offset + part.size)
                part[:] = self._map.view[offset : offset + part.size]
            elif not reader.read(self, offset, part):
                self._check_end(plan.row, f"field {plan.name!r}", offset + part.size)
        if self._verify:
            for part, span in zip(parts, plan.spans, strict=True):
                if crc32c(part) != span[2]:
                    part[:] = self._stored(plan, [span])  # raises if the file is damaged

    def _read(self, plan: Plan, span: Span, reader: "RangeReader") -> Bytes:
        offset, size, crc = span
        stored = np.empty(size, np.uint8)
        if not reader.read(self, offset, stored):
            self._check_end(plan.row, f"field {plan.name!r}", offset + size)
        return stored if not self._verify or crc32c(stored) == crc else self._stored(plan, [span])

    def sizes(self, rows: NDArray[np.int64], fields: Mapping[str, Pick]) -> NDArray[np.int64]:
        """Bytes per row of the tensors among these fields, or of what is wanted of them."""
        total = np.zeros(len(rows), np.int64)
        for name, pick in fields.items():
            column = self.sidecar.tensor(name) if name in self.sidecar.schema else None
            if column is not None:
                total += (column.num_bytes[rows] * pick.share(column, rows)).astype(np.int64)
        return total

    def _stored(self, plan: Plan, spans: Sequence[Span]) -> Bytes:
        """The stored bytes of contiguous slices, as a view of the mapped file."""
        start, end = spans[0][0], spans[-1][0] + spans[-1][1]
        self._check_end(plan.row, f"field {plan.name!r}", end)
        view = self._map.view[start:end]
        if not self._verify or _are_intact(view, spans):
            return view
        # The caller may have written to an earlier view, which changes the page in this process only.
        fresh = np.empty(end - start, np.uint8)
        with open(self.file, "rb") as f:
            f.seek(start)
            f.readinto(fresh.data)
        if not _are_intact(fresh, spans):
            self._corrupt(plan.row, f"field {plan.name!r}", f"CRC-32C of {self._bad_slice(plan, fresh, start)}")
        return fresh

    def _bad_slice(self, plan: Plan, data: Bytes, start: int) -> str:
        """Which slice of a tensor is damaged, from the bytes at `start`."""
        column = self.sidecar.tensor(plan.name)
        slices = column.spans(plan.row) if column else []
        inside = [span for span in slices if start <= span[0] and span[0] + span[1] <= start + data.size]
        bad = [at for at, size, crc in inside if crc32c(data[at - start : at - start + size]) != crc]
        return f"the slice at byte {bad[0]}" if bad else f"the bytes from {start} on"

    def _check_end(self, row: int, where: str, end: int) -> None:
        if end > self._map.num_bytes:
            self._corrupt(row, where, f"the file ends at byte {self._map.num_bytes}, expected {end} or more")

    def _corrupt(self, row: int, where: str, what: str) -> None:
        name = id_field(self.sidecar.schema)
        key = f", {name} {self.value(row, name)!r}" if name in self.sidecar.schema else ""
        raise CorruptRecord(
            f"{self.file}: record {self._first + row} (row {row}{key}), {where}: damaged ({what}). "
            f"The other records are readable; set this one aside with: millstream repair {quoted(self._path)}"
        )


class RangeReader:
    """Reads the byte ranges of a batch with read(2), without mapping the files or keeping anything in memory.

    At the first range that is not in the page cache it requests all ranges of the batch, so that the disk works on
    several requests in parallel.
    """

    def __init__(self, wanted: "Sequence[tuple[ShardReader, Plan]]") -> None:
        self._wanted = wanted
        self._requested = False
        self._files: dict[ShardReader, int] = {}  # in the order of opening

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._files.values():
            os.close(fd)

    def read(self, shard: "ShardReader", offset: int, out: Bytes) -> bool:
        """Fill `out`; False if the file is too short."""
        fd, left = self._open(shard), out.data
        if not self._requested:
            try:
                count = os.preadv(fd, [left], offset, os.RWF_NOWAIT)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                count = 0
            left, offset = left[count:], offset + count
            if left.nbytes:
                self._request_all()
                fd = self._open(shard)  # the requests may have closed it
        while left.nbytes:
            count = os.preadv(fd, [left], offset)
            if not count:
                return False
            left, offset = left[count:], offset + count
        return True

    def _request_all(self) -> None:
        self._requested = True
        for shard, plan in self._wanted:
            if plan.spans:
                first, last = min(plan.spans), max(plan.spans)
                fd = self._open(shard)
                os.posix_fadvise(fd, first[0], last[0] + last[1] - first[0], os.POSIX_FADV_WILLNEED)

    def _open(self, shard: "ShardReader") -> int:
        if shard not in self._files:
            if len(self._files) == MAX_FILES:
                os.close(self._files.pop(next(iter(self._files))))
            self._files[shard] = shard.open()
        return self._files[shard]


def _copy_some(wanted: Sequence[tuple[ShardReader, Plan, Bytes]]) -> None:
    with RangeReader([(shard, plan) for shard, plan, _ in wanted]) as reader:
        for shard, plan, out in wanted:
            shard.copy(plan, out, reader)


def _are_contiguous(spans: Sequence[Span]) -> bool:
    """Whether each span starts where the previous one ends; False without spans."""
    return bool(spans) and all(a[0] + a[1] == b[0] for a, b in pairwise(spans))


def _are_intact(data: Bytes, spans: Sequence[Span]) -> bool:
    """Whether contiguous spans match their checksums; `data` starts with the first one."""
    start = spans[0][0]
    return all(crc32c(data[offset - start : offset - start + size]) == crc for offset, size, crc in spans)
