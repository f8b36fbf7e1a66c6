"""Old trace files -> one record (dict) at a time. Knows the old files and layouts; knows nothing of the store.

.pkl, .pkl.gz, .pt -> read_traces -> trace as the script wrote it -> normalise -> record -> restore_steps -> trace

T tokens, d hidden size, L layers, S generation steps, H heads; the old scripts wrote
hidden_states   list of L arrays [T, d], or [layer][step] arrays (1, P, d), (1, 1, d), (1, 1, d) ...
attentions      list of L arrays [H, T, T], or [layer][step] arrays (1, H, q, k) with k growing
"""

import gzip
import io
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate, islice, pairwise
from math import prod
from typing import BinaryIO, cast

import numpy as np
import torch

from millstream.classic.allowed import Array, Refused, Storage
from millstream.classic.file_unpicklers import SharedObject, TraceUnpickler
from millstream.classic.unpickle import FindStorage, Input, Machine, find_legacy_storages
from millstream.errors import BadSource, UnsafePickle

__all__ = ["normalise", "read_traces", "restore_steps"]

BUFFER_BYTES = 1 << 18
ZIP = b"PK\x03\x04"
LEGACY_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # the pickle of unpickle.LEGACY_MAGIC

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
    RuntimeError,
    TypeError,
    ValueError,
)

TOKEN_FIELDS = ("tokens", "tokens_full")


def read_traces(
    path: str | os.PathLike[str], *, notify: Callable[[str], None] | None = None
) -> Iterator[dict[str, object]]:
    """The traces of an old `.pkl`, `.pkl.gz` or `.pt` file as they were written, one in memory at a time.

        for trace in read_traces("trivia_qa_traces_batch_0000.pkl.gz"):
            writer.append(normalise(trace))

    The kind is detected from the content. Nothing in the file is run: UnsafePickle names what was refused. A broken
    file raises BadSource after its last whole trace. `notify` gets a message if a file must be loaded as a whole.
    """
    name = os.fspath(path)
    number = 0
    for drop in (True, False):
        try:
            with ExitStack() as opened:
                machine = partial(TraceUnpickler, drop=drop)
                traces = machine(*open_pickle(name, opened, machine)).traces()
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


def normalise(trace: dict[str, object]) -> dict[str, object]:
    """Convert a trace to a record for a store: tensors, numbers, strings, lists of them, None.

    Layers are stacked: `[L, ...]` from a list of arrays, `[L, total]` from [layer][step] arrays, each layer's steps
    flattened and concatenated (traces with one step and with many must fit the same field); the field `<name>_steps`
    has the shapes of the steps.

        record = normalise({"hidden_states": [np.zeros((7, 64))] * 12, "global_example_id": 3})
        record["hidden_states"].shape, record["question_id"]  # (12, 7, 64), "3"
    """
    record: dict[str, object] = {}
    for name, value in trace.items():
        try:
            if not _is_nested(value):
                record[name] = _storable(name, value)
            elif f"{name}_steps" in trace:
                raise BadSource(f"field {name!r}: its steps need the field '{name}_steps', which is taken. Rename it")
            else:
                layers = cast(Sequence[Sequence[object]], value)
                record[name], record[f"{name}_steps"] = _stack_steps(name, layers)
        except (OverflowError, RecursionError, ValueError) as error:
            raise BadSource(f"field {name!r}: cannot be stored: {error}") from error
    if record.get("question_id") is None and record.get("global_example_id") is not None:
        record["question_id"] = str(record["global_example_id"])
    return record


def restore_steps(record: dict[str, object]) -> dict[str, object]:
    """The inverse of `normalise` for [layer][step] fields: nested lists of views, without the `<name>_steps` fields."""
    trace = dict(record)
    for name, value in record.items():
        steps = record.get(f"{name}_steps")
        if isinstance(steps, list | tuple | np.ndarray) and _is_tensor(value):
            shapes = [tuple(map(int, shape)) for shape in cast(Sequence[Sequence[int]], steps)]
            trace[name] = _split_steps(cast(Array, value), shapes)
            del trace[f"{name}_steps"]
    return trace


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


# -- files


def open_pickle(path: str, opened: ExitStack, machine: Machine) -> tuple[Input, FindStorage | None]:
    """The pickle in the file and, for torch files, a function that finds their storages. `machine` will read it."""
    file = opened.enter_context(io.BufferedReader(io.FileIO(path), BUFFER_BYTES))
    end = file.seek(0, io.SEEK_END)
    file.seek(0)
    head = file.peek(16)
    if head.startswith(ZIP):
        return _open_zip(file, end)
    if head.startswith(LEGACY_TORCH):
        source, spans = find_legacy_storages(file, end, machine)
        return source, _storages(file, spans.__getitem__)
    if head.startswith(b"\x1f\x8b"):
        decompressed = opened.enter_context(gzip.GzipFile(fileobj=file))
        buffered = io.BufferedReader(_Gunzip(decompressed), BUFFER_BYTES)
        return _pickle(Input(buffered, None), buffered.peek(16)), None
    return _pickle(Input(file, end), head), None


def _pickle(source: Input, head: bytes) -> Input:
    if head[:1] != b"\x80" or head.startswith(LEGACY_TORCH):
        raise pickle.UnpicklingError(f"expected a pickle, gzip or torch file, but it starts with {head[:8]!r}")
    return source


