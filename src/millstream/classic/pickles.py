"""Old trace files (.pkl, .pkl.gz, .pt) -> the traces in them, one in memory at a time, as the script wrote them."""

import gzip
import io
import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice
from types import FunctionType
from typing import BinaryIO, cast

import numpy as np
import torch

from millstream.classic.limits import Input, Limit, MemoryLimit, decoded_bytes
from millstream.classic.unpickle import (
    GLOBALS,
    NESTED_FILE,
    Fetch,
    FindStorage,
    NDArrayType,
    Refused,
    Storage,
    Trace,
    Unpickler,
    brief,
    handlers_of,
)
from millstream.errors import BadSource, UnsafePickle

BUFFER_BYTES = 1 << 18
MAX_KEPT_TEXT = 4096  # longest string that stays in the memo after its trace: all traces share keys and constants
ZIP = b"PK\x03\x04"
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # the first of the five pickles in a torch file from before torch 1.6
LEGACY_TORCH = pickle.dumps(LEGACY_MAGIC, 2)

# What a corrupt file can raise in zlib, zipfile, the unpickler, numpy and torch
BROKEN = (
    pickle.UnpicklingError,
    gzip.BadGzipFile,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    ArithmeticError,
    AttributeError,
    BufferError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)

# What reads a file: an unpickler class, or a function that makes one
Machine = Callable[[Input, FindStorage | None], Unpickler]


def read_traces(
    path: str | os.PathLike[str], *, notify: Callable[[str], None] | None = None, memory: int | None = None
) -> Iterator[dict[str, object]]:
    """The traces of an old `.pkl`, `.pkl.gz` or `.pt` file as they were written, one in memory at a time.

        for trace in read_traces("trivia_qa_traces_batch_0000.pkl.gz"):
            writer.append(to_record(trace))

    The kind is detected from the content. Nothing in the file is run: UnsafePickle names what was refused. A broken
    file raises BadSource after its last whole trace. `notify` gets a message if a file must be loaded as a whole.
    Decoding a trace takes up to `memory` bytes, by default half of the free memory; more raises BadSource.
    """
    name = os.fspath(path)
    number = 0
    for drop in (True, False):
        try:
            with ExitStack() as opened:
                machine = partial(TraceUnpickler, drop=drop)
                traces = machine(*open_pickle(name, opened, machine, MemoryLimit(name, memory))).traces()
                for trace in islice(traces, number, None):
                    number += 1
                    yield trace
                    del trace  # before the next one is read, if the caller did so too
                return
        except SharedObject:
            if notify:
                notify(f"{name}: trace {number} shares objects with earlier ones, so all traces must stay in memory")
        except Refused as reason:
            raise unsafe(name, reason) from None
        except BROKEN as error:
            raise broken(name, number, error) from error


def unsafe(path: str, reason: Refused) -> UnsafePickle:
    return UnsafePickle(
        f"{path}: refused: {reason}, which is not a tensor or a plain container. Nothing was run. If you trust "
        "the file, load it with the script that wrote it and save only dicts, lists, numbers, strings and arrays"
    )


def broken(path: str, number: int, error: Exception) -> BadSource:
    """The error for a file that is corrupt or truncated in one of its traces."""
    return BadSource(
        f"{path}: broken in trace {number}: {str(error) or type(error).__name__}. "
        f"The {number} traces before it are intact; to get the rest, copy the file again or recreate it"
    )


class SharedObject(Exception):
    """The pickle refers back to an object of a trace that has already been yielded and dropped."""


class TraceUnpickler(Unpickler):
    """Yields the dicts of a pickled list, or of {"traces": list}, while it is still reading the list.

    A dict of that list is complete when the next one begins or the list is extended. With `drop`, the memo is then
    cleared except for small constants, so the trace can be freed; a file that later refers to one of its objects
    raises SharedObject and must be read again without `drop`.
    """

    def __init__(self, source: Input, find_storage: FindStorage | None = None, *, drop: bool) -> None:
        super().__init__(source, find_storage)
        self.drop = drop
        self.keeps_all = not drop
        self.trace_list: list[object] | None = None
        self.num_memoised = 0
        self.num_traces = 0
        self.kept: dict[int, object] = {}  # memo entries of earlier traces; `memo` is that of the trace being read

    def traces(self) -> Iterator[Trace]:
        yield from self.run()
        if not self.source.at_end():
            raise pickle.UnpicklingError("more bytes follow the end of the pickle")
        if self.trace_list is None:
            yield from map(self.checked, _loaded_traces(self.value))

    def checked(self, item: object) -> Trace:
        if not isinstance(item, dict):
            raise pickle.UnpicklingError(f"it is {brief(item)}, not a dict")
        for key in cast(dict[object, object], item):
            if not isinstance(key, str):
                raise pickle.UnpicklingError(f"one of its keys is {brief(key)}, not a string")
        self.num_traces += 1
        self.source.check_traces(self.num_traces)
        try:
            self.source.spend(decoded_bytes(cast(object, item)))
        except RecursionError:
            raise pickle.UnpicklingError("it is nested too deep") from None
        return cast(Trace, item)

    def hand_out(self, item: object) -> None:
        """The next item of the trace list is complete."""
        trace = self.checked(item)
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
        """Whether the stack contains the next items of the trace list: MARK item item ... APPENDS."""
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
            self.kept.update(self.memo)  # entries before the list belong to no trace
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
            # An array at protocol 2 is a string to be encoded, and a pickled tensor a small torch file. Nothing refers
            # to either again, and each is as large as the array: dropping them now halves the memory of a trace.
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
            raise SharedObject  # with `drop` the list stays empty
        self.append(value)
        if isinstance(value, dict):
            self.dict_arrived()


