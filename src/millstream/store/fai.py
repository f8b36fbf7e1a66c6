"""An index as samtools writes it: `.fai`, and `.gzi` for BGZF, for tools that want those."""

import struct
from pathlib import Path

import numpy as np

from millstream.errors import BadSource
from millstream.source.scan import IRREGULAR
from millstream.store.layout import publish
from millstream.store.read_file import ReadFile

_ROWS = 65536


def write_fai(file: ReadFile) -> list[Path]:
    """Write FILE.fai (and FILE.gzi) beside the data; the files written."""
    if file.sections.meta["kind"] not in ("plain", "bgzf"):
        raise BadSource(f"{file.path}: samtools reads plain and BGZF files only; recompress it: bgzip")
    fai = file.path.with_name(file.path.name + ".fai")
    publish(fai, b"".join(_lines(file, start) for start in range(0, file.records, _ROWS)))
    if file.sections.meta["kind"] == "plain":
        return [fai]
    gzi = file.path.with_name(file.path.name + ".gzi")
    raw, plain = (_all(file, f"block.{name}") for name in ("raw", "plain"))
    pairs = np.stack([raw, plain], axis=1)[1:].astype("<u8")
    publish(gzi, struct.pack("<Q", len(pairs)) + pairs.tobytes())
    return [fai, gzi]


def _lines(file: ReadFile, first: int) -> bytes:
    places = file.places(np.arange(first, min(first + _ROWS, file.records), dtype=np.int64))
    (wrong,) = np.nonzero(places.line == IRREGULAR)
    names = file.names(places)
    if len(wrong):
        raise BadSource(
            f"{file.path}: record {first + int(wrong[0])} ({names[int(wrong[0])]}) has lines of different lengths, "
            "which a .fai cannot describe"
        )
    offset = places.start + places.head
    width = np.where(places.line == 0, places.bases, places.line)
    columns = [places.bases, offset, width, width + places.eol]
    if file.has_quality:
        columns.append(offset + places.bases + places.gap)
    rows = zip(names, *(column.tolist() for column in columns), strict=True)
    # samtools leaves out records without a base
    return "".join("\t".join(map(str, row)) + "\n" for row in rows if row[1]).encode()


def _all(file: ReadFile, name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    column = file.sections.column(name)
    return column.take(np.arange(column.rows, dtype=np.int64))
