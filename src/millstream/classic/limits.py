"""What an old file may cost: no memory for bytes that it does not have, nor for data far larger than the file.

A pickle of a few hundred bytes can describe terabytes: by references to one object, by tensors that share their
storage, by gzip. Memory is limited too: objects take up to 64 times the bytes that describe them.
"""

import io
import pickle
import sys
from collections.abc import Iterable
from typing import BinaryIO, cast

from millstream.core.console import format_bytes
from millstream.core.memory import available_bytes, resident_bytes, trim_malloc
from millstream.errors import BadSource

MAX_FACTOR = 100  # a file decodes to at most so many times its size,
MIN_LIMIT = 64_000_000  # but to this many bytes in any case
OBJECT_BYTES = 64  # an empty dict
TRACE_BYTES = 12  # of pickle, two small fields, the least that traces take on average,
FREE_TRACES = 10_000  # after so many: converting millions of empty ones would take hours
MEASURED_OBJECTS = 1 << 16  # memory is measured after so many objects, and
_MEASURED_BYTES = 4 << 20  # so many bytes
MAX_UNCHECKED_BYTES = 1 << 16  # larger reads are checked against the file size before memory is allocated


class Limit:
    """The number of bytes that a file of this size may decode to."""

    def __init__(self, file_bytes: int) -> None:
        self.file_bytes = file_bytes
        self.num_bytes = MAX_FACTOR * file_bytes + MIN_LIMIT
        self.spent = 0

    def spend(self, num_bytes: int) -> None:
        self.spent += num_bytes
        if self.spent > self.num_bytes:
            raise pickle.UnpicklingError(
                f"it decodes to more than {format_bytes(self.num_bytes)}, too much for a file of "
                f"{format_bytes(self.file_bytes)} ({MAX_FACTOR} times its size and {format_bytes(MIN_LIMIT)})"
            )


class MemoryLimit:
    """The bytes that this process may grow by while a file is decoded; default: half of the free memory."""

    def __init__(self, path: str, num_bytes: int | None = None) -> None:
        self._path = path
        self._num_bytes = available_bytes() // 2 if num_bytes is None else num_bytes
        trim_malloc()  # free memory of earlier work would hide new growth
        self._base = resident_bytes()

    def check(self, more: int = 0) -> None:
        """BadSource if the process has grown too much, or would by allocating `more` bytes."""
        if self._is_over(more):
            trim_malloc()  # of the traces before
            if self._is_over(more):
                raise BadSource(
                    f"{self._path}: decoding a trace takes more than {format_bytes(self._num_bytes)}. "
                    "Give it more memory, as in --memory 16GB, or make smaller files"
                )

    def _is_over(self, more: int) -> bool:
        return resident_bytes() - self._base + more > self._num_bytes


class Input:
    """A binary file that never allocates memory for bytes it does not have. `end` is None if unknown (gzip).

    What is made of the file is reported to `spend`, which raises if a file of `file_bytes` must not cost that much.
    """

    def __init__(
        self, file: BinaryIO, end: int | None, *, file_bytes: int | None = None, memory: MemoryLimit | None = None
    ) -> None:
        self.file = file
        self.end = end
        self.memory = memory
        self.limit = Limit(end or 0 if file_bytes is None else file_bytes)
        self._start = file.tell()
        self._unmeasured = 0  # bytes that were allocated since memory was measured
        # An object takes about as much memory as MAX_FACTOR bytes of pickle, so only gzip needs a limit.
        self.max_objects = self.limit.num_bytes // OBJECT_BYTES if end is None else sys.maxsize

    def spend(self, num_bytes: int) -> None:
        """This many bytes were made of the file."""
        self.limit.spend(num_bytes)
        self._allocate(num_bytes)

    def check_objects(self, num_objects: int) -> None:
        """So many objects were made of the file."""
        if num_objects > self.max_objects:
            self.limit.spend(num_objects * OBJECT_BYTES)
        if self.memory is not None:
            self.memory.check()

    def check_traces(self, num_traces: int) -> None:
        """So many traces were made of what has been read."""
        if num_traces > FREE_TRACES and (used := self.file.tell() - self._start) < TRACE_BYTES * num_traces:
            raise pickle.UnpicklingError(
                f"{num_traces:,} traces in {format_bytes(used)} are too many: after {FREE_TRACES:,}, there must be "
                f"{TRACE_BYTES} bytes per trace"
            )

    def read(self, num_bytes: int) -> bytes:
        if num_bytes > MAX_UNCHECKED_BYTES:
            if self.end is None:
                return bytes(self.read_large(num_bytes))
            self.check(num_bytes)
        self._allocate(num_bytes)
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
        self._allocate(num_bytes)
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

    def _allocate(self, num_bytes: int) -> None:
        self._unmeasured += num_bytes
        if self._unmeasured > _MEASURED_BYTES and self.memory is not None:
            self.memory.check(num_bytes)
            self._unmeasured = 0

    def at_end(self) -> bool:
        return self.file.tell() == self.end if self.end is not None else not self.file.read(1)


def decoded_bytes(value: object, known: dict[int, int] | None = None) -> int:
    """The size of a value when all references in it are followed, each as often as it occurs. Visits an object once."""
    if isinstance(value, str | bytes | bytearray):
        return 8 + len(value)
    if not isinstance(value, dict | list | tuple):
        return 8 + cast(int, getattr(value, "nbytes", 0))
    known = {} if known is None else known
    if id(cast(object, value)) not in known:
        known[id(cast(object, value))] = 0  # of a reference back to this object, from inside
        parts: Iterable[object] = cast("list[object]", value)
        if isinstance(value, dict):
            parts = [*cast("dict[object, object]", value), *cast("dict[object, object]", value).values()]
        known[id(cast(object, value))] = OBJECT_BYTES + sum(decoded_bytes(part, known) for part in parts)
    return known[id(cast(object, value))]