TraceUnpickler.handlers = handlers_of(TraceUnpickler)


# What a trace has at least one of
_OF_A_TRACE = ("question_id", "global_example_id", "question", "hidden_states", "attentions", "tokens")

# Types that stay in the memo after their trace, if small. (bytes: for the b"b" that numpy puts into every array.)
KEPT: set[type] = {str, bytes, FunctionType, NDArrayType, torch.dtype, *np.sctypeDict.values()}
KEPT.update(type(np.dtype(code)) for code in np.typecodes["All"])


def _is_small(value: object) -> bool:
    return not isinstance(value, str | bytes) or len(value) <= (MAX_KEPT_TEXT if isinstance(value, str) else 1)


def _is_constant(value: object) -> bool:
    """Whether a value of a trace looks like settings, which a script may have added to every trace."""
    if not isinstance(value, dict | list | tuple):
        return False
    items = list(cast(dict[str, object], value).values()) if isinstance(value, dict) else cast(list[object], value)
    return len(items) <= 64 and all(isinstance(item, str | int | float | None) and _is_small(item) for item in items)


def _loaded_traces(value: object) -> Iterable[object]:
    """The traces of a file that is not a list: a tuple, a dict of traces by id, either of them as "traces", or one."""
    if isinstance(value, dict):
        value = cast(Trace, value).get("traces", cast(Trace, value))
    if isinstance(value, list | tuple):
        return cast(list[object], value)
    if not isinstance(value, dict):
        raise pickle.UnpicklingError(f"it contains {brief(value)}, not a list of traces")
    fields = cast(dict[object, object], value)
    if fields and all(isinstance(item, dict) for item in fields.values()):
        return (_with_id(key, cast(Trace, item)) for key, item in fields.items())
    if fields.keys() & {"labels", "question_ids"} and fields.keys() & {"sequences", "graphs", "graphs_by_layer"}:
        raise pickle.UnpicklingError("it contains preprocessed traces, which are read from files of torch.save only")
    if (found := fields.keys() & {"sequences", "graphs", "graphs_by_layer"}) and not fields.keys() & set(_OF_A_TRACE):
        raise pickle.UnpicklingError(f"it contains {found.pop()!r} without 'labels' and 'question_ids'")
    return [fields]


def _with_id(key: object, trace: Trace) -> Trace:
    if not isinstance(key, str | int):
        raise pickle.UnpicklingError(f"its key is {brief(key)}, not a string or a whole number")
    return trace if trace.get("question_id") is not None else {**trace, "question_id": str(key)}


# -- files


def open_pickle(
    path: str, opened: ExitStack, machine: Machine, memory: MemoryLimit
) -> tuple[Input, FindStorage | None]:
    """The pickle in the file and, for torch files, a function that finds their storages. `machine` will read it."""
    file = opened.enter_context(io.BufferedReader(io.FileIO(path), BUFFER_BYTES))
    end = file.seek(0, io.SEEK_END)
    file.seek(0)
    head = file.peek(16)
    if head.startswith(ZIP):
        return _open_zip(file, end, memory)
    if head.startswith(LEGACY_TORCH):
        source, spans = _find_legacy_storages(file, end, machine, memory)
        return source, _storages(file, spans.__getitem__, source)
    if head.startswith(b"\x1f\x8b"):
        decompressed = opened.enter_context(gzip.GzipFile(fileobj=file))
        buffered = io.BufferedReader(_Gunzip(decompressed, Limit(end)), BUFFER_BYTES)
        return _pickle(Input(buffered, None, file_bytes=end, memory=memory), buffered.peek(16)), None
    return _pickle(Input(file, end, memory=memory), head), None


def _pickle(source: Input, head: bytes) -> Input:
    if head[:1] != b"\x80" or head.startswith(LEGACY_TORCH):
        raise pickle.UnpicklingError(f"expected a pickle, gzip or torch file, but it starts with {head[:8]!r}")
    return source


