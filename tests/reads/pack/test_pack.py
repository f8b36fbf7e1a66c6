"""Packing reads: records come back exactly, bytes too if lines are regular; a killed run resumes; damage is noticed."""

import gzip
import io
import multiprocessing
import os
import resource
import signal
import threading
import time
import traceback
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from millstream.core import outputs as resumable
from millstream.core.memory import file_bytes
from millstream.errors import BadIndex, BadSource, ConfigMismatch, StoreExists, StoreFull
from millstream.reads.files.index import IndexLimits, IndexSettings
from millstream.reads.files.names import name_of
from millstream.reads.open import open_reads
from millstream.reads.pack import PackFile, is_pack
from millstream.reads.pack.pack import PackSummary, pack
from millstream.reads.pack.unpack import unpack
from support.effort import num_examples
from support.read_files import bgzf, change_meta, fasta_texts, fastq_texts, frames, parse

MEMORY = 1 << 30
REGEX = r"r(?P<number>\d+) (?P<kind>\w+)"


def packed(folder: Path, *texts: bytes, wrap=lambda text: text, buffer_bytes=1 << 20, **arguments) -> PackFile:
    sources = []
    for number, text in enumerate(texts):
        sources.append(folder / f"source{number}")
        sources[-1].write_bytes(wrap(text))
    arguments.setdefault("limits", IndexLimits(buffer_bytes=buffer_bytes))
    pack(sources, folder / "out.pack", rebuild=True, **arguments)
    return PackFile(folder / "out.pack", memory=MEMORY)


def unpacked(file: PackFile, **arguments) -> bytes:
    out = io.BytesIO()
    unpack(file.path, out, **arguments)
    return out.getvalue()


def everything(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int64)


def reads_of(file: PackFile, rows=None) -> list[tuple[str, bytes, bytes | None]]:
    rows = everything(file.records) if rows is None else np.asarray(rows, np.int64)
    fetched = file.fetch(rows, ["sequence", "quality", "name"])
    names = fetched.columns["name"].to_pylist()
    spans = list(zip(fetched.offsets[:-1], fetched.offsets[1:], strict=True))
    qualities = fetched.quality
    return [
        (name, fetched.flat[a:b].tobytes(), None if qualities is None else qualities[a:b].tobytes())
        for name, (a, b) in zip(names, spans, strict=True)
    ]


WRAPS = {
    "plain": bytes,
    "gzip": gzip.compress,
    "bgzf": partial(bgzf, size=50),
    "zstd": partial(frames, size=60),
}

# -- any text


def reads_in(text: bytes) -> list[tuple[str, bytes, bytes | None]]:
    """The reads of a text as the slow parser finds them."""
    return [(name_of(each.header).decode(errors="replace"), each.sequence, each.quality) for each in parse(text)]


@pytest.mark.parametrize("buffer_bytes", [48, 1 << 12])
@pytest.mark.parametrize("format", ["fasta", "fastq"])
def test_records_of_any_text_come_back_and_the_bytes_where_pack_says_so(tmp_path_factory, format, buffer_bytes):
    folder = tmp_path_factory.mktemp("any")

    @settings(max_examples=num_examples(40), deadline=None, suppress_health_check=list(HealthCheck))
    @given(fasta_texts() if format == "fasta" else fastq_texts(), st.sampled_from(sorted(WRAPS)))
    @example(b"@a\n\n+\n\n", "plain") if format == "fastq" else example(b">", "plain")
    def check(text: bytes, kind: str) -> None:
        file = packed(folder, text, wrap=WRAPS[kind], buffer_bytes=buffer_bytes)
        again = unpacked(file)
        assert reads_of(file) == reads_in(text)
        assert parse(again) == parse(text)
        assert again == text or not file.is_exact

    check()


