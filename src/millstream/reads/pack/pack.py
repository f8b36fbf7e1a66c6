"""FASTA or FASTQ -> one packed file in one pass. Killed at any instant, the same command goes on where it was.

Parts grow in `OUT.partial`. Every two seconds they are brought to disk and the journal says how far they are good, at
the start of a record. A run that goes on scans the text again, which also makes the columns of headers anew, and packs
from that record on; the file that comes out is the same to the last byte.
"""

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.console import Progress, say, silent
from millstream.errors import BadSource, SourceError, StaleIndex, StoreExists
from millstream.records import Bytes, crc32c
from millstream.source.containers import Kind, MixedGzip, sniff
from millstream.source.fingerprint import Fingerprint, samples_crc32c
from millstream.source.headers import Headers
from millstream.source.names import hash_names
from millstream.source.scan import BASES, Format
from millstream.store.gaps import GapsWriter, Pieces
from millstream.store.header_blocks import HeaderBlocksWriter, best_codec
from millstream.store.header_columns import ColumnsWriter, Mismatches, Pending
from millstream.store.index import IndexSettings, Scan, Scanning
from millstream.store.journal import SUFFIX, Journal
from millstream.store.layout import no_space
from millstream.store.name_table import SMALL, NameTableWriter
from millstream.store.pack_file import WHAT, is_pack
from millstream.store.packed import ANCHOR, Numbers
from millstream.store.qualities import QualitiesWriter
from millstream.store.sections import Sections, SectionsWriter
from millstream.store.twobit import TwoBitWriter

COMMIT_S = 2.0
_FULL = "What was packed is kept: free some space and run the same command again, it goes on from there"


@dataclass(frozen=True)
class PackSummary:
    """What was written."""

    path: Path
    records: int
    bases: int
    bytes: int


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
) -> PackSummary:
    """Pack files, one after the other, into one. Run again after an interruption, it goes on; when done, it says so.

    Without `names` the header lines are left out, without `quality` the quality letters of FASTQ. `settings.names`
    makes a table of names also for many records. `rebuild` starts anew and replaces `out`.
    """
    chosen = settings or IndexSettings()
    terms = _terms(sources, chosen, names=names, quality=quality)
    if out.exists() and not rebuild:
        return _done(sources, out, terms, notify)
    out.parent.mkdir(parents=True, exist_ok=True)
    kinds: list[Kind] = [sniff(path) for path in sources]
    with Journal(out, terms, rebuild=rebuild, advice=_FULL) as journal, no_space(out, _FULL):
        try:
            while not _pack(sources, kinds, out, journal, terms, chosen, progress, notify):
                pass
        except SourceError:
            journal.remove()  # of no use, with that source
            raise
        journal.remove()
    return _summary(out)


def _terms(sources: Sequence[Path], settings: IndexSettings, *, names: bool, quality: bool) -> dict[str, object]:
    """What must be the same for going on with an interrupted run."""
    if not sources:
        raise BadSource("no files to pack: millstream pack SOURCE... OUT")
    files: dict[str, object] = {}
    for number, path in enumerate(sources):
        if not path.is_file():
            raise BadSource(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}")
        stat = path.stat()
        file = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "samples_crc32c": samples_crc32c(path)}
        files[f"source {number} {path.name}"] = file
    shape = {"names": names, "quality": quality, "codec": best_codec() if names else None}
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
    """`out` is there: fine if it is what would be written."""
    why = "it is no packed file" if not is_pack(out) else None
    if why is None:
        meta: dict[str, Any] = Sections(out).meta
        made: list[dict[str, Any]] = meta["sources"]
        wanted = {key: terms[key] for key in ("names", "quality", "settings")}
        if len(made) != len(sources):
            why = f"it was packed from {len(made)} files, not {len(sources)}"
        elif {key: meta[key] for key in wanted} != {**wanted, "settings": _as_json(terms["settings"])}:
            why = "it was packed with other settings"
        for path, source in zip(sources, made, strict=False):
            difference = Fingerprint.of_json(source["fingerprint"]).difference(path) if why is None else None
            why = why or (f"{path} is not what it was packed from: {difference}" if difference else None)
    if why is not None:
        raise StoreExists(f"{out}: already there, and {why}. Choose another name, or replace it with --rebuild")
    if out.with_name(out.name + SUFFIX).exists():  # killed after it was published
        with Journal(out, terms, rebuild=True, advice=_FULL) as journal:
            journal.remove()
    notify(f"{out}: already packed from {'this file' if len(sources) == 1 else 'these files'}, nothing to do")
    return _summary(out)


