"""FASTA or FASTQ -> a pack, in one pass. Killed at any instant, the same command resumes.

Parts grow in `OUT.partial`. Every two seconds they are flushed, and the journal records the first record that is not
in them. A resumed run scans the text again, for the header columns, and packs from that record on: the same bytes.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.core.collection import Numbers
from millstream.core.console import Progress, say, silent
from millstream.core.files import no_space
from millstream.core.fingerprint import Fingerprint, samples_crc32c
from millstream.core.outputs import RESUME, PartialOutput, partial_folder
from millstream.core.record import Bytes, crc32c
from millstream.errors import BadSource, SourceError, StoreExists
from millstream.reads.files.columns import ColumnsWriter, Pending
from millstream.reads.files.containers import Kind, MixedGzip, sniff
from millstream.reads.files.encodings import ANCHOR
from millstream.reads.files.index import IndexLimits, IndexSettings, settings_of
from millstream.reads.files.names import NameTableWriter, hash_names
from millstream.reads.files.scanner import BASES, Format, Scanned
from millstream.reads.files.sections_writer import SectionsWriter
from millstream.reads.files.source import SourceScan
from millstream.reads.pack import VERSION, WHAT, describe_fidelity, is_pack, load_pack
from millstream.reads.pack.bases import QualitiesWriter, TwoBitWriter
from millstream.reads.pack.header_blocks import HeaderBlocksWriter, best_codec
from millstream.reads.pack.unpack import LayoutCheck, LineLayout


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
    chosen = (settings or IndexSettings()).complete()
    terms = _terms(sources, chosen, names=names, quality=quality)
    if out.exists() and not rebuild:
        return _done(sources, out, terms, chosen, notify)
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
    return {**files, **shape, "settings": asdict(settings)}


def _done(
    sources: Sequence[Path],
    out: Path,
    terms: Mapping[str, object],
    settings: IndexSettings,
    notify: Callable[[str], None],
) -> PackSummary:
    """`out` exists: nothing to do if it is what would be written."""
    why = "it is not a pack" if not is_pack(out) else None
    if why is None:
        sections = load_pack(out)
        meta: dict[str, Any] = sections.meta
        made: list[dict[str, Any]] = meta["sources"]
        if len(made) != len(sources):
            why = f"it was packed from {len(made)} files, not {len(sources)}"
        elif settings_of(sections) != settings or any(meta[key] != terms[key] for key in ("names", "quality")):
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


def _summary(out: Path) -> PackSummary:
    meta: dict[str, Any] = load_pack(out).meta
    size = out.stat().st_size
    return PackSummary(out, meta["records"], meta["bases"], size, meta["exact"], describe_fidelity(meta))


@dataclass(frozen=True)
class ScannedText:
    """buffer[begin:end] and its content: headers that start in it, bases, qualities, records that end in it."""

    buffer: Bytes
    text: tuple[int, int]
    headers: Numbers
    kept: NDArray[np.bool_]
    segments: Numbers
    qualities: Numbers
    bases: Numbers  # of each record that ends here
    kept_rows: NDArray[np.bool_]

    def part(self, headers: tuple[int, int], text: tuple[int, int], rows: tuple[int, int]) -> "ScannedText":
        """Only these headers, this range of the text, and these records."""
        return ScannedText(
            self.buffer,
            text,
            self.headers[slice(*headers)],
            self.kept[slice(*headers)],
            _between(self.segments, *text),
            _between(self.qualities, *text),
            self.bases[slice(*rows)],
            self.kept_rows[slice(*rows)],
        )


class PackWriter:
    """Appends scanned text to the parts. Text must come in order, in pieces of any size."""

    def __init__(self, sections: SectionsWriter, format: Format, *, names: bool, quality: bool) -> None:
        fastq = format == "fastq"
        self._sections = sections
        self._lengths, self._anchors = sections.column("bases"), sections.column("anchor")
        self._twobit = TwoBitWriter(sections)
        self._qualities = QualitiesWriter(sections) if fastq and quality else None
        self._check = LayoutCheck(fastq=fastq) if quality or not fastq else None  # else it becomes plain FASTA
        self.headers = HeaderBlocksWriter(sections, best_codec()) if names else None
        self._own = sections.part_names
        self._skipping = False  # the last text ended in a record that is skipped
        self.records = self.bases = self.longest = 0

    def add(self, found: ScannedText) -> None:
        buffer, headers = found.buffer, found.headers
        segments, qualities = found.segments, found.qualities
        if self._check:
            self._check.add(buffer, found.text, headers, segments, qualities)
        if self._skipping or not found.kept.all():
            of_record = np.append(not self._skipping, found.kept)
            segments = segments[of_record[np.searchsorted(headers[:, 0], segments[:, 0])]]
            qualities = qualities[of_record[np.searchsorted(headers[:, 0], qualities[:, 0])]]
            self._skipping = not of_record[-1]
            headers = headers[found.kept]
        if self.headers and len(headers):
            self.headers.add(buffer, headers)
        self._twobit.add(buffer, segments)
        if self._qualities:
            self._qualities.add(buffer, qualities)
        self._add_lengths(found.bases if found.kept_rows.all() else found.bases[found.kept_rows])

    def finish(self) -> None:
        self._twobit.finish()
        if self._check:
            self._check.finish()
        if self.headers:
            self.headers.finish()

    def close(self) -> None:
        if self.headers:
            self.headers.close()

    @property
    def keeps_layout(self) -> bool:
        """Whether the records in their layout are the exact text, if none was skipped."""
        return self._check is not None and self._check.irregular_record is None

    def meta(self) -> dict[str, object]:
        """The description of the parts, after `finish`."""
        layout = self._check.layout if self._check and self.keeps_layout else LineLayout()
        return {
            "records": self.records,
            "bases": self.bases,
            "longest": self.longest,
            "layout": vars(layout),
            "irregular_record": self._check.irregular_record if self._check else None,
            "grades": self._qualities.values if self._qualities else [],
        }

    def state(self, *, sync: bool) -> dict[str, object]:
        """From where another writer can resume; `sync`: the parts are on disk."""
        counts = [self.records, self.bases, self.longest, int(self._skipping)]
        states = {name: writer.state() for name, writer in self._writers()}  # before the sections': blocks get written
        return {"counts": counts, "sections": self._sections.state(self._own, sync=sync), **states}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a state: drop what was written after it."""
        self.records, self.bases, self.longest, skipping = state["counts"]
        self._skipping = bool(skipping)
        self._sections.restore(state["sections"])
        for name, writer in self._writers():
            writer.restore(state[name])

    def _writers(self) -> list[tuple[str, Any]]:
        writers = {"twobit": self._twobit, "qualities": self._qualities, "layout": self._check, "headers": self.headers}
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
        self._columns = ColumnsWriter(
            settings.header_regex,
            settings.columns or (),
            sections,
            on_mismatch=settings.on_mismatch,
            distinct=limits.distinct,
        )
        self._writer: PackWriter | None = None
        self._format: Format | None = None
        self._resume_from = journal.load()  # None once it is reached
        self._kept_rows = Pending[np.bool_]()
        self._sources: list[dict[str, object]] = []
        self._damages: list[str] = []
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
        self._num_headers = self._num_rows = 0
        self._is_cut = False
        salvage, unverified = self._settings.salvage, self._settings.unverified
        with SourceScan(
            path, kind, salvage=salvage, unverified=unverified, points=salvage, limits=self._limits
        ) as source:
            for found, is_last in _with_last_marked(iter(source)):
                self._scan(source, found, is_last=is_last)
                self._progress(self._raw + source.stream.raw)
            if self._num_rows < self._num_headers:
                self._drop_last()
                self._is_cut = True
            if self._is_cut and not source.damage:
                self._damages.append(f"{path}: ends in the middle of record {self._num_rows}")
            fingerprint = source.fingerprint()
            self._sources.append({"file": path.name, "kind": kind, "fingerprint": fingerprint.to_json()})
            self._raw += fingerprint.size
            if source.damage:
                self._damages.append(f"{path}: {source.damage.reason}")

    def _finish(self, notify: Callable[[str], None]) -> dict[str, object]:
        """Complete all parts; returns their description."""
        writer, terms, mismatches = self._writer, self._terms, self._columns.mismatches
        assert writer is not None
        writer.finish()
        stored = self._columns.finish()
        if not terms["names"]:
            for lost in (column.name for column in stored if column.kept == "header"):
                notify(f"column {lost!r} has too many distinct values to be stored without the names; it is dropped")
            stored = [column for column in stored if column.kept != "header"]
        if writer.headers and (writer.records <= self._limits.names or self._settings.names):
            self._write_names(writer.headers)
        mismatches.report(notify)
        for damage in self._damages:
            notify(f"{damage}. Packed the records before it")
        skipped = mismatches.skips and mismatches.count > 0
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
            "settings": asdict(self._settings),
            "columns": [asdict(column) for column in stored],
            "mismatches": mismatches.meta(),
            "damage": self._damages,
        }

    def _scan(self, source: SourceScan, found: Scanned, *, is_last: bool) -> None:
        if self._writer is None:
            self._writer = self._begin(source.format)
        if source.format != self._format:
            raise BadSource(
                f"{source.path}: {source.format}, but other sources are {self._format}. Pack them separately"
            )
        self._text_crc = crc32c(found.buffer[: found.consumed], self._text_crc)
        self._text_bytes += found.consumed
        starts, rows = found.header_starts, found.rows
        kept = self._columns.add(source.path, found, first=self._num_headers)
        self._kept_rows.add(kept)
        kept_rows = self._kept_rows.take(len(rows))
        bases = np.ascontiguousarray(rows[:, BASES])
        self._columns.emit(bases, None if kept_rows.all() else kept_rows)
        # The last scan has a header line without newline, or nothing. Without a header it is truncated, and is skipped.
        is_cut = is_last and not len(starts) and found.consumed > 0
        self._is_cut |= is_cut
        headers = np.stack([starts, found.header_ends], axis=1)
        end = 0 if is_cut else found.consumed
        self._write(
            ScannedText(found.buffer, (0, end), headers, kept, found.segments, found.qualities, bases, kept_rows)
        )
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
        return writer

    def _write_names(self, headers: HeaderBlocksWriter) -> None:
        names = NameTableWriter(self._journal.path, large=True, parts=self._limits.name_parts)
        try:
            for lines in headers.lines():
                names.append(hash_names(*lines))
            names.finish(self._sections)
        finally:
            names.close()


def _between(pieces: Numbers, start: int, end: int) -> Numbers:
    low, high = np.searchsorted(pieces[:, 0], [start, end])
    return pieces[low:high]


def _with_last_marked(scans: Iterator[Scanned]) -> Generator[tuple[Scanned, bool]]:
    """Each scan, and whether it is the last: known when there is no next one. Two buffers are valid at once."""
    held = next(scans, None)
    while held is not None:
        following = next(scans, None)
        yield held, following is None
        held = following
