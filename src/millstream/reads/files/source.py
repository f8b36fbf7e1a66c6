"""The file that reads come from: scanned from front to back, buffer by buffer. Recognised by content."""

import os
import re
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from millstream.core.console import quoted
from millstream.core.fingerprint import Fingerprint, fingerprint_of, version_of
from millstream.core.record import Bytes
from millstream.core.remote import RemotePath, RemoteStream, open_raw
from millstream.errors import BadSource, StaleIndex
from millstream.reads.files.containers import (
    MAX_FRAME_BYTES,
    POINT_BYTES,
    Damage,
    Kind,
    MixedGzip,
    Stream,
    open_stream,
    pack_first,
    sniff,
)
from millstream.reads.files.in_order import Stdin
from millstream.reads.files.inflate import ahead
from millstream.reads.files.scanner import START, Format, ScanError, Scanned, Scanner

T = TypeVar("T")
BUFFER_BYTES = 1 << 20  # fits the L2 cache: 16 MB buffers are half as fast
_SAM = re.compile(rb"@(HD|SQ|RG|PG|CO)\t(\w\w:)?")


@dataclass(frozen=True, kw_only=True)
class ScanLimits:
    """How many bytes are read, and decoded, at once."""

    buffer_bytes: int = BUFFER_BYTES
    frame_bytes: int = MAX_FRAME_BYTES
    point_bytes: int = POINT_BYTES


