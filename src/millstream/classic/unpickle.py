"""Pickle bytes -> trace dicts, one at a time, without running anything. Knows opcodes; knows nothing of file kinds.

A pickle is a program for a small stack machine. Here the machine has only the opcodes that lists, dicts, numbers, texts
and tensors need, and the functions it may call are the ones in `GLOBALS`, which are all ours and check what they get.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from types import FunctionType
from typing import BinaryIO, ClassVar, NoReturn, cast

import numpy as np
import torch

from millstream.source.allowed import (
    GLOBALS,
    Array,
    DType,
    Fetch,
    NDArrayType,
    Refused,
    Storage,
    brief,
    fill_array,
    is_count,
    set_byte_order,
)

Trace = dict[str, object]

MAX_UNCHECKED_BYTES = 1 << 16  # reads up to here may simply fail; larger ones are checked before memory is taken
MAX_KEPT_TEXT = 4096  # texts up to here outlive their trace in the memo: keys and constants are shared by all traces

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # the first of the five pickles in a torch file from before torch 1.6


class SharedObject(Exception):
    """The pickle goes back to an object of a trace that is already handed out and forgotten."""


# (dtype, key, number of elements) -> the storage that a torch file keeps outside of the pickle
FindStorage = Callable[[torch.dtype, str, int], Storage]


class Input:
    """A binary file that never takes memory for bytes it does not have. `end` is None where nobody knows it (gzip)."""

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
        """Like read, into memory that can be written to, without a second copy."""
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
        line = self.file.readline(256)  # holds the name of a module or a global
        if not line.endswith(b"\n"):
            raise EOFError("the file ends too early")
        return line

    def check(self, num_bytes: int) -> None:
        if self.end is not None and num_bytes > self.end - self.file.tell():
            raise EOFError(f"the file ends too early: {num_bytes:,} bytes announced")

    def at_end(self) -> bool:
        return self.file.tell() == self.end if self.end is not None else not self.file.read(1)


class Unpickler(pickle._Unpickler):  # pyright: ignore[reportPrivateUsage]
    """The standard library's pure-Python unpickler, cut down to data. `load()` returns the pickled object."""

    # Made by the base class, which has no stubs for them. `append` is always `stack.append`.
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
        # A short read needs no check of its own: the next opcode is then missing, before anything is handed out.
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
                yield ready.pop(0)  # holding no name for it here: the caller may free it
        if not opcode:
            raise EOFError("the file ends too early")
        if opcode != pickle.STOP:
            raise pickle.UnpicklingError(f"opcode {opcode!r} is not one that trace files use")
        if self.metastack or len(self.stack) != 1:
            raise pickle.UnpicklingError("it stops in the middle of an object")
        self.value = self.stack.pop()

    def begins_trace_list(self) -> bool:
        """Whether a list that is pushed now is the pickled object itself, or its item "traces"."""
        if not self.metastack and not self.stack:
            return True
        # The top-level dict is below "traces" on the stack (one key), or below the mark that opened its items.
        items = self.stack[1:] if not self.metastack else self.stack
        below = self.stack[:1] if not self.metastack else self.metastack[0]
        at_top = len(self.metastack) < 2 and len(below) == 1 and type(below[0]) is dict
        key = items[-1] if len(items) % 2 else None
        return at_top and isinstance(key, str) and key == "traces"

    # -- what a hostile file would use

    def find_class(self, module: str, name: str) -> object:
        found = GLOBALS.get((module, name))
        # Torch files hold storages by themselves. One inside of one inside of one ... would be read 2^depth times.
        if found is None or (found is _storage_of_bytes and self.find_storage is not None):
            raise Refused(f"the file asks for the global {f'{module}.{name}'[:200]!r}")
        return found

    def load_inst(self) -> NoReturn:
        module, name = str(self.readline()[:-1], "latin1"), str(self.readline()[:-1], "latin1")
        raise Refused(f"the file asks for an instance of the global {f'{module}.{name}'!r}")

    def get_extension(self, code: int) -> NoReturn:
        raise Refused(f"the file asks for the global registered with copyreg as extension {code}")

    def persistent_load(self, pid: object) -> Storage:
        if self.find_storage is None:
            raise Refused("the file asks for an object by a persistent id")
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
            raise Refused(f"the file asks to call {brief(build)}")
        self.stack[-1] = build(*cast(tuple[object, ...], args))

    def load_build(self) -> None:
        state = self.stack.pop()
        built = self.stack[-1]
        if type(built) is np.ndarray:
            fill_array(cast(Array, built), state)
        elif isinstance(built, np.dtype):
            set_byte_order(cast(DType, built), state)
        else:
            raise Refused(f"the file asks to set the state of {brief(built)}")

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
        self.read(8)  # frames only say how much to read ahead


