"""FASTA or FASTQ -> a pack, in one pass. Killed at any instant, the same command resumes.

Parts grow in `OUT.partial`. Every two seconds they are flushed, and the journal records the first record that is not
in them. A resumed run scans the text again, for the header columns, and packs from that record on: the same bytes.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from millstream.core.arguments import checked
from millstream.core.console import Progress, quoted, say, silent
from millstream.core.engine import Engine
from millstream.core.files import no_space
from millstream.core.fingerprint import Fingerprint, samples_crc32c
from millstream.core.outputs import RESUME, PartialOutput, partial_folder
from millstream.core.record import crc32c
from millstream.errors import BadSetting, BadSource, SourceError, StoreExists
from millstream.reads.files.columns import Pending
from millstream.reads.files.containers import Kind, MixedGzip, sniff, sniff_head
from millstream.reads.files.headers import Parsed
from millstream.reads.files.in_order import READ_GROUPS, Stdin, is_stdin
from millstream.reads.files.index import IndexLimits, IndexSettings, settings_of
from millstream.reads.files.scanner import BASES, Scanned
from millstream.reads.files.sections_writer import SectionsWriter
from millstream.reads.files.source import SourceScan
from millstream.reads.pack import VERSION, describe_fidelity, is_pack, load_pack
from millstream.reads.pack.header_blocks import best_codec
from millstream.reads.pack.join import PackParts
from millstream.reads.pack.writer import PackBuild, PackSummary, PackWriter, ScannedText

T = TypeVar("T")


@checked
def pack(
    sources: Sequence[Path],
    out: Path,
    *,
    settings: IndexSettings | None = None,
    names: bool = True,
    quality: bool = True,
    reference: Path | None = None,
    rebuild: bool = False,
    engine: Engine | None = None,
    progress: Progress = silent,
    notify: Callable[[str], None] = say,
    limits: IndexLimits | None = None,
    commit_s: float = 2.0,
) -> PackSummary:
    """Pack files, one after the other, into one. After an interruption, call it again to resume.

    Without `names` the header lines are left out, without `quality` the base qualities of FASTQ. `settings.names`
    also builds a name table for many records. `rebuild` starts over and replaces `out`. Progress is saved every
    `commit_s` seconds. Workers of an `engine` pack one file each, and the packs are joined: the same bytes.

    Reads of alignments (BAM, CRAM with the `reference` it needs, SAM) are packed as they were sequenced, with a column
    `read_group` unless there is a header regex. The path `-` is stdin, which cannot be resumed.
    """
    _check_files(sources)
    has_stdin = any(map(is_stdin, sources))
    if has_stdin and out.exists() and not rebuild:
        raise StoreExists(f"{out}: already exists. Choose another name, or replace it with --rebuild")
    stdin = Stdin() if has_stdin else None
    kinds: list[Kind] = [_kind(path, stdin) for path in sources]
    chosen = settings or IndexSettings()
    if "alignments" in kinds and chosen.header_regex is None:
        chosen = replace(chosen, header_regex=READ_GROUPS)
    chosen = chosen.complete()
    if has_stdin and chosen.salvage:
        raise BadSetting("-: what to salvage is known after a first pass, which stdin cannot repeat. Save it first")
    terms = _terms(sources, chosen, names=names, quality=quality)
    if out.exists() and not rebuild:
        return _done(sources, out, terms, chosen, notify)
    out.parent.mkdir(parents=True, exist_ok=True)
    limits = limits or IndexLimits()
    apart = PackParts(sources, out) if engine and engine.name != "local" and len(sources) > 1 else None
    with _partial(out, terms, rebuild=rebuild or has_stdin or apart is not None) as journal, no_space(out, RESUME):
        try:
            is_done = False
            if engine and apart:
                write = partial(pack, limits=limits, reference=reference)
                apart.write(write, chosen, quality=quality, rebuild=rebuild, engine=engine, progress=progress)
                if apart.is_intact:
                    with SectionsWriter(out, folder=journal.path, advice=RESUME) as sections:
                        build = PackBuild(sections, chosen, terms, limits, journal.path)
                        with closing(build):
                            apart.join(build, notify)
                    is_done = True
            while not is_done:
                with SectionsWriter(out, folder=journal.path, advice=RESUME) as sections:
                    packer = Packer(sections, chosen, journal, terms, limits, commit_s, progress)
                    packer.stdin, packer.reference = stdin, reference
                    is_done = packer.pack(sources, kinds, notify)
        except SourceError:
            journal.remove()  # of no use, with that source
            raise
        journal.remove()
        if apart:
            apart.remove()
    return _summary(out)


def _partial(out: Path, terms: Mapping[str, object], *, rebuild: bool) -> PartialOutput:
    return PartialOutput(out, terms, rebuild=rebuild, start_over="start over with --rebuild")


def _check_files(sources: Sequence[Path]) -> None:
    if not sources:
        raise BadSource("no files to pack: millstream pack SOURCE... OUT")
    for path in sources:
        if not is_stdin(path) and not path.is_file():
            raise BadSource(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}")
    if sum(map(is_stdin, sources)) > 1:
        raise BadSetting("-: stdin can only be read once")


def _kind(path: Path, stdin: Stdin | None) -> Kind:
    """The compression of a source. Of stdin, BGZF is read as gzip: it cannot be read again if it turns out to be."""
    if not is_stdin(path) or stdin is None:
        return sniff(path, in_order=True)
    kind = sniff_head(path, stdin.head, in_order=True)
    if kind == "alignments":
        raise BadSource(
            "-: is BAM, CRAM or SAM. Pipe its reads: samtools fastq -T RG reads.bam | millstream pack - OUT"
        )
    return "gzip" if kind == "bgzf" else kind


def _terms(sources: Sequence[Path], settings: IndexSettings, *, names: bool, quality: bool) -> dict[str, object]:
    """What must be the same for resuming an interrupted run."""
    files: dict[str, object] = {}
    for number, path in enumerate(sources):
        if is_stdin(path):
            continue
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
        self._build = PackBuild(sections, settings, terms, limits, journal.path)
        self._settings, self._journal, self._limits = settings, journal, limits
        self._commit_s = commit_s
        self._progress = progress
        self._resume_from = journal.load()  # None once it is reached
        self._kept_rows = Pending[np.bool_]()
        self._num_headers = self._num_rows = 0  # of this source
        self._is_cut = False  # the last record of this source is truncated
        self._raw = 0
        self._committed = time.monotonic()
        self.stdin: Stdin | None = None
        self.reference: Path | None = None  # of a CRAM
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
            self._build.publish(notify)
        finally:
            self._build.close()
        return True

    def _add(self, path: Path, kind: Kind) -> None:
        """Scan a source and pack its records."""
        self._num_headers = self._num_rows = 0
        self._is_cut = False
        salvage, unverified = self._settings.salvage, self._settings.unverified
        saved = "save stdin as FILE, then millstream pack FILE OUT"
        command = saved if is_stdin(path) else f"millstream pack {quoted(path)} OUT"
        with SourceScan(
            path,
            kind,
            salvage=salvage,
            unverified=unverified,
            points=salvage,
            limits=self._limits,
            command=command,
            stdin=self.stdin if is_stdin(path) else None,
            reference=self.reference,
        ) as source:
            for (found, parsed), is_last in _with_last_marked(source.scans(self._build.columns.parse)):
                self._scan(source, found, parsed, is_last=is_last)
                source.stream.take_blocks()  # of no use here, and 32 kB each if a gzip file is salvaged
                self._progress(self._raw + source.stream.raw)
            if self._num_rows < self._num_headers:
                self._drop_last()
                self._is_cut = True
            if self._is_cut and not source.damage:
                self._build.damages.append(f"{path}: ends in the middle of record {self._num_rows}")
            fingerprint = source.fingerprint()
            self._build.sources.append({"file": path.name, "kind": kind, "fingerprint": fingerprint.to_json()})
            self._raw += fingerprint.size
            if source.damage:
                self._build.damages.append(f"{path}: {source.damage.reason}")

    def _scan(self, source: SourceScan, found: Scanned, parsed: Parsed | None, *, is_last: bool) -> None:
        build = self._build
        is_first = build.writer is None
        writer = build.begin(source.path, source.format)
        if is_first and self._resume_from is not None:
            writer.restore(self._resume_from)
        build.text_crc = crc32c(found.buffer[: found.consumed], build.text_crc)
        build.text_bytes += found.consumed
        starts, rows = found.header_starts, found.rows
        kept = build.columns.add(source.path, found, parsed, first=self._num_headers)
        self._kept_rows.add(kept)
        kept_rows = self._kept_rows.take(len(rows))
        bases = np.ascontiguousarray(rows[:, BASES])
        build.columns.emit(bases, None if kept_rows.all() else kept_rows)
        # The last scan has a header line without newline, or nothing. Without a header it is truncated, and is skipped.
        is_cut = is_last and not len(starts) and found.consumed > 0
        self._is_cut |= is_cut
        headers = np.stack([starts, found.header_ends], axis=1)
        end = 0 if is_cut else found.consumed
        text = ScannedText(found.buffer, (0, end), headers, kept, found.segments, found.qualities, bases, kept_rows)
        self._write(writer, text)
        self._num_headers += len(starts)
        self._num_rows += len(rows)

    def _write(self, writer: PackWriter, found: ScannedText) -> None:
        """Pack a buffer, or its rest after the last run; in two pieces, to save a state before its last record."""
        num_before = len(self._build.sources)
        header = row = begin = 0
        if self._resume_from is not None:
            source, record = self._resume_from["source"], self._resume_from["record"]
            header = record - self._num_headers if num_before == source else len(found.kept)
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
            writer.add(found.part((header, last), (begin, middle), (row, ended)))
            header, row, begin = last, ended, middle
            record = self._num_headers + last
            self._safe = {"source": num_before, "record": record, **writer.state(sync=due)}
            if due:
                self._journal.commit(self._safe, self._safe["sections"]["parts"])
                self._committed = time.monotonic()
        writer.add(found.part((header, len(found.kept)), (begin, found.text[1]), (row, len(found.bases))))

    def _drop_last(self) -> None:
        """The last record of this source is truncated: return to the state before it."""
        if self._resume_from is None and self._build.writer is not None and self._safe is not None:
            self._build.writer.restore(self._safe)
        self._kept_rows = Pending[np.bool_]()


def _with_last_marked(scans: Iterator[T]) -> Generator[tuple[T, bool]]:
    """Each scan, and whether it is the last: known when there is no next one. Two buffers are valid at once."""
    held = next(scans, None)
    while held is not None:
        following = next(scans, None)
        yield held, following is None
        held = following
