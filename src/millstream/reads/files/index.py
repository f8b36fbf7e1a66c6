"""The index of one FASTA or FASTQ file: building it in one pass, and finding it again.

What it says of a record is its span in bytes, its number of bases, and how its lines are laid out; offsets are sums of
spans. Everything is packed, so a file of short reads takes one to two bytes a read, and grows on disk while the file is
read: memory does not depend on the file's size.
"""

import errno
import hashlib
import os
import zlib
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from millstream.config import parse_bytes
from millstream.console import Progress, format_bytes, quoted, say, silent
from millstream.errors import BadIndex, BadSource, StaleIndex
from millstream.records import Bytes
from millstream.source.ahead import ahead
from millstream.source.containers import Damage, Kind, MixedGzip, Stream, open_stream, sniff
from millstream.source.fingerprint import Fingerprint, samples_crc32c
from millstream.source.headers import Headers
from millstream.source.names import hash_names
from millstream.source.scan import BASES, EOL, GAP, HEAD, LINE, START, Format, ScanError, Scanned, Scanner
from millstream.store.header_columns import ColumnsWriter, Mismatches, OnMismatch, Pending, Stored
from millstream.store.name_table import NameTableWriter
from millstream.store.packed import ANCHOR, Numbers
from millstream.store.sections import Sections, SectionsWriter

SUFFIX = ".millstream"
BUFFER_BYTES = 1 << 20  # fits the L2 cache: 16 MB buffers are half as fast
INDEXING_BYTES = 160 << 20  # measured: 60 MB of buffers, and 60 MB of what a name table sorts at once
_MANY_ROWS = 32768  # written together: numpy's cost for each call counts
_WHAT = "index of reads"


@dataclass(frozen=True, kw_only=True)
class IndexSettings:
    """What an index is to hold. `columns` are the groups of `header_regex` to keep, all by default."""

    header_regex: str | None = None
    columns: tuple[str, ...] | None = None
    on_mismatch: OnMismatch = "error"
    names: bool = False
    salvage: bool = False

    def __post_init__(self) -> None:
        if self.on_mismatch not in ("error", "skip", "null"):
            raise ValueError(f"on_mismatch={self.on_mismatch!r}: it is error, skip or null")

    def serves(self, wanted: "IndexSettings") -> bool:
        """Whether an index made with these settings holds what is wanted."""
        if self.names < wanted.names or self.salvage < wanted.salvage:
            return False
        if wanted.header_regex is None:
            return _wanted(None, wanted.columns) == ()
        fits = self.on_mismatch in ("error", wanted.on_mismatch)  # with error, there was none that did not fit
        same = self.header_regex == wanted.header_regex and fits
        return same and set(_wanted(Headers(wanted.header_regex), wanted.columns)) <= set(self.columns or ())


def check_memory(memory: int | str) -> None:
    """ValueError when indexing cannot keep to so many bytes."""
    if parse_bytes(memory) < INDEXING_BYTES:
        raise ValueError(
            f"memory {memory!r}: indexing takes up to {format_bytes(INDEXING_BYTES)}, whatever the file's size"
        )


def find_index(path: Path, index_dir: Path | None = None) -> Path | None:
    """The index of a file, beside it or in the folder for indexes; None when there is none."""
    return next((place for place in index_places(path, index_dir) if place.exists()), None)


def index_places(path: Path, index_dir: Path | None = None) -> list[Path]:
    """Where the index of a file may lie, best first."""
    unique = f"{path.name}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}{SUFFIX}"
    if index_dir is not None:
        return [index_dir / unique]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [path.with_name(path.name + SUFFIX), cache / "millstream" / unique]


def load_index(path: Path, index: Path) -> Sections:
    """A file's index, if it can be believed: whole, ours, and of this very file."""
    again = f"Rebuild: millstream index {quoted(path)} --rebuild"
    sections = Sections(index, remedy=again)
    if sections.meta.get("what") != _WHAT:
        raise BadIndex(f"{index}: is an {sections.meta.get('what')}, not an {_WHAT}. {again}")
    difference = Fingerprint.of_json(sections.meta["fingerprint"]).difference(path)
    if difference is not None:
        raise StaleIndex(f"{path}: changed since it was indexed ({difference}). {again}")
    return sections


