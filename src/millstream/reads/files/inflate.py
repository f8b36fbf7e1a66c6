"""A gzip file as a stream with seek points: zlib by ctypes, because only its Z_BLOCK mode says where blocks end.

A point is a place between two deflate blocks: the byte where the next one starts and the 32 kB of text before it are
all a decoder needs to start there. Python's zlib hides both; rapidgzip gives them, at 380 MB of memory. One block in
eight starts at a whole byte, and only those are taken, so that any decoder can start there.
"""

import ctypes
import ctypes.util
from collections.abc import Callable
from typing import NamedTuple

from millstream.errors import MissingExtra

WINDOW_BYTES = 32 << 10
_IN_BYTES = 256 << 10
_OUT_BYTES = 256 << 10
_AUTO_GZIP = 15 + 16
_Z_BLOCK, _Z_STREAM_END, _Z_BUF_ERROR = 5, 1, -5
_AT_BLOCK_END, _IN_LAST_BLOCK, _UNUSED_BITS = 128, 64, 7


class Point(NamedTuple):
    """Where decoding can start: byte of the file, byte of the text, and the text before."""

    raw: int
    plain: int
    window: bytes


class Inflate:
    """Decodes all members of a gzip file, in order, and keeps a point about every `spacing` bytes of text."""

    def __init__(self, read: Callable[[int], bytes], *, spacing: int) -> None:
        self._zlib = _load()
        self._read = read
        self._spacing = spacing
        self._stream = _Stream()
        self._in = b""
        # The window of a point is the text just before it: keep it in front of what is decoded next.
        self._out = (ctypes.c_ubyte * (WINDOW_BYTES + _OUT_BYTES))()
        self._filled = 0
        self._last_point = 0
        self._ended = True  # between two members
        self._fresh = False  # at the start of one
        self._reset = self._zlib.inflateInit2_
        self.member_start = 0
        self.raw = 0  # bytes of the file that were read
        self.plain = 0  # bytes of text that were decoded
        self.points: list[Point] = []
        self.damage: str | None = None
        self.whole = False  # although it is damaged, all text was decoded

    @property
    def used(self) -> int:
        """Bytes of the file that were decoded."""
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
                self.damage = f"after the gzip data comes something else, at byte {at}"
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
        if self._filled == len(self._out):  # slide: the last 32 kB become the window
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
        elif status == _Z_BUF_ERROR and self._stream.avail_in == 0:
            pass  # wants more input
        elif status < 0:
            reason = (self._stream.msg or b"cannot be decoded").decode()
            # Only the last member's trailer: what else there may be in the file is not text that comes before.
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

    def _member(self) -> str:
        return f"of the gzip member that starts at byte {self.member_start}"

    def _at_block_end(self) -> bool:
        """Between two blocks of one member, at a whole byte; also right after a member's header."""
        return self._stream.data_type & (_AT_BLOCK_END | _IN_LAST_BLOCK | _UNUSED_BITS) == _AT_BLOCK_END

    def _check(self, status: int) -> None:
        if status != 0:
            raise MemoryError(f"zlib: inflateInit answered {status}")


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
    raise MissingExtra("gzip files are indexed with the system's zlib, which is not there: apt install zlib1g")