class TraceUnpickler(Unpickler):
    """Hands out the dicts of a pickled list, or of {"traces": list}, while it is still reading the list.

    A dict of that list is finished when the next one begins or the list is extended. With `drop`, the memo is then
    emptied but for small constants, and nothing here holds the trace any more; a file that refers to a part of it
    later raises SharedObject and has to be read again without `drop`.
    """

    def __init__(self, source: Input, find_storage: FindStorage | None = None, *, drop: bool) -> None:
        super().__init__(source, find_storage)
        self.drop = drop
        self.trace_list: list[object] | None = None
        self.num_memoised = 0
        self.kept: dict[int, object] = {}  # the memo of former traces; `memo` is that of the trace being read

    def traces(self) -> Iterator[Trace]:
        yield from self.run()
        if not self.source.at_end():
            raise pickle.UnpicklingError("more bytes follow the end of the pickle")
        if self.trace_list is None:  # one dict by itself, or a tuple
            value = self.value
            if isinstance(value, dict):
                value = cast(Trace, value).get("traces", [cast(Trace, value)])
            if not isinstance(value, list | tuple):
                raise pickle.UnpicklingError(f"it holds {brief(value)}, not a list of traces")
            for item in cast(list[object], value):
                yield _trace(item)

    def hand_out(self, item: object) -> None:
        """The next item of the trace list is finished."""
        trace = _trace(item)
        self.ready.append(trace)
        if self.drop:
            constants = {id(value) for value in trace.values() if _is_constant(value)}
            for key, value in self.memo.items():
                if (type(value) in KEPT and _is_small(value)) or id(value) in constants:
                    self.kept[key] = value
            self.memo.clear()
        elif self.trace_list is not None:
            self.trace_list.append(trace)

    def among_traces(self) -> bool:
        """Whether the stack holds the next items of the trace list: MARK item item ... APPENDS."""
        outer = self.metastack[-1] if self.metastack and self.trace_list is not None else None
        return bool(outer) and outer[-1] is self.trace_list

    def dict_arrived(self) -> None:
        """A dict was pushed. Directly on top of an item that is a dict it cannot be a value, so it is the next item."""
        if len(self.stack) == 2 and isinstance(self.stack[0], dict) and self.among_traces():
            self.hand_out(self.stack.pop(0))

    def load_empty_dictionary(self) -> None:
        self.append({})
        self.dict_arrived()

    def load_empty_list(self) -> None:
        if self.trace_list is None and self.begins_trace_list():
            self.trace_list = []
            self.kept.update(self.memo)  # what stands before the list belongs to no trace
            self.memo.clear()
            self.append(self.trace_list)
        else:
            self.append([])

    def load_append(self) -> None:
        if self.trace_list is not None and len(self.stack) > 1 and self.stack[-2] is self.trace_list:
            self.hand_out(self.stack.pop())
        else:
            super().load_append()

    def load_appends(self) -> None:
        if self.among_traces():
            for item in self.pop_mark():
                self.hand_out(item)
        else:
            super().load_appends()

    def load_reduce(self) -> None:
        args = cast(tuple[str | bytes, ...], self.stack[-1])
        super().load_reduce()
        value = self.stack[-1]
        if type(value) is OrderedDict:
            self.dict_arrived()
        elif self.drop and type(value) in (bytes, Storage) and args and len(args[0]) > 1:
            # An array at protocol 2 is a text to be encoded, and a pickled tensor a small torch file. Nobody refers to
            # either again, and each is as large as the array: forgetting them now halves the memory of a trace.
            for key in list(islice(reversed(self.memo), 3)):
                if self.memo[key] is args or self.memo[key] is args[0]:
                    del self.memo[key]

    # -- the memo

    def load_memoize(self) -> None:
        self.memo[self.num_memoised] = self.stack[-1]
        self.num_memoised += 1

    def load_binput(self) -> None:
        self.remember(self.read(1)[0])

    def load_long_binput(self) -> None:
        self.remember(int.from_bytes(self.read(4), "little"))

    def remember(self, key: int) -> None:
        self.memo[key] = self.stack[-1]
        if key >= self.num_memoised:
            self.num_memoised = key + 1

    def load_binget(self) -> None:
        self.recall(self.read(1)[0])

    def load_long_binget(self) -> None:
        self.recall(int.from_bytes(self.read(4), "little"))

    def recall(self, key: int) -> None:
        if key in self.memo:
            value = self.memo[key]
        elif key in self.kept:
            value = self.kept[key]
        elif self.drop and key < self.num_memoised:
            raise SharedObject
        else:
            raise pickle.UnpicklingError(f"memo entry {key} does not exist")
        if value is self.trace_list and self.drop:
            raise SharedObject  # it is kept empty
        self.append(value)
        if isinstance(value, dict):
            self.dict_arrived()


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
TraceUnpickler.handlers = handlers_of(TraceUnpickler)


