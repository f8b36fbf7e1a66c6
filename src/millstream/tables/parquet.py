"""Rows of a Parquet file by number: row groups are decoded as a whole, and kept within a memory budget."""

import os
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from millstream.core.batches import Column, decoded
from millstream.core.collection import Numbers
from millstream.core.console import format_bytes
from millstream.core.memory import return_freed_tables
from millstream.core.record import Array
from millstream.core.tables import is_table_intact
from millstream.errors import BadSource, OverBudget
from millstream.tables.source import Part, Source, Span

PIECE_BYTES = 4 << 20  # decoded at once, so that a budget is noticed before it is exceeded
_SAMPLE_ROWS = 1024
_SAMPLE_BYTES = 1 << 20  # of a column, of an object
_TOGETHER_BYTES = 32 << 20  # of an object, encoded, requested at once
Pieces = Sequence[pa.Array]  # one column of a row group, `piece_rows` rows each


class DecodedGroups:
    """Columns of row groups that were decoded last, at most `limit` bytes of them. A fork begins with none.

    `lock` is for looking something up and copying from it; `loading` is held, without it, to request and decode what is
    missing, so that nothing is loaded twice and what is there can be used meanwhile.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._begin()

    def _begin(self) -> None:
        self.lock, self.loading = threading.RLock(), threading.Lock()
        self._pid = os.getpid()
        self._held: OrderedDict[tuple[object, int, str], tuple[Pieces, int]] = OrderedDict()
        self.held_bytes = 0

    def here(self) -> "DecodedGroups":
        """Itself, without what belongs to the parent process: its lock may be held there forever."""
        if self._pid != os.getpid():
            self._begin()
        return self

    def get(self, key: tuple[object, int, str]) -> Pieces | None:
        with self.lock:
            if key not in self._held:
                return None
            self._held.move_to_end(key)
            return self._held[key][0]

    def put(self, key: tuple[object, int, str], pieces: Pieces) -> None:
        num_bytes = sum(piece.nbytes for piece in pieces)
        with self.lock:
            self._held[key] = pieces, num_bytes
            self.held_bytes += num_bytes

    def make_room(self, num_bytes: int) -> None:
        """Drop what was used longest ago until so many bytes fit."""
        with self.lock:
            while self._held and self.held_bytes + num_bytes > self.limit:
                _, (_, dropped) = self._held.popitem(last=False)
                self.held_bytes -= dropped

    def __getstate__(self) -> int:
        return self.limit

    def __setstate__(self, limit: int) -> None:
        self.__init__(limit)


class ParquetTable:
    """One Parquet file. Opening it reads its footer."""

    format = "Parquet"
    is_random = False

    def __init__(self, path: Path) -> None:
        self.source = Source.at(path)
        return_freed_tables()
        with self._reading(), self.source.open() as file:
            found = pq.ParquetFile(file, pre_buffer=False)
            self._metadata, schema = found.metadata, found.schema_arrow
        self.names = list(schema.names)
        self.types = {name: _plain_type(schema.field(name).type) for name in dict.fromkeys(self.names)}
        groups = [self._metadata.row_group(number) for number in range(self._metadata.num_row_groups)]
        self._edges = np.cumsum([0, *(group.num_rows for group in groups)], dtype=np.int64)
        encoded = dict.fromkeys(self.names, 0)
        for group in groups:
            for column in map(group.column, range(group.num_columns)):
                path_in_schema = column.path_in_schema
                name = path_in_schema if path_in_schema in encoded else path_in_schema.split(".")[0]
                encoded[name] += column.total_uncompressed_size
        self._encoded = encoded

    @property
    def fingerprint(self) -> list[int]:
        return [self.source.size, self._samples]

    @cached_property
    def _samples(self) -> int:
        return self.source.samples_crc32c()

    @property
    def num_rows(self) -> int:
        return int(self._edges[-1])

    @cached_property
    def row_bytes(self) -> dict[str, int]:
        """The mean decoded size of a value of each column: a dictionary may be much smaller, so some rows are tried."""
        means = {name: -(-num_bytes // max(self.num_rows, 1)) for name, num_bytes in self._encoded.items()}
        if self.num_rows:
            spans = [(start, min(count, _SAMPLE_BYTES)) for start, count in self._spans(0, self.names)]
            # The start of each column chunk is read, not all of it.
            step = _SAMPLE_BYTES if self.source.is_remote else 0
            with self._reading(), self.source.open(self.source.read(spans)) as file:
                found = pq.ParquetFile(file, metadata=self._metadata, pre_buffer=False, buffer_size=step)
                batch = next(found.iter_batches(_SAMPLE_ROWS, use_threads=False))
            for name in self.names:
                means[name] = max(means[name], -(-decoded(batch.column(name)).nbytes // batch.num_rows))
        return means

    @property
    def num_bytes(self) -> int:
        return sum(self.row_bytes.values()) * self.num_rows

    @property
    def run_bytes(self) -> int:
        """Of a row group."""
        return self.num_bytes // max(len(self._edges) - 1, 1)

    def sizes(self, rows: Numbers, names: Sequence[str]) -> Numbers:
        return np.full(len(rows), sum(self.row_bytes[name] for name in names), np.int64)

    def fetch(self, rows: Numbers, names: Sequence[str], cache: DecodedGroups) -> dict[str, Column]:
        """Columns of these rows, which are sorted."""
        cache = cache.here()
        taken: dict[str, list[pa.Array]] = {name: [] for name in names}
        owner = np.searchsorted(self._edges, rows, side="right") - 1
        groups: list[int] = np.unique(owner).tolist()

        def take(found: Mapping[str, Pieces | None], places: Numbers) -> None:
            """Copies: nothing outside keeps a dropped group alive."""
            for name, pieces in found.items():
                assert pieces is not None
                starts = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
                at: Numbers = np.searchsorted(starts, places, side="right") - 1
                for piece, one in enumerate(pieces):
                    if (here := at == piece).any():
                        taken[name].append(decoded(one.take(places[here] - starts[piece])))

        turn = 0
        while turn < len(groups):
            group = groups[turn]
            with cache.lock:
                found = {name: cache.get((self.source, group, name)) for name in names}
                if None not in found.values():
                    take(found, rows[owner == group] - self._edges[group])
                    turn += 1
                    continue
            with cache.loading:  # until all that is requested is decoded, so that no other thread requests it again
                parts, end = self._request(groups, turn, names, cache)
                for group in groups[turn:end]:
                    take(self._group(group, names, cache, parts), rows[owner == group] - self._edges[group])
                parts.clear()
            turn = end
        return {name: as_column(pa.concat_arrays(arrays)) for name, arrays in taken.items()}

    def will_need(self, first: Numbers, last: Numbers, names: Sequence[str], cache: DecodedGroups) -> None:
        """Request and decode the row groups of an object with the rows from `first[i]` to `last[i]`, for every i."""
        cache = cache.here()
        groups, turn = indices_between(self._edges, first, last), 0
        while turn < len(groups):
            with cache.loading:
                parts, end = self._request(groups, turn, names, cache)
                for group in groups[turn:end]:
                    self._group(group, names, cache, parts)
                parts.clear()
            turn = end

    def column(self, name: str) -> Iterator[pa.Array]:
        """One column of all rows."""
        for group in range(len(self._edges) - 1):
            for batch in self._decoded(group, [name]):
                yield decoded(batch.column(name))

    def verify(self) -> Iterator[str]:
        """Decode everything; pages with checksums are verified."""
        path, source = self.source.path, self.source
        if source.size < 1 << 28:
            with source.open(source.read([(0, source.size)], fresh=True)) as file:
                is_damaged = is_table_intact(file.read(source.size)) is False
        else:
            is_damaged = False
        if is_damaged:
            yield f"{path}: its checksum does not match"
        for group in range(len(self._edges) - 1):
            try:
                for batch in self._decoded(group, self.names, fresh=source.size >= 1 << 28):
                    batch.validate(full=True)
            except (BadSource, pa.ArrowException) as error:
                yield f"{path}: row group {group}: {error}"

    def _spans(self, group: int, names: Sequence[str]) -> list[Span]:
        """Where the column chunks of a row group are."""
        spans, about = list[Span](), self._metadata.row_group(group)
        for chunk in map(about.column, range(about.num_columns)):
            if chunk.path_in_schema in names or chunk.path_in_schema.split(".")[0] in names:
                start, dictionary = chunk.data_page_offset, chunk.dictionary_page_offset
                spans.append((min(start, dictionary) if dictionary else start, chunk.total_compressed_size))
        return spans

    def _request(
        self, groups: Sequence[int], turn: int, names: Sequence[str], cache: DecodedGroups
    ) -> tuple[list[Part], int]:
        """What is not decoded yet of the next row groups of an object, and the turn after the last one of them."""
        if not self.source.is_remote:
            return [], turn + 1
        most, num_bytes = min(cache.limit // 4, _TOGETHER_BYTES), 0
        spans = list[Span]()
        for end, group in enumerate(groups[turn:], turn):
            missing = [name for name in names if cache.get((self.source, group, name)) is None]
            more = self._spans(group, missing) if missing else []
            num_bytes += sum(count for _, count in more)
            if end > turn and num_bytes > most:
                return self.source.read(spans), end
            spans += more
        return self.source.read(spans), len(groups)

    def _group(
        self, group: int, names: Sequence[str], cache: DecodedGroups, parts: Sequence[Part] = ()
    ) -> dict[str, Pieces]:
        found = {name: cache.get((self.source, group, name)) for name in names}
        missing = [name for name, pieces in found.items() if pieces is None]
        if missing:
            pieces: dict[str, list[pa.Array]] = {name: [] for name in missing}
            num_bytes = 0
            for batch in self._decoded(group, missing, parts):
                num_bytes += batch.nbytes
                if num_bytes > cache.limit:
                    raise OverBudget(
                        f"{self.source.path}: row group {group} ({int(np.diff(self._edges)[group])} rows) needs more "
                        f"than the {format_bytes(cache.limit)} for decoded data. Raise memory, read fewer columns, or "
                        "write the file with smaller row groups (row_group_size)"
                    )
                cache.make_room(num_bytes)
                for name in missing:
                    pieces[name].append(batch.column(name))
            for name in missing:
                found[name] = pieces[name]
                cache.put((self.source, group, name), pieces[name])
        return {name: pieces for name, pieces in found.items() if pieces is not None}

    def _decoded(
        self, group: int, names: Sequence[str], parts: Sequence[Part] | None = None, *, fresh: bool = False
    ) -> Generator[pa.RecordBatch]:
        """The rows of a group in pieces, on this thread: Arrow's own threads do not survive a fork."""
        piece_rows = max(PIECE_BYTES // max(sum(self.row_bytes[name] for name in names), 1), 1)
        if parts is None:
            parts = self.source.read(self._spans(group, names), fresh=fresh)
        with self._reading(), self.source.open(parts) as file:
            found = pq.ParquetFile(file, metadata=self._metadata, pre_buffer=False, page_checksum_verification=True)
            yield from found.iter_batches(
                min(piece_rows, 1 << 20), row_groups=[group], columns=names, use_threads=False
            )

    def _reading(self) -> "_Reading":
        return _Reading(self.source.path)


class _Reading:
    """Raises what pyarrow finds wrong with a file as BadSource."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, pa.ArrowException | OSError | EOFError) and not isinstance(error, FileNotFoundError):
            reason = " ".join(str(error).split())[:200]
            raise BadSource(f"{self._path}: is not a valid Parquet file, or damaged ({reason})") from None


def indices_between(edges: Numbers, first: Numbers, last: Numbers) -> list[int]:
    """The sections, from one edge to the next, in which there is any of the numbers from `first[i]` to `last[i]`."""
    ends = np.searchsorted(edges, (first, last), side="right") - 1
    return sorted({one for low, high in ends.T.tolist() for one in range(low, high + 1)})


def as_column(array: pa.Array) -> Column:
    """Numbers, and lists of numbers, as arrays if none is missing; anything else as Python values."""
    kind = array.type
    if array.null_count:
        return array.to_pylist()
    if _is_number(kind):
        return _numbers(array)
    if pa.types.is_fixed_size_list(kind) and _is_number(kind.value_type):
        flat = cast(pa.FixedSizeListArray, array).flatten()
        return array.to_pylist() if flat.null_count else _numbers(flat).reshape(len(array), kind.list_size)
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_number(kind.value_type):
        lists = cast(pa.ListArray, array)
        if not lists.values.null_count:
            flat, offsets = _numbers(lists.values), lists.offsets.to_numpy().tolist()
            return [flat[start:end] for start, end in pairwise(offsets)]
    return array.to_pylist()


def _numbers(array: pa.Array) -> Array:
    """Integers as int64, since torch lacks other types; except those that do not fit."""
    found = array.to_numpy(zero_copy_only=False)
    return found.astype(np.int64) if found.dtype.kind in "iu" and found.dtype != np.uint64 else found


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind
