"""FASTA libraries under test, each used as documented: whole reads and regions from an index, and decompression."""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

HEADER = r"^lbl\|(?P<class_id>\d+)\|(?P<tax_id>\d+)?\|(?P<readlen>\d+)?\|(?P<name>[^/\s]+)(?:/(?P<mate>\d+))?$"


class Wanted(NamedTuple):
    """One read, by the keys that libraries use: its number, its name, the offsets of its bases in the plain text."""

    number: int
    name: str
    start: int
    end: int


class Reader(Protocol):
    """A library under test. Creating one imports it."""

    suffix: str  # of its index

    def build(self, path: Path, index: Path) -> None: ...

    def open(self, path: Path, index: Path) -> None: ...

    def read(self, batch: Sequence[Wanted]) -> list[str]:
        """The bases of whole reads."""
        ...

    def close(self) -> None: ...


class Pysam:
    """Plain and BGZF; by name."""

    suffix = ".fai"

    def __init__(self) -> None:
        import pysam

        self._pysam = pysam

    def build(self, path: Path, index: Path) -> None:
        self._pysam.faidx(str(path), "--fai-idx", str(index), "--gzi-idx", f"{index}.gzi")

    def open(self, path: Path, index: Path) -> None:
        blocks = f"{index}.gzi" if path.suffix == ".bgz" else None
        self._file = self._pysam.FastaFile(str(path), filepath_index=str(index), filepath_index_compressed=blocks)

    def read(self, batch: Sequence[Wanted]) -> list[str]:
        fetch = self._file.fetch
        return [fetch(wanted.name) for wanted in batch]

    def regions(self, batch: Sequence[tuple[str, int, int]]) -> list[str]:
        fetch = self._file.fetch
        return [fetch(name, start, end) for name, start, end in batch]

    def named(self, batch: Sequence[Wanted]) -> list[str]:
        return self.read(batch)

    def every(self, path: Path) -> Iterator[tuple[str, str]]:
        with self._pysam.FastxFile(str(path), persist=False) as file:
            for read in file:
                yield read.name, read.sequence

    def close(self) -> None:
        self._file.close()


class Pyfaidx:
    """By name: by number it iterates over its dictionary from the start."""

    suffix = ".fai"

    def __init__(self) -> None:
        import pyfaidx

        self._pyfaidx = pyfaidx

    def build(self, path: Path, index: Path) -> None:
        self._pyfaidx.Faidx(str(path), indexname=str(index)).close()

    def open(self, path: Path, index: Path) -> None:
        self._file = self._pyfaidx.Fasta(str(path), indexname=str(index), as_raw=True, rebuild=False)

    def read(self, batch: Sequence[Wanted]) -> list[str]:
        file = self._file
        return [file[wanted.name][:] for wanted in batch]

    def regions(self, batch: Sequence[tuple[str, int, int]]) -> list[str]:
        file = self._file
        return [file[name][start:end] for name, start, end in batch]

    def close(self) -> None:
        self._file.close()


class Pyfastx:
    """Plain and gzip; by number."""

    suffix = ".fxi"

    def __init__(self) -> None:
        import pyfastx

        self._pyfastx = pyfastx

    def build(self, path: Path, index: Path) -> None:
        self._pyfastx.Fasta(str(path), index_file=str(index))

    def open(self, path: Path, index: Path) -> None:
        self._file = self._pyfastx.Fasta(str(path), index_file=str(index))

    def read(self, batch: Sequence[Wanted]) -> list[str]:
        file = self._file
        return [file[wanted.number].seq for wanted in batch]

    def regions(self, batch: Sequence[tuple[str, int, int]]) -> list[str]:
        fetch = self._file.fetch
        return [fetch(name, (start + 1, end)) for name, start, end in batch]

    def named(self, batch: Sequence[Wanted]) -> list[str]:
        file = self._file
        return [file[wanted.name].seq for wanted in batch]

    def every(self, path: Path) -> Iterator[tuple[str, str]]:
        for read in self._pyfastx.Fastx(str(path)):
            yield read[0], read[1]

    def close(self) -> None:
        del self._file


class Biopython:
    """SeqIO.index_db, its index for files larger than memory; by name."""

    suffix = ".idx"

    def __init__(self) -> None:
        from Bio import SeqIO

        self._seqio = SeqIO

    def build(self, path: Path, index: Path) -> None:
        self._seqio.index_db(str(index), [str(path)], "fasta").close()

    def open(self, path: Path, index: Path) -> None:
        self._file = self._seqio.index_db(str(index), [str(path)], "fasta")

    def read(self, batch: Sequence[Wanted]) -> list[str]:
        file = self._file
        return [str(file[wanted.name].seq) for wanted in batch]

    def close(self) -> None:
        self._file.close()


