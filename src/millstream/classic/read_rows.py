"""Rows of tokens, labels and ids, by record number: made on demand, all held in memory, or the latest ones cached."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

from millstream.classic.preprocessed_folder import Scratch
from millstream.classic.read_items import Rows, as_tensor
from millstream.core.console import progress
from millstream.reads.batch import ColumnValues
from millstream.reads.mapping import LabelMapping
from millstream.reads.reads import Reads
from millstream.reads.tokenizers.kmers import Numbers, Tokenizer

CHUNK_READS = 8192  # tokenised at a time
CLASS_ID = "class_id"
NO_LABEL = -100  # ignored by torch's cross entropy
NO_ID = -1

Compact = NDArray[np.int16 | np.int32 | np.int64]
CompactType = type[np.int16 | np.int32 | np.int64]


class StreamedRows:
    """Rows read and tokenised on demand. `open_again` opens the reads, also when this object is unpickled.

    `names` are the columns: `labels`, and the ids in the headers. `scratch` is the folder of an index that is not kept.
    """

    def __init__(
        self,
        open_again: Callable[..., Reads],
        *,
        ids: tuple[str, ...],
        labels: LabelMapping | None,
        tokenizer: Tokenizer,
        max_length: int,
        scratch: Scratch | None,
    ) -> None:
        self.names = ("labels", *ids)
        self.tokenizer = tokenizer
        self.max_length = max_length
        self._labels = labels
        self._key = labels.key if labels else CLASS_ID
        self._columns = tuple(dict.fromkeys([self._key, *ids]))
        self._places = [self._columns.index(name) for name in ids]
        self._scratch = scratch
        self._open_again = open_again
        self._open()

    def __len__(self) -> int:
        return len(self._reads)

    def fetch(self, numbers: Numbers) -> Rows:
        batch = self._reads.fetch(numbers, ["sequence", *self._columns])
        ids, mask = self.tokenizer.tokenize(
            batch.flat, batch.offsets, max_length=self.max_length, pad="max_length", dtype=np.int64
        )
        columns = np.empty((len(batch), len(self.names)), np.int64)
        columns[:, 0] = _label_numbers(batch.columns[self._key], self._labels)
        for place, name in enumerate(self.names[1:], start=1):
            columns[:, place] = _integers(batch.columns[name], NO_ID)
        return Rows(ids, mask, columns)

    def one(self, number: int) -> Rows:
        """One row, without the arrays of a batch: DataLoader asks for batches of one read, or for single items."""
        bases = np.frombuffer(self._reads.sequence_of(number), np.uint8)
        ids, mask = self.tokenizer.tokenize(
            bases, _offsets(len(bases)), max_length=self.max_length, pad="max_length", dtype=np.int64
        )
        values = cast("list[int | None]", self._reads.values_of(number, self._columns))
        key = values[0]
        label = NO_LABEL if key is None else key if self._labels is None else self._labels.row(key)
        others = [NO_ID if values[place] is None else values[place] for place in self._places]
        return Rows(ids, mask, np.array([[label, *others]]))

    def __getstate__(self) -> Mapping[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_reads"}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        self.__dict__.update(state)
        if self._scratch is not None and not self._scratch.path.exists():  # the process that created it has ended
            self._scratch = Scratch()
        self._open()

    def _open(self) -> None:
        self._reads = self._open_again(index_dir=None if self._scratch is None else self._scratch.path)


class HeldRows:
    """All rows of a source in memory: tokens concatenated without padding, in the smallest dtype that fits.

    They are torch tensors, so spawned DataLoader workers share them instead of copying.
    """

    def __init__(self, rows: StreamedRows) -> None:
        self.names = rows.names
        self._width = rows.max_length
        self._pad_id = rows.tokenizer.pad_id
        kind = _smallest(rows.tokenizer.vocab_size - 1)
        tokens: list[Compact] = []
        counts, columns = np.empty(len(rows), np.int64), np.empty((len(rows), len(rows.names)), np.int64)
        with progress("tokenize", len(rows)) as update:
            for start in range(0, len(rows), CHUNK_READS):
                chunk = slice(start, min(start + CHUNK_READS, len(rows)))
                found = rows.fetch(np.arange(chunk.start, chunk.stop))
                counts[chunk], columns[chunk] = found.mask.sum(axis=1), found.columns
                tokens.append(found.ids[found.mask == 1].astype(kind))
                update(chunk.stop)
        self._tokens = as_tensor(_joined(tokens, kind))
        self._ends = as_tensor(np.cumsum(counts))
        self._columns = as_tensor(columns)

    @property
    def held_bytes(self) -> int:
        return self._tokens.nbytes + self._ends.nbytes + self._columns.nbytes

    def __len__(self) -> int:
        return len(self._ends)

    def fetch(self, numbers: Numbers) -> Rows:
        tokens, ends = self._tokens.numpy(), self._ends.numpy()
        starts = np.where(numbers > 0, ends[numbers - 1], 0)
        counts = ends[numbers] - starts
        ids, mask = np.full((len(numbers), self._width), self._pad_id, np.int64), _mask(counts, self._width)
        total = np.cumsum(counts)
        ids[mask == 1] = tokens[np.arange(counts.sum()) + np.repeat(starts - total + counts, counts)]
        return Rows(ids, mask, self._columns.numpy()[numbers])

    def one(self, number: int) -> Rows:
        ends = self._ends.numpy()
        start, end = int(ends[number - 1]) if number else 0, int(ends[number])
        ids, mask = np.empty((2, 1, self._width), np.int64)
        ids.fill(self._pad_id)
        ids[0, : end - start] = self._tokens.numpy()[start:end]
        _fill_mask(mask, end - start)
        return Rows(ids, mask, self._columns.numpy()[number : number + 1].copy())


class CachedRows:
    """An LRU cache of `size` rows in front of a source. Unpickled, it starts empty."""

    _EMPTY = ("_places", "_ids", "_counts", "_columns")

    def __init__(self, rows: StreamedRows, *, size: int) -> None:
        self.names = rows.names
        self._rows = rows
        self._size = min(size, len(rows))
        self._width = rows.max_length
        self._kind = _smallest(max(rows.tokenizer.vocab_size - 1, rows.tokenizer.pad_id))
        self._clear()

    def _clear(self) -> None:
        # record number -> row of the cache, least recently used first
        self._places: OrderedDict[int, int] = OrderedDict()
        self._ids = np.empty((self._size, self._width), self._kind)  # memory is allocated on first write
        self._counts = np.empty(self._size, np.int64)
        self._columns = np.empty((self._size, len(self.names)), np.int64)

    @property
    def num_cached(self) -> int:
        return len(self._places)

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows now in the cache."""
        return sum(part[: self.num_cached].nbytes for part in (self._ids, self._counts, self._columns))

    def __len__(self) -> int:
        return len(self._rows)

    def fetch(self, numbers: Numbers) -> Rows:
        places = np.array([self._find(number) for number in numbers.tolist()], np.int64)
        cached = places >= 0
        if cached.all():
            return self._take(places)
        missing, which = np.unique(numbers[~cached], return_inverse=True)
        found = self._rows.fetch(missing)
        order = np.empty(len(numbers), np.int64)
        order[cached] = np.arange(cached.sum())
        order[~cached] = cached.sum() + which
        known = self._take(places[cached])
        ids, mask = (np.concatenate([known[part], found[part]])[order] for part in (0, 1))
        rows = Rows(ids, mask, np.concatenate([known.columns, found.columns])[order])
        self._keep(missing, found)
        return rows

    def one(self, number: int) -> Rows:
        place = self._find(number)
        if place >= 0:
            ids, mask = np.empty((2, 1, self._width), np.int64)
            ids[0] = self._ids[place]
            _fill_mask(mask, self._counts[place])
            return Rows(ids, mask, self._columns[place : place + 1].copy())
        row = self._rows.one(number)
        if self._size:
            place = self._place_for(number)
            self._ids[place], self._columns[place] = row.ids, row.columns
            self._counts[place] = np.count_nonzero(row.mask)
        return row

    def _take(self, places: Numbers) -> Rows:
        ids = self._ids[places].astype(np.int64)
        return Rows(ids, _mask(self._counts[places], self._width), self._columns[places])

    def __getstate__(self) -> Mapping[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in self._EMPTY}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        self.__dict__.update(state)
        self._clear()

    def _find(self, number: int) -> int:
        place = self._places.get(number, -1)
        if place >= 0:
            self._places.move_to_end(number)
        return place

    def _keep(self, numbers: Numbers, rows: Rows) -> None:
        if not self._size:
            return
        newest = np.arange(max(len(numbers) - self._size, 0), len(numbers))
        places = np.empty(len(newest), np.int64)
        for at, number in enumerate(numbers[newest].tolist()):
            places[at] = self._place_for(number)
        self._ids[places], self._columns[places] = rows.ids[newest], rows.columns[newest]
        self._counts[places] = rows.mask[newest].sum(axis=1)

    def _place_for(self, number: int) -> int:
        """Where to keep a row; if the cache is full, in place of the least recently used."""
        full = len(self._places) == self._size
        place = self._places.popitem(last=False)[1] if full else len(self._places)
        self._places[number] = place
        return place


