"""Rows of Parquet, JSON lines and CSV are records like any other: by number, shuffled, split, labelled, loaded."""

import csv
import gzip
import json
import multiprocessing
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

import millstream as ms
from millstream.core.collection import Collection
from millstream.core.registry import kind_at
from millstream.errors import BadSource, OverBudget, StaleIndex
from millstream.tables import rows as rows_module
from millstream.tables.rows import Rows
from support.commands import run_here

NUM_ROWS = 1000


def row(number: int) -> dict[str, Any]:
    text = ["plain", 'with "quotes"', "two\nlines", "two\r\nlines", "a,b\tc", "Mühle 🌾", " spaces "][number % 7]
    return {
        "question_id": f"q{number // 2}",
        "answer": f"{text} {number}" * (1 + number % 50),
        "score": number / 8,
        "label": number % 3,
        "code": f"{number:05d}",
    }


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    """Records as a table of the format that the name says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=128)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(records[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(records)
    return path


@pytest.fixture(scope="module", params=["parquet", "jsonl", "csv", "tsv"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tables") / f"answers.{request.param}", [row(n) for n in range(NUM_ROWS)])


@pytest.fixture
def answers(path: Path) -> Rows:
    return opened(path)


def opened(*paths: Path, **options: Any) -> Rows:
    found = ms.open(list(paths), **options)
    assert isinstance(found, Rows)
    return found


def test_every_row_is_read_by_number_exactly(answers: Rows):
    assert len(answers) == NUM_ROWS and answers.field_names == list(row(0))
    numbers = np.random.default_rng(0).permutation(NUM_ROWS)
    assert all(answers[int(number)] == row(int(number)) for number in numbers[:50])
    assert list(answers) == [row(number) for number in range(NUM_ROWS)]
    assert answers[-1] == row(NUM_ROWS - 1)
    some = answers.fetch([7, 3, 3, -1, 500], ["score", "answer", "label"])
    wanted = [row(number) for number in (7, 3, 3, NUM_ROWS - 1, 500)]
    assert isinstance(some["score"], np.ndarray) and some["score"].dtype == np.float64
    assert isinstance(some["label"], np.ndarray) and some["label"].dtype == np.int64
    assert {name: list(values) for name, values in some.items()} == {
        name: [record[name] for record in wanted] for name in some
    }
    for name in row(0):
        assert answers.column(name).to_pylist() == [row(number)[name] for number in range(NUM_ROWS)]
    for wrong in (NUM_ROWS, -NUM_ROWS - 1):
        with pytest.raises(IndexError, match=str(NUM_ROWS)):
            answers[wrong]
    assert answers.fetch([], ["score"]) == {"score": []}
    with pytest.raises(ValueError, match=r"'nothing'.*question_id"):
        answers.fetch([0], ["nothing"])


@pytest.mark.parametrize("memory", ["1GB", "200kB"])
def test_an_epoch_has_every_row_once_in_any_order_and_resumes(path: Path, memory: str):
    answers = opened(path)
    features = ms.features.fields("score", "answer", "label")

    def loader() -> ms.Loader:
        return ms.Loader(answers, batch_size=32, features=features, seed=3, memory=memory, threads=2)

    whole = list(loader())
    numbers = [number for batch in whole for number in batch["numbers"].tolist()]
    assert sorted(numbers) == list(range(NUM_ROWS)) and numbers != sorted(numbers)
    for batch in whole:
        wanted = [row(number) for number in batch["numbers"].tolist()]
        assert batch["score"].tolist() == [record["score"] for record in wanted]
        assert batch["answer"] == [record["answer"] for record in wanted]
    interrupted = loader()
    for _, batch in zip(range(5), interrupted, strict=False):
        assert len(batch["numbers"]) == 32
    state = interrupted.state_dict()
    again = loader()
    again.load_state_dict(json.loads(json.dumps(state)))
    assert [n for batch in again for n in batch["numbers"].tolist()] == numbers[5 * 32 :]


def test_splits_keep_rows_of_a_question_together_and_labels_join(answers: Rows):
    train, test = ms.split(answers, {"train": 0.7, "test": 0.3})
    names = [set(one.column("question_id").to_pylist()) for one in (train, test)]
    assert len(train) + len(test) == NUM_ROWS and not names[0] & names[1]
    by_code, rest = ms.split(answers, {"a": 0.5, "b": 0.5}, by="code")
    assert len(by_code) + len(rest) == NUM_ROWS
    labelled = ms.labelled(answers, column="code", values={f"{number:05d}": number % 2 for number in range(NUM_ROWS)})
    batch = next(iter(ms.Loader(labelled, batch_size=8, features=ms.features.fields("label"), order="none")))
    assert batch["label"].tolist() == [0, 1] * 4
    judged = pa.table({"question_id": [f"q{n}" for n in range(500)], "verdict": [n % 2 for n in range(500)]})
    joined: Any = ms.labelled(answers, judged, column="verdict")
    assert joined.labels.tolist() == [number // 2 % 2 for number in range(NUM_ROWS)]


def hashed(answers: Collection) -> list[Any]:
    return [answers[number] for number in (999, 0, 500)]


def test_rows_are_read_in_threads_forks_spawned_processes_and_after_a_pickle(answers: Rows):
    wanted = hashed(answers)
    again = pickle.loads(pickle.dumps(answers))
    assert hashed(again) == wanted and again.fingerprint == answers.fingerprint
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(hashed, [answers] * 16)) == [wanted] * 16
    with answers._cache.lock, multiprocessing.get_context("fork").Pool(1) as processes:  # pyright: ignore
        assert processes.apply_async(hashed, [answers]).get(60) == wanted
    stream = answers.stream(ms.features.fields("score"), batch_size=64, seed=1)
    numbers = [n for batch in DataLoader(stream, batch_size=None, num_workers=2) for n in batch["numbers"].tolist()]
    assert sorted(numbers) == list(range(NUM_ROWS))


def test_several_files_and_patterns_are_one_collection(path: Path, tmp_path: Path):
    other = write(tmp_path / f"more{path.suffix}", [row(number) for number in range(2000, 2100)])
    both = opened(path, other)
    assert len(both) == NUM_ROWS + 100
    assert both.fetch([NUM_ROWS + 5, 3], ["code"])["code"] == ["02005", "00003"]
    matched: Any = ms.open(tmp_path / f"*{path.suffix}")
    assert [record["code"] for record in matched] == [row(number)["code"] for number in range(2000, 2100)]
    write(tmp_path / f"other{path.suffix}", [{"a": 1, "b": 2}])
    with pytest.raises(BadSource, match=r"other columns.*\ba\b"):
        opened(other, tmp_path / f"other{path.suffix}")


def test_a_file_that_changes_while_it_is_open_is_refused(path: Path, tmp_path: Path):
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    answers = opened(copy)
    before = answers.fingerprint
    write(copy, [row(number) for number in range(1, 50)])
    with pytest.raises(StaleIndex, match="changed since it was opened"):
        answers.fetch([0])
    assert opened(copy).fingerprint != before


def test_inspect_and_verify_work_on_tables(path: Path):
    code, out, _ = outcome("inspect", str(path), "--examples", "1")
    assert code == 0 and "1,000 rows" in out and "answer" in out and "double" in out
    assert outcome("verify", str(path))[0] == 0
    code, _, err = outcome("view", str(path))
    assert code == 2 and "traces and reads" in err


def outcome(*words: str) -> tuple[int, str, str]:
    return run_here(*words)


# -- Parquet


def test_decoded_row_groups_stay_within_the_budget(tmp_path: Path):
    path = write(tmp_path / "big.parquet", [{"n": number, "text": f"{number}" * 200} for number in range(20_000)])
    budget = 600_000
    answers = opened(path).within(budget)
    most = 0
    for number in np.random.default_rng(0).integers(0, 20_000, 300).tolist():
        assert answers[number]["text"] == f"{number}" * 200
        most = max(most, answers._cache.held_bytes)  # pyright: ignore[reportPrivateUsage]
    assert budget / 4 < most <= budget
    assert answers.medium.num_bytes > 10 * budget and not answers.medium.is_random
    assert "order window" in ms.Loader(answers, batch_size=16, memory="2MB", notify=lambda _: None).plan
    with pytest.raises(OverBudget, match="row_group_size"):
        answers.within(20_000).fetch([0])


def test_types_of_parquet_beyond_text_and_numbers(tmp_path: Path):
    values = {
        "large": pa.array([2**64 - 1, 0, 1], pa.uint64()),
        "small": pa.array([1, 2, 3], pa.int8()),
        "half": pa.array([1.5, 2.5, None], pa.float32()),
        "flag": pa.array([True, False, True]),
        "ids": pa.array([[1, 2, 3], [], [4]], pa.list_(pa.int32())),
        "vector": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2)),
        "names": pa.array([["a"], None, ["b", "c"]]),
        "coded": pa.array(["x", "y", "x"]).dictionary_encode(),
        "struct": pa.array([{"a": 1}, {"a": 2}, None]),
    }
    pq.write_table(pa.table(values), tmp_path / "types.parquet")
    found = opened(tmp_path / "types.parquet")
    got = {name: np.asarray(found[0][name]).tolist() for name in ("large", "ids", "vector", "coded")}
    assert got == {"large": 2**64 - 1, "ids": [1, 2, 3], "vector": [1, 2], "coded": "x"}
    assert [record["names"] for record in found] == [["a"], None, ["b", "c"]]
    assert found[2]["half"] is None and found[1]["flag"] is False and found[1]["struct"] == {"a": 2}
    features = ms.features.fields("ids", "vector", "small", "flag")
    batch = next(iter(ms.Loader(found, batch_size=3, features=features, order="none")))
    assert batch["ids"].tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0]] and batch["ids_mask"].sum() == 4
    assert batch["vector"].tolist() == [[1, 2], [3, 4], [5, 6]] and batch["small"].dtype.itemsize == 8
    assert found.column("coded").to_pylist() == ["x", "y", "x"]


def test_a_damaged_parquet_file_is_an_error_of_one_line(tmp_path: Path):
    path = write(tmp_path / "a.parquet", [row(number) for number in range(300)])
    whole = path.read_bytes()
    for damaged in (whole[:-4], whole[:100], b"not parquet at all", whole[: len(whole) // 2] + whole[-8:]):
        path.write_bytes(damaged)
        with pytest.raises(BadSource, match=r"a\.parquet") as caught:
            opened(path).fetch([0, 299])
        assert "\n" not in str(caught.value)
    path.write_bytes(b"")
    with pytest.raises(BadSource, match="empty"):
        opened(path)


# -- text


def types_of(path: Path, text: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    path.write_text(text, newline="")
    found = opened(path)
    return found.types, list(found)


def test_numbers_in_csv_are_numbers_only_if_every_cell_is_written_as_one(tmp_path: Path):
    cells = {
        "int64": ["0", "-5", "123456789012345678", ""],
        "double": ["0.5", "1", "", "1e-3"],
        "text zip": ["01234", "98765", "11111", "0"],
        "text late": ["1", "2", "3", "four"],
        "text long": ["1", "1234567890123456789012", "2", "3"],
        "text exact": ["0.5", "12345678901234567", "1", "2"],
        "text na": ["1", "NA", "2", "3"],
        "text plus": ["+1", "2", "3", "4"],
        "text empty": ["", "", "", ""],
        "double nan": ["nan", "1", "2", "-inf"],
        "text group": ["1_000", "2", "3", "4"],
    }
    lines = [",".join(cells), *map(",".join, zip(*cells.values(), strict=True))]
    kinds, rows = types_of(tmp_path / "a.csv", "\ufeff" + "\r\n".join(lines))
    assert kinds == {name: name.split()[0] for name in cells}
    for name, kind in kinds.items():
        if kind == "text":
            assert [record[name] for record in rows] == cells[name]
    assert [record["int64"] for record in rows] == [0, -5, 123456789012345678, None]
    assert [record["double"] for record in rows] == [0.5, 1.0, None, 0.001]


def test_a_value_of_another_type_far_into_a_file_is_not_read_as_wrong(tmp_path: Path):
    numbers = [*map(str, range(20_000)), "none"]
    kinds, rows = types_of(tmp_path / "a.csv", "n,m\n" + "".join(f"{number},1\n" for number in numbers))
    assert kinds == {"n": "text", "m": "int64"} and [record["n"] for record in rows] == numbers
    lines = [{"n": number} for number in range(20_000)]
    mixed = opened(write(tmp_path / "a.jsonl", [*lines, {"n": "none"}]))
    assert mixed.types == {"n": "mixed"} and mixed[20_000] == {"n": "none"} and mixed[0] == {"n": 0}
    with pytest.raises(BadSource, match="'n' have different types"):
        ms.split(mixed, {"a": 0.5, "b": 0.5}, by="n")


def test_values_of_json_lines_are_kept_as_they_are(tmp_path: Path):
    records = [
        {"a": 1, "b": 1, "c": None, "big": 2**70, "list": ["x"], "flag": True, "near": 2**53 + 1},
        {"a": 2, "b": 0.5, "c": "text", "big": 1, "list": [], "flag": False, "near": 0.5, "only": {"x": [1]}},
    ]
    found = opened(write(tmp_path / "a.jsonl", records))
    assert found.types == {
        "a": "int64", "b": "double", "c": "text", "big": "mixed", "list": "mixed", "flag": "bool", "near": "mixed",
        "only": "mixed",
    }  # fmt: skip
    assert list(found) == [{**records[0], "only": None}, records[1]]
    assert found[0]["near"] == 2**53 + 1 and isinstance(found[0]["b"], float)
    (tmp_path / "b.jsonl").write_text('\n{"a": 1}\n\n  \n{"a": 2}')
    assert list(opened(tmp_path / "b.jsonl")) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "line 2 is not valid JSON"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', "line 2 is not a JSON object"),
        ("a.jsonl", b'{"a": "\xff"}\n', "line 1 is not valid UTF-8"),
        ("a.csv", b"a,b\n1,2\n3\n", "line 3: a row of 1 cells, but the header has 2"),
        ("a.csv", b'a,b\n1,"2\n3,4\n', "not valid CSV"),
        ("a.csv", b'a,b\n1,"2" x\n', "line 2 is not valid CSV"),
        ("a.csv", b"a,b\r1,2\r", "not valid CSV"),
        ("a.csv", b"a,a\n1,2\n", "two columns 'a'"),
        ("a.csv", b"a;b\n1;2\n", "separated by ';'"),
        ("a.csv", b"\n\n", "has no columns"),
        ("a.csv", b"a,b\n1,\xff\n", "line 2 is not valid UTF-8"),
        ("a.csv.gz", gzip.compress(b"a,b\n1,2\n", mtime=0), "gunzip -k"),
    ],
)
def test_a_damaged_text_table_is_an_error_of_one_line(tmp_path: Path, name: str, text: bytes, found: str):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(BadSource, match=found) as caught:
        ms.open(tmp_path / name)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_table_is_an_error_that_names_it(tmp_path: Path):
    for name in ("none.parquet", "none.csv", "none*.jsonl"):
        with pytest.raises(BadSource, match=r"no (such file|files match)"):
            ms.open(tmp_path / name)


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_the_index_of_a_large_file_is_kept_and_a_stale_or_damaged_one_is_not_used(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    scans: list[Path] = []
    really: Callable[..., Any] = rows_module.scan
    monkeypatch.setattr(rows_module, "SMALL_BYTES", 0)
    monkeypatch.setattr(rows_module, "scan", lambda source, **more: scans.append(source.path) or really(source, **more))
    path = write(tmp_path / f"a.{suffix}", [row(number) for number in range(500)])
    index = tmp_path / f"a.{suffix}.rows"
    first = opened(path)
    assert index.exists() and len(scans) == 1
    assert list(opened(path)) == list(first) and len(scans) == 1
    assert opened(path).fingerprint == first.fingerprint
    write(path, [row(number) for number in range(400)])
    assert len(opened(path)) == 400 and len(scans) == 2
    assert "changed since it was indexed" in capsys.readouterr().err
    damaged = bytearray(index.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    index.write_bytes(damaged)
    assert len(opened(path)) == 400 and len(scans) == 3
    elsewhere = opened(path, index_dir=tmp_path / "indexes")
    assert len(elsewhere) == 400 and (tmp_path / "indexes" / index.name).exists()


def test_the_kind_of_a_path_is_a_table_by_its_name_alone(tmp_path: Path):
    for name in ("a.parquet", "b.CSV", "c.jsonl.gz", "none/*.tsv"):
        assert kind_at(tmp_path / name) == "tables"
    (tmp_path / "folder.csv").mkdir()
    os.mknod(tmp_path / "reads.txt")
    assert kind_at(tmp_path / "reads.txt") == "reads" and kind_at(tmp_path / "folder.csv") != "tables"