class OldScripts:
    """The old scripts: a pickled list of offsets, seek, readline, `re`, a cache of 10,000 reads.

    Written from their guide, in their favour: binary files, one handle, only offsets.
    """

    suffix = ".index.pkl"
    cache_reads = 10_000

    def build(self, path: Path, index: Path) -> None:
        offsets: list[int] = []
        with path.open("rb") as file:
            offset = file.tell()
            while line := file.readline():
                if line.startswith(b">"):
                    offsets.append(offset)
                offset = file.tell()
        with index.open("wb") as file:
            pickle.dump(offsets, file)

    def open(self, path: Path, index: Path) -> None:
        with index.open("rb") as file:
            self._offsets: list[int] = pickle.load(file)
        self._file = path.open("rb")
        self._header = re.compile(HEADER)
        self._cache: OrderedDict[int, tuple[str, int]] = OrderedDict()

    def read(self, batch: Sequence[Wanted]) -> list[str]:
        return [self._item(wanted.number)[0] for wanted in batch]

    def _item(self, number: int) -> tuple[str, int]:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        self._file.seek(self._offsets[number])
        match = self._header.match(self._file.readline().decode()[1:].strip())
        assert match
        item = self._file.readline().decode().strip(), int(match["class_id"])
        self._cache[number] = item
        if len(self._cache) > self.cache_reads:
            self._cache.popitem(last=False)
        return item

    def close(self) -> None:
        self._file.close()


class IndexedGzip:
    """A gzip file with seek points; the offsets of the reads are given."""

    suffix = ".gzidx"

    def __init__(self) -> None:
        import indexed_gzip

        self._indexed_gzip = indexed_gzip

    def build(self, path: Path, index: Path) -> None:
        with self._indexed_gzip.IndexedGzipFile(str(path)) as file:
            file.build_full_index()
            file.export_index(str(index))

    def open(self, path: Path, index: Path) -> None:
        self._file = self._indexed_gzip.IndexedGzipFile(str(path), index_file=str(index))

    def read(self, batch: Sequence[Wanted]) -> list[str]:
        return [slice_of(self._file, wanted.start, wanted.end) for wanted in batch]

    def close(self) -> None:
        self._file.close()


class Rapidgzip:
    """Like IndexedGzip. A file that is not closed aborts the interpreter at exit."""

    suffix = ".rgzidx"

    def __init__(self) -> None:
        import rapidgzip

        self._rapidgzip = rapidgzip

    def build(self, path: Path, index: Path) -> None:
        with self._rapidgzip.open(str(path), parallelization=1) as file:
            file.export_index(str(index))

    def open(self, path: Path, index: Path) -> None:
        self._file = self._rapidgzip.open(str(path), parallelization=1)
        self._file.import_index(str(index))

    def read(self, batch: Sequence[Wanted]) -> list[str]:
        return [slice_of(self._file, wanted.start, wanted.end) for wanted in batch]

    def close(self) -> None:
        self._file.close()


READERS: dict[str, Callable[[], Reader]] = {
    "pysam": Pysam,
    "pyfaidx": Pyfaidx,
    "pyfastx": Pyfastx,
    "biopython": Biopython,
    "old-scripts": OldScripts,
    "indexed_gzip": IndexedGzip,
    "rapidgzip": Rapidgzip,
}


def slice_of(file: Any, start: int, end: int) -> str:
    file.seek(start)
    return file.read(end - start).decode()


def decompressor(name: str, path: Path, threads: int) -> Callable[[], Any]:
    if name == "python":
        import gzip

        return lambda: gzip.open(path)
    if name == "isal":
        from isal import igzip

        return lambda: igzip.open(path)
    if name == "rapidgzip":
        import rapidgzip

        return lambda: rapidgzip.open(str(path), parallelization=threads)
    if name == "indexed_gzip":
        import indexed_gzip

        return lambda: indexed_gzip.IndexedGzipFile(str(path))
    if name == "pysam":
        import pysam

        return lambda: pysam.BGZFile(str(path), "r")
    if name == "zstandard":
        import zstandard

        return lambda: zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True)
    raise ValueError(f"unknown decompressor {name!r}")
