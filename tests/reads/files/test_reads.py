"""Reads by number: bases, names, columns, regions, collections, and the memory they take."""

import gc
import gzip
import json
import os
import pickle
import random
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.core.files import publish_json
from millstream.core.remote import open_raw
from millstream.errors import BadIndex, BadSetting
from millstream.reads.files import containers
from millstream.reads.files.index import IndexLimits, IndexSettings, build_index
from millstream.reads.open import open_reads
from millstream.reads.pack.pack import pack
from millstream.reads.pack.unpack import unpack
from millstream.reads.reads import Reads
from support.effort import num_examples
from support.read_files import (
    COMPRESSED,
    REGEX,
    WRAPPERS,
    Record,
    bgzf,
    change_meta,
    fasta,
    fastq,
    flushed,
    holds,
    index_of,
    opened,
    records,
    sequences_of,
    texts,
)

MADE = records(300)
few = settings(
    max_examples=num_examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "reads.fa").write_bytes(fasta(MADE))
    return tmp_path / "reads.fa"


def write(file: Path, text: bytes | str) -> Path:
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def taken(made: list[Record], numbers: Any) -> list[str]:
    """The sequences of these records."""
    return [made[number].sequence.decode() for number in numbers]


# -- by number


def test_negative_numbers_count_from_the_end(file: Path):
    reads = opened(file)
    assert reads[-1] == reads[299] and reads[-300] == reads[0]
    assert reads.fetch([-1, 0, -300]).numbers.tolist() == [299, 0, 0]


def test_a_folder_whose_name_is_not_utf8_is_opened(tmp_path: Path):
    folder = tmp_path / os.fsdecode(b"reads-\xff")
    folder.mkdir()
    assert [read.sequence for read in open_reads([write(folder / "reads.fa", ">a\nACGT\n")])] == ["ACGT"]
    publish_json(folder / "card.json", {"data": str(folder)})
    assert json.loads((folder / "card.json").read_text()) == {"data": str(folder)}


@pytest.mark.parametrize("wrong", ["a", 1.5, None])
def test_an_index_that_is_not_a_number_is_refused(wrong: Any, file: Path):
    with pytest.raises(BadSetting, match=re.escape(f"reads[{wrong!r}]")):
        open_reads([file])[wrong]


@pytest.mark.parametrize("number", [300, -301, 10**12])
def test_a_number_out_of_range_is_an_index_error_with_the_number_of_reads(number: int, file: Path):
    reads = opened(file)
    with pytest.raises(IndexError, match=rf"{number} .*300.*reads\.fa"):
        reads[number]
    with pytest.raises(IndexError, match=f"{number} .*300"):
        reads.fetch([0, number])


@given(part=st.slices(300))
@few
def test_a_slice_is_the_list_of_its_reads(file: Path, part: slice):
    reads = opened(file)
    assert reads[part] == [reads[number] for number in range(300)[part]]


def test_iteration_gives_every_read_in_order(tmp_path: Path):
    made = [*records(1100), *(Record(b"long%d" % number, b"ACGTT" * 500_000, None) for number in range(3)), *records(9)]
    assert holds(opened(write(tmp_path / "reads.fa", fasta(made))), made)


def test_numbers_may_come_twice_and_in_any_order(file: Path):
    numbers = np.random.default_rng(0).integers(0, 300, 1000)
    assert opened(file).fetch(numbers).sequences() == taken(MADE, numbers)


def test_no_reads_at_all_can_be_fetched(file: Path):
    batch = opened(file).fetch([])
    assert len(batch) == 0 and batch.sequences() == [] and batch.offsets.tolist() == [0]


def test_bases_keep_their_case_and_other_symbols(tmp_path: Path):
    assert opened(write(tmp_path / "reads.fa", ">a\nacGTnN-*\n"))[0].sequence == "acGTnN-*"


def test_a_protein_is_a_read_too(tmp_path: Path):
    protein = "MKVLEWQPXBZJUO*-"
    reads = opened(write(tmp_path / "proteins.fa", f">sp|P1|A_B some protein OS=x\n{protein}\n{protein}\n"))
    assert (reads[0].name, reads[0].sequence) == ("sp|P1|A_B", protein * 2)


def test_lengths_are_known_without_the_file(file: Path):
    reads = opened(file)
    file.rename(file.with_name("away"))
    assert reads.lengths(range(300)).tolist() == [len(record.sequence) for record in MADE]


def test_qualities_come_with_the_sequences(tmp_path: Path):
    made = records(50, quality=True)
    reads = opened(write(tmp_path / "reads.fq", fastq(made)))
    batch = reads.fetch([4, 2])
    assert batch.quality is not None and batch.quality.tobytes() == (made[4].quality or b"") + (made[2].quality or b"")
    assert holds(reads, made)


