"""The index of one FASTA or FASTQ file: built in one pass, found again when the file is opened; names -> numbers.

For each record it stores the span in bytes, the number of bases and the line layout; offsets are sums of spans. Columns
are bit-packed, one to two bytes per short read, and grow on disk while the file is read, so memory does not depend on
the size of the file.
"""

import errno
import hashlib
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from millstream.core.collection import Numbers
from millstream.core.config import parse_bytes
from millstream.core.console import Progress, format_bytes, quoted, say, silent
from millstream.core.files import cache_folder
from millstream.errors import BadIndex, BadSource, StaleIndex
from millstream.reads.files.bit_columns import ANCHOR
from millstream.reads.files.columns import LIMIT, ColumnsWriter, Kept, Mismatches, OnMismatch, Pending, Stored
from millstream.reads.files.containers import (
    Kind,
    MixedGzip,
    Stream,
    sniff,
)
from millstream.reads.files.headers import Headers
from millstream.reads.files.names import PARTS, SMALL, NameTableWriter, hash_names
from millstream.reads.files.scanner import BASES, EOL, GAP, HEAD, LINE, START
from millstream.reads.files.sections import Sections, SectionsWriter
from millstream.reads.files.source import Fingerprint, ScanLimits, Scanning, samples_crc32c

SUFFIX = ".millstream"
INDEXING_BYTES = 160 << 20  # measured: 60 MB of buffers, 60 MB to sort a name table
_WHAT = "index of reads"
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


@dataclass(frozen=True, kw_only=True)
class IndexSettings:
    """What to index. `columns` are the groups of `header_regex` to keep; default: all."""

    header_regex: str | None = None
    columns: tuple[str, ...] | None = None
    on_mismatch: OnMismatch = "error"
    names: bool = False
    salvage: bool = False

    def __post_init__(self) -> None:
        if self.on_mismatch not in ("error", "skip", "null"):
            raise ValueError(f"on_mismatch={self.on_mismatch!r}: must be one of error, skip, null")

    def serves(self, wanted: "IndexSettings") -> bool:
        """Whether an index built with these settings has everything that is wanted."""
        if self.names < wanted.names or self.salvage < wanted.salvage:
            return False
        if wanted.header_regex is None:
            return _wanted(None, wanted.columns) == ()
        agrees = self.on_mismatch in ("error", wanted.on_mismatch)  # "error": all headers matched
        same = self.header_regex == wanted.header_regex and agrees
        return same and set(_wanted(Headers(wanted.header_regex), wanted.columns)) <= set(self.columns or ())


@dataclass(frozen=True, kw_only=True)
class IndexLimits(ScanLimits):
    """How much is processed at once while a file is indexed. Only the last two and `point_bytes` affect the index."""

    rows_at_once: int = 32768  # written together, to amortise numpy's cost per call
    name_parts: int = PARTS
    names: int = SMALL
    distinct: int = LIMIT


def check_memory(memory: int | str) -> None:
    """ValueError if indexing needs more memory than this."""
    if parse_bytes(memory) < INDEXING_BYTES:
        raise ValueError(f"memory={memory!r}: indexing needs {format_bytes(INDEXING_BYTES)}, for files of any size")


def find_index(path: Path, index_dir: Path | None = None) -> Path | None:
    """The index of a file, beside it or in the index folder; None if it has none."""
    return next((place for place in index_places(path, index_dir) if place.exists()), None)


def index_places(path: Path, index_dir: Path | None = None) -> list[Path]:
    """Where the index of a file may be, best place first."""
    unique = f"{path.name}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}{SUFFIX}"
    if index_dir is not None:
        return [index_dir / unique]
    return [path.with_name(path.name + SUFFIX), cache_folder() / unique]


def load_index(path: Path, index: Path) -> Sections:
    """The index of a file; an error if it is damaged, of another kind, or of another version of the file."""
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
    limits: IndexLimits | None = None,
    progress: Progress = silent,
    notify: Callable[[str], None] = say,
) -> Path:
    """Read a file once and publish its index; returns its path. Leaves nothing behind when it fails."""
    limits = limits or IndexLimits()
    places = index_places(path, index_dir)
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                _build(path, settings, limits, place, sniff(path), progress, notify)
            except MixedGzip:
                _build(path, settings, limits, place, "gzip", progress, notify)
            if place is not places[0]:
                notify(f"{path.parent} is not writable; the index is {place}")
            return place
        except OSError as error:
            if place is places[-1] or error.errno not in _READ_ONLY:
                raise
    raise AssertionError