class SourceScan:
    """Scans a file buffer by buffer. `format`, `end` and `damage` are final once it is exhausted.

    With `salvage`, a damaged file ends where its checksums no longer verify its text; with `unverified`, at the damage.
    `stdin` is read instead of the file `-`.
    """

    def __init__(
        self,
        path: Path,
        kind: Kind,
        *,
        salvage: bool,
        unverified: bool = False,
        points: bool = True,
        limits: ScanLimits | None = None,
        command: str = "",
        stdin: Stdin | None = None,
        reference: Path | None = None,
    ) -> None:
        limits = limits or ScanLimits()
        self.path = path
        self.kind: Kind = kind
        self.damage: Damage | None = None
        self.format: Format = "fasta"
        self.end = 0  # of the text with records
        self.usable = sys.maxsize  # bytes of the text
        self._salvage = salvage
        self._unverified = unverified
        self._checked = sys.maxsize  # bytes of the text that checksums verify, if the file is damaged
        self._num_records = self._num_checked = 0  # records so far, and how many start in these bytes
        self._limits = limits
        self._command = command or f"millstream index {quoted(path)}"  # which --salvage is added to
        self._buffer_bytes = limits.buffer_bytes
        self._raw = open_raw(path) if stdin is None else stdin
        self._before = None
        if stdin is None:
            self._before = self._raw.info if isinstance(self._raw, RemoteStream) else os.fstat(self._raw.fileno())
        self._open_stream = partial(
            open_stream, path, kind, point_bytes=limits.point_bytes, frame_bytes=limits.frame_bytes, reference=reference
        )
        self.num_bytes = 0 if self._before is None else self._before.st_size  # of the file
        self.stream = self._open_stream(self._raw, points=points)
        self._scans: Generator[object] | None = None

    def scans(self, parse: Callable[[Path, Scanned], T]) -> Generator[tuple[Scanned, T]]:
        """Read and scan in a thread, parse in another one; a buffer stays valid while the next two are taken."""

        def parsed() -> Generator[tuple[Scanned, T]]:
            with closing(ahead(self._scan(), depth=1)) as scans:
                for found in scans:
                    yield found, parse(self.path, found)

        scans = self._scans = ahead(parsed(), depth=2)
        return scans

    def __iter__(self) -> Generator[Scanned]:
        """Read and scan in a thread."""
        scans = self._scans = ahead(self._scan(), depth=2)
        return scans

    def __enter__(self) -> "SourceScan":
        return self

    def __exit__(self, *_: object) -> None:
        if self._scans is not None:
            self._scans.close()  # stops the thread that reads ahead
        self.stream.close()
        self._raw.close()

    def fingerprint(self) -> "Fingerprint":
        """The fingerprint of the file, once all of it has been read; StaleIndex if it has changed since."""
        if self._before is None:
            return Fingerprint(self.stream.raw, 0, 0, self.stream.crc32c)
        after = self.path.info() if isinstance(self.path, RemotePath) else self.path.stat()
        if version_of(after) != version_of(self._before):
            raise StaleIndex(f"{self.path}: changed while it was being read. Try again once it is complete")
        return fingerprint_of(self.path, after, self.stream.crc32c)

    def _scan(self) -> Generator[Scanned]:
        # In use are one that is filled, three in queues, one that is parsed, and two of the caller.
        ring = [np.empty(self._buffer_bytes, np.uint8) for _ in range(7)]
        carried, at, turn = 0, 0, 0
        if self._salvage and self.kind != "plain":
            self._checked = self._count_verified()
            self.usable = sys.maxsize if self._unverified else self._checked
        room = self.usable
        scanner: Scanner | None = None
        while True:
            buffer = ring[turn % len(ring)]
            count = self.stream.readinto(buffer[carried : carried + room])
            room -= count
            if count == 0:
                self._finish()
            if scanner is None:
                self.format = _sniff_format(self.path, buffer[:count], self.stream)
                scanner = Scanner(self.format, self._buffer_bytes)
            filled = carried + count
            found = self._scanned(scanner, buffer, filled, at, final=count == 0)
            cut = (self.damage and not self.damage.whole) or scanner.unfinished() is not None
            if count == 0 and cut:
                found = _without_last(found, fastq=self.format == "fastq")
            self._num_records += len(found.rows)
            # FASTQ that starts where verified text ends shows that the record before it is whole.
            limit = self._checked - (self.format == "fasta")
            self._num_checked += int(np.count_nonzero(found.rows[:, START] <= limit))
            if count == 0:
                self._list_unverified()
            yield _copied(found)
            if count == 0:
                self.end = at + filled
                return
            left = filled - found.consumed
            if left == self._buffer_bytes:
                raise BadSource(
                    f"{self.path}: the header line at byte {at} of the text is longer than {self._buffer_bytes} bytes"
                )
            turn += 1
            ring[turn % len(ring)][:left] = buffer[found.consumed : filled]
            carried, at = left, at + found.consumed

    def _scanned(self, scanner: Scanner, buffer: Bytes, filled: int, at: int, *, final: bool) -> Scanned:
        try:
            found = scanner.scan(buffer, filled, at=at, final=final)
        except ScanError as error:
            raise self._invalid(error) from None
        start = scanner.unfinished() if final else None
        if start is not None and not self._salvage:
            raise BadSource(
                f"{self.path}: ends in the middle of record {scanner.records - 1}, which starts at byte "
                f"{start}{self._of_text()}. To use the {scanner.records - 1} records before it: "
                f"{self._command} --salvage"
            )
        return found

    def _invalid(self, error: ScanError) -> BadSource:
        advice = ""
        if self.kind != "plain" and not self._salvage:  # whether its checksum matches is known at the end of a member
            advice = f". If the file is damaged: {self._command} --salvage"
        elif self._checked <= error.at:
            decode = "zstd -dc" if self.kind == "zstd" else "gzip -dc"
            advice = (
                ". The file is damaged, and no checksum verifies this text. To use what precedes this record: "
                f"{decode} {quoted(self.path)} | head -c {error.start} > reads.{self.format}"
            )
        return BadSource(
            f"{self.path}: {error.why}, at byte {error.at}{self._of_text()}, in record {error.record}{advice}"
        )

    def _of_text(self) -> str:
        return "" if self.kind == "plain" else " of the text"

    def _count_verified(self) -> int:
        """How much of the text to use: all, or if the file is damaged, what checksums verify. Decodes all of it.

        The checksum of a gzip member comes after its text: only a pass over the whole file tells.
        """
        with open_raw(self.path) as raw:
            stream = self._open_stream(raw, points=False)
            try:
                _exhaust(stream)
            finally:
                stream.close()
        return sys.maxsize if stream.damage is None else stream.damage.verified

    def _finish(self) -> None:
        """Read what is left of the file, and note the damage; BadSource if it is not to be salvaged."""
        _exhaust(self.stream)
        damage = self.stream.damage
        if damage is None:
            return
        unverified = damage.plain - damage.verified
        if damage.plain and (not self._salvage or not self.usable):
            command = self._command
            if not damage.verified:
                advice = f"is not verified by a checksum. To use it all the same: {command} --unverified"
            elif not unverified:
                advice = f"is verified by checksums. To use it: {command} --salvage"
            else:
                advice = (
                    f"is verified by checksums up to byte {damage.verified}. To use that: {command} --salvage; to use "
                    f"the unverified text too: {command} --unverified"
                )
            raise BadSource(f"{self.path}: {damage.reason}. The text before it ({damage.plain} bytes) {advice}")
        whole = damage.whole and (self._unverified or not unverified)
        self.damage = damage._replace(whole=whole)

    def _list_unverified(self) -> None:
        """Say in the damage which records no checksum verifies, once all of them are known."""
        if self.damage is None or not (unverified := self.damage.plain - self.damage.verified):
            return
        number = max(self._num_checked - 1, 0) if self._unverified else self._num_records
        reason = f"{self.damage.reason}; {unverified} bytes of text before it, from record {number} on, "
        reason += "are not verified by a checksum"
        if not self._unverified:
            reason += " and are left out (to include them: --unverified)"
        self.damage = self.damage._replace(reason=reason)


