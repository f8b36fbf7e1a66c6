"""The parts of a pack, and its description. Knows nothing of where the text comes from."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.core.collection import Numbers
from millstream.core.record import Bytes
from millstream.errors import BadSource
from millstream.reads.files.columns import ColumnsWriter
from millstream.reads.files.encodings import ANCHOR
from millstream.reads.files.index import IndexLimits, IndexSettings
from millstream.reads.files.names import NameTableWriter, hash_names
from millstream.reads.files.scanner import Format
from millstream.reads.files.sections_writer import SectionsWriter
from millstream.reads.pack import VERSION, WHAT
from millstream.reads.pack.bases import QualitiesWriter, TwoBitWriter
from millstream.reads.pack.header_blocks import HeaderBlocksWriter, best_codec
from millstream.reads.pack.unpack import FoundLayout, LayoutCheck


@dataclass(frozen=True)
class PackSummary:
    """What was written."""

    path: Path
    records: int
    bases: int
    bytes: int
    is_exact: bool  # `unpack` restores the exact bytes
    fidelity: str  # what `unpack` restores, in words


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
        self._layout: FoundLayout | None = None  # of all text, once it is known
        self.headers = HeaderBlocksWriter(sections, best_codec()) if names else None
        self._own = sections.part_names
        self._skipping = False  # the last text ended in a record that is skipped
        self.records = self.bases = self.longest = 0

    def add(self, found: ScannedText) -> None:
        """Append text, and follow its layout."""
        if self._check:
            self._check.add(found.buffer, found.text, found.headers, found.segments, found.qualities)
        self.append(found)

    def append(self, found: ScannedText) -> None:
        """Append the records of a text whose layout is known."""
        buffer, headers = found.buffer, found.headers
        segments, qualities = found.segments, found.qualities
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

    def finish(self, layout: FoundLayout | None = None) -> None:
        """Complete the parts. `layout`: of the text, if the records came without it."""
        self._twobit.finish()
        self._layout = (layout or self._check.finish()) if self._check else None
        if self.headers:
            self.headers.finish()

    def close(self) -> None:
        if self.headers:
            self.headers.close()

    @property
    def keeps_layout(self) -> bool:
        """Whether the records in their layout are the exact text, if none was skipped; after `finish`."""
        return self._layout is not None and self._layout.irregular_record is None

    def meta(self) -> dict[str, object]:
        """The description of the parts, after `finish`."""
        found = self._layout or FoundLayout()
        return {
            "records": self.records,
            "bases": self.bases,
            "longest": self.longest,
            "layout": vars(found.layout),
            "irregular_record": found.irregular_record,
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


class PackBuild:
    """A pack in the making: its parts, its header columns, and what becomes its description."""

    def __init__(
        self,
        sections: SectionsWriter,
        settings: IndexSettings,
        terms: Mapping[str, Any],
        limits: IndexLimits,
        folder: Path,
    ) -> None:
        """`terms`: whether names and qualities are kept, and the codec; `folder`: for temporary files."""
        self._sections, self._settings, self._terms, self._limits = sections, settings, terms, limits
        self._folder = folder
        self.columns = ColumnsWriter(
            settings.header_regex,
            settings.columns or (),
            sections,
            on_mismatch=settings.on_mismatch,
            distinct=limits.distinct,
        )
        self.writer: PackWriter | None = None
        self._format: Format | None = None
        self.sources: list[dict[str, object]] = []
        self.damages: list[str] = []
        self.text_bytes = self.text_crc = 0

    def begin(self, path: Path, format: Format) -> PackWriter:
        """The writer, for text of a source in this format."""
        if self.writer is None:
            names, quality = self._terms["names"], self._terms["quality"]
            self._format = format
            self.writer = PackWriter(self._sections, format, names=names, quality=quality)
        if format != self._format:
            raise BadSource(f"{path}: {format}, but other sources are {self._format}. Pack them separately")
        return self.writer

    def publish(self, notify: Callable[[str], None], *, layout: FoundLayout | None = None) -> None:
        """Complete all parts and publish the file. `layout`: of the text, if the records came without it."""
        self._sections.publish(self._finish(notify, layout))

    def close(self) -> None:
        if self.writer:
            self.writer.close()

    def _finish(self, notify: Callable[[str], None], layout: FoundLayout | None) -> dict[str, object]:
        writer, terms, mismatches = self.writer, self._terms, self.columns.mismatches
        assert writer is not None
        writer.finish(layout)
        stored = self.columns.finish()
        if not terms["names"]:
            for lost in (column.name for column in stored if column.kept == "header"):
                notify(f"column {lost!r} has too many distinct values to be stored without the names; it is dropped")
            stored = [column for column in stored if column.kept != "header"]
        if writer.headers and (writer.records <= self._limits.names or self._settings.names):
            self._write_names(writer.headers)
        mismatches.report(notify)
        for damage in self.damages:
            notify(f"{damage}. Packed the records before it")
        skipped = mismatches.skips and mismatches.count > 0
        return {
            "what": WHAT,
            "pack_version": VERSION,
            "format": self._format,
            **writer.meta(),
            "exact": bool(writer.keeps_layout and terms["names"] and not skipped and not self.damages),
            "text_bytes": self.text_bytes,
            "text_crc32c": self.text_crc,
            "sources": self.sources,
            "names": terms["names"],
            "quality": terms["quality"],
            "codec": terms["codec"],
            "settings": asdict(self._settings),
            "columns": [asdict(column) for column in stored],
            "mismatches": mismatches.meta(),
            "damage": self.damages,
        }

    def _write_names(self, headers: HeaderBlocksWriter) -> None:
        names = NameTableWriter(self._folder, large=True, parts=self._limits.name_parts)
        try:
            for lines in headers.lines():
                names.append(hash_names(*lines))
            names.finish(self._sections)
        finally:
            names.close()


def _between(pieces: Numbers, start: int, end: int) -> Numbers:
    low, high = np.searchsorted(pieces[:, 0], [start, end])
    return pieces[low:high]