def _as_json(settings: object) -> object:
    assert isinstance(settings, dict)
    return {**settings, "columns": list(settings["columns"])}  # pyright: ignore


def _summary(out: Path) -> PackSummary:
    meta: dict[str, Any] = Sections(out).meta
    return PackSummary(out, meta["records"], meta["bases"], out.stat().st_size)


def _pack(
    sources: Sequence[Path],
    kinds: list[Kind],
    out: Path,
    journal: Journal,
    terms: Mapping[str, object],
    settings: IndexSettings,
    progress: Progress,
    notify: Callable[[str], None],
) -> bool:
    """One run over all sources; False when a source turned out to be of another kind and all is to be done again."""
    with SectionsWriter(out, folder=journal.path, advice=_FULL) as sections:
        packing = _Packing(sections, settings, journal, terms, progress)
        try:
            for number, path in enumerate(sources):
                try:
                    packing.add(path, kinds[number])
                except MixedGzip:
                    kinds[number] = "gzip"
                    return False
            sections.publish({"what": WHAT, **packing.finish(journal.path, notify)})
        finally:
            packing.close()
    return True


class _Packing:
    """A run: sources go in one after the other, parts grow."""

    def __init__(
        self,
        sections: SectionsWriter,
        settings: IndexSettings,
        journal: Journal,
        terms: Mapping[str, object],
        progress: Progress,
    ) -> None:
        self._sections, self._settings, self._journal = sections, settings, journal
        self._terms = terms
        self._progress = progress
        self._kept_names = bool(terms["names"])
        headers = Headers(settings.header_regex) if settings.header_regex else None
        self._wanted = _wanted(settings)
        self._from = journal.load()  # go on from here; None once that is reached
        self._columns: ColumnsWriter | None = None
        self._headers = headers
        self._parts: _Parts | None = None
        self._format: Format | None = None
        self._all_kept = np.empty(0, np.bool_)
        self._fitting = Pending[np.bool_]()
        self._sources: list[dict[str, object]] = []
        self._damages: list[str] = []
        self._mismatches: list[Mismatches] = []
        self._num_headers = self._num_rows = 0  # of this source
        self._is_cut = False  # the last record of this source is not whole
        self._raw = self._text_bytes = self._text_crc = 0
        self._committed = time.monotonic()
        self._safe: dict[str, object] | None = None  # before the last record: a damaged file ends in half a one

    def add(self, path: Path, kind: Kind) -> None:
        """Scan a source and pack its records."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        scanning = Scanning(path, fd, kind, salvage=self._settings.salvage, points=self._settings.salvage)
        self._mismatches.append(Mismatches(self._settings.header_regex or "", self._settings.on_mismatch, path))
        self._num_headers = self._num_rows = 0
        self._is_cut = False
        scans = iter(scanning)
        try:
            before = os.fstat(fd)
            for scan, is_last in _marked(scans):
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

    def finish(self, folder: Path, notify: Callable[[str], None]) -> dict[str, object]:
        """Complete all parts; what is to be said of them."""
        parts = self._parts
        assert parts is not None
        parts.finish()
        stored = self._columns.finish() if self._columns else []
        if not self._kept_names:
            for lost in (column.name for column in stored if column.kept == "header"):
                notify(f"column {lost!r} has too many distinct values to be stored without the names; it is left out")
            stored = [column for column in stored if column.kept != "header"]
        if parts.headers and (parts.records <= SMALL or self._settings.names):
            self._write_names(folder, parts.headers)
        mismatches = sum(found.count for found in self._mismatches)
        left_out = self._settings.on_mismatch == "skip" and mismatches > 0
        examples = [example for found in self._mismatches for example in found.examples]
        if mismatches:
            what = "left out" if left_out else "kept without values"
            notify(f"{mismatches} headers do not fit header_regex and were {what}, as: {'; '.join(examples[:5])}")
        for damage in self._damages:
            notify(f"{damage}. Packed what comes before")
        return {
            "format": self._format,
            "records": parts.records,
            "bases": parts.bases,
            "longest": parts.longest,
            "exact": parts.keeps_layout and self._kept_names and not left_out and not self._damages,
            "text_bytes": self._text_bytes,
            "text_crc32c": self._text_crc,
            "sources": self._sources,
            "names": self._kept_names,
            "quality": self._terms["quality"],
            "codec": self._terms["codec"],
            "grades": parts.qualities.letters if parts.qualities else [],
            "settings": asdict(replace(self._settings, columns=self._wanted)),
            "columns": [asdict(column) for column in stored],
            "mismatches": {"count": mismatches, "examples": examples[:5]},
            "damage": self._damages,
        }

    def close(self) -> None:
        if self._parts:
            self._parts.close()

    def _scan(self, scanning: Scanning, scan: Scan, *, is_last: bool) -> None:
        buffer, found = scan.buffer, scan.found
        if self._parts is None:
            self._begin(scanning.format)
        if scanning.format != self._format:
            raise BadSource(f"{scanning.path}: {scanning.format}, after files of {self._format}. Pack them apart")
        assert self._parts is not None
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
        self._fitting.add(kept)
        fitting = self._fitting.take(len(rows))
        bases = np.ascontiguousarray(rows[:, BASES])
        if self._columns and len(rows):
            self._columns.emit(bases, None if fitting.all() else fitting)
        whole = _Found(buffer, np.stack([starts, ends], axis=1), kept, found.segments, found.qualities, bases, fitting)
        # The last scan holds a header line without newline, or nothing. No header found: it was cut, and is left out.
        is_cut = is_last and not len(starts) and found.consumed > 0
        self._is_cut |= is_cut
        self._write(whole, 0 if is_cut else found.consumed)
        self._num_headers += len(starts)
        self._num_rows += len(rows)

    def _write(self, found: "_Found", end: int) -> None:
        """Pack a buffer: all of it, or from where the last run was; in two parts when a state before its last record
        is wanted."""
        assert self._parts is not None
        header = row = begin = 0
        if self._from is not None:
            header = (
                self._from["record"] - self._num_headers
                if len(self._sources) == self._from["source"]
                else len(found.kept)
            )
            if header >= len(found.kept):
                return
            row = max(self._from["record"] - self._num_rows, 0)
            begin = int(found.headers[header, 0]) - 1
            self._from = None
        due = time.monotonic() - self._committed >= COMMIT_S
        if (due or self._settings.salvage) and header < len(found.kept):
            last = len(found.kept) - 1
            middle = int(found.headers[last, 0]) - 1
            ended = self._num_headers + last - self._num_rows  # rows of the records before the last one
            self._parts.add(found.part((header, last), (begin, middle), (row, ended)), begin, middle)
            header, row, begin = last, ended, middle
            self._safe = {
                "source": len(self._sources),
                "record": self._num_headers + last,
                **self._parts.state(sync=due),
            }
            if due:
                self._journal.commit(self._safe)
                self._committed = time.monotonic()
        rows = len(found.bases)
        self._parts.add(found.part((header, len(found.kept)), (begin, end), (row, rows)), begin, end)

    def _drop_last(self) -> None:
        """The last record of this source is not whole: go back to before it."""
        if self._from is None and self._parts is not None and self._safe is not None:
            self._parts.restore(self._safe)
        self._fitting = Pending[np.bool_]()

    def _begin(self, format: Format) -> None:
        self._format = format
        self._parts = _Parts(self._sections, format, self._terms)
        if self._from is not None:
            self._parts.restore(self._from)
        if self._headers:
            self._columns = ColumnsWriter(self._headers, self._wanted, self._sections)

    def _write_names(self, folder: Path, headers: HeaderBlocksWriter) -> None:
        names = NameTableWriter(folder, large=self._settings.names)
        try:
            for lines in headers.lines():
                names.append(hash_names(*lines))
            names.finish(self._sections)
        finally:
            names.close()


@dataclass(frozen=True)
class _Found:
    """What a buffer holds: headers that begin in it and whether they are kept, letters, records that end in it."""

    buffer: Bytes
    headers: Numbers
    kept: NDArray[np.bool_]
    segments: Numbers
    qualities: Numbers
    bases: Numbers
    fitting: NDArray[np.bool_]

    def part(self, headers: tuple[int, int], text: tuple[int, int], rows: tuple[int, int]) -> "_Found":
        """Only these headers, what lies in this part of the text, and these records."""
        return _Found(
            self.buffer,
            self.headers[slice(*headers)],
            self.kept[slice(*headers)],
            _between(self.segments, *text),
            _between(self.qualities, *text),
            self.bases[slice(*rows)],
            self.fitting[slice(*rows)],
        )


def _marked(scans: Iterator[Scan]) -> Generator[tuple[Scan, bool]]:
    """Each scan, and whether it is the last: known when there is no next one. Of two scans both buffers still hold."""
    held = next(scans, None)
    while held is not None:
        following = next(scans, None)
        yield held, following is None
        held = following


def _between(pieces: Numbers, start: int, end: int) -> Numbers:
    low, high = np.searchsorted(pieces[:, 0], [start, end])
    return pieces[low:high]


class _Parts:
    """The growing parts of a packed file."""

    def __init__(self, sections: SectionsWriter, format: Format, terms: Mapping[str, object]) -> None:
        fastq = format == "fastq"
        self._sections = sections
        self._lengths, self._anchors = sections.column("bases"), sections.column("anchor")
        self._twobit = TwoBitWriter(sections)
        self.qualities = QualitiesWriter(sections) if fastq and terms["quality"] else None
        self.keeps_layout = not fastq or self.qualities is not None
        self._gaps = GapsWriter(sections, fastq=fastq) if self.keeps_layout else None
        self.headers: HeaderBlocksWriter | None = None
        if terms["names"]:
            self.headers = HeaderBlocksWriter(sections, best_codec())
        self._own = sections.part_names
        self._skipping = False  # the record that goes on from buffer to buffer
        self.records = self.bases = self.longest = 0

    def add(self, found: _Found, begin: int, end: int) -> None:
        buffer, headers = found.buffer, found.headers
        segments, qualities = found.segments, found.qualities
        if self._gaps:
            kept = found.kept.astype(np.int64)
            self._gaps.add(buffer, begin, end, Pieces(headers, kept, segments, qualities))
        if self._skipping or not found.kept.all():
            of_record = np.append(not self._skipping, found.kept)
            segments = segments[of_record[np.searchsorted(headers[:, 0], segments[:, 0])]]
            qualities = qualities[of_record[np.searchsorted(headers[:, 0], qualities[:, 0])]]
            self._skipping = not of_record[-1]
            headers = headers[found.kept]
        if self.headers and len(headers):
            self.headers.add(buffer, headers)
        self._twobit.add(buffer, segments)
        if self.qualities:
            self.qualities.add(buffer, qualities)
        self._add_lengths(found.bases if found.fitting.all() else found.bases[found.fitting])

    def finish(self) -> None:
        self._twobit.finish()
        if self._gaps:
            self._gaps.finish()
        if self.headers:
            self.headers.finish()

    def close(self) -> None:
        if self.headers:
            self.headers.close()

    def state(self, *, sync: bool) -> dict[str, object]:
        counts = [self.records, self.bases, self.longest, int(self._skipping)]
        states = {name: writer.state() for name, writer in self._writers()}  # before the sections': blocks get written
        return {"counts": counts, "sections": self._sections.state(self._own, sync=sync), **states}

    def restore(self, state: dict[str, Any]) -> None:
        self.records, self.bases, self.longest, skipping = state["counts"]
        self._skipping = bool(skipping)
        self._sections.restore(state["sections"])
        for name, writer in self._writers():
            writer.restore(state[name])

    def _writers(self) -> list[tuple[str, Any]]:
        writers = {"twobit": self._twobit, "qualities": self.qualities, "gaps": self._gaps, "headers": self.headers}
        return [(name, writer) for name, writer in writers.items() if writer is not None]

    def _add_lengths(self, bases: Numbers) -> None:
        if not len(bases):
            return
        starts = self.bases + np.cumsum(bases) - bases
        self._anchors.append(starts[-self.records % ANCHOR :: ANCHOR])
        self._lengths.append(bases)
        self.records += len(bases)
        self.bases += int(bases.sum())
        self.longest = max(self.longest, int(bases.max()))
