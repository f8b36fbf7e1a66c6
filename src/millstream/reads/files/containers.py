"""A read file as one stream of text: plain, gzip, BGZF or zstd, and what is only packed; recognised by content.

Reading the stream also records its blocks: the places where decoding can start.
"""

import zlib
from collections.abc import Callable, Generator
from io import RawIOBase
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from millstream.core.console import quoted
from millstream.core.record import Bytes, crc32c
from millstream.core.remote import read_range
from millstream.errors import BadSource, MissingExtra
from millstream.reads.files.in_order import alignments_text, bzip2_text, xz_text
from millstream.reads.files.inflate import Inflate, ahead, bgzf_size, decode_bgzf, fast_zlib

T = TypeVar("T")
Kind = Literal["plain", "gzip", "bgzf", "zstd", "bzip2", "xz", "alignments"]
POINT_BYTES = 1 << 20  # then the next block that starts at a whole byte: every 2 to 3 MB, 5 ms to decode
MAX_FRAME_BYTES = 64 << 20  # a larger zstd frame is too much to decode for one read
_READ_BYTES = 1 << 20
_BGZF_BYTES = 1 << 16  # of text in a block
_ZSTD, _SKIPPABLE = 0xFD2FB528, 0x184D2A5
_HAS_CHECKSUM = 4  # in the descriptor of a zstd frame
_IN_ORDER: dict[bytes, tuple[Kind, str]] = {  # read only once, from front to back
    b"BZh": ("bzip2", "bzip2"),
    b"\xfd7zXZ\0": ("xz", "xz"),
    b"BAM\1": ("alignments", "BAM"),
    b"CRAM": ("alignments", "CRAM"),
    b"@HD\t": ("alignments", "SAM"),
    b"@SQ\t": ("alignments", "SAM"),
}
_ZIP = b"PK\x03\x04"


class Block(NamedTuple):
    """Text that is decoded together: where it starts in the file and in the text, and the text before it (gzip)."""

    raw: int
    plain: int
    window: bytes = b""


class Damage(NamedTuple):
    """What is wrong with a file, how many bytes of its text precede the damage, and whether that is all of its text."""

    reason: str
    plain: int
    whole: bool
    verified: int  # bytes of the text, from its start, that checksums in the file verify
    raw: int  # bytes of the file read when it was found


class MixedGzip(Exception):
    """A file starts as BGZF and continues as ordinary gzip: read all of it as gzip."""


def sniff(path: Path, *, in_order: bool = False) -> Kind:
    """The compression of a file, from its first bytes; `in_order`: it is read only once, into a pack."""
    return sniff_head(path, read_range(path, 0, _BGZF_BYTES if in_order else 18), in_order=in_order)


def sniff_head(path: Path, head: bytes, *, in_order: bool) -> Kind:
    """The same, of a file with these first bytes."""
    if head.startswith(_ZIP):
        raise BadSource(
            f"{path}: is a zip archive; must be FASTA or FASTQ, plain or compressed with gzip, BGZF or zstd"
        )
    if head[:2] == b"\x1f\x8b":
        is_bam = in_order and zlib.decompressobj(31).decompress(head, 4) == b"BAM\1"
        return "alignments" if is_bam else "bgzf" if bgzf_size(head) else "gzip"
    for magic, (kind, name) in _IN_ORDER.items():
        if head.startswith(magic):
            if not in_order:
                raise BadSource(f"{path}: is {name}, which has no random access. {pack_first(path)}")
            return kind
    number = int.from_bytes(head[:4], "little")
    return "zstd" if number == _ZSTD or number >> 4 == _SKIPPABLE else "plain"


def pack_first(path: Path) -> str:
    """The remedy for a file that can only be read from front to back."""
    return f"Pack it first: millstream pack {quoted(path)} reads.pack"


