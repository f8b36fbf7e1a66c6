"""Pickle bytes -> plain data and tensors, without running anything. Knows opcodes; knows nothing of file kinds.

A pickle is a program for a small stack machine. This machine has only the opcodes that lists, dicts, numbers, strings
and tensors need, and may call only the functions in `GLOBALS`, which are our own and check their arguments.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import BinaryIO, ClassVar, NoReturn, cast

import numpy as np
import torch

from millstream.classic.allowed import (
    GLOBALS,
    Array,
    DType,
    Fetch,
    Refused,
    Storage,
    brief,
    fill_array,
    is_count,
    set_byte_order,
)

Trace = dict[str, object]

MAX_UNCHECKED_BYTES = 1 << 16  # larger reads are checked against the file size before memory is allocated

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # the first of the five pickles in a torch file from before torch 1.6


# (dtype, key, number of elements) -> the storage that a torch file keeps outside the pickle
FindStorage = Callable[[torch.dtype, str, int], Storage]


class Input:
    """A binary file that never allocates memory for bytes it does not have. `end` is None if unknown (gzip)."""

    def __init__(self, file: BinaryIO, end: int | None) -> None:
        self.file = file
        self.end = end

    def read(self, num_bytes: int) -> bytes:
        if num_bytes > MAX_UNCHECKED_BYTES:
            if self.end is None:
                return bytes(self.read_large(num_bytes))
            self.check(num_bytes)
        data = self.file.read(num_bytes)
        if len(data) < num_bytes:
            raise EOFError("the file ends too early")
        return data

    def read_large(self, num_bytes: int) -> bytearray:
        """Like read, into writable memory, without a second copy."""
        if self.end is None:
            data = bytearray()
            while len(data) < num_bytes:
                data += self.read(min(num_bytes - len(data), MAX_UNCHECKED_BYTES))
            return data
        self.check(num_bytes)
        data = bytearray(num_bytes)
        if cast(io.BufferedReader, self.file).readinto(data) < num_bytes:
            raise EOFError("the file ends too early")
        return data

    def readline(self) -> bytes:
        line = self.file.readline(256)  # the name of a module or a global
        if not line.endswith(b"\n"):
            raise EOFError("the file ends too early")
        return line

    def check(self, num_bytes: int) -> None:
        if self.end is not None and num_bytes > self.end - self.file.tell():
            raise EOFError(f"the file ends too early: {num_bytes:,} bytes announced")

    def at_end(self) -> bool:
        return self.file.tell() == self.end if self.end is not None else not self.file.read(1)


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

    def load(self) -> object:
        for _ in self.run():
            pass
        return self.value

    def run(self) -> Iterator[Trace]:
        """Execute the pickle, yielding what the handlers put into `ready` as soon as it is there."""
        read, handlers, ready = self.read, self.handlers, self.ready
        while (opcode := read(1)) in handlers:
            handlers[opcode](self)
            while ready:
                yield ready.pop(0)  # no reference stays here: the caller may free it
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
        if found is None or (found is _storage_of_bytes and self.find_storage is not None):
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
                and is_count(numel)
                and view in ([], [None])
            ):
                return self.find_storage(dtype, key, numel)
        raise pickle.UnpicklingError("a persistent id that is not a torch storage")

    def load_reduce(self) -> None:
        args = self.stack.pop()
        build = self.stack[-1]
        if type(build) is not FunctionType or type(args) is not tuple:
            raise Refused(f"the file tries to call {brief(build)}")
        self.stack[-1] = build(*cast(tuple[object, ...], args))

    def load_build(self) -> None:
        state = self.stack.pop()
        built = self.stack[-1]
        if type(built) is np.ndarray:
            fill_array(cast(Array, built), state)
        elif isinstance(built, np.dtype):
            set_byte_order(cast(DType, built), state)
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


# What reads a file: an unpickler class, or a function that makes one
Machine = Callable[[Input, FindStorage | None], Unpickler]


def find_legacy_storages(file: BinaryIO, end: int, machine: Machine) -> tuple[Input, dict[str, tuple[int, int]]]:
    """For a torch file that is not a zip: the pickle of the data, and the offset and size in bytes of each storage.

    Such a file is five pickles followed by the storages, so this is a first pass of `machine` over the data only.
    """
    source = Input(file, end)
    wanted: dict[str, tuple[int, int]] = {}

    def find(dtype: torch.dtype, key: str, numel: int) -> Storage:
        wanted[key] = (numel, dtype.itemsize)
        return Storage(dtype, numel, lambda _first, count: torch.empty(count, dtype=dtype, device="meta"))

    magic, version, facts = (Unpickler(source, find).load() for _ in range(3))
    if magic != LEGACY_MAGIC or version != 1001 or not cast(Trace, facts)["little_endian"]:
        raise pickle.UnpicklingError("an unknown kind of torch file")
    start = file.tell()
    for _ in machine(source, find).run():
        pass
    data = Input(file, file.tell())
    spans: dict[str, tuple[int, int]] = {}
    for key in cast(list[str], Unpickler(source, find).load()):
        numel, itemsize = wanted[key]
        if int.from_bytes(source.read(8), "little") != numel:
            raise pickle.UnpicklingError(f"storage {key} differs in size from what its tensors need")
        source.check(numel * itemsize)
        spans[key] = (file.tell(), numel * itemsize)
        file.seek(numel * itemsize, io.SEEK_CUR)
    if not source.at_end():
        raise pickle.UnpicklingError("more bytes follow the last storage")
    file.seek(start)
    return data, spans


def _storage_of_bytes(data: bytes) -> Storage:
    """A tensor in a plain pickle stores its values as a complete torch file."""
    source, spans = find_legacy_storages(io.BytesIO(data), len(data), Unpickler)
    storage = Unpickler(source, lambda dtype, key, numel: Storage(dtype, numel, cast(Fetch, None))).load()
    if not isinstance(storage, Storage) or len(spans) != 1:
        raise pickle.UnpicklingError("a nested torch file that is not a single storage")
    [(start, num_bytes)] = spans.values()
    if num_bytes != storage.numel * storage.dtype.itemsize:
        raise pickle.UnpicklingError("a storage with two different sizes")
    flat = torch.empty(storage.numel, dtype=storage.dtype)
    flat.view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8, num_bytes, start)
    return Storage(storage.dtype, storage.numel, lambda first, count: flat[first : first + count])


GLOBALS["torch.storage", "_load_from_bytes"] = _storage_of_bytes


# -- small checks


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
