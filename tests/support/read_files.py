"""Small read files for tests: texts, ways to wrap them, and what opening them says."""

import gzip
import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

import millstream as ms
from millstream.errors import MillstreamError
from millstream.reads.files.index import IndexLimits, IndexSettings, build_index, find_index
from millstream.reads.reads import Reads
from support.slow_reads import Slow

REGEX = r"lbl\|(?P<class_id>\d+)\|(?P<tax_id>\d*)\|(?P<len>\d+)\|(?P<who>[^/]+)/(?P<mate>[12])"


def header_of(number: int, length: int) -> str:
    """As the documented layout has it; no taxon for every fifth class."""
    tax = "" if number % 5 == 4 else str(9600 + number % 7)
    return f"lbl|{number % 7}|{tax}|{length}|r{number}/{number % 2 + 1}"


def records(count: int, *, seed: int = 0, longest: int = 60, quality: bool = False) -> list[Slow]:
    """Random records, some of them empty, under headers that `REGEX` fits."""
    rng = random.Random(seed)
    made: list[Slow] = []
    for number in range(count):
        letters = bytes(rng.choices(b"ACGTNacgt", k=rng.randrange(longest + 1)))
        grades = bytes(rng.choices(range(33, 127), k=len(letters))) if quality else None
        made.append(Slow(header_of(number, len(letters)).encode(), letters, grades))
    return made


def fasta(made: list[Slow], *, width: int = 0) -> bytes:
    """FASTA; wrapped at `width` letters, if that is not 0."""
    lines: list[bytes] = []
    for record in made:
        step = width or max(len(record.sequence), 1)
        pieces = [record.sequence[at : at + step] for at in range(0, len(record.sequence), step)]
        lines += [b">" + record.header, *pieces]
    return b"\n".join(lines) + b"\n"


def fastq(made: list[Slow]) -> bytes:
    return b"".join(b"@%s\n%s\n+\n%s\n" % (each.header, each.sequence, each.quality or b"") for each in made)


def bgzf(text: bytes, size: int = 400, *, end: bool = True) -> bytes:
    """BGZF as bgzip writes it, in small blocks, with the empty block that ends it."""
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    return b"".join(bgzf_block(part) for part in [*parts, *([b""] if end else [])])


def bgzf_block(part: bytes) -> bytes:
    deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
    data = deflate.compress(part) + deflate.flush()
    head = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x06\0BC\x02\0" + (len(data) + 25).to_bytes(2, "little")
    return head + data + zlib.crc32(part).to_bytes(4, "little") + len(part).to_bytes(4, "little")


def members(text: bytes, size: int = 400) -> bytes:
    """A gzip file of several members."""
    return b"".join(gzip.compress(text[at : at + size], mtime=0) for at in range(0, len(text), size))


def flushed(text: bytes, size: int = 400, *, flush: int = zlib.Z_SYNC_FLUSH) -> bytes:
    """One gzip member of many deflate blocks that lean on the text before them and end with a byte."""
    deflate = zlib.compressobj(6, zlib.DEFLATED, 31)
    parts = [deflate.compress(text[at : at + size]) + deflate.flush(flush) for at in range(0, len(text), size)]
    return b"".join(parts) + deflate.flush()


def frames(text: bytes, size: int = 400) -> bytes:
    """A zstd file of many frames, with a checksum each, and their size in every second."""
    makers = [zstandard.ZstdCompressor(write_checksum=True, write_content_size=bool(sized)) for sized in (0, 1)]
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    return b"".join(makers[number % 2].compress(part) for number, part in enumerate(parts))


WRAPPERS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": flushed,
    "members": members,
    "bgzf": bgzf,
    "zstd": frames,
}
COMPRESSED = [name for name in WRAPPERS if name != "plain"]


def opened(place: Any, *, limits: IndexLimits | None = None, **options: Any) -> Reads:
    """Reads; with `limits`, the index of a file that has none is built with these."""
    index_dir = Path(options["index_dir"]) if options.get("index_dir") else None
    if limits is not None and isinstance(place, Path) and place.is_file() and find_index(place, index_dir) is None:
        chosen = {name: options[name] for name in ("header_regex", "on_mismatch", "salvage") if name in options}
        build_index(place, IndexSettings(**chosen), index_dir=index_dir, limits=limits)
    reads = ms.open(place, **options)
    assert isinstance(reads, Reads)
    return reads


def refused(file: Path, **options: Any) -> str:
    """Opening the file fails with an error of ours that names it, and leaves nothing behind; what it says."""
    before = sorted(os.listdir(file.parent)) if file.parent.is_dir() else None
    with pytest.raises(MillstreamError) as caught:
        opened(file, **options)
    assert str(file) in str(caught.value)
    assert before is None or sorted(os.listdir(file.parent)) == before
    return str(caught.value)


def complaint(check: Callable[[], bool]) -> str | None:
    """None when the check holds; what an error of ours says, if it raises one."""
    try:
        assert check()
    except MillstreamError as error:
        return str(error)
    return None


def index_of(file: Path) -> Path:
    return file.with_name(file.name + ".millstream")


def texts(reads: Reads) -> list[str]:
    """The letters of every read."""
    return reads.fetch(range(len(reads))).sequences()


def letters(made: list[Slow]) -> list[str]:
    return [record.sequence.decode() for record in made]


def holds(reads: Reads, made: list[Slow]) -> bool:
    """Whether the reads are these, by number and one after the other."""
    wanted = [
        (each.header.split()[0].decode(), each.sequence.decode(), each.quality and each.quality.decode())
        for each in made
    ]
    found = [(read.name, read.sequence, read.quality or None) for read in reads]
    return [(name, text, grades or None) for name, text, grades in wanted] == found and texts(reads) == letters(made)


def change(file: Path, at: int, data: bytes) -> None:
    """Write over a part of a file, in place, so that neither its size nor its times tell."""
    stat = file.stat()
    with open(file, "r+b") as out:
        out.seek(at)
        out.write(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def flip(file: Path, at: int, mask: int = 1) -> None:
    """Change one byte, in place, so that nothing else tells."""
    change(file, at, bytes([file.read_bytes()[at] ^ mask]))
