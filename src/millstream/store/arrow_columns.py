"""Columns of reads as Arrow arrays: joined, narrowed, and as plain values."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millstream.store.read_batch import ColumnValues


def joined(arrays: Sequence[pa.Array], order: NDArray[np.int64]) -> pa.Array:
    """Arrays one after another, in another order."""
    return pa.concat_arrays([decoded(array) for array in arrays]).take(order)


def decoded(array: pa.Array) -> pa.Array:
    """The values themselves of a dictionary array."""
    return array.dictionary_decode() if isinstance(array, pa.DictionaryArray) else array


def values(array: pa.Array) -> ColumnValues:
    """Integers as an array; texts, and integers with a None among them, as a list."""
    if array.null_count == 0 and pa.types.is_integer(array.type):
        return np.asarray(array.to_numpy(), np.int64)
    return array.to_pylist()


def chunked(arrays: Sequence[pa.Array]) -> pa.ChunkedArray:
    """One column of several files' arrays: integers in the smallest type that holds them all."""
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


def _holds(kind: pa.DataType, value: int) -> bool:
    return -(1 << kind.bit_width - 1) <= value < 1 << kind.bit_width - 1
