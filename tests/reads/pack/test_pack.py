"""Packing reads: the round trip is exact, a killed run goes on, what is wrong is said."""

import gzip
import io
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
import zlib
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from millstream.errors import BadIndex, BadSource, ConfigMismatch, StoreExists, StoreFull
from millstream.store import index, journal, pack_file
from millstream.store import pack as pack_module
from millstream.store.index import IndexSettings
from millstream.store.open_reads import open_reads
from millstream.store.pack import pack
from millstream.store.pack_file import PackFile, is_pack, open_pack
from millstream.store.unpack import unpack

MEMORY = 1 << 30
REGEX = r"r(?P<number>\d+) (?P<kind>\w+)"


def packed(folder: Path, *texts: bytes, wrap=lambda text: text, **arguments) -> PackFile:
    sources = []
    for number, text in enumerate(texts):
        sources.append(folder / f"source{number}")
        sources[-1].write_bytes(wrap(text))
    pack(sources, folder / "out.pack", rebuild=True, **arguments)
    return PackFile(folder / "out.pack", memory=MEMORY)


def unpacked(file: PackFile) -> bytes:
    out = io.BytesIO()
    unpack(file.path, out)
    return out.getvalue()


def everything(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int64)


def reads_of(file: PackFile, rows=None) -> list[tuple[str, bytes, bytes | None]]:
    rows = everything(file.records) if rows is None else np.asarray(rows, np.int64)
    fetched = file.fetch(rows, ["sequence", "quality", "name"])
    names = fetched.columns["name"].to_pylist()
    spans = list(zip(fetched.offsets[:-1], fetched.offsets[1:], strict=True))
    grades = fetched.quality
    return [
        (name, fetched.flat[a:b].tobytes(), None if grades is None else grades[a:b].tobytes())
        for name, (a, b) in zip(names, spans, strict=True)
    ]


def bgzf(text: bytes) -> bytes:
    """Small BGZF blocks, made by hand."""
    import struct

    out = b""
    for start in range(0, len(text), 50):
        part = text[start : start + 50]
        deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
        data = deflate.compress(part) + deflate.flush()
        out += b"\x1f\x8b\x08\x04" + bytes(6) + b"\x06\0BC\x02\0" + struct.pack("<H", len(data) + 25) + data
        out += struct.pack("<II", zlib.crc32(part), len(part))
    return out + bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000")


def zstd(text: bytes) -> bytes:
    import zstandard

    compressor = zstandard.ZstdCompressor()
    return b"".join(compressor.compress(text[start : start + 60]) for start in range(0, len(text), 60))


WRAPS = {"plain": lambda text: text, "gzip": lambda text: gzip.compress(text), "bgzf": bgzf, "zstd": zstd}

# -- odd texts

headers = st.text(st.sampled_from("ab1 |/>@;+.\t\r"), max_size=9).map(str.encode)
eols = st.sampled_from([b"\n", b"\n", b"\n", b"\r\n"])
letters = st.text(st.sampled_from("ACGTACGTACGTacgtNnRY-*EL"), max_size=40).map(str.encode)
fillers = st.sampled_from([b"", b"", b"", b"\n", b"\r\n", b"; a comment\n", b" \n", b"\t\n"])


@st.composite
def lines_of(draw, data: bytes, *, may_break: bool = True) -> bytes:
    """Letters over lines: one, equal ones, or anything."""
    eol = draw(eols)
    width = draw(st.sampled_from([0, 0, 1, 5, 7]))
    out = b""
    while data:
        count = (width or len(data)) if draw(st.integers(0, 9)) else draw(st.integers(1, 12))
        part, data = data[:count], data[count:]
        if may_break and not draw(st.integers(0, 12)):
            part = part[:1] + draw(st.sampled_from([b" ", b"  ", b"\t", b"\r"])) + part[1:]
        if part[:1] in b">;@+":
            part = b"A" + part[1:]
        out += part + (eol if draw(st.integers(0, 20)) else draw(eols))
        if may_break and not draw(st.integers(0, 9)):
            out += draw(fillers)
    return out