def test_the_repr_says_what_it_is(file: Path):
    bases = sum(len(record.sequence) for record in MADE)
    assert repr(opened(file)) == f"Reads({file}: 300 reads, {bases} bases, {file.stat().st_size / 1000:.1f} kB)"
    reads = opened(file, header_regex=REGEX)
    assert repr(reads).endswith("\n  class_id, tax_id, len, who, mate")


# -- fields and columns


def test_fields_choose_what_is_fetched(file: Path):
    batch = opened(file, header_regex=REGEX).fetch([5], ["name", "class_id"])
    assert batch.columns == {"name": ["lbl|5|9605|33|r5/2".replace("33", str(len(MADE[5].sequence)))], "class_id": [5]}
    assert len(batch.flat) == 0 and batch.offsets.tolist() == [0, 0]


def test_an_unknown_field_is_refused_and_known_ones_are_listed(file: Path):
    with pytest.raises(ValueError, match=r"'tokens'.*sequence, quality, name, class_id, tax_id"):
        opened(file, header_regex=REGEX).fetch([0], ["tokens"])


def test_fields_are_a_list(file: Path):
    with pytest.raises(ValueError, match=r"fields=\['sequence'\]"):
        opened(file).fetch([0], "sequence")


def test_an_unknown_column_is_refused_and_known_ones_are_listed(file: Path):
    with pytest.raises(KeyError, match=r"'tokens'.*class_id, tax_id, len, who, mate"):
        opened(file, header_regex=REGEX).column("tokens")


def wanted_columns(count: int) -> dict[str, list[Any]]:
    return {
        "class_id": [number % 7 for number in range(count)],
        "tax_id": [None if number % 5 == 4 else 9600 + number % 7 for number in range(count)],
        "len": [len(record.sequence) for record in MADE[:count]],
        "who": [f"r{number}" for number in range(count)],
        "mate": [number % 2 + 1 for number in range(count)],
    }


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_columns_are_what_the_headers_say(wrapper: str, tmp_path: Path):
    reads = opened(write(tmp_path / "reads.fa", WRAPPERS[wrapper](fasta(MADE))), header_regex=REGEX)
    for name, values in wanted_columns(300).items():
        assert reads.column(name).to_pylist() == values
    batch = reads.fetch(range(299, -1, -1), list(wanted_columns(300)))
    assert {name: list(values) for name, values in batch.columns.items()} == {
        name: values[::-1] for name, values in wanted_columns(300).items()
    }
    assert [read.columns for read in reads] == [
        {name: values[number] for name, values in wanted_columns(300).items()} for number in range(300)
    ]


def test_the_table_has_narrow_integers_and_dictionaries(file: Path):
    table = opened(file, header_regex=REGEX).table
    assert table.column_names == ["length", "class_id", "tax_id", "len", "who", "mate"]
    kinds = [table.schema.field(name).type for name in ("length", "class_id", "tax_id")]
    assert kinds == [pa.int8(), pa.int8(), pa.int16()]
    assert table.schema.field("who").type == pa.dictionary(pa.int32(), pa.string())
    assert table["tax_id"].null_count == 60


def kept(reads: Reads) -> dict[str, str]:
    columns = reads.parts[0].columns
    return {name: columns.kept(name) for name in columns.names}


def test_a_column_that_equals_the_length_takes_no_space(file: Path):
    assert kept(opened(file, header_regex=REGEX))["len"] == "length"


def as_an_older_millstream_kept_it(file: Path, column: str) -> None:
    """Describe a column as deduced from another one."""

    def change(meta: dict[str, Any]) -> None:
        for stored in meta["columns"]:
            stored |= {"kept": "follows", "of": "class_id"} if stored["name"] == column else {"of": None}

    change_meta(file, change)


def test_the_index_of_an_older_millstream_is_rebuilt_with_its_settings(file: Path, capsys: pytest.CaptureFixture[str]):
    opened(file, header_regex=REGEX)
    as_an_older_millstream_kept_it(index_of(file), "tax_id")
    reads = opened(file)
    assert str(file) in capsys.readouterr().err
    assert {name: reads.column(name).to_pylist() for name in reads.column_names} == wanted_columns(300)


def test_a_packed_column_that_only_an_older_millstream_reads_is_refused_but_can_be_unpacked(file: Path):
    packed = file.with_name("reads.pack")
    pack([file], packed, settings=IndexSettings(header_regex=REGEX))
    as_an_older_millstream_kept_it(packed, "tax_id")
    with pytest.raises(BadIndex, match=r"'tax_id'.*millstream unpack"):
        opened(packed)
    unpack(packed, file.with_name("again.fa"))
    assert file.with_name("again.fa").read_bytes() == file.read_bytes()


