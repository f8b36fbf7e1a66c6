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


def narrow(array: pa.Array) -> pa.Array:
    """Integers in the smallest type that holds them."""
    if not pa.types.is_integer(array.type) or len(array) == array.null_count:
        return array
    least, most = pc.min_max(array).as_py().values()
    for kind in (pa.int8(), pa.int16(), pa.int32()):
        if -(1 << kind.bit_width - 1) <= least and most < 1 << kind.bit_width - 1:
            return array.cast(kind)
    return array