def test_several_files_come_back_as_their_concatenation(tmp_path):
    texts = [b">a\nACGT\nAC\n", b">b\nAC\n", b">c\nACGTN\n"]
    file = packed(tmp_path, *texts[:2])
    assert file.is_exact and unpacked(file) == b"".join(texts[:2])
    file = packed(tmp_path, *texts)  # of other line widths
    assert not file.is_exact and unpacked(file) == b">a\nACGTAC\n>b\nAC\n>c\nACGTN\n"
    file = packed(tmp_path, b">a\nACGT", b">b\nAC\n")
    assert unpacked(file) == b">a\nACGT\n>b\nAC\n"


@st.composite
def regular(draw) -> bytes:
    """A text in a regular layout of any kind."""
    eol, width, is_fastq, repeats = (
        draw(st.sampled_from(values)) for values in ((b"\n", b"\r\n"), (0, 0, 1, 7), (False, True), (False, True))
    )

    def lines(data: bytes) -> bytes:
        step = width or len(data) or 1
        rows = [data[start : start + step] for start in range(0, len(data), step)] or [b""] * is_fastq
        return b"".join(row + eol for row in rows)

    text = b""
    for _ in range(draw(st.integers(1, 6))):
        header = draw(st.text(st.sampled_from("ab1 |/;+"), max_size=9)).encode()
        data = draw(st.text(st.sampled_from("ACGTACGTacgtNnRY"), max_size=30)).encode()
        text += (b"@" if is_fastq else b">") + header + eol + lines(data)
        if is_fastq:
            qualities = draw(st.binary(min_size=len(data), max_size=len(data)))
            qualities = bytes(33 + byte % 94 for byte in qualities)
            text += b"+" + header * repeats + eol + lines(qualities)
    return text[: -len(eol)] if draw(st.booleans()) else text


@pytest.mark.parametrize("buffer_bytes", [48, 1 << 12])
def test_bytes_of_a_regular_layout_come_back(tmp_path_factory, buffer_bytes):
    folder = tmp_path_factory.mktemp("regular")

    @settings(max_examples=num_examples(80), deadline=None, suppress_health_check=list(HealthCheck))
    @given(regular(), st.integers(1, 40), st.booleans())
    @example(b">a\nAC\n>b\nACGT\nACG\n>c\nACGT\n", 3, False)  # the width is known from the second record on
    @example(b"@a\n\n+\n", 1, False)
    @example(b">a\n>b", 1, False)
    def check(text: bytes, window: int, salvage: bool) -> None:
        file = packed(folder, text, buffer_bytes=buffer_bytes, settings=IndexSettings(salvage=salvage))
        assert (file.fidelity, unpacked(file, window_bases=window)) == ("bytes exact", text)

    check()


IRREGULAR = {
    "a blank line": (b">a\nACGT\n>b\nAC\n\n>c\nA\n", 1),
    "a comment": (b"; c\n>a\nACGT\n", 0),
    "two line ends": (b">a\nACGT\n>b\nAC\n>c\r\nA\r\n", 2),
    "two widths": (b">a\nACG\nA\n>b\nAC\nAC\n", 1),
    "a line too long": (b">a\nACG\nA\n>b\nACGT\n", 1),
    "a line as long as an earlier one, wrapped": (b">a\nACGTA\n>b\nACG\nA\n", 1),
    "a space among bases": (b">a\nAC GT\n", 0),
    "blank lines and a comment longer than a buffer": (b">a\nA\n>b\nAC\n;" + b"x" * 300 + b"\n" * 400 + b">c\nA\n", 1),
    "a last line without its newline, but a return": (b">a\r\nAC\r\n>b\r\nA\r", 1),
    "'+' with the header and without": (b"@a\nA\n+a\nI\n@b\nA\n+\nI\n", 1),
    "'+' with another header": (b"@a\nA\n+b\nI\n", 0),
    "an empty line for a FASTA record without bases": (b">a\nA\n>b\n\n>c\nA\n", 1),
}


@pytest.mark.parametrize("buffer_bytes", [48, 1 << 12])
@pytest.mark.parametrize("what", IRREGULAR)
def test_irregular_text_is_reported_with_its_first_record(tmp_path, what, buffer_bytes):
    text, record = IRREGULAR[what]
    file = packed(tmp_path, text, buffer_bytes=buffer_bytes)
    assert not file.is_exact and f"irregular, first at record {record}" in file.fidelity
    assert parse(unpacked(file)) == parse(text)
    assert b"\r" not in unpacked(file) and unpacked(file).endswith(b"\n")