def test_few_large_values_are_kept_as_codes(tmp_path: Path):
    values = [random.Random(number % 3).randrange(10**17) for number in range(20_000)]
    text = "".join(f">n{value}\nAC\n" for value in values)
    reads = opened(write(tmp_path / "reads.fa", text), header_regex=r"n(?P<number>\d+)")
    assert kept(reads) == {"number": "codes"} and reads.column("number").to_pylist() == values


def test_many_values_are_kept_as_they_are(tmp_path: Path):
    values = [random.Random(number).randrange(10**9) for number in range(1000)]
    text = "".join(f">n{value}\nAC\n" for value in values)
    reads = opened(write(tmp_path / "reads.fa", text), header_regex=r"n(?P<number>\d+)")
    assert kept(reads) == {"number": "values"} and reads.column("number").to_pylist() == values


def test_a_text_with_too_many_values_stays_in_the_headers(file: Path):
    reads = opened(file, header_regex=REGEX, limits=IndexLimits(distinct=100))
    assert kept(reads)["who"] == "header"
    assert "who" not in reads.table.column_names and "who" not in reads.fetch([0]).columns
    assert reads.fetch([7, 3], ["who"]).columns["who"] == ["r7", "r3"]
    assert reads.column("who").to_pylist() == [f"r{number}" for number in range(300)]
    assert reads[5].columns["who"] == "r5"


def test_integers_with_too_many_values_are_kept_as_they_are(tmp_path: Path):
    text = "".join(f">n{number * 10**9}\nAC\n" for number in range(300))
    file = write(tmp_path / "reads.fa", text)
    reads = opened(file, header_regex=r"n(?P<number>\d+)", limits=IndexLimits(distinct=100))
    assert reads.column("number").to_pylist() == [number * 10**9 for number in range(300)]


@pytest.mark.parametrize("count", [99, 100, 101])
def test_a_null_among_as_many_values_as_a_dictionary_holds_is_still_a_null(count: int, tmp_path: Path):
    values = [*(10**15 + number * 10**9 for number in range(count)), None] * 200
    text = "".join(f">n{'' if value is None else value}\nAC\n" for value in values)
    file = write(tmp_path / "reads.fa", text)
    reads = opened(file, header_regex=r"n(?P<number>\d*)", limits=IndexLimits(distinct=100))
    assert reads.column("number").to_pylist() == values


def test_a_null_is_not_among_the_distinct_values(tmp_path: Path):
    values = [10**15, 10**15 + 10**9, None] * 7000
    text = "".join(f">n{value or ''}\nAC\n" for value in values)
    reads = opened(write(tmp_path / "reads.fa", text), header_regex=r"n(?P<number>\d*)")
    assert reads.parts[0].columns.distinct("number") is not None
    assert sorted(np.asarray(reads.parts[0].columns.distinct("number")).tolist()) == [10**15, 10**15 + 10**9]


@pytest.mark.parametrize("value", [0, 127, 128, 2**31 - 1, 2**31, 2**63 - 1])
def test_a_column_holds_integers_of_any_size(value: int, tmp_path: Path):
    for values in ([value], [0, value] * 3, [value, 5, 2**62], [*range(5), value]):
        text = "".join(f">n{number}\nAC\n" for number in values)
        write(tmp_path / "reads.fa", text)
        index_of(tmp_path / "reads.fa").unlink(missing_ok=True)
        reads = opened(tmp_path / "reads.fa", header_regex=r"n(?P<number>\d+)")
        assert reads.column("number").to_pylist() == values
        assert reads.fetch(range(len(values))).columns["number"].tolist() == values


def test_fetched_integers_with_a_null_are_a_list(file: Path):
    reads = opened(file, header_regex=REGEX)
    assert reads.fetch([3, 4], ["tax_id"]).columns["tax_id"] == [9603, None]
    assert isinstance(reads.fetch([3, 5], ["tax_id"]).columns["tax_id"], np.ndarray)


def test_only_the_chosen_columns_are_kept(file: Path):
    reads = opened(file, header_regex=REGEX, columns=["mate", "class_id"])
    assert sorted(reads.column_names) == ["class_id", "mate"]
    assert reads.column("mate").to_pylist() == wanted_columns(300)["mate"]


def test_an_index_with_more_columns_is_reused_and_one_with_fewer_is_rebuilt(
    file: Path, capsys: pytest.CaptureFixture[str]
):
    opened(file, header_regex=REGEX)
    before = index_of(file).stat().st_ino
    opened(file, header_regex=REGEX, columns=["class_id"])
    opened(file)
    assert index_of(file).stat().st_ino == before
    reads = opened(file, header_regex=r"lbl\|(?P<other>\d+)")
    assert str(file) in capsys.readouterr().err
    assert reads.column_names == ["other"] and reads.column("other").to_pylist() == wanted_columns(300)["class_id"]


