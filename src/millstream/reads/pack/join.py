"""Many files -> one pack, by many workers: each packs a file, and the packs are joined to the bytes of one process.

The packs of the files are in `OUT.parts` until OUT is complete, so that the same command packs none of them again.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from millstream.core.collection import Numbers
from millstream.core.console import Progress, ignore_message
from millstream.core.engine import Engine
from millstream.core.record import Bytes, joined_crc32c
from millstream.core.remote import RemotePath
from millstream.reads.files.columns import SHOWN
from millstream.reads.files.index import IndexSettings
from millstream.reads.files.scanner import Scanned
from millstream.reads.files.source import SourceScan
from millstream.reads.pack import SUFFIX, PackFile
from millstream.reads.pack.each import PackJob, Write, run_jobs
from millstream.reads.pack.unpack import FoundLayout, LayoutCheck, LineLayout
from millstream.reads.pack.writer import PackBuild, ScannedText

_MEMORY = 64 << 20  # of a pack that is read
_BASES = 4 << 20  # joined at once, however long a record is
_ROWS = 1 << 15
_NOTHING = np.empty(0, np.int64)
_NO_HEADERS = np.empty(0, np.uint8), _NOTHING, _NOTHING


class PackParts:
    """The packs of the files of one pack."""

    def __init__(self, sources: Sequence[Path], out: Path) -> None:
        self._sources = sources
        self._folder = out.absolute().with_name(f"{out.name}.parts")
        self._jobs = [
            PackJob(source.absolute(), self._folder / f"{number:05d}{SUFFIX}", source.stat().st_size)
            for number, source in enumerate(sources)
        ]

    def write(
        self, write: Write, settings: IndexSettings, *, quality: bool, rebuild: bool, engine: Engine, progress: Progress
    ) -> None:
        """Pack the files that are not packed yet: with all names, of which the joined columns are parsed."""
        settings = replace(settings, columns=(), names=False)
        run_jobs(
            self._jobs,
            write=partial(write, settings=settings, names=True, quality=quality, rebuild=rebuild),
            rebuild=rebuild,
            engine=engine,
            progress=progress,
            notify=ignore_message,  # the joined pack tells all of it
        )
        self._packs = [PackFile(job.out, memory=_MEMORY) for job in self._jobs]

    @property
    def is_intact(self) -> bool:
        """Whether no source is damaged. Of damaged ones, columns remember more than packs have."""
        return not any(pack.meta["damage"] for pack in self._packs)

    def join(self, build: PackBuild, notify: Callable[[str], None]) -> None:
        """Append all packs and publish the file."""
        for source, pack in zip(self._sources, self._packs, strict=True):
            meta = pack.meta
            writer, columns = build.begin(source, meta["format"]), build.columns
            for text in _texts(pack):
                scanned = _scanned(text)
                columns.add(source, scanned, columns.parse(source, scanned), first=0)
                columns.emit(text.bases, None)
                writer.append(text)
            if columns.mismatches.skips:  # the pack does not have them
                columns.mismatches.count += meta["mismatches"]["count"]
                examples = columns.mismatches.examples
                examples += meta["mismatches"]["examples"][: SHOWN - len(examples)]
            build.sources += meta["sources"]
            crcs = np.array([[build.text_crc, meta["text_crc32c"]]], np.uint32)
            build.text_crc = int(joined_crc32c(crcs, np.array([[meta["text_bytes"], 0]]))[0])
            build.text_bytes += meta["text_bytes"]
        build.publish(notify, layout=self._layout())

    def remove(self) -> None:
        for job in self._jobs:
            job.out.unlink()
        if not isinstance(self._folder, RemotePath):
            self._folder.rmdir()

    def _layout(self) -> FoundLayout:
        """The layout of the text of all files: theirs, if it is the same; else the text is scanned as far as it is."""
        found = [FoundLayout(LineLayout(**pack.meta["layout"]), pack.meta["irregular_record"]) for pack in self._packs]
        layouts = [one.layout for one in found]
        is_regular = all(one.irregular_record is None for one in found)
        if is_regular and layouts[:-1] == [replace(layouts[-1], final_newline=True)] * (len(found) - 1):
            return found[-1]
        check = LayoutCheck(fastq=self._packs[0].meta["format"] == "fastq")
        for source, pack in zip(self._sources, self._packs, strict=True):
            with SourceScan(source, pack.meta["sources"][0]["kind"], salvage=False, points=False) as scan:
                for text in scan:
                    headers = np.stack([text.header_starts, text.header_ends], axis=1)
                    check.add(text.buffer, (0, text.consumed), headers, text.segments, text.qualities)
                    if check.irregular_record is not None:
                        return check.finish()
        return check.finish()


def _texts(pack: PackFile) -> Generator[ScannedText]:
    """The records of a pack, in pieces of at most `_BASES` bases."""
    row = 0
    while row < pack.records:
        rows = np.arange(row, min(row + _ROWS, pack.records), dtype=np.int64)
        lengths = pack.lengths(rows)
        count = max(int(np.searchsorted(np.cumsum(lengths), _BASES, side="right")), 1)
        rows, lengths = rows[:count], lengths[:count]
        start, end = pack.starts(rows[:1]), int(lengths.sum())
        headers = pack.headers(rows)
        for at in range(0, max(end, 1), _BASES):  # more than once for a single long record
            is_last = at + _BASES >= end
            yield _text(
                pack,
                headers if at == 0 else _NO_HEADERS,
                start + at,
                min(end - at, _BASES),
                lengths if is_last else _NOTHING,
            )
        row += count


def _text(
    pack: PackFile, headers: tuple[Bytes, Numbers, Numbers], start: Numbers, count: int, ended: Numbers
) -> ScannedText:
    """Headers, bases from a position of the stream on, and the lengths of the records that end with them."""
    flat, starts, ends = headers
    offsets = np.array([0, count], np.int64)
    qualities = pack.qualities(start, offsets) if pack.has_quality else flat[:0]
    buffer = np.concatenate([flat, pack.sequences(start, offsets), qualities])
    middle = len(flat) + count
    return ScannedText(
        buffer,
        (0, len(buffer)),
        np.stack([starts, ends], axis=1),
        np.ones(len(starts), np.bool_),
        np.array([[len(flat), middle]], np.int64),
        np.array([[middle, len(buffer)]], np.int64),
        ended,
        np.ones(len(ended), np.bool_),
    )


def _scanned(text: ScannedText) -> Scanned:
    """What the header columns take."""
    starts, ends = np.ascontiguousarray(text.headers.T)
    return Scanned(text.buffer, text.segments[:0], starts, ends, text.segments, text.qualities, len(text.buffer))
