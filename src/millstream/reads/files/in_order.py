"""Files that are read once, from front to back, into a pack: bzip2, xz, alignments (BAM, CRAM, SAM), and stdin."""

import bz2
import lzma
import sys
from collections.abc import Callable, Generator
from io import RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from millstream.core.console import quoted
from millstream.errors import BadSetting, BadSource, MissingExtra

STDIN = "-"
ENDINGS = (".bz2", ".xz", ".bam", ".cram", ".sam")
READ_GROUPS = r"[^\t]*(?:\tRG:Z:(?P<read_group>[^\t]+))?"  # matches the headers that alignments get
_RAW_BYTES = 1 << 20
_TEXT_BYTES = 1 << 20
_XZ_MEMORY = 1 << 30  # of a decoder; xz -9 needs 65 MB
_SECONDARY, _SUPPLEMENTARY = 0x100, 0x800
_PAIRED, _FIRST, _LAST = 0x1, 0x40, 0x80
_HEAD_BYTES = 1 << 16


class Source(Protocol):
    """The file that a decoder reads, and where it notes what it finds."""

    path: Path
    raw: int
    plain: int
    verified: int
    reference: Path | None  # of a CRAM

    def read(self, count: int) -> bytes: ...
    def begin(self, raw: int, window: bytes = b"") -> None: ...
    def text(self, data: memoryview | bytes) -> memoryview: ...
    def fail(self, reason: str, *, whole: bool = False) -> None: ...


def bzip2_text(file: Source) -> Generator[memoryview]:
    """The text of all bzip2 streams of a file, each verified by its checksum."""
    return _decoded(file, "bzip2", bz2.BZ2Decompressor)


def xz_text(file: Source) -> Generator[memoryview]:
    """The same for xz."""
    return _decoded(file, "xz", lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY))


def _decoded(file: Source, name: str, decoder: Callable[[], Any]) -> Generator[memoryview]:
    file.begin(0)
    stream, data, start = decoder(), b"", 0
    while True:
        if not data and (stream.eof or stream.needs_input):
            start = file.raw if stream.eof else start
            data = file.read(_RAW_BYTES)
            if not data:
                break
        if stream.eof:
            data = data.lstrip(b"\0") if name == "xz" else data  # padding between streams
            if not data:
                continue
            stream = decoder()
        try:
            text = stream.decompress(data, _TEXT_BYTES)
        except (OSError, EOFError, lzma.LZMAError) as error:
            file.fail(f"its {name} data is damaged before byte {file.raw} ({error})")
            return
        data = stream.unused_data if stream.eof else b""
        if text:
            yield file.text(text)
        if stream.eof:
            file.verified = file.plain
    if not stream.eof and file.raw > start:
        file.fail(f"the {name} data ends at byte {file.raw}, in the middle of a stream")


def alignments_text(file: Source) -> Generator[memoryview]:
    """The reads of a BAM, CRAM or SAM file as they were sequenced, as FASTQ; as FASTA if the first has no qualities.

    Reads on the reverse strand are turned back; secondary and supplementary alignments, which repeat reads, are left
    out. Mates get /1 and /2. The read group follows the name, as of `samtools fastq -T RG`.
    """
    try:
        import pysam
    except ImportError:
        raise MissingExtra("BAM and CRAM files need the package 'pysam': pip install 'millstream[bam]'") from None
    library: Any = pysam
    reference = file.reference
    library.set_verbosity(0)  # htslib writes to stderr; its errors are ours to tell
    file.begin(0)
    pieces: list[str] = []
    size, is_fastq, records = 0, None, None
    try:
        given = None if reference is None else str(reference)
        with library.AlignmentFile(str(file.path), check_sq=False, reference_filename=given) as records:
            for read in records.fetch(until_eof=True):  # a loop in Python: pysam has no batches, and it runs once
                if read.flag & (_SECONDARY | _SUPPLEMENTARY):
                    continue
                sequence = read.get_forward_sequence() or ""
                qualities = read.get_forward_qualities()
                is_fastq = qualities is not None or not sequence if is_fastq is None else is_fastq
                name = read.query_name
                if read.flag & _PAIRED:
                    name += "/1" if read.flag & _FIRST else "/2" if read.flag & _LAST else ""
                if read.has_tag("RG"):
                    name += f"\tRG:Z:{read.get_tag('RG')}"
                if is_fastq:
                    grades = "!" * len(sequence) if qualities is None else library.qualities_to_qualitystring(qualities)
                    pieces.append(f"@{name}\n{sequence}\n+\n{grades}\n")
                else:
                    pieces.append(f">{name}\n{sequence}\n")
                size += len(pieces[-1])
                if size >= _TEXT_BYTES:
                    yield file.text("".join(pieces).encode())
                    file.verified = file.plain
                    pieces, size = [], 0
                    if records.is_bam:
                        file.read((records.tell() >> 16) - file.raw)  # for progress, and for the file's checksum
    except (OSError, ValueError) as error:
        if pieces:
            yield file.text("".join(pieces).encode())
            file.verified = file.plain
        reason = _reason(file.path, error, reference)
        if not file.plain:
            raise BadSource(f"{file.path}: {reason}") from None
        file.fail(reason, whole=True)
        return
    if pieces:
        yield file.text("".join(pieces).encode())
    while file.read(_RAW_BYTES):
        pass


def _reason(path: Path, error: Exception, reference: Path | None) -> str:
    with path.open("rb") as file:
        is_cram = file.read(4) == b"CRAM"
    if is_cram and reference is None:
        return (
            f"cannot be read ({error}). A CRAM needs the reference it was compressed with: millstream pack "
            f"--reference genome.fa {quoted(path)} OUT"
        )
    return f"cannot be read to its end ({error})"


class Stdin(RawIOBase):
    """Stdin, and its first bytes, to see what it is."""

    def __init__(self) -> None:
        self._source = piped("millstream pack - reads.pack")
        self.head = self._rest = self._source.read(_HEAD_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        data = self._rest[: len(out)] or self._source.read(len(out))
        self._rest = self._rest[len(data) :]
        out[: len(data)] = data
        return len(data)


def piped(command: str) -> BinaryIO:
    """Stdin, unless it is closed or a terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        raise BadSetting(f"-: pipe reads into it, as in zcat reads.fq.gz | {command}")
    return sys.stdin.buffer


def is_stdin(path: Path) -> bool:
    return str(path) == STDIN