def settings_of(sections: Sections) -> IndexSettings:
    """The settings an index was built with."""
    settings = cast(dict[str, Any], sections.meta["settings"])
    return replace(IndexSettings(**settings), columns=tuple(settings["columns"]))


def add_names(path: Path, sections: Sections) -> Sections:
    """Rebuild the index with a name table."""
    settings = replace(settings_of(sections), names=True)
    say(
        f"{path}: building a table of its {sections.meta['records']} names, once (in advance: millstream index --names)"
    )
    folder = sections.path.parent
    beside = sections.path == index_places(path)[0]
    return load_index(path, build_index(path, settings, index_dir=None if beside else folder))


def stored_columns(sections: Sections) -> list[Stored]:
    """The columns of an index."""
    columns = cast("list[dict[str, Any]]", sections.meta["columns"])
    return [Stored(*(column[name] for name in ("name", "kind", "kept", "nullable"))) for column in columns]


def outdated_column(sections: Sections) -> str | None:
    """The name of a column in a layout that only an older millstream reads, if there is one."""
    return next((column.name for column in stored_columns(sections) if column.kept not in get_args(Kept)), None)


def _build(
    path: Path,
    settings: IndexSettings,
    limits: IndexLimits,
    place: Path,
    kind: Kind,
    progress: Progress,
    notify: Callable[[str], None],
) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    names = NameTableWriter(place.parent, large=settings.names, small=limits.names, parts=limits.name_parts)
    scanning = Scanning(path, fd, kind, salvage=settings.salvage, limits=limits)
    try:
        before = os.fstat(fd)
        with SectionsWriter(place) as sections:
            meta = _index(scanning, settings, limits, sections, names, progress, notify)
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
    limits: IndexLimits,
    sections: SectionsWriter,
    names: NameTableWriter,
    progress: Progress,
    notify: Callable[[str], None],
) -> dict[str, object]:
    geometry = _Geometry(sections, rows_at_once=limits.rows_at_once)
    blocks = _Blocks(sections)
    headers = Headers(settings.header_regex) if settings.header_regex else None
    wanted = _wanted(headers, settings.columns)
    columns = ColumnsWriter(headers, wanted, sections, distinct=limits.distinct) if headers else None
    mismatches = Mismatches(settings.header_regex or "", settings.on_mismatch, scanning.path)
    hashes, matching = Pending[np.int64](), Pending[np.bool_]()  # of headers whose record has not ended
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
            matching.add(np.ones(len(starts), np.bool_) if matched is None or not skips else matched)
            if names.wanted:
                hashes.add(hash_names(buffer, starts, ends))
            num_headers += len(starts)
        if len(rows):
            matches = matching.take(len(rows))
            kept = None if matches.all() else matches
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
        what = "skipped" if skips else "kept without values"
        shown = "; ".join(mismatches.examples)
        notify(f"{scanning.path}: {mismatches.count} headers do not match header_regex and were {what}, e.g. {shown}")
    if scanning.stream.warning:
        notify(f"{scanning.path}: {scanning.stream.warning}")
    if scanning.damage:
        notify(f"{scanning.path}: {scanning.damage.reason}. Indexed the {geometry.records} records before it")
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


def _wanted(headers: Headers | None, columns: tuple[str, ...] | None) -> tuple[str, ...]:
    groups = tuple(column.name for column in headers.columns) if headers else ()
    unknown = [name for name in columns or () if name not in groups]
    if unknown:
        has = f"header_regex has {', '.join(groups)}" if headers else "no header_regex given"
        raise BadSource(f"columns {', '.join(unknown)}: {has}")
    return groups if columns is None else columns


class _Geometry:
    """Writes the scanner's rows into packed columns. A row waits until the start of the next one is known."""

    def __init__(self, sections: SectionsWriter, *, rows_at_once: int) -> None:
        self._rows_at_once = rows_at_once
        self._anchors = sections.column("anchor")
        self._columns = {name: sections.column(name) for name in ("span", "bases", "tail", "line", "eol", "gap")}
        self._waiting: list[Numbers] = []
        self._num_waiting = 0
        self.records = self.bases = self.longest = 0

    def add(self, rows: Numbers, *, fastq: bool) -> None:
        self._waiting.append(rows)
        self._num_waiting += len(rows)
        if self._num_waiting > self._rows_at_once:
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
    """Writes where decoding can start."""

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
