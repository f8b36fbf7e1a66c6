"""The only globals a pickle of traces may reference: stand-ins for those of numpy and torch that trust no input."""

import pickle
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeGuard, cast

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.generic]
DType = np.dtype[np.generic]


class Refused(Exception):
    """The pickle contains something other than data. Nothing was run."""


Fetch = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True, slots=True)  # a file may have 25,000 of them
class Storage:
    """A flat buffer that tensors are views of; `fetch(first, count)` reads the elements that one tensor covers."""

    dtype: torch.dtype
    numel: int
    fetch: Fetch


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that is still in its file. `read` loads it; `stored[i]` indexes its first axis without reading."""

    storage: Storage
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __getitem__(self, number: int) -> "StoredTensor":
        first = self.first + range(self.shape[0])[number] * self.strides[0]
        return StoredTensor(self.storage, first, self.shape[1:], self.strides[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    @property
    def span(self) -> int:
        """The number of elements from the first to the last that the tensor covers."""
        steps = zip(self.shape, self.strides, strict=True)
        return 0 if 0 in self.shape else 1 + sum((n - 1) * stride for n, stride in steps)

    def read(self) -> torch.Tensor:
        return self.storage.fetch(self.first, self.span).as_strided(self.shape, self.strides)


def _encode(text: str, encoding: str) -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise Refused("the file calls the global '_codecs.encode' with an encoding other than latin1")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    return b""


def _ordered_dict() -> OrderedDict[object, object]:
    return OrderedDict()


def _dtype(spec: str, align: object = False, copy: object = True) -> DType:
    if type(spec) is not str or not re.fullmatch(r"[biufcSU][0-9]{1,9}", spec):
        raise Refused(f"the file calls the global 'numpy.dtype' with {brief(spec)}")
    return np.dtype(spec, copy=True)  # a copy, because set_byte_order changes it in place


def set_byte_order(dtype: DType, state: object) -> None:
    # (3, order, subarray, names, fields, size, alignment, flags). numpy trusts even the flags, so only the order is
    # taken from the file; the rest comes from a dtype of our own.
    version, order, *rest = cast(tuple[object, ...], state)
    orders = "<|=" if dtype.kind == "U" else "<|=>"
    if version != 3 or type(order) is not str or order not in orders or rest[:3] != [None, None, None]:
        raise Refused("the file gives the global 'numpy.dtype' fields or flags")
    own_state = cast(tuple[object, ...], dtype.newbyteorder(cast(Literal["<"], order)).__reduce__())[2]
    dtype.__setstate__(own_state)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def _blank_array(kind: object, shape: object, code: object) -> Array:
    if kind is not _NDARRAY or shape != (0,) or code != b"b":
        raise Refused(f"the file builds an array of type {brief(kind)}")
    return np.empty(0, np.int8)


def fill_array(array: Array, state: object) -> None:
    _version, shape, dtype, is_fortran, data = cast(tuple[object, ...], state)
    if array.size or array.base is not None or type(is_fortran) is not bool or type(data) is not bytes:
        raise Refused("the file tries to fill an array with something other than bytes")
    _check_array(shape, dtype, data)
    array.__setstate__((1, shape, dtype, is_fortran, data))  # pyright: ignore[reportArgumentType]


def _array_of_buffer(
    data: bytes | bytearray, dtype: DType, shape: tuple[int, ...], order: str, axes: tuple[int, ...] | None = None
) -> Array:
    if type(data) not in (bytes, bytearray):
        raise Refused(f"the file builds an array from {brief(data)}")
    _check_array(shape, dtype, data)
    flat = np.frombuffer(data, dtype)
    if order == "K" and axes is not None:
        return flat.reshape(shape).transpose(axes)
    return flat.reshape(shape, order="F" if order == "F" else "C")


def _scalar(dtype: DType, data: bytes) -> np.generic:
    if type(data) is not bytes:
        raise Refused(f"the file builds a number from {brief(data)}")
    _check_array((), dtype, data)
    return np.frombuffer(data, dtype)[0]


def _check_array(shape: object, dtype: object, data: bytes | bytearray) -> None:
    if not isinstance(dtype, np.dtype) or not are_counts(shape):
        raise pickle.UnpicklingError("an array without a dtype or a shape")
    if prod(shape) * dtype.itemsize != len(data):
        raise pickle.UnpicklingError(f"an array of shape {shape} and dtype {dtype} cannot have {len(data):,} bytes")
    # numpy does not check, and Python raises SystemError when it converts them to str.
    if dtype.kind == "U" and np.frombuffer(data, "<u4").max(initial=0) > sys.maxunicode:
        raise pickle.UnpicklingError("a string with invalid code points")


def stored_tensor(storage: object, first: object, shape: object, strides: object, *_: object) -> StoredTensor:
    """Stands in for the function that rebuilds a tensor, without reading it; requires_grad and hooks are ignored."""
    if not isinstance(storage, Storage) or not (is_count(first) and are_counts(shape) and are_counts(strides)):
        raise pickle.UnpicklingError("a tensor without a storage or a shape")
    if len(shape) != len(strides):
        raise pickle.UnpicklingError("a tensor whose shape and strides differ in length")
    stored = StoredTensor(storage, first, shape, strides)
    if first + stored.span > storage.numel:
        raise pickle.UnpicklingError("a tensor larger than its storage")
    return stored


def _tensor(*args: object) -> torch.Tensor:
    return stored_tensor(*args).read()


class NDArrayType:
    """Stands in for numpy.ndarray, which a pickle may reference but not call."""


_NDARRAY = NDArrayType()

# All that a pickle can reference. numpy 2 renamed numpy.core; protocol 2 still uses Python 2's name, __builtin__.
GLOBALS: dict[tuple[str, str], object] = {
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): _no_bytes,
    ("builtins", "bytes"): _no_bytes,
    ("collections", "OrderedDict"): _ordered_dict,
    ("numpy", "dtype"): _dtype,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy.core.multiarray", "_reconstruct"): _blank_array,
    ("numpy._core.multiarray", "_reconstruct"): _blank_array,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("numpy.core.numeric", "_frombuffer"): _array_of_buffer,
    ("numpy._core.numeric", "_frombuffer"): _array_of_buffer,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch", "BoolStorage"): torch.bool,
    ("torch", "ByteStorage"): torch.uint8,
    ("torch", "CharStorage"): torch.int8,
    ("torch", "ShortStorage"): torch.int16,
    ("torch", "IntStorage"): torch.int32,
    ("torch", "LongStorage"): torch.int64,
    ("torch", "HalfStorage"): torch.float16,
    ("torch", "BFloat16Storage"): torch.bfloat16,
    ("torch", "FloatStorage"): torch.float32,
    ("torch", "DoubleStorage"): torch.float64,
    ("torch", "ComplexFloatStorage"): torch.complex64,
    ("torch", "ComplexDoubleStorage"): torch.complex128,
}


def is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 63


def are_counts(value: object) -> TypeGuard[tuple[int, ...]]:
    items = cast(tuple[object, ...], value)
    return type(value) is tuple and len(items) <= 64 and all(map(is_count, items))


def brief(value: object) -> str:
    """A short description of a value, without calling any of its methods."""
    for (module, name), known in GLOBALS.items():
        if known is value:
            return f"the global '{module}.{name}'"
    return repr(value[:80]) if isinstance(value, str | bytes) else f"a {type(value).__name__}"
