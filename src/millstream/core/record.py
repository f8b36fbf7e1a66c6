"""What a record is: named fields, each a tensor or an Arrow scalar. Knows dtypes and axes; knows nothing of files.

A schema is a dict from field name to its kind: a `Tensor` (dtype and axis names; the shape is free) or an Arrow type
(text, number, list, ...). `pa.null()` means "only None seen so far": the first value decides.
"""

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, cast

import google_crc32c
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.errors import SchemaMismatch

if TYPE_CHECKING:
    import torch

Array = NDArray[np.generic]
Bytes = NDArray[np.uint8]
Crcs = NDArray[np.uint32]

# Dtypes torch has and numpy lacks are stored as the bits of an unsigned integer and come back as torch tensors.
TORCH_ONLY = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
_VIEWS = (pa.Buffer, memoryview)
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, lowest bit first


@dataclass(frozen=True)
class Tensor:
    """A tensor field: its dtype by name and its axes by name, such as `float16[layer, token, dim]`.

    `sliced` names the axes along which it is stored in slices, the outermost first, if not along the first axis.
    """

    dtype: str
    axes: tuple[str, ...]
    sliced: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(self.axes)}]"

    @property
    def itemsize(self) -> int:
        return bits_dtype(self.dtype).itemsize

    @property
    def order(self) -> list[int]:
        """The axes by number in the order in which they are stored."""
        first = [self.axes.index(name) for name in self.sliced]
        return [*first, *(axis for axis in range(len(self.axes)) if axis not in first)]

    def without(self, dropped: Container[int]) -> "Tensor":
        """The kind of this tensor at one index of some axes."""
        axes = tuple(name for axis, name in enumerate(self.axes) if axis not in dropped)
        return Tensor(self.dtype, axes, tuple(name for name in self.sliced if name in axes))


Kind = Tensor | pa.DataType
Schema = dict[str, Kind]


@dataclass(frozen=True)
class RawTensor:
    """One tensor value as flat bytes in C order."""

    kind: Tensor
    shape: tuple[int, ...]
    data: Bytes


@cache
def bits_dtype(dtype: str) -> "np.dtype[np.generic]":
    """The numpy dtype that holds the bits of `dtype`."""
    return np.dtype(TORCH_ONLY.get(dtype, dtype))


def parse_schema(schema: Mapping[str, str | Tensor | pa.DataType] | None) -> Schema:
    """What a user writes, `{"hidden": "float16[layer, token, dim]", "score": "float64"}`, as a schema."""
    return {name: _parse_kind(name, kind) for name, kind in (schema or {}).items()}


def infer_schema(record: Mapping[str, object], given: Schema) -> Schema:
    """The record's fields in their order, with the kinds in `given`; other kinds are inferred from the values."""
    for name in given:
        if name not in record:
            raise SchemaMismatch(f"field {name!r}: in the given schema, but the first record has no such field")
    for name in record:
        _check_name(name)
    return {name: given.get(name) or infer_kind(name, value) for name, value in record.items()}


def infer_kind(name: str, value: object) -> Kind:
    """The kind of one value. Inferred tensors of three or more axes are taken to be [layer, ...]."""
    _check_name(name)
    raw = as_tensor(name, value)
    if raw is not None:
        return raw.kind
    try:
        return pa.array([plain(value)]).type
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        found = f"{type(value).__name__} ({error})"
        raise SchemaMismatch(f"field {name!r}: expected a tensor, number, text or list, found {found}") from None


def refine(old: Kind, new: Kind) -> Kind | None:
    """`old` with its unknown (null) types filled in from `new`, or None if they are incompatible."""
    if are_alike(old, new) or (isinstance(new, pa.DataType) and pa.types.is_null(new)):
        return old
    if isinstance(old, Tensor) or isinstance(new, Tensor):
        unknown = isinstance(old, pa.DataType) and pa.types.is_null(old)
        return new if unknown else None
    if pa.types.is_null(old):
        return new
    if pa.types.is_list(old) and pa.types.is_list(new):
        inner = refine(old.value_type, new.value_type)
        return pa.list_(inner) if isinstance(inner, pa.DataType) else None
    if pa.types.is_struct(old) and pa.types.is_struct(new) and {f.name for f in old} == {f.name for f in new}:
        kinds = [refine(a.type, new.field(a.name).type) for a in old]
        if all(isinstance(kind, pa.DataType) for kind in kinds):
            return pa.struct([(f.name, cast(pa.DataType, kind)) for f, kind in zip(old, kinds, strict=True)])
    return None


def are_alike(one: Kind | None, other: Kind) -> bool:
    """Whether values of one kind are values of the other; tensors may be stored in different slices."""
    return one == other or (
        isinstance(one, Tensor) and isinstance(other, Tensor) and (one.dtype, one.axes) == (other.dtype, other.axes)
    )


def as_tensor(name: str, value: object) -> RawTensor | None:
    """The flat bytes of a numpy array or torch tensor (copied only when not contiguous on the CPU), else None."""
    if hasattr(value, "__torch_function__"):
        import torch

        tensor = cast("torch.Tensor", value).detach()
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or (dtype not in TORCH_ONLY and not _is_numeric(dtype)):
            raise SchemaMismatch(
                f"field {name!r}: expected a dense tensor of a supported dtype, found {tensor.layout} {dtype}"
            )
        tensor = tensor.resolve_conj().resolve_neg().cpu()
        shape = tuple(tensor.shape)
        bits = tensor.view(getattr(torch, TORCH_ONLY[dtype])) if dtype in TORCH_ONLY else tensor
        data = np.ascontiguousarray(bits.numpy()).reshape(-1).view(np.uint8)
    elif isinstance(value, np.ndarray):
        array = cast(Array, value)
        dtype, shape = _dtype_name(array.dtype), array.shape
        if array.dtype.kind not in "biufc" and dtype not in TORCH_ONLY:
            raise SchemaMismatch(
                f"field {name!r}: expected a numeric array, found dtype {array.dtype}; give texts as a list of str"
            )
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    else:
        return None
    axes = tuple(f"axis{i}" for i in range(len(shape)))
    if len(axes) >= 3:
        axes = ("layer", *axes[1:])
    return RawTensor(Tensor(dtype, axes), shape, cast(Bytes, data))