def open_stream(
    path: Path,
    kind: Kind,
    raw: RawIOBase,
    *,
    points: bool = True,
    point_bytes: int = POINT_BYTES,
    frame_bytes: int = MAX_FRAME_BYTES,
    reference: Path | None = None,
) -> "Stream":
    """The text of a file from its start. The caller closes `raw`, the bytes of the file.

    With `points`, blocks are noted, and a gzip file gets a seek point about every `point_bytes` of text; without them
    it is decoded twice as fast. A zstd frame of more than `frame_bytes` of text is an error. `reference` is of a CRAM.
    """
    if kind == "plain":
        return PlainStream(raw)
    pieces = {
        "gzip": _gzip if points else _gzip_once,
        "bgzf": _bgzf,
        "zstd": _zstd,
        "bzip2": bzip2_text,
        "xz": xz_text,
        "alignments": alignments_text,
    }[kind]
    file = _RawFile(path, raw, points=points, point_bytes=point_bytes, frame_bytes=frame_bytes, reference=reference)
    return DecodedStream(file, pieces)


def decode_frame(data: bytes, *, size: int) -> bytes:
    """The text of the zstd frame at the start of `data`. zlib.error if it cannot be decoded."""
    try:
        import zstandard
    except ImportError:
        raise MissingExtra("zstd files need the package 'zstandard': pip install 'millstream[reads]'") from None
    try:
        return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompress(data, max_output_size=size)
    except zstandard.ZstdError as error:
        raise zlib.error(str(error)) from None


class PlainStream:
    """The text of a plain file, in order."""

    def __init__(self, raw: RawIOBase) -> None:
        self._source = raw
        self.raw = 0  # bytes of the file read so far
        self.crc32c = 0  # of these bytes
        self.damage: Damage | None = None  # why the text ended early, if it did
        self.warning: str | None = None  # about a file that could be read to its end

    def readinto(self, out: Bytes) -> int:
        """Fill `out` as far as there is text; 0 at its end."""
        count = self._source.readinto(out.data) or 0
        self.crc32c = crc32c(out[:count], self.crc32c)
        self.raw += count
        return count

    def take_blocks(self) -> list[Block]:
        """The blocks found since the last call."""
        return []

    def take_crcs(self) -> list[int]:
        """The CRC-32C of the text of every block that ended since the last call."""
        return []

    def close(self) -> None:
        """No thread to stop."""