def build_index(
    path: Path,
    settings: IndexSettings,
    *,
    index_dir: Path | None = None,
    progress: Progress = silent,
    notify: Callable[[str], None] = say,
) -> Path:
    """Read a file once and publish its index; where that is. Nothing is left behind when it fails."""
    places = index_places(path, index_dir)
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                _build(path, settings, place, sniff(path), progress, notify)
            except MixedGzip:
                _build(path, settings, place, "gzip", progress, notify)
            if place is not places[0]:
                notify(f"{path.parent} cannot be written to; the index is {place}")
            return place
        except OSError as error:
            if place is places[-1] or error.errno not in _READ_ONLY:
                raise
    raise AssertionError


_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


class Scan(NamedTuple):
    """One buffer of a file's text, and what was found in it."""

    buffer: Bytes
    found: Scanned


class Scanning:
    """A file's text in buffers, scanned; what is known of it afterwards."""

    def __init__(self, path: Path, fd: int, kind: Kind, *, salvage: bool, points: bool = True) -> None:
        self.path = path
        self.kind: Kind = kind
        self.stream: Stream = open_stream(path, kind, fd, points=points)
        self.damage: Damage | None = None
        self.format: Format = "fasta"
        self.end = 0  # of the text that holds records
        self._salvage = salvage

    def __iter__(self) -> Generator[Scan]:
        """Read and scan in a thread; a buffer stays as it is while the next three are filled."""
        yield from ahead(self._scan(), depth=2)

    def _scan(self) -> Generator[Scan]:
        ring = [np.empty(BUFFER_BYTES, np.uint8) for _ in range(5)]
        carried, at, turn = 0, 0, 0
        scanner: Scanner | None = None
        while True:
            buffer = ring[turn % len(ring)]
            count = self.stream.readinto(buffer[carried:])
            if scanner is None:
                self.format = _sniff_format(self.path, buffer[:count], self.stream)
                scanner = Scanner(self.format, BUFFER_BYTES)
            filled = carried + count
            if count == 0:
                self.damage = self.stream.damage
                self._check_damage(scanner)
            found = self._scanned(scanner, buffer, filled, at, final=count == 0)
            cut = (self.damage and not self.damage.whole) or scanner.unfinished() is not None
            if count == 0 and cut:
                found = _without_last(found, fastq=self.format == "fastq")
            yield Scan(buffer, _copied(found))
            if count == 0:
                self.end = at + filled
                return
            left = filled - found.consumed
            if left == BUFFER_BYTES:
                raise BadSource(
                    f"{self.path}: a header line longer than {BUFFER_BYTES} bytes, at byte {at} of the text"
                )
            turn += 1
            ring[turn % len(ring)][:left] = buffer[found.consumed : filled]
            carried, at = left, at + found.consumed

    def _scanned(self, scanner: Scanner, buffer: Bytes, filled: int, at: int, *, final: bool) -> Scanned:
        try:
            found = scanner.scan(buffer, filled, at=at, final=final)
        except ScanError as error:
            raise BadSource(
                f"{self.path}: {error.why}, at byte {error.at}{self._of_text()}, in record {error.record}"
            ) from None
        start = scanner.unfinished() if final else None
        if start is not None and not self._salvage:
            raise BadSource(
                f"{self.path}: ends in the middle of record {scanner.records - 1}, which starts at byte "
                f"{start}{self._of_text()}. To use the {scanner.records - 1} records before it: "
                f"millstream index {quoted(self.path)} --salvage"
            )
        return found

    def _of_text(self) -> str:
        return "" if self.kind == "plain" else " of the text"

    def _check_damage(self, scanner: Scanner) -> None:
        if self.damage is None or self._salvage:
            return
        whole = scanner.records - (0 if self.damage.whole else 1)
        raise BadSource(
            f"{self.path}: {self.damage.reason}. The {max(whole, 0)} records before it ({self.damage.plain} bytes of "
            f"text) can be used: millstream index {quoted(self.path)} --salvage"
        )


def _without_last(found: Scanned, *, fastq: bool) -> Scanned:
    """What the end of damaged text held, without the record that was cut: it has no other header than that one's."""
    rows = found.rows if fastq else found.rows[:-1]
    return found._replace(rows=rows, header_starts=found.header_starts[:0], header_ends=found.header_ends[:0])


