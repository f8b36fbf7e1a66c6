"""The index of one FASTA or FASTQ file: built in one pass, found again when the file is opened.

For each record it stores the span in bytes, the number of bases and the line layout; offsets are sums of spans. Columns
take one to two bytes per short read and grow on disk while the file is read, so memory does not depend on the size of
the file.
"""

import errno
import hashlib
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np

from millstream.core.arguments import checked
from millstream.core.collection import Numbers
from millstream.core.config import parse_bytes
from millstream.core.console import Progress, format_bytes, quoted, say, silent
from millstream.core.files import cache_folder, spool_root
from millstream.core.fingerprint import Fingerprint
from millstream.core.remote import RemotePath, is_url
from millstream.errors import AccessDenied, BadIndex, BadSetting, BadSource, StaleIndex
from millstream.reads.files.columns import LIMIT, ColumnsWriter, OnMismatch, Pending
from millstream.reads.files.containers import Kind, MixedGzip, sniff
from millstream.reads.files.encodings import ANCHOR
from millstream.reads.files.headers import Headers
from millstream.reads.files.names import PARTS, SMALL, NameTableWriter, hash_names
from millstream.reads.files.scanner import BASES, EOL, GAP, HEAD, LINE, START
from millstream.reads.files.sections import Sections
from millstream.reads.files.sections_writer import SectionsWriter
from millstream.reads.files.source import ScanLimits, SourceScan

SUFFIX = ".millstream"
INDEXING_BYTES = 160 << 20  # measured: 60 MB of buffers, 60 MB to sort a name table
_WHAT = "index of reads"
_READ_ONLY_SCHEMES = ("http", "https", "hf")
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


@dataclass(frozen=True, kw_only=True)
class IndexSettings:
    """What to index. `columns` are the groups of `header_regex` to keep; default: all."""

    header_regex: str | None = None
    columns: tuple[str, ...] | None = None
    on_mismatch: OnMismatch = "error"
    names: bool = False
    salvage: bool = False
    unverified: bool = False  # salvage text that no checksum verifies, too

    def __post_init__(self) -> None:
        if self.on_mismatch not in ("error", "skip", "null"):
            raise ValueError(f"on_mismatch={self.on_mismatch!r}: must be one of error, skip, null")

    def complete(self) -> "IndexSettings":
        """With the names of all columns; BadSource if header_regex has no such group."""
        groups = tuple(column.name for column in Headers(self.header_regex).columns) if self.header_regex else ()
        unknown = [name for name in self.columns or () if name not in groups]
        if unknown:
            has = f"header_regex has {', '.join(groups)}" if groups else "no header_regex given"
            raise BadSource(f"columns {', '.join(unknown)}: {has}")
        return self if self.columns is not None else replace(self, columns=groups)

    def over(self, made: "IndexSettings") -> "IndexSettings":
        """These settings, and where they say nothing, those that an index was made with."""
        regex, salvage = self if self.header_regex else made, self if self.salvage else made
        return IndexSettings(
            header_regex=regex.header_regex,
            columns=regex.columns if self.columns is None else self.columns,
            on_mismatch=regex.on_mismatch if self.on_mismatch == "error" else self.on_mismatch,
            names=self.names or made.names,
            salvage=salvage.salvage,
            unverified=salvage.unverified,
        )

    def serves(self, wanted: "IndexSettings") -> bool:
        """Whether an index built with these settings, which are complete, has everything that is wanted."""
        columns = wanted.complete().columns or ()
        if self.names < wanted.names or self.salvage < wanted.salvage:
            return False
        if wanted.salvage and self.unverified != wanted.unverified:
            return False
        if wanted.header_regex is None:
            return True
        agrees = self.on_mismatch in ("error", wanted.on_mismatch)  # "error": all headers matched
        return self.header_regex == wanted.header_regex and agrees and set(columns) <= set(self.columns or ())


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


def index_paths(path: Path, index_dir: Path | None = None) -> list[Path]:
    """Where the index of a file may be, best first: beside it or in the cache folder, or in `index_dir`."""
    unique = f"{path.name}-{hashlib.sha256(os.fsencode(str(path.resolve()))).hexdigest()[:12]}{SUFFIX}"
    if index_dir is not None:
        return [index_dir / unique]
    return [path.with_name(path.name + SUFFIX), cache_folder() / unique]


