"""The restricted unpickler: pickle bytes -> plain data and tensors, without running anything from the file.

A pickle is a program for a small stack machine. This machine has only the opcodes that lists, dicts, numbers, strings
and tensors need, and may call only the functions in `GLOBALS`, which are our own and check their arguments.
"""

import pickle
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from types import FunctionType
from typing import ClassVar, Literal, NoReturn, TypeGuard, cast

import numpy as np
import torch
from numpy.typing import NDArray

from millstream.classic.limits import MEASURED_OBJECTS, Input

Array = NDArray[np.generic]
DType = np.dtype[np.generic]
Trace = dict[str, object]

NESTED_FILE = ("torch.storage", "_load_from_bytes")  # a tensor in a plain pickle is a whole torch file


class Refused(Exception):
    """The pickle contains something other than data. Nothing was run."""


Fetch = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True, slots=True)  # a file may have 25,000 of them
class Storage:
    """A flat buffer that tensors are views of; `fetch(first, count)` reads the elements that one tensor covers."""

    dtype: torch.dtype
    numel: int
    fetch: Fetch
    spend: Callable[[int], None]  # called with the size of every tensor that is read

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


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
        self.storage.spend(max(self.span, prod(self.shape)) * self.dtype.itemsize)  # strides of 0 repeat elements
        return self.storage.fetch(self.first, self.span).as_strided(self.shape, self.strides)


# (dtype, key, number of elements) -> the storage that a torch file keeps outside the pickle
FindStorage = Callable[[torch.dtype, str, int], Storage]


