"""A kind of record that the engine has never heard of is loaded, labelled, concatenated and mixed like any other."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pytest

import millstream as ms
from millstream.core.batches import as_float32, assign, join_columns, pad_bytes
from millstream.core.collection import Medium, Numbers


@dataclass(frozen=True)
class Tunes:
    """A batch: pitches, which are no column, beside columns."""

    numbers: Numbers
    pitches: list[bytes]
    columns: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.numbers)

    def numbered(self, numbers: Numbers) -> Self:
        return replace(self, numbers=numbers)

    def with_columns(self, columns: Mapping[str, object]) -> Self:
        return replace(self, columns={**self.columns, **columns})

    def narrowed(self, names: Container[str]) -> Self:
        return replace(self, columns={name: column for name, column in self.columns.items() if name in names})

    def joined(self, others: Sequence[Self], order: Numbers) -> Self:
        batches = [self, *others]
        pitches = [pitch for batch in batches for pitch in batch.pitches]
        numbers = np.concatenate([batch.numbers for batch in batches])[order]
        columns = join_columns([batch.columns for batch in batches], order)
        return replace(self, numbers=numbers, pitches=[pitches[place] for place in order], columns=columns)

    def arrays(self) -> list[np.ndarray]:
        return [column for column in self.columns.values() if isinstance(column, np.ndarray)]

    def padded_fields(self, names: Container[str] | None) -> Mapping[str, object]:
        flat = np.frombuffer(b"".join(self.pitches), np.uint8)
        return pad_bytes("pitches", flat, np.cumsum([0, *map(len, self.pitches)]))

    def fields_by_record(self) -> Mapping[str, Sequence[object]]:
        return {**self.columns, "pitches": self.pitches}


class Songbook(ms.Collection):
    """Song n has n pitches, from `first` on."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> object:
        return self.fetch([number])

    def fetch(self, numbers: Sequence[int] | Numbers, fields: Sequence[str] | None = None) -> Tunes:
        songs = np.asarray(numbers, np.int64) + self.first
        return Tunes(np.asarray(numbers, np.int64), [bytes(range(1, song + 1)) for song in songs], {"song": songs})

    @property
    def field_names(self) -> list[str]:
        return ["pitches", "song"]

    def column(self, name: str) -> pa.ChunkedArray:
        return pa.chunked_array([pa.array(self.fetch(range(self.count)).columns[name])])

    def sizes(self, numbers: Numbers, fields: Sequence[str]) -> Numbers:
        return 8 + numbers + self.first

    @property
    def medium(self) -> Medium:
        return Medium(20 * self.count, 20, is_random=True)

    @property
    def fingerprint(self) -> str:
        return f"{self.first:08}{self.count:08}"

    def within(self, memory: int) -> Self:
        return self


def test_batches_of_another_kind_are_joined_labelled_padded_and_numbered():
    books = ms.labelled(ms.concat([Songbook(3, 10), Songbook(20, 10)]), column="song")
    train, test = ms.split(books, {"train": 0.7, "test": 0.3})
    seen: list[int] = []
    for batch in ms.Loader(train, batch_size=4, seed=1, threads=0, order="exact"):
        songs: Any = batch["label"]
        pitches: Any = batch["pitches"]
        numbers: Any = batch["numbers"]
        assert songs.tolist() == [number + (3 if number < 10 else 10) for number in numbers.tolist()]
        assert [row[row > 0].tolist() for row in pitches] == [list(range(1, song + 1)) for song in songs]
        seen += numbers.tolist()
    assert len(set(seen)) == len(seen) == len(train) == len(books) - len(test)


def test_a_function_sees_every_field_of_each_record():
    feature = ms.features.each(lambda record, rng: {"length": len(record["pitches"])}, fields=["pitches", "song"])  # pyright: ignore
    (batch,) = ms.Loader(Songbook(3, 4), batch_size=4, features=feature, threads=0, order="none")
    lengths: Any = batch["length"]
    assert lengths.tolist() == [3, 4, 5, 6]


def test_records_of_two_kinds_cannot_share_a_batch(traces: ms.Traces):
    with pytest.raises(ValueError, match="kinds"):
        ms.concat([traces, Songbook(0, 3)]).fetch([0, len(traces)])


@pytest.mark.parametrize("shape", [(1 << 16,), (5, 40_000), (7, 3, 11), (0, 4), (4, 0)])
def test_float16_becomes_the_same_float32_as_by_numpy(shape: tuple[int, ...]):
    bits = np.arange(int(np.prod(shape)), dtype=np.uint32).astype(np.uint16).reshape(shape)  # with infinities and NaN
    values = bits.view(np.float16)
    for given in (values, values[..., ::-2], values[::2]):
        assert np.array_equal(as_float32(given), given.astype(np.float32), equal_nan=True)
        target = np.zeros(given.shape, np.float32)
        fixed = given.copy()
        fixed.flags.writeable = False  # as what pyarrow gives
        assign(target, fixed)
        assert np.array_equal(target, given, equal_nan=True)