def find_index(path: Path, index_dir: Path | None = None) -> Path | None:
    """The index of a file; None if it has none."""
    places = index_paths(path, index_dir)
    if index_dir is not None and is_url(path):
        places = [path.with_name(path.name + SUFFIX), *places]
    return next((index for index in places if _is_there(index)), None)


def _is_there(index: Path) -> bool:
    try:
        return index.is_file()
    except AccessDenied:  # some servers refuse to tell that there is no such object
        return False


def write_index(path: Path, write: Callable[[Path], None], *, index_dir: Path | None = None) -> Path:
    """Call `write` with the first path for the index of a file that can be written; returns that path."""
    paths = index_paths(path, index_dir)
    if isinstance(paths[0], RemotePath):
        return _upload_index(paths[0], write)
    for index in paths:
        try:
            index.parent.mkdir(parents=True, exist_ok=True)
            write(index)
            return index
        except OSError as error:
            if index is paths[-1] or error.errno not in _READ_ONLY:
                raise
    raise AssertionError


def _upload_index(index: RemotePath, write: Callable[[Path], None]) -> Path:
    """Write an index on local disk, and upload it."""
    if index.scheme in _READ_ONLY_SCHEMES:
        raise BadSetting(
            f"{index.parent}: is read only, so the index of {index.stem} needs another folder: --index-dir FOLDER "
            "(in Python: index_dir=)"
        )
    with TemporaryDirectory(dir=spool_root()) as folder:
        made = Path(folder) / index.name
        write(made)
        index.put(made)
    return index


def index_command(path: Path, index: Path) -> str:
    """The command that writes this index of a file, or replaces it with the settings it had."""
    command = f"millstream index {quoted(path)}" + (" --rebuild" if _is_there(index) else "")
    return command if index in index_paths(path) else f"{command} --index-dir {quoted(index.parent)}"


def load_index(path: Path, index: Path) -> Sections:
    """The index of a file; an error if it is damaged, of another kind, or of another version of the file."""
    again = f"Rebuild: {index_command(path, index)}"
    sections = Sections(index, remedy=again)
    if sections.meta.get("what") != _WHAT:
        raise BadIndex(f"{index}: is an {sections.meta.get('what')}, not an {_WHAT}. {again}")
    difference = Fingerprint.of_json(sections.meta["fingerprint"]).difference(path)
    if difference is not None:
        raise StaleIndex(f"{path}: changed since it was indexed ({difference}). {again}")
    return sections


@checked
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
    chosen, given = settings.complete(), limits or IndexLimits()

    def write(index: Path) -> None:
        kind, estimate = sniff(path), True
        while True:
            try:
                return _build(path, chosen, given, index, kind, progress, notify, estimate=estimate)
            except MixedGzip:
                kind = "gzip"
            except _FewRecords:
                estimate = False

    index = write_index(path, write, index_dir=index_dir)
    if index != index_paths(path, index_dir)[0]:  # never of an object
        notify(f"{path.parent} is not writable; the index is {index}")
    return index


def settings_of(sections: Sections) -> IndexSettings:
    """The settings an index was built with."""
    stored = cast(dict[str, Any], sections.meta["settings"])
    settings: dict[str, Any] = {"unverified": sections.meta["damage"] is not None, **stored}
    return replace(IndexSettings(**settings), columns=tuple(settings["columns"]))


def add_names(path: Path, sections: Sections) -> Sections:
    """Rebuild the index with a name table."""
    settings = replace(settings_of(sections), names=True)
    records = sections.meta["records"]
    say(f"{path}: building a table of its {records} names, once (in advance: millstream index --names)")
    is_beside = sections.path == index_paths(path)[0]
    return load_index(path, build_index(path, settings, index_dir=None if is_beside else sections.path.parent))


def _build(
    path: Path,
    settings: IndexSettings,
    limits: IndexLimits,
    index: Path,
    kind: Kind,
    progress: Progress,
    notify: Callable[[str], None],
    *,
    estimate: bool,
) -> None:
    """`estimate`: guess from the first records how many there are; _FewRecords if that was wrong."""
    names = NameTableWriter(index.parent, large=settings.names, small=limits.names, parts=limits.name_parts)
    try:
        with (
            SourceScan(
                path,
                kind,
                salvage=settings.salvage,
                unverified=settings.unverified,
                limits=limits,
                command=index_command(path, index),
            ) as source,
            SectionsWriter(index) as sections,
        ):
            meta = _scan(source, settings, limits, sections, names, progress, notify, estimate=estimate)
            sections.publish({"what": _WHAT, **meta, "fingerprint": source.fingerprint().to_json()})
    finally:
        names.close()