@st.composite
def fasta(draw) -> bytes:
    text = b"".join(draw(st.lists(fillers, max_size=2)))
    for _ in range(draw(st.integers(1, 5))):
        text += b">" + draw(headers) + draw(eols) + draw(lines_of(draw(letters))) + draw(fillers)
    return text.rstrip(b"\r\n") if not draw(st.integers(0, 3)) else text


@st.composite
def fastq(draw) -> bytes:
    text = b""
    repeats = draw(st.integers(0, 3))
    for _ in range(draw(st.integers(1, 5))):
        header, eol = draw(headers), draw(eols)
        data = draw(st.text(st.sampled_from("ACGTNacgtR"), max_size=30)).encode()
        grades = bytes(draw(st.lists(st.sampled_from(list(b"#:F,@+>I!~")), min_size=len(data), max_size=len(data))))
        plus = header if repeats == 0 else draw(st.sampled_from([b"", b"", header, b"other"]))
        if draw(st.integers(0, 3)) or not data:
            text += b"@" + header + eol + data + eol + b"+" + plus + eol + grades + eol
            continue
        cut = draw(st.integers(1, len(data)))
        text += b"@" + header + eol + data[:cut] + eol + data[cut:] + (eol if data[cut:] else b"") + b"+" + plus + eol
        text += grades[:cut] + eol + grades[cut:] + (eol if grades[cut:] else b"")
    return text.rstrip(b"\r\n") if not draw(st.integers(0, 3)) else text


def plain_reads(folder: Path, text: bytes):
    """The same text by way of the index, or None when it is refused."""
    path = folder / "plain"
    path.write_bytes(text)
    try:
        reads = open_reads([path], rebuild=True, index_dir=folder / "indexes")
    except BadSource:
        return None
    return [(read.name, read.sequence.encode(), read.quality and read.quality.encode()) for read in reads]


@pytest.mark.parametrize("buffer_bytes", [48, 1 << 12])
@pytest.mark.parametrize("format", ["fasta", "fastq"])
def test_any_text_comes_back_byte_for_byte(tmp_path_factory, monkeypatch, format, buffer_bytes):
    monkeypatch.setattr(index, "BUFFER_BYTES", buffer_bytes)
    folder = tmp_path_factory.mktemp("any")

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(fasta() if format == "fasta" else fastq(), st.sampled_from(sorted(WRAPS)))
    @example(b"@a\n\n+\n\n", "plain") if format == "fastq" else example(b">", "plain")
    def check(text: bytes, kind: str) -> None:
        expected = plain_reads(folder, text)
        if expected is None:
            return
        file = packed(folder, text, wrap=WRAPS[kind])
        assert unpacked(file) == text
        found = reads_of(file)
        assert [(name, data, grades or "") for name, data, grades in found] == [
            (name, data, grades or "") for name, data, grades in expected
        ]

    check()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(fasta(), min_size=2, max_size=3))