def test_columns_of_a_whole_buffer_of_records_stay_with_their_records(file: Path):
    reads = opened(file, header_regex=REGEX, limits=IndexLimits(buffer_bytes=128, rows_at_once=50))
    assert {name: reads.column(name).to_pylist() for name in reads.column_names} == wanted_columns(300)
    assert holds(reads, MADE)


def test_a_mapping_adds_labels(file: Path):
    mapping = {"class_id": list(range(7)), "genus": [f"genus{number}" for number in range(7)]}
    reads = opened(file, header_regex=REGEX, mapping=mapping)
    batch = reads.fetch([0, 8, 6])
    assert batch.columns["label"].tolist() == [0, 1, 6] and batch.columns["genus"] == ["genus0", "genus1", "genus6"]
    assert reads.column("genus").to_pylist() == [f"genus{number % 7}" for number in range(300)]
    assert reads[8].columns["genus"] == "genus1"
    assert reads.table["label"].to_pylist() == [number % 7 for number in range(300)]


# -- by name


def test_a_name_is_the_first_word_of_a_header(tmp_path: Path):
    reads = opened(
        write(tmp_path / "reads.fa", ">one two three\nAC\n>ünï x\nG\n> \tblank x\nT\n>\nTT\n>gi|1\1gi|2 y\nA\n")
    )
    assert [read.name for read in reads] == ["one", "ünï", "blank", "", "gi|1"]
    assert reads.by_name("one").sequence == "AC" and reads.by_name("ünï").sequence == "G"
    assert (
        reads.find("") == [3] and reads.find("two") == [] and reads.find("blank") == [2] and reads.find("gi|1") == [4]
    )


def test_a_quality_that_is_wrapped_alone_is_read(tmp_path: Path):
    text = "@a\nACGTACG\n+\n@II\n+II\n@\n@b\nAC\n+b\nII\n"
    reads = opened(write(tmp_path / "reads.fq", text))
    assert [(read.sequence, read.quality) for read in reads] == [("ACGTACG", "@II+II@"), ("AC", "II")]


def test_find_gives_every_record_of_a_name(tmp_path: Path):
    names = [f"n{number % 50}" for number in range(500)]
    reads = opened(write(tmp_path / "reads.fa", "".join(f">{name}\n{name}\n" for name in names)))
    for name in set(names):
        assert reads.find(name) == [number for number in range(500) if names[number] == name]
    assert reads.by_name("n7") == reads[7]


def test_an_unknown_name_is_a_key_error(file: Path):
    with pytest.raises(KeyError, match="'nobody'"):
        opened(file).by_name("nobody")
    assert opened(file).find("nobody") == []


@pytest.mark.parametrize("points", [False, True])
def test_blocks_of_a_stream_are_noted_only_if_they_are_wanted(points: bool, tmp_path: Path):
    file = tmp_path / "reads.fa.gz"
    file.write_bytes(bgzf(b">r\nACGT\n" * 1000))
    with (
        file.open("rb", buffering=0) as raw,
        closing(containers.open_stream(file, "bgzf", raw, points=points)) as stream,
    ):
        while stream.readinto(np.empty(1000, np.uint8)):
            pass
        assert (len(stream.take_blocks()) > 1) == (len(stream.take_crcs()) > 1) == points


def test_a_file_with_fewer_records_than_its_first_ones_let_expect_gets_a_table_of_names(tmp_path: Path):
    file = tmp_path / "reads.fa"
    file.write_text("".join(f">r{n}\nACGT\n" for n in range(60)) + ">last\n" + "ACGT" * 5000 + "\n")
    reads = opened(file, limits=IndexLimits(names=100, buffer_bytes=512))
    assert all(part.has_names for part in reads.parts)
    assert reads.find("r59") == [59] and reads.find("last") == [60]


