"""FASTA or FASTQ -> one packed file in one pass. Killed at any instant, the same command resumes.

Parts grow in `OUT.partial`. Every two seconds they are flushed to disk, and the journal records how far they are
complete, at the start of a record. A resumed run scans the text again, which also rebuilds the header columns, and
packs from that record on; the resulting file is identical.
"""

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from millstream.core.console import Progress, say, silent
from millstream.core.files import RESUME, PartialOutput, no_space, partial_folder
from millstream.core.record import crc32c
from millstream.errors import BadSource, SourceError, StaleIndex, StoreExists
from millstream.reads.files.columns import ColumnsWriter, Mismatches, Pending
from millstream.reads.files.containers import Kind, MixedGzip, sniff
from millstream.reads.files.headers import Headers
from millstream.reads.files.index import IndexLimits, IndexSettings
from millstream.reads.files.names import NameTableWriter, hash_names
from millstream.reads.files.scanner import BASES, Format
from millstream.reads.files.sections import SectionsWriter
from millstream.reads.files.source import Fingerprint, Scan, Scanning, samples_crc32c
from millstream.reads.pack.header_blocks import HeaderBlocksWriter, best_codec
from millstream.reads.pack.pack_file import VERSION, WHAT, describe_fidelity, is_pack, load_pack
from millstream.reads.pack.pack_writer import PackWriter, ScannedText


@dataclass(frozen=True)
class PackSummary:
    """What was written."""

    path: Path
    records: int
    bases: int
    bytes: int
    is_exact: bool  # `unpack` restores the exact bytes
    fidelity: str  # what `unpack` restores, in words


def pack(
    sources: Sequence[Path],
    out: Path,
    *,
    settings: IndexSettings | None = None,
    names: bool = True,
    quality: bool = True,
    rebuild: bool = False,
    progress: Progress = silent,
    notify: Callable[[str], None] = say,
    limits: IndexLimits | None = None,
    commit_s: float = 2.0,
) -> PackSummary:
    """Pack files, one after the other, into one. After an interruption, call it again to resume.

    Without `names` the header lines are left out, without `quality` the base qualities of FASTQ. `settings.names`
    also builds a name table for many records. `rebuild` starts over and replaces `out`. Progress is saved every
    `commit_s` seconds.
    """
    chosen = settings or IndexSettings()
    terms = _terms(sources, chosen, names=names, quality=quality)
    if out.exists() and not rebuild:
        return _done(sources, out, terms, notify)
    out.parent.mkdir(parents=True, exist_ok=True)
    kinds: list[Kind] = [sniff(path) for path in sources]
    with _partial(out, terms, rebuild=rebuild) as journal, no_space(out, RESUME):
        try:
            while True:
                with SectionsWriter(out, folder=journal.path, advice=RESUME) as sections:
                    packer = Packer(sections, chosen, journal, terms, limits or IndexLimits(), commit_s, progress)
                    if packer.pack(sources, kinds, notify):
                        break
        except SourceError:
            journal.remove()  # of no use, with that source
            raise
        journal.remove()
    return _summary(out)


def _partial(out: Path, terms: Mapping[str, object], *, rebuild: bool) -> PartialOutput:
    return PartialOutput(out, terms, rebuild=rebuild, start_over="start over with --rebuild")


def _terms(sources: Sequence[Path], settings: IndexSettings, *, names: bool, quality: bool) -> dict[str, object]:
    """What must be the same for resuming an interrupted run."""
    if not sources:
        raise BadSource("no files to pack: millstream pack SOURCE... OUT")
    files: dict[str, object] = {}
    for number, path in enumerate(sources):
        if not path.is_file():
            raise BadSource(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}")
        stat = path.stat()
        file = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "samples_crc32c": samples_crc32c(path)}
        files[f"source {number} {path.name}"] = file
    shape = {"pack_version": VERSION, "names": names, "quality": quality, "codec": best_codec() if names else None}
    return {**files, **shape, "settings": asdict(replace(settings, columns=_wanted(settings)))}


