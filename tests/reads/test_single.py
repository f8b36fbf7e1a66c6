"""Reads one at a time: by number, by name and in a loop they are the same reads, from whatever file."""

import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from millstream.errors import BadIndex
from millstream.reads.batch import as_list
from millstream.reads.files.index import IndexSettings
from millstream.reads.files.sections import CRC_BYTES
from millstream.reads.pack.pack import pack
from millstream.reads.reads import Reads
from support.read_files import REGEX, WRAPPERS, fasta, fastq, flip, index_of, opened, records

FASTA, FASTQ = records(700, longest=400), records(600, quality=True, longest=300)
TEXTS: dict[str, Callable[[], bytes]] = {
    "fasta": partial(fasta, FASTA),
    "crlf": lambda: fasta(FASTA).replace(b"\n", b"\r\n"),
    "irregular": lambda: fasta(FASTA) + b">odd one\nACG\nA\nACGTN\n\n>next\nnnACGTRYnn\n",
    "not ascii": lambda: fasta(FASTA) + ">größe 1\nACGT\n".encode() + b">\xff\xfe\nAC\n",
    "control-a": lambda: fasta(FASTA) + b">one\x01two three\nACGT\n> blank\nAC\n>\nA\n",
    "fastq": partial(fastq, FASTQ),
}


def check_same(reads: Reads) -> None:
    """Every way to get a read gives the same one."""
    batch = reads.fetch(range(len(reads)), ["sequence", "quality", "name", *reads.column_names])
    looped = list(reads)
    assert [read.sequence for read in looped] == batch.sequences()
    assert [read.name for read in looped] == batch.columns["name"]
    assert [reads[number] for number in range(len(reads))] == looped
    # A name that is not UTF-8 cannot be asked for.
    first = {read.name: read for read in reversed(looped) if "\ufffd" not in read.name}
    assert all(reads.by_name(name) == read for name, read in first.items())
    with pytest.raises(KeyError, match="no such name"):
        reads.by_name("no such name")


@pytest.mark.parametrize("memory", ["1GB", 1 << 16])
@pytest.mark.parametrize("text", TEXTS)
def test_every_way_to_a_read_gives_the_same(text: str, memory: int | str, tmp_path: Path):
    for wrapper in ("plain", "gzip", "bgzf"):
        (tmp_path / wrapper).write_bytes(WRAPPERS[wrapper](TEXTS[text]()))
        check_same(opened(tmp_path / wrapper, memory=memory))


@pytest.mark.parametrize("memory", ["1GB", 1 << 16])
@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize("text", ["irregular", "fastq"])
def test_every_way_to_a_packed_read_gives_the_same(text: str, names: bool, memory: int | str, tmp_path: Path):
    (tmp_path / "text").write_bytes(TEXTS[text]())
    pack([tmp_path / "text"], tmp_path / "pack", names=names)
    check_same(opened(tmp_path / "pack", memory=memory))


def test_the_columns_of_a_read_come_when_they_are_asked_for(tmp_path: Path):
    (tmp_path / "a.fa").write_bytes(fasta(FASTA))
    reads = opened(tmp_path / "a.fa", header_regex=REGEX)
    for number, read in enumerate(reads):
        wanted = {"who": f"r{number}", "len": len(FASTA[number].sequence)}
        for one in (read, reads[number], pickle.loads(pickle.dumps(reads[number]))):
            assert {name: one.columns[name] for name in wanted} == wanted
    assert read == reads[-1] != reads[0] and "who" in repr(read)
    assert read.with_columns({"who": 3}).columns["who"] == 3 and read.columns["who"] == "r699"


@pytest.mark.parametrize("kind", ["index", "pack"])
def test_the_columns_of_one_read_are_those_of_a_batch(kind: str, tmp_path: Path):
    """Values, codes of numbers and texts, lengths, and those of them that are missing in some headers."""
    regex = r"(?P<value>\d+) (?P<code>\d+)?;(?P<text>[a-z]+)?;(?P<length>\d+);(?P<distinct>\w+)"
    lines = [
        f">{number * 977 % 5003} {'' if number % 3 else 10**15 + number % 5};{'' if number % 7 else 'ab'[number % 2]};"
        f"{number % 50 + 1};n{number}\n{'A' * (number % 50 + 1)}\n"
        for number in range(5000)
    ]
    file = tmp_path / "a.fa"
    file.write_text("".join(lines))
    if kind == "pack":
        pack([file], tmp_path / "pack", settings=IndexSettings(header_regex=regex))
    reads = opened(file, header_regex=regex) if kind == "index" else opened(tmp_path / "pack")
    names = ("length", "value", "code", "text")
    batch = reads.fetch(range(5000), names)
    found = [dict(zip(names, reads.values_of(number, names), strict=True)) for number in range(5000)]
    assert found == [{name: as_list(batch.columns[name])[number] for name in names} for number in range(5000)]
    assert found[6] == {"length": 7, "value": 6 * 977 % 5003, "code": 10**15 + 1, "text": None}
    assert reads[6].columns == {**found[6], "distinct": "n6"} == reads.columns_of(6)


def test_a_newline_that_damage_made_moves_no_read_into_another(tmp_path: Path):
    file = tmp_path / "a.fa"
    file.write_bytes(b"".join(b">r%d\n%s\n" % (number, b"JACGT" * 9) for number in range(300)))
    reads, stat = opened(file), file.stat()
    flip(file, file.read_bytes().index(b"J", 1000), ord("J") ^ ord("\n"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert [read.name for read in reads] == [f"r{number}" for number in range(300)]
    assert sum(read.sequence != "JACGT" * 9 for read in reads) == 1


@pytest.mark.parametrize("access", ["number", "name", "loop"])
@pytest.mark.parametrize("kind", ["index", "pack"])
def test_a_flipped_bit_is_noticed_by_whoever_reads_there(kind: str, access: str, tmp_path: Path):
    """Every bit of an index or pack is verified before it is used; a megabyte of it at a time."""
    text = tmp_path / "a.fa"
    text.write_bytes(fasta(FASTA))
    good_reads = opened(text)
    expected, damaged = list(good_reads), index_of(text)
    if kind == "pack":
        damaged = pack([text], tmp_path / "a.pack") and tmp_path / "a.pack"
    good = damaged.read_bytes()
    assert len(good) < CRC_BYTES
    noticed = 0
    for place in range(8, len(good) - 64, len(good) // 25):
        damaged.write_bytes(good)
        flip(damaged, place, 16)
        try:
            reads = opened(text if kind == "index" else damaged)
            if access == "loop":
                found = list(reads)
            else:
                get = reads.__getitem__ if access == "number" else reads.by_name
                found = [get(key) for key in (range(700) if access == "number" else [read.name for read in expected])]  # pyright: ignore
            assert found == expected
        except BadIndex:
            noticed += 1
    assert noticed or kind == "index"  # a damaged index may be built anew