def test_several_files_come_back_as_their_concatenation(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("several")
    reads = [plain_reads(folder, text) for text in texts]
    if None in reads:
        return
    file = packed(folder, *texts)
    assert unpacked(file) == b"".join(texts)
    assert file.records == sum(map(len, reads))


def test_formats_are_not_mixed(tmp_path):
    with pytest.raises(BadSource, match="fastq, after files of fasta"):
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
    expected = plain_reads(tmp_path, varied)
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
    assert file.column_names == reads.column_names == ["number", "kind"]
    for name in file.column_names:
        assert file.column(name, everything(300)).to_pylist() == reads.column(name).to_pylist()
    assert file.is_indexed("kind")
    assert file.distinct("kind") is None


def test_a_column_kept_only_in_headers_is_read_from_them_in_any_order(tmp_path):
    text = b"".join(b">r%d x\nACGT\n" % number for number in range(70_000))
    file = packed(tmp_path, text, settings=IndexSettings(header_regex=r"(?P<word>r\w+)"))
    assert not file.is_indexed("word")
    rows = np.array([69_999, 3, 40_000, 3], np.int64)
    assert file.column("word", rows).to_pylist() == ["r69999", "r3", "r40000", "r3"]
    said: list[str] = []
    without = packed(
        tmp_path, text, settings=IndexSettings(header_regex=r"(?P<word>r\w+)"), names=False, notify=said.append
    )
    assert without.column_names == []
    assert "'word' has too many distinct values" in said[0]


def test_records_that_do_not_fit_the_regex_are_refused_left_out_or_kept(tmp_path):
    text = b">r1 a\nAC\nGT\n>odd\nTTTT\nNNN\n>r2 b\nGG\n"
    with pytest.raises(BadSource, match="1 of the first 3 headers do not fit"):
        packed(tmp_path, text, settings=IndexSettings(header_regex=REGEX))
    assert not list(tmp_path.glob("*.partial"))
    skipped = packed(tmp_path, text, settings=IndexSettings(header_regex=REGEX, on_mismatch="skip"))
    assert [name for name, *_ in reads_of(skipped)] == ["r1", "r2"]
    assert unpacked(skipped) == b">r1 a\nAC\nGT\n>r2 b\nGG\n"
    kept = packed(tmp_path, text, settings=IndexSettings(header_regex=REGEX, on_mismatch="null"))
    assert kept.column("number", everything(3)).to_pylist() == [1, None, 2]
    assert unpacked(kept) == text


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.sampled_from(["fasta", "fastq"]))
def test_left_out_records_leave_no_letter_behind(tmp_path_factory, fits, format):
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "BUFFER_BYTES", 64)
        chosen = IndexSettings(header_regex=REGEX, on_mismatch="skip")
        file = packed(folder, b"".join(records), settings=chosen)
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


def test_a_table_of_many_names_is_made_when_it_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pack_module, "SMALL", 2)
    file = packed(tmp_path, b">a x\nA\n>b\nC\n>a y\nG\n")
    assert not file.has_names
    again = file.with_names()
    assert (again.find("a"), again.find("b")) == ([0, 2], [1])
    assert PackFile(file.path, memory=MEMORY).has_names
    other = packed(tmp_path, b">q x\nA\n>b\nC\n>a y\nG\n>a\nA\n")
    assert not other.has_names  # the table beside it is of another file
    large = packed(tmp_path, b">a x\nA\n>b\nC\n>a y\nG\n", settings=IndexSettings(names=True))
    assert "names.tags" in large.sections


def test_binned_qualities_take_two_bits_a_base(tmp_path):
    rng = np.random.default_rng(0)
    grades = rng.choice(list(b"F:,#"), 200_000).astype(np.uint8)
    data = rng.choice(list(b"ACGT"), 200_000).astype(np.uint8)
    rows = [slice(i, i + 100) for i in range(0, 200_000, 100)]
    text = b"".join(b"@r\n" + data[r].tobytes() + b"\n+\n" + grades[r].tobytes() + b"\n" for r in rows)
    file = packed(tmp_path, text)
    assert file.path.stat().st_size < 200_000 * 4 / 8 + 12_000
    assert reads_of(file, [1999, 7])[0][1:] == (data[rows[1999]].tobytes(), grades[rows[1999]].tobytes())
    assert unpacked(file) == text


# -- damage and interruption