def _wanted(settings: IndexSettings) -> tuple[str, ...]:
    groups = tuple(column.name for column in Headers(settings.header_regex).columns) if settings.header_regex else ()
    unknown = [name for name in settings.columns or () if name not in groups]
    if unknown:
        raise BadSource(f"columns {', '.join(unknown)}: header_regex has {', '.join(groups) or 'no groups'}")
    return groups if settings.columns is None else settings.columns


def _done(
    sources: Sequence[Path], out: Path, terms: Mapping[str, object], notify: Callable[[str], None]
) -> PackSummary:
    """`out` exists: nothing to do if it is what would be written."""
    why = "it is not a packed file" if not is_pack(out) else None
    if why is None:
        meta: dict[str, Any] = load_pack(out).meta
        made: list[dict[str, Any]] = meta["sources"]
        wanted = {key: terms[key] for key in ("names", "quality", "settings")}
        if len(made) != len(sources):
            why = f"it was packed from {len(made)} files, not {len(sources)}"
        elif {key: meta[key] for key in wanted} != {**wanted, "settings": _as_json(terms["settings"])}:
            why = "it was packed with other settings"
        for path, source in zip(sources, made, strict=False):
            difference = Fingerprint.of_json(source["fingerprint"]).difference(path) if why is None else None
            why = why or (f"{path} has changed since it was packed: {difference}" if difference else None)
    if why is not None:
        raise StoreExists(f"{out}: already exists, and {why}. Choose another name, or replace it with --rebuild")
    if partial_folder(out).exists():  # killed after it was published
        with _partial(out, terms, rebuild=True) as journal:
            journal.remove()
    notify(f"{out}: already packed from {'this file' if len(sources) == 1 else 'these files'}, nothing to do")
    return _summary(out)


def _as_json(settings: object) -> object:
    assert isinstance(settings, dict)
    return {**settings, "columns": list(settings["columns"])}  # pyright: ignore


def _summary(out: Path) -> PackSummary:
    meta: dict[str, Any] = load_pack(out).meta
    size = out.stat().st_size
    return PackSummary(out, meta["records"], meta["bases"], size, meta["exact"], describe_fidelity(meta))