def test_a_large_file_gets_its_name_table_on_the_first_lookup(file: Path, capsys: pytest.CaptureFixture[str]):
    reads = opened(file, header_regex=REGEX, limits=IndexLimits(names=100))
    assert not reads.parts[0].has_names
    name = MADE[250].header.decode()
    assert reads.find(name) == [250]
    assert "300 names" in capsys.readouterr().err
    assert opened(file).find(name) == [250] and opened(file).column("mate").to_pylist() == wanted_columns(300)["mate"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("where", ["beside", "index_dir"])
def test_a_name_table_is_built_next_to_the_index(where: str, file: Path, tmp_path: Path):
    place = tmp_path / "indexes" if where == "index_dir" else None
    assert opened(file, index_dir=place, limits=IndexLimits(names=100)).find(MADE[3].header.decode()) == [3]
    assert index_of(file).exists() == (place is None)
    assert opened(file, index_dir=place).parts[0].has_names


@pytest.mark.parametrize("count", [99, 100, 101, 2000])
def test_names_that_are_sorted_in_parts_on_disk_are_all_found(count: int, tmp_path: Path):
    names = [f"read{number % 1500}" for number in range(count)]
    file = write(tmp_path / "reads.fa", "".join(f">{name} x\nAC\n" for name in names))
    build_index(file, IndexSettings(names=True), limits=IndexLimits(names=100, name_parts=4, buffer_bytes=512))
    assert sorted(os.listdir(tmp_path)) == ["reads.fa", "reads.fa.millstream"]
    reads = opened(file)
    for name in {*names[::37], names[-1]}:
        assert reads.find(name) == [number for number in range(count) if names[number] == name]
    assert reads.find("nobody") == []


# -- regions


def genome(width: int, end: bytes = b"\n") -> tuple[list[Record], bytes]:
    rng = random.Random(width)
    made = [Record(b"chr%d" % number, bytes(rng.choices(b"ACGTacgtN", k=size)), None)
            for number, size in enumerate([1000, width * 7, 1, 0, width * 3 + 1, 777])]  # fmt: skip
    return made, fasta(made, width=width).replace(b"\n", end)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("memory", [None, 1])
def test_a_region_of_a_wrapped_genome_is_the_slice_of_its_bases(
    end: bytes, wrapper: str, memory: int | None, tmp_path: Path
):
    made, text = genome(60, end)
    file = write(tmp_path / "genome.fa", WRAPPERS[wrapper](text))
    reads = opened(file, memory=memory, limits=IndexLimits(point_bytes=300))
    rng = random.Random(0)
    for record in made:
        size, name = len(record.sequence), record.header.decode()
        edges = [*sorted(rng.choices(range(size + 1), k=12)), 0, min(60, size), min(59, size), min(61, size), size]
        for start in edges:
            for stop in edges:
                if start <= stop:
                    assert reads.region(name, start, stop).encode() == record.sequence[start:stop], (name, start, stop)


def test_the_last_bases_of_a_file_without_a_final_newline_can_be_read(tmp_path: Path):
    made, text = genome(50)
    for memory in (None, 1):
        reads = opened(write(tmp_path / "genome.fa", text.rstrip(b"\n")), memory=memory)
        assert reads.region(-1, 770, 777).encode() == made[-1].sequence[770:]
        assert holds(reads, made)


def test_a_region_of_an_irregular_record_is_right_too(tmp_path: Path):
    reads = opened(write(tmp_path / "genome.fa", ">a\nACGT\nAC\n\nGGGG GG\n;no\nTTTTTTT\n>b\nACGT\n"))
    assert [reads.region("a", start, start + 3) for start in range(17)] == [
        "ACGTACGGGGGGTTTTTTT"[start : start + 3] for start in range(17)
    ]


def test_a_region_of_a_compressed_genome_decodes_only_its_blocks(tmp_path: Path):
    _, text = genome(60)
    reads = opened(write(tmp_path / "genome.fa", WRAPPERS["bgzf"](text)))
    reads.region(5, 300, 310)
    assert reads.decoded_blocks <= 2


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (3, 2), (0, 1001), (1001, 1001)])
def test_a_region_outside_its_record_is_refused(start: int, end: int, tmp_path: Path):
    reads = opened(write(tmp_path / "genome.fa", genome(60)[1]))
    with pytest.raises(IndexError, match=f"{start}:{end} .*'chr0'.*1000"):
        reads.region("chr0", start, end)


def test_many_regions_of_several_files_are_fetched_in_one_call(tmp_path: Path):
    made, text = genome(60)
    odd = b">odd\nACGT\nAC\n\nGGGG GG\n;no\nTTTTTTT\n"
    write(tmp_path / "a.fa", text)
    write(tmp_path / "b.fa", WRAPPERS["bgzf"](text.replace(b"\n", b"\r\n")))
    write(tmp_path / "c.fa", odd + text)
    every = sequences_of([*made, *made, Record(b"odd", b"ACGTACGGGGGGTTTTTTT", None), *made])
    rng = np.random.default_rng(0)
    for memory in (None, 1):
        reads = opened(tmp_path, memory=memory)
        numbers = rng.integers(0, len(every), 300)
        edges = np.sort(rng.integers(0, reads.lengths(numbers)[:, None] + 1, (300, 2)), axis=1)
        wanted = [every[number][start:end] for number, (start, end) in zip(numbers, edges.tolist(), strict=True)]
        assert reads.regions(numbers, edges[:, 0], edges[:, 1]).sequences() == wanted
        assert [reads.region(n, a, b) for n, (a, b) in zip(numbers.tolist(), edges.tolist(), strict=True)] == wanted
    with pytest.raises(IndexError, match=r"0:1001 .*1000"):
        reads.regions([0], 0, 1001)


