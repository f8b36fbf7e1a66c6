"""Batches of records as features get them: columns joined, narrowed, encoded and padded. Knows no kind of record."""

from collections.abc import Collection as Container
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from millstream.core.collection import Collection, Numbers
from millstream.core.memory import empty
from millstream.core.record import Array, Bytes

if TYPE_CHECKING:
    import torch

Column: TypeAlias = "Array | torch.Tensor | Sequence[object]"
"""One value per record: an array where all have the same shape, else a list."""
Floats = NDArray[np.floating]
_ONE_THREAD = 32_767  # torch uses several threads from 32,768 elements on


class Batch(Protocol):
    """Columns of many records, by name, and the numbers of the records.

    `ColumnBatch` is the plain implementation. A kind of record that is more than columns has its own batch type, which
    its `fetch` returns; only the methods below know the difference.
    """

    @property
    def numbers(self) -> Numbers: ...

    @property
    def columns(self) -> Mapping[str, Column]: ...

    def __len__(self) -> int: ...

    def numbered(self, numbers: Numbers) -> Self:
        """The same records under other numbers."""
        ...

    def with_columns(self, columns: Mapping[str, object]) -> Self:
        """With these columns added, or replaced if the names exist."""
        ...

    def narrowed(self, names: Container[str]) -> Self:
        """Only the named fields, as far as fields are separate."""
        ...

    def joined(self, others: Sequence[Self], order: Numbers) -> Self:
        """This batch and the others concatenated, their records reordered; only the columns that all have."""
        ...

    def arrays(self) -> list[Array]:
        """The arrays whose memory it holds."""
        ...

    def padded_fields(self, names: Container[str] | None) -> Mapping[str, object]:
        """Fields that are not columns, as zero-padded arrays with a `<name>_mask`; None: all of them."""
        ...

    def fields_by_record(self) -> Mapping[str, Sequence[object]]:
        """Every field, one value per record."""
        ...


@dataclass(frozen=True, slots=True)
class ColumnBatch:
    """Records that are only columns: stacked if the shapes are equal, else a list."""

    numbers: Numbers
    columns: Mapping[str, Column]

    def __len__(self) -> int:
        return len(self.numbers)

    def numbered(self, numbers: Numbers) -> Self:
        return replace(self, numbers=numbers)

    def with_columns(self, columns: Mapping[str, object]) -> Self:
        return replace(self, columns={**self.columns, **columns})

    def narrowed(self, names: Container[str]) -> Self:
        return replace(self, columns={name: values for name, values in self.columns.items() if name in names})

    def joined(self, others: Sequence[Self], order: Numbers) -> Self:
        numbers = np.concatenate([self.numbers, *(other.numbers for other in others)])[order]
        columns = join_columns([self.columns, *(other.columns for other in others)], order)
        return replace(self, numbers=numbers, columns=columns)

    def arrays(self) -> list[Array]:
        return arrays_of(self.columns)

    def padded_fields(self, names: Container[str] | None) -> Mapping[str, object]:
        return {}

    def fields_by_record(self) -> Mapping[str, Sequence[object]]:
        return cast("Mapping[str, Sequence[object]]", self.columns)


def fetch_batch(collection: Collection, numbers: Numbers, fields: Sequence[str] | None) -> Batch:
    """Records of a collection as features receive them; the batch has the record numbers of the original collection."""
    fetched = collection.fetch(numbers, fields)
    records = collection.record_numbers(numbers)
    if isinstance(fetched, Mapping):
        return ColumnBatch(records, cast("Mapping[str, Column]", fetched))
    return cast(Batch, fetched).numbered(records)


def with_column(fetched: object, name: str, values: object) -> object:
    """The result of `Collection.fetch`, or one record, with another column."""
    if isinstance(fetched, Mapping):
        return {**cast("Mapping[str, object]", fetched), name: values}
    return cast(Batch, fetched).with_columns({name: values})


def join_fetched(fetched: Sequence[object], order: Numbers, *, names: Container[str] | None = None) -> object:
    """The results of `Collection.fetch` of several collections joined and reordered; names=None: all fields."""
    kinds = {dict if isinstance(piece, Mapping) else type(piece) for piece in fetched}
    if len(kinds) > 1:
        raise ValueError("a batch cannot hold records of different kinds; concatenate or mix collections of one kind")
    if kinds == {dict}:
        columns = join_columns(cast("Sequence[Mapping[str, Column]]", fetched), order)
        return {name: values for name, values in columns.items() if names is None or name in names}
    first, *others = cast("Sequence[Batch]", fetched)
    whole = first.joined(others, order) if others else first
    return whole if names is None else whole.narrowed(names)