class _RawFile:
    """The raw bytes of a file, in order, and what its decoder has found."""

    def __init__(
        self,
        path: Path,
        source: RawIOBase,
        *,
        points: bool,
        point_bytes: int,
        frame_bytes: int,
        reference: Path | None,
    ) -> None:
        self.path, self.reference = path, reference
        self._notes_blocks = points
        self._source = source
        self.point_bytes = point_bytes
        self.frame_bytes = frame_bytes
        self.raw = self.plain = 0
        self.verified = 0  # bytes of the text, from its start, that checksums in the file verify
        self.crc32c = 0
        self.blocks: list[Block] = []
        self.crcs: list[int] = []
        self.damage: Damage | None = None
        self.warning: str | None = None
        self._text_crc: int | None = None

    def read(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count > 0 and (part := self._source.read(count)):
            parts.append(part)
            count -= len(part)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self.crc32c = crc32c(data, self.crc32c)
        self.raw += len(data)
        return data

    def begin(self, raw: int, window: bytes = b"") -> None:
        """A block starts here."""
        self.end()
        if self._notes_blocks:
            self._text_crc = 0
            self.blocks.append(Block(raw, self.plain, window))

    def text(self, data: memoryview | bytes) -> memoryview:
        if self._text_crc is not None:
            self._text_crc = crc32c(np.frombuffer(data, np.uint8), self._text_crc)
        self.plain += len(data)
        return memoryview(data)

    def end(self) -> None:
        if self._text_crc is not None:
            self.crcs.append(self._text_crc)
            self._text_crc = None

    def fail(self, reason: str, *, whole: bool = False) -> None:
        """Stop decoding here; read the rest for the checksum of the file."""
        self.damage = Damage(reason, self.plain, whole, self.verified, self.raw)
        while self.read(_READ_BYTES):
            pass


class DecodedStream:
    """The text of a compressed file, in order, from a generator of decoded pieces."""

    def __init__(self, file: _RawFile, pieces: "Callable[[_RawFile], Generator[memoryview]]") -> None:
        self._file = file
        self._pieces = ahead(_joined(pieces(file)), depth=4)
        self._left = memoryview(b"")

    def readinto(self, out: Bytes) -> int:
        filled = 0
        while filled < len(out):
            if not self._left.nbytes:
                self._left = next(self._pieces, memoryview(b""))
                if not self._left.nbytes:
                    break
            count = min(len(out) - filled, self._left.nbytes)
            out[filled : filled + count] = np.frombuffer(self._left[:count], np.uint8)
            self._left = self._left[count:]
            filled += count
        return filled

    def take_blocks(self) -> list[Block]:
        return _take(self._file.blocks)

    def take_crcs(self) -> list[int]:
        return _take(self._file.crcs)

    def close(self) -> None:
        self._pieces.close()

    @property
    def raw(self) -> int:
        return self._file.raw

    @property
    def crc32c(self) -> int:
        return self._file.crc32c

    @property
    def warning(self) -> str | None:
        return self._file.warning

    @property
    def damage(self) -> Damage | None:
        return self._file.damage


Stream = PlainStream | DecodedStream


def _take(items: list[T]) -> list[T]:
    count = len(items)  # the thread may be appending
    taken = items[:count]
    del items[:count]
    return taken


def _joined(pieces: Generator[memoryview]) -> Generator[memoryview]:
    """Pieces of about 1 MB: passing on every BGZF block between threads costs more than decoding it."""
    parts: list[memoryview] = []
    size = 0
    for piece in pieces:
        parts.append(piece)
        size += piece.nbytes
        if size >= _READ_BYTES:
            yield memoryview(b"".join(parts))
            parts.clear()
            size = 0
    yield memoryview(b"".join(parts))


def _gzip(file: _RawFile) -> Generator[memoryview]:
    stream = Inflate(file.read, spacing=file.point_bytes)
    while (piece := stream.read()).nbytes:
        for point in stream.points:
            if point.plain == file.plain:
                file.begin(point.raw, point.window)
        yield file.text(bytes(piece))  # a copy: `piece` is overwritten
        for point in stream.points:
            if point.plain == file.plain:
                file.begin(point.raw, point.window)
        stream.points.clear()
    file.end()
    file.verified = stream.verified
    stream.close()
    if stream.damage:
        file.fail(stream.damage, whole=stream.whole)


def _gzip_once(file: _RawFile) -> Generator[memoryview]:
    data = b""
    while data or (data := file.read(_READ_BYTES)):
        decoder = fast_zlib.decompressobj(31)
        at = file.raw - len(data)
        if at and data[:1] == b"\0" and not data.strip(b"\0"):  # padding after the last member
            data = b""
            continue
        if data[:1] != b"\x1f":
            return file.fail(f"the gzip data is followed by other data at byte {at}", whole=True)
        where = f"of the gzip member that starts at byte {at}"
        if file.raw == len(data):
            file.begin(0)
        while not decoder.eof:
            try:
                text = decoder.decompress(data, _READ_BYTES)  # 1 MB of a file can be 1 GB of text
            except fast_zlib.error as error:
                reason = f"the gzip data is damaged at byte {file.raw} or before ({error}), at the end or in the middle"
                return file.fail(f"{reason} {where}")
            if text:
                yield file.text(text)
            data = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
            if data or decoder.eof or len(text) == _READ_BYTES:  # the decoder may have more text
                continue
            data = file.read(_READ_BYTES)
            if not data:
                return file.fail(f"the gzip data ends at byte {file.raw}, in the middle {where}")
        file.verified = file.plain
    file.end()


def _bgzf(file: _RawFile) -> Generator[memoryview]:
    text = b"?"
    while head := file.read(18):
        start = file.raw - len(head)
        size = bgzf_size(head)
        if not size and head[:3] == b"\x1f\x8b\x08" and len(head) == 18:
            raise MixedGzip
        rest = file.read(max(size - 18, 0))
        if int.from_bytes(rest[-4:], "little") > _BGZF_BYTES and len(rest) == size - 18:
            raise MixedGzip  # not what the format allows: decoded at once, 64 kB can be 64 MB of text
        try:
            if not size or len(rest) < size - 18:
                raise zlib.error("it is truncated" if size or len(head) < 18 else "not a BGZF block")
            text = decode_bgzf(rest)
        except zlib.error as error:
            return file.fail(f"the BGZF block at byte {start} is damaged ({error})")
        if text:
            file.begin(start)
            yield file.text(text)
            file.end()
            file.verified = file.plain
    if text:
        file.warning = (
            "the empty block at the end of a BGZF file is missing; the file may be truncated between two blocks"
        )


def _zstd(file: _RawFile) -> Generator[memoryview]:
    while head := file.read(4):
        start = file.raw - len(head)
        try:
            number = int.from_bytes(head, "little")
            if number >> 4 == _SKIPPABLE:
                size = int.from_bytes(_exactly(file, 4), "little")
                for skipped in range(0, size, _READ_BYTES):
                    _exactly(file, min(_READ_BYTES, size - skipped))
                continue
            if number != _ZSTD:
                raise _BadFrame(f"the data at byte {start} is not a zstd frame")
            frame = _frame(file, start)
            text = decode_frame(head + frame, size=file.frame_bytes)
        except (_BadFrame, zlib.error) as error:
            if "did not decompress full frame" in str(error):
                _check_frame_size(file, start, file.frame_bytes + 1)
            known = isinstance(error, _BadFrame)
            return file.fail(str(error) if known else f"the zstd frame at byte {start} is damaged ({error})")
        if text:
            file.begin(start)
            yield file.text(text)
            file.end()
        if frame[0] & _HAS_CHECKSUM and file.verified == file.plain - len(text):
            file.verified = file.plain


class _BadFrame(Exception):
    """A zstd frame cannot be read."""


def _exactly(file: _RawFile, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise _BadFrame(f"the zstd data ends at byte {file.raw}, in the middle of a frame")
    return data


def _frame(file: _RawFile, start: int) -> bytes:
    """The bytes of a frame after its magic number, found by following its blocks (RFC 8878)."""
    descriptor = _exactly(file, 1)
    flags = descriptor[0]
    single = flags >> 5 & 1
    size_bytes = (single, 2, 4, 8)[flags >> 6]
    parts = [descriptor, _exactly(file, (1 - single) + (0, 1, 2, 4)[flags & 3] + size_bytes)]
    if size_bytes:
        content = int.from_bytes(parts[1][-size_bytes:], "little") + (256 if size_bytes == 2 else 0)
        _check_frame_size(file, start, content)
    num_blocks = last = 0
    while not last:
        parts.append(_exactly(file, 3))
        block = int.from_bytes(parts[-1], "little")
        last = block & 1
        parts.append(_exactly(file, 1 if block >> 1 & 3 == 1 else block >> 3))
        num_blocks += 1
        _check_frame_size(file, start, (num_blocks - 1) << 10)  # blocks have at most 128 kB, seldom less than 1 kB
    if flags & _HAS_CHECKSUM:
        parts.append(_exactly(file, 4))
    return b"".join(parts)


def _check_frame_size(file: _RawFile, start: int, size: int) -> None:
    if size > file.frame_bytes:
        raise BadSource(
            f"{file.path}: the zstd frame at byte {start} has more than {file.frame_bytes >> 20} MB of text, too "
            "much to decode for a single read. Compress in many frames (zstd --seekable, pzstd, t2sz), or: "
            f"zstd -dc {file.path} | gzip > reads.gz"
        )
