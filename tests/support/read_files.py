"""Small read files for tests: records, texts, ways to compress them, and a slow, obviously correct parser."""

import gzip
import json
import os
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zstandard
from hypothesis import strategies as st

import millstream as ms
from millstream.core.record import crc32c
from millstream.errors import MillstreamError
from millstream.reads.files.index import IndexLimits, IndexSettings, build_index, find_index
from millstream.reads.reads import Reads

REGEX = r"lbl\|(?P<class_id>\d+)\|(?P<tax_id>\d*)\|(?P<len>\d+)\|(?P<who>[^/]+)/(?P<mate>[12])"


class Record(NamedTuple):
    """One record, as bytes."""

    header: bytes
    sequence: bytes
    quality: bytes | None


def header_of(number: int, length: int) -> str:
    """In the documented layout; every fifth header has no taxon."""
    tax = "" if number % 5 == 4 else str(9600 + number % 7)
    return f"lbl|{number % 7}|{tax}|{length}|r{number}/{number % 2 + 1}"


def records(count: int, *, seed: int = 0, longest: int = 60, quality: bool = False) -> list[Record]:
    """Random records, some of them empty, with headers that match `REGEX`."""
    rng = random.Random(seed)
    made: list[Record] = []
    for number in range(count):
        bases = bytes(rng.choices(b"ACGTNacgt", k=rng.randrange(longest + 1)))
        qualities = bytes(rng.choices(range(33, 127), k=len(bases))) if quality else None
        made.append(Record(header_of(number, len(bases)).encode(), bases, qualities))
    return made


def fasta(made: list[Record], *, width: int = 0) -> bytes:
    """FASTA; wrapped at `width` bases, if that is not 0."""
    lines: list[bytes] = []
    for record in made:
        step = width or max(len(record.sequence), 1)
        pieces = [record.sequence[at : at + step] for at in range(0, len(record.sequence), step)]
        lines += [b">" + record.header, *pieces]
    return b"\n".join(lines) + b"\n"


def fastq(made: list[Record]) -> bytes:
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
        names = ("header_regex", "on_mismatch", "salvage", "unverified")
        chosen = {name: options[name] for name in names if name in options}
        chosen["salvage"] = options.get("salvage", False) or options.get("unverified", False)
        build_index(place, IndexSettings(**chosen), index_dir=index_dir, limits=limits)
    reads = ms.open(place, **options)
    assert isinstance(reads, Reads)
    return reads


def refused(file: Path, **options: Any) -> str:
    """Opening the file fails with a MillstreamError that names it, and leaves nothing behind; returns its message."""
    before = sorted(os.listdir(file.parent)) if file.parent.is_dir() else None
    with pytest.raises(MillstreamError) as caught:
        opened(file, **options)
    assert str(file) in str(caught.value)
    assert before is None or sorted(os.listdir(file.parent)) == before
    return str(caught.value)


def error_of(check: Callable[[], bool]) -> str | None:
    """None if the check holds; the message of a MillstreamError if it raises one."""
    try:
        assert check()
    except MillstreamError as error:
        return str(error)
    return None


def index_of(file: Path) -> Path:
    return file.with_name(file.name + ".millstream")


def texts(reads: Reads) -> list[str]:
    """The sequence of every read."""
    return reads.fetch(range(len(reads))).sequences()


def sequences_of(made: list[Record]) -> list[str]:
    return [record.sequence.decode() for record in made]


def holds(reads: Reads, made: list[Record]) -> bool:
    """Whether the reads are these, by number and one after the other."""
    found = [(read.name, read.sequence, read.quality or "") for read in reads]
    wanted = [
        (each.header.split()[0].decode(), each.sequence.decode(), (each.quality or b"").decode()) for each in made
    ]
    return found == wanted and texts(reads) == sequences_of(made)