def join_columns(batches: Sequence[Mapping[str, Column]], order: Numbers) -> dict[str, Column]:
    """The columns that all batches have, concatenated and reordered."""
    first, *others = batches
    names = [name for name in first if all(name in other for other in others)]
    return {name: _join([batch[name] for batch in batches], order) for name in names}


def joined(arrays: Sequence[pa.Array], order: Numbers) -> pa.Array:
    """Concatenated arrays, reordered."""
    return pa.concat_arrays([decoded(array) for array in arrays]).take(order)


def decoded(array: pa.Array) -> pa.Array:
    """The plain values of a dictionary array."""
    return array.dictionary_decode() if isinstance(array, pa.DictionaryArray) else array


def values(array: pa.Array) -> "Numbers | list[object]":
    """Integers as an array; texts, and integers with missing values, as a list."""
    if array.null_count == 0 and pa.types.is_integer(array.type):
        return np.asarray(array.to_numpy(), np.int64)
    return array.to_pylist()


def chunked(arrays: Sequence[pa.Array]) -> pa.ChunkedArray:
    """One column from the arrays of several files: integers in the smallest type that fits them all."""
    if len({array.type for array in arrays}) > 1:
        arrays = [decoded(array) for array in arrays]
    kind = arrays[0].type
    if not pa.types.is_integer(kind):
        return pa.chunked_array(arrays)
    limits = [pc.min_max(array).as_py() for array in arrays if len(array) > array.null_count]
    least, most = min((limit["min"] for limit in limits), default=0), max((limit["max"] for limit in limits), default=0)
    fitting = (small for small in (pa.int8(), pa.int16(), pa.int32()) if _holds(small, least) and _holds(small, most))
    small = next(fitting, kind)
    return pa.chunked_array([array.cast(small) for array in arrays])


def codes_of(column: pa.ChunkedArray) -> tuple[Numbers, list[object]]:
    """The value of every record as an index into the list of distinct values; -1 for None."""
    whole = column.unify_dictionaries().combine_chunks()
    if isinstance(whole, pa.ChunkedArray):  # pyarrow returns this for no rows
        return np.empty(0, np.int64), []
    encoded = whole if isinstance(whole, pa.DictionaryArray) else whole.dictionary_encode()
    assert isinstance(encoded, pa.DictionaryArray)
    codes = encoded.indices.fill_null(-1).to_numpy().astype(np.int64)
    return codes, encoded.dictionary.to_pylist()


def text_codes_of(column: pa.ChunkedArray) -> tuple[Numbers, list[str]]:
    """The same with the values as strings."""
    codes, found = codes_of(column.cast(pa.string()))
    return codes, cast("list[str]", found)


def arrays_of(columns: Mapping[str, Column]) -> list[Array]:
    """The numpy arrays among the columns, including those in lists."""
    found: list[Array] = []
    for column in columns.values():
        values = column if isinstance(column, list) else [column]
        found += [cast(Array, value) for value in values if isinstance(value, np.ndarray)]
    return found


def collate(name: str, values: object, *, pad: bool, numbers: Numbers) -> dict[str, object]:
    """One column of a batch, and `<name>_mask` if it had to be padded."""
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