# -- several files


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, list[Record]]:
    """Three files, one of them FASTQ, one compressed, and things that are no reads."""
    place = tmp_path / "reads"
    place.mkdir()
    one, two, three = records(30), records(20, seed=1, quality=True, longest=200), records(25, seed=2, longest=40_000)
    write(place / "a.fa", fasta(one))
    write(place / "b.fq.gz", gzip.compress(fastq(two)))
    write(place / "c", WRAPPERS["zstd"](fasta(three)))
    write(place / "README.md", "# what this is\n")
    write(place / "table.tsv", "a\tb\n")
    return place, [*one, *two, *three]


def test_a_folder_is_one_collection(folder: tuple[Path, list[Record]]):
    place, made = folder
    for _ in range(2):  # the second time its indexes are there too
        reads = opened(place)
        assert [path.name for path in reads.paths] == ["a.fa", "b.fq.gz", "c"] and len(reads) == 75
        assert texts(reads) == sequences_of(made)


def test_reads_of_fasta_and_fastq_iterate_as_they_are_one_by_one(folder: tuple[Path, list[Record]]):
    reads = opened(folder[0])
    assert list(reads) == [reads[number] for number in range(75)]
    assert [read.quality is not None for read in reads] == [30 <= number < 50 for number in range(75)]


def test_a_slice_across_files_is_the_list_of_its_reads_also_backwards(folder: tuple[Path, list[Record]]):
    reads = opened(folder[0])
    assert reads[::-1] == [reads[number] for number in range(74, -1, -1)]
    assert reads[60:10:-7] == [reads[number] for number in range(60, 10, -7)]


def test_a_batch_across_files_keeps_the_requested_order(folder: tuple[Path, list[Record]]):
    place, made = folder
    order = np.random.default_rng(0).permutation(75)
    batch = opened(place, header_regex=REGEX).fetch(order, ["sequence", "name", "who", "tax_id", "len"])
    assert batch.sequences() == taken(made, order)
    assert batch.columns["name"] == [made[number].header.decode() for number in order]
    assert list(batch.columns["len"]) == [len(made[number].sequence) for number in order]


def test_the_table_of_files_with_values_of_different_size_is_one_table(folder: tuple[Path, list[Record]]):
    place, made = folder
    table = opened(place, header_regex=REGEX).table
    assert table["length"].to_pylist() == [len(record.sequence) for record in made]
    assert table["len"].to_pylist() == table["length"].to_pylist()
    assert table["who"].to_pylist() == [f"r{number}" for count in (30, 20, 25) for number in range(count)]


def test_a_text_that_is_in_one_index_and_not_in_another_is_one_column(tmp_path: Path):
    write(tmp_path / "few.fa", fasta(MADE[:5]))
    opened(write(tmp_path / "many.fa", fasta(MADE)), header_regex=REGEX, limits=IndexLimits(distinct=100))
    reads = opened(tmp_path, header_regex=REGEX)
    wanted = [f"r{number}" for number in [*range(5), *range(300)]]
    assert reads.column("who").to_pylist() == wanted and "who" not in reads.table.column_names
    assert reads.fetch(range(305), ["who"]).columns["who"] == wanted


def test_a_column_that_is_all_null_in_one_file_is_one_column(tmp_path: Path):
    write(tmp_path / "a.fa", ">n\nAC\n")
    write(tmp_path / "b.fa", ">n5\nAC\n>n1000\nAC\n")
    reads = opened(tmp_path, header_regex=r"n(?P<number>\d*)", mapping={"number": [5, 1000], "kind": ["x", "y"]})
    assert reads.column("number").to_pylist() == [None, 5, 1000]
    assert reads.column("kind").to_pylist() == [None, "x", "y"]
    assert reads.table["label"].to_pylist() == [None, 0, 1]
    assert reads.fetch([0, 2]).columns["kind"] == [None, "y"]


def test_names_are_found_in_every_file(folder: tuple[Path, list[Record]]):
    place, made = folder
    reads = opened(place)
    for number, record in enumerate(made):
        assert number in reads.find(record.header.decode())
    assert reads.region(made[60].header.decode(), 5, 9).encode() == made[60].sequence[5:9]


def test_a_pattern_and_a_list_are_collections_in_their_order(folder: tuple[Path, list[Record]]):
    place, made = folder
    assert texts(opened(f"{place}/?.f*")) == sequences_of(made[:50])
    assert texts(opened([place / "c", place / "a.fa"])) == sequences_of(made[50:] + made[:30])


