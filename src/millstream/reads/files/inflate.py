"""gzip and BGZF data -> text: from any seek point or block, or as a stream that records seek points on the way.

The stream calls zlib through ctypes, because only its Z_BLOCK mode reports where deflate blocks end.
"""

import ctypes
import ctypes.util
import queue
import threading
import zlib
from collections.abc import Callable, Generator, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple, Protocol, TypeVar, cast

from millstream.errors import MissingExtra

T = TypeVar("T")
# isal decodes three times as fast; same interface as zlib, except for its class of errors.
fast_zlib = cast("_Zlib", import_module("isal.isal_zlib" if find_spec("isal") else "zlib"))
WINDOW_BYTES = 32 << 10
_IN_BYTES = 256 << 10
_OUT_BYTES = 256 << 10
_AUTO_GZIP = 15 + 16
_Z_BLOCK, _Z_STREAM_END, _Z_BUF_ERROR = 5, 1, -5
_AT_BLOCK_END, _IN_LAST_BLOCK, _UNUSED_BITS = 128, 64, 7


class Point(NamedTuple):
    """Where decoding can start: byte of the file, byte of the text, and the text before it."""

    raw: int
    plain: int
    window: bytes


class Inflate:
    """Decodes all members of a gzip file, in order, and records a point about every `spacing` bytes of text."""

    def __init__(self, read: Callable[[int], bytes], *, spacing: int) -> None:
        self._zlib = _load()
        self._read = read
        self._spacing = spacing
        self._stream = _Stream()
        self._in = b""
        # The window of a point is the text just before it: kept in front of what is decoded next.
        self._out = (ctypes.c_ubyte * (WINDOW_BYTES + _OUT_BYTES))()
        self._filled = 0
        self._last_point = 0
        self._ended = True  # between two members
        self._fresh = False  # at the start of one
        self._reset = self._zlib.inflateInit2_
        self.member_start = 0
        self.raw = 0  # bytes of the file read so far
        self.plain = 0  # bytes of text decoded so far
        self.verified = 0  # of these, up to the end of the last member whose checksum matches
        self.points: list[Point] = []
        self.damage: str | None = None
        self.whole = False  # all text was decoded despite the damage

    @property
    def used(self) -> int:
        """Bytes of the file decoded so far."""
        return self.raw - self._stream.avail_in

    def read(self) -> memoryview:
        """The next text, valid until the next call; empty at the end of the file or where it is damaged."""
        while self.damage is None:
            if self._stream.avail_in == 0 and not self._refill():
                if not self._ended:
                    self.damage = (
                        f"the gzip data ends at byte {self.raw}, in the middle of the member that starts at "
                        f"byte {self.member_start}"
                    )
                break
            if self._ended and not self._start_member():
                break
            piece = self._inflate()
            if piece.nbytes:
                return piece
        return memoryview(b"")

    def close(self) -> None:
        """Free zlib's memory."""
        if self._reset is self._zlib.inflateReset:
            self._zlib.inflateEnd(ctypes.byref(self._stream))

    def _refill(self) -> bool:
        self._in = self._read(_IN_BYTES)
        self.raw += len(self._in)
        self._stream.next_in = ctypes.cast(ctypes.c_char_p(self._in), ctypes.c_void_p).value
        self._stream.avail_in = len(self._in)
        return bool(self._in)

    def _start_member(self) -> bool:
        """Whether another member starts here; zeros after the last one are padding, anything else is damage."""
        while True:
            at = self.used
            start = len(self._in) - self._stream.avail_in
            rest = self._in[start : start + 2]
            if rest[:1] == b"\x1f" and rest[1:] in (b"\x8b", b""):
                break
            if rest[:1] != b"\0":
                self.damage = f"the gzip data is followed by other data at byte {at}"
                self.whole = True
                return False
            zeros = self._stream.avail_in - len(self._in[start:].lstrip(b"\0"))
            self._stream.next_in = (self._stream.next_in or 0) + zeros
            self._stream.avail_in -= zeros
            if self._stream.avail_in == 0 and not self._refill():
                return False
        self.member_start = at
        if self._reset is self._zlib.inflateInit2_:
            self._check(self._reset(ctypes.byref(self._stream), _AUTO_GZIP, b"1.2.11", ctypes.sizeof(_Stream)))
            self._reset = self._zlib.inflateReset
        else:
            self._check(self._reset(ctypes.byref(self._stream)))
        self._ended = False
        self._fresh = True
        return True

    def _inflate(self) -> memoryview:
        if self._filled == len(self._out):  # slide: keep the last 32 kB as the window
            ctypes.memmove(self._out, ctypes.byref(self._out, self._filled - WINDOW_BYTES), WINDOW_BYTES)
            self._filled = WINDOW_BYTES
        before = self._filled
        self._stream.next_out = ctypes.addressof(self._out) + before
        self._stream.avail_out = len(self._out) - before
        status = self._zlib.inflate(ctypes.byref(self._stream), _Z_BLOCK)
        self._filled = len(self._out) - self._stream.avail_out
        self.plain += self._filled - before
        if status == _Z_STREAM_END:
            self._ended = True
            self.verified = self.plain
        elif status == _Z_BUF_ERROR and self._stream.avail_in == 0:
            pass  # needs more input
        elif status < 0:
            reason = (self._stream.msg or b"cannot be decoded").decode()
            # Only if it is the trailer of the last member: nothing of the text is missing then.
            self.whole = reason.startswith("incorrect") and self._stream.avail_in <= 4 and not self._read(1)
            self.damage = (
                f"the gzip data is damaged at byte {self.used} ({reason}), in the member that starts at "
                f"byte {self.member_start}"
            )
        elif self._at_block_end() and (self._fresh or self.plain - self._last_point >= self._spacing):
            # A member's first point is right after its header, so that no two points lie in different members.
            start = self._filled if self._fresh else max(self._filled - WINDOW_BYTES, 0)
            window = bytes(memoryview(self._out)[start : self._filled])
            self._fresh = False
            self.points.append(Point(self.used, self.plain, window))
            self._last_point = self.plain
        return memoryview(self._out)[before : self._filled]

    def _at_block_end(self) -> bool:
        """Between two blocks of one member, at a whole byte; also right after a member's header."""
        return self._stream.data_type & (_AT_BLOCK_END | _IN_LAST_BLOCK | _UNUSED_BITS) == _AT_BLOCK_END

    def _check(self, status: int) -> None:
        if status != 0:
            raise MemoryError(f"zlib: inflateInit failed with status {status}")