# Private, but the only unpickler with a hook for each opcode: `pickle.Unpickler` is C and loads a whole file at once,
# and a stack machine of our own would repeat hundreds of lines. tests/test_private_modules.py fails if Python
# changes it.
class Unpickler(pickle._Unpickler):  # pyright: ignore[reportPrivateUsage]
    """The standard library's pure-Python unpickler, cut down to data. `load()` returns the pickled object."""

    # Set by the base class, which has no stubs for them. `append` is always `stack.append`.
    stack: list[object]
    metastack: list[list[object]]
    memo: dict[int, object]
    append: Callable[[object], None]
    pop_mark: Callable[[], list[object]]

    handlers: ClassVar[dict[bytes, Callable[["Unpickler"], None]]]

    def __init__(self, source: Input, find_storage: FindStorage | None = None) -> None:
        super().__init__(source.file)
        self.source = source
        self.find_storage = find_storage
        # A short read needs no check of its own: the next opcode is then missing, before anything is yielded.
        self.read, self.readline = source.file.read, source.readline
        self.stack, self.metastack, self.memo = [], [], {}
        self.append = self.stack.append
        self.ready: list[Trace] = []
        self.value: object = None
        self.keeps_all = True  # whether everything read so far is still in memory

    def load(self) -> object:
        for _ in self.run():
            pass
        return self.value

    def run(self) -> Iterator[Trace]:
        """Execute the pickle, yielding what the handlers put into `ready` as soon as it is there."""
        read, handlers, ready = self.read, self.handlers, self.ready
        max_objects = self.source.max_objects
        num_objects = 0  # an upper bound: each opcode makes at most one
        check_at = min(max_objects, MEASURED_OBJECTS)
        while (opcode := read(1)) in handlers:
            handlers[opcode](self)
            num_objects += 1
            if num_objects > check_at:
                self.source.check_objects(num_objects)
                check_at = min(max_objects, num_objects + MEASURED_OBJECTS)
            while ready:
                yield ready.pop(0)  # no reference stays here: the caller may free it
                if not self.keeps_all:
                    num_objects, check_at = 0, min(max_objects, MEASURED_OBJECTS)
        if not opcode:
            raise EOFError("the file ends too early")
        if opcode != pickle.STOP:
            raise pickle.UnpicklingError(f"opcode {opcode!r} is not one that trace files use")
        if self.metastack or len(self.stack) != 1:
            raise pickle.UnpicklingError("it ends in the middle of an object")
        self.value = self.stack.pop()

    def begins_trace_list(self) -> bool:
        """Whether a list pushed now is the pickled object itself, or its item "traces"."""
        if not self.metastack and not self.stack:
            return True
        # The top-level dict is below "traces" on the stack (one key), or below the mark that opened its items.
        items = self.stack[1:] if not self.metastack else self.stack
        below = self.stack[:1] if not self.metastack else self.metastack[0]
        at_top = len(self.metastack) < 2 and len(below) == 1 and type(below[0]) is dict
        key = items[-1] if len(items) % 2 else None
        return at_top and isinstance(key, str) and key == "traces"

    # -- what a malicious file would use

    def find_class(self, module: str, name: str) -> object:
        found = GLOBALS.get((module, name))
        # Torch files have their own storages. Files nested in files would be read 2^depth times.
        if found is None or ((module, name) == NESTED_FILE and self.find_storage is not None):
            raise Refused(f"the file refers to the global {f'{module}.{name}'[:200]!r}")
        return found

    def load_inst(self) -> NoReturn:
        module, name = str(self.readline()[:-1], "latin1"), str(self.readline()[:-1], "latin1")
        raise Refused(f"the file creates an instance of the global {f'{module}.{name}'!r}")

    def get_extension(self, code: int) -> NoReturn:
        raise Refused(f"the file refers to the global registered with copyreg as extension {code}")

    def persistent_load(self, pid: object) -> Storage:
        if self.find_storage is None:
            raise Refused("the file refers to an object by a persistent id")
        # torch: ("storage", storage type, key, device it was on, number of elements[, None])
        if isinstance(pid, tuple):
            kind, dtype, key, _device, numel, *view = cast(tuple[object, ...], pid)
            if (
                kind == "storage"
                and isinstance(dtype, torch.dtype)
                and isinstance(key, str)
                and _is_count(numel)
                and view in ([], [None])
            ):
                return self.find_storage(dtype, key, numel)
        raise pickle.UnpicklingError("a persistent id that is not a torch storage")

    def load_reduce(self) -> None:
        args = self.stack.pop()
        build = self.stack[-1]
        if type(build) is not FunctionType or type(args) is not tuple:
            raise Refused(f"the file tries to call {brief(build)}")
        built = build(*cast(tuple[object, ...], args))
        # A call of a few bytes can copy an argument of any size again and again.
        self.source.spend(len(built) if type(built) is bytes else cast(int, getattr(built, "nbytes", 0)))
        self.stack[-1] = built

    def load_build(self) -> None:
        state = self.stack.pop()
        built = self.stack[-1]
        if type(built) is np.ndarray:
            _fill_array(cast(Array, built), state)
            self.source.spend(cast(Array, built).nbytes)
        elif isinstance(built, np.dtype):
            _set_byte_order(cast(DType, built), state)
        else:
            raise Refused(f"the file tries to set the state of {brief(built)}")

    # -- containers: only the plain ones, and only keys whose hash cannot be made to misbehave

    def load_append(self) -> None:
        item = self.stack.pop()
        _plain_list(self.stack[-1]).append(item)

    def load_appends(self) -> None:
        items = self.pop_mark()
        _plain_list(self.stack[-1]).extend(items)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _set_items(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        _set_items(self.stack[-1], items)

    # -- what can be large

    def load_binbytes(self) -> None:
        self.append(self.source.read(int.from_bytes(self.read(4), "little")))

    def load_binbytes8(self) -> None:
        self.append(self.source.read(int.from_bytes(self.read(8), "little")))

    def load_bytearray8(self) -> None:
        self.append(self.source.read_large(int.from_bytes(self.read(8), "little")))

    def load_binunicode(self) -> None:
        self.append(str(self.source.read(int.from_bytes(self.read(4), "little")), "utf-8", "surrogatepass"))

    def load_binunicode8(self) -> None:
        self.append(str(self.source.read(int.from_bytes(self.read(8), "little")), "utf-8", "surrogatepass"))

    def load_frame(self) -> None:
        self.read(8)  # frames only tell how much to read ahead


def handlers_of(machine: type[Unpickler], more: str = "") -> dict[bytes, Callable[[Unpickler], None]]:
    """The opcodes that protocols 2 to 5 use for data, those that `machine` refuses by name, and `more`."""
    opcodes = (
        "PROTO FRAME MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE "
        "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 "
        "TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS GLOBAL STACK_GLOBAL REDUCE BUILD BINPUT "
        "LONG_BINPUT MEMOIZE BINGET LONG_BINGET INST EXT1 EXT2 EXT4 PERSID BINPERSID"
    )
    codes = [cast(bytes, getattr(pickle, name)) for name in f"{opcodes} {more}".split()]
    return {code: getattr(machine, machine.dispatch[code[0]].__name__) for code in codes}


Unpickler.handlers = handlers_of(Unpickler)


# -- all that a pickle can reference: stand-ins for functions of numpy and torch, which trust no argument


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
    return np.dtype(spec, copy=True)  # a copy, because _set_byte_order changes it in place


def _set_byte_order(dtype: DType, state: object) -> None:
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


def _fill_array(array: Array, state: object) -> None:
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
    if not isinstance(dtype, np.dtype) or not _are_counts(shape):
        raise pickle.UnpicklingError("an array without a dtype or a shape")
    if prod(shape) * dtype.itemsize != len(data) or (not dtype.itemsize and prod(shape)):
        raise pickle.UnpicklingError(f"an array of shape {shape} and dtype {dtype} cannot have {len(data):,} bytes")
    # numpy does not check, and Python raises SystemError when it converts them to str.
    if dtype.kind == "U" and np.frombuffer(data, "<u4").max(initial=0) > sys.maxunicode:
        raise pickle.UnpicklingError("a string with invalid code points")


def stored_tensor(storage: object, first: object, shape: object, strides: object, *_: object) -> StoredTensor:
    """Stands in for the function that rebuilds a tensor, without reading it; requires_grad and hooks are ignored."""
    if not isinstance(storage, Storage) or not (_is_count(first) and _are_counts(shape) and _are_counts(strides)):
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

# numpy 2 renamed numpy.core; protocol 2 still uses Python 2's name, __builtin__. `pickles` adds NESTED_FILE.
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


# -- small checks


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 63


def _are_counts(value: object) -> TypeGuard[tuple[int, ...]]:
    items = cast(tuple[object, ...], value)
    return type(value) is tuple and len(items) <= 64 and all(map(_is_count, items))


def brief(value: object) -> str:
    """A short description of a value, without calling any of its methods."""
    for (module, name), known in GLOBALS.items():
        if known is value:
            return f"the global '{module}.{name}'"
    return repr(value[:80]) if isinstance(value, str | bytes) else f"a {type(value).__name__}"


def _plain_list(value: object) -> list[object]:
    if type(value) is not list:
        raise pickle.UnpicklingError(f"appends to {brief(value)}")
    return cast(list[object], value)


def _set_items(target: object, items: list[object]) -> None:
    if type(target) is not dict and type(target) is not OrderedDict:
        raise pickle.UnpicklingError(f"sets items of {brief(target)}")
    keys = items[::2]
    # Hashing a tuple nested a million levels deep would overflow the C stack.
    if not all(isinstance(key, str | int | float | bytes | np.generic | None) for key in keys):
        raise pickle.UnpicklingError("a dict key that is neither a string nor a number")
    cast(dict[object, object], target).update(zip(keys, items[1::2], strict=True))
