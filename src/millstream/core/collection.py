"""What a record is (named fields: tensors or Arrow scalars), and what a collection is: records by number.

This is all the engine knows about data. The imports inside methods avoid a cycle: what they return is a collection.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, cast

import google_crc32c
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.errors import SchemaMismatch

if TYPE_CHECKING:
    import torch

    from millstream.core.features import Feature
    from millstream.core.subset import Subset
    from millstream.core.torch_data import RecordDataset, RecordStream


Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Medium:
    """How records lie on disk, for choosing an order."""

    num_bytes: int
    """Total size of the records as they are read: decoded, if they are compressed."""
    run_bytes: int
    """How much has to be read, or is worth reading, for one record."""
    is_random: bool
    """Whether a record can be read without its neighbours."""


class Collection(ABC):
    """Records by number. Safe to use from threads, after fork, and pickled into other processes.

    This is all that the loader, splits and features need, so you can train on your own subclass.

    >>> [isinstance(records, ms.Collection) for records in (traces, reads, traces.subset([3, 1]))]
    [True, True, True]
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, number: int) -> object:
        """One record: a dict of fields, or the record type of its kind."""

    @abstractmethod
    def fetch(self, numbers: Sequence[int] | Numbers, fields: Sequence[str] | None = None) -> object:
        """Columns of many records at once: a dict of columns, or the batch type of its kind.

        >>> columns = traces.fetch([3, 1, 4], ["question", "hidden"])
        """

    @property
    @abstractmethod
    def field_names(self) -> list[str]:
        """The fields that `fetch` takes."""

    @abstractmethod
    def column(self, name: str) -> pa.ChunkedArray:
        """One scalar field of every record, without reading its tensors or sequences."""

    @abstractmethod
    def sizes(self, numbers: Numbers, fields: Sequence[str]) -> Numbers:
        """Bytes that `fetch` needs for each record."""

    @property
    @abstractmethod
    def medium(self) -> Medium:
        """How the records lie on disk, which decides `order="auto"`."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Sixteen hex digits that change when the records, or their numbers, do."""

    @abstractmethod
    def within(self, memory: int) -> Self:
        """The same records, with at most `memory` bytes of their files mapped or decoded."""

    @property
    def default_key(self) -> str | None:
        """Records with equal values of this field belong together in a split; None: every record is independent."""
        return None

    @property
    def labels_file(self) -> Path | None:
        """The Parquet file of labels next to the records, if there is one; `ms.labelled` joins it."""
        return None

    @property
    def lineage(self) -> str:
        """Which splits this is a subset of, so that splitting it again is an independent draw."""
        return ""

    def in_epoch(self, epoch: int) -> Self:
        """The collection in this epoch; only mixtures change."""
        return self

    def record_numbers(self, numbers: Numbers) -> Numbers:
        """The numbers these records have in the collection this one was taken from."""
        return numbers

    def resolved(self, numbers: Numbers) -> "tuple[Collection, Numbers]":
        """The same records in the underlying collection, if this one only renumbers them: numbers are mapped once."""
        return self, numbers

    def will_need(self, first: Numbers, last: Numbers) -> None:
        """Start reading the records from `first[i]` to `last[i]`, for every i, from disk if that helps."""
        return

    def release(self, first: Numbers, last: Numbers) -> None:
        """The records passed to `will_need` are no longer needed."""
        return

    def subset(self, numbers: Sequence[int] | Numbers) -> "Subset":
        """Some of the records, in the order given.

        >>> few = traces.subset([3, 1, 4])
        """
        from millstream.core.subset import subset

        return subset(self, numbers)

    def dataset(
        self, features: "Feature | Sequence[Feature] | None" = None, *, seed: int = 0, memory: int | str = "2GB"
    ) -> "RecordDataset":
        """A map-style `torch.utils.data.Dataset` for the stock DataLoader, its samplers, Lightning and Accelerate.

        The DataLoader's default collation gives the same batches as `ms.Loader`, each fetched in one call.

        >>> dataset = traces.dataset(ms.features.layers(token="last"))
        >>> loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2)
        """
        from millstream.core.torch_data import RecordDataset

        return RecordDataset(self, features, seed=seed, memory=memory)

    def stream(
        self,
        features: "Feature | Sequence[Feature] | None" = None,
        *,
        batch_size: int | None = None,
        seed: int = 0,
        order: Literal["auto", "exact", "window", "none"] = "auto",
        memory: int | str = "2GB",
        rank: int | None = None,
        world: int | None = None,
        drop_last: bool = False,
    ) -> "RecordStream":
        """A `torch.utils.data.IterableDataset` that shuffles and splits an epoch over ranks and workers.

        With `batch_size` it yields whole batches, for `DataLoader(stream, batch_size=None)`, in the same order for any
        number of workers. Without it, it yields records. `set_epoch` sets the order of the next epoch; Accelerate calls
        it, Lightning does not (call it in `on_train_epoch_end`). Accelerate distributes the batches of a stream to its
        processes itself: pass `rank=0, world=1` there.

        >>> stream = traces.stream(ms.features.layers(token="last"), batch_size=32, seed=7)
        >>> loader = DataLoader(stream, batch_size=None, num_workers=2)
        """
        from millstream.core.torch_data import RecordStream

        return RecordStream(
            self,
            features,
            batch_size=batch_size,
            seed=seed,
            order=order,
            memory=memory,
            rank=rank,
            world=world,
            drop_last=drop_last,
        )


# What a record is: named fields, each a tensor or an Arrow scalar. Knows dtypes and axes; knows nothing of files.
#
# A schema is a dict from field name to its kind: a `Tensor` (dtype and axis names; the shape is free) or an Arrow
# type (text, number, list, ...). `pa.null()` means "only None seen so far": the first value decides.


Array = NDArray[np.generic]
Bytes = NDArray[np.uint8]

# Dtypes torch has and numpy lacks are stored as the bits of an unsigned integer and come back as torch tensors.
TORCH_ONLY = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


@dataclass(frozen=True)
class Tensor:
    """A tensor field: its dtype by name and its axes by name, such as `float16[layer, token, dim]`."""

    dtype: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(self.axes)}]"

    @property
    def itemsize(self) -> int:
        return bits_dtype(self.dtype).itemsize


Kind = Tensor | pa.DataType
Schema = dict[str, Kind]


@dataclass(frozen=True)
class RawTensor:
    """One tensor value as flat bytes in C order."""

    kind: Tensor
    shape: tuple[int, ...]
    data: Bytes


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
    if old == new or (isinstance(new, pa.DataType) and pa.types.is_null(new)):
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
    """The tensor over these bytes, without a copy: a numpy array, or a torch tensor for a dtype numpy lacks."""
    array = data.view(bits_dtype(kind.dtype)).reshape(shape)
    if kind.dtype not in TORCH_ONLY:
        return array
    import torch

    return torch.from_numpy(array).view(getattr(torch, kind.dtype))  # pyright: ignore[reportUnknownMemberType]


def plain(value: object) -> object:
    """Numpy scalars inside lists and dicts as the Python values Arrow takes."""
    if isinstance(value, np.generic):
        return cast(object, value.item())
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast(Sequence[object], value)]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in cast(dict[str, object], value).items()}
    return value


def crc32c(data: Bytes | bytes | pa.Buffer, crc: int = 0) -> int:
    """CRC-32C of the bytes, continuing from `crc`. Releases the GIL; 20 GB/s."""
    # The C function takes objects that export a plain read-only buffer; numpy arrays and bytes do, memoryview does not.
    return google_crc32c.extend(crc, np.asarray(memoryview(data)) if isinstance(data, pa.Buffer) else data)


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
