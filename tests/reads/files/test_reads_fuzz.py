"""Every record of every odd file is what a record, obviously right parser says it is."""

import gzip
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.reads.files.index import IndexLimits
from millstream.reads.reads import Reads
from support import read_files
from support.effort import num_examples
from support.read_files import Record, fasta_texts, fastq_texts, opened, parse

TEXTS = st.one_of(fasta_texts(), fastq_texts())
many = settings(
    max_examples=num_examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def frames_with_gaps(text: bytes) -> bytes:
    """zstd frames with a skippable one between any two."""
    parts = [text[at : at + 120] for at in range(0, len(text), 120)]
    return b"\x50\x2a\x4d\x18\x03\0\0\0abc".join(read_files.frames(part) for part in parts)


WRAPPERS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "members": partial(read_files.members, size=150),
    "bgzf": partial(read_files.bgzf, size=100),
    "zstd": read_files.frames,
    "skippable frames": frames_with_gaps,
}


def open_text(folder: Path, text: bytes, wrapper: str = "plain", *, limits: IndexLimits | None = None) -> Reads:
    file = folder / "reads"
    file.write_bytes(WRAPPERS[wrapper](text))
    file.with_name("reads.millstream").unlink(missing_ok=True)
    return opened(file, limits=limits)


def compare(reads: Reads, wanted: list[Record]) -> None:
    assert len(reads) == len(wanted)
    for number, (read, record) in enumerate(zip(reads, wanted, strict=True)):
        assert read == reads[number]
        assert read.sequence.encode() == record.sequence
        assert read.quality == (None if record.quality is None else record.quality.decode())
        name = next(iter(record.header.replace(b"\1", b" ").split()), b"")
        assert read.name == name.decode(errors="replace")
    order = np.random.default_rng(0).permutation(len(wanted))
    batch = reads.fetch(order)
    assert batch.sequences() == [wanted[number].sequence.decode() for number in order]
    assert reads.lengths(order).tolist() == [len(wanted[number].sequence) for number in order]
    for number, record in enumerate(wanted):
        for start, end in {(0, len(record.sequence)), (1, len(record.sequence) - 1), (3, 9), (7, 7)}:
            if 0 <= start <= end <= len(record.sequence):
                assert reads.region(number, start, end).encode() == record.sequence[start:end]


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
        assert reads.by_name(name) == reads[names.index(name)]
    assert reads.find("no such name") == []


@settings(many, max_examples=num_examples(60))
@given(data=st.binary(min_size=1, max_size=300), start=st.sampled_from([b">a\nAC\n", b"@a\nAC\n+\nII\n", b""]))
def test_arbitrary_bytes_are_read_or_refused_without_a_crash(tmp_path: Path, data: bytes, start: bytes):
    try:
        reads = open_text(tmp_path, start + data)
    except ms.errors.MillstreamError as error:
        message = str(error)
        assert "reads" in message
        return
    assert [len(read.sequence) for read in reads] == reads.lengths(range(len(reads))).tolist()