def test_pack_reports_what_is_left_out(tmp_path):
    text = b"@r1 a\nAC\n+\nII\n@odd\nA\n+\nI\n"
    skip = IndexSettings(header_regex=REGEX, on_mismatch="skip")
    for expected, arguments in {
        "bytes exact": {},
        "without names": {"names": False},
        "without base qualities": {"quality": False},
        "without the 1 that": {"settings": skip},
    }.items():
        file = packed(tmp_path, text, **arguments)
        assert expected in file.fidelity and file.is_exact == (not arguments)


def test_formats_are_not_mixed(tmp_path):
    with pytest.raises(BadSource, match=r"source1: .*fastq.* fasta"):
        packed(tmp_path, b">a\nA\n", b"@a\nA\n+\nI\n")


@pytest.fixture
def varied() -> bytes:
    """Records of many kinds: masked, with N, long, short, empty."""
    rng = np.random.default_rng(5)
    out = []
    for number in range(300):
        data = rng.choice(list(b"ACGT"), int(rng.integers(0, 200)) if number % 50 else 9000).astype(np.uint8)
        if number % 7 == 0:
            data[len(data) // 3 : len(data) // 2] = ord("N")
        if number % 5 == 0:
            data[len(data) // 4 : len(data) // 2] |= 32
        text = data.tobytes()
        lines = b"".join(text[i : i + 60] + b"\n" for i in range(0, len(text), 60))
        out.append(b">r%d %s\n%s" % (number, rng.choice([b"virus", b"host"]), lines))
    return b"".join(out)


def test_random_rows_and_regions_are_those_of_the_plain_file(tmp_path, varied):
    file = packed(tmp_path, varied)
    expected = reads_in(varied)
    rows = np.random.default_rng(0).integers(0, 300, 500)
    assert reads_of(file, rows) == [expected[row] for row in rows.tolist()]
    for row in rows[:100].tolist():
        length = len(expected[row][1])
        start, end = sorted(np.random.default_rng(row).integers(0, length + 1, 2).tolist())
        assert file.region(row, start, end).tobytes() == expected[row][1][start:end]
    assert file.lengths(everything(300)).tolist() == [len(data) for _, data, _ in expected]
    assert reads_of(file, []) == []


def test_header_columns_are_those_of_the_index(tmp_path, varied):
    chosen = IndexSettings(header_regex=REGEX)
    file = packed(tmp_path, varied, settings=chosen)
    (tmp_path / "plain").write_bytes(varied)
    reads = open_reads([tmp_path / "plain"], settings=chosen)
    assert file.columns.names == reads.column_names == ["number", "kind"]
    for name in file.columns.names:
        assert file.column(name, everything(300)).to_pylist() == reads.column(name).to_pylist()
    assert file.columns.is_indexed("kind")
    assert file.columns.distinct("kind") is None


def test_a_column_kept_only_in_headers_is_read_from_them_in_any_order(tmp_path):
    text = b"".join(b">r%d x\nACGT\n" % number for number in range(70_000))
    file = packed(tmp_path, text, settings=IndexSettings(header_regex=r"(?P<word>r\w+)"))
    assert not file.columns.is_indexed("word")
    rows = np.array([69_999, 3, 40_000, 3], np.int64)
    assert file.column("word", rows).to_pylist() == ["r69999", "r3", "r40000", "r3"]
    messages: list[str] = []
    without = packed(
        tmp_path, text, settings=IndexSettings(header_regex=r"(?P<word>r\w+)"), names=False, notify=messages.append
    )
    assert without.columns.names == []
    assert "'word'" in messages[0]


def test_records_that_do_not_match_the_regex_are_refused_skipped_or_kept(tmp_path):
    text = b">r1 a\nAC\nGT\n>odd\nTT\nNN\nN\n>r2 b\nGG\n"
    with pytest.raises(BadSource, match="1 of the first 3 headers"):
        packed(tmp_path, text, settings=IndexSettings(header_regex=REGEX))
    assert not list(tmp_path.glob("*.partial"))
    skipped = packed(tmp_path, text, settings=IndexSettings(header_regex=REGEX, on_mismatch="skip"))
    assert [name for name, *_ in reads_of(skipped)] == ["r1", "r2"]
    assert unpacked(skipped) == b">r1 a\nAC\nGT\n>r2 b\nGG\n"
    kept = packed(tmp_path, text, settings=IndexSettings(header_regex=REGEX, on_mismatch="null"))
    assert kept.column("number", everything(3)).to_pylist() == [1, None, 2]
    assert unpacked(kept) == text


@settings(max_examples=num_examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.sampled_from(["fasta", "fastq"]))
def test_skipped_records_leave_no_bases_behind(tmp_path_factory, fits, format):
    folder = tmp_path_factory.mktemp("skip")
    records, kept = [], []
    for number, fit in enumerate(fits):
        data = b"ACGTNacgt"[: number % 9 + 1] * 5
        name = b"r%d x" % number if fit else b"odd"
        body = b">" + name + b"\n" + data + b"\n"
        if format == "fastq":
            body = b"@" + name + b"\n" + data + b"\n+\n" + b"I" * len(data) + b"\n"
        records.append(body)
        if fit:
            kept.append(body)
    chosen = IndexSettings(header_regex=REGEX, on_mismatch="skip")
    file = packed(folder, b"".join(records), settings=chosen, buffer_bytes=64)
    assert unpacked(file) == b"".join(kept)


def test_without_names_headers_are_record_numbers(tmp_path, varied):
    file = packed(tmp_path, varied, names=False)
    assert file.has_names
    assert file.names_of(np.array([0, 299])) == ["0", "299"]
    assert (file.find("17"), file.find("300"), file.find("017"), file.find("r1")) == ([17], [], [], [])
    assert unpacked(file).startswith(b">0\n")
    assert unpacked(file).count(b"\n") == varied.count(b"\n")


def test_without_quality_a_fastq_file_unpacks_as_fasta(tmp_path):
    file = packed(tmp_path, b"@a\r\nACGT\r\n+a\r\nIIII\r\n@b\nGG\n+\nII", quality=False)
    assert not file.has_quality
    assert unpacked(file) == b">a\nACGT\n>b\nGG\n"


def test_a_read_is_found_by_its_name(tmp_path):
    file = packed(tmp_path, b">a x\nA\n>b\nC\n>a y\nG\n")
    assert file.has_names
    assert (file.find("a"), file.find("b"), file.find("c")) == ([0, 2], [1], [])


def test_a_table_of_many_names_is_built_on_request(tmp_path, capsys):
    few = IndexLimits(names=2)
    file = packed(tmp_path, b">a x\nA\n>b\nC\n>a y\nG\n", limits=few)
    assert not file.has_names
    again = file.with_names()
    assert (again.find("a"), again.find("b")) == ([0, 2], [1])
    assert PackFile(file.path, memory=MEMORY).has_names
    other = packed(tmp_path, b">q x\nA\n>b\nC\n>a y\nG\n>a\nA\n", limits=few)
    assert not other.has_names  # the table beside it is of another file
    large = packed(tmp_path, b">a x\nA\n>b\nC\n>a y\nG\n", settings=IndexSettings(names=True), limits=few)
    assert "names.tags" in large.sections


def test_binned_qualities_take_two_bits_per_base(tmp_path):
    rng = np.random.default_rng(0)
    qualities = rng.choice(list(b"F:,#"), 200_000).astype(np.uint8)
    data = rng.choice(list(b"ACGT"), 200_000).astype(np.uint8)
    rows = [slice(i, i + 100) for i in range(0, 200_000, 100)]
    text = b"".join(b"@r\n" + data[r].tobytes() + b"\n+\n" + qualities[r].tobytes() + b"\n" for r in rows)
    file = packed(tmp_path, text)
    assert file.path.stat().st_size < 200_000 * 4 / 8 + 12_000
    assert reads_of(file, [1999, 7])[0][1:] == (data[rows[1999]].tobytes(), qualities[rows[1999]].tobytes())
    assert unpacked(file) == text


# -- damage and interruption


@pytest.mark.parametrize("format", ["fasta", "fastq"])
def test_a_cut_source_is_refused_or_packed_up_to_the_last_whole_record(tmp_path, format):
    limits = IndexLimits(buffer_bytes=1 << 10)
    rng = np.random.default_rng(3)
    records = []
    for number in range(400):
        data = rng.choice(list(b"ACGTN"), 90).astype(np.uint8).tobytes()
        tail = b"\n+\n" + bytes(rng.integers(35, 70, 90).astype(np.uint8)) if format == "fastq" else b""
        records.append((b"@" if format == "fastq" else b">") + b"r%d\n" % number + data + tail + b"\n")
    whole = gzip.compress(b"".join(records))
    for cut in (*range(len(whole) // 3, len(whole), len(whole) // 10), len(whole) - 20):
        with pytest.raises(BadSource, match="ends"):
            packed(tmp_path, b"".join(records), wrap=lambda _, cut=cut: whole[:cut], limits=limits)
        messages: list[str] = []
        file = packed(
            tmp_path, b"", wrap=lambda _, cut=cut: whole[:cut], limits=limits, notify=messages.append,
            settings=IndexSettings(salvage=True, unverified=True),
        )  # fmt: skip
        assert "Packed the records before it" in messages[0]
        assert 0 < file.records < 400
        assert unpacked(file) == b"".join(records[: file.records])
        assert file.records >= 400 * (cut - 2000) // len(whole)


@pytest.mark.parametrize("format", ["fasta", "fastq"])
def test_only_the_records_that_checksums_verify_are_packed_of_a_damaged_source(tmp_path, format):
    one = b"@r%d\nACGT\n+\nIIII\n" if format == "fastq" else b">r%d\nACGT\n"
    texts = [b"".join(one % number for number in range(at, at + 5)) for at in (0, 5)]
    first, second = map(gzip.compress, texts)
    settings, messages = IndexSettings(salvage=True), list[str]()
    damaged = first + second[:-6] + bytes([second[-6] ^ 1]) + second[-5:]
    file = packed(tmp_path, b"", wrap=lambda _: damaged, settings=settings, notify=messages.append)
    # The last FASTA record may continue in the damaged member.
    assert unpacked(file) == (texts[0] if format == "fastq" else texts[0].rsplit(b">", 1)[0])
    assert f"{len(texts[1])} bytes" in messages[0]


@pytest.mark.parametrize("end", ["@r2", "@r2\nAC", "@r2\nACGT\n", "@r2\nACGT\n+", "@r2\nACGT\n+\nII"])
def test_plain_fastq_that_ends_in_the_middle_of_a_record_is_packed_up_to_it(tmp_path, end):
    whole = b"@r0\nACGT\n+\nIIII\n@r1\nGG\n+\nII\n"
    with pytest.raises(BadSource, match="record 2"):
        packed(tmp_path, whole + end.encode())
    messages: list[str] = []
    file = packed(tmp_path, whole + end.encode(), settings=IndexSettings(salvage=True), notify=messages.append)
    assert unpacked(file) == whole
    assert "record 2" in messages[0]


def test_bgzf_followed_by_ordinary_gzip_is_packed(tmp_path):
    text = b">a\nACGT\n" * 100
    file = packed(tmp_path, text, wrap=lambda text: bgzf(text, end=False) + gzip.compress(b">z\nGG\n"))
    assert unpacked(file) == text + b">z\nGG\n"


def big(count: int) -> bytes:
    rng = np.random.default_rng(1)
    out = []
    for number in range(count):
        data = rng.choice(list(b"ACGTACGTACGTNa"), int(rng.integers(50, 400))).astype(np.uint8).tobytes()
        qualities = bytes(rng.integers(35, 70, len(data)).astype(np.uint8))
        out.append(b"@r%d x%d\n%s\n+\n%s\n" % (number, number % 9, data, qualities))
    return b"".join(out)


def start_child(*paths: Path, most_bytes: int | None = None) -> BaseProcess:
    """Pack in a fork, which has imported and compiled all already; what it raises is in `errors` beside the output."""
    *sources, out = paths

    def work() -> None:
        if most_bytes:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
        try:
            chosen = IndexSettings(header_regex=r"(?P<name>r\d+) x(?P<kind>\d)")
            pack(sources, out, settings=chosen, limits=IndexLimits(buffer_bytes=1 << 13), commit_s=0.0)
        except BaseException:
            out.with_name("errors").write_text(traceback.format_exc())
            raise

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    return child


def wait_for(child: BaseProcess) -> int | None:
    child.join()
    return child.exitcode


def test_a_run_killed_at_any_instant_resumes_and_gives_the_same_bytes(tmp_path):
    sources = [tmp_path / "a.fq", tmp_path / "b.fq"]
    sources[0].write_bytes(gzip.compress(big(1200)))
    sources[1].write_bytes(gzip.compress(big(600)))
    whole, out, folder = tmp_path / "whole.pack", tmp_path / "out.pack", tmp_path / "out.pack.partial"
    assert wait_for(start_child(*sources, whole)) == 0
    kills, code = 0, None
    while not kills:  # a run that was over before it could be killed shows nothing
        out.unlink(missing_ok=True)
        child = start_child(*sources, out)
        while child.is_alive() and not (folder / "journal.json").exists():
            time.sleep(0.001)
        for attempt in range(100):
            child.join(0.02 * 1.5**attempt)
            child.kill()
            code = wait_for(child)
            assert code in (0, -signal.SIGKILL), (tmp_path / "errors").read_text()
            if code == 0:
                break
            kills += 1
            assert not out.exists() or not folder.exists() or is_pack(out)
            child = start_child(*sources, out)
    assert code == 0
    assert out.read_bytes() == whole.read_bytes()
    assert not folder.exists()
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def pack_often(sources: list[Path], out: Path, *, buffer_bytes: int = 1 << 11, **arguments) -> PackSummary:
    """Pack, committing at every buffer."""
    return pack(sources, out, limits=IndexLimits(buffer_bytes=buffer_bytes), commit_s=0.0, **arguments)


def stop_after(commits: int, monkeypatch, sources: list[Path], out: Path, **arguments) -> None:
    """A run that stops after so many commits."""
    commit, left = resumable.PartialOutput.commit, commits

    def stop(*given):
        nonlocal left
        commit(*given)
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(resumable.PartialOutput, "commit", stop)
        with pytest.raises(KeyboardInterrupt):
            pack_often(sources, out, **arguments)


@pytest.mark.parametrize("odd", [b"", b"\n\n"])
@pytest.mark.parametrize("wrap", ["plain", "bgzf"])
@pytest.mark.parametrize("salvage", [False, True])
def test_a_run_stopped_after_any_commit_resumes_and_gives_the_same_bytes(tmp_path, monkeypatch, wrap, salvage, odd):
    for name, text in (("a", big(40)), ("b", big(30) + odd + big(10))):
        (tmp_path / name).write_bytes(WRAPS[wrap](text))
    sources, chosen = [tmp_path / "a", tmp_path / "b"], IndexSettings(header_regex=r"r(?P<n>\d+)", salvage=salvage)
    whole = pack(sources, tmp_path / "whole", settings=chosen, limits=IndexLimits(buffer_bytes=1 << 11))
    assert whole.is_exact != bool(odd)
    for commits in (1, 5, 9, 15):
        out = tmp_path / f"out{commits}"
        stop_after(commits, monkeypatch, sources, out, settings=chosen)
        pack_often(sources, out, settings=chosen)
        assert out.read_bytes() == (tmp_path / "whole").read_bytes()


def interrupted(folder: Path, monkeypatch) -> Path:
    """A run that stopped after its first commit."""
    (folder / "a.fa").write_bytes(b"".join(b">r%d\nACGTN\n" % n for n in range(500)))
    stop_after(1, monkeypatch, [folder / "a.fa"], folder / "out", buffer_bytes=1 << 10)
    return folder / "a.fa"


def test_resuming_with_another_source_or_other_settings_is_refused(tmp_path, monkeypatch):
    source = interrupted(tmp_path, monkeypatch)
    with pytest.raises(ConfigMismatch, match=r"names: True -> False.*--rebuild"):
        pack([source], tmp_path / "out", names=False)
    source.write_bytes(b">other\nA\n")
    with pytest.raises(ConfigMismatch, match=r"source 0 a.fa.*size.*--rebuild"):
        pack([source], tmp_path / "out")
    assert pack([source], tmp_path / "out", rebuild=True).records == 1


def test_two_concurrent_runs_are_refused(tmp_path, monkeypatch):
    source = interrupted(tmp_path, monkeypatch)
    with (
        resumable.PartialOutput(tmp_path / "out", {}, rebuild=True),
        pytest.raises(StoreExists, match="another process"),
    ):
        pack([source], tmp_path / "out")


def test_progress_that_lost_bytes_is_noticed_and_not_used(tmp_path, monkeypatch, capsys):
    source = interrupted(tmp_path, monkeypatch)
    os.truncate(tmp_path / "out.partial" / "2bit", 8)
    pack([source], tmp_path / "out")
    assert "2bit: 8 bytes" in capsys.readouterr().err
    pack([source], tmp_path / "whole")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()
    assert pack([source], tmp_path / "out").records == 500


def test_a_finished_pack_is_not_packed_again_and_other_files_are_not_replaced(tmp_path):
    source, out = tmp_path / "a.fa", tmp_path / "out.pack"
    source.write_bytes(b">a\nACGT\n")
    first = pack([source], out)
    messages: list[str] = []
    assert pack([source], out, notify=messages.append) == first
    assert "already packed" in messages[0]
    with pytest.raises(StoreExists, match=r"other settings.*--rebuild"):
        pack([source], out, names=False)
    source.write_bytes(b">a\nACGTA\n")
    with pytest.raises(StoreExists, match="size 8 -> 9"):
        pack([source], out)
    (tmp_path / "text").write_text("mine")
    with pytest.raises(StoreExists, match="text: already exists"):
        pack([source], tmp_path / "text")
    assert (tmp_path / "text").read_text() == "mine"


def test_a_full_disk_gives_advice_and_keeps_the_progress(tmp_path):
    (tmp_path / "a.fq").write_bytes(big(1200))
    assert wait_for(start_child(tmp_path / "a.fq", tmp_path / "out", most_bytes=80_000)) == 1
    message = (tmp_path / "errors").read_text()
    assert StoreFull.__name__ in message and "run the same command again" in message
    assert not (tmp_path / "out").exists()
    assert wait_for(start_child(tmp_path / "a.fq", tmp_path / "out")) == 0
    assert wait_for(start_child(tmp_path / "a.fq", tmp_path / "whole")) == 0
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_flipped_bit_anywhere_is_noticed(tmp_path, varied):
    file = packed(tmp_path, varied)
    good, expected = file.path.read_bytes(), reads_of(file)
    for place in np.random.default_rng(2).integers(0, len(good), 60).tolist():
        bad = bytearray(good)
        bad[place] ^= 4
        file.path.write_bytes(bad)
        try:
            assert reads_of(PackFile(file.path, memory=MEMORY)) == expected
        except BadIndex:
            continue


def test_packs_are_distinguished_from_other_files(tmp_path):
    file = packed(tmp_path, b">a\nA\n")
    open_reads([tmp_path / "source0"])
    assert is_pack(file.path)
    assert not is_pack(tmp_path / "source0")
    assert not is_pack(tmp_path / "source0.millstream")
    assert not is_pack(tmp_path)
    with pytest.raises(BadIndex, match="index of reads"):
        PackFile(tmp_path / "source0.millstream", memory=MEMORY)
    file.path.write_bytes(file.path.read_bytes()[:-9])
    assert is_pack(file.path)
    with pytest.raises(BadIndex, match="Pack it again"):
        PackFile(file.path, memory=MEMORY)


# -- memory, threads, forks


def test_mapped_pages_stay_within_the_budget(tmp_path):
    rng = np.random.default_rng(0)
    data = rng.choice(list(b"ACGT"), 16 << 20).astype(np.uint8)
    text = b"".join(b">r%d\n%s\n" % (i, data[i << 10 : (i + 1) << 10].tobytes()) for i in range(16 << 10))
    file = packed(tmp_path, text)
    small = PackFile(file.path, memory=2 << 20)
    for _ in range(20):
        rows = rng.integers(0, 16 << 10, 64)
        fetched = small.fetch(rows, ["sequence"])
        assert fetched.flat[:1024].tobytes() == data[rows[0] << 10 : (rows[0] + 1) << 10].tobytes()
        assert small.held_bytes <= 2 << 20


def test_threads_and_forks_share_a_file(tmp_path, varied):
    file = packed(tmp_path, varied)
    expected = reads_of(file)
    wrong: list[object] = []

    def work(seed: int) -> None:
        rows = np.random.default_rng(seed).integers(0, 300, 200)
        if reads_of(file, rows) != [expected[row] for row in rows.tolist()]:
            wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    child = os.fork()
    if child == 0:
        os._exit(0 if reads_of(file) == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_record_longer_than_every_buffer_takes_no_more_memory(tmp_path):
    rng = np.random.default_rng(0)
    data = rng.choice(list(b"ACGTacgtN"), 100_000).astype(np.uint8).tobytes()
    lines = b"".join(data[i : i + 61] + b"\n" for i in range(0, len(data), 61))
    text = b">chr1 long\n" + lines + b">chr2\n" + lines[:5000] + b"\n"
    file = packed(tmp_path, text, buffer_bytes=1 << 12)
    assert file.is_exact
    assert unpacked(file, window_bases=1000) == text
    assert file.region(0, 50_000, 50_010).tobytes() == data[50_000:50_010]


def test_a_pack_of_the_previous_version_unpacks_to_its_records(tmp_path):
    file = packed(tmp_path, b">a\r\nAC\r\n>b\r\nG\r\n")
    change_meta(file.path, lambda meta: [meta.pop(key) for key in ("pack_version", "layout", "irregular_record")])
    former = PackFile(file.path, memory=MEMORY)
    assert not former.is_exact and "earlier version" in former.fidelity
    assert unpacked(former) == b">a\nAC\n>b\nG\n"
    change_meta(file.path, lambda meta: meta.update(pack_version=99))
    with pytest.raises(BadIndex, match="99"):
        PackFile(file.path, memory=MEMORY)


def test_few_pages_of_a_pack_larger_than_memory_are_mapped_at_a_time(tmp_path: Path):
    """In random case every other base begins or ends a run: 9 MB of runs, which random order needs all over."""
    bases = np.random.default_rng(0).choice(np.frombuffer(b"ACGTacgt", np.uint8), (100_000, 150))
    source = tmp_path / "a.fa"
    source.write_bytes(b"".join(b">r\n%b\n" % row.tobytes() for row in bases))
    pack([source], tmp_path / "a.pack")
    PackFile(tmp_path / "a.pack", memory=1 << 20).fetch(np.zeros(1, np.int64), ["sequence"])  # compiles
    before = file_bytes()
    file = PackFile(tmp_path / "a.pack", memory=1 << 20)
    for rows in np.random.default_rng(1).permutation(100_000)[:6_000].reshape(3, -1):
        found = file.fetch(rows, ["sequence"])
        assert np.array_equal(found.flat.reshape(-1, 150), bases[rows])
        assert file_bytes() - before < 2_000_000  # 9 MB if they stay mapped