def looks_like_reads(path: Path) -> bool:
    """Whether a file begins as FASTA or FASTQ does."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    head = np.empty(4096, np.uint8)
    try:
        stream = open_stream(path, sniff(path), fd)
        try:
            _sniff_format(path, head[: stream.readinto(head)], stream)
        finally:
            stream.close()
    except (BadSource, MixedGzip):
        return False
    finally:
        os.close(fd)
    return True


def _copied(found: Scanned) -> Scanned:
    """The scanner writes over its arrays."""
    rows, starts, ends, segments, qualities, consumed = found
    return Scanned(rows.copy(), starts.copy(), ends.copy(), segments.copy(), qualities.copy(), consumed)


def _sniff_format(path: Path, head: Bytes, stream: Stream) -> Format:
    """FASTA or FASTQ, told by the first byte that is no blank and in no comment."""
    if not len(head):
        reason = f": {stream.damage.reason}" if stream.damage else ", no bytes at all"
        raise BadSource(f"{path}: empty{reason}")
    text = bytes(head[:65536])
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


def _build(
    path: Path,
    settings: IndexSettings,
    place: Path,
    kind: Kind,
    progress: Progress,
    notify: Callable[[str], None],
) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    names = NameTableWriter(place.parent, large=settings.names)
    scanning = Scanning(path, fd, kind, salvage=settings.salvage)
    try:
        before = os.fstat(fd)
        with SectionsWriter(place) as sections:
            meta = _index(scanning, settings, sections, names, progress, notify)
            after = os.stat(path)
            if (before.st_ino, before.st_size, before.st_mtime_ns) != (after.st_ino, after.st_size, after.st_mtime_ns):
                raise StaleIndex(
                    f"{path}: changed while it was indexed. Once it is complete: millstream index {quoted(path)}"
                )
            whole = Fingerprint(after.st_size, after.st_mtime_ns, samples_crc32c(path), scanning.stream.crc32c)
            sections.publish({"what": _WHAT, **meta, "fingerprint": whole.to_json()})
    finally:
        names.close()
        scanning.stream.close()
        os.close(fd)


def _index(
    scanning: Scanning,
    settings: IndexSettings,
    sections: SectionsWriter,
    names: NameTableWriter,
    progress: Progress,
    notify: Callable[[str], None],
) -> dict[str, object]:
    geometry = _Geometry(sections)
    blocks = _Blocks(sections)
    headers = Headers(settings.header_regex) if settings.header_regex else None
    wanted = _wanted(headers, settings.columns)
    columns = ColumnsWriter(headers, wanted, sections) if headers else None
    mismatches = Mismatches(settings.header_regex or "", settings.on_mismatch, scanning.path)
    hashes, fitting = Pending[np.int64](), Pending[np.bool_]()  # of headers whose record has not ended
    skips = settings.on_mismatch == "skip"
    num_headers = 0
    for buffer, found in scanning:
        starts, ends, rows = found.header_starts, found.header_ends, found.rows
        if len(starts):
            try:
                matched = columns.add(buffer, starts, ends) if columns else None
            except BadSource as error:
                raise BadSource(f"{scanning.path}: {error}") from None
            if matched is not None and not matched.all():
                mismatches.add(buffer, starts, ends, np.nonzero(~matched)[0], num_headers)
            fitting.add(np.ones(len(starts), np.bool_) if matched is None or not skips else matched)
            if names.wanted:
                hashes.add(hash_names(buffer, starts, ends))
            num_headers += len(starts)
        if len(rows):
            fit = fitting.take(len(rows))
            kept = None if fit.all() else fit
            if names.wanted:
                names.append(hashes.take(len(rows))[slice(None) if kept is None else kept])
            if columns:
                columns.emit(np.ascontiguousarray(rows[:, BASES]), kept)
            geometry.add(rows if kept is None else rows[kept], fastq=scanning.format == "fastq")
        blocks.add(scanning.stream)
        progress(scanning.stream.raw)
    blocks.add(scanning.stream)
    geometry.finish(scanning.end, fastq=scanning.format == "fastq")
    stored = columns.finish() if columns else []
    names.finish(sections)
    if mismatches.count:
        what = "left out" if settings.on_mismatch == "skip" else "kept without values"
        shown = "; ".join(mismatches.examples)
        notify(f"{scanning.path}: {mismatches.count} headers do not fit header_regex and were {what}, as: {shown}")
    if scanning.stream.doubt:
        notify(f"{scanning.path}: {scanning.stream.doubt}")
    if scanning.damage:
        notify(f"{scanning.path}: {scanning.damage.reason}. Indexed what comes before: {geometry.records} records")
    return {
        "file": scanning.path.name,
        "kind": scanning.kind,
        "format": scanning.format,
        "records": geometry.records,
        "bases": geometry.bases,
        "longest": geometry.longest,
        "text_bytes": scanning.end,
        "settings": asdict(replace(settings, columns=wanted)),
        "columns": [asdict(column) for column in stored],
        "mismatches": {"count": mismatches.count, "examples": mismatches.examples},
        "damage": scanning.damage.reason if scanning.damage else None,
    }


def settings_of(sections: Sections) -> IndexSettings:
    """What an index was made with."""
    settings = cast(dict[str, Any], sections.meta["settings"])
    return replace(IndexSettings(**settings), columns=tuple(settings["columns"]))


def add_names(path: Path, sections: Sections) -> Sections:
    """Make the index again, with a table of names."""
    settings = replace(settings_of(sections), names=True)
    say(
        f"{path}: making a table of its {sections.meta['records']} names, once (millstream index --names does it ahead)"
    )
    folder = sections.path.parent
    beside = sections.path == index_places(path)[0]
    return load_index(path, build_index(path, settings, index_dir=None if beside else folder))


def stored_columns(sections: Sections) -> list[Stored]:
    """The columns an index has."""
    return [Stored(**column) for column in sections.meta["columns"]]  # pyright: ignore


def _wanted(headers: Headers | None, columns: tuple[str, ...] | None) -> tuple[str, ...]:
    groups = tuple(column.name for column in headers.columns) if headers else ()
    unknown = [name for name in columns or () if name not in groups]
    if unknown:
        has = f"header_regex has {', '.join(groups)}" if headers else "there is no header_regex"
        raise BadSource(f"columns {', '.join(unknown)}: {has}")
    return groups if columns is None else columns


class _Geometry:
    """Rows of the scanner on their way into packed columns. A row waits for the next one's start."""

    def __init__(self, sections: SectionsWriter) -> None:
        self._anchors = sections.column("anchor")
        self._columns = {name: sections.column(name) for name in ("span", "bases", "tail", "line", "eol", "gap")}
        self._waiting: list[Numbers] = []
        self._num_waiting = 0
        self.records = self.bases = self.longest = 0

    def add(self, rows: Numbers, *, fastq: bool) -> None:
        self._waiting.append(rows)
        self._num_waiting += len(rows)
        if self._num_waiting > _MANY_ROWS:
            waiting = np.concatenate(self._waiting)
            self._write(waiting[:-1], np.diff(waiting[:, START]), fastq)
            self._waiting, self._num_waiting = [waiting[-1:]], 1

    def finish(self, end: int, *, fastq: bool) -> None:
        if self._waiting:
            rows = np.concatenate(self._waiting)
            self._write(rows, np.diff(rows[:, START], append=end), fastq)

    def _write(self, rows: Numbers, span: Numbers, fastq: bool) -> None:
        if not len(rows):
            return
        bases = np.ascontiguousarray(rows[:, BASES])
        self._anchors.append(rows[-self.records % ANCHOR :: ANCHOR, START])
        values = {
            "span": span,
            "bases": bases,
            "tail": span - rows[:, HEAD] - bases * (2 if fastq else 1) - rows[:, GAP],
            "line": rows[:, LINE],
            "eol": rows[:, EOL],
            "gap": rows[:, GAP],
        }
        for name, column in self._columns.items():
            column.append(values[name])
        self.records += len(rows)
        self.bases += int(bases.sum())
        self.longest = max(self.longest, int(bases.max()))


class _Blocks:
    """Places where decoding can start."""

    def __init__(self, sections: SectionsWriter) -> None:
        self._columns = [sections.column(f"block.{name}") for name in ("raw", "plain", "window")]
        self._crcs = sections.column("block.crc32c")
        self._windows = sections.part("block.windows")
        self._window_end = 0

    def add(self, stream: Stream) -> None:
        blocks = stream.take_blocks()
        if blocks:
            rows: list[tuple[int, int, int]] = []
            for block in blocks:
                window = zlib.compress(block.window, 1) if block.window else b""
                self._windows.write(window)
                rows.append((block.raw, block.plain, self._window_end))
                self._window_end += len(window)
            for column, values in zip(self._columns, np.array(rows, np.int64).T, strict=True):
                column.append(values)
        crcs = stream.take_crcs()
        if crcs:
            self._crcs.append(np.array(crcs, np.int64))
