"""Every record of every odd file is what a slow, obviously right parser says it is."""

import gzip
import zlib
from pathlib import Path

import numpy as np
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.reads.files.index import IndexLimits
from millstream.reads.reads import Reads
from support.effort import num_examples
from support.read_files import opened
from support.slow_reads import Slow, fasta_texts, fastq_texts, parse

TEXTS = st.one_of(fasta_texts(), fastq_texts())
many = settings(
    max_examples=num_examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def bgzf(text: bytes, size: int = 100) -> bytes:
    """BGZF as bgzip writes it, in small blocks, with the empty block that ends it."""
    blocks: list[bytes] = []
    for part in [*(text[at : at + size] for at in range(0, len(text), size)), b""]:
        deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
        data = deflate.compress(part) + deflate.flush()
        head = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x06\0BC\x02\0" + (len(data) + 25).to_bytes(2, "little")
        blocks.append(head + data + zlib.crc32(part).to_bytes(4, "little") + len(part).to_bytes(4, "little"))
    return b"".join(blocks)


def members(text: bytes, size: int = 150) -> bytes:
    """A gzip file of several members."""
    return b"".join(gzip.compress(text[at : at + size]) for at in range(0, len(text), size))


def frames(text: bytes, size: int = 120) -> bytes:
    """A zstd file of many frames, with and without their size, and a skippable one among them."""
    with_size, without = zstandard.ZstdCompressor(), zstandard.ZstdCompressor(write_content_size=False)
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    data = [(with_size if number % 2 else without).compress(part) for number, part in enumerate(parts)]
    return b"\x50\x2a\x4d\x18\x03\0\0\0abc".join(data)


WRAPPERS = {"plain": bytes, "gzip": gzip.compress, "members": members, "bgzf": bgzf, "zstd": frames}


def open_text(folder: Path, text: bytes, wrapper: str = "plain", *, limits: IndexLimits | None = None) -> Reads:
    file = folder / "reads"
    file.write_bytes(WRAPPERS[wrapper](text))
    file.with_name("reads.millstream").unlink(missing_ok=True)
    return opened(file, limits=limits)


def compare(reads: Reads, wanted: list[Slow]) -> None:
    assert len(reads) == len(wanted)
    for read, slow in zip(reads, wanted, strict=True):
        assert read.sequence.encode() == slow.sequence
        assert read.quality == (None if slow.quality is None else slow.quality.decode())
        words = slow.header.split(None, 1)
        name = b"" if not words or slow.header[:1].isspace() else words[0]
        assert read.name == name.decode(errors="replace")
    order = np.random.default_rng(0).permutation(len(wanted))
    batch = reads.fetch(order)
    assert batch.sequences() == [wanted[number].sequence.decode() for number in order]
    assert reads.lengths(order).tolist() == [len(wanted[number].sequence) for number in order]
    for number, slow in enumerate(wanted):
        for start, end in {(0, len(slow.sequence)), (1, len(slow.sequence) - 1), (3, 9), (7, 7)}:
            if 0 <= start <= end <= len(slow.sequence):
                assert reads.region(number, start, end).encode() == slow.sequence[start:end]


@many
@given(text=TEXTS)
def test_every_record_equals_the_slow_parsers(tmp_path: Path, text: bytes):
    compare(open_text(tmp_path, text), parse(text))


@settings(many, max_examples=num_examples(40))
@given(text=TEXTS, wrapper=st.sampled_from(sorted(WRAPPERS)))
def test_compressed_or_not_the_records_are_the_same(tmp_path: Path, text: bytes, wrapper: str):
    compare(open_text(tmp_path, text, wrapper), parse(text))


@settings(many, max_examples=num_examples(60))
@given(text=TEXTS, size=st.sampled_from([64, 72, 128]))
def test_records_and_headers_may_lie_across_the_ends_of_buffers(tmp_path: Path, text: bytes, size: int):
    compare(open_text(tmp_path, text, limits=IndexLimits(buffer_bytes=size)), parse(text))


@settings(many, max_examples=num_examples(60))
@given(text=TEXTS)
def test_any_name_finds_its_records(tmp_path: Path, text: bytes):
    reads = open_text(tmp_path, text)
    names = [read.name for read in reads]
    for name in names:
        assert reads.find(name) == [number for number, other in enumerate(names) if other == name]
    assert reads.find("no such name") == []


@settings(many, max_examples=num_examples(60))
@given(data=st.binary(min_size=1, max_size=300), start=st.sampled_from([b">a\nAC\n", b"@a\nAC\n+\nII\n", b""]))
def test_any_bytes_at_all_are_read_or_refused_but_never_a_crash(tmp_path: Path, data: bytes, start: bytes):
    try:
        reads = open_text(tmp_path, start + data)
    except ms.errors.MillstreamError as error:
        told = str(error)
        assert "reads" in told
        return
    assert [len(read.sequence) for read in reads] == reads.lengths(range(len(reads))).tolist()
