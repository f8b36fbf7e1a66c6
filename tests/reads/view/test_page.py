"""The view of reads: responses match the files and read little of them."""

import gzip
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.core.console import ignore_message
from millstream.errors import BadSetting, BadSource
from millstream.reads.files.index import IndexLimits, IndexSettings, build_index
from millstream.reads.open import open_reads
from millstream.reads.pack.pack import pack
from millstream.reads.view import Records, view_of
from millstream.reads.view.statistics import Lengths, Sample, ValueCounts
from millstream.view import Query, View, plain
from millstream.view.server import views_of
from support.effort import num_examples
from support.remote_stores import remote, upload
from support.s3_server import Bucket

pytest.importorskip("tokenizers", reason="no tokenizer files: pip install 'millstream[reads]'")

HEADERS = r"^lbl\|(?P<class_id>\d+)?\|(?P<group>\w+)\|(?P<name>\S+)$"
COMPLEMENT = str.maketrans("ACGTNacgtn", "TGCANtgcan")


def bases_of(rng: np.random.Generator, count: int) -> str:
    return rng.choice(list("ACGTN"), count, p=[0.2, 0.3, 0.3, 0.19, 0.01]).astype("S1").tobytes().decode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of FASTQ, the second one compressed; a class is missing here and there."""
    rng = np.random.default_rng(3)
    folder = tmp_path_factory.mktemp("reads") / "both"
    folder.mkdir()
    for name, first, opened in (("a.fq", 0, open), ("b.fq.gz", 120, gzip.open)):
        with opened(folder / name, "wt") as file:
            for number in range(first, first + 120):
                bases = bases_of(rng, int(rng.integers(1, 90)))
                grades = "".join(map(chr, rng.integers(33, 74, len(bases))))
                class_id = "" if number % 50 == 49 else number % 7 + 10
                file.write(f"@lbl|{class_id}|{'even' if number % 2 == 0 else 'odd'}|read{number}\n")
                file.write(f"{bases}\n+\n{grades}\n")
    ms.open(folder, header_regex=HEADERS)
    return folder


@pytest.fixture(scope="module")
def genome(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wrapped record of 200,000 bases, and a short one in lower case."""
    bases = bases_of(np.random.default_rng(4), 200_000)
    file = tmp_path_factory.mktemp("genome") / "genome.fa"
    lines = "\n".join(bases[at : at + 70] for at in range(0, len(bases), 70))
    file.write_text(f">chr1 of something\n{lines}\n>plasmid\nacgtnacgtacgtaaccggtt\n")
    return file


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer file with merges, and tokens around every read."""
    from tokenizers import Tokenizer, models, processors

    vocab = {token: number for number, token in enumerate(["[BOS]", "[EOS]", *"ACGTN", "AC", "GT", "ACGT", "CC"])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("A", "C"), ("G", "T"), ("AC", "GT"), ("C", "C")]))
    made.post_processor = processors.TemplateProcessing(
        single="[BOS] $A [EOS]", special_tokens=[("[BOS]", 0), ("[EOS]", 1)]
    )
    place = tmp_path_factory.mktemp("tokenizer")
    made.save(str(place / "tokenizer.json"))
    return place


def query(view: View, name: str, /, **values: object) -> Mapping[str, Any]:
    """Repeat the query until everything is counted, as a page does."""
    while True:
        answer = plain(view.answers[name](Query({key: str(value) for key, value in values.items()})))
        json.dumps(answer, allow_nan=False)
        assert isinstance(answer, dict)
        if all(map(is_whole, [answer, *answer.values()])):
            return answer


def is_whole(answer: Any) -> bool:
    if not isinstance(answer, dict):
        return True
    is_counted = "counted" not in answer or answer["counted"] == answer["total"]
    return is_counted and answer.get("is_done", True) and not answer.get("is_making")


def test_the_overview_matches_the_collection(folder: Path):
    reads, shown = ms.open(folder), query(view_of(folder), "overview")
    assert (shown["reads"], shown["bases"], shown["bytes"]) == (len(reads), reads.num_bases, reads.num_bytes)
    assert [file["name"] for file in shown["files"]] == ["a.fq", "b.fq.gz"] and shown["has_quality"]
    assert [column["name"] for column in shown["columns"]] == reads.column_names


@settings(max_examples=num_examples(25), deadline=None)
@given(
    lengths=st.lists(
        st.one_of(st.integers(0, 300), st.sampled_from([0, 1, 65_535, 65_536, 70_000])), min_size=1, max_size=30
    )
)
def test_length_bars_sum_to_the_reads_and_statistics_equal_numpy(tmp_path_factory, lengths: list[int]):
    file = tmp_path_factory.mktemp("lengths") / "reads.fa"
    file.write_text("".join(f">r\n{'A' * length}\n" for length in lengths))
    shown: Mapping[str, Any] = plain(Lengths(open_reads([file])).summary(None))  # type: ignore[assignment]
    bars = shown["bars"]
    assert shown["counted"] == shown["total"] == sum(bars["count"]) == len(lengths)
    assert bars["from"][1:] == bars["to"][:-1]
    for low, high, count in zip(bars["from"], bars["to"], bars["count"], strict=True):
        assert count == sum(low <= length < high for length in lengths)
    ordered = sorted(lengths)
    assert (shown["shortest"], shown["longest"]) == (ordered[0], ordered[-1])
    assert shown["median"] == ordered[(len(ordered) - 1) // 2] and shown["mean"] == pytest.approx(np.mean(lengths))
    long = [length for length in lengths if length >= shown["n50"]]
    assert 2 * sum(long) >= sum(lengths) > 2 * sum(length for length in long if length > shown["n50"]) - 1


def test_every_record_equals_the_collection(folder: Path):
    reads, view = ms.open(folder), view_of(folder)
    for number in (0, 49, 119, 120, 121, 239):
        read, shown = reads[number], query(view, "record", number=number)
        assert (shown["name"], shown["bases"], shown["quality"]) == (read.name, read.sequence, read.quality)
        assert shown["columns"] == dict(read.columns) and shown["length"] == len(read)
        assert shown["row"] == number % 120 and shown["file"] == ("a.fq" if number < 120 else "b.fq.gz")


def test_reads_by_url_are_shown_as_local_ones(folder: Path, s3: Bucket, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    url = upload(folder, f"{s3.url}/reads")  # with their indexes
    (there,) = views_of(remote(url), notify=ignore_message)
    here = view_of(folder)
    for name, asked in (
        ("overview", {}),
        ("lengths", {}),
        ("composition", {}),
        ("classes", {"column": "group"}),
        ("list", {"first": 100, "count": 40}),
        ("record", {"number": 130, "tokenizer": "kmer(3)"}),
        ("find", {"name": "lbl|10|even|read0"}),
    ):
        ours, theirs = query(there, name, **asked), query(here, name, **asked)
        for file in [*ours.get("files", ()), *theirs.get("files", ())]:
            del file["folder"]
        assert ours == theirs


@pytest.mark.parametrize("form", ["pack", "zst"])
def test_packed_and_compressed_reads_are_shown_unchanged(form: str, folder: Path, tmp_path: Path):
    reads = ms.open(folder / "a.fq")
    if form == "pack":
        file = tmp_path / "a.pack"
        pack([folder / "a.fq"], file, notify=ignore_message)
    else:
        zstandard = pytest.importorskip("zstandard")
        file = tmp_path / "a.fq.zst"
        file.write_bytes(zstandard.compress((folder / "a.fq").read_bytes()))
    view = view_of(file)
    for number in (0, 77, 119):
        shown = query(view, "record", number=number, tokenizer="base")
        assert (shown["name"], shown["bases"], shown["quality"]) == (
            reads[number].name, reads[number].sequence, reads[number].quality
        )  # fmt: skip
    assert query(view, "find", name=reads[5].name)["numbers"] == [5]
    assert query(view, "composition")["bases"] == reads.num_bases == query(view, "overview")["bases"]
    assert [row["name"] for row in query(view, "list", first=100)["rows"]] == [read.name for read in reads[100:]]


def test_a_page_of_the_list_spans_files(folder: Path):
    reads, rows = ms.open(folder), query(view_of(folder), "list", first=110, count=20)["rows"]
    assert [row["number"] for row in rows] == list(range(110, 130))
    for row, read in zip(rows, reads[110:130], strict=True):
        assert (row["name"], row["length"], row["bases"]) == (read.name, len(read), read.sequence[:60])
        assert row["columns"]["class_id"] == read.columns["class_id"]
    assert query(view_of(folder), "list", first=239, count=20)["rows"][-1]["number"] == 239
    assert query(view_of(folder), "list", first=999)["rows"] == []


def test_a_name_is_found_even_without_a_name_table(folder: Path, tmp_path: Path):
    name = ms.open(folder)[130].name
    assert query(view_of(folder), "find", name=name)["numbers"] == [130]
    assert query(view_of(folder), "find", name="nobody")["numbers"] == []
    file = tmp_path / "reads.fa"
    file.write_text("".join(f">r{number % 5}\nACGT\n" for number in range(10)))
    build_index(file, IndexSettings(), limits=IndexLimits(names=3))
    reads = open_reads([file])
    assert not reads.parts[0].has_names
    assert Records(reads).find("r3", seconds=600) == {"is_making": False, "numbers": [3, 8], "found": 2}


def test_only_the_window_of_a_long_record_is_read(genome: Path):
    reads, view = ms.open(genome), view_of(genome)
    shown = query(view, "record", number=0, start=123_456, count=500)
    assert shown["bases"] == reads.region(0, 123_456, 123_956) and (shown["start"], shown["end"]) == (
        123_456,
        123_956,
    )
    assert query(view, "record", number=0, start=199_990, count=500)["bases"] == reads[0].sequence[-10:]
    assert len(query(view, "record", number=0, count=10**9)["bases"]) == 20_000
    assert query(view, "record", number=0, start=10**12)["bases"] == ""


def test_the_reverse_complement_has_its_own_positions(genome: Path, folder: Path):
    turned = ms.open(genome)[0].sequence[::-1].translate(COMPLEMENT)
    shown = query(view_of(genome), "record", number=0, start=1000, count=200, reverse=1)
    assert shown["bases"] == turned[1000:1200]
    read, shown = ms.open(folder)[130], query(view_of(folder), "record", number=130, reverse=1)
    assert shown["bases"] == read.sequence[::-1].translate(COMPLEMENT) and shown["quality"] == read.quality[::-1]


SPECS = ["base", "kmer(3)", "kmer(4, stride=4)", "kmer(3, stride=5, canonical=True)", "kmer(31)", "given"]


@pytest.mark.parametrize("spec", SPECS)
def test_tokens_equal_those_of_training_and_cover_their_bases(spec: str, folder: Path, bpe: Path):
    reads, view = ms.open(folder), view_of(folder, tokenizer=str(bpe))
    feature = ms.features.tokens(f"hf({bpe})" if spec == "given" else spec, dtype=np.int64)
    for number in (0, 7, 49, 130, 200):
        batch: Any = feature(reads.fetch([number], feature.fields))
        ids = batch["input_ids"][0].tolist()
        shown = query(view, "record", number=number, tokenizer=spec)
        tokens, bases = shown["tokens"], shown["bases"]
        assert (ids[1:-1] if spec == "given" else ids) == [int(one) for one in tokens["ids"]]
        pieces = [bases[a:b] for a, b in zip(tokens["starts"], tokens["ends"], strict=True)]
        assert pieces == tokens["texts"]
        if spec in ("base", "given"):
            assert "".join(pieces) == bases
        if spec == "kmer(4, stride=4)":
            assert "".join(pieces) == bases[: len(bases) // 4 * 4]
        assert [tokens["before"], tokens["after"]] == ([["[BOS] (0)"], ["[EOS] (1)"]] if spec == "given" else [[], []])


@pytest.mark.parametrize("spec", ["kmer(5, stride=3)", "kmer(6)", "kmer(3, stride=7)"])
@pytest.mark.parametrize("reverse", [0, 1])
def test_windows_of_a_long_record_show_the_tokens_of_the_whole_record(spec: str, reverse: int, genome: Path):
    view = view_of(genome)
    whole = ms.features.tokens(spec, reverse_complement=bool(reverse), dtype=np.int64)
    batch: Any = whole(ms.open(genome).fetch([0], ["sequence"]))
    found: list[tuple[int, int]] = []
    for start in range(60_000, 61_000, 250):
        shown = query(view, "record", number=0, start=start, count=250, tokenizer=spec, reverse=reverse)["tokens"]
        found += zip(shown["starts"], shown["ids"], strict=True)
    stride = found[1][0] - found[0][0]
    assert [at for at, _ in found] == list(range(-(-60_000 // stride) * stride, 61_000, stride))
    assert [one for _, one in found] == [int(batch["input_ids"][0][at // stride]) for at, _ in found]


def test_lower_case_bases_are_shown_unchanged_and_tokenized_like_training(genome: Path):
    shown = query(view_of(genome), "record", number=1, tokenizer="kmer(4, stride=4)")
    assert shown["bases"].startswith("acgtnacg") and shown["tokens"]["texts"][:2] == ["ACGT", "NACG"]


def test_a_page_cannot_make_the_server_open_a_file(folder: Path, bpe: Path):
    view = view_of(folder)
    for spec in (f"hf({bpe})", str(bpe), "hf(x)", "__import__('os')", "kmer(open('x'))", "kmer(0)", "kmer(99)"):
        shown = query(view, "record", number=0, tokenizer=spec)
        assert shown["tokens"] is None and shown["bases"] and shown["tokens_error"]
    assert "--tokenizer" in query(view, "record", number=0, tokenizer=f"hf({bpe})")["tokens_error"]
    assert query(view, "record", number=0, tokenizer="given")["tokens"] is None


def test_a_tokenizer_that_no_parser_can_read_is_an_error_that_the_page_shows(folder: Path):
    for spec in ("kmer(---1)", f"kmer({'-' * 50_000}1)", f"kmer({'(' * 5_000}", f"kmer({'9' * 5_000})"):
        shown = query(view_of(folder), "record", number=0, tokenizer=spec)
        assert shown["tokens"] is None and len(shown["tokens_error"]) < 400


def test_class_counts_equal_the_column(folder: Path):
    reads, view = ms.open(folder), view_of(folder)
    for column in ("class_id", "group"):
        shown = query(view, "classes", column=column, count=100)
        values = reads.column(column)
        expected = {row["values"]: row["counts"] for row in pc.value_counts(values.drop_null()).to_pylist()}
        assert dict(shown["rows"]) == expected and shown["without"] == values.null_count
        counts = [count for _, count in shown["rows"]]
        assert counts == sorted(counts, reverse=True) and sum(counts) + shown["without"] == shown["counted"] == len(
            reads
        )


def test_class_counts_are_searched_and_paged(folder: Path):
    view = view_of(folder)
    whole = query(view, "classes", column="class_id", count=100)["rows"]
    pages = [query(view, "classes", column="class_id", first=first, count=3)["rows"] for first in (0, 3, 6, 9)]
    assert [row for page in pages for row in page] == whole
    odd = query(view, "classes", column="group", search="OD")
    assert [row[0] for row in odd["rows"]] == ["odd"] and (odd["found"], odd["found_reads"]) == (1, 120)
    with pytest.raises(BadSetting, match="genus"):
        query(view, "classes", column="genus")


def test_counts_cover_all_chunks(folder: Path):
    reads: Any = ms.open(folder)
    shown = ValueCounts(reads, "class_id", chunk_reads=17).summary(most=99, seconds=None)
    assert dict(shown["rows"]) == Counter(value for value in reads.column("class_id").to_pylist() if value)  # type: ignore
    assert Lengths(reads, chunk_reads=17).summary(None)["counted"] == 240


def test_small_files_are_counted_completely(folder: Path):
    reads, shown = ms.open(folder), query(view_of(folder), "composition")
    bases = Counter("".join(read.sequence for read in reads))
    assert shown["reads"] == shown["of"] == 240 and not shown["is_cut"] and shown["bases"] == sum(bases.values())
    assert dict(shown["shares"]) == pytest.approx({k: v / sum(bases.values()) for k, v in bases.items()})
    assert shown["gc_mean"] == pytest.approx((bases["G"] + bases["C"]) / (sum(bases.values()) - bases["N"]))
    assert sum(shown["gc"]["count"]) <= 240 and shown["quality"]["position"][:3] == [0, 1, 2]
    first = sorted(ord(read.quality[0]) - 33 for read in reads)
    assert shown["quality"]["median"][0] == first[len(first) // 2 - 1]


def test_large_files_are_sampled_from_all_over(tmp_path: Path):
    file = tmp_path / "reads.fa"
    file.write_text("".join(f">r\n{('A' if number < 5000 else 'G') * 8}\n" for number in range(10_000)))
    shown = Sample(open_reads([file])).summary(None)
    assert shown["of"] == 10_000 and shown["reads"] == 4096 and shown["places"] == 64
    assert dict(shown["shares"])["A"] == pytest.approx(0.5, abs=0.05)  # type: ignore[call-overload]


def test_records_are_weighted_by_length(tmp_path: Path):
    file = tmp_path / "contigs.fa"
    file.write_text(f">long\n{'A' * 3_000_000}\n" + "".join(f">s{number}\n{'G' * 1000}\n" for number in range(1000)))
    shown = Sample(open_reads([file])).summary(None)
    assert dict(shown["shares"]) == pytest.approx({"A": 0.75, "G": 0.25})  # type: ignore[call-overload]
    assert shown["is_cut"] and int(shown["bases"]) < 2_100_000  # type: ignore[call-overload]


def test_a_page_from_the_middle_of_a_gzip_decodes_a_block_or_two(tmp_path: Path):
    rng = np.random.default_rng(0)
    file = tmp_path / "reads.fa.gz"
    bases = np.frombuffer(b"ACGT", np.uint8)[rng.integers(0, 4, 6_000_000)].tobytes().decode()
    text = "".join(f">r{number}\n{bases[2000 * number : 2000 * number + 2000]}\n" for number in range(3000))
    with gzip.open(file, "wt", compresslevel=1) as out:
        out.write(text)
    reads: Any = ms.open(file)
    records, before = Records(reads), reads.decoded_blocks
    assert records.page(1500, 10)[0]["name"] == "r1500"
    assert reads.decoded_blocks - before <= 2 < reads.num_bases // reads.medium.run_bytes
    assert Sample(reads).summary(None)["is_done"]
    records.one(2900, start=0, count=100, tokenizer=lambda: None)


def test_proteins_are_shown_and_have_no_complement(tmp_path: Path):
    file = tmp_path / "proteins.fa"
    file.write_text(">p1\nMKTAYIAKQRQISFVKSHFSRQ\n")
    view = view_of(file)
    shown = query(view, "record", number=0, tokenizer="kmer(3)")
    assert shown["bases"].startswith("MKTAY") and "another tokenizer" in shown["tokens_error"]
    assert query(view, "composition")["gc"] is None
    with pytest.raises(BadSource, match="F I"):
        query(view, "record", number=0, reverse=1)


def test_invalid_and_out_of_range_numbers_are_rejected(folder: Path):
    view = view_of(folder)
    with pytest.raises(BadSetting, match="record 240"):
        query(view, "record", number=240)
    for wrong in ("-1", "x", "1.5"):
        with pytest.raises(BadSetting, match="number="):
            query(view, "record", number=wrong)


def test_an_unknown_tokenizer_is_rejected_before_anything_is_shown(folder: Path):
    for wrong in ("kmer(0)", "nothing", "hf(/no/such/folder)"):
        with pytest.raises((BadSetting, BadSource)):
            view_of(folder, tokenizer=wrong)


def test_classes_have_their_names_in_the_mapping(folder: Path, tmp_path: Path):
    names = {10: "Escherichia coli", 12: "Salmonella enterica"}  # other classes of the reads are unknown
    rows = [f"{class_id}\t{name}\t{name.split()[0]}\n" for class_id, name in names.items()]
    (tmp_path / "species.tsv").write_text("class_id\tspecies\tgenus\n" + "".join(rows))
    (view,) = views_of(folder, mapping=tmp_path / "species.tsv", notify=ignore_message)
    shown = query(view, "classes", column="class_id", count=100)
    found = {value: name for (value, _), name in zip(shown["rows"], shown["names"], strict=True)}
    assert found == {class_id: names.get(class_id, "") for class_id in range(10, 17)}
    assert [row[0] for row in query(view, "classes", column="class_id", search="salmo")["rows"]] == [12]
    assert not any(query(view, "classes", column="group")["names"])
    assert [column["name"] for column in query(view, "overview")["columns"]] == ["class_id", "group", "name"]
    record = query(view, "record", number=0)
    assert record["columns"]["species"] == "Escherichia coli" and record["columns"]["genus"] == "Escherichia"
    (tmp_path / "files.tsv").write_text("file\tspecies\na.fq\tSalmonella enterica\nb.fq.gz\tEscherichia coli\n")
    (view,) = views_of(folder, mapping=tmp_path / "files.tsv", notify=ignore_message)
    shown = query(view, "classes", column="class_id", count=100)
    assert (shown["rows"], shown["names"]) == ([[0, 120], [1, 120]], ["Salmonella enterica", "Escherichia coli"])
