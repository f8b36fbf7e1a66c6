"""Rows through a cache: those asked for last are kept, the others come from the file."""

from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from millstream.classic.token_rows import Rows, RowSource, smallest
from millstream.dataset.tokens import Numbers, Tokenizer


class CachedRows:
    """The `size` rows that were asked for last, the others from a source. Pickled, it starts empty."""

    def __init__(self, rows: RowSource, *, size: int, tokenizer: Tokenizer, max_length: int) -> None:
        if size < 0:
            raise ValueError(f"cache_size={size}: a number of reads from 0 on")
        self.names = rows.names
        self._rows = rows
        self._size = min(size, len(rows))
        self._width = max_length
        self._kind = smallest(max(tokenizer.vocab_size - 1, tokenizer.pad_id))
        self._forget()

    def _forget(self) -> None:
        self._places: OrderedDict[int, int] = OrderedDict()  # record number -> row of the cache; oldest use first
        ids = np.empty((self._size, self._width), self._kind)  # memory is taken when it is first written
        self._cache = Rows(ids, np.empty(self._size, np.int64), np.empty((self._size, len(self.names)), np.int64))

    @property
    def num_cached(self) -> int:
        return len(self._places)

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows in the cache at present."""
        return sum(part[: self.num_cached].nbytes for part in self._cache)

    def __len__(self) -> int:
        return len(self._rows)

    def fetch(self, numbers: Numbers) -> Rows:
        places = np.array([self._find(number) for number in numbers.tolist()], np.int64)
        cached = places >= 0
        rows = Rows(
            np.empty((len(numbers), self._width), np.int64),
            np.empty(len(numbers), np.int64),
            np.empty((len(numbers), len(self.names)), np.int64),
        )
        _put(rows, cached, self._cache.take(places[cached]))
        if not cached.all():
            missing, which = np.unique(numbers[~cached], return_inverse=True)
            found = self._rows.fetch(missing)
            _put(rows, ~cached, found.take(which))
            self._keep(missing, found)
        return rows

    def __getstate__(self) -> Mapping[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_places", "_cache")}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        self.__dict__.update(state)
        self._forget()

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
            full = len(self._places) == self._size
            places[at] = self._places.popitem(last=False)[1] if full else len(self._places)
            self._places[number] = int(places[at])
        _put(self._cache, places, rows.take(newest))


def _put(rows: Rows, places: Numbers | NDArray[np.bool_], other: Rows) -> None:
    for part, values in zip(rows, other, strict=True):
        part[places] = values
