"""One sealed shard in an object store: exact ranges, requested for many records at once, verified as they arrive."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from millstream.core.record import Array, Bytes, Schema, Tensor, crc32c, from_bytes
from millstream.core.remote import RemoteFile, RemotePath, Wanted, read_all
from millstream.traces.store.format import is_frame_intact
from millstream.traces.store.manifest import ShardInfo
from millstream.traces.store.plan import Plan
from millstream.traces.store.shard_reader import RangeReader, ShardReader
from millstream.traces.store.sidecar import Span
from millstream.traces.store.slices import decompress

if TYPE_CHECKING:
    import torch


class RemoteShard(ShardReader):
    """Reads records of one remote shard by row, into memory of their own."""

    def __init__(self, path: Path, info: ShardInfo, *, first: int, verify: bool, fields: Schema) -> None:
        super().__init__(path, info, first=first, verify=verify, fields=fields)
        assert isinstance(self.file, RemotePath)
        self._remote = RemoteFile(self.file)

    def record(self, row: int) -> dict[str, object]:
        """The whole record, fetched as one range, with all checksums verified."""
        schema = self.sidecar.schema
        plans = {name: self.plan(row, name) for name, kind in schema.items() if isinstance(kind, Tensor)}
        start, size = self.sidecar.extent(row)
        self._check_end(row, "the record's frame", start + size)
        data = np.empty(size, np.uint8)
        read_all([(self._remote, start, data.data)], is_checked=self._verify)
        if self._verify and self._damage(row, plans, data):
            read_all([(self._remote, start, data.data)], fresh=True)
            if (where := self._damage(row, plans, data)) is not None:
                self._corrupt(row, where, "CRC-32C")
        tensors: dict[str, object] = {}
        for name, plan in plans.items():
            stored = data[slice(*_extent(plan.spans, start))] if plan else None
            tensors[name] = None if plan is None or stored is None else self._tensor(plan, stored)
        return {name: tensors[name] if name in tensors else self.value(row, name) for name in schema}

    def will_need_record(self, row: int) -> None:
        """Nothing is requested before it is read: a batch requests all its ranges at once."""

    def will_need(self, plan: Plan | None) -> None:
        """The same."""

    def tensor(self, plan: Plan) -> "Array | torch.Tensor":
        data = np.empty(plan.num_bytes, np.uint8)
        self.copy(plan, data)
        return from_bytes(plan.kind, plan.shape, data)

    def copy(self, plan: Plan, out: Bytes, reader: RangeReader | None = None) -> None:
        RemoteShard.copy_all([(self, plan, out)])

    @staticmethod
    def copy_all(wanted: "Sequence[tuple[ShardReader, Plan, Bytes]]") -> None:
        """The same. All ranges of all shards are requested at once."""
        ranges: list[Wanted] = []
        parts: list[tuple[RemoteShard, Plan, Bytes, Bytes]] = []
        for shard, plan, out in wanted:
            assert isinstance(shard, RemoteShard)
            if not out.size:
                continue
            end = max(span[0] + span[1] for span in plan.spans)
            shard._check_end(plan.row, f"field {plan.name!r}", end)
            is_direct = plan.taken is None and not shard._is_compressed
            stored = out if is_direct else np.empty(sum(span[1] for span in plan.spans), np.uint8)
            parts.append((shard, plan, out, stored))
            ranges += shard._ranges(plan, stored)
        read_all(ranges, is_checked=True)
        for shard, plan, out, stored in parts:
            if shard._verify and _first_damaged(stored, plan.spans) is not None:
                read_all(shard._ranges(plan, stored), fresh=True)
                if (bad := _first_damaged(stored, plan.spans)) is not None:
                    shard._corrupt(plan.row, f"field {plan.name!r}", f"CRC-32C of the slice at byte {bad}")
            shard._finish(plan, stored, out)

    def _ranges(self, plan: Plan, stored: Bytes) -> list[Wanted]:
        """Where the slices of a plan are, and where in `stored` they belong; neighbours as one range."""
        ranges: list[Wanted] = []
        at = 0
        for offset, size, _ in plan.spans:
            part = stored.data[at : at + size]
            if ranges and ranges[-1][1] + ranges[-1][2].nbytes == offset:
                part = stored.data[at - ranges[-1][2].nbytes : at + size]
                offset = ranges.pop()[1]
            ranges.append((self._remote, offset, part))
            at += size
        return ranges

    def _finish(self, plan: Plan, stored: Bytes, out: Bytes) -> None:
        """What is wanted, from the stored bytes: decompressed, some of the rows."""
        if stored is out:
            return
        whole = stored
        if self._is_compressed:
            whole = out if plan.taken is None else np.empty(plan.taken.read_bytes(out.size), np.uint8)
            at = 0
            for part, (_, size, _) in zip(whole.reshape(len(plan.spans), -1), plan.spans, strict=True):
                decompress(stored[at : at + size], part, plan.kind.itemsize, self.sidecar.compression)
                at += size
        if plan.taken is not None:
            out[:] = plan.taken.of(whole)

    def _tensor(self, plan: Plan, stored: Bytes) -> "Array | torch.Tensor":
        out = np.empty(plan.num_bytes, np.uint8) if self._is_compressed else stored
        self._finish(plan, stored, out)
        return from_bytes(plan.kind, plan.shape, out)

    def _damage(self, row: int, plans: Mapping[str, Plan | None], data: Bytes) -> str | None:
        """What is damaged in the bytes of a record."""
        start, size = self.sidecar.extent(row)
        extents: list[tuple[int, int]] = []
        for name, plan in plans.items():
            if plan is not None:
                low, high = _extent(plan.spans, start)
                extents.append((low, high - low))
                if _first_damaged(data[low:high], plan.spans) is not None:
                    return f"field {name!r}"
        return None if is_frame_intact(data, 0, size, extents) else "the record's frame"

    def _check_end(self, row: int, where: str, end: int) -> None:
        if end > self._remote.num_bytes:
            what = f"the object ends at byte {self._remote.num_bytes}, expected {end} or more"
            self._corrupt(row, where, what)


def _extent(spans: Sequence[Span], start: int) -> tuple[int, int]:
    """The first and last byte of a whole tensor, counted from `start`."""
    return spans[0][0] - start, spans[-1][0] + spans[-1][1] - start


def _first_damaged(stored: Bytes, spans: Sequence[Span]) -> int | None:
    """The offset of the first slice that does not match its checksum; the slices follow each other in `stored`."""
    at = 0
    for offset, size, crc in spans:
        if crc32c(stored[at : at + size]) != crc:
            return offset
        at += size
    return None