class _Gunzip(io.RawIOBase):
    """Decompressed bytes as they arrive: unlike GzipFile.read, it keeps the data before a corrupt block."""

    def __init__(self, file: gzip.GzipFile, limit: Limit) -> None:
        self.file = file
        self.limit = limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        data = self.file.read1(len(buffer))
        self.limit.spend(len(data))
        buffer[: len(data)] = data
        return len(data)

    def tell(self) -> int:
        return self.file.tell()


def _open_zip(file: BinaryIO, end: int, memory: MemoryLimit) -> tuple[Input, FindStorage]:
    """torch.save since 1.6: an uncompressed zip of NAME/data.pkl and the storages NAME/data/KEY."""
    members = {member.filename: member for member in zipfile.ZipFile(file).infolist()}
    pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise pickle.UnpicklingError("a zip file, but not one that torch.save writes")
    folder = pickles[0].removesuffix("data.pkl")

    def span(name: str) -> tuple[int, int]:
        member = members[folder + name]
        at = max(member.header_offset, 0)
        start = at + 30 + sum(struct.unpack_from("<HH", os.pread(file.fileno(), 30, at), 26))  # name and extra field
        if member.compress_type != zipfile.ZIP_STORED or start + member.file_size > end:
            raise zipfile.BadZipFile(f"member {member.filename} is compressed or beyond the end of the file")
        return start, member.file_size

    if folder + "byteorder" in members:
        start, num_bytes = span("byteorder")
        if os.pread(file.fileno(), num_bytes, start) != b"little":
            raise pickle.UnpicklingError("written on a big-endian machine")
    start, num_bytes = span("data.pkl")
    file.seek(start)
    source = Input(file, start + num_bytes, file_bytes=end, memory=memory)
    return source, _storages(file, lambda key: span(f"data/{key}"), source)


def _storages(file: BinaryIO, span: Callable[[str], tuple[int, int]], source: Input) -> FindStorage:
    """Storages read on demand, and only the range a tensor covers: traces may share a large one."""

    def find(dtype: torch.dtype, key: str, numel: int) -> Storage:
        start, num_bytes = span(key)
        if numel * dtype.itemsize > num_bytes:
            raise pickle.UnpicklingError(f"storage {key} has {num_bytes:,} bytes, too few for {numel:,} of {dtype}")

        def fetch(first: int, count: int) -> torch.Tensor:
            if source.memory is not None:
                source.memory.check(count * dtype.itemsize)
            flat = torch.empty(count, dtype=dtype)
            wanted = memoryview(cast(bytearray, flat.view(torch.uint8).numpy()))
            at = start + first * dtype.itemsize
            while wanted.nbytes:
                done = os.preadv(file.fileno(), [wanted], at)
                if not done:
                    raise EOFError("the file ends too early")
                wanted, at = wanted[done:], at + done
            return flat

        return Storage(dtype, numel, fetch, source.spend)

    return find


def _find_legacy_storages(
    file: BinaryIO, end: int, machine: Machine, memory: MemoryLimit | None = None
) -> tuple[Input, dict[str, tuple[int, int]]]:
    """For a torch file that is not a zip: the pickle of the data, and the offset and size in bytes of each storage.

    Such a file is five pickles followed by the storages, so this is a first pass of `machine` over the data only.
    """
    source = Input(file, end, memory=memory)
    wanted: dict[str, tuple[int, int]] = {}

    def find(dtype: torch.dtype, key: str, numel: int) -> Storage:
        wanted[key] = (numel, dtype.itemsize)
        return Storage(dtype, numel, lambda _first, count: torch.empty(count, dtype=dtype, device="meta"), source.spend)

    magic, version, facts = (Unpickler(source, find).load() for _ in range(3))
    if magic != LEGACY_MAGIC or version != 1001 or not cast(Trace, facts)["little_endian"]:
        raise pickle.UnpicklingError("an unknown kind of torch file")
    start = file.tell()
    for _ in machine(source, find).run():
        pass
    data = Input(file, file.tell(), file_bytes=end, memory=memory)
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
    source, spans = _find_legacy_storages(io.BytesIO(data), len(data), Unpickler)
    storage = Unpickler(source, lambda dtype, key, numel: Storage(dtype, numel, cast(Fetch, None), source.spend)).load()
    if not isinstance(storage, Storage) or len(spans) != 1:
        raise pickle.UnpicklingError("a nested torch file that is not a single storage")
    [(start, num_bytes)] = spans.values()
    if num_bytes != storage.numel * storage.dtype.itemsize:
        raise pickle.UnpicklingError("a storage with two different sizes")
    flat = torch.empty(storage.numel, dtype=storage.dtype)
    flat.view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8, num_bytes, start)
    return Storage(storage.dtype, storage.numel, lambda first, count: flat[first : first + count], source.spend)


GLOBALS[NESTED_FILE] = _storage_of_bytes