def bgzf_size(head: bytes) -> int:
    """The size of the BGZF block that starts with these 18 bytes; 0 for an ordinary gzip member."""
    if len(head) < 18 or head[:4] != b"\x1f\x8b\x08\x04" or head[10:16] != b"\x06\0BC\x02\0":
        return 0
    return int.from_bytes(head[16:18], "little") + 1


def decode_bgzf(rest: bytes) -> bytes:
    """The text of a BGZF block, given without its 18-byte head. zlib.error if checksum or length do not match."""
    size = int.from_bytes(rest[-4:], "little")
    text = inflate(memoryview(rest)[:-8], size=size) if size else b""
    if len(text) != size or fast_zlib.crc32(text) != int.from_bytes(rest[-8:-4], "little"):
        raise zlib.error("its checksum does not match")
    return text


def inflate(data: bytes | memoryview, *, size: int, window: bytes = b"") -> bytes:
    """Decode `size` bytes of raw deflate data, starting from this window. zlib.error if that fails."""
    # Not isal's IgzipDecompressor: with a dictionary it corrupts the heap (isal 1.8.0).
    try:
        text = fast_zlib.decompressobj(-15, zdict=window).decompress(data, size)
    except fast_zlib.error:
        text = b""
    # For data damaged or truncated further on, isal returns less than zlib, or nothing.
    return text if len(text) == size else zlib.decompressobj(-15, zdict=window).decompress(data, size)


def ahead(items: Iterator[T], *, depth: int) -> Generator[T]:
    """Iterate in a thread, `depth` items ahead. Errors are raised in place of their item; closing stops the thread."""
    waiting: queue.Queue[tuple[bool, T | BaseException | None]] = queue.Queue(depth)
    stopped = threading.Event()

    def work() -> None:
        try:
            for item in items:
                _put(waiting, (True, item), stopped)
                if stopped.is_set():
                    return
            _put(waiting, (False, None), stopped)
        except BaseException as error:
            _put(waiting, (False, error), stopped)
        finally:
            if isinstance(items, Generator):
                items.close()  # which may have a thread of its own

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            more, item = waiting.get()
            if not more:
                if item is not None:
                    raise item  # pyright: ignore
                return
            yield item  # pyright: ignore
    finally:
        stopped.set()
        thread.join()


class _Decompressor(Protocol):
    eof: bool
    unused_data: bytes
    unconsumed_tail: bytes

    def decompress(self, data: bytes | memoryview, max_length: int = 0) -> bytes: ...


class _Zlib(Protocol):
    error: type[Exception]

    def decompressobj(self, wbits: int, zdict: bytes = b"") -> _Decompressor: ...
    def crc32(self, data: bytes) -> int: ...


def _put(waiting: "queue.Queue[T]", item: T, stopped: threading.Event) -> None:
    while not stopped.is_set():
        try:
            waiting.put(item, timeout=0.1)
            return
        except queue.Full:
            continue


class _Stream(ctypes.Structure):
    _fields_ = (
        ("next_in", ctypes.c_void_p),
        ("avail_in", ctypes.c_uint),
        ("total_in", ctypes.c_ulong),
        ("next_out", ctypes.c_void_p),
        ("avail_out", ctypes.c_uint),
        ("total_out", ctypes.c_ulong),
        ("msg", ctypes.c_char_p),
        ("state", ctypes.c_void_p),
        ("zalloc", ctypes.c_void_p),
        ("zfree", ctypes.c_void_p),
        ("opaque", ctypes.c_void_p),
        ("data_type", ctypes.c_int),
        ("adler", ctypes.c_ulong),
        ("reserved", ctypes.c_ulong),
    )


def _load() -> ctypes.CDLL:
    for name in ("libz.so.1", ctypes.util.find_library("z")):
        try:
            return ctypes.CDLL(name) if name else ctypes.CDLL("libz.dylib")
        except OSError:
            continue
    raise MissingExtra("indexing gzip files needs the system's zlib, which was not found: apt install zlib1g")