def _scan(
    source: SourceScan,
    settings: IndexSettings,
    limits: IndexLimits,
    sections: SectionsWriter,
    names: NameTableWriter,
    progress: Progress,
    notify: Callable[[str], None],
    *,
    estimate: bool,
) -> dict[str, object]:
    geometry, blocks = _Geometry(sections, rows_at_once=limits.rows_at_once), _Blocks(sections)
    columns = ColumnsWriter(
        settings.header_regex,
        settings.columns or (),
        sections,
        on_mismatch=settings.on_mismatch,
        distinct=limits.distinct,
    )
    hashes, keeping = Pending[np.int64](), Pending[np.bool_]()  # of headers whose record has not ended
    num_headers = 0
    for found, parsed in source.scans(columns.parse):
        starts, rows = found.header_starts, found.rows
        if len(starts):
            keeping.add(columns.add(source.path, found, parsed, first=num_headers))
            if names.wanted:
                hashes.add(hash_names(found.buffer, starts, found.header_ends))
            num_headers += len(starts)
        if len(rows):
            keeps = keeping.take(len(rows))
            kept = None if keeps.all() else keeps
            if names.wanted:
                names.append(hashes.take(len(rows))[slice(None) if kept is None else kept])
            columns.emit(np.ascontiguousarray(rows[:, BASES]), kept)
            geometry.add(rows if kept is None else rows[kept], fastq=source.format == "fastq")
            if estimate and source.stream.raw:
                names.expect(geometry.records * source.num_bytes / source.stream.raw)
        blocks.add(source)
        progress(source.stream.raw)
    blocks.add(source)
    geometry.finish(source.end, fastq=source.format == "fastq")
    if names.given_up and geometry.records <= limits.names:
        raise _FewRecords
    stored = columns.finish()
    names.finish(sections)
    columns.mismatches.report(lambda text: notify(f"{source.path}: {text}"))
    if source.stream.warning:
        notify(f"{source.path}: {source.stream.warning}")
    if source.damage:
        notify(f"{source.path}: {source.damage.reason}. Indexed the {geometry.records} records before it")
    return {
        "file": source.path.name,
        "kind": source.kind,
        "format": source.format,
        "records": geometry.records,
        "bases": geometry.bases,
        "longest": geometry.longest,
        "text_bytes": source.end,
        "largest_block": max(blocks.largest, source.end - blocks.last) if blocks.num_blocks else 0,
        "blocks_end": blocks.raw_end if blocks.raw_end or not source.damage else source.damage.raw,
        "settings": asdict(settings),
        "columns": [asdict(column) for column in stored],
        "mismatches": columns.mismatches.meta(),
        "damage": source.damage.reason if source.damage else None,
    }


class _FewRecords(Exception):
    """A file has fewer records than its first ones let expect: it gets a table of names after all."""


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
        self.num_blocks = self._num_crcs = 0
        self.last = self.largest = 0  # where the last block starts in the text; the size of the largest before it
        self.raw_end: int | None = None  # where the first block that is not usable starts

    def add(self, source: SourceScan) -> None:
        crcs = source.stream.take_crcs()  # first: a block is there before its checksum
        found = source.stream.take_blocks()
        blocks = [block for block in found if block.plain < source.usable]
        if len(blocks) < len(found) and self.raw_end is None:
            self.raw_end = found[len(blocks)].raw
        self.num_blocks += len(blocks)
        if blocks:
            rows: list[tuple[int, int, int]] = []
            for block in blocks:
                self.largest, self.last = max(self.largest, block.plain - self.last), block.plain
                window = zlib.compress(block.window, 1) if block.window else b""
                self._windows.write(window)
                rows.append((block.raw, block.plain, self._window_end))
                self._window_end += len(window)
            for column, values in zip(self._columns, np.array(rows, np.int64).T, strict=True):
                column.append(values)
        crcs = crcs[: self.num_blocks - self._num_crcs]
        self._num_crcs += len(crcs)
        if crcs:
            self._crcs.append(np.array(crcs, np.int64))