@lru_cache
def _offsets(count: int) -> Numbers:
    """Of one read, for a tokenizer."""
    offsets = np.array([0, count], np.int64)
    offsets.flags.writeable = False  # it is shared
    return offsets


def _smallest(largest_id: int) -> CompactType:
    """The smallest dtype for ids up to this one."""
    return next(kind for kind in (np.int16, np.int32, np.int64) if largest_id <= np.iinfo(kind).max)


def _joined(parts: list[Compact], kind: CompactType) -> Compact:
    """All parts in one array. Each part is freed once it is copied, so the peak stays below twice their size."""
    out = np.empty(sum(map(len, parts)), kind)
    at = len(out)
    while parts:
        part = parts.pop()
        at -= len(part)
        out[at : at + len(part)] = part
    return out


def _mask(counts: Numbers, width: int) -> Numbers:
    """1 where an id is a token, 0 where it is padding, for rows with these numbers of tokens."""
    return (np.arange(width) < counts[:, None]).astype(np.int64)


def _fill_mask(mask: Numbers, count: int) -> None:
    """The same for one row."""
    mask[0, :count] = 1
    mask[0, count:] = 0


def _label_numbers(keys: ColumnValues, mapping: LabelMapping | None) -> Numbers:
    """The same as the column `label` of the reads, but faster, which matters for batches of one read."""
    if mapping is None:
        return _integers(keys, NO_LABEL)
    if not isinstance(keys, list):
        return mapping.rows(keys)
    known = np.array([key is not None for key in keys], np.bool_)
    labels = np.full(len(keys), NO_LABEL, np.int64)
    labels[known] = mapping.rows(_integers(keys, NO_ID)[known])
    return labels


def _integers(values: ColumnValues, missing: int) -> Numbers:
    if isinstance(values, list):
        return np.array([missing if value is None else value for value in values], np.int64)
    return values
