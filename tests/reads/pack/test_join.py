"""Workers that pack one file each write the pack of one process, byte for byte."""

from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from millstream.core.engine import Engine
from millstream.core.remote import to_path
from millstream.errors import BadSource, StoreExists
from millstream.reads.files.index import IndexLimits, IndexSettings
from millstream.reads.pack import PackFile
from millstream.reads.pack.pack import pack
from support.effort import num_examples
from support.read_files import fasta_texts, fastq_texts
from support.s3_server import Bucket

REGEX = r"(?P<word>\w+)(?: (?P<kind>\w)?(?P<number>\d+)?)?"


class Workers(Engine):
    """An engine whose workers are in this process; `jobs` are the files they packed."""

    def __init__(self) -> None:
        super().__init__("ray")
        object.__setattr__(self, "jobs", list[str]())

    def run(self, make: Callable[[], Any], jobs: Iterable[Any], **_: Any) -> Generator[Any]:
        for result in Engine().run(make, jobs):
            self.jobs.append(result[0].source.name)  # pyright: ignore
            yield result


def write_sources(folder: Path, *texts: bytes) -> list[Path]:
    sources = [folder / f"source{number}" for number in range(len(texts))]
    for source, text in zip(sources, texts, strict=True):
        source.write_bytes(text)
    return sources


def assert_same_pack(folder: Path, *texts: bytes, **arguments: Any) -> PackFile:
    sources, said = write_sources(folder, *texts), dict[str, list[str]](here=[], there=[])
    for place, engine in (("here", Engine()), ("there", Workers())):
        pack(sources, folder / place, rebuild=True, engine=engine, notify=said[place].append, **arguments)
    assert (folder / "there").read_bytes() == (folder / "here").read_bytes()
    assert said["there"] == said["here"]
    assert sorted(path.name for path in folder.iterdir()) == ["here", *(path.name for path in sources), "there"]
    return PackFile(folder / "there", memory=1 << 30)


@pytest.mark.parametrize("format", ["fasta", "fastq"])
def test_files_of_any_text_are_packed_to_the_bytes_of_one_process(tmp_path_factory, format):
    folder = tmp_path_factory.mktemp("any")
    text = fasta_texts() if format == "fasta" else fastq_texts()

    @settings(max_examples=num_examples(40), deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(text, min_size=2, max_size=3),
        st.sampled_from(["skip", "null", None]),
        st.booleans(),
        st.booleans(),
        st.sampled_from([64, 1 << 12]),
    )
    @example([b">a\nAC\n>b\nA\n", b">c\nACG\nA\n"] if format == "fasta" else [b"@\n\n+\n\n"] * 2, None, True, True, 64)
    @example([b">a\nNN", b">c\nNA\n"] if format == "fasta" else [b"@a\nN\n+\nI", b"@b\nN\n+\nJ"], None, True, True, 64)
    @example([b">a\nAC\n"] * 2 if format == "fasta" else [b"@a\nN\n+\nI"] * 2, "null", True, False, 64)
    def check(texts, mismatch, names, quality, buffer_bytes) -> None:
        chosen = IndexSettings(header_regex=mismatch and REGEX, on_mismatch=mismatch or "error", names=True)
        limits = IndexLimits(buffer_bytes=buffer_bytes, distinct=2)
        for path in folder.iterdir():
            path.unlink()
        assert_same_pack(folder, *texts, settings=chosen, names=names, quality=quality, limits=limits)

    check()


def test_files_of_one_layout_are_exact_also_when_a_record_is_longer_than_a_piece(tmp_path):
    lines = b"".join(b"ACGT" * 12 + b"nNACGTACGTRY" + b"\n" for _ in range(90_000))
    file = assert_same_pack(tmp_path, b">a 1\n" + lines, b">b 2\nACGTACGTAC\n", b">c 3\n" + lines[:-1])
    assert file.fidelity == "bytes exact" and file.records == 3


def test_damaged_files_are_packed_as_one_process_does(tmp_path):
    salvage = IndexSettings(header_regex=REGEX, salvage=True, on_mismatch="null")
    file = assert_same_pack(tmp_path, b"@a x\nAC\n+\nII\n@b y\nA\n+", b"@c z\nA\n+\nI\n", settings=salvage)
    assert "without what follows the damage" in file.fidelity


def test_finished_files_are_not_packed_again(tmp_path):
    sources, out = write_sources(tmp_path, b">a\nA\n", b">b x\nA\n", b">c\nC\n"), tmp_path / "out"
    wrong = IndexSettings(header_regex=r"(?P<name>\w+)$")
    for _ in range(2):
        engine = Workers()
        with pytest.raises(BadSource, match="source1: 1 of the first 1 headers do not match"):
            pack(sources, out, settings=wrong, engine=engine)
    assert [path.name for path in sorted((tmp_path / "out.parts").iterdir())] == ["00000.pack"]
    sources[1].write_bytes(b">b\nA\n")
    pack(sources, out, settings=wrong, engine=(engine := Workers()))
    assert engine.jobs == ["source1", "source2"]  # pyright: ignore
    assert not (tmp_path / "out.parts").exists()
    pack(sources, out, settings=wrong, engine=(engine := Workers()))
    assert engine.jobs == []  # pyright: ignore


def test_a_file_that_changed_since_it_was_packed_is_noticed(tmp_path):
    sources, out = write_sources(tmp_path, b">a\nA\n", b"no reads"), tmp_path / "out"
    with pytest.raises(BadSource):
        pack(sources, out, engine=Workers())
    write_sources(tmp_path, b">a\nACGT\n", b">b\nA\n")
    with pytest.raises(StoreExists, match=r"source0 has changed .* --rebuild"):
        pack(sources, out, engine=Workers())
    pack(sources, out, engine=Workers(), rebuild=True)
    assert PackFile(out, memory=1 << 30).bases == 5


def test_formats_are_not_mixed(tmp_path):
    sources = write_sources(tmp_path, b">a\nA\n", b"@a\nA\n+\nI\n")
    with pytest.raises(BadSource, match=r"source1: .*fastq.* fasta"):
        pack(sources, tmp_path / "out", engine=Workers())


def test_packs_of_objects_are_joined_at_a_url(tmp_path, s3: Bucket, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_SPOOL_DIR", str(tmp_path / "spool"))
    sources = write_sources(tmp_path, b">a\nACGT\n", b">b\nA\n")
    out, here = to_path(f"{s3.url}/all.pack"), tmp_path / "here"
    pack(sources, here)
    pack(sources, out, engine=Workers())
    assert out.read_bytes() == here.read_bytes()
    assert [path.name for path in to_path(s3.url).iterdir()] == ["all.pack"]
