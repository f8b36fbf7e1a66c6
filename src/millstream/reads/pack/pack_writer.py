"""The growing parts of a packed file: sequences, qualities, headers and lengths go in, and the state to resume from
comes out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.core.records import Bytes
from millstream.reads.files.packed import ANCHOR, Numbers
from millstream.reads.files.scan import Format
from millstream.reads.files.sections import SectionsWriter
from millstream.reads.pack.bases import QualitiesWriter, TwoBitWriter
from millstream.reads.pack.header_blocks import HeaderBlocksWriter, best_codec
from millstream.reads.pack.line_layout import LayoutCheck, LineLayout


@dataclass(frozen=True)
class ScannedText:
    """buffer[begin:end] and what it holds: headers that begin in it and whether they are kept, bases, records that
    end in it."""

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


def _between(pieces: Numbers, start: int, end: int) -> Numbers:
    low, high = np.searchsorted(pieces[:, 0], [start, end])
    return pieces[low:high]