def looks_like_reads(path: Path) -> bool:
    """Whether a file starts like FASTA or FASTQ."""
    head = np.empty(4096, np.uint8)
    with open_raw(path) as raw:
        try:
            stream = open_stream(path, sniff(path), raw)
            try:
                _sniff_format(path, head[: stream.readinto(head)], stream)
            finally:
                stream.close()
        except (BadSource, MixedGzip):
            return False
    return True


def first_header(path: Path) -> str:
    """The first header line of a FASTA or FASTQ file, as far as it is among the first 4096 bytes."""
    head = np.empty(4096, np.uint8)
    with open_raw(path) as raw:
        stream = open_stream(path, sniff(path), raw)
        try:
            text = head[: stream.readinto(head)]
            mark = b">" if _sniff_format(path, text, stream) == "fasta" else b"@"
        finally:
            stream.close()
    lines = (line for line in text.tobytes().splitlines() if line.startswith(mark))
    return next(lines, b"")[1:].decode(errors="replace")


def _exhaust(stream: Stream) -> None:
    scratch = np.empty(BUFFER_BYTES, np.uint8)
    while stream.readinto(scratch):
        pass


def _without_last(found: Scanned, *, fastq: bool) -> Scanned:
    """Drop the truncated record at the end of damaged text; its header is the only one there."""
    rows = found.rows if fastq else found.rows[:-1]
    return found._replace(rows=rows, header_starts=found.header_starts[:0], header_ends=found.header_ends[:0])


def _copied(found: Scanned) -> Scanned:
    """The scanner reuses its arrays."""
    buffer, rows, starts, ends, segments, qualities, consumed = found
    return Scanned(buffer, rows.copy(), starts.copy(), ends.copy(), segments.copy(), qualities.copy(), consumed)


def _sniff_format(path: Path, head: Bytes, stream: Stream) -> Format:
    """FASTA or FASTQ, by the first byte that is not blank and not in a comment."""
    if not len(head):
        reason = f": {stream.damage.reason}" if stream.damage else ""
        raise BadSource(f"{path}: empty{reason}")
    text = bytes(head[:65536])
    name = "BAM" if text.startswith(b"BAM\1") else "SAM" if _SAM.match(text) else None
    if name:
        raise BadSource(f"{path}: is {name}, not FASTA or FASTQ. {pack_first(path)}")
    if b"\r" in text[:-1] and b"\n" not in text:
        raise BadSource(
            f"{path}: its lines end in CR without LF. Convert it: tr '\\r' '\\n' < {quoted(path)} > reads.fa"
        )
    for line in text.splitlines():
        line = line.strip()
        if line[:1] == b">":
            return "fasta"
        if line[:1] == b"@":
            return "fastq"
        if line[:1] not in (b"", b";"):
            break
    lower = text[:512].lstrip().lower()
    found = f"starts with {text[:20]!r}"
    if lower.startswith((b"<!doctype", b"<html", b"<?xml")):
        found = "is a web page (an error page saved under this name?)"
    elif b"\0" in text or sum(byte >= 127 for byte in text[:512]) > 100:
        found = "is a binary file"
    raise BadSource(f"{path}: neither FASTA nor FASTQ; it {found}. FASTA starts with '>', FASTQ with '@'")