def stack(arrays: "Sequence[Array | torch.Tensor]") -> "tuple[Array | torch.Tensor, NDArray[np.bool_] | None]":
    """One array with a new first axis, shorter ones padded with zeros.

    The mask is True where there is data; it has the batch axis and the axes that differ, and is None if none do.
    """
    if hasattr(arrays[0], "__torch_function__"):  # often a dtype that numpy lacks: stack its bits
        import torch

        tensors = cast("Sequence[torch.Tensor]", arrays)
        bits = {1: torch.uint8, 2: torch.uint16, 4: torch.int32, 8: torch.int64}[tensors[0].itemsize]
        whole, mask = stack([cast(Array, tensor.view(bits).numpy()) for tensor in tensors])
        back = torch.from_numpy(cast("NDArray[np.uint8]", whole))  # pyright: ignore[reportUnknownMemberType]
        return back.view(tensors[0].dtype), mask
    rows = cast("Sequence[Array]", arrays)
    if len({(row.ndim, row.dtype) for row in rows}) > 1:
        found = ", ".join(sorted({f"{row.dtype} of {row.ndim} axes" for row in rows}))
        raise ValueError(f"only arrays of the same dtype and number of axes can be stacked, found {found}")
    shapes = np.array([row.shape for row in rows], np.int64).reshape(len(rows), rows[0].ndim)
    sizes = shapes.max(axis=0, initial=0)
    ragged = np.flatnonzero((shapes != sizes).any(axis=0)).tolist()
    out = empty((len(rows), *sizes.tolist()), rows[0].dtype)
    for place, row in enumerate(rows):
        out[(place, *map(slice, row.shape))] = row
        for axis in ragged:  # past the end on this axis
            out[(place, *(slice(None),) * axis, slice(row.shape[axis], None))] = 0
    if not ragged:
        return out, None
    mask = np.ones((len(rows), *sizes[ragged].tolist()), np.bool_)
    for place, axis in enumerate(ragged):
        inside: NDArray[np.bool_] = np.arange(int(sizes[axis]))[None, :] < shapes[:, axis : axis + 1]
        mask &= inside.reshape(len(rows), *(-1 if other == place else 1 for other in range(len(ragged))))
    return out, mask


def pad_bytes(name: str, flat: Bytes, offsets: Numbers) -> dict[str, object]:
    """Rows of different lengths, concatenated in `flat`, as a zero-padded rectangle, with a mask if lengths differ."""
    lengths = np.diff(offsets)
    width = int(lengths.max(initial=0))
    if (lengths == width).all():
        return {name: flat[: len(lengths) * width].reshape(len(lengths), width)}
    # Rows that run on into the next one, with that part set to zero: 70 ns per short read, and 180 through the mask.
    rows = sliding_window_view(np.append(flat, np.zeros(width, np.uint8)), width)[offsets[:-1]]
    mask = np.arange(width) < lengths[:, None]
    out = np.multiply(rows, mask.view(np.uint8), out=empty(rows.shape, np.uint8))
    return {name: out, f"{name}_mask": mask}


def _join(pieces: Sequence[Column], order: Numbers) -> Column:
    if len(pieces) == 1:
        return pieces[0]
    arrays = [piece for piece in pieces if isinstance(piece, np.ndarray)]
    if len(arrays) == len(pieces) and len({(piece.dtype, piece.shape[1:]) for piece in arrays}) == 1:
        return np.concatenate(arrays)[order]
    rows = [row for piece in pieces for row in piece]
    return [rows[place] for place in order.tolist()]


def _holds(kind: pa.DataType, value: int) -> bool:
    return -(1 << kind.bit_width - 1) <= value < 1 << kind.bit_width - 1


def _kind(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, np.ndarray) or hasattr(value, "__torch_function__"):
        return "array"
    return "number" if isinstance(value, bool | int | float | np.generic) else "other"


def as_floats(states: "Array | torch.Tensor") -> Floats:
    """As a numpy array; float32 for a dtype that numpy lacks."""
    if hasattr(states, "__torch_function__"):
        return cast("torch.Tensor", states).float().numpy()
    return cast(Floats, states)


def as_float32(values: Array) -> NDArray[np.float32]:
    """As float32, or as it is."""
    if values.dtype == np.float32:
        return cast("NDArray[np.float32]", values)
    out = np.empty(values.shape, np.float32)
    assign(out, values)
    return out


def assign(target: Array, values: Array) -> None:
    """`target[...] = values`. float16 is converted by torch, ten times faster than by numpy."""
    for_torch = values.size and values.flags.writeable and min(values.strides) >= 0  # else it warns or fails
    if (values.dtype, target.dtype) != (np.float16, np.float32) or not for_torch:
        target[...] = values
        return
    import torch

    into, given = torch.from_numpy(target), torch.from_numpy(values)  # pyright: ignore[reportUnknownMemberType]
    rows = max(_ONE_THREAD // given[0].numel(), 1)
    for start in range(0, len(given), rows):  # more at once would start threads of torch, which the net needs
        into[start : start + rows].copy_(given[start : start + rows])
