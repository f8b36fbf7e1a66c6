"""Header regexes: whichever way headers are parsed, the columns are those of Python's `re`."""

import re

import numpy as np
import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from millstream.errors import BadSource
from millstream.reads.files.header_regex import tree_of
from millstream.reads.files.header_shape import Shape
from millstream.reads.files.headers import HeaderColumn, Headers, Integers, Parsed
from support.effort import num_examples

SEED = r"^lbl\|(?P<class_id>\d+)\|(?P<tax_id>\d+)?\|(?P<readlen>\d+)?\|(?P<name>[^/\s]+)(?:/(?P<mate>\d+))?$"
ILLUMINA = (
    r"(?P<instrument>[^:]+):(?P<run>\d+):(?P<flowcell>[A-Za-z0-9-]+):(?P<lane>\d+):(?P<tile>\d+):(?P<x>\d+):(?P<y>\d+)"
    r" (?P<mate>[12]):(?P<filtered>[YN]):(?P<control>\d+):(?P<index>[ACGTN+]*)$"
)

# What people would write, each with a header that it matches.
DELIMITED = [
    (SEED, "lbl|12|562|150|NC_000913.3-1/2"),
    (SEED, "lbl|12|||read_é"),
    (r"lbl\|(?P<class_id>\d+)\|", "lbl|7|rest"),
    (r"(?P<acc>\S+)", "NC_000913.3 Escherichia coli"),
    (r"^(?P<acc>[^ ]+) (?P<desc>.*)$", "NC_1.3 Escherichia coli"),
    (r"^(?P<acc>\S+)\s*(?P<desc>.*)$", "NC_1.3  E. coli"),
    (r"^(?P<acc>[^ ]+)(?: (?P<desc>.+))?", "NC_1.3 E. coli"),
    (r"(?P<acc>[A-Z]{2}_\d{6,9}\.\d+)", "NC_000913.3"),
    (r"kraken:taxid\|(?P<tax_id>\d+)", "kraken:taxid|562|NC_1"),
    (r"kraken:taxid\|(?P<tax_id>\d+)\|(?P<acc>\S+)\s*(?P<rest>.*)", "kraken:taxid|562|NC_1  x"),
    (ILLUMINA, "A00:36:HX-1:1:1101:1289:1000 1:N:0:ACGT+AC"),
    (r"(?P<name>[^;]+);size=(?P<size>\d+)", "otu1;size=42"),
    (r"(?P<name>[^;]+);size=(?P<size>\d+);?$", "otu1;size=42;"),
    (r"id=(?P<id>\w+) len=(?P<len>\d*) gc=(?P<gc>[0-9.]+)", "id=a_1 len=20 gc=0.5"),
    (r"gi\|(?P<gi>\d+)\|(?P<db>gb|emb)?\|", "gi|1|gb|"),
    (r"gi\|(?P<gi>\d+)\|ref\|(?P<acc>[^|]+)\|\s?(?P<desc>.*)", "gi|12|ref|NC_1.1| E. coli"),
    (r"(?:sp|tr)\|(?P<acc>\w+)\|(?P<entry>\w+)", "sp|P1|X_HUMAN"),
    (r"(?P<db>[a-z]+)\|(?P<acc>\w+)\|(?P<entry>\w+)_(?P<species>\w+)", "sp|P1|X_HUMAN"),
    (r"contig_(?P<number>[0-9]+)_length_(?P<length>\d+)_cov_(?P<cov>[\d.]+)$", "contig_1_length_20_cov_1.5"),
    (r"(?P<sample>\w+)\.(?P<read>\d{1,9})(?:/(?P<mate>[12]))?(?:\s|$)", "ERR1.12/1 x"),
    (r"(?P<sample>[ED]RR\d+)\.(?P<read>\d+)(?:[./](?P<mate>[12]))?(?: .*)?$", "ERR12.3/1 length=5"),
    (r"(?P<chrom>chr(?:\d+)?[XYM]?):(?P<start>\d+)-(?P<end>\d+)\((?P<strand>[+-])\)", "chr12X:1-200(+)"),
    (r"(?P<a>\d+)?(?:_(?P<b>[a-z]+)(?:-(?P<c>\d+))?)?", "12_ab-3"),
    (r"^(?P<a>x?(?:y(?P<b>\d+))?z)?(?P<rest>.*)$", "xy12z!"),
    (r"(?P<barcode>[ACGT]{8})(?P<umi>[ACGT]{4})(?P<rest>\S*)", "ACGTACGTTTTTxx"),
    (r"(?P<year>20\d\d)(?P<rest>[-_].*)?$", "2024-a"),
    (r"\w+\s+(?P<genus>[A-Z][a-z]+)\s+(?P<species>[a-z]+)", "NC_1  Escherichia coli K"),
    (r"(?P<key>[^=\s]+)=(?P<value>[^,]*)(?:,(?P<key2>[^=]+)=(?P<value2>\d+))?", "a=b,c=5"),
]
NOT_FAST = [r"(?:sp|tr)\|(?P<acc>", r"(?P<db>gb|emb)?", r"_(?P<species>", r"(?:\s|$)"]
GENERAL = [
    (r".*taxid=(?P<tax_id>\d+)", "a b taxid=12 x"),
    (r"(?P<name>.+)/(?P<mate>[12])$", "a/b/1"),
    (r"(?P<name>.*?)\|(?P<rest>.*)", "a|b|c"),
    (r"(?P<name>\S+) (?P<kind>forward|reverse)?", "x forward"),
    (r"(?P<a>\w+?)(?P<b>\d+)$", "ab12"),
    (r"(?P<a>.)(?P<b>[^|]{2,3})\|?", "éabc|"),
    (r"(?P<x>\w+)\b", "ab c"),
    (r"(?i)LBL\|(?P<x>\d+)", "lbl|1"),
    (r"(?P<a>\w)(?P=a)(?P<b>\d*)", "aa1"),
    (r"(?=.*size=(?P<size>\d+))(?P<name>[^;]+)", "ab;size=3"),
    (r"(?:(?P<a>\d)|x)+", "1x2"),
    (r"(?P<a>é)?(?P<b>.*)", "éb"),
    (r"(?:(?P<key>\w+)=(?P<value>[^;]*);)*", "a=1;b=2;"),
]
# Each takes a backtracking engine years to see that it does not match "aaa...": RE2 cannot stand in for it.
ENDLESS = [
    r"(?P<x>(?:a*)*)b",
    r"(?P<x>(?:a|)*)b",
    r"(?:(?P<x>a+))+b",
    r"(?=(?:\w+\s?)+$)(?P<x>.*)b",
    r"(?i)(?P<x>(?:\w+-?)+)!",
    r"(?P<x>(?:a|aa)+)(?P=x)b",
    r"(?!z)(?P<x>(?:(?:a{1,30}){1,30}){1,30})b",
    r"(?!z)(?P<x>.*.*.*.*.*.*)!",
    rf"(?!z)(?P<x>{'a?' * 40}{'a' * 40})b",
]