def change(file: Path, at: int, data: bytes) -> None:
    """Overwrite a part of a file; its size and times stay the same."""
    stat = file.stat()
    with open(file, "r+b") as out:
        out.seek(at)
        out.write(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def flip(file: Path, at: int, mask: int = 1) -> None:
    """Change one byte of a file; its size and times stay the same."""
    change(file, at, bytes([file.read_bytes()[at] ^ mask]))


def change_meta(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the description of an index or a pack; everything else stays the same, and all checksums match."""
    tail, data = struct.Struct("<QQQII8s"), path.read_bytes()
    crcs_at, text_at, end, crcs_crc, _, magic = tail.unpack(data[-tail.size :])
    meta = json.loads(data[text_at:end])
    change(meta)
    text = json.dumps(meta).encode()
    numbers = crcs_at, text_at, text_at + len(text), crcs_crc, crc32c(text), magic
    path.write_bytes(data[:text_at] + text + tail.pack(*numbers))


# -- the slow parser, and odd but legal texts to try it on

BLANKS = b" \t\v\f\r"


def lines_of(text: bytes) -> list[bytes]:
    """Lines without their ends; the end of the text ends a line too."""
    lines = [line.removesuffix(b"\r") for line in text.split(b"\n")]
    return lines[:-1] if text.endswith(b"\n") or not text else lines


def bases_of(line: bytes) -> bytes:
    return bytes(byte for byte in line if byte not in BLANKS)


def parse(text: bytes) -> list[Record]:
    first = next(line for line in lines_of(text) if line.strip() and not line.startswith(b";"))
    return parse_fastq(text) if first.startswith(b"@") else parse_fasta(text)


def parse_fasta(text: bytes) -> list[Record]:
    records: list[Record] = []
    for line in lines_of(text):
        if line.startswith(b">"):
            records.append(Record(line[1:], b"", None))
        elif not line.startswith(b";") and records:
            records[-1] = Record(records[-1].header, records[-1].sequence + bases_of(line), None)
    return records


def parse_fastq(text: bytes) -> list[Record]:
    lines = lines_of(text)
    records: list[Record] = []
    at = 0
    while at < len(lines):
        if not bases_of(lines[at]):
            at += 1
            continue
        assert lines[at].startswith(b"@")
        header = lines[at][1:]
        at += 1
        sequence = b""
        while not lines[at].startswith(b"+"):
            sequence += bases_of(lines[at])
            at += 1
        at += 1
        quality = b""
        while len(quality) < len(sequence):
            quality += lines[at]
            at += 1
        assert len(quality) == len(sequence)
        records.append(Record(header, sequence, quality))
    return records


def wrapped(bases: str, width: int, end: str = "\n") -> str:
    """A sequence in lines."""
    return "".join(bases[at : at + width] + end for at in range(0, len(bases), width))


BASES = st.sampled_from([b"A", b"C", b"G", b"T", b"N", b"acgtn", b"ACGTACGTACGTACGT", b"RYKM", b"*-", b"MKVLE"])
ENDS = st.sampled_from([b"\n", b"\n", b"\n", b"\r\n"])
HEADERS = st.one_of(
    st.sampled_from(
        [b"", b"a", b"a b", b">x", b"same", b"same", b" lead", "é ü".encode(), b"x\ty", b"@q;+", b"a\rb", b"a\1b c"]
    ),
    st.from_regex(rb"lbl\|[0-9]{1,3}\|[0-9]{0,4}\|[0-9]{1,2}\|[a-z]{1,6}/[12]", fullmatch=True),
)


@st.composite
def fasta_texts(draw: st.DrawFn) -> bytes:
    """FASTA with whatever one finds in the wild."""
    text = draw(st.sampled_from([b"", b"", b"", b"\n", b"; a comment\n", b"\r\n\n", b" \n"]))
    for _ in range(draw(st.integers(1, 8))):
        end = draw(ENDS)
        text += b">" + draw(HEADERS) + end
        width = draw(st.sampled_from([0, 0, 1, 3, 7, 60]))
        sequence = b"".join(draw(st.lists(BASES, max_size=8)))
        if width == 0:
            text += sequence + end if sequence or draw(st.booleans()) else b""
        else:
            for start in range(0, len(sequence), width):
                text += sequence[start : start + width] + end
        text += b"".join(
            draw(st.lists(st.sampled_from([b"\n", b";c\n", b"AC\n", b"A C\n", b"AC \r\n", b"G\r\r\n"]), max_size=2))
        )
    cut = draw(st.sampled_from([0, 0, 1]))
    return text[:-1] if cut and text.endswith(b"\n") else text


@st.composite
def fastq_texts(draw: st.DrawFn) -> bytes:
    """FASTQ, one-line or wrapped, with qualities that look like headers."""
    text = draw(st.sampled_from([b"", b"", b"\n", b"\r\n"]))
    for _ in range(draw(st.integers(1, 6))):
        end = draw(ENDS)
        header = draw(HEADERS)
        sequence = b"".join(draw(st.lists(BASES, max_size=6)))
        qualities = st.integers(33, 126) | st.sampled_from(list(b"@+>I"))
        quality = bytes(draw(st.lists(qualities, min_size=len(sequence), max_size=len(sequence))))
        width = draw(st.sampled_from([0, 0, 5]))
        step = width if width and len(sequence) > width else max(len(sequence), 1)
        pieces = range(0, max(len(sequence), 1), step)
        quality_step = step if step < len(sequence) else draw(st.sampled_from([step, step, 3]))
        text += b"@" + header + end + b"".join(sequence[at : at + step] + end for at in pieces)
        text += b"+" + draw(st.sampled_from([b"", header])) + end
        text += b"".join(quality[at : at + quality_step] + end for at in range(0, max(len(sequence), 1), quality_step))
        text += draw(st.sampled_from([b"", b"", b"\n"]))
    cut = draw(st.sampled_from([0, 0, 1]))
    return text[:-1] if cut and text.endswith(b"\n") else text