def test_one_of_several_files_may_have_no_records(tmp_path: Path):
    write(tmp_path / "a.fa", fasta(MADE[:5]))
    write(tmp_path / "b.fa", ">odd\nAC\n")
    write(tmp_path / "c.fa", fasta(MADE[5:9]))
    reads = opened(tmp_path, header_regex=REGEX, on_mismatch="skip")
    assert holds(reads, MADE[:9]) and reads.column("who").to_pylist() == [f"r{number}" for number in range(9)]


# -- compressed files


@given(data=st.data(), flush=st.sampled_from([zlib.Z_PARTIAL_FLUSH, zlib.Z_SYNC_FLUSH, zlib.Z_FULL_FLUSH]))
@few
def test_decoding_may_start_at_any_block_of_a_gzip_file(tmp_path: Path, data: st.DataObject, flush: int):
    made = MADE[: data.draw(st.integers(1, 60))]
    size, spacing = data.draw(st.integers(10, 500)), data.draw(st.sampled_from([1, 200, 5000]))
    file = write(tmp_path / "reads.fa", flushed(fasta(made), size, flush=flush))
    index_of(file).unlink(missing_ok=True)
    reads = opened(file, memory=1, limits=IndexLimits(point_bytes=spacing))
    order = np.random.default_rng(size).permutation(len(made))
    assert reads.fetch(order).sequences() == taken(made, order)
    assert [reads[number].sequence for number in order] == taken(made, order)


@pytest.mark.parametrize("level", [0, 1, 9])
def test_stored_blocks_may_occur_anywhere_in_a_gzip_file(level: int, tmp_path: Path):
    """As pigz writes them between its pieces, and every deflater for what cannot be made smaller."""
    deflate = zlib.compressobj(level, zlib.DEFLATED, 31)
    text, data = fasta(MADE), b""
    for number, at in enumerate(range(0, len(text), 333)):
        data += deflate.compress(text[at : at + 333])
        data += deflate.flush([zlib.Z_PARTIAL_FLUSH, zlib.Z_SYNC_FLUSH, zlib.Z_BLOCK][number % 3])
    file = write(tmp_path / "reads.fa", data + deflate.flush())
    reads = opened(file, memory=1, limits=IndexLimits(point_bytes=1))
    assert holds(reads, MADE) and reads.parts[0].sections.rows("block.plain") > 10


def test_a_gzip_file_of_megabytes_gets_seek_points(tmp_path: Path):
    made = records(100, longest=120_000)
    reads = opened(write(tmp_path / "reads.fa.gz", gzip.compress(fasta(made), 1)))
    points = reads.parts[0].sections.rows("block.plain")
    assert 1 < points <= len(fasta(made)) // (1 << 20) + 1
    assert reads[99].sequence == sequences_of(made)[99] and reads.decoded_blocks <= 2
    order = np.random.default_rng(0).permutation(100)
    assert reads.fetch(order).sequences() == taken(made, order)


@pytest.mark.parametrize("data", ["members", "gzip"])
def test_a_gzip_member_may_be_empty(data: str, tmp_path: Path):
    nothing = gzip.compress(b"")
    text = nothing + WRAPPERS[data](fasta(MADE[:100])) + nothing * 3 + WRAPPERS[data](fasta(MADE[100:])) + nothing
    assert holds(opened(write(tmp_path / "reads.fa", text)), MADE)


@pytest.mark.parametrize("wrapper", COMPRESSED)
def test_without_seek_points_the_same_text_is_decoded(wrapper: str, tmp_path: Path):
    write(tmp_path / "reads.fa", WRAPPERS[wrapper](fasta(MADE)))
    for points in (True, False):
        raw = open_raw(tmp_path / "reads.fa")
        stream = containers.open_stream(
            tmp_path / "reads.fa", containers.sniff(tmp_path / "reads.fa"), raw, points=points
        )
        out = np.empty(1 << 20, np.uint8)
        assert out[: stream.readinto(out)].tobytes() == fasta(MADE)
        stream.close()
        raw.close()


# -- memory


@pytest.mark.parametrize("wrapper", COMPRESSED)
def test_decoded_blocks_stay_within_the_memory_budget_plus_one_block(wrapper: str, tmp_path: Path):
    made = records(2000)
    write(tmp_path / "reads.fa", WRAPPERS[wrapper](fasta(made)))
    reads = opened(tmp_path / "reads.fa", memory="10kB", limits=IndexLimits(point_bytes=1))
    rng = np.random.default_rng(0)
    for _ in range(50):
        numbers = rng.integers(0, 2000, 20)
        assert reads.fetch(numbers).sequences() == taken(made, numbers)
        assert 0 < reads.held_bytes <= 10_000 + 400
    assert holds(opened(tmp_path / "reads.fa", memory=1), made)