class Packer:
    """One run over all sources, one after the other."""

    def __init__(
        self,
        sections: SectionsWriter,
        settings: IndexSettings,
        journal: PartialOutput,
        terms: Mapping[str, Any],
        limits: IndexLimits,
        commit_s: float,
        progress: Progress,
    ) -> None:
        self._sections, self._settings, self._journal, self._terms = sections, settings, journal, terms
        self._limits = limits
        self._commit_s = commit_s
        self._progress = progress
        self._headers = Headers(settings.header_regex) if settings.header_regex else None
        self._wanted = _wanted(settings)
        self._columns: ColumnsWriter | None = None
        self._writer: PackWriter | None = None
        self._format: Format | None = None
        self._resume_from = journal.load()  # None once it is reached
        self._all_kept = np.empty(0, np.bool_)
        self._kept_rows = Pending[np.bool_]()
        self._sources: list[dict[str, object]] = []
        self._damages: list[str] = []
        self._mismatches: list[Mismatches] = []
        self._num_headers = self._num_rows = 0  # of this source
        self._is_cut = False  # the last record of this source is truncated
        self._raw = self._text_bytes = self._text_crc = 0
        self._committed = time.monotonic()
        self._safe: dict[str, Any] | None = None  # before the last record, which is truncated in a damaged file

    def pack(self, sources: Sequence[Path], kinds: list[Kind], notify: Callable[[str], None]) -> bool:
        """Pack the sources and publish the file; False when one is of another kind, noted in `kinds`: start over."""
        try:
            for number, path in enumerate(sources):
                try:
                    self._add(path, kinds[number])
                except MixedGzip:
                    kinds[number] = "gzip"
                    return False
            self._sections.publish(self._finish(notify))
        finally:
            if self._writer:
                self._writer.close()
        return True

    def _add(self, path: Path, kind: Kind) -> None:
        """Scan a source and pack its records."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        salvage = self._settings.salvage
        scanning = Scanning(path, fd, kind, salvage=salvage, points=salvage, limits=self._limits)
        self._mismatches.append(Mismatches(self._settings.header_regex or "", self._settings.on_mismatch, path))
        self._num_headers = self._num_rows = 0
        self._is_cut = False
        scans = iter(scanning)
        try:
            before = os.fstat(fd)
            for scan, is_last in _with_last_marked(scans):
                self._scan(scanning, scan, is_last=is_last)
                self._progress(self._raw + scanning.stream.raw)
            if self._num_rows < self._num_headers:
                self._drop_last()
                self._is_cut = True
            if self._is_cut and not scanning.damage:
                self._damages.append(f"{path}: ends in the middle of record {self._num_rows}")
            after = os.stat(path)
            if (before.st_ino, before.st_size, before.st_mtime_ns) != (after.st_ino, after.st_size, after.st_mtime_ns):
                raise StaleIndex(f"{path}: changed while it was packed. Once it is complete, run the command again")
            whole = Fingerprint(after.st_size, after.st_mtime_ns, samples_crc32c(path), scanning.stream.crc32c)
            self._sources.append({"file": path.name, "kind": kind, "fingerprint": whole.to_json()})
            self._raw += after.st_size
            if scanning.damage:
                self._damages.append(f"{path}: {scanning.damage.reason}")
        finally:
            scans.close()  # stops the thread that reads ahead
            scanning.stream.close()
            os.close(fd)

    def _finish(self, notify: Callable[[str], None]) -> dict[str, object]:
        """Complete all parts; returns their description."""
        writer, terms = self._writer, self._terms
        assert writer is not None
        writer.finish()
        stored = self._columns.finish() if self._columns else []
        if not terms["names"]:
            for lost in (column.name for column in stored if column.kept == "header"):
                notify(f"column {lost!r} has too many distinct values to be stored without the names; it is dropped")
            stored = [column for column in stored if column.kept != "header"]
        if writer.headers and (writer.records <= self._limits.names or self._settings.names):
            self._write_names(writer.headers)
        mismatches = sum(found.count for found in self._mismatches)
        skipped = self._settings.on_mismatch == "skip" and mismatches > 0
        examples = [example for found in self._mismatches for example in found.examples]
        if mismatches:
            what = "skipped" if skipped else "kept without values"
            notify(f"{mismatches} headers do not match header_regex and were {what}, e.g. {'; '.join(examples[:5])}")
        for damage in self._damages:
            notify(f"{damage}. Packed the records before it")
        return {
            "what": WHAT,
            "pack_version": VERSION,
            "format": self._format,
            **writer.meta(),
            "exact": bool(writer.keeps_layout and terms["names"] and not skipped and not self._damages),
            "text_bytes": self._text_bytes,
            "text_crc32c": self._text_crc,
            "sources": self._sources,
            "names": terms["names"],
            "quality": terms["quality"],
            "codec": terms["codec"],
            "settings": asdict(replace(self._settings, columns=self._wanted)),
            "columns": [asdict(column) for column in stored],
            "mismatches": {"count": mismatches, "examples": examples[:5]},
            "damage": self._damages,
        }

    def _scan(self, scanning: Scanning, scan: Scan, *, is_last: bool) -> None:
        buffer, found = scan.buffer, scan.found
        if self._writer is None:
            self._writer = self._begin(scanning.format)
        if scanning.format != self._format:
            raise BadSource(
                f"{scanning.path}: {scanning.format}, but other sources are {self._format}. Pack them separately"
            )
        self._text_crc = crc32c(buffer[: found.consumed], self._text_crc)
        self._text_bytes += found.consumed
        starts, ends, rows = found.header_starts, found.header_ends, found.rows
        if len(starts) > len(self._all_kept):
            self._all_kept = np.ones(2 * len(starts), np.bool_)
        kept = self._all_kept[: len(starts)]
        if self._columns and len(starts):
            try:
                matched = self._columns.add(buffer, starts, ends)
            except BadSource as error:
                raise BadSource(f"{scanning.path}: {error}") from None
            if not matched.all():
                self._mismatches[-1].add(buffer, starts, ends, np.nonzero(~matched)[0], self._num_headers)
                kept = matched if self._settings.on_mismatch == "skip" else kept
        self._kept_rows.add(kept)
        kept_rows = self._kept_rows.take(len(rows))
        bases = np.ascontiguousarray(rows[:, BASES])
        if self._columns and len(rows):
            self._columns.emit(bases, None if kept_rows.all() else kept_rows)
        # The last scan has a header line without newline, or nothing. Without a header it is truncated, and is skipped.
        is_cut = is_last and not len(starts) and found.consumed > 0
        self._is_cut |= is_cut
        headers = np.stack([starts, ends], axis=1)
        end = 0 if is_cut else found.consumed
        self._write(ScannedText(buffer, (0, end), headers, kept, found.segments, found.qualities, bases, kept_rows))
        self._num_headers += len(starts)
        self._num_rows += len(rows)

    def _write(self, found: ScannedText) -> None:
        """Pack a buffer, or its rest after the last run; in two pieces, to save a state before its last record."""
        assert self._writer is not None
        header = row = begin = 0
        if self._resume_from is not None:
            source, record = self._resume_from["source"], self._resume_from["record"]
            header = record - self._num_headers if len(self._sources) == source else len(found.kept)
            if header >= len(found.kept):
                return
            row = max(record - self._num_rows, 0)
            begin = int(found.headers[header, 0]) - 1
            self._resume_from = None
        due = time.monotonic() - self._committed >= self._commit_s
        if (due or self._settings.salvage) and header < len(found.kept):
            last = len(found.kept) - 1
            middle = int(found.headers[last, 0]) - 1
            ended = self._num_headers + last - self._num_rows  # rows of the records before the last one
            self._writer.add(found.part((header, last), (begin, middle), (row, ended)))
            header, row, begin = last, ended, middle
            record = self._num_headers + last
            self._safe = {"source": len(self._sources), "record": record, **self._writer.state(sync=due)}
            if due:
                self._journal.commit(self._safe, self._safe["sections"]["parts"])
                self._committed = time.monotonic()
        self._writer.add(found.part((header, len(found.kept)), (begin, found.text[1]), (row, len(found.bases))))

    def _drop_last(self) -> None:
        """The last record of this source is truncated: return to the state before it."""
        if self._resume_from is None and self._writer is not None and self._safe is not None:
            self._writer.restore(self._safe)
        self._kept_rows = Pending[np.bool_]()

    def _begin(self, format: Format) -> PackWriter:
        self._format = format
        writer = PackWriter(self._sections, format, names=self._terms["names"], quality=self._terms["quality"])
        if self._resume_from is not None:
            writer.restore(self._resume_from)
        if self._headers:
            self._columns = ColumnsWriter(self._headers, self._wanted, self._sections, distinct=self._limits.distinct)
        return writer

    def _write_names(self, headers: HeaderBlocksWriter) -> None:
        names = NameTableWriter(self._journal.path, large=True, parts=self._limits.name_parts)
        try:
            for lines in headers.lines():
                names.append(hash_names(*lines))
            names.finish(self._sections)
        finally:
            names.close()


def _with_last_marked(scans: Iterator[Scan]) -> Generator[tuple[Scan, bool]]:
    """Each scan, and whether it is the last: known when there is no next one. Two buffers are valid at once."""
    held = next(scans, None)
    while held is not None:
        following = next(scans, None)
        yield held, following is None
        held = following