def from_bytes(kind: Tensor, shape: Sequence[int], data: Bytes) -> "Array | torch.Tensor":
    """The tensor over these bytes, without a copy: a numpy array, or a torch tensor for a dtype numpy lacks.

    `shape` may have more axes than the kind, before its own.
    """
    array = data.view(bits_dtype(kind.dtype))
    if kind.sliced:
        more = len(shape) - len(kind.axes)
        order = [*range(more), *(more + axis for axis in kind.order)]
        array = array.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))
    else:
        array = array.reshape(shape)
    if kind.dtype not in TORCH_ONLY:
        return array
    import torch

    return torch.from_numpy(array).view(getattr(torch, kind.dtype))  # pyright: ignore[reportUnknownMemberType]


def in_order(value: object, order: Sequence[int]) -> object:
    """A numpy array or torch tensor with its axes in this order, without a copy; another value as it is."""
    if isinstance(value, np.ndarray):
        array = cast(Array, value)
        return array.transpose(order) if array.ndim == len(order) else array
    tensor = cast("torch.Tensor", value)
    return tensor.permute(*order) if hasattr(value, "__torch_function__") and tensor.ndim == len(order) else value


def plain(value: object) -> object:
    """Numpy scalars inside lists and dicts as the Python values Arrow takes."""
    if isinstance(value, np.generic):
        return cast(object, value.item())
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast(Sequence[object], value)]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in cast(dict[str, object], value).items()}
    return value


def crc32c(data: Bytes | bytes | memoryview | pa.Buffer, crc: int = 0) -> int:
    """CRC-32C of the bytes, continuing from `crc`. Releases the GIL; 20 GB/s."""
    # The C function takes objects that export a plain read-only buffer; numpy arrays and bytes do, memoryview does not.
    plain = np.asarray(memoryview(data)) if isinstance(data, _VIEWS) else data
    return google_crc32c.extend(crc, plain)


def joined_crc32c(crcs: Crcs, follow: NDArray[np.int64]) -> Crcs:
    """CRC-32C of the concatenated pieces of each row: `crcs` [rows, pieces], each with the bytes that `follow` it.

    A CRC is linear: the CRC of the whole is the XOR of those of the pieces, each shifted by the bytes that follow it.
    """
    moved = crcs.copy()
    for bit in range(int(follow.max(initial=0)).bit_length()):
        tables = _shift_tables(bit)
        shifted = tables[0][moved & 255]
        for byte in (1, 2, 3):
            shifted ^= tables[byte][moved >> np.uint32(8 * byte) & 255]
        moved = np.where(follow >> bit & 1, shifted, moved)
    return np.bitwise_xor.reduce(moved, axis=1)


def _check_name(name: str) -> None:
    if not name or name.startswith("_"):
        raise SchemaMismatch(f"field {name!r}: names must not be empty or start with '_', which is reserved")


def _is_numeric(dtype: str) -> bool:
    try:
        return np.dtype(dtype).kind in "biufc"
    except TypeError:
        return False


@cache
def _dtype_name(dtype: "np.dtype[np.generic]") -> str:
    return dtype.name  # numpy builds it on every call


def _parse_kind(name: str, kind: str | Tensor | pa.DataType) -> Kind:
    if not isinstance(kind, str):
        return kind
    try:
        if match := re.fullmatch(r"(\w+)\[([\w\s,]*)\]", kind):
            dtype = match[1] if match[1] in TORCH_ONLY else np.dtype(match[1]).name
            if not (dtype in TORCH_ONLY or _is_numeric(dtype)):
                raise ValueError
            return Tensor(dtype, tuple(axis.strip() for axis in match[2].split(",") if axis.strip()))
        if match := re.fullmatch(r"list<(.+)>", kind):
            inner = _parse_kind(name, match[1])
            if isinstance(inner, pa.DataType):
                return pa.list_(inner)
        return pa.type_for_alias(kind)
    except (TypeError, ValueError):
        raise SchemaMismatch(
            f"field {name!r}: {kind!r} is not a type; write 'float16[layer, token, dim]' for a tensor, "
            "or an Arrow type such as 'string', 'int64', 'list<string>'"
        ) from None


@cache
def _shift_tables(bit: int) -> Crcs:
    """[4, 256]: the effect of 2^bit appended zero bytes on a CRC, by the value of each of its bytes."""
    columns = _columns(bit + 3)
    values = np.arange(256, dtype=np.uint32)
    tables = np.zeros((4, 256), np.uint32)
    for place in range(32):
        tables[place // 8] ^= np.where(values >> np.uint32(place % 8) & 1, columns[place], np.uint32(0))
    return tables


@cache
def _columns(power: int) -> Crcs:
    """The effect of 2^power appended zero bits on each bit of a CRC."""
    if power == 0:
        return np.array([_POLYNOMIAL, *(1 << place for place in range(31))], np.uint32)
    half = _columns(power - 1)
    out = np.zeros(32, np.uint32)
    for place in range(32):
        out ^= np.where(half >> np.uint32(place) & 1, half[place], np.uint32(0))
    return out
