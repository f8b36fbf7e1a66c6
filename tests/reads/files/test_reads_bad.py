"""Files that are invalid, damaged or changed, and bad indexes: refused by name, never misread."""

import bz2
import errno
import gzip
import io
import lzma
import os
import random
import re
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.errors import BadSource, MillstreamError, StaleIndex
from millstream.reads.files.index import IndexLimits, IndexSettings, build_index
from millstream.reads.files.sections_writer import SectionsWriter
from millstream.reads.inspect import show_reads, summarise_reads
from millstream.reads.open import open_reads
from support import read_files
from support.effort import PATIENCE_S, THOROUGH, num_examples
from support.nursery import Nursery
from support.read_files import (
    COMPRESSED,
    REGEX,
    WRAPPERS,
    Record,
    bgzf,
    change,
    change_meta,
    error_of,
    fasta,
    fastq,
    flip,
    flushed,
    frames,
    holds,
    index_of,
    members,
    records,
    refused,
    sequences_of,
    texts,
)

few = settings(
    max_examples=num_examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

opened = partial(read_files.opened, limits=IndexLimits(buffer_bytes=1 << 14))  # damage may come in any of several


def zipped(text: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("reads.fa", text)
    return file.getvalue()


# -- files of another kind

FOREIGN: dict[str, tuple[bytes, str]] = {
    "noise": (random.Random(1).randbytes(3000), "is a binary file"),
    "an error page": (b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>", "is a web page"),
    "an XML answer": (b'<?xml version="1.0"?><Error>denied</Error>', "is a web page"),
    "a table": (b"read\tclass\nr1\t4\n", r"starts with b'read\tclass\nr1\t4\n'"),
    "bzip2": (bz2.compress(b">a\nAC\n"), ": is bzip2"),
    "xz": (lzma.compress(b">a\nAC\n"), ": is xz"),
    "zip": (zipped(b">a\nAC\n"), ": is a zip archive"),
    "CRAM": (b"CRAM\3\0" + bytes(60), ": is CRAM"),
    "BAM": (bgzf(b"BAM\1" + bytes(60)), ": is BAM"),
    "SAM": (b"@HD\tVN:1.6\n@SQ\tSN:chr1\tLN:4\nr1\t0\tchr1\t1\t9\t4M\t*\t0\t0\tACGT\tIIII\n", ": is SAM"),
    "line ends of CR": (b">a\rACGT\r>b\rAC\r", "end in CR"),
    "nothing": (b"", ": empty"),
    "gzip of nothing": (gzip.compress(b""), ": empty"),
    "BGZF of nothing": (bgzf(b""), ": empty"),
    "zstd of nothing": (zstandard.compress(b""), ": empty"),
    "blank lines": (b"\n\r\n  \n\n", "neither FASTA nor FASTQ"),
    "comments": (b"; a comment\n;\n", "neither FASTA nor FASTQ"),
    "gzip of noise": (gzip.compress(random.Random(2).randbytes(3000)), "is a binary file"),
    "UTF-16": (">a\nACGT\n".encode("utf-16"), "is a binary file"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_of_another_kind_is_refused_by_what_it_is(what: str, tmp_path: Path):
    data, finding = FOREIGN[what]
    (tmp_path / "reads.fa").write_bytes(data)
    assert finding in refused(tmp_path / "reads.fa")


@pytest.mark.parametrize("what", FOREIGN)
def test_salvage_makes_no_reads_of_a_file_of_another_kind(what: str, tmp_path: Path):
    (tmp_path / "reads.fa").write_bytes(FOREIGN[what][0])
    refused(tmp_path / "reads.fa", salvage=True)


@pytest.mark.parametrize("place", ["missing.fa", "missing/reads.fa", "missing*.fa", "empty folder"])
def test_a_path_without_reads_is_refused_by_name(place: str, tmp_path: Path):
    (tmp_path / "empty folder").mkdir()
    refused(tmp_path / place)


def test_a_missing_file_among_others_is_named(tmp_path: Path):
    (tmp_path / "a.fa").write_bytes(b">a\nAC\n")
    with pytest.raises(BadSource, match=r"b\.fa: no such file"):
        ms.open([tmp_path / "a.fa", tmp_path / "b.fa"])


def test_no_files_at_all_are_refused():
    with pytest.raises(BadSource, match="no files"):
        ms.open([])


def test_a_folder_whose_fasta_is_a_web_page_is_refused_not_half_read(tmp_path: Path):
    (tmp_path / "a.fa").write_bytes(b">a\nAC\n")
    (tmp_path / "b.fa").write_bytes(b"<html></html>")
    with pytest.raises(BadSource, match=r"b\.fa: .*web page"):
        ms.open(tmp_path)


def test_a_file_without_read_permission_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "reads.fa"
    file.write_bytes(b">a\nAC\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    deny(monkeypatch, file)
    with pytest.raises(BadSource, match=re.escape(str(file))):
        ms.open(file)


def deny(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """The tests may run as root, whom no permission stops."""

    def denied(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if not isinstance(path, int) and Path(path) == file:
                raise PermissionError(errno.EACCES, "Permission denied", str(file))
            return real(path, *args, **options)

        return call

    monkeypatch.setattr("builtins.open", denied(open))
    monkeypatch.setattr(os, "open", denied(os.open))


# -- FASTQ that is not right


def test_a_quality_of_another_length_is_refused_with_record_and_byte(tmp_path: Path):
    made = records(20, quality=True, longest=30)
    wrong = made[7]._replace(quality=b"I" * (len(made[7].sequence) + 1))
    text = fastq([*made[:7], wrong, *made[8:]])
    (tmp_path / "reads.fq").write_bytes(text)
    message = refused(tmp_path / "reads.fq")
    line = text.index(b"\n+\n", len(fastq(made[:7]))) + 3
    assert "in record 7" in message and f"at byte {line}" in message


def test_errors_in_a_compressed_file_give_the_byte_of_the_text(tmp_path: Path):
    (tmp_path / "reads.fq.gz").write_bytes(gzip.compress(b"@a\nAC\n+\nIII\n"))
    assert "at byte 8 of the text, in record 0" in refused(tmp_path / "reads.fq.gz")


@pytest.mark.parametrize(
    "quality", ["IIII\n", "\nIIIIIIII", "II\nIIII\nII", "III\nIIII\nI", "IIII\nII\nII", "IIII\nIII"]
)
def test_a_short_quality_does_not_swallow_the_next_record(quality: str, tmp_path: Path):
    (tmp_path / "reads.fq").write_text(f"@a\nACGTACGT\n+\n{quality}\n@bcd\nAC\n+\nII\n")
    assert "reads.fq" in refused(tmp_path / "reads.fq")


def test_a_record_without_a_plus_line_is_refused_with_record_and_byte(tmp_path: Path):
    (tmp_path / "reads.fq").write_bytes(b"@a\nAC\n+\nII\n@b\nAC\n@c\nAC\n+\nII\n")
    assert "at byte 17, in record 1" in refused(tmp_path / "reads.fq")


def test_a_line_between_two_fastq_records_is_refused_with_its_byte(tmp_path: Path):
    (tmp_path / "reads.fq").write_bytes(b"@a\nAC\n+\nII\nACGT\n@b\nAC\n+\nII\n")
    assert "at byte 11" in refused(tmp_path / "reads.fq")


def test_binary_bytes_in_a_sequence_are_refused_with_their_byte(tmp_path: Path):
    (tmp_path / "reads.fa").write_bytes(b">a\nAC\n>b\nA\0C\n")
    assert "(byte 0)" in (message := refused(tmp_path / "reads.fa")) and "at byte 10, in record 1" in message


def whole_fastq(text: bytes, made: list[Record]) -> list[Record]:
    """The records whose last quality letter is in the text."""
    ends = np.cumsum([len(fastq([record])) for record in made]) - 1
    return [record for record, end in zip(made, ends, strict=True) if end <= len(text)]


def whole_fasta(text: bytes, made: list[Record]) -> list[Record]:
    """The records that are surely whole: the next one has begun."""
    return made[: max(text.count(b">") - 1, 0)]


def test_a_fastq_file_cut_anywhere_is_refused_and_salvaged(tmp_path: Path):
    made = [record for record in records(4, quality=True, longest=12) if record.sequence]
    text, file = fastq(made), tmp_path / "reads.fq"
    ends = np.cumsum([len(fastq([record])) for record in made]).tolist()
    for cut in range(1, len(text) - 1, 3):
        file.write_bytes(text[:cut])
        whole = whole_fastq(text[:cut], made)
        if cut not in ends and cut + 1 not in ends:
            assert "in record" in (message := refused(file)) or "--salvage" in message
        assert holds(opened(file, salvage=True), whole), cut
        index_of(file).unlink()


def test_salvaged_fastq_has_the_right_columns_wherever_it_was_cut(tmp_path: Path):
    made = [record for record in records(6, quality=True, longest=8) if record.sequence]
    text, file = fastq(made), tmp_path / "reads.fq"
    for cut in range(len(fastq(made[:3])), len(text), 3):
        file.write_bytes(text[:cut])
        reads = opened(file, salvage=True, header_regex=REGEX)
        wanted = whole_fastq(text[:cut], made)
        assert reads.column("who").to_pylist() == [record.header.decode().split("|")[4][:2] for record in wanted], cut
        index_of(file).unlink()


# -- compressed files that are cut or have more


def decoded(wrapper: str, data: bytes) -> bytes:
    """The text that can be decoded of a cut file."""
    if wrapper == "zstd":
        parts = [frames(part) for part in split_text()]
        return b"".join(split_text()[: sum(size <= len(data) for size in np.cumsum([len(p) for p in parts]))])
    text = b""
    while data:
        one = zlib.decompressobj(31)
        piece = one.decompress(data)
        if wrapper == "bgzf" and not one.eof:
            break
        text, data = text + piece, one.unused_data
    return text


MADE = records(25, longest=90)


def split_text() -> list[bytes]:
    text = fasta(MADE)
    return [text[at : at + 400] for at in range(0, len(text), 400)]


def frames_like(text: bytes) -> bytes:
    """As `split_text` has it, so that cut frames can be counted."""
    return b"".join(frames(part) for part in split_text()) if text == fasta(MADE) else frames(text)


CUT = {"gzip": flushed, "one gzip": gzip.compress, "members": members, "bgzf": bgzf, "zstd": frames_like}


@pytest.mark.parametrize("wrapper", CUT)
def test_a_compressed_file_cut_anywhere_is_refused_and_its_unverified_text_can_be_used(wrapper: str, tmp_path: Path):
    data, file = CUT[wrapper](fasta(MADE)), tmp_path / "reads.fa"
    edges = set(borders(wrapper, data))
    for cut in {*range(1, 24, 2), *range(24, len(data) - 12, 67), *range(len(data) - 12, len(data))} - edges:
        file.write_bytes(data[:cut])
        text = decoded(wrapper, data[:cut])
        message = refused(file)
        assert re.search(r"at byte \d+", message) or cut < 19, message
        if not text:
            refused(file, unverified=True)
            continue
        assert "--salvage" in message or "--unverified" in message
        assert holds(opened(file, unverified=True), whole_fasta(text, MADE)), cut
        index_of(file).unlink()


def borders(wrapper: str, data: bytes) -> list[int]:
    """Where members, blocks or frames end: a file cut there is a whole file."""
    if wrapper == "zstd":
        return np.cumsum([len(frames(part)) for part in split_text()]).tolist()
    found: list[int] = []
    rest = data
    while rest:
        one = zlib.decompressobj(31)
        one.decompress(rest)
        rest = one.unused_data
        found.append(len(data) - len(rest))
    return found


@pytest.mark.parametrize("wrapper", CUT)
def test_a_salvaged_file_has_the_right_columns_wherever_it_was_cut(wrapper: str, tmp_path: Path):
    data, file = CUT[wrapper](fasta(MADE)), tmp_path / "reads.fa"
    for cut in range(len(data) // 3, len(data), 59 if THOROUGH else 199):
        file.write_bytes(data[:cut])
        wanted = whole_fasta(decoded(wrapper, data[:cut]), MADE)
        if len(wanted) < 2:
            continue
        reads = opened(file, unverified=True, header_regex=REGEX)
        assert reads.fetch(range(len(reads)), ["who"]).columns["who"] == [f"r{n}" for n in range(len(wanted))], cut
        assert texts(reads) == sequences_of(wanted)
        index_of(file).unlink()


@pytest.mark.parametrize("size", [128, 256, 1024])
def test_salvage_loses_no_record_of_earlier_buffers(size: int, tmp_path: Path):
    made = records(200, longest=40)
    data, file = gzip.compress(fasta(made)), tmp_path / "reads.fa"
    file.write_bytes(data[: len(data) * 2 // 3])
    wanted = whole_fasta(decoded("gzip", file.read_bytes()), made)
    assert holds(opened(file, unverified=True, limits=IndexLimits(buffer_bytes=size)), wanted)


def test_a_compressed_fastq_cut_anywhere_gives_every_whole_record(tmp_path: Path):
    made = [record for record in records(12, quality=True, longest=12) if record.sequence]
    data, file = flushed(fastq(made), 10), tmp_path / "reads.fq"
    for cut in range(len(data) // 2, len(data) - 20, 7):
        file.write_bytes(data[:cut])
        wanted = whole_fastq(decoded("gzip", file.read_bytes()), made)
        assert holds(opened(file, unverified=True), wanted), cut
        index_of(file).unlink()


def test_the_number_of_salvaged_records_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "reads.fa").write_bytes(gzip.compress(fasta(MADE))[:-10])
    reads = opened(tmp_path / "reads.fa", unverified=True)
    message = capsys.readouterr().err
    assert f"{len(reads)} records" in message and "at byte" in message


def test_a_file_cut_in_its_only_record_is_salvaged_without_records(tmp_path: Path):
    (tmp_path / "reads.fa").write_bytes(flushed(b">a\n" + b"ACGT" * 100, 10)[:-20])
    reads = opened(tmp_path / "reads.fa", unverified=True)
    assert len(reads) == 0 and list(reads) == [] and reads.find("a") == [] and reads.table.num_rows == 0


@pytest.mark.parametrize("wrapper", COMPRESSED)
def test_trailing_data_after_the_compressed_data_is_refused_with_its_byte(wrapper: str, tmp_path: Path):
    data, file = WRAPPERS[wrapper](fasta(MADE)), tmp_path / "reads.fa"
    file.write_bytes(data + b"and what is this? It is longer than a header.")
    message = refused(file)
    assert f"at byte {len(data)}" in message and "--salvage" in message
    assert set(texts(opened(file, unverified=True))) <= set(sequences_of(MADE))


@pytest.mark.parametrize("wrapper", ["gzip", "members"])
def test_trailing_data_after_gzip_data_loses_no_record(wrapper: str, tmp_path: Path):
    (tmp_path / "reads.fa").write_bytes(WRAPPERS[wrapper](fasta(MADE)) + b"and what is this?")
    assert holds(opened(tmp_path / "reads.fa", unverified=True), MADE)


@pytest.mark.parametrize("count", [1, 2, 511, 512, 4 << 20])
def test_zeros_after_gzip_data_are_padding(count: int, tmp_path: Path):
    (tmp_path / "reads.fa").write_bytes(flushed(fasta(MADE)) + bytes(count))
    assert holds(opened(tmp_path / "reads.fa"), MADE)


def test_a_wrong_gzip_checksum_is_refused(tmp_path: Path):
    data, file = gzip.compress(fasta(MADE)), tmp_path / "reads.fa"
    file.write_bytes(data[:-8] + bytes([data[-8] ^ 1]) + data[-7:])
    message = refused(file)
    assert "incorrect data check" in message and "--unverified" in message and "at byte" in message


def test_unverified_text_before_a_wrong_checksum_ends_before_the_record_that_continues_in_the_next_member(
    tmp_path: Path,
):
    first, second = (gzip.compress(part) for part in (b">a\nACGT\n>b\nACGT", b"ACGTACGT\n>c\nAC\n"))
    (tmp_path / "reads.fa").write_bytes(first[:-8] + bytes([first[-8] ^ 1]) + first[-7:] + second)
    assert texts(opened(tmp_path / "reads.fa", unverified=True)) == ["ACGT"]


@pytest.mark.parametrize("format", ["fasta", "fastq"])
@pytest.mark.parametrize("wrapper", ["gzip", "one gzip", "members", "bgzf", "zstd"])
def test_a_salvaged_record_is_a_record_of_the_undamaged_file(wrapper: str, format: str, tmp_path: Path):
    made = [record for record in records(120, longest=90, quality=format == "fastq") if record.sequence]
    text = fastq(made) if format == "fastq" else fasta(made)
    data, file = {**WRAPPERS, "one gzip": gzip.compress}[wrapper](text), tmp_path / "reads.fa"
    num_salvaged = 0
    for at in range(20, len(data), len(data) // 60 * (1 if THOROUGH else 3)):
        for bit in (0, 3, 6) if THOROUGH else (at % 3 * 3,):
            file.write_bytes(data)
            flip(file, at, 1 << bit)
            try:
                reads = opened(file, salvage=True)
            except MillstreamError:
                continue
            assert holds(reads, made[: len(reads)]), (at, bit)
            num_salvaged += len(reads)
            index_of(file).unlink()
    assert (num_salvaged > 0) == (wrapper not in ("gzip", "one gzip"))


def test_salvage_gives_the_members_before_the_damaged_one_and_tells_how_much_is_not_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    first, second, third = fasta(MADE[:10]), fasta(MADE[10:20]), fasta(MADE[20:])
    file = tmp_path / "reads.fa.gz"
    whole = [gzip.compress(part) for part in (first, second, third)]
    file.write_bytes(b"".join(whole))
    flip(file, len(whole[0]) + len(whole[1]) - 6)  # the checksum of the second member
    message = refused(file)
    assert f"up to byte {len(first)}" in message and "--salvage" in message and "--unverified" in message
    limits = IndexLimits(point_bytes=64)
    salvaged = opened(file, salvage=True, limits=limits)
    assert holds(salvaged, MADE[:9])  # the tenth may continue in the next member
    listed = f"{len(second)} bytes of text before it, from record 9 on"
    assert listed in capsys.readouterr().err and listed in show_reads(summarise_reads(salvaged))
    assert holds(opened(file), MADE[:9])
    unverified = opened(file, unverified=True)
    assert holds(unverified, MADE[:19])
    assert listed in capsys.readouterr().err and listed in show_reads(summarise_reads(unverified))
    assert holds(opened(file, salvage=True), MADE[:9])


@pytest.mark.parametrize("buffer_bytes", [256, 1 << 20])
def test_unverified_fastq_is_listed_from_the_record_that_the_checked_text_ends_before(
    buffer_bytes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    made = [record for record in records(40, longest=90, quality=True) if record.sequence]
    text, file, limits = fastq(made), tmp_path / "reads.fq.gz", IndexLimits(buffer_bytes=buffer_bytes)
    starts = [len(fastq(made[:number])) for number in range(len(made))]
    for border, checked in ((starts[7], 7), (starts[7] + 1, 7)):
        whole = [gzip.compress(text[:border]), gzip.compress(text[border:])]
        file.write_bytes(b"".join(whole))
        flip(file, sum(map(len, whole)) - 6)
        for options, number in ({"salvage": True}, len(made[:checked])), ({"unverified": True}, len(made)):
            index_of(file).unlink(missing_ok=True)
            reads = opened(file, limits=limits, **options)
            assert holds(reads, made[:number])
            assert f"from record {checked} on" in capsys.readouterr().err


def test_damaged_text_that_is_no_fastq_names_the_command_for_the_text_before_it(tmp_path: Path):
    made = [record for record in records(400, longest=90, quality=True) if record.sequence]
    text, file = fastq(made), tmp_path / "reads.fq.gz"
    start = len(fastq(made[:100]))
    bad = gzip.compress(text[:start] + b"x" + text[start + 1 :])
    file.write_bytes(bad)
    assert "--salvage" in refused(file)  # not damaged, as far as is known
    assert "head -c" not in refused(file, unverified=True)
    flip(file, len(bad) - 6)
    message = refused(file, unverified=True)
    found = re.search(r"head -c (\d+)", message)
    assert found and text[: int(found[1])] == fastq(made[: text[: int(found[1])].count(b"\n") // 4])


def test_zstd_frames_without_a_checksum_are_not_salvaged_as_verified(tmp_path: Path):
    file = tmp_path / "reads.fa.zst"
    plain, checked = (zstandard.ZstdCompressor(write_checksum=on) for on in (False, True))
    parts = [fasta(MADE[:10]), fasta(MADE[10:20]), fasta(MADE[20:])]
    file.write_bytes(checked.compress(parts[0]) + plain.compress(parts[1]) + checked.compress(parts[2]))
    assert holds(opened(file, salvage=True), MADE)  # nothing is wrong with it
    index_of(file).unlink()
    flip(file, file.stat().st_size - 1)
    assert holds(opened(file, salvage=True), MADE[:9])
    assert holds(opened(file, unverified=True), MADE[:19])


def test_a_file_without_verified_text_is_not_salvaged(tmp_path: Path):
    file = tmp_path / "reads.fa.gz"
    file.write_bytes(gzip.compress(fasta(MADE))[:-8])
    message = refused(file, salvage=True)
    assert f"{len(fasta(MADE))} bytes" in message and "--unverified" in message


@pytest.mark.parametrize("wrapper", ["gzip", "one gzip", "members", "bgzf", "zstd"])
def test_whatever_text_precedes_the_damage_can_be_read(wrapper: str, tmp_path: Path):
    made = records(400, longest=90)
    data, file = bytearray({**WRAPPERS, "one gzip": gzip.compress}[wrapper](fasta(made))), tmp_path / "reads.fa"
    for at in range(len(data) // 2, len(data) - 200, len(data) // 12):
        file.write_bytes(data[:at] + random.Random(at).randbytes(150) + data[at + 150 :])
        with pytest.raises(MillstreamError):
            ms.open(file)
        message = error_of(lambda: texts(opened(file, unverified=True))[:100] == sequences_of(made)[:100])
        assert message is None or "in record" in message  # the decoder may make text of it that is no FASTA
        index_of(file).unlink(missing_ok=True)


@pytest.mark.parametrize("sized", [True, False])
def test_a_zstd_file_of_one_huge_frame_is_refused_with_a_remedy(sized: bool, tmp_path: Path):
    text = b">a\n" + random.Random(0).randbytes(2 << 20).translate(bytes(b"ACGT" * 64)) + b"\n"
    (tmp_path / "reads.fa.zst").write_bytes(zstandard.ZstdCompressor(write_content_size=sized).compress(text))
    message = refused(tmp_path / "reads.fa.zst", limits=IndexLimits(frame_bytes=1 << 20))
    assert "the zstd frame at byte 0 has more than 1 MB" in message and "zstd -dc" in message


def test_a_header_longer_than_the_buffer_is_refused_with_its_byte(tmp_path: Path):
    (tmp_path / "reads.fa").write_bytes(b">a\nACGT\n>" + b"x" * 300 + b"\nACGT\n")
    message = refused(tmp_path / "reads.fa", limits=IndexLimits(buffer_bytes=256))
    assert "at byte 8" in message and "256 bytes" in message


def test_bgzf_that_continues_as_gzip_is_read_as_gzip(tmp_path: Path):
    made = records(200)
    text = fasta(made)
    half = len(text) // 2
    (tmp_path / "reads.fa").write_bytes(bgzf(text[:half], end=False) + gzip.compress(text[half:]))
    assert holds(opened(tmp_path / "reads.fa"), made)


def test_gzip_that_continues_as_bgzf_is_read_as_gzip(tmp_path: Path):
    made = records(200)
    text = fasta(made)
    (tmp_path / "reads.fa").write_bytes(gzip.compress(text[:700]) + bgzf(text[700:]))
    assert holds(opened(tmp_path / "reads.fa"), made)


# -- damage that comes after indexing


def place_in(reads: ms.Reads, number: int) -> tuple[int, int]:
    """The compressed block a record starts in, from and to which byte of the file."""
    part = reads.parts[0]
    start = int(part.locate(np.array([number])).start[0])  # pyright: ignore
    columns = [part.sections.column(f"block.{name}").whole() for name in ("raw", "plain")]
    raw, plain = (column.take(np.arange(column.rows)) for column in columns)
    block = int(np.searchsorted(plain, start, side="right")) - 1
    return int(raw[block]), int(np.append(raw, part.path.stat().st_size)[block + 1])


@pytest.mark.parametrize("wrapper", COMPRESSED)
def test_a_flipped_bit_loses_the_records_of_its_block_and_no_others(wrapper: str, tmp_path: Path):
    made = records(60)
    file = tmp_path / "reads.fa"
    file.write_bytes(WRAPPERS[wrapper](fasta(made)))
    start, end = place_in(opened(file, limits=IndexLimits(point_bytes=1)), 30)
    reads = opened(file)
    flip(file, (start + end) // 2, 16)
    with pytest.raises(BadSource, match=rf"{re.escape(str(file))}: .* byte {start} "):
        reads[30]
    lost = 0
    for number, record in enumerate(made):
        try:
            assert reads[number].sequence.encode() == record.sequence
        except BadSource:
            lost += 1
    assert 1 <= lost < 25


@pytest.mark.parametrize("wrapper", COMPRESSED)
def test_no_byte_of_a_block_can_change_unnoticed(wrapper: str, tmp_path: Path):
    made = records(30)
    file = tmp_path / "reads.fa"
    file.write_bytes(WRAPPERS[wrapper](fasta(made)))
    start, end = place_in(opened(file, limits=IndexLimits(point_bytes=1)), 15)
    for at in range(start, end, 2):
        for mask in (1, 128):
            reads = opened(file)
            flip(file, at, mask)
            message = error_of(lambda reads=reads: texts(reads) == sequences_of(made))
            # A byte of a gzip header may say anything; of the last ones the next block may have bits.
            assert message is None or f"byte {start} " in message or at >= end - 2
            flip(file, at, mask)


# -- files that change


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    (tmp_path / "reads.fa").write_bytes(fasta(MADE))
    return tmp_path / "reads.fa"


def replace_file(file: Path) -> None:
    stat = file.stat()
    file.with_name("new").write_bytes(file.read_bytes().replace(b"A", b"C"))
    os.utime(file.with_name("new"), ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.rename(file.with_name("new"), file)


def append_to(file: Path) -> None:
    with open(file, "ab") as out:
        out.write(b">more\nACGT\n")


CHANGES: dict[str, Callable[[Path], None]] = {
    "replaced": replace_file,
    "appended to": append_to,
    "cut": lambda file: os.truncate(file, 100),
    "emptied": lambda file: os.truncate(file, 0),
    "deleted": Path.unlink,
}


@pytest.mark.parametrize("wrapper", ["plain", "zstd"])
@pytest.mark.parametrize("how", CHANGES)
def test_a_file_that_changes_while_it_is_open_is_noticed(how: str, wrapper: str, tmp_path: Path):
    file = tmp_path / "reads.fa"
    file.write_bytes(WRAPPERS[wrapper](fasta(MADE)))
    reads = opened(file)
    CHANGES[how](file)
    with pytest.raises(StaleIndex, match=re.escape(str(file))):
        reads.fetch([20])


USES = """
import os, sys, numpy as np, millstream as ms
file, name = sys.argv[1:]
reads = ms.open(file, header_regex=r"(?P<own>\\S+)")
os.truncate(file, 0)
for use in (
    lambda: reads[20],
    lambda: reads.fetch([20]),
    lambda: list(reads),
    lambda: reads.region(300, 0, 1),
    lambda: reads.regions([300], 0, 1),
    lambda: reads.find(name),
    lambda: reads.by_name(name),
    lambda: reads.column("own"),
    lambda: reads.parts[0].names_of(np.array([20])),
):
    try:
        use()
    except ms.errors.StaleIndex as error:
        print(file in str(error), flush=True)
"""


def test_every_way_to_read_notices_a_file_that_was_cut(nursery: Nursery, tmp_path: Path):
    """In a process of its own: to read a mapped byte that is no longer there is SIGBUS."""
    file, made = tmp_path / "reads.fa", records(400)
    file.write_bytes(fasta(made))
    opened(file, header_regex=r"(?P<own>\S+)", limits=IndexLimits(distinct=100))  # `own` stays in the headers
    assert nursery.run(USES, file, made[300].header.decode()).out.split() == ["True"] * 9


def test_a_file_larger_than_its_memory_is_checked_too(plain: Path):
    reads = opened(plain, memory=1)
    os.truncate(plain, 10)
    with pytest.raises(StaleIndex, match=re.escape(str(plain))):
        reads.region(20, 0, 1)


def test_changing_the_working_folder_does_not_matter(plain: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(plain.parent)
    reads = opened(plain.name)
    monkeypatch.chdir("/")
    assert texts(reads) == sequences_of(MADE)


def test_a_file_of_another_size_is_stale(plain: Path):
    opened(plain)
    append_to(plain)
    message = refused(plain)
    size = plain.stat().st_size
    assert f"size {size - 11} -> {size}" in message and f"millstream index {plain} --rebuild" in message


def test_other_content_of_the_same_size_is_stale(plain: Path):
    opened(plain)
    plain.write_bytes(plain.read_bytes().replace(b"A", b"C"))
    assert "same size, different content" in refused(plain)


def test_other_content_under_the_same_size_and_time_is_stale(plain: Path):
    opened(plain)
    change(plain, 700, b"TT")
    assert "same size, different content" in refused(plain)


def test_a_change_between_the_samples_is_found_when_the_time_differs(tmp_path: Path):
    file = tmp_path / "reads.fa"
    file.write_bytes(fasta(records(40, longest=60_000)))
    assert file.stat().st_size > 1 << 20
    opened(file)
    at = file.stat().st_size // 16 * 5 + 30_000
    flip(file, at, 2)
    os.utime(file)
    assert "content partly changed" in refused(file)


def test_a_file_that_was_only_touched_is_accepted(plain: Path):
    opened(plain)
    before = index_of(plain).stat().st_ino
    os.utime(plain, ns=(1, 1))
    assert holds(opened(plain), MADE)
    assert index_of(plain).stat().st_ino == before


def test_a_stale_index_can_be_rebuilt(plain: Path):
    opened(plain)
    plain.write_bytes(b">other\nGGG\n")
    assert texts(open_reads([plain], rebuild=True)) == ["GGG"]
    assert texts(opened(plain)) == ["GGG"]


def test_a_file_that_changes_while_it_is_indexed_gets_no_index(plain: Path):
    def grow(done: int, note: str = "") -> None:
        append_to(plain)

    with pytest.raises(StaleIndex, match=re.escape(str(plain))):
        build_index(plain, IndexSettings(), progress=grow)
    assert os.listdir(plain.parent) == [plain.name]


def test_a_pickle_of_reads_whose_file_has_changed_is_refused(plain: Path):
    import pickle

    data = pickle.dumps(opened(plain))
    append_to(plain)
    with pytest.raises(StaleIndex, match=re.escape(str(plain))):
        pickle.loads(data)


# -- bad indexes


def test_the_index_of_another_file_is_not_used(plain: Path):
    other = plain.with_name("other.fa")
    other.write_bytes(plain.read_bytes()[:-4] + b"CCC\n")
    opened(other)
    os.rename(index_of(other), index_of(plain))
    message = refused(plain)
    assert "different content" in message and "--rebuild" in message


def test_a_file_that_moves_with_its_index_needs_no_new_one(plain: Path):
    opened(plain)
    there = plain.parent / "there"
    there.mkdir()
    os.rename(plain, there / "moved.fa")
    os.rename(index_of(plain), index_of(there / "moved.fa"))
    before = index_of(there / "moved.fa").stat().st_ino
    assert holds(opened(there / "moved.fa"), MADE)
    assert index_of(there / "moved.fa").stat().st_ino == before


def test_an_index_cut_anywhere_is_refused_with_the_remedy(plain: Path):
    opened(plain)
    data = index_of(plain).read_bytes()
    for cut in [*range(0, len(data), 64), len(data) - 1, len(data) - 8, len(data) - 44]:
        index_of(plain).write_bytes(data[:cut])
        message = refused(plain)
        assert str(index_of(plain)) in message and f"millstream index {plain} --rebuild" in message


def test_an_index_with_more_after_its_end_is_refused(plain: Path):
    opened(plain)
    with open(index_of(plain), "ab") as file:
        file.write(bytes(64))
    assert "--rebuild" in refused(plain)


def everything(reads: ms.Reads) -> object:
    """Everything that reads return."""
    batch = reads.fetch(range(len(reads)), ["sequence", "name", *reads.column_names])
    columns = {name: list(values) for name, values in batch.columns.items()}
    found = [reads.find(read.name) for read in reads]
    regions = [reads.region(number, 0, length // 2) for number, length in enumerate(batch.lengths.tolist())]
    return batch.sequences(), columns, found, regions, reads.table.to_pydict(), [read.columns for read in reads]


class SmallIndex:
    """A gzip file with seek points and columns of several kinds, its index, and all of its content."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(flushed(fasta(MADE, width=20), 200))
        self._file = file
        self._wanted = everything(opened(file, header_regex=REGEX, limits=IndexLimits(point_bytes=200)))
        self.data = index_of(file).read_bytes()

    def check(self, at: int, mask: int) -> None:
        """With one byte changed the content is the same, or the damage is noticed."""
        changed = bytearray(self.data)
        changed[at] ^= mask
        index_of(self._file).write_bytes(changed)
        message = error_of(lambda: everything(opened(self._file)) == self._wanted)
        assert message is None or (str(index_of(self._file)) in message and "millstream index" in message)


@pytest.fixture
def small_index(tmp_path: Path) -> SmallIndex:
    return SmallIndex(tmp_path / "reads.fa")


@settings(few, max_examples=num_examples(150))
@given(place=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
def test_a_changed_byte_of_an_index_is_noticed_or_does_no_harm(small_index: SmallIndex, place: float, mask: int):
    small_index.check(int(place * len(small_index.data)), mask)


def test_a_changed_byte_at_the_end_of_an_index_is_noticed_or_does_no_harm(small_index: SmallIndex):
    for back in range(1, 49):  # where everything else is found by
        for mask in (1, 8, 128):
            small_index.check(-back, mask)


def test_damage_within_an_index_is_named_with_its_bytes_and_the_remedy(plain: Path):
    opened(plain)
    flip(index_of(plain), 100)
    message = refused(plain)
    assert "damaged between byte 0 and" in message and f"millstream index {plain} --rebuild" in message


def test_an_index_of_a_newer_format_needs_a_newer_millstream(plain: Path):
    build_index(plain, IndexSettings())
    change_meta(index_of(plain), lambda meta: meta.update(version=2))
    message = refused(plain)
    assert "format 2" in message and "upgrade" in message


def test_an_index_of_something_else_is_refused(plain: Path):
    with SectionsWriter(index_of(plain)) as writer:
        writer.publish({"what": "index of traces"})
    assert "index of traces" in refused(plain)


# -- headers, columns, labels

HEADED = b">lbl|1|5|x\nAC\n>odd\nAC\n>lbl|2|5|y\nAC\n>strange\nAC\n"
SHORT = r"lbl\|(?P<class_id>\d+)\|(?P<tax_id>\d+)\|(?P<who>\w+)"


@pytest.mark.parametrize(
    ("regex", "finding"),
    [
        (r"lbl\|(\d+)", "has no named groups"),
        (r"lbl\|(?P<class_id>\d+", "does not compile"),
        (r"(?P<a>\d+)(?P<a>\d+)", "does not compile"),
    ],
)
def test_a_header_regex_that_gives_no_columns_is_refused_with_an_example(regex: str, finding: str, plain: Path):
    with pytest.raises(BadSource, match=finding) as caught:
        ms.open(plain, header_regex=regex)
    assert "Example:" in str(caught.value)
    assert os.listdir(plain.parent) == [plain.name]


def test_a_header_that_does_not_match_is_an_error_that_shows_it(tmp_path: Path):
    (tmp_path / "reads.fa").write_bytes(HEADED)
    message = refused(tmp_path / "reads.fa", header_regex=SHORT)
    assert "2 of the first 4 headers" in message and "odd; strange" in message and "on_mismatch" in message


def test_the_first_five_headers_that_do_not_match_are_shown(tmp_path: Path):
    (tmp_path / "reads.fa").write_bytes(HEADED + b"".join(b">odd%d\nAC\n" % number for number in range(100)))
    limits = IndexLimits(buffer_bytes=64)
    reads = opened(tmp_path / "reads.fa", header_regex=SHORT, on_mismatch="null", limits=limits)
    wrong = reads.parts[0].sections.meta["mismatches"]  # pyright: ignore
    assert wrong == {"count": 102, "examples": ["odd", "strange", "odd0", "odd1", "odd2"]}


def test_records_whose_headers_do_not_match_can_be_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "reads.fa").write_bytes(HEADED)
    reads = opened(tmp_path / "reads.fa", header_regex=SHORT, on_mismatch="skip")
    message = capsys.readouterr().err
    assert "odd; strange" in message
    assert [read.name for read in reads] == ["lbl|1|5|x", "lbl|2|5|y"]
    assert reads.column("class_id").to_pylist() == [1, 2]
    assert reads.find("odd") == [] and reads.find("lbl|2|5|y") == [1]


def test_records_whose_headers_do_not_match_can_be_kept_without_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "reads.fa").write_bytes(HEADED)
    reads = opened(tmp_path / "reads.fa", header_regex=SHORT, on_mismatch="null")
    assert "odd; strange" in capsys.readouterr().err
    assert reads.column("class_id").to_pylist() == [1, None, 2, None]
    assert reads.column("who").to_pylist() == ["x", None, "y", None]
    assert [read.columns["tax_id"] for read in reads] == [5, None, 5, None]


def test_every_record_may_be_skipped(tmp_path: Path):
    (tmp_path / "reads.fa").write_bytes(b">odd\nAC\n>strange\nAC\n")
    reads = opened(tmp_path / "reads.fa", header_regex=SHORT, on_mismatch="skip")
    assert len(reads) == 0 and reads.column("class_id").to_pylist() == [] and reads.fetch([]).sequences() == []


def test_no_header_needs_to_match(tmp_path: Path):
    (tmp_path / "reads.fa").write_bytes(b">odd\nAC\n>strange\nAC\n")
    reads = opened(tmp_path / "reads.fa", header_regex=SHORT, on_mismatch="null")
    assert reads.table.to_pydict() == {
        "length": [2, 2],
        "class_id": [None, None],
        "tax_id": [None, None],
        "who": [None, None],
    }


def test_a_regex_that_matches_further_on_in_a_header_is_named_with_the_remedy(tmp_path: Path):
    (tmp_path / "reads.fa").write_text(">x tax=7\nACGT\n")
    for regex, is_within in ((r"tax=(?P<tax>\d+)", True), (r"taxon=(?P<tax>\d+)", False), (r"^tax=(?P<t>\d+)", False)):
        with pytest.raises(BadSource) as caught:
            ms.open(tmp_path / "reads.fa", header_regex=regex)
        assert (f".*?{regex}" in str(caught.value)) == is_within
    assert ms.open(tmp_path / "reads.fa", header_regex=r".*?tax=(?P<tax>\d+)").column("tax").to_pylist() == [7]


def test_an_unknown_on_mismatch_is_refused(tmp_path: Path):
    (tmp_path / "reads.fa").write_bytes(HEADED)
    with pytest.raises(ValueError, match="on_mismatch"):
        ms.open(tmp_path / "reads.fa", header_regex=SHORT, on_mismatch="ignore")  # pyright: ignore


def test_columns_without_a_group_in_the_regex_are_refused(plain: Path):
    with pytest.raises(BadSource, match=r"colour.*class_id, tax_id, len, who, mate"):
        ms.open(plain, header_regex=REGEX, columns=["colour"])


def test_columns_without_a_regex_are_refused(plain: Path):
    with pytest.raises(BadSource, match="columns class_id: "):
        ms.open(plain, columns=["class_id"])


def test_a_number_above_int64_is_refused_with_file_and_header(tmp_path: Path):
    (tmp_path / "reads.fa").write_bytes(b">n9223372036854775808\nAC\n")
    message = refused(tmp_path / "reads.fa", header_regex=r"n(?P<number>\d+)")
    assert "n9223372036854775808" in message and "9223372036854775807" in message


def test_class_ids_missing_from_the_mapping_are_named(tmp_path: Path):
    (tmp_path / "reads.fa").write_bytes(HEADED)
    with pytest.raises(BadSource, match=r"reads\.fa: 1 class_id .*: 2\."):
        ms.open(tmp_path / "reads.fa", header_regex=SHORT, on_mismatch="skip", mapping={1: "one", 3: "three"})


def test_a_read_without_a_class_id_needs_no_label(tmp_path: Path):
    ids = [10**15, 10**15 + 10**9, None] * 7000
    text = b"".join(b">c%s\nAC\n" % (str(number).encode() if number else b"") for number in ids)
    (tmp_path / "reads.fa").write_bytes(text)
    reads = opened(
        tmp_path / "reads.fa",
        header_regex=r"c(?P<class_id>\d*)",
        mapping={10**15: "one", 10**15 + 10**9: "two"},
    )
    assert reads.column("label").to_pylist() == [0, 1, None] * 7000
    assert reads.fetch([0, 1, 2], ["label_name"]).columns["label_name"] == ["one", "two", None]


def test_a_mapping_for_a_missing_column_is_refused(plain: Path):
    with pytest.raises(BadSource, match="no column 'class_id'"):
        ms.open(plain, mapping={1: "one"})


def test_a_mapping_by_numbers_for_a_column_of_text_is_refused(plain: Path):
    with pytest.raises(BadSource, match="class_id"):
        ms.open(plain, header_regex=r"lbl\|\d\|.*\|(?P<class_id>r[^/]+)", mapping={1: "one"})


def test_files_with_different_columns_cannot_be_one_collection(tmp_path: Path):
    for name, regex in (("a.fa", r"(?P<one>\w+)"), ("b.fa", r"(?P<two>\w+)")):
        (tmp_path / name).write_bytes(b">x\nAC\n")
        opened(tmp_path / name, header_regex=regex)
    with pytest.raises(BadSource, match=r"b\.fa .* two, .*a\.fa .* one"):
        ms.open(tmp_path)


# -- where the index is written


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_the_index_of_a_file_in_a_read_only_folder_goes_into_the_cache(
    code: int, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    real, folder = tempfile.TemporaryFile, plain.parent
    (tmp_path / "cache").mkdir()

    def refuse(*args: Any, **options: Any) -> Any:
        if Path(options["dir"]) == folder:
            raise OSError(code, os.strerror(code), str(folder))
        return real(*args, **options)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    reads = opened(plain)
    assert str(tmp_path / "cache") in capsys.readouterr().err
    assert holds(reads, MADE) and not index_of(plain).exists()
    (found,) = (tmp_path / "cache" / "millstream").iterdir()
    before = found.stat().st_ino
    assert holds(opened(plain), MADE) and found.stat().st_ino == before


def test_index_dir_receives_the_index_and_the_folder_stays_clean(plain: Path, tmp_path: Path):
    place = tmp_path / "indexes" / "of reads"
    assert holds(opened(plain, index_dir=place), MADE)
    (found,) = place.iterdir()
    before = found.stat().st_ino
    assert holds(opened(plain, index_dir=place), MADE) and found.stat().st_ino == before
    assert not index_of(plain).exists()


def test_files_of_one_name_in_two_folders_share_an_index_dir(tmp_path: Path):
    for folder, text in (("a", b">a\nAC\n"), ("b", b">b\nGGG\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "reads.fa").write_bytes(text)
    files = [tmp_path / folder / "reads.fa" for folder in "ab"]
    for _ in range(2):
        assert texts(opened(files, index_dir=tmp_path / "indexes")) == ["AC", "GGG"]


def test_threads_can_index_the_same_file_concurrently(plain: Path, monkeypatch: pytest.MonkeyPatch):
    real, together = os.fsync, threading.Barrier(2)

    def wait(fd: int) -> None:
        real(fd)
        if threading.current_thread() is not threading.main_thread() and not together.broken:
            together.wait(PATIENCE_S)

    monkeypatch.setattr(os, "fsync", wait)
    results: list[object] = []

    def work() -> None:
        try:
            results.append(build_index(plain, IndexSettings()))
        except BaseException as error:
            together.abort()
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [index_of(plain)] * 2
    assert holds(opened(plain), MADE) and sorted(os.listdir(plain.parent)) == ["reads.fa", "reads.fa.millstream"]