@pytest.mark.parametrize("format", ["fasta", "fastq"])
def test_a_cut_source_is_refused_or_packed_up_to_the_last_whole_record(tmp_path, format, monkeypatch):
    monkeypatch.setattr(index, "BUFFER_BYTES", 1 << 10)
    rng = np.random.default_rng(3)
    records = []
    for number in range(400):
        data = rng.choice(list(b"ACGTN"), 90).astype(np.uint8).tobytes()
        tail = b"\n+\n" + bytes(rng.integers(35, 70, 90).astype(np.uint8)) if format == "fastq" else b""
        records.append((b"@" if format == "fastq" else b">") + b"r%d\n" % number + data + tail + b"\n")
    whole = gzip.compress(b"".join(records))
    for cut in (*range(len(whole) // 3, len(whole), len(whole) // 20), len(whole) - 20):
        with pytest.raises(BadSource, match="ends"):
            packed(tmp_path, b"".join(records), wrap=lambda _, cut=cut: whole[:cut])
        said: list[str] = []
        file = packed(
            tmp_path, b"", wrap=lambda _, cut=cut: whole[:cut], settings=IndexSettings(salvage=True), notify=said.append
        )
        assert "Packed what comes before" in said[0]
        assert 0 < file.records < 400
        assert unpacked(file) == b"".join(records[: file.records])
        assert file.records >= 400 * (cut - 2000) // len(whole)


@pytest.mark.parametrize("end", ["@r2", "@r2\nAC", "@r2\nACGT\n", "@r2\nACGT\n+", "@r2\nACGT\n+\nII"])
def test_plain_fastq_that_ends_in_the_middle_of_a_record_is_packed_up_to_it(tmp_path, end):
    whole = b"@r0\nACGT\n+\nIIII\n@r1\nGG\n+\nII\n"
    with pytest.raises(BadSource, match="ends in the middle of record 2"):
        packed(tmp_path, whole + end.encode())
    said: list[str] = []
    file = packed(tmp_path, whole + end.encode(), settings=IndexSettings(salvage=True), notify=said.append)
    assert unpacked(file) == whole
    assert "ends in the middle of record 2. Packed what comes before" in said[0]


def test_a_file_that_goes_on_as_ordinary_gzip_is_packed(tmp_path):
    text = b">a\nACGT\n" * 100
    file = packed(tmp_path, text, wrap=lambda text: bgzf(text)[:-28] + gzip.compress(b">z\nGG\n"))
    assert unpacked(file) == text + b">z\nGG\n"


def big(count: int) -> bytes:
    rng = np.random.default_rng(1)
    out = []
    for number in range(count):
        data = rng.choice(list(b"ACGTACGTACGTNa"), int(rng.integers(50, 400))).astype(np.uint8).tobytes()
        grades = bytes(rng.integers(35, 70, len(data)).astype(np.uint8))
        extra = b"+r%d x\n" % number if number % 3 == 0 else b"+\n"
        out.append(b"@r%d x%d\n%s\n%s%s\n" % (number, number % 9, data, extra, grades))
    return b"".join(out)


def start_child(*paths: Path, most_bytes: int | None = None) -> BaseProcess:
    """Pack in a fork, which has imported and compiled all already; what it raises is in `errors` beside the output."""
    *sources, out = paths

    def work() -> None:
        index.BUFFER_BYTES, pack_module.COMMIT_S = 1 << 13, 0.0
        if most_bytes:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
        try:
            pack(sources, out, settings=IndexSettings(header_regex=r"(?P<name>r\d+) x(?P<kind>\d)"))
        except BaseException:
            out.with_name("errors").write_text(traceback.format_exc())
            raise

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    return child


def wait_for(child: BaseProcess) -> int | None:
    child.join()
    return child.exitcode


@pytest.mark.parametrize("kind", ["gzip"])
def test_a_run_killed_at_any_instant_goes_on_and_gives_the_same_bytes(tmp_path, kind):
    sources = [tmp_path / "a.fq", tmp_path / "b.fq"]
    sources[0].write_bytes(WRAPS[kind](big(1200)))
    sources[1].write_bytes(WRAPS[kind](big(600)))
    whole, out, folder = tmp_path / "whole.pack", tmp_path / "out.pack", tmp_path / "out.pack.partial"
    assert wait_for(start_child(*sources, whole)) == 0
    child = start_child(*sources, out)
    while not (folder / "journal.json").exists():
        time.sleep(0.001)
    kills, code = 0, None
    for attempt in range(30):
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
    assert kills >= 1, "the first run was over before it could be killed"
    assert not folder.exists()
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


@pytest.mark.parametrize("wrap", ["plain", "bgzf"])
@pytest.mark.parametrize("salvage", [False, True])
def test_a_run_stopped_after_any_commit_goes_on_and_gives_the_same_bytes(tmp_path, monkeypatch, wrap, salvage):
    monkeypatch.setattr(index, "BUFFER_BYTES", 1 << 11)
    monkeypatch.setattr(pack_module, "COMMIT_S", 0.0)
    text = big(60) + b"\n\n" + big(20).replace(b"\n", b"\r\n")
    (tmp_path / "a").write_bytes(WRAPS[wrap](text))
    (tmp_path / "b").write_bytes(WRAPS[wrap](text))
    sources, chosen = [tmp_path / "a", tmp_path / "b"], IndexSettings(header_regex=r"r(?P<n>\d+)", salvage=salvage)
    pack(sources, tmp_path / "whole", settings=chosen)
    commit = journal.Journal.commit
    for number in range(6):
        left = number * 6 + 1

        def stop(self, state):
            nonlocal left
            commit(self, state)
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

        out = tmp_path / f"out{number}"
        monkeypatch.setattr(journal.Journal, "commit", stop)
        with pytest.raises(KeyboardInterrupt):
            pack(sources, out, settings=chosen)
        monkeypatch.setattr(journal.Journal, "commit", commit)
        pack(sources, out, settings=chosen)
        assert out.read_bytes() == (tmp_path / "whole").read_bytes()


def interrupted(folder: Path, monkeypatch) -> Path:
    """A run that stopped after its first commit."""
    (folder / "a.fa").write_bytes(b"".join(b">r%d\nACGTN\n" % n for n in range(500)))
    monkeypatch.setattr(index, "BUFFER_BYTES", 1 << 10)
    monkeypatch.setattr(pack_module, "COMMIT_S", 0.0)
    commit = journal.Journal.commit

    def stop(self, state):
        commit(self, state)
        raise KeyboardInterrupt

    monkeypatch.setattr(journal.Journal, "commit", stop)
    with pytest.raises(KeyboardInterrupt):
        pack([folder / "a.fa"], folder / "out")
    monkeypatch.setattr(journal.Journal, "commit", commit)
    return folder / "a.fa"


def test_going_on_with_another_source_or_other_settings_is_refused(tmp_path, monkeypatch):
    source = interrupted(tmp_path, monkeypatch)
    with pytest.raises(ConfigMismatch, match=r"names: True -> False.*--rebuild"):
        pack([source], tmp_path / "out", names=False)
    source.write_bytes(b">other\nA\n")
    with pytest.raises(ConfigMismatch, match=r"source 0 a.fa.*size.*--rebuild"):
        pack([source], tmp_path / "out")
    assert pack([source], tmp_path / "out", rebuild=True).records == 1


def test_two_runs_at_once_are_refused(tmp_path, monkeypatch):
    source = interrupted(tmp_path, monkeypatch)
    with (
        journal.Journal(tmp_path / "out", {}, rebuild=True, advice=""),
        pytest.raises(StoreExists, match="another process"),
    ):
        pack([source], tmp_path / "out")


def test_a_damaged_partial_folder_is_noticed_and_the_next_run_starts_anew(tmp_path, monkeypatch):
    source = interrupted(tmp_path, monkeypatch)
    os.truncate(tmp_path / "out.partial" / "2bit", 8)
    with pytest.raises(BadIndex, match="cut short"):
        pack([source], tmp_path / "out")
    assert pack([source], tmp_path / "out").records == 500


def test_what_is_done_is_not_done_again_and_nothing_else_is_replaced(tmp_path):
    source, out = tmp_path / "a.fa", tmp_path / "out.pack"
    source.write_bytes(b">a\nACGT\n")
    first = pack([source], out)
    said: list[str] = []
    assert pack([source], out, notify=said.append) == first
    assert "already packed" in said[0]
    with pytest.raises(StoreExists, match=r"other settings.*--rebuild"):
        pack([source], out, names=False)
    source.write_bytes(b">a\nACGTA\n")
    with pytest.raises(StoreExists, match="size 8 -> 9"):
        pack([source], out)
    (tmp_path / "text").write_text("mine")
    with pytest.raises(StoreExists, match="no packed file"):
        pack([source], tmp_path / "text")
    assert (tmp_path / "text").read_text() == "mine"


def test_a_full_disk_says_what_to_do_and_keeps_what_is_done(tmp_path):
    (tmp_path / "a.fq").write_bytes(big(1200))
    assert wait_for(start_child(tmp_path / "a.fq", tmp_path / "out", most_bytes=80_000)) == 1
    said = (tmp_path / "errors").read_text()
    assert StoreFull.__name__ in said and "run the same command again" in said
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


def test_packs_are_told_from_other_files(tmp_path):
    file = packed(tmp_path, b">a\nA\n")
    open_reads([tmp_path / "source0"])
    assert is_pack(file.path)
    assert not is_pack(tmp_path / "source0")
    assert not is_pack(tmp_path / "source0.millstream")
    assert not is_pack(tmp_path)
    with pytest.raises(BadIndex, match="is an index of reads, not packed reads"):
        open_pack(tmp_path / "source0.millstream", MEMORY)
    file.path.write_bytes(file.path.read_bytes()[:-9])
    assert is_pack(file.path)
    with pytest.raises(BadIndex, match="Pack it again"):
        open_pack(file.path, MEMORY)


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


def test_a_record_longer_than_every_buffer_takes_no_more_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "BUFFER_BYTES", 1 << 12)
    monkeypatch.setattr(sys.modules["millstream.store.unpack"], "WINDOW", 1000)
    rng = np.random.default_rng(0)
    data = rng.choice(list(b"ACGTacgtN"), 100_000).astype(np.uint8).tobytes()
    lines = b"".join(data[i : i + 61] + b"\n" for i in range(0, len(data), 61))
    text = b">chr1 long\n" + lines + b">chr2\n" + lines[:5000].replace(b"\n", b"\n\n")
    file = packed(tmp_path, text)
    assert unpacked(file) == text
    assert file.region(0, 50_000, 50_010).tobytes() == data[50_000:50_010]


def test_comments_and_blank_lines_longer_than_every_buffer_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "BUFFER_BYTES", 64)
    blank = b";" + b"x" * 300 + b"\n" + b"\n" * 400
    text = b"; c\n>a\nACG\n" + blank + b"ACG\nA\n>b" + b"\n" * 200 + b";" + b"y" * 99
    assert unpacked(packed(tmp_path, text)) == text
    assert unpacked(packed(tmp_path, text, text)) == text + text