class _Gunzip(io.RawIOBase):
    """Decompressed bytes as they arrive: unlike GzipFile.read, it keeps the data before a corrupt block."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self.file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        data = self.file.read1(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _open_zip(file: BinaryIO, end: int) -> tuple[Input, FindStorage]:
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
    return Input(file, start + num_bytes), _storages(file, lambda key: span(f"data/{key}"))


def _storages(file: BinaryIO, span: Callable[[str], tuple[int, int]]) -> FindStorage:
    """Storages read on demand, and only the range a tensor covers: traces may share a large one."""

    def find(dtype: torch.dtype, key: str, numel: int) -> Storage:
        start, num_bytes = span(key)
        if numel * dtype.itemsize > num_bytes:
            raise pickle.UnpicklingError(f"storage {key} has {num_bytes:,} bytes, too few for {numel:,} of {dtype}")

        def fetch(first: int, count: int) -> torch.Tensor:
            flat = torch.empty(count, dtype=dtype)
            wanted = memoryview(cast(bytearray, flat.view(torch.uint8).numpy()))
            at = start + first * dtype.itemsize
            while wanted.nbytes:
                done = os.preadv(file.fileno(), [wanted], at)
                if not done:
                    raise EOFError("the file ends too early")
                wanted, at = wanted[done:], at + done
            return flat

        return Storage(dtype, numel, fetch)

    return find


# -- values. Torch tensors index, slice and reshape like arrays, so they are typed as arrays here


def _storable(name: str, value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, np.ndarray):
        array = cast(Array, value)
        if array.dtype.kind == "U":
            return array.tolist()
        if array.dtype.kind not in "biufc":
            raise BadSource(f"field {name!r}: cannot store an array of {array.dtype}, only numbers and strings")
        return array
    if not isinstance(value, list | tuple):
        return _plain(name, value)
    items = cast(Sequence[object], value)
    if any(_is_tensor(item) for item in items):
        return _stack(name, items)
    if name in TOKEN_FIELDS and all(type(item) is int or isinstance(item, np.integer) for item in items):
        return np.array(items, np.int64)
    return _plain(name, items)


def _plain(name: str, value: object) -> object:
    if isinstance(value, np.generic):
        value = cast(object, value.item())
    if isinstance(value, str):
        value.encode()  # Arrow rejects lone surrogates, pickle does not
    elif isinstance(value, list | tuple):
        return [_plain(name, item) for item in cast(Sequence[object], value)]
    elif isinstance(value, dict):
        return {key: _plain(name, item) for key, item in cast(dict[object, object], value).items()}
    elif not isinstance(value, bool | int | float | bytes | None):
        raise BadSource(f"field {name!r}: cannot store a {type(value).__name__} here, only numbers, strings and lists")
    return value


def _is_tensor(value: object) -> bool:
    return isinstance(value, np.ndarray | torch.Tensor)


def _is_nested(value: object) -> bool:
    """Whether the value is [layer][step] tensors."""
    if not isinstance(value, list | tuple):
        return False
    items = cast(Sequence[object], value)
    layers = [cast(Sequence[object], item) for item in items if isinstance(item, list | tuple)]
    return len(layers) == len(items) and any(_is_tensor(step) for layer in layers for step in layer)


def _stack(name: str, items: Sequence[object]) -> Array:
    """Stack tensors of equal shape along a new first axis. (np.stack would change the byte order.)"""
    first, *_ = tensors = _of_one_kind(name, items)
    if any(tensor.shape != first.shape for tensor in tensors):
        shapes = ", ".join(sorted({str(tuple(tensor.shape)) for tensor in tensors})[:4])
        raise BadSource(f"field {name!r}: expected tensors of one shape, found {shapes}")
    stacked = _empty((len(tensors), *first.shape), first)
    for number, tensor in enumerate(tensors):
        stacked[number] = tensor
    return stacked


def _stack_steps(name: str, layers: Sequence[Sequence[object]]) -> tuple[Array, list[list[int]]]:
    tensors = _of_one_kind(name, [step for layer in layers for step in layer])
    shapes = [tuple(tensor.shape) for tensor in tensors]
    num_steps = len(layers[0])
    steps = shapes[:num_steps]
    for number, layer in enumerate(layers):
        if len(layer) != num_steps or shapes[number * num_steps : (number + 1) * num_steps] != steps:
            raise BadSource(f"field {name!r}: the steps of layer {number} differ in shape from those of layer 0")
    stacked = _empty((len(layers), sum(map(prod, steps))), tensors[0])
    for number, place in enumerate(place for layer in _split_steps(stacked, steps) for place in layer):
        place[...] = tensors[number]
    return stacked, [list(shape) for shape in steps]


def _split_steps(stacked: Array, steps: list[tuple[int, ...]]) -> list[list[Array]]:
    """[layer][step] views of `[L, total]`."""
    bounds = list(pairwise(accumulate(map(prod, steps), initial=0)))
    return [
        [layer[start:stop].reshape(shape) for (start, stop), shape in zip(bounds, steps, strict=True)]
        for layer in stacked
    ]


def _of_one_kind(name: str, items: Sequence[object]) -> list[Array]:
    kinds = {(type(item).__name__, str(getattr(item, "dtype", ""))) for item in items}
    if len(kinds) > 1:
        found = ", ".join(sorted(" ".join(kind) for kind in kinds)[:4])
        raise BadSource(f"field {name!r}: expected tensors of one kind and dtype, found {found}")
    return [cast(Array, _storable(name, item)) for item in items]


def _empty(shape: tuple[int, ...], like: object) -> Array:
    if isinstance(like, torch.Tensor):
        return cast(Array, torch.empty(shape, dtype=like.dtype))
    return np.empty(shape, cast(Array, like).dtype)