def test_a_plain_file_larger_than_the_memory_budget_is_read_on_demand(tmp_path: Path):
    made = records(500, longest=300, quality=True)
    write(tmp_path / "reads.fq", fastq(made))
    reads, mapped = opened(tmp_path / "reads.fq", memory="10kB"), opened(tmp_path / "reads.fq", memory="10MB")
    assert holds(reads, made) and holds(mapped, made)
    assert reads.held_bytes == 0 and mapped.held_bytes == (tmp_path / "reads.fq").stat().st_size


def test_a_wrapped_file_larger_than_the_memory_budget_gives_the_same_reads(tmp_path: Path):
    made = records(200, longest=300)
    write(tmp_path / "reads.fa", fasta(made, width=17))
    assert holds(opened(tmp_path / "reads.fa", memory=1), made)


def test_files_share_the_memory_budget(tmp_path: Path):
    made = records(500)
    for name in "abcd":
        write(tmp_path / f"{name}.fa", WRAPPERS["bgzf"](fasta(made)))
    reads = opened(tmp_path, memory="8kB")
    texts(reads)
    assert 0 < reads.held_bytes <= 8000 + 4 * 400


@pytest.mark.parametrize("wrapper", COMPRESSED)
def test_in_window_order_every_block_is_decoded_exactly_once(wrapper: str, tmp_path: Path):
    made = [record for record in records(3000) if record.sequence]
    write(tmp_path / "reads.fa", WRAPPERS[wrapper](fasta(made)))
    window = 300
    reads = opened(tmp_path / "reads.fa", memory=2 * window * 90, limits=IndexLimits(point_bytes=1))
    rng = np.random.default_rng(0)
    for start in range(0, len(made), window):
        numbers = start + rng.permutation(min(window, len(made) - start))
        for batch in np.array_split(numbers, 10):
            assert reads.fetch(batch).sequences() == taken(made, batch)
    blocks = reads.parts[0].sections.rows("block.plain")
    assert 50 < blocks - 1 <= reads.decoded_blocks <= blocks  # of gzip, the last one may be empty


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("memory", [1, "10MB"])
def test_many_threads_read_what_one_does(wrapper: str, memory: int | str, tmp_path: Path):
    write(tmp_path / "reads.fa", WRAPPERS[wrapper](fasta(MADE)))
    reads = opened(tmp_path / "reads.fa", memory=memory, header_regex=REGEX)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(5):
            numbers = rng.integers(0, 300, 50)
            assert reads.fetch(numbers).sequences() == taken(MADE, numbers)
            assert reads[int(numbers[0])].columns["who"] == f"r{numbers[0]}"
            assert reads.find(MADE[numbers[1]].header.decode()) == [numbers[1]]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(16)))


@pytest.mark.parametrize("memory", [1, "10MB"])
def test_a_deleted_collection_keeps_no_file_open(memory: int | str, tmp_path: Path):
    files = [write(tmp_path / f"{wrapper}.fa", wrap(fasta(MADE))) for wrapper, wrap in WRAPPERS.items()]
    for file in files:
        opened(file, memory=memory)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for file in files * 5:
        texts(opened(file, memory=memory))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


# -- pickles


def test_a_pickle_is_small_and_reads_the_same(file: Path):
    reads = opened(file, header_regex=REGEX, mapping={number: f"c{number}" for number in range(7)}, memory="1MB")
    data = pickle.dumps(reads)
    again = pickle.loads(data)
    assert len(data) < 2000 and repr(again) == repr(reads) and list(again) == list(reads)


def test_a_pickle_of_a_relative_path_opens_from_another_folder(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(file.parent)
    data = pickle.dumps(opened(file.name, index_dir="indexes"))
    monkeypatch.chdir("/")
    assert holds(pickle.loads(data), MADE)


def test_rebuild_replaces_every_index(file: Path):
    opened(file)
    before = index_of(file).stat().st_ino
    assert holds(open_reads([file], rebuild=True), MADE) and index_of(file).stat().st_ino != before


def test_rebuilding_an_index_gives_the_same_bytes(file: Path):
    first = build_index(file, IndexSettings(header_regex=REGEX)).read_bytes()
    assert build_index(file, IndexSettings(header_regex=REGEX)).read_bytes() == first


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="open files are counted in /proc")
@pytest.mark.parametrize("wrapper", ["plain", "gzip", "zstd"])
def test_no_file_of_a_folder_is_held_open(tmp_path: Path, wrapper: str):
    for number in range(12):
        (tmp_path / f"{number:02d}.fa").write_bytes(WRAPPERS[wrapper](fasta(records(30, seed=number))))
    opened(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    reads = opened(tmp_path, memory=1000)  # less than a plain file has, so that it is not mapped
    assert len(texts(reads)) == 12 * 30
    assert len(os.listdir("/proc/self/fd")) == before