def buffer_of(headers: list[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Headers as they lie in a file, with sequences between them."""
    data, starts, ends = bytearray(), [], []
    for header in headers:
        data += b">"
        starts.append(len(data))
        data += header
        ends.append(len(data))
        data += b"\nACGT1|/\n"
    return np.frombuffer(data, np.uint8), np.array(starts, np.int64), np.array(ends, np.int64)


def rows_of(parsed: Parsed) -> list[dict[str, object] | None]:
    """One dict per header, None where it did not match."""
    rows: list[dict[str, object] | None] = []
    for i, matched in enumerate(parsed.matched):
        row: dict[str, object] = {}
        for name, column in parsed.columns.items():
            if isinstance(column, Integers):
                row[name] = int(column.values[i]) if column.valid[i] else None
            else:
                row[name] = column.flat[column.starts[i] : column.ends[i]].tobytes() if column.valid[i] else None
        assert matched or set(row.values()) == {None}
        rows.append(row if matched else None)
    return rows


def expected(headers: Headers, texts: list[bytes]) -> list[dict[str, object] | None]:
    rows: list[dict[str, object] | None] = []
    for text in texts:
        match = re.match(headers.regex, text.decode("utf-8", "surrogateescape"), re.ASCII)
        row: dict[str, object] | None = None if match is None else {}
        for column in headers.columns if match else ():
            value = match[column.name]
            if column.kind == "integer":
                row[column.name] = int(value) if value else None
            else:
                row[column.name] = None if value is None else value.encode("utf-8", "surrogateescape")
        rows.append(row)
    return rows


def every_way(headers: Headers, texts: list[bytes]) -> dict[str, list[dict[str, object] | None]]:
    """The rows from each engine that takes this regex."""
    buffer, starts, ends = buffer_of(texts)
    found = {"default": rows_of(headers.parse(buffer, starts, ends))}
    shape = Shape.of(tree_of(headers.regex), integers=[column.kind == "integer" for column in headers.columns])
    if shape:
        found["fast"] = rows_of(headers._parse_fast(shape, buffer, starts, ends))
    headers.__dict__["_shape"] = None
    if headers.path == "re" and headers._backtracks:
        return found
    found[headers.path] = rows_of(headers.parse(buffer, starts, ends))
    headers.__dict__["_re2"] = None
    assert headers.path == "re"
    headers._backtracks = False  # these texts are short
    found["re"] = rows_of(headers.parse(buffer, starts, ends))
    return found


@st.composite
def mutated(draw: st.DrawFn, header: str) -> bytes:
    """A header with up to three bytes or pieces replaced, removed or added."""
    data = bytearray(header.encode())
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 3)))
        piece = st.text("aZ05|/ :;=._-+\t\r#\u00e9\u0665", max_size=3).map(str.encode)
        data[start:end] = draw(piece | st.just(b"\xff") | st.just(bytes(data[start : start + 5])))
    return bytes(data)


# -- the same as re


@pytest.mark.parametrize(("regex", "header"), DELIMITED + GENERAL)
def test_every_engine_finds_what_re_finds(regex: str, header: str):
    @given(st.lists(mutated(header), max_size=8))
    @settings(max_examples=num_examples(25), deadline=None)
    @example([header.encode(), b"", header.encode() + b"\xff"])
    @example([])
    def check(texts: list[bytes]) -> None:
        headers = Headers(regex)
        wanted = expected(headers, texts)
        for way, rows in every_way(headers, texts).items():
            assert rows == wanted, way

    assert re.match(regex, header, re.ASCII)
    check()


SETS = [r"\d", r"\w", r"\S", r"\s", "[^|]", "[^/\\s]", "[ab]", "[0-5]", ".", "a", "1", "/", r"\|", "ab", r"[\D]", r"\W"]
TIMES = ["", "", "+", "*", "?", "{2}", "{1,3}"]


@st.composite
def any_regex(draw: st.DrawFn) -> str:
    """Runs, groups, options inside options, alternatives, lazy or not, anchored or not."""
    names = iter("abcdefghijklmnopqrstuvwxy")

    def part(depth: int) -> str:
        kind = draw(st.integers(0, 9))
        if depth == 0 or kind < 4:
            return draw(st.sampled_from(SETS)) + draw(st.sampled_from(TIMES))
        if kind < 7:
            body = f"(?P<{next(names)}>{parts(depth - 1)})"
        elif kind < 9:
            body = f"(?:{parts(depth - 1)})"
        else:
            body = f"(?:{parts(depth - 1)}|{parts(depth - 1)})"
        return body + draw(st.sampled_from(["", "", "?", "?", "+", "*?"]))

    def parts(depth: int) -> str:
        return "".join(part(depth) for _ in range(draw(st.integers(1, 2))))

    start, end = draw(st.sampled_from(["", "^"])), draw(st.sampled_from(["", "$"]))
    return f"{start}{parts(2)}(?P<z>{parts(1)}){end}"


@st.composite
def delimited_regex(draw: st.DrawFn) -> str:
    """Runs with delimiters between, in groups or not, optional or not, the way headers look."""
    names = iter("abcdefghijklmnopqrstuvwxy")

    def piece(depth: int) -> str:
        chars = st.sampled_from([r"\d", "[ab]", "[15]", "[a-c1]", r"[^|/ ]", r"\w", "a", "1", "b1"])
        run = draw(chars) + draw(st.sampled_from(["+", "+", "*", "", "{2}", "{1,2}"]))
        if draw(st.booleans()):
            run = f"(?P<{next(names)}>{run})" + draw(st.sampled_from(["", "?"]))
        delimiter = draw(st.sampled_from(["", r"\|", "/", " ", r"\|/"]))
        both = delimiter + run if draw(st.integers(0, 2)) else run + delimiter
        if depth and draw(st.booleans()):
            both += piece(depth - 1)
        wrap = draw(st.integers(0, 5))
        if wrap == 0:
            both = f"(?P<{next(names)}>{both})"
        return f"(?:{both})?" if wrap in (1, 2) else both

    end = draw(st.sampled_from(["", "$", "(?P<y>.*)", "(?P<y>.*)$", r"\s*(?P<y>.+)?"]))
    return "^" + "".join(piece(2) for _ in range(draw(st.integers(1, 3)))) + f"(?P<z>{piece(0)}){end}"


@given(any_regex() | delimited_regex(), st.lists(st.text("ab15|/ é", max_size=9), max_size=20))
@settings(max_examples=num_examples(200), deadline=None)
def test_random_regexes_mean_the_same_in_every_engine(regex: str, some: list[str]):
    # A repeated group of repeated things, (.*(.?)*?)*?, takes Python's `re` minutes to see that it does not match.
    longest = 5 if re.search(r"\)(\+|\*\?)", regex) else 9
    texts = [text[:longest].encode() for text in some]
    try:
        headers = Headers(regex)
    except BadSource:  # it would backtrack too much
        reject()
    wanted = expected(headers, texts)
    for way, rows in every_way(headers, texts).items():
        assert rows == wanted, way


# -- columns


def test_a_group_of_digits_is_an_integer_and_any_other_a_text():
    for pattern in (r"\d+", "[0-9]+", r"\d{1,9}", r"20\d\d", "1|2", r"\d*", "[12]", r"(?:\d\d)+", r"\d+?"):
        assert Headers(f"(?P<x>{pattern})").columns == (HeaderColumn("x", "integer"),), pattern
    for pattern in (r"\w+", r"-?\d+", r"[0-9.]+", "", "x", r"\d+|x", r"\D", r"[^\d]", "٣"):
        assert Headers(f"(?P<x>{pattern})").columns == (HeaderColumn("x", "text"),), pattern


def test_a_group_of_digits_inside_a_look_ahead_or_atomic_group_is_an_integer_too():
    assert Headers(r"(?=(?P<a>\d+))(?>(?P<b>\d+))(?P<c>(?:\d)++)").columns == (
        HeaderColumn("a", "integer"),
        HeaderColumn("b", "integer"),
        HeaderColumn("c", "text"),
    )


def test_columns_come_in_pattern_order():
    parsed = Headers(SEED).parse(*buffer_of([b"lbl|12||150|r1/2", b"other"]))
    assert list(parsed.columns) == ["class_id", "tax_id", "readlen", "name", "mate"]
    assert [column.name for column in Headers(SEED).columns] == list(parsed.columns)
    assert rows_of(parsed) == [{"class_id": 12, "tax_id": None, "readlen": 150, "name": b"r1", "mate": 2}, None]
    assert parsed.columns["class_id"].values.tolist() == [12, 0]


def test_only_ascii_digits_are_digits():
    for regex in (r"(?P<x>\d+)", r".*?(?P<x>\d+)", r"(?=.)(?P<x>\d+)"):
        assert rows_of(Headers(regex).parse(*buffer_of(["٣".encode(), b"3"]))) == [None, {"x": 3}]


def test_the_largest_integer_fits_and_a_larger_one_is_refused_with_its_header():
    largest = 2**63 - 1
    for regex in (r"(?P<x>\d+)", r"(?P<x>\d\d*)(?P<y>;)?", r".*?(?P<x>\d+)$", r"(?=.)(?P<x>\d+)"):
        headers = Headers(regex)
        texts = [b"%d" % largest, b"0" * 40 + b"7", b"x" + b"9" * 30 if regex[0] == "(" else b"1"]
        for rows in every_way(headers, texts).values():
            assert [row and row["x"] for row in rows[:2]] == [largest, 7]
        for digits in (b"9223372036854775808", b"9" * 19, b"9" * 30, b"9" * 5000):
            with pytest.raises(BadSource, match=r"header '99*2?.*9223372036854775807"):
                every_way(Headers(regex), [b"1", digits])
            with pytest.raises(BadSource, match="9223372036854775807"):
                Headers(regex)._parse_re(["1", digits.decode()])


def test_an_integer_too_large_in_a_part_that_does_not_match_is_no_error():
    shape = Shape.of(tree_of(r"a(?:(?P<x>\d+);)?"), integers=[True])
    assert shape is not None
    spans = shape.match(*buffer_of([b"a" + b"9" * 30]))
    assert (spans.too_large, spans.matched.tolist(), spans.valid.tolist()) == (-1, [True], [[False]])


# -- ways


def test_delimiter_shaped_regexes_take_the_fast_path():
    for regex, _ in DELIMITED:
        is_fast = Shape.of(tree_of(regex), integers=[False] * 20) is not None
        assert is_fast != any(part in regex for part in NOT_FAST), regex
        assert (Headers(regex).path == "fast") == is_fast


def test_regexes_that_may_need_backtracking_do_not_take_the_fast_path():
    for regex in (r"\w+_(?P<x>\w+)", r".*(?P<x>\d)", r"\d+(?P<x>\d)", r"(?P<x>a)?a", "(?P<x>.)", "(?P<x>[^a]{2})"):
        assert Shape.of(tree_of(regex), integers=[False]) is None, regex
    for regex, _ in GENERAL:
        assert Shape.of(tree_of(regex), integers=[False] * 20) is None, regex


def test_look_around_and_back_references_use_python_and_other_regexes_re2():
    paths = [Headers(regex).path for regex, _ in GENERAL]
    assert paths == ["re2"] * 6 + ["re"] * 7


@pytest.mark.parametrize("regex", ENDLESS)
def test_a_regex_that_could_backtrack_for_ever_is_refused(regex: str):
    with pytest.raises(BadSource, match=re.escape(repr(regex))):
        Headers(regex)


@pytest.mark.parametrize("regex", [r"(?P<x>(?:a+)+)b", r"(?P<x>(?:\w+\s?)+)!$", r"(?P<x>.*.*.*.*.*.*)!"])
def test_nested_repetitions_run_in_linear_time_where_re2_can(regex: str):
    headers, endless = Headers(regex), b"a" * 10_000
    assert not headers.parse(*buffer_of([endless])).matched.any()
    with pytest.raises(BadSource, match="UTF-8"):
        headers.parse(*buffer_of([endless + b"\xff"]))


def test_a_file_that_is_not_utf_8_keeps_its_bytes():
    for regex in (r"(?P<x>[^|]+)", r"(?P<x>.*?)\|", r"(?=.)(?P<x>[^|]+)"):
        rows = rows_of(Headers(regex).parse(*buffer_of([b"\xe9\xff|", "é|".encode(), b"a|"])))
        assert rows == [{"x": b"\xe9\xff"}, {"x": "é".encode()}, {"x": b"a"}]


# -- errors


def test_a_regex_without_named_groups_is_refused_with_an_example():
    with pytest.raises(BadSource, match=r"'\(a\)'.*\?P<class_id>"):
        Headers("(a)")


def test_a_regex_that_does_not_compile_is_refused_with_the_reason_and_an_example():
    for regex in ("(?P<x>", "(?P<1>a)", "(?P<x>a)(?P<x>b)", "(?u)(?P<x>a)", "(?P<x>a{99999999999})"):
        with pytest.raises(BadSource, match=r"\?P<class_id>"):
            Headers(regex)
