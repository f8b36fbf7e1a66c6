"""Every format gives the same rows, and what is wrong with one is said with its line."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millstream.core.rows import SUFFIXES, read_rows
from millstream.core.tables import to_parquet
from millstream.errors import BadSource

ROWS = [{"a": "é\n“x”, y", "b": "1"}, {"a": "", "b": "2"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = 'a,b\n"é\n“x”, y",1\n,2\n'


def write(path: Path) -> Path:
    contents = {
        ".json": json.dumps(ROWS, indent=1),
        ".csv": CSV,
        ".tsv": CSV.replace(",1", "\t1").replace("\n,", "\n\t"),
    }
    if path.suffix in (".parquet", ".pq"):
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        text = contents.get(path.suffix, LINES)
        path.write_text(text.replace("a,b", "a\tb") if path.suffix == ".tsv" else text, encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".JSONL", ""])
def test_every_format_gives_the_same_rows(suffix: str, tmp_path: Path):
    assert list(read_rows(write(tmp_path / f"rows{suffix}"))) == ROWS


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (LINES, ROWS),
        ("\n" + LINES, ROWS),
        ("\ufeff" + LINES, ROWS),
        (json.dumps(ROWS), ROWS),
        (json.dumps(ROWS[0]), ROWS[:1]),
        (json.dumps(ROWS[0], indent=1), ROWS[:1]),
        (json.dumps({"data": ROWS}) + "\n", [{"data": ROWS}]),
        ("[]", []),
    ],
    ids=["lines", "blank line first", "lines after a mark", "list", "object", "long object", "nested object", "empty"],
)
def test_a_json_file_is_a_list_an_object_or_lines(content: str, rows: list[object], tmp_path: Path):
    path = tmp_path / "rows.json"
    path.write_text(content, encoding="utf-8")
    assert list(read_rows(path)) == rows


BAD = {
    "a json line": ("r.jsonl", b'{"a": 1}\n\n{"a"\n', "line 3 is not valid JSON"),
    "a line that is no object": ("r.jsonl", b'{"a": 1}\n[2]\n', "line 2 is not a JSON object"),
    "utf-8": ("r.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "line 2 is not valid UTF-8"),
    "utf-8 in csv": ("r.csv", b"a\n1\n\xff\n", "line 3 is not valid UTF-8"),
    "a json line in json": ("r.json", b'{"a": 1}\n{"a"\n', "line 2 is not valid JSON"),
    "a cut-off list": ("r.json", b'[{"a": 1}', "is not valid JSON"),
    "a number": ("r.json", b"3", "must be a JSON object or a list of them"),
    "a long row": ("r.csv", b"a,b\n1,2\n3,4,5\n", "line 3: a row of 3 cells, but the header has 2"),
    "an open quote": ("r.csv", b'a,b\n1,"2\n', "line 2 is not valid CSV"),
    "two columns of a name": ("r.tsv", b"a\ta\n1\t2\n", "two columns 'a'"),
    "another delimiter": ("r.csv", b"a;b\n1;2\n", "separated by ';'"),
    "no parquet": ("r.parquet", b"PAR1", "is not a valid Parquet file"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_said_with_file_and_line(case: str, tmp_path: Path):
    name, content, message = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadSource, match=re.escape(f"{tmp_path / name}: ") + ".*" + re.escape(message)):
        list(read_rows(tmp_path / name))


def test_a_damaged_parquet_file_with_a_checksum_is_refused(tmp_path: Path):
    path = tmp_path / "rows.parquet"
    data = bytearray(to_parquet(pa.Table.from_pylist(ROWS)))
    data[8] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadSource, match="checksum"):
        list(read_rows(path))