# What reads the data of a file: an unpickler's class, or a function that makes one
Machine = Callable[[Input, FindStorage | None], Unpickler]


def find_legacy_storages(file: BinaryIO, end: int, machine: Machine) -> tuple[Input, dict[str, tuple[int, int]]]:
    """For a torch file that is no zip: the pickle of the data, and where each storage begins and how many bytes it has.

    Such a file is five pickles and then the storages, so this is a first pass of `machine` over the data, without them.
    """
    source = Input(file, end)
    wanted: dict[str, tuple[int, int]] = {}

    def find(dtype: torch.dtype, key: str, numel: int) -> Storage:
        wanted[key] = (numel, dtype.itemsize)
        return Storage(dtype, numel, lambda _first, count: torch.empty(count, dtype=dtype, device="meta"))

    magic, version, facts = (Unpickler(source, find).load() for _ in range(3))
    if magic != LEGACY_MAGIC or version != 1001 or not cast(Trace, facts)["little_endian"]:
        raise pickle.UnpicklingError("a torch file of an unknown kind")
    start = file.tell()
    for _ in machine(source, find).run():
        pass
    data = Input(file, file.tell())
    spans: dict[str, tuple[int, int]] = {}
    for key in cast(list[str], Unpickler(source, find).load()):
        numel, itemsize = wanted[key]
        if int.from_bytes(source.read(8), "little") != numel:
            raise pickle.UnpicklingError(f"storage {key} has another size than its tensors want")
        source.check(numel * itemsize)
        spans[key] = (file.tell(), numel * itemsize)
        file.seek(numel * itemsize, io.SEEK_CUR)
    if not source.at_end():
        raise pickle.UnpicklingError("more bytes follow the last storage")
    file.seek(start)
    return data, spans


def _storage_of_bytes(data: bytes) -> Storage:
    """A tensor in a plain pickle holds its numbers as a whole torch file."""
    source, spans = find_legacy_storages(io.BytesIO(data), len(data), Unpickler)
    storage = Unpickler(source, lambda dtype, key, numel: Storage(dtype, numel, cast(Fetch, None))).load()
    if not isinstance(storage, Storage) or len(spans) != 1:
        raise pickle.UnpicklingError("a torch file inside of the pickle that is not one storage")
    [(start, num_bytes)] = spans.values()
    if num_bytes != storage.numel * storage.dtype.itemsize:
        raise pickle.UnpicklingError("a storage of two sizes")
    flat = torch.empty(storage.numel, dtype=storage.dtype)
    flat.view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8, num_bytes, start)
    return Storage(storage.dtype, storage.numel, lambda first, count: flat[first : first + count])


GLOBALS["torch.storage", "_load_from_bytes"] = _storage_of_bytes


# -- small checks


# What outlives its trace in the memo, if it is small. (Bytes, for the b"b" that numpy puts into every array.)
KEPT: set[type] = {str, bytes, FunctionType, NDArrayType, torch.dtype, *np.sctypeDict.values()}
KEPT.update(type(np.dtype(code)) for code in np.typecodes["All"])


def _is_small(value: object) -> bool:
    return not isinstance(value, str | bytes) or len(value) <= (MAX_KEPT_TEXT if isinstance(value, str) else 1)


def _is_constant(value: object) -> bool:
    """Whether a value of a trace looks like settings, which a script may have put into all of them."""
    if not isinstance(value, dict | list | tuple):
        return False
    items = list(cast(dict[str, object], value).values()) if isinstance(value, dict) else cast(list[object], value)
    return len(items) <= 64 and all(isinstance(item, str | int | float | None) and _is_small(item) for item in items)


def _trace(value: object) -> Trace:
    if not isinstance(value, dict):
        raise pickle.UnpicklingError(f"it is {brief(value)}, not a dict")
    return cast(Trace, value)


def _plain_list(value: object) -> list[object]:
    if type(value) is not list:
        raise pickle.UnpicklingError(f"appends to {brief(value)}")
    return cast(list[object], value)


def _set_items(target: object, items: list[object]) -> None:
    if type(target) is not dict and type(target) is not OrderedDict:
        raise pickle.UnpicklingError(f"sets items of {brief(target)}")
    keys = items[::2]
    # Hashing a tuple that is nested a million deep would overflow the C stack.
    if not all(isinstance(key, str | int | float | bytes | np.generic | None) for key in keys):
        raise pickle.UnpicklingError("a dict key that is neither text nor number")
    cast(dict[object, object], target).update(zip(keys, items[1::2], strict=True))