def test_everything_works_without_compiled_kernels(tmp_path):
    code = (
        "import io, sys; from pathlib import Path\n"
        "from millstream.store.pack import pack; from millstream.store.unpack import unpack\n"
        "for source in map(Path, sys.argv[1:]):\n"
        "    out = source.with_suffix('.plain'); pack([source], out); text = io.BytesIO(); unpack(out, text)\n"
        "    assert text.getvalue() == source.read_bytes()\n"
        "from millstream.kernels import HAVE_NUMBA; assert not HAVE_NUMBA\n"
    )
    (tmp_path / "a").write_bytes(big(30) + b"\n" + big(2).replace(b"\n", b"\r\n"))
    (tmp_path / "b").write_bytes(b"; x\n>a\nACGNNNnnacgt\nAC\n\n>b\n>c\nNNNNNNNNNNNNNNNNNNNNNNNNNNNNNN\nNNa")
    environment = {**os.environ, "PYTHONPATH": str(Path(index.__file__).parents[2])}
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "a"), str(tmp_path / "b")]
    done = subprocess.run(command, env={**environment, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in "ab":
        pack([tmp_path / name], tmp_path / f"{name}.pack")
        assert (tmp_path / f"{name}.plain").read_bytes() == (tmp_path / f"{name}.pack").read_bytes()
    assert pack_file.WHAT == "packed reads"
