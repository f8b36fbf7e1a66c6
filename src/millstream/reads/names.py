"""Reads by what they are called: name and file as columns, and regions such as `chr1:100-200`, written as FASTA."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from millstream.core.batches import chunked
from millstream.core.collection import Numbers
from millstream.errors import BadSetting
from millstream.reads.files import NAME

if TYPE_CHECKING:
    from millstream.reads.reads import Part, Reads

FILE = "file"  # the name of a read's file
LINE = 60  # bases per line
PIECE = 100_000 * LINE  # bases written at once
RANGE = re.compile(r"(.+):(\d[\d,]*)?(?:-(\d[\d,]*)?)?")


class Region(NamedTuple):
    """Bases [start, end) of a record, and how it was asked for."""

    text: str
    number: int
    start: int
    end: int


def find_region(reads: "Reads", text: str) -> Region:
    """The record of this name, or the part of it as in `chr1:100-200`: from 1, both ends included, as in samtools.

    A name may contain `:`; what follows the last one is a range only if no record has the whole as its name. Ends
    beyond the record are cut off. KeyError if there is no such record.
    """
    number = next(iter(reads.find(text)), None)
    if number is not None:
        return Region(text, number, 0, int(reads.lengths([number])[0]))
    match = RANGE.fullmatch(text)
    first, last = (match[2], match[3]) if match else (None, None)
    number = next(iter(reads.find(match[1])), None) if match and (first or last) else None
    if match is None or number is None:
        raise KeyError(f"{where_of(reads.paths)}: no record named {text!r}")
    length = int(reads.lengths([number])[0])
    start = int(first.replace(",", "")) if first else 1
    end = min(int(last.replace(",", "")), length) if last else length
    if not 1 <= start <= end:
        ((part, *_),) = reads.split(np.array([number]))
        raise IndexError(f"{part.path}: region {text}: {match[1]!r} has bases 1 to {length}")
    return Region(text, number, start - 1, end)


def fasta_of(reads: "Reads", names: Sequence[str]) -> Iterator[bytes]:
    """These records, or regions of them, as FASTA in pieces."""
    regions: list[Region] = []
    for name in names:
        try:
            regions.append(find_region(reads, name))
        except (KeyError, IndexError) as error:
            raise BadSetting(str(error.args[0])) from None
    for region in regions:
        yield f">{region.text}\n".encode()
        for start in range(region.start, region.end, PIECE):
            bases = reads.region(region.number, start, min(start + PIECE, region.end))
            yield "".join(f"{bases[at : at + LINE]}\n" for at in range(0, len(bases), LINE)).encode("latin-1")


def where_of(paths: Sequence[Path]) -> str:
    """How messages refer to these files."""
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def name_or_file(name: str, parts: Sequence[tuple["Part", Numbers]]) -> pa.ChunkedArray:
    """The column `name` or `file` of rows of these files."""
    if name == NAME:
        return chunked([pa.array(part.names_of(rows), pa.string()) for part, rows in parts])
    return chunked([files_of([part], np.zeros(len(rows), np.int64)) for part, rows in parts])


def files_of(parts: Sequence["Part"], places: Numbers) -> pa.Array:
    """The names of files, by their places among the parts."""
    names = pa.array([part.path.name for part in parts], pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(places.astype(np.int32)), names)
